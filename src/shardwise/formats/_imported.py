"""What an importer hands back, what became of every word of its file, and reading the keys of one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Any

from shardwise.errors import InputError, Problem, Problems, near, plain
from shardwise.files import check_tree, own_table
from shardwise.hardware import Cluster
from shardwise.models import Model, load_model
from shardwise.notebook import PlainValues
from shardwise.plans import Plan, Settings, Stack, Training
from shardwise.records import dataclass, replace

if TYPE_CHECKING:
    from shardwise.training import TrainReport


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadArgument:
    """One argument of a file: how it is spelled there, what it says, and what it set or why it set nothing.

    >>> ReadArgument(argument="--swiglu", value=True, meaning="activation").argument
    '--swiglu'
    """

    argument: str
    value: object
    meaning: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported(PlainValues):
    """A case read from another system's files; `dp` 0 in the plan and `num_devices` 0 mean that the file is silent.

    `understood` set something, `assumed` is what the file leaves open, `ignored` names what was read and changes
    nothing here with the reason, `silent` what changes neither bytes nor seconds, `unknown` what the system itself
    does not have. `named` is the model as the file names it, `engine_share` the part of each device's memory that an
    engine of rollouts keeps beside the trainer.
    """

    system: str
    version: str
    model: Model | None
    plan: Plan
    job: Training
    stack: Stack
    num_devices: int = 0
    devices_per_node: int = 0
    accumulation: int = 0
    source: str = ""
    named: str = ""
    understood: tuple[ReadArgument, ...] = ()
    assumed: tuple[str, ...] = ()
    ignored: tuple[ReadArgument, ...] = ()
    silent: tuple[str, ...] = ()
    unknown: tuple[ReadArgument, ...] = ()
    engine_share: float = 0.0

    def beside_engine(self, settings: Settings, cluster: Cluster) -> Settings:
        """Return settings with the memory that the engine of rollouts keeps of each device, where none are stated."""
        if not self.engine_share or settings.rollout:
            return settings
        kept = self.engine_share * float(cluster.device.memory_bytes)
        return replace(settings, rollout="awake", rollout_bytes=kept)

    def train(self, cluster: Cluster | str) -> TrainReport:
        """Return the training report of the case, with the rollouts of its step where its settings time them.

        A device named alone is taken as often as the launch has devices.

        >>> from shardwise.formats import from_megatron_args
        >>> args = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128}
        >>> args |= {"max_position_embeddings": 128, "micro_batch_size": 1, "vocab_size": 100, "world_size": 8}
        >>> from_megatron_args(args | {"bf16": True}).train("h100-sxm-80gb").fits
        True
        """
        from shardwise.training import TrainingOptions, train

        if self.model is None:
            rule, remedy = "is missing, and the file has none", "replace(case, model=...)"
            raise InputError([Problem("model", None, rule, remedy)])
        if isinstance(cluster, str):
            counted = cluster if cluster[:1].isdigit() else f"{self.num_devices or 1}x{cluster}"
            cluster = Cluster.parse(counted)
        stack = replace(self.stack, settings=self.beside_engine(self.stack.settings, cluster))
        options = TrainingOptions(stack=stack, accumulation=self.accumulation)
        report = train(self.model, cluster, self.plan, self.job, options)
        if not stack.settings.times_rollouts:
            return report
        from shardwise.search import timed_rollouts

        return timed_rollouts(report)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportContext:
    """What is said beside a file: devices in place of its launch's, further arguments, unknown ones to skip.

    `variables` are those that the caller of a script would have set. `follow` lets the file name others that are not
    below it. `model` is named in place of the file's.
    """

    num_devices: int = 0
    more: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    follow: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    model: str = ""

    def named_model(self) -> Model | None:
        """Return the model that is named, None where there is none, or none of that name."""
        try:
            return load_model(self.model) if self.model else None
        except InputError:
            return None

    def settings_alone(self, source: str) -> None:
        """Raise `InputError` where arguments or variables of a script stand beside a file of settings."""
        problems = Problems()
        if self.more:
            problems.add("from_args", " ".join(self.more), f"cannot follow {source}", "leave it out")
        if self.variables:
            settings = ",".join(f"{name}={value}" for name, value in self.variables.items())
            problems.add("set", settings, f"has no effect: {source} is no script", "leave it out")
        problems.raise_if_any()


PLAIN = ImportContext()
"""A file alone."""


@cache
def table(name: str) -> dict[str, Any]:
    """Return the table of a system: what it was checked against, keys that are read, silent, or left out and why."""
    return {"reasons": {}, "silent": {"keys": []}, **own_table(__file__, name)}


def top_level(text: str) -> frozenset[str]:
    r"""Return the keys that stand at the left edge of a YAML file, by which a system is known.

    >>> sorted(top_level("base_model: a\nfsdp_config:\n  x: 1"))
    ['base_model', 'fsdp_config']
    """
    return frozenset(re.findall(r"(?m)^([A-Za-z_][\w.-]{0,80})[ \t]*:", text))


SIZES = re.compile(
    r"expert|head|layer|hidden|lora|dim\b|vocab|parallel|recompute|offload|window|bias|norm|batch_size|seq_?len|cp_size"
)
"""Words in a setting's name that speak of sizes: a setting so called that nobody knows may change the answer."""
NOTHING = (None, False, "", "none", "None")
"""Values by which a file says that a setting is not used."""
MOST_WHOLE = 10**15
_KINDS: dict[type, str] = {list: "a list", type(None): "null", str: "a text", bool: "true or false"}
_KINDS |= {int: "a number", float: "a number"}


class Keys:
    """The settings of one file, by dotted path, with a record of what was read.

    >>> keys = Keys({"zero_optimization": {"stage": 2}}, "deepspeed.toml")
    >>> keys.whole("zero_optimization.stage", least=0), [r.meaning for r in keys.understood()]
    (2, ['sharding'])
    """

    def __init__(self, tree: Mapping[str, Any], name: str, source: str = "settings") -> None:
        if not isinstance(tree, Mapping):
            kind = _KINDS.get(type(tree), "a single value")
            rule = f"must hold an object of keys and values, and holds {kind}"
            raise InputError([Problem("file", source, rule, 'write for example {"train_batch_size": 64}')])
        check_tree(tree, source, "file")
        self.table = table(name)
        self.values = dict(flat_keys(tree))
        self.problems = Problems()
        self.assumed: list[str] = []
        self.engine_share = 0.0
        self.model = ""
        self.named: list[tuple[str, Imported]] = []

    def renew(self) -> None:
        """Read the names that other releases have for settings as those of this one, where these are not given."""
        for other, name in self.table["other_releases"].items():
            if other in self.values and name not in self.values:
                self.values[name] = self.values.pop(other)
                self.assumed.append(f"{other}: what another release calls {name}")

    def with_file(self, name: str, case: Imported) -> Imported:
        """Return the case of a file that these settings name, whose words are told with theirs."""
        self.named.append((name, case))
        return case

    def _of_named(self, kind: str) -> Iterator[ReadArgument]:
        """Yield the readings of a kind of the files that are named, each under the name of its file."""
        for name, case in self.named:
            yield from (replace(one, argument=f"{name}: {one.argument}") for one in getattr(case, kind))

    def raw(self, path: str) -> Any:
        """Return a value, or None where there is none, or the program that reads the file fills it in."""
        value = self.values.get(path)
        return None if value == "auto" else value

    def fail(self, path: str, rule: str, remedy: str) -> None:
        """Record a problem of a key."""
        value = self.values.get(path)
        self.problems.add(path, plain(value), rule, remedy)

    def whole(self, path: str, least: int = 1, rest: bool = False) -> int | None:
        """Return a whole number, or None where there is none or -1 stands for the rest."""
        value = self.raw(path)
        if value is None or (value == -1 and rest):
            return None
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and least <= value <= MOST_WHOLE and value == int(value):
            return int(value)
        most = f" and at most {MOST_WHOLE}" if number and value > MOST_WHOLE else ""
        self.fail(path, f"must be a whole number of at least {least}{most}", "write a whole number")
        return None

    def flag(self, path: str) -> bool | None:
        """Return a truth value, or None where there is none."""
        value = self.raw(path)
        if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no"):
            return value.lower() in ("true", "yes")
        if value is not None and not isinstance(value, bool):
            self.fail(path, "must be true or false", "write true or false")
            return None
        return value

    def word(self, path: str) -> str:
        """Return a word in lower case, empty where there is none."""
        value = self.raw(path)
        return "" if value is None else str(value).lower()

    def understood(self) -> tuple[ReadArgument, ...]:
        """Return what set something; a value that the reader of the file fills in is said so."""
        read = self.table["read"]
        return tuple(
            ReadArgument(argument=p, value=plain(v), meaning=read[p]) for p, v in self.values.items() if p in read
        )

    def ignored(self) -> tuple[ReadArgument, ...]:
        """Return what is left out of account, with the reason."""
        arguments = []
        for path, value in self.values.items():
            reason = next((r["because"] for r in self.table["reasons"].values() if matches(path, r["keys"])), "")
            if reason and path not in self.table["read"] and value not in (None, False, "none", "", 0, "auto", "NO"):
                arguments.append(ReadArgument(argument=path, value=plain(value), meaning=reason))
        return tuple(arguments)

    def silent(self) -> tuple[str, ...]:
        """Return the keys that change neither bytes nor seconds."""
        return tuple(path for path in self.values if self._known(path) == "silent")

    def unknown(self) -> tuple[ReadArgument, ...]:
        """Return the keys that the system does not have."""
        reason = f"not a setting of {self.table['checked']['system']}"
        return tuple(
            ReadArgument(argument=path, value=plain(value), meaning=reason)
            for path, value in self.values.items()
            if not self._known(path)
        )

    def keep_engine(self, path: str, usual: float) -> None:
        """Record the share of each device that vLLM keeps beside the trainer, where it does not sleep."""
        share = self.raw(path)
        share = usual if share is None else share
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            self.fail(path, "must be a share of a device's memory above 0 and at most 1", f"write {usual}")
            return
        self.engine_share = float(share)
        self.assumed.append(f"vLLM keeps {share} of each device's memory beside the trainer ({path})")

    def case(self, source: str, **fields: Any) -> Imported:
        """Return a case of these settings with what became of each; raises `InputError` with everything wrong."""
        for one in self.unknown():
            close = near(one.argument, self.table["read"], 1, 0.9)
            if close and not one.argument.startswith(close[0]) and one.value not in NOTHING:
                self.fail(one.argument, f"is {one.meaning}", f"did you mean {close[0]}?")
        self.problems.raise_if_any()
        return Imported(
            system=self.table["checked"]["system"],
            version=self.table["checked"]["version"],
            source=source,
            named=self.model,
            understood=(*self.understood(), *self._of_named("understood")),
            assumed=(*self.assumed, *(f"{name}: {text}" for name, case in self.named for text in case.assumed)),
            ignored=(*self.ignored(), *self._of_named("ignored")),
            silent=self.silent(),
            unknown=(*self.unknown(), *self._of_named("unknown")),
            engine_share=self.engine_share,
            **fields,
        )

    def _known(self, path: str) -> str:
        if path in self.table["read"]:
            return "read"
        if any(matches(path, r["keys"]) for r in self.table["reasons"].values()):
            return "reasons"
        return "silent" if matches(path, self.table["silent"]["keys"]) else ""


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Return whether a dotted path is one of the patterns.

    >>> matches("loss.beta", ["loss.*"]), matches("loss", ["loss.*"])
    (True, False)
    """
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def changes_nothing(word: str) -> bool:
    """Return whether a word of training programs changes neither bytes nor seconds, as the Trainer's table has it.

    >>> changes_nothing("lr"), changes_nothing("learning_rate"), changes_nothing("lora_r")
    (True, True, False)
    """
    return matches(word, ("lr", "lr_*", "min_lr", *table("transformers.toml")["silent"]["keys"]))


def flat_keys(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested settings by dotted path."""
    for key, value in tree.items():
        inner = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            yield from flat_keys(value, inner)
        else:
            yield inner, value
