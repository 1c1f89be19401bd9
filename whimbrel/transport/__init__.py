"""Chunks over TCP between the nodes of a cluster: bytes by digest, verified, resumable. Knows nothing of weights."""

from whimbrel.transport.call import call_async
from whimbrel.transport.client import ChunkClient
from whimbrel.transport.server import ChunkServer, ChunkSink, ChunkSource

__all__ = ["ChunkClient", "ChunkServer", "ChunkSink", "ChunkSource", "call_async"]
