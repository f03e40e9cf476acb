"""Flags as other systems call them, and the ones that are meant here."""

from __future__ import annotations

from collections.abc import Container, Mapping
from types import MappingProxyType

# Field of a flag here -> words of Megatron-LM, DeepSpeed, torchtitan, transformers and inference engines.
_WORDS = {
    "on": "gpu gpus num_gpus world_size node nodes num_nodes nnodes nproc_per_node device devices num_devices cluster",
    "tp": "tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tp_size",
    "pp": "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size pp_size",
    "cp": "context_parallel context_parallel_size context_parallel_degree cp_size",
    "dp": "data_parallel data_parallel_size data_parallel_degree dp_size replicas",
    "ep": "expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size ep_size",
    "vpp": "virtual_pipeline interleave virtual_pipeline_model_parallel_size",
    "micro_batch": "batch batch_size mbs micro_batch_size local_batch_size per_device_train_batch_size",
    "global_batch": "batch batch_size gbs global_batch_size train_batch_size",
    "batch": "batch_size mbs gbs concurrency num_prompts max_batch_size",
    "accumulation": "grad_accum ga gradient_accumulation gradient_accumulation_steps",
    "seq_len": "seq seq_length sequence_length context_length ctx max_seq_len max_seq_length block_size",
    "max_context": "max_model_len max_position_embeddings context_length",
    "sharding": "zero zero_stage fsdp zero1 zero2 zero3 use_distributed_optimizer",
    "recompute": "gradient_checkpointing activation_checkpointing checkpoint_activations recompute_granularity",
    "offload": "cpu_offload optimizer_offload activation_offload offload_optimizer offload_param activation_offloading "
    "fsdp_cpu_offload optimizer_cpu_offload cpu_offloading enable_activation_offloading offload_params",
    "precision": "fp8 fp16 bf16 fp32 mixed_precision",
    "weights": "fp8 fp16 bf16 int4 int8 quantization quantize load_in_4bit load_in_8bit",
    "kv_cache": "kv_cache_dtype kv_dtype",
    "input_tokens": "isl prompt prompt_len prompt_length input_len input_length max_input_len seq_len",
    "output_tokens": "osl output_len output_length max_tokens max_new_tokens",
    "memory_fraction": "gpu_memory_utilization mem_fraction_static",
    "max_sequences": "max_num_seqs",
    "max_batched_tokens": "max_num_batched_tokens chunked_prefill_size",
    "hidden_size": "hidden d_model n_embd dim",
    "num_layers": "layers n_layer n_layers num_hidden_layers",
    "num_attention_heads": "heads n_head n_heads num_heads",
    "vocab_size": "vocab",
    "stack": "framework backend",
    "engine": "backend framework",
    "price": "cost dollars",
    "adapter": "finetune finetuning_type adapters peft_method",
    "trains": "finetune freeze modules_to_save",
}


def _meant() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for field, words in _WORDS.items():
        for word in words.split():
            found[word] = (*found.get(word, ()), field)
    return found


MEANT: Mapping[str, tuple[str, ...]] = MappingProxyType(_meant())


def meant(word: str, flags: Container[str]) -> tuple[str, ...]:
    """Return the fields among `flags` that a word of another system means, none where it is not known.

    >>> meant("batch_size", {"micro_batch", "global_batch"}), meant("colour", {"tp"})
    (('micro_batch', 'global_batch'), ())
    """
    return tuple(field for field in MEANT.get(word, ()) if field in flags)
