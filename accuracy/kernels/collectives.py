"""Rows of collectives: inside one node and across nodes, by NCCL or an engine's own kernel."""

from __future__ import annotations

import re
from dataclasses import replace

from accuracy.kernels.tables import ENGINES, engine_word, tables
from shardwise.cost import (
    Efficiencies,
    ReduceFit,
    Verb,
    collective_seconds,
    constants,
    family_of,
    network_of,
    reduce_of,
    reduce_seconds,
)
from shardwise.hardware import Cluster, Device, Lookup, build_cluster
from shardwise.measured import Context, Prediction, Record, refuse

VERBS: dict[str, Verb] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "send_recv": "send",
    "send": "send",
}
_NONE = Efficiencies()


def _verb(name: str) -> Verb:
    if name not in VERBS:
        raise refuse("op", name, "is not a collective that is modelled")
    return VERBS[name]


def in_node(record: Record, context: Context) -> Prediction:
    """Return seconds of a collective of a table by device: NCCL's, or an engine's all-reduce."""
    device, notes = context.device(record.text("device"))
    verb, n, size = _verb(record.text("op")), record.whole("num_gpus"), record.positive("message_bytes")
    node = record.whole("gpus_per_node") or n
    if n < 2:
        raise refuse("num_gpus", n, "is no group")
    cluster = _cluster(Lookup(device=device, assumptions=notes), record.text("variant"), n, node)
    seconds = _seconds(cluster, verb, size, n)
    row = _own(device, record) if verb == "all_reduce" and n <= node else None
    own = reduce_of(device, ENGINES[engine_word(record.text("engine"))]) if row else None
    if row and own:
        seconds = float(reduce_seconds(own, device.fast_bytes_per_second, size, n))
        if record.text("variant").endswith("_eager"):
            seconds = max(
                host_seconds(row, device), seconds + 2 * size / (row.copy_efficiency * device.memory_bytes_per_second)
            )
    return Prediction(value=seconds, assumed=(*notes, *cluster.assumptions), family=record.text("dtype") or "-")


def _cluster(found: Lookup, variant: str, n: int, node: int) -> Cluster:
    """Return n devices in nodes of the type that a table states: a DGX has switches, pairwise nodes have bridges.

    A bridge joins two devices; the pairs meet over the host.
    """
    given: dict[str, float] = {"num_devices": n, "devices_per_node": node}
    if "pairwise" in variant and n > 1:
        given["fast_domain"] = 2
        if found.device.fast_link == "pcie":
            given["fast_bandwidth"] = tables()["bridge"]["bytes_per_second"]
    cluster = build_cluster(found.device.name, found, given)
    if "dgx" not in variant:
        return cluster
    return cluster.with_tiers(replace(tier, mesh=0) for tier in cluster.tiers)


def _own(device: Device, record: Record) -> ReduceFit | None:
    """Return the constants of an engine's own all-reduce, None for NCCL's."""
    engine = ENGINES.get(engine_word(record.text("engine")))
    return constants().families[family_of(device)].all_reduce.get(engine or "")


def host_seconds(row: ReduceFit, device: Device) -> float:
    """Return seconds of the host of an eager all-reduce: Grace, whose cores are slower, or another."""
    grace = bool(re.fullmatch(tables()["grace"]["devices"], device.name))
    return row.grace_host_seconds if grace and row.grace_host_seconds else row.host_seconds


def _seconds(cluster: Cluster, verb: Verb, size: float, n: int) -> float:
    group = tuple(float(min(tier.size, n)) for tier in cluster.tiers)
    return float(collective_seconds(network_of(cluster, _NONE), verb, size, group))


def across(record: Record, context: Context) -> Prediction:
    """Return seconds of a collective of a table by system: so many nodes, and so many devices used of each."""
    system = record.text("system")
    known = tables()["systems"].get(system)
    if known is None:
        raise refuse("system", system, "names a machine whose nodes are not known")
    device, notes = context.device(known["device"])
    node = known["devices_per_node"]
    nodes, used = record.whole("num_nodes", 1), record.whole("gpus_per_node", 1)
    if not 1 <= used <= node or nodes * used < 2:
        raise refuse("gpus_per_node", used, f"must be 1 to {node}, and a group of at least 2")
    given = {
        "num_devices": nodes * node,
        "devices_per_node": node,
        "nic_bandwidth": known["adapter_bytes_per_second"],
        "nics_per_node": known["adapters"],
    }
    cluster = build_cluster(system, Lookup(device=device, assumptions=notes), given)
    tiers = (t if t.name != "network" else replace(t, name=known["network"]) for t in cluster.tiers)
    cluster = cluster.with_tiers(tiers)
    group = (float(used), float(nodes * used))[: len(cluster.tiers)]
    verb, size = _verb(record.text("collective")), record.positive("message_bytes")
    value = float(collective_seconds(network_of(cluster, _NONE), verb, size, group))
    return Prediction(value=value, assumed=notes, family="across nodes" if nodes > 1 else "in a node")
