"""The node agent's loop: observe (owners in etcd, processes here) -> decide (pure) -> apply -> wait.

What it must not do: stop a worker because etcd or the controller is away, start an epoch twice, or let a process of
an ended epoch live on. It keeps nothing in memory that its successor could not read from the disk and /proc.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack, suppress
from typing import assert_never

import psutil

from agents.daemon import proc
from agents.daemon.assignments import Action, Hold, Key, Start, Stop, decide
from agents.daemon.cache import prune_cache
from agents.daemon.config import AgentConfig, measure_resources
from agents.daemon.handlers import make_handlers
from agents.daemon.launch import Launch, module_command
from agents.daemon.lock import node_lock
from agents.daemon.membership import Membership
from agents.daemon.processes import Processes
from agents.daemon.report import Reporter
from agents.daemon.views import OwnersView
from whimbrel import ids, limits
from whimbrel.checkpoint import DirectoryStore
from whimbrel.clock import Clock, SystemClock, rfc3339
from whimbrel.errors import WhimbrelError
from whimbrel.limits import AGENT_REST_S
from whimbrel.log import get_logger
from whimbrel.transport import ChunkServer
from whimbrel.wire.cluster import NodeRecord

log = get_logger("agent")


class Daemon:
    """One agent. `run` it once."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        launch: Launch = module_command,
        clock: Clock | None = None,
        subreaper: bool = False,
    ) -> None:
        """`launch` gives the command of a worker. `subreaper`: adopt and end orphans of workers; only for a process
        that has no children but these."""
        self.config = config
        self.incarnation = ids.new_id("inc")
        self.address = ""
        self._clock = clock or SystemClock()
        self._wake = asyncio.Event()
        self._stopping = False
        self._keep_workers = False
        self._held: set[Hold] = set()
        self._stuck: set[Key] = set()
        self._warned_alone = False
        self._started_at = self._clock.monotonic()
        self._owners = OwnersView(config.etcd_endpoints, self._wake.set)
        self._subreaper = subreaper and proc.become_subreaper()
        self._exits = proc.ExitWatch(
            lambda *arguments: asyncio.get_running_loop().add_reader(*arguments),
            lambda descriptor: asyncio.get_running_loop().remove_reader(descriptor),
        )
        self.processes = Processes(
            config,
            launch,
            self._clock,
            watch_exit=lambda pid: self._exits.watch(pid, self._wake.set),
            subreaper=self._subreaper,
        )

    def stop(self, *, keep_workers: bool) -> None:
        """Ask `run` to end: with all workers, or leaving them to the next agent."""
        self._stopping, self._keep_workers = True, keep_workers
        self._wake.set()

    async def run(self) -> bool:
        """Serve this node until `stop`; returns whether everything that should be gone is gone.

        Raises:
            Conflict: the node's folder or name is another agent's.
            OSError: the port cannot be had.
        """
        async with AsyncExitStack() as stack:
            stack.enter_context(node_lock(self.config.node_home))
            stack.callback(self._exits.close)
            await self._open_server(stack)
            reporter = self._make_reporter()
            stack.push_async_callback(reporter.close)
            membership = Membership(self.config, self._record())
            self.processes.adopt()
            await self._owners.start()
            stack.push_async_callback(self._owners.close)
            registering = asyncio.create_task(membership.register(), name="register")
            reporting = asyncio.create_task(reporter.run(), name="report")
            upkeep = asyncio.create_task(self._upkeep(), name="upkeep")
            tasks = (registering, reporting, upkeep)
            try:
                await self._loop(membership, reporter, tasks)
                return await self._wind_down(reporter)
            finally:
                await _cancel(*tasks)
                await membership.close(revoke=self._stopping and not self._keep_workers)

    # -- the loop -------------------------------------------------------------------------------------------------------

    async def _loop(self, membership: Membership, reporter: Reporter, tasks: tuple[asyncio.Task[None], ...]) -> None:
        while not self._stopping:
            self._wake.clear()
            changed = self.processes.poll()
            actions = self._decide() if membership.registered and self._owners.fresh() else []
            for action in actions:
                self._apply(action)
            if changed or any(not isinstance(action, Hold) for action in actions):
                reporter.hurry()
            membership.set_draining(self._drains())
            self._say_when_alone(reporter)
            for task in tasks:  # an agent with a dead part must not look alive
                if task.done():
                    task.result()
            if self._owners.ended:
                raise WhimbrelError("The view of etcd ended.", hint="Start the agent again; it adopts its workers.")
            await self._wait()

    def _decide(self) -> list[Action]:
        unreadable = self._owners.unreadable
        local = [entry for entry in self.processes.locals() if entry.key not in unreadable]
        actions = decide(self.config.node_id, self._owners.owners(), self._owners.specs(), local)
        holds = {action for action in actions if isinstance(action, Hold)}
        for hold in holds - self._held:
            log.warning("left as it is", worker=f"{hold.run_id}/{hold.worker}@{hold.epoch}", reason=hold.reason)
        self._held = holds
        return actions

    def _apply(self, action: Action) -> None:
        match action:
            case Start():
                self.processes.start(action)
            case Stop():
                self.processes.stop(
                    action.run_id, action.worker, action.epoch, polite=action.polite, reason=action.reason
                )
            case Hold():
                pass
            case _:
                assert_never(action)

    async def _wait(self) -> None:
        ending = any(worker.ending is not None for worker in self.processes.live())
        with suppress(TimeoutError):
            async with asyncio.timeout(limits.STOP_POLL_S if ending else limits.AGENT_POLL_S):
                await self._wake.wait()
        await asyncio.sleep(AGENT_REST_S)

    def _drains(self) -> bool:
        stuck = self.processes.unkillable()
        for worker in stuck:
            if worker.key not in self._stuck:
                log.error(
                    "a process outlives SIGKILL (it waits in the kernel, for a disk or a driver); this node takes no "
                    "new workers until it is gone",
                    worker=worker.label,
                )
        self._stuck = {worker.key for worker in stuck}
        return bool(stuck)

    def _say_when_alone(self, reporter: Reporter) -> None:
        """Cut off from etcd and controller alike: the policy is to keep the workers, and to say so once."""
        heard_at = max(self._started_at, reporter.heard_at or 0.0, self._owners.heard_at() or 0.0)
        alone = self._clock.monotonic() - heard_at > limits.SELF_FENCE_WARN_S
        if alone and not self._warned_alone:
            log.warning(
                "neither etcd nor the controller was heard of for a while; workers go on, each fenced by its epoch",
                silence_s=limits.SELF_FENCE_WARN_S,
            )
        self._warned_alone = alone

    # -- beginning and end ----------------------------------------------------------------------------------------------

    async def _open_server(self, stack: AsyncExitStack) -> None:
        config = self.config
        config.cache.mkdir(parents=True, exist_ok=True)
        store, cache = DirectoryStore(config.store), DirectoryStore(config.cache)
        server = ChunkServer(
            config.host,
            config.port,
            config.cluster_token,
            sources=[store, cache],
            sink=store,
            scratch=cache,
            handlers=make_handlers(
                config.node_id, self.incarnation, self.processes, self._clock, self._owners.heard_at
            ),
        )
        await server.start()
        stack.push_async_callback(server.close)
        port = server.address.rpartition(":")[2]
        self.address = f"{config.advertise or config.host}:{port}"
        self.processes.chunks = self.address

    def _make_reporter(self) -> Reporter:
        psutil.cpu_percent(interval=None)  # the first reading only sets the mark
        return Reporter(
            url=self.config.controller,
            token=self.config.cluster_token,
            node_id=self.config.node_id,
            incarnation=self.incarnation,
            disk=self.config.node_home,
            clock=self._clock,
            statuses=self.processes.statuses,
            recorded=self.processes.record_exits,
        )

    def _record(self) -> NodeRecord:
        return NodeRecord(
            node_id=self.config.node_id,
            incarnation=self.incarnation,
            address=self.address,
            resources=measure_resources(self.config.slots),
            region=self.config.region,
            pid=os.getpid(),
            started_at=rfc3339(self._clock.wall()),
        )

    async def _wind_down(self, reporter: Reporter) -> bool:
        if self._keep_workers:
            log.info("agent leaves its workers to the next one", workers=len(self.processes.live()))
            return True
        self.processes.stop_all("the agent of the node is stopping")
        deadline = self._clock.monotonic() + limits.STOP_GRACE_S + limits.KILL_WAIT_S
        while self.processes.live() and self._clock.monotonic() < deadline:
            self.processes.poll()
            await asyncio.sleep(limits.STOP_POLL_S)
        left = self.processes.live()
        for worker in left:
            log.error("a worker could not be ended", worker=worker.label)
        with suppress(TimeoutError):  # a controller that is away learns of the exits from the next agent
            async with asyncio.timeout(limits.PROBE_TIMEOUT_S):
                await reporter.send()
        return not left

    async def _upkeep(self) -> None:
        """Bounds of disk: workers' output each second, the cache now and then."""
        prune_at = self._clock.monotonic()
        while True:
            self.processes.rotate_logs()
            if self._clock.monotonic() >= prune_at:
                freed = await asyncio.to_thread(prune_cache, self.config.cache)
                if freed:
                    log.info("the chunk cache was pruned", freed_bytes=freed, limit_bytes=limits.CACHE_BYTES)
                if self._owners.fresh():
                    self.processes.prune({(key, owned.epoch) for key, owned in self._owners.owners().entries.items()})
                prune_at = self._clock.monotonic() + limits.CACHE_PRUNE_EVERY_S
            await asyncio.sleep(limits.PROGRESS_EVERY_S)


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
