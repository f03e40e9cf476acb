"""From a row of an inference file to a prediction: the deployment, the batch and the engine that the row states."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.errors import InputError, Known
from shardwise.hardware import Cluster, Device, Lookup, build_cluster
from shardwise.measured._comparison import Prediction
from shardwise.measured._context import Context
from shardwise.measured._frameworks import FIXED, engine_of, narrows_cache, served_step_tokens
from shardwise.measured._inference_metrics import interval_of, value_of
from shardwise.measured._load import metric_of, predicted, report_of, under_load
from shardwise.measured._record import Record, read, refuse, words
from shardwise.models import Model
from shardwise.plans import Plan, Serving
from shardwise.records import replace
from shardwise.serving import InferReport, ServingOptions, find_format, infer
from shardwise.serving.load import ServeReport, limits_of

SETTINGS = (
    *("model", "device", "num_gpus", "tp", "pp", "ep", "dp", "attention_dp", "engine", "engine_version"),
    *(
        "serving_mode",
        "weight_dtype",
        "activation_dtype",
        "kv_dtype",
        "batch",
        "concurrency",
        "input_tokens",
        "output_tokens",
    ),
    *("prefix_tokens", "memory_utilization", "max_model_len", "max_num_batched_tokens", "notes"),
    *("num_prefill_workers", "num_decode_workers"),
)
_REFUSED = {
    "online": "neither a rate (request_rate) nor requests in flight (concurrency) are stated",
    "disaggregated": "neither a rate (request_rate) nor requests in flight (concurrency) are stated",
}
_MODES = ("static", "single_stream", "offline_throughput", "memory_log")
_OF_CACHE = ("kv_cache_tokens", "kv_cache_bytes_per_gpu")
_ANY_DEVICE = "h100-sxm-80gb"


class InferenceRows:
    """Predicts rows of inference files; rows of one deployment share a prediction."""

    def __init__(self) -> None:
        self._known = Known[tuple[InferReport, tuple[str, ...]]]()
        self._runs = Known[tuple[ServeReport, tuple[str, ...]]]()

    def __call__(self, record: Record, context: Context) -> Prediction:
        """Return the predicted value of a row, its interval and what was assumed."""
        record = self.completed(record, context)
        mode = record.text("serving_mode")
        if under_load(record):
            return self._loaded(record, context)
        if mode not in _MODES:
            raise refuse("serving_mode", mode, _REFUSED.get(mode, f"is not a known mode: {', '.join(_MODES)}"))
        key = tuple(record.text(name) for name in SETTINGS)
        report, assumed = self._known.of(key, lambda: self.predict(record, context))
        own = Record(record.row)
        value = value_of(own, report)
        notes = tuple(dict.fromkeys((*assumed, *own.assumed)))
        # Requests beyond the cache wait their turn: a batch ran where there is room for one of them.
        fits = report.fits or (own.text("metric") != "fits" and report.max_concurrency > 0)
        band = interval_of(own, report, value)
        return Prediction(
            value=value,
            interval=band,
            assumed=notes,
            fits=fits,
            conditions=report.conditions,
            cache_share=report.cache_share,
            case=report.case,
        )

    def _loaded(self, record: Record, context: Context) -> Prediction:
        """Return the predicted value of a row of a run under load."""
        of_cache = record.text("metric") in _OF_CACHE
        if not of_cache:
            metric_of(record)
        row = _decode_worker(record) if record.text("serving_mode") == "disaggregated" else record.row
        cells = {"concurrency": record.text("concurrency") or "1", "prefix_tokens": "", "request_rate": ""}
        key = (*(record.text(name) for name in SETTINGS), record.text("request_rate"))

        def ask() -> tuple[ServeReport, tuple[str, ...]]:
            base, assumed = self.predict(Record({**row, **cells}), context)
            prefill = self._prompts(record, context, base) if row is not record.row else None
            requests = context.requests(record.notes.get("per_request", ""))
            return report_of(record, base, prefill, requests), (*assumed, *record.assumed)

        report, assumed = self._runs.of(key, ask)
        own = Record(record.row)
        prediction = self._of_cache(own, report.base) if of_cache else predicted(own, report)
        return replace(prediction, assumed=tuple(dict.fromkeys((*assumed, *own.assumed))))

    @staticmethod
    def _of_cache(own: Record, base: InferReport) -> Prediction:
        """Return what the cache of a server under load holds: what its largest step leaves of the memory."""
        value = value_of(own, base)
        return Prediction(
            value=value,
            interval=interval_of(own, base, value),
            assumed=(),
            fits=base.fits,
            conditions=base.conditions,
            cache_share=base.cache_share,
            case=base.case,
        )

    def _prompts(self, record: Record, context: Context, base: InferReport) -> tuple[Plan, str]:
        """Return the plan and the engine of the workers that compute prompts; notes may say their kernels apart."""
        own = {name: record.notes.get(f"prefill_{name}") for name in ("experts", "launch")}
        notes = "; ".join([record.text("notes"), *(f"{name}={word}" for name, word in own.items() if word)])
        engine = engine_of(context.engines, record.with_cells({"notes": notes}), base.case.cluster.device)
        return _prefill_plan(record, base.case.model), engine

    def completed(self, record: Record, context: Context) -> Record:
        """Return a row with what is known of it beside its cells."""
        return record.completed()

    def model(self, record: Record, model: Model, tp: int) -> Model:
        """Return a row's model as its engine runs it on so many ranks."""
        return model

    def predict(self, record: Record, context: Context) -> tuple[InferReport, tuple[str, ...]]:
        """Return the report of a deployment and what had to be assumed for it."""
        model = context.model_of(record)
        device, notes = context.device(_ANY_DEVICE if record.text("device") == "any" else record.text("device"))
        # Ranks of a stage are the groups: where there is one rank there is one group.
        if "attention_dp_enabled" in record.notes and "1" not in (record.text("tp"), record.text("num_gpus")):
            raise refuse("attention_dp", record.text("attention_dp"), "how many groups share experts is not stated")
        engine = engine_of(context.engines, record, device)
        plan = _plan(record, model)
        model = self.model(record, model, plan.tp)
        cluster = _cluster(record, Lookup(device=device, assumptions=notes), plan)
        job = _job(record, model, engine, plan, device)

        def ask(one: Plan) -> InferReport:
            return infer(model, cluster, one, job, ServingOptions(engine=engine))

        if record.text("serving_mode") != "offline_throughput":
            return ask(plan), (*notes, *record.assumed)
        spread = None if record.whole("tp") else _spread(record, ask, plan)
        return _full(record, spread or ask(plan), engine), (*notes, *record.assumed)


# Requests at once for which a replica is worth running.
_WORTH = 32


def _spread(record: Record, ask: Callable[[Plan], InferReport], plan: Plan) -> InferReport | None:
    """Return a full queue on the smallest replicas with room for a batch, None where the whole deployment is one.

    Replicas send nothing to each other, so that throughput is highest where they are small.
    """
    for tp in (n for n in range(1, plan.tp) if plan.tp % n == 0):
        etp = max(tp // plan.ep, 1) if plan.etp > 1 else plan.etp
        try:
            report = ask(replace(plan, tp=tp, dp=plan.dp * plan.tp // tp, etp=etp))
        except InputError:
            continue
        if report.fits and _room(report) >= _WORTH:
            record.assume(f"offline: replicas of tp {tp}, the fewest ranks with room for {_WORTH} requests")
            return report
    return None


def _cluster(record: Record, lookup: Lookup, plan: Plan) -> Cluster:
    count = record.whole("num_gpus") or plan.tp * plan.pp * plan.dp
    given: dict[str, float] = {"num_devices": count}
    if not lookup.device.knows("devices_per_node"):
        given["devices_per_node"] = count
    return build_cluster(f"{count}x{lookup.device.name}", lookup, given)


def _plan(record: Record, model: Model) -> Plan:
    count, pp, dp = (record.count(name) for name in ("num_gpus", "pp", "dp"))
    if record.notes.get("layer_split") or record.notes.get("layer_split_assumed"):
        return Plan(tp=1, pp=count, dp=1)
    tp = record.count("tp")
    if not record.says("tp"):
        if count > 1:
            record.rule_value("tp")
        tp = max(count // (pp * dp), 1)
    # Groups of attention are replicas that share their experts: each serves its part of the requests.
    groups = record.count("attention_dp")
    if groups > 1:
        record.assume(
            f"{groups} groups of attention share their experts, with requests and routed tokens spread evenly"
        )
    plan = Plan(tp=tp, pp=pp, dp=dp * groups)
    if model.has_experts:
        ep = record.count("ep")
        if not record.says("ep"):
            record.rule_value("ep")
        plan = replace(plan, ep=ep, etp=max(tp * groups // ep, 1))
    return plan


def _decode_worker(record: Record) -> dict[str, str]:
    """Return the row of the workers that decode alone, of a row of two pools."""
    workers, groups = (record.count(name) for name in ("num_decode_workers", "attention_dp"))
    ranks = workers * groups * record.count("tp") * record.count("pp")
    return {**record.row, "serving_mode": "online", "dp": str(workers), "num_gpus": str(ranks)}


def _prefill_plan(record: Record, model: Model) -> Plan:
    """Return the plan of the workers that compute prompts, of a row of two pools."""
    noted = {name: str(int(record.noted(f"prefill_{name}")) or 1) for name in ("tp", "pp", "ep", "attention_dp")}
    workers = record.count("num_prefill_workers")
    ranks = workers * int(noted["tp"]) * int(noted["pp"]) * int(noted["attention_dp"])
    return _plan(Record({**record.row, **noted, "dp": str(workers), "num_gpus": str(ranks)}), model)


def _job(record: Record, model: Model, engine: str, plan: Plan, device: Device) -> Serving:
    mode = record.text("serving_mode")
    weights, cache = _weights(record), _cache(record, engine)
    fraction = record.number("memory_utilization")
    noted = record.noted("max_num_seqs")
    if mode == "memory_log":
        length = record.whole("max_model_len") or 0
        if not length:
            record.rule_value("max_model_len")
            length = model.max_context or 2048
        limits = limits_of(engine, device)
        chunk = record.whole("max_num_batched_tokens") or limits.tokens(length)
        return Serving(
            batch=1, input_tokens=max(length - 1, 1), output_tokens=1, weights=weights, kv_cache=cache,
            memory_fraction=fraction, max_batched_tokens=min(chunk, length) if chunk else 0,
            max_sequences=int(noted) or limits.set_aside, adapter_rank=int(record.noted("lora_rank")),
        )  # fmt: skip
    replicas = plan.dp
    batch = 1 if mode == "single_stream" else record.count("batch")
    if mode in ("online", "offline_throughput"):
        batch = 1
    return Serving(
        batch=max(-(-batch // replicas), 1),
        input_tokens=max(round(record.number("input_tokens")), 1),
        output_tokens=round(record.number("output_tokens")),
        weights=weights,
        kv_cache=cache,
        memory_fraction=fraction,
        prefix_tokens=record.whole("prefix_tokens"),
        max_batched_tokens=_step_tokens(record, engine, model, device),
        same_prompts=record.notes.get("prompts") == "same",
    )


def _step_tokens(record: Record, engine: str, model: Model, device: Device) -> int:
    """Return the tokens of prompts that an engine runs in a step of a fixed batch, 0 for the whole batch."""
    stated = record.whole("max_num_batched_tokens")
    if stated or record.text("serving_mode") not in FIXED:
        return stated
    return limits_of(engine, device, offline=True).tokens(record.whole("max_model_len") or model.max_context)


def _room(report: InferReport) -> int:
    """Return the requests that a replica holds at once where prompts run in steps of the engine's size."""
    case = report.case
    job = replace(case.job, batch=1, max_batched_tokens=served_step_tokens())
    return infer(case.model, case.cluster, case.plan, job, ServingOptions(engine=case.engine)).max_concurrency


def _full(record: Record, report: InferReport, engine: str) -> InferReport:
    """Return the report of a full queue: as many requests as the cache holds and the engine runs at once."""
    stated = -(-record.whole("batch") // report.case.plan.dp)
    most = stated or limits_of(engine, report.case.cluster.device).at_once(report.case.plan.pp)
    batch = max(1, min(_room(report), most))
    record.assume(f"offline: {batch} requests at once on each replica, what cache and engine allow")
    case = report.case
    chunk = 0 if batch * case.job.input_tokens < served_step_tokens() else served_step_tokens()
    # A pipeline works on as many batches at once as it has stages.
    job = replace(case.job, batch=max(1, batch // case.plan.pp), max_batched_tokens=chunk)
    return infer(case.model, case.cluster, case.plan, job, ServingOptions(engine=case.engine))


def _weights(record: Record) -> str:
    word = record.text("weight_dtype").lower()
    if not word:
        record.rule_value("weight_dtype")
        return ""
    own = read("rules.toml")["weights_of"].get(record.text("engine").lower(), {})
    format_name = own.get(word) or words("weights").get(word)
    if format_name is None and "+" in word:
        format_name = find_format(word, "weight_dtype").name
    if format_name is None:
        raise refuse("weight_dtype", word, "is not a format that is modelled")
    # Meta's own checkpoint of 405B.
    return "fp8-ffn" if format_name == "fp8" and record.notes.get("checkpoint") == "meta-fp8" else format_name


def _cache(record: Record, engine: str) -> str:
    word = record.text("kv_dtype").lower()
    if word:
        return "" if word in ("fp16", "bf16") else word
    record.rule_value("kv_dtype")
    return "fp8" if narrows_cache(engine, record.text("weight_dtype")) else ""
