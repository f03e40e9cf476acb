"""What a layer keeps for backward, to the byte, against hooks on the saved tensors of transformers' own classes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ops.helpers import golden, layout, on_cpu
from shardwise.ledger.saved import keep, tensor_bytes
from shardwise.models import MLP, Attention, Block, Model, model_from_config
from shardwise.ops.block import block_ops
from shardwise.ops.head import embedding, final_norm, head
from shardwise.ops.layout import Layout, lay_out

RUNS: list[dict[str, Any]] = golden("saved")["runs"]
LAYERS = [run for run in RUNS if run["kind"] == "layer"]
BLOCKS = [run for run in RUNS if run["kind"] == "block"]


# Their rotary tables are of a part of each head, in fp32, or of no layer; a model says that heads rotate, not how much.
# OPT numbers the positions of each sequence.
OTHER_TABLES = (
    *("phi", "stablelm", "gpt_neox", "olmo2", "olmo3", "cohere2", "gpt_oss", "afmoe", "llama4_text", "exaone4"),
    *("nanochat", "opt"),
)


def _name(run: dict[str, Any]) -> str:
    return "-".join(str(run[key]) for key in ("family", "attention", "bytes", "B", "S"))


def _case(run: dict[str, Any]) -> tuple[Model, Layout[Any]]:
    model = model_from_config(golden("saved")["configs"][run["config"]])
    width = run["bytes"]
    work = {"B": run["B"], "S": run["S"], "activation_bytes": width, "weight_bytes": width}
    stack = "transformers" if run["attention"] == "sdpa" else "transformers-eager"
    return model, on_cpu(layout(work, stack))


def _kept(y: Layout[Any], block: Block, hidden: int) -> float:
    return tensor_bytes(keep(block_ops(y, block, hidden)).kept)


@pytest.mark.parametrize("run", LAYERS, ids=_name)
def test_a_layer_keeps_its_exact_bytes(run: dict[str, Any]) -> None:
    """The second layer of a two-layer model keeps exactly the storages that autograd keeps."""
    model, y = _case(run)
    assert _kept(y, model.layers[1], model.hidden) == run["saved_bytes"]


@pytest.mark.parametrize("run", [run for run in LAYERS if run["family"] not in OTHER_TABLES], ids=_name)
def test_a_forward_pass_keeps_its_exact_bytes(run: dict[str, Any]) -> None:
    """Embedding, rotary tables, layers, final norm and head together keep exactly what the whole model keeps."""
    model, y = _case(run)
    around = keep((*embedding(y, model), *final_norm(y, model), *head(y, model))).kept
    layers = sum(_kept(y, block, model.hidden) for block in model.layers)
    assert layers + tensor_bytes(around) == run["model_bytes"]


@pytest.mark.parametrize("run", BLOCKS, ids=lambda run: str(run["hidden"]))
def test_the_plain_block_keeps_its_exact_bytes(run: dict[str, Any]) -> None:
    """Unfused attention with dropout keeps S B D (34 + 5 N S / D) and LayerNorm's statistics (arXiv:2205.05198)."""
    B, S, D, N = (run[key] for key in ("B", "S", "hidden", "heads"))
    core = Attention(heads=N, kv_heads=N, head_dim=D // N, qkv_bias=True, out_bias=True)
    ffn = MLP(ffn=4 * D, gated=False, bias=True, activation="gelu")
    block = Block(mixers=(core,), feed_forward=ffn, norm="layernorm")
    y = layout({"B": B, "S": S, "dropout": True}, "megatron-scores")
    statistics = 2 * 2 * B * S
    assert _kept(on_cpu(y), block, D) == run["saved_bytes"] == 34 * S * B * D + 5 * N * S * S * B + 2 * statistics
    assert _kept(y, block, D) == run["saved_bytes"] + 2 * statistics


SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 100, "image_size": 112}
ENCODERS = {
    ("clip_text_model", "quick_gelu", 256, "transformers-eager", 50): 376_800,
    ("clip_text_model", "quick_gelu", 256, "transformers", 50): 258_400,
    ("siglip_text_model", "gelu_pytorch_tanh", 272, "transformers-eager", 64): 467_968,
    ("siglip_text_model", "gelu_pytorch_tanh", 272, "transformers", 64): 273_408,
    ("vit", "gelu", 256, "transformers-eager", 65): 470_080,
    ("vit", "gelu", 256, "transformers", 65): 269_360,
    ("dinov2", "gelu", 256, "transformers", 65): 302_640,
}


@pytest.mark.parametrize(("case", "saved"), ENCODERS.items(), ids=["-".join(map(str, case)) for case in ENCODERS])
def test_layers_of_encoders_keep_their_exact_bytes(case: Any, saved: int) -> None:
    """Two sequences in bf16, counted with saved-tensor hooks on torch 2.13.0 and transformers 5.23.0.

    LayerScale keeps the output of each branch, the quick GELU of CLIP its input and a sigmoid.
    """
    family, act, ffn, stack, S = case
    model = model_from_config({**SMALL, "model_type": family, "hidden_act": act, "intermediate_size": ffn})
    block = model.layers[0]
    mixers = tuple(replace(m, causal=False) for m in block.mixers if isinstance(m, Attention))
    assert _kept(on_cpu(layout({"S": S}, stack)), replace(block, mixers=mixers), 64) == saved


WIDE: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2, "vocab_size": 1000}
FALCON: dict[str, Any] = WIDE | {"model_type": "falcon", "alibi": False, "bias": False}
FALCON_7B, FALCON_40B = (
    FALCON | {"multi_query": True},
    FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
)
GROUPLESS = FALCON | {"multi_query": False}
OLMO = WIDE | {"model_type": "olmo", "num_key_value_heads": 2, "intermediate_size": 1408}
# Falcon takes its one key and one value by a list of one index each, which are kept.
OWN_WAYS = [
    (FALCON_7B, "transformers", 2, 13_109_264 - 16),
    (FALCON_7B, "transformers", 4, 18_878_480 - 16),
    (FALCON_7B, "transformers-eager", 2, 9_439_248 - 16),
    (FALCON_40B, "transformers", 2, 8_146_960 - 16),
    (FALCON_40B, "transformers-eager", 2, 9_965_584 - 16),
    (GROUPLESS, "transformers", 2, 8_669_184),
    (GROUPLESS, "transformers-eager", 2, 9_439_232),
    (OLMO, "transformers", 2, 10_248_192),
    (OLMO, "transformers-eager", 2, 17_309_696),
]


@pytest.mark.parametrize(("config", "stack", "width", "saved"), OWN_WAYS)
def test_classes_with_ways_of_their_own_keep_their_exact_bytes(config: Any, stack: str, width: int, saved: int) -> None:
    """Two sequences of 256 tokens, counted with saved-tensor hooks on torch 2.13.0 and transformers 5.24.0.

    Falcon's one head of keys is a view, for which SDPA has no fused kernel; it has a mask of its own otherwise, and its
    softmax is in the type of the scores. OLMo's LayerNorm is of an fp32 copy.
    """
    model = model_from_config(config)
    work = {"B": 2, "S": 256, "activation_bytes": width, "weight_bytes": width}
    assert _kept(on_cpu(layout(work, stack)), model.layers[1], model.hidden) == saved


@pytest.mark.parametrize(("width", "norm"), [(2, 6), (4, 8)])
def test_the_end_of_a_model_keeps_its_terms(width: int, norm: int) -> None:
    """The final norm keeps 6 D + 4 (8 D + 4 in fp32) a token, the head its input."""
    model = model_from_config(golden("saved")["configs"][0])
    D, T = model.hidden, 2 * 64
    y = layout({"activation_bytes": width}, "transformers")
    assert tensor_bytes(keep(final_norm(y, model)).kept) == T * (norm * D + 4)
    assert tensor_bytes(keep(head(y, model)).kept) == T * width * D


@pytest.mark.parametrize("run", golden("sequence_parallel"), ids=lambda run: run["id"])
def test_dtensor_keeps_the_gathered_inputs_of_its_columns(run: dict[str, Any]) -> None:
    """Under torchtitan's sequence-parallel plan q, k, v, and gate and up, keep their whole gathered input once.

    Recorded with torch 2.13.0's saved-tensor hooks on the fake process group, transformers 5.23.0, one layer of a rank.
    """
    model, tp = model_from_config(run["config"]), run["world"]
    work = {"B": run["batch"], "S": run["seq_len"]}
    y = on_cpu(layout(work, "transformers", tp=tp, sequence_parallel=tp > 1))
    assert _kept(y, model.layers[1], model.hidden) == run["layer_bytes"]


def test_megatron_keeps_the_shard_of_an_input_that_it_gathers_again() -> None:
    """A Llama layer under tp 4 keeps 2 * (T D - T D / 4) elements less where backward gathers them again."""
    run = golden("sequence_parallel")[1]
    model, T = model_from_config(run["config"]), run["seq_len"]
    own = layout({"B": 1, "S": T}, "transformers", tp=4, sequence_parallel=True)
    stack = replace(own.stack, regathers_inputs=True)
    again = lay_out(own.degrees, own.work, replace(own.choices, stack=stack))
    more = _kept(own, model.layers[1], model.hidden) - _kept(again, model.layers[1], model.hidden)
    assert more == 2 * 2 * T * model.hidden * 3 / 4


@pytest.mark.parametrize("page", ["accuracy.md", "formulas.md"])
def test_pages_count_the_layers_and_families_that_are_exact(page: str) -> None:
    """What pages call exact is what is compared here."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    families = {run["family"] for run in LAYERS}
    assert f"{len(LAYERS)} layers of {len(families)} families" in text
    assert page != "accuracy.md" or f"forward passes of {len(families - {*OTHER_TABLES})}," in text
