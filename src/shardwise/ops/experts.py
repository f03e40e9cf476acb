"""Mixture of experts (MoE) over expert-parallel ranks: router, dispatch, grouped GEMMs, combine, shared experts.

Letters: T tokens a rank routes, D hidden, E experts, k experts a token, Fe expert ffn. Sources: arXiv:2101.03961,
arXiv:2401.06066, Megatron-LM core/transformer/moe for the dispatch, transformers integrations/moe.py for what it keeps.
"""

from __future__ import annotations

from shardwise.cost import WIDE_DTYPES
from shardwise.ledger.number import X, divide, maximum
from shardwise.ledger.op import Collective, Op, Tensor, Weight
from shardwise.models import MoE
from shardwise.ops.elementwise import vector
from shardwise.ops.feed_forward import activation_op, mlp, weights_rows
from shardwise.ops.layout import Layout, LinearShape, belonging, memory_op
from shardwise.ops.routed import Experts, experts_of, hands_all, reordered_bytes, routed_rows, routed_tokens
from shardwise.plans import Tuning
from shardwise.records import replace

EXPERTS, SHARED = "mlp.experts", "mlp.shared"
"""Regions of routed and of shared experts."""
_INDEX_BYTES = 8  # torch.topk, torch.sort and torch.empty_like of them return int64


# Kernels of an expert in a loop of Python, forward: its mask, three to find its tokens and one to pick them; a GEMM for
# gate and one for up, two for the activation and one GEMM; its tokens' weights, their product and an addition by index.
# Source: transformers 4.57.6 models/qwen3_moe/modeling_qwen3_moe.py Qwen3MoeSparseMoeBlock, mixtral likewise.
_LOOPED = {"dispatch": 5, "activation": 2, "down": 1, "combine": 3}
# What torchtitan's router and experts move of a value of a row from 2025-04 to 2026-04, in types and in bytes more,
# forward and backward: rows gathered, copied behind a row of zeros and gathered by expert; times their weights in fp32
# between two casts, kernels of two types or of broadcast operands; put back by index and added up, none of which it
# compiles. Source: torchtitan 82a9530f models/moe.py MoE.forward, distributed/expert_parallel.py expert_parallel, and
# each operator's gradient; that of an index adds up sorted rows, 1.85 ms for 196,608 of 2,048 values on B200
# (github.com/pytorch/ao pull 4623), 22 bytes.
_INDEXED = (((6.0, 0.0), (3.0, 22.0)), ((2.0, 16.0), (2.0, 32.0)), ((5.0, 0.0), (7.0, 0.0)))


def _looped(y: Layout[X], moe: MoE, op: Op[X], kernels: int) -> Op[X]:
    """Return an operator as a loop over the experts launches it, so many kernels for each; all of them get tokens."""
    looped = y.stack.experts_loop and y.work.phase == "train"
    return replace(op, kernels=kernels * moe.experts) if looped else op


def _launch_seconds(y: Layout[X]) -> float:
    """Return the seconds in which the host quantises the rows of one expert and launches its GEMM."""
    narrow = y.work.phase == "train" and y.work.dtype not in ("fp32", "tf32", *WIDE_DTYPES)
    return y.stack.narrow_expert_seconds if narrow else 0.0


def has_fp32_experts(autocast: bool, tuning: Tuning | None) -> bool:
    """Return whether the parameters of experts are in fp32 where GEMMs take 16 bits.

    So parameters of three dimensions come beside a base of 4 bits (peft utils/other.py
    prepare_model_for_kbit_training), and stay where a trainer casts the rest back (axolotl loaders/model.py).
    """
    return autocast or (tuning is not None and tuning.wide_experts and (tuning.expert_bytes or tuning.rest_bytes) == 4)


def _as_wide_as_weights(y: Layout[X]) -> Layout[X]:
    """Return a layout whose activations are in fp32 where the weights of experts are.

    Grouped GEMMs are no operators of autocast: their input is cast to the type of their weights (transformers 5.24.0
    integrations/moe.py _grouped_mm).
    """
    wide = has_fp32_experts(y.choices.autocast, y.choices.tuning)
    return replace(y, work=replace(y.work, activation_bytes=4)) if wide else y


def _grouped(y: Layout[X], e: Experts[X], name: str, shape: LinearShape[X], source: Tensor[X]) -> Op[X]:
    """Return one GEMM of every local expert with its rows; experts that got no token are not read.

    In fp32 the kernel of 16 bits does not run: PyTorch loops over the experts in C++, a GEMM of fp32 each, which
    autocast leaves as it is and TF32 does not reach unless a script allows it (torch 2.13 ATen/native/GroupedMMUtils.h
    _grouped_mm_fallback, at::mm_out). Linear layers in a loop of Python are operators of autocast.
    """
    n, k = shape.outputs, shape.inputs
    unfused = y.a == 4 and y.work.dtype in WIDE_DTYPES and not y.stack.experts_loop
    flops, weight = 2 * e.rows * n * k, (y.a if unfused else y.work.weight_bytes) * e.hit * n * k
    edges, zero = y.a * e.rows * (n + k), 0 * e.rows
    whole = zero + shape.whole_inputs * shape.whole_outputs
    weights = [Weight(name=f"{name}.weight", elements=e.local * n * k, whole=whole, expert=True, shape=(e.local, n, k),
                      role=shape.role)]  # fmt: skip
    if shape.bias:
        weights.append(replace(vector(f"{name}.bias", e.local * n, shape.whole_outputs), expert=True))
    gradient = 2 * y.work.gradient_bytes * e.local * n * k
    kept = (replace(source, read_for="weight"), *_biased_rows(y, e, shape))
    return Op(
        name=name, kind="grouped", region=name.rpartition(".")[0], flops=flops, forward_bytes=edges + weight,
        backward_flops=flops, backward_bytes=edges + weight, weight_flops=flops, weight_bytes=edges + gradient,
        rows=e.rows / maximum(e.hit, 1), columns=n, inner=k, batch=e.hit, weights=tuple(weights), reads=(source,),
        saves=kept, model_flops=2 * e.fair * n * k, dtype=y.work.dtype,
        output_bytes=y.a * e.rows * n,
        host_seconds=e.local * each if (each := _launch_seconds(y)) else 0.0, role=shape.role, modules=shape.modules,
        vector_units=unfused,
    )  # fmt: skip


def _biased_rows(y: Layout[X], e: Experts[X], shape: LinearShape[X]) -> tuple[Tensor[X], ...]:
    """Return what adding each row the bias of its expert keeps: their numbers, for the gradient of the biases.

    transformers 5.24.0 integrations/moe.py grouped_mm_experts_forward: gate_up_proj_bias[expert_ids_g].
    """
    if not shape.bias or y.stack.permutes_experts or y.work.phase != "train":
        return ()
    return (Tensor(name="expert of each row", size_bytes=_INDEX_BYTES * e.rows, born="mlp", read_for="weight"),)


def _expert_ops(y: Layout[X], moe: MoE, e: Experts[X], name: str) -> tuple[Op[X], ...]:
    """Return the two grouped GEMMs of the local experts and the activation between them."""
    region, sides, zero = f"{name}.experts", 2 if moe.gated else 1, 0 * e.rows
    permuted = Tensor(name=f"{name}.permuted", size_bytes=y.a * e.rows * e.D, born=name)
    act, product = activation_op(y, region, moe, e.rows, e.F)
    all_ffn = moe.experts * moe.ffn
    # whole_outputs are those of all experts together: their product with the inputs of one is the weights of all.
    up = LinearShape(
        inputs=e.D + zero,
        outputs=sides * e.F,
        whole_inputs=e.D,
        whole_outputs=sides * all_ffn,
        bias=moe.bias,
        role="up",
        modules=("gate", "up") if moe.gated else ("up",),
    )
    down = LinearShape(inputs=e.F, outputs=e.D + zero, whole_inputs=moe.ffn, whole_outputs=moe.experts * e.D,
                 bias=moe.bias, role="down", modules=("down",))  # fmt: skip
    ops = (
        _looped(y, moe, _with_idle_rows(y, moe, _grouped(y, e, f"{region}.up", up, permuted)), sides),
        *_clamps(y, moe, e, region),
        _looped(y, moe, act, _LOOPED["activation"]),
        _looped(y, moe, _grouped(y, e, f"{region}.down", down, _weighted(y, moe, region, product)), _LOOPED["down"]),
    )
    return (*ops, *_added_bias(y, moe, e, region))


def _with_idle_rows(y: Layout[X], moe: MoE, op: Op[X]) -> Op[X]:
    """Return the first GEMM of experts, whose parameter has rows for those without weights, which adapters have too.

    transformers 5.23.0 LongcatFlashExperts: gate_up_proj of all experts, down_proj of those that are routed to.
    """
    if not moe.zero_experts or y.choices.tuning is None or y.stack.permutes_experts:
        return op
    first, *others = op.weights
    rows = first.shape[0] + divide(0 * op.rows + moe.zero_experts, y.degrees.ep)
    return replace(op, weights=(replace(first, shape=(rows, *first.shape[1:])), *others))


# Widths of the experts that clamping moves, forward and backward. Forward: gate and up are clamped each (2 + 2) and
# joined again (2 + 2). Backward: each clamp reads the gradient and its input and writes (3 + 3), both are joined (4).
_CLAMPED_WIDTHS = (8, 10)


def _clamps(y: Layout[X], moe: MoE, e: Experts[X], region: str) -> tuple[Op[X], ...]:
    """Return what holds gate and up within limits in kernels of their own, in training; the joined copy is kept.

    Source: Megatron-LM core/fusions/fused_bias_geglu.py, weighted_bias_quick_geglu_impl: both clamps and torch.cat
    stand outside the compiled activation. The one kernel of all experts has them inside, as AutoModel's activation has.
    """
    if not moe.clamped or y.work.phase != "train" or y.stack.experts != "permuted" or y.stack.experts_kernel:
        return ()
    one = y.a * e.rows * e.F
    moved = (_CLAMPED_WIDTHS[0] * one, _CLAMPED_WIDTHS[1] * one)
    entry = Tensor(name=f"{region}.up", size_bytes=2 * one, born=region)
    joined = Tensor(name=f"{region}.clamped", size_bytes=2 * one, born=f"{region}.act")
    return (memory_op(y, f"{region}.clamps", f"{region}.act", moved, kernels=3, reads=(entry,), saves=(joined,),
                      role="steps"),)  # fmt: skip


# Bytes an element of the experts' outputs that adding their biases moves, forward and backward. Forward: the bias times
# the fp32 weight of its row (4), the sum in fp32 (2 + 4 + 4), joining the experts (4 + 4), the cast (4 + 2). Backward:
# the cast (2 + 4), the gradients of output (4 + 2), weight and bias (4 + 4 + 4 each), joining (2 + 2).
_BIAS_BYTES = (28, 40)
# Widths of gate and up that adding theirs moves where no GEMM and no activation does, in their type: the sum (2) and
# joining the experts (2), the sum over the rows of the gradient (1).
_ENTRY_BIAS_WIDTHS = (4, 1)


def _added_bias(y: Layout[X], moe: MoE, e: Experts[X], region: str) -> tuple[Op[X], ...]:
    """Return what adds the biases of the second GEMM, expert by expert outside the GEMMs, in training.

    Source: Megatron-LM core/transformer/moe/experts.py, TEGroupedMLP._apply_bias; eager, since rows have weights.
    NVIDIA-NeMo/Automodel nemo_automodel/components/moe/layers.py GroupedExpertsDeepEP: behind both GEMMs (2025-10).
    """
    if not moe.bias or y.work.phase != "train" or not y.stack.permutes_experts:
        return ()
    first = y.a * 2 * e.F if y.stack.experts == "permuted-compiled" else 0 * e.F
    pairs = zip(_BIAS_BYTES, _ENTRY_BIAS_WIDTHS, strict=True)
    moved = tuple(e.rows * (width * e.D + more * first) for width, more in pairs)
    return (memory_op(y, f"{region}.bias", region, (moved[0], moved[1]), kernels=5, role="steps"),)


def _weighted(y: Layout[X], moe: MoE, region: str, product: Tensor[X]) -> Tensor[X]:
    """Return what the second GEMM keeps: the activated rows, in a tensor of their own where kernels weight them."""
    if not weights_rows(y, moe):
        return product
    return Tensor(name=f"{region}.weighted", size_bytes=product.size_bytes, born=product.born)


def _router(y: Layout[X], moe: MoE, D: int, source: Tensor[X], name: str) -> Op[X]:
    """Return the router: a GEMM with every expert's vector, a softmax in fp32, and the choice of k.

    Kept: the probabilities, and the choice as int64 indices (transformers) or a one-byte map (Megatron-LM). Weights
    that are made to sum to one keep themselves and their sum; Megatron-LM's are a softmax of the chosen logits but for
    sigmoid scores (core/transformer/moe/moe_utils.py topk_routing_with_score_function), those beside a correction.
    """
    T, region = routed_tokens(y), f"{name}.router"
    zero, E = 0 * T, moe.experts + moe.zero_experts
    flops, moved = 2 * T * D * E, y.a * T * D + 4 * T * E
    weights = [Weight(name=f"{region}.weight", elements=zero + D * E, whole=zero + D * E, shape=(E, D), role="router")]
    if moe.router_bias:
        weights.append(vector(f"{region}.bias", zero + E, E))
    chosen = moe.chosen_softmax and not y.stack.permutes_experts
    sizes = [("probabilities", y.a * moe.top_k if chosen else 4 * E)]
    kept: tuple[Tensor[X], ...] = ()
    if y.choices.autocast:
        source = Tensor(name=f"{region}.input in 16 bits", size_bytes=y.a * T * D, born=region)
        copy = Tensor(name=f"{region}.weight in 16 bits", size_bytes=zero + y.a * D * E, born=region)
        kept = (replace(copy, read_for="input"),)
    elif moe.float_router and y.stack.norm == "eager" and y.a < 4:
        source = Tensor(name=f"{region}.fp32 input", size_bytes=4 * T * D, born=region)
    if moe.router_norm and y.stack.norm == "eager":
        kept, source = (*kept, *_router_norm(y, moe, D, region)), replace(source, name=f"{region}.scaled", born=region)
    sizes.append(("choice", E if y.stack.permutes_experts else _INDEX_BYTES * moe.top_k))
    if moe.normalised and (moe.correction_bias or not y.stack.permutes_experts):
        sizes += [("chosen probabilities", 4 * moe.top_k), ("their sum", 4)]
    kept += tuple(Tensor(name=f"{region}.{part}", size_bytes=size * T, born=region) for part, size in sizes)
    return Op(
        name=region, kind="matmul", region=region, flops=flops, forward_bytes=moved, backward_flops=flops,
        backward_bytes=moved, weight_flops=flops, weight_bytes=moved, rows=T, columns=zero + E, inner=zero + D,
        weights=tuple(weights), reads=(source,), saves=(replace(source, read_for="weight"), *kept), model_flops=flops,
        dtype=y.work.dtype, kernels=4, output_bytes=4 * T * E, role="router",
    )  # fmt: skip


def _router_norm(y: Layout[X], moe: MoE, D: int, region: str) -> tuple[Tensor[X], ...]:
    """Return what the router's own norm keeps, its scales of channels, and those of the chosen experts.

    transformers 5.24.0 models/gemma4/modeling_gemma4.py Gemma4TextRouter; in fp32 its norm's input is the stream.
    """
    T, k = routed_tokens(y), moe.top_k
    by_input = (
        ("norm.fp32", 4 * D * (y.a < 4)),
        ("norm.statistics", 4),
        ("norm.mean squares", 4),
        ("experts' scales", y.a * k),
    )
    by_weight = (("normalised", y.a * D), ("unscaled weights", 4 * k))
    return (
        *(Tensor(name=f"{region}.{name}", size_bytes=T * n, born=region, read_for="input") for name, n in by_input),
        *(Tensor(name=f"{region}.{name}", size_bytes=T * n, born=region, read_for="weight") for name, n in by_weight),
    )


def _dispatch_tensors(
    y: Layout[X], moe: MoE, e: Experts[X], name: str, width: float
) -> tuple[tuple[Tensor[X], ...], tuple[Tensor[X], ...]]:
    """Return what bringing rows to experts and back keeps, scaled in so many bytes a value: at dispatch, at combine.

    Transformers keeps three int64 orders of the T * k rows and the offsets of the groups, and scales the experts'
    outputs, so that those are kept with their weights. Megatron-LM applies the weights before the second GEMM: it
    keeps them.
    """
    rows, zero = e.rows, 0 * e.rows

    def kept(part: str, size: X) -> Tensor[X]:
        return Tensor(name=f"{name}.{part}", size_bytes=size, born=name)

    if y.stack.permutes_experts:
        return (kept("routed weights", 4 * rows),), ()
    if hands_all(y, moe):
        return (kept("repeated", y.a * rows * e.D), kept("routed weights", y.a * rows)), ()
    orders = tuple(kept(part, _INDEX_BYTES * rows) for part in ("token of each row", "order by expert", "order back"))
    weights = kept("routed weights", (4 if moe.float_weights else y.work.weight_bytes) * rows)
    unscaled = Tensor(name=f"{name}.unscaled output", size_bytes=width * rows * e.D, born=f"{name}.experts")
    return (*orders[:2], kept("group offsets", zero + 4 * moe.experts)), (unscaled, weights, orders[2])


def _exchange(y: Layout[X], moe: MoE, e: Experts[X], name: str) -> tuple[Op[X], tuple[Op[X], ...]]:
    """Return dispatch and combine: T * k rows over the expert-parallel ranks, gathered over the expert-tensor ranks.

    Where nothing fuses them, the weights of the rows are multiplied with ahead of the combine, which keeps the rows in
    fp32, as they were cast for it.

    The busiest rank, with the rows of its experts, decides when the exchange ends.
    Source: Megatron-LM core/transformer/moe/token_dispatcher.py, MoEAlltoAllTokenDispatcher.
    """
    if y.stack.dispatch == "all-gather":
        first, last = _gathered_exchange(y, e, moe, name)
        return first, (last,)
    T = routed_tokens(y)
    rows = routed_rows(y, moe)
    size = y.a * rows * e.D
    arrived = size * y.degrees.etp
    fanout = 0 if y.stack.dispatch == "all-to-all" else moe.top_k
    hop: Collective[X] = Collective(
        axis="ep", verb="all_to_all", size_bytes=size, tensor="routed tokens", fanout=fanout, copy_bytes=y.a * e.D,
        queued=y.stack.dispatch == "deepep-1", shape=(rows, e.D),
    )  # fmt: skip
    if y.stack.dispatch == "in-turn":
        # The experts of a token are neighbours, which one copy reaches.
        hop = replace(hop, size_bytes=divide(size, fanout), fanout=1, shape=(divide(rows, fanout), e.D))
    gather: Collective[X] = Collective(
        axis="etp", verb="all_gather", size_bytes=arrived, tensor="routed tokens", shape=(rows * y.degrees.etp, e.D)
    )
    scatter = replace(gather, verb="reduce_scatter", tensor="expert outputs")
    # Rows are read and written once to gather them by rank and, where a rank has several experts, once to sort them;
    # kernels that send a token once read it where it is (core/transformer/moe/fused_a2a.py, DeepEP and HybridEP).
    passes = 4 if y.work.phase == "train" and not fanout else 2
    indexed = y.stack.experts == "indexed" and passes == 4
    sent, back = _dispatch_tensors(y, moe, e, name, 4 if indexed else y.a)
    moved = added = (passes * size, passes * size)
    weighted: tuple[Op[X], ...] = ()
    if indexed:
        values = rows * e.D
        moved, wide, added = ((size * f + fw * values, size * b + bw * values) for (f, fw), (b, bw) in _INDEXED)
        weighted = (memory_op(y, f"{name}.weighted", name, wide, kernels=3, role="steps"),)
    # The weights of all experts of a domain go with each copy on the way there, their gradients on its way back; those
    # of a token's own experts with copies that are queued (DeepEP csrc/kernels/intranode.cu, topk_weights).
    there = replace(hop, beside_bytes=4 * (moe.top_k if hop.queued else moe.experts))
    dispatch = memory_op(y, f"{name}.dispatch", name, moved, forward=(there, gather), backward=(scatter, there),
                         saves=sent, kernels=2, output_bytes=arrived, role="dispatch")  # fmt: skip
    combine = memory_op(y, f"{name}.combine", name, added, forward=(scatter, hop), backward=(hop, gather), saves=back,
                        kernels=2, output_bytes=y.a * T * e.D, transient_bytes=reordered_bytes(y, moe, rows * e.D),
                        role="combine")  # fmt: skip
    last = _looped(y, moe, combine, _LOOPED["combine"])
    return _looped(y, moe, dispatch, _LOOPED["dispatch"]), (*weighted, last)


def _gathered_exchange(y: Layout[X], e: Experts[X], moe: MoE, name: str) -> tuple[Op[X], Op[X]]:
    """Return dispatch and combine where every rank gathers the tokens of all, and their sums are scattered back.

    Each rank picks the rows of its experts out of the T * ep * etp tokens, and fills as many with what those give. The
    gradient of a gather is the scatter of its sums, and the reverse.
    Source: Megatron-LM core_v0.17.1 core/transformer/moe/token_dispatcher.py, MoEAllGatherTokenDispatcher.
    """
    T, ep, etp = routed_tokens(y), y.degrees.ep, y.degrees.etp
    gather: Collective[X] = Collective(
        axis="ep", verb="all_gather", size_bytes=y.a * T * ep * e.D, tensor="routed tokens", shape=(T * ep, e.D)
    )
    wider = replace(gather, axis="etp", size_bytes=gather.size_bytes * etp, shape=(T * ep * etp, e.D))
    there = gather, wider
    back = tuple(replace(c, verb="reduce_scatter", tensor="expert outputs") for c in reversed(there))
    everywhere, picked = y.a * T * ep * etp * e.D, y.a * e.rows * e.D
    sent, kept = _dispatch_tensors(y, moe, e, name, y.a)
    # Picking reads the rows of its experts and writes them; putting them back adds them to a tensor of all tokens.
    moved = (2 * picked, 2 * picked + everywhere)
    dispatch = memory_op(y, f"{name}.dispatch", name, moved, forward=there, backward=back, saves=sent, kernels=2,
                         output_bytes=everywhere + picked, role="dispatch")  # fmt: skip
    combine = memory_op(y, f"{name}.combine", name, moved[::-1], forward=back, backward=there, saves=kept, kernels=2,
                        output_bytes=everywhere, role="combine")  # fmt: skip
    return dispatch, combine


def _small(y: Layout[X], name: str, region: str, sizes: tuple[int, int], source: Tensor[X]) -> Op[X]:
    inputs, outputs = sizes
    zero = 0 * y.tokens
    shape = LinearShape(inputs=inputs + zero, outputs=outputs + zero, whole_inputs=inputs, whole_outputs=outputs,
                  role="shared_gate" if outputs == 1 else "feed_forward")  # fmt: skip
    return y.whole(name, region, shape, source)


def moe(y: Layout[X], moe: MoE, D: int, source: Tensor[X], name: str = "mlp") -> tuple[Op[X], ...]:
    """Return the operators of a mixture of experts: router, dispatch, experts, combine, and shared experts beside them.

    Experts that work on a narrower latent have a projection into it and one out of it.

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> model, y = Model.load("mixtral-8x7b"), whole_layout(1, 64)
    >>> source = y.residual("norm2.output", model.hidden, "norm2")
    >>> [op.name for op in moe(y, model.layers[0].feed_forward, model.hidden, source)][:2]
    ['mlp.router', 'mlp.dispatch']
    """
    e = experts_of(y, moe, D)
    own = _as_wide_as_weights(y)
    dispatch, combine = _exchange(own, moe, e, name)
    routed = [dispatch, *_expert_ops(own, moe, e, name), *combine]
    if moe.latent:
        entry = Tensor(name=f"{name}.latent", size_bytes=y.a * y.residual_tokens * moe.latent, born=name)
        into = _small(y, f"{name}.latent_down", name, (D, moe.latent), source)
        out = _small(y, f"{name}.latent_up", name, (moe.latent, D), entry)
        routed = [*belonging([into], "latent"), *routed, *belonging([out], "latent")]
    return (_router(y, moe, D, source, name), *routed, *_shared(y, moe, D, source, name))


def _shared(y: Layout[X], moe: MoE, D: int, source: Tensor[X], name: str) -> list[Op[X]]:
    """Return the shared experts that every token visits, and the sigmoid gate on their output (Qwen2-MoE)."""
    if moe.shared is None:
        return []
    region = f"{name}.shared"
    ops = list(belonging(mlp(y, moe.shared, D, source, region), "shared"))
    if moe.shared_gate:
        ops.append(_small(y, f"{region}_gate", region, (D, 1), source))
        gate = Tensor(name=f"{region}.gate", size_bytes=y.a * y.residual_tokens, born=region)
        out = y.residual(f"{region}.output", D, region)
        moved = (2 * out.size_bytes, 3 * out.size_bytes)
        ops.append(
            memory_op(y, f"{region}.scale", region, moved, saves=(gate, out), kernels=2, output_bytes=out.size_bytes)
        )
    return ops
