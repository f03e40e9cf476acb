"""The phases of a step of preferences or rewards on the trainer's devices: seconds of each, and its fullest moment."""

from __future__ import annotations

from dataclasses import replace

from shardwise.models import Model
from shardwise.plans import OBJECTIVES, Training
from shardwise.records import dataclass
from shardwise.training._case import TrainingCase
from shardwise.training._evaluate import Evaluation
from shardwise.training._step import scoring_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One phase of a step: what runs, for how long, and the bytes of tensors at its fullest."""

    name: str
    seconds: float
    peak_bytes: float


def with_values(model: Model, job: Training) -> Model:
    """Return the model that a job trains: one value a token in place of the vocabulary where rewards are learned.

    The product of that one value is within that of a neighbour.
    """
    values = job.method in OBJECTIVES and OBJECTIVES[job.method].values
    return replace(model, head=False, tied=False) if values else model


def phases_of(case: TrainingCase, found: Evaluation[float]) -> tuple[Phase, ...]:
    """Return the phases of a step in their order, rollouts left out; none where next tokens are trained on.

    Log-probabilities of the policy that generated and of the reference, and values of the critic, are forward passes
    over the batch (arXiv:2402.03300 algorithm 1); what is left of the step trains, the critic behind the policy.
    """
    recipe, objective = case.recipe, case.objective
    if not recipe.scorings and not objective.critic:
        return ()
    scoring = float(scoring_seconds(found.sizes, found.step.stages))
    peak = max(float(m.moments.get("scoring", 0.0)) for m in found.memory)
    names = ["old log-probabilities"] * objective.rollout + ["values"] * objective.critic
    names += ["reference log-probabilities"] * (recipe.scorings - len(names))
    rest = found.step.total - recipe.scorings * scoring
    update = max(value for m in found.memory for name, value in m.moments.items() if name != "scoring")
    models = ["policy update", *["critic update"] * recipe.critics] if objective.critic else ["update"]
    return (
        *(Phase(name=name, seconds=scoring, peak_bytes=peak) for name in names),
        *(Phase(name=name, seconds=rest / len(models), peak_bytes=float(update)) for name in models),
    )
