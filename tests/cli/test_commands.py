"""The command line: exit codes, data apart from talk, formats."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.support import Cli
from whimbrel import errors

RUN_FILE = """
name = "sums"
model = "builtin:tiny"
batch_size = 8
max_steps = 5
[algorithm]
group_size = 4
"""

RUN: dict[str, Any] = {
    "id": "run_1",
    "name": "sums",
    "spec": {"model": "builtin:tiny"},
    "desired": "running",
    "status": {
        "state": "completed",
        "reason": "Reached max_steps.",
        "head_version": 5,
        "max_steps": 5,
        "reward": 0.5,
        "tokens_per_s": None,
        "staleness_max": 1.0,
        "ettr": 0.9,
        "recoveries": 2,
        "eta_seconds": None,
        "workers_running": 0,
        "workers_total": 3,
        "open_incidents": 0,
    },
    "conditions": [],
    "created_at": "2026-01-01T00:00:00.000Z",
    "finished_at": None,
}
AUDIT: dict[str, Any] = {
    **dict.fromkeys(("issued", "consumed", "batched", "buffered", "leased", "pooled", "dropped", "balance"), 0),
    **dict.fromkeys(("consumed_twice", "too_stale", "trajectories_lost"), 0),
    "run_id": "run_1",
    "balanced": True,
    "sound": True,
    "dropped_reasons": {},
}


class Controller:
    """Answers what a test set for a path."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                path = self.path.split("?")[0]
                outer.requests.append((self.command, self.path, dict(self.headers)))
                status, body = outer.answers.get(path, (404, {"code": "not_found", "detail": "No.", "hint": "Look."}))
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                self._answer()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def controller() -> Iterator[Controller]:
    serving = Controller()
    yield serving
    serving.close()


@pytest.fixture
def cli(tmp_path: Path, controller: Controller) -> Cli:
    return Cli(tmp_path, controller.url)


@pytest.mark.parametrize(
    ("kind", "exit_code"),
    [(errors.NotFound, 3), (errors.Conflict, 4), (errors.UsageError, 2), (errors.TimedOut, 6), (errors.Corrupt, 1)],
)
def test_an_error_of_the_controller_keeps_its_sentence_hint_and_exit_code(
    cli: Cli, controller: Controller, kind: type[errors.WhimbrelError], exit_code: int
) -> None:
    controller.answers["/v1/runs/x"] = (kind.status, {"code": kind.code, "detail": "What.", "hint": "Do this."})
    done = cli("run", "show", "x")
    assert (done.returncode, done.stdout) == (exit_code, "")
    assert done.stderr == "error: What.\nhint: Do this.\n"


def test_a_controller_that_is_away_is_exit_code_5_with_what_to_do(tmp_path: Path) -> None:
    done = Cli(tmp_path, "http://127.0.0.1:1")("run", "ls")
    assert done.returncode == 5
    assert "does not answer" in done.stderr
    assert "whimbrel up" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments", [("run", "nonsense"), ("run", "show"), ("run", "ls", "-o", "xml"), ("--server", "x", "run", "ls")]
)
def test_wrong_use_is_exit_code_2(cli: Cli, arguments: tuple[str, ...]) -> None:
    done = cli(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""


def test_run_check_validates_without_a_controller(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN_FILE)
    offline = Cli(tmp_path, "http://127.0.0.1:1")
    assert offline("run", "check", str(file)).returncode == 0
    file.write_text(RUN_FILE.replace("max_steps", "max_step"))
    done = offline("run", "check", str(file))
    assert done.returncode == 2
    assert "hint: Did you mean max_steps?" in done.stderr


def test_data_goes_to_stdout_and_parses_in_every_format(cli: Cli, controller: Controller) -> None:
    controller.answers["/v1/runs"] = (200, {"items": [RUN], "next_cursor": None})
    table = cli("run", "ls")
    assert (table.returncode, table.stderr) == (0, "")
    assert table.stdout.splitlines()[0].split()[:3] == ["NAME", "STATE", "STEP"]
    assert "\x1b" not in table.stdout
    assert "sums  completed  5/5" in table.stdout
    assert json.loads(cli("run", "ls", "-o", "json").stdout) == [RUN]
    assert yaml.safe_load(cli("run", "ls", "-o", "yaml").stdout) == [RUN]
    assert cli("run", "ls", "-o", "name").stdout == "sums\n"


def test_an_empty_list_tells_how_to_begin_on_stderr(cli: Cli, controller: Controller) -> None:
    controller.answers["/v1/runs"] = (200, {"items": [], "next_cursor": None})
    done = cli("run", "ls")
    assert (done.returncode, done.stdout) == (0, "")
    assert "whimbrel run start FILE" in done.stderr
    assert json.loads(cli("run", "ls", "-o", "json").stdout) == []


def test_run_start_prints_the_dashboard_and_the_next_commands(cli: Cli, controller: Controller, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN_FILE)
    controller.answers["/v1/runs"] = (201, RUN)
    done = cli("run", "start", str(file))
    assert done.returncode == 0
    assert f"{controller.url}/runs/run_1" in done.stderr
    assert done.stderr.count("  whimbrel run ") == 3
    method, _, headers = controller.requests[-1]
    given = {name.lower(): value for name, value in headers.items()}
    assert (method, given["authorization"]) == ("POST", "Bearer secret")
    assert given["idempotency-key"].startswith("key_")
    assert cli("run", "start", str(file), "-o", "name").stdout == "run_1\n"


@pytest.mark.parametrize(("state", "exit_code"), [("completed", 0), ("failed", 1), ("stopped", 1)])
def test_watch_ends_with_the_run_and_its_outcome(cli: Cli, controller: Controller, state: str, exit_code: int) -> None:
    controller.answers["/v1/runs/sums"] = (200, {**RUN, "status": {**RUN["status"], "state": state}})
    controller.answers["/v1/runs/run_1/workers"] = (200, {"items": []})
    controller.answers["/v1/events"] = (200, {"items": [], "next_after": 0})
    done = cli("run", "watch", "sums")
    assert done.returncode == exit_code
    assert done.stdout.startswith(f"sums  {state}  step 5/5")
    assert "Reached max_steps." in done.stderr


@pytest.mark.parametrize(("changes", "exit_code"), [({}, 0), ({"balance": 2, "balanced": False, "sound": False}, 1)])
def test_audit_fails_when_the_ledger_is_off(
    cli: Cli, controller: Controller, changes: dict[str, Any], exit_code: int
) -> None:
    controller.answers["/v1/runs/sums/audit"] = (200, AUDIT | changes)
    done = cli("run", "audit", "sums")
    assert done.returncode == exit_code
    assert "balance" in done.stdout


def test_doctor_reports_in_json_and_never_breaks(tmp_path: Path) -> None:
    done = Cli(tmp_path, "http://127.0.0.1:1")("doctor", "-o", "json")
    findings = json.loads(done.stdout)
    assert {one["level"] for one in findings} <= {"ok", "warn", "fail"}
    assert all(one["hint"] for one in findings if one["level"] != "ok")
    assert {"python", "etcd program", "home", "disk", "controller", "package agents"} <= {
        one["check"] for one in findings
    }
    assert done.returncode == int(any(one["level"] == "fail" for one in findings))


def test_doctor_sees_a_token_that_others_can_read(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "cluster").write_text("x")
    (tmp_path / "tokens" / "cluster").chmod(0o644)
    done = Cli(tmp_path, "http://127.0.0.1:1")("doctor", "-o", "json")
    found = next(one for one in json.loads(done.stdout) if one["check"] == "cluster token")
    assert (found["level"], done.returncode) == ("fail", 1)


def test_config_shows_origins_and_no_secret(cli: Cli) -> None:
    items = {one["setting"]: one for one in json.loads(cli("config", "show", "--origins", "-o", "json").stdout)}
    assert items["controller"]["origin"] == "WHIMBREL_CONTROLLER"
    assert items["region"]["origin"] == "default"
    assert "secret" not in json.dumps(items)


def test_a_server_on_a_public_address_must_be_insisted_on(tmp_path: Path) -> None:
    done = Cli(tmp_path, "")("server", "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 2
    assert "--insecure-public" in done.stderr


def test_a_port_in_use_is_one_sentence(cli: Cli, controller: Controller) -> None:
    port = controller.url.rpartition(":")[2]
    done = cli("server", "--port", port)
    assert done.returncode == 1
    assert f"Port {port}" in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
