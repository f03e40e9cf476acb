"""Prompts that meet an idle device, before power limits its clock: one request, bunches, pauses, the closed form."""

from __future__ import annotations

from random import Random
from statistics import mean

import pytest

from serving.serving_cases import after_pause
from shardwise.arrays import np
from shardwise.cost import Burst, Efficiencies
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Arrivals, Length, Plan, Serving, Workload
from shardwise.serving import ServingOptions, infer
from shardwise.serving._burst import MatrixClock, burst_of
from shardwise.serving.load import ServeReport, StepTable, explain, serve
from shardwise.serving.load._clocks import mean_left

BURST = Burst(share=0.1, full_seconds=0.1, gone_seconds=0.2, recovery=1.0, devices=())


def loaded(rate: float, prompt: int, made: int, count: int = 3000, step: int = 0) -> ServeReport:
    """Return Llama-3.1-8B in vLLM on one H100 under a load."""
    asked = Workload(
        input_tokens=Length(mean=prompt), output_tokens=Length(mean=made), count=count,
        arrivals=Arrivals(rate=rate) if rate else Arrivals(kind="burst"),
    )  # fmt: skip
    job = Serving(max_batched_tokens=step)
    return serve(load_model("llama-3.1-8b"), Cluster.parse("1xh100-sxm-80gb"), Plan(), asked, job)


@pytest.mark.parametrize(("stages", "prompt"), [(1, 300), (1, 2000), (1, 9000), (1, 30000), (2, 9000), (4, 9000)])
def test_one_request_takes_what_infer_says_at_the_highest_clock(stages: int, prompt: int) -> None:
    """A single request takes less than `infer` says of batches back to back, by what its clock spares it."""
    model, machine, plan = load_model("llama-3.1-8b"), Cluster.parse(f"{stages}xh100-sxm-80gb"), Plan(pp=stages)
    job = Serving(batch=1, input_tokens=prompt, output_tokens=20, max_batched_tokens=2048)
    alone = infer(model, machine, plan, job, ServingOptions(engine="vllm"))
    asked = Workload(
        input_tokens=Length(mean=prompt), output_tokens=Length(mean=20), arrivals=Arrivals(rate=1e-4), count=1
    )
    report = serve(model, machine, plan, asked, Serving(max_batched_tokens=2048))
    assert after_pause(alone) < (0.97 if 300 < prompt < 30000 else 1.0) * alone.ttft_seconds
    for found in (report.requests[0].ttft_seconds, report.steady.ttft_seconds):
        assert found == pytest.approx(after_pause(alone), rel=0.05)


def test_prompts_at_once_fall_to_the_clock_that_lasts() -> None:
    """Steps of 4,096 tokens at an idle server are 6 to 9 % faster for 0.1 s, and from 0.2 s on none is."""
    report = loaded(0.0, 4096, 1, count=20, step=4096)
    table = report.fleet.decode.table
    ends = sorted({one.first - one.server_seconds for one in report.requests})
    steps = [after - before for before, after in zip([0.0, *ends], ends, strict=False)]
    ratios = [seconds / table.mixed(0, 0.0, [(4096, 0)]) for seconds in steps]
    assert 0.91 < ratios[0] < 0.94
    assert ratios == pytest.approx(sorted(ratios))
    assert all(ratio == pytest.approx(1, abs=1e-6) for ratio, end in zip(ratios[1:], ends, strict=False) if end > 0.19)


def test_a_pause_takes_back_as_many_seconds_of_prompts() -> None:
    """A second without prompts takes back one of them; what ran beyond the end of a burst is not owed."""
    clock = MatrixClock(BURST)
    assert clock.left(0.0, 0.1) == 1.0
    clock.ran(0.0, 5.0)
    assert clock.left(5.0, 0.01) == 0.0
    assert clock.left(5.1, 0.001) == pytest.approx(1, abs=0.01)
    assert clock.left(5.05, 0.001) == pytest.approx(0.5, abs=0.01)
    staged = MatrixClock(BURST, 4)
    staged.ran(0.0, 0.4)
    staged.ran(0.1, 0.4)
    assert staged.level == pytest.approx(0.2)


@pytest.mark.parametrize("share", [0.05, 0.2, 0.35, 0.5, 0.65, 0.8])
@pytest.mark.parametrize("each", [0.01, 0.05, 0.15, 0.4])
def test_the_mean_clock_is_that_of_prompts_that_come_at_random(share: float, each: float) -> None:
    """Prompts of one server, in their order: what is left of the clock to them, within 12 % of it in every case."""
    random, clock, now, left = Random(f"{share} {each}"), MatrixClock(BURST), 0.0, []
    free = 0.0
    for _ in range(20000):
        now += random.expovariate(share / each)
        begin = max(now, free)
        left.append(clock.left(begin, each))
        clock.ran(begin, each)
        free = begin + each
    found = mean_left(BURST, np.array([share]), np.array([each / (1 - share)]), share / (1 - share))
    assert float(found[0]) == pytest.approx(mean(left), abs=0.12)


def test_less_is_left_of_the_clock_the_more_prompts_run() -> None:
    """The share of the highest clock is all where nothing runs, none where nothing else does, and falls between."""
    busy = np.linspace(0.0, 1.0, 41)
    left = mean_left(BURST, busy, 0.02 + 0 * busy, 0.0)
    assert left[0] == pytest.approx(1, abs=1e-3)
    assert left[-1] < 1e-3
    assert (np.diff(left) <= 1e-12).all()


@pytest.mark.parametrize("prompt", [500, 2000])
@pytest.mark.parametrize("share", [0.02, 0.2, 0.4, 0.6])
def test_the_closed_form_knows_what_is_left_of_the_clock(prompt: int, share: float) -> None:
    """Means of the closed form are those of the simulation as far as they were without: TTFT 3 %, others 1 %."""
    few = loaded(1e-3, prompt, 200, count=20)
    report = loaded(share * float(few.steady.capacity), prompt, 200)
    assert report.steady.ttft_seconds == pytest.approx(report.latencies["ttft"]["mean"], rel=0.035)
    assert report.steady.tpot_seconds == pytest.approx(report.latencies["tpot"]["mean"], rel=0.015)


def test_what_was_not_measured_has_no_burst() -> None:
    """Other devices, ideal ones and stated shares of the peak have one clock, and a note names it where there is."""
    model, job = load_model("llama-3.1-8b"), Serving(input_tokens=1000, output_tokens=10)
    for name, wanted, known in (
        ("h100-sxm-80gb", Efficiencies(), True),
        ("h100-pcie-80gb", Efficiencies(), False),
        ("h200-sxm-141gb", Efficiencies(), False),
        ("h20", Efficiencies(), False),
        ("h100-sxm-80gb", Efficiencies(compute=0.6), False),
        ("h100-sxm-80gb", Efficiencies(ideal=True), False),
    ):
        report = infer(model, Cluster.parse(f"1x{name}"), Plan(), job, ServingOptions(efficiencies=wanted))
        assert (burst_of(report.case) is not None) == known
        assert any(note.startswith("clock:") for note in report.assumptions) == known
        table = StepTable(report.case, 8, 2048, 4096)
        assert bool(table.spared) == known


def test_a_clock_is_told_of_prompts_alone() -> None:
    """Both answers say which of them counts it; a model that makes no tokens is never served, and says nothing."""
    said = loaded(1.0, 500, 10, count=10).assumptions
    alone = infer(load_model("llama-3.1-8b"), Cluster.parse("1xh100-sxm-80gb"), Plan(), Serving())
    notes = [[one for one in notes if one.startswith("clock:")] for notes in (said, alone.assumptions)]
    assert notes[0] == notes[1]
    assert notes[0][0].endswith("0.095 to 0.19 s: serve counts that, infer does not")
    encoder = Serving(input_tokens=257, output_tokens=0)
    for name in ("bert-large", "vit-huge"):
        report = infer(load_model(name), Cluster.parse("1xh100-sxm-80gb"), Plan(), encoder)
        assert not any(note.startswith("clock:") for note in report.assumptions)


def test_explain_opens_prompts_at_both_clocks() -> None:
    """The first token opens to prompts at the clock that lasts and at the highest, which add up to it."""
    report = loaded(12.0, 2000, 20, count=100)
    opened = explain(report, "ttft")
    assert float(opened) == pytest.approx(report.steady.ttft_seconds, rel=1e-9)
    assert sum(part.amount for part in opened.contributions) == pytest.approx(float(opened), rel=1e-9)
    seen, labels = [opened], set[str]()
    for _ in range(6):
        parts = [part for node in seen for part in node.contributions]
        labels |= {part.label for part in parts}
        seen = [part.node for part in parts if part.node is not None and part.node.op]
    steps = [label for label in labels if "step of a prompt of" in label]
    assert {"at the highest clock" in label for label in steps} == {True, False}
