"""Rows of experts as the tables route them."""

from __future__ import annotations

import pytest

from accuracy.kernels.products import expert_reads, ungated
from accuracy.kernels.routing import check, routed, tiled, timed_rows, touching
from shardwise.errors import InputError
from shardwise.hardware import find_device


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
            assert routed(routing, tokens, 8, 256, 1)[1] == pytest.approx(tokens * 8)


@pytest.mark.parametrize(
    ("shape", "hit"),
    [
        ((1, 2, 8), 2.0),
        ((1, 8, 128), 8.0),
        ((2, 8, 128), 16.0),
        ((4, 8, 128), 28.765625),
        ((16, 8, 128), 58.578125),
        ((64, 2, 8), 8.0),
    ],
)
def test_few_tokens_reach_nearly_as_many_experts_as_they_have_choices(shape: tuple[int, int, int], hit: float) -> None:
    """What rounding loses of a power law goes to experts without a row: the collector's own loop gives these."""
    assert routed("power_law_1.2", *shape, 1)[0] == hit


def test_no_expert_has_more_rows_than_there_are_tokens() -> None:
    """A token chooses no expert twice, so that as many tiles of one row run as choices, and hits are theirs."""
    for tokens in (1, 2, 3, 5):
        assert tiled("power_law_1.2", (tokens, 2, 8, 1), tokens) == routed("power_law_1.2", tokens, 2, 8, 1)[0]


@pytest.mark.parametrize(("shape", "hit"), [((16, 8, 256, 8), 13.921875), ((100, 8, 256, 32), 7.046875)])
def test_ranks_take_what_rounding_loses_in_turn(shape: tuple[int, int, int, int], hit: float) -> None:
    """The collector deals what is left rank by rank: its own loop gives these experts of the heaviest rank."""
    assert routed("power_law_1.2", *shape)[0] == hit


def test_even_tokens_hit_distinct_experts() -> None:
    """Balanced tokens never share an expert before all are hit; random ones do."""
    assert routed("balanced", 16, 8, 256, 1)[0] == 128
    assert routed("", 16, 8, 256, 1)[0] < 110
    assert routed("balanced", 64, 8, 256, 4)[0] == 64


def test_every_choice_runs_somewhere() -> None:
    """Rows of the timed rank and of the others are all choices, unless the collector handed them to the rank."""
    for routing in ("balanced", "power_law_1.2", ""):
        _, rows, others = timed_rows("fused", "0.24.0", routing, (512, 8, 256, 8))
        assert rows + others == pytest.approx(512 * 8)
        _, handed, none = timed_rows("fused", "0.5.10", routing, (512, 8, 256, 8))
        assert rows < handed <= 512 * 8 and none == 0
        assert timed_rows("moe_torch_flow_triton_fp8_block", "", routing, (512, 8, 256, 8))[1:] == (512 * 8, 0)


@pytest.mark.parametrize("routing", ["balanced", "power_law_1.01", "power_law_1.2", ""])
def test_tokens_touch_a_rank_once(routing: str) -> None:
    """No more tokens touch a rank than there are, nor than it has rows; with one rank all of them do."""
    assert touching(routing, 256, 8, 256, 1) == pytest.approx(256)
    for ranks in (8, 64):
        assert (
            256 / ranks
            <= touching(routing, 256, 8, 256, ranks)
            <= min(256, 1.01 * routed(routing, 256, 8, 256, ranks)[1])
        )


def test_experts_that_fit_the_last_cache_are_read_from_it() -> None:
    """On L40S 50 MB of weights are read faster than from memory between the calls of a table, 200 MB are not."""
    device = find_device("l40s").device
    assert expert_reads(device, 5e7, 1e6) < 0.5
    assert expert_reads(device, 2e8, 1e6) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("kernel", "version", "sizes", "expected"),
    [
        ("moe_torch_flow_nongated", "1.3.0rc20", (1536.0, 8.0, 128.0), True),
        ("vllm_fused_moe", "0.24.0", (1856.0, 6.0, 128.0), True),
        ("vllm_fused_moe", "0.14.0", (1856.0, 6.0, 128.0), False),
        ("vllm_fused_moe", "0.24.0", (1536.0, 8.0, 128.0), False),
    ],
)
def test_experts_without_a_gate(kernel: str, version: str, sizes: tuple[float, float, float], expected: bool) -> None:
    """Experts have no gate where the kernel says so, or where the model that has such experts has none."""
    assert ungated(kernel, version, *sizes) == expected


@pytest.mark.parametrize(
    ("routing", "shape", "field"),
    [
        ("power_law_x", (8, 256, 8), "routing"),
        ("power_law_-5", (8, 256, 8), "routing"),
        ("power_law_1e9", (8, 256, 8), "routing"),
        ("power_law_1.2", (8, 256, 3), "moe_ep"),
        ("balanced", (500, 256, 8), "top_k"),
    ],
)
def test_what_cannot_be_routed_is_refused_by_name(routing: str, shape: tuple[int, int, int], field: str) -> None:
    """A law without an exponent, ranks that do not divide the experts and too many choices name their column."""
    with pytest.raises(InputError) as found:
        check(routing, *shape)
    assert [problem.field for problem in found.value.problems] == [field]


def test_an_exponent_of_one_lies_between_its_neighbours() -> None:
    """The law of exponent 1, whose form is another, loads the timed rank as exponents just beside it do."""
    below, at, above = (routed(f"power_law_{a}", 64, 8, 256, 8)[1] for a in (0.99, 1.0, 1.01))
    assert below - 1 <= at <= above + 1
