"""nanotron's configuration: pre-training with tensor, pipeline, context, data and expert parallelism and ZeRO-1.

Source: github.com/huggingface/nanotron src/nanotron/config/config.py, parallelism_config.py and models_config.py, main
of 2026-04; optim/gradient_accumulator.py for what stays of gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import InputError
from shardwise.formats import _trainer, _yaml
from shardwise.formats._exported import ExportCase, Exported
from shardwise.formats._imported import PLAIN, ImportContext, Imported, Keys, top_level
from shardwise.models import MLP, MOST_LAYERS, Attention, Block, Model, MoE, catalogue, model_from_config
from shardwise.plans import Plan, Schedule, Stack, Training, find_stack
from shardwise.records import replace

_TABLE = "nanotron.toml"
_P, _T, _O, _M = "parallelism.", "tokens.", "optimizer.", "model."
_CONFIG = _M + "model_config."
_EXPERTS = _CONFIG + "moe_config."
# config/models_config.py MoEConfig
_MOE = {
    "num_experts": ("num_experts", 8), "top_k": ("num_experts_per_tok", 2),
    "moe_intermediate_size": ("moe_intermediate_size", 1408),
    "shared_expert_intermediate_size": ("shared_expert_intermediate_size", 5632),
}  # fmt: skip
_LAYERS = ("is_llama_config", "is_qwen2_config")
# config/models_config.py LlamaConfig and Qwen2Config
_USUAL = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
# parallelism_config.py __post_init__: without an engine all forward passes run before the first backward pass.
_ENGINES: dict[str, Schedule] = {"1f1b": "1f1b", "afab": "gpipe"}
_EXPORTED = (
    *("tp", "cp", "pp", "dp", "ep", "micro_batch", "sequence_parallel", "sharding", "schedule", "recompute", "cp_kind"),
)


def recognises(name: str, text: str) -> bool:
    """Return whether a file is nanotron's: YAML with parallelism and tokens."""
    return name.endswith((".yaml", ".yml")) and {"parallelism", "tokens"} <= top_level(text)


def read(text: str, source: str = "nanotron.yaml", around: ImportContext = PLAIN) -> Imported:
    r"""Return the case of a configuration, which says how many devices it takes.

    >>> text = "parallelism: {dp: 4, pp: 1, tp: 2, tp_mode: REDUCE_SCATTER}\noptimizer: {zero_stage: 1}\n"
    >>> text += "tokens: {sequence_length: 4096, micro_batch_size: 3, batch_accumulation_per_replica: 2}"
    >>> case = read(text)
    >>> case.num_devices, case.plan.sharding, case.job.global_batch, case.plan.sequence_parallel
    (8, 'zero1', 24, True)
    """
    around.settings_alone(source)
    keys = Keys(_yaml.parse(text, source), _TABLE, source)
    plan = _plan(keys)
    plan, batch, _ = _trainer.batches(keys, plan, _T + "micro_batch_size", _T + "batch_accumulation_per_replica", 1)
    seq_len = keys.whole(_T + "sequence_length") or 0
    job = Training(
        seq_len=seq_len,
        global_batch=batch,
        token_budget=float((keys.whole(_T + "train_steps") or 0) * batch * seq_len),
        precision=_precision(keys),
        optimizer=_optimizer(keys),
    )
    for path in ("dp", "tp", "pp"):
        if keys.whole(_P + path) is None:
            keys.fail(_P + path, "is missing: nanotron has no default of it", "write a whole number")
    if around.num_devices and around.num_devices != plan.num_devices:
        rule = f"x all other degrees is {plan.num_devices}, and there are {around.num_devices} devices"
        keys.fail(_P + "dp", rule, "change the degrees or --on")
    return keys.case(
        source, model=_model(keys), plan=plan, job=job, stack=_stack(keys), num_devices=plan.num_devices
    )  # fmt: skip


def _plan(keys: Keys) -> Plan:
    tp, pp, dp, cp, ep = (
        keys.whole(_P + name) or 1 for name in ("tp", "pp", "dp", "context_parallel_size", "expert_parallel_size")
    )
    engine = keys.word(_P + "pp_engine") or "afab"
    if engine not in _ENGINES:
        keys.fail(_P + "pp_engine", "is not an engine of nanotron", "use 1f1b or afab")
    if pp > 1:
        keys.assumed.append("the layers are spread evenly: nanotron balances stages by the cost of their blocks")
    stage = keys.whole(_O + "zero_stage", least=0) or 0
    return Plan(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        ep=ep,
        sequence_parallel=tp > 1 and keys.word(_P + "tp_mode") == "reduce_scatter",
        schedule=_ENGINES.get(engine, "gpipe") if pp > 1 else "1f1b",
        sharding="zero1" if stage else "none",
        recompute="full" if keys.flag(_P + "recompute_layer") else "none",
    )


def _precision(keys: Keys) -> str:
    """Return the recipe: 16-bit weights, with an fp32 sum of gradients and fp32 weights beside where asked."""
    dtype = keys.word(_M + "dtype") or "bfloat16"
    whole = keys.flag(_O + "accumulate_grad_in_fp32")
    if dtype in ("float32", "double"):
        return "fp32"
    if dtype not in ("bfloat16", "float16"):
        keys.fail(_M + "dtype", "is not a type of weights", "use bfloat16")
    narrow = "bf16" if dtype == "bfloat16" else "fp16"
    return narrow if whole or whole is None else "bf16-pure"


def _optimizer(keys: Keys) -> str:
    word = keys.word(_O + "optimizer_factory.name") or "adamw"
    optimizer = {"adamw": "adam", "adam": "adam", "sgd": "sgd-plain"}.get(word, "")
    return _trainer.known_optimizer(keys, word, optimizer)


def _stack(keys: Keys) -> Stack:
    stack = find_stack("nanotron")
    # parallel/tensor_parallel/functional.py: gathered again into MemoryBuffer, else into a tensor that is saved.
    again = keys.flag(_P + "tp_recompute_allgather") is not False
    stack = replace(stack, overlap_input_gradients=bool(keys.flag(_P + "tp_linear_async_communication")))
    multiple = keys.whole(_M + "make_vocab_size_divisible_by") or stack.vocab_multiple
    return replace(stack, regathers_inputs=again, keeps_gathered=again, vocab_multiple=multiple)


def _model(keys: Keys) -> Model | None:
    """Return the model of the sizes: Llama's layers, or Qwen2's where the file says so."""
    sizes = {path.removeprefix(_CONFIG): value for path, value in keys.values.items() if path.startswith(_CONFIG)}
    if not sizes:
        keys.assumed.append("no model: the file has no model_config")
        return None
    experts = {name: sizes.pop(name) for name in tuple(sizes) if name.startswith("moe_config")}
    other = [name for name, on in sizes.items() if name not in _LAYERS and on and name.startswith("is_")]
    if other:
        keys.assumed.append(f"no model: layers of {other[0]} are not read")
        return None
    # models/qwen.py Qwen2Attention takes attention_bias, which is off unless said; models/llama.py takes none.
    biased = sizes.pop("attention_bias", False) and sizes.get("is_qwen2_config")
    kind, sizes = "qwen2" if biased else "llama", _USUAL | sizes
    named = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[kind]
    routed = _routed(keys, sizes, bool(biased)) if any(one is not None for one in experts.values()) else {}
    config = {**sizes, "model_type": kind, "architectures": [named]} | routed
    try:
        model = model_from_config(config, name="nanotron")
        return _with_own_experts(keys, model) if routed else model
    except InputError as error:
        for problem in error.problems:
            keys.problems.add(_CONFIG + problem.field, problem.value, problem.rule, problem.remedy)
        return None


def _routed(keys: Keys, sizes: Mapping[str, Any], biased: bool) -> dict[str, Any]:
    """Return what experts change of a configuration: they are Qwen2-MoE's (src/nanotron/nn/moe.py Qwen2MoELayer)."""
    if not sizes.get("is_qwen2_config"):
        keys.fail(_EXPERTS + "num_experts", "is of Qwen2's layers alone", "set is_qwen2_config: true")
    layers, count = keys.raw(_EXPERTS + "layers"), keys.whole(_CONFIG + "num_hidden_layers") or 32
    every = range(min(count, MOST_LAYERS))
    dense = [layer for layer in every if isinstance(layers, list) and layers != [-1] and layer not in layers]
    if (keys.whole(_P + "expert_parallel_size") or 1) > 1:
        keys.fail(_P + "expert_parallel_size", "sends no token to another rank: nanotron has no dispatch", "use 1")
    if (keys.whole(_P + "tp") or 1) > 1:
        keys.assumed.append("experts over all tokens once: each tensor-parallel rank has and runs them all")
    whole = {theirs: keys.whole(_EXPERTS + ours) or usual for ours, (theirs, usual) in _MOE.items()}
    return whole | {
        "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1,
        "mlp_only_layers": dense, "qkv_bias": biased,
    }  # fmt: skip


def _with_own_experts(keys: Keys, model: Model) -> Model:
    """Return a model whose router multiplies in fp32, and without the shared expert where none is asked for."""
    shared = bool(keys.flag(_EXPERTS + "enable_shared_expert"))

    def block(one: Block) -> Block:
        feed = one.feed_forward
        if not isinstance(feed, MoE):
            return one
        own = replace(feed, float_router=True)
        return replace(one, feed_forward=own if shared else replace(own, shared=None, shared_gate=False))

    return replace(model, layers=tuple(map(block, model.layers)))


def _sizes(model: Model) -> dict[str, Any]:
    """Return nanotron's sizes of a model of like layers, those of its catalogue entry where it has one.

    Nothing where layers are not those of a Llama.
    """
    config: Mapping[str, Any] = catalogue().get(model.name, {}).get("config", {})
    block = model.layers[0]
    mixer, feed = block.mixers[0] if block.mixers else None, block.feed_forward
    if not (isinstance(mixer, Attention) and isinstance(feed, MLP)):
        return {}
    sizes: dict[str, Any] = {
        "hidden_size": model.hidden,
        "intermediate_size": feed.ffn,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_context or 4096,
        "tie_word_embeddings": model.tied,
    }
    kind = "qwen2" if mixer.qkv_bias or config.get("model_type") == "qwen2" else "llama"
    return sizes | {f"is_{kind}_config": True} | ({"attention_bias": True} if mixer.qkv_bias else {})


def tree_of(case: ExportCase) -> dict[str, Any]:
    """Return the configuration of a case."""
    p, job = case.plan, case.job
    precision = job.precision or case.stack.precision
    parallel: dict[str, Any] = {
        "dp": p.dp,
        "pp": p.pp,
        "tp": p.tp,
        "pp_engine": next((theirs for theirs, ours in _ENGINES.items() if ours == p.schedule), "1f1b"),
        "tp_mode": "REDUCE_SCATTER" if p.sequence_parallel and p.tp > 1 else "ALL_REDUCE",
        "tp_linear_async_communication": case.stack.overlap_input_gradients,
        "recompute_layer": p.recompute == "full",
        "tp_recompute_allgather": case.stack.regathers_inputs,
        "expert_parallel_size": p.ep,
        "context_parallel_size": p.cp,
    }
    tokens: dict[str, Any] = {
        "sequence_length": job.seq_len,
        "micro_batch_size": p.micro_batch,
        "batch_accumulation_per_replica": max(job.global_batch // max(p.micro_batch * p.dp, 1), 1),
        "train_steps": round(job.run_tokens / job.tokens_per_step) if job.run_tokens else 1000,
    }
    factory: dict[str, Any] = {"name": {"adam": "adamW", "sgd-plain": "sgd"}.get(job.optimizer, job.optimizer)}
    if job.optimizer == "adam":  # config.py SGDOptimizerArgs has a name alone, and dacite refuses what it lacks
        factory |= {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "torch_adam_is_fused": True}
    optimizer: dict[str, Any] = {
        "zero_stage": int(p.sharding_rules.shards),
        "accumulate_grad_in_fp32": precision != "bf16-pure",
        "clip_grad": 1.0,
        "weight_decay": 0.1,
        # config.py LRSchedulerArgs.__post_init__ refuses its own default of lr_warmup_style
        "learning_rate_scheduler": {"learning_rate": 3e-4, "lr_warmup_style": "linear", "min_decay_lr": 0.0},
        "optimizer_factory": factory,
    }
    kind = {"fp32": "float32", "fp16": "float16"}.get(precision, "bfloat16")
    model: dict[str, Any] = {"dtype": kind, "init_method": {"std": 0.025}, "model_config": _sizes(case.model)}
    if case.stack.vocab_multiple > 1:
        model["make_vocab_size_divisible_by"] = case.stack.vocab_multiple
    return {"general": {"project": case.model.name}, "parallelism": parallel, "tokens": tokens} | {
        "optimizer": optimizer, "model": model,
    }  # fmt: skip


def export(case: ExportCase) -> Exported:
    """Return nanotron's YAML for a case; raises `InputError` naming every field that it cannot be told."""
    text = _trainer.written(case, _EXPORTED, tree_of, read)
    nodes, each = _trainer.processes(case)
    start = f"torchrun --nnodes {nodes} --nproc_per_node {each} run_train.py --config-file nanotron.yaml"
    return _trainer.checked_file(case, _TABLE, "nanotron.yaml", text, start)
