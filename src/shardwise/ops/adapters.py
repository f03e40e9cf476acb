"""Adapters beside frozen linear layers, a function a method: the operators that each adds.

Letters: T tokens, m features in and n features out of a layer, r rank, w bytes of an adapter's element. Methods are as
github.com/huggingface/peft 0.21.2 src/peft/tuners runs them; tests/tuning holds what they keep and train to the byte.
Tensor parallelism as NeMo and Megatron-Bridge do it (megatron/bridge/peft/utils.py ParallelLinearAdapter).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.ledger.number import X, divide, total
from shardwise.ledger.op import Gradient, Op, Tensor, Weight
from shardwise.models import KeyHeads, Model
from shardwise.ops.adapter_parts import (
    AdaptedLinear,
    added,
    branches,
    entry,
    kept_input,
    low_rank,
    names_experts,
    scaling,
    step,
    thin,
    words_of,
)
from shardwise.ops.elementwise import only_weights
from shardwise.ops.layout import Layout, matmul_flops
from shardwise.ops.peft_adapters import PATHS, with_adapters
from shardwise.plans import Tuning
from shardwise.records import replace


def lora(
    y: Layout[X], tuning: Tuning, op: Op[X], chosen: list[AdaptedLinear[X]], trains_a: bool = True
) -> tuple[Op[X], ...]:
    """Return a GEMM with B A beside each of its layers (arXiv:2106.09685 section 4.1)."""
    if op.kind == "grouped":
        own = _experts if tuning.sums_experts else _one_by_one if tuning.experts == "modules" else _grouped
        return own(y, tuning, op)
    ops = [op]
    for module, came, a, b in branches(y, tuning, op, chosen, trains_a):
        ops += [*came.ops, a, b, added(y, tuning, op, module, b.name)]
    return tuple(ops)


def lora_fa(y: Layout[X], tuning: Tuning, op: Op[X], chosen: list[AdaptedLinear[X]]) -> tuple[Op[X], ...]:
    """Return LoRA whose A is frozen, so that nothing keeps the input (arXiv:2308.03303 section 3)."""
    return lora(y, tuning, op, chosen, trains_a=False)


def dora(y: Layout[X], tuning: Tuning, op: Op[X], chosen: list[AdaptedLinear[X]]) -> tuple[Op[X], ...]:
    """Return LoRA with a learned magnitude of each output (arXiv:2402.09353; peft tuners/lora/dora.py).

    The norm of every row of W + B A comes from the adapter's own GEMMs with an identity matrix, whose graph is freed
    at once. The magnitude's gradient reads the results of layer and adapter; behind dropout the layer runs again, on
    its widened input and weight.
    """
    ops = [op]
    for module, came, a, b in branches(y, tuning, op, chosen):
        ops += [*came.ops, a, b, *_magnitude(y, tuning, op, module, b.name)]
    return tuple(ops)


def _magnitude(y: Layout[X], tuning: Tuning, op: Op[X], module: AdaptedLinear[X], delta: str) -> tuple[Op[X], ...]:
    m, n, w, T = op.inner, module.columns, tuning.width, op.rows

    def kept(part: str, size: X, read_for: Gradient, fleeting: bool = False) -> Tensor[X]:
        return Tensor(
            name=f"{module.name}.{part}", size_bytes=size, born=op.region, read_for=read_for, fleeting=fleeting
        )

    def product(part: str, shape: tuple[X, X, X], more: X, **own: Any) -> Op[X]:
        flops = matmul_flops(*shape) + more
        moved = w * (shape[0] * shape[1] + shape[0] * shape[2] + shape[1] * shape[2])
        zero = 0 * flops
        return Op(name=f"{module.name}.{part}", kind="matmul", region=op.region, flops=flops, forward_bytes=moved,
                  backward_flops=flops, backward_bytes=moved, weight_flops=zero, weight_bytes=zero, rows=shape[0],
                  columns=shape[1], inner=shape[2], dtype=op.dtype, vector_units=w > y.a, **own)  # fmt: skip

    identity = (
        kept("identity", w * m * m, "either", True),
        kept("identity.lora_A", w * m * tuning.rank, "either", True),
    )
    norm = product("norm", (m, n, 0 * T + tuning.rank), 2 * m * m * tuning.rank, saves=identity, kernels=6,
                   without=("input", "weight"), transient_bytes=w * (m * m + 2 * m * n))  # fmt: skip
    again: tuple[Op[X], ...] = ()
    if tuning.dropout:
        # A weight of the type of the adapters is multiplied as it is.
        wide = (kept("wide weight", w * m * n, "input"),) if w != y.a else ()
        source = kept_input(op).name
        again = (product("base again", (T, n, m), 0 * T, saves=wide, without=("weight",), takes=(source,)),)
    saved = (
        kept("weight norm", w * n, "weight"),
        kept("base result", (w if tuning.dropout else y.a) * T * n, "weight"),
        kept("magnitude less one", w * n, kept_input(op).name),
        kept("lora result", w * T * n, "either"),
        kept("magnitude", w * n, "either"),
    )
    weight = Weight(name=f"{module.name}.magnitude", elements=n, whole=n, kind="vector", adapter=True)
    moved = (5 * w + 2 * y.a) * T * n
    scale = step(y, f"{module.name}.scale", op, (moved, 2 * moved), kernels=5, weights=(weight,), saves=saved,
                  takes=(delta,), makes=module.makes, modules=(module.short,), output_bytes=w * T * n)  # fmt: skip
    return norm, *again, scale


def ia3(y: Layout[X], tuning: Tuning, op: Op[X], chosen: list[AdaptedLinear[X]]) -> tuple[Op[X], ...]:
    """Return a GEMM whose outputs, or whose inputs in a feed-forward, are scaled by learned factors.

    Keys and values and what enters the second GEMM (arXiv:2205.05638 section 3.3; peft tuners/ia3/layer.py). Of gate
    and up peft scales the outputs (utils/constants.py TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING).
    """
    if op.region.partition(".")[0] == "mlp" and len(op.parts) < 2:
        module = chosen[0]
        came = entry(y, replace(tuning, dropout=0.0, autocast=False), op, module)
        return *came.ops, scaling(y, tuning, op, module, (came.tensor, op.inner), reads=(came.tensor,)), op
    ops = [op]
    for module in chosen:
        out = Tensor(name=f"{module.name}.result", size_bytes=y.a * op.rows * module.columns, born=op.region)
        sizes = (out, module.columns)
        ops.append(scaling(y, tuning, op, module, sizes, takes=module.makes, makes=module.makes))
    return tuple(ops)


def vera(y: Layout[X], tuning: Tuning, op: Op[X], chosen: list[AdaptedLinear[X]]) -> tuple[Op[X], ...]:
    """Return LoRA whose A and B are frozen and shared by all layers, with learned factors of their results.

    arXiv:2310.11454; the two shared matrices, of the largest sides, are not counted to any layer. A factor of fp32
    widens what it multiplies, so that under autocast the results that it keeps have 16 bits and the sum has 32
    (peft tuners/vera/layer.py Linear.forward).
    """
    ops = [op]
    for module, came, a, b in branches(y, tuning, op, chosen, trains_a=False):
        shared_a, shared_b = (
            replace(one, weights=tuple(replace(w, elements=0 * w.elements, whole=0 * w.whole, trainable=False,
                                               stored_bytes=0) for w in one.weights))
            for one in (a, b)
        )  # fmt: skip
        low = low_rank(y, tuning, op, module, tuning.rank)
        width = y.a if tuning.autocast else tuning.width
        out = Tensor(name=f"{module.name}.lora_B", size_bytes=width * op.rows * module.columns, born=op.region)
        first, second = replace(module, name=f"{module.name}.d"), replace(module, name=f"{module.name}.b")
        d = scaling(y, tuning, op, first, (low, 0 * op.rows + tuning.rank), reads=(low,))
        last = scaling(y, tuning, op, second, (out, module.columns), reads=(out,))
        # A vector that scales a result is a parameter: what is kept of it is no copy, and its product is one kernel.
        d, last = (replace(one, saves=one.saves[:1], kernels=1) for one in (d, last))
        summed = added(y, replace(tuning, autocast=False), op, module, last.name)
        # The sum and its cast: no factor of its own.
        ops += [*came.ops, shared_a, d, shared_b, last, replace(summed, kernels=summed.kernels - 1)]
    return tuple(ops)


def oft(y: Layout[X], tuning: Tuning, op: Op[X], chosen: list[AdaptedLinear[X]]) -> tuple[Op[X], ...]:
    """Return a GEMM whose input is turned by r orthogonal blocks for each of its layers (arXiv:2306.07280).

    A block of b features has b (b - 1) / 2 parameters, from which the Cayley transform makes it (peft tuners/oft). A
    rank of 0 leaves the number of blocks to their usual size. Its kernels (layer.py _cayley_batch, five terms of
    Neumann's series): a skew-symmetric matrix 3, the identity 3, three GEMMs with four additions, the turn, a copy
    and a cast. The GEMMs keep that matrix, its square and its cube, which the gradient of the parameters reads.
    """
    ops: list[Op[X]] = [op]
    for module in chosen:
        came = entry(y, replace(tuning, dropout=0.0, autocast=False), op, module)
        m, T, w = op.inner, op.rows, tuning.width
        side = divide(m, tuning.rank) if tuning.rank else 0 * m + tuning.block
        number = divide(m, side)
        elements = number * divide(side * (side - 1), 2)
        weight = Weight(name=f"{module.name}.oft_R", elements=elements, whole=elements, adapter=True, kind="vector")
        blocks = Tensor(name=f"{module.name}.rotation", size_bytes=w * m * side, born=op.region, read_for="input")
        powers = Tensor(name=f"{module.name}.powers", size_bytes=3 * w * m * side, born=op.region, read_for="weight")
        flops, moved = 2 * T * m * side, w * (2 * T * m + m * side)
        ops += [*came.ops, Op(
            name=f"{module.name}.turned", kind="matmul", region=op.region, flops=flops, forward_bytes=moved,
            backward_flops=flops, backward_bytes=moved, weight_flops=flops, weight_bytes=moved, rows=T, columns=side,
            inner=side, batch=0 * T + number, weights=(weight,), reads=(came.tensor,), vector_units=w > y.a,
            saves=(replace(came.tensor, read_for="weight"), blocks, powers), dtype=op.dtype, model_flops=flops,
            output_bytes=w * T * m, modules=(module.short,), makes=module.makes, kernels=16,
        )]  # fmt: skip
    return tuple(ops)


def prefix(y: Layout[X], tuning: Tuning, op: Op[X], heads: tuple[X, int]) -> Op[X]:
    """Return what puts learned keys and values before those of a layer: `heads` key-value heads of so many values both.

    peft tuners/prefix_tuning: an fp32 lookup cast to the type of the model, in a table that all layers share.
    """
    elements = tuning.rank * heads[0] * heads[1]
    view = Weight(name="prefix", elements=0 * elements, whole=0 * elements, kind="vector", adapter=True)
    moved = (tuning.width + 2 * y.a) * elements * y.work.B
    return step(y, "prefix", op, (moved, moved), kernels=2, weights=(view,), takes=op.makes or (),
                 makes=(op.makes or ())[1:], modules=("prefix",))  # fmt: skip


EXPANDED = ("falcon",)
"""Classes whose caches hold keys and values of all heads, and whose configuration has no number of those of keys."""


def key_heads(model: Model) -> set[KeyHeads]:
    """Return the heads of keys and values of the layers of a model that have such."""
    return {keys for block in model.kinds for mixer in block.mixers if (keys := mixer.cached_heads())}


def prefix_heads(model: Model) -> tuple[int, int]:
    """Return the heads, and the values of one, that peft learns keys and values of for every layer, attention or not.

    Those that the configuration has, of the widest heads where layers differ (peft 0.21.2 utils/other.py
    _prepare_prompt_learning_config).

    >>> from shardwise.models import Model
    >>> prefix_heads(Model.load("llama-3.1-8b")), prefix_heads(Model.load("recurrentgemma-2b"))
    ((8, 128), (1, 256))
    """
    widest = max(key_heads(model), key=lambda keys: (keys.head_dim, keys.windowed))
    return widest.query_heads if model.family in EXPANDED else widest.heads, widest.head_dim


def prefix_table(y: Layout[X], tuning: Tuning, model: Model) -> Op[X]:
    """Return the learned keys and values of all layers: one table (peft tuners/prefix_tuning/model.py)."""
    heads, values = prefix_heads(model)
    elements = 0 * y.tokens + 2 * tuning.rank * model.num_layers * heads * values
    weight = Weight(name="prefixes", elements=elements, whole=elements, kind="vector", adapter=True)
    return replace(only_weights(y, "prefixes", "embedding", (weight,)), makes=(), modules=("prefix",))


METHODS: dict[str, Callable[..., tuple[Op[Any], ...]]] = {
    "lora": lora,
    "rslora": lora,
    "lora-plus": lora,
    "lora-fa": lora_fa,
    "dora": dora,
    "ia3": ia3,
    "vera": vera,
    "oft": oft,
    **dict.fromkeys(PATHS, with_adapters),
}
"""The methods that stand beside linear layers."""


def embedding_adapter(y: Layout[X], tuning: Tuning, op: Op[X]) -> tuple[Op[X], ...]:
    """Return the adapter of a table: a lookup of r values a token, and their GEMM to the hidden size."""
    table = next(w for w in op.weights if w.role == "embedding")
    rows, width = table.shape
    m, r = divide(op.output_bytes, y.a * width), tuning.rank
    low = Tensor(name="embedding.lora_A", size_bytes=tuning.width * m * r, born=op.region)
    ids = tuple(s for s in op.saves if s.name == "ids")
    moved: X = 2 * tuning.width * m * r
    weight = Weight(name="embedding.lora_A.weight", elements=rows * r, whole=rows * r, kind="vector", adapter=True)
    look = step(y, low.name, op, (moved, moved), weights=(weight,), saves=ids, modules=("embedding",))
    like = replace(op, rows=m, inner=0 * m + width, columns=0 * m + width)
    module = AdaptedLinear(
        name="embedding", short="embedding", columns=0 * m + width, makes=("embedding", "embedding.output")
    )
    b = thin(y, tuning, like, ("embedding.lora_B", "embedding"), (0 * m + width, 0 * m + r), low)
    return look, b, added(y, tuning, like, module, b.name)


def virtual_tokens(y: Layout[X], tuning: Tuning, op: Op[X]) -> Op[X]:
    """Return the learned tokens before a prompt: their rows of the embedding, joined with those of the prompt."""
    table = next(w for w in op.weights if w.role == "embedding")
    elements = tuning.virtual_tokens * table.shape[1] + 0 * y.tokens
    weight = Weight(name="virtual tokens", elements=elements, whole=elements, kind="vector", adapter=True)
    moved = 2 * (0 * y.tokens + op.output_bytes)
    return step(y, "virtual tokens", op, (moved, moved), weights=(weight,), modules=("prompt",),
                 makes=("embedding.output",))  # fmt: skip


def _elements(op: Op[X]) -> X:
    return total((w.elements for w in op.weights if w.expert), 0 * op.rows)


def _experts(y: Layout[X], tuning: Tuning, op: Op[X]) -> tuple[Op[X], ...]:
    """Return the GEMMs of experts with weights to which B A of each expert is added (peft ParamWrapper).

    The sum is a tensor like the weights, which the gradient of the input reads and which has a gradient as large. The
    joint first weight counts twice where peft makes it of the names of its two halves.
    """
    local = op.weights[0].shape[0]
    words = words_of(tuning)
    halves = ("all-linear" in words and tuning.all_experts) or names_experts(words, op.role)
    twice = 2 if halves and tuning.finds_experts and tuning.converts_experts and op.role == "up" else 1
    r = twice * tuning.rank
    whole, thin_elements = _elements(op), local * r * (op.inner + op.columns)
    name = f"{op.name}.lora"
    kept: tuple[Tensor[X], ...] = ()
    if tuning.width != y.a:
        kept = (Tensor(name=f"{name}.narrow weights", size_bytes=y.a * thin_elements, born=op.region),)
    flops = 2 * whole * r
    weight: Weight[X] = Weight(name=f"{name}.weight", elements=thin_elements, whole=thin_elements, expert=True,
                               adapter=True, shape=(local, op.inner + op.columns, r), role=op.role)  # fmt: skip
    moved = y.a * (2 * whole + thin_elements)
    made = Op(
        name=name, kind="matmul", region=op.region, flops=flops, forward_bytes=moved, backward_flops=0 * flops,
        backward_bytes=0 * flops, weight_flops=2 * flops, weight_bytes=2 * moved, rows=op.columns, columns=op.inner,
        inner=0 * op.rows + r, batch=local, weights=(weight,), saves=kept, dtype=y.work.dtype, takes=(), kernels=2,
        model_flops=0 * flops, output_bytes=y.a * whole, modules=("experts",),
    )  # fmt: skip
    summed = Tensor(name=f"{op.name}.summed weight", size_bytes=y.a * whole, born=op.region, read_for="either")
    view: Weight[X] = Weight(name=f"{op.name}.summed", elements=0 * whole, whole=0 * whole, expert=True, adapter=True)
    own = replace(op, weights=(*op.weights, view), saves=(*op.saves, summed),
                  transient_bytes=op.transient_bytes + op.output_bytes + y.a * whole)  # fmt: skip
    return made, own


def _beside_grouped(y: Layout[X], op: Op[X], name: str, sides: tuple[X, X], read: Tensor[X]) -> Op[X]:
    """Return a thin GEMM beside those of experts, of `sides` (features out, features in), whose weight trains."""
    (n, k), local, rows = sides, op.weights[0].shape[0], op.rows * op.batch
    elements = local * n * k
    moved, flops = y.a * (rows * (n + k) + op.batch * n * k), 2 * rows * n * k
    weight = Weight(name=f"{name}.weight", elements=elements, whole=elements, expert=True, adapter=True,
                    shape=(local, n, k), role=op.role)  # fmt: skip
    return replace(op, name=name, flops=flops, forward_bytes=moved, backward_flops=flops, backward_bytes=moved,
                   weight_flops=flops, weight_bytes=moved, columns=n, inner=k, weights=(weight,), reads=(read,),
                   saves=(replace(read, read_for="weight"),), model_flops=flops, output_bytes=y.a * rows * n,
                   widened_bytes=0, decoding_flops=0, transient_bytes=0, modules=("experts",))  # fmt: skip


def _grouped(y: Layout[X], tuning: Tuning, op: Op[X]) -> tuple[Op[X], ...]:
    """Return the GEMMs of experts with two thin grouped ones beside them (Megatron-Bridge, TEGroupedLinear)."""
    r, rows = 0 * op.rows + tuning.rank, op.rows * op.batch
    low = Tensor(name=f"{op.name}.lora_A", size_bytes=y.a * rows * r, born=op.region)
    a = _beside_grouped(y, op, low.name, (r, op.inner), kept_input(op))
    b = _beside_grouped(y, op, f"{op.name}.lora_B", (op.columns, r), low)
    moved = y.a * rows * op.columns
    return op, a, b, step(y, f"{op.name}.add", op, (5 * moved, 2 * moved), kernels=2, takes=(b.name,), makes=op.makes)


def _one_by_one(y: Layout[X], tuning: Tuning, op: Op[X]) -> tuple[Op[X], ...]:
    """Return the GEMMs of experts that are modules, with LoRA beside each of their linear layers.

    Source: transformers 4.57.6 models/qwen3_moe/modeling_qwen3_moe.py, which runs one expert after another.
    """
    flat, r, halves = replace(op, rows=op.rows * op.batch), 0 * op.rows + tuning.rank, len(op.modules)
    experts, ops = op.kernels / halves, [op]
    for short in op.modules:
        name, columns = (f"{op.name}.{short}" if halves > 1 else op.name), divide(op.columns, halves)
        makes = op.makes or (op.name, f"{op.name}.output")
        module = AdaptedLinear(name=name, short="experts", columns=columns, makes=makes)
        came, low = entry(y, tuning, flat, module), low_rank(y, tuning, flat, module, r)
        a = _beside_grouped(y, op, low.name, (r, op.inner), came.tensor)
        b = _beside_grouped(y, op, f"{name}.lora_B", (columns, r), low)
        own = (*came.ops, replace(a, kernels=1), replace(b, kernels=1), added(y, tuning, flat, module, b.name))
        ops += [replace(one, kernels=one.kernels * experts) for one in own]
    return tuple(ops)
