"""Flags in the words of other systems lead to the flag that is meant; what is like none leads nowhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import run
from shardwise.answers import _commands
from shardwise.plans.fields import ALIASES


@pytest.mark.parametrize(
    ("command", "flag", "says"),
    [
        ("train", "--tensor-model-parallel-size", "did you mean --tp?"),
        ("train", "--lr", "leave it out: it changes neither bytes nor seconds"),
        ("train", "--seed", "leave it out: it changes neither bytes nor seconds"),
        ("train", "--batch-size", "did you mean --micro-batch or --global-batch?"),
        ("infer", "--batch-size", "did you mean --batch?"),
        ("train", "--fp8", "did you mean --precision fp8?"),
        ("train", "--fsdp", "did you mean --sharding fsdp?"),
        ("train", "--gradient-checkpointing", "did you mean --recompute full?"),
        ("infer", "--load-in-4bit", "did you mean --weights nf4?"),
        ("infer", "--isl", "did you mean --input-tokens?"),
        ("infer", "--max-model-len", "did you mean --input-tokens or --max-context?"),
        ("infer", "--rate", "it is a flag of serve, plan serve"),
        ("train", "-ngl", "--gpu-layers is a flag of infer, serve,"),
        ("infer", "--ngl", "did you mean --gpu-layers?"),
        ("train", "--dataset-size", "did you mean --samples?"),
        ("train", "--qlra", "did you mean --qlora?"),
        ("train", "--gpus", "did you mean --on?"),
        ("train", "--micro-bach", "did you mean --micro-batch?"),
        ("train", "--finetune", "did you mean --adapter or --trains?"),
    ],
)
def test_words_of_other_systems_name_the_flag(command: str, flag: str, says: str) -> None:
    """A newcomer who types what Megatron-LM, DeepSpeed or vLLM call a setting reads what it is called here."""
    done = run(command, "gpt2", "--on", "8xh100", flag, "8")
    assert done.status == 2
    assert says in done.err


def test_a_stage_of_zero_is_a_word_of_sharding() -> None:
    """DeepSpeed counts its stages, and each is a word here."""
    assert "did you mean --sharding zero2?" in run("train", "gpt2", "--on", "8xh100", "--zero", "2").err


def test_devices_that_are_missing_may_be_several() -> None:
    """Who asks which card to take learns how at once, of commands that compare."""
    assert "to compare several" in run("infer", "gpt2").err
    assert "to compare several" not in run("comm", "gpt2").err


def test_the_value_of_another_command_s_flag_is_not_a_model(tmp_path: Path) -> None:
    """A flag that another command has takes its value with it, where a file names the model."""
    (tmp_path / "a.sh").write_text("vllm serve meta-llama/Llama-3.1-8B\n")
    for words in (("--rate", "2/s"), ("--no-such-thing", "2")):
        done = run("infer", "--from", str(tmp_path / "a.sh"), "--on", "h100", *words, "--json")
        assert [one["field"] for one in json.loads(done.out)["error"]["problems"]] == [words[0][2:].replace("-", "_")]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--qlora", "--adapter lora --base nf4"),
        ("--lora-rank 16", "--adapter lora --rank 16"),
        ("--lora-r 16 --lora-target q,v", "--adapter lora --rank 16 --targets q,v"),
        ("--use-rslora --load-in-8bit", "--adapter rslora --base int8"),
        ("--qlora --base nf4-dq", "--adapter lora --base nf4-dq"),
    ],
)
def test_flags_of_fine_tuning_programs_mean_what_they_say(typed: str, meant: str) -> None:
    """What peft, TRL and bitsandbytes call a setting gives the answer of the flag that it means."""
    ask = ("train", "llama-3.2-1b", "--on", "rtx-4090", "--seq-len", "512", "--json")
    assert run(*ask, *typed.split()).out == run(*ask, *meant.split()).out


def test_shares_are_read_in_percent_too() -> None:
    """90% is 0.9 for every share, as it is for --risk."""
    ask = ("infer", "gpt2", "--on", "h100", "--json", "--memory-fraction")
    assert run(*ask, "90%").out == run(*ask, "0.9").out


def test_a_word_like_no_flag_suggests_none() -> None:
    """A flag that no system has is not taken for one that merely shares letters."""
    assert "did you mean" not in run("train", "gpt2", "--on", "8xh100", "--zzz", "8").err


def test_what_is_suggested_exists() -> None:
    """Every field of the table is a flag of some command, and no word of it is a flag of every one."""
    flags = [set(_commands.command(name).flags) for name in ("train", "infer", "serve")]
    assert set(ALIASES) <= set.union(*flags)
    assert not {word for words in ALIASES.values() for word in words.split()} & flags[0] & flags[1]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--loss liger", "use fused-linear"),
        ("--adapter lora+", "use lora-plus"),
        ("--adapter qlora", "use lora --base nf4"),
        ("--adapter lora --base int4", "use gptq4 or awq4 or nf4"),
        ("--method orpo", "use dpo --reference none"),
        ("--method rloo", "use grpo"),
        ("--optimizer 8bit", "use adam8bit"),
        ("--optimizer adamw", "use adam or"),
    ],
)
def test_words_of_other_tools_name_the_value(typed: str, says: str) -> None:
    """A value that other tools spell like none of ours is answered with the one that it means."""
    done = run("train", "llama-3.2-1b", "--on", "rtx-4090", "--seq-len", "512", *typed.split())
    assert done.status == 2 and says in done.err


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("train llama-3.1-8b 8xh100", "write devices as --on 8xh100"),
        ("train llama-3.1-8b 8 --on 8xh100", "write flags as --flag value"),
        ("train llama-3.1-8b --on 8xh100 --dtype fp8", "write --precision fp8, or use w"),
        ("infer llama-3.1-8b --on 8xh100 --dtype int4", "write --weights int4, or use w"),
        ("infer llama-3.1-8b --on 8xh100 --dtype w8", "use w"),
        ("train llama-3.1-8b --on 8h100", 'write "8xh100"'),
        ("export llama-3.1-8b --on 8xh100", "write `shardwise export deepspeed llama-3.1-8b --on 8xh100"),
        ("serve llama-3.1-8b --on h100 --rate 5rpm", "write for example 50/s"),
        ("train llama-3.1-8b --on 8xh100 --stack vllm", "infer and serve take it as --engine vllm"),
        ("train llama-3.1-8b --on 8xh100 --stack trtllm", "infer and serve take it as --engine tensorrt-llm"),
        ("infer llama-3.1-8b --on h100 --engine megatron", "train takes it as --stack megatron; engines are vllm,"),
        ("export nothing llama-3.1-8b --on 8xh100", "use one of deepspeed,"),
    ],
)
def test_what_stands_in_the_wrong_place_is_named_with_its_flag(words: str, remedy: str) -> None:
    """Devices without --on, and a format given as a preset of bits: the remedy is the flag that takes it."""
    problems = run(*words.split(), "--json").tree["error"]["problems"]
    assert problems[0]["remedy"].startswith(remedy)


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("--rate 5rps", "--rate 5/s"),
        ("--rate 5QPS", "--rate 5/s"),
        ("--rate 300requests/min", "--rate 5/s"),
        ("--rate 5req/s", "--rate 5/s"),
        ("--rate 5 --cached-share 50%", "--rate 5 --cached-share 0.5"),
    ],
)
def test_loads_are_read_in_the_words_of_load_generators(words: str, same: str) -> None:
    """Requests and queries a second, and shares in percent, are what they are elsewhere."""
    where = ("serve", "llama-3.1-8b", "--on", "h100-sxm-80gb", "--requests", "50", "--json")
    assert run(*where, *words.split()).tree["e2e"] == run(*where, *same.split()).tree["e2e"]
