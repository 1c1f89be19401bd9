"""What workers and agents call: `/work/v1/…` and `/agent/v1/report`.

Progress and agents' reports touch memory only, so that thousands of them cost little; the control loop writes them down.
Work (lease, report, batch) is a transaction of the ledger. Every caller's epoch is checked twice: against what the
leader knows from etcd, and in the transaction against what the database knows.
"""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response

from api.work.body import answer, read_message, require_cluster, services_of
from whimbrel.wire.work import AgentReport, BatchRequest, Incident, LeaseRequest, Progress, ReportRequest

router = APIRouter(dependencies=[Depends(require_cluster)], include_in_schema=False)


@router.post("/work/v1/progress")
async def progress(request: Request) -> Response:
    """A worker says what it does; learns whether its run is paused."""
    message = await read_message(request, Progress)
    return answer(services_of(request).controller.signals.progress(message))


@router.post("/work/v1/lease")
async def lease(request: Request) -> Response:
    """A rollout asks for prompt groups."""
    message = await read_message(request, LeaseRequest)
    services = services_of(request)
    services.controller.signals.check_caller(message.caller)
    head = services.controller.signals.head_version(message.caller.run_id)
    return answer(await services.ledger.lease(message, head_version=head))


@router.post("/work/v1/report")
async def report(request: Request) -> Response:
    """A rollout brings finished groups, says how far others are, and learns which it may forget."""
    message = await read_message(request, ReportRequest)
    services = services_of(request)
    services.controller.signals.check_caller(message.caller)
    head = services.controller.signals.head_version(message.caller.run_id)
    return answer(await services.ledger.report(message, head_version=head))


@router.post("/work/v1/batch")
async def batch(request: Request) -> Response:
    """A trainer asks for the batch of a step."""
    message = await read_message(request, BatchRequest)
    services = services_of(request)
    services.controller.signals.check_caller(message.caller)
    head = services.controller.signals.head_version(message.caller.run_id)
    return answer(await services.ledger.batch(message, head_version=head))


@router.post("/work/v1/incident", status_code=204)
async def incident(request: Request) -> Response:
    """A worker has something recorded."""
    message = await read_message(request, Incident)
    await services_of(request).controller.record_incident(message)
    return Response(status_code=204)


@router.post("/agent/v1/report")
async def agent_report(request: Request) -> Response:
    """An agent brings its whole state; learns which exits are recorded."""
    message = await read_message(request, AgentReport)
    return answer(services_of(request).controller.signals.agent_report(message))
