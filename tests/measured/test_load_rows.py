"""Rows of runs under load: every metric of an open loop, a closed loop or a burst is predicted."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from command_line import run
from measured_rows import INFERENCE, only

HEAD = "case_id,metric,value,unit,model,device,num_gpus,tp,engine,engine_version,serving_mode,weight_dtype"
HEAD += ",concurrency,request_rate,input_tokens,output_tokens,max_num_batched_tokens,notes"


def rows(tmp_path: Path, *lines: str) -> Path:
    """Return a file of rows of Llama-3.1-8B on one H100: metric, value, unit, concurrency, rate, notes."""
    text = [HEAD]
    for index, line in enumerate(lines):
        metric, value, unit, users, rate, notes = line.split("|")
        stated = f"case-{index},{metric},{value},{unit},llama-3.1-8b,h100-sxm-80gb,1,1,vllm,0.15.0,online,bf16"
        text.append(f"{stated},{users},{rate},1000,100,,{notes}")
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "low", "high"),
    [
        ("ttft|0.04|s||5|arrivals=poisson; num_requests=200", 0.02, 0.08),
        ("ttft_p99|0.04|s||5|arrivals=constant; num_requests=200; server-side times (before HTTP)", 0.02, 0.08),
        ("tpot|0.008|s||5|num_requests=200", 0.006, 0.012),
        ("request_latency_p90|0.8|s||5|num_requests=200", 0.6, 1.4),
        ("request_throughput|5|1/s||5|num_requests=400", 4.0, 6.0),
        ("output_tokens_per_second|500|token/s||5|num_requests=400", 400, 600),
        ("request_latency|1.2|s|16||num_requests=200", 0.7, 1.6),
        ("total_tokens_per_second|20000|token/s||inf|num_requests=400", 12_000, 40_000),
        ("kv_cache_tokens|420000|token||5|num_requests=200", 380_000, 460_000),
    ],
)
def test_every_metric_of_a_run_is_predicted(line: str, low: float, high: float, tmp_path: Path) -> None:
    """Means, percentiles and rates of open loops, closed loops and bursts have values of the right size."""
    out = tmp_path / "rows.csv"
    done = run("validate", str(rows(tmp_path, line)), "--rows", str(out), "--json")
    assert done.status == 0, done.out
    assert json.loads(done.out)["rows"]["predicted"] == 1
    head, row = (text.split(",") for text in out.read_text(encoding="utf-8").splitlines()[:2])
    assert low < float(row[head.index("predicted")]) < high


def predicted(path: Path) -> list[float]:
    """Return the predictions of a file's rows."""
    out = path.with_name("rows.csv")
    assert run("validate", str(path), "--rows", str(out)).status == 0
    with out.open(encoding="utf-8", newline="") as file:
        return [float(row["predicted"]) for row in csv.DictReader(file)]


def test_notes_say_how_lengths_are_spread(tmp_path: Path) -> None:
    """Prompts drawn up to the stated length are shorter on average; answers of one length hold a burst no longer up."""
    burst, some = "total_tokens_per_second|20000|token/s||inf|num_requests=400", "lengths=distribution_mean"
    path = rows(
        tmp_path, f"{burst}; {some}", f"{burst}; {some}; output_lengths=fixed", f"{burst}; output_lengths=fixed"
    )
    spread, fixed, equal = predicted(path)
    assert spread < fixed
    assert fixed == pytest.approx(equal, rel=0.1)
    path = rows(tmp_path, *(f"ttft|0.04|s|16||num_requests=400{more}" for more in ("", "; lengths=0.8 to 1")))
    stated, drawn = predicted(path)
    assert 0.8 * stated < drawn < stated


def test_answers_are_of_two_lengths_where_notes_say_so(tmp_path: Path) -> None:
    """Answers that end soon or run to a limit have the stated mean: most are shorter, the longest as long as that."""
    lines = [f"request_latency_{q}|0.8|s||1|arrivals=poisson; num_requests=400" for q in ("p50", "p99")]
    fixed = predicted(rows(tmp_path, *(f"{line}; lengths=fixed" for line in lines)))
    either = predicted(rows(tmp_path, *(f"{line}; input_lengths=fixed; output_lengths=20 or 420" for line in lines)))
    assert either[0] < 0.35 * fixed[0]
    assert either[1] > 3.5 * fixed[1]


def test_gaps_between_tokens_are_not_the_time_per_token_of_a_request(tmp_path: Path) -> None:
    """A row whose source gives the mean of all gaps is held against that: short answers behind prompts weigh less."""
    burst = "tpot|0.02|s||inf|num_requests=400; lengths=distribution_mean"
    request, gap = predicted(rows(tmp_path, burst, f"{burst}; source_metric=itl_mean"))
    assert gap < request


def test_times_of_the_server_have_nothing_of_the_client(tmp_path: Path) -> None:
    """A row whose notes say so in words is held against the server's first token, others against the client's."""
    line = "ttft|0.04|s||5|num_requests=200"
    server = f"{line}; server-side times (before HTTP)"
    client, within, measured = predicted(rows(tmp_path, line, server, f"{line}; client_seconds=0.02"))
    assert client - within == pytest.approx(6.5e-3 + 1000 * 3.6e-6)
    assert measured - within == pytest.approx(0.02)


def test_requests_that_come_at_once_wait_for_the_api_server_to_prepare_them_all(tmp_path: Path) -> None:
    """Notes say what an API server takes for a request: 100 at once wait for 100 of it, one at a time for its own."""
    once, apart = "ttft|1|s||inf|num_requests=100; lengths=fixed", "ttft|0.04|s||0.5|num_requests=100; lengths=fixed"
    rate = "request_throughput|5|1/s||inf|num_requests=100; lengths=fixed"
    each = "; api_server_seconds=0.01"
    path = rows(tmp_path, once, once + each, apart, apart + each, rate, rate + each)
    burst, waited, alone, prepared, served, held_up = predicted(path)
    together = 99 * 1.0e-3 + 31 * 1000 * 3.6e-6
    assert waited - burst == pytest.approx(100 * 0.01 - together)
    assert prepared - alone == pytest.approx(0.01)
    assert 100 / held_up - 100 / served == pytest.approx(100 * 0.01 - together)


@pytest.mark.parametrize(
    ("engine", "release", "rush"),
    [
        ("vllm", "0.15.0", 39 * 1.0e-3 + 31 * 3.6e-3),
        ("vllm", "0.33.0", 39 * 1.0e-3),
        ("trtllm", "1.2.0", 0.0),
        ("sglang", "0.5.9", 0.0),
    ],
)
def test_first_requests_of_users_wait_for_each_other_in_the_api_server(
    engine: str, release: str, rush: float, tmp_path: Path
) -> None:
    """Of 400 requests of 40 users a tenth come together: vLLM takes all, and read 32 prompts at a time until 2026-06.

    Half of the requests wait for nobody; the server's own times have nothing of it.
    """
    line = "|0.05|s|40||num_requests=400; lengths=fixed"
    server = f"{line}; server-side times (before HTTP)"
    path = rows(
        tmp_path, *(f"{name}{notes}" for name in ("ttft", "request_latency", "ttft_p50") for notes in (line, server))
    )
    path.write_text(path.read_text(encoding="utf-8").replace("vllm,0.15.0", f"{engine},{release}"), encoding="utf-8")
    first, at_server, whole, whole_at_server, half, half_at_server = predicted(path)
    client = 6.5e-3 + 1000 * 3.6e-6
    assert first - at_server - client == pytest.approx(rush / 10)
    assert whole - whole_at_server - client == pytest.approx(rush / 10)
    assert half - half_at_server == pytest.approx(client, abs=0.1 * rush + 1e-9)


def test_constant_arrivals_of_inference_perf_are_drawn(tmp_path: Path) -> None:
    """What inference-perf calls constant has exponential gaps: tails are those of Poisson, and the reason is said."""
    line = "request_latency_p99|1|s||20|lengths=fixed; num_requests=1000"
    kinds = (
        "arrivals=constant",
        "arrivals=constant; harness=inference-perf",
        "arrivals=constant (inference-perf default)",
        "arrivals=poisson",
    )
    path = rows(tmp_path, *(f"{line}; {kind}" for kind in kinds))
    even, harness, word, drawn = predicted(path)
    assert harness == word == drawn
    assert drawn > 1.02 * even
    assert path.with_name("rows.csv").read_text(encoding="utf-8").count("exponential gaps") == 2


def test_prompts_that_a_benchmark_repeats_are_computed_once(tmp_path: Path) -> None:
    """Of prompts in turn each is in the cache from its second time on: tails wait for the first, medians do not."""
    line = "harness=inference-perf; arrivals=constant; lengths=fixed; num_requests=2000"
    asked = [f"ttft_p{q}|0.04|s||5|{line}{more}" for more in ("", "; first_prompts=45") for q in (50, 99)]
    path = rows(tmp_path, *asked)
    head, *others = path.read_text(encoding="utf-8").splitlines()
    text = [f"{head},prefix_tokens", *(f"{row},100" for row in others)]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    half, most, half_later, most_first = predicted(path)
    assert half_later == pytest.approx(half, rel=0.05)
    assert most_first > 1.2 * most


def test_requests_beside_the_rows_are_asked_one_by_one(tmp_path: Path) -> None:
    """A row that names its run has the lengths and times of its requests; other runs and files do not count."""
    head = "source,run,arrival_seconds,input_tokens,output_tokens,request_seconds"
    text = f"{head}\nlab,a,100,200,1,0.1\nlab,a,110,6000,1,0.1\nlab,b,0,10,10,0.1\n"
    (tmp_path / "requests_of_runs.csv").write_text(text, encoding="utf-8")
    (tmp_path / "other_requests.csv").write_text("arrival,prompt\n1,2\n", encoding="utf-8")
    line = "lengths=distribution_mean; server-side times; per_request=lab"
    path = rows(tmp_path, *(f"ttft_p{q}|0.04|s||5|{line} a" for q in (50, 99)), f"ttft|0.04|s||5|{line} c")
    half, longest, drawn = predicted(path)
    assert longest > 1.8 * half
    assert drawn != pytest.approx(half, rel=0.01)
    closed = rows(tmp_path, f"ttft_p99|0.04|s|1||{line} a")
    assert predicted(closed) == [pytest.approx(longest, rel=1e-6)]


def test_a_client_that_may_not_send_more_is_a_closed_loop(tmp_path: Path) -> None:
    """Beyond what is served, latencies are those of the requests that the client may hold, whatever rate it wanted."""
    held = "achieved_rate=20; num_requests=400; client_concurrency=32"
    path = rows(
        tmp_path,
        *(f"request_latency|1|s||{rate}|{held}" for rate in (100, 200)),
        "request_latency|1|s|32||num_requests=400",
    )
    assert len({round(latency, 9) for latency in predicted(path)}) == 1
    kept = rows(tmp_path, f"request_latency|1|s||5|{held}", "request_latency|1|s||5|num_requests=400")
    assert len({round(latency, 9) for latency in predicted(kept)}) == 1


def test_what_a_run_does_not_say_is_refused(tmp_path: Path) -> None:
    """Neither a rate nor a number in flight, or a quantity that is not of a run under load: the reason is said."""
    path = rows(tmp_path, "ttft|0.04|s|||x=1", "peak_activation_bytes|1e9|bytes||5|x=1")
    tree = run("validate", str(path), "--json").tree
    assert tree["rows"]["predicted"] == 0
    said = json.dumps(tree["refused"])
    assert "neither a rate (request_rate) nor requests in flight (concurrency)" in said
    assert "not a quantity of a run under load" in said


def test_rows_say_every_format_of_weights_that_engines_are_said_to_read(tmp_path: Path) -> None:
    """MXFP8 weights, which vLLM and SGLang read, are a format of rows too: within a tenth of 8 bits in blocks."""
    path = rows(tmp_path, *["ttft|0.04|s|4||num_requests=40"] * 2)
    text = path.read_text(encoding="utf-8").replace("h100-sxm-80gb", "b200-sxm-180gb")
    first, second = text.replace("vllm,0.15.0", "sglang,0.5.15").splitlines()[1:]
    narrow = [HEAD, first.replace(",bf16,", ",mxfp8,"), second.replace(",bf16,", ",fp8_block,")]
    path.write_text("\n".join(narrow) + "\n", encoding="utf-8")
    one, other = predicted(path)
    assert one == pytest.approx(other, rel=0.1)


def test_rows_name_models_and_formats_as_questions_do(tmp_path: Path) -> None:
    """A model by any name that a question takes has its prediction, said; so have parts in formats of their own."""
    words = {"model": "qwen3.6-27b", "device": "b200-sxm-180gb", "engine": "vllm", "kv_dtype": ""}
    found = only(tmp_path, {**INFERENCE, **words, "weight_dtype": "nvfp4+attention=bf16"})
    assert found.status == "predicted", found.reason
    assert "model qwen3.5-27b: qwen3.6-27b is named after it" in found.assumed
    wrong = only(tmp_path, {**INFERENCE, "weight_dtype": "nvfp4+everything=bf16"})
    assert (wrong.status, wrong.refused) == ("refused", "everything")
