"""A model that is split between a device and the processor of its host (llama.cpp's -ngl and --n-cpu-moe)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise as sw
from command_line import run
from shardwise.cost import host_of
from shardwise.serving import InferReport, ServingOptions

HOST = "cpu-generic"
LAYERS = 32
SOME = settings(max_examples=15, deadline=None)


def ask(model: str = "llama-3.1-8b", device: str = "rtx-4090", **job: Any) -> InferReport:
    """Return the report of one batch with llama.cpp."""
    asked = sw.Serving(**{"input_tokens": 512, "output_tokens": 64, "weights": "q4_k_m", **job})
    where = sw.Cluster.parse(f"1x{device}")
    return sw.infer(sw.load_model(model), where, sw.Plan(), asked, ServingOptions(engine="llama.cpp"))


@SOME
@given(st.integers(1, 31), st.integers(16, 4096))
def test_no_layers_on_the_device_is_the_processor_alone(batch: int, tokens: int) -> None:
    """With no layer on the device, decode steps of fewer than 32 sequences and all bytes are the processor's."""
    job: dict[str, Any] = {"batch": batch, "input_tokens": tokens}
    split, alone = ask(gpu_layers=0, host=HOST, **job), ask(device=HOST, **job)
    assert split.tpot_seconds == pytest.approx(alone.tpot_seconds, rel=1e-12)
    assert split.on_host == alone.memory and split.weights_bytes_per_gpu == 0


@SOME
@given(st.integers(LAYERS + 1, 10**6), st.integers(1, 64))
def test_all_layers_on_the_device_is_the_device_alone(layers: int, batch: int) -> None:
    """With every layer and the head on the device, the host takes no part."""
    split, alone = ask(gpu_layers=layers, host=HOST, batch=batch), ask(batch=batch)
    assert split.evaluation == alone.evaluation and split.on_host is None


@SOME
@given(st.integers(0, LAYERS), st.integers(1, 64), st.sampled_from(["q4_k_m", "bf16"]))
def test_more_layers_on_the_device_are_faster_and_move_bytes(layers: int, batch: int, weights: str) -> None:
    """A layer more is faster, and takes from the host the weights and the cache that it brings to the device."""
    job: dict[str, Any] = {"batch": batch, "weights": weights}
    # The first thing on the device costs a copy each step.
    few = ask(gpu_layers=max(layers, 1), host=HOST, **job)
    more, whole = ask(gpu_layers=max(layers, 1) + 1, host=HOST, **job), ask(**job)
    assert more.tpot_seconds < few.tpot_seconds and more.ttft_seconds < few.ttft_seconds
    for report in (few, more):
        held = [report.memory] if report.on_host is None else [*report.on_devices, report.on_host]
        assert sum(one.weights + one.tables for one in held) == pytest.approx(
            whole.memory.weights + whole.memory.tables
        )
        assert sum(one.kv_cache for one in held) == pytest.approx(whole.kv_cache_bytes_per_gpu)
    assert more.weights_bytes_per_gpu > few.weights_bytes_per_gpu


@SOME
@given(st.integers(1, 36))
def test_experts_on_the_host_move_their_weights_alone(layers: int) -> None:
    """A layer's experts on the host take their weights off the device, its cache stays, and steps take longer."""
    job: dict[str, Any] = {"model": "gpt-oss-120b", "weights": ""}
    few, more = (ask(**job, **({"cpu_experts": n, "host": HOST} if n else {})) for n in (layers - 1, layers))
    assert more.weights_bytes_per_gpu < few.weights_bytes_per_gpu
    assert more.kv_cache_bytes_per_gpu == few.kv_cache_bytes_per_gpu
    assert more.tpot_seconds > few.tpot_seconds and more.ttft_seconds > few.ttft_seconds
    assert more.on_host is not None
    whole = ask(**job).memory
    assert more.on_host.weights + more.weights_bytes_per_gpu == pytest.approx(whole.weights + whole.tables)


def test_the_head_goes_to_the_device_before_any_layer() -> None:
    """As load_tensors has it: one layer is the head alone, and the last layer of the model follows it."""
    head, one = (ask(gpu_layers=n, host=HOST).evaluation.sizes.stages[0] for n in (1, 2))
    assert (head.layers, head.ends, one.layers, one.ends) == ((0,), 1, (1,), 1)


def test_long_steps_read_the_host_s_weights_over_the_link() -> None:
    """From 32 tokens on the device runs all, and waits for the weights of the host's layers and what they keep."""
    short, long = (ask(gpu_layers=17, host=HOST, input_tokens=n) for n in (31, 32))
    assert short.evaluation.prefill.exposed["host"] < 1e-3
    matrices = 16 * (4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)) * 4.5 / 8
    waited = long.evaluation.prefill.exposed["host"]
    assert waited == pytest.approx(matrices / host_of(long.case.cluster).link_bytes_per_second, rel=0.1)


def test_a_step_is_the_sum_of_its_parts() -> None:
    """Operators of both sides, what crosses and the work of the host program add up to the step."""
    for job in ({"gpu_layers": 12}, {"model": "gpt-oss-120b", "weights": "", "cpu_experts": 20}):
        decode = ask(host=HOST, **job).evaluation.decode
        parts = sum(decode.operators.values()) + sum(decode.exposed.values()) + decode.overhead
        assert decode.seconds == pytest.approx(parts) == pytest.approx(decode.slowest_stage)
        assert any(name.startswith("host.") for name in decode.operators) and decode.exposed["host"] > 0


@pytest.mark.parametrize(
    ("words", "field", "rule"),
    [
        ("--engine vllm -ngl 8 --host cpu-generic", "gpu_layers", "splits no model with the host"),
        ("--engine llama.cpp -ngl 8", "host", "is needed"),
        ("--engine llama.cpp -ngl 8 --host cpu-none", "host", "is neither a device"),
        ("--engine llama.cpp -ncmoe 8 --host cpu-generic", "cpu_experts", "has no experts"),
        ("--engine llama.cpp -ngl 8 --host cpu-generic --energy", "host", "the watts of cpu-generic"),
        ("--engine llama.cpp --gpu-layers -3 --host cpu-generic", "gpu_layers", "at least 0"),
        ("--engine llama.cpp -ngl 8 --host cpu-generic --on 2xrtx-4090", "gpu_layers", "there are 2 devices"),
    ],
)
def test_what_cannot_be_split_is_refused(words: str, field: str, rule: str) -> None:
    """A split that no engine makes, or whose host is not known, is refused with the field and the rule."""
    where = [] if "--on" in words else ["--on", "1xrtx-4090"]
    found = run("infer", "llama-3.1-8b", *where, *words.split(), "--json")
    assert found.status == 2
    assert any(p["field"] == field and rule in p["rule"] for p in found.tree["error"]["problems"])


def test_serve_and_solve_take_a_split() -> None:
    """Under load steps are as slow as in a batch, and the most layers that fit are found."""
    asked = ("--on", "1xrtx-4090", "--engine", "llama.cpp", "--weights", "q4_k_m", "--host", HOST)
    served = run("serve", "llama-3.1-8b", *asked, "-ngl", "20", "--rate", "0.02/s", "--requests", "40", "--json").tree
    whole = run("serve", "llama-3.1-8b", *asked, "--rate", "0.02/s", "--requests", "40", "--json").tree
    batch = ask(gpu_layers=20, host=HOST).tpot_seconds
    assert served["tpot"]["p50_seconds"] == pytest.approx(batch, rel=0.05)
    assert whole["tpot"]["p50_seconds"] < 0.7 * batch
    found = run("infer", "llama-3.1-70b", *asked, "--solve", "gpu_layers", "--json").tree["solve"]
    assert found["value"] == 47 and "48 does not" in found["beyond"]


# Processor -> cores, clock in GHz, bytes a second of its memory and GiB of it.
PROCESSORS = {
    "cpu-epyc-9554": (64, 3.1, 460.8e9, 192),
    "cpu-epyc-9175f-twice": (32, 4.2, 819.2e9, 768),
    "cpu-ryzen-5900x": (12, 3.7, 57.6e9, 128),
    "cpu-ryzen-7950x": (16, 4.5, 57.6e9, 128),
}
# Tokens a second that llama.cpp's own benchmark or its users report: the rows of EPYC 9554 gave the two constants of
# a processor (ahelpme.com, 2025), the others none (github.com/ggml-org/llama.cpp issues 11744, 2025-02, with each
# socket reading its own memory, and 4716, 2023-12).
GENERATED = [
    ("cpu-epyc-9554", "phi-4", "q4_k_m", 28.74),
    ("cpu-epyc-9554", "phi-4", "q6_k", 23.246),
    ("cpu-epyc-9554", "phi-4", "q8_0", 19.194),
    ("cpu-epyc-9175f-twice", "llama-3.1-70b", "bf16", 4.31),
    ("cpu-ryzen-5900x", "mixtral-8x7b", "q8_0", 3.58),
    ("cpu-ryzen-7950x", "mixtral-8x7b", "q8_0", 3.37),
]


@pytest.fixture
def processors(tmp_path: Path) -> Iterator[None]:
    """A catalogue of those processors: two FMA units of eight numbers a core."""
    (tmp_path / "devices").mkdir()
    for name, (cores, clock, memory, size) in PROCESSORS.items():
        flops, held = cores * clock * 32e9, size * 2**30
        facts = {
            "memory_bytes": held, "usable_memory_bytes": held, "memory_bytes_per_second": memory, "num_cores": cores,
            "vector_flops": flops, "devices_per_node": 1, "fast_domain": 1, "slow_bytes_per_second": 1.25e9,
            "matrix_flops": {"fp32": flops},
        }  # fmt: skip
        lines = [f'{key} = "{name}"' for key in ("name", "full_name", "vendor")] + ['fast_link = "local"', "[sources]"]
        lines += ['own = ["data sheet", "2025"]', "[facts]"]
        lines += [f'{key} = [{value}, "own"]' for key, value in facts.items() if key != "matrix_flops"]
        lines += ["[facts.matrix_flops]", f'fp32 = [{flops}, "own"]']
        (tmp_path / "devices" / f"{name}.toml").write_text("\n".join(lines) + "\n")
    sw.use_catalogue(tmp_path)
    yield
    sw.use_catalogue()


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize(("name", "model", "weights", "rate"), GENERATED)
def test_a_processor_alone_generates_as_fast_as_published(name: str, model: str, weights: str, rate: float) -> None:
    """One token reads the weights once at a share of the memory's rate, and all cores meet behind every operator."""
    job = sw.Serving(batch=1, input_tokens=1, output_tokens=128, weights=weights)
    options = sw.ServingOptions(engine="llama.cpp")
    report = sw.infer(sw.load_model(model), sw.Cluster.parse(f"1x{name}"), sw.Plan(), job, options)
    assert 0.9 < 1 / report.tpot_seconds / rate < 1.1


def test_a_host_that_runs_nothing_is_known_all_the_same() -> None:
    """A processor that no layer lies on changes nothing, which is said; one that is not known is refused."""
    asked = ("infer", "llama-3.1-8b", "--on", "8xh100", "--json", "--host")
    assert run(*asked, "abc").fields == ["host"]
    answer = run(*asked, "cpu-x86-2core").tree
    plain = run(*asked[:-1]).tree
    assert "host: no effect, the device holds the whole model" in answer["assumptions"]
    assert answer["ttft_seconds"] == plain["ttft_seconds"]
