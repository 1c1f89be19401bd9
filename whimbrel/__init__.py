"""Whimbrel: reinforcement-learning post-training that survives.

This package is what every process of a run imports. It owns the weight log, the delta codec, the
transport of chunks, the coordination through etcd and the messages between processes. It never
imports a web framework or a database.
"""

__version__ = "0.1.0"
