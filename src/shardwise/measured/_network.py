"""The cluster of a row: its devices, nodes and the words that sources use for networks between them."""

from __future__ import annotations

import re

from shardwise.errors import InputError
from shardwise.hardware import Cluster, Device, Lookup, build_cluster
from shardwise.measured._record import Record
from shardwise.measured._rules import network_words

_GBPS = 1e9 / 8


def network_bytes_per_second(word: str, devices_per_node: int) -> float:
    """Return bytes a second and device of a named network between nodes, 0 where the name states no rate.

    "ib_hdr_8x200gbps" is eight adapters a node, "roce_1600gbps_per_node" all of a node's, "ib_edr_100gbps" one a node.

    >>> network_bytes_per_second("ib_hdr_8x200gbps", 8), network_bytes_per_second("rdma_400gbps_per_gpu", 8)
    (25000000000.0, 50000000000.0)
    """
    if word in network_words():
        return network_words()[word] / devices_per_node
    found = re.search(r"(?:(\d+)x)?(\d+)gbps(_per_gpu)?", word)
    if not found:
        return 0.0
    rate = int(found[1] or 1) * int(found[2]) * _GBPS
    return rate if found[3] else rate / devices_per_node


def used_domain(size: int, node: int, count: int) -> int:
    """Return the devices of a fast domain that a job takes: whole nodes, and as many in each domain.

    Schedulers place jobs in equal segments, so that 256 devices take 64 of each rack of 72 (Slurm, --segment).

    >>> used_domain(72, 4, 256), used_domain(72, 4, 64), used_domain(72, 4, 144)
    (64, 72, 72)
    """
    if count <= size:
        return size - size % node
    even = [d for d in range(node, size + 1, node) if count % d == 0]
    return max(even, default=node)


def cluster_of(record: Record, device: Device, notes: tuple[str, ...]) -> Cluster:
    """Return the cluster that a training row describes."""
    count = record.whole("num_gpus")
    word = record.text("inter_node").lower()
    given: dict[str, float] = {"num_devices": max(count, 1)}
    node = record.whole("gpus_per_node")
    if node:
        given["devices_per_node"] = node
    domain = re.fullmatch(r"nvlink_domain_(\d+)", word)
    if domain and node:
        given["fast_domain"] = used_domain(int(domain[1]), node, count)
    elif word:
        rate = network_bytes_per_second(
            word, node or (device.devices_per_node if device.knows("devices_per_node") else 8)
        )
        if rate:
            given["slow_bandwidth"] = rate
    elif count > (node or 8):
        record.taken("inter_node")
    name = f"{count}x{device.name}"
    found = Lookup(device=device, assumptions=notes)
    try:
        return build_cluster(name, found, given)
    except InputError:
        if "fast_domain" not in given:
            raise
        del given["fast_domain"]
        return build_cluster(name, found, given)
