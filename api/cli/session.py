"""One run on a local cluster, from the run file to the summary: what `up` and `drill` share."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from api.cli.local import LocalCluster
from api.client import Client
from whimbrel.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, Conflict, TimedOut, Unreachable, UsageError, WhimbrelError
from whimbrel.settings import Settings
from whimbrel.spec import RunSpec, load_run_file

Say = Callable[[str], None]
Json = dict[str, Any]

POLL_S: Final = 0.5
JOIN_TIMEOUT_S: Final = 60.0
TERMINAL: Final = ("completed", "failed", "stopped")
REWARD_WINDOW: Final = 5
"""Steps at either end that the summary averages, since one step's reward is noisy."""


@contextmanager
def local_cluster(settings: Settings, *, nodes: int, port: int, etcd_port: int, say: Say) -> Iterator[LocalCluster]:
    """A started cluster that is ended on the way out, whatever happens."""
    cluster = LocalCluster(settings, nodes=nodes, port=port, etcd_port=etcd_port, say=say)
    interrupted = False
    try:
        cluster.start()
        yield cluster
    except KeyboardInterrupt:
        interrupted = True
        say("interrupted: ending workers, agents, the controller and etcd")
        raise
    finally:
        with uninterrupted():
            cluster.stop()
        if interrupted:
            say("ended. A run that was going on continues at the next `whimbrel up`, from its last committed version.")


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A second Ctrl-C must not leave half of the processes behind; what is done here has its own deadlines."""
    held = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)


def client_of(cluster: LocalCluster) -> Client:
    return Client(cluster.url, cluster.admin_token)


def prepare(spec: RunSpec, home: Path) -> None:
    """Have the node software check model and environment, and make a built-in model, before anything is started.

    Progress goes to standard error as it comes.

    Raises:
        WhimbrelError: something is missing; with the sentence, hint and exit code of the node software.
    """
    command = [sys.executable, "-m", "agents.prepare", spec.model_dump_json(), str(home)]
    try:
        done = subprocess.run(command, check=False, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: nothing was started\n")
        raise
    if done.returncode != EXIT_OK:
        *_, message, hint = ["", "", *done.stderr.rstrip("\n").split("\n")]
        kind = UsageError if done.returncode == EXIT_USAGE else WhimbrelError
        raise kind(message or "The run could not be prepared.", hint=hint)


def wait_nodes(client: Client, count: int) -> None:
    """Wait until the cluster's nodes have joined, so that the first placement sees all of them.

    Raises:
        TimedOut: they did not join in time.
    """
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    ready = 0
    while time.monotonic() < deadline:
        ready = sum(1 for node in client.nodes() if node["state"] == "ready")
        if ready >= count:
            return
        time.sleep(0.2)
    raise TimedOut(
        f"Only {ready} of {count} node agents joined within {JOIN_TIMEOUT_S:.0f} s.",
        hint="Their logs are in HOME/logs.",
    )


def create_run(client: Client, spec: RunSpec) -> Json:
    """Create the run; a name that is taken gets the next free number."""
    document = spec.model_dump(mode="json")
    for number in range(1, 1000):
        document["name"] = spec.name if number == 1 else f"{spec.name}-{number}"
        try:
            return client.start_run(document)
        except Conflict:
            continue
    raise Conflict(f"No free name like {spec.name}.", hint="Give the run file another name.")


def load_spec(run_file: Path, *, seed: int | None, max_steps: int | None) -> RunSpec:
    """The run file's spec, with what the command line overrides."""
    spec = load_run_file(run_file)
    changes: Json = {}
    if seed is not None:
        changes["seed"] = seed
    if max_steps is not None:
        changes["max_steps"] = max_steps
    return RunSpec.model_validate(spec.model_dump() | changes) if changes else spec


def is_final(run: Json) -> bool:
    """Whether the run has ended for good."""
    return run["status"]["state"] in TERMINAL


class Follower:
    """Prints what a run does until it ends; survives a controller that is away."""

    def __init__(self, client: Client, run_id: str, say: Say) -> None:
        self.client = client
        self.run_id = run_id
        self.run: Json = {}
        self._say = say
        self._last_line = ""
        self._last_event: int | None = None

    def refresh(self) -> bool:
        """Read the run once; False while the controller is away."""
        try:
            self.run = self.client.run(self.run_id)
            self._print_events()
        except Unreachable:
            return False
        return True

    def until_end(self, tick: Callable[[], None] = lambda: None) -> Json:
        """Follow the run to a terminal state; `tick` is called at every poll."""
        while True:
            if self.refresh():
                self._print_progress()
                if is_final(self.run):
                    return self.run
            tick()
            time.sleep(POLL_S)

    def _print_progress(self) -> None:
        status = self.run["status"]
        version, target = status["head_version"], status["max_steps"]
        line = f"{status['state']:<10} step {max(version, 0):>3}/{target}"
        if status["reward"] is not None:
            line += f"  reward {status['reward']:.2f} {bar(status['reward'])}"
        if status["tokens_per_s"] is not None:
            line += f"  {status['tokens_per_s']:,.0f} tokens/s"
        key = f"{status['state']}{version}"
        if version >= 0 and key != self._last_line:
            self._last_line = key
            self._say(line)

    def _print_events(self) -> None:
        page = self.client.events(after=self._last_event, run=self.run_id)
        for event in page["items"]:
            fresh = self._last_event is None or event["id"] > self._last_event
            notable = event["severity"] != "info" or event["kind"].startswith(("run", "incident"))
            if fresh and notable:
                self._say(f"  {event['severity'] if event['severity'] != 'info' else '·'} {event['message']}")
        self._last_event = page["next_after"]


def bar(share: float, width: int = 20) -> str:
    """A share between 0 and 1 as a bar of text."""
    full = round(max(0.0, min(1.0, share)) * width)
    return "█" * full + "░" * (width - full)


def summarise(client: Client, run: Json, say: Say) -> Json:
    """Print what came of the run and return the figures."""
    series = client.metrics(run["id"], names="reward/mean,sync/payload_bytes,staleness/max")["series"]
    rewards = [value for _, value in series.get("reward/mean", [])]
    audit = client.audit(run["id"])
    window = max(1, min(REWARD_WINDOW, len(rewards) // 2))
    first, last = _mean(rewards[:window]), _mean(rewards[-window:])
    status = run["status"]
    figures = {
        "state": status["state"],
        "steps": status["head_version"],
        "reward_first": first,
        "reward_last": last,
        "ettr": status["ettr"],
        "recoveries": status["recoveries"],
        "audit_balanced": audit["balanced"],
    }
    say("")
    say(f"run {run['name']} {status['state']}: {status['reason']}")
    say(f"  steps       {status['head_version']} of {status['max_steps']}")
    if rewards:
        say(f"  reward      {first:.2f} → {last:.2f}  (mean of the first and last {window} steps)")
    if status["ettr"] is not None:
        say(f"  ETTR        {status['ettr']:.3f} with {status['recoveries']} recoveries")
    balance = "adds up" if audit["balanced"] else "DOES NOT ADD UP"
    say(
        f"  ledger      {balance}: {audit['issued']} groups issued, {audit['consumed']} consumed, {audit['dropped']} dropped"
    )
    say("  see it      whimbrel up  serves this home again: dashboard, API, `whimbrel checkpoint ls`")
    return figures


def exit_code_of(figures: Json) -> int:
    """0 only for a run that reached its target with a ledger that adds up."""
    return EXIT_OK if figures["state"] == "completed" and figures["audit_balanced"] else EXIT_FAILED


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
