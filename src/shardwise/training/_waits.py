"""The seconds of a step by axis, exposed and hidden, as every report shows them."""

from __future__ import annotations

from shardwise.training._evaluate import Evaluation


def slowest_stage(evaluation: Evaluation[float]) -> int:
    """Return the index of the run of stages that sets the pace of the pipeline."""
    busy = [s.busy for s in evaluation.step.stages]
    return busy.index(max(busy))


def axis_seconds(evaluation: Evaluation[float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return seconds of a step that messages take by axis: (exposed, hidden).

    They are those of the slowest stage, messages of data parallelism and between stages included.
    """
    step = evaluation.step
    slowest = step.stages[slowest_stage(evaluation)]
    times = step.pipeline.busy / slowest.busy
    exposed = {axis: times * s for axis, s in slowest.exposed.items()}
    hidden = {axis: times * s for axis, s in slowest.hidden.items()}
    _add(exposed, "pp", step.pipeline.exposed_send)
    _add(exposed, "dp", step.gradients_exposed + step.parameters_exposed)
    _add(hidden, "dp", step.gradients_hidden + step.parameters_hidden)
    return exposed, hidden


def _add(into: dict[str, float], axis: str, seconds: float) -> None:
    into[axis] = into.get(axis, 0.0) + seconds
