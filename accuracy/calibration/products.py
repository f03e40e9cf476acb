"""Matrix products: one row of constants a family and data type, a factor for each device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from accuracy.calibration.minimise import STEP, Squares
from accuracy.calibration.tables import FAMILIES, INSIDE, Table, errors, folds, pick, size, summary, where
from accuracy.kernels.products import cached_share, moved_bytes, quantise_seconds, replayed
from accuracy.kernels.tables import ENGINES, maxima_seconds, tables
from accuracy.kernels.ticks import Ticks, ticks_of
from accuracy.kernels.types import types_of
from shardwise.cost import Efficiencies, Gemm, family_of, gemm_rates, gemm_seconds, record
from shardwise.hardware import find_device

# Types of the tables that are fitted.
TYPES = ("bf16", "fp8", "fp8_block", "nvfp4", "int8_sq", "int8_wo", "int4_wo")
WIDE_INPUT = ("bf16", "int8_wo", "int4_wo")
START = {
    "compute": 0.65, "memory": 0.85, "start_seconds": 2e-6, "sharpness": 3.0, "depth": 30.0, "balance": 20.0,
    "chain_seconds": 2.5e-9, "split_seconds": 3e-6, "join_share": 2.0, "ramp_seconds": 1.5e-6, "ramp_traffic": 3e6,
    "burst_share": 0.4, "burst_seconds": 0.03, "unset_left": 0.3, "write_share": 0.3, "cached_share": 0.4,
    "vector_wait_share": 0.5,
}  # fmt: skip
LIMITS = {
    "compute": 1.0, "memory": 0.98, "sharpness": 8.0, "depth": 3000.0, "join_share": 20.0, "ramp_seconds": 1e-4,
    "burst_share": 1.5, "burst_seconds": 3.0, "cached_share": 1.0, "efficiency": 1.0, "unset_left": 1.0,
    "vector_wait_share": 1.0,
}  # fmt: skip
# Tables of narrow types hold the quantisation of the input, a kernel of its own: its start and share of the bandwidth.
QUANTISE = {"start_seconds": 3e-6, "efficiency": 0.4}
# What every engine's library has of its own in types narrower than 16 bits, and what one constant more must lower the
# mean of log(1 + (error / 4 %)^2) by, on shapes that are left out; of the most promising ones so many are tried.
OWN = ("compute", "memory", "start_seconds")
# Vectors have a kernel of their own in 16 bits alone: where the input is quantised one row runs in tiles as many do.
NO_VECTORS = {"vector_wait_share": 1.0}
# What the power limit does to 16-bit products: tables of types with narrower inputs cannot tell it from their rate.
POWER = ("burst_share", "burst_seconds", "unset_left")
GAIN, TRIES = 0.008, 8
# Factors of devices, and the constant that each scales.
FACTORS = {"by_device": "compute", "start_by_device": "start_seconds"}
_ANY = Efficiencies()


def parts(table: Table, family: str, dtype: str) -> dict[tuple[str, str], Table]:
    """Return the rows of a family and data type by (device, engine), without tables that time calls from the host."""
    called = tables()["called"]
    engines = [e for e in ENGINES if f"{e}-{dtype}" not in called]
    found = {(d, e): pick(table, device=d, engine=e, dtype=dtype) for d in FAMILIES[family] for e in engines}
    return {key: rows for key, rows in found.items() if size(rows) > 30}


def cached(rows: Table, key: tuple[str, str], dtype: str) -> Any:
    """Return the share of the seconds of reading weights that a table's copies of them leave to the last cache."""
    found, shapes = find_device(key[0]).device, zip(rows["m"], rows["n"], rows["k"], strict=True)
    return np.array([cached_share(found, ENGINES[key[1]], dtype, shape) for shape in shapes])


def predicted(rows: Table, key: tuple[str, str], row: dict[str, Any], dtype: str) -> Any:
    """Return seconds of the products of some rows on one device with one engine's library."""
    (device, engine), (m, n, k) = key, (rows["m"], rows["n"], rows["k"])
    found, shape = find_device(device).device, (m, n, k, 1.0)
    gemm = record(Gemm, row, "fit")
    gemm = replace(gemm, **gemm.engines.get(ENGINES[engine], {}))
    timed = replayed(gemm, found, ENGINES[engine], dtype, shape)
    rates = gemm_rates(found, types_of("products")[dtype].peak, timed, _ANY, ENGINES[engine])
    if "held" not in rows:
        rows["held"] = cached(rows, key, dtype)
    seconds = gemm_seconds(rates, shape, moved_bytes(dtype, shape, rows["held"]))
    if gemm.quantise:
        in_turn = maxima_seconds(ENGINES[engine], dtype, family_of(found), 1.0) * m
        seconds = seconds + quantise_seconds(gemm.quantise[ENGINES[engine]], found, (m, k), in_turn)
    return seconds


def ticks(rows: Table, key: tuple[str, str], dtype: str) -> Ticks:
    """Return how the table of some rows times kernels."""
    (device, engine), weight = key, types_of("products")[dtype].weight_bytes * rows["n"] * rows["k"]
    return ticks_of("gemm", engine, find_device(device).device, dtype, weight)


def stated(rows: Table, key: tuple[str, str], row: dict[str, Any], dtype: str) -> Any:
    """Return what the table of some rows would state of the products."""
    return ticks(rows, key, dtype).stated(predicted(rows, key, row, dtype))


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


class Search(Squares):
    """Search of the constants of a row, over rows by device and engine; `base` holds those that the row leaves out."""

    def __init__(self, groups: Groups, dtype: str, row: dict[str, Any], base: dict[str, Any]) -> None:
        """Take the row that the search begins with."""
        self.groups, self.dtype, self.start_row, self.base, self.paths = groups, dtype, row, base, _paths(row)
        tops = [0.6 if path[0] in FACTORS else np.log(LIMITS.get(path[-1], 1e9)) for path in self.paths]
        self.start, self.top = np.log([_value(row, path) for path in self.paths]), np.array(tops)
        cells = {key: ticks(rows, key, dtype).kernel(rows["time_seconds"]) for key, rows in groups.items()}
        self.cells = {key: tuple(map(np.log, cell)) for key, cell in cells.items()}
        super().__init__(self.errors, np.concatenate([np.full(size(r), 1 / size(r)) for r in groups.values()]))

    def row(self, z: Any) -> dict[str, Any]:
        """Return the row whose constants have these logarithms."""
        return _placed(self.start_row, self.paths, np.exp(z).tolist())

    def errors(self, z: Any) -> Any:
        """Return the logarithms of predicted over measured seconds."""
        row = self.base | self.row(z)
        return np.concatenate([self.off(key, rows, row) for key, rows in self.groups.items()])

    def off(self, key: tuple[str, str], rows: Table, row: dict[str, Any]) -> Any:
        """Return the logarithms of predicted seconds over the nearest that the table would state as it does."""
        found, (low, high) = np.log(predicted(rows, key, row, self.dtype)), self.cells[key]
        near = np.clip(found, low, high)
        return found - near + INSIDE * (near - (low + high) / 2)

    def normal(self, z: Any, r: Any, w: Any) -> tuple[Any, Any]:
        """Return matrix and right side of the linear problem, added up over tables: each depends on few constants."""
        curve, right, end = np.zeros((len(z), len(z))), np.zeros(len(z)), 0
        for key, rows in self.groups.items():
            part = slice(end, end := end + size(rows))
            names = {*key, ENGINES[key[1]]}
            own = np.array([i for i, path in enumerate(self.paths) if len(path) == 1 or path[1] in names])
            tried = [self.base | self.row(z + unit) for unit in STEP * np.eye(len(z))[own]]
            slopes = (np.array([self.off(key, rows, row) for row in tried]) - r[part]) / STEP
            curve[np.ix_(own, own)] += (slopes * w[part]) @ slopes.T
            right[own] += slopes @ (w * r)[part]
        return curve, right


def centred(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose factors of devices and of engines have the mean one; what they share goes to the constants."""
    found = dict(row)
    for table, name in FACTORS.items():
        if row.get(table):
            middle = mean(row[table].values())
            found[table] = {key: value / middle for key, value in row[table].items()}
            found |= {name: found[name] * middle} if name in found else {}
            own = {e: c | {name: c[name] * middle} for e, c in found.get("engines", {}).items()}
            found |= {"engines": own} if own else {}
    for part in (found, *found.get("engines", {}).values()):
        part |= {"compute": min(part["compute"], 1.0)} if "compute" in part else {}
    return found


def mean(values: Iterable[float]) -> float:
    """Return the geometric mean."""
    return float(np.exp(np.mean(np.log(list(values)))))


def _devices(groups: Groups) -> dict[str, Any]:
    """Return the factors of devices that a row begins with."""
    devices = sorted({key[0] for key in groups})
    tables = ("by_device", "start_by_device") if len(devices) > 1 else ()
    return {table: dict.fromkeys(devices, 1.0) for table in tables}


def fit_row(groups: Groups) -> dict[str, Any]:
    """Return the constants of a family in 16 bits, all fitted at once, factors of devices around one."""
    search = Search(groups, "bf16", START | _devices(groups), {})
    free = np.array([path[0] in START and path[0] not in OWN for path in search.paths])
    return centred(search.row(search.race(search.start, search.top, free)))


def fit_narrow(groups: Groups, dtype: str, base: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the constants of another type: those of each engine, and what differs from the 16-bit row of the family.

    A constant of the form is the type's or an engine's own where that lowers the loss of shapes that are left out; the
    errors of these come with the constants.
    """
    engines = sorted({ENGINES[key[1]] for key in groups})
    own, factors = {name: base[name] for name in OWN}, _devices(groups)
    if dtype not in WIDE_INPUT:
        # Tables hold the starts of both kernels as one: that of the product is the one in 16 bits.
        del own["start_seconds"]
        base = base | NO_VECTORS
        factors = {name: table for name, table in factors.items() if FACTORS[name] in own}
        factors["quantise"] = {e: dict(QUANTISE) for e in engines}
    row = factors | ({"engines": {e: dict(own) for e in engines}} if len(engines) > 1 else own)
    row, best = solved(groups, dtype, row, base), _left_out(groups, dtype, row, base)
    while better := _better(groups, dtype, row, base, best):
        row, best = better
    row = centred(row)
    # Who names no engine, as training does, takes the middle of them.
    means = {name: mean(c[name] for c in row["engines"].values()) for name in own} if "engines" in row else {}
    return means | row | (NO_VECTORS if dtype not in WIDE_INPUT else {}), np.exp(best) - 1


def _better(
    groups: Groups, dtype: str, row: dict[str, Any], base: dict[str, Any], best: Any
) -> tuple[dict[str, Any], Any] | None:
    """Return a row with one constant more and its errors on shapes that are left out, where these are lower."""
    more = _more(row, base)
    for path in _promising(groups, dtype, row, base, more)[:TRIES] if more else ():
        tried = solved(groups, dtype, _placed(row, [path], [more[path]]), base)
        if _loss(best) - _loss(found := _left_out(groups, dtype, tried, base)) >= GAIN:
            return tried, found
    return None


def solved(groups: Groups, dtype: str, row: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Return the constants of a row, searched from those that it states."""
    search = Search(groups, dtype, row, base)
    return search.row(search.solve(search.start, search.top, 30))


def _loss(found: Any) -> float:
    return float(np.mean(np.log1p((found / 0.04) ** 2)))


def _left_out(groups: Groups, dtype: str, row: dict[str, Any], base: dict[str, Any]) -> Any:
    """Return the logarithms of predicted over measured seconds of shapes that are left out, in four folds."""
    masks, logs = {key: folds(rows, "n", "k") for key, rows in groups.items()}, []
    for fold in range(4):
        kept = {key: where(rows, masks[key] != fold) for key, rows in groups.items()}
        out = {key: found for key, rows in groups.items() if size(found := where(rows, masks[key] == fold))}
        if out and all(map(size, kept.values())):
            logs.append(np.log1p(_errors(out, dtype, base | solved(kept, dtype, row, base))))
    return np.concatenate(logs)


def _more(row: dict[str, Any], base: dict[str, Any]) -> dict[Path, float]:
    """Return the places of constants of the form that a type or an engine does not state, with what they take."""
    found: dict[Path, float] = {}
    theirs = (*OWN, *((*POWER, *NO_VECTORS) if "quantise" in row else ()))
    for name in (name for name in START if name not in theirs):
        engines, value = row.get("engines", {"": {}}), row.get(name, base[name])
        left = [e for e in engines if name not in engines[e]]
        found |= {(name,): value} if left and name not in row else {}
        found |= {("engines", e, name): value for e in left if e}
    return found


def _promising(
    groups: Groups, dtype: str, row: dict[str, Any], base: dict[str, Any], more: dict[Path, float]
) -> list[Path]:
    """Return constants by how much each would lower the loss were it fitted too, the form taken as linear."""
    finest = {path: value for path, value in more.items() if len(path) > 1} or more
    search = Search(groups, dtype, _placed(row, list(finest), finest.values()), base)
    r = search.errors(search.start)
    curve, right = search.normal(search.start, r, search.weights / (search.scale**2 + r**2))
    curve += search.pull * np.eye(len(right))
    known = np.eye(len(right))[[path not in finest for path in search.paths]]

    def gain(path: Path) -> float:
        # A type's constant is that of all engines that state none.
        tried = [path == p or (p in finest and path == p[-1:]) for p in search.paths]
        free = np.vstack([known, np.array(tried, float)])
        return float(free @ right @ np.linalg.solve(free @ curve @ free.T, free @ right))

    return sorted(more, key=gain, reverse=True)


def calibrate(table: Table) -> dict[str, Any]:
    """Return matmul rows by family, each with the residual on shapes that were not fitted and on all."""
    found: dict[str, Any] = {}
    for family in FAMILIES:
        groups = {dtype: rows for dtype in TYPES if (rows := parts(table, family, dtype))}
        form: dict[str, Any] = {}
        for dtype, rows in groups.items():
            if dtype == "bf16":
                row = fit_row(rows)
                form, half = {name: row[name] for name in START}, fit_row(_shapes(rows, seen=True))
                apart = _errors(_shapes(rows, seen=False), dtype, half)
            else:
                row, apart = fit_narrow(rows, dtype, form)
            found.setdefault(family, {})[types_of("products")[dtype].row] = row | {
                "residual": f"{summary(_errors(rows, dtype, form | row))}; shapes not fitted: {summary(apart)}",
                "source": f"fit on {dtype} products of {', '.join(FAMILIES[family])} in "
                f"{', '.join(sorted({k[1] for k in rows}))} (aiconfigurator 0.12.0, Apache-2.0)",
            }
    return found


def _shapes(groups: Groups, *, seen: bool) -> Groups:
    """Return the rows of three quarters of the shapes, or of the rest."""
    found = {key: where(rows, (folds(rows, "n", "k") > 0) == seen) for key, rows in groups.items()}
    return {key: rows for key, rows in found.items() if size(rows)}


def _errors(groups: Groups, dtype: str, row: dict[str, Any]) -> Any:
    return np.concatenate([errors(stated(rows, key, row, dtype), rows) for key, rows in groups.items()])


def residuals(table: Table, constants: dict[str, Any]) -> list[tuple[str, str, str, Any]]:
    """Return (device, kind, engine, errors) of stored constants on a table, which may be another one."""
    found = []
    for family in FAMILIES:
        for dtype, name in ((one, types_of("products")[one].row) for one in TYPES):
            row = constants.get(family, {}).get("matmul", {}).get(name)
            for key, rows in (parts(table, family, dtype) if row else {}).items():
                found.append((key[0], f"product {dtype}", key[1], errors(stated(rows, key, row, dtype), rows)))
    return found
