"""Constants of a CPU from its measured kernels alone; steps are never looked at.

Forms: accuracy/notes/calibration.md.

`python -m accuracy.measuring FOLDER --fit KEY` reads FOLDER/*_own.csv and writes src/shardwise/cost/cpu.toml.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from accuracy.calibration.minimise import fit, loss
from accuracy.calibration.tables import Table, errors, held, pick, read_files, size, summary, where
from shardwise.cost import (
    MEASURED_KERNELS,
    AttentionBlocks,
    Efficiencies,
    Gemm,
    blocked_flops,
    gemm_rates,
    gemm_seconds,
    record,
)
from shardwise.hardware import Device, find_device

WIDTHS = {"fp32": 4.0, "bf16": 2.0}
_ANY = Efficiencies()
_PRODUCT = {"compute": 0.85, "memory": 0.4, "start_seconds": 5e-6, "sharpness": 1.3, "depth": 10.0,
            "write_share": 0.5}  # fmt: skip
_PRODUCT_MOST = {"compute": 1.0, "memory": 1.5, "sharpness": 8.0, "depth": 400.0, "start_seconds": 1e-4}
# A CPU has no tiles to run in waves: nothing is charged for their loads, their joining or a warm-up.
_PLAIN = {"whole": True, "balance": 0.0, "split_seconds": 0.0}
_ATTENTION = {"forward": 0.7, "backward": 0.7, "forward_rows": 20.0, "backward_rows": 20.0, "start_seconds": 1e-5}
BLOCK_KEYS = 512.0
TARGET = Path(__file__).parents[2] / "src" / "shardwise" / "cost" / "cpu.toml"
HEADER = (
    "# Written by `python -m accuracy.measuring FOLDER --fit KEY`: do not edit, rerun. All from kernels, none from\n"
    "# steps; shares of `kinds` are of the rate of copies, [forward, backward]. Forms: accuracy/notes/calibration.md.\n"
)
REST = """
[cpu.weight_gradient]
rate = 1.0
source = "{source}: products of the three passes keep the same share of the peak"
date = "{date}"

[cpu.grouped]
in_turn = true
compute = 1.0
input_gradient = 1.0
weight_gradient = 1.0
start_seconds = 0.0
source = "{source}: experts run one after the other, each as plain products"

# Other CPUs: the nearest that was measured.
[cpu-other]
extends = "cpu"
devices = ["cpu"]
note = "no kernel measurements; constants of two Zen 4 cores"
"""


def own(folder: Path, table: str) -> Table:
    """Return the columns of a table that was measured."""
    return read_files([folder / f"{table}_own.csv"])


def quiet(rows: Table) -> Table:
    """Return the rows whose repeats agree."""
    return where(rows, rows["spread"] <= 0.10)


def _left(errors_of: Callable[[dict[str, float], Table], Any], rows: Table, mask: Any, search: Any) -> tuple[Any, str]:
    """Return constants of all rows, and in words what they leave, on shapes that were held out too."""
    half, whole = search(where(rows, ~mask)), search(rows)
    apart = summary(errors_of(half, where(rows, mask)))
    return whole, f"{summary(errors_of(whole, rows))}; shapes not fitted: {apart}"


def products(rows: Table, device: Device, dtype: str) -> dict[str, Any]:
    """Return the row of matrix products of a data type, from all three stages."""
    rows, width = quiet(pick(rows, op="matmul", dtype=dtype)), WIDTHS[dtype]

    def seconds(p: dict[str, float], t: Table) -> Any:
        m, n, k = t["m"], t["n"], t["k"]
        rates = gemm_rates(device, dtype, record(Gemm, {**_PLAIN, **p}, "fit"), _ANY)
        return gemm_seconds(rates, (m, n, k, 1.0), width * (m * k + n * k + m * n))

    def search(t: Table) -> dict[str, float]:
        return fit(lambda p: loss(seconds(p, t), t["time_seconds"]), _PRODUCT, _PRODUCT_MOST, 300)

    found, left = _left(lambda p, t: errors(seconds(p, t), t), rows, held(rows, "n", "k"), search)
    return {**found, **_PLAIN, "residual": left}


def attention(rows: Table, device: Device, dtype: str) -> dict[str, Any]:
    """Return the row of fused causal attention of a data type, both passes."""
    rows = quiet(pick(rows, op="attention", dtype=dtype))

    def seconds(p: dict[str, float], t: Table) -> Any:
        S, peak = t["seq"], device.peak_flops(dtype)
        flops = 4 * t["batch"] * t["heads"] * t["qk_head_dim"] * S * (S + 1) / 2
        b = AttentionBlocks(BLOCK_KEYS, p["forward_rows"], p["backward_rows"])
        ahead = _blocked(b, flops, S, False) / (p["forward"] * peak)
        back = _blocked(b, 2.5 * flops, S, True) / (p["backward"] * peak)
        return np.where(t["stage"] == "fwd", ahead, back) + p["start_seconds"]

    def search(t: Table) -> dict[str, float]:
        most = {"forward": 1.5, "backward": 1.5, "forward_rows": 300.0, "backward_rows": 300.0}
        return fit(lambda p: loss(seconds(p, t), t["time_seconds"]), _ATTENTION, most, 300)

    found, left = _left(lambda p, t: errors(seconds(p, t), t), rows, held(rows, "heads", "qk_head_dim"), search)
    return {**found, "block_keys": BLOCK_KEYS, "residual": left}


def cached(rows: Table, device: Device, dtype: str) -> dict[str, float]:
    """Return the constants of one query over a cache."""
    rows = quiet(pick(rows, kv_dtype=dtype))
    B, N, K, H, L = (rows[k] for k in ("batch", "num_heads", "num_kv_heads", "head_dim", "prefix_tokens"))
    peaks = (device.peak_flops(dtype), device.memory_bytes_per_second)

    def seconds(p: dict[str, float]) -> Any:
        flops, moved = 4 * B * N * H * (L + 1), 2 * WIDTHS[dtype] * B * K * H * (L + 1)
        return flops / (p["compute"] * peaks[0]) + moved / (p["memory"] * peaks[1]) + p["start_seconds"]

    start = {"compute": 0.05, "memory": 0.3, "start_seconds": 2e-5}
    found = fit(lambda p: loss(seconds(p), rows["time_seconds"]), start, {"memory": 2.0}, 300)
    return {f"cached_{k}": v for k, v in found.items()} | {"cached_residual": summary(errors(seconds(found), rows))}


def _blocked(b: AttentionBlocks, flops: Any, S: Any, backward: bool) -> Any:
    pairs = ((float(f), float(s)) for f, s in zip(flops, S, strict=True))
    return np.array([blocked_flops(b, f, (s, (s + 1) / 2), backward) for f, s in pairs])


def streams(rows: Table, device: Device, dtype: str) -> dict[tuple[str, str], tuple[float, float]]:
    """Return (bytes/s, seconds of start) of operators that move bytes by (kind, pass)."""
    rows, found = quiet(where(rows, rows["dtype"] == dtype)), {}
    for op, (kind, _) in MEASURED_KERNELS.items():
        for word in ("forward", "backward", ""):
            t = where(rows, rows["op"] == (f"{op}_{word}" if word else op))
            if size(t):
                p = fit(partial(_stream_cost, t), {"rate": 3e10, "start_seconds": 1e-5}, {}, 200)
                found[kind, word] = (p["rate"], p["start_seconds"])
    return found


def _stream_seconds(t: Table, p: dict[str, float]) -> Any:
    return t["bytes_total"] / p["rate"] + p["start_seconds"]


def _stream_cost(t: Table, p: dict[str, float]) -> float:
    return loss(_stream_seconds(t, p), t["time_seconds"])


def memory(rows: Table, device: Device) -> dict[str, Any]:
    """Return the row of operators that move bytes: shares of the rate of copies by data type and kind, one start.

    The start is what one kernel takes beside its bytes: the median over kinds and passes, by the kernels of each.
    """
    by_type = {dtype: streams(rows, device, dtype) for dtype in WIDTHS}
    copies = by_type["fp32"]["other", ""][0]
    counts = dict(MEASURED_KERNELS.values())
    starts = [s / counts[kind] for found in by_type.values() for (kind, _), (_, s) in found.items()]
    kinds: dict[str, Any] = {}
    for dtype, found in by_type.items():
        for (kind, word), (rate, _) in found.items():
            pair = kinds.setdefault(dtype, {}).setdefault(kind, [1.0, 1.0])
            for i in (0, 1) if not word else (("forward", "backward").index(word),):
                pair[i] = rate / copies
    return {
        "efficiency": copies / device.memory_bytes_per_second, "start_seconds": float(np.median(starts)),
        "kinds_by_type": kinds,
    }  # fmt: skip


def fitted(folder: Path, key: str) -> dict[str, Any]:
    """Return the table of constants of a CPU from the kernels in a folder."""
    device = find_device(key).device
    efficiency, moved = own(folder, "op_efficiency"), own(folder, "kernels_memory")
    caches = own(folder, "kernels_attention_decode")
    by_type = {dtype: attention(efficiency, device, dtype) | cached(caches, device, dtype) for dtype in WIDTHS}
    return {
        "matmul": {dtype: products(efficiency, device, dtype) for dtype in WIDTHS},
        "attention": {**by_type["fp32"], "by_type": by_type},
        "memory": memory(moved, device),
    }


def main(folder: Path, key: str, write: bool = True) -> None:
    """Print the constants and store them."""
    table = fitted(folder, key)
    text = toml(table, key, str(own(folder, "kernels_memory")["engine_version"][0]))
    print(text)
    if write:
        TARGET.write_text(text, encoding="utf-8")


def toml(table: dict[str, Any], key: str, version: str) -> str:
    """Return the file of constants."""
    full = find_device(key).device.full_name
    source = f"benchmarks/measure.py on {full}, torch {version}, {time.strftime('%Y-%m-%d')}"
    lines = [HEADER, "[cpu]", f'extends = "generic"\ndevices = ["{key}"]\nnote = ""']
    lines += [line for name, row in table.items() for line in _lines(("cpu", name), row, source)]
    lines.append(REST.format(source=source, date=time.strftime("%Y-%m")))
    return "\n".join(lines)


def _lines(path: tuple[str, ...], table: dict[str, Any], source: str) -> Iterator[str]:
    plain = {k: v for k, v in table.items() if not isinstance(v, dict)}
    if plain:
        yield f"\n[{'.'.join(path)}]"
        for name, value in plain.items():
            key = f'"{name}"' if " " in name else name
            yield f"{key} = " + (f'"{value}"' if isinstance(value, str) else _number(value))
        if not isinstance(next(iter(plain.values())), list):
            yield f'source = "{source}"\ndate = "{time.strftime("%Y-%m")}"'
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _lines((*path, name), value, source)


def _number(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_number, value))}]"
    return f"{value:.4g}" if value else "0.0"
