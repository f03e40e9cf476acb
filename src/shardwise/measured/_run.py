"""Files of measurements to rows with predictions: nothing is dropped, and no row stops the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shardwise.errors import InputError
from shardwise.measured._comparison import Comparison
from shardwise.measured._context import Context
from shardwise.measured._files import BEYOND, USUAL, FileKind, Predictor, Table, read_table
from shardwise.measured._inference import InferenceRows
from shardwise.measured._record import Record, refuse
from shardwise.measured._training import TrainingRows
from shardwise.records import dataclass

_SAID = 40


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
) -> Validation:
    """Return every row of some CSV files with its prediction; the kind of each file is told by its columns.

    Models and devices are looked up beside each file (models*.json, devices*.csv), then in the catalogue. Raises
    `InputError` for a file that cannot be read; a row that cannot be predicted is refused with the reason. Files are
    of the `kinds` given, runs of training and serving where none are, and read with what a `context` knows. What is
    `given` by its column stands where rows are blank.
    """
    paths = tuple(files)
    tables = [read_table(path, kinds or KINDS, given) for path in paths]
    rows = tuple(row for table in tables for row in compared(table, context(Path(table.path).parent)))
    return Validation(rows, paths, tuple((table.path, *column) for table in tables for column in table.unread))


def compared(table: Table, context: Context) -> Iterator[Comparison]:
    """Yield the rows of one file with their predictions."""
    predictor = table.kind.predictor()
    for number, raw in enumerate(table.rows, 2):
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
        found = predictor(record, context)
        row = replace(row, family=found.family or _family(record, context), year=_year(record, context))
    except InputError as error:
        reason = "; ".join(f"{p.field}: {p.rule}" for p in error.problems)
        return replace(row, reason=reason, refused=_said(error.problems[0].value))
    except Exception as error:  # a fault of ours with one row is said beside it and stops no other
        return replace(row, reason=f"fault in the prediction: {type(error).__name__}: {error}")
    if not math.isfinite(found.value):
        return replace(row, reason="the prediction is beyond what numbers can hold")
    low, high = found.interval or (None, None)
    said = {"predicted": found.value, "low": low, "high": high, "assumed": found.assumed, "fits": found.fits}
    row = replace(row, headline=found.headline)
    return replace(row, status="predicted", conditions=found.conditions, **said)  # type: ignore[arg-type]


_MOST_DIGITS = 10  # no cluster has more devices, and text of thousands is no number for Python


def _count(record: Record) -> int:
    text = record.text("num_gpus")
    return max(int(text), 1) if text.isdecimal() and len(text) < _MOST_DIGITS else 1


def _said(value: object) -> str:
    """Return what a problem is about in one short line, empty where a cell is blank."""
    text = "" if value is None else " ".join(str(value).split())
    return text if len(text) <= _SAID else f"{text[: _SAID - 3]}..."


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
