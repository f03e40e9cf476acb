"""Rooflines: every second of compute is an operator's, and none is faster than its device."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from dataclasses import fields, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from command_line import run
from shardwise import (
    Cluster,
    Efficiencies,
    InferReport,
    Plan,
    Roofline,
    Serving,
    Training,
    TrainingOptions,
    TrainReport,
)
from shardwise.answers._answer import whole_shares
from shardwise.answers._canvas import SIZES, Canvas, lay_out, styled
from shardwise.answers._plot import figure_of
from shardwise.answers._roofline_limits import INSIDE, LIMITS
from shardwise.answers._train_tree import step_tree
from shardwise.plans import find_stack

TRAINED = {
    "dense": ("llama-3.1-8b", Plan(tp=4, pp=2, dp=0, recompute="selective"), {}),
    "full recompute": ("llama-3.1-8b", Plan(tp=2, pp=4, dp=0, recompute="full"), {}),
    "part recompute": ("llama-3.1-8b", Plan(tp=2, pp=4, dp=0, recompute="full", recompute_layers=3), {}),
    "experts": ("mixtral-8x7b", Plan(pp=2, ep=8, dp=0, recompute="full"), {}),
    "pairs": ("mixtral-8x7b", Plan(pp=4, ep=4, dp=0, schedule="dualpipe"), {}),
    "mixed layers": ("jamba-v0.1", Plan(tp=8, dp=0), {}),
    "predictions": ("deepseek-v3", Plan(tp=8, ep=8, dp=0), {"num_layers": 6}),
}
SERVED = {
    "dense": ("llama-3.1-8b", Plan(tp=2), Serving(batch=8)),
    "chunked": ("llama-3.1-8b", Plan(tp=2), Serving(batch=8, input_tokens=3000, max_batched_tokens=1024)),
    "experts in fp8": ("deepseek-v3", Plan(tp=8), Serving(batch=8)),
    "windows": ("mistral-7b-v0.1", Plan(), Serving(batch=2, input_tokens=4000, output_tokens=500)),
    "guessed": (
        "llama-3.1-70b",
        Plan(tp=4),
        Serving(
            batch=8,
            speculative_method="draft_model",
            draft_model="llama-3.1-8b",
            num_speculative_tokens=3,
            acceptance_rate=0.7,
        ),
    ),
}


def trained(name: str, options: TrainingOptions | None = None) -> TrainReport:
    """Return a training report of a named case."""
    model, plan, overrides = TRAINED[name]
    job = Training(seq_len=2048, global_batch=128)
    return sw.train(sw.load_model(model, overrides), Cluster.parse("32xh100"), plan, job, options)


def served(name: str) -> InferReport:
    """Return a serving report of a named case."""
    model, plan, job = SERVED[name]
    return sw.infer(sw.load_model(model), Cluster.parse(f"{plan.tp}xh100"), plan, job)


@pytest.mark.parametrize("name", TRAINED)
def test_operators_add_up_to_the_compute_of_the_step(name: str) -> None:
    """Seconds of all passes of all operators are the compute that `train` reports, recompute included."""
    report = trained(name, replace(TrainingOptions(), efficiencies=Efficiencies(ideal=True)))
    found = sw.roofline(report)
    assert found.seconds["step"] == pytest.approx(step_tree(report)["compute_seconds"])
    assert sum(map(found.share, found.points)) == pytest.approx(1)
    # What messages beside them cost operators, and launches, is part of the step, and of no operator.
    real = trained(name)
    quick = {"module_launch_seconds": 0.0, "gradient_launch_seconds": 0.0}
    silent = trained(name, TrainingOptions(stack=replace(find_stack("megatron"), **quick)))
    assert 0.9 < sw.roofline(silent).seconds["step"] / step_tree(silent)["compute_seconds"] < 1 + 1e-9
    lost = sw.roofline(real).lost_seconds
    assert lost + sw.roofline(real).seconds["step"] == pytest.approx(step_tree(real)["compute_seconds"])
    assert lost >= 0 and found.lost_seconds == 0


def test_what_messages_slow_is_said_with_its_seconds() -> None:
    """A page and its JSON say which seconds of the compute of `train` no operator has."""
    found = sw.roofline(trained("dense"))
    assert found.lost_seconds > 0
    done = run(*TRAIN, "--json")
    assert json.loads(done.out)["lost_seconds"] > 0
    assert "not here:" in run(*TRAIN).out


def test_rounded_shares_add_up() -> None:
    """Shares that each round up still add up to the whole."""
    assert whole_shares({"a": 0.505, "b": 0.495, "c": 0.0}, 0) == {"a": "51%", "b": "49%", "c": "0%"}
    assert whole_shares({"a": 0.3335, "b": 0.3335, "c": 0.333}, 1) == {"a": "33.4%", "b": "33.3%", "c": "33.3%"}


@pytest.mark.parametrize("name", SERVED)
def test_operators_add_up_to_those_of_each_phase(name: str) -> None:
    """Seconds of prefill and of the mean decode step are those that `infer` reports."""
    report = served(name)
    found = sw.roofline(report)
    for phase in ("prefill", "decode"):
        assert found.seconds[phase] == pytest.approx(sum(getattr(report.evaluation, phase).operators.values()))


def every() -> list[Roofline]:
    """Return the rooflines of all named cases."""
    return [*(sw.roofline(trained(name)) for name in TRAINED), *(sw.roofline(served(name)) for name in SERVED)]


def test_no_operator_is_above_its_roof() -> None:
    """Arithmetic stays below the peak of its data type, and both below what the intensity allows."""
    for found in every():
        for point in found.points:
            assert 0 <= point.of_peak <= 1 + 1e-9, point
            assert 0 <= point.of_roof <= 1 + 1e-9, point
        for shares in found.bounds().values():
            assert sum(shares.values()) == pytest.approx(1)


def test_an_ideal_device_runs_long_products_at_its_roof() -> None:
    """With every efficiency at one, what only arithmetic or memory bounds sits on the roof, smoothing aside."""
    ideal = replace(TrainingOptions(), efficiencies=Efficiencies(ideal=True))
    found = sw.roofline(trained("dense", ideal))
    assert all(p.bound != "start" for p in found.points if p.moved_bytes)
    assert all(p.of_roof > 0.9 for p in found.points if p.moved_bytes and p.kind != "matmul"), "one limit is the time"
    assert all(p.of_roof > 0.7 for p in found.points if p.kind == "matmul"), "near the ridge both limits cost"


def test_prefill_is_bound_by_arithmetic_and_decode_by_memory() -> None:
    """The products of a long prefill lie right of the ridge, those of a small decode batch left of it."""
    points = sw.roofline(served("dense")).points
    up = {p.phase: p for p in points if p.operator == "mlp.up"}
    assert up["prefill"].bound == "compute" and up["prefill"].intensity > up["prefill"].ridge
    assert up["decode"].bound == "memory" and up["decode"].intensity < up["decode"].ridge
    assert up["decode"].intensity < 2 * SERVED["dense"][2].batch


@pytest.mark.parametrize(("model", "on"), [("deepseek-v3", "8xb200-sxm-180gb"), ("gpt-oss-20b", "1xh100-sxm-80gb")])
def test_routers_of_few_tokens_are_bound_by_no_peak(model: str, on: str) -> None:
    """Kernels that engines wrote for them take the same seconds whatever the device could compute meanwhile."""
    cluster = Cluster.parse(on)
    report = sw.infer(sw.Model.load(model), cluster, Plan(tp=cluster.num_devices), Serving(batch=8))
    routers = [p for p in sw.roofline(report).points if (p.operator, p.phase) == ("mlp.router", "decode")]
    assert {(router.bound, router.of_roof < 0.01) for router in routers} == {("start", True)}


def test_recompute_runs_the_forward_pass_again() -> None:
    """What runs again costs what its forward pass costs, and only the regions of the plan do."""
    points = sw.roofline(trained("dense")).points
    again = [p for p in points if p.phase == "recompute"]
    forward = {p.operator: p for p in points if p.phase == "forward"}
    assert {p.operator for p in again} == {"attention"}
    assert all(p.seconds == forward[p.operator].seconds and p.times == forward[p.operator].times for p in again)


TRAIN = ("roofline", "llama-3.1-8b", "--on", "16xh100", "--tp", "2", "--pp", "2", "--global-batch", "64")
INFER = ("roofline", "deepseek-v3", "--on", "16xh100", "--tp", "16", "--batch", "8")


@pytest.mark.parametrize("words", [TRAIN, INFER, (*TRAIN[:4], "--what", "infer")], ids=["train", "infer", "what"])
def test_the_command_prints_and_draws_every_operator(words: tuple[str, ...], tmp_path: Path) -> None:
    """Page, JSON and plot answer with status 0; lines keep to the width, operators stand on the page by name."""
    path = tmp_path / "roofline.svg"
    tree: dict[str, Any] = run(*words, "--json").tree
    for width, more in ((80, ("--plot", str(path))), (120, ())):
        done = run(*words, "--width", str(width), *more)
        assert done.status == 0
        assert max(len(line) for line in done.out.splitlines() if str(path) not in line) <= width
        assert all(row["operator"] in done.out for row in tree["operators"])
    assert {row["bound"] for row in tree["operators"]} <= {"compute", "memory", "start"}
    assert sum(row["share"] for row in tree["operators"]) == pytest.approx(len(tree["seconds"]))
    assert xml.etree.ElementTree.parse(path).getroot().tag.endswith("svg")


# Shares, widths and numbers of items: no limit of a device, so that they stay where one limit is left.
NO_LIMITS = {
    "GemmRates": "sharpness tiling ramp_traffic corrections",
    "Rates": "sharpness tiling ramp_traffic corrections pair_dims grouped_each grouped_gradients contention"
    " weight_gradient cast_traffic casts family assumptions attention_blocks bandwidth_shares experts_in_turn",
    "EngineCostModel": "network group_shapes overlap exposed_axes replicas host module_launch gradient_launch messages"
    " narrow_dtype format fused_experts choices cores activation_width cache_width engine decoding starts"
    " integer_share attention processor fp4_gains module_hook merged picked block_tile torch_choices beside_rows",
    "ExpertsFit": "sharpness pad_rows empty_rows chain_share row_traffic others_traffic tile_steps tile_reads rows"
    " source",
    "EngineKernels": "last_cache experts_type all_reduce head_bytes_per_second"
    " thin_bytes_per_second thin_rows library_roles cached_rate sources unspread_ranks",
    "KernelCosts": "costs packs scale",
    "RouterKernel": "rows",
    "KeyTiles": "keys resident",
    "UnifiedKernel": "elements group rows segments segmented_blocks tokens",
}


@pytest.mark.parametrize("kind", LIMITS, ids=lambda kind: kind.__name__)
def test_every_field_of_a_rate_is_a_limit_or_none(kind: type) -> None:
    """A field that is added to the rates is named here or among the limits of the roofline."""
    limits = {*LIMITS[kind], *INSIDE.get(kind, ())}
    assert limits | set(NO_LIMITS[kind.__name__].split()) == {f.name for f in fields(kind)}
    assert not limits & set(NO_LIMITS[kind.__name__].split())


def test_the_operators_of_preferences_are_those_of_the_update() -> None:
    """Passes without gradients are no part of the operators, and the page does not call them a whole step."""
    words = ("roofline", "llama-3.2-1b", "--on", "1xh100", "--seq-len", "1024", "--global-batch", "8")
    assert " one step: " in run(*words).out
    assert "the policy's update of one step: " in run(*words, "--method", "dpo").out


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_on_a_roofline_can_be_read(size: str) -> None:
    """Numbers of the axes stand apart, no name is on another or beyond the page, and no roof's name on an operator."""
    from matplotlib.text import Text

    report = sw.infer(sw.Model.load("llama-3.1-8b"), Cluster.parse("1xh100"), Plan(), Serving(batch=8, weights="fp8"))
    with styled(Canvas(size)):
        figure = figure_of(sw.roofline(report))
        lay_out(figure)
        axes = next(one for one in figure.axes if one.get_xscale() == "log")
        written = [text for text in axes.texts if "prefill" in text.get_text() or "FLOP/s" in text.get_text()]
        names = [Text.get_window_extent(text) for text in written]  # without the lines to their operators
        roofs = [Text.get_window_extent(text) for text in written if "FLOP/s" in text.get_text()]
        places = [axes.transData.transform(one.get_offsets()[0]) for one in axes.collections]
        numbers = [label.get_window_extent() for label in axes.get_xticklabels() if label.get_text()]
    assert len(names) >= 4 and len(roofs) == 2
    assert not any(roof.contains(*place) for roof in roofs for place in places)
    assert all(left.x1 < right.x0 for left, right in pairwise(sorted(numbers, key=lambda box: box.x0)))
    assert not any(one.overlaps(other) for one, other in combinations(names, 2))
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in names)
