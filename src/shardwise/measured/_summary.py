"""Tables of errors: bias, median, 90th percentile and mean of absolute errors by what rows have in common."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from shardwise.ledger.number import quantile
from shardwise.measured._comparison import Comparison
from shardwise.records import dataclass

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
    found: dict[str, str] = {}
    for row in rows:
        if row.status == "refused":
            found.setdefault(row.reason, f"{row.case_id}: {row.refused}" if row.refused else row.case_id)
    return found


def assumptions(rows: Iterable[Comparison]) -> tuple[tuple[str, int], ...]:
    """Return the fields that predicted rows leave to rules, with the number of rows, the most frequent first.

    >>> row = Comparison(case_id="a", metric="mfu", status="predicted", assumed=("optimizer: not stated: Adam",))
    >>> assumptions([row, row])
    (('optimizer', 2),)
    """
    fields = (one.split(": ")[0] for row in rows for one in row.assumed if ": " in one)
    return tuple(Counter(name for name in fields if " " not in name).most_common())


@dataclass(frozen=True, kw_only=True, slots=True)
class Fits:
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


def fits_of(rows: Iterable[Comparison]) -> Fits:
    """Return how well predictions tell runs that fit from those that ran out of memory."""
    ran: dict[str, bool] = {}
    failed: dict[str, bool] = {}
    for row in rows:
        if row.status != "predicted" or row.fits is None or row.metric == "checkpoint_bytes":
            continue  # a checkpoint lies on a disk, whatever devices there are
        out_of_memory = row.metric == "fits" and row.measured == 0
        (failed if out_of_memory else ran)[row.case_id] = row.fits
    return Fits(
        ran=len(ran),
        ran_called_unfit=sum(not fits for fits in ran.values()),
        failed=len(failed),
        failed_called_fit=sum(failed.values()),
    )
