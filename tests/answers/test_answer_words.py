"""Sentences of answers that a practitioner reads: in the field's words, and without figures that say what none is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from command_line import run

_TUNED = "train llama-3.1-8b --on 8xh100-sxm-80gb --global-batch 32 --method"


@pytest.mark.parametrize(
    ("words", "says", "never"),
    [
        ("infer llama-3.1-8b --on m2-ultra --engine llama.cpp", "within all usable memory", "within 1 of"),
        ("infer llama-3.1-8b --on h100-sxm-80gb", "within 0.92 of usable memory", "within 0.92 usable"),
        ("infer qwen3-8b --on h100-sxm-80gb --weights int4", "20 bits of scale data for every 128", "a group of"),
        (
            "infer llama-3.1-8b --on h100-sxm-80gb --speculative-method ngram --num-speculative-tokens 3"
            " --acceptance-rate 60%",
            "ngram: 3 draft tokens a step, acceptance length 2.18",
            "guesses",
        ),
        ("explain llama-3.1-8b --on h100-sxm-80gb --what tpot --batch 4", "host work of every step", "0.0003"),
        ("serve llama-3.1-8b --on h100-sxm-80gb --rate 5 --explain capacity", "a replica a request", "of the most"),
        ("roofline llama-3.1-8b --on h100-sxm-80gb --batch 8", "by launch overhead", "1 times"),
        ("infer qwen3-32b --weights int4 --on rtx-5090,l40s", ">99%", "100%"),
        (
            "plan train llama-3.1-8b --on 8xh100-sxm-80gb --global-batch 64 --seq-len 4096",
            "8 of 10 published runs",
            "8 of 10 1",
        ),
        (f"{_TUNED} dpo", "PHASES of dpo reference", "rollouts"),
        (f"{_TUNED} grpo", "PHASES of grpo, without its rollouts", "no rollouts"),
        (
            "infer deepseek-v3 --on 8xh200-sxm-141gb --tp 8 --speculative-method mtp --num-speculative-tokens 1"
            " --acceptance-rate 80%",
            "mtp: 1 draft token a step, acceptance length 1.8",
            "1 draft tokens",
        ),
        (
            "plan train llama-3.1-405b --on 64xh100-sxm-80gb --global-batch 256 --seq-len 8192",
            "fits (53.80 GiB), equally fast",
            "0.0% quicker",
        ),
        ("serve llama-3.1-8b --on h100-sxm-80gb --rate 9 --p99-ttft 5ms", "then; none is enough", "devices: keeps"),
    ],
)  # fmt: skip
def test_answers_are_in_the_words_of_the_field(words: str, says: str, never: str) -> None:
    """Each page has the sentence, and not the one that nobody would write."""
    text = " ".join(run(*words.split()).out.split())
    assert says in text and never not in text


def test_a_load_on_several_devices_says_replicas_and_no_batch() -> None:
    """Rows of `plan serve` are of a server, whose batches come as requests do."""
    text = run(
        *["plan", "serve", "qwen3-32b", "--on", "h100,l40s", "--rate", "5/s", "--p99-ttft", "2s", "--p99-tpot", "50ms"]
    ).out
    assert "replica of one device: vllm" in text and "batch 1," not in text


def test_towers_are_counted_where_they_are_loaded() -> None:
    """Weights of the vision tower are in the memory, and no assumption says that they are not counted."""
    words = ("infer", "qwen2.5-vl-7b", "--on", "h100-sxm-80gb", "--json")
    notes = run(*words).tree["assumptions"]
    assert any("towers beside the language model take 0.68 billion" in note for note in notes)
    assert not any("only the language model is counted" in note for note in notes)
    assert run(*words).tree["weights_bytes_per_gpu"] - run(*words, "--language-model-only").tree[
        "weights_bytes_per_gpu"
    ] == pytest.approx(2 * 0.68e9, rel=0.02)


def test_a_plan_that_is_too_risky_says_so_in_one_clause() -> None:
    """The chance, what was asked, and the tokens of the cache are told apart."""
    text = run(
        *[
            "infer",
            "llama-3.1-8b",
            "--on",
            "h100-sxm-80gb",
            "--risk",
            "90%",
            "--batch",
            "200",
            "--input-tokens",
            "2048",
            "-o",
            "256",
        ]
    ).out
    assert "too risky for the 90% that was asked; the cache holds" in " ".join(text.split())


def test_what_differs_is_read_with_its_prefix(tmp_path: Path) -> None:
    """Tokens of a run are 1.00 T and none, not 1000000000000.0 and 0.0."""
    case = 'command = "train"\nmodel = "llama-3.1-8b"\non = "8xh100-sxm-80gb"\nglobal_batch = 64\nsharding = "fsdp"\n'
    (tmp_path / "a.toml").write_text(case)
    (tmp_path / "b.toml").write_text(case + 'tokens = "1T"\n')
    text = run("compare", str(tmp_path / "a.toml"), str(tmp_path / "b.toml")).out
    assert re.search(r"token_budget +0 +1\.00 T", text)


@pytest.mark.parametrize(
    ("words", "says", "never"),
    [
        ("--engine vllm==0.12.0", "as vLLM measures it at start-up", "after each step measures it"),
        ("--engine vllm==0.12.0 --kv-cache-memory 100GiB", "and vLLM would not start", "each step would not"),
        ("--batch 4", "of one request while the batch stays full", "of a request while"),
        ("--batch 1", "first tokens after", "stays full"),
        ("--batch 32 --no-use-kv-cache", "free 55.78 GiB", "free for cache"),
        ("--batch 32 --no-use-kv-cache", "no cache: a batch of", "stays full"),
    ],
)
def test_a_batch_is_told_without_what_it_has_not(words: str, says: str, never: str) -> None:
    """An engine is called by its name, room for a cache is none without one, and equal figures stand once."""
    text = " ".join(run("infer", "llama-3.1-8b", "--on", "h100-sxm-80gb", *words.split()).out.split())
    assert says in text and never not in text


@pytest.mark.parametrize(("words", "sends"), [("--on tpu-v5e", False), ("--on 4xtpu-v5e --tp 4", True)])
def test_links_are_assumed_where_there_are_some(words: str, sends: bool) -> None:
    """A device alone sends nothing, so nothing of its links is assumed."""
    notes = run("infer", "llama-3.2-1b", *words.split(), "--json").tree["assumptions"]
    assert ("links use generic efficiencies" in notes) is sends


def test_two_pools_are_told_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    """Replicas for decoding and for prompts are named alike, and no division of nothing by nothing is heard of."""
    words = "plan serve llama-3.1-70b --on h100-sxm-80gb --rate 10 --input-tokens 4000 --output-tokens 300"
    text = " ".join(run(*words.split(), "--p99-ttft", "2s", "--pools", "disaggregated").out.split())
    assert re.search(r"one replica of tp 4 for decoding and \d+ replicas? of [a-z0-9, ]+ for prompts", text)
    assert not [one for one in recwarn.list if issubclass(one.category, RuntimeWarning)]
