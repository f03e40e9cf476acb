"""Formats of frozen weights: bits, scales, and what GEMMs do with them."""

from __future__ import annotations

from functools import cache
from typing import Any

from shardwise.errors import InputError, Problem
from shardwise.files import own_table
from shardwise.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseFormat:
    """How frozen matrices are stored: bits an element, scales of its blocks, tables of a tensor.

    `second_block` scales share one of `second_bytes`. Before a GEMM `widened_bytes` of each element are moved to
    make 16 bits of it (0: GEMMs read it as it is), `unpacked_bytes` of each are there at once, and decoding by branches
    takes as long as `decoding_flops` of vectors; with `keeps_widened` autograd keeps the 16 bits for the input
    gradient. `bitsandbytes` has products of its own for it, which with `keeps_inputs` keep their input in all its
    releases, whatever trains. With `rest_as_is` peft casts nothing beside it
    (peft utils/other.py prepare_model_for_kbit_training). GEMMs of type `read_by` read it as it is stored, then
    `read_copies` times: for both passes apart where they take no turned operands.
    """

    name: str
    bits: float
    block: int = 0
    scale_bytes: float = 0.0
    second_block: int = 0
    second_bytes: float = 0.0
    tensor_bytes: float = 0.0
    row_bytes: float = 0.0
    widened_bytes: float = 0.0
    decoding_flops: float = 0.0
    unpacked_bytes: float = 2.0
    keeps_widened: bool = False
    bitsandbytes: bool = False
    keeps_inputs: bool = False
    rest_as_is: bool = False
    read_by: str = ""
    read_copies: int = 1
    source: str = ""

    @property
    def narrow(self) -> bool:
        """Whether elements have fewer than 16 bits, so that they cannot be trained."""
        return self.bits < 16


@cache
def _table() -> dict[str, dict[str, Any]]:
    bases: dict[str, dict[str, Any]] = own_table(__file__, "precisions.toml")["base"]
    return bases


def base_names() -> tuple[str, ...]:
    """Return the formats of frozen weights.

    >>> "nf4" in base_names()
    True
    """
    return tuple(_table())


def find_base(name: str) -> BaseFormat:
    """Return the named format of frozen weights; raises `InputError` naming the known ones.

    >>> find_base("nf4").bits, find_base("bf16").narrow
    (4, False)
    """
    if name not in _table():
        raise InputError([Problem("base", name, "is not a known format", "use one of " + ", ".join(_table()))])
    return BaseFormat(name=name, **_table()[name])
