"""Limits of a search of training plans hold for what is found, and say what they cost."""

from __future__ import annotations

from functools import cache

import pytest

import brute_force as brute
from shardwise import plan_training
from shardwise.errors import InputError
from shardwise.hardware import Cluster
from shardwise.models import MLP, Attention, Block, Model
from shardwise.plans import Training
from shardwise.records import replace
from shardwise.search import (
    OBJECTIVES,
    ProcessExecutor,
    SearchOptions,
    SearchSpace,
    TrainingResult,
    searched,
    upto,
    work_of,
)
from shardwise.training import PricedBlocks, TrainReport

pytestmark = pytest.mark.usefixtures("kept_recordings")

BLOCK = Block(mixers=(Attention(heads=16, kv_heads=4, head_dim=64),), feed_forward=MLP(ffn=4096))
MODEL = Model(name="grouped", family="llama", hidden=1024, vocab=32000, layers=(BLOCK,) * 8)
ON = Cluster.parse("8xa100-sxm-80gb", {"price": 2.0, "memory": "12GB"})
JOB = Training(
    seq_len=1024, global_batch=48, token_budget=1e11, failures_per_device_hour=1e-3, restart_seconds=600,
    checkpoint_interval_seconds=1800,
)  # fmt: skip
SPACE = SearchSpace(
    devices=upto(8), layout=("1d",), cp=upto(1), sharding=("zero1",), recompute=("none", "full"), micro_batch=upto(4)
)


@cache
def _fitting() -> tuple[TrainReport, ...]:
    """Every plan that fits, by brute force, the quickest first."""
    case = work_of(MODEL, ON, JOB, SPACE, None).grid.case
    legal = [plan for plan in brute.plans(case, SPACE) if brute.is_legal(case, plan)]
    priced = {plan.num_devices: PricedBlocks() for plan in legal}
    every = (brute.report(case, plan, priced[plan.num_devices]) for plan in legal)
    return tuple(sorted(filter(brute.fits, every), key=lambda r: r.step_seconds))


def _middle() -> TrainReport:
    return _fitting()[len(_fitting()) // 2]


def _free(report: TrainReport) -> float:
    return report.verdict.limit_bytes - report.device_bytes


LIMITS = {
    "max_step_seconds": lambda r: r.step_seconds,
    "max_run_seconds": lambda r: r.training_seconds,
    "max_usd": lambda r: r.usd,
    "min_free_bytes": lambda r: -_free(r),
}


@pytest.mark.parametrize("name", list(LIMITS))
def test_a_limit_leaves_what_keeps_it(name: str) -> None:
    """Under a limit, plans that will do, plans that fell and the best are those of brute force."""
    measure = LIMITS[name]
    most = measure(_middle())
    kept = [r for r in _fitting() if measure(r) <= most]
    found = plan_training(MODEL, ON, JOB, SPACE, SearchOptions(**{name: abs(most) + 1e-12 * most}))
    assert found.counts.fitting == len(kept)
    assert found.partial.rejected[name] == len(_fitting()) - len(kept)
    assert found.best[0].training_seconds == pytest.approx(min(r.training_seconds for r in kept), rel=1e-9)
    assert all(measure(r) <= most * (1 + 1e-9) for r in found.front if name != "min_free_bytes")


@pytest.mark.parametrize(
    ("objective", "measure"),
    [
        ("days", lambda r: r.training_seconds),
        ("cost", lambda r: r.usd),
        ("headroom", lambda r: -_free(r)),
        ("memory", lambda r: r.device_bytes),
        ("throughput", lambda r: -r.tokens_per_second_per_gpu * r.goodput),
        ("devices", lambda r: r.plan.num_devices),
    ],
)
def test_every_objective_has_its_best(objective: str, measure) -> None:  # type: ignore[no-untyped-def]
    """The best by each objective is that of brute force, the time that failures lose counted."""
    found = plan_training(MODEL, ON, JOB, SPACE, SearchOptions(objective=objective, top=1))
    assert measure(found.best[0]) == pytest.approx(min(map(measure, _fitting())), rel=1e-9)
    assert objective in OBJECTIVES


def _answer(found: TrainingResult) -> tuple[object, ...]:
    partial = found.partial
    return (
        [e.key for e in partial.top.entries],
        [e.key for e in partial.front.plans()],
        dict(partial.rejected),
        partial.counts,
    )


def test_limits_do_not_depend_on_the_way() -> None:
    """Parts of other sizes and several processes find the same under limits."""
    options = SearchOptions(max_step_seconds=_middle().step_seconds, max_usd=float(_middle().usd or 0))
    whole = _answer(plan_training(MODEL, ON, JOB, SPACE, options))
    for engine in (None, ProcessExecutor(2)):
        other = plan_training(MODEL, ON, JOB, SPACE, replace(options, rows=60), executor=engine)
        assert _answer(other) == whole


def test_wrong_limits_are_refused() -> None:
    """A limit that needs tokens, a price or memory that is not there is refused, all at once."""
    cluster = replace(ON, usd_per_device_hour=None)
    options = SearchOptions(max_usd=1.0, max_run_seconds=1.0, min_free_bytes=1e12, max_step_seconds=-1)
    with pytest.raises(InputError) as error:
        plan_training(MODEL, cluster, replace(JOB, token_budget=0), SPACE, options)
    fields = sorted(p.field for p in error.value.problems)
    assert fields == ["max_run_seconds", "max_step_seconds", "max_usd", "max_usd", "min_free_bytes"]


def test_rows_that_are_placed_apart_are_placed_as_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of many rows is placed some rows at a time, in less memory, and every row has the very places."""
    grids = [work_of(MODEL, Cluster.parse("64xh100-sxm-80gb"), JOB, None, None).grid for _ in range(2)]
    whole = grids[0].places
    monkeypatch.setattr("shardwise.search._placements._AT_ONCE", 20)
    apart = grids[1].places
    assert len(grids[1].base["tp"]) > 60 and grids[0].base["places"].tolist() == grids[1].base["places"].tolist()
    for name in ("start", "count", "fast", "order"):
        assert getattr(whole, name).tolist() == getattr(apart, name).tolist()
    for axis, tiers in whole.group_shapes.items():
        assert [t.tolist() for t in tiers] == [t.tolist() for t in apart.group_shapes[axis]]


def test_more_degrees_than_memory_holds_are_refused_before_the_search() -> None:
    """Every smaller number of a million devices is refused within seconds, and the answer says what to name."""
    cluster = Cluster.parse("1048576xh100-sxm-80gb")
    with (
        pytest.MonkeyPatch.context() as patched,
        pytest.raises(InputError, match=r"more than 2,000 ways.*fewer counts"),
    ):
        patched.setattr("shardwise.search._columns.MOST_DEGREES", 2000)
        work_of(MODEL, cluster, JOB, SearchSpace(devices=upto(65536)), None)


def test_work_of_options_without_limits_prunes() -> None:
    """Without limits nothing changes: most plans are never timed."""
    job = replace(JOB, failures_per_device_hour=0.0, restart_seconds=0.0)
    found = searched(work_of(MODEL, ON, job, SPACE, SearchOptions(top=1)), ProcessExecutor(1))
    assert found.counts.evaluated <= found.counts.legal
