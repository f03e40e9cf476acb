"""Every legal plan of a space as a frame, of training or of serving."""

from __future__ import annotations

from shardwise.errors import InputError, Problem
from shardwise.field_types import typed
from shardwise.frames import Frame
from shardwise.hardware import Cluster
from shardwise.models import Model
from shardwise.plans import Serving, Training
from shardwise.search._frames import training_frame
from shardwise.search._options import SearchOptions
from shardwise.search._serving import plan_serving
from shardwise.search._serving_space import ServingSpace
from shardwise.search._space import SearchSpace
from shardwise.search._training import work_of


@typed
def frame(
    model: Model,
    cluster: Cluster,
    job: Training | Serving,
    space: SearchSpace | ServingSpace | None = None,
    options: SearchOptions | None = None,
) -> Frame:
    """Return every legal plan of a space as a row: its fields, what it takes and what it costs, whether it fits or not.

    >>> from shardwise.models import load_model
    >>> plans = frame(load_model("gpt2"), Cluster.parse("4xa100"), Training(seq_len=1024, global_batch=64))
    >>> len(plans) > 1000, bool(plans["step_seconds"].min() > 0)
    (True, True)
    """
    if isinstance(job, Serving):
        if isinstance(space, SearchSpace):
            raise InputError([Problem("space", "SearchSpace", "is of training plans", "give a ServingSpace")])
        return plan_serving(model, cluster, job, space, options).frame()
    if isinstance(space, ServingSpace):
        raise InputError([Problem("space", "ServingSpace", "is of deployments", "give a SearchSpace")])
    task = work_of(model, cluster, job, space, options)
    return training_frame([one.grid for one in task.tasks], task.options)
