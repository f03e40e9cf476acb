"""Systems whose files are not read are known when they are seen: none is read as a system that shares its words."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import InputError
from shardwise.formats import import_file

SHARED = "--model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 1 --gradient_checkpointing"
OTHERS: tuple[tuple[str, str, str], ...] = (
    # allenai/open-instruct scripts/train/debug/envs/counter_1gpu.sh and configs/train_configs/dpo/default.yaml:
    # both were read as supervised training of transformers, of the default length and without a reference
    ("grpo.sh", f"uv run python open_instruct/grpo_fast.py {SHARED} --pack_length 1536", "Open Instruct"),
    ("dpo.yaml", "model_name_or_path: allenai/tulu-2-7b\nmax_seq_length: 2048\nper_device_train_batch_size: 1\n"
     "gradient_accumulation_steps: 4\nwith_tracking: true\n", "Open Instruct"),
    # AMD-AGI/Primus docs/quickstart.md
    ("primus.sh", "./primus-cli direct -- train pretrain --config exp.yaml\n", "Primus' launcher, beside the YAML"),
    # EleutherAI/gpt-neox configs/pythia/1B.yml, which was refused as a model's configuration
    ("1B.yml", '{"pipe_parallel_size": 1, "num_layers": 16, "hidden_size": 2048, "seq_length": 2048}\n', "GPT-NeoX"),
    # ml-explore/mlx-lm mlx_lm/examples/lora_config.yaml, whose YAML was of no system that is known
    ("lora_config.yaml", "model: mlx-community/Llama-3.2-1B-Instruct-bf16\ntrain: true\nfine_tune_type: lora\n"
     "num_layers: 16\nbatch_size: 4\nmax_seq_length: 2048\nlora_parameters:\n  rank: 8\n", "MLX LM"),
    # mosaicml/llm-foundry scripts/train/yamls/finetune/mpt-7b_dolly_sft.yaml, which was read as accelerate's
    ("mpt.yaml", "max_seq_len: 2048\nmodel:\n  name: mpt_causal_lm\ntrain_loader:\n  name: text\nfsdp_config:\n"
     "  sharding_strategy: FULL_SHARD\n", "llm-foundry"),
    # alibaba/ROLL examples/qwen3-30BA3B-rlvr_megatron/run_rlvr_pipeline.sh: the YAML of the pipeline is read
    ("run.sh", "python examples/start_rlvr_pipeline.py --config_path a --config_name rlvr_config\n",
     "ROLL's launcher, beside the YAML of its pipeline"),
    # volcengine/verl examples/skypilot/verl-ppo.yaml
    ("task.yaml", "resources:\n  accelerators: H100:1\nrun: |\n  python3 -m verl.trainer.main_ppo a=1\n", "SkyPilot"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "text", "system"), OTHERS)
def test_a_system_that_is_not_read_is_named(name: str, text: str, system: str, tmp_path: Path) -> None:
    """Words that it shares with a system that is read do not make it one."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=f"is of {system}.*which is not read"):
        import_file(tmp_path / name)


def test_words_of_another_system_in_a_comment_are_none(tmp_path: Path) -> None:
    """A setting that is not known beside a note on another trainer leaves a file what it is."""
    text = (
        "base_model: NousResearch/Llama-3.2-1B\nmicro_batch_size: 1\nsequence_len: 512  # open_instruct/dpo has 1024\n"
    )
    (tmp_path / "a.yaml").write_text(text + "adapter: qlora\nload_in_4bit: true\neta_min: 1e-7\n", encoding="utf-8")
    assert import_file(tmp_path / "a.yaml").system == "axolotl"


def test_supervised_training_of_open_instruct_has_transformers_words(tmp_path: Path) -> None:
    """Its finetune.py takes them in their meaning."""
    script = f"accelerate launch --num_processes 8 open_instruct/finetune.py {SHARED} --max_seq_length 4096\n"
    (tmp_path / "a.sh").write_text(script, encoding="utf-8")
    assert import_file(tmp_path / "a.sh").job.seq_len == 4096


# Scripts that name a model for something else: all were read as trainings of 8 sequences a device, in fp32.
NO_TRAININGS = {
    # hiyouga/LLaMA-Factory examples/extras/llama_pro/expand.sh
    "expand.sh": "python scripts/llama_pro.py --model_name_or_path meta-llama/Meta-Llama-3-8B --output_dir a "
    "--num_expand 8\n",
    # deepspeedai/DeepSpeedExamples inference/huggingface/text-generation/run-generation-script/test-gpt.sh
    "test-gpt.sh": "deepspeed --num_nodes 1 --num_gpus 1 test-run-generation.py --model_type=gpt2 "
    "--model_name_or_path=gpt2-xl --sample_input a.txt --fp16 --ds-inference\n",
    # NVIDIA/dgxc-benchmarking alternative_recipes/helm-charts/inference/llm-benchmarks/vllm-server-values.yaml
    "values.yaml": 'environment:\n  SERVER_TYPE: "vLLM"\n  NUM_GPUS: "1"\nngcImagePullSecretName: ""\nnvctNcaId: ""\n',
}


@pytest.mark.parametrize("name", NO_TRAININGS)
def test_what_trains_nothing_is_no_training(name: str, tmp_path: Path) -> None:
    """A script that converts or generates, and a chart's values, are refused rather than answered with defaults."""
    (tmp_path / name).write_text(NO_TRAININGS[name], encoding="utf-8")
    with pytest.raises(InputError, match=r"starts no program|has no setting of a system"):
        import_file(tmp_path / name)


def test_a_script_that_starts_a_teacher_s_engine_is_the_training(tmp_path: Path) -> None:
    """THUDM/slime examples/on_policy_distillation/run-qwen3-8B-opd.sh serves a teacher, and trains beside it."""
    script = (
        "CUDA_VISIBLE_DEVICES=7 python3 -m sglang.launch_server --model-path /root/Qwen3-32B --tp 1 &\n"
        "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 4 --colocate --hf-checkpoint /root/Qwen3-8B "
        "--rollout-batch-size 16 --n-samples-per-prompt 4 --rollout-max-response-len 8192 --num-rollout 3 "
        "--global-batch-size 64 --tensor-model-parallel-size 2 --use-dynamic-batch-size --max-tokens-per-gpu 9216\n"
    )
    (tmp_path / "a.sh").write_text(script, encoding="utf-8")
    case = import_file(tmp_path / "a.sh")
    assert (case.system, case.model and case.model.name, case.plan.tp) == ("slime", "qwen3-8b", 2)


@pytest.mark.parametrize("name", ["train.py", "tune.ipynb"])
def test_a_program_is_no_script_of_the_shell(name: str, tmp_path: Path) -> None:
    """A training of transformers in Python is said to be a program, not a shell script whose `if` stays open."""
    text = "from transformers import Trainer\nif True:\n    Trainer(model, args).train()\nfor a in b:\n    pass\n"
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"is a program: of those Unsloth's \.py scripts alone are read"):
        import_file(tmp_path / name)
