"""What adapters are made of: their input, thin GEMMs, factors and sums, with their messages.

Letters as in ops/adapters.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, Literal, TypeAlias

from shardwise.ledger.number import X, above, divide, is_plain
from shardwise.ledger.op import Collective, Gradient, Op, Tensor, Weight
from shardwise.models import layer_name, layer_names
from shardwise.ops.layout import Layout, matmul_flops, memory_op
from shardwise.plans import MLP_NAMES, Tuning
from shardwise.records import dataclass, replace


def kept_input(op: Op[X]) -> Tensor[X]:
    """Return what a GEMM keeps for the gradient of its weight: its input."""
    kept = next((s for s in op.saves if s.read_for in ("weight", "input")), None)
    return kept or op.reads[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterInput(Generic[X]):
    """What enters the GEMMs of an adapter: the operators that make it, the tensor, and its name in the flow."""

    ops: tuple[Op[X], ...]
    tensor: Tensor[X]
    name: str


def step(y: Layout[X], name: str, op: Op[X], moved: tuple[X, X], **more: Any) -> Op[X]:
    """Return element-wise kernels beside a layer, which run one by one."""
    return memory_op(y, name, op.region, moved, role="steps", **more)


def entry(y: Layout[X], tuning: Tuning, op: Op[X], module: AdaptedLinear[X]) -> AdapterInput[X]:
    """Return the input of an adapter: cast to its type, dropped, and cast back to 16 bits under autocast.

    What it is made of lives until the last of it is made, beside the result of the layer (peft tuners/lora/layer.py
    Linear.forward, whose variables hold them).
    """
    elements, w = op.rows * op.inner, tuning.width
    read = kept_input(op)
    here = AdapterInput(ops=(), tensor=read, name=read.name)
    alive = y.a * op.rows * module.columns

    def made(part: str, width: float, moved: tuple[float, float], saves: tuple[Tensor[X], ...] = ()) -> AdapterInput[X]:
        nonlocal alive
        alive = alive + (here.tensor.size_bytes if here.ops else y.a * elements)
        out = Tensor(name=f"{module.name}.{part}", size_bytes=width * elements, born=op.region)
        one = step(y, out.name, op, (moved[0] * elements, moved[1] * elements), reads=(here.tensor,), saves=saves,
                    output_bytes=out.size_bytes, transient_bytes=alive)  # fmt: skip
        return AdapterInput(ops=(*here.ops, one), tensor=out, name=out.name)

    if w != y.a:
        here = made("cast", w, (y.a + w, y.a + w))
    if tuning.dropout:
        mask = Tensor(name=f"{module.name}.mask", size_bytes=y.stack.dropout_mask_bytes * elements, born=op.region)
        moved = 2 * w + y.stack.dropout_mask_bytes
        here = made("dropped", w, (moved, moved), (mask,))
    if tuning.autocast and w != y.a:
        here = made("narrow", y.a, (y.a + w, y.a + w))
    return here


def thin(
    y: Layout[X], tuning: Tuning, op: Op[X], names: tuple[str, str], sides: tuple[X, X], read: Tensor[X], **more: Any
) -> Op[X]:
    """Return one thin GEMM of an adapter, of `sides` (features out, features in), whose weight trains.

    `names` are its own and that of the linear layer.

    In fp32 it runs on the vector units (torch.backends.cuda.matmul.allow_tf32 is off by default); under autocast it
    keeps the 16-bit copy of its weight.
    """
    (n, k), (name, short) = sides, names
    wide = tuning.width == 4 and not tuning.autocast
    w, m = 4 if wide else y.a, op.rows
    moved, flops = w * (m * n + m * k + n * k), matmul_flops(m, n, k)
    trainable = more.pop("trainable", True)
    weight = Weight(name=f"{name}.weight", elements=n * k, whole=n * k, shape=sides, adapter=True, trainable=trainable,
                    role=op.role, stored_bytes=0 if trainable else tuning.width * n * k)  # fmt: skip
    kept = [replace(read, read_for="weight")]
    if tuning.autocast and tuning.width != y.a:
        kept.append(Tensor(name=f"{name}.narrow weight", size_bytes=y.a * n * k, born=op.region, read_for="input"))
    return Op(
        name=name, kind="matmul", region=op.region, flops=flops, forward_bytes=moved, backward_flops=flops,
        backward_bytes=moved, weight_flops=flops, weight_bytes=moved, rows=m, columns=n, inner=k, weights=(weight,),
        reads=(read,), saves=tuple(kept), dtype=y.work.dtype if y.work.dtype in ("fp32", "tf32", "fp16") else "bf16",
        model_flops=flops, output_bytes=w * m * n, vector_units=wide and y.a < 4, modules=(short,), **more,
    )  # fmt: skip


def low_rank(y: Layout[X], tuning: Tuning, op: Op[X], module: AdaptedLinear[X], r: X | float) -> Tensor[X]:
    """Return the tensor between the two thin GEMMs of an adapter."""
    width = y.a if tuning.autocast else tuning.width
    return Tensor(name=f"{module.name}.lora_A", size_bytes=width * op.rows * r, born=op.region)


def _messages(y: Layout[X], op: Op[X], module: AdaptedLinear[X], r: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the messages of A and of B under tensor parallelism: r columns a token, and the input gradient of A.

    Beside a layer split by outputs A is split by rank and gathered; beside one split by inputs A is too and summed, and
    B is split by outputs and gathered. Under sequence parallelism a rank takes its tokens of that result, whose
    gradient is gathered, or both are exchanged (NeMo collections/llm/peft/utils.py ParallelLinearAdapter:
    scatter_to_sequence_parallel_region, all2all_hp2sp).
    """
    if not op.split:
        return {}, {}
    T, sp = op.rows, y.choices.sequence_parallel

    def sent(verb: Any, width: X | float, tensor: str, of: Gradient = "either") -> Collective[X]:
        return Collective(
            axis="tp", verb=verb, size_bytes=y.a * T * width, tensor=tensor, shape=(T, width), read_for=of
        )

    low, back = sent("all_gather", r, "adapter"), sent("all_reduce", r, "adapter gradient", "input")
    if op.split == "inputs":
        exchanged = sp and y.stack.exchanges_adapters
        verb = "all_to_all" if exchanged else "all_gather"
        width = divide(module.columns, y.degrees.tp) if exchanged else module.columns
        out, gathered = sent(verb, width, "adapter output"), sent(verb, width, "adapter output gradient")
        behind = (gathered, back) if sp else (back,)
        return {"forward": (sent("all_reduce", r, "adapter"),)}, {"forward": (out,), "backward": behind}
    gradient = sent("reduce_scatter" if sp else "all_reduce", op.inner, "adapter input gradient", "input")
    return {"forward": (low,), "backward": (gradient,)}, {"backward": (back,)}


def added(y: Layout[X], tuning: Tuning, op: Op[X], module: AdaptedLinear[X], delta: str) -> Op[X]:
    """Return what scales an adapter's result and adds it to the layer's; in fp32 the sum is cast back.

    Under sequence parallelism a rank has its tokens of what a layer that is split by inputs makes. Where operators are
    fused the GEMM of B reads the layer's result and writes the sum, scaled, without tensor parallelism
    (Megatron-Bridge peft/lora_layers.py TEFusedLoRALinear, peft/lora.py enable_op_fuser).
    """
    elements, w = op.rows * module.columns, y.a if tuning.autocast else tuning.width
    if op.split == "inputs" and y.choices.sequence_parallel:
        elements = divide(elements, y.degrees.tp)
    wider = w != y.a
    moved = (2 * w + (y.a + 2 * w) + (w + y.a if wider else 0), 2 * w + (y.a + w if wider else 0))
    ahead, back = moved[0] * elements, moved[1] * elements
    if y.stack.fuses_operators and not wider:
        ahead, back = above(y.degrees.tp, 1, ahead, y.a * elements), above(y.degrees.tp, 1, back, 0 * elements)
    return step(
        y, f"{module.name}.add", op, (ahead, back), kernels=3 if wider else 2,
        takes=(delta,), makes=module.makes, output_bytes=w * elements,
    )  # fmt: skip


def branches(
    y: Layout[X], tuning: Tuning, op: Op[X], chosen: Iterable[AdaptedLinear[X]], trains_a: bool = True
) -> Iterator[tuple[AdaptedLinear[X], AdapterInput[X], Op[X], Op[X]]]:
    """Yield the two thin GEMMs of every adapted layer, with what enters them."""
    tp = y.degrees.tp if op.split and tuning.splits_rank else 1
    for module in chosen:
        came, r = entry(y, tuning, op, module), tuning.rank
        ahead, behind = _messages(y, op, module, r)
        low = low_rank(y, tuning, op, module, r)
        # A is split by its rank or its inputs, B by its outputs: both by each tensor-parallel rank.
        rank = divide(0 * op.rows + r, tp) if op.split == "outputs" else 0 * op.rows + r
        out = divide(module.columns, tp) if op.split == "inputs" else module.columns
        a = thin(y, tuning, op, (low.name, module.short), (rank, op.inner), came.tensor, trainable=trains_a, **ahead)
        b = thin(y, tuning, op, (f"{module.name}.lora_B", module.short), (out, 0 * op.rows + r), low, **behind)
        yield module, came, a, b


def scaling(
    y: Layout[X], tuning: Tuning, op: Op[X], module: AdaptedLinear[X], scaled: tuple[Tensor[X], X], **more: Any
) -> Op[X]:
    """Return the product of a tensor with a learned factor of each of its n features, cast to the model's type.

    The factors of all adapters are multiplied first (peft tuners/ia3/layer.py Linear.forward).
    """
    (source, n), w, name = scaled, tuning.width, f"{module.name}.factors"
    elements = op.rows * n
    weight = Weight(name=name, elements=n, whole=n, kind="vector", adapter=True)
    vector = Tensor(name=name, size_bytes=w * n, born=op.region, read_for="input")
    moved = (y.a + 2 * w + (w + y.a if w != y.a else 0)) * elements
    return step(y, f"{name} applied", op, (moved, 2 * moved), kernels=3 if w != y.a else 2, weights=(weight,),
                 saves=(replace(source, read_for="weight"), vector), modules=(module.short,), output_bytes=w * elements,
                 **more)  # fmt: skip


GROUPS: dict[str, tuple[str, ...]] = {
    "attention": ("q", "k", "v", "qkv", "o"),
    "mlp": MLP_NAMES,
}
"""Words for several linear layers; "all-linear" are those of the layers, "experts" the routed experts'."""
INDEXER = "attention.indexer"
"""The region of layers that choose keys, which no word for those of attention means."""
NO_LAYER = ("",)
"""The modules of a GEMM with what is no linear layer."""
KNOWN_TARGETS = ("all-linear", "linear", "attention", "mlp", "experts", "embedding", "head")
"""Words for parts of a model: all linear layers of the blocks, those without experts and routers, and so on."""
SPELLINGS = {
    "query": "q", "key": "k", "value": "v", "projection": "o", "out": "o", "wq": "q", "wk": "k", "wv": "v", "wo": "o",
    "c_attn": "qkv", "query_key_value": "qkv", "w_pack": "qkv", "wqkv": "qkv", "linear_qkv": "qkv", "dense": "o",
    "attn.c": "o", "mlp.c": "down", "linear_proj": "o", "linear_fc1": "up", "linear_fc2": "down",
    "c_fc": "up", "fc1": "up", "fc_1": "gate", "fc2": "down", "fc_2": "up", "w1": "gate", "w2": "down", "w3": "up",
    "dense_h_to_4h": "up", "dense_4h_to_h": "down", "output": "head", "lm_head": "head", "decoder": "head",
    "vocab_projector": "head", "embed_tokens": "embedding", "wte": "embedding", "embeddings": "embedding",
    "x": "select", "dt": "time_step", "q_a": "q_down", "q_b": "q_up", "kv_a_proj_with_mqa": "kv_down", "kv_b": "kv_up",
    "linear_q_down": "q_down", "linear_q_up": "q_up", "linear_kv_down": "kv_down", "linear_kv_up": "kv_up",
}  # fmt: skip
"""The names that models and frameworks give linear layers, most without a trailing "_proj"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedLinear(Generic[X]):
    """A linear layer: its name in the ledger, the short one of models, its features out, and the tensor it makes."""

    name: str
    short: str
    columns: X
    makes: tuple[str, ...]


def modules_of(tuning: Tuning | None, op: Op[X]) -> list[AdaptedLinear[X]]:
    """Return the linear layers that a GEMM stands for; one where the framework has a joint one with one adapter."""
    short = op.modules or (op.role,)
    makes = op.makes or (op.name, f"{op.name}.output")
    if len(short) != len(op.parts) or (tuning is not None and tuning.joint) or op.kind == "grouped":
        return [AdaptedLinear(name=op.name, short=_short(op, short), columns=op.columns, makes=makes)]
    # A gate of the output, behind the values, goes with the queries.
    each = [makes[i : i + 1] or makes[:1] for i in range(len(short))] if op.makes else [makes] * len(short)
    return [
        AdaptedLinear(name=f"{op.name}.{name}" if len(short) > 1 else op.name, short=name, columns=n, makes=made)
        for name, n, made in zip(short, op.parts, each, strict=True)
    ]


def _short(op: Op[X], short: tuple[str, ...]) -> str:
    if op.kind == "grouped":
        return "experts"
    return short[0] if len(short) == 1 else op.role


def spelled(targets: Iterable[str]) -> set[str]:
    """Return the words of targets as the ledger spells them.

    >>> sorted(spelled(["q_proj", "w2", "linear_proj", "all-linear"]))
    ['all-linear', 'down', 'o', 'q']
    """
    pairs = ((word.lower(), word.lower().removesuffix("_proj")) for word in targets)
    return {SPELLINGS.get(whole) or SPELLINGS.get(word, word) for whole, word in pairs}


def own_names(tuning: Tuning) -> set[str]:
    """Return the targets that are names of the model's class: they mean its layers, whatever others call so.

    Frameworks with joint layers have names of their own.
    """
    return set() if tuning.joint else set(layer_names(tuning.family).values()).intersection(tuning.targets)


def words_of(tuning: Tuning) -> set[str]:
    """Return the targets that are no names of the model's class, as the ledger spells them."""
    return spelled(set(tuning.targets) - own_names(tuning))


def names_experts(words: set[str], role: str) -> bool:
    """Return whether words name the first or the second linear layer of experts as that of a feed-forward.

    >>> names_experts({"mlp"}, "up"), names_experts({"down"}, "up")
    (True, False)
    """
    return not words.isdisjoint({"mlp", "gate", "up", "gate_up"} if role == "up" else {"mlp", "down"})


def matches(tuning: Tuning, op: Op[X], short: str) -> bool:
    """Return whether a linear layer of an operator is among the targets."""
    if not short:
        return False
    own, words = own_names(tuning), words_of(tuning)
    if op.role in ("embedding", "head"):
        return op.role in words
    if op.kind == "grouped":
        named = names_experts(words, op.role) or ("all-linear" in words and tuning.all_experts)
        return "experts" in words or (tuning.finds_experts and named)
    if op.role == "router" and not (tuning.finds_routers or "router" in words):
        return False
    if short in tuning.shadowed:
        return "linear" in words
    if own and layer_name(tuning.family, op.region, short) in own:
        return True
    if "all-linear" in words and (op.role != "router" or tuning.finds_routers):
        return True
    if "linear" in words and op.role != "router":
        return True
    if op.region == INDEXER:
        return False
    # Layers of recurrences have names of their own in some classes and those of attention in others: the group does not
    # mean them.
    for group in words & GROUPS.keys() if op.region != "ssm" else ():
        words |= set(GROUPS[group])
        if op.region.partition(".")[0] == group and op.role not in ("router", "indexer"):
            return True
    fused = {"gate", "up"}
    joint = {"qkv": {"q", "k", "v"}, "gate_up": fused, "up": set() if op.modules else fused}
    joint = {} if op.region == "ssm" else joint
    return not words.isdisjoint({short, op.name, *joint.get(short, ())})


Held: TypeAlias = Literal["trains", "frozen", "shared", "made"]
"""A matrix of a path: a parameter, a buffer of each layer, one of the whole model, or what the path made of others."""


class AdapterPath(Generic[X]):
    """The operators that an adapter adds beside one linear layer, in their order, and the tensor it has reached."""

    def __init__(self, y: Layout[X], tuning: Tuning, op: Op[X], module: AdaptedLinear[X]) -> None:
        self.y, self.t, self.op, self.module = y, tuning, op, module
        self.ops: list[Op[X]] = []
        self.at = kept_input(op)
        self.r = 0 * op.rows + tuning.rank
        self.m, self.n, self.T, self.w = op.inner, module.columns, op.rows, tuning.width

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
        """Make a matrix of parameters, whatever the tokens; `flops` are those of the GEMMs in it."""
        flops, moved = more.pop("flops", None), self.w * (elements + learned) + 0 * self.T
        own = memory_op(
            self.y, f"{self.module.name}.{part}", self.op.region, (2 * moved, 3 * moved), role="steps",
            weights=(self.learned(f"{part} parameters", learned),), saves=saves, modules=(self.module.short,),
            output_bytes=moved, takes=(), **more,
        )  # fmt: skip
        if flops is not None:
            own = replace(own, kind="matmul", flops=flops, weight_flops=2 * flops, rows=self.n, columns=self.m,
                          inner=self.r, dtype=self.op.dtype, vector_units=self.w > self.y.a)  # fmt: skip
        self.ops.append(own)

    def widen(self) -> None:
        """Run in fp32, whatever the type of the parameters."""
        self.t, self.w = replace(self.t, width=4), 4

    def matmul(self, part: str, n: X | float, kept: Held = "trains", width: int = 0, size: X | float = 0) -> None:
        """Multiply by a matrix of n features out; one that was made is kept for the gradient of what it multiplies.

        `size` are its elements where they are not those of the GEMM.
        """
        w, k = width or self.w, self._features
        shape = (n + 0 * self.T, k)
        names = (f"{self.module.name}.{part}", self.module.short)
        one = thin(self.y, replace(self.t, width=w, autocast=False), self.op, names, shape, self.at,
                   trainable=kept != "frozen")  # fmt: skip
        if kept in ("shared", "made"):
            zero = 0 * self.T
            view = replace(one.weights[0], elements=zero, whole=zero, trainable=kept == "made", stored_bytes=0)
            one = replace(one, weights=(view,))
        if kept == "made":
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
