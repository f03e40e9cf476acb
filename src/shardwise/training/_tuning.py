"""What a fine-tuning asks of a model, and what of it is assumed: targets that the model has, ranks that fit them."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from shardwise.errors import Problems
from shardwise.files import own_table
from shardwise.ledger.op import Op
from shardwise.models import EXPERT_NAMES, Model, layer_name
from shardwise.ops.adapter_parts import KNOWN_TARGETS, matches, modules_of, spelled, words_of
from shardwise.ops.adapters import EXPANDED, key_heads
from shardwise.ops.count import count_parameters, trainable_parameters, whole_lines
from shardwise.ops.peft_adapters import PATHS
from shardwise.plans import (
    LORA,
    OBJECTIVES,
    OFT_BLOCK,
    VIRTUAL,
    Plan,
    Precision,
    Stack,
    Training,
    Tuning,
    divisors,
    layers_of,
    proposed_for,
    tuning_of,
    tuning_problems,
)
from shardwise.records import dataclass, replace
from shardwise.training._targets import strange_targets


def module_names(model: Model) -> tuple[str, ...]:
    """Return the short names of the linear layers of a model's blocks, in their order.

    >>> module_names(Model.load("llama-3.1-8b"))
    ('q', 'k', 'v', 'o', 'gate', 'up', 'down')
    """
    ops = (op for line in whole_lines(model) if line.part == "layers" for op in line.ops)
    products = (op for op in ops if op.kind in ("matmul", "grouped") and op.weights)
    return tuple(dict.fromkeys(m.short for op in products for m in modules_of(None, op) if m.short))


def fine_tuning_problems(model: Model, plan: Plan, job: Training, stack: Stack) -> Problems:
    """Return what is wrong with a job's fine-tuning, of a model laid out by a plan."""
    problems, settings = tuning_problems(job), stack.settings
    if (
        (settings.rollout or settings.rollout_prompt_tokens)
        and job.method in OBJECTIVES
        and not OBJECTIVES[job.method].rollout
    ):
        problems.add("method", job.method, "has no rollouts", "use --method grpo, or leave the flags of rollouts out")
    tuning = None if problems.items else tuning_of(job, stack, model.family)
    if tuning is None:
        return problems
    _on_layout(plan, problems)
    _layers(model, tuning, problems)
    if not tuning.adapter and not problems.items and not any(trainable_parameters(model, tuning).values()):
        rule = f"trains nothing of {model.name}"
        problems.add("trains", ",".join(tuning.trains), rule, "name a part that it has, or add --adapter lora")
    if not tuning.adapter:
        return problems
    _targets(model, job, tuning, problems)
    if "head" in spelled(tuning.targets) and stack.head_in_tiles and tuning.adapter not in VIRTUAL:
        # trl 1.16.0 trainer/sft_trainer.py and its like raise for a tuner's layer in place of the output embeddings.
        rule = f"reaches the head, whose weight the loss of {stack.name} reads past its adapter, so that it is refused"
        problems.add("targets", ",".join(tuning.targets), rule, "leave the head out, or add --trains head")
    if tuning.prefix_tokens:
        _cached_keys(model, problems)
    if not problems.items and not _adapter_parameters(model, tuning):
        rule = f"has no parameters in {model.name}, so that nothing of it would train"
        problems.add("adapter", tuning.adapter, rule, "use --adapter lora, or name --targets that it has")
    _on_ranks(plan, tuning, stack, problems)
    return problems


def _cached_keys(model: Model, problems: Problems) -> None:
    """Record layers whose class takes no cache of keys and values that others have made, or another than peft makes.

    transformers 5.23.0 and peft 0.21.2, run: states of recurrences are looked for in the cache, but for those that
    RecurrentGemma's layers keep themselves; layers whose keys differ are skipped for Gemma 4 alone
    (peft_model.py get_prompt); Falcon with one head of keys is given those of all heads.
    """
    mixers, keys, rule = [m for block in model.kinds for m in block.mixers], key_heads(model), ""
    if not keys or not all(mixer.remembers or mixer.cached_heads() for mixer in mixers):
        rule = f"puts keys and values before those of every layer, and {model.name} has layers without keys of heads"
    elif model.family != "gemma4_text" and len({(k.heads, n) for k in keys for n in (k.head_dim, k.value_dim)}) > 1:
        rule = f"has keys and values of one size, and those of {model.name} differ"
    elif model.family in EXPANDED and any(k.heads == 1 < k.query_heads for k in keys):
        rule = f"makes keys and values of all heads, and {model.name} takes those of one"
    if rule:
        problems.add("adapter", "prefix", rule, "use --adapter lora")


def split_problems(plan: Plan, tuning: Tuning, stack: Stack) -> Problems:
    """Return what of a fine-tuning the split of the layers does not allow, whatever the model."""
    problems = Problems()
    _on_layout(plan, problems)
    if tuning.adapter:
        _on_ranks(plan, tuning, stack, problems)
    return problems


def _on_layout(plan: Plan, problems: Problems) -> None:
    if plan.layout == "summa":
        problems.add("layout", plan.layout, "has no adapters and no frozen weights", "use --layout 1d")


def _on_ranks(plan: Plan, tuning: Tuning, stack: Stack, problems: Problems) -> None:
    """Record layers that are split where nothing splits their adapters, and ranks that do not split.

    Of every layer but one split by inputs A is a column-parallel layer of its own in Megatron-Bridge and NeMo, whose
    ranks are divided (megatron/bridge/peft/utils.py ParallelLinearAdapter, Megatron-LM core/tensor_parallel/layers.py
    ColumnParallelLinear).
    """
    if tuning.joint and tuning.splits_rank and tuning.rank % plan.tp and spelled(tuning.targets) - {"o", "down"}:
        rule = f"is split over tp {plan.tp} by {stack.name}, which does not divide it"
        more = plan.tp * -(-tuning.rank // plan.tp)
        problems.add("rank", tuning.rank, rule, f"use --rank {more}, or --tp {math.gcd(tuning.rank, plan.tp)}")
    if plan.tp > 1 and tuning.adapter in PATHS:
        rule = f"splits layers whose {tuning.adapter} no framework splits"
        problems.add("tp", plan.tp, rule, "use --tp 1, or --adapter lora")
    if tuning.prefix_tokens and plan.recompute != "none":
        # peft 0.21.2 peft_model.py add_adapter: "PREFIX_TUNING does not work with gradient checkpointing"
        rule = "makes again what prefix tuning keeps in a cache, so that peft refuses it"
        problems.add("recompute", plan.recompute, rule, "use --recompute none, or --adapter lora")
    if plan.ep > 1 and "experts" in tuning.targets and not stack.permutes_experts:
        rule = f"are added to whole weights by {stack.name}, which expert parallelism splits"
        problems.add("targets", "experts", rule, "use --ep 1, or --stack megatron-bridge")


def _layers(model: Model, tuning: Tuning, problems: Problems) -> None:
    """Record layers that a model does not have, and those that share their weights with others."""
    count = model.num_layers
    for word in tuning.layer_words:
        named = layers_of(word, count)
        if not named or named[0] < 0 or named[-1] >= count:
            rule = f"names no layers of {model.name}, which has 0 to {count - 1}"
            problems.add("trains", word, rule, f"use for example last:{max(count // 4, 1)}")
        elif any(block.shared_weights for at in named for block in (model.layers[at], *model.layers[at].also)):
            problems.add("trains", word, "names layers that share their weights with others", "leave out --trains")


def _beside_experts(tuning: Tuning, problems: Problems) -> None:
    """Record what adapters that are added to the weights of experts cannot do, and what is not counted beside experts.

    Source: github.com/huggingface/peft 0.21.2 tuners/lora/layer.py, ParamWrapper.
    """
    rule, remedy = "adapters of experts are added to their weights", "use --targets attention"
    if tuning.adapter == "dora":
        rule = rule if tuning.sums_experts else "those of experts one by one are not counted"
        problems.add("adapter", "dora", f"has magnitudes, and {rule}", f"{remedy}, or --adapter lora")
    wrapped = tuning.experts not in ("grouped", "modules")
    if tuning.dropout and wrapped and ("experts" in tuning.targets or tuning.drops_experts):
        problems.add("adapter_dropout", tuning.dropout, f"drops an input, and {rule}", f"leave it out, or {remedy}")


def _halves(tuning: Tuning, roles: set[str], problems: Problems) -> None:
    """Record one half of the joint first layer of experts named without the other.

    Source: github.com/huggingface/peft 0.21.2 utils/transformers_weight_conversion.py, _convert_peft_config_moe.
    """
    words = words_of(tuning)
    halves = words & {"gate", "up"} if tuning.converts_experts else set()
    if "up" in roles and len(halves) == 1 and words.isdisjoint(("all-linear", "experts", "mlp")):
        names = EXPERT_NAMES.get((tuning.experts, "up"), ("gate_proj", "up_proj"))
        one, other = names if "gate" in halves else names[::-1]
        asked = next(word for word in tuning.targets if not halves.isdisjoint(spelled([word])))
        rule = f"is half of the first layer of experts, which have {one} and {other} in one"
        problems.add("targets", asked, rule, f"add {other}")


@cache
def _refused(what: str) -> dict[str, Any]:
    """Return the types of models of which peft refuses something, and the methods that it refuses there."""
    return dict(own_table(__file__, "peft.toml")[what])


def _convolutions(model: Model, tuning: Tuning, problems: Problems) -> None:
    """Record a method that stands beside linear layers alone, of a class that has others."""
    refused = _refused("convolutions")
    if model.family in refused["types"] and tuning.adapter in refused["methods"]:
        rule = f"stands beside linear layers, and those of {model.family} are Conv1D, which peft refuses"
        problems.add("adapter", tuning.adapter, rule, "use --adapter lora")


def _state_space(model: Model, tuning: Tuning, reached: set[str], problems: Problems) -> None:
    """Record adapters of a projection whose weight the fused kernel reads past its layer."""
    refused = _refused("read_past_adapters")
    if model.family in refused["types"] and tuning.adapter in (*LORA, *refused["methods"]) and "out" in reached:
        others = ",".join(name for name in module_names(model) if name not in ("out", "head", "embedding", "router"))
        rule = f"reach out_proj, whose weight kernels of {model.family} read past its adapter, so that peft refuses it"
        problems.add("targets", ",".join(tuning.targets), rule, f"use --targets {others}")


def _targets(model: Model, job: Training, tuning: Tuning, problems: Problems) -> None:
    """Record targets that a model does not have, and ranks above the smaller side of every target."""
    layers = [op for line in whole_lines(model) for op in line.ops if op.weights]
    for word in strange_targets(model, tuning, job.targets):
        ours = module_names(model)
        names = [*KNOWN_TARGETS, *ours, *(f"{one}_proj" for one in strange_targets(model, tuning, ours))]
        unknown = strange_targets(model, tuning, names)
        known = dict.fromkeys(name for name in names if name not in unknown)
        problems.add("targets", word, f"is no linear layer of {model.name}", f"use {', '.join(known)}")
    chosen = [
        op
        for op in layers
        for m in modules_of(tuning, op)
        if op.kind in ("matmul", "grouped") and matches(tuning, op, m.short)
    ]
    if tuning.experts != "grouped":
        if any(op.kind == "grouped" for op in chosen):
            _beside_experts(tuning, problems)
            _halves(tuning, {op.role for op in chosen if op.kind == "grouped"}, problems)
        _state_space(model, tuning, {op.name for op in chosen if op.region == "ssm"}, problems)
        _convolutions(model, tuning, problems)
    sides, turned = [min(op.columns, op.inner) for op in chosen], {round(op.inner) for op in chosen}
    if tuning.adapter == "oft" and tuning.rank and math.gcd(*turned) % tuning.rank:
        # peft rounds the number of blocks layer by layer (tuners/oft/layer.py, adjust_oft_parameters).
        near = min(divisors(math.gcd(*turned)), key=lambda number: abs(number - tuning.rank))
        rule = f"cannot cut layers of {', '.join(map(str, sorted(turned)))} features into blocks of one size"
        problems.add("rank", tuning.rank, rule, f"use {near}, or leave it out for blocks of {OFT_BLOCK}")
    common = math.gcd(*turned)
    if job.oft_block_size and (common % tuning.block or tuning.block < 2):
        near = min((size for size in divisors(common) if size > 1), key=lambda size: abs(size - tuning.block))
        rule = f"does not divide the {', '.join(map(str, sorted(turned)))} features of the layers"
        problems.add("oft_block_size", tuning.block, rule, f"use {near}")
    # peft takes any rank; one above the smaller side of some layers only is what a default makes of narrow ones.
    if sides and tuning.rank > max(sides) and tuning.adapter not in ("vera", "ia3", "oft"):
        rule = f"is above the smaller side of every target, {max(sides):.0f}"
        problems.add("rank", tuning.rank, rule, f"use at most {max(sides):.0f}")


def target_notes(model: Model, job: Training, stack: Stack, sharded: bool = False) -> list[str]:
    """Return which targets are names of other classes, and what the model's own calls the layers that they mean.

    >>> from shardwise.plans import find_stack
    >>> job = Training(seq_len=1, global_batch=1, adapter="lora", targets=("gate_proj", "up_proj"))
    >>> target_notes(Model.load("mixtral-8x7b"), job, find_stack("trl"))
    ['targets gate_proj,up_proj taken as w1,w3: the names in mixtral']
    """
    tuning = tuning_of(job, stack, model.family, sharded)
    if tuning is None or tuning.joint or not tuning.adapter:
        return []
    return [*_expert_notes(model, tuning, stack), *_foreign_names(model, job, tuning)]


def _expert_notes(model: Model, tuning: Tuning, stack: Stack) -> list[str]:
    """Return that experts have no adapters though all linear layers do, and how wide they are beside narrow weights."""
    if not any(block.has_experts for block in model.layers):
        return []
    return [*_frozen_experts(tuning, stack), *_wide_experts(tuning, stack)]


def _frozen_experts(tuning: Tuning, stack: Stack) -> list[str]:
    words, reached = words_of(tuning), tuning.finds_experts and tuning.all_experts
    if "all-linear" not in words or "experts" in words or reached or tuning.adapter not in LORA:
        return []
    why = f"they are parameters, which all-linear of {stack.name} does not reach in {tuning.family}"
    return [f"experts stay frozen: {why}; --targets all-linear,experts adapts them too"]


def _wide_experts(tuning: Tuning, stack: Stack) -> list[str]:
    """Return how wide experts are beside narrow weights where these are linear layers alone."""
    if not tuning.wide_experts:
        return []
    width = "fp32" if 4 in (tuning.expert_bytes, tuning.rest_bytes) else "16 bits"
    why = (
        f"{tuning.base.name} of {stack.name} is of linear layers alone, and experts are parameters since transformers 5"
    )
    own = "--quantize-moe-experts" if stack.runs.quantize_moe_experts else f"--stack {proposed_for('narrow_experts')}"
    return [f"experts in {width}: {why}; {own} stores them in {tuning.base.name} too"]


def _foreign_names(model: Model, job: Training, tuning: Tuning) -> list[str]:
    tables = ("embedding", "head")
    layers = [op for line in whole_lines(model) for op in line.ops if op.weights and op.role not in tables]
    known, foreign, own = {*module_names(model), *KNOWN_TARGETS, "router"}, [], list[str]()
    for word in job.targets:
        one = replace(tuning, targets=(word,))
        meant = [(op, m.short) for op in layers for m in modules_of(tuning, op) if matches(one, op, m.short)]
        named = [name for op, short in meant for name in _class_names(model, tuning, op, short)]
        if word not in known and named and word.rpartition(".")[2] not in named:
            foreign.append(word)
            own += named
    names = ",".join(dict.fromkeys(own))
    return [f"targets {','.join(foreign)} taken as {names}: the names in {model.family}"] if own else []


def _class_names(model: Model, tuning: Tuning, op: Op[float], layer: str) -> tuple[str, ...]:
    if op.kind == "grouped":
        return EXPERT_NAMES.get((tuning.experts, op.role), ())
    return (layer_name(model.family, op.region, layer),)


def _adapter_parameters(model: Model, tuning: Tuning) -> float:
    """Return the parameters of adapters that train, prediction layers left out."""
    return sum(
        float(w.whole) * line.times
        for line in whole_lines(model, tuning)
        for op in line.ops
        for w in op.weights
        if w.adapter and w.trainable and line.part != "mtp"
    )


def tuning_notes(job: Training, stack: Stack) -> list[str]:
    """Return what was taken for what a fine-tuning leaves open."""
    tuning, notes = tuning_of(job, stack), list[str]()
    if tuning is None or not tuning.adapter:
        return notes
    if tuning.adapter == "oft" and not job.rank and not job.oft_block_size:
        notes.append(f"blocks of {OFT_BLOCK} features: the default of peft")
    elif not job.rank and tuning.adapter not in ("ia3", "oft"):
        notes.append(f"rank {tuning.rank}: the default of peft")
    if not job.targets and tuning.adapter not in ("prefix", "prompt", "ia3"):
        notes.append(f"targets {','.join(tuning.targets)}: as most recipes (arXiv:2305.14314 section 4)")
    if not job.adapter_precision:
        notes.append(f"adapter_precision {_type_of(tuning.precision)}: as {stack.name} keeps adapters")
    if not job.base:
        own = stack.loaded_base
        wider = f"; {stack.name} loads {own} unless told: --base {own} is that" if own != "bf16" else ""
        notes.append(f"base bf16: frozen weights of 16 bits{wider}")
    if job.reference == "copy":
        notes.append(
            "reference copy: frozen weights once more; --reference base is the same model with its adapters off"
        )
    if job.adapter_alpha:
        notes.append(f"adapter_alpha {job.adapter_alpha:g}: changes neither bytes nor seconds")
    return notes


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningSummary:
    """What a fine-tuning trains of a model: parameters by linear layer, and how those of adapters are kept."""

    adapter: str
    rank: int
    targets: tuple[str, ...]
    base: str
    adapter_precision: str
    trainable_by_module: dict[str, int]
    parameters: int
    adapter_bytes: float

    @property
    def trainable_parameters(self) -> int:
        """Parameters that train."""
        return sum(self.trainable_by_module.values())

    @property
    def trainable_share(self) -> float:
        """Those over the parameters of the model without adapters."""
        return self.trainable_parameters / self.parameters


def tuning_summary(model: Model, job: Training, stack: Stack) -> TuningSummary | None:
    """Return what a job fine-tunes of a model; None where all of its weights train.

    >>> from shardwise.plans import find_stack
    >>> job = Training(seq_len=1, global_batch=1, adapter="lora", rank=16, targets=("q", "v"))
    >>> tuning_summary(Model.load("llama-3.1-8b"), job, find_stack("transformers")).trainable_parameters
    6815744
    """
    tuning = tuning_of(job, stack, model.family)
    if tuning is None:
        return None
    return TuningSummary(
        adapter=tuning.adapter,
        rank=tuning.rank if tuning.adapter and tuning.adapter != "ia3" else 0,
        targets=tuning.targets if tuning.adapter and tuning.adapter not in VIRTUAL else (),
        base=tuning.base.name,
        adapter_precision="" if not tuning.adapter else _type_of(tuning.precision),
        trainable_by_module=trainable_parameters(model, tuning),
        parameters=count_parameters(model),
        adapter_bytes=float(_adapter_parameters(model, tuning) * tuning.precision.weight_bytes),
    )


def _type_of(precision: Precision) -> str:
    """Return the type of weights by its own name, which `adapter_precision` takes, not by that of the whole recipe."""
    narrow = "fp16" if precision.compute == "fp16" else "bf16"
    return "fp32" if precision.weight_bytes == 4 else narrow
