"""`whimbrel node`: the machines."""

from __future__ import annotations

from typing import Annotated

import typer

from api.cli.connect import connect
from api.cli.output import Column, Format, Output, age, print_item, print_items, say, seconds, size

app = typer.Typer(no_args_is_help=True)

NodeName = Annotated[str, typer.Argument(help="The node's name.")]

_COLUMNS: list[Column] = [
    ("NODE", lambda node: node["id"]),
    ("STATE", lambda node: node["state"]),
    ("SLOTS", lambda node: f"{node['slots_used']}/{node['slots']}"),
    ("LEASE AGE", lambda node: seconds(node["lease_age_s"])),
    ("CPUS", lambda node: str(node["cpus"])),
    ("GPUS", lambda node: str(node["gpus"])),
    ("MEMORY FREE", lambda node: size(node["memory_available_bytes"])),
    ("REGION", lambda node: node["region"]),
    ("SEEN", lambda node: age(node["last_seen_at"])),
]
_FIELDS: list[Column] = [
    *_COLUMNS,
    ("ADDRESS", lambda node: node["address"]),
    ("DISK FREE", lambda node: size(node["disk_available_bytes"])),
    ("WORKERS", lambda node: ", ".join(node["workers"]) or "none"),
    ("REASON", lambda node: node["reason"] or "-"),
]


@app.command("ls")
def list_nodes(output: Output = Format.TABLE) -> None:
    """List the nodes."""
    with connect() as client:
        nodes = client.nodes()
    print_items(nodes, _COLUMNS, output, name="id", empty="No node has joined; start one with `whimbrel agent`.")


@app.command("show")
def show_node(node: NodeName, output: Output = Format.TABLE) -> None:
    """Show one node."""
    with connect() as client:
        print_item(client.node(node), _FIELDS, output, name="id")


@app.command("cordon")
def cordon(node: NodeName) -> None:
    """Place nothing new on the node; what runs there goes on."""
    _act(node, "cordon", "takes no new workers")


@app.command("uncordon")
def uncordon(node: NodeName) -> None:
    """Let the node take workers again."""
    _act(node, "uncordon", "takes workers again")


@app.command("drain")
def drain(node: NodeName) -> None:
    """Move the node's workers elsewhere and place nothing new on it."""
    _act(node, "drain", "is being drained; watch it with `whimbrel node ls`")


def _act(node: str, verb: str, outcome: str) -> None:
    with connect() as client:
        client.act_node(node, verb)
    say(f"Node {node} {outcome}.")
