"""`whimbrel checkpoint`: committed policy versions, which are the checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from api.cli.connect import connect
from api.cli.output import Column, Format, Output, number, print_item, print_items, say, size
from whimbrel.errors import EXIT_FAILED, Corrupt, MissingChunk, NotFound
from whimbrel.settings import Settings

app = typer.Typer(no_args_is_help=True)

RunRef = Annotated[str, typer.Argument(metavar="RUN", help="The run's name or id.")]

_COLUMNS: list[Column] = [
    ("VERSION", lambda version: str(version["version"])),
    ("KIND", lambda version: version["kind"]),
    ("SIZE", lambda version: size(version["payload_bytes"])),
    ("FULL", lambda version: size(version["full_bytes"])),
    ("DENSITY", lambda version: "-" if version["density"] is None else f"{version['density']:.2%}"),
    ("SNAPSHOT", lambda version: "yes" if version["snapshot"] else "-"),
    ("REWARD", lambda version: number(version["metrics"].get("reward/mean"))),
    ("COMMITTED", lambda version: version["committed_at"] or "-"),
]
_FIELDS: list[Column] = [
    *_COLUMNS,
    ("MANIFEST", lambda version: version["manifest"]),
    ("PARENT", lambda version: version["parent"] or "-"),
    ("STATE DIGEST", lambda version: version["state_digest"] or "-"),
    ("CHANGED", lambda version: f"{number(version['changed'])} of {number(version['total'])} elements"),
]


@app.command("ls")
def list_versions(
    run: RunRef,
    limit: Annotated[int, typer.Option(min=1, help="At most this many, newest first.")] = 50,
    output: Output = Format.TABLE,
) -> None:
    """List committed versions, newest first."""
    with connect() as client:
        versions = client.versions(run, limit=limit)
    print_items(versions, _COLUMNS, output, name="version", empty="No version is committed yet.")


@app.command("show")
def show_version(
    run: RunRef, version: Annotated[int, typer.Argument(min=0, help="The version.")], output: Output = Format.TABLE
) -> None:
    """Show one version."""
    with connect() as client:
        print_item(client.version(run, version), _FIELDS, output, name="manifest")


@app.command("verify")
def verify(
    run: RunRef,
    version: Annotated[int | None, typer.Option(min=0, help="The version to prove; default the newest.")] = None,
    output: Output = Format.TABLE,
) -> None:
    """Rebuild a version from the store, checking every chunk, every delta and the digest of the result.

    Reads the weight log of this machine (WHIMBREL_STORE, else below WHIMBREL_HOME), not the controller's word. The
    payloads that a replay since the last snapshot would need are read as well.
    """
    with connect() as client:
        found = _newest(client.versions(run, limit=1)) if version is None else client.version(run, version)
    result = _verified(found)
    if output is Format.TABLE:
        say(
            f"Version {result['version']} verified: anchor {result['anchor_version']} and {result['deltas']} deltas in "
            f"{result['chunks']} chunks, {size(result['nbytes'])} read, state digest {result['state_digest']}."
        )
        say(_snapshot_sentence(result))
    else:
        print_item(result, [], output, name="manifest")
    if result["state_digest"] != (found["state_digest"] or result["state_digest"]):
        say(f"error: The controller recorded the state digest {found['state_digest']} for this version.")
        say("hint: Trust the store; the database is derived from it. Was it restored from a backup?")
        raise typer.Exit(EXIT_FAILED)


def _newest(versions: list[dict[str, Any]]) -> dict[str, Any]:
    if not versions:
        raise NotFound("No version is committed yet.", hint="Watch the run with `whimbrel run watch`.")
    return versions[0]


def _verified(found: dict[str, Any]) -> dict[str, Any]:
    """Read the version's whole chain again; raises the tree's Corrupt, DigestMismatch, MissingChunk or ChainGap."""
    from whimbrel.checkpoint import DirectoryStore, verify_chain  # compiles kernels: only here

    path = Settings().store_path
    if not path.is_dir():
        raise NotFound(f"There is no weight log at {path}.", hint="Set WHIMBREL_STORE to the run's store.")
    try:
        report = verify_chain(DirectoryStore(path), found["run_id"], found["version"], head=found["manifest"])
    except (Corrupt, MissingChunk) as error:
        raise type(error)(
            f"Version {found['version']} is not whole in {path}: {error.message}",
            hint="Put the file back from a copy of the store; versions from the next anchor on do without it.",
        ) from error
    return {**asdict(report), "verified": True}


def _snapshot_sentence(result: dict[str, Any]) -> str:
    missing = len(result["payloads_missing"])
    since = f"since snapshot {result['snapshot_version']}" if result["snapshot_version"] >= 0 else "of the steps"
    if missing:
        return f"{missing} payloads {since} are not in this store; a replay would fetch them from the rollouts' nodes."
    return f"All {result['payloads']} payloads {since} are whole."
