"""Formats of weights and caches: bits an element with the scales of its group, and which weights take the format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, cast

from shardwise.errors import InputError, Problem, near
from shardwise.files import own_table
from shardwise.ledger.op import Weight
from shardwise.models import Model
from shardwise.plans import DTYPES
from shardwise.records import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """A weight format: `bits` an element, scales of `scale_bits` shared by `group` elements, `compute` of its GEMMs.

    `scope` says which weights take it: "linear" every linear layer but router and head, "feed-forward" those between
    attentions, "experts" the routed experts, "all" everything. The rest stays in `rest_bits`. Where tensors differ,
    `bits` is the mean of a whole model, and `tensor_bits` those of each (`tensor_key`). `expert_pads` are multiples
    that an engine pads experts to: inner and outer side of the first GEMMs, then of the second.
    """

    name: str
    bits: float
    scope: Literal["linear", "feed-forward", "experts", "all"]
    group: int = 0
    scale_bits: float = 0.0
    compute: str = ""
    source: str = ""
    rest_bits: float = 16.0
    tensor_bits: tuple[tuple[tuple[str, ...], float], ...] = ()
    expert_pads: tuple[int, ...] = ()
    parts: tuple[tuple[str, WeightFormat], ...] = ()
    """Parts of the model with a format of their own (`parts_of`): "nvfp4+attention=bf16+shared=fp8" by name."""

    @property
    def base(self) -> str:
        """The name of the format without its parts.

        >>> find_format("nvfp4+attention=bf16").base
        'nvfp4'
        """
        return self.name.partition("+")[0]

    @property
    def kind(self) -> str:
        """The name of the format without its parts and its group, which kernels take as an argument.

        >>> find_format("int4-g32+attention=bf16").kind
        'int4'
        """
        return re.sub(r"-g\d+$", "", self.base)

    @property
    def narrow(self) -> tuple[WeightFormat, ...]:
        """The format and those of its parts that are narrower than what the rest stays in."""
        own = {one.name: one for _, one in self.parts if one.bits < self.rest_bits}
        return (self, *own.values())

    @property
    def bytes(self) -> float:
        """Bytes of one element, its share of the group's scales included.

        >>> find_format("nvfp4").bytes, find_format("bf16").bytes
        (0.5625, 2.0)
        """
        return (self.bits + (self.scale_bits / self.group if self.group else 0.0)) / 8

    @property
    def rest_bytes(self) -> float:
        """Bytes of one element of the weights that do not take the format."""
        return self.bytes if self.scope == "all" else self.rest_bits / 8

    def of(self, weight: Weight[Any]) -> WeightFormat | None:
        """Return the format that a weight takes, this or that of its part; None for one that stays wide."""
        parts = dict(self.parts)
        own = next((parts[part] for part in parts_of(weight) if part in parts), self)
        if weight.kind in ("head", "embedding") and own is not self:
            return own if own.bits < self.rest_bits else None
        # A part that is named is held whole by a format that is of experts where none is named.
        takes = own.holds(weight) or (own is not self and own.scope == "experts")
        return own if takes and (own is self or own.bits < self.rest_bits) else None

    def holds(self, weight: Weight[Any]) -> bool:
        """Return whether a weight takes the format: vectors never below 16 bits, gates only where all do."""
        if self.scope == "all":
            return weight.kind != "vector" or self.bits >= 16
        if weight.kind != "matrix":
            return False
        if self.scope == "feed-forward":
            return weight.expert or weight.role in _FEED_FORWARD
        return weight.expert if self.scope == "experts" else weight.role not in WIDE_ROLES

    def element_bytes(self, weight: Weight[Any]) -> float:
        """Return bytes of one element of a weight."""
        if self.tensor_bits:
            return dict(self.tensor_bits).get(tensor_key(weight), self.bits) / 8
        own = self.of(weight)
        return own.bytes if own else max(self.rest_bits / 8, 4.0 if self.bits == 32 else 0.0)


PARTS = ("attention", "attention-out", "recurrent", "feed-forward", "shared", "latent", "mtp", "head", "tables")
"""What formats tell apart from the routed experts: mixers that attend, their output projections where those differ from
their other maps, mixers that keep a state, feed-forwards that are no mixture, experts that all tokens pass, the maps
into a latent of the experts and out of it, layers that predict more tokens, and the output head and tables beside that
of tokens, which stay wide unless they are named."""


def parts_of(weight: Weight[Any]) -> tuple[str, ...]:
    """Return the parts that a matrix belongs to, the narrowest first; none where it is an expert's or none's."""
    if weight.kind == "head":
        return ("head",)
    if weight.role == "ngrams":
        return ("tables",)
    if weight.expert or weight.kind != "matrix" or weight.role in WIDE_ROLES:
        return ()
    if weight.module == "attention" and weight.role == "out":
        return ("attention-out", "attention")
    return (weight.module or ("feed-forward" if weight.role in _FEED_FORWARD else ""),)


_FEED_FORWARD = ("up", "down", "feed_forward", "router")

# Qwen's gate of shared experts is no layer that engines quantise: a plain torch.nn.Linear in
# github.com/sgl-project/sglang 0.5.6 and 0.5.15 python/sglang/srt/models/qwen2_moe.py, quant_config None beside it.
WIDE_ROLES = ("router", "shared_gate")


def tensor_key(weight: Weight[Any]) -> tuple[str, ...]:
    """Return what tells a weight's tensors in a file from others of the model."""
    # Training's operators name no modules but shared experts: the key is the same for both.
    return weight.kind, weight.role, "experts" if weight.expert else "shared" * (weight.module == "shared")


@cache
def format_tables() -> dict[str, Any]:
    """Return the tables of weight formats."""
    return own_table(__file__, "quantization.toml")


def format_names(spellings: bool = True) -> tuple[str, ...]:
    """Return the names of the weight formats, other spellings included unless they are not asked for.

    >>> "int4" in format_names()
    True
    """
    return (*format_tables()["formats"], *(format_tables()["aliases"] if spellings else ()))


def find_format(name: str, field: str = "weights") -> WeightFormat:
    """Return the named weight format; raises `InputError` naming near ones.

    >>> find_format("fp4").name
    'nvfp4'
    >>> find_format("nvfp4+attention=bf16+shared=fp8").parts[1][1].bytes
    1.0
    """
    name, plus, parts = name.partition("+")
    format_of = _plain(name, field)
    return (
        with_parts(format_of, dict(one.partition("=")[::2] for one in parts.split("+")), field) if plus else format_of
    )


def with_parts(form: WeightFormat, parts: Mapping[str, str], field: str = "weights") -> WeightFormat:
    """Return a format with formats of their own for parts of the model, by name; raises `InputError` for no part.

    >>> with_parts(find_format("nvfp4"), {"attention": "bf16"}).name
    'nvfp4+attention=bf16'
    """
    for part in parts:
        if part not in PARTS or form.scope == "all":
            rule = f"is not a part of the model that {form.name} can leave to another format"
            raise InputError([Problem(field, part, rule, "use one of " + ", ".join(PARTS) + " beside fp8 or nvfp4")])
    named = [(part, _in_some(form, word, field)) for part, word in parts.items()]
    # What is wide beside experts stays wide.
    own = tuple((part, one) for part, one in named if form.scope != "experts" or one.bits < form.rest_bits)
    return replace(form, name="+".join((form.name, *(f"{part}={one.name}" for part, one in own))), parts=own)


def _in_some(form: WeightFormat, word: str, field: str) -> WeightFormat:
    """Return the format of a part: "own" is that of the model, within a part that has another.

    "bf16*3/32" is one of 3 of its 32 layers, whose mean counts in the others' type.
    """
    if word == "own":
        return replace(form, parts=())
    name, star, parts = word.partition("*")
    one, layers = _plain(name, field), re.fullmatch(r"(\d{1,4})/(\d{1,4})", parts)
    if not star:
        return one
    if not layers or not 0 < int(layers[1]) < int(layers[2]):
        raise InputError([Problem(field, word, "is not a format in some of a part's layers", "write bf16*3/32")])
    share = int(layers[1]) / int(layers[2])
    bits = 8 * (share * one.bytes + (1 - share) * form.bytes)
    return replace(form, name=word, bits=bits, group=0, scale_bits=0.0)


def formats_in(name: str) -> tuple[str, ...]:
    """Return the formats of a name, each once: that of the weights and those of parts of the model.

    >>> formats_in("nvfp4+attention=bf16+mtp=bf16")
    ('nvfp4', 'bf16')
    """
    whole, *parts = name.split("+")
    return tuple(dict.fromkeys((whole, *(one.partition("=")[2] for one in parts))))


def recipe_of(form: WeightFormat, model: Model) -> tuple[WeightFormat, str]:
    """Return a format with what published checkpoints of a model's family keep wider, and where that is stated.

    A format of routed experts is one of all linear layers where a model has none.

    >>> recipe_of(find_format("nvfp4"), Model.load("deepseek-v3"))[0].name
    'nvfp4+attention=bf16+mtp=bf16'
    >>> recipe_of(find_format("mxfp4"), Model.load("llama-3.1-8b"))[0].name
    'mxfp4+attention=mxfp4+recurrent=mxfp4+feed-forward=mxfp4'
    """
    if form.scope == "experts" and not form.parts and not model.has_experts:
        dense = format_tables()["dense"]
        return with_parts(form, dict.fromkeys(dense["parts"], form.name)), dense["source"]
    for one in format_tables()["kept"]:
        covers = model.has_experts or one.get("dense", False)
        if form.name == one["format"] and covers and model.family in one["families"]:
            return with_parts(form, one["parts"]), one["source"]
    return form, ""


def _plain(name: str, field: str) -> WeightFormat:
    if name in DTYPES:
        return _preset(name)
    table = format_tables()
    key = table["aliases"].get(name, name)
    if key not in table["formats"]:
        close = near(name, format_names(), 3, 0.4) or format_names()
        # What most models are served in is named whatever was mistyped.
        close = [*close, *(usual for usual in ("bf16", "fp8") if usual not in close)]
        raise InputError([Problem(field, name, "is not a known weight format", "use one of " + ", ".join(close))])
    return WeightFormat(name=key, **table["formats"][key])


def _preset(name: str) -> WeightFormat:
    """Return the format of a preset: the layers' matrices in its bits without scales, all else as its embedding."""
    widths = DTYPES[name]
    return WeightFormat(
        name=name,
        bits=widths.weights,
        scope="linear",
        compute={16: "", 8: "int8", 4: "int4"}[widths.activations],
        rest_bits=widths.embedding,
        source="bits as the preset's name says; scales are not counted",
    )


def checkpoint_format(quantization: str) -> WeightFormat:
    """Return the format of a checkpoint by its own word, 16 bits where it has none; raises for unknown methods.

    >>> checkpoint_format("awq-int4").name, checkpoint_format("").name
    ('int4', 'bf16')
    """
    known = format_tables()["checkpoints"]
    method, plus, parts = quantization.partition("+")
    if not quantization:
        return find_format("bf16")
    if method not in known or "different" in parts:
        rule = f"the checkpoint's quantization {quantization!r} is not known"
        raise InputError([Problem("weights", "", rule, "state one of " + ", ".join(format_tables()["formats"]))])
    return find_format(known[method] + plus + parts)


def cache_names() -> dict[str, float]:
    """Return the formats of a KV cache and their bytes an element.

    >>> cache_names()["bf16"]
    2.0
    """
    return {name: cache_bytes(name) for name in format_tables()["cache"]}


def cache_bytes(name: str) -> float:
    """Return bytes of one element of the KV cache in a format, its scales included.

    >>> cache_bytes("fp8")
    1.0
    """
    known = cast("dict[str, float]", format_tables()["cache"])
    if name not in known:
        raise InputError([Problem("kv_cache", name, "is not a known cache format", "use one of " + ", ".join(known))])
    return known[name] / 8
