"""All-reduces of engines inside a node: one kernel that reads every peer, a ring, and what an eager launch adds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from accuracy.calibration.minimise import fit, loss
from accuracy.calibration.tables import FAMILIES, Table, errors, held, pick, read, size, summary, where
from accuracy.kernels.collectives import host_seconds
from accuracy.kernels.tables import ENGINES
from shardwise.cost import EngineReduce, ReduceFit, record, reduce_seconds
from shardwise.hardware import Device, find_device

WORD, TABLE = "all_reduce", "collective"
START = {"start_seconds": 4e-6, "step_seconds": 1e-7, "direct": 0.6, "ring_start_seconds": 8e-6,
         "ring_step_seconds": 5e-7, "efficiency": 0.75, "half_bytes": 1e6}  # fmt: skip
LIMITS = {"direct": 1.5, "efficiency": 1.0, "half_bytes": 5e7, "crowding": 2.5}
# Messages so small that an eager call takes the time of its host.
_SMALL = 131072


def _eager(rows: Table) -> Any:
    return np.char.endswith(rows["variant"].astype(str), "_eager")


def predicted(rows: Table, device: Device, row: dict[str, Any]) -> Any:
    """Return seconds of all-reduces replayed in a graph."""
    reduce = EngineReduce(fit=record(ReduceFit, row, "fit"), in_network=device.fast_in_network, source="")
    return reduce_seconds(reduce, device.fast_bytes_per_second, rows["message_bytes"], rows["num_gpus"])


def launched(rows: Table, device: Device, row: dict[str, Any]) -> Any:
    """Return seconds of all-reduces called one by one: at least the host's time, and a copy of the input."""
    seconds = predicted(rows, device, row) + 2 * rows["message_bytes"] / (
        row["copy_efficiency"] * device.memory_bytes_per_second
    )
    return np.maximum(seconds, host_seconds(record(ReduceFit, row, "fit"), device))


def _parts(folder: Path, family: str, engine: str) -> dict[str, Table]:
    rows = pick(read(folder, TABLE), engine=engine, op="all_reduce")
    found = {d: pick(rows, device=d) for d in FAMILIES[family]}
    return {d: r for d, r in found.items() if size(r)}


def _cost(parts: dict[str, Table], row: dict[str, Any]) -> float:
    found = (loss(predicted(r, find_device(d).device, row), r["time_seconds"]) for d, r in parts.items())
    return float(np.mean(list(found)))


def _best(parts: dict[str, Table], starts: list[dict[str, float]]) -> dict[str, Any]:
    return min((fit(partial(_cost, parts), start, LIMITS, 400) for start in starts), key=partial(_cost, parts))


def _hosts(parts: dict[str, Table]) -> dict[str, float]:
    """Return the seconds of hosts and the share of the memory rate of the copies, where calls one by one are known."""
    eager = {d: where(r, _eager(r)) for d, r in parts.items()}
    found: dict[str, list[Any]] = {}
    for device, rows in eager.items():
        name = "grace_host_seconds" if device.startswith(("gb200", "gb300")) else "host_seconds"
        found.setdefault(name, []).append(rows["time_seconds"][rows["message_bytes"] <= _SMALL])
    return {name: float(np.median(np.concatenate(v))) for name, v in found.items() if sum(map(len, v))}


def _every(parts: dict[str, Table], row: dict[str, Any]) -> Any:
    """Return the errors of graphs and of single calls."""
    found = []
    for name, rows in parts.items():
        device, eager = find_device(name).device, _eager(rows)
        seconds = predicted(rows, device, row)
        if eager.any():
            seconds = np.where(eager, launched(rows, device, row), seconds)
        found.append(errors(seconds, rows))
    return np.concatenate(found)


def calibrate(folder: Path) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the place in the table of constants and the row of every engine's all-reduce in every family."""
    for family, devices in FAMILIES.items():
        link = find_device(devices[0]).device.fast_link.split("-")[0]
        # A host bridge has more than one minimum: how much devices crowd it differs by host.
        crowded = ({"crowding": p, "half_bytes": 1e4, "efficiency": 0.6} for p in (0.4, 1.6))
        starts = [START | more for more in (crowded if link == "pcie" else ({},))]
        for engine, name in ENGINES.items():
            parts = _parts(folder, family, engine)
            if not parts:
                continue
            graphs = {d: where(r, ~_eager(r)) for d, r in parts.items()}
            masks = {d: held(r, "message_bytes") for d, r in graphs.items()}
            half = _best({d: where(r, ~masks[d]) for d, r in graphs.items()}, starts)
            row = _best(graphs, starts)
            hosts = _hosts(parts)
            row |= hosts | ({"copy_efficiency": 0.9} if hosts else {})
            unseen = _every({d: where(r, masks[d]) for d, r in graphs.items()}, half)
            text = f"{summary(_every(parts, row))}; sizes not fitted: {summary(unseen)}"
            yield (
                (family, WORD, name),
                row
                | {
                    "link": link,
                    "residual": text,
                    "source": f"fit on {engine} all_reduce of {', '.join(parts)}, 2 to 8 ranks, 512 B to 1 GiB "
                    "(aiconfigurator 0.12.0, Apache-2.0)",
                },
            )


def residuals(folder: Path, constants: dict[str, Any]) -> list[tuple[str, str, str, Any]]:
    """Return (device, kind, engine, errors) of stored constants on the tables of a folder."""
    found = []
    for family in FAMILIES:
        for engine, name in ENGINES.items():
            row = constants.get(family, {}).get(WORD, {}).get(name)
            for device, rows in (_parts(folder, family, engine) if row else {}).items():
                found.append((device, "all-reduce of engines", engine, _every({device: rows}, row)))
    return found
