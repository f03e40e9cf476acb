"""What sources and recipes say of layers, chunks and recomputation."""

from __future__ import annotations

import pytest

from accuracy.published import completed, documented
from shardwise.measured._record import Record
from shardwise.measured._training_plan import _vpp
from shardwise.models import Model


@pytest.mark.parametrize(("length", "recompute"), [("8192", "none"), ("131072", None)])
def test_llama_405b_ran_chunks_of_one_layer(length: str, recompute: str | None) -> None:
    """The paper's table leaves out what its text says: eight chunks a stage, and no recompute at 8,192 tokens."""
    cells, _ = documented("arXiv 2407.21783 Table 4", {"model": "llama-3.1-405b", "pp": "16", "seq_len": length})
    assert (cells["vpp"], cells["cp_kind"], cells.get("recompute")) == ("8", "all_gather", recompute)


@pytest.mark.parametrize(
    ("citation", "framework", "wanted"),
    [
        ("github:NVIDIA/Megatron-LM@152aab304d:images/cases_jan2021.png", "Megatron-LM", "Megatron-LM (2021-01)"),
        ("github:NVIDIA/Megatron-LM@152aab304d:images/cases_jan2021.png", "NeMo 25.07", "NeMo 25.07"),
        ("another page", "Megatron-LM", "Megatron-LM"),
    ],
)
def test_a_dated_page_says_which_release_ran(citation: str, framework: str, wanted: str) -> None:
    """Megatron-LM of January 2021 reduced gradients behind both products; a framework that is stated whole stays."""
    record = completed(Record({"citation": citation, "framework": framework, "notes": ""}))
    assert record.text("framework") == wanted


def test_the_scripts_of_a_paper_fill_its_table() -> None:
    """Table 1 of arXiv:2104.04473 leaves out micro-batches and chunks, which its scripts state for each model."""
    row = {"citation": "arXiv 2104.04473 Table 1, read elsewhere", "model": "gpt-l60-h10240-a80-v51200", "notes": ""}
    record = completed(Record({**row, "micro_batch": "", "vpp": "", "framework": "Megatron-LM"}))
    assert (record.whole("micro_batch"), record.whole("vpp"), record.text("framework")) == (2, 3, "Megatron-LM (2021)")


@pytest.mark.parametrize(
    ("layers", "pp", "chunks"), [("84-h8192", "2", "1 layer"), ("92-h10240", "16", "1 layer"), ("48-h7168", "1", None)]
)
def test_stages_whose_messages_overlap_are_interleaved(layers: str, pp: str, chunks: str | None) -> None:
    """Messages between stages overlap in the README of 2024, which Megatron-LM does with interleaving alone."""
    page = "github:NVIDIA/Megatron-LM@937571cfd4:images/model_table.png"
    cells, _ = documented(page, {"model": f"gpt-l{layers}-a64-v131072-untied", "pp": pp})
    assert cells.get("vpp") == chunks


@pytest.mark.parametrize(
    ("vpp", "pp", "chunks"), [("1 layer", 4, 8), ("2 layers", 4, 4), ("3", 4, 3), ("1 layer", 1, 1)]
)
def test_chunks_may_be_stated_by_their_layers(vpp: str, pp: int, chunks: int) -> None:
    """A pipeline whose chunks have so many layers has as many chunks on each stage as that takes."""
    model = Model.load("llama-3-8b")
    assert _vpp(Record({"vpp": vpp}), model, pp) == chunks


@pytest.mark.parametrize(
    "path", ["github:MooreThreads/SimuMax@4dcaae5:", "https://github.com/MooreThreads/SimuMax/blob/4dcaae5/"]
)
@pytest.mark.parametrize(("case", "notes"), [("llama3_70b_tp1_cef", "fused cross entropy"), ("llama3_70b_tp1", None)])
def test_an_address_cites_what_its_short_form_does(path: str, case: str, notes: str | None) -> None:
    """What a repository documents counts for its pages however they are cited, as do the names of its cases."""
    cells, _ = documented(f"{path}docs/b200/summary.json case {case}")
    assert (cells["cp_kind"], cells.get("notes")) == ("a2a", notes)


@pytest.mark.parametrize(
    ("model", "device", "dtype", "release", "wanted"),
    [
        (
            "nemotron-3-nano-30b-a3b",
            "h100-sxm-80gb",
            "fp8",
            "26.04",
            ("selective", "moe, layernorm, core_attn, moe_act"),
        ),
        ("nemotron-3-nano-30b-a3b", "b300", "mxfp8", "26.06", ("none", None)),
        ("gpt-oss-120b", "gb200", "bf16", "26.02", ("selective", "layernorm, moe_act")),
        ("gpt-oss-120b", "gb200", "mxfp8", "26.06.01", ("none", None)),
        ("qwen3-30b-a3b", "b300", "mxfp8", "26.06", ("none", None)),
        ("llama-3-70b", "h100-sxm-80gb", "fp8", "26.06", (None, None)),
    ],
)
def test_recipes_say_which_modules_of_mixtures_run_again(
    model: str, device: str, dtype: str, release: str, wanted: tuple[str | None, str | None]
) -> None:
    """Megatron-Bridge's table leaves recomputation to its recipes, which differ by device, type and release."""
    page = "github:NVIDIA-NeMo/Megatron-Bridge@067f987df:docs/performance-summary.md"
    row = {"model": model, "device": device, "compute_dtype": dtype, "framework": f"Megatron-Bridge {release}"}
    cells, _ = documented(page, {**row, "seq_len": "4096", "finetune": "pretrain"})
    assert (cells.get("recompute"), cells.get("recompute_detail")) == wanted
    assert "recompute" not in documented(page, {**row, "seq_len": "4096", "finetune": "lora"})[0]
