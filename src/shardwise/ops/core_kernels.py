"""Which kernels run the core of attention: a fused one, or steps over the whole matrix of scores.

Letters: T tokens on the rank, S keys of a sequence, N query and K key-value heads on the rank, H key dim, Hv value dim.
"""

from __future__ import annotations

from shardwise.ledger.number import X, above, divide
from shardwise.ledger.op import Op, Tensor
from shardwise.ops.core import (
    CORE,
    AttentionCore,
    AttentionMask,
    context_messages,
    core_flops,
    exchange_copies,
    fused,
    merged_outputs,
)
from shardwise.ops.core_scores import unfused
from shardwise.ops.inputs import WIDEST_GROUP
from shardwise.ops.layout import Layout, memory_op
from shardwise.plans import Stack
from shardwise.records import replace


def attention_core(y: Layout[X], core: AttentionCore[X], inputs: tuple[Tensor[X], ...]) -> tuple[Op[X], ...]:
    """Return the operators between projected queries, keys, values and the attention output.

    `inputs` are those three as they are kept for backward; the output is the tensor "attention.out".
    """
    if y.stack.attention != "flash":
        ops = unfused(y, core, inputs)
    elif lacks_kernel(y, core):
        ops = _in_steps(y, core, inputs)
    else:
        ops = _masked(y, core, inputs) if is_masked(y, core) else (fused(y, core, inputs),)
    return (*ops, *exchange_copies(y, core), *merged_outputs(y, core))


def with_scores(y: Layout[X], width: int) -> Layout[X]:
    """Return the layout under which heads of a width run: over the matrix of scores where training has no kernel.

    >>> from shardwise.ops.count import whole_layout
    >>> [with_scores(whole_layout(1, 64, stack="megatron"), width).stack.attention for width in (256, 512)]
    ['flash', 'scores']
    """
    widest = y.stack.widest_fused_head
    if y.work.phase != "train" or y.stack.attention != "flash" or not 0 < widest < width:
        return y
    return replace(y, choices=replace(y.choices, stack=replace(y.stack, attention="scores")))


def without_sdpa(y: Layout[X], core: AttentionCore[X]) -> Layout[X]:
    """Return the layout under which a core trains: eager where it has what SDPA lacks, which transformers calls.

    >>> from shardwise.ops.count import whole_layout
    >>> core = AttentionCore(heads=8, kv_heads=2, key_dim=64, value_dim=64, sinks=True)
    >>> [without_sdpa(whole_layout(1, 64, stack=name), core).stack.attention for name in ("transformers", "unsloth")]
    ['eager', 'flash']
    """
    if not _calls_sdpa(y, core) or not (core.caps or core.sinks):
        return y
    return replace(y, choices=replace(y.choices, stack=replace(y.stack, attention="eager")))


def is_masked(y: Layout[X], core: AttentionCore[X]) -> bool:
    """Return whether the window or chunk of a core is a mask for torch's SDPA where sequences reach it.

    >>> from shardwise.ops.count import whole_layout
    >>> core = AttentionCore(heads=8, kv_heads=2, key_dim=64, value_dim=64, mask=AttentionMask(window=32))
    >>> [is_masked(whole_layout(1, 64, stack=name), core) for name in ("transformers", "axolotl")]
    [True, False]
    """
    own = core.masked and not y.stack.repeats_kv
    return _calls_sdpa(y, core) and bool(core.mask.limit or own)


def _calls_sdpa(y: Layout[X], core: AttentionCore[X]) -> bool:
    stack = y.stack
    by_torch = stack.calls_sdpa and stack.attention == "flash" and y.work.phase == "train"
    return by_torch and not (core.sinks and stack.loads_sinks_kernel)


def _masked(y: Layout[X], core: AttentionCore[X], inputs: tuple[Tensor[X], ...]) -> tuple[Op[X], ...]:
    """Return SDPA's attention whose window is a mask where the sequence reaches it, and what makes the mask.

    Its kernels then run over all pairs, and backward keeps the mask in the type of the queries, anew in each layer:
    transformers 5.24.0 masking_utils.py sdpa_mask makes one of a byte a pair, torch 2.13.0 aten/src/ATen/native/
    transformers/attention.cpp convert_boolean_attn_mask one of numbers (tests/data/tuning/sdpa_masks.json).
    """
    op, S, short = fused(y, core, inputs), y.work.S, core.mask.limit - 1
    whole = fused(y, replace(core, mask=AttentionMask(causal=False)), inputs)
    pairs = above(S, short, y.tokens * S, 0 * y.tokens)
    mask = Tensor(name="attention.mask", size_bytes=y.a * pairs, born=CORE)
    # Zeros, the mask's opposite, and minus infinity where that is.
    made = memory_op(y, "attention.mask", CORE, ((2 * y.a + 4) * pairs, 0 * pairs), kernels=above(S, short, 3, 0),
                     output_bytes=mask.size_bytes, role="steps", takes=(), makes=(mask.name,))  # fmt: skip
    longer = {
        name: above(S, short, getattr(whole, name) + 0 * S, getattr(op, name))
        for name in ("flops", "backward_flops", "columns")
    }
    moved = {name: getattr(op, name) + mask.size_bytes for name in ("forward_bytes", "backward_bytes")}
    return made, replace(op, **longer, **moved, saves=(*op.saves, mask))


def lacks_kernel(y: Layout[X], core: AttentionCore[X]) -> bool:
    """Return whether heads that share keys are left to PyTorch's attention where no fused kernel takes them.

    FlashAttention takes groups of up to 256 values, in 16 bits, from compute capability 8.0 on; the memory-efficient
    kernel takes none (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). A window makes a mask, before which
    transformers repeats keys and values. One head that all are handed as a view is no group to them
    (sdp_utils_cpp.h check_batch_size_and_num_heads_dense: as many heads of keys as of queries but with enable_gqa).

    >>> from shardwise.ops.count import whole_layout
    >>> lacks_kernel(whole_layout(1, 64), AttentionCore(heads=8, kv_heads=2, key_dim=512, value_dim=512, repeats=4))
    False
    """
    if core.repeats == 1 or core.mask.window or core.mask.chunk or y.work.phase != "train":
        return False
    if views_keys(y.stack, core.viewed_keys):
        return True
    return leaves_heads(y.stack, core.key_dim, y.work.widest_group)


def views_keys(stack: Stack, viewed: bool) -> bool:
    """Return whether a class that hands one head of keys as a view for all hands it to SDPA.

    >>> from shardwise.plans import find_stack
    >>> [views_keys(find_stack(name), True) for name in ("transformers", "axolotl", "litgpt")]
    [True, False, False]
    """
    by_torch = stack.calls_sdpa and stack.attention == "flash" and not stack.repeats_kv
    return by_torch and viewed


def leaves_heads(stack: Stack, width: int, widest_group: int) -> bool:
    """Return whether a framework leaves heads of a width that share keys to PyTorch though no fused kernel takes them.

    `widest_group` is the widest head of which a fused kernel takes groups on the device.

    >>> from shardwise.plans import find_stack
    >>> [leaves_heads(find_stack("transformers"), width, widest) for width, widest in ((64, 0), (64, 256), (512, 256))]
    [True, False, False]
    """
    left = stack.leaves_groups
    return bool(left) and width > widest_group and (left == "all" or width <= WIDEST_GROUP)


def _in_steps(y: Layout[X], core: AttentionCore[X], inputs: tuple[Tensor[X], ...]) -> tuple[Op[X], ...]:
    """Return PyTorch's attention in fp32, kernel by kernel, which keeps its operands and the softmax.

    Queries, keys and values are widened and scaled, those that are shared repeated; the causal mask is added, and the
    softmax looks for rows without a key; one head that all view is copied for them where there are more sequences. Its
    steps hold 13 bytes a score at once, of which 4 are kept. Source:
    aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math; what it keeps was recorded
    with saved-tensor hooks of torch 2.13.0 (tests/data/tuning/sdpa_math.json).
    """
    T, S = y.tokens, y.work.S + y.work.context
    scores, half = T * core.heads * S, core_flops(y, core) / 2
    names = ("attention.wide queries", "attention.wide keys", "attention.wide values")
    wide = (core.key_dim, core.key_dim, core.value_dim)
    shared = above(y.work.B, 1, core.heads, 1 + 0 * T) if core.viewed_keys else core.heads
    queries, keys, values = (
        Tensor(name=name, size_bytes=4 * T * heads * width, born=CORE, read_for=other)
        for name, width, heads, other in zip(
            names, wide, (core.heads, shared, shared), (names[1], names[0], "attention.softmax"), strict=True
        )
    )
    softmax = Tensor(name="attention.softmax", size_bytes=4 * scores, born=CORE)
    ahead, back = context_messages(y, core)
    casts = [
        _cast(y, wide_one, source, kernels)
        for wide_one, source, kernels in zip((queries, keys, values), inputs, (2, 3, 2), strict=True)
    ]
    first = _wide_product(y, "attention.scores", (T, S, core.key_dim + 0 * T), core.heads, (queries, keys), half)
    # Mask added 8, softmax 8, keys without weight 5 and 1, choice of rows 8, a copy in the type of the input.
    moved = (30 + (4 + y.a) * (y.a < 4)) * scores
    steps = memory_op(
        y, "attention.softmax", CORE, (moved, 12 * scores), saves=(softmax,), kernels=6, output_bytes=4 * scores,
        transient_bytes=9 * scores, role="softmax", takes=("attention.scores",), makes=("attention.softmax",),
    )  # fmt: skip
    kept = replace(softmax, read_for=names[2])
    last = _wide_product(y, "attention.context", (T, core.value_dim + 0 * T, S), core.heads, (kept, values), half)
    first = replace(first, forward=ahead, backward=back, role="scores", takes=names[:2], makes=("attention.scores",))
    return (*casts, first, steps, replace(last, role="context", takes=("attention.softmax", names[2]), kernels=2))


def _cast(y: Layout[X], wide: Tensor[X], source: Tensor[X], kernels: int) -> Op[X]:
    """Return what widens, scales or repeats one of queries, keys and values: a read and a write each."""
    moved = 2 * wide.size_bytes + source.size_bytes
    return memory_op(
        y, wide.name, CORE, (moved, moved), kernels=kernels, output_bytes=wide.size_bytes, role="steps",
        takes=(source.name,), makes=(wide.name,),
    )  # fmt: skip


def _wide_product(
    y: Layout[X], name: str, mnk: tuple[X, X, X], batch: X, inputs: tuple[Tensor[X], ...], model_flops: X
) -> Op[X]:
    """Return a batched fp32 GEMM of two activations over the whole square; `model_flops` are those that a mask leaves.

    It runs without matrix units unless its user lets torch round to TF32.
    """
    m, n, k = mnk
    flops = 2 * m * n * k * batch
    moved = 4 * batch * (m * k + m * n) + 4 * batch * k * n * divide(m, y.work.S)
    zero = 0 * flops
    return Op(
        name=name, kind="matmul", region=CORE, flops=flops, forward_bytes=moved, backward_flops=2 * flops,
        backward_bytes=2 * moved, weight_flops=zero, weight_bytes=zero, rows=m, columns=n, inner=k, batch=batch,
        reads=inputs, saves=inputs, model_flops=model_flops, dtype=y.work.dtype, output_bytes=4 * m * n * batch,
        vector_units=y.work.dtype != "tf32",
    )  # fmt: skip
