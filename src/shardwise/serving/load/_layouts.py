"""Some of the layouts of a closed form, and those that are asked apart: formulas work on rows alone."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from shardwise.arrays import np
from shardwise.records import replace
from shardwise.serving.load._batch_times import BatchTimes
from shardwise.serving.load._batches import Batches
from shardwise.serving.load._lockstep import rows_of

if TYPE_CHECKING:
    from shardwise.serving.load._steady import Replicas

# What is known of all layouts once it is asked, by row.
_KNOWN = ("lasting_seconds", "_seconds", "full_seconds", "carried_seconds", "_weights")


def some_of(form: Replicas, at: Any) -> Replicas:
    """Return the closed form of some layouts, whose rows are given in their order, with what is known of all."""
    several, whole = (form.batches.many[:, 0] > 1)[at], form.parts
    parts = []
    for (rows, part), kind in zip(whole, (True, False), strict=True) if len(whole) > 1 else ():
        if len(here := np.flatnonzero(several == kind)):
            parts.append((here, _rows(part, np.searchsorted(rows, at[here]))))
    some = parts[0][1] if len(parts) == 1 else _rows(form, at)
    if len(parts) > 1:
        vars(some)["parts"] = tuple(parts)
    vars(some).update((name, np.take(getattr(form, name), at, axis=0)) for name in _KNOWN)
    if form.highest is not None and some.prices.highest is not None:
        highest = replace(some, prices=some.prices.highest)
        vars(highest)["lasting_seconds"] = np.take(form.highest.lasting_seconds, at, axis=0)
        vars(some).update(full_share=form.full_share[at], highest=highest)
    return some


def parts_of(form: Replicas) -> tuple[tuple[Any, Replicas], ...]:
    """Return the rows of one batch and those of several, apart: what is asked of the one is not of the other."""
    several = form.batches.many[:, 0] > 1
    if several.all() or not several.any():
        return ((slice(None), form),)
    rows = tuple(np.flatnonzero(some) for some in (several, ~several))
    return tuple((at, _rows(form, at)) for at in rows)


def _rows(form: Replicas, at: Any) -> Replicas:
    return replace(
        form, prices=rows_of(form.prices, at), cache_tokens=form.cache_tokens[at],
        batches=Batches(groups=form.batches.groups[at], lanes=form.batches.lanes[at]),
    )  # fmt: skip


def merged(parts: list[tuple[Any, BatchTimes[Any]]], many: int) -> BatchTimes[Any]:
    """Return the paces of so many layouts from those of parts, each with its rows."""
    if len(parts) == 1:
        return parts[0][1]
    whole = {}
    for field in fields(BatchTimes):
        some = [(at, getattr(times, field.name)) for at, times in parts]
        whole[field.name] = np.empty((many, max(values.shape[-1] for _, values in some)))
        for at, values in some:
            whole[field.name][at] = values
    return BatchTimes(**whole)
