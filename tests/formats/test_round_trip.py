"""Export then import is the identity on everything a format can say, and what it cannot say is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.errors import InputError
from shardwise.formats import ExportCase, ImportContext, deepspeed, fsdp, nemo, torchtitan, transformers
from shardwise.formats._exported import canonical, canonical_plan
from shardwise.formats.megatron import export
from shardwise.formats.megatron import read as read_script
from shardwise.hardware import Cluster
from shardwise.models import Model, load_model
from shardwise.plans import Plan, Training, find_stack
from shardwise.plans.laws import batch_problems, plan_problems, stack_problems

MODELS = ("llama-3.1-8b", "gpt2", "mixtral-8x7b", "deepseek-v2-lite", "gpt-oss-20b", "qwen2.5-7b", "nemotron-h-8b",
          "deepseek-v3")  # fmt: skip
MEGATRON = ("bf16", "bf16-grads16", "fp16", "fp16-grads16", "fp32", "fp8", "fp8-grads16", "fp4", "fp4-grads16",
            "bf16-masters16", "bf16-grads16-masters16-moments16", "bf16-moments16", "fp8-moments16")  # fmt: skip
FEW = st.sampled_from((1, 2, 4))
MODULES = ("mlp", "moe", "layernorm", "shared_experts", "moe_act", "mla_up_proj")
MANY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
DEFAULT = ("tp", "tp2", "cp", "dp", "pp")
PP_FIRST = ("tp", "tp2", "cp", "pp", "dp")


@st.composite
def megatron_plans(draw: st.DrawFn) -> tuple[Model, Plan, Training]:
    """Return a model, a legal plan in the fields that Megatron-LM has words for, and a job."""
    model = load_model(draw(st.sampled_from(MODELS)))
    experts = any(getattr(block.feed_forward, "experts", 0) for block in model.kinds)
    pp, vpp = draw(FEW), draw(st.sampled_from((1, 2)))
    vpp = vpp if pp > 1 else 1
    recompute = draw(st.sampled_from(("none", "selective", "full")))
    sharding = draw(st.sampled_from(("none", "distributed-optimizer", "zero1", "zero2", "fsdp", "hsdp")))
    dp = draw(st.sampled_from((2, 4, 8)))
    plan = Plan(
        tp=draw(FEW), cp=draw(st.sampled_from((1, 2))), pp=pp, vpp=vpp, dp=dp,
        ep=draw(FEW) if experts else 1, etp=draw(st.sampled_from((1, 2))) if experts else 1,
        micro_batch=draw(FEW), sequence_parallel=draw(st.booleans()),
        cp_kind=draw(st.sampled_from(("ring", "all-gather", "all-to-all"))),
        schedule="interleaved" if vpp > 1 else "1f1b", sharding=sharding, shard=2 if sharding == "hsdp" else 1,
        recompute=recompute, recompute_layers=draw(st.sampled_from((0, vpp))) if recompute == "full" else 0,
        modules=tuple(draw(st.lists(st.sampled_from(MODULES), unique=True, max_size=2))) if recompute != "full" else (),
        stage_layers=draw(cuts(model.num_layers, pp * vpp)), order=draw(st.sampled_from((DEFAULT, PP_FIRST))),
    )  # fmt: skip
    capacity = draw(st.sampled_from((0.0, 1.0, 1.25))) if experts else 0.0
    job = Training(
        seq_len=512,
        global_batch=plan.dp * plan.micro_batch * (plan.pp * draw(FEW) + draw(st.sampled_from((0, 1)))),
        token_budget=512.0 * draw(st.integers(0, 10**9)),
        precision=draw(st.sampled_from(MEGATRON)),
        optimizer=draw(st.sampled_from(("adam", "sgd", "muon", "lion"))),
        capacity_factor=capacity,
        pad_to_capacity=capacity > 1,
    )
    return model, plan, job


@st.composite
def cuts(draw: st.DrawFn, layers: int, pieces: int) -> tuple[int, ...]:
    """Return layers cut into pieces in any way, or nothing for equal ones."""
    if pieces == 1 or draw(st.booleans()):
        return ()
    marks = sorted(draw(st.lists(st.integers(0, layers), min_size=pieces - 1, max_size=pieces - 1)))
    return tuple(b - a for a, b in zip([0, *marks], [*marks, layers], strict=True))


def legal(model: Model, plan: Plan, job: Training) -> bool:
    """Return whether a plan breaks no law."""
    return not plan_problems(model, plan, job.seq_len) and not batch_problems(plan, job.global_batch)


def runs(name: str) -> Callable[[tuple[Model, Plan, Training]], bool]:
    """Return whether a case is legal and a framework runs it."""
    return lambda one: (
        legal(*one)
        and not stack_problems(
            find_stack(name),
            one[1],
            optimizer=one[2].optimizer,
            precision=one[2].precision or find_stack(name).precision,
        )
    )


def machines(plan: Plan) -> Cluster:
    """Return as many devices as a plan has."""
    return Cluster.parse(f"{plan.num_devices}xh100-sxm-80gb")


@settings(MANY, max_examples=30)
@given(case=megatron_plans().filter(runs("megatron")), overlap=st.booleans())
def test_megatron_brings_back_every_field(case: tuple[Model, Plan, Training], overlap: bool) -> None:
    """A legal plan written as a launch script for Megatron-LM is read back as it was: model, plan, job and launch."""
    model, plan, job = case
    overlap = overlap or plan.sharding_rules.gradients  # as Megatron-FSDP does by itself
    stack = replace(find_stack("megatron"), overlap_gradients=overlap, overlap_parameters=overlap)
    found = export(ExportCase(model=model, cluster=machines(plan), plan=plan, job=job, stack=stack))
    (text,) = found.files.values()
    back = read_script(text)
    assert back.model is not None
    assert canonical(back.model) == canonical(model)
    worded = replace(plan, sharding=stack.runs.word(plan.sharding))
    assert canonical_plan(back.plan) == canonical_plan(worded)
    assert (back.job.seq_len, back.job.global_batch, back.job.token_budget) == (
        job.seq_len, job.global_batch, job.token_budget)  # fmt: skip
    assert (back.job.precision, back.job.optimizer) == (job.precision, job.optimizer)
    assert back.model.dropout == model.dropout
    assert back.num_devices == plan.num_devices
    assert not back.unknown


@settings(MANY, max_examples=24)
@given(case=megatron_plans().filter(runs("megatron-bridge")), overlap=st.booleans())
def test_a_recipe_s_overrides_bring_back_every_field(case: tuple[Model, Plan, Training], overlap: bool) -> None:
    """A plan that Megatron-Bridge runs is read back from its YAML and from its words alike, beside a recipe's model."""
    model, plan, job = case
    # Experts that are filled up to their capacity cannot be reached through DeepEP.
    own = find_stack("megatron-bridge-alltoall" if job.pad_to_capacity else "megatron-bridge")
    sharded = plan.sharding_rules.gradients  # Megatron-FSDP overlaps by itself
    both = overlap or sharded
    stack = replace(own, overlap_gradients=both, overlap_parameters=both, overlap_tensor=overlap)
    narrow = job.precision.startswith("fp8")  # whose recipe gathers narrow weights
    stack = replace(stack, settings=replace(stack.settings, fp8_param_gather=narrow))
    found = nemo.export(ExportCase(model=model, cluster=machines(plan), plan=plan, job=job, stack=stack))
    back = nemo.read_beside(found.files["nemo.yaml"], model, plan.num_devices)
    assert canonical_plan(back.plan) == canonical_plan(replace(plan, sharding=stack.runs.word(plan.sharding)))
    told = ("seq_len", "global_batch", "token_budget", "precision", "optimizer", "capacity_factor", "pad_to_capacity")
    assert all(getattr(back.job, name) == getattr(job, name) for name in told)
    if plan.sharding in ("none", "zero1", "distributed-optimizer"):
        assert (back.stack.overlap_gradients, back.stack.overlap_tensor) == (overlap, overlap)
    assert not back.unknown
    again = nemo.read(found.files["nemo.sh"], "nemo.sh")
    assert again.num_devices == plan.num_devices and again.job.global_batch == job.global_batch


@st.composite
def flat_plans(draw: st.DrawFn, shardings: tuple[Any, ...], kinds: tuple[Any, ...]) -> tuple[Model, Plan, Training]:
    """Return a model, a legal plan of data, tensor and context parallelism, and a job."""
    model = load_model(draw(st.sampled_from(("llama-3.1-8b", "gpt2", "qwen2.5-7b"))))
    sharding, cp = draw(st.sampled_from(shardings)), draw(FEW)
    plan = Plan(
        tp=draw(FEW), cp=cp, dp=draw(st.sampled_from((2, 4, 8))), micro_batch=draw(FEW), sequence_parallel=False,
        cp_kind=draw(st.sampled_from(kinds)) if cp > 1 else "ring", sharding=sharding,
        shard=2 if sharding == "hsdp" else draw(st.sampled_from((1, 2))) if sharding == "shard-grad-op" else 1,
        recompute=draw(st.sampled_from(("none", "full"))),
    )  # fmt: skip
    job = Training(
        seq_len=512,
        global_batch=plan.dp * plan.micro_batch * draw(FEW),
        optimizer=draw(st.sampled_from(("adam", "sgd", "muon", "lion"))),
    )
    return model, plan, job


ZERO = flat_plans(("none", "zero1", "zero2", "zero3"), ("all-to-all",)).filter(lambda one: legal(*one))
SHARDED = flat_plans(("shard-grad-op", "fsdp", "hsdp"), ("ring", "all-gather")).filter(runs("accelerate"))
NARROW = st.sampled_from(("bf16", "bf16-grads16", "fp16", "fp16-grads16", "fp32", "amp-bf16", "amp-fp16"))


@MANY
@given(case=ZERO.filter(lambda one: one[1].cp == 1 or one[1].tp == 1), precision=NARROW, overlap=st.booleans())
def test_deepspeed_brings_back_every_field(case: tuple[Model, Plan, Training], precision: str, overlap: bool) -> None:
    """A legal plan written as DeepSpeed's configuration is read back as it was; recompute is the script's to say."""
    model, plan = case[0], case[1]
    precision += "-grads16" * (plan.sharding == "none" and precision in ("bf16", "fp16"))  # all that it has there
    job = replace(case[2], precision=precision)
    stack = replace(find_stack("deepspeed"), overlap_gradients=overlap)
    found = deepspeed.export(ExportCase(model=model, cluster=machines(plan), plan=plan, job=job, stack=stack))
    back = deepspeed.read(found.files["ds_config.json"], around=ImportContext(num_devices=plan.num_devices))
    assert canonical_plan(back.plan) == canonical_plan(replace(plan, recompute="none"))
    assert (back.job.global_batch, back.job.precision, back.job.optimizer) == (
        job.global_batch, precision, job.optimizer)  # fmt: skip
    assert back.accumulation * plan.dp * plan.micro_batch == job.global_batch
    assert back.stack == stack
    assert not back.unknown and not back.ignored


@MANY
@given(case=SHARDED, precision=st.sampled_from(("amp-bf16", "amp-fp16", "fp32")))
def test_accelerate_brings_back_every_field(case: tuple[Model, Plan, Training], precision: str) -> None:
    """A legal sharded plan written as accelerate's YAML is read back as it was; batches are the script's to say."""
    model, plan, job = case[0], case[1], replace(case[2], precision=precision)
    whole = ExportCase(model=model, cluster=machines(plan), plan=plan, job=job, stack=find_stack("accelerate"))
    back = fsdp.read(fsdp.export(whole).files["accelerate.yaml"])
    assert canonical_plan(back.plan) == canonical_plan(replace(plan, micro_batch=0))
    assert back.job.precision == precision
    assert (back.num_devices, back.stack.name) == (plan.num_devices, "accelerate")
    assert not back.unknown


CHUNKED = ("interleaved", "looped-bfs", "interleaved-zb", "zb-v", "dualpipe-v")


@st.composite
def torchtitan_plans(draw: st.DrawFn) -> tuple[Model, Plan, Training]:
    """Return a model of torchtitan or transformers, a plan that FSDP2 runs, and a job."""
    model = load_model(draw(st.sampled_from(("llama-3.1-8b", "qwen2.5-7b", "qwen3-30b-a3b", "gpt-oss-20b"))))
    experts = any(getattr(block.feed_forward, "experts", 0) for block in model.kinds)
    tp, cp, pp, vpp = draw(FEW), draw(st.sampled_from((1, 2))), draw(FEW), draw(st.sampled_from((1, 2)))
    vpp, ep = vpp if pp > 1 else 1, draw(FEW) if experts else 1
    sharding = draw(st.sampled_from(("none", "fsdp", "shard-grad-op", "hsdp")))
    plan = Plan(
        tp=tp, cp=cp, pp=pp, vpp=vpp, dp=draw(st.sampled_from((1, 2, 4, 8))), ep=ep,
        etp=draw(st.sampled_from((1, tp))) if ep > 1 else tp if experts else 1, micro_batch=draw(FEW),
        sequence_parallel=tp > 1,
        cp_kind=draw(st.sampled_from(("ring", "all-gather"))), sharding=sharding, shard=2 if sharding == "hsdp" else 1,
        schedule=draw(st.sampled_from(CHUNKED if vpp > 1 else ("1f1b", "gpipe"))) if pp > 1 else "1f1b",
        recompute=draw(st.sampled_from(("none", "full"))), stage_layers=draw(cuts(model.num_layers, pp * vpp)),
    )  # fmt: skip
    job = Training(
        seq_len=512,
        global_batch=plan.dp * plan.micro_batch * 2 * plan.pp * draw(FEW),
        precision=draw(st.sampled_from(("amp-bf16", "bf16-pure", "fp32", "fp8-amp"))),
    )
    return model, plan, job


@MANY
@given(
    case=torchtitan_plans().filter(runs("fsdp2")),
    name=st.sampled_from(("fsdp2", "fsdp2-compiled-loss")),
    runs=st.sampled_from((1, 3)),
)
def test_torchtitan_brings_back_every_field(case: tuple[Model, Plan, Training], name: str, runs: int) -> None:
    """A plan that FSDP2 runs, written as torchtitan's TOML, is read back as it was: model, plan, job, local batches."""
    model, plan, job = case
    runs = runs if plan.pp > 1 else 1
    stack, job = find_stack(name), replace(job, global_batch=runs * job.global_batch)
    stack = replace(stack, settings=replace(stack.settings, pipeline_runs=runs))
    # Without copies or ranks that share context nothing is wrapped, and beside other ranks nothing cast.
    if plan.dp * plan.cp == 1:
        plan = replace(plan, sharding="none")
        job = replace(job, precision="fp32" if job.precision == "amp-bf16" and plan.tp * plan.pp > 1 else job.precision)
    found = torchtitan.export(ExportCase(model=model, cluster=machines(plan), plan=plan, job=job, stack=stack))
    (text,) = found.files.values()
    back = torchtitan.read(text, around=ImportContext(num_devices=plan.num_devices))
    assert canonical_plan(back.plan) == canonical_plan(plan)
    assert back.job == replace(job, token_budget=back.job.token_budget)
    assert back.model == model
    assert back.stack == stack
    assert not back.unknown


@MANY
@given(
    case=flat_plans(("none", "shard-grad-op", "fsdp", "hsdp"), ("ring", "all-gather")).filter(runs("transformers")),
    precision=st.sampled_from(("bf16-pure", "amp-bf16", "fp32")),
)
def test_transformers_accepts_what_its_stack_runs(case: tuple[Model, Plan, Training], precision: str) -> None:
    """A plan that transformers runs is written as a script with accelerate's file, its own reading being equal."""
    model, plan = case[0], case[1]
    job = replace(case[2], precision=precision, optimizer="adam")
    stack = find_stack("transformers")
    found = transformers.export(ExportCase(model=model, cluster=machines(plan), plan=plan, job=job, stack=stack))
    assert set(found.files) == {"train.sh", "accelerate.yaml"}
    back = fsdp.read(found.files["accelerate.yaml"])
    alone = plan.sharding == "none" and plan.recompute == "full"
    told = replace(plan, micro_batch=0, recompute="none" if alone else plan.recompute)
    assert canonical_plan(back.plan) == canonical_plan(told)
    assert f"--per_device_train_batch_size {plan.micro_batch}" in found.files["train.sh"]


REFUSED: tuple[tuple[str, dict[str, Any], dict[str, Any], set[str]], ...] = (
    ("megatron", {"schedule": "dualpipe", "pp": 2}, {}, {"schedule"}),
    ("megatron", {"recompute": "attention"}, {}, {"recompute"}),
    ("megatron", {"sharding": "fsdp", "pp": 2}, {"optimizer": "lion"}, {"pp", "optimizer"}),
    ("torchtitan", {"sharding": "fsdp", "pp": 2, "schedule": "zb-h1"}, {}, {"schedule"}),
    ("torchtitan", {"tp": 2}, {"precision": "bf16"}, {"tp", "sequence_parallel", "precision"}),
    # One rank is not wrapped, and beside other ranks nothing is cast.
    ("torchtitan", {"sharding": "fsdp", "dp": 1}, {}, {"sharding"}),
    ("torchtitan", {"dp": 1, "tp": 2, "sequence_parallel": True}, {}, {"precision"}),
    ("torchtitan", {"sharding": "fsdp", "dp": 1, "pp": 2}, {}, {"sharding", "precision"}),
    ("transformers", {"sharding": "zero1", "pp": 2}, {"precision": "bf16"}, {"sharding", "pp", "precision"}),
    ("megatron", {"layout": "summa", "tp2": 2}, {}, {"layout", "tp2"}),
    ("megatron", {}, {"optimizer": "adam8bit", "precision": "bf16-pure"}, {"optimizer", "precision"}),
    ("deepspeed", {"pp": 2}, {"optimizer": "adam8bit"}, {"pp", "optimizer"}),
    ("deepspeed", {"sharding": "shard-grad-op"}, {}, {"sharding"}),
    ("deepspeed", {"sharding": "hsdp", "shard": 2, "dp": 4}, {}, {"sharding", "shard"}),
    ("fsdp", {"sharding": "fsdp", "cp": 2, "cp_kind": "all-to-all"}, {}, {"cp_kind"}),
    ("deepspeed", {"recompute": "selective"}, {"precision": "fp8"}, {"recompute", "precision"}),
    ("fsdp", {"pp": 2, "sharding": "fsdp"}, {"precision": "bf16"}, {"pp", "precision"}),
    ("fsdp", {"sharding": "zero1"}, {}, {"sharding"}),
)
EXPORTS = {"megatron": (export, "megatron"), "deepspeed": (deepspeed.export, "deepspeed"),
           "fsdp": (fsdp.export, "accelerate"), "torchtitan": (torchtitan.export, "fsdp2"),
           "transformers": (transformers.export, "transformers")}  # fmt: skip


@pytest.mark.parametrize(("target", "plan", "job", "named"), REFUSED)
def test_what_cannot_be_said_is_refused_by_name(
    target: str, plan: dict[str, Any], job: dict[str, Any], named: set[str]
) -> None:
    """Every field that a target has no word for is named, all at once, and no other."""
    write, stack = EXPORTS[target]
    whole = Plan(**({"dp": 2, "sequence_parallel": False} | plan))
    precision = {"megatron": "bf16", "deepspeed": "bf16-grads16", "transformers": "bf16-pure"}.get(target, "amp-bf16")
    case = ExportCase(
        model=load_model("llama-3.1-8b"), cluster=machines(whole), plan=whole, stack=find_stack(stack),
        job=Training(**({"seq_len": 512, "global_batch": 16, "precision": precision} | job)),
    )  # fmt: skip
    with pytest.raises(InputError) as caught:
        write(case)
    assert {p.field for p in caught.value.problems} == named


@pytest.mark.parametrize("name", ("olmo-2-7b", "pythia-1b", "opt-1.3b", "bert-base", "llama-4-scout"))
def test_models_that_megatron_has_not_are_refused_by_field(name: str) -> None:
    """A model with parts that Megatron-LM has no argument for is refused, naming the part."""
    case = ExportCase(
        model=load_model(name), cluster=Cluster.parse("1xh100-sxm-80gb"), plan=Plan(sequence_parallel=False),
        job=Training(seq_len=512, global_batch=1), stack=find_stack("megatron"),
    )  # fmt: skip
    with pytest.raises(InputError, match="cannot be said to Megatron-LM"):
        export(case)


@pytest.mark.parametrize(
    ("name", "mixer"),
    [("jamba-v0.1", "Mamba1"), ("rwkv-4-169m", "Rwkv"), ("bamba-9b", "Mamba2"), ("mamba-130m", "Mamba1")],
)
def test_models_of_layers_that_megatron_has_not_are_refused_as_a_whole(name: str, mixer: str) -> None:
    """No argument changes what a layer is: the error names it, and the targets that take any model."""
    case = ExportCase(
        model=load_model(name), cluster=Cluster.parse("1xh100-sxm-80gb"), plan=Plan(sequence_parallel=False),
        job=Training(seq_len=512, global_batch=1), stack=find_stack("megatron"),
    )  # fmt: skip
    with pytest.raises(InputError, match=f"for: {mixer}; export another model, or this one to deepspeed or fsdp"):
        export(case)
