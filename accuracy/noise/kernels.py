"""Print how far tables of kernels disagree about one kernel: what no form of constants can go below.

`python -m accuracy.noise.kernels FOLDER` reads kernels_gemm_*.csv and kernels_moe_*.csv and pairs rows that time the
same work: by two engines on one device, which call the same cuBLAS for 16-bit GEMMs; with one engine on two devices
of one chip (b200 and gb200, b300 and gb300; rows that were copied from one to the other are left out); and of GEMMs
whose rows differ by at most a sixth within one tile of 16 rows, which read the same weights.
A figure is the median of |log(a / b)|, then the same after the median ratio of the pair has been taken out, which a
constant of the device or of the engine can do. One prediction for both rows misses by half of it at least.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from accuracy.calibration.tables import Table, read, size

RELATIVES = (("b200-sxm-180gb", "gb200"), ("b300", "gb300"))
TILE = 16


def columns(table: Table, names: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Return the values of some columns, a tuple for each row."""
    return list(zip(*(table[name].tolist() for name in names), strict=True))


def timed(table: Table, group: tuple[str, ...], work: tuple[str, ...]) -> dict[Any, dict[Any, float]]:
    """Return seconds by what is done, then by who did it; work that was copied from another device counts once."""
    found: dict[Any, dict[Any, float]] = defaultdict(dict)
    rows = zip(columns(table, work), columns(table, group), table["time_seconds"], strict=True)
    for what, who, seconds in rows:
        if seconds not in found[what].values():
            found[what][who] = float(seconds)
    return found


def line(name: str, pair: str, ratios: Any) -> str:
    """Return a row of the table: pairs, median ratio, median disagreement, and what is left without the ratio."""
    middle = float(np.median(ratios))
    first, rest = (100 * float(np.median(np.abs(x))) for x in (ratios, ratios - middle))
    return f"| {name} | {pair} | {len(ratios)} | {100 * middle:+.1f} % | {first:.1f} % | {rest:.1f} % |"


def disagreements(found: dict[Any, dict[Any, float]], pairs: list[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield each pair of measurers with the logarithms of their ratios, where both measured at least ten kernels."""
    for a, b in pairs:
        ratios = np.log([row[a] / row[b] for row in found.values() if a in row and b in row])
        if len(ratios) >= 10:
            yield (a, b), ratios


def gathered(name: str, what: str, found: dict[Any, dict[Any, float]], pairs: list[tuple[Any, Any]]) -> Iterator[str]:
    """Yield the rows of all pairs, and one row over them with the ratio of each pair taken out."""
    centred, plain = [], []
    for (a, b), ratios in disagreements(found, pairs):
        yield line(name, f"{' '.join(a)}, {' '.join(b)}", ratios)
        plain.append(ratios)
        centred.append(ratios - np.median(ratios))
    if centred:
        every, rest = (100 * float(np.median(np.abs(np.concatenate(x)))) for x in (plain, centred))
        yield f"| {name} | **{what}** | {sum(map(len, plain))} | | **{every:.1f} %** | **{rest:.1f} %** |"


def products(folder: Path) -> Iterator[str]:
    """Yield the rows of GEMMs by type."""
    table = read(folder, "gemm")
    for dtype in ("bf16", "fp8", "nvfp4"):
        rows = {name: column[table["dtype"] == dtype] for name, column in table.items()}
        found = timed(rows, ("device", "engine"), ("m", "n", "k"))
        who = sorted(set(columns(rows, ("device", "engine"))))
        if dtype == "bf16":
            same = [(a, b) for a, b in combinations(who, 2) if a[0] == b[0]]
            yield from gathered(dtype, "two engines, one device", found, same)
        near = [(a, b) for a in who for b in who if (a[0], b[0]) in RELATIVES and a[1] == b[1]]
        yield from gathered(dtype, "one engine, two related devices", found, near)
        ratios = list(neighbours(rows))
        if ratios:
            yield line(dtype, "**neighbouring rows in a tile**", np.array(ratios))


def neighbours(rows: Table) -> Iterator[float]:
    """Yield log ratios of GEMMs that differ by a sixth of their rows at most, both within one tile of 16 rows."""
    by_shape: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    shapes = columns(rows, ("device", "engine", "n", "k"))
    for shape, m, seconds in zip(shapes, rows["m"], rows["time_seconds"], strict=True):
        if m <= TILE:
            by_shape[shape].append((float(m), float(seconds)))
    for found in by_shape.values():
        ordered = sorted(found)
        for (a, first), (b, second) in pairwise(ordered):
            if a > 1 and b - a <= b / 6:
                yield float(np.log(second / first))


def experts(folder: Path) -> Iterator[str]:
    """Yield the rows of fused experts: one kernel on two related devices."""
    table = read(folder, "moe")
    if not size(table):
        return
    work = tuple(name for name in table if name not in ("device", "engine_version", "time_seconds"))
    found = timed(table, ("device",), work)
    yield from gathered("experts", "one kernel, two related devices", found, [((a,), (b,)) for a, b in RELATIVES])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with kernels_gemm_*.csv and kernels_moe_*.csv")
    folder = parser.parse_args().folder
    print("| kernel | measured twice by | pairs | ratio | disagreement | without the ratio |")
    print("|---|---|---:|---:|---:|---:|")
    print(*products(folder), *experts(folder), sep="\n")


if __name__ == "__main__":
    main()
