"""torchtitan's TOML configuration, in and out, and the launch of a release that has Python's in place of it.

Sources: torchtitan/config/job_config.py, distributed/parallel_dims.py and distributed/pipeline_parallel.py, version in
torchtitan.toml. The file has no number of devices, and names a model of torchtitan's own or of transformers.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

from shardwise.files import file_name, parse_toml
from shardwise.formats import _titan_line, _trainer
from shardwise.formats._exported import (
    Differences,
    ExportCase,
    Exported,
    changed,
    lost,
    refuse,
    unexported,
)
from shardwise.formats._imported import PLAIN, ImportContext, Imported, Keys, table
from shardwise.formats._launch import started
from shardwise.models import Model, load_model
from shardwise.plans import (
    CheckpointPolicy,
    ContextKind,
    Plan,
    Recompute,
    Schedule,
    Sharding,
    Stack,
    Training,
    find_rules,
    find_stack,
    shard_of,
    split_layers,
)
from shardwise.plans.schedules import RULES
from shardwise.records import replace

_TABLE = "torchtitan.toml"
_P = "parallelism."
_EXPORTED = frozenset(
    (
        *("tp", "cp", "cp_kind", "pp", "vpp", "dp", "ep", "etp", "micro_batch", "sequence_parallel", "schedule"),
        *("sharding", "shard", "recompute", "recompute_layers", "stage_layers", "offload"),
    )
)
_SCHEDULES: dict[str, Schedule] = {row.torch: row.name for row in RULES.values() if row.torch}
_ROTATIONS: dict[str, ContextKind] = {"allgather": "all-gather", "alltoall": "ring"}
_STACKS: dict[str, dict[str, Any]] = {
    "fsdp2": {"enable": False},
    "fsdp2-compiled": {"enable": True, "components": ["model"]},
    "fsdp2-compiled-loss": {"enable": True, "components": ["model", "loss"]},
}
_TYPES = {"amp-bf16": ("float32", "bfloat16"), "bf16-pure": ("bfloat16", "bfloat16"), "fp32": ("float32", "float32")}
_FLOAT8 = "quantize.linear.float8"
_BACKEND = "transformers_modeling_backend"


def recognises(name: str, text: str) -> bool:
    """Return whether a file is torchtitan's."""
    return name.endswith(".toml") or (
        not name.endswith((".json", ".yaml", ".yml")) and _titan_line.names_function(text)
    )


def read(text: str, source: str = "torchtitan.toml", around: ImportContext = PLAIN) -> Imported:
    r"""Return the case of a configuration on a number of devices, of which it says nothing itself.

    >>> text = "[parallelism]\ntensor_parallel_degree = 2\n[training]\nlocal_batch_size = 1"
    >>> case = read(text, around=ImportContext(num_devices=8))
    >>> case.plan.tp, case.plan.dp, case.plan.sharding
    (2, 4, 'fsdp')
    """
    if not source.endswith(".toml") and _titan_line.names_function(text):
        launch = started(text, _titan_line.TELLING.__contains__, source, around.variables)
        devices = around.num_devices or launch.launch.num_devices
        case = read_tree(_titan_line.settings_of((*launch.arguments, *around.more)), source, devices)
        return replace(
            case,
            version=table(_TABLE)["checked"]["launch"],
            assumed=(*launch.notes, *case.assumed),
            devices_per_node=launch.launch.devices_per_node,
        )
    around.settings_alone(source)
    return read_tree(parse_toml(text, source), source, around.num_devices)


def read_tree(tree: Mapping[str, Any], source: str = "", num_devices: int = 0) -> Imported:
    """Return the case of a configuration that was parsed already; raises `InputError` with everything wrong."""
    keys = Keys(tree, _TABLE, source or "settings")
    keys.renew()
    model = _model(keys)
    plan = _plan(keys, model, num_devices)
    batch = keys.whole("training.global_batch_size", rest=True) or _local(keys) * plan.dp
    steps = keys.whole("training.steps") or 0
    seq_len = keys.whole("training.seq_len") or 2048
    job = Training(
        seq_len=seq_len,
        global_batch=batch,
        token_budget=float(steps * batch * seq_len),
        precision=_precision(keys, plan),
        optimizer=_optimizer(keys),
    )
    stack = _stack(keys)
    recipe = "rowwise" if keys.word(f"{_FLOAT8}.recipe_name") == "rowwise" else stack.settings.fp8_recipe
    runs, rest = divmod(batch, _local(keys) * plan.dp) if plan.pp > 1 else (1, 0)
    if rest:
        keys.fail("training.global_batch_size", f"must be a multiple of {_local(keys) * plan.dp}", "change it")
    kept = plan.recompute == "full" and keys.word("activation_checkpoint.selective_ac_option") == "op"
    kept = kept and keys.word("activation_checkpoint.mode") != "full"
    policy: CheckpointPolicy | Literal[""] = "second-matmuls" if kept else ""
    gathered = bool(keys.flag(f"{_FLOAT8}.enable_fsdp_float8_all_gather"))
    settings = replace(stack.settings, fp8_recipe=recipe, checkpoint_policy=policy, pipeline_runs=max(runs, 1),
                       fp8_param_gather=gathered)  # fmt: skip
    stack = replace(stack, settings=settings)
    devices = _trainer.world(keys, num_devices, plan, _P + "data_parallel_shard_degree")
    return keys.case(source, model=model, plan=plan, job=job, stack=stack, num_devices=devices)


def _model(keys: Keys) -> Model | None:
    """Return the model of torchtitan's name and flavour, or of transformers' hub id, None where neither is known."""
    name, flavor = keys.raw("model.name"), str(keys.raw("model.flavor") or "")
    known = {tuple(pair): own for own, pair in table(_TABLE)["models"].items()}.get((name, flavor))
    if name == _BACKEND:
        return _trainer.model_named(keys, "hf_transformers.model")
    if known is None and name is not None:
        keys.assumed.append(f"no model: {name} {flavor} is not in the catalogue")
    return None if known is None else load_model(known)


def _local(keys: Keys) -> int:
    return keys.whole("training.local_batch_size") or 8


def _plan(keys: Keys, model: Model | None, num_devices: int) -> Plan:
    tp, cp, pp, ep, etp, copies = (
        keys.whole(_P + name) or 1
        for name in (
            *("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree"),
            *("expert_parallel_degree", "expert_tensor_parallel_degree", "data_parallel_replicate_degree"),
        )
    )
    # models/llama4/infra/parallelize.py apply_moe_ep_tp: without expert parallelism experts are split as all else is
    etp = tp if ep == 1 and model is not None and model.has_experts else etp
    used = tp * cp * pp
    shards = keys.whole(_P + "data_parallel_shard_degree", rest=True) or max(num_devices // (used * copies), 1)
    if num_devices and used * copies * shards != num_devices:
        keys.fail(_P + "data_parallel_shard_degree", f"x all others must be the {num_devices} devices", "change it")
    pieces = _pieces(keys)
    schedule = _schedule(keys, pp)
    vpp = _each(keys, "module_fqns_per_model_part", len(pieces), pp) or _virtual(keys, model, pp, schedule)
    micro = keys.whole(_P + "pipeline_parallel_microbatch_size") or 1 if pp > 1 else _local(keys)
    recompute, layers = _recompute(keys, model.num_layers // pp if model else 0)
    return Plan(
        tp=tp,
        cp=cp,
        cp_kind=_ROTATIONS.get(keys.word(_P + "context_parallel_rotate_method") or "allgather", "all-gather"),
        pp=pp,
        vpp=vpp,
        dp=copies * shards,
        ep=ep,
        etp=etp,
        micro_batch=micro,
        sequence_parallel=tp > 1 and keys.flag(_P + "enable_sequence_parallel") is not False,
        schedule=schedule,
        sharding=_sharding(keys, copies, shards * cp),
        shard=shards if copies > 1 and shards * cp > 1 else 1,
        recompute=recompute,
        recompute_layers=layers,
        # CPUOffloadPolicy of FSDP moves parameters and gradients, and so the optimizer that updates them.
        offload=("optimizer", "gradients", "parameters") if keys.flag("training.enable_cpu_offload") else (),
        stage_layers=() if _usual(pieces) else pieces,
    )


def _schedule(keys: Keys, pp: int) -> Schedule:
    word = keys.raw(_P + "pipeline_parallel_schedule") or "1F1B"
    if pp == 1:
        return "1f1b"
    if word not in _SCHEDULES:
        keys.fail(_P + "pipeline_parallel_schedule", "is not a schedule of plans", f"use {', '.join(_SCHEDULES)}")
    return _SCHEDULES.get(word, "1f1b")


def _pieces(keys: Keys) -> tuple[int, ...]:
    """Return the layers of every piece where the file lists modules."""
    parts = keys.raw(_P + "module_fqns_per_model_part") or []
    return tuple(sum(str(name).startswith("layers.") for name in part) for part in parts)


def _usual(pieces: tuple[int, ...]) -> bool:
    """Return whether pieces are equal, and torchtitan would cut as many layers into them by itself."""
    return len({*pieces}) <= 1 <= sum(pieces) and pieces == split_layers(sum(pieces), len(pieces), "torchtitan")


def _each(keys: Keys, name: str, pieces: int, pp: int) -> int:
    """Return the pieces that every stage holds (distributed/pipeline_parallel.py refuses what does not divide)."""
    if pieces % pp:
        keys.fail(_P + name, f"gives {pieces} pieces to {pp} stages, which must divide them", "change one of them")
    return -(-pieces // pp)


def _virtual(keys: Keys, model: Model | None, pp: int, schedule: Schedule) -> int:
    each = keys.whole(_P + "pipeline_parallel_layers_per_stage")
    if each and model is not None:
        ends = (keys.whole(_P + f"pipeline_parallel_{end}_stage_less_layers", 0) for end in ("first", "last"))
        layers = model.num_layers + sum(1 if end is None else end for end in ends)
        return _each(keys, "pipeline_parallel_layers_per_stage", -(-layers // each), pp)
    return find_rules(schedule).chunks[0] if pp > 1 else 1


def _sharding(keys: Keys, copies: int, shards: int) -> Sharding:
    """Return what data parallelism shards: nothing under DDP, weights too unless they are kept after forward."""
    if shards == 1 and (copies > 1 or not _titan_line.wraps_one(keys)):
        return "none"
    word = keys.word(_P + "fsdp_reshard_after_forward")
    if word == "never":
        return "shard-grad-op"
    if word == "always" and (keys.whole(_P + "pipeline_parallel_degree") or 1) > 1:
        rule = "gathers weights again for each micro-batch of a pipeline, which no plan says"
        keys.fail(_P + "fsdp_reshard_after_forward", rule, "leave it out, which keeps them gathered")
    return "hsdp" if copies > 1 else "fsdp"


def _recompute(keys: Keys, layers: int) -> tuple[Recompute, int]:
    """Return what a stage of so many layers recomputes, and how many of them (0: all)."""
    mode = keys.word("activation_checkpoint.mode") or "selective"
    if mode not in ("none", "full", "selective"):
        keys.fail("activation_checkpoint.mode", "is not a recompute of plans", "use none, selective or full")
    return _trainer.checkpointed(keys, mode, "activation_checkpoint.selective_ac_option", layers)


def _precision(keys: Keys, plan: Plan) -> str:
    if "float8" in str(keys.raw("model.converters")):
        return "fp8-amp"
    kinds = (keys.word("training.dtype") or "float32", keys.word("training.mixed_precision_param") or "bfloat16")
    if kinds == ("float32", "bfloat16") and _titan_line.uncast(keys, plan):
        return "fp32"
    precision = next((name for name, pair in _TYPES.items() if pair == kinds), "")
    if not precision:
        keys.fail("training.dtype", "has no recipe with this mixed_precision_param", "use float32 with bfloat16")
    return precision


def _optimizer(keys: Keys) -> str:
    name = keys.word("optimizer.name") or "adamw"
    if name not in ("adam", "adamw"):
        keys.fail("optimizer.name", "is not known", "use AdamW")
    if keys.word("optimizer.implementation") == "fused_opt_states_bf16":
        keys.fail(
            "optimizer.implementation", "keeps moments in bf16 beside fp32 weights, which is not counted", "use fused"
        )
    return "adam"


def _stack(keys: Keys) -> Stack:
    compiled, listed = bool(keys.flag("compile.enable")), keys.raw("compile.components") or ["model", "loss"]
    if not isinstance(listed, (str, list)):
        keys.fail("compile.components", "must be a list of parts", 'write ["model", "loss"]')
    parts = listed if isinstance(listed, list) else [str(listed)]
    # distributed/tensor_parallel.py maybe_enable_async_tp, which is asked with tensor parallelism alone
    overlaps = bool(keys.flag(_P + "enable_async_tensor_parallel"))
    overlaps = overlaps and (keys.whole(_P + "tensor_parallel_degree") or 1) > 1
    if overlaps and not (compiled and "model" in parts):
        rule = "needs compile.enable, and model among compile.components"
        keys.fail(_P + "enable_async_tensor_parallel", rule, "compile the model, or leave it out")
    if "config" in keys.values:
        return _titan_line.stack_of(compiled, parts, overlaps)
    if overlaps or not compiled:
        return find_stack("fsdp2-async-tp" if overlaps else "fsdp2")
    return find_stack("fsdp2-compiled-loss" if "loss" in parts else "fsdp2-compiled")


def tree_of(case: ExportCase) -> dict[str, dict[str, Any]]:
    """Return the configuration of a case."""
    p, job = case.plan, case.job
    precision = job.precision or case.stack.precision
    kept, computed = _TYPES.get(precision, _TYPES["amp-bf16"])
    shards = shard_of(p) if p.sharding_rules.shards else 1
    parallel: dict[str, Any] = {
        "data_parallel_replicate_degree": p.dp // shards,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "never" if p.sharding_rules.keeps_gathered else "default",
        "tensor_parallel_degree": p.tp,
        "context_parallel_degree": p.cp,
        "pipeline_parallel_degree": p.pp,
        "expert_parallel_degree": p.ep,
        "expert_tensor_parallel_degree": p.etp,
    }
    if p.cp > 1:
        parallel["context_parallel_rotate_method"] = _named(_ROTATIONS, p.cp_kind)
    if p.pp > 1:
        parallel |= {"pipeline_parallel_schedule": _named(_SCHEDULES, p.schedule)}
        parallel |= {"pipeline_parallel_microbatch_size": p.micro_batch}
        # A complete plan lists its layers where they are not all equal.
        sizes = p.stage_layers or split_layers(case.model.num_layers, p.pp * p.vpp, "uniform")
        parallel |= {"module_fqns_per_model_part": _parts(sizes)}
    # A run of the pipeline takes the local batch (train.py, gradient_accumulation_steps).
    local = job.global_batch // (p.dp * case.stack.settings.pipeline_runs) if p.pp > 1 else p.micro_batch
    training: dict[str, Any] = {"local_batch_size": local, "global_batch_size": job.global_batch}
    training |= {"seq_len": job.seq_len, "dtype": kept, "mixed_precision_param": computed}
    if "parameters" in p.offload:
        training["enable_cpu_offload"] = True
    if job.run_tokens:
        training["steps"] = round(job.run_tokens / job.tokens_per_step)
    own = case.stack.settings
    float8: dict[str, Any] = {"enable_fsdp_float8_all_gather": True} if own.fp8_param_gather else {}
    float8 = {"recipe_name": own.fp8_recipe} if own.fp8_recipe else float8
    scaled = {"quantize": {"linear": {"float8": float8}}} if float8 and precision == "fp8-amp" else {}
    return {
        **_named_model(case, precision),
        **scaled,
        "training": training,
        "optimizer": {"name": "AdamW"},
        "parallelism": parallel | {"enable_async_tensor_parallel": case.stack.name == "fsdp2-async-tp"},
        "activation_checkpoint": _checkpointing(case),
        "compile": dict(_STACKS.get(case.stack.name, {"enable": True, "components": ["model"]})),
    }


def _checkpointing(case: ExportCase) -> dict[str, str]:
    """Return what is recomputed: nothing, all, by operator, or every so many layers of a stage."""
    p = case.plan
    if p.recompute == "none":
        return {"mode": "none"}
    if case.stack.settings.checkpoint_policy:
        return {"mode": "selective", "selective_ac_option": "op"}
    if p.recompute_layers:
        return {"mode": "selective", "selective_ac_option": str(case.model.num_layers // p.pp // p.recompute_layers)}
    return {"mode": "full"}


def _named(words: Mapping[str, str], value: str) -> str:
    """Return torchtitan's word for a value, its default where it has none: what comes back is then another."""
    return next((theirs for theirs, ours in words.items() if ours == value), next(iter(words)))


def _named_model(case: ExportCase, precision: str) -> dict[str, dict[str, Any]]:
    """Return the tables that name a model: torchtitan's own, or a hub id of transformers."""
    model = case.model
    converters = {"converters": [_FLOAT8]} if precision == "fp8-amp" else {}
    own = table(_TABLE)["models"].get(model.name)
    if own is not None:
        return {"model": {"name": own[0], "flavor": own[1], **converters}}
    job = {"custom_config_module": "torchtitan.experiments.transformers_modeling_backend.job_config"}
    named = {"model": {"name": _BACKEND, "flavor": "full", **converters}}
    return {"job": job, **named, "hf_transformers": {"model": _trainer.hub_id(case)}}


def _parts(sizes: tuple[int, ...]) -> list[list[str]]:
    """Return the modules of every piece of so many layers: the embedding first, the norm and the head last."""
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    parts = [[f"layers.{i}" for i in range(a, b)] for a, b in pairwise(ends)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def export(case: ExportCase) -> Exported:
    """Return torchtitan's TOML for a case; raises `InputError` naming every field that it cannot be told."""
    import tomli_w

    ours, differing = unexported(case.plan, _EXPORTED)
    tree, checked = tree_of(replace(case, plan=ours)), table(_TABLE)["checked"]
    back = read_tree(tree, num_devices=ours.num_devices)
    refuse("torchtitan", differing | _lost(replace(case, plan=ours), back), case)
    name = file_name(case.model.name, ".toml")
    nodes = max(ours.num_devices // case.cluster.devices_per_node, 1)
    launch = f"torchrun --nnodes {nodes} --nproc_per_node {ours.num_devices // nodes} -m torchtitan.train"
    launch += f" --job.config_file {shlex.quote(name)}"
    start = f"start it with: {launch}"
    head = f"# {case.model.name} on {ours.num_devices} devices, for torchtitan {checked['version']}.\n# {start}\n"
    return Exported(
        system="torchtitan",
        version=checked["version"],
        files={name: head + tomli_w.dumps(tree)},
        notes=(start, "data, learning rate and checkpoints are yours to add"),
        launch=launch,
    )


def _lost(case: ExportCase, back: Imported) -> Differences:
    """Return what of the model and of the job does not come back."""
    differing = lost(case, back)
    if back.model is None or back.model.name != case.model.name:
        differing["model"] = (case.model.name, back.model.name if back.model else "")
    if any(block.feed_forward is not None and hasattr(block.feed_forward, "experts") for block in case.model.kinds):
        own = case.model.name in table(_TABLE)["models"]
        pair = (case.model.name, case.model.name if own else "one of " + ", ".join(table(_TABLE)["models"]))
        differing |= changed({"model": pair})
    return differing
