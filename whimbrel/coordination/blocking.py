"""The same client for code without an event loop: worker processes, whose main thread computes.

One thread runs the loop; every method hands its call over and waits with a deadline.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from whimbrel.coordination.etcd import Compare, Delete, Etcd, KeyValue, Put, TxnResult
from whimbrel.coordination.view import PrefixView
from whimbrel.errors import Unreachable
from whimbrel.limits import ETCD_CALL_TIMEOUT_S

Answer = TypeVar("Answer")


class BlockingEtcd:
    """Synchronous, thread-safe access to etcd. Methods raise as those of `Etcd` do."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self.endpoints = list(endpoints)
        self._loop = asyncio.new_event_loop()
        self._etcd = Etcd(endpoints)
        self._views: set[PrefixView] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="etcd", daemon=True)
        self._thread.start()

    def get(self, key: str) -> KeyValue | None:
        return self._wait(self._etcd.get(key))

    def list(self, prefix: str) -> tuple[list[KeyValue], int]:
        return self._wait(self._etcd.list(prefix))

    def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        return self._wait(self._etcd.put(key, value, lease=lease))

    def delete(self, key: str) -> None:
        self._wait(self._etcd.delete(key))

    def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TxnResult:
        return self._wait(self._etcd.txn(compares, operations))

    def watch(self, prefix: str, callback: Callable[[dict[str, KeyValue]], None]) -> Callable[[], None]:
        """Call back from the etcd thread with all keys below a prefix, after the first list and at each change.

        The callback must be quick and must not ask etcd itself. The function returned ends the watch.
        """

        async def begin() -> PrefixView:
            view = PrefixView(self.endpoints, prefix)
            view.on_change.append(lambda: callback(dict(view.items)))
            await view.start()
            self._views.add(view)
            return view

        async def end(view: PrefixView) -> None:
            self._views.discard(view)
            await view.close()

        view = self._wait(begin())
        return lambda: self._wait(end(view))

    def close(self) -> None:
        """End all watches, close the connection and end the thread."""

        async def end() -> None:
            await asyncio.gather(*(view.close() for view in self._views), self._etcd.close())

        if self._thread.is_alive():
            try:
                self._wait(end())
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(timeout=5.0)

    def _wait(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        assert threading.current_thread() is not self._thread, "the loop's own thread would wait for itself"
        if not self._thread.is_alive():
            call.close()
            raise Unreachable("The connection to etcd was closed.", hint="This process is ending.")
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(timeout=2 * ETCD_CALL_TIMEOUT_S)
        except TimeoutError as error:
            future.cancel()
            raise Unreachable("etcd did not answer in time.", hint="It is asked again.") from error
