"""Runs over the API: create, list, want, and what belongs to them."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import httpx
import pytest

from api.services import Services
from orchestrator.db import tables
from tests.api.support import StubController, now, spec, version_row


async def _create(api: httpx.AsyncClient, name: str = "sums") -> dict[str, Any]:
    answer = await api.post("/v1/runs", json=spec(name))
    assert answer.status_code == 201, answer.text
    return answer.json()


async def test_a_created_run_is_found_by_its_location_id_and_name(
    api: httpx.AsyncClient, controller: StubController
) -> None:
    answer = await api.post("/v1/runs", json=spec())
    run = answer.json()
    assert controller.wakes == 1
    assert run["status"]["state"] == "pending"
    assert run["status"]["head_version"] == -1
    assert run["spec"]["staleness"]["max_versions"] == 4
    assert {one["type"] for one in run["conditions"]} == {"Ready", "Progressing", "Healthy"}
    assert run["created_at"].endswith("Z")
    for path in (answer.headers["location"], f"/v1/runs/{run['id']}", "/v1/runs/sums"):
        assert (await api.get(path)).json()["id"] == run["id"]


@pytest.mark.parametrize(
    ("body", "status", "code", "hint"),
    [
        (spec(max_step=5), 422, "invalid_spec", "max_steps"),
        (spec(batch_size=7), 422, "invalid_spec", ""),
        ({"name": "x"}, 422, "invalid_spec", ""),
        ([], 422, "invalid", "object"),
    ],
)
async def test_a_wrong_spec_is_refused_with_a_sentence_and_a_suggestion(
    api: httpx.AsyncClient, body: Any, status: int, code: str, hint: str
) -> None:
    answer = await api.post("/v1/runs", json=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert hint in answer.json()["hint"]


@pytest.mark.parametrize("text", ["{", '{"name": NaN}', '{"name": "a", "name": "b"}', "", '"x"', "[" * 100_000])
async def test_what_is_not_one_strict_json_object_is_refused(api: httpx.AsyncClient, text: str) -> None:
    answer = await api.post("/v1/runs", content=text, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid")


async def test_a_body_of_another_type_is_refused(api: httpx.AsyncClient) -> None:
    answer = await api.post("/v1/runs", content="{}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 422
    assert "application/json" in answer.json()["detail"]


async def test_the_same_key_and_body_get_the_same_answer_even_at_once(api: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "k1"}
    answers = await asyncio.gather(*[api.post("/v1/runs", json=spec(), headers=headers) for _ in range(4)])
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len({answer.headers["location"] for answer in answers}) == 1
    assert len((await api.get("/v1/runs")).json()["items"]) == 1


async def test_the_same_key_with_another_body_is_refused(api: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "k1"}
    await api.post("/v1/runs", json=spec(), headers=headers)
    answer = await api.post("/v1/runs", json=spec("other"), headers=headers)
    assert answer.status_code == 422
    assert (await api.post("/v1/runs", json=spec("o"), headers={"Idempotency-Key": "x" * 300})).status_code == 422
    assert len((await api.get("/v1/runs")).json()["items"]) == 1


async def test_a_failed_request_does_not_use_up_its_key(api: httpx.AsyncClient) -> None:
    run = await _create(api)
    headers = {"Idempotency-Key": "k1"}
    assert (await api.post("/v1/runs", json=spec(), headers=headers)).status_code == 409
    await api.post(f"/v1/runs/{run['id']}/stop")
    assert (await api.post("/v1/runs", json=spec("second"), headers=headers)).status_code == 201


async def test_pages_give_every_run_once_in_order_also_while_runs_are_added(api: httpx.AsyncClient) -> None:
    ids = [(await _create(api, f"run-{number}"))["id"] for number in range(7)]
    seen: list[str] = []
    cursor = ""
    while True:
        page = (await api.get("/v1/runs", params={"limit": 2, "cursor": cursor})).json()
        seen += [run["id"] for run in page["items"]]
        await _create(api, f"late-{len(seen)}")
        if page["next_cursor"] is None:
            break
        cursor = page["next_cursor"]
    assert seen == ids[::-1]
    assert len((await api.get("/v1/runs", params={"state": "running"})).json()["items"]) == 0


@pytest.mark.parametrize("query", ["limit=0", "limit=501", "limit=x", "cursor=%21%21"])
async def test_wrong_pages_are_refused(api: httpx.AsyncClient, query: str) -> None:
    assert (await api.get(f"/v1/runs?{query}")).status_code == 422


async def test_what_is_wanted_is_durable_before_the_answer_and_asked_once(
    api: httpx.AsyncClient, services: Services, controller: StubController
) -> None:
    run = await _create(api)
    for verb, desired in (("pause", "paused"), ("resume", "running"), ("stop", "stopped")):
        wakes = controller.wakes
        first = await api.post(f"/v1/runs/sums/{verb}")
        again = await api.post(f"/v1/runs/sums/{verb}")
        assert (first.status_code, again.status_code) == (202, 200)
        assert first.json()["desired"] == desired
        assert (await services.runs.get(run["id"])).desired_state == desired
        assert controller.wakes == wakes + 1
        assert again.json()["generation"] == first.json()["generation"]


async def test_a_run_that_ended_is_not_wanted_otherwise(api: httpx.AsyncClient, services: Services) -> None:
    run = await _create(api)
    await services.runs.update(run["id"], state="failed", error="It broke.")
    answer = await api.post("/v1/runs/sums/pause")
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert (await api.get("/v1/runs/sums")).json()["status"]["reason"] == "It broke."


@pytest.mark.parametrize(
    "path", ["", "/workers", "/versions", "/metrics", "/timeline", "/incidents", "/audit", "/events"]
)
async def test_parts_of_a_run_that_does_not_exist_are_not_found(api: httpx.AsyncClient, path: str) -> None:
    answer = await api.get(f"/v1/runs/nobody{path}")
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert answer.json()["hint"]
    await _create(api)
    assert (await api.get(f"/v1/runs/sums{path}")).status_code == 200


async def test_the_status_says_what_the_newest_version_and_the_workers_say(
    api: httpx.AsyncClient, services: Services
) -> None:
    run = await _create(api)
    async with services.database.write() as session:
        session.add_all([version_row(run["id"], version) for version in range(3)])
    await services.runs.update(
        run["id"], state="running", head_version=2, mirrored_version=2, running_s=20.0, unavailable_s=5.0, recoveries=1
    )
    for name in ("rollout-10", "rollout-2"):
        await services.fleet.put_worker(
            run["id"],
            name,
            role="rollout",
            node_id="n1",
            epoch=4,
            start=2,
            state="running",
            gauges={"tokens_per_s": 30},
        )
    await services.fleet.put_worker(run["id"], "rollout-2", phase="waiting", note="The controller is away.")
    await services.fleet.put_worker(
        run["id"], "trainer", role="trainer", node_id="n1", epoch=5, start=1, state="exited"
    )
    await services.incidents.open(run_id=run["id"], kind="worker_exit", subject="trainer", summary="It died.")
    body = (await api.get("/v1/runs/sums")).json()
    status = body["status"]
    assert (status["reward"], status["staleness_max"], status["tokens_per_s"]) == (0.2, 1.0, 60.0)
    assert (status["ettr"], status["eta_seconds"], status["recoveries"]) == (0.75, 30.0, 1)
    assert (status["workers_running"], status["workers_total"], status["open_incidents"]) == (2, 3, 1)
    assert status["reason"] == "rollout-2 waits: The controller is away."
    conditions = {one["type"]: one for one in body["conditions"]}
    assert conditions["Healthy"]["message"] == "It died."
    assert conditions["Ready"]["status"] == "false"
    workers = (await api.get("/v1/runs/sums/workers")).json()["items"]
    assert [one["worker"] for one in workers] == ["trainer", "rollout-2", "rollout-10"]
    assert [one["restarts"] for one in workers] == [0, 1, 1]


async def test_versions_and_curves(api: httpx.AsyncClient, services: Services) -> None:
    run = await _create(api)
    async with services.database.write() as session:
        session.add_all([version_row(run["id"], version, step_seconds=2.0) for version in range(5)])
    page = (await api.get("/v1/runs/sums/versions", params={"limit": 3})).json()
    rest = (await api.get("/v1/runs/sums/versions", params={"cursor": page["next_cursor"]})).json()
    assert [one["version"] for one in page["items"] + rest["items"]] == [4, 3, 2, 1, 0]
    assert rest["next_cursor"] is None
    assert page["items"][0]["density"] == 0.01
    assert (await api.get("/v1/runs/sums/versions/3")).json()["manifest"] == f"{3:032x}"
    assert (await api.get("/v1/runs/sums/versions/9")).status_code == 404
    curves = (await api.get("/v1/runs/sums/metrics", params={"after_step": 2})).json()
    assert curves["series"]["reward/mean"] == [[3, 0.3], [4, 0.4]]
    assert curves["series"]["time/step"] == [[3, 2.0], [4, 2.0]]
    assert curves["last_step"] == 4
    chosen = (await api.get("/v1/runs/sums/metrics", params={"names": "reward/mean,none"})).json()
    assert list(chosen["series"]) == ["reward/mean"]
    assert (await api.get("/v1/runs/sums/metrics", params={"after_step": 4})).json() == {"series": {}, "last_step": 4}


async def test_the_timeline_has_lanes_marks_and_brackets(api: httpx.AsyncClient, services: Services) -> None:
    run = await _create(api)
    for state in ("starting", "running"):
        await services.fleet.put_worker(
            run["id"], "trainer", role="trainer", node_id="n1", epoch=5, start=1, state=state
        )
    async with services.database.write() as session:
        session.add(version_row(run["id"], 0))
    incident = await services.incidents.open(
        run_id=run["id"], kind="worker_exit", subject="trainer", worker="trainer", summary="It died.", failed_at=now()
    )
    body = (await api.get("/v1/runs/sums/timeline")).json()
    assert [span["state"] for span in body["lanes"][0]["spans"]] == ["starting", "running"]
    assert body["lanes"][0]["spans"][0]["ended_at"]
    assert body["lanes"][0]["spans"][1]["ended_at"] is None
    assert [mark["version"] for mark in body["versions"]] == [0]
    assert [one["id"] for one in body["incidents"]] == [incident.id]
    later = (now() + timedelta(hours=1)).isoformat()
    body = (await api.get("/v1/runs/sums/timeline", params={"since": later})).json()
    assert (body["versions"], len(body["incidents"])) == ([], 1)
    assert (await api.get("/v1/runs/sums/timeline", params={"since": "2026-01-01T00:00:00"})).status_code == 422


async def test_the_audit_names_every_group(api: httpx.AsyncClient, services: Services) -> None:
    run = await _create(api)
    audit = (await api.get("/v1/runs/sums/audit")).json()
    assert (audit["issued"], audit["balance"], audit["balanced"], audit["sound"]) == (0, 0, True, True)
    async with services.database.write() as session:
        row = await session.get(tables.Run, run["id"])
        assert row is not None
        row.next_index = 3
    audit = (await api.get("/v1/runs/sums/audit")).json()
    assert (audit["balance"], audit["balanced"]) == (3, False)


async def test_logs_of_a_worker_without_a_node_or_with_a_dead_one_are_explained(
    api: httpx.AsyncClient, services: Services, controller: StubController
) -> None:
    run = await _create(api)
    assert (await api.get("/v1/runs/sums/workers/trainer/logs")).status_code == 404
    await services.fleet.put_worker(run["id"], "trainer", role="trainer", epoch=1, start=1, state="pending")
    assert "placed" in (await api.get("/v1/runs/sums/workers/trainer/logs")).json()["detail"]
    await services.fleet.put_worker(run["id"], "trainer", node_id="n1", epoch=2, start=1, state="running")
    controller.signals.addresses["n1"] = "127.0.0.1:1"
    answer = await api.get("/v1/runs/sums/workers/trainer/logs")
    assert (answer.status_code, answer.json()["code"]) == (503, "unreachable")
