"""Layers onto pipeline stages: the ways in which frameworks cut a model, one of them the stack's own.

A piece is what a stage holds at once: a stage of pp, or with interleaving one of its chunks; pieces are in the order
of the model. Plans that state `stage_layers` are cut as they say.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Literal, TypeAlias, get_args

from shardwise.plans._plan import Plan
from shardwise.records import replace

PartitionRule: TypeAlias = Literal["uniform", "megatron", "torchtitan", "middle"]
PARTITIONS: tuple[str, ...] = get_args(PartitionRule)
SHIFTS: dict[str, tuple[bool, bool]] = {
    "usual": (False, False),
    "first-1": (True, False),
    "last-1": (False, True),
    "ends-1": (True, True),
}
"""Layers of stages as a search tries them: as the framework cuts them, or one off the first or the last piece."""


def _uniform(layers: int, pieces: int) -> tuple[int, ...]:
    """Return equal pieces, the first ones holding a layer more.

    DeepSpeed runtime/utils.py, partition_uniform.
    """
    each, more = divmod(layers, pieces)
    return tuple(each + (i < more) for i in range(pieces))


def _megatron(layers: int, pieces: int) -> tuple[int, ...]:
    """Return equal pieces; where they do not divide, what Megatron-LM's flags and NVIDIA's recipes make of them.

    Where two more would divide, embedding and loss count as a layer each, on the first and the last piece
    (--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split: Llama 3.1 405B, Qwen3-235B,
    BLOOM's 70 layers on 12 stages in arXiv:2211.05100 section 3.3; with a layer a piece those two have none,
    arXiv:2407.21783 section 3.3.2). Else the last piece, which has the loss and the prediction layers, holds what is
    left (--decoder-last-pipeline-num-layers, or --pipeline-model-parallel-layout with chunks): DeepSeek-V3 and Kimi
    K2 in github.com/NVIDIA-NeMo/Megatron-Bridge recipes/deepseek/deepseek_v3.py.
    """
    whole = -(-layers // pieces)
    if layers % pieces and (layers + 2) % pieces == 0:
        return (whole - 1, *(whole,) * (pieces - 2), whole - 1)
    left = layers - whole * (pieces - 1)
    return (*(whole,) * (pieces - 1), left) if left > 0 else _uniform(layers, pieces)


def _torchtitan(layers: int, pieces: int) -> tuple[int, ...]:
    """Return pieces in which embedding and head count as a layer each, the first ones holding a layer more.

    github.com/pytorch/torchtitan distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part, with its default
    weights of input and output.
    """
    first, *rest = _uniform(layers + 2, pieces)
    return (first - 1, *rest[:-1], rest[-1] - 1) if rest else (layers,)


def _middle(layers: int, pieces: int) -> tuple[int, ...]:
    """Return equal pieces, those in the middle holding a layer more: the ends have embedding and head.

    vLLM distributed/utils.py, get_pp_indices.
    """
    each, more = divmod(layers, pieces)
    first = (pieces - more + 1) // 2
    return tuple(each + (first <= i < first + more) for i in range(pieces))


_WAYS: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "uniform": _uniform,
    "megatron": _megatron,
    "torchtitan": _torchtitan,
    "middle": _middle,
}


def shifted(sizes: tuple[int, ...], shift: str) -> tuple[int, ...]:
    """Return pieces with a layer taken off the first or the last one, as one of `SHIFTS` says; their own where none is.

    The first has the embedding, the last the head. The last of the others takes the layer: of their micro-batches it
    holds the fewest.

    >>> shifted((4, 4, 4, 4), "last-1"), shifted((4, 4, 4, 4), "ends-1"), shifted((4, 4), "first-1")
    ((4, 4, 5, 3), (3, 5, 5, 3), (3, 5))
    """
    off = [place for place, less in zip((0, len(sizes) - 1), SHIFTS[shift], strict=True) if less]
    others = [place for place in range(len(sizes)) if place not in off]
    layers = list(sizes)
    if others and all(sizes[place] for place in off):
        for place, taker in zip(off, reversed(others * 2), strict=False):
            layers[place] -= 1
            layers[taker] += 1
    return tuple(layers)


@lru_cache(maxsize=4096)
def split_layers(layers: int, pieces: int, partition: str) -> tuple[int, ...]:
    """Return the layers of each piece, in the order of the model, as a framework cuts them, with a shift behind it.

    >>> split_layers(10, 4, "uniform"), split_layers(10, 4, "middle"), split_layers(27, 4, "torchtitan")
    ((3, 3, 2, 2), (2, 3, 3, 2), (7, 7, 7, 6))
    >>> split_layers(61, 16, "megatron") == (4,) * 15 + (1,)
    True
    >>> split_layers(126, 16, "megatron") == (7, *(8,) * 14, 7), split_layers(6, 8, "megatron")
    (True, (0, 1, 1, 1, 1, 1, 1, 0))
    >>> split_layers(12, 4, "megatron last-1")
    (3, 3, 4, 2)
    """
    way, _, shift = partition.partition(" ")
    return shifted(_WAYS[way](layers, pieces), shift or "usual")


def balanced_layers(layers: int, pieces: int, head: float) -> tuple[int, ...]:
    """Return the layers of each piece where a head that costs as much as so many layers is balanced with them.

    A piece ends behind the layer with which the sum passes its share: github.com/huggingface/nanotron
    src/nanotron/models/base.py, build_model.

    >>> balanced_layers(24, 4, 2.5), balanced_layers(32, 2, 0.5)
    ((7, 7, 6, 4), (17, 15))
    """
    counts, each = [0] * pieces, (layers + head) / pieces
    piece = 0
    for done in range(1, layers + 1):
        counts[piece] += 1
        if done > each * (piece + 1):
            piece = min(piece + 1, pieces - 1)
    return tuple(counts)


def listed(layers: int, pieces: int, partition: PartitionRule = "uniform") -> str:
    """Return layers cut into pieces as a list to copy.

    >>> listed(10, 4)
    '3,3,2,2'
    """
    return ",".join(map(str, split_layers(layers, pieces, partition)))


def with_stage_layers(plan: Plan, layers: int, partition: str) -> Plan:
    """Return the plan with its layers a piece written out where it does not state them and they are not all equal.

    >>> [with_stage_layers(Plan(pp=pp), 10, "uniform").stage_layers for pp in (2, 4)]
    [(), (3, 3, 2, 2)]
    """
    pieces = plan.pp * plan.vpp
    if plan.stage_layers or not 1 < pieces <= layers:
        return plan
    layers_of_pieces = split_layers(layers, pieces, partition)
    return replace(plan, stage_layers=layers_of_pieces) if min(layers_of_pieces) < max(layers_of_pieces) else plan
