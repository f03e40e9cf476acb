"""What the closed form reads of an engine's steps: seconds by the sequences that decode, for one case or many layouts.

A column has a row for each layout and a place for each number of sequences: all up to sixteen, then eight to a
doubling. Some eighty steps a layout are priced, all in three calls of `step_cost`, four where a draft guesses.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

from shardwise.arrays import np
from shardwise.cost import Burst
from shardwise.ledger.opened import OpenColumn, is_opening, named_each
from shardwise.ledger.traced import leaf, tracing
from shardwise.records import dataclass, replace
from shardwise.serving._burst import burst_of
from shardwise.serving._case import ServingCase
from shardwise.serving._host import replayed_tokens
from shardwise.serving._ledger import EngineStep
from shardwise.serving._policy import Policy
from shardwise.serving._sizes import ServingSizes, sizes_of, take_rows
from shardwise.serving.load._batches import Batches, fullest
from shardwise.serving.load._cycle_prices import Added, CycleSteps, PromptPrices, between
from shardwise.serving.load._lockstep import Cycles
from shardwise.serving.load._longest import PROMPTS
from shardwise.serving.load._moments import LengthMoments
from shardwise.serving.load._steps import (
    beside_prompts,
    grid,
    launched_ahead,
    launching_seconds,
    never_replayed,
    runs_as_prompts,
    step_parts,
    verified_tokens,
)
from shardwise.serving.load._ubatches import Ubatches, ubatches_of
from shardwise.units import counted

_PLACES = 64
_STEP = ("sequences", "tokens", "context", "clock")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPrices:
    """Seconds of steps while `counts` sequences decode, of contexts of the mean length; arrays [layout, count]."""

    counts: Any
    decode: Any
    launching: Any
    """The share of a step that the host takes to launch it."""
    added: Any
    """What 1, 2, ... prompts add to a step: [prompts, layout, count]."""
    short: Any
    """What the last step of so many, which is not full, adds beyond its share of a full one; 0 where none is cut."""
    unfilled: Any
    """The share of that step that is left to prompts behind."""
    ahead: Any
    """What as many as the last of these add in a full step, where the host is not behind: more cost in proportion."""
    spread: Any
    """Mean square of what a prompt adds over the square of the mean."""
    pieces: Any
    """Steps that a prompt is spread over."""
    behind: Any
    """What those fill before others, `BatchLoad.behind`."""
    together: Any
    """Prompts of the mean length that a step has room for, less than 1 where one is cut."""
    alone: Any
    """A prompt where nobody decodes: [layout, 1]."""
    following: Any
    """The share of its seconds that it takes where its pieces follow one another through the stages: [layout, 1]."""
    cycles: Cycles
    """What steps of all batches take that go round together, where a step has room for all who arrive."""
    burst: Burst | None = None
    """How long prompts run at the `highest` clock, where that is known."""
    highest: LoadPrices | None = None
    """The same with prompts at that clock."""


def _columns_of(step: EngineStep[Any]) -> dict[str, Any]:
    """Return what of a step is a column: its clock only where some have one of their own."""
    return {name: column for name in _STEP if isinstance(column := getattr(step, name), np.ndarray)}


def _priced(case: ServingCase, sizes: ServingSizes[Any], rows: int, step: EngineStep[Any]) -> tuple[Any, ...]:
    """Return the parts of steps as [layout, step]; of one layout they open where somebody is to open them."""
    many = len(step.context) if isinstance(step.context, np.ndarray) else 1
    each = take_rows(sizes, np.repeat(np.arange(rows), many))
    wide = replace(step, **{name: np.tile(column, rows) for name, column in _columns_of(step).items()})
    parts = step_parts(case, each, wide)
    parts_of = tuple(np.broadcast_to(np.asarray(part, float), rows * many).reshape(rows, many) for part in parts)
    return _opened(case, wide, parts_of) if is_opening() else parts_of


def _opened(case: ServingCase, steps: EngineStep[Any], columns: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return prices of steps of one layout that open down to the operators of each."""

    @cache
    def parts(i: int) -> tuple[Any, ...]:
        with tracing():
            numbers: dict[str, Any] = {name: leaf(name, float(one[i])) for name, one in _columns_of(steps).items()}
            sizes = sizes_of(case.model, case.plan, case.job, case.domains)
            return step_parts(case, sizes, replace(steps, **numbers))

    def column(place: int, what: str, values: Any) -> Any:
        def name(i: int) -> str:
            sequences, tokens, context = (float(getattr(steps, one)[i]) for one in _STEP[:3])
            prompt = f"a prompt of {counted(tokens, 'token', 6)}"
            run = counted(sequences, "sequence", 6) if steps.phase == "decode" else prompt
            fast = ", at the highest clock" if isinstance(steps.clock, np.ndarray) and steps.clock[i] > 1 else ""
            return f"{what}step of {run} at context {context:.0f}{fast}"

        return named_each(OpenColumn(values, lambda i: parts(i)[place]), name)

    labels = ("", "what sequences have of their own in a ", "sampling of a ", "experts of a ")
    return tuple(column(place, what, values) for place, (what, values) in enumerate(zip(labels, columns, strict=True)))


def _sequences_at(counts: Any, i: int) -> str:
    """Return how many sequences a place of a column has, in words."""
    return counted(counts.flat[i], "sequence", 6)


def places(most: Any) -> Any:
    """Return numbers of sequences [layout, place] from 1 to the most of each layout; the last ones may repeat.

    >>> places(np.array([3.0]))[0, :5].tolist()
    [1.0, 2.0, 3.0, 3.0, 3.0]
    """
    most = np.asarray(most, float)[:, None]
    first = np.arange(1.0, 17.0)
    later = 16.0 * np.maximum(most / 16.0, 1.0) ** (np.arange(1, _PLACES - 15) / (_PLACES - 16))
    return np.minimum(np.concatenate([np.broadcast_to(first, (len(most), 16)), later], axis=1), most)


def load_prices(
    case: ServingCase, sizes: ServingSizes[Any], policy: Policy, moments: LengthMoments, most: Any, batches: Batches
) -> LoadPrices:
    """Return the prices of layouts under one policy, each for up to so many sequences of a batch."""
    if policy.mixed and moments.new_tokens:
        # No prompt starts beside sequences whose tokens leave no room for it, guesses among them.
        start = 1.0 if policy.chunked else moments.new_tokens
        most = np.minimum(most, max((policy.step_tokens - start) // verified_tokens(case), 1.0))
    counts = places(most * batches.every[:, 0]) / batches.every
    # One batch of a pipeline may have the sequences of all.
    known = np.array(grid(int(np.max(most * batches.lanes)), 8, 16), float)
    one, context = np.ones(len(known)), np.full(len(known), moments.context)
    decoding = EngineStep(phase="decode", sequences=known, tokens=one, context=context)
    whole, cached, sampled, _ = _priced(case, sizes, len(counts), decoding)
    guessed = 0.0 * whole
    if case.draft:
        alone, read, *_ = _priced(replace(case, draft=None), sizes, len(counts), decoding)
        guessed = whole - cached - alone + read
    one_token = decoding if runs_as_prompts(case) else None
    (prompts, flat), kept = _prompt_prices(case, sizes, len(counts), (policy, moments), one_token), cached
    if one_token:
        kept = np.maximum(flat - prompts.start, cached)
    steps = _Steps(
        policy=policy, known=known, decode=whole, sampled=sampled, kept=kept + guessed,
        host=case.engine.host.sequence_seconds * (0.0 if case.efficiencies.ideal else 1.0),
        launching=launching_seconds(case), verified=verified_tokens(case), prompts=prompts,
    )  # fmt: skip
    lasting = steps.of(counts, moments, batches)
    if prompts.highest is None:
        return lasting
    fast = replace(prompts, linear=prompts.highest)
    return replace(lasting, burst=burst_of(case), highest=replace(steps, prompts=fast).of(counts, moments, batches))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Steps:
    """Steps at known numbers of sequences, and prompts: what prices of places are made of."""

    policy: Policy
    known: Any
    decode: Any
    sampled: Any
    kept: Any
    """What of a decode step is its own beside prompts: what reads the cache, and guesses."""
    host: float
    launching: float
    """Seconds of the host to make and launch a step."""
    verified: int
    prompts: PromptPrices

    def of(self, counts: Any, moments: LengthMoments, batches: Batches) -> LoadPrices:
        """Return the prices at numbers of sequences."""
        decode = between(counts, self.known, self.decode)
        decoding = counts * self.verified if self.policy.mixed else 0.0 * counts
        room = np.maximum(self.policy.step_tokens - decoding, 1.0)
        every = [self._added(index, new, counts, room) for index, (new, _) in enumerate(moments.prompts)]
        columns = {f.name: np.stack([getattr(one, f.name) for one in every]) for f in fields(Added)}
        added = Added(**columns)
        mean, new = added.seconds.mean(axis=0), max(moments.new_tokens, 1.0)
        many = counts.shape[-1]
        together = room / new if self.policy.chunked else np.maximum(room // new, 1.0)
        growth = between(counts * 1.1 + 1, self.known, self.decode) / between(counts, self.known, self.decode) - 1
        growth = growth * counts / (0.1 * counts + 1)
        launching = self.launching / decode
        # A batch beside one that has all sequences gets those who come in its own step, which is so much shorter.
        short = between(1 + 0 * counts, self.known, self.decode) / between(
            counts * batches.many, self.known, self.decode
        )
        pace = growth, launching, np.minimum(short, 1.0)
        full = fullest(counts, batches, moments, self.policy, pace) if batches.any else counts
        most = counts[:, -1:] * np.where(batches.piped & self.policy.shared_places, batches.many, 1.0)
        full = np.where(batches.many > 1, np.minimum(full, most), counts)
        longest = between(full, self.known, self.decode)
        cycles = CycleSteps(
            policy=self.policy, verified=self.verified, prompts=self.prompts, added=added, counts=counts,
            decode=longest, batches=batches, launching=launching,
        )  # fmt: skip
        pieces, whole = np.ceil(added.pieces - 1e-9), np.floor(added.pieces)
        each = [self._alone(i, new, batches) for i, (new, _) in enumerate(moments.prompts)]
        alone, in_turn = (sum(seconds[i] for seconds in each) / len(each) for i in (0, 1))
        return LoadPrices(
            counts=counts,
            decode=decode,
            launching=launching,
            added=named_each(
                mean, lambda i: f"{counted(i // many + 1, 'prompt')} in a step of {_sequences_at(counts, i % many)}"
            ),
            short=added.short.mean(axis=0),
            unfilled=added.unfilled.mean(axis=0),
            ahead=added.ahead.mean(axis=0),
            spread=moments.within_classes
            * (1 + (added.seconds[:, 0].var(axis=0) / mean[0] ** 2 if mean[0].all() else np.zeros_like(counts))),
            pieces=pieces.mean(axis=0),
            behind=(whole * (added.pieces - (whole + 1) / 2)).mean(axis=0),
            together=together,
            alone=alone,
            following=np.asarray(alone, float) / np.maximum(np.asarray(in_turn, float), 1e-300),
            cycles=cycles.tables(moments),
        )

    def _added(self, index: int, new: float, counts: Any, room: Any) -> Added:
        """Return what 1, 2, ... prompts of a class add."""
        policy, prompts, zero = self.policy, self.prompts, np.zeros_like(counts)
        if not new:
            none = np.stack([zero] * PROMPTS)
            return Added(
                seconds=none, short=none, unfilled=none, ahead=zero, experts=none, pieces=zero, size=zero, apart=zero,
                last=np.stack([zero] * 3),
            )  # fmt: skip
        running = counts if policy.mixed else zero
        decoding = running * self.verified
        size = np.minimum(new, room) if policy.chunked else np.full_like(room, new)
        steps, fit = new / size, np.maximum(room / size if policy.chunked else np.floor(room / size), 1.0)
        kept, alone = zero, zero
        if policy.mixed:
            kept, alone = (between(counts, self.known, one) for one in (self.kept, self.decode))

        def step(many: Any) -> Any:
            prices = prompts.step(index, decoding + many * size, many)
            prices = prices + between(running + many, self.known, self.sampled)
            return prices + self.host * np.maximum(running + many - 1, 0)

        def longer(many: Any) -> Any:
            # No step is shorter for what it has more: waves of tiles are of tokens that are priced apart.
            floor = np.maximum(prompts.floor(decoding + many * size), alone)
            return np.maximum(step(many) + kept, floor) - alone

        before = prompts.expert(decoding) if policy.mixed else 0.0
        costs, experts, short, unfilled = [], [], [], []
        for k in range(1, PROMPTS + 1):
            many = np.minimum(k, fit)
            times = np.maximum(k / fit, 1.0) * steps
            cost = longer(many) * times
            run = f"{counted(k, 'prompt')} of {new:.0f} tokens beside "
            costs.append(named_each(cost, lambda i, run=run: run + _sequences_at(counts, i)))  # type: ignore[misc]
            experts.append((prompts.expert(decoding + many * size) - before) * times)
            part = np.where(steps > 1, k * steps % 1, 0.0)
            short.append(np.where(part > 0, longer(part) - part * longer(1.0), 0.0))
            unfilled.append(-(k * new / room) % 1)
        ahead = np.maximum(step(fit) + kept - alone, 0.0) * PROMPTS / fit * steps
        whole = np.floor(steps)
        rest = new - whole * size
        # Of m pieces that begin one after another the places have a variance of (m m - 1) / 12 pieces.
        apart = 2 * prompts.apart[:, index, None] / np.maximum(steps - 1, 1.0) * np.sqrt((whole**2 - 1) / 12)
        last = (longer(rest / size), prompts.expert(decoding + rest) - before, rest)
        return Added(
            seconds=np.stack(costs), short=np.stack(short), unfilled=np.stack(unfilled), ahead=ahead,
            experts=np.stack(experts), pieces=steps, size=size, apart=apart,
            last=np.stack([np.where(rest >= 1, one, 0.0) for one in last]),
        )  # fmt: skip

    def _alone(self, index: int, new: float, batches: Batches) -> tuple[Any, Any]:
        """Return seconds of a prompt of a class in steps of its own; its tokens go to the experts of all groups.

        Where its pieces follow one another through the stages of a pipeline, and of each after the one before.
        """
        prompts, zero = self.prompts, np.zeros_like(batches.many)
        if not new:
            return zero, zero
        size = min(new, self.policy.step_tokens) if self.policy.chunked else new
        spread = batches.groups[:, None]

        def step(tokens: float, share: float) -> Any:
            cost = prompts.step(index, zero + tokens, share) + between(zero + 1, self.known, self.sampled)
            elsewhere = prompts.expert(tokens / spread) - prompts.expert(zero + tokens)
            return np.maximum(cost, prompts.floor(zero + tokens)) + np.where(spread > 1, elsewhere, 0.0)

        whole, rest = divmod(new, size)
        named = named_each(step(size, 1.0), lambda _: f"a prompt of {size:.0f} tokens in a step of its own")
        last = step(rest, rest / size) if rest >= 1 else zero
        seconds = whole * named + last
        if not (self.policy.chunked and batches.piped.any()):
            return seconds, seconds
        # After the first stage of all of them come as many stages more of the longest (Pinedo, proportionate flow
        # shops): the last full one, which reads the most of the cache, or what is left.
        lanes, apart = batches.lanes[:, None], prompts.apart[:, index, None] / max(new - size, 1.0)
        longest = named + apart * (2 * (whole - 1) * size - new + size)
        longest = np.maximum(longest, last + apart * rest / size * (new - rest))
        return seconds / lanes + longest * (1 - 1 / lanes), seconds


def _prompt_prices(
    case: ServingCase,
    sizes: ServingSizes[Any],
    rows: int,
    loaded: tuple[Policy, LengthMoments],
    one_token: EngineStep[Any] | None,
) -> tuple[PromptPrices, Any]:
    """Return the prices of prompts of each layout, and what sequences have of their own as prompts of `one_token`.

    The middle piece stands for all of a prompt that is cut. All steps with prompts are one column: its operators are
    made once, but for those of one token beside longer ones.
    """
    policy, moments = loaded
    tokens = np.array(grid(policy.pass_tokens, 6, 8), float)
    pieces = [min(new, policy.step_tokens) if policy.chunked else new for new, _ in moments.prompts]
    # Attention of prompts that are cut grows with the square of their tokens, of those of a class with the mean square.
    before = [
        past + (new * (moments.within_classes if size < new else 1.0) - size) / 2
        for size, (new, past) in zip(pieces, moments.prompts, strict=True)
    ]
    sizes_new = [max(round(size), 1) for size in pieces]
    new_of = np.array([*sizes_new, *sizes_new], float)
    past_of = np.array([*before, *(past for _, past in moments.prompts)], float)
    cut = ubatches_of(case, sizes)
    priced = cut.pieces(new_of, past_of) if cut.tokens else (new_of, past_of)
    news, pasts = np.concatenate([tokens, [1.0], priced[0]]), np.concatenate([0 * tokens, [0.0], priced[1]])
    end, last, many, burst = len(tokens), len(news), len(pieces), burst_of(case)
    clocks: Any = 1.0
    if burst and moments.new_tokens:
        clocks = np.concatenate([1 + 0 * news, 1 + burst.share + 0 * tokens])
        news, pasts = np.concatenate([news, tokens]), np.concatenate([pasts, 0 * tokens])
    each = np.ones(len(news))
    step: EngineStep[Any] = EngineStep(phase="prefill", sequences=each, tokens=news, context=pasts, clock=clocks)
    seconds, cached, sampled, experts = _priced(launched_ahead(case), sizes, rows, step)
    one = np.ones(1)
    shortest = EngineStep(phase="prefill", sequences=one, tokens=one, context=0 * one)
    launched = _priced(never_replayed(case), sizes, rows, shortest)[0]
    attention = _whole_pieces(cut, new_of, cached[:, end + 1 : last], cached[:, end, None])
    prices = PromptPrices(
        tokens=tokens,
        linear=(seconds - cached - sampled)[:, :end],
        experts=experts[:, :end],
        start=cached[:, end, None],
        attention=attention[:, :many],
        apart=np.maximum(attention[:, :many] - attention[:, many:], 0.0),
        # A step that is replayed has no host behind its device, as none of those launched ahead.
        least=seconds[:, end : end + 1] if replayed_tokens(case) else launched,
        launched=launched,
        replayed=replayed_tokens(case),
        ubatches=cut,
        highest=(seconds[:, last:] - cached[:, :end]) - sampled[:, :end] if len(news) > last else None,
    )
    if one_token is None:
        return prices, None
    single_tokens = replace(one_token, phase="prefill")
    return prices, _priced(launched_ahead(beside_prompts(case)), sizes, rows, single_tokens)[1]


def _whole_pieces(cut: Ubatches, sizes: Any, attention: Any, start: Any) -> Any:
    """Return seconds of attention of pieces from those of their ubatches; launches of later ones count with tokens."""
    if not cut.tokens:
        return attention
    whole, _, last = cut.split(sizes)
    full, rest = attention[:, : len(sizes)], attention[:, len(sizes) :]
    return start + whole * (full - start) + last * (rest - start)
