"""Settings of trainers: what real ones mean, that what is written is read back, and what none of them can say."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from command_line import run
from shardwise.errors import InputError
from shardwise.formats import (
    ExportCase,
    ImportContext,
    axolotl,
    deepspeed,
    import_file,
    llamafactory,
    llamafactory_v1,
    nanotron,
    nemo,
    torchtitan,
    torchtune,
    transformers,
    trl,
    verl,
)
from shardwise.formats._exported import canonical, canonical_plan
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Plan, Settings, Training, find_stack, tuning_of
from shardwise.plans.laws import batch_problems, plan_problems, stack_problems
from shardwise.search import rollout_of
from shardwise.training import TrainingOptions, train

ROOT = Path(__file__).parents[2]
FEW = st.sampled_from((1, 2, 4))
SOME = settings(max_examples=100, deadline=None)

# The facts of files in the systems' own repositories, in other words; what they mean is said beside each.
FILES: dict[str, tuple[str, int, dict[str, Any]]] = {
    # axolotl examples/llama-3/fft-8b.yaml
    "axolotl-full": (
        "base_model: NousResearch/Meta-Llama-3.1-8B\nsequence_len: 8192\nsample_packing: true\nmicro_batch_size: 1\n"
        "gradient_accumulation_steps: 8\noptimizer: paged_adamw_8bit\nbf16: auto\ngradient_checkpointing: true\n"
        "attn_implementation: flash_attention_2\ndatasets:\n- path: a\n",
        8,
        {"system": "axolotl", "model": "llama-3.1-8b", "micro_batch": 1, "global_batch": 64,
         "optimizer": "paged-adam8bit", "recompute": "full",
         "precision": "bf16-pure", "stack": "axolotl", "sharding": "none", "adapter": "", "seq_len": 8192},
    ),
    # axolotl examples/llama-3/lora-8b.yml
    "axolotl-lora": (
        "base_model: meta-llama/Llama-3.1-8B\nload_in_8bit: true\nadapter: lora\nlora_r: 32\nlora_alpha: 16\n"
        "lora_dropout: 0.05\nlora_target_linear: true\nlora_modules_to_save: [embed_tokens, lm_head]\n"
        "micro_batch_size: 2\ngradient_accumulation_steps: 4\nsequence_len: 4096\n",
        1,
        {"model": "llama-3.1-8b", "adapter": "lora", "rank": 32, "targets": ("all-linear",), "base": "int8",
         "trains": ("embedding", "head"), "global_batch": 8, "recompute": "none", "adapter_dropout": 0.05},
    ),
    # axolotl examples/llama-3/qlora-fsdp-70b.yaml
    "axolotl-fsdp": (
        "base_model: meta-llama/Llama-3.1-70B\nload_in_4bit: true\nadapter: qlora\nlora_r: 8\n"
        "lora_target_linear: true\nsequence_len: 512\nmicro_batch_size: 1\ngradient_accumulation_steps: 4\n"
        "fsdp: [full_shard, auto_wrap]\nfsdp_config:\n  fsdp_offload_params: true\n"
        "  fsdp_sharding_strategy: FULL_SHARD\n",
        8,
        {"sharding": "fsdp", "base": "nf4-dq", "dp": 8, "offload": ("optimizer", "gradients", "parameters"),
         "rank": 8, "seq_len": 512},
    ),
    # axolotl examples/distributed-parallel/llama-3_1-8b-hsdp-tp.yaml
    "axolotl-mesh": (
        "base_model: meta-llama/Llama-3.1-8B\ndp_shard_size: 4\ndp_replicate_size: 2\ntensor_parallel_size: 2\n"
        "sequence_len: 2048\nmicro_batch_size: 1\nfsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n",
        16,
        {"sharding": "hsdp", "shard": 4, "dp": 8, "tp": 2, "global_batch": 8},
    ),
    # axolotl examples/mistral/orpo/mistral-qlora-orpo.yml: pairs of answers, and no other model
    "axolotl-orpo": (
        "base_model: mistralai/Mistral-7B-v0.1\nload_in_4bit: true\nrl: orpo\norpo_alpha: 0.1\nadapter: qlora\n"
        "lora_r: 32\nlora_target_linear: true\nsequence_len: 4096\nmicro_batch_size: 2\n",
        1,
        {"model": "mistral-7b-v0.1", "method": "dpo", "reference": "none"},
    ),
    # axolotl in a container, as tutorials have it: DeepSpeed's file by the path that the image has it at
    "axolotl-container": (
        "base_model: meta-llama/Meta-Llama-3.1-8B-Instruct\nload_in_8bit: false\nload_in_4bit: true\nadapter: lora\n"
        "lora_model_dir:\nlora_r: 32\nlora_target_linear: true\nsequence_len: 2048\nsample_packing: true\n"
        "xformers_attention:\noptimizer: adamw_bnb_8bit\nbf16: auto\nfp16: false\ngradient_checkpointing: unsloth\n"
        "deepspeed: /workspace/axolotl/deepspeed_configs/zero3_bf16_cpuoffload_params.json\n",
        8,
        {"sharding": "zero3", "offload": ("parameters", "activations"), "adapter": "lora", "base": "nf4-dq",
         "optimizer": "adam8bit"},
    ),
    # axolotl examples/llama-3/lora-1b-ray.yml: DeepSpeed's file is one of those that axolotl ships
    "axolotl-deepspeed": (
        "base_model: NousResearch/Llama-3.2-1B\nadapter: lora\nlora_r: 16\nsequence_len: 2048\nbf16: auto\n"
        "sample_packing: true\nmicro_batch_size: 2\ngradient_accumulation_steps: 2\n"
        "deepspeed: deepspeed_configs/zero3.json\n",
        8,
        {"model": "llama-3.2-1b", "sharding": "zero3", "precision": "bf16-grads16", "global_batch": 32},
    ),
    # LLaMA-Factory examples/train_lora/qwen3_lora_dpo.yaml
    "llamafactory-dpo": (
        "model_name_or_path: Qwen/Qwen3-4B-Instruct-2507\nstage: dpo\ndo_train: true\nfinetuning_type: lora\n"
        "lora_rank: 8\nlora_target: all\npref_beta: 0.1\npref_loss: sigmoid\ntemplate: qwen3_nothink\n"
        "cutoff_len: 2048\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nbf16: true\n",
        1,
        {"model": "qwen3-4b-2507", "method": "dpo", "reference": "", "adapter": "lora"},
    ),
    # LLaMA-Factory examples/megatron/qwen3_moe_full.yaml
    "llamafactory-megatron": (
        "model_name_or_path: Qwen/Qwen3-30B-A3B-Instruct-2507\ndo_train: true\nstage: sft\nfinetuning_type: full\n"
        "cutoff_len: 4096\ntemplate: qwen3_nothink\nper_device_train_batch_size: 1\n"
        "gradient_accumulation_steps: 8\nbf16: true\ntensor_model_parallel_size: 1\nsequence_parallel: false\n"
        "pipeline_model_parallel_size: 4\nbias_activation_fusion: true\napply_rope_fusion: true\n"
        "use_distributed_optimizer: true\noverlap_param_gather: true\noverlap_grad_reduce: true\n"
        "moe_grouped_gemm: true\nmoe_token_dispatcher_type: alltoall\nexpert_model_parallel_size: 2\n"
        "recompute_granularity: full\n",
        8,
        {"model": "qwen3-30b-a3b-2507", "tp": 1, "pp": 4, "ep": 2, "dp": 2, "micro_batch": 1, "global_batch": 16,
         "sharding": "distributed-optimizer", "recompute": "full", "precision": "bf16", "stack": "megatron"},
    ),
    # LLaMA-Factory examples/train_lora/qwen3_lora_sft.yaml
    "llamafactory-lora": (
        "model_name_or_path: Qwen/Qwen3-4B\nstage: sft\ndo_train: true\nfinetuning_type: lora\nlora_rank: 8\n"
        "lora_target: all\ntemplate: qwen3\ncutoff_len: 2048\nper_device_train_batch_size: 1\n"
        "gradient_accumulation_steps: 8\nbf16: true\n",
        1,
        {"system": "LLaMA-Factory", "model": "qwen3-4b", "adapter": "lora", "rank": 8, "recompute": "full",
         "targets": ("all-linear",), "global_batch": 8, "precision": "amp-bf16", "base": ""},
    ),
    # LLaMA-Factory examples/train_qlora/qwen3_lora_sft_otfq.yaml
    "llamafactory-qlora": (
        "model_name_or_path: Qwen/Qwen3-4B\nfinetuning_type: lora\nquantization_bit: 4\nquantization_method: bnb\n"
        "double_quantization: false\nlora_target: q_proj,v_proj\nper_device_train_batch_size: 1\n",
        1,
        {"base": "nf4", "targets": ("q_proj", "v_proj"), "seq_len": 2048, "precision": "fp32"},
    ),
    # LLaMA-Factory hparams/finetuning_args.py FreezeArguments: the first three layers, and the head
    "llamafactory-freeze": (
        "model_name_or_path: Qwen/Qwen3-4B\nfinetuning_type: freeze\nfreeze_trainable_layers: -3\n"
        "freeze_extra_modules: lm_head\nper_device_train_batch_size: 1\n",
        1,
        {"adapter": "", "trains": ("first:3", "head")},
    ),
    # LLaMA-Factory examples/v1/train_qlora/quantization.yaml
    "llamafactory-v1": (
        "model: Qwen/Qwen3-0.6B\nmodel_class: llm\ntemplate: qwen3_nothink\npeft_config:\n  name: lora\n  r: 16\n"
        "  lora_alpha: 32\n  lora_dropout: 0.05\n  target_modules: all\nkernel_config: {name: auto}\n"
        "dist_config: {name: fsdp2, dcp_path: null}\nquant_config: {name: bnb, quantization_bit: 4}\n"
        "train_dataset: data/v1_sft_demo.yaml\nmicro_batch_size: 1\ncutoff_len: 2048\nmax_steps: 10\n",
        8,
        {"system": "LLaMA-Factory v1", "model": "qwen3-0.6b", "adapter": "lora", "rank": 16, "base": "nf4-dq",
         "sharding": "fsdp", "global_batch": 8, "precision": "amp-bf16", "recompute": "full"},
    ),
    # torchtune recipes/configs/llama3_1/70B_full.yaml
    "torchtune-full": (
        "model:\n  _component_: torchtune.models.llama3_1.llama3_1_70b\ntokenizer:\n  max_seq_len: null\n"
        "batch_size: 2\ngradient_accumulation_steps: 1\ndtype: bf16\nenable_activation_checkpointing: true\n"
        "enable_activation_offloading: true\nfsdp_cpu_offload: true\noptimizer:\n  _component_: torch.optim.AdamW\n",
        8,
        {"system": "torchtune", "model": "llama-3.1-70b", "sharding": "fsdp", "precision": "bf16-pure",
         "recompute": "full", "offload": ("optimizer", "gradients", "parameters", "activations"),
         "micro_batch": 2, "global_batch": 16},
    ),
    # torchtune recipes/configs/llama3_1/8B_lora_single_device.yaml
    "torchtune-lora": (
        "model:\n  _component_: torchtune.models.llama3_1.lora_llama3_1_8b\n  lora_rank: 8\n"
        "  lora_attn_modules: [q_proj, v_proj, output_proj]\n  apply_lora_to_mlp: true\nbatch_size: 2\n"
        "gradient_accumulation_steps: 8\ntokenizer:\n  max_seq_len: 2048\n",
        1,
        {"adapter": "lora", "rank": 8, "targets": ("q_proj", "v_proj", "o_proj", "mlp"), "global_batch": 16,
         "sharding": "none"},
    ),
    # torchtune recipes/configs/llama3_1/8B_lora_dpo.yaml
    "torchtune-dpo": (
        "model:\n  _component_: torchtune.models.llama3_1.lora_llama3_1_8b\n  lora_rank: 8\n"
        "  lora_attn_modules: [q_proj, v_proj, output_proj]\n  apply_lora_to_mlp: true\nbatch_size: 4\n"
        "gradient_accumulation_steps: 8\ntokenizer:\n  max_seq_len: 1024\n"
        "loss:\n  _component_: torchtune.rlhf.loss.DPOLoss\n  beta: 0.1\n",
        1,
        {"method": "dpo", "reference": "", "adapter": "lora", "global_batch": 32},
    ),
    # the command below the table of techniques of torchtune's README
    "torchtune-compiled": (
        "model:\n  _component_: torchtune.models.llama3_2.qlora_llama3_2_3b\n  lora_rank: 8\n"
        "tokenizer:\n  max_seq_len: 4096\ndataset:\n  packed: true\nbatch_size: 2\ngradient_accumulation_steps: 1\n"
        "compile: true\nloss:\n  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss\n",
        1,
        {"stack": "torchtune-compiled", "base": "nf4-dq", "recompute": "none", "seq_len": 4096, "global_batch": 2},
    ),
    # nanotron examples/config_tiny_llama.yaml
    "nanotron": (
        "parallelism:\n  dp: 4\n  tp: 2\n  pp: 1\n  tp_mode: REDUCE_SCATTER\n  tp_linear_async_communication: true\n"
        "  pp_engine: 1f1b\ntokens:\n  micro_batch_size: 3\n  batch_accumulation_per_replica: 1\n"
        "  sequence_length: 4096\n  train_steps: 2000\noptimizer:\n  zero_stage: 0\n  accumulate_grad_in_fp32: true\n"
        "model:\n  dtype: bfloat16\n  model_config:\n    is_llama_config: true\n    hidden_size: 2048\n"
        "    intermediate_size: 11008\n    num_hidden_layers: 28\n    num_attention_heads: 16\n"
        "    num_key_value_heads: 2\n    vocab_size: 128256\n    max_position_embeddings: 4096\n"
        "    tie_word_embeddings: false\n    moe_config: null\n",
        0,
        {"system": "nanotron", "model": "nanotron", "num_devices": 8, "global_batch": 12, "precision": "bf16",
         "sequence_parallel": True,
         "token_budget": 2000.0 * 12 * 4096, "sharding": "none", "stack": "nanotron"},
    ),
    # NVIDIA-NeMo/Megatron-Bridge tutorials/recipes/llama/conf/llama32_1b_finetune.yaml
    "bridge-lora": (
        "dataset: {seq_length: 4096}\ntrain: {train_iters: 100, global_batch_size: 128, micro_batch_size: 2}\n"
        "optimizer: {lr: 0.0001, weight_decay: 0.0}\nscheduler: {lr_warmup_iters: 10}\nrng: {seed: 1234}\n"
        "checkpoint: {save: a, pretrained_checkpoint: b}\npeft: {dim: 8, alpha: 16}\nlogger: {log_interval: 10}\n"
        "model:\n  seq_length: 4096\n  tensor_model_parallel_size: 1\n  context_parallel_size: 1\n",
        8,
        {"system": "Megatron-Bridge", "adapter": "lora", "rank": 8, "targets": ("all-linear",), "global_batch": 128,
         "micro_batch": 2, "dp": 8, "seq_len": 4096, "precision": "bf16", "stack": "megatron-bridge"},
    ),
    # NeMo Framework Launcher conf/training/gpt3/5b.yaml
    "nemo-1": (
        "trainer: {num_nodes: 16, devices: 8, accelerator: gpu, precision: bf16, max_steps: 105000}\nmodel:\n"
        "  micro_batch_size: 4\n  global_batch_size: 2048\n  tensor_model_parallel_size: 2\n"
        "  virtual_pipeline_model_parallel_size: null\n  encoder_seq_length: 2048\n  num_layers: 24\n"
        "  max_position_embeddings: 2048\n  hidden_size: 4096\n  ffn_hidden_size: 10880\n  num_attention_heads: 32\n"
        "  normalization: layernorm1p\n  activation: fast-swiglu\n  bias: false\n  sequence_parallel: true\n"
        "  fp8: false\n  activations_checkpoint_granularity: selective\n  transformer_engine: true\n"
        "  share_embeddings_and_output_weights: false\n  vocab_size: 50257\n"
        "  optim: {name: distributed_fused_adam, lr: 1.6e-4}\n",
        0,
        {"num_devices": 128, "tp": 2, "dp": 64, "recompute": "selective", "precision": "bf16", "optimizer": "adam",
         "sequence_parallel": True, "seq_len": 2048, "sharding": "distributed-optimizer"},
    ),
    # NeMo 2 collections/llm/recipes/llama31_70b.py, as `nemo llm export` writes it
    "nemo-2": (
        "_target_: nemo.collections.llm.api.pretrain\ndata: {global_batch_size: 512, micro_batch_size: 1, "
        "seq_length: 8192}\nmodel:\n  config: {_target_: nemo.collections.llm.gpt.model.llama.Llama31Config70B}\n"
        "optim: {config: {optimizer: adam, use_distributed_optimizer: true, bf16: true}}\ntrainer:\n"
        "  devices: 8\n  num_nodes: 32\n  max_steps: 100\n  plugins: {precision: bf16-mixed, "
        "grad_reduce_in_fp32: false}\n  strategy:\n    tensor_model_parallel_size: 4\n"
        "    pipeline_model_parallel_size: 4\n    virtual_pipeline_model_parallel_size: 5\n"
        "    context_parallel_size: 2\n    sequence_parallel: true\n    ddp: {overlap_grad_reduce: true}\n",
        0,
        {"model": "llama-3.1-70b", "num_devices": 256, "tp": 4, "pp": 4, "vpp": 5, "cp": 2, "dp": 8,
         "schedule": "interleaved", "precision": "bf16-grads16"},
    ),
    # trl/scripts/sft.py with --packing, through TRL's own YAML
    "trl": (
        "model_name_or_path: Qwen/Qwen2-0.5B\ndataset_name: a\npacking: true\nper_device_train_batch_size: 2\n"
        "gradient_accumulation_steps: 8\nuse_peft: true\nlora_r: 32\nlora_alpha: 16\n",
        1,
        {"model": "qwen2-0.5b", "stack": "trl", "recompute": "full", "precision": "amp-bf16", "seq_len": 1024,
         "global_batch": 16, "adapter": "lora", "rank": 32, "adapter_dropout": 0.05},
    ),
    # one process over four devices: layers are split, and no replica multiplies the batch
    # huggingface/alignment-handbook recipes/zephyr-7b-beta/dpo/config_full.yaml: beta alone says what it optimises
    "trl-dpo-beta": (
        "model_name_or_path: Qwen/Qwen2-0.5B\nbf16: true\nbeta: 0.01\nmax_length: 1024\nmax_prompt_length: 512\n"
        "gradient_checkpointing: true\nper_device_train_batch_size: 8\n",
        8,
        {"stack": "trl", "method": "dpo", "reference": "", "seq_len": 1024, "global_batch": 64},
    ),
    "trl-device-map": (
        "model_name_or_path: Qwen/Qwen2-0.5B\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 8\n"
        "packing: true\nmodel_init_kwargs:\n  device_map: auto\n",
        4,
        {"model": "qwen2-0.5b", "stack": "trl", "pp": 4, "dp": 1, "schedule": "sequential", "global_batch": 16},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_real_file_means_what_its_trainer_does(name: str, tmp_path: Path) -> None:
    """Settings of a system's own repository are read as that system reads them, and every word of them is known."""
    text, devices, facts = FILES[name]
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    case = import_file(path, around=ImportContext(num_devices=devices))
    said: dict[str, Any] = {"system": case.system, "stack": case.stack.name, "num_devices": case.num_devices}
    said |= {"model": case.model.name if case.model else ""}
    for record in (case.plan, case.job):
        said |= {field: getattr(record, field) for field in facts if hasattr(record, field)}
    assert {field: said[field] for field in facts} == facts
    assert not case.unknown


def test_a_preference_of_trl_without_a_word_of_its_own_has_the_folder_s(tmp_path: Path) -> None:
    """huggingface/alignment-handbook recipes/zephyr-141b-A35b/orpo/config_full.yaml: no reference is read."""
    (tmp_path / "orpo").mkdir()
    path = tmp_path / "orpo" / "config_full.yaml"
    path.write_text("model_name_or_path: Qwen/Qwen2-0.5B\nbeta: 0.05\nmax_length: 2048\n", encoding="utf-8")
    case = import_file(path)
    assert (case.job.method, case.job.reference) == ("dpo", "none")
    assert any("method of ORPO" in one for one in case.assumed)


# Launch scripts of the systems' repositories -> what the caller sets, and what they mean.
SCRIPTS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    # verl examples/sft/gsm8k/run_qwen_05_sp2.sh with the adapters of run_qwen_05_peft.sh
    "verl-sft": (
        "nproc_per_node=$1\nsave_path=$2\nshift 2\ntorchrun --standalone --nnodes=1 --nproc_per_node=$nproc_per_node "
        "-m verl.trainer.fsdp_sft_trainer data.train_files=$HOME/data/train.parquet optim.lr=1e-4 "
        "+data.response_dict_keys=['answer'] data.micro_batch_size=4 model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct "
        "trainer.default_local_dir=$save_path trainer.total_epochs=1 ulysses_sequence_parallel_size=2 "
        "model.lora_rank=32 model.lora_alpha=16 model.target_modules=all-linear $@\n",
        {"1": "8", "2": "out"},
        {"system": "verl", "model": "qwen2.5-0.5b", "num_devices": 8, "cp": 2, "dp": 4, "sharding": "fsdp",
         "micro_batch": 4, "global_batch": 256, "seq_len": 1024, "method": "sft", "rank": 32, "recompute": "full",
         "precision": "amp-bf16", "loss": "eager"},
    ),
    # DeepSpeedExamples DeepSpeed-Chat step1_supervised_finetuning/training_scripts/llama2/run_llama2_7b.sh
    "deepspeed-chat": (
        "OUTPUT=$1\nZERO_STAGE=$2\nif [ \"$ZERO_STAGE\" == \"\" ]; then\n    ZERO_STAGE=3\nfi\n"
        "deepspeed --num_gpus 8 main.py --data_path a b --model_name_or_path meta-llama/Llama-2-7b-hf "
        "--per_device_train_batch_size 4 --max_seq_len 512 --gradient_accumulation_steps 1 --gradient_checkpointing "
        "--zero_stage $ZERO_STAGE --deepspeed --output_dir $OUTPUT\n",
        {},
        {"model": "llama-2-7b", "num_devices": 8, "sharding": "zero3", "precision": "fp16-grads16", "seq_len": 512,
         "global_batch": 32, "recompute": "full", "offload": ()},
    ),
    # step2_reward_model_finetuning/training_scripts/llama2/run_llama2_7b.sh: main.py again, of another folder
    "deepspeed-chat-reward": (
        "deepspeed --num_gpus 8 main.py --data_path a --model_name_or_path meta-llama/Llama-2-7b-hf "
        "--per_device_train_batch_size 8 --max_seq_len 512 --num_padding_at_beginning 0 --zero_stage 3 --deepspeed\n",
        {},
        {"model": "llama-2-7b", "sharding": "zero3", "method": "reward", "seq_len": 512, "global_batch": 64},
    ),
    # trl/scripts/dpo.py and grpo.py, whose docstrings start them so
    "trl-dpo": (
        "accelerate launch --num_processes 2 trl/scripts/dpo.py --model_name_or_path Qwen/Qwen2-0.5B-Instruct "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 8\n",
        {},
        {"model": "qwen2-0.5b", "stack": "trl", "method": "dpo", "reference": "", "seq_len": 1024, "global_batch": 32},
    ),
    "trl-grpo": (
        "accelerate launch --num_processes 8 trl/scripts/grpo.py --model_name_or_path Qwen/Qwen2-0.5B-Instruct "
        "--max_completion_length 1024 --per_device_train_batch_size 8 --use_vllm\n",
        {},
        {"method": "grpo", "reference": "none", "seq_len": 1536, "recompute": "full", "precision": "amp-bf16"},
    ),
    # LLaMA-Factory's command as people write it: a full training of a folder, and LoRA over two nodes
    "llamafactory-cli": (
        "MODEL_PATH=/data/hf-models/Qwen3-8B\n\nllamafactory-cli train \\\n  --model_name_or_path ${MODEL_PATH} \\\n"
        "  --stage sft --do_train --finetuning_type full --template qwen3 --cutoff_len 4096 --overwrite_cache \\\n"
        "  --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --plot_loss --bf16\n",
        {},
        {"system": "LLaMA-Factory", "model": "qwen3-8b", "adapter": "", "seq_len": 4096, "recompute": "full",
         "precision": "amp-bf16", "num_devices": 0},
    ),
    "llamafactory-nodes": (
        "FORCE_TORCHRUN=1 NNODES=2 NPROC_PER_NODE=8 llamafactory-cli train \\\n"
        "  --deepspeed examples/deepspeed/ds_z3_config.json --flash_attn fa2 \\\n"
        "  --model_name_or_path meta-llama/Meta-Llama-3-8B-Instruct --stage sft --finetuning_type lora \\\n"
        "  --lora_target all --lora_rank 64 --cutoff_len 1024 --per_device_train_batch_size 4 --bf16 True\n",
        {},
        {"system": "LLaMA-Factory", "num_devices": 16, "sharding": "zero3", "adapter": "lora", "rank": 64,
         "targets": ("all-linear",), "global_batch": 64, "seq_len": 1024},
    ),
    # ms-swift examples/train/liger/sft.sh, multi-gpu/device_map/train.sh and megatron/lora/moe.sh, and one of 2024
    "swift-zero3": (
        "# 4 * 42GB\nnnodes=2\nNNODES=$nnodes NPROC_PER_NODE=4 \\\nCUDA_VISIBLE_DEVICES=0,1,2,3 \\\nswift sft \\\n"
        "  --model Qwen/Qwen2.5-7B --tuner_type full --dataset 'd#1000' --torch_dtype bfloat16 \\\n"
        "  --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --packing true --max_length 8192 \\\n"
        "  --deepspeed zero3 --use_liger_kernel true --attn_impl flash_attn\n\nswift infer --model a\n",
        {},
        {"system": "ms-swift", "model": "qwen2.5-7b", "num_devices": 8, "sharding": "zero3", "recompute": "full",
         "seq_len": 8192, "global_batch": 16, "adapter": "", "loss": "fused-linear", "precision": "bf16-grads16"},
    ),
    "swift-device-map": (
        "CUDA_VISIBLE_DEVICES=0,1 \\\nswift sft --model Qwen/Qwen2.5-72B-Instruct --dataset d --max_length 2048\n",
        {},
        {"system": "ms-swift", "stack": "ms-swift", "num_devices": 2, "pp": 2, "schedule": "sequential", "dp": 1,
         "global_batch": 16, "adapter": "lora", "rank": 8, "adapter_dropout": 0.05, "recompute": "full"},
    ),
    "swift-megatron": (
        "NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1 megatron sft --model Qwen/Qwen3-30B-A3B --tuner_type lora \\\n"
        "  --dataset d --expert_model_parallel_size 2 --moe_shared_expert_overlap true --micro_batch_size 8 \\\n"
        "  --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 --max_length 2048\n",
        {},
        {"system": "ms-swift", "stack": "megatron", "num_devices": 2, "ep": 2, "etp": 1, "dp": 2, "micro_batch": 8,
         "global_batch": 16, "adapter": "lora", "recompute": "full", "sharding": "distributed-optimizer"},
    ),
    "swift-2024": (
        "CUDA_VISIBLE_DEVICES=0 swift sft --model_id_or_path qwen/Qwen-7B-Chat --dataset d --sft_type lora \\\n"
        "  --lora_target_modules ALL --batch_size 2 --quantization_bit 4 --max_length 1024 --dtype bf16\n",
        {},
        {"system": "ms-swift", "model": "qwen-7b", "num_devices": 1, "adapter": "lora", "base": "nf4-dq",
         "targets": ("all-linear",), "micro_batch": 2, "global_batch": 16, "seq_len": 1024},
    ),
    # OpenRLHF 0.11 examples/scripts/train_sft_mixtral_lora.sh and train_ppo_ray_hybrid_engine.sh, and one of 0.9
    "openrlhf-lora": (
        "set -x\n\nread -r -d '' training_commands <<EOF\nopenrlhf.cli.train_sft \\\n    --data.max_len 2048 \\\n"
        "    --data.dataset Open-Orca/OpenOrca --train.batch_size 128 --train.micro_batch_size 4 \\\n"
        "    --model.model_name_or_path mistralai/Mixtral-8x7B-v0.1 --ds.zero_stage 3 --ds.param_dtype bf16 \\\n"
        "    --model.gradient_checkpointing_enable --ds.lora.rank 64 --ds.lora.alpha 64 --ds.packing_samples\nEOF\n\n"
        'if [[ ${1} != "slurm" ]]; then\n    deepspeed --num_gpus 8 --module $training_commands\nfi\n',
        {},
        {"system": "OpenRLHF", "model": "mixtral-8x7b", "stack": "deepspeed", "num_devices": 8, "sharding": "zero3",
         "adapter": "lora", "rank": 64, "micro_batch": 4, "global_batch": 128, "recompute": "full"},
    ),
    "openrlhf-ppo": (
        "ray job submit --address=http://localhost:8265 --runtime-env-json='{\"working_dir\": \"/openrlhf\"}' -- \\\n"
        "  python3 -m openrlhf.cli.train_ppo_ray --actor.num_nodes 2 --actor.num_gpus_per_node 8 \\\n"
        "  --vllm.num_engines 8 --vllm.tensor_parallel_size 2 --train.colocate_all --vllm.enable_sleep \\\n"
        "  --actor.model_name_or_path Qwen/Qwen3-8B --reward.model_name_or_path r --train.batch_size 128 \\\n"
        "  --rollout.batch_size 1024 --data.max_len 2048 --ds.zero_stage 3 --actor.gradient_checkpointing_enable \\\n"
        "  --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384 --logger.wandb.key {wandb_token}\n",
        {},
        {"system": "OpenRLHF", "model": "qwen3-8b", "num_devices": 16, "method": "ppo", "micro_batch": 8,
         "global_batch": 128, "seq_len": 2048, "precision": "bf16-grads16", "recompute": "full"},
    ),
    "openrlhf-2025": (
        "deepspeed --num_gpus 4 --module openrlhf.cli.train_dpo --pretrain Qwen/Qwen3-4B --bf16 --max_len 4096 \\\n"
        "  --train_batch_size 64 --micro_train_batch_size 1 --zero_stage 2 --ring_attn_size 2 --adam_offload\n",
        {},
        {"system": "OpenRLHF", "model": "qwen3-4b", "num_devices": 4, "method": "dpo", "cp": 2, "dp": 2,
         "seq_len": 4096, "sharding": "zero2", "offload": ("optimizer", "gradients"), "recompute": "none"},
    ),
    # THUDM/slime scripts/run-qwen3-30B-A3B.sh: the arguments of the model lie in a file of their own
    "slime-grpo": (
        'source "${SCRIPT_DIR}/models/qwen3-30B-A3B.sh"\nCKPT=(\n  --hf-checkpoint /root/Qwen3-30B-A3B\n'
        "  #--hf-checkpoint b\n)\n"
        "PERF=(\n  --tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8\n"
        "  --expert-tensor-parallel-size 1 --recompute-granularity full --recompute-method uniform\n"
        "  --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 20480 --optimizer-cpu-offload)\n"
        "ray job submit -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \\\n"
        "  ${MODEL_ARGS[@]} ${CKPT[@]} --rollout-batch-size 32 --n-samples-per-prompt 8 --advantage-estimator grpo \\\n"
        "  --rollout-max-response-len 8192 --global-batch-size 256 --use-kl-loss ${PERF[@]}\n",
        {},
        {"system": "slime", "model": "qwen3-30b-a3b", "stack": "megatron", "num_devices": 8, "tp": 4, "ep": 8, "etp": 1,
         "micro_batch": 2, "global_batch": 256, "seq_len": 8192, "method": "grpo", "recompute": "full",
         "offload": ("optimizer",), "sharding": "distributed-optimizer"},
    ),
    # FastChat's README, LLaVA's finetune_lora.sh and FastChat's train_lora.py: scripts in the manner of Alpaca
    "fastchat": (
        "torchrun --nproc_per_node=4 --master_port=20001 fastchat/train/train_mem.py \\\n"
        "  --model_name_or_path meta-llama/Llama-2-7b-hf --data_path a.json --bf16 True --tf32 True \\\n"
        "  --per_device_train_batch_size 2 --gradient_accumulation_steps 16 --evaluation_strategy no \\\n"
        "  --fsdp 'full_shard auto_wrap' --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer \\\n"
        "  --model_max_length 2048 --gradient_checkpointing True --lazy_preprocess True\n",
        {},
        {"num_devices": 4, "sharding": "fsdp", "seq_len": 2048, "global_batch": 128, "recompute": "full",
         "adapter": ""},
    ),
    "llava": (
        "deepspeed --include localhost:0,1,2,3 llava/train/train_mem.py --lora_enable True --lora_r 128 \\\n"
        "  --lora_alpha 256 --mm_projector_lr 2e-5 --model_name_or_path meta-llama/Llama-2-13b-hf --bits 4 \\\n"
        "  --per_device_train_batch_size 16 --model_max_length 2048 --bf16 True --gradient_checkpointing True\n",
        {},
        {"num_devices": 4, "adapter": "lora", "rank": 128, "base": "nf4-dq", "targets": ("all-linear",),
         "seq_len": 2048, "global_batch": 64},
    ),
    "fastchat-lora": (
        "deepspeed --num_gpus 2 fastchat/train/train_lora.py --model_name_or_path ~/weights/llama-2-7b --lora_r 8 \\\n"
        "  --lora_alpha 16 --q_lora True --per_device_train_batch_size 4 --model_max_length 2048 --bf16 True\n",
        {},
        {"model": "llama-2-7b", "adapter": "lora", "rank": 8, "base": "nf4-dq", "targets": ("q", "v")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_real_script_means_what_it_starts(name: str, tmp_path: Path) -> None:
    """A launch script of a system's own repository is read as its program reads its words."""
    text, variables, facts = SCRIPTS[name]
    path = tmp_path / "run.sh"
    path.write_text(text, encoding="utf-8")
    case = import_file(path, variables)
    said: dict[str, Any] = {"system": case.system, "stack": case.stack.name, "num_devices": case.num_devices}
    said |= {"loss": case.stack.loss_kernel}
    said |= {"model": case.model.name if case.model else ""}
    for record in (case.plan, case.job):
        said |= {field: getattr(record, field) for field in facts if hasattr(record, field)}
    assert {field: said[field] for field in facts} == facts


# Files of systems that are known when they are seen -> the system that the refusal names.
UNREAD = {
    "recipe.yaml": (
        "recipe: TrainFinetuneRecipe\nmodel:\n  _target_: nemo_automodel.NeMoAutoModel\n",
        "NeMo Automodel",
    ),
    "v1.yaml": ("model: Qwen/Qwen3-4B\nkernel_config:\n  name: auto\ndist_config:\n  name: fsdp2\n", "v1 trainer"),
    "swift.sh": ("CUDA_VISIBLE_DEVICES=0 swift infer --model Qwen/Qwen3-8B --stream true\n", "ms-swift"),
    "reward.sh": ("python -m openrlhf.cli.serve_rm --model.model_name_or_path a --ds.zero_stage 3\n", "OpenRLHF"),
    "rlhf.sh": ("deepspeed main.py --actor_model_name_or_path a --actor_zero_stage 2 --deepspeed\n", "DeepSpeed-Chat"),
    "other.yaml": ("name: job\nsteps: [1, 2]\n", "no setting of a system"),
}


@pytest.mark.parametrize("file", UNREAD)
def test_a_file_of_a_system_that_is_not_read_is_named(file: str, tmp_path: Path) -> None:
    """A refusal says whose file it is where that can be seen, and never that it lacks settings of another system."""
    text, named = UNREAD[file]
    (tmp_path / file).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=named):
        import_file(tmp_path / file)


def test_words_of_a_file_that_is_named_are_told_too(tmp_path: Path) -> None:
    """What DeepSpeed's file says in vain stands with the words of the settings that name it."""
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "frob": 1}')
    text = "base_model: meta-llama/Llama-3.1-8B\ndeepspeed: ds.json\nsequence_len: 512\nsample_packing: true\n"
    (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    case = import_file(tmp_path / "a.yaml", around=ImportContext(num_devices=8))
    assert [one.argument for one in case.unknown] == ["ds.json: frob"]
    assert any(text.startswith("ds.json: precision bf16-grads16") for text in case.assumed)


def test_a_script_of_trl_takes_sharding_from_the_file_beside_it(tmp_path: Path) -> None:
    """A launch through accelerate is read with the configuration that it names."""
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\n"
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n", encoding="utf-8")  # fmt: skip
    script = tmp_path / "run.sh"
    script.write_text(
        "accelerate launch --config_file fsdp.yaml trl/scripts/sft.py --model_name_or_path Qwen/Qwen2-0.5B \\\n"
        "  --max_length 2048 --packing --per_device_train_batch_size 2 --gradient_accumulation_steps 8\n",
        encoding="utf-8")  # fmt: skip
    case = import_file(script)
    assert (case.plan.sharding, case.plan.dp, case.num_devices, case.stack.name) == ("fsdp", 8, 8, "trl")
    assert (case.job.seq_len, case.job.global_batch, case.plan.recompute) == (2048, 128, "full")


@st.composite
def jobs(draw: st.DrawFn, name: str, shardings: tuple[Any, ...]) -> tuple[Plan, Training]:
    """Return a plan and a job of a stack: full training, or an adapter beside frozen weights."""
    sharding = draw(st.sampled_from(shardings))
    dp = draw(st.sampled_from((1, 2, 4, 8))) if sharding == "none" else draw(st.sampled_from((4, 8)))
    plan = Plan(
        dp=dp, micro_batch=draw(FEW), sequence_parallel=False, sharding=sharding,
        shard=2 if sharding == "hsdp" else 1, recompute=draw(st.sampled_from(("none", "full"))),
    )  # fmt: skip
    tuned = draw(st.booleans())
    job = Training(
        seq_len=512, global_batch=plan.dp * plan.micro_batch * draw(FEW),
        token_budget=draw(st.sampled_from((0.0, 512.0 * 10**6))),
        optimizer=draw(st.sampled_from(("adam", "adam8bit"))),
    )  # fmt: skip
    if tuned:
        methods = ("lora", "dora", "rslora", "lora-plus")
        methods = methods[: {"torchtune": 2, "trl": 3, "llama-factory-v1": 3}.get(name, 4)]
        bases = {"torchtune": ("", "nf4-dq"), "axolotl": ("", "int8", "nf4-dq")}.get(
            name, ("", "int8", "nf4", "nf4-dq")
        )
        job = replace(
            job, adapter=draw(st.sampled_from(methods)), rank=draw(st.integers(1, 256)),
            targets=draw(st.sampled_from((("all-linear",), ("q_proj", "v_proj"), ("q_proj", "o_proj")))),
            base=draw(st.sampled_from(bases)),
            adapter_dropout=draw(st.sampled_from((0.0, 0.05))),
        )  # fmt: skip
    if name not in ("torchtune", "llama-factory-v1"):
        job = replace(job, method=draw(st.sampled_from(("sft", "sft", "dpo", "kto", "reward"))))
    if job.method in ("dpo", "kto"):
        own = ["", *(["none"] if job.method == "dpo" or name == "trl" else [])]
        own += ["copy"] if name == "llama-factory" and job.adapter == "lora" else []
        job = replace(job, reference=draw(st.sampled_from(own)))
    return plan, job


def stated(name: str, plan: Plan, job: Training) -> ExportCase:
    """Return the case of a plan and a job of Llama-3.1-8B on as many devices as the plan has."""
    cluster = Cluster.parse(f"{plan.num_devices}xh100-sxm-80gb")
    return ExportCase(model=load_model("llama-3.1-8b"), cluster=cluster, plan=plan, job=job, stack=find_stack(name))


def accepted(case: ExportCase) -> bool:
    """Return whether a case breaks no law and its framework runs it."""
    wrong = plan_problems(case.model, case.plan, case.job.seq_len) + batch_problems(case.plan, case.job.global_batch)
    return not wrong and not stack_problems(case.stack, case.plan, optimizer=case.job.optimizer, method=case.job.method)


TRAINERS = {
    "axolotl": axolotl, "llama-factory": llamafactory, "llama-factory-v1": llamafactory_v1, "torchtune": torchtune,
    "trl": trl,
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINERS)
def test_what_a_trainer_is_told_it_says_again(name: str) -> None:
    """Every plan and job that a trainer runs is written as its settings and read back as it was."""
    module = TRAINERS[name]
    kinds = ("shard-grad-op", "fsdp", *(("none",) if name != "llama-factory-v1" else ()))  # which then casts nothing
    kinds = (*kinds, *(("hsdp",) if name in ("axolotl", "torchtune", "llama-factory-v1") else ()))

    @SOME
    @given(one=jobs(name, kinds).filter(lambda one: accepted(stated(name, *one))))
    def law(one: tuple[Plan, Training]) -> None:
        case = stated(name, *one)
        (text,) = module.export(case).files.values()
        back = module.read(text, around=ImportContext(num_devices=case.plan.num_devices))
        assert canonical_plan(back.plan) == canonical_plan(case.plan)
        told = replace(case.job, token_budget=back.job.token_budget, adapter_alpha=back.job.adapter_alpha)
        assert replace(back.job, precision="") == told
        assert back.model == case.model and back.stack == case.stack
        assert not back.unknown

    law()


def test_degrees_of_llama_factorys_v1_stand_outside_the_plugin_after_0_9_5() -> None:
    """The degrees of a later release are those of the plugin's own, and the answer says so."""
    words = "model: Qwen/Qwen3-4B\ncutoff_len: 2048\ndist_config: {name: fsdp2%s}\n%s"
    inside, outside = (
        words % (", cp_size: 2, mp_replicate_size: 2", ""),
        words % ("", "cp_size: 2\nmp_replicate_size: 2"),
    )
    one, other = (llamafactory_v1.read(text, around=ImportContext(num_devices=8)) for text in (inside, outside))
    assert one.plan == other.plan and one.plan.cp == 2 and one.plan.sharding == "hsdp"
    assert "cp_size: what another release calls dist_config.cp_size" in other.assumed


def test_nanotron_is_given_what_its_dataclasses_demand() -> None:
    """A run has a project and a warm-up style, which nanotron refuses to be without, and SGD a name alone."""
    cluster = Cluster.parse("8xh100-sxm-80gb")
    for optimizer, told in (("adam", True), ("sgd-plain", False)):
        job = Training(seq_len=4096, global_batch=64, optimizer=optimizer)
        case = ExportCase(
            model=load_model("llama-3.1-8b"), cluster=cluster, plan=Plan(dp=8), job=job, stack=find_stack("nanotron")
        )
        tree = yaml.safe_load(nanotron.export(case).files["nanotron.yaml"])
        assert tree["general"]["project"]
        assert tree["optimizer"]["learning_rate_scheduler"]["lr_warmup_style"] == "linear"
        assert ("adam_eps" in tree["optimizer"]["optimizer_factory"]) is told


@SOME
@given(
    tp=FEW, pp=FEW, dp=FEW, schedule=st.sampled_from(("1f1b", "gpipe")), sharding=st.sampled_from(("none", "zero1")),
    recompute=st.sampled_from(("none", "full")), precision=st.sampled_from(("bf16", "bf16-pure", "fp32")),
)  # fmt: skip
def test_nanotron_brings_back_every_field(
    tp: int, pp: int, dp: int, schedule: Any, sharding: Any, recompute: Any, precision: str
) -> None:
    """A plan that nanotron runs, written as its YAML, is read back as it was, the model by its sizes."""
    plan = Plan(
        tp=tp, pp=pp, dp=dp, schedule=schedule if pp > 1 else "1f1b", sharding=sharding if dp > 1 else "none",
        recompute=recompute, micro_batch=2,
    )  # fmt: skip
    batch = plan.dp * 2 * 4
    job = Training(seq_len=512, global_batch=batch, token_budget=512.0 * batch * 100, precision=precision)
    model = load_model("llama-2-7b")
    cluster = Cluster.parse(f"{plan.num_devices}xh100-sxm-80gb")
    case = ExportCase(model=model, cluster=cluster, plan=plan, job=job, stack=find_stack("nanotron"))
    (text,) = nanotron.export(case).files.values()
    back = nanotron.read(text)
    assert canonical_plan(back.plan) == canonical_plan(plan) and back.job == job
    assert back.model is not None and canonical(back.model) == canonical(model)
    assert back.num_devices == plan.num_devices and not back.unknown


@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize(("system", "stack"), [(nanotron, "nanotron"), (torchtune, "torchtune")])
def test_a_model_that_a_trainer_does_not_have_is_what_is_refused(system: Any, stack: str, model: str) -> None:
    """The problem is the user's model, not sizes of a file that he has not written, and names who writes it."""
    case = ExportCase(
        model=load_model(model), cluster=Cluster.parse("8xh100-sxm-80gb"), plan=Plan(dp=8, sharding="fsdp"),
        job=Training(seq_len=4096, global_batch=64), stack=find_stack(stack),
    )  # fmt: skip
    if stack == "nanotron":
        case = replace(case, plan=Plan(dp=8))
    with pytest.raises(InputError) as refused:
        system.export(case)
    (problem,) = [one for one in refused.value.problems if one.field.startswith("model")]
    assert problem.field == "model" and problem.value == model
    assert "export transformers, axolotl or llamafactory" in problem.remedy


def test_a_model_and_a_method_that_are_refused_are_not_their_own_remedy() -> None:
    """Norms on queries and keys are no field of nanotron's sizes; supervised fine-tuning is not what main_ppo runs."""
    cluster, job = Cluster.parse("8xh100-sxm-80gb"), Training(seq_len=512, global_batch=64)
    one = ExportCase(
        model=load_model("qwen3-8b"), cluster=cluster, plan=Plan(dp=8), job=job, stack=find_stack("nanotron")
    )
    other = replace(one, plan=Plan(dp=8, sharding="fsdp", recompute="full"), stack=find_stack("verl"))
    for system, case, field in ((nanotron, one, "model"), (verl, other, "method")):
        with pytest.raises(InputError) as refused:
            system.export(case)
        (problem,) = [one for one in refused.value.problems if one.field == field]
        assert problem.remedy.startswith("export transformers, ")


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_checkpoints_on_the_host_are_said_to_the_trainer(tmp_path: Path, sharding: Any) -> None:
    """Inputs of checkpointed layers on the host come back from the script or, beside FSDP, from accelerate's file."""
    plan = Plan(dp=8, recompute="full", offload=("activations",), sharding=sharding, sequence_parallel=False)
    job = Training(seq_len=512, global_batch=16)
    cluster, model = Cluster.parse("8xh100-sxm-80gb"), load_model("llama-3.2-1b")
    case = ExportCase(model=model, cluster=cluster, plan=plan, job=job, stack=find_stack("transformers"))
    for name, text in transformers.export(case).files.items():
        (tmp_path / name).write_text(text)
    script = (tmp_path / "train.sh").read_text()
    assert ("--activation_checkpointing_kwargs '{\"offload\": true}'" in script) == (sharding == "none")
    back = import_file(str(tmp_path / "train.sh"))
    assert canonical_plan(back.plan) == plan and not back.unknown


@pytest.mark.parametrize("system", [axolotl, llamafactory, trl])
def test_gradients_reduced_every_micro_batch_are_said_and_read_again(system: Any, tmp_path: Path) -> None:
    """Accelerate's sync_each_batch comes back from a trainer's file, and frees a whole gradient of every weight."""
    plan, job = Plan(dp=8, sharding="fsdp", sequence_parallel=False), Training(seq_len=512, global_batch=32)
    model, cluster = load_model("llama-3.2-1b"), Cluster.parse("8xh100-sxm-80gb")
    peaks = []
    for each in (True, False):
        stack = replace(find_stack(system.__name__.rpartition(".")[2].replace("llamafactory", "llama-factory")),
                        settings=Settings(sync_each_batch=each))  # fmt: skip
        case = ExportCase(model=model, cluster=cluster, plan=plan, job=job, stack=stack)
        (tmp_path / "file.yaml").write_text(next(t for n, t in system.export(case).files.items() if n.endswith("yaml")))
        back = import_file(str(tmp_path / "file.yaml"))
        assert back.stack.settings.sync_each_batch == each and not back.unknown
        peaks.append(train(model, cluster, plan, job, TrainingOptions(stack=stack)).device_bytes)
    # The allocator reserves a few hundredths of them beside.
    assert 0.6 < (peaks[1] - peaks[0]) / (2 * 1.24e9) < 1.05


@pytest.mark.parametrize(
    ("dtype", "each"), [("", 4), ("dtype: float32\n", 4), ("dtype: bfloat16\n", 0), ("dtype: auto\n", 0)]
)
def test_trl_keeps_what_is_not_quantised_in_the_type_that_it_is_told(dtype: str, each: float) -> None:
    """Trl 1.16.0 casts nothing beside weights of 4 bits: embedding, head and norms are of ModelConfig.dtype."""
    for more in ("", "bf16: true\n"):
        text = f"model_name_or_path: Qwen/Qwen3-4B\nuse_peft: true\nload_in_4bit: true\n{dtype}{more}"
        case = trl.read(text, around=ImportContext(num_devices=1))
        tuning = tuning_of(case.job, case.stack)
        assert tuning is not None and (tuning.rest_bytes, case.job.base) == (each, "nf4")


@pytest.mark.parametrize(("module", "stack"), [(axolotl, "axolotl"), (llamafactory, "llama-factory"), (trl, "trl")])
@pytest.mark.parametrize(("base", "width"), [("", "bf16"), ("", "fp32"), ("nf4-dq", "bf16"), ("nf4-dq", "fp32")])
def test_the_type_of_adapters_comes_back_or_is_refused(module: Any, stack: str, base: str, width: str) -> None:
    """Trainers of peft keep adapters in 16 bits beside 16-bit weights if told; TRL does beside 4-bit ones, always."""
    model, cluster = load_model("llama-3.1-8b"), Cluster.parse("1xrtx-4090")
    job = Training(seq_len=512, global_batch=1, adapter="lora", base=base, adapter_precision=width)
    plan = Plan(dp=1, micro_batch=1, recompute="full")
    case = ExportCase(model=model, cluster=cluster, plan=plan, job=job, stack=find_stack(stack))
    narrow = width == "bf16"
    if narrow != bool(base) if stack == "trl" else narrow and base:
        with pytest.raises(InputError, match=r"adapter_precision|base"):
            module.export(case)
    else:
        module.export(case)


REFUSED = (
    (axolotl, "axolotl", {"sharding": "zero1"}, {}, {"sharding"}),
    (axolotl, "axolotl", {"pp": 2}, {"adapter": "vera"}, {"pp", "adapter"}),
    (axolotl, "axolotl", {}, {"precision": "amp-bf16"}, {"precision"}),
    (axolotl, "axolotl", {"cp": 2, "sharding": "fsdp", "micro_batch": 2}, {}, {"micro_batch"}),
    (transformers, "transformers", {"offload": ("activations",)}, {}, {"offload", "recompute"}),
    (llamafactory, "llama-factory", {"tp": 2}, {"adapter": "ia3"}, {"tp", "adapter"}),
    (torchtune, "torchtune", {"cp": 2, "sharding": "fsdp"}, {"optimizer": "galore"}, {"cp", "optimizer"}),
    (nanotron, "nanotron", {"sharding": "zero3"}, {"precision": "fp8"}, {"sharding", "precision"}),
    (verl, "verl", {"sharding": "fsdp", "tp": 2}, {}, {"tp", "method"}),
)


@pytest.mark.parametrize(("module", "stack", "plan", "job", "named"), REFUSED)
def test_what_a_trainer_cannot_say_is_refused_by_name(
    module: Any, stack: str, plan: dict[str, Any], job: dict[str, Any], named: set[str]
) -> None:
    """Every field that a trainer has no word for is named, all at once."""
    whole = Plan(**({"dp": 2, "sequence_parallel": False} | plan))
    case = ExportCase(
        model=load_model("llama-3.1-8b"), cluster=Cluster.parse(f"{whole.num_devices}xh100-sxm-80gb"), plan=whole,
        stack=find_stack(stack), job=Training(**({"seq_len": 512, "global_batch": 16} | job)),
    )  # fmt: skip
    with pytest.raises(InputError) as caught:
        module.export(case)
    assert {problem.field for problem in caught.value.problems} == named


@pytest.mark.parametrize(
    ("name", "text", "devices"),
    [
        ("a.yaml", "base_model: a\ndp_shard_size: 4\ndp_replicate_size: 2\ntensor_parallel_size: 2\n", 16),
        ("a.yaml", "base_model: a\ndp_shard_size: 4\ntensor_parallel_size: 2\n", 0),
        (
            "a.toml",
            "[training]\nseq_len = 8\n[parallelism]\ndata_parallel_shard_degree = 4\ncontext_parallel_degree = 2\n",
            8,
        ),
        ("a.toml", "[training]\nseq_len = 8\n[parallelism]\ndata_parallel_shard_degree = -1\n", 0),
        ("a.yaml", "model: {_component_: torchtune.models.llama3.llama3_8b}\ndata_parallel_shard_dim: 4\n", 4),
    ],
)
def test_a_file_that_states_every_degree_means_so_many_devices(
    name: str, text: str, devices: int, tmp_path: Path
) -> None:
    """Degrees that are all stated are the devices, and what is left to the launcher is not."""
    (tmp_path / name).write_text(text)
    assert import_file(tmp_path / name).num_devices == devices


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("base_model: a\nadapter: qlora\n", "adapter"),
        ("base_model: a\nload_in_4bit: true\n", "load_in_4bit"),
        ("base_model: a\nbatch_size: 8\ngradient_accumulation_steps: 2\n", "batch_size"),
        ("base_model: a\nlora_dropout: .nan\nadapter: lora\n", "lora_dropout"),
        ("base_model: a\nmicro_batch_size: -1\n", "micro_batch_size"),
        ("base_model: a\nlora_target_modules: [1, 2]\nadapter: lora\n", "lora_target_modules"),
        ("base_model: a\ndp_shard_size: 3\n", "dp_shard_size"),
        ("base_model: a\ndeepspeed: ../../etc/x.json\n", "deepspeed"),
        ("model_name_or_path: a\nstage: sft\nquantization_bit: 3\n", "quantization_bit"),
        ("model_name_or_path: a\nstage: sft\nfinetuning_type: full\nquantization_bit: 4\n", "quantization_bit"),
        ("model_name_or_path: a\nfinetuning_type: freeze\nfreeze_trainable_layers: 0\n", "freeze_trainable_layers"),
        ("parallelism: {dp: 1, tp: 1}\ntokens: {micro_batch_size: 1}\n", "parallelism.pp"),
        ("parallelism: {dp: 1, tp: 1, pp: 2, pp_engine: x}\ntokens: {micro_batch_size: 1}\n", "parallelism.pp_engine"),
        (
            "model: {num_layers_in_first_pipeline_stage: 3}\ntrain: {global_batch_size: 8}\nddp: {}\n",
            "model.num_layers_in_first_pipeline_stage",
        ),
        ("model: {seq_length: 4}\ndataset: {seq_length: 8}\ntrain:\n  global_batch_size: 8\n", "dataset.seq_length"),
        ("mixed_precision: bf8\ntrain:\n  global_batch_size: 8\n", "mixed_precision"),
        ("train:\n  global_batch_size: 12\n", "train.global_batch_size"),
        (
            "model: {tensor_model_parallel_size: 3}\ntrain:\n  global_batch_size: 8\n",
            "model.tensor_model_parallel_size",
        ),
        (
            "actor_rollout_ref: {actor: {ppo_micro_batch_size_per_gpu: 2, fsdp_config: {fsdp_size: 3}}}\n",
            "actor_rollout_ref.actor.fsdp_config.fsdp_size",
        ),
        ("actor_rollout_ref: {actor: {strategy: fsdp}}\n", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        ("model: {_component_: torchtune.models.a.b}\ndtype: fp16\n_component_: torchtune.x\n", "dtype"),
    ],
)
def test_what_a_trainer_would_refuse_is_refused_by_its_key(text: str, field: str, tmp_path: Path) -> None:
    """A value that the trainer itself does not take is named with its key and a remedy."""
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        import_file(path, around=ImportContext(num_devices=8 if "parallelism" not in text else 0))
    assert field in {problem.field for problem in caught.value.problems}
    assert all(problem.remedy for problem in caught.value.problems)


def test_a_device_named_alone_is_one_where_the_launcher_says_how_many(tmp_path: Path) -> None:
    """A trainer's file on a card runs on that card, and the answer says that the number was assumed."""
    path = tmp_path / "a.yaml"
    path.write_text(FILES["axolotl-lora"][0], encoding="utf-8")
    done = run("train", "--from", str(path), "--on", "rtx-4090", "--json")
    told = json.loads(done.out)
    assert told["cluster"]["num_devices"] == 1 and told["plan"]["dp"] == 1 and told["job"]["global_batch"] == 8
    assert any("1 device, it leaves their number to the launcher" in note for note in told["assumptions"])


def test_one_rank_of_fsdp_brings_weights_in_from_the_host(tmp_path: Path) -> None:
    """A file for several cards with parameters on the host has an answer on one, unit by unit as well."""
    path = tmp_path / "a.yaml"
    hosted = "\nfsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_offload_params: true}\n"
    path.write_text(FILES["axolotl-lora"][0] + hosted, encoding="utf-8")
    plan = json.loads(run("train", "--from", str(path), "--on", "h100", "--json").out)["plan"]
    assert (plan["sharding"], plan["dp"], "parameters" in plan["offload"]) == ("fsdp", 1, True)
    path.write_text(FILES["torchtune-lora"][0] + "\nfsdp_cpu_offload: true\n", encoding="utf-8")
    assert json.loads(run("train", "--from", str(path), "--on", "h100", "--json").out)["plan"]["sharding"] == "fsdp"


def test_a_file_whose_model_is_not_known_says_so(tmp_path: Path) -> None:
    """What is missing is told with the file's own word for it, and a card named alone is one all the same."""
    path = tmp_path / "a.yaml"
    path.write_text("base_model: deepcogito/cogito-v1-preview-llama-3B\nadapter: lora\nlora_r: 8\n", encoding="utf-8")
    done = run("train", "--from", str(path), "--on", "rtx-4090")
    assert done.status == 2 and "deepcogito/cogito-v1-preview-llama-3B is not in the catalogue" in done.err
    assert "names no number of devices" not in done.err


def test_an_engine_that_stays_awake_takes_its_share_of_the_card(tmp_path: Path) -> None:
    """TRL's colocated vLLM keeps 0.3 of a card beside the trainer, or what the file says, unless it sleeps."""
    words = "trl grpo --model_name_or_path Qwen/Qwen2.5-3B-Instruct --use_peft --lora_target_modules all-linear --bf16 "
    words += "--dtype bfloat16 --max_completion_length 1024 --max_prompt_length 512 --num_generations 8 "
    words += "--per_device_train_batch_size 8 --gradient_accumulation_steps 4 --use_vllm "
    path, held = tmp_path / "a.sh", {}
    for more in ("", "--vllm_gpu_memory_utilization 0.4", "--vllm_mode server"):
        path.write_text(words + more + "\n", encoding="utf-8")
        asked = ("train", "--from", str(path), "--on", "rtx-4090", "--json")
        held[more] = json.loads(run(*asked).out)["memory"]["device_bytes"]
        if "server" not in more:
            assert import_file(path).train("rtx-4090").device_bytes == pytest.approx(held[more], abs=1)
    card = 24 * 2**30
    assert held[""] - held["--vllm_mode server"] == pytest.approx(0.3 * card, rel=0.01)
    assert held["--vllm_gpu_memory_utilization 0.4"] - held[""] == pytest.approx(0.1 * card, rel=0.01)
    path.write_text(words, encoding="utf-8")
    own = json.loads(run("train", "--from", str(path), "--on", "rtx-4090", "--json", "--rollout", "asleep").out)
    assert own["memory"]["device_bytes"] < held[""]


def test_a_framework_that_is_named_keeps_what_the_file_sets(tmp_path: Path) -> None:
    """Eager attention and Liger's kernels of a file stand under its own framework by name and under its releases."""
    words = "trl sft --model_name_or_path Qwen/Qwen3-4B --use_peft --lora_r 32 --dtype bfloat16 --max_length 4096 "
    words += "--packing --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --bf16 "
    path, held = tmp_path / "a.sh", {}
    for more in ("", "--attn_implementation eager", "--use_liger_kernel"):
        path.write_text(words + more + "\n", encoding="utf-8")
        for stack in ("", "trl", "trl-2025"):
            asked = ("train", "--from", str(path), "--on", "h100", "--json", *(("--stack", stack) if stack else ()))
            held[more, stack] = json.loads(run(*asked).out)["memory"]["device_bytes"]
    for more in ("", "--attn_implementation eager", "--use_liger_kernel"):
        assert held[more, "trl"] == held[more, ""]
    eager, liger = "--attn_implementation eager", "--use_liger_kernel"
    assert held[eager, "trl-2025"] > held["", "trl-2025"] > held[liger, "trl-2025"] + 10 * 2**30


def test_a_file_with_all_sizes_of_a_batch_leaves_no_number_of_devices_open(tmp_path: Path) -> None:
    """DeepSpeed's three sizes mean eight devices, so that one is not assumed; without the whole batch it is."""
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
    asked = ("train", "llama-3.2-1b", "--on", "h100", "--seq-len", "512", "--from", str(tmp_path / "ds.json"))
    for whole, status in (({"train_batch_size": 256}, 2), ({}, 0)):
        (tmp_path / "ds.json").write_text(json.dumps(sizes | whole), encoding="utf-8")
        done = run(*asked)
        assert done.status == status and ("names no number of devices" in done.err) == bool(whole)


def test_attention_s_last_product_is_not_taken_for_the_head(tmp_path: Path) -> None:
    """Torchtune's output_proj has an adapter on attention's output in every layer, and none on the head."""
    path = tmp_path / "a.yaml"
    path.write_text(FILES["torchtune-lora"][0], encoding="utf-8")
    told = json.loads(run("train", "--from", str(path), "--on", "h100", "--json").out)
    trained = told["tuning"]["trainable_by_module"]
    assert trained["o"] == 8 * (4096 + 4096) * 32 and "head" not in trained


@pytest.mark.parametrize(
    ("target", "more"),
    [("megatron", "--tp 2"), ("torchtitan", ""), ("axolotl", "--sharding fsdp"), ("llamafactory", "--sharding fsdp"),
     ("nanotron", "--tp 8"), ("torchtune", "--sharding fsdp --recompute full --precision bf16-pure")],
)  # fmt: skip
def test_a_slurm_script_starts_one_task_a_node(target: str, more: str, tmp_path: Path) -> None:
    """The script asks for the plan's nodes and devices, and each node starts its share under its own rank."""
    asked = ("export", target, "llama-3.1-8b", "--on", "16xh100-sxm-80gb", "--seq-len", "512", "--global-batch", "16")
    done = run(*asked, *more.split(), "--wrap", "slurm", "--json")
    text = json.loads(done.out)["files"]["job.sbatch"]
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --ntasks-per-node=1"} <= set(text.splitlines())
    for name, one in json.loads(done.out)["files"].items():
        (tmp_path / name).write_text(one, encoding="utf-8")
    back = import_file(tmp_path / "job.sbatch")
    assert (back.num_devices, back.job.global_batch, back.job.seq_len) == (16, 16, 512)
    for name in ("llama-3.1-8b.sh", "torchrun", "accelerate", "llamafactory-cli", "tune"):
        program = '#!/bin/sh\necho "$NODE_RANK $MASTER_ADDR $PET_NODE_RANK $PET_MASTER_ADDR"\n'
        (tmp_path / name).write_text(program, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    srun = 'srun() { while [[ $1 == --* ]]; do shift; done; SLURM_NODEID=1 "$@"; }'
    script = f"scontrol() {{ echo first; }}; {srun}; . ./job.sbatch"
    where = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=where, cwd=tmp_path, check=True)
    assert said.stdout == "1 first 1 first\n"


@pytest.mark.parametrize(("more", "expected"), [("", 4), ("tiled_mlp_num_shards: 6\n", 6)])
def test_axolotls_tiles_have_32768_tokens_unless_told(more: str, expected: int) -> None:
    """A sequence of 131,072 tokens has four, as axolotl 0.21.0 monkeypatch/tiled_mlp/patch.py cuts it."""
    text = "base_model: Qwen/Qwen3-8B\nsequence_len: 131072\ntiled_mlp: true\n" + more
    assert axolotl.read(text).stack.settings.tile_mlp == expected


def test_a_script_of_the_user_s_is_not_wrapped() -> None:
    """DeepSpeed's file has no command that starts it, so there is nothing to wrap."""
    done = run("export", "deepspeed", "gpt2", "--on", "8xh100", "--wrap", "slurm")
    assert done.status == 2 and "wrap = 'slurm': needs a command" in done.err


def test_systems_own_parsers_take_every_export() -> None:
    """No stored answer of a parser is a refusal or another value, and each is of the release that a format follows."""
    stored = json.loads((ROOT / "benchmarks" / "parsers.json").read_text(encoding="ascii"))
    assert len(stored) >= 11
    for system, said in stored.items():
        assert said["fields"] and all(isinstance(count, int) and count >= 4 for count in said["fields"].values())
        file = ROOT / "src/shardwise/formats" / ("fsdp.toml" if system == "accelerate" else f"{system}.toml")
        if file.exists():
            assert tomllib.loads(file.read_text(encoding="utf-8"))["checked"]["version"] == said["version"], system


def test_oft_without_a_number_of_blocks_is_written_as_the_trainer_has_it() -> None:
    """OFT's usual blocks come back as they were, where the usual rank of LoRA would be another adapter."""
    job = Training(seq_len=512, global_batch=1, adapter="oft", targets=("all-linear",))
    case = stated("llama-factory", Plan(sequence_parallel=False, recompute="full"), job)
    (text,) = llamafactory.export(case).files.values()
    assert "oft_rank: 0" in text
    assert llamafactory.read(text, around=ImportContext(num_devices=1)).job.rank == 0


def test_a_factor_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """lora_alpha is named with a remedy though it changes no byte: the trainer would not take it either."""
    path = tmp_path / "a.yaml"
    path.write_text("base_model: a\nadapter: lora\nlora_alpha: high\n", encoding="utf-8")
    with pytest.raises(InputError, match="lora_alpha"):
        import_file(path, around=ImportContext(num_devices=1))


def test_torchtitan_s_recipe_of_float8_comes_back() -> None:
    """The word for one scale a row is read as a setting of the stack; one a tensor is the stack as it comes."""
    tree = {"model": {"name": "llama3", "flavor": "8B", "converters": ["quantize.linear.float8"]}}
    for word in ("rowwise", "tensorwise"):
        more = {"quantize": {"linear": {"float8": {"recipe_name": word}}}}
        found = torchtitan.read_tree({**tree, **more}, num_devices=8)
        assert found.job.precision == "fp8-amp"
        assert found.stack.settings.fp8_recipe == ("rowwise" if word == "rowwise" else "")


@pytest.mark.parametrize(("devices", "said"), [(1, True), (2, False)])
def test_a_sharding_over_one_rank_is_said_to_be_none(devices: int, said: bool) -> None:
    """The recipe of one device of torchtune shards nothing: the file reads as none, and the notes say so."""
    words = f"--on {devices}xh100 --sharding zero3 --adapter dora --global-batch 8 --micro-batch 1 --seq-len 1024"
    notes = run("export", "torchtune", "llama-3.1-8b", *words.split(), "--json").tree["notes"]
    assert any("over one rank" in one for one in notes) == said


def test_torchtitan_wraps_one_rank_since_0_3() -> None:
    """Files of 0.2.2 split without copies are not wrapped, so nothing casts their weights in fp32; launches of 0.3 are.

    Sources: torchtitan v0.2.2 distributed/parallel_dims.py fsdp_enabled and distributed/utils.py maybe_enable_amp;
    models/llama3/parallelize.py since commit 00b7f5693 (2026-04-09).
    """
    for split, devices, precision in (({"tensor_parallel_degree": 8}, 8, "fp32"), ({}, 1, "amp-bf16")):
        back = torchtitan.read_tree({"parallelism": split}, num_devices=devices)
        assert (back.plan.sharding, back.job.precision) == ("none", precision)
        assert any("casts nothing" in one for one in back.assumed) == (precision == "fp32")
    line = "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b"
    back = torchtitan.read(f"{line} --parallelism.tensor_parallel_degree 8", "run.sh")
    assert (back.plan.dp, back.plan.sharding, back.job.precision) == (1, "fsdp", "amp-bf16")


def test_torchtitan_s_gathers_of_float8_come_back() -> None:
    """enable_fsdp_float8_all_gather, under its path of any release, is weights that travel in 8 bits."""
    tree = {"model": {"name": "llama3", "flavor": "8B", "converters": ["quantize.linear.float8"]}}
    own = {"enable_fsdp_float8_all_gather": True}
    for more in ({"quantize": {"linear": {"float8": own}}}, {"float8": own}):
        assert torchtitan.read_tree({**tree, **more}, num_devices=8).stack.settings.fp8_param_gather
    assert not torchtitan.read_tree(tree, num_devices=8).stack.settings.fp8_param_gather


_BESIDE = {
    "acc.yaml": "distributed_type: FSDP\nnum_processes: 16\nmixed_precision: bf16\nfsdp_config: {fsdp_version: 2}\n",
    "ax.yaml": FILES["axolotl-full"][0],
    "tune.yaml": FILES["torchtune-lora"][0],
    "sft.yaml": "model_name_or_path: Qwen/Qwen3-4B\nuse_peft: true\nlora_r: 8\nmax_length: 2048\n",
    "nano.yaml": FILES["nanotron"][0],
    "titan.toml": '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 4096\nlocal_batch_size = 1\n',
}
# Launches that name a file of settings, as people write them, and what they mean with the words beside it.
POINTED: dict[str, dict[str, Any]] = {
    "accelerate launch --config_file acc.yaml -m axolotl.cli.train ax.yaml --micro-batch-size 4": {
        "system": "axolotl", "num_devices": 16, "sharding": "fsdp", "micro_batch": 4, "global_batch": 512},
    "axolotl train ax.yaml --launcher torchrun --sequence_len=2048 -- --nproc_per_node=4": {
        "num_devices": 4, "seq_len": 2048, "global_batch": 32},
    "tune run --nproc_per_node 4 lora_finetune_distributed --config tune.yaml batch_size=4 model.lora_rank=16": {
        "system": "torchtune", "num_devices": 4, "micro_batch": 4, "rank": 16, "sharding": "fsdp"},
    "CUDA_VISIBLE_DEVICES=0 trl sft --config sft.yaml --lora_r 64": {
        "model": "qwen3-4b", "rank": 64, "stack": "trl", "num_devices": 0},
    "accelerate launch --config_file acc.yaml scripts/run_sft.py sft.yaml --max_length=8192": {
        "num_devices": 16, "sharding": "fsdp", "seq_len": 8192, "adapter": "lora"},
    "torchrun --nproc_per_node=8 --nnodes 4 -m torchtitan.train --job.config_file titan.toml \\\n"
    "  --training.local_batch_size 2 --parallelism.tensor_parallel_degree=2": {
        "system": "torchtitan", "num_devices": 32, "tp": 2, "dp": 16, "micro_batch": 2, "seq_len": 4096},
    "srun bash -c 'cd /work; torchrun --nproc_per_node 8 run_train.py --config-file nano.yaml'": {
        "system": "nanotron", "num_devices": 8, "tp": 2},
}  # fmt: skip


@pytest.mark.parametrize("text", POINTED)
def test_a_launch_that_names_a_file_of_settings_is_that_file(text: str, tmp_path: Path) -> None:
    """The file is read on the devices of the launch, and what the command says wins over it."""
    for name, one in (*_BESIDE.items(), ("run.sh", text + "\n")):
        (tmp_path / name).write_text(one, encoding="utf-8")
    case, facts = import_file(tmp_path / "run.sh"), POINTED[text]
    said: dict[str, Any] = {"system": case.system, "stack": case.stack.name, "num_devices": case.num_devices}
    said |= {"model": case.model.name if case.model else ""}
    said |= {key: getattr(record, key) for record in (case.plan, case.job) for key in facts if hasattr(record, key)}
    assert {key: said[key] for key in facts} == facts
    assert [one.argument for one in case.unknown] in ([], ["launcher"])


def test_a_file_that_a_launch_names_and_nobody_has_is_said(tmp_path: Path) -> None:
    """A launch cannot be read without its settings, and files elsewhere are read where that is asked for alone."""
    for name in ("lost.yaml", "../../etc/x.yaml"):
        (tmp_path / "run.sh").write_text(f"axolotl train {name}\n", encoding="utf-8")
        with pytest.raises(InputError):
            import_file(tmp_path / "run.sh")


# What a command of torchtitan 0.3 says behind --module and --config -> the plan and the stack.
TITAN: dict[str, dict[str, Any]] = {
    "llama3 --config llama3_8b": {
        "model": "llama-3.1-8b", "tp": 1, "dp": 8, "micro_batch": 1, "seq_len": 8192, "recompute": "full",
        "stack": "torchtitan-2026", "checkpoint_policy": "second-matmuls", "loss": "chunked-linear"},
    "llama3 --config=llama3_70b --parallelism.no-enable-sequence-parallel --training.seq-len 4096": {
        "model": "llama-3.1-70b", "tp": 8, "dp": 1, "micro_batch": 8, "seq_len": 4096, "checkpoint_policy": "",
        "sequence_parallel": False},
    "qwen3 --config qwen3_32b --compile.enable --compile.components model activation-checkpoint:none": {
        "model": "qwen3-32b", "recompute": "none", "stack": "torchtitan-2026-compiled", "loss": "chunked-linear"},
    "llama3 --config llama3_405b": {
        "precision": "fp8-amp", "stack": "torchtitan-2026-async-tp", "loss": "chunked-linear-compiled"},
    "deepseek_v3 --config deepseek_v3_16b": {
        "ep": 8, "etp": 1, "stack": "torchtitan-2026", "loss": "chunked-linear-compiled"},
}  # fmt: skip


@pytest.mark.parametrize("line", TITAN)
def test_a_launch_of_torchtitan_names_a_function_of_its_registries(line: str, tmp_path: Path) -> None:
    """Settings behind a function of torchtitan 0.3.0 stand over what the function sets."""
    text = f"torchrun --nproc_per_node 8 -m torchtitan.train --module {line}\n"
    (tmp_path / "run.sh").write_text(text, encoding="utf-8")
    case, facts = import_file(tmp_path / "run.sh"), TITAN[line]
    settings = case.stack.settings
    said: dict[str, Any] = {"stack": case.stack.name, "loss": case.stack.loss_kernel}
    said |= {"checkpoint_policy": settings.checkpoint_policy, "model": case.model.name if case.model else ""}
    said |= {key: getattr(record, key) for record in (case.plan, case.job) for key in facts if hasattr(record, key)}
    assert {key: said[key] for key in facts} == facts
    assert (case.system, case.version, case.unknown) == ("torchtitan", "0.3.0", ())


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("mine --config my_llama", "config"),
        ("llama3 --config llama3_8b activation-checkpoint:memory-budget", "activation_checkpoint.mode"),
        ("llama3 --config llama3_8b --optimizer.implementation fused_opt_states_bf16", "optimizer.implementation"),
        (
            "llama3 --config llama3_70b --compile.enable-async-tensor-parallel",
            "parallelism.enable_async_tensor_parallel",
        ),
    ],
)
def test_a_launch_of_torchtitan_that_cannot_be_read_says_why(line: str, field: str) -> None:
    """A function of one's own, a budget of memory and moments in 16 bits are refused by name."""
    with pytest.raises(InputError) as failure:
        torchtitan.read(f"torchrun --nproc_per_node 8 -m torchtitan.train --module {line}\n", "run.sh")
    assert [one.field for one in failure.value.problems] == [field]


REENTRANT: list[tuple[str, str, bool]] = [
    ("model_name_or_path: Qwen/Qwen3-4B\n", "gradient_checkpointing_kwargs: {use_reentrant: true}\n", True),
    ("model_name_or_path: Qwen/Qwen3-4B\n", "gradient_checkpointing_kwargs: {use_reentrant: false}\n", False),
    ("base_model: Qwen/Qwen3-4B\nsequence_len: 512\ngradient_checkpointing: true\n",
     "gradient_checkpointing_kwargs: {use_reentrant: false}\n", False),
    ("stage: sft\nfinetuning_type: lora\nmodel_name_or_path: Qwen/Qwen3-4B\n", "use_reentrant_gc: false\n", False),
]  # fmt: skip


@pytest.mark.parametrize(("text", "more", "whole"), REENTRANT)
def test_reentrant_checkpoints_run_their_whole_unit_again(text: str, more: str, whole: bool, tmp_path: Path) -> None:
    """What a file says of use_reentrant decides: a reentrant checkpoint runs its last GEMM again, another does not."""
    seconds = []
    for said in ("", more):
        (tmp_path / "a.yaml").write_text(text + said, encoding="utf-8")
        case = import_file(tmp_path / "a.yaml", around=ImportContext(num_devices=1))
        seconds.append(case.train("h100-sxm-80gb").step_seconds)
    usual, told = seconds
    own = case.stack.name in ("axolotl", "llama-factory")
    assert (told > 1.02 * usual) if whole else (told < usual if own else told == usual)


@pytest.mark.parametrize(
    ("said", "place", "notes"),
    [
        ("vllm_enable_sleep_mode: true", "asleep", 0),
        ("vllm_mode: server", "apart", 0),
        ("vllm_gpu_memory_utilization: 0.45", "", 1),
        ("use_vllm: false", "", 0),
    ],
)
def test_trl_says_where_the_engine_of_rollouts_is(said: str, place: str, notes: int) -> None:
    """Asleep or on devices of its own where told, else vLLM keeps its share of each device, which is said."""
    text = f"model_name_or_path: Qwen/Qwen3-4B\nnum_generations: 8\nmax_completion_length: 512\n{said}\n"
    case = trl.read(text if said.startswith("use_vllm") else text + "use_vllm: true\n")
    assert case.stack.settings.rollout == place
    assert sum("0.45 of each device" in one for one in case.assumed) == notes


@pytest.mark.parametrize(
    ("said", "scored"),
    [
        ("", 0),
        ("num_iterations: 2", 1),
        ("steps_per_generation: 16", 1),
        ("steps_per_generation: 2", 0),
        ("use_vllm: true", 1),
        ("use_vllm: true\nvllm_importance_sampling_correction: false", 0),
    ],
)
def test_trl_scores_what_it_generated_where_it_may_be_of_another_policy(said: str, scored: int) -> None:
    """Trl 1.16.0 grpo_trainer.py: with vLLM, or where generations and updates do not end together; beta is 0."""
    text = "model_name_or_path: Qwen/Qwen3-4B\nnum_generations: 8\nmax_completion_length: 512\n"
    text += "per_device_train_batch_size: 8\ngradient_accumulation_steps: 4\n"
    case = trl.read(f"{text}{said}\n", around=ImportContext(num_devices=1))
    report = case.train("h100-sxm-80gb")
    assert report.case.scorings == scored
    assert sum(one.name == "old log-probabilities" for one in report.phases) == scored


def test_a_module_is_the_program_that_a_launcher_starts(tmp_path: Path) -> None:
    """What stands behind -m NAME are its arguments from the first on, though no file of Python is named."""
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}')
    script = "torchrun --nproc_per_node 8 -m train --deepspeed ds.json --model_name_or_path Qwen/Qwen2.5-7B-Instruct "
    (tmp_path / "run.sh").write_text(f"{script}--per_device_train_batch_size 3 --bf16 --block_size 4096\n")
    case = import_file(tmp_path / "run.sh")
    assert (case.num_devices, case.plan.sharding, case.plan.micro_batch) == (8, "zero3", 3)


def test_a_case_of_a_file_times_its_rollouts_as_training_does() -> None:
    """What an import hands back predicts the whole step that `sw.train` predicts, and the training alone otherwise."""
    text = "model_name_or_path: Qwen/Qwen3-0.6B\nnum_generations: 8\nmax_completion_length: 512\n"
    text += "per_device_train_batch_size: 8\nuse_vllm: true\nvllm_enable_sleep_mode: true\n"
    case = trl.read(text, around=ImportContext(num_devices=1))
    assert case.train("h100-sxm-80gb").generation.seconds == 0
    timed = replace(case.stack.settings, rollout_prompt_tokens=512)
    case = replace(case, stack=replace(case.stack, settings=timed))
    report, cluster = case.train("h100-sxm-80gb"), Cluster.parse("1xh100-sxm-80gb")
    options = TrainingOptions(stack=case.stack, accumulation=case.accumulation)
    assert case.model
    whole = sw.train(case.model, cluster, case.plan, case.job, options)
    assert report.whole_step_seconds == whole.whole_step_seconds > 1.2 * report.step_seconds


def test_a_length_of_prompts_times_the_rollouts_of_a_file() -> None:
    """TRL's and verl's prompts, and the engine's tensor parallelism: verl's is 2 unless told; a server's is its own."""
    text = "model_name_or_path: Qwen/Qwen3-0.6B\nnum_generations: 8\nmax_completion_length: 512\nuse_vllm: true\n"
    text += "per_device_train_batch_size: 8\nvllm_tensor_parallel_size: 2\nmax_prompt_length: 256\n"
    for more, tp in (("vllm_enable_sleep_mode: true", 2), ("vllm_mode: server", 1)):
        case = trl.read(f"{text}{more}\n", around=ImportContext(num_devices=2))
        settings = case.stack.settings
        assert (case.job.seq_len, settings.rollout_prompt_tokens, settings.rollout_tp) == (768, 256, tp)
        assert case.train("h100-sxm-80gb").generation.seconds > 0
    words = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-0.6B data.max_prompt_length=512 "
    words += "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 algorithm.adv_estimator=grpo"
    case = verl.read(words, "run.sh")
    assert (case.stack.settings.rollout_prompt_tokens, case.stack.settings.rollout_tp) == (512, 2)
    assert case.train("h100-sxm-80gb").generation.seconds > 0


def test_a_rollout_of_verl_is_of_a_train_batch() -> None:
    """Four mini-batches of 256 of 1,024 prompts train on one rollout: each step has a fourth of its seconds."""
    words = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-0.6B data.max_prompt_length=512 "
    words += "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 actor_rollout_ref.rollout.n=5 "
    words += "actor_rollout_ref.actor.ppo_mini_batch_size=256 algorithm.adv_estimator=grpo data.train_batch_size="
    several, one = (verl.read(f"{words}{prompts}", "run.sh") for prompts in (1024, 256))
    assert (several.job.global_batch, several.stack.settings.rollout_samples) == (1280, 5120)
    assert (one.job.global_batch, one.stack.settings.rollout_samples) == (1280, 0)
    long, short = (case.train("h100-sxm-80gb") for case in (several, one))
    assert long.step_seconds == short.step_seconds
    rollout = rollout_of(long)
    assert rollout and (rollout.steps, rollout.batch * rollout.waves) == (4, 5120 // rollout.replicas)
    assert long.generation.seconds * 4 == pytest.approx(rollout.seconds + rollout.handover_seconds)
    assert long.generation.seconds != short.generation.seconds


@pytest.mark.parametrize(("more", "etp"), [("", 8), ("expert_parallel_degree = 8", 1)])
def test_torchtitan_splits_experts_as_all_else_without_expert_parallelism(more: str, etp: int) -> None:
    """expert_tensor_parallel_degree, 1 unless said, counts beside expert parallelism alone."""
    text = '[model]\nname = "deepseek_v3"\nflavor = "671B"\n[parallelism]\ntensor_parallel_degree = 8\n'
    assert torchtitan.read(text + more, around=ImportContext(num_devices=64)).plan.etp == etp


def test_deepspeed_is_not_told_of_wide_gradients_without_zero() -> None:
    """Its engine refuses a sum of gradients of another type than the model's at stage 0."""
    case = ExportCase(
        model=load_model("gpt2"),
        cluster=Cluster.parse("8xh100-sxm-80gb"),
        plan=Plan(dp=8),
        job=Training(seq_len=1024, global_batch=8, precision="bf16"),
        stack=find_stack("deepspeed"),
    )
    with pytest.raises(InputError, match="bf16-grads16"):
        deepspeed.export(case)


def test_nanotron_has_biases_where_they_are_asked_for() -> None:
    """Its Qwen2 has none unless attention_bias is on, and sizes that a file leaves out are those of its dataclass."""
    start = "parallelism: {dp: 1, pp: 1, tp: 1}\ntokens: {sequence_length: 64, micro_batch_size: 1}\n"
    plain, biased = (
        nanotron.read(start + f"model: {{model_config: {{is_qwen2_config: true{more}}}}}").model
        for more in ("", ", attention_bias: true")
    )
    assert plain is not None and biased is not None
    assert plain.hidden == 4096 and plain.num_layers == 32
    assert [model.layers[0].mixers[0].qkv_bias for model in (plain, biased)] == [False, True]  # type: ignore[union-attr]


def test_bridge_is_told_of_offload_and_fusion_by_its_own_names() -> None:
    """The optimizer's fields stand under optimizer, with the share that is 0 unless it is said (OptimizerConfig)."""
    stack = replace(find_stack("megatron-bridge"), activation="eager")
    plan = Plan(dp=8, sharding="distributed-optimizer", offload=("optimizer",))
    case = ExportCase(
        model=load_model("llama-3.1-8b"),
        cluster=Cluster.parse("8xh100-sxm-80gb"),
        plan=plan,
        job=Training(seq_len=4096, global_batch=8),
        stack=stack,
    )
    tree = yaml.safe_load(nemo.export(case).files["nemo.yaml"])
    assert tree["optimizer"]["optimizer_cpu_offload"] and tree["optimizer"]["optimizer_offload_fraction"] == 1.0
    assert tree["model"]["bias_activation_fusion"] is False
    assert tree["mixed_precision"]["grad_reduce_in_fp32"] is False
    assert not {"optimizer_cpu_offload", "bias_swiglu_fusion"} & tree["model"].keys()


@pytest.mark.parametrize(
    ("patterns", "trains", "note"),
    [
        (["^lm_head.weight$"], ("head",), ""),
        (["^model.embed_tokens.weight$[:32000]", "model.norm"], ("embedding", "norms"), ""),
        (["model.layers.(?:2[4-9]|3[0-1])."], ("layers:24-31",), ""),
        (["model.layers.[0-9]+.mlp.down_proj"], ("layers:0-31",), "not told apart"),
        (["model.layers.0.", "model.layers.2."], ("layers:0", "layers:2"), ""),
        (["model.layers.([0-9]+)+x"], (), "not found out"),
    ],
)
def test_patterns_of_axolotl_s_say_what_trains(patterns: list[str], trains: tuple[str, ...], note: str) -> None:
    """Of Llama-3.1-8B; a range of rows is a hook on the gradient, the whole parameter has its states."""
    text = "base_model: meta-llama/Llama-3.1-8B\nunfrozen_parameters:\n" + "".join(f"- '{one}'\n" for one in patterns)
    case = axolotl.read(text, around=ImportContext(num_devices=1))
    assert case.job.trains == trains
    assert any(note in text for text in case.assumed) if note else not any("train:" in text for text in case.assumed)


def test_patterns_that_match_nothing_from_the_start_of_a_name_are_refused() -> None:
    """Axolotl would train nothing, and warn."""
    with pytest.raises(InputError, match=r"unfrozen_parameters.*from its start"):
        axolotl.read("base_model: meta-llama/Llama-3.1-8B\nunfrozen_parameters: ['layers.31.']\n")
