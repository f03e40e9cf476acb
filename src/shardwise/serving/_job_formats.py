"""The format of a job's weights, and the types that its GEMMs multiply on a device."""

from __future__ import annotations

from shardwise.cost import family_of
from shardwise.errors import Problems
from shardwise.hardware import Device
from shardwise.models import Model
from shardwise.plans import Serving
from shardwise.serving._engine import Engine
from shardwise.serving._formats import WeightFormat, checkpoint_format, find_format, recipe_of


def formats_of(
    job: Serving, model: Model, engine: Engine, device: Device, problems: Problems, notes: list[str]
) -> tuple[WeightFormat, str, str]:
    """Return the weight format, the type of other GEMMs and the type of the format's GEMMs on a device."""
    form = find_format("bf16")
    with problems.collect():
        form = find_format(job.weights or checkpoint_format(model.quantization).name)
    if job.weights:
        form, why = recipe_of(form, model)
        notes += [f"weights {form.name}: {why}"] * bool(why)
    if not job.weights and model.quantization:
        notes.append(f"weights {form.name}: the checkpoint is quantised ({model.quantization})")
    form = engine.quantisation.with_inputs(form, family_of(device), model.family)
    wide = _wide_type(job, form, engine, device, notes)
    with problems.collect():
        device.peak_flops(wide)
    narrow = job.compute or form.compute or wide
    if narrow in ("bf16", "fp16") and not job.compute:
        narrow = wide
    if job.compute:
        with problems.collect():
            device.peak_flops(narrow)
    elif narrow not in device.matrix_flops:
        notes.append(f"{form.name} weights are widened to {wide} in the GEMM: {device.name} has no rate for {narrow}")
        narrow = wide
    return form, wide, narrow


def _wide_type(job: Serving, form: WeightFormat, engine: Engine, device: Device, notes: list[str]) -> str:
    """Return the type of GEMMs of weights that stay wide."""
    rates = device.matrix_flops
    wide = "fp32" if form.bits == 32 else "fp16" if job.weights in ("fp16", "float16") else "bf16"
    if wide in rates or wide == "fp32":
        return wide
    other = "fp16" if wide == "bf16" else "bf16"
    # llama.cpp multiplies 16-bit and narrower weights on any processor.
    other = "fp32" if engine.operators.splits_with_host and other not in rates and "fp32" in rates else other
    notes.append(f"{other} GEMMs: {device.name} has no rate for {wide}")
    return other
