"""Cases that come as complete Megatron-LM arguments, beside the file of their measurements."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise import TrainingOptions, from_megatron_args, train
from shardwise.measured import Context, Predicted, Record, cluster_of, refuse


def blas_workspace(environment: Mapping[str, object]) -> float:
    """Return the bytes of a cuBLAS handle's workspace that an environment asks for, 0 where it is silent.

    Source: PyTorch aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: KiB times how many.

    >>> blas_workspace({"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"})
    8519680.0
    """
    pairs = re.findall(r":(\d+):(\d+)", str(environment.get("CUBLAS_WORKSPACE_CONFIG", "")))
    return 1024.0 * sum(int(size) * int(count) for size, count in pairs)


def predict_arguments(record: Record, context: Context, entry: Mapping[str, Any]) -> Predicted:
    """Return the prediction of a case by its arguments; the file states the devices, the arguments all else."""
    count = record.whole("num_gpus") or int(entry.get("nodes") or 0) * int(entry.get("gpus_per_node") or 0)
    if not count:
        raise refuse("num_gpus", None, "is not stated")
    device, notes = context.device(record.text("device"))
    cluster = cluster_of(record, device, notes)
    if cluster.num_devices != count:
        raise refuse("num_gpus", count, "is not stated in the file")
    case = from_megatron_args({**entry["args"], "world_size": count})
    if case.model is None:
        raise refuse("model", None, "is not in the arguments")
    model = replace(case.model, name=record.text("model") or case.model.name)
    scratch = blas_workspace(entry.get("env_vars") or {})
    stack = replace(case.stack, settings=replace(case.stack.settings, blas_workspace_bytes=scratch))
    options = TrainingOptions(stack=stack, accumulation=case.accumulation)
    report = train(model, cluster, case.plan, case.job, options)
    return Predicted(report, (*notes, *case.assumed, *record.assumed))
