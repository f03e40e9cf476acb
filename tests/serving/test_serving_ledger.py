"""The messages and operators an engine runs, against what it is known to issue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serving.serving_cases import ask, dense_block, latent_block, model_of, moe_block
from shardwise.hardware import Cluster
from shardwise.ledger.op import Op
from shardwise.models import MLP, Block, Model, MoE
from shardwise.plans import Plan, Serving
from shardwise.serving._case import ServingQuestion, complete
from shardwise.serving._ledger import EngineStep, head_ops, layer_ops, step_ledger, views_of
from shardwise.serving._sizes import sizes_of

SHARED = replace(moe_block(), feed_forward=MoE(experts=16, top_k=2, ffn=1024, shared=MLP(ffn=1024)))


def served(model: Model, plan: Plan, phase: str = "decode", batch: int = 8) -> tuple[tuple[Op[float], ...], Op[float]]:
    """Return the operators of the first layer and the head of a step of 8 requests after 100 tokens."""
    job = Serving(batch=batch, input_tokens=100, output_tokens=2)
    cluster = Cluster.parse(f"{plan.num_devices}xh100-sxm-80gb")
    case = complete(ServingQuestion(model=model, cluster=cluster, plan=plan, job=job))[0]
    tokens = 1 if phase == "decode" else 100
    step = EngineStep(phase=phase, sequences=batch, tokens=tokens, context=100 if phase == "decode" else 0)
    views = views_of(case, sizes_of(model, case.plan, job, case.domains), step)
    head = next(op for op in head_ops(views, model, case.engine.operators) if op.name == "head")
    return layer_ops(views, model.layers[0], model.hidden), head


def sent(ops: tuple[Op[float], ...]) -> list[tuple[str, str, float]]:
    """Return (axis, verb, bytes) of every message that carries something."""
    return [(c.axis, c.verb, c.size_bytes) for op in ops for c in op.forward if c.size_bytes and c.axis in ("tp", "ep")]


BLOCKS = {"dense": dense_block(), "latent": latent_block(), "moe": moe_block(), "shared": SHARED}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_layer_all_reduces_twice(block: Block) -> None:
    """Inside a tensor-parallel group every layer issues two all-reduces of tokens x hidden, experts included."""
    ops, _ = served(model_of(block), Plan(tp=4))
    reduces = [(axis, verb, size) for axis, verb, size in sent(ops) if verb == "all_reduce"]
    assert reduces == [("tp", "all_reduce", 8 * 2048 * 2)] * 2
    assert [m for m in sent(ops) if m[1] == "all_to_all"] == []


@pytest.mark.parametrize(("family", "reduces"), [("falcon", 1), ("llama", 2)])
def test_falcon_adds_both_branches_before_it_reduces_them(family: str, reduces: int) -> None:
    """Engines sum attention and feed-forward of Falcon's parallel layers and send the sum alone."""
    model = model_of(replace(dense_block(), parallel=True))
    report = ask(replace(model, family=family), Serving(batch=8, input_tokens=100, output_tokens=2), Plan(tp=4))
    step = EngineStep(phase="decode", sequences=8, tokens=1, context=100)
    ops = step_ledger(report.case, report.evaluation.sizes, step).lines[0][1]
    assert sent(ops) == [("tp", "all_reduce", 8 * 2048 * 2)] * reduces


@pytest.mark.parametrize(
    ("family", "engine", "messages"),
    [
        ("minimax_m2", "vllm", [("all_reduce", 8 * 2 * 4)]),
        ("minimax_m2", "sglang", [("all_reduce", 8 * 2 * 4)]),
        ("minimax_m2", "trtllm", [("all_gather", 8 * 2048 * 2), ("all_gather", 8 * 1024 * 2)]),
        ("olmo2", "vllm", [("all_gather", 8 * 2048 * 2), ("all_gather", 8 * 1024 * 2)]),
        ("mpt", "vllm", []),
    ],
)
def test_norms_over_whole_projections_exchange_what_their_engine_sends(
    family: str, engine: str, messages: list[tuple[str, int]]
) -> None:
    """Ranks reduce two fp32 sums a token of queries and keys (vLLM, MiniMax-M2), or gather both projections."""
    block = dense_block()
    core = replace(block.mixers[0], heads=16, kv_heads=8, head_dim=128, qk_norm="full")
    model = replace(model_of(replace(block, mixers=(core,))), family=family)
    job = Serving(batch=8, input_tokens=100, output_tokens=2)
    report = ask(model, job, Plan(tp=4), engine=engine)
    step = EngineStep(phase="decode", sequences=8, tokens=1, context=100)
    ops = step_ledger(report.case, report.evaluation.sizes, step).lines[0][1]
    branches = [("tp", "all_reduce", 8 * 2048 * 2)] * 2
    assert sent(ops) == [*(("tp", verb, size) for verb, size in messages), *branches]


def test_copies_of_one_prompt_read_the_experts_of_one_sequence() -> None:
    """A step over copies of one request reads as many experts as one token does, with the rows of all of them.

    Eight rows an expert fit one tile: beyond 16, tiles of Triton read weights again.
    """
    job = Serving(batch=8, input_tokens=64, output_tokens=32)
    many, same, one = (
        ask("mixtral-8x7b", one, Plan(tp=2)).evaluation.decode.operators
        for one in (job, replace(job, same_prompts=True), replace(job, batch=1))
    )
    name = next(name for name in many if name.endswith("experts.up"))
    assert many[name] > 2 * same[name]
    assert same[name] == pytest.approx(one[name], rel=0.5)


def test_experts_over_replicas_exchange_their_tokens() -> None:
    """Experts on twice the ranks of a replica are reached by two all-to-alls and a gather instead of an all-reduce."""
    ops, _ = served(model_of(SHARED), Plan(tp=4, dp=2, ep=8))
    verbs = [verb for _, verb, _ in sent(ops)]
    assert verbs.count("all_to_all") == 2
    assert verbs.count("all_reduce") == 1
    assert ("tp", "all_gather", 8 * 2048 * 2) in sent(ops)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_head_runs_on_the_last_token(phase: str) -> None:
    """The head multiplies one token of each sequence, reads its weights once, and gathers the logits."""
    _, head = served(model_of(dense_block()), Plan(tp=4), phase)
    assert head.rows == 8
    assert head.flops == 2 * 8 * 2048 * 32000 / 4
    assert head.forward_bytes == 2 * 2048 * 32000 / 4 + 2 * 8 * (2048 + 32000 / 4)
    assert [(c.verb, c.size_bytes) for c in head.forward] == [("all_gather", 2 * 8 * 32000)]


def test_a_prefill_writes_the_tokens_it_computes() -> None:
    """Keys and values of new tokens are read from their projection and written to the cache once."""
    for phase, tokens in (("prefill", 100), ("decode", 1)):
        ops, _ = served(model_of(dense_block(kv_heads=4)), Plan(), phase)
        write = next(op for op in ops if op.name == "cache_write")
        assert write.forward_bytes == 2 * 8 * tokens * 2 * 4 * 128 * 2


def test_experts_split_over_replicas_gather_their_tokens() -> None:
    """Experts split over more ranks than a tensor-parallel group gather every token once and scatter the outputs."""
    job = Serving(batch=8, input_tokens=512, output_tokens=8)
    split = ask(model_of(moe_block(16, 2)), job, Plan(tp=1, etp=4, dp=4), engine="vllm").evaluation
    alone = ask(model_of(moe_block(16, 2)), job, Plan(tp=1, dp=4), engine="vllm").evaluation
    assert split.prefill.exposed["etp"] > 8 * 2 * 8 * 512 * 4 * 2048 * 2 * 3 / 4 / 450e9
    assert split.decode.exposed["etp"] > 0
    assert alone.prefill.exposed.get("etp", 0.0) == 0


def test_down_projections_of_latents_are_one_product() -> None:
    """Engines multiply the stream by both down-projections of latent attention at once, weights and all."""
    model = Model.load("deepseek-v3")
    ops, _ = served(model, Plan(), "decode")
    (down,) = (op for op in ops if op.name == "down")
    assert down.columns == 1536 + 512 + 64
    assert sorted(w.name for w in down.weights) == ["kv_down.weight", "q_down.weight"]
    # The input is read once; the checkpoint's weights have 8 bits and scales of blocks.
    assert down.forward_bytes - 2 * 8 * (7168 + 2112) == pytest.approx(7168 * 2112, rel=1e-3)
