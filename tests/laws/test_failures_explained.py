"""Law 8: whatever goes wrong is one sentence and one hint, the same in the API's answer, the command line and the events."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from api.cli import main as cli
from api.client.problems import raise_for_problem
from api.http.problem import problem_body
from orchestrator.control.chronicle import ADVICE, Chronicle
from orchestrator.control.signals import Signals
from orchestrator.core.decisions import RecordIncident
from orchestrator.db import Database, EventLog, IncidentRepository, RunRepository, tables
from whimbrel import errors
from whimbrel.clock import SystemClock
from whimbrel.errors import WhimbrelError
from whimbrel.spec import parse_run_spec
from whimbrel.wire.work import Caller, Incident

ROOT = Path(__file__).resolve().parents[2]
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, WhimbrelError)]
WHAT, HINT = "The chunk b3:12 does not match its digest.", "It is fetched again from another node."


def test_law_8_every_error_has_its_own_code_and_belongs_to_a_status_and_an_exit_code() -> None:
    assert len({kind.code for kind in KINDS}) == len(KINDS)
    for kind in KINDS:
        assert 400 <= kind.status <= 599
        assert kind.exit_code not in (0, errors.EXIT_INTERRUPTED)
        assert kind is WhimbrelError or "code" in vars(kind)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_law_8_an_error_says_the_same_from_the_api_to_the_terminal(
    kind: type[WhimbrelError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raised = kind(WHAT, hint=HINT, version=7)
    body = problem_body(
        raised.status, raised.code, raised.message, hint=raised.hint, request_id="req_1", **raised.details
    )
    assert (body["status"], body["code"], body["detail"], body["hint"]) == (kind.status, kind.code, WHAT, HINT)

    def answered() -> None:
        raise_for_problem(httpx.Response(kind.status, json=body))

    with pytest.raises(WhimbrelError) as caught:
        answered()
    assert type(caught.value) is kind
    assert (caught.value.message, caught.value.hint, caught.value.details) == (WHAT, HINT, {"version": 7})
    monkeypatch.setattr(cli, "app", answered)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == kind.exit_code
    assert capsys.readouterr().err == f"error: {WHAT}\nhint: {HINT}\n"


@pytest.fixture
async def chronicle(database: Database) -> Chronicle:
    clock = SystemClock()
    await database.take_leadership(1, "here")
    return Chronicle(database, Signals(clock, lambda: None), clock, EventLog(database, clock))


async def _recorded(database: Database) -> tuple[tables.Incident, tables.Event]:
    (incident,) = await IncidentRepository(database).list()
    (event,) = await EventLog(database).after(0)
    return incident, event


async def test_law_8_what_a_worker_reports_is_the_same_sentence_in_the_incident_and_in_the_events(
    database: Database, chronicle: Chronicle
) -> None:
    run = await RunRepository(database).create(
        parse_run_spec({"name": "told", "model": "builtin:arithmetic", "max_steps": 1})
    )
    reported = Incident(caller=Caller(run_id=run.id, worker="rollout-0", epoch=3), kind="corrupt_chunk", message=WHAT)
    await chronicle.record_reported(1, reported)
    incident, event = await _recorded(database)
    assert incident.summary == incident.cause == event.message == WHAT
    assert (incident.worker, incident.kind, event.subject) == ("rollout-0", "corrupt_chunk", "rollout-0")


async def test_law_8_what_was_found_and_what_to_do_stand_in_the_incident_and_in_the_events(
    database: Database, chronicle: Chronicle
) -> None:
    found = RecordIncident("store_outage", "", "", "", 0, 0.0, charged=False, fingerprint="", reason=WHAT)
    await chronicle.record(1, found, SystemClock().wall())
    incident, event = await _recorded(database)
    assert incident.summary == event.message == f"{WHAT} {ADVICE['store_outage']}"


def _messages() -> Iterator[tuple[str, ast.expr]]:
    names = {kind.__name__ for kind in KINDS}
    for part in ("whimbrel", "orchestrator", "agents", "api"):
        for path in (ROOT / part).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id in names
                    and node.args
                ):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node.args[0]


def test_law_8_every_message_that_is_raised_is_a_sentence() -> None:
    for where, message in _messages():
        last = message.values[-1] if isinstance(message, ast.JoinedStr) else message
        if isinstance(last, ast.Constant):
            assert str(last.value).rstrip().endswith((".", "?", "!")), f"{where} raises half a sentence"
