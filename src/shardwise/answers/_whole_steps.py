"""Training by whole steps: what trains, and the rollouts that a serving engine generates for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.errors import InputError, Problem, plain

if TYPE_CHECKING:
    from shardwise.hardware import Cluster
    from shardwise.models import Model
    from shardwise.plans import Plan, Training
    from shardwise.search import Executor, SearchOptions, SearchSpace, SearchTask, TrainingResult
    from shardwise.training import TrainingOptions, TrainReport


def train(
    model: Model, cluster: Cluster, plan: Plan, job: Training, options: TrainingOptions | None = None
) -> TrainReport:
    """Return memory, time and cost of one training plan; raises `InputError` with every problem of the input.

    A step of rewards has its rollouts where the tokens of a prompt are stated (`Settings.rollout_prompt_tokens`): the
    plan fits where trainer and engine do.

    >>> from shardwise import Cluster, Plan, Training, load_model, train
    >>> model, cluster = load_model("llama-3.1-8b"), Cluster.parse("8xh100-sxm-80gb")
    >>> report = train(model, cluster, Plan(dp=0, sharding="fsdp"), Training(seq_len=4096, global_batch=64))
    >>> report.plan.dp
    8
    """
    from shardwise.training import train as trained

    return whole(trained(model, cluster, plan, job, options))


def whole(report: TrainReport) -> TrainReport:
    """Return a report with the rollouts of its step where these are timed, which loads serving; raises `InputError`."""
    if not report.case.stack.settings.times_rollouts:
        return report
    from shardwise.search import timed_rollouts

    return timed_rollouts(report)


def plan_training(
    model: Model,
    cluster: Cluster | Sequence[Cluster],
    job: Training,
    space: SearchSpace | None = None,
    options: SearchOptions | None = None,
    *,
    executor: Executor | None = None,
) -> TrainingResult:
    """Return the best plans of a space for a training job; raises `InputError` where the job or the space is wrong.

    The answer is the optimum of the model over the space: plans are left out only where a law forbids them, they
    take more memory than there is or they break a limit. Of several clusters, plans on all of them are ranked
    together. Steps of rewards have their rollouts, as in `train`.

    >>> from shardwise import Cluster, Training, load_model, plan_training
    >>> job = Training(seq_len=1024, global_batch=64)
    >>> result = plan_training(load_model("gpt2"), Cluster.parse("4xa100-sxm-80gb"), job)
    >>> result.counts.fitting > 0 and result.best[0].fits
    True
    """
    from shardwise.search import SerialExecutor, work_of

    if executor is not None and not callable(getattr(executor, "run", None)):
        remedy = "give one of shardwise.search, or leave it out"
        raise InputError([Problem("executor", plain(executor), "must have the method run of an Executor", remedy)])
    return run_search(work_of(model, cluster, job, space, options), executor or SerialExecutor())


def run_search(
    work: SearchTask, executor: Executor, progress: Callable[[Any, float], None] | None = None
) -> TrainingResult:
    """Return the answer of a search, whose reports have the rollouts of their steps where these are timed.

    Limits are of whole steps. Plans are ranked with the least that an engine takes on their devices: how the trainer
    is laid out tells only the bytes that it leaves the engine. Loads serving for rollouts.
    """
    from shardwise.search import count_generation, finished, least_generation, searched, timed_rollouts

    if not work.grid.case.stack.settings.times_rollouts:
        return searched(work, executor, progress)
    count_generation(work, least_generation)
    return finished(searched(work, executor, progress), timed_rollouts)
