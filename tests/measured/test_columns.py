"""What every cell of a row of measurements states: the plan, the job and the machine that are asked, and what is taken.

What a change reads otherwise on purpose is stored anew: `PYTHONPATH=tests:. python tests/measured/test_columns.py`.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from measured_rows import INFERENCE, TRAINING
from shardwise.errors import InputError
from shardwise.measured import Context, Record
from shardwise.measured._inference import InferenceRows
from shardwise.measured._load import workload_of
from shardwise.measured._training import question_of, with_length
from shardwise.measured._training_plan import recompute_unknown, recomputed
from shardwise.plans import Arrivals, Length, Plan, Serving, Training, Workload, find_stack

STORED = Path(__file__).with_name("columns.toml")
CELLS: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(STORED.read_text(encoding="utf-8"))
LOADED = {**INFERENCE, "serving_mode": "online", "engine_version": "0.15.0", "batch": ""}
ROWS = {"training": TRAINING, "inference": INFERENCE, "load": LOADED}
NO_LOAD = Workload(input_tokens=Length(mean=1), output_tokens=Length(mean=1), arrivals=Arrivals())
UNSAID = {
    "training": asdict(Plan()) | asdict(Training(seq_len=0, global_batch=0)),
    "inference": asdict(Plan()) | asdict(Serving(batch=0, input_tokens=0, output_tokens=0)),
    "load": asdict(NO_LOAD),
}
CONTEXT = Context(Path("no such folder"))


def asked(kind: str, row: dict[str, str]) -> dict[str, Any]:
    """Return every field of the question that a row asks, but for those that nothing was said of."""
    record = Record(row)
    if kind == "load":
        return asdict(workload_of(record, 1, 8192)) | {"assumed": record.assumed}
    if kind == "inference":
        report, assumed = InferenceRows().predict(record, CONTEXT)
        case = report.case
        own = {"model": case.model.name, "device": case.cluster.device.name, "engine": case.engine.name}
        return asdict(case.plan) | asdict(case.job) | own | {"devices": case.cluster.num_devices, "assumed": assumed}
    record = with_length(record.completed())
    question = question_of(record, CONTEXT)
    plan, stack, cluster = question.plan, question.stack, question.cluster
    if not recompute_unknown(record, question.framework):
        plan = recomputed(record, plan, question.model, stack)
    found = asdict(plan) | asdict(question.job) | {"assumed": [*question.notes, *record.assumed]}
    base, settings = asdict(find_stack(stack.name)), asdict(stack.settings)
    own = {name: value for name, value in asdict(stack).items() if name != "settings" and value != base[name]}
    own |= {name: value for name, value in settings.items() if value != base["settings"][name]}
    tiers = [[tier.size, tier.bytes_per_second] for tier in cluster.tiers]
    return (
        found | own | {"stack": stack.name, "model": question.model.name, "device": cluster.device.name, "tiers": tiers}
    )


def stated(kind: str, cells: str) -> dict[str, Any]:
    """Return what a row with other cells asks beyond what nothing was said of, or the field that it is refused for."""
    said = {name: str(value) for name, value in yaml.safe_load(f"{{{cells}}}").items()}
    try:
        found = asked(kind, {**ROWS[kind], **said})
    except InputError as error:
        return {"refused": error.problems[0].field}
    assumed = {f"assumes {text[:50]}".strip(): True for text in found.pop("assumed")}
    plain = json.loads(json.dumps(UNSAID[kind]))
    return {n: known(v) for n, v in json.loads(json.dumps(found)).items() if v != plain.get(n)} | assumed


def known(value: Any) -> Any:
    """Return a value without the fields within it that nobody stated, which TOML has no word for."""
    return {n: known(v) for n, v in value.items() if v is not None} if isinstance(value, dict) else value


def changes(kind: str, cells: str) -> dict[str, Any]:
    """Return what other cells of a row change, by field, and what is then no longer said."""
    base, found = stated(kind, ""), stated(kind, cells)
    if "refused" in found:
        return found
    gone = [name for name in base if name not in found]
    changed = {name: value for name, value in found.items() if base.get(name) != value}
    return changed | ({"without": gone} if gone else {})


@pytest.mark.parametrize(("kind", "cells"), [(kind, cells) for kind in CELLS for cells in CELLS[kind]])
def test_a_cell_states_what_it_says_and_nothing_else(kind: str, cells: str) -> None:
    """Every other field of the question is that of the row without it; what a blank cell is taken for is said."""
    found = changes(kind, cells) if cells else stated(kind, "")
    assert found == CELLS[kind][cells]


def main() -> None:
    """Store what every row states anew."""

    def toml(value: Any) -> str:
        if isinstance(value, dict):
            return "{ " + ", ".join(f"{json.dumps(name)} = {toml(one)}" for name, one in value.items()) + " }"
        return "[" + ", ".join(map(toml, value)) + "]" if isinstance(value, list) else json.dumps(value)

    lines = ["# Cells beside a plain row -> every field of the question that is then another."]
    for kind, rows in CELLS.items():
        lines += [f"\n[{kind}]", f'"" = {toml(stated(kind, ""))}']
        lines += [f"{json.dumps(cells)} = {toml(changes(kind, cells))}" for cells in rows if cells]
    STORED.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
