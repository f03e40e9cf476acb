"""Writes tests/data/tuning/unusual.json: bytes that layers with adapters keep, in families unlike Llama.

Bytes are those of the second layer in bf16, as make_ledger_goldens.py counts them; parameters are those that peft
trains. Needs torch 2.13.0, transformers 5.24.0 and peft 0.21.2, no weights and no network. Not run in CI.

    python tests/oracles/make_adapter_goldens.py
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from make_ledger_goldens import plain, saved_bytes
from peft import IA3Config, LoraConfig, OFTConfig, VeraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

OUT = pathlib.Path(__file__).parents[1] / "data/tuning/unusual.json"
B, S, RANK = 2, 256, 8
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "dense", "kv_a_proj_with_mqa", "kv_b_proj"}
DENSE = {"gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "c_fc", "c_proj"}
METHODS: dict[str, Callable[[list[str]], Any]] = {
    "lora": lambda names: LoraConfig(r=RANK, target_modules=names, task_type="CAUSAL_LM"),
    "dora": lambda names: LoraConfig(r=RANK, target_modules=names, use_dora=True, task_type="CAUSAL_LM"),
    "vera": lambda names: VeraConfig(r=RANK, target_modules=names, task_type="CAUSAL_LM"),
    "oft": lambda names: OFTConfig(oft_block_size=32, r=0, target_modules=names, task_type="CAUSAL_LM"),
    "ia3": lambda _: IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
}


def families() -> dict[str, dict[str, Any]]:
    """Model types with their sizes."""
    heads = {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64, "num_key_value_heads": 2}
    dense, full = {**heads, "intermediate_size": 1408}, {"layer_types": ["full_attention"] * 2}
    gemma = {**dense, **full, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "global_head_dim": 128}
    experts = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 256}
    few = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 384}
    latent = {"q_lora_rank": None, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
    routed = {"first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2}
    widths = {"moe_intermediate_size": 384, "intermediate_size": 1408, "v_head_dim": 96, "num_key_value_heads": 8}
    deepseek = {"hidden_size": 512, "num_attention_heads": 8, **latent, **routed, **widths}
    plainly = ("gemma", "phi3", "granite", "seed_oss", "hunyuan_v1_dense", "stablelm", "starcoder2")
    return {
        **dict.fromkeys(plainly, dense),
        **dict.fromkeys(("qwen3", "gemma3_text", "olmo2", "exaone4", "smollm3", "cohere2"), dense | full),
        "gemma4_text": gemma,
        "gemma4_text experts": gemma | experts,
        "gpt_oss": {**heads, **full, **few},
        "deepseek_v2": deepseek,
    }


def runs() -> Any:
    """Each family under each method, the method on the layers that it stands beside."""
    for family, sizes in families().items():
        more = {"num_hidden_layers": 2, "vocab_size": 1000, "pad_token_id": 0, "use_cache": False}
        quiet = dict.fromkeys(("attention_dropout", "residual_dropout", "embedding_dropout", "hidden_dropout"), 0.0)
        config = AutoConfig.for_model(family.split()[0], **more, **quiet, **sizes)
        attention = "eager" if family == "gpt_oss" else "sdpa"
        beside = [("lora", "all"), ("ia3", ""), *((name, "attention") for name in ("lora", "dora", "vera", "oft"))]
        for method, words in beside:
            if method == "ia3" and family in ("phi3", "starcoder2", "deepseek_v2"):
                continue  # other names than the methods of this table have
            if method == "oft" and family == "deepseek_v2":
                continue  # its turn fails on strided latents
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
            present = {n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
            names = sorted(present & (ATTENTION if words == "attention" else ATTENTION | DENSE))
            model = get_peft_model(model.train(), METHODS[method](names), autocast_adapter_dtype=False)
            layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 2)
            ids = torch.zeros(B, S, dtype=torch.long)
            kept = saved_bytes(model, layers[1], lambda model=model, ids=ids: model(input_ids=ids, use_cache=False))
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            yield family, attention, method, words, trained, kept, plain(config)


if __name__ == "__main__":
    found = list(runs())
    configs = {family: config for family, *_, config in found}
    lines = ",\n".join(f"  {json.dumps(run[:-1])}" for run in found)
    models = ",\n".join(f"  {json.dumps(name)}: {json.dumps(config)}" for name, config in configs.items())
    head = '"source": "saved-tensor hooks: torch 2.13.0, transformers 5.24.0, peft 0.21.2; family, attention, method, '
    head += 'targets, trainable parameters, bytes of the second layer"'
    OUT.write_text(f'{{\n {head},\n "configs": {{\n{models}\n }},\n "kept": [\n{lines}\n ]\n}}\n')
