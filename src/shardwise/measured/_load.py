"""From a row of a run under load to a prediction: the workload that the row states, simulated by `serve`.

A run is finite: where its requests come faster than they are served, its latencies are those of just these requests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardwise.hardware import Lookup, build_cluster
from shardwise.measured._at_once import as_run
from shardwise.measured._comparison import Prediction
from shardwise.measured._record import Record, read, refuse
from shardwise.plans import Arrivals, Length, Plan, Serving, Workload
from shardwise.records import replace
from shardwise.serving import Engine, InferReport, ServingOptions
from shardwise.serving.load import (
    LoadOptions,
    ServeReport,
    band_of_parts,
    client_seconds,
    limits_of,
    parts_of,
    policy_of,
    serve,
)

# What `serve` calls the metrics of files; a suffix such as _p99 names the percentile, none the mean.
_LATENCIES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "request_latency": "e2e"}
_RATES = (
    *("output_tokens_per_second", "output_tokens_per_second_per_gpu", "total_tokens_per_second", "request_throughput"),
)
_MOST = 4000
# Draws that stand for lengths of which there are two.
_OF_TWO = 1000
# Requests that clients of closed loops ask for each user (github.com/SemiAnalysisAI/InferenceX benchmarks: num-prompts
# of ten times the concurrency), and the most that are simulated: the first of each user come at once, so that of fewer
# most would be that rush.
_OF_A_USER, _OF_USERS = 10, 60_000
# Tokens that recipes leave beside prompt and requests (github.com/SemiAnalysisAI/InferenceX benchmarks/*_trt*.sh).
_SPARE = 64
# Steps for which recipes of attention data parallelism let prompts wait (the same, attention_dp_config timeout_iters).
_BALANCE = 60
_AT_ONCE = ("inf", "infinity")
# Share of a rate below which a client that may hold so many requests did not keep it; short stages are 1 to 2 % off.
_KEPT = 0.97


def under_load(record: Record) -> bool:
    """Return whether a row is of requests that arrive over time: at a rate, or in a closed loop of so many."""
    return record.text("serving_mode") in ("online", "disaggregated") and (
        has_rate(record) or record.whole("concurrency") > 0
    )


def has_rate(record: Record) -> bool:
    """Return whether a row states the rate of an open loop, infinite where all requests come at once."""
    return record.text("request_rate").lower() in _AT_ONCE or record.number("request_rate") > 0


def metric_of(record: Record) -> tuple[str, str]:
    """Return the latency and the percentile that a row measured, or a rate and nothing; raises for others."""
    metric = record.text("metric")
    if metric == "tpot" and record.notes.get("source_metric", "").startswith("itl"):
        metric = "itl"
    if metric in _RATES:
        return metric, ""
    name, _, quantile = metric.rpartition("_p")
    base = name if name in _LATENCIES else metric
    if base not in _LATENCIES or (base != metric and quantile not in ("50", "90", "95", "99")):
        raise refuse("metric", metric, "is not a quantity of a run under load that is predicted")
    return _LATENCIES[base], "mean" if base == metric else f"p{quantile}"


def _length(record: Record, name: str, closed: bool, context: int) -> Length:
    """Return the lengths of a row: spread about the mean where the row says so, or where equal ones march in step.

    Notes say `lengths` of both, `input_lengths` or `output_lengths` of one. Both share the context by their means.
    """
    mean = max(record.number(name), 1.0)
    both = record.number("input_tokens") + record.number("output_tokens")
    table = read("engines.toml")["load"]
    spread = record.notes.get(name.replace("_tokens", "_lengths")) or record.notes.get("lengths", "")
    if either := _either(spread, mean):
        return either
    if "distribution" in spread:
        record.rule_value("lengths")
        most = context * mean / max(both, 1.0)
        if name == "output_tokens":
            most = min(most, table["output_most"] * mean)
        return Length(kind="lognormal", mean=mean, cv=table[name.replace("tokens", "cv")], high=round(max(most, mean)))
    shares = _shares(spread)
    if (shares or closed) and spread != "fixed":
        low, high = shares or (1 - table["closed_spread"], 1 + table["closed_spread"])
        least, most = max(round(mean * low), 1), max(round(mean * high), 1)
        return Length(kind="uniform", mean=(least + most) / 2, low=least, high=most)
    return Length(mean=max(round(mean), 1))


def _shares(text: str) -> tuple[float, float] | None:
    """Return the least and the most of lengths drawn evenly, as shares of the stated one, as the notes say them.

    >>> _shares("0.8 to 1"), _shares("fixed")
    ((0.8, 1.0), None)
    """
    match = re.fullmatch(r"(\d{1,6}(?:[.]\d{1,6})?) to (\d{1,6}(?:[.]\d{1,6})?)", text)
    return (float(match[1]), float(match[2])) if match and 0 < float(match[1]) <= float(match[2]) else None


def _either(text: str, mean: float) -> Length | None:
    """Return lengths that are one of two, in the shares that have the stated mean, as the notes say them.

    Random prompts end so where no end is forced: some answers soon, the rest at the limit.

    >>> (found := _either("30 or 2048", 635.4)).mean, found.values.count(2048) / len(found.values)
    (635.4, 0.3)
    """
    match = re.fullmatch(r"(\d{1,7}) or (\d{1,7})", text)
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 0 < low <= mean <= high or low == high:
        return None
    longer = round(_OF_TWO * (mean - low) / (high - low))
    return Length(kind="empirical", mean=mean, values=(low,) * (_OF_TWO - longer) + (high,) * longer)


def _count(record: Record, arrivals: Arrivals) -> int:
    """Return the requests of a run: as many as it says, or as its time holds, never more than tails need."""
    stated = int(record.noted("num_requests"))
    if not stated and record.noted("stage_seconds"):
        stated = int(arrivals.rate * record.noted("stage_seconds"))
    usual = int(record.noted("requests_of_a_user")) * arrivals.users or max(_OF_A_USER * arrivals.users, 500)
    most = max(_MOST, min(_OF_A_USER * arrivals.users, _OF_USERS), stated if record.noted("first_prompts") else 0)
    return max(min(stated or usual, most), arrivals.users, 1)


def replayed(record: Record, asked: Workload, requests: Sequence[tuple[float, int, int]]) -> Workload:
    """Return the workload of a row asked request by request, as these came: arrival, input and output tokens of each.

    Users of a closed loop take them in turn.
    """
    if not requests:
        return asked
    record.assume(f"{len(requests)} requests one by one, as they stand beside the rows")
    closed = asked.arrivals.kind == "closed"
    start = requests[0][0]
    times = tuple(arrival - start for arrival, *_ in requests)
    return replace(
        asked,
        arrivals=asked.arrivals if closed else Arrivals(kind="trace", times=times),
        pairs=tuple((prompt, made) for _, prompt, made in requests),
        input_tokens=Length(mean=sum(prompt for _, prompt, _ in requests) / len(requests)),
        output_tokens=Length(mean=sum(made for *_, made in requests) / len(requests)),
        count=len(requests),
    )


def workload_of(record: Record, replicas: int, context: int) -> Workload:
    """Return the requests that a row states, over contexts of so many tokens; raises `InputError` for too little."""
    at_once = record.text("request_rate").lower() in _AT_ONCE
    rate, users = 0.0 if at_once else record.number("request_rate"), record.whole("concurrency")
    if rate and record.noted("client_concurrency") and 0 < record.noted("achieved_rate") < _KEPT * rate:
        # A client that may not send more asks as soon as it has an answer, as so many users do.
        rate, users = 0.0, int(record.noted("client_concurrency"))
    words = record.notes.get("arrivals", "").split(" ")[0]
    if at_once:
        arrivals = Arrivals(kind="burst")
    elif rate:
        if words not in ("constant", "poisson"):
            record.rule_value("arrivals")
        elif words == "constant" and _of_inference_perf(record):
            words = record.rule_value("constant_arrivals")
        arrivals = Arrivals(kind="constant" if words == "constant" else "poisson", rate=rate)
    else:
        record.rule_value("closed_loop")
        # Of users beyond the requests of a run none ever asks.
        asking = min(users, int(record.noted("num_requests")) or users)
        arrivals = Arrivals(kind="closed", users=max(asking, replicas))
    closed = arrivals.kind == "closed"
    prompt, made = (_length(record, name, closed, context) for name in ("input_tokens", "output_tokens"))
    if closed:
        # What the client takes before its next request is read: the next step has begun by then.
        arrivals = replace(arrivals, think_seconds=_client_seconds(record, prompt.mean))
    cached, prefix = 0.0, 0
    if record.notes.get("enable_prefix_caching") != "0":
        prefix = min(record.whole("prefix_tokens"), max(round(prompt.mean) - 1, 0))
        if _of_inference_perf(record) and prefix:
            record.rule_value("repeated_prompts")
            cached = 1.0
    asked = Workload(
        input_tokens=prompt, output_tokens=made, arrivals=arrivals, prefix_tokens=prefix, cached_share=cached,
        count=_count(record, arrivals), finite=True,
    )  # fmt: skip
    prompts = int(record.noted("first_prompts")) if cached else 0
    return _asked_first(asked, min(prompts, asked.count)) if prompts else asked


def _of_inference_perf(record: Record) -> bool:
    """Return whether the notes of a row name inference-perf, whose words are its own."""
    return any("inference-perf" in note for note in record.notes.values())


def _asked_first(asked: Workload, prompts: int) -> Workload:
    """Return a workload whose prompts, so many in turn, are in no cache before each was asked once."""
    tokens, made, start = round(asked.input_tokens.mean), round(asked.output_tokens.mean), asked.prefix_tokens
    blocks = tuple(((0, start), (1 + turn, tokens - start)) for turn in range(prompts))
    repeats = -(-asked.count // prompts)
    return replace(
        asked, prefix_tokens=0, cached_share=0.0, pairs=((tokens, made),) * asked.count,
        blocks=(blocks * repeats)[: asked.count],
    )  # fmt: skip


def report_of(
    record: Record,
    base: InferReport,
    prompts: tuple[Plan, str] | None,
    requests: Sequence[tuple[float, int, int]] = (),
) -> ServeReport:
    """Return the simulated run of a row on the deployment that the row states.

    `prompts` are the plan and the engine of a pool for prompts, if it has one.
    """
    prefill, engine = prompts or (None, "")
    case, device = base.case, base.case.cluster.device
    case = replace(case, engine=engine_as_noted(record, case.engine))
    limits = limits_of(case.engine.name, device)
    job = Serving(
        weights=case.job.weights, kv_cache=case.job.kv_cache, memory_fraction=case.job.memory_fraction,
        max_batched_tokens=record.whole("max_num_batched_tokens"),
        max_sequences=int(record.noted("max_num_seqs")) or min(limits.sequences, _MOST),
    )  # fmt: skip
    balances = case.engine.name.startswith("tensorrt-llm") and record.whole("attention_dp") > 1 and prefill is None
    if balances:
        record.rule_value("balanced_prompts")
    options = LoadOptions(
        serving=ServingOptions(engine=case.engine), prefill=prefill, prefill_engine=engine,
        async_scheduling=bool(record.noted("async_scheduling")) if "async_scheduling" in record.notes else None,
        api_server_seconds=_api_server_seconds(record),
        batch_wait=(int(record.noted("batch_wait_steps")), min(record.noted("batch_wait_share"), 1.0)),
        balance_steps=_BALANCE if balances else None,
        receive_steps=int(record.noted("scheduler_recv_interval")) or None,
    )  # fmt: skip
    model = as_run(record, case.model)
    context = record.whole("max_model_len") or model.max_context or 10**6
    policy = policy_of(case.engine.name, device, 1, context)
    # What ran fitted the steps of an engine that does not cut prompts, beside all that may decode.
    tokens = job.max_batched_tokens or policy.step_tokens
    whole = tokens - job.max_sequences if policy.mixed and not policy.chunked else context
    asked = replayed(record, workload_of(record, case.plan.dp, min(context, whole)), requests)
    fitted = re.fullmatch(r"prompt and requests(?: and (\d{1,6}))?", record.notes.get("step_tokens", ""))
    spare = int(fitted[1]) if fitted and fitted[1] else _SPARE
    least_sequences = asked.longest[0] + asked.arrivals.users + spare
    if (
        policy.mixed
        and not policy.chunked
        and not job.max_batched_tokens
        and (least_sequences > policy.step_tokens or fitted)
    ):
        if not fitted:
            record.rule_value("whole_prompts")
        job = replace(job, max_batched_tokens=-(-least_sequences // _SPARE) * _SPARE)
    cluster = case.cluster
    if prefill is not None:
        count = prefill.num_devices + case.plan.num_devices
        cluster = build_cluster(f"{count}x{device.name}", Lookup(device=device, assumptions=()), {"num_devices": count})
    return serve(model, cluster, case.plan, asked, job, options)


def engine_as_noted(record: Record, engine: Engine) -> Engine:
    """Return the engine of a row with the tokens that its graphs hold and its kernels of experts, as the notes say."""
    if record.notes.get("experts") == "marlin":
        engine = replace(engine, operators=replace(engine.operators, experts_kernel="marlin"))
    if "captured_tokens" not in record.notes:
        return engine
    tokens = int(record.noted("captured_tokens"))
    if engine.host.captured_by_memory:
        return replace(engine, host=replace(engine.host, captured_sequences=tokens))
    return replace(
        engine, host=replace(engine.host, captured_tokens=tokens, captured_of_family=(), captured_per_sequence=0)
    )


def _check_cache(report: ServeReport) -> None:
    """Raise where the cache does not hold the requests of a closed loop: what then waits, and how long, is not stated.

    Requests in flight hold half of their output on average, or all of it where the engine keeps room for it.
    """
    asked = report.workload
    users = -(-asked.arrivals.users // report.base.plan.dp)
    share = max(report.policy.reserved_share, 0.5)
    room = int(report.base.kv_cache_tokens / (asked.input_tokens.mean + share * asked.output_tokens.mean))
    if users > room:
        raise refuse("concurrency", users, f"on a replica are more than its cache holds, about {room}")


def predicted(record: Record, report: ServeReport) -> Prediction:
    """Return the value of a row's metric: what the client saw, unless the row says that the server measured."""
    metric, quantile = metric_of(record)
    if not report.requests:
        raise refuse("model", record.text("model"), "does not fit with one request of the run")
    if not quantile:
        rate, prompts = report.output_tokens_per_second, sum(r.input_tokens for r in report.requests)
        value = {
            "output_tokens_per_second": rate,
            "output_tokens_per_second_per_gpu": rate / report.devices,
            "request_throughput": report.requests_per_second,
            "total_tokens_per_second": rate + prompts / report.span_seconds,
        }[metric]
    else:
        # A full cache bounds what is served; latencies are those of whoever waits for it.
        if report.workload.arrivals.kind == "closed":
            _check_cache(report)
        value = report.latencies[metric][quantile]
        if metric in ("ttft", "e2e") and not _at_server(record):
            value += _client_seconds(record, report.workload.input_tokens.mean)
    known, parts = report.conditions(quantile), _parts(report, metric, quantile)
    headline = next(iter(parts), "") if len(parts) < 2 else f"load.{metric}_seconds"
    return Prediction(
        value=value,
        interval=band_of_parts(parts, known).around(value) if parts else None,
        assumed=(),
        fits=report.base.fits,
        headline=headline,
        parts=parts,
        # Of tails one counts: the farthest.
        conditions=known if headline and quantile not in ("p90", "p95") else None,
    )


def _at_server(record: Record) -> bool:
    """Return whether a row's latencies are those of the engine's own clock."""
    return "server-side" in record.text("notes")


def _api_server_seconds(record: Record) -> float | None:
    """Return what a row's API server takes for each request, as its notes say; the engine's own clock has none of it.

    None where nothing is said: as of the release.
    """
    if "api_server_seconds" in record.notes:
        return record.noted("api_server_seconds")
    return 0.0 if _at_server(record) else None


def _client_seconds(record: Record, tokens: float) -> float:
    """Return what a client and the tokenizer add to the server's seconds: what the notes say, or what is usual."""
    if "client_seconds" in record.notes:
        return record.noted("client_seconds")
    record.rule_value("client")
    return client_seconds(tokens)


def _parts(report: ServeReport, metric: str, quantile: str) -> dict[str, float]:
    """Return the headlines that a row's metric is made of; none where throughput is what was asked, not carried."""
    if quantile:
        return parts_of(metric, quantile, report.latencies)
    full = report.workload.arrivals.kind in ("closed", "burst") or report.steady.utilisation > 1
    return parts_of("capacity", "", {}) if full else {}
