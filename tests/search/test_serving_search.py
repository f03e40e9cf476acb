"""The search for a deployment finds what `infer` finds one by one, and says what became of every plan."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import InputError
from shardwise.hardware import Cluster, part_of
from shardwise.models import MLP, Attention, Block, Model, MoE, load_model
from shardwise.plans import Plan, Serving, group_shapes
from shardwise.records import replace
from shardwise.search import IntRanges, SearchOptions, ServingResult, ServingSpace, plan_serving, upto
from shardwise.serving import InferReport, infer

pytestmark = pytest.mark.usefixtures("kept_recordings")

GROUPED = Attention(heads=16, kv_heads=4, head_dim=128)
PLAIN = Block(mixers=(GROUPED,), feed_forward=MLP(ffn=16384))
SPARSE = replace(PLAIN, feed_forward=MoE(experts=8, top_k=2, ffn=8192))
MODELS = {
    "dense": Model(name="dense", family="llama", hidden=4096, vocab=64000, layers=(PLAIN,) * 6),
    "experts": Model(name="experts", family="llama", hidden=4096, vocab=64000, layers=(PLAIN, *(SPARSE,) * 5)),
}
# Prompts run in steps that hold a whole batch, so that large ones do not fit.
JOB = Serving(input_tokens=2048, output_tokens=64, max_batched_tokens=1_000_000)
ON = Cluster.parse("8xa100-sxm-80gb", {"memory": "24GB", "price": 2.0})
SPACE = ServingSpace(
    devices=IntRanges(((1, 2), (6, 6), (8, 8))),
    batch=IntRanges(((1, 1), (6, 6), (32, 32), (400, 400))),
    weights=("bf16", "fp8"),
    kv_cache=("bf16", "int8"),
)


def _experts(model: Model, tp: int, n: int) -> list[tuple[int, int]]:
    if model.name == "dense":
        return [(1, 1)]
    ways = [w for w in range(1, n + 1) if n % w == 0]
    return [(ep, etp) for ep, etp in product(ways, ways) if tp % etp == 0 and (ep * etp >= tp or tp % ep)]


def _reports(model: Model, space: ServingSpace) -> Iterator[tuple[Plan, Serving, InferReport | None]]:
    """Yield every plan of a space, each batch given one by one, and what `infer` says of it, None where it refuses."""
    counts = space.devices.of(range(1, 9)) if space.devices.ranges else [8]
    for n, tp, pp in product(counts, range(1, 9), range(1, 7)):
        if n % (tp * pp):
            continue
        for ep, etp in _experts(model, tp, n // pp):
            seen = set()
            for order in space.orders:
                plan = Plan(tp=tp, pp=pp, dp=n // tp // pp, ep=ep, etp=etp, order=order)  # type: ignore[arg-type]
                placed = group_shapes(plan, [t.size for t in ON.tiers])
                place = tuple(placed[axis][:-1] for axis in ("tp", "pp", "ep", "etp"))
                if place in seen:
                    continue
                seen.add(place)
                for weights, cache, batch in product(space.weights, space.kv_cache, space.batches):
                    job = replace(JOB, batch=batch, max_sequences=batch, weights=weights, kv_cache=cache)
                    try:
                        report = infer(model, part_of(ON, n), plan, job)
                        # vLLM gives a device whole experts or a part of each.
                        yield plan, job, None if min(report.plan.ep, report.plan.etp) > 1 else report
                    except InputError:
                        yield plan, job, None


def _keeps(report: InferReport, options: SearchOptions) -> bool:
    pairs: list[tuple[float, Any]] = [
        (options.max_ttft_seconds, report.request_ttft_seconds),
        (options.max_tpot_seconds, report.request_tpot_seconds),
        (options.max_latency_seconds, report.request_seconds),
        (options.max_usd, report.usd_per_million_output_tokens),
    ]
    enough = report.output_tokens_per_second >= options.min_tokens_per_second
    fits = report.fits and report.chance_to_fit >= options.risk
    return fits and enough and all(not limit or value <= limit for limit, value in pairs)


def _value(objective: str, report: InferReport) -> float:
    each = report.output_tokens_per_second / report.plan.num_devices
    return {
        "throughput": 1 / each,
        "cost": 1 / each,
        "ttft": report.ttft_seconds,
        "tpot": report.tpot_seconds,
        "latency": report.request_seconds,
        "devices": float(report.plan.num_devices),
    }[objective]


LIMITED = SearchOptions(
    max_ttft_seconds=0.05, max_tpot_seconds=0.012, max_usd=400.0, min_tokens_per_second=300.0, risk=0.5
)


@pytest.mark.parametrize("engines", [("vllm",), ("sglang",), ("tensorrt-llm",), ("vllm", "sglang"), ("llama.cpp",)])
def test_every_deployment_that_is_proposed_can_be_launched(engines: tuple[str, ...]) -> None:
    """The engine of each of the best plans is told its layout by the exporter; of two engines each by its own."""
    job, options = Serving(input_tokens=512, output_tokens=32), SearchOptions(top=40)
    found = plan_serving(
        load_model("mixtral-8x7b"), Cluster.parse("8xh100"), job, ServingSpace(engine=engines), options
    )
    assert len(found.best) > 3
    assert {report.case.engine.name for report in found.best} <= set(engines)
    for report in found.best:
        exporter = import_module(f"shardwise.formats.{report.case.engine.exporter}")
        try:
            exporter.export(report)
        except InputError as error:
            assert {p.field for p in error.problems}.isdisjoint(("tp", "pp", "ep", "etp", "order"))
    said = any("launches the layout" in one.title for one in found.rejected)
    explored = plan_serving(found.grid.model, found.grid.cluster, job, found.grid.space, replace(options, explore=True))
    # SGLang splits experts in all ways that the space has.
    assert said == (explored.counts.legal > found.counts.legal) == (engines != ("sglang",))


@pytest.mark.parametrize("batch", [IntRanges(((1, 100_000_000),)), IntRanges(((1, 20_000),))])
def test_a_step_that_tries_too_many_batches_is_refused(batch: IntRanges) -> None:
    """A range of batches in steps beyond 10,000 is refused before work starts, with the step that is within."""
    with pytest.raises(InputError) as caught:
        replace(SPACE, batch=batch, batch_step=1).check()
    (problem,) = caught.value.problems
    assert problem.field == "batch_step"
    least = int(problem.remedy.split()[3].rstrip(","))
    replace(SPACE, batch=batch, batch_step=least).check()
    with pytest.raises(InputError):
        replace(SPACE, batch=batch, batch_step=least - 1).check()


@pytest.mark.parametrize("kind", list(MODELS))
def test_the_search_is_brute_force(kind: str) -> None:
    """Plans counted, legal and fitting, the best by every objective and the front are those of `infer` one by one."""
    model = MODELS[kind]
    # Widths are all tried where layers are alike, ways to split experts beside them where they are not.
    space = (
        SPACE
        if kind == "dense"
        else replace(SPACE, devices=IntRanges(((1, 2), (6, 6))), weights=("fp8",), kv_cache=("bf16",))
    )
    every = list(_reports(model, space))
    legal = [report for _, _, report in every if report is not None]
    for options in (SearchOptions(top=4), LIMITED):
        kept = [report for report in legal if _keeps(report, options)]
        found = plan_serving(model, ON, JOB, space, options)
        assert (found.num_plans, found.counts.evaluated, found.counts.fitting) == (len(every), len(legal), len(kept))
        assert 0 < len(kept) < len(legal)
        for objective in ("throughput", "cost", "ttft", "tpot", "latency", "devices"):
            asked = plan_serving(model, ON, JOB, space, replace(options, objective=objective))
            best: dict[Any, float] = {}
            for report in kept:
                # Deployments that differ in replicas or placement alone are one row.
                degrees = tuple(getattr(report.plan, axis) for axis in ("tp", "pp", "ep", "etp"))
                key = degrees, report.job.weights, report.job.kv_cache
                best[key] = min(best.get(key, float("inf")), _value(objective, report))
            got = [_value(objective, report) for report in asked.best]
            assert got == pytest.approx(sorted(best.values())[: options.top], rel=1e-9)
            assert [asked.value(report) for report in asked.best] == pytest.approx(got, rel=1e-12)
        for report in found.front:
            each = _value("throughput", report) * (1 - 1e-9)
            assert not any(
                _value("throughput", r) < each and r.tpot_seconds < report.tpot_seconds * (1 - 1e-9) for r in kept
            )


def test_deployments_over_nodes_are_what_infer_answers_without_an_order() -> None:
    """Replicas have their stages beside each other in the search as in `infer`, those within a node as one alone."""
    cluster, space = Cluster.parse("24xh100"), ServingSpace(pp=IntRanges(((4, 8),)), batch=IntRanges(((4, 4),)))
    found = plan_serving(load_model("llama-3.1-8b"), cluster, JOB, space, SearchOptions(top=100))
    assert {report.plan.pp for report in found.best} == {4, 6, 8}
    for report in found.best:
        plan = Plan(tp=report.plan.tp, pp=report.plan.pp, dp=report.plan.dp)
        again = infer(load_model("llama-3.1-8b"), cluster, plan, report.job)
        one = infer(load_model("llama-3.1-8b"), part_of(cluster, plan.tp * plan.pp), replace(plan, dp=1), report.job)
        assert again.plan == report.plan
        for name in ("tpot_seconds", "ttft_seconds"):
            assert getattr(again, name) == pytest.approx(getattr(report, name), rel=1e-12)
            # Six stages lie on two nodes for two replicas of four.
            assert 8 % (plan.tp * plan.pp) or getattr(again, name) == pytest.approx(getattr(one, name), rel=6e-3)


def test_the_largest_batch_is_the_largest() -> None:
    """Of a range, the largest batch tried fits and keeps the limits, and one request more does not."""
    options = SearchOptions(max_tpot_seconds=0.012, top=100)
    found = plan_serving(MODELS["dense"], ON, JOB, ServingSpace(batch=upto(300)), options)
    largest: dict[int, int] = {}
    for row in found.ranking.order.tolist():
        if (
            found.table is not None
            and found.table.batch[row] > found.table.batch[largest.get(found.table.layout[row], row)] - 1
        ):
            largest[found.table.layout[row]] = row
    assert len(largest) > 3
    for report in map(found.report, largest.values()):
        more = replace(report.job, batch=report.job.batch + 1)
        one = infer(report.case.model, report.case.cluster, report.plan, more)
        assert report.job.batch == 300 or not _keeps(one, options)


@pytest.mark.parametrize(("kind", "risk"), [("dense", 0.2), ("dense", 0.95), ("experts", 0.9)])
def test_what_fits_at_a_risk_is_what_its_report_says(kind: str, risk: float) -> None:
    """A row fits at the asked chance exactly where `infer` gives it that chance, and fits as predicted."""
    space = ServingSpace(devices=IntRanges(((8, 8),)), batch=IntRanges(((400, 1600),)), batch_step=100)
    found = plan_serving(MODELS[kind], ON, replace(JOB, max_batched_tokens=4096), space, SearchOptions(risk=risk))
    assert found.table is not None
    fits = found.table.fits_at_risk
    assert fits.any()
    assert not fits.all()
    for row in range(0, len(fits), 5):
        report = found.report(row)
        assert fits[row] == (report.fits and report.chance_to_fit >= risk)


def _add_up(found: ServingResult) -> bool:
    return found.counts.fitting + sum(row.count for row in found.rejected) == found.num_plans


@pytest.mark.parametrize("kind", list(MODELS))
def test_every_plan_is_accounted_for(kind: str) -> None:
    """Plans that will do and plans that fell to a law or a limit add up to the space, each with a remedy."""
    found = plan_serving(MODELS[kind], ON, JOB, replace(SPACE, compute=("", "fp8")), LIMITED)
    assert _add_up(found)
    assert {"memory", "max_ttft_seconds", "formats"} <= {row.name for row in found.rejected}
    assert all(row.title and row.remedy and row.count for row in found.rejected)


def test_a_remedy_does_what_it_says() -> None:
    """The change that a limit's remedy names leads to a plan that will do, as far behind the best as it says."""
    found = plan_serving(MODELS["dense"], ON, JOB, SPACE, LIMITED)
    best = found.best[0]
    for name in ("memory", "max_ttft_seconds"):
        remedy = found.remedy(name)
        assert remedy is not None
        assert remedy.field
        assert remedy.best == (remedy.loss == 0)
        if remedy.best:
            said = {**{n: getattr(best.plan, n) for n in ("tp", "pp", "dp")}, "batch": best.job.batch}
            said |= {"weights": best.job.weights, "kv_cache": best.job.kv_cache}
            assert said[remedy.field] == remedy.value


def test_nothing_that_will_do_shows_the_nearest() -> None:
    """Where no plan keeps a limit, the answer is empty and the nearest plan is named."""
    found = plan_serving(MODELS["dense"], ON, JOB, SPACE, SearchOptions(max_tpot_seconds=1e-6))
    assert not found.best and not found.front
    assert found.nearest is not None
    assert _add_up(found)


@pytest.mark.parametrize(
    ("space", "options", "fields"),
    [
        (ServingSpace(weights=("fp7",), engine=("nope",)), SearchOptions(), {"weights", "engine"}),
        (ServingSpace(weights=("fp8", "fp8")), SearchOptions(objective="speed"), {"weights", "objective"}),
        (
            ServingSpace(batch=IntRanges(), batch_step=-1),
            SearchOptions(max_ttft_seconds=-1.0),
            {"batch", "batch_step", "max_ttft_seconds"},
        ),
    ],
)
def test_wrong_questions_are_refused(space: ServingSpace, options: SearchOptions, fields: set[str]) -> None:
    """Every problem of a space and a options is named at once."""
    with pytest.raises(InputError) as error:
        plan_serving(MODELS["dense"], ON, JOB, space, options)
    assert {p.field for p in error.value.problems} == fields


@functools.cache
def _best(cluster: Cluster, options: SearchOptions, **space: Any) -> float:
    found = plan_serving(MODELS["dense"], cluster, JOB, ServingSpace(**space), options)
    return _value(options.objective, found.best[0]) if found.best else float("inf")


OBJECTIVE = st.sampled_from(["throughput", "ttft", "tpot", "latency", "devices"])


@settings(max_examples=6, deadline=None)
@given(objective=OBJECTIVE, fewer=st.integers(1, 8), more=st.integers(0, 8), limit=st.floats(0.003, 0.05))
def test_more_devices_never_hurt(objective: str, fewer: int, more: int, limit: float) -> None:
    """With at most n devices the best never worsens as n grows."""
    options = SearchOptions(objective=objective, max_tpot_seconds=limit, top=1)
    few, many = (_best(ON, options, devices=upto(n)) for n in (fewer, min(8, fewer + more)))
    assert many <= few * (1 + 1e-12)


@settings(max_examples=6, deadline=None)
@given(objective=OBJECTIVE, limit=st.floats(0.003, 0.05), looser=st.floats(1, 10), widen=st.integers(0, 7))
def test_relaxing_never_hurts(objective: str, limit: float, looser: float, widen: int) -> None:
    """Neither a looser limit nor a wider range worsens the best."""
    options = SearchOptions(objective=objective, max_tpot_seconds=limit, max_ttft_seconds=1.0, top=1)
    narrow = {"tp": upto(1 + widen), "batch": upto(64)}
    tight = _best(ON, options, **narrow)
    assert _best(ON, replace(options, max_tpot_seconds=limit * looser), **narrow) <= tight * (1 + 1e-12)
    assert _best(ON, options, batch=upto(64)) <= tight * (1 + 1e-12)
    assert _best(ON, options, **narrow, weights=("", "fp8")) <= tight * (1 + 1e-12)


@settings(max_examples=6, deadline=None)
@given(
    objective=OBJECTIVE,
    name=st.sampled_from(["memory", "fast_bandwidth", "memory_bandwidth", "slow_bandwidth"]),
    worse=st.floats(0.2, 1.0),
)
def test_worse_hardware_never_helps(objective: str, name: str, worse: float) -> None:
    """Less memory, slower memory or a slower link never makes the best better."""
    good = {"memory": 24e9, "fast_bandwidth": 300e9, "memory_bandwidth": 2e12, "slow_bandwidth": 25e9}
    options = SearchOptions(objective=objective, top=1)
    clusters = [Cluster.parse("16xa100-sxm-80gb", {**good, name: int(good[name] * factor)}) for factor in (1.0, worse)]
    assert _best(clusters[0], options) <= _best(clusters[1], options) * (1 + 1e-12)


def test_a_search_for_serving_loads_nothing_of_training() -> None:
    """Deployments are searched, and their runners-up looked at, without a module of training."""
    code = "import sys, shardwise.answers._plan_infer, shardwise.search._sensitivity; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not [name for name in done.stdout.split() if name.startswith("shardwise.training")]


def test_experts_split_over_groups_of_attention_are_found_where_they_are_asked_for() -> None:
    """Two groups whose ranks split each expert, as vLLM runs them without expert parallelism, are a layout to search.

    A whole model on each device would not fit; without a word of etp it divides the tensor-parallel ranks.
    """
    model, cluster = load_model("qwen3-235b-a22b"), Cluster.parse("2xh200-sxm-141gb")
    job = Serving(input_tokens=1000, output_tokens=100, weights="fp8-block")
    two, one = (IntRanges.parse(word) for word in ("2", "1"))
    space = ServingSpace(tp=one, pp=one, dp=two, ep=one, etp=two, batch=IntRanges.parse("1..8"))
    best = plan_serving(model, cluster, job, space, SearchOptions(top=1)).best[0]
    assert (best.plan.dp, best.plan.ep, best.plan.etp) == (2, 1, 2)
    again = infer(model, cluster, Plan(dp=2, etp=2), replace(job, batch=best.job.batch))
    assert best.output_tokens_per_second == again.output_tokens_per_second
    free = plan_serving(model, cluster, job, replace(space, etp=IntRanges()), SearchOptions(top=1))
    assert not free.best
