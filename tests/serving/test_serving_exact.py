"""Figures of a served batch that a pencil gives to the last digit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.serving_cases import ask, dense_block, jobs, loaded, model_of, models, moe_block
from serving.test_serving_laws import DEVICE, ENGINES, LAWS
from shardwise.ledger.op import Weight
from shardwise.models import (
    MLP,
    Attention,
    Block,
    CompressedAttention,
    GatedDelta,
    Indexer,
    LatentAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    Mixer,
    Mlstm,
    RecurrentGate,
    Rwkv,
    ShortConv,
    load_model,
)
from shardwise.ops.routed import distinct_experts
from shardwise.plans import Plan, Serving
from shardwise.serving import find_format
from shardwise.serving._batch import spread
from shardwise.serving._cost_model import engine_cost_model
from shardwise.serving._ledger import EngineStep
from shardwise.serving._routing import popularity_of
from shardwise.serving._step import step_cost

STEP = ("sequences", "tokens", "context")
LATENT = LatentAttention(
    heads=16, q_lora_rank=256, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
)
INDEXER = Indexer(heads=4, head_dim=64, top_k=512)
COMPRESSED = CompressedAttention(
    heads=16, head_dim=256, q_lora_rank=256, out_groups=4, out_lora_rank=128, window=128, rate=4
)
KEPT: dict[str, tuple[Mixer, Callable[[int], float]]] = {
    "grouped": (Attention(heads=16, kv_heads=4, head_dim=128), lambda n: 2 * n * 4 * 256),
    # Keys are rotated, values are not: both are kept.
    "one projection of both": (
        Attention(heads=16, kv_heads=4, head_dim=128, shared_key_value=True),
        lambda n: 2 * n * 4 * 256,
    ),
    "wide values": (Attention(heads=16, kv_heads=4, head_dim=128, v_head_dim=64), lambda n: 2 * n * 4 * 192),
    "window": (Attention(heads=16, kv_heads=4, head_dim=128, window=64), lambda n: 2 * min(n, 64) * 4 * 256),
    "of an earlier layer": (Attention(heads=16, kv_heads=4, head_dim=128, kv_from_earlier=True), lambda n: 0),
    "latent": (LATENT, lambda n: 2 * n * 160),
    "indexed": (replace(LATENT, indexer=INDEXER), lambda n: n * (2 * 160 + 64 + 4)),
    "indexed by groups": (
        Attention(heads=16, kv_heads=4, head_dim=128, indexer=Indexer(heads=4, head_dim=32, top_k=64, style="groups")),
        lambda n: n * (2 * 4 * 256 + 2 * 32),
    ),
    # Keys and gates in 16 bits of the pool that is not full.
    "indexed by pools": (
        replace(LATENT, indexer=replace(INDEXER, pool=4)),
        lambda n: n * 2 * 160 + n / 4 * (64 + 4) + 4 * 4 * 64,
    ),
    "indexed by means": (
        Attention(
            heads=16, kv_heads=4, head_dim=128, indexer=Indexer(heads=4, head_dim=32, top_k=64, pool=4, style="mean")
        ),
        lambda n: n * 2 * 4 * 256 + n / 4 * 2 * 32 + 4 * 2 * 32,
    ),
    # Values and gates in fp32 of the tokens that are not pooled yet.
    "compressed": (COMPRESSED, lambda n: 2 * min(n, 128) * 256 + n / 4 * 2 * 256 + 4 * 4 * 2 * 256),
    "mamba": (Mamba1(inner=1024, state=16, conv=4, dt_rank=64), lambda n: 2 * 1024 * 16 + 2 * 3 * 1024),
    "mamba2": (
        Mamba2(heads=16, head_dim=64, groups=2, state=32, conv=4),
        lambda n: 2 * 1024 * 32 + 2 * 3 * (1024 + 2 * 2 * 32),
    ),
    "gated delta": (
        GatedDelta(key_heads=4, value_heads=8, key_dim=64, value_dim=128, conv=4),
        lambda n: 2 * 8 * 64 * 128 + 2 * 3 * (2 * 4 * 64 + 8 * 128),
    ),
    "gated by channel": (
        GatedDelta(key_heads=8, value_heads=8, key_dim=128, value_dim=128, conv=4, style="kda"),
        lambda n: 4 * 8 * 128 * 128 + 2 * 3 * 3 * 8 * 128,
    ),
    "lightning": (LightningAttention(heads=8, head_dim=64), lambda n: 2 * 8 * 64**2),
    "short convolution": (ShortConv(width=1024, conv=3), lambda n: 2 * 2 * 1024),
    "recurrent gate": (RecurrentGate(width=1024, heads=8, conv=4), lambda n: 4 * 1024 + 2 * 3 * 1024),
    "rwkv": (Rwkv(width=1024), lambda n: (2 * 2 + 3 * 4) * 1024),
    "mlstm": (Mlstm(heads=4, qk_dim=64, v_dim=128), lambda n: 4 * 4 * (64 * 128 + 64 + 1)),
}


@pytest.mark.parametrize(("mixer", "kept"), KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("tokens", [32, 512])
def test_what_a_sequence_keeps(mixer: Mixer, kept: Callable[[int], float], tokens: int) -> None:
    """Bytes between tokens: keys and values, latents, states as vLLM keeps them, last inputs."""
    model = model_of(Block(mixers=(mixer,), feed_forward=MLP(ffn=4096)), layers=6)
    r = ask(model, Serving(batch=3, input_tokens=tokens - 16, output_tokens=16))
    assert r.kv_cache_bytes_per_gpu == 3 * 6 * kept(tokens)


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_two_points_stand_for_a_series(first: int, more: int) -> None:
    """Mean and mean square of whole numbers are those of their two points, to rounding."""
    points, numbers = spread(first, first + more), range(first, first + more + 1)
    for power in (0, 1, 2):
        mean = sum(n**power for n in numbers) / len(numbers)
        assert sum(w * x**power for x, w in points) == pytest.approx(mean, rel=1e-12)


@given(models(), jobs(), DEVICE, ENGINES, st.sampled_from((Plan(), Plan(tp=2), Plan(tp=2, pp=2))))
@LAWS
def test_a_phase_is_its_parts(model, job, device, engine, plan) -> None:
    """Operators, exposed messages and host work, less what overlaps, are the seconds of both phases."""
    evaluation = ask(model, loaded(job, engine, device), plan, device, engine=engine).evaluation
    for phase in (evaluation.prefill, evaluation.decode):
        parts = sum(phase.operators.values()) + sum(phase.exposed.values()) + phase.overhead - phase.overlapped
        assert parts == pytest.approx(phase.seconds, rel=1e-9)


def test_host_work_is_that_of_every_step() -> None:
    """A prompt of 4,000 tokens in steps of 512 has the host's work eight times, and eight prompts in a row 63 times."""
    for batch, steps in ((1, 8), (8, 63)):
        r = ask("llama-3.1-8b", Serving(batch=batch, input_tokens=4000, max_batched_tokens=512))
        assert r.evaluation.prefill.overhead == pytest.approx(steps * (0.3e-3 + 5.0e-6), rel=1e-12)


def test_layers_multiply_their_operators() -> None:
    """Operators of two kinds of layers in turn are four times those of one layer of each."""
    blocks = (dense_block(), dense_block(ffn=8192))
    job = Serving(batch=4, input_tokens=300, output_tokens=8)
    one, four = (ask(model_of(*blocks, layers=n), job).evaluation for n in (2, 8))
    for few, many in ((one.prefill, four.prefill), (one.decode, four.decode)):
        for name in ("norm1", "qkv", "attention", "out", "mlp.up", "mlp.down"):
            assert many.operators[name] == pytest.approx(4 * few.operators[name], rel=1e-12)
        assert many.operators["head"] == few.operators["head"]


def test_experts_split_over_replicas_send_every_token_once() -> None:
    """Four replicas that split each expert gather eight tokens of each, and reduce as many outputs."""
    job = Serving(batch=8, input_tokens=512, output_tokens=8)
    alone, split = (
        ask(model_of(moe_block(16, 2)), job, plan, engine="vllm").evaluation.prefill
        for plan in (Plan(tp=1, dp=4), Plan(tp=1, etp=4, dp=4))
    )
    assert set(alone.exposed.values()) <= {0.0}
    wire = 2 * 3 / 4 * 4 * 8 * 512 * 2048 * 2
    assert wire / 450e9 < split.exposed["etp"] / 8 < 2 * wire / 450e9


@pytest.mark.parametrize(
    ("form", "kind", "held"),
    [
        ("bf16", "vector", True), ("bf16", "matrix", True), ("fp8", "vector", False), ("fp8", "matrix", True),
        ("iq4_nl", "vector", False), ("iq4_nl", "matrix", True), ("iq4_nl", "embedding", True),
        ("fp8", "embedding", False), ("fp8", "head", False),
    ],
)  # fmt: skip
def test_which_weights_take_a_format(form: str, kind: str, held: bool) -> None:
    """Vectors stay in 16 bits whatever the scope; tables take a format only where all weights do."""
    weight: Weight[int] = Weight(name="w", elements=64, whole=64, shape=(8, 8), kind=kind)  # type: ignore[arg-type]
    assert find_format(form).holds(weight) is held


@pytest.mark.parametrize("weights", ["fp32", "bf16", "4 bits"])
@pytest.mark.parametrize("engine", ["mlc", "llama.cpp", "vllm", "tensorrt-llm"])
def test_longer_contexts_never_speed_up_a_step(engine: str, weights: str) -> None:
    """The mean decode step grows with input and output from the first token on, whatever the width of activations."""
    if weights == "4 bits":
        weights = "q4_0" if engine in ("mlc", "llama.cpp") else "int4"
    found = [
        ask(
            "llama-3-8b", Serving(batch=64, input_tokens=n, output_tokens=m, weights=weights), engine=engine
        ).tpot_seconds
        for n, m in ((1, 2), (1, 17), (1, 34), (4, 34), (8, 34), (64, 64), (512, 64))
    ]
    assert found == sorted(found)


@pytest.mark.parametrize("tokens", range(1, 20))
def test_one_row_more_never_speeds_up_thin_products(tokens: int) -> None:
    """Products of a few rows, bound by what a core can load, are never slower than those of one row more."""
    one, more = (
        ask("qwen2.5-72b", Serving(input_tokens=n, weights="iq4_nl"), Plan(tp=2), engine="llama.cpp").ttft_seconds
        for n in (tokens, tokens + 1)
    )
    assert one <= more * (1 + 1e-12)


def test_blocks_round_a_sequence_up() -> None:
    """A sequence of 1,000 and 25 tokens takes 65 blocks of 16."""
    r = ask("llama-3.1-8b", Serving(input_tokens=1000, output_tokens=25))
    assert r.kv_cache_bytes_per_gpu == ceil(1025 / 16) * 16 * 2 * 8 * 128 * 2 * 32


NAMES = ("llama-3.1-8b", "deepseek-v3.2", "gpt-oss-20b", "nemotron-h-8b", "qwen3-next-80b-a3b", "mamba-2.8b")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("name", NAMES)
def test_only_attention_of_a_step_grows_with_the_context(name: str, phase: str) -> None:
    """A longer context changes `attention` and, where an engine lists its blocks, the host: nothing else of a step."""
    r = ask(name, Serving(batch=4), Plan(tp=8), "b200-sxm-180gb")
    costs = replace(engine_cost_model(r.case, r.evaluation.sizes), decoding=phase == "decode")
    short, long = (
        step_cost(
            r.case,
            r.evaluation.sizes,
            EngineStep(phase=phase, sequences=4, tokens=64 if phase == "prefill" else 1, context=n),
            costs,
        )
        for n in (2_000, 9_000)
    )
    rest = [s.seconds - s.attention for s in (short, long)]
    assert rest[0] == pytest.approx(rest[1], rel=1e-12)
    assert (long.attention > short.attention) is (name != "mamba-2.8b")
    assert 0 < short.sampling < short.seconds and sum(short.roles.values()) == pytest.approx(
        sum(short.operators.values())
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_column_of_steps_is_priced_as_each_step_alone(name: str) -> None:
    """Columns of sequences, tokens and contexts give every step its own seconds, roles and host."""
    numpy = pytest.importorskip("numpy")
    r = ask(name, Serving(batch=4), Plan(tp=8), "b200-sxm-180gb")
    sizes, costs = r.evaluation.sizes, engine_cost_model(r.case, r.evaluation.sizes)
    for phase, tokens in (("prefill", (1.0, 77.0, 4096.0)), ("decode", (1.0, 1.0, 1.0))):
        cells = list(zip((1.0, 5.0, 200.0), tokens, (0.0, 1000.0, 70_000.0), strict=True))
        cost = replace(costs, decoding=phase == "decode")
        made = EngineStep(phase=phase, **dict(zip(STEP, map(numpy.array, zip(*cells, strict=True)), strict=True)))
        column = step_cost(r.case, sizes, made, cost)
        for i, cell in enumerate(cells):
            one = step_cost(r.case, sizes, EngineStep(phase=phase, **dict(zip(STEP, cell, strict=True))), cost)
            for pick in ("seconds", "attention", "of_sequences", "sampling", "overhead"):
                found = numpy.broadcast_to(getattr(column, pick), 3)[i]
                assert found == pytest.approx(getattr(one, pick), rel=1e-9), pick


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v3.2", "nemotron-h-8b", "gemma-3-27b"])
@pytest.mark.parametrize("engine", ["vllm", "vllm-v0", "sglang", "tensorrt-llm", "llama.cpp"])
def test_one_token_in_and_two_out(name: str, engine: str) -> None:
    """The shortest request has finite seconds and a capacity, also where a compressed cache is still empty."""
    job = Serving(batch=3, input_tokens=1, output_tokens=2, weights="bf16")
    r = ask(name, job, Plan(tp=8), "b200-sxm-180gb", engine=engine)
    assert 0 < r.tpot_seconds < 1 and 0 < r.ttft_seconds < 1
    assert r.fits == (r.max_concurrency >= 3)


@pytest.mark.parametrize(
    ("name", "met"),
    [
        ("qwen3-30b-a3b", {16: 58.7}),
        ("deepseek-r1", {8: 54.2, 16: 92.8, 32: 144.4, 64: 198.2}),
        ("glm-5.2", {8: 52.3, 16: 87.2, 32: 131.4, 64: 175.7}),
        ("deepseek-v2-lite", {2: 11.4, 4: 20.8, 8: 34.9}),
        ("qwen3-next-80b-a3b", {8: 70.2, 16: 123.4, 32: 198.6, 64: 284.8}),
    ],
)
def test_sequences_meet_the_experts_that_were_counted(name: str, met: dict[int, float]) -> None:
    """Steps of some sequences meet as many experts of a layer as counts of served text say (routing.toml)."""
    model = load_model(name)
    experts = next(block.experts for block in model.kinds if block.experts is not None)
    for tokens, counted in met.items():
        found = distinct_experts(experts.experts, experts.experts, experts.top_k, tokens, popularity_of(model))
        assert found == pytest.approx(counted, rel=0.04)


def test_experts_that_nobody_counted_are_chosen_as_evenly_as_any_that_were() -> None:
    """A family without counts takes the least of the others; few experts are all met whatever their popularity."""
    counted = [popularity_of(load_model(name)) for name in ("deepseek-r1", "glm-5.2", "olmoe-1b-7b", "gpt-oss-20b")]
    assert popularity_of(load_model("kimi-k2")) == popularity_of(load_model("minimax-m2")) == min(counted)
    assert popularity_of(load_model("mixtral-8x7b")) == 1


def test_popular_experts_leave_fewer_weights_to_read() -> None:
    """Steps of 32 sequences of gpt-oss are shorter than were its experts chosen as OLMoE's, those of one are not.

    In a release without a kernel for its router alone.
    """
    model = load_model("gpt-oss-120b")

    def read(family: str, batch: int) -> float:
        return ask(
            replace(model, family=family), Serving(batch=batch), device="h200-sxm-141gb", engine="vllm-0.19"
        ).tpot_seconds

    assert read("gpt_oss", 32) < 0.95 * read("olmoe", 32)
    assert read("gpt_oss", 1) == pytest.approx(read("olmoe", 1), rel=0.01)
