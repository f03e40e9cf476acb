"""`shardwise plan train MODEL --on CARD --adapter lora`: which format, savers and length fit, the quickest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwise.answers._answer import Answer, whole_bytes
from shardwise.answers._files import command_words
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import Page, assumptions, command_lines
from shardwise.answers._search_flags import FAST, JOBS, LISTS, WHOLES, WORDS, plan_search_flags
from shardwise.errors import InputError, Problem
from shardwise.records import replace
from shardwise.units import show_bytes

if TYPE_CHECKING:
    from shardwise.answers._page import Page
    from shardwise.search import TuningRecipe
    from shardwise.training import TrainReport


def tunes(inputs: Inputs) -> bool:
    """Return whether adapters on given devices are asked for, with no batch and no degrees to search."""
    given = inputs.values.keys() | inputs.bad
    return bool(given & {"adapter", "base"}) and not searched_keys(inputs)


def searched_keys(inputs: Inputs) -> list[str]:
    """Return the keys that make a question about adapters one of a search over plans of one batch."""
    several = {key for key in JOBS if isinstance(inputs.get(key), tuple)}
    return sorted((inputs.values.keys() | inputs.bad) & {"global_batch", *several, *WHOLES, *FAST, *WORDS, *LISTS})


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer: 0 where some way fits, else 1."""
    from shardwise.answers import _train
    from shardwise.search import tuning_recipes

    _check_wishes(inputs)
    inputs.values["micro_batch"] = 1
    base = _train.trained(inputs)
    if refused := [problem for problem in base.unlaunched if problem.field in ("adapter", "base")]:
        raise InputError(refused)
    recipes = tuning_recipes(base)[: inputs.get("top")]
    remedies, most = ([], "") if recipes else _remedies(inputs, base)

    def tree() -> dict[str, Any]:
        lists = {"recipes": recipes, "remedies": remedies} if remedies else {"recipes": recipes}
        return {key: whole_bytes([_recipe(one) for one in ways]) for key, ways in lists.items()}

    def page() -> Page:
        if recipes or remedies:
            return _page(base, recipes or remedies, inputs, bool(recipes), width)
        return _hopeless(base, most, width)

    return Answer(0 if recipes else 1, tree, page)


def quickest_report(inputs: Inputs) -> TrainReport:
    """Return the report of the quickest way that fits; raises `InputError` where none does."""
    from shardwise.answers import _train
    from shardwise.search import quickest

    _check_wishes(inputs)
    way = quickest(_train.trained(replace(inputs, values={**inputs.values, "micro_batch": 1})))
    if way is None:
        remedy = "more devices, a shorter --seq-len or a smaller model"
        raise InputError([Problem("plan", None, _NOTHING, remedy)])
    return way[1]


def tuned_in_words(report: TrainReport) -> str:
    """Return what a way to fine-tune chooses: formats, recomputation, loss and what lies on the host."""
    base, width, again, loss = _choices(report)
    away = f", {' and '.join(report.plan.offload)} on the host" if report.plan.offload else ""
    adapters = f", adapters of {width}" if width else ""
    return f"base {base}{adapters}, recompute {again.removesuffix(' on host')}, loss {loss}{away}"


def _remedies(inputs: Inputs, base: TrainReport) -> tuple[list[TuningRecipe], str]:
    """Return what fits where nothing does as asked, and the most devices that were tried.

    Under other frameworks, with shorter sequences, on more devices.
    """
    from shardwise.search import elsewhere, shorter

    less, (more, most) = shorter(base), _on_more(inputs)
    return [*elsewhere(base)[: inputs.get("top")], *([less] if less else []), *more], most


def _on_more(inputs: Inputs) -> tuple[list[TuningRecipe], str]:
    """Return the quickest way on the least of two, four and eight times as many devices, and the most that were tried.

    So are nodes and instances. A cluster's file is not, nor are nodes whose network is not known.
    """
    from shardwise.answers import _train
    from shardwise.hardware import counted_text
    from shardwise.search import TuningRecipe, longest_sequence, quickest

    text, most = str(inputs.values["on"]), ""
    whole = text.endswith(".toml") and not text[0].isdigit()
    number, of_node, name = (None, None, "") if whole else counted_text(text)
    for times in () if whole else (2, 4, 8):
        on = "x".join([str(times * int(number or 1)), *([of_node] if of_node else []), name])
        grown = Inputs(values={**inputs.values, "on": on}, imported=inputs.imported, command=inputs.command)
        try:
            way, most = quickest(_train.trained(grown)), on
        except InputError:
            break
        if way is not None:
            flags, report = way
            longest = longest_sequence(report)
            return [TuningRecipe(flags=f"--on {on} {flags}".strip(), report=report, longest=longest)], most
    return [], most


def _check_wishes(inputs: Inputs) -> None:
    """Record the wishes of a search of plans that ways to fine-tune do not know."""
    wishes = {key for key, flag in plan_search_flags().items() if flag.group in ("search", "limits")}
    for key in sorted({*wishes, "plot"} - {"top", "workers"}):
        if key in inputs.values:
            rule = "is asked of plans, and these are ways to fine-tune on given devices"
            inputs.fail(key, inputs.values[key], rule, "give --global-batch to search plans, or leave it out")


def _recipe(one: TuningRecipe) -> dict[str, Any]:
    report = one.report
    return {
        "flags": one.flags,
        "device_bytes": report.device_bytes,
        "host_bytes": report.host_bytes,
        "step_seconds": report.step_seconds,
        "tokens_per_second_per_gpu": report.tokens_per_second_per_gpu,
        "longest_seq_len": one.longest,
        "chance_to_fit": report.chance_to_fit,
    }


def _head(base: TrainReport, width: int) -> Page:
    page, job = Page(width), base.job
    where = f"{base.case.model.name} on {base.plan.num_devices} x {base.case.cluster.device.name}"
    words = f"{where}: {job.adapter or 'no adapter'}, {job.seq_len:,} tokens, stack {base.case.stack.name}"
    page.label("TUNE", words, "bold", "bold")
    return page


_NOTHING = "nothing fits, whatever savers are used, weights sharded or on the host"


def _hopeless(base: TrainReport, most: str, width: int) -> Page:
    page = _head(base, width)
    page.note(_NOTHING, "bold red")
    more = f", nor on {most}" if most else ""
    page.note(f"nor with 256 tokens or under other frameworks{more}: take a smaller model")
    return page


def _page(base: TrainReport, ways: Sequence[TuningRecipe], inputs: Inputs, fits: bool, width: int) -> Page:
    page, word = _head(base, width), ways[0].report.plan.sharding
    if not fits:
        page.note(_NOTHING, "bold red")
        page.items(f"{_instead(one)}: {_summary(one)}" for one in ways)
    else:
        if "parameters" in ways[0].report.plan.offload:
            away = "weights, gradients and optimizer on the host"
            page.note(f"nothing fits but with {away}, each with --sharding {word}", "yellow")
        elif word != base.plan.sharding and all(one.report.plan.sharding == word for one in ways):
            page.note(f"each with --sharding {word}")
        _table(page, ways)
    page.blank()
    assumptions(page, base.assumptions)
    page.blank()
    command_lines(page, "NEXT", [*_words(inputs, ways[0].flags), *_pieces(ways[0].flags)])
    return page


def _instead(one: TuningRecipe) -> str:
    """Return what a remedy changes of the question, which its first flag says."""
    flag, value = one.flags.split()[:2]
    words = {"--stack": f"under {value}", "--seq-len": f"at {value} tokens", "--on": f"on {value}"}
    return f"fits {words[flag]}"


def _summary(one: TuningRecipe) -> str:
    rest = " ".join(one.flags.split()[2:])
    memory, host, rate, longest = _figures(one)
    kept = f", {host} on the host" if host else ""
    reach = f", up to {longest} tokens" if one.longest > one.report.job.seq_len else ""
    return f"{memory}{kept}, {rate} tokens/s{reach}{', with ' + rest if rest else ''}"


def _table(page: Page, recipes: Sequence[TuningRecipe]) -> None:
    rows: list[tuple[str, ...]] = [("base", "adapters", "recompute", "loss", "memory", "host", "tokens/s", "longest")]
    rows += [(*_choices(one.report), *_figures(one)) for one in recipes]
    right = (4, 5, 6, 7)
    if len({one.report.plan.sharding for one in recipes}) > 1:
        split = ["sharding", *(one.report.plan.sharding for one in recipes)]
        rows = [(*row[:1], word, *row[1:]) for row, word in zip(rows, split, strict=True)]
        right = (5, 6, 7, 8)
    page.table(rows, right, header=True, indent=2)


def _choices(report: TrainReport) -> tuple[str, str, str, str]:
    """Return how the frozen weights and the adapters are kept, what runs again, and the loss."""
    case = report.case
    kept = int(case.tuning.precision.weight_bytes) if case.tuning is not None and case.tuning.adapter else 0
    width = {0: "", 2: "16 bits", 4: "32 bits"}[kept]
    host = " on host" if "activations" in case.plan.offload else ""
    return case.job.base or "bf16", width, f"{case.plan.recompute}{host}", case.stack.loss_kernel


def _figures(one: TuningRecipe) -> tuple[str, str, str, str]:
    report = one.report
    host = show_bytes(report.host_bytes) if report.host_bytes else ""
    rate = f"{report.tokens_per_second_per_gpu:,.0f}"
    return show_bytes(report.device_bytes), host, rate, f"{one.longest:,}"


def _pieces(flags: str) -> list[str]:
    """Return flags, each with its value as one word."""
    return [f"--{one}".strip() for one in flags.split("--")[1:]]


def _words(inputs: Inputs, flags: str) -> list[str]:
    """Return the command of the asked job; the flags of a way come behind it, in place of those that were asked."""
    omitted = {"what", "top", "workers", "base", "adapter_precision", "loss", "offload"}
    omitted |= {piece.split()[0].removeprefix("--").replace("-", "_") for piece in _pieces(flags)}
    return command_words("train", {key: value for key, value in inputs.values.items() if key not in omitted})
