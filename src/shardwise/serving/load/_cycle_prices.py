"""What prompts take in cycles of several batches, from the prices of steps: arrays [prompts, layout, place].

Prompts that are cut have one piece a cycle, the last of which is what is left over. What a batch with more or longer
prompts than others takes longer ends where its step is full: the rest runs in the next one.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

from shardwise.arrays import np
from shardwise.records import dataclass, replace
from shardwise.serving._policy import Policy
from shardwise.serving.load._batches import EQUAL, Batches, after_hold, crowded, ending_chance, piled, piles_up
from shardwise.serving.load._bunches import begin_chance, walk_above
from shardwise.serving.load._cycle_parts import PRICED, CyclePrices, Piled
from shardwise.serving.load._gathered import Gathered
from shardwise.serving.load._lockstep import Cycles, cycles_of
from shardwise.serving.load._longest import PROMPTS, as_often, in_groups, longest_of, own_of
from shardwise.serving.load._moments import LengthMoments
from shardwise.serving.load._pipeline import IN_A_STEP, Come, LanePrices
from shardwise.serving.load._ubatches import Ubatches


def between(at: Any, known: Any, values: Any) -> Any:
    """Return rows of values [layout, known] interpolated at places [layout, ...] between the known ones, and beyond.

    >>> between(np.array([[0.5, 1.5, 4.0]]), np.array([1.0, 2.0, 3.0]), np.array([[10.0, 20.0, 40.0]])).tolist()
    [[10.0, 15.0, 60.0]]
    >>> between(np.array([[5.0]]), np.array([1.0, 2.0]), np.array([[10.0, 20.0]])).tolist()
    [[50.0]]
    """
    last = len(known) - 1
    i = np.minimum(np.maximum(np.searchsorted(known, at, side="right") - 1, 0), max(last - 1, 0))
    j = np.minimum(i + 1, last)
    share = np.maximum((at - known[i]) / np.maximum(known[j] - known[i], 1e-9), 0.0)
    # Looked up in one axis, which takes half of the time of `take_along_axis`.
    cells, first = values.reshape(-1), np.arange(len(values))[:, None] * len(known)
    low, high = cells[first + i], cells[first + j]
    return low + share * (high - low)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptPrices:
    """Seconds of prompts: all but attention by the tokens of a step, attention of a piece of each class of them."""

    tokens: Any
    linear: Any
    experts: Any
    start: Any
    attention: Any
    least: Any
    """A step with any prompt."""
    apart: Any
    """What attention of the middle piece of a prompt takes longer than that of the first, by class."""
    launched: Any
    """The same of more tokens than are `replayed` from a captured graph."""
    replayed: int
    ubatches: Ubatches = Ubatches()
    highest: Any = None
    """`linear` at the highest clock, where that is known."""

    def floor(self, tokens: Any) -> Any:
        """Return the seconds that a step with prompts takes at least, by its tokens."""
        return np.where(tokens > self.replayed, self.launched, self.least)

    def expert(self, tokens: Any) -> Any:
        """Return seconds of GEMMs of experts in a step of so many tokens."""
        return self._of_tokens(tokens, self.experts)

    def step(self, index: int, tokens: Any, many: Any) -> Any:
        """Return seconds of a step of so many tokens with so many prompts of a class, whose launches count once."""
        reads = self.attention[:, index, None]
        launched = self.start * self.ubatches.extra(tokens) if self.ubatches.tokens else 0.0
        return self._of_tokens(tokens, self.linear) + launched + self.start + many * (reads - self.start)

    def _of_tokens(self, tokens: Any, values: Any) -> Any:
        """Return values of steps of so many tokens: the sum of those of their ubatches."""
        if not self.ubatches.tokens:
            return between(tokens, self.tokens, values)
        whole, rest, last = self.ubatches.split(tokens)
        full = between(0 * rest + self.ubatches.tokens, self.tokens, values)
        return whole * full + last * between(np.maximum(rest, 1.0), self.tokens, values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Added:
    """What prompts add to a step, by class and number of prompts, and how each class is cut."""

    seconds: Any
    short: Any
    """What the last step of so many, which is not full, takes beyond its share of a full one; 0 where none is cut."""
    unfilled: Any
    """The share of that step that is left to prompts behind."""
    ahead: Any
    experts: Any
    pieces: Any
    size: Any
    apart: Any
    """Standard deviation of the seconds of whole pieces, later ones of which read more of the cache."""
    last: Any
    """Seconds, those of experts, and tokens of the last piece of one that is cut, which is shorter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Crowd:
    """How prompts of a cycle come: as requests arrive, one after another or where batches differ, or from a queue."""

    comes: Literal["evenly", "unevenly", "queue", "late", "held"]
    apart: float = 0.0
    """Of a queue: how far sequences end apart from each other."""
    bunch: Any = 1.0
    """Prompts that begin at once in a batch."""

    def of(self, prompts: int, batches: Batches, policy: Policy) -> tuple[Any, Any]:
        """Return the prompts of the batch with most of them, and how many batches have any: [layout, 1]."""
        if self.comes in ("late", "held"):
            return after_hold(prompts, batches, self.comes == "held")
        if self.comes == "unevenly":
            return piled(prompts, batches, policy)
        return crowded(prompts, batches, policy, None if self.comes == "evenly" else self.apart)

    def through(self, policy: Policy) -> Come:
        """Return how prompts come to batches that follow each other through stages."""
        return "alternating" if self.comes == "queue" and not policy.mixed else "apart"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pieces:
    """Pieces of prompts in equal shares of them: [share, prompts, layout, place], but for experts."""

    own: Any
    alone: Any
    """One prompt a step, the shortest first: early and late pieces of each share."""
    full: Any
    """Steps that such prompts fill, the shortest first."""
    each_prompt: Any
    """Pieces of a prompt: [layout, place]."""
    size: Any
    """Mean tokens of a piece."""


@dataclass(frozen=True, kw_only=True)
class CycleSteps:
    """Steps of batches beside each other, and what prompts add to them: what cycles are made of."""

    policy: Policy
    verified: int
    prompts: PromptPrices
    added: Added
    counts: Any
    decode: Any
    """A decode step of the fullest batch."""
    batches: Batches
    launching: Any
    """Seconds of the host to launch a step, over those of a decode step."""

    def tables(self, moments: LengthMoments) -> Cycles:
        """Return the tables of cycles, those of a queue among them where prompts come otherwise from it."""
        policy, batches = self.policy, self.batches
        holds = policy.balance_steps > 0 and batches.any and moments.overlap <= EQUAL
        even = _Crowd(comes="late" if holds else "evenly")
        other = None
        if piles_up(policy, batches):
            some = ending_chance(self.counts, batches, moments) if policy.balances == "loads" else 1.0
            other = Piled(prices=self._of(_Crowd(comes="unevenly")), share=some)
        prices = self._of(even)
        first = cycles_of(prices, self.decode, batches, policy, other).named(self.counts)
        if policy.shared_waiting and prices.lanes is not None:
            cells = self.counts * batches.groups_each, self.launching, first.pieces + 0.0 * self.counts
            first = replace(first, gathered=Gathered.of(prices.lanes, self.decode, cells, batches, policy))
        if holds:
            whole = cycles_of(self._of(_Crowd(comes="held")), self.decode, batches, policy).named(self.counts)
            first = replace(first, all_have=whole, ends=whole)
        queue = self._queue(moments)
        if queue is None:
            return first
        ends = cycles_of(self._of(queue), self.decode, batches, policy)
        return replace(first, ends=ends.named(self.counts))

    def _queue(self, moments: LengthMoments) -> _Crowd | None:
        """Return how prompts come from a full queue, None where as they arrive."""
        batches = self.batches
        if not batches.any:
            return None
        if moments.overlap >= 1:
            return _Crowd(comes="queue") if piles_up(self.policy, batches) else None
        ended, chance = begin_chance(self.counts, moments, self.policy, batches.lanes)
        # After a decode step prompts run so often, and before another one decodes: of all steps P / (1 + P) have some,
        # as many as Poisson numbers of ln(1 + P) in the mean. As many prompts count as one of these.
        bunch = np.where(batches.piped, 1.0, np.maximum(ended / ((1 + chance) * np.log1p(chance)), 1.0))
        # Two answers differ by so many steps in the mean: by one or more they end in any.
        apart = min(2 * (1 - moments.overlap) * moments.steps, 1.0)
        return _Crowd(comes="queue", apart=apart, bunch=bunch if not self.policy.mixed else 1.0)

    @cached_property
    def _cut(self) -> bool:
        """Whether a prompt may be cut in some layout, with as many sequences as the engine takes."""
        decoding = self.policy.max_sequences * self.verified if self.policy.mixed else 0
        longest = float((self.added.pieces * self.added.size).max())
        return self.policy.chunked and longest > self.policy.step_tokens - decoding

    @cached_property
    def _room(self) -> Any:
        tokens = self.counts * self.verified if self.policy.mixed else 0.0
        return np.maximum(self.policy.step_tokens - tokens, 1.0)

    @cached_property
    def _shared(self) -> Any:
        """Whether experts take the tokens of several batches: else their seconds are those of the only one."""
        return (self.batches.many > 1) & ~self.batches.piped

    @cached_property
    def _routed(self) -> Any:
        """Seconds of experts, where they take the tokens of all groups; else 0."""
        return np.where(self.batches.groups[:, None] > 1, self.added.experts, 0.0)

    @cached_property
    def _new(self) -> tuple[Any, Any]:
        """Mean and mean square of the new tokens of prompts."""
        new = self.added.pieces * self.added.size
        return new.mean(axis=0), (new**2).mean(axis=0)

    @cached_property
    def _pieces(self) -> _Pieces:
        added, many = self.added, self.batches.many
        pieces = np.maximum(added.pieces, 1.0)[:, None]
        own, size, apart = (added.seconds - self._routed) / pieces, added.size, added.apart
        full = self._full()
        if self._cut:
            seconds, routed, tokens = added.last[:, 0], added.last[:, 1], added.last[:, 2]
            apart, full = np.concatenate([apart, 0 * apart]), np.concatenate([full, full])
            left = ((tokens > 0) & (added.pieces > 1) & (many > 1) & ~self.batches.piped)[:, None]
            own = np.concatenate([own, own + ((seconds - routed)[:, None] - own[:, :1])])
            size = np.concatenate([size, tokens])
            pieces = np.concatenate([np.where(left, np.floor(pieces), pieces), left * 1.0])
        # Of the pieces of a cycle more are of long prompts.
        often = as_often(own, pieces)
        whole, some = (own * pieces).mean(axis=0) / pieces.mean(axis=0), often.mean(axis=0)
        # Beside many sequences what is a prompt's own may be none or less: experts take the rest.
        own = often * np.where(some > 0, whole / np.where(some > 0, some, 1.0), 1.0)
        each, alone, filling = pieces[:, 0], own[:, 0], np.maximum(pieces * size[:, None], 1e-9)
        full = as_often(full[:, None], filling)[:, 0]
        if apart.any():
            apart, later = (as_often(apart[:, None], often)[:, 0] for often in (pieces, filling))
            alone = np.concatenate([alone - apart, alone + apart])
            full = np.concatenate([full - later, full + later])
        alone = np.sort(alone, axis=0)
        full = np.maximum(np.sort(full, axis=0), alone)
        return _Pieces(
            own=own, alone=alone, full=full, each_prompt=each.sum(axis=0) / len(added.pieces),
            size=(size * each).mean(axis=0) / each.mean(axis=0),
        )  # fmt: skip

    def _of(self, crowd: _Crowd) -> CyclePrices:
        """Return the prices of cycles in which prompts come so."""
        batches, pieces, tokens, policy = self.batches, self._pieces, self.counts * self.verified, self.policy
        means, alone = pieces.own.mean(axis=0), pieces.alone
        ahead = (self.added.ahead - self._routed[:, -1]).mean(axis=0) / pieces.each_prompt
        decode_parts = self.decode - np.where(self._shared, self.prompts.expert(tokens), 0.0)
        # What a step has no room for runs in the next, with those that came later.
        fits = self._fits(pieces.size)
        fit = np.maximum(np.floor(fits), 1.0)
        most, groups_each = np.where(batches.piped, fit * batches.groups_each, fits), batches.groups_each
        apart = float(policy.shared_waiting or crowd.apart > 1 - EQUAL)
        rows = []
        for k in PRICED:
            each, some = crowd.of(k, batches, self.policy)
            prompts = k * crowd.bunch
            each = np.minimum(each * crowd.bunch, np.maximum(most, prompts / batches.many))
            top, groups = in_groups(each, fit, batches, policy, crowd.apart)
            own = self._longer(prompts, top, (means, ahead))
            steps = np.maximum(prompts / batches.many / groups_each / fits, 1.0)
            usual = own if crowd.comes == "evenly" else self._usual(own, prompts, (means, ahead))
            filled = pieces.full * steps, self._full_chance(prompts / batches.many / groups_each)
            longest, spread = longest_of((usual, own), (means[0], alone), (top, some * groups), filled)
            routed = self._routed_of(each, groups, pieces.size)
            longest, own = longest + routed, own + routed
            rows.append((longest, spread, own / each, self._experts(prompts, some, pieces.size), some, steps))
        longest, spread, mean, experts, some, steps = (np.stack(one) for one in zip(*rows, strict=True))
        return CyclePrices(
            longest=longest, spread=spread, mean=mean, experts=experts, decode=decode_parts, with_prompts=some,
            pieces=pieces.each_prompt, steps=steps,
            variance=np.where(batches.piped | (batches.many == 1), pieces.alone.var(axis=0), 0.0),
            lanes=self._lanes((means, ahead, alone), fits, crowd.apart, pieces.size) if batches.piped.any() else None,
            apart=apart, come=crowd.through(policy),
            together=crowd.bunch,
        )  # fmt: skip

    def _longer(self, prompts: Any, each: Any, prices: tuple[Any, Any]) -> Any:
        """Return what the batch with most prompts adds, or that with fewest, as far below the mean as that is above.

        Where the host is behind, fewer prompts take as long and leave more to experts, which take those of all.
        """
        fewest = np.maximum(2 * prompts / self.batches.many - each, 1.0)
        own = own_of(*prices, each)
        return np.where(self.batches.piped, own, np.maximum(own, own_of(*prices, np.minimum(fewest, each))))

    def _usual(self, own: Any, prompts: Any, prices: tuple[Any, Any]) -> Any:
        """Return what a batch with the mean of prompts adds, of those that have any, where others have more by chance.

        Not where prompts are cut: the longest run in most cycles, with others beside them.
        """
        cut = np.asarray(self.added.pieces > 1).any(axis=0)
        usual = np.minimum(own_of(*prices, np.maximum(prompts / self.batches.many, 1.0)), own)
        return np.where(self.batches.piped | cut, own, usual)

    def _experts(self, prompts: Any, some: Any, size: Any) -> Any:
        """Return what experts add, or take, with the tokens of all batches."""
        if not self._shared.any():
            return 0.0 * self.counts
        tokens, many = self.counts * self.verified, self.batches.many
        if self.policy.mixed:
            routed = self.prompts.expert(tokens + prompts * size / many) - self.prompts.expert(tokens)
        else:
            routed = self.prompts.expert((prompts * size + (many - some) * tokens) / many)
        return np.where(self._shared, routed, 0.0)

    def _full_chance(self, prompts: Any) -> Any:
        """Return how likely the step of a batch is full where so many prompts come to it in a cycle.

        What a step has no room for waits, with what comes in the next: a random walk (`walk_above`) whose step has the
        mean and the variance of the tokens of a Poisson number of prompts, less the room.
        """
        if not self.policy.chunked or (self.batches.many > 1).all():
            return 0.5
        (mean, square), many = self._new, prompts / self._pieces.each_prompt
        least = np.maximum(self._room - many * mean, 0.0)
        chance = walk_above(least / np.maximum(np.sqrt(many * square), 1e-9))
        return np.where(self.batches.many == 1, np.maximum(chance, 0.5), 0.5)

    def _fits(self, size: Any) -> Any:
        """Return the prompts of a size that a step has room for, with a part where prompts are cut."""
        fits = self._room / np.maximum(size, 1e-9)
        return np.maximum(fits if self.policy.chunked else np.floor(fits), 1.0)

    def _full(self) -> Any:
        """Return what prompts of a class that fill a step add to it, but for experts."""
        each = (self.added.ahead - self._routed[:, -1]) / np.maximum(self.added.pieces, 1.0)
        return each * self._fits(self.added.size) / PROMPTS

    def _routed_of(self, prompts: Any, groups: Any, size: Any) -> Any:
        """Return what experts add, or take, in a step of several groups with so many prompts, so many of which have."""
        if not (self.batches.groups_each > 1).any():
            return 0.0 * self.counts
        tokens, many = self.counts * self.verified, self.batches.groups_each
        if self.policy.mixed:
            routed = self.prompts.expert(tokens + prompts * size / many) - self.prompts.expert(tokens)
        else:
            routed = self.prompts.expert((prompts * size + (many - groups) * tokens) / many)
        return np.where(many > 1, routed, 0.0)

    def _lanes(self, prices: tuple[Any, Any, Any], fits: Any, apart: float, size: Any) -> LanePrices:
        """Return what steps of `IN_A_STEP` prompts take beyond a decode step.

        A prompt that is cut fills a step, and ends in the step of the next batch.
        """
        means, ahead, alone = prices
        uncut = ~np.asarray(self.policy.chunked) | (self.batches.groups_each > 1)
        fit = np.maximum(np.where(uncut, np.floor(fits), fits), 1.0)
        less, room = 0.0 if self.policy.mixed else self.decode, fit * self.batches.groups_each

        def of(many: Any) -> tuple[Any, Any, Any]:
            top, groups = in_groups(many, fit, self.batches, self.policy, apart)
            own = own_of(means, ahead, top) + self._routed_of(many, groups, size)
            return own, top, groups / self.batches.groups_each

        k = [one + 0 * room for one in IN_A_STEP]
        whole = np.stack([of(one)[0] for one in k])
        most, some, share = (np.stack(one) for one in zip(*(of(np.minimum(one, room)) for one in k), strict=True))
        middle = (len(alone) + 1) // 2
        halves = alone[:middle].mean(axis=0), alone[-middle:].mean(axis=0)
        levels = np.stack([most + np.sqrt(some) * (one - means[0]) for one in halves], axis=1)
        # Long prompts that are cut take no longer than what fills a step.
        levels = np.minimum(levels, np.where(uncut, np.inf, np.maximum(most[-1], means[0])))
        return LanePrices(mean=whole - less, levels=np.maximum(levels - less, 0.0), fit=room, share=share)
