"""Flags that set what a framework keeps: each reaches the answer, and the command to copy says it again."""

from __future__ import annotations

import pytest

from command_line import run

TRAIN = ("train", "llama-2-7b", "--on", "16xa100-sxm-80gb", "--tp", "2", "--pp", "2", "--global-batch", "64")


@pytest.mark.parametrize(
    "flags",
    [
        "--norm-bytes 4",
        "--mlp-bits 8",
        "--mlp-input-bits 4",
        "--activation-input-bits 8",
        "--mlp-down-input-bits 8",
        "--recompute full --no-sequence-parallel --partition-activations",
        "--sharding zero1 --bucket-elements 5e8",
        "--misc-memory 5GiB",
        "--hidden-dropout",
        "--attention-dropout",
        "--modules mlp_act",
        "--no-overlap-tp",
    ],
)
def test_a_flag_changes_the_answer_and_is_said_again(flags: str) -> None:
    """With the flag memory or time differ from without it, and running the command to copy gives the same answer."""
    *others, last = ["--" + word for word in flags.split("--")[1:]]
    words = [*TRAIN, "--micro-batch", "1", *" ".join(others).split()]
    plain = run(*words, "--json").tree
    done = run(*words, *last.split(), "--json").tree
    key = ("step_seconds", "memory")
    assert [done[k] for k in key] != [plain[k] for k in key]
    page = run(*words, *last.split()).out
    again = page[page.index("AGAIN") :].replace("\\\n", " ").split()[2:]
    assert run(*again, "--json").tree["memory"] == done["memory"]
    assert run(*again, "--json").tree["step_seconds"] == done["step_seconds"]


def test_one_tensor_s_bits_win_over_all() -> None:
    """`--mlp-bits` sets three tensors, and a flag for one of them has the last word."""
    words = (*TRAIN, "--micro-batch", "1", "--json")
    three = run(*words, "--mlp-input-bits", "4", "--activation-input-bits", "8", "--mlp-down-input-bits", "8").tree
    assert run(*words, "--mlp-bits", "8", "--mlp-input-bits", "4").tree["memory"] == three["memory"]


@pytest.mark.parametrize("flags", ["--shard-weights", "--misc-memory 2GiB", "--no-use-kv-cache"])
def test_serving_takes_its_own(flags: str) -> None:
    """What changes weights, memory or the cache of a served model changes its answer."""
    words = ("infer", "llama-2-7b", "--on", "8xa100-sxm-80gb", "--json")
    assert run(*words, *flags.split()).tree["memory"] != run(*words).tree["memory"]


def test_a_search_takes_settings() -> None:
    """A search finds plans under the settings: memory beside the rest makes some of them not fit."""
    words = ("plan", "train", "llama-2-7b", "--on", "8xa100-sxm-80gb", "--global-batch", "64", "--json")
    plain, full = run(*words).tree, run(*words, "--misc-memory", "40GiB").tree
    assert full["search"]["fitting"] < plain["search"]["fitting"]
    assert "--misc-memory" in full["best"][0]["command"]


def test_two_passes_compare_by_their_tokens() -> None:
    """Models of one pass are compared by what they take in, and settings are among what differs."""
    words = ("compare", "bert-base", "--on", "1xh100", "--a", "--batch 1", "--b", "--batch 64")
    assert "B is" in run(*words).out
    assert run(*words, "--json").tree["ratio"]["samples/s"] > 2
    other = (
        "compare",
        "gpt2",
        "--on",
        "1xh100",
        "--global-batch",
        "8",
        "--a",
        "--tp 1",
        "--b",
        "--norm-bytes 4",
        "--json",
    )
    assert run(*other).tree["differences"]["norm_bytes"] == {"a": 0, "b": 4}


def test_sequence_parallelism_that_nobody_asked_for_never_refuses_a_plan() -> None:
    """The 197 tokens of an image do not divide by 2: left open it is off and said so, asked for it is refused."""
    words = ("train", "vit-base", "--on", "8xh100", "--global-batch", "64", "--tp", "2", "--json")
    done = run(*words)
    assert done.status == 0
    assert not done.tree["plan"]["sequence_parallel"]
    assert any(text.startswith("sequence_parallel off: 197 tokens") for text in done.tree["assumptions"])
    # Experts need it: it stays where the framework that is taken lacks it, which then has no launch.
    asked = "train gpt-oss-20b --on 128xb200-sxm-180gb --tp 8 --pp 2 --dp 8 --ep 4 --sharding zero3 --schedule zb-h1"
    done = run(*asked.split(), "--global-batch", "16", "--json")
    assert done.status == 0 and done.tree["plan"]["sequence_parallel"]
    assert run(*words, "--sequence-parallel").fields == ["tp"]
    assert "--no-sequence-parallel" in run(*words[:-1]).out
