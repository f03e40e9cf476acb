"""Ticks of a device's clock on which replays of captured graphs begin, and what tables of kernels state for it.

A table replays a graph of one to six kernels a few times and divides the seconds of all. Where each replay waits for
the next tick, kernels of different lengths are stated alike: what is stated belongs to the table, not to the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accuracy.kernels.tables import ENGINES, copies, tables
from shardwise.cost import family_of, last_cache_bytes
from shardwise.hardware import Device
from shardwise.ledger.number import ceil, maximum

# Shortest seconds of a kernel over those that a table states, where a cell reaches down to nothing.
_LEAST = 0.1


@dataclass(frozen=True, slots=True)
class Ticks:
    """How a table times: seconds between ticks (0: none), kernels of a graph, replays, seconds once around them all."""

    seconds: float
    kernels: Any
    replays: int
    around: float

    def stated(self, seconds: Any) -> Any:
        """Return what the table states of a kernel of some seconds: all replays but the last end on a tick.

        >>> round(1e6 * Ticks(2e-6, 1, 6, 6e-6).stated(4.5e-6), 3)
        6.75
        """
        if not self.seconds:
            return seconds
        # Source: `ticks` of tables.toml, checked on 21,407 rows of attention (accuracy/notes/calibration.md).
        whole = self.seconds * maximum(ceil(self.kernels * seconds / self.seconds), 1)
        return (((self.replays - 1) * whole + self.around) / self.kernels + seconds) / self.replays

    def kernel(self, stated: Any) -> tuple[Any, Any]:
        """Return the shortest and the longest seconds of kernels of which the table states so many.

        Between what two neighbours state, some of the replays took a tick more: there the cell moves along.

        >>> low, high = Ticks(2e-6, 1, 6, 6e-6).kernel(6.83e-6)
        >>> round(1e6 * low, 2), round(1e6 * high, 2)
        (4.0, 6.0)
        """
        if not self.seconds:
            return stated, stated
        high = stated - (self.around - self.seconds / 2) / (self.replays * self.kernels)
        return maximum(high - self.seconds / self.kernels, _LEAST * stated), maximum(high, _LEAST * stated)


def ticks_of(table: str, engine: str, device: Device, dtype: str = "", weight: Any = 0.0) -> Ticks:
    """Return how a table of an engine times on a device; `weight` are the bytes of a GEMM's weights.

    Source: `ticks` of tables.toml.

    >>> from shardwise.hardware import find_device
    >>> b200, h200 = (find_device(name).device for name in ("b200-sxm-180gb", "h200-sxm-141gb"))
    >>> ticks_of("attention", "vllm", b200).seconds, ticks_of("attention", "vllm", h200).seconds
    (2.048e-06, 0.0)
    """
    row, family, word = tables()["ticks"], family_of(device), ENGINES.get(engine, "")
    replayed = table in ("gemm", *row["kernels"]) and f"{engine}-{dtype}" not in tables()["called"]
    if not word or not replayed or family not in row["families"]:
        return Ticks(0.0, 1, 1, 0.0)
    kernels = row["kernels"].get(table)
    if kernels is None:
        kernels = copies(word, dtype, weight, last_cache_bytes(device))
    return Ticks(row["seconds"], kernels, row["replays"].get(f"{engine}-{table}", row["usual"]), row["around"])
