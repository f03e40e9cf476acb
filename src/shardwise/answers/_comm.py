"""`shardwise comm`: groups, messages and their counts: a summary, each axis, layers, memory, GEMMs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from shardwise.answers import _train
from shardwise.answers._answer import Answer
from shardwise.answers._comm_tree import comm_tree, total_tree
from shardwise.answers._described import describe
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import Page, assumptions, command_lines
from shardwise.answers._plot import check_drawable, plotted
from shardwise.errors import check_finite
from shardwise.training import CATEGORIES, AxisMessages, CommReport, Flow, LayerRow, LayerTable
from shardwise.units import counted, show_bytes, show_count, show_seconds, significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHORT = {
    "all_reduce": "AR",
    "all_gather": "AG",
    "reduce_scatter": "RS",
    "all_to_all": "A2A",
    "broadcast": "BC",
    "reduce": "RD",
    "send": "P2P",
}
GROUPS_SHOWN, RANKS_SHOWN = 4, 8
MIB = 2.0**20


def ask(inputs: Inputs) -> CommReport:
    """Return the communication report of a training case; raises `InputError` with every problem."""
    return CommReport(report=_train.trained(inputs))


def words(inputs: Inputs, report: CommReport) -> list[str]:
    """Return the command that gives the same report, every deduction written out."""
    first, *rest = _train.words(inputs, report.report)
    return [first.replace("shardwise train", "shardwise comm", 1), *rest]


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise comm`."""
    check_drawable(inputs)
    communication = ask(inputs)
    report = communication.report
    check_finite({"step_seconds": report.step_seconds, "device_bytes": report.device_bytes})

    def tree() -> dict[str, Any]:
        return comm_tree(communication)

    def page() -> Page:
        return comm_page(communication, words(inputs, communication), width, bool(inputs.get("all")))

    def draw() -> Figure:
        from shardwise.answers._plots_comm import comm_figure

        return comm_figure(communication)

    return plotted(inputs, Answer(0 if report.fits else 1, tree, page), draw)


def comm_page(communication: CommReport, command: Sequence[str], width: int = 80, everything: bool = False) -> Page:
    """Return the communication report as a page; `everything` lists every group with every rank."""
    page = Page(width)
    report = communication.report
    cluster = report.case.cluster
    title = f"{report.case.model.name} on {cluster.num_devices} x {cluster.device.name}: {describe(communication.plan)}"
    page.label("COMM", title, "bold", "bold")
    of = (
        f"; numbers of one device are of {_where(communication, communication.reference)}"
        if communication.plan.pp > 1
        else ""
    )
    times = f"{counted(report.evaluation.sizes.num_micro, 'micro-batch')} of {communication.plan.micro_batch}"
    page.note(f"step {show_seconds(report.step_seconds)}, {times}{of}")
    if not report.fits:
        page.note(f"does not fit: {show_bytes(report.verdict.short_by_bytes)} too much", "bold red")
    for section in (_summary, _layers, _memory, _products):
        page.blank()
        section(page, communication)
    for axis in communication.axes.values():
        page.blank()
        _axis(page, communication, axis, everything)
    page.blank()
    assumptions(page, report.assumptions)
    page.blank()
    command_lines(page, "AGAIN", command)
    return page


def _head(page: Page, word: str, text: str) -> None:
    """Append a heading with what it is about, wrapped."""
    first, *more = textwrap.wrap(text, page.width - len(word) - 2)
    page.add((word, "bold"), ("  " + first, "dim"))
    for piece in more:
        page.add(("  " + piece, "dim"))


def _lines(page: Page, text: str, style: str = "") -> None:
    """Append a text of a section, wrapped."""
    for piece in textwrap.wrap(text, page.width - 2, break_on_hyphens=False):
        page.add(("  " + piece, style))


def _where(report: CommReport, index: int) -> str:
    run, pp = report.report.evaluation.stages[index], report.plan.pp
    first, last = int(run.position), int(run.position + run.count - 1)
    return f"stage {first} of {pp}" if first == last else f"stages {first} to {last} of {pp}"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value < 1e6 else show_count(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _or_dash(value: float, show: Callable[[float], str]) -> str:
    return show(value) if value else "-"


def _summary(page: Page, report: CommReport) -> None:
    _head(page, "A STEP", "messages, and bytes sent on the wire")
    rows = [["", "", "one device", "", "cluster", "", "seconds", ""]]
    rows.append(["axis", "groups", "messages", "sent", "messages", "sent", "exposed", "overlapped"])
    for axis in report.axes.values():
        sent = axis.sent_bytes_per_step, axis.cluster_sent_bytes
        rows.append(
            [axis.name, f"{axis.num_groups:,} of {axis.size}", _count(axis.messages_per_step), show_bytes(sent[0]),
             _count(axis.cluster_messages), show_bytes(sent[1]), *_waits(axis.exposed_seconds, axis.hidden_seconds)]
        )  # fmt: skip
    total = total_tree(report)
    cluster = total["cluster"]
    rows.append(
        ["together", "", _count(total["messages_per_step"]), show_bytes(total["sent_bytes_per_step"]),
         _count(cluster["messages_per_step"]), show_bytes(cluster["sent_bytes_per_step"]),
         *_waits(total["exposed_seconds"], total["hidden_seconds"])]
    )  # fmt: skip
    _table(page, rows, (2, 3, 4, 5, 6, 7), (1, 4, 7, 2), 0)
    if not report.axes:
        page.add(("nothing is sent: nothing is split", "dim"))
    _busiest(page, report)


def _waits(exposed: float, hidden: float) -> list[str]:
    return [_or_dash(exposed, show_seconds), _or_dash(hidden, show_seconds)]


def _busiest(page: Page, report: CommReport) -> None:
    busiest = report.traffic_map.busiest
    if busiest is None:
        return
    tiers = report.report.case.cluster.tiers
    inner = next((a for a, b in pairwise(tiers) if b.name == busiest.tier), None)
    per_node = report.report.case.cluster.devices_per_node
    who = f"device {report.place(busiest.domain)}" if inner is None else f"{inner.name} domain {busiest.domain}"
    if inner is not None and inner.size == per_node:
        who = f"node {busiest.domain}"
    share = busiest.seconds / report.report.step_seconds
    page.label(
        "BUSIEST",
        f"{busiest.tier} of {who}: {show_bytes(busiest.bytes_per_step)} out in a step, "
        f"{show_seconds(busiest.seconds)} at the rate it reaches, {share:.1%} of the step",
    )


def _axis(page: Page, report: CommReport, axis: AxisMessages, everything: bool) -> None:
    title = f"{axis.num_groups:,} groups of {axis.size}" if axis.num_groups > 1 else f"one group of {axis.size}"
    _head(page, axis.name.upper(), f"{axis.title}: {title}")
    tiers = [f"{show_bytes(amount)} over {tier}" for tier, amount in axis.tiers.items() if amount]
    _lines(page, f"the cluster sends {', '.join(tiers)} in a step")
    for line in group_lines(report, axis.name, everything):
        _lines(page, line, "cyan")
    # The device of reference first; of other stages only what it does not send, unless everything is wanted.
    order = [report.reference, *(i for i in range(len(report.flows)) if i != report.reference)]
    seen: set[tuple[object, ...]] = set()
    for index in range(len(report.flows)) if everything else order:
        flows = [f for f in merged(report.on(axis.name, index)) if everything or _kind(f) not in seen]
        seen |= {_kind(f) for f in flows}
        if flows:
            _messages(page, report, index, flows)


def _kind(flow: Flow) -> tuple[object, ...]:
    message = flow.message
    return message.group, message.where, message.phase, message.verb, message.tensor, message.shape


def _messages(page: Page, report: CommReport, index: int, flows: Sequence[Flow]) -> None:
    if report.plan.pp > 1:
        page.add((f"  {_where(report, index)}", "dim"))
    rows = [["what", "in", "tensor", "shape", "bytes", "a step", "exposed", "overlapped"]]
    for flow in flows:
        message = flow.message
        where = (
            message.where
            if message.part.startswith("layer") or message.part == message.where
            else f"{message.part} {message.where}"
        )
        shape = "x".join(_number(n).replace(",", "") for n in message.shape)
        rows.append(
            [f"{SHORT[message.verb]} {where}", message.phase, message.tensor, shape, show_bytes(message.size_bytes),
             _count(flow.per_step), *_waits(flow.exposed_seconds, flow.hidden_seconds)]
        )  # fmt: skip
    _table(page, rows, (4, 5, 6, 7), (2, 3, 7, 4), 2)


def merged(flows: Sequence[Flow]) -> list[Flow]:
    """Return the messages with those of the same operator, pass and size in kinds of layer added together."""
    sums: dict[tuple[object, ...], Flow] = {}
    for flow in flows:
        message = flow.message
        part = "layer" if message.part.startswith("layer") else message.part
        key = (part, message.where, message.phase, message.verb, message.tensor, message.size_bytes, message.toward)
        other = sums.get(key)
        sums[key] = (
            flow
            if other is None
            else Flow(
                message=message,
                per_micro_batch=other.per_micro_batch + flow.per_micro_batch,
                per_step=other.per_step + flow.per_step,
                exposed_seconds=other.exposed_seconds + flow.exposed_seconds,
                hidden_seconds=other.hidden_seconds + flow.hidden_seconds,
            )
        )
    return list(sums.values())


def _table(page: Page, rows: Sequence[Sequence[str]], right: Sequence[int], spare: Sequence[int], indent: int) -> None:
    """Append a table with a head; on a narrow page without as many of the spare columns as it takes."""
    kept = list(range(len(rows[0])))
    for column in spare:
        widths = [max(len(row[i]) for row in rows) for i in kept]
        if indent + sum(widths) + len(widths) - 1 > page.width:
            kept.remove(column)
    flush = [kept.index(i) for i in right if i in kept]
    page.table([[row[i] for i in kept] for row in rows], right=flush, header=True, indent=indent)


def group_lines(report: CommReport, axis: str, everything: bool = False) -> list[str]:
    """Return the groups of an axis as lines of node and device, the first few and the last unless all are wanted."""
    groups = [g for g in report.groups(axis) if len(g) > 1]
    limit = len(groups) if everything or len(groups) <= 2 * GROUPS_SHOWN else GROUPS_SHOWN
    lines = [_group(report, group, everything) for group in groups[:limit]]
    if limit < len(groups):
        lines += [f"... {len(groups) - limit - 1:,} more; --all lists each", _group(report, groups[-1], False)]
    return lines


def _group(report: CommReport, group: Sequence[int], everything: bool) -> str:
    names = [report.place(rank) for rank in group]
    if not everything and len(names) > RANKS_SHOWN:
        names = [*names[:3], "...", f"{names[-1]} ({len(names)})"]
    return "[" + " ".join(names) + "]"


def _layers(page: Page, report: CommReport) -> None:
    _tables(page, "WHOLE MODEL", "without parallelism", report.whole_parameters, report.whole_layers)
    page.blank()
    index = report.report.peak_stage
    where = "on one device" if report.plan.pp == 1 else f"on {_where(report, index)}, the fullest"
    _tables(page, "ONE RANK", where, report.parameters(index), report.layers(index))
    _lines(page, ", ".join(f"{short} {verb.replace('_', '-')}" for verb, short in SHORT.items()), "dim")


def _tables(page: Page, title: str, where: str, parameters: float, tables: Sequence[LayerTable]) -> None:
    _head(page, title, f"{where}: {parameters:,.0f} parameters; sizes in MiB")
    rows = [["", "weights", "params", "saved", "forward", "backward"]]
    for table in tables:
        times = "" if table.times == 1 else f" x {table.times:g}"
        saved = table.activation_bytes / MIB
        rows.append([f"{table.name}{times}", "", f"{sum(r.parameter_bytes for r in table.rows) / MIB:,.1f}",
                     f"{saved:,.1f}", "", ""])  # fmt: skip
        rows += [_layer_row(row) for row in table.rows]
    _table(page, rows, (2, 3, 4, 5), (1, 2, 3), 0)


def _layer_row(row: LayerRow) -> list[str]:
    def of(*phases: str) -> str:
        texts = [
            (f"{n:g} " if n > 1 else "") + f"{SHORT[m.verb]} {significant(m.size_bytes / MIB)}"
            for m, n in row.messages
            if m.phase in phases
        ]
        return " ".join(texts)

    weights = "+".join("x".join(f"{n:.0f}" for n in shape) for _, shape in row.weights)
    sizes = [f"{v / MIB:,.1f}" if v else "" for v in (row.parameter_bytes, row.activation_bytes)]
    return [f"  {row.name}", weights, *sizes, of("forward"), of("backward")]


def _memory(page: Page, report: CommReport) -> None:
    _head(page, "MEMORY", "of one device of each stage")
    rows = [["", "parameters", *CATEGORIES, "peak"]]
    whole = report.whole.evaluation.memory[0]
    entries = [("whole", report.whole_parameters, whole)]
    for i, run in enumerate(report.report.evaluation.stages):
        first, last = int(run.position), int(run.position + run.count - 1)
        name = f"stage {first}" if first == last else f"stages {first}-{last}"
        entries.append((name, report.parameters(i), report.report.evaluation.memory[i]))
    for name, parameters, memory in entries:
        sizes = [_or_dash(getattr(memory, c), show_bytes) for c in CATEGORIES]
        rows.append([name, show_count(parameters), *sizes, show_bytes(memory.peak)])
    turned = [list(column) for column in zip(*rows, strict=True)]
    page.table(turned, right=range(1, len(turned[0])), header=True, indent=0)


def _products(page: Page, report: CommReport) -> None:
    _head(page, "GEMMS", "rows x inner x columns and share of the peak, whole and on one rank")
    rows = [["", "whole", "reaches", "one rank", "reaches"]]
    seen: set[tuple[object, ...]] = set()
    for p in report.gemms:
        key = (p.name, p.before, p.after)
        if key not in seen:
            seen.add(key)
            rows.append([p.name, _sides(p.before), f"{p.efficiency_before:.1%}", _sides(p.after),
                         f"{p.efficiency_after:.1%}"])  # fmt: skip
    _table(page, rows, (2, 4), (1, 2), 0)


def _sides(shape: Sequence[float]) -> str:
    return "x".join(_number(n).replace(",", "") for n in shape)
