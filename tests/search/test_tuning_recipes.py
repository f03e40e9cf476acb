"""Which format, savers and length of a fine-tuning with adapters fit given devices, the quickest first."""

from __future__ import annotations

import pytest

from command_line import run
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Plan, Training, find_stack
from shardwise.records import replace
from shardwise.search import tuning_recipes
from shardwise.search._tuning import changed, combinations, longest_sequence
from shardwise.training import TrainingOptions, TrainReport, train


def report(on: str = "1xrtx-4090", **job: object) -> TrainReport:
    """Return LoRA of Qwen3-4B with a micro-batch of one."""
    asked = Training(seq_len=2048, global_batch=1, adapter="lora", **job)  # type: ignore[arg-type]
    options = TrainingOptions(stack=find_stack("transformers"))
    return train(load_model("qwen3-4b"), Cluster.parse(on), Plan(micro_batch=1), asked, options)


def test_what_fits_is_listed_by_its_step() -> None:
    """Every combination that fits is there, the quickest first, with the bytes and seconds of its own report."""
    base = report(adapter_precision="bf16")
    found = tuning_recipes(base)
    seconds = [one.report.step_seconds for one in found]
    assert seconds == sorted(seconds) and all(one.report.fits for one in found)
    each = [changed(base, changes) for changes in combinations(base)]
    ways = {
        (one.plan, one.case.tuning, one.step_seconds, one.device_bytes) for one in each if one is not None and one.fits
    }
    assert len(found) == len(ways)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_longest_sequence_fits_and_the_next_does_not(recompute: str) -> None:
    """A sequence of 256 tokens more takes more than the card has."""
    base = changed(report(), {"recompute": recompute})
    assert base is not None
    longest = longest_sequence(base)
    fits, more = (changed(base, {"seq_len": longest + extra}) for extra in (0, 256))
    assert fits is not None and fits.fits
    assert more is not None and not more.fits


def test_what_a_job_states_stays() -> None:
    """A base, a width of adapters and a loss that are asked for are not varied."""
    base = report(base="nf4", adapter_precision="bf16")
    assert {(c["base"], c["adapter_precision"]) for c in combinations(base)} == {("nf4", "bf16")}
    stack = replace(base.case.stack, settings=replace(base.case.stack.settings, loss="cce"))
    kept = replace(base, case=replace(base.case, stack=stack))
    assert {c["loss"] for c in combinations(kept)} == {"cce"}


def test_the_command_lists_ways_and_the_best_of_them() -> None:
    """The command that is printed gives the memory of the first row; nothing fits a 70B model on 24 GB in 16 bits."""
    words = ("plan", "train", "llama-3.2-1b", "--on", "rtx-4090", "--adapter", "lora", "--base", "nf4")
    first = run(*words, "--json").tree["recipes"][0]
    page = run(*words).out
    command = page.split("NEXT")[1].replace("\\\n", " ").split()[1:]
    again = run(*command, "--json").tree
    assert (again["device_bytes"], again["step_seconds"]) == (first["device_bytes"], first["step_seconds"])
    assert max(map(len, page.splitlines())) <= 80
    hopeless = run("plan", "train", "llama-3.1-70b", "--on", "rtx-4090", "--adapter", "lora", "--base", "bf16")
    assert hopeless.status == 1 and "nothing fits" in hopeless.out


def test_what_was_asked_stays_in_the_command_that_is_next() -> None:
    """Targets, ranks and an own framework are in NEXT, and what it does unless told is said where the way differs."""
    words = ("plan", "train", "llama-3.2-1b", "--on", "2xh100", "--qlora", "--targets", "q,v", "--stack", "torchtune")
    first = run(*words, "--json").tree["recipes"][0]
    assert "--recompute none" in first["flags"]
    again = run(*run(*words).out.split("NEXT")[1].replace("\\\n", " ").split()[1:], "--json").tree
    assert again["step_seconds"] == pytest.approx(first["step_seconds"], rel=1e-9)
    assert again["tuning"]["targets"] == ["q", "v"]


def test_wishes_of_a_search_of_plans_are_refused_by_name() -> None:
    """A limit, a file of the best plan or an objective is never left out in silence; --top is kept."""
    words = ("plan", "train", "qwen3-4b", "--on", "1xh100", "--qlora")
    done = run(*words, "--max-step", "1ms", "--objective", "cost", "--json")
    assert done.status == 2 and set(done.fields) == {"max_step", "objective"}
    assert len(run(*words, "--top", "2", "--json").tree["recipes"]) == 2
    assert set(run(*words[:-1], "--adapter", "nonsense", "--json").fields) == {"adapter"}


def test_replicas_may_shard_their_weights() -> None:
    """70B parameters fit no device of 40 GB whole: every way over eight shards them, and the first command fits."""
    words = ("plan", "train", "llama-3.1-70b", "--on", "8xa100-sxm-40gb", "--adapter", "lora", "--seq-len", "2048")
    done = run(*words, "--json")
    recipes = done.tree["recipes"]
    assert done.status == 0 and recipes
    assert all("--sharding fsdp" in one["flags"] for one in recipes)
    page = run(*words).out
    again = page[page.index("NEXT") + 4 :].replace("\\\n", " ").split()[1:]
    assert "sharding" in page
    one = run(*again, "--json")
    assert one.status == 0 and one.tree["device_bytes"] == pytest.approx(recipes[0]["device_bytes"], abs=1)
