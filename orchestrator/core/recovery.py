"""What follows a failure: when the worker starts again, where, or why the run cannot go on."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.health import Failure
from orchestrator.core.world import PastFailure, Worker, World
from whimbrel.limits import (
    IN_PLACE_RESTARTS,
    RESTART_BACKOFF_S,
    RESTART_BUDGET,
    RESTART_WINDOW_S,
    USER_ERROR_BUDGET,
)


@dataclass(frozen=True, slots=True)
class Replace:
    """Start the worker again, not before `due_s`."""

    due_s: float
    prefer: str
    avoid: frozenset[str]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The run has failed; the sentence says of what."""

    reason: str


def after_failure(world: World, worker: Worker, failure: Failure) -> Replace | GiveUp:
    """Decide on a failed epoch, by what failed before it.

    `worker.failures` may or may not hold the failure itself already: it is told by its epoch.
    """
    assert worker.owner is not None
    epoch, node_id = worker.owner.epoch, worker.owner.node_id
    first_seen_s = next((past.at_s for past in worker.failures if past.epoch == epoch), world.now_s)
    earlier = [past for past in worker.failures if past.epoch != epoch and _recent(world, past)]
    if failure.kind == "user_error":
        same = 1 + sum(past.kind == "user_error" and past.fingerprint == failure.fingerprint for past in earlier)
        if same >= USER_ERROR_BUDGET:
            return GiveUp(f"{failure.message} It happened {same} times the same way; correct it and start a new run.")
    charged = sum(past.charged for past in earlier) + failure.charged
    if charged > RESTART_BUDGET:
        window_min = RESTART_WINDOW_S / 60
        return GiveUp(f"{failure.message} {worker.name} failed {charged} times in {window_min:.0f} minutes.")
    # Uncharged failures wait as well: not a matter of blame, but of not spinning.
    delay_s = RESTART_BACKOFF_S[min(len(earlier), len(RESTART_BACKOFF_S) - 1)]
    here = sum(past.node_id == node_id and past.charged for past in earlier) + failure.charged
    gone = failure.kind == "node_lost"
    avoid = frozenset({node_id}) if gone or here >= IN_PLACE_RESTARTS else frozenset[str]()
    return Replace(first_seen_s + delay_s, "" if avoid else node_id, avoid)


def _recent(world: World, past: PastFailure) -> bool:
    return world.now_s - past.at_s <= RESTART_WINDOW_S
