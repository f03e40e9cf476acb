"""What the closed form reads of an engine's steps: seconds by the sequences that decode, for one case or many layouts.

A column has a row for each layout and a place for each number of sequences: all up to sixteen, then eight to a
doubling. Some eighty steps a layout are priced, all in three calls of `step_cost`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from shardwise.plans import Plan
from shardwise.records import dataclass
from shardwise.serving._case import ServingCase
from shardwise.serving._cost_model import engine_cost_model
from shardwise.serving._ledger import EngineStep
from shardwise.serving._policy import Policy
from shardwise.serving._sizes import ServingSizes, taken
from shardwise.serving._step import decode_cost, step_cost
from shardwise.serving.load._requests import LengthMoments
from shardwise.serving.load._steps import grid, verified_tokens

# Prompts of one step that are priced apart; more cost in proportion.
PROMPTS = 8
_PLACES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPrices:
    """Seconds of steps while `counts` sequences decode, of contexts of the mean length; arrays [layout, count]."""

    counts: Any
    decode: Any
    added: Any
    """What 1, 2, ... prompts add to a step: [prompts, layout, count]."""
    experts: Any
    """What of it is products of experts."""
    spread: Any
    """Mean square of what a prompt adds over the square of the mean."""
    pieces: Any
    """Steps that a prompt is spread over."""
    together: Any
    """Prompts of the mean length that a step has room for, less than 1 where one is cut."""


def _priced(case: ServingCase, sizes: ServingSizes[Any], rows: int, step: EngineStep[Any]) -> tuple[Any, Any, Any, Any]:
    """Return seconds of steps, of what reads or writes the cache, of sampling and of experts, as [layout, step]."""
    many = len(step.context) if isinstance(step.context, np.ndarray) else 1
    each = taken(sizes, np.repeat(np.arange(rows), many))
    names = ("sequences", "tokens", "context")
    columns: dict[str, Any] = {name: np.tile(getattr(step, name), rows) for name in names}
    wide = replace(step, **columns)
    costs = replace(engine_cost_model(case, each), decoding=step.phase == "decode")
    cost = (decode_cost if step.phase == "decode" else step_cost)(case, each, wide, costs)
    experts = sum(seconds for name, seconds in cost.operators.items() if ".experts." in name)
    parts = (cost.seconds, cost.attention + cost.cache_write, cost.sampling, experts)
    return tuple(np.broadcast_to(np.asarray(part, float), rows * many).reshape(rows, many) for part in parts)  # type: ignore[return-value]


def _between(at: Any, known: Any, values: Any) -> Any:
    """Return rows of values [layout, known] interpolated at places [layout, ...] between the known ones."""
    i = np.clip(np.searchsorted(known, at, side="right") - 1, 0, max(len(known) - 2, 0))
    j = np.minimum(i + 1, len(known) - 1)
    share = np.clip((at - known[i]) / np.maximum(known[j] - known[i], 1e-9), 0.0, None)
    low, high = np.take_along_axis(values, i, 1), np.take_along_axis(values, j, 1)
    return low + share * (high - low)


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
    case: ServingCase, sizes: ServingSizes[Any], policy: Policy, moments: LengthMoments, most: Any
) -> LoadPrices:
    """Return the prices of layouts under one policy, each for up to so many sequences."""
    counts = places(most)
    known = np.array(grid(int(np.max(most)), 8, 16), float)
    one, context = np.ones(len(known)), np.full(len(known), moments.context)
    decoding = EngineStep(phase="decode", sequences=known, tokens=one, context=context)
    whole, cached, sampled, _ = _priced(case, sizes, len(counts), decoding)
    decode, attention = _between(counts, known, whole), _between(counts, known, cached)
    host = case.engine.host.sequence_seconds * (0.0 if case.efficiencies.ideal else 1.0)
    prompts = _prompt_prices(case, sizes, len(counts), policy, moments)
    beside = counts * verified_tokens(case) if policy.mixed else 0.0 * counts
    guesses = 0.0 * counts
    if case.draft:
        alone, read, *_ = _priced(replace(case, draft=None), sizes, len(counts), decoding)
        guesses = _between(counts, known, whole - cached - alone + read)
    room = np.maximum(policy.step_tokens - beside, 1.0)
    added, pieces, routed = [], [], []
    for index, (new, _) in enumerate(moments.prompts):
        if not new:
            added.append([np.zeros_like(counts)] * PROMPTS)
            routed.append(added[-1])
            pieces.append(np.zeros_like(counts))
            continue
        size = np.minimum(new, room) if policy.chunked else np.full_like(room, new)
        steps, fit = new / size, np.maximum(room / size if policy.chunked else np.floor(room / size), 1.0)
        costs, experts = [], []
        for k in range(1, PROMPTS + 1):
            many = np.minimum(k, fit)
            step = prompts.step(index, beside + many * size, many)
            step = step + _between(beside + many, known, sampled) + host * np.maximum(beside + many - 1, 0)
            apart = prompts.expert(beside + many * size) - prompts.expert(beside)
            experts.append(apart * np.maximum(k / fit, 1.0) * steps)
            costs.append(
                (step + attention + guesses - decode if policy.mixed else step) * np.maximum(k / fit, 1.0) * steps
            )
        added.append(costs)
        routed.append(experts)
        pieces.append(np.ceil(steps - 1e-9))
    each = np.array(added)
    mean = each.mean(axis=0)
    new = max(moments.new_tokens, 1.0)
    return LoadPrices(
        counts=counts,
        decode=decode,
        added=mean,
        experts=np.array(routed).mean(axis=0),
        spread=(each[:, 0] ** 2).mean(axis=0) / mean[0] ** 2 if mean[0].all() else np.ones_like(counts),
        pieces=np.array(pieces).mean(axis=0),
        together=room / new if policy.chunked else np.maximum(room // new, 1.0),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _PromptPrices:
    """Seconds of prompts: all but attention by the tokens of a step, attention of a piece of each class of them."""

    tokens: Any
    linear: Any
    experts: Any
    start: Any
    attention: Any

    def expert(self, tokens: Any) -> Any:
        """Return seconds of products of experts in a step of so many tokens."""
        return _between(tokens, self.tokens, self.experts)

    def step(self, index: int, tokens: Any, many: Any) -> Any:
        """Return seconds of a step of so many tokens with so many prompts of a class, whose launches count once."""
        reads = self.attention[:, index, None]
        return _between(tokens, self.tokens, self.linear) + self.start + many * (reads - self.start)


def _prompt_prices(
    case: ServingCase, sizes: ServingSizes[Any], rows: int, policy: Policy, moments: LengthMoments
) -> _PromptPrices:
    """Return the prices of prompts of each layout; the middle piece stands for all of a prompt that is cut."""
    tokens = np.array(grid(policy.step_tokens, 6, 8), float)
    pieces = [min(new, policy.step_tokens) if policy.chunked else new for new, _ in moments.prompts]
    before = [past + (new - size) / 2 for size, (new, past) in zip(pieces, moments.prompts, strict=True)]
    news = np.array([*tokens, 1.0, *(max(round(size), 1) for size in pieces)])
    pasts = np.array([*(0 * tokens), 0.0, *before])
    step = EngineStep(phase="prefill", sequences=np.ones(len(news)), tokens=news, context=pasts)
    seconds, cached, sampled, experts = _priced(case, sizes, rows, step)
    end = len(tokens)
    return _PromptPrices(
        tokens=tokens,
        linear=(seconds - cached - sampled)[:, :end],
        experts=experts[:, :end],
        start=cached[:, end, None],
        attention=cached[:, end + 1 :],
    )


# The expected most of normal values, in standard deviations, by doublings of their number (Tippett 1925).
_MOST_OF = (0.0, 0.564, 1.029, 1.424, 1.766, 2.070, 2.344, 2.594)


def in_step(prices: LoadPrices, policy: Policy, moments: LengthMoments, groups: Any) -> LoadPrices:
    """Return the prices of a group that steps with others: a decode step is that of the fullest.

    Where requests are taken in turns each group has them with 1 / G of the variance, as far as outputs are alike.
    """
    groups = np.asarray(groups, float)
    if not (groups > 1).any():
        return prices
    most = np.interp(np.log2(groups), range(len(_MOST_OF)), _MOST_OF)[:, None]
    share = (1 - moments.overlap * (1 - 1 / groups))[:, None] if policy.balances == "turns" else 1 / groups[:, None]
    fullest = prices.counts + most * np.sqrt(share * prices.counts)
    rows = zip(fullest, prices.counts, prices.decode, strict=True)
    return replace(prices, decode=np.array([np.interp(n, counts, decode) for n, counts, decode in rows]))


def groups_of(plan: Plan, has_experts: bool) -> int:
    """Return the groups of attention data parallelism that share the experts of a replica."""
    return max(plan.ep * plan.etp // plan.tp, 1) if has_experts else 1


def lanes_of(plan: Plan) -> int:
    """Return the batches that a replica has in flight: one a pipeline stage; one where attention groups step together.

    github.com/vllm-project/vllm vllm/v1/engine/core.py, batch_queue of as many as pipeline stages.
    """
    return plan.pp if plan.ep * plan.etp <= plan.tp else 1
