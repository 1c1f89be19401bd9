"""MessagePack bodies of workers and agents: read within a bound, decoded, answered; and the token they carry."""

from __future__ import annotations

import hmac
from typing import Any, Final, TypeVar

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from api.services import Services
from whimbrel.errors import Corrupt, LimitReached, Unauthorized, UsageError
from whimbrel.limits import BODY_MAX_BYTES
from whimbrel.wire import decode_message, encode_message

MEDIA_TYPE: Final = "application/msgpack"

Message = TypeVar("Message")


def services_of(request: Request) -> Services:
    """The controller's parts."""
    services: Services = request.app.state.services
    return services


def require_cluster(request: Request) -> None:
    """Dependency of all routes here. Raises Unauthorized unless the request carries the cluster token."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    expected = services_of(request).cluster_token
    given = token.strip().encode("utf-8", "surrogateescape")
    if scheme.lower() != "bearer" or not expected or not hmac.compare_digest(given, expected.encode()):
        raise Unauthorized(
            "The request does not carry this cluster's token.",
            hint="Give the node the same WHIMBREL_CLUSTER_TOKEN as the controller.",
        )


async def read_message(request: Request, kind: type[Message]) -> Message:
    """The request's body as a message.

    Raises:
        LimitReached: it is larger than BODY_MAX_BYTES.
        UsageError: it is no such message, or it broke off.
    """
    data = bytearray()
    try:
        async for part in request.stream():
            data += part
            if len(data) > BODY_MAX_BYTES:
                raise LimitReached(
                    f"The request's body is larger than {BODY_MAX_BYTES} bytes.", hint="Send it in parts."
                )
    except ClientDisconnect as error:  # the sender ended or gave up; nobody reads the answer
        raise UsageError("The sender broke off in the middle of its request.", hint="Send it again.") from error
    try:
        return decode_message(bytes(data), kind)
    except Corrupt as error:  # the sender's mistake here, not damage on our side
        raise UsageError(error.message, hint=error.hint) from error


def answer(message: Any) -> Response:
    """A message as the response's body."""
    return Response(encode_message(message), media_type=MEDIA_TYPE)
