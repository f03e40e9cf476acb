"""Large fleets: the part of the replicas that is simulated answers for all of them."""

from __future__ import annotations

import shlex
from functools import cache
from itertools import islice, pairwise
from statistics import fmean

import pytest

import shardwise as sw
from command_line import run
from shardwise.answers._energy import energy
from shardwise.plans import Arrivals, Length, Workload
from shardwise.records import replace
from shardwise.serving.load import LoadOptions, ServeReport, serve
from shardwise.serving.load._sample import Sample, requests_of, sample_of, sample_of_pools

# Requests a second of a replica: 80 % of what it carries.
_RATE = 21.8
_LENGTHS = {"input_tokens": Length(kind="lognormal", mean=1000, cv=0.5),
            "output_tokens": Length(kind="lognormal", mean=150, cv=0.5)}  # fmt: skip
_ROUTERS = ("round-robin", "random", "least-loaded")


@cache
def _served(
    replicas: int, router: str = "round-robin", rate: float = _RATE, count: int = 0, seed: int = 0
) -> ServeReport:
    """Return the report of Llama-8B on so many H100; of so many requests, of which none is a sample, if any."""
    load = Workload(**_LENGTHS, arrivals=Arrivals(rate=rate * replicas), count=count or 2000, seed=seed)
    options = LoadOptions(router=router, settled=not count)  # type: ignore[arg-type]
    model, plan = sw.load_model("llama-3.1-8b"), sw.Plan(dp=replicas, micro_batch=1)
    return serve(model, sw.Cluster.parse(f"{replicas}xh100"), plan, load, None, options)


@pytest.mark.parametrize("router", _ROUTERS)
def test_fleets_at_the_same_load_a_replica_agree(router: str) -> None:
    """8, 48 and 200 replicas agree within the noise of the draw, and more never raise a percentile beyond it."""
    reports = [_served(replicas, router) for replicas in (8, 48, 200)]
    assert [report.share < 1 for report in reports] == [False, True, True]
    for metric, mean, tail in (("ttft", 0.1, 0.15), ("tpot", 0.03, 0.15), ("e2e", 0.03, 0.1)):
        few, some, many = (report.latencies[metric] for report in reports)
        for less, more in ((few, some), (some, many), (few, many)):
            fewer_turns = 0.15 if router == "round-robin" and less is few else mean
            assert -fewer_turns <= more["mean"] / less["mean"] - 1 <= 0.05, (metric, less, more)
            assert more["p99"] <= (1 + tail) * less["p99"], (metric, less, more)
        assert many["p99"] == pytest.approx(some["p99"], rel=tail)


@pytest.mark.parametrize("router", _ROUTERS)
def test_a_part_of_a_fleet_answers_as_the_whole(router: str) -> None:
    """A fleet of 48 replicas, as full as it will be, has the latencies of the part that is simulated.

    Of a router that draws or follows loads one draw of the part is 4 % from the whole, three are within 1.
    """
    seeds = (0,) if router == "round-robin" else (0, 1, 2)
    parts = [_served(48, router, seed=seed) for seed in seeds]
    wholes = [
        _served(48, router, count=round(part.workload.count / part.share), seed=seed)
        for part, seed in zip(parts, seeds, strict=True)
    ]
    assert all(part.share < 0.5 for part in parts) and all(whole.share == 1.0 for whole in wholes)
    for metric, tail in (("ttft", 0.06), ("tpot", 0.12), ("e2e", 0.12)):
        for name, within in (("mean", 0.04), ("p99", tail)):
            ours, theirs = (fmean(one.latencies[metric][name] for one in every) for every in (parts, wholes))
            assert ours == pytest.approx(theirs, rel=within), (metric, name)


def test_large_fleets_take_no_more_requests_than_small_ones() -> None:
    """Ten times the fleet at ten times the rate is simulated with as many requests, to the page's own words."""
    some, many = _served(200), _served(2000)
    assert len(many.requests) == pytest.approx(len(some.requests), rel=0.01)
    assert len(many.requests) < 12_000
    assert any(f"{many.fleet.sample.simulated} of 2,000 replicas" in note for note in many.assumptions)  # type: ignore[union-attr]


def test_what_is_said_of_a_fleet_is_of_all_of_it() -> None:
    """What is served grows with the fleet; what a replica runs, and what a token costs and uses, does not."""
    some, many = _served(48), _served(200)
    assert many.requests_per_second == pytest.approx(200 / 48 * some.requests_per_second, rel=0.02)
    assert many.output_tokens_per_second == pytest.approx(200 / 48 * some.output_tokens_per_second, rel=0.02)
    assert many.growth_per_second == 0
    running = [one.to_dict()["running"]["mean"] for one in (_served(8), some, many)]
    assert running[1:] == pytest.approx(running[:1] * 2, rel=0.05)
    used = [energy(one) for one in (_served(8), some, many)]
    assert [one.joules_per_token for one in used[1:]] == pytest.approx([used[0].joules_per_token] * 2, rel=0.05)
    assert [one.watts_per_device for one in used[1:]] == pytest.approx([used[0].watts_per_device] * 2, rel=0.05)


def test_the_sample_of_a_steady_stream_is_what_its_replicas_get() -> None:
    """In turn, three of eight replicas get the very requests, at the very times, that the fleet's router gives them."""
    pairs = tuple((100 + index, 10) for index in range(50))
    load = Workload(**_LENGTHS, arrivals=Arrivals(kind="constant", rate=4.0), pairs=pairs)
    sample = Sample(simulated=3, replicas=8, router="round-robin")
    every = [(one.arrival, one.input_tokens) for one in requests_of(load, 200)]
    some = [(one.arrival, one.input_tokens) for one in requests_of(load, 60, sample)]
    assert some == [one for index, one in enumerate(every) if index % 8 in (0, 2, 5)][:60]


@pytest.mark.parametrize("router", ["round-robin", "random"])
@pytest.mark.parametrize("cv", [0.5, 3.0])
def test_gaps_of_a_sample_are_those_of_its_replicas(router: str, cv: float) -> None:
    """A sampled replica sees gaps of the mean and the spread that it sees among all."""
    arrivals = Arrivals(kind="gamma", rate=24.0, cv=cv)
    load = Workload(**_LENGTHS, arrivals=arrivals)
    sample = Sample(simulated=3, replicas=24, router=router)
    some = [one.arrival for one in requests_of(load, 60_000, sample)]
    assert some[-1] == pytest.approx(len(some) / 3, rel=0.02)
    if router == "random":
        # Of a random eighth: a geometric number of gaps, whose squared spread is 1 - 1/8 + cv^2/8.
        gaps = [after - at for at, after in pairwise(some)]
        assert _cv2(gaps) == pytest.approx(1 - 1 / 8 + cv**2 / 8, rel=0.06)
        return
    own, whole = some[::3], [one.arrival for one in requests_of(load, 60_000)][::24]
    spreads = [_cv2([b - a for a, b in pairwise(times)]) for times in (own, whole)]
    assert spreads == pytest.approx([cv**2 / 24] * 2, rel=0.2)


def _cv2(gaps: list[float]) -> float:
    mean = sum(gaps) / len(gaps)
    return sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2


def test_a_fleet_whose_prompts_share_blocks_is_whole() -> None:
    """Where a cache has what was sent before, each request goes where the router sends it."""
    load = Workload(**_LENGTHS, arrivals=Arrivals(rate=9.0), pairs=((64, 9),) * 2, blocks=(((5, 64),), ((5, 64),)))
    assert sample_of(load, 500, "round-robin", 1000.0).simulated == 500
    assert sample_of(replace(load, blocks=()), 500, "round-robin", 1000.0).simulated == 10
    assert sample_of(replace(load, blocks=()), 500, "least-loaded", 1000.0).simulated == 16
    assert list(islice(Sample(simulated=5, replicas=5, router="random").steps(0), 3)) == [1, 1, 1]


def test_a_fleet_asked_again_is_simulated_as_it_was() -> None:
    """The command that a page ends with gives its figures, of a fleet that is simulated in part and of a whole one."""
    asked = ("serve", "llama-3.1-8b", "--rate", "1200", "--input-tokens", "1000", "--output-tokens", "150")
    for devices, part in ((160, True), (8, False)):
        words = [*asked, "--on", f"{devices}xh100-sxm-80gb", "--dp", str(devices)]
        words[3] = str(devices * 7.5)
        page = run(*words).out
        again = shlex.split(page.rpartition("AGAIN")[2].replace("\\\n", " "))
        assert again[0] == "shardwise" and ("--requests" in again) != part
        assert run(*again[1:]).out == page


def test_replicas_of_a_pipeline_each_have_their_stages_beside_each_other() -> None:
    """Twelve servers of four stages take what one does at its part of the load: no stage of any is sent to far away.

    Data parallelism within the stages put these on nodes of their own: tokens of eight stages took 14 % longer.
    """
    model, load = sw.load_model("llama-3.1-8b"), Workload(**_LENGTHS, arrivals=Arrivals(rate=20.0))
    first = serve(model, sw.Cluster.parse("4xh100"), sw.Plan(pp=4, micro_batch=1), load)
    load = replace(load, arrivals=Arrivals(rate=240.0))
    every = serve(model, sw.Cluster.parse("48xh100"), sw.Plan(pp=4, dp=12, micro_batch=1), load)
    for name in ("full_seconds", "tpot_seconds"):
        assert getattr(every.steady, name) == pytest.approx(getattr(first.steady, name), rel=1e-2), name
    apart = sw.Plan(pp=4, dp=12, micro_batch=1, order=("tp", "cp", "tp2", "dp", "pp"))
    asked = serve(model, sw.Cluster.parse("48xh100"), apart, load)
    assert asked.steady.tpot_seconds > 1.01 * every.steady.tpot_seconds


def _two_pools(router: str, seed: int, count: int = 0) -> ServeReport:
    """Return the report of 32 prefill workers before 48 replicas; of so many requests, all of them, if any."""
    lengths = {"input_tokens": Length(kind="lognormal", mean=1000, cv=0.5),
               "output_tokens": Length(kind="lognormal", mean=200, cv=0.5)}  # fmt: skip
    load = Workload(**lengths, arrivals=Arrivals(rate=1200.0), count=count or 2000, seed=seed)
    options = LoadOptions(prefill=sw.Plan(dp=32, micro_batch=1), router=router, settled=not count)  # type: ignore[arg-type]
    return serve(sw.load_model("llama-3.1-8b"), sw.Cluster.parse("80xh100"), sw.Plan(dp=48, micro_batch=1), load, None,
                 options)  # fmt: skip


def test_a_part_of_two_pools_answers_as_both() -> None:
    """Half of either, at 88 % of what they carry: two draws, means within 5 % and p99 within 10."""
    parts = [_two_pools("round-robin", seed) for seed in range(2)]
    wholes = [_two_pools("round-robin", seed, round(2 * one.workload.count)) for seed, one in enumerate(parts)]
    assert all(one.share == 0.5 for one in parts) and all(one.share == 1 for one in wholes)
    assert "16 of 32 prefill workers and 24 of 48 that decode are simulated, fed as the router feeds all" in (
        parts[0].assumptions
    )
    for metric in ("ttft", "tpot", "e2e"):
        for name, within in (("mean", 0.05), ("p99", 0.1)):
            ours, theirs = (fmean(one.latencies[metric][name] for one in every) for every in (parts, wholes))
            assert ours == pytest.approx(theirs, rel=within), (metric, name)
    assert parts[0].requests_per_second == pytest.approx(wholes[0].requests_per_second, rel=0.05)
    assert parts[0].devices == 80


def test_two_pools_whose_router_looks_at_loads_are_whole() -> None:
    """Fewer workers to choose from wait longer; and parts that are no part of both are none."""
    load = Workload(**_LENGTHS, arrivals=Arrivals(rate=1000.0))
    assert sample_of_pools(load, (64, 96), "least-loaded", 1000.0).simulated == 64
    assert sample_of_pools(load, (17, 29), "round-robin", 1000.0).simulated == 17
