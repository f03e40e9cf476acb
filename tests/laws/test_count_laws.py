"""Laws of counting: parameters, FLOPs and their conventions, and what a configuration may leave out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws.helpers import evaluated, report, tried
from laws.strategies import ANY, cases, models, refilled
from shardwise.hardware import Cluster
from shardwise.models import MLP, Attention, Block, Model, MoE, load_model, model_from_config
from shardwise.ops import count_parameters, train_flops
from shardwise.ops.block import block_ops
from shardwise.ops.count import whole_layout
from shardwise.ops.head import head
from shardwise.plans import Plan, Training, find_stack
from shardwise.records import replace
from shardwise.training import TrainingCase, TrainingOptions, train


def _flops(model: Model, kind: str = "") -> float:
    y = whole_layout(1, 2048)
    ops = [op for block in model.layers for op in block_ops(y, block, model.hidden)]
    return sum(op.flops for op in ops if not kind or op.kind == kind)


@given(models())
@tried(12)
def test_untied_tables_are_counted_twice(model: Model) -> None:
    """An output head that is not tied is a second table of V x D parameters."""
    tied, apart = (count_parameters(replace(model, tied=t)) for t in (True, False))
    assert apart - tied == model.vocab * model.hidden


@given(models(), st.sampled_from((1000, 4096)))
@tried(12)
def test_the_vocabulary_is_an_input(model: Model, more: int) -> None:
    """A larger vocabulary has more parameters, larger logits and a longer step."""
    larger = replace(model, vocab=model.vocab + more)
    copies = 1 if model.tied else 2
    assert count_parameters(larger) - count_parameters(model) == copies * more * model.hidden
    job = Training(seq_len=512, global_batch=2)
    cluster, stack = Cluster.parse("1xh100-sxm-80gb"), find_stack("pytorch")
    small, large = (
        evaluated(TrainingCase(model=m, cluster=cluster, job=job, stack=stack, plan=Plan(sequence_parallel=False)))
        for m in (model, larger)
    )
    assert large.memory[-1].logits > small.memory[-1].logits
    assert large.step.total > small.step.total


@given(models(("dense", "moe", "hybrid")), st.booleans())
@tried(12)
def test_learned_positions_appear_only_where_a_model_has_them(model: Model, has: bool) -> None:
    """Learned positions add rows of the hidden width, and nothing adds them unasked."""
    without = count_parameters(replace(model, positions=0))
    assert count_parameters(replace(model, positions=2048 if has else 0)) - without == 2048 * model.hidden * has


@given(models(("dense",)), st.sampled_from((32, 80, 192)))
@tried(12)
def test_head_dim_is_an_input(model: Model, head_dim: int) -> None:
    """Query heads times head dim may differ from the hidden width: projections follow the product."""
    block = model.layers[0]
    mixer = block.mixers[0]
    assert isinstance(mixer, Attention)
    plain = replace(mixer, qk_norm="none", qkv_bias=False, out_bias=False, output_gate=False)

    def count(dim: int) -> int:
        layer = replace(block, mixers=(replace(plain, head_dim=dim),))
        return count_parameters(replace(model, layers=(layer,)))

    width = 2 * model.hidden * (mixer.heads + mixer.kv_heads)
    assert count(2 * head_dim) - count(head_dim) == width * head_dim


@given(models(("dense",)), st.sampled_from((512, 1024)))
@tried(12)
def test_ffn_width_is_an_input(model: Model, more: int) -> None:
    """The feed-forward's width sets its parameters and FLOPs."""
    block = model.layers[0]
    feed = block.feed_forward
    assert isinstance(feed, MLP)
    wide = replace(model, layers=(replace(block, feed_forward=replace(feed, ffn=feed.ffn + more)),))
    base = replace(model, layers=(block,))
    sides = (3 if feed.gated else 2) * model.hidden * more
    assert count_parameters(wide) - count_parameters(base) == sides
    assert _flops(wide) - _flops(base) == 2 * 2048 * sides


@given(cases(replace(ANY, layouts=("1d",), stacks=("pytorch",), models=("dense", "moe", "latent"))))
@tried(12)
def test_parameters_do_not_depend_on_tensor_parallelism(case: TrainingCase) -> None:
    """What the ledger says the model has is the same at every degree, key-value heads that are replicated included."""
    one = evaluated(refilled(case, tp=1, ep=1, etp=1, sequence_parallel=False))
    many = evaluated(case)
    for few, split in (
        (one.parts.embedding, many.parts.embedding),
        *zip(one.parts.kinds, many.parts.kinds, strict=True),
    ):
        assert split.elements.dense * case.plan.tp >= few.elements.dense * (1 - 1e-12)
    blocks = [block_ops(e.layout, b, case.model.hidden) for e in (one, many) for b in case.model.kinds]
    wholes = [sum(w.whole for op in ops for w in op.weights) for ops in blocks]
    assert wholes[: len(wholes) // 2] == wholes[len(wholes) // 2 :]


@given(models(("moe", "latent")))
@tried(12)
def test_expert_flops_are_linear_in_the_chosen_experts(model: Model) -> None:
    """The routed experts' FLOPs are proportional to top-k, and do not depend on how many there are."""
    counted = []
    for k, count in ((1, 64), (2, 64), (4, 64), (4, 128)):
        layers = tuple(
            replace(b, feed_forward=replace(b.feed_forward, experts=count, top_k=k))
            if isinstance(b.feed_forward, MoE)
            else b
            for b in model.layers
        )
        counted.append(_flops(replace(model, layers=layers), "grouped"))
    assert counted[1] == 2 * counted[0]
    assert counted[2] == counted[3] == 4 * counted[0]


@given(models(("moe", "latent", "hybrid", "dense")))
@tried(12)
def test_every_layer_is_counted_once(model: Model) -> None:
    """Interleaved kinds of layer add up: a model is the sum of its layers, each counted once."""
    bare = count_parameters(replace(model, layers=()))
    each = [count_parameters(replace(model, layers=(b,))) - bare for b in model.layers]
    assert count_parameters(model) == bare + sum(each)
    assert _flops(model) == sum(_flops(replace(model, layers=(b,))) for b in model.layers)


def _routed(block: Block, count: int, top_k: int) -> Block:
    feed = block.feed_forward
    return replace(block, feed_forward=replace(feed, experts=count, top_k=top_k)) if isinstance(feed, MoE) else block


def test_logits_scale_with_backward_like_every_product() -> None:
    """The head's backward is two products of its forward's size."""
    model = load_model("llama-3.1-8b")
    (op,) = head(whole_layout(2, 1024), model)
    assert op.flops == 2 * 2 * 1024 * 4096 * 128256
    assert op.backward_flops + op.weight_flops == 2 * op.flops


def test_flop_conventions_convert() -> None:
    """Model-full, model-causal and hardware FLOPs of one run give one rate of tokens."""
    model, cluster = load_model("llama-3.1-8b"), Cluster.parse("64xh100-sxm-80gb")
    job = Training(seq_len=8192, global_batch=128)
    plan = Plan(tp=2, pp=2, dp=0, sharding="distributed-optimizer", recompute="full")
    answer = train(model, cluster, plan, job)
    rate = answer.tokens_per_second_per_gpu
    peak = cluster.device.peak_flops("bf16")
    full, causal = answer.model_flops_per_token, answer.causal_flops_per_token
    # 6 P_m + 12 L N H S and 6 P_m + 6 L N H S: PaLM appendix B and Megatron-LM.
    assert full - causal == pytest.approx(6 * 32 * 4096 * 8192)
    assert full / 1e9 == pytest.approx(57.9, abs=0.1)
    assert causal / 1e9 == pytest.approx(51.5, abs=0.1)
    assert answer.mfu * peak / full == pytest.approx(rate)
    assert answer.hfu * peak / answer.hardware_flops_per_token == pytest.approx(rate)
    assert train_flops(model, 8192, "model-full", "full") > full


@pytest.mark.parametrize("recompute", ["none", "selective", "attention", "norm-attention-norm", "full"])
def test_recompute_never_counts_fewer_flops(recompute: Any) -> None:
    """Hardware FLOPs are at least model FLOPs, and never more than one further forward pass."""
    model = load_model("llama-3.1-8b")
    base = train_flops(model, 4096, "model-full")
    again = train_flops(model, 4096, "model-full", recompute)
    assert base <= again <= base * 4 / 3


def test_an_import_needs_no_known_ffn() -> None:
    """A gated configuration whose ffn is any width is imported as it is."""
    config = {"model_type": "llama", "hidden_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 2}
    config |= {"intermediate_size": 2816, "vocab_size": 32000, "num_key_value_heads": 2}
    feed = model_from_config(config).layers[0].feed_forward
    assert isinstance(feed, MLP)
    assert (feed.ffn, feed.gated) == (2816, True)


def test_what_was_assumed_is_said_exactly_where_it_was() -> None:
    """Notes follow their condition in both directions: stated input leaves them out, silence brings them."""
    model, cluster = load_model("gpt2"), Cluster.parse("8xh100-sxm-80gb")
    silent = train(model, cluster, Plan(dp=0), Training(seq_len=1024, global_batch=8)).assumptions
    stated = train(
        model,
        cluster,
        Plan(dp=8),
        Training(seq_len=1024, global_batch=8, precision="bf16", dropout=False),
        TrainingOptions(),
    ).assumptions
    for start in ("dp 8", "precision bf16"):
        assert any(note.startswith(start) for note in silent)
        assert not any(note.startswith(start) for note in stated)
    unknown = train(model, Cluster.parse("8xmi300x"), Plan(dp=8), Training(seq_len=1024, global_batch=8)).assumptions
    assert any("the middle of other families" in note for note in unknown)
    assert not any("the middle of other families" in note for note in silent)


@given(cases())
@tried(10)
def test_rates_are_ratios_of_the_step(case: TrainingCase) -> None:
    """Tokens a second, FLOP/s and utilisation follow from the step's seconds alone."""
    answer = report(case)
    tokens = case.job.tokens_per_step / answer.step_seconds / case.plan.num_devices
    assert answer.tokens_per_second_per_gpu == pytest.approx(tokens)
    assert answer.model_flops_per_second_per_gpu == pytest.approx(tokens * answer.model_flops_per_token)
    assert 0 < answer.mfu <= answer.hfu
