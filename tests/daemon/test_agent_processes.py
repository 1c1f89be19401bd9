"""Starting, ending and adopting real processes; no etcd needed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from agent_fakes import DEAF, PATIENT, agent_config, alive, kill_tagged, python, run_id, tagged, wait_for

from agents.daemon import logs, proc
from agents.daemon.assignments import Start
from agents.daemon.cache import prune_cache
from agents.daemon.processes import Processes
from agents.daemon.records import ProcessMark
from whimbrel import limits
from whimbrel.clock import SystemClock
from whimbrel.errors import UsageError
from whimbrel.wire.node import LogsRequest
from whimbrel.wire.work import WorkerExit, WorkerStatus

RUN = run_id()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    kill_tagged(tmp_path)


def make(home: Path, code: str = PATIENT) -> Processes:
    return Processes(agent_config(home), python(code), SystemClock())


def start(processes: Processes, epoch: int = 7, *, worker: str = "trainer", ranks: int = 1) -> None:
    role = "trainer" if worker == "trainer" else "rollout"
    processes.start(Start(RUN, worker, epoch, role, ranks, 1, "{}", "test"))


def status(processes: Processes, epoch: int = 7) -> WorkerStatus:
    (found,) = [status for status in processes.statuses() if status.epoch == epoch]
    return found


def poll_until(processes: Processes, condition: Callable[[], bool], *, within_s: float = 15.0) -> None:
    def polled() -> bool:
        processes.poll()
        return condition()

    wait_for(polled, within_s=within_s)


def ended(processes: Processes, epoch: int = 7) -> WorkerExit:
    found = status(processes, epoch).exit
    assert found is not None
    return found


def exited(processes: Processes, epoch: int = 7) -> Callable[[], bool]:
    return lambda: status(processes, epoch).state == "exited"


def reap(processes: Processes) -> None:
    """Wait for the worker's process as its parent, so that nobody else can see how it ended."""
    child = processes.live()[0].ranks[0].child
    assert child is not None
    child.wait(timeout=15)


def output(processes: Processes, epoch: int = 7, worker: str = "trainer") -> str:
    return logs.read_tail(processes.folders.of(RUN, worker, epoch).path, 10_000)[0]


def test_it_starts_each_rank_with_torchruns_environment(home: Path) -> None:
    code = (
        "import os; print(*(os.environ[n] for n in ('RANK','WORLD_SIZE','LOCAL_RANK','MASTER_ADDR','WHIMBREL_EPOCH')))"
    )
    processes = make(home, code)
    start(processes, ranks=2)
    poll_until(processes, exited(processes))
    assert sorted(output(processes).split("\n")) == ["", "0 2 0 127.0.0.1 7", "1 2 1 127.0.0.1 7"]
    assert ended(processes).code == 0
    assert ended(processes).cause == "Finished."


def test_the_agents_own_secrets_do_not_reach_a_worker(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHIMBREL_TOKEN", "admin-secret")
    monkeypatch.setenv("WHIMBREL_DATABASE", "postgresql://user:secret@host/db")
    processes = make(
        home, "import os; print(sorted(n for n in os.environ if n in ('WHIMBREL_TOKEN','WHIMBREL_DATABASE')))"
    )
    start(processes)
    poll_until(processes, exited(processes))
    assert output(processes) == "[]\n"


def test_one_rank_dies_the_others_are_ended_and_it_is_reported_once(home: Path) -> None:
    code = "import os, time, sys\nif os.environ['RANK']=='1': time.sleep(0.3); raise ValueError('no such shard')\ntime.sleep(120)"
    processes = make(home, code)
    start(processes, ranks=2)
    pids = status(processes).pids
    poll_until(processes, exited(processes))
    assert not any(alive(pid) for pid in pids)
    exit_ = ended(processes)
    assert exit_.code == 1
    assert "Rank 1" in exit_.cause
    assert "ValueError: no such shard" in exit_.cause
    processes.record_exits([f"{RUN}/trainer@7"])
    assert processes.statuses() == []
    assert [entry.state for entry in processes.locals()] == ["exited"], "remembered, so that it never starts again"


def test_a_sigkill_is_named_and_not_blamed_on_memory_without_proof(home: Path) -> None:
    processes = make(home)
    start(processes)
    os.kill(status(processes).pids[0], signal.SIGKILL)
    poll_until(processes, exited(processes))
    exit_ = ended(processes)
    assert (exit_.code, exit_.signal) == (None, "SIGKILL")
    assert "SIGKILL" in exit_.cause


@pytest.mark.parametrize(("code", "said"), [(86, "fenced"), (87, "model folder")])
def test_whimbrels_exit_codes_are_explained(home: Path, code: int, said: str) -> None:
    processes = make(home, f"import sys; print('The model folder is empty.', file=sys.stderr); sys.exit({code})")
    start(processes)
    poll_until(processes, exited(processes))
    assert ended(processes).code == code
    assert said in ended(processes).cause


def test_a_command_that_cannot_start_is_an_exit_with_a_cause(home: Path) -> None:
    processes = Processes(agent_config(home), lambda _: ["/nowhere/python"], SystemClock())
    start(processes, ranks=2)
    poll_until(processes, exited(processes))
    assert "could not be started" in ended(processes).cause


def test_a_deaf_worker_is_killed_after_the_grace(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STOP_GRACE_S", 0.6)
    processes = make(home, DEAF)
    start(processes)
    wait_for(lambda: "deaf" in output(processes))
    asked_at = time.monotonic()
    processes.stop(RUN, "trainer", 7, polite=True, reason="the user stopped the run")
    assert status(processes).state == "stopping"
    poll_until(processes, exited(processes))
    assert time.monotonic() - asked_at >= 0.5
    assert ended(processes).cause == "Stopped by the node's agent: the user stopped the run."
    assert tagged(home) == []


def test_a_stopped_process_is_seen_paused_and_killed_without_waiting(home: Path) -> None:
    processes = make(home)
    start(processes)
    pid = status(processes).pids[0]
    os.kill(pid, signal.SIGSTOP)
    poll_until(processes, lambda: status(processes).state == "paused")
    processes.stop(RUN, "trainer", 7, polite=True, reason="test")
    poll_until(processes, exited(processes), within_s=limits.STOP_GRACE_S - 1)


def test_no_descendant_survives_its_worker(home: Path) -> None:
    """Children in the session, in a session of their own, orphaned, and with a cleared environment."""
    code = (
        "import subprocess, sys, os, time\n"
        "nap = [sys.executable, '-S', '-E', '-c', 'import time; time.sleep(121)']\n"
        "a = subprocess.Popen(nap)\n"
        "b = subprocess.Popen(nap, start_new_session=True)\n"
        "c = subprocess.Popen(nap, env={})\n"
        "if os.fork() == 0:\n"
        "    d = subprocess.Popen(nap, start_new_session=True)\n"
        "    print(d.pid, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "print(a.pid, b.pid, c.pid, 'ready', flush=True)\n"
        "time.sleep(0.2); os._exit(3)\n"
    )
    processes = make(home, code)
    start(processes)
    wait_for(lambda: "ready" in output(processes))
    pids = [int(word) for word in output(processes).split() if word.isdigit()]
    assert len(pids) == 4
    try:
        poll_until(processes, exited(processes))
        assert not any(alive(pid) for pid in pids)
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
    assert ended(processes).code == 3


def test_a_new_agent_adopts_the_same_processes_and_notices_their_end(home: Path) -> None:
    code = "import time, os, json\ntime.sleep(120)"
    first = make(home, code)
    start(first, ranks=2)
    pids = status(first).pids
    second = make(home, code)
    second.adopt()
    second.poll()
    adopted = status(second)
    assert (adopted.pids, adopted.state, adopted.adopted) == (pids, "running", True)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    poll_until(second, exited(second))


def test_an_adopted_workers_own_words_tell_how_it_ended(home: Path) -> None:
    code = (
        "import time, json\ntime.sleep(1.0)\n"
        "open('exit.json', 'w').write(json.dumps({'code': 87, 'message': 'The reward function does not import.'}))"
    )
    first = make(home, code)
    start(first)
    second = make(home, code)
    second.adopt()
    reap(first)
    poll_until(second, exited(second))
    exit_ = ended(second)
    assert (exit_.code, exit_.cause) == (87, "The reward function does not import.")


def test_what_ended_unwatched_is_reported_and_not_started_again(home: Path) -> None:
    first = make(home)
    start(first)
    os.kill(status(first).pids[0], signal.SIGKILL)
    reap(first)
    second = make(home)
    second.adopt()
    poll_until(second, exited(second))
    assert "not known" in ended(second).cause
    third = make(home)
    third.adopt()
    assert [(entry.epoch, entry.state) for entry in third.locals()] == [(7, "exited")]
    assert ended(third).cause == ended(second).cause, "until the controller has it, every agent reports it"


def test_a_reused_pid_is_nobody_of_ours(home: Path) -> None:
    first = make(home)
    start(first)
    worker = first.live()[0]
    stranger = os.getpid()
    mark = ProcessMark(rank=0, pid=stranger, started_ticks=1)
    record = msgspec.structs.replace(worker.record, processes=[mark])
    worker.folder.write_worker(record)
    second = make(home)
    second.adopt()
    poll_until(second, exited(second))
    assert tagged(home) == [], "the lost process is found by its environment and ended"


def test_a_process_lost_between_start_and_note_is_ended_by_the_next_agent(home: Path) -> None:
    first = make(home)
    start(first)
    pid = status(first).pids[0]
    (first.live()[0].folder.path / "worker.json").unlink()
    make(home).adopt()
    wait_for(lambda: not alive(pid))


def test_output_is_bounded_and_readable_from_its_end(home: Path) -> None:
    code = (
        "import sys, time\nfor n in range(40000): sys.stdout.write(f'line {n:08d}\\n')\n"
        "sys.stdout.flush()\ntime.sleep(120)"
    )
    processes = make(home, code)
    start(processes, epoch=8)
    folder = processes.folders.of(RUN, "trainer", 8).path
    wait_for(lambda: "line 00039999" in output(processes, 8))
    assert logs.rotate(folder, limit_bytes=10_000)
    assert (folder / "worker.log").stat().st_size == 0
    assert (folder / "worker.log.1").stat().st_size == 10_000
    assert output(processes, 8).endswith("line 00039999\n")
    assert not logs.rotate(folder, limit_bytes=10_000)


def test_a_rotated_log_goes_on_at_its_beginning(home: Path) -> None:
    code = "import time\nfor n in range(10**6): print('x' * 100, n, flush=True); time.sleep(0.002)"
    processes = make(home, code)
    start(processes)
    folder = processes.folders.of(RUN, "trainer", 7).path
    for _ in range(3):
        wait_for(lambda: (folder / "worker.log").stat().st_size > 5_000)
        assert logs.rotate(folder, limit_bytes=5_000)
        assert sum(path.stat().st_size for path in folder.glob("worker.log*")) < 12_000
    wait_for(lambda: (folder / "worker.log").stat().st_size > 0)
    assert (folder / "worker.log").read_bytes()[:1] == b"x", "no hole at the start"


def test_old_epochs_leave_the_disk_once_recorded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WORKER_DIRS_KEPT", 2)
    processes = make(home, "pass")
    for epoch in (1, 2, 3, 4):
        start(processes, epoch)
    poll_until(processes, lambda: not processes.live())
    assert processes.folders.epochs(RUN, "trainer") == [1, 2, 3, 4], "an unrecorded exit is never thrown away"
    processes.record_exits([f"{RUN}/trainer@{epoch}" for epoch in (1, 2, 3, 4)])
    assert processes.folders.epochs(RUN, "trainer") == [3, 4]


def test_the_folders_of_all_runs_are_bounded_but_an_owned_epoch_stays(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EPOCH_FOLDERS_MAX", 1)
    processes = make(home, "pass")
    for worker in ("trainer", "rollout-0", "rollout-1"):
        start(processes, {"trainer": 1, "rollout-0": 2, "rollout-1": 3}[worker], worker=worker)
    poll_until(processes, lambda: not processes.live())
    processes.prune(set())
    assert len(processes.locals()) == 3, "unrecorded exits stay"
    processes.record_exits([f"{RUN}/trainer@1", f"{RUN}/rollout-0@2"])
    processes.prune({((RUN, "trainer"), 1)})
    assert {entry.key[1] for entry in processes.locals()} == {"trainer", "rollout-1"}
    assert not (processes.folders.root / RUN / "rollout-0").exists()


def test_what_outlives_sigkill_is_never_reported_as_exited(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KILL_WAIT_S", 0.2)
    monkeypatch.setattr(proc, "send_signal", lambda *_: None)  # as if it sat in the kernel
    processes = make(home)
    start(processes)
    processes.stop(RUN, "trainer", 7, polite=False, reason="test")
    poll_until(processes, lambda: bool(processes.unkillable()))
    assert status(processes).state == "stopping"


def test_log_reading_refuses_names_that_are_paths_and_links(home: Path) -> None:
    processes = make(home, "print('hello')")
    start(processes)
    poll_until(processes, exited(processes))
    folder = processes.folders.of(RUN, "trainer", 7).path
    secret = home / "secret"
    secret.write_text("token")
    for run, worker in ((f"../{RUN}", "trainer"), (RUN, "../trainer"), (RUN, ""), ("", "trainer"), (RUN, "a/b")):
        with pytest.raises(UsageError):
            logs.answer_logs(processes.folders, LogsRequest(run_id=run, worker=worker))
    (folder / "worker.log").unlink()
    (folder / "worker.log").symlink_to(secret)
    assert logs.answer_logs(processes.folders, LogsRequest(run_id=RUN, worker="trainer")).text == ""
    assert not logs.rotate(folder, limit_bytes=1)
    assert secret.read_text() == "token"


def test_the_cache_keeps_its_bound_by_dropping_the_oldest(tmp_path: Path) -> None:
    for age, name in enumerate(["new", "middle", "old"]):
        path = tmp_path / "chunks" / name[:2] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 100)
        os.utime(path, (1_000_000 - age, 1_000_000 - age))
    assert prune_cache(tmp_path, limit_bytes=250) == 100
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["middle", "new"]
    assert prune_cache(tmp_path, limit_bytes=250) == 0
