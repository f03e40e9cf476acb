"""Rows of measured efficiencies of training operators: GEMMs, grouped GEMMs and attention."""

from __future__ import annotations

from accuracy.kernels.attention import blocked
from shardwise.cost import ELEMENT_BYTES, Efficiencies, Rates, gemm_seconds, kernel_seconds, rates_of
from shardwise.hardware import Device
from shardwise.ledger.op import Op
from shardwise.measured import Context, Prediction, Record, refuse


def efficiency(record: Record, context: Context) -> Prediction:
    """Return the share of the peak that an operator reaches: its FLOPs over seconds and the peak of the table."""
    device, notes = context.device(record.text("device"))
    op = record.text("op")
    dtype = record.text("dtype") or "bf16"
    if op not in ("matmul", "grouped_matmul", "attention"):
        raise refuse("op", op, "is not an operator that is modelled")
    peak = record.number("peak_flops") or device.peak_flops(dtype)
    flops, seconds = _attention(record, device) if op == "attention" else _products(record, device, dtype)
    return Prediction(
        value=flops / seconds / peak, assumed=(*notes, *record.assumed), family=f"{op} {record.text('stage')}"
    )


def _rates(device: Device, dtype: str) -> Rates[float]:
    return rates_of(device, dtype, 0.0, Efficiencies())


def _products(record: Record, device: Device, dtype: str) -> tuple[float, float]:
    m, n, k = (record.positive(word) for word in "mnk")
    rates, stage = _rates(device, dtype), record.text("stage")
    groups = record.whole("num_groups")
    if not groups:
        batch = record.number("batch", 1) or 1
        out = 4 if record.text("main_grad_dtype") == "fp32" or record.text("out_dtype") == "fp32" else 2
        width = max(ELEMENT_BYTES[dtype], 2.0)
        moved = batch * (width * (m * k + k * n) + (out + (out if record.text("accumulate") == "1" else 0)) * m * n)
        return 2 * m * n * k * batch, float(gemm_seconds(rates, (m, n, k, batch), moved))
    passes = {"bwd_input": "input", "bwd_weight": "weight"}
    edges, gradient = 2 * groups * m * (n + k), 4 if record.text("main_grad_dtype") == "fp32" else 2
    flops, moved = 2 * m * n * k * groups, edges + 2 * groups * n * k
    op = Op(name="experts", kind="grouped", region="experts", flops=flops, forward_bytes=moved, backward_flops=flops,
            backward_bytes=moved, weight_flops=flops, weight_bytes=edges + 2 * gradient * groups * n * k, rows=m,
            columns=n, inner=k, batch=groups, dtype=dtype)  # fmt: skip
    return flops, float(kernel_seconds(rates, op, passes.get(stage, "forward")))


def _attention(record: Record, device: Device) -> tuple[float, float]:
    """Return FLOPs counted over the whole square, and seconds of the causal half."""
    B, S, N = record.number("batch", 1) or 1, record.positive("seq"), record.positive("heads")
    dims = record.positive("qk_head_dim") + record.positive("v_head_dim")
    dtype = record.text("dtype") if record.text("dtype") == "fp32" else "bf16"
    rates, backward = _rates(device, dtype), record.text("stage") != "fwd"
    dense = 2 * B * N * S * S * dims
    if rates.attention_blocks.keys:
        work = dense * (S + 1) / (2 * S) * (2.5 if backward else 1)
        return dense * (2 if backward else 1), blocked(device, dtype, work, (S, (S + 1) / 2), backward)
    rate = rates.attention_backward_flops if backward else rates.attention_forward_flops
    work = dense / 2 * (2.5 if backward else 1)
    return dense * (2 if backward else 1), float(work / rate + rates.attention_start)
