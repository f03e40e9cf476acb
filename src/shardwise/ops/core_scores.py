"""Attention over the whole matrix of scores: two batched GEMMs around a softmax, as frameworks ran it before flash.

Letters: T tokens on the rank, S keys of a sequence, N query and K key-value heads on the rank. Source: arXiv:2205.05198
for what it keeps.
"""

from __future__ import annotations

from shardwise.ledger.number import X, above, divide
from shardwise.ledger.op import Op, Tensor
from shardwise.ops.core import CORE, AttentionCore, context_messages, core_flops
from shardwise.ops.layout import Layout, memory_op
from shardwise.records import replace

# Bytes that tensor cores load at once (NVIDIA, Matrix Multiplication Background User's Guide, section 2.1).
LOADED_BYTES = 16


def _repeated(y: Layout[X], core: AttentionCore[X], inputs: tuple[Tensor[X], ...]) -> tuple[Tensor[X], ...]:
    """Transformers' eager attention repeats keys and values to the query heads and keeps the copies."""
    if y.stack.attention != "eager" or core.repeats == 1:
        return inputs
    queries, *shared = inputs
    groups = core.heads / core.kv_heads
    if core.viewed_keys:  # copies for products in batches, but of one sequence
        groups = above(y.work.B, 1, groups, 1 + 0 * groups)
    copies = (
        Tensor(name=f"attention.repeated {name}", size_bytes=t.size_bytes * groups, born=CORE)
        for name, t in zip(("keys", "values"), shared, strict=True)
    )
    return (queries, *copies)


def unfused(y: Layout[X], core: AttentionCore[X], inputs: tuple[Tensor[X], ...]) -> tuple[Op[X], ...]:
    """Two batched GEMMs around a softmax over the whole score matrix, which is kept.

    "scores": softmax output, dropout mask and dropped copy (5 bytes a score with dropout, arXiv:2205.05198 section
    4.1). "eager" (transformers): softmax in fp32 and its 16-bit copy, the tanh of capped scores; checked to the byte
    with saved-tensor hooks on torch 2.13.0, transformers 5.23.0. What its backward pass makes besides: `_made_back`.
    """
    queries, keys, values = _repeated(y, core, inputs)
    # Each operand of a GEMM is read for the gradient of the other.
    queries, keys, values = (
        replace(t, read_for=other)
        for t, other in ((queries, inputs[1].name), (keys, inputs[0].name), (values, "attention.softmax"))
    )
    T, keys_seen = y.tokens, y.work.S + y.work.context
    scores = T * core.heads * keys_seen
    ahead, back = context_messages(y, core)
    kept, probabilities, kernels = _softmax(y, core, scores)
    # Each kernel reads and writes the whole matrix: softmax, then dropout with its mask where there is one; backward
    # reads a gradient and what was kept, and writes a gradient, for each.
    more = sum((2 * y.a * scores + t.size_bytes for t in kept[1:]), 0 * scores)
    forward, backward = 2 * y.a * scores + more, 2 * y.a * scores + more + kept[0].size_bytes
    if y.stack.attention == "eager":
        ahead_bytes, back_bytes = _eager_bytes(y, core)
        forward, backward = ahead_bytes * scores + more, back_bytes * scores + more
    first = _product(y, "attention.scores", (T, keys_seen, core.key_dim + 0 * T), core.heads, (queries, keys))
    last = _product(y, "attention.context", (T, core.value_dim + 0 * T, keys_seen), core.heads, (probabilities, values))
    if y.stack.attention == "eager":
        # As many model FLOPs as those of a fused kernel: what a model asks for is no matter of how it runs.
        first, last = (replace(one, model_flops=core_flops(y, core) / 2) for one in (first, last))
    softmax = memory_op(
        y, "attention.softmax", CORE, (forward, backward), saves=kept, kernels=kernels, output_bytes=y.a * scores,
        transient_bytes=_made_back(y, core) * scores, role="softmax",
    )  # fmt: skip
    first = replace(
        first, forward=ahead, backward=back, vector_units=is_unaligned(y, core.key_dim), role="scores",
        takes=(inputs[0].name, inputs[1].name),
    )  # fmt: skip
    takes = ("attention.softmax", inputs[2].name)
    return first, softmax, replace(last, vector_units=is_unaligned(y, core.value_dim), role="context", takes=takes)


def _softmax(y: Layout[X], core: AttentionCore[X], scores: X) -> tuple[tuple[Tensor[X], ...], Tensor[X], int]:
    """Return what the softmax keeps, the probabilities that multiply the values, and its kernels."""
    eager = y.stack.attention == "eager"
    if eager and core.sinks:
        # modeling_gpt_oss.py eager_attention_forward: a softmax in the type of the scores, a column longer than these;
        # what multiplies the values is a view of it, and the maximum of each row is taken off first (its place kept).
        rows = y.tokens * core.heads
        softmax = Tensor(name="attention.softmax", size_bytes=y.a * (scores + rows), born=CORE)
        places = Tensor(name="attention.maxima", size_bytes=8 * rows, born=CORE)
        return (softmax, places), softmax, 6

    def score_tensor(name: str, width: int) -> Tensor[X]:
        return Tensor(name=f"attention.{name}", size_bytes=width * scores, born=CORE)

    if eager and core.narrow:
        narrow = score_tensor("softmax", y.a)
        return (narrow,), narrow, 3
    softmax = score_tensor("softmax", 4 if eager else y.a)
    kept, probabilities, kernels = [softmax], softmax, 4 if eager else 1
    if y.drops("softmax") and not eager:
        kept.append(score_tensor("softmax mask", y.stack.dropout_mask_bytes))
        probabilities, kernels = score_tensor("probabilities", y.a), 2
    elif eager and y.a < 4:
        probabilities = score_tensor("probabilities", y.a)
    if core.caps:
        kept.append(score_tensor("capped scores", y.a))
        kernels += 3
    return tuple(kept), probabilities, kernels


def _eager_bytes(y: Layout[X], core: AttentionCore[X]) -> tuple[int, int]:
    """Return the bytes a score that transformers' eager attention moves between its GEMMs, forward and backward.

    Forward scores are multiplied by the scale, the mask is added, the softmax writes fp32, and a copy has the type of
    the queries (transformers 5.17 models/llama/modeling_llama.py eager_attention_forward; 4.40 LlamaAttention alike).
    Backward the gradient is widened, multiplied by the softmax in a kernel of its own, goes through the softmax, is
    narrowed (by the same kernel for fp16), and multiplied by the scale (`_made_back` has the sources). The mask of one
    sequence serves all heads out of the cache. A narrow softmax writes no fp32, its scale is applied in place.
    """
    a = y.a
    if core.sinks:
        return _sink_bytes(y)
    if core.narrow:
        return 2 * a + 2 * a + 2 * a, 3 * a + 2 * a
    copied = 4 + a if a < 4 else 0
    narrowed = a - 4 if y.work.dtype == "fp16" else copied
    return 2 * a + 2 * a + (a + 4) + copied, copied + 12 + (12 + narrowed) + 2 * a


def _sink_bytes(y: Layout[X]) -> tuple[int, int]:
    """Return the bytes a score that attention with sinks moves between its GEMMs, kernel by kernel in one type.

    Forward scale, mask, the sinks' column joined, the maximum read and taken off, softmax; backward the column put
    back, softmax, the maximum's gradient summed, scattered and added, scale.
    """
    return 11 * y.a, 13 * y.a


def _made_back(y: Layout[X], core: AttentionCore[X]) -> int:
    """Return the bytes a score that backward through transformers' softmax in fp32 holds beside what forward keeps.

    The gradient in fp32, its product with the softmax, and that of the scores: in fp32 too but of fp16, for which
    kernels convert (aten/src/ATen/native/cuda/SoftMax.cu softmax_backward_cuda_out, half_to_float of Half alone in
    SoftMax.cpp). The copy of the probabilities in 16 bits is freed by then.
    """
    if y.stack.attention != "eager" or y.work.phase != "train":
        return 0
    if core.sinks or core.narrow:
        # The gradient of the scores, and that of the maximum among zeros or of the probabilities.
        return 2 * y.a
    scores = 2 if y.work.dtype == "fp16" else 4
    return 4 + 4 + scores - (y.a if y.a < 4 else 0)


def is_unaligned(y: Layout[X], dims: int) -> bool:
    """Return whether heads of so many values start between the loads of tensor cores, where no kernel pads them.

    Transformers' eager path runs on cuBLAS of CUDA 12, which loads in smaller pieces.
    """
    return y.stack.attention == "scores" and dims * y.a % LOADED_BYTES != 0


def _product(y: Layout[X], name: str, mnk: tuple[X, X, X], batch: X, inputs: tuple[Tensor[X], ...]) -> Op[X]:
    """Return a batched GEMM of two activations: both operands get a gradient, so backward is twice forward."""
    m, n, k = mnk
    flops = 2 * m * n * k * batch
    # The smaller operand is that of one sequence: it is read once for the S rows that meet it.
    moved = y.a * batch * (m * k + m * n) + y.a * batch * k * n * divide(m, y.work.S)
    zero = 0 * flops
    return Op(
        name=name, kind="matmul", region=CORE, flops=flops, forward_bytes=moved, backward_flops=2 * flops,
        backward_bytes=2 * moved, weight_flops=zero, weight_bytes=zero, rows=m, columns=n, inner=k, batch=batch,
        reads=inputs, saves=inputs, model_flops=flops, dtype=y.work.dtype, output_bytes=y.a * m * n * batch,
    )  # fmt: skip
