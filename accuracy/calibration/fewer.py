"""Compare the constants of GEMMs with ten numbers, on rows that neither was fitted on.

`python -m accuracy.calibration.fewer FOLDER` fits by one loss on the same tables, without a quarter of the shapes (four
times), each device of a family and each engine, and prints median and nine of ten of the errors on what was left out.
`all` are ten numbers for every type and engine of a family, `each` ten for each type beside each engine's kernel that
quantises, `form` the constants that ship. `--operators CSV` adds GEMMs of training from another source.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from accuracy.calibration import products
from accuracy.calibration.__main__ import stored
from accuracy.calibration.minimise import Squares
from accuracy.calibration.products import LIMITS, NO_VECTORS, OWN, QUANTISE, START, WIDE_INPUT, Groups, Search, mean
from accuracy.calibration.tables import FAMILIES, errors, folds, read, read_files, size, where
from accuracy.kernels.tables import ENGINES
from accuracy.kernels.types import types_of
from shardwise.cost import ELEMENT_BYTES, Efficiencies, Gemm, gemm_rates, gemm_seconds, record
from shardwise.hardware import find_device

# What families share: as a search begins with them, between those fitted, and a kernel of its own for one row or none.
COMMON = START | {"unset_left": 0.1}
VECTORS = {"ampere": 0.05, "ada": 0.05, "blackwell-gddr": 0.05}
TEN = ("compute", "memory", "start_seconds", "depth", "balance", "chain_seconds", "ramp_seconds", "burst_share",
       "write_share", "cached_share")  # fmt: skip
# Types with quantised inputs start and lose their clock as 16 bits do; weights alone in few bits have a start.
NARROW = (*(name for name in TEN if name not in ("start_seconds", "burst_share")), "split_seconds", "sharpness")
# What halving a type keeps of the share of the peak, and one kernel that quantises, make them ten for all types.
ALL = (*(name for name in TEN if name not in ("depth", "balance", "burst_share")), "narrow",
       *(f"all.{name}" for name in QUANTISE))  # fmt: skip
BEGIN = START | {"narrow": 0.9}


def row_of(values: dict[str, float], dtype: str, family: str) -> dict[str, Any]:
    """Return the constants of a type that some numbers stand for; a narrower element brings more of k a load."""
    row: dict[str, Any] = COMMON | {"vector_wait_share": VECTORS.get(family, 1.0)}
    row |= {name: value for name, value in values.items() if name in START}
    width = ELEMENT_BYTES[types_of("products")[dtype].peak] / 2 if "narrow" in values else 1.0
    row["compute"] *= values.get("narrow", 1.0) ** -float(np.log2(width))
    row["chain_seconds"] *= width
    if dtype in WIDE_INPUT:
        return row
    casts = [name.partition(".")[0] for name in values if "." in name]
    quantise = {ENGINES.get(e, e): {name: values[f"{e}.{name}"] for name in QUANTISE} for e in casts}
    return with_casts(row | NO_VECTORS | {"quantise": quantise})


def with_casts(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row where engines without tables quantise at the middle of the others."""
    casts = list(row.get("quantise", {}).values())
    middle = {name: mean(cast[name] for cast in casts) for name in QUANTISE} if casts else {}
    return row | ({"quantise": dict.fromkeys(ENGINES.values(), middle) | row["quantise"]} if casts else {})


def ten(types: dict[str, Groups], family: str, names: tuple[str, ...], given: dict[str, float]) -> dict[str, float]:
    """Return the numbers at which the loss of the calibration is least, beside those that are given."""
    cases = [(dtype, key, rows) for dtype, groups in types.items() for key, rows in groups.items()]
    searches = {dtype: Search(groups, dtype, dict(START), {}) for dtype, groups in types.items()}

    def off(z: Any) -> Any:
        values = given | dict(zip(names, np.exp(z).tolist(), strict=True))
        rows_of = {dtype: row_of(values, dtype, family) for dtype in types}
        return np.concatenate([searches[dtype].off(key, rows, rows_of[dtype]) for dtype, key, rows in cases])

    search = Squares(off, np.concatenate([np.full(size(rows), 1 / size(rows)) for *_, rows in cases]))
    first = BEGIN | given
    start = np.log([first[name] if name in first else QUANTISE[name.partition(".")[2]] for name in names])
    top = np.log([LIMITS.get(name.rpartition(".")[2], 1e9) for name in names])
    found = search.solve(start, top, 60)
    return given | dict(zip(names, np.exp(found).tolist(), strict=True))


def fitted(types: dict[str, Groups], family: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (fit, type, row of constants) of a family; types with quantised inputs start as 16 bits do."""
    values, wide = ten(types, family, ALL, {}), ten({"bf16": types["bf16"]}, family, TEN, {})
    first = products.fit_row(types["bf16"])
    form = {name: first[name] for name in START}
    for dtype, groups in types.items():
        yield "all", dtype, row_of(values, dtype, family)
        if dtype == "bf16":
            yield from (("each", dtype, row_of(wide, dtype, family)), ("form", dtype, first))
            continue
        casts = [f"{e}.{name}" for e in sorted({key[1] for key in groups}) for name in QUANTISE]
        names = (*NARROW[:-1], "start_seconds") if dtype in WIDE_INPUT else (*NARROW, *casts)
        yield "each", dtype, row_of(ten({dtype: groups}, family, names, wide), dtype, family)
        base = form | (NO_VECTORS if dtype not in WIDE_INPUT else {})
        row = begun(stored()[family]["matmul"][types_of("products")[dtype].row], groups, dtype, form)
        row = products.centred(products.solved(groups, dtype, row, base))
        middle = {n: mean(own[n] for own in row["engines"].values()) for n in OWN[:2]} if "engines" in row else {}
        yield "form", dtype, base | with_casts(middle | row)


def begun(row: dict[str, Any], groups: Groups, dtype: str, form: dict[str, float]) -> dict[str, Any]:
    """Return the constants that a stored row has, as a search without some devices and engines begins with them."""
    engines, devices = {ENGINES[key[1]] for key in groups}, {key[0] for key in groups}
    left = {*(NO_VECTORS if dtype not in WIDE_INPUT else ()), *(OWN if "engines" in row else ())}
    found: dict[str, Any] = {name: form[name] for name in START if name in row and name not in left}
    found |= {n: dict.fromkeys(sorted(devices), 1.0) for n in products.FACTORS if n in row and len(devices) > 1}
    if "engines" in row:
        found["engines"] = {e: {n: form[n] for n in own} for e, own in row["engines"].items() if e in engines}
    return found | ({"quantise": {e: dict(QUANTISE) for e in sorted(engines)}} if "quantise" in row else {})


def kept(types: dict[str, Groups], mask: Any) -> dict[str, Groups]:
    """Return the rows of a mask by the (device, engine) of their table."""
    parts = {d: {key: where(rows, mask(key, rows)) for key, rows in groups.items()} for d, groups in types.items()}
    return {
        d: some for d, groups in parts.items() if (some := {key: rows for key, rows in groups.items() if size(rows)})
    }


def apart(types: dict[str, Groups], family: str, leave: str) -> Iterator[tuple[str, str, str, Any]]:
    """Yield (what is left out, type, fit, errors) of a family."""
    masks: list[tuple[str, Any]] = [
        ("shapes", lambda _, rows, fold=fold: folds(rows, "n", "k") == fold) for fold in range(4)
    ]
    for place, word in enumerate(("device", "engine")):
        names = sorted({key[place] for groups in types.values() for key in groups})
        of = [lambda key, rows, name=name, at=place: np.full(size(rows), key[at] == name) for name in names]
        masks += [(word, mask) for mask in of if len(of) > 1]
    for word, mask in [one for one in masks if one[0] in leave.split(",")]:
        out, seen = kept(types, mask), kept(types, lambda key, rows, mask=mask: ~mask(key, rows))
        for name, dtype, row in fitted(seen, family):
            for key, rows in out.get(dtype, {}).items():
                yield word, dtype, name, errors(products.stated(rows, key, row, dtype), rows)


def operators(path: Path, device: str, row: dict[str, Any]) -> Any:
    """Return errors of GEMMs in 16 bits of another source, whose clock is another: with the best factor of the rate."""
    rows = read_files([path])
    rows = where(rows, (rows["op"] == "matmul") & (rows["device"] == device))
    names = ("batch", "m", "n", "k", "peak_flops", "achieved_fraction")
    b, m, n, k, peak, reached = (np.nan_to_num(rows[name], nan=1.0) for name in names)
    gemm, found = replace(record(Gemm, row, "fit"), burst_share=0.0), find_device(device).device

    def off(share: float) -> Any:
        rates = gemm_rates(found, "bf16", replace(gemm, steady_state_share=share), Efficiencies())
        seconds = gemm_seconds(rates, (m, n, k, b), 2 * b * (m * k + k * n + m * n))
        return seconds / (2 * b * m * n * k / (peak * reached)) - 1

    return min((off(share) for share in np.arange(0.6, 1.3, 0.01)), key=lambda one: np.median(np.abs(one)))


def main() -> None:
    """Print the errors of all fits on rows left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with kernels_gemm_*.csv")
    parser.add_argument("--operators", type=Path, help="efficiencies of GEMMs that training runs")
    parser.add_argument("--families", default=",".join(FAMILIES), help=f"of {','.join(FAMILIES)}")
    parser.add_argument("--leave", default="shapes,device,engine", help="what is left out")
    given = parser.parse_args()
    table, found = read(given.folder, "gemm"), dict[tuple[str, ...], list[Any]]()
    for family in given.families.split(","):
        types = {d: groups for d in products.TYPES if (groups := products.parts(table, family, d))}
        for word, dtype, name, off in apart(types, family, given.leave):
            for label in (dtype, "every type"):
                found.setdefault((family, word, label, name), []).append(off)
        for device in {"ampere": ["a100-pcie-80gb"], "blackwell": ["b200-sxm-180gb"]}.get(family, ()):
            for name, _, row in fitted({"bf16": types["bf16"]}, family) if given.operators else ():
                found[family, "other source", device, name] = [operators(given.operators, device, row)]
        for words, offs in ((words, np.concatenate(offs)) for words, offs in found.items() if words[0] == family):
            low, high = 100 * np.quantile(np.abs(offs), (0.5, 0.9))
            print(*words, f"{len(offs)} rows, {low:.1f} %, {high:.1f} %", sep=", ", flush=True)


if __name__ == "__main__":
    main()
