"""From text, overrides and TOML files to what a cluster is to be; all problems are reported at once."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from shardwise.errors import InputError, Problem, Problems, nearest, plain
from shardwise.field_types import typed
from shardwise.files import below, read_toml
from shardwise.hardware._build import built
from shardwise.hardware._catalogue import Lookup, device_from_table, find_device, in_file, load_device, spelled
from shardwise.hardware._clouds import Rented, find_price, find_rented, of_family
from shardwise.hardware._device import Device, Tier
from shardwise.hardware._quantity import (
    BYTES,
    COUNT,
    DTYPES,
    FLOPS,
    RATE,
    RATIO,
    SECONDS,
    USD,
    Quantity,
    check_number,
    fail,
    read_quantity,
)
from shardwise.records import dataclass, replace

_TEXT = re.compile(r"(?:(\d{1,9})\s*[xX]\s*)?(?:(\d{1,9})\s*[xX]\s*)?([A-Za-z./~].*)")
_WORDS = re.compile(r"[A-Za-z][A-Za-z.-]*(:.*)?")
_SHAPE = 'write "256xh100-sxm-80gb", or "32x8xh100-sxm-80gb" for 32 nodes of 8'

# What may be given beside the device, by the CLI's names.
OVERRIDES: Mapping[str, Quantity] = MappingProxyType(
    {
        "num_devices": COUNT,
        "devices_per_node": COUNT,
        "fast_domain": COUNT,
        "fast_bandwidth": RATE,
        "fast_latency": SECONDS,
        "slow_bandwidth": RATE,
        "slow_latency": SECONDS,
        "nics_per_node": COUNT,
        "nic_bandwidth": RATE,
        "rails": COUNT,
        "oversubscription": RATIO,
        "price": USD,
        "host_memory": BYTES,
        "memory": BYTES,
        "memory_bandwidth": RATE,
        "peak_flops": FLOPS,
        **{f"peak_flops.{dtype}": FLOPS for dtype in DTYPES},
    }
)
_TIER: Mapping[str, Quantity] = MappingProxyType({"size": COUNT, "bandwidth": RATE, "latency": SECONDS})


def cluster_of_text(make: type[Cluster], text: str, overrides: Mapping[str, object]) -> Cluster:
    """Return the cluster of a text and its overrides; see `Cluster.parse`."""
    first, second, name = counted_text(text)
    problems = Problems()
    rented, words = _rented(name), overrides.get("price")
    named_price = isinstance(words, str) and bool(_WORDS.fullmatch(words.strip()))
    given = _read_overrides({k: v for k, v in overrides.items() if not (named_price and k == "price")}, problems)
    if rented is not None and second:
        problems.add(
            "cluster", text, "counts instances, which have a number of devices of their own", f"write {first}x{name}"
        )
    for option, digits in (("num_devices", first), ("devices_per_node", second)):
        if digits is not None and int(digits) == 0:
            problems.add(option, 0, "must be greater than 0", _SHAPE)
    instance = None
    with problems.collect():
        instance = find_device(rented.device) if rented else _device_of(name, Path(), follow=True)
    if instance is None or problems.items:
        if named_price and instance is None:
            problems.add("price", plain(words), "needs a device that is known", "give dollars such as 2.5")
        raise InputError(problems.items)
    counts: dict[str, float] = {"num_devices": math.prod(int(digits) for digits in (first, second) if digits)}
    if second:
        counts["devices_per_node"] = int(second)
    if rented is not None:
        counts, instance = _instances(rented, instance, counts, given)
    if named_price:
        given["price"], note = find_price(str(words), instance.device.name)
        instance = Lookup(device=instance.device, assumptions=(*instance.assumptions, note))
    return built(make, text.strip(), instance, {**counts, **given})


def counted_text(text: object) -> tuple[str | None, str | None, str]:
    """Return the numbers before a name, and the name, which may be that of an instance that begins with a digit.

    >>> counted_text("32x8xh100"), counted_text("2x1H100.80S.32V"), counted_text("2x4090"), counted_text("H100:8")
    (('32', '8', 'h100'), ('2', None, '1H100.80S.32V'), ('2', None, '4090'), ('8', None, 'H100'))
    """
    whole = text.strip() if isinstance(text, str) else ""
    behind = re.fullmatch(r"(.*[A-Za-z].*?)\s*[:xX*]\s*(\d{1,9})", whole)
    if behind and not find_rented(whole) and (spelled(behind[1]) or find_rented(behind[1])):
        return behind[2], None, behind[1]
    whole = re.sub(r"^(\d+)\s*\*", r"\1x", whole)
    card = re.fullmatch(r"(?:(\d{1,9})\s*[xX]\s*)?(\d{4}[- ]?[A-Za-z]{0,5})", whole)
    if card and spelled(card[2]):
        return card[1], None, card[2]
    before, _, name = whole.partition("x") if re.match(r"\d{1,9}x\d", whole) else ("", "", "")
    if whole[:1].isdigit() and find_rented(whole):
        return None, None, whole
    if name[:1].isdigit() and find_rented(name):
        return before, None, name
    match = _TEXT.fullmatch(whole)
    if match is None:
        joined = re.fullmatch(r"(\d{1,9})\s*([A-Za-z].*)", whole)
        meant = f'write "{joined[1]}x{joined[2]}"' if joined and spelled(joined[2]) else _SHAPE
        fail("cluster", text, "is not a number of devices", meant)
    return match[1], match[2], match[3]


def _rented(name: str) -> Rented | None:
    """Return the cloud instance of a name, None where it is a device or unknown."""
    return find_rented(name) or (None if spelled(name) else of_family(name))


def instance_devices(name: str) -> int:
    """Return the devices of the cloud instance of a name, 0 where it is none.

    >>> instance_devices("p5.48xlarge"), instance_devices("h100")
    (8, 0)
    """
    rented = _rented(name)
    return rented.devices if rented else 0


def says_how_many(text: str) -> bool:
    """Return whether a text says how many devices there are, and not their kind alone.

    >>> says_how_many("8xh100"), says_how_many("H100:8"), says_how_many("h100"), says_how_many("4090")
    (True, True, False, False)
    """
    return counted_text(text)[0] is not None


def _instances(
    rented: Rented, lookup: Lookup, counts: Mapping[str, float], given: Mapping[str, object]
) -> tuple[dict[str, float], Lookup]:
    """Return the options of so many instances, and their device with what follows from the instance's name.

    What the user gives wins: the sentence about the instance's own value is then left out.
    """
    nics = {"nics_per_node", "nic_bandwidth", "rails"} & given.keys()
    options = {k: v for k, v in rented.options.items() if k not in given and not (nics and k == "slow_bandwidth")}
    lost = tuple(f"{k} = " for k in rented.options if k not in options)
    notes = tuple(note for note in rented.assumptions if not note.startswith(lost or ("\0",)))
    number = {"num_devices": counts["num_devices"] * rented.devices}
    return {**options, **number}, Lookup(device=lookup.device, assumptions=(*lookup.assumptions, *notes))


def cluster_of_table(make: type[Cluster], content: Mapping[str, object], path: Path, follow: bool) -> Cluster:
    """Return the cluster that the table of a TOML file describes; see `Cluster.load`."""
    table = dict(content)
    name, device, rows = table.pop("name", path.stem), table.pop("device", None), table.pop("tiers", [])
    problems = Problems()
    instance = None
    with problems.collect():
        instance = _device_of(device, path, follow)
    tiers = _tiers_of(rows, problems)
    given = _read_overrides(table, problems)
    given.setdefault("num_devices", tiers[-1].size if tiers else 1)
    if instance is not None and not problems.items:
        with problems.collect():
            return built(make, str(name), instance, given, tiers)
    raise InputError(problems.items)


def _device_of(device: object, path: Path, follow: bool) -> Lookup:
    if isinstance(device, Mapping):
        return Lookup(device=device_from_table(device, "device"), assumptions=())
    if isinstance(device, str) and device.endswith(".toml"):
        named = below(str(path), os.path.expanduser(device), follow, "device")
        return Lookup(device=load_device(named), assumptions=())
    if not isinstance(device, str):
        fail("device", device, "must name a device", 'write device = "h100-sxm-80gb", a TOML file, or a [device] table')
    return find_device(device)


def _tiers_of(rows: object, problems: Problems) -> tuple[Tier, ...]:
    if not isinstance(rows, list):
        problems.add("tiers", plain(rows), "must be a list of tables", "write [[tiers]] before each tier")
        return ()
    tiers = []
    for place, row in enumerate(rows):
        with problems.collect():
            tiers.append(_tier_of(row, f"tiers[{place}]"))
    return tuple(tiers)


def _tier_of(row: object, where: str) -> Tier:
    if not isinstance(row, Mapping):
        fail(where, row, "must be a table", "write [[tiers]] with name, size, bandwidth and latency")
    problems = Problems()
    for key in sorted(row.keys() - {"name", "in_network", *_TIER}):
        known = nearest(key, ["name", "in_network", *_TIER])
        problems.add(f"{where}.{key}", plain(row[key]), "is not a key of a tier", f"use {known}")
    values: dict[str, float] = {}
    for key, quantity in _TIER.items():
        with problems.collect():
            values[key] = read_quantity(quantity, row.get(key), f"{where}.{key}")
    problems.raise_if_any()
    return Tier(
        name=str(row.get("name", where)),
        size=int(values["size"]),
        bytes_per_second=values["bandwidth"],
        latency_seconds=values["latency"],
        in_network=row.get("in_network", False),
    )


def _read_overrides(overrides: Mapping[str, object], problems: Problems) -> dict[str, float]:
    given: dict[str, float] = {}
    for option, value in _flat(overrides).items():
        if option not in OVERRIDES:
            problems.add(option, plain(value), "is not an option of a cluster", f"use {nearest(option, OVERRIDES)}")
        elif value is not None:
            with problems.collect():
                given[option] = read_quantity(OVERRIDES[option], value, option)
    _check_together(given, problems)
    return given


def _flat(overrides: Mapping[str, object]) -> dict[str, object]:
    """Return the options with the TOML table peak_flops spread out, as in peak_flops.bf16."""
    rates = overrides.get("peak_flops")
    if not isinstance(rates, Mapping):
        return dict(overrides)
    rest = {option: value for option, value in overrides.items() if option != "peak_flops"}
    return {**rest, **{f"peak_flops.{dtype}": value for dtype, value in rates.items()}}


def _check_together(given: Mapping[str, float], problems: Problems) -> None:
    """Record options that contradict each other."""
    if {"peak_flops", "peak_flops.bf16"} <= given.keys():
        problems.add("peak_flops", given["peak_flops"], "means peak_flops.bf16, which is given too", "give one of them")
    nics = {"nics_per_node", "nic_bandwidth", "rails"} & given.keys()
    if nics and "slow_bandwidth" in given:
        rule = f"is the rate per device, and {' and '.join(sorted(nics))} is given too"
        problems.add("slow_bandwidth", given["slow_bandwidth"], rule, "give the one or the other")
    if given.get("nics_per_node", 0) % given.get("rails", 1):
        rule = f"must divide nics_per_node = {given['nics_per_node']:g}"
        problems.add("rails", given["rails"], rule, "give as many rails as NICs, or leave rails out")


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
    host_memory_bytes: float = 0.0
    """Memory of the host of a node; 0: not known."""

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
    @typed
    def parse(cls, text: str, overrides: Mapping[str, object] = _NOTHING) -> Cluster:
        """Return the cluster that text such as "256xh100-sxm-80gb" or "32x8xh100" (nodes x devices) describes.

        The device is a catalogue name or the path of a device's TOML file; an override that is None is not given.

        >>> nics = {"nic_bandwidth": "200Gb/s", "nics_per_node": 2}
        >>> Cluster.parse("2x4xa100-sxm-80gb", nics).tiers[-1].bytes_per_second
        12500000000.0
        """
        return cluster_of_text(cls, text, overrides)

    @classmethod
    @typed
    def load(cls, path: str | Path, follow: bool = False) -> Cluster:
        """Return the cluster that a TOML file describes: `device`, `num_devices`, any override, and [[tiers]].

        A file of its device lies below it, or anywhere where `follow` says so.
        """
        table = read_toml(Path(path), "cluster")
        if "facts" in table and not table.keys() & {"device", "tiers"}:
            return cluster_of_text(cls, f"1x{path}", {})  # the file of a device alone is one, as its name alone is
        try:
            return cluster_of_table(cls, table, Path(path), follow)
        except InputError as error:
            raise InputError(in_file(Path(path).name, error.problems)) from None

    def with_tiers(self, tiers: Iterable[Tier]) -> Cluster:
        """Return the cluster with these tiers, for example a domain of 72, a pod and a spine.

        >>> pair = Tier(name="nvlink", size=2, bytes_per_second=450e9, latency_seconds=1e-6, in_network=False)
        >>> Cluster.parse("2xh100").with_tiers([pair]).tiers[0].name
        'nvlink'
        """
        given = tuple(tiers) if isinstance(tiers, Iterable) else (tiers,)
        if wrong := [one for one in given if not isinstance(one, Tier)]:
            raise InputError([Problem("tiers", plain(wrong[0]), "must be tiers", "write [Tier(...), Tier(...)]")])
        return replace(self, tiers=given)


def build_cluster(name: str, lookup: Lookup, given: Mapping[str, float], tiers: tuple[Tier, ...] = ()) -> Cluster:
    """Return the cluster of a device and the options given in SI units, with the tiers given or the device's usual."""
    return built(Cluster, name, lookup, given, tiers)


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
