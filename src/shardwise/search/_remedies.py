"""For every law and limit of a search of training plans, the single change that helps with the least loss.

Of all plans that fell, those one change away from the best plans are looked at: changed back, such a plan is one of the
best, so no other single change of a fallen plan loses less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardwise.errors import Problem
from shardwise.search._empty import empty_rejections, why_empty
from shardwise.search._engine import Here
from shardwise.search._limits import TRAIN_LIMITS, Wish, bounds_of
from shardwise.search._near import broken_law, neighbours, report_on
from shardwise.search._rank import OBJECTIVES
from shardwise.search._remedy import Remedy, loss_of, missed
from shardwise.search._search import TOO_LARGE, Found, Rejection, Work, searched
from shardwise.training import TrainReport

_BASES = 4
_FAR = "none of them is one change away from the best"
# The objective whose best plan comes nearest to a limit.
_NEAREST = {"max_step_seconds": "step", "max_run_seconds": "days", "max_usd": "cost", "min_free_bytes": "headroom"}


def value_of(found: Found, report: TrainReport) -> float:
    """Return the objective of a plan as a search ranks it, less being better."""
    seconds = report.step_seconds / report.goodput
    return float(OBJECTIVES[found.wish.objective](seconds, report.device_bytes, report.plan.num_devices))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fallen:
    """A plan that fell to a law or a limit, one field away from one of the best plans: by what and by how much."""

    name: str
    field: str
    base: TrainReport
    value: object
    problem: Problem | None = None
    report: TrainReport | None = None
    miss: float = 0.0


@dataclass(frozen=True)
class Remedies:
    """What would help the plans that fell in a search; each answer is worked out when it is asked for."""

    found: Found

    @cached_property
    def nearest(self) -> TrainReport | None:
        """The plan that is nearest to doing: under limits the best by the first that plans fell to, else by memory."""
        broken = next((name for name in TRAIN_LIMITS if self.found.tally.fallen[name]), "")
        if not broken or self.found.best or self.found.covered < 1:
            return self.found.nearest
        without: dict[str, Any] = dict.fromkeys(TRAIN_LIMITS, 0.0)
        wish = replace(self.found.wish, objective=_NEAREST[broken], top=1, **without)
        freed = searched(Work(self.found.rows, wish), Here())
        return freed.best[0] if freed.best else None

    @cached_property
    def _fallen(self) -> list[Fallen]:
        """Plans beside the best that fell; laws beside the few best, memory and limits beside the best one."""
        rows = self.found.rows
        laws, seen = rows.laws, list[Fallen]()
        for place, base in enumerate(self.found.best[:_BASES]):
            for field, plan in neighbours(rows, base.plan):
                value = getattr(plan, field)
                broken = broken_law(laws, plan)
                if broken is not None:
                    seen.append(Fallen(name=broken[0], field=field, base=base, value=value, problem=broken[1]))
                elif place == 0:
                    seen += self._judged(field, base, report_on(rows, plan))
        return seen

    def _judged(self, field: str, base: TrainReport, report: TrainReport) -> Iterator[Fallen]:
        value, limit = getattr(report.plan, field), report.verdict.limit_bytes
        if not report.fits:
            miss = report.verdict.short_by_bytes / limit
            yield Fallen(name=TOO_LARGE, field=field, base=base, value=value, report=report, miss=miss)
            return
        for name, ratio in self._ratios(report).items():
            if ratio > 1:
                yield Fallen(name=name, field=field, base=base, value=value, report=report, miss=ratio - 1)
                return

    def _ratios(self, report: TrainReport) -> dict[str, float]:
        wish = self.found.wish
        if not isinstance(wish, Wish):
            return {}
        bounds = bounds_of(self.found.rows, wish)
        return bounds.ratios(report.step_seconds, report.device_bytes, report.plan.num_devices)

    def of(self, name: str) -> Remedy | None:
        """Return what would help plans that fell to a law or a limit, None where none is beside the best plans."""
        near = [fallen for fallen in self._fallen if fallen.name == name]
        if not near:
            return self._alone(name)
        best = self.found.best[0]
        if name == TOO_LARGE:
            top = value_of(self.found, best)
            quicker = [f for f in near if f.report is not None and value_of(self.found, f.report) < top]
            one = min(quicker, key=lambda f: f.miss) if quicker else min(near, key=lambda f: f.miss)
        else:
            one = min(near, key=lambda f: (value_of(self.found, f.base), f.miss))
        return Remedy(
            why=self._why(one),
            field=one.field,
            value=getattr(one.base.plan, one.field),
            loss=loss_of(self.found.wish.objective, value_of(self.found, one.base), value_of(self.found, best)),
            best=one.base is best,
            objective=self.found.wish.objective,
        )

    def _alone(self, name: str) -> Remedy | None:
        """Return by how much the nearest plan misses a limit that none keeps."""
        miss = self._ratios(self.nearest).get(name, 0.0) - 1 if self.nearest is not None else 0.0
        return Remedy(why=f"the nearest {missed(miss)}") if miss > 0 and not self.found.best else None

    def _why(self, one: Fallen) -> str:
        if one.problem is not None:
            return str(one.problem)
        said = f"{one.field.replace('_', ' ')} {str(one.value).lower()}"
        if one.name != TOO_LARGE or one.report is None:
            return f"{said} {missed(one.miss)}"
        gain = one.base.step_seconds / one.report.step_seconds - 1
        pace = (
            f"{gain:.1%} quicker" if gain >= 0 else f"{one.report.step_seconds / one.base.step_seconds - 1:.1%} slower"
        )
        return f"{said} is {one.miss:.1%} short of memory, and would be {pace}"

    @cached_property
    def rejected(self) -> tuple[Rejection, ...]:
        """The laws and limits in the order in which they are asked, with how many plans fell to each and a remedy."""
        found = list(self.found.rejected)
        for name, title in TRAIN_LIMITS.items():
            count = self.found.tally.fallen[name]
            found += [Rejection(name=name, title=title, count=count, remedy=_FAR)] if count else []
        if not self.found.num_plans:
            return empty_rejections(why_empty(self.found.rows))
        if not self.found.best and any(self.found.tally.fallen[name] for name in TRAIN_LIMITS):
            # What fits does not keep the limits: more memory alone would not help.
            found = [replace(row, remedy="") if row.name == TOO_LARGE else row for row in found]
        return tuple(replace(row, remedy=str(self.of(row.name) or row.remedy)) for row in found)
