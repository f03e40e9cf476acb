"""What frameworks overlap, fuse and pass over: which seconds of a step that changes, and by how much."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from measured_rows import published
from shardwise.cost import Efficiencies, rates_of
from shardwise.hardware import Cluster, find_device
from shardwise.models import load_model
from shardwise.ops.block import block_ops
from shardwise.ops.core import AttentionCore, exchange_copies
from shardwise.ops.count import whole_layout
from shardwise.plans import Plan, Training, find_stack
from shardwise.training import TrainingOptions, TrainReport, train
from shardwise.training._overlap import covering_passes
from shardwise.training._step import axis_seconds

JOB = Training(seq_len=4096, global_batch=128)
DENSE = Plan(tp=4, dp=0, micro_batch=1, sequence_parallel=True, sharding="distributed-optimizer")
MIXTURE = Plan(pp=4, vpp=2, ep=32, dp=0, micro_batch=1, schedule="interleaved", sharding="distributed-optimizer")
WIDE = Cluster.parse("128xb200-sxm-180gb")


# These steps are those of the device: a host that launches slowly would be all of the short ones.
SILENT = {"module_launch_seconds": 0.0, "gradient_launch_seconds": 0.0}


def ask(stack: str, plan: Plan = DENSE, model: str = "llama-3-8b", **changes: Any) -> TrainReport:
    """Return the report of a model on B200 under a changed stack, with a host that is never behind."""
    options = TrainingOptions(stack=replace(find_stack(stack), **(SILENT | changes)))
    cluster = Cluster.parse("32xb200-sxm-180gb" if plan.ep == 1 else "128xb200-sxm-180gb")
    return train(load_model(model), cluster, plan, JOB, options)


def test_gradients_wait_where_nothing_overlaps() -> None:
    """Megatron-LM's own launcher waits for all of its gradients and weights, Megatron-Core's recipes for a part."""
    plain, core = (ask(name).evaluation.step for name in ("megatron-lm", "megatron"))
    assert plain.gradients_hidden == plain.parameters_hidden == 0
    assert plain.gradients_exposed > core.gradients_exposed
    assert plain.parameters_exposed > core.parameters_exposed
    assert plain.total > core.total


def test_the_input_table_is_a_bucket_that_nothing_covers() -> None:
    """Of two larger tables the input's waits whole: its gradient is done last, its weights are read first."""
    plan, options = Plan(dp=0, micro_batch=1, sharding="distributed-optimizer"), TrainingOptions(stack="megatron")
    large = load_model("llama-3-8b")
    reports = (
        train(one, WIDE, plan, replace(JOB, seq_len=16384), options) for one in (replace(large, vocab=32000), large)
    )
    few, many = (report.evaluation.step for report in reports)
    shown = many.gradients_exposed - few.gradients_exposed
    assert shown > 0.35 * (shown + many.gradients_hidden - few.gradients_hidden)
    shown = many.parameters_exposed - few.parameters_exposed
    assert shown > 0.35 * (shown + many.parameters_hidden - few.parameters_hidden)


def test_chunks_of_an_interleaved_pipeline_cover_each_others_gradients() -> None:
    """Of 2 chunks on 4 stages each waits beside 2.5 passes of a micro-batch instead of one; plain 1F1B keeps to one."""
    plain = Plan(pp=4, dp=0, micro_batch=1, sharding="distributed-optimizer")
    mixed = replace(plain, vpp=2, schedule="interleaved")
    model, cluster, short = load_model("llama-3-8b"), Cluster.parse("32xb200-sxm-180gb"), replace(JOB, seq_len=256)
    options = TrainingOptions(stack=replace(find_stack("megatron"), **SILENT))  # type: ignore[arg-type]
    steps = [train(model, cluster, plan, short, options).evaluation for plan in (plain, mixed)]
    assert [covering_passes(e.sizes, p.schedule) for e, p in zip(steps, (plain, mixed), strict=True)] == [1, 2.5]
    assert steps[1].step.gradients_exposed < steps[0].step.gradients_exposed
    assert steps[1].step.parameters_exposed < steps[0].step.parameters_exposed


def test_passes_over_the_gradient_buffer_cost_its_bytes() -> None:
    """Each pass moves the fp32 gradients of all parameters of a rank, whatever the optimizer's sharding."""
    bare, passed = (ask("megatron", buffer_passes=n) for n in (0.0, 4.0))
    state = passed.evaluation.memory[0]
    bandwidth = passed.evaluation.rates.memory_bytes
    more = passed.evaluation.step.optimizer - bare.evaluation.step.optimizer
    assert more == pytest.approx(4 * state.gradients / bandwidth, rel=1e-6)


def test_copies_of_the_update_cost_bytes_of_the_shard() -> None:
    """What is copied beside the optimizer is the shard's: twice the bytes, twice the seconds."""
    seconds = [ask("megatron", update_copy_bytes=n).evaluation.step.optimizer for n in (0.0, 12.0, 24.0)]
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0], rel=1e-6)
    assert seconds[1] > seconds[0]


def test_user_buffers_hide_messages_of_tensor_parallelism() -> None:
    """Pipelined with products, messages wait for a part at least and less than they did; nothing is sent less."""
    apart, beside = (ask("megatron", overlap_tensor=on) for on in (False, True))
    waits, hidden = zip(*(axis_seconds(r.evaluation.step) for r in (apart, beside)), strict=True)
    assert 0 < waits[1]["tp"] < waits[0]["tp"]
    assert hidden[1]["tp"] > hidden[0]["tp"]
    assert beside.step_seconds < apart.step_seconds


@pytest.mark.parametrize(
    ("when", "ep", "hides"),
    [("never", 32, False), ("always", 8, True), ("between nodes", 32, True), ("between nodes", 8, False)],
)
def test_expert_messages_hide_beside_another_micro_batch(when: str, ep: int, hides: bool) -> None:
    """Messages to experts run beside compute where the stack does that: always, or where they leave the node."""
    plan = replace(MIXTURE, ep=ep)
    apart, beside = (ask("megatron", plan, "qwen3-30b-a3b", overlap_experts=w) for w in ("never", when))
    waits = [axis_seconds(r.evaluation.step)[0]["ep"] for r in (apart, beside)]
    assert (waits[1] < waits[0]) == hides
    assert (beside.step_seconds < apart.step_seconds) == hides


def test_a_pass_ahead_of_experts_holds_one_more_piece() -> None:
    """Where messages of experts run beside the next micro-batch, a stage holds one more of its pieces."""
    apart, beside = (ask("megatron", MIXTURE, "qwen3-30b-a3b", overlap_experts=w) for w in ("never", "always"))
    held = [r.evaluation.memory[-1].in_flight for r in (apart, beside)]
    assert held[1] - held[0] == pytest.approx(1 / MIXTURE.vpp)


def test_a_lone_micro_batch_hides_no_message_of_experts() -> None:
    """One micro-batch has no other beside it; of four on one stage three have, and the last has one backward alone."""
    plan, lone = Plan(ep=32, dp=0, micro_batch=1, sharding="distributed-optimizer"), []
    for batch in (128, 512):
        job = Training(seq_len=4096, global_batch=batch)
        stacks = [replace(find_stack("megatron"), overlap_experts=w) for w in ("never", "always")]
        steps = [train(load_model("qwen3-30b-a3b"), WIDE, plan, job, TrainingOptions(stack=s)) for s in stacks]
        lone.append(steps[0].evaluation.step.pipeline.total - steps[1].evaluation.step.pipeline.total)
    assert lone[0] == pytest.approx(0, abs=1e-9) and lone[1] > 0


def test_expert_messages_between_nodes_wait_without_chunks() -> None:
    """Without interleaving no other micro-batch is at hand, and expert messages wait."""
    plan = replace(MIXTURE, vpp=1, schedule="1f1b")
    steps = [ask("megatron", plan, "qwen3-30b-a3b", overlap_experts=w).step_seconds for w in ("never", "between nodes")]
    assert steps[0] == steps[1]


def test_one_kernel_for_all_experts_runs_at_the_rate_of_products() -> None:
    """The fused kernel of the experts starts once, where libraries start a product for each expert."""
    device = find_device("gb300").device
    library, fused = (rates_of(device, "fp8", 0.0, Efficiencies(), ("", k, "")) for k in ("", "fused"))
    assert library.grouped_flops == fused.grouped_flops == pytest.approx(fused.matmul_flops, rel=0.1)
    assert fused.grouped_each == 0 < library.grouped_each


@pytest.mark.parametrize(
    ("device", "pass_", "groups", "shape", "fraction"),
    [
        ("b200-sxm-180gb", "fwd", 256, (128, 4096, 7168), 0.208),
        ("b200-sxm-180gb", "fwd", 64, (512, 4096, 7168), 0.367),
        ("b200-sxm-180gb", "bwd_input", 20, (1232, 5120, 1536), 0.389),
        ("b200-sxm-180gb", "fwd", 40, (2460, 3072, 5120), 0.487),
        ("b200-sxm-180gb", "bwd_weight", 256, (128, 4096, 7168), 0.077),
        ("b200-sxm-180gb", "bwd_weight", 40, (2460, 3072, 5120), 0.417),
        ("a100-pcie-80gb", "fwd", 20, (1232, 5120, 1536), 0.675),
    ],
)
def test_small_groups_are_slow(
    tmp_path: Path, device: str, pass_: str, groups: int, shape: tuple[int, int, int], fraction: float
) -> None:
    """Rows of grouped products reach the measured share of the peak within 20 %: few rows wait for weights and starts.

    SimuMax configs/system/b200_bf16_ceperm.json and a100_pcie.json (github.com/MooreThreads/SimuMax).
    """
    row = {"op": "grouped_matmul", "device": device, "stage": pass_, "num_groups": groups, "main_grad_dtype": "fp32"}
    row |= {**dict(zip("mnk", shape, strict=True)), "dtype": "bf16", "achieved_fraction": fraction}
    error = published(tmp_path, {word: str(cell) for word, cell in row.items()}).relative_error
    assert error == pytest.approx(0, abs=0.2)


def test_grouped_products_scale_with_the_products_of_the_device() -> None:
    """Grouped products were measured on B200: GB300 reaches as much more of its peak as its dense products do."""
    share = {}
    for name in ("b200-sxm-180gb", "gb300"):
        device = find_device(name).device
        rates = rates_of(device, "bf16", 0.0, Efficiencies())
        share[name] = rates.grouped_flops / rates.matmul_flops
    assert share["gb300"] == pytest.approx(share["b200-sxm-180gb"], rel=1e-9)


def test_eight_bits_last_at_lower_clocks_too() -> None:
    """More power keeps more of the clock: of the same family GB300 reaches a larger share of its 8-bit peak."""
    devices = [find_device(name).device for name in ("b200-sxm-180gb", "gb300")]
    shares = [rates_of(d, "fp8", 0.0, Efficiencies()).matmul_flops / d.peak_flops("fp8") for d in devices]
    assert shares[0] < shares[1]


def test_biases_of_experts_are_added_apart_in_megatron() -> None:
    """Megatron-Core adds the second bias of experts outside their products, in training alone."""
    model = load_model("gpt-oss-120b")
    block = model.layers[0]
    found = {}
    for name in ("megatron", "transformers"):
        y = whole_layout(1, 128, stack=name)
        y = replace(y, work=replace(y.work, phase="train"))
        found[name] = [op for op in block_ops(y, block, model.hidden) if op.name.endswith("experts.bias")]
    assert found["transformers"] == []
    (op,) = found["megatron"]
    rows = 128 * 4
    assert (op.forward_bytes, op.backward_bytes) == (28 * rows * 2880, 40 * rows * 2880)


@pytest.mark.parametrize(("cp", "kind", "copies"), [(2, "all-to-all", 8), (1, "all-to-all", 0), (2, "ring", None)])
def test_an_exchange_of_heads_copies_each_tensor_twice_on_both_sides(cp: int, kind: str, copies: int | None) -> None:
    """Queries, keys, values and output are sorted by rank before an all-to-all and put in order behind it."""
    y = ask("megatron", replace(DENSE, cp=cp, cp_kind=kind)).evaluation.layout
    found = exchange_copies(y, AttentionCore(heads=8, kv_heads=2, key_dim=128, value_dim=128))
    assert [op.kernels for op in found] == ([] if copies is None else [copies])
    assert all(op.forward_bytes == 4 * 2 * y.tokens * 128 * (8 + 2 + 2 + 8) * (cp > 1) for op in found)


def test_buckets_overlap_all_layers_but_the_first() -> None:
    """Of gradients cut in L buckets the last stays exposed, and what the compute of L - 1 layers does not cover."""
    model, cluster = load_model("llama-3.1-8b"), Cluster.parse("16xa100-sxm-80gb", {"slow_bandwidth": "2GB/s"})
    report = train(model, cluster, Plan(dp=16), Training(seq_len=2048, global_batch=16))
    step, (stage,) = report.evaluation.step, report.evaluation.step.stages
    whole = step.gradients_exposed + step.gradients_hidden
    alone = train(
        model, cluster, Plan(dp=16), report.job, TrainingOptions(overlap=False)
    ).evaluation.step.gradients_exposed
    backward, layers = stage.backward_input + stage.backward_weight, model.num_layers
    assert step.gradients_hidden == pytest.approx(backward * (layers - 1) / layers)
    assert whole > alone > step.gradients_hidden


@pytest.mark.parametrize("adapter", ["lora", ""])
def test_units_of_adapters_leave_no_gather_to_hide(adapter: str) -> None:
    """FSDP1 keeps two units in flight: where both are matrices of adapters a layer's weights wait for the one before.

    AnswerDotAI/fsdp_qlora, two RTX 3090: 3.8 of 4.7 s of gathers show at four sequences of 2,048 tokens
    (benchmarks_03_2024.md, 1,366 s for 881 without sharding).
    """
    plan = Plan(dp=2, micro_batch=4, sharding="fsdp", recompute="full")
    job = Training(seq_len=2048, global_batch=8, adapter=adapter, precision="bf16-pure")
    stack = find_stack("fsdp-2024")
    late, ahead = (
        train(load_model("llama-2-7b"), Cluster.parse("2xrtx-4090"), plan, job, TrainingOptions(stack=one)).evaluation
        for one in (stack, replace(stack, fsdp_adapters=False))
    )
    shown, hidden = (axis_seconds(one.step)[0].get("dp", 0.0) for one in (late, ahead))
    if adapter:
        assert shown > 10 * hidden > 0
        assert late.step.total > 1.1 * ahead.step.total
    else:
        assert late.step.total == ahead.step.total
