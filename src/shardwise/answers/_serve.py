"""`shardwise serve`: a deployment under load."""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from shardwise.answers import _case, _precision
from shardwise.answers._answer import Answer
from shardwise.answers._energy import asked_energy, energy_tree
from shardwise.answers._files import command_words
from shardwise.answers._inputs import Inputs
from shardwise.answers._load_tree import remedies_of, remedy_tree
from shardwise.answers._plot import check_drawable, plotted
from shardwise.answers._replica import fewest_devices
from shardwise.answers._request_counts import needed_count, stated_count, usual_count
from shardwise.answers._search_flags import TOKENS_RANGE, serve_flags, stages_of
from shardwise.answers._serve_page import serve_page
from shardwise.errors import InputError, Problem
from shardwise.records import replace
from shardwise.serving import infer
from shardwise.serving.load import ServeReport, prefill_plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.answers._page import Page
    from shardwise.hardware import Cluster
    from shardwise.plans import Arrivals, Length, Limit, Plan, RequestClass, Serving, Workload
    from shardwise.serving import ServingOptions
    from shardwise.serving.load import Autoscale


_USUAL = {"input_tokens": 512, "output_tokens": 128}
_QUANTILED = ("mean_", "p50_", "p90_", "p95_", "p99_")
_MOST_CLASSES = 100
_SOURCES = ("rate", "users", "trace", "stages")


def _length(values: Mapping[str, Any], name: str, usual: int) -> Length:
    """Return the distribution of tokens in or out."""
    from shardwise.plans import Length

    text, spread = str(values.get(name, usual)), f"{name.partition('_')[0]}_cv"
    cv = float(values.get(spread, 0.0))
    if match := TOKENS_RANGE.fullmatch(text):
        if spread in values:
            raise InputError([Problem(spread, cv, f"is given beside a range, {name} {text}", "leave out one of them")])
        low, high = int(match[1]), int(match[2])
        return Length(kind="uniform", mean=(low + high) / 2, low=low, high=high)
    return Length(kind="lognormal" if cv else "fixed", mean=int(text), cv=cv)


def _refuse_what_has_no_effect(inputs: Inputs, word: str, cv: str) -> None:
    """Record flags of arrivals that nothing reads beside what says when requests arrive."""
    for key, of in (("speed", "trace"), ("last", "trace"), ("think", "users")):
        if key in inputs.values and of not in inputs.values:
            inputs.fail(key, inputs.values[key], f"has no effect without --{of}", "leave it out")
    if cv and word != "gamma":
        inputs.fail("arrivals", f"{word}:{cv}", "has a number, and gaps of gamma alone have one", "write gamma:4")
    for key in ("rate", "users"):
        if {key, "arrivals"} <= inputs.values.keys() and (key == "users" or word == "burst"):
            inputs.fail("arrivals", word, f"has no effect beside --{key}", "leave out one of them")


def _arrivals(inputs: Inputs) -> Arrivals:
    """Return when requests arrive; records a problem where nothing or two things say so."""
    from shardwise.plans import Arrivals

    sources = [name for name in _SOURCES if name in inputs.values]
    word, _, cv = str(inputs.get("arrivals", "poisson")).partition(":")
    _refuse_what_has_no_effect(inputs, word, cv)
    if not sources and (word == "burst" or inputs.bad & {*_SOURCES}):
        return Arrivals(kind="burst")
    if len(sources) != 1:
        several, none = "is given beside " + " and ".join(sources[1:]), "is missing: nothing says when requests arrive"
        # A search takes no trace.
        ways = "--rate 50/s, --users 64" + ("" if inputs.command == "plan" else ", --trace FILE, --stages")
        inputs.problems.add(
            sources[0] if sources else "rate", None, several if sources else none, f"give one of {ways}"
        )
        return Arrivals(kind="burst")
    if sources == ["users"]:
        return Arrivals(kind="closed", users=inputs.values["users"], think_seconds=inputs.values.get("think"))
    if word not in ("poisson", "constant", "gamma", "burst"):
        inputs.problems.add("arrivals", word, "is not a way to arrive", "use poisson, constant, gamma:CV or burst")
    try:
        spread = float(cv or 1.0)
    except ValueError:
        inputs.problems.add("arrivals", f"{word}:{cv}", "must have a number behind the colon", "write gamma:4")
        spread = 1.0
    kind: Any = word if word in ("constant", "gamma", "burst") else "poisson"
    if sources == ["stages"]:
        random = Random(f"stages {inputs.get('seed', 0)}")
        return Arrivals(kind=kind, cv=spread).through(stages_of(inputs.values["stages"]), random)
    return Arrivals(kind=kind, rate=inputs.get("rate", 0.0), cv=spread)


_LENGTHS = ("input_tokens", "output_tokens", "input_cv", "output_cv", "prefix_tokens")
Classes: TypeAlias = "tuple[RequestClass, ...]"


def _class_values(table: Mapping[str, Any], name: str, inputs: Inputs) -> dict[str, Any]:
    """Return the values of a class of requests, read as flags are; records what is wrong under its name."""
    flags, values = serve_flags(), {}
    known = {"share": flags["cached_share"].kind} | {key: flags[key].kind for key in _LENGTHS}
    known |= {key: flag.kind for key, flag in flags.items() if key.startswith(_QUANTILED) and not key.endswith("_itl")}
    for key, value in table.items():
        if key == "name":
            continue
        if key not in known:
            rule = "is nothing that a class of requests has"
            inputs.fail(f"{name}.{key}", value, rule, "use name, share, input_tokens, output_tokens, p99_ttft, ...")
            continue
        try:
            values[key] = known[key].read(value, f"{name}.{key}")
        except InputError as error:
            inputs.merge(error)
    for key in ("share", "input_tokens", "output_tokens"):
        if key not in table:
            inputs.fail(f"{name}.{key}", None, "is missing", f"say {key} of the class")
    return values


def _is_named(table: object) -> bool:
    name = table.get("name") if isinstance(table, dict) else None
    return isinstance(name, str) and 1 <= len(name) <= 40 and name.isprintable()


def classes_of(inputs: Inputs) -> tuple[Classes, tuple[Limit, ...]]:
    """Return the classes of requests of a TOML file, and the limits of each; records what is wrong with them."""
    from shardwise.files import read_toml
    from shardwise.plans import RequestClass

    if "classes" not in inputs.values:
        return (), ()
    for key in ("trace", *_LENGTHS):
        if key in inputs.values:
            remedy = "leave out one of them" if key == "trace" else "say it in their file"
            inputs.fail(key, inputs.values[key], "is given beside classes of requests", remedy)
    try:
        tables = read_toml(inputs.values["classes"], "classes").get("class")
    except InputError as error:
        inputs.merge(error)
        return (), ()
    if not isinstance(tables, list) or not 1 <= len(tables) <= _MOST_CLASSES or not all(map(_is_named, tables)):
        rule = f"must hold 1 to {_MOST_CLASSES} tables [[class]], each with a name of up to 40 letters"
        inputs.fail("classes", inputs.values["classes"], rule, 'write [[class]], name = "chat", share = 0.7, ...')
        return (), ()
    classes, limits = [], []
    for table in tables:
        name = table["name"]
        values = _class_values(table, name, inputs)
        sizes = [_length(values, key, 1) for key in ("input_tokens", "output_tokens")]
        prefix, share = values.get("prefix_tokens", 0), values.get("share", 0.0)
        classes.append(
            RequestClass(name=name, share=share, input_tokens=sizes[0], output_tokens=sizes[1], prefix_tokens=prefix)
        )
        limits += [replace(limit, of=name) for limit in limits_of(values)]
    return tuple(classes), tuple(limits)


def _workload(inputs: Inputs, limits: tuple[Limit, ...], classes: Classes) -> Workload:
    """Return the workload of the flags."""
    from shardwise.plans import Length, Workload

    needed = needed_count(inputs, limits, {one.name: one.share or 1.0 for one in classes})
    changes = {
        key: inputs.values[key] for key in ("prefix_tokens", "cached_share", "seed", "finite") if key in inputs.values
    }
    timed = {"rate", "users", "stages"} & inputs.values.keys()
    for key in _LENGTHS if "trace" in inputs.values else ():
        if key in inputs.values:
            rule = "is given beside a trace, which has the lengths of its requests"
            inputs.fail(key, inputs.values[key], rule, "leave out one of them")
    if "trace" in inputs.values:
        from shardwise.formats.traces import read_lengths, read_trace

        named = inputs.values.pop("trace")
        try:
            lengths = read_lengths(named, _arrivals(inputs) if timed else None)
        finally:
            inputs.values["trace"] = named
        if lengths is not None:
            inputs.notes.append(f"{named}: lengths of {lengths.count} requests, in their order; it holds no times")
            return replace(lengths, count=stated_count(inputs, max(lengths.count, needed)), **changes)
    if "trace" in inputs.values and not timed:
        if "arrivals" in inputs.values:
            inputs.fail("arrivals", inputs.values["arrivals"], "has no effect beside a trace of times", "leave it out")
        workload = read_trace(inputs.values["trace"], float(inputs.get("speed", 1.0)), inputs.get("last", math.inf))
        return replace(workload, count=stated_count(inputs, workload.count, workload.count), **changes)
    arrivals = _arrivals(inputs)
    count = usual_count(inputs, arrivals, needed)
    if classes:
        asked, made = (
            Length(mean=sum(one.share * getattr(one, key).mean for one in classes))
            for key in ("input_tokens", "output_tokens")
        )
    else:
        for key, tokens in _USUAL.items():
            if key not in inputs.values:
                inputs.notes.append(f"{key} {tokens}: not given")
        asked, made = (_length(inputs.values, key, tokens) for key, tokens in _USUAL.items())
    return Workload(
        input_tokens=asked,
        output_tokens=made,
        arrivals=arrivals,
        classes=classes,
        count=count,
        **changes,
    )


def limits_of(given: Mapping[str, Any]) -> tuple[Limit, ...]:
    """Return the limits on latency that were given."""
    from shardwise.plans import METRICS, QUANTILES, Limit

    every = [(q, m) for q in QUANTILES for m in METRICS if f"{q}_{m}" in given]
    return tuple(Limit(metric=m, quantile=q, seconds=given[f"{q}_{m}"]) for q, m in every)


def workload_of(inputs: Inputs, limits: tuple[Limit, ...], classes: Classes = ()) -> Workload | None:
    """Return the workload of the flags; None with its problems recorded."""
    try:
        return _workload(inputs, limits, classes)
    except InputError as error:
        inputs.merge(error)
        return None


def deployment_of(inputs: Inputs, cluster: Cluster) -> tuple[Serving, ServingOptions]:
    """Return formats and memory, and the engine."""
    from shardwise.plans import Serving
    from shardwise.serving import ServingOptions

    given = inputs.values
    _precision.take_dtype(inputs, "weights")
    names = ("weights", "kv_cache", "compute", "memory_fraction", "max_batched_tokens", "max_sequences",
             "expert_imbalance", "adapter_rank", "adapters", "speculative_method", "num_speculative_tokens",
             "acceptance_rate", "acceptance_length", "draft_model", "gpu_layers", "cpu_experts", "host",
             "max_total_tokens", "kv_cache_memory", "language_model_only", "captured_sequences",
             "captured_sizes", "disable_cuda_graph_padding")  # fmt: skip
    job = Serving(**{key: given[key] for key in names if key in given}, misc_bytes=inputs.get("misc_memory", 0.0))
    engine = ServingOptions(engine=_case.engine_of(inputs, cluster), efficiencies=_case.make_efficiencies(inputs))
    return job, engine


def prefill_of(inputs: Inputs, plan: Plan) -> Plan | None:
    """Return the plan of the pool that computes prompts, None where one pool does both."""
    workers = inputs.get("prefill_workers", 0)
    given = [name for name in ("prefill_tp", "prefill_pp", "prefill_ep") if name in inputs.values]
    if not workers:
        if given:
            rule = "is of prefill workers, and there are none"
            inputs.problems.add(given[0], inputs.values[given[0]], rule, "add --prefill-workers 1")
        return None
    return prefill_plan(plan, workers, **{name.removeprefix("prefill_"): inputs.values[name] for name in given})


_SCALING = ("startup_time", "min_replicas", "scale_interval", "scale_down_after")


def autoscale_of(inputs: Inputs) -> Autoscale | None:
    """Return when replicas are started and stopped, None where all run all the time; records what is missing."""
    from shardwise.serving.load import Autoscale

    given = inputs.values
    if "autoscale" not in given:
        if given_keys := [key for key in _SCALING if key in given]:
            why = "is of replicas that follow the load"
            inputs.fail(given_keys[0], given[given_keys[0]], why, "add --autoscale running:32")
        return None
    metric, _, text = str(given["autoscale"]).partition(":")
    try:
        target = float(text)
    except ValueError:
        inputs.fail("autoscale", given["autoscale"], "is not METRIC:TARGET", "write for example running:32")
        return None
    if "startup_time" not in given:
        why = "is not known: it depends on image, disk and network"
        inputs.fail("startup_time", None, why, "measure it, and state for example --startup-time 90s")
    rule = Autoscale(
        metric=cast(Any, metric), target=target, start_seconds=given.get("startup_time", 0.0),
        least=given.get("min_replicas", 1), interval_seconds=given.get("scale_interval", 15.0),
        keep_seconds=given.get("scale_down_after", 300.0),
    )  # fmt: skip
    wrong = rule.problems().items
    inputs.problems.items.extend(wrong)
    return None if wrong else rule


def ask(inputs: Inputs) -> ServeReport:
    """Return the report of a deployment under load; raises `InputError` with every problem."""
    from shardwise.serving.load import LoadOptions, serve

    classes, class_values = classes_of(inputs)
    limits = (*limits_of(inputs.values), *class_values)
    model, cluster = _case.load_the_model(inputs), _case.load_the_cluster(inputs)
    workload = workload_of(inputs, limits, classes)
    if model is None or cluster is None or workload is None or inputs.problems.items:
        raise InputError(dict.fromkeys(inputs.problems.items))
    plan = replace(_case.make_plan(inputs), micro_batch=1)
    job, engine = deployment_of(inputs, cluster)
    options = LoadOptions(
        limits=limits, router=inputs.get("router", "round-robin"), serving=engine, prefill=prefill_of(inputs, plan),
        autoscale=autoscale_of(inputs), risk=inputs.get("risk", 0.0), settled="requests" not in inputs.values,
    )  # fmt: skip
    try:
        report = serve(model, cluster, plan, workload, job, options)
        own = report.base  # one request at once, which says what a replica holds before anything is simulated
        wider = fewest_devices(inputs, own, cluster, lambda other: infer(model, cluster, other, own.job, engine))
        report = report if wider == own.plan else serve(model, cluster, wider, workload, job, options)
    except InputError as error:
        inputs.merge(error, dtype="compute" if "compute" in inputs.values else "weights")
        raise InputError(dict.fromkeys(inputs.problems.items)) from None
    inputs.problems.raise_if_any()
    return replace(report, assumptions=tuple(dict.fromkeys((*inputs.notes, *report.assumptions))))


def measured_of(inputs: Inputs) -> dict[str, list[float]]:
    """Return the measured latencies that are drawn beside predicted ones; none where none were given."""
    if "against" not in inputs.values:
        return {}
    from shardwise.formats.latencies import read_latencies

    try:
        latencies = read_latencies(inputs.values["against"])
    except InputError as error:
        inputs.merge(error)
        return {}
    if "plot" not in inputs.values:
        inputs.fail("against", inputs.values["against"], "is drawn, and no plot was asked", "add --plot load.svg")
    return latencies


def _explained(inputs: Inputs, report: ServeReport, width: int) -> Answer:
    """Return a number of the closed form, opened."""
    from shardwise.answers._explain import opened_answer
    from shardwise.answers._explained import ExplainedNumber
    from shardwise.serving.load import explain

    what = inputs.values["explain"]
    unit = {"capacity": "", "utilization": ""}.get(what, "seconds")
    return opened_answer(inputs, width, ("serve", what), ExplainedNumber(explain(report, what), unit))


def simulated_again(report: ServeReport) -> dict[str, int]:
    """Return how many requests to ask for, so that a load is simulated as it was.

    Those that are asked for are simulated of the whole fleet: of a part of one none are named.
    """
    return {"requests": report.workload.count} if report.share == 1 else {}


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise serve`."""
    check_drawable(inputs)
    measured = measured_of(inputs)
    for key in ("path", "depth"):
        if key in inputs.values and "explain" not in inputs.values:
            inputs.fail(key, inputs.values[key], "has no effect without --explain", "leave it out")
    for key in ("energy", "pue", "grid_intensity"):
        if key in inputs.values and "explain" in inputs.values:
            inputs.fail(key, inputs.values[key], "is no part of what --explain opens", "ask one after the other")
    report = ask(inputs)
    if "explain" in inputs.values:
        return _explained(inputs, report, width)
    plan = report.base.plan
    # Remedies choose how many requests they need, as long as nobody says how many: what is typed with one does too.
    fixed = {"tp": plan.tp, "pp": plan.pp, "dp": plan.dp, **(simulated_again(report) if report.meets else {})}
    remedies = remedies_of(report)
    used = asked_energy(inputs, report)

    def tree() -> dict[str, Any]:
        return {**report.own_values(), **energy_tree(used), "remedies": [remedy_tree(one) for one in remedies]}

    def page() -> Page:
        return serve_page(report, command_words("serve", {**inputs.values, **fixed}), width, remedies, used)

    def draw() -> Figure:
        from shardwise.answers._plots_load import load_figure

        return load_figure(report, measured)

    return plotted(inputs, Answer(0 if report.meets else 1, tree, page), draw)
