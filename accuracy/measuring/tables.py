"""The files that measurements go to: the columns of docs/own-runs.md and accuracy/notes/calibration.md."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ATTENTION = (
    *("device", "engine", "engine_version", "attention_dtype", "kv_dtype", "batch", "query_tokens", "prefix_tokens"),
    *("num_heads", "num_kv_heads", "head_dim", "sliding_window", "time_seconds", "spread", "citation"),
)
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "training": (
        *(
            "case_id",
            "metric",
            "value",
            "unit",
            "model",
            "device",
            "num_gpus",
            "gpus_per_node",
            "inter_node",
            "seq_len",
        ),
        *("micro_batch", "global_batch", "tp", "sp", "cp", "cp_kind", "pp", "vpp", "dp", "ep", "etp", "sharding"),
        *("recompute", "recompute_detail", "compute_dtype", "param_dtype", "grad_dtype", "attention_kernel"),
        *("optimizer", "master_weights", "finetune", "lora_rank", "offload", "framework", "flops_convention"),
        *("memory_kind", "rank_scope", "quality", "source", "citation", "notes"),
    ),
    "inference": (
        *("case_id", "metric", "value", "unit", "model", "device", "num_gpus", "tp", "pp", "ep", "dp", "attention_dp"),
        *("engine", "engine_version", "serving_mode", "weight_dtype", "activation_dtype", "kv_dtype", "batch"),
        *("concurrency", "request_rate", "input_tokens", "output_tokens", "prefix_tokens", "memory_utilization"),
        *("max_model_len", "max_num_batched_tokens", "num_prefill_workers", "num_decode_workers", "quality", "source"),
        *("citation", "notes"),
    ),
    "kernels_gemm": (
        "device",
        "engine",
        "engine_version",
        "dtype",
        "m",
        "n",
        "k",
        "time_seconds",
        "spread",
        "citation",
    ),
    "kernels_memory": (
        *("device", "engine", "engine_version", "op", "dtype", "rows", "width", "bytes_total", "time_seconds"),
        *("spread", "citation"),
    ),
    "kernels_attention_prefill": _ATTENTION,
    "kernels_attention_decode": _ATTENTION,
    "kernels_moe": (
        *("device", "engine", "engine_version", "dtype", "kernel", "num_tokens", "hidden_size", "intermediate_size"),
        *("top_k", "num_experts", "moe_tp", "moe_ep", "routing", "time_seconds", "spread", "citation"),
    ),
    "op_efficiency": (
        *("op", "device", "dtype", "stage", "batch", "num_groups", "m", "n", "k", "seq", "heads", "kv_heads"),
        *("qk_head_dim", "v_head_dim", "layout", "accumulate", "out_dtype", "main_grad_dtype", "peak_flops"),
        *("achieved_fraction", "time_seconds", "spread", "source"),
    ),
}


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@dataclass(slots=True)
class Tables:
    """Rows by file, and the configurations of the models that they name."""

    rows: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)

    def add(self, table: str, **values: object) -> None:
        """Add a row; a column that the table does not have is an error of the caller."""
        unknown = values.keys() - set(COLUMNS[table])
        if unknown:
            raise ValueError(f"{table} has no columns {sorted(unknown)}")
        self.rows.setdefault(table, []).append({name: _text(value) for name, value in values.items()})

    def write(self, folder: Path) -> list[str]:
        """Write a file for every table that has rows and the models beside them; files of other tables stay."""
        folder.mkdir(parents=True, exist_ok=True)
        for table, rows in self.rows.items():
            with (folder / f"{table}_own.csv").open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS[table], restval="", lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
        if self.models:
            place = folder / "models_own.json"
            known = json.loads(place.read_text(encoding="utf-8")) if place.exists() else {}
            place.write_text(json.dumps(known | self.models, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return [f"{table}_own.csv: {len(rows)} rows" for table, rows in self.rows.items()]
