"""`shardwise validate`: predicted against measured, row by row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shardwise.answers._answer import Answer
from shardwise.answers._files import write_text
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import Page
from shardwise.answers._plot import check_drawable, plotted
from shardwise.errors import InputError
from shardwise.measured import Errors, Validation, assumptions, examples, fits_of, reasons, summary, words
from shardwise.plans import DEGREES
from shardwise.units import percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.formats import Imported
    from shardwise.models import Model


def ask(inputs: Inputs) -> Validation:
    """Return the validation of the files that were named."""
    from shardwise.measured import BY, validate

    by = inputs.get("by", ())
    for name in by:
        if name not in BY:
            inputs.fail("by", name, "is not a field of rows", "use some of " + ", ".join(BY))
    if not inputs.get("files", ()):
        inputs.fail("files", None, "names no file of measurements", "give a CSV file; docs/own-runs.md has its columns")
    given, models = _given(inputs) if "from" in inputs.values else ({}, {})
    inputs.problems.raise_if_any()
    return validate(inputs.get("files", ()), given=given, models=models)


def _given(inputs: Inputs) -> tuple[dict[str, str], dict[str, Model]]:
    """Return what the launch of a training or of a server says, by the columns of rows that may leave it blank.

    Beside it stands the model of a file that states its sizes, under the name of the file.
    """
    from shardwise.answers._from import read, variables
    from shardwise.formats import import_server, starts_server
    from shardwise.measured import cells_of_engine
    from shardwise.models import find_model, model_names

    models: dict[str, Model] = {}
    try:
        if starts_server(inputs.values["from"]):
            server = import_server(inputs.values["from"], variables(inputs))
            settings = {_SERVED[key]: value for key, value in server.values.items() if key in _SERVED}
            settings |= cells_of_engine(server.values["engine"], server.release) if "engine" in server.values else {}
            settings |= {
                "num_gpus": server.num_devices,
                "model": find_model(settings.get("model", "")) or settings.get("model", ""),
            }
        else:
            case = read(inputs)
            settings = _of_training(case)
            if case.model is not None and case.model.name not in model_names():
                settings["model"] = case.source
                models[case.source] = case.model
    except InputError as error:
        inputs.problems.items += error.problems
        return {}, {}
    return {name: str(value) for name, value in settings.items() if value not in ("", 0, 0.0)}, models


# Fields that the launch of a server sets -> the columns of rows.
_SERVED = {
    "model": "model", "tp": "tp", "pp": "pp", "dp": "dp", "ep": "ep", "kv_cache": "kv_dtype",
    "memory_fraction": "memory_utilization", "max_context": "max_model_len", "weights": "weight_dtype",
    "max_batched_tokens": "max_num_batched_tokens",
}  # fmt: skip


def _of_training(case: Imported) -> dict[str, object]:
    """Return the columns of a training: those of its plan and job, and the framework and the recipe by name."""
    names = {ours: theirs for kind in ("sharding", "optimizer") for theirs, ours in reversed(words(kind).items())}
    plan, job = case.plan, case.job
    settings: dict[str, object] = {name: getattr(plan, name) for name in DEGREES if name != "tp2"}
    settings |= {"sp": int(plan.sequence_parallel), "micro_batch": plan.micro_batch, "recompute": plan.recompute}
    settings |= {"sharding": names.get(plan.sharding, ""), "optimizer": names.get(job.optimizer, "")}
    host = {frozenset(ours.split(",")): theirs for theirs, ours in reversed(words("offload").items())}
    adapter = {"lora_targets": job.targets, "trains": job.trains} if job.adapter else {}
    settings["notes"] = "; ".join(f"{name}={','.join(parts)}" for name, parts in adapter.items() if parts)
    settings |= {"offload": host.get(frozenset(plan.offload), ""), "param_dtype": job.base}
    settings |= {
        "seq_len": job.seq_len,
        "global_batch": job.global_batch,
        "finetune": job.adapter,
        "lora_rank": job.rank,
    }
    return settings | {
        "model": case.model.name if case.model else "",
        "stack": case.stack.name,
        "precision": job.precision or case.stack.precision,
        "num_gpus": case.num_devices,
    }


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise validate`."""
    check_drawable(inputs)
    validation = ask(inputs)
    by = tuple(inputs.get("by", ()))
    _write(inputs, validation)

    def tree() -> dict[str, Any]:
        return validate_tree(validation, by or ("source", "metric", "device"))

    def page() -> Page:
        return validate_page(validation, by, width)

    def draw() -> Figure:
        from shardwise.answers._plots_validate import validate_figure

        return validate_figure(validation)

    status = 0 if validation.predicted or not validation.rows else 1
    return plotted(inputs, Answer(status, tree, page), draw)


def _write(inputs: Inputs, validation: Validation) -> None:
    """Write the rows and the report where files are named for them."""
    if "rows" in inputs.values:
        from shardwise.measured import rows_csv

        write_text(inputs.values["rows"], rows_csv(validation.rows))
    if "html" in inputs.values:
        from shardwise.answers._plots_validate import validate_html

        write_text(inputs.values["html"], validate_html(validation, inputs.get("dark", False)))


TABLES = ("metric", "source", "device", "family", "quality", "year")


def errors_record(errors: Errors, by: tuple[str, ...]) -> dict[str, Any]:
    """Return one group of errors as a record."""
    return {
        **dict(zip(by, errors.group, strict=True)),
        "count": errors.count,
        "bias": errors.bias,
        "median_abs_error": errors.median_abs_error,
        "p90_abs_error": errors.p90_abs_error,
        "mean_abs_error": errors.mean_abs_error,
        "largest_abs_error": errors.largest_abs_error,
        "inside": errors.inside,
    }


def validate_tree(validation: Validation, by: tuple[str, ...] = ("source", "metric", "device")) -> dict[str, Any]:
    """Return the record that `validate --json` prints; errors are predicted over measured less one."""
    fits, first = fits_of(validation.rows), examples(validation.rows)

    def table(fields: tuple[str, ...]) -> list[dict[str, Any]]:
        return [errors_record(one, fields) for one in summary(validation.rows, fields)]

    return {
        "files": list(validation.files),
        "coverage": validation.coverage,
        "rows": {
            "total": len(validation.rows),
            "predicted": len(validation.predicted),
            "refused": len(validation.rows) - len(validation.predicted),
        },
        "summary": table(by),
        "tables": {name: table(tuple(dict.fromkeys(("metric", name)))) for name in TABLES},
        "refused": [{"reason": r, "count": count, "first": first[r]} for r, count in reasons(validation.rows)],
        "unread": [{"file": file, "column": column, "meant": meant} for file, column, meant in validation.unread],
        "fits": {
            "ran": fits.ran,
            "ran_called_unfit": fits.ran_called_unfit,
            "failed": fits.failed,
            "failed_called_fit": fits.failed_called_fit,
        },
    }


_HEAD = ["rows", "bias", "median", "p90", "mean", "in band"]
_REASONS = 12
_BLANK = ("", "0")  # what a source does not state, and a year that is not known


def _cells(one: Errors) -> list[str]:
    inside = "-" if one.inside is None else f"{one.inside:.0%}"
    absolute = (one.median_abs_error, one.p90_abs_error, one.mean_abs_error)
    return [str(one.count), percent(one.bias, True), *(percent(value) for value in absolute), inside]


def _table(page: Page, word: str, errors: Iterable[Errors], fields: tuple[str, ...]) -> None:
    rows = [[*(name if name not in _BLANK else "-" for name in one.group), *_cells(one)] for one in errors]
    if any(row[0] != "-" for row in rows):
        page.blank()
        page.add((word, "bold"))
        width = len(fields)
        page.table([[*fields, *_HEAD], *rows], right=range(width, width + len(_HEAD)), header=True, indent=0)


def validate_page(validation: Validation, by: tuple[str, ...], width: int = 80) -> Page:
    """Return the page of `shardwise validate`."""
    page = Page(width)
    total, predicted = len(validation.rows), len(validation.predicted)
    others = "" if predicted == total else ", the others refused below"
    page.label("ROWS", f"{predicted:,} of {total:,} predicted ({validation.coverage:.1%}){others}")
    page.note("errors are predicted over measured, less one; bias is their median, in band the share inside 10-90 %")
    _unread(page, validation)
    _table(page, "BY METRIC", summary(validation.rows, ("metric",)), ("metric",))
    if by:
        _table(page, "BY " + ", ".join(by).upper(), summary(validation.rows, by), by)
    else:
        _table(page, "BY SOURCE", summary(validation.rows, ("source", "metric")), ("source", "metric"))
        _table(page, "BY DEVICE", summary(validation.rows, ("device", "metric")), ("device", "metric"))
        for name, word in (("family", "FAMILY"), ("quality", "QUALITY"), ("year", "YEAR OF THE DEVICE")):
            _table(page, f"BY {word}", summary(validation.rows, (name, "metric")), (name, "metric"))
    fits = fits_of(validation.rows)
    if fits.ran or fits.failed:
        page.blank()
        text = f"{fits.ran_called_unfit} of {fits.ran} configurations that ran are said not to fit"
        page.label("FITS", f"{text} ({fits.false_alarms:.1%})")
        if fits.failed:
            page.note(
                f"{fits.failed_called_fit} of {fits.failed} that ran out of memory are said to fit ({fits.misses:.1%})"
            )
    _assumed(page, validation)
    _refused(page, validation)
    return page


def _unread(page: Page, validation: Validation) -> None:
    """Append the columns that were passed over: a setting that is misspelt would else be taken for blank."""
    if validation.unread:
        page.blank()
        page.add(("NOT READ", "bold"))
        meant = ((path, name, f"; {near} may be meant" if near else "") for path, name, near in validation.unread)
        page.items(f"column {name} of {path}: not in the schema{hint}" for path, name, hint in meant)


def _assumed(page: Page, validation: Validation) -> None:
    """Append how many rows leave which field to a rule."""
    fields = assumptions(validation.predicted)
    if fields:
        page.blank()
        fields_text = ", ".join(f"{name} {count:,}" for name, count in fields[:_REASONS])
        more = " and others" if len(fields) > _REASONS else ""
        page.label(
            "ASSUMED", f"rows that leave a field to its rule: {fields_text}{more}; --rows FILE says what was taken"
        )


def _refused(page: Page, validation: Validation) -> None:
    why, first = reasons(validation.rows), examples(validation.rows)
    if not why:
        return
    page.blank()
    page.add(("REFUSED", "bold"))
    counted = ((f"{count:,} {'row' if count == 1 else 'rows'}", count, reason) for reason, count in why[:_REASONS])
    page.items(f"{rows}: {reason} ({'' if count == 1 else 'first '}{first[reason]})" for rows, count, reason in counted)
    if len(why) > _REASONS:
        left = sum(count for _, count in why[_REASONS:])
        page.note(f"and {left:,} rows for {len(why) - _REASONS} other reasons: --json", "dim")
