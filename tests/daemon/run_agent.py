"""An agent as a process of its own, whose workers run the code in a file: `run_agent.py HOME ETCD CONTROLLER CODE`."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from agent_fakes import agent_config, python

from agents.daemon.daemon import Daemon
from whimbrel import limits
from whimbrel.log import configure_logging


async def serve(home: Path, etcd: str, controller: str, code: str) -> bool:
    daemon = Daemon(agent_config(home, etcd=etcd, controller=controller), launch=python(code), subreaper=True)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: daemon.stop(keep_workers=False))
    loop.add_signal_handler(signal.SIGHUP, lambda: daemon.stop(keep_workers=True))
    return await daemon.run()


limits.NODE_LEASE_TTL_S = 3  # type: ignore[misc]  # the shortest that a busy machine bears; keeps the tests short

if __name__ == "__main__":
    configure_logging("info")
    done = asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]).read_text()))
    sys.exit(0 if done else 1)
