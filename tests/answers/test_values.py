"""`to_dict` of every answer is what its command prints with `--json`."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.answers._main import run
from shardwise.notebook import PlainValues

LARGE, SMALL, ONE = sw.Model.load("llama-3.1-8b"), sw.Model.load("gpt2"), sw.Cluster.parse("1xh100")
EIGHT, JOB = sw.Cluster.parse("8xh100"), sw.Training(seq_len=1024, global_batch=32)
SHARDED = "llama-3.1-8b --on 8xh100 --sharding fsdp --micro-batch 1 --seq-len 1024 --global-batch 32"
PLAN = sw.Plan(sharding="fsdp", dp=0)
SCRIPT = Path(__file__).parent.parent / "formats" / "scripts" / "gpt3_175b.sh"
# Nothing of it fits, and no single change does: the answer carries changes that fit together.
TOO_LARGE = "llama-3.1-8b --on 1xrtx-4090 --global-batch 1 --micro-batch 1 --seq-len 4096"


def trained() -> sw.TrainReport:
    """Return the report of the sharded plan."""
    return sw.train(LARGE, EIGHT, PLAN, JOB)


def too_large() -> sw.TrainReport:
    """Return a report of a plan that does not fit."""
    job = sw.Training(seq_len=4096, global_batch=1)
    return sw.train(LARGE, sw.Cluster.parse("1xrtx-4090"), sw.Plan(dp=0), job)


def rolled_out() -> sw.TrainReport:
    """Return a report whose step has rollouts."""
    stack = replace(sw.find_stack("verl"), settings=sw.Settings(rollout="apart", rollout_prompt_tokens=128))
    job = sw.Training(seq_len=512, global_batch=16, method="grpo")
    model, cluster = sw.Model.load("llama-3.2-1b"), sw.Cluster.parse("2xh100")
    return sw.train(model, cluster, replace(PLAN, recompute="full"), job, sw.TrainingOptions(stack=stack))


def loaded(rate: float, count: int) -> sw.Workload:
    """Return requests of 512 tokens in and 128 out."""
    lengths = {"input_tokens": sw.Length(mean=512), "output_tokens": sw.Length(mean=128)}
    return sw.Workload(**lengths, arrivals=sw.Arrivals(rate=rate), count=count)


def limited(quantile: str, seconds: float) -> sw.LoadOptions:
    """Return a limit on the time to first token."""
    return sw.LoadOptions(limits=(sw.Limit(metric="ttft", quantile=quantile, seconds=seconds),))


SERVED = sw.Serving(batch=8, input_tokens=512, output_tokens=128)
REPLICAS = sw.LoadSpace(layouts=sw.ServingSpace(devices=sw.IntRanges.parse("1..8"), tp=sw.IntRanges.parse("1,2")))
ASKED: dict[str, Callable[[], PlainValues]] = {
    f"train {SHARDED}": trained,
    f"train {TOO_LARGE}": too_large,
    "train llama-3.2-1b --on 2xh100 --sharding fsdp --recompute full --micro-batch 1 --seq-len 512 --global-batch 16 "
    "--method grpo --stack verl --rollout apart --rollout-prompt-tokens 128": rolled_out,
    f"comm {SHARDED}": lambda: sw.comm(LARGE, EIGHT, PLAN, JOB),
    f"roofline {SHARDED}": lambda: sw.roofline(trained()),
    "count llama-3.1-8b --seq-len 1024": lambda: sw.count(LARGE, sw.Counting(seq_len=1024)),
    "infer llama-3.1-8b --on 1xh100 --batch 8 --input-tokens 512 --output-tokens 128": lambda: sw.infer(
        LARGE, ONE, sw.Plan(dp=0), SERVED
    ),
    "serve llama-3.1-8b --on 1xh100 --rate 12/s --p50-ttft 20ms --requests 50": lambda: sw.serve(
        LARGE, ONE, sw.Plan(dp=0), loaded(12.0, 50), None, limited("p50", 0.02)
    ),
    "plan train gpt2 --on 8xh100 --global-batch 32 --seq-len 1024 --layout 1d --cp 1": lambda: sw.plan_training(
        SMALL, EIGHT, JOB, sw.SearchSpace(layout=("1d",), cp=sw.IntRanges.parse("1"))
    ),
    "plan infer llama-3.1-8b --on 1xh100 --batch 1,8 --input-tokens 512 --output-tokens 128": lambda: sw.plan_serving(
        LARGE, ONE, SERVED, sw.ServingSpace(batch=sw.IntRanges.parse("1,8"))
    ),
    "plan serve llama-3.1-8b --on 8xh100 --rate 20/s --p99-ttft 500ms --top 1 --tp 1..2": lambda: sw.plan_serve(
        LARGE, EIGHT, loaded(20.0, 2000), None, limited("p99", 0.5), (REPLICAS, "devices", 1)
    ),
}


def printed(command: str) -> Any:
    """Return the object that a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run([*command.split(), "--json"])
    return json.loads(out.getvalue())


def comparable(tree: Any) -> Any:
    """Return an answer without what only a command knows, and without how long a search took."""
    kept = {key: value for key, value in tree.items() if key not in ("command", "assumptions")}
    if "search" in tree:
        kept["search"] = {key: value for key, value in tree["search"].items() if key != "seconds"}
        kept["best"] = [comparable(one) for one in tree["best"]]
    return kept


@pytest.mark.parametrize("command", ASKED)
def test_an_answer_gives_what_its_command_prints(command: str) -> None:
    """Every key and every value is the same, the version of the keys among them."""
    given = json.loads(json.dumps(ASKED[command]().to_dict(), allow_nan=False))
    assert next(iter(given)) == "schema"
    assert comparable(given) == comparable(printed(command))


def test_energy_gives_the_key_of_its_flag() -> None:
    """What `--energy` adds is what the energy of a report gives."""
    assert sw.energy(trained()).to_dict()["energy"] == printed(f"train {SHARDED} --energy")["energy"]


def imported() -> sw.Imported:
    """Return the case of a script of Megatron-LM."""
    return sw.import_file(str(SCRIPT))


def test_what_a_script_means_gives_what_import_prints() -> None:
    """A case that was read of a file is given as `shardwise import` prints it."""
    assert json.loads(json.dumps(imported().to_dict(), allow_nan=False)) == printed(f"import {SCRIPT}")


def test_rows_of_a_search_are_given_one_by_one() -> None:
    """A count of devices, and a plan behind the best, have the values that their command prints in its list."""
    counts = "plan train gpt2 --on 8xh100 --seq-len 1024 --global-batch 64 --scaling 2..8"
    rows = sw.strong_scaling(SMALL, EIGHT, sw.Training(seq_len=1024, global_batch=64), (2, 4, 8))
    given = json.loads(json.dumps([row.to_dict() for row in rows], allow_nan=False))
    assert [one | {"schema": 1} for one in printed(counts)["scaling"]] == given
    asked = "plan infer llama-3.1-8b --on 1xh100 --batch 1,8 --input-tokens 512 --output-tokens 128"
    near = sw.runners_up(sw.plan_serving(LARGE, ONE, SERVED, sw.ServingSpace(batch=sw.IntRanges.parse("1,8"))))
    given = json.loads(json.dumps([one.to_dict() for one in near], allow_nan=False))
    assert [one | {"schema": 1} for one in printed(asked)["runners_up"]] == given


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (lambda: sw.find_stack([1]), "stack"),
        (lambda: sw.Frame.of_rows(1), "rows"),
        (lambda: sw.Frame.of_rows([1]), "rows"),
        (lambda: sw.Frame([1]), "columns"),
        (lambda: sw.Frame({"a": 1}), "columns"),
        (lambda: sw.plan_training(SMALL, EIGHT, JOB, executor=1), "executor"),
    ],
)
def test_arguments_of_another_type_are_bad_input(asked: Callable[[], object], field: str) -> None:
    """A value that no function can take is refused by name, never by a traceback."""
    with pytest.raises(sw.InputError) as refused:
        asked()
    assert [one.field for one in refused.value.problems] == [field]
