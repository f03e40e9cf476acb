"""Finding a model: catalogue names, hub ids, paths, and what a wrong name is told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import InputError
from shardwise.models import FIELDS, Model, catalogue, load_model, model_names
from shardwise.ops import count_parameters
from shardwise.serving import checkpoint_format, find_format

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("llama-3.1-70b", "llama-3.1-70b"),
        ("LLaMA-3.1-70B", "llama-3.1-70b"),
        ("llama 3.1 70b", "llama-3.1-70b"),
        ("meta-llama/Llama-3.1-70B", "llama-3.1-70b"),
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("Meta-Llama-3.1-70B", "llama-3.1-70b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("openai-community/gpt2-xl", "gpt2-xl"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("codellama/CodeLlama-13b-Instruct-hf", "codellama-13b"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-vl-7b"),
        ("nvidia/Llama-3_3-Nemotron-Super-49B-v1_5", "llama-3.3-nemotron-super-49b"),
    ],
)
def test_a_model_is_found_however_its_name_is_written(spelled: str, name: str) -> None:
    """Case, dashes, the organisation and the suffix of a tuned variant do not matter."""
    assert load_model(spelled).name == name


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("NousResearch/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("unsloth/Llama-3.2-1B", "llama-3.2-1b"),
        ("mistral-community/Mixtral-8x22B-v0.1", "mixtral-8x22b"),
    ],
)
def test_a_copy_is_taken_for_the_model_it_is_named_after(spelled: str, name: str) -> None:
    """Another owner's copy of a model has its sizes, which is said; a checkpoint of another format is none."""
    found = load_model(spelled)
    assert found.name == name and any(spelled in note for note in found.assumptions)
    with pytest.raises(InputError):
        load_model("TheBloke/Llama-2-7B-GPTQ")


def test_every_catalogue_model_loads_and_says_where_it_comes_from() -> None:
    """Each entry has a source and no unknown key, no two names are confused, and the importer knows each field."""
    assert len(model_names()) >= 200
    for name in model_names():
        model, entry = load_model(name), catalogue()[name]
        assert model.name == name
        assert {*entry} <= {
            "config",
            "source",
            "hub",
            "also",
            "contexts",
            "parameters",
            "beside",
            "towers",
            "uncertain",
        }
        assert entry["source"].startswith("https://")
        assert not any(note.startswith(("ignored", "absent")) for note in model.assumptions), (name, model.assumptions)


def test_uncertain_fields_of_the_catalogue_are_told() -> None:
    """A model with a field that its source does not settle says so."""
    assert any("n_head" in note for note in load_model("gpt3-1.3b").assumptions)


def test_a_file_and_its_directory_describe_the_same_model(tmp_path: Path) -> None:
    """config.json and the directory around it give equal models named after the directory."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    assert load_model(folder) == load_model(folder / "config.json") == Model.load(str(folder))
    assert load_model(folder).name == "tiny"
    (tmp_path / "mine.json").write_text(json.dumps(TINY))
    assert load_model(tmp_path / "mine.json").name == "mine"


@pytest.mark.parametrize("text", ["", "{", "[1]", '"llama"', "\x00", "[" * 100_000])
def test_an_unreadable_file_is_a_problem_with_a_remedy(tmp_path: Path, text: str) -> None:
    """A file that is not a JSON object is refused by name."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError) as caught:
        load_model(tmp_path)
    assert all(problem.remedy for problem in caught.value.problems)


@pytest.mark.parametrize("word", ["llama-9-70b", "", "/nowhere/config.json", "no such model", "a/b/c", "."])
def test_a_wrong_name_is_refused_with_near_ones(word: str) -> None:
    """A name that means nothing is a problem with the field model."""
    with pytest.raises(InputError) as caught:
        load_model(word)
    assert [problem.field for problem in caught.value.problems] == ["model"]
    assert "config.json" in caught.value.problems[0].remedy


def test_near_names_are_offered() -> None:
    """The remedy of a misspelt name lists names that look like it."""
    with pytest.raises(InputError, match=r"mixtral-8x7b"):
        load_model("mixtrall-8x7b")


@pytest.mark.parametrize(
    ("word", "model", "weights"),
    [
        ("Llama-3.3-70B-Instruct-FP8", "llama-3.3-70b", "fp8"),
        ("someone/Llama-3.3-70B-Instruct-FP8-dynamic", "llama-3.3-70b", "fp8"),
        ("someone/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "llama-3.1-8b", "int8-w8a8"),
        ("someone/Llama-3.1-405B-Instruct-NVFP4", "llama-3.1-405b", "nvfp4"),
        ("someone/Qwen2.5-72B-Instruct-GPTQ-Int4", "qwen2.5-72b", "int4"),
        ("someone/Qwen2.5-72B-Instruct-GPTQ-Int8", "qwen2.5-72b", "int8"),
        ("unsloth/Meta-Llama-3.1-8B-unsloth-bnb-4bit", "llama-3.1-8b", "nf4"),
    ],
)
def test_a_quantised_copy_is_told_by_its_model_and_format(
    monkeypatch: pytest.MonkeyPatch, word: str, model: str, weights: str
) -> None:
    """A copy's own file says more than its name, so it is not guessed: the remedy has the words to ask for it."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError) as caught:
        load_model(word)
    assert f"serve {model} with --weights {weights} " in caught.value.problems[0].remedy
    assert find_format(weights).bits <= 8


@pytest.mark.parametrize(
    ("word", "name", "stored", "weights"),
    [
        ("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8", "qwen3-235b-a22b-2507", "fp8", "fp8-block"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "llama-3.3-70b", "compressed-tensors-fp8", "fp8"),
        (
            "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic",
            "llama-4-scout",
            "compressed-tensors-fp8+attention=bf16",
            "fp8+attention=bf16",
        ),
        ("RedHatAI/Qwen2.5-7B-Instruct-quantized.w8a8", "qwen2.5-7b", "compressed-tensors-int8-w8a8", "int8-w8a8"),
        ("nvidia/Llama-3.1-405B-Instruct-NVFP4", "llama-3.1-405b", "modelopt-nvfp4", "nvfp4"),
        ("nvidia/Kimi-K2.5-NVFP4", "kimi-k2.5", "modelopt-nvfp4+attention=bf16", "nvfp4+attention=bf16"),
        ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int8", "qwen2.5-72b", "gptq-int8", "int8"),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "qwen2.5-72b", "awq-int4", "int4"),
        ("unsloth/Meta-Llama-3.1-8B-bnb-4bit", "llama-3.1-8b", "bitsandbytes", "nf4"),
    ],
)
def test_a_copy_whose_file_is_known_is_loaded_as_it_stores_its_weights(
    word: str, name: str, stored: str, weights: str
) -> None:
    """Copies of owners who store all in one way, or whose files were read, need no file: Qwen's FP8 is in blocks."""
    model = load_model(word)
    assert (model.name, model.quantization, model.layers) == (word, stored, load_model(name).layers)
    assert checkpoint_format(stored).name == weights
    assert f"{word} is {name} whose weights are stored as {stored}" in model.assumptions


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "llama-3.3-70b"),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", "qwen2.5-32b"),
        ("qwen/qwen3.6-27b", "qwen3.5-27b"),
        ("moonshotai/Kimi-K2-Thinking", "kimi-k2.5"),
        ("zai-org/GLM-4.7", "glm-4.6"),
        ("MiniMax-M3", "minimax-m3"),
        ("Qwen/Qwen3.5-35B-A3B", "qwen3.6-35b-a3b"),
        ("microsoft/Phi-4-reasoning-plus", "phi-4"),
        ("mistralai/Magistral-Small-2509", "mistral-small-3.1-24b"),
        ("mistralai/Ministral-3-8B-Instruct-2512", "ministral-3-8b-instruct"),
        ("mistral-large-3", "mistral-large-3-675b"),
        ("LiquidAI/LFM2.5-1.2B-Instruct", "lfm2-1.2b"),
        ("ai21labs/AI21-Jamba-Large-1.7", "jamba-1.5-large"),
        ("nemotron-3-ultra", "nemotron-3-ultra-550b-a55b"),
        ("moonshotai/Kimi-K2.7-Code", "kimi-k2.5"),
    ],
)
def test_models_with_the_sizes_of_a_known_one_are_that(word: str, name: str) -> None:
    """Hub ids of models tuned from another, or released anew with the same sizes, are those of the catalogue."""
    assert load_model(word).name == name


def test_a_hub_id_needs_the_hub_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without huggingface_hub an id outside the catalogue is refused, and says what to give instead."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match="huggingface_hub is not installed"):
        load_model("someone/something")


def test_a_hub_id_is_read_through_the_hub_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With huggingface_hub the file it fetches is read; when it fails, that is a problem and no traceback."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))

    def fetch(repo: str, file: str) -> str:
        if repo == "someone/gone":
            raise OSError("no network")
        return str(tmp_path / file)

    client: Any = types.ModuleType("huggingface_hub")
    client.hf_hub_download = fetch
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    assert load_model("someone/Tiny").name == "tiny"
    with pytest.raises(InputError, match="cannot be fetched"):
        load_model("someone/gone")


@pytest.mark.parametrize(
    ("error", "rule"),
    [
        ("GatedRepoError", "gated on the hub: accept its licence on its page, then `hf auth login` or set HF_TOKEN"),
        ("RepositoryNotFoundError", "no model of the hub, or a private one"),
        ("LocalEntryNotFoundError", "the hub is not reached"),
    ],
)
def test_what_the_hub_refuses_says_what_to_do(error: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gated model asks for its licence, one that is not there for its spelling, a lost network for neither."""

    def fetch(repo: str, file: str) -> str:
        raise type(error, (OSError,), {})

    client: Any = types.ModuleType("huggingface_hub")
    client.hf_hub_download = fetch
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    with pytest.raises(InputError, match=re.escape(rule)):
        load_model("someone/gated")


def test_loading_a_model_imports_nothing_heavy() -> None:
    """Reading a catalogue model needs the standard library alone."""
    code = (
        "import sys; from shardwise.models import load_model; load_model('qwen3-next-80b-a3b');"
        "print([m for m in ('numpy', 'torch', 'transformers', 'rich', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_fields_are_flags() -> None:
    """Every field has a type, a sentence and at least one key, and its name makes a flag."""
    assert {"hidden_size", "num_layers", "num_experts", "tied", "window"} <= set(FIELDS)
    for name, field in FIELDS.items():
        assert name == field.name and field.name.isidentifier()
        assert field.kind in (int, bool) and field.help and field.keys


@pytest.mark.parametrize(
    "word", ["/models/nothing", "../weights", "~/checkpoint", "C:\\models\\mine", "a/b/c", "model.gguf"]
)
def test_a_place_that_is_not_there_is_no_misspelt_name(word: str) -> None:
    """What is written as a path is said to be missing; no model of the catalogue that is spelt a little like it."""
    with pytest.raises(InputError) as caught:
        load_model(word)
    (problem,) = caught.value.problems
    assert problem.rule == "is no file or folder that is there"
    assert problem.remedy == "give a path to config.json or a catalogue name"


def test_a_misspelt_name_is_still_named() -> None:
    """Names that are close stand in the remedy, of a path and of a hub id too where its last part is close."""
    for word in ("llama-3.1-9b", "~/models/llama-3.1-8bb", "me/lama-3.1-8b"):
        with pytest.raises(InputError, match=r"such as llama-3\.1-8b"):
            load_model(word)


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("deepseek-v4-max", "deepseek-v4-flash"),
        ("glm-5.3-air", "glm-5.3-flash"),
        ("qwen3.5-3b", "qwen3.5-"),
        ("llama3", "llama-3-8b"),
        ("llama-70b", "llama-3.3-70b"),
        ("mistral-7b", "mistral-7b-v0.3"),
        ("gemma-27b", "gemma-3-27b"),
    ],
)
def test_a_wrong_name_is_given_its_own_series_first(word: str, first: str) -> None:
    """Another size of the series is what was meant, sooner than a name of more equal letters."""
    with pytest.raises(InputError, match=f"such as {re.escape(first)}"):
        load_model(word)


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("huihui-ai/Qwen2.5-7B-Instruct-abliterated", "a catalogue name such as qwen2.5-7b"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "a catalogue name such as llama-3.1-8b"),
        ("unsloth/gpt-oss-20b-GGUF", "serve gpt-oss-20b with --weights q4_k_m"),
        ("llama3.1:8b-instruct-q4_K_M", "serve llama-3.1-8b with --weights q4_k_m"),
        ("bartowski/Llama-3.2-3B-Instruct-Q6_K-GGUF", "serve llama-3.2-3b with --weights q6_k"),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "serve qwen3-8b with --weights nf4"),
        ("Intel/Qwen3-30B-A3B-Instruct-2507-int4-AutoRound", "serve qwen3-30b-a3b-2507 with --weights int4"),
        ("amd/Llama-3.3-70B-Instruct-MXFP4-Preview", "serve llama-3.3-70b with --weights mxfp4"),
    ],
)
def test_a_copy_that_is_not_listed_is_told_by_the_model_in_its_name(word: str, remedy: str) -> None:
    """Tuned and quantised copies name what they were made of, which says where to start without their config.json."""
    with pytest.raises(InputError) as caught:
        load_model(word)
    assert remedy in caught.value.problems[0].remedy
    if "--weights" in remedy:
        assert find_format(remedy.rpartition(" ")[2]).bits < 16


def test_a_tag_of_ollama_is_its_model() -> None:
    """Name and size stand on both sides of a colon there, and nothing in them says the format of the weights."""
    model = load_model("llama3.3:70b")
    assert model.num_layers == 80
    assert "Ollama stores most tags" in " ".join(model.assumptions)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("glm-4-32b", 32.57),
        ("moonlight-16b-a3b", 15.96),
        ("internlm2.5-20b", 19.86),
        ("exaone-3.5-32b", 32.0),
        ("falcon3-10b", 10.31),
        ("starcoderbase-7b", 7.33),
        ("llama-3.2-90b-vision", 87.67),
        ("granite-3.3-8b", 8.17),
        ("deepseek-coder-6.7b", 6.74),
        ("glm-4.5v", 106.85),
    ],
)
def test_models_that_people_type_are_as_large_as_their_checkpoints(name: str, billions: float) -> None:
    """Billions of parameters of the language model, as the hub counts the tensors of each."""
    assert count_parameters(load_model(name)) / 1e9 == pytest.approx(billions, abs=0.006)


@pytest.mark.parametrize(
    ("word", "context"),
    [
        ("qwen2.5-7b", 131072), ("Qwen/Qwen2.5-7B", 131072), ("Qwen/Qwen2.5-7B-Instruct", 32768),
        ("qwen2.5-7b-instruct", 32768), ("unsloth/Qwen2.5-7B-Instruct", 32768), ("Qwen/Qwen2.5-Math-7B", 4096),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 131072), ("Qwen/QwQ-32B", 40960), ("kimi-k2-0905", 262144),
        ("moonshotai/Kimi-K2-Instruct", 131072), ("mistralai_Devstral-Small-2507", 131072),
        ("microsoft/Phi-4-reasoning-plus", 32768), ("microsoft/phi-4", 16384),
    ],
)  # fmt: skip
def test_a_release_has_its_own_context(word: str, context: int) -> None:
    """Releases that share a model's sizes were trained to lengths of their own, which their config.json states."""
    model = load_model(word)
    assert model.max_context == context
    assert load_model(word, {"max_position_embeddings": 8192}).max_context == 8192
