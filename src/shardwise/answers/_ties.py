"""Which plans tie with one: each by its degrees and how far it is behind, many by the range of each degree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from shardwise.answers._page import Page
from shardwise.cost import spreads, tie_factor
from shardwise.plans import DEGREES, Plan
from shardwise.search import TiedPlan

# Ties that are named one by one; of more the nearest are, and the others by the range of each degree.
_NAMED, _NEAREST = 8, 5
_TIED = [name for name in DEGREES if name != "vpp"]


def ties_line(page: Page, ties: Sequence[TiedPlan[Any]], more: Callable[[TiedPlan[Any]], list[str]]) -> None:
    """Append which plans tie with one, each by its degrees, `more` words and how far it is predicted to be behind."""
    if not ties:
        return
    named = ties if len(ties) <= _NAMED else ties[:_NEAREST]
    ties_text = [f"{' '.join([*_degrees(tie.plan), *more(tie)])} (+{tie.behind:.1%})" for tie in named]
    rest = ties[len(named) :]
    if rest:
        last = max(tie.behind for tie in rest)
        ties_text.append(f"and {len(rest):,} more up to +{last:.1%}: {', '.join(_ranges(rest, more))}")
    page.note("ties with " + ", ".join(ties_text), "dim")


def _degrees(plan: Plan) -> list[str]:
    return [f"{name} {getattr(plan, name)}" for name in _TIED if getattr(plan, name) > 1] or ["one device"]


def _ranges(ties: Sequence[TiedPlan[Any]], more: Callable[[TiedPlan[Any]], list[str]]) -> Iterator[str]:
    """Yield the range of each degree of some ties, then the other words that are said of them."""
    for name in _TIED:
        least, most = (pick(getattr(tie.plan, name) for tie in ties) for pick in (min, max))
        if most > 1:
            yield f"{name} {most}" if least == most else f"{name} {least} to {most}"
    yield from _spans(dict.fromkeys(word for tie in ties for word in more(tie)))


def _spans(words: Iterable[str]) -> list[str]:
    """Return words, those that differ in one number alone as one with its range.

    >>> _spans(["6 x h100", "batch 64", "2 x h100", "4 x b200", "fp8"])
    ['2 to 6 x h100', 'batch 64', '4 x b200', 'fp8']
    """
    numbers: dict[str, list[int]] = {}
    for word in words:
        number = next(filter(str.isdecimal, word.split()), "")
        pattern = f" {word} ".replace(f" {number} ", " {} ", 1) if number else word
        numbers.setdefault(pattern.strip(), []).extend([int(number)] if number else [])
    ends = (" to ".join(map(str, sorted({min(n), max(n)}))) if n else "" for n in numbers.values())
    return [pattern.replace("{}", end) for pattern, end in zip(numbers, ends, strict=True)]


def explain_ties(page: Page, headline: str) -> None:
    """Append what makes plans tie."""
    paired = spreads()[headline].paired if headline else None
    if paired is not None:
        page.blank()
        page.note(
            f"a row stands for all plans up to {tie_factor(headline) - 1:.0%} behind its first: of {paired.pairs:,} "
            "published pairs of plans of one job, 8 of 10 came within that of their predicted ratio",
            "dim",
        )
