"""One question through every door has one answer: flags, a case file of TOML or JSON, the page, and Python."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from command_line import Done, run

# Values that a field takes, and some that none does: as people type them, on the command line or in a file.
WHOLE = ("1", "2", "4", "8")
ODD = ("0", "-1", "nan", "inf", "1e400", "", " ", "\u00bd", "eight", "1.5", "9" * 40, "[2]", "2,4", "$TP", "-0", "0x8")
TRAINED = {
    "tp": WHOLE, "pp": WHOLE, "dp": WHOLE, "micro_batch": WHOLE, "global_batch": ("8", "16", "64"),
    "seq_len": ("512", "4096", "8192"), "precision": ("bf16", "fp8", "fp64", "BF16"),
    "sharding": ("none", "fsdp", "zero9"), "recompute": ("none", "full", "some"), "adapter": ("lora", "qlora", "lora2"),
    "rank": ("8", "64"), "tokens": ("1B", "3x", "15T"), "price": ("2.5", "\u20ac3/h", "spot", "nebius:x"),
    "optimizer": ("adam", "sgd", "adam9"),
}  # fmt: skip
SERVED = {
    "tp": WHOLE, "pp": WHOLE, "input_tokens": ("128", "4096"), "output_tokens": ("16", "512"),
    "weights": ("bf16", "fp8", "int3"), "kv_cache": ("bf16", "fp8", "fp2"),
    "engine": ("vllm", "sglang", "vllm==0.9", "vlm"),
    "price": ("2.5", "\u20ac3/h"), "memory_fraction": ("0.9", "90%", "2"),
}  # fmt: skip
FIELDS = {
    "train": TRAINED,
    "infer": SERVED | {"batch": ("1", "32")},
    "serve": SERVED
    | {"rate": ("2/s", "30/min", "5/x", "3rps"), "p99_ttft": ("2s", "300ms", "2 parsecs"), "users": ("4",)},
}
MODELS = ("llama-3.2-1b", "qwen3-8b", "mixtral-8x7b", "llama-9", "")
DEVICES = ("8xh100", "2xrtx-4090", "h100", "0xh100", "8xh900", "8 x h100", "xh100")


@st.composite
def questions(draw: st.DrawFn) -> tuple[str, dict[str, str]]:
    """A command and its fields, most of them what a field takes."""
    command = draw(st.sampled_from(sorted(FIELDS)))
    fields = FIELDS[command]
    model = draw(st.sampled_from([*MODELS[:3] * 3, *MODELS]))
    asked = {"model": model, "on": draw(st.sampled_from([*DEVICES[:3] * 3, *DEVICES]))}
    for name in sorted(draw(st.sets(st.sampled_from(sorted(fields)), max_size=6))):
        values = fields[name]
        asked[name] = draw(st.sampled_from([*values * 4, *ODD]))
    return command, asked


def through_flags(command: str, asked: dict[str, str], *more: str) -> Done:
    """Return what the command line says."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in asked.items() if name != "model"]
    return run(command, *([asked["model"]] if "model" in asked else []), *flags, *more)


def through_file(command: str, asked: dict[str, str], ending: str) -> Done:
    """Return what a case file says."""
    tree: dict[str, Any] = {"command": command, **asked}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"case{ending}"
        path.write_text(json.dumps(tree) if ending == ".json" else tomli_w.dumps(tree), encoding="utf-8")
        return run("--config", str(path), "--json")


def problems(done: Done) -> list[tuple[str, str, str, str]]:
    """Return every problem of an answer, in its order."""
    found = done.tree["error"]["problems"] if done.status == 2 else []
    return [(one["field"], str(one["value"]), one["rule"], one["remedy"]) for one in found]


@given(questions())
@settings(max_examples=24)
def test_doors_agree(question: tuple[str, dict[str, str]]) -> None:
    """Flags, files and the page give the same numbers, the same verdict, or the same problems."""
    command, asked = question
    told = through_flags(command, asked, "--json")
    page = through_flags(command, asked)
    assert told.status == page.status and told.status in (0, 1, 2)
    assert "Traceback" not in page.err + told.err
    lines = [line for line in page.err.splitlines() if line.startswith("error: ")]
    assert [line.startswith(f"error: {one[0]}") for line, one in zip(lines, problems(told), strict=True)].count(
        False
    ) == 0
    for ending in (".toml", ".json"):
        filed = through_file(command, asked, ending)
        assert filed.status == told.status, (problems(told), problems(filed))
        assert problems(filed) == problems(told)
        if told.status != 2:
            assert filed.tree == told.tree


PLAN = ("tp", "pp", "dp", "cp", "ep", "micro_batch", "sharding", "recompute")
NONE_TAKES: tuple[Any, ...] = (-1, 1.5, math.nan, math.inf, True, [], [2], {}, 10**30, "eight")
GOOD: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4), "pp": (1, 2), "cp": (1, 2), "ep": (1,), "dp": (1, 2), "micro_batch": (1, 2),
    "global_batch": (8, 16), "seq_len": (512, 2048), "precision": ("bf16", "fp8"),
    "sharding": ("none", "fsdp"), "recompute": ("none", "full"),
    "adapter": ("lora",), "rank": (8,), "optimizer": ("adam", "sgd"),
}  # fmt: skip


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a plan and a job with values of their own types, at most one of them a value that none takes."""
    names = sorted(draw(st.sets(st.sampled_from(sorted(GOOD)), max_size=5)))
    job = {"seq_len": 512, "global_batch": 16, "micro_batch": 1} | {
        name: draw(st.sampled_from(GOOD[name])) for name in names
    }
    odd = draw(st.sampled_from(["", *sorted(job)]))
    return job | ({odd: draw(st.sampled_from(NONE_TAKES))} if odd else {})


@given(jobs())
@settings(max_examples=60)
def test_python_is_a_door_like_the_others(job: dict[str, Any]) -> None:
    """A call has the numbers of the command, and refuses the same fields where their values are none."""
    plan = {"dp": 0} | {name: value for name, value in job.items() if name in PLAN}
    rest = {name: value for name, value in job.items() if name not in PLAN}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.toml"
        path.write_text(
            tomli_w.dumps({"command": "train", "model": "llama-3.2-1b", "on": "8xh100"} | job), encoding="utf-8"
        )
        filed = run("--config", str(path), "--json")
    try:
        report = sw.train(
            sw.Model.load("llama-3.2-1b"), sw.Cluster.parse("8xh100"), sw.Plan(**plan), sw.Training(**rest)
        )
    except sw.InputError as error:
        assert filed.status == 2, error
        assert {one.field for one in error.problems} & set(filed.fields), (error, problems(filed))
        return
    assert filed.status in (0, 1), problems(filed)
    assert filed.tree["step_seconds"] == report.step_seconds
    assert (filed.status == 0) == report.fits
