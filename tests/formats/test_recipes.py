"""Words over a recipe or a tree of defaults (Megatron-Bridge, NeMo, verl): what they mean, and what comes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import InputError
from shardwise.formats import ExportCase, import_file, nemo, verl
from shardwise.formats._exported import canonical_plan
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Plan, Training, find_stack

FEW = st.sampled_from((1, 2, 4))
SOME = settings(max_examples=30, deadline=None)

# Facts of NVIDIA-NeMo/Megatron-Bridge scripts/training and perf_recipes/deepseek/h100, as overrides of their recipes.
LAUNCHED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("torchrun --nnodes 2 --nproc_per_node 8 scripts/training/run_recipe.py --mode pretrain -ep 8 \\\n"
     "  --recipe qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config train.global_batch_size=512 dataset.seq_length=4096 \\\n"
     "  model.recompute_granularity=selective 'model.recompute_modules=[moe_act]' ddp.grad_reduce_in_fp32=False\n",
     {"model": "qwen3-30b-a3b", "num_devices": 16, "ep": 8, "modules": ("moe_act",), "precision": "bf16-grads16"}),
    ("nemo llm pretrain --factory llama3_8b trainer.devices=8 trainer.num_nodes=2 data.seq_length=8192 \\\n"
     "  trainer.strategy.tensor_model_parallel_size=2 data.global_batch_size=512 data.micro_batch_size=1\n",
     {"model": "llama-3-8b", "num_devices": 16, "tp": 2, "dp": 8, "global_batch": 512}),
    ("torchrun --nproc_per_node 8 run_recipe.py --recipe deepseek_v3_pretrain_1024gpu_h100_bf16_config -vp 4 -tp 2 \\\n"
     "  -pp 8 -ep 64 -gb 16384 -mb 1 -sl 4096 model.recompute_granularity=selective --num_gpus 1024 \\\n"
     "  'model.recompute_modules=[mla_up_proj, mlp]' 'model.pipeline_model_parallel_layout=Et|(tt|)*30mL'\n",
     {"model": "deepseek-v3", "num_devices": 1024, "dp": 64, "ep": 64, "etp": 2, "vpp": 4,
      "modules": ("mla_up_proj", "mlp"), "stage_layers": (1, *[2] * 30, 0)}),
    # perf_recipes/llama/h100/llama3.py: half of the recipes of performance are of 8 or 4 bits by name, some of adapters
    ("torchrun --nproc_per_node 8 run_recipe.py --recipe llama3_8b_pretrain_8gpu_h100_fp8cs_config -gb 128 -sl 8192\n",
     {"model": "llama-3-8b", "precision": "fp8-grads16", "adapter": ""}),
    ("torchrun --nproc_per_node 8 run_recipe.py --recipe llama3_70b_peft_8gpu_b200_nvfp4_config -gb 128 -sl 8192\n",
     {"model": "llama-3-70b", "precision": "fp4-grads16", "adapter": "lora", "rank": 32}),
    ("torchrun --nproc_per_node 8 run_recipe.py --recipe llama3_8b_pretrain_8gpu_h100_nvfp4_config -gb 8 -sl 8192 \\\n"
     "  mixed_precision=bf16_mixed\n", {"precision": "bf16"}),
)  # fmt: skip


_VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=1024 "
# Facts of volcengine/verl examples/grpo_trainer at b178a3cd56, as Hydra's words.
VERL: tuple[tuple[str, dict[str, Any]], ...] = (
    # run_qwen2-7b_math.sh
    (_VERL + "data.max_prompt_length=1024 data.max_response_length=1024 trainer.n_gpus_per_node=8 trainer.nnodes=1 \\\n"
     "  actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.actor.ppo_mini_batch_size=256 \\\n"
     "  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 actor_rollout_ref.actor.use_kl_loss=True \\\n"
     "  actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.gpu_memory_utilization=0.6 $@\n",
     {"model": "qwen2-7b", "num_devices": 8, "stack": "verl", "method": "grpo", "reference": "", "seq_len": 2048,
      "global_batch": 1280, "micro_batch": 16, "sharding": "fsdp", "recompute": "full", "precision": "amp-bf16"}),
    # run_qwen2_5-7b_math_megatron_diff_tp.sh
    (_VERL.replace("algorithm", "--config-name='ppo_megatron_trainer.yaml' algorithm") + "trainer.nnodes=1 "
     "actor_rollout_ref.model.path=$HOME/Qwen2.5-7B-Instruct \\\n"
     "  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\\n"
     "  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 actor_rollout_ref.rollout.n=5 \\\n"
     "  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 trainer.n_gpus_per_node=8\n",
     {"model": "qwen2.5-7b", "stack": "megatron", "tp": 2, "pp": 2, "dp": 2, "reference": "none", "seq_len": 1024,
      "sharding": "distributed-optimizer", "sequence_parallel": True, "precision": "bf16"}),
    # run_qwen3moe-30b_megatron_lora.sh, with the optimizer on the host as in run_qwen3_vl-30b-megatron.sh
    (_VERL.replace("algorithm", "--config-name='ppo_megatron_trainer.yaml' algorithm") + "trainer.nnodes=1 "
     "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B-Instruct-2507 trainer.n_gpus_per_node=8 \\\n"
     "  actor_rollout_ref.model.lora.rank=32 actor_rollout_ref.model.lora.alpha=64 \\\n"
     "  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.use_kl_loss=True \\\n"
     "  actor_rollout_ref.actor.megatron.expert_model_parallel_size=4 \\\n"
     "  +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=1 \\\n"
     "  +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True\n",
     {"model": "qwen3-30b-a3b-2507", "stack": "megatron", "ep": 4, "adapter": "lora", "rank": 32,
      "targets": ("all-linear",), "adapter_alpha": 64.0, "offload": ("optimizer",), "reference": ""}),
    # a LoRA run with dynamic batches and Ulysses, as run_qwen2_5-3b_gsm8k_grpo_lora.sh and others combine them
    (_VERL + "actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.target_modules=all-linear \\\n"
     "  actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct actor_rollout_ref.actor.use_dynamic_bsz=True \\\n"
     "  actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 actor_rollout_ref.actor.fsdp_config.fsdp_size=8 \\\n"
     "  actor_rollout_ref.actor.fsdp_config.param_offload=True trainer.nnodes=2\n",
     {"adapter": "lora", "rank": 64, "targets": ("all-linear",), "cp": 2, "dp": 8, "cp_kind": "all-to-all",
      "sharding": "hsdp", "shard": 4, "micro_batch": 32, "num_devices": 16, "offload": ()}),
)  # fmt: skip


@pytest.mark.parametrize(("text", "facts"), VERL)
def test_words_of_verl_mean_its_policy_s_training(text: str, facts: dict[str, Any], tmp_path: Path) -> None:
    """A launch of verl is the optimizer step of its policy: mini-batches of prompts, each answered several times."""
    path = tmp_path / "run.sh"
    path.write_text(text, encoding="utf-8")
    case = import_file(path)
    said: dict[str, Any] = {"num_devices": case.num_devices, "stack": case.stack.name}
    said |= {"model": case.model.name if case.model else ""}
    said |= {key: getattr(record, key) for record in (case.plan, case.job) for key in facts if hasattr(record, key)}
    assert {field: said[field] for field in facts} == facts
    assert not case.unknown


@SOME
@given(
    dp=FEW, cp=FEW, sharding=st.sampled_from(("fsdp", "shard-grad-op", "hsdp")), micro=FEW, offload=st.booleans(),
    method=st.sampled_from(("grpo", "ppo")), rank=st.sampled_from((0, 8)), recompute=st.sampled_from(("none", "full")),
    precision=st.sampled_from(("amp-bf16", "bf16-pure", "fp32")),
)  # fmt: skip
def test_verl_brings_back_every_field(
    dp: int, cp: int, sharding: Any, micro: int, offload: bool, method: str, rank: int, recompute: Any, precision: str
) -> None:
    """A plan of the policy under FSDP, written as verl's words, is read back as it was."""
    shard = 2 if sharding == "hsdp" else 1
    host = ("optimizer", "gradients", "parameters") if offload else ()
    plan = Plan(
        dp=dp * 4, cp=cp, cp_kind="all-to-all" if cp > 1 else "ring", sequence_parallel=False, micro_batch=micro,
        sharding=sharding, shard=shard, recompute=recompute, offload=host,
    )  # fmt: skip
    tuned: dict[str, Any] = {"adapter": "lora", "rank": rank, "targets": ("all-linear",)} if rank else {}
    job = Training(seq_len=2048, global_batch=plan.dp * micro * 3, precision=precision, method=method, **tuned)
    cluster = Cluster.parse(f"{plan.num_devices}xh100-sxm-80gb")
    model = load_model("llama-3.1-8b")
    case = ExportCase(model=model, cluster=cluster, plan=plan, job=job, stack=find_stack("verl"))
    (text,) = verl.export(case).files.values()
    back = verl.read(text, "verl.sh")
    assert canonical_plan(back.plan) == canonical_plan(plan)
    told = {name: getattr(job, name) for name in ("seq_len", "global_batch", "precision", "method", "adapter", "rank")}
    assert {name: getattr(back.job, name) for name in told} == told
    assert back.num_devices == plan.num_devices and not back.unknown


@pytest.mark.parametrize(("text", "facts"), LAUNCHED)
def test_words_over_a_recipe_mean_what_its_launcher_does(text: str, facts: dict[str, Any], tmp_path: Path) -> None:
    """Overrides on a command line set what they override, on the model and the devices that the recipe's name says."""
    path = tmp_path / "run.sh"
    path.write_text(text, encoding="utf-8")
    case = import_file(path)
    said = {"model": case.model.name if case.model else "", "num_devices": case.num_devices}
    said |= {
        field: getattr(record, field) for record in (case.plan, case.job) for field in facts if hasattr(record, field)
    }
    assert {field: said[field] for field in facts} == facts
    assert not case.unknown and any("what the recipe itself sets" in text for text in case.assumed)


def test_overrides_lie_over_a_recipe_that_lacks_their_sections() -> None:
    """A section that a recipe has as None is made from its class, and forced in words, as Hydra adds none unasked."""
    job = Training(seq_len=512, global_batch=8, token_budget=512.0 * 8 * 10, adapter="lora", rank=8)
    plan, model = Plan(dp=4, tp=2, sequence_parallel=True), load_model("llama-3.1-8b")
    stack, cluster = find_stack("megatron-bridge"), Cluster.parse("8xh100")
    case = ExportCase(model=model, cluster=cluster, plan=plan, job=job, stack=stack)
    found = nemo.export(case).files
    tree = yaml.safe_load(found["nemo.yaml"])
    assert tree["comm_overlap"]["_target_"].endswith("comm_overlap.CommOverlapConfig")
    assert (tree["train"]["train_iters"], tree["train"]["train_samples"]) == (10, None)
    bare = [word for word in found["nemo.sh"].split() if word.startswith(("comm_overlap.", "peft."))]
    assert "++comm_overlap._target_=" in found["nemo.sh"] and "++peft.dim=8" in found["nemo.sh"] and not bare
    with pytest.raises(InputError, match="precision"):
        nemo.export(replace(case, job=replace(job, precision="fp32")))
