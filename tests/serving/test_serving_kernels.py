"""Kernels of an engine: which measured kernel prices the experts of a format."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from serving.serving_cases import ask
from shardwise.cost import (
    Datasheet,
    Efficiencies,
    ExpertsFit,
    bandwidth_of,
    constants,
    experts_seconds,
    rates_of,
    routed_tiles,
    tile_rows,
)
from shardwise.hardware import find_device
from shardwise.plans import Plan, Serving
from shardwise.serving._case import ServingCase
from shardwise.serving._cost_model import engine_cost_model, op_seconds
from shardwise.serving._engine import Engine, find_engine
from shardwise.serving._kernels import kernels_of
from shardwise.serving._ledger import EngineStep, step_ledger
from shardwise.serving._sizes import sizes_of


@pytest.mark.parametrize(("products", "values"), [("fp8", "fp8_block"), ("fp8-block", "fp8_block"), ("bf16", "bf16")])
def test_experts_take_a_kernel_that_was_measured_and_fits(products: str, values: str) -> None:
    """Experts with scales of blocks have the kernel measured on them; that of one scale a tensor ends at a bound."""
    device = find_device("h200-sxm-141gb").device
    kernels = kernels_of(device, "hopper", products, find_engine("vllm"), Efficiencies())
    measured = max(constants().families["hopper"].experts["vllm"][values].values(), key=lambda row: row.rows)
    assert kernels.experts_narrow == measured


@pytest.mark.parametrize(
    ("engine", "model", "weights", "kernel"),
    [
        ("sglang", "qwen3-235b-a22b", "bf16", "sglang_flashinfer_trtllm_moe"),
        ("sglang", "glm-4.6", "bf16", "sglang_flashinfer_trtllm_moe"),
        ("sglang", "mixtral-8x7b", "bf16", "sglang_fused_moe_triton"),
        ("sglang-0.5.13", "qwen3-235b-a22b", "bf16", "sglang_flashinfer_trtllm_moe"),
        ("sglang-0.5.13", "glm-4.6", "bf16", "sglang_fused_moe_triton"),
        ("sglang-0.5.7", "qwen3-235b-a22b", "bf16", "sglang_fused_moe_triton"),
        ("sglang", "deepseek-v3", "fp8-block", "sglang_flashinfer_trtllm_moe"),
        ("sglang-0.5.7", "deepseek-v3", "fp8-block", "sglang_flashinfer_trtllm_moe"),
        ("sglang", "glm-4.6", "fp8-block", "sglang_fused_moe_triton"),
        ("sglang", "minimax-m2", "fp8-block", "sglang_fused_moe_triton"),
    ],
)
def test_sglang_runs_the_kernel_of_an_architecture(engine: str, model: str, weights: str, kernel: str) -> None:
    """On Blackwell FlashInfer's kernel runs the experts that a hook of SGLang names, Triton's those of all others."""
    case = ask(model, Serving(weights=weights), Plan(tp=8), "b200-sxm-180gb", engine=engine).case
    kernels = engine_cost_model(case, sizes_of(case.model, case.plan, case.job, case.domains)).kernels
    row = kernels.experts_narrow if weights == "fp8-block" else kernels.experts_wide
    assert row == constants().families["blackwell"].experts["sglang"][weights.replace("-", "_")][kernel]


@pytest.mark.parametrize(
    ("engine", "kernel"), [("vllm", "flashinfer_trtllm"), ("vllm-0.19", "triton"), ("vllm-0.10", "triton")]
)
def test_vllm_ran_experts_of_16_bits_in_triton(engine: str, kernel: str) -> None:
    """On Blackwell before 0.20, where FlashInfer's kernels had to be asked for."""
    case = ask("qwen3-30b-a3b", Serving(), Plan(), "b200-sxm-180gb", engine=engine).case
    row = engine_cost_model(case, sizes_of(case.model, case.plan, case.job, case.domains)).kernels.experts_wide
    owner = "sglang" if kernel == "triton" else "vllm"
    rows = constants().families["blackwell"].experts[owner]["bf16"]
    assert [name for name, one in rows.items() if one == row and kernel in name]


def experts_of(case: ServingCase, rows: Sequence[ExpertsFit]) -> tuple[list[float], list[list[float]]]:
    """Return the seconds of a decode step's experts, and those that each of some kernels would take alone."""
    sizes = sizes_of(case.model, case.plan, case.job, case.domains)
    costs = replace(engine_cost_model(case, sizes), decoding=True)
    step = EngineStep(phase="decode", sequences=16.0, tokens=1.0, context=512.0)
    ops = [op for _, ops in step_ledger(case, sizes, step).lines for op in ops if op.kind == "grouped"]
    assert ops
    alone = (replace(costs.kernels, experts_narrow=row, experts_unspread=None) for row in rows)
    fits = [[op_seconds(replace(costs, kernels=one), op) for op in ops] for one in alone]
    return [op_seconds(costs, op) for op in ops], fits


@pytest.mark.parametrize(
    ("engine", "plan", "kernel"),
    [
        ("vllm", Plan(tp=4), "triton"),
        ("vllm", Plan(tp=4, ep=4), "cutlass"),
        ("vllm-0.17", Plan(tp=4), "triton"),
        ("vllm-2025", Plan(tp=4), "cutlass"),
        ("vllm-2025", Plan(tp=8), "cutlass"),
        ("vllm-0.14", Plan(tp=4), "deepgemm"),
        ("vllm-0.14", Plan(tp=8), "triton"),
        ("vllm-0.13", Plan(tp=4), "deepgemm"),
        ("vllm-0.13", Plan(tp=8), "triton"),
        ("vllm-0.13", Plan(tp=8, ep=8), "deepgemm"),
        ("vllm-0.11", Plan(tp=4), "triton"),
        ("vllm-0.10", Plan(tp=4, ep=4), "triton"),
        ("vllm-v0", Plan(tp=4), "triton"),
    ],
)
def test_vllm_runs_blocks_of_8_bits_in_the_kernel_of_its_release(engine: str, plan: Plan, kernel: str) -> None:
    """On Hopper a step takes the seconds of the kernel that a release prefers for experts spread over ranks, or not."""
    case = ask("glm-4.5-air", Serving(weights="fp8-block"), plan, "h200-sxm-141gb", engine=engine).case
    rows = constants().families["hopper"].experts["vllm"]["fp8_block"]
    took, fits = experts_of(case, [row for name, row in rows.items() if kernel in name][:1])
    assert took in fits


@pytest.mark.parametrize(("plan", "engine", "kernel"), [
    (Plan(tp=2, ep=2), "vllm-0.13", "deepgemm"), (Plan(tp=8), "vllm-0.13", "triton"),
    (Plan(tp=8, ep=8), "vllm-0.13", "deepgemm"), (Plan(tp=2, ep=2), "vllm", "trtllm"),
    (Plan(tp=2, ep=2), "vllm-0.13-sorting", "deepgemm"),
])  # fmt: skip
def test_blocks_of_8_bits_ran_deepgemm_on_blackwell_too(plan: Plan, engine: str, kernel: str) -> None:
    """VLLM 0.11.1 to 0.14 ran DeepGEMM's experts on compute capability 10 but where eight ranks split each."""
    case = ask("qwen3-235b-a22b", Serving(weights="fp8-block"), plan, "b200-sxm-180gb", engine=engine).case
    rows = constants().families["blackwell"].experts["sglang" if kernel == "triton" else "vllm"]["fp8_block"]
    took, fits = experts_of(case, [row for name, row in rows.items() if kernel in name])
    assert took in fits


@pytest.mark.parametrize(
    ("model", "engine", "kernel"),
    [
        ("qwen3-30b-a3b", "vllm-2025", "vllm"),
        ("llama-4-scout", "vllm-0.13-sorting", "sglang"),
        ("glm-4.5-air", "vllm-0.11", "sglang"),
        ("mixtral-8x7b", "vllm-2025", "vllm"),
        ("glm-4.5-air", "vllm-0.17", "vllm"),
        ("qwen3-30b-a3b", "vllm", "vllm"),
    ],
)
def test_experts_without_a_tuned_file_ran_other_tiles_until_2026(model: str, engine: str, kernel: str) -> None:
    """Before 0.17 vLLM's rule for tiles on Hopper was SGLang's of today, but where a file tunes them, as Mixtral's."""
    case = ask(model, Serving(), Plan(tp=8), "h100-sxm-80gb", engine=engine).case
    row = engine_cost_model(case, sizes_of(case.model, case.plan, case.job, case.domains)).kernels.experts_wide
    rows = constants().families["hopper"].experts[kernel]["bf16"]
    assert [name for name, one in rows.items() if one == row and "triton" in name]


def test_a_tile_for_each_expert_takes_as_long_on_blackwell() -> None:
    """Qwen3-235B in 8-bit blocks took 36.7 ms a token with 8 requests on two B200 in vLLM 0.11.1 (ML.ENERGY, 2026)."""
    job = Serving(weights="fp8-block", batch=8, input_tokens=250, output_tokens=875)
    tiles, others = (
        ask("qwen3-235b-a22b", job, Plan(tp=2, ep=2), "b200-sxm-180gb", engine=engine).tpot_seconds
        for engine in ("vllm-0.13-sorting", "vllm")
    )
    assert tiles == pytest.approx(36.7e-3, rel=0.3)
    assert tiles > 1.5 * others


def test_experts_laid_out_without_a_count_run_a_tile_each() -> None:
    """Four tokens cost DeepGEMM in vLLM 0.12 nearly what sixteen do, three times what they cost in Triton.

    Qwen3-235B took 51.5 ms a token at 16 as at 20 requests on two H200, and 56 ms with prompts of 8,000 at four.
    """
    times = {
        (engine, batch): ask(
            "qwen3-235b-a22b", Serving(weights="fp8-block", batch=batch, input_tokens=1000, output_tokens=1000),
            Plan(tp=2), "h200-sxm-141gb", engine=engine,
        ).tpot_seconds
        for engine in ("vllm-0.13", "vllm")
        for batch in (4, 16)
    }  # fmt: skip
    assert times["vllm-0.13", 16] < 1.2 * times["vllm-0.13", 4]
    assert times["vllm-0.13", 4] > 2.5 * times["vllm", 4]
    assert times["vllm-0.13", 16] == pytest.approx(51.5e-3, rel=0.12)


@pytest.mark.parametrize(("tp", "seconds"), [(1, 6355.22e-6 - 3745.24e-6), (2, 3745.24e-6 - 2529.50e-6)])
def test_deepgemm_takes_what_vllm_timed_on_h100(tp: int, seconds: float) -> None:
    """Twice the ranks save as much of 128 tokens over the experts of DeepSeek-V3 (github.com/vllm-project/vllm 13932).

    What is the same at every tp, the permutation of that day, drops out.
    """
    fit = constants().families["hopper"].experts["vllm"]["fp8_block"]["deepgemm_contiguous"]
    chip = Datasheet(flops=1978.9e12, bytes_per_second=3.352e12, cores=132.0)
    experts, rows, hidden = 256.0, 1024.0, 7168.0

    def took(ranks: int) -> float:
        wide = 2048 // ranks
        shapes = ((2.0 * wide, hidden), (hidden, float(wide)))
        moved = (experts * n * k + rows * (2 * n + k) for n, k in shapes)
        return sum(
            experts_seconds(fit, chip, size, (rows, experts, 0.98 * experts, n, k))
            for size, (n, k) in zip(moved, shapes, strict=True)
        )

    assert took(tp) - took(2 * tp) == pytest.approx(seconds, rel=0.08)


@pytest.mark.parametrize(("weights", "kind"), [("int8", "int8_wo"), ("fp8", "int8_wo"), ("int4", "int4_wo")])
def test_products_that_widen_weights_start_as_the_tables_of_such_kernels(weights: str, kind: str) -> None:
    """On A100 a step of small products gains their start and loses nothing else: those of 16 bits stay as they are."""
    rows = constants().families["ampere"].matmul
    mine = find_engine("vllm")
    plain = replace(mine, quantisation=replace(mine.quantisation, weight_only_kernels=False))

    def step(engine: Engine, form: str, device: str = "a100-sxm-80gb") -> float:
        job = Serving(batch=1, input_tokens=512, output_tokens=16, weights=form)
        return ask("qwen2.5-0.5b", job, Plan(), device, engine=engine).tpot_seconds

    starts = (step(mine, weights) - step(plain, weights)) / (4 * 24)
    assert starts == pytest.approx(rows[kind].start_seconds - rows["bf16"].start_seconds, rel=0.15)
    assert step(mine, "bf16") == step(plain, "bf16")
    # No table of Hopper has such kernels: what they read and multiply takes longer there, and they start as the others.
    assert step(mine, weights, "h100-sxm-80gb") == pytest.approx(step(plain, weights, "h100-sxm-80gb"), rel=0.05)


@pytest.mark.parametrize(
    ("device", "weights", "widens"),
    [
        ("l4", "fp8-block", True),
        ("l40s", "fp8-block", True),
        ("l40s", "fp8", False),
        ("h100-sxm-80gb", "fp8-block", False),
    ],
)
def test_blocks_of_8_bits_are_widened_on_ada(device: str, weights: str, widens: bool) -> None:
    """Since 0.29 vLLM runs FP8 in blocks in Marlin on Ada, in 16 bits: prompts take longer, decode steps no more."""
    job = Serving(batch=1, input_tokens=4096, output_tokens=16, weights=weights)
    older, newer = (ask("qwen3-8b", job, Plan(), device, engine=name) for name in ("vllm-0.28", "vllm-0.32"))
    if not widens:
        assert newer.ttft_seconds == pytest.approx(older.ttft_seconds)
        return
    assert newer.ttft_seconds > 1.3 * older.ttft_seconds
    assert newer.tpot_seconds < older.tpot_seconds


def test_experts_of_4_bits_take_the_kernel_that_an_engine_was_measured_with() -> None:
    """On Blackwell gpt-oss has kernels of 8-bit inputs, int4 there and on Hopper Marlin's, on A100 those of 16 bits."""
    for name, family, engine, kind, weights in (
        ("b200-sxm-180gb", "blackwell", "tensorrt-llm", "w4a8_mxfp4_mxfp8", "mxfp4"),
        ("h200-sxm-141gb", "hopper", "vllm", "int4_wo", "int4"),
        ("b200-sxm-180gb", "blackwell", "vllm", "int4_wo", "int4"),
        ("a100-sxm-80gb", "ampere", "vllm", "bf16", "int4"),
    ):
        kernels = kernels_of(find_device(name).device, family, weights, find_engine(engine), Efficiencies())
        rows = constants().families[family].experts[engine][kind]
        measured = max((r for n, r in rows.items() if "nongated" not in n), key=lambda row: row.rows)
        assert kernels.experts_wide == measured
        assert kernels.experts_type == ("fp8" if kind.startswith("w4a8") else "")


@pytest.mark.parametrize(
    ("engine", "products", "model", "roles"),
    [
        ("vllm", "fp8-block", "qwen3_moe", (".*", ".*")), ("vllm", "fp8-block", "deepseek_v3", (".*", ".*")),
        ("vllm", "bf16", "qwen3_moe", ("router|shared_gate", "")), ("tensorrt-llm", "fp8-block", "qwen3_moe", ("", "")),
        ("sglang", "fp8-block", "qwen3_moe", (".*", ".*")), ("sglang", "fp8-block", "deepseek_v3", (".*", "")),
    ],
)  # fmt: skip
def test_few_rows_take_what_tables_have(engine: str, products: str, model: str, roles: tuple[str, str]) -> None:
    """In 8-bit blocks they are DeepGEMM's and CUTLASS' own; of latent attention in SGLang a thin kernel competes."""
    device = find_device("h200-sxm-141gb").device
    kernels = kernels_of(device, "hopper", products, find_engine(engine), Efficiencies(), model)
    assert (kernels.thin_rows, kernels.library_roles) == (64, roles)


@pytest.mark.parametrize("engine", ["vllm", "vllm-2025", "sglang", "tensorrt-llm"])
def test_experts_in_mxfp4_on_hopper_are_those_of_triton(engine: str) -> None:
    """All three run gpt-oss on Hopper with the kernels that were measured in vLLM, which read 4 bits."""
    kernels = kernels_of(find_device("h200-sxm-141gb").device, "hopper", "mxfp4", find_engine(engine), Efficiencies())
    measured = constants().families["hopper"].experts["vllm"]["w4a16_mxfp4"]
    assert kernels.experts_wide in [row for name, row in measured.items() if "oaitriton" in name]
    assert kernels.experts_type == ""


def test_an_engine_runs_the_experts_that_it_is_told_to() -> None:
    """Told to run Marlin (VLLM_MXFP4_USE_MARLIN), vLLM has the kernel of int4 on Hopper; elsewhere nothing changes."""
    with_marlin = find_engine("vllm")
    with_marlin = replace(with_marlin, operators=replace(with_marlin.operators, experts_kernel="marlin"))
    for device, family, same in (("h200-sxm-141gb", "hopper", False), ("b200-sxm-180gb", "blackwell", True)):
        own, other = (
            kernels_of(find_device(device).device, family, "mxfp4", engine, Efficiencies()).experts_wide
            for engine in (find_engine("vllm"), with_marlin)
        )
        assert (own == other) is same
        marlin = kernels_of(find_device(device).device, family, "int4", with_marlin, Efficiencies()).experts_wide
        assert (other == marlin) is not same


def test_what_fused_experts_do_is_not_charged_again() -> None:
    """Sorting, activation and the sum of expert outputs are in the tables of experts and cost nothing beside them."""
    operators = ask("gpt-oss-120b", Serving(batch=8)).evaluation.decode.operators
    assert operators["mlp.experts.up"] > 0
    assert not any(operators[name] for name in ("mlp.dispatch", "mlp.experts.activation", "mlp.combine"))


@pytest.mark.parametrize(
    ("engine", "rotates"), [("vllm", True), ("sglang", True), ("tensorrt-llm", False), ("tensorrt-llm-0.9", False)]
)
def test_what_the_tables_of_attention_hold_is_not_charged_again(engine: str, rotates: bool) -> None:
    """Writing the cache is in the tables of attention, and so is the rotation of TensorRT-LLM: neither costs more."""
    evaluation = ask("llama-3.1-8b", Serving(batch=8), device="h100-sxm-80gb", engine=engine).evaluation
    for phase in (evaluation.prefill, evaluation.decode):
        assert phase.operators["cache_write"] == 0
        assert (phase.operators["rotary"] > 0) == rotates


def test_gate_and_up_are_two_products_unless_the_build_joins_them() -> None:
    """Engines of examples/run.py up to 0.11 start a product more a layer than those of the performance pages."""
    apart, joint = (
        ask("llama-3.1-8b", Serving(batch=1), engine=engine).evaluation.decode.operators["mlp.up"]
        for engine in ("tensorrt-llm-0.11", "tensorrt-llm-0.9")
    )
    assert 32 * 1e-6 < apart - joint < 32 * 5e-6


def test_older_sglang_starts_the_four_projections_of_qwen35() -> None:
    """0.5.9 runs in_proj_qkv, _z, _b and _a in turn, 0.5.10 joins them, as Qwen3-Next had them in any release."""

    def projections(model: str, engine: str) -> float:
        asked = ask(model, Serving(batch=1), device="h200-sxm-141gb", engine=engine)
        return asked.evaluation.decode.operators["in"] / len(asked.case.model.layers)

    gaps = [projections("qwen3.5-9b", f"sglang-0.5.{each}") for each in (9, 7, 11)]
    assert gaps[0] == gaps[1] > gaps[2] + 3 * 1.5e-6
    assert projections("qwen3-next-80b-a3b", "sglang-0.5.9") == projections("qwen3-next-80b-a3b", "sglang-0.5.11")


def test_prompts_of_one_product_or_two_are_the_same_work() -> None:
    """Cut in two, gate and up of a long prompt take within 2 % of the joint product."""
    job = Serving(batch=8, input_tokens=2048, output_tokens=2)
    apart, joint = (
        ask("llama-3.1-8b", job, engine=engine).evaluation.prefill.operators["mlp.up"]
        for engine in ("tensorrt-llm-0.11", "tensorrt-llm-0.9")
    )
    assert apart == pytest.approx(joint, rel=0.02)


@pytest.mark.parametrize(
    ("engine", "weights", "kind", "apart"),
    [
        ("vllm", "nvfp4", "fp4", True),
        ("vllm", "fp8", "fp8", False),
        ("vllm", "fp8-block", "fp8_block", False),
        ("sglang", "nvfp4", "fp4", True),
        ("sglang", "fp8", "fp8", True),
        ("sglang", "fp8-block", "fp8_block", True),
        ("tensorrt-llm", "nvfp4", "fp4", True),
        ("tensorrt-llm", "fp8-block", "fp8_block", True),
        ("tensorrt-llm", "fp8", "fp8", False),
    ],
)
def test_inputs_are_quantised_by_a_kernel_of_their_own(engine: str, weights: str, kind: str, apart: bool) -> None:
    """Where no kernel before a product does it, each product starts a quantisation first: as its table has it, once."""
    own = find_engine(engine)
    case = ask("llama-3.1-70b", Serving(weights=weights), device="b200-sxm-180gb", engine=own).case
    server = replace(engine_cost_model(case, sizes_of(case.model, case.plan, case.job, case.domains)), decoding=True)
    dtype = "fp4" if kind == "fp4" else "fp8"
    alone = rates_of(case.cluster.device, dtype, 0.0, Efficiencies()).matmul_start
    table = constants().families["blackwell"].matmul[kind].quantise
    more = min(table[own.kernels].start_seconds, own.quantisation.kernel_seconds) if apart else 0.0
    assert float(dict(server.narrow)[dtype].matmul_start) == pytest.approx(float(alone) + more)
    assert 0.0 <= more <= 5e-6


@pytest.mark.parametrize(
    ("engine", "weights", "kind"),
    [("sglang", "fp8-block", "fp8_block"), ("tensorrt-llm", "fp8-block", "fp8_block"), ("vllm", "nvfp4", "fp4")],
)
def test_every_rank_streams_the_inputs_that_it_quantises(engine: str, weights: str, kind: str) -> None:
    """A prompt's hidden states are read in 16 bits and written narrow at the table's share, whatever tp is."""
    tokens, layers, hidden = 8192, 80, 8192
    own = find_engine(engine)
    fused = replace(own, quantisation=replace(own.quantisation, unfused_types=(), kernel_seconds=1.0))
    job = Serving(batch=1, input_tokens=tokens, output_tokens=2, weights=weights)
    table, device = constants().families["blackwell"].matmul[kind].quantise[own.kernels], find_device("b200-sxm-180gb")
    streamed = 3 * tokens * hidden / (table.efficiency * bandwidth_of(device.device))
    started = min(table.start_seconds, own.quantisation.kernel_seconds)
    for tp in (2, 8):
        apart, without = (
            ask("llama-3.1-70b", job, Plan(tp=tp), device="b200-sxm-180gb", engine=one).evaluation.prefill.operators
            for one in (own, fused)
        )
        assert apart["qkv"] - without["qkv"] == pytest.approx(layers * (started + streamed))


@pytest.mark.parametrize("weights", ["fp8-block", "nvfp4", "int4"])
def test_the_gate_of_shared_experts_stays_in_16_bits(weights: str) -> None:
    """Its one output is no layer that an engine quantises: it takes what it takes beside 16-bit weights."""
    narrow, wide = (
        ask(
            "qwen3.6-35b-a3b", Serving(batch=1, weights=form), device="b200-sxm-180gb", engine="sglang"
        ).evaluation.decode.operators["mlp.shared_gate"]
        for form in (weights, "bf16")
    )
    assert narrow == pytest.approx(wide)


def test_kernels_over_latent_caches_are_planned_once_a_step() -> None:
    """Attention over a latent cache on H200 takes vLLM below 40 us a layer for a few sequences, as it does SGLang."""
    job = Serving(batch=4, input_tokens=1024, output_tokens=64, weights="fp8-block")
    own, other = (
        ask("deepseek-v3", job, Plan(tp=8), device="h200-sxm-141gb", engine=engine).evaluation.decode.operators
        for engine in ("vllm", "sglang")
    )
    assert own["attention"] == pytest.approx(other["attention"])
    assert own["attention"] / 61 < 40e-6


@pytest.mark.parametrize(
    ("device", "share"),
    [("l40s", 1.0), ("rtx-4090", 16 / 15), ("a40", 15 / 16), ("rtx-a6000", 1.0), ("h100-nvl-94gb", 1.0)],
)
def test_memory_that_checks_its_errors_in_line_gives_a_sixteenth_to_it(device: str, share: float) -> None:
    """Weights stream as the measured device of the family has it, in training alike: A100's check bits lie apart."""
    case = ask("llama-3.1-8b", Serving(batch=1), device=device).case
    server = replace(engine_cost_model(case, sizes_of(case.model, case.plan, case.job, case.domains)), decoding=True)
    alone = rates_of(case.cluster.device, "bf16", 0.0, Efficiencies())
    assert float(server.bandwidth) == pytest.approx(share * case.cluster.device.memory_bytes_per_second)
    assert float(server.rates.memory_bytes) == float(alone.memory_bytes)


def test_ranks_that_share_experts_find_their_own() -> None:
    """Triton's experts under vLLM pay for the map of a rank's experts where there are several ranks, once a layer."""
    fit = next(iter(constants().families["hopper"].experts["vllm"]["bf16"].values()))
    assert fit.mapped_seconds > 0
    for ep, charged in ((1, 0.0), (2, fit.mapped_seconds)):
        given = ask("mixtral-8x7b", Serving(batch=8), plan=Plan(tp=2, ep=ep), device="h100-sxm-80gb").case
        sizes = sizes_of(given.model, given.plan, given.job, given.domains)
        costs = engine_cost_model(given, sizes)
        free = replace(costs, kernels=replace(costs.kernels, experts_wide=replace(fit, mapped_seconds=0.0)))
        step: EngineStep[float] = EngineStep(phase="decode", sequences=8.0, tokens=1, context=100.0)
        ops = [op for _, line in step_ledger(given, sizes, step).lines for op in line if op.kind == "grouped"]
        assert len(ops) == 2
        assert sum(op_seconds(costs, op) - op_seconds(free, op) for op in ops) == pytest.approx(charged, abs=1e-12)


@pytest.mark.parametrize(("plan", "others"), [(Plan(tp=8, ep=8), 7), (Plan(tp=8), 0), (Plan(dp=8, ep=8), 0),
                                             (Plan(tp=4, dp=2, ep=8), 3)])  # fmt: skip
def test_ranks_that_split_attention_sort_the_choices_of_all(plan: Plan, others: int) -> None:
    """A rank with an eighth of the experts moves the rows of seven others' that its tokens chose, as tables have it."""
    given = ask("qwen3-30b-a3b", Serving(batch=8), plan=plan, device="h100-sxm-80gb").case
    sizes = sizes_of(given.model, given.plan, given.job, given.domains)
    costs = engine_cost_model(given, sizes)
    fit = costs.kernels.experts_wide
    free = replace(costs, kernels=replace(costs.kernels, experts_wide=replace(fit, others_traffic=0.0)))
    step: EngineStep[float] = EngineStep(phase="prefill", sequences=1.0, tokens=8192.0, context=0.0)
    ops = [op for _, line in step_ledger(given, sizes, step).lines for op in line if op.kind == "grouped"]
    up, down = ops[0], ops[1]
    found = sum(op_seconds(costs, op) - op_seconds(free, op) for op in (up, down))
    moved = 2 * others * up.rows * up.batch * (2048 + 2 * 768 / (1 if plan.ep > 1 else 8))
    assert found == pytest.approx(fit.others_traffic * moved / costs.bandwidth, abs=1e-12)


@pytest.mark.parametrize("tokens", [1, 8, 20, 32, 33, 64, 96, 100, 128, 200, 256, 512, 513, 1024, 2048, 8192])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (16, 1), (128, 8), (256, 8)])
def test_tiles_of_experts_are_those_of_tokens_routed_at_random(tokens: int, experts: int, top_k: int) -> None:
    """Tiles that a random router fills, drawn, are within a tenth of what a step is charged."""
    drawn, found = random.Random(tokens), []
    size, fit = (
        tile_rows((32, 96, 512), tokens),
        next(iter(constants().families["hopper"].experts["vllm"]["bf16"].values())),
    )
    for _ in range(max(2, 2000 // tokens)):
        rows = Counter(one for _ in range(tokens) for one in drawn.sample(range(experts), top_k))
        found.append((len(rows), sum(-(-n // size) for n in rows.values())))
    hit, count = (sum(column) / len(found) for column in zip(*found, strict=True))
    tiles = routed_tiles(fit, float(tokens), float(tokens * top_k), hit)
    assert tiles.rows == size and tiles.count == pytest.approx(count, rel=0.1)
