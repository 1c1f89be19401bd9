"""One greeted TCP connection to a chunk server, for threads."""

from __future__ import annotations

import socket

from whimbrel.errors import LimitReached, Unreachable
from whimbrel.limits import CONNECT_TIMEOUT_S, IO_TIMEOUT_S, PIECE_BYTES
from whimbrel.transport import frames
from whimbrel.transport.frames import Hello, Reply, Request


class Broken(Exception):
    """The connection ended, or nothing came in time (`timed_out`)."""

    def __init__(self, reason: str, *, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.timed_out = timed_out


class Connection:
    """Asks one thing at a time."""

    def __init__(self, address: str, token: str, *, timeout_s: float = IO_TIMEOUT_S) -> None:
        """Connect and greet.

        Raises:
            Unreachable: the server does not answer, or has no room for another connection.
            Unauthorized: it does not know the token.
        """
        self.pooled = False
        """Whether it has waited in a pool, where its server may have closed it."""
        try:
            self._socket = socket.create_connection(
                frames.host_and_port(address), timeout=min(timeout_s, CONNECT_TIMEOUT_S)
            )
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise Unreachable(f"{address} cannot be reached: {error}.", hint="Is that node up?") from error
        try:
            # A process that was stopped still accepts connections: it is known by not greeting soon.
            self.ask(Hello(frames.TRANSPORT_PROTOCOL, token), timeout_s=min(timeout_s, 2 * CONNECT_TIMEOUT_S))
        except Broken as error:
            self.close()
            raise Unreachable(f"{address} does not greet: {error}.", hint="Is that node up?") from error
        except LimitReached as error:
            self.close()
            raise Unreachable(f"{address} is busy: {error.message}", hint="Another source is tried.") from error
        except BaseException:
            self.close()
            raise

    def ask(self, request: Request, data: bytes = b"", *, timeout_s: float = IO_TIMEOUT_S) -> Reply:
        """Send a request, with its raw bytes, and read the reply.

        Raises:
            Broken: there is no reply.
            WhimbrelError: the error of the tree that a refusal stands for; the connection is still good.
        """
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(frames.pack(request))
            view = memoryview(data)
            for start in range(0, len(view), PIECE_BYTES):
                self._socket.sendall(view[start : start + PIECE_BYTES])
        except OSError as error:
            raise _broken(error) from error
        head = self._exactly(frames.LENGTH.size)
        reply = frames.unpack_reply(self._exactly(frames.frame_length(head)))
        if not reply.ok:
            raise frames.error_of(reply)
        return reply

    def read_into(self, got: bytearray, nbytes: int) -> None:
        """Append exactly nbytes raw bytes; what came before a break stays. Raises Broken."""
        left = nbytes
        while left:
            try:
                data = self._socket.recv(min(left, PIECE_BYTES))
            except OSError as error:
                raise _broken(error) from error
            if not data:
                raise Broken("the connection was closed")
            got += data
            left -= len(data)

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, nbytes: int) -> bytes:
        got = bytearray()
        self.read_into(got, nbytes)
        return bytes(got)


def _broken(error: OSError) -> Broken:
    return Broken(str(error) or type(error).__name__, timed_out=isinstance(error, TimeoutError))
