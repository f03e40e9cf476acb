"""`shardwise plan train MODEL --on CARD --adapter lora`: which format, savers and length fit, the quickest first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.answers._answer import Answer, whole_bytes
from shardwise.answers._files import command_words
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import Page, assumptions, command_lines
from shardwise.answers._search_flags import FAST, JOBS, LISTS, WHOLES, WORDS, plan_search_flags
from shardwise.errors import InputError
from shardwise.units import show_bytes

if TYPE_CHECKING:
    from shardwise.answers._page import Page
    from shardwise.search import TuningRecipe
    from shardwise.training import TrainReport


def tunes(inputs: Inputs) -> bool:
    """Return whether adapters on given devices are asked for, with no batch and no degrees to search."""
    given = inputs.values.keys() | inputs.bad
    several = {key for key in JOBS if isinstance(inputs.get(key), tuple)}
    return bool(given & {"adapter", "base"}) and not given & {"global_batch", *several, *WHOLES, *FAST, *WORDS, *LISTS}


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer: 0 where some way fits, else 1."""
    from shardwise.answers import _train
    from shardwise.search import tuning_recipes

    _check_wishes(inputs)
    inputs.values["micro_batch"] = 1
    base = _train.ask(inputs)
    if refused := [problem for problem in base.unlaunched if problem.field in ("adapter", "base")]:
        raise InputError(refused)
    recipes = tuning_recipes(base)[: inputs.get("top")]

    def tree() -> dict[str, Any]:
        return {"recipes": whole_bytes([_recipe(one) for one in recipes])}

    def page() -> Page:
        return _page(base, recipes, _words(inputs), width)

    return Answer(0 if recipes else 1, tree, page)


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


def _page(base: TrainReport, recipes: tuple[TuningRecipe, ...], asked_for: list[str], width: int) -> Page:
    page, job = Page(width), base.job
    where = f"{base.case.model.name} on {base.plan.num_devices} x {base.case.cluster.device.name}"
    page.label(
        "TUNE",
        f"{where}: {job.adapter or 'no adapter'}, {job.seq_len:,} tokens, stack {base.case.stack.name}",
        "bold",
        "bold",
    )
    if not recipes:
        page.note("nothing fits: a shorter sequence (--seq-len), a smaller model, or more devices", "bold red")
        return page
    rows: list[tuple[str, ...]] = [("base", "adapters", "recompute", "loss", "memory", "host", "tokens/s", "longest")]
    rows += [(*_choices(one), *_figures(one)) for one in recipes]
    right = (4, 5, 6, 7)
    if any(one.report.plan.sharding != base.plan.sharding for one in recipes):
        split = ["sharding", *(one.report.plan.sharding for one in recipes)]
        rows = [(*row[:1], word, *row[1:]) for row, word in zip(rows, split, strict=True)]
        right = (5, 6, 7, 8)
    page.table(rows, right, header=True, indent=2)
    page.blank()
    assumptions(page, base.assumptions)
    page.blank()
    command_lines(page, "NEXT", [*asked_for, *recipes[0].flags.split()])
    return page


def _choices(one: TuningRecipe) -> tuple[str, str, str, str]:
    """Return how the frozen weights and the adapters are kept, what runs again, and the loss."""
    case = one.report.case
    kept = int(case.tuning.precision.weight_bytes) if case.tuning is not None and case.tuning.adapter else 0
    width = {0: "", 2: "16 bits", 4: "32 bits"}[kept]
    host = " on host" if "activations" in case.plan.offload else ""
    return case.job.base or "bf16", width, f"{case.plan.recompute}{host}", case.stack.loss_kernel


def _figures(one: TuningRecipe) -> tuple[str, str, str, str]:
    report = one.report
    host = show_bytes(report.host_bytes) if report.host_bytes else ""
    rate = f"{report.tokens_per_second_per_gpu:,.0f}"
    return show_bytes(report.device_bytes), host, rate, f"{one.longest:,}"


def _words(inputs: Inputs) -> list[str]:
    """Return the command of the asked job; the flags of a way come behind it."""
    omitted = ("what", "top", "workers", "base", "adapter_precision", "loss", "offload")
    return command_words("train", {key: value for key, value in inputs.values.items() if key not in omitted})
