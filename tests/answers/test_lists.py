"""Flags that take lists: one spelling means the same in every command, and what does not says which does."""

from pathlib import Path

import pytest

from command_line import run

_ASKED = "gpt2 --on 2xa100 --seq-len 512 --global-batch 8"
_HOST = "--stack deepspeed --sharding zero2"
# Two spellings of one list.
ALIKE = (
    (f"{_HOST} --offload optimizer,gradients", f"{_HOST} --offload optimizer+gradients"),
    ("--modules core_attn,mlp", "--modules core_attn+mlp"),
    ("--offload none --modules none", ""),
    ("--adapter lora --targets qkv,o", "--adapter lora --targets qkv+o"),
    ("--adapter lora --trains embedding,norms", "--adapter lora --trains embedding+norms"),
)


@pytest.mark.parametrize("command", ["train", "comm"])
@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_plus_joins_words_of_one_list(command: str, one: str, other: str) -> None:
    """A list of one plan is joined by + or by commas, and none is the empty one of what a search varies."""
    both = [run(command, *_ASKED.split(), *flags.split(), "--json") for flags in (one, other)]
    assert both[0].status in (0, 1)
    assert both[0].tree == both[1].tree


@pytest.mark.parametrize("flags", [ALIKE[0][1], *(row[1] for row in ALIKE[3:])])
def test_a_search_reads_what_a_training_reads(flags: str) -> None:
    """Words joined by + are one list to a search too, whose best plan has it."""
    found = run("plan", "train", *_ASKED.split(), *flags.split(), "--json")
    assert found.status == 0, found.out
    words = flags.replace("+", ",").split()
    assert f"{words[-2]} {words[-1]}" in found.tree["best"][0]["command"]


def test_a_command_that_is_shown_is_read_back() -> None:
    """An empty list is said as none."""
    page = run("train", *_ASKED.split(), "--offload", "none").out
    assert "--offload none" in " ".join(page.replace("\\\n", " ").split())


def test_lists_of_a_search_are_saved_and_read_back(tmp_path: Path) -> None:
    """What a search tries, lists of words and the empty one, is a case file like any other."""
    case = tmp_path / "case.toml"
    words = ["plan", "train", *_ASKED.split(), *_HOST.split(), "--offload", "none,optimizer+gradients"]
    assert run(*words, "--save", str(case)).status == 0
    again = run("plan", "--config", str(case), "--json").tree["best"]
    assert [one["command"] for one in again] == [one["command"] for one in run(*words, "--json").tree["best"]]


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [("train", "tp", "1,2"), ("train", "recompute", "none,full"), ("train", "micro_batch", "1..4"),
     ("infer", "batch", "1,2"), ("serve", "max_sequences", "64,128")],
)  # fmt: skip
def test_several_values_of_one_plan_are_told_to_vary(command: str, flag: str, value: str) -> None:
    """Values that are right one by one are asked with --vary; a search takes them as they are."""
    asked = {"train": _ASKED, "infer": "gpt2 --on 2xa100", "serve": "gpt2 --on 2xa100 --rate 1"}[command]
    done = run(command, *asked.split(), f"--{flag.replace('_', '-')}", value)
    assert done.status == 2
    assert f"--vary {flag}={value}" in done.err


def test_what_is_no_value_at_all_is_not_told_to_vary() -> None:
    """A word that is wrong among several keeps its own rule."""
    done = run("train", *_ASKED.split(), "--recompute", "none,everything")
    assert "is not a known choice" in done.err


def test_the_most_devices_are_said_alike_in_both_searches() -> None:
    """`--at-most N` tries every number of devices up to N, whatever number `--on` has."""
    asked = ["gpt2", "--input-tokens", "64", "--output-tokens", "8", "--json"]
    most = run("plan", "infer", *asked, "--on", "a100-sxm-40gb", "--at-most", "2")
    assert most.status == 0
    assert most.tree["front"] == run("plan", "infer", *asked, "--on", "2xa100-sxm-40gb", "--at-most").tree["front"]


@pytest.mark.parametrize("what", ["infer", "serve"])
@pytest.mark.parametrize(
    ("flag", "value"), [("kv-cache", "fp8,auto"), ("weights", "foo,bf16"), ("engine", "vllm,vllm")]
)
def test_both_searches_of_deployments_refuse_words_that_are_not_known(what: str, flag: str, value: str) -> None:
    """A format among several that nothing knows is an error, and no layout that a law rejects."""
    asked = "gpt2 --on 2xa100 --input-tokens 64 --output-tokens 8 --json"
    rate = ["--rate", "1"] if what == "serve" else []
    done = run("plan", what, *asked.split(), *rate, f"--{flag}", value)
    assert (done.status, done.fields) == (2, [flag.replace("-", "_")])
