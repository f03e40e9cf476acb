"""Presets of widths: wXaYeZ keeps weights in X bits, activations in Y and embeddings in Z, as llm-analysis says."""

from __future__ import annotations

import itertools
from typing import NamedTuple


class Widths(NamedTuple):
    """Bits of an element of the weights of the layers, of what their products take, and of the embedding."""

    weights: int
    activations: int
    embedding: int


_PAIRS = ((16, 16), (8, 16), (8, 8), (4, 16), (4, 8), (4, 4))

DTYPES: dict[str, Widths] = {f"w{w}a{a}e{e}": Widths(w, a, e) for (w, a), e in itertools.product(_PAIRS, (16, 32))}
"""The twelve presets by name."""
