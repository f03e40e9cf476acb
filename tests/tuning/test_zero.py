"""Trainers under ZeRO: DeepSpeed shards, and what the trainer does to the model stays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from command_line import both, run
from shardwise import Cluster, Plan, Training, load_model, train
from shardwise.training import TrainingOptions


def asked(*words: str) -> dict[str, Any]:
    """Return the answer for a model of 8 billion parameters on eight devices."""
    ask = ("train", "llama-3.1-8b", "--on", "8xa100-sxm-80gb", "--seq-len", "2048", "--global-batch", "8")
    return run(*ask, "--micro-batch", "1", *words, "--json").tree


@pytest.mark.parametrize("stack", ["trl", "axolotl", "llama-factory", "ms-swift", "transformers"])
@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
def test_zero_of_a_trainer_is_deepspeeds(stack: str, sharding: str) -> None:
    """Its masters, moments and buckets are DeepSpeed's, and the sharding keeps the word that people type."""
    own = asked("--stack", stack, "--sharding", sharding)
    engine = asked("--stack", "deepspeed", "--sharding", sharding)
    assert own["plan"]["sharding"] == sharding
    assert own["launchable"]
    assert own["memory"]["at_peak"]["optimizer"] == engine["memory"]["at_peak"]["optimizer"]
    assert own["tuning"] == engine["tuning"]


def test_a_trainer_under_zero_keeps_its_loss_and_its_checkpoints() -> None:
    """TRL's loss takes the head with it, and its checkpoints of adapters run again whole under ZeRO-3 alone."""
    own = asked("--stack", "trl", "--sharding", "zero3", "--adapter", "lora")
    engine = asked("--stack", "deepspeed", "--sharding", "zero3", "--adapter", "lora", "--recompute", "full")
    assert own["plan"]["recompute"] == "full"
    assert "logits" not in own["memory"]["at_peak"] or not own["memory"]["at_peak"]["logits"]
    assert engine["memory"]["at_peak"]["logits"] > 2e9
    whole = asked("--stack", "trl", "--sharding", "zero3")["step"]["recompute_seconds"]
    assert own["step"]["recompute_seconds"] > whole


def test_what_is_asked_again_names_the_trainer() -> None:
    """The command at the end of an answer gives the same answer."""
    first = run("train", "llama-3.1-8b", "--on", "8xa100-sxm-80gb", "--seq-len", "2048", "--global-batch", "8",
                "--stack", "trl", "--sharding", "zero2")  # fmt: skip
    assert "--stack trl" in first.out
    assert "stack trl: TRL's trainers, sharded by deepspeed" in " ".join(first.out.split())


def test_a_trainer_hands_its_optimizer_to_deepspeed() -> None:
    """Moments of 8 bits run under ZeRO, the embedding's too; GaLore reads whole matrices, and does not."""
    narrow = asked("--stack", "axolotl", "--sharding", "zero3", "--optimizer", "adam8bit")
    assert narrow["launchable"]
    parameters = 8_030_261_248
    assert narrow["memory"]["at_peak"]["optimizer"] == pytest.approx(parameters * (4 + 2 * (1 + 4 / 256)) / 8, rel=1e-3)
    assert not asked("--stack", "axolotl", "--sharding", "zero3", "--optimizer", "galore")["launchable"]


def test_the_library_takes_a_trainer_by_name() -> None:
    """As the command does."""
    model, cluster = load_model("llama-3.1-8b"), Cluster.parse("8xa100-sxm-80gb")
    job = Training(seq_len=2048, global_batch=8)
    report = train(model, cluster, Plan(dp=8, micro_batch=1, sharding="zero2"), job, TrainingOptions(stack="trl"))
    assert report.case.stack.precision == "bf16-grads16"


def test_a_file_keeps_its_trainer_where_its_sharding_changes(tmp_path: Path) -> None:
    """What a flag shards otherwise, the trainer of the file runs all the same."""
    text = "base_model: meta-llama/Llama-3.1-8B\nsequence_len: 2048\nmicro_batch_size: 1\n"
    (tmp_path / "a.yaml").write_text(text + "gradient_accumulation_steps: 1\nbf16: true\n", encoding="utf-8")
    ask = ("train", "--from", str(tmp_path / "a.yaml"), "--on", "8xa100-sxm-80gb", "--json")
    for word in ("zero3", "fsdp"):
        tree = run(*ask, "--sharding", word).tree
        assert tree["plan"]["sharding"] == word
        assert any(line.startswith("stack axolotl") for line in tree["assumptions"])


@pytest.mark.parametrize("dtype", ["", "dtype: bfloat16\n"])
def test_fsdp_beside_mixed_precision_widens_what_trains(dtype: str, tmp_path: Path) -> None:
    """Accelerate makes fp32 of weights that were loaded in 16 bits, before it shards them."""
    text = f"model_name_or_path: meta-llama/Llama-3.1-8B\nmax_length: 2048\nbf16: true\nfsdp: full_shard\n{dtype}"
    (tmp_path / "a.yaml").write_text(text + "per_device_train_batch_size: 1\n", encoding="utf-8")
    tree = run("train", "--from", str(tmp_path / "a.yaml"), "--on", "8xa100-sxm-80gb", "--json").tree
    assert tree["memory"]["at_peak"]["optimizer"] == pytest.approx(8_030_261_248 * 8 / 8, rel=1e-3)


@pytest.mark.parametrize(("stack", "width"), [("ms-swift", 4), ("transformers", 4), ("axolotl", 2), ("litgpt", 2)])
def test_what_trains_under_fsdp_is_as_wide_as_accelerate_makes_it(stack: str, width: int) -> None:
    """Beside mixed precision accelerate widens what trains; axolotl's and LitGPT's own ways leave it in bfloat16."""
    sharded = asked("--stack", stack, "--sharding", "fsdp")["memory"]["at_peak"]
    assert sharded["weights"] == pytest.approx(8_030_261_248 * width / 8, rel=1e-3)
    tuned = asked("--stack", stack, "--sharding", "fsdp", "--adapter", "lora")["memory"]["at_peak"]
    assert tuned["weights"] == pytest.approx(8_030_261_248 * 2 / 8, rel=1e-2)


@pytest.mark.parametrize(
    ("stack", "model", "more"),
    [("trl", "llama-3.1-8b", ()), ("llama-factory", "llama-3.1-8b", ()),
     ("axolotl", "qwen3-30b-a3b", ("--adapter", "lora", "--base", "nf4"))],
)  # fmt: skip
@pytest.mark.parametrize("sharding", ["fsdp", "none,fsdp"])
def test_a_search_of_sharded_plans_is_what_train_says(
    stack: str, model: str, more: tuple[str, ...], sharding: str
) -> None:
    """Autocast casts no weights that are sharded, and frozen experts stay narrow, whichever shardings are searched.

    The page has the front as it was searched, the tree as `train` answers for each of its plans.
    """
    ask = ("plan", "train", model, "--on", "8xh200", "--seq-len", "1024", "--global-batch", "8", "--stack", stack)
    words = (*ask, *more, "--sharding", sharding, "--tp", "1", "--pp", "1", "--cp", "1", "--ep", "1")
    printed, read = both(*words)
    answered = [f"{row['device_bytes'] / 2**30:.2f}" for row in read.tree["front"]]
    searched = re.findall(r"ms +([0-9.]+) GiB +8 ", printed.out.split("FRONT")[1].split("REJECTED")[0])
    assert searched == answered
