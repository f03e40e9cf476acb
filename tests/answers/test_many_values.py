"""One question at many values: rows as `train` and `infer` answer them, and the last values that keep the verdict."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from command_line import run

TRAIN = ("train", "llama-3.1-8b", "--on", "8xh100", "--sharding", "fsdp", "--recompute", "full")
INFER = ("infer", "llama-3.1-8b", "--on", "1xh100", "--input-tokens", "1024", "--output-tokens", "128")


def test_every_row_is_the_answer_of_its_values() -> None:
    """A row has the headlines that the command with its values prints."""
    rows = run(*TRAIN, "--vary", "seq_len=4096..16384", "--vary", "tp=1,2", "--json").tree["rows"]
    assert [(row["seq_len"], row["tp"]) for row in rows[:3]] == [("4096", "1"), ("4096", "2"), ("8192", "1")]
    alone = run(*TRAIN, "--seq-len", "8192", "--tp", "2", "--json").tree
    assert {key: rows[3][key] for key in ("fits", "step_seconds", "mfu")} == {
        key: alone[key] for key in ("fits", "step_seconds", "mfu")
    }


def test_a_table_says_what_it_assumes() -> None:
    """What every row rests on stands once, and what rests on one of several devices, such as its price, under it."""
    out = " ".join(run("infer", "llama-3.1-8b", "--on", "l40s,h100", "--batch", "8").out.split())
    assumed = out[out.index("ASSUMED") :]
    assert assumed.count("- input_tokens 512: not given") == assumed.count("- engine vllm") == 1
    assert "- l40s: price = " in assumed and "- h100: price = " in assumed and "- batch" not in assumed
    varied = " ".join(run(*TRAIN, "--vary", "tp=1,2").out.split())
    assert "- seq_len 4096: not given" in varied and "fills 8 devices" not in varied


def test_sizes_that_nobody_gave_are_assumed_by_infer() -> None:
    """Seconds and dollars of a token rest on the batch and on both lengths: each is listed where it was not given."""

    def assumed(*words: str) -> list[str]:
        notes = run("infer", "llama-3.1-8b", "--on", "1xh100", "--json", *words).tree["assumptions"]
        return [note.partition(" ")[0] for note in notes if note.endswith(": not given")]

    assert assumed() == ["batch", "input_tokens", "output_tokens"]
    assert assumed("--input-tokens", "100") == ["batch", "output_tokens"]
    assert assumed("--batch", "1", "--input-tokens", "100", "--output-tokens", "0") == []


def test_values_that_laws_refuse_are_rows_that_say_why() -> None:
    """A table is not lost for one value that cannot be; where none can be, the problems are the answer."""
    done = run(*TRAIN, "--vary", "tp=2,3", "--json")
    assert done.status == 0
    assert done.tree["rows"][1]["step_seconds"] is None and "tp" in done.tree["rows"][1]["problem"]
    assert "tp" in run(*TRAIN, "--vary", "tp=3,5", "--json").fields


def test_devices_stand_in_one_table() -> None:
    """Devices without a number take that of the first, and each row is that device's own answer."""
    rows = run(*INFER[:2], "--on", "2xh100,mi300x", "--tp", "2", "--json").tree["rows"]
    assert [row["on"] for row in rows] == ["2xh100", "2xmi300x"]
    alone = run(*INFER[:2], "--on", "2xmi300x", "--tp", "2", "--json").tree
    assert rows[1]["tpot_seconds"] == alone["tpot_seconds"]


@pytest.mark.parametrize(
    ("words", "field", "step"),
    [
        ((*TRAIN, "--solve", "seq_len"), "--seq-len", 128),
        ((*INFER, "--solve", "batch", "--max-tpot", "15ms"), "--batch", 1),
        ((*INFER, "--solve", "input_tokens", "--risk", "90%"), "--input-tokens", 1),
        # Where one sequence alone is too slow or too dear, more are not.
        ((*INFER, "--solve", "batch", "--min-rate", "1000", "--max-tpot", "15ms"), "--batch", 1),
        ((*TRAIN, "--tokens", "1e9", "--solve", "seq_len", "--max-cost", "260"), "--seq-len", 128),
        ((*INFER, "--solve", "memory", "--batch", "64"), "--memory", -1e7),
        ((*INFER, "--solve", "memory_bandwidth", "--max-tpot", "5ms"), "--memory-bandwidth", -1e9),
        ((*INFER, "--solve", "price", "--max-cost", "2"), "--price", 1e-3),
        ((*TRAIN, "--solve", "tokens", "--max-cost", "1000"), "--tokens", 1e6),
        ((*TRAIN, "--tp", "2", "--solve", "fast_bandwidth", "--max-step", "3s"), "--fast-bandwidth", -1e8),
        (("serve", *INFER[1:], "--solve", "rate", "--p99-ttft", "1s"), "--rate", 0.1),
    ],
)
def test_the_solved_value_is_the_last_that_keeps_the_verdict(words: tuple[str, ...], field: str, step: int) -> None:
    """The command with the value ends with 0, and with the next value with 1 or a law."""
    solved = run(*words, "--json")
    best = solved.tree["solve"]["value"]
    base = [word for i, word in enumerate(words) if word != "--solve" and words[i - 1] != "--solve" and word != field]
    if field in words:
        del base[words.index(field)]
    assert run(*base, field, str(best)).status == 0
    assert run(*base, field, str(best + step)).status in (1, 2)


def test_what_was_tried_around_an_answer_is_drawn(tmp_path: Path) -> None:
    """A picture that is asked for is written."""
    file = tmp_path / "solved.svg"
    assert run(*INFER, "--solve", "memory", "--batch", "64", "--plot", str(file)).status == 0
    assert "<svg" in file.read_text(encoding="utf-8")


def test_the_command_of_a_solved_value_keeps_the_verdict() -> None:
    """What AGAIN says has the value with its unit, and ends with 0."""
    page = run(*INFER, "--solve", "memory", "--batch", "64").out
    words = page[page.index("  shardwise infer") :].replace("\\\n", " ").split()[1:]
    assert words[-1].endswith("GB") and run(*words).status == 0


def test_the_fewest_devices_are_found() -> None:
    """Devices are tried from one, by doubling within a node and by whole nodes beyond it."""
    words = ("train", "llama-3.1-70b", "--on", "64xh100", "--sharding", "fsdp", "--recompute", "full")
    best = run(*words, "--solve", "devices", "--json").tree["solve"]["value"]
    less = [word.replace("64x", f"{best - 8}x") for word in words]
    assert best == 16 and run(*less).status == 1


PLANS = {
    "the largest batch within a step": (
        "train", "gpt2", "--on", "2xh100", "--stack", "xla", "--max-step", "30ms", "global_batch", 2,
    ),
    "the longest prompt of any deployment": (
        "infer", "llama-3.1-8b", "--on", "1xh100", "--max-ttft", "15ms", "--batch", "1", "input_tokens", 1,
    ),
    "the slowest links of any plan": (
        "train", "gpt2", "--on", "16xh100", "--global-batch", "64", "--layout", "1d", "--tp", "1", "--cp", "1",
        "--pp", "1..2", "--stack", "xla", "--max-step", "60ms", "slow_bandwidth", -0.01,
    ),
    "the most requests of any deployment": (
        "serve", "llama-3.1-8b", "--on", "1xh100", "--p50-ttft", "200ms", "--requests", "80",
        "--input-tokens", "64", "--output-tokens", "8", "--max-batched-tokens", "2048", "--max-sequences", "64",
        "rate", 0.01,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_a_search_is_solved_for_what_it_is_given(name: str) -> None:
    """The search of the value finds a plan, that of the next one none; what it searches itself is refused."""
    *words, field, step = PLANS[name]
    asked, flag = [str(word) for word in words], "--" + str(field).replace("_", "-")
    solved = run("plan", *asked, "--solve", str(field), "--json").tree
    best = solved["solve"]["value"]
    beyond = best + (step if isinstance(step, int) else step * best)  # a part of it is a digit or more
    assert solved["solve"]["plan"] and solved["at"]["problem"] is None
    assert run("plan", *asked, flag, str(best)).status == 0
    assert run("plan", *asked, flag, str(beyond)).status == 1
    assert run("plan", *asked, "--solve", "tp").status == 2


def test_a_search_that_finds_nothing_says_what_legal_plans_lack() -> None:
    """Where memory rejects all that is legal the reason is memory, however many more plans a law refuses."""
    words = "plan train qwen3-8b --on 3xl40s --global-batch 12 --vary seq_len=1024 --json"
    problem = run(*words.split()).tree["rows"][0]["problem"]
    assert "more memory than a device has" in problem and " fits (" in problem


def test_a_search_finds_the_fewest_devices() -> None:
    """With half of them no plan fits, and the number before --on is the most that are tried."""
    words = ("plan", "train", "llama-3.1-8b", "--global-batch", "16")
    best = run(*words, "--on", "h100", "--solve", "devices", "--json").tree["solve"]["value"]
    assert run(*words, "--on", f"{best}xh100").status == 0 and run(*words, "--on", f"{best // 2}xh100").status == 1
    assert run(*words, "--on", "2xh100", "--solve", "devices").status == 1


def test_a_price_is_solved_to_its_limit() -> None:
    """Dollars a million tokens are in proportion to the price, so the solved price meets the limit to a thousandth."""
    words = (*INFER, "--batch", "8", "--max-cost", "2")
    price = run(*words, "--solve", "price", "--json").tree["solve"]["value"]
    usd = run(*words[:-2], "--price", str(price), "--json").tree["usd_per_million_output_tokens"]
    assert 1.99 < usd <= 2


def test_a_limit_of_one_plan_is_its_exit_status() -> None:
    """`train` and `infer` end with 1 where a limit is broken, and say which with its value."""
    assert run(*TRAIN, "--max-step", "1h").status == 0
    done = run(*TRAIN, "--max-step", "1ms", "--json")
    assert done.status == 1 and done.tree["broken"]["max_step"] == done.tree["step_seconds"]
    assert run(*INFER, "--max-ttft", "1us").out.startswith("MISSES    --max-ttft")


def test_a_limit_without_its_unit_is_seen_to_be_of_another_size() -> None:
    """A verdict shows each limit beside what it judges: 200 is seconds, so a limit meant as 200 ms reads 3.33 min."""
    met = run(*INFER, "--max-ttft", "200")
    assert met.status == 0 and re.match(r"MEETS +--max-ttft: [\d.]+ ms, the limit 3.33 min\n", met.out)
    both = run(*INFER, "--max-ttft", "1us", "--max-latency", "1h")
    assert both.status == 1 and re.match(r"MISSES +--max-ttft: .* the limit 1.00 us\nMEETS +--max-latency", both.out)


def test_what_moves_an_answer_is_ordered() -> None:
    """Constants come before choices, each with the widest first, and a faster device never slows a plan."""
    found = run(*TRAIN, "--sensitivity", "--json").tree["sensitivity"]
    constants = [row for row in found if row["kind"] == "constant"]
    reach = [max(abs(row["least"] - 1), abs(row["most"] - 1)) for row in constants]
    assert reach == sorted(reach, reverse=True)
    assert all(row["least"] <= 1 <= row["most"] + 1e-9 for row in constants)
    assert {row["what"] for row in found} >= {"matrix FLOP/s", "recompute", "tp"}


def test_searches_stand_in_one_table(tmp_path: Path) -> None:
    """Each row of `plan --vary`, or of `plan infer` on several devices, is the best plan of that search."""
    rows = tmp_path / "rows.csv"
    words = ("plan", "infer", "llama-3.1-8b", "--input-tokens", "512")
    found = run(*words, "--on", "h100,b200", "--rows", str(rows), "--json").tree["rows"]
    alone = run(*words, "--on", "b200", "--json").tree["best"][0]
    assert [row["on"] for row in found] == ["h100", "b200"] and rows.read_text().count("\n") == 3
    assert found[1]["tpot_seconds"] == alone["tpot_seconds"] and "batch" in found[1]["plan"]
    varied = run(
        "plan", "train", "gpt2", "--on", "2xh100", "--global-batch", "8", "--vary", "seq_len=512,1024", "--json"
    )
    assert [row["fits"] for row in varied.tree["rows"]] == [True, True]


def test_ways_to_fine_tune_are_compared_across_devices() -> None:
    """A row is the quickest way on that device, as it is alone; a device on which nothing fits says so."""
    words = ("plan", "train", "qwen3-32b", "--qlora", "--seq-len", "2048")
    done = run(*words, "--on", "l40s,h100,rtx-3060", "--price", "2", "--json")
    rows, alone = done.tree["rows"], run(*words, "--on", "l40s", "--json").tree["recipes"][0]
    assert done.status == 0 and [row["on"] for row in rows] == ["l40s", "h100", "rtx-3060"]
    assert rows[0]["tokens_per_second_per_gpu"] == alone["tokens_per_second_per_gpu"]
    assert rows[0]["usd_per_million_tokens"] == pytest.approx(2 / 3600 / alone["tokens_per_second_per_gpu"] * 1e6)
    assert "base nf4" in rows[0]["plan"] and "loss fused-linear" in rows[0]["plan"]
    assert run(*words, "--on", "l40s", "--solve", "seq_len", "--json").fields == ["solve"]


def test_searches_of_which_none_is_feasible_say_what_each_lacks() -> None:
    """That nothing fits is an answer with status 1, with what most plans of each device lack."""
    words = ("plan", "infer", "qwen3-32b", "--on", "rtx-4090,l40s")
    done = run(*words)
    said = " ".join(done.out.split())
    assert (done.status, done.err) == (1, "") and said.count("the nearest is short of") == 2
    assert all("short of" in row["problem"] for row in run(*words, "--json").tree["rows"])


def test_bars_of_what_moves_an_answer_are_beside_the_widest() -> None:
    """The widest bar is as long as bars are, however small it is, so that the others can be told apart."""
    bars = [line.count("#") for line in run(*TRAIN, "--sensitivity").out.splitlines()]
    assert max(bars) == 16 and len({bar for bar in bars if bar}) > 2


def test_values_that_are_numbers_are_numbers_in_a_file(tmp_path: Path) -> None:
    """What was varied is a column of numbers in Parquet, and of words where one of them is no number."""
    polars = pytest.importorskip("polars")
    whole, words = tmp_path / "whole.parquet", tmp_path / "words.parquet"
    run(*INFER, "--vary", "batch=1,8", "--rows", str(whole))
    assert polars.read_parquet(whole)["batch"].to_list() == [1, 8]
    run(*INFER, "--vary", "kv_cache=fp8,bf16", "--rows", str(words))
    assert polars.read_parquet(words)["kv_cache"].to_list() == ["fp8", "bf16"]


def test_rows_and_plots_are_written(tmp_path: Path) -> None:
    """--rows writes the table and --plot the lines; a file that is no table is refused."""
    rows, plot = tmp_path / "rows.csv", tmp_path / "rows.svg"
    assert run(*INFER, "--vary", "batch=1..8", "--rows", str(rows), "--plot", str(plot)).status == 0
    assert rows.read_text().count("\n") == 5 and "</svg>" in plot.read_text()
    assert run(*INFER, "--vary", "batch=1..8", "--rows", "x.xlsx", "--json").fields == ["rows"]


def test_what_a_solved_field_needs_is_said() -> None:
    """A split with a host that is not named is no split that fails: the host is asked for."""
    words = ("infer", "llama-3.1-70b", "--on", "rtx-4090", "--engine", "llama.cpp", "--weights", "q4_k_m", "--json")
    assert run(*words, "--solve", "gpu_layers").fields == ["host"]
    # Replicas of what no device holds fit on no number, though a batch cannot be split over some.
    words = ("train", "llama-3.1-8b", "--on", "8xh100", "--global-batch", "8", "--solve", "devices")
    assert (run(*words).status, "it does not fit" in run(*words).out) == (1, True)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--vary", "colour=1,2"), "vary"),
        (("--vary", "batch=8..1"), "batch"),
        (("--vary", "batch=0..4"), "batch"),
        (("--vary", "batch"), "vary"),
        (("--vary", "batch=1,x"), "batch"),
        (("--vary", "on=h100,nothing"), "device"),
        (("--solve", "engine"), "solve"),
        (("--solve", "batch", "--vary", "tp=1,2"), "solve"),
        (("--solve", "price"), "solve"),
        (("--solve", "fast_bandwidth"), "solve"),
        (("--solve", "fast_bandwidth", "--tp", "2"), "tp"),
    ],
)
def test_questions_that_cannot_be_asked_are_refused(words: tuple[str, ...], field: str) -> None:
    """Fields that are not there, ranges that run backwards, two questions at once, and what no limit bounds."""
    assert run(*INFER, *words, "--json").fields == [field]


@pytest.mark.parametrize(("on", "engine"), [("mi300x", "vllm"), ("apple-m3-max-40core", "llama.cpp"), ("h100", "vllm")])
def test_a_vendor_has_its_usual_engine(on: str, engine: str) -> None:
    """Without --engine each device of a table is asked with what people run on it, and the page says so."""
    found = run("infer", "llama-3.1-8b", "--on", f"1x{on}", "--weights", "q4_k_m", "--json")
    if found.status == 2:
        found = run("infer", "llama-3.1-8b", "--on", f"1x{on}", "--json")
    assert found.tree["plan"]["engine"] == engine
    assert any("not given" in note and engine in note for note in found.tree["assumptions"]) == (engine != "vllm")


@pytest.mark.parametrize(
    ("on", "stack", "asked"),
    [
        ("8xtpu-v5p", "xla", "llama-3.1-8b --sharding fsdp"),
        ("8xmi300x", "megatron", "llama-3.1-8b --sharding fsdp"),
        ("m3max", "pytorch", "gpt2"),
    ],
)
def test_a_vendor_has_its_usual_stack(on: str, stack: str, asked: str) -> None:
    """Without --stack devices train with what runs on them, and the page says so."""
    for words in (("train",), ("plan", "train", "--top", "1", "--cp", "1", "--pp", "1")):
        more = asked.split()[: 1 if words[0] == "train" else None]
        found = run(*words, *more, "--on", on, "--seq-len", "1024", "--global-batch", "8", "--json")
        answer = found.tree["best"][0] if words[0] == "plan" else found.tree
        assert answer["plan"]["stack"] == stack
        if words == ("train",):
            assert any("not given" in note for note in answer["assumptions"]) == (stack != "megatron")


@pytest.mark.parametrize("offload", ["optimizer", "none,optimizer"])
def test_a_search_of_adapters_runs_a_stack_that_offloads(offload: str) -> None:
    """Offloads to try have one stack that runs each of them, as `train` would take it."""
    asked = ("llama-3.1-8b", "--on", "8xa100-sxm-80gb", "--adapter", "lora", "--global-batch", "64", "--json")
    found = run("plan", "train", *asked, "--top", "1", "--tp", "1", "--pp", "1", "--cp", "1", "--offload", offload)
    alone = run("train", *asked, "--dp", "8", "--offload", "optimizer")
    assert found.status in (0, 1)
    assert found.tree["best"][0]["plan"]["stack"] == alone.tree["plan"]["stack"]


@pytest.mark.parametrize("words", [("plan", "infer", "--top", "1"), ("plan", "serve", "--rate", "1/s", "--top", "1")])
def test_a_search_runs_the_engine_of_the_vendor(words: tuple[str, ...]) -> None:
    """A search proposes what `infer` would take on such devices, and what it is told where it is told."""
    for more, engine in (((), "vllm"), (("--engine", "vllm-2025"), "vllm-2025")):
        found = run(*words, "llama-3.1-8b", "--on", "2xmi300x", *more, "--json")
        best = found.tree["best"][0]
        assert best["plan"].get("engine", best.get("engine")) == engine
