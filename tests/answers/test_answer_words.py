"""Sentences of answers that a practitioner reads: in the field's words, and without figures that say what none is."""

from __future__ import annotations

import pytest

from command_line import run


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
