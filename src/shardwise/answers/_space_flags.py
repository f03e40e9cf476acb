"""Flags of a search: what each field of a plan may be, and what is wanted."""

from __future__ import annotations

import re
from functools import cache

from shardwise.answers import _kinds as k
from shardwise.answers._flags import Flag, _flags, plan_flags, risk_flags, train_flags
from shardwise.answers._kinds import Converter
from shardwise.plans.fields import PLAN, TRAINING, keys
from shardwise.units import parse_count, parse_seconds

_RANGE = re.compile(r"[1-9]\d{0,8}(\.\.[1-9]\d{0,8})?")
WHOLES = keys(PLAN, "whole", searched="values")
FAST = ("fast_tp", "fast_tp2", "fast_cp", "fast_dp", "fast_pp")
WORDS = keys(PLAN, "choice", searched="values")
# What a wish calls a limit -> its flag.
LIMITS = {
    "max_step_seconds": "max_step",
    "max_run_seconds": "max_time",
    "max_usd": "max_cost",
    "min_free_bytes": "min_free",
}
OBJECTIVES = ("step", "throughput", "cost", "days", "memory", "headroom", "devices")
# Fields of a single plan that a search has no range of.
_GONE = keys((*PLAN, *TRAINING), searched="no")


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
    found = re.fullmatch(r"([1-9]\d{0,8})\.\.([1-9]\d{0,8})", str(value).replace(" ", ""))
    if found is None or int(found[1]) > int(found[2]):
        raise k.fail(field, value, "must be a range of numbers of devices", "write for example 128..16384")
    return int(found[1]), int(found[2])


def _time(example: str) -> Converter:
    return k.number(parse_seconds, "TIME", k.Range(above=True, most=1e10, example=example))


RANGE = Converter(_read_range, "N|A..B|N,N")


@cache
def plan_search_flags() -> dict[str, Flag]:
    """Return every flag of a search of training plans."""
    plan = plan_flags()
    kept = {key: flag for key, flag in train_flags().items() if key not in _GONE}
    ranges = {key: Flag(key, RANGE, f"{plan[key].help}: the values to try", "space") for key in WHOLES}
    fast = {
        key: Flag(key, RANGE, f"ranks of {key[5:]} that share the fastest domain: the values to try", "space")
        for key in FAST
    }
    words = {key: Flag(key, k.WORDS, f"{plan[key].help}: the choices to try", "space") for key in WORDS}
    wanted = _flags(
        "search",
        ("objective", k.choice(*OBJECTIVES), "what the best plan has least of, or most"),
        ("top", k.whole(1, 1000), "plans to show; left out, ten"),
        ("at_most", k.SWITCH, "try every smaller number of devices too"),
        ("prune", k.SWITCH, "leave out the time of what does not fit; --no-prune evaluates all"),
        ("scaling", Converter(_read_doubling, "A..B"), "search each of so many devices, doubling, for the same job"),
        ("save_best", k.FILE, "write the best plan as a case of train to a TOML or JSON file"),
        ("explore", k.SWITCH, "try layouts too that the framework cannot launch, each marked so"),
        ("workers", k.whole(1, 1024), "most processes; never more than cores or parts of the search"),
    )
    above = k.Range(above=True, example="1e6")
    limits = _flags(
        "limits",
        ("max_step", _time("2s"), "longest step"),
        ("max_time", _time("30d"), "longest run of the tokens, such as 30d"),
        ("max_cost", k.number(parse_count, "USD", above), "dearest run of the tokens"),
        ("min_free", k.BYTES, "memory that stays free on the fullest device, such as 5GiB"),
    )
    return {**kept, **ranges, **fast, **words, **limits, **wanted, **risk_flags()}
