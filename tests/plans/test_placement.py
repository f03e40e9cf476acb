"""Where ranks sit: groups partition the ranks, and spans agree with counting them."""

from __future__ import annotations

from itertools import permutations
from math import prod
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from laws.helpers import tried
from shardwise.plans import AXES, Plan, degrees, group_shapes, groups
from shardwise.plans._placement import fast_ranks, radices

POWERS = st.sampled_from((1, 2, 4, 8))


@st.composite
def placed(draw: st.DrawFn) -> tuple[Plan, tuple[int, ...]]:
    """Draw a plan of powers of two in any order, and domains that nest in its ranks."""
    size = {axis: draw(st.sampled_from((1, 2, 4))) for axis in AXES}
    size["dp"] *= draw(st.sampled_from((1, 2)))
    order: Any = draw(st.sampled_from(list(permutations(AXES))))
    stage = prod(size[a] for a in ("tp", "tp2", "cp", "dp"))
    etp = draw(st.sampled_from([e for e in (1, 2, 4) if stage % e == 0]))
    ep = draw(st.sampled_from([e for e in (1, 2, 4, 8, 16) if stage % (e * etp) == 0]))
    hybrid = draw(st.booleans())
    shard = draw(st.sampled_from([s for s in (1, 2, 4, 8) if size["dp"] % s == 0])) if hybrid else 1
    fast: tuple[int, ...] = ()
    if draw(st.booleans()):
        fast = tuple(draw(st.sampled_from([n for n in (1, 2, 4, 8) if size[a] % n == 0])) for a in AXES)
    plan = Plan(**size, order=order, fast=fast, ep=ep, etp=etp, sharding="hsdp" if hybrid else "none", shard=shard)
    n = plan.num_devices
    inner = draw(st.sampled_from([d for d in (1, 2, 4, 8, 16, 32) if d <= n and d % prod(fast) == 0] or [n]))
    middle = draw(st.sampled_from([d for d in (inner, 2 * inner, 4 * inner) if d <= n]))
    return plan, tuple(dict.fromkeys((inner, middle, n)))


def coordinates(plan: Plan, rank: int) -> dict[str, int]:
    """Return the place of a rank on every axis."""
    found = dict.fromkeys(AXES, 0)
    weight = dict.fromkeys(AXES, 1)
    for part in radices(degrees(plan), plan.order, fast_ranks(plan)):
        for axis, degree in part.items():
            rank, digit = divmod(rank, degree)
            found[axis] += weight[axis] * digit
            weight[axis] *= degree
    return found


def together(members: list[int], domain: int) -> int:
    """Return how many members of a group share the domain of the first."""
    return sum(r // domain == members[0] // domain for r in members)


@given(placed(), st.lists(st.sampled_from(AXES), unique=True, min_size=1))
@tried(40)
def test_every_rank_is_in_exactly_one_group(where: tuple[Plan, tuple[int, ...]], axes: list[str]) -> None:
    """Groups over any axes partition the ranks, each as large as its axes multiply to."""
    plan, _ = where
    found = list(groups(plan, axes))
    assert sorted(r for g in found for r in g) == list(range(plan.num_devices))
    assert {len(g) for g in found} == {prod(degrees(plan)[a] for a in axes)}
    for group in found:
        first = coordinates(plan, group[0])
        for rank in group:
            here = coordinates(plan, rank)
            assert all(here[a] == first[a] for a in AXES if a not in axes)


@given(placed())
@tried(80)
def test_spans_agree_with_counting(where: tuple[Plan, tuple[int, ...]]) -> None:
    """How many ranks of a group sit in one domain is what counting finds, for every axis, order and tier."""
    plan, domains = where
    found = group_shapes(plan, domains)
    wanted = {axis: [axis] for axis in AXES} | {"dp_cp": ["dp", "cp"]}
    for axis, members in wanted.items():
        for group in groups(plan, members):
            assert found[axis] == tuple(together(list(group), d) for d in domains), axis


@given(placed())
@tried(80)
def test_expert_and_shard_groups_agree_with_counting(where: tuple[Plan, tuple[int, ...]]) -> None:
    """Experts lie on the ranks of a stage in the order etp, ep, edp; shards on neighbouring replicas with their cp."""
    plan, domains = where
    found = group_shapes(plan, domains)
    for stage in groups(plan, ["tp", "tp2", "cp", "dp"]):
        ranks = sorted(stage)
        etp, ep = plan.etp, plan.ep
        # Ranks of one group differ in one digit of their place in the stage.
        for name, start, step, count in (
            ("etp", 0, 1, etp),
            ("ep", 0, etp, ep),
            ("edp", 0, etp * ep, plan.expert_dp),
        ):
            members = [ranks[start + i * step] for i in range(count)]
            assert found[name] == tuple(together(members, d) for d in domains), name
    shard = plan.shard if plan.sharding == "hsdp" else plan.dp
    by_shard: dict[tuple[Any, ...], list[int]] = {}
    by_replica: dict[tuple[Any, ...], list[int]] = {}
    for rank in range(plan.num_devices):
        here = coordinates(plan, rank)
        fixed = (here["tp"], here["tp2"], here["pp"])
        by_shard.setdefault((*fixed, here["dp"] // shard), []).append(rank)
        by_replica.setdefault((*fixed, here["cp"], here["dp"] % shard), []).append(rank)
    for name, some in (("shard", by_shard), ("replicate", by_replica)):
        for members in some.values():
            assert found[name] == tuple(together(members, d) for d in domains), name


@given(placed())
@tried(40)
def test_spans_never_shrink_outwards_and_end_with_the_degree(where: tuple[Plan, tuple[int, ...]]) -> None:
    """A wider domain holds at least as many ranks of a group, and the last tier all of them."""
    plan, domains = where
    size = degrees(plan) | {
        "dp_cp": plan.dp * plan.cp,
        "ep": plan.ep,
        "etp": plan.etp,
        "edp": plan.expert_dp,
    }
    found = group_shapes(plan, domains)
    for axis, at in found.items():
        assert list(at) == sorted(at)
        if axis in size:
            assert at[-1] == size[axis]
    assert found["shard"][-1] * found["replicate"][-1] == plan.dp * plan.cp
    assert found["expert_shard"][-1] * found["expert_replicate"][-1] == plan.expert_dp


@given(POWERS, POWERS)
@tried(12)
def test_tensor_parallel_ranks_are_neighbours_by_default(tp: int, dp: int) -> None:
    """The first axis of the order has consecutive ranks."""
    assert next(groups(Plan(tp=tp, dp=dp), ["tp"])) == tuple(range(tp))
