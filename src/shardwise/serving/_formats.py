"""Formats of weights and caches: bits an element with the scales of its group, and which weights take the format."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, cast

from shardwise.errors import InputError, Problem, near
from shardwise.files import own_table
from shardwise.ledger.op import Weight
from shardwise.plans import DTYPES
from shardwise.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """A weight format: `bits` an element, scales of `scale_bits` shared by `group` elements, `compute` of its products.

    `scope` says which weights take it: "linear" every linear layer but router and head, "feed-forward" those between
    attentions, "experts" the routed experts, "all" everything. The rest stays in `rest_bits`. Where tensors differ,
    `bits` is the mean of a whole model, and `layer_bits`, `table_bits` and `head_bits` those of the layers' matrices,
    the embedding and the head. `expert_pads` are multiples that an engine pads experts to: inner and outer side of the
    first products, then of the second.
    """

    name: str
    bits: float
    scope: Literal["linear", "feed-forward", "experts", "all"]
    group: int = 0
    scale_bits: float = 0.0
    compute: str = ""
    source: str = ""
    rest_bits: float = 16.0
    layer_bits: float = 0.0
    table_bits: float = 0.0
    head_bits: float = 0.0
    expert_pads: tuple[int, ...] = ()

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

    def holds(self, weight: Weight[Any]) -> bool:
        """Return whether a weight takes the format: vectors never below 16 bits, routers only where all do."""
        if self.scope == "all":
            return weight.kind != "vector" or self.bits >= 16
        if weight.kind != "matrix":
            return False
        if self.scope == "feed-forward":
            return weight.expert or weight.role in _FEED_FORWARD
        return weight.expert if self.scope == "experts" else weight.role != "router"

    def element_bytes(self, weight: Weight[Any]) -> float:
        """Return bytes of one element of a weight."""
        if self.layer_bits and weight.kind != "vector":
            return {"embedding": self.table_bits, "head": self.head_bits}.get(weight.kind, self.layer_bits) / 8
        return self.bytes if self.holds(weight) else max(self.rest_bits / 8, 4.0 if self.bits == 32 else 0.0)


_FEED_FORWARD = ("up", "down", "feed_forward", "router")


@cache
def _table() -> dict[str, dict[str, Any]]:
    return own_table(__file__, "quantization.toml")


def format_names(spellings: bool = True) -> tuple[str, ...]:
    """Return the names of the weight formats, other spellings included unless they are not asked for.

    >>> "int4" in format_names()
    True
    """
    return (*_table()["formats"], *(_table()["aliases"] if spellings else ()))


def find_format(name: str, field: str = "weights") -> WeightFormat:
    """Return the named weight format; raises `InputError` naming near ones.

    >>> find_format("fp4").name
    'nvfp4'
    """
    if name in DTYPES:
        return _preset(name)
    table = _table()
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
    known = _table()["checkpoints"]
    if not quantization:
        return find_format("bf16")
    if quantization not in known:
        rule = f"the checkpoint's quantization {quantization!r} is not known"
        raise InputError([Problem("weights", "", rule, "state one of " + ", ".join(_table()["formats"]))])
    return find_format(known[quantization])


def cache_names() -> dict[str, float]:
    """Return the formats of a key-value cache and their bytes an element.

    >>> cache_names()["bf16"]
    2.0
    """
    return {name: cache_bytes(name) for name in _table()["cache"]}


def cache_bytes(name: str) -> float:
    """Return bytes of one element of the key-value cache in a format, its scales included.

    >>> cache_bytes("fp8")
    1.0
    """
    known = cast("dict[str, float]", _table()["cache"])
    if name not in known:
        raise InputError([Problem("kv_cache", name, "is not a known cache format", "use one of " + ", ".join(known))])
    return known[name] / 8
