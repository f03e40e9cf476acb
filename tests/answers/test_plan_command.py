"""`shardwise plan` answers on the command line: trees with stable keys, pages, files, exit statuses."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from command_line import both, run
from shardwise.answers import _commands

INFER = shlex.split("plan infer llama-3.1-8b --on 4xh100-sxm-80gb --input-tokens 1024 --output-tokens 128")
TRAIN = shlex.split("plan train llama-3.2-1b --on 8xa100-sxm-80gb --seq-len 2048 --global-batch 64 --layout 1d --cp 1")
SMALL = ["--recompute", "none,full", "--sharding", "zero1", "--micro-batch", "1..4"]
KEYS = {"plans", "legal", "fitting", "evaluated", "seconds", "covered", "objective", "limits", "risk"}


def _rest(command: str) -> list[str]:
    assert command.startswith("shardwise ")
    return shlex.split(command)[1:]


def test_plan_infer_as_json() -> None:
    """The tree has the size of the space, the best with the keys of infer, the front, runners_up and the rejected."""
    done = run(*INFER, "--weights", "bf16,fp8", "--max-tpot", "12ms", "--max-ttft", "2s", "--top", "3", "--json")
    tree = done.tree
    assert done.status == 0
    assert set(tree) == {"schema", "search", "best", "front", "runners_up", "rejected", "nearest"}
    assert set(tree["search"]) == KEYS
    assert tree["search"]["limits"] == {"max_ttft_seconds": 2.0, "max_tpot_seconds": 0.012}
    assert tree["search"]["plans"] == tree["search"]["fitting"] + sum(row["count"] for row in tree["rejected"])
    assert len(tree["best"]) == 3
    for best in tree["best"]:
        assert best["fits"]
        assert best["chance_to_fit"] >= tree["search"]["risk"] == best["risk"] == 0.9
        assert best["tpot_seconds"] <= 0.012
        assert {"ttft_seconds", "request_seconds", "kv_cache_tokens", "max_concurrency", "plan", "job"} <= set(best)
    rates = [best["tokens_per_second_per_gpu"] for best in tree["best"]]
    assert rates == sorted(rates, reverse=True)
    gaps = [(row["tpot_seconds"], row["tokens_per_second_per_gpu"]) for row in tree["front"]]
    assert gaps == sorted(gaps)
    assert sorted(rate for _, rate in gaps) == [rate for _, rate in gaps]
    for row in tree["rejected"]:
        assert row["remedy"]
        assert row["change"] is None or set(row["change"]) == {"field", "value", "loss", "best"}


def test_a_deployment_is_as_likely_to_fit_as_asked() -> None:
    """The page prints the chance to fit; at --risk 50% the best takes more requests; too sure a fit ends with 1."""
    asked = ("plan", "infer", "llama-3.1-8b", "--on", "1xa100-sxm-40gb", "--input-tokens", "2048")
    batch = {}
    for risk in ("", "50%"):
        done, read = both(*asked, *(("--risk", risk) if risk else ()))
        assert done.status == 0
        assert f"(--risk {risk or '90%'})" in done.out
        batch[risk] = read.tree["best"][0]["job"]["batch"]
        assert read.tree["best"][0]["chance_to_fit"] >= (0.5 if risk else 0.9)
    assert batch["50%"] > batch[""]
    fixed = (*asked, "--batch", str(batch["50%"]))
    assert (run(*fixed).status, run(*fixed, "--risk", "50%").status) == (1, 0)


def test_the_command_of_a_deployment_gives_the_deployment() -> None:
    """The command beside each of the best gives the same latency and rate."""
    tree = run(*INFER, "--at-most", "--kv-cache", "bf16,fp8", "--objective", "latency", "--top", "4", "--json").tree
    for best in tree["best"]:
        again = run(*_rest(best["command"]), "--json").tree
        for key in ("ttft_seconds", "tpot_seconds", "output_tokens_per_second", "kv_cache_bytes_per_gpu"):
            assert again[key] == best[key]


def test_the_best_is_saved_as_a_case(tmp_path: Path) -> None:
    """`--save-best` writes the best plan as a case that gives it, and `--save` the search."""
    for words, key in ((INFER, "tpot_seconds"), ([*TRAIN, *SMALL], "step_seconds")):
        best, search = str(tmp_path / "best.toml"), str(tmp_path / "search.json")
        tree = run(*words, "--save-best", best, "--save", search, "--json").tree
        assert run("--config", best, "--json").tree[key] == tree["best"][0][key]
        again = run("--config", search, "--json").tree
        assert again["best"][0][key] == tree["best"][0][key]


def test_the_best_has_the_room_of_the_case_that_it_is(tmp_path: Path) -> None:
    """The engine is told to run its batch at most, which sets memory aside: asked again, as many tokens fit."""
    best = str(tmp_path / "best.toml")
    words = [*INFER[:2], "qwen3-30b-a3b", "--on", "4xh100-sxm-80gb", "--input-tokens", "1000", "--output-tokens", "100"]
    first, again = run(*words, "--save-best", best, "--json").tree["best"][0], run("--config", best, "--json").tree
    for key in ("kv_cache_tokens", "max_concurrency", "chance_to_fit", "ttft_seconds"):
        assert again[key] == first[key]


def test_plan_infer_as_a_page() -> None:
    """The page has the best, the front, what could overtake, why others fell, what was assumed and the command."""
    done = run(*INFER, "--batch-step", "48", "--batch", "1..512", "--top", "2", "--price", "2")
    assert done.status == 0
    for word in ("BEST", "FRONT", "NEXT", "REJECTED", "ASSUMED", "AGAIN", "shardwise infer llama-3.1-8b"):
        assert word in done.out


def test_models_of_one_pass_are_planned_too() -> None:
    """For a model that generates nothing, rates count its input and the front its time of a request."""
    done = run(
        "plan", "infer", "bert-base", "--on", "2xh100-sxm-80gb", "--input-tokens", "128", "--batch", "1..64", "--json"
    )
    best = done.tree["best"][0]
    assert best["tokens_per_second_per_gpu"] == pytest.approx(best["samples_per_second"] * 128 / 2)
    assert len(done.tree["front"]) > 1


def test_nothing_that_will_do_is_status_1() -> None:
    """Where no plan will do, the exit status is 1 and the nearest is shown with the command that evaluates it."""
    done = run("plan", "infer", "llama-3.1-70b", "--on", "1xh100-sxm-80gb")
    assert done.status == 1
    assert "NONE" in done.out
    assert "NEAREST" in done.out
    done = run(*TRAIN, *SMALL, "--max-step", "1us", "--json")
    assert (done.status, done.tree["best"]) == (1, [])
    assert done.tree["nearest"]["step_seconds"] > 1e-6


def test_a_search_without_hope_names_savers_that_fit_together() -> None:
    """Where no plan of a full fine-tune fits, its page and its JSON say what would, and the words for it do fit."""
    words = ["llama-3.1-8b", "--on", "rtx-4090", "--seq-len", "4096", "--global-batch", "4"]
    done, read = both("plan", "train", *words)
    assert done.status == 1
    assert "memory savers that fit together" in done.out
    assert "--adapter lora --base nf4" in done.out
    (memory,) = (row for row in read.tree["rejected"] if row["name"] == "memory")
    savers = memory["remedy"].partition(", or add ")[2].partition(" to the nearest")[0]
    assert run("train", *words, "--recompute", "full", *savers.split()).status == 0


def test_plan_train_under_limits() -> None:
    """Limits hold for what is found, and every plan that fell to one is counted."""
    free = run(*TRAIN, *SMALL, "--tokens", "10B", "--price", "2", "--json").tree
    limit = free["best"][0]["usd"] * 1.1
    words = [*TRAIN, *SMALL, "--tokens", "10B", "--price", "2", "--max-cost", str(limit), "--min-free", "20GiB"]
    tree = run(*words, "--objective", "headroom", "--json").tree
    assert all(best["usd"] <= limit for best in tree["best"])
    assert {"max_usd", "min_free_bytes"} & {row["name"] for row in tree["rejected"]}
    assert tree["search"]["plans"] == tree["search"]["fitting"] + sum(row["count"] for row in tree["rejected"])
    sizes = [best["memory"]["device_bytes"] for best in tree["best"]]
    assert sizes == sorted(sizes)
    assert "asked for: a run up to" in run(*words).out


def test_scaling_on_the_command_line() -> None:
    """`--scaling` gives the best plan of each count of devices, doubling."""
    printed, done = both(*TRAIN, *SMALL, "--scaling", "2..8")
    rows: list[dict[str, Any]] = done.tree["scaling"]
    assert [row["num_devices"] for row in rows] == [2, 4, 8]
    assert rows[0]["efficiency"] == 1
    for row, best in zip(rows, done.tree["best"], strict=True):
        assert row["best"]["plan"].items() <= best["plan"].items()
        assert run(*_rest(best["command"]), "--json").tree["step_seconds"] == best["step_seconds"]
    page = printed.out
    assert "SCALING" in page
    assert "efficiency" in page


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ([*INFER, "--max-ttft", "0s", "--batch", "3..1", "--objective", "speed"], {"max_ttft", "batch", "objective"}),
        ([*INFER, "--weights", "fp7", "--engine", "vllm,vllm"], {"weights", "engine"}),
        ([*INFER, "--schedule", "1f1b"], {"schedule"}),
        (["plan", "infer", "gpt2", "--on", "1xh100", "--input-tokens", "5000"], {"input_tokens"}),
        ([*TRAIN, "--max-cost", "5", "--max-time", "1d"], {"max_cost", "max_time"}),
        ([*TRAIN, "--scaling", "8..64"], {"scaling"}),
        ([*TRAIN, "--scaling", "8"], {"scaling"}),
        ([*TRAIN, "--max-tpot", "5ms"], {"max_tpot"}),
        (["plan", "serve", "gpt2", "--on", "1xh100", "--global-batch", "8"], {"global_batch", "rate"}),
    ],
)
def test_wrong_words_are_named(words: list[str], fields: set[str]) -> None:
    """Problems of a search are named by their flags, and the exit status is 2."""
    done = run(*words, "--json")
    assert done.status == 2
    assert set(done.fields) == fields


def test_each_kind_of_search_has_its_own_help() -> None:
    """`plan infer --help` names the limits of serving, and `plan train --help` those of training."""
    infer, train = run("plan", "infer", "--help").out, run("plan", "train", "--help").out
    assert "--max-tpot" in infer
    assert "--max-tpot" not in train
    assert "--scaling" in train
    assert "--batch-step" in _commands.command("plan", "infer").flags["batch_step"].option


def test_ranks_in_the_fastest_domain_can_be_restricted() -> None:
    """`--fast-tp` and its like keep the plans whose axes have so many ranks in the fastest domain."""
    words = shlex.split("plan train llama-3.2-1b --on 16xa100-sxm-80gb --seq-len 2048 --global-batch 64 --layout 1d")
    tree = run(*words, *SMALL, "--tp", "2", "--fast-tp", "1", "--cp", "1", "--explore", "--json").tree
    assert tree["best"]
    assert all("tp" not in best["placement"] for best in tree["best"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-step", "0"], "write for example 2s"),
        (["--min-free", "900GiB"], "min_free = '900.00 GiB'"),
        (["--order", "tp,cp"], "order = 'tp-tp2-cp': is not"),
    ],
)
def test_problems_are_said_as_they_were_written(words: list[str], said: str) -> None:
    """A problem repeats what was written in its unit, and its example is of the same kind."""
    done = run(*TRAIN, *words)
    assert done.status == 2
    assert said in done.err
    assert "('" not in done.err


_EMPTY = [
    ("infer llama-3.1-8b --on 8xh100 --tp 3", "tp = 3: must divide the 8 devices; use one of 1, 2, 4, 8"),
    ("infer mixtral-8x7b --on 8xh100 --ep 3", "ep = 3: must divide the 8 devices"),
    ("infer llama-3.1-8b --on 8xh100 --tp 8 --dp 2", "with tp, dp as given no product of degrees is the 8 devices"),
    ("train mixtral-8x7b --on 8xh100 --global-batch 64 --ep 3", "ep = 3: must divide the 8 devices"),
    ("train llama-3.1-8b --on 64xh100 --global-batch 64 --tp 3", "tp = 3: must divide the 64 devices; use one of 1, 2"),
    (
        "train llama-3.1-8b --on 8xh100 --global-batch 64 --vpp 5..7 --pp 2",
        "vpp = '5..7': must cut the 32 layers evenly",
    ),
    (
        "train llama-3.1-8b --on 8xh100 --global-batch 64 --micro-batch 3",
        "micro_batch = 3: must divide the global batch",
    ),
    ("train llama-3.1-8b --on 8xh100 --global-batch 64 --tp 8 --pp 2", "no product of degrees is the 8 devices"),
    ("train llama-3.1-8b --on 16xh100 --global-batch 64 --fast-tp 3", "fast_tp = 3: no placement"),
    (
        "train llama-3.1-8b --on 8xh100 --global-batch 64 --stack fsdp2 --sharding hsdp --shard 8",
        "shard = 8: must be a part of dp, at most 8 here: a group of all replicas is none; use one of 2, 4, or",
    ),
    (
        "train llama-3.1-8b --on 8xh100 --global-batch 64 --stack fsdp2 --sharding hsdp --tp 4",
        "shard = 8: must be a part of dp, at most 2 here: a group of all replicas is none; use a sharding without",
    ),
]


@pytest.mark.parametrize(("words", "said"), _EMPTY)
def test_an_empty_space_says_what_it_must_hold(words: str, said: str) -> None:
    """Where a range leaves no plan before any law, the status is 1 and the range is named with what it must hold."""
    done = run("plan", *shlex.split(words), "--json")
    assert (done.status, done.tree["search"]["plans"]) == (1, 0)
    assert any(said in row["remedy"] for row in done.tree["rejected"])
    page = run("plan", *shlex.split(words), "--width", "200")
    assert said in page.out


@pytest.mark.parametrize(
    "words",
    ["llama-3.1-8b --on 8xh100 --max-tpot 0.001ms", "llama-3.1-70b --on 8xh100 --max-ttft 1ms --batch 1..8"],
)
def test_the_nearest_under_limits_fits(words: str) -> None:
    """The nearest deployment fits in memory and misses the limit by the least, and memory has no remedy."""
    printed, read = both("plan", "infer", *shlex.split(words))
    page, tree = printed.out, read.tree
    assert tree["nearest"]["fits"]
    assert (tree["nearest"]["plan"]["tp"], tree["nearest"]["job"]["batch"]) == (8, 1)
    remedies = {row["name"]: row["remedy"] for row in tree["rejected"]}
    assert remedies["memory"] == ""
    assert "times over" in " ".join(remedies.values())
    assert "beyond the space" not in page
    assert "NEAREST" in page


def test_memory_says_nothing_where_a_limit_is_not_kept() -> None:
    """Where nothing that fits keeps a limit, plans that do not fit get no remedy, and the miss is told in times."""
    tree = run(*TRAIN, *SMALL[:4], "--max-step", "1ns", "--json").tree
    remedies = {row["name"]: row["remedy"] for row in tree["rejected"]}
    assert "times over" in remedies["max_step_seconds"]
    assert not remedies.get("memory")


def test_defaults_of_tokens_are_those_of_infer() -> None:
    """A model with few positions is planned with the tokens that `infer` takes for it."""
    tree = run("plan", "infer", "bert-base", "--on", "3xh100", "--batch", "1..8", "--json").tree
    assert tree["best"][0]["job"]["input_tokens"] == 512
    again = run(*_rest(tree["best"][0]["command"]), "--json").tree
    assert again["ttft_seconds"] == tree["best"][0]["ttft_seconds"]


def test_the_remedy_of_a_device_without_a_rate_is_a_flag() -> None:
    """On a device without rates in 16 bits the remedy names a flag that does."""
    tree = run("plan", "infer", "llama-3.1-8b", "--on", "cpu", "--json").tree
    assert "--weights fp32" in tree["rejected"][0]["remedy"]
    words = shlex.split("infer llama-3.1-8b --on cpu --weights fp32")
    assert run(*words).status == run("plan", *words, "--batch", "1..4").status == 0


@pytest.mark.parametrize("words", [[*TRAIN, *SMALL], [*TRAIN, *SMALL, "--scaling", "2..8"], INFER])
def test_files_are_looked_at_before_the_search(words: list[str], tmp_path: Path) -> None:
    """Files that cannot be written are refused by the name of their flag, all at once."""
    paths = ["--save-best", str(tmp_path / "no" / "a.toml"), "--plot", str(tmp_path / "no" / "a.png")]
    done = run(*words, *paths, "--save", str(tmp_path), "--json")
    assert done.status == 2
    assert set(done.fields) == {"save_best", "plot", "save"}


def test_scaling_is_drawn(tmp_path: Path) -> None:
    """`--scaling` with `--plot` draws the best plan of each count of devices."""
    path = tmp_path / "scaling.svg"
    done = run(*TRAIN, *SMALL, "--scaling", "2..8", "--plot", str(path), "--json")
    assert (done.status, done.tree["plot"]["file"]) == (0, str(path))
    assert path.stat().st_size > 1000


def test_no_two_plans_read_alike() -> None:
    """Each row has degrees of its own, says where its axes sit and what ties with it; shares of a step add up to 1."""
    words = shlex.split("plan train llama-3.2-1b --on 16xa100-sxm-80gb --seq-len 2048 --global-batch 64")
    more = shlex.split("--sharding zero1 --recompute none --micro-batch 1 --schedule 1f1b --top 30")
    page = run(*words, *more, "--width", "200").out
    rows = [line.split(maxsplit=1) for line in page.split("FRONT")[0].splitlines() if "micro-batch" in line]
    texts = [text for number, text in rows if number.isdecimal()]
    assert len(texts) >= 2
    assert len({re.sub("micro-batch.*", "", text) for text in texts}) == len(texts)
    assert all("in a domain" in text for text in texts)
    assert page.count("ties with ") >= 1 and "..." not in page
    table = (line for line in page.split("FRONT")[0].splitlines() if line.split()[:1] in ([str(n)] for n in range(9)))
    shares = [found for line in table if len(found := re.findall(r"([0-9.]+)%", line)) == 4]
    assert len(shares) == len(texts)
    for row in shares:
        assert sum(map(float, row)) == pytest.approx(100, abs=0.25)


def test_every_plan_of_an_explored_page_says_what_of_it_has_no_launch() -> None:
    """Rows of the Pareto front and of ties are marked where their framework cannot launch them, as the best are."""
    words = shlex.split(
        "plan train llama-3.2-1b --on 8xa100-sxm-80gb --seq-len 1024 --global-batch 16 --layout 1d,summa"
    )
    words += ["--tp", "1..2", "--micro-batch", "1", "--explore", "--width", "300"]
    printed, read = both(*words)
    front = read.tree["front"]
    shown = front[:: -(-len(front) // 8)]
    best, rest = printed.out.split("\nFRONT")
    rows = [line for line in rest.split("\nNEXT")[0].splitlines() if "no launch" in line]
    assert 0 < len(rows) == sum(not row["launchable"] for row in shown) < len(shown)
    assert re.search(r"ties with .* no launch \(\+", best)


def test_what_was_assumed_is_listed_as_by_train() -> None:
    """A search lists device, price, stack and precision, and with tokens the dollars and days of each plan."""
    words = ["--on", "8xa100", "--tokens", "1T", "--objective", "cost", "--width", "160"]
    done = run("plan", "train", "llama-3.2-1b", *TRAIN[5:], *SMALL, *words)
    for word in ("a100 taken as", "price = ", "stack megatron", "precision bf16", "days"):
        assert word in done.out
    tree = run(*TRAIN, *SMALL, "--json").tree
    assert run(*_rest(tree["best"][0]["command"]), "--json").tree["assumptions"][0] in tree["best"][0]["assumptions"]
    for words in (("train", "gpt2", "--global-batch", "8"), ("serve", "gpt2", "--rate", "1")):
        said = run("plan", *words, "--on", "1xh100", "--top", "1", "--json").tree["best"][0]["assumptions"]
        assert any("not given" in note for note in said)


def test_an_interrupted_search_says_so() -> None:
    """Where a search ended early with nothing found, the page says that it was interrupted, not that none will do."""
    from dataclasses import replace

    from shardwise import plan_training
    from shardwise.answers._page import text_of
    from shardwise.answers._plan_page import plan_page
    from shardwise.hardware import Cluster
    from shardwise.models import load_model
    from shardwise.plans import Training
    from shardwise.search import SearchOptions

    job = Training(seq_len=1024, global_batch=8)
    on = Cluster.parse("2xa100-sxm-80gb")
    none = plan_training(load_model("gpt2"), on, job, None, SearchOptions(max_step_seconds=1e-9))
    page = text_of(plan_page(replace(none, covered=0.5), [], ((), 100)), io.StringIO())
    assert "INTERRUPTED" in page
    assert "NONE" not in page
