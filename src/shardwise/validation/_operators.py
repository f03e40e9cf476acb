"""Rows of measured efficiencies of training operators: products, grouped products and attention."""

from __future__ import annotations

from shardwise.cost import ELEMENT_BYTES, Efficiencies, Rates, product_seconds, rates_of
from shardwise.hardware import Device
from shardwise.validation._attention import blocked
from shardwise.validation._cells import Cells, refuse
from shardwise.validation._places import Places
from shardwise.validation._row import Answer


def efficiency(cells: Cells, places: Places) -> Answer:
    """Return the share of the peak that an operator reaches: its FLOPs over seconds and the peak of the table."""
    device, notes = places.device(cells.text("device"))
    op = cells.text("op")
    dtype = cells.text("dtype") or "bf16"
    if op not in ("matmul", "grouped_matmul", "attention"):
        raise refuse("op", op, "is not an operator that is modelled")
    peak = cells.number("peak_flops") or device.peak_flops(dtype)
    flops, seconds = _attention(cells, device) if op == "attention" else _products(cells, device, dtype)
    return Answer(value=flops / seconds / peak, assumed=(*notes, *cells.assumed), family=f"{op} {cells.text('stage')}")


def _rates(device: Device, dtype: str) -> Rates[float]:
    return rates_of(device, dtype, 0.0, Efficiencies())


def _products(cells: Cells, device: Device, dtype: str) -> tuple[float, float]:
    m, n, k = (cells.positive(word) for word in "mnk")
    rates, stage = _rates(device, dtype), cells.text("stage")
    groups = cells.whole("num_groups")
    if not groups:
        batch = cells.number("batch", 1) or 1
        out = 4 if cells.text("main_grad_dtype") == "fp32" or cells.text("out_dtype") == "fp32" else 2
        width = max(ELEMENT_BYTES[dtype], 2.0)
        moved = batch * (width * (m * k + k * n) + (out + (out if cells.text("accumulate") == "1" else 0)) * m * n)
        return 2 * m * n * k * batch, float(product_seconds(rates, (m, n, k, batch), moved))
    flops = 2 * m * n * k * groups
    slower = {"bwd_input": rates.grouped_gradients[0], "bwd_weight": rates.grouped_gradients[1]}.get(stage, 1.0)
    moved = groups * 2 * (m * k + k * n + m * n)
    return flops, float(max(flops / (rates.grouped_flops * slower), moved / rates.memory_bytes) + rates.grouped_start)


def _attention(cells: Cells, device: Device) -> tuple[float, float]:
    """Return FLOPs counted over the whole square, and seconds of the causal half."""
    B, S, N = cells.number("batch", 1) or 1, cells.positive("seq"), cells.positive("heads")
    dims = cells.positive("qk_head_dim") + cells.positive("v_head_dim")
    dtype = cells.text("dtype") if cells.text("dtype") == "fp32" else "bf16"
    rates, backward = _rates(device, dtype), cells.text("stage") != "fwd"
    dense = 2 * B * N * S * S * dims
    if rates.blocks.keys:
        work = dense * (S + 1) / (2 * S) * (2.5 if backward else 1)
        return dense * (2 if backward else 1), blocked(device, dtype, work, S, backward)
    rate = rates.attention_backward_flops if backward else rates.attention_forward_flops
    work = dense / 2 * (2.5 if backward else 1)
    return dense * (2 if backward else 1), float(work / rate + rates.attention_start)
