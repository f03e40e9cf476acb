"""Rows of whole latent-attention modules: projections, norms, rotation, joins and attention, as an engine runs them.

The operators are the ledger's (`ops.latent`), priced as the tables of GEMMs, attention and streaming kernels are.
What an engine does otherwise than the ledger says stands in modules.toml, each with its source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from accuracy.files import read
from accuracy.kernels import attention, products
from accuracy.kernels.attention import latent_model
from accuracy.kernels.streaming import cached_rate, read_share, replayed_start, step_rate
from accuracy.kernels.tables import ENGINES, tables
from accuracy.kernels.types import cache_width
from shardwise.cost import DECODE_PARTS, DecodeAttention, KernelCosts, costed_seconds, decode_parts, family_of
from shardwise.hardware import Device
from shardwise.ledger.op import Op
from shardwise.measured import Record
from shardwise.models import LatentAttention
from shardwise.ops.attention import rotary
from shardwise.ops.count import WHOLE
from shardwise.ops.inputs import LayoutOptions, TokenBatch
from shardwise.ops.latent import joined_down, latent_attention
from shardwise.ops.layout import Layout, lay_out, memory_op
from shardwise.serving import find_engine

PROMPT, DECODE = "mla_context_module", "mla_generation_module"
OPS = (PROMPT, DECODE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """One row: sequences of new tokens after `past` ones, heads of the rank, types of GEMMs and cache, its engine.

    `decodes` says that attention runs over the cached latent; `unfused` that norms and rotation run step by step.
    """

    record: Record
    device: Device
    family: str
    engine: str
    row: dict[str, Any]
    sequences: float
    tokens: float
    past: float
    heads: int
    decodes: bool
    unfused: bool

    @property
    def phase(self) -> str:
        """The word of modules.toml for what runs."""
        return "decode" if self.decodes else "prompt"

    @property
    def cache_bytes(self) -> float:
        """Bytes of an element of the cache."""
        return cache_width(self.record)


def module_of(record: Record, device: Device) -> Module:
    """Return what a row times; an engine without modules of its own runs those of vLLM, which is said."""
    word = ENGINES.get(record.text("engine"), record.text("engine"))
    known = word if word in read("kernels/modules.toml")["engines"] else "vllm"
    if known != word:
        record.assume(f"modules of {word or 'an engine that is not stated'}: those of {known}")
    row = read("kernels/modules.toml")["engines"][known]
    tokens = record.positive("query_tokens")
    single = tokens == 1 and row.get("one_token_decodes", False)
    return Module(
        record=record,
        device=device,
        family=family_of(device),
        engine=known,
        row=row,
        sequences=record.positive("batch"),
        tokens=tokens,
        past=record.number("prefix_tokens"),
        heads=int(record.positive("num_heads")),
        decodes=record.text("op") == DECODE or single,
        unfused="fused_on" in row and device.name not in row["fused_on"],
    )


def operators(m: Module) -> tuple[Op[float], ...]:
    """Return the ledger's operators of a module, both down-projections as one GEMM, and the engine's copies."""
    hidden, mixer = latent_model()
    stack = find_engine(m.engine).stack
    if m.unfused:
        stack = replace(stack, norm="eager", activation="eager")
    work: TokenBatch[float] = TokenBatch(
        B=m.sequences,
        S=m.tokens,
        context=m.past,
        phase="decode" if m.decodes else "prefill",
        cache_bytes=m.cache_bytes,
    )
    y = lay_out(WHOLE, work, LayoutOptions(stack=stack))
    ops = joined_down(latent_attention(y, replace(mixer, heads=m.heads), hidden, y.residual("input", hidden, "")))
    if m.decodes:
        ops = (*ops, rotary(y, (m.heads + 1.0) * mixer.qk_rope_head_dim))
    return (*ops, *(_copy(y, word, mixer, m.heads) for word in m.row["joins"][m.phase]))


def _copy(y: Layout[float], word: str, a: LatentAttention, heads: int) -> Op[float]:
    """Return a copy that joins two halves: each is read once, and the whole is written."""
    rope = a.qk_rope_head_dim
    read, written = {
        "latent": (a.kv_lora_rank + rope, a.kv_lora_rank + rope),
        "keys": (heads * a.qk_nope_head_dim + rope, heads * a.qk_head_dim),
        "queries": (heads * (a.kv_lora_rank + rope), heads * (a.kv_lora_rank + rope)),
    }[word]
    return memory_op(y, f"join.{word}", "attention", (y.a * y.tokens * (read + written), 0.0))


def _chosen(table: dict[str, Any], m: Module, default: Any = None) -> Any:
    """Return the entry of a family and type of cache, of the family, or of any."""
    keys = (f"{m.family}-{m.record.text('kv_dtype')}", m.family, "any")
    return next((table[key] for key in keys if key in table), default)


def attention_seconds(m: Module) -> float:
    """Return seconds of attention by the measured kernel that the module calls, rotation and cache as its table has."""
    name = _chosen(m.row[m.phase], m)
    said = {**m.record.row, "query_tokens": f"{m.tokens:g}"}
    if m.decodes:
        # The token of the step is among the tokens that vLLM's tables count.
        before = m.past - 1 if m.row["rotates"] and m.past else m.past
        if name == "own":
            return _own_decode(m, before + 1)
        told = {**said, "op": "generation_mla", "engine": name, "prefix_tokens": f"{before:g}"}
        return attention.latent(Record(told), m.device)
    if name == "flash":
        _, a = latent_model()
        mean = (a.qk_head_dim + a.v_head_dim) / 2
        own = {"num_kv_heads": f"{m.heads}", "head_dim": f"{mean:g}", "kv_dtype": m.record.text("mla_dtype")}
        return attention.prefill(Record({**said, **own, "attention_dtype": m.record.text("mla_dtype")}), m.device)
    kept = m.record.text("mla_dtype") if m.row["rotates"] else m.record.text("kv_dtype")
    told = {**said, "op": "context_mla", "engine": name, "kv_dtype": kept}
    return attention.latent(Record(told), m.device)


def _own_decode(m: Module, tokens: float) -> float:
    """Return seconds of a kernel over the cached latent that only modules were measured with."""
    _, a = latent_model()
    wide = 2 * a.kv_lora_rank + a.qk_rope_head_dim
    cached = DecodeAttention(
        sequences=m.sequences,
        items=m.sequences,
        group=m.heads,
        tokens=tokens,
        pair_flops=2 * wide,
        item_bytes=m.cache_bytes * (a.kv_lora_rank + a.qk_rope_head_dim),
        edge_bytes=2 * m.sequences * m.heads * wide,
    )
    stated = m.row["own"][m.family]["costs"]
    costs = KernelCosts(costs=tuple(stated.get(name, 0.0) for name in DECODE_PARTS), packs="none", scale=1.0)
    return costed_seconds(costs, decode_parts(products.datasheet_of(m.device, "bf16"), cached))


def cached_share(m: Module, moved: float) -> float:
    """Return the share of the seconds of reading its weights that the last cache saves when a module is replayed.

    Halves of the cache of devices with two each hold what both read.
    """
    copies = 2 if m.family in read("kernels/modules.toml")["cache"]["halved"] else 1
    return 1 - read_share(m.device, moved, copies)


def _products(m: Module, op: Op[float], held: float) -> float:
    """Return seconds of the GEMMs of an operator: the absorbed projections are two batches in 16 bits."""
    _, a = latent_model()
    if op.name == "absorb":
        shapes = [(a.kv_lora_rank, a.qk_nope_head_dim), (a.v_head_dim, a.kv_lora_rank)]
        told = [products.timed(m.record, m.device, "bf16", (op.rows, n, k, m.heads), held) for n, k in shapes]
        return sum(told)
    dtype = m.record.text("gemm_dtype") or "bf16"
    if op.name in m.row.get("wide", {}).get(dtype, ()):
        dtype = "bf16"
    record = Record({**m.record.row, "engine": m.row.get("products", {}).get(dtype, m.engine)})
    return products.timed(record, m.device, dtype, (op.rows, op.columns, op.inner, op.batch), held)


def _streamed(m: Module, op: Op[float]) -> float:
    """Return seconds of an operator that only moves bytes, from a captured graph."""
    moved, unfused = op.forward_bytes, tables()["unfused"]
    if op.name == "rotary" and not m.row["rotates"]:
        return 0.0
    if op.name == "rotary" and m.unfused:
        moved *= unfused["rotary_bytes"] / 2
    # One step of an unfused norm reads and writes what it leaves, and passes a share of its bytes.
    rate = step_rate(m.device, moved / unfused["passes"]) if m.unfused else cached_rate(m.device, moved)
    if op.name == "join.queries":
        rate = _chosen(m.row["joins"].get("queries_bytes_per_second", {}), m, rate)
        if not rate:
            return 0.0
    kernels = 0.0 if op.name in m.row.get("beside", ()) else op.kernels
    # Queries and the shared key are rotated one after the other.
    kernels *= 2 if op.name == "rotary" and m.unfused else 1
    return moved / rate + kernels * replayed_start(m.device, m.engine)


def parts(m: Module) -> dict[str, float]:
    """Return seconds of a module by operator."""
    ops = operators(m)
    held = cached_share(m, sum(op.forward_bytes for op in ops))
    found = {}
    for op in ops:
        if op.kind == "attention":
            found[op.name] = attention_seconds(m)
        else:
            found[op.name] = _products(m, op, held) if op.kind == "matmul" else _streamed(m, op)
    return found


def latent(record: Record, device: Device) -> float:
    """Return seconds of a row of latent attention: of its kernel alone, or of a whole module."""
    if record.text("op") in OPS:
        return sum(parts(module_of(record, device)).values())
    return attention.latent(record, device)
