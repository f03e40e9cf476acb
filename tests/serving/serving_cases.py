"""Random small models and jobs for the laws of serving, and short ways to ask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from shardwise.hardware import Cluster
from shardwise.models import MLP, Attention, Block, LatentAttention, Model, MoE, load_model
from shardwise.plans import Plan, Serving
from shardwise.serving import InferReport, ServingOptions, evaluate, find_engine, infer
from shardwise.serving._burst import at_clock, burst_of, gained
from shardwise.serving._cost_model import engine_cost_model
from shardwise.serving._sizes import sizes_of

DEVICES = ("a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb", "l40s")


def model_of(*blocks: Block, vocab: int = 32000, hidden: int = 2048, layers: int = 8, tied: bool = False) -> Model:
    """Return a model whose layers repeat the blocks in turn."""
    order = tuple(blocks[i % len(blocks)] for i in range(layers))
    return Model(name="random", family="random", hidden=hidden, vocab=vocab, layers=order, tied=tied)


def dense_block(heads: int = 16, kv_heads: int = 4, head_dim: int = 128, ffn: int = 4096, window: int = 0) -> Block:
    """Return a gated block with grouped heads."""
    attention = Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window)
    return Block(mixers=(attention,), feed_forward=MLP(ffn=ffn))


def moe_block(experts: int = 16, top_k: int = 2, ffn: int = 1024) -> Block:
    """Return a block with routed experts."""
    return replace(dense_block(), feed_forward=MoE(experts=experts, top_k=top_k, ffn=ffn))


def latent_block() -> Block:
    """Return a block with latent attention."""
    m = LatentAttention(
        heads=16, q_lora_rank=256, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
    )
    return Block(mixers=(m,), feed_forward=MLP(ffn=4096))


@st.composite
def models(draw: st.DrawFn, kinds: tuple[str, ...] = ("dense", "window", "moe", "latent")) -> Model:
    """Draw a model of one or two kinds of block."""
    makers = {
        "dense": lambda: dense_block(
            kv_heads=draw(st.sampled_from((1, 2, 4, 8, 16))), ffn=draw(st.sampled_from((2048, 8192)))
        ),
        "window": lambda: dense_block(window=draw(st.sampled_from((16, 128, 1000)))),
        "moe": lambda: moe_block(draw(st.sampled_from((8, 64))), draw(st.sampled_from((1, 2, 8)))),
        "latent": latent_block,
    }
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=2))
    layers = draw(st.sampled_from((4, 8, 16)))
    return model_of(*(makers[kind]() for kind in chosen), layers=layers, tied=draw(st.booleans()))


@st.composite
def jobs(draw: st.DrawFn, **fixed: Any) -> Serving:
    """Draw a static batch."""
    values = {
        "batch": draw(st.integers(1, 256)),
        "input_tokens": draw(st.integers(1, 4096)),
        "output_tokens": draw(st.integers(1, 512)),
        "weights": draw(st.sampled_from(("", "int8", "int4", "fp8", "nvfp4"))),
        "kv_cache": draw(st.sampled_from(("", "fp8"))),
        "max_batched_tokens": draw(st.sampled_from((0, 512, 8192))),
    }
    return Serving(**{**values, **fixed})


def loaded(job: Serving, engine: str, device: str) -> Serving:
    """Return a job without the formats that an engine does not run on a device."""
    refused = find_engine(engine).refused_formats(job.weights, job.kv_cache, Cluster.parse(device).device)
    return replace(job, **{one.field: "" for one in refused.items})


def ask(
    model: Model | str, job: Serving, plan: Plan | None = None, device: str = "h100-sxm-80gb", **more: Any
) -> InferReport:
    """Return the report of a plan on just as many devices as it uses."""
    plan = plan or Plan()
    found = load_model(model) if isinstance(model, str) else model
    return infer(found, Cluster.parse(f"{plan.num_devices}x{device}"), plan, job, ServingOptions(**more))


def after_pause(alone: InferReport) -> float:
    """Return seconds to the first tokens of a batch that meets idle devices."""
    case, burst = alone.case, burst_of(alone.case)
    if burst is None:
        return alone.ttft_seconds
    sizes = sizes_of(case.model, case.plan, case.job, case.domains)
    costs = at_clock(engine_cost_model(case, sizes), 1 + burst.share)
    busy = alone.ttft_seconds / case.plan.pp
    left = gained(burst, busy) / busy
    return alone.ttft_seconds - left * (alone.ttft_seconds - float(evaluate(case, sizes, costs).prefill.seconds))
