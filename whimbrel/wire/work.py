"""What workers and agents say to the controller, and its answers. All carry (run, worker, epoch) and are fenced by it."""

from __future__ import annotations

from typing import Literal

import msgspec

Phase = Literal["starting", "restoring", "waiting", "working", "publishing", "applying", "stopping"]
"""What a worker is doing, for hang detection and the timeline. A trainer `working` is in an optimizer step."""


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who speaks: refused when the controller knows a newer epoch of this worker."""

    run_id: str
    worker: str
    epoch: int


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Sent about once a second from a thread of its own; never required for correctness."""

    caller: Caller
    phase: Phase
    phase_age_s: float
    """Seconds since the phase or any counter last changed."""
    policy_version: int = -1
    """Trainer: its committed version. Rollout: the version it generates with."""
    counters: dict[str, float] = {}
    """Running totals, e.g. tokens_generated, groups_finished, steps_done, payload_bytes_received."""
    gauges: dict[str, float] = {}
    """Latest values, e.g. tokens_per_s, apply_ms, generation_pause_ms."""
    note: str = ""
    """One sentence for people, e.g. what a restore found."""


class ProgressReply(msgspec.Struct, frozen=True, kw_only=True):
    run_state: str = "running"
    paused: bool = False
    """The run is paused: a rollout takes no new work, a trainer starts no new step."""


class GroupLease(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt group given to a rollout."""

    group_id: str
    index: int
    """The prompt's place in the run's data: the environment makes the same prompt from the same index anywhere."""
    attempt: int
    """Counts the leases of this group; part of the sampling seed."""
    lease_s: float
    """Validity from now; each report that names the group renews it."""
    partial: str = ""
    """Digest of the payload chunk with the tokens that an earlier attempt had reported, or empty."""
    consume_by: int = 0
    """The last step that may still train on this group, fixed by the version of its oldest token."""


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    caller: Caller
    policy_version: int
    capacity: int
    """Groups that the rollout can start now."""


class LeaseReply(msgspec.Struct, frozen=True, kw_only=True):
    groups: list[GroupLease]
    reason: str = ""
    """Why there are fewer than asked for: staleness bound, pause, ...; one sentence."""
    retry_after_s: float = 0.5


class TrajectoryMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger keeps of one sample; its tokens are in the group's payload chunk."""

    sample: int
    tokens: int
    reward: float
    min_version: int
    max_version: int
    finish_reason: Literal["stop", "length"]


class GroupResult(msgspec.Struct, frozen=True, kw_only=True):
    """A finished group: all samples, already stored as one payload chunk."""

    group_id: str
    attempt: int
    payload: str
    payload_bytes: int
    trajectories: list[TrajectoryMeta]


class GroupPartial(msgspec.Struct, frozen=True, kw_only=True):
    """A group in progress: renews its lease, and optionally says how far it came."""

    group_id: str
    attempt: int
    tokens: int = 0
    payload: str = ""
    min_version: int = -1


class GroupFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The environment could not make this prompt or score it: an infrastructure outcome, never a reward."""

    group_id: str
    attempt: int
    reason: str


class ReportRequest(msgspec.Struct, frozen=True, kw_only=True):
    caller: Caller
    finished: list[GroupResult] = []
    partial: list[GroupPartial] = []
    failed: list[GroupFailure] = []
    held: list[str] = []
    """Finished groups that the rollout still keeps; the answer says which it may forget and which to send again."""


class ReportReply(msgspec.Struct, frozen=True, kw_only=True):
    accepted: list[str] = []
    refused: dict[str, str] = {}
    """Group id to reason: the lease was lost, the group was given to another, ... Drop the work."""
    release: list[str] = []
    """Held groups whose step is committed, or that were dropped: forget them."""
    resend: list[str] = []
    """Held groups that the ledger does not have as finished: report them again."""


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    caller: Caller
    step: int
    """The step that takes version `step` to `step + 1`."""
    missing: list[str] = []
    """Groups of this batch whose payload no source holds: back to the pool, and the batch is made anew."""


class BatchGroup(msgspec.Struct, frozen=True, kw_only=True):
    group_id: str
    index: int
    payload: str
    payload_bytes: int
    min_version: int
    max_version: int


class BatchReply(msgspec.Struct, frozen=True, kw_only=True):
    ready: bool
    groups: list[BatchGroup] = []
    """In training order; the same for every call with this step until the step is committed."""
    reason: str = ""
    """Why it is not ready, with figures; one sentence."""
    retry_after_s: float = 0.2


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """Something a worker wants recorded: a replay that did not match, a corrupt chunk that was repaired, a full disk."""

    caller: Caller
    kind: str
    message: str
    details: dict[str, str | int | float | bool] = {}


class WorkerExit(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker's processes ended; only reported after every one of them was waited for."""

    code: int | None
    signal: str = ""
    cause: str = ""
    """The likely cause in one sentence: killed by the kernel for memory, import error with its line, fenced, ..."""
    log_tail: str = ""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as its agent sees it."""

    run_id: str
    worker: str
    epoch: int
    state: Literal["starting", "running", "paused", "stopping", "exited"]
    """`paused` means that the operating system has the process stopped (SIGSTOP)."""
    pids: list[int] = []
    rss_bytes: int = 0
    cpu_s: float = 0.0
    exit: WorkerExit | None = None
    adopted: bool = False


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """Level-triggered: the agent's whole state, sent every PROGRESS_EVERY_S and at once when a worker exits."""

    node_id: str
    incarnation: str
    sequence: int
    workers: list[WorkerStatus]
    """Exited workers stay in the list until the controller's answer names them in `forget`."""
    cpu_ratio: float = 0.0
    memory_available_bytes: int = 0
    disk_available_bytes: int = 0
    load_1m: float = 0.0


class AgentReply(msgspec.Struct, frozen=True, kw_only=True):
    forget: list[str] = []
    """`RUN/WORKER@EPOCH` of exits that are recorded."""
