"""Pools that compute prompts before pools that decode, and groups of attention that step together."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import run
from serving.serving_cases import after_pause
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Arrivals, Length, Plan, Serving, Workload
from shardwise.serving import ServingOptions, infer
from shardwise.serving.load import LoadOptions, Replica, Request, ServeReport, StepTable, prefill_plan, serve
from shardwise.serving.load._fleet import Transfer

ENGINES = ("vllm", "sglang", "tensorrt-llm")


def workload(rate: float = 0.0, count: int = 300, **more: Any) -> Workload:
    """Return requests of 1,000 tokens in and 100 out, Poisson at a rate unless said otherwise."""
    fields = {"input_tokens": Length(mean=1000), "output_tokens": Length(mean=100), "arrivals": Arrivals(rate=rate)}
    return Workload(**{**fields, "count": count, **more})


@cache
def pools(engine: str, asked: Workload, prefill: int, decode: int = 1) -> ServeReport:
    """Return Llama-3.1-8B on so many H100 that compute prompts, 0 for none apart, and so many that decode."""
    options = LoadOptions(serving=ServingOptions(engine=engine), prefill=Plan(dp=prefill) if prefill else None)
    cluster = Cluster.parse(f"{prefill + decode}xh100-sxm-80gb")
    return serve(load_model("llama-3.1-8b"), cluster, Plan(dp=decode), asked, None, options)


def test_prompts_set_memory_aside_for_their_own_sequences() -> None:
    """What a pool that decodes may run at once takes no memory of the one that computes prompts."""
    options = LoadOptions(prefill=Plan(dp=1))

    def cache(most: int) -> tuple[int, int]:
        asked, job = workload(count=1, arrivals=Arrivals(kind="burst")), Serving(max_sequences=most)
        found = serve(load_model("llama-3.1-8b"), Cluster.parse("2xh100-sxm-80gb"), Plan(), asked, job, options)
        assert found.prefill is not None
        return found.prefill.base.kv_cache_tokens, found.base.kv_cache_tokens

    few, usual, many = cache(256), cache(1024), cache(4096)
    assert few[0] > usual[0] == many[0]
    assert few[1] > usual[1] > many[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_one_request_passes_a_prompt_a_transfer_and_decode_steps(engine: str) -> None:
    """A single request takes what `infer` says of its prompt and of its decode steps, and the transfer between."""
    job = Serving(batch=1, input_tokens=1000, output_tokens=100, max_batched_tokens=8192, max_sequences=1)
    alone = infer(load_model("llama-3.1-8b"), Cluster.parse("1xh100"), Plan(), job, ServingOptions(engine=engine))
    one = pools(engine, workload(count=1, arrivals=Arrivals(kind="burst")), 1).requests[0]
    assert one.prompt_seconds == pytest.approx(after_pause(alone), rel=0.02)
    assert one.transfer_seconds > 0
    # vLLM's decode worker makes the first token: it runs the last token of the prompt again.
    own = one.first - one.ready
    assert own == (pytest.approx(alone.tpot_seconds, rel=0.25) if engine == "vllm" else 0.0)
    assert one.tpot_seconds == pytest.approx(alone.tpot_seconds, rel=0.02)


def test_prompts_that_all_take_as_long_have_a_closed_form() -> None:
    """Lengths that differ under launches that do not: the spread of what prompts take is none, not less than none."""
    asked = workload(0.5, 20, input_tokens=Length(kind="uniform", mean=200, low=160, high=240))
    assert pools("tensorrt-llm", asked, 1).steady.ttft_seconds > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_the_prefill_pool_is_a_server_of_prompts(engine: str) -> None:
    """Requests wait for their prompt as on one replica that makes a single token for each."""
    apart = pools(engine, workload(20.0), 1)
    alone = pools(engine, workload(20.0, output_tokens=Length(mean=1)), 0)
    for one, other in zip(
        sorted(apart.requests, key=lambda r: r.arrival), sorted(alone.requests, key=lambda r: r.arrival), strict=True
    ):
        assert one.queue_seconds == pytest.approx(other.queue_seconds, abs=1e-9)
        assert one.prefilled - one.arrival == pytest.approx(other.ttft_seconds, abs=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_answers_of_one_token_pass_a_decode_pool(engine: str) -> None:
    """Where the only token came along with the cache, nothing runs on the worker that takes it."""
    found = pools(engine, workload(20.0, 50, output_tokens=Length(mean=1)), 1)
    assert len(found.requests) == 50
    for r in found.requests:
        assert r.first == r.end
        assert r.first >= r.ready


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cache_waits_for_no_answer_of_others(engine: str) -> None:
    """With room for all a cache joins within three steps, though answers of its pool last for minutes and seconds."""
    pairs = ((500, 20000), (500, 20), (500, 30), (500, 12000), (500, 25), (500, 40)) * 6
    asked = workload(count=len(pairs), arrivals=Arrivals(kind="closed", users=4), pairs=pairs, finite=True)
    requests = pools(engine, asked, 1, 2).requests
    longest = max(r.tpot_seconds or 0.0 for r in requests if r.output_tokens > 1000)
    assert max(r.first - r.ready for r in requests) < 3.1 * longest


def test_the_first_token_of_sglang_is_a_step_ahead() -> None:
    """A decode pool of SGLang hands out the token that came before the step that its sequence joins next but one."""
    pairs = ((500, 4000), *((500, 20),) * 12)
    asked = workload(count=len(pairs), arrivals=Arrivals(kind="closed", users=2), pairs=pairs, finite=True)
    gaps = {}
    for engine in ("sglang", "tensorrt-llm"):
        long, *short = sorted(pools(engine, asked, 1, 1).requests, key=lambda r: -r.output_tokens)
        gaps[engine] = sum((r.tpot_seconds or 0.0) * 19 for r in short) / len(short) / (long.tpot_seconds or 1.0)
    assert gaps["tensorrt-llm"] == pytest.approx(19, rel=0.03)
    assert gaps["sglang"] == pytest.approx(20, rel=0.03)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_pool_tells_of_its_own_queue(engine: str) -> None:
    """Prompts wait at workers that compute them, caches at those that decode: on average no more than at most."""
    found = pools(engine, workload(24.0), 1, 2).to_dict()
    first, then = found["prefill"]["waiting"], found["waiting"]
    queued = found["served"]["requests_per_second"] * found["queue"]["mean_seconds"]
    assert first["mean"] == pytest.approx(queued, rel=0.1)
    assert 0.3 < first["mean"] < first["max"] and then["mean"] < then["max"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("closed", [False, True])
def test_pools_conserve_work_and_time(engine: str, closed: bool) -> None:
    """Every prompt is computed once and every token made; parts of a request add up to its seconds (Little's law)."""
    found = pools(engine, workload(arrivals=Arrivals(kind="closed", users=32)) if closed else workload(20.0), 1, 2)
    assert len(found.requests) == 300
    assert found.prefill is not None
    assert sum(t.prompt_tokens for t in found.prefill.traces) == 300 * 1000
    assert sum(t.prompt_tokens for t in found.traces) == (300 if engine == "vllm" else 0)
    for r in found.requests:
        assert r.arrival <= r.scheduled < r.prefilled < r.ready <= min(r.joined, r.first) < r.end
        assert r.joined <= r.first or engine == "sglang"
    resident = sum(r.prefilled - r.scheduled for r in found.requests)
    assert sum(t.running_seconds for t in found.prefill.traces) == pytest.approx(resident, rel=1e-9)
    resident = sum(r.end - r.joined for r in found.requests)
    assert sum(t.running_seconds for t in found.traces) == pytest.approx(resident, rel=1e-9)


@settings(max_examples=4, deadline=None)
@given(rate=st.floats(5.0, 35.0), seed=st.integers(0, 99), engine=st.sampled_from(ENGINES))
def test_more_workers_of_a_pool_shorten_what_it_does(rate: float, seed: int, engine: str) -> None:
    """Twice the prefill workers have no cache later; twice those that decode, no higher percentile of TPOT.

    Neither raises a percentile of a request's seconds, nor of TTFT, but for the step under way when a cache arrives.
    Prefill workers may raise TPOT: prompts that queue before one are spaced by it, and more of them hand over bursts,
    which decode in larger batches (the output of a busy server varies less than its input).
    """
    asked = workload(rate, seed=seed)
    few, prefill, decode = (pools(engine, asked, *workers) for workers in ((1, 1), (2, 1), (1, 2)))
    if few.stable:
        assert all(one.ready <= other.ready + 1e-9 for one, other in zip(prefill.requests, few.requests, strict=True))
        step = few.latencies["itl"]["mean"]
        for more, metrics in ((prefill, ("ttft", "e2e")), (decode, ("ttft", "tpot", "e2e"))):
            for metric, name in product(metrics, few.latencies["e2e"]):
                late = step if metric == "ttft" else 0.0
                assert more.latencies[metric][name] <= few.latencies[metric][name] * 1.005 + late, (metric, name)


def test_a_limit_on_sequences_is_of_the_pool_that_decodes() -> None:
    """A burst's prompts run together; its answers in turn, and first tokens wait for a place of those before."""
    options = LoadOptions(serving=ServingOptions(engine="tensorrt-llm"), prefill=Plan())
    asked, cluster = workload(count=32, arrivals=Arrivals(kind="burst")), Cluster.parse("2xh100-sxm-80gb")
    job = Serving(max_sequences=4)
    found = serve(load_model("llama-3.1-8b"), cluster, Plan(), asked, job, options)
    assert found.prefill is not None
    assert found.prefill.traces[0].most_running == 8
    assert found.traces[0].most_running == 4
    starts = sorted(r.first for r in found.requests)
    assert starts[8] >= min(r.end for r in found.requests)


def test_decode_steps_without_prompts_are_steady() -> None:
    """Pools exist so that no prompt stops a decode step: the largest gap between tokens is far smaller."""
    together, apart = pools("vllm", workload(15.0), 0, 2), pools("vllm", workload(15.0), 1, 1)
    assert apart.latencies["itl"]["p99"] < 0.5 * together.latencies["itl"]["p99"]


@pytest.mark.parametrize(
    ("model", "tp", "per_token"), [("llama-3.1-8b", 2, 2 * 32 * 8 * 128 * 2), ("deepseek-v3", 8, 8 * 61 * 576 * 2)]
)
def test_what_is_sent_is_what_ranks_keep(model: str, tp: int, per_token: int) -> None:
    """Bytes are those of the cache of a prompt on all ranks: heads once, latents (which ranks do not share) each."""
    count = 16 if tp == 8 else 4
    job = Serving(batch=1, input_tokens=1000, output_tokens=10)
    plan = Plan(tp=tp, dp=1)
    case = infer(load_model(model), Cluster.parse(f"{tp}xh200-sxm-141gb"), plan, job).case
    policy = pools("vllm", workload(1.0, 20), 1).policy
    link = Transfer(Cluster.parse(f"{count}xh200-sxm-141gb"), case, case, policy)
    assert link.size_bytes(1000) == 1000 * per_token
    # Chunk by chunk only the last one is left when the prompt ends.
    chunked = Transfer(link.cluster, case, case, replace(policy, transfer="chunk", step_tokens=512))
    assert chunked.seconds(1000) == pytest.approx(link.seconds(1000 - 512), rel=1e-12)
    assert link.seconds(2000) > link.seconds(1000) > 0


@cache
def table() -> tuple[StepTable, Any]:
    """Return the prices and the policy of a dense model."""
    found = pools("vllm", workload(1.0, 20), 0)
    return StepTable(found.base.case, 256, found.policy.step_tokens, 4096), found.policy


@settings(max_examples=10, deadline=None)
@given(groups=st.sampled_from((2, 4)), gap=st.floats(0.01, 0.1), seed=st.integers(0, 9))
def test_groups_that_step_together_are_no_faster(groups: int, gap: float, seed: int) -> None:
    """Groups in lockstep wait for the slowest: no mean latency is below that of groups on their own."""
    prices, policy = table()

    def asked() -> list[Request]:
        return [Request(i * gap / groups, 200 + 37 * ((i + seed) % 11), 50 + i % 7) for i in range(120)]

    joined, alone = asked(), asked()
    Replica(prices, policy, 1e9, groups).run(joined)
    for index in range(groups):
        Replica(prices, policy, 1e9).run(alone[index::groups])
    for one in (joined, alone):
        assert all(r.end > 0 for r in one)
    assert sum(r.e2e_seconds for r in joined) >= sum(r.e2e_seconds for r in alone) * 0.999


def test_equal_groups_in_lockstep_are_as_fast_as_one() -> None:
    """Where every group does the same at the same time, nobody waits for another."""
    prices, policy = table()
    joined = [Request(0.3 * (i // 4), 500, 40) for i in range(80)]
    alone = [Request(0.3 * i, 500, 40) for i in range(20)]
    Replica(prices, policy, 1e9, 4).run(joined)
    Replica(prices, policy, 1e9).run(alone)
    assert [r.end for r in joined[::4]] == pytest.approx([r.end for r in alone], rel=1e-12)


class OneSecond:
    """Prices of steps that take a second, half of it in each of two stages."""

    made, verified, launching_seconds, burst = 1, 1, 0.0, None

    def decode(self, count: int, context: float) -> float:
        """Return a second."""
        return 1.0

    def mixed(self, count: int, context: float, pieces: Any, spared: float = 0.0) -> float:
        """Return a second."""
        return 1.0


def staged(requests: list[Request], **words: Any) -> Replica:
    """Run requests in two batches that pass two stages, of prompts that fill a step each."""
    engine, room = words.pop("engine", "vllm"), words.pop("room", 10_000.0)
    policy = replace(pools(engine, workload(1.0, 20), 0).policy, step_tokens=100, prefix_cache=False, **words)
    replica = Replica(OneSecond(), policy, room, 2)  # type: ignore[arg-type]
    replica.through_stages(policy)
    for request in requests:
        replica.entries[0].expect(request)
    replica.finish()
    return replica


@pytest.mark.parametrize(("ahead", "first"), [(0, 2.5), (1, 3.0)])
def test_who_comes_to_stages_takes_part_in_the_next_batch_whose_ever_it_is(ahead: int, first: float) -> None:
    """Two batches end at 1.0 and 1.5, and so on: who comes at 1.1 runs in the second, or in the one after it.

    With a waiting list for each the third request was the first batch's, whose step had begun: its token came at 3.0.
    Where one is made ahead that which ends at 2.5 was made as that at 1.0 ended, and the next as the one at 1.5.
    """
    requests = [Request(0.0, 90, 9), Request(0.0, 90, 9), Request(1.1, 90, 9)]
    staged(requests, batches_ahead=ahead)
    assert [one.first for one in requests] == pytest.approx([1.0, 1.5, first])
    assert all(one.scheduled >= one.arrival and sum(one.waits) == pytest.approx(one.queue_seconds) for one in requests)


def test_places_are_those_of_all_batches_in_stages_together() -> None:
    """Two short prompts that come at once run in one batch of two places, as in the steps of one stage."""
    requests = [Request(0.0, 40, 9), Request(0.0, 40, 9), Request(0.0, 40, 9)]
    replica = staged(requests, max_sequences=2)
    assert [one.first for one in requests] == pytest.approx([1.0, 1.0, 10.0], abs=0.51)
    assert replica.groups[0].trace.most_running == 2
    assert [one.outstanding for one in replica.entries] == [0]


@pytest.mark.parametrize(("prefix", "places", "rate"), [(0, 8, 1.0), (1000, 32, 3.2)])
def test_prompts_that_end_in_another_batch_take_no_more_than_all_places(prefix: int, places: int, rate: float) -> None:
    """SGLang's prompts of two pieces end in every other batch, which is full: 36 ran of 32, or it was an IndexError."""
    prompt, made = Length(mean=3000), Length(kind="lognormal", mean=32, cv=0.8)
    asked = workload(rate, 1500, input_tokens=prompt, output_tokens=made, prefix_tokens=prefix)
    job = Serving(max_sequences=places, max_batched_tokens=2048)
    options = LoadOptions(serving=ServingOptions(engine="sglang"))
    found = serve(load_model("llama-3.1-70b"), Cluster.parse("4xh100"), Plan(tp=2, pp=2), asked, job, options)
    assert found.own_values()["running"]["max"] == places
    assert len(found.requests) == 1500


@pytest.mark.parametrize(("seed", "room"), [(5, 700.0), (7, 500.0), (11, 1000.0), (18, 500.0)])
def test_who_is_sent_away_from_one_batch_in_stages_may_end_in_another(seed: int, room: float) -> None:
    """A cache of a part of what runs: everybody ends once. It failed where one went on in another batch."""
    random = Random(seed)
    gap, _ = random.choice((0.05, 0.2, 0.5)), random.choice((500.0, 700.0, 1000.0))
    requests = [Request(gap * i, 90, random.randint(20, 90)) for i in range(150)]
    replica = staged(requests, engine="sglang", reserved_share=0.0, block_tokens=0, room=room)
    ended = [one for group in replica.groups for one in group.trace.finished]
    assert len(ended) == len(set(map(id, ended))) == 150
    assert sum(group.trace.preemptions for group in replica.groups) > 10
    assert all(group.decoding == 0 and not group.prompts for group in replica.groups)
    assert sum(group.used for group in replica.groups) == pytest.approx(0.0, abs=1e-6)


def test_users_of_pools_are_served_by_any_router() -> None:
    """A closed loop through pools ends whatever the router; with one worker of a kind all routers are the same."""
    asked = workload(count=200, arrivals=Arrivals(kind="closed", users=32))
    model = load_model("llama-3.1-8b")

    def run(router: Any, workers: int) -> Any:
        plan, cluster = Plan(dp=workers), Cluster.parse(f"{2 * workers}xh100-sxm-80gb")
        return serve(model, cluster, plan, asked, None, LoadOptions(router=router, prefill=plan))

    for workers, slack in ((1, 1e-12), (2, 0.1)):
        usual = run("round-robin", workers)
        for router in ("least-loaded", "prefix"):
            found = run(router, workers)
            assert len(found.requests) == 200
            assert found.requests_per_second == pytest.approx(usual.requests_per_second, rel=slack)


def test_balanced_prompts_wait_for_every_group() -> None:
    """A prompt waits until every group has one or its time is over; where all come at once none waits."""
    prices, policy = table()
    told = replace(policy, async_scheduling=False)
    balanced = replace(told, balance_steps=40)

    def run(how: Any, late: tuple[float, ...]) -> list[Request]:
        first, then = [Request(0.0, 500, 400) for _ in range(2)], [Request(at, 500, 20) for at in late]
        Replica(prices, how, 1e9, 2).run(first + then)
        return then

    together = (0.5, 0.5)
    assert [r.end for r in run(balanced, together)] == [r.end for r in run(told, together)]
    step, own = prices.decode(1, 500), prices.mixed(1, 500.0, [(500, 0)])

    def waits(how: Any, *after: int) -> list[float]:
        starts = [tuple(0.5 + (i + n) * step for n in (0, *after)) for i in range(40)]
        return [(run(how, late)[0].ttft_seconds - own) / step for late in starts]

    assert max(waits(told)) < 2
    # The clock of 40 steps runs on while nobody waits: about half of it is left.
    assert 15 < sum(waits(balanced)) / 40 < 25
    assert 35 < max(waits(balanced)) < 42
    assert 9 < max(waits(balanced, 10)) < 13


def test_experts_that_groups_share_make_them_wait() -> None:
    """Attention data parallelism with shared experts is slower under load than its steps alone say."""
    model, cluster = load_model("deepseek-v2-lite"), Cluster.parse("4xh200-sxm-141gb")
    plan = Plan(dp=4, ep=4)
    asked = workload(40.0, 400, output_tokens=Length(kind="lognormal", mean=100, cv=0.8))
    found = serve(model, cluster, plan, asked)
    assert found.groups == 4
    assert found.replicas == 1
    assert found.latencies["tpot"]["mean"] > 1.02 * found.empty.tpot_seconds
    assert all(math.isclose(t.seconds, found.traces[0].seconds) for t in found.traces)


def test_pipeline_stages_have_a_batch_each_in_flight() -> None:
    """One request passes all stages as `infer` says; under load two stages serve more than one batch could."""
    model, cluster, plan = load_model("llama-3.1-8b"), Cluster.parse("2xh100-sxm-80gb"), Plan(pp=2)
    one = serve(model, cluster, plan, workload(count=1, arrivals=Arrivals(kind="burst")))
    job = Serving(batch=1, input_tokens=1000, output_tokens=100, max_batched_tokens=8192, max_sequences=1)
    alone = infer(model, cluster, plan, job)
    sooner = alone.ttft_seconds - after_pause(alone)
    assert one.requests[0].ttft_seconds == pytest.approx(alone.ttft_seconds - sooner, rel=0.02)
    assert one.requests[0].e2e_seconds == pytest.approx(alone.request_seconds - sooner, rel=0.02)
    burst = workload(count=400, arrivals=Arrivals(kind="burst"))
    two, single = serve(model, cluster, plan, burst), pools("vllm", burst, 0)
    assert len(two.requests) == 400
    assert sum(t.prompt_tokens - t.recomputed_tokens for t in two.traces) == 400 * 1000
    assert 1.3 * single.requests_per_second < two.requests_per_second < 2.2 * single.requests_per_second


def test_a_prefill_plan_is_that_of_the_replicas_unless_it_is_told() -> None:
    """A pool takes the degrees of the decode pool; experts wider than a worker's tp are groups of attention."""
    assert prefill_plan(Plan(tp=4, pp=2, dp=3), 2) == Plan(tp=4, pp=2, dp=2)
    assert prefill_plan(Plan(tp=8), 2, tp=1, ep=4) == Plan(tp=1, dp=8, ep=4)


def test_one_launch_line_does_not_drop_a_pool() -> None:
    """Where pools are started by an orchestrator that is not written, prefill workers are refused by name."""
    asked = "export trtllm llama-3.1-8b --on 4xh100 --rate 2/s --prefill-workers 1 --json"
    done = run(*asked.split())
    assert done.status == 2
    assert done.fields == ["prefill_workers"]


BAD = (
    ("--prefill-tp 2", "prefill_tp"),
    ("--prefill-workers 4", "prefill_workers"),
    ("--prefill-workers 1 --prefill-tp 3", "prefill_tp"),
    ("--prefill-workers 1 --prefill-ep 2", "prefill_ep"),
)


@pytest.mark.parametrize(("words", "field"), BAD)
def test_bad_pools_are_errors(words: str, field: str) -> None:
    """A pool that does not exist, leaves no device, or cannot be laid out is an error of its own flag."""
    done = run(*f"serve llama-3.1-8b --on 4xh100 --rate 2/s {words} --json".split())
    assert done.status == 2
    assert field in done.fields
    assert all(name.startswith("prefill_") for name in done.fields)


def test_the_closed_form_of_pools_is_near_their_simulation() -> None:
    """Mean latencies of both pools in a row are those of the simulation, at half of what they carry and above."""
    for engine in ENGINES:
        for rate in (12.0, 20.0):
            found = pools(engine, workload(rate, 2000), 1)
            assert found.steady.ttft_seconds == pytest.approx(found.latencies["ttft"]["mean"], rel=0.05)
            assert found.steady.tpot_seconds == pytest.approx(found.latencies["tpot"]["mean"], rel=0.03)


def test_a_search_finds_pools_where_they_take_fewer_devices() -> None:
    """Under a tight limit on tokens pools need no more devices than replicas that do both; what is found meets it."""
    asked = "--rate 20/s --input-tokens 2000 --output-tokens 200 --mean-ttft 300ms --mean-tpot 8.5ms --requests 500"
    space = "--tp 1 --pp 1 --weights bf16 --max-batched-tokens 8192 --max-sequences 256 --top 1"
    apart, both = (
        run(*f"plan serve llama-3.1-8b --on h100 {asked} {space} --pools {kind} --json".split()).tree["best"][0]
        for kind in ("disaggregated", "both")
    )
    assert apart["prefill"]["devices"] > 0
    assert both["devices"] <= apart["devices"]
    again = run(*apart["command"].split()[1:], "--json")
    assert again.status == 0
    assert again.tree["devices"] == apart["devices"]


def test_one_state_is_sent_however_many_are_kept_for_guesses() -> None:
    """Of recurrent layers a prompt's end is sent, whatever a step of the pool that decodes verifies."""
    cluster, policy = Cluster.parse("1xh200-sxm-141gb"), pools("vllm", workload(1.0, 20), 1).policy
    job = Serving(batch=1, input_tokens=1000, output_tokens=10)
    guessing = replace(job, speculative_method="ngram", num_speculative_tokens=3, acceptance_length=2.0)
    model = load_model("nemotron-3-nano-30b-a3b")
    cases = [infer(model, cluster, Plan(), one).case for one in (job, guessing)]
    sizes = [Transfer(cluster, case, case, policy).size_bytes(1000) for case in cases]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("dp", "says"), [(16, "must equal the 8 devices that the pool for prompts leaves of 24"), (8, "")]
)
def test_replicas_are_counted_on_what_the_pool_for_prompts_leaves(dp: int, says: str) -> None:
    """Of 24 devices two groups of eight compute prompts: sixteen replicas of one device have eight left."""
    words = f"serve deepseek-v2-lite --on 24xh200 --rate 2/s --requests 20 --dp {dp} --prefill-workers 2 --prefill-tp 8"
    done = run(*words.split())
    assert done.status == (2 if says else 0) and says in done.err
