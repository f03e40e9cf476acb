"""Kernels of routers: what single tokens take, and where an engine leaves them to its library."""

from __future__ import annotations

import pytest

from shardwise.ledger.op import Op
from shardwise.serving import RouterKernel
from shardwise.serving._routers import routed_seconds

KERNEL = RouterKernel(rows=16.0, first_seconds=2e-6, token_seconds=0.5e-6)


@pytest.mark.parametrize(
    ("rows", "ranks", "library", "seconds"),
    [
        (1.0, 1.0, 9e-6, 2e-6),
        (4.0, 1.0, 9e-6, 2e-6 + 3 * 0.5e-6),
        (4.0, 2.0, 9e-6, 2e-6 + 7 * 0.5e-6),
        (0.25, 2.0, 9e-6, 2e-6),
        (16.0, 1.0, 9e-6, 9e-6),
        (8.0, 1.0, 3e-6, 3e-6),
        (17.0, 1.0, 20e-6, 20e-6),
    ],
)
def test_tokens_after_the_first_cost_a_little_more(rows: float, ranks: float, library: float, seconds: float) -> None:
    """Tokens of all ranks count, one at least; beyond 16, and where it is faster, the library's product runs."""
    op = Op(name="mlp.router", kind="matmul", role="router", region="mlp", rows=rows, columns=256.0, inner=7168.0,
            flops=0.0, forward_bytes=0.0, backward_flops=0.0, backward_bytes=0.0, weight_flops=0.0,
            weight_bytes=0.0)  # fmt: skip
    assert routed_seconds(KERNEL, op, ranks, library) == pytest.approx(seconds)
