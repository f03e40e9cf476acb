"""Blocks of many plans: evaluated once for every distinct set of what they read, stacked over the recompute modes.

The last axis of every array is distinct keys, an axis before it the recompute modes where they differ. `rows` then
gathers the keys into rows of plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from shardwise.plans import CONTEXT_KINDS, LAYOUTS
from shardwise.plans._placement import dense_spans, with_groups
from shardwise.search._laws import Columns
from shardwise.search._rows import COLUMNS, DEGREES, case_for
from shardwise.search._space import Space
from shardwise.training import Case, Sizes
from shardwise.training._blocks import Elements, Folded
from shardwise.training._evaluate import machine_of, send_of, tables_of
from shardwise.training._memory import Parts

_BLOCK_AXES = ("tp", "tp2", "cp", "pp", "ep", "etp")
_BLOCK_READS = ("layout", "sequence_parallel", "cp_kind", "tp", "tp2", "cp", "ep", "etp", "panels", "micro_batch")
_UNREAD = ("flops", "model_flops", "hidden")
_ONLY_PAIRED = ("compute", "exposed", "forward_exposed")
Span = dict[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Gathered:
    """The blocks of rows of plans, and the seconds of the message between their stages."""

    parts: Parts[Any]
    send: Any


def spans_of(columns: Columns, space: Space, domains: Sequence[int]) -> Span:
    """Return the spans of every group of the rows, as whole numbers."""
    dense: dict[str, tuple[Any, ...]] = {a: tuple(np.zeros_like(columns["tp"]) for _ in domains) for a in DEGREES}
    for index in np.unique(columns["order"]).tolist():
        here = columns["order"] == index
        placed = dense_spans({a: columns[a][here] for a in DEGREES}, space.orders[index], domains, COLUMNS)
        for axis, tiers in placed.items():
            for into, tier in zip(dense[axis], tiers, strict=True):
                into[here] = tier
    sizes = {"dp": columns["dp"], "shard": columns["dp"], "ep": columns["ep"], "etp": columns["etp"]}
    return with_groups(dense, sizes, COLUMNS)


def sizes_of_rows(columns: Columns, shared: Span, case: Case) -> Sizes[Any]:
    """Return the sizes of rows of one pipeline as float64 columns; stages and chunks are those of the case's plan."""

    def column(values: Any) -> Any:
        return np.asarray(values, np.float64)

    names = ("tp", "tp2", "cp", "dp", "ep", "etp", "panels", "micro_batch")
    values = {name: column(columns[name]) for name in names}
    micro = case.job.global_batch / (values["dp"] * values["micro_batch"])
    return Sizes(
        pp=case.plan.pp,
        vpp=case.plan.vpp,
        shard=values["dp"],
        num_micro=micro,
        spans={axis: tuple(map(column, tiers)) for axis, tiers in shared.items()},
        **values,
    )


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a tree of records, tuples and dicts with every number changed."""
    if isinstance(value, (Parts, Folded, Elements)):
        return replace(value, **{f.name: mapped(getattr(value, f.name), change) for f in fields(value)})
    if isinstance(value, tuple):
        return tuple(mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return value if isinstance(value, bool) else change(value)


def joined(values: Sequence[Any], join: Callable[[Sequence[Any]], Any]) -> Any:
    """Return trees of one shape as a single one, numbers in the same place joined; an absent key counts as zero."""
    first = values[0]
    if isinstance(first, (Parts, Folded, Elements)):
        names = [f.name for f in fields(first)]
        return replace(first, **{n: joined([getattr(v, n) for v in values], join) for n in names})
    if isinstance(first, tuple):
        return tuple(joined(items, join) for items in zip(*values, strict=True))
    if isinstance(first, dict):
        return {key: joined([v.get(key, 0.0) for v in values], join) for key in {k: 0 for v in values for k in v}}
    return first if isinstance(first, bool) else join(values)


def _trimmed(parts: Parts[Any], paired: bool) -> Parts[Any]:
    """Return the parts without what composition does not read: messages hide in each other under DualPipe alone."""

    def trim(folded: Folded[Any]) -> Folded[Any]:
        gone: dict[str, Any] = {n: {} if n == "hidden" else 0.0 for n in _UNREAD}
        if not paired:
            return replace(folded, **gone, compute=0.0, exposed={}, forward_exposed={})
        only: Any = {
            n: {k: v for k, v in getattr(folded, n).items() if k == "ep"} for n in ("exposed", "forward_exposed")
        }
        return replace(folded, **gone, **only)

    ends: dict[str, Any] = {n: trim(getattr(parts, n)) for n in ("embedding", "head", "loss")}
    return replace(parts, kinds=tuple(map(trim, parts.kinds)), **ends)


def _stacked(values: Sequence[Any]) -> Any:
    """Return values of the recompute modes: one where they agree, stacked on a new first axis where they do not."""
    first = values[0]
    if all(v is first or np.array_equal(v, first) for v in values[1:]):
        return first
    return np.stack(np.broadcast_arrays(*values))


def _side_by_side(sizes: Sequence[int]) -> Callable[[Sequence[Any]], Any]:
    def join(values: Sequence[Any]) -> Any:
        deep = max((v.shape[0] for v in values if np.ndim(v) == 2), default=0)
        shapes = [(deep, n) if deep else (n,) for n in sizes]
        return np.concatenate([np.broadcast_to(v, s) for v, s in zip(values, shapes, strict=True)], axis=-1)

    return join


@dataclass(frozen=True, slots=True)
class TableSet:
    """The blocks of distinct keys, and the key of each row."""

    parts: Parts[Any]
    send: Any
    key: Any

    def rows(self, chosen: Any) -> Gathered:
        """Return the blocks of some rows."""
        at = self.key[chosen]

        def take(value: Any) -> Any:
            return value.take(at, axis=-1) if isinstance(value, np.ndarray) else value

        return Gathered(mapped(self.parts, take), take(self.send))


def tabulate(case: Case, space: Space, columns: Columns, shared: Span) -> TableSet:
    """Return the blocks of rows of one pipeline under every recompute mode of a space."""
    reads = [columns[name] for name in _BLOCK_READS]
    reads += [tier for axis in _BLOCK_AXES for tier in shared[axis][:-1]]
    code = np.zeros(len(columns["tp"]), np.int64)
    for values in reads:
        distinct, at = np.unique(values, return_inverse=True)
        code = code * len(distinct) + at
    _, first, key = np.unique(code, return_index=True, return_inverse=True)
    variants = [("layout", LAYOUTS), ("sequence_parallel", (False, True)), ("cp_kind", CONTEXT_KINDS)]
    which = [columns[name][first].astype(np.int64) for name, _ in variants]
    group = (which[0] * 2 + which[1]) * len(CONTEXT_KINDS) + which[2]
    by_group = np.argsort(group, kind="stable")
    place = np.empty_like(by_group)
    place[by_group] = np.arange(len(by_group))
    found, sends, sizes = [], [], []
    for g in np.unique(group).tolist():
        here = first[by_group[group[by_group] == g]]
        one = {name: words[int(columns[name][here[0]])] for name, words in variants}
        parts, send = _variant(case_for(case, **one), space, columns, (shared, here))
        found.append(parts)
        sends.append(send)
        sizes.append(len(here))
    join = _side_by_side(sizes)
    return TableSet(joined(found, join), join(sends), place[key])


def _variant(case: Case, space: Space, columns: Columns, picked: tuple[Span, Any]) -> tuple[Parts[Any], Any]:
    """Return the blocks and the boundary message of some rows that share all choices of words."""
    shared, here = picked
    own = {axis: tuple(t[here] for t in tiers) for axis, tiers in shared.items()}
    z = sizes_of_rows({c: v[here] for c, v in columns.items()}, own, case)
    machine = machine_of(case, z.spans)
    paired = "dualpipe" in space.schedule
    modes, send = [], None
    for mode in space.recompute:
        tables = tables_of(case_for(case, recompute=mode), machine, z)
        modes.append(_trimmed(tables.parts, paired))
        send = send_of(case, machine, z, tables.boundary_bytes)
    return joined(modes, _stacked), send
