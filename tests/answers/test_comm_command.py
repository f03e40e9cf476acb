"""`shardwise comm` from words to answers: keys, pages, rank orders, pictures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import shardwise as sw
from command_line import run
from shardwise.answers._comm import comm_page, group_lines
from shardwise.answers._comm_tree import comm_tree

SMALL = ("comm", "gpt2", "--on", "16xh100", "--tp", "2", "--pp", "2", "--micro-batch", "4", "--global-batch", "512")
LARGE = ("comm", "llama-3.1-405b", "--on", "16384xh100", "--tp", "8", "--cp", "2", "--pp", "16", "--micro-batch", "1",
         "--global-batch", "2048", "--sharding", "fsdp", "--stage-layers", "7" + ",8" * 14 + ",7")  # fmt: skip


def test_the_keys_that_programs_rely_on() -> None:
    """Axes have counts, bytes and groups of ranks; the rank has parameters and memory; places name node and device."""
    done = run(*SMALL, "--json")
    assert done.status == 0
    tree = done.tree
    tensor = tree["axes"]["tp"]
    assert tensor["groups"] == [[i, i + 1] for i in range(0, 16, 2)]
    assert tensor["messages_per_step"] == tensor["messages_per_micro_batch"] * tree["micro_batches"]
    assert tensor["bytes_per_step"] > tensor["sent_bytes_per_step"] > 0
    assert tensor["cluster"]["messages_per_step"] > tensor["messages_per_step"]
    assert tree["rank"]["parameters"] > 0
    assert tree["rank"]["memory"]["peak_bytes"] == max(s["memory"]["peak_bytes"] for s in tree["stages"])
    assert (tree["places"][0], tree["places"][9]) == ("n0_g0", "n1_g1")
    assert {m["verb"] for m in tensor["messages"]} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert tree["total"]["messages_per_step"] == sum(a["messages_per_step"] for a in tree["axes"].values())


def test_seconds_are_those_of_train() -> None:
    """The step, and what messages of each axis wait in it, are the same numbers that train prints."""
    ours = run(*SMALL, "--json").tree
    train = run("train", *SMALL[1:], "--json").tree
    assert ours["step_seconds"] == train["step_seconds"]
    exposed = train["step"]["exposed_seconds"]
    assert ours["axes"]["tp"]["exposed_seconds"] == pytest.approx(exposed["tp"])
    assert ours["axes"]["pp"]["exposed_seconds"] == pytest.approx(exposed["pp"])
    data = sum(ours["axes"][name]["exposed_seconds"] for name in ("dp", "embedding"))
    assert data == pytest.approx(exposed["dp"])
    assert ours["rank"]["memory"] == train["memory"]["stages"][train["memory"]["peak_stage"]]


def test_nothing_is_sent_where_nothing_is_split() -> None:
    """One device has no axes, and a page that says so."""
    done = run("comm", "gpt2", "--on", "1xh100")
    assert done.status == 0
    assert "nothing is sent" in done.out
    assert run("comm", "gpt2", "--on", "1xh100", "--json").tree["axes"] == {}


def test_what_does_not_fit_is_said() -> None:
    """The report of a plan that does not fit is given all the same, with status 1."""
    done = run("comm", "llama-3.1-70b", "--on", "8xh100", "--tp", "8")
    assert done.status == 1
    assert "does not fit" in done.out


@pytest.mark.parametrize(
    ("order", "first"),
    [
        ("tp-cp-ep-dp-pp", [0, 2, 4, 6]),
        ("tp-cp-ep-pp-dp", [0, 4, 8, 12]),
        ("tp,cp,dp,pp", [0, 2, 4, 6]),
        ("dp-tp-cp-pp", [0, 1, 2, 3]),
    ],
)
def test_ranks_follow_the_order(order: str, first: list[int]) -> None:
    """Megatron-LM's spellings and others place the same axes, and groups are read from the same place as links."""
    tree = run(*SMALL, "--order", order, "--json").tree
    assert tree["axes"]["dp"]["groups"][0] == first
    crossing = tree["axes"]["dp"]["tiers"]["network"] > 0
    assert crossing == (max(first) > 7)


def test_experts_lie_between_tensor_and_data_parallelism() -> None:
    """An order that puts ep elsewhere is refused with the two that Megatron-LM has."""
    done = run(*SMALL, "--order", "tp-cp-dp-ep-pp", "--json")
    assert done.status == 2
    (problem,) = done.tree["error"]["problems"]
    assert problem["field"] == "order"
    assert "tp-cp-ep-dp-pp" in problem["remedy"]


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("case", [SMALL, LARGE], ids=["16", "16384"])
def test_pages_keep_to_their_width(case: tuple[str, ...], width: int) -> None:
    """No line is wider than the page, on sixteen devices and on sixteen thousand, where it stays readable."""
    lines = run(*case, "--width", str(width)).out.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 200


def test_all_lists_every_group() -> None:
    """Groups are summarised by their first and last; --all gives each with every rank."""
    short, whole = run(*LARGE), run(*LARGE, "--all")
    assert "1,019 more; --all lists each" in short.out
    assert "more; --all" not in whole.out
    assert whole.out.count("\n") > 10_000


def test_groups_are_shortened_in_the_middle() -> None:
    """A group of many ranks shows its first three, its last and how many it has."""
    job = sw.Training(seq_len=1024, global_batch=64)
    found = sw.comm(sw.load_model("gpt2"), sw.Cluster.parse("64xh100"), sw.Plan(dp=0), job)
    assert group_lines(found, "dp") == ["[n0_g0 n0_g1 n0_g2 ... n7_g7 (64)]"]
    assert len(group_lines(found, "dp", everything=True)[0].split()) == 64


def test_the_command_gives_the_same_report_again() -> None:
    """What stands under AGAIN is a comm command with every deduction written out."""
    text = run(*SMALL).out.split("AGAIN")[1].replace("\\\n", " ")
    words = text.split()
    assert words[:3] == ["shardwise", "comm", "gpt2"]
    assert run(*words[1:], "--json").tree["axes"] == run(*SMALL, "--json").tree["axes"]


@pytest.mark.parametrize(("devices", "more"), [("16xh100", SMALL[4:]), ("8xh100", ("--tp", "2"))])
def test_the_picture_is_written(devices: str, more: tuple[str, ...], tmp_path: Path) -> None:
    """The grid of ranks and the matrix of nodes are drawn, on one node and on several."""
    path = tmp_path / "comm.svg"
    assert run("comm", "gpt2", "--on", devices, *more, "--plot", str(path)).status == 0
    assert path.stat().st_size > 5000


def test_python_has_the_same_answer() -> None:
    """`sw.comm` takes what `sw.train` takes; its tree and page are what the command prints."""
    job = sw.Training(seq_len=2048, global_batch=64)
    plan = sw.Plan(tp=2, pp=2, dp=0, micro_batch=2)
    found = sw.comm(sw.load_model("llama-3.1-8b"), sw.Cluster.parse("16xh100"), plan, job)
    assert (
        found.report.step_seconds
        == sw.train(found.report.case.model, found.report.case.cluster, plan, job).step_seconds
    )
    assert list(comm_tree(found)["axes"]) == list(found.axes) == ["tp", "pp", "dp"]
    assert comm_page(found, ["shardwise comm"]).plain().startswith("COMM")


def test_a_million_devices_are_answered_within_limits() -> None:
    """The memory of the report grows with the pairs of nodes that talk, not with all pairs there are."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30));"
        "from shardwise.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["comm", "llama-3.1-8b", "--on", "262144xh100-sxm-80gb", "--tp", "8", "--global-batch", "262144"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_more_pairs_than_can_be_followed_are_refused() -> None:
    """An exchange of everyone with everyone, and millions of ranks, are refused before they are listed."""
    for words in (
        "comm deepseek-v3 --on 262144xh100 --pp 1 --ep 256 --global-batch 262144 --json",
        "comm gpt2 --on 8388608xh100 --global-batch 8388608 --json",
    ):
        done = run(*words.split())
        assert (done.status, done.fields) == (2, ["num_devices"]), done.out[:500]
