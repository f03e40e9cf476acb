"""Rows of published tables: what their sources say elsewhere, and the predictors that read them so.

A row is completed and then asks the package what a row of anyone's own file asks it. Tables of kernels are read by
accuracy.kernels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeAlias

from accuracy.files import read, shipped
from accuracy.kernels import KERNELS
from accuracy.trtllm_bench import tuned
from shardwise import TrainingOptions, train
from shardwise.cost import rates_of
from shardwise.measured import (
    INFERENCE,
    TRAINING,
    Comparison,
    Context,
    InferenceRows,
    Predicted,
    Prediction,
    Record,
    TrainingRows,
    Validation,
    engine_table,
    matches,
    refuse,
    validate,
)
from shardwise.measured import read as known
from shardwise.models import MLP, Attention, Block, Model, load_model, model_names

_ADDRESS = re.compile(r"^https://github[.]com/([^/]+/[^/]+)(?:/(?:blob|tree)/([^/]+)/?)?")


Entry: TypeAlias = Mapping[str, Any]
DOCUMENTED: tuple[Entry, ...] = tuple(read("documented.toml")["documented"])


def documenting(citation: str, row: Mapping[str, str], entries: Sequence[Entry] = DOCUMENTED) -> Sequence[Entry]:
    """Return the entries of what a source documents that count for a row: the first, and those marked `beside`.

    A citation is github:OWNER/NAME@COMMIT:PATH or the page's address.
    """
    said = _ADDRESS.sub(lambda m: f"github:{m[1]}@{m[2]}:" if m[2] else f"github:{m[1]}", citation)
    found = [one for one in entries if re.search(one["citation"], said) and matches(one.get("where", {}), row)]
    return [*[one for one in found if "beside" not in one][:1], *[one for one in found if "beside" in one]]


def documented(
    citation: str, row: Mapping[str, str] | None = None, entries: Sequence[Entry] = DOCUMENTED
) -> tuple[dict[str, str], str]:
    """Return the settings that a cited source documents beside its table of results, and where.

    What it documents of a part of its rows counts for rows whose record match.

    >>> documented("github:MooreThreads/SimuMax@4dcaae5:docs/b200")[0]
    {'cp_kind': 'a2a'}
    >>> documented("https://github.com/MooreThreads/SimuMax/blob/4dcaae5/docs/b200")[0]
    {'cp_kind': 'a2a'}
    """
    cells: dict[str, str] = {}
    found = documenting(citation, row or {}, entries)
    for one in found:
        notes = "; ".join(filter(None, (cells.get("notes"), one["cells"].get("notes"))))
        cells = {**one["cells"], **cells, **({"notes": notes} if notes else {})}
    return cells, "; ".join(one["source"] for one in found)


def completed(record: Record, entries: Sequence[Entry] = DOCUMENTED) -> Record:
    """Return a row with blank cells filled in from what its source documents elsewhere (documented.toml).

    Documented notes join those of the row; raises `InputError` for a quantity that is documented to be another one.
    """
    for one in documenting(record.text("citation"), record.row, entries):
        if "refused" in one:
            raise refuse("metric", record.text("metric"), f"{one['refused']} ({one['source']})")
    told, source = documented(record.text("citation"), record.row, entries)
    blank = {name: value for name, value in told.items() if name in record.row and _lacks(record, name, value)}
    if "notes" in told:
        blank["notes"] = told["notes"]
    more = {"notes": "; ".join(filter(None, (record.text("notes"), told["notes"])))} if "notes" in told else {}
    instead = _instead(record, entries)
    found = record.with_cells({**blank, **more, **instead[0]}).completed()
    if instead[0]:
        found.assume(f"{', '.join(map('='.join, instead[0].items()))}, whatever the row says: {instead[1]}")
    for name, value in blank.items():
        found.assume(f"{name}: {value}, as documented: {source}")
    return found


def _instead(record: Record, entries: Sequence[Entry]) -> tuple[dict[str, str], str]:
    """Return the cells of a row that its source shows to be others than it says, and where."""
    found = [one for one in documenting(record.text("citation"), record.row, entries) if "instead" in one]
    cells = {name: cell for one in found for name, cell in one["instead"].items()}
    return cells, "; ".join(one["source"] for one in found)


def _lacks(record: Record, name: str, value: str) -> bool:
    """Return whether a cell is blank, or names a framework without the release that `value` adds."""
    return not record.says(name) or (name == "framework" and value.startswith(f"{record.text(name)} ("))


def joined(extra: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with more entries: those of lists stand before its own.

    >>> joined({"word": [1], "of": {"a": 2}}, {"word": [3], "of": {"b": 4}})
    {'word': [1, 3], 'of': {'b': 4, 'a': 2}}
    """
    found = dict(table)
    for name, entries in extra.items():
        own = table.get(name, type(entries)())
        found[name] = [*entries, *own] if isinstance(entries, list) else {**own, **entries}
    return found


_UNREAD = {"not read from a file", "only the fields of the fixture"}


class Published(Context):
    """What rows of published tables are read with: more frameworks and engines, and whole arguments of cases."""

    documented: Sequence[Entry] = DOCUMENTED
    frameworks = joined(read("frameworks.toml"), known("frameworks.toml"))
    engines = joined(read("engines.toml"), engine_table())

    def _find_model(self, key: str) -> Model:
        """Return the model of a key: the catalogue's, where the file beside the rows has not read the model's own."""
        unread = set(self._entries.get(key, {}).get("uncertain", ())) & _UNREAD
        name = key.removesuffix("-it")
        return load_model(name) if unread and name in model_names() else super()._find_model(key)

    @cached_property
    def arguments(self) -> dict[str, dict[str, Any]]:
        """The complete arguments of cases (files *_args.jsonl), by case."""
        return {case: entry for path in sorted(self.folder.glob("*_args.jsonl")) for case, entry in _entries(path)}


def entries_of(context: Context) -> Sequence[Entry]:
    """Return what a context knows that sources document."""
    return context.documented if isinstance(context, Published) else DOCUMENTED


def _entries(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("case_id"), str) and isinstance(entry.get("args"), dict):
            yield entry["case_id"], entry


def _with_answers(found: Prediction, generated: Mapping[str, float], source: str) -> Prediction:
    """Return the seconds of a step with its share of the answers, and of all else, that a source times with the steps.

    Both are seconds of a run of so many steps.
    """
    more = (_answers_seconds(found.case, generated) + generated["beside_seconds"]) / generated["steps"]
    wider = None if found.interval is None else (found.interval[0] + more, found.interval[1] + more)
    note = f"{more:.3f} s of a step are answers to the test set and what runs beside the steps: {source}"
    return replace(found, value=found.value + more, interval=wider, assumed=(*found.assumed, note))


def _answers_seconds(case: Any, generated: Mapping[str, float]) -> float:
    """Return the seconds of batches of answers of transformers, a token after the other, behind padded prompts.

    The host launches a token's pass as that of a step of one token a sequence, unrecorded, or the device paces it: a
    token joins a sequence's cache by a copy of all of it (transformers cache_utils.py DynamicLayer.update), and, since
    a padded batch has a mask, keys and values are repeated to the heads of queries before attention reads them
    (integrations/sdpa_attention.py). Virtual tokens stand before the prompt.
    """
    size = int(generated["sequences"])
    job, plan = replace(case.job, seq_len=1, global_batch=size), replace(case.plan, micro_batch=size)
    before = generated["prompt"]
    if job.adapter in ("prefix", "prompt"):
        before += job.rank
        job = replace(job, adapter="", rank=0, adapter_precision="")
    silent = replace(case.stack, module_launch_seconds=0.0)
    launched, computed = (
        float(
            train(case.model, case.cluster, plan, job, TrainingOptions(stack=stack)).evaluation.step.stages[0].forward
        )
        for stack in (case.stack, silent)
    )
    mixers = [mixer for layer in case.model.layers for mixer in layer.mixers if isinstance(mixer, Attention)]
    # Copied: read and written. Repeated: read, and written once a group. Attended: read once a group.
    moved = sum(2 * (3 * m.kv_heads + 2 * m.heads) * (m.head_dim + m.value_dim) for m in mixers) * size
    each = moved / float(rates_of(case.cluster.device, "bf16", 0.0, case.efficiencies).memory_bytes)
    answer, batches = int(generated["answer"]), generated["batches"]
    times = (max(launched / generated["recording"], computed + each * (before + t)) for t in range(answer))
    return float(batches * sum(times))


def _with_others(found: Prediction, held: float, source: str) -> Prediction:
    """Return the bytes of a run with those of parts beside the language model that its source says it holds."""
    wider = None if found.interval is None else (found.interval[0] + held, found.interval[1] + held)
    note = f"{held / 1e9:.2f} GB are parts beside the language model: {source}"
    return replace(found, value=found.value + held, interval=wider, assumed=(*found.assumed, note))


class PublishedTraining(TrainingRows):
    """Predicts published training runs: completed, or by whole arguments."""

    def __call__(self, record: Record, context: Context) -> Prediction:
        """Return the predicted value of a row, of the quantity that its source shows it to be."""
        entries = entries_of(context)
        cells, _ = _instead(record, entries)
        found = super().__call__(record.with_cells(cells) if cells else record, context)
        for one in documenting(record.text("citation"), record.row, entries):
            found = _with_answers(found, one["generates"], one["source"]) if "generates" in one else found
            found = _with_others(found, one["holds"], one["source"]) if "holds" in one else found
        return found

    def predict(self, record: Record, context: Context) -> Predicted:
        """Return the prediction of a row's configuration."""
        if isinstance(context, Published) and record.text("case_id") in context.arguments:
            from accuracy.arguments import predict_arguments

            return predict_arguments(record, context, context.arguments[record.text("case_id")])
        return super().predict(completed(record, entries_of(context)), context)


class PublishedInference(InferenceRows):
    """Predicts published runs of serving: completed, padded as some engines pad."""

    def completed(self, record: Record, context: Context) -> Record:
        """Return a row with what its source documents elsewhere."""
        row = with_limit(completed(record, entries_of(context)))
        if "limits" not in row.notes:
            return row
        return tuned(row, context.model_of(row), context.device(row.text("device"))[0])

    def model(self, record: Record, model: Model, tp: int) -> Model:
        """Return a row's model as its engine runs it on so many ranks."""
        if pads_ranks(record.text("engine").lower()) and padded(model, tp) != model:
            record.assume(f"{record.text('engine')} pads heads and widths to multiples of {tp}")
            return padded(model, tp)
        return model


@cache
def _limits() -> tuple[dict[tuple[str, ...], int], str]:
    """Return the sequences that groups of decode run at once by what they are for, and where they stand."""
    table, found = read("decode_limits.toml"), dict[tuple[str, ...], int]()
    for line in table["rows"].split("\n"):
        if line:
            head, _, loads = line.partition(": ")
            *words, sequences = head.split(" ")
            found |= {(*words, load): int(sequences) for load in loads.split(" ")}
    return found, table["source"]


def with_limit(record: Record) -> Record:
    """Return a row with the sequences that its decode workers run at once, where its recipe says them and it does not.

    >>> with_limit(Record({"serving_mode": "online"})).notes
    {}
    """
    if record.text("serving_mode") != "disaggregated" or record.noted("max_num_seqs"):
        return record
    words, groups = record.notes, record.count("attention_dp")
    narrow = "fp4" if "nvfp4" in (words.get("gemm_quant", ""), record.text("weight_dtype")) else "fp8"
    known, source = _limits()
    limit = known.get((
        record.text("engine"), record.text("model"), record.text("device").partition("-")[0], narrow,
        f"{record.text('input_tokens')}+{record.text('output_tokens')}",
        f"{record.count('num_prefill_workers')}p{record.count('num_decode_workers')}d",
        f"{'dep' if groups > 1 else 'tep'}{record.count('tp') * groups}", record.text("concurrency"),
    ))  # fmt: skip
    if not limit:
        return record
    record.assume(
        f"up to {limit} sequences at once on each group of decode, as its recipe has it ({source.split(':')[0]})"
    )
    return record.with_cells({"notes": "; ".join(filter(None, (record.text("notes"), f"max_num_seqs={limit}")))})


KINDS = (
    replace(INFERENCE, predictor=PublishedInference),
    replace(TRAINING, predictor=PublishedTraining),
    *KERNELS,
)


def measured(files: Iterable[str]) -> Validation:
    """Return every row of some published tables with its prediction."""
    return validate(files, KINDS, Published)


@cache
def rows_of(file: str) -> tuple[Comparison, ...]:
    """Return every row of one published table with its prediction, which no other table has a part in."""
    return measured([file]).rows


@cache
def released() -> Validation:
    """Return the shipped measurements with their predictions."""
    return measured(shipped())


def padded(model: Model, tp: int) -> Model:
    """Return a model with heads and feed-forward widths filled up with zeros to multiples of so many ranks.

    Source: neuronx-distributed parallel_layers/pad.py (get_number_of_extra_heads, pad_model) and transformers-neuronx.

    >>> model = padded(Model.load("llama-2-13b"), 24)
    >>> model.layers[0].mixers[0].heads, model.layers[0].feed_forward.ffn
    (48, 13824)
    """
    return replace(model, layers=tuple(_block(block, tp) for block in model.layers))


def pads_ranks(word: str) -> bool:
    """Return whether an engine, by its word in files, fills heads and widths up to its tensor-parallel ranks.

    >>> pads_ranks("neuronx"), pads_ranks("vllm")
    (True, False)
    """
    return word in read("engines.toml")["padding"]["words"]


def _up(count: int, ranks: int) -> int:
    return -(-count // ranks) * ranks


def _block(block: Block, tp: int) -> Block:
    feed = block.feed_forward
    wide = replace(feed, ffn=_up(feed.ffn, tp)) if isinstance(feed, MLP) else feed
    return replace(block, mixers=tuple(_mixer(m, tp) for m in block.mixers), feed_forward=wide)


def _mixer(mixer: Any, tp: int) -> Any:
    """Return an attention with heads for every rank; key-value heads that ranks can share stay."""
    if not isinstance(mixer, Attention):
        return mixer
    kv = mixer.kv_heads
    shared = kv % tp == 0 or tp % kv == 0
    return replace(mixer, heads=_up(mixer.heads, tp), kv_heads=kv if shared else _up(kv, tp))
