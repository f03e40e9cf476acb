"""Pages: bars as long as what they show, text within the width, and numbers opened down to their inputs."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line import run
from shardwise.answers._explain import ExplainedNumber, explain_page, explain_tree, follow
from shardwise.answers._page import Page, Segment, cells_of, command_lines
from shardwise.errors import InputError
from shardwise.ledger.number import maximum
from shardwise.ledger.traced import Traced, leaf, named, parts, tracing

_AMOUNTS = st.lists(st.floats(0, 1e12), min_size=1, max_size=9)


def length(amounts: list[float], whole: float, cells: int) -> int:
    """Return how long the bar of some amounts is."""
    return sum(len(text) for text, _ in cells_of([Segment("", a, "#", "") for a in amounts], whole, cells))


@given(_AMOUNTS, st.integers(10, 200))
def test_a_bar_is_as_long_as_its_sum(amounts: list[float], cells: int) -> None:
    """Rounding never makes a bar longer or shorter than what its parts add up to."""
    whole = sum(amounts)
    assert length(amounts, whole, cells) == (cells if whole else 0)
    assert length(amounts, 2 * whole, cells) == pytest.approx(cells / 2 if whole else 0, abs=0.51)
    assert length(amounts, whole / 2, cells) <= cells


@given(_AMOUNTS, st.integers(10, 200))
def test_each_part_of_a_bar_is_within_a_cell(amounts: list[float], cells: int) -> None:
    """No part is more than one cell off its share."""
    whole = sum(amounts) or 1.0
    spans = cells_of([Segment("", a, chr(65 + i), "") for i, a in enumerate(amounts)], whole, cells)
    shown = {text[0]: len(text) for text, _ in spans}
    for i, amount in enumerate(amounts):
        assert shown.get(chr(65 + i), 0) == pytest.approx(cells * amount / whole, abs=1.001)


@given(st.lists(st.text("ab ", min_size=1, max_size=30), max_size=30), st.integers(60, 120))
def test_text_keeps_to_the_width(words: list[str], width: int) -> None:
    """Labels, notes and lists wrap within the width."""
    page = Page(width)
    page.label("LABEL", " ".join(words))
    page.items(words)
    assert all(len(line) <= width for line in page.plain().splitlines())


@given(st.lists(st.sampled_from(["--tp 8", "--pp 4", "--global-batch 1024", "shardwise train x"]), min_size=1))
def test_a_broken_command_is_one_command(words: list[str]) -> None:
    """Joined at its backslashes, a printed command is the words it was made of, no line over the width."""
    page = Page(60)
    command_lines(page, "AGAIN", words)
    text = page.plain()
    assert text.split("\n", 1)[1].replace("\\\n", "").split() == " ".join(words).split()
    assert all(len(line) <= 60 for line in text.splitlines())


def _number() -> Traced:
    with tracing():
        seconds = leaf("FLOPs", 12.0) / leaf("FLOP/s", 3.0, "a datasheet, 2024")
        product = named(seconds, "product")
        wait = named(leaf("bytes", 2.0) * leaf("seconds a byte", 0.5), "message")
        return named(3 * product + named(maximum(wait, product), "the slower one"), "step", unit="s")  # type: ignore[return-value]


def test_a_tree_adds_up_and_names_its_inputs() -> None:
    """Parts sum to their number, a maximum says what lost, and a formula names its inputs with sources."""
    tree = explain_tree(ExplainedNumber(_number(), "seconds"), 4)
    assert tree["value"] == 16.0
    assert {p["label"]: p["amount"] for p in tree["parts"]} == {"product": 12.0, "the slower one": 4.0}
    slower = next(p["node"] for p in tree["parts"] if p["label"] == "the slower one")
    assert slower["parts"][0]["choice"] == "max"
    assert slower["parts"][0]["against"] == [{"label": "message", "amount": 1.0, "slack": 3.0}]
    product = next(p["node"] for p in tree["parts"] if p["label"] == "product")
    assert product["formula"] == "FLOPs / FLOP/s"
    assert product["ratio"]["numerator"] == {"name": "FLOPs", "value": 12.0}
    assert product["where"][1] == {"name": "FLOP/s", "value": 3.0, "source": "a datasheet, 2024"}


def test_paths_lead_to_parts_and_to_operands() -> None:
    """A path goes through parts, then through the named numbers of a formula, by name or by place."""
    root = ExplainedNumber(_number(), "seconds")
    assert follow(root, "product/FLOP/s").value == 3.0
    assert follow(root, "1/2").value == 3.0
    assert follow(root, "The Slower One/product").times == 1.0
    with pytest.raises(InputError, match="it holds 'product', 'the slower one'"):
        follow(root, "nothing")
    with pytest.raises(InputError, match="it is an input"):
        follow(root, "product/FLOPs/more")


def test_a_page_of_an_explanation_shows_all_of_it() -> None:
    """Shares, amounts with their unit, counts, slack and sources stand on the page."""
    root = ExplainedNumber(_number(), "seconds")
    text = explain_page(root, "step", 3, ["shardwise explain m"]).plain()
    assert "STEP      step = 16.00 s" in text
    assert "75.0%      12.00 s  3 x product" in text
    assert "above message: 1.00 s (slack 3.00 s)" in text
    assert "a datasheet, 2024" in explain_page(follow(root, "product"), "step", 1, ["x"]).plain()
    assert "an input" in explain_page(follow(root, "product/FLOPs"), "step", 1, ["x"]).plain()


@given(st.lists(st.tuples(st.sampled_from("+-*/m"), st.floats(0.5, 4)), max_size=40))
def test_parts_of_any_arithmetic_add_up(steps: list[tuple[str, float]]) -> None:
    """Whatever is added, scaled and compared, the parts of the result sum to it."""
    with tracing():
        x: Traced = leaf("start", 1.0)  # type: ignore[assignment]
        for i, (sign, value) in enumerate(steps):
            other = named(leaf(f"n{i}", value) * 1.5, f"part {i}") if i % 2 else leaf(f"n{i}", value)
            x = {
                "+": lambda x=x, o=other: x + o,
                "-": lambda x=x, o=other: x - o,
                "*": lambda x=x, v=value: x * v,
                "/": lambda x=x, v=value: x / v,
                "m": lambda x=x, o=other: maximum(x, o),
            }[sign]()
    found = parts(x)
    if found:
        assert sum(p.amount for p in found) == pytest.approx(float(x.value), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_table_with_words_keeps_within_the_page(width: int) -> None:
    """The widest column of words is wrapped where a table would pass the width, and no word is lost."""
    page = Page(width)
    words = "tp 8, pp 4, recompute full, sequence parallel, interleaved in five chunks, on fast links alone"
    page.table([["plan", "seconds"], [words, "1.25 s"], ["tp 1", "2.50 s"]], right=(1,), header=True, indent=2)
    text = page.plain()
    assert max(map(len, text.splitlines())) <= width
    assert set(words.replace(",", "").split()) <= set(text.replace(",", "").split())


def test_colours_are_those_of_the_terminal() -> None:
    """Every style that a page has is one that a terminal shows, and the text between the codes is the page's own."""
    import re

    from shardwise.answers._page import coloured

    line = coloured("FITS", "bold green") + coloured(" 62 GiB", "") + coloured("limit", "bright_black")
    assert re.sub("\x1b\\[[0-9;]*m", "", line) == "FITS 62 GiBlimit"
    assert line.startswith("\x1b[1;32m") and line.endswith("\x1b[0m")


def test_branches_that_a_maximum_did_not_take_are_named() -> None:
    """No row says "another branch" or counts -1 times: stages are named, and what is taken off is said to be less."""
    from command_line import run

    page = run("explain", "llama-3.1-70b", "--on", "64xh100", "--tp", "8", "--pp", "4", "--depth", "4").out
    assert "another branch" not in page and "-1 x" not in page
    assert "less slowest stage computes" in page and "above work of the first stage" in page


@pytest.mark.parametrize(
    "words",
    [
        "train gpt2 --on 1xh100 --global-batch 8 --tokens 1000.5",
        "train mixtral-8x7b --on 8xgaudi2 --global-batch 256",
        "train llama-3.1-70b --on 4096xb200 --tp 8 --pp 4 --global-batch 65536 --tokens 15T --energy",
        "explain llama-3.2-1b --on 8xh100 --global-batch 64 --what tokens_per_second_per_gpu",
        "comm llama-3.1-70b --on 64xh100 --tp 8 --pp 4 --global-batch 128 --seq-len 131072",
        "infer bert-base --on 1xl40s --batch 1 --input-tokens 1 --price 10000",
    ],
)
def test_no_page_shows_an_exponent(words: str) -> None:
    """Numbers of thousands are written out, and sizes of the catalogue have the unit that people read."""
    assert not re.findall(r"(?<![\w.])\d(?:\.\d+)?e\+\d+", run(*words.split()).out)


def test_the_cost_of_a_short_run_is_no_zero() -> None:
    """Hours and dollars of less than one are said with two digits."""
    out = run("train", "gpt2", "--on", "1xh100", "--global-batch", "8", "--tokens", "1M", "--price", "2").out
    said = re.search(r"([\d.]+) device hours, \$([\d.]+) at", out)
    assert said and float(said[1]) > 0 and float(said[2]) == pytest.approx(2 * float(said[1]), rel=0.05)


@pytest.mark.parametrize("asked", ["--savers", "--rollout-prompt-tokens 256", "--phase update"])
def test_the_command_is_the_last_section_of_a_page(asked: str) -> None:
    """Savers, rollouts and phases stand ahead of what was assumed and of the command that asks again."""
    words = "train llama-3.2-1b --on 4xh100-sxm-80gb --sharding fsdp --stack trl --method grpo --seq-len 1024"
    page = run(*words.split(), "--global-batch", "64", *asked.split()).out
    sections = [line.split()[0] for line in page.splitlines() if line[:2].isupper()]
    assert sections[-2:] == ["ASSUMED", "AGAIN"]
    assert {"--savers": "SAVERS", "--phase": "PHASE"}.get(asked.split()[0], "ROLLOUT") in sections
    assert "\n\n\n" not in page
