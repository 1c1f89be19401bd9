"""Bad links: proxies that cut, lie and count; and chunks to send over them."""

from __future__ import annotations

import os
import socket
import threading

from whimbrel.checkpoint import MemoryStore
from whimbrel.delta import content_digest

TOKEN = "a token"
CONTROL_BYTES = 1_000
"""Larger pieces than this are chunk bytes, which a lying proxy changes; replies pass."""


def keep(store: MemoryStore, nbytes: int) -> str:
    data = os.urandom(nbytes)
    digest = content_digest(data)
    store.put(digest, data)
    return digest


class Proxy:
    """Passes bytes to a server, and cuts each connection after a number of bytes, or flips bits on the way back."""

    def __init__(self, target: str, *, cut_after: int = 0, flips: bool = False) -> None:
        self.target = target
        self.cut_after, self.flips = cut_after, flips
        self.connections = 0
        self.passed = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            host, _, port = self.target.rpartition(":")
            far = socket.create_connection((host, int(port)))
            threading.Thread(target=self._pass, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, True), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        passed = 0
        try:
            while data := source.recv(65536):
                if back:
                    if self.flips and len(data) > CONTROL_BYTES:
                        data = bytes([*data[:-1], data[-1] ^ 1])
                    if self.cut_after and passed + len(data) > self.cut_after:
                        sink.sendall(data[: self.cut_after - passed])
                        self.passed += self.cut_after - passed
                        break
                    self.passed += len(data)
                passed += len(data)
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            end.close()
