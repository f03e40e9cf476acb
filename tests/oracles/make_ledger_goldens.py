"""Writes tests/data/ops/saved.json and flops.json: bytes kept for backward and FLOPs of transformers' own classes.

Bytes are those of the second layer, by hooks on saved tensors of real CPU tensors; each storage counts once and weights
not at all. FLOPs are torch's own counter over fake tensors, with attention over the whole square and experts one by one
("batched_mm"), for named models of oracle_models.json. Needs torch 2.13.0 and transformers 5.24.0 (neither a dependency
of the project), no weights and no network. Not run in CI; a change is a change of transformers and is to be looked at.

    python tests/oracles/make_ledger_goldens.py saved|flops
"""

import contextlib
import json
import os
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

HERE = pathlib.Path(__file__).parent
OUT = HERE.parent / "data/ops"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore")

# What follows needs the lines above: no network, no warnings.
import torch  # noqa: E402
import transformers  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

DROP = {"id2label", "label2id", "transformers_version", "architectures", "problem_type", "dtype"}
NAMED = (
    "llama3.2-1b", "llama3-8b", "qwen2.5-7b", "qwen3-8b", "gemma-2-9b", "gpt2-xl", "gpt-neox-20b", "bloom-7b1",
    "falcon-7b", "falcon-40b", "phi-3-mini", "granite-3-8b", "olmo2-7b", "mistral-7b-v0.1", "command-r-35b",
    "mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b", "gpt-oss-20b", "deepseek-v2-lite", "qwen1.5-moe-a2.7b",
)  # fmt: skip
DENSE = (
    "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "granite", "smollm3", "seed_oss", "arcee", "hunyuan_v1_dense",
    "starcoder2", "phi3", "phi", "stablelm", "cohere", "cohere2", "olmo2", "olmo3",
)  # fmt: skip
LONG = [
    ("llama3.2-1b", 1, 4096, "eager"),
    ("llama3.2-1b", 1, 4096, "sdpa"),
    ("llama3.2-1b", 2, 1000, "eager"),
    ("llama3-8b", 1, 4096, "eager"),
    ("qwen2.5-7b", 1, 4096, "eager"),
]


def plain(config: Any) -> dict[str, Any]:
    """A configuration as a file has it, class defaults included."""
    keys = json.loads(config.to_json_string(use_diff=False))
    return {k: v for k, v in keys.items() if k not in DROP and not k.startswith("_")}


def saved_bytes(model: nn.Module, inside: nn.Module, run: Callable[[], Any]) -> int:
    """Bytes of distinct storages, weights apart, that `inside` is the first to save while `run` runs."""
    seen = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
    counted, alive, depth = 0, [], 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal counted
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            counted += storage.nbytes() * (depth > 0)
        alive.append(tensor)  # storages stay alive, so that their addresses stay unique
        return tensor

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    handles = [inside.register_forward_pre_hook(enter), inside.register_forward_hook(leave)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    for handle in handles:
        handle.remove()
    return counted


class PlainBlock(nn.Module):
    """The layer of arXiv:2205.05198 figure 3: LayerNorm, unfused attention, GELU, dropout with one-byte masks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.maps = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both branches with their residual additions."""
        B, S, D = x.shape
        inner = self.norms[0](x)
        q, k, v = (m(inner).view(B, S, self.heads, -1).transpose(1, 2) for m in list(self.maps)[:3])
        p = self.drop(F.softmax(q @ k.transpose(-1, -2) * (D // self.heads) ** -0.5, dim=-1))
        x = x + self.drop(self.maps[3]((p @ v).transpose(1, 2).reshape(B, S, D)))
        return x + self.drop(self.down(F.gelu(self.up(self.norms[1](x)))))

    @staticmethod
    def drop(x: torch.Tensor) -> torch.Tensor:
        """Dropout as CUDA has it; the CPU's own keeps a mask as wide as its input."""
        return torch.native_dropout(x, 0.1, True)[0]


def block_runs() -> Iterator[dict[str, Any]]:
    """The plain block in three shapes."""
    for S, B, D, heads in [(256, 2, 512, 8), (1024, 1, 1024, 16), (512, 4, 768, 12)]:
        block = PlainBlock(D, heads).bfloat16()
        x = torch.zeros(B, S, D, dtype=torch.bfloat16, requires_grad=True)
        kept = saved_bytes(block, block, lambda block=block, x=x: block(x))
        yield {"kind": "block", "B": B, "S": S, "hidden": D, "heads": heads, "saved_bytes": kept}


def configurations() -> Iterator[tuple[str, dict[str, Any], tuple[str, ...], tuple[tuple[int, int], ...]]]:
    """Families with their sizes, attention implementations and (B, S)."""
    wide = {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64}
    shapes = [(512, 8, 2, 64, 1408, 1, 1024), (512, 8, 8, 64, 1408, 1, 1024), (256, 4, 1, 128, 768, 3, 256),
              (1024, 8, 4, 128, 2816, 2, 512)]  # fmt: skip
    for D, N, K, H, ffn, B, S in shapes:
        sizes = {"hidden_size": D, "num_attention_heads": N, "num_key_value_heads": K, "head_dim": H}
        yield "llama", {**sizes, "intermediate_size": ffn}, ("sdpa", "eager"), ((B, S),)
    dense = {**wide, "num_key_value_heads": 2, "intermediate_size": 1408}
    for name in DENSE:
        typed = ("gemma3_text", "smollm3", "cohere2", "olmo3")
        full = {"layer_types": ["full_attention"] * 2} if name in typed else {}
        yield name, {**dense, **full}, ("sdpa", "eager"), ((1, 256),)
    yield "gpt_neox", {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1408}, ("sdpa",), ((1, 256),)
    yield "gemma2", dense, ("eager",), ((1, 1024),)
    yield "gpt2", {"n_embd": 512, "n_head": 8}, ("sdpa",), ((1, 1024),)
    mixture = {**wide, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    for shape in ((1, 1024), (2, 256)):
        yield "mixtral", {**mixture, "intermediate_size": 1408, "num_local_experts": 8}, ("sdpa",), (shape,)
        few = {**mixture, "moe_intermediate_size": 384, "num_experts": 16, "num_experts_per_tok": 4}
        yield "qwen3_moe", few, ("sdpa",), (shape,)
        yield "qwen3_moe", {**few, "norm_topk_prob": True}, ("sdpa",), (shape,)
        latent = {"q_lora_rank": 384, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
        heads = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "v_head_dim": 96}
        yield (
            "deepseek_v3",
            {**heads, **latent, "intermediate_size": 1408, "first_k_dense_replace": 2},
            # With one sequence the values of unfused attention stay a view, with more they are copied.
            ("sdpa", "eager") if shape[0] > 1 else ("sdpa",),
            (shape,),
        )
    shared = {"moe_intermediate_size": 384, "num_experts": 8, "shared_expert_intermediate_size": 640}
    yield "qwen2_moe", {**mixture, **shared}, ("sdpa", "eager"), ((2, 256),)
    yield "minimax_m2", {**mixture, "intermediate_size": 384, "num_local_experts": 8}, ("sdpa",), ((2, 256),)
    yield "olmoe", {**mixture, "intermediate_size": 384, "num_experts": 8}, ("sdpa",), ((2, 256),)
    yield from unusual(dense, mixture)


def unusual(dense: dict[str, Any], mixture: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], Any, Any]]:
    """Families whose blocks are unlike Llama's: norms in fp32 or by a power, limits, sinks, routers with norms."""
    both, full, shape = ("sdpa", "eager"), {"layer_types": ["full_attention"] * 2}, ((2, 256),)
    yield "gpt_oss", {**mixture, **full, "intermediate_size": 384, "num_local_experts": 8}, ("eager",), shape
    gemma = {**dense, **full, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "global_head_dim": 128}
    experts = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 384}
    yield "gemma4_text", gemma, both, shape
    yield "gemma4_text", gemma | experts, both, shape
    routed = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 384}
    yield "afmoe", {**dense, **routed, **full, "num_shared_experts": 1, "num_dense_layers": 1}, both, shape
    yield "hunyuan_v1_moe", {**dense, "num_experts": 16, "moe_topk": 4, "num_shared_expert": 1}, both, shape
    llama = {"intermediate_size_mlp": 1408, "intermediate_size": 640, "interleave_moe_layer_step": 1}
    yield "llama4_text", {**mixture, **llama, "num_local_experts": 8, "num_experts_per_tok": 1}, ("sdpa",), shape
    yield "hy_v3", {**dense, **routed, "num_shared_experts": 1, "first_k_dense_replace": 1}, both, shape
    for name in ("exaone4", "cwm", "jais2", "nanochat", "ministral", "hyperclovax"):
        yield name, dense | full, both, shape
    yield "vaultgemma", dense | full, ("eager",), shape
    sizes = {"num_attention_heads": 8, "ffn_dim": 2048, "word_embed_proj_dim": 512, "dropout": 0.0}
    yield "opt", {"hidden_size": 512, **sizes}, both, shape
    yield "bloom", {"hidden_size": 512, "n_head": 8}, ("eager",), shape


def transformers_runs() -> Iterator[dict[str, Any]]:
    """The second layer of two-layer models, by attention implementation and data type."""
    quiet = {key: 0.0 for key in ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "residual_dropout",
                                  "embedding_dropout", "hidden_dropout")}  # fmt: skip
    for family, sizes, attentions, shapes in configurations():
        sizes = {"num_hidden_layers": 2, "vocab_size": 1000, "pad_token_id": 0, "use_cache": False, **quiet, **sizes}
        for attention in attentions:
            for dtype in (torch.bfloat16, torch.float32):
                config = AutoConfig.for_model(family, **sizes)
                model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).train()
                layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 2)
                for B, S in shapes:
                    ids = torch.zeros(B, S, dtype=torch.long)
                    run = lambda model=model, ids=ids: model(input_ids=ids, use_cache=False)  # noqa: E731
                    yield {
                        "kind": "layer",
                        "family": family,
                        "attention": attention,
                        "bytes": dtype.itemsize,
                        "B": B,
                        "S": S,
                        "saved_bytes": saved_bytes(model, layers[1], run),
                        "model_bytes": saved_bytes(model, model, run),
                        "config": plain(config),
                    }


def _flash(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q, k, v))


def _flash_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, q, k, v))


# torch 2.13 counts none for the fused attention of the CPU; the square is its own convention for the GPU's.
COUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
}


@contextlib.contextmanager
def without_masks() -> Iterator[None]:
    """Fake tensors hide that a mask is plainly causal, so the fused kernel would not be chosen: leave the mask out."""
    names = ("create_causal_mask", "create_sliding_window_causal_mask")
    found = [
        (module, name, getattr(module, name))
        for key, module in list(sys.modules.items())
        if key.startswith("transformers.models.") and ".modeling_" in key
        for name in names
        if hasattr(module, name)
    ]
    for module, name, _ in found:
        setattr(module, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for module, name, original in found:
            setattr(module, name, original)


def flop_runs() -> Iterator[dict[str, Any]]:
    """Forward and backward FLOPs of named models."""
    known = json.loads((HERE / "oracle_models.json").read_text())
    for name, B, S, attention in LONG + [(name, 1, 512, "eager") for name in NAMED]:
        config = AutoConfig.for_model(known[name]["model_type"], **known[name]["fields"])
        with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
            if hasattr(model, "set_experts_implementation"):
                model.set_experts_implementation("batched_mm")
            ids = torch.zeros(B, S, dtype=torch.long)
            with without_masks() if attention == "sdpa" else contextlib.nullcontext():
                with FlopCounterMode(display=False, custom_mapping=COUNTED) as forward:
                    logits = model(input_ids=ids, use_cache=False).logits
                with FlopCounterMode(display=False, custom_mapping=COUNTED) as backward:
                    logits.sum().backward()
        yield {
            "model": name,
            "B": B,
            "S": S,
            "attention": attention,
            "forward_flops": forward.get_total_flops(),
            "backward_flops": backward.get_total_flops(),
            "config": plain(config),
        }


def write(name: str, runs: list[dict[str, Any]]) -> None:
    """Write runs with their configurations apart, each once."""
    configs: list[dict[str, Any]] = []
    for run in runs:
        if "config" in run:
            if run["config"] not in configs:
                configs.append(run["config"])
            run["config"] = configs.index(run["config"])
    pinned = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    lines = [json.dumps({"versions": pinned})[:-1] + ', "configs": [']
    lines.append(",\n".join(json.dumps(c) for c in configs) + '\n], "runs": [')
    lines.append(",\n".join(json.dumps(r) for r in runs) + "\n]}")
    (OUT / f"{name}.json").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["saved"]:
        write("saved", [*block_runs(), *transformers_runs()])
    elif sys.argv[1:] == ["flops"]:
        write("flops", list(flop_runs()))
    else:
        sys.exit(__doc__)
