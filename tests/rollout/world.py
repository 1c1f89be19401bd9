"""A tiny policy, a trainer that publishes versions of it, and a ledger in this process, for the tests of rollouts."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agents.rollout.engines.local import TransformersEngine
from whimbrel import limits
from whimbrel.checkpoint import Manifest, StepRecord, Store, WeightLog
from whimbrel.delta import Bits, Layout, Piece, TensorSpec, advance
from whimbrel.errors import Unreachable
from whimbrel.spec import RunSpec, parse_run_spec
from whimbrel.wire.cluster import Head
from whimbrel.wire.work import (
    Caller,
    GroupLease,
    GroupResult,
    LeaseReply,
    LeaseRequest,
    Phase,
    ReportReply,
    ReportRequest,
)

RUN = "run_test"
WORDS = [
    "<|pad|>",
    "<|end|>",
    *"0123456789+-=",
    "problem",
    "arithmetic",
    "the",
    "State",
    "final",
    "answer",
    "to",
    "following",
]


def make_spec(**changes: object) -> RunSpec:
    document: dict[str, object] = {
        "name": "test",
        "model": "builtin:arithmetic",
        "batch_size": 8,
        "algorithm": {"group_size": 4},
        "sampling": {"max_tokens": 12},
        "environment": {"task": "chain_sum", "params": {"max_terms": 2, "max_digits": 1}},
        "roles": {"rollout": {"count": 1, "max_groups": 3}},
        "seed": 7,
    }
    return parse_run_spec({**document, **changes})


def write_model_files(folder: Path, *, tied: bool = True) -> LlamaForCausalLM:
    """Config and tokenizer of a tiny model in `folder`; returns the model with random weights, float32 holding bf16."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="="))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.Whitespace()])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>").save_pretrained(
        folder
    )
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    config.save_pretrained(folder)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model


def layout_of(model: torch.nn.Module) -> Layout:
    return Layout.of(TensorSpec(name, "BF16", tuple(p.shape)) for name, p in model.named_parameters())


def bits_of(model: torch.nn.Module) -> dict[str, Bits]:
    return {
        name: p.detach().bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(-1).copy()
        for name, p in model.named_parameters()
    }


def loaded_engine(
    folder: Path, model: torch.nn.Module, kv_cache: str = "recompute", version: int = 0
) -> TransformersEngine:
    engine = TransformersEngine(1.0, kv_cache, "cpu")
    engine.load(version, folder, layout_of(model), bits_of(model))
    return engine


def stepped(bits: dict[str, Bits], seed: int, share: float = 0.2) -> dict[str, Bits]:
    """Other bits near the given ones."""
    rng = np.random.default_rng(seed)
    new = {name: values.copy() for name, values in bits.items()}
    for values in new.values():
        where = rng.random(values.size) < share
        values[where] ^= rng.integers(1, 64, int(where.sum())).astype(np.uint16)
    return new


class Trainer:
    """Publishes versions of the tiny policy into a store, and shows the newest head as etcd would."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.model = write_model_files(folder)
        self.layout = layout_of(self.model)
        self.bits = bits_of(self.model)
        self._log = WeightLog(store, RUN, 1)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        part = self._log.write_anchor(self.layout, self._pieces(self.bits))
        self.digest, self.manifest = self._log.publish_anchor(self.layout, 0, [part], files=files)
        self.manifests: list[Manifest] = [self.manifest]

    def step(self) -> None:
        new = stepped(self.bits, self.manifest.version)
        base = self._pieces(self.bits)
        delta = self._log.write_delta(self.layout, base, self._pieces(new))
        record = StepRecord(step=self.manifest.version, batch=[])
        self.digest, self.manifest = self._log.publish_delta(
            self.layout, self.manifest, self.digest, [delta.part], record
        )
        advance(base, delta)
        self.bits = new
        self.manifests.append(self.manifest)

    def head(self) -> Head:
        return Head(run_id=RUN, version=self.manifest.version, manifest=self.digest, epoch=1)

    def _pieces(self, bits: dict[str, Bits]) -> list[Piece]:
        return [Piece(spec.name, 0, bits[spec.name]) for spec in self.layout.tensors]


class Done(Exception):
    """The test ends the loop."""


class Place:
    """A worker's context without etcd and controller."""

    def __init__(self, spec: RunSpec, until: float = 20.0) -> None:
        self.spec = spec
        self.run_id = RUN
        self.caller = Caller(run_id=RUN, worker="rollout-0", epoch=5)
        self.paused = False
        self.heads: Head | None = None
        self.ended = False
        self.version = -1
        self.phases: list[str] = []
        self.notes: list[str] = []
        self.counters: dict[str, float] = {}
        self.gauges: dict[str, float] = {}
        self._deadline = time.monotonic() + until
        self._changed = threading.Condition()

    def check(self) -> None:
        if self.ended:
            raise Done
        assert time.monotonic() < self._deadline, f"too slow: {self.phases[-3:]} {self.notes[-1:]} {self.counters}"

    def show(self, head: Head) -> None:
        with self._changed:
            self.heads = head
            self._changed.notify_all()

    def head(self) -> tuple[Head, int] | None:
        return None if self.heads is None else (self.heads, self.heads.version + 1)

    def wait_head(self, after_version: int, timeout_s: float) -> Head | None:
        with self._changed:
            self._changed.wait_for(lambda: self.heads is not None and self.heads.version > after_version, timeout_s)
            return self.heads if self.heads is not None and self.heads.version > after_version else None

    def progress(
        self,
        phase: Phase,
        *,
        version: int | None = None,
        note: str | None = None,
        counters: dict[str, float] | None = None,
        gauges: dict[str, float] | None = None,
    ) -> None:
        self.phases.append(phase)
        self.version = self.version if version is None else version
        if note:
            self.notes.append(note)
        for name, amount in (counters or {}).items():
            self.counters[name] = self.counters.get(name, 0.0) + amount
        self.gauges.update(gauges or {})


class Ledger:
    """Hands out numbered groups and takes results; may be made to be away or to refuse."""

    def __init__(self, groups: int) -> None:
        self.left = groups
        self.away = False
        self.refuse: set[str] = set()
        self.release_now = True
        self.partials: dict[str, str] = {}
        self.leased: dict[str, GroupLease] = {}
        self.finished: dict[str, GroupResult] = {}
        self.reports: list[ReportRequest] = []
        self.leases: list[LeaseRequest] = []
        self.failed: list[str] = []
        self._next = 0

    def lease(self, request: LeaseRequest) -> LeaseReply:
        self._present()
        self.leases.append(request)
        groups = []
        for _ in range(min(request.capacity, self.left)):
            group_id = f"grp_{self._next}"
            lease = GroupLease(
                group_id=group_id, index=self._next, attempt=1, lease_s=60, partial=self.partials.get(group_id, "")
            )
            self._next += 1
            self.left -= 1
            self.leased[group_id] = lease
            groups.append(lease)
        return LeaseReply(groups=groups, retry_after_s=0.05)

    def report(self, request: ReportRequest) -> ReportReply:
        self._present()
        named = len(request.finished) + len(request.partial) + len(request.failed)
        assert named <= limits.REPORT_GROUPS_MAX, "the real ledger refuses such a report, again and again"
        assert len(request.held) <= limits.HELD_GROUPS_MAX, "likewise"
        self.reports.append(request)
        self.failed += [failure.group_id for failure in request.failed]
        refused = {
            each.group_id: "the lease was lost"
            for each in [*request.finished, *request.partial]
            if each.group_id in self.refuse
        }
        taken = [each for each in request.finished if each.group_id not in refused]
        for each in taken:
            assert each.group_id not in self.finished or self.finished[each.group_id] == each, (
                "reported twice, differently"
            )
            self.finished[each.group_id] = each
        release = [group_id for group_id in request.held if group_id in self.finished] if self.release_now else []
        resend = [group_id for group_id in request.held if group_id not in self.finished]
        return ReportReply(accepted=[each.group_id for each in taken], refused=refused, release=release, resend=resend)

    def _present(self) -> None:
        if self.away:
            raise Unreachable("The controller does not answer.")
