"""Laws of collectives over tiers of links, and of what a device may reach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from laws.helpers import SLACK, tried
from laws.strategies import DEVICES
from shardwise.cost import Efficiencies, cached_share, collective_seconds, network_of, op_seconds, rates_of
from shardwise.cost._operators import inside_share
from shardwise.cost._rates import attention_dtype
from shardwise.cost._tables import stored
from shardwise.errors import InputError
from shardwise.hardware import Cluster, Tier, device_names, find_device
from shardwise.ledger.op import Op, Verb
from shardwise.records import replace
from shardwise.units import parse_bandwidth

VERBS: tuple[Verb, ...] = get_args(Verb)
RINGS = tuple(v for v in VERBS if v != "send")
SIZES = st.sampled_from((1.0, 8e3, 1e6, 64e6, 1e9, 1e11))
IDEAL = Efficiencies(ideal=True)


@st.composite
def networks(draw: st.DrawFn) -> tuple[Any, tuple[int, ...]]:
    """Draw (network, group): one to three tiers, and how many ranks of a group sit in a domain of each."""
    device = draw(st.sampled_from(DEVICES))
    inner, pods, outer = (draw(st.sampled_from(x)) for x in ((1, 2, 4, 8), (1, 2, 4), (1, 2, 8, 32)))
    cluster = Cluster.parse(f"256x{device}")
    fast, slow = cluster.tiers
    tiers = [fast]
    group = [inner]
    if draw(st.booleans()):
        tiers.append(
            Tier(name="pod", size=32, bytes_per_second=slow.bytes_per_second, latency_seconds=2e-6, in_network=False)
        )
        group.append(inner * pods)
    if draw(st.booleans()) or len(tiers) > 1:
        tiers.append(replace(slow, bytes_per_second=slow.bytes_per_second / draw(st.sampled_from((1, 4)))))
        group.append(group[-1] * outer)
    tiers[-1] = replace(tiers[-1], size=256) if len(tiers) > 1 else replace(fast, size=256)
    return network_of(cluster.with_tiers(tiers), draw(st.sampled_from((Efficiencies(), IDEAL)))), tuple(group)


@given(networks(), SIZES)
@tried(40)
def test_an_all_reduce_costs_at_least_its_halves(where: tuple[Any, tuple[int, ...]], size: float) -> None:
    """A ring's all-reduce costs at least a reduce-scatter and half of both halves; no all-reduce far more than both."""
    net, group = where
    whole, scatter, gather = (
        collective_seconds(net, v, size, group) for v in ("all_reduce", "reduce_scatter", "all_gather")
    )
    # Trees, which NCCL has for all-reduce alone, need fewer steps than the rings of either half.
    if all(link.wire("all_reduce").tree is None for link in net.links):
        assert whole * SLACK >= scatter
        assert whole * SLACK >= (scatter + gather) / 2
    assert whole <= (scatter + gather) * 1.5


@given(networks(), SIZES, st.sampled_from(VERBS))
@tried(25)
def test_nothing_to_send_costs_nothing(where: tuple[Any, tuple[int, ...]], size: float, verb: Verb) -> None:
    """A group of one and a message of no bytes are free; anything else takes time."""
    net, group = where
    alone = (1,) * len(group)
    assert collective_seconds(net, verb, size, alone) == 0
    assert collective_seconds(net, verb, 0.0, group) == 0
    assert (collective_seconds(net, verb, size, group) > 0) == (group[-1] > 1)


@given(networks(), SIZES, st.sampled_from(RINGS), st.sampled_from((2, 4)))
@tried(40)
def test_latency_grows_with_the_ranks(where: tuple[Any, tuple[int, ...]], size: float, verb: Verb, times: int) -> None:
    """More ranks on the outermost tier never make a collective cheaper, and its latency grows."""
    net, group = where
    assume(not (net.links[0].in_network and verb == "all_reduce"))
    larger = (*group[:-1], group[-1] * times)
    assert collective_seconds(net, verb, size, larger) * SLACK >= collective_seconds(net, verb, size, group)
    if net.links[-1].wire(verb).step_seconds:
        assert collective_seconds(net, verb, 1.0, larger) > collective_seconds(net, verb, 1.0, group)


@given(networks(), SIZES, st.sampled_from(VERBS))
@tried(40)
def test_two_tiers_cost_at_least_the_fast_one(where: tuple[Any, tuple[int, ...]], size: float, verb: Verb) -> None:
    """A collective over two tiers costs at least the same collective confined to the fast tier.

    A tree between nodes has fewer steps than a ring of as many ranks, so that short all-reduces are no part of it.
    """
    net, group = where
    assume(all(link.wire(verb).tree is None for link in net.links))
    confined = (group[-1],) * len(group)
    assert collective_seconds(net, verb, size, group) * SLACK >= collective_seconds(net, verb, size, confined)


@given(st.sampled_from(DEVICES), st.sampled_from((1, 2, 4, 8)), st.sampled_from(VERBS), SIZES)
@tried(16)
def test_more_network_cards_never_slow_a_collective(device: str, inside: int, verb: Verb, size: float) -> None:
    """Adding network cards to a node never slows, on every branch of every topology."""
    times = [
        collective_seconds(
            network_of(Cluster.parse(f"64x{device}", {"nics_per_node": n}), Efficiencies()), verb, size, (inside, 16)
        )
        for n in (1, 2, 4, 8)
    ]
    assert times == sorted(times, reverse=True)
    if inside < 8 and size > 1e6:
        assert times[-1] < times[0]


@given(networks(), SIZES, st.sampled_from(VERBS), st.floats(1.0, 8.0))
@tried(25)
def test_more_bytes_never_take_less_time(
    where: tuple[Any, tuple[int, ...]], size: float, verb: Verb, times: float
) -> None:
    """A collective is monotone in its size, and with efficiencies of one no faster than its links."""
    net, group = where
    one, more = (collective_seconds(net, verb, s, group) for s in (size, size * times))
    assert more * SLACK >= one


def test_bits_and_bytes_of_a_link_differ_by_eight() -> None:
    """Bandwidth entered as Gb/s and as GB/s differ by a factor of eight, from the text to the seconds."""
    assert parse_bandwidth("200GB/s") == 8 * parse_bandwidth("200Gb/s")
    fast, slow = (
        collective_seconds(
            network_of(Cluster.parse("16xh100-sxm-80gb", {"nics_per_node": 8, "nic_bandwidth": text}), IDEAL),
            "send",
            1e9,
            (1, 2),
        )
        for text in ("50GB/s", "50Gb/s")
    )
    assert slow == pytest.approx(8 * fast)


@pytest.mark.parametrize("name", [n for n in device_names() if find_device(n).device.knows("memory_bytes_per_second")])
def test_no_device_beats_its_datasheet(name: str) -> None:
    """Compute never exceeds the datasheet peak nor traffic the datasheet bandwidth, for every device and data type.

    But for tensor cores of two boards, measured above it: their clocks under load lie above the datasheet's.
    """
    device = find_device(name).device
    for dtype in device.matrix_flops:
        rates, peak = rates_of(device, dtype, 5e-6, Efficiencies()), device.peak_flops(dtype)
        boosted = name in ("rtx-5070", "rtx-5090") and dtype in ("tf32", "bf16", "fp16")
        assert 0 < rates.matmul_flops < (1.15 if boosted else 1) * peak
        assert 0 < rates.grouped_flops <= peak
        core = device.peak_flops(attention_dtype(device, dtype))
        assert 0 < rates.attention_forward_flops < core
        assert 0 < rates.attention_backward_flops < core
        for moved in (rates.matmul_bytes, rates.memory_bytes):
            assert 0 < moved < device.memory_bytes_per_second


def _rows(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every table of a nested one that states a number, with the source that stands in it."""
    if any(isinstance(value, float) for value in table.values()) and "source" in table:
        yield table
    for value in table.values():
        yield from _rows(value) if isinstance(value, dict) else ()


def test_every_fitted_constant_is_a_possible_one() -> None:
    """Efficiencies lie between nothing and one, times are not negative, and every fit names its source and date."""
    for family, table in stored().items():
        flat = list(_rows(table))
        assert flat, family
        for row in flat:
            assert row["source"] and row["date"], family
            for key, value in row.items():
                if (
                    key == "steady_state_share"
                ):  # of the rate in tables, whose libraries may be slower than those of training
                    assert 0 < value * row["compute"] <= 1, (family, key)
                elif key in ("compute", "memory", "efficiency", "forward", "backward"):
                    # The products of a prompt's attention are charged with more dimensions than they have.
                    assert 0 < value <= (1.3 if "extra_dims" in row else 1), (family, key)
                elif isinstance(value, float):
                    assert value >= 0, (family, key)


def _op(kind: Any, m: int, n: int, k: int) -> Op[float]:
    flops, moved = 2.0 * m * n * k, 2.0 * (m * k + n * k + m * n)
    return Op(
        name="op",
        kind=kind,
        region="mlp",
        flops=flops if kind != "memory" else 0.0,
        forward_bytes=moved,
        backward_flops=flops if kind != "memory" else 0.0,
        backward_bytes=moved,
        weight_flops=flops if kind in ("matmul", "grouped") else 0.0,
        weight_bytes=moved,
        rows=m,
        columns=n,
        inner=k,
    )


@given(
    st.sampled_from(DEVICES),
    st.sampled_from(("matmul", "grouped", "attention", "memory", "scan")),
    st.tuples(*(st.integers(1, 20000),) * 3),
)
@tried(40)
def test_no_operator_beats_the_roofline(device: str, kind: Any, shape: tuple[int, int, int]) -> None:
    """Every pass takes at least its FLOPs at peak and its bytes at full bandwidth, in streams the last cache's.

    That cache may hold what enters and leaves a product, whose weights still come from memory.
    """
    found = find_device(device).device
    op = _op(kind, *shape)
    for efficiencies in (Efficiencies(), IDEAL, Efficiencies(compute=0.5, memory=0.5)):
        rates = rates_of(found, "bf16", 0.0, efficiencies)
        seconds, peak = op_seconds(rates, op), found.peak_flops("bf16")
        moved, product, cached = op.forward_bytes, kind == "matmul", rates.corrections.cached_bytes
        held = inside_share(moved / cached) if product and cached else cached_share(rates, op, moved)
        bandwidth = max(found.memory_bytes_per_second, rates.cached_rate if held > 0 and not product else 0.0)
        read = 2.0 * op.columns * op.inner if held > 0 and product else moved
        for got, flops in ((seconds.forward, op.flops), (seconds.backward_input, op.backward_flops)):
            assert got * SLACK >= max(flops / peak, read / bandwidth)


@pytest.mark.parametrize("kind", ["none", "memory", "matmul"])
def test_an_empty_operator_costs_at_most_a_launch(kind: Any) -> None:
    """An operator without bytes and FLOPs costs nothing or one launch, and none without kernels."""
    op = _op(kind, 0, 0, 0)
    rates = rates_of(find_device("h100-sxm-80gb").device, "bf16", 5e-6, Efficiencies())
    starts = rates.launch + max(rates.memory_start, rates.matmul_start)
    assert 0 <= op_seconds(rates, op).forward <= starts
    assert op_seconds(rates, replace(op, kind="memory", kernels=0)).forward == 0


@pytest.mark.parametrize("field", ["compute", "memory", "fast_link", "slow_link"])
@pytest.mark.parametrize("value", [-0.1, 1.01, 7])
def test_efficiencies_above_one_are_refused(field: str, value: float) -> None:
    """No one can impose more than the datasheet by a fraction."""
    with pytest.raises(InputError) as error:
        rates_of(find_device("h100-sxm-80gb").device, "bf16", 0.0, Efficiencies(**{field: value}))
    assert [p.field for p in error.value.problems] == [f"{field}_efficiency"]
