"""Fused experts: constants that all kernels share, and those that a kernel states itself.

Every kernel has a rate and a start of its own. Another constant is its own where that lowers the loss of shapes that
are left out, in six folds, each predicted from the other five; what all kernels share is fitted with all of them.
"""

from __future__ import annotations

import csv
import itertools
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from accuracy.calibration.minimise import STEP, Squares
from accuracy.calibration.tables import FAMILIES, LEAST, summary
from accuracy.kernels.products import Fused, datasheet_of, fused_of, fused_seconds, tile_steps
from accuracy.kernels.tables import ENGINES
from accuracy.kernels.types import types_of
from shardwise.cost import Datasheet, ExpertsFit, record
from shardwise.hardware import find_device
from shardwise.measured import Record

WORD = "experts"
Comparison: TypeAlias = dict[str, float]
# The shape of a layer: what is left out is whole.
_SHAPE = ("hidden_size", "intermediate_size", "top_k", "num_experts")
_OWN = ("compute", "start_seconds")
# A kernel whose tiles are known states this itself, others have none.
_TILED = "tile_reads"
# Where the search begins: the middle of fits of single kernels.
_MIDDLE = {"memory": 0.87, "compute": 0.5, "start_seconds": 2e-5, "sharpness": 2.0, "pad_rows": 24.0,
           "expert_seconds": 1.2e-7, "walk_seconds": 1e-8, "chain_share": 0.5, "row_traffic": 0.8,
           "others_traffic": 0.6, "mapped_seconds": 1e-6, "tile_reads": 0.5}  # fmt: skip
_TOPS = {"memory": 1.0, "compute": 1.0, "sharpness": 8.0, "pad_rows": 200.0, "tile_reads": 1.5}
_FOLDS, _ROUNDS = 6, 2
# A constant of its own lowers the mean of log(1 + (error / 8 %)^2) on shapes left out by this much at least.
_GAIN, _SCALE, _PULL = 0.02, 0.08, 3e-3


@dataclass(frozen=True)
class Kernel:
    """The measured rows of one kernel of a family and engine: its place among the constants, and columns."""

    place: tuple[str, ...]
    devices: Any
    chip: Datasheet[Any]
    ran: Fused
    seconds: Any
    folds: Any
    weights: Any

    def cut(self, mask: Any) -> Kernel:
        """Return the rows of a mask."""
        parts = {"chip": _cut(self.chip, mask), "ran": _cut(self.ran, mask)}
        plain = {n: getattr(self, n)[mask] for n in ("devices", "seconds", "folds", "weights")}
        return Kernel(place=self.place, **parts, **plain)

    def logs(self, row: Comparison) -> Any:
        """Return the logarithms of predicted over measured seconds."""
        fit = replace(record(ExpertsFit, row, "fit"), tile_steps=self.steps)
        return np.log(fused_seconds(fit, self.chip, self.ran) / self.seconds)

    @property
    def steps(self) -> tuple[float, ...]:
        """The tokens beyond which its tiles have twice the rows."""
        return tile_steps(self.place[-1])

    @property
    def own(self) -> list[str]:
        """What it states itself at least."""
        return [*_OWN, *([_TILED] if self.steps else [])]


def _cut(columns: Any, mask: Any) -> Any:
    return type(columns)(**{f.name: getattr(columns, f.name)[mask] for f in fields(columns)})


def _columns(kind: type[Any], found: list[Any]) -> Any:
    return kind(**{f.name: np.array([getattr(one, f.name) for one in found]) for f in fields(kind)})


def _folds(rows: list[dict[str, str]]) -> list[int]:
    """Return the fold of every row: shapes in the order of a hash, dealt to the folds in turn."""
    shapes = [tuple(float(row[name]) for name in _SHAPE) for row in rows]
    order = sorted(set(shapes), key=lambda shape: zlib.crc32(repr(shape).encode()))
    return [order.index(shape) % _FOLDS for shape in shapes]


def kernels(folder: Path) -> list[Kernel]:
    """Return the kernels of the tables of a folder, of devices that have enough rows of them."""
    rows = [row for path in sorted(folder.glob("kernels_moe_*.csv")) for row in csv.DictReader(path.open())]
    family = {device: name for name, devices in FAMILIES.items() for device in devices}
    found: dict[tuple[str, ...], dict[str, list[tuple[dict[str, str], int]]]] = {}
    for row, fold in zip(rows, _folds(rows), strict=True):
        if row["device"] in family and row["engine"] in ENGINES and row["dtype"] in types_of("experts"):
            place = (family[row["device"]], WORD, ENGINES[row["engine"]], row["dtype"], row["kernel"])
            found.setdefault(place, {}).setdefault(row["device"], []).append((row, fold))
    order = list(FAMILIES), list(ENGINES.values())
    places = sorted(found, key=lambda p: (order[0].index(p[0]), order[1].index(p[2]), p[3:]))
    kept = {p: [rows for rows in found[p].values() if len(rows) >= LEAST] for p in places}
    return [_kernel(place, parts) for place, parts in kept.items() if parts]


def _kernel(place: tuple[str, ...], parts: list[list[tuple[dict[str, str], int]]]) -> Kernel:
    """Return a kernel, each device with the same weight."""
    rows = [row for part in parts for row, _ in part]
    devices = [find_device(row["device"]).device for row in rows]
    peak, steps = types_of("experts")[place[3]].peak, tile_steps(place[-1])
    return Kernel(
        place=place,
        devices=np.array([device.name for device in devices]),
        chip=_columns(Datasheet, [datasheet_of(device, peak) for device in devices]),
        ran=_columns(Fused, [fused_of(Record(row), device, steps) for row, device in zip(rows, devices, strict=True)]),
        seconds=np.array([float(row["time_seconds"]) for row in rows]),
        folds=np.array([fold for part in parts for _, fold in part]),
        weights=np.concatenate([np.full(len(part), 1 / len(part) / len(parts)) for part in parts]),
    )


def _tops(names: Iterable[str]) -> Any:
    return np.log([_TOPS.get(name, 1e9) for name in names])


def _logs(row: Comparison, names: Iterable[str]) -> Any:
    return np.log([row[name] for name in names])


def searched(kernel: Kernel, shared: Comparison, names: list[str], start: Comparison) -> Comparison:
    """Return a row whose named constants lie closest to the rows of a kernel, held to those that all share."""

    def row(z: Any) -> Comparison:
        return shared | dict(zip(names, np.exp(z).tolist(), strict=True))

    search = Squares(lambda z: kernel.logs(row(z)), kernel.weights, _SCALE, _PULL)
    return row(search.solve(_logs(start, names), _tops(names), 25, _logs(shared, names)))


def left_out(kernel: Kernel, shared: Comparison, names: list[str]) -> float:
    """Return the mean loss of shapes that are left out, where a kernel states some constants itself."""
    whole, lost = searched(kernel, shared, names, shared), np.zeros(len(kernel.seconds))
    for fold in set(kernel.folds.tolist()):
        out = kernel.folds == fold
        row = shared if out.all() else searched(kernel.cut(~out), shared, names, whole)
        lost[out] = np.log1p((kernel.cut(out).logs(row) / _SCALE) ** 2)
    return float(np.average(lost, weights=kernel.weights))


def chosen(kernel: Kernel, shared: Comparison) -> list[str]:
    """Return the constants that a kernel states itself."""
    names, best = kernel.own, left_out(kernel, shared, kernel.own)
    while more := [name for name in shared if name not in (*names, _TILED)]:
        found, name = min((left_out(kernel, shared, [*names, name]), name) for name in more)
        if best - found < _GAIN:
            break
        best, names = found, [*names, name]
    return names


class Together(Squares):
    """Search of what all kernels share and of what each states itself; a kernel depends on few of all constants."""

    def __init__(self, every: list[Kernel], names: list[list[str]], shared: list[str]) -> None:
        """Take the constants that each kernel states itself, and those that all share."""
        self.every, self.shared, self.names = every, shared, names
        ends = np.cumsum([len(shared), *map(len, names)])
        self.own = [slice(int(low), int(high)) for low, high in itertools.pairwise(ends)]
        super().__init__(self.errors, np.concatenate([k.weights for k in every]), _SCALE, _PULL / len(every))

    def row(self, i: int, z: Any) -> Comparison:
        """Return the constants of a kernel."""
        every = dict(zip(self.shared, np.exp(z[: len(self.shared)]).tolist(), strict=True))
        return every | dict(zip(self.names[i], np.exp(z[self.own[i]]).tolist(), strict=True))

    def errors(self, z: Any) -> Any:
        """Return the logarithms of predicted over measured seconds of all kernels."""
        return np.concatenate([kernel.logs(self.row(i, z)) for i, kernel in enumerate(self.every)])

    def normal(self, z: Any, r: Any, w: Any) -> tuple[Any, Any]:
        """Return matrix and right side of the linear problem around some constants, added up over kernels."""
        curve, right, units, end = np.zeros((len(z), len(z))), np.zeros(len(z)), STEP * np.eye(len(z)), 0
        for i, kernel in enumerate(self.every):
            rows = slice(end, end := end + len(kernel.seconds))
            common = [place for place, name in enumerate(self.shared) if name not in self.names[i]]
            own = np.array([*common, *range(len(z))[self.own[i]]])
            slopes = np.array([(kernel.logs(self.row(i, z + unit)) - r[rows]) / STEP for unit in units[own]])
            curve[np.ix_(own, own)] += (slopes * w[rows]) @ slopes.T
            right[own] += slopes @ (w * r)[rows]
        return curve, right


def together(every: list[Kernel], names: list[list[str]], shared: Comparison) -> tuple[Comparison, list[Comparison]]:
    """Return what all kernels share, and the whole row of each, where each states some constants itself."""
    common = [name for name in shared if name not in (*_OWN, _TILED)]
    search = Together(every, names, common)
    base = np.concatenate([_logs(_MIDDLE, common), *(_logs(shared, own) for own in names)])
    z = search.solve(base, np.concatenate([_tops(common), *map(_tops, names)]), 40)
    found = dict(zip(common, np.exp(z[: len(common)]).tolist(), strict=True))
    return _MIDDLE | found, [search.row(i, z) for i in range(len(every))]


def fitted(every: list[Kernel]) -> tuple[Comparison, list[list[str]], list[Comparison]]:
    """Return what all kernels share, what each states itself, and the whole row of each."""
    shared, names, rows = dict(_MIDDLE), [kernel.own for kernel in every], [dict(_MIDDLE)]
    shared, rows = together(every, names, shared)
    for _ in range(_ROUNDS):
        names = [chosen(kernel, shared) for kernel in every]
        shared, rows = together(every, names, shared)
    return shared, names, rows


def _errors(kernel: Kernel, row: Comparison) -> Any:
    return np.exp(kernel.logs(row)) - 1


def calibrate(folder: Path) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield places in the table of constants and their rows: what all kernels share, and what each states itself."""
    every = kernels(folder)
    if not every:
        return
    parts = [kernel.cut(kernel.folds > 0) for kernel in every]
    kept = [i for i, part in enumerate(parts) if len(part.seconds)]
    shared, _, found = fitted([parts[i] for i in kept])
    without = {i: row for i, row in zip(kept, found, strict=True)}
    unseen = [_errors(k.cut(k.folds == 0), without.get(i, shared)) for i, k in enumerate(every)]
    shared, names, rows = fitted(every)
    seen = [_errors(kernel, row) for kernel, row in zip(every, rows, strict=True)]
    yield (
        ("shared", WORD),
        {
            **{name: shared[name] for name in shared if name not in (*_OWN, _TILED)},
            _TILED: 0.0,
            "tile_steps": [],
            "residual": f"{summary(np.concatenate(seen))}; shapes not fitted: {summary(np.concatenate(unseen))}",
            "source": "fit on moe, all devices and engines (aiconfigurator 0.12.0, Apache-2.0)",
        },
    )
    for kernel, own, row, left, apart in zip(every, names, rows, seen, unseen, strict=True):
        engine = next(word for word, name in ENGINES.items() if name == kernel.place[2])
        devices = ", ".join(dict.fromkeys(kernel.devices))
        yield (
            kernel.place,
            {
                **{name: row[name] for name in shared if name in own},
                **({"tile_steps": list(kernel.steps)} if kernel.steps else {}),
                "rows": len(left),
                "residual": f"{summary(left)}; shapes not fitted: {summary(apart)}",
                "source": f"fit on moe, {devices}, {engine} (aiconfigurator 0.12.0, Apache-2.0)",
            },
        )


def residuals(folder: Path, constants: dict[str, Any]) -> list[tuple[str, str, str, Any]]:
    """Return (device, kind, engine, errors) of stored constants on the tables of a folder."""
    found = []
    for kernel in kernels(folder):
        row: Any = constants
        for key in kernel.place:
            row = row.get(key, {})
        row = {f.name: row[f.name] for f in fields(ExpertsFit) if f.name in row}
        for device in dict.fromkeys(kernel.devices.tolist()) if row else ():
            engine = next(word for word, name in ENGINES.items() if name == kernel.place[2])
            rows = kernel.cut(kernel.devices == device)
            found.append((device, f"{WORD} {kernel.place[3]}", engine, _errors(rows, row)))
    return found
