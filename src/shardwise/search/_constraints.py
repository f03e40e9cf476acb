"""Legality of many plans at once: laws that count rows as columns, the others for each distinct value they read."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import numpy as np

from shardwise.errors import Problem, Problems
from shardwise.models import Model
from shardwise.plans import LAYOUTS, Plan, divisors, with_stage_layers
from shardwise.plans.laws import (
    all_blocks,
    batch_problems,
    context_laws,
    expert_laws,
    pipeline_laws,
    summa_laws,
    tensor_laws,
)
from shardwise.plans.schedules import Rounds, ScheduleRules, find_rules, runnable_count
from shardwise.records import dataclass, replace
from shardwise.search._columns import Columns, ColumnsRead, distinct_rows, exact_sum
from shardwise.search._space import WORDS
from shardwise.training import TrainingCase, placed_problems, update_problems


@dataclass(frozen=True, slots=True)
class Law:
    """A law: what the table of rejections calls it, the columns it reads, and the problems of one set of values.

    `holds` says the same of columns, where many sets of values are asked: `problems` then words its example alone.
    """

    title: str
    reads: tuple[str, ...]
    problems: Callable[[Plan], tuple[Problem, ...]]
    holds: Callable[[Mapping[str, Any]], Any] | None = None


def _checked(check: Callable[[Plan, Problems], None]) -> Callable[[Plan], tuple[Problem, ...]]:
    def problems(plan: Plan) -> tuple[Problem, ...]:
        collected = Problems()
        check(plan, collected)
        return tuple(collected.items)

    return problems


def staged(case: TrainingCase, plan: Plan) -> Plan:
    """Return a plan with its layers a stage written out where they are not equal, as the stack cuts them."""
    return with_stage_layers(plan, case.model.num_layers, case.stack.partition)


def _experts_hold(model: Model, shard: int) -> Callable[[Mapping[str, Any]], Any]:
    """Return the law of experts on columns (`expert_laws`), replicas being sharded in groups of some."""
    moes = {(m.experts, m.ffn) for b in all_blocks(model) if (m := b.experts)}

    def holds(c: Mapping[str, Any]) -> Any:
        if not moes:
            return (c["ep"] == 1) & (c["etp"] == 1)
        legal = c["tp"] * c["tp2"] * c["cp"] * c["dp"] % (c["ep"] * c["etp"]) == 0
        legal &= (c["tp"] == 1) | c["sequence_parallel"] | (c["layout"] != LAYOUTS.index("1d"))
        for experts, ffn in moes:
            legal &= (experts % c["ep"] == 0) & (ffn % c["etp"] == 0)
        if shard > 1:
            share = c["tp"] * c["tp2"] * c["cp"] * c["dp"] // (c["ep"] * c["etp"]) * shard
            legal &= (share % c["dp"] == 0) | (share <= c["dp"])
        return legal

    return holds


def _job_law(case: TrainingCase) -> Law:
    """Return the law of what a fine-tuning and a loss need of the split of the layers (`placed_problems`)."""
    stack, tuning = case.stack, case.tuning
    title = "adapters and losses go with how layers are split"
    return Law(title, ("layout", "tp", "ep"), lambda p: placed_problems(stack, tuning, p))


def _batch_holds(batch: int, rounds: Rounds, runs: int, most: int) -> Callable[[Mapping[str, Any]], Any]:
    """Return the law of the batch on columns (`batch_problems`), of so many micro-batches at most."""
    counts = np.array(divisors(batch), np.int64)

    def able(rules: ScheduleRules, pp: int) -> Any:
        """Return which of the counts of micro-batches a schedule runs."""
        each = runs if pp > 1 else 1
        many = [n // each if n % each == 0 and n <= most else 0 for n in counts.tolist()]
        return np.array([n > 0 and runnable_count(rules, pp, n, rounds) == n for n in many])

    def holds(c: Mapping[str, Any]) -> Any:
        # Rows that the batch allows know which of the counts they have.
        if "count" in c:
            return able(find_rules(c["schedule"]), c["pp"])[c["count"]]
        unit = c["dp"] * c["micro_batch"]
        legal = batch % unit == 0
        # Before pipelines have their schedules any number of micro-batches runs.
        rules, pp = (find_rules(c["schedule"]), c["pp"]) if "schedule" in c else (find_rules("1f1b"), 1)
        return legal & able(rules, pp)[np.searchsorted(counts, np.where(legal, batch // unit, 1))]

    return holds


def laws_of(case: TrainingCase) -> dict[str, Law]:
    """Return the laws of a model and a job by name, in the order in which they are counted."""
    model, job = case.model, case.job
    seq_len, batch, blocks = job.seq_len, job.global_batch, tuple(all_blocks(model))
    rounds, shard, runs = case.stack.runs.rounds, case.plan.shard, case.stack.settings.pipeline_runs
    split = {"job": _job_law(case)} if case.tuning or case.stack.settings.loss else {}
    most = 1 if case.stack.settings.updates_in_backward else batch
    return {
        "tensor": Law(
            "tensor parallelism divides heads and widths",
            ("tp",),
            _checked(lambda p, f: tensor_laws(model, blocks, p, f)),
        ),
        "summa": Law(
            "the two-dimensional layout divides widths and tokens",
            ("layout", "tp", "tp2", "cp", "panels"),
            _checked(lambda p, f: summa_laws(model, blocks, p, seq_len, f)),
        ),
        "experts": Law(
            "experts divide over ranks",
            ("layout", "tp", "tp2", "cp", "dp", "sequence_parallel", "ep", "etp"),
            _checked(lambda p, f: expert_laws(model, blocks, replace(p, shard=shard), f)),
            _experts_hold(model, shard),
        ),
        **split,
        "context": Law(
            "context and sequence parallelism divide tokens and heads",
            ("layout", "tp", "cp", "cp_kind", "sequence_parallel"),
            _checked(lambda p, f: context_laws(blocks, p, seq_len, f)),
        ),
        "batch": Law(
            "replicas and micro-batches divide the global batch",
            ("dp", "micro_batch"),
            lambda p: (*batch_problems(p, batch, rounds, runs=runs), *update_problems(case.stack, p, batch)),
            _batch_holds(batch, rounds, runs, most),
        ),
        "pipeline": Law(
            "stages divide the layers as the schedule needs",
            ("pp",),
            _checked(lambda p, f: pipeline_laws(model, staged(case, p), f)),
        ),
        "schedule": Law(
            "the schedule runs on its micro-batches",
            ("dp", "micro_batch"),
            lambda p: (*batch_problems(p, batch, rounds, runs=runs), *update_problems(case.stack, p, batch)),
            _batch_holds(batch, rounds, runs, most),
        ),
    }


@dataclass(slots=True)
class Constraints:
    """The laws with what they have said so far, and how many plans each rejects.

    An example of a law is the first by its words of all that it said of parts, whoever asked when.
    """

    laws: Mapping[str, Law]
    judged: dict[tuple[Any, ...], tuple[Problem, ...]] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    examples: dict[str, Problem] = field(default_factory=dict)

    def check(self, name: str, columns: ColumnsRead, **fixed: Any) -> Any:
        """Return which rows of the columns a law allows; `fixed` are fields of the plan that all rows share."""
        law = self.laws[name]
        if not len(columns[law.reads[0]]):
            return np.ones(0, bool)
        if law.holds is not None:
            legal = law.holds(ChainMap(fixed, columns))  # type: ignore[arg-type]
            self._note(name, columns, ~legal, fixed)
            return legal
        first, back = distinct_rows([columns[column] for column in law.reads])
        rows = zip(*(columns[c][first].tolist() for c in law.reads), strict=True)
        legal = np.array([not self._problems(name, row, fixed) for row in rows])
        return legal[back]

    def _note(self, name: str, columns: ColumnsRead, rejected: Any, fixed: dict[str, Any]) -> None:
        """Word the first by its values of some rows that a law rejected."""
        rows, law = np.flatnonzero(rejected), self.laws[name]
        for column in law.reads if len(rows) else ():
            values = columns[column][rows]
            rows = rows[values == values.min()]
        if len(rows):
            self._problems(name, tuple(columns[c][rows[0]].item() for c in law.reads), fixed)

    def _problems(self, name: str, row: tuple[Any, ...], fixed: dict[str, Any]) -> tuple[Problem, ...]:
        key = (name, row, *fixed.values())
        if key not in self.judged:
            law = self.laws[name]
            values = {c: WORDS[c][v] if c in WORDS else v for c, v in zip(law.reads, row, strict=True)}
            problems = law.problems(Plan(**{"sequence_parallel": False, **values, **fixed}))
            self.judged[key] = problems
            if problems:
                self.examples[name] = min(self.examples.get(name, problems[0]), problems[0], key=str)
        return self.judged[key]

    def reject(self, name: str, weights: Any) -> None:
        """Count plans under a law: a number of them, or those that each of some rows stands for."""
        fell = weights if isinstance(weights, int) else exact_sum(weights)
        if fell:
            self.rejected[name] = self.rejected.get(name, 0) + fell

    def keep(self, name: str, columns: Columns, weights: Any, legal: Any) -> Columns:
        """Return the legal rows, and count the plans of the others under the law."""
        self.reject(name, weights[~legal])
        return columns if legal.all() else {c: v[legal] for c, v in columns.items()}
