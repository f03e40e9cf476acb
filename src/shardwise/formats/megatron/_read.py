"""From Megatron-LM's arguments to a case."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shardwise.errors import InputError, Problem, plain
from shardwise.formats._imported import PLAIN, ImportContext, Imported, ReadArgument
from shardwise.formats._launch import Launch, Started, started, started_by
from shardwise.formats.megatron import _checkpoint, _job, _model, _plan
from shardwise.formats.megatron._reader import Reader
from shardwise.formats.megatron._values import GivenArguments, arguments, by_name, facts, from_mapping, from_words
from shardwise.plans import Plan
from shardwise.records import replace

if TYPE_CHECKING:
    from argparse import Namespace

_TELLING = frozenset(("--num-layers", "--hidden-size", "--micro-batch-size", "--tensor-model-parallel-size"))


def read_args(args: Mapping[str, object] | Sequence[str], launch: Launch | None = None) -> Imported:
    """Return the case of an argument list, or of a mapping from spellings or names to values.

    Raises `InputError` with everything that is wrong. Source: megatron/training/arguments.py of Megatron-LM.

    >>> words = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --swiglu"
    >>> more = "--max-position-embeddings 1024 --micro-batch-size 4 --vocab-size 50257 --bf16"
    >>> case = read_args((words + " " + more).split())
    >>> case.model.layers[0].feed_forward.ffn, case.plan.micro_batch, case.job.precision
    (2688, 4, 'bf16')
    """
    given = from_mapping(args) if isinstance(args, Mapping) else from_words(args)
    return imported(given, launch or Launch())


def recognises(name: str, text: str) -> bool:
    """Return whether a file may be a launch script: any text may."""
    return bool(text)


def read(text: str, source: str = "script", around: ImportContext = PLAIN) -> Imported:
    """Return the case of a launch script.

    >>> text = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4"
    >>> text += " --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --vocab-size 100"
    >>> read(text).num_devices, read(text, around=ImportContext(num_devices=16)).plan.dp
    (8, 16)
    """
    return _read(started(text, tells, source, around.variables), around)


def read_command(words: Sequence[str], around: ImportContext = PLAIN) -> Imported:
    """Return the case of a training command, its launcher and its program included, or of the arguments alone."""
    return _read(started_by(words, tells), replace(around, follow=True))


def tells(word: str) -> bool:
    """Return whether an argument tells a training with Megatron-LM from other programs."""
    return word in _TELLING


def _read(started_as: Started, around: ImportContext) -> Imported:
    launch = replace(started_as.launch, follow=around.follow)
    if around.num_devices and around.num_devices != launch.num_devices:
        launch = replace(launch, num_devices=around.num_devices, devices_per_node=0)
    skipped = frozenset(f"--{name.lstrip('-')}" for name in around.skipped)
    given, more = from_words(started_as.arguments, skipped), from_words(around.more, skipped)
    given.values |= more.values
    given.options |= more.options
    given.unknown += more.unknown
    given.problems.items += more.problems.items
    case = imported(given, launch)
    return replace(case, assumed=(*started_as.notes, *case.assumed))


def from_megatron_args(args: Namespace | Mapping[str, object]) -> Imported:
    """Return the case of the arguments that a training script has parsed, before or after their validation.

    >>> from argparse import Namespace
    >>> names = Namespace(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=128, vocab_size=100)
    >>> names.max_position_embeddings, names.micro_batch_size, names.world_size = 128, 1, 8
    >>> from_megatron_args(names).plan.dp
    8
    """
    if not isinstance(args, Mapping) and not hasattr(args, "__dict__"):
        rule, remedy = "must be parsed arguments, or a mapping of their names", "give what parse_args returned"
        raise InputError([Problem("args", plain(args), rule, remedy)])
    table = {str(name): value for name, value in (args if isinstance(args, Mapping) else vars(args)).items()}
    given = from_mapping(table)
    chunks = table.get("virtual_pipeline_model_parallel_size")
    if chunks is not None:
        given.values["virtual_pipeline_model_parallel_size"] = chunks
    devices = table.get("world_size")
    return imported(given, Launch(num_devices=devices if isinstance(devices, int) else 0, source="arguments"))


def imported(given: GivenArguments, launch: Launch) -> Imported:
    """Return the case of what was given; raises `InputError` with everything that is wrong."""
    reader = Reader(given)
    _checkpoint.take(reader, launch)
    check(reader)
    stem = os.path.splitext(os.path.basename(launch.source))[0]
    model = _model.build(reader, stem or "megatron")
    plan = _plan.build(reader, launch.num_devices)
    _check_sends(reader, plan)
    job, stack = _job.build(reader, plan), _job.stack(reader)
    _assume_defaults(reader)
    given.problems.items[:] = dict.fromkeys(given.problems.items)
    given.problems.raise_if_any()
    given_arguments = {name: by_name()[name] for name in given.values if name in by_name()}
    kept = [(arguments()[given.options[name]], given.values[name]) for name in given_arguments]
    reasons = facts()["reasons"]
    return Imported(
        system=facts()["checked"]["system"],
        version=facts()["checked"]["release"],
        model=model,
        plan=plan,
        job=job,
        stack=stack,
        num_devices=launch.num_devices,
        devices_per_node=launch.devices_per_node,
        source=launch.source,
        understood=tuple(ReadArgument(argument=a.option, value=v, meaning=a.meaning[5:]) for a, v in kept if a.read),
        assumed=tuple(reader.assumed),
        ignored=tuple(
            ReadArgument(argument=a.option, value=v, meaning=reasons[a.meaning])
            for a, v in kept
            if a.meaning in reasons and v != a.default and str(v) != str(a.default)
        ),
        silent=tuple(a.option for a, _ in kept if a.meaning == "none"),
        unknown=tuple(given.unknown),
    )


def check(reader: Reader) -> None:
    """Record arguments of another kind of training, and what does not run beside others."""
    _refuse(reader)
    _check_overlaps(reader)


def _refuse(reader: Reader) -> None:
    """Record arguments that describe something else, where they are not at their default."""
    for name, value in list(reader.given.values.items()):
        argument = by_name().get(name)
        if argument and argument.meaning.startswith("!") and value not in (argument.default, False, None):
            rule = facts()["refused"][argument.meaning[1:]]
            reader.problems.items.append(Problem(argument.option, plain(value), rule, "leave it out"))


def _check_sends(reader: Reader, plan: Plan) -> None:
    """Record chunks of two stages whose messages wait (megatron/training/arguments.py, 2026-08)."""
    if plan.vpp > 1 and plan.pp == 2 and not reader.flag("overlap_p2p_comm"):
        rule = "leaves two stages with several messages between them at once, which Megatron-LM refuses with chunks"
        reader.fail("overlap_p2p_comm", rule, "leave it out, or take more than two stages")


def _check_overlaps(reader: Reader) -> None:
    """Record what overlaps only beside other arguments, at which Megatron-LM stops (validate_args)."""
    flag = reader.flag
    shards = flag("use_distributed_optimizer") or flag("use_megatron_fsdp") or reader.word("optimizer") == "dist_muon"
    for name, other, stands in (
        ("overlap_param_gather", "use_distributed_optimizer", shards),
        ("overlap_param_gather", "overlap_grad_reduce", flag("overlap_grad_reduce")),
        ("tp_comm_overlap", "sequence_parallel", flag("sequence_parallel")),
        ("tp_comm_overlap", "tensor_model_parallel_size", reader.count("tensor_model_parallel_size") > 1),
    ):
        if flag(name) and not stands:
            option = reader.option(other)
            reader.fail(name, f"does not run without {option}", f"give {option} too, or leave it out")


def _assume_defaults(reader: Reader) -> None:
    """Say which defaults of Megatron-LM matter and were not stated."""
    defaults = (
        ("position_embedding_type", not reader.flag("use_rotary_position_embeddings"), "learned positions"),
        ("hidden_dropout", not reader.has("attention_dropout"), "dropout of 0.1 on attention and hidden states"),
        ("transformer_impl", not _job.era(reader), "Transformer Engine's modules"),
        ("bf16", not reader.flag("fp16") and not reader.has("fp8"), "parameters of 32 bits"),
    )
    for name, matters, text in defaults:
        if matters and not reader.has(name):
            reader.assume(f"{text}: Megatron-LM's default, as {reader.option(name)} is not given")
    padded = reader.has("padded_vocab_size") or not reader.flag("pad_vocab_size")
    if not reader.has("make_vocab_size_divisible_by") and not padded:
        reader.assume("vocabulary padded to a multiple of 128 x tp: Megatron-LM's default")
