"""The model that guesses tokens ahead of another, beside it on its ranks: its operators, weights and caches."""

from __future__ import annotations

from typing import Any

from shardwise.ledger.number import X, total
from shardwise.ledger.op import within
from shardwise.ops.head import mtp_ops
from shardwise.records import replace
from shardwise.serving._cache import SequenceCache, block_caches
from shardwise.serving._case import ServingCase
from shardwise.serving._gguf import mixed
from shardwise.serving._ledger import EngineStep, StepLedger, step_ledger, views_of, weight_bytes
from shardwise.serving._rates import type_of
from shardwise.serving._sizes import PipelineStage, ServingSizes

_HEADS = ("mtp", "eagle")


def draft_case(case: ServingCase) -> ServingCase | None:
    """Return the case of the draft on the ranks of a case; None where no model guesses.

    Layers that predict more tokens may have a format of their own.
    """
    if case.draft is None:
        return None
    job = replace(case.job, speculative_method="", num_speculative_tokens=0)
    form = dict(case.format.parts).get("mtp", case.format) if case.job.speculative_method == "mtp" else case.format
    return replace(
        case, model=case.draft, draft=None, job=job, format=mixed(form, case.draft), compute=type_of(case, form)
    )


def draft_sizes(case: ServingCase, sizes: ServingSizes[X]) -> ServingSizes[X]:
    """Return the sizes of a draft: all of its layers stand on the last stage."""
    layers: Any = tuple(case.model.kinds.values())
    one = 0 * sizes.pp + 1
    return replace(sizes, pp=one, stages=(PipelineStage(layers=layers, embeds=one, ends=one),))


def draft_ledger(case: ServingCase, sizes: ServingSizes[X], step: EngineStep[X], heads: bool) -> StepLedger[X]:
    """Return the operators of one step of a draft; heads join the hidden states of the model to their embeddings."""
    ledger = step_ledger(case, sizes, step)
    if not heads:
        return ledger
    *kinds, (label, embedding), head = ledger.lines
    joined = mtp_ops(views_of(case, sizes, step).wide, case.model)
    return replace(ledger, lines=(*kinds, (label, (*embedding, *joined)), head))


def draft_weights(case: ServingCase, sizes: ServingSizes[X]) -> X:
    """Return bytes of the weights of a case's draft on a rank of the last stage."""
    draft, zero = draft_case(case), 0 * sizes.tp
    if draft is None:
        return zero
    heads = uses_heads(case)
    own = draft_sizes(draft, sizes)
    step: EngineStep[X] = EngineStep(phase="decode", sequences=1 + zero, tokens=1, context=0)
    *kinds, embedding, head = draft_ledger(draft, own, step, heads).lines
    rows = [(n, ops) for n, (_, ops) in zip(draft.model.kinds.values(), kinds, strict=True)]
    ends = [op for op in embedding[1] if within(op.region, "mtp")] if heads else [*embedding[1], *head[1]]
    rows.append((1, tuple(ends)))
    return total((n * weight_bytes(ops, draft.format, zero) for n, ops in rows), zero)


def draft_caches(case: ServingCase, sizes: ServingSizes[X]) -> tuple[SequenceCache[X], ...]:
    """Return what one sequence keeps in all layers of a case's draft."""
    draft = draft_case(case)
    if draft is None:
        return ()
    step: EngineStep[X] = EngineStep(phase="decode", sequences=sizes.batch, tokens=1, context=0)
    layout = views_of(draft, sizes, step).wide
    return tuple(
        replace(one, token_bytes=count * one.token_bytes, constant_bytes=count * one.constant_bytes)
        for block, count in draft.model.kinds.items()
        for one in block_caches(layout, block, draft.engine.memory.cache_rules)
    )


def uses_heads(case: ServingCase) -> bool:
    """Return whether what guesses reads the hidden states of the model."""
    return case.job.speculative_method in _HEADS
