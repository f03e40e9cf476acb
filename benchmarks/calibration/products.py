"""Matrix products: one row of constants a family and data type, a factor for each device and each engine's library."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from calibration.minimise import Squares
from calibration.tables import ENGINES, FAMILIES, Table, errors, held, pick, size, summary, where
from shardwise.cost import Efficiencies
from shardwise.cost._operators import product_seconds
from shardwise.cost._rates import product_rates
from shardwise.cost._tables import family_of
from shardwise.hardware import find_device
from shardwise.validation._kernels import AT_HIGHEST_CLOCK, PRODUCTS, held_share, moved_bytes, quantise_seconds
from shardwise.validation._steps import engine_steps, maxima_seconds

# Types of the tables that are fitted.
TYPES = ("bf16", "fp8", "fp8_block", "nvfp4", "int8_sq", "int8_wo", "int4_wo")
WIDE_INPUT = ("bf16", "int8_wo", "int4_wo")
START = {
    "compute": 0.75, "memory": 0.8, "start_seconds": 2.5e-6, "sharpness": 2.5, "depth": 40.0, "balance": 50.0,
    "split_seconds": 4e-6, "join_share": 0.5, "warm_share": 0.1, "warm_seconds": 1e-4, "burst_share": 0.1,
    "burst_seconds": 1e-3, "write_share": 0.5, "chain_seconds": 1e-10, "chain_depth": 8192.0, "cached": 2e7,
    "cached_share": 0.3,
}  # fmt: skip
LIMITS = {
    "compute": 1.0, "memory": 0.98, "sharpness": 8.0, "depth": 3000.0, "join_share": 10.0, "warm_share": 0.6,
    "warm_seconds": 3e-3, "burst_share": 0.6, "burst_seconds": 0.03, "chain_depth": 1e5, "cached": 2e8,
    "cached_share": 1.0, "efficiency": 1.0,
}  # fmt: skip
# Tables of narrow types hold the quantisation of the input, a kernel of its own: its start and share of the bandwidth.
QUANTISE = {"start_seconds": 3e-6, "efficiency": 0.4}
_ANY = Efficiencies()


def parts(table: Table, family: str, dtype: str) -> dict[tuple[str, str], Table]:
    """Return the rows of a family and data type by (device, engine), without tables that time calls from the host."""
    called = engine_steps()["called"]
    engines = [e for e in ENGINES if f"{e}-{dtype}" not in called]
    found = {(d, e): pick(table, device=d, engine=e, dtype=dtype) for d in FAMILIES[family] for e in engines}
    return {key: rows for key, rows in found.items() if size(rows) > 30}


def cached(rows: Table, key: tuple[str, str], dtype: str) -> Any:
    """Return the share of the seconds of reading weights that a table's copies of them leave to the last cache."""
    found, shapes = find_device(key[0]).device, zip(rows["m"], rows["n"], rows["k"], strict=True)
    return np.array([held_share(found, ENGINES[key[1]], dtype, shape) for shape in shapes])


def predicted(rows: Table, key: tuple[str, str], row: dict[str, Any], dtype: str) -> Any:
    """Return seconds of the products of some rows on one device with one engine's library."""
    (device, engine), (m, n, k) = key, (rows["m"], rows["n"], rows["k"])
    found, shape = find_device(device).device, (m, n, k, 1.0)
    rates = product_rates(found, PRODUCTS[dtype][2], {"source": "", **row, **AT_HIGHEST_CLOCK}, _ANY, ENGINES[engine])
    if "held" not in rows:
        rows["held"] = cached(rows, key, dtype)
    seconds = product_seconds(rates, shape, moved_bytes(dtype, shape, rows["held"]))
    if "quantise" in row:
        in_turn = maxima_seconds(ENGINES[engine], dtype, family_of(found), 1.0) * m
        seconds = seconds + quantise_seconds(row["quantise"][ENGINES[engine]], found, (m, k), in_turn)
    return seconds


Groups: TypeAlias = dict[tuple[str, str], Table]
Path: TypeAlias = tuple[str, ...]


def _placed(row: dict[str, Any], paths: list[Path], values: Any) -> dict[str, Any]:
    """Return a row with other values at some places."""
    found = {name: value for name, value in row.items()}
    for path, value in zip(paths, values, strict=True):
        inner = found
        for name in path[:-1]:
            inner[name] = dict(inner[name])
            inner = inner[name]
        inner[path[-1]] = value
    return found


def _paths(row: dict[str, Any], before: Path = ()) -> list[Path]:
    """Return the places of all numbers of a row."""
    return [
        path
        for name, value in row.items()
        for path in (_paths(value, (*before, name)) if isinstance(value, dict) else [(*before, name)])
    ]


def _value(row: dict[str, Any], path: Path) -> float:
    found: Any = row
    for name in path:
        found = found[name]
    return float(found)


def solved(groups: Groups, dtype: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with every constant fitted at once, factors of devices and engines around their mean."""
    paths = _paths(row)
    start = np.log([_value(row, path) for path in paths])
    tables = ("by_device", "by_engine", "start_by_device")
    top = np.array([0.6 if path[0] in tables else np.log(LIMITS.get(path[-1], 1e9)) for path in paths])
    weights = np.concatenate([np.full(size(rows), 1 / size(rows)) for rows in groups.values()])
    measured = np.concatenate([rows["time_seconds"] for rows in groups.values()])

    def errors_of(z: Any) -> Any:
        tried = _placed(row, paths, np.exp(z))
        return np.log(np.concatenate([predicted(r, key, tried, dtype) for key, r in groups.items()]) / measured)

    free = np.array([path[0] in START and path[0] not in ("compute", "memory", "start_seconds") for path in paths])
    z = Squares(errors_of, weights).race(start, top, free)
    return centred(_placed(row, paths, np.exp(z).tolist()))


def centred(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose factors of devices and of engines have the mean one; what they share goes to the constant."""
    found = dict(row)
    for table, name in (("by_device", "compute"), ("by_engine", "compute"), ("start_by_device", "start_seconds")):
        if row.get(table):
            mean = float(np.exp(np.mean(np.log(list(row[table].values())))))
            found[table] = {key: value / mean for key, value in row[table].items()}
            found[name] *= mean
    found["compute"] = min(found["compute"], 1.0)
    return found


def fit_row(groups: Groups, dtype: str) -> dict[str, Any]:
    """Return the constants of a family and data type; engines have libraries of their own for narrow types."""
    devices, engines = sorted({key[0] for key in groups}), sorted({ENGINES[key[1]] for key in groups})
    row: dict[str, Any] = dict(START)
    if len(devices) > 1:
        row |= {table: dict.fromkeys(devices, 1.0) for table in ("by_device", "start_by_device")}
    if len(engines) > 1:
        row["by_engine"] = dict.fromkeys(engines, 1.0)
    if dtype in WIDE_INPUT:
        return solved(groups, dtype, row)
    row = solved(groups, dtype, row | {"quantise": {e: dict(QUANTISE) for e in engines}})
    if len(engines) == 1:
        return row
    found = row | {"quantise": dict(row["quantise"]), "engines": {}}
    for e in engines:
        part = {key: rows for key, rows in groups.items() if ENGINES[key[1]] == e}
        own = {name: value for name, value in row.items() if name != "by_engine"}
        own = solved(part, dtype, own | {"quantise": {e: row["quantise"][e]}})
        found["quantise"][e] = own.pop("quantise")[e]
        found["engines"][e] = own
    return found


def calibrate(table: Table) -> dict[str, Any]:
    """Return matmul rows by family, each with the residual on shapes that were not fitted and on all."""
    found: dict[str, Any] = {}
    for family in FAMILIES:
        for dtype, name in ((one, PRODUCTS[one][0]) for one in TYPES):
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
        for dtype, name in ((one, PRODUCTS[one][0]) for one in TYPES):
            row = constants.get(family, {}).get("matmul", {}).get(name)
            for key, rows in (parts(table, family, dtype) if row else {}).items():
                found.append((key[0], f"product {dtype}", key[1], errors(predicted(rows, key, row, dtype), rows)))
    return found
