"""Measured numbers beside their predictions, and tables of errors by what rows have in common."""

from __future__ import annotations

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Literal, TypeAlias

from shardwise.cost import Conditions
from shardwise.ledger.number import quantile
from shardwise.records import dataclass

if TYPE_CHECKING:
    from shardwise.serving import ServingCase
    from shardwise.training import TrainingCase

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
    parts: Mapping[str, float] = field(default_factory=dict)
    """The headlines whose bands make up its own, with the share of each, where it is a sum of them."""
    cache_share: float = 0.0
    """The share that the cache takes of what an engine may use, predicted, where a row is of the cache."""
    case: TrainingCase | ServingCase | None = None
    """The question and the plan that were predicted, of runs."""

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
    parts: Mapping[str, float] = field(default_factory=dict)
    cache_share: float = 0.0
    case: TrainingCase | ServingCase | None = None


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


BY = ("metric", "source", "device", "family", "quality", "year", "kind", "model", "engine")


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Errors of a group of rows: signed median (bias), median, 90th percentile, mean and largest of absolute ones.

    `inside` is the share of measurements within their intervals, None where rows have none.
    """

    group: tuple[str, ...]
    count: int
    bias: float
    median_abs_error: float
    p90_abs_error: float
    mean_abs_error: float
    largest_abs_error: float
    inside: float | None


def errors_of(group: tuple[str, ...], rows: Iterable[Comparison]) -> Errors:
    """Return the errors of a group of rows that have one."""
    kept = list(rows)
    signed = [row.relative_error for row in kept if row.relative_error is not None]
    absolute = [abs(error) for error in signed]
    hits = [row.inside for row in kept if row.inside is not None]
    return Errors(
        group=group,
        count=len(signed),
        bias=quantile(signed, 0.5),
        median_abs_error=quantile(absolute, 0.5),
        p90_abs_error=quantile(absolute, 0.9),
        mean_abs_error=sum(absolute) / len(absolute),
        largest_abs_error=max(absolute),
        inside=sum(hits) / len(hits) if hits else None,
    )


def summary(rows: Iterable[Comparison], by: tuple[str, ...] = ("source", "metric", "device")) -> tuple[Errors, ...]:
    """Return errors by groups of fields of rows, sorted; a row without an error belongs to none."""
    groups: dict[tuple[str, ...], list[Comparison]] = defaultdict(list)
    for row in rows:
        if row.relative_error is not None and row.metric != "fits":
            groups[tuple(str(getattr(row, name)) for name in by)].append(row)
    return tuple(errors_of(group, groups[group]) for group in sorted(groups))


def reasons(rows: Iterable[Comparison]) -> tuple[tuple[str, int], ...]:
    """Return why rows were refused, the most frequent reason first."""
    return tuple(Counter(row.reason for row in rows if row.status == "refused").most_common())


def examples(rows: Iterable[Comparison]) -> dict[str, str]:
    """Return the first row that was refused for each reason: its name, and the cell that it is about.

    >>> row = Comparison(case_id="line 7", metric="mfu", status="refused", reason="tp: is not whole", refused="1.5")
    >>> examples([row])
    {'tp: is not whole': 'line 7: 1.5'}
    """
    first_rows: dict[str, str] = {}
    for row in rows:
        if row.status == "refused":
            first_rows.setdefault(row.reason, f"{row.case_id}: {row.refused}" if row.refused else row.case_id)
    return first_rows


def assumptions(rows: Iterable[Comparison]) -> tuple[tuple[str, int], ...]:
    """Return the fields that predicted rows leave to rules, with the number of rows, the most frequent first.

    >>> row = Comparison(case_id="a", metric="mfu", status="predicted", assumed=("optimizer: not stated: Adam",))
    >>> assumptions([row, row])
    (('optimizer', 2),)
    """
    fields = (one.split(": ")[0] for row in rows for one in row.assumed if ": " in one)
    return tuple(Counter(name for name in fields if " " not in name).most_common())


@dataclass(frozen=True, kw_only=True, slots=True)
class FitCounts:
    """Predictions of whether runs fit: rows that ran out of memory and configurations that ran, and how many are wrong.

    Every configuration with a measured time or a measured peak ran, so it fits.
    """

    ran: int
    ran_called_unfit: int
    failed: int
    failed_called_fit: int

    @property
    def false_alarms(self) -> float:
        """Share of what ran that is said not to fit; 0 where nothing ran."""
        return self.ran_called_unfit / self.ran if self.ran else 0.0

    @property
    def misses(self) -> float:
        """Share of what ran out of memory that is said to fit; 0 where nothing did."""
        return self.failed_called_fit / self.failed if self.failed else 0.0


def fits_of(rows: Iterable[Comparison]) -> FitCounts:
    """Return how well predictions tell runs that fit from those that ran out of memory."""
    ran: dict[str, bool] = {}
    failed: dict[str, bool] = {}
    for row in rows:
        if row.status != "predicted" or row.fits is None or row.metric == "checkpoint_bytes":
            continue  # a checkpoint lies on a disk, whatever devices there are
        out_of_memory = row.metric == "fits" and row.measured == 0
        (failed if out_of_memory else ran)[row.case_id] = row.fits
    return FitCounts(
        ran=len(ran),
        ran_called_unfit=sum(not fits for fits in ran.values()),
        failed=len(failed),
        failed_called_fit=sum(failed.values()),
    )
