"""MaxText's settings: YAML over base.yml, or the words behind its training program.

Source: github.com/AI-Hypercomputer/maxtext e591f30cbb src/maxtext/configs/{base.yml,types.py,pyconfig.py},
layers/decoders.py get_remat_policy, utils/maxtext_utils.py create_device_mesh.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from math import nextafter, prod
from typing import Any

from shardwise.files import YAML_BYTES, below, file_name, read_text
from shardwise.formats import _trainer, _yaml
from shardwise.formats._exported import ORDERS, ExportCase, Exported
from shardwise.formats._imported import PLAIN, ImportContext, Imported, Keys, flat_keys, matches, table, top_level
from shardwise.formats._launch import started
from shardwise.formats._maxtext_model import USUAL, model_words, named_model
from shardwise.formats._maxtext_remat import recomputed, remat_words
from shardwise.plans import ContextKind, Plan, Schedule, Sharding, Stack, Training, find_stack, shard_of
from shardwise.records import replace

_TABLE = "maxtext.toml"
_STARTS = re.compile(r"\b(maxtext|MaxText)[./]([\w./]+[./])?train\w*\b|\bMaxText/configs/|\bmaxtext/configs/")
_OWN = {"base_config", "per_device_batch_size", "remat_policy", "max_target_length", "decoder_block", "base_emb_dim"}
_EXPORTED = (
    *("tp", "cp", "cp_kind", "pp", "vpp", "dp", "ep", "etp", "micro_batch", "sequence_parallel", "schedule"),
    *("sharding", "shard", "recompute", "offload", "order"),
)
# base.yml mesh_axes: which degree of a plan an axis adds to, the fastest links first.
_AXES = {
    "tensor": "tp", "tensor_sequence": "tp", "context": "cp", "expert": "ep", "fsdp": "shard",
    "fsdp_transpose": "shard", "pipeline": "pp", "data": "copies",
}  # fmt: skip
# Axes that split over something else: serving's, Ulysses' and those of replicas that rarely meet.
_OTHER_AXES = ("sequence", "context_usp_ulysses", "context_autoregressive", "autoregressive", "diloco")
_ROTATIONS: dict[str, ContextKind] = {"all_gather": "all-gather", "ring": "ring"}
_EIGHT = (
    *("fp8", "nanoo_fp8", "fp8_nanoo", "fp8_gpu", "fp8_full", "fp8_e4m3", "fp8_e5m2"),
    *("te_fp8_delayedscaling", "te_fp8_currentscaling", "te_mxfp8"),
)
# trainers/pre_train/train.py casts gradients of 32 bits alone to grad_dtype: those of 16-bit weights have 16.
_TYPES = {
    ("float32", "bfloat16"): "amp-bf16",
    ("float32", "float16"): "amp-fp16",
    ("bfloat16", "bfloat16"): "bf16-pure",
}
_OPTIMIZERS = {"adamw": "adam", "adam_pax": "adam", "sgd": "sgd-plain", "muon": "muon"}
_OTHER_RUNS = {
    "student_overrides": "a student beside a teacher", "teacher_overrides": "a student beside a teacher",
    "rl.": "on the answers of an engine",
}  # fmt: skip
_HOST = {"optimizer": "optimizer_memory_host_offload", "parameters": "parameter_memory_host_offload"}
SLICE = 8
"""GPUs of a node, each of which is a slice to MaxText."""


def recognises(name: str, text: str) -> bool:
    """Return whether a file holds MaxText's settings, or starts its training."""
    if name.endswith((".yaml", ".yml")):
        keys = top_level(text)
        named = re.search(r"(?m)^((ici|dcn)_\w+_parallelism[ \t]*:|base_config[ \t]*:.*\.yml)", text)
        return len(keys & _OWN) > 1 or named is not None
    return not name.endswith((".json", ".toml")) and bool(_STARTS.search(text))


def read(text: str, source: str = "maxtext.yml", around: ImportContext = PLAIN) -> Imported:
    r"""Return the case of a file, or of the words that a script starts MaxText with.

    >>> text = "base_config: base.yml\nmodel_name: llama3.1-8b\nper_device_batch_size: 2\nici_tensor_parallelism: 4\n"
    >>> case = read(text, around=ImportContext(num_devices=8))
    >>> case.plan.tp, case.plan.dp, case.plan.sharding, case.plan.micro_batch, case.job.global_batch, case.job.precision
    (4, 2, 'fsdp', 8, 16, 'amp-bf16')
    """
    if source.endswith((".yaml", ".yml")):
        around.settings_alone(source)
        return _case(_with_base(_yaml.parse(text, source), source, around), source, around)
    launch = started(text, _known, source, around.variables)
    words, rest = _yaml.assigned((*launch.arguments, *around.more))
    named = next((word for word in rest if word.endswith((".yml", ".yaml"))), launch.launch.program)
    values = _named_file(named, source, around) if named.endswith((".yml", ".yaml")) else {}
    case = _case(values | words, source, around)
    return replace(case, assumed=(*launch.notes, *case.assumed))


def read_tree(values: Mapping[str, Any], source: str, devices: int) -> Imported:
    """Return the case of settings by their names, over base.yml's, which another system's file holds."""
    return _case(dict(values), source, ImportContext(num_devices=devices))


def _known(word: str) -> bool:
    listed = table(_TABLE)
    patterns = (*listed["silent"]["keys"], *(key for one in listed["reasons"].values() for key in one["keys"]))
    return word in listed["read"] or ("_" in word and word.isidentifier() and matches(word, patterns))


def _with_base(tree: Mapping[str, Any], source: str, around: ImportContext) -> dict[str, Any]:
    """Return settings over those of the file that they name as their base, base.yml's own being the defaults."""
    values = dict(flat_keys(tree))
    base = str(values.get("base_config") or "")
    return (_named_file(base, source, around) if base else {}) | values


def _named_file(named: str, source: str, around: ImportContext) -> dict[str, Any]:
    """Return the settings of a file that is named; MaxText's own base.yml need not be here."""
    named = re.sub(r"^.*\$[^/]*/", "", named)  # below a folder of a variable, which people leave to where they start
    here = not os.path.exists(os.path.join(os.path.dirname(source), named)) and os.path.exists(named)
    usual = os.path.basename(named) == "base.yml"
    if usual and not here and not os.path.exists(os.path.join(os.path.dirname(source), named)):
        return {}
    path = below("" if here else source, named, around.follow, "base_config")
    values = _with_base(_yaml.parse(read_text(path, YAML_BYTES, "base_config"), path), path, around)
    # What base.yml says of sizes is no word against a model that is named.
    return {
        name: value
        for name, value in values.items()
        if not usual or USUAL.get(name, value) != value or name not in USUAL
    }


def _case(values: Mapping[str, Any], source: str, around: ImportContext) -> Imported:
    keys = Keys({}, _TABLE, source)
    keys.values = {path: None if value == "None" else value for path, value in values.items()}
    _yaml.refuse_open(keys)
    model = named_model(keys)
    mesh, devices = _mesh(keys, around.num_devices)
    plan = _plan(keys, mesh)
    plan = replace(plan, etp=plan.tp if model is not None and model.has_experts else 1)
    plan = replace(plan, **_pipeline(keys, plan, model.num_layers if model else 0))
    recompute, policy, host = recomputed(keys)
    memory = (name for name, path in _HOST.items() if keys.flag(path))
    plan = replace(plan, recompute=recompute, offload=(*memory, *host))
    times = keys.whole("gradient_accumulation_steps") or 1
    plan, batch = _batch(keys, plan, times)
    seq_len = keys.whole("max_target_length") or 2048
    steps = keys.whole("steps", rest=True) or 0
    job = Training(
        seq_len=seq_len, global_batch=batch * times, token_budget=float(steps * batch * times * seq_len),
        precision=_precision(keys), optimizer=_optimizer(keys), method="dpo" if keys.flag("use_dpo") else "sft",
        dropout=_dropout(keys), **_routed(keys),
    )  # fmt: skip
    if job.precision.startswith("fp8") and times > 1:
        keys.fail("quantization", "FP8 quantization is not compatible with gradient accumulation", "take one step")
    stack = find_stack("maxtext")
    recipe = "mxfp8" if keys.word("quantization") == "te_mxfp8" else stack.settings.fp8_recipe
    runs = times if plan.pp > 1 else 1
    stack = replace(
        stack, settings=replace(stack.settings, checkpoint_policy=policy, pipeline_runs=runs, fp8_recipe=recipe)
    )
    _refuse_others(keys)
    return keys.case(source, model=model, plan=plan, job=job, stack=stack, num_devices=devices)


def _refuse_others(keys: Keys) -> None:
    """Record settings that make another run of it, of which nothing here says how much it takes."""
    if keys.word("attention") == "dot_product":
        keys.fail("attention", "keeps the scores of all pairs, which is not modelled of MaxText", "use flash")
    if keys.word("custom_mesh_and_rule"):
        keys.fail("custom_mesh_and_rule", "splits weights by rules of its own, which are not read", "leave it out")
    for start, what in _OTHER_RUNS.items():
        for path in [one for one in keys.values if one.startswith(start)][:1]:
            keys.fail(path, f"trains {what}, which is not read of MaxText", "leave it out")
    if keys.flag("enable_diloco"):
        keys.fail("enable_diloco", "reduces gradients once in many steps, which no plan does", "use false")
    for path in ("enable_lora", "lora.enable_lora"):
        if keys.flag(path):
            keys.fail(path, "is not read of MaxText", "leave it out, and give --adapter lora with --rank")
    if (keys.whole("num_vocab_tiling") or 1) > 1:
        keys.assumed.append("logits of all tokens at once, not by num_vocab_tiling: memory is overstated")


def _degree(keys: Keys, path: str) -> int | None:
    """Return a degree, None where -1 stands for the rest."""
    usual = {"ici_fsdp_parallelism": -1, "dcn_data_parallelism": -1}.get(path, 1)
    return keys.whole(path, rest=True) if keys.raw(path) is not None else None if usual < 0 else 1


def _mesh(keys: Keys, asked: int) -> tuple[dict[str, tuple[int, int]], int]:
    """Return the ranks of each axis within a slice and across slices, and the devices (0: the file does not say)."""
    for axis in _OTHER_AXES:
        for path in (f"ici_{axis}_parallelism", f"dcn_{axis}_parallelism"):
            if (keys.whole(path, rest=True) or 1) > 1:
                keys.fail(path, "splits over an axis that no plan has", "use 1")
    ranks = {kind: {axis: _degree(keys, f"{kind}_{axis}_parallelism") for axis in _AXES} for kind in ("ici", "dcn")}
    fixed = {kind: prod(size for size in axes.values() if size) for kind, axes in ranks.items()}
    left = {kind: [axis for axis, size in axes.items() if not size] for kind, axes in ranks.items()}
    for kind, axes in left.items():
        for axis in axes[1:]:
            keys.fail(f"{kind}_{axis}_parallelism", f"one axis alone is left open, and {axes[0]} is", "write a number")
    whole = fixed["ici"] * fixed["dcn"]
    if asked and asked % whole:
        keys.fail("ici_fsdp_parallelism", f"all axes make {whole}, which must divide the {asked} devices", "change it")
    rest = max(asked // whole, 1)
    slices = _slices(keys, asked) if left["ici"] and left["dcn"] else fixed["dcn"] * (rest if left["dcn"] else 1)
    across = max(slices // fixed["dcn"], 1) if left["dcn"] else 1
    across = across if rest % across == 0 else 1
    open_ = {"ici": rest // across, "dcn": across}
    if asked and rest > 1 and not left["ici"] and not left["dcn"]:
        keys.fail("ici_fsdp_parallelism", f"all axes make {whole}, and there are {asked} devices", "change it or --on")
    degrees = {axis: (ranks["ici"][axis] or open_["ici"], ranks["dcn"][axis] or open_["dcn"]) for axis in _AXES}
    stated = asked or (0 if left["ici"] else whole)
    return degrees, stated


def _slices(keys: Keys, devices: int) -> int:
    """Return the slices of a run: as said, else nodes of GPUs, of which each is one, and one of TPUs.

    utils/max_utils.py get_num_slices counts the slice_index of devices.
    """
    stated = keys.whole("num_slices", rest=True)
    if stated or not keys.word("hardware").startswith("gpu") or devices <= SLICE or devices % SLICE:
        return stated or 1
    keys.assumed.append(f"num_slices {devices // SLICE}: nodes of {SLICE} GPUs, each of which is a slice")
    return devices // SLICE


def _plan(keys: Keys, mesh: Mapping[str, tuple[int, int]]) -> Plan:
    sizes = {"tp": 1, "cp": 1, "ep": 1, "shard": 1, "pp": 1, "copies": 1}
    for axis, ranks in mesh.items():
        sizes[_AXES[axis]] *= prod(ranks)
    # base.yml logical_axis_rules, embed: weights beside the experts are split over expert and context as well
    shards, copies, cp = sizes["shard"] * sizes["ep"], sizes["copies"], sizes["cp"]
    sharding: Sharding = "fsdp" if copies == 1 else "hsdp"
    over = keys.flag("shard_optimizer_over_data") and copies > 1
    if shards * cp == 1:
        sharding = "zero1" if over else "none"
    elif over:
        keys.assumed.append(f"states of the optimizer over {shards} shards alone: memory is overstated")
    kind = keys.word("context_parallel_strategy") or "all_gather"
    if cp > 1 and kind not in _ROTATIONS:
        keys.fail("context_parallel_strategy", "is not modelled of MaxText", "use all_gather or ring")
    inner = mesh["pipeline"][0] > 1 and prod(across for _, across in mesh.values()) > mesh["pipeline"][1]
    order = ORDERS[1 if inner else 0]
    return Plan(
        tp=sizes["tp"], cp=cp, pp=sizes["pp"], dp=shards * copies, ep=sizes["ep"], sharding=sharding,
        shard=shards if copies > 1 and shards * cp > 1 else 1, cp_kind=_ROTATIONS.get(kind, "all-gather"), order=order,
        # activation_embed is split over tensor, activation_norm_length over tensor_sequence: the stream is, either way
        sequence_parallel=sizes["tp"] > 1,
    )  # fmt: skip


def _pipeline(keys: Keys, plan: Plan, layers: int) -> dict[str, Any]:
    """Return schedule and pieces of a pipeline: all forward passes run before the backward passes that JAX makes.

    Source: layers/pipeline.py, whose loop over micro-batches and repeats is differentiated whole.
    """
    if plan.pp == 1:
        return {}
    if (keys.whole("pipeline_parallel_layers", rest=True) or layers) != layers and layers:
        rule = f"leaves layers outside the pipeline of {layers}"
        keys.fail("pipeline_parallel_layers", rule, "leave it out, so that all layers are in it")
    each = keys.whole("num_layers_per_pipeline_stage") or 1
    repeats = keys.whole("num_pipeline_repeats", rest=True) or layers // (plan.pp * each) or 1
    if layers and plan.pp * each * repeats != layers:
        rule = f"x stages {plan.pp} x repeats {repeats} must be the {layers} layers"
        keys.fail("num_layers_per_pipeline_stage", rule, "change one of them")
    schedule: Schedule = "gpipe" if repeats == 1 else "looped-bfs"
    return {"vpp": repeats, "schedule": schedule}


def _batch(keys: Keys, plan: Plan, times: int) -> tuple[Plan, int]:
    """Return the plan with its micro-batch, and the sequences of one of so many accumulation steps.

    configs/types.py calculate_global_batch_sizes: what all devices make is rounded down to whole sequences.
    """
    value = keys.raw("per_device_batch_size")
    each = 12.0 if value is None else value
    if isinstance(each, bool) or not isinstance(each, (int, float)) or not 0 < each < 1e9:
        keys.fail("per_device_batch_size", "must be a number above 0", "write for example 2")
        each = 1
    batch = int(plan.num_devices * each)
    delayed = 2 if keys.flag("pipeline_delay_activation_forwarding") else 1
    micro = (keys.whole("num_pipeline_microbatches", rest=True) or delayed * plan.pp) if plan.pp > 1 else 1
    if micro % plan.pp:
        keys.fail("num_pipeline_microbatches", f"must be a multiple of the {plan.pp} stages", f"use {plan.pp}")
    if batch < 1 or batch % (plan.dp * micro):
        rule = f"x {plan.num_devices} devices makes {batch} sequences, of which dp {plan.dp} x {micro} micro-batches"
        keys.fail("per_device_batch_size", f"{rule} must take whole ones", "change it")
    return replace(plan, micro_batch=max(batch // (plan.dp * micro), 1)), batch


def _precision(keys: Keys) -> str:
    stored, computed = keys.word("weight_dtype") or "float32", keys.word("dtype") or "bfloat16"
    narrow = keys.word("quantization")
    if narrow:
        if narrow not in _EIGHT or stored != "float32":
            rule = "in fp8 over weights of 32 bits is modelled alone"
            keys.fail("quantization", rule, "use fp8 with weight_dtype float32, or leave it out")
        return "fp8-amp"
    if (stored, computed) == ("float32", "float32"):
        exact = keys.word("matmul_precision") in ("highest", "float32")
        if not keys.word("hardware").startswith("gpu") and not exact:
            rule = "with matmul_precision default multiplies in 16 bits on TPUs, which no recipe has"
            keys.fail("dtype", rule, "use bfloat16, or matmul_precision highest")
        return "fp32" if exact else "tf32"
    if (stored, computed) not in _TYPES:
        keys.fail("dtype", f"has no recipe over weights of {stored}", "use bfloat16")
    if keys.word("grad_dtype") in ("bfloat16", "float16") and stored == "float32":
        keys.assumed.append("gradients of 4 bytes: they are cast to 16 bits once all are there; memory is overstated")
    if (keys.word("mu_dtype") or stored) != stored:
        keys.assumed.append(f"first moments as wide as weights, not {keys.word('mu_dtype')}: memory is overstated")
    return _TYPES.get((stored, computed), "amp-bf16")


def _optimizer(keys: Keys) -> str:
    word = keys.word("opt_type") or "adamw"
    return _trainer.known_optimizer(keys, word, _OPTIMIZERS.get(word, ""))


def _dropout(keys: Keys) -> bool:
    return _trainer.share(keys, "dropout_rate") > 0 and keys.flag("enable_dropout") is not False


def _routed(keys: Keys) -> dict[str, Any]:
    """Return how many rows experts take: all of them, or as many as their capacity, which are filled up."""
    factor = keys.raw("capacity_factor")
    if factor is None or factor == -1:
        return {}
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < 1e6:
        keys.fail("capacity_factor", "must be a number above 0, or -1", "use -1, with which no token is dropped")
        return {}
    return {"capacity_factor": float(factor), "pad_to_capacity": True}


def _split(case: ExportCase) -> dict[str, int]:
    """Return the ranks of each axis within a slice and across slices, the fastest axes within."""
    p = case.plan
    shard = max(shard_of(p) // p.ep, 1) if p.sharding_rules.weights else 1
    sizes = {"tensor": p.tp, "context": p.cp, "expert": p.ep, "fsdp": shard}
    last = {"data": max(p.dp // (shard * p.ep), 1), "pipeline": p.pp}
    if p.order == ORDERS[0]:
        sizes |= last
    else:
        sizes |= {"pipeline": p.pp, "data": last["data"]}
    room = min(case.cluster.tiers[0].size, p.num_devices)  # a pod of TPUs, a domain of NVLink
    words: dict[str, int] = {}
    for axis, size in sizes.items():
        inner = next(n for n in range(min(size, room), 0, -1) if size % n == 0 and room % n == 0)
        words |= {f"ici_{axis}_parallelism": inner, f"dcn_{axis}_parallelism": size // inner}
        room //= inner
    return words


def _each(case: ExportCase) -> float:
    """Return the sequences of a device in one accumulation step, rounded so that MaxText counts whole ones."""
    p = case.plan
    runs = case.stack.settings.pipeline_runs if p.pp > 1 else case.job.global_batch // max(p.dp * p.micro_batch, 1)
    whole = case.job.global_batch // max(runs, 1)
    each = whole / p.num_devices
    return each if int(p.num_devices * each) == whole else nextafter(each, each + 1)


def tree_of(case: ExportCase) -> dict[str, Any]:
    """Return the settings of a case over base.yml."""
    p, job = case.plan, case.job
    precision = job.precision or case.stack.precision
    stored = "bfloat16" if precision == "bf16-pure" else "float32"
    computed = {"amp-fp16": "float16", "fp32": "float32", "tf32": "float32"}.get(precision, "bfloat16")
    tree: dict[str, Any] = {"base_config": "base.yml", "run_name": case.model.name or "run"}
    tree |= {"hardware": "tpu" if "tpu" in case.cluster.device.name else "gpu", **model_words(case.model)}
    tree |= {"max_target_length": job.seq_len, "per_device_batch_size": _each(case), **_split(case)}
    if p.pp > 1:
        micro = job.global_batch // max(p.dp * p.micro_batch * case.stack.settings.pipeline_runs, 1)
        tree |= {"num_pipeline_microbatches": micro, "num_pipeline_repeats": p.vpp}
        tree |= {"num_layers_per_pipeline_stage": case.model.num_layers // (p.pp * p.vpp)}
        tree |= {"gradient_accumulation_steps": case.stack.settings.pipeline_runs}
    else:
        tree |= {"gradient_accumulation_steps": job.global_batch // max(p.dp * p.micro_batch, 1)}
    if p.cp > 1:
        tree["context_parallel_strategy"] = "ring" if p.cp_kind == "ring" else "all_gather"
    tree |= {"shard_optimizer_over_data": p.sharding_rules.shards and not p.sharding_rules.weights}
    tree |= remat_words(p, case.stack) | {path: name in p.offload for name, path in _HOST.items()}
    tree |= {"weight_dtype": stored, "dtype": computed, "quantization": _narrow(case.stack, precision)}
    tree |= {"matmul_precision": "highest"} if precision == "fp32" else {}
    words = {ours: theirs for theirs, ours in reversed(_OPTIMIZERS.items())}
    tree |= {"opt_type": words.get(job.optimizer, job.optimizer), "use_dpo": job.method == "dpo"}
    if job.capacity_factor:
        tree |= {"capacity_factor": job.capacity_factor, "sparse_matmul": False}
    if job.dropout:
        tree["dropout_rate"] = 0.1
    if job.run_tokens:
        tree["steps"] = round(job.run_tokens / job.tokens_per_step)
    return tree


def _narrow(stack: Stack, precision: str) -> str:
    return ("te_mxfp8" if stack.settings.fp8_recipe == "mxfp8" else "fp8") if precision == "fp8-amp" else ""


def export(case: ExportCase) -> Exported:
    """Return MaxText's YAML for a case; raises `InputError` naming every field that it cannot be told."""
    text = _trainer.written(case, _EXPORTED, tree_of, read)
    name = file_name(case.model.name, ".yml")
    start = f"python3 -m maxtext.trainers.pre_train.train {shlex.quote(name)}"
    return _trainer.checked_file(case, _TABLE, name, text, start)
