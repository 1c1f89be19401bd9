"""Nodes, incidents, events, health, metrics, the OpenAPI document."""

from __future__ import annotations

import json
from datetime import timedelta

import httpx
from fastapi import FastAPI

from api.services import Services
from tests.api.support import StubController, now, spec
from whimbrel.errors import Unreachable
from whimbrel.wire.cluster import Leader


async def test_nodes_show_who_runs_there_and_take_marks(
    api: httpx.AsyncClient, services: Services, controller: StubController
) -> None:
    run = (await api.post("/v1/runs", json=spec())).json()
    for name in ("n2", "n1"):
        await services.fleet.put_node(
            name,
            state="ready",
            address="127.0.0.1:7000",
            resources={"cpus": 4, "memory_bytes": 10, "gpus": 0, "slots": 2},
            last_report_at=now() - timedelta(seconds=2),
        )
    await services.fleet.put_worker(
        run["id"], "trainer", role="trainer", node_id="n1", epoch=1, start=1, state="running"
    )
    nodes = (await api.get("/v1/nodes")).json()["items"]
    assert [(node["id"], node["slots_used"]) for node in nodes] == [("n1", 1), ("n2", 0)]
    assert nodes[0]["workers"] == [f"{run['id']}/trainer"]
    assert 1.5 < nodes[0]["lease_age_s"] < 30
    assert nodes[0]["schedulable"]
    wakes = controller.wakes
    for verb, cordoned, draining in (("cordon", True, False), ("drain", True, True), ("uncordon", False, False)):
        answer = await api.post(f"/v1/nodes/n1/{verb}")
        row = await services.fleet.node("n1")
        assert (answer.status_code, row.cordoned, row.draining) == (202, cordoned, draining)
        assert answer.json()["schedulable"] is not cordoned
    assert controller.wakes == wakes + 3
    assert (await api.get("/v1/nodes/n9")).status_code == 404
    assert (await api.post("/v1/nodes/n9/drain")).status_code == 404
    assert (await api.post("/v1/nodes/n1/explode")).status_code == 422


async def test_incidents_say_what_each_part_took(api: httpx.AsyncClient, services: Services) -> None:
    run = (await api.post("/v1/runs", json=spec())).json()
    began = now()
    incident = await services.incidents.open(
        run_id=run["id"],
        kind="worker_exit",
        subject="trainer",
        worker="trainer",
        summary="The trainer died.",
        failed_at=began,
        detected_at=began + timedelta(seconds=2),
    )
    await services.incidents.decide(incident.id, "restart", "the node is healthy", at=began + timedelta(seconds=3))
    found = (await api.get(f"/v1/incidents/{incident.id}")).json()
    assert found["open"]
    assert found["decision"] == "restart: the node is healthy"
    await services.incidents.close(incident.id, recovered_at=began + timedelta(seconds=10), cost={"steps_lost": 0})
    found = (await api.get(f"/v1/incidents/{incident.id}")).json()
    assert found["seconds"] == {"detect": 2.0, "decide": 1.0, "recover": 7.0, "total": 10.0}
    assert (found["open"], found["run_name"], found["cost"]["steps_lost"]) == (False, "sums", 0)
    assert len((await api.get("/v1/incidents", params={"open": "true"})).json()["items"]) == 0
    assert len((await api.get("/v1/incidents", params={"run": "sums"})).json()["items"]) == 1
    assert (await api.get("/v1/incidents/inc_none")).status_code == 404


async def test_incident_pages_are_complete_without_doubles(api: httpx.AsyncClient, services: Services) -> None:
    made = [
        (await services.incidents.open(run_id=None, kind="store_outage", subject="etcd", summary=f"{number}")).id
        for number in range(5)
    ]
    seen: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = (await api.get("/v1/incidents", params={"limit": 2, "cursor": cursor})).json()
        seen += [one["id"] for one in page["items"]]
        cursor = page["next_cursor"]
    assert seen == made[::-1]


async def test_events_page_on_from_where_a_reader_was(api: httpx.AsyncClient, services: Services) -> None:
    run = (await api.post("/v1/runs", json=spec())).json()
    for number in range(6):
        await services.events.append("tick", f"{number}", run_id=run["id"] if number % 2 else None)
    newest = (await api.get("/v1/events", params={"limit": 2})).json()
    assert [one["message"] for one in newest["items"]] == ["4", "5"]
    messages: list[str] = []
    after = 0
    while items := (page := (await api.get("/v1/events", params={"after": after, "limit": 3})).json())["items"]:
        messages += [one["message"] for one in items]
        after = page["next_after"]
    assert messages[1:] == ["0", "1", "2", "3", "4", "5"]
    own = (await api.get("/v1/runs/sums/events", params={"after": 0})).json()
    assert [one["message"] for one in own["items"]][1:] == ["1", "3", "5"]
    assert own["items"][0]["run_name"] == "sums"
    assert own["next_after"] == newest["next_after"]


async def test_readiness_names_what_is_missing(
    anonymous: httpx.AsyncClient, services: Services, controller: StubController
) -> None:
    assert (await anonymous.get("/readyz")).json()["ready"]
    controller.etcd_reachable, controller.etcd_reason = False, "connection refused"
    controller.leading = controller.serving = False
    controller.leader = None

    async def away() -> None:
        raise Unreachable("The database does not answer.")

    services.database.ping = away  # type: ignore[method-assign]
    answer = await anonymous.get("/readyz")
    checks = answer.json()["checks"]
    assert answer.status_code == 503
    assert [checks[name]["ok"] for name in ("database", "etcd", "leader")] == [False, False, False]
    assert all(check["reason"] for check in checks.values())
    assert (await anonymous.get("/healthz")).status_code == 200
    assert (await anonymous.get("/leader")).status_code == 503


async def test_a_standby_is_ready_but_does_not_lead(anonymous: httpx.AsyncClient, controller: StubController) -> None:
    controller.leading = controller.serving = False
    controller.leader = Leader(holder="other:2", url="http://other")
    assert (await anonymous.get("/readyz")).status_code == 200
    answer = await anonymous.get("/leader")
    assert (answer.status_code, answer.json()["url"]) == (503, "http://other")


async def test_metrics_are_prometheus_text_with_the_prefix(api: httpx.AsyncClient, services: Services) -> None:
    await api.post("/v1/runs", json=spec())
    await services.fleet.put_node("n1", state="ready")
    text = (await api.get("/metrics")).text
    assert 'whimbrel_run_state{run="sums",state="pending"} 1.0' in text
    assert 'whimbrel_run_recoveries_total{run="sums"} 0.0' in text
    assert 'whimbrel_node_ready{node="n1"} 1.0' in text
    assert "whimbrel_database_up 1.0" in text
    names = [line.split("{")[0].split(" ")[0] for line in text.splitlines() if line and not line.startswith("#")]
    assert all(name.startswith("whimbrel_") for name in names)


async def test_the_openapi_document_is_sound(app: FastAPI, anonymous: httpx.AsyncClient) -> None:
    document = (await anonymous.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    text = json.dumps(document)
    used = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert used <= set(schemas)
    identifiers = [item[method]["operationId"] for item in document["paths"].values() for method in item]
    assert len(identifiers) == len(set(identifiers))
    for path, item in document["paths"].items():
        declared = {name[1:-1] for name in path.split("/") if name.startswith("{")}
        for operation in item.values():
            named = {one["name"] for one in operation.get("parameters", []) if one["in"] == "path"}
            assert named == declared, path
            assert operation["responses"]["default"]["content"]
    assert not any(path.startswith(("/work", "/agent", "/login")) for path in document["paths"])
