"""FLOPs and bytes of every mixer, of exchanges of experts and of the loss, by closed forms derived by hand.

Letters: T tokens, a = 2 bytes of an activation, w = 2 of a weight, D hidden. A product of (T, k) with (k, n) takes
2 T k n FLOPs each way and moves a (T k + T n) + w k n bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ops.helpers import layout
from shardwise import models
from shardwise.ledger.op import Op
from shardwise.models import (
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
    Model,
    MoE,
    RecurrentGate,
    Rwkv,
    ShortConv,
)
from shardwise.ops.block import _MIXERS, block_ops
from shardwise.ops.head import loss

B, S, D = 2, 64, 96
T, A = B * S, 2


def ops_of(mixer: Mixer, work: dict[str, Any] | None = None, **more: Any) -> dict[str, Op[Any]]:
    """The operators of one mixer by name, on one device unless said."""
    block = Block(mixers=(mixer,), feed_forward=None, norms=1)
    return {op.name: op for op in block_ops(layout(work, **more), block, D)}


def product(k: int, n: int, rows: int = T) -> tuple[int, int]:
    """The FLOPs and bytes of a product's forward pass."""
    return 2 * rows * k * n, A * (rows * k + rows * n) + A * k * n


def forward(op: Op[Any]) -> tuple[float, float]:
    """The FLOPs and bytes of an operator's forward pass."""
    return op.flops, op.forward_bytes


DECODE = {"phase": "decode", "S": 1, "context": 100}


def test_mamba_is_its_products_its_convolution_and_its_scan() -> None:
    """Seven FLOPs a state element and token; the scan reads stream, gate, dt, B and C, backward three times as much."""
    inner, n, R, kc = 192, 16, 6, 4
    ops = ops_of(Mamba1(inner=inner, state=n, conv=kc, dt_rank=R))
    assert forward(ops["in"]) == product(D, 2 * inner)
    assert forward(ops["select"]) == product(inner, R + 2 * n)
    assert forward(ops["time_step"]) == product(R, inner)
    assert forward(ops["out"]) == product(inner, D)
    assert forward(ops["conv"]) == (2 * kc * T * inner, 2 * A * T * inner)
    assert ops["conv"].backward_bytes == 3 * A * T * inner
    moved = A * T * (4 * inner + 2 * n)
    assert forward(ops["scan"]) == (7 * T * inner * n, moved)
    assert (ops["scan"].backward_flops, ops["scan"].backward_bytes) == (21 * T * inner * n, 3 * moved)
    assert ops["scan"].model_flops == 7 * T * inner * n and ops["conv"].model_flops == 0


def test_serving_reads_and_writes_the_state_of_a_sequence() -> None:
    """A step of serving moves the fp32 state and the kc - 1 inputs of the convolution twice, whatever was seen."""
    inner, n, kc = 192, 16, 4
    ops = ops_of(Mamba1(inner=inner, state=n, conv=kc, dt_rank=6), DECODE)
    assert ops["scan"].forward_bytes == A * B * (4 * inner + 2 * n) + 2 * 4 * B * inner * n
    assert ops["conv"].forward_bytes == 2 * A * B * inner + 2 * A * B * inner * (kc - 1)


def test_mamba2_works_in_chunks_when_it_trains_and_token_by_token_when_it_decodes() -> None:
    """2 Q (G n + I) + 4 n I FLOPs a token in chunks of Q; passes over streams, states and products of chunks."""
    heads, width, G, n, Q, kc = 6, 32, 2, 16, 32, 4
    inner = heads * width
    mixer = Mamba2(heads=heads, head_dim=width, groups=G, state=n, conv=kc, chunk=Q)
    ops = ops_of(mixer)
    assert forward(ops["in"]) == product(D, 2 * inner + 2 * G * n + heads)
    assert forward(ops["out"]) == product(inner, D)
    channels = inner + 2 * G * n
    assert forward(ops["conv"]) == (2 * kc * T * channels, 2 * A * T * channels)
    scan = ops["scan"]
    assert scan.flops == 2 * T * (Q * (G * n + inner) + 2 * n * inner)
    assert scan.model_flops == 7 * T * inner * n
    stream, states, products, edges = A * inner, 4 * inner * n / Q, 4 * G * Q, 2 * A * G * n
    assert scan.forward_bytes == T * (3 * stream + 4 * states + 2 * products + 2 * edges)
    back = 11 * stream + 10 * states + 4 * products + 6 * edges + 2 * (stream + edges)
    assert scan.backward_bytes == T * back
    one = ops_of(mixer, DECODE)["scan"]
    assert one.flops == 7 * B * inner * n
    assert one.forward_bytes == A * B * (3 * inner + 2 * G * n) + 2 * 4 * B * inner * n


def test_short_sequences_are_one_chunk() -> None:
    """A sequence shorter than a chunk is one chunk of its own length."""
    mixer = Mamba2(heads=6, head_dim=32, groups=2, state=16, conv=4, chunk=256)
    assert ops_of(mixer)["scan"].flops == 2 * T * (S * (2 * 16 + 192) + 2 * 16 * 192)


def test_the_gated_delta_rule_takes_eight_flops_a_state_element() -> None:
    """Projections to q, k, v, gate, decay and step; chunks of 64 move 11 dk + 6 dv + 384 + 2 dk dv / 64."""
    K, V, dk, dv, kc = 2, 4, 24, 32, 4
    ops = ops_of(GatedDelta(key_heads=K, value_heads=V, key_dim=dk, value_dim=dv, conv=kc))
    assert forward(ops["in"]) == product(D, 2 * K * dk + 2 * V * dv + 2 * V)
    assert forward(ops["out"]) == product(V * dv, D)
    channels = 2 * K * dk + V * dv
    assert forward(ops["conv"]) == (2 * kc * T * channels, 2 * A * T * channels)
    moved = A * T * V * (11 * dk + 6 * dv + 6 * 64 + 2 * dk * dv / 64)
    assert forward(ops["scan"]) == (8 * T * V * dk * dv, moved)
    assert ops["scan"].backward_bytes == 2.5 * moved
    served = ops_of(GatedDelta(key_heads=K, value_heads=V, key_dim=dk, value_dim=dv, conv=kc), DECODE)["scan"]
    assert served.forward_bytes == A * B * V * (2 * dk + 2 * dv) + 2 * 4 * B * V * dk * dv


def test_kimi_delta_attention_has_low_rank_gates() -> None:
    """Decay and output gate go through a rank of one value head."""
    V, dk, dv = 4, 24, 32
    ops = ops_of(GatedDelta(key_heads=V, value_heads=V, key_dim=dk, value_dim=dv, conv=4, style="kda"))
    assert forward(ops["in"]) == product(D, 2 * V * dk + V * dv + V)
    assert forward(ops["decay_down"]) == forward(ops["gate_down"]) == product(D, dv)
    assert forward(ops["decay_up"]) == product(dv, V * dk) and forward(ops["gate_up"]) == product(dv, V * dv)


def test_full_rank_delta_gates_come_with_the_other_inputs() -> None:
    """Ling 3.0 projects decay and output gate at once: a decay a channel, a gate a value."""
    V, dk, dv = 4, 24, 32
    ops = ops_of(GatedDelta(key_heads=V, value_heads=V, key_dim=dk, value_dim=dv, conv=4, style="kda-full-rank"))
    assert forward(ops["in"]) == product(D, 3 * V * dk + 2 * V * dv + V)
    assert "decay_down" not in ops


def test_lightning_attention_reads_and_updates_a_state_and_squares_of_its_blocks() -> None:
    """Four H a head, channel and token, 4 H for each token of a block; one token alone has no block."""
    N, H, Q = 4, 24, 16
    ops = ops_of(LightningAttention(heads=N, head_dim=H, block=Q))
    assert forward(ops["in"]) == product(D, 4 * N * H) and forward(ops["out"]) == product(N * H, D)
    assert forward(ops["scan"]) == (4 * T * N * H * (H + Q), 4 * A * T * N * H)
    assert ops["scan"].model_flops == 4 * T * N * H * H
    assert (ops["activation"].forward_bytes, ops["activation"].backward_bytes) == (6 * A * T * N * H, 9 * A * T * N * H)
    gate = ops["output_gate"]
    assert (gate.forward_bytes, gate.backward_bytes) == (3 * A * T * N * H, 5 * A * T * N * H)
    served = ops_of(LightningAttention(heads=N, head_dim=H, block=Q), DECODE)["scan"]
    assert forward(served) == (4 * B * N * H * H, 4 * A * B * N * H + 2 * 4 * B * N * H * H)


def test_a_short_sequence_is_one_block_of_lightning_attention() -> None:
    """A sequence shorter than a block is one block of its own length."""
    assert ops_of(LightningAttention(heads=4, head_dim=24))["scan"].flops == 4 * T * 4 * 24 * (24 + S)


def test_latent_attention_may_gate_its_heads() -> None:
    """Ling 3.0: one gate a head, from the layer's input; Hy4: one for each element."""
    sizes = {"q_lora_rank": 0, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    ops = ops_of(LatentAttention(heads=4, head_gate=True, **sizes))
    assert forward(ops["head_gate"]) == product(D, 4)
    plain = ops_of(LatentAttention(heads=4, **sizes))
    assert set(ops) - set(plain) == {"head_gate", "output_gate"}
    every = ops_of(LatentAttention(heads=4, output_gate=True, **sizes))
    assert forward(every["gate"]) == product(D, 4 * sizes["v_head_dim"])
    assert set(every) - set(plain) == {"gate", "output_gate"}


def test_a_window_to_both_sides_counts_a_token_itself_once() -> None:
    """A token of a bidirectional window W sees W - 1 tokens before it and W - 1 after it, as far as there are any."""
    W, H = 5, 8
    core = ops_of(Attention(heads=1, kv_heads=1, head_dim=H, causal=False, window=W), {"coverage": "masked"})
    pairs = sum(min(i, W - 1) + 1 + min(S - 1 - i, W - 1) for i in range(S))
    assert core["attention"].flops == 4 * H * B * pairs


def test_the_short_convolution_has_two_gates() -> None:
    """Three streams in; each gate multiplies two streams: six passes forward, eight backward."""
    width, kc = 96, 3
    ops = ops_of(ShortConv(width=width, conv=kc))
    assert forward(ops["in"]) == product(D, 3 * width) and forward(ops["out"]) == product(width, D)
    assert forward(ops["conv"]) == (2 * kc * T * width, 2 * A * T * width)
    assert (ops["gates"].forward_bytes, ops["gates"].backward_bytes) == (6 * A * T * width, 8 * A * T * width)


def test_the_recurrent_gate_has_block_diagonal_gates() -> None:
    """Two gates of heads blocks of width / heads, and ten FLOPs a channel of the recurrence."""
    width, heads, kc = 96, 4, 4
    ops = ops_of(RecurrentGate(width=width, heads=heads, conv=kc))
    assert forward(ops["in"]) == product(D, 2 * width) and forward(ops["out"]) == product(width, D)
    gates = 2 * 2 * T * width * (width // heads)
    assert forward(ops["scan"]) == (gates + 10 * T * width, 4 * A * T * width)
    assert ops["scan"].model_flops == gates
    assert (ops["output_gate"].forward_bytes, ops["output_gate"].backward_bytes) == (
        3 * A * T * width,
        5 * A * T * width,
    )


def test_rwkv_mixes_three_times_over_time() -> None:
    """Three mixes read the stream and its shift and write: six passes; twelve FLOPs a channel of the weighted sum."""
    width = 96
    ops = ops_of(Rwkv(width=width))
    assert (ops["mixes"].forward_bytes, ops["mixes"].backward_bytes) == (6 * A * T * D, 9 * A * T * D)
    assert forward(ops["in"]) == product(D, 3 * width) and forward(ops["out"]) == product(width, D)
    assert forward(ops["scan"]) == (12 * T * width, 4 * A * T * width)


def test_the_matrix_lstm_updates_a_matrix_a_head() -> None:
    """Queries, keys, values and gate in one product, two gates a head in another, four dk dv FLOPs a head and token."""
    heads, dk, dv = 4, 12, 24
    ops = ops_of(Mlstm(heads=heads, qk_dim=dk, v_dim=dv))
    assert forward(ops["in"]) == product(D, heads * (2 * dk + 2 * dv))
    assert forward(ops["gates"]) == product(D, 2 * heads)
    assert forward(ops["scan"]) == (4 * T * heads * dk * dv, A * T * heads * (2 * dk + 2 * dv))
    served = ops_of(Mlstm(heads=heads, qk_dim=dk, v_dim=dv), DECODE)["scan"]
    assert served.forward_bytes == A * B * heads * (2 * dk + 2 * dv) + 2 * 4 * B * heads * dk * (dv + 1)


LATENT = LatentAttention(
    heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=6,
    v_head_dim=10,
    indexer=Indexer(heads=3, head_dim=12, top_k=20),
)


def test_latent_attention_absorbs_its_up_projection_in_decode() -> None:
    """A pair costs 2 (2 kv + r) FLOPs a head, the ends of a token 2 kv (n + vd); the latent is read once for all."""
    N, kv, r, n, vd, seen = 4, 16, 6, 8, 10, 20
    ops = ops_of(LATENT, DECODE)
    assert forward(ops["absorb"]) == (2 * B * N * kv * (n + vd), 2 * N * kv * (n + vd) + 2 * A * B * N * (kv + vd))
    cache, edges = 2 * B * seen * (kv + r), A * B * N * (2 * kv + r)
    assert forward(ops["attention"]) == (2 * N * (2 * kv + r) * B * seen, cache + edges)
    assert "kv_up" not in ops


@pytest.mark.parametrize("rank", [24, 0])
def test_the_indexer_scores_every_past_token(rank: int) -> None:
    """Its queries come from the latent query where there is one; scores are 2 d FLOPs a head and pair."""
    h, d = 3, 12
    ops = ops_of(replace(LATENT, q_lora_rank=rank))
    assert forward(ops["indexer.q"]) == product(rank or D, h * d)
    assert forward(ops["indexer.k"]) == product(D, d) and forward(ops["indexer.weights"]) == product(D, h)
    pairs = S * (S + 1) // 2
    scores = 2 * h * d * B * pairs
    moved = A * T * h * d + 2 * B * S * d
    assert forward(ops["indexer.scores"]) == (scores, moved)
    assert (ops["indexer.scores"].backward_flops, ops["indexer.scores"].backward_bytes) == (2 * scores, 2 * moved)


@pytest.mark.parametrize("shards", [1, 2])
def test_an_indexer_of_key_value_heads_norms_and_scores_for_each(shards: int) -> None:
    """No weights of its heads; they are split as those of keys and values are, and each scores every past token."""
    h, d, picks = 2, 12, 20
    indexer = Indexer(heads=h, head_dim=d, top_k=picks, style="groups")
    mixer = Attention(heads=4, kv_heads=h, head_dim=8, indexer=indexer)
    ops = ops_of(mixer, tp=shards)
    assert forward(ops["indexer.q"]) == product(D, h * d // shards) and forward(ops["indexer.k"]) == product(D, d)
    assert "indexer.weights" not in ops
    assert sum(w.whole for name in ("q", "k", "q_norm", "k_norm") for w in ops[f"indexer.{name}"].weights) == (
        D * h * d + D * d + 2 * d
    )
    pairs = S * (S + 1) // 2
    assert ops["indexer.scores"].flops == 2 * h * d * B * pairs // shards
    # Attention itself sees no more than what is picked.
    seen = picks * (picks + 1) // 2 + (S - picks) * picks
    assert ops["attention"].flops == 2 * 4 * 2 * 8 * B * seen // shards


def test_pools_are_scored_in_place_of_tokens() -> None:
    """A gate and learned positions make one key of four tokens, so that there is a quarter of the scores."""
    h, d, pool = 3, 12, 4
    plain, pooled = ops_of(LATENT), ops_of(replace(LATENT, indexer=Indexer(heads=h, head_dim=d, top_k=20, pool=pool)))
    assert forward(pooled["indexer.gate"]) == product(D, d)
    assert [w.whole for w in pooled["indexer.positions"].weights] == [pool * d]
    assert pooled["indexer.scores"].flops == plain["indexer.scores"].flops / pool
    mean = Indexer(heads=h, head_dim=d, top_k=20, pool=pool, style="mean")
    ops = ops_of(Attention(heads=4, kv_heads=2, head_dim=8, indexer=mean), tp=2)
    # A mean has no weights, and one selection is for all heads: every rank scores with all of them.
    assert {"indexer.gate", "indexer.positions", "indexer.weights"}.isdisjoint(ops)
    assert ops["indexer.scores"].flops == pooled["indexer.scores"].flops


def test_compressed_attention_sees_its_window_and_the_entries_that_its_indexer_picks() -> None:
    """A query sees W tokens and at most `top_k` of the entries that stand for `rate` tokens each; keys are values."""
    N, H, ql, groups, rank, W, rate, picks = 4, 12, 24, 2, 10, 16, 4, 5
    sizes = {"heads": N, "head_dim": H, "q_lora_rank": ql, "out_groups": groups, "out_lora_rank": rank, "window": W}
    h, d = 3, 8
    mixer = CompressedAttention(rate=rate, indexer=Indexer(heads=h, head_dim=d, top_k=picks), **sizes)
    ops = ops_of(mixer, {"coverage": "masked"})
    assert forward(ops["q_down"]) == product(D, ql) and forward(ops["q_up"]) == product(ql, N * H)
    assert forward(ops["kv"]) == product(D, H) and forward(ops["out"]) == product(groups * rank, D)
    assert forward(ops["compressor.kv"]) == forward(ops["compressor.gate"]) == product(D, 2 * H)
    assert forward(ops["indexer.kv"]) == forward(ops["indexer.gate"]) == product(D, 2 * d)
    assert forward(ops["indexer.q"]) == product(ql, h * d) and forward(ops["indexer.weights"]) == product(D, h)
    moved = A * (T * (N * H + groups * rank) + N * H * rank)
    assert forward(ops["out_groups"]) == (2 * T * N * H * rank, moved)
    scores, entries = 2 * h * d * B * S * S // (2 * rate), S // rate
    assert forward(ops["indexer.scores"]) == (scores, A * (T * h * d + B * entries * d))
    seen = sum(min(i + 1, W) for i in range(S))
    picked = (picks * rate) ** 2 // (2 * rate) + (S - picks * rate) * picks
    flops, moved = 4 * N * H * B * (seen + picked), A * (T * (2 * N * H + 2 * H) + B * entries * H)
    assert forward(ops["attention"]) == (flops, moved)
    assert (ops["attention"].backward_flops, ops["attention"].backward_bytes) == (2.5 * flops, 2 * moved)
    served = ops_of(mixer, DECODE)
    moved = A * B * (2 * N * H + 2 * W * H + picks * H)
    assert forward(served["attention"]) == (4 * N * H * B * (W + picks), moved)
    assert "indexer.scores" not in ops_of(CompressedAttention(**sizes))


@pytest.mark.parametrize(("etp", "imbalance"), [(1, 1.0), (2, 1.0), (4, 1.5)])
def test_experts_exchange_their_rows_and_gather_them_over_etp(etp: int, imbalance: float) -> None:
    """T k rows of D travel over ep; each of etp ranks gathers the rows of all, and returns its share of the sums."""
    k, tp = 2, 4
    block = Block(mixers=(), feed_forward=MoE(experts=8, top_k=k, ffn=32), norms=1)
    y = layout({"imbalance": imbalance}, tp=tp, ep=2, etp=etp, sequence_parallel=True)
    ops = {op.name: op for op in block_ops(y, block, D)}
    size = A * T / tp * k * D * imbalance
    sent = [(c.axis, c.verb, c.size_bytes, c.shape) for c in ops["mlp.dispatch"].forward]
    rows = T / tp * k * imbalance
    assert sent == [
        ("ep", "all_to_all", size, (rows, D)),
        ("etp", "all_gather", size * etp, (rows * etp, D)),
    ]
    back = [(c.axis, c.verb, c.size_bytes) for c in ops["mlp.combine"].forward]
    assert back == [("etp", "reduce_scatter", size * etp), ("ep", "all_to_all", size)]
    assert ops["mlp.dispatch"].forward_bytes == ops["mlp.combine"].backward_bytes == 4 * size


@pytest.mark.parametrize(
    ("factor", "pads", "imbalance", "taken"),
    [(1.25, False, 1.0, 256), (1.25, False, 1.5, 320), (1.25, True, 1.0, 320), (0.3, False, 1.0, 80)],
)
def test_experts_take_rows_up_to_their_capacity(factor: float, pads: bool, imbalance: float, taken: int) -> None:
    """Of 256 rows 8 experts take ceil(32 f) each: further ones are dropped, missing ones padded with zeros."""
    block = Block(mixers=(), feed_forward=MoE(experts=8, top_k=2, ffn=32), norms=1)
    work = {"capacity_factor": factor, "pad_to_capacity": pads, "imbalance": imbalance}
    ops = {op.name: op for op in block_ops(layout(work, ep=2), block, D)}
    assert [c.size_bytes for c in ops["mlp.dispatch"].forward if c.axis == "ep"] == [A * taken * D]
    assert ops["mlp.experts.up"].flops == 2 * taken * D * 2 * 32
    assert next(t.size_bytes for t in ops["mlp.experts.up"].saves if t.name == "mlp.permuted") == A * taken * D


@pytest.mark.parametrize(
    ("stack", "ahead", "back"),
    [("megatron", 38, 14), ("transformers", 18, 22), ("megatron-2023", 38, 14), ("fsdp2-compiled-loss", 8, 8)],
)
def test_the_loss_reads_and_writes_its_logits(stack: str, ahead: int, back: int) -> None:
    """Bytes a logit of each step of the cross entropy, added by hand over its kernels (docs/formulas.md, head)."""
    core = Attention(heads=2, kv_heads=2, head_dim=48)
    model = Model(name="m", family="llama", hidden=D, vocab=1000, layers=(Block(mixers=(core,), feed_forward=None),))
    y = layout(stack=stack)
    (op,) = loss(y, model)
    scores = op.saves[0].size_bytes / (A if y.stack.loss == "compiled" else 4)
    assert scores >= T * 1000
    assert op.backward_bytes == back * scores
    assert op.forward_bytes == (ahead + y.stack.metric_logit_bytes) * scores


@pytest.mark.parametrize(
    ("stack", "tp", "bytes_a_logit"),
    [
        ("fsdp2", 1, 12),
        ("fsdp2", 8, 16),
        ("fsdp2-compiled-loss", 1, 4),
        ("fsdp2-compiled-loss", 8, 10),
        ("transformers", 8, 12),
    ],
)
def test_a_loss_of_shared_logits_holds_one_fp32_copy_more(stack: str, tp: int, bytes_a_logit: int) -> None:
    """At its fullest the loss holds 12 bytes a logit, and 16 where ranks share the vocabulary; compiled 4, and 10.

    Run with torch 2.13.0 and, compiled, 2.14.1 on a fake process group of eight, every storage counted:
    F.cross_entropy(logits.float()) and torchtitan's _LossParallelCrossEntropy (b5bcd76).
    """
    core = Attention(heads=8, kv_heads=8, head_dim=12)
    model = Model(name="m", family="llama", hidden=D, vocab=8192, layers=(Block(mixers=(core,), feed_forward=None),))
    (op,) = loss(layout(stack=stack, tp=tp), model)
    logits = 2 * 64 * 8192 / (1 if stack == "transformers" else tp)
    assert op.saves[0].size_bytes + op.transient_bytes == bytes_a_logit * logits


def test_every_mixer_has_its_operators() -> None:
    """Each class of mixer that a block can have is a row of `_MIXERS`."""
    named = (one for one in vars(models).values() if isinstance(one, type) and issubclass(one, Mixer))
    assert set(_MIXERS) == set(named) - {Mixer}
