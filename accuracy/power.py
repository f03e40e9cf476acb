"""Measured watts of devices against `cost/power.toml`: `python -m accuracy.power` says how far off it is.

Rows are steady loads of vLLM (github.com/ml-energy/leaderboard 0cd52da, 2026, and leaderboard-v2, 2024, Apache-2.0;
Chung et al., NeurIPS Datasets and Benchmarks 2025): mean watts of a device, and shares of its peaks: what the ledger
counts of a batch at that length, over the time that was measured. Prompts are taken as 250 tokens.
"""

from __future__ import annotations

import csv
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from shardwise.cost import family_of, power_model
from shardwise.hardware import find_device

DATA = Path(__file__).with_name("power.csv")


@dataclass(frozen=True, slots=True)
class Row:
    """One load: the device's family, whether the model is a mixture, and shares of watts, arithmetic and memory."""

    family: str
    source: str
    model: str
    watts: float
    compute: float
    memory: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.watts / power_model(self.family).share(self.compute, self.memory)


def rows() -> tuple[Row, ...]:
    """Return every row of the table."""
    with open(DATA, encoding="ascii") as file:
        return tuple(map(_row, csv.DictReader(file)))


def _row(cells: dict[str, str]) -> Row:
    device = find_device(cells["device"]).device
    return Row(
        family_of(device),
        cells["source"],
        cells["model"],
        float(cells["watts_per_device"]) / device.power_watts,
        float(cells["compute_share"]),
        float(cells["memory_share"]),
    )


def score(found: tuple[Row, ...]) -> tuple[float, float, float]:
    """Return the median and the 90 % of absolute errors, and the share inside the band of the family."""
    off = sorted(abs(1 / row.ratio - 1) for row in found)
    inside = [power_model(row.family).low <= row.ratio <= power_model(row.family).high for row in found]
    return statistics.median(off), off[math.ceil(0.9 * len(off)) - 1], sum(inside) / len(inside)


if __name__ == "__main__":
    for family in sorted({row.family for row in rows()}):
        own = tuple(row for row in rows() if row.family == family)
        median, worst, inside = score(own)
        print(f"{family}: {len(own)} rows, median error {median:.1%}, worst tenth {worst:.1%}, inside {inside:.0%}")
