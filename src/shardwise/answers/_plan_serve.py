"""`shardwise plan serve`: how many devices a load needs, in which layout, under which limits, and why no fewer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shardwise.answers import _case
from shardwise.answers._answer import Answer
from shardwise.answers._described import load_text, rate_text
from shardwise.answers._energy import Energy, asked_energy, energy_lines, energy_tree
from shardwise.answers._files import command_words, save_best
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import Page, command_lines
from shardwise.answers._plan_page import rejected, with_notes
from shardwise.answers._plot import check_drawable, plotted
from shardwise.answers._search_flags import LOAD_WHOLES, SERVE_WORDS, load_search_flags
from shardwise.answers._serve import classes_of, deployment_of, limits_of, simulated_again, workload_of
from shardwise.answers._serve_page import chance_line, limit_lines
from shardwise.answers._value_lists import on_count, on_devices
from shardwise.errors import InputError, Problems
from shardwise.records import replace
from shardwise.units import counted, show_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.hardware import Cluster
    from shardwise.plans import Plan
    from shardwise.search import FrontPoint, LoadResult, LoadSpace
    from shardwise.serving.load import ServeReport

# Devices that a load may take where only their kind is named.
_MANY = 1024
_FRONT = 10


def space_of(inputs: Inputs) -> LoadSpace:
    """Return the space that the flags restrict."""
    from shardwise.search import IntRanges, LoadSpace

    given = inputs.values
    layouts: dict[str, Any] = {key: IntRanges.parse(given[key]) for key in LOAD_WHOLES if key in given}
    layouts |= {key: given[key] for key in SERVE_WORDS if key in given}
    space = LoadSpace()
    limits: dict[str, Any] = {
        name: tuple(IntRanges.parse(given[key]).of(range(1, 2**20)))
        for name, key in (("step_tokens", "max_batched_tokens"), ("max_sequences", "max_sequences"))
        if key in given
    }
    space = replace(space, pools=given.get("pools", space.pools))
    return replace(space, layouts=replace(space.layouts, **layouts), **limits)


def ask(inputs: Inputs) -> LoadResult:
    """Return the answer of a search; raises `InputError` with every problem."""
    from shardwise.search import plan_serve
    from shardwise.serving.load import LoadOptions

    classes, more = classes_of(inputs)
    limits = (*limits_of(inputs.values), *more)
    model, cluster = _case.load_the_model(inputs), _most_devices(inputs)
    workload = workload_of(inputs, limits, classes)
    if model is None or cluster is None or workload is None or inputs.problems.items:
        raise InputError(dict.fromkeys(inputs.problems.items))
    searched = (*SERVE_WORDS, "max_batched_tokens", "max_sequences")
    asked = Inputs(values={k: v for k, v in inputs.values.items() if k not in searched})
    job, serving = deployment_of(asked, cluster)
    inputs.notes += [] if "engine" in inputs.values else asked.notes
    options = LoadOptions(
        limits=limits, router=inputs.get("router", "round-robin"), serving=serving, risk=inputs.get("risk", 0.0),
        settled="requests" not in inputs.values,
    )  # fmt: skip
    wanted = inputs.get("objective", "devices"), inputs.get("top", 3)
    space = space_of(inputs)
    if "engine" not in inputs.values:
        space = replace(space, layouts=replace(space.layouts, engine=(serving.engine,)))
    try:
        result = plan_serve(model, cluster, workload, job, options, (space, *wanted))
    except InputError as error:
        inputs.merge(error, dtype="compute" if "compute" in inputs.values else "weights")
        raise InputError(dict.fromkeys(inputs.problems.items)) from None
    inputs.problems.raise_if_any()
    return result


def _counts(text: str) -> bool:
    """Return whether devices are said with their number, as a file of a cluster says it, or are no devices at all."""
    from shardwise.hardware import says_how_many

    try:
        return text.endswith(".toml") or says_how_many(text)
    except InputError:
        return True


def _most_devices(inputs: Inputs) -> Cluster | None:
    """Return the devices that a load may take: those named, else many of their kind; None with the problems recorded.

    Of a kind whose network nobody knows they are those of one node.
    """
    text = str(inputs.values.get("on", ""))
    if not text or _counts(text):
        return _case.load_the_cluster(inputs)

    def so_many(count: int) -> tuple[Cluster | None, Inputs]:
        own = replace(inputs, values={**inputs.values, "on": f"{count}x{text}"}, problems=Problems(), bad=set())
        return _case.load_the_cluster(own), own

    cluster, tried = so_many(_MANY)
    if {problem.field for problem in tried.problems.items} == {"slow_bandwidth"}:
        one, _ = so_many(1)
        if one is not None:
            device = one.device
            cluster, tried = so_many(device.devices_per_node if device.knows("devices_per_node") else 1)
            why = f"one node, for the network of {device.name} is not known; --slow-bandwidth gives it"
            inputs.notes.append(f"on {tried.values['on']}: {why}")
    inputs.problems.items.extend(tried.problems.items)
    inputs.bad |= tried.bad
    return cluster


def case_of(inputs: Inputs, report: ServeReport) -> dict[str, Any]:
    """Return the case of `serve` that a deployment of the answer is."""
    from shardwise.serving.load import workers_of

    own = {key for key, flag in load_search_flags().items() if flag.group in ("search", "space")}
    kept = {key: value for key, value in inputs.values.items() if key not in own | {"what", "save", "num_devices"}}
    plan, job, case = report.base.plan, report.base.job, report.base.case
    text = str(inputs.values["on"])
    fixed: dict[str, Any] = (
        on_devices(inputs, case.cluster.device.name, report.devices)
        if _counts(text)
        else on_count(text, report.devices)
    )
    if report.prefill:
        first = report.prefill.base.plan
        fixed["prefill_workers"] = workers_of(first)
        # Laid out as a decode worker it has its experts, too.
        if any(getattr(first, key) != getattr(plan, key) for key in ("tp", "pp", "ep", "etp")):
            fixed |= {f"prefill_{key}": getattr(first, key) for key in ("tp", "pp")}
            fixed |= {"prefill_ep": first.ep} if first.ep > 1 or plan.ep > 1 else {}
    fixed |= {key: getattr(plan, key) for key in ("tp", "pp", "dp")}
    fixed |= {key: getattr(plan, key) for key in ("ep", "etp") if getattr(plan, key) > 1}
    fixed |= {"engine": case.engine.name, "weights": job.weights or case.format.name}
    fixed |= {"max_batched_tokens": report.policy.pass_tokens, "max_sequences": report.policy.max_sequences}
    fixed |= {key: getattr(job, key) for key in ("kv_cache", "compute") if getattr(job, key)}
    return {**kept, **fixed, **simulated_again(report)}


def on_more(inputs: Inputs, result: LoadResult) -> list[str]:
    """Return the command that asks again with the devices that the load needs, nothing where they are no more."""
    cluster, least = result.search.cluster, result.needed_devices
    if least <= cluster.num_devices or str(inputs.values["on"]).endswith(".toml"):
        return []
    asked = {key: value for key, value in inputs.values.items() if key not in ("what", "save", "num_devices")}
    return command_words("plan serve", asked | on_devices(inputs, cluster.device.name, least))


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise plan serve`."""
    check_drawable(inputs)
    result = ask(inputs)
    save_best(inputs, "serve", case_of(inputs, result.best[0]) if result.best else None)

    def words(report: ServeReport) -> list[str]:
        return command_words("serve", case_of(inputs, report))

    def page() -> Page:
        shown = result.best[0] if result.best else result.nearest
        command = words(shown) if shown is not None else on_more(inputs, result)
        return load_page(result, command, (tuple(inputs.notes), width), used[0] if used else None)

    def draw() -> Figure:
        from shardwise.answers._plots_serving import front_figure

        return front_figure(result)

    used = [asked_energy(inputs, report) for report in result.best]

    def tree() -> dict[str, Any]:
        trees = [
            energy_tree(one) | {"command": " ".join(words(report))}
            for report, one in zip(result.best, used, strict=True)
        ]
        return with_notes(load_tree(result, trees), inputs.notes)

    done = Answer(0 if result.best else 1, tree, page)
    return plotted(inputs, done, draw)


def _point(point: FrontPoint) -> dict[str, Any]:
    names = ("tokens_per_second_per_gpu", "tokens_per_second_per_user", "ttft_seconds")
    job = {name: getattr(point.job, name) for name in ("weights", "kv_cache", "max_batched_tokens", "max_sequences")}
    return {
        **{name: getattr(point, name) for name in names},
        "requests_per_second_per_replica": point.rate,
        "plan": {axis: getattr(point.plan, axis) for axis in ("tp", "pp", "ep")},
        "job": job,
    }


def load_tree(result: LoadResult, added: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the answer of a search as plain values; `added` is what else each of the best has."""
    added = added or [{}] * len(result.best)
    return {
        "search": {
            "layouts": result.layouts,
            "simulated": result.simulated,
            "seconds": result.seconds,
            "objective": result.objective,
        },
        "best": [{**report.own_values(), **more} for report, more in zip(result.best, added, strict=True)],
        "fewer": result.fewer.own_values() if result.fewer is not None else None,
        "front": [_point(point) for point in result.front],
        "rejected": [asdict(row) for row in result.rejected],
        "nearest": result.nearest.own_values() if result.nearest is not None else None,
    }


def _degrees(plan: Plan) -> str:
    """Return the degrees of one replica in words."""
    degrees = (f"{axis} {getattr(plan, axis)}" for axis in LOAD_WHOLES if getattr(plan, axis) > 1)
    return ", ".join(degrees) or "one device"


def describe(report: ServeReport) -> str:
    """Return a deployment in words."""
    from shardwise.serving.load import workers_of

    plan = report.base.plan
    many = f"{report.replicas} replicas" if report.replicas > 1 else "one replica"
    degrees = _degrees(plan)
    if report.prefill:
        first = report.prefill.base.plan
        degrees = f"{degrees} for decoding and {counted(workers_of(first), 'replica')} of {_degrees(first)} for prompts"
    return f"{many} of {degrees}: {report.base.case.engine.name}, {report.policy.text}"


def load_page(
    result: LoadResult,
    command: Sequence[str],
    notes_and_width: tuple[Sequence[str], int],
    used: Energy | None = None,
) -> Page:
    """Return the answer of a search as a page, with the energy of the best where it was asked for."""
    notes, width = notes_and_width
    page = Page(width)
    shown = result.best[0] if result.best else result.nearest
    rate = load_text(result.workload)
    if result.best:
        _best(page, result, rate)
    else:
        wanted = f"keeps the limits at {rate}" if result.limits else f"carries {rate}"
        page.label("NONE", f"no deployment of the space {wanted}", "bold red", "bold")
        if result.nearest is not None:
            page.note(f"the last one simulated: {result.nearest.devices} devices, {describe(result.nearest)}")
            limit_lines(result.nearest, page, result.nearest.broken)
            chance_line(result.nearest, page)
    page.note(
        f"{result.layouts:,} layouts and batch limits by the closed form, {result.simulated} simulated, "
        f"in {show_seconds(result.seconds)}", "dim",
    )  # fmt: skip
    energy_lines(page, used, "all requests")
    page.blank()
    _front(page, result)
    rejected(page, result.rejected)
    page.blank()
    page.label("ASSUMED", "")
    page.items(tuple(dict.fromkeys((*notes, *(shown.assumptions if shown is not None else ())))))
    if command:
        command_lines(page, "AGAIN" if result.best else "NEAREST", command)
    return page


def _best(page: Page, result: LoadResult, rate: str) -> None:
    from shardwise.serving.load import FULLEST

    best = result.best[0]
    device = best.base.case.cluster.device.name
    title = f"{best.base.case.model.name} at {rate}: {best.devices} x {device}"
    page.label("BEST", title, "bold green", "bold")
    page.note(describe(best), "bold")
    asked, made = (length.mean for length in (result.workload.input_tokens, result.workload.output_tokens))
    page.note(f"requests of {asked:,.0f} tokens in and {made:,.0f} out")
    limit_lines(best, page, result.limits)
    if not result.limits:
        _unlimited(page, best)
    chance_line(best, page)
    if best.chance_to_meet < 0.5 and not best.options.risk:
        what = "to miss than to keep them" if result.limits else "not to carry it"
        page.note(f"likelier {what}, by published runs: --risk 80% asks for more room")
    page.note(f"capacity about {rate_text(best.capacity_per_second)}")
    if best.usd_per_hour is not None:
        page.note(f"${best.usd_per_hour:,.2f} an hour")
    fewer = result.fewer
    if fewer is not None:
        page.note(f"with {counted(fewer.replicas, 'replica')}:")
        if fewer.meets:
            page.note(f"they carry it at {fewer.utilisation:.0%} of their capacity, a plan leaves {1 - FULLEST:.0%}")
            chance_line(fewer, page)
        elif fewer.stable:
            limit_lines(fewer, page, fewer.broken)
            chance_line(fewer, page)
        else:
            page.note(f"the queue grows by {rate_text(fewer.growth_per_second)}")
    for number, other in enumerate(result.best[1:], 2):
        page.note(f"{number}. {other.devices} devices: {describe(other)}")


def _unlimited(page: Page, best: ServeReport) -> None:
    """Append the latencies of a deployment that no limit was asked of: the fewest devices may answer slowly."""
    known = [(metric, best.latencies[metric].get("p99")) for metric in ("ttft", "tpot")]
    shown = ", ".join(f"p99 {metric.upper()} {show_seconds(value)}" for metric, value in known if value)
    if shown:
        page.note(f"{shown}; no limit was asked of them (--p99-ttft, --p99-tpot)", "bold")


def _front(page: Page, result: LoadResult) -> None:
    """Append the front of tokens a second of a device against those of a user, thinned to a page."""
    points = result.front
    if not points:
        return
    page.add(("FRONT  output tokens/s of a device and of a user", "bold"))
    kept = [
        points[round(i * (len(points) - 1) / max(min(len(points), _FRONT) - 1, 1))]
        for i in range(min(len(points), _FRONT))
    ]
    rows = [["tokens/s/GPU", "tokens/s/user", "TTFT", "requests/s", "replica"]]
    for point in kept:
        each = f"{point.tokens_per_second_per_gpu:,.0f}", f"{point.tokens_per_second_per_user:,.0f}"
        rows.append([*each, show_seconds(point.ttft_seconds), f"{point.rate:,.2f}", _degrees(point.plan)])
    page.table(rows, right=(0, 1, 2, 3), header=True, indent=0)
    page.blank()
