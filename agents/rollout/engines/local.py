"""The default engine: transformers on CPU or GPU, batched decoding with a KV cache, weights patched in place."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig

from agents.rollout.engines.base import Row
from agents.rollout.engines.cache import BatchCache
from agents.rollout.engines.sampling import draw, uniforms
from agents.rollout.engines.weights import ModelWeights
from whimbrel.delta import Bits, Change, Layout
from whimbrel.limits import PREFILL_TOKENS
from whimbrel.spec import RunSpec


class TransformersEngine:
    """See `Engine`. Rows wait until the next step prefills them, and join the batch then."""

    def __init__(self, temperature: float, kv_cache: str, device: str = "") -> None:
        self.version = -1
        self._temperature = temperature
        self._kv_cache = kv_cache
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        # bf16 arithmetic is slow on most CPUs; float32 holds bf16's values exactly.
        self._dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        self._waiting: list[Row] = []
        self._running: list[Row] = []
        self._cache: BatchCache | None = None

    @classmethod
    def of(cls, spec: RunSpec) -> TransformersEngine:
        """An engine with the run's sampling and sync settings."""
        return cls(spec.sampling.temperature, spec.sync.kv_cache)

    def load(self, version: int, files: Path, layout: Layout, tensors: Mapping[str, Bits]) -> None:
        self.version = -1
        self._tokenizer = AutoTokenizer.from_pretrained(files)
        config = AutoConfig.from_pretrained(files)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=self._dtype)
        self._model = model.to(self._device).eval().requires_grad_(False)
        accepted = inspect.signature(self._model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"  # renamed within transformers 5
        self.weights = ModelWeights(self._model, layout)
        self.weights.fill(tensors)
        self._ends = _end_tokens(files, config, self._tokenizer)
        self._requeue()
        self.version = version

    def apply(self, version: int, changes: Iterable[Change]) -> None:
        self.version = -1  # should this be interrupted, the weights are no version at all
        self.weights.patch(changes)
        if self._kv_cache == "recompute":
            self._requeue()
        self.version = version

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        if self._tokenizer.chat_template:
            found = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            return [int(token) for token in found]
        return list(self._tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"])

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            assert not row.finish_reason, "a finished row cannot go on"
            assert len(row.tokens) < row.max_tokens, "a row at its bound is finished"
            self._waiting.append(row)

    @torch.inference_mode()
    def step(self) -> list[Row]:
        assert self.version >= 0, "no version is loaded"
        if not self._waiting and not self._running:
            return []
        logits: list[Tensor] = []
        if self._running:
            logits.append(self._decode())
        while self._waiting:
            logits.append(self._prefill())
        rows = self._running
        chances = uniforms(
            np.array([row.seed for row in rows], np.uint64), np.array([len(row.tokens) for row in rows], np.uint64)
        )
        tokens, logprobs = draw(torch.cat(logits) if len(logits) > 1 else logits[0], self._temperature, chances)
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            row.append(token, logprob, self.version)
            if token in self._ends:
                row.finish_reason = "stop"
            elif len(row.tokens) >= row.max_tokens:
                row.finish_reason = "length"
        finished = [row for row in rows if row.finish_reason]
        if finished:
            self._keep([index for index, row in enumerate(rows) if not row.finish_reason])
        return finished

    def drop(self, group_id: str) -> int:
        lost = sum(len(row.tokens) for row in self._waiting + self._running if row.group_id == group_id)
        self._waiting = [row for row in self._waiting if row.group_id != group_id]
        kept = [index for index, row in enumerate(self._running) if row.group_id != group_id]
        if len(kept) < len(self._running):
            self._keep(kept)
        return lost

    def describe(self) -> dict[str, str]:
        return {
            "engine": "transformers",
            "dtype": str(self._dtype).removeprefix("torch."),
            "device": self._device.type,
            "kv_cache": self._kv_cache,
            "temperature": f"{self._temperature:g}",
        }

    def _requeue(self) -> None:
        """Have every running row prefilled again, so that its next token depends on the new weights alone."""
        self._waiting = self._running + self._waiting
        self._running, self._cache = [], None

    def _decode(self) -> Tensor:
        """Feed each running row its last token; returns the next logits [rows, vocabulary]."""
        assert self._cache is not None
        mask = torch.nn.functional.pad(self._cache.mask, (0, 1), value=1)
        inputs = torch.tensor([[row.tokens[-1]] for row in self._running], device=self._device)
        logits, self._cache = self._forward(inputs, mask, mask.sum(dim=1, keepdim=True) - 1, self._cache)
        return logits

    def _prefill(self) -> Tensor:
        """Feed waiting rows all their tokens, as many rows as fit in one pass, and let them join the batch."""
        rows, sequences = self._next_rows()
        unique = {sequence: place for place, sequence in enumerate(dict.fromkeys(sequences))}
        width = max(map(len, unique))
        inputs = torch.zeros((len(unique), width), dtype=torch.int64)
        mask = torch.zeros((len(unique), width), dtype=torch.int64)
        for sequence, place in unique.items():
            inputs[place, width - len(sequence) :] = torch.tensor(sequence)
            mask[place, width - len(sequence) :] = 1
        inputs, mask = inputs.to(self._device), mask.to(self._device)
        logits, cache = self._forward(inputs, mask, (mask.cumsum(dim=1) - 1).clamp_(min=0), None)
        # The samples of a group start from one prompt: it is computed once and its cache is copied.
        places = torch.tensor([unique[sequence] for sequence in sequences], device=self._device)
        cache = cache.select(places)
        self._cache = cache if self._cache is None else self._cache.join(cache)
        self._running = self._running + rows
        return logits[places]

    def _next_rows(self) -> tuple[list[Row], list[tuple[int, ...]]]:
        rows: list[Row] = []
        sequences: list[tuple[int, ...]] = []
        width = 0
        while self._waiting:
            sequence = (*self._waiting[0].prompt, *self._waiting[0].tokens)
            width = max(width, len(sequence))
            if rows and width * (len(rows) + 1) > PREFILL_TOKENS:
                break
            rows.append(self._waiting.pop(0))
            sequences.append(sequence)
        return rows, sequences

    def _forward(
        self, inputs: Tensor, mask: Tensor, positions: Tensor, cache: BatchCache | None
    ) -> tuple[Tensor, BatchCache]:
        filled = DynamicCache() if cache is None else cache.as_transformers()
        found = self._model(
            input_ids=inputs,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_argument: filled},
            **self._last_only,
        )
        return found.logits[:, -1], BatchCache.of(filled, mask)

    def _keep(self, indices: list[int]) -> None:
        self._running = [self._running[index] for index in indices]
        if not indices:
            self._cache = None
        elif self._cache is not None:
            self._cache = self._cache.select(torch.tensor(indices, device=self._device))


def _end_tokens(files: Path, config: Any, tokenizer: Any) -> set[int]:
    """Every token that ends a completion, as generation config, config and tokenizer name them."""
    named: list[Any] = [config.eos_token_id, tokenizer.eos_token_id]
    if (files / "generation_config.json").exists():
        named.append(GenerationConfig.from_pretrained(files).eos_token_id)
    ends: set[int] = set()
    for value in named:
        ends.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return ends
