"""Stages of a pipeline: which layers each holds, what the two ends add, and what a schedule keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws.helpers import tried
from shardwise.hardware import Cluster
from shardwise.models import MLP, Model, MoE, load_model
from shardwise.plans import Plan, Training, find_stack, split_layers
from shardwise.training import Evaluation, TrainingCase, evaluate, sizes_of, stages_of
from shardwise.training._stages import Partition, kinds_of, order_of, runs_of, stage_layers

LLAMA, DEEPSEEK = load_model("llama-3.1-8b"), load_model("deepseek-v3")
IN_PLACE = replace(find_stack("megatron"), loss="vocab-parallel-in-place")


def evaluated(plan: Plan, model: Model = LLAMA, batch: int = 64, **more: Any) -> Evaluation[Any]:
    """Return the evaluation of a plan on as many H100 as it has ranks."""
    job = Training(seq_len=4096, global_batch=batch, precision=more.pop("precision", "bf16"))
    stack = more.pop("stack", "megatron")
    stack = find_stack(stack) if isinstance(stack, str) else stack
    cluster = Cluster.parse(f"{plan.num_devices}xh100-sxm-80gb")
    case = TrainingCase(model=model, cluster=cluster, job=job, stack=stack, plan=plan, **more)
    return evaluate(case, sizes_of(plan, batch, case.domains), stages_of(case))


@given(st.integers(1, 200), st.integers(1, 64))
@tried(40)
def test_even_pieces_differ_by_one(layers: int, pieces: int) -> None:
    """Layers spread evenly add up and differ by at most one, the larger pieces first."""
    found = split_layers(layers, pieces, "uniform")
    assert sum(found) == layers
    assert max(found) - min(found) <= 1
    assert list(found) == sorted(found, reverse=True)


@pytest.mark.parametrize(
    ("pp", "vpp", "sizes", "expected"),
    [
        (2, 1, (3, 3), ((0, 0, 1), (1, 1, 1))),
        (2, 1, (2, 4), ((0, 0), (1, 1, 1, 1))),
        # Chunk c of stage i is piece c * pp + i of the model.
        (2, 3, (1,) * 6, ((0, 1, 1), (0, 1, 1))),
        (3, 2, (1,) * 6, ((0, 1), (0, 1), (1, 1))),
    ],
)
def test_stages_take_their_pieces_of_the_model(pp: int, vpp: int, sizes: Any, expected: Any) -> None:
    """Two layers of one kind, then four of another, cut into stages and chunks."""
    assert stage_layers((0, 0, 1, 1, 1, 1), pp, vpp, sizes) == expected


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 3), st.booleans())
@tried(40)
def test_runs_hold_every_layer_once(layers: int, pp: int, limit: int, mirrored: bool) -> None:
    """Runs of equal stages together hold all layers, one embedding and one head; mirrored stages hold them twice."""
    order = tuple(int(i > layers // 3) for i in range(layers))
    part = Partition(
        pp=pp,
        vpp=1,
        sizes=split_layers(layers, pp, "uniform"),
        recomputed=limit or None,
        schedule="dualpipe" if mirrored else "1f1b",
    )
    runs = runs_of(order, 2, part)
    assert sum(r.count for r in runs) == pp
    assert sum(r.count * sum(r.layers) for r in runs) == layers
    assert sum(r.count * sum(r.mirrored) for r in runs) == layers * mirrored
    assert sum(r.count * r.embeds for r in runs) == sum(r.count * r.ends for r in runs) == 1
    assert sum(r.count * r.embeddings for r in runs) == sum(r.count * r.heads for r in runs) == 1 + mirrored
    assert [r.position for r in runs] == [sum(x.count for x in runs[:i]) for i in range(len(runs))]
    if limit:
        again = sum(r.count * sum(r.layers[:2]) for r in runs)
        assert again == sum(min(limit, n) for n in split_layers(layers, pp, "uniform"))


def test_kinds_follow_recompute() -> None:
    """A limit on recomputed layers makes two kinds of each block; without it there is one."""
    assert [k.recomputed for k in kinds_of(order_of(LLAMA), partly=True, recomputes=True, wakes=True)] == [True, False]
    assert [k.recomputed for k in kinds_of(order_of(LLAMA), partly=False, recomputes=True, wakes=True)] == [True]
    assert len(kinds_of(order_of(DEEPSEEK), partly=False, recomputes=False, wakes=False)) == 2


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "dualpipe"])
@pytest.mark.parametrize("pp", [2, 4])
def test_every_schedule_runs_the_same_work(schedule: Any, pp: int) -> None:
    """Compute of a micro-batch over all stages is the model's, whichever schedule runs it: each end runs once."""
    found = evaluated(Plan(pp=pp, schedule=schedule))
    alone = evaluated(Plan(dp=2))  # beside another device too, as those of a pipeline are: alone it runs faster
    work = sum(r.count * s.compute for r, s in zip(found.stages, found.step.stages, strict=True))
    assert work == pytest.approx(alone.step.stages[0].compute, rel=1e-12)


def test_gpipe_keeps_the_logits_of_every_micro_batch() -> None:
    """GPipe runs every loss before the first backward pass; 1F1B has one in flight."""
    few, many = (evaluated(Plan(pp=2, schedule="gpipe"), batch=n).memory[-1].logits for n in (4, 8))
    kept = many - few
    assert kept > 0
    assert evaluated(Plan(pp=2), batch=4).memory[-1].logits == evaluated(Plan(pp=2), batch=8).memory[-1].logits
    later = evaluated(Plan(pp=2, schedule="gpipe"), batch=8).memory[-1].moments
    assert later["backward"] < later["loss"]


def test_dualpipe_holds_two_stages() -> None:
    """A DualPipe device holds its stage and the opposite one: twice the weights, p + 1 micro-batches between them."""
    plain, both = evaluated(Plan(pp=4)), evaluated(Plan(pp=4, schedule="dualpipe"))
    weights = sum(r.count * m.weights for r, m in zip(plain.stages, plain.memory, strict=True))
    twice = sum(r.count * m.weights for r, m in zip(both.stages, both.memory, strict=True))
    assert twice == 2 * weights
    assert [m.in_flight for m in both.memory] == [5] * len(both.memory)


def test_uneven_mirrored_stages_hold_each_its_own_activations() -> None:
    """Of the p + 1 micro-batches p - i are of stage i: a stage without layers keeps those of its opposite alone."""
    plan = Plan(pp=4, schedule="dualpipe", stage_layers=(0, 11, 11, 10))
    found = evaluated(plan)
    layer = found.parts.kinds[0].kept_bytes
    embedding = found.parts.embedding.kept_bytes
    assert found.memory[0].activations == pytest.approx(4 * embedding + 1 * 10 * layer)
    assert found.memory[-1].activations == pytest.approx(1 * 10 * layer + 4 * embedding)


def test_the_optimizer_step_sees_the_largest_tensor_of_its_stage() -> None:
    """Updating tensors one by one needs room for the head on the last stage as for the embedding on the first."""
    found = evaluated(Plan(pp=2, sequence_parallel=False), stack="composer", precision="bf16-pure")
    base = [m.weights + m.gradients + m.optimizer + m.framework for m in found.memory]
    extra = [m.moments["optimizer step"] - b for m, b in zip(found.memory, base, strict=True)]
    assert extra == pytest.approx([2 * 2 * 128256 * 4096] * 2)


@pytest.mark.parametrize(("stack", "elements"), [("transformers", 0), ("transformers-2024", 1), ("verl", 1)])
def test_trainers_update_by_the_default_of_their_release(stack: str, elements: int) -> None:
    """adamw_torch_fused holds nothing beside its states, adamw_torch on a GPU the root of every second moment."""
    found = evaluated(Plan(), stack=stack, precision="bf16-pure")
    (memory,) = found.memory
    base = memory.weights + memory.gradients + memory.optimizer + memory.framework
    assert memory.moments["optimizer step"] - base == elements * memory.weights


def test_a_tied_table_stands_on_both_ends() -> None:
    """A pipeline copies a tied table to the last stage; one stage, and a mirrored pipeline's devices, hold one."""
    tied = replace(LLAMA, tied=True)
    table = evaluated(Plan(), model=tied).parts.table
    for plan, copies in ((Plan(), 1), (Plan(pp=4), 2), (Plan(pp=4, schedule="dualpipe"), 2)):
        apart, shared = (evaluated(plan, model=m) for m in (LLAMA, tied))
        less = sum(
            r.count * (a.weights - s.weights) for r, a, s in zip(apart.stages, apart.memory, shared.memory, strict=True)
        )
        both = 4 if plan.schedule == "dualpipe" else 2
        assert less == 2 * table * (both - copies)


def test_predicted_tokens_keep_logits_and_a_table_of_their_own() -> None:
    """Multi-token prediction keeps its own logits, and needs the input table on the last stage."""
    plan = Plan(tp=8, pp=4, ep=8, stage_layers=(16, 15, 15, 15))
    with_mtp, without = (evaluated(plan, model=m) for m in (DEEPSEEK, replace(DEEPSEEK, mtp=())))
    assert DEEPSEEK.mtp
    assert with_mtp.parts.loss.kept_bytes >= 2 * without.parts.loss.kept_bytes
    more = with_mtp.memory[-1].weights - without.memory[-1].weights
    assert more > 2 * with_mtp.parts.table
    assert with_mtp.memory[0].weights == without.memory[0].weights


def test_logits_that_a_loss_turns_in_place_are_one_tensor_for_each_predicted_token() -> None:
    """Those of the head that runs again are what its loss keeps, not a second copy beside it."""
    plan, stack = Plan(tp=8, pp=4, ep=8, stage_layers=(16, 15, 15, 15)), IN_PLACE
    with_mtp, without = (evaluated(plan, model=m, stack=stack) for m in (DEEPSEEK, replace(DEEPSEEK, mtp=())))
    assert with_mtp.parts.loss.kept_bytes >= 2 * without.parts.loss.kept_bytes
    assert with_mtp.parts.loss.transient_bytes == without.parts.loss.transient_bytes


def test_layers_of_predicted_tokens_run_again_where_all_layers_do() -> None:
    """Megatron checkpoints them whole, none under a count of layers; stacks of PyTorch and of XLA have them kept."""
    kept = {}
    for name, stack, layers in (("all", "megatron", 0), ("some", "megatron", 2), ("xla", "xla", 0)):
        layout: dict[str, Any] = {"tp": 8, "pp": 4, "ep": 8, "stage_layers": (16, 15, 15, 15)}
        plan = Plan(**layout, recompute="full", recompute_layers=layers)
        found = evaluated(plan, model=DEEPSEEK, stack=stack).parts.head
        kept[name] = found.kept_bytes, found.replay
    assert kept["all"][0] < 0.5 * kept["some"][0]
    assert kept["all"][1] > 0
    assert kept["some"][1] == kept["xla"][1] == 0


def test_modules_recompute_the_blocks_they_name() -> None:
    """Module mlp runs dense feed-forwards again, moe those of experts; the other block keeps all it kept."""
    plan = Plan(tp=8, pp=4, ep=8, stage_layers=(16, 15, 15, 15))
    plain = evaluated(plan, model=DEEPSEEK).parts.kinds
    dense_first = [isinstance(b.feed_forward, MLP) for b in DEEPSEEK.kinds]
    assert sorted(dense_first) == [False, True]
    assert any(isinstance(b.feed_forward, MoE) for b in DEEPSEEK.kinds)
    for name, wanted in (("mlp", True), ("moe", False)):
        found = evaluated(replace(plan, modules=(name,)), model=DEEPSEEK).parts.kinds
        for is_dense, before, after in zip(dense_first, plain, found, strict=True):
            assert (after.kept_bytes < before.kept_bytes) == (is_dense is wanted)


def test_hybrid_sharding_reduces_experts_over_their_replicas() -> None:
    """Experts sharded within a group are all-reduced between groups, as dense weights are."""
    mixtral = load_model("mixtral-8x7b")
    plan = Plan(dp=64, ep=2, sharding="hsdp", shard=8, sequence_parallel=False)
    found = evaluated(plan, model=mixtral, overlap=False)
    assert found.sizes.group_shapes["expert_shard"][-1] * found.sizes.group_shapes["expert_replicate"][-1] == 32
    dense = evaluated(replace(plan, ep=1), model=mixtral, overlap=False)
    for evaluation in (found, dense):
        assert evaluation.sizes.group_shapes["expert_replicate"][-1] > 1
    alone = replace(plan, shard=64)
    assert evaluated(alone, model=mixtral, overlap=False).sizes.group_shapes["expert_replicate"][-1] == 1
