"""Attention kernels of engines: the parts of every measured row, and the costs that serve the kernels of a family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accuracy.calibration.sharing import Fit, Rows, fitted, losses, own, tied, unseen
from accuracy.calibration.tables import Table, errors, folds, pick, read, size, summary, where
from accuracy.calibration.tables import groups as by_label
from accuracy.kernels.attention import latent_model
from accuracy.kernels.products import datasheet_of
from accuracy.kernels.tables import ENGINES
from accuracy.kernels.ticks import Ticks, ticks_of
from shardwise.cost import (
    DECODE_PARTS,
    PARTS,
    DecodeAttention,
    PrefillAttention,
    decode_parts,
    family_of,
    part_costs,
    prompt_parts,
)
from shardwise.hardware import find_device

_MIXER = latent_model()[1]
_CACHED = _MIXER.kv_lora_rank + _MIXER.qk_rope_head_dim

# Families on which heads without a group have a part of their own: batches of others, which no fit saw, did not gain.
_UNGROUPED = ("ampere", "hopper")

Parts = tuple[Any, ...]


def _width(rows: Table) -> int:
    return 1 if rows["kv_dtype"][0] == "fp8" else 2


def decode(rows: Table, device: str, dtype: str, packs: str) -> Parts:
    """Return the parts of attention over a cache."""
    B, N, K, H, window = (rows[k] for k in ("batch", "num_heads", "num_kv_heads", "head_dim", "sliding_window"))
    tokens = rows["prefix_tokens"] + rows["query_tokens"]
    tokens = np.where(window > 0, np.minimum(tokens, window), tokens)
    found = find_device(device).device
    work = DecodeAttention(sequences=B, items=B * K, group=N / K, tokens=tokens, pair_flops=4 * H,
                  item_bytes=2 * _width(rows) * H, edge_bytes=4 * B * N * H)  # fmt: skip
    parts = dict(zip(DECODE_PARTS, decode_parts(datasheet_of(found, "bf16"), work), strict=True))
    if family_of(found) not in _UNGROUPED:
        parts["ungrouped"] = 0 * parts["ungrouped"]
    return tuple(parts.values())


def prefill(rows: Table, device: str, dtype: str, packs: str) -> Parts:
    """Return the parts of attention of a prompt; a kernel has a window in all of its rows or in none."""
    names = ("batch", "query_tokens", "prefix_tokens", "num_heads", "num_kv_heads", "head_dim", "sliding_window")
    B, S, past, N, K, H, window = (rows[k] for k in names)
    work = PrefillAttention(sequences=B, queries=S, past=past, heads=N, kv_heads=K, pair_flops=4 * H,
                  token_bytes=2 * _width(rows) * H, edge_bytes=4 * B * S * N * H,
                  window=window if window.any() else 0.0)  # fmt: skip
    return prompt_parts(datasheet_of(find_device(device).device, dtype), work, packs)


def latent_decode(rows: Table, device: str, dtype: str, packs: str) -> Parts:
    """Return the parts of attention over a cache of latents, one item a sequence."""
    B, N, tokens = rows["batch"], rows["num_heads"], rows["prefix_tokens"] + rows["query_tokens"]
    wide = 2 * _MIXER.kv_lora_rank + _MIXER.qk_rope_head_dim
    return decode_parts(
        datasheet_of(find_device(device).device, "bf16"),
        DecodeAttention(sequences=B, items=B, group=N, tokens=tokens, pair_flops=2 * wide,
               item_bytes=_width(rows) * _CACHED, edge_bytes=2 * B * N * wide),
    )  # fmt: skip


def latent_prefill(rows: Table, device: str, dtype: str, packs: str) -> Parts:
    """Return the parts of attention of a prompt with expanded keys and values."""
    B, S, past, N = (rows[k] for k in ("batch", "query_tokens", "prefix_tokens", "num_heads"))
    dims = _MIXER.qk_head_dim + _MIXER.v_head_dim
    work = PrefillAttention(sequences=B, queries=S, past=past, heads=N, kv_heads=N, pair_flops=2 * dims,
                  token_bytes=2 * dims, edge_bytes=2 * N * B * S * dims)  # fmt: skip
    return prompt_parts(datasheet_of(find_device(device).device, "bf16"), work, packs)


def _types(rows: Table) -> Any:
    pairs = zip(rows["attention_dtype"], rows["kv_dtype"], strict=True)
    return np.array([a if a == k else f"{a}-{k}" for a, k in pairs])


def _heads(rows: Table) -> Any:
    pairs = zip(rows["head_dim"], rows["sliding_window"], strict=True)
    return np.array([f"{int(head)}{'w' if window else ''}" for head, window in pairs])


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of attention: its table, the type and compiled kernel of a row, its parts, columns of a shape.

    A constant takes `gain` off the mean loss of the kernels of a family.
    """

    word: str
    table: str
    label: Callable[[Table], Any]
    kernel: Callable[[Table], Any]
    parts: Callable[[Table, str, str, str], Parts]
    shape: tuple[str, ...]
    packing: tuple[str, ...] = ("none",)
    gain: float = 0.01
    wanted: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The parts of a kernel of the kind."""
        return PARTS[self.word.removesuffix("_kernels")]


_HEADS = ("num_heads", "num_kv_heads", "head_dim", "sliding_window")
KINDS = (
    Kind(word="decode_kernels", table="attention_decode", label=lambda t: t["kv_dtype"], kernel=_heads, parts=decode,
         shape=_HEADS),
    Kind(word="prefill_kernels", table="attention_prefill", label=_types, kernel=_heads, parts=prefill, shape=_HEADS,
         packing=("none", "one", "all")),
    Kind(word="latent_decode_kernels", table="mla", label=lambda t: t["kv_dtype"],
         kernel=lambda t: np.full(size(t), str(_CACHED)), parts=latent_decode, shape=("num_heads", "batch"),
         wanted="generation_mla"),
    Kind(word="latent_prefill_kernels", table="mla", label=lambda t: t["kv_dtype"],
         kernel=lambda t: np.full(size(t), str(_MIXER.qk_head_dim)), parts=latent_prefill, shape=("num_heads", "batch"),
         wanted="context_mla"),
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """The rows of one engine and type in a family as the table has them, and the parts and the head of each."""

    engine: str
    label: str
    packs: str
    table: Table
    matrix: Any
    ticks: Ticks

    @property
    def heads(self) -> list[str]:
        """The heads that were measured, each a kernel."""
        return [str(name) for name in np.unique(self.table["head"])]


def _group(kind: Kind, engine: str, label: str, devices: dict[str, Table], packs: str) -> Group:
    tables, matrix = [], []
    for device, table in devices.items():
        names = kind.kernel(table)
        for name in np.unique(names):
            rows = where(table, names == name)
            tables.append(rows | {"device": np.full(size(rows), device), "head": np.full(size(rows), name)})
            parts = kind.parts(rows, device, label.split("-")[0], packs)
            matrix.append(np.stack([np.broadcast_to(p, size(rows)) for p in parts], 1))
    table = {k: np.concatenate([r[k] for r in tables]) for k in tables[0]}
    ticks = ticks_of(kind.table.partition("_")[0], engine, find_device(next(iter(devices))).device)
    return Group(engine, label, packs, table, np.concatenate(matrix), ticks)


def _rows(kind: Kind, groups: list[Group]) -> Rows:
    """Return the rows of groups as the fit needs them, kernels numbered in the order of groups and heads."""
    kernels, count = [], 0
    for group in groups:
        kernels.append(count + np.searchsorted(group.heads, group.table["head"]))
        count += len(group.heads)
    table = {k: np.concatenate([g.table[k] for g in groups]) for k in ("time_seconds", "device", *kind.shape)}
    cells = [g.ticks.kernel(g.table["time_seconds"]) for g in groups]
    low, high = (np.concatenate(ends) for ends in zip(*cells, strict=True))
    return Rows(
        matrix=np.concatenate([g.matrix for g in groups]),
        seconds=(low + high) / 2,
        low=low,
        high=high,
        kernels=np.concatenate(kernels),
        devices=table["device"],
        folds=folds(table, *kind.shape),
    )


def _best(kind: Kind, engine: str, label: str, devices: dict[str, Table]) -> Group:
    """Return the rows of an engine and type as its heads share tiles of queries: by shapes left out."""
    found = [_group(kind, engine, label, devices, packs) for packs in kind.packing]
    if len(found) == 1:
        return found[0]

    def loss(group: Group) -> float:
        rows = _rows(kind, [group])
        return float(losses(group.ticks.stated(unseen(rows, own(rows))), group.table["time_seconds"]).mean())

    return min(found, key=loss)


def measured(kind: Kind, table: Table) -> dict[str, list[tuple[str, str, dict[str, Table]]]]:
    """Return (engine, type, rows by device) of a kind by family."""
    rows = pick(table, op=kind.wanted) if kind.wanted else table
    found: dict[str, list[tuple[str, str, dict[str, Table]]]] = {}
    for family, engine, label, devices in by_label(rows, kind.label(rows)):
        found.setdefault(family, []).append((engine, label, devices))
    return found


def _named(kind: Kind, ties: Any, fit: Fit) -> tuple[dict[str, list[float]], list[dict[str, int]]]:
    """Return the costs of every part, and which of them each kernel takes."""
    costs: dict[str, list[float]] = {}
    taken: list[dict[str, int]] = [{} for _ in ties]
    for j, part in enumerate(kind.names):
        values = sorted({float(c) for c in fit.costs[:, j] if c})
        costs |= {part: values} if values else {}
        for kernel, cost in zip(taken, fit.costs[:, j], strict=True):
            kernel |= {part: values.index(float(cost))} if cost else {}
    return costs, taken


def _entries(kind: Kind, groups: list[Group]) -> dict[str, Any]:
    """Return the table of constants of a family: by engine and type what each head takes, and the costs."""
    rows = _rows(kind, groups)
    ties = tied(rows, kind.gain)
    fit = fitted(rows, ties)
    costs, taken = _named(kind, ties, fit)
    first, apart = fit.predicted(rows), unseen(rows, ties)
    found: dict[str, Any] = {}
    start = kernel = 0
    for group in groups:
        own_rows = slice(start, start + size(group.table))
        left, out = (summary(errors(group.ticks.stated(p[own_rows]), group.table)) for p in (first, apart))
        devices = ", ".join(dict.fromkeys(str(d) for d in group.table["device"]))
        heads = dict(zip(group.heads, taken[kernel:], strict=False))
        found.setdefault(ENGINES[group.engine], {})[group.label] = {
            **({"packs": group.packs} if len(kind.packing) > 1 else {}),
            "residual": f"{left}; shapes not fitted, in four folds: {out}",
            "source": f"fit on {kind.table}, {devices}, {group.engine} (aiconfigurator 0.12.0, Apache-2.0)",
            "heads": heads,
        }
        start, kernel = own_rows.stop, kernel + len(heads)
    return found | {"by_device": fit.scale, "costs": costs}


def calibrate(folder: Path, only: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the place in the table of constants of some kinds in every family, and what stands there."""
    for kind in KINDS:
        table = read(folder, kind.table) if kind.word in only else {}
        for family, found in (measured(kind, table) if table else {}).items():
            yield (family, kind.word), _entries(kind, [_best(kind, *one) for one in found])


def _stored(kind: Kind, row: dict[str, Any], group: Group, table: dict[str, Any]) -> Any:
    """Return seconds of rows by stored costs."""
    name = kind.word.removesuffix("_kernels")
    costs = {head: part_costs(name, table["costs"], row["heads"][head]) for head in group.heads}
    scale = np.array([table.get("by_device", {}).get(d, 1.0) for d in group.table["device"]])
    parts = group.matrix * np.array([costs[head] for head in group.table["head"]])
    return group.ticks.stated(parts[:, 0] + scale * parts[:, 1:].sum(1))


def residuals(folder: Path, constants: dict[str, Any], only: tuple[str, ...]) -> list[tuple[str, str, str, Any]]:
    """Return (device, kind, engine, errors) of stored constants on the tables of a folder."""
    found = []
    for kind in KINDS:
        read_rows = read(folder, kind.table) if kind.word in only else {}
        for family, ones in (measured(kind, read_rows) if read_rows else {}).items():
            table: dict[str, Any] = constants.get(family, {}).get(kind.word, {})
            for engine, label, devices in ones:
                row = table.get(ENGINES[engine], {}).get(label, {})
                for device, rows in devices.items() if row else ():
                    group = _group(kind, engine, label, {device: rows}, row.get("packs", "none"))
                    name = f"{kind.word.removesuffix('_kernels').replace('_', ' ')} {label}"
                    found.append((device, name, engine, errors(_stored(kind, row, group, table), group.table)))
    return found
