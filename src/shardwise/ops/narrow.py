"""What backward reads in fewer bits: copies that a user asks for, and inputs of GEMMs of fewer than 16 bits.

Sources: copies of a feed-forward ActNN, arXiv:2104.14129, per tensor, scales not counted; GEMMs
`[scaling]` of plans/precisions.toml.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.ledger.number import X, total
from shardwise.ledger.op import Collective, Op, Tensor
from shardwise.ops.adapter_parts import matches, modules_of
from shardwise.ops.layout import Layout, memory_op
from shardwise.plans import NarrowScaling, find_scaling
from shardwise.records import replace


def bits_of(y: Layout[X], op: Op[X], tensor: Tensor[X]) -> int:
    """Return the bits in which a tensor that a feed-forward's operator keeps is kept, 0 as it is.

    The input of the first GEMM, of the activation, or of the last GEMM; what routing keeps stays as it is.
    """
    settings = y.stack.settings
    if tensor.product:
        return settings.mlp_down_input_bits
    return {"activation": settings.activation_input_bits, "up": settings.mlp_input_bits}.get(op.role, 0)


def quantised(y: Layout[X], ops: tuple[Op[X], ...], source: Tensor[X]) -> tuple[Op[X], ...]:
    """Return the operators of a feed-forward that keep narrow copies, after one that makes them.

    Each copy reads the tensor and writes its bits forward, reads them and writes the tensor backward.
    """
    copies: dict[str, Tensor[X]] = {}
    moved: list[X] = []
    quantised_ops = []
    for op in ops:
        saves, reads = [], {t.name: t for t in op.reads}
        for tensor in op.saves:
            bits = bits_of(y, op, tensor)
            name = f"{tensor.name}, {bits} bits"
            if not bits:
                saves.append(tensor)
                continue
            born = "mlp" if tensor.name == source.name else tensor.born
            narrow = Tensor(name=name, size_bytes=tensor.size_bytes * (bits / (8 * y.a)), born=born)
            if name not in copies:
                moved.append(tensor.size_bytes + narrow.size_bytes)
            copies[name] = narrow
            saves.append(narrow)
            # An operator that is recomputed reads the copy, where what makes the tensor is not recomputed with it.
            if tensor.name in reads and tensor.name != source.name:
                reads[tensor.name] = narrow
        quantised_ops.append(replace(op, saves=tuple(saves), reads=tuple(reads.values())))
    if not copies:
        return ops
    both = total(moved)
    return (*quantised_ops, memory_op(y, "mlp.quantise", "mlp", (both, both), kernels=len(copies)))


def is_narrow(op: Op[X]) -> bool:
    """Return whether an operator is a GEMM of fewer than 16 bits with weights of its own."""
    product = op.kind in ("matmul", "grouped") and op.role not in ("router", "head")
    return (
        product and find_scaling(op.dtype) is not None and any(w.kind == "matrix" and not w.adapter for w in op.weights)
    )


def quantised_inputs(y: Layout[X], ops: Iterable[Op[X]]) -> tuple[Op[X], ...]:
    """Return operators whose narrow GEMMs gather and save the copies that they multiplied, each its own.

    What another operator keeps for itself it keeps as before; an output that a GEMM behind it alone would read goes.
    """
    ops = tuple(ops)
    scaling = find_scaling(y.work.dtype, y.stack.settings.fp8_recipe)
    if scaling is None or y.work.phase != "train":
        return ops
    recipe = (y.stack.settings.fp8_recipe or "tensorwise") if y.work.dtype == "fp8" else "nvfp4"
    if y.stack.gathers_quantised in ("all", recipe):
        ops = tuple(_sent(y, op, scaling) if is_narrow(op) else op for op in ops)
    if not y.stack.saves_quantised:
        return ops
    normed = {op.region for op in ops if op.role == "norm"}
    copied = {op.name: _copies(y, op, scaling, normed) for op in ops if is_narrow(op)}
    gone = {name for copies in copied.values() for name in copies}
    quantised_ops = []
    for op in ops:
        own = copied.get(op.name, {})
        kept = (
            own.get(t.name, t)
            for t in op.saves
            if op.kind in ("matmul", "grouped") or t.read_for != "weight" or t.name not in gone
        )
        quantised_ops.append(replace(op, saves=tuple(kept)))
    return tuple(quantised_ops)


def _sent(y: Layout[X], op: Op[X], scaling: NarrowScaling) -> Op[X]:
    """Return a GEMM whose ranks gather what each has cast of its part: an input, and the gradient of an output.

    TransformerEngine pytorch/distributed.py gather_along_first_dim: of an input rows before the product, and what the
    recipe has for the weight gradient before that; of the gradient both, where they are copies apart and weights train.
    An input that adapters take too is gathered as it is, but with user buffers (return_layernorm_output_gathered).
    """
    tuning = y.choices.tuning
    shared = tuning is not None and any(matches(tuning, op, module.short) for module in modules_of(tuning, op))
    trains = any(w.trainable and w.kind == "matrix" and not w.adapter for w in op.weights)
    gradient = scaling.sent_gradient_bytes if trains else scaling.sent_bytes
    widths = {"input": scaling.sent_bytes, "output gradient": gradient}

    def whole(c: Collective[X]) -> bool:
        return shared and c.tensor == "input" and c.hides != "copied"

    def narrow(c: Collective[X]) -> Collective[X]:
        cast = c.axis == "tp" and c.verb == "all_gather" and c.tensor in widths and not whole(c)
        return replace(c, size_bytes=c.size_bytes * (widths[c.tensor] / y.a)) if cast else c

    parts = 1 if any(map(whole, op.forward)) else op.gathered_parts
    forward, backward = tuple(map(narrow, op.forward)), tuple(map(narrow, op.backward))
    saves = op.saves
    if forward != op.forward and not (
        y.stack.regathers_inputs or y.stack.saves_quantised
    ):  # It saves what it gathered.
        saves = tuple(replace(t, size_bytes=t.size_bytes * (scaling.sent_bytes / y.a)) for t in saves)
    return replace(op, gathered_parts=parts, forward=forward, backward=backward, saves=saves)


def _copies(y: Layout[X], op: Op[X], scaling: NarrowScaling, normed: set[str]) -> dict[str, Tensor[X]]:
    """Return the copies that a GEMM keeps of what it would save for its weight gradient, by the name of that.

    Outputs of `normed` regions, those of norms, are gathered again where they are split.
    """
    if op.role == "out" and op.region == "attention" and scaling.keeps_attention:
        return {}
    gathered = op.split == "outputs" and y.choices.sequence_parallel

    def copy(t: Tensor[X]) -> Tensor[X]:
        width = scaling.gathered_bytes if gathered and t.born in normed else scaling.input_bytes
        name, size = f"{op.name}: {t.name} as multiplied", t.size_bytes * (width / y.a)
        return replace(t, name=name, size_bytes=size, made_in=op.region)

    return {t.name: copy(t) for t in op.saves if t.read_for == "weight"}
