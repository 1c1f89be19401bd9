"""Named objects of a run in a store: what exists can be listed; what is committed follows from a head's parents."""

from __future__ import annotations

from typing import Final, Literal

Kind = Literal["versions", "commits", "anchors", "snapshots"]
_DIGITS: Final = 12
"""Versions are padded, so that names sort by version."""


def folder(run_id: str, kind: Kind) -> str:
    """`runs/RUN/KIND/`."""
    return f"runs/{run_id}/{kind}/"


def attempt(run_id: str, kind: Kind, version: int, digest: str) -> str:
    """A record that names its manifest: two attempts at one version, by two epochs, never meet."""
    return f"{folder(run_id, kind)}{version:0{_DIGITS}d}-{digest}"


def commit(run_id: str, version: int) -> str:
    """The record that a version was committed; its content is the manifest's digest."""
    return f"{folder(run_id, 'commits')}{version:0{_DIGITS}d}"


def parse_attempt(name: str) -> tuple[int, str]:
    """Version and manifest digest of an attempt's name."""
    version, _, digest = name.rpartition("/")[2].partition("-")
    return int(version), digest


def parse_commit(name: str) -> int:
    """Version of a commit record's name."""
    return int(name.rpartition("/")[2])
