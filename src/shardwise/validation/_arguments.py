"""Cases that come as complete Megatron-LM arguments, beside the file of their measurements."""

from __future__ import annotations

from dataclasses import replace

from shardwise.formats.megatron import Launch, read_args
from shardwise.training import Options, train
from shardwise.validation._cells import Cells
from shardwise.validation._network import cluster_of
from shardwise.validation._places import Places
from shardwise.validation._training import Predicted, refuse


def predict_arguments(cells: Cells, places: Places) -> Predicted:
    """Return the prediction of a case by its arguments; the file states the devices, the arguments all else."""
    entry = places.arguments[cells.text("case_id")]
    count = cells.whole("num_gpus") or int(entry.get("nodes") or 0) * int(entry.get("gpus_per_node") or 0)
    if not count:
        raise refuse("num_gpus", None, "is not stated")
    device, notes = places.device(cells.text("device"))
    cluster = cluster_of(cells, device, notes)
    if cluster.num_devices != count:
        raise refuse("num_gpus", count, "is not stated in the file")
    case = read_args(entry["args"], Launch(num_devices=count, source=cells.text("case_id")))
    if case.model is None:
        raise refuse("model", None, "is not in the arguments")
    model = replace(case.model, name=cells.text("model") or case.model.name)
    options = Options(stack=case.stack, accumulation=case.accumulation)
    report = train(model, cluster, case.plan, case.job, options)
    return Predicted(report, (*notes, *case.assumed, *cells.assumed))
