"""The private etcd: starts once it can serve, keeps its data, leaves nothing behind, and explains why it cannot start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from whimbrel.coordination import BlockingEtcd, EtcdServer
from whimbrel.errors import WhimbrelError

ORPHAN = """
import sys, threading, time
from pathlib import Path
from whimbrel.coordination import EtcdServer
server = EtcdServer(Path(sys.argv[1]))
thread = threading.Thread(target=server.start)  # the end of the thread that starts it must not end etcd
thread.start()
thread.join()
time.sleep(0.5)
print(server.pid, server.process.poll(), flush=True)
time.sleep(60)
"""


def test_data_survives_a_kill_and_the_port_stays(own_etcd: EtcdServer) -> None:
    etcd = BlockingEtcd([own_etcd.endpoint])
    etcd.put("/kept", b"1")
    endpoint = own_etcd.endpoint
    own_etcd.kill()
    own_etcd.start()
    assert own_etcd.endpoint == endpoint
    etcd.close()
    etcd = BlockingEtcd([own_etcd.endpoint])
    found = etcd.get("/kept")
    assert found is not None
    assert found.value == b"1"
    etcd.close()
    own_etcd.stop()
    own_etcd.stop()


def test_a_port_in_use_and_a_missing_program_are_explained(
    etcd_server: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WhimbrelError, match=str(etcd_server.client_port)):
        EtcdServer(tmp_path / "data", client_port=etcd_server.client_port).start()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WhimbrelError, match="not installed") as caught:
        EtcdServer(tmp_path / "data").start()
    assert "apt-get install etcd-server" in caught.value.hint


@pytest.mark.usefixtures("etcd_server")
def test_etcd_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN, str(tmp_path / "data")], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, ended = parent.stdout.readline().split()
    assert ended == "None"
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while _lives(int(pid)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
