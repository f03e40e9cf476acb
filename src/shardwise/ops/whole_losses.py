"""Cross entropies that take the output head with them and hold no logits but of a chunk.

Letters: T tokens on the rank, D width of the head's input, V vocabulary on the rank.
"""

from __future__ import annotations

from shardwise.ledger.number import X, above, ceil, divide, log2, maximum, minimum, raised
from shardwise.ledger.op import Collective, Op, Tensor
from shardwise.ops.layout import Layout, memory_op
from shardwise.plans import PIECED_LOSSES
from shardwise.records import replace


def within_loss(y: Layout[X], op: Op[X], width: int) -> Op[X]:
    """Return the head as part of its cross entropy, which caps logits too and never holds all of them.

    "fused-linear" (github.com/linkedin/Liger-Kernel ops/fused_linear_cross_entropy.py) takes both gradients of a chunk
    in forward and keeps them; "cce" (github.com/apple/ml-cross-entropy cut_cross_entropy/cce.py), "fused-logprobs"
    (github.com/AgileRL/AgileRL agilerl/algorithms/core/llm_ops/fused_logprobs.py) and "fused-lm-head" (trl 1.16.0
    trainer/utils.py add_fused_lm_head) keep the input and compute the logits again in backward, as "chunked-entries"
    does (`_by_entries`). "chunked-linear" runs
    both passes of a piece before the next and keeps the gradient of the input alone (`_pieces`).
    """
    op = replace(op, output_bytes=0)
    gradient = Tensor(name="head.input.gradient", size_bytes=y.a * y.tokens * width, born="head", read_for="input")
    if y.stack.loss_kernel in PIECED_LOSSES:
        return replace(op, saves=(gradient,), reads=())
    if y.stack.head_in_tiles:
        # It casts input and weight tile by tile.
        op = replace(op, saves=tuple(replace(t, read_for="weight") for t in op.reads))
    if y.stack.loss_kernel != "fused-linear":
        return replace(op, backward_flops=op.backward_flops + op.flops)
    kept: tuple[Tensor[X], ...] = (
        gradient,
        Tensor(name="head.weight.gradient", size_bytes=y.a * op.columns * width, born="head", read_for="weight"),
    )
    return replace(op, saves=kept, reads=())


def _chunk_tokens(T: X, D: int, V: X) -> X:
    """Return the tokens of a chunk of Liger's loss: the next power of two above T / ceil(V / D), at most T."""
    chunk = raised(2.0, ceil(log2(ceil(divide(T, ceil(divide(V, D)))))))
    return minimum(chunk, T)


# AgileRL's chunks: rows of a fp32 tile of 256 MiB, at least 128 and at most 4,096 (agilerl/algorithms/core/base.py,
# FUSED_CHUNK_ROWS_MIN and _MAX; agilerl/memory/formulas.py resolve_chunk_rows).
_TILE_BYTES, _TILE_ROWS = 256 * 2.0**20, (128, 4096)


def _tile_bytes(T: X, a: float, V: X) -> X:
    """Return the bytes of a tile of logits as its GEMM gives them out, and in fp32 for the log-sum."""
    rows = minimum(maximum(divide(_TILE_BYTES + 0 * V, 4 * V), _TILE_ROWS[0]), _TILE_ROWS[1])
    return (a + 4) * minimum(rows, T) * V


# TRL's tiles: trl 1.16.0 kernels/chunked_logprob.py TOKEN_CHUNK_SIZE, trainer/utils.py _CHUNKED_LOGPROB_CHUNK_SIZE.
_TILE_TOKENS, _TILE_ENTRIES = 4096, 32768


# torchtitan's pieces: torchtitan 0.3.0 components/loss.py ChunkedLossWrapper.Config.num_chunks.
_PIECES = 8
# Bytes a logit of a piece beside the 16-bit ones: log-softmax, its gradient and that of the fp32 copy, or the gradient
# alone where the loss is compiled; zeros more where ranks share the vocabulary (`_LossParallelCrossEntropy.backward`),
# whose compiled function keeps the log-softmax.
_AT_WORK, _SHARED = {"chunked-linear": 12.0, "chunked-linear-compiled": 2.0}, 4.0
# What the loss of a piece reads and writes of each logit, both passes, as `ops.head` has it of whole ones.
_PIECE_TRAFFIC = {"chunked-linear": 18 + 22, "chunked-linear-compiled": 8 + 8}


def _pieces(y: Layout[X], T: X, width: int, V: X) -> Op[X]:
    """Return torchtitan's cross entropy: head and loss of an eighth of the tokens at a time, with both passes of each.

    Source: torchtitan 0.3.0 components/loss.py ChunkedLossWrapper (since 2026-04-27). The 16-bit logits of a piece
    outlast its backward pass. Gradients of the pieces' inputs are copied into a fp32 buffer, which is cast behind the
    last; sequences of a batch are copied to be cut. FSDP reduces the gradient of the weight behind the last piece;
    until then it is added up whole in the type of the reduction, fp32, and copied into what is sent
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py to_accumulated_grad_if_needed,
    accumulate_unsharded_grad_if_needed). The most is the backward pass of a piece, or that copy; every storage counted
    with torch 2.13.0 on torchtitan's own class.
    """
    tuning, kernel, zero = y.choices.tuning, y.stack.loss_kernel, 0 * T
    trains = tuning is None or not tuning.freezes or "head" in tuning.trains
    logits = y.a + _AT_WORK[kernel] + above(y.vocab_ranks, 1, _SHARED + zero, zero)
    copies = above(y.work.B, 1, y.a * T * width, zero)
    piece = divide(T, _PIECES) * V
    at_work = logits * piece
    moved = _PIECE_TRAFFIC[kernel] * T * V + (12 + 2 * y.a) * T * width + 2 * copies
    if trains:
        at_work = maximum(at_work, 4 * V * width + y.a * piece) + 4 * V * width
        first = 4 + y.a if y.a < 4 else 0
        moved = moved + (first + (_PIECES - 1) * (8 + y.a)) * V * width
    sums: Collective[X] = Collective(axis="tp", verb="all_reduce", size_bytes=4 * T, count=3,
                                     tensor="maximum, target, sum", shape=(T, 1))  # fmt: skip
    at_work = at_work + 4 * T * width + copies
    return memory_op(y, "loss", "loss", (moved, zero), transient_bytes=at_work, kernels=5 * _PIECES, role="loss",
                     forward=(sums,) if y.stack.vocabulary == "split" else ())  # fmt: skip


# TRL's chunks: trl 1.7.0 to 1.14.2 trainer/sft_trainer.py _CHUNKED_LM_HEAD_CHUNK_SIZE.
_CHUNK_TOKENS = 256
# Bytes a logit of a chunk where its loss begins backward, and where the gradient of the weight is made.
_CHUNK_LOGITS, _CHUNK_GRADIENT = 16.0, 4.0
# What a chunk reads and writes of each logit: a fp32 copy, its log-softmax, the highest and the entropy, of which
# accuracy and entropy are metrics, once forward and once again in backward; then the loss and its gradient in 16 bits.
_CHUNK_TRAFFIC = (42.0, 42.0 + 22.0)


def _checkpointed(y: Layout[X], T: X, width: int, V: X) -> Op[X]:
    """Return TRL's cross entropy of 256 tokens at a time, each under torch.utils.checkpoint.

    Source: trl 1.14.0 trainer/sft_trainer.py _chunked_cross_entropy_loss; what it holds was counted with torch 2.13.0,
    every storage of it and of its backward pass, and trl 1.7.0 holds no more. Tokens are packed into a copy of the
    head's input. Autograd adds up the chunks' gradients of the whole weight, and of the whole input, which cutting
    fills with zeros, into new tensors; autocast makes 16 bits of a fp32 weight for each chunk, forward and again.
    """
    tuning, g, s = y.choices.tuning, y.work.gradient_bytes, y.stream_width
    trains = tuning is None or not tuning.freezes or "head" in tuning.trains
    wide = y.choices.autocast or (tuning is not None and tuning.wide_stream)
    chunk, times = minimum(T, _CHUNK_TOKENS) * V, ceil(divide(T, _CHUNK_TOKENS))
    copied = y.a * V * width if wide else 0 * V
    own = g * V * width if trains else 0 * V
    each = s * T * width
    at_work = maximum(each + _CHUNK_LOGITS * chunk + copied + own, each + _CHUNK_GRADIENT * chunk + 3 * own)
    cast = (4 + y.a) * V * width * times if wide else 0 * V
    added = 4 * each * times + (3 * g + (4 + y.a if g > y.a else 0)) * (V * width * times if trains else 0 * V)
    kept = Tensor(name="loss.packed input", size_bytes=each, born="loss", read_for="weight")
    moved = (_CHUNK_TRAFFIC[0] * T * V + cast, _CHUNK_TRAFFIC[1] * T * V + cast + added)
    return memory_op(y, "loss", "loss", moved, saves=(kept,), transient_bytes=maximum(at_work, 3 * each + own),
                     kernels=10 * times, role="loss")  # fmt: skip


def _fused_head(y: Layout[X], T: X, width: int, V: X) -> Op[X]:
    """Return TRL's cross entropy by tiles, whose gradients of input and weight are added up in fp32, then cast.

    Source: trl 1.16.0 kernels/chunked_logprob.py ChunkedLogProbFunction. A kernel reads each tile, in backward it
    writes the gradient over it; sums over entries and over tokens are read and written once a tile, and entries of a
    fp32 weight made 16 bits for each. Buffers are as wide for fewer entries. It keeps two values a token.
    """
    tuning, narrow = y.choices.tuning, y.work.gradient_bytes
    trains = tuning is None or not tuning.freezes or "head" in tuning.trains
    wide = y.choices.autocast or (tuning is not None and tuning.wide_stream)
    tiles, each = ceil(divide(V, _TILE_ENTRIES)), ceil(divide(T, _TILE_TOKENS))
    at_work = y.a * minimum(T, _TILE_TOKENS) * _TILE_ENTRIES + 4 * T * width
    at_work = at_work + (y.stream_width * T * width if y.stream_width < 4 else 0 * T)
    at_work = at_work + (y.a * minimum(V, _TILE_ENTRIES) * width if wide else 0 * V)
    cast = (4 + y.a) * V * width * each if wide else 0 * V
    added = 8 * T * width * tiles + (8 * V * width * each if trains else 0 * V)
    if trains:
        at_work = at_work + (4 + (narrow if narrow < 4 else 0)) * V * width
    kept = Tensor(name="loss.lse", size_bytes=8 * T, born="loss")
    moved = (y.a * T * V + cast, 2 * y.a * T * V + cast + added)
    return memory_op(y, "loss", "loss", moved, saves=(kept,), kernels=5, role="loss", transient_bytes=at_work)


# prime-rl's chunks: prime_rl/trainer/rl/config.py auto_setup_fused_lm_head_chunk_size (2026-01). Bytes a logit of a
# chunk at its most, the exponential in backward: 16-bit logits, fp32 ones, those less their log-sum and their
# exponentials, beside exponentials and gradients of the chunk before, which Python still names.
_ENTRIES, _ENTRY_BYTES = 2048, 22.0
# What each logit is read and written, kernel by kernel: forward its product, cast, scale, maximum, exponential and both
# sums; backward product, cast, scale, exponential, gradient, scale and a cast for each of two products.
_ENTRY_TRAFFIC = (58.0, 64.0)


def _by_entries(y: Layout[X], T: X, width: int, V: X) -> Op[X]:
    """Return prime-rl's log-probabilities and entropies: all tokens, 2,048 entries of the vocabulary at a time.

    Source: github.com/PrimeIntellect-ai/prime-rl src/prime_rl/trainer/models/layers/lm_head.py _ChunkedLogProbEntropyFn
    (2026-01): PyTorch's own kernels; the gradient of the input is added up in its type, chunk by chunk.
    """
    chunk = minimum(V, _ENTRIES)
    gradient = y.a * T * width
    added = 4 * gradient * ceil(divide(V, chunk))
    kept = Tensor(name="loss.lse", size_bytes=8 * T, born="loss")
    return memory_op(y, "loss", "loss", (_ENTRY_TRAFFIC[0] * T * V, _ENTRY_TRAFFIC[1] * T * V + added), saves=(kept,),
                     transient_bytes=_ENTRY_BYTES * T * chunk + gradient, kernels=12, role="loss")  # fmt: skip


def whole_loss(y: Layout[X], width: int, V: X) -> tuple[Op[X], ...]:
    """Return a cross entropy that takes the head with it: what it keeps a token, and the logits of a chunk."""
    T = y.tokens
    if y.stack.loss_kernel == "cce":
        # The log-sum of each token, the mean of each logit, and the input's gradient as backward makes it.
        kept = Tensor(name="loss.lse", size_bytes=4 * T + 4 * V, born="loss")
        moved = 2 * y.a * T * width
        return (memory_op(y, "loss", "loss", (moved, moved), saves=(kept,), transient_bytes=y.a * T * width,
                          kernels=5, role="loss"),)  # fmt: skip
    if y.stack.loss_kernel == "fused-logprobs":
        # Each tile is written, read for the log-sum, and in backward again and as its gradient.
        moved = y.a * T * V
        tile = _tile_bytes(T, y.a, V)
        return (memory_op(y, "loss", "loss", (4 * moved, 8 * moved), transient_bytes=tile, kernels=5, role="loss"),)
    if y.stack.head_in_tiles:
        return (_fused_head(y, T, width, V),)
    if y.stack.loss_kernel in PIECED_LOSSES:
        return (_pieces(y, T, width, V),)
    if y.stack.loss_kernel == "chunked-nll":
        return (_checkpointed(y, T, width, V),)
    if y.stack.loss_kernel == "chunked-entries":
        return (_by_entries(y, T, width, V),)
    return (_in_chunks(y, T, width, V),)


def _in_chunks(y: Layout[X], T: X, width: int, V: X) -> Op[X]:
    """Return Liger's cross entropy, whose products with the weight run chunk by chunk in forward.

    Source: github.com/linkedin/Liger-Kernel src/liger_kernel/ops/fused_linear_cross_entropy.py. The kernel reads the
    logits of a chunk twice and writes their gradient in place. Under autocast each chunk makes 16 bits of a fp32
    weight for its logits, of a view, and for the gradient of its input, which autocast keeps of a weight that trains
    alone (pytorch aten/src/ATen/autocast_mode.cpp cached_cast). The head has one of these casts.
    """
    tuning, rows = y.choices.tuning, _chunk_tokens(T, width, V)
    wide = y.choices.autocast or (tuning is not None and tuning.wide_head)
    copy = y.a * V * width if wide else 0 * T
    chunks = ceil(divide(T, rows))
    casts = chunks if tuning is None or not tuning.freezes or "head" in tuning.trains else 2 * chunks - 1
    moved = 3 * y.a * T * V + (4 + y.a) / y.a * casts * copy
    return memory_op(y, "loss", "loss", (moved, 0 * T), transient_bytes=y.a * rows * V + copy, kernels=5, role="loss")
