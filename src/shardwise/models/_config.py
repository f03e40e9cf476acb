"""Reading a configuration file: one checked getter per kind of value, and a record of what was read.

A `Config` never raises while a family reads it: it collects problems, hands back a harmless stand-in, and raises once
at the end, so that a person sees everything that is wrong with a file at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.errors import Problem, Problems
from shardwise.models._architecture import MOST_PREDICTIONS
from shardwise.models._fields import FIELDS, NO_EFFECT, keys_of
from shardwise.models._mixers import NormKind
from shardwise.records import dataclass

DROPOUTS = (
    *("attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop", "emb_pdrop", "dropout"),
    *("residual_dropout", "embedding_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "ffn_dropout"),
    *("attn_dropout", "resid_dropout", "embed_dropout"),
)
MOST_LAYERS = 10_000
"""Layers that a model may have: what a file or a flag states beyond is refused, or read as so many."""
MOST = 1_000_000_000
_KINDS = {key: field.kind for field in FIELDS.values() for key in field.keys}
_MISSING: Any = object()
_REQUIRED: Any = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassFacts:
    """How transformers 5.23.0 writes the class of a family, which no size of a file says: it decides what is kept.

    `normalised` is whether the weights of the chosen experts are made to sum to one, None where the file says it.
    `float_weights` keeps those in fp32, `float_router` runs the router on an fp32 copy of its input. `fused_qkv` has
    one projection for queries, keys and values; `joined_rotary` joins a rotated and an unrotated part of each head.
    `norm` is how its RMSNorm meets its weights, `chosen_softmax` whether the router's softmax is of the chosen alone.
    """

    normalised: bool | None = None
    float_weights: bool = False
    float_router: bool = False
    fused_qkv: bool = False
    joined_rotary: bool = False
    norm: NormKind = "rmsnorm"
    chosen_softmax: bool = False


class Config:
    """One configuration: the file's keys over the class defaults of its family, with overrides on top.

    `replaced` are the old values of keys that an override has changed in `raw` itself.

    >>> config = Config({"n_embd": 768}, "gpt2", overrides={"num_layers": 2})
    >>> config.size("hidden_size"), config.size("num_layers")
    (768, 2)
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        model_type: str,
        *,
        defaults: Mapping[str, Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
        replaced: Mapping[str, Any] | None = None,
    ) -> None:
        self.raw = raw
        self.model_type = model_type
        self.defaults = defaults or {}
        self.overrides = overrides or {}
        self.replaced = replaced or {}
        self.facts = ClassFacts()
        self.problems = Problems()
        self.notes: list[str] = []
        self._read: set[str] = set()
        self._accepted: set[str] = set()
        self._asked: set[str] = set()
        self._overridden: dict[str, Any] = {}
        self._defaulted: dict[str, Any] = {}

    def size(self, name: str, *keys: str, default: Any = _REQUIRED) -> int:
        """Return a whole number of at least 1; `keys` are further keys of the file, tried before the field's own."""
        key, value = self._find(name, keys)
        if value is _MISSING:
            return 1 if default is _REQUIRED and self._missing(name) else int(default)
        if value is None and default is not _REQUIRED:
            return int(default)
        return self._whole(key, value, 1)

    def half(self, name: str) -> int:
        """Return half of a number of at least 2, rounded down: a width that counts two projections."""
        number = self.size(name)
        self.expect(number > 1, name, "must be at least 2: it counts two projections", "write twice the width of one")
        return max(number // 2, 1)

    def size_of(self, name: str, key: str) -> int:
        """Return a whole number of at least 1 that only this key of the file means, or an override of the field."""
        if name in self.overrides:
            return self.size(name)
        return self.size(key)

    def count(self, name: str, *keys: str, default: Any = 0) -> int:
        """Return a whole number of at least 0; null means none."""
        key, value = self._find(name, keys)
        if value is _MISSING:
            return 0 if default is _REQUIRED and self._missing(name) else int(default)
        return 0 if value is None else self._whole(key, value, 0)

    def repeats(self, name: str, *keys: str, default: Any = 0, most: int = MOST_LAYERS) -> int:
        """Return a whole number of things that are listed one by one, so that there are not more than layers can be."""
        number = self.count(name, *keys, default=default)
        self.expect(number <= most, name, f"must be at most {most}", "write a smaller number")
        return min(number, most)

    def period(self, name: str, default: int) -> int:
        """Return after how many layers one of another kind stands."""
        number = self.repeats(name, default=default)
        self.expect(number > 0, name, "must be a whole number of at least 1", "write a whole number")
        return max(number, 1)

    def predictions(self) -> int:
        """Return the number of multi-token-prediction layers."""
        return self.repeats("num_mtp_layers", most=MOST_PREDICTIONS)

    def flag(self, name: str, *keys: str, default: bool = False) -> bool:
        """Return a truth value; null means the default."""
        key, value = self._find(name, keys)
        if value is _MISSING or value is None:
            return default
        if not isinstance(value, bool):
            self.problems.add(key, value, "must be true or false", "write true or false")
            return default
        return value

    def number(self, name: str, *keys: str, default: float) -> float:
        """Return a positive number, whole or not."""
        key, value = self._find(name, keys)
        if value is _MISSING or value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            self.problems.add(key, value, "must be a number above 0", f"write a number such as {default}")
            return default
        return value

    def scaled(self, name: str, size: int, *keys: str, default: float) -> float:
        """Return a size times the number of a field, which must be a size too."""
        factor = self.number(name, *keys, default=default)
        if factor * size <= MOST and factor * size >= 1:
            return factor * size
        key, value = self._find(name, keys)
        rule = f"times {size} must be a size from 1 to {MOST}"
        self.problems.add(key, value, rule, f"write a number such as {default}")
        return 1.0

    def probability(self, name: str) -> float:
        """Return a number from 0 to 1; absent and null mean 0."""
        key, value = self._find(name, ())
        if value is _MISSING or value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            self.problems.add(key, value, "must be a number from 0 to 1", "write a number such as 0.1")
            return 0.0
        return value

    def text(self, name: str, *keys: str, default: str = "") -> str:
        """Return a word; null means the default."""
        key, value = self._find(name, keys)
        if value is _MISSING or value is None:
            return default
        if not isinstance(value, str):
            self.problems.add(key, value, "must be text", f"write a word such as {default or 'silu'!r}")
            return default
        return value

    def sequence(self, name: str, length: int, kind: type = str) -> list[Any]:
        """Return a list with an entry for each of `length` layers, or an empty list when the file has none.

        Where an override asks for fewer layers the list is cut, and for more it is continued if it repeats with a
        period. Any other length is refused.
        """
        key, value = self._find(name, ())
        if value is _MISSING or value is None:
            return []
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(_is(kind, v) for v in value):
            word = {int: "whole numbers", str: "words", dict: "objects"}.get(kind, f"{kind.__name__} values")
            remedy = "write one entry for each layer, or leave it out"
            self.problems.add(key, value, f"must be a list of {word}", remedy)
            return []
        return self._fitted(key, list(value), length)

    def words(self, name: str) -> list[str]:
        """Return a list of words of any length, or an empty list when the file has none."""
        key, value = self._find(name, ())
        if value is _MISSING or value is None:
            return []
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(_is(str, v) for v in value):
            self.problems.add(key, value, "must be a list of words", "write one word for each layer")
            return []
        return list(value)

    def cut(self, values: list[Any], length: int) -> list[Any]:
        """Return the list cut or continued to as many layers as an override asks for."""
        return self._fitted("the layer pattern", values, length)

    def indices(self, name: str) -> list[int] | None:
        """Return a list of layer numbers, or None when the file has none."""
        key, value = self._find(name, ())
        if value is _MISSING or value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(_is(int, v) and v >= 0 for v in value):
            self.problems.add(key, value, "must be a list of layer numbers", "write whole numbers of at least 0")
            return None
        return list(value)

    def section(self, name: str) -> Config:
        """Return a nested object of the file as a configuration that shares this one's problems and notes."""
        key, value = self._find(name, ())
        if value is not _MISSING and value is not None and not isinstance(value, Mapping):
            self.problems.add(key, value, "must be an object", "write { } with its fields")
        return self._nested(value if isinstance(value, Mapping) else {})

    def sections(self, name: str, length: int) -> list[Config]:
        """Return a list of nested objects, one for each of `length` layers, as `section` returns one."""
        return [self._nested(value) for value in self.sequence(name, length, dict)]

    def _nested(self, value: Mapping[str, Any]) -> Config:
        inner = Config(value, self.model_type, overrides=self.overrides)
        inner.problems, inner.notes, inner._overridden = self.problems, self.notes, self._overridden
        inner._asked = self._asked
        return inner

    def with_text(self, name: str, text: str) -> Config:
        """Return a configuration of that one word, which shares this one's problems."""
        inner = Config({name: text}, self.model_type)
        inner.problems = self.problems
        return inner

    def has(self, name: str, *keys: str) -> bool:
        """Return whether the file or an override gives the field a value; class defaults do not count."""
        return name in self.overrides or any(self.raw.get(key) is not None for key in (*keys, *keys_of(name)))

    def accept(self, *names: str) -> None:
        """Take keys as read: the family knows them and has no use for what they say."""
        self._accepted.update(key for name in names for key in keys_of(name))

    def note(self, text: str) -> None:
        """Record something that was assumed."""
        if text not in self.notes:
            self.notes.append(text)

    def expect(self, holds: bool, name: str, rule: str, remedy: str) -> None:
        """Record a problem with a field unless the condition holds, or the field has a problem already."""
        key, value = self._find(name, ()) if not holds else (name, None)
        known = any(problem.field == key for problem in self.problems.items)
        if not holds and not known:
            self.problems.add(key, None if value is _MISSING else value, rule, remedy)

    def layers(self) -> int:
        """Return the number of layers."""
        number = self.size("num_layers")
        self.expect(number <= MOST_LAYERS, "num_layers", f"must be at most {MOST_LAYERS}", "write a smaller number")
        return min(number, MOST_LAYERS)

    def finish(self) -> tuple[str, ...]:
        """Raise every problem at once, or return what was assumed."""
        self._refuse_unused_overrides()
        self._check_unused_sizes()
        self.problems.raise_if_any()
        return tuple([*self._say_overrides(), *self.notes, *self._say_defaults(), *self._say_ignored()])

    def _find(self, name: str, keys: tuple[str, ...]) -> tuple[str, Any]:
        self._asked.add(name)
        if name in self.overrides:
            self._overridden[name] = self._in_file(name, keys)[1]
            return name, self.overrides[name]
        key, value = self._in_file(name, keys)
        if value is _MISSING:
            for other in (*keys, *keys_of(name)):
                if other in self.defaults:
                    self._defaulted[other] = self.defaults[other]
                    return other, self.defaults[other]
        return key, value

    def _in_file(self, name: str, keys: tuple[str, ...]) -> tuple[str, Any]:
        """The first key that the file holds; others that agree are read along, others that disagree are a problem."""
        present = [key for key in dict.fromkeys((*keys, *keys_of(name))) if key in self.raw]
        if not present:
            return name, _MISSING
        self._read.update(present)
        given = [key for key in present if self.raw[key] is not None] or present
        first = given[0]
        for other in given[1:]:
            if _uniform(self.raw[other]) != _uniform(self.raw[first]) and name not in self.overrides:
                rule = f"disagrees with {first} = {self.raw[first]!r}, which means the same"
                self.problems.items.append(Problem(other, self.raw[other], rule, f"keep one of {first} and {other}"))
        return first, self.raw[first]

    def _missing(self, name: str) -> bool:
        self.problems.add(name, None, "is missing", f"add {keys_of(name)[0]} to the configuration, or override {name}")
        return True

    def _whole(self, key: str, value: object, least: int) -> int:
        value = _uniform(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            over = isinstance(value, int) and value > MOST
            rule = f"must be a whole number of {f'at most {MOST}' if over else f'at least {least}'}"
            self.problems.add(key, value, rule, "write a whole number")
            return max(least, 1)
        return value

    def _fitted(self, key: str, values: list[Any], length: int) -> list[Any]:
        if len(values) == length:
            return values
        period = _period(values)
        if "num_layers" in self.overrides and (len(values) > length or period):
            verb = "cut" if len(values) > length else "repeated"
            self.note(f"{key} lists {len(values)} layers and was {verb} to {length}")
            return values[:length] if len(values) > length else [values[i % period] for i in range(length)]
        rule = f"lists {len(values)} layers where the model has {length}"
        self.problems.add(key, f"[{len(values)} entries]", rule, f"list {length} layers, or leave {key} out")
        return [*values, *[values[-1] if values else ""] * length][:length]

    def _refuse_unused_overrides(self) -> None:
        unused = {name: self.overrides[name] for name in self.overrides if name not in self._overridden}
        unused |= {key: self.raw[key] for key in self.replaced if key not in self._read}
        used = ", ".join(sorted(self._asked & set(FIELDS)))
        for name, value in unused.items():
            rule = f"is a field that {self.model_type} models have no use for"
            self.problems.add(name, value, rule, f"leave it out, or override one of: {used}")

    def _check_unused_sizes(self) -> None:
        """A size that the family has no use for must still be a size."""
        for key, value in self.raw.items():
            kind = _KINDS.get(key)
            if kind is None or value is None or key in self._read:
                continue
            if kind is int:
                self._whole(key, value, 0)
            if kind is bool and not isinstance(value, bool) and value != "qkv":
                self.problems.add(key, value, "must be true or false", "write true or false")

    def _say_overrides(self) -> list[str]:
        overridden = [(name, self.overrides[name], old) for name, old in self._overridden.items()]
        overridden += [(key, self.raw[key], old) for key, old in self.replaced.items()]
        return [
            f"override: {name} = {new!r}" + ("" if old is _MISSING or old is None else f" (was {old!r})")
            for name, new, old in overridden
        ]

    def _say_defaults(self) -> list[str]:
        defaulted = {k: v for k, v in self._defaulted.items() if v or k == "tie_word_embeddings"}
        if not defaulted:
            return []
        listing = ", ".join(f"{key} = {value!r}" for key, value in defaulted.items())
        return [f"absent from the file, so the {self.model_type} default: {listing}"]

    def not_understood(self) -> list[str]:
        """Return the keys that say something which no layer of the family takes up."""
        return [key for key in self._ignored() if self.raw[key] and set(_listed(self.raw[key])) != {"full_attention"}]

    def _ignored(self) -> list[str]:
        return sorted(k for k in self.raw if k not in self._read | self._accepted | NO_EFFECT and not k.startswith("_"))

    def _say_ignored(self) -> list[str]:
        ignored = self._ignored()
        return [f"ignored: {', '.join(ignored)}"] if ignored else []


def _listed(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else []


def _uniform(value: object) -> object:
    """A list of one number for each layer, all the same, means that number."""
    if isinstance(value, list) and len(value) > 1 and all(_is(int, one) and one == value[0] for one in value):
        return value[0]
    return value


def _is(kind: type, value: object) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _period(values: list[Any]) -> int:
    """The length of the pattern that the list repeats at least twice, or 0."""
    for period in range(1, len(values) // 2 + 1):
        if all(values[i] == values[i - period] for i in range(period, len(values))):
            return period
    return 0
