"""Collectives: inside a node start, step, rate, size at half rate, own copy and crowding for each verb and family.

Across nodes the steps and rates of NCCL's two protocols, on the one network that is published.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from accuracy.calibration.minimise import fit, loss
from accuracy.calibration.tables import FAMILIES, Table, errors, held, pick, read_files, size, summary, where
from shardwise.cost import (
    CollectiveFit,
    Efficiencies,
    Network,
    NetworkLink,
    Verb,
    changes,
    collective_rates_of,
    collective_seconds,
    constants,
    record,
)
from shardwise.hardware import Cluster

VERBS: dict[str, Verb] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
START = {"efficiency": 0.75, "half_bytes": 5e6, "start_seconds": 5e-6, "step_seconds": 1e-6, "own_share": 0.3}
LIMITS = {"efficiency": 1.0, "own_share": 0.95, "half_bytes": 5e7}
_ANY = Efficiencies()


def network(device: str, verb: Verb, row: dict[str, Any]) -> Network[Any]:
    """Return eight devices of one node whose only constants are those of one verb."""
    cluster = Cluster.parse(f"8x{device}")
    tier = cluster.tiers[0]
    wire = collective_rates_of(tier, record(CollectiveFit, row, "fit"), _ANY, True, 0.0)
    link = NetworkLink(name=tier.name, collectives={"all_gather": wire, verb: wire}, in_network=tier.in_network)
    return Network(links=(link,))


def predicted(rows: Table, device: str, verb: Verb, row: dict[str, Any]) -> Any:
    """Return seconds of the collectives of some rows on one device."""
    net = network(device, verb, row)
    found = np.zeros(size(rows))
    for n in np.unique(rows["num_gpus"]):
        mask = rows["num_gpus"] == n
        found[mask] = collective_seconds(net, verb, rows["message_bytes"][mask], (float(n),))
    return found


def parts(table: Table, family: str, name: str) -> dict[str, Table]:
    """Return the rows of NCCL for a family and an operation by device, within one node."""
    found = {d: pick(table, device=d, engine="nccl", op=name) for d in FAMILIES[family]}
    inside = {d: where(rows, rows["num_gpus"] <= rows["gpus_per_node"]) for d, rows in found.items() if size(rows)}
    return {d: rows for d, rows in inside.items() if size(rows)}


def _total(groups: dict[str, Table], verb: Verb, row: dict[str, Any]) -> float:
    return float(np.mean([loss(predicted(r, d, verb, row), r["time_seconds"]) for d, r in groups.items()]))


def fit_row(groups: dict[str, Table], verb: Verb, bridge: bool) -> dict[str, Any]:
    """Return the constants of a verb; devices on a host bridge also crowd each other."""
    start = START | ({"crowding": 0.5, "half_bytes": 1e5} if bridge else {})
    return fit(lambda p: _total(groups, verb, p), start, LIMITS, 400)


def calibrate(table: Table) -> dict[str, Any]:
    """Return the rows of links by family and verb, each with its residual."""
    found: dict[str, Any] = {}
    for family, devices in FAMILIES.items():
        bridge = Cluster.parse(f"8x{devices[0]}").tiers[0].name == "pcie"
        for name, verb in VERBS.items():
            groups = parts(table, family, name)
            if not groups:
                continue
            masks = {d: held(rows, "message_bytes") for d, rows in groups.items()}
            half = fit_row({d: where(rows, ~masks[d]) for d, rows in groups.items()}, verb, bridge)
            unseen = [
                errors(predicted(w, d, verb, half), w) for d, r in groups.items() if size(w := where(r, masks[d]))
            ]
            row = fit_row(groups, verb, bridge)
            every = np.concatenate([errors(predicted(r, d, verb, row), r) for d, r in groups.items()])
            found.setdefault(family, {})[verb] = row | {
                "residual": f"{summary(every)}; sizes not fitted: {summary(np.concatenate(unseen))}",
                "source": f"fit on NCCL {name} of {', '.join(groups)}, 2 to 8 ranks, 512 B to 512 MiB "
                "(aiconfigurator 0.12.0, Apache-2.0)",
            }
    return found


def residuals(table: Table, constants: dict[str, Any]) -> list[tuple[str, str, str, Any]]:
    """Return (device, kind, engine, errors) of stored constants on a table, which may be another one."""
    found = []
    for family in FAMILIES:
        for name, verb in VERBS.items():
            row = constants.get(family, {}).get("fast", {}).get(verb)
            for device, rows in (parts(table, family, name) if row else {}).items():
                found.append((device, f"collective {verb}", "nccl", errors(predicted(rows, device, verb, row), rows)))
    return found


# System of a table across nodes: device, devices and adapters a node, rate of one adapter.
SYSTEMS = {"perlmutter_a100_slingshot": ("a100-sxm-40gb", 4, 4, "200Gb/s")}
ACROSS = {
    "measured_efficiency": 0.7, "low_efficiency": 0.2, "start_seconds": 3e-5, "step_seconds": 4e-6,
    "long_step_seconds": 3e-5, "lone_share": 0.85, "inner_low_share": 0.3,
}  # fmt: skip
# NCCL has trees for all-reduce alone (src/graph/tuning.cc).
_LEVEL = {
    "tree_step_seconds": 1.2e-5, "tree_chunk_bytes": 3.5e5, "tree_chunk_efficiency": 0.4, "tree_long_ratio": 1.2,
}  # fmt: skip
TREE: dict[str, dict[str, float]] = {"all_reduce": _LEVEL}
CROSSING: tuple[Verb, ...] = ("all_reduce", "all_gather", "reduce_scatter")


def read_across(folder: Path) -> Table:
    """Return the rows of every file collectives_*.csv of a folder that lie on more than one node."""
    found = read_files(sorted(folder.glob("collectives_*.csv")))
    return where(found, found["num_nodes"] > 1) if found else {}


def across(rows: Table, verb: Verb, row: dict[str, Any], fast: dict[str, Any]) -> Any:
    """Return seconds of the collectives of some rows across nodes; `fast` are the constants inside a node."""
    found, cases = np.zeros(size(rows)), zip(rows["system"], rows["num_nodes"], rows["gpus_per_node"], strict=True)
    for system, nodes, used in set(cases):
        device, node, adapters, rate = SYSTEMS[system]
        text = f"{int(nodes)}x{node}x{device}"
        tiers = Cluster.parse(text, {"nic_bandwidth": rate, "nics_per_node": adapters}).tiers
        inner = collective_rates_of(tiers[0], record(CollectiveFit, fast, "fit"), _ANY, True, 0.0)
        own = changes(CollectiveFit, {**row, "efficiency": row["measured_efficiency"]}, "fit")
        outer = collective_rates_of(tiers[1], replace(constants().network[verb], **own), _ANY, False, 0.0)
        links = tuple(
            NetworkLink(name=t.name, collectives={"all_gather": w}, in_network=False)
            for t, w in zip(tiers, (inner, outer), strict=True)
        )
        mask = (rows["system"] == system) & (rows["num_nodes"] == nodes) & (rows["gpus_per_node"] == used)
        group = (float(used), float(nodes * used))
        found[mask] = collective_seconds(Network(links=links), verb, rows["message_bytes"][mask], group)
    return found


def calibrate_across(table: Table, fast: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of the network by verb, each with its residual; `fast` are the links of the nodes by verb."""
    found: dict[str, Any] = {}
    for verb in CROSSING:
        rows = pick(table, collective=verb)
        mask = held(rows, "message_bytes", "num_nodes")

        def search(part: Table, verb: Verb = verb) -> dict[str, Any]:
            def cost(p: dict[str, float]) -> float:
                return loss(across(part, verb, p, fast[verb]), part["time_seconds"])

            shares = dict.fromkeys(("measured_efficiency", "low_efficiency", "lone_share", "inner_low_share"), 1.0)
            return fit(cost, ACROSS | TREE.get(verb, {}), shares, 800 if verb in TREE else 400)

        half, row = search(where(rows, ~mask)), search(rows)
        unseen = errors(across(where(rows, mask), verb, half, fast[verb]), where(rows, mask))
        found[verb] = row | {
            "measured_on": "slingshot-11",
            "residual": f"{summary(errors(across(rows, verb, row, fast[verb]), rows))}; not fitted: {summary(unseen)}",
            "source": "fit on nccl-tests across 2 to 64 nodes of A100 and Slingshot 11 "
            "(github.com/ShashankSubramanian/transformer-perf-estimates, BSD-3-LBNL)",
        }
    return found


def residuals_across(table: Table, constants: dict[str, Any]) -> list[tuple[str, str, str, Any]]:
    """Return (system, kind, engine, errors) of stored constants on a table across nodes."""
    found = []
    for verb in CROSSING:
        rows = pick(table, collective=verb)
        for system in sorted(set(rows["system"])):
            own = pick(rows, system=system)
            row, fast = constants["network"]["verbs"][verb], constants["ampere"]["fast"][verb]
            found.append((system, f"network {verb}", "nccl", errors(across(own, verb, row, fast), own)))
    return found
