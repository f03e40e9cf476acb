"""Files of systems that are read and never written: slime, ROLL, Unsloth, Ray Serve, KServe and recipes of vLLM."""

from __future__ import annotations

READ_ALONE = {
    "slime.sh": (
        "CKPT=(\n  --hf-checkpoint /root/Qwen3-30B-A3B\n)\n"
        "PERF=(\n  --tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8\n"
        "  --expert-tensor-parallel-size 1 --recompute-granularity full --recompute-method uniform\n"
        "  --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 20480 --optimizer-cpu-offload)\n"
        "ray job submit -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \\\n"
        "  ${CKPT[@]} --rollout-batch-size 32 --n-samples-per-prompt 8 --advantage-estimator grpo \\\n"
        "  --rollout-max-response-len 8192 --global-batch-size 256 --use-kl-loss ${PERF[@]}\n"
    ),
    "roll.yaml": (
        "pretrain: Qwen/Qwen3-8B\nprompt_length: 1024\nresponse_length: 3072\nadv_estimator: grpo\n"
        "rollout_batch_size: 64\nnum_return_sequences_in_group: 8\n"
        "actor_train:\n  training_args: {per_device_train_batch_size: 1, gradient_accumulation_steps: 8}\n"
        "  strategy_args:\n    strategy_name: megatron_train\n"
        "    strategy_config: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1}\n"
        "  device_mapping: list(range(0,8))\nactor_infer:\n  device_mapping: list(range(0,8))\n"
    ),
    "unsloth.py": (
        "from unsloth import FastLanguageModel\nlength = 2048\n"
        "model, tokenizer = FastLanguageModel.from_pretrained(\n    model_name = 'unsloth/Meta-Llama-3.1-8B',\n"
        "    max_seq_length = length, dtype = None, load_in_4bit = True)\n"
        "model = FastLanguageModel.get_peft_model(\n    model, r = 16, lora_alpha = 16, lora_dropout = 0,\n"
        "    target_modules = ['q_proj', 'v_proj', 'lm_head'], use_gradient_checkpointing = 'unsloth')\n"
        "trainer = SFTTrainer(model = model, args = SFTConfig(\n    per_device_train_batch_size = 2,\n"
        "    gradient_accumulation_steps = 4, max_steps = 60, optim = 'adamw_8bit', fp16 = not torch.ok()))\n"
        "if False:\n    FastLanguageModel.from_pretrained('b')\n"
    ),
    "ray.yaml": (
        "applications:\n- name: llms\n  import_path: ray.serve.llm:build_openai_app\n  args:\n    llm_configs:\n"
        "    - model_loading_config: {model_id: qwen, model_source: Qwen/Qwen3-30B-A3B}\n"
        "      accelerator_type: H100\n      engine_kwargs: {tensor_parallel_size: 2, max_model_len: 8192}\n"
        "      deployment_config:\n        autoscaling_config: {min_replicas: 1, max_replicas: 4}\n"
    ),
    "kserve.yaml": (
        "apiVersion: serving.kserve.io/v1beta1\nkind: InferenceService\nmetadata: {name: a}\nspec:\n  predictor:\n"
        "    minReplicas: 2\n    workerSpec: {tensorParallelSize: 4, pipelineParallelSize: 2}\n    model:\n"
        "      modelFormat: {name: huggingface}\n"
        "      args: [--model_id=meta-llama/Llama-3.1-8B, --backend=vllm, --max-model-len=4096]\n"
    ),
    "recipe.yaml": (
        'model:\n  model_id: "meta-llama/Llama-3.1-70B-Instruct"\n  base_args: ["--max-model-len", "32768"]\n'
        "features:\n  long: {args: [--max-num-seqs, 64]}\nopt_in_features: [long]\nvariants:\n"
        "  default: {precision: bf16, vram_minimum_gb: 160}\n"
        "  fp8: {model_id: a/b, tp: {h200: 1, default: 2}, extra_args: [--kv-cache-dtype, fp8]}\n"
        "compatible_strategies: [single_node_tp, single_node_dep]\n"
        "strategy_overrides: {single_node_dep: {extra_args: [--max-num-batched-tokens, 16384]}}\n"
    ),
}
SERVED_ALONE = ("ray.yaml", "kserve.yaml", "recipe.yaml")
"""Those that start servers."""
