"""Bytes of messages, in both directions."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from whimbrel.errors import Corrupt

PROTOCOL: Final = 1
"""Raised when a message changes so that an older peer cannot read it."""

Message = TypeVar("Message")


def encode_message(message: Any) -> bytes:
    """A message as MessagePack."""
    return msgspec.msgpack.encode(message)


def decode_message(data: bytes, kind: type[Message]) -> Message:
    """A MessagePack message of the given kind.

    Raises:
        Corrupt: the bytes are no such message.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"Not a {kind.__name__} message: {error}.", hint="Are both sides of one release?") from error


def encode_json(value: Any) -> bytes:
    """A message as JSON, for values that people read with etcdctl."""
    return msgspec.json.encode(value)


def decode_json(data: bytes, kind: type[Message]) -> Message:
    """A JSON value of the given kind.

    Raises:
        Corrupt: the bytes are no such value.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise Corrupt(
            f"Not a {kind.__name__} value: {error}.", hint="Was the key written by another release?"
        ) from error
