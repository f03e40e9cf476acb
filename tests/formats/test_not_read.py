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
    ("primus.sh", "./primus-cli direct -- train pretrain --config exp.yaml\n", "Primus"),
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
    with pytest.raises(InputError, match=f"is of {system}, which is not read"):
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
