"""Write the bytes of the cache of every model of the catalogue, from its file and the formulas of engines alone.

Nothing of shardwise is imported: keys of `config.json` are read again, by model type. Sources: vLLM 0.33.0
vllm/v1/kv_cache_interface.py (bytes of a page), vllm/model_executor/layers/mamba/mamba_utils.py (states) and the
models' own code; SGLang 0.5.23 python/sglang/srt/configs/mamba_utils.py, model_config.py (pools of windows) and
mem_cache/kv_cache_configurator.py; TensorRT-LLM of 2026-10 tensorrt_llm/_torch/pyexecutor/resource_manager.py
(get_cache_size_per_token), config_utils.py (resolve_ssm_cache_dtype) and mamba_cache_manager.py; llama.cpp
src/llama-hparams.cpp (n_embd_k_gqa, n_embd_r, n_embd_s) and src/llama-model.cpp (create_memory). Run by hand:
`python tests/oracles/make_cache_goldens.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
CATALOGUE = ROOT / "src" / "shardwise" / "models" / "catalogue" / "models.json"
GOLDENS = ROOT / "tests" / "data" / "models" / "cache_bytes.json"

# A layer: elements of a token in the cache, its window (0: none), bytes of a token beside them, whatever the cache's
# type, and of its state the elements of the recurrence and of inputs. A shared layer reads an earlier one's.
Layer = tuple[str, tuple[Any, ...]]


def keys(c: dict[str, Any], window: int = 0, **own: int) -> Layer:
    """Return a layer of grouped attention: a key and a value of each key-value head."""
    heads = c.get("num_attention_heads") or c.get("n_head") or c.get("num_heads") or c.get("n_heads")
    width = c.get("hidden_size") or c.get("n_embd") or c.get("d_model")
    size = own.get("dim") or c.get("head_dim") or width // heads
    kv = own.get("kv") or c.get("num_key_value_heads") or heads
    value = own.get("value") or size
    return "keys", (kv * (size + value), window, own.get("beside", 0))


def latent(c: dict[str, Any], rotated: int | None = None, index: bool = False, pool: int = 0) -> list[Layer]:
    """Return a layer of latent attention, and the keys of an indexer: in 8 bits with a scale of 4 bytes each 128."""
    width = c["kv_lora_rank"] + (c["qk_rope_head_dim"] if rotated is None else rotated)
    found: list[Layer] = [("keys", (width, 0, 0))]
    if index:
        found += indexer(c["index_head_dim"], pool)
    return found


def indexer(size: int, pool: int = 0, bits: int = 8) -> list[Layer]:
    """Return the keys of an indexer, one for `pool` tokens, and keys (and gates) of those not pooled yet."""
    each = size + size // 128 * 4 if bits == 8 else 2 * size
    if not pool:
        return [("index", (each, size))]
    ring = 2 * size * (2 if bits == 8 else 1)
    return [("index", (each / pool, size / pool)), ("ring", (ring, pool))]


def mamba1(inner: int, state: int, conv: int) -> Layer:
    """Return a state of Mamba: (inner, state) and (conv - 1, inner)."""
    return "state", (inner * state, (conv - 1) * inner)


def mamba2(heads: int, dim: int, state: int, groups: int, conv: int) -> Layer:
    """Return a state of Mamba-2: (heads, dim, state) and (conv - 1, inner + 2 * groups * state)."""
    return "state", (heads * dim * state, (conv - 1) * (heads * dim + 2 * groups * state))


def delta(c: dict[str, Any]) -> Layer:
    """Return a state of a gated delta net: (value heads, value, key), and inputs of queries, keys and values."""
    k, v = c["linear_key_head_dim"], c["linear_value_head_dim"]
    hk, hv = c["linear_num_key_heads"], c["linear_num_value_heads"]
    return "state", (hv * v * k, (c["linear_conv_kernel_dim"] - 1) * (2 * hk * k + hv * v))


def kda(heads: int, dim: int, conv: int) -> Layer:
    """Return a state of Kimi's delta attention, which engines keep in fp32."""
    return "float", (heads * dim * dim, (conv - 1) * 3 * heads * dim)


def alternating(c: dict[str, Any], full: Any, window: int, **own: int) -> list[Layer]:
    """Return layers of attention, `full(i)` those without a window."""
    return [keys(c, 0 if full(i) else window, **own) for i in range(c["num_hidden_layers"])]


def every(n: int) -> Any:
    """Return what is true of every n-th layer."""
    return lambda i: (i + 1) % n == 0


def gemma3n(c: dict[str, Any]) -> list[Layer]:
    """Return Gemma 3n's layers: the last ones read those of earlier ones."""
    found = alternating(c, every(5), c["sliding_window"])
    own = len(found) - c["num_kv_shared_layers"]
    return [*found[:own], *(("shared", what) for _, what in found[own:])]


def gemma4(c: dict[str, Any]) -> list[Layer]:
    """Return Gemma 4's layers: full ones have heads of their own, whose values are keys that are not rotated."""
    kinds = c.get("layer_types") or ["full_attention" if every(6)(i) else "" for i in range(c["num_hidden_layers"])]
    kv = c["num_global_key_value_heads"] if c["attention_k_eq_v"] else c["num_key_value_heads"]
    wide = keys(c, 0, kv=kv, dim=c["global_head_dim"])
    found = [wide if kind == "full_attention" else keys(c, c["sliding_window"]) for kind in kinds]
    own = len(found) - c["num_kv_shared_layers"]
    return [*found[:own], *(("shared", what) for _, what in found[own:])]


def deepseek_v4(c: dict[str, Any]) -> list[Layer]:
    """Return DeepSeek-V4's layers: a window, and entries of 4 or 128 tokens, those of 4 with an indexer."""
    found: list[Layer] = []
    for rate in c["compress_ratios"][: c["num_hidden_layers"]]:
        found.append(("keys", (c["head_dim"], c["sliding_window"], 0)))
        if rate:
            size = c["index_head_dim"] * (rate == 4)
            series = 2 if rate == 4 else 1
            found.append(("keys", (c["head_dim"] / rate, 0, (size + size // 128 * 4) / rate)))
            found.append(("ring", (4 * 2 * series * (c["head_dim"] + size), series * rate)))
    return found


def deepseek_v41(c: dict[str, Any]) -> list[Layer]:
    """Return DeepSeek-V4.1's layers: a window, and in those that others read entries with keys of the indexer.

    Where those pool, a ring of 8 rows holds values and gates in fp32 (vLLM models/deepseek_v41/compressor.py).
    """
    found: list[Layer] = []
    for i, rate in enumerate(c["compress_ratios"][: c["num_hidden_layers"]]):
        found.append(("keys", (c["head_dim"], c["sliding_window"], 0)))
        if i in c["kv_source_layer_ids"]:
            found.append(("keys", (c["head_dim"] / rate, 0, (c["index_head_dim"] + 4) / rate)))
            found += [("ring", (4 * 2 * c["head_dim"], 8))] if rate > 1 else []
    return found


def inkling(c: dict[str, Any]) -> list[Layer]:
    """Return Inkling's layers: heads of their own in windows, and the last inputs of four convolutions in 16 bits."""
    found: list[Layer] = []
    for i in range(c["num_hidden_layers"]):
        where = "swa_" * (i in c["local_layer_ids"])
        kv, dim = c[f"{where}num_key_value_heads"], c[f"{where}head_dim"]
        found.append(keys(c, c["sliding_window_size"] if where else 0, kv=kv, dim=dim))
        found.append(("ring", (2 * 2 * (kv * dim + c["hidden_size"]), c["sconv_kernel_size"] - 1)))
    return found


def zamba2(c: dict[str, Any]) -> list[Layer]:
    """Return Zamba2's layers: each is Mamba-2, some with attention over twice the width beside it."""
    inner = c["mamba_expand"] * c["hidden_size"]
    heads = c["n_mamba_heads"]
    state = mamba2(heads, inner // heads, c["mamba_d_state"], c["mamba_ngroups"], c["mamba_d_conv"])
    hybrids = c["layers_block_type"].count("hybrid")
    return [state] * c["num_hidden_layers"] + [keys(c, dim=2 * c["hidden_size"] // c["num_attention_heads"])] * hybrids


def mixed(c: dict[str, Any], other: Layer, attends: list[bool]) -> list[Layer]:
    """Return attention where `attends`, another layer elsewhere."""
    return [keys(c) if one else other for one in attends]


def granite_state(c: dict[str, Any]) -> Layer:
    """Return the state that Bamba, Granite 4 and Falcon-H1 name alike."""
    return mamba2(*(c[f"mamba_{k}"] for k in ("n_heads", "d_head", "d_state", "n_groups", "d_conv")))


def nemotron_h(c: dict[str, Any]) -> list[Layer]:
    """Return the layers of a pattern: M is Mamba-2, * attention."""
    state = mamba2(*(c[k] for k in ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")))
    return [state if one == "M" else keys(c) for one in c["hybrid_override_pattern"] if one in "M*"]


def layers_of(c: dict[str, Any]) -> list[Layer]:
    """Return the layers that keep something, by the model type of a file."""
    kind, n = (
        c["model_type"],
        c.get("num_hidden_layers") or c.get("num_layers") or c.get("n_layer") or c.get("n_layers"),
    )
    window, span = c.get("sliding_window") or 0, range(n)
    types = c.get("layer_types") or []
    by_kind: dict[str, Any] = {
        "falcon": lambda: [keys(c, kv=c["num_kv_heads"] if c.get("new_decoder_architecture") else 1)] * n,
        "gpt_bigcode": lambda: [keys(c, kv=1 if c.get("multi_query", True) else 0)] * n,
        "chatglm": lambda: [keys(c, kv=c["multi_query_group_num"], dim=c["kv_channels"])] * n,
        "qwen": lambda: [keys(c, dim=c["kv_channels"])] * n,
        "dbrx": lambda: [keys(c, kv=c["attn_config"]["kv_n_heads"])] * n,
        "nemotron-nas": lambda: [
            keys(c, kv=c["num_attention_heads"] // one["attention"]["n_heads_in_group"])
            for one in c["block_configs"] if one["attention"].get("n_heads_in_group")
        ],
        "mllama_text_model": lambda: [keys(c)] * (n - len(c["cross_attention_layers"])),
        "gemma2": lambda: alternating(c, every(2), window),
        "gemma3_text": lambda: alternating(c, every(c["sliding_window_pattern"]), window),
        "gemma3n_text": lambda: gemma3n(c),
        "gemma4_text": lambda: gemma4(c),
        "gemma4_unified_text": lambda: gemma4(c),
        "gpt_oss": lambda: alternating(c, every(2), window),
        "llama4_text": lambda: alternating(c, every(4), c["attention_chunk_size"]),
        "afmoe": lambda: alternating(c, every(c["global_attn_every_n_layers"]), window),
        "cohere2": lambda: alternating(c, every(c["sliding_window_pattern"]), window),
        "cohere2_moe": lambda: alternating(c, every(c["sliding_window_pattern"]), window),
        "exaone4": lambda: alternating(c, every(4) if window else lambda i: True, window),
        "exaone_moe": lambda: alternating(c, every(4), window),
        "olmo3": lambda: alternating(c, lambda i: types[i] == "full_attention", window),
        "step3p5": lambda: alternating(c, lambda i: types[i] == "full_attention", window),
        "mimo_v2_flash": lambda: [
            keys(c, window, kv=c["swa_num_key_value_heads"], value=c["v_head_dim"]) if one
            else keys(c, value=c["v_head_dim"])
            for one in c["hybrid_layer_pattern"]
        ],
        "minimax_m3_vl_text": lambda: [keys(c)] * n + [
            one for sparse in c["sparse_attention_config"]["sparse_attention_freq"] if sparse
            for one in indexer(c["sparse_attention_config"]["sparse_index_dim"], bits=16)
        ],
        "deepseek_v32": lambda: latent(c, index=True) * n,
        "glm_moe_dsa": lambda: [
            one for kind in c.get("indexer_types", ["full"] * n) for one in latent(c, index=kind == "full")
        ],
        # Every fourth layer has no positions and keeps the latent alone.
        "mistral_large4_text": lambda: [one for i in span for one in latent(c, 0 if every(4)(i) else None, index=True)],
        "deepseek_v4": lambda: deepseek_v4(c),
        "inkling_text": lambda: inkling(c),
        "deepseek_v41_text": lambda: deepseek_v41(c),
        "longcat_flash": lambda: latent(c) * 2 * n,
        "kimi_linear": lambda: latent(c) * len(c["linear_attn_config"]["full_attn_layers"]) + [
            kda(*(c["linear_attn_config"][k] for k in ("num_heads", "head_dim", "short_conv_kernel_size")))
        ] * (n - len(c["linear_attn_config"]["full_attn_layers"])),
        "bailing_hybrid": lambda: [
            one for i in span
            for one in (latent(c) if every(c["layer_group_size"])(i)
                        else [kda(c["num_attention_heads"], c["head_dim"], c["short_conv_kernel_size"])])
        ],
        "glm5_next_text": lambda: [
            one for kind in types
            for one in (latent(c, index=True, pool=c["index_kpool"]) if kind != "linear_attention" else [
                kda(*(c["linear_attn_config"][k] for k in ("num_heads", "head_dim", "short_conv_kernel_size")))])
        ],
        "qwen4_exp_text": lambda: [
            one for kind in types
            for one in ([delta(c)] if kind == "linear_attention" else
                        [keys(c), *indexer(c["indexer_head_dim"], c["indexer_compress_ratio"], bits=16)])
        ],
        "bailing_moe_linear": lambda: mixed(
            c, ("state", (c["num_attention_heads"] * c["head_dim"] ** 2, 0)),
            [every(c["layer_group_size"])(i) for i in span],
        ),
        "jamba": lambda: mixed(
            c, mamba1(c["mamba_expand"] * c["hidden_size"], c["mamba_d_state"], c["mamba_d_conv"]),
            [i % c["attn_layer_period"] == c["attn_layer_offset"] for i in span],
        ),
        "mamba": lambda: [mamba1(c["expand"] * c["hidden_size"], c["state_size"], c["conv_kernel"])] * n,
        "mamba2": lambda: [
            mamba2(*(c[k] for k in ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel")))
        ] * n,
        "bamba": lambda: mixed(c, granite_state(c), [i in c["attn_layer_indices"] for i in span]),
        "granitemoehybrid": lambda: mixed(c, granite_state(c), [one == "attention" for one in types]),
        "falcon_h1": lambda: [granite_state(c), keys(c)] * n,
        "nemotron_h": lambda: nemotron_h(c),
        "zamba2": lambda: zamba2(c),
        "lfm2": lambda: mixed(c, ("state", (0, (c["conv_L_cache"] - 1) * c["hidden_size"])),
                              [i in c["full_attn_idxs"] for i in span]),
        "lfm2_moe": lambda: mixed(c, ("state", (0, (c["conv_L_cache"] - 1) * c["hidden_size"])),
                                  [one == "full_attention" for one in types]),
    }  # fmt: skip
    by_kind["minimax_text_01"] = by_kind["minimax_m1"] = lambda: mixed(
        c, ("state", (c["num_attention_heads"] * c["head_dim"] ** 2, 0)), [bool(one) for one in c["attn_type_list"]]
    )
    by_kind["falcon_mamba"] = by_kind["mamba"]
    by_kind["hy_v4"], by_kind["laguna"] = by_kind["glm_moe_dsa"], by_kind["olmo3"]
    by_kind["qwen3_5_text"] = by_kind["qwen3_5_moe_text"] = by_kind["qwen3_next"] = lambda: mixed(
        c, delta(c), [every(c["full_attention_interval"])(i) for i in span]
    )
    if kind in by_kind:
        found: list[Layer] = by_kind[kind]()
        return found
    if c.get("kv_lora_rank"):
        return latent(c) * n
    return [keys(c, window)] * n


# No engine of those below has formulas for them: their caches live in modules, or no engine runs them.
WITHOUT = {"bert", "roberta", "distilbert", "vit", "gpt_neo", "rwkv", "xlstm", "recurrent_gemma", "lfm3", "gpt2-like"}
# Their releases do not run it yet.
WITHOUT_IN = {
    "sglang": ("deepseek_v41_text",),
    "llama.cpp": ("deepseek_v41_text", "inkling_text"),
    # Heads of values that are not as wide as keys, and what only other managers keep, are not in its formula.
    "tensorrt-llm": ("deepseek_v41_text", "inkling_text", "mimo_v2_flash"),
}
# SGLang 0.5.23 is_hybrid_swa_model, of the families of the catalogue; llama.cpp's architectures with n_swa.
SGLANG_POOLS = ("gpt_oss", "llama4", "gemma4", "mimo_v2", "step3p", "laguna", "deepseek_v4", "inkling")
LLAMA_WINDOWS = (
    *("gemma2", "gemma3_text", "gemma3n", "gemma4", "gpt_oss", "llama4", "cohere2", "exaone4", "exaone_moe"),
    *("mimo_v2", "step3p", "olmo3", "afmoe", "laguna"),
)


def state_type(c: dict[str, Any], engine: str) -> int:
    """Return bytes of an element of a recurrence.

    vLLM: that of the model but for what Nemotron-H and Qwen3.5 say; SGLang: fp32 unless `mamba_ssm_dtype`;
    TensorRT-LLM: that of the model unless `mamba_ssm_cache_dtype`, which Nemotron-H's class has.
    """
    named = c.get("mamba_ssm_cache_dtype") or ("float32" if c["model_type"] == "nemotron_h" else None)
    said = None if engine == "tensorrt-llm" else c.get("mamba_ssm_dtype")
    said = said or (named if engine in ("vllm", "tensorrt-llm") else None)
    return {"float32": 4, "bfloat16": 2}[said] if said else 2 if engine in ("vllm", "tensorrt-llm") else 4


def kept(c: dict[str, Any], engine: str) -> dict[str, float]:
    """Return bytes of a token by window (0: none), and of states and rings of a sequence, in 16 bits, all layers."""
    found: Counter[str] = Counter()
    for kind, what in layers_of(c):
        if kind in ("keys", "shared") and (kind == "keys" or engine == "sglang"):
            elements, window, beside = what
            pools = {
                "vllm": True,
                "sglang": c["model_type"].startswith(SGLANG_POOLS),
                "llama.cpp": c["model_type"].startswith(LLAMA_WINDOWS),
                "tensorrt-llm": c["model_type"].startswith(("gemma4", "deepseek_v4")),
            }
            found[str(window if pools[engine] else 0)] += 2 * elements + beside
        elif kind == "index":
            found["0"] += what[0] if engine != "llama.cpp" else 2 * what[1]
        elif kind == "ring":
            found["rings"] += what[0] * what[1]
        elif kind in ("state", "float"):
            wide = 4 if kind == "float" else state_type(c, engine)
            found["states"] += wide * what[0] + (4 if engine == "llama.cpp" else 2) * what[1]
    return {name: size for name, size in sorted(found.items()) if size}


def main() -> None:
    """Write the goldens."""
    models = json.loads(CATALOGUE.read_text(encoding="ascii"))
    found = {
        name: {
            engine: kept(one["config"], engine)
            for engine in ("vllm", "sglang", "llama.cpp", "tensorrt-llm")
            if one["config"]["model_type"] not in WITHOUT_IN.get(engine, ())
        }
        for name, one in models.items() if one["config"]["model_type"] not in WITHOUT
    }  # fmt: skip
    lines = (f'  "{name}": {json.dumps(row)}' for name, row in found.items())
    GOLDENS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="ascii")


if __name__ == "__main__":
    main()
