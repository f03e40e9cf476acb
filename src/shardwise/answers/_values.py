"""Every answer as plain values: what its command prints with `--json`, for whoever asks from Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.answers._counting import CountReport
    from shardwise.answers._energy import Energy
    from shardwise.answers._roofline_points import Roofline
    from shardwise.formats import Imported
    from shardwise.search import LoadResult, RunnerUp, ScalingRow, ServingResult, TrainingResult
    from shardwise.serving import InferReport
    from shardwise.serving.load import ServeReport
    from shardwise.training import CommReport, TrainReport


def values_of(answer: Any) -> dict[str, Any]:
    """Return an answer as its command prints it, the version of the keys first."""
    from shardwise.answers._main import SCHEMA

    tree = next(_TREES[kind.__name__] for kind in type(answer).__mro__ if kind.__name__ in _TREES)
    return {"schema": SCHEMA, **tree(answer)}


# Each answer loads what makes its values alone.


def _train(report: TrainReport) -> dict[str, Any]:
    from shardwise.answers._train import train_values

    return train_values(report)


def _infer(report: InferReport) -> dict[str, Any]:
    from shardwise.answers._infer import infer_tree

    return infer_tree(report)


def _serve(report: ServeReport) -> dict[str, Any]:
    from shardwise.answers._load_tree import load_values

    return load_values(report)


def _count(report: CountReport) -> dict[str, Any]:
    from shardwise.answers._counting import count_tree

    return count_tree(report)


def _comm(report: CommReport) -> dict[str, Any]:
    from shardwise.answers._comm_tree import comm_tree

    return comm_tree(report)


def _roofline(result: Roofline) -> dict[str, Any]:
    from shardwise.answers._roofline import roofline_tree

    return roofline_tree(result)


def _energy(used: Energy) -> dict[str, Any]:
    from shardwise.answers._energy import energy_tree

    return energy_tree(used)


def _plan_train(result: TrainingResult) -> dict[str, Any]:
    from shardwise.answers._plan_page import plan_tree

    return plan_tree(result)


def _plan_infer(result: ServingResult) -> dict[str, Any]:
    from shardwise.answers._plan_infer import serve_tree

    return serve_tree(result)


def _plan_serve(result: LoadResult) -> dict[str, Any]:
    from shardwise.answers._plan_serve import load_tree

    return load_tree(result)


def _imported(case: Imported) -> dict[str, Any]:
    from shardwise.answers._import import import_tree

    return import_tree(case)


def _runner_up(one: RunnerUp) -> dict[str, Any]:
    from shardwise.answers._plan_infer import short_serve_tree
    from shardwise.answers._plan_page import runner_up_tree, short_tree

    return runner_up_tree(one, short_serve_tree if hasattr(one.report, "ttft_seconds") else short_tree)


def _scaled(row: ScalingRow) -> dict[str, Any]:
    from shardwise.answers._plan_train import row_tree

    return row_tree(row)


_TREES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "TrainReport": _train,
    "InferReport": _infer,
    "ServeReport": _serve,
    "CountReport": _count,
    "CommReport": _comm,
    "Roofline": _roofline,
    "Energy": _energy,
    "TrainingResult": _plan_train,
    "ServingResult": _plan_infer,
    "LoadResult": _plan_serve,
    "Imported": _imported,
    "RunnerUp": _runner_up,
    "ScalingRow": _scaled,
}
