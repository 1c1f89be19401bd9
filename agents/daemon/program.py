"""The agent as a program: options, signals, exit codes."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence

from agents.daemon.config import AgentConfig, make_config
from agents.daemon.daemon import Daemon
from whimbrel.errors import EXIT_FAILED, EXIT_OK, WhimbrelError
from whimbrel.log import configure_logging
from whimbrel.settings import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent until it is told to stop; returns the process's exit code."""
    options = _parser().parse_args(argv)
    settings = Settings()
    configure_logging(options.log_level or settings.log_level)
    try:
        config = make_config(
            settings,
            node=options.node,
            region=options.region,
            slots=options.slots,
            host=options.host,
            port=options.port,
            advertise=options.advertise,
            keep_workers=options.keep_workers,
        )
        return EXIT_OK if asyncio.run(_serve(config)) else EXIT_FAILED
    except WhimbrelError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"The agent cannot run: {error}.\n")
        return EXIT_FAILED


async def _serve(config: AgentConfig) -> bool:
    daemon = Daemon(config, subreaper=True)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: daemon.stop(keep_workers=config.keep_workers))
    loop.add_signal_handler(signal.SIGHUP, lambda: daemon.stop(keep_workers=True))
    return await daemon.run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="whimbrel agent",
        description="The agent of one node: starts, watches and stops its workers.",
        epilog="SIGTERM ends the workers and the agent; SIGHUP ends the agent and leaves the workers to the next one. "
        "Settings that have no option come from the environment (WHIMBREL_HOME, WHIMBREL_ETCD, WHIMBREL_CONTROLLER).",
    )
    parser.add_argument("--node", default="", help="the node's name, unique in the cluster (default: the host's name)")
    parser.add_argument("--region", default="", help="where it stands, for placement (default: local)")
    parser.add_argument("--slots", type=_positive, default=0, help="workers it takes at most (default: 4)")
    parser.add_argument("--host", default="127.0.0.1", help="address on which it serves chunks and answers probes")
    parser.add_argument("--port", type=int, default=0, help="its port (default: a free one)")
    parser.add_argument("--advertise", default="", help="host that others use to reach it, when --host is not that")
    parser.add_argument("--keep-workers", action="store_true", help="SIGTERM too leaves the workers running")
    parser.add_argument("--log-level", default="", choices=["debug", "info", "warning", "error"])
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
