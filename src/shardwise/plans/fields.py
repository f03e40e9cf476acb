"""One table of what users say of a plan, a job and a framework: the key, its type and limits, and what it means.

A row is the key of a case file and, with dashes, a flag; `sets` are the fields of `Plan`, `Training`, `Serving` or
`Settings` that it fills. Checks, flags, help, case files and what a search varies are read from it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, Literal, TypeAlias

from shardwise.plans._attention import ATTENTIONS
from shardwise.plans._bases import base_names
from shardwise.plans._jobs import OBJECTIVES, REFERENCES, TUNINGS
from shardwise.plans._optimizers import OPTIMIZERS
from shardwise.plans._plan import CONTEXT_KINDS, LAYOUTS, RECOMPUTES, SHARDINGS
from shardwise.plans._precision import SCALINGS
from shardwise.plans._settings import CHECKPOINT_POLICIES, LOSSES, ROLLOUTS
from shardwise.plans._tuning import ADAPTERS, LAYER_WORDS, TRAINS
from shardwise.plans.schedules import SCHEDULES
from shardwise.records import dataclass

# What a value is; numbers are read with the unit of their type.
Type: TypeAlias = Literal[
    "whole",
    "wholes",
    "count",
    "ratio",
    "factor",
    "share",
    "part",
    "failures",
    "seconds",
    "bytes",
    "switch",
    "choice",
    "precision",
    "text",
    "words",
    "order",
    "places",
]
MOST = 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One key: what its value is, from `least` to `most` where it is a whole number, and what it means.

    `only_asked` are words that stand for a deduction. `searched`: a search tries values, one for all plans, or none.
    `taken_by` are commands that take it beside those of training cases. `in_blocks`: what a block of layers costs may
    depend on it. `exported`: frameworks are told it; the rest is assumed of data, of machines and of how a run goes.
    """

    key: str
    type: Type
    help: str
    least: int = 1
    most: int = MOST
    choices: tuple[str, ...] = ()
    only_asked: tuple[str, ...] = ()
    sets: tuple[str, ...] | None = None
    searched: Literal["values", "one", "no"] = "one"
    taken_by: str = ""
    in_blocks: bool = True
    exported: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The fields of the record that it fills."""
        return (self.key,) if self.sets is None else self.sets


def _plan(key: str, type_: Type, meaning: str, **more: Any) -> Field:
    return Field(**{"key": key, "type": type_, "help": meaning, "searched": "values", **more})


def _around(key: str, type_: Type, meaning: str, **more: Any) -> Field:
    """Return a field on which no block depends."""
    return _plan(key, type_, meaning, in_blocks=False, **more)


PLAN: tuple[Field, ...] = (
    _plan("tp", "whole", "tensor-parallel degree", taken_by="infer count"),
    _plan("tp2", "whole", "second tensor-parallel degree of the two-dimensional layout"),
    _plan("cp", "whole", "context-parallel degree", taken_by="count"),
    _around("pp", "whole", "pipeline stages", taken_by="infer"),
    _around("vpp", "whole", "chunks of the model on each stage"),
    _around("dp", "whole", "replicas; left out, what fills the cluster", taken_by="infer"),
    _plan("ep", "whole", "expert-parallel degree", taken_by="infer count"),
    _plan("etp", "whole", "tensor-parallel degree of experts", taken_by="infer count"),
    _plan(
        "micro_batch",
        "whole",
        "sequences that a replica runs in one pass; left out, fastest that fits at 90% (without --global-batch most)",
    ),
    _plan("layout", "choice", "how GEMMs are split", choices=LAYOUTS),
    _plan("panels", "whole", "panels of the two-dimensional layout"),
    _plan(
        "sequence_parallel",
        "switch",
        "Megatron's sequence parallelism; on where tp is above 1",
        searched="one",
        taken_by="count",
    ),
    _plan(
        "cp_kind",
        "choice",
        "how context parallelism exchanges keys and values",
        choices=CONTEXT_KINDS,
        taken_by="count",
    ),
    _plan("schedule", "choice", "pipeline schedule", choices=SCHEDULES),
    _around("sharding", "choice", "what data parallelism shards", choices=SHARDINGS),
    _around("shard", "whole", "size of a sharding group of hsdp and shard-grad-op"),
    _plan(
        "recompute",
        "choice",
        "activation recomputation; auto is the least that fits, at 90%",
        choices=RECOMPUTES,
        only_asked=("auto",),
        taken_by="count",
    ),
    _around("recompute_layers", "whole", "recompute only so many layers of each stage, 0 for all", least=0),
    _around(
        "offload",
        "words",
        "what is offloaded to the host: optimizer, gradients, parameters, activations",
    ),
    _plan("modules", "words", "Megatron's modules to recompute as well"),
    _around("stage_layers", "wholes", "layers of every stage, where they differ", taken_by="infer"),
    _around(
        "order",
        "order",
        "axes from the fastest links outwards, by default tp-cp-ep-dp-pp in training and tp-cp-ep-pp-dp in engines",
        searched="one",
        taken_by="infer",
    ),
    _around(
        "fast",
        "places",
        "ranks of each axis that share the fastest domain; left out, the first of the order fill it",
        searched="one",
        taken_by="infer",
    ),
    _around("stack", "text", "framework; `shardwise stacks` lists them", sets=(), searched="one", taken_by="count"),
)


def _job(key: str, type_: Type, meaning: str, **more: Any) -> Field:
    return Field(**{"key": key, "type": type_, "help": meaning, **more})


def _assumed(key: str, type_: Type, meaning: str, **more: Any) -> Field:
    """Return a field that no framework is told."""
    return _job(key, type_, meaning, exported=False, **more)


def _counted(key: str, type_: Type, meaning: str, **more: Any) -> Field:
    return _job(key, type_, meaning, taken_by="count", **more)


TRAINING: tuple[Field, ...] = (
    _counted("seq_len", "whole", "tokens of a sequence; left out, 4096 in training"),
    _job("global_batch", "whole", "sequences of a step", searched="values"),
    _job("accumulation", "whole", "micro-batches of a step on each replica", sets=(), searched="no"),
    _counted(
        "precision", "precision", "bytes of each copy of a parameter; left out, the framework's own", searched="values"
    ),
    _counted("dtype", "text", "the precision by its bits, such as w16a16e16; `shardwise dtypes` lists them", sets=()),
    _job("optimizer", "choice", "optimizer", choices=tuple(OPTIMIZERS), searched="values"),
    _job("optimizer_rank", "whole", "rank of projected gradients; left out, 128 of galore and 256 of apollo"),
    _job("dropout", "switch", "whether dropout keeps masks; left out, the model's"),
    _job("softmax_dropout", "switch", "dropout of attention probabilities"),
    _job("attention_dropout", "switch", "dropout of the attention output"),
    _job("hidden_dropout", "switch", "dropout of the embedding and of the MLP output"),
    _counted("tokens", "count", "tokens of the whole run, such as 15T", sets=("token_budget",)),
    _counted("samples", "count", "samples of the whole run, in place of tokens", sets=("sample_budget",)),
    _counted("epochs", "count", "epochs of those tokens or samples; left out, 1"),
    _assumed("expert_imbalance", "ratio", "load of the busiest expert rank over the mean"),
    _job("capacity_factor", "factor", "expert capacity over the mean load; tokens beyond it are dropped"),
    _job("pad_to_capacity", "switch", "pad every expert to its capacity"),
    _assumed(
        "tuning", "choice", "how well the run is tuned: record, or typical of what people publish", choices=TUNINGS
    ),
    _assumed("attention_density", "share", "share of the attention square that packed documents leave"),
    _assumed(
        "document_lengths",
        "wholes",
        "tokens of documents packed into a sequence, for their attention density",
        sets=("attention_density",),
    ),
    _counted(
        "adapter", "choice", "fine-tune with adapters beside frozen weights, by this method", choices=tuple(ADAPTERS)
    ),
    _counted("rank", "whole", "rank of the adapters, or virtual tokens of prefix and prompt; left out, 8", most=65536),
    _counted("oft_block_size", "whole", "features of a block of OFT, in place of a rank; left out, 32", most=65536),
    _counted(
        "targets",
        "words",
        "layers with adapters: all-linear (left out), attention, mlp, experts, embedding, head, or names such as q,v",
    ),
    _counted("adapter_alpha", "count", "alpha of LoRA, which changes neither bytes nor seconds"),
    _counted("adapter_dropout", "part", "share of an adapter's input that is dropped, such as 0.05"),
    _counted(
        "adapter_precision", "choice", "type of adapters; left out, the framework's own", choices=("fp32", "bf16")
    ),
    _counted("base", "choice", "format of frozen matrices, nf4 of --qlora; left out, 16 bits", choices=base_names()),
    _counted(
        "trains",
        "words",
        f"what of the model trains: {', '.join(TRAINS)}, {LAYER_WORDS}; left out, all, or none with an adapter",
    ),
    _job("method", "choice", "what is optimised: next tokens, or preferences or rewards", choices=tuple(OBJECTIVES)),
    _job("reference", "choice", "what the method compares with; left out, the framework's own", choices=REFERENCES),
    _assumed("failures_per_device_hour", "failures", "failures of a device in an hour"),
    _assumed("restart", "seconds", "time to come back after a failure", sets=("restart_seconds",)),
    _assumed("checkpoint", "seconds", "time that a checkpoint stops the run", sets=("checkpoint_seconds",)),
    _assumed("checkpoint_interval", "seconds", "time between checkpoints", sets=("checkpoint_interval_seconds",)),
)

_BITS = ("mlp_input_bits", "activation_input_bits", "mlp_down_input_bits")
SETTINGS: tuple[Field, ...] = (
    _job("norm_bytes", "whole", "bytes an element of the norm input saved for backward", most=8),
    _job("mlp_bits", "whole", "bits an element of all three saved MLP tensors", most=32, sets=_BITS),
    _job("mlp_input_bits", "whole", "bits an element of the saved input of the MLP (fc1)", most=32),
    _job("activation_input_bits", "whole", "bits an element of the saved input of the activation function", most=32),
    _job("mlp_down_input_bits", "whole", "bits an element of the saved input of the down projection (fc2)", most=32),
    _job("fp8_recipe", "choice", "scaling of FP8 GEMMs; left out, tensorwise", choices=SCALINGS),
    _job("bf16_first_layers", "whole", "first layers in BF16 under FP8 or FP4 (num-layers-at-start-in-bf16)", least=0),
    _job("bf16_last_layers", "whole", "last layers in BF16 under FP8 or FP4 (num-layers-at-end-in-bf16)", least=0),
    _job("bf16_mtp_layers", "switch", "multi-token prediction layers in BF16 under FP8 or FP4"),
    _job("fp8_param_gather", "switch", "store and all-gather weights in FP8 (Megatron's fp8-param-gather)"),
    _job(
        "checkpoint_policy",
        "choice",
        "GEMM outputs that full recomputation keeps (torchtitan's op: second-matmuls, MaxText's minimal: matmuls)",
        choices=CHECKPOINT_POLICIES,
    ),
    _job("partition_activations", "switch", "split activation checkpoints over the tensor-parallel ranks (ZeRO-R)"),
    _job("optimizer_in_backward", "switch", "update each parameter in backward (LOMO)", sets=("updates_in_backward",)),
    _job("quantize_moe_experts", "switch", "experts in the format of the base's linear layers (axolotl)"),
    _job("pipeline_runs", "whole", "pipeline flushes in a step (torch's schedules)"),
    _job("sync_each_batch", "switch", "reduce-scatter FSDP gradients every micro-batch (accelerate)"),
    _job("loss", "choice", "cross entropy; left out, the framework's own", choices=LOSSES),
    _job("attn_implementation", "choice", "attention of transformers' models", choices=ATTENTIONS, sets=()),
    _job("tile_mlp", "whole", "chunks of the MLP, each recomputed in backward (ALST's TiledMLP)", most=4096),
    _job("bucket_elements", "count", "elements of a gradient or weight bucket, such as 5e8"),
    _job("max_live_parameters", "count", "parameters that ZeRO-3 keeps gathered, such as 1e9"),
    _assumed("misc_memory", "bytes", "other memory in use on a device, such as 5GiB", sets=("misc_bytes",)),
    _job("rollout", "choice", "where the rollout engine is while the policy trains", choices=ROLLOUTS),
    _job("rollout_memory", "bytes", "memory of the rollout engine when awake, such as 24GiB", sets=("rollout_bytes",)),
    _job("rollout_prompt_tokens", "whole", "tokens of a prompt; with it rollouts of grpo and ppo are timed (vLLM)"),
    _job("rollout_tp", "whole", "tensor-parallel degree of the rollout engine"),
    _job("rollout_devices", "whole", "devices of a separate rollout engine; left out, the trainer's count"),
    _job("rollout_samples", "whole", "samples of a rollout that several steps train on; left out, those of a step"),
)

SPECULATION = ("draft_model", "eagle", "mtp", "ngram")
"""Ways of speculative decoding, as vLLM names them (vllm/config/speculative.py)."""

SERVING: tuple[Field, ...] = (
    _assumed("batch", "whole", "requests at once on each replica", searched="values"),
    _assumed("input_tokens", "whole", "tokens of a prompt; left out, 512"),
    _assumed("output_tokens", "whole", "tokens generated for a request; left out, 32; 0 for one pass", least=0),
    _job("weights", "text", "format of the weights, such as fp8; left out, the checkpoint's own", searched="values"),
    _job("dtype", "text", "the format by its bits, such as w8a8e16; `shardwise dtypes` lists them", sets=("weights",)),
    _job("kv_cache", "text", "format of the KV cache", searched="values"),
    _job("compute", "text", "data type of GEMMs", searched="values"),
    _job("memory_fraction", "share", "share of memory the engine may use (gpu_memory_utilization)"),
    _assumed("prefix_tokens", "whole", "tokens of the prompt that hit the prefix cache", least=0),
    _job("max_batched_tokens", "whole", "tokens of one prefill step"),
    _job("max_sequences", "whole", "sequences at once (vLLM's max_num_seqs); left out, the engine's default"),
    _job("adapter_rank", "whole", "rank of the adapters (LoRA) that the engine has room for; 0 for none", least=0),
    _job("adapters", "whole", "adapters in memory at once"),
    _job("shard_weights", "switch", "split weights over the replicas, gathered layer by layer (ZeRO-Inference)"),
    _assumed("misc_memory", "bytes", "other memory in use on a device, such as 5GiB", sets=("misc_bytes",)),
    _job("kv_cache_memory", "bytes", "memory of the KV cache on a device, such as 20GiB"),
    _job("max_total_tokens", "whole", "most tokens of the KV cache of a replica (SGLang's name)"),
    _job("captured_sequences", "whole", "sequences of the largest decode step in a CUDA graph; 0 for none", least=0),
    _job("captured_sizes", "wholes", "sequences of every decode step in a CUDA graph, such as 1,2,4,8,16"),
    _job("disable_cuda_graph_padding", "switch", "fill no decode step up to a captured size (SGLang's name)"),
    _job("language_model_only", "switch", "load no image or sound towers (vLLM's --language-model-only)"),
    _job("use_kv_cache", "switch", "use a KV cache; --no-use-kv-cache recomputes all tokens for each"),
    _assumed("expert_imbalance", "ratio", "load of the busiest expert rank over the mean"),
    _assumed("same_prompts", "switch", "all requests have the same prompt and route to the same experts"),
    _job("speculative_method", "choice", "speculative decoding: what proposes draft tokens", choices=SPECULATION),
    _job("num_speculative_tokens", "whole", "draft tokens a step"),
    _assumed("acceptance_rate", "share", "chance that a draft token is accepted where all before it were"),
    _assumed("acceptance_length", "ratio", "mean tokens a verified step yields, its own included, as engines log it"),
    _job("draft_model", "text", "the draft model, or the configuration of an EAGLE head"),
    _job("gpu_layers", "whole", "layers on the device, head first; the host runs the rest", least=0, searched="no"),
    _job(
        "cpu_experts", "whole", "first layers whose experts the host holds and runs (llama.cpp)", least=0, searched="no"
    ),
    _assumed(
        "host", "text", "the host's processor, which runs the rest; `shardwise devices cpu` lists them", searched="no"
    ),
    _job("engine", "text", "engine, such as vllm==0.11.0; `shardwise stacks` lists them", sets=(), searched="values"),
)


def taken_by(command: str, table: Iterable[Field]) -> tuple[str, ...]:
    """Return the keys of a table that a command takes beside those of its own.

    >>> taken_by("infer", PLAN)
    ('tp', 'pp', 'dp', 'ep', 'etp', 'stage_layers', 'order', 'fast')
    """
    return tuple(f.key for f in table if command in f.taken_by.split())


def keys(table: Iterable[Field], *types: str, searched: str = "") -> tuple[str, ...]:
    """Return the keys of a table that have one of some types, of all where none is given.

    >>> keys(PLAN, "choice", searched="values")
    ('layout', 'cp_kind', 'schedule', 'sharding', 'recompute')
    """
    return tuple(f.key for f in table if (not types or f.type in types) and (not searched or f.searched == searched))


def renamed(table: Iterable[Field]) -> dict[str, str]:
    """Return the field that each key fills where it is one of another name.

    >>> renamed(TRAINING)["tokens"], "seq_len" in renamed(TRAINING)
    ('token_budget', False)
    """
    single = {f.key: f.names[0] for f in table if len(f.names) == 1 and f.type != "wholes" and f.key != "dtype"}
    return {key: name for key, name in single.items() if key != name}


# Field -> its names in Megatron-LM, DeepSpeed, torchtitan, transformers, vLLM, SGLang and llama.cpp, for hints.
ALIASES = {
    "on": ("gpu gpus num_gpus world_size node nodes num_nodes nnodes nproc_per_node device devices cluster"),
    "tp": "tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tp_size",
    "pp": "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size pp_size",
    "cp": "context_parallel context_parallel_size context_parallel_degree cp_size",
    "dp": "data_parallel data_parallel_size data_parallel_degree dp_size replicas enable_dp_attention attn_dp_size",
    "ep": "expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size ep_size",
    "vpp": "virtual_pipeline interleave virtual_pipeline_model_parallel_size",
    "micro_batch": "batch batch_size mbs micro_batch_size local_batch_size per_device_train_batch_size",
    "global_batch": "batch batch_size gbs global_batch_size train_batch_size",
    "batch": "batch_size mbs gbs concurrency num_prompts max_batch_size",
    "accumulation": "grad_accum ga gradient_accumulation gradient_accumulation_steps",
    "seq_len": (
        "context max_model_len max_model_length num_ctx ctx_size seq seq_length sequence_length context_length ctx "
        "max_seq_len max_seq_length block_size cutoff_len sequence_len"
    ),
    "sharding": "zero zero_stage fsdp zero1 zero2 zero3 use_distributed_optimizer",
    "recompute": "gradient_checkpointing activation_checkpointing checkpoint_activations recompute_granularity",
    "offload": "cpu_offload optimizer_offload activation_offload offload_optimizer offload_param activation_offloading "
    "fsdp_cpu_offload optimizer_cpu_offload cpu_offloading enable_activation_offloading offload_params",
    "precision": "fp8 fp16 bf16 fp32 mixed_precision weights",
    "base": "weights",
    "weights": "fp8 fp16 bf16 int4 int8 quantization quantize load_in_4bit load_in_8bit precision",
    "kv_cache": "kv_cache_dtype kv_dtype cache_type_k cache_type_v",
    "input_tokens": (
        "context ctx max_model_len random_input_len isl prompt prompt_len prompt_length input_len input_length "
        "max_input_len seq_len"
    ),
    "output_tokens": "random_output_len n_predict osl output_len output_length max_tokens max_new_tokens",
    "memory_fraction": "gpu_memory_utilization mem_fraction_static",
    "max_sequences": "max_num_seqs max_running_requests parallel",
    "max_batched_tokens": "max_num_batched_tokens chunked_prefill_size",
    "hidden_size": "hidden d_model n_embd dim",
    "num_layers": "layers n_layer n_layers num_hidden_layers",
    "num_attention_heads": "heads n_head n_heads num_heads",
    "vocab_size": "vocab",
    "stack": "framework backend",
    "engine": "backend framework",
    "price": "cost dollars",
    "tokens": "token_budget train_tokens",
    "samples": "dataset_size num_samples num_examples max_samples train_samples",
    "epochs": "num_train_epochs num_epochs",
    "from": "deepspeed config_file",
    "prefix_tokens": "enable_prefix_caching",
    "adapter": "finetune finetuning_type adapters peft_method",
    "trains": "finetune freeze modules_to_save",
    "rate": "request_rate qps rps requests_per_second",
    "users": "max_concurrency concurrency num_users",
    "gpu_layers": "n_gpu_layers ngl num_gpu",
    "cpu_experts": "n_cpu_moe ncmoe cpu_moe",
    "max_context": "max_position_embeddings context_length max_model_len",
}


def meant(word: str, flags: Container[str]) -> tuple[str, ...]:
    """Return the fields among `flags` that a word of another system means, none where it is not known.

    >>> meant("batch_size", {"micro_batch", "global_batch"}), meant("colour", {"tp"})
    (('micro_batch', 'global_batch'), ())
    """
    return tuple(field for field, words in ALIASES.items() if field in flags and word in words.split())


DEPLOYED = keys([f for f in PLAN if "infer" in f.taken_by.split()], "whole")
"""Degrees of a plan that a deployment has."""
