"""The page of `plan infer` heads with the figures that its limits speak of: a request while the batch stays full."""

from __future__ import annotations

import re

import pytest

import shardwise as sw
from command_line import run
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.units import show_seconds

_ASKED = ("plan", "infer", "llama-3.1-8b", "--on", "8xh100-sxm-80gb", "--input-tokens", "2048", "-o", "256")


def _seconds(text: str) -> float:
    value, unit = text.split(" ")
    return float(value) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}[unit]


def test_the_first_latencies_keep_the_limits() -> None:
    """TTFT and TPOT that are read first are within the limits, and those in the JSON of the same plan."""
    limits = ("--max-ttft", "150ms", "--max-tpot", "60ms")
    text, best = run(*_ASKED, *limits).out, run(*_ASKED, *limits, "--json").tree["best"][0]
    first, gap = best["request_ttft_seconds"], best["request_tpot_seconds"]
    assert best["ttft_seconds"] > 1 and first <= 0.15 and gap <= 0.06
    head = " ".join(text[: text.index("at once:")].split())
    assert f"a request while the batch stays full: TTFT {show_seconds(first)}, TPOT {show_seconds(gap)}" in head
    assert head.count("TTFT") == 1


def test_the_tables_are_of_a_request_too() -> None:
    """Rows of the best and of the front keep the limits by the TTFT that they show."""
    text = run(*_ASKED, "--max-ttft", "150ms").out
    best = re.findall(r"^ +\d+ +[\d,.]+ +[\d,]+ +([\d.]+ \w+) +([\d.]+ \w+) ", text, re.MULTILINE)
    times = r"([\d.]+ [mu]?s)"
    front = re.findall(rf"^ +{times} +([\d,.]+) +{times} +{times}  \w", text, re.MULTILINE)
    assert len(best) > 2 and len(front) > 5
    assert all(_seconds(ttft) <= 0.15 for ttft, _ in best) and all(_seconds(ttft) <= 0.15 for _, _, ttft, _ in front)
    # Whoever reads down the rows of the front finds both figures of its title rise.
    steps, rates = [_seconds(row[0]) for row in front], [float(row[1].replace(",", "")) for row in front]
    assert steps == sorted(steps) and rates == sorted(rates)


def test_a_notebook_shows_the_same() -> None:
    """The line of a result says whose TTFT it is, and of a batch of one nothing more."""
    cluster, job = Cluster.parse("8xh100-sxm-80gb"), sw.Serving(input_tokens=2048, output_tokens=256)
    result = sw.plan_serving(load_model("llama-3.1-8b"), cluster, job, options=sw.SearchOptions(max_ttft_seconds=0.15))
    best = result.best[0]
    assert f"TTFT {show_seconds(best.request_ttft_seconds)}, TPOT" in repr(result)
    assert "of a request while the batch stays full" in repr(result)
    one = sw.infer(load_model("llama-3.1-8b"), Cluster.parse("1xh100-sxm-80gb"), sw.Plan(), sw.Serving(batch=1))
    assert "stays full" not in repr(one) and show_seconds(one.ttft_seconds) in repr(one)


@pytest.mark.parametrize("model", ["bert-base", "llama-3.1-8b"])
def test_one_pass_has_no_time_between_tokens(model: str) -> None:
    """Where nothing is generated TPOT is no objective, which is told and no fault."""
    words = ("plan", "infer", model, "--on", "2xh100-sxm-80gb", "-o", "0", "--json")
    assert run(*words, "--objective", "tpot").fields == ["objective"]
    assert run(*words, "--objective", "ttft", "--max-ttft", "1s").status == 0
