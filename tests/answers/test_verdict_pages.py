"""What pages say beside their figures: intervals, rates in plain words, and the nearest change."""

from __future__ import annotations

import json
import re
import shlex
from itertools import chain

import pytest

from command_line import both, figures, run, trained

# A rate is lowest where its price is highest.
CROSSED = (("typical", "typical"), ("high", "low"))


def test_every_headline_comes_with_its_band() -> None:
    """Low, typical and high stand beside latencies, rate and price, of one pass too, and in the JSON."""
    words = "infer", "llama-3.1-8b", "--on", "h100", "--width", "120"
    page, band = run(*words).out, run(*words, "--json").tree["interval"]
    for start in ("TTFT", "TPOT", "request"):
        assert f" {start} typical " in page
    assert re.search(r" typical [\d,]+ tokens/s, 8 of 10 published runs [\d,]+ tokens/s to ", page)
    assert re.search(r"\n +typical \$[\d.]+, 8 of 10 published runs \$[\d.]+ to \$", page)
    rate, price = band["output_tokens_per_second"], band["usd_per_million_output_tokens"]
    assert all(rate[a] * price[b] == pytest.approx(rate["low"] * price["high"]) for a, b in CROSSED)
    assert run("infer", "bert-base", "--on", "h100").out.count("8 of 10 published runs") == 2


def test_a_batch_without_room_is_told_in_waves() -> None:
    """What the cache does not hold at once takes its waves in turn, and the seconds of the whole batch say "as if"."""
    asked = "infer", "llama-3.1-70b", "--on", "2xh100", "--tp", "2", "--input-tokens", "1024", "--output-tokens", "256"
    room = run(*asked, "--batch", "160", "--json").tree["max_concurrency"]
    done, wave = (run(*asked, "--batch", str(batch), "--json").tree for batch in (8 * room, room))
    assert (done["fits"], done["max_concurrency"], wave["fits"], wave["waves"]) == (False, room, True, None)
    assert done["waves"] == {
        "count": 8,
        "batch": room,
        "seconds": pytest.approx(8 * wave["request_seconds"]),
        "output_tokens_per_second": pytest.approx(wave["output_tokens_per_second"]),
    }
    page = run(*asked, "--batch", str(8 * room), "--width", "120").out
    assert f"8 waves of {room}" in page and page.index("as if all of it had room") < page.index("LATENCY")
    assert "as if" not in run(*asked, "--batch", str(room)).out
    none = run("infer", "llama-3.1-405b", "--on", "8xa100", "--batch", "4")
    assert "WAVES" not in none.out and "as if all of it had room" in none.out


def test_waves_take_what_a_simulated_burst_takes() -> None:
    """The closed form of two waves lies within a tenth of the simulation of all requests sent at once."""
    words = "llama-3.1-8b", "--on", "l40s", "--input-tokens", "512", "--output-tokens", "512"
    waves = run("infer", *words, "--batch", "256", "--json").tree["waves"]
    burst = run("serve", *words, "--arrivals", "burst", "--requests", "256", "--finite", "--json").tree
    assert waves["output_tokens_per_second"] == pytest.approx(burst["served"]["output_tokens_per_second"], rel=0.1)


def test_rates_say_what_they_count() -> None:
    """Tokens a second of a deployment count the prompts' time, those of a request its decoding alone."""
    page = run("infer", "llama-3.1-8b", "--on", "h100", "--width", "120").out
    assert "per device, prompts included" in page
    assert "tokens/s for each request once it decodes" in page


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("deepseek-v3", "--on", "8xh200", "--dp", "8"), "nearest change that fits: --tp 8"),
        (("llama-3.1-70b", "--on", "4xh100", "--tp", "1"), "nearest change that fits: --tp "),
        (("llama-3.1-405b", "--on", "8xa100", "--tp", "1"), "no single change tried fits; nearest is --tp 8 --dp 1, "),
    ],
)
def test_a_model_too_large_for_a_device_is_split(words: tuple[str, ...], says: str) -> None:
    """The nearest change splits a model over as many devices as it needs, and is named where nothing fits."""
    done = run("infer", *words, "--width", "120")
    assert done.status == 1
    assert says in done.out


@pytest.mark.parametrize(
    ("words", "status", "plan", "why"),
    [
        ("infer llama-3.1-8b --on 4xh100", 0, (1, 1, 4), ""),
        (
            "infer llama-3.1-70b --on 8xh100",
            0,
            (4, 1, 2),
            "tp 4: the fewest devices that hold a replica with the chance",
        ),
        (
            "infer deepseek-v3 --on 16xh200",
            0,
            (8, 1, 2),
            "tp 8: the fewest devices that hold a replica with the chance",
        ),
        ("infer llama-3.1-405b --on 16xa100", 0, (8, 2, 1), "tp 8, pp 2: the fewest devices"),
        ("infer llama-3.1-405b --on 2xa100", 1, (2, 1, 1), "tp 2: the widest replica, which the devices do not hold"),
        ("infer phi-4 --on 4xt4", 0, (2, 2, 1), "tp 2, pp 2: the fewest devices"),
        (
            "infer llama-3.1-70b --on 3xh100",
            0,
            (1, 3, 1),
            "pp 3: the fewest devices that hold a replica with the chance",
        ),
        ("infer llama-3.1-70b --on 6xa100-40gb", 0, (2, 3, 1), "tp 2, pp 3: the fewest devices"),
        ("infer llama-3.1-405b --on 12xh200", 0, (4, 3, 1), "tp 4, pp 3: the fewest devices"),
        ("infer llama-3.1-405b --on 3x8xh100", 0, (8, 3, 1), "tp 8, pp 3: the fewest devices"),
        ("infer deepseek-v3 --on 12x8xh100", 0, (8, 2, 6), "tp 8, pp 2: the fewest devices"),
        ("infer llama-3.1-70b --on 8xh100 --dp 8", 1, (1, 1, 8), ""),
        ("serve llama-3.1-70b --on 8xh100 --rate 1/s --requests 50", 0, (4, 1, 2), "tp 4: the fewest devices"),
    ],
)
def test_a_served_replica_takes_the_fewest_devices_that_hold_it(
    words: str, status: int, plan: tuple[int, ...], why: str
) -> None:
    """Who names a model and devices is told how to split it, not that one device is too small; what is said stays."""
    done = run(*words.split(), "--json")
    assert (done.status, tuple(done.tree["plan"][axis] for axis in ("tp", "pp", "dp"))) == (status, plan)
    notes = [note for note in done.tree["assumptions"] if " replica" in note and "devices" in note and ":" in note]
    assert any(note.startswith(why) for note in notes) if why else not any("hold" in note for note in notes)


def test_values_of_one_question_have_one_layout() -> None:
    """What varies is compared on the replica of the question itself, which is said once."""
    done = run("infer", "llama-3.1-70b", "--on", "8xh100", "--vary", "batch=1,1024", "--width", "120")
    assert done.out.count("tp 4: the fewest devices that hold a replica") == 1
    assert [
        row["fits"]
        for row in run(*shlex.split("infer llama-3.1-70b --on 8xh100 --vary batch=1,1024 --json")).tree["rows"]
    ] == [True, False]


def test_a_replica_is_chosen_for_the_chance_that_is_wanted() -> None:
    """The note names --risk beside the usual chance, since the larger of both was asked of the replica."""
    done = run("infer", "llama-3.1-70b", "--on", "8xh100", "--risk", "97%")
    assert "with the chance of --risk, 90% at least" in " ".join(done.out.split())


@pytest.mark.parametrize("words", ["llama-3.1-8b --on 4xh100 --input-tokens 1024", "gemma-2-9b --on 4xrtx-4090"])
def test_the_largest_value_is_of_one_layout(words: str) -> None:
    """A replica of one device too stays what it is while a value grows, and the line under AGAIN says it."""
    done = run("infer", *words.split(), "--solve", "batch")
    largest = int(done.out.split("batch ")[1].split(" is the largest")[0].replace(",", ""))
    again = shlex.split(done.out.split("AGAIN\n")[1].replace("\\\n", " "))[1:]
    assert run(*again).status == 0
    again[again.index("--batch") + 1] = str(largest + 1)
    assert run(*again).status == 1
    rows = run("infer", *words.split(), "--vary", f"batch=1,{largest},{largest + 1}", "--json").tree["rows"]
    assert [row["fits"] for row in rows] == [True, True, False]
    assert len({row["max_concurrency"] for row in rows}) == 1


@pytest.mark.parametrize(
    "words",
    [
        "infer llama-3.1-70b --on 2xh100 --dp 2",
        "infer deepseek-v3 --on 8xh200 --dp 8",
        "serve llama-3.1-70b --on 4xh100 --rate 1/s --dp 4",
        "train llama-3.1-70b --on 16xh100 --tp 4 --pp 2 --dp 2 --recompute full --sharding zero1",
    ],
)
def test_the_nearest_change_fits_where_it_is_typed(words: str) -> None:
    """With the line under AGAIN, which states how many replicas there are, the change that is said to fit does."""
    page = run(*words.split()).out
    again = shlex.split(page.split("AGAIN\n")[1].replace("\\\n", " "))[1:]
    near = re.search(r"nearest change that fits: ((--\S+ [^\s,]+ ?)+)", " ".join(page.split()))
    assert near is not None and {"--tp", "--pp", "--cp"} & set(near[1].split())
    words_of = dict(zip(near[1].split()[::2], near[1].split()[1::2], strict=True))
    changed = [words_of.pop(before, word) for before, word in zip(["", *again], again, strict=False)]
    assert run(*again).status == 1
    assert run(*changed, *chain.from_iterable(words_of.items())).status == 0


@pytest.mark.parametrize(
    "words",
    [
        "train qwen3-8b --on 4xrtx-4090 --global-batch 64 --seq-len 8192",
        "train qwen3-8b --on rtx-4090 --global-batch 8 --stack unsloth --adapter lora --offload none --micro-batch 8",
    ],
)
def test_savers_together_take_what_is_said_beside_the_line_under_again(words: str) -> None:
    """Another framework that a saver brings has its own precision there, and what was kept nowhere stays so."""
    done = run(*words.split())
    again = shlex.split(done.out.split("AGAIN\n")[1].replace("\\\n", " "))[1:]
    for one in run(*words.split(), "--json").tree["proposals"]:
        flags = one["flags"].split()
        names = {word for word in flags if word.startswith("--")}
        kept = [word for name, word in zip(["", *again], again, strict=False) if not {name, word} & names]
        tree = run(*kept, *flags, "--json").tree
        assert (tree["device_bytes"], tree["step_seconds"]) == (one["device_bytes"], one["step_seconds"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("llama-3.1-70b", "--on", "16xh100"), "`shardwise plan train` tries every plan"),
        (("llama-3.1-8b", "--on", "rtx-4090"), "several together do (NEXT)"),
        (("llama-3.1-405b", "--on", "rtx-4090"), "--optimizer adam8bit"),
    ],
)
def test_where_no_change_fits_the_next_step_is_named(words: tuple[str, ...], says: str) -> None:
    """A training plan that no single change makes fit points to the search, or to savers together."""
    done = run("train", *words, "--width", "160")
    assert done.status == 1
    assert says in " ".join(done.out.split())


@pytest.mark.parametrize(
    ("stack", "named"),
    [
        ({}, {"--sharding", "--stack"}),
        ({"--stack": "fsdp2", "--sharding": "none"}, {"--sharding"}),
        ({"--stack": "transformers", "--sharding": "none"}, {"--sharding", "--stack"}),
    ],
)
def test_the_nearest_change_does_what_it_says(stack: dict[str, str], named: set[str]) -> None:
    """Its flags give the memory promised; they name the framework where their sharding brings another one."""
    words = ("train", "llama-3.1-8b", "--on", "8xh100", "--micro-batch", "2", "--global-batch", "16", "--width", "160")
    line = next(
        line for line in run(*words, *chain(*stack.items())).out.splitlines() if "nearest change that fits" in line
    )
    flags, promised = line.split("fits: ")[1].split(" (")
    changed = dict(zip(flags.split()[::2], flags.split()[1::2], strict=True))
    assert changed.keys() == named
    again = run(*words, *chain(*(stack | changed).items()))
    assert again.status == 0
    assert f"{promised.split(')')[0]} of " in again.out


def test_a_deployment_at_the_edge_is_a_risk() -> None:
    """`infer` says the chance that the cache holds the batch, and ends with 1 where it is below what was asked."""
    words = ("infer", "llama-3.1-8b", "--on", "1xh100", "--input-tokens", "4096", "--output-tokens", "512")
    room = run(*words, "--json").tree["max_concurrency"]
    edge = run(*words, "--batch", str(room), "--json").tree
    assert edge["fits"] and 0.3 < edge["chance_to_fit"] < 0.9
    risky = run(*words, "--batch", str(room), "--risk", "95%")
    assert risky.status == 1 and risky.out.startswith("RISKY ") and "too risky" in risky.out
    safe = run(*words, "--batch", str(room // 3), "--risk", "95%")
    assert safe.status == 0 and "chance to fit over 99%" in safe.out


@pytest.mark.parametrize("stack", ["transformers", "torchtune", "unsloth", "megatron"])
def test_a_saver_asked_again_is_what_it_was_said_to_be(stack: str) -> None:
    """Its flags, and beside them the batches that were left open, give its bytes and its seconds under any trainer."""
    words = ("train", "llama-3.2-1b", "--on", "rtx-4090", "--seq-len", "1024", "--json")
    tree = json.loads(run(*words, "--stack", stack, "--savers").out)
    able = [one for one in tree["savers"] + tree["proposals"] if not one["problem"]]
    assert able
    for one in able:
        own = () if "--stack" in one["flags"] else ("--stack", stack)
        again = trained(*words, *own, *one["batches"].split(), *one["flags"].split())
        assert figures(again) == (one["device_bytes"], one["step_seconds"]), one["flags"]


def test_a_change_to_recompute_sends_to_the_host_what_its_framework_does() -> None:
    """Unsloth keeps checkpoints on the host unless told: the change says so and is what the command then gives."""
    words = ("train", "mistral-7b-v0.1", "--on", "rtx-4090", "--stack", "unsloth", "--trains", "norms")
    words += ("--seq-len", "65536", "--micro-batch", "1", "--global-batch", "1", "--recompute", "none")
    (change,) = (one for one in run(*words, "--json").tree["changes"] if one["value"] == "full")
    assert change["offload"] == ["activations"]
    assert "--recompute full --offload activations" in " ".join(run(*words).out.split())
    again = run(*words[:-1], "full", "--json").tree
    assert (again["device_bytes"], again["plan"]["offload"]) == (change["needed_bytes"], ["activations"])


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b", "mistral-7b-v0.1 --adapter lora --seq-len 16384"])
def test_savers_that_fit_together_are_what_they_were_said_to_be(model: str) -> None:
    """Where nothing fits by one change, page and JSON say which do and beside which batches, without --savers too."""
    words = ("train", *model.split(), "--on", "rtx-4090")
    printed, read = both(*words)
    tree = read.tree
    assert tree["proposals"] and not tree["fits"] and not any(one["fits"] for one in tree["changes"])
    page = " ".join(printed.out.split())
    for at, one in enumerate(tree["proposals"]):
        assert one["batches"] == "--micro-batch 1 --global-batch 1"
        again = trained(*words, *one["batches"].split(), *one["flags"].split())
        assert figures(again) == (one["device_bytes"], one["step_seconds"])
        assert one["flags"] in page or at >= 4
    assert f"computed with {tree['proposals'][0]['batches']}" in page


@pytest.mark.parametrize(
    "words",
    [
        "mistral-7b-v0.1 --on 8xh100 --micro-batch 2",
        "zamba2-7b --on t4 --adapter vera --method dpo --offload activations --adapter-precision bf16 --micro-batch 1",
    ],
)
def test_a_change_names_the_framework_that_it_would_leave(words: str) -> None:
    """A sharding brings its own framework, and quantised weights another place to offload: both are named."""
    asked = ("train", *words.split())
    tree = json.loads(run(*asked, "--savers", "--json").out)
    batches = ("--global-batch", str(tree["job"]["global_batch"]))
    told = [(one["flags"], one["device_bytes"], "") for one in tree["savers"] + tree["proposals"] if not one["problem"]]
    told += [(f"--{c['field'].replace('_', '-')} {c['value']}", c["needed_bytes"], c["stack"]) for c in tree["changes"]]
    moved = 0
    for flags, device_bytes, stack in told:
        if any(flag in words for flag in flags.split() if flag.startswith("--")):
            continue
        moved += "--stack" in flags or bool(stack)
        more = ("--stack", stack) if stack else ()
        again = trained(*asked, *batches, *flags.split(), *more)
        assert again.device_bytes == pytest.approx(device_bytes, abs=1), flags
    assert moved


@pytest.mark.parametrize(
    "words",
    [
        "infer llama-3.1-8b --on rtx-4090 --batch 26 --input-tokens 1000 --output-tokens 500",
        "train llama-3.1-8b --on 8xh100 --global-batch 64 --sharding fsdp --micro-batch 2",
    ],
)
def test_json_says_whether_a_plan_fits_at_the_asked_risk(words: str) -> None:
    """What fits as predicted, and with less than the chance that was asked, is no fit in JSON as in the exit status."""
    plain, risky = (run(*words.split(), *more, "--json") for more in ((), ("--risk", "95%")))
    assert (plain.status, risky.status) == (0, 1)
    assert plain.tree["fits"] and plain.tree["chance_to_fit"] < 0.95
    assert not risky.tree["fits"]


def test_an_mfu_above_the_peak_says_why() -> None:
    """Packed documents leave little of the square that the convention counts."""
    words = "train", "llama-3.2-1b", "--on", "8xh100", "--seq-len", "131072", "--micro-batch", "1", "--sharding", "fsdp"
    packed = run(*words, "--document-lengths", "100,200,300")
    assert float(re.search(r"MFU ([\d.]+)%", packed.out)[1]) > 100 and "above 100%" in packed.out  # type: ignore[index]
    assert "above 100%" not in run(*words).out


@pytest.mark.parametrize(
    "batches",
    ["--accumulation 4 --micro-batch 4", "--accumulation 4", "--accumulation 4 --global-batch 64",
     "--accumulation 4 --global-batch 64 --micro-batch 2"],
)  # fmt: skip
def test_changes_beside_stated_accumulation_are_what_they_give_when_typed(batches: str) -> None:
    """What was stated stays and the batch follows from it, in what is promised and in the command of AGAIN."""
    words = {"--on": "8xh100-sxm", "--seq-len": "8192", "--stack": "megatron"}
    pairs = batches.split()
    words |= dict(zip(pairs[::2], pairs[1::2], strict=True))

    def asked(changed: dict[str, str]) -> list[str]:
        return ["train", "llama-3.1-8b", *(word for pair in (words | changed).items() for word in pair)]

    tree = run(*asked({}), "--savers", "--json").tree
    left = tree["savers"][0]["batches"].split()
    open_flags = dict(zip(left[::2], left[1::2], strict=True))
    assert tree["changes"] and not tree["fits"]
    for one in tree["changes"]:
        own = {"--" + one["field"].replace("_", "-"): str(one["value"])}
        again = trained(*asked(open_flags | own))
        assert figures(again) == (one["needed_bytes"], one["step_seconds"]), own
        assert (one["global_batch"] or tree["job"]["global_batch"]) == again.job.global_batch
    alone = [one for one in tree["savers"] if not one["problem"] and len(one["flags"].split()) == 2]
    for one in alone:
        flag, value = one["flags"].split()
        again = trained(*asked(open_flags | {flag: value}))
        assert figures(again) == (one["device_bytes"], one["step_seconds"]), flag
    page = run(*asked({})).out
    assert "--accumulation 4" in page.partition("AGAIN")[2]


@pytest.mark.parametrize(
    ("a", "b", "batch"),
    [
        ("--tp 8", "--tp 4 --pp 2", 16),
        ("--tp 8 --global-batch 64", "--tp 4 --pp 2", 64),
        ("--tp 8 --pp 2 --micro-batch 3", "--tp 4 --pp 2 --micro-batch 1", 48),
    ],
)
def test_plans_are_compared_at_one_batch(a: str, b: str, batch: int) -> None:
    """A batch that follows from each plan would be another job for each, and the larger one the faster plan."""
    asked = ("compare", "llama-3.1-70b", "--on", "64xh100", "--a", a, "--b", b)
    tree = run(*asked, "--json").tree
    assert (tree["a"]["job"]["global_batch"], tree["b"]["job"]["global_batch"]) == (batch, batch)
    assert "global_batch" not in tree["differences"]
    assert f"global_batch {batch}: not given: the same for both" in run(*asked).out


def test_batches_that_are_stated_are_compared_as_they_are() -> None:
    """Who gives each side its own batch asks for that."""
    asked = ("compare", "llama-3.1-8b", "--on", "8xh100", "--a", "--global-batch 8", "--b", "--global-batch 64")
    assert run(*asked, "--json").tree["differences"]["global_batch"] == {"a": 8, "b": 64}
