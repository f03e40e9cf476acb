"""Layers to pipeline stages: which blocks each stage holds, compressed into runs of equal stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Generic

from shardwise.ledger.number import X
from shardwise.models import Block, Model
from shardwise.plans import Schedule, find_rules
from shardwise.records import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages(Generic[X]):
    """Consecutive equal pipeline stages: how many, where the first is, and how many layers of each kind one holds.

    A kind is a distinct block with or without recompute, in the order of `kinds_of`. `embeds` and `ends` are 1 where
    the stage has the embedding or the head. `mirrored` counts the layers of the opposite stage, which DualPipe holds
    too.
    """

    count: X
    position: X
    layers: tuple[X, ...]
    mirrored: tuple[X, ...]
    embeds: X
    ends: X
    mirrored_embeds: X
    mirrored_ends: X

    @property
    def embeddings(self) -> X:
        """Input embeddings that the devices of a stage hold, the opposite stage's included."""
        return self.embeds + self.mirrored_embeds

    @property
    def heads(self) -> X:
        """Output heads that the devices of a stage hold, the opposite stage's included."""
        return self.ends + self.mirrored_ends

    def with_table_alone(self) -> Stages[X]:
        """Return a stage with no more than the input table, which forward reads first and whose gradient is done last.

        Nothing runs beside its bucket: parameters fill buckets from the last to the first, and a tensor is in one alone
        (Megatron-LM core/distributed/param_and_grad_buffer.py, torch/nn/parallel/distributed.py).
        """
        layers, none = tuple(0 * n for n in self.layers), 0 * self.count
        return replace(self, layers=layers, mirrored=layers, ends=none, mirrored_ends=none)

    def with_tables_alone(self) -> Stages[X]:
        """Return a stage with no more than its tables, of input and output."""
        layers = tuple(0 * n for n in self.layers)
        return replace(self, layers=layers, mirrored=layers)

    def with_last_bucket_alone(self, wide: bool) -> Stages[X]:
        """Return a stage with what is in one bucket with the input table: the head beside it, if `wide`.

        Of weights in 8 bits all that is in 16 goes with the last bucket (Megatron-LM
        core/distributed/param_and_grad_buffer.py, partition_buckets).
        """
        table = self.with_table_alone()
        return replace(table, ends=self.embeds * self.ends) if wide else table


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A distinct block of a model, with or without recompute, whose input needs a gradient or does not.

    `at` is the first layer of the kind where fine-tuning treats layers apart.
    """

    block: Block
    recomputed: bool
    entry: bool = True
    at: int = 0


@dataclass(frozen=True, slots=True)
class LayerOrder:
    """The distinct layers of a model, in order of first appearance, and which of them each layer is.

    Where the input of the first `idle` layers needs no gradient, which full training never has, those are apart; so
    are those that train `whole` among frozen ones. With each stands the first layer of its kind.
    """

    blocks: tuple[tuple[Block, bool, int], ...]
    layers: tuple[int, ...]


def order_of(model: Model, idle: int = 0, whole: Collection[int] = ()) -> LayerOrder:
    """Return the distinct layers of a model and their order."""
    blocks = [*model.kinds]
    layers = [(kind, at >= idle, at in whole) for at, kind in enumerate(model.order)]
    first = {one: at for at, one in reversed([*enumerate(layers)])}
    index = {one: i for i, one in enumerate(dict.fromkeys(layers))}
    apart = tuple((blocks[kind], entry, first[kind, entry, own]) for kind, entry, own in index)
    return LayerOrder(apart, tuple(index[one] for one in layers))


def kinds_of(order: LayerOrder, partly: bool, recomputes: bool, wakes: bool) -> tuple[LayerKind, ...]:
    """Return the kinds of layer that stages may hold, in order of first appearance; two may be equal.

    Where checkpoints need an input with a gradient (transformers enable_input_require_grads, which peft calls under
    gradient checkpointing) they `wake` the idle layers, which stay apart: plans of all recompute modes have one order.
    """
    variants = (True, False) if partly else (recomputes,)
    return tuple(LayerKind(block, v, entry or wakes, at) for v in variants for block, entry, at in order.blocks)


def _chunks(order: Sequence[int], sizes: tuple[int, ...]) -> list[list[int]]:
    chunks, at = [], 0
    for size in sizes:
        chunks.append(list(order[at : at + size]))
        at += size
    return chunks


@lru_cache(maxsize=4096)
def stage_layers(
    order: tuple[int, ...], pp: int, vpp: int, sizes: tuple[int, ...], schedule: Schedule = "interleaved"
) -> tuple[tuple[int, ...], ...]:
    """Return for every stage the block indices of its layers, over its chunks.

    Sizes are layers of each piece, in order of the model; the schedule says which pieces a stage has.

    >>> stage_layers((0, 0, 1, 1), 2, 1, (2, 2))
    ((0, 0), (1, 1))
    """
    pieces, piece = _chunks(order, sizes), find_rules(schedule).piece
    return tuple(tuple(b for c in range(vpp) for b in pieces[piece(pp, i, c)]) for i in range(pp))


def _counts(layers: tuple[int, ...], num_blocks: int, recomputed: int | None) -> tuple[int, ...]:
    """Return layers of each kind; with `recomputed` layers of the stage run again, the first so many."""
    if recomputed is None:
        counts = Counter(layers)
        return tuple(counts[b] for b in range(num_blocks))
    recomputing, rest = Counter(layers[:recomputed]), Counter(layers[recomputed:])
    return (*(recomputing[b] for b in range(num_blocks)), *(rest[b] for b in range(num_blocks)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """How layers go to stages: pipeline and chunk degrees, layers a piece, and the schedule that places the pieces.

    Of `recomputed` layers of a stage, the first, forward runs again.
    """

    pp: int
    vpp: int
    sizes: tuple[int, ...]
    recomputed: int | None = None
    schedule: Schedule = "1f1b"


@lru_cache(maxsize=4096)
def runs_of(order: tuple[int, ...], num_blocks: int, partition: Partition) -> tuple[Stages[float], ...]:
    """Return the runs of equal stages of a partition, in pipeline order."""
    p, rules = partition, find_rules(partition.schedule)
    layers_of = stage_layers(order, p.pp, p.vpp, p.sizes, p.schedule)
    stages = [_counts(s, num_blocks, p.recomputed) for s in layers_of]
    last = 0 if rules.folded else p.pp - 1
    # The end of the line of stages is a run of its own: it sends less, head or not.
    keys = [
        (s, stages[p.pp - 1 - i] if rules.mirrored else (), i == 0, i == last, i == p.pp - 1)
        for i, s in enumerate(stages)
    ]
    runs: list[Stages[float]] = []
    at = 0
    for key, group in groupby(keys):
        count = len(list(group))
        layers, mirror, embeds, ends, _ = key
        runs.append(
            Stages(
                count=count,
                position=at,
                layers=layers,
                mirrored=mirror or (0,) * len(layers),
                embeds=int(embeds),
                ends=int(ends),
                mirrored_embeds=int(rules.mirrored and ends),
                mirrored_ends=int(rules.mirrored and embeds),
            )
        )
        at += count
    return tuple(runs)
