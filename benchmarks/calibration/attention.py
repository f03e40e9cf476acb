"""Attention kernels of engines: the parts of every measured row, and the rows of costs that serve them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibration.sharing import Rows, Shared, fitted, kept_parts, sharing, unseen
from calibration.tables import ENGINES, Table, errors, folds, pick, read, size, summary, where
from calibration.tables import groups as by_label
from shardwise.cost._attention import (
    Cached,
    Prompt,
    decode_parts,
    prompt_parts,
    runs_as,
)
from shardwise.hardware import find_device
from shardwise.validation._attention import latent_model
from shardwise.validation._kernels import chip_of

_MIXER = latent_model()[1]
_CACHED = _MIXER.kv_lora_rank + _MIXER.qk_rope_head_dim

Parts = tuple[Any, ...]


def _width(rows: Table) -> int:
    return 1 if rows["kv_dtype"][0] == "fp8" else 2


def decode(rows: Table, device: str, dtype: str, packs: str) -> Parts:
    """Return the parts of attention over a cache."""
    B, N, K, H, window = (rows[k] for k in ("batch", "num_heads", "num_kv_heads", "head_dim", "sliding_window"))
    tokens = rows["prefix_tokens"] + rows["query_tokens"]
    tokens = np.where(window > 0, np.minimum(tokens, window), tokens)
    return decode_parts(
        chip_of(find_device(device).device, "bf16"),
        Cached(sequences=B, items=B * K, group=N / K, tokens=tokens, pair_flops=4 * H, item_bytes=2 * _width(rows) * H,
               edge_bytes=4 * B * N * H),
    )  # fmt: skip


def prefill(rows: Table, device: str, dtype: str, packs: str) -> Parts:
    """Return the parts of attention of a prompt; a kernel has a window in all of its rows or in none."""
    names = ("batch", "query_tokens", "prefix_tokens", "num_heads", "num_kv_heads", "head_dim", "sliding_window")
    B, S, past, N, K, H, window = (rows[k] for k in names)
    work = Prompt(sequences=B, queries=S, past=past, heads=N, kv_heads=K, pair_flops=4 * H,
                  token_bytes=2 * _width(rows) * H, edge_bytes=4 * B * S * N * H,
                  window=window if window.any() else 0.0)  # fmt: skip
    return prompt_parts(chip_of(find_device(device).device, dtype), work, packs)


def latent_decode(rows: Table, device: str, dtype: str, packs: str) -> Parts:
    """Return the parts of attention over a cache of latents, one item a sequence."""
    B, N, tokens = rows["batch"], rows["num_heads"], rows["prefix_tokens"] + rows["query_tokens"]
    wide = 2 * _MIXER.kv_lora_rank + _MIXER.qk_rope_head_dim
    return decode_parts(
        chip_of(find_device(device).device, "bf16"),
        Cached(sequences=B, items=B, group=N, tokens=tokens, pair_flops=2 * wide,
               item_bytes=_width(rows) * _CACHED, edge_bytes=2 * B * N * wide),
    )  # fmt: skip


def latent_prefill(rows: Table, device: str, dtype: str, packs: str) -> Parts:
    """Return the parts of attention of a prompt with expanded keys and values."""
    B, S, past, N = (rows[k] for k in ("batch", "query_tokens", "prefix_tokens", "num_heads"))
    dims = _MIXER.qk_head_dim + _MIXER.v_head_dim
    work = Prompt(sequences=B, queries=S, past=past, heads=N, kv_heads=N, pair_flops=2 * dims, token_bytes=2 * dims,
                  edge_bytes=2 * N * B * S * dims)  # fmt: skip
    return prompt_parts(chip_of(find_device(device).device, "bf16"), work, packs)


def _types(rows: Table) -> Any:
    pairs = zip(rows["attention_dtype"], rows["kv_dtype"], strict=True)
    return np.array([a if a == k else f"{a}-{k}" for a, k in pairs])


def _heads(rows: Table) -> Any:
    pairs = zip(rows["head_dim"], rows["sliding_window"], strict=True)
    return np.array([f"{int(head)}{'w' if window else ''}" for head, window in pairs])


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of attention: its table, the type and compiled kernel of a row, its parts, columns of a shape.

    `gains` are what a row of costs more, of `most`, and a part more must take off the mean loss of a group.
    """

    word: str
    table: str
    label: Callable[[Table], Any]
    kernel: Callable[[Table], Any]
    parts: Callable[[Table, str, str, str], Parts]
    shape: tuple[str, ...]
    packing: tuple[str, ...] = ("none",)
    gains: tuple[float, float] = (0.04, 0.005)
    most: int = 3
    wanted: str = ""


_HEADS = ("num_heads", "num_kv_heads", "head_dim", "sliding_window")
KINDS = (
    Kind(word="decode_kernels", table="attention_decode", label=lambda t: t["kv_dtype"], kernel=_heads, parts=decode,
         shape=_HEADS, gains=(0.02, 0.01), most=4),
    Kind(word="prefill_kernels", table="attention_prefill", label=_types, kernel=_heads, parts=prefill, shape=_HEADS,
         packing=("none", "one", "all"), gains=(0.08, 0.018)),
    Kind(word="latent_decode_kernels", table="mla", label=lambda t: t["kv_dtype"],
         kernel=lambda t: np.full(size(t), str(_CACHED)), parts=latent_decode, shape=("num_heads", "batch"),
         wanted="generation_mla"),
    Kind(word="latent_prefill_kernels", table="mla", label=lambda t: t["kv_dtype"],
         kernel=lambda t: np.full(size(t), str(_MIXER.qk_head_dim)), parts=latent_prefill, shape=("num_heads", "batch"),
         wanted="context_mla"),
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """The rows of one engine and type in a family as the table has them, and as the fit needs them."""

    table: Table
    rows: Rows


def _group(kind: Kind, parts: dict[str, Table], dtype: str, packs: str) -> Group:
    tables, matrix = [], []
    for device, table in parts.items():
        names = kind.kernel(table)
        for name in np.unique(names):
            own = where(table, names == name) | {"device": np.full(int((names == name).sum()), device)}
            own["kernel_name"] = np.full(size(own), name)
            tables.append(own)
            matrix.append(np.stack([np.broadcast_to(p, size(own)) for p in kind.parts(own, device, dtype, packs)], 1))
    table = {k: np.concatenate([r[k] for r in tables]) for k in tables[0]}
    rows = Rows(np.concatenate(matrix), table["time_seconds"], table["kernel_name"], table["device"],
                folds(table, *kind.shape))  # fmt: skip
    return Group(table, rows)


def groups(kind: Kind, table: Table) -> Iterator[tuple[str, str, str, dict[str, Table]]]:
    """Yield (family, engine, type, rows by device) of a kind."""
    rows = pick(table, op=kind.wanted) if kind.wanted else table
    return by_label(rows, kind.label(rows))


def _best(kind: Kind, parts: dict[str, Table], dtype: str) -> tuple[str, Group, Shared]:
    """Return how heads share tiles, the group so seen, and which kernels share costs, by shapes left out."""
    found = []
    for packs in kind.packing:
        group = _group(kind, parts, dtype, packs)
        found.append((*sharing(group.rows, kind.gains[0], kind.most), packs, group))
    _, shared, packs, group = min(found, key=lambda one: one[0])
    return packs, group, shared


def calibrate(folder: Path, only: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the place in the table of constants and the row of every engine and type of some kinds."""
    for kind in KINDS:
        table = read(folder, kind.table) if kind.word in only else {}
        for family, engine, label, parts in groups(kind, table) if table else ():
            packs, group, shared = _best(kind, parts, label.split("-")[0])
            kept = kept_parts(group.rows, shared, kind.gains[1])
            fit = fitted(group.rows, shared, kept)
            left = summary(errors(fit.predicted(group.rows), group.table))
            apart = summary(errors(unseen(group.rows, shared, kept), group.table))
            costs, same = fit.named()
            row = {"packs": packs} if len(kind.packing) > 1 else {}
            yield (
                (family, kind.word, ENGINES[engine], label),
                row
                | {
                    "residual": f"{left}; shapes not fitted, in four folds: {apart}",
                    "source": f"fit on {kind.table}, {', '.join(parts)}, {engine} (aiconfigurator 0.12.0, Apache-2.0)",
                    "by_device": fit.scale,
                    "costs": costs,
                    "same": same,
                },
            )


def _stored(row: dict[str, Any], group: Group) -> Any:
    """Return seconds of rows by stored costs."""
    costs, same = row["costs"], row.get("same", {})
    names = {n: runs_as(float(n.rstrip("w")), n.endswith("w"), costs, same) for n in np.unique(group.rows.kernels)}
    rows = group.rows.scaled(row.get("by_device", {}))
    return np.einsum("ij,ij->i", rows.matrix, np.array([costs[names[n]] for n in rows.kernels]))


def residuals(folder: Path, constants: dict[str, Any], only: tuple[str, ...]) -> list[tuple[str, str, str, Any]]:
    """Return (device, kind, engine, errors) of stored constants on the tables of a folder."""
    found = []
    for kind in KINDS:
        table = read(folder, kind.table) if kind.word in only else {}
        for family, engine, label, parts in groups(kind, table) if table else ():
            row: Any = constants.get(family, {}).get(kind.word, {}).get(ENGINES[engine], {}).get(label, {})
            for device, rows in parts.items() if row else ():
                group = _group(kind, {device: rows}, label.split("-")[0], row.get("packs", "none"))
                name = f"{kind.word.removesuffix('_kernels').replace('_', ' ')} {label}"
                found.append((device, name, engine, errors(_stored(row, group), group.table)))
    return found
