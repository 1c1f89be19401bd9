"""`whimbrel server` as a process, with a real etcd."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from api.client import Client
from tests.cli.support import TOKEN, Cli
from whimbrel.coordination import EtcdServer

END_S = 5.0
"""The bounds of the ending add up to 3 s; this machine may be busy."""

RUN_FILE = 'name = "sums"\nmodel = "builtin:tiny"\nbatch_size = 8\nmax_steps = 5\n[algorithm]\ngroup_size = 4\n'


class Server:
    """A controller process of this test."""

    def __init__(self, home: Path, etcd: str) -> None:
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("WHIMBREL_")},
            "WHIMBREL_HOME": str(home),
            "WHIMBREL_ETCD": etcd,
            "WHIMBREL_TOKEN": TOKEN,
            "OMP_NUM_THREADS": "1",
        }
        self._log = (home / "server.log").open("w+")
        command = [sys.executable, "-m", "api.cli.main", "server", "--port", "0"]
        self.process = subprocess.Popen(command, env=self.environment, stdout=self._log, stderr=subprocess.STDOUT)

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    @property
    def url(self) -> str:
        wait(lambda: "controller at http" in self.log(), self.log)
        return self.log().partition("controller at ")[2].split()[0]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=10)
        self._log.close()


def wait(ready: Callable[[], bool], explain: Callable[[], str], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.1)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    yield server
    server.stop()


@pytest.mark.etcd
def test_a_controller_serves_runs_and_ends_in_time_with_streams_open(tmp_path: Path, etcd: EtcdServer) -> None:
    server = Server(tmp_path, etcd.endpoint)
    try:
        client = Client(server.url, TOKEN)
        wait(lambda: client.ready()["ready"], server.log)
        assert client.leader()["leader"]
        cli = Cli(tmp_path, server.url)
        file = tmp_path / "run.toml"
        file.write_text(RUN_FILE)
        started = cli("run", "start", str(file), "-o", "name")
        assert started.returncode == 0, started.stderr
        run_id = started.stdout.strip()
        assert cli("run", "start", str(file)).returncode == 4
        assert json.loads(cli("run", "show", "sums", "-o", "json").stdout)["id"] == run_id
        assert cli("run", "audit", "sums").returncode == 0
        assert cli("run", "stop", "sums").returncode == 0
        wait(lambda: client.run("sums")["status"]["state"] == "stopped", server.log)
        headers = {"Authorization": "Bearer " + TOKEN, "Accept": "text/event-stream"}
        with httpx.stream("GET", f"{server.url}/v1/events", headers=headers, timeout=10) as stream:
            assert next(stream.iter_lines()).startswith("id:")
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=10) == 0, server.log()
            assert time.monotonic() - began < END_S
        assert "Traceback" not in server.log()
    finally:
        server.end()


@pytest.mark.etcd
def test_without_etcd_the_api_answers_and_says_what_is_missing_until_it_is_there(tmp_path: Path) -> None:
    etcd = EtcdServer(tmp_path / "etcd")
    etcd.start()
    etcd.kill()
    server = Server(tmp_path, etcd.endpoint)
    try:
        client = Client(server.url, TOKEN)
        ready = client.ready()
        assert not ready["ready"]
        assert not ready["checks"]["etcd"]["ok"]
        assert ready["checks"]["etcd"]["reason"]
        assert ready["checks"]["database"]["ok"]
        assert client.runs() == []
        etcd.start()
        wait(lambda: client.ready()["ready"], server.log)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=10) == 130, server.log()
    finally:
        server.end()
        etcd.stop()


def test_an_older_schema_is_one_sentence_with_the_command_that_helps(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "controller.db") as database:
        database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        database.execute("INSERT INTO alembic_version VALUES ('0000')")
    done = Cli(tmp_path, "")("server", "--port", "0")
    assert done.returncode == 1
    assert done.stderr.startswith("error: The database's schema is at revision 0000")
    assert "whimbrel db upgrade" in done.stderr


def test_the_database_is_made_and_its_revision_told(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "home", "")
    assert cli("db", "current").stdout == "none\n"
    assert cli("db", "upgrade").returncode == 0
    done = cli("db", "current")
    assert done.returncode == 0
    assert done.stdout.strip() in done.stderr
