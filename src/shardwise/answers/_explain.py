"""`shardwise explain`: any number of a report, opened down to its inputs."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardwise.answers import _train
from shardwise.answers._answer import Answer
from shardwise.answers._explained import A_COUNT, ExplainedNumber, opened, show_value, unit_of
from shardwise.answers._files import command_words, read_case
from shardwise.answers._flags import infer_flags, train_flags
from shardwise.answers._infer import ask
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import Page, command_lines
from shardwise.answers._plot import check_drawable, plotted
from shardwise.answers._typed import quoted
from shardwise.errors import InputError, Problem
from shardwise.ledger.traced import Contribution, formula, operands, parts, plain, ratio
from shardwise.records import dataclass, replace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.training import TrainReport

UNITS = {
    "step": "seconds",
    "memory": "bytes",
    "tokens_per_second_per_gpu": "",
    "mfu": "",
    "hfu": "",
    "ttft": "seconds",
    "tpot": "seconds",
    "request": "seconds",
    "kv_cache": "bytes",
}
_SERVING = ("ttft", "tpot", "request", "kv_cache")
_NOTHING: Mapping[str, float] = MappingProxyType({})
# What lies on a device beside tensors, by the words of `train`.
_OTHERS = {
    "workspaces": "GEMM workspaces",
    "allocator": "allocator reserve",
    "context": "context and communicators",
    "pages": "pages",
}


def _root(inputs: Inputs, what: str) -> tuple[ExplainedNumber, dict[str, float]]:
    """Return the number that is asked for, and what lies beside it on the device where that is the peak of tensors."""
    if what in _SERVING or (what == "memory" and _serves(inputs)):
        return ExplainedNumber(ask(inputs).explain(what), UNITS[what]), {}
    report = _train.trained(inputs)
    number = ExplainedNumber(report.explain(what), UNITS[what])
    return number, _other_bytes(report, number.value) if what == "memory" else {}


def _other_bytes(report: TrainReport, peak: float) -> dict[str, float]:
    """Return the bytes of a device beside the tensors of a peak, by what they are; with the peak they are all of it."""
    allocated, reserved, needed = report.allocated_bytes, report.reserved_bytes, report.evaluation.needed
    return {
        "workspaces": allocated - peak,
        "allocator": reserved - allocated,
        "context": needed - reserved,
        "pages": report.device_bytes - needed,
    }


def _serves(inputs: Inputs) -> bool:
    """Return whether a flag that only serving has was given."""
    return bool(inputs.values.keys() & (infer_flags().keys() - train_flags().keys()))


def _check_kind(inputs: Inputs, what: str) -> None:
    """Record flags that the number does not depend on, being of the other kind of case; a file may have any."""
    if what == "memory":
        return
    serves, path = what in _SERVING, inputs.get("config")
    own, other = (infer_flags(), train_flags()) if serves else (train_flags(), infer_flags())
    alone = other.keys() - own.keys() - (read_case(path).keys() if path else set())
    numbers = "step, tokens_per_second_per_gpu, mfu or hfu" if serves else "ttft, tpot, request or kv_cache"
    kinds = ("training", "serving") if serves else ("serving", "training")
    for key in sorted(inputs.values.keys() & alone):
        rule = f"is of {kinds[0]}, and {what} is a number of {kinds[1]}"
        inputs.fail(key, None, rule, f"leave it out, or ask for --what {numbers}")


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise explain`."""
    check_drawable(inputs)
    what = inputs.get("what", "request" if _serves(inputs) else "step")
    _check_kind(inputs, what)
    root, other_bytes = _root(inputs, what)
    return opened_answer(inputs, width, ("explain", what), root, other_bytes)


def opened_answer(
    inputs: Inputs,
    width: int,
    asked: tuple[str, str],
    root: ExplainedNumber,
    other_bytes: Mapping[str, float] = _NOTHING,
) -> Answer:
    """Return the answer that opens a number of a command, as far as path and depth say.

    `other_bytes` are bytes of a device which the number at the top leaves out.
    """
    (command, what), depth = asked, inputs.get("depth", 2)
    at = follow(root, inputs.get("path", ""))
    words = command_words(command, {k: v for k, v in inputs.values.items() if k != "path"})

    def tree() -> dict[str, Any]:
        more = {"other_bytes": dict(other_bytes)} if other_bytes and not at.path else {}
        return {"what": what, "path": list(at.path), "times": at.times, **more, **explain_tree(at, depth)}

    def page() -> Page:
        return explain_page(at, what, depth, words, width, other_bytes)

    def draw() -> Figure:
        from shardwise.answers._plots_explain import explain_figure

        return explain_figure(at, what, inputs.get("depth", 6), " ".join(words))

    return plotted(inputs, Answer(0, tree, page), draw)


_LONGEST_FORMULA = 400
_MOST_ROWS = 12
# Longer names in a path are cut short, and longer paths are typed in places.
_A_NAME = 50


def follow(root: ExplainedNumber, path: str) -> ExplainedNumber:
    """Return the number that a path of names, or of places from 1, leads to; raises `InputError` where it does not."""
    at, rest = root, path.strip("/ ")
    while rest:
        below = _below(at)
        number, rest = _step(below, rest)
        if number is None:
            names = ", ".join(repr(b.path[-1]) for b in below[:_MOST_ROWS]) or "nothing: it is an input"
            where = "/".join(at.path) or "the top"
            raise InputError([Problem("path", path, f"leads nowhere at {where}", f"it holds {names}")])
        at = number
    return at


def _below(at: ExplainedNumber) -> list[ExplainedNumber]:
    """Return what a number opens to: its parts, or the named numbers of its formula."""
    numbers = parts(at.node)
    if not at.node.op:
        return []
    if not numbers:
        below = [ExplainedNumber(o, unit_of(o.unit), 1.0, (*at.path, o.name)) for o in operands(at.node)]
    else:
        below = [opened(at, part) for part in numbers if part.node is not None]
    return [replace(b, places=(*at.places, place)) for place, b in enumerate(below, 1)]


def _step(below: Sequence[ExplainedNumber], path: str) -> tuple[ExplainedNumber | None, str]:
    """Return the number that a path starts with, and the rest of the path; the longest name wins, then a place."""
    lower = path.lower()
    for one in sorted(below, key=lambda b: -len(b.path[-1])):
        name = one.path[-1].lower()
        if lower == name or lower.startswith(name + "/"):
            return one, path[len(name) :].strip("/ ")
    word, _, rest = path.partition("/")
    place = word.strip()
    if place.isascii() and place.isdigit() and len(place) < 10 and 1 <= int(place) <= len(below):
        return below[int(place) - 1], rest.strip("/ ")
    return None, path


def explain_tree(at: ExplainedNumber, depth: int) -> dict[str, Any]:
    """Return a number as a tree: the amounts of its parts are in its own unit and add up to its value.

    A number that is no sum has no parts but `where`, the named numbers of its formula.
    """
    opened = parts(at.node)
    tree: dict[str, Any] = {
        "name": at.node.name or _short(formula(at.node), _LONGEST_FORMULA),
        "value": at.value,
        "unit": at.unit,
        "formula": _short(formula(at.node), _LONGEST_FORMULA) if at.node.op else "",
        "source": at.node.source,
    }
    terms = ratio(at.node)
    if terms is not None:
        tree["ratio"] = {side: _term(term) for side, term in zip(("numerator", "denominator"), terms, strict=True)}
    tree["parts"] = [_part(at, part, depth) for part in opened] if depth > 0 else []
    if at.node.op and not opened:
        tree["where"] = [{"name": o.name, "value": float(plain(o)), "source": o.source} for o in operands(at.node)]
    return tree


def _term(term: Any) -> dict[str, Any]:
    return {"name": _short(formula(term, False), _LONGEST_FORMULA), "value": float(plain(term))}


_ROUNDING = 1e-12


def _part(at: ExplainedNumber, part: Contribution, depth: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "label": _short(part.label, _LONGEST_FORMULA),
        "amount": part.amount,
        "times": part.times,
        # Of a sum whose parts leave nothing but their rounding no part is a share.
        "share": part.amount / at.value if abs(at.value) > _ROUNDING * abs(part.amount) else 0.0,
        "choice": part.choice,
        "against": [{"label": r.label, "amount": r.amount, "slack": r.slack} for r in part.against],
    }
    if part.node is not None and depth > 1:
        row["node"] = explain_tree(opened(at, part), depth - 1)
    return row


def explain_page(
    at: ExplainedNumber,
    what: str,
    depth: int,
    words: Sequence[str],
    width: int = 80,
    other_bytes: Mapping[str, float] = _NOTHING,
) -> Page:
    """Return a number opened to a depth as a page; shares are of the number at the top."""
    page = Page(width)
    name = " / ".join(_short(step, _A_NAME) for step in at.path) or at.node.name
    page.label(what.upper(), f"{name} = {show_value(at.value, at.unit)}", "bold", "bold")
    if at.node.op:
        page.note("= " + _short(formula(at.node), 4 * page.body), "cyan")
    if at.node.source:
        page.note("source: " + at.node.source, "dim")
    if other_bytes and not at.path:
        rest = ", ".join(
            f"{show_value(other_bytes[key], at.unit)} of {name}" for key, name in _OTHERS.items() if other_bytes[key]
        )
        whole = show_value(at.value + sum(other_bytes.values()), at.unit)
        page.note(f"of tensors alone; beside them {rest}: {whole} on the device", "dim")
    _ratio(page, at)
    page.blank()
    rows = parts(at.node)
    if rows:
        _rows(page, at, rows, _Scale(at.value, at.unit, depth))
    else:
        _where(page, at)
    page.blank()
    below = [b for b in _below(at) if b.node.op]
    if below:
        command_lines(page, "DEEPER", [*words, f"--path {quoted(below[0].typed)}"])
    return page


def _ratio(page: Page, at: ExplainedNumber) -> None:
    terms = ratio(at.node)
    for word, term in zip(("numerator", "denominator"), terms or (), strict=False):
        page.note(f"{word}: {_short(formula(term, False), 100)} = {float(plain(term)):.6g}")


def _where(page: Page, at: ExplainedNumber) -> None:
    """Append the named numbers of a formula, or that the number is an input."""
    inputs = operands(at.node) if at.node.op else []
    if not inputs:
        page.note("an input: it opens no further")
    for o in inputs:
        page.add((f"{float(plain(o)):>13.6g}  ", ""), (_short(o.name, page.width - 15), "bold"))
        for line in textwrap.wrap(o.source, page.width - 15):
            page.add((" " * 15, ""), (line, "dim"))


@dataclass(frozen=True, slots=True)
class _Scale:
    """What rows of a page are shares of, and how deep they go."""

    whole: float
    unit: str
    depth: int
    factor: float = 1.0
    indent: str = ""

    def lead(self, amount: float) -> str:
        """Return the columns before a label."""
        share = f"{amount / self.whole:8.1%}" if self.whole else " " * 8
        return f"{share}{show_value(amount, self.unit):>13}  {self.indent}"

    def counts(self, part: Contribution) -> bool:
        """Return whether `times` is a count worth printing."""
        return abs(part.times) >= A_COUNT


def _rows(page: Page, at: ExplainedNumber, rows: Sequence[Contribution], scale: _Scale) -> None:
    printed: set[tuple[object, ...]] = set()
    for part in rows[:_MOST_ROWS]:
        amount = part.amount * scale.factor
        left = scale.lead(amount)
        count = _times(part.times) if scale.counts(part) else ""
        page.add((left, "dim" if scale.indent else ""), (_short(count + part.label, page.width - len(left)), ""))
        if part.against not in printed:
            _against(page, part, scale, len(left))
            printed.add(part.against)
        if part.node is not None and scale.depth > 1:
            below = _Scale(scale.whole, scale.unit, scale.depth - 1, scale.factor * part.times, scale.indent + "  ")
            _rows(page, opened(at, part), parts(part.node), below)
    rest = rows[_MOST_ROWS:]
    if rest:
        page.add((f"{scale.lead(sum(p.amount for p in rest) * scale.factor)}and {len(rest)} more", "dim"))


def _times(times: float) -> str:
    """Return how often a part counts, in words before its label.

    >>> _times(1.0), _times(32.0), _times(-1.0), _times(-2.0)
    ('', '32 x ', 'less ', 'less 2 x ')
    """
    sign = "less " if times < 0 else ""
    return sign if abs(times) == 1.0 else f"{sign}{abs(times):.4g} x "


def _against(page: Page, part: Contribution, scale: _Scale, indent: int) -> None:
    """Append what a maximum chose against, and by how much."""
    for rival in part.against[:3]:
        amount, slack = (show_value(v * scale.factor, scale.unit) for v in (rival.amount, rival.slack))
        text = f"{'above' if part.choice == 'max' else 'below'} {rival.label}: {amount} (slack {slack})"
        for line in textwrap.wrap(text, max(20, page.width - indent)):
            page.add((" " * indent, ""), (line, "dim"))


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: max(0, most - 3)] + "..."
