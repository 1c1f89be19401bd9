"""A real cluster of processes on loopback with a real, tiny, untrained model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agents.models.arithmetic import make_tokenizer
from api.cli.local import LocalCluster
from api.cli.session import client_of, create_run, wait_nodes
from api.client import Client
from whimbrel.coordination import free_port
from whimbrel.settings import Settings
from whimbrel.spec import RunSpec, parse_run_spec

ENVIRONMENT = Path(__file__).with_name("rewards.py")


@dataclass
class Stage:
    """A cluster with a client; `start` begins a run on it."""

    cluster: LocalCluster
    client: Client
    model: Path

    def start(self, **changes: object) -> str:
        """Create a run and return its id."""
        return str(create_run(self.client, self.spec(**changes))["id"])

    def spec(self, **changes: object) -> RunSpec:
        document: dict[str, object] = {
            "name": "tiny",
            "model": str(self.model),
            "batch_size": 16,
            "max_steps": 6,
            "algorithm": {"group_size": 4},
            "sampling": {"max_tokens": 8},
            "optimizer": {"lr": 1e-3},
            "checkpoint": {"snapshot_every": 2},
            "environment": {"type": "python", "entry": f"{ENVIRONMENT}:make"},
            "roles": {"rollout": {"count": 1, "max_groups": 4}},
        }
        return parse_run_spec(document | changes)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of a hundred thousand parameters as random numbers left it, with the built-in model's tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def stage(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., Stage]]:
    """A function that starts a cluster of some nodes; all of it is ended afterwards, and nothing may be left."""
    clusters: list[LocalCluster] = []
    clients: list[Client] = []

    def begin(nodes: int = 2) -> Stage:
        cluster = LocalCluster(
            Settings(home=tmp_path / "home"),
            nodes=nodes,
            port=free_port(),
            etcd_port=free_port(),
            say=lambda line: print(line, file=sys.stderr),  # noqa: T201
        )
        clusters.append(cluster)
        cluster.start()
        client = client_of(cluster)
        clients.append(client)
        wait_nodes(client, nodes)
        return Stage(cluster, client, tiny_model)

    yield begin
    for client in clients:
        client.close()
    for cluster in clusters:
        cluster.stop()
    assert left_behind(tmp_path / "home") == []


def left_behind(home: Path) -> list[str]:
    """Command lines of processes that still belong to a cluster of this home."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            environment = process.environ()
        except (psutil.Error, OSError):
            continue
        if environment.get("WHIMBREL_HOME") == str(home.resolve()):
            found.append(" ".join(process.info["cmdline"] or []))
    return found
