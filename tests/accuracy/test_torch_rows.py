"""Rows of PyTorch's own training stacks: which one a framework's name means, and what its recipes do."""

from __future__ import annotations

from pathlib import Path

import pytest

import measured_rows
from accuracy.published import Published
from shardwise.measured import framework_of
from shardwise.measured._comparison import Comparison

ROW = {
    "case_id": "mine-1", "metric": "tokens_per_second_per_gpu", "value": "4000", "model": "llama-2-7b",
    "device": "a100-sxm-80gb", "num_gpus": "64", "gpus_per_node": "8", "seq_len": "4096", "micro_batch": "2",
    "tp": "1", "cp": "1", "pp": "1", "dp": "64", "sharding": "fsdp", "recompute": "none", "recompute_detail": "",
    "compute_dtype": "bf16", "param_dtype": "", "optimizer": "", "master_weights": "", "framework": "fms-fsdp",
    "finetune": "pretrain", "inter_node": "",
    "vpp": "", "ep": "", "global_batch": "", "citation": "mine", "notes": "torch.compile",
}  # fmt: skip


def only(folder: Path, **record: str) -> Comparison:
    """Return a row with some record changed and its prediction."""
    found = measured_rows.published(folder, {**ROW, **record})
    assert found.status == "predicted", found.reason
    return found


@pytest.mark.parametrize(
    ("name", "stack", "sharding"),
    [
        ("IBM fms-fsdp", "fms-fsdp", "hsdp"),
        ("fms-fsdp (2024-05)", "fms-fsdp", "hsdp"),
        ("fms-fsdp (2024-03)", "fms-fsdp-eager", "hsdp"),
        ("foundation-model-stack", "fms-fsdp", "hsdp"),
        ("torchtitan 2025-06", "fsdp2", "fsdp"),
        ("torchtune 0.5", "torchtune", "fsdp"),
        ("NeMo AutoModel 26.02", "automodel", "fsdp"),
        ("InternEvo", "internevo", "zero1"),
    ],
)
def test_frameworks_are_told_by_their_names(name: str, stack: str, sharding: str) -> None:
    """Each of these frameworks has a stack and a sharding of its own."""
    found = framework_of(Published.frameworks, name, {})
    assert (found.stack, found.sharding) == (stack, sharding)


def test_replicas_in_other_nodes_only_sum_their_shards(tmp_path: Path) -> None:
    """Sharded within a node, weights stay off the network: a large model on a slow one runs faster so."""
    notes = {"fsdp": "torch.compile", "hsdp": "torch.compile; shard_size=8"}
    whole, hybrid = (
        only(tmp_path, sharding=kind, inter_node="ib_edr_100gbps", notes=said).predicted or 0.0
        for kind, said in notes.items()
    )
    assert hybrid > 1.2 * whole


def test_selective_checkpointing_of_fms_is_a_share_of_the_blocks(tmp_path: Path) -> None:
    """fms-fsdp runs a share of whole blocks again: as few as fit, so none of 7 billion and some of 70."""
    small = [only(tmp_path, recompute=kind).predicted or 0.0 for kind in ("none", "selective", "full")]
    assert small[0] == small[1] > small[2]
    big = {"model": "llama-2-70b", "num_gpus": "64", "seq_len": "8192"}
    some, every = (only(tmp_path, recompute=kind, **big).predicted or 0.0 for kind in ("selective", "full"))
    assert some > every


def test_fms_ran_eager_before_it_compiled(tmp_path: Path) -> None:
    """fms-fsdp compiles since 2024-04: its own tables have 7 billion parameters a fifth slower before."""
    before, after = (
        only(tmp_path, framework=f"fms-fsdp ({month})", sharding="hsdp").predicted or 0.0
        for month in ("2024-03", "2024-05")
    )
    assert 0.75 < before / after < 0.95


def test_automodel_runs_its_own_layers_for_mixtures(tmp_path: Path) -> None:
    """NeMo AutoModel's mixtures fuse norms, keep weights gathered and send a pipeline single sequences."""
    mixture = {"model": "qwen3-30b-a3b", "device": "h100-sxm-80gb", "num_gpus": "32", "dp": "32", "ep": "8"}
    own, eager = (
        only(tmp_path, framework=name, **mixture).predicted or 0.0 for name in ("NeMo AutoModel", "torchtitan (2024)")
    )
    assert own > eager
    kept = only(tmp_path, framework="NeMo AutoModel", **mixture)
    assert any(one.startswith("sharding: shard-grad-op") for one in kept.assumed)
    assert not any(one.startswith("sharding: shard") for one in only(tmp_path, framework="NeMo AutoModel").assumed)
    piped = only(tmp_path, framework="NeMo AutoModel", **{**mixture, "pp": "2", "dp": "16", "micro_batch": "4"})
    assert any(one.startswith("micro_batch: one sequence") for one in piped.assumed)


def test_experts_that_a_gate_deals_in_turn_are_reached_by_one_copy(tmp_path: Path) -> None:
    """NeMo AutoModel's table of benchmarks ran a gate whose 8 experts of a token are neighbours (2025-10, 8 H100)."""
    row = {"model": "qwen3-30b-a3b", "device": "h100-sxm-80gb", "num_gpus": "8", "dp": "8", "ep": "8",
           "micro_batch": "4", "global_batch": "512", "recompute": "full", "framework": "NeMo AutoModel",
           "value": "12040"}  # fmt: skip
    table = "github:NVIDIA-NeMo/Automodel@01926a5c:docs/performance-summary.md"
    even, dealt = (only(tmp_path, citation=where, **row).relative_error for where in ("mine", table))
    assert dealt == pytest.approx(0, abs=0.06)
    assert even is not None
    assert even < -0.15


def test_automodel_s_adapters_have_the_type_of_the_weights(tmp_path: Path) -> None:
    """Its table of LoRA (2025-10): Llama-3-8B on one H100, without the casts of fp32 adapters that peft has."""
    row = {"device": "h100-sxm-80gb", "num_gpus": "1", "dp": "1", "global_batch": "32", "model": "llama-3-8b",
           "finetune": "lora", "value": "12472.87", "framework": "NeMo AutoModel", "notes": "",
           "citation": "github:NVIDIA-NeMo/Automodel:docs/performance-summary.md"}  # fmt: skip
    assert only(tmp_path, **row).relative_error == pytest.approx(0, abs=0.05)


def test_updates_within_backward_hold_one_gradient(tmp_path: Path) -> None:
    """An optimizer in backward (torchtune) frees each gradient at once: the peak lacks all the others."""
    alone = {"num_gpus": "1", "dp": "1", "sharding": "none", "framework": "torchtune", "metric": "peak_memory",
             "recompute": "full", "param_dtype": "bf16", "master_weights": "0", "optimizer": "adamw"}  # fmt: skip
    behind, within = (
        only(tmp_path, notes=n, **alone).predicted or 0.0 for n in ("compile", "compile; optimizer in backward")
    )
    gradients = 2 * 6.74e9
    assert behind - gradients < within < behind - 0.5 * gradients


def test_a_loss_of_torchtune_is_whole_before_it_runs_in_pieces(tmp_path: Path) -> None:
    """Whole logits in fp32 (torchtune before 0.3) hold more than pieces of them, and compiled pieces the least."""
    alone = {"num_gpus": "1", "dp": "1", "sharding": "none", "metric": "peak_memory", "recompute": "full",
             "model": "llama-3.1-8b", "finetune": "lora", "micro_batch": "8"}  # fmt: skip
    whole, pieces, compiled = (
        only(tmp_path, framework=name, notes=said, **alone).predicted or 0.0
        for name, said in (
            ("torchtune", "loss=torch.nn.CrossEntropyLoss"), ("torchtune", ""), ("torchtune (torch.compile)", ""),
        )
    )  # fmt: skip
    assert whole > pieces > compiled > 0


def test_paged_states_are_none_of_the_allocators_bytes(tmp_path: Path) -> None:
    """States that bitsandbytes pages are CUDA's managed memory: torch's peak lacks them."""
    alone = {"num_gpus": "1", "dp": "1", "sharding": "none", "framework": "torchtune", "recompute": "full",
             "param_dtype": "bf16", "master_weights": "0", "metric": "peak_memory",
             "memory_kind": "reserved"}  # fmt: skip
    usual, paged = (only(tmp_path, optimizer=name, **alone).predicted or 0.0 for name in ("adamw", "paged_adamw"))
    assert 0 < paged < usual - 3.9 * 6.74e9


def test_torchtitan_held_its_logits_until_june_2024(tmp_path: Path) -> None:
    """Its pull 391 frees the fp32 logits before backward: 3.9 GiB with 8,192 tokens and 128,256 words."""
    row = {"model": "llama-3-8b", "device": "h100-sxm-80gb", "num_gpus": "8", "dp": "8", "seq_len": "8192",
           "micro_batch": "1", "recompute": "full", "metric": "peak_memory", "memory_kind": "allocated",
           "notes": ""}  # fmt: skip
    held, freed = (only(tmp_path, framework=f"torchtitan ({month})", **row) for month in ("2024-05", "2024-07"))
    assert ((held.predicted or 0) - (freed.predicted or 0)) / 2**30 == pytest.approx(3.9, abs=0.1)
