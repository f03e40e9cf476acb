"""One measured number and its prediction."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Literal, TypeAlias

from shardwise.cost import Conditions
from shardwise.records import dataclass

COLUMNS = (
    *("case_id", "metric", "measured", "predicted", "relative_error", "low", "high", "status", "assumed"),
    *("reason", "source", "model", "device", "quality", "citation"),
)
Status: TypeAlias = Literal["predicted", "refused"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One row of a file of measurements: what was measured, what is predicted, and what had to be assumed.

    `family` is "dense" or "experts" for a model and the data type for a kernel, `year` that of the device (0: not
    known), `engine` the engine or framework, `fits` whether the configuration is predicted to fit. A refused row has a
    `reason`, the cell that it is about as `refused`, and no prediction; a row with an unreadable value has no
    `measured` either.

    >>> Comparison(case_id="a", metric="step_time", measured=2.0, predicted=1.5, status="predicted").relative_error
    -0.25
    """

    case_id: str
    metric: str
    status: Status
    kind: str = ""
    source: str = ""
    citation: str = ""
    model: str = ""
    device: str = ""
    family: str = ""
    quality: str = ""
    engine: str = ""
    year: int = 0
    num_devices: int = 1
    measured: float | None = None
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    fits: bool | None = None
    reason: str = ""
    refused: str = ""
    assumed: tuple[str, ...] = ()
    conditions: Conditions | None = None
    headline: str = ""
    """The headline whose band the row adds to, where its metric alone does not say so."""

    @property
    def relative_error(self) -> float | None:
        """Predicted over measured less one; None where either is missing or nothing was measured."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool | None:
        """Whether the measurement lies in the interval; None without one."""
        if self.measured is None or self.low is None or self.high is None:
            return None
        return self.low <= self.measured <= self.high


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a predictor says about a row: the value of its metric, the interval, what was assumed, whether it fits."""

    value: float
    interval: tuple[float, float] | None = None
    assumed: tuple[str, ...] = ()
    fits: bool | None = None
    family: str = ""
    conditions: Conditions | None = None
    headline: str = ""


def rows_csv(rows: Iterable[Comparison]) -> str:
    """Return every row as CSV text: measured, predicted, relative error, interval, status and what was assumed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow(_cell(getattr(row, name)) for name in COLUMNS)
    return text.getvalue()


def _cell(value: object) -> object:
    if value is None:
        return ""
    return "; ".join(value) if isinstance(value, tuple) else value
