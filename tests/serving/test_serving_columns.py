"""One formula for numbers, columns and explanations: they agree plan by plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.errors import InputError
from shardwise.hardware import Cluster
from shardwise.ledger.traced import Traced, parts
from shardwise.models import load_model
from shardwise.plans import Plan, Serving
from shardwise.serving import infer
from shardwise.serving._batch import evaluate
from shardwise.serving._case import ServingQuestion, complete
from shardwise.serving._sizes import sizes_of, sizes_of_columns

PLANS = (
    Plan(dp=16), Plan(tp=2, pp=2, dp=4), Plan(tp=4, pp=4), Plan(tp=8, pp=2), Plan(tp=8, dp=2), Plan(tp=16),
    Plan(tp=8, dp=2, ep=8), Plan(tp=8, dp=2, ep=16), Plan(tp=4, pp=3, dp=0),
)  # fmt: skip
BATCHES = (3, 8, 1, 64, 7, 200, 9, 5, 12)
TIMES = ("prefill.seconds", "decode.seconds", "request_seconds", "decode.slowest_stage", "decode.overhead")


def pick(value: object, path: str) -> object:
    """Return a nested attribute."""
    for name in path.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("max_batched_tokens", [0, 300, 2048])
@pytest.mark.parametrize("name", ["llama-3.1-70b", "deepseek-v3", "mixtral-8x7b", "gpt-oss-120b"])
def test_columns_equal_numbers_plan_by_plan(name: str, max_batched_tokens: int) -> None:
    """A column of plans gives each plan's own seconds and bytes to 1e-9."""
    numpy = pytest.importorskip("numpy")
    model, cluster = load_model(name), Cluster.parse("16xh100-sxm-80gb")
    job = Serving(batch=8, input_tokens=700, output_tokens=90, max_batched_tokens=max_batched_tokens)
    cases, batches = [], []
    for plan, batch in zip(PLANS, BATCHES, strict=True):
        try:
            cases.append(complete(ServingQuestion(model=model, cluster=cluster, plan=plan, job=job))[0])
            batches.append(batch)
        except InputError:
            continue
    assert len(cases) >= 5
    columns = evaluate(cases[0], sizes_of_columns(model, [c.plan for c in cases], batches, cases[0].domains))
    for i, (case, batch) in enumerate(zip(cases, batches, strict=True)):
        own = replace(case, job=replace(job, batch=batch))
        one = evaluate(own, sizes_of(model, own.plan, own.job, own.domains))
        for path in TIMES:
            assert pick(columns, path)[i] == pytest.approx(pick(one, path), rel=1e-9)
        for path in ("weights", "kv_cache", "activations", "sampling", "needed"):
            found = max(numpy.broadcast_to(getattr(m, path), len(cases))[i] for m in columns.memory)
            assert found == pytest.approx(max(getattr(m, path) for m in one.memory), rel=1e-9)
        for axis, seconds in one.decode.exposed.items():
            assert numpy.broadcast_to(columns.decode.exposed[axis], len(cases))[i] == pytest.approx(seconds, abs=1e-15)


def walk(node: Traced, depth: int = 0) -> None:
    """Check that what a node opens to sums to it, down to the leaves."""
    found = parts(node)
    if found:
        assert sum(p.amount for p in found) == pytest.approx(float(node), rel=1e-9, abs=1e-15)
    for part in found:
        if depth < 6 and part.node is not None:
            walk(part.node, depth + 1)


@pytest.mark.parametrize("what", ["ttft", "tpot", "request", "memory", "kv_cache"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "gpt-oss-20b"])
def test_every_headline_opens_into_parts_that_sum_to_it(name: str, what: str) -> None:
    """`explain` gives the reported number, and its contributions add up at every level."""
    job = Serving(batch=4, input_tokens=600, output_tokens=100)
    report = infer(load_model(name), Cluster.parse("16xh100-sxm-80gb"), Plan(tp=8, pp=2), job)
    reported = {"ttft": report.ttft_seconds, "tpot": report.tpot_seconds, "request": report.request_seconds,
                "memory": report.memory.needed, "kv_cache": report.memory.kv_cache}  # fmt: skip
    node = report.explain(what)
    assert float(node) == pytest.approx(reported[what], rel=1e-12)
    walk(node)
    with pytest.raises(InputError, match="use one of ttft, tpot, request, memory, kv_cache"):
        report.explain("latency")
