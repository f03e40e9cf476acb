"""A model that users load by name, file or sizes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from os import PathLike
from typing import Any, cast

from shardwise.errors import InputError, Problem
from shardwise.field_types import typed
from shardwise.files import read_json
from shardwise.libraries import how_to_install
from shardwise.models._architecture import Architecture
from shardwise.models._contexts import released_context
from shardwise.models._copies import split_copy, stored_by
from shardwise.models._hub import why_unfetched
from shardwise.models._importer import FilePart, architecture_from_config
from shardwise.models._near_names import named_inside, names_alike
from shardwise.models._sizes import architecture_from_sizes
from shardwise.notebook import Card, CardLine
from shardwise.records import dataclass, replace
from shardwise.units import counted
from shardwise.user_catalogue import OwnFile, find_own, note_of, own_files, plain


@dataclass(frozen=True, kw_only=True, repr=False)
class Model(Architecture, Card):
    """A language model. Build one with `Model.load`."""

    def __repr__(self) -> str:
        """Return the model in one line, as a prompt shows it."""
        return f"<Model {self.name}: {self.num_layers} layers of {self.hidden}, vocabulary of {self.vocab}>"

    def _facts(self) -> Iterator[CardLine]:
        """Yield how many layers there are of each kind, by what is in them."""
        for block, count in self.kinds.items():
            parts = [*block.mixers, block.feed_forward]
            words = ", ".join(type(part).__name__ for part in parts if part is not None)
            yield CardLine(words or "nothing", counted(count, "layer"), "", count / self.num_layers)

    @classmethod
    def load(
        cls, name_or_path: str | PathLike[str], overrides: Mapping[str, Any] | None = None, *, part: FilePart = ""
    ) -> Model:
        """Return the model of a catalogue name, a config.json, a directory that holds one, or a hub id.

        A file of several parts is refused unless `part` "text" asks for its language model alone.

        >>> Model.load("gpt2").hidden
        768
        """
        return cls.of(resolve_architecture(name_or_path, overrides, part=part))

    @classmethod
    def from_sizes(cls, **fields: Any) -> Model:
        """Return the model of some sizes alone, with every default that was taken among its assumptions.

        >>> Model.from_sizes(num_layers=12, hidden_size=768, num_experts=512).layers[0].feed_forward.experts
        512
        """
        return cls.of(architecture_from_sizes(fields))

    @classmethod
    def of(cls, architecture: Architecture) -> Model:
        """Return the model of an architecture."""
        if type(architecture) is cls:
            return architecture
        return cls(**{field.name: getattr(architecture, field.name) for field in fields(architecture)})


def load_model(
    name_or_path: str | PathLike[str], overrides: Mapping[str, Any] | None = None, *, part: FilePart = ""
) -> Model:
    """Return the model of a catalogue name, a config.json, a directory that holds one, or a hub id.

    A catalogue name wins over a path of the same name; write "./gpt2" for the path. Overrides are by names of `FIELDS`.
    `part` "text" reads the language model alone of a file that has other parts beside it.

    >>> load_model("llama-3.1-70b").num_layers
    80
    >>> load_model("meta-llama/Llama-3.1-70B", {"num_layers": 2}).assumptions
    ('override: num_layers = 2 (was 80)',)
    """
    return Model.of(resolve_architecture(name_or_path, overrides, part=part))


def model_from_config(
    raw: Mapping[str, Any],
    *,
    name: str = "",
    overrides: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    part: FilePart = "",
) -> Model:
    """Return the model that a Hugging Face style configuration describes.

    A file of several parts is refused, each part named, unless `part` "text" asks for its language model alone.

    >>> keys = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    >>> model_from_config(keys).hidden
    768
    """
    return Model.of(architecture_from_config(raw, name=name, overrides=overrides, notes=notes, part=part))


def model_from_sizes(sizes: Mapping[str, Any]) -> Model:
    """Return the model of some sizes, by names of `FIELDS` and `SIZE_FIELDS`; raises `InputError` with all problems.

    >>> model = model_from_sizes({"num_layers": 96, "hidden_size": 12288, "tied": True})
    >>> model.layers[0].feed_forward.ffn, model.num_layers
    (49152, 96)
    >>> model.assumptions[0]
    'gated false: two GEMMs and biases, as GPT has; gated models have three'
    """
    return Model.of(architecture_from_sizes(sizes))


_TUNED = ("-instruct", "-chat", "-it", "-base", "-hf", "-pt", "-deduped", "-sft", "-dpo")


@typed
def resolve_architecture(
    name_or_path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None, *, part: FilePart = ""
) -> Architecture:
    """Return what `load_model` loads."""
    word = os.fspath(name_or_path)
    own = find_own("models", word)
    if own is not None:
        return _from_own(own, overrides, part)
    architecture = find_model(word)
    if architecture is not None:
        return _from_catalogue(architecture, overrides, word)
    path = os.path.expanduser(word)
    if os.path.exists(path) or word.endswith(".json"):
        return _from_path(path, overrides, part)
    copy = published_copy(word)
    if copy is not None:
        return _from_copy(word, *copy, overrides)
    copied = namesake(word) if re.fullmatch(r"\w[\w.-]*[/:][\w.-]+", word, re.ASCII) else None
    if copied is not None:
        stored = "; Ollama stores most tags without a format as q4_k_m (--weights q4_k_m)" if ":" in word else ""
        note = f"{word} is taken for {copied}, after which it is named{stored}"
        return _from_catalogue(copied, overrides, word, (note,))
    return _from_hub(word, overrides, part)


def model_names() -> tuple[str, ...]:
    """Return the names of the catalogue and of the user's, sorted.

    >>> "llama-3.1-70b" in model_names()
    True
    """
    return tuple(sorted({*catalogue(), *(own.name for own in own_files("models"))}))


def all_models() -> dict[str, dict[str, Any]]:
    """Return every entry by name, the user's in place of those of the catalogue with the same name."""
    own = own_files("models")
    return {**catalogue(), **_own_entries(own)} if own else catalogue()


@cache
def _own_entries(files: tuple[OwnFile, ...]) -> dict[str, dict[str, Any]]:
    return {file.name: {"config": _own_config(file), "source": file.path} for file in files}


def _own_config(file: OwnFile) -> Any:
    """Return the configuration in a user's file: the file, or its `config` beside a source and the like."""
    content = _read(file.path)
    nested = isinstance(content, dict) and isinstance(content.get("config"), dict) and "model_type" not in content
    return content["config"] if nested else content


def _from_own(file: OwnFile, overrides: Mapping[str, Any] | None, part: FilePart) -> Architecture:
    config = _own_config(file)
    if isinstance(config, dict) and "model_type" not in config:
        return _from_sizes(file, {**config, **(overrides or {})})
    return architecture_from_config(config, name=file.name, overrides=overrides, notes=(note_of(file),), part=part)


def _from_sizes(file: OwnFile, sizes: Mapping[str, Any]) -> Architecture:
    """Return the model of a file that states sizes alone, without a family."""
    model = architecture_from_sizes(sizes)
    return replace(model, name=file.name, assumptions=(note_of(file), *model.assumptions))


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """Return every entry by name: `config`, `hub` ids, published `parameters`, `source`, `uncertain` fields.

    `also` are other names of a model, `contexts` those of names whose release has another than the entry, `beside` the
    parts that the release has beside this language model, `towers` how many parameters those have.
    """
    with open(os.path.join(os.path.dirname(__file__), "catalogue", "models.json"), encoding="ascii") as file:
        return cast(dict[str, dict[str, Any]], json.load(file))


@cache
def _index() -> dict[str, str]:
    """Every way to say a name -> the name."""
    index = {plain(hub): name for name, entry in catalogue().items() for hub in _spellings(entry)}
    bases = {plain(_untuned(hub)): name for name, entry in catalogue().items() for hub in _spellings(entry)}
    return bases | index | {plain(name): name for name in catalogue()}


def _spellings(entry: Mapping[str, Any]) -> list[str]:
    """Return other names of a model: hub ids, with an underscore for the slash too, and their last parts."""
    hubs: list[str] = entry.get("hub", [])
    spellings = [word for hub in hubs for word in (hub, hub.replace("/", "_"), hub.rpartition("/")[2])]
    return spellings + [word for also in entry.get("also", []) for word in (also, also.replace("/", "_"))]


def find_model(word: str) -> str | None:
    """Return the catalogue name that a word means, or None; tuned variants share the sizes of their base."""
    lower = word.lower()
    if lower in catalogue():
        return lower
    return _index().get(plain(lower)) or _index().get(plain(_untuned(lower)))


def namesake(word: str) -> str | None:
    r"""Return the catalogue name after which a copy is named: on the hub, a folder, a tag of Ollama; None for none.

    >>> namesake("NousResearch/Meta-Llama-3.1-8B"), namesake("D:\\data\\Qwen2.5-7B-Instruct"), namesake("me/mine")
    ('llama-3.1-8b', 'qwen2.5-7b', None)
    >>> namesake("casperhansen/llama-3-70b-fp16"), namesake("allenai/Olmo-3-7B-Instruct-SFT")
    ('llama-3-70b', 'olmo-3-7b')
    >>> namesake("llama3.3:70b"), namesake("qwen3:30b-a3b")
    ('llama-3.3-70b', 'qwen3-30b-a3b')
    """
    own = re.split(r"[/\\]", word.rstrip("/\\"))[-1].replace(":", "-")
    return find_model(own) or find_model(re.sub(r"(?i)[-_.](fp16|bf16)$", "", own))


def quantised_copy(word: str) -> tuple[str, str] | None:
    """Return the catalogue name of a model whose quantised copy a word names, and the format of its weights.

    >>> quantised_copy("nvidia/Llama-3.1-405B-Instruct-NVFP4"), quantised_copy("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int8")
    (('llama-3.1-405b', 'nvfp4'), ('qwen2.5-72b', 'int8'))
    >>> quantised_copy("bartowski/Llama-3.2-3B-Instruct-GGUF"), quantised_copy("unsloth/Qwen3-8B-unsloth-bnb-4bit")
    (('llama-3.2-3b', 'q4_k_m'), ('qwen3-8b', 'nf4'))
    """
    name, stored = split_copy(re.split(r"[/\\]", word)[-1])
    base = namesake(name) if stored else None
    return None if base is None else (base, stored)


def published_copy(word: str) -> tuple[str, str] | None:
    """Return the catalogue name of a model whose copy on the hub is known, and how that stores it; None for others.

    >>> published_copy("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8")
    ('qwen3-30b-a3b-2507', 'fp8')
    >>> published_copy("me/Qwen3-30B-A3B-Instruct-2507-FP8")
    """
    stored, copy = stored_by(word), quantised_copy(word)
    return None if copy is None or not stored else (copy[0], stored)


def _untuned(name: str) -> str:
    """Return a name without what says that the model was tuned, which changes no size: one or two such words."""
    bare = name.lower()
    for _ in range(2):
        bare = next((bare.removesuffix(ending) for ending in _TUNED if bare.endswith(ending)), bare)
    return bare


def _from_catalogue(
    name: str, overrides: Mapping[str, Any] | None, word: str = "", more: Sequence[str] = ()
) -> Architecture:
    context = released_context(catalogue()[name], word)
    return _with(name, overrides, more, context) if overrides or more or context else _listed(name)


@cache
def _listed(name: str) -> Model:
    """Return a model of the catalogue as it is, whose counts are then made once in a process."""
    return Model.of(_with(name, None))


def _with(name: str, overrides: Mapping[str, Any] | None, more: Sequence[str] = (), context: int = 0) -> Architecture:
    """Return a model of the catalogue with overrides, more that is said of it, and the context of its release."""
    entry = catalogue()[name]
    notes = [*more, *(f"uncertain in the catalogue: {field}" for field in entry.get("uncertain", []))]
    does = "timed" if "towers" in entry else "counted"
    notes += [f"only the language model is {does}, without its {entry['beside']}"] if "beside" in entry else []
    config = entry["config"] | ({"max_position_embeddings": context} if context else {})
    model = architecture_from_config(config, name=name, overrides=overrides, notes=notes)
    return replace(model, tower_parameters=entry["towers"]) if "towers" in entry else model


def _from_copy(word: str, base: str, stored: str, overrides: Mapping[str, Any] | None) -> Architecture:
    """Return a model of the catalogue as a copy stores it, under the copy's name."""
    note = f"{word} is {base} whose weights are stored as {stored}"
    return replace(_from_catalogue(base, overrides, split_copy(word)[0], (note,)), name=word, quantization=stored)


def _from_path(path: str, overrides: Mapping[str, Any] | None, part: FilePart) -> Architecture:
    folder = os.path.isdir(path)
    file = os.path.join(path, "config.json") if folder else path
    if folder and os.path.isfile(os.path.join(path, "model_index.json")):
        raise _fail(path, "holds a diffusion pipeline (model_index.json), which is not understood")
    if not os.path.isfile(file):
        raise _fail(path, "holds no config.json" if folder else "is not a file")
    name = os.path.basename(file)
    named_by_folder = name == "config.json"
    stem = os.path.basename(os.path.dirname(os.path.realpath(file))) if named_by_folder else os.path.splitext(name)[0]
    scales = os.path.join(os.path.dirname(file), _MODELOPT)
    raw = _with_modelopt(_read(file), lambda: scales if named_by_folder else "")
    return architecture_from_config(raw, name=stem, overrides=overrides, part=part)


_MODELOPT = "hf_quant_config.json"


def _with_modelopt(raw: Any, find: Callable[[], str]) -> Any:
    """Return a configuration with what ModelOpt wrote into a file of its own, which `find` finds, if it did.

    Source: github.com/vllm-project/vllm v0.33.0 vllm/transformers_utils/config.py, get_config.
    """
    if not isinstance(raw, dict) or raw.get("quantization_config") is not None or not os.path.isfile(file := find()):
        return raw
    section = content.get("quantization") if isinstance(content := _read(file), dict) else None
    if not isinstance(section, dict):
        rule = "has no object quantization"
        raise InputError([Problem(_MODELOPT, file, rule, "write it as ModelOpt does, or take the file away")])
    return {**raw, "quantization_config": {"quant_method": "modelopt", **section}}


def _read(file: str) -> Any:
    # Python writes the limits of a time step as Infinity, which JSON does not have.
    return read_json(file, "model", constants=True)


# What begins or ends so, or has more parts than a hub id, names a file, and no name of the catalogue is meant.
_PATH = re.compile(r"[/~.\\]|[A-Za-z]:|.*\\|.*\.(json|toml|ya?ml|safetensors|gguf|bin)$|[^/]*/[^/]*/")


def _from_hub(word: str, overrides: Mapping[str, Any] | None, part: FilePart) -> Architecture:
    if _PATH.match(word):
        raise _fail(word, "is no file or folder that is there")
    if word.count("/") != 1 or not all(word.split("/")):
        raise _fail(word, "is neither a catalogue name, a path nor a hub id")
    try:
        from huggingface_hub import hf_hub_download  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        why = f"huggingface_hub is not installed to look further ({how_to_install('huggingface_hub')})"
        raise _fail(word, f"is not in the catalogue, and {why}") from None
    try:
        file = hf_hub_download(word, "config.json")
    except Exception as error:  # the hub's client raises many kinds, all meaning that there is no file to read
        raise _fail(word, why_unfetched(error)) from None

    def fetched() -> str:
        try:
            return str(hf_hub_download(word, _MODELOPT))
        except Exception:  # most have none
            return ""

    raw, name = _with_modelopt(_read(file), fetched), word.rpartition("/")[2].lower()
    return architecture_from_config(raw, name=name, overrides=overrides, part=part)


def _fail(word: str, rule: str) -> InputError:
    copy = quantised_copy(word)
    if copy is not None:
        remedy = f"give a path to its config.json, or serve {copy[0]} with --weights {copy[1]} (weights='{copy[1]}')"
        return InputError([Problem("model", word, rule, remedy)])
    own = re.split(r"[/\\]", word)[-1].lower()
    # A place is seldom a name that is spelt wrong.
    alike = 0.75 if own != word.lower() or _PATH.match(word) else 0.5
    close = named_inside(own, model_names()) or names_alike(own.removesuffix(".json"), model_names(), alike)
    such = f" such as {', '.join(close)}" if close else ""
    return InputError([Problem("model", word, rule, f"give a path to config.json or a catalogue name{such}")])
