"""What is said beside percentiles under load: where their seconds go, how far to trust them, and the chance asked."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import run
from shardwise.answers._canvas import styled
from shardwise.answers._plots_load import curve_of, knee_of, load_figure, series_of
from shardwise.cost import band_of
from shardwise.formats.latencies import read_latencies
from shardwise.formats.traces import read_trace
from shardwise.hardware import Cluster
from shardwise.ledger.traced import operands
from shardwise.models import load_model
from shardwise.plans import Arrivals, Length, Limit, Plan, Serving, Workload
from shardwise.plans._workload import ArrivalKind
from shardwise.search import load_remedies
from shardwise.serving import ServingOptions
from shardwise.serving.load import OPENED, SIGNALS, Autoscale, LoadOptions, ServeReport, explain, serve
from shardwise.serving.load._autoscale import Signal
from shardwise.serving.load._why import EXPLAINED, LOST, OTHERS, OWN_DECODE, _of_the_first_token, _of_the_rest
from shardwise.units import show_seconds

PLACES: dict[str, tuple[str, str, Plan, str]] = {
    "one pool": ("llama-3.1-8b", "1xh100-sxm-80gb", Plan(), "vllm"),
    "prompts first": ("llama-3.1-8b", "1xh100-sxm-80gb", Plan(), "sglang"),
    "groups": ("deepseek-v2-lite", "4xh200-sxm-141gb", Plan(dp=4, ep=4), "vllm"),
    "pipeline": ("llama-3.1-8b", "2xl40s", Plan(pp=2), "vllm"),
    "groups in stages": ("deepseek-v2-lite", "4xh200-sxm-141gb", Plan(pp=2, dp=2, ep=2), "tensorrt-llm"),
    "pools": ("llama-3.1-8b", "2xh100-sxm-80gb", Plan(), "vllm"),
}


@cache
def report_of(name: str, load: float = 0.6) -> ServeReport:
    """Return the report of a deployment at a share of what it carries."""
    model, cluster, plan, engine = PLACES[name]
    asked = Workload(
        input_tokens=Length(kind="lognormal", mean=1000, cv=0.5), output_tokens=Length(mean=100),
        arrivals=Arrivals(rate=1e-3), count=1000,
    )  # fmt: skip
    prefill = Plan() if name == "pools" else None
    options = LoadOptions(serving=ServingOptions(engine=engine), prefill=prefill)
    empty = serve(load_model(model), Cluster.parse(cluster), plan, asked, Serving(), options)
    rate = load * empty.steady.capacity * plan.dp
    asked = replace(asked, arrivals=Arrivals(rate=rate))
    return serve(load_model(model), Cluster.parse(cluster), plan, asked, Serving(), options)


@pytest.mark.parametrize("name", PLACES)
def test_causes_add_up_to_what_each_request_took(name: str) -> None:
    """Every cause is no less than nothing, and those of a request are its TTFT and the rest of its seconds."""
    report = report_of(name)
    assert len(report.requests) == 1000
    decode = report.fleet.decode.table
    prompts = report.fleet.prefill.table if report.fleet.prefill else decode
    for request in report.requests:
        first, rest = _of_the_first_token(prompts, request), _of_the_rest(decode, request)
        assert sum(first.values()) == pytest.approx(request.ttft_seconds, rel=1e-9, abs=1e-9)
        assert sum(rest.values()) == pytest.approx(request.end - request.first, rel=1e-9, abs=1e-9)
        assert min(*first.values(), *rest.values()) > -1e-9


@pytest.mark.parametrize("load", [0.05, 0.6])
@pytest.mark.parametrize("name", PLACES)
def test_causes_add_up_to_the_percentile_that_they_explain(name: str, load: float) -> None:
    """Of few requests that wait at all, those beyond a percentile waited and it did not: it has no part of waits."""
    report = report_of(name, load)
    for metric in EXPLAINED:
        for word, seconds in report.latencies[metric].items():
            assert sum(dict(report.why(metric, word)).values()) == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize("name", ["groups", "pipeline"])
def test_who_waits_for_others_is_told_so(name: str) -> None:
    """Groups of attention wait for the slowest, batches of a pipeline for their stages; one batch alone for nobody."""
    assert dict(report_of(name).why("tpot"))[OTHERS] > 0
    assert OTHERS not in dict(report_of("one pool").why("tpot"))


def test_a_full_cache_is_a_cause() -> None:
    """Requests that are sent away wait and are recomputed: those seconds are named, and are most of the longest."""
    asked = Workload(
        input_tokens=Length(mean=200), output_tokens=Length(mean=4000), arrivals=Arrivals(kind="burst"), count=400
    )
    cluster = Cluster.parse("1xl40s")
    report = serve(load_model("llama-3.1-8b"), cluster, Plan(), asked, Serving(max_sequences=256), LoadOptions())
    assert sum(trace.preemptions for trace in report.traces) > 10
    assert dict(report.why("e2e"))[LOST] > 1.0


def test_lighter_load_has_fewer_causes_of_others() -> None:
    """On an empty replica tokens take their own decode steps alone."""
    parts = dict(report_of("one pool", 0.01).why("tpot", "p50"))
    assert parts[OWN_DECODE] > 0.97 * sum(parts.values())


@settings(max_examples=16, deadline=None)
@given(metric=st.sampled_from(["ttft", "tpot", "e2e"]), quantile=st.sampled_from(["mean", "p50", "p90", "p99"]),
       shares=st.tuples(st.floats(0.2, 5), st.floats(0.2, 5)))  # fmt: skip
def test_looser_limits_are_likelier(metric: str, quantile: str, shares: tuple[float, float]) -> None:
    """The chance to keep a limit grows with it, and one more limit never makes all of them likelier."""
    report = report_of("one pool")
    value = report.latencies[metric][quantile]
    low, high = (
        replace(report, options=LoadOptions(limits=(Limit(metric=metric, quantile=quantile, seconds=value * share),)))
        for share in sorted(shares)
    )
    assert 0 <= low.chance_to_meet <= high.chance_to_meet <= report.chance_to_meet <= 1


def test_bands_hold_their_middle_and_are_wider_where_less_is_known() -> None:
    """Low, typical and high rise; tails are wider than means, and no band is narrower near capacity."""
    report = report_of("one pool")
    near = replace(report, steady=replace(report.steady, full_seconds=0.95 / report.steady.rate))

    def width(one: ServeReport, metric: str, name: str) -> float:
        band = one.interval[metric][f"{name}_seconds"]
        assert band["low"] <= band["typical"] <= band["high"]
        return band["high"] / band["low"]

    for metric in ("ttft", "tpot", "e2e"):
        assert width(report, metric, "p99") >= width(report, metric, "mean") * (1 - 1e-12)
        assert width(near, metric, "mean") >= width(report, metric, "mean")
    # A whole request is no better and no worse known than the first token and the others that it waits for.
    ends = [
        {end: band[end] / report.latencies[m]["p99"] for end in ("low", "high")}
        for m in ("e2e", "ttft", "tpot")
        for band in (report.interval[m]["p99_seconds"],)
    ]
    assert all(
        min(one[end] for one in ends[1:]) <= ends[0][end] <= max(one[end] for one in ends[1:]) for end in ends[0]
    )
    carried = report.interval["capacity"]["requests_per_second"]
    assert carried["low"] < report.capacity_per_second < carried["high"]
    assert "queue" not in report.interval


def test_what_is_carried_is_known_as_its_seconds_are() -> None:
    """Published runs that are full take longer than predicted, so they carry less: as likely as the band of seconds."""
    report = report_of("one pool")
    seconds = band_of("load.requests_per_second", report.conditions())
    carried, most = report.interval["capacity"]["requests_per_second"], report.capacity_per_second
    assert most / carried["low"] == pytest.approx(seconds.high)
    assert most / carried["high"] == pytest.approx(seconds.low)
    assert 1 - report.band("capacity").chance(carried["low"] / most) == pytest.approx(0.9)


WORDS = ("serve", "llama-3.1-8b", "--on", "1xh100", "--rate", "2/s", "--requests", "1000")


@pytest.mark.parametrize(("risk", "status"), [("10%", 0), ("99%", 1)])
def test_the_chance_that_was_asked_decides(risk: str, status: int) -> None:
    """A limit that is kept is not met where published runs make it less likely than was asked."""
    seconds = run(*WORDS, "--json").tree["tpot"]["mean_seconds"]
    done = run(*WORDS, "--mean-tpot", f"{1.15 * seconds}s", "--risk", risk, "--json")
    assert done.status == status
    assert done.tree["limits"][0]["kept"] and done.tree["meets"] == (status == 0)
    assert 0 < done.tree["chance_to_meet"] <= done.tree["limits"][0]["chance"] < 1


def scaled(rule: Autoscale | None, replicas: int = 4, **more: Any) -> ServeReport:
    """Return Llama-3.1-8B behind a router by load, its replicas as a rule has them, under bursty requests."""
    fields: dict[str, Any] = {"arrivals": Arrivals(kind="gamma", rate=20.0, cv=3.0), "count": 1500}
    asked = Workload(input_tokens=Length(mean=800), output_tokens=Length(mean=150), **(fields | more))
    options = LoadOptions(router="least-loaded", autoscale=rule)
    cluster = Cluster.parse(f"{replicas}xh100-sxm-80gb")
    return serve(load_model("llama-3.1-8b"), cluster, Plan(dp=replicas), asked, None, options)


def test_as_many_replicas_at_least_as_at_most_are_a_fixed_fleet() -> None:
    """Where the rule may neither start nor stop any, every request has the seconds of replicas that stay."""
    fixed, same = scaled(None), scaled(Autoscale(metric="requests", target=1, start_seconds=60, least=4))
    for metric in ("ttft", "e2e"):
        assert same.latencies[metric] == pytest.approx(fixed.latencies[metric], rel=1e-9)
    assert same.scaling is not None and same.scaling.started == 4
    assert same.scaling.replica_seconds == pytest.approx(4 * same.scaling.span_seconds)


@settings(max_examples=12, deadline=None)
@given(metric=st.sampled_from(SIGNALS), target=st.floats(0.05, 1.0), start=st.floats(0, 60), least=st.integers(1, 3))
def test_replicas_that_follow_the_load_end_what_they_were_sent(
    metric: Signal, target: float, start: float, least: int
) -> None:
    """Every request ends with all its tokens, and no more replicas are paid for than there are at most."""
    target *= 1 if metric in ("cache", "load") else 20
    rule = Autoscale(metric=metric, target=target, start_seconds=start, least=least, keep_seconds=30)
    report = scaled(rule, finite=True)
    found = report.scaling
    assert found is not None and len(report.requests) == 1500
    assert len({id(r) for r in report.requests}) == 1500 and all(0 <= r.first < r.end for r in report.requests)
    assert least <= found.most <= 4 and all(least <= count <= 4 for _, count in found.replicas)
    assert 0.999 * least * found.span_seconds <= found.replica_seconds <= 4.001 * found.span_seconds
    assert report.to_dict()["running"]["mean"] <= report.to_dict()["running"]["max"]


def test_replicas_that_start_at_once_serve_better_than_late_ones() -> None:
    """A longer start has requests wait longer; looser targets are paid for fewer replicas."""
    late, soon = (scaled(Autoscale(metric="load", target=0.6, start_seconds=s), finite=True) for s in (60.0, 1.0))
    assert soon.latencies["ttft"]["mean"] < late.latencies["ttft"]["mean"]
    loose = scaled(Autoscale(metric="load", target=1.0, start_seconds=1.0), finite=True)
    assert loose.scaling is not None and soon.scaling is not None
    assert loose.scaling.mean_replicas < soon.scaling.mean_replicas


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--autoscale", "running"), "autoscale"),
        (("--autoscale", "running:32"), "startup_time"),
        (("--autoscale", "speed:3", "--startup-time", "60s"), "autoscale"),
        (("--autoscale", "running:0", "--startup-time", "60s"), "autoscale"),
        (("--autoscale", "cache:80", "--startup-time", "60s"), "autoscale"),
        (("--autoscale", "running:nan", "--startup-time", "60s"), "autoscale"),
        (("--autoscale", "running:8", "--startup-time", "60s", "--min-replicas", "3"), "min_replicas"),
        (("--autoscale", "running:8", "--startup-time", "60s", "--scale-interval", "1ms"), "scale_interval"),
        (("--autoscale", "running:8", "--startup-time", "60s", "--scale-interval", "1e-9s"), "scale_interval"),
        (("--autoscale", "running:8", "--startup-time", "60s", "--scale-interval", "0s"), "scale_interval"),
        (("--startup-time", "60s"), "startup_time"),
        (("--min-replicas", "1"), "min_replicas"),
    ],
)
def test_rules_that_no_replica_can_follow_are_refused(words: tuple[str, ...], field: str) -> None:
    """Exit status 2, and the field that is wrong or missing."""
    done = run(*WORDS, *words, "--json")
    assert done.status == 2 and field in {problem["field"] for problem in done.tree["error"]["problems"]}


def test_a_deployment_that_does_not_fit_says_what_would() -> None:
    """The nearest change stands below the verdict, as it does for a batch."""
    done = run("serve", "llama-3.1-70b", "--on", "8xh100", "--rate", "1", "--tp", "1")
    assert done.status == 1 and "nearest change that fits: --tp 8" in " ".join(done.out.split())


NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}


def test_the_plot_of_a_load_shows_what_the_answer_says() -> None:
    """Latencies rise with the rate, distributions end at all requests, and the timeline has who runs and waits."""
    report = report_of("one pool")
    report = replace(report, workload=replace(report.workload, count=200))
    curve = curve_of(report)
    rates, tails = ([of(one) for one in curve] for of in (_rate_of, _tail_of))
    assert rates == sorted(rates) and rates[-1] < report.capacity_per_second
    assert tails[0] < tails[-1]
    with styled():
        figure = load_figure(report, {"ttft": [0.1, 0.2], "tpot": [], "e2e": [1.0]})
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [title for title in titles if title] == [
        "Latency against rate",
        "Goodput against rate",
        "Share of requests within a time",
        "Requests over time, all replicas",
        *(f"p99 {name} {show_seconds(report.latencies[key]['p99'])}, cause by cause" for key, name in NAMES.items()),
    ]
    for key, axes in zip(NAMES, figure.axes[-3:], strict=True):
        # Each cause begins where the one before it ends, and the last bar is their sum.
        *parts, whole = axes.patches
        assert [bar.get_x() for bar in parts] == pytest.approx([0, *(b.get_x() + b.get_width() for b in parts[:-1])])
        assert sum(bar.get_width() for bar in parts) == pytest.approx(whole.get_width())
        assert len(parts) == len(report.why(cast(Any, key)))
    assert knee_of(curve) in rates and tails[rates.index(knee_of(curve))] < tails[-1]
    drawn = [list(line.get_ydata()) for axes in figure.axes for line in axes.get_lines()]
    for metric in ("ttft", "tpot", "e2e"):
        band = report.interval[metric]["p99_seconds"]
        assert [band["low"], band["high"]] in drawn
    shares = figure.axes[3].get_lines()
    assert len(shares) == 5 and all(line.get_ydata()[-1] == 1.0 for line in shares)
    found = series_of(report)
    assert max(found["running"]) <= sum(trace.most_running for trace in report.traces)
    assert found["running"][-1] == found["waiting"][-1] == 0


def _rate_of(report: ServeReport) -> float:
    return report.workload.arrivals.rate


def _tail_of(report: ServeReport) -> float:
    return report.latencies["e2e"]["p99"]


VLLM = json.dumps({"ttfts": [0.1, 0.2], "itls": [[0.01, 0.03], []]})
# vllm/benchmarks/serve.py (2026-11): a request that failed has a first token at 0; two tokens came in the last chunk.
VLLM_DETAILED = json.dumps(
    {"ttfts": [0.1, 0.0, 0.2], "itls": [[0.04], [], []], "output_lens": [3, 0, 1], "errors": ["", "HTTP 500", ""]}
)
GUIDELLM = json.dumps({"benchmarks": [{"requests": {"successful": [
    {"time_to_first_token_ms": 100.0, "inter_token_latency_ms": 20.0, "request_latency": 0.14},
    {"time_to_first_token_ms": 200.0, "inter_token_latency_ms": None, "request_latency": 0.2}]}}]})  # fmt: skip
ROWS = "ttft_seconds,request_seconds,output_tokens\n0.1,0.14,3\n0.2,0.2,1\n"
# inference_perf/apis/base.py (2026-11), and before 2026 with times and tokens in `info` itself.
PERF = json.dumps([
    {"start_time": 7.0, "end_time": 7.14, "error": None, "info": {"request_metrics": {"text": {"input_tokens": 9}},
     "response_metrics": {"output_tokens": 3, "output_token_times": [7.1, 7.12, 7.14]}}},
    {"start_time": 8.0, "end_time": 8.0, "error": {"error_type": "timeout"}, "info": {}},
    {"start_time": 9.0, "end_time": 9.2, "error": None, "info": {"output_tokens": 1, "output_token_times": [9.2]}},
])  # fmt: skip
# genai_bench/metrics/metrics.py: `_time_unit` is what the run was told with --metrics-time-unit.
GENAI_MS = json.dumps({"_time_unit": "ms", "individual_request_metrics": [
    {"ttft": 100.0, "tpot": 20.0, "e2e_latency": 140.0, "error_code": None},
    {"ttft": 200.0, "tpot": None, "e2e_latency": 200.0, "error_code": None}]})  # fmt: skip


# ai-dynamo/aiperf docs/tutorials/working-with-profile-exports.md: one token has no latency between tokens.
AIPERF = "".join(
    json.dumps({"metadata": {"request_start_ns": 5, "was_cancelled": gone}, "error": None,
        "metrics": {name: {"value": value, "unit": "ms"} for name, value in metrics.items()}}) + "\n"
    for gone, metrics in (
        (False, {"time_to_first_token": 100.0, "inter_token_latency": 20.0, "request_latency": 140.0}),
        (True, {"time_to_first_token": 900.0, "request_latency": 900.0}),
        (False, {"time_to_first_token": 200.0, "request_latency": 200.0}))
)  # fmt: skip


@pytest.mark.parametrize("text", [VLLM, VLLM_DETAILED, GUIDELLM, ROWS, PERF, GENAI_MS, AIPERF])
def test_measured_requests_are_read(text: str, tmp_path: Path) -> None:
    """Results of benchmarks and CSV files give the same seconds; what has one token has no time between them."""
    path = tmp_path / "measured"
    path.write_text(text)
    found = read_latencies(str(path))
    assert found["ttft"] == pytest.approx([0.1, 0.2]) and found["e2e"] == pytest.approx([0.14, 0.2])
    assert found["tpot"] == [pytest.approx(0.02)]


@pytest.mark.parametrize("text", ["", "{}", "[]", "a,b\n1,2\n", '{"ttfts": [1], "itls": "no"}', "\x00"])
def test_files_without_measured_requests_are_refused(text: str, tmp_path: Path) -> None:
    """Whatever a file holds that is no requests, the answer says so of `against`."""
    path = tmp_path / "measured"
    path.write_text(text)
    done = run(*WORDS, "--against", str(path), "--plot", str(tmp_path / "a.svg"), "--json")
    assert done.status == 2 and {problem["field"] for problem in done.tree["error"]["problems"]} == {"against"}


@settings(max_examples=16, deadline=None)
@given(
    stages=st.lists(st.tuples(st.floats(0.5, 50), st.floats(1, 30)), min_size=1, max_size=4),
    kind=st.sampled_from(["constant", "poisson", "gamma"]),
    seed=st.integers(0, 99),
)
def test_stages_have_the_requests_of_their_rates(
    stages: list[tuple[float, float]], kind: ArrivalKind, seed: int
) -> None:
    """Arrivals rise, all within the stages; constant ones are as many in each as its rate and time say."""
    found = Arrivals(kind=kind, cv=2.0).through(stages, Random(seed))
    whole = sum(seconds for _, seconds in stages)
    assert found.times == tuple(sorted(found.times)) and found.times[-1] <= whole + 1e-9
    if kind == "constant":
        assert len(found.times) == pytest.approx(sum(rate * seconds for rate, seconds in stages), abs=1)
        first, seconds = stages[0]
        assert sum(at < seconds - 1e-6 for at in found.times) == pytest.approx(first * seconds, abs=1)


def test_stages_and_the_end_of_a_trace_are_served(tmp_path: Path) -> None:
    """A burst in the middle fills the queue; the last minute of a trace is a trace of its own."""
    words = ("serve", "llama-3.1-8b", "--on", "1xh100", "--stages", "5/s:20s,90/s:5s,5/s:20s", "--json")
    tree = run(*words).tree
    assert tree["waiting"]["max"] > 10 and tree["method"]["requests"] == pytest.approx(650, rel=0.15)
    path = tmp_path / "trace.csv"
    rows = "".join(f"{at},100,10\n" for at in range(0, 300, 10))
    path.write_text("arrival_seconds,input_tokens,output_tokens\n" + rows)
    whole, last = read_trace(str(path)), read_trace(str(path), last=60.0)
    assert (whole.count, last.count) == (30, 7) and last.arrivals.times == whole.arrivals.times[:7]


@pytest.mark.parametrize(
    "text", ["5/s", "5/s:0s", "0/s:10s", "5/s:10s,", "5/s:nan", "nan:10s", "1e6/s:1h", ":", "5:day"]
)
def test_wrong_stages_are_refused(text: str) -> None:
    """Exit status 2 with the field."""
    done = run("serve", "llama-3.1-8b", "--on", "1xh100", "--stages", text, "--json")
    assert done.status == 2 and {problem["field"] for problem in done.tree["error"]["problems"]} == {"stages"}


def test_engines_share_requests_over_their_groups_of_attention() -> None:
    """By loads the fullest group has less to do than in turns; a router in turns still gives each replica its part."""
    model, cluster, plan, _ = PLACES["groups"]
    asked = Workload(
        input_tokens=Length(kind="lognormal", mean=1000, cv=1.5),
        output_tokens=Length(kind="lognormal", mean=200, cv=1.5),
        arrivals=Arrivals(rate=60.0), count=1500, finite=True,
    )  # fmt: skip
    most = dict.fromkeys(("vllm", "sglang", "tensorrt-llm"), 0.0)
    for engine, seed in product(most, range(3)):
        options = LoadOptions(serving=ServingOptions(engine=engine))
        drawn = replace(asked, seed=seed)
        report = serve(load_model(model), Cluster.parse(cluster), plan, drawn, Serving(), options)
        spread = [trace.running_seconds for trace in report.traces]
        most[engine] += max(spread) / min(spread)
    assert most["vllm"] < most["sglang"] and most["tensorrt-llm"] < most["sglang"]


@pytest.mark.parametrize(("input_tokens", "output_tokens"), [(2000, 300), (300, 500)])
def test_groups_that_step_together_carry_what_the_closed_form_says(input_tokens: int, output_tokens: int) -> None:
    """Four groups of a replica end as many requests a second of a full queue as the closed form says, within 5 %."""
    model, cluster, plan, _ = PLACES["groups"]
    asked = Workload(
        input_tokens=Length(mean=input_tokens), output_tokens=Length(kind="lognormal", mean=output_tokens, cv=0.6),
        arrivals=Arrivals(kind="burst"), count=1600, finite=True,
    )  # fmt: skip
    report = serve(load_model(model), Cluster.parse(cluster), plan, asked, Serving(max_sequences=64), LoadOptions())
    ends = sorted(request.end for request in report.requests)
    first, last = ends[400], ends[1200]
    assert report.steady.capacity * plan.dp == pytest.approx(800 / (last - first), rel=0.05)


@pytest.mark.parametrize(
    ("stages", "arrivals", "field"),
    [
        ("5/s:10s", "burst", "arrivals"),
        ("5/s:10s", "gamma:0", "arrivals"),
        ("5/s:10s", "gamma:nan", "arrivals"),
        ("1/s:1us", "poisson", "stages"),
    ],
)
def test_stages_without_requests_or_a_rate_are_refused(stages: str, arrivals: str, field: str) -> None:
    """A burst has no rate that changes, and times too short for one request are none."""
    done = run(*WORDS[:4], "--stages", stages, "--arrivals", arrivals, "--json")
    assert done.status == 2 and [problem["field"] for problem in done.tree["error"]["problems"]] == [field]


def test_stages_of_the_widest_gaps_have_requests() -> None:
    """However many short gaps a gamma distribution begins with, the last stage is reached."""
    assert Arrivals(kind="gamma", cv=20.0).through([(100.0, 1.0)], Random("stages 1899")).times


def test_memory_set_aside_for_more_than_the_cache_holds_is_a_remedy() -> None:
    """gpt-oss-120b leaves 0.875 of one H100 little room beside 1,024 sequences; told of fewer it carries the load."""
    asked = Workload(
        input_tokens=Length(mean=1000), output_tokens=Length(mean=500), arrivals=Arrivals(rate=4), count=300
    )
    job = Serving(memory_fraction=0.875)
    report = serve(load_model("gpt-oss-120b"), Cluster.parse("h100-sxm-80gb"), Plan(), asked, job)
    fewer = next(one for one in load_remedies(report) if one.field == "max_sequences")
    assert not report.meets and (fewer.value, fewer.report.meets) == (64, True)


@pytest.mark.parametrize(
    ("name", "what"), [*((name, "tpot") for name in PLACES), *(("one pool", what) for what in OPENED if what != "tpot")]
)
def test_the_closed_form_opens_down_to_the_ledger(name: str, what: str) -> None:
    """A mean that explains itself is that of plain numbers; along the largest parts it ends in operators of a step."""
    report = report_of(name)
    node = explain(report, what)
    assert float(node) == pytest.approx(getattr(report.steady, OPENED[what]), rel=1e-9)
    if what == "capacity":
        node = operands(node)[0]
    while not node.name.startswith("layer kind"):
        found = node.contributions
        whole = sum(abs(part.amount) for part in found)
        assert sum(part.amount for part in found) == pytest.approx(float(node), rel=1e-6, abs=1e-9 * whole)
        # A product of two columns, such as a price and a share of it, is an end.
        nodes = [part.node for part in found if part.node is not None and part.node.op]
        node = next(one for one in nodes if one.contributions or one.name.startswith("layer kind"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rate 1e6/s --explain tpot", "grows without end"),
        ("--users 8 --explain e2e", "give --rate, or explain capacity"),
        ("--rate 1/s --depth 3", "has no effect without --explain"),
        ("--rate 1/s --explain tpot --energy", "is no part of what --explain opens"),
        ("--rate 1/s --explain tpot --vary tp=1", "opens one answer"),
        ("--rate 1/s --explain tpot --memory-fraction 0.1", "does not fit"),
    ],
)
def test_what_cannot_be_explained_says_why(words: str, said: str) -> None:
    """Latencies without a rate or beyond capacity have no mean that opens; the error says what does."""
    found = run(*f"serve llama-3.1-8b --on 1xh100 --requests 20 {words}".split())
    assert found.status == 2
    assert said in found.err


def test_the_capacity_that_opens_is_that_of_the_answer() -> None:
    """All replicas together, as the answer says it: it was that of one of them."""
    asked = Workload(
        input_tokens=Length(mean=500), output_tokens=Length(mean=100), arrivals=Arrivals(rate=4), count=200
    )
    report = serve(load_model("llama-3.1-8b"), Cluster.parse("3xh100-sxm-80gb"), Plan(dp=3), asked)
    assert float(explain(report, "capacity")) == pytest.approx(report.capacity_per_second)
