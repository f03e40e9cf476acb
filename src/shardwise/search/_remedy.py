"""What would make a plan that was rejected do: one change, and what it costs against the best."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.records import dataclass

# Fields that follow from the others: a change of a degree takes them along.
FOLLOWING = ("dp", "etp", "order", "vpp", "stage_layers", "sequence_parallel")
_BEHIND = {
    "step": "slower",
    "throughput": "less throughput",
    "cost": "dearer",
    "memory": "more memory",
    "devices": "more devices",
    "ttft": "later",
    "tpot": "slower",
    "latency": "longer",
    "days": "longer",
    "headroom": "more memory",
}


def loss_of(objective: str, value: float, best: float) -> float:
    """Return by how much a value of an objective is worse than the best, both with less being better.

    >>> loss_of("step", 1.25, 1.0), loss_of("throughput", 1.25, 1.0)
    (0.25, 0.2)
    """
    return round(1 - best / value, 12) if objective == "throughput" else value / best - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """Why a plan is rejected, and the single-field change that makes it feasible with the least loss by the objective.

    Without a `field` no single change helps. `loss` is a share of the best plan's value; `best` says that the
    changed plan is the best one.

    >>> str(Remedy(why="the nearest is 12.0% short", field="recompute", value="selective", loss=0.03, objective="step"))
    'the nearest is 12.0% short: recompute selective is feasible, 3.0% slower than the best'
    """

    why: str
    field: str = ""
    value: object = None
    loss: float = 0.0
    best: bool = False
    objective: str = "step"

    @property
    def cost(self) -> str:
        """What the change costs, in words."""
        return "the best plan" if self.best else f"{self.loss:.1%} {_BEHIND[self.objective]} than the best"

    def __str__(self) -> str:
        if not self.field:
            return f"{self.why}; no single change of the space helps"
        value = ",".join(map(str, self.value)) if isinstance(self.value, tuple) else str(self.value)
        value = value.lower() if isinstance(self.value, bool) else value
        return f"{self.why}: {self.field.replace('_', ' ')} {value} is feasible, {self.cost}"


def missed(by: float) -> str:
    """Return in words by how much a limit is missed, `by` a share of it: percent, and times where that is far.

    >>> missed(0.014), missed(2931.7)
    ('misses it by 1.4%', 'misses it 2,933 times over')
    """
    return f"misses it by {by:.1%}" if by < 10 else f"misses it {by + 1:,.0f} times over"


def changed_field(differences: Sequence[tuple[str, object]]) -> tuple[str, object] | None:
    """Return the one field that was changed, of all in which two plans differ; None where there are more or none.

    >>> changed_field([("tp", 4), ("dp", 2)]), changed_field([("tp", 4), ("pp", 2), ("dp", 1)])
    (('tp', 4), None)
    """
    own = [d for d in differences if d[0] not in FOLLOWING]
    if len(own) == 1:
        return own[0]
    return differences[0] if not own and len(differences) == 1 else None
