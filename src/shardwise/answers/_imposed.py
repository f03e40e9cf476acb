"""What is imposed on a case that is exported: switches of its framework say it where it has any, else it is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from shardwise.answers._flags import efficiency_flags
from shardwise.answers._inputs import Inputs
from shardwise.errors import InputError
from shardwise.records import replace

if TYPE_CHECKING:
    from shardwise.formats import ExportCase, Exported
    from shardwise.training import TrainReport

# What a framework does beside compute, of each axis, and what it is where that is switched off; in the order of trying,
# since weights are gathered beside compute only where gradients are reduced so.
_SWITCHES: tuple[tuple[str, str, object], ...] = (
    ("dp", "overlap_gradients", False),
    ("dp", "overlap_parameters", False),
    ("tp", "overlap_tensor", False),
    ("tp", "overlap_input_gradients", False),
    ("ep", "overlap_experts", "never"),
    ("pp", "overlap_sends", ()),
)


def exported_imposed(
    inputs: Inputs, case: ExportCase, report: TrainReport, export: Callable[[ExportCase], Exported]
) -> tuple[Exported, list[str]]:
    """Return the files of a case, switches off that its flags expose, and what no setting says of what is imposed."""
    exported, says = export(case), "it"
    keys = [key for key in efficiency_flags() if _imposes(key, inputs.values.get(key))]
    overlaps = [key for key in keys if key.startswith("overlap")]
    if overlaps:
        whole, takes = "overlap" in overlaps, _takes(case, report)
        for axis, name, off in _SWITCHES:
            if not (whole or f"overlap_{axis}" in overlaps) or getattr(case.stack, name) == off:
                continue
            other = replace(case, stack=replace(case.stack, **cast(dict[str, Any], {name: off})))
            try:
                if (other_takes := _takes(other, report)) != takes:
                    exported, case, takes, says = export(other), other, other_takes, "all of it"
            except InputError:  # a switch that the framework has not
                continue
        if takes == (report.device_bytes, report.step_seconds):
            keys = [key for key in keys if key not in overlaps]
    given = [(key, inputs.values[key], says if key in overlaps else "it") for key in keys]
    return exported, [f"{key} {value}: no setting of {exported.system} says {what}" for key, value, what in given]


def _imposes(key: str, value: object) -> bool:
    """Return whether a flag imposes something: `ideal` is off and overlaps are on unless they are asked for.

    >>> _imposes("overlap", True), _imposes("overlap_tp", False), _imposes("compute_efficiency", 0.5)
    (False, True, True)
    """
    return value is False if key.startswith("overlap") else bool(value)


def _takes(case: ExportCase, asked: TrainReport) -> tuple[float, float]:
    """Return the bytes of a device and the seconds of a step of a case whose communication no flag exposes."""
    from shardwise.training import TrainingOptions, train

    options = TrainingOptions(stack=case.stack, efficiencies=replace(asked.case.efficiencies, exposed_axes=()))
    report = train(case.model, case.cluster, case.plan, case.job, options)
    return report.device_bytes, report.step_seconds
