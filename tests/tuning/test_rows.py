"""Rows of fine-tuning in files of measurements: what of them is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from accuracy.published import Published, PublishedTraining
from shardwise.errors import InputError
from shardwise.hardware import Cluster, find_device
from shardwise.measured import read
from shardwise.measured._frameworks import framework_of
from shardwise.measured._record import Record
from shardwise.measured._training import TrainingRows, peak_memory
from shardwise.measured._training_plan import (
    _micro_batch,
    _schedule,
    effort_of,
    optimizer_of,
    optimizer_rank_of,
    precision_of,
)
from shardwise.measured._training_tuning import base_of, is_tuned, rank_of, targets_of, tuning_fields, with_length
from shardwise.models import Model
from shardwise.ops.count import trainable_parameters
from shardwise.plans import Plan, Training, find_stack, tuning_of
from shardwise.training import TrainingOptions, TrainReport, outside_bytes, reserved_bytes, train

LLAMA = Model.load("llama-3.2-3b")


def outside_of(report: TrainReport) -> float:
    """Return the bytes of the context and communicators of a rank."""
    return outside_bytes(report.case.stack, report.case.cluster, report.evaluation.sizes)


def row(**cells: str) -> Record:
    """A row of a run with LoRA."""
    return Record({"finetune": "lora", "param_dtype": "bf16", "notes": "", **cells})


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ("lora_targets=q,k,v,o; decimal GB", ("q", "k", "v", "o")),
        ("targets=down_proj,up_proj", ("down_proj", "up_proj")),
        ("experiment=lily; r=140 targets=down_proj,up_proj; decimal GB", ("down_proj", "up_proj")),
        ("LoRA on all linear modules", ("attention", "mlp")),
        ("lora_targets=None", ("q", "v")),
        ("experiment=beft--llama-3.2-3B-target-v_proj; trainable_params=28672", ("v_proj",)),
        ("experiment=lora/llama-3.2-3B-rank14-target-mlp-bdlora", ("mlp",)),
        ("", ("q", "v")),
    ],
)
def test_targets_are_those_that_a_row_names(notes: str, expected: tuple[str, ...]) -> None:
    """A list in the notes, a word for all, what the experiment is called, or the two of the paper."""
    assert targets_of(row(notes=notes)) == expected


def test_a_rank_that_is_not_stated_follows_from_the_parameters() -> None:
    """As many parameters as a row says train are those of one rank, or of so many virtual tokens."""
    fields = {"adapter": "lora", "base": "bf16", "targets": ("q", "v")}
    assert rank_of(row(notes="trainable_params=9175040"), LLAMA, fields) == 32
    assert rank_of(row(lora_rank="4"), LLAMA, fields) == 4
    assert rank_of(row(), LLAMA, fields) == 8
    assert (
        rank_of(row(notes="experiment=lily--llama-3.2-3B-rank140-mlp; trainable_params=9485280"), LLAMA, fields) == 140
    )
    prefix = {"adapter": "prefix", "base": "bf16"}
    assert rank_of(row(notes="trainable_params=11468800"), LLAMA, prefix) == 200
    with pytest.raises(InputError):
        rank_of(row(lora_rank="100000"), LLAMA, fields)
    with pytest.raises(InputError, match="hidden size"):
        rank_of(row(notes="experiment=lora--llama-3.2-3B-rank100000"), LLAMA, fields)


@pytest.mark.parametrize(
    ("targets", "expected"), [((), 286_720), (("all-linear",), 917_504), (("gate", "up"), 458_752)]
)
def test_ia3_scales_outputs_of_gate_and_up(targets: tuple[str, ...], expected: int) -> None:
    """As many parameters as peft 0.20 trains: a factor an output, an input where the second GEMM is among them."""
    job = Training(seq_len=1, global_batch=1, adapter="ia3", targets=targets)
    tuning = tuning_of(job, find_stack("transformers"))
    assert tuning is not None and sum(trainable_parameters(LLAMA, tuning).values()) == expected


def test_the_length_of_natural_samples_depends_on_the_metric() -> None:
    """The longest sample sets the peak, the mean one the time."""
    cells = {"notes": "longest_sample=1044; mean_tokens_per_sample=210.4"}
    assert with_length(row(metric="peak_memory", **cells)).text("seq_len") == "1044"
    assert with_length(row(metric="step_time", **cells)).text("seq_len") == "210"
    with pytest.raises(InputError):
        with_length(row(metric="step_time", notes="longest_sample=1044"))


def test_each_kind_of_bytes_has_a_length_of_its_own() -> None:
    """An allocator holds the longest of peft's sorted samples, tensors are those of the mean: neither answers both."""
    notes = "variable length up to 768, mean_tokens_per_sample=209.9"
    cells = {"metric": "memory_avg", "notes": notes, "seq_len": "768", "micro_batch": "4"}
    reserved, allocated = (row(memory_kind=kind, **cells) for kind in ("reserved", "allocated"))
    assert with_length(reserved).text("seq_len") == "322"
    assert with_length(allocated).text("seq_len") == "210"
    rows = TrainingRows()
    assert rows.asked(reserved) != rows.asked(allocated)


def test_formats_and_variants_are_those_of_the_row() -> None:
    """The type of the frozen weights is stated or that of QLoRA; an experiment's name may say the variant."""
    assert base_of(row(param_dtype="nf4_dq")) == "nf4-dq"
    assert base_of(row(param_dtype="int4")) == "gptq4"
    assert base_of(row(param_dtype="", finetune="qlora")) == "nf4"
    assert tuning_fields(row(notes="experiment=lora--llama-3.2-3B-rank32-dora"), LLAMA)["adapter"] == "dora"
    with pytest.raises(InputError):
        tuning_fields(row(finetune="galore"), LLAMA)


def test_modules_that_are_saved_train_whole() -> None:
    """A row that names the embedding table and the head as saved trains both beside its adapters."""
    notes = "lora_targets=q,v; wte and lm_head trained too (modules_to_save)"
    assert tuning_fields(row(notes=notes, lora_rank="8"), LLAMA)["trains"] == ("embedding", "head")
    assert "trains" not in tuning_fields(row(notes="wte is large", lora_rank="8"), LLAMA)


def test_samples_above_the_length_are_left_out_of_the_mean() -> None:
    """A data set of a stated mean and spread: time follows what is left below the length, memory the length."""
    cells = {"seq_len": "2048", "notes": "variable length (tokens of the data set 3234.4 +- 2547.5, min 91)"}
    assert with_length(row(metric="step_time", **cells)).text("seq_len") == "1122"
    assert with_length(row(metric="peak_memory", **cells)).text("seq_len") == "2048"


def test_samples_of_many_lengths_reserve_the_loss_of_the_longest_again() -> None:
    """Logits of shorter samples leave no block for those of the longest, but no device reserves more than it has."""
    notes = "variable length (tokens of the data set 3234.4 +- 2547.5, min 91)"
    for tokens, full in ((2048, False), (24576, True)):
        job = Training(seq_len=tokens, global_batch=4, adapter="lora")
        report = train(
            LLAMA, Cluster.parse("1xa100-sxm-80gb"), Plan(recompute="full"), job, TrainingOptions(stack="ms-swift")
        )
        (memory,) = report.evaluation.memory
        cells = {"seq_len": str(tokens), "memory_kind": "reserved"}
        even, many = (peak_memory(row(**cells, notes=said), report) for said in ("", notes))
        room = report.case.cluster.device.usable_memory_bytes - report.case.stack.context_bytes(
            report.case.cluster.device
        )
        assert many == pytest.approx(room if full else even + float(memory.logits))


def test_a_device_map_runs_one_micro_batch_at_a_time() -> None:
    """Layers on two devices are no pipeline: a step takes as long as on one, and one micro-batch is held."""
    split = row(notes="model split over 2 GPUs by device_map: the larger of the two")
    assert (_schedule(split, 1), _schedule(row(), 1)) == ("sequential", "1f1b")
    job = Training(seq_len=512, global_batch=8, adapter="lora")
    plan, two = Plan(pp=2, micro_batch=1, schedule="sequential"), Cluster.parse("2xa100-sxm-80gb")
    found = train(LLAMA, two, plan, job, TrainingOptions(stack="ms-swift"))
    one = train(LLAMA, Cluster.parse("1xa100-sxm-80gb"), Plan(micro_batch=1), job, TrainingOptions(stack="ms-swift"))
    assert found.step_seconds == pytest.approx(one.step_seconds, rel=0.05)
    assert {float(m.in_flight) for m in found.evaluation.memory} == {1}


def test_memory_of_an_unstated_kind_is_what_the_device_shows() -> None:
    """The context of the driver is beside what the allocator reserves, unless a row says reserved."""
    job = Training(seq_len=2048, global_batch=4, adapter="lora")
    report = train(
        LLAMA, Cluster.parse("1xa100-sxm-80gb"), Plan(recompute="full"), job, TrainingOptions(stack="llama-factory")
    )
    shown, same, held = (
        peak_memory(row(memory_kind=kind), report) for kind in ("unspecified", "nvidia_smi", "reserved")
    )
    assert shown == same == pytest.approx(held + report.case.stack.context_bytes(report.case.cluster.device))


def test_targets_of_a_framework_are_its_own() -> None:
    """AgileRL adapts all linear layers where a row names none."""
    assert targets_of(row(framework="AgileRL 2.8", notes="lora_targets=None")) == ("all-linear",)


@pytest.mark.parametrize(
    ("group", "notes", "expected"), [("4", "group_size=4", 4), ("16", "group_size=16", 8), ("4", "", 8)]
)
def test_the_answers_of_a_prompt_bound_a_micro_batch(group: str, notes: str, expected: int) -> None:
    """A micro-batch has no more rows than there are answers; without a group the stated one stands, and is refused."""
    stated = row(global_batch=group, micro_batch="8", notes=notes)
    assert _micro_batch(stated, framework_of(read("frameworks.toml"), "agilerl", {}), 1, 1) == expected


def test_deepspeed_trains_adapters_in_the_type_of_the_model() -> None:
    """Its engine casts the whole module, adapters too; the Trainer of the time kept those in fp32 under autocast."""
    job = Training(seq_len=1, global_batch=1, adapter="lora")
    engine, trainer = tuning_of(job, find_stack("deepspeed")), tuning_of(job, find_stack("trainer-2023"))
    assert engine is not None
    assert trainer is not None
    assert (engine.width, engine.autocast) == (2, False)
    assert (trainer.width, trainer.autocast) == (4, True)


def test_projected_gradients_train_all_weights() -> None:
    """GaLore is an optimizer of full training, with the rank of the notes; narrow projections are refused."""
    cells = {"finetune": "galore", "optimizer": "adamw"}
    found = row(**cells, notes="experiment=full+galore32; galore_rank=32/galore_per_parameter=false")
    assert not is_tuned(found)
    assert (optimizer_of(found), optimizer_rank_of(found)) == ("galore", 32)
    with pytest.raises(InputError):
        optimizer_of(row(**cells, notes="experiment=full+galore128+quantize"))


def test_a_run_of_unstated_lengths_has_no_known_time() -> None:
    """The runtime of epochs over samples of natural lengths is refused, with the lengths as the reason."""
    with pytest.raises(InputError, match="mean length"):
        with_length(row(metric="total_runtime", notes="epochs=2 of Alpaca2k (2000 samples); natural lengths"))


def test_adapters_take_no_factor_of_pre_training() -> None:
    """What published runs take beyond those for a record was seen in pre-training; a row that trains all takes it."""
    assert effort_of(row()) == "record"
    assert effort_of(row(finetune="full")) == "typical"


@pytest.mark.parametrize(("torch", "answers"), [("2.9.0+cu128", False), ("2.13.0+cu130", True)])
def test_answers_that_a_source_times_with_its_steps_are_added(torch: str, answers: bool) -> None:
    """Runs of peft with torch 2.13 have 350 to 550 s of answers in the time of 5,000 steps; earlier ones have none."""
    row = {
        "case_id": "a", "model": "llama-3.2-3b", "device": "l40s", "num_gpus": "1", "seq_len": "768",
        "micro_batch": "4", "global_batch": "4", "finetune": "lora", "lora_rank": "32", "param_dtype": "bf16",
        "recompute": "none",
        "framework": f"HF peft 0.19 / torch {torch}", "citation": "github:huggingface/peft@0:MetaMathQA/results/a.json",
        "notes": "mean_tokens_per_sample=209.9; targets=q_proj,v_proj",
    }  # fmt: skip
    rows, context = PublishedTraining(), Published(Path())
    step = rows(Record({**row, "metric": "step_time"}), context).value
    tokens = rows(Record({**row, "metric": "tokens_per_second_per_gpu"}), context).value
    more = 5000 * (step - 4 * 209.9 / tokens)
    assert 350 < more < 550 if answers else abs(more) < 5


def test_a_run_that_ran_reserved_no_more_than_there_is() -> None:
    """What lies free in the allocator's blocks goes back before it fails: reserved bytes end at the device's room.

    Communicators have theirs outside it, as the context has.
    Twelve sequences fill a card of 24 GB but for what their layers leave in blocks; its tensors alone would fit.
    """
    job = Training(seq_len=2048, global_batch=24, adapter="lora", rank=64, base="nf4-dq")
    plan = Plan(dp=2, micro_batch=12, sharding="fsdp", recompute="full", offload=("parameters",))
    options = TrainingOptions(stack=find_stack("fsdp-2024"))
    report = train(Model.load("llama-2-7b"), Cluster.parse("2xrtx-4090"), plan, job, options)
    cells = {"seq_len": "2048", "memory_kind": "reserved"}
    room = report.case.cluster.device.usable_memory_bytes - outside_of(report)
    (memory,) = report.evaluation.memory
    assert float(memory.peak) < room < float(reserved_bytes(report.case.stack, memory))
    assert peak_memory(row(**cells), report) == pytest.approx(room, rel=2e-3)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"compute_dtype": "fp16", "device": "t4"}, "amp-fp16"),
        ({"compute_dtype": "fp16", "device": "t4", "notes": "loop without autocast"}, "fp16"),
        ({"compute_dtype": "bf16", "device": "l4", "notes": "loop without autocast"}, "bf16-pure"),
        ({"compute_dtype": "fp16", "device": "l4"}, ""),
    ],
)
def test_rows_say_whether_they_autocast(cells: dict[str, str], expected: str) -> None:
    """On a device without bf16 a row in fp16 runs, under the trainer's autocast unless it says that it has none."""
    rates = set(find_device(cells["device"]).device.matrix_flops)
    assert precision_of(row(**cells), "transformers", rates, {}) == expected
