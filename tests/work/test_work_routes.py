"""What workers and agents call: round trips, the token, the bounds, the fence."""

from __future__ import annotations

import pytest

from tests.work.conftest import EPOCH, Desk
from whimbrel.limits import BODY_MAX_BYTES
from whimbrel.wire.work import (
    AgentReply,
    AgentReport,
    BatchReply,
    BatchRequest,
    Caller,
    GroupResult,
    Incident,
    LeaseReply,
    LeaseRequest,
    Progress,
    ProgressReply,
    ReportReply,
    ReportRequest,
    TrajectoryMeta,
)

PATHS = [
    "/work/v1/progress",
    "/work/v1/lease",
    "/work/v1/report",
    "/work/v1/batch",
    "/work/v1/incident",
    "/agent/v1/report",
]


def caller(desk: Desk, worker: str = "rollout-0", epoch: int = EPOCH) -> Caller:
    return Caller(run_id=desk.run.id, worker=worker, epoch=epoch)


async def test_a_group_goes_from_lease_to_batch(desk: Desk):
    request = LeaseRequest(caller=caller(desk), policy_version=0, capacity=2)
    leases = (await desk.ask("/work/v1/lease", request, LeaseReply)).groups
    results = [
        GroupResult(
            group_id=lease.group_id,
            attempt=lease.attempt,
            payload=f"digest-{lease.index}",
            payload_bytes=10,
            trajectories=[
                TrajectoryMeta(sample=i, tokens=3, reward=0.5, min_version=0, max_version=0, finish_reason="stop")
                for i in range(2)
            ],
        )
        for lease in leases
    ]
    report = ReportRequest(caller=caller(desk), finished=results)
    reply = await desk.ask("/work/v1/report", report, ReportReply)
    assert reply.accepted == [lease.group_id for lease in leases]
    batch = await desk.ask("/work/v1/batch", BatchRequest(caller=caller(desk, "trainer"), step=0), BatchReply)
    assert [group.payload for group in batch.groups] == ["digest-0", "digest-1"]


async def test_progress_and_agent_reports_are_answered_from_memory(desk: Desk):
    progress = Progress(caller=caller(desk), phase="working", phase_age_s=0.1)
    assert not (await desk.ask("/work/v1/progress", progress, ProgressReply)).paused
    report = AgentReport(node_id="n1", incarnation="inc_1", sequence=1, workers=[])
    assert (await desk.ask("/agent/v1/report", report, AgentReply)).forget == []
    incident = Incident(caller=caller(desk), kind="corrupt_chunk", message="Fetched again.", details={"chunk": "x"})
    assert (await desk.post("/work/v1/incident", incident)).status_code == 204
    assert desk.incidents == [incident]


@pytest.mark.parametrize("path", PATHS)
async def test_nothing_is_answered_without_the_cluster_token(desk: Desk, path: str):
    for header in ("", "Bearer wrong", "Bearer ", "Basic wb_cluster_test", "Bearer wb_admin_test"):
        response = await desk.post(path, b"\x80", Authorization=header)
        assert response.status_code == 401, header


@pytest.mark.parametrize("path", PATHS)
async def test_bodies_that_are_no_message_or_too_large_are_refused(desk: Desk, path: str):
    for body in (b"", b"\xc1", b"\x80", b"not msgpack at all"):
        response = await desk.post(path, body)
        assert response.status_code == 422, body
        assert response.headers["content-type"].startswith("application/problem+json")
    response = await desk.post(path, b"\x00" * (BODY_MAX_BYTES + 1))
    assert response.status_code == 429


async def test_a_replaced_worker_is_told_so(desk: Desk):
    old = caller(desk, epoch=EPOCH - 1)
    for path, message in {
        "/work/v1/progress": Progress(caller=old, phase="working", phase_age_s=0.0),
        "/work/v1/lease": LeaseRequest(caller=old, policy_version=0, capacity=1),
        "/work/v1/report": ReportRequest(caller=old),
        "/work/v1/batch": BatchRequest(caller=caller(desk, "trainer", EPOCH - 1), step=0),
        "/work/v1/incident": Incident(caller=old, kind="x", message="y"),
    }.items():
        response = await desk.post(path, message)
        assert (response.status_code, response.json()["code"]) == (409, "fenced"), path


async def test_a_controller_that_does_not_lead_answers_nobody(desk: Desk):
    desk.signals.serving = False
    request = LeaseRequest(caller=caller(desk), policy_version=0, capacity=1)
    response = await desk.post("/work/v1/lease", request)
    assert (response.status_code, response.json()["code"]) == (503, "unreachable")
