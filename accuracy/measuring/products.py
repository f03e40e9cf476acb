"""Matrix products as a linear layer makes them: forward, input gradient and weight gradient; and those of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from accuracy.measuring.tables import Tables
from shardwise.measuring import WIDTHS, Machine, TimedCase, Timing, product_of, ring, torch_dtype, values

DTYPES = {dtype: torch_dtype(dtype) for dtype in WIDTHS}

_SIDES = ((256, 256), (512, 512), (1024, 512), (512, 1408), (2816, 512), (768, 768), (3072, 768), (768, 3072),
          (1024, 1024), (4096, 1024), (2048, 2048), (8192, 512), (16384, 256))  # fmt: skip
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_LARGE = ((4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (28672, 4096), (8192, 8192))
_LARGE_ROWS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
_MOST_FLOPS = {"cpu": 2.5e10, "cuda": 4e13}
STAGES = (("fwd", "TN"), ("bwd_input", "NN"), ("bwd_weight", "NT"))


def shapes(device: str, quick: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (m, n, k) of the products of a device's kind, rows last in the order of a grid."""
    sides, rows = (_SIDES, _ROWS) if device == "cpu" else (_LARGE, _LARGE_ROWS)
    if quick:
        sides, rows = sides[:2], rows[:3]
    for n, k in sides:
        for m in rows:
            if 2.0 * m * n * k <= _MOST_FLOPS[device]:
                yield m, n, k


def products(machine: Machine, tables: Tables, peaks: dict[str, float], quick: bool) -> Iterator[TimedCase]:
    """Yield every product in its three stages: one row of kernels_gemm (forward) and of op_efficiency (all) each."""
    for dtype in DTYPES:
        for mnk in shapes(machine.device, quick):
            for stage, layout in STAGES:
                if stage != "fwd" and mnk[0] < 64:
                    continue
                yield TimedCase(
                    f"product {dtype} {stage} {mnk}",
                    product_of(stage, mnk, machine.device, dtype),
                    _recorder(machine, tables, peaks.get(dtype, 0.0), (dtype, stage, layout), mnk),
                )


def _recorder(
    machine: Machine, tables: Tables, peak: float, kind: tuple[str, str, str], mnk: tuple[int, int, int]
) -> Callable[[Timing], None]:
    (dtype, stage, layout), (m, n, k) = kind, mnk
    sizes = {"fwd": (m, n, k), "bwd_input": (m, k, n), "bwd_weight": (n, k, m)}[stage]

    def row(timing: Timing) -> None:
        if stage == "fwd":
            tables.add(
                "kernels_gemm", device=machine.key, engine=machine.engine, engine_version=machine.torch_version,
                citation=machine.citation,
                dtype=dtype, m=m, n=n, k=k, time_seconds=timing.seconds, spread=timing.spread,
            )  # fmt: skip
        rate = 2.0 * m * n * k / timing.seconds
        tables.add(
            "op_efficiency", op="matmul", device=machine.key, dtype=dtype, stage=stage, batch=1, m=sizes[0],
            n=sizes[1], k=sizes[2], layout=layout, accumulate=0, out_dtype=dtype, peak_flops=peak,
            achieved_fraction=rate / peak if peak else "", time_seconds=timing.seconds, spread=timing.spread,
            source=machine.citation,
        )  # fmt: skip

    return row


_EXPERTS = ((8, 2, 256, 512), (8, 2, 512, 1024), (16, 4, 256, 256))


def _layer(machine: Machine, dtype: str, shape: tuple[int, ...]) -> Callable[[int], Any]:
    from accuracy.measuring.models import run_experts

    E, top, D, F, T = shape
    kind = DTYPES[dtype]

    def weights() -> Any:
        up = values(E, 2 * F, D, dtype=kind, device=machine.device)
        return up, values(E, D, F, dtype=kind, device=machine.device)

    layers = ring(weights, WIDTHS[dtype] * E * 3 * D * F)
    x = values(T, D, dtype=kind, device=machine.device)
    chosen = torch.rand(T, E, device=machine.device).topk(top, -1).indices
    share = torch.full((T, top), 1.0 / top, device=machine.device, dtype=kind)

    def call(i: int) -> Any:
        with torch.no_grad():
            return run_experts(x, chosen, share, *layers[i % len(layers)])

    return call


def _experts_row(machine: Machine, tables: Tables, dtype: str, shape: tuple[int, ...], timing: Timing) -> None:
    E, top, D, F, T = shape
    tables.add(
        "kernels_moe", device=machine.key, engine=machine.engine, engine_version=machine.torch_version,
        citation=machine.citation, dtype=dtype,
        kernel="loop", num_tokens=T, hidden_size=D, intermediate_size=F, top_k=top, num_experts=E, moe_tp=1, moe_ep=1,
        routing="balanced", time_seconds=timing.seconds, spread=timing.spread,
    )  # fmt: skip


def experts(machine: Machine, tables: Tables, quick: bool) -> Iterator[TimedCase]:
    """Yield forward passes of a layer of gated experts over sorted rows, one product an expert: rows of kernels_moe."""
    for dtype in DTYPES:
        for layer in _EXPERTS[: 1 if quick else None]:
            for T in (1, 4, 16, 64, 256, 1024):
                shape = (*layer, T)
                yield TimedCase(
                    f"experts {dtype} {shape}",
                    partial(_layer, machine, dtype, shape),
                    partial(_experts_row, machine, tables, dtype, shape),
                )
