"""Kinds of links between devices and the latency of one step over them, from links.toml."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from shardwise.hardware._quantity import fail, nearest
from shardwise.records import dataclass

LOCAL = "local"
NETWORK = "network"
HOST_LINK = "pcie"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A kind of link: its latency per step in seconds, with source and date."""

    name: str
    latency_seconds: float
    source: str
    date: str

    @property
    def assumed(self) -> bool:
        """Return whether the latency is an assumption rather than a measurement."""
        return self.source.startswith("assumption")


@cache
def all_links() -> dict[str, Link]:
    """Return every kind of link by name."""
    import tomllib

    table = tomllib.loads(Path(__file__).with_name("links.toml").read_text(encoding="utf-8"))
    return {
        name: Link(name=name, latency_seconds=row["latency_seconds"], source=row["source"], date=row["date"])
        for name, row in table.items()
    }


def find_link(name: str) -> Link:
    """Return a kind of link by name; an unknown name raises `InputError` with near matches.

    >>> find_link("nvlink-4").latency_seconds
    8.4e-07
    """
    links = all_links()
    if name not in links:
        fail("fast_link", name, "is not a known kind of link", f"use {nearest(name, links)}")
    return links[name]
