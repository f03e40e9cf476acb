"""What an importer hands back: a case, and what became of every word of the file that it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from shardwise.errors import InputError, Problem, Problems
from shardwise.hardware import Cluster
from shardwise.models import Model
from shardwise.plans import Plan, Stack, Training
from shardwise.records import dataclass

if TYPE_CHECKING:
    from shardwise.training import TrainReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One argument of a file: how it is spelled there, what it says, and what it set or why it set nothing.

    >>> Reading(argument="--swiglu", value=True, meaning="activation").argument
    '--swiglu'
    """

    argument: str
    value: object
    meaning: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """A case read from another system's files; `dp` 0 in the plan and `num_devices` 0 mean that the file is silent.

    `understood` set something, `assumed` is what the file leaves open, `ignored` names what was read and changes
    nothing here with the reason, `silent` what changes neither bytes nor seconds, `unknown` what the system itself
    does not have. `overlap` is whether communication runs beside compute at all.
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
    understood: tuple[Reading, ...] = ()
    assumed: tuple[str, ...] = ()
    ignored: tuple[Reading, ...] = ()
    silent: tuple[str, ...] = ()
    unknown: tuple[Reading, ...] = ()

    def train(self, cluster: Cluster | str) -> TrainReport:
        """Return the training report of the case; a device named alone is taken as often as the launch has devices.

        >>> from shardwise.formats import from_megatron_args
        >>> args = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128}
        >>> args |= {"max_position_embeddings": 128, "micro_batch_size": 1, "vocab_size": 100, "world_size": 8}
        >>> from_megatron_args(args | {"bf16": True}).train("h100-sxm-80gb").fits
        True
        """
        from shardwise.training import Options, train

        if self.model is None:
            rule, remedy = "is missing, and the file has none", "replace(case, model=...)"
            raise InputError([Problem("model", None, rule, remedy)])
        if isinstance(cluster, str):
            counted = cluster if cluster[:1].isdigit() else f"{self.num_devices or 1}x{cluster}"
            cluster = Cluster.parse(counted)
        return train(
            self.model, cluster, self.plan, self.job, Options(stack=self.stack, accumulation=self.accumulation)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Around:
    """What is said beside a file: devices in place of its launch's, further arguments, unknown ones to skip.

    `variables` are those that the caller of a script would have set. `follow` lets the file name others that are not
    below it.
    """

    num_devices: int = 0
    more: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    follow: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    def settings_alone(self, source: str) -> None:
        """Raise `InputError` where arguments or variables of a script stand beside a file of settings."""
        problems = Problems()
        if self.more:
            problems.add("from_args", " ".join(self.more), f"cannot follow {source}", "leave it out")
        if self.variables:
            said = ",".join(f"{name}={value}" for name, value in self.variables.items())
            problems.add("set", said, f"has no effect: {source} is no script", "leave it out")
        problems.raise_if_any()


PLAIN = Around()
"""A file alone."""
