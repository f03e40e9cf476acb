"""Dense feed-forwards: up (with gate), activation, down.

Letters: T tokens on the rank, D hidden, F ffn. Source: gated ones arXiv:2002.05202.
"""

from __future__ import annotations

from shardwise.ledger.number import X
from shardwise.ledger.op import Op, Tensor
from shardwise.models import MLP, MoE
from shardwise.ops.adapter_parts import spelled
from shardwise.ops.elementwise import only_weights, vector
from shardwise.ops.layout import Layout, LinearShape, memory_op
from shardwise.records import replace

# What separate kernels keep beside the product, in widths of F, counted with saved-tensor hooks on torch 2.13.0 and
# transformers 5.23.0. ReLU keeps its result, so its input goes; `gelu_new` and `quick_gelu` are written out in Python,
# where the first keeps half the input, the tanh and one plus the tanh beside its input, the second the sigmoid.
_MODULE_TENSORS: dict[str, tuple[str, ...]] = {
    "relu": (),
    "relu2": ("rectified",),
    "gelu-new": ("up", "half", "tanh", "one plus tanh"),
    "quick-gelu": ("up", "sigmoid"),
    "xielu": ("up", "clamped", "expm1", "scaled", "chosen"),
}

# The same of gates and ups that are held within limits, beside both and the activated gate: transformers 5.24.0
# models/gpt_oss/modeling_gpt_oss.py _apply_gate with a scaled gate, models/deepseek_v4 without.
_CLAMPED_TENSORS = {
    True: (("clamped gate", 1), ("sigmoid", 1), ("one plus up", 1)),
    False: (("clamped gate", 1), ("clamped up", 1)),
}


def activation_tensors(y: Layout[X], m: MLP | MoE) -> tuple[tuple[str, float], ...]:
    """Return what an activation keeps for backward beside its output: names, and widths in units of F.

    Fused kernels keep their input, gate and up side by side; gated ones of PyTorch keep the activated gate too.
    """
    if m.gated:
        if y.stack.activation == "fused" or in_one_function(y, m):
            return (("up", 2),)
        kept = (("up", 2), ("activated", 1))
        if not isinstance(m, MoE) or not m.clamped or y.stack.permutes_experts or y.stack.experts_kernel:
            return kept
        return (*kept, *_CLAMPED_TENSORS[m.scaled_gate])
    by_modules = y.stack.norm == "eager"
    names = _MODULE_TENSORS.get(m.activation, ("up",)) if by_modules else ("up",)
    return tuple((name, 1 / y.a if name == "chosen" else 1) for name in names)


def in_one_function(y: Layout[X], m: MLP | MoE) -> bool:
    """Return whether LoRA's own function runs a feed-forward: it makes what enters the last GEMM again in backward.

    Sources: axolotl 0.19.0 kernels/lora.py and unsloth kernels/fast_lora.py LoRA_MLP, of X, gate and up; all three
    layers need an adapter (monkeypatch/lora_kernels.py, models/llama.py patch_peft_model).
    """
    tuning = y.choices.tuning
    if tuning is None or not tuning.kernels or not isinstance(m, MLP) or not m.gated or m.fused_projection:
        return False
    words = spelled(tuning.targets)
    return bool(words & {"all-linear", "linear", "mlp"}) or {"gate", "up", "down"} <= words


def weights_rows(y: Layout[X], m: MLP | MoE) -> bool:
    """Return whether rows of experts are multiplied by their weights between activation and second GEMM, eagerly.

    Megatron-LM core/transformer/mlp.py, per_token_scale: the gradient of the weights reads the activated rows too.
    """
    return isinstance(m, MoE) and y.stack.permutes_experts and y.stack.activation == "eager"


def activation_op(y: Layout[X], name: str, m: MLP | MoE, rows: X, width: X) -> tuple[Op[X], Tensor[X]]:
    """Return the activation function over `width` elements a row and its output, which the next GEMM keeps."""
    region, one = f"{name}.act", y.a * rows * width
    kept = activation_tensors(y, m)
    saves = tuple(
        Tensor(name=f"{name}.{part}", size_bytes=one * units, born=name if part == "up" else region)
        for part, units in kept
    )
    again = in_one_function(y, m)
    out = Tensor(name=f"{name}.product", size_bytes=one, born=region, product=True, remade=again)
    inputs, steps = 2 if m.gated else 1, max(len(kept), 1)
    # Each separate kernel reads and writes once more.
    moved = (inputs + 1 + 2 * (steps - 1)) * one, (2 * inputs + 1 + 3 * (steps - 1)) * one
    entry = Tensor(name=f"{name}.up", size_bytes=one * inputs, born=name)
    # The gradient of ReLU reads what it made, as that of the weights of Megatron-LM's eager experts does; that of other
    # functions leaves it to the weight of the GEMM behind it.
    own = (*saves, replace(out, read_for="weight" if kept and not weights_rows(y, m) else "input"))
    # That function makes what enters the last GEMM again in place of its gradient, beside gate and up.
    op = memory_op(y, f"{name}.activation", region, moved, reads=(entry,), saves=own, kernels=steps,
                   output_bytes=one, transient_bytes=one if again else 0, role="activation")  # fmt: skip
    return op, out


def makes_casts(y: Layout[X]) -> bool:
    """Return whether the kernel of a dense activation writes what the GEMM behind it multiplies, in both directions.

    TransformerEngine pytorch/ops/basic/swiglu.py with the quantiser of the next operator, in one kernel where scales
    are known ahead or are of a block of 32 (csrc/extensions/activation.cpp).
    """
    return y.stack.fuses_operators and y.stack.settings.fp8_recipe in ("delayed", "mxfp8") and y.work.dtype == "fp8"


def mlp(y: Layout[X], m: MLP, D: int, source: Tensor[X], name: str = "mlp") -> tuple[Op[X], ...]:
    """Return the operators of a dense feed-forward; RWKV's has learned mixes of two inputs and a receptance too.

    >>> from shardwise.models import Model
    >>> from shardwise.ops.count import whole_layout
    >>> model, y = Model.load("llama-3.1-8b"), whole_layout(1, 64)
    >>> source = y.residual("norm2.output", model.hidden, "norm2")
    >>> [op.name for op in mlp(y, model.layers[0].feed_forward, model.hidden, source)]
    ['mlp.up', 'mlp.activation', 'mlp.down']
    """
    F, sides = y.split(m.ffn), 2 if m.gated else 1
    one_kernel = y.stack.activation == "fused" or in_one_function(y, m)
    up = LinearShape(inputs=D + 0 * F, outputs=sides * F, whole_inputs=D, whole_outputs=sides * m.ffn, bias=m.bias,
               kernels=1 if one_kernel else sides, parts=(F,) * sides, role="up",
               modules=("gate_up",) if m.fused_projection else ("gate", "up")[-sides:])  # fmt: skip
    down = LinearShape(
        inputs=F, outputs=D + 0 * F, whole_inputs=m.ffn, whole_outputs=D, bias=m.bias, role="down", modules=("down",)
    )
    act, product = activation_op(y, name, m, y.tokens, F)
    first, last = y.column(f"{name}.up", name, up, source), y.row(f"{name}.down", name, down, product)
    if makes_casts(y):
        first, last = replace(first, casts=("forward",)), replace(last, casts=("input",))
    ops = (first, act, last)
    return (*ops, *_receptance(y, D, source, name)) if m.style == "rwkv" else ops


def _receptance(y: Layout[X], D: int, source: Tensor[X], name: str) -> tuple[Op[X], ...]:
    """RWKV's channel mixing (arXiv:2305.13048 equation 18): a sigmoid gate on the output, and two mixes over time."""
    width = y.residual_width(D)
    shape = LinearShape(inputs=D + 0 * y.tokens, outputs=D + 0 * y.tokens, whole_inputs=D, whole_outputs=D,
                  role="feed_forward")  # fmt: skip
    gate, out = y.residual(f"{name}.receptance", D, name), y.residual(f"{name}.value", D, name)
    moved = (3 * gate.size_bytes, 5 * gate.size_bytes)
    return (
        only_weights(y, f"{name}.mixes", name, (vector(f"{name}.mixes", 2 * width, 2 * D),)),
        y.whole(f"{name}.receptance", name, shape, source),
        memory_op(y, f"{name}.gate", name, moved, saves=(gate, out), kernels=2, output_bytes=gate.size_bytes),
    )
