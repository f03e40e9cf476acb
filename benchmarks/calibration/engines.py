"""Kernels of engines: fused experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibration.minimise import Squares
from calibration.tables import ENGINES, Table, errors, groups, held, read, size, summary, where
from shardwise.cost._kernels import (
    ExpertsFit,
    experts_seconds,
    fit_from,
    others_seconds,
)
from shardwise.hardware import find_device
from shardwise.validation._kernels import EXPERTS, chip_of, expert_reads, ungated
from shardwise.validation._routing import timed_rows

Groups = dict[str, Table]


def _timed(rows: Table) -> Table:
    """Return what kernels ran: experts hit, rows, rows of other ranks, and the width of the first product."""
    T, inner, k, E, tp, ep = (
        rows[name] for name in ("num_tokens", "intermediate_size", "top_k", "num_experts", "moe_tp", "moe_ep")
    )
    ran, shapes = zip(rows["kernel"], rows["engine_version"], strict=True), zip(T, k, E, ep, strict=True)
    found = [timed_rows(*one, way, at) for one, way, at in zip(ran, rows["routing"], shapes, strict=True)]
    cases = zip(rows["kernel"], rows["engine_version"], inner, k, E, strict=True)
    halves = np.where([ungated(*case) for case in cases], 1, 2)
    return dict(zip(("hit", "own", "others"), np.array(found).T, strict=True)) | {"up": halves * inner / tp}


def experts(rows: Table, device: str, row: dict[str, Any], dtype: str) -> Any:
    """Return seconds of a fused layer of experts: two products, gated unless the kernel says otherwise."""
    if "hit" not in rows:
        rows.update(_timed(rows))
    hit, own, up, D = (rows[name] for name in ("hit", "own", "up", "hidden_size"))
    (peak, width), F = EXPERTS[dtype], rows["intermediate_size"] / rows["moe_tp"]
    if "reads" not in rows:
        weights, beside = width * hit * D * (up + F), 2 * own * (2 * D + up + F)
        pairs = zip(weights, beside, strict=True)
        rows["reads"] = np.array([expert_reads(find_device(device).device, *pair) for pair in pairs])
    chip, c = chip_of(find_device(device).device, peak), fit_from(ExpertsFit, row)
    products, width = ((up, D), (D + 0 * F, F)), width * rows["reads"]
    return others_seconds(c, chip, rows["others"], D + up) + sum(
        experts_seconds(c, chip, width * hit * n * k + 2 * own * (n + k), (own, hit, n, k)) for n, k in products
    )


# The middle of the fits over all kernels; constants that the rows of one do not tell stay there.
_EXPERTS = {"memory": 0.87, "compute": 0.5, "start_seconds": 2e-5, "sharpness": 2.0, "pad_rows": 24.0,
            "expert_seconds": 1.2e-7, "chain_share": 0.5, "row_traffic": 0.8, "others_traffic": 0.6}  # fmt: skip
_SHARES = {"memory": 1.0, "compute": 1.0, "sharpness": 8.0}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of kernel: its table, how rows are told apart, its form, and what is searched."""

    word: str
    table: str
    label: Callable[[Table], Any]
    predict: Callable[[Table, str, dict[str, Any], str], Any]
    start: dict[str, float]
    limits: dict[str, float]
    shape: tuple[str, ...]


def _kernels(rows: Table) -> Any:
    return np.array([f"{d}.{k}" for d, k in zip(rows["dtype"], rows["kernel"], strict=True)])


KINDS = (
    Kind(word="experts", table="moe", label=_kernels, predict=experts, start=_EXPERTS,
         limits=_SHARES | {"pad_rows": 200.0}, shape=("hidden_size", "intermediate_size", "top_k", "num_experts")),
)  # fmt: skip


def _dtype(kind: Kind, label: str) -> str:
    return label.split(".")[0]


def _every(kind: Kind, parts: Groups, dtype: str, row: dict[str, Any]) -> Any:
    return np.concatenate([errors(kind.predict(rows, d, row, dtype), rows) for d, rows in parts.items()])


def searched(kind: Kind, parts: Groups, dtype: str, start: dict[str, float]) -> dict[str, float]:
    """Return the constants of a kind of kernel that lie closest to some rows."""
    names = list(start)
    base, top = np.log(list(start.values())), np.array([np.log(kind.limits.get(name, 1e9)) for name in names])
    weights = np.concatenate([np.full(size(rows), 1 / size(rows)) for rows in parts.values()])

    def errors_of(z: Any) -> Any:
        row = dict(zip(names, np.exp(z).tolist(), strict=True))
        found = [np.log(kind.predict(r, d, row, dtype) / r["time_seconds"]) for d, r in parts.items()]
        return np.concatenate(found)

    z = Squares(errors_of, weights, 0.08, 3e-3).race(np.minimum(base, top), top, np.ones(len(names)))
    return dict(zip(names, np.exp(z).tolist(), strict=True))


def calibrate(folder: Path, only: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the place in the table of constants and the row of every kernel of every family and engine."""
    for kind in (k for k in KINDS if k.word in only):
        table = read(folder, kind.table)
        for family, engine, label, parts in groups(table, kind.label(table)) if table else ():
            if sum(map(size, parts.values())) < 60:
                continue
            dtype = _dtype(kind, label)
            masks = {d: held(rows, *kind.shape) for d, rows in parts.items()}
            fitted = {d: where(rows, ~masks[d]) for d, rows in parts.items() if (~masks[d]).any()}
            unseen = {d: where(rows, masks[d]) for d, rows in parts.items() if masks[d].any()}
            half = searched(kind, fitted, dtype, kind.start)
            row = searched(kind, parts, dtype, kind.start)
            left = summary(_every(kind, parts, dtype, row))
            apart = summary(_every(kind, unseen, dtype, half)) if unseen else "none held"
            yield (
                (family, kind.word, ENGINES[engine], *label.split(".")),
                row
                | {
                    "rows": sum(map(size, parts.values())),
                    "residual": f"{left}; shapes not fitted: {apart}",
                    "source": f"fit on {kind.table}, {', '.join(parts)}, {engine} (aiconfigurator 0.12.0, Apache-2.0)",
                },
            )


def residuals(folder: Path, constants: dict[str, Any], only: tuple[str, ...]) -> list[tuple[str, str, str, Any]]:
    """Return (device, kind, engine, errors) of stored constants on the tables of a folder."""
    found = []
    for kind in (k for k in KINDS if k.word in only):
        table = read(folder, kind.table)
        for family, engine, label, parts in groups(table, kind.label(table)) if table else ():
            row: Any = constants.get(family, {})
            for key in (kind.word, ENGINES[engine], *label.split(".")):
                row = row.get(key, {})
            for device, rows in parts.items() if row else ():
                dtype = _dtype(kind, label)
                name = f"{kind.word} {label.split('.')[0]}"
                found.append((device, name, engine, errors(kind.predict(rows, device, row, dtype), rows)))
    return found
