"""Plans that differ in a choice that no byte depends on have their bytes computed once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Training
from shardwise.search import SearchOptions, SearchSpace, work_of
from shardwise.search._batch import PlanSelection
from shardwise.search._evaluator import Evaluator
from shardwise.search._jobs import Job


@pytest.mark.parametrize("kinds", [("ring", "all-gather", "all-to-all"), ("all-to-all", "all-gather", "ring")])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v2-lite"])
def test_bytes_taken_from_another_row_are_its_own(
    model: str, kinds: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the other kinds of context parallelism fill as much, to the bit, whichever rows are asked together."""
    fitting, spared, compared = Job.fitting, 0, 0

    def checked(self: Job, rows: Any, cells: PlanSelection, at: Any = None) -> Any:
        nonlocal spared, compared
        sets, modes, program = self.columns["set"], self.evaluator.num_modes, self.composition.memory
        asked = rows[:: 1 + compared % 3]
        some, where = self.part.keys.of_bytes(asked, sets)
        each, own = PlanSelection(some, sets), PlanSelection(asked, sets)
        outputs = program.run(self._given(program, each, self.part.keys), each.shape(modes))
        taken = {
            s: np.broadcast_to(outputs[f"required {s}"], (modes, len(some))).take(where, 1) for s in self.shardings
        }
        outputs = program.run(self._given(program, own, self.part.keys), own.shape(modes))
        for sharding, device_bytes in taken.items():
            assert np.array_equal(device_bytes, np.broadcast_to(outputs[f"required {sharding}"], (modes, len(asked))))
        spared, compared = spared + len(asked) - len(some), compared + 1
        # What is found to fit is kept from the search: what it takes in seconds is nothing to its bytes.
        for _ in fitting(self, rows, cells, at):
            pass
        yield from ()

    monkeypatch.setattr(Job, "fitting", checked)
    space = SearchSpace(cp_kind=kinds)
    training, cluster = Training(seq_len=8192, global_batch=32), Cluster.parse("32xh100-sxm-80gb")
    grid = work_of(load_model(model), cluster, training, space, SearchOptions(explore=True)).grid
    for _ in Evaluator(grid, np.inf).batches(0, len(grid.base["tp"])):
        pass
    assert compared > 3 and spared > 100
