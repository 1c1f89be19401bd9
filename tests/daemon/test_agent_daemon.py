"""The agent as a real process, with a real etcd and a controller that listens: laws 4 and 5, adoption, stopping."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import pytest
from agent_fakes import PATIENT, alive, kill_tagged, run_id, tagged, wait_for

from whimbrel import wire
from whimbrel.coordination import BlockingEtcd, EtcdServer, keys
from whimbrel.errors import WhimbrelError
from whimbrel.transport import call_async
from whimbrel.wire.cluster import NodeRecord, Ownership
from whimbrel.wire.node import LogsReply, LogsRequest, ProbeReply
from whimbrel.wire.work import AgentReply, AgentReport, WorkerStatus

pytestmark = [pytest.mark.etcd, pytest.mark.faults]
LEASE_TTL_S = 3
"""As run_agent.py has it."""
HERE = Path(__file__).parent
SPEC = b'{"name": "r", "model": "builtin:tiny", "roles": {"trainer": {"ranks": 2}, "rollout": {"count": 1}}}'


class Controller:
    """Remembers reports, and forgets exits when told to."""

    def __init__(self) -> None:
        self.reports: list[AgentReport] = []
        self.forgets = True
        self.status = 200
        self.exits_seen: list[str] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def workers(self) -> dict[str, WorkerStatus]:
        return {f"{w.worker}@{w.epoch}": w for w in self.reports[-1].workers} if self.reports else {}

    def _answer(self, report: AgentReport) -> AgentReply:
        self.reports.append(report)
        exits = [f"{w.run_id}/{w.worker}@{w.epoch}" for w in report.workers if w.state == "exited"]
        if self.forgets:
            self.exits_seen += exits
        return AgentReply(forget=exits if self.forgets else [])

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        controller = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.headers["authorization"] == "Bearer wb_cluster_test"
                answer = b""
                if controller.status == 200:
                    answer = wire.encode_message(controller._answer(wire.decode_message(body, AgentReport)))
                self.send_response(controller.status)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


class Cluster:
    """etcd, the controller's ear, and one node whose agent comes and goes."""

    def __init__(self, home: Path, server: EtcdServer, etcd: BlockingEtcd) -> None:
        self.home, self.server, self.etcd = home, server, etcd
        self.controller = Controller()
        self.run_id = run_id()
        self.agent: subprocess.Popen[bytes] | None = None
        self.started: list[subprocess.Popen[bytes]] = []
        self.log = home / "agent.log"
        etcd.put(keys.spec(self.run_id), SPEC)
        for item in [*etcd.list(keys.OWNERS)[0], *etcd.list(keys.NODES)[0]]:
            etcd.delete(item.key)  # of the test before

    def start_agent(self, code: str = PATIENT, *, home: Path | None = None) -> subprocess.Popen[bytes]:
        source = self.home / "worker_code.py"
        source.write_text(code)
        with self.log.open("ab") as log:
            arguments = [str(home or self.home), self.server.endpoint, self.controller.url, str(source)]
            agent = subprocess.Popen([sys.executable, str(HERE / "run_agent.py"), *arguments], stdout=log, stderr=log)
        self.started.append(agent)
        self.agent = self.agent or agent
        return agent

    def own(self, worker: str, *, node: str = "n1", state: Literal["running", "stopped"] = "running") -> int:
        role = "trainer" if worker == "trainer" else "rollout"
        record = Ownership(run_id=self.run_id, worker=worker, role=role, node_id=node, state=state, start=1)
        return self.etcd.put(keys.owner(self.run_id, worker), wire.encode_json(record))

    def state_of(self, name: str, state: str) -> Callable[[], bool]:
        return lambda: (w := self.controller.workers().get(name)) is not None and w.state == state

    def running(self, worker: str, epoch: int) -> list[int]:
        wait_for(
            self.state_of(f"{worker}@{epoch}", "running"), what=f"{worker}@{epoch} running: {self.log.read_text()}"
        )
        return self.controller.workers()[f"{worker}@{epoch}"].pids

    def node(self) -> NodeRecord | None:
        found = self.etcd.get(keys.node("n1"))
        return None if found is None else wire.decode_json(found.value, NodeRecord)

    def call(self, name: str, payload: bytes = b"") -> bytes:
        node = self.node()
        assert node is not None
        return asyncio.run(call_async(node.address, "wb_cluster_test", name, payload, 5.0))

    def end_agent(self, number: signal.Signals) -> int:
        assert self.agent is not None
        self.agent.send_signal(number)
        code = self.agent.wait(timeout=20)
        self.agent = None
        return code

    def close(self) -> None:
        for agent in self.started:
            if agent.poll() is None:
                agent.kill()
                agent.wait(timeout=10)
        kill_tagged(self.home)
        self.controller.server.shutdown()
        self.controller.server.server_close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("agent-etcd") / "data")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def cluster(tmp_path: Path, server: EtcdServer) -> Iterator[Cluster]:
    etcd = BlockingEtcd([server.endpoint])
    cluster = Cluster(tmp_path, server, etcd)
    yield cluster
    cluster.close()
    etcd.close()


def test_a_new_epoch_replaces_even_a_stopped_process(cluster: Cluster) -> None:
    cluster.start_agent()
    first = cluster.own("rollout-0")
    (old,) = cluster.running("rollout-0", first)
    os.kill(old, signal.SIGSTOP)
    wait_for(cluster.state_of(f"rollout-0@{first}", "paused"))
    second = cluster.own("rollout-0")
    (new,) = cluster.running("rollout-0", second)
    assert new != old
    assert not alive(old)
    assert f"{cluster.run_id}/rollout-0@{first}" in cluster.controller.exits_seen
    cluster.own("rollout-0", node="n2")
    wait_for(lambda: not alive(new), what="end after the ownership went to another node")


def test_etcd_away_for_longer_than_the_lease_touches_no_worker(cluster: Cluster) -> None:
    cluster.start_agent()
    pids = cluster.running("trainer", cluster.own("trainer"))
    assert len(pids) == 2
    node = cluster.node()
    cluster.server.kill()
    try:
        time.sleep(LEASE_TTL_S + 1.5)
        assert all(alive(pid) for pid in pids)
        reports = len(cluster.controller.reports)
        wait_for(lambda: len(cluster.controller.reports) > reports, what="reports during the outage")
    finally:
        cluster.server.start()
    wait_for(lambda: _node_or_none(cluster) is not None, what="registration")
    assert _node_or_none(cluster) == node, "the same incarnation, the same record"
    time.sleep(0.5)
    assert all(alive(pid) for pid in pids)


def _node_or_none(cluster: Cluster) -> NodeRecord | None:
    try:
        return cluster.node()
    except WhimbrelError:
        return None


def test_an_agent_that_starts_while_etcd_is_away_adopts_and_waits(cluster: Cluster) -> None:
    cluster.start_agent()
    pids = cluster.running("rollout-0", cluster.own("rollout-0"))
    cluster.server.kill()
    try:
        cluster.end_agent(signal.SIGKILL)
        reports = len(cluster.controller.reports)
        cluster.start_agent()
        wait_for(lambda: len(cluster.controller.reports) > reports + 1, what="reports without etcd")
        assert [w.pids for w in cluster.controller.reports[-1].workers] == [pids]
    finally:
        cluster.server.start()
    wait_for(lambda: _node_or_none(cluster) is not None, what="registration")
    assert all(alive(pid) for pid in pids)


def test_workers_outlive_their_agent_and_the_next_one_adopts_them(cluster: Cluster) -> None:
    cluster.start_agent()
    epoch = cluster.own("rollout-0")
    pids = cluster.running("rollout-0", epoch)
    cluster.end_agent(signal.SIGKILL)
    assert all(alive(pid) for pid in pids)
    reports = len(cluster.controller.reports)
    cluster.start_agent()
    wait_for(lambda: len(cluster.controller.reports) > reports, what="first report of the new agent")
    first = cluster.controller.reports[reports]
    assert [(w.epoch, w.pids, w.adopted) for w in first.workers] == [(epoch, pids, True)]
    cluster.controller.forgets = False
    os.kill(pids[0], signal.SIGKILL)
    wait_for(cluster.state_of(f"rollout-0@{epoch}", "exited"))
    time.sleep(0.5)
    assert tagged(cluster.home) == [], "the same epoch is not started again"


def test_a_replaced_worker_is_ended_by_the_agent_that_was_away_meanwhile(cluster: Cluster) -> None:
    cluster.start_agent()
    (pid,) = cluster.running("rollout-0", cluster.own("rollout-0"))
    cluster.end_agent(signal.SIGHUP)
    assert alive(pid), "SIGHUP leaves the workers"
    cluster.own("rollout-0", node="n2")
    cluster.start_agent()
    wait_for(lambda: not alive(pid))


def test_a_controller_away_changes_nothing_and_learns_of_every_exit(cluster: Cluster) -> None:
    cluster.start_agent("import os, time\ntime.sleep(0.8 if os.environ['WHIMBREL_WORKER'] == 'rollout-1' else 120)")
    (stays,) = cluster.running("rollout-0", cluster.own("rollout-0"))
    cluster.controller.status = 503
    ends = cluster.own("rollout-1")
    time.sleep(1.5)
    assert alive(stays)
    cluster.controller.status = 401
    wait_for(lambda: "cluster token (401)" in cluster.log.read_text(), what="a word on the wrong token")
    cluster.controller.status = 200
    name = f"{cluster.run_id}/rollout-1@{ends}"
    wait_for(lambda: name in cluster.controller.exits_seen, what="the exit of the meantime")
    wait_for(lambda: f"rollout-1@{ends}" not in cluster.controller.workers(), what="a report without it")
    assert cluster.controller.exits_seen.count(name) == 1


def test_stopping_a_worker_or_the_agent_leaves_no_process_and_no_key(cluster: Cluster) -> None:
    cluster.start_agent()
    trainer, rollout = cluster.own("trainer"), cluster.own("rollout-0")
    ranks, (generating,) = cluster.running("trainer", trainer), cluster.running("rollout-0", rollout)
    cluster.controller.forgets = False
    cluster.own("trainer", state="stopped")
    wait_for(cluster.state_of(f"trainer@{trainer}", "exited"))
    exit_ = cluster.controller.workers()[f"trainer@{trainer}"].exit
    assert exit_ is not None
    assert "Stopped by the node's agent" in exit_.cause
    assert not any(alive(pid) for pid in ranks)
    assert alive(generating)
    cluster.controller.forgets = True
    assert cluster.end_agent(signal.SIGTERM) == 0
    assert tagged(cluster.home) == []
    assert cluster.node() is None
    assert f"{cluster.run_id}/rollout-0@{rollout}" in cluster.controller.exits_seen


def test_a_paused_agent_converges_when_it_goes_on(cluster: Cluster) -> None:
    agent = cluster.start_agent()
    first = cluster.own("rollout-0")
    (old,) = cluster.running("rollout-0", first)
    agent.send_signal(signal.SIGSTOP)
    second = cluster.own("rollout-0")
    time.sleep(LEASE_TTL_S + 1.5)
    agent.send_signal(signal.SIGCONT)
    (new,) = cluster.running("rollout-0", second)
    assert not alive(old)
    assert alive(new)
    wait_for(lambda: cluster.node() is not None, what="registration")


def test_probe_and_logs_answer_from_what_is_here_now(cluster: Cluster) -> None:
    cluster.start_agent()
    epoch = cluster.own("rollout-0")
    (pid,) = cluster.running("rollout-0", epoch)
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: wire.decode_message(cluster.call("probe"), ProbeReply).processes[0].state == "T")
    reply = wire.decode_message(cluster.call("probe"), ProbeReply)
    assert (reply.node_id, reply.processes[0].pid, reply.workers[0].epoch) == ("n1", pid, epoch)
    asked = LogsRequest(run_id=cluster.run_id, worker="rollout-0")
    answer = wire.decode_message(cluster.call("logs", wire.encode_message(asked)), LogsReply)
    assert answer.text == f"started rollout-0 {epoch} 0\n"
    for bad in (
        LogsRequest(run_id="../../etc", worker="passwd"),
        LogsRequest(run_id=cluster.run_id, worker="../rollout-0"),
        LogsRequest(run_id=cluster.run_id, worker="rollout-0", tail_bytes=-1),
        LogsRequest(run_id=cluster.run_id, worker="nobody"),
    ):
        with pytest.raises(WhimbrelError):
            cluster.call("logs", wire.encode_message(bad))


def test_a_second_agent_of_the_node_is_refused_by_folder_and_by_name(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start_agent()
    wait_for(lambda: cluster.node() is not None)
    assert cluster.start_agent().wait(timeout=15) != 0
    elsewhere = tmp_path / "clone"
    elsewhere.mkdir()
    assert cluster.start_agent(home=elsewhere).wait(timeout=15) != 0
    said = cluster.log.read_text()
    assert "An agent of node n1 runs already" in said
    assert "Another agent called n1 is alive" in said


def test_a_process_that_leaves_its_worker_is_ended(cluster: Cluster) -> None:
    """A session of its own, an empty environment and no living parent: only the agent as its reaper can see it."""
    code = (
        "import os, subprocess, sys, time\n"
        "if os.fork() == 0:\n"
        "    nap = [sys.executable, '-S', '-E', '-c', 'import time; time.sleep(122)']\n"
        "    print(subprocess.Popen(nap, env={}, start_new_session=True).pid, flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\ntime.sleep(120)\n"
    )
    cluster.start_agent(code)
    epoch = cluster.own("rollout-0")
    (worker,) = cluster.running("rollout-0", epoch)
    output = cluster.home / "nodes" / "n1" / "workers" / cluster.run_id / "rollout-0" / str(epoch) / "worker.log"
    wait_for(lambda: output.read_text().endswith("\n"))
    wait_for(lambda: not alive(int(output.read_text())), what="end of the stray")
    assert alive(worker)


def test_the_program_starts_registers_and_ends_in_order(cluster: Cluster) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("WHIMBREL_")},
        "WHIMBREL_HOME": str(cluster.home),
        "WHIMBREL_ETCD": cluster.server.endpoint,
        "WHIMBREL_CONTROLLER": cluster.controller.url,
    }
    command = [sys.executable, "-m", "agents.daemon", "--node", "n1", "--slots", "3"]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert refused.returncode != 0
    assert "no cluster token" in refused.stderr
    cluster.agent = subprocess.Popen(command, env=environment | {"WHIMBREL_CLUSTER_TOKEN": "wb_cluster_test"})
    cluster.started.append(cluster.agent)
    wait_for(lambda: cluster.node() is not None, what="registration")
    node = cluster.node()
    assert node is not None
    assert (node.resources.slots, node.pid) == (3, cluster.agent.pid)
    assert cluster.end_agent(signal.SIGTERM) == 0
    assert cluster.node() is None
