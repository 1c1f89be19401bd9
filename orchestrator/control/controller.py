"""The loop: observe, decide, apply, wait. One controller leads; the others stand by.

Everything is level-triggered. A pass that fails anywhere is simply followed by the next, which sees how far the last
one came. Events only make the next pass come sooner.
"""

from __future__ import annotations

import asyncio

from orchestrator.control.apply import Apply
from orchestrator.control.chronicle import Chronicle
from orchestrator.control.housekeeping import Housekeeping
from orchestrator.control.leadership import Leadership, Term, holder_name
from orchestrator.control.mirror import LogFetch, Mirror
from orchestrator.control.observe import Observer
from orchestrator.control.panel import Panel
from orchestrator.control.probe import Probes
from orchestrator.control.records import Known, Records
from orchestrator.control.signals import Signals
from orchestrator.core import World, decide
from orchestrator.core.lifecycle import TERMINAL
from orchestrator.db import (
    Database,
    EventLog,
    FleetRepository,
    Ledger,
    RunRepository,
    VersionRepository,
)
from whimbrel.checkpoint import DirectoryStore
from whimbrel.clock import Clock, SystemClock
from whimbrel.coordination import Etcd, PrefixView, keys
from whimbrel.errors import Corrupt, Fenced, MissingChunk, WhimbrelError
from whimbrel.limits import LOOP_MAX_PERIOD_S, LOOP_MIN_PERIOD_S, PROBE_TIMEOUT_S
from whimbrel.log import get_logger
from whimbrel.settings import Settings
from whimbrel.transport import ChunkClient, call_async
from whimbrel.wire.cluster import Head, Leader
from whimbrel.wire.work import Incident

log = get_logger("controller")


class Controller:
    """One controller process. `run` until `stop`; the rest may be asked at any time from the same event loop."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        *,
        events: EventLog | None = None,
        clock: Clock | None = None,
        holder: str = "",
    ) -> None:
        self._clock = clock or SystemClock()
        self._token = settings.read_cluster_token()
        self._wake = asyncio.Event()
        self._stopping = False
        self.etcd_reason = "etcd was not reached yet."
        self.signals = Signals(self._clock, self.wake)
        self._etcd = Etcd(settings.etcd_endpoints)
        self._view = PrefixView(settings.etcd_endpoints, keys.PREFIX)
        self._view.on_change.append(self.wake)
        self._probes = Probes(self._ask, self._clock, self.wake)
        self._observer = Observer(self._view, self.signals, self._probes, self._clock)
        self._ledger = Ledger(database, self._clock)
        self._fleet = FleetRepository(database, self._clock)
        self._records = Records(database)
        events = events or EventLog(database, self._clock)
        runs = RunRepository(database, self._clock)
        versions = VersionRepository(database, self._clock)
        self._chronicle = Chronicle(database, self.signals, self._clock, events)
        self._panel = Panel(self._fleet, runs, versions, self.signals, self._clock)
        self._housekeeping = Housekeeping(events, self._fleet, runs, self._clock)
        self._fetch = LogFetch(DirectoryStore(settings.store_path), ChunkClient(self._token))
        self._mirror = Mirror(self._fetch, self._ledger, versions, self._clock)
        self._leadership = Leadership(
            settings.etcd_endpoints, settings.controller, database, self._ledger, self._clock, holder or holder_name()
        )
        self._known = Known(self._clock.wall())
        self._fresh_term = False
        self._late: dict[str, str] = {}
        """Run to the head whose records could not be read, which is told once."""

    # -- what others ask ----------------------------------------------------------------------------------------------

    @property
    def leading(self) -> bool:
        """Whether this controller certainly leads now."""
        return self._leadership.leading

    @property
    def serving(self) -> bool:
        """Whether the work API may answer: leading, or the last to have led while etcd is away."""
        return self.signals.serving

    @property
    def epoch(self) -> int:
        """Leadership epoch for fenced database writes; 0 while another leads."""
        return self._leadership.epoch

    @property
    def leader(self) -> Leader | None:
        """Whoever leads, as far as known."""
        return self._leadership.leader

    @property
    def etcd_reachable(self) -> bool:
        """Whether etcd's keys are known as they are now."""
        return self._view.healthy

    def wake(self) -> None:
        """Something changed: look sooner. Never needed for correctness."""
        self._wake.set()

    def stop(self) -> None:
        """Ask `run` to resign and return."""
        self._stopping = True
        self.wake()

    async def record_incident(self, incident: Incident) -> None:
        """Record what a worker reports of itself. Raises Fenced or Unreachable as `signals.check_caller`."""
        self.signals.check_caller(incident.caller)
        await self._chronicle.record_reported(self.epoch, incident)

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Observe, decide, apply, wait; until `stop` or cancellation."""
        await self._view.start()
        mirror = asyncio.create_task(self._mirror_versions(), name="mirror")
        try:
            while not self._stopping:
                wake_in_s = LOOP_MAX_PERIOD_S
                try:
                    if await self._lead():
                        world = await self._observe()
                        plan = decide(world)
                        await self._effects().apply(plan, world, self._known, self._observer.registry)
                        await self._finish_pass(world)
                        wake_in_s = plan.wake_at_s - world.now_s
                except Fenced as error:
                    self._step_down(error)
                except WhimbrelError as error:
                    log.warning("pass cut short", reason=str(error))
                except Exception:
                    # A defect in one pass must not end the supervision of everything; the next pass starts from the facts.
                    log.exception("pass failed")
                await self._wait(wake_in_s)
        finally:
            mirror.cancel()
            await asyncio.wait({mirror}, timeout=PROBE_TIMEOUT_S)
            await self._close()

    async def _lead(self) -> bool:
        """Whether this pass may decide and write."""
        if not self._view.healthy:
            self.etcd_reason = "etcd does not answer; membership is frozen."
            return self.epoch > 0
        term = await self._leadership.campaign()
        self.etcd_reason = ""
        if term is not None:
            await self._begin_term(term)
        if self.epoch == 0:
            self.signals.serving = False
            self.signals.leader = self._leadership.leader
        return self.epoch > 0

    async def _begin_term(self, term: Term) -> None:
        log.info("leading", epoch=term.epoch, after=term.predecessor or "nobody")
        self._observer.begin_term()
        self._panel.begin_term()
        self._fresh_term = True
        await self._leadership.record_failover(term)

    async def _observe(self) -> World:
        owned = {part[0] for part, (owner, _) in self._observer.registry.owners.items() if owner.state == "running"}
        self._known = await self._records.load(self._clock.wall(), owned)
        world = self._observer.observe(self._known)
        self.signals.leader = self._leadership.leader
        self.signals.serving = True
        return world

    def _effects(self) -> Apply:
        return Apply(
            self._etcd,
            self.epoch,
            chronicle=self._chronicle,
            fleet=self._fleet,
            ledger=self._ledger,
            probes=self._probes,
        )

    async def _finish_pass(self, world: World) -> None:
        """Copy the picture to the database, take back overdue leases, end a failover that this pass completes, tidy up."""
        if await self._panel.flush(self.epoch, world, self._known, self._observer.registry):
            for run in world.runs:
                if run.state not in TERMINAL:
                    await self._ledger.expire(run.run_id, leader=self.epoch)
        if self._fresh_term:
            await self._leadership.end_failovers()
            self._fresh_term = False
        await self._housekeeping.tidy(self.epoch, {row.run_id for row in self._known.runs})

    def _step_down(self, error: Fenced) -> None:
        log.warning("standing by", reason=str(error))
        self.etcd_reason = str(error)
        self._leadership.step_down()
        self.signals.serving = False

    async def _wait(self, seconds: float) -> None:
        # The lower bound first: a storm of events becomes one pass per period, not a flood of them.
        await asyncio.sleep(LOOP_MIN_PERIOD_S)
        if self._stopping:
            return
        try:
            async with asyncio.timeout(max(seconds - LOOP_MIN_PERIOD_S, 0.0)):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    # -- beside the loop ----------------------------------------------------------------------------------------------

    async def _mirror_versions(self) -> None:
        """Record committed versions; apart from the loop, since fetching a manifest from a far node may take a while."""
        while True:
            await asyncio.sleep(LOOP_MIN_PERIOD_S * 2)
            epoch = self.epoch
            if epoch == 0 or not self.signals.serving:
                continue
            self._fetch.sources = [record.address for record in self._observer.registry.nodes.values()]
            for row in self._known.runs:
                head = self._observer.registry.heads.get(row.run_id)
                if head is None or head.version <= row.mirrored_version:
                    continue
                try:
                    await self._catch_up(epoch, head, row.mirrored_version)
                    continue
                except WhimbrelError as error:
                    log.warning("mirror waits", run=row.run_id, reason=str(error))
                except Exception:
                    # One run's records must not end the recording of all: nothing else would ever start it again.
                    log.exception("mirror failed", run=row.run_id)
                await asyncio.sleep(LOOP_MAX_PERIOD_S)

    async def _catch_up(self, epoch: int, head: Head, mirrored_version: int) -> None:
        try:
            await self._mirror.catch_up(epoch, head, mirrored_version)
            self._late.pop(head.run_id, None)
            self.wake()
        except (MissingChunk, Corrupt) as error:
            if self._late.get(head.run_id) != head.manifest:
                text = f"Version records of the log cannot be read now: {error} They are tried again."
                await self._chronicle.tell(epoch, "mirror_delayed", text, run_id=head.run_id, severity="warning")
                self._late[head.run_id] = head.manifest
            raise

    async def _ask(self, address: str) -> object:
        return await call_async(address, self._token, "probe", b"", PROBE_TIMEOUT_S)

    async def _close(self) -> None:
        self.signals.serving = False
        await self._probes.close()
        await self._view.close()
        await self._leadership.close()
        await self._etcd.close()
        self._fetch.close()
