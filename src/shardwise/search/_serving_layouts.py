"""The layouts of a space of deployments as columns, and what the laws say of each."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.errors import Problem
from shardwise.plans import Plan
from shardwise.plans.fields import DEPLOYED
from shardwise.records import dataclass
from shardwise.search._space import Order

DEGREES = DEPLOYED


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """The layouts of a space as columns, and what the laws say of each; `order` is an index of the space's orders."""

    columns: dict[str, Any]
    orders: tuple[Order, ...]
    law: Any
    laws: tuple[str, ...]
    complete: dict[tuple[Any, ...], tuple[Plan, tuple[Problem, ...]]]

    @property
    def count(self) -> int:
        """Layouts in all."""
        return len(self.law)

    @cached_property
    def legal(self) -> Any:
        """PlanGrid of the layouts that obey the laws."""
        return np.flatnonzero(self.law < 0)

    @cached_property
    def rejected(self) -> dict[str, Any]:
        """PlanGrid of the layouts that fell, by law."""
        every = {name: np.flatnonzero(self.law == i) for i, name in enumerate(self.laws)}
        return {name: rows for name, rows in every.items() if len(rows)}

    def bare(self, row: int) -> Plan:
        """Return the plan of a row as it was tried."""
        values: dict[str, Any] = {name: int(self.columns[name][row]) for name in DEGREES}
        return Plan(**values, order=self.orders[int(self.columns["order"][row])])  # type: ignore[arg-type]

    def plan(self, row: int) -> Plan:
        """Return the complete plan of a legal row."""
        bare = self.bare(row)
        return replace(self.complete[law_key(bare)][0], dp=bare.dp, order=bare.order)

    def problem(self, row: int) -> Problem:
        """Return the first problem of a row that fell."""
        return self.complete[law_key(self.bare(row))][1][0]


def law_key(plan: Plan) -> tuple[Any, ...]:
    """Return what the laws read of a layout: replicas matter where experts divide over them."""
    return plan.tp, plan.pp, plan.ep, plan.etp, plan.tp * plan.dp % (plan.ep * plan.etp) == 0


def law_keys(columns: dict[str, Any]) -> list[Any]:
    """Return the columns that the laws read."""
    c = columns
    whole = c["tp"] * c["dp"] % (c["ep"] * c["etp"]) == 0
    return [c["tp"], c["pp"], c["ep"], c["etp"], whole]
