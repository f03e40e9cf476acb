"""A search and `train` refuse the same jobs, and take the same plans of them for legal."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise import plan_training
from shardwise.errors import InputError
from shardwise.hardware import Cluster
from shardwise.models import MLP, Attention, Block, Model, MoE
from shardwise.plans import Plan, Training, find_stack
from shardwise.records import replace
from shardwise.search import IntRanges, SearchOptions, SearchSpace, TrainingResult, upto
from shardwise.training import TrainingOptions, train

MIXER = Attention(heads=16, kv_heads=4, head_dim=64)
DENSE = Block(mixers=(MIXER,), feed_forward=MLP(ffn=2816))
SPARSE = Block(mixers=(MIXER,), feed_forward=MoE(experts=8, top_k=2, ffn=1024))
MODELS = {
    "dense": Model(name="dense", family="llama", hidden=1024, vocab=32000, layers=(DENSE,) * 4),
    "experts": Model(name="experts", family="llama", hidden=1024, vocab=32000, layers=(SPARSE,) * 4),
    "learned": Model(name="learned", family="gpt", hidden=1024, vocab=32000, layers=(DENSE,) * 4, positions=512),
}
MODES: tuple[Any, ...] = ("none", "selective", "full")


def _stack(name: str, settings: dict[str, Any]) -> Any:
    stack = find_stack(name)
    return replace(stack, settings=replace(stack.settings, **settings))


def _search(
    job: dict[str, Any],
    stack: Any,
    model: str = "dense",
    on: str = "8xa100-sxm-80gb",
    space: SearchSpace | None = None,
    **options: Any,
) -> TrainingResult:
    asked = Training(**{"seq_len": 1024, "global_batch": 16} | job)
    return plan_training(MODELS[model], Cluster.parse(on), asked, space, SearchOptions(stack=stack, **options))


@pytest.mark.parametrize(
    ("job", "settings", "field"),
    [
        ({"adapter": "lora", "targets": ("foo",)}, {}, "targets"),
        ({"adapter": "lora", "targets": ("experts",)}, {}, "targets"),
        ({"adapter": "lora", "rank": 4096}, {}, "rank"),
        ({"adapter": "ia3", "adapter_dropout": 0.1}, {}, "adapter_dropout"),
        ({"base": "nf4"}, {}, "base"),
        ({"trains": ("layers:2-9",)}, {}, "trains"),
        ({"rank": 8}, {}, "rank"),
        ({"reference": "base"}, {}, "reference"),
        ({"method": "dpo"}, {"rollout": "asleep"}, "method"),
        ({}, {"loss": "vocab-parallel"}, "loss"),
        ({"seq_len": 0}, {}, "seq_len"),
        ({"token_budget": 1e9, "sample_budget": 1e6}, {}, "samples"),
        ({"failures_per_device_hour": 1e-4}, {}, "checkpoint_interval"),
        ({"pad_to_capacity": True}, {}, "pad_to_capacity"),
    ],
    ids=str,
)
def test_a_job_that_train_refuses_is_not_searched(job: dict[str, Any], settings: dict[str, Any], field: str) -> None:
    """What is wrong with a job is wrong whatever the plan, and named as `train` names it."""
    stack = _stack("transformers", settings)
    with pytest.raises(InputError) as searched:
        _search(job, stack)
    asked, plan = Training(**{"seq_len": 1024, "global_batch": 16} | job), Plan(dp=8)
    with pytest.raises(InputError) as trained:
        train(MODELS["dense"], Cluster.parse("8xa100-sxm-80gb"), plan, asked, TrainingOptions(stack=stack))
    assert field in {p.field for p in searched.value.problems} <= {p.field for p in trained.value.problems}


def test_a_search_knows_the_positions_that_a_model_learned() -> None:
    """No plan makes a sequence longer than the positions of the model."""
    with pytest.raises(InputError, match="exceeds the 512 learned positions"):
        _search({}, "transformers", "learned")


def test_pages_of_optimizer_state_are_of_nvidia() -> None:
    """A search of paged optimizers on other devices says so; beside another optimizer it leaves them out."""
    with pytest.raises(InputError, match="managed memory"):
        _search({"optimizer": "paged-adam8bit"}, "transformers", on="8xmi300x")
    space = SearchSpace(optimizer=("adam", "paged-adam8bit"))
    found = _search({}, "transformers", on="8xmi300x", space=space)
    assert {report.job.optimizer for report in found.best} == {"adam"}


@pytest.mark.parametrize(
    ("job", "stack", "settings", "model"),
    [
        ({"adapter": "lora"}, "nemo-2024", {}, "dense"),
        ({"adapter": "dora", "base": "nf4", "targets": ("o", "gate")}, "transformers", {}, "dense"),
        ({"adapter": "hira"}, "transformers", {}, "dense"),
        ({"adapter": "lora", "targets": ("experts",)}, "transformers", {}, "experts"),
        ({"adapter": "lora", "targets": ("experts",)}, "megatron-bridge", {}, "experts"),
        ({}, "torchtune", {"updates_in_backward": True}, "dense"),
        ({"trains": ("last:1",)}, "fsdp2", {"loss": "fused-linear"}, "dense"),
        ({}, "ms-swift", {}, "dense"),
    ],
    ids=str,
)
@pytest.mark.parametrize("explore", [False, True])
def test_train_takes_every_plan_that_a_search_takes(
    job: dict[str, Any], stack: str, settings: dict[str, Any], model: str, explore: bool
) -> None:
    """The layout of two dimensions, splits of adapters and of experts, updates in backward: one law for both."""
    own = _stack(stack, settings)
    space = SearchSpace(tp=upto(2), pp=upto(2), cp=upto(2), ep=upto(2), etp=upto(1), micro_batch=upto(2))
    found = _search(job, own, model, "4xa100-sxm-80gb", space, top=30, explore=explore)
    for best in found.best:
        one = train(best.case.model, best.case.cluster, best.plan, best.job, TrainingOptions(stack=own))
        assert (one.device_bytes, one.step_seconds) == (best.device_bytes, best.step_seconds)


def test_shardings_of_two_frameworks_are_both_searched() -> None:
    """TRL's FSDP beside ZeRO-3, which DeepSpeed runs: neither is taken for the other, and what one refuses is said."""
    words = ("fsdp", "zero3")
    space = SearchSpace(sharding=words, tp=upto(1), pp=upto(1), cp=upto(1))
    spaces = (space, *(replace(space, sharding=(word,)) for word in words))
    both, *each = (_search({}, "trl", on="4xa100-sxm-80gb", space=one) for one in spaces)
    assert both.counts.legal == sum(one.counts.legal for one in each) > 0
    assert both.best[0].step_seconds == min(one.best[0].step_seconds for one in each)
    for found in each:
        best = found.best[0]
        one = train(best.case.model, best.case.cluster, best.plan, best.job, TrainingOptions(stack="trl"))
        assert (one.device_bytes, one.step_seconds) == (best.device_bytes, best.step_seconds)
    with pytest.raises(InputError, match="galore"):
        _search({"optimizer": "galore"}, "trl", on="4xa100-sxm-80gb", space=space)


@pytest.mark.parametrize(
    ("stack", "shardings", "job", "offload"),
    [
        ("deepspeed", ("zero3", "none"), {}, ()),
        ("trl", ("none", "fsdp"), {}, ()),
        ("trl", ("fsdp",), {}, ()),
        ("trl", ("zero3",), {}, ()),
        ("accelerate", ("shard-grad-op", "fsdp"), {}, ()),
        ("megatron", ("none", "distributed-optimizer"), {"precision": "bf16-masters16-moments16"}, ()),
        ("megatron", ("none", "distributed-optimizer"), {}, ("optimizer",)),
        ("deepspeed", ("none", "zero3"), {}, ("optimizer", "gradients", "parameters")),
    ],
    ids=str,
)
@pytest.mark.parametrize("stated", [False, True])
def test_the_best_of_one_device_is_the_best_that_it_trains(
    stack: str, shardings: tuple[str, ...], job: dict[str, Any], offload: tuple[str, ...], stated: bool
) -> None:
    """Where nobody shares weights a sharding still says who casts and moves them: each that is named is tried.

    Left out, one copy has none where the framework runs that: else a device would have no plan.
    """
    space = SearchSpace(sharding=shardings if stated else (), offload=(offload,), micro_batch=upto(2))
    found = _search(job, stack, on="1xa100-sxm-80gb", space=space, risk=0.01)
    own = Training(**{"seq_len": 1024, "global_batch": 16} | job)
    seconds = []
    for word in shardings if stated else found.grid.lone_shardings:
        ways: Any = [{"sharding": word, "micro_batch": n, "recompute": mode} for n in (1, 2) for mode in MODES]
        for way in ways if word == "zero3" or "parameters" not in offload else ():
            plan = Plan(offload=offload, **way)
            one = train(MODELS["dense"], Cluster.parse("1xa100-sxm-80gb"), plan, own, TrainingOptions(stack=stack))
            seconds += [one.step_seconds] if one.fits and not one.unlaunched else []
    assert found.best[0].step_seconds == pytest.approx(min(seconds), rel=1e-12)


@pytest.mark.parametrize("on", ["4xb200-sxm-180gb", "4xh100-sxm-80gb"])
@pytest.mark.parametrize("objective", ["throughput", "memory"])
def test_one_device_among_several_counts_is_ranked_by_what_it_takes_alone(on: str, objective: str) -> None:
    """Several devices slow each other down, one alone does not: both are timed and measured as `train` does."""
    space = SearchSpace(devices=upto(4), tp=upto(2), pp=upto(1), cp=upto(1), micro_batch=upto(2))
    found = _search({}, "fsdp2", on=on, space=space, objective=objective, prune=False, top=30)
    assert {best.plan.num_devices for best in found.best} == {1, 2, 4}
    for entry, best in zip(found.partial.top.entries, found.best, strict=True):
        assert entry.step_seconds == pytest.approx(best.step_seconds, rel=1e-12), best.plan
        assert entry.device_bytes == pytest.approx(best.device_bytes, rel=1e-12), best.plan
    values = [found.value(best) for best in found.best]
    assert values == sorted(values)


def test_chunks_that_are_named_are_tried_where_they_cut_layers_unevenly() -> None:
    """A range holds the chunks that cut the layers evenly; those named are what `train` answers."""
    model = replace(MODELS["dense"], layers=(DENSE,) * 14)
    fixed: dict[str, Any] = {"pp": IntRanges.parse("2"), "tp": upto(1), "cp": upto(1), "schedule": ("interleaved",)}
    job, cluster = Training(seq_len=1024, global_batch=16), Cluster.parse("4xa100-sxm-80gb")
    for vpp, chunks in (("2,3", {2, 3}), ("2", {2}), ("2..3", set())):
        space, options = SearchSpace(vpp=IntRanges.parse(vpp), **fixed), SearchOptions(stack="fsdp2", prune=False)
        found = plan_training(model, cluster, job, space, options)
        assert {best.plan.vpp for best in found.best} <= chunks
        assert bool(found.best) == bool(chunks)
        for best in found.best:
            one = train(model, cluster, best.plan, job, TrainingOptions(stack="fsdp2"))
            assert (one.unlaunched, one.step_seconds) == ((), best.step_seconds)


@pytest.mark.parametrize("adapter", ["", "lora"])
def test_gradients_that_go_to_the_host_are_those_of_a_rank(adapter: str) -> None:
    """With a sharded optimizer a rank sends its share of them, without one all: two shardings of two times."""
    words, stack = ("none", "zero1"), "fsdp2"
    space = SearchSpace(sharding=words, recompute=("none",), offload=(("optimizer", "gradients"),), pp=upto(1))
    found = _search({"adapter": adapter}, stack, "dense", "4xa100-sxm-80gb", space, explore=True, prune=False, top=40)
    assert len(found.best) > 4
    for entry, best in zip(found.partial.top.entries, found.best, strict=True):
        assert entry.step_seconds == pytest.approx(best.step_seconds, rel=1e-12), best.plan
