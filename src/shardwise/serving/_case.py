"""From a serving question to a complete case: every deduction listed, every problem at once.

A `ServingCase` holds what stays the same for all plans: model, cluster, job, engine and formats.
"""

from __future__ import annotations

from dataclasses import field, fields
from functools import cached_property
from typing import Any

from shardwise.cost import Efficiencies, family_of
from shardwise.errors import InputError, Problems
from shardwise.hardware import Cluster
from shardwise.models import Model
from shardwise.plans import Plan, Serving, divisors, one_of, split_layers
from shardwise.plans.laws import domain_problems, field_problems, law_problems
from shardwise.records import dataclass, replace
from shardwise.serving._engine import Engine, find_engine
from shardwise.serving._engine_memory import pool_notes
from shardwise.serving._formats import WeightFormat, cache_bytes
from shardwise.serving._gguf import mixed
from shardwise.serving._job_formats import formats_of
from shardwise.serving._jobs import job_problems
from shardwise.serving._layout import over_devices, stages_together, with_experts
from shardwise.serving._policy import SchedulerLimits, cuts_prompts, profile_of, step_tokens_of
from shardwise.serving._releases import engine_on, release_notes
from shardwise.serving._speculation import draft_of, speculation_problems, tokens_per_step
from shardwise.units import counted, show_bytes


@dataclass(frozen=True, kw_only=True)
class ServingCase:
    """One serving question, complete: `dtype` is the 16-bit (or fp32) type, `compute` that of the format's GEMMs."""

    model: Model
    cluster: Cluster
    plan: Plan
    job: Serving
    engine: Engine
    format: WeightFormat
    dtype: str
    compute: str
    cache_element_bytes: float
    efficiencies: Efficiencies = field(default_factory=Efficiencies)
    draft: Model | None = None
    """What guesses tokens that a step verifies."""
    host: ServingCase | None = None
    """The same question to the host's processor, where that runs a part of the model."""
    mean_rank: bool = False  # Of ranks of experts that of the mean, not the busiest, for which the others wait.

    @property
    def domains(self) -> tuple[int, ...]:
        """Devices in one domain of each tier."""
        return tuple(tier.size for tier in self.cluster.tiers)

    @property
    def activation_bytes(self) -> int:
        """Bytes of one activation element."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def state_bytes(self) -> float:
        """Bytes of an element of recurrent states: of the type that the model's file names, or of the engine's own."""
        return self.engine.memory.state_bytes_of(self.model.state_types) or self.activation_bytes

    @property
    def packs_latents(self) -> bool:
        """Whether latents of sparse attention have scales beside their 8-bit floats."""
        narrow = self.job.kv_cache.startswith("fp8")
        return narrow and self.engine.memory.packs_latents(self.model.family, family_of(self.cluster.device))

    @property
    def tower_parameters(self) -> int:
        """Parameters of the towers that the engine loads beside the language model."""
        loads = self.engine.memory.loads_towers_of(self.model.family) and not self.job.language_model_only
        return self.model.tower_parameters if loads else 0

    @property
    def new_input_tokens(self) -> int:
        """Input tokens of a request that the cache does not hold yet."""
        return self.job.input_tokens - self.job.prefix_tokens

    @property
    def step_tokens(self) -> int:
        """Most tokens of one prefill step: what the job says, else the engine's own; 0 for the whole batch at once.

        Engines that cut no prompt have steps of a whole one at least, as in `serve`: they refuse a longer one
        (github.com/NVIDIA/TensorRT-LLM tests/unittest/llmapi/test_llm.py test_llm_chunked_prefill).
        """
        if self._uncut:
            return self.new_input_tokens
        return self.job.max_batched_tokens or self.engine.prefill.chunk_tokens or self._own_step_tokens

    @property
    def _uncut(self) -> bool:
        """Whether no prompt fits into the tokens of a step that are stated, and the engine cuts none."""
        stated = self.job.max_batched_tokens
        return bool(stated) and stated < self.new_input_tokens and not cuts_prompts(self.engine.name)

    @cached_property
    def _own_step_tokens(self) -> int:
        runs = self.engine.prefill.continuous_batching and self.model.generates and self.job.use_kv_cache
        return step_tokens_of(self.engine.name, self.cluster.device, self.new_input_tokens) if runs else 0

    @cached_property
    def profiled(self) -> SchedulerLimits:
        """What the engine runs at start-up to see what its largest step takes; no tokens where it runs none."""
        step = self._own_step_tokens and self.step_tokens
        return profile_of(self.engine.name, self.cluster.device, self.job.max_sequences, step)

    def capped(self, job: Serving) -> Serving:
        """Return a job whose engine is told to run its batch at most, where it has a number of its own."""
        return job if job.max_sequences or not self.profiled.step_tokens else replace(job, max_sequences=job.batch)


# What a plan may say that has no meaning when nothing is trained, and why.
_TRAINING_ONLY = {
    "sharding": "divides gradients and optimizer state, and inference has none",
    "shard": "divides gradients and optimizer state, and inference has none",
    "schedule": "orders forward and backward passes, and inference has no backward pass",
    "recompute": "makes activations again for the backward pass, and inference has none",
    "recompute_layers": "makes activations again for the backward pass, and inference has none",
    "modules": "makes activations again for the backward pass, and inference has none",
    "vpp": "interleaves chunks of a training pipeline",
    "micro_batch": "cuts a training batch; a served batch runs as one",
    "cp": "splits sequences over ranks, which no engine here does",
    "cp_kind": "splits sequences over ranks, which no engine here does",
    "layout": "is a training layout; engines split one-dimensionally",
    "tp2": "is the second axis of a training layout",
    "panels": "belong to a training layout",
}
_NEUTRAL: dict[str, Any] = {f.name: f.default for f in fields(Plan) if f.name in _TRAINING_ONLY}


@dataclass(frozen=True, kw_only=True)
class ServingQuestion:
    """A serving question as it was asked: `plan.dp` 0 fills the cluster, empty formats follow the checkpoint."""

    model: Model
    cluster: Cluster
    plan: Plan
    job: Serving
    engine: Engine | str = "vllm"
    efficiencies: Efficiencies = field(default_factory=Efficiencies)

    @property
    def runs(self) -> Engine:
        """The engine on the devices of the question."""
        return engine_on(self.engine, self.cluster.device)


def _one_pass(question: ServingQuestion, notes: list[str]) -> ServingQuestion:
    """Return the question with nothing to generate where the model does not generate."""
    if question.model.generates:
        return question
    notes.append(f"one pass: {question.model.name} has no next token to make, so nothing is generated or cached")
    return replace(question, job=replace(question.job, output_tokens=0))


def _only_training(plan: Plan, problems: Problems) -> None:
    for name, default in _NEUTRAL.items():
        value = getattr(plan, name)
        # 0 asks training to deduce the micro-batch; here it says nothing.
        if value not in (default, 0 if name == "micro_batch" else default):
            shown = default if default != () else "none"
            problems.add(name, value, _TRAINING_ONLY[name], f"leave it at {shown}")


def _replicas(question: ServingQuestion, plan: Plan, problems: Problems, notes: list[str]) -> Plan:
    used, n = plan.tp * plan.pp, question.cluster.num_devices
    if question.plan.dp == 0:
        if n % used:
            legal = [t for t in divisors(n) if n % (t * plan.pp) == 0]
            problems.add("tp", plan.tp, f"tp x pp = {used} must divide the {n} devices", one_of(legal))
            return replace(plan, dp=1)
        notes += [f"dp {n // used}: replicas fill {n} devices"] * (n != used)
        return replace(plan, dp=n // used)
    if used * plan.dp != n:
        rule = f"tp x pp x dp = {used * plan.dp} must equal the {n} devices"
        engine = question.runs
        groups = engine.layouts.groups_within(engine.title, plan, question.model.has_experts) if used == n else ""
        remedy = f"use {n // used}" if n % used == 0 else f"use {used * plan.dp} devices"
        problems.add("dp", plan.dp, rule, remedy + groups)
    return plan


def complete_plan(question: ServingQuestion, problems: Problems, notes: list[str]) -> Plan:
    """Return the complete plan, with what is wrong with it added to `problems`."""
    plan = replace(question.plan, dp=question.plan.dp or 1, micro_batch=1)
    _only_training(question.plan, problems)
    wrong = field_problems(plan).items
    problems.items += [p for p in wrong if p.field not in _TRAINING_ONLY]
    if wrong:
        return plan
    layers = question.model.num_layers
    plan = over_devices(question.runs, replace(plan, dp=question.plan.dp), question.cluster, layers, notes)
    plan = with_experts(_replicas(question, plan, problems, notes), question.model, notes)
    if not plan.stage_layers and 1 < plan.pp <= layers and layers % plan.pp:
        plan = replace(plan, stage_layers=split_layers(layers, plan.pp, "middle"))
        notes.append(f"stage_layers {','.join(map(str, plan.stage_layers))}: {layers} layers over {plan.pp}")
    # Laws of sequence parallelism are a trainer's: they hold for one token a rank.
    legal = stages_together(replace(plan, sequence_parallel=plan.tp > 1, **_NEUTRAL))
    notes += ["order tp-pp-dp: the stages of a replica lie beside each other"] * (legal.order != plan.order)
    problems.items += [*law_problems(question.model, legal, 0), *domain_problems(plan, question.cluster.tiers[0].size)]
    return replace(legal, sequence_parallel=False)


def _with_usual_cache(question: ServingQuestion, engine: Engine, notes: list[str]) -> ServingQuestion:
    """Return the question with the engine's own format of the cache where nobody says one."""
    family = family_of(question.cluster.device)
    usual = engine.formats.usual_cache(question.model.family, family) if question.job.use_kv_cache else ""
    if question.job.kv_cache or not usual or not question.model.generates:
        return question
    notes.append(f"kv_cache {usual}: {engine.brand}'s own for {question.model.family} models on {family} devices")
    return replace(question, job=replace(question.job, kv_cache=usual))


def _stated(case: ServingCase) -> list[str]:
    """Return what was assumed because the input was silent."""
    form, engine, job = case.format, case.engine, case.job
    scope = {
        "linear": "linear layers but router and head",
        "feed-forward": "feed-forward layers alone",
        "experts": "routed experts" + (" and the parts named" if form.parts else " alone"),
        "all": "all matrices",
    }
    group = f", {form.scale_bits:g} bits of scale data for every {form.group:,} weights" if form.group else ""
    title = case.cluster.device.built(engine.title)
    notes = [*release_notes(engine), f"engine {engine.name}: {title}", f"memory budget: {_budget(case)}"]
    if case.model.family in engine.formats.lacks:
        notes.append(
            f"{title} has no class for {case.model.family} models: figures are those of its kernels, were there one"
        )
    whole = case.model.has_windows and not engine.memory.keeps_windows(case.model.family)
    notes += [f"windows: {engine.name} keeps every token in layers that read a window"] * whole
    notes += pool_notes(engine.memory, engine.caching().memory, case.model)
    notes += ["memory reserved and unused, off this engine's cache too, is not known"] * engine.memory.profiles_reserved
    rest = f", the rest in {form.rest_bits:g} bits" if form.scope == "experts" and form.rest_bits != 16 else ""
    notes.append(f"weights {form.name}: {scope[form.scope]}{group}{rest}")
    if engine.memory.gathers_tokens and case.plan.ep * case.plan.etp > case.plan.tp:
        groups = case.plan.ep * case.plan.etp // case.plan.tp
        how = "all2all_backend allgather_reducescatter"
        notes.append(f"experts: every rank gathers the tokens of {groups} groups ({how})")
    if case.tower_parameters:
        notes.append(
            f"towers beside the language model take {case.tower_parameters / 1e9:.2f} billion parameters in 16 bits, "
            "which --language-model-only leaves out; what a request with images takes is not counted"
        )
    notes += _idle_words(case)
    if not job.use_kv_cache and job.output_tokens:
        notes.append("no KV cache: each output token recomputes all tokens before it")
    if case.profiled.step_tokens and case.profiled.sequences > job.batch:
        notes.append(f"memory is set aside for {case.profiled.text}, as {engine.brand} measures it at start-up")
    if case.step_tokens > job.max_batched_tokens > 0:
        raised = f"prompts are not cut and do not fit into {job.max_batched_tokens:,}"
        notes.append(f"{engine.brand}: up to {case.step_tokens:,} tokens a step ({raised})")
    if job.adapter_rank:
        notes.append(f"adapters {job.adapters}: of rank {job.adapter_rank} in every linear layer, used in turn")
    if job.speculative_method:
        made = tokens_per_step(job)
        drafts = counted(job.num_speculative_tokens, "draft token")
        notes.append(f"{job.speculative_method}: {drafts} a step, acceptance length {made:.3g}")
    notes += ["tables of embeddings are in the host's memory"] * engine.memory.tables_apart(case.cluster.device)
    notes += ["multi-token-prediction layers are not loaded"] * bool(case.model.mtp and job.speculative_method != "mtp")
    if case.model.max_context and job.total_tokens > case.model.max_context:
        notes.append(f"{job.total_tokens} tokens exceed the trained context of {case.model.max_context}")
    if case.cluster.usd_per_device_hour is None:
        notes.append("price: not known, no cost given")
    return notes


def _budget(case: ServingCase) -> str:
    """Return the words of what the engine shares out of a device's memory."""
    job, memory = case.job, case.engine.memory
    if job.kv_cache_memory:
        return f"{show_bytes(job.kv_cache_memory)} of cache as stated, whatever share of the memory that is"
    fraction = job.memory_fraction or memory.fraction
    share = f"{fraction:g} of" if fraction else "what chunks of prompts and captured graphs leave of"
    share = "all" if fraction == 1 else share
    spelled = {
        "total": f"weights, activations and cache within {share} usable memory",
        "static": f"weights and cache within {share} usable memory",
        "free": f"cache within {share} what weights and activations leave",
    }
    return spelled[memory.budget]


def _idle_words(case: ServingCase) -> list[str]:
    """Return the words of a job that change nothing for its model, or beside the rest of it."""
    job, model = case.job, case.model
    alone, whole = "there is one replica", "the device holds the whole model"
    no_experts = f"{model.name} has no experts"
    idle = (
        ("shard_weights", job.shard_weights and case.plan.dp == 1, alone),
        ("host", job.host and not job.splits_with_host, whole),
        (f"expert_imbalance {job.expert_imbalance:g}", job.expert_imbalance > 1 and not model.has_experts, no_experts),
        ("same_prompts", job.same_prompts and not model.has_experts, no_experts),
        ("language_model_only", job.language_model_only and not model.tower_parameters, f"{model.name} has no towers"),
    )
    return [f"{name}: no effect, {why}" for name, changes_nothing, why in idle if changes_nothing]


def complete(question: ServingQuestion) -> tuple[ServingCase, tuple[str, ...]]:
    """Return the complete case and the deductions made; raises `InputError` with everything that is wrong."""
    notes: list[str] = []
    question = _on_device(_one_pass(question, notes))
    problems = job_problems(question.job, question.model)
    engine = question.engine if isinstance(question.engine, Engine) else find_engine("vllm")
    with problems.collect():
        engine = question.runs
        engine = engine.caching() if question.job.prefix_tokens else engine
    question = _with_usual_cache(replace(question, engine=engine), engine, notes)
    with problems.collect():
        question.efficiencies.check()
    plan = complete_plan(question, problems, notes)
    if question.job.shard_weights and plan.ep * plan.etp > plan.tp:
        rule = "spreads experts over replicas, whose weights then have fewer copies"
        problems.add("shard_weights", True, rule, "leave it out, or keep experts within tp")
    device = question.cluster.device
    form, wide, narrow = formats_of(question.job, question.model, engine, device, problems, notes)
    family = family_of(device)
    unlaunched = engine.layouts.refused(engine.title, question.model, plan, form.name, family)
    notes += [f"{engine.title} does not launch this layout: {one}" for one in unlaunched.items]
    element = 2.0
    with problems.collect():
        element = cache_bytes(question.job.kv_cache or ("fp32" if form.bits == 32 else "bf16"))
    problems.items += speculation_problems(question.job, question.model).items
    problems.items += engine.refused_formats(form.name, question.job.kv_cache, device).items
    problems.raise_if_any()
    draft = draft_of(question.job, question.model)
    form = engine.quantisation.experts_of(form, family) if form.scope == "experts" else mixed(form, question.model)
    host = _host_case(question, engine)
    model = question.model.whole_context() if engine.attention.ignores_windows else question.model
    if model != question.model:
        notes.append(f"windows: {engine.name} reads the whole context unless told otherwise")
    case = ServingCase(
        model=model, cluster=question.cluster, plan=plan, job=question.job, engine=engine, format=form, dtype=wide,
        compute=narrow, cache_element_bytes=element, efficiencies=question.efficiencies,
        draft=draft, host=host,
    )  # fmt: skip
    return case, (*notes, *_stated(case))


def _on_device(question: ServingQuestion) -> ServingQuestion:
    """Return the question without a split with the host where all layers and the head lie on the device."""
    job, most = question.job, question.model.num_layers
    if job.gpu_layers > most:
        job = replace(job, gpu_layers=-1)
    return replace(question, job=replace(job, cpu_experts=min(job.cpu_experts, most)))


def _host_problems(question: ServingQuestion, engine: Engine) -> Problems:
    """Return what keeps the host from running a part of the model."""
    problems, job, cluster = Problems(), question.job, question.cluster
    asked = "gpu_layers" if job.gpu_layers >= 0 else "cpu_experts"
    value = getattr(job, asked)
    if not engine.operators.splits_with_host:
        problems.add(asked, value, f"{engine.name} splits no model with the host", "use engine llama.cpp")
    if cluster.num_devices > 1:
        rule = f"splits a model between one device and its host, and there are {cluster.num_devices} devices"
        problems.add(asked, value, rule, "name one device")
    if job.cpu_experts and not question.model.has_experts:
        problems.add("cpu_experts", job.cpu_experts, f"{question.model.name} has no experts", "use gpu_layers")
    for name in ("speculative_method", "shard_weights"):
        if getattr(job, name):
            problems.add(name, getattr(job, name), "is not modelled where the host runs a part", "leave it out")
    if not cluster.device.knows("host_bytes_per_second"):
        rule = f"crosses the host link of {cluster.device.name}, whose rate is not known"
        problems.add(asked, value, rule, "state host_bytes_per_second in a device file of your own")
    if not job.host:
        rule = "is needed: its memory and its cores decide how fast that part is"
        problems.add("host", None, rule, "name a processor, such as cpu-x86-2core, or one of your own catalogue")
    return problems


def _host_case(question: ServingQuestion, engine: Engine) -> ServingCase | None:
    """Return the question to the host's processor alone, None where the device holds the whole model."""
    split = question.job.splits_with_host
    if split:
        _host_problems(question, engine).raise_if_any()
    try:
        cluster = Cluster.parse(f"1x{question.job.host}") if split or question.job.host else question.cluster
        alone = replace(question.job, gpu_layers=-1, cpu_experts=0, host="")
        return complete(replace(question, cluster=cluster, plan=Plan(), job=alone))[0] if split else None
    except InputError as error:
        raise InputError(replace(p, field="host", remedy="see shardwise devices cpu") for p in error.problems) from None
