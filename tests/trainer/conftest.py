from __future__ import annotations

from collections.abc import Iterator

import pytest

from agents.trainer.step import make_deterministic
from tests.trainer.stage import RUN
from tests.trainer.support import save_model
from whimbrel.coordination import BlockingEtcd, EtcdServer, keys


@pytest.fixture(autouse=True, scope="session")
def _deterministic() -> None:
    make_deterministic()


@pytest.fixture
def etcd(etcd_server: EtcdServer) -> Iterator[BlockingEtcd]:
    """An etcd in which nobody owns the run's trainer and there is no head."""
    client = BlockingEtcd([etcd_server.endpoint])
    client.delete(keys.head(RUN))
    client.delete(keys.owner(RUN, "trainer"))
    yield client
    client.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model's folder."""
    return str(save_model(tmp_path_factory.mktemp("model")))
