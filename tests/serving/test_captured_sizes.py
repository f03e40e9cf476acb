"""Decode steps are filled up to the next size that an engine captured a graph of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serving.serving_cases import ask, model_of, moe_block
from shardwise.errors import InputError
from shardwise.hardware import Cluster
from shardwise.ledger.op import Op
from shardwise.plans import Arrivals, Length, Plan, Serving, Workload
from shardwise.serving import EngineStep, ServingOptions, engine_names, find_engine
from shardwise.serving._captured import padded_sequences
from shardwise.serving._case import ServingCase
from shardwise.serving._ledger import step_ledger
from shardwise.serving._sizes import ServingSizes, sizes_of
from shardwise.serving.load import LoadOptions, serve

EXPERTS = model_of(moe_block(64, 4))
GUESSES: dict[str, Any] = {"speculative_method": "ngram", "num_speculative_tokens": 2, "acceptance_length": 2.0}


def case_of(engine: str, job: Serving, plan: Plan | None = None) -> tuple[ServingCase, ServingSizes[float]]:
    """Return a mixture on H100 under an engine."""
    case = ask(EXPERTS, job, plan or Plan(), "h100-sxm-80gb", engine=engine).case
    return case, sizes_of(case.model, case.plan, case.job, case.domains)


@pytest.mark.parametrize(
    ("engine", "job", "steps"),
    [
        ("vllm", {}, {1: 1, 3: 4, 5: 8, 9: 16, 16: 16, 250: 256, 257: 272, 505: 512, 513: 513}),
        ("vllm", {"captured_sequences": 10}, {9: 10, 10: 10, 11: 11}),
        ("vllm-2025", {}, {9: 16}),
        ("vllm-v0", {"max_sequences": 256}, {9: 16, 257: 264}),
        # What may run is a size of its own in vLLM since the summer of 2026; before V1 it was rounded up.
        ("vllm", {"max_sequences": 14}, {9: 14, 3: 4}),
        ("vllm-0.28", {"max_sequences": 14}, {9: 16}),
        ("vllm-v0", {"max_sequences": 6}, {5: 8}),
        ("vllm-0.13", {}, {257: 272}),
        ("vllm-0.11", {}, {257: 264}),
        *((engine, {"captured_sizes": (32, 1, 4)}, {1: 1, 3: 4, 5: 32, 33: 33}) for engine in ("vllm", "sglang")),
        ("tensorrt-llm", {"captured_sizes": (1, 4, 32), "max_sequences": 64}, {3: 4, 5: 32, 33: 33}),
        ("tensorrt-llm", {"captured_sizes": (1, 4, 32), "max_sequences": 8}, {5: 8}),
        ("sglang", {"disable_cuda_graph_padding": True}, {9: 9, 250: 250}),
        ("sglang", {}, {3: 4, 5: 8, 9: 12, 13: 16, 250: 256, 257: 257}),
        ("sglang", {"max_sequences": 14}, {13: 14}),
        ("sglang-0.5.2", {}, {3: 4, 9: 16, 153: 160, 161: 161}),
        ("tensorrt-llm", {"max_sequences": 2048}, {3: 4, 9: 16, 129: 192, 257: 320}),
        ("tensorrt-llm", {"max_sequences": 150}, {129: 150}),
        # What a launch without enable_padding is read as: every size up to 32, and none beyond.
        (
            "tensorrt-llm",
            {"max_sequences": 2048, "captured_sequences": 32, "disable_cuda_graph_padding": True},
            {9: 9, 32: 32, 33: 33},
        ),
        ("tensorrt-llm", {"max_sequences": 2048, "captured_sequences": 32}, {9: 16, 32: 32, 33: 33}),
        ("tensorrt-llm", {"max_sequences": 2048, "captured_sequences": 128}, {9: 16, 121: 128, 129: 129}),
        # Of a static batch alone: a launch captures what it runs.
        ("tensorrt-llm", {}, {16: 16}),
        *((engine, {}, {9: 9}) for engine in ("vllm-eager", "sglang-eager", "vllm-0.2", "llama.cpp", "lmdeploy")),
        *((engine, {}, {9: 9}) for engine in ("tensorrt-llm-0.12", "deepspeed-mii", "fastertransformer")),
    ],
)
def test_steps_are_filled_up_to_the_next_captured_size(engine: str, job: dict[str, Any], steps: dict[int, int]) -> None:
    """The lists are those of the engines; what is larger than all of them, or never captured, runs as it is."""
    case, sizes = case_of(engine, Serving(batch=16, **job))
    assert {rows: padded_sequences(case, sizes, rows, 1) for rows in steps} == steps


@pytest.mark.parametrize(
    ("engine", "guesses", "steps"),
    [
        # 1, 2, 4, 8, 16 ... tokens are 4, 8, 16 ... of sequences with 3 guesses, and 3, 6, 9, 18, 24 of those with 2.
        ("vllm", 3, {1: 1, 3: 4, 5: 6, 9: 10}),
        ("vllm", 2, {1: 1, 2: 2, 3: 3, 4: 6, 7: 8}),
        ("vllm-0.11", 2, {3: 16 / 3, 4: 16 / 3}),
        # Sequences, of which fewer are added where tokens are guessed.
        ("sglang", 3, {3: 3, 5: 5, 9: 10, 33: 40}),
        ("sglang-0.5.2", 3, {3: 3, 9: 10, 33: 40, 57: 64}),
        ("tensorrt-llm", 3, {3: 4, 9: 16}),
    ],
)
def test_steps_that_verify_guesses_are_filled_up_too(engine: str, guesses: int, steps: dict[int, float]) -> None:
    """Sizes of tokens, in vLLM, are rounded up to whole sequences; others' are sequences."""
    job = Serving(
        batch=64, speculative_method="ngram", num_speculative_tokens=guesses, acceptance_rate=0.5, max_sequences=64
    )
    case, sizes = case_of(engine, job)
    assert {n: padded_sequences(case, sizes, n, 1 + guesses) for n in steps} == pytest.approx(steps)


def test_a_step_without_padding_is_launched_unless_a_graph_has_its_size() -> None:
    """Of listed sizes the largest and single ones between are replayed, all others pay for their launches."""

    def seconds(batch: int, **job: Any) -> float:
        one = Serving(batch=batch, max_sequences=64, **job)
        return ask(EXPERTS, one, Plan(), "h100-sxm-80gb", engine="tensorrt-llm").tpot_seconds

    listed: dict[str, Any] = {"captured_sizes": (1, 8, 16), "disable_cuda_graph_padding": True}
    assert seconds(8, **listed) == seconds(8) < 0.9 * seconds(9, **listed)
    assert seconds(9, **listed) == seconds(9, captured_sequences=0)
    assert seconds(17, **listed) == seconds(17, captured_sequences=0)


def test_sizes_are_counts_of_which_the_largest_may_be_said_again() -> None:
    """A list that is not of whole numbers, or another largest step beside it, is refused by name."""
    for field, job in (
        ("captured_sizes", {"captured_sizes": (0, 8)}),
        ("captured_sequences", {"captured_sizes": (1, 8), "captured_sequences": 4}),
        ("disable_cuda_graph_padding", {"disable_cuda_graph_padding": 1}),
    ):
        with pytest.raises(InputError) as refused:
            ask(EXPERTS, Serving(batch=1, **job), Plan(), "h100-sxm-80gb")  # type: ignore[arg-type]
        assert [one.field for one in refused.value.problems] == [field]


def test_sizes_are_in_order() -> None:
    """Every list starts at one sequence and grows."""
    graphs = [find_engine(name).graphs for name in engine_names()]
    for sizes in {sizes for one in graphs for sizes in (one.captured_sizes, one.verified_sizes)} - {()}:
        every = [size for first, last, step in sizes for size in range(first, last + 1, step)]
        assert every[0] == 1
        assert every == sorted(set(every))
        assert all((last - first) % step == 0 for first, last, step in sizes)


def layer_of(case: ServingCase, sizes: ServingSizes[float], sequences: float) -> dict[str, Op[float]]:
    """Return the operators of a layer by their names."""
    step = EngineStep(phase="decode", sequences=sequences, tokens=1, context=1000)
    return {op.name: op for op in step_ledger(case, sizes, step).lines[0][1]}


def test_a_filled_step_reads_no_more_of_the_cache() -> None:
    """GEMMs, norms and messages have the rows of the captured size, attention and the cache those of the sequences."""
    job = Serving(batch=16)
    case, sizes = case_of("vllm", job, Plan(tp=2))
    plain, _ = case_of("vllm-eager", job, Plan(tp=2))
    filled, whole = (layer_of(case, sizes, rows) for rows in (9, 16))
    alone = layer_of(plain, sizes, 9)
    assert filled.keys() == whole.keys() == alone.keys()
    for name, op in filled.items():
        kept = op.role in ("attention", "cache_write")
        assert op == (alone if kept else whole)[name], name
    assert {op.role for op in filled.values()} >= {"attention", "cache_write", "qkv", "router", "norm"}


@pytest.mark.parametrize(
    ("engine", "ep", "routed"), [("vllm", 1, 16), ("vllm", 2, 16), ("sglang", 1, 12), ("sglang", 2, 9)]
)
def test_rows_beyond_the_sequences_choose_experts_where_nothing_hides_them(engine: str, ep: int, routed: int) -> None:
    """SGLang hides them from experts that ranks share out; TensorRT-LLM's are alike, and choose the same ones."""
    case, sizes = case_of(engine, Serving(batch=16), Plan(tp=2, ep=ep))
    found, whole = (layer_of(case, sizes, rows) for rows in (9, routed if routed > 9 else 16))
    rows = [next(op.rows for op in ops.values() if op.kind == "grouped") for ops in (found, whole)]
    if routed > 9:
        assert rows[0] == rows[1]
    else:
        case = replace(case, engine=find_engine("sglang-eager"))
        assert rows[0] == next(op.rows for op in layer_of(case, sizes, 9).values() if op.kind == "grouped") < rows[1]
    job = Serving(batch=16, max_sequences=64)
    case, sizes = case_of("tensorrt-llm", job, Plan(tp=2, ep=ep))
    alone = replace(case, engine=find_engine("tensorrt-llm-0.12"))
    few, same = (
        next(op.rows for op in layer_of(one, sizes, 9).values() if op.kind == "grouped") for one in (case, alone)
    )
    assert few == pytest.approx(same)


def test_columns_are_filled_as_numbers_are() -> None:
    """A column of steps has the rows that each of them has alone."""
    np = pytest.importorskip("numpy")
    for engine in ("vllm", "sglang", "tensorrt-llm"):
        case, sizes = case_of(engine, Serving(batch=16, max_sequences=600))
        counts = [1, 3, 9, 17, 100, 129, 200, 257, 300, 511, 513, 600]
        together = padded_sequences(case, sizes, np.array(counts, float), 1)
        assert together.tolist() == [padded_sequences(case, sizes, count, 1) for count in counts]


@pytest.mark.parametrize(
    ("engine", "job", "said"),
    [
        ("vllm", {"batch": 9}, "decode steps of 9 sequences run as 16: vLLM pads"),
        ("vllm", {"batch": 16}, ""),
        ("vllm-eager", {"batch": 9}, ""),
        ("vllm", GUESSES | {"batch": 1}, ""),
        ("vllm", GUESSES | {"batch": 5}, "decode steps of 15 tokens run as 18: vLLM pads"),
        ("sglang", GUESSES | {"batch": 9}, "decode steps of 9 sequences run as 10: SGLang pads"),
    ],
)
def test_an_answer_says_as_how_many_its_steps_run(engine: str, job: dict[str, Any], said: str) -> None:
    """What is added to a batch is among what was assumed, in whole sequences or tokens; nothing is said of nothing."""
    notes = ask(EXPERTS, Serving(**job), Plan(), "h100-sxm-80gb", engine=engine).evaluation.notes
    found = [one for one in notes if " pads " in one]
    assert found == [f"{said} them to the next captured graph"] * bool(said)


@pytest.mark.parametrize(
    ("engine", "job", "padded"),
    [("vllm", {}, True), ("vllm", GUESSES, True), ("sglang", {}, True), ("vllm-eager", {}, False)],
)
def test_a_server_says_that_its_steps_are_padded(engine: str, job: dict[str, Any], padded: bool) -> None:
    """Who runs beside whom changes from step to step: an answer under load says it of all steps, and of no batch."""
    lengths = {"input_tokens": Length(mean=100), "output_tokens": Length(mean=10)}
    asked = Workload(**lengths, arrivals=Arrivals(rate=1.0), count=10)
    options = LoadOptions(serving=ServingOptions(engine=engine))
    report = serve(EXPERTS, Cluster.parse("1xh100-sxm-80gb"), Plan(), asked, Serving(**job), options)
    said = [one for one in report.assumptions if " pads " in one]
    brand = report.base.case.engine.brand
    assert said == [f"{brand} pads decode steps to the next captured graph"] * padded
