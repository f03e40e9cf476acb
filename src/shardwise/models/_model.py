"""A model that users load by name, file or sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from os import PathLike
from typing import Any

from shardwise.models._architecture import Architecture
from shardwise.models._importer import Part, architecture_from_config
from shardwise.models._load import found_architecture
from shardwise.models._sizes import architecture_from_sizes
from shardwise.notebook import Item, Shown
from shardwise.records import dataclass
from shardwise.units import counted


@dataclass(frozen=True, kw_only=True, repr=False)
class Model(Architecture, Shown):
    """A language model. Build one with `Model.load`."""

    def __repr__(self) -> str:
        """Return the model in one line, as a prompt shows it."""
        return f"<Model {self.name}: {self.num_layers} layers of {self.hidden}, vocabulary of {self.vocab}>"

    def _facts(self) -> Iterator[Item]:
        """Yield how many layers there are of each kind, by what is in them."""
        for block, count in self.kinds.items():
            parts = [*block.mixers, block.feed_forward]
            words = ", ".join(type(part).__name__ for part in parts if part is not None)
            yield Item(words or "nothing", counted(count, "layer"), "", count / self.num_layers)

    @classmethod
    def load(
        cls, name_or_path: str | PathLike[str], overrides: Mapping[str, Any] | None = None, *, part: Part = ""
    ) -> Model:
        """Return the model of a catalogue name, a config.json, a directory that holds one, or a hub id.

        A file of several parts is refused unless `part` "text" asks for its language model alone.

        >>> Model.load("gpt2").hidden
        768
        """
        return cls.of(found_architecture(name_or_path, overrides, part=part))

    @classmethod
    def from_sizes(cls, **fields: Any) -> Model:
        """Return the model of some sizes alone, with every default that was taken among its assumptions.

        >>> Model.from_sizes(num_layers=12, hidden_size=768, num_experts=512).layers[0].feed_forward.experts
        512
        """
        return cls.of(architecture_from_sizes(fields))

    @classmethod
    def of(cls, found: Architecture) -> Model:
        """Return the model of an architecture."""
        return cls(**{field.name: getattr(found, field.name) for field in fields(found)})


def load_model(
    name_or_path: str | PathLike[str], overrides: Mapping[str, Any] | None = None, *, part: Part = ""
) -> Model:
    """Return the model of a catalogue name, a config.json, a directory that holds one, or a hub id.

    A catalogue name wins over a path of the same name; write "./gpt2" for the path. Overrides are by names of `FIELDS`.
    `part` "text" reads the language model alone of a file that has other parts beside it.

    >>> load_model("llama-3.1-70b").num_layers
    80
    >>> load_model("meta-llama/Llama-3.1-70B", {"num_layers": 2}).assumptions
    ('override: num_layers = 2 (was 80)',)
    """
    return Model.of(found_architecture(name_or_path, overrides, part=part))


def model_from_config(
    raw: Mapping[str, Any],
    *,
    name: str = "",
    overrides: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    part: Part = "",
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

    Its assumptions list every default that was taken.

    >>> model = model_from_sizes({"num_layers": 96, "hidden_size": 12288, "tied": True})
    >>> model.layers[0].feed_forward.ffn, model.num_layers
    (49152, 96)
    >>> model.assumptions[0]
    'gated false: two products and biases, as GPT has; gated models have three'
    """
    return Model.of(architecture_from_sizes(sizes))
