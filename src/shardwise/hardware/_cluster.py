"""Devices joined in tiers: what is near, what is far, and what each hop costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from shardwise.errors import InputError, Problems
from shardwise.files import read_toml
from shardwise.hardware._build import cluster_fields
from shardwise.hardware._catalogue import Lookup, in_file
from shardwise.hardware._device import Device, Tier
from shardwise.hardware._parse import fields_of_table, fields_of_text
from shardwise.hardware._quantity import COUNT, USD, check_number
from shardwise.records import dataclass

_NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A number of equal devices and the tiers that join them, fastest first; the last tier spans the cluster.

    >>> cluster = Cluster.parse("256xh100-sxm-80gb")
    >>> [(tier.name, tier.size, tier.bytes_per_second) for tier in cluster.tiers]
    [('nvlink-4', 8, 450000000000.0), ('network', 256, 50000000000.0)]
    """

    device: Device
    num_devices: int
    tiers: tuple[Tier, ...]
    devices_per_node: int
    usd_per_device_hour: float | None
    name: str
    assumptions: tuple[str, ...]

    def __repr__(self) -> str:
        """Return the cluster in one line, as a prompt shows it."""
        return f"<Cluster of {self.num_devices} x {self.device.name}, {self.devices_per_node} a node>"

    def __post_init__(self) -> None:
        problems = Problems()
        for word, quantity in (("num_devices", COUNT), ("devices_per_node", COUNT), ("usd_per_device_hour", USD)):
            value = getattr(self, word)
            if value is not None or word != "usd_per_device_hour":
                with problems.collect():
                    check_number(quantity, value, word)
        problems.raise_if_any()
        _check_tiers(self, problems)
        problems.raise_if_any()

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes, the last of which may be partly used.

        >>> Cluster.parse("12xh100-sxm-80gb").num_nodes
        2
        """
        return -(-self.num_devices // self.devices_per_node)

    @classmethod
    def parse(cls, text: str, overrides: Mapping[str, object] = _NOTHING) -> Cluster:
        """Return the cluster that text such as "256xh100-sxm-80gb" or "32x8xh100" (nodes x devices) describes.

        The device is a catalogue name or the path of a device's TOML file; an override that is None is not given.

        >>> nics = {"nic_bandwidth": "200Gb/s", "nics_per_node": 2}
        >>> Cluster.parse("2x4xa100-sxm-80gb", nics).tiers[-1].bytes_per_second
        12500000000.0
        """
        return cls(**fields_of_text(text, overrides))

    @classmethod
    def load(cls, path: str | Path, follow: bool = False) -> Cluster:
        """Return the cluster that a TOML file describes: `device`, `num_devices`, any override, and [[tiers]].

        A file of its device lies below it, or anywhere where `follow` says so.
        """
        table = read_toml(Path(path), "cluster")
        try:
            return cls(**fields_of_table(table, Path(path), follow))
        except InputError as error:
            raise InputError(in_file(Path(path).name, error.problems)) from None

    def with_tiers(self, tiers: Iterable[Tier]) -> Cluster:
        """Return the cluster with these tiers, for example a domain of 72, a pod and a spine.

        >>> pair = Tier(name="nvlink", size=2, bytes_per_second=450e9, latency_seconds=1e-6, in_network=False)
        >>> Cluster.parse("2xh100").with_tiers([pair]).tiers[0].name
        'nvlink'
        """
        return replace(self, tiers=tuple(tiers))


def build_cluster(name: str, found: Lookup, given: Mapping[str, float], tiers: tuple[Tier, ...] = ()) -> Cluster:
    """Return the cluster of a device and the options given in SI units, with the tiers given or the device's usual."""
    return Cluster(**cluster_fields(name, found, given, tiers))


def part_of(cluster: Cluster, num_devices: int) -> Cluster:
    """Return the first so many devices of a cluster, joined as they are there.

    >>> part_of(Cluster.parse("64xh100-sxm-80gb"), 16).num_devices
    16
    """
    if num_devices == cluster.num_devices:
        return cluster
    inner = [t for t in cluster.tiers[:-1] if t.size < num_devices]
    last = next(t for t in cluster.tiers if t.size >= num_devices)
    tiers: tuple[Tier, ...] = (*inner, replace(last, size=num_devices))
    return replace(cluster, num_devices=num_devices, tiers=tiers)


def _check_tiers(cluster: Cluster, problems: Problems) -> None:
    tiers = cluster.tiers
    if not tiers or tiers[-1].size != cluster.num_devices:
        size = tiers[-1].size if tiers else None
        rule = f"the last tier must span the {cluster.num_devices} devices"
        problems.add("tiers", size, rule, f"give the last tier size = {cluster.num_devices}")
        return
    for inner, outer in pairwise(tiers):
        partial = outer is tiers[-1]
        if inner.size >= outer.size or (outer.size % inner.size and not partial):
            rule = f"must be larger than, and a multiple of, {inner.size} ({inner.name})"
            problems.add(f"tiers.{outer.name}.size", outer.size, rule, f"use a multiple of {inner.size}")
    node = cluster.devices_per_node
    for tier in tiers[:-1]:
        if math.gcd(tier.size, node) not in (tier.size, node):
            rule = f"must divide devices_per_node = {node} or be a multiple of it"
            problems.add(f"tiers.{tier.name}.size", tier.size, rule, f"use {node}")
