"""What lies beside 4-bit weights: scales that nothing shards, parameters that are not narrow; and their decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from command_line import run
from ops.helpers import layout
from shardwise.cost import Efficiencies, op_seconds, rates_of
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.ops.block import block_ops
from shardwise.plans import Plan, Settings, Training, find_stack, tuning_of
from shardwise.training import TrainingOptions, TrainReport, train

MODEL = load_model("llama-3.1-70b")
D, F, KV, L = 8192, 28672, 1024, 80
MATRICES = L * (2 * D * D + 2 * D * KV + 3 * D * F)


def held(dp: int, base: str, stack: str = "transformers", **plan: object) -> TrainReport:
    """Return the report of LoRA beside frozen weights that FSDP shards."""
    job = Training(seq_len=512, global_batch=dp, adapter="lora", rank=8, targets=("q",), base=base)
    one = Plan(dp=dp, micro_batch=1, sharding="fsdp", recompute="full", **plan)  # type: ignore[arg-type]
    return train(MODEL, Cluster.parse(f"{dp}xa100-sxm-80gb"), one, job, TrainingOptions(stack=find_stack(stack)))


@pytest.mark.parametrize(("base", "scales"), [("nf4", 4 / 64), ("nf4-dq", 1 / 64 + 4 / (64 * 256))])
def test_scales_of_bitsandbytes_are_whole_on_every_device(base: str, scales: float) -> None:
    """An fp32 or 8-bit maximum for 64 elements, 4.3 or 1.1 GB of 70 billion parameters, on two devices as on eight."""
    two, eight = (held(dp, base).memory.weights for dp in (2, 8))
    whole = (8 * eight - 2 * two) / (8 - 2)
    assert whole == pytest.approx(scales * MATRICES, rel=1e-3)


def test_scales_of_bitsandbytes_stay_on_the_device() -> None:
    """CPU offload of FSDP moves parameters: scales are none."""
    away = held(2, "nf4-dq", offload=("optimizer", "gradients", "parameters"))
    assert away.memory.weights == pytest.approx((1 / 64 + 4 / (64 * 256)) * MATRICES, rel=1e-3)


def test_scales_of_torchao_are_sharded() -> None:
    """NF4 tensors of torchao chunk their scales too: eight devices hold a quarter of what two do."""
    two, eight = (held(dp, "nf4-dq", "torchtune").memory.weights for dp in (2, 8))
    assert 4 * eight == pytest.approx(two, rel=1e-2)


def test_axolotl_keeps_what_its_page_says() -> None:
    """Apertus-8B in QLoRA "uses about 8.7 GiB" (examples/apertus of axolotl, 2026): reserved within 8 %."""
    job = Training(seq_len=2048, global_batch=8, adapter="lora", base="nf4-dq", rank=32, adapter_dropout=0.05)
    options = TrainingOptions(stack=replace(find_stack("axolotl"), settings=Settings(loss="cce")))
    plan = Plan(micro_batch=2, recompute="full")
    report = train(
        load_model("apertus-8b"), Cluster.parse("a100-sxm-80gb"), plan, replace(job, optimizer="adam8bit"), options
    )
    assert report.reserved_bytes / 2**30 == pytest.approx(8.7, rel=0.08)


@pytest.mark.parametrize(("device", "times"), [("a100-sxm-40gb", 2.0), ("h100-sxm-80gb", 1.0), ("rtx-4090", 1.0)])
def test_bitsandbytes_decoded_four_bits_by_branches(device: str, times: float) -> None:
    """Before 0.48 the kernel took twice its bytes on A100, and as long as they do where arithmetic is faster."""
    machine = Cluster.parse(f"1x{device}").device
    rates = rates_of(machine, "bf16", 0.0, Efficiencies())
    model = load_model("llama-2-7b")

    def seconds(stack: str, base: str) -> float:
        job = Training(seq_len=1, global_batch=1, adapter="lora", targets=("q",), base=base)
        y = layout(stack=stack, tuning=tuning_of(job, find_stack(stack)))
        return sum(float(op_seconds(rates, op).forward) for op in block_ops(y, model.layers[0], model.hidden))

    stacks = ("transformers-2024", "transformers")
    before, since = (seconds(stack, "nf4") - seconds(stack, "bf16") for stack in stacks)
    assert before / since == pytest.approx(times, abs=0.35)


@pytest.mark.parametrize(
    ("stack", "base"),
    [("unsloth", "nf4-dq"), ("axolotl", "nf4-dq"), ("llama-factory", "nf4-dq"), ("ms-swift", "nf4-dq"),
     ("torchtune", "nf4-dq"), ("trl", "nf4"), ("transformers", "nf4"), ("", "nf4")],
)  # fmt: skip
@pytest.mark.parametrize("words", [("--qlora",), ("--load-in-4bit", "--lora-r", "8")])
def test_four_bits_are_those_of_the_framework(stack: str, base: str, words: tuple[str, ...]) -> None:
    """Most frameworks quantise the scales too, and what is typed of a format stays."""
    ask = ("train", "llama-3.1-8b", "--on", "h100", "--seq-len", "512", *(("--stack", stack) if stack else ()))
    assert run(*ask, *words, "--json").tree["tuning"]["base"] == base
    assert run(*ask, *words, "--base", "nf4", "--json").tree["tuning"]["base"] == "nf4"
