"""What a rollout has finished and must not lose: kept until the ledger says that it may be forgotten.

Pure bookkeeping, no I/O; the courier moves things. A finished group goes through: stored nowhere → stored (its payload is
durable at a chunk server) → accepted by the ledger → released. Nothing leaves before it is released or refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from whimbrel import limits, wire
from whimbrel.delta import content_digest
from whimbrel.errors import LimitReached
from whimbrel.wire.payload import GroupPayload
from whimbrel.wire.work import GroupFailure, GroupResult, ReportReply, TrajectoryMeta


@dataclass(eq=False)
class Held:
    """One finished group."""

    result: GroupResult
    data: bytes
    tokens: int
    stored: bool = False
    accepted: bool = False


class Results:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, Held] = {}
        self._failed: dict[str, GroupFailure] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return sum(len(held.data) for held in self._held.values())

    def full(self) -> bool:
        """Whether no further work may be begun until something is released."""
        return len(self) >= limits.HELD_GROUPS_MAX or self.held_bytes >= limits.HELD_BYTES_MAX

    def finish(self, payload: GroupPayload) -> None:
        """Keep a finished group, every sample with finish reason, reward and versions.

        Raises:
            LimitReached: the payload is larger than any peer takes.
        """
        result, data = pack(payload)
        tokens = sum(meta.tokens for meta in result.trajectories)
        with self._lock:
            self._held[payload.group_id] = Held(result, data, tokens)

    def fail(self, group_id: str, attempt: int, reason: str) -> None:
        """Note that a group could not be prompted or scored."""
        with self._lock:
            self._failed[group_id] = GroupFailure(group_id=group_id, attempt=attempt, reason=reason)

    def unstored(self) -> list[Held]:
        """Groups whose payload is not at a chunk server yet."""
        with self._lock:
            return [held for held in self._held.values() if not held.stored]

    def unreported(self) -> list[GroupResult]:
        """Stored groups that the ledger has not accepted; at most one report's worth."""
        with self._lock:
            found = [held.result for held in self._held.values() if held.stored and not held.accepted]
        return found[: limits.REPORT_GROUPS_MAX]

    def accepted(self) -> list[str]:
        """Groups that are kept until their step is committed, the oldest first; at most one report's worth."""
        with self._lock:
            found = [group_id for group_id, held in self._held.items() if held.accepted]
        return found[: limits.HELD_GROUPS_MAX]

    def failures(self) -> list[GroupFailure]:
        with self._lock:
            return list(self._failed.values())[: limits.REPORT_GROUPS_MAX]

    def settle(self, reply: ReportReply, reported: Iterable[str], failed: Iterable[str]) -> int:
        """Take the ledger's answer; returns the tokens of finished groups that were refused."""
        wasted = 0
        with self._lock:
            for group_id in failed:
                self._failed.pop(group_id, None)
            for group_id in set(reported) & set(reply.refused):
                held = self._held.pop(group_id, None)
                wasted += held.tokens if held is not None else 0
            for group_id in reply.accepted:
                if group_id in self._held:
                    self._held[group_id].accepted = True
            for group_id in reply.release:
                self._held.pop(group_id, None)
            for group_id in reply.resend:
                if group_id in self._held:  # its payload may be lost with its server: store it again too
                    self._held[group_id].accepted = self._held[group_id].stored = False
        return wasted


def pack(payload: GroupPayload) -> tuple[GroupResult, bytes]:
    """The chunk of a finished group and what the ledger is told of it. Raises LimitReached."""
    trajectories = []
    for sample in payload.samples:
        versions = [span.version for span in sample.spans]
        assert sample.tokens, "a finished sample has tokens"
        assert len(sample.tokens) == len(sample.logprobs) == sum(span.length for span in sample.spans)
        assert sample.reward is not None, "a finished sample has a reward"
        assert sample.finish_reason in ("stop", "length")
        trajectories.append(
            TrajectoryMeta(
                sample=sample.sample,
                tokens=len(sample.tokens),
                reward=sample.reward,
                min_version=min(versions),
                max_version=max(versions),
                finish_reason="stop" if sample.finish_reason == "stop" else "length",
            )
        )
    data = wire.encode_message(payload)
    if len(data) > limits.PAYLOAD_MAX_BYTES:
        raise LimitReached(
            f"The payload of group {payload.group_id} has {len(data)} bytes; the bound is {limits.PAYLOAD_MAX_BYTES}.",
            hint="Lower sampling.max_tokens or algorithm.group_size.",
        )
    result = GroupResult(
        group_id=payload.group_id,
        attempt=payload.attempt,
        payload=content_digest(data),
        payload_bytes=len(data),
        trajectories=trajectories,
    )
    return result, data
