"""Layers onto pipeline stages, as Megatron-LM, torchtitan and DeepSpeed cut them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import (
    PARTITIONS,
    PartitionRule,
    Plan,
    Training,
    balanced_layers,
    find_stack,
    split_layers,
    stack_names,
)
from shardwise.training import TrainingOptions, train


@given(layers=st.integers(1, 128), pieces=st.integers(1, 16), head=st.floats(0, 20))
def test_balanced_pieces_hold_every_layer_and_none_more_than_its_share_and_one(
    layers: int, pieces: int, head: float
) -> None:
    """A piece ends with the layer that passes its share, so that none but the last is fuller; a head takes layers."""
    found = balanced_layers(layers, pieces, head)
    assert sum(found) == layers and len(found) == pieces
    assert max(found) <= (layers + head) / pieces + 1 + 1e-9
    assert found[-1] <= balanced_layers(layers, pieces, 0.0)[-1]


@pytest.mark.parametrize(
    ("layers", "pieces", "first", "last"),
    [
        (126, 64, 1, 1),
        (126, 128, 0, 0),
        (94, 8, 11, 11),
        (70, 12, 5, 5),
        (61, 16, 4, 1),
        (61, 4, 16, 13),
        (10, 4, 2, 2),
    ],
)
def test_a_megatron_stage_with_the_loss_holds_fewer_layers(layers: int, pieces: int, first: int, last: int) -> None:
    """Layouts that are printed: Llama 405B, Qwen3-235B, BLOOM, DeepSeek-V3 and Kimi K2."""
    found = split_layers(layers, pieces, "megatron")
    assert (found[0], found[-1]) == (first, last)


@pytest.mark.parametrize(
    ("layers", "pieces", "cut"), [(27, 4, (7, 7, 7, 6)), (32, 4, (8, 9, 8, 7)), (6, 2, (3, 3)), (5, 1, (5,))]
)
def test_torchtitan_counts_embedding_and_head_as_layers(layers: int, pieces: int, cut: tuple[int, ...]) -> None:
    """The first and the last stage hold a layer less than their share of layers, embedding and head."""
    assert split_layers(layers, pieces, "torchtitan") == cut


@given(st.integers(2, 200), st.integers(1, 64), st.sampled_from(PARTITIONS))
def test_every_layer_lies_on_one_stage(layers: int, pieces: int, partition: PartitionRule) -> None:
    """Layers of all stages add up to the model, and no stage but the first and last differs by more than one."""
    pieces = min(pieces, layers)
    found = split_layers(layers, pieces, partition)
    assert sum(found) == layers and len(found) == pieces and min(found) >= 0
    assert max(found) - min(found[1:-1], default=max(found)) <= 1


@pytest.mark.parametrize("stack", stack_names())
def test_a_plan_is_cut_as_its_stack_cuts_it(stack: str) -> None:
    """Layers that stages do not divide go to them by the stack's own partition, and the answer says so."""
    model, cluster = load_model("deepseek-v3"), Cluster.parse("2048xh800-sxm-80gb")
    job = Training(seq_len=4096, global_batch=2048)
    report = train(model, cluster, Plan(pp=16, ep=64, dp=0, micro_batch=1), job, TrainingOptions(stack=stack))
    assert report.plan.stage_layers == split_layers(61, 16, find_stack(stack).partition)
    assert any(note.startswith("stage_layers ") for note in report.assumptions)
