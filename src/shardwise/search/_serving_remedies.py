"""For every law and limit of a search for a deployment, the single change that helps with the least loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from shardwise.plans import Plan
from shardwise.records import dataclass
from shardwise.search._options import SERVING_LIMITS, SERVING_OBJECTIVES
from shardwise.search._result import Remedy, changed_field, loss_of, missed
from shardwise.search._serving_grid import FORMATS, MEMORY, ServingGrid
from shardwise.search._serving_space import WORDS, Layouts
from shardwise.search._serving_table import ServingTable
from shardwise.serving import Engine

_TRIED = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingRanking:
    """A table with the feasible rows, the best first, and which rows each limit rejects."""

    grid: ServingGrid
    table: ServingTable
    order: Any
    rejected: dict[str, Any]

    def loss(self, row: int) -> float:
        """Return by how much a row is worse than the best by the objective."""
        objective = self.grid.options.objective
        value = SERVING_OBJECTIVES[objective](self.table.take(np.array([row, self.order[0]])))
        return loss_of(objective, float(value[0]), float(value[1]))

    def miss(self, name: str) -> Any:
        """Return by how much every row breaks a limit, memory as a share of the device's."""
        if name == MEMORY:
            return self.table.short_at_risk_bytes / self.grid.cluster.device.usable_memory_bytes
        return next(limit for limit in SERVING_LIMITS if limit.field == name).ratio(self.table, self.grid.options) - 1

    def word(self, row: int, name: str) -> object:
        """Return a choice of a row: a field of its layout, its batch, or a word of its setup."""
        if name == "batch":
            return int(self.table.batch[row])
        if name in WORDS:
            word = self.grid.setups[int(self.table.setup[row])][0][WORDS.index(name)]
            return word.name if isinstance(word, Engine) else word
        return getattr(self.grid.plan(int(self.table.layout[row])), name)


def limit_remedy(ranking: ServingRanking, name: str) -> Remedy | None:
    """Return what helps a plan that breaks a limit: of plans one change from the best, the one that misses by least."""
    fell, miss = ranking.rejected[name], ranking.miss(name)
    if not fell.any():
        return None
    for row in ranking.order[:_TRIED].tolist():
        near = np.flatnonzero(fell & _near(ranking, row))
        for other in near[np.argsort(miss[near], kind="stable")].tolist():
            change = changed_field(list(_differences(ranking, other, row)))
            if change is not None:
                was = f"{change[0].replace('_', ' ')} {_text(ranking.word(other, change[0]))}"
                why = f"{was} {_missed(name, float(miss[other]))}"
                return _remedy(ranking, row, why, change)
    if name == MEMORY and any(rejected.any() for limit, rejected in ranking.rejected.items() if limit != MEMORY):
        # What fits does not keep the limits: more memory alone would not help.
        return None
    closest = int(np.argmin(np.where(fell, miss, np.inf)))
    return Remedy(why=f"the nearest {_missed(name, float(miss[closest]))}")


def _remedy(ranking: ServingRanking, row: int, why: str, change: tuple[str, object]) -> Remedy:
    return Remedy(
        why=why,
        field=change[0],
        value=change[1],
        loss=ranking.loss(row),
        best=bool(row == ranking.order[0]),
        objective=ranking.grid.options.objective,
    )


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value) or "of the checkpoint"


def _missed(name: str, by: float) -> str:
    return f"is short of {by:.1%} of the memory" if name == MEMORY else missed(by)


def _near(ranking: ServingRanking, row: int) -> Any:
    """Return which rows may be one change away from a row: the same layout, or the same setup and batch."""
    table = ranking.table
    layout, setup, batch = (column == column[row] for column in (table.layout, table.setup, table.batch))
    return (layout & (setup | batch)) | (setup & batch)


def _differences(ranking: ServingRanking, rejected: int, good: int) -> Iterator[tuple[str, object]]:
    """Yield the choices in which two rows differ, with those of the second."""
    for name in ("tp", "pp", "dp", "ep", "etp", "order", "batch", *WORDS):
        if ranking.word(rejected, name) != ranking.word(good, name):
            yield name, ranking.word(good, name)


def law_remedy(ranking: ServingRanking, name: str) -> Remedy | None:
    """Return what helps a layout or a format that a law rejects: one of the best plans that differs in one choice."""
    grid = ranking.grid
    if name == FORMATS:
        return Remedy(why=str(grid.unusable[0][1])) if grid.unusable else None
    fell = grid.layouts.rejected.get(name)
    if fell is None:
        return Remedy(why=str(grid.unlaunched()[0][1]))
    order = ranking.order[np.unique(ranking.table.layout[ranking.order], return_index=True)[1]]
    for row in np.sort(_places(ranking.order, order))[:_TRIED].tolist():
        good = grid.plan(int(ranking.table.layout[ranking.order[row]]))
        for one in _neighbours(grid.layouts, fell, good):
            change = changed_field(list(_between(grid.layouts.bare(one), good)))
            if change is not None:
                return _remedy(ranking, int(ranking.order[row]), str(grid.layouts.problem(one)), change)
    return Remedy(why=str(grid.layouts.problem(int(fell[0]))))


def _places(order: Any, some: Any) -> Any:
    """Return where some rows stand in an order."""
    place = np.empty(int(order.max(initial=-1)) + 1, np.int64)
    place[order] = np.arange(len(order))
    return place[some]


def _neighbours(layouts: Layouts, fell: Any, good: Plan) -> list[int]:
    """Return the few first rows of those that fell that differ from a plan in one of tp, pp and ep."""
    same = [layouts.columns[name][fell] == getattr(good, name) for name in ("tp", "pp", "ep")]
    return [int(row) for row in fell[np.sum(same, axis=0) == 2][:_TRIED]]


def _between(rejected: Plan, good: Plan) -> Iterator[tuple[str, object]]:
    for name in ("tp", "pp", "dp", "ep", "etp", "order"):
        if getattr(rejected, name) != getattr(good, name):
            yield name, getattr(good, name)
