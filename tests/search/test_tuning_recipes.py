"""Which format, savers and length of a fine-tuning with adapters fit given devices, the quickest first."""

from __future__ import annotations

import pytest

from command_line import both, run, trained
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


def test_the_longest_sequence_takes_few_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first length that fits fills the card, those that do not fit lead to the longest as a line does."""
    base, asked = changed(report(), {"recompute": "full"}), []
    assert base is not None

    def counted(one: TrainReport, changes: dict[str, int]) -> TrainReport | None:
        asked.append(changes["seq_len"])
        return changed(one, changes)

    monkeypatch.setattr("shardwise.search._tuning.changed", counted)
    assert longest_sequence(base) in asked
    assert len(asked) == len(set(asked)) <= 6


def test_what_a_job_states_stays() -> None:
    """A base, a width of adapters and a loss that are asked for are not varied."""
    base = report(base="nf4", adapter_precision="bf16")
    assert {(c["base"], c["adapter_precision"]) for c in combinations(base)} == {("nf4", "bf16")}
    stack = replace(base.case.stack, settings=replace(base.case.stack.settings, loss="cce"))
    kept = replace(base, case=replace(base.case, stack=stack))
    assert {c["loss"] for c in combinations(kept)} == {"cce"}


def test_the_command_lists_ways_and_the_best_of_them() -> None:
    """The command that is printed gives the memory of the first row; nothing fits 671B parameters on 24 GB."""
    words = ("plan", "train", "llama-3.2-1b", "--on", "rtx-4090", "--adapter", "lora", "--base", "nf4")
    printed, read = both(*words)
    first, page = read.tree["recipes"][0], printed.out
    command = page.split("NEXT")[1].replace("\\\n", " ").split()[1:]
    again = run(*command, "--json").tree
    assert (again["device_bytes"], again["step_seconds"]) == (first["device_bytes"], first["step_seconds"])
    assert max(map(len, page.splitlines())) <= 80
    hopeless = run("plan", "train", "deepseek-v3", "--on", "rtx-4090", "--adapter", "lora", "--loss", "fused-linear")
    assert hopeless.status == 1 and "nor on 8xrtx-4090: take" in hopeless.out and "NEXT" not in hopeless.out


def test_what_was_asked_stays_in_the_command_that_is_next() -> None:
    """Targets, ranks and an own framework are in NEXT, and what it does unless told is said where the way differs."""
    words = ("plan", "train", "llama-3.2-1b", "--on", "2xh100", "--qlora", "--targets", "q,v", "--stack", "torchtune")
    page, read = both(*words)
    first = read.tree["recipes"][0]
    assert "--recompute none" in first["flags"]
    again = run(*page.out.split("NEXT")[1].replace("\\\n", " ").split()[1:], "--json").tree
    assert again["step_seconds"] == pytest.approx(first["step_seconds"], rel=1e-9)
    assert again["tuning"]["targets"] == ["q", "v"]


def test_wishes_of_a_search_of_plans_are_refused_by_name() -> None:
    """A limit, a file of the best plan or an objective is never left out in silence; --top is kept."""
    words = ("plan", "train", "qwen3-4b", "--on", "1xh100", "--qlora")
    done = run(*words, "--max-step", "1ms", "--objective", "cost", "--json")
    assert done.status == 2 and set(done.fields) == {"max_step", "objective"}
    assert len(run(*words, "--top", "2", "--json").tree["recipes"]) == 2
    assert set(run(*words[:-1], "--adapter", "nonsense", "--json").fields) == {"adapter"}


QUICK = ("--adapter-precision", "bf16", "--loss", "fused-linear")


def test_weights_go_to_the_host_where_nothing_else_fits() -> None:
    """70B parameters train on two cards of 24 GB with 4 bits, FSDP and weights on the host, as fsdp_qlora has it."""
    words = ("plan", "train", "llama-3.1-70b", "--on", "2xrtx-4090", "--adapter", "lora", *QUICK)
    printed, done = both(*words)
    assert done.status == 0
    flags = [recipe["flags"] for recipe in done.tree["recipes"]]
    assert all("--offload optimizer,gradients,parameters" in each for each in flags)
    assert any("--base nf4" in each for each in flags)
    page = printed.out
    assert "nothing fits but with weights" in page and max(map(len, page.splitlines())) <= 80
    again = run(*page[page.index("NEXT") + 4 :].replace("\\\n", " ").split()[1:], "--json")
    assert again.status == 0 and not again.tree["unlaunched"]
    assert again.tree["device_bytes"] == pytest.approx(done.tree["recipes"][0]["device_bytes"], abs=1)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("llama-3.1-70b", "--on", "rtx-4090", "--base", "nf4", "--stack", "unsloth"), {"--stack"}),
        (("llama-3.1-8b", "--on", "rtx-4090", "--base", "nf4", "--seq-len", "100000"), {"--seq-len"}),
        (("qwen3-32b", "--on", "2xrtx-4090", "--base", "bf16", "--stack", "llama-factory"), {"--stack", "--on"}),
        (("qwen3-32b", "--on", "RTX-4090:2", "--base", "bf16", "--stack", "llama-factory"), {"--stack", "--on"}),
        (
            ("qwen3-32b", "--on", "g6.12xlarge", "--base", "bf16", "--stack", "llama-factory"),
            {"--stack", "--seq-len", "--on"},
        ),
    ],
)
def test_what_is_named_where_nothing_fits_does(words: tuple[str, ...], named: set[str]) -> None:
    """Other frameworks, shorter sequences and more devices give what was promised where they are asked again."""
    asked = ("plan", "train", *words, "--adapter", "lora", "--loss", "fused-linear")
    done = run(*asked, "--json")
    remedies = done.tree["remedies"]
    assert done.status == 1 and not done.tree["recipes"]
    assert {one["flags"].split()[0] for one in remedies} == named
    for one in remedies:
        asked_for = zip(words[1::2], words[2::2], strict=True)
        kept = [word for flag, value in asked_for if flag not in one["flags"].split() for word in (flag, value)]
        again = trained("train", words[0], *kept, "--adapter", "lora", *one["flags"].split(), "--micro-batch", "1")
        assert again.fits and not again.unlaunched, one["flags"]
        for key in ("device_bytes", "step_seconds"):
            assert getattr(again, key) == pytest.approx(one[key], rel=1e-9, abs=1)


def test_replicas_may_shard_their_weights() -> None:
    """70B parameters fit no device of 40 GB whole: every way over eight shards them, and the first command fits."""
    words = ("plan", "train", "llama-3.1-70b", "--on", "8xa100-sxm-40gb", "--adapter", "lora", "--seq-len", "2048")
    printed, done = both(*words)
    recipes = done.tree["recipes"]
    assert done.status == 0 and recipes
    assert all("--sharding fsdp" in one["flags"] for one in recipes)
    page = printed.out
    again = page[page.index("NEXT") + 4 :].replace("\\\n", " ").split()[1:]
    assert "sharding" in page
    one = run(*again, "--json")
    assert one.status == 0 and one.tree["device_bytes"] == pytest.approx(recipes[0]["device_bytes"], abs=1)
