"""What fine-tuning does to the operators of a model: weights that are frozen, how they are stored, and adapters beside.

Full training is the case in which nothing is frozen: operators are then left as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwise.ledger.number import X, ceil, divide, total
from shardwise.ledger.op import Op, Tensor, Weight
from shardwise.ops.adapter_parts import matches, modules_of
from shardwise.ops.adapters import METHODS, embedding_adapter, virtual_tokens
from shardwise.ops.layout import Layout
from shardwise.ops.peft_adapters import token_rows
from shardwise.plans import BaseFormat, Tuning
from shardwise.records import replace


def tuned(y: Layout[X], ops: Iterable[Op[X]]) -> tuple[Op[X], ...]:
    """Return operators with frozen weights, and the adapters of those that are targets behind each."""
    t = y.choices.tuning
    if t is None:
        return tuple(ops)
    tuned_ops: list[Op[X]] = []
    for op in ops:
        base = frozen(y, t, op) if t.freezes else op
        # A loss that takes the head by tiles casts each by itself.
        tiled = y.work.phase == "train" and y.stack.head_in_tiles
        if op.role == "head" and t.wide_head and not (t.narrow_head or tiled or y.choices.autocast):
            base = replace(base, saves=(*base.saves, _cast_head(y, op)))
        if op.role == "embedding" and t.adapter and matches(t, op, "embedding"):
            tuned_ops += [base, *embedding_adapter(y, t, op)]
            continue
        if t.adapter == "trainable-tokens" and (op.role == "embedding" or (op.role == "head" and not op.weights)):
            tuned_ops += token_rows(y, t, base)
            continue
        tuned_ops += adapted(y, t, base)
        if op.role == "embedding" and t.virtual_tokens:
            tuned_ops.append(virtual_tokens(y, t, op))
    if t.adapter == "adalora" and y.work.phase == "train":
        tuned_ops = [_with_importance(t, op) for op in tuned_ops]
    if t.wide_layers:
        tuned_ops = [_off_units(op) for op in tuned_ops]
    if wide_results(y, t):
        tuned_ops = [_in_fp32(y, op) for op in tuned_ops]
    return tuple(_with_other_adapters(t, op) for op in tuned_ops) if t.reference or t.critic else tuple(tuned_ops)


def wide_results(y: Layout[X], tuning: Tuning) -> bool:
    """Return whether GEMMs of narrow weights give fp32 for the norm's fp32 that they take in 16 bits, under autocast.

    bitsandbytes 0.49 nn/modules.py Linear4bit.forward: x.to(compute_dtype), and the result back to x's own type, of
    which autocast knows nothing. Attention takes and gives 16 bits (transformers modeling_flash_attention_utils.py;
    aten/src/ATen/autocast_mode.h has SDPA among what it lowers), and with the stream all is in fp32 again.
    """
    return tuning.base.bitsandbytes and tuning.wide_stream and tuning.autocast and y.a < 4


# What element-wise kernels move in fp32 over what they move in 16 bits. Norms in steps cast nothing then, and 28 and 56
# bytes an element are left of 36 and 72.
_IN_FP32 = {"norm": 2.0, "add": 2.0, "rotary": 2.0, "activation": 2.0}
_STEPS_IN_FP32 = 28 / 36


def _in_fp32(y: Layout[X], op: Op[X]) -> Op[X]:
    """Return an operator between GEMMs of narrow weights whose results are in fp32 (`wide_results`).

    Queries and keys are copied to 16 bits for the kernel of attention, and their gradients back.
    """
    if op.kind != "memory" or op.role not in _IN_FP32:
        return op
    share = _STEPS_IN_FP32 if op.role == "norm" and y.stack.norm == "eager" else _IN_FP32[op.role]
    copied = 3 * op.output_bytes if op.role == "rotary" else 0 * op.forward_bytes
    return replace(
        op, forward_bytes=share * op.forward_bytes + copied, backward_bytes=share * op.backward_bytes + copied
    )


def _off_units(op: Op[X]) -> Op[X]:
    """Return an operator of layers in fp32: its GEMMs run without matrix units, as torch leaves TF32 to its user."""
    return replace(op, vector_units=True) if op.dtype == "fp32" and op.kind in ("matmul", "attention") else op


def _cast_head(y: Layout[X], op: Op[X]) -> Tensor[X]:
    """Return the 16-bit copy of a head in fp32 that autocast makes for its GEMM, and that its input gradient reads.

    pytorch aten/src/ATen/autocast_mode.cpp cached_cast; only copies of leaves that train last for the whole pass.
    """
    return Tensor(name="head.weight in 16 bits", size_bytes=y.a * op.columns * op.inner, born="head", read_for="input")


def _with_importance(tuning: Tuning, op: Op[X]) -> Op[X]:
    """Return an operator with what AdaLoRA keeps of each parameter to choose ranks by: ipt, exp_avg_ipt, exp_avg_unc.

    peft tuners/adalora/layer.py RankAllocator.update_ipt; let go for the last steps (reset_ipt).
    """
    own = [w for w in op.weights if w.adapter and w.trainable]
    kept = [
        replace(w, name=f"{w.name} importance", elements=0 * w.elements, whole=0 * w.whole, trainable=False,
                stored_bytes=3 * tuning.width * w.elements)
        for w in own
    ]  # fmt: skip
    return replace(op, weights=(*op.weights, *kept))


def _with_other_adapters(tuning: Tuning, op: Op[X]) -> Op[X]:
    """Return an operator with the adapters of a frozen reference and of a critic beside that of the policy."""
    own = [w for w in op.weights if w.adapter and w.trainable]
    more = [
        replace(w, name=f"{w.name} reference", trainable=False, stored_bytes=tuning.width * w.elements) for w in own
    ]
    critic = [replace(w, name=f"{w.name} critic") for w in own]
    return replace(op, weights=(*op.weights, *more[: len(own) * tuning.reference], *critic[: len(own) * tuning.critic]))


def adapted(y: Layout[X], tuning: Tuning, op: Op[X]) -> tuple[Op[X], ...]:
    """Return a GEMM with the adapters of the linear layers that it stands for."""
    if tuning.adapter not in METHODS or op.kind not in ("matmul", "grouped") or op.region.endswith("core"):
        return (op,)
    chosen = [module for module in modules_of(tuning, op) if matches(tuning, op, module.short)]
    return METHODS[tuning.adapter](y, tuning, op, chosen) if chosen else (op,)


def frozen(y: Layout[X], tuning: Tuning, op: Op[X]) -> Op[X]:
    """Return an operator whose weights are stored and not trained, but for what trains of the model.

    What trains beside an adapter is a copy: the original stays. A GEMM with narrow weights makes 16 bits of them
    before each pass (bitsandbytes functional.py dequantize_4bit), one weight at a time.
    """
    if not op.weights:
        own = _tied_copy(tuning, op)
        return replace(op, weights=own) if own else replace(op, without=("weight",) if op.kind == "matmul" else ())
    part = part_of(op) in tuning.trains
    weights: list[Weight[X]] = []
    for w in op.weights:
        if w.adapter:
            weights.append(w)
            continue
        # Of what stands before the blocks the embedding table trains, not that of positions.
        trained = part and (w.kind != "embedding" or w.role == "embedding")
        if not trained or tuning.copies:
            stored_bytes = stored(tuning, op, w)
            packed = tuning.base.narrow and quantised(tuning, op, w)
            apart = stored_bytes - packed_bytes(tuning.base, w.elements) if tuning.scales_apart and packed else 0
            weights.append(replace(w, trainable=False, stored_bytes=stored_bytes, apart_bytes=apart, packed=packed))
        if trained:
            # The copy is no second weight of the model.
            weights.append(replace(w, name=f"{w.name} copy") if tuning.copies else w)
    without_gradients = replace(op, weights=tuple(weights))
    matrices = [w for w in op.weights if quantised(tuning, op, w)]
    # Products of 8 bits read weights of 8 bits as they are stored, those of 4 bits NVFP4.
    if not matrices or part or not tuning.base.widened_bytes or tuning.base.read_by == op.dtype:
        return without_gradients
    elements = total((w.elements for w in matrices), 0 * y.tokens)
    experts, layers_of_one = _in_a_loop(y, op, matrices[0])
    one = total((divide(w.elements, experts * layers_of_one) for w in matrices), 0 * y.tokens)
    # Beside the gradient of 16-bit logits there are those in fp32, where the trainer holds them.
    outputs = op.output_bytes * (3 if op.role == "head" and y.stack.loss_kernel == "chunked-fp32" else 1)
    outputs = divide(outputs, experts)
    # Each layer makes 16 bits of the fp32 that it takes, and fp32 of what it gives (8 bytes in place of 4, or of 2).
    layers, cast = max(len(op.parts), 1), 4 * op.rows
    if wide_results(y, tuning) and op.role != "out":
        cast = 6 * op.rows * (layers * op.inner + op.columns)
    else:
        cast = cast * ((2 * layers - 1) * op.inner + op.columns) if tuning.wide_layers else 0 * cast
    return replace(
        without_gradients,
        dtype=tuning.compute if tuning.wide_layers else op.dtype,
        saves=tuple(_kept_of_narrow(y, tuning, op, elements)),
        widened_bytes=tuning.base.widened_bytes * elements + cast,
        decoding_flops=tuning.base.decoding_flops * elements if tuning.base.decoding_flops else 0,
        transient_bytes=op.transient_bytes + outputs + tuning.base.unpacked_bytes * one,
    )


def _in_a_loop(y: Layout[X], op: Op[X], matrix: Weight[X]) -> tuple[X, int]:
    """Return over how many experts an operator goes one by one, and of how many layers an expert's share of it is.

    Experts that are linear layers in a loop of Python widen a weight of one at a time, and make its gradients alone
    (transformers 4.57.6 models/mixtral/modeling_mixtral.py MixtralSparseMoeBlock).
    """
    if op.kind == "grouped" and y.stack.experts_loop and matrix.shape:
        return divide(matrix.shape[0], 1), len(op.modules)
    return 0 * y.tokens + 1, max(len(op.parts), 1)


def _kept_of_narrow(y: Layout[X], tuning: Tuning, op: Op[X], elements: X) -> Iterator[Tensor[X]]:
    """Yield what a GEMM with narrow weights keeps.

    bitsandbytes before 0.43.2 keeps the input whatever trains (autograd/_functions.py MatMul4Bit), as an attribute of
    its node: checkpoints that are not reentrant do not drop it, and it lasts as long as the graph, which a loss that is
    not yet overwritten holds into the next micro-batch.
    """
    for s in op.saves:
        weighed = s.read_for == "weight" and tuning.keeps_inputs
        yield replace(s, read_for="input") if weighed else s
        if weighed and tuning.holds_inputs:
            yield replace(s, name=f"{s.name} of the graph", born="", read_for="input")
    if tuning.base.keeps_widened:
        name = f"{op.name}.weight in 16 bits"
        yield Tensor(name=name, size_bytes=y.a * elements, born=op.region, read_for="input")


def _tied_copy(tuning: Tuning, op: Op[X]) -> tuple[Weight[X], ...]:
    """Return the copy of a tied table that a head trains as its own where it is among what trains."""
    if op.role != "head" or "head" not in tuning.trains or not tuning.copies:
        return ()
    elements = op.columns * op.inner
    return (Weight(name="head.weight copy", elements=elements, whole=elements, kind="head",
                   shape=(op.columns, op.inner), role="head"),)  # fmt: skip


def part_of(op: Op[X]) -> str:
    """Return the part of a model that an operator's weights belong to, as `Tuning.trains` names it."""
    return {"embedding": "embedding", "head": "head", "norm": "norms"}.get(op.role, "layers")


def quantised(tuning: Tuning, op: Op[X], w: Weight[X]) -> bool:
    """Return whether a weight takes the format of the base: matrices of the layers but routers, maybe the head."""
    if op.kind == "grouped" and tuning.wide_experts:
        return False
    return op.role != "router" and (
        w.kind == "matrix" or (tuning.narrow_head and op.role == "head" and w.kind == "head")
    )


def stored(tuning: Tuning, op: Op[X], w: Weight[X]) -> X:
    """Return the bytes of a frozen weight, in the base's format or beside it."""
    if not tuning.base.narrow:
        return w.elements * (tuning.base.bits / 8)
    if quantised(tuning, op, w):
        bytes_of_one = base_bytes(tuning.base, w.elements, w.shape[0] if w.shape else 0, len(op.parts) or 1)
        return bytes_of_one * (tuning.base.read_copies if tuning.base.read_by == op.dtype else 1)
    own = tuning.expert_bytes if op.kind == "grouped" else 0
    return w.elements * (own or tuning.rest_bytes or 2)


def packed_bytes(base: BaseFormat, elements: X) -> X:
    """Return the bytes of the bits of a matrix in a format, without scales and tables."""
    return ceil(divide(elements * base.bits, 8))


def base_bytes(base: BaseFormat, elements: X, rows: X | float = 0, tensors: int = 1) -> X:
    """Return the bytes of a matrix in a format, in so many tensors: bits, scales and tables, each rounded up.

    >>> from shardwise.plans import find_base
    >>> base_bytes(find_base("nf4"), 4096 * 4096), base_bytes(find_base("nf4-dq"), 4096 * 4096)
    (9437248.0, 8655940.0)
    """
    stored = packed_bytes(base, elements) + base.tensor_bytes * tensors + base.row_bytes * rows
    if base.block:
        blocks = ceil(divide(elements, base.block))
        stored = stored + blocks * base.scale_bytes
        if base.second_block:
            stored = stored + ceil(divide(blocks, base.second_block)) * base.second_bytes
    return stored
