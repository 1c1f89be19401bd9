"""`python -m agents.rollout`: one rollout worker, started by a node agent. Composition only; see `loop.py`."""

from __future__ import annotations

import time

import structlog
import torch

from agents.rollout.chunks import Chunks
from agents.rollout.courier import Courier
from agents.rollout.engines.local import TransformersEngine
from agents.rollout.environments import open_environment
from agents.rollout.loop import Rollout
from agents.rollout.seldom import Seldom
from agents.worker import WorkerContext, run_worker
from whimbrel.checkpoint import DirectoryStore
from whimbrel.errors import Unreachable
from whimbrel.transport import ChunkClient

log = structlog.get_logger(__name__)


def main(context: WorkerContext) -> None:
    """Work for this run until stopped or fenced."""
    torch.set_num_threads(1)
    seldom = Seldom(time.monotonic)

    def incident(kind: str, message: str) -> None:
        log.warning(message, kind=kind)
        try:
            context.controller.incident(kind, message)
        except Unreachable as error:
            log.warning("the incident could not be recorded", kind=kind, error=str(error))

    def arrived_corrupt(digest: str, source: str) -> None:
        if seldom.due(digest):
            text = f"Chunk {digest} came with other bytes from {source}; it is fetched from elsewhere."
            incident("corrupt_chunk", text)

    def held_corrupt(digest: str, message: str) -> None:
        if seldom.due(f"held {digest}"):
            incident("corrupt_chunk", message)

    client = ChunkClient(context.launch.cluster_token, on_corrupt=arrived_corrupt)
    environment = open_environment(context.spec.environment, context.spec.seed)
    try:
        chunks = Chunks(client, DirectoryStore(context.cache), context.sources, held_corrupt)
        Rollout(
            context,
            TransformersEngine.of(context.spec),
            environment,
            chunks,
            lambda results, wake: Courier(
                context.caller, context.controller, chunks, results, context.spec.roles.rollout.max_groups, wake
            ),
            incident,
        ).run()
    finally:
        environment.close()
        client.close()


if __name__ == "__main__":
    run_worker(main)
