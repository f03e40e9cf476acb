"""Rows of tables of attention: over a cache, of a prompt, and of latent attention, by the measured kernels."""

from __future__ import annotations

from functools import cache
from typing import Any

from accuracy.kernels.products import datasheet_of, engine_in, measured_family, type_in
from accuracy.kernels.types import cache_width
from shardwise.cost import (
    DecodeAttention,
    Efficiencies,
    PrefillAttention,
    blocked_flops,
    constants,
    costed_seconds,
    decode_parts,
    family_of,
    kernel_costs,
    one_query_seconds,
    prompt_parts,
    rates_of,
    seen_pairs,
)
from shardwise.hardware import Device
from shardwise.measured import Record, refuse
from shardwise.models import LatentAttention, Model

_NONE = Efficiencies()


@cache
def latent_model() -> tuple[int, LatentAttention]:
    """Return the hidden size and the attention of DeepSeek-V3, whose sizes tables of latent attention are taken with.

    >>> latent_model()[1].kv_lora_rank
    512
    """
    model = Model.load("deepseek-v3")
    (mixer,) = model.layers[0].mixers
    if not isinstance(mixer, LatentAttention):
        raise TypeError("deepseek-v3 has latent attention")
    return model.hidden, mixer


def _kernel(record: Record, device: Device, kind: str, label: str, head: float, windowed: bool = False) -> Any:
    """Return the costs of an engine's attention kernel; what stands in for one that was not measured is said."""
    family = measured_family(record, device, f"{kind}_kernels")
    table = constants().families[family].attention_table(kind)
    engines = table.engines if table else {}
    engine = engine_in(record, engines)
    found = kernel_costs(device, kind, (engine, type_in(record, engines[engine], label)), head, windowed, family)
    if found is None:
        raise refuse("head_dim", head, "has no measured kernel")
    return found


def decode(record: Record, device: Device) -> float:
    """Return seconds of attention of new tokens over a cache."""
    B, N, K, H = (record.positive(name) for name in ("batch", "num_heads", "num_kv_heads", "head_dim"))
    window, width = record.number("sliding_window"), cache_width(record)
    tokens = record.number("prefix_tokens") + record.number("query_tokens")
    tokens = max(1.0, min(tokens, window) if window else tokens)
    if constants().families[family_of(device)].attention.cached_compute:
        dtype = record.text("kv_dtype") or "bf16"
        b, peaks = (
            rates_of(device, dtype, 0.0, _NONE).attention_blocks,
            (device.peak_flops(dtype), device.memory_bytes_per_second),
        )
        cache = 2 * width * B * K * H * tokens
        return float(one_query_seconds(b, 4 * B * N * H * tokens, cache, peaks))
    kernel = _kernel(record, device, "decode", record.text("kv_dtype") or "bf16", H, bool(window))
    work = DecodeAttention(
        sequences=B,
        items=B * K,
        group=N / K,
        tokens=tokens,
        pair_flops=4 * H,
        item_bytes=2 * width * H,
        edge_bytes=4 * B * N * H,
    )
    return float(costed_seconds(kernel, decode_parts(datasheet_of(device, "bf16"), work)))


def prefill(record: Record, device: Device) -> float:
    """Return seconds of causal attention of new tokens behind a cached prefix."""
    names = ("batch", "query_tokens", "num_heads", "num_kv_heads", "head_dim")
    B, S, N, K, H = (record.positive(name) for name in names)
    past, window = record.number("prefix_tokens"), record.number("sliding_window")
    if constants().families[family_of(device)].attention.cached_compute:
        pairs = seen_pairs(S + past, window) - seen_pairs(past, window)
        seen = (S + past, pairs / S)
        return blocked(device, record.text("attention_dtype") or "bf16", 4 * N * H * B * pairs, seen)
    dtype, cache = record.text("attention_dtype") or "bf16", record.text("kv_dtype") or "bf16"
    kernel = _kernel(record, device, "prefill", dtype if dtype == cache else f"{dtype}-{cache}", H, bool(window))
    work = PrefillAttention(
        sequences=B,
        queries=S,
        past=past,
        heads=N,
        kv_heads=K,
        pair_flops=4 * H,
        token_bytes=2 * cache_width(record) * H,
        edge_bytes=4 * B * S * N * H,
        window=window,
    )
    chip = datasheet_of(device, dtype if dtype in device.matrix_flops else "bf16")
    return float(costed_seconds(kernel, prompt_parts(chip, work, kernel.packs)))


def blocked(device: Device, dtype: str, flops: float, seen: tuple[float, float], backward: bool = False) -> float:
    """Return seconds of attention on a device that runs it in blocks of queries and keys."""
    r = rates_of(device, dtype, 0.0, _NONE)
    rate = r.attention_backward_flops if backward else r.attention_forward_flops
    return float(blocked_flops(r.attention_blocks, flops, seen, backward) / rate + r.attention_start)


def attention(record: Record, device: Device) -> float:
    """Return seconds of attention: one new token is decoded, more are a prompt."""
    return (
        decode(record, device)
        if record.whole("query_tokens") == 1 and record.number("prefix_tokens")
        else prefill(record, device)
    )


def latent(record: Record, device: Device) -> float:
    """Return seconds of latent attention with the sizes of DeepSeek-V3: over a cache, or of a prompt."""
    op, (_, a) = record.text("op"), latent_model()
    B, N = record.positive("batch"), record.positive("num_heads")
    S, past = record.positive("query_tokens"), record.number("prefix_tokens")
    label, chip = record.text("kv_dtype") or "bf16", datasheet_of(device, "bf16")
    if op == "generation_mla":
        wide, width = 2 * a.kv_lora_rank + a.qk_rope_head_dim, cache_width(record)
        cached_dims = a.kv_lora_rank + a.qk_rope_head_dim
        cached = DecodeAttention(
            sequences=B,
            items=B,
            group=N,
            tokens=past + S,
            pair_flops=2 * wide,
            item_bytes=width * cached_dims,
            edge_bytes=2 * B * N * wide,
        )
        kernel = _kernel(record, device, "latent_decode", label, cached_dims)
        return float(costed_seconds(kernel, decode_parts(chip, cached)))
    if op != "context_mla":
        raise refuse("op", op, "is not a kernel or a module of latent attention that is modelled")
    dims = a.qk_head_dim + a.v_head_dim
    prompt = PrefillAttention(
        sequences=B,
        queries=S,
        past=past,
        heads=N,
        kv_heads=N,
        pair_flops=2 * dims,
        token_bytes=2 * dims,
        edge_bytes=2 * N * B * S * dims,
    )
    kernel = _kernel(record, device, "latent_prefill", label, a.qk_head_dim)
    return float(costed_seconds(kernel, prompt_parts(chip, prompt, kernel.packs)))
