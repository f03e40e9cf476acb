"""Serving under load: prices of steps, laws of queues, one request against `infer`, bad input."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import both, run
from serving.serving_cases import after_pause
from shardwise.errors import InputError
from shardwise.formats.latencies import read_latencies
from shardwise.formats.traces import read_lengths, read_trace
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Arrivals, Length, Limit, Plan, RequestClass, Serving, Workload
from shardwise.serving import ServingOptions, infer
from shardwise.serving._cost_model import engine_cost_model
from shardwise.serving._ledger import EngineStep
from shardwise.serving._sizes import sizes_of
from shardwise.serving._step import step_cost
from shardwise.serving.load import LoadOptions, ServeReport, StepTable, serve
from shardwise.serving.load._fleet import requests_of
from shardwise.serving.load._replica import Replica
from shardwise.serving.load._requests import PrefixCache, Request

CASES = {
    "dense": ("llama-3.1-8b", "1xh100-sxm-80gb", Plan(), "vllm"),
    "moe": ("mixtral-8x7b", "4xa100-sxm-80gb", Plan(tp=4), "sglang"),
    "mla": ("deepseek-v2-lite", "1xh200-sxm-141gb", Plan(), "tensorrt-llm"),
}
STATE = {"state": ("mamba-2.8b", "1xmi300x", Plan(), "vllm")}


def workload(rate: float = 0.0, count: int = 400, **more: Any) -> Workload:
    """Return requests of 1,000 tokens in and 100 out, Poisson at a rate unless said otherwise."""
    fields = {"input_tokens": Length(mean=1000), "output_tokens": Length(mean=100), "arrivals": Arrivals(rate=rate)}
    return Workload(**{**fields, "count": count, **more})


ONE = Length(mean=1)
SPREAD = Length(kind="lognormal", mean=100, cv=0.8)


@cache
def answer(name: str, asked: Workload, replicas: int = 1, job: Serving = Serving()) -> ServeReport:  # noqa: B008
    """Return the report of a case under a workload."""
    model, cluster, plan, engine = (CASES | STATE)[name]
    count, _, device = cluster.partition("x")
    machine = Cluster.parse(f"{int(count) * replicas}x{device}")
    options = LoadOptions(serving=ServingOptions(engine=engine))
    return serve(load_model(model), machine, replace(plan, dp=replicas), asked, job, options)


def test_users_are_not_served_beyond_the_capacity() -> None:
    """Equal requests of users keep groups in step, which carries more than those that come one by one."""
    options = LoadOptions(serving=ServingOptions(engine="tensorrt-llm"))
    asked = Workload(
        input_tokens=Length(mean=1024), output_tokens=Length(mean=256), arrivals=Arrivals(kind="closed", users=128),
        count=640,
    )  # fmt: skip
    model, cluster = load_model("deepseek-v3"), Cluster.parse("8xh200-sxm-141gb")
    found = serve(model, cluster, Plan(dp=8, ep=8), asked, Serving(max_sequences=16), options)
    assert found.steady.capacity < found.requests_per_second <= found.capacity_per_second


def test_a_fleet_is_simulated_until_it_is_full() -> None:
    """Unless it is told how many, requests are enough that eight replicas are as busy as one; too few say so."""
    asked = "serve llama-3.1-8b --on 8xh100 --tp 1 --rate 200/s --input-tokens 1000 --output-tokens 100 --json"
    found, few, long = (run(*asked.split(), *more) for more in ((), ("--requests", "800"), ("--requests", "30000")))
    mean, short, true = (done.tree["e2e"]["mean_seconds"] for done in (found, few, long))
    assert mean == pytest.approx(true, rel=0.05)
    assert short < 0.85 * true
    assert found.tree["served"]["requests_per_second"] > 0.9 * 200
    assert [
        any("find the deployment as empty" in one for one in done.tree["assumptions"]) for done in (found, few)
    ] == [
        False,
        True,
    ]


def test_sorting_takes_a_seventh_of_a_busy_engine() -> None:
    """Of 47.4 requests of ShareGPT a second top_p leaves vLLM's V1 40.2 (github.com/vllm-project/vllm pull 11394)."""
    asked = (
        "serve llama-3.1-8b --on 1xh100 --users 256 --max-sequences 256 --input-tokens 20..410 --output-tokens 20..376"
    )
    plain, sorting = (
        run(*asked.split(), "--requests", "1500", "--json", "--engine", engine).tree["served"]["requests_per_second"]
        for engine in ("vllm-2025", "vllm-sorting")
    )
    assert sorting / plain == pytest.approx(40.2 / 47.4, rel=0.03)


def test_users_who_think_do_not_ask_in_step() -> None:
    """However many join at once, those who think for long find the server as idle as so few requests leave it."""
    alone, asked, busier = (
        answer("dense", workload(arrivals=Arrivals(kind="closed", users=users, think_seconds=think), count=10 * users))
        for users, think in ((1, 0.0), (64, 1000.0), (64, 10.0))
    )
    assert asked.latencies["ttft"]["p99"] < 1.5 * alone.latencies["ttft"]["p50"]
    assert asked.latencies["ttft"]["mean"] < busier.latencies["ttft"]["mean"] < 0.1


def test_users_who_think_alike_do_not_fall_into_step() -> None:
    """Users of equal requests who think find the server as Poisson arrivals at their rate find it, however long on."""
    arrivals = Arrivals(kind="closed", users=16, think_seconds=10.0)
    thinking = answer("dense", workload(arrivals=arrivals, count=1600))
    poisson = answer("dense", workload(arrivals=Arrivals(rate=thinking.requests_per_second), count=1600))
    first, usual = (report.latencies["ttft"] for report in (thinking, poisson))
    assert first["p99"] < 1.3 * usual["p99"] and first["mean"] == pytest.approx(usual["mean"], rel=0.1)
    assert thinking.traces[0].most_running < 16


def test_batches_of_a_pipeline_are_of_one_replica() -> None:
    """What runs and what the cache holds at most is of all batches in flight: never below what it is on average."""
    asked = "serve llama-3.1-70b --on 8xh100 --tp 4 --pp 2 --rate 4/s --input-tokens 2000 --output-tokens 300"
    tree = run(*asked.split(), "--requests", "400", "--json").tree
    assert tree["running"]["mean"] < tree["running"]["max"] <= 400
    assert tree["kv"]["used_mean"] < tree["kv"]["used_max"] <= tree["kv"]["capacity_tokens"]


def test_a_price_of_a_step_does_not_depend_on_those_asked_before() -> None:
    """A piece of a prompt over a cache costs the same in a new table and in one that priced another nearby."""
    case = answer("dense", workload(1.0, 1)).base.case
    new, used = (StepTable(case, 8, 2048, 8192) for _ in range(2))
    used.mixed(2, 1000.0, [(500, 4096)])
    assert used.mixed(2, 1000.0, [(500, 4150)]) == new.mixed(2, 1000.0, [(500, 4150)])


@settings(max_examples=16, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(("lognormal", "exponential", "uniform")),
    count=st.integers(400, 3000),
    seed=st.integers(0, 9),
    share=st.floats(0.1, 0.9),
)
def test_a_run_has_the_lengths_and_the_rate_that_are_asked_for(kind: Any, count: int, seed: int, share: float) -> None:
    """Mean lengths, shares of classes and requests a second of a run are those that are stated, whatever the seed."""
    length = Length(kind=kind, mean=300, cv=0.8, low=100, high=500 if kind == "uniform" else 0)
    asked = workload(2.0, count, input_tokens=length, output_tokens=length, seed=seed)
    requests = list(requests_of(asked, count))
    expected = sum(length.at((i + 0.5) / 10_000) for i in range(10_000)) / 10_000
    for made in ([r.input_tokens for r in requests], [r.output_tokens for r in requests]):
        assert sum(made) / count == pytest.approx(expected, rel=0.01)
    assert requests[-1].arrival == pytest.approx(count / 2.0, rel=1e-9)
    classes = tuple(
        RequestClass(name=name, share=part, input_tokens=length, output_tokens=length)
        for name, part in (("chat", share), ("code", 1 - share))
    )
    first = sum(r.kind == 0 for r in requests_of(replace(asked, classes=classes), count))
    assert first == pytest.approx(share * count, abs=1.01)


@pytest.mark.parametrize("name", CASES)
def test_the_table_of_steps_is_the_price_of_steps(name: str) -> None:
    """Any decode step and any whole prompt that is looked up costs what the ledger says, within 1.5 %."""
    case = answer(name, workload(1.0, 20)).base.case
    table, random = StepTable(case, 256, 8192, 16384), Random(1)
    sizes = sizes_of(case.model, case.plan, case.job, case.domains)
    costs = engine_cost_model(case, sizes)
    for _ in range(12):
        count, context = random.randint(1, 256), random.randint(64, 16000)
        step = EngineStep(phase="decode", sequences=count, tokens=1, context=context)
        wanted = float(step_cost(case, sizes, step, replace(costs, decoding=True)).seconds)
        assert table.decode(count, context) == pytest.approx(wanted, rel=0.015)
        tokens = random.randint(16, 8192)
        prompt = EngineStep(phase="prefill", sequences=1, tokens=tokens, context=0)
        wanted = float(step_cost(case, sizes, prompt, costs).seconds)
        assert table.mixed(0, 0.0, [(tokens, 0)]) == pytest.approx(wanted, rel=0.03)


def test_a_prompt_beside_others_leaves_each_its_state() -> None:
    """A step of many recurrent states and one prompt moves all of them, and is no shorter than without the prompt."""
    report = answer("state", workload(1.0, 20))
    case = report.base.case
    table, sizes = StepTable(case, 1024, 8192, 1024), sizes_of(case.model, case.plan, case.job, case.domains)
    costs = replace(engine_cost_model(case, sizes), decoding=True)
    for count in (16, 256, 1024):
        decode = step_cost(case, sizes, EngineStep(phase="decode", sequences=count, tokens=1, context=64), costs)
        assert float(decode.of("state")) > 0.1 * decode.seconds
        beside = table.mixed(count, 64.0, [(512, 0)]) - table.mixed(0, 0.0, [(512 + count, 0)])
        assert beside > 0.9 * float(decode.of("state")) - table.mixed(0, 0.0, [(count, 0)])
        assert table.mixed(count, 64.0, [(1, 0)]) >= table.decode(count, 64.0)
    done = run("plan", "serve", "mamba-2.8b", "--rate", "20/s", "--on", "1xmi300x", "--json")
    assert all(point["ttft_seconds"] > 0 for point in done.tree["front"])


@pytest.mark.parametrize("name", CASES)
def test_one_request_is_a_static_batch_of_one(name: str) -> None:
    """A single request on an empty server takes what `infer` says of a batch of one, less what its clock spares."""
    model, cluster, plan, engine = CASES[name]
    job = Serving(batch=1, input_tokens=1000, output_tokens=100, max_batched_tokens=8192, max_sequences=1)
    alone = infer(load_model(model), Cluster.parse(cluster), plan, job, ServingOptions(engine=engine))
    one = answer(name, workload(count=1, arrivals=Arrivals(kind="burst"))).requests[0]
    sooner = alone.ttft_seconds - after_pause(alone)
    assert one.ttft_seconds == pytest.approx(alone.ttft_seconds - sooner, rel=0.02)
    assert one.e2e_seconds == pytest.approx(alone.request_seconds - sooner, rel=0.02)


@pytest.mark.parametrize("name", ["dense", "moe"])
@pytest.mark.parametrize(
    ("batch", "prompt", "step"), [(1, 3000, 2048), (1, 9000, 2048), (5, 3000, 2048), (8, 1100, 2048)]
)
def test_prompts_are_cut_as_the_engine_cuts_them(name: str, batch: int, prompt: int, step: int) -> None:
    """Steps are full but the last: so many requests at once, of a token each, end as `infer` says of their batch."""
    model, cluster, plan, engine = CASES[name]
    options, machine = ServingOptions(engine=engine), Cluster.parse(cluster)
    job = Serving(batch=batch, input_tokens=prompt, output_tokens=1, max_batched_tokens=step, max_sequences=8)
    together = infer(load_model(model), machine, plan, job, options)
    asked = workload(0, batch, arrivals=Arrivals(kind="burst"), input_tokens=Length(mean=prompt), output_tokens=ONE)
    report = serve(
        load_model(model), machine, plan, asked, Serving(max_batched_tokens=step, max_sequences=8),
        LoadOptions(serving=options),
    )  # fmt: skip
    last = max(one.ttft_seconds - one.server_seconds for one in report.requests)
    assert last == pytest.approx(after_pause(together), rel=0.01)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(("stages", "prompt"), [(2, 9000), (4, 9000), (4, 1000)])
def test_pieces_of_a_prompt_follow_one_another_through_the_stages(engine: str, stages: int, prompt: int) -> None:
    """One request of 9,000 tokens in steps of 2,048 takes what `infer` says, simulated and in closed form.

    It took 1.6 times as long on two stages, and 2.2 times on four, where each piece waited for the one before it.
    """
    model, machine, plan = load_model("llama-3.1-8b"), Cluster.parse(f"{stages}xh100-sxm-80gb"), Plan(pp=stages)
    options, job = ServingOptions(engine=engine), Serving(max_batched_tokens=2048)
    alone = infer(model, machine, plan, replace(job, batch=1, input_tokens=prompt, output_tokens=20), options)
    asked = workload(1e-4, 1, input_tokens=Length(mean=prompt), output_tokens=Length(mean=20))
    report = serve(model, machine, plan, asked, job, LoadOptions(serving=options))
    for seconds in (report.requests[0].ttft_seconds, report.steady.ttft_seconds):
        assert seconds == pytest.approx(after_pause(alone), rel=0.05)


@pytest.mark.parametrize(
    ("model", "cluster", "plan", "tokens"),
    [
        ("mixtral-8x7b", "1xh200-sxm-141gb", Plan(), 0),
        ("gpt-oss-20b", "1xh100-sxm-80gb", Plan(), 0),
        ("llama-3.1-8b", "1xh100-sxm-80gb", Plan(), 0),
        ("llama-3.1-8b", "1xh100-sxm-80gb", Plan(), 128),
        ("llama-3.1-8b", "2xh100-sxm-80gb", Plan(pp=2), 0),
    ],
)
@pytest.mark.parametrize("prompt", [200, 1000, 3000])
def test_one_request_takes_the_ubatches_of_its_logical_batches(
    model: str, cluster: str, plan: Plan, tokens: int, prompt: int
) -> None:
    """A step of llama.cpp costs the sum of its ubatches: one request takes what `infer` says, in as many bytes.

    Steps are priced between those of a grid, where experts that tokens meet, whose loads show, grow by less each.
    """
    job = Serving(batch=1, input_tokens=prompt, output_tokens=100, max_batched_tokens=tokens)
    machine, options = Cluster.parse(cluster), ServingOptions(engine="llama.cpp")
    alone = infer(load_model(model), machine, plan, job, options)
    asked = workload(1e-4, 1, input_tokens=Length(mean=prompt))
    report = serve(
        load_model(model), machine, plan, asked, Serving(max_batched_tokens=tokens), LoadOptions(serving=options)
    )
    one, sooner = report.requests[0], alone.ttft_seconds - after_pause(alone)
    for ttft, whole in ((one.ttft_seconds, one.e2e_seconds), (report.steady.ttft_seconds, report.steady.e2e_seconds)):
        assert ttft == pytest.approx(alone.ttft_seconds - sooner, rel=0.035)
        assert whole == pytest.approx(alone.request_seconds - sooner, rel=0.035)
    assert report.base.kv_cache_tokens == alone.kv_cache_tokens
    assert report.policy.step_tokens == 2048


def test_a_step_that_ubatches_share_costs_their_sum() -> None:
    """Prompts and tokens of those that decode fill ubatches of 512 tokens; a token more is a ubatch of its own."""
    options = LoadOptions(serving=ServingOptions(engine="llama.cpp"))
    case = serve(
        load_model("mixtral-8x7b"), Cluster.parse("1xh200-sxm-141gb"), Plan(), workload(1e-4, 1), Serving(), options
    ).base.case
    table = StepTable(case, 4, 2048, 8192)
    full, one = table.mixed(0, 0.0, [(512, 0)]), table.mixed(0, 0.0, [(1, 0)])
    assert table.mixed(0, 0.0, [(512, 0)] * 4) == pytest.approx(4 * full, rel=1e-3)
    assert table.mixed(0, 0.0, [(512, 0), (1, 0)]) == pytest.approx(full + one, rel=1e-3)
    assert table.mixed(2, 64.0, [(510, 0)]) == pytest.approx(full, rel=0.02)
    assert table.mixed(2, 64.0, [(511, 0)]) == pytest.approx(full + one, rel=0.02)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_work_and_time_are_conserved(name: str, share: float) -> None:
    """Every request ends with all its tokens; time in the system is the integral of who runs (Little's law)."""
    most = answer(name, workload(1e-3, 20)).steady.capacity
    found = answer(name, workload(share * most))
    trace = found.traces[0]
    assert len(found.requests) == 400
    assert trace.prompt_tokens + trace.hit_tokens - trace.recomputed_tokens == 400 * 1000
    resident = sum(r.end - r.scheduled for r in found.requests)
    assert trace.preemptions or trace.running_seconds == pytest.approx(resident, rel=1e-9)
    assert trace.busy_seconds <= trace.seconds * (1 + 1e-12)
    for request in found.requests:
        assert 0 <= request.queue_seconds <= request.ttft_seconds <= request.e2e_seconds
        assert sum(request.waits) == pytest.approx(request.queue_seconds, abs=1e-9)


@pytest.mark.parametrize("name", ["dense", "mla"])
def test_who_comes_while_others_decode_waits_for_the_step_under_way(name: str) -> None:
    """However long a sequence has decoded alone, and its context grown, a prompt starts with the next step."""
    asked = workload(arrivals=Arrivals(kind="trace", times=(0.0, 3.0)), pairs=((64, 4000), (64, 10)), count=2)
    report = answer(name, asked)
    late, table = report.requests[0], report.fleet.decode.table
    context = 64 + 4000
    assert late.arrival == 3.0
    own = table.mixed(1, context, [(64, 0)])
    assert late.ttft_seconds <= 2 * table.decode(1, context) + own


def test_seeds_reproduce() -> None:
    """The same seed gives the same seconds to the last bit, another seed others."""
    first, again, other = (answer("dense", workload(10.0, seed=seed)) for seed in (1, 1, 2))
    model, cluster, plan, _ = CASES["dense"]
    anew = serve(load_model(model), Cluster.parse(cluster), plan, workload(10.0, seed=1))
    assert first.latencies == again.latencies == anew.latencies
    assert first.latencies != other.latencies


@settings(max_examples=8, deadline=None, derandomize=True)
@given(share=st.floats(0.2, 0.9), seed=st.integers(0, 99), cv=st.sampled_from((0.0, 0.8)))
def test_more_replicas_never_raise_a_percentile(share: float, seed: int, cv: float) -> None:
    """The same load on twice the replicas has no higher mean or percentile of TTFT, TPOT or end to end."""
    most = answer("dense", workload(1e-3, 20)).steady.capacity
    length = Length(kind="lognormal" if cv else "fixed", mean=100, cv=cv)
    one, two = (answer("dense", workload(share * most, seed=seed, output_tokens=length), n) for n in (1, 2))
    if not one.stable:
        return
    for metric in ("ttft", "tpot", "e2e"):
        for name, seconds in two.latencies[metric].items():
            assert seconds <= one.latencies[metric][name] * 1.02, (metric, name)


@pytest.mark.parametrize("name", CASES)
def test_a_load_that_is_not_carried_has_no_percentiles(name: str) -> None:
    """Above the capacity the answer says by how much the queue grows, and gives no latency."""
    most = answer(name, workload(1e-3, 20)).steady.capacity
    found = answer(name, workload(1.5 * most))
    assert not found.stable
    assert not found.meets
    assert found.latencies == {}
    assert found.growth_per_second == pytest.approx(1.5 * most - found.capacity_per_second, rel=1e-6)
    assert 0.7 * most < found.capacity_per_second < 1.3 * most
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("output", [20, 800])
def test_a_short_run_does_not_hide_that_a_load_is_too_high(name: str, output: int) -> None:
    """A tenth above what a full queue is served at is not stable, however long answers are beside the run."""
    fields = {"input_tokens": Length(mean=200), "output_tokens": Length(mean=output)}
    most = answer(name, workload(1e-3, 20, **fields)).steady.capacity
    full = answer(name, workload(1.01 * most, 1000, **fields))
    assert full.saturated is not None
    most = max(full.saturated, most)
    assert not answer(name, workload(1.1 * most, 1000, **fields)).stable


def test_a_full_cache_preempts_and_every_request_still_ends() -> None:
    """A burst of long answers fills the cache: requests are preempted, and all end with what they asked."""
    asked = workload(count=300, arrivals=Arrivals(kind="burst"), output_tokens=Length(mean=4000))
    found = answer("dense", asked)
    assert found.traces[0].preemptions > 0
    assert found.traces[0].most_cache_tokens <= found.base.kv_cache_tokens * 1.001
    assert len(found.requests) == 300


def test_a_prompt_that_does_not_fit_whole_waits() -> None:
    """Since 0.19 vLLM admits who has room for all of the prompt; to 0.17, who had room for the first piece of it."""
    pairs = ((26_500, 1500), (26_500, 10))
    asked = workload(arrivals=Arrivals(kind="trace", times=(0.0, 5.0)), pairs=pairs, count=2)
    job, model, machine = Serving(max_batched_tokens=2048), load_model("llama-3.1-8b"), Cluster.parse("1xrtx-4090")
    found = {}
    for engine in ("vllm", "vllm-0.19", "vllm-0.17", "vllm-2025", "vllm-0.14", "vllm-0.13"):
        report = serve(model, machine, Plan(), asked, job, LoadOptions(serving=ServingOptions(engine=engine)))
        assert 28_000 < report.base.kv_cache_tokens < 53_000
        found[engine] = sorted(report.requests, key=lambda one: one.arrival)
    waits = {engine: last.scheduled >= first.end for engine, (first, last) in found.items()}
    assert [engine for engine, late in waits.items() if late] == ["vllm", "vllm-0.19"]


@pytest.mark.parametrize("tokens", [64, 256, 2048])
def test_far_more_than_short_steps_carry_only_grows(tokens: int) -> None:
    """A cycle of more prompts than tables of cycles have was shorter than nothing where each had made it shorter."""
    lengths = {"input_tokens": Length(mean=512), "output_tokens": Length(mean=128)}
    found = answer("dense", workload(500, **lengths), job=Serving(max_batched_tokens=tokens))
    assert not found.stable
    assert found.growth_per_second == pytest.approx(500 - found.capacity_per_second)


def test_a_closed_loop_never_has_more_than_its_users() -> None:
    """Users wait for their answers: as many run as there are users at most, and all requests are asked."""
    found = answer("dense", workload(count=500, arrivals=Arrivals(kind="closed", users=16)))
    assert found.traces[0].most_running <= 16
    assert len(found.requests) == 500
    slower = answer("dense", workload(count=500, arrivals=Arrivals(kind="closed", users=16, think_seconds=2.0)))
    assert slower.requests_per_second < found.requests_per_second


def test_users_of_a_running_server_do_not_come_all_at_once() -> None:
    """A benchmark's users start together and equal requests keep in step; users of a running server do neither."""
    asked = workload(count=500, arrivals=Arrivals(kind="closed", users=64))
    server, benchmark = answer("dense", asked), answer("dense", replace(asked, finite=True))
    assert 5 * server.latencies["ttft"]["p99"] < benchmark.latencies["ttft"]["p99"]
    assert server.latencies["tpot"]["mean"] == pytest.approx(benchmark.latencies["tpot"]["mean"], rel=0.25)
    starts = sorted(r.arrival for r in server.requests)[:64]
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    assert min(gaps) == pytest.approx(1 / server.steady.capacity) == max(gaps)
    assert sorted(r.arrival for r in benchmark.requests)[:65].count(0.0) == 64


@pytest.mark.parametrize("engine", ["vllm", "vllm-v0", "vllm-0.2", "sglang", "fastertransformer"])
@pytest.mark.parametrize("arrivals", [Arrivals(kind="closed", users=24), Arrivals(kind="poisson", rate=3.0)])
def test_gaps_between_tokens_add_up_to_the_time_of_answers(engine: str, arrivals: Arrivals) -> None:
    """Whether prompts run beside other tokens or hold them up, every second between two tokens is in one gap."""
    asked = workload(count=200, arrivals=arrivals, output_tokens=Length(mean=65))
    model, cluster, plan, _ = CASES["dense"]
    options = LoadOptions(serving=ServingOptions(engine=engine))
    found = serve(load_model(model), Cluster.parse(cluster), plan, asked, Serving(), options)
    means = {name: found.latencies[name]["mean"] for name in ("itl", "tpot")}
    assert means["itl"] == pytest.approx(means["tpot"], rel=1e-9)
    assert found.latencies["itl"]["p99"] > 1.5 * found.latencies["itl"]["p50"]


def test_a_shared_prefix_shortens_first_tokens() -> None:
    """A system prompt that all share is computed once: the share of it is the hit rate."""
    plain, shared = (answer("dense", workload(5.0, prefix_tokens=n)) for n in (0, 512))
    assert shared.to_dict()["prefix_hit_share"] == pytest.approx(0.512)
    assert shared.latencies["ttft"]["mean"] < plain.latencies["ttft"]["mean"]


@pytest.mark.parametrize("name", CASES)
def test_a_cache_holds_a_shared_prefix_once(name: str) -> None:
    """Forty requests of one long system prompt run at once where there is room for it and what each adds."""
    asked = workload(count=40, arrivals=Arrivals(kind="burst"), prefix_tokens=8000, finite=True)
    asked = replace(asked, input_tokens=Length(mean=8200), output_tokens=Length(mean=400))
    base, room = answer(name, asked), 8000 + 40 * (200 + 400 + 16) + 1000.0
    trace = Replica(base.fleet.decode.table, base.policy, room).run(requests_of(asked, asked.count))[0]
    assert trace.most_running == 40
    assert trace.preemptions == 0
    assert 40 * 8000 > room > trace.most_cache_tokens > 8000
    assert len(trace.finished) == 40


def test_each_attention_group_has_a_prefix_cache_of_its_own() -> None:
    """A benchmark's shared prefix is computed once a group; of conversations groups find less, the more there are."""
    model, options = load_model("deepseek-v2-lite"), LoadOptions(serving=ServingOptions(engine="sglang"))

    def hits(groups: int, asked: Workload) -> tuple[list[int], list[int]]:
        plan = Plan(dp=groups, ep=groups)
        found = serve(model, Cluster.parse(f"{groups}xh200-sxm-141gb"), plan, asked, None, options)
        return [one.hit_tokens for one in found.traces], [len(one.finished) for one in found.traces]

    rare = Arrivals(kind="trace", times=tuple(3.0 * i for i in range(24)))
    asked = workload(prefix_tokens=512, arrivals=rare, count=24, finite=True)
    for groups in (1, 2, 4):
        found, ended = hits(groups, asked)
        assert found == [512 * max(count - 1, 0) for count in ended]
    # Seven conversations in turn, so that none stays with a group.
    blocks = tuple(tuple((100 * (i % 7) + j, 512) for j in range(2 * (1 + i // 7))) for i in range(28))
    every = [sum(hits(groups, asked_at(tuple(2.0 * i for i in range(28)), blocks))[0]) for groups in (1, 2, 4)]
    assert every == sorted(every, reverse=True)
    assert every[0] > every[-1]


@pytest.mark.parametrize("name", CASES)
def test_a_replica_that_is_sent_requests_one_by_one_does_the_same(name: str) -> None:
    """One replica behind a router that looks at loads has the very seconds of one that knows every arrival."""
    asked = workload(0.7 * answer(name, workload(1e-3, 20)).steady.capacity, output_tokens=SPREAD)
    known = answer(name, asked)
    model, cluster, plan, engine = CASES[name]
    options = LoadOptions(router="least-loaded", serving=ServingOptions(engine=engine))
    sent = serve(load_model(model), Cluster.parse(cluster), plan, asked, None, options)
    for metric in ("ttft", "e2e"):
        assert sent.latencies[metric] == pytest.approx(known.latencies[metric], rel=1e-9)


def test_a_scheduler_that_looks_seldom_lets_requests_wait() -> None:
    """Who comes while sequences decode waits for some of the steps between two looks; alone it is seen at once."""
    model, cluster, plan, engine = CASES["moe"]

    def ttft(users: int, steps: int | None) -> float:
        options = LoadOptions(receive_steps=steps, serving=ServingOptions(engine=engine))
        lengths = Length(kind="uniform", mean=100, low=80, high=120)
        loop = Arrivals(kind="closed", users=users)
        asked = workload(count=100 * users, output_tokens=lengths, arrivals=loop, finite=True)
        found = serve(load_model(model), Cluster.parse(cluster), plan, asked, None, options)
        return found.latencies["ttft"]["mean"]

    step = answer("moe", workload(1.0)).base.tpot_seconds
    assert ttft(4, 1) == ttft(4, None)
    assert 10 * step < ttft(4, 30) - ttft(4, 1) < 30 * step
    assert ttft(1, 30) == ttft(1, 1)


def test_prompts_that_wait_for_others_wait_so_many_steps() -> None:
    """Alone a prompt waits its steps beside who decodes; once prompts fill the share of a step they run at once."""
    pairs = ((100, 2000), *((1000, 10),) * 4)
    asked = workload(arrivals=Arrivals(kind="trace", times=(0.0, 1.0, 1.001, 3.0, 3.001)), pairs=pairs, count=5)
    model, machine = load_model("llama-3.1-8b"), Cluster.parse("1xh100-sxm-80gb")

    def first(wait: tuple[int, float]) -> list[float]:
        options = LoadOptions(batch_wait=wait, serving=ServingOptions(engine="tensorrt-llm"))
        found = serve(model, machine, Plan(), asked, Serving(max_batched_tokens=4096), options)
        step = found.fleet.decode.table.decode(1, 1000)
        return [one.ttft_seconds / step for one in sorted(found.requests, key=lambda one: one.arrival)]

    at_once, full, alone = first((0, 0.0)), first((20, 0.3)), first((20, 0.9))
    assert full[1] < at_once[1] + 3
    assert alone[0] == at_once[0]
    assert 17 < alone[1] - full[1] < 23


@pytest.mark.parametrize("wait", [(-1, 0.5), (5, 1.5)])
def test_waits_that_are_none_are_refused(wait: tuple[int, float]) -> None:
    """Steps below 0 and shares beyond 1 are an error of the field."""
    options = LoadOptions(batch_wait=wait, serving=ServingOptions(engine="tensorrt-llm"))
    with pytest.raises(InputError, match="batch_wait"):
        serve(load_model("llama-3.1-8b"), Cluster.parse("1xh100-sxm-80gb"), Plan(), workload(1.0), Serving(), options)


@pytest.mark.parametrize("steps", [0, -3])
def test_a_scheduler_that_never_looks_is_refused(steps: int) -> None:
    """Steps between two looks at new requests are one or more."""
    model, cluster, plan, engine = CASES["moe"]
    options = LoadOptions(receive_steps=steps, serving=ServingOptions(engine=engine))
    with pytest.raises(InputError, match="receive_steps"):
        serve(load_model(model), Cluster.parse(cluster), plan, workload(1.0), None, options)


def test_looking_at_loads_serves_better_than_chance() -> None:
    """On four replicas near what they carry, the least loaded one has a lower p99 of TTFT than a random one."""
    model, cluster, plan, _ = CASES["dense"]
    asked = workload(3.2 * answer("dense", workload(1e-3, 20)).steady.capacity, 4000, output_tokens=SPREAD)
    chosen, drawn = (
        serve(load_model(model), Cluster.parse(f"4{cluster[1:]}"), replace(plan, dp=4), asked, None, options)
        for options in (LoadOptions(router="least-loaded"), LoadOptions(router="random"))
    )
    assert len(chosen.requests) == 4000
    assert chosen.latencies["ttft"]["p99"] < drawn.latencies["ttft"]["p99"]
    assert chosen.latencies["e2e"]["mean"] <= drawn.latencies["e2e"]["mean"] * 1.01


def test_slots_of_a_llama_server_are_all_that_answer_at_once() -> None:
    """Four of sixteen users are answered at a time and the others wait, until there are slots for all."""
    words = ("--engine", "llama.cpp", "--weights", "q4_k_m", "--users", "16", "--requests", "300", "--p90-ttft", "1s")
    few = run("serve", "llama-3.1-8b", "--on", "1xrtx4090", *words, "--json").tree
    assert few["running"]["max"] == 4
    assert few["why"]["ttft"][0]["part"] == "waiting for a sequence slot"
    assert (few["remedies"][0]["field"], few["remedies"][0]["value"]) == ("max_sequences", 16)
    assert not any("no source" in note for note in few["assumptions"])


def test_a_scheduler_that_is_not_known_is_an_assumption() -> None:
    """An engine without a policy of its own is scheduled as another, and the answer says so; a known one is not."""
    model, cluster, plan, _ = CASES["dense"]
    options = LoadOptions(serving=ServingOptions(engine="lmdeploy"))
    found = serve(load_model(model), Cluster.parse(cluster), plan, workload(1.0, 20), None, options)
    assert any("scheduler is taken as vLLM before V1" in note for note in found.assumptions)
    assert not any("scheduler is" in note for note in answer("dense", workload(1.0, 20)).assumptions)


BAD = {
    "rate": workload(0.0),
    "users": workload(arrivals=Arrivals(kind="closed", users=0)),
    "prefix_tokens": workload(1.0, prefix_tokens=1000),
    "input_tokens": workload(1.0, input_tokens=Length(mean=200_000)),
    "requests": workload(1.0, count=0),
    "cached_share": workload(1.0, cached_share=1.5),
    "trace": workload(arrivals=Arrivals(kind="trace", times=(1.0, 0.5))),
    "cv": workload(arrivals=Arrivals(kind="gamma", rate=1.0, cv=0.0)),
}


@pytest.mark.parametrize("field", BAD)
def test_bad_workloads_are_refused(field: str) -> None:
    """Each wrong workload names its field."""
    with pytest.raises(InputError) as error:
        answer("dense", BAD[field])
    assert field in [problem.field for problem in error.value.problems]


def test_too_few_requests_for_a_percentile_are_refused() -> None:
    """A p99 of a hundred requests would be one of them."""
    limit = Limit(metric="ttft", quantile="p99", seconds=1.0)
    model, cluster, plan, _ = CASES["dense"]
    with pytest.raises(InputError, match="1000 are needed"):
        serve(load_model(model), Cluster.parse(cluster), plan, workload(1.0, 100), None, LoadOptions(limits=(limit,)))


TRACES = {
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n",
    "burstgpt.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,374,44,418,x\n"
    "9.314579,ChatGPT,396,109,505,x\n9.5,ChatGPT,10,0,10,x\n",
    "own.csv": "arrival_seconds,input_tokens,output_tokens\n0,374,44\n4.314579,396,109\n",
    "mooncake.jsonl": '{"timestamp": 0, "input_length": 374, "output_length": 44, "hash_ids": [0]}\n'
    '{"timestamp": 4314.579, "input_length": 396, "output_length": 109, "hash_ids": [1]}\n',
    "vllm.json": json.dumps({"total_input_tokens": 770, "request_throughput": 0.4, "input_lens": [396, 374, 9],
        "output_lens": [109, 44, 0], "start_times": [14.314579, 10.0, 11.0]}),
    "guidellm.json": json.dumps({"benchmarks": [
        {"requests": {"successful": [{"request_start_time": 1e9, "prompt_tokens": 374, "output_tokens": 44}]},
            "metrics": {"request_totals": {"successful": 1}}},
        {"requests": {"successful": [{"start_time": 1e9 + 4.314579, "prompt_tokens": 396, "output_tokens": 109}],
            "errored": [{"request_start_time": 1e9 + 5}]}}]}, indent=1),
    "inference_perf.json": json.dumps([
        {"start_time": 7.0, "error": {"error_type": "x"}, "info": {}},
        {"start_time": 7.5, "error": None, "info": {"input_tokens": 374, "output_tokens": 44}},
        {"start_time": 11.814579, "info": {"request_metrics": {"text": {"input_tokens": 396}},
            "response_metrics": {"output_tokens": 109}}}]),
    # ai-dynamo/aiperf docs/tutorials/working-with-profile-exports.md: a line of each, as they end
    "profile_export.jsonl": "".join(json.dumps({
        "metadata": {"request_start_ns": began, "benchmark_phase": phase, "was_cancelled": False},
        "metrics": {f"{name}_sequence_length": {"value": size, "unit": "tokens"} for name, size in
            (("input", asked), ("output", made))} if not error else None, "error": error}) + "\n"
        for began, phase, asked, made, error in (
            (1759813207_000000000 + 4314579000, "profiling", 396, 109, None),
            (1759813207_000000000, "profiling", 374, 44, None), (1759813206_000000000, "warmup", 9, 9, None),
            (1759813208_000000000, "profiling", 0, 0, {"code": 499}))),
}  # fmt: skip


@pytest.mark.parametrize("name", TRACES)
def test_traces_are_read(name: str, tmp_path: Path) -> None:
    """Files of every system give the same two requests, from time 0."""
    (tmp_path / name).write_text(TRACES[name], encoding="utf-8")
    found = read_trace(str(tmp_path / name))
    assert found.pairs == ((374, 44), (396, 109))
    assert found.arrivals.times == pytest.approx((0.0, 4.314579))
    assert read_trace(str(tmp_path / name), speed=2.0).arrivals.times[1] == pytest.approx(4.314579 / 2)


def wrong() -> Iterator[tuple[str, str]]:
    """Yield texts that are no trace, and what is said of them."""
    yield "a,b\n1,2\n", "no known trace"
    yield "arrival_seconds,input_tokens,output_tokens\n", "holds no request"
    yield "arrival_seconds,input_tokens,output_tokens\n1,2,3\n0,2,3\n", "row 2"
    yield "arrival_seconds,input_tokens,output_tokens\nnan,2,3\n", "no request has"
    yield "arrival_seconds,input_tokens,output_tokens\n1.1e308,2,3\n", "no request has"
    yield "arrival_seconds,input_tokens,output_tokens\nx,2,3\n", "no number"
    yield '{"timestamp": 1}\n', "no number"
    yield '{"timestamp": 1', "no JSON"
    sums = {"total_input_tokens": 9, "request_throughput": 2.0}
    yield json.dumps(sums), "save-detailed"
    yield json.dumps({**sums, "input_lens": [9], "output_lens": [9]}), "no start_times"
    yield json.dumps(sums) + "\n" + json.dumps(sums), "append-result"
    yield json.dumps({**sums, "input_lens": [9], "output_lens": [9], "start_times": [1, 2]}), "as many start_times"
    yield json.dumps({**sums, "input_lens": 9, "output_lens": 9, "start_times": [9]}), "as many start_times"
    yield json.dumps({**sums, "input_lens": [9], "output_lens": ["x"], "start_times": [1]}), "no number for when"
    yield json.dumps({"benchmarks": [{"metrics": {}}]}), "lists no requests"
    few = {"requests": {"successful": [{}]}, "metrics": {"request_totals": {"successful": 20}}}
    yield json.dumps({"benchmarks": [few]}), "1 of the 20"
    yield json.dumps({"aggregated_metrics": {}}), "genai-bench"
    yield json.dumps({"load_summary": {}, "successes": {}}), "per_request_lifecycle"
    yield json.dumps([{"start_time": 1.0, "info": {}}, 3]), "row 1"
    yield json.dumps({"some": 1}), "of no known trace"
    yield "{}", "of no known trace"
    yield "[]", "holds no request"
    yield json.dumps([{"id": "x", "conversations": [{"from": "human", "value": "hi"}]}]), "without times"
    yield "arrival_seconds,input_tokens,output_tokens,conversation\n1,20,3,x\n2,23,3,x\n", "has 23 input tokens"
    row = '{"timestamp": 0, "input_length": 700, "output_length": 4, "hash_ids": '
    yield row + "[0, 1, 2]}\n", "3 hash blocks"
    yield row + '["a"]}\n', "whole numbers"
    yield row + "7}\n", "whole numbers"


# Facts of sgl-project/genai-bench parallel_feature_branch/D100_100_..._num_concurrency_1_time_300s.json.
GENAI = {
    "aggregated_metrics": {"scenario": "D(100,100)", "num_concurrency": 2, "iteration_type": "num_concurrency"},
    "individual_request_metrics": [
        {"ttft": 0.28, "tpot": 0.0098, "e2e_latency": 1.25, "num_input_tokens": 106, "num_output_tokens": 100,
         "error_code": None},
        {"ttft": 0.23, "tpot": 0.0095, "e2e_latency": 1.17, "num_input_tokens": 90, "num_output_tokens": 60,
         "error_code": None},
        {"ttft": None, "tpot": None, "e2e_latency": None, "num_input_tokens": None, "num_output_tokens": None,
         "error_code": 500},
    ],
}  # fmt: skip
# As vllm/benchmarks/datasets.py reads ShareGPT: the first question and its answer; one is too short, one too long.
TALKS = [{"id": str(i), "conversations": [{"from": "human", "value": a * "x"}, {"from": "gpt", "value": b * "y"}]}
         for i, (a, b) in enumerate(((400, 800), (8, 800), (40, 9000), (80, 40)))]  # fmt: skip


def test_lengths_without_times_arrive_as_is_said(tmp_path: Path) -> None:
    """A run of genai-bench keeps its requests in flight, ShareGPT's arrive at a rate; both are simulated in order."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps(GENAI), encoding="utf-8")
    found = read_lengths(str(path))
    assert found is not None and found.pairs == ((106, 100), (90, 60))
    assert (found.arrivals.kind, found.arrivals.users) == ("closed", 2)
    assert read_latencies(str(path))["ttft"] == [0.28, 0.23]
    path.write_text(json.dumps(TALKS), encoding="utf-8")
    asked = ("serve", "llama-3.1-8b", "--on", "1xh100", "--trace", str(path), "--requests", "40", "--json")
    told = run(*asked, "--rate", "2/s").tree
    assert told["stable"] and any("it holds no times" in note for note in told["assumptions"])
    assert "add --rate or --users" in run(*asked[:-1]).err
    rated = read_lengths(str(path), Arrivals(rate=2.0))
    assert rated is not None and rated.pairs == ((100, 200), (20, 10))


@pytest.mark.parametrize(
    ("run_of", "kind", "number"),
    [
        # Two in flight for 0.6 seconds each are 3.3 a second; an open loop of 2 a second has 1.2 in flight.
        ({"num_concurrency": 2, "arrival_requests_per_second": 3.3, "run_duration": 60.0}, "closed", 2),
        ({"num_concurrency": 2, "arrival_requests_per_second": 2.02, "run_duration": 60.0}, "poisson", 2.02),
        ({"num_concurrency": 0.5, "arrival_requests_per_second": 0.5, "run_duration": 60.0}, "poisson", 0.5),
        ({"request_rate": 7, "iteration_type": "request_rate"}, "poisson", 7.0),
    ],
)
def test_open_loops_of_genai_bench_are_no_users(
    run_of: dict[str, Any], kind: str, number: float, tmp_path: Path
) -> None:
    """It writes requests a second where a closed loop has those in flight: the mean in flight tells them apart."""
    path = tmp_path / "run.json"
    row = {"ttft": 0.1, "tpot": 0.01, "e2e_latency": 0.6, "num_input_tokens": 9, "num_output_tokens": 5}
    path.write_text(json.dumps({"aggregated_metrics": run_of, "individual_request_metrics": [row, row]}))
    found = read_lengths(str(path))
    assert found is not None and found.arrivals.kind == kind
    assert number in (found.arrivals.users, found.arrivals.rate)


@pytest.mark.parametrize(("text", "said"), list(wrong()))
def test_wrong_traces_are_refused(text: str, said: str, tmp_path: Path) -> None:
    """What is wrong with a trace is said with the row."""
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=said):
        read_trace(str(path))


CHAT = Workload(
    input_tokens=Length(mean=3000), output_tokens=Length(mean=20), count=40,
    arrivals=Arrivals(kind="trace", times=tuple(2.0 * i for i in range(40))),
    pairs=tuple((1024 * (1 + i // 8), 20) for i in range(40)),
    blocks=tuple(tuple((100 * (i % 8) + j, 512) for j in range(2 * (1 + i // 8))) for i in range(40)),
)  # fmt: skip


def test_hash_blocks_of_a_trace_are_what_the_prefix_cache_hits() -> None:
    """Eight conversations of five turns take turns: each prompt but the first finds all of the one before it."""
    trace = answer("dense", CHAT).traces[0]
    assert trace.hit_tokens == sum(tokens - 1024 for tokens, _ in CHAT.pairs)
    assert trace.prompt_tokens == 40 * 1024
    fresh = answer("dense", replace(CHAT, blocks=())).traces[0]
    assert fresh.hit_tokens == 0


def test_replicas_and_a_small_cache_lose_hits() -> None:
    """Three replicas in turn split eight conversations; a cache of a few thousand tokens forgets most of them."""
    most = answer("dense", CHAT).traces[0].hit_tokens
    split = sum(trace.hit_tokens for trace in answer("dense", CHAT, 3).traces)
    assert 0 < split < most
    base = answer("dense", CHAT)
    group = Replica(StepTable(base.base.case, 256, 8192, 8192), base.policy, 6000.0)
    small = group.run(requests_of(CHAT, CHAT.count))[0]
    assert small.hit_tokens < most / 2
    assert small.prompt_tokens + small.hit_tokens == sum(tokens for tokens, _ in CHAT.pairs)


@given(st.lists(st.lists(st.integers(0, 6), max_size=5), min_size=1, max_size=30), st.integers(0, 4000))
def test_a_prefix_cache_holds_what_runs_and_no_more_than_has_room(prompts: list[list[int]], room: int) -> None:
    """Whatever came before, blocks of running requests are there, idle ones fit the room, all are let go in the end."""
    cached, running = PrefixCache(), []
    for names in prompts:
        blocks = tuple((name, 100 + name) for name in names)
        request = Request(0.0, sum(size for _, size in blocks) + 1, 1, blocks=blocks)
        cached.keep(room)
        assert cached.tokens <= room
        cached.take(request, cached.hits(blocks)[0])
        cached.take(request, request.prompt_blocks)
        running.append(request)
        if len(running) > 2:
            cached.give(running.pop(0))
        assert all(cached.hits(one.blocks) == (len(one.blocks), one.input_tokens - 1) for one in running)
        assert not cached.users.keys() & cached.idle.keys()
        assert cached.tokens == sum(cached.idle.values())
    for request in running:
        cached.give(request)
    assert not cached.users


def test_conversations_find_what_was_said_before(tmp_path: Path) -> None:
    """Each prompt of a conversation finds the prompt and the answer before it, whole blocks of them; others nothing."""
    path = tmp_path / "trace.csv"
    rows = ["0,1000,100,a", "1,500,50,", "9,1300,100,a", "9,1000,60,b", "20,1500,40,a", "21,2000,90,b"]
    path.write_text("arrival_seconds,input_tokens,output_tokens,conversation\n" + "\n".join(rows), encoding="utf-8")
    found = read_trace(str(path))
    assert [cached for (_, _, cached, *_), _ in zip(found.draws(), rows, strict=False)] == [0, 0, 1100, 0, 1400, 1060]
    assert answer("dense", found).traces[0].hit_tokens == sum(n // 16 * 16 for n in (1100, 1400, 1060))


def routed(router: Any, asked: Workload, replicas: int = 4) -> ServeReport:
    """Return the dense case on so many replicas behind a router."""
    model, cluster, plan, _ = CASES["dense"]
    devices = Cluster.parse(f"{replicas * int(cluster[0])}{cluster[1:]}")
    return serve(load_model(model), devices, replace(plan, dp=replicas), asked, None, LoadOptions(router=router))


def test_a_prefix_that_all_share_says_nothing_to_a_router() -> None:
    """Where every replica has the one prefix of all requests, affinity to prefixes is the least load."""
    asked = workload(20.0, 200, prefix_tokens=512, output_tokens=SPREAD)
    least, prefix = routed("least-loaded", asked), routed("prefix", asked)
    assert prefix.latencies == least.latencies
    assert [len(one.finished) for one in prefix.traces] == [len(one.finished) for one in least.traces]
    assert any("least loaded" in note for note in prefix.assumptions)


def asked_at(times: tuple[float, ...], blocks: tuple[tuple[tuple[int, int], ...], ...]) -> Workload:
    """Return a trace of prompts that are as long as their blocks."""
    pairs = tuple((sum(size for _, size in one), 20) for one in blocks)
    arrivals = Arrivals(kind="trace", times=times)
    return replace(CHAT, pairs=pairs, blocks=blocks, count=len(times), arrivals=arrivals, finite=True)


def test_conversations_go_where_their_cache_is() -> None:
    """A router that looks at prefixes finds all that one replica would, and still gives each replica its share."""
    asked = asked_at(tuple(0.06 * i for i in range(40)), CHAT.blocks)
    most = sum(tokens - 1024 for tokens, _ in CHAT.pairs)
    traces = routed("prefix", asked, 3).traces
    assert sum(trace.hit_tokens for trace in traces) == most
    assert all(trace.finished for trace in traces)
    for other in ("round-robin", "least-loaded"):
        assert sum(trace.hit_tokens for trace in routed(other, asked, 3).traces) < most


@pytest.mark.parametrize(("count", "shared_out"), [(50, False), (200, True)])
def test_loads_far_apart_are_balanced_whatever_is_cached(count: int, shared_out: bool) -> None:
    """Who asks what one replica knows goes there until it has 64 requests more than another."""
    times = (0.0, *(2.0 + 1e-3 * i for i in range(count)))
    traces = routed("prefix", asked_at(times, (((1, 512), (2, 512), (3, 512)),) * len(times))).traces
    assert sum(len(trace.finished) for trace in traces) == len(times)
    assert (min(len(trace.finished) for trace in traces) > 0) == shared_out


def test_hash_blocks_leave_no_room_for_other_words_of_prefixes(tmp_path: Path) -> None:
    """Who says a shared prefix beside a trace with hash blocks is told which of the two to leave out."""
    path = tmp_path / "trace.jsonl"
    row = '{"timestamp": %d, "input_length": 700, "output_length": 9, "hash_ids": [0, %d]}\n'
    path.write_text(row % (0, 1) + row % (9000, 2), encoding="utf-8")
    words = ("serve", "llama-3.1-8b", "--on", "1xh100-sxm-80gb", "--trace", str(path))
    assert run(*words, "--json").tree["prefix_hit_share"] == pytest.approx(512 / 1400)
    for name in ("--prefix-tokens", "--cached-share"):
        done = run(*words, name, "1", "--json")
        assert done.status == 2
        assert name.strip("-").replace("-", "_") in done.fields


CLASSES = """
[[class]]
name = "chat"
share = 0.75
input_tokens = 500
output_tokens = 60
p90_ttft = "1s"
[[class]]
name = "documents"
share = 0.25
input_tokens = "3000..5000"
output_tokens = 20
p90_ttft = "1ms"
"""


def classed(folder: Path, text: str, *words: str) -> Any:
    """Return what `serve` does with a file of classes."""
    (folder / "classes.toml").write_text(text, encoding="utf-8")
    case = ("serve", "llama-3.1-8b", "--on", "1xh100-sxm-80gb", "--classes", str(folder / "classes.toml"))
    return run(*case, *words, "--json")


def test_classes_of_requests_have_their_own_percentiles_and_limits(tmp_path: Path) -> None:
    """Classes share all requests, long prompts wait longest, and one class that misses its limit misses the whole."""
    done = classed(tmp_path, CLASSES, "--rate", "4/s", "--requests", "1000")
    chat, documents = done.tree["classes"]
    assert done.status == 1
    assert [one["kept"] for one in (*chat["limits"], *documents["limits"])] == [True, False]
    assert done.tree["limits"] == []
    counts = [chat["requests"], documents["requests"]]
    assert sum(counts) == done.tree["method"]["requests"] == 1000
    assert counts[0] / 1000 == pytest.approx(0.75, abs=0.05)
    assert documents["ttft"]["mean_seconds"] > 2 * chat["ttft"]["mean_seconds"]
    mean = sum(n * one["ttft"]["mean_seconds"] for n, one in zip(counts, (chat, documents), strict=True)) / 1000
    assert mean == pytest.approx(done.tree["ttft"]["mean_seconds"])


def test_classes_that_are_alike_are_one_workload() -> None:
    """Two classes of the same lengths are served as one kind of request is."""
    kind = RequestClass(name="a", share=0.5, input_tokens=Length(mean=1000), output_tokens=Length(mean=100))
    asked = workload(5.0)
    both = answer("dense", replace(asked, classes=(kind, replace(kind, name="b"))))
    assert both.latencies == answer("dense", asked).latencies


@pytest.mark.parametrize(
    ("old", "new", "words", "field"),
    [
        ("0.75", "0.5", (), "classes"),
        ("0.75", '"x"', (), "chat.share"),
        ("chat", "documents", (), "classes"),
        ("[[class]]", "[[kind]]", (), "classes"),
        ('name = "chat"', "name = 3", (), "classes"),
        ('"3000..5000"', '"many"', (), "documents.input_tokens"),
        ("output_tokens = 60", "", (), "chat.output_tokens"),
        ("output_tokens = 60", "output_tokens = 60\nprefix_tokens = 500", (), "chat.prefix_tokens"),
        ("p90_ttft", "p91_ttft", (), "chat.p91_ttft"),
        ("p90_ttft", "p90_itl", (), "chat.p90_itl"),
        ("", "", ("--input-tokens", "5"), "input_tokens"),
        ("", "", ("--requests", "300"), "requests"),
        ("[[class]]", "[[class", (), "classes"),
    ],
)
def test_wrong_classes_are_refused(old: str, new: str, words: tuple[str, ...], field: str, tmp_path: Path) -> None:
    """What is wrong with a class is said under its name, with exit status 2."""
    done = classed(tmp_path, CLASSES.replace(old, new) if old else CLASSES, "--rate", "4/s", *words)
    assert done.status == 2
    assert field in done.fields


COMMAND = ("serve", "llama-3.1-8b", "--on", "1xh100-sxm-80gb", "--input-tokens", "1000", "--output-tokens", "100")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("--rate", "10/s", "--p99-ttft", "1s"), 0, "MEETS"),
        (("--rate", "600/min", "--mean-tpot", "1ms"), 1, "MISSES"),
        (("--rate", "500/s"), 1, "UNSTABLE"),
        (("--users", "32", "--requests", "500"), 0, "SERVES"),
        (("--arrivals", "burst", "--requests", "200"), 0, "SERVES"),
    ],
)
def test_the_command_answers(words: tuple[str, ...], status: int, said: str) -> None:
    """Limits that are kept, broken, a load that is not carried: each has its verdict and exit status."""
    done, read = both(*COMMAND, *words)
    assert done.status == status, done.err
    assert done.out.startswith(said)
    assert ("a request alone takes" in done.out) == (said == "UNSTABLE")
    if said in ("MEETS", "MISSES"):
        assert read.tree["meets"] == (status == 0)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("qwen2.5-14b", "one request of 130,300 tokens is longer than the cache, which holds 6"),
        ("llama-3.1-70b", "weights and working memory leave no room for a cache"),
    ],
)
def test_a_long_prompt_is_told_what_it_is_too_long_for(model: str, said: str) -> None:
    """A request that the cache does not hold is no load that grows."""
    tokens = ("--input-tokens", "130000", "--output-tokens", "300", "--requests", "100")
    done = run("serve", model, "--on", "1xl40s", "--rate", "1/s", *tokens, "--mean-ttft", "1s")
    assert done.status == 1
    assert done.out.startswith("NO FIT")
    assert said in " ".join(done.out.split())


@pytest.mark.parametrize("metric", ["tpot", "itl"])
def test_answers_of_one_token_have_no_time_between_tokens(metric: str) -> None:
    """A limit that no request can be held to is no limit that is missed by an infinity."""
    words = ("serve", "llama-3.1-8b", "--on", "1xl40s", "--rate", "1/s", "--output-tokens", "1")
    done = run(*words, f"--p99-{metric}", "50ms", "--json")
    assert (done.status, done.fields) == (2, [f"p99_{metric}"])
    assert run(*words, "--p99-ttft", "1s").status == 0


def test_a_run_that_ends_before_its_replicas_are_up_says_so() -> None:
    """All replicas would carry the load: what to ask for is said beside how the queue grew."""
    more = ("--rate", "200/s", "--autoscale", "running:32", "--startup-time", "90s")
    done = run(*(("8xh100-sxm-80gb" if word.startswith("1x") else word) for word in COMMAND), "--tp", "1", *more)
    assert done.status == 1
    assert done.out.startswith("UNSTABLE")
    assert "while replicas start" in done.out
    alone = run(*COMMAND, "--rate", "500/s")
    assert "while replicas start" not in alone.out


def test_a_limit_below_an_empty_replica_says_so() -> None:
    """Where no load is light enough the page gives what an empty replica takes, and only there."""
    low = run(*COMMAND, "--rate", "10/s", "--mean-tpot", "1ms").out
    assert "an empty replica takes" in low
    assert "less load does not help" in low
    fine = run(*COMMAND, "--rate", "10/s", "--mean-tpot", "100ms").out
    assert "empty replica" not in fine


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ((), "rate"),
        (("--rate", "0"), "rate"),
        (("--rate", "nan"), "rate"),
        (("--rate", "5/day"), "rate"),
        (("--rate", "5", "--users", "3"), "rate"),
        (("--rate", "5", "--arrivals", "gamma:x"), "arrivals"),
        (("--rate", "5", "--p99-ttft", "1s", "--requests", "50"), "requests"),
        (("--trace", "nowhere.csv"), "trace"),
    ],
)
def test_bad_commands_are_refused(words: tuple[str, ...], field: str) -> None:
    """Exit status 2, and the field that is wrong."""
    done = run(*COMMAND, *words, "--json")
    assert done.status == 2
    assert field in done.fields


def test_shares_of_requests_are_told_where_requests_were_served() -> None:
    """Output and goodput are numbers between nothing and all that was served, in JSON too."""
    found = answer("dense", workload(1.0, 20))
    tree = found.to_dict()
    assert 0 <= tree["goodput"]["share"] <= 1
    assert tree["goodput"]["requests_per_second"] == tree["goodput"]["share"] * tree["served"]["requests_per_second"]
    assert tree["served"]["output_tokens_per_second"] > 0


@pytest.mark.parametrize("reader", [read_trace, read_latencies])
def test_files_that_are_no_text_are_refused(reader: Callable[[str], object], tmp_path: Path) -> None:
    """What is compressed is told apart from what cannot be read; neither is a fault."""
    path = tmp_path / "trace.csv"
    path.write_bytes(gzip.compress(b"arrival_seconds,input_tokens,output_tokens\n0,10,10\n"))
    with pytest.raises(InputError, match="is compressed; unpack it"):
        reader(str(path))
    path.write_text('arrival_seconds,input_tokens,output_tokens\n0,10,"' + "1" * 200_000 + '"\n')
    with pytest.raises(InputError, match=r"cannot be read|has no latencies"):
        reader(str(path))


def test_lines_of_a_trace_may_end_as_on_old_computers(tmp_path: Path) -> None:
    """Carriage returns alone end lines, too."""
    path = tmp_path / "trace.csv"
    path.write_bytes(b"arrival_seconds,input_tokens,output_tokens\r0,10,10\r1,20,10\r")
    assert read_trace(str(path)).pairs == ((10, 10), (20, 10))


def test_who_comes_late_in_a_long_answer_waits_for_its_step_alone() -> None:
    """Steps grow with the context: whoever comes before the answer ends is seen as the step that runs has ended."""
    base = answer("dense", workload(1.0, 20))
    table = StepTable(base.base.case, 8, 8192, 65536)

    def run(*requests: Request) -> None:
        Replica(table, base.policy, 1e6).run(requests)

    alone = Request(0.0, 100, 60_000)
    run(alone)
    first = table.decode(1, 101)
    late = Request(alone.first + 59_999 * first + 1.0, 100, 10)
    assert late.arrival < 0.95 * alone.end
    run(Request(0.0, 100, 60_000), late)
    assert late.queue_seconds < 3 * table.decode(1, 60_000)


def test_whole_prompts_share_a_step_as_far_as_its_stated_tokens_hold_them() -> None:
    """Prompts that are not cut run two at a time where a step of so many tokens is asked for, else all at once."""
    asked = workload(count=8, arrivals=Arrivals(kind="burst"))
    model, cluster, plan, engine = CASES["dense"][0], CASES["dense"][1], Plan(), "tensorrt-llm"
    options = LoadOptions(serving=ServingOptions(engine=engine))
    steps = []
    for tokens in (0, 2100, 1000):
        job = Serving(max_batched_tokens=tokens)
        found = serve(load_model(model), Cluster.parse(cluster), plan, asked, job, options)
        steps.append(len({request.first for request in found.requests}))
    assert steps == [1, 4, 8]


@pytest.mark.parametrize(
    ("tokens", "prompt", "small"), [(0, 1000, 0), (500, 1000, 500), (1000, 1000, 0), (0, 9000, 8192)]
)
def test_steps_that_are_too_small_for_a_prompt_are_told(tokens: int, prompt: int, small: int) -> None:
    """TensorRT-LLM cuts no prompt: a step of 500 tokens for prompts of 1,000 is larger, and the answer says why.

    So is its own of 8,192 for prompts of 9,000, which a server that is not told otherwise refuses.
    """
    options = LoadOptions(serving=ServingOptions(engine="tensorrt-llm"))
    asked = workload(1.0, 20, input_tokens=Length(mean=prompt))
    job = Serving(max_batched_tokens=tokens)
    notes = serve(load_model("llama-3.1-8b"), Cluster.parse("1xh100"), Plan(), asked, job, options).assumptions
    words = "prompts are not cut and do not fit into "
    assert [note.partition(words)[2].split(")")[0] for note in notes if words in note] == [f"{small:,}"] * (small > 0)


@pytest.mark.parametrize("engine", ["tensorrt-llm", "vllm-v0", "tensorrt-llm-chunked"])
def test_one_request_is_cut_where_the_engine_cuts_it(engine: str) -> None:
    """Two stages of TensorRT-LLM run a prompt of 6,000 tokens one after the other, whatever a step is said to have.

    Pieces of 2,048 overlapped in `infer` alone: its first token came a quarter before that of `serve`.
    """
    model, cluster, plan = load_model("llama-3.1-8b"), Cluster.parse("2xh100-sxm-80gb"), Plan(pp=2)
    options = ServingOptions(engine=engine)
    whole, cut = (
        infer(model, cluster, plan, Serving(batch=1, input_tokens=6000, output_tokens=100, max_batched_tokens=tokens),
              options)
        for tokens in (6000, 2048)
    )  # fmt: skip
    told = [note for note in cut.assumptions if "prompts are not cut and do not fit into 2,048" in note]
    if engine.endswith("chunked"):
        assert cut.ttft_seconds < 0.8 * whole.ttft_seconds
        assert not told
    else:
        assert cut.ttft_seconds == whole.ttft_seconds
        assert len(told) == 1


@pytest.mark.parametrize("also", ["", "-generated", "-windowed", "-generated-windowed"])
def test_tensorrt_llm_told_to_cut_prompts_holds_no_answer_for_a_whole_one(also: str) -> None:
    """Prompts of 8,000 tokens run in steps of 2,048: the longest gaps between tokens are those of a piece."""
    asked = workload(8.0, 60, input_tokens=Length(mean=8000), output_tokens=Length(mean=200))
    job = Serving(max_batched_tokens=2048)
    whole, cut = (
        serve(load_model("gpt-oss-20b"), Cluster.parse("1xb200"), Plan(), asked, job, LoadOptions(serving=options))
        for options in (ServingOptions(engine=f"tensorrt-llm{also}{more}") for more in ("", "-chunked"))
    )
    assert whole.policy.step_tokens > 8000 > cut.policy.step_tokens == 2048
    assert cut.latencies["itl"]["p99"] < 0.6 * whole.latencies["itl"]["p99"]
    assert cut.policy.reserved_share == whole.policy.reserved_share == 1.0


def test_the_limit_of_sglang_itself_takes_no_memory_for_sampling() -> None:
    """Its cache bounds who runs: four thousand sequences of a large vocabulary are not refused where none would run."""
    load = Workload(
        input_tokens=Length(mean=22), output_tokens=Length(mean=256), arrivals=Arrivals(kind="closed", users=8)
    )
    options = LoadOptions(serving=ServingOptions(engine="sglang-0.5.11"))
    question = load_model("qwen3-8b"), Cluster.parse("1xa10g-24gb"), Plan(), load
    report = serve(*question, Serving(memory_fraction=0.85), options)
    assert report.fits
    assert report.base.kv_cache_tokens > 20_000


def test_a_step_more_runs_in_older_sglang_after_the_last_answer() -> None:
    """One user who asks again at once waits for a step that nobody needs; SGLang from 0.5.22 on leaves it out."""
    load = workload(count=20, arrivals=Arrivals(kind="closed", users=1))
    question = load_model("llama-3.1-8b"), Cluster.parse("1xa10g-24gb"), Plan(), load, Serving(weights="fp8")
    reports = [
        serve(*question, LoadOptions(serving=ServingOptions(engine=engine)))
        for engine in ("sglang-0.5.21", "sglang", "sglang-synchronous")
    ]
    older, newest, synchronous = (one.latencies["ttft"]["p50"] for one in reports)
    step = reports[0].latencies["itl"]["p50"]
    assert 0.4 * step < older - newest < step
    assert synchronous < older


@pytest.mark.parametrize("engine", ["sglang-0.5.13", "sglang-0.5.7"])
def test_no_step_runs_behind_the_last_answer_where_steps_are_scheduled_in_turn(engine: str) -> None:
    """SGLang that caches the prefixes of models with states schedules in turn: none is under way as the last ends."""
    cluster, load = Cluster.parse("1xh100-sxm-80gb"), workload(count=20, arrivals=Arrivals(kind="closed", users=1))
    policies = [
        serve(load_model(model), cluster, Plan(), load, None, LoadOptions(serving=ServingOptions(engine=name))).policy
        for model in ("lfm2-1.2b", "llama-3.1-8b")
        for name in (f"{engine}-prefix-cache", engine)
    ]
    assert [(one.async_scheduling, one.overshoots) for one in policies] == [(False, False), *[(True, True)] * 3]


@pytest.mark.parametrize(
    ("model", "devices", "plan", "engine"),
    [
        ("gpt-oss-20b", "1xb200-sxm-180gb", Plan(), "vllm"),
        ("qwen3-30b-a3b", "2xh200-sxm-141gb", Plan(tp=2), "vllm-2025"),
        ("llama-3.1-8b", "1xb200-sxm-180gb", Plan(), "vllm"),
    ],
)
@pytest.mark.parametrize("step", [2048, 8192])
def test_the_closed_form_knows_that_pieces_wait_for_their_launches(
    model: str, devices: str, plan: Plan, engine: str, step: int
) -> None:
    """A piece of more tokens than are replayed takes as long as its launches: a prompt alone is what is simulated."""
    load = workload(
        count=1, arrivals=Arrivals(rate=1e-4), input_tokens=Length(mean=9000), output_tokens=Length(mean=50)
    )
    job, options = Serving(max_batched_tokens=step), LoadOptions(serving=ServingOptions(engine=engine))
    report = serve(load_model(model), Cluster.parse(devices), plan, load, job, options)
    assert report.steady.ttft_seconds == pytest.approx(report.requests[0].ttft_seconds, rel=0.02)


@pytest.mark.parametrize("start", [0.1894, 1 / 3, 7.0])
def test_requests_that_come_together_run_alike_whenever_they_come(start: float) -> None:
    """The first step takes all who came with the first, at any time on the clock, and so does every later one."""
    report = answer("dense", workload(count=100, arrivals=Arrivals(kind="burst")))

    def ended(at: float) -> list[float]:
        requests = [Request(at, 1000, 100) for _ in range(100)]
        room = float(report.base.kv_cache_tokens)
        finished = Replica(report.fleet.decode.table, report.policy, room).run(requests)[0].finished
        return sorted(one.end - at for one in finished)

    assert ended(start) == pytest.approx(ended(0.0), rel=1e-9)
