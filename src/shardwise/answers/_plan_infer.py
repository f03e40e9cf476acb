"""`shardwise plan infer`: the best ways to serve a model under limits, and why the others are not among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.answers import _case, _figures
from shardwise.answers._answer import Answer
from shardwise.answers._case import Inputs
from shardwise.answers._serve_flags import LIMITS, WHOLES, WORDS, serve_search_flags
from shardwise.answers._words import command_words
from shardwise.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.answers._page import Page
    from shardwise.search import SearchOptions, ServingResult, ServingSpace
    from shardwise.serving import InferReport


def space_of(inputs: Inputs, num_devices: int) -> ServingSpace:
    """Return the space that the flags restrict."""
    from shardwise.answers._plan import order_of
    from shardwise.search import ServingSpace, Wholes, upto

    given: dict[str, Any] = {key: Wholes.parse(inputs.values[key]) for key in WHOLES if key in inputs.values}
    given |= {key: inputs.values[key] for key in (*WORDS, "batch_step") if key in inputs.values}
    if "order" in inputs.values:
        given["orders"] = (order_of(inputs.values["order"]),)
    if inputs.get("at_most", False):
        given["devices"] = upto(num_devices)
    return ServingSpace(**given)


def options_of(inputs: Inputs) -> SearchOptions:
    """Return what is wanted: the objective and the limits."""
    from shardwise.search import SearchOptions

    limits = {name: inputs.values[key] for name, key in LIMITS.items() if key in inputs.values}
    return SearchOptions(
        objective=inputs.get("objective", "throughput"),
        top=inputs.get("top", 10),
        efficiencies=_case.make_efficiencies(inputs),
        **limits,
    )


def ask(inputs: Inputs) -> ServingResult:
    """Return the answer of a search; raises `InputError` with every problem."""
    from shardwise.plans import Serving
    from shardwise.search import plan_serving

    model, cluster = _case.load_the_model(inputs), _case.load_the_cluster(inputs)
    if model is None or cluster is None:
        raise InputError(dict.fromkeys(inputs.problems.items))
    # Batch and formats are searched, so the job is silent about them.
    searched = Inputs(values={key: v for key, v in inputs.values.items() if key not in (*WORDS, "batch")})
    job: Serving = _case.make_serving(searched, model)
    inputs.notes += searched.notes
    try:
        found = plan_serving(model, cluster, job, space_of(inputs, cluster.num_devices), options_of(inputs))
    except InputError as error:
        inputs.merge(error, dtype="weights")
        raise InputError(dict.fromkeys(inputs.problems.items)) from None
    inputs.problems.raise_if_any()
    return found


def case_of(inputs: Inputs, report: InferReport) -> dict[str, Any]:
    """Return the case of `infer` that one plan of the answer is."""
    from shardwise.answers._plan import on_devices

    plan, job = report.plan, report.job
    own = {key for key, flag in serve_search_flags().items() if flag.group in ("search", "space", "limits")}
    kept = {key: value for key, value in inputs.values.items() if key not in own | {"what", "order", "save"}}
    fixed: dict[str, Any] = {"on": on_devices(inputs, report.case.cluster.device.name, plan.num_devices)}
    fixed |= {key: getattr(plan, key) for key in ("tp", "pp", "dp")}
    fixed |= {key: getattr(plan, key) for key in ("ep", "etp") if getattr(plan, key) > 1}
    fixed |= {"order": plan.order} if plan.order != type(plan)().order else {}
    fixed |= {key: getattr(job, key) for key in ("batch", "input_tokens", "output_tokens")}
    if not report.case.model.generates:
        del fixed["output_tokens"]
    fixed |= {"weights": job.weights or report.case.format.name, "engine": report.case.engine.name}
    fixed |= {key: getattr(job, key) for key in ("kv_cache", "compute") if getattr(job, key)}
    return {**kept, **fixed}


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise plan infer`."""
    from shardwise.answers._plan import save_best

    found = ask(inputs)
    save_best(inputs, "infer", case_of(inputs, found.best[0]) if found.best else None)

    def words(report: InferReport) -> list[str]:
        return command_words("infer", case_of(inputs, report))

    def tree() -> dict[str, Any]:
        from shardwise.answers._plan_serve import serve_tree

        return serve_tree(found, [words(report) for report in found.best])

    def page() -> Page:
        from shardwise.answers._plan_serve_view import serve_page

        report = found.best[0] if found.best else found.nearest
        return serve_page(found, words(report) if report is not None else [], (tuple(inputs.notes), width))

    def draw() -> Figure:
        from shardwise.answers._plots_serving import serving_figure

        return serving_figure(found)

    return _figures.plotted(inputs, Answer(0 if found.best else 1, tree, page), draw)
