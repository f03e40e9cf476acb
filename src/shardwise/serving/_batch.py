"""From one serving case and the sizes of its plans to seconds and bytes.

A static batch is prefill steps, all full but the last, and the mean decode step of its generation, whether sizes are
plain numbers, columns of plans or traced numbers. Formulas: docs/formulas.md, inference.
"""

from __future__ import annotations

import math
from typing import Generic

from shardwise.ledger.number import X, above, ceil, is_plain, maximum, minimum
from shardwise.ledger.traced import named
from shardwise.records import dataclass, replace
from shardwise.serving._burst import burst_notes
from shardwise.serving._cache import SequenceCache, breakpoints
from shardwise.serving._captured import captured_notes
from shardwise.serving._case import ServingCase
from shardwise.serving._cost_model import EngineCostModel, engine_cost_model
from shardwise.serving._ledger import EngineStep, StepLedger, step_ledger
from shardwise.serving._memory import StageBytes, caches_of, stages_bytes
from shardwise.serving._policy import cuts_prompts
from shardwise.serving._routing import routing_notes
from shardwise.serving._sizes import ServingSizes
from shardwise.serving._speculation import tokens_per_whole_step
from shardwise.serving._step import StepCost, decode_cost, in_turn, step_cost, weighted


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCost(Generic[X]):
    """Seconds and bytes of a plan or of a column of plans; `decode` is the mean step of the generation.

    Where steps make several tokens each, `decode` is the share of a step that one of them takes.
    """

    prefill: StepCost[X]
    decode: StepCost[X]
    memory: tuple[StageBytes[X], ...]
    caches: tuple[tuple[SequenceCache[X], ...], ...]
    request_seconds: X
    sizes: ServingSizes[X]
    family: str
    notes: tuple[str, ...]

    @property
    def on_devices(self) -> tuple[StageBytes[X], ...]:
        """Bytes of the stages that devices hold."""
        return tuple(m for m, stage in zip(self.memory, self.sizes.stages, strict=True) if not stage.on_host)


def _alike(one: EngineStep[X], other: EngineStep[X]) -> bool:
    """Return whether two steps are surely the same: of plain numbers that are equal."""
    sizes = ((one.sequences, other.sequences), (one.tokens, other.tokens), (one.context, other.context))
    return all(isinstance(b, (int, float)) and is_plain(a, b) for a, b in sizes)


def prefill_steps(case: ServingCase, sizes: ServingSizes[X]) -> list[tuple[EngineStep[X], X]]:
    """Return the steps of a prefill, each with how often it runs: those that `step_tokens` fill, and the last one.

    Engines that cut prompts fill every step, the others run whole prompts while they fit, and else cut them too. Of a
    prompt that needs several steps a piece attends to those before it: that grows linearly, so that one at the mean
    context stands for all full ones (Sarathi-Serve, arXiv:2403.02310).
    """
    new, past, batch = case.new_input_tokens, case.job.prefix_tokens, sizes.batch
    limit, one = case.step_tokens, 0 * batch + 1
    if not limit:
        return [(EngineStep(phase="prefill", sequences=batch, tokens=new, context=past), one)]
    if limit < new:
        full = ceil(batch * new / limit) - 1
        rest = batch * new - full * limit
        # Tokens before those of the full steps: of all prompts, less those of the last piece of the last one.
        before = (batch * (new * new / 2) - rest * (new - rest / 2)) / (full * limit) - limit / 2
        piece = EngineStep(phase="prefill", sequences=one, tokens=0 * batch + limit, context=past + before)
        last = EngineStep(phase="prefill", sequences=one, tokens=rest, context=past + new - rest)
        return [(piece, full), (last, one)]
    together = limit if cuts_prompts(case.engine.name) else limit // new * new
    full = ceil(batch * new / together) - 1
    # Plain numbers see that one step is enough.
    rest = above(full, 0, batch - full * (together / new), batch)
    last = EngineStep(phase="prefill", sequences=rest, tokens=new, context=past)
    if is_plain(full, 0):
        return [(last, one)]
    filled = EngineStep(phase="prefill", sequences=0 * batch + together / new, tokens=new, context=past)
    return [(filled, full), (last, one)]


def largest_step(case: ServingCase, sizes: ServingSizes[X]) -> EngineStep[X]:
    """Return the prefill step with the most tokens, for which engines reserve working memory at start-up.

    It has all prompts, or as many tokens as a step may have where those are fewer or the engine runs such a step to
    measure it (`ServingCase.profiled`). Where they are less than one prompt it is the last piece of it.
    """
    new, past, limit = case.new_input_tokens, case.job.prefix_tokens, case.step_tokens
    if limit and limit < new:
        one = 0 * sizes.batch + 1
        return EngineStep(phase="prefill", sequences=one, tokens=limit, context=past + new - limit)
    batch = minimum(sizes.batch, limit / new) if limit else sizes.batch
    if case.profiled.step_tokens:
        # vllm/engine/arg_utils.py: max_num_batched_tokens is at most max_num_seqs x max_model_len.
        most = maximum(sizes.batch, case.profiled.sequences) * case.job.total_tokens
        batch = minimum(most, limit) / new
    return EngineStep(phase="prefill", sequences=batch, tokens=new, context=past)


def decode_contexts(first: int, last: int, breaks: set[int]) -> list[tuple[float, float]]:
    """Return pairs (context, weight): decode steps at these contexts have the mean of all steps of the generation.

    Between the windows of a model the cost of a step is linear in the context, so that the step in the middle of each
    such piece stands for all of it.

    >>> decode_contexts(100, 109, {105})
    [(102.0, 0.5), (107.0, 0.5)]
    """
    edges = sorted(b - 1 for b in breaks if first < b - 1 < last)
    groups, low = [], first
    for high in (*edges, last):
        groups.append(((low + high) / 2, (high - low + 1) / (last - first + 1)))
        low = high + 1
    return groups


def decode_steps(case: ServingCase, sizes: ServingSizes[X]) -> list[tuple[EngineStep[X], float]]:
    """Return steps whose weighted mean is the mean one of the generation: step k reads input + k - 1 cached tokens.

    None where nothing is generated; without a cache step k runs all those tokens again (`again_steps`).
    """
    job = case.job
    if not job.output_tokens:
        return []
    if not job.use_kv_cache:
        return again_steps(case, sizes)
    last = max(job.input_tokens, job.input_tokens + job.output_tokens - 2)
    contexts = decode_contexts(job.input_tokens, last, breakpoints(case.model.kinds))
    return [(EngineStep(phase="decode", sequences=sizes.batch, tokens=1, context=at), share) for at, share in contexts]


def last_step(case: ServingCase, sizes: ServingSizes[X]) -> EngineStep[X]:
    """Return the step with the most tokens before it: the last of those that stand for a generation."""
    if case.job.use_kv_cache:
        return decode_steps(case, sizes)[-1][0]
    tokens = case.job.total_tokens - 1
    return EngineStep(phase="prefill", sequences=sizes.batch, tokens=tokens, context=0)


def _name_of(step: EngineStep[X]) -> str:
    return f"step at {step.context:g} tokens" if step.phase == "decode" else f"step of {step.tokens:g} tokens"


def spread(first: int, last: int) -> list[tuple[float, float]]:
    """Return (number, weight) whose weighted mean of a cubic is its mean over all whole numbers from first to last.

    Two points of the mean and the variance of the series, n whole numbers: (n^2 - 1) / 12.

    >>> points = spread(10, 20)
    >>> round(sum(w * x**3 for x, w in points)), sum(x**3 for x in range(10, 21)) // 11
    (3825, 3825)
    """
    middle, count = (first + last) / 2, last - first + 1
    away = math.sqrt((count * count - 1) / 12)
    return [(middle - away, 0.5), (middle + away, 0.5)] if away else [(middle, 1.0)]


def again_steps(case: ServingCase, sizes: ServingSizes[X]) -> list[tuple[EngineStep[X], float]]:
    """Return the steps of a generation without a cache: each runs the input and what was generated, with one more.

    Its work is quadratic in the tokens between windows, for which two points stand exactly (`spread`).
    """
    job = case.job
    first, last = job.input_tokens + 1, job.input_tokens + max(job.output_tokens - 1, 1)
    edges = sorted(b for b in breakpoints(case.model.kinds) if first <= b < last)
    steps, low = [], first
    for high in (*edges, last):
        weight = (high - low + 1) / (last - first + 1)
        steps += [(at, share * weight) for at, share in spread(low, high)]
        low = high + 1
    return [(EngineStep(phase="prefill", sequences=sizes.batch, tokens=at, context=0), share) for at, share in steps]


def reserved_bytes(
    case: ServingCase,
    sizes: ServingSizes[X],
    phases: tuple[bool, bool] = (True, True),
    known: dict[object, StepLedger[X]] | None = None,
) -> tuple[StageBytes[X], ...]:
    """Return the bytes of every stage of a replica that runs (prefill, decode).

    Steps of plain numbers that jobs have in common but for their lengths and their batch are taken from those `known`.
    """
    prefills, decodes = phases
    steps = [largest_step(case, sizes)] if prefills else []
    if decodes and case.job.output_tokens:
        steps.append(last_step(case, sizes))
    if known is None:
        return stages_bytes(case, sizes, [step_ledger(case, sizes, step) for step in steps])
    ledgers = []
    for step in steps:
        # Whole numbers and others are told apart: those beyond 2**53 stay exact.
        key = step, type(step.sequences), type(step.tokens), type(step.context)
        if key not in known:
            known[key] = step_ledger(case, sizes, step)
        ledgers.append(known[key])
    return stages_bytes(case, sizes, ledgers)


def request_seconds(case: ServingCase, cost: BatchCost[X]) -> tuple[X, X]:
    """Return seconds to the first token of one request, and between its tokens, where the replica's batch stays full.

    Engines that batch continuously let a request in as another one ends. Its seconds in all are those of the batch
    (Little's law: as many prompts and decode steps run for every request that ends), but its own prompt runs at once:
    after half a decode step, and after prompts that are under way (M/D/1). Those of the others fall between its tokens.
    """
    whole, each, sizes = cost.request_seconds, cost.decode.seconds, cost.sizes
    if not case.engine.prefill.continuous_batching or not case.job.use_kv_cache:
        return cost.prefill.seconds, each
    one = replace(sizes, batch=0 * sizes.batch + 1)
    costs = engine_cost_model(case, one)
    steps = [(step_cost(case, one, step, costs), count) for step, count in prefill_steps(case, one)]
    alone = in_turn(case, steps, "prompt").seconds
    others, prompt = 1 - 1 / sizes.batch, cost.prefill.seconds / sizes.batch
    # With tokens to generate: else all prompts come at once, of whom one waits for half on average.
    decoding = each * tokens_per_whole_step(case.job) if case.job.output_tokens else 0 * each
    busy = others * sizes.batch * prompt / whole
    queued = named(busy * prompt / (2 * (1 - busy)), "prompts under way")
    first = named(alone, "own prompt") + named(others * decoding / 2, "rest of a decode step") + queued
    further = max(case.job.output_tokens - 1, 0)
    # A prompt alone may take as long as all at once, where it is launches that take time; tokens never outrun steps.
    return first, named(maximum((whole - first) / further, each), "decode step with prompts") if further else each


def evaluate(case: ServingCase, sizes: ServingSizes[X], costs: EngineCostModel[X] | None = None) -> BatchCost[X]:
    """Return seconds and bytes for the sizes of one plan, a column of plans, or traced sizes.

    `costs` are those of the device and its links where they are not as the case says.
    """
    costs = engine_cost_model(case, sizes) if costs is None else costs
    decoding = replace(costs, decoding=True)
    prompts = [(step, step_ledger(case, sizes, step), count) for step, count in prefill_steps(case, sizes)]
    each = [(step_cost(case, sizes, step, costs, ledger), count) for step, ledger, count in prompts]
    prefill = in_turn(case, each, "prefill")
    # Working memory is that of the largest step, which is the only one where prompts are not cut.
    step, ledger, _ = prompts[-1]
    if case.step_tokens and not _alike(step, largest := largest_step(case, sizes)):
        ledger = step_ledger(case, sizes, largest)
    ledgers, steps, made = [ledger], [], tokens_per_whole_step(case.job)
    for one, share in decode_steps(case, sizes):
        ledger = step_ledger(case, sizes, one)
        if case.job.speculative_method and one.phase == "decode":
            cost = decode_cost(case, sizes, one, decoding)
        else:
            cost = step_cost(case, sizes, one, decoding if one.phase == "decode" else costs, ledger)
        steps.append((replace(cost, seconds=named(cost.seconds, _name_of(one))), share / made))
    if steps:
        ledgers.append(ledger if case.job.use_kv_cache else step_ledger(case, sizes, last_step(case, sizes)))
        decode = weighted(steps, "decode step" if case.job.use_kv_cache else "step without a cache")
    else:
        decode = weighted([(prefill, 0.0)], "nothing is generated")
    request = prefill.seconds + max(case.job.output_tokens - 1, 0) * decode.seconds
    return BatchCost(
        prefill=prefill,
        decode=decode,
        memory=stages_bytes(case, sizes, ledgers),
        caches=caches_of(case, sizes),
        request_seconds=named(request, "request"),
        sizes=sizes,
        family=costs.rates.family,
        notes=(
            *routing_notes(case.model),
            *captured_notes(case, sizes),
            *costs.rates.assumptions,
            *(note for _, one in costs.narrow for note in one.assumptions),
            *costs.network.assumptions,
            *burst_notes(case),
        ),
    )
