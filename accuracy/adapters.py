"""Memory of runs that train adapters beside frozen weights (LoRA, QLoRA): the model without state, and the adapters.

Frozen weights have no gradient, so that products keep no input for them unless an
adapter reads it (torch autograd), and norms keep no normalised stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from accuracy.files import read
from shardwise import TrainReport
from shardwise.ledger.op import Op
from shardwise.ledger.saved import keep
from shardwise.measured import Record, refuse
from shardwise.training._layer_tables import lines_of

ADAPTERS = ("lora", "qlora")
ADAPTED = "adapters: counted beside a model of frozen weights"
MEMORY = ("peak_memory", "fits")
# What a product keeps for the gradient of its weight alone, by the adapter that would read it.
_INPUTS = {"norm1.output": "qkv", "norm2.output": "mlp", "mlp.product": "mlp"}
_NORMALISED = ("norm1.normalised", "norm2.normalised")
_USUAL_RANK = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """What a stack keeps for adapters: bytes of a parameter of one, and of dropout over its input in 16 bits.

    With `narrow_head` the head is quantised as the layers are.
    """

    parameter_bytes: float
    dropout_bytes: float
    narrow_head: bool
    source: str


def adapters_of(stack: str) -> Adapters:
    """Return what a stack keeps for adapters.

    >>> adapters_of("litgpt").parameter_bytes, adapters_of("transformers").parameter_bytes
    (8.0, 16.0)
    """
    rows = read("adapters.toml")["adapters"]
    return Adapters(**rows.get(stack, rows["other"]))


def trains_adapters(record: Record) -> bool:
    """Return whether a row is of a run that trains adapters alone."""
    return record.text("finetune") in ADAPTERS


def frozen_record(record: Record) -> Record:
    """Return the row of a run with adapters as that of its frozen model; raises `InputError` where it is not modelled.

    Samples of natural length count with the longest, which sets the peak.
    """
    if record.text("metric") not in MEMORY and (
        "longest_sample" in record.notes or "mean_tokens" in record.text("notes")
    ):
        raise refuse("notes", record.text("notes"), "times of adapters on samples of natural length are not modelled")
    if "unsloth" in record.text("framework").lower():
        raise refuse("framework", record.text("framework"), "its checkpoints in the host's memory are not modelled")
    longest, length = int(record.noted("longest_sample")), record.text("seq_len")
    found = Record({**record.row, "seq_len": length or str(longest or ""), "finetune": "pretrain", "optimizer": "adam"})
    for said in (*record.assumed, ADAPTED):
        found.assume(said)
    if longest and not length:
        found.assume("seq_len: the longest sample, which sets the peak")
    return found


def frozen_recipe(record: Record) -> str:
    """Return the recipe of the frozen weights of a row: the stated one, 4 bits under QLoRA, else 16."""
    word = record.text("param_dtype")
    if not word:
        word = "nf4" if record.text("finetune") == "qlora" else "bf16"
        record.assume(f"param_dtype: not stated: {word}, as {record.text('finetune')} has it")
    narrow = record.text("compute_dtype").lower()
    if narrow in ("fp8", "mxfp8", "nvfp4"):
        word = narrow if word == "bf16" else f"{word} under {narrow}"
    found: str | None = read("adapters.toml")["frozen"].get(word)
    if found is None:
        raise refuse("param_dtype", word, "is not a type of frozen weights that is known")
    return found


def targets_of(record: Record) -> set[str]:
    """Return the products with adapters: the stated ones, queries and values where none is stated."""
    named, table = (
        [word for part in record.text("notes").split(";") for word in _listed(part)],
        read("adapters.toml")["lora_targets"],
    )
    if not named and "all linear" in record.text("notes").lower():
        return {"qkv", "out", "mlp"}
    if not named:
        record.assume("lora_targets: not stated: queries and values (arXiv:2106.09685 section 4.2)")
    if unknown := [word for word in named if word not in table]:
        raise refuse("lora_targets", ",".join(unknown), f"are not among {', '.join(table)}")
    return {table[word] for word in named} or {"qkv"}


def _listed(part: str) -> list[str]:
    key, _, names = part.partition("=")
    return [name.strip().removesuffix("_proj") for name in names.split(",")] if key.strip() == "lora_targets" else []


def beside(record: Record, report: TrainReport) -> float:
    """Return the bytes by which a run with adapters differs from the frozen model: adapters, and inputs not kept."""
    targets, stack, plan = targets_of(record), report.case.stack, report.plan
    quantised = "nf4" in report.case.recipe.precision.name
    adapters = adapters_of(stack.name)
    own = adapters.parameter_bytes * _parameters(record, report, targets)
    sharded = plan.sharding in ("fsdp", "zero3")
    found = own / (plan.dp if sharded else 1) - _unkept(report, targets, quantised)
    if stack.accumulates_whole and sharded:
        # A flat parameter of FSDP1 has one gradient for all of it, frozen weights too.
        found += 2 * plan.dp * float(report.evaluation.memory[0].weights) / report.case.recipe.precision.weight_bytes
    if plan.recompute == "none":
        found += adapters.dropout_bytes * sum(size for _, size in _adapted(report, targets))
    return found + (_widened(report, adapters.narrow_head) if quantised else 0.0)


def _unkept(report: TrainReport, targets: set[str], quantised: bool) -> float:
    """Return the bytes that layers do not keep where weights are frozen; products of 4 bits keep their inputs.

    github.com/bitsandbytes-foundation/bitsandbytes bitsandbytes/autograd/_functions.py, MatMul4Bit: ctx.tensors.
    """
    found = 0.0
    for lines, layers in zip(lines_of(report.case), report.evaluation.stages[0].layers, strict=False):
        for tensor in keep(lines.ops, lines.units).kept:
            read = _INPUTS.get(tensor.name)
            if tensor.name in _NORMALISED or (read and read not in targets and not quantised):
                found += float(layers * tensor.size_bytes)
    return found


def _adapted(report: TrainReport, targets: set[str]) -> Iterator[tuple[Op[float], float]]:
    """Yield the products with adapters, and the bytes of the input of each in all layers."""
    for lines, layers in zip(lines_of(report.case), report.evaluation.stages[0].layers, strict=False):
        for op in lines.ops:
            if op.kind == "matmul" and op.weights and op.name.split(".")[0] in targets:
                yield op, float(layers * op.saves[0].size_bytes)


def _widened(report: TrainReport, narrow_head: bool) -> float:
    """Return the bytes of the largest weight of a layer in 16 bits, and of a head that stays in them."""
    parts, precision = report.evaluation.parts, report.case.recipe.precision
    largest = max(float(kind.elements.largest) for kind in parts.kinds)
    head = 0.0 if narrow_head else float(parts.head.elements.largest)
    return 2 * largest + (2 - precision.weight_bytes) * head


def _parameters(record: Record, report: TrainReport, targets: set[str]) -> float:
    """Return the parameters of the adapters: the stated number, or rank times both sides of each product."""
    stated = record.noted("trainable_params")
    if stated:
        return stated
    rank = rank_of(record, report.case.model.hidden)
    layers = sum(float(n) for n in report.evaluation.stages[0].layers)
    found = 0.0
    for op, size in _adapted(report, targets):
        times = size / float(op.saves[0].size_bytes) if op.saves[0].size_bytes else layers
        found += times * rank * sum(float(n) + float(op.inner) for n in (op.parts or (op.columns,)))
    return found


def rank_of(record: Record, hidden: int) -> int:
    """Return the rank of the adapters, the usual one where it is not stated; refused above the model's hidden size.

    A product of so many inputs has no higher rank: the cell holds something else.
    """
    if not record.says("lora_rank"):
        record.assume(f"lora_rank: not stated: {_USUAL_RANK}, the default of LitGPT and of PEFT")
        return _USUAL_RANK
    rank = record.count("lora_rank")
    if rank > hidden:
        raise refuse("lora_rank", rank, f"is above the model's hidden size of {hidden}")
    return rank
