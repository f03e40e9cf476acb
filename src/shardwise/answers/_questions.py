"""One question asked again with other values of its fields, and the headlines of its answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

from shardwise.answers import _commands
from shardwise.answers._converters import fail
from shardwise.answers._energy import energy
from shardwise.answers._files import command_words, write_text
from shardwise.answers._flags import MANY
from shardwise.answers._from import take
from shardwise.answers._inputs import Inputs, read_values
from shardwise.answers._limits import broken_limits, limit_values, show_limit
from shardwise.answers._page import Page
from shardwise.answers._replica import NOTES, SPLITS, splits_are_said
from shardwise.answers._value_lists import on_count
from shardwise.errors import InputError, Problem, near
from shardwise.plans.fields import meant
from shardwise.records import dataclass
from shardwise.units import SECONDS_A_DAY, show_bytes, show_seconds, significant

_DEVICES = "devices"


@dataclass(frozen=True, slots=True)
class Headline:
    """A column of the answers: its key as in --json, its head, how it is shown, and where a report has it."""

    key: str
    head: str
    show: Callable[[Any], str]
    of: Callable[[Any], Any]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _of(name: str) -> Callable[[Any], Any]:
    return lambda report: getattr(report, name)


def _latency(metric: str, quantile: str) -> Callable[[Any], Any]:
    return lambda report: report.latencies[metric][quantile] if report.requests else None


_FITS = Headline("fits", "fits", _yes, _of("fits"))


def _chance(value: float) -> str:
    return ">99%" if value > 0.99 else "<1%" if value < 0.01 else f"{value:.0%}"


_CHANCE = Headline("chance_to_fit", "chance", _chance, _of("chance_to_fit"))


def _usd_per_million(report: Any) -> float | None:
    """Return the dollars of a million trained tokens; None without a price, or with a budget, whose cost is said."""
    price = report.case.cluster.usd_per_device_hour
    if price is None or report.job.run_tokens:
        return None
    hours = report.whole_step_seconds / report.goodput / 3600 * (report.plan.num_devices + report.generation.devices)
    return float(price * hours / report.job.tokens_per_step * 1e6)


_MILLION = Headline("usd_per_million_output_tokens", "$/M out", _number, _of("usd_per_million_output_tokens"))


HEADLINES: dict[str, tuple[Headline, ...]] = {
    "train": (
        _FITS,
        _CHANCE,
        Headline("device_bytes", "memory", show_bytes, _of("device_bytes")),
        Headline("step_seconds", "step", show_seconds, _of("step_seconds")),
        Headline("tokens_per_second_per_gpu", "tokens/s/dev", _number, _of("tokens_per_second_per_gpu")),
        Headline("mfu", "MFU", _share, _of("mfu")),
        Headline("days", "days", _number, lambda r: r.training_seconds / SECONDS_A_DAY if r.job.run_tokens else None),
        Headline("usd", "$", _number, lambda r: r.usd if r.job.run_tokens else None),
        Headline("usd_per_million_tokens", "$/M", _number, _usd_per_million),
    ),
    "infer": (
        _FITS,
        _CHANCE,
        Headline("needed_bytes", "memory", show_bytes, lambda r: r.memory.needed),
        Headline("ttft_seconds", "TTFT", show_seconds, _of("ttft_seconds")),
        Headline("tpot_seconds", "TPOT", show_seconds, lambda r: r.tpot_seconds or None),
        Headline("output_tokens_per_second", "tokens/s", _number, lambda r: r.output_tokens_per_second or None),
        Headline("max_concurrency", "room", lambda value: f"{value:,}", _of("max_concurrency")),
        _MILLION,
    ),
    "serve": (
        Headline("meets", "meets", _yes, _of("meets")),
        Headline("capacity_per_second", "capacity/s", _number, _of("capacity_per_second")),
        Headline("ttft_p99_seconds", "p99 TTFT", show_seconds, _latency("ttft", "p99")),
        Headline("tpot_p99_seconds", "p99 TPOT", show_seconds, _latency("tpot", "p99")),
        Headline("usd_per_hour", "$/h", _number, _of("usd_per_hour")),
        _MILLION,
    ),
}


def kind_of(inputs: Inputs) -> str:
    """Return what is answered: train, infer or serve, by itself or by the best of a search."""
    return str(inputs.get("what")) if inputs.command == "plan" else inputs.command


def again(inputs: Inputs, values: Mapping[str, object]) -> list[str]:
    """Return the words that ask a question again, with values that were found."""
    kept = {key: value for key, value in inputs.values.items() if key != "what"}
    name = f"plan {kind_of(inputs)}" if inputs.command == "plan" else inputs.command
    return command_words(name, {**kept, **values})


def headlines(inputs: Inputs) -> tuple[Headline, ...]:
    """Return the columns of the answers to a question."""
    return HEADLINES[kind_of(inputs)]


@dataclass(frozen=True, slots=True)
class VaryPoint:
    """The question at some values: its report, or the problems that refuse it."""

    values: Mapping[str, object]
    report: Any = None
    problems: tuple[Problem, ...] = ()
    kwh: float | None = None
    """Energy of a million tokens, None where the watts of the devices are not known."""
    plan: str = ""
    """The best plan in words, where a search is asked."""
    assumed: tuple[str, ...] = ()

    @property
    def infeasible(self) -> bool:
        """Whether a search was asked of what can be used, and no plan of it is feasible."""
        return bool(self.problems) and all(problem.field == "plan" for problem in self.problems)

    def keeps(self, inputs: Inputs) -> bool:
        """Return whether it keeps the verdict, at the risk that was asked, and every limit, as the best plan does."""
        if self.report is None or inputs.command == "plan":
            return self.report is not None
        if inputs.command == "serve":
            return bool(self.report.meets)
        sure = self.report.chance_to_fit >= inputs.get("risk", 0.0)
        return bool(self.report.fits and sure and not broken_limits(inputs.values, self.report))

    def row(self, inputs: Inputs) -> dict[str, Any]:
        """Return the values and the headlines under their keys, None where nothing is answered."""
        cells = {head.key: None if self.report is None else head.of(self.report) for head in headlines(inputs)}
        problem = "; ".join(map(str, self.problems)) or None
        plan = {"plan": self.plan or None} if inputs.command == "plan" else {}
        return {**self.values, **cells, "kwh_per_million_tokens": self.kwh, **plan, "problem": problem}


class Questions:
    """One question of a command line, asked again with other values of its fields."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.command = inputs, _commands.command(inputs.command, inputs.get("what", ""))
        self._home = import_module(f"shardwise.answers._{inputs.command}")
        self._raw = {key: value for key, value in inputs.raw.items() if key not in MANY}

    def check(self, key: str, flag: str) -> None:
        """Raise `InputError` where a word is no field of the question."""
        flags = self.command.flags
        fields = (*(k for k, f in flags.items() if f.group not in ("output", "many", "search")), _DEVICES)
        if key not in fields:
            other = [_DEVICES if word == "on" else word for word in meant(key, fields)]
            close = other or near(key, fields)
            remedy = (
                f"did you mean {' or '.join(close)}?"
                if close
                else f"`shardwise {self.command.words} --help` lists them"
            )
            raise fail(flag, key, f"is not a field of {self.command.words}", remedy)

    def raw(self, values: Mapping[str, object]) -> dict[str, object]:
        """Return what a command line with these values says."""
        raw_values = {**self._raw, **values, **({"top": 1} if self.inputs.command == "plan" else {})}
        if _DEVICES in values:
            raw_values.pop("num_devices", None)
            raw_values |= on_count(str(raw_values.get("on", "")), int(str(raw_values.pop(_DEVICES))))
        return raw_values

    @cached_property
    def _chosen(self) -> tuple[dict[str, object], tuple[str, ...]]:
        """The degrees that were chosen for a served replica where no flag says them, and the notes of it."""
        base = self.at({}) if self.inputs.command == "infer" and not splits_are_said(self.inputs) else None
        if base is None or base.report is None or base.report.plan.num_devices == 1:
            return {}, ()
        notes = tuple(note for note in base.assumed if note.endswith(NOTES))
        return {axis: getattr(base.report.plan, axis) for axis in ("tp", "pp")}, notes

    def degrees(self, fields: Collection[str]) -> dict[str, object]:
        """Return the degrees that were chosen, of one device too; none where such fields vary them or the devices."""
        return {} if {"on", _DEVICES, *SPLITS} & set(fields) else self._chosen[0]

    def at(self, values: Mapping[str, object]) -> VaryPoint:
        """Return the answer at some values; all of the same devices lay a replica out as the question itself does."""
        own, degrees = Inputs(command=self.inputs.command), {}
        if values and (degrees := self.degrees(values)):
            own.notes = list(self._chosen[1])
        try:
            read_values({**degrees, **self.raw(values)}, self.command, own)
            take(own)
            own.problems.raise_if_any()
            report = self._home.ask(own)
            plan = self._home.described(own, report) if own.command == "plan" else ""
            assumed = tuple(dict.fromkeys((*own.notes, *report.assumptions)))
            return VaryPoint(values, report, kwh=_kwh(own, report), plan=plan, assumed=assumed)
        except InputError as error:
            return VaryPoint(values, problems=error.problems)


def _kwh(inputs: Inputs, report: Any) -> float | None:
    try:
        return energy(report, inputs.get("pue", 1.0)).kwh_per_million_tokens
    except InputError:
        return None


def write_rows(inputs: Inputs, points: Sequence[VaryPoint]) -> list[dict[str, Any]]:
    """Return the answers as rows, written to the file that --rows names."""
    rows = [point.row(inputs) for point in points]
    path = inputs.get("rows")
    if path is not None:
        from shardwise.frames import Frame

        typed = {name: _typed([point.values[name] for point in points]) for name in points[0].values}
        columns = [{name: column[i] for name, column in typed.items()} for i in range(len(rows))]
        frame = Frame.of_rows([row | column for row, column in zip(rows, columns, strict=True)])
        if path.endswith(".csv"):
            write_text(path, frame.to_csv())
            return rows
        try:
            frame.to_parquet(path)
        except ImportError:
            raise fail(
                "rows", path, "needs polars or pyarrow, and neither is installed", "pip install polars"
            ) from None
        except OSError as error:
            raise fail("rows", path, f"cannot be written ({error})", "give a file in a folder that exists") from None
    return rows


def _typed(words: Sequence[object]) -> list[object]:
    """Return the values of a field as a column: numbers where all of them are.

    >>> _typed(["1", "8"]), _typed(["0.5", "1"]), _typed(["8k", "16k"])
    ([1, 8], [0.5, 1.0], ['8k', '16k'])
    """
    for kind in (int, float):
        try:
            return [kind(str(word)) for word in words]
        except ValueError:
            continue
    return list(words)


def title_of(points: Sequence[VaryPoint]) -> str:
    """Return what the answers are of: the model, and the devices where all are of the same."""
    case = next((getattr(p.report, "base", p.report).case for p in points if p.report is not None), None)
    if case is None:
        return "no question that was tried has an answer"
    if points[0].values.keys() & {"on", _DEVICES, "model"}:
        return "several models" if "model" in points[0].values else case.model.name
    return f"{case.model.name} on {case.cluster.num_devices} x {case.cluster.device.name}"


@dataclass(frozen=True, slots=True)
class Effect:
    """What becomes of the seconds where one thing is other: a constant at either end of its band, or a choice."""

    what: str
    value: str
    least: float
    most: float
    fits: bool
    is_choice: bool = False

    @property
    def reach(self) -> float:
        """The larger change of the seconds, as a share of them."""
        return max(abs(self.least - 1), abs(self.most - 1))


_UNITS = {"memory": "B", "peak_flops": "FLOP/s", "tokens": ""}


def shown_value(field: str, value: object) -> str:
    """Return a value of a field as a table has it and as a flag takes it, but for blanks and commas.

    >>> shown_value("slow_bandwidth", 6.584e8), shown_value("batch", 1024), shown_value("price", 2.407)
    ('658.4 MB/s', '1,024', '2.407')
    >>> shown_value("memory", 155800000000), shown_value("tokens", 1.2e12), shown_value("tp", "1..8")
    ('155.8 GB', '1.2 T', '1..8')
    """
    if isinstance(value, str) or not isinstance(value, (int, float)):
        return str(value)
    unit = "B/s" if field.endswith("bandwidth") else _UNITS.get(field)
    scales = (("P", 1e15), ("T", 1e12), ("G" if unit else "B", 1e9), ("M", 1e6))
    prefix, scale = next(((p, s) for p, s in scales if unit is not None and value >= s), ("", 1.0))
    if not prefix and not unit:
        return f"{value:,}" if isinstance(value, int) else f"{value:,.5g}"
    return f"{value / scale:.5g} {prefix}{unit}"


def _further_limits(inputs: Inputs, reports: Sequence[Any], heads: Sequence[Headline]) -> list[str]:
    """Return the limits whose values stand in no column of the headlines."""
    shown = [[head.of(report) for report in reports] for head in heads]
    judged = [limit_values(inputs.values, report) for report in reports]
    return [key for key in (judged[0] if judged else ()) if [values[key] for values in judged] not in shown]


def points_table(page: Page, points: Sequence[VaryPoint], inputs: Inputs, fields: Sequence[str]) -> None:
    """Append the answers as a table, with what limits judge; a question that is refused says why below."""
    known = [p for p in points if p.report is not None]
    heads = [h for h in headlines(inputs) if any(h.of(p.report) is not None for p in known)]
    limits = [] if kind_of(inputs) == "serve" else _further_limits(inputs, [p.report for p in known], heads)
    # Energy is of what is compared across devices, and of who asks for it.
    powered = ("on" in fields or inputs.get("energy")) and any(p.kwh is not None for p in known)
    energy = ["kWh/M"] if powered else []
    rows = [
        [
            *(name.replace("_", " ") for name in fields),
            *(h.head for h in heads),
            *energy,
            *("--" + key.replace("_", "-") for key in limits),
        ]
    ]
    refused: dict[str, int] = {}
    for point in points:
        cells = [shown_value(name, point.values[name]) for name in fields]
        if point.report is None:
            text = "; ".join(p.rule if p.field == "plan" else f"{p.field}: {p.rule}" for p in point.problems)
            cells += [f"[{refused.setdefault(text, len(refused) + 1)}]"]
        else:
            values = ((h, h.of(point.report)) for h in heads)
            cells += ["-" if value is None else h.show(value) for h, value in values]
            cells += ["-" if point.kwh is None else significant(point.kwh)] if powered else []
            judged = limit_values(inputs.values, point.report) if limits else {}
            cells += [show_limit(key, judged[key]) for key in limits]
        rows.append(cells)
    page.table(rows, right=range(len(fields), len(rows[0])), header=True, indent=2)
    if refused:
        page.blank()
    for text, mark in refused.items():
        page.label(f"{f'[{mark}]':>9}", text, "dim", "dim")
