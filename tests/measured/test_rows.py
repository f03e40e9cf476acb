"""What validation says about rows: predictions, refusals, and what was assumed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measured_rows import INFERENCE, TRAINING, only, published, write
from shardwise.errors import InputError
from shardwise.measured import (
    KINDS,
    Comparison,
    Context,
    FileKind,
    Record,
    TrainingRows,
    examples,
    fits_of,
    rules,
    summary,
    validate,
)
from shardwise.measured._context import network_bytes_per_second, used_domain
from shardwise.measured._record import words
from shardwise.measured._run import kind_of
from shardwise.models import load_model
from shardwise.ops import train_flops

DEVICE = {
    "device": "x900-sxm-64gb", "full_name": "NVIDIA X900", "memory_bytes": "68719476736",
    "hbm_bandwidth_bytes_per_second": "2e12", "peak_flops_bf16": "5e14", "devices_per_node": "8",
    "intra_node_bandwidth_bytes_per_second": "3e11", "inter_node_bandwidth_bytes_per_second": "2.5e10",
}  # fmt: skip


@pytest.mark.parametrize("row", [TRAINING, INFERENCE], ids=["training", "inference"])
def test_a_complete_row_is_predicted_with_an_interval(tmp_path: Path, row: dict[str, str]) -> None:
    """A row that states everything has a prediction, and an interval around it."""
    found = only(tmp_path, row)
    assert found.status == "predicted", found.reason
    assert found.low <= found.predicted <= found.high
    assert found.relative_error == pytest.approx(found.predicted / found.measured - 1)


@pytest.mark.parametrize(("notes", "passes"), [("", 1), ("mtp_passes=2", 2), ("mtp_passes=0", 0)])
def test_notes_say_how_many_further_tokens_a_run_predicts(notes: str, passes: int) -> None:
    """What a file of the model says counts where the notes say nothing; a run may leave the layers out."""
    record = Record({"model": "deepseek-v3", "notes": notes})
    assert len(Context(Path()).model_of(record).mtp) == passes


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_file_is_recognised_by_its_columns(kind: FileKind) -> None:
    """The columns of a kind tell that kind, whatever else the file has."""
    assert kind_of({*kind.columns, "anything"}, KINDS) == kind


def test_a_file_of_something_else_is_refused_with_the_columns_that_it_lacks() -> None:
    """Columns of no kind name what the nearest kind has beside them."""
    with pytest.raises(InputError, match=r"files also have "):
        kind_of({"device", "colour"}, KINDS)


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    """Columns alone are no measurements: the error says so, and is not taken for a file without faults."""
    path = tmp_path / "runs.csv"
    path.write_text(",".join(TRAINING) + "\n", encoding="ascii")
    with pytest.raises(InputError, match="no row below them"):
        validate([str(path)])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"num_gpus": ""}, "num_gpus"),
        ({"num_gpus": "eight"}, "num_gpus"),
        ({"value": "fast"}, "value"),
        ({"value": "nan"}, "value"),
        ({"value": "-1"}, "value"),
        ({"model": "no-such-model"}, "model"),
        ({"model": ""}, "model"),
        ({"device": "no-such-device"}, "device"),
        ({"sharding": "sideways"}, "sharding"),
        ({"recompute": "sometimes"}, "recompute"),
        ({"compute_dtype": "fp2"}, "compute_dtype"),
        ({"metric": "happiness"}, "metric"),
        ({"finetune": "by hand"}, "finetune"),
        ({"offload": "half of it"}, "offload"),
        ({"tp": "7"}, "tp"),
        ({"global_batch": "63"}, "global_batch"),
        ({"seq_len": "1e400"}, "seq_len"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(tmp_path: Path, changed: dict[str, str], reason: str) -> None:
    """A refused row names the field, and the rows beside it are predicted."""
    rows = validate([write(tmp_path, [{**TRAINING, **changed}, TRAINING])]).rows
    assert rows[0].status == "refused"
    assert reason in rows[0].reason
    assert rows[1].status == "predicted"


@pytest.mark.parametrize("mode", ["online", "disaggregated", "by carrier pigeon"])
def test_serving_modes_of_their_own_are_refused(tmp_path: Path, mode: str) -> None:
    """Open and closed loops queue, so their rows are refused with that reason."""
    found = only(tmp_path, {**INFERENCE, "serving_mode": mode})
    assert (found.status, "serving_mode" in found.reason) == ("refused", True)


def test_a_number_of_thousands_of_digits_is_refused(tmp_path: Path) -> None:
    """A count that no machine has is refused by its cell, and is no fault of the program."""
    found = only(tmp_path, {**TRAINING, "num_gpus": "9" * 5000})
    assert found.status == "refused" and "num_gpus" in found.reason


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted({*TRAINING, *INFERENCE})),
        st.one_of(st.text(max_size=12), st.sampled_from(["0", "-1", "1e30", "nan", "", "8"])),
        max_size=6,
    ),
    st.sampled_from([TRAINING, INFERENCE]),
)
def test_no_row_raises(tmp_path_factory: pytest.TempPathFactory, changed: dict[str, str], base: dict[str, str]) -> None:
    """Whatever stands in a row, it is predicted or refused with a reason, and never lost."""
    row = {**base, **{key: value for key, value in changed.items() if key in base}}
    folder = tmp_path_factory.mktemp("rows")
    (found,) = validate([write(folder, [row])]).rows
    assert found.status == "predicted" or found.reason
    assert "fault in the prediction" not in found.reason


@pytest.mark.parametrize(
    ("blank", "field"),
    [("micro_batch", "micro_batch"), ("recompute", "recompute"), ("sharding", "sharding"), ("tp", "degrees"),
     ("compute_dtype", "compute_dtype"), ("global_batch", "global_batch")],
)  # fmt: skip
def test_a_blank_field_follows_its_published_rule(tmp_path: Path, blank: str, field: str) -> None:
    """What a source leaves blank is assumed by the rule of that field, and said."""
    found = only(tmp_path, {**TRAINING, blank: ""})
    (rule,) = (one for one in rules() if one.field == field)
    assert found.status == "predicted", found.reason
    assert f"{field}: {rule.says}" in found.assumed


@pytest.mark.parametrize("name", ["", "my own trainer"])
def test_a_framework_that_is_not_known_is_taken_and_said(tmp_path: Path, name: str) -> None:
    """Where no entry names the framework, the one that the sharding comes from is taken, among the assumptions."""
    taken, known = (only(tmp_path, {**TRAINING, "framework": one}) for one in (name, "torchtitan"))
    (rule,) = (one for one in rules() if one.field == "framework")
    assert taken.predicted == known.predicted
    assert f"framework: {rule.says}" in taken.assumed
    assert not any(one.startswith("framework:") for one in known.assumed)


@pytest.mark.parametrize(
    ("name", "stack"), [("hf-accelerate", "accelerate"), ("MCore", "megatron"), ("ddp", "pytorch")]
)
def test_a_framework_may_be_called_as_a_stack_is(tmp_path: Path, name: str, stack: str) -> None:
    """Another word for a stack names it, where no entry of frameworks does; nothing is assumed then."""
    row = {**TRAINING, "sharding": "none"}
    called, stated = (only(tmp_path, one) for one in ({**row, "framework": name}, {**row, "stack": stack}))
    assert called.case is not None and called.case.stack.name == stack
    assert called.predicted == stated.predicted
    assert not any(one.startswith("framework:") for one in called.assumed)


@pytest.mark.parametrize(
    ("name", "stack"),
    [
        ("FSDP", "fsdp2"),
        ("FSDP2 (PyTorch 2.9)", "fsdp2"),
        ("FSDP1 (PyTorch 2.3)", "fsdp2-2024"),
        ("PyTorch FSDP, 2024-08", "fsdp2-2024"),
        ("HF transformers 5.16 + FSDP2", "transformers"),
        ("HF accelerate 1.15 FSDP", "accelerate"),
        ("HF accelerate 0.31 + FSDP", "fsdp-2024"),
        ("PyTorch FSDP1 around transformers 4.33", "fsdp-2024"),
    ],
)
def test_what_fsdp_shards_is_of_who_wrote_it(tmp_path: Path, name: str, stack: str) -> None:
    """FSDP around transformers is no torchtitan, and before PyTorch 2.8 norms were steps."""
    called = only(tmp_path, {**TRAINING, "framework": name, "sharding": "fsdp"}).case
    assert called is not None and (called.stack.name, called.plan.sharding) == (stack, "fsdp")


@pytest.mark.parametrize(
    ("release", "holds"),
    [
        ("4.39.3 / bitsandbytes 0.43.1", "llama mistral mixtral qwen2"),
        ("4.41.2", "mistral mixtral qwen2"),
        ("4.44.2 / bitsandbytes 0.43.3", "mixtral qwen2"),
        ("4.46.1", "mixtral"),
        ("4.48.1", ""),
    ],
)
def test_a_release_of_transformers_says_which_layers_hold_positions(tmp_path: Path, release: str, holds: str) -> None:
    """Cosines and sines of each layer left one family after another; bitsandbytes kept inputs until 0.43.2."""
    row = {**TRAINING, "framework": f"HF TRL 0.11 / transformers {release}", "sharding": "none"}
    stack = only(tmp_path, row).case.stack
    families = ("llama", "mistral", "mixtral", "qwen2")
    assert [one for one in families if re.fullmatch(stack.rotary_families, one)] == holds.split()
    assert stack.keeps_narrow_inputs == ("0.43.1" in release)


def test_a_row_may_keep_what_fsdp_gathered(tmp_path: Path) -> None:
    """SHARD_GRAD_OP, reshard_after_forward False, is a sharding of its own: weights stay whole until backward."""
    row = {**TRAINING, "framework": "FSDP", "num_gpus": "8", "dp": "8", "metric": "peak_memory", "value": "4e10"}
    kept, freed = (only(tmp_path, {**row, "sharding": word}) for word in ("shard_grad_op", "fsdp"))
    assert kept.case is not None and kept.case.plan.sharding == "shard-grad-op"
    assert kept.predicted > freed.predicted


@pytest.mark.parametrize("name", ["", "my own trainer", "NeuronX Distributed 2.24", "optimum-neuron"])
def test_devices_of_a_vendor_run_what_has_kernels_for_them(tmp_path: Path, name: str) -> None:
    """Trainium trains with what XLA compiles, under whatever name, as the commands take it."""
    row = {**TRAINING, "device": "trainium1-core", "num_gpus": "64", "gpus_per_node": "32", "tp": "32",
           "dp": "2", "sharding": "zero1", "framework": name}  # fmt: skip
    called, stated = only(tmp_path, row), only(tmp_path, {**row, "framework": "", "stack": "xla"})
    assert called.case is not None and called.case.stack.name == "xla"
    assert called.case.plan.sequence_parallel == ("neuron" in name.lower())
    assert (called.predicted == stated.predicted) == ("neuron" not in name.lower())


@pytest.mark.parametrize("replicas", ["16", ""])
def test_a_shard_size_counts_whether_replicas_are_stated_or_not(tmp_path: Path, replicas: str) -> None:
    """Shards within a node are copied over nodes, also where the number of replicas follows from the other degrees."""
    row = {**TRAINING, "num_gpus": "16", "dp": replicas, "notes": "shard_size=8"}
    plan = only(tmp_path, row).case.plan
    assert (plan.sharding, plan.shard, plan.dp) == ("hsdp", 8, 16)


STAGES = {"num_gpus": "8", "pp": "2", "dp": "4", "sharding": "zero1", "framework": "Megatron-LM"}


@pytest.mark.parametrize(
    ("stated", "same"),
    [
        ({**STAGES, "micro_batch": "8", "global_batch": "32"}, {**STAGES, "micro_batch": "4", "global_batch": "32"}),
        ({**STAGES, "micro_batch": "1", "global_batch": ""}, {**STAGES, "micro_batch": "1", "global_batch": "8"}),
    ],
    ids=["the batch of a replica", "no global batch"],
)
def test_a_batch_that_is_not_stated_is_cut_into_as_many_micro_batches_as_stages(
    tmp_path: Path, stated: dict[str, str], same: dict[str, str]
) -> None:
    """A micro-batch that is the whole batch of a replica is cut; without a batch each stage has one micro-batch."""
    rows = validate([write(tmp_path, [{**TRAINING, **stated}, {**TRAINING, **same}])]).rows
    assert rows[0].predicted == rows[1].predicted and rows[0].predicted is not None


def test_coverage_is_the_share_of_rows_that_are_predicted(tmp_path: Path) -> None:
    """One refused row beside three others is a quarter less."""
    assert validate([write(tmp_path, [TRAINING, TRAINING, {**TRAINING, "tp": "7"}, TRAINING])]).coverage == 0.75


def test_a_batch_beyond_the_cache_runs_in_waves_but_does_not_fit(tmp_path: Path) -> None:
    """Its seconds are those of the requests that there is room for; whether the batch fits is asked of all at once."""
    many = {**INFERENCE, "batch": "2000", "input_tokens": "128", "output_tokens": "512"}
    fits, waits = validate([write(tmp_path, [{**many, "metric": "fits", "value": "0"}, many])]).rows
    assert fits.predicted == 0 and not fits.fits and waits.fits
    (said,) = (
        re.search(r"up to (\d+) sequences at once", text) for text in waits.assumed if "sequences at once" in text
    )
    assert said is not None and int(said[1]) == 1024  # the engine's own limit


def _offline(tmp_path: Path, **cells: str) -> Comparison:
    row = {**INFERENCE, "serving_mode": "offline_throughput", "metric": "output_tokens_per_second", "batch": ""}
    return only(tmp_path, {**row, "input_tokens": "128", "output_tokens": "512", **cells})


def test_a_queue_with_an_end_is_slower_than_one_without(tmp_path: Path) -> None:
    """The last requests of a run leave room that nobody takes: the more waves there are the less that costs."""
    endless = _offline(tmp_path).predicted
    assert endless is not None
    runs = [_offline(tmp_path, notes=f"num_requests={count}").predicted or 0.0 for count in (30, 1100, 20_000)]
    assert runs[0] < 0.5 * endless and runs[1] < 0.9 * endless
    assert 0.9 * endless < runs[2] < 1.02 * endless


def test_a_stated_batch_is_that_of_all_replicas(tmp_path: Path) -> None:
    """Replicas that hold 64 requests together hold 16 each, whether they wait in a queue or not."""
    row = _offline(tmp_path, batch="64", dp="4", num_gpus="4")
    assert any("16 requests at once on each replica" in text for text in row.assumed)


def test_unknown_recompute_takes_the_least_that_fits(tmp_path: Path) -> None:
    """Recompute that is not stated is none where that fits, and more where it does not."""
    small = only(tmp_path, {**TRAINING, "recompute": "unknown"})
    none = only(tmp_path, TRAINING)
    assert small.predicted == none.predicted
    tight = {**TRAINING, "micro_batch": "2", "seq_len": "8192", "metric": "fits", "value": "1"}
    assert only(tmp_path, {**tight, "recompute": "none"}).predicted == 0
    assert only(tmp_path, {**tight, "recompute": "unknown", "metric": "step_time", "value": "9"}).fits


def test_a_verdict_takes_no_recompute_that_nobody_states(tmp_path: Path) -> None:
    """Whether a plan fits is not asked of the recompute with which it would."""
    tight = {**TRAINING, "micro_batch": "2", "seq_len": "8192", "metric": "fits", "value": "0", "recompute": "unknown"}
    found = only(tmp_path, tight)
    assert found.predicted == 0
    assert any(one.startswith("verdict: recompute not stated") for one in found.assumed)


BRIDGE = {**TRAINING, "framework": "Megatron-Bridge 26.02", "sharding": "dist_opt", "recompute": "unknown"}


def test_maxtext_runs_a_batch_at_once_unless_told(tmp_path: Path) -> None:
    """A step without a stated micro-batch has one, though it does not fit: what is too much then goes to the host."""
    row = {**TRAINING, "framework": "MaxText", "device": "tpu-v5p", "gpus_per_node": "", "recompute": "unknown"}
    blank = only(tmp_path, {**row, "micro_batch": ""})
    assert blank.predicted == only(tmp_path, {**row, "micro_batch": "8"}).predicted
    assert any(one.startswith("micro_batch: the batch of a replica") for one in blank.assumed)
    large = only(tmp_path, {**row, "micro_batch": "", "global_batch": "1024"})
    assert any("goes to the host" in one for one in large.assumed)
    other = only(tmp_path, {**row, "micro_batch": "", "framework": "torchtitan"})
    assert not any("the batch of a replica" in one for one in other.assumed)


MIXTURE = {**BRIDGE, "model": "qwen3-30b-a3b", "ep": "8", "device": "h100-sxm-80gb"}


def test_recipes_of_mixtures_run_single_modules_again(tmp_path: Path) -> None:
    """Where a mixture of NVIDIA's recipes does not fit, modules run again before whole layers do."""
    row = {**MIXTURE, "device": "h200-sxm-141gb", "micro_batch": "4"}
    none, least, full = (only(tmp_path, {**row, "recompute": said}).predicted for said in ("none", "unknown", "full"))
    assert none < least < 0.5 * (none + full)


def test_recipes_near_their_host_offload_what_does_not_fit(tmp_path: Path) -> None:
    """On GB200 NVIDIA's recipes send activations to the host where other stacks run layers again; the row says so."""
    big = {**BRIDGE, "model": "llama-3-70b", "device": "gb200", "num_gpus": "64", "gpus_per_node": "4", "dp": "64",
           "sharding": "fsdp", "seq_len": "8192", "micro_batch": "2", "global_batch": "256"}  # fmt: skip
    recipe, other = (only(tmp_path, {**big, "framework": name}) for name in ("Megatron-Bridge 26.02", "Megatron-Core"))
    assert any("go to the host" in one for one in recipe.assumed)
    assert not any("go to the host" in one for one in other.assumed)
    assert recipe.predicted < other.predicted


@pytest.mark.parametrize(
    ("framework", "library"),
    [("torchtitan (2024-12)", ""), ("torchtitan (2025-03)", ""), ("torchtitan 2025-06", "cuda-12.8"),
     ("torchtitan 2026-06", "cuda-12.8"), ("HF transformers + FSDP (accelerate, torch 2.6, 2025-04)", ""),
     ("HF transformers + FSDP (accelerate, torch 2.7, 2025-06)", "cuda-12.8"), ("Megatron-Core r0.9.0", ""),
     ("Megatron-LM (2024)", ""), ("Megatron-LM (2025-02)", "cuda-12.8")],
)  # fmt: skip
def test_a_release_says_whose_kernels_multiply(tmp_path: Path, framework: str, library: str) -> None:
    """Products on Hopper are those of the CUDA that a release or its day had: others since cuBLAS 12.6 Update 2."""
    found = only(tmp_path, {**TRAINING, "device": "h100-sxm-80gb", "framework": framework})
    assert found.case is not None and found.case.stack.library == library


@pytest.mark.parametrize(
    ("framework", "kernel"), [("NeMo 23.04", "flash-1"), ("NeMo 23.09", "flash-2"), ("NeMo 24.04", "")]
)
def test_nemo_of_2023_attends_with_flash_attention(tmp_path: Path, framework: str, kernel: str) -> None:
    """Transformer Engine took flash-attn before cuDNN until the end of 2023, of which release 2 came in July."""
    found = only(tmp_path, {**TRAINING, "device": "h100-sxm-80gb", "framework": framework})
    assert found.case is not None and found.case.stack.attention_kernel == kernel


def test_notes_name_the_dispatch_of_tokens(tmp_path: Path) -> None:
    """DeepEP sends a token once to each node, paired micro-batches hide that: each makes a step over nodes shorter."""
    plain = {**MIXTURE, "framework": "Megatron-Core", "num_gpus": "32", "ep": "32", "dp": "32", "recompute": "none",
             "global_batch": "128"}  # fmt: skip
    notes = ("", "dispatcher DeepEP", "dispatcher DeepEP; +1f1b overlap")
    seconds = [published(tmp_path, {**plain, "notes": said}).predicted for said in notes]
    assert seconds[0] > seconds[1] > seconds[2]


@pytest.mark.parametrize(("dtype", "device"), [("nvfp4", "gb200"), ("nvfp4", "h100-sxm-80gb"), ("mxfp8", "gb200")])
def test_narrow_products_run_in_their_own_type_where_the_device_has_it(tmp_path: Path, dtype: str, device: str) -> None:
    """Steps in NVFP4 are faster than in 8 bits on devices with 4-bit products, on others but for copies in blocks."""
    row = {**BRIDGE, "device": device, "recompute": "none", "sharding": "dist_opt"}
    narrow, eight = (only(tmp_path, {**row, "compute_dtype": one}).predicted for one in (dtype, "fp8"))
    alike = narrow == pytest.approx(eight, rel=0.01)
    assert alike if (dtype, device) != ("nvfp4", "gb200") else narrow < eight and not alike


def test_models_and_devices_stand_beside_the_file(tmp_path: Path) -> None:
    """A model and a device that nobody knows come from models*.json and devices*.csv beside the file."""
    config = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16,
              "num_key_value_heads": 4, "intermediate_size": 5632, "vocab_size": 32000, "hidden_act": "silu",
              "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}  # fmt: skip
    seeing = {**config, "architectures": ["LlavaForConditionalGeneration"]}
    models = {"ours-1b": {"config": config}, "seeing-1b": {"config": seeing}}
    (tmp_path / "models_mine.json").write_text(json.dumps(models), encoding="utf-8")
    write(tmp_path, [DEVICE], "devices_mine.csv")
    found = only(tmp_path, {**TRAINING, "model": "ours-1b", "device": "x900-sxm-64gb"})
    assert found.status == "predicted", found.reason
    assert any("x900-sxm-64gb" in one for one in found.assumed)
    # Of a model that has other parts the language model ran, which is said.
    seen = only(tmp_path, {**TRAINING, "model": "seeing-1b", "device": "x900-sxm-64gb"})
    assert seen.predicted == found.predicted
    assert set(seen.assumed) - set(found.assumed) == {"only the language model is counted, without vision_config"}


def test_a_device_of_a_file_has_its_own_figures_and_those_of_its_relative(tmp_path: Path) -> None:
    """Datasheet figures come from the row, cores and year from the nearest device of the catalogue."""
    write(tmp_path, [DEVICE, {**DEVICE, "device": "y-variant", "stand_in": "h100-sxm-80gb"}], "devices.csv")
    places = Context(tmp_path)
    device, notes = places.device("x900-sxm-64gb")
    assert (device.memory_bytes, device.peak_flops("bf16"), device.slow_bytes_per_second) == (68719476736, 5e14, 2.5e10)
    assert device.knows("num_cores") and device.knows("year") and notes
    variant, _ = places.device("y-variant")
    assert (variant.name, variant.memory_bytes) == ("h100-sxm-80gb", 68719476736)


@pytest.mark.parametrize(
    ("word", "node", "rate"),
    [("ib_hdr_8x200gbps", 8, 25e9), ("rdma_400gbps_per_gpu", 8, 50e9), ("roce_1600gbps_per_node", 8, 25e9),
     ("ib_edr_100gbps", 4, 3.125e9), ("omnipath", 8, 2.48125e9), ("carrier_pigeon", 8, 0.0)],
)  # fmt: skip
def test_names_of_networks_give_rates(word: str, node: int, rate: float) -> None:
    """A network's name states adapters and gigabits a second, shared by the devices of a node."""
    assert network_bytes_per_second(word, node) == pytest.approx(rate)


@pytest.mark.parametrize(("count", "domain"), [(8, 72), (72, 72), (144, 72), (256, 64), (128, 64), (96, 48)])
def test_jobs_take_equal_segments_of_a_domain(count: int, domain: int) -> None:
    """A job that spans racks takes as many devices in each."""
    assert used_domain(72, 4, count) == domain


def test_runs_out_of_memory_are_told_from_runs_that_fit() -> None:
    """Rows of runs that failed and configurations that ran count the wrong verdicts of each."""
    ran = [
        Comparison(case_id=str(i), metric="step_time", status="predicted", measured=1.0, predicted=1.0, fits=i > 0)
        for i in range(4)
    ]
    failed = [Comparison(case_id="x", metric="fits", status="predicted", measured=0.0, predicted=1.0, fits=True)]
    found = fits_of([*ran, *failed])
    assert (found.ran, found.ran_called_unfit, found.failed, found.failed_called_fit) == (4, 1, 1, 1)
    assert (found.false_alarms, found.misses) == (0.25, 1.0)


def test_errors_are_signed_and_absolute() -> None:
    """The bias is the median of signed errors, the others are of absolute ones; rows without an error count nowhere."""
    found = [(0.5, 0.4, 0.9), (1.1, 1.0, 1.2), (1.2, 0.9, 1.3), (None, None, None)]
    rows = [
        Comparison(case_id=str(p), metric="m", status="predicted", measured=1.0, predicted=p, low=low, high=high)
        for p, low, high in found
    ]
    (errors,) = summary([*rows, replace(rows[0], metric="fits")], ("metric",))
    assert (errors.group, errors.count, errors.bias) == (("m",), 3, pytest.approx(0.1))
    assert (errors.median_abs_error, errors.largest_abs_error) == (pytest.approx(0.2), pytest.approx(0.5))
    assert (errors.p90_abs_error, errors.mean_abs_error) == (pytest.approx(0.44), pytest.approx(0.8 / 3))
    assert errors.inside == pytest.approx(2 / 3)


def test_a_prediction_says_what_it_is_of(tmp_path: Path) -> None:
    """A row keeps its source, machine and kind of model beside the prediction, with what stands for a blank cell."""
    rows = [{**TRAINING, "source": "lab"}, {**TRAINING, "model": "mixtral-8x7b", "case_id": ""}, INFERENCE]
    files = [write(tmp_path, rows[:2]), write(tmp_path, rows[2:], "more.csv")]
    first, second, third = validate(files).rows
    assert (first.case_id, first.kind, first.source, first.family) == ("mine-1", "training", "lab", "dense")
    assert (first.year, first.engine, first.num_devices, first.model) == (2022, "torchtitan", 8, "llama-3.1-8b")
    assert (second.case_id, second.family, second.device) == ("line 3", "experts", "h100-sxm-80gb")
    assert (third.source, third.engine, third.kind, third.num_devices) == ("vllm", "vllm", "inference", 1)
    refused = only(tmp_path, {**TRAINING, "model": "no-such-model"})
    assert (refused.year, refused.family, refused.refused) == (0, "", "no-such-model")


def test_metrics_of_a_run_of_training_are_figures_of_one_report(tmp_path: Path) -> None:
    """Tokens, FLOPs, utilisation, hours and steps of a row are those of its one report, in the units of files."""
    row = {**TRAINING, "value": "0.4", "notes": "tokens=1e9", "unit": "", "global_batch": "64"}
    names = ("step_time", "micro_step_time", "tokens_per_second_per_gpu", "flops_per_second_per_gpu", "mfu", "hfu",
             "gpu_hours")  # fmt: skip
    whole, causal, masked, hardware, own = (
        {r.metric: r.predicted for r in validate([write(tmp_path, [
            {**row, "metric": name, "flops_convention": said} for name in names
        ])]).rows}
        for said in ("model_full_attn", "model_causal_attn", "model_masked_attn", "hardware_full_attn",
                     "27.5e9 a token")
    )  # fmt: skip
    assert whole["tokens_per_second_per_gpu"] * whole["step_time"] * 8 == pytest.approx(64 * 4096)
    assert whole["micro_step_time"] == pytest.approx(whole["step_time"] / 8)
    assert whole["gpu_hours"] * 3600 * whole["tokens_per_second_per_gpu"] == pytest.approx(1e9)
    for found in (whole, causal, hardware):
        assert found["mfu"] == found["hfu"] == pytest.approx(found["flops_per_second_per_gpu"] / 989.4e12, rel=1e-3)
    model = load_model("llama-3.1-8b")
    rate = whole["tokens_per_second_per_gpu"]
    assert whole["flops_per_second_per_gpu"] == pytest.approx(rate * train_flops(model, 4096))
    assert causal["flops_per_second_per_gpu"] == pytest.approx(rate * train_flops(model, 4096, "model-causal"))
    assert causal["mfu"] < whole["mfu"] == hardware["mfu"]  # nothing runs again
    assert masked["flops_per_second_per_gpu"] == pytest.approx(rate * train_flops(model, 4096, "model-masked"))
    assert own["flops_per_second_per_gpu"] == pytest.approx(rate * 27.5e9)


def test_the_median_over_micro_batches_is_of_one_that_no_update_follows(tmp_path: Path) -> None:
    """Of two micro-batches, or on the mean, the update is shared by all."""
    row = {**TRAINING, "metric": "micro_step_time", "value": "1", "num_gpus": "8", "micro_batch": "1"}
    median = {"notes": "median over micro-batches, of which each fourth updates"}
    for batches, apart in ((4, True), (2, False)):
        one = {**row, "dp": "8", "global_batch": f"{8 * batches}"}
        mean, found = only(tmp_path, one).predicted, only(tmp_path, {**one, **median}).predicted
        assert (found < 0.999 * mean) == apart and found <= mean


def test_kinds_of_memory_lie_within_each_other(tmp_path: Path) -> None:
    """Tensors, what the allocator reserves and what the device shows; ends of a pipeline; and what stays of a step."""
    row = {**TRAINING, "metric": "peak_memory", "value": "5e10", "num_gpus": "16", "dp": "8", "pp": "2"}
    kinds = [{"memory_kind": one} for one in ("allocated", "active", "reserved", "nvidia_smi", "")]
    scopes = [{"memory_kind": "allocated", "rank_scope": one} for one in ("rank0", "last_rank", "max", "")]
    floor = {"notes": "device floor with the engine asleep 30000000000", "memory_kind": "nvidia_smi"}
    after = {"metric": "memory_after_step", "memory_kind": "allocated"}
    rows = validate([write(tmp_path, [{**row, **one} for one in (*kinds, *scopes, floor, after)])]).rows
    allocated, active, reserved, device, unsaid, first, last, most, heaviest, floored, kept = (
        r.predicted for r in rows
    )
    assert kept < allocated == active < reserved < device == unsaid
    assert first != last and max(first, last) == most == heaviest == allocated
    assert floored == pytest.approx(30e9 + reserved)


def test_metrics_of_a_run_of_serving_are_figures_of_one_report(tmp_path: Path) -> None:
    """Rates, times and bytes of a row are those of its one report: of a request, a batch, a device or all of them."""
    row = {**INFERENCE, "num_gpus": "2", "tp": "2", "unit": ""}
    names = ("batch_latency", "ttft", "ttft_p50", "tpot", "tpot_p50", "output_tokens_per_second", "fits",
             "output_tokens_per_second_per_gpu", "total_tokens_per_second", "decode_tokens_per_second",
             "prefill_tokens_per_second", "weights_bytes_per_gpu", "kv_cache_bytes_per_gpu", "kv_cache_tokens",
             "peak_memory_bytes", "non_torch_bytes", "peak_activation_bytes")  # fmt: skip
    value = {"fits": "1"}
    rows = validate([write(tmp_path, [{**row, "metric": name, "value": value.get(name, "9")} for name in names])]).rows
    found = {one.metric: one.predicted or 0.0 for one in rows}
    assert all(one.status == "predicted" for one in rows) and found["fits"] == 1
    assert found["ttft"] == found["ttft_p50"] and found["tpot"] == found["tpot_p50"]
    assert found["batch_latency"] == pytest.approx(found["ttft"] + 127 * found["tpot"])
    rate = found["output_tokens_per_second"]
    assert rate == pytest.approx(8 * 128 / found["batch_latency"])
    assert found["output_tokens_per_second_per_gpu"] == pytest.approx(rate / 2)
    assert found["total_tokens_per_second"] == pytest.approx(rate * 640 / 128)
    assert found["decode_tokens_per_second"] == pytest.approx(1 / found["tpot"])
    assert found["prefill_tokens_per_second"] == pytest.approx(8 * 512 / found["ttft"], rel=0.05)
    # 16 bits, half on each device, and all of the tables of rotation.
    assert found["weights_bytes_per_gpu"] == pytest.approx(8030261248 + 131072 * 128 * 2, rel=1e-3)
    assert found["kv_cache_tokens"] == pytest.approx(found["kv_cache_bytes_per_gpu"] / (32 * 4 * 128 * 2 * 2), rel=1e-3)
    assert found["peak_memory_bytes"] > found["weights_bytes_per_gpu"] + found["non_torch_bytes"]
    offline = {**row, "serving_mode": "offline_throughput", "batch": "64", "pp": "2", "num_gpus": "4"}
    one, two = validate([write(tmp_path, [
        {**offline, "metric": name} for name in ("output_tokens_per_second", "output_tokens_per_second_per_gpu")
    ])]).rows  # fmt: skip
    assert two.predicted == pytest.approx(one.predicted / 4)
    for one, name in ((rows[5], "tpot"), (rows[9], "tpot")):
        assert one.low < one.predicted < one.high, name


@pytest.mark.parametrize(("word", "rule"), [("", "is not stated"), ("0.5", "is 0"), ("2", "is 0"), ("yes", "finite")])
def test_a_verdict_is_zero_or_one(tmp_path: Path, word: str, rule: str) -> None:
    """A measured verdict that is blank or another number is refused, not taken for out of memory."""
    path = tmp_path / "runs.csv"
    path.write_text(f"metric,value,model,device,seq_len\nfits,{word},gpt2,h100-sxm-80gb,1024\n", encoding="utf-8")
    row = validate([path]).rows[0]
    assert row.status == "refused"
    assert row.reason.startswith("value: ") and rule in row.reason


def test_zero_is_not_called_unstated() -> None:
    """A zero where a number must be above 0 is told from a blank, and an unknown one is blank."""
    for word, rule in (("0", "must be above 0"), ("", "is not stated"), ("unknown", "is not stated")):
        with pytest.raises(InputError) as found:
            Record({"seq_len": word}).positive("seq_len")
        assert found.value.problems[0].rule == rule


@pytest.mark.parametrize(("unit", "kept"), [("", True), ("seconds", True), ("s", True), ("ms", False), ("GB", False)])
def test_a_value_in_another_unit_is_refused(tmp_path: Path, unit: str, kept: bool) -> None:
    """Milliseconds or gigabytes read as seconds or bytes would be an error of a thousand times, so they are not."""
    found = only(tmp_path, {**TRAINING, "unit": unit})
    assert (found.status == "predicted") is kept
    assert kept or found.reason.startswith("unit: is not a unit of values")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ("colour,size\nred,1\n", "its columns are colour, size"),
        ("metric;value;model;device;seq_len\nstep_time;1;gpt2;h100;1024\n", "separates its cells by ';'"),
        ("metric,value,model,device\nstep_time,1,gpt2,h100\n", "training files also have seq_len"),
        ("metric,value,model,device,seq_len,metric\nstep_time,1,gpt2,h100,1024,mfu\n", "the column metric twice"),
    ],
)
def test_a_header_that_cannot_be_read_says_why(tmp_path: Path, text: str, says: str) -> None:
    """A file that is empty, of other columns, separated otherwise or ambiguous is refused by what is wrong with it."""
    path = tmp_path / "runs.csv"
    path.write_text(text, encoding="ascii")
    with pytest.raises(InputError, match=re.escape(says)):
        validate([str(path)])


def test_names_of_columns_may_have_capitals_and_spaces(tmp_path: Path) -> None:
    """A header as spreadsheets write it is read as the schema's."""
    spoken = only(tmp_path, {f" {name.capitalize()} ": value for name, value in TRAINING.items()})
    assert spoken.predicted == only(tmp_path, TRAINING).predicted


def test_columns_that_are_not_read_are_said(tmp_path: Path) -> None:
    """A column that the schema does not have stands in the answer, with the one that may be meant."""
    found = validate([write(tmp_path, [{**TRAINING, "micro_batches": "2", "weather": "fine"}])])
    assert [(column, meant) for _, column, meant in found.unread] == [("micro_batches", "micro_batch"), ("weather", "")]
    assert not validate([write(tmp_path, [TRAINING], "whole.csv")]).unread


def test_a_row_with_cells_beyond_the_header_is_refused(tmp_path: Path) -> None:
    """A comma inside a cell moves all that follows, so the row is refused; one that ends a line does no harm."""
    path = tmp_path / "runs.csv"
    head, row = ",".join(TRAINING), ",".join(TRAINING.values())
    path.write_text(f"{head}\n{row},more\n{row},\n", encoding="ascii")
    moved, whole = validate([str(path)]).rows
    assert "more cells than the header" in moved.reason
    assert whole.status == "predicted"


@pytest.mark.parametrize(("metric", "value", "status"), [("mfu", "0.45", "predicted"), ("hfu", "45", "refused")])
def test_utilisation_is_a_fraction(tmp_path: Path, metric: str, value: str, status: str) -> None:
    """A percentage of the peak is refused: as a fraction it would be a hundred times off."""
    assert only(tmp_path, {**TRAINING, "metric": metric, "value": value, "unit": ""}).status == status


def test_a_checkpoint_is_no_run() -> None:
    """The size of a checkpoint says nothing of whether a run fits on devices."""
    row = Comparison(
        case_id="a", metric="checkpoint_bytes", status="predicted", measured=1.0, predicted=1.0, fits=False
    )
    assert fits_of([row]).ran == 0


def test_a_refused_row_says_which_cell_it_is_about(tmp_path: Path) -> None:
    """The first row of each reason is named with the cell that it is refused for."""
    found = validate([write(tmp_path, [{**TRAINING, "case_id": "", "model": "no-such-model"}])])
    assert list(examples(found.rows).values()) == ["line 2: no-such-model"]


@pytest.mark.parametrize(
    ("key", "figures", "relative"),
    [
        ("my-h100", {}, "h100-"),
        ("lab-card", {"memory_bytes": "85899345920", "peak_flops_bf16": "9e14"}, "h100-"),
        ("lab-card", {"memory_bytes": "137438953472", "peak_flops_bf16": "9e14"}, "intel-max-"),
    ],
)
def test_a_device_of_ones_own_has_a_likely_relative(
    tmp_path: Path, key: str, figures: dict[str, str], relative: str
) -> None:
    """What a row of a device leaves blank is of a device that its key names, else of one near in rates and memory."""
    row = {"device": key, "hbm_bandwidth_bytes_per_second": "3.2e12", "peak_flops_bf16": "5e14", **figures}
    write(tmp_path, [row], "devices.csv")
    (note,) = Context(tmp_path).device(key)[1]
    assert f"are those of {relative}" in note


@pytest.mark.parametrize(
    ("row", "field"), [(TRAINING, "tp"), (TRAINING, "etp"), (INFERENCE, "tp"), (INFERENCE, "batch")]
)
def test_a_count_of_zero_is_refused(tmp_path: Path, row: dict[str, str], field: str) -> None:
    """A stated zero is a mistake: it is no blank cell, and nothing runs on no ranks."""
    found = only(tmp_path, {**row, "model": "mixtral-8x7b", field: "0"})
    assert found.status == "refused"
    assert f"{field}: must be above 0" in found.reason


@pytest.mark.parametrize(
    ("framework", "cell", "degree"), [("NeMo 24.12", "", 2), ("NeMo 24.12", "1", 1), ("NeMo", "", 1)]
)
def test_experts_without_a_degree_are_split_as_their_release_splits_them(
    tmp_path: Path, framework: str, cell: str, degree: int
) -> None:
    """Megatron-Core of 2024 splits experts over tp unless told, recipes since then keep them whole."""
    experts = {"model": "mixtral-8x7b", "framework": framework, "num_gpus": "64", "tp": "2", "ep": "4", "etp": cell}
    found = only(tmp_path, {**TRAINING, **experts})
    assert found.case is not None and found.case.plan.etp == degree, found.reason
    assert any(one.startswith("etp") for one in found.assumed) == (cell == "")


def test_packed_documents_of_a_row_attend_among_themselves(tmp_path: Path) -> None:
    """The share of the attention square that a row's notes state is that of the job, and a step is shorter."""
    whole, packed = (only(tmp_path, {**TRAINING, "notes": one}) for one in ("", "attention_density=0.06"))
    assert packed.case is not None and packed.case.job.attention_density == 0.06
    assert whole.predicted is not None and packed.predicted is not None and packed.predicted < whole.predicted


def test_a_density_beyond_the_square_is_refused(tmp_path: Path) -> None:
    """No documents fill more than the whole square."""
    assert "attention_density" in only(tmp_path, {**TRAINING, "notes": "attention_density=1.5"}).reason


def test_slices_of_tpus_are_domains_and_a_batch_of_a_chip_is_not_that_of_a_replica(tmp_path: Path) -> None:
    """`dcn_2_slices` are two tori that a network joins; four chips of a replica run four times the batch of one."""
    row = TRAINING | {
        "device": "tpu-v5p", "num_gpus": "64", "gpus_per_node": "", "inter_node": "dcn_2_slices", "tp": "4", "dp": "16",
        "micro_batch": "3", "global_batch": "192", "sharding": "hsdp", "framework": "MaxText",
        "notes": "slices=2; shard_size=8; micro_batch is per chip",
    }  # fmt: skip
    report = TrainingRows().predict(Record(row), Context(tmp_path)).report
    assert [tier.size for tier in report.case.cluster.tiers] == [32, 64]
    assert (report.plan.micro_batch, report.plan.shard, report.plan.tp) == (12, 8, 4)


def test_a_mesh_in_the_notes_says_the_degree_that_a_row_leaves_blank(tmp_path: Path) -> None:
    """MaxText's `ici_tensor=4` is tensor parallelism of four; `ici_tensor=?` says nothing, and a cell counts first."""
    row = TRAINING | {"device": "tpu-v5p", "gpus_per_node": "", "framework": "MaxText", "dp": ""}
    for tp, notes, degree in (("", "ici_fsdp=2 ici_tensor=4", 4), ("", "ici_tensor=?", 1), ("2", "ici_tensor=4", 2)):
        found = TrainingRows().predict(Record(row | {"tp": tp, "notes": notes}), Context(tmp_path))
        assert found.report.plan.tp == degree


@pytest.mark.parametrize("word", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_rows_name_the_formats_of_gguf(word: str) -> None:
    """Every format of blocks of 32 that llama.cpp's files have is a word of rows, as it is one of `--weights`."""
    assert words("weights")[word] == word


def test_memory_needs_no_rates_of_a_device(tmp_path: Path) -> None:
    """What a device of 80 GB without a name holds is predicted, as on one whose rates are known; seconds are not."""
    run = {**TRAINING, "metric": "peak_memory", "value": "6e10", "memory_kind": "allocated"}
    known, generic = (only(tmp_path, {**run, "device": name}) for name in ("a100-sxm-80gb", "generic-80gb"))
    assert generic.predicted == known.predicted
    assert any("generic-80gb states none" in note for note in generic.assumed)
    assert only(tmp_path, {**TRAINING, "device": "generic-80gb"}).status == "refused"


def test_targets_of_a_row_are_those_that_the_model_has(tmp_path: Path) -> None:
    """Names that match count in peft, and a row without any that does is refused."""
    tuned = {**TRAINING, "finetune": "lora", "lora_rank": "8", "framework": "axolotl", "sharding": "none", "dp": "8"}
    some, none = (
        only(tmp_path, {**tuned, "notes": f"lora_targets={names}"})
        for names in ("q_proj,q_a_proj", "q_a_proj,kv_b_proj")
    )
    assert any("q_a_proj left out, as peft does" in note for note in some.assumed)
    assert (some.status, none.status) == ("predicted", "refused")
