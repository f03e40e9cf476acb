"""Plots: the bars are as long as the answer, every file kind is written, and what cannot be drawn is refused."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from command_line import run
from shardwise import Cluster, Plan, Serving, Training, infer, load_model, train
from shardwise.answers._canvas import SIZES, Canvas, lay_out, save, styled
from shardwise.answers._explained import ExplainedNumber
from shardwise.answers._plot import figure_of
from shardwise.answers._plots import Bar, ink_on, plan_words, seen
from shardwise.answers._plots_bars import (
    HIDDEN,
    MEMORY,
    PHASE,
    TIME,
    compare_figure,
    infer_figure,
    memory_bars,
    time_bar,
    train_figure,
)
from shardwise.answers._plots_explain import explain_figure, pieces
from shardwise.answers._plots_load import curve_of
from shardwise.answers._plots_timeline import timeline_figure

CASES = {
    "pipeline": (
        "llama-3.1-70b",
        "64xh100",
        Plan(tp=8, pp=4, dp=0, sequence_parallel=True, sharding="distributed-optimizer", recompute="full"),
    ),
    "experts": ("mixtral-8x7b", "64xh100", Plan(pp=2, ep=8, dp=0, sharding="zero2", recompute="selective")),
    "sharded": ("llama-3.1-8b", "8xh100", Plan(dp=0, sharding="fsdp")),
    "paired": ("mixtral-8x7b", "64xh100", Plan(pp=4, ep=8, dp=0, schedule="dualpipe", recompute="full")),
}


@cache
def reports(name: str) -> Any:
    """Return a report of a named case."""
    model, cluster, plan = CASES[name]
    return train(load_model(model), Cluster.parse(cluster), plan, Training(seq_len=4096, global_batch=256))


@pytest.mark.parametrize("name", CASES)
def test_bars_are_as_long_as_the_answer(name: str) -> None:
    """Parts of the time add up to the step, parts of the memory to what the device shows, and none is below zero."""
    report = reports(name)
    step = time_bar(report, "step")
    assert step.length == pytest.approx(report.step_seconds)
    memory = memory_bars(report)
    assert max(bar.length for bar in memory) == pytest.approx(report.device_bytes)
    assert len(memory) == len(report.evaluation.stages)
    for bar, looks in ((step, TIME), *((bar, MEMORY) for bar in memory)):
        assert all(amount > -1e-9 for amount in bar.parts.values())
        assert bar.parts.keys() <= looks.keys(), "every part has a colour and a name"
    assert bar.low <= bar.length or not bar.low


def served(on: str, plan: Plan) -> Any:
    """Return a serving report."""
    return infer(load_model("llama-3.1-70b"), Cluster.parse(on), plan, Serving(batch=8, input_tokens=2000))


def texts(figure: Any) -> str:
    """Return everything that is written in a figure."""
    import matplotlib.text

    return "\n".join(t.get_text() for t in figure.findobj(matplotlib.text.Text))


def test_figures_say_what_they_show() -> None:
    """Title, plan, units, capacity and every part stand in the figure itself."""
    with styled():
        said = texts(train_figure(reports("pipeline")))
    for word in ("llama-3.1-70b on 64", "tp 8, pp 4", "GiB", "seconds", "79.18 GiB", "exposed", "overlapped", "bubble"):
        assert word in said
    with styled():
        both = texts(compare_figure(reports("pipeline"), reports("sharded")))
    assert "A: llama-3.1-70b on 64" in both and "B: llama-3.1-8b on 8" in both
    with styled():
        said = texts(infer_figure(served("8xh100", Plan(tp=4, pp=2))))
    assert all(word in said for word in ("Prefill", "Decode", "milliseconds", "vllm may use", "KV cache"))
    with styled():
        assert "Two cases" in texts(compare_figure(served("4xh100", Plan(tp=4)), served("8xh100", Plan(tp=8))))


def test_what_does_not_happen_is_not_drawn() -> None:
    """One pass without generation has no decode panel, a plan without messages no panel of hidden ones."""
    job = Serving(batch=2, input_tokens=512, output_tokens=0)
    report = infer(load_model("llama-3.1-8b"), Cluster.parse("1xh100"), Plan(), job)
    with styled():
        assert len(infer_figure(report).axes) == 3
    alone = train(load_model("gpt2"), Cluster.parse("1xh100"), Plan(), Training(seq_len=1024, global_batch=8))
    with styled():
        figure = train_figure(alone)
    assert len(figure.axes) == 3
    assert "overlapped" not in texts(figure)
    with styled():
        assert "gathered weights" not in texts(train_figure(reports("pipeline")))  # a part of 0.1% is a hairline


def test_what_is_seen_is_named() -> None:
    """A part of a quarter of a percent has a width on a page and a slide, and so a name; in a column it has none."""
    bars = [Bar(name="A", parts={"compute": 0.9975, "optimizer": 0.0025})]
    shares = {}
    for size in SIZES:
        with styled(Canvas(size)):
            shares[size] = seen(bars)
    assert shares["slide"] < shares["page"] < 0.0025 < shares["column"] < 0.01


@pytest.mark.parametrize("size", SIZES)
def test_names_of_plans_stand_apart_on_every_paper(size: str) -> None:
    """Names of four lines beside three bars do not touch, and no key stands on a line."""
    from shardwise.answers._plots_search import plan_figure

    one = sw.IntRanges.parse("1")
    space, options = sw.SearchSpace(pp=one, cp=one), sw.SearchOptions(top=3)
    job, cluster = Training(seq_len=4096, global_batch=128), Cluster.parse("16xh100")
    with styled(Canvas(size)):
        figure = plan_figure(sw.plan_training(load_model("llama-3.1-8b"), cluster, job, space, options))
        lay_out(figure)
        left = next(axes for axes in figure.axes if axes.get_title(loc="left").startswith("Time of a step"))
        boxes = [label.get_window_extent() for label in left.get_yticklabels()]
    assert len(boxes) == 3
    assert all(lower.y1 <= upper.y0 for upper, lower in pairwise(boxes))


@pytest.mark.parametrize("size", SIZES)
def test_names_of_rates_stand_apart_within_their_panel(size: str) -> None:
    """The knee is beside what is carried: neither name stands on the other, on its line or outside."""
    lengths = {"input_tokens": sw.Length(mean=512), "output_tokens": sw.Length(mean=128)}
    load = sw.Workload(**lengths, arrivals=sw.Arrivals(rate=70.0), count=200)
    limit = sw.LoadOptions(limits=(sw.Limit(metric="ttft", quantile="p90", seconds=0.5),))
    report = sw.serve(load_model("llama-3.1-8b"), Cluster.parse("1xh100"), Plan(dp=0), load, None, limit)
    assert report.capacity_per_second < 70.0
    with styled(Canvas(size)):
        figure = figure_of(report)
        lay_out(figure)
        for axes in [one for one in figure.axes if one.get_title(loc="left").endswith("against rate")]:
            words = {text.get_text(): text.get_window_extent() for text in axes.texts}
            assert words["knee"].x1 < words["capacity"].x0
            assert words["capacity"].x1 < axes.get_window_extent().x1
        assert words["capacity"].x1 < words["this load"].x0 < axes.get_window_extent().x1
        # Curves end before the capacity, and the words of a limit stand beyond it.
        upper = next(one for one in figure.axes if one.get_title(loc="left").startswith("Latency"))
        bounds = [text.get_window_extent() for text in upper.texts if "p90 TTFT <= 500.00 ms" in text.get_text()]
        assert len(bounds) == (size != "column")
        for bound in bounds:
            assert upper.transData.transform((report.capacity_per_second, 1))[0] < bound.x0
    assert "load 70.00, capacity" in " ".join(texts(figure).split())


def test_a_load_over_groups_of_attention_is_titled_so() -> None:
    """One replica of two groups is no replica of one device."""
    lengths = {"input_tokens": sw.Length(mean=64), "output_tokens": sw.Length(mean=8)}
    load = sw.Workload(**lengths, arrivals=sw.Arrivals(kind="burst"), count=4)
    model, cluster = load_model("qwen3-30b-a3b"), Cluster.parse("2xh100")
    with styled():
        figure = figure_of(sw.serve(model, cluster, Plan(dp=2, ep=2), load))
    assert "1 x tp 1, pp 1 of 2 attention groups, vllm" in " ".join(texts(figure).split())


def test_a_search_without_plans_is_drawn() -> None:
    """Where nothing fits the plot says so."""
    from shardwise import plan_training
    from shardwise.answers._plots_search import plan_figure

    job = Training(seq_len=4096, global_batch=8)
    with styled():
        figure = plan_figure(plan_training(load_model("llama-3.1-70b"), Cluster.parse("1xh100"), job))
    assert "no plan of the space fits" in texts(figure)


def test_a_search_on_several_clusters_names_them_all() -> None:
    """The title of the plot has every kind of device that was tried."""
    from shardwise.answers._plots_search import plan_figure
    from shardwise.search import IntRanges

    clusters = [Cluster.parse("8xh100-sxm-80gb"), Cluster.parse("4xa100-sxm-80gb")]
    space, job = sw.SearchSpace(tp=IntRanges.parse("1"), pp=IntRanges.parse("1")), Training(seq_len=512, global_batch=8)
    with styled():
        figure = plan_figure(sw.plan_training(load_model("gpt2"), clusters, job, space))
    assert figure.get_label() == "gpt2 on 8 \u00d7 h100-sxm-80gb or 4 \u00d7 a100-sxm-80gb"


@pytest.mark.parametrize(("on", "output"), [("8xh100", 200), ("1xh100", 200), ("8xh100", 0)])
def test_a_search_for_deployments_is_drawn(on: str, output: int) -> None:
    """The front, its limit and the best deployments are drawn; nothing found and nothing generated are said."""
    job = Serving(input_tokens=1000, output_tokens=output)
    options = sw.SearchOptions(max_tpot_seconds=0.05, top=4)
    found = sw.plan_serving(load_model("llama-3.1-70b"), Cluster.parse(on), job, sw.ServingSpace(), options)
    with styled():
        said = texts(figure_of(found))
    assert ("#1" in said) == bool(found.best)
    assert ("limit 50.00 ms" in said) == (bool(found.best) and output > 0)
    assert "no plan of the space fits" in said or "per device" in said


def test_no_two_parts_look_alike() -> None:
    """Within a panel every part has its own colour, except communication, which keeps its axis' colour everywhere."""
    for looks in (MEMORY, TIME, HIDDEN, PHASE):
        assert len({look.colour for look in looks.values()}) == len(looks)
    for axis, look in HIDDEN.items():
        assert look.colour == TIME[f"exposed {axis}"].colour == PHASE[f"exposed {axis}"].colour


def contrast(a: float, b: float) -> float:
    """Return the contrast of two luminances (WCAG 2)."""
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour (WCAG 2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_text_on_every_part_can_be_read() -> None:
    """Text on a bar has a contrast of at least 3 with it, as WCAG 2 asks of graphics."""
    for look in (*MEMORY.values(), *TIME.values()):
        ink = 1.0 if ink_on(look.colour) == "white" else luminance(ink_on(look.colour))
        assert contrast(ink, luminance(look.colour)) >= 3, look.label


MAGIC = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF", "html": b"<!DOCTYPE html>"}


@pytest.mark.parametrize("kind", MAGIC)
def test_every_kind_of_file_is_written_and_the_same_each_time(kind: str, tmp_path: Path) -> None:
    """The suffix says what is written, and the same answer gives the same bytes."""
    written = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.{kind}"
        with styled():
            save(train_figure(reports("sharded")), str(path))
        written.append(path.read_bytes())
    assert written[0].startswith(MAGIC[kind])
    assert written[0] == written[1]
    if kind == "html":
        page = written[0].decode()
        assert "<title>llama-3.1-8b on 8" in page
        xml.etree.ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])


TRAIN = ("train", "llama-3.1-8b", "--on", "8xh100", "--sharding", "fsdp", "--stack", "fsdp2", "--global-batch", "64")
INFER = ("infer", "llama-3.1-8b", "--on", "1xh100", "--batch", "4")
COMPARE = ("compare", "llama-3.1-8b", "--on", "8xh100", "--global-batch", "64", "--a", "--tp 8", "--b", "--tp 4 --pp 2")
PLAN = ("plan", "train", "gpt2", "--on", "4xa100", "--global-batch", "32", "--seq-len", "1024", "--at-most")


@pytest.mark.parametrize("words", [TRAIN, INFER, COMPARE, PLAN], ids=lambda w: w[0])
def test_commands_draw_their_answer(words: tuple[str, ...], tmp_path: Path) -> None:
    """A plot changes neither status nor answer, says where it is, and stays out of the command to copy."""
    path = tmp_path / "answer.svg"
    plain, done = run(*words), run(*words, "--plot", str(path))
    assert (done.status, done.err) == (plain.status, plain.err)
    assert f"written to {path}" in " ".join(done.out.split())
    assert "--plot" not in done.out
    root = xml.etree.ElementTree.parse(path).getroot()
    assert root.tag.endswith("svg")


@pytest.mark.parametrize("words", [TRAIN, INFER, COMPARE, PLAN], ids=lambda w: w[0])
@pytest.mark.parametrize("name", ["plot.jpg", "plot", "missing/plot.svg"])
def test_what_cannot_be_written_is_refused(words: tuple[str, ...], name: str, tmp_path: Path) -> None:
    """An unknown ending and a folder that is not there are bad input, said under the flag's name."""
    done = run(*words, "--plot", str(tmp_path / name), "--json")
    assert done.status == 2
    assert done.fields == ["plot"]


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where nothing can draw, the command says what to install, and a trace is written all the same."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "shardwise.libraries.find_spec", lambda name, *more: None if name == "matplotlib" else find(name, *more)
    )
    done = run(*TRAIN, "--plot", str(tmp_path / "a.svg"))
    assert done.status == 2
    assert "pip install 'shardwise[plots]'" in done.err
    assert run(*TRAIN, "--timeline", str(tmp_path / "a.json")).status == 0


def test_answers_are_drawn_from_python(tmp_path: Path) -> None:
    """`plot` draws every kind of answer, `plot_timeline` a step; a name that says nothing is refused."""
    report = reports("sharded")
    for name, answer in (("a.svg", report), ("b.pdf", served("4xh100", Plan(tp=4))), ("c.png", sw.roofline(report))):
        sw.plot(answer, str(tmp_path / name))
        assert (tmp_path / name).read_bytes().startswith(MAGIC[name[2:]])
    for name in ("d.json", "e.html"):
        timeline = sw.plot_timeline(report, str(tmp_path / name))
        assert timeline.seconds == report.timeline().seconds
        assert (tmp_path / name).stat().st_size > 1000
    with pytest.raises(sw.InputError, match="does not say what to write"):
        sw.plot(report, "a.json")


def _texts(figure: Any) -> list[Any]:
    """Return the boxes of what is written, in shares of the figure."""
    from matplotlib.text import Text

    figure.canvas.draw()
    draw = figure.canvas.get_renderer()
    # Ticks beyond the end of an axis are there and not drawn.
    ticks = {text for axes in figure.axes for text in (*axes.get_xticklabels(), *axes.get_yticklabels())}
    found = [t for t in figure.findobj(Text) if t.get_text().strip() and t.get_visible() and t not in ticks]
    return [(text, text.get_window_extent(draw).transformed(figure.transFigure.inverted())) for text in found]


@pytest.mark.parametrize("size", SIZES)
def test_pictures_of_every_size_hold_what_is_written(size: str, tmp_path: Path) -> None:
    """No text leaves the picture, and header and panels stand apart, on a page, in a column and on a slide."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    report = reports("pipeline")
    with styled(Canvas(size)):
        icicle = explain_figure(ExplainedNumber(report.explain("step"), "seconds"), "step", 4)
        for figure in (train_figure(report), icicle) if size == "column" else (train_figure(report),):
            FigureCanvasAgg(figure)
            save(figure, str(tmp_path / "x.png"))
            boxes = _texts(figure)
            assert all(box.x0 > -0.01 and box.x1 < 1.01 and -0.01 < box.y0 < box.y1 < 1.01 for _, box in boxes)
            width, height = figure.get_size_inches()
            assert size != "slide" or width / height == pytest.approx(16 / 9)


def test_dark_pictures_have_light_words(tmp_path: Path) -> None:
    """In the dark what is written outside of bars is light, and texts within bars stay as they read best."""
    report = reports("sharded")
    with styled(Canvas(dark=True)):
        figure = train_figure(report)
        save(figure, str(tmp_path / "x.svg"))
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import to_hex

        FigureCanvasAgg(figure)
        inks = {to_hex(text.get_color()) for text, _ in _texts(figure)}
    assert to_hex(figure.get_facecolor()) == "#1b1d21"
    assert "#1a1a1a" not in inks and {"#e8eaed", "#9aa0a6"} <= inks
    assert "#1b1d21" in (tmp_path / "x.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("what", ["step", "memory"])
def test_an_icicle_adds_up(what: str) -> None:
    """Parts lie below what they add up to, side by side and never wider, and the first level is the whole."""
    report = reports("experts")
    root = ExplainedNumber(report.explain(what), "seconds")
    drawn = pieces(root, 5)
    levels = {one.level for one in drawn}
    assert max(levels) >= 3 and drawn[0].amount == root.value
    for one in drawn[1:]:
        over = [up for up in drawn if up.level == one.level - 1 and up.start <= one.start + 1e-9]
        assert any(one.start + one.share <= up.start + up.share + 1e-9 for up in over)
        assert one.amount >= one.share * root.value * (1 - 1e-6)
    for level in levels:
        row = sorted((one.start, one.share) for one in drawn if one.level == level)
        assert all(a + wide <= b + 1e-9 for (a, wide), (b, _) in pairwise(row))


def test_sizes_that_are_not_known_are_refused() -> None:
    """A size is one of three, from Python and on the command line."""
    with pytest.raises(sw.InputError, match="is not a size of pictures"):
        sw.plot(reports("sharded"), "x.svg", size="poster")
    assert run("infer", "gpt2", "--on", "1xh100", "--plot", "x.svg", "--size", "poster", "--json").fields == ["size"]


@cache
def searched() -> Any:
    """Return a search of plans whose names are long."""
    cluster, job = Cluster.parse("64xh100"), Training(seq_len=4096, global_batch=256)
    return sw.plan_training(load_model("llama-3.1-70b"), cluster, job)


@pytest.mark.parametrize("size", SIZES)
def test_names_of_plans_are_whole(size: str) -> None:
    """Beside its bars every word of a plan stands, or above them where all plans have it, on paper of any width."""
    with styled(Canvas(size)):
        figure = figure_of(searched())
    names = [label.get_text().replace("\n", " ").replace("\xa0", " ") for label in figure.axes[2].get_yticklabels()]
    above = " ".join(text.get_text() for text in figure.axes[0].texts)
    for name, report in zip(names, searched().best, strict=False):
        assert all(word in name or word in above for word in plan_words(report.plan).split(", ")), name


def test_what_every_kind_of_stage_holds_is_drawn_below_the_schedule() -> None:
    """Below the schedule is a panel for each run of equal stages, all on the time and the bytes of the first."""
    report = reports("pipeline")
    with styled():
        figure = timeline_figure(report, report.timeline())
    schedule, *held = figure.axes[1:]
    assert len(held) == len(report.evaluation.stages)
    assert {panel.get_xlim() for panel in held} == {schedule.get_xlim()}
    assert len({panel.get_ylim() for panel in held}) == 1


@pytest.mark.parametrize(("words", "scheme"), [((), "light"), (("--dark",), "dark")])
def test_pages_fit_phones_and_are_as_dark_as_asked(words: tuple[str, ...], scheme: str, tmp_path: Path) -> None:
    """A page takes the width of its screen, scrolls what is wider alone, and is light or dark as its drawing."""
    page = tmp_path / "page.html"
    assert run("infer", "gpt2", "--on", "h100", "--plot", str(page), *words).status == 0
    text = page.read_text()
    assert "width=device-width" in text and f"color-scheme: {scheme}" in text
    frame = '<div class="wide" tabindex="0"><svg role="img" aria-label="'
    described = text.partition(frame)[2].partition('"')[0]
    assert described.startswith("gpt2 on 1") and "Memory of a device" in described


def test_loads_of_two_pools_are_drawn_over_all_their_devices() -> None:
    """The curve over rates asks of the workers of both pools, not of those that decode alone."""
    prompts, answers = sw.Length(mean=512), sw.Length(mean=128)
    load = sw.Workload(input_tokens=prompts, output_tokens=answers, arrivals=sw.Arrivals(rate=4.0), count=200)
    pools = sw.LoadOptions(prefill=Plan(tp=2, dp=2))
    report = sw.serve(load_model("llama-3.1-8b"), Cluster.parse("16xh100"), Plan(tp=2, dp=0), load, None, pools)
    curve = curve_of(report)
    assert {one.devices for one in curve} == {report.devices} == {16}
    assert len({one.capacity_per_second for one in curve}) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "gpt-oss-120b --cpu-experts 24",
            "36 of 36 layers and the head on the device, experts of 24 of them on cpu-generic",
        ),
        (
            "llama-3.1-70b --weights q4_k_m --gpu-layers 20",
            "19 of 80 layers and the head on the device, the rest on cpu-generic",
        ),
    ],
)
def test_a_model_split_with_the_host_is_drawn_and_told_as_such(flags: str, words: str, tmp_path: Path) -> None:
    """The page and the plot say what lies where; "nothing split" is of a device alone."""
    asked = ["infer", *flags.split(), "--on", "1xrtx-4090", "--engine", "llama.cpp", "--host", "cpu-generic"]
    done = run(*asked, "--plot", str(tmp_path / "host.svg"))
    assert words in " ".join(done.out.split())
    drawn = " ".join((tmp_path / "host.svg").read_text(encoding="utf-8").split())
    assert "nothing split" not in drawn and "on cpu-generic" in drawn
