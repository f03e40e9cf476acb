"""From one serving case and the sizes of its plans to seconds and bytes.

The operators of a phase are added up (`_fold`) into an engine step, steps into the prefill and into the mean decode
step, whether sizes are plain numbers, columns of plans or traced numbers. Formulas: docs/formulas.md, inference; a
step of a pipeline is the sum of its stages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Generic

from shardwise.cost import collective_seconds
from shardwise.ledger.number import X, above, ceil, largest, maximum, minimum, total
from shardwise.ledger.op import Collective
from shardwise.ledger.traced import named
from shardwise.serving._cache import Cache, breakpoints
from shardwise.serving._case import Case, Step, lines_of, server_of, views_of
from shardwise.serving._fold import Part, Parts, Phase, add, bytes_of, fold, weighted
from shardwise.serving._memory import StageMemory, caches_of, stage_memories
from shardwise.serving._price import Server
from shardwise.serving._sizes import Sizes, Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation(Generic[X]):
    """Seconds and bytes of a plan or of a column of plans; `decode` is the mean step of the generation."""

    prefill: Phase[X]
    decode: Phase[X]
    memory: tuple[StageMemory[X], ...]
    caches: tuple[tuple[Cache[X], ...], ...]
    request_seconds: X
    sizes: Sizes[X]
    family: str
    notes: tuple[str, ...]


def gathered(part: Part[X], weights: X, m: Server[X]) -> Part[X]:
    """Return a part whose weights are sharded over the replicas, with the seconds that it waits for them.

    They are gathered one part ahead; only what takes longer than the work of that part is waited for.

    ZeRO-Inference gathers each layer's weights before it runs (deepspeed.ai, ZeRO-Inference, 2022-09).
    """
    seconds = collective_seconds(m.network, "all_gather", weights, m.spans["dp"])
    waits = maximum(seconds - part.seconds, 0.0)
    return replace(
        part,
        seconds=part.seconds + named(waits, "waiting for weights"),
        exposed={**part.exposed, "dp": waits},
        hidden={**part.hidden, "dp": seconds - waits},
    )


def parts_of(case: Case, z: Sizes[X], step: Step, m: Server[X]) -> Parts[X]:
    """Return the model folded for one step."""
    views = views_of(case, z, step)
    lines = lines_of(case, views)
    found = [fold(ops, m, label) for label, ops in lines]
    if case.job.shard_weights:
        held = bytes_of(case, lines, 0 * z.tp)
        found = [gathered(part, own.weights, m) for part, own in zip(found, held, strict=True)]
    *kinds, before, after = found
    boundary = views.wide.residual("boundary", case.model.hidden, "").size_bytes
    message: Collective[X] = Collective(axis="pp", verb="send", size_bytes=boundary)
    hand_over = 0.0 if case.efficiencies.ideal else case.engine.stage_seconds
    return Parts(
        kinds=tuple(kinds),
        embedding=before,
        head=after,
        send=named(m.message(message) + hand_over, "stage boundary message"),
    )


def _slowest(parts: Parts[X], stages: tuple[Stage[X], ...]) -> X:
    """Return seconds of the slowest stage for one step, its message to the next one included."""
    return largest(
        total((n * k.seconds for n, k in zip(s.layers, parts.kinds, strict=True)), 0 * parts.send)
        + s.embeds * parts.embedding.seconds
        + s.ends * parts.head.seconds
        + parts.send
        for s in stages
    )


def host_seconds(case: Case, z: Sizes[X], step: Step) -> X:
    """Return seconds that the host adds to one step: of its own, each sequence and block, workers, and launches."""
    e, one = case.engine, 0 * z.tp + 1
    blocks = step.context / e.block_tokens if step.phase == "decode" else 0.0
    doublings = total((above(z.tp, n, one, 0 * one) for n in (1, 2, 4)), 0 * one)
    layers, split = sum(case.model.kinds.values()), above(z.tp, 1, z.tp, 0 * one)
    own = e.step_seconds + layers * (e.layer_seconds + e.split_seconds * split) + e.worker_seconds * doublings
    return own + (e.sequence_seconds + e.block_seconds * blocks) * (step.sequences or z.batch)


def phase_of(case: Case, z: Sizes[X], step: Step, count: X, name: str) -> Phase[X]:
    """Return seconds of `count` equal engine steps; a step passes all stages in turn, and the next ones follow it.

    One pass is the sum of the stages and the p - 1 messages between them, never less than on one stage; the count - 1
    further passes each cost the slowest stage.
    """
    m = server_of(case, z, step.phase == "decode")
    parts = parts_of(case, z, step, m)
    rows = [*zip(case.model.kinds.values(), parts.kinds, strict=True), (1, parts.embedding), (1, parts.head)]
    operators: dict[str, X] = {}
    exposed: dict[str, X] = {}
    hidden: dict[str, X] = {}
    for times, part in rows:
        add(operators, part.operators, count * times)
        add(exposed, part.exposed, count * times)
        add(hidden, part.hidden, count * times)
    sends = (z.pp - 1) * parts.send
    add(exposed, {"pp": count * sends})
    overhead = named((0.0 if case.efficiencies.ideal else 1.0) * host_seconds(case, z, step), "engine step")
    one = total((times * part.seconds for times, part in rows), sends) + overhead
    slowest = _slowest(parts, z.stages)
    # Pieces of a prompt follow one another in groups, each of which runs dry before the next.
    most = case.engine.chunks_together
    ahead = count - (ceil(count / most) if most else 1)
    overlapped = ahead * maximum(one - slowest - overhead, 0.0)
    return Phase(
        seconds=named(count * one - overlapped, name),
        operators=operators,
        exposed=exposed,
        hidden=hidden,
        overhead=count * overhead,
        overlapped=overlapped,
        slowest_stage=slowest + overhead,
        flops=count * total((times * part.flops for times, part in rows), 0 * z.pp),
        moved_bytes=count * total((times * part.moved_bytes for times, part in rows), 0 * z.pp),
    )


def prefill_step(case: Case, z: Sizes[X]) -> tuple[Sizes[X], Step, X]:
    """Return the step of a prefill, its sizes and how often it runs: once, or for `max_batched_tokens` at a time.

    A step takes whole sequences while they fit, else an equal piece of one; a piece attends to those before it,
    and since that grows linearly the middle piece stands for all (Sarathi-Serve, arXiv:2403.02310).
    """
    new, past = case.new_input_tokens, case.job.prefix_tokens
    limit = case.step_tokens
    if not limit:
        return z, Step(phase="prefill", tokens=new, context=past), 0 * z.batch + 1
    if limit >= new:
        together = minimum(z.batch, limit // new)
        count = ceil(z.batch / (limit // new))
        even = minimum(together, z.batch / count)
        whole = Step(phase="prefill", tokens=new, context=past)
        return replace(z, batch=even), whole, count
    pieces = -(-new // limit)
    size = new / pieces
    piece = Step(phase="prefill", tokens=size, context=past + (new - size) / 2, sequences=1)
    return z, piece, z.batch * pieces


def prefill_of(case: Case, z: Sizes[X]) -> Phase[X]:
    """Return seconds of the prefill of a batch."""
    sizes, step, count = prefill_step(case, z)
    return phase_of(case, sizes, step, count, "prefill")


def decode_contexts(first: int, last: int, breaks: set[int]) -> list[tuple[float, float]]:
    """Return pairs (context, weight): decode steps at these contexts have the mean of all steps of the generation.

    Between the windows of a model the cost of a step is linear in the context, so that the step in the middle of each
    such piece stands for all of it.

    >>> decode_contexts(100, 109, {105})
    [(102.0, 0.5), (107.0, 0.5)]
    """
    edges = sorted(b - 1 for b in breaks if first < b - 1 < last)
    found, low = [], first
    for high in (*edges, last):
        found.append(((low + high) / 2, (high - low + 1) / (last - first + 1)))
        low = high + 1
    return found


def decode_steps(case: Case) -> list[tuple[Step, float]]:
    """Return steps whose weighted mean is the mean one of the generation: step k reads input + k - 1 cached tokens.

    None where nothing is generated; without a cache step k runs all those tokens again (`again_steps`).
    """
    job = case.job
    if not job.output_tokens:
        return []
    if not job.use_kv_cache:
        return again_steps(case)
    last = max(job.input_tokens, job.input_tokens + job.output_tokens - 2)
    contexts = decode_contexts(job.input_tokens, last, breakpoints(case.model.kinds))
    return [(Step(phase="decode", tokens=1, context=at), share) for at, share in contexts]


def decode_of(case: Case, z: Sizes[X]) -> Phase[X]:
    """Return the mean decode step over the generation."""
    steps, one = decode_steps(case), 0 * z.batch + 1
    if not steps:
        return _nothing(case, z)
    phases = [(phase_of(case, z, step, one, _name_of(step)), share) for step, share in steps]
    return weighted(phases, "decode step" if case.job.use_kv_cache else "step without a cache")


def _name_of(step: Step) -> str:
    return f"step at {step.context:g} tokens" if step.phase == "decode" else f"step of {step.tokens:g} tokens"


def _nothing(case: Case, z: Sizes[X]) -> Phase[X]:
    """Return the decode step of a case that generates nothing."""
    return weighted([(prefill_of(case, z), 0.0)], "nothing is generated")


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


def again_steps(case: Case) -> list[tuple[Step, float]]:
    """Return the steps of a generation without a cache: each runs the input and what was generated, with one more.

    Its work is quadratic in the tokens between windows, for which two points stand exactly (`spread`).
    """
    job = case.job
    first, last = job.input_tokens + 1, job.input_tokens + max(job.output_tokens - 1, 1)
    edges = sorted(b for b in breakpoints(case.model.kinds) if first <= b < last)
    found, low = [], first
    for high in (*edges, last):
        weight = (high - low + 1) / (last - first + 1)
        found += [(at, share * weight) for at, share in spread(low, high)]
        low = high + 1
    return [(Step(phase="prefill", tokens=at, context=0), share) for at, share in found]


def evaluate(case: Case, z: Sizes[X]) -> Evaluation[X]:
    """Return seconds and bytes for the sizes of one plan, a column of plans, or traced sizes."""
    prefill, decode = prefill_of(case, z), decode_of(case, z)
    m = server_of(case, z, False)
    request = prefill.seconds + max(case.job.output_tokens - 1, 0) * decode.seconds
    return Evaluation(
        prefill=prefill,
        decode=decode,
        memory=stage_memories(case, z),
        caches=caches_of(case, z),
        request_seconds=named(request, "request"),
        sizes=z,
        family=m.rates.family,
        notes=(*m.rates.assumptions, *m.narrow.assumptions, *m.network.assumptions),
    )
