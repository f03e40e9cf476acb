"""Categories of memory: they are those of the terms, not of what a page calls them."""

from __future__ import annotations

import pytest

from command_line import run
from shardwise.answers._train_tree import peak_parts
from shardwise.hardware import Cluster
from shardwise.ledger.traced import parts
from shardwise.models import load_model
from shardwise.plans import Plan, Training
from shardwise.training import TrainingOptions, TrainReport, train
from shardwise.training._parts import MEMORY_CATEGORIES, category_of
from shardwise.units import show_bytes

PLANS = (
    (Plan(dp=8, sharding="fsdp", micro_batch=1), "fsdp2"),
    (Plan(tp=4, dp=2, sharding="distributed-optimizer", micro_batch=1, recompute="full"), "megatron"),
    (Plan(dp=8, sharding="zero2", micro_batch=1), "deepspeed"),
    (Plan(pp=4, dp=2, schedule="gpipe", micro_batch=1), "pytorch"),
)


def answer(plan: Plan, stack: str) -> TrainReport:
    """Return the answer for Llama-8B on eight A100."""
    cluster = Cluster.parse("8xa100-sxm-80gb")
    return train(
        load_model("llama-3.1-8b"), cluster, plan, Training(seq_len=4096, global_batch=16), TrainingOptions(stack=stack)
    )


@pytest.mark.parametrize(("plan", "stack"), PLANS, ids=[stack for _, stack in PLANS])
def test_state_is_counted_in_its_own_category(plan: Plan, stack: str) -> None:
    """Weights and optimizer state of the peak are the stage's own, and all categories add up to the device's bytes."""
    report = answer(plan, stack)
    shares = peak_parts(report)
    assert shares["weights"] == pytest.approx(report.memory.weights)
    assert shares["optimizer"] == pytest.approx(report.memory.optimizer)
    assert shares["gradients"] <= report.memory.gradients * (1 + 1e-12)
    assert sum(shares.values()) == pytest.approx(report.device_bytes)


@pytest.mark.parametrize(("plan", "stack"), PLANS, ids=[stack for _, stack in PLANS])
def test_every_large_term_has_a_category(plan: Plan, stack: str) -> None:
    """At every moment no more than a tenth of the bytes is temporaries, and no term has an unknown category."""
    report = answer(plan, stack)
    for moment in report.traced.memory[report.peak_stage].moments.values():
        terms = parts(moment)
        assert {category_of(p) for p in terms} <= set(MEMORY_CATEGORIES)
        assert sum(p.amount for p in terms if category_of(p) == "temporaries") < 0.1 * float(moment)


@pytest.mark.parametrize("flags", ["--tp 2 --pp 2", "--sharding fsdp", "--adapter lora --optimizer paged-adam8bit"])
def test_what_is_explained_and_what_lies_beside_it_are_what_train_says(flags: str) -> None:
    """Tensors open; with workspaces they are the allocated peak of `train`, with all beside them the device's bytes."""
    words = ("llama-3.1-8b", "--on", "8xh100", "--seq-len", "4096", "--micro-batch", "1", *flags.split(), "--json")
    opened = run("explain", *words, "--what", "memory").tree
    memory = run("train", *words).tree["memory"]
    assert opened["value"] + opened["other_bytes"]["workspaces"] == pytest.approx(memory["peak_bytes"], abs=1)
    assert opened["value"] + sum(opened["other_bytes"].values()) == pytest.approx(memory["device_bytes"], abs=1)
    below = run("explain", *words, "--what", "memory", "--path", opened["parts"][0]["label"]).tree
    assert "other_bytes" not in below


@pytest.mark.parametrize("sharding", ["zero1", "none"])
def test_gradients_that_are_not_made_yet_are_taken_from_gradients(sharding: str) -> None:
    """The embedding's gradient comes last: where the peak is before it, gradients are fewer and nothing is negative."""
    words = ("train", "qwen3-30b-a3b", "--on", "16xa100-sxm-80gb", "--micro-batch", "2", "--recompute", "full")
    memory = run(*words, "--stack", "fsdp2", "--sharding", sharding, "--json").tree["memory"]
    assert memory["peak_moment"] == "gradients complete"
    assert all(value >= 0 for value in memory["at_peak"].values())
    whole = memory["stages"][0]["categories"]["gradients"]
    assert memory["at_peak"]["gradients"] == whole - 4 * 151_936 * 2_048


@pytest.mark.parametrize(
    "words",
    [
        "llama-3.1-8b --on 1xrtx-4090 --qlora --seq-len 8192",
        "mixtral-8x7b --on 64xh100 --stack axolotl --sharding fsdp --seq-len 512 --global-batch 512 --micro-batch 2",
    ],
)
def test_the_allocator_of_a_full_device_holds_no_more_than_the_device_shows(words: str) -> None:
    """What it gives back before it fails is no longer reserved, and `explain` has the parts that `train` has."""
    memory = run("train", *words.split(), "--json").tree["memory"]
    assert memory["reserved_bytes"] + memory["at_peak"]["context"] == pytest.approx(memory["device_bytes"])
    beside = " ".join(run("explain", *words.split(), "--what", "memory").out.split())
    for key, name in (("allocator", "allocator reserve"), ("context", "context and communicators")):
        assert f"{show_bytes(memory['at_peak'][key])} of {name}" in beside
