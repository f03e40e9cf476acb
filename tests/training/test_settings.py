"""What a user sets of a framework and of dropout: which term of an answer it changes, which way, and by how much."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from command_line import run
from shardwise.answers._train_tree import step_tree
from shardwise.cost import Efficiencies, op_seconds, rates_of
from shardwise.errors import InputError
from shardwise.hardware import Cluster, find_device
from shardwise.ledger.traced import parts
from shardwise.models import load_model
from shardwise.ops.block import block_ops
from shardwise.ops.count import whole_layout
from shardwise.plans import Plan, Settings, Sharding, Training, find_stack, schedule_for
from shardwise.training import TrainingOptions, TrainReport, train

MODEL = load_model("llama-2-7b")
CLUSTER = Cluster.parse("16xa100-sxm-80gb")
PLAN = Plan(tp=2, pp=2, dp=0, micro_batch=1, sharding="distributed-optimizer")
FULL = replace(PLAN, recompute="full", sequence_parallel=False)
ZERO3 = Plan(dp=0, micro_batch=1, sharding="zero3")
JOB = Training(seq_len=4096, global_batch=64)
# A rank's stage has 16 layers, two micro-batches in flight, and half of every split width.
LAYERS, FLIGHT, T, D, F = 16, 2, 4096, 4096, 11008
TERMS = ("weights", "gradients", "optimizer", "activations", "logits", "recomputed", "buffers")


def ask(
    plan: Plan = PLAN, job: Training = JOB, efficiencies: Efficiencies | None = None, **settings: Any
) -> TrainReport:
    """Return the report of the model under some settings."""
    stack = replace(find_stack("megatron"), settings=Settings(**settings))
    return train(MODEL, CLUSTER, plan, job, TrainingOptions(stack=stack, efficiencies=efficiencies or Efficiencies()))


def terms(report: TrainReport) -> dict[str, float]:
    """Every term of the first stage's memory."""
    return {name: float(getattr(report.evaluation.memory[0], name)) for name in TERMS}


def changed(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """The terms that differ, and by how much."""
    return {name: after[name] - before[name] for name in before if after[name] != before[name]}


def kept(width: float) -> float:
    """Bytes in flight on a stage of what every layer keeps, `width` bytes a token."""
    return LAYERS * FLIGHT * T * width


@pytest.mark.parametrize(
    ("settings", "difference"),
    [
        ({"norm_bytes": 4}, kept(2 * (4 - 2) * D / 2)),
        ({"norm_bytes": 2}, 0),
        ({"norm_bytes": 1}, kept(2 * (1 - 2) * D / 2)),
        ({"mlp_input_bits": 8}, -kept(D / 2)),
        ({"activation_input_bits": 8}, -kept(2 * F / 2)),
        ({"mlp_down_input_bits": 4}, -kept(1.5 * F / 2)),
        ({"mlp_input_bits": 8, "activation_input_bits": 8, "mlp_down_input_bits": 8}, -kept(D / 2 + 3 * F / 2)),
    ],
)
def test_widths_change_what_layers_keep(settings: dict[str, Any], difference: float) -> None:
    """Of all terms of memory activations alone change, to the byte, and wider or further copies cost their traffic."""
    plain, other = ask(), ask(**settings)
    expected = {"activations": difference} if difference else {}
    assert changed(terms(plain), terms(other)) == expected
    if settings.get("norm_bytes") != 1:  # Half a copy more is written forward, and as much less read backward.
        assert (other.step_seconds > plain.step_seconds) is bool(difference)


@pytest.mark.parametrize(
    ("job", "difference"),
    [
        ({"hidden_dropout": True}, kept(D / 2) + FLIGHT * T * D / 2),
        ({"attention_dropout": True}, kept(D / 2)),
        ({"softmax_dropout": True}, 0),
        ({"dropout": True}, kept(2 * D / 2) + FLIGHT * T * D / 2),
        ({"dropout": True, "attention_dropout": False, "hidden_dropout": False}, 0),
    ],
)
def test_dropout_keeps_a_byte_where_it_is(job: dict[str, Any], difference: float) -> None:
    """A mask of a byte an element where dropout is; fused attention makes its own again from a seed."""
    plain, other = ask(), ask(job=replace(JOB, **job))
    assert changed(terms(plain), terms(other)) == ({"activations": difference} if difference else {})
    assert (other.step_seconds > plain.step_seconds) is bool(difference)


@pytest.mark.parametrize(
    "job", [{"softmax_dropout": True}, {"dropout": True, "hidden_dropout": False, "attention_dropout": False}]
)
def test_unfused_attention_keeps_the_masks_of_its_scores(job: dict[str, Any]) -> None:
    """Megatron's unfused attention keeps a mask and a dropped copy of every score: 3 bytes (arXiv:2205.05198)."""
    options = TrainingOptions(stack=find_stack("megatron-scores"))
    plain, other = (train(MODEL, CLUSTER, PLAN, replace(JOB, precision="bf16", **more), options) for more in ({}, job))
    assert changed(terms(plain), terms(other)) == {"activations": kept(3 * 32 / 2 * T)}


def test_the_activation_may_run_again_alone() -> None:
    """The module mlp_act keeps the input of the activation and makes its product again: F bytes x 2 a token less."""
    plain, other = ask(), ask(replace(PLAN, modules=("mlp_act",)))
    difference = changed(terms(plain), terms(other))
    assert difference == {"activations": -kept(2 * F / 2), "recomputed": 2 * T * F / 2}
    assert other.step_seconds > plain.step_seconds


def test_partitioned_checkpoints_are_split_over_tp() -> None:
    """ZeRO-R keeps a share of each layer's input, and gathers it once a layer and micro-batch."""
    plain, other = ask(FULL), ask(FULL, partition_activations=True)
    assert changed(terms(plain), terms(other)) == {"activations": -kept(2 * D / 2)}
    exposed = [step_tree(r)["exposed_seconds"] for r in (plain, other)]
    assert exposed[1]["tp"] > exposed[0]["tp"]


@pytest.mark.parametrize(("elements", "held"), [(5e8, 5e8), (1e12, None)])
def test_buckets_are_buffers(elements: float, held: float | None) -> None:
    """A bucket of gradients in fp32 and one of weights in 16 bits, never larger than the stage."""
    plain, other = ask(), ask(bucket_elements=elements)
    stage = terms(plain)["weights"] / 2
    assert changed(terms(plain), terms(other)) == {"buffers": pytest.approx((4 + 2) * (held or stage))}
    assert other.step_seconds == plain.step_seconds


@pytest.mark.parametrize(
    ("sharding", "hides", "held"), [("zero2", True, 2), ("zero2", False, 1), ("zero3", True, 1), ("none", True, 0)]
)
def test_zero_s_own_buckets_are_whole(sharding: Sharding, hides: bool, held: int) -> None:
    """DeepSpeed's take 2 bytes for each of 1e9 elements, two under overlap_comm before ZeRO-3, however few train."""
    plan = Plan(dp=0, micro_batch=1, sharding=sharding, recompute="full")
    job = replace(JOB, adapter="lora", rank=8)
    stack = replace(find_stack("deepspeed"), overlap_gradients=hides)
    found = [
        train(MODEL, CLUSTER, plan, job, TrainingOptions(stack=replace(stack, settings=s))).evaluation.memory[0].buffers
        for s in (Settings(bucket_elements=1e9), Settings(bucket_elements=5e8))
    ]
    assert found[0] - found[1] == held * 2 * 5e8


@pytest.mark.parametrize("live", [1.0, 5e8, 1e9, 1e12])
def test_zero3_keeps_live_parameters(live: float) -> None:
    """So many parameters of the layers are gathered at once instead of two layers: a layer at least, all at most."""
    plain, other = ask(ZERO3), ask(ZERO3, max_live_parameters=live)
    layer = 4 * D * D + 3 * D * F + 2 * D
    gathered = max(min(live, 32 * layer), layer)
    found = changed(terms(plain), terms(other))
    assert found == {"buffers": pytest.approx(2 * (gathered - 2 * layer))}


def test_memory_beside_all_else_is_the_device_s() -> None:
    """Miscellaneous bytes are on the device, beside what the allocator holds."""
    plain, other = ask(), ask(misc_bytes=5e9)
    assert changed(terms(plain), terms(other)) == {}
    assert other.device_bytes - plain.device_bytes == 5e9
    assert other.reserved_bytes == plain.reserved_bytes


@pytest.mark.parametrize(
    ("plan", "settings"),
    [
        (PLAN, {"norm_bytes": 4}),
        (PLAN, {"mlp_down_input_bits": 8}),
        (FULL, {"partition_activations": True}),
        (ZERO3, {"max_live_parameters": 1e9}),
        (PLAN, {"bucket_elements": 5e8}),
    ],
)
def test_the_explained_tree_has_what_is_set(plan: Plan, settings: dict[str, Any]) -> None:
    """Memory and step open into terms that add up to them, settings included."""
    report = ask(plan, **settings)
    for what, value in (("memory", report.evaluation.peak), ("step", report.step_seconds)):
        traced = report.explain(what)
        assert float(traced) == value
        assert sum(p.amount for p in parts(traced)) == pytest.approx(value)


@pytest.mark.parametrize("axis", ["tp", "cp", "ep", "dp", "pp"])
def test_an_axis_may_be_exposed_alone(axis: str) -> None:
    """Hidden seconds of the axis become exposed, those of the others stay; all axes together are no overlap at all."""
    plans = {
        "cp": (MODEL, Plan(tp=2, cp=2, dp=0, micro_batch=1)),
        "ep": (load_model("mixtral-8x7b"), Plan(pp=2, ep=8, dp=0, micro_batch=1, schedule="dualpipe")),
        "pp": (MODEL, Plan(pp=4, vpp=2, dp=0, micro_batch=1, schedule="interleaved")),
    }
    model, plan = plans.get(axis, (MODEL, PLAN))

    def run(**options: Any) -> TrainReport:
        return train(model, CLUSTER, plan, JOB, TrainingOptions(**options))

    plain, alone = run(), run(efficiencies=Efficiencies(exposed_axes=(axis,)))
    together = run(efficiencies=Efficiencies(exposed_axes=("tp", "cp", "ep", "dp", "pp")))
    assert plain.step_seconds < alone.step_seconds <= run(overlap=False).step_seconds
    assert together.step_seconds == run(overlap=False).step_seconds
    hidden = step_tree(alone)["hidden_seconds"]
    assert not hidden.get(axis)
    assert terms(plain) == terms(alone)


@pytest.mark.parametrize(
    ("plan", "settings", "word"),
    [
        (PLAN, {"partition_activations": True}, "partition_activations"),
        (replace(FULL, sequence_parallel=True), {"partition_activations": True}, "partition_activations"),
        (replace(FULL, tp=1), {"partition_activations": True}, "partition_activations"),
        (replace(PLAN, sharding="none"), {"bucket_elements": 5e8}, "bucket_elements"),
        (PLAN, {"max_live_parameters": 1e9}, "max_live_parameters"),
        (PLAN, {"fp8_recipe": "blockwise"}, "fp8_recipe blockwise"),
        (PLAN, {"fp8_param_gather": True}, "fp8_param_gather"),
        (replace(PLAN, pp=1), {"pipeline_runs": 2}, "pipeline_runs 2"),
        (PLAN, {"bf16_last_layers": 2}, "bf16_last_layers"),
        (PLAN, {"bf16_first_layers": 2}, "bf16_first_layers"),
        (PLAN, {"bf16_mtp_layers": True}, "bf16_mtp_layers"),
        (PLAN, {"sync_each_batch": True}, "sync_each_batch"),
    ],
)
def test_a_setting_without_effect_is_said(plan: Plan, settings: dict[str, Any], word: str) -> None:
    """What changes nothing under a plan changes nothing, and the answer says so and why."""
    plain, other = ask(plan), ask(plan, **settings)
    assert (terms(other), other.step_seconds) == (terms(plain), plain.step_seconds)
    assert any(line.startswith(f"{word}: no effect") for line in other.assumptions)


@pytest.mark.parametrize(
    ("model", "stack", "words", "idle"),
    [
        ("llama-3.2-1b", "transformers", ("--norm-bytes", "4"), "norm_bytes 4"),
        ("llama-3.2-1b", "torchtitan", ("--norm-bytes", "2"), "norm_bytes 2"),
        ("gpt2", "transformers", ("--norm-bytes", "4"), ""),
        ("gpt2", "transformers", ("--softmax-dropout",), "softmax_dropout"),
        ("gpt2", "megatron-scores", ("--softmax-dropout", "--no-dropout"), ""),
    ],
)
def test_what_kernels_have_no_place_for_is_said(model: str, stack: str, words: tuple[str, ...], idle: str) -> None:
    """Norms written in Python keep copies of their own, and fused attention keeps no mask: flags of these say so."""
    case = ("train", model, "--on", "1xh100", "--stack", stack, "--seq-len", "1024", "--global-batch", "4", "--json")
    off = ("--no-dropout",) if "--no-dropout" in words else ()
    plain, other = run(*case, *off).tree, run(*case, *words).tree
    assert (other["memory"] == plain["memory"] and other["step_seconds"] == plain["step_seconds"]) == bool(idle)
    said = [line.split(":")[0] for line in other["assumptions"] if "no effect" in line]
    assert said == ([idle] if idle else [])


@pytest.mark.parametrize(
    "settings",
    [
        {"norm_bytes": 3},
        {"mlp_input_bits": 33},
        {"mlp_down_input_bits": True},
        {"activation_input_bits": -1},
        {"bucket_elements": float("nan")},
        {"max_live_parameters": -1},
        {"misc_bytes": float("inf")},
        {"partition_activations": "yes"},
        {"pipeline_runs": 0},
        {"bf16_last_layers": -1},
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any]) -> None:
    """Each wrong setting is a problem of its field."""
    with pytest.raises(InputError) as caught:
        ask(**settings)
    assert {p.field for p in caught.value.problems} == set(settings)


@pytest.mark.parametrize(("tokens", "told"), [(1e9, True), (20 * 6_738_415_616, False), (1e13, False), (0, False)])
def test_few_tokens_a_parameter_are_remarked(tokens: float, told: bool) -> None:
    """A budget under 20 tokens a parameter is said to be under that of compute-optimal training."""
    report = ask(job=replace(JOB, token_budget=tokens))
    assert any("compute-optimal" in line for line in report.assumptions) is told
    tuned = ask(job=replace(JOB, token_budget=tokens, adapter="lora"))
    assert not any("compute-optimal" in line for line in tuned.assumptions)


def test_nothing_set_changes_nothing() -> None:
    """Settings are off: the default answer is that of the framework, to the byte and the second."""
    plain = train(MODEL, CLUSTER, PLAN, JOB, TrainingOptions(stack=find_stack("megatron")))
    assert terms(plain) == terms(ask())
    assert (plain.device_bytes, plain.step_seconds) == (ask().device_bytes, ask().step_seconds)


@pytest.mark.parametrize("device", ["a100-sxm-80gb", "h100-sxm-80gb", "mi300x"])
def test_ideal_is_the_roofline_itself(device: str) -> None:
    """With every efficiency at one an operator takes its FLOPs at the peak or its bytes at the full bandwidth."""
    found = find_device(device).device
    rates = rates_of(found, "bf16", 5e-6, Efficiencies(ideal=True))
    peak, bandwidth = float(found.peak_flops("bf16")), found.memory_bytes_per_second
    for op in block_ops(whole_layout(1, 512), MODEL.layers[0], MODEL.hidden):
        seconds = op_seconds(rates, op)
        assert seconds.forward == pytest.approx(max(op.flops / peak, op.forward_bytes / bandwidth))
        assert seconds.backward_input == pytest.approx(max(op.backward_flops / peak, op.backward_bytes / bandwidth))
        assert seconds.backward_weight == pytest.approx(max(op.weight_flops / peak, op.weight_bytes / bandwidth))


def test_nothing_is_faster_than_the_ideal_step() -> None:
    """The ideal step is below the fitted one and above what its FLOPs take at the peak."""
    ideal = ask(efficiencies=Efficiencies(ideal=True))
    assert ideal.model_flops_per_second_per_gpu < 312e12
    assert ideal.step_seconds < ask().step_seconds


def test_scales_by_row_cost_a_pass_for_the_weight_gradient() -> None:
    """0.135 s for 8,192 tokens of Llama-3-8B on H100 at 2.4 TB/s (torchtitan commit 7a04053); refused by Megatron."""
    plan, job = Plan(dp=8, micro_batch=1, sharding="fsdp"), Training(seq_len=8192, global_batch=8, precision="fp8-amp")
    stack, cluster = find_stack("fsdp2-compiled"), Cluster.parse("8xh100-sxm-80gb")
    seconds = [
        train(load_model("llama-3-8b"), cluster, plan, job,
              TrainingOptions(stack=replace(stack, settings=Settings(fp8_recipe=recipe)))).step_seconds
        for recipe in ("rowwise", "tensorwise", "")
    ]  # fmt: skip
    assert seconds[1] == seconds[2]
    assert (seconds[0] - seconds[1]) * 3.35 / 2.4 == pytest.approx(0.135, rel=0.1)
    with pytest.raises(InputError, match="torchao"):
        ask(fp8_recipe="rowwise")


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 2)])
def test_a_pipeline_drains_at_the_end_of_each_of_its_runs(pp: int, vpp: int) -> None:
    """Four runs are four pipelines of a fourth of the batch, drawn one after the other; parts of a run are refused."""
    plan = replace(PLAN, pp=pp, vpp=vpp, schedule=schedule_for(vpp))
    often, once = ask(plan, pipeline_runs=4), ask(plan, replace(JOB, global_batch=JOB.global_batch // 4))
    assert often.evaluation.step.pipeline.total == pytest.approx(4 * once.evaluation.step.pipeline.total)
    assert terms(often) == terms(once) and often.step_seconds > ask(plan).step_seconds
    assert abs(often.timeline().difference) < often.timeline().tolerance
    with pytest.raises(InputError, match="which 3 runs of the pipeline must divide"):
        ask(plan, pipeline_runs=3)


@pytest.mark.parametrize("name", ["bf16_first_layers", "bf16_last_layers"])
def test_the_first_and_last_layers_may_stay_in_16_bits(name: str) -> None:
    """Each of them takes the seconds of a layer in 16 bits, and all of them those of all."""
    job, plan, cluster = replace(JOB, precision="fp8"), replace(PLAN, pp=1), Cluster.parse("16xh100-sxm-80gb")
    stacks = (replace(find_stack("megatron"), settings=Settings(**{name: n})) for n in (0, 4, 8))
    steps = [train(MODEL, cluster, plan, job, TrainingOptions(stack=one)).evaluation.step for one in stacks]
    none, four, eight = (step.pipeline.total for step in steps)
    assert none < four < eight == pytest.approx(2 * four - none)


@pytest.mark.parametrize(("seq_len", "told"), [(4096, False), (4097, True)])
def test_sequences_beyond_the_trained_context_are_said_to_be(seq_len: int, told: bool) -> None:
    """A sequence longer than what a model was trained for is assumed to be one that it can be trained on."""
    job = Training(seq_len=seq_len, global_batch=8)
    report = train(load_model("llama-2-7b"), Cluster.parse("8xh100-sxm-80gb"), Plan(dp=8, sharding="fsdp"), job)
    assert (f"{seq_len} tokens exceed the trained context of 4096" in report.assumptions) is told
