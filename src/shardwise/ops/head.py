"""What stands before and after the blocks: embeddings, the output head and the loss.

Letters: T tokens on the rank, R tokens of the residual stream, D hidden, V vocabulary (padded by the trainer).
"""

from __future__ import annotations

from typing import cast

from shardwise.cost import WIDE_DTYPES
from shardwise.ledger.number import X, above, ceil, divide
from shardwise.ledger.op import Collective, Op, Tensor, Weight
from shardwise.models import Model
from shardwise.ops.block import projection, shared_adapter
from shardwise.ops.core_scores import LOADED_BYTES
from shardwise.ops.elementwise import norm, only_weights, vector
from shardwise.ops.layout import Layout, LinearShape, memory_op
from shardwise.ops.logit_losses import LOGIT_LOSSES
from shardwise.ops.tuning import tuned
from shardwise.ops.whole_losses import whole_loss, within_loss
from shardwise.plans import WHOLE_LOSSES
from shardwise.records import replace


def padded_vocab(V: int, multiple: int, tp: X) -> X:
    """Return the vocabulary padded to a multiple of `multiple` * tp (Megatron-LM training/tokenizer, 128 by default).

    >>> padded_vocab(50257, 128, 1), padded_vocab(32000, 1, 1)
    (50304, 32000)
    """
    if multiple == 1:
        return V + 0 * tp
    return ceil(divide(cast(X, V), multiple * tp)) * multiple * tp


def local_vocab(y: Layout[X], model: Model) -> X:
    """Return the entries of the vocabulary on a rank; only training pads it."""
    multiple = y.stack.vocab_multiple if y.work.phase == "train" else 1
    return divide(padded_vocab(model.vocab, multiple, y.vocab_ranks), y.vocab_ranks)


def tables(y: Layout[X], model: Model) -> tuple[Weight[X], ...]:
    """Return the tables of an embedding: words split over ranks, positions and token types on all of them.

    The count of the model leaves the trainer's padding out; the elements on a rank have it.
    """
    zero, width = 0 * y.tokens, model.embedding_width or model.hidden
    second = y.degrees.tp2 if y.choices.layout == "summa" else 1

    def table(name: str, elements: X, whole: int, sides: tuple[X | float, ...] = ()) -> Weight[X]:
        return Weight(name=name, elements=elements, whole=zero + whole, kind="embedding", shape=sides)

    local = local_vocab(y, model)
    rows_of_tokens = table(
        "embedding.weight", divide(local * width, second), model.vocab * width, (local, divide(zero + width, second))
    )
    ops = [replace(rows_of_tokens, role="embedding")]
    if model.extra_embedding:
        local = divide(divide(zero + model.extra_embedding, y.vocab_ranks), second)
        ops.append(replace(table("embedding.extra", local, model.extra_embedding), role="ngrams"))
    rows = (model.positions + model.token_types) * model.hidden
    if rows:
        ops.append(table("positions.weight", zero + rows, rows, (model.positions + model.token_types, model.hidden)))
    return tuple(ops)


def embedding(y: Layout[X], model: Model) -> tuple[Op[X], ...]:
    """Return the input embedding: a lookup of rows split by vocabulary, with learned positions and its norm.

    Only the rows of the tokens are read; the table's gradient is a scatter of the same rows. Token ids are int64,
    kept once for words and once for learned positions.

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> model, y = Model.load("gpt2"), whole_layout(1, 64)
    >>> embedding(y, model)[0].weights[0].whole
    38597376
    """
    if not model.embedding:
        return (*tuned(y, _around(y, model)), *shared_adapter(y, model))
    width = model.embedding_width or model.hidden
    stream = y.a * y.tokens * width
    ahead, back = _table_messages(y, stream, width)
    saves = [Tensor(name="ids", size_bytes=8 * y.tokens, born="", read_for="weight"), *rotary_tables(y, model)]
    if model.positions:
        saves.append(Tensor(name="position ids", size_bytes=8 * y.work.S, born="", read_for="weight"))
    if y.drops("hidden"):
        elements = y.residual_tokens * y.residual_width(model.hidden)
        saves.append(Tensor(name="embedding.mask", size_bytes=y.stack.dropout_mask_bytes * elements, born="embedding"))
    ops = [memory_op(y, "embedding", "embedding", (2 * stream, 2 * stream),
                     weights=tables(y, model), saves=tuple(saves), forward=ahead, backward=back, output_bytes=stream,
                     role="embedding")]  # fmt: skip
    if model.embedding_norm:
        source = y.residual("embedding.output", model.hidden, "embedding")
        ops.append(norm(y, "embedding_norm", model.hidden, model.norm, source, "embedding"))
    return (*tuned(y, (*ops, *_around(y, model))), *shared_adapter(y, model))


def rotary_tables(y: Layout[X], model: Model) -> tuple[Tensor[X], ...]:
    """Return the cosines and sines of every position, made once for all layers and kept by the first that rotates."""
    width = next((mixer.rotated for block in model.kinds for mixer in block.mixers if mixer.rotated), 0)
    if not width:
        return ()
    positions = divide(y.tokens, y.work.B)
    size = 2 * y.a * positions * width
    return (Tensor(name="rotary tables", size_bytes=size, born="embedding", read_for="later"),)


def _table_messages(y: Layout[X], stream: X, width: int) -> tuple[tuple[Collective[X], ...], tuple[Collective[X], ...]]:
    """Each rank of a split table has the rows of its words: the others' are zero, and all are summed.

    Of a whole one each rank takes its tokens under sequence parallelism, whose gradients all ranks gather.
    """
    sp = y.choices.sequence_parallel
    if y.stack.vocabulary != "split":
        gradient: Collective[X] = Collective(
            axis="tp", verb="all_gather", size_bytes=stream, tensor="embedding gradient", shape=(y.tokens, width)
        )
        return (), (gradient,) if sp else ()
    ahead: Collective[X] = Collective(
        axis="tp", verb="reduce_scatter" if sp else "all_reduce", size_bytes=stream, tensor="embedding output",
        shape=(y.tokens, width),
    )  # fmt: skip
    back = replace(ahead, verb="all_gather", tensor="embedding gradient")
    return (ahead,), (back,) if sp else ()


def _around(y: Layout[X], model: Model) -> tuple[Op[X], ...]:
    """Return the projections and vectors outside the blocks (OPT-350m's two projections, Gemma 3n's streams)."""
    ops = [projection(y, p, "embedding") for p in model.extras]
    if model.extra_vectors:
        values = 0 * y.tokens + model.extra_vectors
        ops.append(
            only_weights(y, "model.vectors", "embedding", (vector("model.vectors", values, model.extra_vectors),))
        )
    return tuple(ops)


def final_norm(y: Layout[X], model: Model) -> tuple[Op[X], ...]:
    """Return the norm after the last block, if the model has one.

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> model, y = Model.load("gpt2"), whole_layout(1, 64)
    >>> [op.name for op in final_norm(y, model)]
    ['final_norm']
    """
    if not model.final_norm:
        return ()
    return tuned(
        y, (norm(y, "final_norm", model.hidden, model.norm, y.residual("final.input", model.hidden, ""), "head"),)
    )


def head(y: Layout[X], model: Model, tokens: X | None = None) -> tuple[Op[X], ...]:
    """Return the output head: a GEMM with the vocabulary split over tp; it owns no weights when tied.

    Where the framework gathers them, each rank has the logits of all (DTensor's ColwiseParallel to Replicate); or it
    has the whole head. Inference needs the last token of each sequence alone: `tokens` then counts those, and the
    rank's logits are not gathered here. Capped logits (Gemma 2) go through a tanh, which is kept. Training in fewer
    bits leaves the head in 16: Megatron-LM core/models/gpt/gpt_model.py, whose output_layer is no layer of Transformer
    Engine, and torchtitan's filter_fqns, which names the output layer.

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> model, y = Model.load("gpt2"), whole_layout(1, 64)
    >>> head(y, model)[0].flops == 2 * 64 * model.hidden * model.vocab
    True
    """
    if not model.head:
        return ()
    width = model.embedding_width or model.hidden
    V = local_vocab(y, model)
    gathered = y.stack.vocabulary == "gathered" and y.work.phase == "train" and y.stack.loss_kernel not in WHOLE_LOSSES
    if gathered:
        V = y.split(model.vocab)
    shape = LinearShape(inputs=width + 0 * V, outputs=V, whole_inputs=width, whole_outputs=model.vocab,
                  bias=model.head_bias, kind="head", owned=not model.tied, role="head")  # fmt: skip
    op = y.column("head", "head", shape, y.residual("head.input", width, "head"))
    if y.work.phase == "train":
        op = replace(op, dtype=op.dtype if op.dtype in ("fp32", "tf32") else WIDE_DTYPES[0])
        if op.dtype in WIDE_DTYPES and not y.stack.pads_gemms:
            op = replace(op, unaligned=is_between_loads(y, V))
    if model.tied and model.head_bias:
        op = replace(op, weights=(vector("head.bias", V, model.vocab),))
    if gathered:
        logits: Collective[X] = Collective(axis="tp", verb="all_gather", size_bytes=y.a * y.tokens * model.vocab,
                                           tensor="logits", shape=(y.tokens, model.vocab + 0 * V))  # fmt: skip
        op = replace(op, forward=(*op.forward, logits))
    elif y.stack.vocabulary != "split":
        op = replace(op, forward=(), backward=())
    if tokens is not None:
        op = _last_tokens(y, op, tokens)
    if y.work.phase == "train" and y.stack.loss_kernel in WHOLE_LOSSES:
        return tuned(y, (within_loss(y, op, width),))
    return tuned(y, (_capped(y, op) if model.logit_softcap else op,))


def is_between_loads(y: Layout[X], V: X) -> X:
    """Return 1 where rows of the logits of V entries start between the 16 bytes that a load takes, else 0.

    Frameworks that pad no vocabulary still give each rank of tp a whole number of entries (nanotron helpers.py
    _vocab_size_with_padding).

    >>> from shardwise.ops.count import whole_layout
    >>> [is_between_loads(whole_layout(1, 64), V) for V in (50257.0, 50304.0)]
    [1.0, 0.0]
    """
    loads = divide(y.a * ceil(V), LOADED_BYTES + 0 * V)
    return above(ceil(loads) - loads, 0, 1.0, 0.0 * V)


def _last_tokens(y: Layout[X], op: Op[X], tokens: X) -> Op[X]:
    flops = 2 * tokens * op.columns * op.inner
    moved = y.a * tokens * (op.columns + op.inner) + y.work.weight_bytes * op.columns * op.inner
    return replace(op, flops=flops, rows=tokens, forward_bytes=moved, model_flops=flops, forward=(),
                   output_bytes=y.a * tokens * op.columns)  # fmt: skip


def _capped(y: Layout[X], op: Op[X]) -> Op[X]:
    """The tanh of the logits, its scale before and after: one more pass where fused, three where not."""
    logits = y.a * op.rows * op.columns
    kernels = 1 if y.stack.activation == "fused" else 3
    kept = Tensor(name="head.capped", size_bytes=logits, born="head")
    return replace(
        op,
        saves=(*op.saves, kept),
        kernels=op.kernels + kernels,
        forward_bytes=op.forward_bytes + 2 * kernels * logits,
        backward_bytes=op.backward_bytes + (2 * kernels + 1) * logits,
    )


def loss(y: Layout[X], model: Model) -> tuple[Op[X], ...]:
    """Return the cross entropy over logits of T tokens and V / tp entries, by the row of `LOGIT_LOSSES` of its kernel.

    Those of `WHOLE_LOSSES` hold no logits but of a chunk.

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> model, y = Model.load("gpt2"), whole_layout(1, 64)
    >>> loss(y, model)[0].saves[0].size_bytes == 4 * 64 * model.vocab
    True
    """
    if not model.head:
        return ()
    if y.stack.loss_kernel in WHOLE_LOSSES:
        return whole_loss(y, model.embedding_width or model.hidden, local_vocab(y, model))
    scores, row = y.tokens * local_vocab(y, model), LOGIT_LOSSES[y.stack.loss_kernel]
    kept = Tensor(name="loss.softmax", size_bytes=(row.kept or y.a) * scores, born="loss")
    extra = (row.backward + y.a * row.gradient) * scores
    if row.shared:
        extra = extra + above(y.vocab_ranks, 1, row.shared, 0 * scores) * scores
    if row.in_place:
        extra = y.a * y.tokens * model.hidden
    if row.pieces > 1:
        tuning = y.choices.tuning
        trains = tuning is None or not tuning.freezes or "head" in tuning.trains
        extra = y.a * scores / row.pieces + (2 * y.a * model.hidden * local_vocab(y, model) if trains else 0 * scores)
    ahead, back = row.traffic
    ahead += y.stack.metric_logit_bytes
    small: Collective[X] = Collective(axis="tp", verb="all_reduce", size_bytes=4 * y.tokens, count=3,
                                      tensor="maximum, target, sum", shape=(y.tokens, 1))  # fmt: skip
    sums = (small,) if y.stack.vocabulary == "split" else ()
    return (memory_op(y, "loss", "loss", (ahead * scores, back * scores), saves=(kept,), transient_bytes=extra,
                      forward=sums, kernels=5, role="loss"),)  # fmt: skip


def mtp_ops(y: Layout[X], model: Model) -> tuple[Op[X], ...]:
    """Return what one multi-token-prediction layer has beside its block: norms, and two streams projected to one.

    Source: arXiv:2412.19437 section 2.2; embedding and head are shared with the model.

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> model, y = Model.load("deepseek-v3"), whole_layout(1, 64)
    >>> [op.name for op in mtp_ops(y, model)]
    ['mtp.norm1', 'mtp.norm2', 'mtp.norm3', 'mtp.projection']
    """
    D, zero = model.hidden, 0 * y.tokens
    norms = tuple(
        norm(y, f"mtp.norm{i}", D, model.norm, y.residual(f"mtp.input{i}", D, ""), "mtp")
        for i in range(1, model.mtp_norms + 1)
    )
    shape = LinearShape(inputs=2 * D + zero, outputs=D + zero, whole_inputs=2 * D, whole_outputs=D)
    joined = y.residual("mtp.joined", 2 * D, "mtp")
    if y.choices.layout == "summa":
        return (*norms, y.whole("mtp.projection", "mtp", shape, joined))
    return (*norms, _gathered(y, y.column("mtp.projection", "mtp", replace(shape, outputs=y.split(D)), joined), D))


def _gathered(y: Layout[X], op: Op[X], D: int) -> Op[X]:
    """Return a GEMM with split outputs whose parts every rank gathers, and of whose gradient it takes its part.

    Under sequence parallelism it then keeps its tokens, whose gradients are gathered backward. Source: Megatron-LM
    core/transformer/multi_token_prediction.py, eh_proj and gather_from_tensor_model_parallel_region.
    """
    out: Collective[X] = Collective(
        axis="tp",
        verb="all_gather",
        size_bytes=y.a * y.tokens * D,
        tensor="mtp output",
        shape=(y.tokens, D + 0 * y.tokens),
    )
    back = (replace(out, tensor="mtp output gradient"),) if y.choices.sequence_parallel else ()
    return replace(op, forward=(*op.forward, out), backward=(*back, *op.backward))
