"""`python -m agents.trainer`: one rank of a run's trainer, started by the node agent or by torchrun with its environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agents.models import resolve_model
from agents.trainer.batches import BatchFetcher
from agents.trainer.loop import TrainerLoop
from agents.trainer.place import ChunkSources, Incidents, Peers, Place, TickingStore
from agents.trainer.ranks import Ranks
from agents.trainer.restore import Restorer
from agents.trainer.step import make_deterministic
from agents.worker import run_worker
from whimbrel.checkpoint import DirectoryStore, KeptStore
from whimbrel.transport import ChunkClient

if TYPE_CHECKING:
    from agents.worker import WorkerContext


def train(place: Place, peers: Peers | None = None) -> None:
    """Restore, then train until the run is complete. All ranks run this together."""
    make_deterministic()
    ranks = Ranks.start(place.rank, place.world_size, place.epoch)
    device = torch.device("cuda", place.rank % torch.cuda.device_count()) if torch.cuda.is_available() else None
    incidents = Incidents(place.controller, speaks=ranks.first)
    store = KeptStore(DirectoryStore(place.store))
    chunks = ChunkSources(TickingStore(store, place.tick), peers, place.sources)
    trained = Restorer(place, ranks, chunks, incidents, resolve_model, device).run()
    fetcher = None
    if ranks.first:
        vocabulary = trained.stepper.policy.vocabulary
        # Its thread says nothing of whether the working thread moves.
        payloads = ChunkSources(store, peers, place.sources)
        fetcher = BatchFetcher(place.controller, place.caller, payloads, incidents, vocabulary)
    try:
        TrainerLoop(place, ranks, trained, fetcher, incidents, store.heal).run()
    finally:
        if fetcher is not None:
            fetcher.close()
    ranks.close()


def main(context: WorkerContext) -> None:
    """The part of a worker process that is the trainer's own."""
    client = ChunkClient(context.launch.cluster_token)
    try:
        train(context, client)
    finally:
        client.close()


if __name__ == "__main__":
    run_worker(main)
