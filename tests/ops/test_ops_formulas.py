"""Closed forms of the literature for what whole layers keep, against ledgers of random sizes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.helpers import layout
from shardwise.ledger.saved import Checkpoint, keep, tensor_bytes
from shardwise.models import MLP, Attention, Block, LatentAttention, Projection
from shardwise.ops.block import block_ops
from shardwise.ops.layout import Layout

small = st.integers(1, 6)


def kept(y: Layout[Any], block: Block, D: int, *units: Checkpoint) -> float:
    """Bytes that a block keeps, with units that run again."""
    return tensor_bytes(keep(block_ops(y, block, D), units).kept)


def gpt(D: int, heads: int) -> Block:
    """The layer of arXiv:2205.05198: LayerNorm, as many key-value as query heads, a GELU of four times the width."""
    core = Attention(heads=heads, kv_heads=heads, head_dim=D // heads, qkv_bias=True, out_bias=True)
    ffn = MLP(ffn=4 * D, gated=False, bias=True, activation="gelu")
    return Block(mixers=(core,), feed_forward=ffn, norm="layernorm")


@given(small, small, st.sampled_from((1, 2, 4, 8)))
def test_tensor_parallel_layers_keep_what_the_table_says(B: int, k: int, t: int) -> None:
    """S B D (10 + 24 / t + 5 N S / D t) with tensor parallelism, all of it / t with sequence parallelism (table 2)."""
    S, D, N = 64 * k, 512, 8
    block, work = gpt(D, N), {"B": B, "S": S, "dropout": True}
    statistics = 16 * S * B
    plain = kept(layout(work, "megatron-scores", tp=t), block, D)
    split = kept(layout(work, "megatron-scores", tp=t, sequence_parallel=True), block, D)
    assert plain == S * B * D * (10 + 24 / t) + 5 * N * S * S * B / t + statistics
    assert split == (34 * S * B * D + 5 * N * S * S * B + statistics) / t


@given(small, small, st.sampled_from((1, 2, 4, 8)))
def test_recompute_keeps_what_the_table_says(B: int, k: int, t: int) -> None:
    """Selective recompute drops 5 N S / D, full recompute keeps the layer's input alone (table 2)."""
    S, D, N = 64 * k, 512, 8
    block, work = gpt(D, N), {"B": B, "S": S, "dropout": True}
    y = layout(work, "megatron-scores", tp=t, sequence_parallel=True)
    core, layer = Checkpoint(("attention.core",)), Checkpoint(("",))
    assert kept(y, block, D, core) == (34 * S * B * D + 16 * S * B) / t
    assert kept(y, block, D, layer) == 2 * S * B * D / t


@given(small, st.sampled_from((1, 2, 4)), st.sampled_from((64, 128)), small)
def test_a_fused_layer_keeps_its_form(k: int, groups: int, H: int, f: int) -> None:
    """T (8 D + 4 N H + 4 K H + 6 F + 4 N + 8): fused norms, flash attention, fused SwiGLU."""
    D, N, F, T = 256 * k, 8, 128 * f, 2 * 64
    K = N // groups
    core = Attention(heads=N, kv_heads=K, head_dim=H)
    found = kept(layout(), Block(mixers=(core,), feed_forward=MLP(ffn=F)), D)
    assert found == T * (8 * D + 4 * N * H + 4 * K * H + 6 * F + 4 * N + 8)


@given(small, st.sampled_from((0, 64, 192)), small)
def test_a_fused_latent_layer_keeps_its_form(k: int, ql: int, f: int) -> None:
    """T (8 D + 8 + latents and norms + queries, keys, expanded values, output + 4 N + 6 F)."""
    D, N, kv, n, r, vd, F, T = 256 * k, 8, 96, 48, 16, 64, 128 * f, 2 * 64
    core = LatentAttention(
        heads=N, q_lora_rank=ql, kv_lora_rank=kv, qk_nope_head_dim=n, qk_rope_head_dim=r, v_head_dim=vd
    )
    found = kept(layout(), Block(mixers=(core,), feed_forward=MLP(ffn=F)), D)
    latents = 4 * kv + 4 + (4 * ql + 4 if ql else 0)
    heads = 4 * N * (n + r) + 2 * N * (n + vd) + 2 * N * vd + 4 * N
    assert found == T * (8 * D + 8 + latents + heads + 6 * F)


@pytest.mark.parametrize(("stack", "attention"), [("transformers", "sdpa"), ("transformers-eager", "eager")])
@given(k=small, f=small, width=st.sampled_from((2, 4)))
def test_a_transformers_layer_keeps_its_form(stack: str, attention: str, k: int, f: int, width: int) -> None:
    """T (norms + inputs + q, k, v, out + 4 w F), with the score matrix where attention is not fused."""
    D, N, K, H, F, S = 256 * k, 8, 2, 64, 128 * f, 64
    core = Attention(heads=N, kv_heads=K, head_dim=H)
    y = layout({"activation_bytes": width}, stack)
    found = kept(y, Block(mixers=(core,), feed_forward=MLP(ffn=F)), D)
    norm = (6 if width == 2 else 8) * D + 4
    layer = 2 * norm + 2 * width * D + 4 * width * F
    if attention == "sdpa":
        layer += 2 * width * (N + K) * H + 4 * N
    else:
        layer += 4 * width * N * H + (6 if width == 2 else 4) * N * S
    assert found == 2 * S * layer


@given(small, st.integers(2, 8))
def test_streams_of_hyper_connections_move_around_each_branch(k: int, n: int) -> None:
    """Per value of one stream 3 n - 1 are read or written more forward and 10 n backward, and the branch's is kept."""
    D, y = 256 * k, layout()

    def block(streams: int) -> Block:
        mixes = Projection(name="hyper_connection", inputs=n * D, outputs=24, linear=False, streams=streams)
        return Block(mixers=(), feed_forward=MLP(ffn=4 * D), extras=(mixes,))

    one, several = block_ops(y, block(1), D), block_ops(y, block(n), D)
    stream = 2 * D * 2 * 64
    for way, times in (("forward_bytes", 3 * n - 1), ("backward_bytes", 10 * n)):
        assert sum(getattr(op, way) for op in several) - sum(getattr(op, way) for op in one) == times * stream
    assert kept(y, block(n), D) - kept(y, block(1), D) == stream
