"""Is it alive, is it ready, who leads, which version."""

from __future__ import annotations

import asyncio
import platform

from fastapi import APIRouter, Depends, Request, Response

from api.http.auth import require_admin_unless_loopback
from api.services import Services
from api.v1.models import Check, Health, LeaderInfo, Readiness, VersionInfo
from whimbrel import __version__
from whimbrel.errors import WhimbrelError
from whimbrel.limits import READY_CHECK_S
from whimbrel.wire import PROTOCOL

router = APIRouter(tags=["controller"], dependencies=[Depends(require_admin_unless_loopback)])


@router.get("/healthz")
async def healthz() -> Health:
    """The process answers."""
    return Health()


@router.get("/readyz", responses={503: {"model": Readiness, "description": "Not ready; the checks say why."}})
async def readyz(request: Request, response: Response) -> Readiness:
    """The controller can do its work: 200 or 503, with the reason of each part."""
    services: Services = request.app.state.services
    controller = services.controller
    leader = controller.leader
    checks = {
        "database": await _check_database(services),
        "etcd": Check(ok=controller.etcd_reachable, reason=controller.etcd_reason),
        "leader": Check(
            ok=controller.serving or leader is not None,
            reason=""
            if controller.serving
            else f"{leader.holder} leads"
            if leader
            else controller.etcd_reason or "no controller leads yet",
        ),
    }
    ready = all(check.ok for check in checks.values())
    response.status_code = 200 if ready else 503
    return Readiness(ready=ready, checks=checks)


@router.get("/leader", responses={503: {"model": LeaderInfo, "description": "Another controller leads, or none."}})
async def leader(request: Request, response: Response) -> LeaderInfo:
    """200 when this controller leads, else 503; for load balancers."""
    controller = request.app.state.services.controller
    known = controller.leader
    response.status_code = 200 if controller.leading else 503
    return LeaderInfo(leader=controller.leading, holder=known.holder if known else "", url=known.url if known else "")


@router.get("/version")
async def version() -> VersionInfo:
    """What runs here."""
    return VersionInfo(version=__version__, protocol=PROTOCOL, python=platform.python_version())


async def _check_database(services: Services) -> Check:
    try:
        async with asyncio.timeout(READY_CHECK_S):
            await services.database.ping()
    except TimeoutError:
        return Check(ok=False, reason=f"no answer within {READY_CHECK_S:g} s")
    except WhimbrelError as error:
        return Check(ok=False, reason=error.message)
    return Check(ok=True)
