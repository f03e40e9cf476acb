"""What an importer hands back: a case, and what became of every word of the file that it came from."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.models import Model
from shardwise.plans import Plan, Stack, Training


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Around:
    """What is said beside a file: devices in place of its launch's, further arguments, unknown ones to skip."""

    num_devices: int = 0
    more: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
