"""Attention in one kernel of small tiles, for heads of several sizes (Gemma 4) or sinks: blocks walk their keys.

Source: vLLM's triton_unified_attention.py, as [unified_attention] of engines.toml has it with the cycles of a tile.
"""

from __future__ import annotations

import re
from typing import Any

from shardwise.cost import family_of
from shardwise.hardware import Device
from shardwise.ledger.number import X, above, ceil, maximum, minimum
from shardwise.ledger.op import Op
from shardwise.models import CoreSizes, Model, attention_limits
from shardwise.records import dataclass
from shardwise.serving._case import ServingCase
from shardwise.serving._engine import engine_tables
from shardwise.serving._kernels import core_sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyTiles:
    """Keys that a block takes in turn, `keys` a tile: the seconds of one, and how many blocks a core runs at a time."""

    keys: float
    seconds: float
    resident: float


@dataclass(frozen=True, kw_only=True, slots=True)
class UnifiedKernel:
    """The kernel for one size of heads: a block holds `rows` rows of query heads that share a key-value head.

    `elements` are those of a key and a value of a head, `group` the query heads of a key-value head. Up to
    `segmented_blocks` of one token the whole context is cut into `segments`, whatever a window leaves of them; steps
    that verify a guess have `tokens` of each sequence.
    """

    elements: float
    group: float
    rows: float
    token: KeyTiles
    prompt: KeyTiles
    segments: float
    segmented_blocks: float
    tokens: float


def unified_kernels(case: ServingCase) -> tuple[UnifiedKernel, ...]:
    """Return the kernels that an engine runs for several sizes of heads or sinks, smallest first, none where others."""
    wanted, device = case.efficiencies, case.cluster.device
    row, sizes = engine_tables()["unified_attention"], core_sizes(case.model, True)
    if wanted.ideal or wanted.compute or wanted.memory or not sizes or sizes[-1].kind != "decode":
        return ()
    attention, runs = case.engine.attention, False
    if len(sizes) > 1 and sizes[-1].head > row["widest_head"]:
        runs = bool(re.fullmatch(attention.unified, family_of(device)))
    elif any("sinks" in limits for _, limits in attention_limits(case.model)):
        runs = bool(re.fullmatch(attention.unified_sinks, family_of(device)))
    if not runs:
        return ()
    tokens = case.job.num_speculative_tokens + 1.0
    cut = tokens <= attention.segmented_tokens
    return tuple(
        UnifiedKernel(
            elements=float(size.elements),
            group=size.group,
            rows=float(row["rows"]),
            token=_tiles(row, device, size, float(row["token_keys"][_walk(case.model, size)])),
            prompt=_tiles(row, device, size, float(row["prompt_keys"])),
            segments=float(row["segments"]),
            # So many sequences of the key-value heads that the model has in most layers, whatever a layer has.
            segmented_blocks=cut * float(row["segmented_blocks"]) * sizes[0].group / size.group,
            tokens=tokens,
        )
        for size in sizes
    )


def _walk(model: Model, size: CoreSizes) -> str:
    """Return which tiles tokens take: the kernel tells Gemma 3's windows by their length and heads of 128 or 256."""
    windows = {
        getattr(mixer, "window", 0)
        for block in model.kinds
        for mixer in block.mixers
        if (core := mixer.core(True)) and core.elements == size.elements
    }
    return "window_1024" if windows == {1024} and size.head in (128, 256) else "any"


def _tiles(row: dict[str, Any], device: Device, size: CoreSizes, keys: float) -> KeyTiles:
    """Return tiles of so many keys on a device, whose blocks hold queries, keys and values of 16 bits in its cores."""
    needed = 2 * (keys * size.elements + row["rows"] * size.head)
    resident = next(n for most, n in row["resident"] if size.head <= most)
    cycles = row["tile_cycles"] + row["element_cycles"] * keys * size.head
    fitting = max(_of_chip(row["shared_bytes"], device) // needed, 1)
    return KeyTiles(keys=keys, seconds=cycles / _clock_hertz(row, device), resident=float(min(resident, fitting)))


def _of_chip(table: dict[str, float], device: Device) -> float:
    """Return what a table has for the chip of a device."""
    return next(value for names, value in table.items() if re.fullmatch(names, device.chip))


def _clock_hertz(row: dict[str, Any], device: Device) -> float:
    """Return the clock at which a device reaches the fp32 rate of its datasheet, a usual one where that is not known.

    >>> from shardwise.hardware import find_device
    >>> row = engine_tables()["unified_attention"]
    >>> [round(_clock_hertz(row, find_device(name).device) / 1e9, 2) for name in ("a100-sxm-80gb", "l4", "l40s")]
    [1.41, 2.04, 2.52]
    """
    if not (device.knows("vector_flops") and device.knows("num_cores")):
        return float(row["clock_hertz"])
    return device.vector_flops / (device.num_cores * _of_chip(row["vector_flops_per_cycle"], device))


def with_unified(
    kernels: tuple[UnifiedKernel, ...], chip: tuple[X | float, X], decoding: bool, op: Op[X], seconds: X
) -> X:
    """Return seconds of attention, no fewer than blocks take to walk their keys: all on all cores, or one alone.

    `chip` are the cores of the device and the seconds in which a small kernel starts.
    """
    if not kernels or op.role != "attention":
        return seconds
    walked = [(_token_seconds if decoding else _prompt_seconds)(kernel, chip, op) for kernel in kernels]
    chosen = walked[-1]
    for kernel, one in reversed(list(zip(kernels[:-1], walked[:-1], strict=True))):
        chosen = above(op.inner, kernel.elements, chosen, one)
    return maximum(seconds, chosen)


def _seen(op: Op[X]) -> X:
    """Return the keys that a query sees in the mean."""
    return op.flops / (2 * op.inner * op.rows * op.batch)


def _group(kernel: UnifiedKernel, op: Op[X]) -> X:
    """Return the query heads of a key-value head on the rank."""
    return minimum(kernel.group + 0 * op.rows, op.batch)


def _prompt_seconds(kernel: UnifiedKernel, chip: tuple[X | float, X], op: Op[X]) -> X:
    """Return seconds of a prompt, whose blocks hold some queries each and start within a tile."""
    tiles, (cores, start) = kernel.prompt, chip
    blocks = op.rows * op.batch / maximum(_group(kernel, op), kernel.rows)
    return maximum(blocks / (tiles.resident * cores), 1.0) * (_seen(op) / tiles.keys + 1) * tiles.seconds + start


def _token_seconds(kernel: UnifiedKernel, chip: tuple[X | float, X], op: Op[X]) -> X:
    """Return seconds of one token a sequence, whose blocks are its key-value heads, in segments while they are few."""
    token, prompt, seen, (cores, start) = kernel.token, kernel.prompt, _seen(op), chip
    group = _group(kernel, op)
    blocks = op.rows / kernel.tokens * op.batch / group * ceil(kernel.tokens * group / maximum(group, kernel.rows))
    whole = maximum(blocks / (prompt.resident * cores), 1.0) * seen / prompt.keys * prompt.seconds
    # A segment is a share of the whole context: those that a window leaves none of end at once.
    alone = maximum(minimum(op.context / kernel.segments, seen) / token.keys, 1.0)
    shared = maximum(alone, blocks * seen / token.keys / (token.resident * cores)) * token.seconds
    # A second kernel adds up what segments give.
    return above(blocks, kernel.segmented_blocks, whole + start, shared + 2 * start)
