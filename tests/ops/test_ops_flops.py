"""FLOPs against PyTorch's counter, and published conventions against published figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ops.helpers import golden
from shardwise.errors import InputError
from shardwise.models import Attention, load_model, model_from_config
from shardwise.ops import CONVENTIONS, active_parameters, count_flops, count_parameters, train_flops
from shardwise.ops.count import RECOMPUTED, lines, whole_layout
from shardwise.plans import RECOMPUTES

RUNS: list[dict[str, Any]] = golden("flops")["runs"]


def _name(run: dict[str, Any]) -> str:
    return "-".join(str(run[key]) for key in ("model", "B", "S", "attention"))


@pytest.mark.parametrize("run", RUNS, ids=_name)
def test_forward_flops_are_exact(run: dict[str, Any]) -> None:
    """Forward FLOPs over the whole square equal PyTorch's counter to the integer."""
    model = model_from_config(golden("flops")["configs"][run["config"]])
    assert sum(count_flops(model, run["B"], run["S"]).values()) == run["forward_flops"]


SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 144}
ENCODERS = {
    ("ViTForImageClassification", "vit", 17): ({"image_size": 64, "num_labels": 10}, 10_694_656),
    ("Dinov2Model", "dinov2", 26): ({"image_size": 70, "patch_size": 14, "mlp_ratio": 3}, 17_581_056),
    ("DINOv3ViTModel", "dinov3_vit", 21): ({"image_size": 64, "num_register_tokens": 4}, 12_596_736),
    ("CLIPTextModel", "clip_text_model", 16): (
        {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 500},
        2_555_904,
    ),
}


@pytest.mark.parametrize(("case", "expected"), ENCODERS.items(), ids=[case[1] for case in ENCODERS])
def test_forward_flops_of_encoders_are_exact(case: tuple[str, str, int], expected: tuple[Any, int]) -> None:
    """Two images or texts, counted by PyTorch 2.13.0: patches are mapped, class tokens and registers are not."""
    architecture, family, S = case
    model = model_from_config({"architectures": [architecture], "model_type": family, **SMALL, **expected[0]})
    assert sum(count_flops(model, 2, S).values()) == expected[1]


@pytest.mark.parametrize("run", RUNS, ids=_name)
def test_backward_flops_are_exact(run: dict[str, Any]) -> None:
    """Backward executes twice the forward pass, and 5/2 of it in fused attention, to the integer."""
    model = model_from_config(golden("flops")["configs"][run["config"]])
    stack = "transformers" if run["attention"] == "sdpa" else "transformers-eager"
    y = whole_layout(run["B"], run["S"], "full", stack)
    executed = sum((o.backward_flops + o.weight_flops) * line.times for line in lines(model, y) for o in line.ops)
    assert executed == run["backward_flops"]


# NVIDIA NeMo and Megatron-Bridge performance tables: Llama-3-8B at 8192 (57.9 full, 51.5 causal), 70B at 4096 (449,
# 433.5), 278 in the LoRA row of the 70B model.
PUBLISHED = [
    ("llama-3-8b", 8192, "model-full", 57.9e9),
    ("llama-3-8b", 8192, "model-causal", 51.5e9),
    ("llama-3-70b", 4096, "model-full", 449e9),
    ("llama-3-70b", 4096, "model-causal", 433.5e9),
    ("llama-3-70b", 4096, "lora", 278e9),
]


@pytest.mark.parametrize(("name", "seq_len", "convention", "flops"), PUBLISHED)
def test_conventions_give_published_figures(name: str, seq_len: int, convention: str, flops: float) -> None:
    """Each convention gives the figure that its users print."""
    assert train_flops(load_model(name), seq_len, convention) == pytest.approx(flops, rel=2e-3)


def test_conventions_are_ordered() -> None:
    """Masks leave less than half the square and a bit more than half of it: 6N and LoRA leave attention out."""
    model = load_model("llama-3.1-8b")
    found = {name: train_flops(model, 8192, name) for name in CONVENTIONS}
    assert found["lora"] < found["model-causal"] < found["model-masked"] < found["model-full"]
    assert found["6n"] == 6 * count_parameters(model)


def test_korthikanti_counts_a_gpt() -> None:
    """72 B S L D^2 (1 + S / 6D + V / 12LD) is the model convention, 96 ... with one more forward pass of the layers."""
    model = load_model("gpt2-xl")
    S, L, D, V = 1024, model.num_layers, model.hidden, model.vocab
    layers = 72 * L * D**2 * (1 + S / (6 * D))
    head = 6 * D * V
    assert train_flops(model, S) == pytest.approx(layers + head, rel=1e-12)
    assert train_flops(model, S, recompute="full") == pytest.approx(layers * 4 / 3 + head, rel=1e-12)


def test_recompute_adds_the_forward_pass_of_its_regions() -> None:
    """Selective recompute adds the core once, full recompute everything but the head."""
    model = load_model("llama-3.1-8b")
    flops = count_flops(model, 1, 4096)
    added = {mode: (train_flops(model, 4096, recompute=mode) - train_flops(model, 4096)) * 4096 for mode in RECOMPUTED}
    assert added["none"] == 0
    assert added["selective"] == pytest.approx(flops["attention_core"])
    assert added["attention"] == pytest.approx(flops["attention_core"] + flops["attention"])
    assert added["full"] == pytest.approx(sum(flops.values()) - flops["head"])


@pytest.mark.parametrize("name", ["mamba2-2.7b", "mamba2-130m"])
def test_mamba_2_is_counted_as_megatron_does(name: str) -> None:
    """2 D (2 I + 2 G n + h) + 7 I n + 2 I D model FLOPs a token and layer (Megatron-LM training.py)."""
    model, m = load_model(name), load_model(name).layers[0].mixers[0]
    D, inner = model.hidden, m.inner
    layer = 2 * D * (2 * inner + 2 * m.groups * m.state + m.heads) + 7 * inner * m.state + 2 * inner * D
    forward = model.num_layers * layer + 2 * D * model.vocab
    assert train_flops(model, 4096) == pytest.approx(3 * forward, rel=1e-12)


def test_gated_delta_is_counted_as_megatron_does() -> None:
    """2 (D (2 qk + 2 v + 2 h) + c (2 qk + v) + 4 h dv^2 + D v) model FLOPs a token (Megatron-LM training.py)."""
    whole = load_model("qwen3-next-80b-a3b")
    block = next(b for b in whole.layers if not isinstance(b.mixers[0], Attention))
    m, D = block.mixers[0], whole.hidden
    model = replace(whole, layers=(replace(block, feed_forward=None, norms=1),), mtp=(), head=False)
    qk, v, heads = m.key_heads * m.key_dim, m.value_heads * m.value_dim, m.value_heads
    layer = D * (2 * qk + 2 * v + 2 * heads) + m.conv * (2 * qk + v) + 4 * heads * m.value_dim**2 + D * v
    assert train_flops(model, 4096) == pytest.approx(3 * 2 * layer, rel=1e-12)


def test_every_mode_of_a_plan_has_its_regions() -> None:
    """The modes of a plan and the regions they run again are one list."""
    assert set(RECOMPUTED) == set(RECOMPUTES)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_expert_flops_are_linear_in_the_chosen(top_k: int) -> None:
    """Experts cost in proportion to the experts a token visits; the router costs the same."""
    model = load_model("mixtral-8x7b")
    block = model.layers[0]
    one, more = (
        count_flops(replace(model, layers=(replace(block, feed_forward=replace(block.feed_forward, top_k=k)),)), 1, 128)
        for k in (1, top_k)
    )
    assert more["experts"] == top_k * one["experts"]
    assert {k: v for k, v in more.items() if k != "experts"} == {k: v for k, v in one.items() if k != "experts"}


@pytest.mark.parametrize(
    ("name", "active", "rel"),
    [("mixtral-8x7b", 12.9e9, 5e-3), ("deepseek-v3", 37e9, 0.02), ("gpt-oss-120b", 5.1e9, 0.15)],
)
def test_active_parameters_are_those_of_the_model_cards(name: str, active: float, rel: float) -> None:
    """Active parameters agree with the model cards (Mixtral 12.9 B, DeepSeek-V3 37 B, gpt-oss 5.1 B without tables)."""
    assert active_parameters(load_model(name)) == pytest.approx(active, rel=rel)


@pytest.mark.parametrize(("convention", "recompute"), [("9n", "none"), ("6n", "some"), ("9n", "some")])
def test_unknown_words_are_named_together(convention: str, recompute: str) -> None:
    """An unknown convention or mode raises one error that lists what is known."""
    with pytest.raises(InputError) as caught:
        train_flops(load_model("gpt2"), 1024, convention, recompute)
    wrong = [word for word, known in ((convention, CONVENTIONS), (recompute, RECOMPUTED)) if word not in known]
    assert all(word in str(caught.value) for word in wrong)
