"""Attention kernels of engines: costs of their parts by head size and window, by non-negative least squares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from calibration.tables import ENGINES, LEAST, Table, errors, held, pick, read, size, summary, where
from calibration.tables import groups as by_label
from shardwise.cost._attention import (
    Cached,
    Prompt,
    decode_parts,
    prompt_parts,
)
from shardwise.hardware import find_device
from shardwise.validation._kernels import KEY, LATENT, ROPE, VALUE, chip_of

Parts = tuple[Any, ...]
_SCALE, _ROUNDS = 0.06, 8


def _width(rows: Table) -> int:
    return 1 if rows["kv_dtype"][0] == "fp8" else 2


def decode(rows: Table, device: str, dtype: str, packs: bool) -> Parts:
    """Return the parts of attention over a cache."""
    B, N, K, H, window = (rows[k] for k in ("batch", "num_heads", "num_kv_heads", "head_dim", "sliding_window"))
    tokens = rows["prefix_tokens"] + rows["query_tokens"]
    tokens = np.where(window > 0, np.minimum(tokens, window), tokens)
    return decode_parts(
        chip_of(find_device(device).device, "bf16"),
        Cached(sequences=B, items=B * K, group=N / K, tokens=tokens, pair_flops=4 * H, item_bytes=2 * _width(rows) * H,
               edge_bytes=4 * B * N * H),
    )  # fmt: skip


def prefill(rows: Table, device: str, dtype: str, packs: bool) -> Parts:
    """Return the parts of attention of a prompt; a kernel has a window in all of its rows or in none."""
    names = ("batch", "query_tokens", "prefix_tokens", "num_heads", "num_kv_heads", "head_dim", "sliding_window")
    B, S, past, N, K, H, window = (rows[k] for k in names)
    work = Prompt(sequences=B, queries=S, past=past, heads=N, kv_heads=K, pair_flops=4 * H,
                  token_bytes=2 * _width(rows) * H, edge_bytes=4 * B * S * N * H,
                  window=window if window.any() else 0.0)  # fmt: skip
    return prompt_parts(chip_of(find_device(device).device, dtype), work, packs)


def latent_decode(rows: Table, device: str, dtype: str, packs: bool) -> Parts:
    """Return the parts of attention over a cache of latents, one item a sequence."""
    B, N, tokens = rows["batch"], rows["num_heads"], rows["prefix_tokens"] + rows["query_tokens"]
    wide = 2 * LATENT + ROPE
    return decode_parts(
        chip_of(find_device(device).device, "bf16"),
        Cached(sequences=B, items=B, group=N, tokens=tokens, pair_flops=2 * wide,
               item_bytes=_width(rows) * (LATENT + ROPE), edge_bytes=2 * B * N * wide),
    )  # fmt: skip


def latent_prefill(rows: Table, device: str, dtype: str, packs: bool) -> Parts:
    """Return the parts of attention of a prompt with expanded keys and values."""
    B, S, past, N = (rows[k] for k in ("batch", "query_tokens", "prefix_tokens", "num_heads"))
    dims = KEY + VALUE
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
    """One kind of attention: its table, the type and compiled kernel of a row, its parts, columns of a shape."""

    word: str
    table: str
    label: Callable[[Table], Any]
    kernel: Callable[[Table], Any]
    parts: Callable[[Table, str, str, bool], Parts]
    shape: tuple[str, ...]
    packing: tuple[bool, ...] = (False,)
    wanted: str = ""


_HEADS = ("num_heads", "num_kv_heads", "head_dim", "sliding_window")
KINDS = (
    Kind(word="decode_kernels", table="attention_decode", label=lambda t: t["kv_dtype"], kernel=_heads, parts=decode,
         shape=_HEADS),
    Kind(word="prefill_kernels", table="attention_prefill", label=_types, kernel=_heads, parts=prefill, shape=_HEADS,
         packing=(False, True)),
    Kind(word="latent_decode_kernels", table="mla", label=lambda t: t["kv_dtype"],
         kernel=lambda t: np.full(size(t), str(LATENT + ROPE)), parts=latent_decode, shape=("num_heads", "batch"),
         wanted="generation_mla"),
    Kind(word="latent_prefill_kernels", table="mla", label=lambda t: t["kv_dtype"],
         kernel=lambda t: np.full(size(t), str(KEY)), parts=latent_prefill, shape=("num_heads", "batch"),
         wanted="context_mla"),
)  # fmt: skip


def positive(matrix: Any, goal: Any) -> Any:
    """Return the non-negative costs of least squares (Lawson and Hanson 1974, chapter 23)."""
    norms = np.sqrt((matrix**2).sum(0)) + 1e-300
    matrix = matrix / norms
    square, right = matrix.T @ matrix, matrix.T @ goal
    found, used = np.zeros(len(right)), np.zeros(len(right), bool)
    for _ in range(4 * len(right)):
        slope = np.where(used, -1.0, right - square @ found)
        if slope.max() < 1e-9:
            break
        used[int(np.argmax(slope))] = True
        while used.any():
            tried = np.zeros(len(right))
            tried[used] = np.linalg.lstsq(square[np.ix_(used, used)], right[used], rcond=None)[0]
            bad = used & (tried <= 0)
            if not bad.any():
                found = tried
                break
            step = np.min(found[bad] / (found[bad] - tried[bad] + 1e-300))
            found = found + step * (tried - found)
            used &= found > 1e-12
            found[~used] = 0.0
    return found / norms


def robust(matrix: Any, seconds: Any) -> Any:
    """Return costs of least squares on relative errors, rows far off counted less, as the loss of the other fits."""
    weight = np.ones(len(seconds))
    for _ in range(_ROUNDS):
        found = positive(matrix * (weight / seconds)[:, None], weight)
        weight = 1 / np.sqrt(1 + ((matrix @ found / seconds - 1) / _SCALE) ** 2)
    return found


@dataclass(frozen=True)
class Group:
    """The rows of one engine and type in a family, with the parts of every row and the kernel that it runs."""

    rows: Table
    matrix: Any
    kernels: Any
    devices: Any

    def cut(self, mask: Any) -> Group:
        """Return the rows of a mask."""
        return Group(where(self.rows, mask), self.matrix[mask], self.kernels[mask], self.devices[mask])


def _group(kind: Kind, parts: dict[str, Table], dtype: str, packs: bool) -> Group:
    rows, matrix = [], []
    for device, table in parts.items():
        names = kind.kernel(table)
        for name in np.unique(names):
            own = where(table, names == name) | {"device": np.full(int((names == name).sum()), device)}
            own["kernel_name"] = np.full(size(own), name)
            rows.append(own)
            matrix.append(np.stack([np.broadcast_to(p, size(own)) for p in kind.parts(own, device, dtype, packs)], 1))
    table = {k: np.concatenate([r[k] for r in rows]) for k in rows[0]}
    return Group(table, np.concatenate(matrix), table["kernel_name"], table["device"])


def fit(group: Group) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the costs of every kernel of a group, and how much slower each device is than the middle of them."""
    names = [
        n for n in np.unique(group.kernels) if (group.kernels == n).sum() >= LEAST
    ]  # else the next head size stands in
    devices = list(np.unique(group.devices))
    scale = dict.fromkeys(devices, 1.0)
    for _ in range(3 if len(devices) > 1 else 1):
        costs = {
            n: robust(_scaled(own := group.cut(group.kernels == n), scale), own.rows["time_seconds"]) for n in names
        }
        if len(devices) == 1:
            break
        for device in devices:
            own = group.cut((group.devices == device) & np.isin(group.kernels, names))
            start = np.array([costs[n][0] for n in own.kernels])
            worked = np.maximum(predicted(own, costs, dict.fromkeys(devices, 1.0)) - start, 1e-9)
            long = worked > start
            scale[device] = float(np.median(((own.rows["time_seconds"] - start) / worked)[long])) if long.any() else 1.0
    return costs, scale if len(devices) > 1 else {}


def _scaled(group: Group, scale: dict[str, float]) -> Any:
    factor = np.array([scale[d] for d in group.devices])
    return np.concatenate([group.matrix[:, :1], group.matrix[:, 1:] * factor[:, None]], 1)


def predicted(group: Group, costs: dict[str, Any], scale: dict[str, float]) -> Any:
    """Return seconds of the rows of a group; a kernel without costs of its own runs the next larger head size."""
    found = np.zeros(size(group.rows))
    for name in np.unique(group.kernels):
        mask = group.kernels == name
        row = costs[stand_in(name, tuple(costs))]
        factor = np.array([scale.get(d, 1.0) for d in group.devices[mask]])
        matrix = group.matrix[mask]
        found[mask] = matrix[:, 0] * row[0] + factor * (matrix[:, 1:] @ np.asarray(row[1:]))
    return found


def stand_in(name: str, names: tuple[str, ...]) -> str:
    """Return the kernel that runs where one was not measured: the next larger head size, else the largest."""
    mark = "w" if name.endswith("w") and any(n.endswith("w") for n in names) else ""
    sizes = sorted(int(n.rstrip("w")) for n in names if n.endswith("w") == bool(mark))
    head = int(name.rstrip("w"))
    return f"{next((n for n in sizes if n >= head), sizes[-1])}{mark}"


def groups(kind: Kind, table: Table) -> Iterator[tuple[str, str, str, dict[str, Table]]]:
    """Yield (family, engine, type, rows by device) of a kind."""
    rows = pick(table, op=kind.wanted) if kind.wanted else table
    return by_label(rows, kind.label(rows))


def _best(kind: Kind, parts: dict[str, Table], dtype: str) -> tuple[bool, Group]:
    """Return whether heads of a group share tiles, by the smaller median error, and the group so seen."""
    found = []
    for packs in kind.packing:
        group = _group(kind, parts, dtype, packs)
        found.append((float(np.median(np.abs(errors(predicted(group, *fit(group)), group.rows)))), packs, group))
    best = min(found, key=lambda one: one[0])
    return best[1], best[2]


def calibrate(folder: Path, only: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the place in the table of constants and the row of every engine and type of some kinds."""
    for kind in KINDS:
        table = read(folder, kind.table) if kind.word in only else {}
        for family, engine, label, parts in groups(kind, table) if table else ():
            packs, group = _best(kind, parts, label.split("-")[0])
            mask = held(group.rows, *kind.shape)
            costs, scale = fit(group)
            left = summary(errors(predicted(group, costs, scale), group.rows))
            unseen = group.cut(mask)
            apart = summary(errors(predicted(unseen, *fit(group.cut(~mask))), unseen.rows)) if mask.any() else "none"
            row = {"packs": int(packs)} if len(kind.packing) > 1 else {}
            yield (
                (family, kind.word, ENGINES[engine], label),
                row
                | {
                    "residual": f"{left}; shapes not fitted: {apart}",
                    "source": f"fit on {kind.table}, {', '.join(parts)}, {engine} (aiconfigurator 0.12.0, Apache-2.0)",
                    "by_device": scale,
                    "costs": {n: [float(x) for x in row] for n, row in costs.items()},
                },
            )


def residuals(folder: Path, constants: dict[str, Any], only: tuple[str, ...]) -> list[tuple[str, str, str, Any]]:
    """Return (device, kind, engine, errors) of stored constants on the tables of a folder."""
    found = []
    for kind in KINDS:
        table = read(folder, kind.table) if kind.word in only else {}
        for family, engine, label, parts in groups(kind, table) if table else ():
            row: Any = constants.get(family, {}).get(kind.word, {}).get(ENGINES[engine], {}).get(label, {})
            for device, rows in parts.items() if row else ():
                group = _group(kind, {device: rows}, label.split("-")[0], bool(row.get("packs", 0)))
                seconds = predicted(group, row["costs"], row.get("by_device", {}))
                name = f"{kind.word.removesuffix('_kernels').replace('_', ' ')} {label}"
                found.append((device, name, engine, errors(seconds, group.rows)))
    return found
