"""The parts of a task on Ray: this machine's cores, or a cluster that runs already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.records import dataclass
from shardwise.search._executor import MOMENT, Part, PartTask

# Parts in flight for each core: one runs while the next one is on its way.
_AHEAD = 2
# Times that a part is given out where workers or nodes die under it.
_TRIES = 10


def _called(work: PartTask, part: Part) -> Any:
    return work([part])


@dataclass(frozen=True, slots=True)
class RayExecutor:
    """Evaluates on Ray, with `count` cores of this machine or, with an address, on the cluster that is there.

    A part whose worker or node died is given out again.
    """

    count: int
    address: str = ""

    def run(self, work: PartTask, parts: Sequence[Part]) -> Iterator[Any]:
        """Yield the results as they come."""
        if not parts:
            return
        import ray

        own: dict[str, Any] = {} if self.address else {"num_cpus": self.count, "include_dashboard": False}
        ray.init(address=self.address or "local", log_to_driver=False, logging_level="ERROR", **own)
        try:
            yield from self._results(ray, work, parts)
        finally:
            ray.shutdown()

    def _results(self, ray: Any, work: PartTask, parts: Sequence[Part]) -> Iterator[Any]:
        remote, task = ray.remote(max_retries=0)(_called), ray.put(work)
        left, tries = list(reversed(parts)), dict.fromkeys(parts, 0)
        running: dict[Any, Part] = {}
        most = _AHEAD * max(1, int(ray.cluster_resources().get("CPU", self.count)))
        while left or running:
            while left and len(running) < most:
                part = left.pop()
                running[remote.remote(task, part)] = part
            ready, _ = ray.wait(list(running), timeout=MOMENT)
            for one in ready:
                part = running.pop(one)
                try:
                    result = ray.get(one)
                except ray.exceptions.RayTaskError:
                    raise
                except ray.exceptions.RayError:
                    tries[part] += 1
                    if tries[part] >= _TRIES:
                        raise
                    left.append(part)
                    continue
                yield result
