"""Fixtures that several rings share: a real etcd and free ports. Everything started here is ended here."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from whimbrel.coordination import EtcdServer, free_port


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A real etcd on loopback for the whole session; tests use keys of their own and do not stop it."""
    _require_etcd()
    server = EtcdServer(tmp_path_factory.mktemp("etcd") / "data")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """A real etcd for one test, which may kill, pause and restart it."""
    _require_etcd()
    server = EtcdServer(tmp_path / "etcd-data")
    server.start()
    yield server
    server.kill()


@pytest.fixture(name="free_port")
def _free_port() -> Callable[[], int]:
    """A function that returns a port of loopback that nobody listens on."""
    return free_port


def _require_etcd() -> None:
    if shutil.which("etcd") is None:
        pytest.skip("NO ETCD ON THIS MACHINE: apt-get install etcd-server; coordination is not tested without it")
