"""Rows of experts as the tables route them."""

from __future__ import annotations

import pytest

from shardwise.validation._kernels import ungated
from shardwise.validation._routing import routed


@pytest.mark.parametrize("tokens", [1, 16, 1024])
@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_a_skewed_law_loads_the_timed_rank_more(tokens: int, ranks: int) -> None:
    """The rank with the most rows has at least the even share, and hits no more experts than it holds or has rows."""
    for routing in ("power_law_1.01", "power_law_1.2"):
        hit, rows = routed(routing, tokens, 8, 256, ranks)
        assert rows >= 0.98 * max(tokens * 8 / ranks, 1.0)
        assert 1 <= hit <= min(256 / ranks, rows)


def test_one_rank_takes_every_row() -> None:
    """Without expert parallelism every choice of every token is a row of the only rank."""
    for routing in ("balanced", "power_law_1.01", "power_law_1.2", ""):
        for tokens in (1, 16, 512):
            assert routed(routing, tokens, 8, 256, 1)[1] == pytest.approx(tokens * 8, rel=0.02)


def test_even_tokens_hit_distinct_experts() -> None:
    """Balanced tokens never share an expert before all are hit; random ones do."""
    assert routed("balanced", 16, 8, 256, 1)[0] == 128
    assert routed("", 16, 8, 256, 1)[0] < 110
    assert routed("balanced", 64, 8, 256, 4)[0] == 64


@pytest.mark.parametrize(
    ("kernel", "version", "sizes", "expected"),
    [
        ("moe_torch_flow_nongated", "1.3.0rc20", (4096.0, 1536.0), True),
        ("vllm_fused_moe", "0.24.0", (2688.0, 1856.0), True),
        ("vllm_fused_moe", "0.14.0", (2688.0, 1856.0), False),
        ("vllm_fused_moe", "0.24.0", (4096.0, 1536.0), False),
    ],
)
def test_experts_without_a_gate(kernel: str, version: str, sizes: tuple[float, float], expected: bool) -> None:
    """Experts have no gate where the kernel says so, or where the model of their sizes has none."""
    assert ungated(kernel, version, *sizes) == expected
