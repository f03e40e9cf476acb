"""Attention kernels: a prompt forward and backward (causal), and one new token over a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from accuracy.measuring.products import DTYPES, WIDTHS
from accuracy.measuring.tables import Tables
from shardwise.measuring import Machine, TimedCase, Timing, ring, values

_PROMPTS = {"cpu": ((1, 64), (1, 128), (4, 128), (8, 128), (2, 256), (4, 256), (1, 512), (2, 512), (1, 1024),
                    (1, 2048)),
            "cuda": ((1, 512), (4, 512), (1, 2048), (4, 2048), (1, 8192), (2, 8192), (1, 32768))}  # fmt: skip
_HEADS = {"cpu": ((4, 4, 64), (8, 4, 64), (8, 8, 64), (12, 12, 64), (16, 4, 64), (8, 8, 128)),
          "cuda": ((32, 8, 128), (32, 32, 128), (64, 8, 128), (16, 16, 64))}  # fmt: skip
_CACHES = {"cpu": ((1, 128), (1, 512), (1, 2048), (4, 256), (4, 1024), (16, 128), (16, 512)),
           "cuda": ((1, 1024), (1, 16384), (16, 1024), (16, 8192), (128, 1024))}  # fmt: skip
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


def _sdpa(q: Any, k: Any, v: Any, causal: bool, backend: str) -> Any:
    shared = q.shape[1] != k.shape[1]
    if not backend:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared)
    with sdpa_kernel(BACKENDS[backend]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared)


def _prompt(
    machine: Machine, dtype: str, shape: tuple[int, ...], backend: str, backward: bool
) -> Callable[[], Callable[[int], Any]]:
    B, S, N, K, H = shape

    def make() -> Callable[[int], Any]:
        def one() -> Any:
            # As projections leave them: token by token, heads side by side.
            return tuple(
                values(B, S, heads, H, dtype=DTYPES[dtype], device=machine.device).transpose(1, 2).requires_grad_()
                for heads in (N, K, K)
            )

        inputs = ring(one, WIDTHS[dtype] * B * S * H * (N + 2 * K))
        results: list[Any] = [None] * len(inputs)
        if not backward:

            def call(i: int) -> None:
                with torch.no_grad():
                    results[i % len(results)] = _sdpa(*inputs[i % len(inputs)], True, backend)

            return call
        outputs = [_sdpa(*one, True, backend) for one in inputs]
        gradient = values(*outputs[0].shape, dtype=DTYPES[dtype], device=machine.device)

        def back(i: int) -> None:
            j = i % len(inputs)
            results[j] = torch.autograd.grad(outputs[j], inputs[j], gradient, retain_graph=True)

        return back

    return make


def prompts(machine: Machine, tables: Tables, peaks: dict[str, float], quick: bool) -> Iterator[TimedCase]:
    """Yield causal attention of prompts, forward (kernels_attention_prefill) and both passes (op_efficiency)."""
    backends = [""] if machine.device == "cpu" else list(BACKENDS)
    heads, sizes = _HEADS[machine.device], _PROMPTS[machine.device]
    for dtype in DTYPES:
        for N, K, H in heads[: 1 if quick else None]:
            for B, S in sizes[: 2 if quick else None]:
                for backend in backends:
                    if backend == "flash" and dtype == "fp32":
                        continue
                    if backend == "math" and S > 2048:
                        continue
                    for backward in (False, True):
                        shape = (B, S, N, K, H)
                        yield TimedCase(
                            f"attention {dtype} {backend} {'bwd' if backward else 'fwd'} {shape}",
                            _prompt(machine, dtype, shape, backend, backward),
                            _prompt_row(machine, tables, peaks.get(dtype, 0.0), (dtype, backend, backward), shape),
                        )


def _prompt_row(
    machine: Machine, tables: Tables, peak: float, kind: tuple[str, str, bool], shape: tuple[int, ...]
) -> Callable[[Timing], None]:
    (dtype, backend, backward), (B, S, N, K, H) = kind, shape

    def row(timing: Timing) -> None:
        if not backward:
            _add(tables, "kernels_attention_prefill", machine, (dtype, backend), (B, S, 0, N, K, H), timing)
        dense = 4.0 * B * N * S * S * H * (2 if backward else 1)
        tables.add(
            "op_efficiency", op="attention", device=machine.key, dtype=dtype, stage="bwd" if backward else "fwd",
            batch=B, seq=S, heads=N, kv_heads=K, qk_head_dim=H, v_head_dim=H, peak_flops=peak,
            achieved_fraction=dense / timing.seconds / peak if peak else "", time_seconds=timing.seconds,
            spread=timing.spread, layout=backend, source=machine.citation,
        )  # fmt: skip

    return row


def _add(
    tables: Tables, name: str, machine: Machine, kind: tuple[str, str], shape: tuple[int, ...], timing: Timing
) -> None:
    (dtype, backend), (B, S, past, N, K, H) = kind, shape
    engine = f"{machine.engine}-{backend}" if backend else machine.engine
    tables.add(
        name, device=machine.key, engine=engine, engine_version=machine.torch_version,
        citation=machine.citation, attention_dtype=dtype,
        kv_dtype=dtype, batch=B, query_tokens=S, prefix_tokens=past, num_heads=N, num_kv_heads=K, head_dim=H,
        sliding_window=0, time_seconds=timing.seconds, spread=timing.spread,
    )  # fmt: skip


def _over_cache(machine: Machine, dtype: str, shape: tuple[int, ...]) -> Callable[[int], Any]:
    B, past, N, K, H = shape
    kind = DTYPES[dtype]

    def one() -> Any:
        return tuple(values(B, K, past + 1, H, dtype=kind, device=machine.device) for _ in "kv")

    pairs = ring(one, 2.0 * B * K * past * H * kind.itemsize)
    q = values(B, N, 1, H, dtype=kind, device=machine.device)

    def call(i: int) -> Any:
        with torch.no_grad():
            return _sdpa(q, *pairs[i % len(pairs)], False, "")

    return call


def _cache_row(machine: Machine, tables: Tables, dtype: str, shape: tuple[int, ...], timing: Timing) -> None:
    B, past, *heads = shape
    _add(tables, "kernels_attention_decode", machine, (dtype, ""), (B, 1, past, *heads), timing)


def caches(machine: Machine, tables: Tables, quick: bool) -> Iterator[TimedCase]:
    """Yield attention of one new token a sequence over a cache: rows of kernels_attention_decode."""
    for dtype in DTYPES:
        for heads in _HEADS[machine.device][: 1 if quick else None]:
            for size in _CACHES[machine.device][: 2 if quick else None]:
                shape = (*size, *heads)
                yield TimedCase(
                    f"cache {dtype} {shape}",
                    partial(_over_cache, machine, dtype, shape),
                    partial(_cache_row, machine, tables, dtype, shape),
                )
