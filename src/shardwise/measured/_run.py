"""Files of measurements, and their rows with predictions: nothing is dropped, and no row stops the others."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeAlias

from shardwise.errors import InputError, Problem, bounded, near
from shardwise.files import read_csv_text
from shardwise.measured._comparison import Comparison, Prediction
from shardwise.measured._context import Context
from shardwise.measured._inference import InferenceRows
from shardwise.measured._record import Record, refuse
from shardwise.measured._training import TrainingRows
from shardwise.models import Model
from shardwise.records import dataclass, replace

_LONGEST_CELL = 40

Predictor: TypeAlias = Callable[[Record, Context], Prediction]
# Columns that any file may have beside those that predictions read.
USUAL = "case_id source citation quality notes spread"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileKind:
    """A kind of file: the columns that tell it, further ones that are read or allowed, and how its rows are predicted.

    `predictor` makes what predicts the rows of one file, `metric` names what a row measured, `measured` is its figure.
    """

    name: str
    columns: frozenset[str]
    further: frozenset[str]
    predictor: Callable[[], Predictor]
    metric: Callable[[Record], str]
    measured: Callable[[Record], float]


MOST_ROWS, MOST_COLUMNS = 100_000, 1000
# Where a row keeps the cells beyond the last column of the header.
BEYOND = "beyond the header"


@dataclass(frozen=True, slots=True)
class MeasurementFile:
    """A file: its path, the kind of measurements it holds, its rows as text, and columns that its kind does not have.

    An unread column stands with the one that may have been meant, empty where none is like it.
    """

    path: str
    kind: FileKind
    rows: tuple[dict[str, str], ...]
    unread: tuple[tuple[str, str], ...] = ()


def read_table(path: str, kinds: Sequence[FileKind], given: Mapping[str, str] | None = None) -> MeasurementFile:
    """Return the rows of a CSV file and their kind; names of columns may have capitals and spaces around them.

    What is `given` by its column stands where a row has a blank cell, or the file no such column. Raises `InputError`
    where the file cannot be read, is of no known kind or has no rows.
    """
    try:
        reader = csv.DictReader(io.StringIO(read_csv_text(path), newline=""), restkey=BEYOND, restval="")
        names = [name.strip().lower() for name in reader.fieldnames or ()]
        reader.fieldnames = names
        _check_header(names, path)
        kind = kind_of({*names, *(given or {})}, kinds, path)
        usual = {name: cell for name, cell in (given or {}).items() if name in kind.columns | kind.further}
        with bounded("file", path):
            rows = tuple(_filled(_texts(row), usual) for row in islice(reader, MOST_ROWS + 1))
    except csv.Error as error:
        raise InputError([Problem("file", path, f"cannot be read ({error})", "give a CSV file")]) from None
    if len(rows) > MOST_ROWS:
        raise InputError([Problem("file", path, f"has more than {MOST_ROWS:,} rows", "cut it into several files")])
    if not rows:
        rule = f"has the columns of {kind.name} files and no row below them"
        raise InputError([Problem("file", path, rule, "add a row for each measurement")])
    return MeasurementFile(path, kind, rows, _unread(names, kind))


def _texts(row: dict[str, str | list[str]]) -> dict[str, str]:
    return {name: cell if isinstance(cell, str) else "".join(cell) for name, cell in row.items()}


def _filled(row: dict[str, str], usual: Mapping[str, str]) -> dict[str, str]:
    return {**row, **{name: cell for name, cell in usual.items() if not row.get(name, "").strip()}}


def _check_header(names: list[str], path: str) -> None:
    """Raise `InputError` for a header whose cells are not separated by commas, or that names a column twice."""
    separator = next((mark for mark in ";\t|" if len(names) == 1 and mark in names[0]), "")
    if separator:
        raise InputError([Problem("file", path, f"separates its cells by {separator!r}", "separate them by commas")])
    if len(names) > MOST_COLUMNS:
        rule = f"has {len(names):,} columns, at most {MOST_COLUMNS:,} are read"
        raise InputError([Problem("file", path, rule, "leave out what is not read")])
    twice = sorted(name for name, times in Counter(names).items() if name and times > 1)
    if twice:
        rule = f"has the column {twice[0]} twice"
        raise InputError([Problem("file", path, rule, "keep the one that is meant")])


def _unread(names: Iterable[str], kind: FileKind) -> tuple[tuple[str, str], ...]:
    """Return the columns that a kind does not have, each with the nearest that it has."""
    known = kind.columns | kind.further
    odd = [name for name in names if name and name not in known]
    return tuple((name, next(iter(near(name, sorted(known))), "")) for name in odd)


def kind_of(columns: set[str], kinds: Sequence[FileKind], path: str = "") -> FileKind:
    """Return the kind of a file by its columns; raises `InputError` naming the columns that the nearest kinds want."""
    for kind in kinds:
        if kind.columns <= columns:
            return kind
    shares = {kind.name: len(kind.columns & columns) / len(kind.columns) for kind in kinds}
    most = max(shares.values())
    near = [f"{k.name} files also have {_listed(k.columns - columns)}" for k in kinds if shares[k.name] == most]
    what_it_has = f"its columns are {_listed(columns)}" if columns else "it is empty"
    rule = f"is not a file of measurements: {'; '.join(near[:2]) if most else what_it_has}"
    raise InputError([Problem("file", path, rule, "see docs/own-runs.md for the columns")])


def _listed(columns: Iterable[str]) -> str:
    """Return some columns in words, the first eight of them, each as far as it may be read."""
    names = [ascii(name)[1:-1][:40] for name in sorted(columns)]
    return ", ".join(names[:8]) + (" and more" if len(names) > 8 else "")


@dataclass(frozen=True, slots=True)
class Validation:
    """Every row of some files with its prediction or the reason why it has none.

    `unread` has columns that no kind of file has: the file, the column, and the one that may have been meant.
    """

    rows: tuple[Comparison, ...]
    files: tuple[str, ...]
    unread: tuple[tuple[str, str, str], ...] = ()

    @property
    def predicted(self) -> tuple[Comparison, ...]:
        """The rows that have a prediction."""
        return tuple(row for row in self.rows if row.status == "predicted")

    @property
    def coverage(self) -> float:
        """Share of the rows that have a prediction; 1 where there are none."""
        return len(self.predicted) / len(self.rows) if self.rows else 1.0


def validate(
    files: Iterable[str],
    kinds: Sequence[FileKind] = (),
    context: type[Context] = Context,
    given: Mapping[str, str] | None = None,
    models: Mapping[str, Model] | None = None,
) -> Validation:
    """Return every row of some CSV files with its prediction; the kind of each file is told by its columns.

    Models and devices are looked up beside each file (models*.json, devices*.csv), then in the catalogue. Raises
    `InputError` for a file that cannot be read; a row that cannot be predicted is refused with the reason. Files are
    of the `kinds` given, runs of training and serving where none are, and read with what a `context` knows. What is
    `given` by its column stands where rows are blank, and may name one of some `models` that no file has.
    """
    paths = tuple(files)
    tables = [read_table(path, kinds or KINDS, given) for path in paths]
    rows: list[Comparison] = []
    for table in tables:
        known = context(Path(table.path).parent)
        known.given |= models or {}
        rows += compared(table, known)
    return Validation(tuple(rows), paths, tuple((table.path, *column) for table in tables for column in table.unread))


def compared(table: MeasurementFile, context: Context, first_line: int = 2) -> Iterator[Comparison]:
    """Yield the rows of one file with their predictions; rows without a name go by their line, from a first one on."""
    predictor = table.kind.predictor()
    for number, raw in enumerate(table.rows, first_line):
        yield _row(Record(raw), table.kind, context, predictor, number)


def _row(record: Record, kind: FileKind, context: Context, predictor: Predictor, number: int) -> Comparison:
    row = Comparison(
        case_id=record.text("case_id") or f"line {number}",
        metric=kind.metric(record),
        status="refused",
        kind=kind.name,
        source=record.text("source") or record.text("engine") or record.text("system"),
        citation=record.text("citation"),
        model=record.text("model"),
        device=record.text("device") or record.text("system"),
        quality=record.text("quality"),
        engine=record.text("engine") or record.text("framework"),
        num_devices=_count(record),
    )
    try:
        row = replace(row, measured=_measured(record, kind))
        prediction = predictor(record, context)
        row = replace(row, family=prediction.family or _family(record, context), year=_year(record, context))
    except InputError as error:
        reason = "; ".join(f"{p.field}: {p.rule}" for p in error.problems)
        return replace(row, reason=reason, refused=_one_line(error.problems[0].value))
    except Exception as error:  # a fault of ours with one row is said beside it and stops no other
        return replace(row, reason=f"fault in the prediction: {type(error).__name__}: {error}")
    if not math.isfinite(prediction.value):
        return replace(row, reason="the prediction is beyond what numbers can hold")
    low, high = prediction.interval or (None, None)
    values = {
        "predicted": prediction.value,
        "low": low,
        "high": high,
        "assumed": prediction.assumed,
        "fits": prediction.fits,
    }
    row = replace(
        row,
        headline=prediction.headline,
        parts=prediction.parts,
        cache_share=prediction.cache_share,
        case=prediction.case,
    )
    return replace(row, status="predicted", conditions=prediction.conditions, **values)  # type: ignore[arg-type]


_MOST_DIGITS = 10  # no cluster has more devices, and text of thousands is no number for Python


def _count(record: Record) -> int:
    text = record.text("num_gpus")
    return max(int(text), 1) if text.isdecimal() and len(text) < _MOST_DIGITS else 1


def _one_line(value: object) -> str:
    """Return what a problem is about in one short line, empty where a cell is blank."""
    text = "" if value is None else " ".join(str(value).split())
    return text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 3]}..."


# What a row may call the unit of its value: a figure in others would be read a thousand times off.
_UNITS = {
    *("s", "second", "seconds", "gpu_hours", "byte", "bytes", "token", "tokens", "fraction", "fits", "bool"),
    *("token/s", "tokens/s", "tokens_per_second", "tokens_per_second_per_gpu"),
    *("flop/s", "flops", "flops_per_second", "flops_per_second_per_gpu"),
    *("1/s", "request/s", "requests/s"),
}


# A peak of one data type is at most four times that of the type that FLOPs are stated against: more is a percentage.
_MOST_UTILISED = 4


def _measured(record: Record, kind: FileKind) -> float:
    if record.text(BEYOND):
        raise refuse("row", record.text(BEYOND), "has more cells than the header: quote cells that hold a comma")
    return kind.measured(record)


def stated_value(record: Record) -> float:
    """Return the value that a row of a run states, in the unit of its metric."""
    if (unit := record.text("unit").lower()) and unit not in _UNITS:
        rule = "is not a unit of values: seconds, bytes, tokens, tokens/s, FLOP/s, fractions and GPU-hours are"
        raise refuse("unit", record.text("unit"), rule)
    if record.text("metric") in ("mfu", "hfu") and record.number("value") > _MOST_UTILISED:
        raise refuse("value", record.text("value"), "of mfu and hfu is a fraction, such as 0.45 for 45 %")
    if record.text("metric") != "fits":
        return record.positive("value")
    if record.number("value", -1) not in (0, 1):
        raise refuse("value", record.text("value"), "of fits is 0 (out of memory) or 1")
    return record.number("value")


def stated_metric(record: Record) -> str:
    """Return the metric that a row of a run states."""
    return record.text("metric")


def _family(record: Record, context: Context) -> str:
    model = context.model(record.text("model"))
    return "experts" if model.has_experts else "dense"


def _year(record: Record, context: Context) -> int:
    if not record.text("device") or record.text("device") == "any":
        return 0
    device, _ = context.device(record.text("device"))
    return device.year if device.knows("year") else 0


TRAINING = FileKind(
    name="training",
    columns=frozenset(("metric", "value", "model", "device", "seq_len")),
    further=frozenset(
        f"{USUAL} unit num_gpus gpus_per_node inter_node micro_batch global_batch tp sp cp cp_kind pp vpp dp ep etp "
        "sharding recompute recompute_detail compute_dtype param_dtype grad_dtype attention_kernel optimizer "
        "master_weights finetune lora_rank offload framework stack precision flops_convention memory_kind "
        "rank_scope".split()
    ),
    predictor=TrainingRows,
    metric=stated_metric,
    measured=stated_value,
)
INFERENCE = FileKind(
    name="inference",
    columns=frozenset(("metric", "value", "model", "device", "serving_mode")),
    further=frozenset(
        f"{USUAL} engine engine_version unit num_gpus tp pp ep dp attention_dp weight_dtype activation_dtype kv_dtype "
        "batch concurrency request_rate input_tokens output_tokens prefix_tokens memory_utilization max_model_len "
        "max_num_batched_tokens num_prefill_workers num_decode_workers".split()
    ),
    predictor=InferenceRows,
    metric=stated_metric,
    measured=stated_value,
)
KINDS = (INFERENCE, TRAINING)
"""Kinds of files of runs; the first whose columns are all there counts."""
