"""What a comparison is made of: figures of ours with the amounts that laws put between them and another tool's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Setting = dict[str, Any]
TOLERANCE, NOISE = 0.01, 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A figure of ours; `apart` are the amounts, by law, that lead from it to the other tool's.

    A law `by` another figure of the setting moves this one by as much as that one differs, and a `whole` law takes all
    that no amount was computed for.
    """

    value: float
    unit: str
    apart: dict[str, float] = field(default_factory=dict)
    by: dict[str, str] = field(default_factory=dict)
    whole: str = ""


def amounts(figure: str, theirs: dict[str, float], answers: dict[str, Answer]) -> dict[str, float]:
    """Return what each law moves a figure by."""
    one = answers[figure]
    found = {**one.apart}
    for law, other in one.by.items():
        found[law] = found.get(law, 0.0) + theirs[other] - answers[other].value
    if one.whole:
        found[one.whole] = theirs[figure] - one.value - sum(found.values())
    return {law: amount for law, amount in found.items() if abs(amount) > NOISE * abs(one.value)}


class Row(NamedTuple):
    """One figure of one setting in both tools."""

    setting: str
    figure: str
    unit: str
    theirs: float
    ours: float
    apart: dict[str, float]

    @property
    def difference(self) -> float:
        """Return theirs over ours, less one."""
        if self.ours == 0:
            return 0.0 if self.theirs == 0 else float("inf")
        return self.theirs / self.ours - 1

    @property
    def laws(self) -> tuple[str, ...]:
        """Return the laws that move the figure by more than a thousandth, the largest first."""
        moved = {law: abs(amount) for law, amount in self.apart.items() if abs(amount) > 1e-3 * abs(self.ours)}
        return tuple(sorted(moved, key=lambda law: -moved[law]))

    @property
    def rest(self) -> float:
        """Return what the named amounts leave of the difference, over the other tool's figure."""
        left = self.theirs - self.ours - sum(self.apart.values())
        return left / self.theirs if self.theirs else left

    @property
    def settled(self) -> bool:
        """Whether the figures agree within a hundredth, or named amounts lead from one to the other within it."""
        return abs(self.difference) <= TOLERANCE or (bool(self.laws) and abs(self.rest) <= TOLERANCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Another tool: what it is asked, what asks it in its own code, and our answers."""

    name: str
    version: str
    settings: tuple[Setting, ...]
    asks: str
    answers: Callable[[Setting], dict[str, Answer]]


def name_of(setting: Setting) -> str:
    """Return a setting in words, as it stands in the stored result."""
    return " ".join(str(value) if key in ("ask", "model") else f"{key}={value}" for key, value in setting.items())
