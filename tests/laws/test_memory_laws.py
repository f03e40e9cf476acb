"""Laws of training memory: what must hold for every model, plan, framework and device."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from laws.helpers import SLACK, evaluated, peak, report, tried
from laws.strategies import ANY, GIB, RECURRENT, Wanted, cases, models, refilled
from shardwise.hardware import Cluster
from shardwise.ledger.saved import keep, tensor_bytes
from shardwise.models import Attention, Block, Model, MoE, load_model
from shardwise.ops.block import block_ops
from shardwise.ops.inputs import LayoutOptions, ParallelSizes, TokenBatch
from shardwise.ops.layout import lay_out
from shardwise.plans import RECOMPUTES, SHARDINGS, Plan, Training, find_precision, find_stack, shard_of
from shardwise.records import replace
from shardwise.training import TrainingCase, TrainingOptions, train
from shardwise.training._fsdp_units import unpadded
from shardwise.training._memory import state_bytes
from shardwise.training._parts import owned

FLAT = Wanted(layouts=("1d",), modules=False)
ORDER = ("none", "selective", "attention", "norm-attention-norm", "full")


def _layout(tp: int = 1, tp2: int = 1, cp: int = 1, stack: str = "megatron", **choices: Any) -> Any:
    degrees = ParallelSizes(tp=tp, tp2=tp2, cp=cp, ep=1, etp=1, panels=1)
    work = TokenBatch(B=2, S=4096, context=0, dropout=choices.pop("dropout", False))
    return lay_out(degrees, work, LayoutOptions(stack=find_stack(stack), **choices))


def _kept(layout: Any, model: Model) -> float:
    """What layers keep, without the few bytes that do not grow with tokens (the offsets of expert groups)."""
    kept = (t for b in model.layers for t in keep(block_ops(layout, b, model.hidden)).kept)
    return sum(t.size_bytes for t in kept if not t.name.endswith("group offsets"))


def _splits(model: Model, tp: int) -> bool:
    return all(m.kv_heads % tp == 0 for b in model.layers for m in b.mixers if isinstance(m, Attention))


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_wider_gradients_never_allow_a_larger_micro_batch(sharding: Any) -> None:
    """Gradients count in the fit: raising their precision never raises the largest micro-batch."""
    model, cluster = load_model("llama-3.1-8b"), Cluster.parse("16xh100-sxm-80gb")
    plan = Plan(tp=8, dp=0, micro_batch=0, sharding=sharding, shard=2 if sharding == "hsdp" else 1)
    narrow, wide = (
        train(model, cluster, plan, Training(seq_len=8192, global_batch=256, precision=p)).plan.micro_batch
        for p in ("bf16-grads16", "bf16")
    )
    assert wide <= narrow


@given(cases())
@tried(12)
def test_not_fitting_is_a_result_with_a_shortfall_and_never_negative_memory(case: TrainingCase) -> None:
    """Whether a plan fits or not, every category is at least zero and the shortfall says by how much."""
    answer = report(case)
    memory, verdict = answer.memory, answer.verdict
    parts = (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.logits, memory.buffers)
    assert min(parts) >= 0
    assert verdict.fits == (verdict.short_by_bytes <= 0)
    assert verdict.short_by_bytes == verdict.needed_bytes - verdict.limit_bytes


@given(cases(), st.sampled_from(SHARDINGS))
@tried(16)
def test_state_summed_over_a_sharding_group_is_one_copy(case: TrainingCase, sharding: Any) -> None:
    """Weights, gradients and optimizer state of all ranks of a group add up to one copy, however they are sharded."""
    case = replace(case, plan=replace(case.plan, sharding=sharding, shard=case.plan.dp if sharding == "hsdp" else 1))
    found = evaluated(case)
    recipe, z = case.recipe, found.sizes
    precision, optimizer = recipe.precision, recipe.optimizer
    widths_of = [one.element_bytes(precision.state_bytes) for one in (optimizer.matrix, optimizer.other)]
    for stage in found.stages:
        dense_matrix, dense_other, expert_matrix, expert_other = owned(found.parts, stage)
        for params, ranks in (
            ((dense_matrix, dense_other, 0, 0), case.plan.dp * case.plan.cp),
            ((0, 0, expert_matrix, expert_other), case.plan.expert_dp),
        ):
            matrix, other = params[0] + params[2], params[1] + params[3]
            weights, gradients, state = state_bytes(recipe, z, params, (0, 0))
            widths = (
                precision.weight_bytes * (matrix + other),
                precision.gradient_bytes * (matrix + other),
                (precision.master_bytes + widths_of[0]) * matrix + (precision.master_bytes + widths_of[1]) * other,
            )
            sharded = (recipe.shards_weights, recipe.shards_gradients, recipe.shards_optimizer)
            for got, one_copy, is_sharded in zip((weights, gradients, state), widths, sharded, strict=True):
                assert got * (ranks if is_sharded else 1) == pytest.approx(one_copy, rel=1e-12)


# What every tensor-parallel rank may hold whole: norms, routers, latent down-projections, values a channel.
_WHOLE = (
    "norm",
    "router",
    "q_down",
    "kv_down",
    "scale",
    "mixes",
)


@given(models(), st.sampled_from((2, 4, 8)))
@tried(16)
def test_every_weight_is_split_exactly_or_held_whole(model: Model, tp: int) -> None:
    """Parameters are conserved: the ranks of a tensor-parallel group hold each split weight exactly once."""
    assume(_splits(model, tp))
    for block in model.kinds:
        _holds_once(block, model.hidden, tp)


@pytest.mark.parametrize("mixer", RECURRENT, ids=lambda m: type(m).__name__)
def test_every_weight_of_a_recurrent_mixer_is_split_exactly_or_held_whole(mixer: Any) -> None:
    """The same of each kind, whichever a law draws."""
    _holds_once(Block(mixers=(mixer,), feed_forward=None), 2048, 4)


def _holds_once(block: Block, hidden: int, tp: int) -> None:
    for op in block_ops(_layout(tp, sequence_parallel=True), block, hidden):
        for weight in op.weights:
            ranks = 1 if weight.expert else tp
            # Where a row-parallel bias is added after the reduction, every rank holds it whole.
            may = any(word in weight.name for word in _WHOLE) or weight.name in ("out.bias", "mlp.down.bias")
            assert weight.elements * ranks == weight.whole or (may and weight.elements == weight.whole), weight


@given(cases(replace(ANY, layouts=("1d",), stacks=("pytorch",))))
@tried(16)
def test_stages_together_hold_the_model(case: TrainingCase) -> None:
    """Parameters summed over pipeline stages are the model's, a shared table and mirrored stages counted as held."""
    from shardwise.ops import count_parameters

    model = replace(case.model, mtp=())
    plan = replace(case.plan, tp=1, ep=1, etp=1)
    found = evaluated(refilled(replace(case, model=model, plan=plan)))
    held = sum(s.count * sum(owned(unpadded(found.parts), s)) for s in found.stages)
    mirrored = plan.schedule == "dualpipe"
    copies = model.vocab * model.hidden if model.tied and plan.pp > 1 and not mirrored else 0
    assert held == count_parameters(model) * (2 if mirrored else 1) + copies


@given(cases(), st.sampled_from(SHARDINGS))
@tried(12)
def test_pipeline_and_tensor_parallelism_divide_the_optimizer_at_every_stage_of_zero(
    case: TrainingCase, sharding: Any
) -> None:
    """Optimizer and gradient bytes are widths times the parameters of a rank, over the sharding group and no more.

    DTensor alone makes the gradient of the table of words whole on each tensor-parallel rank.
    """
    case = replace(case, plan=replace(case.plan, sharding=sharding, shard=case.plan.dp if sharding == "hsdp" else 1))
    found = evaluated(case)
    recipe = case.recipe
    for stage, memory in zip(found.stages, found.memory, strict=True):
        dense_matrix, dense_other, expert_matrix, expert_other = owned(found.parts, stage)
        dense, expert = dense_matrix + dense_other, expert_matrix + expert_other
        share = case.plan.dp * case.plan.cp
        spread = dense / share + expert / case.plan.expert_dp
        apart = (
            recipe.stack.whole_table_gradient and recipe.stack.vocabulary == "split" and not found.parts.shared_table
        )
        others = (case.plan.tp * case.plan.tp2 - 1) * stage.embeddings * found.parts.table if apart else 0
        gradients = spread if recipe.shards_gradients else dense + expert + others
        assert memory.gradients == pytest.approx(recipe.precision.gradient_bytes * gradients, rel=1e-12)


@given(cases())
@tried(12)
def test_the_reported_peak_is_the_largest_of_the_stages(case: TrainingCase) -> None:
    """The peak is the maximum over stages, never their average."""
    answer = report(case)
    peaks = [m.peak for m in answer.evaluation.memory]
    average = sum(s.count * p for s, p in zip(answer.evaluation.stages, peaks, strict=True)) / case.plan.pp
    assert answer.evaluation.peak == max(peaks) >= average / SLACK
    assert answer.memory.peak == max(answer.memory.moments.values())


@given(models())
@tried(10)
def test_a_tensor_read_twice_is_kept_once(model: Model) -> None:
    """Saved activations are at most what the operators save, and each name counts once."""
    y = _layout()
    for block in model.kinds:
        ops = block_ops(y, block, model.hidden)
        kept = keep(ops).kept
        assert len({t.name for t in kept}) == len(kept)
        assert tensor_bytes(kept) <= sum(t.size_bytes for op in ops for t in op.saves)
        sizes = {(t.name, t.size_bytes) for op in ops for t in op.saves}
        assert len(sizes) == len({name for name, _ in sizes}), "one name, two sizes"


@given(models(("dense", "moe", "latent")), st.sampled_from((2, 4, 8)), st.sampled_from(("megatron", "axolotl")))
@tried(16)
def test_sequence_parallelism_divides_activations_exactly(model: Model, tp: int, stack: str) -> None:
    """With sequence parallelism a layer keeps exactly 1/t of its bytes where backward gathers inputs again.

    Where it does not, the inputs of column-parallel GEMMs are kept whole beside less than that. The mask that SDPA has
    of a window is one for all heads: both frameworks have none.
    """
    assume(_splits(model, tp))
    whole = _kept(_layout(stack=stack, dropout=True), model)
    y = _layout(tp, stack=stack, sequence_parallel=True, dropout=True)
    again, once = (
        _kept(replace(y, choices=replace(y.choices, stack=replace(y.stack, regathers_inputs=own))), model)
        for own in (True, False)
    )
    assert again * tp == whole
    assert again < once


@pytest.mark.parametrize(("stack", "bytes_per_width"), [("megatron", 6), ("pytorch", 8)])
def test_swiglu_keeps_its_own_bytes(stack: str, bytes_per_width: int) -> None:
    """A gated feed-forward keeps 6 F bytes a token fused and 8 F unfused, not GELU's 4 F."""
    model = load_model("llama-3.1-8b")
    kept = keep(block_ops(_layout(stack=stack), model.layers[0], model.hidden)).kept
    width = sum(t.size_bytes for t in kept if t.name in ("mlp.up", "mlp.activated", "mlp.product"))
    assert width == bytes_per_width * 2 * 4096 * 14336


def test_keys_and_values_are_kept_at_key_value_heads() -> None:
    """Grouped queries shrink what is kept of keys and values by their ratio."""
    model = load_model("llama-3.1-8b")
    kept = {t.name: t.size_bytes for t in keep(block_ops(_layout(), model.layers[0], model.hidden)).kept}
    assert kept["attention.keys"] * 4 == kept["attention.queries"] == kept["attention.values"] * 4


@given(models(("dense", "moe")), st.sampled_from(("scores", "eager")), st.booleans())
@tried(10)
def test_flash_attention_never_keeps_more(model: Model, attention: Any, dropout: bool) -> None:
    """Flash attention never increases activations."""
    flash = _layout(dropout=dropout)
    unfused = replace(flash, choices=replace(flash.choices, stack=replace(flash.stack, attention=attention)))
    assert _kept(flash, model) <= _kept(unfused, model)


@given(cases(replace(FLAT, recomputes=("none",))))
@tried(12)
def test_more_recompute_keeps_less(case: TrainingCase) -> None:
    """Full recompute keeps at most what selective does, and selective at most what none does."""
    kept = [max(m.activations for m in evaluated(_recomputing(case, mode)).memory) for mode in ORDER]
    assert kept == sorted(kept, reverse=True)
    assert set(ORDER) == set(RECOMPUTES)


def _recomputing(case: TrainingCase, mode: Any) -> TrainingCase:
    return replace(case, plan=replace(case.plan, recompute=mode))


@given(cases(replace(FLAT, schedules=("gpipe", "1f1b", "zb-h1"))), st.integers(1, 8))
@tried(12)
def test_fewer_micro_batches_never_cost_memory(case: TrainingCase, count: int) -> None:
    """In-flight activations are at most the micro-batches there are."""
    unit = case.plan.dp * case.plan.micro_batch
    few, more = (peak(replace(case, job=replace(case.job, global_batch=unit * n))) for n in (count, count + 1))
    assert few <= more * SLACK


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("vpp", [2, 4])
def test_interleaving_costs_the_first_stage_no_more_than_its_bound(pp: int, vpp: int) -> None:
    """Interleaving multiplies the activations of the first stage by at most 1 + (p - 1) / (p v)."""
    model = load_model("llama-3.1-8b")
    job = Training(seq_len=4096, global_batch=64)
    plain, chunked = (
        evaluated(
            TrainingCase(
                model=model,
                cluster=Cluster.parse(f"{pp}xh100-sxm-80gb"),
                job=job,
                stack=find_stack("megatron"),
                plan=plan,
            )
        ).memory[0]
        for plan in (Plan(pp=pp), Plan(pp=pp, vpp=vpp, schedule="interleaved"))
    )
    assert chunked.activations <= plain.activations * (1 + (pp - 1) / (pp * vpp)) * SLACK


@given(models(("dense",)), st.sampled_from((2, 4)), st.sampled_from((2, 4)))
@tried(12)
def test_two_dimensional_tiles_add_up_to_the_tensor(model: Model, tp: int, tp2: int) -> None:
    """With two-dimensional layouts local bytes times tp x tp2 equal the whole tensor, statistics of tokens apart."""
    assume(_splits(model, tp) and model.hidden % (tp * tp2) == 0)
    whole, tile = _layout(), _layout(tp, tp2, layout="summa")
    for block in model.kinds:
        one = {t.name: t.size_bytes for t in keep(block_ops(whole, block, model.hidden)).kept}
        split = {t.name: t.size_bytes for t in keep(block_ops(tile, block, model.hidden)).kept}
        assert set(one) == set(split)
        for name, size in split.items():
            ranks = tp2 if name.endswith("statistics") and "qk" not in name else tp * tp2
            assert size * ranks == one[name], name


@given(cases())
@tried(10)
def test_context_buffers_and_the_allocator_count(case: TrainingCase) -> None:
    """Usable bytes stay below the nameplate, and a plan never needs less than its tensors."""
    answer = report(case)
    device = case.cluster.device
    assert device.usable_memory_bytes < device.memory_bytes
    assert answer.evaluation.peak <= answer.allocated_bytes <= answer.reserved_bytes <= answer.device_bytes


@given(cases(), st.floats(0.1, 1.0))
@tried(10)
def test_larger_memory_never_unfits(case: TrainingCase, share: float) -> None:
    """A plan that fits a device fits one with more memory."""
    big = 200 * GIB
    small, large = (report(_with_memory(case, m)).fits for m in (share * big, big))
    assert large or not small


def _with_memory(case: TrainingCase, size_bytes: float) -> TrainingCase:
    values = {"memory_bytes": round(size_bytes), "usable_memory_bytes": round(size_bytes)}
    device = case.cluster.device.with_values(values, "assumption: a law", "2026")
    return replace(case, cluster=replace(case.cluster, device=device))


@given(cases())
@tried(10)
def test_more_tokens_never_need_less_memory(case: TrainingCase) -> None:
    """Memory grows with the micro-batch and with the sequence."""
    unit = case.job.global_batch // case.plan.micro_batch
    wide = replace(case, plan=replace(case.plan, micro_batch=2 * case.plan.micro_batch))
    wide = replace(wide, job=replace(case.job, global_batch=2 * unit * case.plan.micro_batch))
    long = replace(case, job=replace(case.job, seq_len=2 * case.job.seq_len))
    base = peak(case)
    assert peak(wide) >= base
    assert peak(long) >= base


@given(cases(replace(ANY, models=("moe", "latent"))))
@tried(10)
def test_expert_state_follows_the_expert_copies(case: TrainingCase) -> None:
    """Expert optimizer state is divided by the copies of experts, dense state by the dense copies."""
    z = evaluated(case).sizes
    assume(shard_of(case.plan) == case.plan.dp)
    assert z.shard_share == case.plan.dp * case.plan.cp
    assert z.expert_share == case.plan.expert_dp


def test_the_transformers_stack_reserves_what_it_gathers() -> None:
    """Sharded weights need room for the units that are gathered; unsharded ones do not."""
    model, cluster = load_model("llama-3.1-8b"), Cluster.parse("8xh100-sxm-80gb")
    job = Training(seq_len=2048, global_batch=8)
    buffers = {
        s: train(model, cluster, Plan(dp=0, sharding=s), job, TrainingOptions(stack="fsdp2")).memory.buffers  # type: ignore[arg-type]
        for s in ("none", "zero1", "zero2", "fsdp")
    }
    assert buffers["none"] == buffers["zero1"] == buffers["zero2"] == 0 < buffers["fsdp"]


def test_experts_alone_are_expert_weights() -> None:
    """Only weights of routed experts follow the expert axes."""
    model = load_model("deepseek-v3")
    block = next(b for b in model.kinds if isinstance(b.feed_forward, MoE))
    expert = {w.name for op in block_ops(_layout(), block, model.hidden) for w in op.weights if w.expert}
    assert expert == {"mlp.experts.up.weight", "mlp.experts.down.weight"}
    assert find_precision("bf16").gradient_bytes == 4


@given(batch=st.integers(1, 12), memory=st.integers(60 * 10**9, 100 * 10**9))
@tried(12)
def test_what_the_allocator_gives_back_is_no_risk(batch: int, memory: int) -> None:
    """The chance is that of what is required, at least 90 % where the high end of what is shown is on the device."""
    job = Training(seq_len=2048, global_batch=batch, base="nf4", adapter="lora")
    cluster = Cluster.parse("1xh100", {"memory": memory})
    one = train(load_model("llama-3.1-8b"), cluster, Plan(micro_batch=batch), job)
    verdict, band = one.verdict, one.case.memory_band
    assert verdict.required_bytes <= one.device_bytes
    assert one.chance_to_fit == band.chance(verdict.limit_bytes / verdict.required_bytes)
    assert (one.interval["device_bytes"][1] <= verdict.limit_bytes) == (one.chance_to_fit >= 0.9 - 1e-9)
