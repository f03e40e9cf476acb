"""`shardwise sweep STUDY.toml --out FOLDER`: the best plans of every question of a study, kept in tables."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise._version import __version__
from shardwise.answers import _commands, _plan_infer, _plan_train
from shardwise.answers._answer import INTERRUPTED, Answer, is_terminal, print_error
from shardwise.answers._files import read_case
from shardwise.answers._flags import FROM, Command
from shardwise.answers._from import take
from shardwise.answers._inputs import CaseFile, Inputs, known_keys, read_values
from shardwise.answers._plot import plotted
from shardwise.answers._sweep_page import sweep_figure, sweep_page
from shardwise.answers._whole_steps import run_search
from shardwise.errors import InputError
from shardwise.files import CSV_BYTES, read_file
from shardwise.libraries import is_installed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.answers._page import Page
    from shardwise.search import Executor

# What a study may set of a search: everything but how its answer is shown, kept and worked out.
_NOT_ASKED = ("what", "json", "width", "config", "save", "save_best", "help", "plot", "workers", "scaling", "catalogue")
_KEYS = ("task", "top", "title", "fixed", "grid")
_MOST, _MOST_KEPT = 1_000_000, 1000
_RENEWED = 1000


def command_of(task: str) -> Command:
    """Return the command that answers one question of a study."""
    return _commands.command("plan", task)


def read_study(path: str, follow: bool = False) -> tuple[str, int, list[dict[str, Any]]]:
    """Return the task of a study, the plans that it keeps of each question, and the values of every question.

    Raises `InputError` with everything that is wrong with the file.
    """
    table, inputs = read_case(path), Inputs()
    for key in table:
        if key not in _KEYS:
            inputs.problems.add(key, None, "is not a part of a study", f"use {', '.join(_KEYS)}")
    task, top = _task_and_top(table, inputs)
    parts = {name: table.get(name, {}) for name in ("fixed", "grid")}
    for name, part in parts.items():
        if not isinstance(part, dict):
            inputs.problems.add(name, str(part), "must be a table", f"write [{name}] above its keys")
    if not (parts["fixed"] or parts["grid"]):
        inputs.problems.add("grid", None, "and fixed ask nothing", "write [grid] above lists of models and devices")
    inputs.problems.raise_if_any()
    axes = [_axis(key, values, inputs) for key, values in parts["grid"].items()]
    _check_axes(axes, inputs)
    fixed = _keys_of(parts["fixed"], inputs)
    command = command_of(task)
    for values in (fixed, *(one for axis in axes for one in axis)):
        left = {key: value for key, value in values.items() if key not in _NOT_ASKED}
        for key in values.keys() - left.keys():
            inputs.problems.add(key, None, "is no value that a study sets", "leave it out")
        known_keys({command.name: command}, left, command, inputs, CaseFile(path, follow))
        for key, value in left.items():
            if isinstance(value, float) and not math.isfinite(value):
                inputs.problems.add(key, str(value), "must be a finite number", "write the number with its unit")
    if math.prod(map(len, axes)) > _MOST:
        inputs.problems.add("grid", math.prod(map(len, axes)), f"makes more than {_MOST:,} questions", "cut the study")
    # A key is wrong once, however many values it has.
    first = {(p.field, p.rule): p for p in reversed(inputs.problems.items)}
    inputs.problems.items[:] = reversed(first.values())
    inputs.problems.raise_if_any()
    questions = [{key: v for part in (fixed, *chosen) for key, v in part.items()} for chosen in product(*axes)]
    return task, top, questions


def _task_and_top(table: Mapping[str, Any], inputs: Inputs) -> tuple[Any, Any]:
    task, top = table.get("task", "train"), table.get("top", 1)
    if task not in ("train", "infer"):
        inputs.problems.add("task", task, "is not a search", "use train or infer")
    if not isinstance(top, int) or isinstance(top, bool) or not 1 <= top <= _MOST_KEPT:
        rule = f"must be a whole number of at least 1 and at most {_MOST_KEPT:,}"
        inputs.problems.add("top", top, rule, "use 1 for the best plan alone")
    return task, top


def _keys_of(table: Mapping[str, Any], inputs: Inputs) -> dict[str, Any]:
    keys = {key.replace("-", "_"): value for key, value in table.items()}
    for key in table:
        if key.replace("-", "_") != key and key.replace("-", "_") in table:
            inputs.problems.add(key, None, "is set twice, with a dash and without", "leave one out")
    return keys


def _check_axes(axes: Sequence[Sequence[Mapping[str, Any]]], inputs: Inputs) -> None:
    """Record what two axes set, of which only the last would count, and values that an axis lists twice."""
    before: set[str] = set()
    for axis in axes:
        keys = dict.fromkeys(key for one in axis for key in one)
        for key in (key for key in keys if key in before):
            inputs.problems.add(key, None, "is set by two axes of the grid", "leave it to one of them")
        before |= keys.keys()
        seen: set[str] = set()
        for one in axis:
            if repr(one) in seen:
                key, value = (*one.items(),)[0] if one else ("grid", "{}")
                inputs.problems.add(key, str(value), "is listed twice", "leave one out")
            seen.add(repr(one))


def _axis(key: str, values: Any, inputs: Inputs) -> list[dict[str, Any]]:
    """Return what each value of an axis sets: itself, or the keys of a table where several change together."""
    if not isinstance(values, list) or not values:
        inputs.problems.add(
            key, str(values), "must list the values to try", f"write {key} = [...], or move it to fixed"
        )
        return []
    return [_keys_of(v, inputs) if isinstance(v, dict) else {key.replace("-", "_"): v} for v in values]


def rows_of(asked: tuple[str, int], values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of one question: the best plans, or one that says why there is none.

    `asked` is the task and how many plans are kept.
    """
    task, top = asked
    inputs, raw = Inputs(), {**values, "top": top, "what": task}
    inputs.raw = raw
    read_values(raw, command_of(task), inputs)
    try:
        if inputs.values.keys() & FROM.keys():
            take(inputs)
        inputs.problems.raise_if_any()
        result = _trained(inputs) if task == "train" else _plan_infer.ask(inputs)
    except InputError as error:
        return [{"rank": None, "problem": "; ".join(map(str, error.problems)), "release": __version__}]
    counts = {"plans": result.num_plans, "legal": result.counts.legal, "fitting": result.counts.fitting}
    rejected = {row.name: row.count for row in result.rejected if row.count} if not result.best else _counted(result)
    common = {**counts, "rejected": rejected, "problem": None, "release": __version__}
    if result.best:
        return [{"rank": i, **_row(result, r), **common} for i, r in enumerate(result.best, 1)]
    nearest = result.nearest
    return [{"rank": -1, **(_row(result, nearest) if nearest is not None else {}), **common}]


def _counted(result: Any) -> dict[str, int]:
    """Return how many plans each law and limit rejected, without looking for remedies."""
    if hasattr(result, "partial"):
        laws = {name: count for name, count in result.partial.rejected.items() if count}
        return {**laws, "memory": result.counts.too_large}
    return {name: count for name, _, count in result.lawless} | {
        name: int(rows.sum()) for name, rows in result.verdicts.items() if rows.any()
    }


def _trained(inputs: Inputs) -> Any:
    from shardwise.search import SerialExecutor

    result = run_search(_plan_train.question(inputs), SerialExecutor())
    if result.covered < 1:
        # An interrupted search is no answer.
        raise KeyboardInterrupt
    return result


def _row(result: Any, report: Any) -> dict[str, Any]:
    """Return the headlines of a plan with their bands, and its fields."""
    plan = {key: _flat(value) for key, value in asdict(report.plan).items()}
    names = {
        "step_seconds": "step_seconds", "tokens_per_second_per_gpu": "tokens_per_second_per_gpu", "mfu": "mfu",
        "device_bytes": "device_bytes", "chance_to_fit": "chance_to_fit", "usd": "usd",
        "ttft_seconds": "ttft_seconds", "tpot_seconds": "tpot_seconds", "request_seconds": "request_seconds",
        "output_tokens_per_second": "output_tokens_per_second", "weights_bytes_per_gpu": "weights_bytes_per_gpu",
        "usd_per_million_output_tokens": "usd_per_million_output_tokens",
    }  # fmt: skip
    values = ((key, getattr(report, name, _row)) for key, name in names.items())
    row: dict[str, Any] = {key: value for key, value in values if value is not _row}
    row["value"] = result.value(report)
    row["devices"] = report.plan.num_devices
    for name, (low, high) in report.interval.items():
        row |= {f"{name}_low": low, f"{name}_typical": report.typical[name], f"{name}_high": high}
    if hasattr(report.job, "batch"):
        row |= {"batch": report.job.batch, "engine": report.case.engine.name, "weights": report.case.format.name}
    return row | {f"plan_{key}": value for key, value in plan.items()}


def _flat(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else value


class _Rows:
    """The rows of questions, as something that travels to other processes, where the user's catalogue is named anew."""

    def __init__(self, asked: tuple[str, int], catalogue: str) -> None:
        self.asked, self.catalogue = asked, catalogue

    def __call__(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        from shardwise.user_catalogue import use_catalogue

        use_catalogue(*([self.catalogue] if self.catalogue else []))
        return rows_of(self.asked, values)


def _executor(inputs: Inputs, open_questions: int) -> Executor:
    from shardwise.search import ProcessExecutor, RayExecutor, SerialExecutor

    workers = inputs.get("workers", os.cpu_count() or 1)
    if inputs.get("engine") == "ray":
        return RayExecutor(workers, inputs.get("address", ""))
    return SerialExecutor() if min(workers, open_questions) <= 1 else ProcessExecutor(workers, renewed=_RENEWED)


def _progress(total: int) -> Callable[[int, int], None] | None:
    """Return what says on a terminal how many questions are answered, and how long the others will take."""
    if not is_terminal("stderr"):
        return None
    from shardwise.units import show_seconds

    start = time.perf_counter()

    def say(done: int, missing: int) -> None:
        left = (time.perf_counter() - start) / done * (missing - done)
        end = "\n" if done == missing else ""
        print_error(f"\r{total - missing + done:,} of {total:,} questions, {show_seconds(left)} left   {end}")

    return say


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise sweep`."""
    from shardwise.search import StudyFolder, StudyQuestion, StudyTask, run_study

    _check(inputs)
    task, top, questions = read_study(inputs.values["study"], inputs.get("follow", False))
    varied = tuple(key for key in dict.fromkeys(k for q in questions for k in q) if _varies(key, questions))
    shown = tuple(dict.fromkeys(("model", "on", *varied)))
    depends_on = (task, top, __version__, inputs.get("catalogue", ""), _own_catalogue())
    asked = [StudyQuestion.of(values, depends_on, shown) for values in questions]
    work = StudyTask(asked, _Rows((task, top), inputs.get("catalogue", "")))
    folder = StudyFolder(Path(inputs.values["out"]))
    result = run_study(work, folder, _executor(inputs, len(asked)), _progress(len(asked)))
    status = INTERRUPTED if result.left else _status([row["rank"] for row in result.rows])
    headlines = ("step_seconds", "usd_per_million_output_tokens", "request_seconds")
    headline = next((name for name in headlines if any(row.get(name) for row in result.rows)), "value")

    def tree() -> dict[str, Any]:
        return {
            "study": {
                "questions": len(asked), "answered_before": result.before, "left": result.left,
                "stale": len(result.stale), "tables": [str(path) for path in result.tables],
            },
            "rows": result.rows,
        }  # fmt: skip

    def page() -> Page:
        return sweep_page(result, asked, shown, width)

    def draw() -> Figure:
        return sweep_figure(result.rows, shown, headline)

    return plotted(inputs, Answer(status, tree, page), draw)


def _status(ranks: Sequence[int | None]) -> int:
    """Return 0 where a question has a plan, 2 where none could be asked, else 1.

    >>> _status([1, 2, None]), _status([-1, None]), _status([None, None])
    (0, 1, 2)
    """
    return 0 if any((rank or 0) > 0 for rank in ranks) else 1 if any(ranks) else 2


def _own_catalogue() -> list[tuple[str, str, str]]:
    """Return the files of the user's catalogue by what they say."""
    from shardwise.user_catalogue import KINDS, own_files

    files = [(kind, file) for kind in KINDS for file in own_files(kind)]
    return [(kind, file.name, sha256(read_file(file.path, CSV_BYTES)).hexdigest()) for kind, file in files]


def _varies(key: str, questions: Sequence[Mapping[str, Any]]) -> bool:
    return len({repr(values.get(key)) for values in questions}) > 1


def _check(inputs: Inputs) -> None:
    """Record what is missing of the command and of the machine."""
    if "study" in inputs.values and not os.path.exists(inputs.values["study"]):
        inputs.fail("study", inputs.values["study"], "is not a file", "name the TOML file of the study")
    if inputs.get("engine") == "ray" and not is_installed("ray"):
        inputs.fail("engine", "ray", "needs ray, which is not installed", "pip install 'shardwise[ray]'")
    if "address" in inputs.values and inputs.get("engine") != "ray":
        inputs.fail("address", inputs.values["address"], "is of a Ray cluster", "add --engine ray, or leave it out")
    inputs.problems.raise_if_any()
