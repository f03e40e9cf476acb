"""A cluster from a device and what was given: node and domain sizes, the tiers, and a list of what was assumed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from shardwise.errors import InputError, Problems
from shardwise.hardware._catalogue import Lookup
from shardwise.hardware._clouds import cheapest
from shardwise.hardware._device import HOST_LINK, LOCAL, NETWORK, Device, Fact, Link, Tier, find_link
from shardwise.hardware._quantity import DTYPES, fail
from shardwise.records import dataclass
from shardwise.units import show_count, show_field, show_seconds

Made = TypeVar("Made")

_GIVEN = ("given by the user", "undated")


@dataclass(frozen=True, slots=True)
class _ChipSizes:
    """How many devices in all, in a node, and in a fast domain."""

    total: int
    node: int
    domain: int


class _Draft:
    """The device with what was given, and the assumptions made so far."""

    def __init__(self, lookup: Lookup, given: Mapping[str, float]) -> None:
        self.device = _changed(lookup.device, given)
        self.given = given
        self.assumptions = list(lookup.assumptions)

    def assume(self, text: str) -> None:
        """Record an assumption."""
        self.assumptions.append(text)

    def assume_fact(self, field: str) -> None:
        """Record that a field of the device is an assumption, where it is one."""
        fact = self.device.fact(field)
        if fact.assumed:
            self.assume(f"{field} = {show_field(field, fact.value)} of {self.device.name}: {fact.source}")

    def rate(self, option: str, field: str) -> float:
        """Return a rate that was given, or the device's own."""
        if option in self.given:
            return self.given[option]
        if not self.device.knows(field):
            fail(option, None, f"is not known for {self.device.name}", f"give {option}")
        self.assume_fact(field)
        return self.device.fact(field).value

    def latency(self, option: str, link: Link) -> float:
        """Return a latency that was given, or that of the link."""
        if option in self.given:
            return self.given[option]
        if link.assumed:
            self.assume(f"{option} = {show_seconds(link.latency_seconds)} over {link.name}: {link.source}")
        return link.latency_seconds


def built(
    make: Callable[..., Made], name: str, lookup: Lookup, given: Mapping[str, float], tiers: tuple[Tier, ...] = ()
) -> Made:
    """Return the cluster of a device and options in SI units; tiers left out are the usual ones."""
    draft = _Draft(lookup, given)
    draft.assume_fact("usable_memory_bytes")
    sizes = _sizes(draft)
    made = tiers or _tiers(draft, sizes)
    price = _price(draft)
    return make(
        device=draft.device,
        num_devices=sizes.total,
        tiers=made,
        devices_per_node=min(sizes.node, sizes.total),
        usd_per_device_hour=price,
        name=name,
        assumptions=tuple(dict.fromkeys(draft.assumptions)),
        host_memory_bytes=given.get("host_memory", 0.0),
    )


def _changed(device: Device, given: Mapping[str, float]) -> Device:
    """Return the device with the options that change it; memory that is given is usable to the last byte."""
    fields = {
        "memory_bytes": "memory",
        "usable_memory_bytes": "memory",
        "memory_bytes_per_second": "memory_bandwidth",
        "matrix_flops.bf16": "peak_flops",
    }
    values = {field: given[option] for field, option in fields.items() if option in given}
    stated = [dtype for dtype in DTYPES if f"peak_flops.{dtype}" in given]
    values |= {f"matrix_flops.{dtype}": given[f"peak_flops.{dtype}"] for dtype in stated}
    return device.with_values(values, *_GIVEN) if values else device


def _sizes(draft: _Draft) -> _ChipSizes:
    given, device = draft.given, draft.device
    total = int(given["num_devices"])
    if "devices_per_node" in given:
        node = int(given["devices_per_node"])
    elif total == 1 and not device.knows("devices_per_node"):
        node = 1
    else:
        node = device.devices_per_node
        if total > node:
            draft.assume_fact("devices_per_node")
    domain = int(given["fast_domain"]) if "fast_domain" in given else _usual_domain(draft, node)
    if not _nest(domain, node):
        option, value = ("fast_domain", domain) if "fast_domain" in given else ("devices_per_node", node)
        other, size = ("devices_per_node", node) if option == "fast_domain" else ("fast_domain", domain)
        choices = ", ".join(str(one) for one in range(1, size + 1) if size % one == 0)
        fail(option, value, f"must divide {other} = {size} or be a multiple of it", f"use {choices}")
    return _ChipSizes(total, node, domain)


def _nest(a: int, b: int) -> bool:
    return math.gcd(a, b) in (a, b)


def _usual_domain(draft: _Draft, node: int) -> int:
    """Return the fast domain of a device in nodes of this size, where the user gives none."""
    device = draft.device
    if not device.knows("fast_domain"):
        return node
    usual, domain = device.devices_per_node if device.knows("devices_per_node") else node, device.fast_domain
    if domain > usual:
        return _segment(draft, domain, node)
    if domain < usual:
        return math.gcd(domain, node)
    if node > domain:
        draft.assume(f"the {node} devices of a node form one fast domain; {domain} is usual for {device.name}")
    return node


def _segment(draft: _Draft, domain: int, node: int) -> int:
    """Return the devices that a job takes of each rack-wide domain: all, or the most whole nodes that divide its count.

    Schedulers place jobs in equal segments (Slurm topology/block, --segment), so 256 devices take 64 of racks of 72.
    """
    total = int(draft.given["num_devices"])
    if total <= domain or total % domain == 0 or not draft.device.fast_link.startswith("nvlink"):
        return domain
    even = max((d for d in range(node, domain, node) if total % d == 0), default=domain)
    if 2 * even <= domain:
        return domain
    draft.assume(f"fast_domain = {even}: the job takes equal segments of {even} from domains of {domain}")
    return even


def _tiers(draft: _Draft, sizes: _ChipSizes) -> tuple[Tier, ...]:
    """Return the usual tiers: the fast domain, the node's host link where domains are smaller, the network."""
    if sizes.total == 1:
        return (_local_tier(draft),)
    steps = []
    if sizes.domain > 1:
        steps.append((min(sizes.domain, sizes.total), _fast_tier))
    if sizes.domain < min(sizes.node, sizes.total):
        steps.append((min(sizes.node, sizes.total), _host_tier))
    if sizes.total > max(sizes.node, sizes.domain):
        steps.append((sizes.total, _network_tier))
    problems, tiers = Problems(), []
    for size, make in steps:
        with problems.collect():
            tiers.append(make(draft, size, sizes))
    if problems.items:
        raise InputError(problems.items)
    return tuple(tiers)


def _local_tier(draft: _Draft) -> Tier:
    """Return the tier of a single device, which reaches itself through its memory."""
    fields = ("memory_bytes_per_second", "fast_bytes_per_second", "host_bytes_per_second")
    field = next((field for field in fields if draft.device.knows(field)), fields[0])
    rate = draft.rate("memory_bandwidth", field)
    latency = find_link(LOCAL).latency_seconds
    return Tier(name=LOCAL, size=1, bytes_per_second=rate, latency_seconds=latency, in_network=False)


def _fast_tier(draft: _Draft, size: int, sizes: _ChipSizes) -> Tier:
    link = find_link(draft.device.fast_link)
    return Tier(
        name=link.name,
        size=size,
        bytes_per_second=draft.rate("fast_bandwidth", "fast_bytes_per_second"),
        latency_seconds=draft.latency("fast_latency", link),
        in_network=draft.device.fast_in_network,
        mesh=_mesh(draft, sizes),
    )


def _mesh(draft: _Draft, sizes: _ChipSizes) -> int:
    """Return how many devices of a fast domain are joined pairwise, 0 where a switch joins them.

    Boards of four A100 or H100 have no NVSwitch: each pair shares a third of the links (NVIDIA HGX A100 and HGX H100
    datasheets, 4-GPU), of V100 two links (Dell C4140, github.com/NVIDIA/nccl-tests issue 68); so do the GH200 of nodes
    of four (JUPITER, apps.fz-juelich.de/jsc/hps/jupiter/configuration.html), which are alone elsewhere. AMD
    Instinct boards of four and eight are meshes of xGMI links (CDNA 3 white paper, 2023), those of eight P100 and V100
    hybrid cube meshes. Of Gaudi's 24 ports 21 join the eight of a node pairwise (Habana Gaudi2 white paper, 2022).
    """
    device, domain = draft.device, sizes.domain
    if device.name in find_link(device.fast_link).packages:
        return 0
    if device.fast_link in ("xgmi", "roce") or (domain == 8 and find_link(device.fast_link).board_links):
        return domain
    pairs = device.fast_link in ("nvlink-2", "nvlink-3", "nvlink-4")
    boards = pairs and device.knows("fast_domain") and device.fast_domain in (1, 8)
    if boards and sizes.node == domain == 4:
        draft.assume(f"the 4 {device.name} of a node are joined pairwise, without a switch, as on boards of four")
        return 4
    return 0


def _host_tier(draft: _Draft, size: int, sizes: _ChipSizes) -> Tier:
    """Return the tier between the fast domains of one node: through the host."""
    if not draft.device.knows("host_bytes_per_second"):
        rule = f"leaves the domains of one node joined by the host link of {draft.device.name}, which is not known"
        fail("fast_domain", sizes.domain, rule, f"use {sizes.node}")
    link = find_link(HOST_LINK)
    return Tier(
        name="host" if draft.device.fast_link == HOST_LINK else link.name,
        size=size,
        bytes_per_second=draft.device.host_bytes_per_second,
        latency_seconds=link.latency_seconds,
        in_network=False,
    )


def _network_tier(draft: _Draft, size: int, sizes: _ChipSizes) -> Tier:
    return Tier(
        name=NETWORK,
        size=size,
        bytes_per_second=_network_rate(draft, sizes.node) / draft.given.get("oversubscription", 1.0),
        latency_seconds=draft.latency("slow_latency", find_link(NETWORK)),
        in_network=False,
    )


def _network_rate(draft: _Draft, node: int) -> float:
    """Return bytes per second of one device into a full network: the NICs of the node, shared by its devices."""
    given = draft.given
    if not {"nics_per_node", "nic_bandwidth", "rails"} & given.keys():
        return draft.rate("slow_bandwidth", "slow_bytes_per_second")
    nics = given.get("nics_per_node", given.get("rails"))
    if nics is None:
        nics = node
        draft.assume(f"nics_per_node = {node}: one NIC for each device")
    if "nic_bandwidth" in given:
        return nics * given["nic_bandwidth"] / node
    rate = draft.rate("nic_bandwidth", "slow_bytes_per_second")
    draft.assume(f"nic_bandwidth = {show_count(rate, 'B/s')}: the usual rate for each {draft.device.name}")
    return nics * rate / node


def _price(draft: _Draft) -> float | None:
    if "price" in draft.given:
        return draft.given["price"]
    if draft.device.usd_per_device_hour is None:
        offer = cheapest(draft.device.name, "on-demand")
        if offer is None:
            return None
        draft.assume(offer.price_note("on-demand"))
        return offer.device_usd("on-demand")
    fact: Fact = draft.device.fact("usd_per_device_hour")
    draft.assume(f"price = {fact.value:g} USD per device and hour: {fact.source}, {fact.date}")
    return draft.device.usd_per_device_hour
