"""One device as its maker and its driver describe it; every number carries its source and date."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from functools import cache
from types import MappingProxyType

from shardwise.errors import InputError, Problem, Problems, nearest, plain
from shardwise.field_types import typed
from shardwise.files import own_table
from shardwise.hardware._quantity import (
    BYTES,
    COUNT,
    DTYPES,
    FLOPS,
    RATE,
    SECONDS,
    USD,
    WATTS,
    Quantity,
    check_number,
    fail,
    read_quantity,
)
from shardwise.records import dataclass, replace

_MATRIX = "matrix_flops."
_ACHIEVED = "achieved_flops."
# A round number near those of the devices whose kernels are measured (80 to 148).
_UNKNOWN_CORES = 100

# What a device may state: field -> how it is read, and the option that gives it where the catalogue does not.
FIELDS: Mapping[str, tuple[Quantity | None, str]] = MappingProxyType(
    {
        "memory_bytes": (BYTES, "memory"),
        "usable_memory_bytes": (BYTES, "memory"),
        "memory_bytes_per_second": (RATE, "memory_bandwidth"),
        "last_cache_bytes": (BYTES, "a device file"),
        "vector_flops": (FLOPS, "a device file"),
        "num_cores": (COUNT, "a device file"),
        "power_watts": (WATTS, "a device file"),
        "host_bytes_per_second": (RATE, "a device file"),
        "devices_per_node": (COUNT, "devices_per_node"),
        "fast_domain": (COUNT, "fast_domain"),
        "fast_bytes_per_second": (RATE, "fast_bandwidth"),
        "fast_in_network": (None, "a device file"),
        "slow_bytes_per_second": (RATE, "slow_bandwidth"),
        "usd_per_device_hour": (USD, "price"),
        "year": (COUNT, "a device file"),
        **{_MATRIX + dtype: (FLOPS, f"peak_flops.{dtype}") for dtype in DTYPES},
        # What kernels of this very machine reach, where `shardwise measure` wrote the file.
        "achieved_bytes_per_second": (RATE, "memory_bandwidth_achieved"),
        **{_ACHIEVED + dtype: (FLOPS, "matmul_flops") for dtype in DTYPES},
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sourced:
    """What somebody says: who, and when (YYYY or YYYY-MM)."""

    source: str
    date: str

    @property
    def assumed(self) -> bool:
        """Whether it is an assumption rather than a published or measured figure."""
        return self.source.startswith("assumption")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact(Sourced):
    """One number about a device: the field and its value in SI units."""

    field: str
    value: float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one accelerator can hold, compute and move; rates are dense peaks and bytes per second in one direction.

    A figure that no source gives is absent: reading it raises `InputError` naming the option that supplies it.

    >>> from shardwise.hardware import find_device
    >>> h100 = find_device("h100-sxm-80gb").device
    >>> h100.memory_bytes, h100.memory_bytes_per_second, h100.peak_flops("bf16")
    (85899345920, 3350000000000.0, 989000000000000.0)
    """

    name: str
    full_name: str
    vendor: str
    fast_link: str
    sources: tuple[Fact, ...]
    like: str = ""
    """The device of the catalogue that it is a variant of, whose kernels it runs; empty where it is none."""
    _values: dict[str, float | bool] = field(init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        """Return the device in one line, as a prompt shows it."""
        return f"<Device {self.name}: {self.full_name}>"

    def __post_init__(self) -> None:
        problems = Problems()
        for word in ("name", "full_name", "vendor", "fast_link"):
            text = getattr(self, word)
            if not isinstance(text, str) or not text.strip():
                problems.add(word, plain(text), "must be text that is not empty", f"give the {word} of the device")
        values: dict[str, float | bool] = {}
        for fact in self.sources:
            if fact.field in values:
                problems.add(fact.field, plain(fact.value), "is stated twice", "keep one of the two")
            with problems.collect():
                values[fact.field] = read_field(fact.field, fact.value)
        _check_memory(values, problems)
        problems.raise_if_any()
        order = list(FIELDS)
        facts = sorted(self.sources, key=lambda fact: order.index(fact.field))
        object.__setattr__(self, "sources", tuple(replace(fact, value=values[fact.field]) for fact in facts))
        object.__setattr__(self, "_values", values)

    @property
    def chip(self) -> str:
        """Return the name by which constants of kernels are kept: that of the device it is like, else its own.

        >>> from shardwise.hardware import find_device
        >>> replace(find_device("h100-sxm-80gb").device, name="lab", like="h100-sxm-80gb").chip
        'h100-sxm-80gb'
        """
        return self.like or self.name

    def knows(self, name: str) -> bool:
        """Return whether the device states a field, such as "power_watts" or "matrix_flops.fp8"."""
        return isinstance(name, str) and name in self._values

    def fact(self, name: str) -> Fact:
        """Return the number of a field with its source and date."""
        self._known(name)
        return next(fact for fact in self.sources if fact.field == name)

    def peak_flops(self, dtype: str) -> float:
        """Return the dense peak of GEMMs in FLOP/s; nothing is emulated, an unsupported type raises.

        >>> from shardwise.hardware import find_device
        >>> find_device("v100-sxm-32gb").device.peak_flops("bf16")
        Traceback (most recent call last):
        shardwise.errors.InputError: dtype = 'bf16': has no published matrix rate on v100-sxm-32gb; use fp32 or fp16
        """
        if f"{_MATRIX}{dtype}" not in self._values:
            rates = self.matrix_flops
            known = " or ".join(rates) if rates else f"peak_flops.{dtype} to state the rate"
            fail("dtype", dtype, f"has no published matrix rate on {self.name}", f"use {known}")
        return float(self._values[_MATRIX + dtype])

    @typed
    def with_values(self, values: Mapping[str, float | bool], source: str, date: str) -> Device:
        """Return the device with fields replaced or added, each carrying the source given here.

        >>> from shardwise.hardware import find_device
        >>> find_device("h100-sxm-80gb").device.with_values({"power_watts": 500}, "rack limit", "2025").power_watts
        500.0
        """
        kept = tuple(fact for fact in self.sources if fact.field not in values)
        new = tuple(Fact(field=name, value=value, source=source, date=date) for name, value in values.items())
        return replace(self, sources=kept + new)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Return the fields that no source gives; a data type that the device lacks is not a gap."""
        optional = (_MATRIX, "achieved_")
        return tuple(name for name in FIELDS if not name.startswith(optional) and name not in self._values)

    @property
    def matrix_flops(self) -> Mapping[str, float]:
        """Return dense matrix FLOP/s by data type, in the order of increasing speed of the types."""
        rates = {dtype: self._values.get(_MATRIX + dtype) for dtype in DTYPES}
        return MappingProxyType({dtype: rate for dtype, rate in rates.items() if rate is not None})

    def achieved(self, name: str) -> Fact | None:
        """Return what kernels measured on this machine reach, such as "flops.bf16", or None where none were.

        >>> from shardwise.hardware import find_device
        >>> find_device("h100-sxm-80gb").device.achieved("bytes_per_second")
        """
        return self.fact(f"achieved_{name}") if self.knows(f"achieved_{name}") else None

    def built(self, title: str) -> str:
        """Return what a framework is called in its build for the device: that for ROCm on AMD's.

        >>> from shardwise.hardware import find_device
        >>> find_device("mi300x").device.built("vLLM"), find_device("a100-sxm-80gb").device.built("vLLM")
        ('vLLM, its build for ROCm', 'vLLM')
        """
        return f"{title}, its build for ROCm" if self.vendor == "AMD" and "ROCm" not in title else title

    @property
    def memory_bytes(self) -> int:
        """Return the memory on the nameplate in bytes: 80 GiB is 85899345920."""
        return int(self._known("memory_bytes"))

    @property
    def usable_memory_bytes(self) -> int:
        """Return the bytes that the driver offers to programs."""
        return int(self._known("usable_memory_bytes"))

    @property
    def memory_bytes_per_second(self) -> float:
        """Return the peak bandwidth of the device memory in bytes per second."""
        return self._known("memory_bytes_per_second")

    @property
    def last_cache_bytes(self) -> int:
        """Return bytes of the last cache before the memory; the catalogue reads the maker's megabytes as decimal."""
        return int(self._known("last_cache_bytes"))

    @property
    def vector_flops(self) -> float:
        """Return fp32 FLOP/s outside the matrix units."""
        return self._known("vector_flops")

    @property
    def num_cores(self) -> int:
        """Return the number of streaming multiprocessors, compute units or cores."""
        return int(self._known("num_cores"))

    @property
    def cores(self) -> int:
        """Return the cores that kernels spread over, a usual number where none are stated or all is one (Trainium)."""
        stated = self.num_cores if self.knows("num_cores") else 0
        return stated if stated > 1 else _UNKNOWN_CORES

    @property
    def power_watts(self) -> float:
        """Return the rated power in watts."""
        return self._known("power_watts")

    @property
    def host_bytes_per_second(self) -> float:
        """Return bytes per second to the host's memory in one direction."""
        return self._known("host_bytes_per_second")

    @property
    def devices_per_node(self) -> int:
        """Return the devices of one common server."""
        return int(self._known("devices_per_node"))

    @property
    def fast_domain(self) -> int:
        """Return the devices of one fast domain (NVLink, xGMI, ICI or the PCIe of one node)."""
        return int(self._known("fast_domain"))

    @property
    def fast_bytes_per_second(self) -> float:
        """Return bytes per second of one device into its fast domain, in one direction."""
        return self._known("fast_bytes_per_second")

    @property
    def fast_in_network(self) -> bool:
        """Return whether the switch of the fast domain reduces (NVLink SHARP); not stated means that it does not."""
        return bool(self._values.get("fast_in_network", False))

    @property
    def slow_bytes_per_second(self) -> float:
        """Return bytes per second of one device into the network between domains, in one direction."""
        return self._known("slow_bytes_per_second")

    @property
    def usd_per_device_hour(self) -> float | None:
        """Return the list price in US dollars per device and hour, or None where no list price is known."""
        price = self._values.get("usd_per_device_hour")
        return None if price is None else float(price)

    @property
    def year(self) -> int:
        """Return the year in which the device came out."""
        return int(self._known("year"))

    def _known(self, name: str) -> float:
        if not self.knows(name):
            name = str(name)
            option = FIELDS[name][1] if name in FIELDS else f"one of {nearest(name, FIELDS)}"
            fail(name, None, f"is not known for {self.name}", f"give it with {option}")
        return self._values[name]


def read_field(name: str, value: object) -> float | bool:
    """Return the value of a device field in SI units; text may carry a unit.

    >>> read_field("memory_bytes", "80GiB")
    85899345920
    """
    if name not in FIELDS:
        fail(name, value, "is not a field of a device", f"use {nearest(name, FIELDS)}")
    quantity = FIELDS[name][0]
    if quantity is not None:
        return read_quantity(quantity, value, name)
    if not isinstance(value, bool):
        fail(name, value, "must be true or false", "use true where the switch reduces")
    return value


def _check_memory(values: Mapping[str, float | bool], problems: Problems) -> None:
    memory, usable = values.get("memory_bytes"), values.get("usable_memory_bytes")
    if memory is None or usable is None:
        missing = "memory_bytes" if memory is None else "usable_memory_bytes"
        problems.add(missing, None, "is required", 'state it, for example "80GiB"')
    elif usable > memory:
        problems.add("usable_memory_bytes", usable, f"must not exceed memory_bytes = {memory}", "swap the two")


LOCAL = "local"
NETWORK = "network"
HOST_LINK = "pcie"
# Devices of the boards that `Link.board_links` speaks of.
BOARD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Sourced):
    """A kind of link: its latency per step in seconds.

    `board_links` are those of a device on boards of eight without a switch, 0 where no such board is built. Of them a
    pair has one, and each further rank of a group brings `board_links_a_rank`.
    """

    name: str
    latency_seconds: float
    board_links: int = 0
    board_links_a_rank: float = 0.0
    lane_bytes_per_second: float = 0.0  # One of the links of a device behind a switch, in one direction.
    torus: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)
    """Axes of the torus of each device, and the devices from which on its axes are rings."""
    packages: tuple[str, ...] = ()
    package_shares: tuple[float, ...] = ()
    """Of dies that share a package: what four of them have of all links, and a message to the next package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One level of the network: `size` devices reach each other over it, each at a rate in one direction.

    `size` counts the devices inside one domain of the tier, all inner tiers included; the rate is per device, after
    oversubscription; the latency is of one step, in seconds. `mesh` is how many devices are joined pairwise where
    there is no switch: a group of fewer has only the links between its members. 0 is a switch. Boards of eight whose
    links are fewer than their devices (`Link.board_links`) count as meshes too.
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

    @property
    def mesh_links(self) -> tuple[int, float]:
        """Links of a device to others of its mesh, and how many a further rank of a group brings: a pair has one.

        >>> mesh = Tier(name="xgmi", size=8, bytes_per_second=1.0, latency_seconds=0.0, in_network=False, mesh=8)
        >>> mesh.mesh_links, replace(mesh, name="nvlink-2").mesh_links
        ((7, 1.0), (6, 1.5))
        """
        board = all_links().get(self.name) if self.mesh == BOARD else None
        if board and board.board_links:
            return board.board_links, board.board_links_a_rank
        return max(self.mesh - 1, 0), 1.0


@cache
def all_links() -> dict[str, Link]:
    """Return every kind of link by name."""
    table = own_table(__file__, "links.toml")
    facts = {f.name for f in fields(Link)}
    return {name: Link(name=name, **{k: row[k] for k in row.keys() & facts}) for name, row in table.items()}


def find_link(name: str) -> Link:
    """Return a kind of link by name; an unknown name raises `InputError` with near matches.

    >>> find_link("nvlink-4").latency_seconds
    8.4e-07
    """
    links = all_links()
    if name not in links:
        fail("fast_link", name, "is not a known kind of link", f"use {nearest(name, links)}")
    return links[name]
