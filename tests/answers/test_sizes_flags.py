"""Commands without a model's name: its sizes stand in their place, under short names too."""

from __future__ import annotations

import pytest

from command_line import run

GPT3 = ("-l", "96", "-hs", "12288")


@pytest.mark.parametrize(
    "words",
    [
        ("count", *GPT3),
        ("train", *GPT3, "--on", "256xh100", "--tp", "8", "--pp", "8"),
        ("infer", *GPT3, "--on", "8xh100", "-tp", "8", "-o", "8"),
        ("explain", *GPT3, "--on", "256xh100", "--tp", "8", "--pp", "8"),
    ],
    ids=lambda words: words[0],
)
def test_every_command_takes_sizes(words: tuple[str, ...]) -> None:
    """What a name gives sizes give too: an answer that lists their defaults, and a command that says them again."""
    done = run(*words)
    assert done.status == 0, done.err
    if words[0] != "explain":
        assert "num_attention_heads 96: heads of 128" in done.out
        assert "--num-layers 96 " in done.out.replace("\\\n", "")


def test_short_names_mean_the_long_ones() -> None:
    """The calculators' letters and our words give the same answer."""
    letters = (
        "-l",
        "12",
        "-hs",
        "768",
        "-a",
        "12",
        "-v",
        "50304",
        "-e",
        "8",
        "-t",
        "2",
        "-ei",
        "2",
        "-ff",
        "8",
        "-s",
        "64",
    )
    names = ("num-layers", "hidden-size", "num-attention-heads", "vocab-size", "num-experts", "experts-per-token")
    more = ("expert-interval", "ffn-ratio", "seq-len")
    long = [w for name, value in zip((*names, *more), letters[1::2], strict=True) for w in (f"--{name}", value)]
    assert run("count", *letters, "--json").tree == run("count", *long, "--json").tree


def test_a_search_takes_sizes() -> None:
    """`plan train` searches a model that has no name."""
    done = run("plan", "train", "-l", "4", "-hs", "512", "--on", "4xh100", "--global-batch", "8", "--json")
    assert done.status == 0, done.err
    assert "--num-layers 4" in done.tree["best"][0]["command"]


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("count", ["model"]),
        ("count -l 12", ["hidden_size"]),
        ("count --moe", ["num_experts", "hidden_size", "num_layers"]),
        ("count -l x -hs 512", ["num_layers"]),
        ("train -l 2 -hs 512 --window 8 --tp 3", ["on", "window"]),
    ],
)
def test_what_is_missing_is_named(words: str, fields: list[str]) -> None:
    """Without a name and without sizes the model is missing; with some sizes the missing ones are."""
    done = run(*words.split(), "--json")
    assert (done.status, sorted(done.fields)) == (2, sorted(fields))
