"""From a row of a training file to what it fine-tunes: the adapter, its targets, the format of frozen weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from shardwise.measured._record import Record, refuse, words
from shardwise.models import Model
from shardwise.ops.count import trainable_parameters
from shardwise.plans import ADAPTERS, DROPPING, VIRTUAL, Stack, Training, base_names, find_stack, tuning_of
from shardwise.records import replace
from shardwise.training import split_targets

MEMORY = ("peak_memory", "memory_after_step", "memory_p99", "fits", "max_seq_len")
NATURAL = ("longest_sample", "mean_tokens_per_sample")
_SPREAD = re.compile(r"tokens of the data set ([\d.]+) \+- ([\d.]+)")
_USUAL_RANK = 8


def is_tuned(record: Record) -> bool:
    """Return whether a row is of a run that trains something else than all weights."""
    return record.text("finetune") not in ("", "pretrain", "full", *words("projected"))


def has_natural_lengths(record: Record) -> bool:
    """Return whether a row is of samples of natural lengths, of which the longest or the mean is stated."""
    notes = record.text("notes")
    unstated = record.text("metric") == "total_runtime" and "natural lengths" in notes
    return unstated or any(record.noted(name) for name in NATURAL) or bool(_SPREAD.search(notes))


def with_length(record: Record) -> Record:
    """Return a row with the tokens that its metric depends on: the longest sample for memory, the mean for time."""
    if (shorter := kept_mean(record)) and record.text("metric") not in MEMORY:
        shortened = record.with_cells({"seq_len": str(round(shorter))})
        shortened.assume(
            "seq_len: the mean of the samples that are no longer, of a gamma law as stated; it sets the time"
        )
        return shortened
    if not has_natural_lengths(record):
        return record
    if record.text("metric") in ("memory_p99", "memory_avg") and (by_length := sorted_by_length(record)):
        shortened = record.with_cells({"seq_len": str(round(by_length))})
        shortened.assume("seq_len: the longest samples between two emptyings of the allocator, lognormal up to seq_len")
        return shortened
    longest, mean = int(record.noted("longest_sample")), record.noted("mean_tokens_per_sample")
    if record.text("metric") in MEMORY:
        if record.says("seq_len") or not longest:
            return record
        shortened = record.with_cells({"seq_len": str(longest)})
        shortened.assume("seq_len: the longest sample, which sets the peak")
        return shortened
    if not mean:
        raise refuse("notes", record.text("notes"), "the mean length of its samples sets the time, and is not stated")
    shortened = record.with_cells({"seq_len": str(round(mean))})
    shortened.assume("seq_len: the mean sample, which sets the time")
    return shortened


SORTED, SAMPLES = 20, 20000
_EMPTIED = ("2025-11-13", 10)


def sorted_by_length(record: Record) -> float:
    """Return the tokens of the batches that fill an allocator in peft's own loop, 0 of other rows and other bytes.

    github.com/huggingface/peft method_comparison/MetaMathQA/run.py sorts buckets of 20 batches from long to short and
    empties the allocator behind each step, from pull 2894 (2025-11-13) on behind every tenth: it then holds the first
    batch of each ten. Lengths are lognormal with the stated mean, the longest of 5,000 batches of 4 as long as stated.

    >>> row = {"notes": "variable length up to 768, mean_tokens_per_sample=209.9; created=2026-01-10",
    ...        "metric": "memory_p99", "memory_kind": "reserved", "seq_len": "768", "micro_batch": "4"}
    >>> round(sorted_by_length(Record(row))), round(sorted_by_length(Record({**row, "metric": "memory_avg"})))
    (648, 322)
    """
    notes, mean = record.text("notes"), record.noted("mean_tokens_per_sample")
    if "variable length up to" not in notes or not mean or record.text("memory_kind") != "reserved":
        return 0.0
    law, longest = NormalDist(), record.positive("seq_len")
    # The median of the longest of so many is the quantile 2 ** (-1 / SAMPLES).
    z = law.inv_cdf(2 ** (-1 / SAMPLES))
    s = z - math.sqrt(z * z - 2 * math.log(longest / mean))
    first = SORTED * record.count("micro_batch")

    def length(share: float) -> float:
        return mean * math.exp(s * law.inv_cdf(share) - s * s / 2)

    created = re.search(r"created=(\S+?)(;|$)", notes)
    often = bool(created) and created[1] < _EMPTIED[0] if created else False
    every = 1 if often else _EMPTIED[1]
    if record.text("metric") == "memory_p99":
        # One percent of all steps: the first of each bucket, and as many behind it as are held with it.
        return length((1 - 0.01 * SORTED / every) ** (1 / first))
    starts = range(0, SORTED, every)
    return sum(length(0.5 ** (1 / first) if k == 0 else 1 - k / SORTED) for k in starts) / len(starts)


def kept_mean(record: Record) -> float:
    """Return the mean tokens of a data set's samples up to the stated length, 0 where the row has no mean and spread.

    ms-swift deletes longer samples unless told otherwise (github.com/modelscope/ms-swift swift/llm/utils/argument.py,
    truncation_strategy). Lengths follow a gamma law of that mean and spread, whose longest of ten thousands of samples
    are six times the mean, as stated; those of a lognormal would be twice as long. The mean of those below S is that of
    all by 1 - 1 / s, s the sum of x^n / ((k + 1) ... (k + n)) from n = 0 on with the law's shape k and x = S / scale,
    since P(k + 1, x) = P(k, x) - x^k e^-x / Gamma(k + 1).

    >>> notes = "tokens of the data set 3234.4 +- 2547.5, min 91, max 19548"
    >>> [round(kept_mean(Record({"seq_len": S, "notes": notes}))) for S in ("2048", "100000", "10000000")]
    [1122, 3234, 3234]
    >>> round(kept_mean(Record({"seq_len": "512", "notes": "tokens of the data set 700.0 +- 0"})))
    512
    """
    if not (match := _SPREAD.search(record.text("notes"))) or not record.says("seq_len"):
        return 0.0
    mean, deviation, longest = float(match[1]), float(match[2]), record.positive("seq_len")
    # The sum of a law this narrow has over a million terms, and all its samples are as long.
    if deviation <= 1e-3 * mean:
        return min(mean, longest)
    shape, x = (mean / deviation) ** 2, longest * mean / deviation**2
    total, term, n = 1.0, 1.0, 0
    while term > 1e-12 * total:
        n += 1
        term *= x / (shape + n)
        total += term
    return mean * (1 - 1 / total)


def tuning_fields(record: Record, model: Model) -> dict[str, Any]:
    """Return the fields of a job that say what a row fine-tunes; raises `InputError` for methods that are not built."""
    method, narrow, _ = record.text("finetune").partition("_nf4")
    method = words("finetune").get(method, method)
    if method == "lora" and (variant := _variant(record)):
        method = variant
    if method not in ADAPTERS:
        raise refuse("finetune", record.text("finetune"), "is not a method that is predicted")
    fields: dict[str, Any] = {"adapter": method, "base": base_of(record, bool(narrow))}
    if method not in VIRTUAL and method != "ia3":
        fields["targets"] = targets_of(record)
    fields["rank"] = rank_of(record, model, fields)
    if method in VIRTUAL:
        return fields
    if (dropout := _dropout(record)) and method in DROPPING:
        fields["adapter_dropout"] = dropout
    if record.noted("adapter_bytes"):
        fields["adapter_precision"] = {2: "bf16", 4: "fp32"}[int(record.noted("adapter_bytes"))]
    if trained := _listed(record, "trains") or _saved(record):
        fields["trains"] = trained
    return fields


def base_of(record: Record, narrow: bool = False) -> str:
    """Return the format of the frozen weights of a row: the stated one, 4 bits under QLoRA, else 16."""
    word = record.text("param_dtype").replace("_", "-")
    if not word:
        word = "nf4" if narrow or record.text("finetune") == "qlora" else "bf16"
        record.assume(f"param_dtype: not stated: {word}, as {record.text('finetune')} has it")
    word = words("frozen").get(word, word)
    if word not in base_names():
        raise refuse("param_dtype", word, "is not a type of frozen weights that is known")
    return word


def tuned_precision_of(record: Record, dtype: str, rates: set[str]) -> str:
    """Return the recipe of a row that fine-tunes, "" for that of its framework: as its notes say of autocast.

    Where a device has no bf16 the trainer's switch is that of fp16, which autocasts.

    >>> tuned_precision_of(Record({"notes": "loop without autocast"}), "fp16", {"fp16"})
    'fp16'
    >>> tuned_precision_of(Record({"notes": ""}), "fp16", {"fp16"})
    'amp-fp16'
    """
    if "without autocast" in record.text("notes"):
        return {"bf16": "bf16-pure"}.get(dtype, dtype)
    return "amp-fp16" if dtype == "fp16" and "bf16" not in rates else ""


def targets_of(record: Record) -> tuple[str, ...]:
    """Return the linear layers with adapters: the stated ones, queries and values where none is stated."""
    if named := _listed(record, "lora_targets") or _listed(record, "targets"):
        return named
    if called := re.search(r"-target-([a-z]+_proj|mlp|attention)\b", record.notes.get("experiment", "")):
        record.assume(f"lora_targets: {called[1]}, as the experiment is called")
        return (called[1],)
    if "all linear" in record.text("notes").lower():
        return ("attention", "mlp")
    for name, usual in words("usual_targets").items():
        if name in record.text("framework").lower():
            record.assume(f"lora_targets: not stated: {usual}, the default of {name}")
            return (usual,)
    record.assume("lora_targets: not stated: queries and values (arXiv:2106.09685 section 4.2)")
    return ("q", "v")


def with_own_targets(record: Record, model: Model, job: Training, stack: Stack) -> Training:
    """Return a job whose adapters stand beside layers that the model has: peft leaves names that match none."""
    tuning = tuning_of(job, stack, model.family) if job.adapter and job.targets else None
    if tuning is None or tuning.joint:
        return job
    kept, lost = split_targets(model, tuning, job.targets)
    if not lost:
        return job
    record.assume(f"lora_targets: {', '.join(lost)} left out, as peft does: no linear layers of {model.name}")
    return replace(job, targets=kept)


def _listed(record: Record, key: str) -> tuple[str, ...]:
    """Return the words of a list in the notes, which may follow another setting: "r=140 targets=up_proj,down_proj"."""
    match = re.search(rf"(?:^|[\s;]){key}=([^;]*)", record.text("notes"))
    return tuple(filter(None, (word.strip() for word in match[1].split(",")))) if match and match[1] != "None" else ()


def _saved(record: Record) -> tuple[str, ...]:
    """Return the parts of the model that train whole beside adapters, by the modules that the notes name as saved."""
    note = next((part for part in record.text("notes").split(";") if "modules_to_save" in part), "")
    return tuple(sorted({part for name, part in words("saved").items() if name in note}))


def rank_of(record: Record, model: Model, fields: Mapping[str, Any]) -> int:
    """Return the rank of the adapters, or tokens: as stated, as the parameters that train say, or the usual one.

    Refused above the model's hidden size: a GEMM of so many inputs has no higher rank, and the cell holds something
    else.
    """
    # The rank column of AdaLoRA is the one that it prunes to: it starts from another.
    begins = fields["adapter"] == "adalora" or not record.says("lora_rank")
    if begins and (counted_rank := _counted(record, model, fields)):
        return counted_rank
    named = re.search(r"-rank(\d+)", record.notes.get("experiment", ""))
    if record.says("lora_rank"):
        rank = record.count("lora_rank")
    elif named:
        rank = int(named[1])
        record.assume(f"lora_rank: {rank}, as the experiment is called")
    else:
        record.assume(f"lora_rank: not stated: {_USUAL_RANK}, the default of LitGPT and of PEFT")
        return _USUAL_RANK
    if rank > model.hidden:
        raise refuse("lora_rank", rank, f"is above the model's hidden size of {model.hidden}")
    return rank


def _counted(record: Record, model: Model, fields: Mapping[str, Any]) -> int:
    """Return the rank at which as many parameters train as the row states, 0 where they do not grow with it."""
    stated = record.noted("trainable_params")
    if not stated:
        return 0
    one, two = (_trained(model, fields, rank) for rank in (1, 2))
    rank = round(1 + (stated - one) / (two - one)) if two > one else 0
    return rank if rank > 0 and _trained(model, fields, rank) == stated else 0


def _trained(model: Model, fields: Mapping[str, Any], rank: int) -> int:
    tuning = tuning_of(
        Training(seq_len=1, global_batch=1, rank=rank, **fields), find_stack("transformers"), model.family
    )
    return sum(trainable_parameters(model, tuning).values()) if tuning else 0


def _variant(record: Record) -> str:
    """Return the variant of LoRA that an experiment is named after."""
    name = record.notes.get("experiment", "").lower()
    return next((word for word in ("dora", "rslora") if f"-{word}" in name or f"+{word}" in name), "")


def _dropout(record: Record) -> float:
    dropout = record.noted("lora_dropout")
    return dropout if 0 <= dropout < 1 else 0.0
