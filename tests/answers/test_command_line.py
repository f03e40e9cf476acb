"""What the command line prints: the verdict first, numbers that add up, and a command that says it all again."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from command_line import Done, both, run
from shardwise import cli
from shardwise.answers import _commands
from shardwise.answers._case import DEFAULT_SEQ_LEN
from shardwise.answers._help import EXAMPLES, FIRST
from shardwise.plans import Serving, stack_names
from shardwise.serving import engine_names

TRAIN = [
    "train",
    "llama-3.1-70b",
    "--on",
    "64xh100",
    "--tp",
    "8",
    "--pp",
    "4",
    "--seq-len",
    "8192",
    "--global-batch",
    "128",
]
TOO_BIG = ["train", "llama-3.1-70b", "--on", "16xh100", "--tp", "8", "--seq-len", "8192", "--micro-batch", "1"]
INFER = [
    "infer",
    "llama-3.1-70b",
    "--on",
    "8xh100",
    "--tp",
    "8",
    "--batch",
    "16",
    "--input-tokens",
    "1024",
    "--output-tokens",
    "64",
]
CASES = {
    "train": TRAIN,
    "no fit": TOO_BIG,
    "experts": [
        "train",
        "mixtral-8x7b",
        "--on",
        "16xh100",
        "--tp",
        "2",
        "--ep",
        "8",
        "--sharding",
        "zero1",
        "--recompute",
        "full",
        "--seq-len",
        "4096",
    ],
    "fsdp": [
        "train",
        "llama-3.1-8b",
        "--on",
        "8xa100",
        "--sharding",
        "fsdp",
        "--stack",
        "fsdp2",
        "--tokens",
        "1T",
        "--price",
        "2",
    ],
    "interleaved": [
        "train",
        "llama-3.1-8b",
        "--on",
        "8xh100",
        "--tp",
        "2",
        "--pp",
        "4",
        "--vpp",
        "2",
        "--global-batch",
        "64",
    ],
    "own layers": [
        "train",
        "llama-3.1-8b",
        "--on",
        "8xh100",
        "--pp",
        "8",
        "--stage-layers",
        "3,4,4,4,4,4,4,5",
        "--no-overlap",
    ],
    "own model": [
        "train",
        "llama-3.1-8b",
        "--on",
        "2x4xh100",
        "--num-layers",
        "16",
        "--tied",
        "--nic-bandwidth",
        "200Gb/s",
        "--ideal",
    ],
    "infer": INFER,
    "infer no fit": [
        "infer",
        "llama-3.1-70b",
        "--on",
        "2xh100",
        "--tp",
        "2",
        "--batch",
        "256",
        "--input-tokens",
        "4096",
    ],
    "count": ["count", "mixtral-8x7b", "--on", "8xh100", "--tp", "2", "--seq-len", "2048", "--tokens", "1T"],
}
REPORTS = [name for name in CASES if name != "count"]


def headline(text: str) -> str:
    """Return the first word of a page."""
    return text.split(maxsplit=1)[0]


@pytest.mark.parametrize("name", CASES)
def test_pages_fit_eighty_columns(name: str) -> None:
    """A page is plain text of at most 80 columns, without trailing blanks, when it is not a terminal's."""
    lines = run(*CASES[name]).out.splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    assert all(line == line.rstrip() and "\x1b" not in line for line in lines)


@pytest.mark.parametrize("width", [60, 100, 140])
def test_the_width_is_kept(width: int) -> None:
    """A page asked for in so many columns has no longer lines, and uses them."""
    lines = run(*TRAIN, "--width", str(width)).out.splitlines()
    assert width - 20 < max(map(len, lines)) <= width


def test_the_verdict_comes_first() -> None:
    """The first line says whether it fits, the status too, and what does not fit is followed by what would."""
    fits, too_big = run(*TRAIN), run(*TOO_BIG)
    assert (fits.status, headline(fits.out)) == (0, "FITS")
    assert (too_big.status, too_big.out[:6]) == (1, "NO FIT")
    assert "GiB too much" in too_big.out.splitlines()[1]
    assert "limit " in too_big.out
    assert "no single change tried fits" in too_big.out


def test_the_nearest_change_fits_when_it_is_made() -> None:
    """The change that a page proposes makes the plan fit, in the time that it states."""
    case = [
        "train",
        "llama-3.1-70b",
        "--on",
        "64xh100",
        "--tp",
        "8",
        "--pp",
        "2",
        "--seq-len",
        "8192",
        "--micro-batch",
        "1",
        "--global-batch",
        "64",
    ]
    before = run(*case, "--json")
    assert before.status == 1
    best = before.tree["changes"][0]
    assert best["fits"]
    name = best["field"].replace("_", "-")
    assert f"--{name} {best['value']}" in run(*case).out
    words = [w for i, w in enumerate(case) if w != f"--{name}" and case[i - 1] != f"--{name}"]
    after = run(*words, f"--{name}", str(best["value"]), "--json")
    assert after.status == 0
    assert after.tree["memory"]["device_bytes"] == pytest.approx(best["needed_bytes"])
    assert after.tree["step_seconds"] == pytest.approx(best["step_seconds"])


@pytest.mark.parametrize(
    "words",
    [
        "train gpt2 --on 2xa100 --global-batch 8",
        "train llama-3.1-8b --on rtx-4090",
        "serve gpt2 --on 1xa100-sxm-80gb --rate 1/s --requests 50 --input-tokens 100 --output-tokens 20",
        "plan train gpt2 --on 2xa100 --global-batch 8 --pp 1 --sharding zero1 --top 1",
        "train gpt2 --on 2xa100 --tp 7",
    ],
)
def test_a_page_and_json_of_one_answer_are_those_of_two(words: str) -> None:
    """Whichever is asked for, the answer is the same: page and JSON only show it."""
    asked = words.split()
    once, apart = both(*asked), (run(*asked), run(*asked, "--json"))
    assert [_untimed(done) for done in once] == [_untimed(done) for done in apart]


def _untimed(done: Done) -> Done:
    """Return what was printed without how long a search took."""
    # The sentence with it may be wrapped elsewhere.
    return replace(done, out=re.sub(r'\bin [\d.]+ m?s\b|"seconds": [\d.e-]+', "", " ".join(done.out.split())))


@pytest.mark.parametrize("name", REPORTS)
def test_the_command_to_copy_gives_the_same_answer(name: str) -> None:
    """The command at the end of a page reproduces the answer to the last digit."""
    text = run(*CASES[name]).out.split("AGAIN\n")[1]
    words = shlex.split(text.replace("\\\n", " "))
    assert words[0] == "shardwise"
    first, again = run(*CASES[name], "--json"), run(*words[1:], "--json")
    assert first.status == again.status
    left, right = first.tree, again.tree
    for tree in (left, right):
        tree.pop("assumptions")
        tree.get("job", {}).pop("precision", None)
        tree.get("job", {}).pop("weights", None)
        # The batches that a command leaves open.
        for one in tree.get("proposals", ()):
            one.pop("batches")
    assert left == right


def test_json_keys_of_training() -> None:
    """The keys that programs rely on are there, and the parts of memory and time add up."""
    tree = run(*TRAIN, "--tokens", "15T", "--json").tree
    wanted = (
        "fits step_seconds tokens_per_second_per_gpu model_flops_per_second_per_gpu mfu hfu mfu_convention interval "
        "plan assumptions changes days device_hours usd memory step"
    )
    assert not set(wanted.split()) - tree.keys()
    memory, step = tree["memory"], tree["step"]
    assert memory["peak_bytes"] < memory["reserved_bytes"] < memory["device_bytes"] < memory["limit_bytes"]
    assert sum(memory["at_peak"].values()) == pytest.approx(memory["device_bytes"])
    assert sum(stage["count"] for stage in memory["stages"]) == 4
    assert sum(stage["count"] * stage["layers"] for stage in memory["stages"]) == 80
    stage = memory["stages"][memory["peak_stage"]]
    assert stage["moments"][memory["peak_moment"]] == max(stage["moments"].values()) == stage["peak_bytes"]
    names = ("compute_seconds", "bubble_seconds", "optimizer_seconds", "overhead_seconds")
    parts = [step[name] for name in names] + list(step["exposed_seconds"].values())
    assert sum(parts) == pytest.approx(tree["step_seconds"])
    assert tree["days"] * 24 * 64 == pytest.approx(tree["device_hours"])
    assert tree["usd"] == pytest.approx(tree["device_hours"] * tree["cluster"]["usd_per_device_hour"])
    assert tree["plan"]["dp"] == 2
    low_high = tree["interval"]["step_seconds"]
    assert low_high["low"] <= tree["step_seconds"] * 1.001
    assert low_high["low"] < low_high["high"]


@pytest.mark.parametrize("name", ["train", "no fit", "experts", "fsdp", "interleaved", "own layers", "own model"])
def test_parts_add_up_for_every_plan(name: str) -> None:
    """Memory at the peak and the seconds of a step are the sums of the parts that bars are made of."""
    tree = run(*CASES[name], "--json").tree
    assert sum(tree["memory"]["at_peak"].values()) == pytest.approx(tree["memory"]["device_bytes"])
    step = tree["step"]
    names = ("compute_seconds", "bubble_seconds", "optimizer_seconds", "overhead_seconds")
    seconds = sum(step[name] for name in names) + sum(step["exposed_seconds"].values())
    assert seconds == pytest.approx(tree["step_seconds"])


def test_money_and_days_are_only_given_for_a_budget() -> None:
    """Without tokens there is no date and no bill."""
    tree = run(*TRAIN, "--json").tree
    assert (tree["days"], tree["device_hours"], tree["usd"]) == (None, None, None)


def test_json_keys_of_serving() -> None:
    """The keys that programs rely on are there."""
    tree = run(*INFER, "--json").tree
    wanted = (
        "fits ttft_seconds tpot_seconds request_seconds output_tokens_per_second weights_bytes_per_gpu "
        "kv_cache_bytes_per_gpu kv_cache_tokens max_concurrency usd_per_million_output_tokens plan changes"
    )
    assert not set(wanted.split()) - tree.keys()
    assert run(*CASES["infer no fit"], "--json").status == 1


def test_json_keys_of_counts() -> None:
    """Counts of GPT-2 are those of its publication and of PyTorch's FLOP counter."""
    tree = run("count", "gpt2", "--json").tree
    assert tree["params"]["total"] == tree["params"]["active"] == 124439808
    assert tree["params"]["embedding"] == (50257 + 1024) * 768
    assert tree["flops"]["forward_full_attention"] == 291648307200
    square = 12 * 4 * 768 * 1024 * 1024
    assert tree["flops"]["forward_full_attention"] - tree["flops"]["forward_causal"] == square / 2
    assert tree["flops"]["train_per_token"] == pytest.approx(3 * 291648307200 / 1024)
    layers = [p for p in tree["operators"] if p["part"] == "layer"]
    assert [p["times"] for p in layers] == [12]
    assert sum(op["parameters"] for op in layers[0]["operators"]) == 7087872


def test_rows_of_operators_add_up_to_the_model() -> None:
    """Parameters of the operator tables, each as often as it is there, are those of the model, shared blocks once."""
    for model in ("mixtral-8x7b", "zamba2-7b", "gemma-2-9b", "gpt2"):
        tree = run("count", model, "--json").tree
        rows = [part["copies"] * op["parameters"] for part in tree["operators"] for op in part["operators"]]
        assert sum(rows) == tree["params"]["total"]


def test_recompute_adds_a_forward_pass_and_keeps_less() -> None:
    """Counting with full recompute adds FLOPs a token and leaves the input of each layer alone."""
    none, full = (run("count", "llama-3.1-8b", "--recompute", mode, "--json").tree for mode in ("none", "full"))
    assert full["flops"]["train_per_token"] == none["flops"]["train_per_token"]
    assert full["flops"]["train_per_token_with_recompute"] > none["flops"]["train_per_token_with_recompute"]
    kept = [op["activation_bytes"] for part in full["operators"] if part["part"] == "layer" for op in part["operators"]]
    assert sum(kept) == 4096 * 4096 * 2


@pytest.mark.parametrize("what", ["step", "memory", "ttft", "tpot"])
def test_explanations_add_up_at_every_depth(what: str) -> None:
    """Parts of a number, and of every number below it, sum to it; formulas stand beside them."""
    case = ["explain", "llama-3.1-8b", "--on", "8xh100", "--tp", "2", "--depth", "6", "--json", "--what"]
    tree = run(*case, what).tree
    waiting, opened = [tree], 0
    while waiting:
        node = waiting.pop()
        assert node["name"]
        if node["parts"]:
            opened += 1
            assert node["formula"]
            assert sum(p["amount"] for p in node["parts"]) == pytest.approx(node["value"], rel=1e-9)
        for part in node["parts"]:
            if "node" in part:
                assert part["times"] * part["node"]["value"] == pytest.approx(part["amount"], rel=1e-9)
                waiting.append(part["node"])
    assert opened > 3


def test_a_path_opens_what_it_names() -> None:
    """A path of names leads to the same number as a path of places."""
    case = ["explain", "llama-3.1-8b", "--on", "8xh100", "--tp", "2", "--json", "--path"]
    top = run(*case[:-1]).tree
    names = [part["label"] for part in top["parts"]]
    by_name, by_place = run(*case, names[0]).tree, run(*case, "1").tree
    assert by_name == by_place
    assert by_name["path"] == names[:1]
    assert by_name["value"] * by_name["times"] == pytest.approx(top["parts"][0]["amount"])


def test_comparison_names_the_faster_plan_and_what_differs() -> None:
    """Both reports, their ratio and the fields that differ stand side by side."""
    case = ["compare", "llama-3.1-70b", "--on", "64xh100", "--seq-len", "8192", "--global-batch", "128"]
    sides = ["--a", "--tp 8 --pp 4", "--b", "--tp 4 --pp 8"]
    tree = run(*case, *sides, "--json").tree
    assert {"schema": 1, **tree["a"]} == run(*TRAIN, "--json").tree
    assert tree["ratio"]["step"] == pytest.approx(tree["b"]["step_seconds"] / tree["a"]["step_seconds"])
    assert tree["differences"]["tp"] == {"a": 8, "b": 4}
    assert set(tree["differences"]) == {"tp", "pp"}
    page = run(*case, *sides).out
    assert page.startswith("COMPARE")
    assert "faster per device" in page.splitlines()[0]


@pytest.mark.parametrize("nothing", [["--a", ""], ["--a= "], []])
def test_a_baseline_is_compared_as_it_is(nothing: list[str]) -> None:
    """A side without flags of its own is the case itself, whether it is left out or says nothing."""
    shared = ["llama-3.1-8b", "--on", "8xh100", "--seq-len", "4096", "--global-batch", "64"]
    tree = run("compare", *shared, *nothing, "--b", "--tp 2", "--json").tree
    assert {"schema": 1, **tree["a"]} == run("train", *shared, "--json").tree
    assert tree["b"]["plan"]["tp"] == 2


def test_what_rounding_leaves_is_nothing() -> None:
    """A plan without a pipeline has no bubble at all: one of the other plan is new, and no ratio to a residue."""
    case = ["compare", "llama-3.1-8b", "--on", "16xh100", "--seq-len", "4096", "--global-batch", "32"]
    sides = ["--a", "--tp 8 --micro-batch 16", "--b", "--tp 4 --pp 2 --micro-batch 16"]
    row = next(line.split() for line in run(*case, *sides).out.splitlines() if "bubble" in line)
    assert (row[1], row[-1]) == ("-", "new")
    tree = run(*case, *sides, "--json").tree
    assert tree["a"]["step"]["bubble_seconds"] == 0
    assert tree["a"]["step"]["pipeline"]["bubble"] == 0


def test_two_case_files_compare_like_their_flags(tmp_path: Path) -> None:
    """Two saved cases give the comparison that their flags give."""
    files = [str(tmp_path / name) for name in ("a.toml", "b.json")]
    assert run(*TRAIN, "--save", files[0]).status == 0
    other = [w if w != "8" else "4" for w in TRAIN]
    run(*other, "--save", files[1])
    tree = run("compare", *files, "--json").tree
    assert {"schema": 1, **tree["a"]} == run(*TRAIN, "--json").tree
    assert {"schema": 1, **tree["b"]} == run(*other, "--json").tree


def test_listings_show_one_with_its_sources() -> None:
    """An exact name shows one entry, words show a table, nothing found is status 1 and names what is near."""
    assert "[1] NVIDIA" in run("devices", "h100-sxm-80gb").out
    assert len(run("devices", "h100", "--json").tree["devices"]) > 2
    assert run("models", "llama-3.1-70b", "--json").tree["models"][0]["parameters"] == 70553706496
    assert "near" not in run("devices", "zzz9").out
    nothing = run("models", "lamma-3.1")
    assert nothing.status == 1
    assert "llama-3.1" in nothing.out


def test_frameworks_and_engines_are_listed_with_their_releases() -> None:
    """`stacks` has every word of `--stack` and `--engine`, words narrow them; of one name releases, or what it runs."""
    kinds = {"training": stack_names(), "serving": engine_names()}
    rows = run("stacks", "--json").tree["stacks"]
    assert {kind: tuple(row["name"] for row in rows if row["kind"] == kind) for kind in kinds} == kinds
    assert [row["name"] for row in run("stacks", "vllm 2023", "--json").tree["stacks"]] == ["vllm-v0", "vllm-0.2"]
    releases = [row["name"] for row in run("stacks", "sglang", "--json").tree["stacks"]]
    assert releases == [name for name in engine_names() if name.startswith("sglang")]
    assert [row["name"] for row in run("stacks", "vllm==0.11.0", "--json").tree["stacks"]] == ["vllm-0.11"]
    assert "fsdp, hsdp" in run("stacks", "torchtune").out
    assert run("stacks", "nothing-like-it").status == 1


@pytest.mark.parametrize("name", _commands.NAMES)
def test_help_lists_every_flag(name: str) -> None:
    """Help names every flag of a command and is status 0, whatever else stands beside it."""
    done = run(name, "--bogus", "-h")
    assert done.status == 0
    assert all(f.option in done.out or f.group == "positional" for f in _commands.command(name).flags.values())
    assert "}|" not in done.out


def test_overview_and_version() -> None:
    """Without a command the commands are listed with status 2, on request with 0."""
    assert (run().status, run("--help").status) == (2, 0)
    assert all(name in run("--help").out for name in _commands.NAMES)
    assert run("--version").out.startswith("shardwise ")


def _shell(*words: str, **settings: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "shardwise", *words]
    return subprocess.run(command, capture_output=True, env={**os.environ, **settings}, check=False)


def test_output_is_ascii_where_nothing_else_can_be_shown() -> None:
    """An ASCII terminal gets bars in ASCII rather than an error."""
    done = _shell(*TRAIN, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert b"#####" in done.stdout


def test_a_reader_that_leaves_is_no_error() -> None:
    """A closed pipe ends the command without a word, and with the status of what could not be written."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "shardwise", *TRAIN, "--json"]
    with subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE) as process:
        os.close(writer)
        _, errors = process.communicate(timeout=240)
    assert errors == b""
    assert process.returncode == 74


def test_an_interrupt_is_no_traceback() -> None:
    """Ctrl-C ends with status 130 and without a traceback, whenever it comes."""
    code = """
import signal, sys
import shardwise.answers._main as m
signal.signal(signal.SIGINT, signal.default_int_handler)
m.answer = lambda words: signal.raise_signal(signal.SIGINT)
from shardwise.cli import main
sys.exit(main(["train"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 130
    assert b"Traceback" not in done.stderr


def test_what_an_interrupt_broke_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that comes of an interrupt, of a module half loaded for example, ends as the interrupt."""

    def broken(words: list[str]) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            raise ImportError("cannot import name 'half' from 'numpy'", name="numpy") from interrupt

    monkeypatch.setattr("shardwise.answers._main.answer", broken)
    assert run("train", "gpt2").status == 130


def test_little_is_loaded_before_an_interrupt_can_be_answered() -> None:
    """The module that answers interrupts is there before any other that takes time to load."""
    code = "import sys; before = {*sys.modules}; import shardwise.cli; print(*sorted({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert {"typing", "collections", "re", "enum"}.isdisjoint(done.stdout.split())


def test_a_fault_of_ours_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What should never happen is said in one line with status 70, as JSON where JSON was asked for."""

    def broken(words: list[str]) -> None:
        raise ZeroDivisionError("by accident")

    monkeypatch.setattr("shardwise.answers._main.answer", broken)
    done = run("train", "gpt2", "--json")
    assert done.status == 70
    assert "ZeroDivisionError" in done.tree["error"]["problems"][0]["rule"]


def test_colour_is_for_terminals_alone() -> None:
    """A terminal gets colour, NO_COLOR and pipes do not, and the text is the same."""
    from shardwise.answers._page import Page, text_of

    class Terminal:
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    page = Page(40)
    page.label("FITS", "62.1 of 80.0 GiB", "bold green")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        patch.delenv("NO_COLOR", raising=False)
        coloured = text_of(page, Terminal())  # type: ignore[arg-type]
        patch.setenv("NO_COLOR", "1")
        plain = text_of(page, Terminal())  # type: ignore[arg-type]
    assert "\x1b[" in coloured
    assert plain == "FITS      62.1 of 80.0 GiB\n"


def test_one_plan_needs_no_numpy_and_no_rich() -> None:
    """The path of one plan, its messages and its launch script imports neither arrays nor a terminal library."""
    export, comm = ["export", "megatron", *TRAIN[1:], "--micro-batch", "1"], ["comm", *TRAIN[1:]]
    code = f"import sys; from shardwise.cli import main; main(sys.argv[1:]); main({export}); main({comm}); "
    code += "print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *TRAIN], capture_output=True, text=True, check=True)
    assert not {"numpy", "rich", "argparse", "ray", "torch", "tomli_w"} & set(done.stderr.split())


def test_json_is_one_object() -> None:
    """Standard output holds one JSON object and nothing else, numbers finite."""
    done = run(*TRAIN, "--json")
    assert "NaN" not in done.out
    assert "Infinity" not in done.out
    json.loads(done.out)


def test_help_is_as_wide_as_asked() -> None:
    """--width holds for help as for every page."""
    for width in (60, 120):
        lines = run("train", "--help", "--width", str(width)).out.splitlines()
        assert width - 12 < max(map(len, lines)) <= width


@pytest.mark.parametrize("name", ["measure", "train"])
def test_what_is_measured_alone_may_use_all_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command has one thread for products of matrices; what measures the machine has those that it would have."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setattr(sys, "argv", ["shardwise", name, "--help"])
    monkeypatch.setattr(cli.gc, "freeze", lambda: None)
    monkeypatch.setattr(cli.gc, "set_threshold", lambda *_: None)
    assert name in _commands.NAMES and cli.command() == 0
    assert ("OPENBLAS_NUM_THREADS" in os.environ) is (name != "measure")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)


# What the examples name that is not there: files of the user's.
_FILES = {"sweep", "import", "validate", "measure"}


@pytest.mark.parametrize(
    "words", [f"{name} {one}" for name, every in EXAMPLES.items() for one in every] + [*FIRST.values()]
)
def test_examples_of_the_help_answer_yes(words: str) -> None:
    """Each example stands at the end of its help, on one line or several, and answers as it stands."""
    first = words in FIRST.values()
    name = next(name for name in sorted(EXAMPLES, reverse=True) if words.startswith(name))
    printed = run(*([] if first else name.split()), "--help").out
    assert f"shardwise {words}" in " ".join(printed.replace("\\\n", " ").split())
    assert words.split()[0] in _FILES or run(*shlex.split(words)).status == 0


def test_help_says_what_an_override_is() -> None:
    """No help of a number of the cluster only repeats its name."""
    lines = run("train", "--help", "--width", "200").out.splitlines()
    assert not any("  override " in line for line in lines)
    assert any("--fast-bandwidth" in line and "450GB/s" in line for line in lines)


def test_help_starts_with_what_a_command_is_about() -> None:
    """Load and limits of serving, the space of a search and its limits stand ahead of efficiencies and overrides."""
    help_of = {name: run(*name.split(), "--help").out.splitlines() for name in ("serve", "plan serve", "plan train")}
    rate = next(at for at, line in enumerate(help_of["serve"]) if line.strip().startswith("--rate "))
    assert rate < help_of["serve"].index("plan") < 60
    for lines in help_of.values():
        own = [
            lines.index(one) for one in ("load", "pools", "autoscaling", "space", "search", "limits") if one in lines
        ]
        assert len(own) > 2 and max(own) < lines.index("achieved efficiencies") < lines.index("output")


@pytest.mark.parametrize("written", ["20", "2.", ".5", "1e2", "1_0"])
def test_a_time_without_a_unit_is_said_to_be_seconds(written: str) -> None:
    """A limit of 50 may be meant in milliseconds: what it is taken for stands among what is assumed."""
    words = ("plan", "infer", "gpt2", "--on", "1xh100", "--max-tpot", written, "--max-ttft", "2s", "--json")
    notes = run(*words).tree["best"][0]["assumptions"]
    assert f"max_tpot {written} s: seconds, as no unit is given" in notes
    assert not any("max_ttft" in note for note in notes)
    assert {"input_tokens 512: not given", "output_tokens 32: not given"} <= set(notes)


@pytest.mark.parametrize(("command", "flag", "usual"), [
    ("infer", "input-tokens", Serving().input_tokens), ("infer", "output-tokens", Serving().output_tokens),
    ("train", "seq-len", DEFAULT_SEQ_LEN),
])  # fmt: skip
def test_help_names_the_lengths_that_are_usual(command: str, flag: str, usual: int) -> None:
    """The help of a length says what is taken where nobody gives it."""
    lines = run(command, "--help").out.split(f"--{flag} N", 1)[1]
    assert f"left out, {usual}" in " ".join(lines.split()[:14])


def test_parts_that_leave_nothing_are_no_share_of_it() -> None:
    """A pipeline of one stage has no bubble: its parts, which cancel but for rounding, are no share of it."""
    words = ("explain", "phi-4-mini", "--on", "8xmi250x", "--depth", "4", "--ffn", "1", "--json")
    bubble = run(*words).tree["parts"][0]["node"]["parts"][1]["node"]
    assert abs(bubble["value"]) < 1e-12 and {part["share"] for part in bubble["parts"]} == {0.0}
