"""What prefill and decode move: caches, windows, states, tables and experts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any, Literal

import pytest

from ops.helpers import layout
from shardwise.ledger.op import Op
from shardwise.models import Attention, Block, Mixer, MoE, load_model
from shardwise.ops.block import block_ops
from shardwise.ops.count import whole_layout
from shardwise.ops.head import embedding, head
from shardwise.ops.layout import Layout
from shardwise.ops.routed import busiest_rank, distinct_experts, experts_of


def decoding(context: int, batch: int = 1, **more: Any) -> Layout[Any]:
    """One new token a sequence behind so many cached ones, caches of 2 bytes an element."""
    return layout({"B": batch, "S": 1, "context": context, "phase": "decode", "activation_bytes": 2}, **more)


def mixing(y: Layout[Any], mixer: Mixer, hidden: int = 4096) -> dict[str, Op[Any]]:
    """The operators of a mixer by name."""
    return {op.name: op for op in block_ops(y, Block(mixers=(mixer,), feed_forward=None, norms=1), hidden)}


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (32, 8), (32, 1)])
def test_decode_reads_keys_and_values_at_key_value_heads(heads: int, kv_heads: int) -> None:
    """Attention over c cached tokens reads (c + 1) K (H + Hv) elements a sequence, whatever the query heads."""
    m = Attention(heads=heads, kv_heads=kv_heads, head_dim=128)
    core = mixing(decoding(999, batch=4), m)["attention"]
    queries_and_output = 2 * 4 * heads * 256
    assert core.forward_bytes == 4 * 1000 * kv_heads * 256 * 2 + queries_and_output
    assert core.flops == 4 * 2 * 1000 * heads * 256


@pytest.mark.parametrize("tp", [1, 8])
def test_latent_attention_reads_the_latent_once(tp: int) -> None:
    """Decode reads kv_lora_rank + rotary elements of each cached token on every rank, for all heads together."""
    m = load_model("deepseek-v3").layers[0].mixers[0]
    near, far = (mixing(decoding(c, tp=tp), m, 7168)["attention"] for c in (1000, 3000))
    assert far.forward_bytes - near.forward_bytes == 2000 * (512 + 64) * 2
    assert far.flops - near.flops == 2000 * 2 * (128 // tp) * (2 * 512 + 64)


def test_latent_attention_absorbs_its_up_projection() -> None:
    """Decode has no expanded keys: the same weights act on queries and outputs instead."""
    m = load_model("deepseek-v3").layers[0].mixers[0]
    train, decode = mixing(layout({"S": 1}), m, 7168), mixing(decoding(100), m, 7168)
    assert "kv_up" in train and "kv_up" not in decode
    assert sum(w.whole for w in train["kv_up"].weights) == sum(w.whole for w in decode["absorb"].weights)


@pytest.mark.parametrize(("more", "limit"), [({"window": 512}, 512), ({"chunk": 1024}, 1024)])
def test_windows_stop_what_is_read(more: dict[str, int], limit: int) -> None:
    """Sliding and chunked layers never read more than their window, and all of a shorter context."""
    m = Attention(heads=32, kv_heads=8, head_dim=128, **more)

    def read(context: int) -> float:
        return mixing(decoding(context), m)["attention"].columns

    assert read(99) == 100
    assert max(read(c) for c in range(limit - 1, 4 * limit, 7)) <= limit
    assert read(limit - 1) == read(8 * limit - 1) == limit


@pytest.mark.parametrize(
    "name", ["mamba-2.8b", "mamba2-2.7b", "qwen3-next-80b-a3b", "kimi-linear-48b-a3b", "lfm2-350m", "rwkv-4-169m"]
)
def test_states_are_constant(name: str) -> None:
    """Recurrent layers cost the same whatever was seen before, and read and write their state once a step."""
    model = load_model(name)
    m = next(m for b in model.layers for m in b.mixers if not isinstance(m, Attention))
    short, long = (mixing(decoding(c, batch=2), m, model.hidden) for c in (10, 100_000))
    assert short == long
    states = [op for op in short.values() if op.region in ("ssm.scan", "ssm.conv") and op.kind in ("scan", "memory")]
    train = mixing(layout({"B": 2, "S": 1}), m, model.hidden)
    assert any(op.forward_bytes > train[op.name].forward_bytes for op in states)


def test_state_bytes_are_those_of_the_recurrence() -> None:
    """A Mamba-2 step moves heads * head_dim * state fp32 values each way beside its inputs and outputs."""
    m = load_model("mamba2-2.7b").layers[0].mixers[0]
    one, batch = (mixing(decoding(50, batch=n), m, 2560)["scan"].forward_bytes for n in (1, 3))
    assert batch == 3 * one
    edges = 2 * (3 * 80 * 64 + 2 * 128)
    assert one - edges == 2 * 4 * 80 * 64 * 128


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("mamba2-2.7b", 80 * 64 * 128),
        ("qwen3-next-80b-a3b", 32 * 128 * 128),
        ("kimi-linear-48b-a3b", 32 * 128 * 128),
    ],
)
def test_prompts_run_a_recurrence_by_chunks_as_training_does(name: str, state: int) -> None:
    """A prompt moves what training moves forward, in as many kernels, and the state; a token has one kernel."""
    model = load_model(name)
    m = next(m for b in model.layers for m in b.mixers if type(m).__name__ in ("Mamba2", "GatedDelta"))
    train = mixing(layout({"B": 1, "S": 512, "activation_bytes": 2}), m, model.hidden)["scan"]
    prompt = layout({"B": 1, "S": 512, "phase": "prefill", "activation_bytes": 2})
    whole, one = (mixing(y, m, model.hidden)["scan"] for y in (prompt, decoding(512)))
    assert whole.forward_bytes - train.forward_bytes == 2 * 4 * state
    assert (whole.launches, one.launches) == (train.launches, 1)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-2-9b"])
def test_the_head_is_read_and_the_table_is_not(name: str) -> None:
    """Decode reads the output head's whole matrix, tied or not, and of the input table the rows of its tokens alone."""
    model = load_model(name)
    y = decoding(100, batch=8)
    (product,) = head(y, model)
    lookup = embedding(y, model)[0]
    assert product.forward_bytes >= 2 * model.vocab * model.hidden
    assert lookup.forward_bytes == 2 * 2 * 8 * model.hidden


def test_the_head_of_a_prefill_sees_the_last_tokens() -> None:
    """Prefill runs the head on as many tokens as it is asked for."""
    model = load_model("llama-3.1-8b")
    y = layout({"B": 4, "S": 1000, "phase": "prefill"})
    (last,) = head(y, model, 4)
    assert last.flops == 2 * 4 * model.hidden * model.vocab
    assert last.flops * 1000 == head(y, model)[0].flops


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b", "gpt-oss-120b"])
def test_one_token_reads_the_experts_it_visits(name: str) -> None:
    """At one token exactly top_k experts are read; many tokens read nearly all, never more than there are."""
    model = load_model(name)
    block = model.layers[-1]
    m = block.feed_forward

    def hit(batch: int) -> float:
        ops = block_ops(decoding(100, batch=batch), block, model.hidden)
        return next(op.batch for op in ops if op.name == "mlp.experts.up")

    assert hit(1) == pytest.approx(m.top_k, rel=1e-12)
    assert all(hit(b) < hit(2 * b) <= m.experts for b in (1, 4, 16))
    assert hit(100_000) == pytest.approx(m.experts)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "mixtral-8x7b", "gemma-2-9b"])
def test_prefill_in_two_pieces_has_the_flops_of_one(name: str) -> None:
    """A prompt in two chunks costs the FLOPs of the prompt at once."""
    model = load_model(name)

    def flops(new: int, past: int) -> float:
        y = layout({"B": 1, "S": new, "context": past, "phase": "prefill"})
        return float(sum(op.flops for b in model.kinds for op in block_ops(y, b, model.hidden)))

    assert flops(600, 0) + flops(400, 600) == pytest.approx(flops(1000, 0), rel=1e-12)


@pytest.mark.parametrize(("experts", "top_k", "popularity"), [(128, 8, 100), (128, 4, 100), (64, 8, 14), (512, 10, 30)])
@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 512])
def test_popular_experts_leave_others_without_a_token(experts: int, top_k: int, popularity: float, tokens: int) -> None:
    """Of experts that are chosen with chances whose logarithms are spread evenly, as many as the sum over all says."""
    weights = [popularity ** ((one + 0.5) / experts) for one in range(experts)]
    chances = [top_k * weight / sum(weights) for weight in weights]
    exact = sum(1 - (1 - chance) ** tokens for chance in chances)
    assert distinct_experts(experts, experts, top_k, tokens, popularity) == pytest.approx(exact, rel=0.005)
    even = distinct_experts(experts, experts, top_k, tokens)
    assert exact <= even * (1 + 1e-9)
    assert distinct_experts(experts, experts, top_k, tokens, 1.0001) == pytest.approx(even, rel=1e-3)


@pytest.mark.parametrize(("experts", "top_k", "ep"), [(256, 8, 8), (384, 8, 4), (128, 4, 4), (128, 8, 2)])
@pytest.mark.parametrize("tokens", [4, 16, 64])
def test_the_busiest_rank_has_what_drawn_tokens_give_it(experts: int, top_k: int, ep: int, tokens: int) -> None:
    """Experts with tokens, and rows, of the rank that has most of them: the mean of four hundred steps drawn."""
    random, local = Random(f"{experts} {top_k} {ep} {tokens}"), experts // ep
    hits = rows = 0
    for _ in range(400):
        drawn = [one for _ in range(tokens) for one in random.sample(range(experts), top_k)]
        hits += max(Counter(one // local for one in set(drawn)).values())
        rows += max(Counter(one // local for one in drawn).values())
    more_hits, more_rows = busiest_rank(ep, experts, top_k, tokens)
    assert min(distinct_experts(local, experts, top_k, tokens) + more_hits, local) == pytest.approx(
        hits / 400, rel=0.04
    )
    assert tokens * top_k / ep + more_rows == pytest.approx(rows / 400, rel=0.04)


@pytest.mark.parametrize(
    ("experts", "top_k", "ep", "popularity"), [(128, 8, 8, 100.0), (128, 4, 4, 100.0), (64, 8, 2, 14.0)]
)
@pytest.mark.parametrize("tokens", [16, 256])
def test_popular_experts_lie_on_the_busiest_rank(
    experts: int, top_k: int, ep: int, popularity: float, tokens: int
) -> None:
    """Where experts are popular by chance and lie anywhere: the mean of two hundred steps, each of another layer."""
    random, local = Random(f"{experts} {top_k} {ep} {tokens}"), experts // ep
    hits = rows = 0
    for _ in range(200):
        weights = [popularity ** ((one + 0.5) / experts) for one in range(experts)]
        random.shuffle(weights)
        drawn = []
        for _ in range(tokens):
            # Of keys u^(1/w) the largest are a sample without replacement by weights w (Efraimidis and Spirakis 2006).
            keys = [(random.random() ** (1 / weight), one) for one, weight in enumerate(weights)]
            drawn += [one for _, one in sorted(keys)[-top_k:]]
        hits += max(Counter(one // local for one in set(drawn)).values())
        rows += max(Counter(one // local for one in drawn).values())
    more_hits, more_rows = busiest_rank(ep, experts, top_k, tokens, popularity)
    assert tokens * top_k / ep + more_rows == pytest.approx(rows / 200, rel=0.06)
    hit = distinct_experts(local, experts, top_k, tokens, popularity) + more_hits
    assert min(hit, local) == pytest.approx(hits / 200, rel=0.06)
    even = busiest_rank(ep, experts, top_k, tokens, 1.0001)
    assert even == pytest.approx(busiest_rank(ep, experts, top_k, tokens), rel=1e-3, abs=1e-3)


def test_a_served_step_waits_for_the_busiest_rank_and_a_training_step_for_the_mean() -> None:
    """One rank has all experts; of eight, eight tokens meet half as many again on one, many all of each."""
    moe = load_model("deepseek-v3").layers[-1].feed_forward
    assert isinstance(moe, MoE)

    def hit(phase: Literal["train", "decode"], tokens: int, ep: int) -> float:
        y = whole_layout(1, tokens)
        changed = replace(y, work=replace(y.work, phase=phase), degrees=replace(y.degrees, ep=ep))
        return float(experts_of(changed, moe, 7168).hit)

    assert hit("decode", 16, 1) == hit("train", 16, 1)
    assert 1.4 < hit("decode", 1, 8) / hit("train", 1, 8) < 1.6
    assert hit("decode", 4096, 8) == pytest.approx(256 / 8)
