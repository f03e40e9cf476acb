"""Launches that state a release are answered for as that release runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import run

_VLLM = "docker run --gpus all vllm/vllm-openai:{} --model meta-llama/Llama-3.1-8B"
_SGLANG = "docker run --gpus all lmsysorg/sglang:{} python3 -m sglang.launch_server --model-path {}"


@pytest.mark.parametrize(
    ("launch", "device", "engine"),
    [
        (_VLLM.format("v0.11.0"), "h100-sxm-80gb", "vllm-0.11"),
        (_VLLM.format("v0.11.0"), "mi300x", "vllm-0.13"),
        (_VLLM.format("v0.33.2"), "h100-sxm-80gb", "vllm"),
        (_VLLM.format("v0.40.0"), "h100-sxm-80gb", "vllm"),
        (_VLLM.format("latest"), "h100-sxm-80gb", "vllm"),
        (_VLLM.format("v0.11.0") + " --enforce-eager", "h100-sxm-80gb", "vllm-2025-eager"),
        (_VLLM.format("v0.25.0") + " --no-async-scheduling", "h100-sxm-80gb", "vllm-0.26"),
        (_SGLANG.format("v0.5.4", "meta-llama/Llama-3.1-8B"), "h100-sxm-80gb", "sglang-0.5.7"),
        (_SGLANG.format("v0.5.20", "meta-llama/Llama-3.1-8B"), "h100-sxm-80gb", "sglang-0.5.21"),
        (_SGLANG.format("v0.5.23", "meta-llama/Llama-3.1-8B"), "h100-sxm-80gb", "sglang"),
    ],
)
def test_a_stated_release_chooses_the_engine(launch: str, device: str, engine: str, tmp_path: Path) -> None:
    """The engine is that of the release, the nearest older one that is known, and --engine wins."""
    (tmp_path / "run.sh").write_text(launch)
    words = ("infer", "--from", str(tmp_path / "run.sh"), "--on", device, "--json")
    assert run(*words).tree["plan"]["engine"] == engine
    assert run(*words, "--engine", "vllm-0.13").tree["plan"]["engine"] == "vllm-0.13"
    assert run("import", str(tmp_path / "run.sh"), "--on", device, "--json").tree["serving"]["engine"] == engine


@pytest.mark.parametrize(
    ("launch", "says"),
    [
        (_VLLM.format("v0.11.0"), "release 0.11.0: engine vllm-0.11; flags are read as those of 0.33.0"),
        (_VLLM.format("v0.40.0"), "release 0.40.0: engine vllm; flags are read as those of 0.33.0"),
        (_VLLM.format("v0.25.0") + " --no-async-scheduling", "what vllm-synchronous is launched with (synchronous)"),
        (_VLLM.format("v0.33.1"), ""),
    ],
)
def test_what_a_release_is_answered_for_by_is_said(launch: str, says: str, tmp_path: Path) -> None:
    """Another release than the one whose flags are read stands among what is assumed, and what it does not hold."""
    (tmp_path / "run.sh").write_text(launch)
    notes = run("infer", "--from", str(tmp_path / "run.sh"), "--on", "h100-sxm-80gb", "--json").tree["assumptions"]
    assert any(says in note for note in notes) if says else not any("release" in note for note in notes)


@pytest.mark.parametrize("words", ["plan infer", "serve --rate 2", "plan serve --rate 2"])
def test_every_question_of_a_server_has_its_release(words: str, tmp_path: Path) -> None:
    """Searches and loads are of the engine that the launch states too."""
    (tmp_path / "run.sh").write_text(_VLLM.format("v0.11.0"))
    done = run(*words.split(), "--from", str(tmp_path / "run.sh"), "--on", "1xh100-sxm-80gb", "--json")
    assert done.status == 0
    assert "vllm-0.11" in done.out


@pytest.mark.parametrize("more", ["", " --enforce-eager", " --no-async-scheduling"])
def test_measured_rows_take_the_engine_of_a_launch(more: str, tmp_path: Path) -> None:
    """Rows that name no engine run the launch's, of its release, however it is launched: none is refused for it."""
    (tmp_path / "run.sh").write_text(_VLLM.format("v0.11.0") + more)
    (tmp_path / "rows.csv").write_text(
        "case_id,device,num_gpus,serving_mode,batch,input_tokens,output_tokens,metric,value\n"
        "a,h100-sxm-80gb,1,static,1,512,128,tpot,0.008\n"
    )
    words = ("validate", str(tmp_path / "rows.csv"), "--from", str(tmp_path / "run.sh"), "--json")
    done = run(*words, "--rows", str(tmp_path / "out.csv"))
    assert done.tree["rows"]["predicted"] == 1, done.out


@pytest.mark.parametrize(
    ("asked", "engine"),
    [
        ("vllm==0.12.0", "vllm-0.13"),
        ("vllm-0.12", "vllm-0.13"),
        ("sglang@v0.5.4", "sglang-0.5.7"),
        ("trtllm-1.1.0rc5", "tensorrt-llm"),
        ("vllm-0.40", "vllm"),
        ("vllm-0.2", "vllm-0.2"),
    ],
)
def test_an_engine_may_be_named_with_its_release(asked: str, engine: str) -> None:
    """What pip installs is a release that some entry covers, which is said; an entry's own name is that entry."""
    tree = run("infer", "llama-3.1-8b", "--on", "h100-sxm-80gb", "--engine", asked, "--json").tree
    assert tree["plan"]["engine"] == engine
    assert any("its entry covers" in note for note in tree["assumptions"]) is (asked != engine)


@pytest.mark.parametrize(("asked", "said"), [("vllm-synchronous==0.25.0", True), ("vllm-eager==0.11.0", False)])
def test_what_the_entry_of_a_release_does_not_hold_is_said(asked: str, said: bool) -> None:
    """As of a launch that states its release: no entry of vLLM 0.25 schedules after each step, one of 0.11 is eager."""
    tree = run("infer", "llama-3.1-8b", "--on", "h100-sxm-80gb", "--engine", asked, "--json").tree
    assert any("is launched with (synchronous) is not taken" in note for note in tree["assumptions"]) is said


def test_searches_take_engines_with_their_releases() -> None:
    """Each of several engines may be named so; what no engine is called is refused as before."""
    words = ("plan", "infer", "llama-3.1-8b", "--on", "h100-sxm-80gb", "--json", "--engine")
    engines = {one["plan"]["engine"] for one in run(*words, "vllm==0.12.0,sglang==0.5.4").tree["best"]}
    assert engines and engines <= {"vllm-0.13", "sglang-0.5.7"}
    assert run(*words, "tgi-1.4").fields == ["engine"]
