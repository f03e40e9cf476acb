"""Rounds of a pipeline that are taken at once, against the same turns one by one."""

from __future__ import annotations

from dataclasses import fields, replace
from random import Random
from typing import Any

import pytest
from steady import draw

from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Arrivals, Length, Plan, Serving, Workload
from shardwise.serving import ServingOptions
from shardwise.serving.load import LoadOptions, _rotation, serve
from shardwise.serving.load._batches import lanes_of
from shardwise.serving.load._clients import closed_loop
from shardwise.serving.load._replica import Replica
from shardwise.serving.load._requests import Request, Trace
from shardwise.serving.load._sample import requests_of

# What adds up over a run: sums of the same seconds in another order.
_SAME = {"rel": 1e-9, "abs": 1e-9}


def ran(kind: str, seed: int) -> tuple[Replica, list[Trace]]:
    """Return a run of a random pipeline under a random load, whose cache may be as small as two requests."""
    random, drawn = Random(f"rounds {kind} {seed}"), draw(kind, seed)
    pool, (prompt, made) = drawn.fleet.decode, drawn.workload.longest
    policy, lanes = pool.policy, lanes_of(pool.base.plan, pool.policy.one_batch)
    cache = random.choice([pool.cache_tokens, 2.2 * (prompt + made), 6.0 * (prompt + made)])
    own = policy if policy.shared_places else replace(policy, max_sequences=-(-policy.max_sequences // lanes))
    engine = Replica(pool.table, own, cache, pool.groups * lanes).through_stages(policy, pool.groups)
    rate, count = random.choice([0.02, 0.1, 0.5, 0.9, 1.3]) * drawn.capacity, 150
    asked = replace(drawn.workload, arrivals=Arrivals(rate=rate), count=count, seed=seed)
    way = random.choice(["open", "looked at", "closed"])
    if way == "closed":
        for index, entry in enumerate(engine.entries):
            entry.begin(*closed_loop(asked, random.choice([1, 3, 20]), count, index, rate))
        return engine, engine.finish()
    if way == "open":
        return engine, engine.run(requests_of(asked, count))
    for index, request in enumerate(requests_of(asked, count)):
        engine.advance(request.arrival)
        engine.entries[index % len(engine.entries)].expect(request)
    return engine, engine.finish()


def told(request: Request) -> list[Any]:
    """Return all that a run books of a request."""
    names = ("arrival", "scheduled", "first", "end", "preemptions", "cached_tokens", "prompts", "others", "lost")
    return [*(getattr(request, name) for name in names), *request.waits]


@pytest.mark.parametrize("kind", ["stages", "guesses", "shared", "staged"])
@pytest.mark.parametrize("seed", range(15))
def test_rounds_at_once_are_the_turns_one_by_one(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is told of every request and batch is the same within 1e-9, over random engines and loads."""
    engine, fast = ran(kind, seed)
    if engine.rotation is None:
        pytest.skip("batches with waiting lists of their own, or no pipeline")
    monkeypatch.setattr(_rotation, "go_round", lambda rotation, horizon: None)
    slow = ran(kind, seed)[1]
    for one, other in zip(fast, slow, strict=True):
        assert len(one.finished) == len(other.finished)
        for here, there in zip(one.finished, other.finished, strict=True):
            assert told(here) == pytest.approx(told(there), **_SAME)
        for field in fields(Trace):
            here, there = getattr(one, field.name), getattr(other, field.name)
            if field.name == "gaps":
                assert [count for _, count in here] == [count for _, count in there]
                here, there = ([seconds for seconds, _ in gaps] for gaps in (here, there))
            if field.name != "finished":
                assert here == pytest.approx(there, **_SAME), field.name


@pytest.mark.parametrize(("engine", "stages", "requests"), [("vllm", 4, 30.0), ("vllm", 3, 30.0), ("sglang", 8, 60.0)])
def test_a_step_begins_no_sooner_than_its_host_launches_it(engine: str, stages: int, requests: float) -> None:
    """Stages of a small model are shorter than the host's turn: no first token comes before its request."""
    asked = Workload(
        input_tokens=Length(mean=256), output_tokens=Length(mean=300), arrivals=Arrivals(rate=requests), count=300
    )
    options = LoadOptions(serving=ServingOptions(engine=engine))
    on, job = Cluster.parse(f"{stages}xh100-sxm-80gb"), Serving(max_batched_tokens=2048)
    report = serve(load_model("llama-3.2-1b"), on, Plan(pp=stages), asked, job, options)
    alone = min(float(report.fleet.at(0.0).ttft_seconds), report.latencies["ttft"]["p50"])
    finished = [one for trace in report.traces for one in trace.finished]
    assert report.stable and len(finished) == 300
    for one in finished:
        assert one.scheduled is not None and one.first is not None
        assert one.arrival <= one.scheduled <= one.first
        assert one.first - one.arrival > 0.5 * alone > 0.0
