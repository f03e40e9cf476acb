"""Matrix products: one row of constants a family and data type, a factor for each device and each engine's library."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import numpy as np

from calibration.minimise import fit, loss
from calibration.tables import ENGINES, FAMILIES, Table, errors, held, pick, share, size, summary, where
from shardwise.cost import Efficiencies
from shardwise.cost._operators import product_seconds
from shardwise.cost._rates import product_rates
from shardwise.hardware import find_device

# Table name: (data type of the constants, of the device's peak, bytes of an element of both operands).
TYPES = {
    "bf16": ("bf16", "bf16", 2.0),
    "fp8": ("fp8", "fp8", 1.0),
    "nvfp4": ("fp4", "fp4", 0.5625),
    "int8_sq": ("int8", "int8", 1.0),
}
START = {
    "compute": 0.75, "memory": 0.8, "start_seconds": 2.5e-6, "sharpness": 2.5, "depth": 40.0, "balance": 50.0,
    "split_seconds": 4e-6, "warm_share": 0.1, "warm_seconds": 1e-4,
}  # fmt: skip
LIMITS = {"compute": 1.0, "memory": 0.98, "sharpness": 8.0, "depth": 3000.0, "warm_share": 0.6, "warm_seconds": 3e-3}
# Tables of narrow types hold the quantisation of the input, a kernel of its own: its start and share of the bandwidth.
QUANTISE = {"start_seconds": 3e-6, "efficiency": 0.4}
_ANY = Efficiencies()


def parts(table: Table, family: str, dtype: str) -> dict[tuple[str, str], Table]:
    """Return the rows of a family and data type by (device, engine)."""
    found = {(d, e): pick(table, device=d, engine=e, dtype=dtype) for d in FAMILIES[family] for e in ENGINES}
    return {key: rows for key, rows in found.items() if size(rows) > 30}


def predicted(rows: Table, key: tuple[str, str], row: dict[str, Any], dtype: str) -> Any:
    """Return seconds of the products of some rows on one device with one engine's library."""
    (device, engine), (_, peak, width) = key, TYPES[dtype]
    m, n, k = rows["m"], rows["n"], rows["k"]
    found = find_device(device).device
    rates = product_rates(found, peak, {"source": "", **row, "sustained": 1.0}, _ANY, ENGINES[engine])
    seconds = product_seconds(rates, (m, n, k, 1.0), width * (n * k + m * k) + 2 * m * n)
    if "quantise" in row:
        q = row["quantise"][ENGINES[engine]]
        seconds = seconds + q["start_seconds"] + 3 * m * k / (q["efficiency"] * found.memory_bytes_per_second)
    return seconds


def _total(groups: dict[tuple[str, str], Table], row: dict[str, Any], dtype: str) -> float:
    return float(np.mean([loss(predicted(r, key, row, dtype), r["time_seconds"]) for key, r in groups.items()]))


Groups: TypeAlias = dict[tuple[str, str], Table]


def _main(groups: Groups, dtype: str, row: dict[str, Any], p: dict[str, float]) -> float:
    return _total(groups, {**row, **p}, dtype)


def _entry(groups: Groups, dtype: str, row: dict[str, Any], place: tuple[str, str], p: dict[str, float]) -> float:
    table, name = place
    value = p if table == "quantise" else p["x"]
    return _total(groups, {**row, table: {**row[table], name: value}}, dtype)


def _factors(groups: Groups, dtype: str, row: dict[str, Any], table: str) -> None:
    """Fit what each device or each engine reaches of the others, in place; their geometric mean goes to the row."""
    i = {"by_device": 0, "by_engine": 1}[table]
    names = sorted({key[i] for key in groups})
    for name in names if len(names) > 1 else ():
        own = {key: r for key, r in groups.items() if key[i] == name}
        word = ENGINES.get(name, name)
        cost = partial(_entry, own, dtype, dict(row), (table, word))
        row[table][word] = fit(cost, {"x": share(row[table], word)}, {"x": 1.5}, 40)["x"]
    mean = float(np.exp(np.mean(np.log(list(row[table].values()))))) if row[table] else 1.0
    row[table] = {name: value / mean for name, value in row[table].items()}
    row["compute"] = min(row["compute"] * mean, 1.0)


def fit_row(groups: Groups, dtype: str) -> dict[str, Any]:
    """Return the constants of a family and data type: those of all, then the factors, in turns."""
    row: dict[str, Any] = {**START, "by_device": {}, "by_engine": {}}
    engines = sorted({key[1] for key in groups}) if dtype != "bf16" else []
    if engines:
        row["quantise"] = {ENGINES[e]: dict(QUANTISE) for e in engines}
    for turn in range(3):
        main = {k: row[k] for k in START}
        row |= fit(partial(_main, groups, dtype, dict(row)), main, LIMITS, 350 if turn else 500)
        for e in engines:
            own = {key: r for key, r in groups.items() if key[1] == e}
            cost = partial(_entry, own, dtype, dict(row), ("quantise", ENGINES[e]))
            row["quantise"][ENGINES[e]] = fit(cost, row["quantise"][ENGINES[e]], {"efficiency": 1.0}, 120)
        for table in ("by_device", "by_engine"):
            _factors(groups, dtype, row, table)
    return row


def calibrate(table: Table) -> dict[str, Any]:
    """Return matmul rows by family, each with the residual on shapes that were not fitted and on all."""
    found: dict[str, Any] = {}
    for family in FAMILIES:
        for dtype, (name, _, _) in TYPES.items():
            groups = parts(table, family, dtype)
            if not groups:
                continue
            masks = {key: held(rows, "n", "k") for key, rows in groups.items()}
            half = fit_row({key: where(rows, ~masks[key]) for key, rows in groups.items()}, dtype)
            unseen = [
                errors(predicted(w, key, half, dtype), w)
                for key, rows in groups.items()
                if size(w := where(rows, masks[key]))
            ]
            row = fit_row(groups, dtype)
            every = np.concatenate([errors(predicted(r, key, row, dtype), r) for key, r in groups.items()])
            found.setdefault(family, {})[name] = row | {
                "residual": f"{summary(every)}; shapes not fitted: {summary(np.concatenate(unseen))}",
                "source": f"fit on {dtype} products of {', '.join(FAMILIES[family])} in "
                f"{', '.join(sorted({k[1] for k in groups}))} (aiconfigurator 0.12.0, Apache-2.0)",
            }
    return found


def residuals(table: Table, constants: dict[str, Any]) -> list[tuple[str, str, str, Any]]:
    """Return (device, kind, engine, errors) of stored constants on a table, which may be another one."""
    found = []
    for family in FAMILIES:
        for dtype, (name, _, _) in TYPES.items():
            row = constants.get(family, {}).get("matmul", {}).get(name)
            for key, rows in (parts(table, family, dtype) if row else {}).items():
                found.append((key[0], f"product {dtype}", key[1], errors(predicted(rows, key, row, dtype), rows)))
    return found
