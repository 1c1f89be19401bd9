"""Coordination through etcd: who is here, who leads, who owns what. Knows leases, watches and transactions, not runs."""

from whimbrel.coordination import keys
from whimbrel.coordination.blocking import BlockingEtcd
from whimbrel.coordination.election import Election
from whimbrel.coordination.etcd import Change, Compare, Delete, Etcd, KeyValue, Put, TxnResult
from whimbrel.coordination.lease import LeaseKeeper
from whimbrel.coordination.server import EtcdServer, etcd_command, free_port, require_free_port
from whimbrel.coordination.view import PrefixView

__all__ = [
    "BlockingEtcd",
    "Change",
    "Compare",
    "Delete",
    "Election",
    "Etcd",
    "EtcdServer",
    "KeyValue",
    "LeaseKeeper",
    "PrefixView",
    "Put",
    "TxnResult",
    "etcd_command",
    "free_port",
    "keys",
    "require_free_port",
]
