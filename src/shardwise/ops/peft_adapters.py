"""The rarer adapters of peft, a function a method: each is a path of operators beside a linear layer.

Letters as in ops/adapters.py; sizes that a user does not set are the defaults of github.com/huggingface/peft 0.21.2
src/peft/tuners/NAME/config.py. What a path keeps is held to the byte in tests/tuning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from shardwise.ledger.number import X, above, array_library, ceil, divide, evaluate, maximum, minimum, register
from shardwise.ledger.op import Op, Tensor, Weight
from shardwise.ops.adapter_parts import AdaptedLinear, AdapterPath, step
from shardwise.ops.elementwise import only_weights
from shardwise.ops.layout import Layout
from shardwise.plans import Tuning
from shardwise.records import replace

FREQUENCIES = 1000  # fourierft/config.py n_frequency
BANK = (256, 256, 2)  # vblora/config.py num_vectors, vector_length, topk
THETA = 256  # unilora/config.py theta_d_length
TINY = (2, 64)  # tinylora/config.py r, u
SUBSPACES = 5  # adamss/config.py num_subspaces
BUTTERFLY = 4  # boft/config.py boft_block_size
CIRCULANT = 256  # c3a/config.py block_size
LILY_B = 2  # lily/config.py num_B
SPARSE = 0.01  # frod/config.py sparse_rate

Sides: TypeAlias = tuple[int, int]
"""Features in and out of a linear layer."""


def adalora(p: AdapterPath[X]) -> None:
    """LoRA with learned singular values, E, between (arXiv:2303.10512 section 3.1)."""
    p.enter()
    p.make("AE", p.r * p.m, p.r * p.m + p.r)
    p.matmul("AE x", p.r, "made")
    p.matmul("lora_B", p.n)
    # The sum is divided by a rank that is kept as a tensor, and is no parameter that trains.
    p.pointwise("scaled", saves=(p.kept("rank", p.w),))


def gralora(p: AdapterPath[X]) -> None:
    """LoRA of blocks whose ranks are exchanged (arXiv:2505.20355 section 3): a copy between its products."""
    p.enter()
    p.matmul("gralora_A", p.r)
    p.pointwise("exchanged", saves=(p.kept("gralora_A", p.w * p.T * p.r),))
    p.matmul("gralora_B", p.n)


def vblora(p: AdapterPath[X]) -> None:
    """LoRA whose A and B are mixtures of the vectors of one bank (arXiv:2405.15179 section 3)."""
    vectors, length, chosen = BANK
    p.enter()
    for part, here, out in (("A", p.m, p.r), ("B", p.n, p.n)):
        elements, slots = p.r * here, p.r * divide(here, length)
        logits = p.kept(f"{part} vectors", p.w * chosen * elements, "weight")
        weights = p.kept(f"{part} shares", (p.w + 8) * chosen * slots, "weight")
        p.make(part, elements, vectors * slots, (logits, weights), kernels=6)
        p.matmul(f"{part} x", out, "made")


def unilora(p: AdapterPath[X]) -> None:
    """LoRA whose elements are those of one short vector (arXiv:2506.00799 section 3)."""
    p.enter()
    p.make("A", p.r * p.m, 0, kernels=2)
    p.matmul("A x", p.r, "made")
    p.make("B", p.r * p.n, 0, kernels=2)
    p.matmul("B x", p.n, "made")


def loha(p: AdapterPath[X]) -> None:
    """A Hadamard product of two products of rank r (arXiv:2108.06098 section 2.2)."""
    p.enter()
    p.make("delta", p.m * p.n, 2 * p.r * (p.m + p.n), (p.kept("scale", 4, "weight"),), flops=4 * p.r * p.m * p.n)
    p.matmul("delta x", p.n, "made")


def _smaller_factor(number: float) -> float:
    """Return the smaller of the two factors of a whole number that are nearest to each other.

    github.com/huggingface/peft src/peft/tuners/lokr/layer.py factorization, without a factor.

    >>> [_smaller_factor(n) for n in (256, 704, 127, 12)]
    [16, 22, 1, 3]
    """
    return next(d for d in range(math.isqrt(int(number)) or 1, 0, -1) if int(number) % d == 0)


register("smaller_factor", _smaller_factor, lambda n: array_library().vectorize(_smaller_factor)(n))


def lokr(p: AdapterPath[X]) -> None:
    """A Kronecker product of a small matrix and a product of rank r (arXiv:2108.06098 app. B; peft tuners/lokr).

    Sides are cut at their middle factors; where the rank is at least half the larger of the second matrix's sides,
    that matrix is no product.
    """
    less_m, less_n = (evaluate("smaller_factor", side) for side in (p.m, p.n))
    side_m, side_n = divide(p.m, less_m), divide(p.n, less_n)
    half, low, whole = divide(maximum(side_m, side_n), 2), p.r * (side_m + side_n), side_m * side_n
    second = above(half, p.r, low, whole)
    p.enter()
    made = p.kept("second matrix", above(half, p.r, p.w * whole, 0 * whole), "weight")
    p.make("delta", p.m * p.n, less_m * less_n + second, (made,), flops=p.m * p.n + 2 * p.r * whole, kernels=4)
    p.matmul("delta x", p.n, "made")


def lily(p: AdapterPath[X]) -> None:
    """LoRA whose B is a mean, by a router, of matrices that all layers share (arXiv:2407.09946 section 3)."""
    p.enter()
    p.matmul("lily_A", p.r)
    low = p.at
    p.matmul("router", LILY_B)
    p.pointwise("shares", saves=(p.kept("shares", p.w * p.T * LILY_B),), kernels=2)
    mean = p.kept("mean shares", p.w * LILY_B, "weight")
    p.make("B", p.r * p.n, 0, (mean,), flops=2 * LILY_B * p.r * p.n, kernels=2)
    p.at, p._reached = low, p.r
    p.matmul("B x", p.n, "made")


def _entries(features: X) -> X:
    """Return the entries of FRoD's sparse square matrix of so many features."""
    return -1 * ceil(-SPARSE * features * features)


def frod(p: AdapterPath[X]) -> None:
    """The weight as U (S + L) V, of which the sparse S and the diagonal L train (peft tuners/frod).

    What multiplies by U is the product that the layer no longer runs. In 16 bits S is made dense.
    """
    a, entries = p.y.a, _entries(p.m)
    p.matmul("V", p.m, "shared", a)
    turned = p.at
    copies = 2 if p.w != a else 1
    p.make("S", p.m * p.m, entries, (p.kept("entries", (16 + copies * a) * entries, "weight"),), kernels=4)
    p.matmul("S x", p.m, "made", a)
    diagonal = (p.kept("diagonal", a * p.m, turned.name),) if p.w != a else ()
    p.pointwise("L", p.m, (replace(turned, read_for="weight"), *diagonal), kernels=2)
    size = 0 * p.T + p.m * p.n
    frozen = Weight(name=f"{p.module.name}.U", elements=size, whole=size, adapter=True, trainable=False,
                    stored_bytes=a * size)  # fmt: skip
    p.ops.append(step(p.y, f"{p.module.name}.U", p.op, (0 * size, 0 * size), kernels=0, weights=(frozen,),
                      takes=(p.at.name,), makes=p.module.makes, modules=(p.module.short,)))  # fmt: skip


def hira(p: AdapterPath[X]) -> None:
    """A Hadamard product of the weight with one of rank r (HiRA, ICLR 2025)."""
    p.enter()
    p.make("delta", p.m * p.n, p.r * (p.m + p.n), flops=2 * p.r * p.m * p.n)
    p.matmul("delta x", p.n, "made")


def fourierft(p: AdapterPath[X]) -> None:
    """The inverse Fourier transform of a spectrum with few entries (arXiv:2405.03003 section 3)."""
    p.enter()
    p.make("delta", p.m * p.n, FREQUENCIES, (p.kept("indices", 16 * FREQUENCIES, "weight"),), kernels=8,
           transient_bytes=8 * p.m * p.n)  # fmt: skip
    p.matmul("delta x", p.n, "made")


def glora(p: AdapterPath[X]) -> None:
    """A weight scaled and moved by two products of rank r, in the type of the model (arXiv:2306.07967 section 3)."""
    a = p.y.a
    bias = any(w.kind == "vector" and not w.adapter for w in p.op.weights)
    learned = 2 * p.r * (p.m + p.n) + (p.r * (p.m + 1) + 2 if bias else 0)
    p.make("weight", p.m * p.n, learned, flops=4 * p.r * p.m * p.n)
    p.matmul("weight x", p.n, "made", a)


def miss(p: AdapterPath[X]) -> None:
    """One matrix for all blocks of r inputs, which are added up first (arXiv:2409.15371 section 3)."""
    p.enter()
    p.pointwise("blocks summed")
    p.reach("blocks summed", p.r)
    p.matmul("miss_block", p.n)


def behind(p: AdapterPath[X], part: str, moved: tuple[X, X], learned: X, saves: tuple[Tensor[X], ...] = ()) -> None:
    """Add kernels that change the layer's result in place of adding to it."""
    p.ops.append(step(p.y, f"{p.module.name}.{part}", p.op, moved, kernels=4, weights=(p.learned(part, learned),),
                      saves=saves, takes=p.module.makes, makes=p.module.makes, modules=(p.module.short,),
                      output_bytes=p.w * p.T * p.n))  # fmt: skip


def beft(p: AdapterPath[X]) -> None:
    """A bias (peft tuners/beft)."""
    size = p.w * p.T * p.n
    behind(p, "bias", (3 * size, size), p.n)


def tinylora(p: AdapterPath[X]) -> None:
    """A learned turn of the first singular vectors, which are frozen (peft tuners/tinylora)."""
    r, u = TINY
    p.enter()
    p.matmul("tinylora_A", r, "frozen")
    p.make("R", r * r, u)
    p.matmul("R x", r, "made")
    p.matmul("tinylora_B", p.n, "frozen")


def psoft(p: AdapterPath[X]) -> None:
    """An orthogonal turn between frozen singular vectors (peft tuners/psoft), which has r (r - 1) / 2 parameters."""
    p.widen()
    p.enter()
    p.matmul("psoft_A", p.r, "frozen")
    solved = p.kept("solved", 4 * (4 * p.r * p.r + p.r), "weight")
    p.make("R", p.r * p.r, divide(p.r * (p.r - 1), 2) + 2 * p.r, (solved,), kernels=12, flops=4 * p.r * p.r * p.r)
    p.matmul("R x", p.r, "made")
    p.matmul("psoft_B", p.n, "frozen")


def pvera(p: AdapterPath[X]) -> None:
    """VeRA with a mean and a variance of each of r features (peft tuners/pvera)."""
    p.enter()
    p.matmul("pvera_A", 2 * p.r, "shared")
    low = p.kept("pvera_A", p.w * p.T * 2 * p.r, "weight")
    p.pointwise("d", 2 * p.r, (low,))
    p.pointwise("drawn", 0, (p.kept("variance", 2 * p.w * p.T * p.r),), kernels=4)
    p.reach("drawn", p.r)
    p.matmul("pvera_B", p.n, "shared")
    p.pointwise("b", p.n, (p.kept("pvera_B", p.w * p.T * p.n, "weight"),))


def deft(p: AdapterPath[X]) -> None:
    """What the layer says in r directions is taken out, and something else put in (peft tuners/deft)."""
    given = p.t.width
    p.widen()
    wide = p.kept("wide result", 4 * p.T * p.n)
    p.enter()
    p.make("R", p.r * p.m, p.r * p.m)
    p.matmul("R x", p.r, "made")
    p.matmul("deft_P", p.n)
    copies = 0 if given == 4 else 4 * p.r * p.n
    parts = (wide, p.kept("projection", 4 * p.T * p.r), p.kept("relu", 4 * p.r * p.n + copies))
    p.pointwise("projected", 0, parts, kernels=3)


def adamss(p: AdapterPath[X]) -> None:
    """Products of rank one in clusters of the outputs, of r frozen directions of the input (peft tuners/adamss)."""
    a = p.y.a
    p.matmul("adamss_newB", p.r, "frozen", a)
    p.matmul("adamss_A", SUBSPACES, "trains", a)
    p.pointwise("chosen", p.n, kernels=SUBSPACES)
    p.reach("chosen", p.n, a)


def delora(p: AdapterPath[X]) -> None:
    """LoRA of normed products (arXiv:2503.18225 section 3)."""
    p.pointwise("normed")
    p.matmul("delora_A", p.r)
    p.pointwise("scaled", 1, (p.kept("delora_A", p.w * p.T * p.r), p.kept("scaling", p.w * (6 * p.r + 1))), kernels=6)
    p.matmul("delora_B", p.n)


def randlora(p: AdapterPath[X]) -> None:
    """Sums of frozen products of rank r with learned scales, of full rank (arXiv:2502.00987 section 3)."""
    less = minimum(p.m, p.n)
    bases = ceil(divide(less, p.r))
    p.enter()
    p.matmul("randlora_B", p.r * bases, "shared")
    p.make("A", less * p.r * bases, p.r * bases + bases * less)
    p.matmul("A x", p.n, "made", size=less * p.r * bases)


def boft(p: AdapterPath[X]) -> None:
    """A turn by a butterfly of orthogonal blocks, made whole, and a scale (arXiv:2311.06243; peft tuners/boft)."""
    a, square = p.y.a, p.m * p.m
    blocks = p.kept("blocks", (3 * 4 * BUTTERFLY + 4) * p.m, "weight")
    whole = p.kept("permutation", 2 * a * square, "weight")
    p.make("rotation", square, BUTTERFLY * p.m, (blocks, whole), kernels=24, flops=6 * p.m * square)
    p.matmul("rotated", p.m, "made", a)
    scale = p.kept("scale", 4 * p.n + (a * p.n if p.w != a else 0), "weight")
    p.reach("rotated", p.n, a)
    p.pointwise("scaled", p.n, (scale, p.kept("result", a * p.T * p.n, "weight")))


def c3a(p: AdapterPath[X]) -> None:
    """A convolution with circulant blocks, by fast Fourier transforms in fp32 (arXiv:2407.19342 section 3)."""
    kernel, narrow = divide(p.m * p.n, CIRCULANT), p.w != 4
    p.widen()
    p.enter()
    kernels = (p.kept("kernel", 4 * kernel, "weight"),) if narrow else ()
    p.pointwise("convolved", kernel, (replace(p.at, read_for="weight"), *kernels), kernels=8)
    p.reach("convolved", p.n)


def road(p: AdapterPath[X]) -> None:
    """Turns of pairs of outputs (arXiv:2409.00119 section 3)."""
    size = p.w * p.T * p.n
    kept = (p.kept("wide result", size), p.kept("turned", size), p.kept("vectors", 4 * p.w * p.n))
    behind(p, "turn", (2 * size, 5 * size), p.n, (*kept, p.kept("vectors of the input", 2 * p.w * p.n, "input")))


PATHS: dict[str, Callable[[AdapterPath[Any]], None]] = {
    "adalora": adalora,
    "gralora": gralora,
    "vblora": vblora,
    "unilora": unilora,
    "loha": loha,
    "lokr": lokr,
    "lily": lily,
    "frod": frod,
    "hira": hira,
    "fourierft": fourierft,
    "glora": glora,
    "miss": miss,
    "beft": beft,
    "tinylora": tinylora,
    "psoft": psoft,
    "pvera": pvera,
    "deft": deft,
    "adamss": adamss,
    "delora": delora,
    "randlora": randlora,
    "boft": boft,
    "road": road,
    "c3a": c3a,
}


SHARED: dict[str, Callable[[int, Iterable[Sides]], int]] = {
    "vblora": lambda rank, sides: BANK[0] * BANK[1],
    "unilora": lambda rank, sides: THETA,
    "lily": lambda rank, sides: sum(LILY_B * rank * out for _, out in sides),
    "frod": lambda rank, sides: sum(features * features + 8 * int(_entries(float(features))) for features, _ in sides),
}
"""Parameters that all layers share, by the rank and by the sides of the linear layers of a name.

Those of FRoD are frozen: in 16 bits V, and in 64 bits the two indices of each entry.
"""


def shared(y: Layout[X], tuning: Tuning, sides: Iterable[Sides]) -> Op[X]:
    """Return the parameters that all layers share: read by their own products, in no place of the flow."""
    elements = 0 * y.tokens + SHARED[tuning.adapter](tuning.rank, sides)
    trains = tuning.adapter != "frod"
    weight = Weight(name="shared", elements=elements, whole=elements, kind="vector", adapter=True, trainable=trains,
                    stored_bytes=0 if trains else 2 * elements)  # fmt: skip
    return replace(only_weights(y, "shared adapter", "embedding", (weight,)), makes=(), modules=("shared",))


def token_rows(y: Layout[X], tuning: Tuning, op: Op[X]) -> tuple[Op[X], ...]:
    """Return an embedding whose rows of r tokens train, or the tied head, each with a copy of the table of its own.

    peft tuners/trainable_tokens/layer.py get_merged_weights: an index_copy in every forward pass, whose gradient is as
    large as the table.
    """
    if op.role == "head":
        size = y.a * op.columns * op.inner
        zero = 0 * size
        view: Weight[X] = Weight(name="head.rows", elements=zero, whole=zero, kind="vector", adapter=True)
        table = Tensor(name="head.table", size_bytes=size, born="head", read_for="either")
        return (replace(op, weights=(*op.weights, view), saves=(*op.saves, table), without=()),)
    table_weight = next(w for w in op.weights if w.role == "embedding")
    elements = 0 * y.tokens + tuning.rank * table_weight.shape[1]
    weight = Weight(name="token rows", elements=elements, whole=elements, kind="vector", adapter=True)
    moved = 2 * y.a * table_weight.elements
    copied = step(y, "token rows", op, (moved, 2 * moved), weights=(weight,), makes=("embedding.output",),
                  modules=("tokens",), transient_bytes=y.a * table_weight.elements)  # fmt: skip
    return op, copied


def with_adapters(y: Layout[X], tuning: Tuning, op: Op[X], chosen: list[AdaptedLinear[X]]) -> tuple[Op[X], ...]:
    """Return a product with the path of its method beside each of its layers."""
    ops = [op]
    for module in chosen:
        path = AdapterPath(y, tuning, op, module)
        PATHS[tuning.adapter](path)
        ops += path.ops if tuning.adapter in ("beft", "road", "frod") else path.end()
    return tuple(ops)
