from __future__ import annotations

import gc
import uuid
from pathlib import Path

import pytest
import torch

from tests.trainer.support import tiny_model
from whimbrel.checkpoint import Manifest
from whimbrel.coordination import EtcdServer
from whimbrel.errors import Fenced, UsageError
from whimbrel.session import Session


def _run() -> str:
    return f"own-{uuid.uuid4().hex[:8]}"


def test_a_loop_of_ones_own_publishes_and_comes_back(tmp_path: Path, etcd_server: EtcdServer) -> None:
    run = _run()
    model = tiny_model().to(torch.bfloat16)
    with Session.start(run, store=tmp_path, etcd=[etcd_server.endpoint]) as session:
        assert session.version == -1
        assert session.restore_into(model) == -1
        assert session.publish(model.state_dict(), files={"config.json": b"{}"}).version == 0
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(-1)[::7] += 0.5
        manifest = session.publish(model.state_dict(), metrics={"loss": 1.5})
        assert (manifest.version, manifest.metrics["loss"]) == (1, 1.5)
        assert 0 < manifest.changed < manifest.total / 4
    other = tiny_model(9).to(torch.bfloat16)
    with Session.start(run, store=tmp_path, etcd=[etcd_server.endpoint]) as session:
        assert session.restore_into(other) == 1
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor.view(torch.int16), other.state_dict()[name].view(torch.int16))
        assert session.publish(other.state_dict()).changed == 0


def test_a_later_session_fences_the_earlier(tmp_path: Path, etcd_server: EtcdServer) -> None:
    run, weights = _run(), {"w": torch.tensor([1.0, -0.0, float("nan")])}
    with Session.start(run, store=tmp_path, etcd=[etcd_server.endpoint]) as first:
        first.publish(weights)
        with Session.start(run, store=tmp_path, etcd=[etcd_server.endpoint]) as second:
            with pytest.raises(Fenced):
                first.publish(weights)
            second.publish({"w": torch.tensor([1.0, 0.0, float("nan")])})
            assert second.version == 1
            assert second.latest()["w"].view(torch.int32)[1] == 0


def test_a_session_of_many_versions_keeps_in_memory_only_the_newest(tmp_path: Path, etcd_server: EtcdServer) -> None:
    run = _run()
    with Session.start(run, store=tmp_path, etcd=[etcd_server.endpoint]) as session:
        for step in range(8):
            session.publish({"w": torch.full((3,), float(step))})
        gc.collect()
        held = [each for each in gc.get_objects() if type(each) is Manifest and each.run_id == run]
        assert len(held) <= 2


def test_a_run_keeps_its_layout(tmp_path: Path, etcd_server: EtcdServer) -> None:
    with Session.start(_run(), store=tmp_path, etcd=[etcd_server.endpoint]) as session:
        session.publish({"w": torch.ones(3)})
        with pytest.raises(UsageError):
            session.publish({"w": torch.ones(4)})
        with pytest.raises(UsageError):
            session.publish({"w": torch.ones(3), "v": torch.ones(1)})
    with pytest.raises(UsageError):
        Session.start("Not a name", store=tmp_path, etcd=[etcd_server.endpoint])
