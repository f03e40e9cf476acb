"""The search finds what brute force finds, and says what became of every plan."""

from __future__ import annotations

from collections import Counter
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest

import brute_force as brute
from shardwise import plan_training
from shardwise.cost import tie_factor
from shardwise.hardware import Cluster
from shardwise.models import MLP, Attention, Block, LatentAttention, Model, MoE
from shardwise.plans import Plan, Training, find_stack
from shardwise.plans.laws import stack_problems
from shardwise.records import replace
from shardwise.search import (
    OBJECTIVES,
    IntRanges,
    ProcessExecutor,
    SearchOptions,
    SearchSpace,
    SearchTask,
    TrainingResult,
    searched,
    upto,
    work_of,
)
from shardwise.search._batch import plan_of
from shardwise.search._evaluator import Evaluator
from shardwise.search._grid import PlanGrid
from shardwise.search._ranking import tied
from shardwise.training._evaluate import PricedBlocks

pytestmark = pytest.mark.usefixtures("kept_recordings")

DENSE = Attention(heads=16, kv_heads=16, head_dim=64)
GROUPED = Attention(heads=16, kv_heads=4, head_dim=64, qk_norm="head")
LATENT = LatentAttention(
    heads=16, q_lora_rank=256, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
)
EXPERTS = MoE(experts=8, top_k=2, ffn=512, shared=MLP(ffn=1024))
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "dualpipe")


def _model(kind: str, layers: int = 8) -> Model:
    mixer = {"dense": DENSE, "latent": LATENT}.get(kind, GROUPED)
    plain = Block(mixers=(mixer,), feed_forward=MLP(ffn=4096))
    sparse = replace(plain, feed_forward=EXPERTS) if kind in ("experts", "between nodes", "latent") else plain
    mtp = (sparse,) if kind == "latent" else ()
    blocks = (plain,) * 2 + (sparse,) * (layers - 2)
    return Model(name=kind, family="llama", hidden=1024, vocab=32000, layers=blocks, tied=kind == "dense", mtp=mtp)


def _rows(
    kind: str, space: SearchSpace, *, devices: int = 32, batch: int = 48, layers: int = 8, stack: str = ""
) -> PlanGrid:
    cluster = Cluster.parse(f"{devices}xa100-sxm-80gb")
    tuned: dict[str, Any] = {"adapter": "lora", "base": "nf4"} if kind == "adapters" else {}
    job = Training(seq_len=1024, global_batch=batch, **tuned)
    # Its expert messages hide behind another micro-batch where they leave the node, under some schedules.
    stack = stack or ("megatron-bridge" if kind == "between nodes" else EXPLORE.stack)
    return work_of(_model(kind, layers), cluster, job, space, replace(EXPLORE, stack=stack)).grid


EXPLORE = SearchOptions(explore=True)
WIDE = SearchSpace(schedule=SCHEDULES, etp=upto(2), panels=upto(4))


@pytest.mark.parametrize(
    ("pruned", "kind"),
    [
        *((False, kind) for kind in ("dense", "experts", "latent", "adapters")),
        *((True, kind) for kind in ("experts", "adapters")),
    ],
)
def test_a_plan_of_a_mesh_is_that_plan(kind: str, pruned: bool) -> None:
    """A plan evaluated in an evaluator has the memory and the time of `train`, to one part in a billion."""
    grid = _rows(kind, WIDE, devices=16, batch=24, layers=4)
    assert _agreeing(grid, pruned, 2) >= 30


def test_experts_hide_under_the_schedules_under_which_they_do() -> None:
    """Messages of experts that hide between nodes under interleaving alone do so in a search as in `train`."""
    space = SearchSpace(schedule=("1f1b", "interleaved"), recompute=("none",), sharding=("zero1",), tp=upto(1))
    assert _agreeing(_rows("between nodes", space), False, 4) >= 12


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("stack", ["torchtitan", "transformers"])
def test_layouts_whose_tensors_differ_share_a_table(kind: str, stack: str) -> None:
    """Shards that pad single tensors are searched over layouts of which one has fewer of them."""
    words = ("shard-grad-op" if stack == "transformers" else "zero1", "fsdp")
    grid = _rows(kind, replace(WIDE, sharding=words), devices=16, batch=24, layers=4, stack=stack)
    assert len(set(grid.base["layout"].tolist())) > 1
    assert _agreeing(grid, False, 2) >= 12


def test_whole_sequences_of_summa_send_what_train_sends_beside_split_ones() -> None:
    """Keys and values of as many heads as queries are sent where chunks of a sequence are merged, not where it is one.

    PyTorch's rings repeat heads before they send them; one formula has sequences that are split and those that are not.
    """
    space = SearchSpace(
        layout=("summa",), cp=upto(2), cp_kind=("ring", "all-gather"), sharding=("zero1",), pp=upto(2),
        recompute=("none",), schedule=("1f1b",),
    )  # fmt: skip
    assert _agreeing(_rows("grouped", space, devices=16, batch=64, layers=4, stack="torchtitan"), False, 20) >= 12


def test_what_user_buffers_hold_is_held_where_tensors_are_split_alone() -> None:
    """Streams of user buffers have scratch of their own under tensor parallelism, in a search as in `train`."""
    space = SearchSpace(layout=("1d",), sharding=("zero1",), recompute=("none",), schedule=("1f1b",), tp=upto(2))
    grid = _rows("dense", space, devices=16, batch=64, layers=4, stack="megatron-bridge")
    assert grid.case.workspace_at(2) > grid.case.workspace_at(1) > 0
    assert _agreeing(grid, False, 100) >= 12


def _agreeing(grid: PlanGrid, pruned: bool, most: int) -> int:
    """Check plans of some chunks of a space against `train`; return how many."""
    evaluator, drawn, seen = Evaluator(grid, SearchTask(grid, SearchOptions()).limit_bytes, prune=pruned), Random(7), 0
    parts = grid.chunks(200)
    for start, end in drawn.sample(parts, min(len(parts), most)):
        for batch in evaluator.batches(start, end):
            chosen = np.flatnonzero(batch.fits).tolist()
            for i in drawn.sample(chosen, min(2, len(chosen))):
                plan = plan_of(batch.key(i), grid)
                assert brute.is_legal(grid.case, plan), plan
                report = brute.report(grid.case, plan)
                assert batch.step_seconds.ravel()[i] == pytest.approx(report.step_seconds, rel=1e-9), plan
                assert batch.device_bytes.ravel()[i] == pytest.approx(report.device_bytes, rel=1e-9), plan
                assert brute.fits(report)
                seen += 1
    return seen


SMALL = {
    "dense": SearchSpace(
        recompute=("full",),
        sharding=("none", "zero3"),
        schedule=SCHEDULES,
        micro_batch=upto(1),
        panels=upto(2),
        cp_kind=("ring", "all-gather"),
    ),
    "experts": SearchSpace(
        recompute=("none",), sharding=("none", "zero1"), etp=upto(2), micro_batch=upto(1), cp=upto(1)
    ),
    "latent": SearchSpace(
        recompute=("full",),
        sharding=("zero2",),
        pp=upto(4),
        cp=upto(2),
        micro_batch=upto(2),
        layout=("1d",),
        cp_kind=("ring",),
    ),
}


@cache
def _searched(kind: str, options: SearchOptions, layers: int = 6) -> tuple[PlanGrid, TrainingResult]:
    grid = _rows(kind, SMALL[kind], devices=8, batch=12, layers=layers)
    work = work_of(grid.case.model, grid.case.cluster, grid.case.job, SMALL[kind], replace(options, explore=True))
    return grid, searched(work, executor=ProcessExecutor(2) if options.rows == 50 else _here())


def _here():  # type: ignore[no-untyped-def]
    from shardwise.search import SerialExecutor

    return SerialExecutor()


# Six layers are cut evenly by two stages, seven by none.
CUT = [("dense", 6), ("experts", 7), ("latent", 6)]


@pytest.mark.parametrize(("kind", "layers"), CUT)
def test_the_search_is_brute_force(kind: str, layers: int) -> None:
    """Plans enumerated, legal and fitting are those of brute force, and so is the winner, for every objective."""
    grid, found = _searched(kind, SearchOptions(prune=False), layers)
    every = list(brute.plans(grid.case, grid.space))
    legal = [p for p in every if brute.is_legal(grid.case, p)]
    assert len(set(every)) == len(every) == found.num_plans
    assert len(legal) == found.counts.legal == found.counts.evaluated
    priced = PricedBlocks()
    reports = [brute.report(grid.case, p, priced) for p in legal]
    fitting = [r for r in reports if brute.fits(r)]
    assert len(fitting) == found.counts.fitting
    for objective in OBJECTIVES:
        answer = _searched(kind, SearchOptions(objective=objective, top=3), layers)[1]
        best, tie = answer.best, tie_factor(answer.options.headline)
        measure = OBJECTIVES[objective]
        values = brute.best_of_degrees(
            fitting, lambda r, of=measure: of(r.step_seconds, r.device_bytes, r.plan.num_devices)
        )
        got = [measure(r.step_seconds, r.device_bytes, r.plan.num_devices) for r in best]
        assert got == pytest.approx(values[:3], rel=1e-9)
        ranges, sizes = tied(values, tie), [1 + len(group.ties) for group in answer.groups]
        assert sizes == [end - start for start, end in ranges][: len(sizes)]
        assert len(sizes) >= min(3, sum(values[start] <= values[min(3, len(values)) - 1] for start, _ in ranges))
    times = sorted((r.step_seconds, r.device_bytes) for r in fitting)
    assert found.front[0].step_seconds == pytest.approx(times[0][0], rel=1e-9)
    for r in found.front:
        assert not any(s < r.step_seconds * (1 - 1e-9) and b < r.device_bytes * (1 - 1e-9) for s, b in times)


@pytest.mark.parametrize(("kind", "layers"), CUT)
def test_each_law_refuses_what_brute_force_says(kind: str, layers: int) -> None:
    """Every law is counted for exactly the plans of which it is the first that they break."""
    grid, found = _searched(kind, SearchOptions(), layers)
    broken = Counter(brute.first_broken(grid.case, plan) for plan in brute.plans(grid.case, grid.space))
    refused = {row.name: row.count for row in found.rejected if row.name != "memory"}
    assert broken.pop("") == found.counts.legal
    assert refused == broken
    assert len(refused) >= 2


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_what_a_framework_does_not_launch_is_what_its_law_says_of_each_plan(kind: str) -> None:
    """Under Megatron-Core, where stages rule shardings out, counts law by law, what fits and the best are exact."""
    space = SearchSpace(micro_batch=upto(1), recompute=("none", "full"), etp=upto(1), cp=upto(2), cp_kind=("ring",))
    work = work_of(_model(kind, 6), Cluster.parse("8xa100"), Training(seq_len=1024, global_batch=12), space, None)
    grid, found, by_law, legal = work.grid, searched(work, _here()), Counter[str](), []
    for plan in brute.plans(grid.case, grid.space):
        name = brute.first_broken(grid.case, plan)
        # What is launched is asked ahead of the laws of the schedule.
        if name in ("", "pipeline", "schedule") and stack_problems(grid.case.stack, plan, **grid.job):
            name = "stack"
        by_law[name] += 1
        legal += [] if name else [plan]
    assert by_law.pop("") == found.counts.legal
    assert {row.name: row.count for row in found.rejected if row.name != "memory"} == by_law
    assert by_law["stack"] > 0
    priced = PricedBlocks()
    fitting = [report for plan in legal if brute.fits(report := brute.report(grid.case, plan, priced))]
    assert len(fitting) == found.counts.fitting
    assert found.best[0].step_seconds == pytest.approx(min(one.step_seconds for one in fitting), rel=1e-9)


def _two_tiers(model: Model, tiers: tuple[int, ...]) -> PlanGrid:
    cluster = Cluster.parse(f"{tiers[-1]}xa100-sxm-80gb")
    inner, outer = cluster.tiers
    middle = [replace(inner, size=size, name=f"tier {size}") for size in tiers[:-1]]
    cluster = replace(cluster, tiers=(*middle, outer))
    return work_of(model, cluster, Training(seq_len=1024, global_batch=tiers[-1]), PLACED, EXPLORE).grid


PLACED = SearchSpace(tp=upto(8), pp=IntRanges(((1, 1), (4, 4), (1024, 1024))), cp=upto(2), layout=("1d",))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("tiers", [(8, 1 << 20), (8, 256, 8192, 1 << 20)])
def test_a_million_devices_are_counted_exactly(tiers: tuple[int, ...]) -> None:
    """Products of degrees and codes of placements that pass 64 bits merge no two plans and drop none."""
    grid = _two_tiers(_model("grouped", 1024), tiers)
    fields = ("layout", "tp", "tp2", "cp", "pp", "dp")
    every = list(brute._degrees(grid.case, PLACED, tiers[-1]))
    base = {name: grid.base[name].tolist() for name in fields if name != "layout"}
    found = sorted(zip(*base.values(), strict=True))
    assert found == sorted(tuple(d[name] for name in base) for d in every)
    places = dict(zip(zip(*base.values(), strict=True), grid.base["places"].tolist(), strict=True))
    for fixed in Random(3).sample(every, 3):
        own = sum(1 for _ in brute._places(grid.case, PLACED, fixed, tiers[-1]))
        assert places[tuple(fixed[name] for name in base)] == own, fixed


@pytest.mark.filterwarnings("error")
def test_every_product_of_degrees_is_a_row() -> None:
    """All ways to write 1,048,576 devices as a product of five degrees are there, none twice."""
    cluster, job = Cluster.parse(f"{1 << 20}xa100-sxm-80gb"), Training(seq_len=1024, global_batch=1 << 20)
    space = SearchSpace(orders=(("tp", "tp2", "cp", "dp", "pp"),))
    grid = work_of(_model("dense", 1024), cluster, job, space, EXPLORE).grid
    every = [tuple(d.values())[1:] for d in brute._degrees(grid.case, grid.space, 1 << 20)]
    assert sorted(zip(*(grid.base[n].tolist() for n in ("tp", "tp2", "cp", "pp", "dp")), strict=True)) == sorted(every)


@pytest.mark.parametrize("kind", list(SMALL))
def test_every_plan_is_accounted_for(kind: str) -> None:
    """Plans that fit and plans that fell to a law or to memory add up to the space."""
    _, found = _searched(kind, SearchOptions())
    assert found.counts.fitting + sum(r.count for r in found.rejected) == found.num_plans
    assert all(r.title and r.remedy for r in found.rejected)


@pytest.mark.parametrize("kind", list(SMALL))
def test_the_answer_does_not_depend_on_the_way(kind: str) -> None:
    """Pruning, the size of the parts and the number of processes change nothing in what is found."""
    first = _searched(kind, SearchOptions(prune=False, top=20))[1]
    for options in (SearchOptions(top=20), SearchOptions(top=20, rows=50), SearchOptions(top=20, rows=700)):
        other = _searched(kind, options)[1]
        assert [e.key for e in other.partial.top.entries] == [e.key for e in first.partial.top.entries]
        assert [e.key for e in other.partial.front.plans()] == [e.key for e in first.partial.front.plans()]
        assert other.rejected == first.rejected


def test_the_example_of_a_law_does_not_depend_on_who_asks_first() -> None:
    """Courts that hear the same rows in another order give the same example of what a law forbids."""
    grid, found = _rows("dense", WIDE), []
    columns = {"tp": np.array([32, 64, 3, 128, 2])}
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 0, 3, 1]):
        constraints = grid.constraints()
        for i in order:
            constraints.check("tensor", {"tp": columns["tp"][i : i + 1]})
        found.append({name: str(problem) for name, problem in constraints.examples.items()})
    assert found[0] == found[1] == found[2] != {}


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_bounds_spare_most_plans_of_dualpipe(kind: str) -> None:
    """The bound of DualPipe counts what pairs do not hide: with the best known few plans are timed, mixtures too."""
    space = SearchSpace(schedule=("dualpipe",), pp=IntRanges(((2, 4),)), layout=("1d",))
    grid = _rows(kind, space)
    work = work_of(grid.case.model, grid.case.cluster, grid.case.job, space, EXPLORE)
    first, again = searched(work, _here()), searched(work, _here())
    assert again.partial.top.entries == first.partial.top.entries
    assert 0 < again.counts.evaluated < again.counts.fitting / 4


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_domains_within_domains_are_brute_force(kind: str) -> None:
    """With a tier between the fastest domain and the cluster, places and the winner are those of brute force."""
    cluster = Cluster.parse("16xa100-sxm-80gb")
    inner, outer = cluster.tiers
    rack = replace(inner, size=8, name="rack", bytes_per_second=inner.bytes_per_second / 3)
    cluster = replace(cluster, tiers=(replace(inner, size=2), rack, outer))
    narrow: dict[str, Any] = {"recompute": ("none",), "sharding": ("zero1",), "layout": ("1d",), "cp_kind": ("ring",)}
    space = SearchSpace(**narrow, schedule=("1f1b",), micro_batch=upto(1), cp=upto(2), ep=upto(4), etp=upto(1))
    work = work_of(
        _model(kind, 6), cluster, Training(seq_len=1024, global_batch=16), space, SearchOptions(top=3, explore=True)
    )
    every = list(brute.plans(work.grid.case, work.grid.space))
    priced = PricedBlocks()
    reports = [brute.report(work.grid.case, p, priced) for p in every if brute.is_legal(work.grid.case, p)]
    found = searched(work, _here())
    assert len(set(every)) == len(every) == found.num_plans
    assert len(reports) == found.counts.legal
    times = brute.best_of_degrees([r for r in reports if brute.fits(r)], lambda r: r.step_seconds)
    assert [r.step_seconds for r in found.best] == pytest.approx(times[:3], rel=1e-9)


@cache
def _best(space: SearchSpace, **worse: str) -> float:
    cluster, job = Cluster.parse("16xa100-sxm-80gb", worse), Training(seq_len=1024, global_batch=48)
    return plan_training(_model("grouped"), cluster, job, space, SearchOptions(top=1)).best[0].step_seconds


LAW = SearchSpace(recompute=("none", "full"), sharding=("zero1",), layout=("1d",), cp=upto(2))


def test_more_devices_never_hurt() -> None:
    """With at most n devices the best step never gets longer as n grows."""
    times = [_best(replace(LAW, devices=upto(n))) for n in (1, 4, 6, 12, 16)]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    "narrow",
    [
        replace(LAW, tp=upto(2)),
        replace(LAW, pp=IntRanges(((2, 4),))),
        replace(LAW, micro_batch=upto(1)),
        replace(LAW, schedule=("interleaved",)),
        replace(LAW, recompute=("full",)),
        replace(LAW, orders=LAW.orders[:1]),
    ],
)
def test_a_wider_space_never_hurts(narrow: SearchSpace) -> None:
    """The best of a space is never worse than the best of a part of it."""
    assert _best(LAW) <= _best(narrow)


@pytest.mark.parametrize(
    ("name", "value"), [("memory", "8GB"), ("nic_bandwidth", "50Gb/s"), ("memory_bandwidth", "0.5TB/s")]
)
def test_worse_hardware_never_helps(name: str, value: str) -> None:
    """Less memory, a slower link or slower memory never makes the best step shorter."""
    assert _best(LAW) <= _best(LAW, **{name: value}) * (1 + 1e-12)


def test_choices_without_effect_are_without_effect() -> None:
    """Where the space lets one value stand for others, those others have the same memory and time."""
    grid = _rows("grouped", SearchSpace(), devices=8)
    plan = next(p for p in brute.plans(grid.case, grid.space) if p.dp == 8)
    one = brute.report(grid.case, plan)
    for changes in ({"schedule": "zb-h1"}, {"cp_kind": "all-gather"}, {"cp_kind": "all-to-all"}):
        other = brute.report(grid.case, replace(plan, **changes))  # type: ignore[arg-type]
        assert other.step_seconds == pytest.approx(one.step_seconds, rel=1e-12), changes
        assert other.device_bytes == pytest.approx(one.device_bytes, rel=1e-12), changes


@pytest.mark.parametrize("stack", ["megatron", "fsdp2", "deepspeed", "pytorch"])
def test_one_copy_is_not_quicker_or_smaller_when_it_is_sharded(stack: str) -> None:
    """With nobody to share with, no sharding beats none: only the first of a space is tried.

    Where the gradient of the table is whole on each rank, shards of one copy free the rows of others. Under autocast
    shards of one copy are cast unit by unit, so that no copies are kept of all weights, and inputs are not cast.
    """
    case = replace(_rows("grouped", SearchSpace(), devices=8).case, stack=find_stack(stack))
    freed = 4 * case.model.hidden * case.model.vocab if case.stack.whole_table_gradient else 0
    one, *others = (brute.report(case, Plan(tp=8, sharding=s)) for s in ("none", "zero1", "zero2", "zero3"))
    for other in others:
        if other.case.autocast == one.case.autocast:
            assert other.step_seconds >= one.step_seconds * (1 - 1e-12), other.plan.sharding
            assert other.device_bytes >= one.device_bytes * (1 - 1e-12) - freed, other.plan.sharding
