"""The agent's reports to the controller: its whole state, again and again; a report that is lost is simply the next one.

A controller that is away changes nothing here: workers go on, exits wait in the report until its answer names them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import psutil

from whimbrel import limits, wire
from whimbrel.clock import Clock
from whimbrel.errors import Corrupt
from whimbrel.log import get_logger
from whimbrel.wire.work import AgentReply, AgentReport, WorkerStatus

log = get_logger("agent")


class Reporter:
    """Sends reports and hands back what the controller has recorded."""

    def __init__(
        self,
        *,
        url: str,
        token: str,
        node_id: str,
        incarnation: str,
        disk: Path,
        clock: Clock,
        statuses: Callable[[], list[WorkerStatus]],
        recorded: Callable[[list[str]], None],
    ) -> None:
        self.heard_at: float | None = None
        """Monotonic time of the controller's last answer."""
        self._url = f"{url}/agent/v1/report"
        self._node_id = node_id
        self._incarnation = incarnation
        self._disk = disk
        self._clock = clock
        self._statuses = statuses
        self._recorded = recorded
        self._sequence = 0
        self._failures = 0
        self._problem = ""
        self._due = asyncio.Event()
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {token}", "content-type": "application/msgpack"},
            timeout=httpx.Timeout(limits.AGENT_REPORT_TIMEOUT_S, connect=2.0),
            trust_env=False,  # a proxy of the environment must not see cluster traffic
        )

    def hurry(self) -> None:
        """Something changed: report at once."""
        self._due.set()

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            self._due.clear()
            await self.send()
            try:
                async with asyncio.timeout(self._pause_s()):
                    await self._due.wait()
                    # A crowd of exits within a moment is one report.
                    await asyncio.sleep(0.02)
            except TimeoutError:
                pass

    async def send(self) -> bool:
        """One report; returns whether the controller took it. Never raises for what the controller does."""
        try:
            response = await self._http.post(self._url, content=wire.encode_message(self._report()))
        except httpx.HTTPError as error:
            self._failed(f"The controller at {self._url} does not answer ({type(error).__name__}).")
            return False
        if response.status_code == 401:
            self._failed(
                "The controller refuses this node's cluster token (401). Copy tokens/cluster from the controller's "
                "machine; workers go on meanwhile."
            )
            return False
        if not response.is_success:
            self._failed(f"The controller refused a report: {_detail(response)}")
            return False
        try:
            reply = wire.decode_message(response.content, AgentReply)
        except Corrupt as error:
            self._failed(f"The controller's answer cannot be read: {error}")
            return False
        if self._problem:
            log.info("the controller answers again", after_failures=self._failures)
        self._failures, self._problem = 0, ""
        self.heard_at = self._clock.monotonic()
        self._recorded(reply.forget)
        return True

    async def close(self) -> None:
        await self._http.aclose()

    def _report(self) -> AgentReport:
        self._sequence += 1
        return AgentReport(
            node_id=self._node_id,
            incarnation=self._incarnation,
            sequence=self._sequence,
            workers=self._statuses(),
            cpu_ratio=psutil.cpu_percent(interval=None) / 100,
            memory_available_bytes=psutil.virtual_memory().available,
            disk_available_bytes=shutil.disk_usage(self._disk).free,
            load_1m=os.getloadavg()[0],
        )

    def _failed(self, problem: str) -> None:
        self._failures += 1
        if problem != self._problem:  # once per kind, not once per second
            log.warning(problem, attempt=self._failures)
        self._problem = problem

    def _pause_s(self) -> float:
        if not self._failures:
            return limits.PROGRESS_EVERY_S
        backoff = limits.AGENT_REPORT_BACKOFF_S
        return backoff[min(self._failures, len(backoff)) - 1]


def _detail(response: httpx.Response) -> str:
    try:
        problem = msgspec.json.decode(response.content, type=dict[str, object])
    except msgspec.MsgspecError:
        problem = {}
    return str(problem.get("detail") or f"HTTP {response.status_code}")
