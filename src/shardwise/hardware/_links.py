"""Kinds of links between devices with the latency of a step over them, from links.toml, and tiers made of links."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from shardwise.errors import InputError, Problem, Problems, plain
from shardwise.hardware._quantity import COUNT, RATE, SECONDS, check_number, fail, nearest
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One level of the network: `size` devices reach each other over it, each at a rate in one direction.

    `size` counts the devices inside one domain of the tier, all inner tiers included; the rate is per device, after
    oversubscription; the latency is of one step, in seconds. `mesh` is how many devices are joined pairwise where
    there is no switch: a group of fewer has only the links between its members. 0 is a switch.
    """

    name: str
    size: int
    bytes_per_second: float
    latency_seconds: float
    in_network: bool
    mesh: int = 0

    def __post_init__(self) -> None:
        problems = Problems()
        for word, quantity in (("size", COUNT), ("bytes_per_second", RATE), ("latency_seconds", SECONDS)):
            with problems.collect():
                check_number(quantity, getattr(self, word), word)
        if not isinstance(self.in_network, bool):
            rule, remedy = "must be true or false", "use true where the switch reduces"
            problems.add("in_network", plain(self.in_network), rule, remedy)
        if problems.items:
            raise InputError(Problem(f"tiers.{self.name}.{p.field}", p.value, p.rule, p.remedy) for p in problems.items)


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
