"""Flags in the words of other systems lead to the flag that is meant; what is like none leads nowhere."""

from __future__ import annotations

import pytest

from answers.command_line import run
from shardwise.answers import _commands
from shardwise.answers._meant import _WORDS, MEANT


@pytest.mark.parametrize(
    ("command", "flag", "says"),
    [
        ("train", "--tensor-model-parallel-size", "did you mean --tp?"),
        ("train", "--batch-size", "did you mean --micro-batch or --global-batch?"),
        ("infer", "--batch-size", "did you mean --batch?"),
        ("train", "--fp8", "did you mean --precision?"),
        ("infer", "--isl", "did you mean --input-tokens?"),
        ("train", "--micro-bach", "did you mean --micro-batch?"),
        ("train", "--lora-alpha", "adapters is not built yet"),
    ],
)
def test_words_of_other_systems_name_the_flag(command: str, flag: str, says: str) -> None:
    """A newcomer who types what Megatron-LM, DeepSpeed or vLLM call a setting reads what it is called here."""
    done = run(command, "gpt2", "--on", "8xh100", flag, "8")
    assert done.status == 2
    assert says in done.err


def test_a_word_like_no_flag_suggests_none() -> None:
    """A flag that no system has is not taken for one that merely shares letters."""
    assert "did you mean" not in run("train", "gpt2", "--on", "8xh100", "--zzz", "8").err


def test_what_is_suggested_exists() -> None:
    """Every field of the table is a flag of some command, and no word of it is a flag of every one."""
    flags = [set(_commands.command(name).flags) for name in ("train", "infer")]
    assert set(_WORDS) <= flags[0] | flags[1]
    assert not set(MEANT) & flags[0] & flags[1]
