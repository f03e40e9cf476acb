"""The communication report as plain values, which `--json` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from shardwise.answers._answer import whole_bytes
from shardwise.answers._train_tree import cluster_tree, stage_tree
from shardwise.training import AxisMessages, CommReport, Flow, LayerTable, Message

if TYPE_CHECKING:
    from shardwise.training import CommReport


SCOPE = (
    "numbers of an axis are of one device, on the stages that `reference` names, unless they stand under `cluster`: "
    "those are sums over all devices. `bytes` are of the whole tensor of a message, `sent_bytes` what a device puts on "
    "its links for it on a ring. A send counts where it leaves."
)


def comm_tree(communication: CommReport) -> dict[str, Any]:
    """Return the communication report as plain values: counts, bytes, seconds, ranks.

    >>> from shardwise import Cluster, Plan, Training, load_model
    >>> from shardwise.training import comm
    >>> job = Training(seq_len=1024, global_batch=16)
    >>> tree = comm_tree(comm(load_model("gpt2"), Cluster.parse("4xh100"), Plan(tp=2, dp=0), job))
    >>> tree["axes"]["tp"]["groups"]
    [[0, 1], [2, 3]]
    """
    report, runs = communication.report, communication.report.evaluation.stages
    at = runs[communication.reference]
    tree = {
        "model": report.case.model.name,
        "cluster": cluster_tree(report),
        "plan": {
            **asdict(report.plan),
            "precision": report.case.recipe.precision.name,
            "stack": report.case.stack.name,
        },
        "job": asdict(report.job),
        "fits": report.fits,
        "step_seconds": report.step_seconds,
        "micro_batches": report.evaluation.sizes.num_micro,
        "scope": SCOPE,
        "reference": {"first_stage": at.position, "stages": at.count},
        "axes": {name: _axis(communication, axis) for name, axis in communication.axes.items()},
        "total": total_tree(communication),
        "places": [communication.place(rank) for rank in range(report.plan.num_devices)],
        "links": _links(communication),
        "whole": _whole(communication),
        "rank": _rank(communication, report.peak_stage),
        "stages": [_stage(communication, i) for i in range(len(runs))],
        "gemms": [asdict(p) for p in communication.gemms],
        "assumptions": list(report.assumptions),
    }
    return cast(dict[str, Any], whole_bytes(tree))


def total_tree(report: CommReport) -> dict[str, Any]:
    """Return messages and bytes of all axes together: of the device of reference and of the cluster."""
    names = ("messages_per_step", "bytes_per_step", "sent_bytes_per_step")
    axes = report.axes.values()
    return {
        **{name: sum(getattr(a, name) for a in axes) for name in names},
        "cluster": {name: sum(_cluster(a)[name] for a in axes) for name in names},
        "exposed_seconds": sum(a.exposed_seconds for a in axes),
        "hidden_seconds": sum(a.hidden_seconds for a in axes),
    }


def _cluster(axis: AxisMessages) -> dict[str, float]:
    return {
        "messages_per_step": axis.cluster_messages,
        "bytes_per_step": axis.cluster_bytes,
        "sent_bytes_per_step": axis.cluster_sent_bytes,
    }


def _axis(report: CommReport, axis: AxisMessages) -> dict[str, Any]:
    names = ("title", "size", "num_groups", "messages_per_micro_batch", "messages_per_step", "bytes_per_step")
    more = ("sent_bytes_per_step", "exposed_seconds", "hidden_seconds", "tiers")
    runs = report.report.evaluation.stages
    return {
        **{name: getattr(axis, name) for name in (*names, *more)},
        "cluster": _cluster(axis),
        "groups": [list(group) for group in report.groups(axis.name)],
        "messages": [
            {"first_stage": s.position, "stages": s.count, **flow_tree(flow)}
            for i, s in enumerate(runs)
            for flow in report.on(axis.name, i)
        ],
    }


def message_tree(message: Message) -> dict[str, Any]:
    """Return one message as plain values."""
    names = ("part", "where", "phase", "verb", "tensor", "size_bytes", "sent_bytes", "seconds")
    return {**{name: getattr(message, name) for name in names}, "shape": list(message.shape)}


def flow_tree(flow: Flow) -> dict[str, Any]:
    """Return a message with how often one device sends it."""
    names = ("per_micro_batch", "per_step", "bytes_per_step", "sent_per_step", "exposed_seconds", "hidden_seconds")
    return {**message_tree(flow.message), **{name: getattr(flow, name) for name in names}}


def _links(report: CommReport) -> dict[str, Any]:
    pairs, busiest = report.traffic_map.between_nodes, report.traffic_map.busiest
    rows = zip(pairs.source, pairs.target, pairs.bytes, strict=True)
    return {
        "busiest": None if busiest is None else asdict(busiest),
        "between_nodes": [[a, b, amount] for a, b, amount in rows if amount],
    }


def _layer(table: LayerTable) -> dict[str, Any]:
    rows = [
        {
            "name": row.name,
            "weights": {name: list(shape) for name, shape in row.weights},
            "parameters": row.parameters,
            "parameter_bytes": row.parameter_bytes,
            "activation_bytes": row.activation_bytes,
            "messages": [{**message_tree(m), "count": n} for m, n in row.messages],
        }
        for row in table.rows
    ]
    return {"part": table.name, "times": table.times, "operators": rows}


def _whole(report: CommReport) -> dict[str, Any]:
    return {
        "parameters": report.whole_parameters,
        "memory": stage_tree(report.whole, 0),
        "layers": [_layer(table) for table in report.whole_layers],
    }


def _rank(report: CommReport, index: int) -> dict[str, Any]:
    return {
        "stage": report.report.evaluation.stages[index].position,
        **_stage(report, index),
        "layers": [_layer(table) for table in report.layers(index)],
    }


def _stage(report: CommReport, index: int) -> dict[str, Any]:
    return {"parameters": report.parameters(index), "memory": stage_tree(report.report, index)}
