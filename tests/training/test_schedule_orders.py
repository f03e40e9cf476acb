"""Orders of tasks against torch.distributed.pipelining and the zero-bubble authors' scheduler, executed and stored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardwise.plans.schedules import RULES
from shardwise.training.schedules import FULL, B, F, W, device_order

STORED = json.loads((Path(__file__).parents[1] / "data" / "pipeline_orders.json").read_text(encoding="utf-8"))
KINDS = {"F": F, "I": B, "W": W, "B": FULL}
NAMES = {rules.torch: rules.name for rules in RULES.values() if rules.torch}
NAMES |= {"Vhalf": "v-half", "Vmin": "v-min"}


@pytest.mark.parametrize("row", STORED, ids=lambda row: f"{row['schedule']}-{row['pp']}-{row['micro_batches']}")
def test_orders_are_those_of_their_schedulers(row: dict[str, Any]) -> None:
    """Every device runs the tasks of torch's, or of the authors' own schedule, in that order, pairs as pairs."""
    name, p, v = NAMES[row["schedule"]], row["pp"], row["vpp"]
    piece = RULES[name].piece
    for device, said in enumerate(row["order"]):
        chunk_of = {piece(p, device, chunk): chunk for chunk in range(v)}
        expected = []
        for slot in said.split():
            tasks = [re.fullmatch(r"(\d+)([FIWB])(\d+)", task) for task in slot.split("+")]
            expected.append([(KINDS[t[2]], int(t[3]), chunk_of[int(t[1])]) for t in tasks if t])
        order = device_order(name, (p, v, row["micro_batches"]), device)
        assert [[(task.kind, task.micro_batch, task.chunk) for task in slot] for slot in order] == expected
