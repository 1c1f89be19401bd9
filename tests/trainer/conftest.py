from __future__ import annotations

from collections.abc import Iterator

import pytest

from agents.trainer.step import make_deterministic
from tests.trainer.support import save_model
from whimbrel.coordination import BlockingEtcd, EtcdServer, keys


@pytest.fixture(autouse=True, scope="session")
def _deterministic() -> None:
    make_deterministic()


@pytest.fixture(scope="session")
def _etcd_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server.endpoint
    server.stop()


@pytest.fixture
def etcd(_etcd_endpoint: str) -> Iterator[BlockingEtcd]:
    """An empty etcd."""
    client = BlockingEtcd([_etcd_endpoint])
    for item in client.list(keys.PREFIX)[0]:
        client.delete(item.key)
    yield client
    client.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model's folder."""
    return str(save_model(tmp_path_factory.mktemp("model")))
