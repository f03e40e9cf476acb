"""What a prediction takes beside the job: the engine, and efficiencies in place of the fitted ones."""

from __future__ import annotations

from shardwise.cost import Efficiencies
from shardwise.hardware import Device
from shardwise.records import dataclass, replace
from shardwise.serving._engine import Engine
from shardwise.serving._releases import engine_on


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingOptions:
    """What else a prediction takes: the engine, and efficiencies imposed in place of the fitted ones."""

    engine: Engine | str = "vllm"
    """An engine by its name, or by that of a release, such as vllm==0.12.0."""
    efficiencies: Efficiencies = Efficiencies()

    def on(self, device: Device) -> ServingOptions:
        """Return the options on a device, whose vendor decides which entry answers for a release."""
        return replace(self, engine=engine_on(self.engine, device))

    @property
    def caches_prefixes(self) -> bool:
        """Whether the engine is that of a server that caches prefixes."""
        return isinstance(self.engine, Engine) and self.engine.memory.caches_prefixes

    def caching(self, prefixes: bool) -> ServingOptions:
        """Return the options of a server that caches prefixes, or of one that does not."""
        return replace(self, engine=engine_on(self.engine).caching()) if prefixes else self

    def scheduling(self, ahead: bool | None) -> ServingOptions:
        """Return the options of a server that schedules steps ahead of time or not, as its engine does where not said.

        >>> engine = ServingOptions(engine="vllm").scheduling(ahead=False).engine
        >>> engine.host.scheduled_between, engine.host.between_seconds
        (True, 0.00043)
        """
        return self if ahead is None else replace(self, engine=engine_on(self.engine).scheduling(ahead))
