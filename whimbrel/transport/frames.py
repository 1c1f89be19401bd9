"""The wire format between chunk client and chunk server.

A frame is four bytes of length (big-endian) and a MessagePack message of at most FRAME_MAX_BYTES. A client opens with
`Hello`, then sends one request at a time; each gets one `Reply`, behind which `nbytes` raw bytes may follow. `Put`
sends its raw bytes behind the request.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from whimbrel.errors import Corrupt, Unreachable, WhimbrelError
from whimbrel.limits import FRAME_MAX_BYTES

LENGTH: Final = struct.Struct(">I")
TRANSPORT_PROTOCOL: Final = 1


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    protocol: int
    token: str


class Get(msgspec.Struct, frozen=True, tag="get"):
    """Bytes [offset, end) of a chunk."""

    digest: str
    offset: int = 0


class Put(msgspec.Struct, frozen=True, tag="put"):
    digest: str
    nbytes: int
    lasting: bool = True
    """False for what only saves work, such as the tokens of an unfinished group: it goes where old chunks make room."""


class Size(msgspec.Struct, frozen=True, tag="size"):
    digest: str


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A question to the process behind the server: probe, log tail, ..."""

    name: str
    payload: bytes = b""


Request = Hello | Get | Put | Size | Call


class Reply(msgspec.Struct, frozen=True):
    ok: bool
    code: str = ""
    message: str = ""
    hint: str = ""
    nbytes: int = 0
    """Raw bytes that follow."""
    size: int = -1
    """Of the whole chunk; -1 when it is not held here."""
    payload: bytes = b""


_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def _codes(kind: type[WhimbrelError]) -> dict[str, type[WhimbrelError]]:
    codes = {kind.code: kind}
    for narrower in kind.__subclasses__():
        codes = _codes(narrower) | codes
    return codes


_errors: Final = _codes(WhimbrelError)


def refusal(error: WhimbrelError) -> Reply:
    """The reply that carries an error to the other side."""
    return Reply(ok=False, code=error.code, message=error.message, hint=error.hint)


def error_of(reply: Reply) -> WhimbrelError:
    """The error that a refusal carries."""
    return _errors.get(reply.code, WhimbrelError)(reply.message, hint=reply.hint)


def host_and_port(address: str) -> tuple[str, int]:
    """Split `host:port` or `[address]:port`.

    Raises:
        Unreachable: it is no address, so that nobody can be there.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise Unreachable(f"{address!r} is no address of the form host:port.", hint="Is that node registered?")
    return host.removeprefix("[").removesuffix("]"), int(port)


def pack(message: Request | Reply) -> bytes:
    """A frame."""
    body = msgspec.msgpack.encode(message)
    assert len(body) <= FRAME_MAX_BYTES, "a control frame is small"
    return LENGTH.pack(len(body)) + body


def frame_length(head: bytes) -> int:
    """The length that four bytes announce.

    Raises:
        Corrupt: it is over the bound, so these are no frames of ours.
    """
    (length,) = LENGTH.unpack(head)
    if length > FRAME_MAX_BYTES:
        raise Corrupt(f"A frame of {length} bytes was announced; the bound is {FRAME_MAX_BYTES}.")
    return length


def unpack_request(body: bytes) -> Request:
    """Raises Corrupt when it is none."""
    try:
        return _requests.decode(body)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"Not a request: {error}.") from error


def unpack_reply(body: bytes) -> Reply:
    """Raises Corrupt when it is none."""
    try:
        return _replies.decode(body)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"Not a reply: {error}.") from error
