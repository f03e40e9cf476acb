"""The rarer adapters of peft, a function a method: each is a path of operators beside a linear layer.

Letters as in ops/adapters.py; sizes that a user does not set are the defaults of github.com/huggingface/peft 0.21.2
src/peft/tuners/NAME/config.py. What a path keeps is held to the byte in tests/tuning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, Literal, TypeAlias

from shardwise.ledger.number import X, ceil, divide, is_plain, minimum
from shardwise.ledger.op import Gradient, Op, Tensor, Weight
from shardwise.ops.adapter_parts import AdaptedLinear, added, entry, kept_input, step, thin
from shardwise.ops.elementwise import only_weights
from shardwise.ops.layout import Layout, memory_op
from shardwise.plans import Tuning

Held: TypeAlias = Literal["trains", "frozen", "shared", "made"]
"""A matrix of a path: a parameter, a buffer of each layer, one of the whole model, or what the path made of others."""

FREQUENCIES = 1000  # fourierft/config.py n_frequency
BANK = (256, 256, 2)  # vblora/config.py num_vectors, vector_length, topk
THETA = 256  # unilora/config.py theta_d_length
TINY = (2, 64)  # tinylora/config.py r, u
SUBSPACES = 5  # adamss/config.py num_subspaces
BUTTERFLY = 4  # boft/config.py boft_block_size
CIRCULANT = 256  # c3a/config.py block_size


class AdapterPath(Generic[X]):
    """The operators that an adapter adds beside one linear layer, in their order, and the tensor it has reached."""

    def __init__(self, y: Layout[X], t: Tuning, op: Op[X], module: AdaptedLinear[X]) -> None:
        self.y, self.t, self.op, self.module = y, t, op, module
        self.ops: list[Op[X]] = []
        self.at = kept_input(op)
        self.r = 0 * op.rows + t.rank
        self.m, self.n, self.T, self.w = op.inner, module.columns, op.rows, t.width

    def enter(self) -> None:
        """Cast and drop the layer's input."""
        came = entry(self.y, replace(self.t, autocast=False), self.op, self.module)
        self.ops += came.ops
        self.at = came.tensor

    def kept(self, part: str, size: X | float, read_for: Gradient = "either") -> Tensor[X]:
        """Return a tensor of the path that backward reads."""
        name = f"{self.module.name}.{part}"
        return Tensor(name=name, size_bytes=size + 0 * self.T, born=self.op.region, read_for=read_for)

    def learned(self, part: str, elements: X | float) -> Weight[X]:
        """Return parameters that train, counted to this layer."""
        size = elements + 0 * self.T
        return Weight(name=f"{self.module.name}.{part}", elements=size, whole=size, kind="vector", adapter=True)

    def make(
        self, part: str, elements: X | float, learned: X | float, saves: tuple[Tensor[X], ...] = (), **more: Any
    ) -> None:
        """Make a matrix of parameters, whatever the tokens; `flops` are those of the products in it."""
        flops, moved = more.pop("flops", 0) + 0 * self.T, self.w * (elements + learned) + 0 * self.T
        own = memory_op(
            self.y, f"{self.module.name}.{part}", self.op.region, (2 * moved, 3 * moved), role="steps",
            weights=(self.learned(f"{part} parameters", learned),), saves=saves, modules=(self.module.short,),
            output_bytes=moved, takes=(), **more,
        )  # fmt: skip
        whole = dict(kind="matmul", flops=flops, weight_flops=2 * flops, rows=self.n, columns=self.m, inner=self.r,
                     dtype=self.op.dtype, vector_units=self.w > self.y.a)  # fmt: skip
        self.ops.append(replace(own, **whole) if "flops" in more or flops is not own.flops else own)

    def widen(self) -> None:
        """Run in fp32, whatever the type of the parameters."""
        self.t, self.w = replace(self.t, width=4), 4

    def product(self, part: str, n: X | float, held: Held = "trains", width: int = 0, size: X | float = 0) -> None:
        """Multiply by a matrix of n features out; one that was made is kept for the gradient of what it multiplies.

        `size` are its elements where they are not those of the product.
        """
        w, k = width or self.w, self._features
        shape = (n + 0 * self.T, k)
        names = (f"{self.module.name}.{part}", self.module.short)
        one = thin(self.y, replace(self.t, width=w, autocast=False), self.op, names, shape, self.at,
                   trainable=held != "frozen")  # fmt: skip
        if held in ("shared", "made"):
            zero = 0 * self.T
            view = replace(one.weights[0], elements=zero, whole=zero, trainable=held == "made", stored_bytes=0)
            one = replace(one, weights=(view,))
        if held == "made":
            elements = n * k if is_plain(size, 0) else size
            one = replace(one, saves=(*one.saves, self.kept(f"{part} made", w * elements, "input")))
        self.ops.append(one)
        self.reach(part, n, w)

    @property
    def _features(self) -> X:
        return getattr(self, "_reached", self.m)

    def reach(self, part: str, n: X | float, width: int = 0) -> None:
        """Stand at a tensor of n features."""
        self._reached = n + 0 * self.T
        self.at = self.kept(part, (width or self.w) * self.T * n)

    def pointwise(self, part: str, learned: X | float = 0, saves: tuple[Tensor[X], ...] = (), kernels: int = 1) -> None:
        """Go through kernels that read and write what the path has reached."""
        size, name = self.w * self.T * self._features, f"{self.module.name}.{part}"
        weights = (self.learned(part, learned),) if not isinstance(learned, int) or learned else ()
        self.ops.append(step(self.y, name, self.op, (2 * kernels * size, 4 * kernels * size), kernels=kernels,
                             reads=(self.at,), weights=weights, saves=saves, modules=(self.module.short,),
                             output_bytes=size))  # fmt: skip
        self.reach(part, self._features)

    def end(self) -> list[Op[X]]:
        """Return the operators, with the sum of the path's result and the layer's behind them."""
        plain = replace(self.t, autocast=False)
        return [*self.ops, added(self.y, plain, self.op, self.module, self.at.name)]


def adalora(p: AdapterPath[X]) -> None:
    """LoRA with learned singular values, E, between (arXiv:2303.10512 section 3.1)."""
    p.enter()
    p.make("AE", p.r * p.m, p.r * p.m + p.r)
    p.product("AE x", p.r, "made")
    p.product("lora_B", p.n)
    # The sum is divided by a rank that is kept as a tensor, and is no parameter that trains.
    p.pointwise("scaled", saves=(p.kept("rank", p.w),))


def gralora(p: AdapterPath[X]) -> None:
    """LoRA of blocks whose ranks are exchanged (arXiv:2505.20355 section 3): a copy between its products."""
    p.enter()
    p.product("gralora_A", p.r)
    p.pointwise("exchanged", saves=(p.kept("gralora_A", p.w * p.T * p.r),))
    p.product("gralora_B", p.n)


def vblora(p: AdapterPath[X]) -> None:
    """LoRA whose A and B are mixtures of the vectors of one bank (arXiv:2405.15179 section 3)."""
    vectors, length, chosen = BANK
    p.enter()
    for part, here, out in (("A", p.m, p.r), ("B", p.n, p.n)):
        elements, slots = p.r * here, p.r * divide(here, length)
        found = p.kept(f"{part} vectors", p.w * chosen * elements, "weight")
        weights = p.kept(f"{part} shares", (p.w + 8) * chosen * slots, "weight")
        p.make(part, elements, vectors * slots, (found, weights), kernels=6)
        p.product(f"{part} x", out, "made")


def unilora(p: AdapterPath[X]) -> None:
    """LoRA whose elements are those of one short vector (arXiv:2506.00799 section 3)."""
    p.enter()
    p.make("A", p.r * p.m, 0, kernels=2)
    p.product("A x", p.r, "made")
    p.make("B", p.r * p.n, 0, kernels=2)
    p.product("B x", p.n, "made")


def loha(p: AdapterPath[X]) -> None:
    """A Hadamard product of two products of rank r (arXiv:2108.06098 section 2.2)."""
    p.enter()
    p.make("delta", p.m * p.n, 2 * p.r * (p.m + p.n), (p.kept("scale", 4, "weight"),), flops=4 * p.r * p.m * p.n)
    p.product("delta x", p.n, "made")


def hira(p: AdapterPath[X]) -> None:
    """A Hadamard product of the weight with one of rank r (HiRA, ICLR 2025)."""
    p.enter()
    p.make("delta", p.m * p.n, p.r * (p.m + p.n), flops=2 * p.r * p.m * p.n)
    p.product("delta x", p.n, "made")


def fourierft(p: AdapterPath[X]) -> None:
    """The inverse Fourier transform of a spectrum with few entries (arXiv:2405.03003 section 3)."""
    p.enter()
    p.make("delta", p.m * p.n, FREQUENCIES, (p.kept("indices", 16 * FREQUENCIES, "weight"),), kernels=8,
           transient_bytes=8 * p.m * p.n)  # fmt: skip
    p.product("delta x", p.n, "made")


def glora(p: AdapterPath[X]) -> None:
    """A weight scaled and moved by two products of rank r, in the type of the model (arXiv:2306.07967 section 3)."""
    a = p.y.a
    bias = any(w.kind == "vector" and not w.adapter for w in p.op.weights)
    learned = 2 * p.r * (p.m + p.n) + (p.r * (p.m + 1) + 2 if bias else 0)
    p.make("weight", p.m * p.n, learned, flops=4 * p.r * p.m * p.n)
    p.product("weight x", p.n, "made", a)


def miss(p: AdapterPath[X]) -> None:
    """One matrix for all blocks of r inputs, which are added up first (arXiv:2409.15371 section 3)."""
    p.enter()
    p.pointwise("blocks summed")
    p.reach("blocks summed", p.r)
    p.product("miss_block", p.n)


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
    p.product("tinylora_A", r, "frozen")
    p.make("R", r * r, u)
    p.product("R x", r, "made")
    p.product("tinylora_B", p.n, "frozen")


def psoft(p: AdapterPath[X]) -> None:
    """An orthogonal turn between frozen singular vectors (peft tuners/psoft), which has r (r - 1) / 2 parameters."""
    p.widen()
    p.enter()
    p.product("psoft_A", p.r, "frozen")
    solved = p.kept("solved", 4 * (4 * p.r * p.r + p.r), "weight")
    p.make("R", p.r * p.r, divide(p.r * (p.r - 1), 2) + 2 * p.r, (solved,), kernels=12, flops=4 * p.r * p.r * p.r)
    p.product("R x", p.r, "made")
    p.product("psoft_B", p.n, "frozen")


def pvera(p: AdapterPath[X]) -> None:
    """VeRA with a mean and a variance of each of r features (peft tuners/pvera)."""
    p.enter()
    p.product("pvera_A", 2 * p.r, "shared")
    low = p.kept("pvera_A", p.w * p.T * 2 * p.r, "weight")
    p.pointwise("d", 2 * p.r, (low,))
    p.pointwise("drawn", 0, (p.kept("variance", 2 * p.w * p.T * p.r),), kernels=4)
    p.reach("drawn", p.r)
    p.product("pvera_B", p.n, "shared")
    p.pointwise("b", p.n, (p.kept("pvera_B", p.w * p.T * p.n, "weight"),))


def deft(p: AdapterPath[X]) -> None:
    """What the layer says in r directions is taken out, and something else put in (peft tuners/deft)."""
    given = p.t.width
    p.widen()
    wide = p.kept("wide result", 4 * p.T * p.n)
    p.enter()
    p.make("R", p.r * p.m, p.r * p.m)
    p.product("R x", p.r, "made")
    p.product("deft_P", p.n)
    copies = 0 if given == 4 else 4 * p.r * p.n
    parts = (wide, p.kept("projection", 4 * p.T * p.r), p.kept("relu", 4 * p.r * p.n + copies))
    p.pointwise("projected", 0, parts, kernels=3)


def adamss(p: AdapterPath[X]) -> None:
    """Products of rank one in clusters of the outputs, of r frozen directions of the input (peft tuners/adamss)."""
    a = p.y.a
    p.product("adamss_newB", p.r, "frozen", a)
    p.product("adamss_A", SUBSPACES, "trains", a)
    p.pointwise("chosen", p.n, kernels=SUBSPACES)
    p.reach("chosen", p.n, a)


def delora(p: AdapterPath[X]) -> None:
    """LoRA of normed products (arXiv:2503.18225 section 3)."""
    p.pointwise("normed")
    p.product("delora_A", p.r)
    p.pointwise("scaled", 1, (p.kept("delora_A", p.w * p.T * p.r), p.kept("scaling", p.w * (6 * p.r + 1))), kernels=6)
    p.product("delora_B", p.n)


def randlora(p: AdapterPath[X]) -> None:
    """Sums of frozen products of rank r with learned scales, of full rank (arXiv:2502.00987 section 3)."""
    less = minimum(p.m, p.n)
    bases = ceil(divide(less, p.r))
    p.enter()
    p.product("randlora_B", p.r * bases, "shared")
    p.make("A", less * p.r * bases, p.r * bases + bases * less)
    p.product("A x", p.n, "made", size=less * p.r * bases)


def boft(p: AdapterPath[X]) -> None:
    """A turn by a butterfly of orthogonal blocks, made whole, and a scale (arXiv:2311.06243; peft tuners/boft)."""
    a, square = p.y.a, p.m * p.m
    blocks = p.kept("blocks", (3 * 4 * BUTTERFLY + 4) * p.m, "weight")
    whole = p.kept("permutation", 2 * a * square, "weight")
    p.make("rotation", square, BUTTERFLY * p.m, (blocks, whole), kernels=24, flops=6 * p.m * square)
    p.product("rotated", p.m, "made", a)
    scale = p.kept("scale", 4 * p.n + (a * p.n if p.w != a else 0), "weight")
    p.reach("rotated", p.n, a)
    p.pointwise("scaled", p.n, (scale, p.kept("result", a * p.T * p.n, "weight")))


def c3a(p: AdapterPath[X]) -> None:
    """A convolution with circulant blocks, by fast Fourier transforms in fp32 (arXiv:2407.19342 section 3)."""
    kernel, narrow = divide(p.m * p.n, CIRCULANT), p.w != 4
    p.widen()
    p.enter()
    found = (p.kept("kernel", 4 * kernel, "weight"),) if narrow else ()
    p.pointwise("convolved", kernel, (replace(p.at, read_for="weight"), *found), kernels=8)
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


SHARED = {"vblora": BANK[0] * BANK[1], "unilora": THETA}
"""Parameters that all layers share."""


def shared(y: Layout[X], t: Tuning) -> Op[X]:
    """Return the parameters that all layers share: read by their own products, in no place of the flow."""
    elements = 0 * y.tokens + SHARED[t.adapter]
    weight = Weight(name="shared", elements=elements, whole=elements, kind="vector", adapter=True)
    return replace(only_weights(y, "shared adapter", "embedding", (weight,)), makes=(), modules=("shared",))


def token_rows(y: Layout[X], t: Tuning, op: Op[X]) -> tuple[Op[X], ...]:
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
    elements = 0 * y.tokens + t.rank * table_weight.shape[1]
    weight = Weight(name="token rows", elements=elements, whole=elements, kind="vector", adapter=True)
    moved = 2 * y.a * table_weight.elements
    copied = step(y, "token rows", op, (moved, 2 * moved), weights=(weight,), makes=("embedding.output",),
                  modules=("tokens",), transient_bytes=y.a * table_weight.elements)  # fmt: skip
    return op, copied


def beside(y: Layout[X], t: Tuning, op: Op[X], chosen: list[AdaptedLinear[X]]) -> tuple[Op[X], ...]:
    """Return a product with the path of its method beside each of its layers."""
    found = [op]
    for module in chosen:
        path = AdapterPath(y, t, op, module)
        PATHS[t.adapter](path)
        found += path.ops if t.adapter in ("beft", "road") else path.end()
    return tuple(found)
