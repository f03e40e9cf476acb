"""`shardwise compare`: two cases side by side, from two case files or from one case and two sets of flags."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardwise.answers import _infer, _train
from shardwise.answers._answer import Answer
from shardwise.answers._commands import command, every
from shardwise.answers._converters import SWITCH, fail
from shardwise.answers._described import describe
from shardwise.answers._files import read_case
from shardwise.answers._flags import infer_flags, train_flags
from shardwise.answers._from import take
from shardwise.answers._infer import infer_tree
from shardwise.answers._inputs import CaseFile, Inputs, known_keys, read_values
from shardwise.answers._page import Page
from shardwise.answers._plot import check_drawable, plotted
from shardwise.answers._run import ScannedWords, scan
from shardwise.answers._train_tree import train_tree, without_residue
from shardwise.answers._typed import split
from shardwise.errors import InputError, Problem
from shardwise.records import dataclass, replace
from shardwise.serving import InferReport
from shardwise.training import TrainReport
from shardwise.units import show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_OWN = ("first", "second", "a", "b", "plot", "json", "width", "help")


def _is_file(word: object) -> bool:
    return isinstance(word, str) and word.endswith((".toml", ".json")) and not word.endswith("config.json")


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two: its letter, its case file, the command its flags begin with, and what they say."""

    name: str
    file: str | None
    kind: str
    own: ScannedWords


def _sides(inputs: Inputs) -> list[_Side]:
    """Return the two sides as they were asked for."""
    values, flags = inputs.values, replace(command("compare"), positionals=())
    files = (values.get("first"), values.get("second")) if _is_file(values.get("first")) else (None, None)
    sides = []
    for file, name in zip(files, "ab", strict=True):
        try:
            words = split(values.get(name, ""))
        except ValueError as error:
            raise fail(name, values[name], f"is not a list of flags ({error})", "close the quotation") from None
        kind = words.pop(0) if words and words[0] in ("train", "infer") else ""
        sides.append(_Side(name, file, kind, scan(words, flags)))
    return sides


def _kind_of(side: _Side, case: dict[str, Any]) -> str:
    """Return the command of a side: as said, as its file says, or told by a flag that only `infer` has."""
    if side.kind:
        return side.kind
    if case.get("command") in ("train", "infer"):
        return str(case["command"])
    only = infer_flags().keys() - train_flags().keys()
    return "infer" if only & case.keys() else "train"


def _inputs(shared: dict[str, Any], side: _Side) -> tuple[str, Inputs]:
    inputs = Inputs(problems=side.own.problems)
    case = read_case(side.file) if side.file else {}
    typed = shared | side.own.given
    kind = _kind_of(side, case | typed)
    for key in typed:
        if key not in command(kind).flags:
            inputs.fail(key, typed[key], f"is not a flag of {kind}", f"`shardwise {kind} --help` lists them")
    place = CaseFile(side.file or "", SWITCH.read(typed.get("follow", False), "follow") is True)
    raw = known_keys(every(), case, command(kind), inputs, place)
    raw |= {key: value for key, value in typed.items() if key in command(kind).flags}
    inputs.notes.clear()
    read_values(raw, command(kind), inputs)
    take(inputs)
    return kind, inputs


def _reports(inputs: Inputs) -> tuple[EitherReport, EitherReport]:
    shared = {key: value for key, value in inputs.values.items() if key not in _OWN}
    first = inputs.get("first")
    if inputs.get("second") is None and isinstance(first, str):
        if shared.get("model", first) != first:
            raise fail("model", shared["model"], f"is given twice, first as {first}", "give one value")
        shared["model"] = first
    reports: list[tuple[str, EitherReport]] = []
    asked: list[Inputs] = []
    problems: list[Problem] = []
    for side in _sides(inputs):
        try:
            kind, own = _inputs(shared, side)
            reports.append((kind, _infer.ask(own) if kind == "infer" else _train.ask(own)))
            asked.append(own)
        except InputError as error:
            problems += [_of_side(side.name, p, shared) for p in error.problems]
    if len(reports) == 2 and reports[0][0] != reports[1][0]:
        rule = f"is {reports[1][0]}, and a is {reports[0][0]}"
        problems.append(Problem("b", reports[1][0], rule, "compare two of a kind"))
    if problems:
        raise InputError(dict.fromkeys(problems))
    return _of_one_batch(asked, reports[0][1], reports[1][1])


_SAME_BATCH = "not given: the same for both"


def _of_one_batch(asked: Sequence[Inputs], a: EitherReport, b: EitherReport) -> tuple[EitherReport, EitherReport]:
    """Return two plans of training at one global batch: what one states, or the least that both run.

    As they are where both state it, and where one does not run that of the other.
    """
    if not isinstance(a, TrainReport) or not isinstance(b, TrainReport) or a.job.global_batch == b.job.global_batch:
        return a, b
    stated = [bool({"global_batch", "accumulation"} & own.values.keys() or own.imported) for own in asked]
    if all(stated):
        return a, b
    batches = [report.job.global_batch for report, given in zip((a, b), stated, strict=True) if given]
    batch, reports = batches[0] if batches else math.lcm(a.job.global_batch, b.job.global_batch), [a, b]
    for at, own in enumerate(asked):
        if not stated[at]:
            own.values["global_batch"] = batch
            own.notes[:] = [f"global_batch {batch}: {_SAME_BATCH}"]
            try:
                reports[at] = _train.ask(own)
            except InputError:
                return a, b
    return reports[0], reports[1]


def _of_side(side: str, problem: Problem, shared: dict[str, Any]) -> Problem:
    """Return a problem under the name of its side, where the field is not of both."""
    if problem.field in shared or problem.field in ("config", "on", "model", "a", "b"):
        return problem
    return Problem(f"{side}.{problem.field}", problem.value, problem.rule, problem.remedy)


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise compare`."""
    _check_words(inputs)
    check_drawable(inputs)
    inputs.problems.raise_if_any()
    a, b = _reports(inputs)

    def tree() -> dict[str, Any]:
        return compare_tree(a, b)

    def page() -> Page:
        return compare_page(a, b, width)

    def draw() -> Figure:
        from shardwise.answers._plots_bars import compare_figure

        return compare_figure(a, b)

    return plotted(inputs, Answer(0 if a.fits and b.fits else 1, tree, page), draw)


def _check_words(inputs: Inputs) -> None:
    first, second = inputs.get("first"), inputs.get("second")
    if _is_file(first) and second is None:
        inputs.fail("second", None, "is missing", "name two case files, or a model with --a and --b")
    elif first is not None and second is not None and not (_is_file(first) and _is_file(second)):
        inputs.fail(
            "second", second, "is not a case file beside a case file", "name two files, or a model with --a and --b"
        )
    elif first is not None and second is None and not {"a", "b"} & inputs.values.keys():
        inputs.fail("b", None, "is missing", 'say what differs: --a "--tp 8" --b "--tp 4 --pp 2"')


EitherReport = TrainReport | InferReport
ComparisonRow = tuple[str, float, float, str]
_TRAIN = (
    ("memory", "memory.device_bytes", "bytes"),
    ("step", "step_seconds", "seconds"),
    ("tokens/s per device", "tokens_per_second_per_gpu", "count"),
    ("MFU", "mfu", "share"),
    ("days", "days", "count"),
    ("dollars", "usd", "count"),
)
_INFER = (
    ("memory", "memory.peak_bytes", "bytes"),
    ("first token", "ttft_seconds", "seconds"),
    ("next token", "tpot_seconds", "seconds"),
    ("request", "request_seconds", "seconds"),
    ("output tokens/s", "output_tokens_per_second", "count"),
    ("requests that fit", "max_concurrency", "count"),
    ("$ per M output tokens", "usd_per_million_output_tokens", "count"),
)

_PASS = (
    ("memory", "memory.peak_bytes", "bytes"),
    ("a pass", "ttft_seconds", "seconds"),
    ("samples/s", "samples_per_second", "count"),
    ("tokens/s", "prefill_tokens_per_second", "count"),
    ("largest batch", "max_concurrency", "count"),
    ("$ per M input tokens", "usd_per_million_input_tokens", "count"),
)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _share(value: float) -> str:
    return f"{value:.1%}"


_SHOW: dict[str, Callable[[float], str]] = {
    "bytes": show_bytes,
    "seconds": show_seconds,
    "count": _number,
    "share": _share,
}


def tree_of(report: EitherReport) -> dict[str, Any]:
    """Return a report of either kind as plain values."""
    return train_tree(report) if isinstance(report, TrainReport) else infer_tree(report)


def differences(a: EitherReport, b: EitherReport) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two cases: fields of model, cluster, plan and job with both values."""
    left, right = _case_of(a), _case_of(b)
    return {key: (left[key], right[key]) for key in left if key in right and left[key] != right[key]}


def _case_of(report: EitherReport) -> dict[str, Any]:
    cluster = report.case.cluster
    runs = report.case.stack.name if isinstance(report, TrainReport) else report.case.engine.name
    where = {"model": report.case.model.name, "device": cluster.device.name, "num_devices": cluster.num_devices}
    settings = asdict(report.case.stack.settings) if isinstance(report, TrainReport) else {}
    return {**where, **asdict(report.plan), **asdict(report.job), **settings, "stack": runs}


def compare_tree(a: EitherReport, b: EitherReport) -> dict[str, Any]:
    """Return both reports, what differs and B over A for every headline."""
    left, right = tree_of(a), tree_of(b)
    rows = _headlines(a, left, right)
    return {
        "fits": bool(a.fits and b.fits),
        "ratio": {name: y / x if x else None for name, x, y, _ in rows},
        "differences": {key: {"a": x, "b": y} for key, (x, y) in differences(a, b).items()},
        "a": left,
        "b": right,
    }


def _headlines(report: EitherReport, left: Mapping[str, Any], right: Mapping[str, Any]) -> list[ComparisonRow]:
    names = _TRAIN if isinstance(report, TrainReport) else _INFER if report.job.output_tokens else _PASS
    pairs = ((label, _at(left, path), _at(right, path), kind) for label, path, kind in names)
    return [(label, x, y, kind) for label, x, y, kind in pairs if x is not None and y is not None]


def _at(tree: Mapping[str, Any], path: str) -> Any:
    value: Any = tree
    for key in path.split("."):
        value = value[key]
    return value


def compare_page(a: EitherReport, b: EitherReport, width: int = 80) -> Page:
    """Return two reports as a page, the verdict first."""
    page = Page(width)
    left, right = tree_of(a), tree_of(b)
    page.label("COMPARE", _verdict(a, b), "bold", "bold")
    for word, report in (("A", a), ("B", b)):
        page.label(f"{word:>9}", _title(report), "bold cyan")
    for note in dict.fromkeys(note for one in (a, b) for note in one.assumptions if note.endswith(_SAME_BATCH)):
        page.note(note, "dim")
    page.blank()
    table = [["", "A", "B", "B over A"]]
    table += [["fits", _yes(a), _yes(b), ""]]
    table += [compared(row, 0.0) for row in _headlines(a, left, right)]
    page.table(table, right=(1, 2, 3), header=True)
    for title, rows, whole in _details(left, right):
        page.blank()
        page.add((title, "bold"))
        page.table([compared(row, whole) for row in rows], right=(1, 2, 3))
    changed = differences(a, b)
    if changed:
        page.blank()
        page.add(("DIFFERENT", "bold"))
        runs = {"stack": "stack" if isinstance(a, TrainReport) else "engine"}
        unlike = [[runs.get(key, key), _worded(x), _worded(y)] for key, (x, y) in changed.items()]
        page.table([["", "A", "B"], *unlike], right=(1, 2))
    return page


def _worded(value: Any) -> str:
    """Return a value of a case as it is read: large counts with their prefix, several side by side, nothing as a dash.

    >>> _worded(1e12), _worded(0.0), _worded(("mlp", "norm")), _worded(""), _worded(8), _worded(0.9)
    ('1.00 T', '0', 'mlp, norm', '-', '8', '0.9')
    """
    if isinstance(value, float):
        return show_count(value) if value >= 1e6 else f"{value:,.10g}"
    return (", ".join(map(_worded, value)) if isinstance(value, tuple) else str(value)) or "-"


def _yes(report: EitherReport) -> str:
    return "yes" if report.fits else "no"


def _title(report: EitherReport) -> str:
    cluster = report.case.cluster
    return f"{report.case.model.name} on {cluster.num_devices} x {cluster.device.name}: {describe(report.plan)}"


def _verdict(a: EitherReport, b: EitherReport) -> str:
    fits = {(True, True): "both fit", (True, False): "only A fits", (False, True): "only B fits"}
    verdict = fits.get((bool(a.fits), bool(b.fits)), "neither fits")
    rates = [_rate(r) for r in (a, b)]
    if not min(rates) or abs(rates[0] / rates[1] - 1) < 5e-4:
        return f"{verdict}; equally fast"
    word = "B" if rates[1] > rates[0] else "A"
    return f"{verdict}; {word} is {max(rates) / min(rates) - 1:.1%} faster per device"


def _rate(report: EitherReport) -> float:
    if isinstance(report, TrainReport):
        return report.tokens_per_second_per_gpu
    one_pass = not report.job.output_tokens
    tokens = report.prefill_tokens_per_second if one_pass else report.output_tokens_per_second
    return tokens / report.plan.num_devices


def compared(row: ComparisonRow, whole: float) -> list[str]:
    """Return the words of a row: both amounts, and B over A; what rounding leaves of the whole is nothing.

    >>> compared(("bubble", 2e-16, 0.5, "seconds"), 1.0)
    ['bubble', '-', '500.00 ms', 'new']
    """
    label, a, b, kind = row
    x, y = without_residue(a, whole), without_residue(b, whole)
    show = _SHOW[kind]
    change = (f"{y / x - 1:+.1%}" if x else "new") if without_residue(y - x, max(whole, abs(x))) else ""
    change = "0.0%" if change in ("-0.0%", "+0.0%") else change
    return [label, show(x) if x else "-", show(y) if y else "-", change]


def _details(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[tuple[str, Sequence[ComparisonRow], float]]:
    """Return tables of memory and time by what they are made of, for training, and the whole that each is of."""
    if "step" not in left:
        return []
    memory = [(k, v, right["memory"]["at_peak"][k], "bytes") for k, v in left["memory"]["at_peak"].items()]
    time = [
        (k.removesuffix("_seconds"), left["step"][k], right["step"][k], "seconds")
        for k in ("compute_seconds", "bubble_seconds", "optimizer_seconds", "overhead_seconds")
    ]
    for word, key in (("exposed", "exposed_seconds"), ("overlapped", "hidden_seconds")):
        x, y = (side["step"][key] for side in (left, right))
        time += [(f"{word} {axis}", x.get(axis, 0.0), y.get(axis, 0.0), "seconds") for axis in {**x, **y}]
    sections: list[tuple[str, Sequence[ComparisonRow], float]] = []
    for title, rows, path in (("MEMORY", memory, "memory.device_bytes"), ("TIME", time, "step_seconds")):
        whole = max(_at(left, path), _at(right, path))
        shown = [row for row in rows if without_residue(row[1], whole) or without_residue(row[2], whole)]
        sections.append((title, shown, whole))
    return sections
