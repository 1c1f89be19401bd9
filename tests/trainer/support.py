"""A tiny policy and made-up batches for it."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from whimbrel import wire
from whimbrel.delta import content_digest
from whimbrel.spec import RunSpec, parse_run_spec
from whimbrel.wire.payload import GroupPayload, Sample, VersionSpan
from whimbrel.wire.work import BatchGroup

VOCABULARY = 64


def tiny_model(seed: int = 0, *, tied: bool = True, kind: str = "llama") -> torch.nn.Module:
    """A causal LM of some 30,000 parameters in float32; 7 key rows do not divide evenly over ranks."""
    shared = {
        "vocab_size": VOCABULARY + 1, "hidden_size": 32, "intermediate_size": 60, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 128, "tie_word_embeddings": tied,
    }  # fmt: skip
    config = LlamaConfig(**shared) if kind == "llama" else Qwen3Config(head_dim=8, **shared)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def save_model(folder: Path, seed: int = 0) -> Path:
    """The tiny model as a Hugging Face folder."""
    tiny_model(seed).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"made": "for tests"}')
    return folder


def make_spec(model: str = "unused", **changes: object) -> RunSpec:
    """A run of small batches with a learning rate that moves bf16 bits."""
    document = {
        "name": "tiny", "model": model, "batch_size": 8, "max_steps": 6, "seed": 7,
        "algorithm": {"group_size": 4, "micro_batch_tokens": 96},
        "optimizer": {"lr": 1e-3, "warmup_steps": 2},
        "staleness": {"max_versions": 4},
    }  # fmt: skip
    return parse_run_spec({**document, **changes})


def make_group(step: int, place: int, *, samples: int = 4, lag: int = 1) -> GroupPayload:
    """A prompt group that depends on its arguments alone; tokens carry versions up to `lag` behind the step."""
    rng = random.Random(step * 1000 + place)
    made = []
    for index in range(samples):
        count = rng.randint(1, 12)
        first = rng.randint(0, count)
        old = max(0, step - rng.randint(0, lag))
        made.append(
            Sample(
                sample=index,
                tokens=[rng.randrange(VOCABULARY) for _ in range(count)],
                logprobs=[-rng.random() * 4 - 0.5 for _ in range(count)],
                spans=[VersionSpan(old, 0, first), VersionSpan(step, first, count - first)],
                finish_reason="stop",
                reward=float(rng.random() < 0.5) + 0.1 * index,
            )
        )
    return GroupPayload(
        group_id=f"grp_{step}_{place}",
        index=step * 2 + place,
        attempt=1,
        prompt_tokens=[rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 8))],
        samples=made,
    )


def pack_group(group: GroupPayload) -> tuple[BatchGroup, bytes]:
    """The ledger's entry for a group, and its payload chunk."""
    data = wire.encode_message(group)
    spans = [span.version for sample in group.samples for span in sample.spans]
    entry = BatchGroup(
        group_id=group.group_id,
        index=group.index,
        payload=content_digest(data),
        payload_bytes=len(data),
        min_version=min(spans),
        max_version=max(spans),
    )
    return entry, data
