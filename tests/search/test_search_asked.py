"""A search refuses of a job what one training refuses, and proposes no plan that a training would refuse."""

import json
import shlex
from pathlib import Path

import pytest

from command_line import both, run

_ASKED = "gpt2 --on 2xa100 --global-batch 8 --json"
# Flags, and the fields that are wrong with them.
REFUSED = (
    ("--seq-len 4096", ["seq_len"]),
    ("--seq-len 512 --restart 5min", ["restart"]),
    ("--seq-len 512 --epochs 2", ["epochs"]),
    ("--seq-len 512 --failures-per-device-hour 1e-5", ["checkpoint_interval"]),
    ("--seq-len 512 --rank 4", ["rank"]),
    ("--seq-len 512 --norm-bytes 3", ["norm_bytes"]),
    ("--seq-len 512 --rollout awake", ["rollout", "method"]),
    ("--seq-len 512 --fp8-recipe rowwise --stack megatron", ["fp8_recipe"]),
    ("--seq-len 512 --loss eager --stack megatron", ["loss"]),
    ("--seq-len 512 --trains layers:90", ["trains"]),
    ("--seq-len 512 --adapter lora --targets foo", ["targets"]),
    ("--seq-len 512 --adapter lora --trains foo", ["trains"]),
    ("--seq-len 512 --adapter oft --rank 7", ["adapter", "rank"]),
    ("--seq-len 512 --optimizer paged-adam8bit --offload optimizer --stack fsdp2", ["optimizer"]),
)
# Savers that a framework has not, which a training answers with "no launch".
LACKING = (
    ("--optimizer-in-backward --stack megatron", "optimizer_in_backward"),
    ("--tile-mlp 8 --stack torchtune", "tile_mlp"),
    ("--optimizer-in-backward --optimizer adam8bit --stack transformers", "optimizer"),
)
# Questions whose quickest layouts without a law of their own are none that a training takes.
PROPOSED = (
    "--optimizer-in-backward --stack torchtune",
    "--loss fused-linear --stack fsdp2",
    "--adapter adalora",
    "--adapter lora --targets attention",
    "--optimizer adam,paged-adam8bit --stack fsdp2 --explore --offload none,optimizer",
    "--tp 8 --sequence-parallel --stack transformers --explore",
)


@pytest.mark.parametrize(("flags", "field"), LACKING)
def test_a_search_refuses_savers_that_its_framework_has_not(flags: str, field: str) -> None:
    """`plan train` says which framework has them, and prices them all the same under `--explore`."""
    asked = (*_ASKED.split(), "--seq-len", "512", *flags.split())
    refused, explored = run("plan", "train", *asked), run("plan", "train", *asked, "--explore")
    assert (refused.status, refused.fields) == (2, [field])
    assert explored.status == 0
    assert '"launchable": false' in run("train", *asked).out


@pytest.mark.parametrize(("flags", "fields"), REFUSED)
def test_a_search_refuses_the_job_that_a_training_refuses(flags: str, fields: list[str]) -> None:
    """What is wrong with a job, or with settings of its framework, is wrong for every plan."""
    for command in (["train"], ["plan", "train"]):
        more = ["--explore"] if command[0] == "plan" else []
        done = run(*command, *_ASKED.split(), *flags.split(), *more)
        assert (done.status, sorted(set(done.fields))) == (2, sorted(fields)), command


@pytest.mark.parametrize("flags", PROPOSED)
def test_the_best_plan_is_one_that_a_training_takes(flags: str, tmp_path: Path) -> None:
    """The case that a search writes is answered, and fits as the search says."""
    asked, best = "llama-3.1-8b --on 8xh100 --seq-len 4096 --global-batch 64 --json", tmp_path / "best.toml"
    found = run("plan", "train", *asked.split(), *flags.split(), "--save-best", str(best))
    assert found.status == 0
    alone = run("train", "--config", str(best), "--json")
    assert alone.status == 0, alone.out
    assert alone.tree["step_seconds"] == pytest.approx(found.tree["best"][0]["step_seconds"], rel=1e-9)


def test_layouts_that_no_framework_splits_are_counted_under_a_law() -> None:
    """Tensor parallelism of an adapter that nothing splits is rejected by name, with what does instead."""
    words = shlex.split("llama-3.1-8b --on 8xh100 --seq-len 4096 --global-batch 64 --adapter adalora --json")
    laws = {one["name"]: one for one in run("plan", "train", *words, "--explore").tree["rejected"]}
    assert laws["job"]["count"] > 0
    assert "adalora" in laws["job"]["remedy"]


@pytest.mark.parametrize(
    "words",
    [
        "llama-3.1-8b --on 8xh100 --adapter ia3 --base int8",
        "llama-3.1-8b --on 2xl40s --adapter vera --stack trl",
        "zamba2-7b --on 8xa100-sxm-40gb --adapter lora --stack unsloth --recompute full",
    ],
)
def test_the_best_plan_is_asked_again_against_what_its_framework_does_unless_told(words: str) -> None:
    """What recomputes beside quantised weights, and what goes to the host, is named where the best plan does not."""
    asked = ["plan", "train", *shlex.split(words), "--global-batch", "64", "--seq-len", "1024"]
    printed, read = both(*asked)
    best = read.tree["best"][0]
    command = shlex.split(printed.out.split("AGAIN\n")[1].replace("\\\n", " "))
    again = json.loads(run(*command[1:], "--json").out)
    assert (again["device_bytes"], again["step_seconds"]) == (best["device_bytes"], best["step_seconds"])


@pytest.mark.parametrize("given", ["--ep 2,4", "--etp 2..8"])
@pytest.mark.parametrize("asked", ["train {} --global-batch 8", "infer {}", "serve {} --rate 1"])
def test_degrees_of_experts_are_refused_of_a_model_without_any(asked: str, given: str) -> None:
    """The same words as of one plan; a range that holds 1 is what a study asks of dense models and of mixtures."""
    words = asked.format("llama-3.1-8b --on 2xh100").split()
    done, (axis, values) = run("plan", *words, *given.split(), "--json"), given.split()
    alone = run("infer", "llama-3.1-8b", "--on", "2xh100", axis, "2", "--json")
    assert done.status == alone.status == 2
    assert done.tree["error"] == alone.tree["error"]
    assert run("plan", *words, axis, f"1..{values[-1]}", "--json").status in (0, 1)


def test_constants_are_moved_of_trees_over_several_hosts() -> None:
    """Of NVLink domains of several hosts the rate of trees is a column, too: every search on 8xgb200 was a fault."""
    done = run("plan", "train", "qwen3-0.6b", "--on", "8xgb200", "--global-batch", "8", "--json")
    assert done.status == 0
    assert done.tree["best"][0]["plan"]["tp"] == 8


def test_a_change_of_the_framework_keeps_what_the_first_one_offloads() -> None:
    """Unsloth keeps checkpoints on the host unless told: under another framework the flags have to say so."""
    words = "train gpt-oss-20b --on 4xrtx-4090 --seq-len 1024 --micro-batch 2 --global-batch 32"
    named = run(*words.split(), "--stack", "unsloth", "--json").tree["proposals"]
    moved = [one for one in named if "--stack transformers" in one["flags"]]
    assert moved
    for one in moved:
        then = run(*words.split(), *one["flags"].split(), "--json").tree
        assert (then["device_bytes"], then["step_seconds"]) == (one["device_bytes"], one["step_seconds"])
