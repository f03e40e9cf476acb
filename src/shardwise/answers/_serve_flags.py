"""Flags of a search for a way to serve a model: what each choice may be, limits, and what is wanted."""

from __future__ import annotations

from functools import cache

from shardwise.answers import _kinds as k
from shardwise.answers._flags import Flag, _flags, infer_flags
from shardwise.answers._space_flags import RANGE
from shardwise.units import parse_count, parse_seconds

WHOLES = ("tp", "pp", "dp", "ep", "etp", "batch")
WORDS = ("engine", "weights", "kv_cache", "compute")
# What a wish calls a limit -> its flag.
LIMITS = {
    "max_ttft_seconds": "max_ttft",
    "max_tpot_seconds": "max_tpot",
    "max_latency_seconds": "max_latency",
    "max_usd": "max_cost",
    "min_tokens_per_second": "min_rate",
}
_ABOVE = k.Range(above=True, example="2.5")
_TIME = k.number(parse_seconds, "TIME", k.Range(above=True, most=1e10, example='"50ms"'))
_GONE = ("stage_layers",)


@cache
def serve_search_flags() -> dict[str, Flag]:
    """Return every flag of a search of deployments."""
    one = infer_flags()
    kept = {key: flag for key, flag in one.items() if key not in _GONE}
    ranges = {key: Flag(key, RANGE, f"{one[key].help}: the values to try", "space") for key in WHOLES}
    words = {key: Flag(key, k.WORDS, f"{one[key].help}: the choices to try", "space") for key in WORDS}
    step = _flags("space", ("batch_step", k.WHOLE, "try every multiple of it in the range of batches too"))
    limits = _flags(
        "limits",
        ("max_ttft", _TIME, "latest first tokens"),
        ("max_tpot", _TIME, "longest time between tokens"),
        ("max_latency", _TIME, "longest time of a request"),
        ("max_cost", k.number(parse_count, "USD", _ABOVE), "dearest million of output tokens"),
        ("min_rate", k.number(parse_count, "N", _ABOVE), "fewest output tokens a second of all devices together"),
    )
    objectives = k.choice("throughput", "cost", "ttft", "tpot", "latency", "devices")
    wanted = _flags(
        "search",
        ("objective", objectives, "what the best has most or least of; left out, tokens a second and device"),
        ("top", k.whole(1, 1000), "deployments to show, each with its best batch; left out, ten"),
        ("at_most", k.SWITCH, "try every smaller number of devices too"),
        ("save_best", k.FILE, "write the best plan as a case of infer to a TOML or JSON file"),
    )
    return {**kept, **ranges, **words, **step, **limits, **wanted}
