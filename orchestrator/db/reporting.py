"""Taking in what rollouts report, inside the ledger's transaction."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from orchestrator.core.staleness import Bound, Places
from orchestrator.db import groups
from orchestrator.db.leasing import LEASE
from orchestrator.db.tables import PromptGroup, Run, Trajectory
from whimbrel.errors import LimitReached
from whimbrel.limits import HELD_GROUPS_MAX, REPORT_GROUPS_MAX
from whimbrel.wire.work import Caller, GroupFailure, GroupPartial, GroupResult, ReportReply, ReportRequest


@dataclass(frozen=True)
class Reassigned:
    """What the loss of a worker returned to the pool."""

    groups: list[str]
    tokens_kept: int
    """Tokens of unfinished samples that the next worker continues from."""


async def reassign(session: AsyncSession, run: Run, worker: str, before_epoch: int, now: datetime) -> Reassigned:
    """Return the groups leased by epochs of `worker` below `before_epoch`."""
    rows = await groups.leased_by(session, run.id, worker, before_epoch)
    for group in rows:
        groups.give_back(group, groups.bound(run), f"{worker} was lost", now)
    return Reassigned([group.id for group in rows], sum(group.partial_tokens for group in rows))


async def report(session: AsyncSession, run: Run, request: ReportRequest, now: datetime) -> ReportReply:
    """Take in a report.

    Raises:
        LimitReached: the report names more groups than one may.
    """
    _check_size(request)
    ids = {one.group_id for one in (*request.finished, *request.partial, *request.failed)} | set(request.held)
    rows = await groups.named(session, run.id, ids)
    places = await groups.places(session, run)
    desk = _Desk(run, request.caller, groups.bound(run), places, await groups.demand(session, run.id), now)
    reply = ReportReply()
    for result in request.finished:
        verdict = await desk.finish(session, rows.get(result.group_id), result)
        if verdict is None:
            reply.accepted.append(result.group_id)
        elif verdict == AHEAD:
            reply.resend.append(result.group_id)
        else:
            reply.refused[result.group_id] = verdict
    for partial in request.partial:
        verdict = desk.renew(rows.get(partial.group_id), partial)
        if verdict is not None:
            reply.refused[partial.group_id] = verdict
    for failure in request.failed:
        desk.fail(rows.get(failure.group_id), failure)
    for group_id in request.held:
        desk.keep_or_release(rows.get(group_id), group_id, reply)
    return reply


AHEAD = "made by a version that the controller has not seen yet"
"""No refusal: the rollout knows of a commit a moment before the controller does, and reports again."""


def _check_size(request: ReportRequest) -> None:
    named = len(request.finished) + len(request.partial) + len(request.failed)
    if named > REPORT_GROUPS_MAX or len(request.held) > HELD_GROUPS_MAX:
        raise LimitReached(
            f"A report may name {REPORT_GROUPS_MAX} groups and {HELD_GROUPS_MAX} held ones, not {named} and {len(request.held)}.",
            hint="Send it in parts.",
        )


@dataclass
class _Desk:
    """One report's context."""

    run: Run
    caller: Caller
    bound: Bound
    places: Places
    due: Counter[int]
    """Groups in no batch by deadline; kept true while the report is worked off."""
    now: datetime

    async def finish(self, session: AsyncSession, group: PromptGroup | None, result: GroupResult) -> str | None:
        """Take a finished group; None, or why it is refused.

        A result whose lease ran out is still taken while the group waits in the pool: nothing is wrong with it.
        """
        if group is None:
            return self._late("the ledger has no such group")
        if group.state in ("buffered", "batched", "consumed") and group.payload == result.payload:
            return None  # said before; the answer was lost
        if not self._is_last_holder(group, result.attempt) or group.state not in ("leased", "pooled"):
            return self._late(f"the group is {group.state}, attempt {group.attempt}")
        flaw = _flaw(self.run, result)
        if flaw is not None:
            return self._useless(group, flaw)
        oldest = min(one.min_version for one in result.trajectories)
        newest = max(one.max_version for one in result.trajectories)
        if newest > self.run.head_version:
            return AHEAD
        if not self._move(group, self.bound.deadline(oldest)):
            return self._useless(group, f"its oldest token is of version {oldest}: too old for any free place")
        group.state, group.lease_deadline = "buffered", None
        groups.forget_partial(group)
        group.payload, group.payload_bytes = result.payload, result.payload_bytes
        group.tokens = sum(one.tokens for one in result.trajectories)
        group.min_version, group.max_version = oldest, newest
        group.worker_epoch, group.reason, group.updated_at = self.caller.epoch, "", self.now
        session.add_all(_trajectories(self.run.id, result))
        return None

    def renew(self, group: PromptGroup | None, partial: GroupPartial) -> str | None:
        """Renew a lease and note how far the group came; None, or why the work is to be dropped."""
        if group is None or group.state != "leased" or not self._is_last_holder(group, partial.attempt):
            return "the lease was lost"
        group.lease_deadline = self.now + LEASE
        if partial.payload and 0 <= partial.min_version <= self.run.head_version:
            if not self._move(group, self.bound.deadline(partial.min_version)):
                return self._useless(group, f"its oldest token is of version {partial.min_version}: too old")
            group.partial, group.partial_tokens = partial.payload, partial.tokens
            group.partial_min_version = partial.min_version
        return None

    def fail(self, group: PromptGroup | None, failure: GroupFailure) -> None:
        """The environment could not make or score the prompt: another attempt, up to the bound."""
        if group is None or group.state != "leased" or not self._is_last_holder(group, failure.attempt):
            return
        self.run.failed_groups += 1
        self._return(group, f"environment failed: {failure.reason}")

    def keep_or_release(self, group: PromptGroup | None, group_id: str, reply: ReportReply) -> None:
        """Whether a rollout still needs to keep a finished group."""
        if group is None or group.state in ("consumed", "dropped"):
            reply.release.append(group_id)
        elif group.worker != self.caller.worker or group.worker_epoch > self.caller.epoch:
            reply.release.append(group_id)  # another worker makes or made it anew
        elif group.state in ("leased", "pooled") and group_id not in reply.resend and group_id not in reply.refused:
            reply.resend.append(group_id)

    def _is_last_holder(self, group: PromptGroup, attempt: int) -> bool:
        return (group.worker, group.worker_epoch, group.attempt) == (self.caller.worker, self.caller.epoch, attempt)

    def _move(self, group: PromptGroup, deadline: int) -> bool:
        """Change the group's deadline if there is a place for it then."""
        before = group.consume_by
        if before is not None:
            self.due[before] -= 1
        # A later deadline than the one that was reserved can only make room.
        fits = (before is not None and deadline >= before) or self.places.fits(self.due, deadline)
        if fits:
            self.due[deadline] += 1
            group.consume_by = deadline
        elif before is not None:
            self.due[before] += 1
        return fits

    def _useless(self, group: PromptGroup, why: str) -> str:
        """The work cannot be used, the prompt can."""
        if group.state == "leased":
            groups.forget_partial(group)
            self._return(group, why)
        return why

    def _return(self, group: PromptGroup, why: str) -> None:
        if group.consume_by is not None:
            self.due[group.consume_by] -= 1
        groups.give_back(group, self.bound, why, self.now)
        if group.consume_by is not None:
            self.due[group.consume_by] += 1

    def _late(self, why: str) -> str:
        self.run.late_results += 1
        return why


def _flaw(run: Run, result: GroupResult) -> str | None:
    """What is wrong with a result in itself."""
    samples = sorted(one.sample for one in result.trajectories)
    if samples != list(range(run.group_size)):
        return f"it has samples {samples}, not 0 to {run.group_size - 1}"
    if any(not 0 <= one.min_version <= one.max_version for one in result.trajectories):
        return "a trajectory's versions are negative or in the wrong order"
    if not result.payload:
        return "it names no payload"
    return None


def _trajectories(run_id: str, result: GroupResult) -> list[Trajectory]:
    return [
        Trajectory(
            group_id=result.group_id,
            sample=one.sample,
            run_id=run_id,
            tokens=one.tokens,
            reward=one.reward,
            min_version=one.min_version,
            max_version=one.max_version,
            finish_reason=one.finish_reason,
        )
        for one in result.trajectories
    ]
