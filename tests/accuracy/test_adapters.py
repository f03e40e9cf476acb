"""Memory and seconds of runs that train adapters beside frozen weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from accuracy.adapters import frozen_recipe, targets_of
from accuracy.published import Published, PublishedTraining, completed
from shardwise.errors import InputError
from shardwise.measured import Predicted, Record
from shardwise.measured._training_metrics import flops_per_token, peak_memory

# github.com/Lightning-AI/litgpt tutorials/resource-tables.md and github.com/hiyouga/LLaMA-Factory wiki, performance.
LITGPT = {
    "case_id": "a", "metric": "peak_memory", "model": "llama-2-7b", "device": "a100-sxm-40gb", "num_gpus": "1",
    "gpus_per_node": "8", "micro_batch": "1", "global_batch": "128", "tp": "1", "cp": "1", "pp": "1", "dp": "1",
    "sharding": "none", "recompute": "unknown", "compute_dtype": "bf16", "param_dtype": "bf16", "grad_dtype": "bf16",
    "finetune": "lora", "lora_rank": "8", "framework": "LitGPT", "memory_kind": "allocated", "seq_len": "",
    "citation": "github:Lightning-AI/litgpt", "notes": "longest_sample=1304 tokens",
}  # fmt: skip
TWO = {**LITGPT, "num_gpus": "2", "dp": "2", "sharding": "fsdp"}
FACTORY = {
    **LITGPT, "global_batch": "4", "param_dtype": "nf4", "finetune": "qlora", "framework": "LLaMA-Factory",
    "memory_kind": "", "seq_len": "32768", "notes": "LoRA on all linear modules", "citation": "",
}  # fmt: skip


def predict(row: dict[str, str], folder: Path) -> Predicted:
    """Return the prediction of a row."""
    return PublishedTraining().predict(Record(row), Published(folder))


def found(tmp_path: Path, row: dict[str, str]) -> tuple[Predicted, float]:
    """Return the prediction of a row, and its peak in GB."""
    record = Record(row)
    one = predict(row, tmp_path)
    return one, (peak_memory(record, one.report) + one.more_bytes) / 1e9


@pytest.mark.parametrize(
    ("row", "measured"), [(TWO, 22.18), ({**TWO, "micro_batch": "4"}, 23.39), (FACTORY, 32.0)],
    ids=["two devices", "four sequences", "4 bits"],
)  # fmt: skip
def test_measured_peaks_of_adapters_are_met(tmp_path: Path, row: dict[str, str], measured: float) -> None:
    """Peaks of LoRA under FSDP and of QLoRA over a long sequence are met within 8 %."""
    assert found(tmp_path, row)[1] == pytest.approx(measured, rel=0.08)


def test_flat_parameters_have_gradients_for_frozen_weights(tmp_path: Path) -> None:
    """Two devices under FSDP hold two bytes a parameter more than their shards: whole gradients of flat parameters."""
    two = found(tmp_path, TWO)[0]
    assert two.more_bytes > 2 * 6.7e9


def test_quantised_weights_take_four_bits_and_their_scales(tmp_path: Path) -> None:
    """QLoRA stores products at 0.5625 bytes a weight and the table of words in 16 bits."""
    weights = float(found(tmp_path, {**LITGPT, "param_dtype": "nf4"})[0].report.memory.weights)
    table = 32000 * 4096
    assert weights == pytest.approx(0.5625 * (6738415616 - table) + 2 * table, rel=1e-3)
    assert frozen_recipe(Record({"finetune": "qlora", "param_dtype": ""})) == "frozen-nf4"


def test_times_on_samples_of_natural_length_are_refused(tmp_path: Path) -> None:
    """What the longest sample needs sets a peak; how long a step of all lengths takes is not known from it."""
    with pytest.raises(InputError, match="natural length"):
        predict({**LITGPT, "metric": "step_time"}, tmp_path)


# github.com/NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md, 26.06, LLAMA3_70B LoRA, and
# github.com/hiyouga/LLaMA-Factory wiki, performance.
BRIDGE = {
    **LITGPT, "metric": "tokens_per_second_per_gpu", "model": "llama-3-70b", "device": "gb200", "num_gpus": "8",
    "gpus_per_node": "4", "global_batch": "32", "pp": "2", "vpp": "20", "dp": "4", "sharding": "",
    "compute_dtype": "fp8", "param_dtype": "", "grad_dtype": "", "lora_rank": "", "framework": "Megatron-Bridge 26.06",
    "seq_len": "4096", "notes": "", "citation": "",
}  # fmt: skip
FOUR_BITS = {**FACTORY, "metric": "tokens_per_second_per_gpu", "notes": "LoRA on all linear modules"}


@pytest.mark.parametrize(
    ("row", "measured"), [(BRIDGE, 6206), (FOUR_BITS, 2216)], ids=["8 bits in a pipeline", "4 bits"],
)  # fmt: skip
def test_measured_rates_of_adapters_are_met(tmp_path: Path, row: dict[str, str], measured: float) -> None:
    """Tokens a second of LoRA in a pipeline and of QLoRA over a long sequence are met within 10 %."""
    assert found(tmp_path, row)[0].report.tokens_per_second_per_gpu == pytest.approx(measured, rel=0.1)


def test_flops_of_adapters_are_four_a_weight(tmp_path: Path) -> None:
    """NVIDIA's tables of LoRA count 4 FLOPs a weight of products and token: 2,086 TFLOP/s for 7,481 tokens/s."""
    report = found(tmp_path, BRIDGE)[0].report
    assert flops_per_token(Record({"flops_convention": "lora_4n"}), report) == pytest.approx(2.086e15 / 7481, rel=0.01)


def test_frozen_weights_have_no_gradients_and_no_update(tmp_path: Path) -> None:
    """A step with adapters has no weight gradients, no reduction and no update, and takes longer with more of them."""
    few, every = (found(tmp_path, {**BRIDGE, "notes": f"lora_targets={words}"})[0].report for words in ("q", "q,o,mlp"))
    step = few.evaluation.step
    assert all(stage.backward_weight == 0 for stage in step.stages)
    assert (step.gradients_exposed, step.parameters_exposed, step.optimizer) == (0, 0, 0)
    assert few.step_seconds < every.step_seconds < 1.2 * few.step_seconds
    assert step.pipeline.total == pytest.approx(step.pipeline.busy + step.pipeline.bubble + step.pipeline.exposed_send)


def test_four_bits_are_made_wide_before_each_product(tmp_path: Path) -> None:
    """Weights of 4 bits take longer than those of 16 on one device, which holds both."""
    row = {**FOUR_BITS, "seq_len": "2048"}
    four, sixteen = (found(tmp_path, {**row, "param_dtype": width})[0].report for width in ("nf4", "bf16"))
    assert four.step_seconds > 1.02 * sixteen.step_seconds


def test_inputs_that_no_gradient_reads_are_not_kept(tmp_path: Path) -> None:
    """Adapters on every product need more memory than those on queries and values."""
    few = found(tmp_path, LITGPT)[1]
    all_of_them = {**LITGPT, "notes": "longest_sample=1304; lora_targets=query,key,value,projection,mlp"}
    assert found(tmp_path, all_of_them)[1] > few


def test_a_rank_that_is_not_stated_is_assumed_and_said(tmp_path: Path) -> None:
    """A blank or unknown rank is 8, and the row says so; a stated one is not assumed."""
    eight = found(tmp_path, LITGPT)
    for word in ("", "unknown"):
        blank, peak = found(tmp_path, {**LITGPT, "lora_rank": word})
        assert peak == eight[1]
        assert any(said.startswith("lora_rank: not stated: 8") for said in blank.assumed)
    assert not any(said.startswith("lora_rank") for said in eight[0].assumed)


@pytest.mark.parametrize(("rank", "rule"), [("0", "above 0"), ("4097", "hidden size of 4096"), ("1e9", "hidden size")])
def test_a_rank_that_no_adapter_has_is_refused(tmp_path: Path, rank: str, rule: str) -> None:
    """A rank of none, or above the model's own width, is a mistake in the cell; one as large as the width is none."""
    assert found(tmp_path, {**LITGPT, "lora_rank": "4096"})[1] > found(tmp_path, LITGPT)[1]
    with pytest.raises(InputError, match=f"lora_rank.*{rule}"):
        predict({**LITGPT, "lora_rank": rank}, tmp_path)


def test_targets_that_are_not_known_are_refused(tmp_path: Path) -> None:
    """Names of Hugging Face's layers are known; one that is not refuses the row and is never left out in silence."""
    short, long = (f"longest_sample=1304; lora_targets={words}" for words in ("q,v,up", "q_proj,v_proj,up_proj"))
    assert found(tmp_path, {**LITGPT, "notes": short})[1] == found(tmp_path, {**LITGPT, "notes": long})[1]
    with pytest.raises(InputError, match="lora_targets"):
        predict({**LITGPT, "notes": "longest_sample=1304; lora_targets=query,router"}, tmp_path)


def test_optimizers_whose_state_moves_to_the_host_are_refused(tmp_path: Path) -> None:
    """A paged optimizer keeps on the device what fits, which no plan says, so that its peak is not predicted."""
    row = {**LITGPT, "finetune": "full", "optimizer": "paged_adamw", "seq_len": "2048", "notes": ""}
    with pytest.raises(InputError, match="moves to the host"):
        predict(row, tmp_path)


@pytest.mark.parametrize(
    ("model", "tp", "recompute"),
    [("llama-3.1-8b", "1", "none"), ("llama-3.3-70b", "8", "none"), ("llama-3.3-70b", "2", "full")],
)
def test_recipes_of_automodel_say_which_products_have_adapters(model: str, tp: str, recompute: str) -> None:
    """Its benchmarks of LoRA adapt every projection with rank 16, and run layers again where tp is 2."""
    row = {
        **LITGPT,
        "model": model,
        "tp": tp,
        "lora_rank": "",
        "notes": "",
        "citation": "github:NVIDIA-NeMo/Automodel@1",
    }
    told = completed(Record(row))
    assert (told.text("recompute"), told.text("lora_rank")) == (recompute, "16")
    assert targets_of(told) == {"qkv", "out", "mlp"}
