"""Flags of what is asked beyond one plan: what a search may try and what is wanted of it, and load on a deployment."""

from __future__ import annotations

import re
from functools import cache

from shardwise.answers import _converters as k
from shardwise.answers._converters import Converter
from shardwise.answers._flags import Flag, flag_table, infer_flags, plan_flags, risk_flags, train_flags
from shardwise.answers._value_lists import AT_MOST, UNIONS, several
from shardwise.plans.fields import DEPLOYED, PLAN, SERVING, TRAINING, keys
from shardwise.plans.partition import SHIFTS
from shardwise.records import replace
from shardwise.units import parse_count, parse_seconds, parse_share

_RANGE = re.compile(r"[1-9]\d{0,8}(\.\.[1-9]\d{0,8})?")
COUNTS = ("recompute_layers",)
WHOLES = tuple(key for key in keys(PLAN, "whole", searched="values") if key not in COUNTS)
FAST = ("fast_tp", "fast_tp2", "fast_cp", "fast_dp", "fast_pp")
WORDS = (*keys(PLAN, "choice", searched="values"), *keys(PLAN, "wholes", searched="values"))
LISTS = keys(PLAN, "words", searched="values")
JOBS = keys(TRAINING, searched="values")
# What a wish calls a limit -> its flag.
LIMITS = {
    "max_step_seconds": "max_step",
    "max_run_seconds": "max_time",
    "max_usd": "max_cost",
    "min_free_bytes": "min_free",
}
# Fields of a single plan that a search has no range of.
_GONE = keys((*PLAN, *TRAINING), searched="no")
_STAGES = f"layers of the stages to try: {', '.join(SHIFTS)}, which take a layer off the first or last stage"


def _read_range(value: object, field: str) -> str:
    """Return the text of a set of whole numbers, such as 1..8 or 1,2,4.

    >>> _read_range("1..4,16", "tp"), _read_range(8, "tp")
    ('1..4,16', '8')
    """
    text = str(value).replace(" ", "")
    pairs = [tuple(map(int, p.split(".."))) for p in text.split(",") if _RANGE.fullmatch(p)]
    if isinstance(value, bool) or len(pairs) < len(text.split(",")) or any(p[0] > p[-1] for p in pairs):
        raise k.fail(field, value, "must be whole numbers and ranges of them", "write for example 1..8 or 1,2,4")
    return text


def _read_doubling(value: object, field: str) -> tuple[int, int]:
    """Return the least and the most of counts that double.

    >>> _read_doubling("128..1024", "scaling")
    (128, 1024)
    """
    match = re.fullmatch(r"([1-9]\d{0,8})\.\.([1-9]\d{0,8})", str(value).replace(" ", ""))
    if match is None or int(match[1]) > int(match[2]):
        raise k.fail(field, value, "must be a range of numbers of devices", "write for example 128..16384")
    return int(match[1]), int(match[2])


def _time(example: str) -> Converter:
    return k.number(parse_seconds, "TIME", k.Range(above=True, most=1e10, example=example))


RANGE = Converter(_read_range, "N|A..B|N,N")


@cache
def plan_search_flags() -> dict[str, Flag]:
    """Return every flag of a search of training plans."""
    from shardwise.search import OBJECTIVES

    plan = plan_flags()
    kept = {key: flag for key, flag in train_flags().items() if key not in _GONE}
    kinds = {key: several(plan[key].kind) if key in COUNTS else RANGE for key in (*WHOLES, *COUNTS)}
    ranges = {key: Flag(key, kind, f"{plan[key].help}: the values to try", "space") for key, kind in kinds.items()}
    fast = {key: Flag(key, RANGE, f"ranks of {key[5:]} that share the fastest domain: the values to try", "space")
            for key in FAST}  # fmt: skip
    words = {key: Flag(key, k.WORDS, f"{plan[key].help}: the choices to try", "space") for key in WORDS}
    words["stage_layers"] = replace(words["stage_layers"], help=_STAGES)
    words |= {key: Flag(key, UNIONS, f"{plan[key].help}: the choices to try", "space") for key in LISTS}
    jobs = {key: replace(kept[key], kind=several(kept[key].kind), help=f"{kept[key].help}; several are all tried")
            for key in JOBS}  # fmt: skip
    where = {"on": replace(kept["on"], help=f"{kept['on'].help}; several, as h100,b200, are all tried")}
    wanted = flag_table(
        "search",
        ("objective", k.choice(*OBJECTIVES), "objective to minimise, or to maximise (throughput, headroom)"),
        ("top", k.whole(1, 1000), "rows to show, each for all plans that tie; left out, ten"),
        ("at_most", AT_MOST, "try every smaller number of devices too, or every one up to N"),
        ("prune", k.SWITCH, "skip the time of plans that do not fit or cannot win; --no-prune evaluates all"),
        ("scaling", Converter(_read_doubling, "A..B"), "search each of so many devices, doubling, for the same job"),
        ("save_best", k.FILE, "write the best plan as a case of train to a TOML or JSON file"),
        ("explore", k.SWITCH, "also try layouts that the framework cannot launch, each marked"),
        ("workers", k.whole(1, 1024), "processes at most; never more than cores or parts of the search"),
    )
    return {**kept, **where, **jobs, **ranges, **fast, **words, **train_limits(), **wanted, **risk_flags()}


@cache
def train_limits() -> dict[str, Flag]:
    """Return the limits that a training plan may have to keep."""
    above = k.Range(above=True, example="1e6")
    return flag_table(
        "limits",
        ("max_step", _time("2s"), "longest step"),
        ("max_time", _time("30d"), "longest run of the tokens, such as 30d"),
        ("max_cost", k.number(parse_count, "USD", above), "highest cost of the run of --tokens"),
        ("min_free", k.BYTES, "memory that stays free on the fullest device, such as 5GiB"),
    )


SERVE_WHOLES = (*DEPLOYED, *keys(SERVING, "whole", searched="values"))
SERVE_WORDS = keys(SERVING, "text", searched="values")
# What a wish calls a limit -> its flag.
SERVE_LIMITS = {
    "max_ttft_seconds": "max_ttft",
    "max_tpot_seconds": "max_tpot",
    "max_latency_seconds": "max_latency",
    "max_usd": "max_cost",
    "min_tokens_per_second": "min_rate",
}
_ABOVE = k.Range(above=True, example="2.5")
_TIME = k.number(parse_seconds, "TIME", k.Range(above=True, most=1e10, example='"50ms"'))
_SERVE_GONE = ("stage_layers", *keys(SERVING, searched="no"))


@cache
def serve_search_flags() -> dict[str, Flag]:
    """Return every flag of a search of deployments."""
    from shardwise.search import SERVING_OBJECTIVES

    one = infer_flags()
    kept = {key: flag for key, flag in one.items() if key not in _SERVE_GONE}
    ranges = {key: Flag(key, RANGE, f"{one[key].help}: the values to try", "space") for key in SERVE_WHOLES}
    words = {key: Flag(key, k.WORDS, f"{one[key].help}: the choices to try", "space") for key in SERVE_WORDS}
    step = flag_table("space", ("batch_step", k.WHOLE, "try every multiple of it in the range of batches too"))
    wanted = flag_table(
        "search",
        (
            "objective",
            k.choice(*SERVING_OBJECTIVES),
            "what the best has most or least of; left out, tokens a second and device",
        ),
        ("top", k.whole(1, 1000), "deployments to show, each with its best batch; left out, ten"),
        ("at_most", AT_MOST, "try every smaller number of devices too, or every one up to N"),
        ("save_best", k.FILE, "write the best plan as a case of infer to a TOML or JSON file"),
    )
    return {**kept, **ranges, **words, **step, **serving_limits(), **wanted, **risk_flags()}


@cache
def serving_limits() -> dict[str, Flag]:
    """Return the limits that a deployment may have to keep."""
    return flag_table(
        "limits",
        ("max_ttft", _TIME, "longest time to first token of a request, while the batch stays full"),
        ("max_tpot", _TIME, "longest time per output token"),
        ("max_latency", _TIME, "longest time of a request"),
        ("max_cost", k.number(parse_count, "USD", _ABOVE), "highest cost of a million output tokens"),
        ("min_rate", k.number(parse_count, "N", _ABOVE), "least output tokens a second of all devices"),
    )


TOKENS_RANGE = re.compile(r"\s*(\d{1,9})\s*\.\.\s*(\d{1,9})\s*", re.ASCII)
# The words of load generators: requests or queries a second.
_SECONDLY = re.compile(r"(?<=[\d\s])[rq]ps\s*$", re.IGNORECASE)
_REQUESTS = re.compile(r"(?<=[\d\s])req(?:uest)?s?\s*(?=/)", re.IGNORECASE)
_PER = {"s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}
_LOAD_GONE = ("batch", "prefix_tokens", "same_prompts", "use_kv_cache", "shard_weights")


def parse_rate(text: str, field: str) -> float:
    """Return requests a second of a text such as 50/s, 50 req/s, 50rps, 3000/min or 50.

    >>> parse_rate("3000/min", "rate"), parse_rate("50", "rate"), parse_rate("50 QPS", "rate")
    (50.0, 50.0, 50.0)
    """
    spelled = _SECONDLY.sub("/s", _REQUESTS.sub("", text))
    number, slash, unit = spelled.partition("/")
    if (slash and unit.strip() not in _PER) or re.search(r"\d\s*[a-z]{2,}", number, re.IGNORECASE):
        raise k.fail(field, text, "is not requests a second, minute or hour", "write for example 50/s")
    return parse_count(number.strip(), field) / _PER.get(unit.strip(), 1.0)


def _read_stages(value: object, field: str) -> str:
    """Return rates with their times as they are written.

    >>> _read_stages("5/s:10min, 40/s:90s", "stages")
    '5/s:10min,40/s:90s'
    """
    text = str(value).replace(" ", "")
    stages_of(text, field)
    return text


def stages_of(text: str, field: str = "stages") -> list[tuple[float, float]]:
    """Return requests a second and seconds of each stage of a text.

    >>> stages_of("5/s:10min,40/s:90s")
    [(5.0, 600.0), (40.0, 90.0)]
    """
    stages = []
    for part in text.split(","):
        rate, colon, time = part.partition(":")
        if not colon:
            raise k.fail(field, text, "must be rates with their times", "write for example 5/s:10min,40/s:90s")
        stages.append((parse_rate(rate, field), parse_seconds(time, field)))
    if not all(0 < rate <= 1e6 and seconds > 0 for rate, seconds in stages) or sum(a * b for a, b in stages) > 1e6:
        rule = "must have rates and times above 0, and at most a million requests in all"
        raise k.fail(field, text, rule, "write for example 5/s:10min,40/s:90s")
    return stages


def _read_tokens(value: object, field: str) -> str:
    """Return a number of tokens, or a range of them, as it is written."""
    if isinstance(value, str) and TOKENS_RANGE.fullmatch(value):
        return value.replace(" ", "")
    return str(k.WHOLE.read(value, field))


_TOKENS = k.Converter(_read_tokens, "N|A..B")
_RATE = k.number(parse_rate, "RATE", k.Range(above=True, most=1e6, example='"50/s"'))
_SPAN = k.number(parse_seconds, "TIME", k.Range(above=True, most=1e10, example='"1h"'))
_CV = k.number(parse_count, "X", k.Range(least=0, most=10, example="0.8"))
_SHARE = k.number(parse_share, "SHARE", k.Range(least=0, most=1, example="0.5"))


_MEASURED = (
    "measured requests, drawn beside the predicted ones: vLLM's --save-detailed result, JSON of GuideLLM, "
    "inference-perf, genai-bench or AIPerf, or a CSV of ttft_seconds, request_seconds, output_tokens"
)
AGAINST = flag_table("output", ("against", k.FILE, _MEASURED))

# The flags of a deployment under load beside those of `infer`, by group.
_OF_LOAD = {
    **flag_table(
        "job",
        ("input_tokens", _TOKENS, "prompt tokens: their mean, or a range A..B"),
        ("output_tokens", _TOKENS, "generated tokens of a request: their mean, or a range A..B"),
        ("input_cv", _CV, "coefficient of variation of prompt lengths (lognormal)"),
        ("output_cv", _CV, "coefficient of variation of output lengths (lognormal)"),
        ("prefix_tokens", k.whole(0), "shared prefix of all prompts in tokens, such as a system prompt"),
        ("cached_share", _SHARE, "share of requests whose whole prompt is cached, as where a benchmark repeats them"),
    ),
    **flag_table(
        "load",
        ("rate", _RATE, "request rate: 50/s, 3000/min"),
        ("arrivals", k.TEXT, "poisson (left out), constant, gamma:CV of the gaps, or burst: all at once"),
        ("users", k.WHOLE, "concurrent users in a closed loop"),
        (
            "think",
            k.SECONDS,
            "mean think time of a user before the next request (exponential); left out, what a client takes",
        ),
        (
            "trace",
            k.FILE,
            "a trace: CSV of Azure or BurstGPT, JSON lines of Mooncake (hash blocks: what the prefix cache hits),"
            " requests of vLLM's benchmark, GuideLLM, inference-perf, genai-bench or AIPerf, ShareGPT's texts beside"
            " --rate, or arrival_seconds,input_tokens,...",
        ),
        ("last", _SPAN, "the last part of the trace alone, such as 1h"),
        ("stages", Converter(_read_stages, "RATE:TIME,..."), "rates one after another: 5/s:10min,40/s:2min,5/s:10min"),
        ("speed", k.SHARE_OF, "speed-up of the trace's arrivals"),
        ("classes", k.FILE, "TOML of [[class]]: name, share, lengths and limits of each kind of requests"),
        (
            "requests",
            k.whole(1, 1_000_000),
            "requests to simulate; left out, 2,000, ten times those there at once, or what percentiles need",
        ),
        ("finite", k.SWITCH, "just these requests, as a benchmark sends them; latencies even where the queue grows"),
        ("seed", k.whole(0), "seed of lengths and arrivals"),
        ("router", k.choice("round-robin", "random", "least-loaded", "prefix"), "routing of requests to replicas"),
    ),
    **flag_table(
        "pools",
        (
            "prefill_workers",
            k.whole(0, 10_000),
            "prefill workers, which send their KV cache to the decode workers (disaggregated serving)",
        ),
        ("prefill_tp", k.WHOLE, "tensor-parallel degree of a prefill worker; left out, as the others"),
        ("prefill_pp", k.WHOLE, "pipeline stages of a prefill worker; left out, as the others"),
        ("prefill_ep", k.WHOLE, "expert-parallel degree of a prefill worker; left out, as the others"),
    ),
    **flag_table(
        "autoscaling",
        (
            "autoscale",
            k.TEXT,
            "start and stop replicas by METRIC:TARGET, the mean of each: running:32, requests:32 (running or waiting), "
            "queue:4, cache:0.8 or load:0.7 of its capacity",
        ),
        ("startup_time", k.SECONDS, "time from the scaling decision to a ready replica"),
        ("min_replicas", k.WHOLE, "fewest replicas; left out, one"),
        ("scale_interval", _SPAN, "interval between looks at the metric; left out, 15s"),
        ("scale_down_after", k.SECONDS, "stabilisation window before a replica is stopped; left out, 300s"),
    ),
}


@cache
def serve_flags() -> dict[str, Flag]:
    """Return every flag of a deployment under load."""
    from shardwise.plans import METRICS, QUANTILES

    kept = {key: flag for key, flag in infer_flags().items() if key not in _LOAD_GONE}
    limits = flag_table(
        "limits",
        *((f"{q}_{m}", k.SECONDS, f"limit on the {q} of {m.upper()}") for q in QUANTILES for m in METRICS),
        ("risk", k.CHANCE, "chance to carry the load within every limit, by published runs, such as 80%"),
    )
    return {**kept, **_OF_LOAD, **limits}


# How many replicas is found.
LOAD_WHOLES = tuple(name for name in DEPLOYED if name != "dp")
# Of a deployment under load, what a search finds itself or does not take.
_FOUND = (
    "prefill_workers", "prefill_tp", "prefill_pp", "prefill_ep", "dp", *_SERVE_GONE, "trace", "speed",
    "finite", "order", "last", "stages", "autoscale", "startup_time", "min_replicas", "scale_interval",
    "scale_down_after",
)  # fmt: skip


@cache
def load_search_flags() -> dict[str, Flag]:
    """Return every flag of a search for a deployment under load."""
    one = serve_flags()
    kept = {key: flag for key, flag in one.items() if key not in _FOUND}
    ranges = {key: Flag(key, RANGE, f"{one[key].help}: the values to try", "space") for key in LOAD_WHOLES}
    words = {key: Flag(key, k.WORDS, f"{one[key].help}: the choices to try", "space") for key in SERVE_WORDS}
    batch = flag_table(
        "space",
        ("max_batched_tokens", RANGE, "tokens of a step to try; left out, the engine's own, 2,048 and 16,384"),
        ("max_sequences", RANGE, "sequences at once to try; left out, the engine's own, 64 and 256"),
    )
    wanted = flag_table(
        "search",
        ("objective", k.choice("devices", "cost", "ttft", "tpot", "e2e"), "objective to minimise"),
        (
            "pools",
            k.choice("aggregated", "disaggregated", "both"),
            "whether prompts have workers of their own; left out, aggregated: replicas do both",
        ),
        ("top", k.whole(1, 20), "deployments to confirm by simulation; left out, three"),
        ("save_best", k.FILE, "write the best deployment as a case of serve to a TOML or JSON file"),
    )
    return {**kept, **ranges, **words, **batch, **wanted}
