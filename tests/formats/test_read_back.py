"""What an export writes is predicted as what was asked: the same bytes and the same seconds, to the last digit."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import figures, run, trained

# A target, its case, and the files that say all of it.
CASES = (
    "trl llama-3.1-8b --on 8xrtx-4090 --adapter lora --base bf16",
    "trl llama-3.1-8b --on 8xrtx-4090 --adapter lora --base bf16 --trains embedding+head",
    "trl llama-3.1-8b --on 8xrtx-4090 --adapter lora --base fp16 --trains head",
    "trl llama-3.1-8b --on 8xrtx-4090 --adapter dora --base fp32 --trains head",
    "trl qwen2.5-0.5b --on 4xh100 --adapter dora --base nf4-dq --trains embedding+head",
    "trl qwen2.5-0.5b --on 4xh100 --adapter dora --targets q,v --sharding fsdp",
    "trl qwen2.5-0.5b --on 4xh100 --adapter lora --base int8 --trains norms",
    "llamafactory llama-3.2-1b --on 8xrtx-4090 --adapter lora --sharding fsdp --targets embedding,attention",
    "llamafactory qwen3-8b --on 2xrtx-4090 --adapter lora --targets mlp --trains embedding+head",
    "llamafactory llama-3.2-1b --on 4xh100 --adapter lora --base int8 --trains head",
    "llamafactory_v1 qwen3-8b --on 2xb200 --adapter lora --sharding fsdp --trains head",
    "llamafactory_v1 gpt2 --on 2xa100 --adapter dora",
    "axolotl llama-3.2-1b --on 2xa100 --adapter lora --trains head",
    "torchtune llama-3.2-1b --on 2xa100 --adapter lora --sharding fsdp",
    "nemo llama-3.1-8b --on 8xh100 --tp 2",
    "nemo llama-3.1-8b --on 8xh100 --tp 2 --recompute full --adapter lora",
    "nemo qwen3-30b-a3b --on 8xh100 --ep 4 --stack megatron-bridge-alltoall",
    "nemo mixtral-8x7b --on 8xh100 --ep 4 --stack megatron-bridge-alltoall --capacity-factor 1.25",
    "nemo llama-3.1-8b --on 8xh100 --tp 2 --no-overlap-dp",
    "megatron llama-3.1-8b --on 8xh100 --tp 2 --no-overlap-dp",
    "megatron llama-3.1-8b --on 8xh100 --pp 4 --vpp 2 --no-overlap-pp",
)


@pytest.mark.parametrize("words", CASES)
def test_a_file_that_was_written_is_predicted_as_what_was_asked(words: str, tmp_path: Path) -> None:
    """Every file of an export, read back beside the model, takes the bytes and the seconds of the case."""
    target, model, *flags = words.split()
    flags += ["--micro-batch", "2", "--accumulation", "4", "--seq-len", "1024"]
    assert run("export", target, model, *flags, "--write", str(tmp_path)).status != 2
    stack = [] if "--stack" in flags else ["--stack", STACKS[target]]
    asked = figures(trained("train", model, *flags, *stack))
    for file in tmp_path.iterdir():
        on = flags[flags.index("--on") + 1]
        assert figures(trained("train", model, "--from", str(file), "--on", on)) == asked


STACKS = {
    "trl": "trl", "llamafactory": "llama-factory", "llamafactory_v1": "llama-factory-v1", "axolotl": "axolotl",
    "torchtune": "torchtune", "nemo": "megatron-bridge", "megatron": "megatron",
}  # fmt: skip


SAID = (
    ("deepspeed gpt2 --sharding zero2 --no-overlap-dp", {"ds_config.json": '"overlap_comm": false'},
     "overlap_dp False: no setting of DeepSpeed says all of it"),
    ("deepspeed gpt2 --sharding zero2 --no-overlap-tp", {"ds_config.json": '"overlap_comm": true'}, ""),
    ("fsdp llama-3.1-8b --no-overlap", {}, "overlap False: no setting of accelerate says it"),
    ("fsdp llama-3.1-8b --ideal", {}, "ideal True: no setting of accelerate says it"),
    ("megatron llama-3.1-8b --pp 4 --vpp 2 --no-overlap", {"llama-3.1-8b.sh": "--no-overlap-p2p-communication"}, ""),
    ("megatron llama-3.1-8b --tp 2 --no-overlap", {"llama-3.1-8b.sh": "--transformer-impl"},
     "overlap False: no setting of Megatron-LM says all of it"),
)  # fmt: skip


@pytest.mark.parametrize(("words", "texts", "unsaid"), SAID)
def test_what_is_exposed_is_a_switch_of_the_framework_or_named(words: str, texts: dict[str, str], unsaid: str) -> None:
    """Communication that flags expose is switched off where a framework can, and else the file names the flag."""
    target, model, *flags = words.split()
    flags += ["--on", "8xh100", "--micro-batch", "1", "--global-batch", "64", "--seq-len", "1024"]
    tree = run("export", target, model, *flags, "--json").tree
    assert all(text in tree["files"][name] for name, text in texts.items())
    assert [one for one in tree["assumptions"] if "no setting" in one] == ([unsaid] if unsaid else [])


def test_what_an_adapter_is_kept_in_is_refused_where_no_setting_says_it() -> None:
    """Megatron's adapters have masters; 16 bits without them, and what trains whole in 16 bits, are named."""
    batch = ("--micro-batch", "1", "--global-batch", "64", "--seq-len", "512", "--json")
    words = ("export", "nemo", "gpt2", "--on", "8xh100", "--adapter", "lora", "--adapter-precision", "bf16", *batch)
    assert run(*words).fields == ["adapter_precision"]
    words = ("export", "llamafactory", "gpt2", "--on", "8xh100", "--adapter", "lora", "--adapter-precision", "bf16")
    assert run(*words, "--trains", "head", *batch).fields == ["precision"]
    assert run(*words, "--trains", "head", "--precision", "bf16-pure", *batch).status == 0
