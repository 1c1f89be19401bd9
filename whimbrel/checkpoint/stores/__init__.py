"""Where the log's bytes live, behind one protocol."""

from whimbrel.checkpoint.stores.base import CHUNKS, Fetch, Store, chunk_name, store_fetch
from whimbrel.checkpoint.stores.directory import DirectoryStore
from whimbrel.checkpoint.stores.kept import KeptStore
from whimbrel.checkpoint.stores.memory import MemoryStore

__all__ = ["CHUNKS", "DirectoryStore", "Fetch", "KeptStore", "MemoryStore", "Store", "chunk_name", "store_fetch"]
