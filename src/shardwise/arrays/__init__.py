"""Arrays of numbers: numpy where Python can import it, and where it cannot, as much of it in plain Python.

Formulas of many places are written once, on `np`. Plain arrays give what numpy gives, a hundred times more slowly
(tests/test_arrays.py), so that a single answer needs no numpy.
"""

from __future__ import annotations

from typing import Any

np: Any
try:
    import numpy as np
except ImportError:
    from shardwise.arrays import plain as np

__all__ = ["np"]
