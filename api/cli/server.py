"""`whimbrel server`: one controller process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Iterator
from typing import Annotated

import typer

from api.cli.output import say
from whimbrel.errors import EXIT_INTERRUPTED, UsageError, WhimbrelError
from whimbrel.limits import API_SHUTDOWN_S
from whimbrel.log import configure_logging
from whimbrel.settings import Settings


def server(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8600,
    home: Annotated[str, typer.Option(help="Where everything is kept; default WHIMBREL_HOME.")] = "",
    etcd: Annotated[str, typer.Option(help="host:port of etcd, comma-separated; default WHIMBREL_ETCD.")] = "",
    database: Annotated[str, typer.Option(help="SQLAlchemy URL; default SQLite below the home.")] = "",
    insecure_public: Annotated[
        bool, typer.Option("--insecure-public", help="Listen beyond this machine although nothing is encrypted.")
    ] = False,
    json_logs: Annotated[bool, typer.Option("--json-logs", help="Log JSON lines.")] = False,
) -> None:
    """Run a controller: REST API, dashboard, work API and the control loop."""
    refuse_public(host, allowed=insecure_public)
    for name, value in (("HOME", home), ("ETCD", etcd), ("DATABASE", database)):
        if value:
            os.environ[f"WHIMBREL_{name}"] = value
    settings = Settings()
    configure_logging(settings.log_level, json=json_logs)
    listener = listen(host, port)
    with contextlib.closing(listener):
        bound = listener.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        if "WHIMBREL_CONTROLLER" not in os.environ or port == 0:
            settings = settings.model_copy(update={"controller": f"http://{shown}:{bound}"})
        code = asyncio.run(_serve(settings, listener, f"http://{shown}:{bound}"))
    if code:
        raise typer.Exit(code)


def refuse_public(host: str, *, allowed: bool) -> None:
    """Only loopback, unless the user insists.

    Raises:
        UsageError: `host` is reachable from elsewhere and that was not asked for.
    """
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host or "0.0.0.0", None)}  # noqa: S104 - compared only
    except OSError as error:
        raise UsageError(f"{host} is no address of this machine: {error}.", hint="Use --host 127.0.0.1.") from error
    public = [address for address in addresses if not (address.startswith("127.") or address == "::1")]
    if public and not allowed:
        raise UsageError(
            f"Listening on {host} would send tokens over the network unencrypted.",
            hint="Keep 127.0.0.1 behind a TLS proxy or tunnel, or insist with --insecure-public on a trusted network.",
        )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, made before anything else starts, so that a taken port is one sentence.

    Raises:
        WhimbrelError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise WhimbrelError(
                f"Port {port} on {host} is in use by another program.",
                hint=f"Is a controller running already (`whimbrel run ls`)? Else choose another with --port {port + 1}.",
            ) from error
        raise WhimbrelError(
            f"Cannot listen on {host}:{port}: {error.strerror}.", hint="Choose --host and --port."
        ) from error
    return listener


async def _serve(settings: Settings, listener: socket.socket, url: str) -> int:
    """Serve until SIGTERM (0) or SIGINT (130)."""
    import uvicorn  # the server's packages are absent on a node that only runs agents

    from api.app import create_app, open_services

    received: list[int] = []

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Signals are handled below: an orderly end is no death by signal."""
            yield

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await app.state.event_tail.close()
            await super().shutdown(sockets)

    services = await open_services(settings)
    app = create_app(services)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=API_SHUTDOWN_S,
    )
    running = Server(config)

    def end(number: int) -> None:
        received.append(number)
        running.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    say(f"controller at {url}")
    await running.serve(sockets=[listener])
    return EXIT_INTERRUPTED if received and received[0] == signal.SIGINT else 0
