"""Files of several parts: no part is left out without a word, and language models are read as what they are."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import InputError
from shardwise.models import MLP, Attention, Block, Model, load_model, model_from_config
from shardwise.ops import active_parameters, count_flops, count_parameters

DATA = Path(__file__).parents[1] / "data/models/text_parts.json"
QWEN = {"model_type": "qwen2_5_vl_text", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
QWEN |= {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, "tie_word_embeddings": False}
VISION = {"depth": 2, "hidden_size": 32, "model_type": "qwen2_5_vl_vision"}
FLAT = {**QWEN, "model_type": "qwen2_5_vl", "vision_config": VISION}
NESTED = {"model_type": "qwen2_5_vl", "text_config": QWEN, "vision_config": VISION}


@cache
def goldens(section: str = "models") -> dict[str, dict[str, Any]]:
    """Files of several parts and the parameters of their language models; files of one part; files that are refused."""
    found: dict[str, dict[str, Any]] = json.loads(DATA.read_text())[section]
    return found


@pytest.mark.parametrize("name", sorted(goldens()))
def test_language_models_of_files_of_several_parts_are_what_transformers_builds(name: str) -> None:
    """Biases, norms of queries and keys, cross-attention layers, tied tables: equal to the class to the parameter."""
    assert count_parameters(model_from_config(goldens()[name]["config"], part="text")) == goldens()[name]["text"]


@pytest.mark.parametrize("name", sorted(goldens()))
def test_files_of_several_parts_are_refused_part_by_part(name: str) -> None:
    """Each part beside the language model is a problem of its own, whose remedy asks for the language model alone."""
    config = goldens()[name]["config"]
    with pytest.raises(InputError) as caught:
        model_from_config(config)
    beside = {key for key in config if key.endswith("_config") and key not in ("text_config", "language_config")}
    assert beside <= {p.field for p in caught.value.problems}
    assert all("--part text" in p.remedy for p in caught.value.problems)


@pytest.mark.parametrize("part", ["", "text"])
@pytest.mark.parametrize("name", sorted(goldens("alone")))
def test_files_of_one_part_are_what_transformers_builds(name: str, part: Any) -> None:
    """Encoders of images and hybrids of linear attention have no other part, so that --part text changes nothing."""
    entry = goldens("alone")[name]
    assert count_parameters(model_from_config(entry["config"], part=part)) == entry["parameters"]


@pytest.mark.parametrize("name", sorted(goldens("refused")))
def test_encoder_decoders_diffusion_and_sound_are_refused_by_name(name: str) -> None:
    """Whole or for its text, such a file never gives a total, and the answer names what it is not."""
    config = goldens("refused")[name]
    for part in ("", "text"):
        with pytest.raises(InputError) as caught:
            model_from_config(config, part=part)  # type: ignore[arg-type]
        assert {"model_type", "_class_name"} & {p.field for p in caught.value.problems}


@pytest.mark.parametrize("config", [FLAT, NESTED], ids=["flat", "nested"])
def test_a_language_model_alone_says_what_was_left_out(config: dict[str, Any]) -> None:
    """Flat and nested files give the same language model, and the answer names the tower that it is without."""
    model = model_from_config(config, part="text")
    assert any("only the language model" in note and "vision_config" in note for note in model.assumptions)
    core = model.layers[0].mixers[0]
    assert isinstance(core, Attention) and core.qkv_bias


def test_a_part_that_the_class_has_is_named_where_the_file_leaves_it_out() -> None:
    """A wrapper saves differences only: its tower is there though the file does not mention it."""
    with pytest.raises(InputError, match="vision_config"):
        model_from_config({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}})


@pytest.mark.parametrize(
    "more",
    [
        {"mm_vision_tower": "openai/clip-vit-large-patch14"},
        {"audio_config": {"d_model": 8}},
        {"visual": {"layers": 2}},
        {"painter": {"width": 8, "depth": 2}},
        {"image_encoder": "siglip"},
        {"is_encoder_decoder": True},
        {"add_cross_attention": True},
    ],
)
def test_parts_beside_a_flat_text_model_are_refused(more: dict[str, Any]) -> None:
    """A tower, or attention to another part, in the file of a known family is named and refused."""
    config = {**QWEN, "model_type": "qwen2", **more}
    with pytest.raises(InputError) as caught:
        model_from_config(config)
    assert [p.field for p in caught.value.problems] == list(more)
    off = {key: None if not isinstance(value, bool) else False for key, value in more.items()}
    assert count_parameters(model_from_config({**config, **off})) > 0


def test_a_class_of_several_parts_has_them_whatever_the_type_says() -> None:
    """A file of a plain type whose `architectures` name a class with a tower is not counted without it."""
    config = {**QWEN, "model_type": "qwen2", "architectures": ["LlavaForConditionalGeneration"]}
    with pytest.raises(InputError, match="vision_config"):
        model_from_config(config)
    assert count_parameters(model_from_config(config, part="text")) > 0


@pytest.mark.parametrize(
    ("task", "labels"),
    [("SequenceClassification", 3 * 64), ("TokenClassification", 3 * 65), ("QuestionAnswering", 2 * 65)],
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder_that_classifies_has_labels_in_place_of_its_head(task: str, labels: int, tied: bool) -> None:
    """Reward models and classifiers: one map of all tokens to the classes of `id2label`, and no head of words."""
    config = {**QWEN, "model_type": "qwen2", "tie_word_embeddings": tied, "id2label": {"0": "a", "1": "b", "2": "c"}}
    model = model_from_config({**config, "architectures": [f"Qwen2For{task}"]})
    words = count_parameters(model_from_config({**config, "architectures": ["Qwen2ForCausalLM"]}))
    assert count_parameters(model) == words - (not tied) * 100 * 64 + labels
    assert not model.generates


def test_the_outer_file_decides_whether_tables_are_tied() -> None:
    """The wrapper's word wins over the language model's own, and its class's where it says nothing (transformers 5)."""
    tied = model_from_config({**NESTED, "tie_word_embeddings": True}, part="text")
    assert tied.tied and not model_from_config(NESTED, part="text").tied
    of_class = {"model_type": "janus", "text_config": {**QWEN, "model_type": "qwen2"}}
    assert model_from_config(of_class, part="text").tied


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("t5-small", "a decoder that attends to an encoder"),
        ("whisper-tiny", "a decoder that attends to an encoder"),
        ("florence2-default", "a decoder that attends to an encoder"),
        ("hubert-xlarge", "convolutions over sound"),
        ("deberta-v3-base", "attention to relative positions"),
    ],
)
def test_a_refusal_names_the_part_that_no_family_has(name: str, what: str) -> None:
    """Not the keys of Llama that the file lacks, but what in it is not understood."""
    with pytest.raises(InputError, match=f"{what}, which is not understood"):
        model_from_config(goldens("refused")[name], part="text")


@pytest.mark.parametrize(("model_type", "ending"), [("vit", "ForImageClassification"), ("dinov2", "Model")])
def test_a_file_without_a_class_is_counted_with_a_head_that_the_answer_names(model_type: str, ending: str) -> None:
    """The head is the class's, which a file may leave out: the answer says which one was taken."""
    config = {**goldens("alone")["vit-base-in1k" if model_type == "vit" else "dinov2-base"]["config"]}
    assert not any("names no class" in note for note in model_from_config(config).assumptions)
    del config["architectures"]
    assert any(f"ends in {ending}" in note for note in model_from_config(config).assumptions)


def test_a_diffusion_model_is_refused_by_its_class() -> None:
    """A file of diffusers names its class, which is no language model."""
    with pytest.raises(InputError, match="FluxTransformer2DModel"):
        model_from_config({"_class_name": "FluxTransformer2DModel", "num_layers": 19})


def test_layers_with_cross_attention_are_held_and_do_not_run() -> None:
    """Without an image they own their parameters, and cost no FLOP and no cache."""
    config = goldens()["llama-3.2-11b-vision"]["config"]
    model = model_from_config(config, part="text")
    text = {**config["text_config"], "num_hidden_layers": 32, "cross_attention_layers": []}
    alone = model_from_config({**config, "text_config": text}, part="text")
    assert count_flops(model, 1, 64) == count_flops(alone, 1, 64)
    assert count_parameters(model) - count_parameters(alone) == 8 * 218_112_258
    assert active_parameters(model) == active_parameters(alone)


def test_an_unknown_part_is_refused() -> None:
    """Only text can be asked for alone."""
    with pytest.raises(InputError, match="part"):
        model_from_config(NESTED, part="vision")  # type: ignore[arg-type]


def test_a_path_takes_a_part(tmp_path: Path) -> None:
    """`Model.load` reads the language model alone of a file that it refuses whole."""
    (tmp_path / "config.json").write_text(json.dumps(NESTED))
    with pytest.raises(InputError, match="--part text"):
        load_model(tmp_path)
    assert Model.load(tmp_path, part="text").num_layers == 2


def test_a_release_with_a_tower_says_that_its_language_model_is_counted() -> None:
    """Catalogue entries are language models; where the release has more, the answer says so."""
    assert any("without its vision tower" in note for note in load_model("gemma-3-27b").assumptions)


@pytest.mark.parametrize(
    ("more", "parameters"),
    [
        ({"id2label": {str(i): str(i) for i in range(10)}}, 85_806_346),
        ({"num_labels": 10}, 85_806_346),
        ({"id2label": {str(i): str(i) for i in range(1000)}}, 86_567_656),
        ({"num_labels": 1000, "qkv_bias": False}, 86_567_656 - 3 * 768 * 12),
        ({}, 85_806_346 - 8 * 769),
    ],
)
def test_labels_set_the_classes_of_a_classifier(more: dict[str, Any], parameters: int) -> None:
    """A vision transformer has as many classes as `id2label` names, or 2; biases of queries, keys, values by a key."""
    config = {"model_type": "vit", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    config |= {"intermediate_size": 3072, "image_size": 224, "patch_size": 16}
    config |= {"architectures": ["ViTForImageClassification"], **more}
    assert count_parameters(model_from_config(config)) == parameters


@pytest.mark.parametrize(
    ("model_type", "architecture", "head"),
    [
        ("bert", "BertModel", 768 * 769),
        ("bert", "BertForSequenceClassification", 768 * 769 + 3 * 769),
        ("bert", "BertForTokenClassification", 3 * 769),
        ("bert", "BertForQuestionAnswering", 3 * 769),
        ("bert", "BertForMultipleChoice", 768 * 769 + 769),
        ("bert", "BertForNextSentencePrediction", 768 * 769 + 2 * 769),
        ("roberta", "RobertaForSequenceClassification", 768 * 769 + 3 * 769),
        ("roberta", "RobertaForTokenClassification", 3 * 769),
        ("distilbert", "DistilBertForSequenceClassification", 768 * 769 + 3 * 769),
        ("distilbert", "DistilBertModel", 0),
    ],
)
def test_the_head_of_an_encoder_is_that_of_its_class(model_type: str, architecture: str, head: int) -> None:
    """Poolers and classifiers by class of transformers 5.23.0, counted by hand: a map of n to m has m (n + 1)."""
    config = {"model_type": model_type, "hidden_size": 768, "num_hidden_layers": 1, "num_attention_heads": 12}
    config |= {"intermediate_size": 3072, "vocab_size": 100, "max_position_embeddings": 16, "type_vocab_size": 2}
    config |= {"architectures": [architecture], "id2label": {"0": "a", "1": "b", "2": "c"}}
    layer = 4 * 768 * 769 + 3072 * 769 + 768 * 3073 + 4 * 768
    table = (100 + 16 + (0 if model_type == "distilbert" else 2) + 2) * 768
    assert count_parameters(model_from_config(config)) == layer + table + head


def test_an_unknown_type_with_other_parts_is_not_read_as_llama() -> None:
    """Its layers may attend to those parts: it is refused, with the keys of Llama and its language model alone too."""
    config = {**QWEN, "model_type": "new", "hidden_act": "silu", "rms_norm_eps": 1e-6}
    assert model_from_config(config).family == "llama"
    with pytest.raises(InputError, match="has parts beside it"):
        model_from_config({"model_type": "new_vl", "text_config": config, "vision_config": VISION}, part="text")


def test_a_folder_of_a_diffusion_pipeline_is_refused(tmp_path: Path) -> None:
    """Its index names a text encoder, a denoiser and a decoder, none of which is the model."""
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(InputError, match="diffusion pipeline"):
        load_model(tmp_path)


def test_experts_of_images_are_held_and_no_token_of_text_meets_them() -> None:
    """Ernie 4.5 VL owns 64 experts of each kind a layer; a token of text meets six of its own and the shared ones."""
    model = model_from_config(goldens()["ernie-4.5-vl-28b-a3b"]["config"], part="text")
    images = 27 * (64 * 3 * 2560 * 512 + 64 * 2560 + 64)
    idle = 27 * (64 - 6) * 3 * 2560 * 1536
    assert count_parameters(model) - active_parameters(model) == images + idle


def test_a_model_made_by_hand_is_a_plain_llama() -> None:
    """What is left out of a model, a block and its parts is what a Llama is: norms, biases, head and logits."""
    config = {"model_type": "llama", "hidden_size": 64, "vocab_size": 1000, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
              "tie_word_embeddings": False, "max_position_embeddings": 512}  # fmt: skip
    block = Block(mixers=(Attention(heads=4, kv_heads=2, head_dim=16),), feed_forward=MLP(ffn=128))
    by_hand = Model(name="m", family="llama", hidden=64, vocab=1000, layers=(block,) * 2)
    assert replace(model_from_config(config, name="m"), max_context=0, assumptions=()) == by_hand
