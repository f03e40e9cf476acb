"""`shardwise serve`: a deployment under load."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from shardwise.answers import _case
from shardwise.answers import _kinds as k
from shardwise.answers._answer import Answer
from shardwise.answers._case import Inputs
from shardwise.answers._flags import Flag, _flags, infer_flags
from shardwise.answers._words import command_words
from shardwise.errors import InputError
from shardwise.units import parse_count

if TYPE_CHECKING:
    from shardwise.answers._page import Page
    from shardwise.plans import Arrivals, Length, Limit, Workload
    from shardwise.serving.load import ServeReport

_RANGE = re.compile(r"\s*(\d{1,9})\s*\.\.\s*(\d{1,9})\s*", re.ASCII)
_PER = {"s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}
_GONE = ("batch", "prefix_tokens", "same_prompts", "use_kv_cache", "shard_weights")


def parse_rate(text: str, field: str) -> float:
    """Return requests a second of a text such as 50/s, 3000/min or 50.

    >>> parse_rate("3000/min", "rate"), parse_rate("50", "rate")
    (50.0, 50.0)
    """
    number, slash, unit = text.partition("/")
    if slash and unit.strip() not in _PER:
        raise k.fail(field, text, "is not requests a second, minute or hour", "write for example 50/s")
    return parse_count(number.strip(), field) / _PER.get(unit.strip(), 1.0)


def _read_tokens(value: object, field: str) -> str:
    """Return a number of tokens, or a range of them, as it is written."""
    if isinstance(value, str) and _RANGE.fullmatch(value):
        return value.replace(" ", "")
    return str(k.WHOLE.read(value, field))


_TOKENS = k.Converter(_read_tokens, "N|A..B")
_RATE = k.number(parse_rate, "RATE", k.Range(above=True, most=1e6, example='"50/s"'))
_CV = k.number(parse_count, "X", k.Range(least=0, most=10, example="0.8"))
_SHARE = k.number(parse_count, "SHARE", k.Range(least=0, most=1, example="0.5"))


@cache
def serve_flags() -> dict[str, Flag]:
    """Return every flag of a deployment under load."""
    kept = {key: flag for key, flag in infer_flags().items() if key not in _GONE}
    load = _flags(
        "load",
        ("rate", _RATE, "requests that arrive: 50/s, 3000/min"),
        ("arrivals", k.TEXT, "poisson (left out), constant, gamma:CV of the gaps, or burst: all at once"),
        ("users", k.WHOLE, "a closed loop of users who each wait for their answer"),
        ("think", k.SECONDS, "what a user waits before the next request"),
        (
            "trace",
            k.FILE,
            "a trace: CSV of Azure or BurstGPT, JSON lines of Mooncake, or arrival_seconds,input_tokens,...",
        ),
        ("speed", k.SHARE_OF, "play the trace so many times as fast"),
        ("requests", k.whole(1, 1_000_000), "requests to simulate; left out, 2,000 or what the percentiles need"),
        ("finite", k.SWITCH, "just these requests, as a benchmark asks them: latencies though the queue grows"),
        ("seed", k.whole(0), "seed of lengths and arrivals"),
        ("router", k.choice("round-robin", "random"), "how replicas share requests"),
    )
    lengths = _flags(
        "job",
        ("input_tokens", _TOKENS, "tokens of a prompt: their mean, or a range A..B"),
        ("output_tokens", _TOKENS, "tokens generated for a request: their mean, or a range A..B"),
        ("input_cv", _CV, "spread of prompts, lognormal: standard deviation over mean"),
        ("output_cv", _CV, "spread of answers, lognormal: standard deviation over mean"),
        ("prefix_tokens", k.whole(0), "tokens at the start of every prompt that all share, such as a system prompt"),
        (
            "cached_share",
            _SHARE,
            "share of requests whose whole prompt is cached, as where a benchmark repeats them",
        ),
    )
    from shardwise.plans import METRICS, QUANTILES

    limits = _flags(
        "limits", *((f"{q}_{m}", k.SECONDS, f"limit on the {q} of {m.upper()}") for q in QUANTILES for m in METRICS)
    )
    return {**kept, **lengths, **load, **limits}


def _length(inputs: Inputs, name: str, usual: int) -> Length:
    """Return the distribution of tokens in or out."""
    from shardwise.plans import Length

    text, cv = str(inputs.get(name, usual)), float(inputs.get(f"{name.partition('_')[0]}_cv", 0.0))
    if name not in inputs.values:
        inputs.notes.append(f"{name} {usual}: not given")
    if match := _RANGE.fullmatch(text):
        low, high = int(match[1]), int(match[2])
        return Length(kind="uniform", mean=(low + high) / 2, low=low, high=high)
    return Length(kind="lognormal" if cv else "fixed", mean=int(text), cv=cv)


def _arrivals(inputs: Inputs) -> Arrivals:
    """Return when requests arrive; records a problem where nothing or two things say so."""
    from shardwise.plans import Arrivals

    said = [name for name in ("rate", "users", "trace") if name in inputs.values]
    word, _, cv = str(inputs.get("arrivals", "poisson")).partition(":")
    if word == "burst" and not said:
        return Arrivals(kind="burst")
    if len(said) != 1:
        rule = "is given beside " + " and ".join(said[1:]) if said else "is missing: nothing says when requests arrive"
        inputs.problems.add(
            said[0] if said else "rate", None, rule, "give one of --rate 50/s, --users 64, --trace FILE"
        )
        return Arrivals(kind="burst")
    if said == ["users"]:
        return Arrivals(kind="closed", users=inputs.values["users"], think_seconds=inputs.get("think", 0.0))
    if word not in ("poisson", "constant", "gamma", "burst"):
        inputs.problems.add("arrivals", word, "is not a way to arrive", "use poisson, constant, gamma:CV or burst")
    try:
        spread = float(cv or 1.0)
    except ValueError:
        inputs.problems.add("arrivals", f"{word}:{cv}", "must have a number behind the colon", "write gamma:4")
        spread = 1.0
    kind: Any = word if word in ("constant", "gamma", "burst") else "poisson"
    return Arrivals(kind=kind, rate=inputs.get("rate", 0.0), cv=spread)


def _workload(inputs: Inputs, limits: tuple[Limit, ...]) -> Workload:
    """Return the workload of the flags."""
    from shardwise.plans import Workload

    needed = max((limit.needed_requests for limit in limits), default=0)
    changes = {
        key: inputs.values[key] for key in ("prefix_tokens", "cached_share", "seed", "finite") if key in inputs.values
    }
    if "trace" in inputs.values and "rate" not in inputs.values and "users" not in inputs.values:
        from shardwise.formats.traces import read_trace

        found = read_trace(inputs.values["trace"], float(inputs.get("speed", 1.0)))
        return replace(found, count=min(inputs.get("requests", found.count), found.count), **changes)
    arrivals = _arrivals(inputs)
    usual = max(2000, needed, 10 * arrivals.users)
    return Workload(
        input_tokens=_length(inputs, "input_tokens", 512),
        output_tokens=_length(inputs, "output_tokens", 128),
        arrivals=arrivals,
        count=inputs.get("requests", usual),
        **changes,
    )


def ask(inputs: Inputs) -> ServeReport:
    """Return the report of a deployment under load; raises `InputError` with every problem."""
    from shardwise.plans import METRICS, QUANTILES, Limit, Serving
    from shardwise.serving import ServingOptions
    from shardwise.serving.load import LoadOptions, serve

    given = inputs.values
    limits = tuple(
        Limit(metric=m, quantile=q, seconds=given[f"{q}_{m}"])
        for q in QUANTILES
        for m in METRICS
        if f"{q}_{m}" in given
    )
    model, cluster = _case.load_the_model(inputs), _case.load_the_cluster(inputs)
    workload = None
    try:
        workload = _workload(inputs, limits)
    except InputError as error:
        inputs.merge(error)
    if model is None or cluster is None or workload is None or inputs.problems.items:
        raise InputError(dict.fromkeys(inputs.problems.items))
    plan = replace(_case.make_plan(inputs), micro_batch=1)
    _case.take_dtype(inputs, "weights")
    names = ("weights", "kv_cache", "compute", "memory_fraction", "max_batched_tokens", "max_sequences",
             "expert_imbalance", "adapter_rank", "adapters")  # fmt: skip
    job = Serving(**{key: given[key] for key in names if key in given}, misc_bytes=inputs.get("misc_memory", 0.0))
    engine = ServingOptions(engine=inputs.get("engine", "vllm"), efficiencies=_case.make_efficiencies(inputs))
    options = LoadOptions(limits=limits, router=inputs.get("router", "round-robin"), serving=engine)
    try:
        report = serve(model, cluster, plan, workload, job, options)
    except InputError as error:
        inputs.merge(error, dtype="weights")
        raise InputError(dict.fromkeys(inputs.problems.items)) from None
    inputs.problems.raise_if_any()
    return replace(report, assumptions=tuple(dict.fromkeys((*inputs.notes, *report.assumptions))))


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise serve`."""
    report = ask(inputs)
    plan = report.base.plan
    fixed = {"tp": plan.tp, "pp": plan.pp, "dp": plan.dp, "requests": report.workload.count}

    def page() -> Page:
        from shardwise.answers._serve_view import serve_page

        return serve_page(report, command_words("serve", {**inputs.values, **fixed}), width)

    return Answer(0 if report.meets else 1, report.to_dict, page)
