"""Casts to types of fewer than 16 bits in training: bytes moved for an element of what a GEMM takes."""

from __future__ import annotations

from typing import Any

from shardwise.ledger.number import above
from shardwise.ledger.op import Op
from shardwise.plans import NarrowScaling
from shardwise.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Casts:
    """Bytes moved for an element of 16 bits that is cast: what kernels read, and the copies that they write.

    GEMMs that take the inner dimension first (before Blackwell) need a turned copy as well, of the same scale
    (TransformerEngine common/cast and transpose). The cast writes it along, but of what is gathered afterwards another
    kernel turns all, which reads it and writes it.
    """

    read: float
    copies: float
    turned: float = 0.0
    """Bytes of the turned copy among `copies`."""
    again: float = 0.0
    """Bytes moved to cast an element once more, scaled along its other side, for the weight gradient."""

    @classmethod
    def of(cls, scaling: NarrowScaling, turned: bool) -> Casts:
        """Return the bytes of a recipe; `turned` says that GEMMs take turned copies.

        >>> from shardwise.plans import find_scaling
        >>> Casts.of(find_scaling("fp8", "delayed"), True)
        Casts(read=2.0, copies=2.0, turned=1.0, again=0.0)
        """
        copies = scaling.turned_bytes if turned else scaling.weight_bytes
        own = copies - scaling.weight_bytes
        return cls(read=scaling.cast_reads, copies=copies, turned=own, again=scaling.recast_bytes)

    def moved(self, op: Op[Any], which: str) -> Any:
        """Return bytes moved for an element of what enters a pass of a GEMM, "forward" or "input".

        A rank casts its part of the rows that are gathered before a pass: forward where outputs are split.
        """
        whole = self.read + self.copies
        if op.split != {"forward": "outputs", "input": "inputs"}[which]:
            return whole
        parts = op.gathered_parts
        return above(parts, 1, (whole - self.turned) / parts + 2 * self.turned, whole + 0 * parts)
