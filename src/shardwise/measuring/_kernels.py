"""The kernels that are timed: matrix products as a linear layer makes them, and copies within the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.measuring._clock import ring, values

WIDTHS = {"fp32": 4, "bf16": 2}
"""Bytes of an element of the types that products are timed in."""


def torch_dtype(word: str) -> Any:
    """Return torch's type of a word such as bf16."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16}[word]


def product_of(stage: str, mnk: tuple[int, int, int], device: str, dtype: str) -> Callable[[], Callable[[int], Any]]:
    """Return what makes the call of one product; every operand that a step has not just made comes from memory."""
    m, n, k = mnk

    def make() -> Callable[[int], Any]:
        def one(rows: int, columns: int) -> Any:
            return values(rows, columns, dtype=torch_dtype(dtype), device=device)

        width = WIDTHS[dtype]
        x, gradient = ring(lambda: one(m, k), width * m * k), ring(lambda: one(m, n), width * m * n)
        weight = ring(lambda: one(n, k), width * n * k)
        results: list[Any] = [None] * max(2, len(gradient))
        if stage == "fwd":

            def call(i: int) -> None:
                results[i % len(results)] = x[i % len(x)] @ weight[i % len(weight)].t()
        elif stage == "bwd_input":

            def call(i: int) -> None:
                results[i % len(results)] = gradient[i % len(gradient)] @ weight[i % len(weight)]
        else:

            def call(i: int) -> None:
                results[i % len(results)] = gradient[i % len(gradient)].t() @ x[i % len(x)]

        return call

    return make


def copy_of(size: int, source: str, target: str) -> Callable[[], Callable[[int], Any]]:
    """Return what makes the call of one copy of so many bytes between the memories of two devices."""

    def make() -> Callable[[int], Any]:
        import torch

        def one(place: str) -> Any:
            pinned = place == "cpu" and "cuda" in (source, target)
            return torch.ones(size // 4, device=place, pin_memory=pinned)

        a, b = ring(lambda: one(source), size), ring(lambda: one(target), size)
        return lambda i: b[i % len(b)].copy_(a[i % len(a)], non_blocking=True)

    return make
