"""Bytes as whole numbers, the way every report states them."""

from __future__ import annotations

from typing import Any

# Parts of a report in which every number is bytes.
_BYTES = ("categories", "moments", "at_peak")
_ENDS = ("_bytes", "_bytes_per_gpu", "bytes_per_step", "sent_per_step")


def whole_bytes(tree: Any, inside: bool = False) -> Any:
    """Return a report's tree with bytes rounded to whole ones.

    Bytes are values whose key ends with "_bytes", "_bytes_per_gpu" or "_per_step" of bytes, what lies below such a key,
    and the parts of a peak. Rates a second stay as they are.

    >>> whole_bytes({"peak_bytes": 10.4, "seconds": 0.5, "at_peak": {"weights": 6.6}})
    {'peak_bytes': 10, 'seconds': 0.5, 'at_peak': {'weights': 7}}
    """
    if isinstance(tree, dict):
        return {key: whole_bytes(value, inside or key in _BYTES or key.endswith(_ENDS)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(whole_bytes(value, inside) for value in tree)
    return round(tree) if inside and isinstance(tree, float) else tree
