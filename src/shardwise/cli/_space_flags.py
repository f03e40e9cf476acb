"""Flags of a search: what each field of a plan may be, and what is wanted."""

from __future__ import annotations

import re
from functools import cache

from shardwise.cli import _kinds as k
from shardwise.cli._flags import Flag, _flags, plan_flags, train_flags
from shardwise.cli._kinds import Kind

_RANGE = re.compile(r"[1-9]\d{0,8}(\.\.[1-9]\d{0,8})?")
WHOLES = ("tp", "tp2", "cp", "pp", "vpp", "dp", "ep", "etp", "micro_batch", "panels")
WORDS = ("layout", "cp_kind", "schedule", "sharding", "recompute")
# Fields of a single plan that a search has no range of.
_GONE = ("stage_layers", "recompute_layers", "modules", "shard", "accumulation")


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


RANGE = Kind(_read_range, "N|A..B|N,N")


@cache
def plan_search_flags() -> dict[str, Flag]:
    """Return every flag of a search of training plans."""
    plan = plan_flags()
    kept = {key: flag for key, flag in train_flags().items() if key not in _GONE}
    ranges = {key: Flag(key, RANGE, f"{plan[key].help}: the values to try", "space") for key in WHOLES}
    words = {key: Flag(key, k.WORDS, f"{plan[key].help}: the choices to try", "space") for key in WORDS}
    wanted = _flags(
        "search",
        ("objective", k.choice("step", "throughput", "cost", "memory", "devices"), "what the best plan has least of"),
        ("top", k.whole(1, 1000), "plans to show; left out, ten"),
        ("at_most", k.SWITCH, "try every smaller number of devices too"),
        ("prune", k.SWITCH, "leave out the time of what does not fit; --no-prune evaluates all"),
        ("workers", k.whole(1, 1024), "processes; left out, one for each core"),
    )
    return {**kept, **ranges, **words, **wanted}
