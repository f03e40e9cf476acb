"""Peak memory of whole training steps, against PyTorch's memory tracker."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.hardware import Cluster
from shardwise.models import load_model, model_from_config
from shardwise.ops import count_parameters
from shardwise.plans import Plan, Schedule, Sharding, Training, find_stack
from shardwise.training import TrainingOptions, TrainReport, train

DATA = json.loads((Path(__file__).parents[1] / "data/training/step_memory.json").read_text(encoding="utf-8"))
RUNS = DATA["runs"]
TRACKED: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data/training/torch_peaks.json").read_text(encoding="utf-8")
)
# The tracked programs call torch.optim.AdamW on tensors of the CPU, which it updates one by one.
STACK = replace(find_stack("transformers"), optimizer_step="single")
PRECISION = {"bfloat16": "bf16-pure", "float32": "fp32", "fsdp": "amp-bf16", "tp": "bf16-pure"}


def _name(run: dict[str, Any]) -> str:
    full = "-full" if run["recompute"] else ""
    return f"{run['kind']}-{run['config']}-{run['seq_len']}-{run['dtype'] or run['world']}{full}"


def _predicted(run: dict[str, Any]) -> TrainReport:
    world, batch, kind = run["world"], run["batch"], run["kind"]
    recompute = "full" if run["recompute"] else "none"
    plan = {
        "single_device": Plan(dp=1, micro_batch=batch, recompute=recompute),  # type: ignore[arg-type]
        "fsdp": Plan(dp=world, micro_batch=batch, sharding="fsdp"),
        "tp": Plan(tp=world, micro_batch=batch, sequence_parallel=False),
    }[kind]
    precision = PRECISION[run["dtype"] or kind]
    job = Training(seq_len=run["seq_len"], global_batch=batch * plan.dp, precision=precision, dropout=False)
    model = model_from_config(DATA["configs"][run["config"]], name=run["config"])
    return train(model, Cluster.parse(f"{world}xa100-sxm-80gb"), plan, job, TrainingOptions(stack=STACK))


def test_all_runs_are_there() -> None:
    """Fourteen runs are compared: nine on one device, two sharded, three tensor-parallel."""
    kinds = [run["kind"] for run in RUNS]
    assert {k: kinds.count(k) for k in kinds} == {"single_device": 9, "fsdp": 2, "tp": 3}
    assert "torch 2.13.0 MemTracker, transformers 5.23.0" in DATA["citation"]


@pytest.mark.parametrize("run", RUNS, ids=_name)
def test_the_peak_is_what_the_memory_tracker_saw(run: dict[str, Any]) -> None:
    """The peak of tensors is within 0.5 % of torch 2.13.0's MemTracker on a whole step of transformers 5.23.0."""
    report = _predicted(run)
    assert report.evaluation.peak == pytest.approx(run["peak_bytes"], rel=5e-3)
    assert count_parameters(report.case.model) == run["parameters"]


@pytest.mark.parametrize("run", RUNS, ids=_name)
def test_the_moment_of_the_peak_is_named(run: dict[str, Any]) -> None:
    """Long sequences peak at the loss; two wide layers over few tokens peak in the optimizer step."""
    expected = "optimizer step" if run["config"].startswith("llama3-8b") else "loss"
    assert _predicted(run).peak_moment == expected


def tracked(run: dict[str, Any]) -> TrainReport:
    """Return the report of a step that torch's trackers followed, on transformers' classes with a root unit."""
    fsdp = "fsdp" if run.get("reshard", True) else "shard-grad-op"
    sharding: Any = "none" if run["mode"] == "one" else fsdp
    plan = Plan(dp=run["world"], micro_batch=run["batch"], sharding=sharding, recompute="full" if run["ac"] else "none")
    job = Training(seq_len=run["seq_len"], global_batch=plan.dp * plan.micro_batch,
                   precision="bf16-pure" if run["mode"] == "one" else "amp-bf16")  # fmt: skip
    model = model_from_config(run["config"], name="tracked")
    return train(model, Cluster.parse(f"{plan.dp}xa100-sxm-80gb"), plan, job, TrainingOptions(stack=STACK))


@pytest.mark.parametrize("run", TRACKED, ids=lambda run: run["id"])
def test_the_peak_of_a_sharded_step_is_what_the_tracker_saw(run: dict[str, Any]) -> None:
    """Peaks under FSDP2, weights resharded or kept, are within 0.01 % of torch 2.13.0's FSDPMemTracker.

    It counts inputs, rotary buffers and the optimizer's step counters besides.
    """
    assert tracked(run).evaluation.peak == pytest.approx(run["peak_bytes"], rel=1e-4)


# (sequences, tokens, recompute) -> bytes at the peak of a step under autocast, and what is at work there: MemTracker of
# torch 2.13.0 on transformers 5.23.0, fp32 weights, the loss within autocast and backward behind it.
AUTOCAST = {
    (1, 1024, "none"): (490_310_052, "loss"),
    (1, 1024, "full"): (369_568_164, "forward"),
    (2, 2048, "none"): (1_145_674_148, "loss"),
    (2, 2048, "full"): (706_599_332, "loss"),
}


@pytest.mark.parametrize("case", AUTOCAST, ids=lambda case: "-".join(map(str, case)))
def test_the_peak_under_autocast_is_what_the_memory_tracker_saw(case: tuple[int, int, Any]) -> None:
    """16-bit copies of all weights last until autocast ends, behind the loss, even of layers that run again."""
    batch, tokens, recompute = case
    config = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
              "num_key_value_heads": 4, "intermediate_size": 1376, "vocab_size": 8192, "tie_word_embeddings": False,
              "max_position_embeddings": 8192, "hidden_act": "silu", "rms_norm_eps": 1e-06}  # fmt: skip
    plan = Plan(micro_batch=batch, recompute=recompute)
    job = Training(seq_len=tokens, global_batch=batch, precision="amp-bf16")
    cluster, options = Cluster.parse("1xa100-sxm-80gb"), TrainingOptions(stack="transformers")
    report = train(model_from_config(config), cluster, plan, job, options)
    peak, moment = AUTOCAST[case]
    assert report.evaluation.peak == pytest.approx(peak, rel=1e-3)
    assert report.peak_moment == moment


# (layers, tp, vocabulary, tokens, sequences, micro-batches) -> bytes at the peak, and what is at work there.
SPLIT = {
    (2, 2, 16384, 256, 1, 1): (111_174_744, "optimizer step"),
    (2, 4, 16384, 512, 1, 1): (73_394_272, "loss"),
    (2, 8, 32768, 512, 1, 1): (76_051_544, "optimizer step"),
    (3, 8, 16384, 256, 2, 1): (42_765_436, "optimizer step"),
    (2, 4, 32768, 256, 1, 2): (139_077_216, "loss"),
    (2, 8, 32768, 512, 1, 2): (106_354_528, "loss"),
}


@pytest.mark.parametrize("case", SPLIT, ids=lambda case: "-".join(map(str, case)))
def test_the_peak_under_sequence_parallelism_is_what_torch_allocated(case: tuple[int, ...]) -> None:
    """DTensor's loss has four fp32 copies of a rank's logits; it makes the table's gradient whole on each rank.

    Every storage of real tensors was followed through the second of two steps of torchtitan's plan, with loss_parallel
    (torch 2.13.0, transformers 5.23.0, the fake process group). The optimizer's step counters are not in ours.
    """
    layers, tp, vocab, seq_len, batch, micro = case
    config = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": layers, "num_attention_heads": 16,
              "num_key_value_heads": 8, "intermediate_size": 1024, "vocab_size": vocab, "tie_word_embeddings": False,
              "max_position_embeddings": 8192, "hidden_act": "silu", "rms_norm_eps": 1e-05}  # fmt: skip
    # transformers' classes, unlike torchtitan's, leave heads that share keys to the kernel.
    stack = replace(find_stack("fsdp2-2024"), optimizer_step="single", repeats_kv=False)
    job = Training(seq_len=seq_len, global_batch=batch * micro, precision="bf16-pure")
    plan, cluster = Plan(tp=tp, micro_batch=batch), Cluster.parse(f"{tp}xa100-sxm-80gb")
    report = train(model_from_config(config, name="traced"), cluster, plan, job, TrainingOptions(stack=stack))
    peak, moment = SPLIT[case]
    assert report.evaluation.peak == pytest.approx(peak, rel=5e-4) and report.peak_moment == moment


def test_gpipe_holds_the_logits_of_every_waiting_micro_batch() -> None:
    """Under GPipe each micro-batch more adds its activations and what its head and loss keep to every backward pass."""
    model, found = load_model("gpt2"), []
    for micro in (2, 3):
        job = Training(seq_len=1024, global_batch=micro, precision="bf16")
        plan = Plan(schedule="gpipe", micro_batch=1, pp=2)
        found.append(train(model, Cluster.parse("2xa100-sxm-80gb"), plan, job).evaluation)
    two, three = (e.memory[-1].moments["backward"] for e in found)
    parts, stage = found[0].parts, found[0].stages[-1]
    layers = sum(n * k.kept_bytes for n, k in zip(stage.layers, parts.kinds, strict=True))
    assert three - two == pytest.approx(layers + parts.head.kept_bytes + parts.loss.kept_bytes)


def test_one_stage_accumulates_under_any_schedule() -> None:
    """Without a pipeline a micro-batch is backward before the next is forward, whatever its schedule is called."""
    model, cluster = load_model("gpt2"), Cluster.parse("1xa100-sxm-80gb")
    job = Training(seq_len=1024, global_batch=8, precision="bf16")
    names: tuple[Schedule, ...] = ("1f1b", "gpipe", "zb-h1")
    reports = [train(model, cluster, Plan(schedule=name, micro_batch=1), job) for name in names]
    assert len({one.device_bytes for one in reports}) == 1
    assert [one.step_seconds for one in reports] == pytest.approx([reports[0].step_seconds] * 3)


@pytest.mark.parametrize("run", [run for run in TRACKED if run["mode"] == "fsdp"], ids=lambda run: run["id"])
def test_state_at_rest_is_what_the_tracker_saw(run: dict[str, Any]) -> None:
    """Sharded weights and moments are torch's to the byte, padding of uneven tensors included.

    Its optimizer counts the steps of each tensor besides, in 4 bytes.
    """
    (memory,) = tracked(run).evaluation.memory
    assert memory.weights == run["state_bytes"]["weights"]
    left = run["state_bytes"]["optimizer"] - memory.optimizer
    assert left % 4 == 0
    assert 0 < left / 4 < 70


def test_colossalai_widens_a_shard_beside_the_gradients_that_zero1_keeps_whole() -> None:
    """Its step holds 16-bit weights and gradients beside a shard in fp32, gradients too: 4 P + 16 P / dp.

    github.com/hpcaitech/ColossalAI colossalai/zero/low_level/low_level_optim.py step; its own benchmark printed
    104.93 GB allocated on the first rank of this plan (README.md, 2025).
    """
    plan = Plan(tp=2, pp=4, dp=2, micro_batch=1, sharding="zero1", recompute="full")
    job = Training(seq_len=4096, global_batch=256)
    options = TrainingOptions(stack=find_stack("colossalai"))
    report = train(load_model("llama-2-70b"), Cluster.parse("16xb200-sxm-180gb"), plan, job, options)
    first = report.evaluation.memory[0]
    held = 2 * first.weights + (4 + 12) * (first.weights / 2) / plan.dp
    assert first.moments["optimizer step"] == pytest.approx(held, rel=3e-3)
    assert first.peak == pytest.approx(104.93e9, rel=0.01)


@pytest.mark.parametrize(
    ("stack", "schedule", "sharding"), [("trl", "sequential", "none"), ("deepspeed", "1f1b", "zero1")]
)
def test_stages_set_nothing_aside_for_micro_batches_to_come(stack: str, schedule: Schedule, sharding: Sharding) -> None:
    """Layers split by device_map, and DeepSpeed's stages, hold the same with 8 and with 256 micro-batches a step.

    torch.distributed.pipelining alone sets a buffer aside for each (accelerate hooks.py; deepspeed pipe/engine.py).
    """
    plan = Plan(pp=2, dp=2 if sharding == "zero1" else 1, schedule=schedule, sharding=sharding, recompute="full")
    cluster = Cluster.parse(f"{plan.pp * plan.dp}xa100-sxm-80gb")
    few, many = (
        train(
            load_model("llama-3.2-1b"),
            cluster,
            plan,
            Training(seq_len=4096, global_batch=n * plan.dp),
            TrainingOptions(stack=find_stack(stack)),
        ).evaluation.peak
        for n in (8, 256)
    )
    assert many == few


@pytest.mark.parametrize(("intermediate", "rings_decide"), [(3072, True), (32768, False)])
def test_a_ring_works_where_the_feed_forward_was(intermediate: int, rings_decide: bool) -> None:
    """Backward of PyTorch's ring takes what a wide feed-forward has freed, beside a narrow one its own blocks.

    Gathering all keys and values holds cp - 2 chunks of them more than rotating.
    """
    config = {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": intermediate, "num_hidden_layers": 4,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 1024,
        "max_position_embeddings": 40960, "tie_word_embeddings": True,
    }  # fmt: skip
    tokens, cp = 524288, 8
    plan = Plan(cp=cp, sharding="fsdp", recompute="full", micro_batch=1)
    model, cluster = model_from_config(config, name="narrow or wide"), Cluster.parse("8xh200-sxm-141gb")
    job, options = Training(seq_len=tokens, global_batch=1), TrainingOptions(stack=find_stack("accelerate"))
    kinds = (plan, replace(plan, cp_kind="all-gather"))
    turning, gathering = (train(model, cluster, each, job, options).allocated_bytes for each in kinds)
    chunk = 2 * tokens // cp * 2 * 8 * 128
    assert gathering - turning == (rings_decide and (cp - 2) * chunk)
