"""Precision recipes: how many bytes each trainable parameter costs, by what they are kept for."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any, NamedTuple

from shardwise.errors import InputError, Problem, Problems
from shardwise.files import own_table, read_toml
from shardwise.records import dataclass
from shardwise.user_catalogue import OwnFile, find_own, note_of, own_files


class Widths(NamedTuple):
    """Bits of an element of the weights of the layers, of what their GEMMs take, and of the embedding."""

    weights: int
    activations: int
    embedding: int


_PAIRS = ((16, 16), (8, 16), (8, 8), (4, 16), (4, 8), (4, 4))
DTYPES: dict[str, Widths] = {f"w{w}a{a}e{e}": Widths(w, a, e) for (w, a), e in itertools.product(_PAIRS, (16, 32))}
"""The twelve presets of llm-analysis by name: wXaYeZ keeps weights in X bits, activations in Y, embeddings in Z."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Bytes per element of each copy of a parameter; names follow what frameworks call the recipe.

    `compute` is the data type of GEMMs and `activation_bytes` that of what is saved for backward.
    `master_bytes` is 0 when the stored weight is what the optimizer updates. `state_bytes` is one optimizer moment.
    `embedding_bytes` is the stored width of the tables, 0 for that of the other weights.
    Source: Megatron-LM optimizer docs (18 bytes for bf16 with fp32 gradients), arXiv:1910.02054 section 3.1 (16
    bytes).
    """

    name: str
    compute: str
    weight_bytes: float
    activation_bytes: int
    gradient_bytes: float
    master_bytes: float
    state_bytes: float
    embedding_bytes: float = 0
    note: str = ""

    @property
    def autocast(self) -> bool:
        """Whether GEMMs take 16-bit copies of wider weights, as torch.autocast makes them.

        >>> [find_precision(name).autocast for name in ("amp-fp16", "fp8-amp", "bf16", "fp32")]
        [True, True, False, False]
        """
        return self.weight_bytes > self.activation_bytes == 2


@cache
def _table() -> dict[str, Any]:
    return own_table(__file__, "precisions.toml")


def find_precision(name: str) -> Precision:
    """Return the named precision recipe; raises `InputError` naming the known ones.

    >>> find_precision("bf16").gradient_bytes
    4
    """
    own = find_own("precisions", name)
    if own is not None:
        return _own_precision(own)
    if name in DTYPES:
        return _preset(name)
    if name not in _table()["recipes"]:
        known = ", ".join(n for n in precision_names() if n not in DTYPES)
        raise InputError([Problem("precision", name, "is not a known recipe", "use one of " + known)])
    return _recipe(name)


def precision_names() -> tuple[str, ...]:
    """Return the names of all recipes, the user's and the presets of widths included.

    >>> "bf16" in precision_names(), "w8a8e16" in precision_names()
    (True, True)
    """
    return tuple(dict.fromkeys((*_table()["recipes"], *(own.name for own in own_files("precisions")), *DTYPES)))


@cache
def _recipe(name: str) -> Precision:
    return Precision(name=name, **_table()["recipes"][name])


@dataclass(frozen=True, kw_only=True, slots=True)
class NarrowScaling:
    """What a recipe of GEMMs of fewer than 16 bits keeps, in bytes an element: the keys of precisions.toml."""

    input_bytes: float
    gathered_bytes: float
    weight_bytes: float
    turned_bytes: float
    gather_bytes: float
    keeps_attention: bool
    source: str
    cast_reads: float
    sent_bytes: float
    sent_gradient_bytes: float
    recast_bytes: float = 0.0
    user_buffers: bool = True


SCALINGS = ("delayed", "tensorwise", "blockwise", "mxfp8", "rowwise")
"""Recipes of 8 bits by the words of Megatron-LM and of torchao (rowwise); GEMMs of 4 bits have NVFP4's."""


@cache
def find_scaling(compute: str, recipe: str = "") -> NarrowScaling | None:
    """Return how GEMMs of a type are scaled, one scale a tensor where nothing is said; None from 16 bits on.

    >>> find_scaling("fp8", "mxfp8").input_bytes, find_scaling("fp4").input_bytes, find_scaling("bf16")
    (1.03125, 0.5625, None)
    """
    names = {"fp8": recipe or "tensorwise", "fp4": "nvfp4"}
    return NarrowScaling(**_table()["scaling"][names[compute]]) if compute in names else None


def _preset(name: str) -> Precision:
    """Return the recipe of a preset: weights and activations as narrow as it says, gradients and states in fp32."""
    widths = DTYPES[name]
    if widths.activations < 8:
        rule = "saves activations of 4 bits for the backward pass, which no training does"
        raise InputError([Problem("precision", name, rule, f"use w{widths.weights}a8e{widths.embedding}")])
    return Precision(
        name=name,
        compute="bf16" if widths.activations == 16 else "fp8",
        weight_bytes=widths.weights / 8,
        activation_bytes=widths.activations // 8,
        gradient_bytes=4,
        master_bytes=4,
        state_bytes=4,
        embedding_bytes=widths.embedding / 8,
    )


_BYTES = ("weight_bytes", "activation_bytes", "gradient_bytes", "master_bytes", "state_bytes", "embedding_bytes")


@cache
def _own_precision(file: OwnFile) -> Precision:
    """Return the recipe that a TOML file states; what is missing or wrong names the file and the key."""
    table = read_toml(file.path)
    problems = Problems()
    for key in table.keys() - {"name", "compute", "source", *_BYTES}:
        problems.add(f"{file.path}: {key}", str(table[key]), "is not a key of a precision", f"use {', '.join(_BYTES)}")
    compute = table.get("compute")
    if not isinstance(compute, str):
        problems.add(f"{file.path}: compute", compute, "must be the data type of products", 'write for example "bf16"')
    widths = {key: _width(f"{file.path}: {key}", key, table, problems) for key in _BYTES}
    problems.raise_if_any()
    return Precision(name=file.name, compute=str(compute), note=note_of(file), **widths)


def _width(where: str, key: str, table: dict[str, Any], problems: Problems) -> Any:
    """Return bytes of one copy of a parameter; activations in whole bytes, and no weights or activations of none."""
    value = table.get(key, 0 if key == "embedding_bytes" else None)
    whole = key == "activation_bytes"
    least = 1 if whole else 0.125 if key == "weight_bytes" else 0
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= 16:
        rule = f"must be {'a whole number' if whole else 'a number'} of bytes from {least:g} to 16"
        problems.add(where, value if isinstance(value, (int, float, str)) else None, rule, "write for example 2")
        return 1
    return value


def precision_to_toml(precision: Precision) -> str:
    """Return a recipe as the text of a file that the user's catalogue reads back.

    >>> print(precision_to_toml(find_precision("bf16")))
    name = "bf16"
    compute = "bf16"
    weight_bytes = 2
    ...
    """
    lines = [f'name = "{precision.name}"', f'compute = "{precision.compute}"']
    return "\n".join([*lines, *(f"{key} = {getattr(precision, key)}" for key in _BYTES)]) + "\n"
