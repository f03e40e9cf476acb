"""What must hold for every served batch, whatever the model, the plan and the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import run
from serving.serving_cases import DEVICES, ask, dense_block, jobs, latent_block, loaded, model_of, models, moe_block
from shardwise.cost import Efficiencies
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Plan, Serving
from shardwise.serving import infer, prefill_steps
from shardwise.serving._cost_model import engine_cost_model
from shardwise.serving._step import step_cost

LAWS = settings(max_examples=12, deadline=None)
# Of laws whose cases look for the largest batch or context.
SEARCHING = settings(max_examples=10, deadline=None)
DEVICE = st.sampled_from(DEVICES)


@given(models(), jobs(), DEVICE, st.sampled_from((2, 4, 8)))
@LAWS
def test_replicas_leave_one_request_alone(model, job, device, dp):
    """Data parallelism multiplies throughput and changes no latency and no memory."""
    one, many = ask(model, job, Plan(), device), ask(model, job, Plan(dp=dp), device)
    assert (many.ttft_seconds, many.tpot_seconds) == (one.ttft_seconds, one.tpot_seconds)
    assert many.memory.needed == one.memory.needed
    assert many.output_tokens_per_second == pytest.approx(dp * one.output_tokens_per_second)


@given(models(), jobs(max_batched_tokens=10**9), DEVICE, st.sampled_from((2, 3, 4)))
@LAWS
def test_a_pipeline_never_shortens_one_token(model, job, device, pp):
    """A step passes every layer whatever the number of stages, and each boundary adds a message."""
    one, many = ask(model, job, Plan(), device), ask(model, job, Plan(pp=pp), device)
    assert many.tpot_seconds >= one.tpot_seconds * (1 - 1e-12)
    assert many.ttft_seconds >= one.ttft_seconds * (1 - 1e-12)
    assert many.pipelined_decode_tokens_per_second >= many.decode_tokens_per_second


@given(st.sampled_from((1, 2, 4, 8, 16)), st.sampled_from((1, 2, 4, 8, 16)), st.integers(1, 4096))
@LAWS
def test_a_rank_holds_at_least_one_key_value_head(kv_heads, tp, tokens):
    """Keys and values are divided by tp down to one head a rank and replicated beyond; the factor 2 is K and V."""
    job = Serving(input_tokens=tokens, output_tokens=1)
    r = ask(model_of(dense_block(kv_heads=kv_heads)), job, Plan(tp=tp))
    blocks = -(-(tokens + 1) // 16) * 16
    assert r.kv_cache_bytes_per_gpu == 8 * 2 * max(kv_heads / tp, 1) * 128 * 2 * blocks


@given(st.sampled_from((1, 2, 4, 8)), jobs(weights=""), DEVICE)
@LAWS
def test_decode_reads_the_cache_with_key_value_heads(kv_heads, job, device):
    """Fewer key-value heads never make decode slower, and its attention grows with them, not with query heads.

    Attention of a few hundred tokens alone may be: grouped kernels swap heads and queries, which is a copy.
    """
    few = ask(model_of(dense_block(kv_heads=kv_heads)), job, device=device)
    many = ask(model_of(dense_block(kv_heads=16)), job, device=device)
    rest, more = (r.tpot_seconds - r.evaluation.decode.attention for r in (few, many))
    assert rest <= more * (1 + 1e-12)
    if job.batch * job.input_tokens >= 4096:
        assert few.evaluation.decode.attention <= many.evaluation.decode.attention * (1 + 1e-12)
    assert few.evaluation.decode.moved_bytes < many.evaluation.decode.moved_bytes


@given(st.sampled_from((8, 32, 128)), st.sampled_from((1, 2, 4)), st.integers(1, 64))
@LAWS
def test_decode_reads_the_experts_that_got_a_token(experts, top_k, batch):
    """At batch 1 a step reads exactly k experts a layer, at any batch at most batch x k, never more than all."""
    job = Serving(batch=batch, input_tokens=64, output_tokens=2)
    r, none = (ask(model_of(moe_block(experts, k)), job) for k in (top_k, 1))
    single, base = (ask(model_of(moe_block(experts, k)), replace(job, batch=1)) for k in (top_k, 1))
    one_expert = 3 * 2048 * 1024 * 2
    grown = single.evaluation.decode.moved_bytes - base.evaluation.decode.moved_bytes
    assert grown / 8 == pytest.approx((top_k - 1) * one_expert, rel=2e-3, abs=one_expert / 100)
    read = r.evaluation.decode.moved_bytes - none.evaluation.decode.moved_bytes
    assert read / 8 <= 1.05 * min(batch * top_k, experts) * one_expert


@given(models(("dense", "window", "latent")), DEVICE, st.sampled_from(("", "int4", "fp8")))
@LAWS
def test_a_step_reads_the_weights_and_the_head(model, device, weights):
    """One decode step takes at least the bytes of all weights but the embedding over the datasheet bandwidth."""
    r = ask(model, Serving(weights=weights, output_tokens=2), device=device)
    table = model.hidden * model.vocab * 2
    read = r.weights_bytes_per_gpu if model.tied else r.weights_bytes_per_gpu - table
    device_bytes = r.case.cluster.device.memory_bytes_per_second
    assert r.tpot_seconds >= 0.98 * read / device_bytes
    larger = ask(replace(model, vocab=2 * model.vocab), Serving(weights=weights, output_tokens=2), device=device)
    assert larger.tpot_seconds - r.tpot_seconds >= 0.9 * table / device_bytes


@given(models(), jobs(), DEVICE)
@LAWS
def test_the_embedding_is_a_lookup(model, job, device):
    """Without a head nothing is generated, and a pass does not depend on the vocabulary."""
    bare = replace(model, head=False, tied=False)
    wide = replace(bare, vocab=4 * model.vocab)
    job = Serving(batch=job.batch, input_tokens=job.input_tokens, output_tokens=0, weights=job.weights)
    assert ask(wide, job, device=device).ttft_seconds == pytest.approx(ask(bare, job, device=device).ttft_seconds)


@given(st.integers(1, 64), st.integers(64, 4096))
@LAWS
def test_a_step_reads_the_cache_once_and_writes_one_token(batch, context):
    """A longer context adds its cache once to what a step moves; the write does not grow with the context."""
    model = model_of(dense_block(kv_heads=16))
    short, long = (ask(model, Serving(batch=batch, input_tokens=n, output_tokens=2)) for n in (context, 2 * context))
    cache = batch * context * 8 * 2 * 16 * 128 * 2
    assert long.evaluation.decode.moved_bytes - short.evaluation.decode.moved_bytes == pytest.approx(cache)
    writes = [r.evaluation.decode.operators["cache_write"] for r in (short, long)]
    assert writes[0] == writes[1]


@given(st.sampled_from((1, 2, 4, 8, 16)), st.integers(1, 4096))
@LAWS
def test_a_latent_is_the_same_on_every_rank(tp, tokens):
    """Latent attention caches kv_lora_rank + qk_rope_head_dim elements a token, undivided by tp."""
    r = ask(model_of(latent_block()), Serving(input_tokens=tokens, output_tokens=1), Plan(tp=tp))
    assert r.kv_cache_bytes_per_gpu == 8 * (128 + 32) * 2 * (-(-(tokens + 1) // 16) * 16)


@given(st.sampled_from((16, 128, 1024)), st.integers(1, 8192), st.integers(1, 8192))
@LAWS
def test_a_window_stops_growing(window, tokens, more):
    """A window's cache and the cost of its decode step are the same for every context beyond it."""
    model = model_of(dense_block(window=window))
    first = ask(model, Serving(input_tokens=window + tokens, output_tokens=2))
    later = ask(model, Serving(input_tokens=window + tokens + more, output_tokens=2))
    assert first.kv_cache_bytes_per_gpu == later.kv_cache_bytes_per_gpu == 8 * 2 * 4 * 128 * 2 * window
    assert first.tpot_seconds == pytest.approx(later.tpot_seconds)


@given(models(("dense", "window", "latent")), jobs(max_batched_tokens=0), DEVICE, st.integers(1, 64))
@LAWS
def test_a_larger_batch_is_never_faster(model, job, device, more):
    """The time of a step never falls as the batch grows, and neither does memory; weights do not depend on it."""
    small, large = ask(model, job, device=device), ask(model, replace(job, batch=job.batch + more), device=device)
    assert large.tpot_seconds >= small.tpot_seconds * (1 - 1e-12)
    assert large.ttft_seconds >= small.ttft_seconds * (1 - 1e-12)
    assert large.memory.needed > small.memory.needed
    assert large.weights_bytes_per_gpu == small.weights_bytes_per_gpu


@given(
    models(("dense", "window", "latent")), st.integers(1, 512), st.sampled_from(("vllm", "vllm-v0", "deepspeed-mii"))
)
@LAWS
def test_twice_the_prompts_fill_twice_the_steps(model, batch, engine):
    """Steps are full of prompts, whole and cut, but the last one: twice as many take no longer than one after another.

    They take less than a step less.
    """
    one, two = (
        ask(model, Serving(batch=n, input_tokens=3000, max_batched_tokens=512), engine=engine)
        for n in (batch, 2 * batch)
    )
    (step, _), _ = prefill_steps(one.case, one.evaluation.sizes)
    costs = engine_cost_model(one.case, one.evaluation.sizes)
    full = step_cost(one.case, one.evaluation.sizes, step, costs).seconds
    assert 2 * one.ttft_seconds - full <= two.ttft_seconds <= 2 * one.ttft_seconds * 1.01


@given(models(), jobs(), DEVICE)
@LAWS
def test_more_experts_hit_never_speed_up_a_step(model, job, device):
    """Doubling the batch of any model never shortens its step."""
    assert (
        ask(model, replace(job, batch=2 * job.batch), device=device).tpot_seconds
        >= ask(model, job, device=device).tpot_seconds
    )


@given(models(), jobs(), DEVICE, st.sampled_from((1, 2)), st.sampled_from((1, 2)))
@LAWS
def test_throughput_is_batch_over_latency(model, job, device, tp, dp):
    """Little's law: output rate x request time is the number of output tokens in flight, for every plan."""
    r = ask(model, job, Plan(tp=tp, dp=dp), device)
    in_flight = r.job.batch * dp * r.job.output_tokens
    assert r.output_tokens_per_second * r.request_seconds == pytest.approx(in_flight)
    assert r.request_seconds == pytest.approx(r.ttft_seconds + (job.output_tokens - 1) * r.tpot_seconds)


@given(models(), jobs(), st.integers(1, 4095))
@LAWS
def test_a_prefix_hit_saves_prefill_but_not_its_attention(model, job, prefix):
    """Tokens in the cache shorten the prefill, whose remaining tokens still read them; decode does not change.

    Attention alone may take longer where as many chunks, each behind more tokens, leave cores idle: by the keys they
    see more of at most.
    """
    job = replace(job, input_tokens=4096)
    hit, cold = ask(model, replace(job, prefix_tokens=prefix)), ask(model, job)
    alone = ask(model, replace(job, input_tokens=4096 - prefix))
    more = cold.evaluation.prefill.operators.get("attention", 0.0) * 2 * prefix / 4096
    assert alone.ttft_seconds * (1 - 1e-9) <= hit.ttft_seconds <= (cold.ttft_seconds + more) * (1 + 1e-9)
    assert hit.tpot_seconds == cold.tpot_seconds


@given(models(("dense",)), st.integers(1, 32), st.sampled_from((64, 100, 512, 4096)))
@LAWS
def test_prefill_in_steps_reads_the_weights_once_a_step(model, batch, step):
    """A prefill cut in steps moves the weights as often as it has steps, and takes at least as long as at once."""
    job = Serving(batch=batch, input_tokens=1024, output_tokens=2)
    whole, cut = ask(model, job), ask(model, replace(job, max_batched_tokens=step))
    steps = -(-batch * 1024 // step)
    overhead = [r.evaluation.prefill.overhead for r in (whole, cut)]
    assert overhead[1] >= steps * 0.3e-3
    assert cut.ttft_seconds >= whole.ttft_seconds * (1 - 1e-9)
    table = model.hidden * model.vocab * 2
    weights = cut.weights_bytes_per_gpu - (0 if model.tied else table)
    assert cut.evaluation.prefill.moved_bytes >= steps * 0.98 * weights
    assert cut.memory.activations <= whole.memory.activations


@given(
    models(), jobs(weights=""), st.sampled_from((0.3, 0.6, 0.9)), st.sampled_from(("vllm", "sglang", "tensorrt-llm"))
)
@SEARCHING
def test_less_memory_never_holds_more_requests(model, job, fraction, engine):
    """A smaller share of memory never raises the concurrency, whatever the engine calls the share."""
    job = replace(job, memory_fraction=fraction)
    less = ask(model, job, engine=engine)
    more = ask(model, replace(job, memory_fraction=fraction + 0.1), engine=engine)
    assert less.max_concurrency <= more.max_concurrency
    assert less.kv_cache_tokens <= more.kv_cache_tokens
    assert less.capacity.largest_decode_batch <= more.capacity.largest_decode_batch


@given(models(), jobs(), DEVICE)
@LAWS
def test_nothing_beats_the_datasheet(model, job, device):
    """Fitted constants are never faster than ideal efficiencies, and those never faster than the peaks."""
    try:
        ideal = ask(model, job, device=device, efficiencies=Efficiencies(ideal=True))
    except ValueError:
        return
    r = ask(model, job, device=device)
    assert r.ttft_seconds >= ideal.ttft_seconds
    assert r.tpot_seconds >= ideal.tpot_seconds
    one = r.case.cluster.device
    assert ideal.tpot_seconds >= ideal.evaluation.decode.moved_bytes / one.memory_bytes_per_second * (1 - 1e-9)


ENGINES = st.sampled_from(("vllm", "vllm-v0", "sglang", "tensorrt-llm", "lmdeploy", "llama.cpp"))


@given(models(), jobs(), DEVICE, ENGINES)
@SEARCHING
def test_the_largest_batch_fits_and_one_more_does_not(model, job, device, engine):
    """`max_concurrency` is the largest batch that fits, whatever batch was asked."""
    job = loaded(job, engine, device)
    asked = [ask(model, replace(job, batch=n), device=device, engine=engine) for n in (1, job.batch)]
    most = asked[0].max_concurrency
    assert asked[1].max_concurrency == most
    if most:
        assert ask(model, replace(job, batch=most), device=device, engine=engine).fits
    assert not ask(model, replace(job, batch=most + 1), device=device, engine=engine).fits


@given(models(("dense", "moe", "latent")), jobs(), DEVICE, ENGINES)
@SEARCHING
def test_the_longest_context_fits_and_a_longer_one_does_not(model, job, device, engine):
    """A job at its longest context fits, and one whose prompt has one token more does not."""
    job = replace(loaded(job, engine, device), batch=8 * job.batch)
    longest = ask(model, job, device=device, engine=engine).capacity.longest_context
    edge = replace(job, input_tokens=longest - job.output_tokens)
    if longest:
        assert ask(model, edge, device=device, engine=engine).fits
        edge = replace(edge, input_tokens=edge.input_tokens + 1)
    else:
        edge = replace(edge, input_tokens=1)
    assert not ask(model, edge, device=device, engine=engine).fits


@given(models(), jobs(), DEVICE, ENGINES)
@SEARCHING
def test_each_phase_holds_its_own_batch(model, job, device, engine):
    """A replica that only prefills holds the largest batch with nothing to generate; both phases hold no less alone."""
    job = loaded(job, engine, device)
    found = ask(model, job, device=device, engine=engine).capacity
    prompts = replace(job, output_tokens=0)
    assert ask(model, prompts, device=device, engine=engine).max_concurrency == found.largest_prefill_batch
    assert min(found.largest_prefill_batch, found.largest_decode_batch) >= found.max_concurrency


@given(models(), jobs(), DEVICE)
@SEARCHING
def test_requests_fill_the_tokens_of_the_cache(model, job, device):
    """The largest batch takes no more than the tokens of cache that it leaves room for.

    Of mixed layers vLLM counts the tokens of whole groups, more of which fit where windows hold less.
    """
    r = ask(model, replace(job, batch=max(ask(model, job, device=device).max_concurrency, 1)), device=device)
    windows = {getattr(m, "window", 0) for b in model.kinds for m in b.mixers}
    assert len(windows) > 1 or not r.fits or r.job.batch * job.total_tokens <= r.kv_cache_tokens


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_limits_of_the_engine_make_tokens_and_requests_agree(engine):
    """Where step tokens and sequences set working memory, the requests that fit are the tokens of cache over theirs."""
    job = Serving(batch=16, input_tokens=1000, output_tokens=100, max_batched_tokens=8192, max_sequences=1024)
    r = ask("llama-3.1-8b", job, engine=engine)
    each = -(-1100 // r.case.engine.memory.block_tokens) * r.case.engine.memory.block_tokens
    assert r.max_concurrency == r.kv_cache_tokens // each > 300


@given(models(), jobs(), DEVICE)
@LAWS
def test_a_request_among_others_takes_what_the_batch_takes(model, job, device):
    """First token and further ones add up to the batch's seconds, no token comes sooner than alone or in the batch."""
    one = ask(model, job, Plan(), device)
    steps = max(job.output_tokens - 1, 0)
    if steps:
        assert one.request_ttft_seconds + steps * one.request_tpot_seconds == pytest.approx(one.request_seconds)
    alone = ask(model, replace(job, batch=1), Plan(), device)
    assert alone.request_ttft_seconds == pytest.approx(alone.ttft_seconds)
    assert one.request_ttft_seconds >= alone.request_ttft_seconds * (1 - 1e-9)


def test_a_batch_beyond_the_budget_of_a_step_runs_in_chunks():
    """600 prompts run in steps of the engine's 8,192 tokens, so that they leave the cache what a server has of it."""
    job = Serving(batch=600, max_sequences=600, input_tokens=2000, output_tokens=300)
    whole = replace(job, max_batched_tokens=600 * 2000)
    model, plan = load_model("llama-3.1-70b"), Plan(tp=8)
    cut, at_once = (infer(model, Cluster.parse("8xh100-sxm-80gb"), plan, one) for one in (job, whole))
    assert cut.case.step_tokens == 8192
    assert cut.fits and not at_once.fits
    assert cut.request_ttft_seconds < cut.ttft_seconds / 100


@pytest.mark.parametrize("engine", ["vllm", "tensorrt-llm-chunked"])
def test_stages_launch_their_layers_side_by_side(engine: str) -> None:
    """Where the host is behind, two stages halve the time of many pieces, and a faster device is never slower."""
    words = "infer gemma-2-9b --on 4xb200 --tp 2 --batch 32 --input-tokens 8192 --max-batched-tokens 2048 --engine "
    times = {}
    for pp in (1, 2):
        for peak in ("2.25P", "9P"):
            tree = run(*(words + engine).split(), "--pp", str(pp), "--peak-flops", peak, "--json").tree
            times[pp, peak] = tree["ttft_seconds"]
    assert times[1, "9P"] < times[1, "2.25P"] and times[2, "9P"] < times[2, "2.25P"]
    assert times[2, "9P"] == pytest.approx(times[1, "9P"] / 2, rel=0.05)
