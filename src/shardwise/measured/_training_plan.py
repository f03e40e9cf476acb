"""From a row of a training file to the plan and the stack that it states, and what is taken where it does not."""

from __future__ import annotations

import re
from typing import cast

from shardwise.errors import InputError, Problem
from shardwise.measured._frameworks import Framework, Table, has_default, variant_of
from shardwise.measured._record import Record, refuse, words
from shardwise.measured._training_tuning import is_tuned, tuned_precision_of
from shardwise.models import Model
from shardwise.plans import (
    TUNINGS,
    ContextKind,
    Effort,
    Plan,
    Recompute,
    Schedule,
    Sharding,
    Stack,
    balanced_layers,
    find_precision,
    find_stack,
    in_groups,
    objective_named,
    precision_names,
    schedule_for,
    split_layers,
)
from shardwise.records import replace

# Words of MaxText for the axes of its mesh, in notes of rows that leave the degree blank.
_MESH = {"tp": r"\bici_tensor(?:_parallelism)?=(\d+)"}


def _degree(record: Record, name: str) -> int:
    if record.says(name):
        return record.count(name)
    noted = re.search(_MESH[name], record.text("notes")) if name in _MESH else None
    if noted:
        record.assume(f"{name}: {noted[1]}, as the notes say: {noted[0]}")
        return max(int(noted[1]), 1)
    record.rule_value("degrees")
    return record.count(name)


def plan_of(record: Record, model: Model, framework: Framework, node: int) -> Plan:
    tp, cp, pp = (_degree(record, name) for name in ("tp", "cp", "pp"))
    product = int(record.noted("model_parallel_size"))
    if product > 1 and tp * pp == 1:
        record.rule_value("model_parallel_size")
        tp = max(d for d in range(1, min(product, node) + 1) if product % d == 0 and not model_heads(model) % d)
        pp = product // tp
    experts = model.has_experts
    vpp = _vpp(record, model, pp)
    plan = Plan(
        tp=tp,
        cp=cp,
        pp=pp,
        vpp=vpp,
        dp=0,
        ep=_degree(record, "ep") if experts else 1,
        etp=_etp(record, framework, tp) if experts else 1,
        micro_batch=_micro_batch(record, framework, pp, max(record.whole("num_gpus") // (tp * cp * pp), 1)),
        sequence_parallel=_sequence_parallel(record, framework, tp, experts),
        schedule=_schedule(record, vpp),
        cp_kind=_cp_kind(record, framework, cp),
        sharding=_sharding(record, framework, experts),
        offload=_offload(record, framework),
    )
    plan = _shard(record, plan)
    if pp > model.num_layers + 2:
        rule = f"is more stages than {model.num_layers} layers and both ends fill"
        raise InputError([Problem("pp", pp, rule, "correct the cell")])
    if framework.balances_head and pp > 1 == vpp:
        return replace(plan, stage_layers=balanced_layers(model.num_layers, pp, head_in_layers(model)))
    if model.num_layers % (pp * vpp):
        record.rule_value("stage_layers")
        plan = replace(plan, stage_layers=split_layers(model.num_layers, pp * vpp, "megatron"))
    return plan


def head_in_layers(model: Model) -> float:
    """Return the products of a head in those of the first layer, as nanotron counts them: heads are all of queries."""
    block = model.layers[0]
    width = next((m.heads * m.head_dim for m in block.mixers if hasattr(m, "heads") and hasattr(m, "head_dim")), 0)
    inner = getattr(block.feed_forward, "ffn", 0)
    return model.vocab / max(4 * int(width) + 3 * int(inner), 1)


def model_heads(model: Model) -> int:
    """Return the query heads of a model, by which tensor parallelism must divide; 1 where it has none."""
    mixers = [m for block in model.kinds for m in block.mixers]
    return next((int(m.heads) for m in mixers if hasattr(m, "heads")), 1)


def _schedule(record: Record, vpp: int) -> Schedule:
    """Return the pipeline schedule: none at all where a row says that a device_map split the model."""
    return "sequential" if "device_map" in record.text("notes") else schedule_for(vpp)


def _vpp(record: Record, model: Model, pp: int) -> int:
    if pp > 1 and not record.says("vpp") and "device_map" not in record.text("notes"):
        record.rule_value("vpp")
    layers = re.fullmatch(r"(\d+) layers?", record.text("vpp"))  # of a chunk
    stated = max(round(model.num_layers / (pp * int(layers[1]))), 1) if layers else record.count("vpp")
    vpp = stated if pp > 1 else 1
    return vpp if pp * vpp <= model.num_layers or pp * vpp == model.num_layers + 2 else 1


def _etp(record: Record, framework: Framework, tp: int) -> int:
    if record.says("etp") or tp == 1:
        return record.count("etp")
    if framework.experts_over_tp:
        record.rule_value("etp_as_tp")
        return tp
    record.rule_value("etp")
    return 1


def _micro_batch(record: Record, framework: Framework, pp: int, replicas: int) -> int:
    """Return the micro-batch: the stated one, 1 in a pipeline, 0 for the fastest that fits.

    Some frameworks state the batch of a replica, which their pipeline cuts (`Framework.pipeline_batch`), as does any
    source whose pipeline would have one micro-batch.
    """
    stated, batch = record.whole("micro_batch"), record.whole("global_batch")
    chips = max(record.whole("num_gpus") // (replicas * pp), 1)
    if chips > 1 and "micro_batch is per chip" in record.text("notes"):
        # MaxText's per_device_batch_size: what the chips of a replica run together is as many times that.
        record.assume(f"micro_batch: of each of the {chips} chips of a replica, as the notes say")
        stated *= chips
    if not stated and framework.whole_batch and pp == 1 and batch >= replicas and not batch % replicas:
        record.assume("micro_batch: the batch of a replica, which the framework accumulates only where told")
        return batch // replicas
    if not stated:
        record.rule_value("micro_batch")
        return 1 if pp > 1 or not batch else 0
    if pp > 1 and framework.pipeline_batch == "sequence":
        record.assume("micro_batch: one sequence of the batch of a replica, the framework's default in a pipeline")
        return 1
    whole = batch == stated * replicas or framework.pipeline_batch == "replica"
    if pp > 1 and stated >= pp and stated % pp == 0 and whole:
        record.assume("micro_batch: the batch of a replica, cut into as many micro-batches as stages")
        return stated // pp
    if batch and stated > batch * replicas and record.notes.get("group_size"):
        # github.com/AgileRL/AgileRL agilerl/memory/README.md: micro-batches are capped by available trajectories.
        record.assume("micro_batch: the answers of one prompt, which are fewer than the stated one")
        return batch
    return stated


def pipeline_runs_of(record: Record, plan: Plan, devices: int) -> int:
    """Return how often the pipeline of a row runs in a step: once for every stated batch that was cut."""
    stated, batch = record.whole("micro_batch"), record.whole("global_batch")
    if plan.pp == 1 or not batch or not plan.micro_batch < stated:
        return 1
    runs = max(batch // (stated * max(devices // (plan.tp * plan.cp * plan.pp), 1)), 1)
    if runs > 1:
        record.assume(f"pipeline_runs: {runs} a step, one for each batch of a replica")
    return runs


def recompute_unknown(record: Record, framework: Framework) -> bool:
    """Return whether the amount of recompute is not told: not stated, or by a policy of its own."""
    if not record.says("recompute"):
        return True
    policy = "=custom" in record.text("recompute_detail") or framework.recompute_policy
    return record.text("recompute") == "selective" and policy


def _sequence_parallel(record: Record, framework: Framework, tp: int, experts: bool) -> bool:
    if record.says("sp"):
        return record.whole("sp") > 0
    if tp > 1:
        record.rule_value("sp")
    # Without it every rank of a tensor-parallel group would route all tokens (Megatron-LM arguments.py).
    return framework.sequence_parallel or (experts and tp > 1)


def _cp_kind(record: Record, framework: Framework, cp: int) -> ContextKind:
    """Return how ranks exchange keys and values: as stated, or the first kind that the row's framework runs."""
    word = record.text("cp_kind")
    own = find_stack(framework.stack).runs.cp_kind if framework.stack and cp > 1 and not word else ()
    if own and own[0] != "ring":
        record.assume(f"cp_kind: not stated: {own[0]}, which {framework.stack} runs")
        return cast(ContextKind, own[0])
    if cp > 1 and not word:
        record.rule_value("cp_kind")
    if (kind := words("cp_kind").get(word or "ring")) is None:
        raise refuse("cp_kind", word, "is not a known kind")
    return cast(ContextKind, kind)


def _sharding(record: Record, framework: Framework, experts: bool) -> Sharding:
    word = record.text("sharding")
    if not word:
        record.rule_value("sharding")
    sharding = cast("Sharding | None", words("sharding").get(word) if word else framework.sharding)
    if sharding is None:
        raise refuse("sharding", word, "is not a known kind of sharding")
    if experts and in_groups(sharding) != sharding and framework.mixture_sharding:
        sharding = cast(Sharding, framework.mixture_sharding)
        record.assume(f"sharding: {sharding}, what the framework's recipes of mixtures make of FSDP")
    return sharding


def _shard(record: Record, plan: Plan) -> Plan:
    """Return the plan with the sharding group where it is smaller than the replicas: sharding within, copies across."""
    size = int(record.noted("shard_size"))
    replicas = record.whole("dp") or record.whole("num_gpus") // (plan.tp * plan.cp * plan.pp)
    rules = plan.sharding_rules
    if rules.hybrid:
        return replace(plan, shard=size or record.whole("gpus_per_node") or 8)
    grouped = in_groups(plan.sharding)
    if size and replicas and size < replicas and (grouped != plan.sharding or rules.groups == "some"):
        return replace(plan, sharding=grouped, shard=size)
    return plan


def _offload(record: Record, framework: Framework) -> tuple[str, ...]:
    """Return what a row keeps in the host's memory; XLA's policies keep tensors there that no row names."""
    word = record.text("offload")
    if word in ("", "none"):
        return ()
    if framework.stack == "xla":
        raise refuse("offload", word, "is a choice of single tensors, which rows do not name")
    offload = words("offload").get(word)
    if offload is None:
        raise refuse("offload", word, "is not a known set of copies on the host")
    return tuple(offload.split(","))


def optimizer_of(record: Record) -> str:
    word = words("projected").get(record.text("finetune"), record.text("optimizer"))
    if not word:
        return record.rule_value("optimizer")
    projected = record.text("finetune") in words("projected")
    if projected and re.search("[+_]quant|with_embedding=true", record.text("notes")):
        rule = "with narrow projections, or of the embedding table too, is not predicted"
        raise refuse("finetune", record.text("finetune"), rule)
    optimizer = words("optimizer").get(word)
    if optimizer is None:
        raise refuse("optimizer", word, "is not modelled")
    return optimizer


def objective_of(record: Record) -> tuple[str, str]:
    """Return method and reference that a row's notes name, next tokens where none; raises `InputError` for others.

    >>> objective_of(Record({"notes": "method=simpo; 7B"})), objective_of(Record({"notes": ""}))
    (('dpo', 'none'), ('sft', ''))
    """
    word = str(record.notes.get("method", "sft"))
    named = objective_named(word)
    if named is None:
        raise refuse("method", word, "is not a method of training that is predicted")
    return named


def optimizer_rank_of(record: Record) -> int:
    """Return the rank of projected gradients that a row states, 0 where it states none.

    >>> optimizer_rank_of(Record({"finetune": "galore", "notes": "galore_rank=64/galore_per_parameter=false"}))
    64
    """
    match = re.search(r"galore_rank=(\d+)", record.text("notes")) if record.text("finetune") == "galore" else None
    return int(match[1]) if match else 0


def global_batch_of(record: Record, plan: Plan, devices: int) -> int:
    batch = record.whole("global_batch")
    replicas = max(devices // (plan.tp * plan.cp * plan.pp), 1)
    if batch:
        return batch
    record.rule_value("global_batch")
    return max(plan.micro_batch, 1) * replicas * plan.pp


def recomputed(record: Record, plan: Plan, model: Model, stack: Stack) -> Plan:
    """Return the plan with the recompute that a row states."""
    word, each = record.text("recompute"), -(-model.num_layers // plan.pp)
    if stack.settings.checkpoint_policy:
        # All of a layer runs again but the operators whose results are kept.
        return replace(plan, recompute="full")
    if word == "selective":
        return _selective(record, plan)
    if word == "partial":
        stated = re.search(r"(\d+) layers", record.text("recompute_detail"))
        if stated is None:
            record.assume("recompute of a part of the layers: half of them")
        count = each // 2 if stated is None else -(-int(stated[1]) // plan.pp)
        return replace(plan, recompute="full", recompute_layers=min(max(1, count), each))
    if word not in ("none", "full"):
        raise refuse("recompute", word, "is not a known kind of recompute")
    return replace(plan, recompute=cast(Recompute, word))


def _selective(record: Record, plan: Plan) -> Plan:
    """Return the plan that runs the named modules again, attention's core where none is named."""
    detail = record.text("recompute_detail").lower()
    table = words("modules")
    pieces = [p for p in re.split(r"[,;]\s*|\s{2,}", detail) if p]
    if any(p not in table for p in pieces):
        pieces = detail.replace(",", " ").split()
    named = tuple(dict.fromkeys(table[p] for p in pieces if p in table))
    if named in ((), ("core_attn",)):
        return replace(plan, recompute="selective")
    return replace(plan, modules=named)


def named_stack(record: Record, usual: str, model: Model, table: Table) -> str:
    """Return the name of the stack that ran a row: the stated one, or the usual one with what the cells say."""
    if not record.text("attention_kernel"):
        record.rule_value("attention_kernel")
    if record.says("stack"):
        return record.text("stack")
    return variant_of(table, usual, record.row, _experts(model))


def _experts(model: Model) -> str:
    """Return what the feed-forward of a model is, as frameworks.toml calls it."""
    experts = [block.experts for block in model.kinds if block.experts]
    if not experts:
        return "none"
    return "gated" if all(one.gated for one in experts) else "ungated"


def precision_of(record: Record, stack: str, rates: set[str], table: Table) -> str:
    """Return the recipe of a row: the widths it states, or the stack's for its type of GEMMs."""
    dtype = record.text("compute_dtype").lower()
    if not dtype:
        record.rule_value("compute_dtype")
        dtype = "bf16" if "bf16" in rates or not rates else "fp16"
    if dtype in ("fp8", "mxfp8", "nvfp4"):
        return _narrow(record, stack, dtype, rates)
    if dtype in ("fp32", "tf32"):
        return dtype
    if dtype not in ("bf16", "fp16"):
        raise refuse("compute_dtype", dtype, "is not a known data type")
    if is_tuned(record):
        return tuned_precision_of(record, dtype, rates)
    weights, gradients = record.text("param_dtype"), record.text("grad_dtype")
    own = find_stack(stack).precision
    narrow = own == f"{dtype}-grads16" or (own, dtype) == ("bf16-grads16", "fp16")
    if not gradients and narrow and has_default(table, stack, "narrow_gradients"):
        gradients = dtype
    if weights == "fp32" and dtype == "bf16":
        return "amp-bf16"
    if not weights and not gradients:
        record.rule_value("param_dtype")
        return "" if dtype == "bf16" else "fp16"
    masters = record.text("master_weights")
    mixed = masters == "1" or (masters != "0" and has_default(table, stack, "master_weights"))
    if weights == "bf16" and gradients in ("", "bf16") and not mixed:
        return "bf16-pure"
    name = f"{dtype}-grads16" if gradients in ("bf16", "fp16") else dtype
    return name if name in precision_names() else dtype


def _narrow(record: Record, stack: str, dtype: str, rates: set[str]) -> str:
    """Return the recipe of GEMMs narrower than 16 bits, with the gradients of the stack."""
    name = "fp4" if dtype == "nvfp4" and "fp4" in rates else "fp8"
    if dtype == "nvfp4":
        record.rule_value("nvfp4")
    recipe = find_stack(stack).precision
    autocast = bool(recipe) and find_precision(recipe).autocast
    if record.text("param_dtype") == "fp32" or (autocast and not record.says("param_dtype")):
        return f"{name}-amp"
    return f"{name}-grads16" if recipe.endswith("grads16") else name


def effort_of(record: Record) -> Effort:
    """Return how well a run was tuned: for a record where its source is known for that, else as most runs are."""
    effort = record.notes.get("tuning", "") or record.text("tuning")
    if effort:
        if effort not in TUNINGS:
            raise refuse("tuning", effort, "is not a way that runs are tuned")
        return effort
    cited = f"{record.text('source')} {record.text('citation')}"
    if any(re.search(pattern, cited) for pattern in words("records").values()):
        return "record"
    if is_tuned(record):
        record.rule_value("adapter_tuning")
        return "record"
    record.rule_value("tuning")
    return "typical"


def dropout_of(record: Record, model: Model, stack: str, table: Table) -> bool | None:
    """Return whether dropout is on: as the notes say (dropout=0), or the model, or Megatron-LM before Megatron-Core."""
    if record.notes.get("dropout"):
        return record.noted("dropout") > 0
    if model.dropout or not has_default(table, stack, "dropout"):
        return None
    record.rule_value("dropout")
    return True
