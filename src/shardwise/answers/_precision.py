"""The precision that a question is asked in: presets of bits, types that a device lacks, peaks that no GEMM has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.answers._inputs import Inputs
from shardwise.errors import InputError, nearest
from shardwise.records import replace

if TYPE_CHECKING:
    from shardwise.hardware import Cluster
    from shardwise.plans import Stack, Training


def take_dtype(inputs: Inputs, key: str) -> None:
    """Give a flag the preset of widths that was asked for; unknown ones and two answers are problems."""
    from shardwise.plans import DTYPES

    name = inputs.values.get("dtype")
    if name is None or "dtype" in inputs.bad:
        return
    if name not in DTYPES:
        meant = f"write --{key} {name}, or " if _is_known(key, name) else ""
        inputs.fail("dtype", name, "is not a preset of bits", f"{meant}use {nearest(name, DTYPES)}")
    elif inputs.values.get(key, name) != name:
        inputs.fail("dtype", name, f"gives {key} too", f"give one of dtype and {key}")
    else:
        inputs.values[key] = inputs.values.pop("dtype")


def _is_known(key: str, name: str) -> bool:
    """Return whether a precision of training, or a format of weights, has a name."""
    from shardwise.plans import find_precision
    from shardwise.serving import find_format

    try:
        (find_precision if key == "precision" else find_format)(name)
    except InputError:
        return False
    return True


def check_precision(inputs: Inputs, cluster: Cluster, precision: str) -> None:
    """Record a problem where the device has no rate for the compute type of a precision."""
    from shardwise.plans import find_precision

    dtype = find_precision(precision).compute
    try:
        cluster.device.peak_flops(dtype)
    except InputError as error:
        inputs.merge(error)


def with_precision(inputs: Inputs, cluster: Cluster, stack: Stack, job: Training) -> Training:
    """Return a job with a precision that the device has: fp16 under autocast where it has no bf16 and none is stated.

    So do Unsloth (models/llama.py: dtype None) and most notebooks on devices before Ampere.
    """
    from shardwise.plans import find_precision

    rates, usual = cluster.device.matrix_flops, find_precision(job.precision or stack.precision).compute
    if not job.precision and usual == "bf16" and usual not in rates and "fp16" in rates:
        alike = (job.precision or stack.precision).replace("bf16", "fp16")
        known = [name for name in (alike, "amp-fp16", "fp16", "fp16-grads16") if name in stack.runs.precision]
        inputs.notes.append(f"precision {(*known, 'fp16')[0]}: not given, and {cluster.device.name} has no bf16")
        return replace(job, precision=(*known, "fp16")[0])
    check_precision(inputs, cluster, job.precision or stack.precision)
    _say_idle_peaks(inputs, usual)
    return job


def _say_idle_peaks(inputs: Inputs, compute: str) -> None:
    """Say which peaks were given of types that no GEMM of a run in 16 bits has; `--peak-flops` alone is that of bf16.

    Beside narrower types, and in place of TF32, those of 16 bits count too.
    """
    for key in sorted(key for key in inputs.values if key.split(".")[0] == "peak_flops"):
        if compute in ("bf16", "fp16") and (key.partition(".")[2] or "bf16") != compute:
            inputs.notes.append(f"{key}: no effect, GEMMs run in {compute}")
