"""Bytes of memory as whole numbers, the way every report states them."""

from __future__ import annotations

from typing import Any

# Parts of a report in which every number is bytes.
_BYTES = ("categories", "moments", "at_peak")


def whole_bytes(tree: Any, inside: bool = False) -> Any:
    """Return a report's tree with bytes of memory rounded to whole ones.

    Bytes are values whose key ends with "_bytes" or "_bytes_per_gpu", what lies below such a key, and the parts of a
    peak. Rates a second stay as they are.

    >>> whole_bytes({"peak_bytes": 10.4, "seconds": 0.5, "at_peak": {"weights": 6.6}})
    {'peak_bytes': 10, 'seconds': 0.5, 'at_peak': {'weights': 7}}
    """
    if isinstance(tree, dict):
        return {
            key: whole_bytes(value, inside or key in _BYTES or key.endswith(("_bytes", "_bytes_per_gpu")))
            for key, value in tree.items()
        }
    if isinstance(tree, (list, tuple)):
        return type(tree)(whole_bytes(value, inside) for value in tree)
    return round(tree) if inside and isinstance(tree, float) else tree
