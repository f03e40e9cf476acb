"""Batches of a replica that go round together: groups of attention, or the batches of a pipeline, in closed form.

A cycle is a step of every batch. Groups of attention exchange tokens in every layer: a cycle is as long as the step of
the fullest group, or of the longest prompts, and experts take the tokens of all. The batches of a pipeline follow each
other through its stages: nobody overtakes, so that a decode cycle is a step of the fullest batch, too. A prompt of P
times e seconds keeps every stage for e longer; where none of the P - 1 steps behind has one, all of them wait P - 1
times as long again behind it.

Engines share out requests evenly: K prompts that arrive in a cycle are in min(K, B) of B batches, at most ceil(K / B)
in one, unless batches are unlike as they come (`Piled`). K is Poisson; more than B steps have room for take several
steps, in each of which sequences decode. What a cycle takes is tabulated by the mean of K once for all rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from functools import cache, cached_property, lru_cache, partial
from typing import Any, TypeVar, cast

from shardwise.arrays import np
from shardwise.ledger.opened import named_each
from shardwise.records import dataclass, replace
from shardwise.serving._policy import Policy
from shardwise.serving.load._batch_times import FULL
from shardwise.serving.load._batches import Batches, piled_chance
from shardwise.serving.load._cycle_parts import PRICED, CyclePrices, Piled, Wholes, over_both, sums_of
from shardwise.serving.load._gathered import Gathered
from shardwise.serving.load._pipeline import in_lanes
from shardwise.units import counted

T = TypeVar("T")
# What of cycles is known of each layout and place, and what they have more.
_PLACED = ("batches", "decode", "pieces", "together", "groups_each")
_MORE = ("ends", "all_have", "gathered")
_MEANS = np.geomspace(0.01, 200.0, 40)
_CHANCES = np.exp(-_MEANS)
# What pipelines lose by unequal steps bends less.
_LANE_MEANS = np.geomspace(0.01, 200.0, 24)
_ROUNDS = 12


@cache
def _weights() -> tuple[Any, Any]:
    """Return the weights of 0 and `PRICED` prompts in means over Poisson numbers of them, and over one prompt more."""
    k = np.arange(420)
    logs = np.concatenate([[0.0], np.cumsum(np.log(k[1:]))])
    chance = np.exp(k * np.log(_MEANS)[:, None] - _MEANS[:, None] - logs)
    at = np.array((0, *PRICED))
    return chance @ _hats(k, at), chance @ _hats(k + 1, at)


@cache
def _between_lanes() -> Any:
    """Return the weights of `_LANE_MEANS` in values at `_MEANS`."""
    return _hats(_MEANS, _LANE_MEANS)


def _hats(numbers: Any, known: Any) -> Any:
    """Return the weights of known places in lines between them: [number, place]."""
    i = np.clip(np.searchsorted(known, numbers, side="right") - 1, 0, len(known) - 2)
    share = (numbers - known[i]) / (known[i + 1] - known[i])
    weights = np.zeros((len(numbers), len(known)))
    weights[np.arange(len(numbers)), i] = 1 - share
    weights[np.arange(len(numbers)), i + 1] = share
    return weights


@dataclass(frozen=True, kw_only=True, slots=True)
class CycleMix:
    """How cycles with prompts and without follow each other at a rate: [layout, place]."""

    none: Any
    """Mean prompts that arrive in a cycle without."""
    some: Any
    """The same of a cycle with prompts."""
    short: Any
    """Share of cycles without."""
    keeps: Any
    """How much of its excess a cycle hands on to the next."""
    two: Any
    """The same of cycles of two kinds alone, with prompts and without."""
    cycle: Any
    square: Any
    """Mean square of the time between two cycles in which prompts may start, over that of cycles."""
    own: Any
    """The cycle in which a prompt runs that has arrived."""
    left: Any
    """What of it is left as its own step ends."""
    alone: Any
    """`Cycles.share` in the mean over cycles."""
    following: Any
    """What cycles after that of a prompt are longer than others, since more arrive in it."""
    turn: Any
    """Until the next batch of a pipeline is made, and for those made ahead of it."""


@dataclass(frozen=True, kw_only=True)
class Cycles:
    """Tables of cycles by the mean number of prompts that arrive in one: [mean, layout, place]."""

    batches: Any
    decode: Any
    mean: Any
    """A cycle."""
    square: Any
    """Mean square of a cycle."""
    after: Any
    """A cycle with one prompt more."""
    left: Any
    """What of it is left as the step of a prompt ends, where prompts of one batch fill several."""
    more: Any
    """What a cycle takes longer for each prompt more in the mean."""
    share: Any
    """Batches that run prompts alone in a cycle, over all; less than 0 where a cycle has several steps that decode."""
    pieces: Any
    """Prompts of all these count as so many."""
    together: Any = 1.0
    """Prompts that begin at once in a batch: they count as one."""
    groups_each: Any = 1.0
    """Groups that step together in each batch: [layout, 1]."""
    cv: Any = 0.0
    """Coefficient of variation of cycles with prompts, where batches go in lockstep: [mean, layout, place]."""
    ends: Cycles | None = None
    """The same where prompts take the places of sequences that ended; None where that is no different."""
    all_have: Cycles | None = None
    """The same where every batch has a prompt, for which prompts were held."""
    gathered: Gathered | None = None
    """Cycles of pipelines whose batches take from one waiting list; None where none do."""
    whole: tuple[Cycles, Any] | None = None
    """Whose tables these are, of more layouts, and the rows of these there; None where they are all."""
    faster: tuple[Cycles, Any] | None = None
    """The same at a higher clock and its share, by layout: cells are mixed as they are read, as few ever are."""

    def named(self, counts: Any) -> Cycles:
        """Return the same tables, whose cells open under names where columns open."""

        def name(i: int) -> str:
            mean, place = divmod(i, counts.size)
            run = counted(counts.flat[place], "sequence", 6)
            return f"step of {run} where {_MEANS[mean]:.2g} prompts arrive in the mean"

        return replace(
            self, mean=named_each(self.mean, name), after=named_each(self.after, lambda i: name(i) + ", and one")
        )

    def look(self, table: str, mean: Any) -> Any:
        """Return a table at mean numbers of prompts [..., layout, place]."""
        return self.read(table, self.spot(mean))

    def spot(self, mean: Any) -> tuple[Any, Any]:
        """Return the cells of tables below mean numbers of prompts, and how far these are on the way to the next."""
        mean = np.asarray(mean)
        at = np.log(np.maximum(mean, _MEANS[0]) / _MEANS[0]) / math.log(_MEANS[1] / _MEANS[0])
        i = np.minimum(at.astype(int), len(_MEANS) - 2)
        # What is fewer than the first mean, none at all too, or more than the last lies on the line through two; a
        # line that falls ends at the last, as no cycle becomes shorter than nothing.
        return self._cells_of(i), (mean - _MEANS[i]) / (_MEANS[i + 1] - _MEANS[i])

    def read(self, table: str, spot: tuple[Any, Any]) -> Any:
        """Return a table between cells and the next ones."""
        cells, share = spot
        low, high = self._at(table, cells), self._at(table, cells + self._width)
        rise = high - low
        return low + np.where(rise < 0, np.minimum(share, 1.0), share) * rise

    def _at(self, table: str, cells: Any) -> Any:
        """Return cells of a table."""
        one = getattr(self, table).reshape(-1)[cells]
        if self.faster is None:
            return one
        other, share = self.faster
        return mixed(one, other._at(table, cells), share)

    def _cells_of(self, means: Any) -> Any:
        """Return the cells of each layout's places at means of the tables."""
        return means * self._width + self._places

    @property
    def _width(self) -> Any:
        """Cells of a mean."""
        return self.mean[0].size

    @cached_property
    def _places(self) -> Any:
        """The cells of each layout's places at the first mean."""
        cells = _numbers(self.mean.shape[1:])
        return cells if self.whole is None else cells[self.whole[1]]

    def rows(self, rows: Any) -> Cycles:
        """Return the tables of some layouts: the same, which are read elsewhere."""
        whole, known = self._whole
        columns = {name: np.take(one, rows, axis=0) for name in _PLACED if np.ndim(one := getattr(self, name))}
        others = {name: one.rows(rows) for name in _MORE if (one := getattr(self, name)) is not None}
        faster = self.faster and (self.faster[0].rows(rows), np.take(self.faster[1], rows, axis=0))
        return replace(self, **columns, **others, faster=faster, whole=(whole, known[rows]))

    def between(self, other: Cycles, share: Any) -> Cycles:
        """Return tables of which a share is those of others, by layout."""
        columns = {
            name: mixed(one, getattr(other, name), share) for name in _PLACED if np.ndim(one := getattr(self, name))
        }
        # Those of full queues are asked at one clock.
        for name in ("all_have", "gathered"):
            if (one := getattr(self, name)) is not None:
                columns[name] = one.between(getattr(other, name), share)
        return replace(self, **columns, faster=(other, share), whole=self._whole)

    @property
    def _whole(self) -> tuple[Cycles, Any]:
        return self.whole or (self, np.arange(len(self.decode)))

    @cached_property
    def unequal_mean(self) -> Any:
        """The table of a cycle where prompts arrive in cycles with others, which differ."""
        return self._unequal("mean")

    @cached_property
    def unequal_square(self) -> Any:
        """The same of its square."""
        return self._unequal("square")

    @cached_property
    def unequal_empty(self) -> Any:
        """How likely it has no prompts."""
        return self._unequal("empty")

    def _unequal(self, table: str) -> Any:
        if self.whole:
            return getattr(self.whole[0], f"unequal_{table}")
        what = (lambda mean: np.exp(-mean)) if table == "empty" else partial(self.look, table)
        return _of_two(what, _MEANS[:, None, None], self.cv)

    def going(self, rate: Any) -> CycleMix:
        """Return what cycles are where so many prompts arrive a second, [layout, place].

        Prompts of a cycle are Poisson about what arrives in the one before, which had prompts or none: short cycles
        follow short ones. What arrives in one with prompts solves p = p exp(-m0) + (1 - p) exp(-m1) for the share p of
        cycles without, and m1 = rate c1 for the mean cycle with. Of groups in lockstep cycles with prompts last
        unequally, here half of them short and half long, so that more bring no prompts and others many.
        """
        rate = rate + 0 * self.decode
        none = rate * self.decode
        quiet = self.spot(none)
        stays, after = np.exp(-none), self.read("mean", quiet)
        # What cycles with prompts that follow those without are shorter by, over the share of those.
        less = (after - self.decode) / np.maximum(1 - stays, 1e-12)

        def arriving(i: Any) -> Any:
            cells = self._cells_of(i)
            return rate * (self._at("unequal_mean", cells) + self._at("unequal_empty", cells) * less)

        some = _crossing(arriving, rate)
        going = self.spot(some)
        chance = _of_two(lambda mean: np.exp(-mean), some, self.read("cv", going))
        short = chance / (1 - stays + chance)
        cycle, square = (
            short * before + (1 - short) * self.read(unequal, going)
            for before, unequal in ((after, "unequal_mean"), (self.read("square", quiet), "unequal_square"))
        )
        # Two kinds of cycles alone forget how long one with prompts was: of what it is longer than their mean those
        # that arrive in it make the next one longer by so much (autoregression: the variance by 1 / (1 - keeps^2)).
        two = np.maximum(stays - chance, 0.0)
        grown = rate * self.read("more", going)
        keeps = np.where(self.batches > 1, two, np.maximum(np.minimum(grown, FULL), two))
        square = cycle**2 + (square - cycle**2) * (1 - two**2) / (1 - keeps**2)
        # Who arrives sees more of long cycles.
        whole, quick = (square - short * self.decode**2), np.asarray(short * self.decode / cycle)
        later = self.spot(rate * whole / np.maximum((1 - quick) * cycle, 1e-12))
        own, left = (
            quick * self.read(each, quiet) + (1 - quick) * self.read(each, later) for each in ("after", "left")
        )
        alone = short * self.read("share", quiet) + (1 - short) * self.read("share", going)
        mix = CycleMix(
            none=none, some=some, short=short, keeps=keeps, two=two, cycle=cycle, square=square, own=own, left=left,
            alone=alone, following=self.following(rate * own, cycle) / (1 - two),
            turn=square / cycle / 2 / self.batches,
        )  # fmt: skip
        return self.gathered.over(mix, rate) if self.gathered else mix

    def following(self, prompts: Any, cycle: Any) -> Any:
        """Return what a cycle takes longer than others for which so many arrived."""
        return np.maximum(self.look("mean", prompts) - cycle, 0.0)

    def ended(self, counts: Any, steps: float) -> Any:
        """Return the mean prompts that follow on those who end in a cycle, while so many sequences run in each batch.

        Batches that run prompts alone end nothing then.
        """

        def arriving(i: Any) -> Any:
            going = 1 - self._at("share", self._cells_of(i))
            each = counts * going / (steps + self.pieces * going)
            return self.batches * self.groups_each * each * self.pieces / self.together

        return _crossing(arriving, counts)


def rows_of(table: T, rows: Any) -> T:
    """Return the prices of some layouts."""
    columns: dict[str, Any] = {}
    for f in fields(cast(Any, table)):
        value = getattr(table, f.name)
        if isinstance(value, Cycles):
            columns[f.name] = value.rows(rows)
        elif isinstance(value, type(table)):
            columns[f.name] = rows_of(value, rows)
        elif np.ndim(value) > 1:
            columns[f.name] = np.take(value, rows, axis=-2)
    return cast(T, replace(cast(Any, table), **columns))


def mixed(one: Any, other: Any, share: Any) -> Any:
    """Return what is between two clocks, a share of the second."""
    return (1 - share) * one + share * other


def between_prices(lasting: T, highest: T, share: Any) -> T:
    """Return prices of which a share is at the highest clock, by layout: tables [..., layout, place]."""
    columns: dict[str, Any] = {}
    for f in fields(cast(Any, lasting)):
        one, other = getattr(lasting, f.name), getattr(highest, f.name)
        if isinstance(one, Cycles):
            columns[f.name] = one.between(other, share)
        elif np.ndim(one) > 1:
            columns[f.name] = mixed(one, other, share)
    return cast(T, replace(cast(Any, lasting), **columns))


@lru_cache(16)
def _numbers(shape: tuple[int, ...]) -> Any:
    return np.arange(math.prod(shape)).reshape(shape)


def _of_two(function: Callable[[Any], Any], mean: Any, cv: Any) -> Any:
    """Return the mean of a function of prompts that arrive in cycles of two lengths, so far apart."""
    return (function(mean * (1 - cv)) + function(mean * (1 + cv))) / 2


def _crossing(function: Callable[[Any], Any], like: Any) -> Any:
    """Return the mean prompts at which as many are found as there are: `function` gives those at places of the table.

    >>> _crossing(lambda i: 2.5 + 0.0 * i, np.zeros((1, 1))).round(6).tolist()
    [[2.5]]
    """
    last = len(_MEANS) - 1
    low, high = np.zeros(like.shape, int), np.full(like.shape, last)
    while (high - low > 1).any():
        middle = (low + high) // 2
        more = np.asarray(function(middle)) > _MEANS[middle]
        low, high = np.where(more, middle, low), np.where(more, high, middle)
    below, over = (np.asarray(function(i)) - _MEANS[i] for i in (low, high))
    share = np.clip(below / np.maximum(below - over, 1e-12), 0.0, 1.0)
    between = _MEANS[low] + share * (_MEANS[high] - _MEANS[low])
    # Beyond the last mean on a line, too.
    before, end = (np.asarray(function(np.full(like.shape, i))) for i in (last - 1, last))
    slope = np.minimum((end - before) / (_MEANS[last] - _MEANS[last - 1]), FULL)
    beyond = _MEANS[last] + np.maximum(end - _MEANS[last], 0.0) / (1 - slope)
    return np.where(below < 0, below + _MEANS[low], np.where(over > 0, beyond, between))


def cycles_of(prices: CyclePrices, decode: Any, every: Batches, policy: Policy, other: Piled | None = None) -> Cycles:
    """Return the tables of layouts, each with its batches."""
    batches, piped, (weights, after) = every.many, every.piped, _weights()
    some, others = Wholes.of(prices, decode, every, policy), None
    if other is not None:
        waits = [piled_chance(k, _MEANS, every, policy) for k in PRICED]
        likely = np.stack([0 * waits[0], *waits], 1)
        likely = np.where((piped | (batches == 1))[:, 0], 0.0, likely)
        others = Wholes.of(other.prices, decode, every, policy), likely, other.share
    sums, one_more = over_both(weights, some, others), over_both(after, some, others)
    mean, none = sums.whole, _CHANCES[:, None, None]
    # Of cycles with prompts, whose longest differ, too.
    second = sums.square + sums.spread - none * decode**2
    cv2 = second * (1 - none) / np.maximum(mean - none * decode, 1e-12) ** 2 - 1
    cv = np.sqrt(np.where((batches > 1) & ~piped, np.clip(cv2, 0.0, 1.0), 0.0))
    means, share = _MEANS[:, None, None], sums.share
    if prices.lanes is not None:
        longer, busy = (
            sums_of(_between_lanes(), each)
            for each in in_lanes(_LANE_MEANS, prices.lanes, decode, batches, policy.mixed, (prices.apart, prices.come))
        )
        mean, share = np.where(piped, decode + longer, mean), np.where(piped, busy, share)
    return Cycles(
        batches=batches, decode=decode, mean=mean, pieces=prices.pieces, more=np.gradient(mean, _MEANS, axis=0),
        square=sums.square + means * prices.variance, cv=cv, after=one_more.own, left=one_more.left,
        share=share, together=prices.together, groups_each=every.groups_each,
    )  # fmt: skip
