"""A plan of a space as a key of whole numbers, which breaks ties, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from shardwise.plans import CONTEXT_KINDS, LAYOUTS, Plan
from shardwise.search._columns import Columns
from shardwise.search._laws import staged
from shardwise.search._rows import Rows

# Fields in the order in which they break ties; words count by their place in the space.
Key: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, order=True, slots=True)
class Entry:
    """A plan in a ranking: what it is ranked by, seconds of a step, bytes on a device, and the key of its fields."""

    value: float
    step_seconds: float
    device_bytes: float
    key: Key


def key_of(values: Columns, rows: Rows, composed: tuple[str, int, str], mode: int, place: int) -> Key:
    """Return the fields of a plan as numbers, in the order that breaks ties; `composed` is schedule, vpp, sharding."""
    s = rows.space
    schedule, vpp, sharding = composed
    first = ("devices", "layout", "tp", "tp2", "cp", "pp")
    rest = ("dp", "ep", "etp", "micro_batch", "panels", "sequence_parallel", "cp_kind")
    words = (s.schedule.index(schedule), s.sharding.index(sharding), mode)
    where = (*rows.places.fast[place].tolist(), int(rows.places.order[place]))
    return (*(int(values[n]) for n in first), vpp, *(int(values[n]) for n in rest), *words, *where)


def plan_of(key: Key, rows: Rows) -> Plan:
    """Return the plan of a key."""
    names = ("tp", "tp2", "cp", "pp", "vpp", "dp", "ep", "etp", "micro_batch", "panels")
    _, layout, *sizes, sequence, kind, schedule, sharding, mode = key[:17]
    *fast, order = key[17:]
    s = rows.space
    words: dict[str, Any] = {
        **dict(zip(names, sizes, strict=True)),
        "layout": LAYOUTS[layout],
        "cp_kind": CONTEXT_KINDS[kind],
        "schedule": s.schedule[schedule],
        "sharding": s.sharding[sharding],
        "recompute": s.recompute[mode],
        "order": s.placed_orders[order],
        "fast": tuple(fast) if fast[0] else (),
    }
    plan = Plan(sequence_parallel=bool(sequence), **words)
    return staged(rows.case, plan)
