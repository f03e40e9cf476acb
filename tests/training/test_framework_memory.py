"""What frameworks and allocators hold beside state and activations, by their own sources and by measured peaks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from accuracy.arguments import blas_workspace
from shardwise.answers._train_tree import peak_parts
from shardwise.formats.megatron import Launch, read_args
from shardwise.hardware import Cluster, find_device
from shardwise.models import Model
from shardwise.plans import Plan, Settings, Stack, Training, find_stack
from shardwise.training import TrainingOptions, TrainReport, outside_bytes, train
from shardwise.training._framework_bytes import flat_segments

GIB = 2**30
LLAMA_70B = Model.load("llama-3-70b")


def report_of(
    stack: str | Stack = "megatron", on: str = "8xb200-sxm-180gb", precision: str = "bf16", **plan: object
) -> TrainReport:
    """Return the report of twelve layers of Llama 3 70B, which SimuMax ran with Megatron-LM on B200."""
    model = replace(LLAMA_70B, layers=LLAMA_70B.layers[:12], name="llama-3-70b-l12")
    one = Plan(**{"micro_batch": 1, "sharding": "distributed-optimizer", **plan})  # type: ignore[arg-type]
    job = Training(seq_len=4096, global_batch=4 * one.dp, precision=precision)
    return train(model, Cluster.parse(on), one, job, TrainingOptions(stack=stack))


IN_PLACE = replace(find_stack("megatron"), loss="vocab-parallel-in-place")

# Largest torch.cuda.max_memory_allocated over the ranks, GiB: SimuMax docs/b200/b200_release_v1.2_summary.json.
MEASURED = (
    ({"pp": 2, "dp": 4}, 66.55),
    ({"tp": 2, "dp": 4, "sequence_parallel": True}, 60.68),
    ({"tp": 4, "dp": 2, "sequence_parallel": True}, 39.07),
)


@pytest.mark.parametrize(("plan", "measured"), MEASURED)
def test_peaks_of_megatron_on_b200_are_met(plan: dict[str, object], measured: float) -> None:
    """Three allocated peaks of Megatron-LM with Transformer Engine 2.11 on B200 are met within 0.3 %."""
    assert report_of(IN_PLACE, **plan).allocated_bytes / GIB == pytest.approx(measured, rel=3e-3)


def test_each_shape_of_weight_gradient_has_one_stand_in() -> None:
    """Gradients that are added up in the buffer leave one empty 16-bit tensor of each shape for the whole run."""
    D, F, V, kv = 8192, 28672, 128256, 1024
    shapes = D * (D + 2 * kv) + D * D + 2 * F * D + D * F
    first, last = report_of(pp=2, dp=4).evaluation.memory
    assert first.framework == 2 * shapes
    assert last.framework == 2 * (shapes + V * D)
    apart = replace(find_stack("megatron"), settings=Settings(separate_weight_gradients=True))
    assert [m.framework for m in report_of(apart, pp=2, dp=4).evaluation.memory] == [0, 0]


@pytest.mark.parametrize(
    ("model", "stack", "held"),
    [
        ("mistral-7b-v0.1", "peft-2024", 32 * 2 * 32768 * 128 * 2),
        ("llama-2-70b", "peft-2024", 80 * 2 * 4096 * 128 * 2),
        ("mistral-7b-v0.1", "transformers-2024", 0),
        ("mixtral-8x7b", "transformers-2024", 32 * 2 * 32768 * 128 * 2),
        ("mixtral-8x7b", "transformers", 0),
    ],
)
def test_layers_of_old_transformers_hold_cosines_of_all_positions(model: str, stack: str, held: int) -> None:
    """Two buffers of max_position_embeddings in each layer; fms-acceleration's runs of GPTQ differ by as much."""
    job = Training(seq_len=512, global_batch=1, adapter="lora", base="nf4")
    options = TrainingOptions(stack=stack)
    found = train(Model.load(model), Cluster.parse("1xh200-sxm"), Plan(micro_batch=1), job, options)
    assert found.evaluation.memory[0].framework == held


@pytest.mark.parametrize(
    ("stack", "family", "mebibytes"),
    [
        ("megatron", "hopper", 96),
        ("megatron", "ampere", 20.25),
        ("megatron-2023", "hopper", 64),
        ("fsdp2", "ampere", 16.25),
        ("xla", "generic", 0),
    ],
)
def test_products_hold_the_scratch_of_their_libraries(stack: str, family: str, mebibytes: float) -> None:
    """A handle of cuBLAS in each of two threads has a workspace, and Transformer Engine one of its own."""
    assert find_stack(stack).workspace_bytes(family) == mebibytes * 2**20


def test_the_environment_sizes_the_scratch_of_cublas() -> None:
    """CUBLAS_WORKSPACE_CONFIG=:4096:8 gives each handle 32 MiB on every device."""
    asked = Settings(blas_workspace_bytes=blas_workspace({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}))
    assert replace(find_stack("megatron"), settings=asked).workspace_bytes("ampere") == 68 * 2**20
    assert blas_workspace({}) == 0


@pytest.mark.parametrize(
    ("device", "mebibytes"),
    [
        ("t4", 129),
        ("p100-pcie-16gb", 317),
        ("rtx-3090", 307),
        ("rtx-a6000", 321),
        ("v100-sxm-32gb", 387),
        ("rtx-4090", 469),
        ("a100-sxm-80gb", 502),
        ("l40s", 524),
        ("rtx-5090", 654),
        ("h100-sxm-80gb", 666),
        ("b200-sxm-180gb", 712),
        ("mi300x", 461),
    ],
)
def test_the_context_goes_with_the_threads_of_the_device(device: str, mebibytes: float) -> None:
    """Out-of-memory messages have so much in use by a process outside PyTorch's allocator, in the median of each card.

    Megatron-LM before PyTorch 1.13 had every kernel loaded besides, and XLA's runtime is outside the usable memory.
    """
    one = find_device(device).device
    size = find_stack("pytorch").context_bytes(one)
    assert size == pytest.approx(mebibytes * 2**20, rel=0.09)
    assert find_stack("megatron-2021").context_bytes(one) == size + 3.8e8
    assert find_stack("maxtext").context_bytes(one) == find_stack("pytorch-cpu").context_bytes(one) == 0


def test_a_small_card_has_a_small_context() -> None:
    """T4 shows under 0.2 GiB beside what a run of one process reserves, H100 0.6."""
    job, plan = Training(seq_len=1024, global_batch=1, precision="fp16", adapter="lora"), Plan(micro_batch=1)
    for device, gibibytes in (("t4", 0.13), ("h100-sxm-80gb", 0.61)):
        report = train(Model.load("qwen2.5-0.5b"), Cluster.parse(device), plan, job, TrainingOptions(stack="trl"))
        assert outside_of(report) / GIB == pytest.approx(gibibytes, abs=0.02)


def test_a_full_device_has_back_what_lies_free() -> None:
    """Where tensors have room the allocator's free blocks do not decide; where they have none they are short of it."""
    job = Training(seq_len=2048, global_batch=48, adapter="lora", rank=64, base="nf4-dq")

    def asked(micro_batch: int) -> TrainReport:
        plan = Plan(dp=2, micro_batch=micro_batch, sharding="fsdp", recompute="full", offload=("parameters",))
        options = TrainingOptions(stack=find_stack("fsdp-2024"))
        return train(Model.load("llama-2-7b"), Cluster.parse("2xrtx-4090"), plan, job, options)

    full, over = asked(12), asked(24)
    room = full.case.cluster.device.usable_memory_bytes
    loose = full.evaluation.reserved + full.case.workspace_bytes + outside_of(full)
    assert loose > room == full.device_bytes == pytest.approx(full.reserved_bytes + outside_of(full))
    assert full.fits
    tight = over.allocated_bytes * over.case.stack.reserved_over_allocated + outside_of(over)
    assert not over.fits
    assert over.device_bytes == pytest.approx(tight)
    assert sum(peak_parts(full).values()) == pytest.approx(full.device_bytes)
    assert min(peak_parts(full).values()) >= 0


def test_the_gradient_of_the_table_takes_a_segment_of_its_own() -> None:
    """A stage with the table reserves room for its gradient too, unless segments are expandable."""
    one = report_of(pp=2, dp=4)
    first, last = one.evaluation.memory
    assert (first.late_block, last.late_block) == (2 * 128256 * 8192, 0)
    scratch = one.case.workspace_bytes
    held = 1.025 * (first.peak + scratch) + first.late_block
    assert one.reserved_bytes == pytest.approx(held)
    wide = replace(find_stack("megatron"), expandable_segments=True)
    assert report_of(wide, pp=2, dp=4).evaluation.memory[0].late_block == 0


def outside_of(report: TrainReport) -> float:
    """Return the bytes of the context and communicators of a rank."""
    return outside_bytes(report.case.stack, report.case.cluster, report.evaluation.sizes)


BASE = {
    "--num-layers": 4, "--hidden-size": 512, "--num-attention-heads": 8, "--seq-length": 1024, "--vocab-size": 1000,
    "--max-position-embeddings": 1024, "--micro-batch-size": 2,
}  # fmt: skip


def of_arguments(devices: int, **more: object) -> TrainReport:
    """Return the report of a small model by Megatron-LM's arguments."""
    words = BASE | {f"--{name.replace('_', '-')}": value for name, value in more.items()}
    case = read_args(words, Launch(num_devices=devices))
    assert case.model is not None
    return train(
        case.model, Cluster.parse(f"{devices}xh100-sxm-80gb"), case.plan, case.job, TrainingOptions(stack=case.stack)
    )


def test_the_loss_finds_no_room_in_what_layers_have_freed() -> None:
    """Layers that run again leave three tensors of each part and a norm's, of which fp32 logits need more than one."""
    found = find_stack("transformers")
    model, job = Model.load("llama-2-7b"), Training(seq_len=2048, global_batch=1, adapter="lora", targets=("q", "v"))

    def held(stack: Stack) -> float:
        plan = Plan(micro_batch=1, recompute="full")
        report = train(model, Cluster.parse("a100-sxm-80gb"), plan, job, TrainingOptions(stack=stack))
        return float(report.evaluation.memory[0].late_block)

    D, F = 4096, 11008
    adapter, gate = 3 * 4 * D, 2 * (3 * F + D)  # what a fp32 adapter makes and adds; gate and up, their product, down
    beside = 32 * 2 * D * (F / (2 * D) - 1)  # of two checkpoints in a block
    assert held(found) - held(replace(found, expandable_segments=True)) == pytest.approx(
        2048 * (2 * D + adapter + gate + beside), rel=1e-3
    )


@pytest.mark.parametrize(
    ("name", "tokens", "batch", "gibibytes"),
    [("llama-2-7b", 2048, 4, 22.04), ("llama-2-7b", 2048, 8, 20.94)],
)
def test_checkpoints_lie_in_blocks_of_what_a_layer_makes_widest(
    name: str, tokens: int, batch: int, gibibytes: float
) -> None:
    """fsdp_qlora reserved so much of a whole copy a device, without 4 bits and with them (2024-03): within 3 %.

    Two checkpoints of 4,096 values lie in a block of 11,008 each: a third more than they take.
    """
    adapter = {"adapter": "lora", "rank": 64, "targets": ("q", "k", "v", "gate", "up", "down"), "adapter_dropout": 0.1}
    job = Training(seq_len=tokens, global_batch=batch, base="nf4-dq" if batch == 8 else "", **adapter)  # type: ignore[arg-type]
    options = TrainingOptions(stack=find_stack("fsdp-2024"))
    plan = Plan(micro_batch=batch, recompute="full")
    report = train(Model.load(name), Cluster.parse("rtx-4090"), plan, job, options)
    assert float(report.reserved_bytes) == pytest.approx(gibibytes * 2**30, rel=0.03)


@pytest.mark.parametrize(("ffn", "share"), [(11008, 11008 / 8192 - 1), (16384, 0.0), (4096, 0.0), (6144, 0.5)])
def test_whole_checkpoints_fill_a_block(ffn: int, share: float) -> None:
    """What is left of a block is its width over that of the checkpoints that it has whole room for."""
    found = find_stack("pytorch")
    model = Model.load("llama-2-7b")
    layers = tuple(replace(one, feed_forward=replace(one.feed_forward, ffn=ffn)) for one in model.layers)  # type: ignore[type-var]
    model = replace(model, layers=layers)
    job, plan = Training(seq_len=2048, global_batch=1, precision="bf16-pure"), Plan(micro_batch=1, recompute="full")
    case = train(model, Cluster.parse("h100-sxm-80gb"), plan, job, TrainingOptions(stack=found)).evaluation
    (kind, *_), (memory,) = case.parts.kinds, case.memory
    assert kind.widest_bytes == 2 * 2048 * max(ffn, 4096)
    assert memory.activations * kind.beside_kept == pytest.approx(share * 32 * 2 * 2048 * 4096, rel=2e-3)


@pytest.mark.parametrize(("block", "new"), [(2e9, 0.0), (7e8, 1e9), (1e8, 1.5e9)])
def test_flat_gradients_of_zero_take_segments_where_no_block_is_as_large(block: float, new: float) -> None:
    """A quarter of a billion gradients is 0.5 GB flat in 16 bits and 1 GB in fp32, each in a block or in a segment."""
    recipe = report_of("deepspeed", "4xa100-sxm-80gb", dp=4, sharding="zero2", precision="fp16-grads16").case.recipe
    sizes = SimpleNamespace(shard_share=4, expert_share=1)
    assert flat_segments(recipe, sizes, (1e9, 0.0, 0.0, 0.0), block) == new  # type: ignore[arg-type]


@pytest.mark.parametrize(("seq_len", "gigabytes"), [(2048, 6), (4096, 7), (32768, 16), (100000, 37)])
def test_unsloth_of_2024_holds_its_layers_blocks_beside_its_logits(seq_len: int, gigabytes: int) -> None:
    """What LLaMA-Factory's wiki printed in whole GB, on an A100 (2024-04), is met within 0.6 GB or 6 %.

    Its own adapter kernels keep 16 bits, and accelerate copies logits to fp32: 312 KB a token, of which logits are 192.
    """
    job = Training(seq_len=seq_len, global_batch=1, adapter="lora", rank=8, targets=("all-linear",), base="nf4")
    options = TrainingOptions(stack=find_stack("unsloth-2024"))
    plan = Plan(micro_batch=1, recompute="full", offload=("activations",))
    report = train(Model.load("llama-2-7b"), Cluster.parse("a100-sxm-40gb"), plan, job, options)
    assert float(report.device_bytes) == pytest.approx(1e9 * gigabytes, abs=6e8, rel=0.06)


def test_gradients_of_16_bits_are_kept_in_fp32_until_the_next_step() -> None:
    """Megatron's optimizer widens 16-bit gradients of its shard: 4 bytes each, none where they are wide already."""
    narrow, wide = of_arguments(2, fp16=True, use_distributed_optimizer=True), of_arguments(2, bf16=True)
    m = narrow.memory
    assert m.widened == m.weights  # two bytes a parameter, against four of half of them
    assert wide.memory.widened == 0


def test_instances_of_the_distributed_optimizer_shard_apart() -> None:
    """Two instances over eight replicas hold as much state a device as four replicas."""
    two = of_arguments(8, bf16=True, use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
    four = of_arguments(4, bf16=True, use_distributed_optimizer=True)
    assert two.memory.optimizer == four.memory.optimizer


def test_masks_come_with_the_data_unless_they_are_left_out() -> None:
    """A mask of one byte a pair of tokens is there in the forward passes: Megatron-LM's default."""
    masked, bare = of_arguments(1, bf16=True), of_arguments(1, bf16=True, no_create_attention_mask_in_dataloader=True)
    assert masked.memory.moments["loss"] - bare.memory.moments["loss"] == 2 * 1024 * 1024


def test_what_an_all_to_all_sends_on_is_kept_too() -> None:
    """Attention behind an exchange keeps the output it sends, beside what the next product keeps."""
    ring, exchanged = (
        report_of(cp=8, cp_kind=kind).evaluation.parts.kinds[0].kept_bytes for kind in ("ring", "all-to-all")
    )
    assert exchanged - ring == 2 * 512 * 8192


def test_a_backward_pass_in_16_bits_stands_beside_wider_gradients() -> None:
    """DeepSpeed's bf16 optimizer adds gradients behind a whole backward pass, Megatron-LM each as it is made."""
    plan: dict[str, object] = {"pp": 2, "dp": 4, "sharding": "zero1"}
    moments = report_of("megatron-deepspeed", "8xa100-sxm-80gb", **plan).memory.moments
    assert moments["micro-batch complete"] > moments["gradients complete"]
    first, last = report_of("megatron-deepspeed", "8xa100-sxm-80gb", precision="fp16-grads16", **plan).evaluation.memory
    assert last.late_block == pytest.approx(last.weights / 2 * (2 + 4) / 4)  # flat in 16 bits, then in 32, of four
    assert first.late_block == pytest.approx(2 * 128256 * 8192 + first.weights / 2 * (2 + 4) / 4)
    more = report_of("megatron-deepspeed", "16xa100-sxm-80gb", precision="fp16-grads16", **{**plan, "dp": 8}).evaluation
    # The segment of the table's gradient takes the first of them where that is small enough.
    assert more.memory[0].late_block == pytest.approx(2 * 128256 * 8192 + more.memory[0].weights / 2 * 4 / 8)
    assert "micro-batch complete" not in report_of("megatron-scores", "8xa100-sxm-80gb", **plan).memory.moments


def test_one_compiled_graph_gives_all_gradients_at_its_end() -> None:
    """A second micro-batch holds a whole set of gradients beside those added up (torch 2.13: 1.00 sets, eager 0.07)."""
    alone: dict[str, object] = {"sharding": "none", "dp": 1, "recompute": "full"}
    compiled = report_of("pytorch-compiled", "1xb200-sxm-180gb", **alone).evaluation.memory[0]
    gap = float(compiled.moments["micro-batch complete"] - compiled.moments["gradients complete"])
    assert 0.9 < gap / float(compiled.gradients) <= 1
    assert "micro-batch complete" not in report_of("pytorch", "1xb200-sxm-180gb", **alone).memory.moments
    # Replicas break the graph: DistributedDataParallel at its buckets.
    broken = report_of("pytorch-compiled", "2xb200-sxm-180gb", **{**alone, "dp": 2}).memory.moments
    assert broken["micro-batch complete"] <= broken["gradients complete"]


def test_a_graph_of_buffers_holds_twice_as_many_micro_batches_as_stages() -> None:
    """OneFlow holds them before every stage but the last; 1F1B holds as many as stages follow."""
    plan: dict[str, object] = {"pp": 2, "dp": 1, "tp": 4, "sharding": "none", "sequence_parallel": False}
    job = Training(seq_len=4096, global_batch=8)
    depths = [
        [float(m.in_flight) for m in train(
            replace(LLAMA_70B, layers=LLAMA_70B.layers[:12]), Cluster.parse("8xb200-sxm-180gb"),
            Plan(micro_batch=1, **plan), job, TrainingOptions(stack=stack),  # type: ignore[arg-type]
        ).evaluation.memory]
        for stack in ("oneflow", "megatron-scores")
    ]  # fmt: skip
    assert depths == [[4.0, 1.0], [2.0, 1.0]]


def test_gradients_stay_whole_between_micro_batches_under_no_sync() -> None:
    """LitGPT's accumulation keeps whole 16-bit gradients on every device, and one micro-batch only those of a layer."""
    model = replace(LLAMA_70B, layers=LLAMA_70B.layers[:2])
    plan = Plan(micro_batch=1, dp=4, sharding="fsdp", recompute="full")

    def buffers(batch: int) -> float:
        job = Training(seq_len=512, global_batch=batch)
        one = train(
            model, Cluster.parse("4xa100-sxm-80gb"), plan, job, TrainingOptions(stack="litgpt")
        ).evaluation.memory[0]
        return float(one.buffers)

    layer, tables = 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672 + 2), 2 * 128256 * 8192 + 8192
    assert buffers(8) - buffers(4) == pytest.approx(2 * (layer + tables), rel=1e-6)


def test_gradients_of_flat_parameters_take_the_room_of_frozen_weights_too() -> None:
    """Adapters under FSDP1 in LitGPT: whole 16-bit gradients of all weights while it accumulates, frozen ones too."""
    model = replace(LLAMA_70B, layers=LLAMA_70B.layers[:2])
    plan = Plan(micro_batch=1, dp=4, sharding="fsdp", recompute="full")

    def buffers(batch: int, adapter: str) -> float:
        job = Training(seq_len=512, global_batch=batch, adapter=adapter, targets=("q",) if adapter else ())
        one = train(
            model, Cluster.parse("4xa100-sxm-80gb"), plan, job, TrainingOptions(stack="litgpt")
        ).evaluation.memory[0]
        return float(one.buffers)

    # Adapters of a layer are gathered twice, those of both layers have gradients; the unit of both ends has none, in
    # which nothing trains.
    pairs, ends = 8 * (8192 + 8192), (2 * 128256 + 1) * 8192
    assert buffers(8, "lora") - buffers(8, "") == 2 * (2 * pairs + 2 * pairs) - 2 * ends
    more = buffers(8, "") - buffers(4, "") - 2 * ends
    assert buffers(8, "lora") - buffers(4, "lora") == pytest.approx(more, rel=0.01)


def test_a_bucket_of_wider_gradients_holds_at_least_one_tensor() -> None:
    """DeepSpeed's bf16 optimizer reduces a table of over 500 million words in one bucket, fp16 in its own place."""
    plan: dict[str, object] = {"dp": 4, "tp": 1, "sharding": "zero1"}
    wide, narrow = (
        report_of("megatron-deepspeed", "4xa100-sxm-80gb", precision=name, **plan).evaluation.memory[0].buffers
        for name in ("bf16", "fp16-grads16")
    )
    assert wide == 4 * 128256 * 8192 + 2 * 5e8
    assert narrow == 2 * 5e8 + 2 * 5e8


# Most bytes that PyTorch's CPU allocator held at once in two steps of 128 tokens, every allocation recorded
# (accuracy/measuring --only memory, torch 2.13.0): two tables of 4096 by 256; one of 8192 by 256 for both.
RECORDED = (
    ("llama", {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
               "intermediate_size": 704, "vocab_size": 4096, "tie_word_embeddings": False}, 80_909_488),
    ("gpt2", {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": 8192, "n_positions": 4096}, 117_662_948),
)  # fmt: skip


@pytest.mark.parametrize(("kind", "config", "measured"), RECORDED)
def test_gradients_of_tables_come_first_and_last(
    tmp_path: Path, kind: str, config: dict[str, object], measured: int
) -> None:
    """Short steps peak where gradients are complete: the embedding's comes last, those of a shared table are added."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **config}))
    model = Model.load(tmp_path)
    job = Training(seq_len=128, global_batch=1, precision="fp32")
    cpu, options = Cluster.parse("1xcpu-epyc-zen4-2core"), TrainingOptions(stack="pytorch-cpu")
    report = train(model, cpu, Plan(micro_batch=1), job, options)
    assert 0 <= measured - report.memory.peak < 1300
