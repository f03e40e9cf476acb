"""Fit the constants of the cost layer to tables of measured kernels, or check stored ones on other tables.

`python -m accuracy.calibration FOLDER` reads kernels_*.csv and collectives_*.csv of the folder, prints what the fit
leaves by device, kernel and engine, and the number of constants; `--write` stores the constants in
src/shardwise/cost/constants.toml. `--only products,experts` fits those kinds of kernel and leaves the other constants
as they are stored. `--check` fits nothing: it prints the residuals of the stored constants, and with `--markdown` as
the tables of accuracy/notes/residuals.md. The columns are described in accuracy/notes/calibration.md.
"""

from __future__ import annotations

import argparse
import sys
import time
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from accuracy.calibration import attention, experts, links, products, reduces
from accuracy.calibration.tables import FAMILIES, read
from shardwise.cost import completed
from shardwise.cost import stored as everything

TARGET = Path(__file__).parents[2] / "src" / "shardwise" / "cost" / "constants.toml"
# What may be fitted alone: its word here, and the name of its tables in every family of the constants.
KINDS = {
    "products": "matmul",
    "collectives": "fast",
    "all_reduce": "all_reduce",
    "network": "network",
    experts.WORD: experts.WORD,
    **{k.word: k.word for k in attention.KINDS},
}
HEADER = (
    "# Written by `python -m accuracy.calibration FOLDER --write`: do not edit, rerun. Every entry states its source\n"
    "# and what the fit leaves. Efficiencies are fractions of the datasheet's dense peak or bandwidth, seconds are\n"
    "# per kernel or step; forms: accuracy/notes/calibration.md.\n"
)


def _text(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, int):
        return str(value)
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{k} = {_text(v)}' for k, v in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    text = f"{value:.4g}"
    return text if set(text) & set(".e") else f"{text}.0"


def _keys(path: tuple[str, ...]) -> str:
    return ".".join(f'"{key}"' if "." in key else key for key in path)


def entries(path: tuple[str, ...], table: dict[str, Any], date: str) -> Iterator[str]:
    """Yield the lines of a nested table, with a date beside every source: its own, or that of today.

    Tables of whole numbers, which constant a kernel takes, stand on one line.
    """
    plain = {k: v for k, v in table.items() if not isinstance(v, dict) or (v and set(map(type, v.values())) == {int})}
    if plain:
        yield f"\n[{_keys(path)}]"
        for name, value in plain.items():
            yield f"{name} = {_text(value)}"
        if "source" in plain and "date" not in plain:
            yield f'date = "{date}"'
    for name, value in table.items():
        if name not in plain and value:
            yield from entries((*path, name), value, date)


def fitted(folder: Path, only: tuple[str, ...]) -> dict[str, Any]:
    """Return the constants of some kinds of kernel by family."""
    found: dict[str, Any] = {family: {} for family in FAMILIES}
    for word, module, kind in (("products", products, "gemm"), ("collectives", links, "collective")):
        began = time.perf_counter()
        for family, rows in module.calibrate(read(folder, kind)).items() if word in only else ():
            found[family][KINDS[word]] = rows
        print(f"# {word}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    table = links.read_across(folder) if "network" in only else None
    if table:
        fast = found["ampere"].get("fast") or stored()["ampere"]["fast"]
        found["network"] = {"verbs": links.calibrate_across(table, fast)}
    own = reduces.calibrate(folder) if "all_reduce" in only else ()
    layers = experts.calibrate(folder) if experts.WORD in only else ()
    for path, row in (*own, *layers, *attention.calibrate(folder, only)):
        place = found
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = row
    return found


def stored() -> dict[str, Any]:
    """Return the constants as the calibration last wrote them, without what single sources state."""
    return tomllib.loads(TARGET.read_text(encoding="utf-8"))


def renewed(table: dict[str, Any], found: dict[str, Any], only: tuple[str, ...]) -> dict[str, Any]:
    """Return stored constants with some kinds of kernel put in place of theirs."""
    for family, rows in found.items():
        for word in only:
            name = "verbs" if family == "network" else KINDS[word]
            if name in rows:
                table.setdefault(family, {})[name] = rows[name]
    return table


def leftovers(folder: Path, table: dict[str, Any], only: tuple[str, ...]) -> list[tuple[str, str, str, Any]]:
    """Return (device, kind of kernel, engine, errors) of constants on the tables of a folder."""
    found: list[tuple[str, str, str, Any]] = []
    for word, module, kind in (("products", products, "gemm"), ("collectives", links, "collective")):
        rows = read(folder, kind) if word in only else {}
        found += module.residuals(rows, table) if rows else []
    across = links.read_across(folder) if "network" in only else {}
    found += links.residuals_across(across, table) if across else []
    found += reduces.residuals(folder, table) if "all_reduce" in only else []
    found += experts.residuals(folder, table) if experts.WORD in only else []
    return found + attention.residuals(folder, table, only)


def count(table: dict[str, Any], others: Collection[str] = ()) -> int:
    """Return how many numbers a nested table holds, less those of other devices."""
    return sum(
        count(v, others) if isinstance(v, dict) else sum(map(bool, v)) if isinstance(v, list) else isinstance(v, float)
        for name, v in table.items()
        if name not in others
    )


def counts(table: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each family: the numbers that it holds, and those that one of its devices takes."""
    for family, rows in table.items():
        devices = FAMILIES.get(family, ())
        each = (f"{device} {count(rows, set(devices) - {device})}" for device in devices)
        yield ": ".join(filter(None, (f"- constants of {family}, {count(rows)}", ", ".join(each))))


def report(found: list[tuple[str, str, str, Any]], markdown: bool) -> Iterator[str]:
    """Yield one line for each device, kernel and engine: rows, median of the errors, of their sizes, and 90 %."""
    import numpy as np

    def line(*cells: str) -> str:
        return f"| {' | '.join(cells)} |" if markdown else "  ".join(f"{cell:<25}" for cell in cells)

    yield line("device", "kernel", "engine", "rows", "bias", "median", "90 %")
    if markdown:
        yield "|---|---|---|---:|---:|---:|---:|"
    for device, kind, engine, errors in found:
        low, high = (f"{100 * v:.1f} %" for v in np.quantile(np.abs(errors), (0.5, 0.9)))
        yield line(device, kind, engine, str(len(errors)), f"{100 * np.median(errors):+.1f} %", low, high)
    yield ""
    for kind in dict.fromkeys(row[1] for row in found):
        every = np.abs(np.concatenate([row[3] for row in found if row[1] == kind]))
        low, high = (f"{100 * v:.1f} %" for v in np.quantile(every, (0.5, 0.9)))
        yield f"- {kind}: median {low}, 90 % {high}, {len(every)} rows"


def main() -> int:
    """Fit or check, print, and store when told to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with kernels_*.csv and collectives_*.csv")
    parser.add_argument("--write", action="store_true", help="store the constants in the package")
    parser.add_argument("--check", action="store_true", help="fit nothing, check the stored constants")
    parser.add_argument("--markdown", action="store_true", help="print a table for the documentation")
    parser.add_argument("--only", default=",".join(KINDS), help=f"kinds of kernel, of {','.join(KINDS)}")
    given = parser.parse_args()
    only = tuple(given.only.split(","))
    if not set(only) <= set(KINDS):
        parser.error(f"--only takes {', '.join(KINDS)}")
    table = everything() if given.check else renewed(stored(), fitted(given.folder, only), only)
    whole = table if given.check else completed(table)
    print(*report(leftovers(given.folder, whole, only), given.markdown), sep="\n")
    if not given.check:
        print(*counts(table), sep="\n")
    if given.write:
        # Another kind may have been stored while this one was fitted.
        table = renewed(stored(), table, only)
        lines = [line for family, rows in table.items() for line in entries((family,), rows, time.strftime("%Y-%m"))]
        TARGET.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
