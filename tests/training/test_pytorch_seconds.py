"""What PyTorch's own training stacks do beside the products: which seconds of a step that changes, and which way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.cost import Efficiencies, op_seconds, rates_of
from shardwise.cost._tiles import BandwidthShares, kind_of
from shardwise.hardware import Cluster, find_device
from shardwise.ledger.number import total
from shardwise.ledger.saved import recomputed_ops
from shardwise.models import load_model
from shardwise.ops.block import block_ops
from shardwise.ops.elementwise import Norm, module_norm
from shardwise.ops.head import loss
from shardwise.ops.inputs import LayoutOptions, ParallelSizes, TokenBatch
from shardwise.ops.layout import Layout, lay_out
from shardwise.plans import Plan, Settings, Training, find_stack
from shardwise.training import TrainingOptions, TrainReport, comm, train
from shardwise.training._ledger import ledger_of
from shardwise.training._parts import Recipe, owned

CLUSTER = Cluster.parse("16xa100-sxm-80gb")
JOB = Training(seq_len=2048, global_batch=64)
FSDP = Plan(dp=0, micro_batch=2, sharding="fsdp")
TENSOR = Plan(tp=8, dp=0, micro_batch=2, sharding="fsdp", sequence_parallel=True)
RATES = rates_of(find_device("a100-sxm-80gb").device, "bf16", 0.0, Efficiencies())
ONE = ParallelSizes(tp=1, tp2=1, cp=1, ep=1, etp=1, panels=1)


def ask(stack: str, plan: Plan = FSDP, model: str = "llama-2-7b", **changes: Any) -> TrainReport:
    """Return the report of a model under a changed stack."""
    return train(load_model(model), CLUSTER, plan, JOB, TrainingOptions(stack=replace(find_stack(stack), **changes)))


def layout(stack: str, **changes: Any) -> Layout[Any]:
    """Return the layout of one device under a changed stack."""
    return lay_out(ONE, TokenBatch(B=1, S=2048, context=0), LayoutOptions(stack=replace(find_stack(stack), **changes)))


def test_recompute_that_stops_early_saves_the_last_product() -> None:
    """Full recompute without reentrance runs everything of a layer again but its last product and its addition."""
    model, full = load_model("llama-2-7b"), replace(FSDP, recompute="full")
    early, whole = (ask("fsdp2", full, checkpoint_stops_early=b).evaluation.step.stages[0] for b in (True, False))
    y = lay_out(ONE, TokenBatch(B=2, S=2048, context=0), LayoutOptions(stack=find_stack("fsdp2")))
    last = block_ops(y, model.layers[0], model.hidden)[-2:]
    assert [op.name for op in last] == ["mlp.down", "add2"]
    saved = model.num_layers * sum(float(op_seconds(RATES, op).forward) for op in last)
    assert whole.recompute - early.recompute == pytest.approx(saved, rel=1e-3)


@pytest.mark.parametrize(
    ("stack", "sharding", "method", "early"),
    [
        # axolotl utils/config/__init__.py: use_reentrant True where rl is not set, core/builders/base.py: False else.
        ("axolotl", "none", "sft", False),
        ("axolotl", "fsdp", "sft", False),
        ("axolotl", "none", "dpo", True),
        # llamafactory model/model_utils/checkpointing.py: use_reentrant_gc, which FSDP version 2 takes away.
        ("llama-factory", "none", "sft", False),
        ("llama-factory", "fsdp", "sft", True),
        ("llama-factory-v1", "none", "sft", True),
        # ms-swift trainers/mixin.py _fix_gradient_checkpointing: is_dist() without DeepSpeed and FSDP.
        ("ms-swift", "", "sft", False),
        ("ms-swift", "none", "sft", True),
        ("ms-swift", "fsdp", "sft", False),
        # unsloth_zoo gradient_checkpointing.py: a function of autograd.
        ("unsloth", "", "sft", False),
        # torchtitan v0.2.2 config/job_config.py: early_stop False; torch's own default elsewhere.
        ("fsdp2", "fsdp", "sft", False),
        ("fsdp2-2024", "fsdp", "sft", True),
        ("fsdp2-compiled-loss", "fsdp", "sft", True),
        ("torchtune", "fsdp", "sft", True),
        ("accelerate", "fsdp", "sft", True),
        # transformers modeling_utils.py: use_reentrant False since 5, True before.
        ("transformers", "none", "sft", True),
        ("transformers-2025", "none", "sft", False),
        ("transformers-2024", "none", "sft", False),
        ("transformers-4-48", "none", "sft", False),
        ("trl-2024", "none", "sft", False),
        # torchtitan 0.3.0 distributed/activation_checkpoint.py: early_stop False; compiled, what backward reads.
        ("torchtitan-2026", "fsdp", "sft", False),
        ("torchtitan-2026-compiled", "fsdp", "sft", True),
        ("trl-2026", "none", "sft", True),
    ],
)
def test_checkpoints_stop_early_as_they_are_told(stack: str, sharding: Any, method: str, early: bool) -> None:
    """A framework's checkpoints stop early or not by what it tells torch.utils.checkpoint; "" is one device."""
    plan = Plan(dp=2 if sharding else 1, micro_batch=1, recompute="full", sharding=sharding or "none")
    job = Training(seq_len=512, global_batch=plan.dp, method=method)
    report = train(load_model("llama-3.2-1b"), Cluster.parse(f"{plan.dp}xa100-sxm-80gb"), plan, job,
                   TrainingOptions(stack=stack))  # fmt: skip
    written = ledger_of(report.case.model, report.case.plan, report.case.kinds, report.evaluation.layout).kinds[0]
    again = [op.name for op in recomputed_ops(written.ops, written.units)]
    assert ("mlp.down" not in again) == early


@pytest.mark.parametrize(("model", "biased"), [("gpt2", True), ("llama-2-7b", False)])
def test_gradients_of_biases_are_summed_apart(model: str, biased: bool) -> None:
    """A product with a bias costs a pass over the gradient of its output more; one without costs the same."""
    block, hidden = load_model(model).layers[0], load_model(model).hidden
    apart, joint = (block_ops(layout("fsdp2", bias_gradients_apart=b), block, hidden) for b in (True, False))
    for one, other in zip(apart, joint, strict=True):
        more = op_seconds(RATES, one).backward_weight - op_seconds(RATES, other).backward_weight
        own = one.output_bytes / RATES.memory_bytes + RATES.memory_start if one.kind == "matmul" and biased else 0
        assert more == pytest.approx(own, rel=1e-6, abs=1e-12)


def test_gradients_that_are_added_apart_cost_their_bytes() -> None:
    """A gradient made before it is added to the buffer is read beside the buffer, which is read and written."""
    model = load_model("llama-2-7b")
    apart, fused = (
        block_ops(layout("megatron-2021", gradients_apart=b), model.layers[0], 4096) for b in ("always", "never")
    )
    for one, other in zip(apart, fused, strict=True):
        more = op_seconds(RATES, one).backward_weight - op_seconds(RATES, other).backward_weight
        elements = one.columns * one.inner if one.weights and one.kind == "matmul" else 0
        own = (2 + 2 * 4) * elements / RATES.memory_bytes + RATES.memory_start if elements else 0
        assert more == pytest.approx(own, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("stack", "plan", "precision", "moved"),
    [
        # FSDP2 in a pipeline, of four micro-batches: cast to the fp32 of the reduction, then three times added to it.
        ("fsdp2", Plan(pp=2, dp=0, micro_batch=1, sharding="fsdp"), "amp-bf16", (6 + 3 * 10) / 4),
        # Autograd's own buffers, which need no casts.
        ("fsdp2", Plan(pp=2, dp=0, micro_batch=1), "bf16-pure", 3 * 6 / 4),
        ("pytorch", Plan(dp=0, micro_batch=1), "bf16-pure", 7 * 6 / 8),
        # One micro-batch has nothing before it; what is scattered in each is added up shard by shard beside others.
        ("pytorch", Plan(dp=0, micro_batch=8), "bf16-pure", 0),
        ("fsdp2", Plan(dp=0, micro_batch=1, sharding="fsdp"), "amp-bf16", 0),
        ("megatron", Plan(dp=0, micro_batch=1, sharding="distributed-optimizer"), "bf16", 0),
    ],
)
def test_gradients_of_micro_batches_behind_the_first_are_added_up(
    stack: str, plan: Plan, precision: str, moved: float
) -> None:
    """A stage of PyTorch adds the gradients of a micro-batch to those before in a pass of their bytes."""
    model, job = load_model("llama-3.2-1b"), Training(seq_len=2048, global_batch=128, precision=precision)
    job = replace(job, global_batch=32) if plan.pp > 1 else job
    added, free = (
        train(model, CLUSTER, plan, job, TrainingOptions(stack=replace(find_stack(stack), gradients_apart=when)))
        for when in (find_stack(stack).gradients_apart, "never")
    )
    stages = zip(added.evaluation.step.stages, free.evaluation.step.stages, added.evaluation.stages, strict=True)
    for one, other, stage in stages:
        elements = total(owned(added.evaluation.parts, stage))
        more = one.backward_weight - other.backward_weight
        assert more == pytest.approx(moved * elements / RATES.memory_bytes, rel=1e-6, abs=1e-9)
        assert one.compute - other.compute == pytest.approx(more, abs=1e-12)


def test_metrics_of_training_read_the_logits_again() -> None:
    """Metrics cost their bytes a logit in the loss, forward alone."""
    model = load_model("gpt2")
    with_metrics, without = (loss(layout("composer", metric_logit_bytes=b), model)[0] for b in (36.0, 0.0))
    assert with_metrics.forward_bytes - without.forward_bytes == 36 * 2048 * model.vocab
    assert with_metrics.backward_bytes == without.backward_bytes


def test_gradients_are_reduced_in_the_width_of_the_stack() -> None:
    """FSDP that reduces in 16 bits sends half of what it sends in 32."""
    model = load_model("llama-2-7b")
    stacks = [replace(find_stack("fsdp2"), scatter_bytes=b) for b in (0.0, 2.0)]
    flows = [comm(model, CLUSTER, FSDP, JOB, TrainingOptions(stack=one)).flows[0] for one in stacks]
    wide, narrow = (sum(f.sent_per_step for f in some if f.message.tensor == "gradients") for some in flows)
    assert narrow == pytest.approx(wide / 2)


# accelerate 1.15.0 utils/dataclasses.py set_mixed_precision: reduce_dtype is the type of mixed precision; verl 0.9.1
# workers/engine/fsdp/transformer_impl.py: fp32 unless told.
@pytest.mark.parametrize(
    ("stack", "precision", "width"),
    [
        ("accelerate", "amp-bf16", 2),
        ("transformers", "amp-bf16", 2),
        ("axolotl", "amp-bf16", 2),
        ("accelerate", "fp32", 4),
        ("verl", "amp-bf16", 4),
        ("fsdp2", "amp-bf16", 4),
    ],
)
def test_accelerate_reduces_gradients_in_the_type_of_mixed_precision(stack: str, precision: str, width: int) -> None:
    """Shards of fp32 gradients are summed in 16 bits around transformers, in 32 where the framework says so."""
    model, job = load_model("llama-2-7b"), replace(JOB, global_batch=32, precision=precision)
    flows = comm(model, CLUSTER, FSDP, job, TrainingOptions(stack=stack)).flows[0]
    sent = sum(f.message.size_bytes * f.per_step for f in flows if f.message.tensor == "gradients")
    assert sent == width * 6_738_415_616


def test_a_pipeline_moves_sharded_weights_once_a_step() -> None:
    """FSDP keeps a stage's weights gathered and its gradients whole from micro-batch to micro-batch of a pipeline."""
    plan = Plan(pp=2, dp=0, micro_batch=1, sharding="fsdp")
    model, sent = load_model("llama-2-7b"), []
    for keeps in (True, False):
        stack = replace(find_stack("fsdp2"), pipeline_keeps_gathered=keeps)
        flows = comm(model, CLUSTER, plan, JOB, TrainingOptions(stack=stack)).flows[0]
        by_tensor = {"weights": 0.0, "gradients": 0.0}
        for flow in flows:
            if flow.message.tensor in by_tensor:
                by_tensor[flow.message.tensor] += flow.sent_per_step
        sent.append(by_tensor)
    once, every = sent
    micro_batches = JOB.global_batch / 8
    assert every["gradients"] == pytest.approx(micro_batches * once["gradients"])
    assert every["weights"] > micro_batches * once["weights"]
    assert ask("fsdp2", plan).step_seconds < ask("fsdp2", plan, pipeline_keeps_gathered=False).step_seconds


def test_compiled_blocks_move_less_than_eager_ones() -> None:
    """Compiled element-wise kernels are faster than eager ones, which are faster than unfused norms."""
    steps = [ask(name).step_seconds for name in ("fsdp2-compiled", "fsdp2", "fsdp2-2024")]
    assert steps == sorted(steps)
    assert steps[0] < 0.95 * steps[2]


def test_a_compiled_model_moves_and_keeps_less_than_an_eager_one() -> None:
    """GPT-2 on one device under torch.compile: norms, activation and loss are fused, as nanoGPT has its model."""
    plan, job = Plan(dp=1, micro_batch=12), Training(seq_len=1024, global_batch=12)
    cluster = Cluster.parse("1xrtx-4090")
    eager, compiled = (
        train(load_model("gpt2"), cluster, plan, job, TrainingOptions(stack=find_stack(name)))
        for name in ("pytorch", "pytorch-compiled")
    )
    assert compiled.step_seconds < 0.9 * eager.step_seconds
    assert compiled.device_bytes < eager.device_bytes


def test_input_gradients_that_wait_are_exposed() -> None:
    """Where both gradients are made before the first is reduced, its message hides behind nothing."""
    behind, beside = (ask("fsdp2", TENSOR, overlap_input_gradients=b).step_seconds for b in (False, True))
    assert behind > beside


@pytest.mark.parametrize(
    ("stack", "sharding", "gathers_narrow", "moved"),
    [
        ("composer", "fsdp", False, 4.0),
        ("composer", "fsdp", True, 2.0),
        ("composer", "none", False, 0.0),
        ("xla", "fsdp", False, 0.0),
    ],
)
def test_gathered_weights_of_narrow_products_are_cast_on_every_device(
    monkeypatch: pytest.MonkeyPatch, stack: str, sharding: Any, gathers_narrow: bool, moved: float
) -> None:
    """Every device reads 16 bits of a gathered weight and writes 8 twice on Hopper, or turns what travelled in 8."""
    model, cluster = load_model("llama-2-7b"), Cluster.parse("16xh100-sxm-80gb")
    settings = replace(find_stack(stack).settings, fp8_param_gather=gathers_narrow)
    options = TrainingOptions(stack=replace(find_stack(stack), settings=settings))
    plan, job = replace(FSDP, sharding=sharding), replace(JOB, precision="fp8")
    report = train(model, cluster, plan, job, options)
    monkeypatch.setattr(Recipe, "cast_bytes", 0.0)
    without = train(model, cluster, plan, job, options)
    elements = model.num_layers * 4096 * (4 * 4096 + 3 * 11008)
    rate = rates_of(find_device("h100-sxm-80gb").device, "fp8", 0.0, Efficiencies()).memory_bytes
    micro_batches = JOB.global_batch / 32
    assert report.step_seconds - without.step_seconds == pytest.approx(
        micro_batches * moved * elements / rate, rel=0.1, abs=1e-9
    )


def lost_share(plan: Plan) -> float:
    """Return the seconds that compute loses to hidden messages between replicas, over the seconds of those."""
    free: dict[str, Any] = {"gather_copy_bytes": 0.0, "scatter_copy_bytes": 0.0, "gradients_apart": "never"}
    sharded, whole = (ask("fsdp2", replace(plan, sharding=kind), **free) for kind in ("fsdp", "none"))  # type: ignore[arg-type]
    stage, without = (report.evaluation.step.stages[0] for report in (sharded, whole))
    return float((stage.compute - without.compute) / stage.hidden["dp"])


def test_replicas_of_whole_nodes_take_more_of_compute_than_those_of_one_rank_a_node() -> None:
    """Hidden messages of groups that fill nodes hold eight times the cores of groups with one rank in each."""
    assert lost_share(FSDP) == pytest.approx(1.6 * 16 / 108)
    assert lost_share(TENSOR) == pytest.approx(1.6 * 2 / 108)


def test_weights_gathered_in_8_bits_are_half_the_message() -> None:
    """Megatron-Bridge's recipes in fp8 gather sharded weights as they are multiplied: half the bytes of 16 bits."""
    stack, job = find_stack("megatron-bridge"), replace(JOB, precision="fp8")
    stacks = [replace(stack, settings=Settings(fp8_param_gather=stored)) for stored in (False, True)]
    cluster = Cluster.parse("16xh100-sxm-80gb")
    plan = replace(FSDP, dp=16)
    wide, narrow = (
        comm(load_model("llama-2-7b"), cluster, plan, job, TrainingOptions(stack=s)).axes["dp"] for s in stacks
    )
    assert narrow.bytes_per_step < wide.bytes_per_step
    assert narrow.hidden_seconds < wide.hidden_seconds


def test_tables_and_norms_are_gathered_in_16_bits_with_the_last_bucket() -> None:
    """Of weights in 8 bits Megatron's linear layers alone travel so; both tables wait with the last bucket."""
    stack, job = find_stack("megatron-bridge"), replace(JOB, precision="fp8")
    model, plan = load_model("llama-2-7b"), replace(FSDP, dp=8, sharding="distributed-optimizer")
    wide, narrow = (
        comm(model, Cluster.parse("8xh100-sxm-80gb"), plan, job, TrainingOptions(stack=one))
        for one in (replace(stack, settings=Settings(fp8_param_gather=stored)) for stored in (False, True))
    )
    layers = model.num_layers * 4096 * (4 * 4096 + 3 * 11008)
    assert wide.axes["dp"].bytes_per_step - narrow.axes["dp"].bytes_per_step == pytest.approx(layers)
    late, early = (one.report.evaluation.step.gradients_exposed for one in (narrow, wide))
    assert late > early


def test_weights_gathered_in_8_bits_stay_in_half_the_room() -> None:
    """What torchao's float8 all-gather brings is what a layer keeps until backward, where FSDP keeps it whole."""
    stack, job = find_stack("fsdp2-compiled"), replace(JOB, precision="fp8-amp")
    plan = replace(FSDP, dp=16, sharding="shard-grad-op", recompute="none")
    model = load_model("llama-2-7b")
    wide, narrow = (
        train(model, Cluster.parse("16xh100-sxm-80gb"), plan, job, TrainingOptions(stack=one))
        for one in (replace(stack, settings=Settings(fp8_param_gather=stored)) for stored in (False, True))
    )
    layers = model.num_layers * 4096 * (4 * 4096 + 3 * 11008)
    assert wide.allocated_bytes - narrow.allocated_bytes == pytest.approx(layers, rel=0.05)


def test_an_optimizer_sharded_in_a_node_keeps_its_weights_off_the_network() -> None:
    """InternEvo's optimizer, sharded over a node, sends new weights within it; over all replicas across nodes."""
    job, cluster = Training(seq_len=2048, global_batch=256), Cluster.parse("64xa100-sxm-80gb")
    sent = []
    for shard in (1, 8):
        plan = Plan(dp=64, micro_batch=2, sharding="zero1", shard=shard)
        found = comm(load_model("llama-2-7b"), cluster, plan, job, TrainingOptions(stack="internevo"))
        sent.append(sum(axis.tiers["network"] for axis in found.axes.values()))
        assert found.report.evaluation.step.gradients_hidden > 0
        assert found.report.evaluation.step.parameters_hidden == 0
    assert sent[1] == pytest.approx(2 / 3 * sent[0], rel=0.05)


def test_owners_that_broadcast_in_turn_pay_for_each_of_them() -> None:
    """New weights that their owners broadcast one after another take longer over more owners, to one a tensor."""
    steps = []
    for nodes in (2, 16, 128, 512):
        plan = Plan(dp=8 * nodes, micro_batch=2, sharding="zero1")
        job, cluster = Training(seq_len=2048, global_batch=64 * nodes), Cluster.parse(f"{8 * nodes}xa100-sxm-80gb")
        report = train(load_model("llama-2-7b"), cluster, plan, job, TrainingOptions(stack="internevo"))
        steps.append(report.evaluation.step.parameters_exposed)
    assert steps == sorted(steps)
    assert steps[2] > 2 * steps[0]


@pytest.mark.parametrize(
    ("stack", "device", "width", "rows_a_second"),
    [
        # github.com/pytorch/pytorch pull 159682: 65,536 rows of 1,024 and of 2,048 values in 97 and 101 us on B200.
        ("fsdp2", "b200-sxm-180gb", 1024, 4.7e6 * 148),
        ("fsdp2", "b200-sxm-180gb", 128, 4.7e6 * 148),
        ("fsdp2", "b200-sxm-180gb", 8192, 0),
        # inductor's kernels take several rows a block, and so do those of Transformer Engine.
        ("fsdp2-compiled", "b200-sxm-180gb", 128, 0),
        ("megatron", "b200-sxm-180gb", 128, 0),
    ],
)
def test_short_rows_of_norms_cost_a_block_of_threads_each(
    stack: str, device: str, width: int, rows_a_second: float
) -> None:
    """PyTorch's own norm starts a block for each row, however short: 65,536 of them take 94 us on B200."""
    rates = rates_of(find_device(device).device, "bf16", 0.0, Efficiencies())
    y, rows = layout(stack), 65536
    n = Norm(name="norm", region="norm", kind="rmsnorm", rows=rows, elements=rows * width, width=width, whole=width)
    op = module_norm(y, n, y.residual("input", width, ""))
    seconds = op_seconds(rates, op).forward - rates.memory_start
    moved = op.forward_bytes / rates.bandwidth_shares.rate(rates.memory_bytes, "norm")
    assert seconds <= moved if not rows_a_second else seconds == pytest.approx(rows / rows_a_second)


@pytest.mark.parametrize(
    ("stack", "kind"), [("fsdp2", "rotary in steps"), ("transformers", "rotary in steps"), ("fsdp2-compiled", "rotary")]
)
def test_rotary_embedding_kernel_by_kernel_runs_as_casts_do(stack: str, kind: str) -> None:
    """Torchtitan's is two casts around a complex product, transformers' reads broadcast cosines and halves of rows."""
    model = load_model("llama-3.1-8b")
    (op,) = (op for op in block_ops(layout(stack), model.layers[0], model.hidden) if op.name == "rotary")
    assert kind_of(op) == kind


def test_norms_in_steps_run_two_thirds_of_their_bytes_as_casts_do() -> None:
    """24 of the 36 bytes an element are of two types or of broadcast operands; a share that was measured stays."""
    shares = BandwidthShares((("eager", 0.5, 0.8),))
    expected = [1 / (2 / 3 / one + 1 / 3) for one in (0.5, 0.8)]
    assert [shares.share("norm in steps", back) for back in (False, True)] == pytest.approx(expected)
    assert BandwidthShares((("eager", 0.5, 0.5), ("norm in steps", 0.9, 0.7))).share("norm in steps", True) == 0.7
    assert BandwidthShares((("permute", 0.5, 0.5),)).share("norm in steps") == 1.0
