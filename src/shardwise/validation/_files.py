"""Reading files of measurements: what kind a file is, by its columns, and its rows."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardwise.errors import InputError, Problem

# Columns that tell a kind of file; the first kind whose columns are all there counts.
KINDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "inference": frozenset(("metric", "value", "model", "device", "serving_mode")),
        "training": frozenset(("metric", "value", "model", "device", "seq_len")),
        "op_efficiency": frozenset(("op", "device", "dtype", "stage", "achieved_fraction")),
        "attention": frozenset(("device", "query_tokens", "prefix_tokens", "num_kv_heads", "time_seconds")),
        "mla": frozenset(("device", "op", "query_tokens", "prefix_tokens", "time_seconds")),
        "moe": frozenset(("device", "num_tokens", "num_experts", "top_k", "time_seconds")),
        "gemm": frozenset(("device", "m", "n", "k", "time_seconds")),
        "memory": frozenset(("device", "op", "bytes_total", "time_seconds")),
        "collective": frozenset(("device", "op", "num_gpus", "message_bytes", "time_seconds")),
        "collectives": frozenset(("system", "collective", "num_nodes", "message_bytes", "time_seconds")),
    }
)


# Columns beside those, that are read, or that tables of measurements have though predictions do not need them.
_ANY = "case_id source citation quality notes spread"
_KERNEL = f"{_ANY} engine engine_version"
FURTHER: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "inference": frozenset(
            f"{_KERNEL} unit num_gpus tp pp ep dp attention_dp weight_dtype activation_dtype kv_dtype batch "
            "concurrency request_rate input_tokens output_tokens prefix_tokens memory_utilization max_model_len "
            "max_num_batched_tokens num_prefill_workers num_decode_workers".split()
        ),
        "training": frozenset(
            f"{_ANY} unit num_gpus gpus_per_node inter_node micro_batch global_batch tp sp cp cp_kind pp vpp dp ep etp "
            "sharding recompute recompute_detail compute_dtype param_dtype grad_dtype attention_kernel optimizer "
            "master_weights finetune lora_rank offload framework flops_convention memory_kind rank_scope".split()
        ),
        "op_efficiency": frozenset(
            f"{_ANY} batch num_groups m n k seq heads kv_heads qk_head_dim v_head_dim layout accumulate out_dtype "
            "main_grad_dtype qkv_contiguous peak_flops".split()
        ),
        "attention": frozenset(f"{_KERNEL} batch num_heads head_dim sliding_window attention_dtype kv_dtype".split()),
        "mla": frozenset(f"{_KERNEL} batch num_heads mla_dtype kv_dtype gemm_dtype".split()),
        "moe": frozenset(f"{_KERNEL} hidden_size intermediate_size moe_tp moe_ep dtype kernel routing".split()),
        "gemm": frozenset(f"{_KERNEL} dtype".split()),
        "memory": frozenset(f"{_KERNEL} rows width dtype".split()),
        "collective": frozenset(f"{_KERNEL} gpus_per_node dtype variant".split()),
        "collectives": frozenset(f"{_KERNEL} gpus_per_node dtype bus_bandwidth".split()),
    }
)
# Where a row keeps the cells beyond the last column of the header.
BEYOND = "beyond the header"


@dataclass(frozen=True, slots=True)
class Table:
    """A file: its path, the kind of measurements it holds, its rows as text, and columns that its kind does not have.

    An unread column stands with the one that may have been meant, empty where none is like it.
    """

    path: str
    kind: str
    rows: tuple[dict[str, str], ...]
    unread: tuple[tuple[str, str], ...] = ()


def read_table(path: str) -> Table:
    """Return the rows of a CSV file and their kind; names of columns may have capitals and spaces around them.

    Raises `InputError` where the file cannot be read, is of no known kind or has no rows.
    """
    try:
        with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
            lines = (line.replace("\0", "") for line in file)
            reader = csv.DictReader(lines, restkey=BEYOND, restval="")
            names = [name.strip().lower() for name in reader.fieldnames or ()]
            reader.fieldnames = names
            rows = tuple({k: v if isinstance(v, str) else "".join(v) for k, v in row.items()} for row in reader)
    except (OSError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError([Problem("file", path, f"cannot be read ({reason})", "give a CSV file")]) from None
    _check_header(names, path)
    kind = kind_of(set(names), path)
    if not rows:
        rule = f"has the columns of {kind} files and no row below them"
        raise InputError([Problem("file", path, rule, "add a row for each measurement")])
    return Table(path, kind, rows, _unread(names, kind))


def _check_header(names: list[str], path: str) -> None:
    """Raise `InputError` for a header whose cells are not separated by commas, or that names a column twice."""
    separator = next((mark for mark in ";\t|" if len(names) == 1 and mark in names[0]), "")
    if separator:
        raise InputError([Problem("file", path, f"separates its cells by {separator!r}", "separate them by commas")])
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        rule = f"has the column {twice[0]} twice"
        raise InputError([Problem("file", path, rule, "keep the one that is meant")])


def _unread(names: Iterable[str], kind: str) -> tuple[tuple[str, str], ...]:
    """Return the columns that a kind does not have, each with the nearest that it has."""
    known = KINDS[kind] | FURTHER[kind]
    odd = [name for name in names if name and name not in known]
    return tuple((name, next(iter(difflib.get_close_matches(name, sorted(known), 1)), "")) for name in odd)


def kind_of(columns: set[str], path: str = "") -> str:
    """Return the kind of a file by its columns; raises `InputError` naming the columns that the nearest kinds want.

    >>> kind_of({"device", "m", "n", "k", "dtype", "time_seconds"})
    'gemm'
    """
    for kind, wanted in KINDS.items():
        if wanted <= columns:
            return kind
    shares = {kind: len(wanted & columns) / len(wanted) for kind, wanted in KINDS.items()}
    most = max(shares.values())
    near = [f"{kind} files also have {_listed(KINDS[kind] - columns)}" for kind in KINDS if shares[kind] == most]
    found = f"its columns are {_listed(columns)}" if columns else "it is empty"
    rule = f"is not a file of measurements: {'; '.join(near[:2]) if most else found}"
    raise InputError([Problem("file", path, rule, "see docs/accuracy.md for the columns")])


def _listed(columns: Iterable[str]) -> str:
    """Return some columns in words, the first eight of them, each as far as it may be read."""
    names = [ascii(name)[1:-1][:40] for name in sorted(columns)]
    return ", ".join(names[:8]) + (" and more" if len(names) > 8 else "")
