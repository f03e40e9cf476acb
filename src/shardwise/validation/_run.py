"""Files of measurements to rows with predictions: nothing is dropped, and no row stops the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from shardwise.errors import InputError
from shardwise.validation._cells import Cells, refuse
from shardwise.validation._files import BEYOND, Table, read_table
from shardwise.validation._places import Places
from shardwise.validation._row import Answer, Row

_SAID = 40
Predictor: TypeAlias = Callable[[Cells, Places], Answer]


@dataclass(frozen=True, slots=True)
class Validation:
    """Every row of some files with its prediction or the reason why it has none.

    `unread` has columns that no kind of file has: the file, the column, and the one that may have been meant.
    """

    rows: tuple[Row, ...]
    files: tuple[str, ...]
    unread: tuple[tuple[str, str, str], ...] = ()

    @property
    def predicted(self) -> tuple[Row, ...]:
        """The rows that have a prediction."""
        return tuple(row for row in self.rows if row.status == "predicted")

    @property
    def coverage(self) -> float:
        """Share of the rows that have a prediction; 1 where there are none."""
        return len(self.predicted) / len(self.rows) if self.rows else 1.0


def shipped() -> tuple[str, ...]:
    """Return the files of published measurements that the package ships.

    >>> all(path.endswith(".csv") for path in shipped())
    True
    """
    folder = Path(__file__).with_name("data")
    return tuple(str(path) for path in sorted(folder.glob("*.csv")) if not path.name.startswith("devices"))


def validate(files: Iterable[str]) -> Validation:
    """Return every row of some CSV files with its prediction; the kind of each file is told by its columns.

    Models and devices are looked up beside each file (models*.json, devices*.csv), then in the catalogue. Raises
    `InputError` for a file that cannot be read; a row that cannot be predicted is refused with the reason.
    """
    paths = tuple(files)
    tables = [read_table(path) for path in paths]
    rows = tuple(row for table in tables for row in rows_of(table, Path(table.path).parent))
    return Validation(rows, paths, tuple((table.path, *column) for table in tables for column in table.unread))


def rows_of(table: Table, folder: Path) -> Iterator[Row]:
    """Yield the rows of one file with their predictions."""
    places = Places(folder)
    predictor = predictor_of(table.kind)
    for number, raw in enumerate(table.rows, 2):
        yield _row(Cells(raw), table.kind, places, predictor, number)


def predictor_of(kind: str) -> Predictor:
    """Return what predicts the rows of a kind of file."""
    from shardwise.validation import _attention, _collectives, _kernels, _modules, _operators, _streaming

    if kind == "training":
        return TrainingRows()
    if kind == "inference":
        from shardwise.validation._inference import InferenceRows

        return InferenceRows()
    kernels = {
        "gemm": _kernels.product,
        "attention": _attention.attention,
        "mla": _modules.latent,
        "moe": _kernels.experts,
        "memory": _streaming.streaming,
    }
    if kind in kernels:
        return _kernels.kernel_answer(kernels[kind], kind)
    others = {"collective": _collectives.in_node, "collectives": _collectives.across}
    return others.get(kind, _operators.efficiency)


def _row(cells: Cells, kind: str, places: Places, predictor: Predictor, number: int) -> Row:
    row = Row(
        case_id=cells.text("case_id") or f"line {number}",
        metric=_metric(cells, kind),
        status="refused",
        kind=kind,
        source=cells.text("source") or cells.text("engine") or cells.text("system"),
        citation=cells.text("citation"),
        model=cells.text("model"),
        device=cells.text("device") or cells.text("system"),
        quality=cells.text("quality"),
        engine=cells.text("engine") or cells.text("framework"),
    )
    try:
        row = replace(row, measured=_measured(cells, kind))
        found = predictor(cells, places)
        row = replace(row, family=found.family or _family(cells, places), year=_year(cells, places))
    except InputError as error:
        reason = "; ".join(f"{p.field}: {p.rule}" for p in error.problems)
        return replace(row, reason=reason, refused=_said(error.problems[0].value))
    except Exception as error:  # a fault of ours with one row is said beside it and stops no other
        return replace(row, reason=f"fault in the prediction: {type(error).__name__}: {error}")
    if not math.isfinite(found.value):
        return replace(row, reason="the prediction is beyond what numbers can hold")
    low, high = found.interval or (None, None)
    said = {"predicted": found.value, "low": low, "high": high, "assumed": found.assumed, "fits": found.fits}
    return replace(row, status="predicted", **said)  # type: ignore[arg-type]


def _said(value: object) -> str:
    """Return what a problem is about in one short line, empty where a cell is blank."""
    text = "" if value is None else " ".join(str(value).split())
    return text if len(text) <= _SAID else f"{text[: _SAID - 3]}..."


def _metric(cells: Cells, kind: str) -> str:
    """Return the metric of a row; rows of tables of kernels are named by their kind and operation."""
    if kind in ("training", "inference"):
        return cells.text("metric")
    if kind == "attention":
        decoding = cells.text("query_tokens") == "1" and cells.text("prefix_tokens") not in ("", "0")
        return "attention_decode" if decoding else "attention_prefill"
    word = cells.text("op") or cells.text("collective")
    if kind == "collectives":
        return f"{'in node' if cells.text('num_nodes') == '1' else 'across nodes'} {word}"
    return f"{kind} {word}".strip() if kind in ("collective", "mla", "op_efficiency") else kind


# What a row may call the unit of its value: a figure in others would be read a thousand times off.
_UNITS = {
    *("s", "second", "seconds", "gpu_hours", "byte", "bytes", "token", "tokens", "fraction", "fits", "bool"),
    *("token/s", "tokens/s", "tokens_per_second", "tokens_per_second_per_gpu"),
    *("flop/s", "flops", "flops_per_second", "flops_per_second_per_gpu"),
}


# A peak of one data type is at most four times that of the type that FLOPs are stated against: more is a percentage.
_MOST_UTILISED = 4


def _measured(cells: Cells, kind: str) -> float:
    if cells.text(BEYOND):
        raise refuse("row", cells.text(BEYOND), "has more cells than the header: quote cells that hold a comma")
    if kind not in ("training", "inference"):
        return cells.positive("achieved_fraction" if kind == "op_efficiency" else "time_seconds")
    if (unit := cells.text("unit").lower()) and unit not in _UNITS:
        rule = "is not a unit of values: seconds, bytes, tokens, tokens/s, FLOP/s, fractions and GPU-hours are"
        raise refuse("unit", cells.text("unit"), rule)
    if cells.text("metric") in ("mfu", "hfu") and cells.number("value") > _MOST_UTILISED:
        raise refuse("value", cells.text("value"), "of mfu and hfu is a fraction, such as 0.45 for 45 %")
    if cells.text("metric") != "fits":
        return cells.positive("value")
    if cells.number("value", -1) not in (0, 1):
        raise refuse("value", cells.text("value"), "of fits is 0 (out of memory) or 1")
    return cells.number("value")


def _family(cells: Cells, places: Places) -> str:
    from shardwise.models import MoE

    model = places.model(cells.text("model"))
    return "experts" if any(isinstance(b.feed_forward, MoE) for b in model.kinds) else "dense"


def _year(cells: Cells, places: Places) -> int:
    if not cells.text("device") or cells.text("device") == "any":
        return 0
    device, _ = places.device(cells.text("device"))
    return device.year if device.knows("year") else 0


class TrainingRows:
    """Predicts rows of training files; rows of one configuration share a prediction."""

    def __init__(self) -> None:
        from shardwise.validation._training import Predicted

        self._known: dict[tuple[str, ...], Predicted | InputError] = {}

    def __call__(self, cells: Cells, places: Places) -> Answer:
        """Return the predicted value of a row, its interval and what was assumed."""
        from shardwise.validation import _training, _training_metrics

        key = (*(cells.text(name) for name in ("case_id", *_training.SETTINGS)), _training.asked(cells))
        if key not in self._known:
            try:
                self._known[key] = _training.predict(cells, places)
            except InputError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, InputError):
            raise found
        own = Cells(cells.row)
        value = (
            float(found.fits)
            if found.beside and own.text("metric") == "fits"
            else (_training_metrics.value_of(own, found.report) + found.beside)
        )
        interval = _training_metrics.interval_of(own, found.report, value, found.assumed)
        assumed = tuple(dict.fromkeys((*found.assumed, *own.assumed)))
        return Answer(value=value, interval=interval, assumed=assumed, fits=found.fits)
