"""What optimizers keep of each tensor, as the libraries lay it out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cost import host_of
from shardwise.errors import InputError
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import OPTIMIZERS, Plan, Settings, Training, find_optimizer, find_stack
from shardwise.training import TrainingOptions, TrainReport, train
from shardwise.training._update import tensor_bytes

# Bytes of the state tensors of one parameter, without the step's counter and the code tables that all share: torch
# 2.13.0 after one step and bitsandbytes 0.50.2 after init_state, on a CPU; (optimizer, rows, columns, width of moments
# that follow the parameter) -> bytes. torchao 0.9 subclass_4bit.py and galore_torch by their source.
KEPT = (
    ("adam", 4096, 16, 2, 2 * 131072),
    ("adam", 257, 31, 4, 2 * 31868),
    ("adafactor", 4096, 16, 2, 8192 + 32),
    ("adafactor", 16, 14336, 4, 64 + 57344),
    ("adafactor", 64, 63, 4, 256 + 252),
    ("adam8bit", 4096, 16, 2, 2 * (65536 + 1024)),
    ("adam8bit", 16, 14336, 4, 2 * (229376 + 3584)),
    ("adam8bit", 64, 63, 2, 2 * 16128),
    ("adam8bit", 64, 64, 2, 2 * (4096 + 64)),
    ("adam8bit", 257, 31, 2, 2 * (7967 + 128)),
    ("lion8bit", 257, 31, 2, 7967 + 128),
    ("lion8bit", 64, 63, 2, 16128),
    ("ademamix8bit", 4096, 16, 2, 131072 + 2048 + 65536 + 1024),
    ("ademamix8bit", 257, 31, 2, 15934 + 256 + 7967 + 128),
    ("ademamix8bit", 64, 63, 2, 32256 + 16128),
    ("muon", 16, 14336, 2, 458752),
    ("sgd-plain", 4096, 16, 4, 0),
    ("adam4bit", 4096, 4096, 2, 2 * (4096 * 4096 // 2 + 4 * 4096 * 4096 // 128 + 64)),
    ("adam4bit", 257, 31, 2, 2 * 2 * 257 * 31),
    ("galore", 14336, 4096, 2, 2 * (2 * 14336 * 128 + 128 * 4096)),
    ("galore", 64, 4096, 2, 2 * (2 * 4096 * 64 + 64 * 64)),
)


@pytest.mark.parametrize(("name", "rows", "columns", "width", "kept"), KEPT)
def test_state_of_a_tensor_is_that_of_the_library(name: str, rows: int, columns: int, width: int, kept: int) -> None:
    """Blocks, small tensors, factored and projected moments take the bytes that the libraries allocate."""
    assert tensor_bytes(find_optimizer(name).matrix, (rows * columns, rows, columns), width) == kept


def test_vectors_are_not_factored() -> None:
    """Adafactor keeps one number an element of what has one dimension."""
    assert tensor_bytes(find_optimizer("adafactor").other, (4096, 4096, 1), 4) == 4 * 4096


def optimizer_bytes(name: str, stack: str = "transformers", **job: int) -> float:
    """Return the optimizer state of Llama-3.1-8B on one device."""
    options = TrainingOptions(stack=find_stack(stack))
    asked = Training(seq_len=512, global_batch=1, optimizer=name, precision="bf16-pure", **job)
    report = train(load_model("llama-3.1-8b"), Cluster.parse("1xh100-sxm-80gb"), Plan(micro_batch=1), asked, options)
    return report.memory.optimizer


def test_eight_bits_of_a_whole_model() -> None:
    """Matrices take 2 x (1 + 4/256) bytes, 65 norms of 4,096 elements too, and Trainer keeps the embedding in fp32."""
    table = 128256 * 4096
    rest = 8030261248 - table
    assert optimizer_bytes("adam8bit") == 2 * (rest + 4 * rest / 256) + 8 * table
    assert optimizer_bytes("adam8bit", "transformers-2024") == 2 * 8030261248 * (1 + 4 / 256)


def test_galore_projects_linear_layers_alone() -> None:
    """Llama-3.1-8B at rank 128: two moments of the longer side and a projector of the shorter, Adam for all else."""
    sides = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
    layers = 32 * sum(128 * (2 * max(pair) + min(pair)) for pair in sides)
    others = 2 * 128256 * 4096 + 65 * 4096
    assert optimizer_bytes("galore") == 2 * layers + 2 * 2 * others
    assert optimizer_bytes("galore", optimizer_rank=64) == layers + 2 * 2 * others


@given(st.sampled_from(sorted(OPTIMIZERS)), st.integers(1, 3000), st.integers(1, 3000))
def test_adam_keeps_the_most(name: str, rows: int, columns: int) -> None:
    """No optimizer but AdEMAMix, and projections of tiny matrices, keeps more than Adam in fp32."""
    kept = tensor_bytes(find_optimizer(name).matrix, (rows * columns, rows, columns), 4)
    most = tensor_bytes(find_optimizer("adam").matrix, (rows * columns, rows, columns), 4)
    projector = 4 * min(rows, columns) ** 2 if find_optimizer(name).matrix.rank else 0
    assert 0 <= kept <= (1.5 if name == "ademamix8bit" else 1) * most + projector


@pytest.mark.parametrize(
    ("name", "kept"),
    [("adam", 4.0), ("paged-adam", 8.0), ("lion", 2.0), ("paged-lion", 4.0), ("paged-adam8bit", 2.03125)],
)
def test_bitsandbytes_keeps_fp32_states_of_bf16(name: str, kept: float) -> None:
    """PagedAdamW32bit of a bf16 tensor has two fp32 states, where torch's AdamW has two of bf16."""
    assert find_optimizer(name).matrix.element_bytes(2) == kept


def test_savers_of_the_optimizer_cost_and_gain_as_published() -> None:
    """Llama-3.2-3B on A100 (torchtune's README): the step in backward gains 1.4 %, 8-bit AdamW then costs 4.7 %."""

    def tokens_per_second(early: bool, name: str) -> float:
        stack = replace(find_stack("torchtune-compiled"), settings=Settings(updates_in_backward=early))
        asked = Training(seq_len=4096, global_batch=2, optimizer=name)
        plan, options = Plan(micro_batch=2, recompute="full"), TrainingOptions(stack=stack)
        report = train(load_model("llama-3.2-3b"), Cluster.parse("1xa100-sxm-80gb"), plan, asked, options)
        return asked.tokens_per_step / report.step_seconds

    usual, early, narrow = tokens_per_second(False, "adam"), *(tokens_per_second(True, n) for n in ("adam", "adam8bit"))
    assert early / usual == pytest.approx(7309 / 7210, abs=0.01)
    assert narrow / early == pytest.approx(6960 / 7301, abs=0.01)


def test_a_rank_is_of_projections_alone() -> None:
    """A rank for an optimizer that projects nothing is refused by name."""
    with pytest.raises(InputError, match="optimizer_rank = 8: is not of adam; leave it out, or use galore, apollo"):
        find_optimizer("adam", 8)


def test_update_in_backward_frees_gradients() -> None:
    """Only the gradient of the largest tensor is left, and a step of several micro-batches is refused."""
    stack = find_stack("transformers")
    model, cluster = load_model("llama-3.1-8b"), Cluster.parse("1xh100-sxm-80gb")
    asked = Training(seq_len=512, global_batch=2, precision="bf16-pure")
    early = TrainingOptions(stack=replace(stack, settings=Settings(updates_in_backward=True)))
    report = train(model, cluster, Plan(micro_batch=2), asked, early)
    assert report.memory.gradients == 2 * 128256 * 4096
    with pytest.raises(InputError, match="updates_in_backward = True: updates with the gradients of one micro-batch"):
        train(model, cluster, Plan(micro_batch=1), asked, early)


def paged(name: str, on: str = "1xrtx-4090", **job: Any) -> TrainReport:
    """Return Qwen2.5-1.5B trained with an optimizer on a card of 24 GB."""
    asked = Training(**{"seq_len": 512, "global_batch": 1, "optimizer": name, "precision": "bf16-pure"} | job)
    options = TrainingOptions(stack=find_stack("transformers"))
    return train(load_model("qwen2.5-1.5b"), Cluster.parse(on), Plan(micro_batch=1, recompute="full"), asked, options)


def test_pages_that_fit_cost_nothing() -> None:
    """Where all fits the same bytes are in pages, none moves, and the step takes as long."""
    whole, own = paged("adam8bit", "1xh100-sxm-80gb"), paged("paged-adam8bit", "1xh100-sxm-80gb")
    assert own.evaluation.resident + own.memory.optimizer == pytest.approx(whole.memory.optimizer, rel=1e-12)
    assert (own.evaluation.moved, own.host_bytes, own.step_seconds) == (0, 0, whole.step_seconds)
    # bitsandbytes optim/optimizer.py get_state_buffer: vectors of 1,536 elements stay, and k and v with their biases.
    assert 0 < own.memory.optimizer < 0.01 * own.evaluation.resident


def test_pages_leave_where_memory_is_short() -> None:
    """A plan whose state alone is too much fits, its pages cross the host link each step, and the card is full."""
    whole, own = (paged(name, on="1xrtx-3080-ti", seq_len=2048) for name in ("adam", "paged-adam"))
    assert not whole.fits and own.fits
    assert own.device_bytes == own.verdict.limit_bytes and own.evaluation.needed < own.verdict.limit_bytes
    assert own.host_bytes == own.evaluation.moved == own.memory.paged
    rate = host_of(own.case.cluster).link_bytes_per_second
    assert own.evaluation.step.optimizer > 2 * own.memory.paged / rate


def test_small_tensors_are_not_paged() -> None:
    """LoRA of rank 8 on q and v has no matrix of 1e5 elements, so that nothing of its state is in pages."""
    assert paged("paged-adam", adapter="lora", rank=8, targets=("q", "v")).memory.paged == 0


def test_pages_need_a_driver_that_moves_them() -> None:
    """Other makers' devices, and state that the host keeps already, are refused by name."""
    with pytest.raises(InputError, match="optimizer = 'paged-lion': needs CUDA's managed memory, which mi300x has not"):
        paged("paged-lion", "1xmi300x")
    for name in ("lion8bit", "paged-lion8bit"):
        with pytest.raises(InputError, match=f"'{name}': has no kernel for Metal in bitsandbytes; use adam, or"):
            paged(name, "1xapple-m3-max-40core")
    asked = Training(seq_len=512, global_batch=1, optimizer="paged-adam")
    plan = Plan(micro_batch=1, offload=("optimizer",))
    with pytest.raises(InputError, match="offload keeps on the host; use adam, or leave optimizer out of offload"):
        train(load_model("gpt2"), Cluster.parse("1xh100-sxm-80gb"), plan, asked)
