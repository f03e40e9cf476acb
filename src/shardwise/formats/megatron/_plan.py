"""The plan that Megatron-LM's arguments describe.

Derivations: megatron/training/arguments.py validate_args, megatron/core/transformer/transformer_block.py
get_num_layers_to_build, pipeline_parallel_layer_layout.py and megatron/core/parallel_state.py, 2026-08.
"""

from __future__ import annotations

import re

from shardwise.formats._exported import ORDERS
from shardwise.formats.megatron._model import num_layers, predictions
from shardwise.formats.megatron._reader import Reader
from shardwise.models import MOST_LAYERS
from shardwise.plans import ContextKind, Plan, Recompute, Schedule, Sharding, in_groups, listed, schedule_for
from shardwise.records import dataclass

_CONTEXT: dict[str, ContextKind] = {"p2p": "ring", "all_gather": "all-gather", "allgather": "all-gather"}
_CONTEXT |= {"a2a": "all-to-all", "a2a+p2p": "ring"}
_FSDP: dict[str, Sharding] = {
    "no_shard": "none",
    "optim": "zero1",
    "optim_grads": "zero2",
    "optim_grads_params": "fsdp",
}
_V: dict[str, Schedule] = {"zb": "zb-v", "half": "v-half", "min": "v-min"}
_TERM = re.compile(r"\(([^()]{0,1000})\)(?:\*([0-9]+))?|([EtmL|])(?:\*([0-9]+))?")
MOST_SPELLED = 100_000


@dataclass(frozen=True, slots=True)
class Degrees:
    """The sizes of the axes; dp is 0 where the number of devices is not known."""

    tp: int
    cp: int
    pp: int
    dp: int


def degrees(reader: Reader, num_devices: int) -> Degrees:
    """Return the sizes of the axes; replicas are what is left of the devices."""
    if reader.has("model_parallel_size") and reader.has("tensor_model_parallel_size"):
        reader.fail("model_parallel_size", "is the old name of --tensor-model-parallel-size, given too", "give one")
    tp = reader.count("model_parallel_size" if reader.has("model_parallel_size") else "tensor_model_parallel_size")
    cp = reader.count(
        "ds_sequence_parallel_size" if reader.has("ds_sequence_parallel_size") else "context_parallel_size"
    )
    pp = 1 if reader.flag("no_pipeline_parallel") else reader.count("pipeline_model_parallel_size")
    if num_devices % (tp * cp * pp):
        rule = f"tp x cp x pp = {tp * cp * pp} must divide the {num_devices} devices of the launch"
        reader.problems.add(reader.option("tensor_model_parallel_size"), tp, rule, "change the degrees or the launch")
        return Degrees(tp, cp, pp, 1)
    return Degrees(tp, cp, pp, num_devices // (tp * cp * pp))


def build(reader: Reader, num_devices: int) -> Plan:
    """Return the plan; problems are recorded."""
    d, moe = degrees(reader, num_devices), bool(reader.whole("num_experts", 0))
    pieces, vpp = _pieces(reader, d.pp)
    vpp = 2 if reader.flag("zero_bubble_v_schedule") else vpp
    mode, layers, modules = _recompute(reader, vpp, pieces)
    sharding, shard = _sharding(reader, d)
    if reader.flag("sequence_parallel") and d.tp == 1:
        reader.assume("sequence_parallel off: --sequence-parallel does nothing without tensor parallelism")
    kinds = set(reader.words("cp_comm_type"))
    for kind in sorted(kinds - _CONTEXT.keys()):
        reader.fail("cp_comm_type", f"{kind} is not a kind of exchange", "use p2p, all_gather, a2a or a2a+p2p")
    if len(kinds) > 1 or "a2a+p2p" in kinds:
        reader.assume(
            f"cp_kind {_CONTEXT.get(min(kinds), 'ring')}: for all layers, of --cp-comm-type {' '.join(kinds)}"
        )
    return Plan(
        tp=d.tp,
        cp=d.cp,
        pp=d.pp,
        vpp=vpp,
        dp=d.dp,
        ep=reader.count("expert_model_parallel_size"),
        etp=(reader.whole("expert_tensor_parallel_size") or d.tp) if moe else 1,
        micro_batch=_micro_batch(reader),
        sequence_parallel=reader.flag("sequence_parallel") and d.tp > 1,
        cp_kind="all-to-all"
        if reader.has("ds_sequence_parallel_size")
        else _CONTEXT.get(min(kinds, default="p2p"), "ring"),
        schedule=_schedule(reader, d.pp, vpp),
        sharding=sharding,
        shard=shard,
        recompute=mode,
        recompute_layers=layers,
        offload=_offload(reader),
        modules=modules,
        stage_layers=pieces,
        order=ORDERS[reader.flag("use_tp_pp_dp_mapping")],
    )


def _offload(reader: Reader) -> tuple[str, ...]:
    """Return what lies in the host's memory: the optimizer, of which a share may stay on the device."""
    share = reader.number("optimizer_offload_fraction")
    if not reader.flag("optimizer_cpu_offload"):
        return ()
    if not share:
        reader.assume(f"offload none: {reader.option('optimizer_offload_fraction')} is 0")
    elif share < 1:
        reader.assume("offload the whole optimizer: the share of it that stays on the device is not counted")
    return ("optimizer",) if share else ()


def _schedule(reader: Reader, pp: int, vpp: int) -> Schedule:
    """Return the pipeline schedule; those without a bubble are of the authors' fork (core/zbpp_utils.py)."""
    v = reader.flag("zero_bubble_v_schedule")
    if not (v or reader.flag("enable_zero_bubble")):
        return schedule_for(vpp)
    if pp < 2:
        reader.fail(
            "zero_bubble_v_schedule" if v else "enable_zero_bubble", "needs a pipeline", "give two stages or more"
        )
    if v:
        return _V[reader.word("zero_bubble_v_schedule_mem_setup", *_V)]
    reader.assume("schedule zb-h1: what its scheduler finds with backwards of one pipeline pending")
    return "zb-h1"


def _micro_batch(reader: Reader) -> int:
    """Return the sequences of a micro-batch; --batch-size meant that before version 2."""
    return reader.count("batch_size") if reader.has("batch_size") else reader.needed("micro_batch_size")


def _pieces(reader: Reader, pp: int) -> tuple[tuple[int, ...], int]:
    """Return the layers of every piece, empty where they are equal, and the pieces of a stage."""
    ways = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    given = [n for n in (*ways, "pipeline_model_parallel_layout") if reader.has(n)]
    for name in given[1:]:
        reader.fail(name, f"contradicts {reader.option(given[0])}, which cuts the model too", "give one of them")
    text = reader.word("hybrid_layer_pattern").split("/")[0]
    if reader.has("pipeline_model_parallel_layout"):
        return _listed(reader, pp, layout(reader), "pipeline_model_parallel_layout")
    if "|" in text:
        return _listed(reader, pp, [len(part) for part in text.split("|")], "hybrid_layer_pattern")
    if pp > MOST_LAYERS:
        reader.problems.add("--pipeline-model-parallel-size", pp, f"must be at most {MOST_LAYERS}", "use fewer stages")
        return (), 1
    sizes = _stages(reader, pp)
    vpp = max(_virtual(reader, sizes), 1)
    if any(size % vpp for size in sizes):
        reader.problems.add(
            "--num-layers", sum(sizes), f"does not make {vpp} equal chunks on each stage", "change the cut"
        )
        return (), 1
    if min(sizes) < 1:
        reader.problems.add("--num-layers", sum(sizes), f"leaves a stage of {pp} without layers", "use fewer stages")
        return (), 1
    pieces = tuple(size // vpp for size in sizes) * vpp
    pieces = _counted_ends(reader, pieces)
    return (() if len(set(pieces)) == 1 else pieces), vpp


COUNTED = (
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)  # fmt: skip
"""Arguments that count the layers of stages."""


def stand_in_layers(reader: Reader, remedy: str) -> None:
    """Put layers that all stages share where a file leaves their number to the model; what counts them is a problem."""
    for name in COUNTED:
        if reader.has(name) and reader.given.values[name] is not False:
            reader.fail(name, "counts layers, and the file does not say how many there are", remedy)
            del reader.given.values[name]
    pieces = reader.count("pipeline_model_parallel_size") * reader.count("num_virtual_stages_per_pipeline_rank")
    reader.given.values["num_layers"] = min(pieces, 10**6) * 1000


def _virtual(reader: Reader, sizes: list[int]) -> int:
    """Return the chunks of a stage; without a pipeline Megatron-LM has one model and no chunks."""
    derived = reader.given.values.get("virtual_pipeline_model_parallel_size")
    if isinstance(derived, int) and not reader.has("num_layers_per_virtual_pipeline_stage"):
        return derived
    if reader.has("num_virtual_stages_per_pipeline_rank"):
        return reader.count("num_virtual_stages_per_pipeline_rank")
    each = reader.whole("num_layers_per_virtual_pipeline_stage")
    if each is None:
        return 1
    name = "num_layers_per_virtual_pipeline_stage"
    if reader.has("decoder_first_pipeline_num_layers") or reader.has("decoder_last_pipeline_num_layers"):
        reader.fail(name, "needs equal stages", "use --num-virtual-stages-per-pipeline-rank")
        return 1
    if sizes[0] % each:
        reader.fail(name, f"must divide the {sizes[0]} layers of a stage", "give a divisor")
        return 1
    return sizes[0] // each


def _stages(reader: Reader, pp: int) -> list[int]:
    """Return the layers of each stage, with embedding and loss counted as layers where that is asked for."""
    total, names = num_layers(reader), ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    first, last = (reader.whole(name) for name in names)
    if first is None and last is None:
        total += sum(_ends(reader))
        if total % pp:
            rule = f"pipeline of {pp} stages must divide the {total} layers"
            reader.problems.add(
                "--pipeline-model-parallel-size", pp, rule, f"cut them otherwise, as {listed(total, pp, 'megatron')}"
            )
        return [total // pp] * pp
    middle = pp - (first is not None) - (last is not None)
    left = total - (first or 0) - (last or 0)
    if left < 0 or (left % middle if middle > 0 else left):
        rule = f"leaves {left} layers for {max(middle, 0)} other stages"
        reader.fail(names[0] if first is not None else names[1], rule, "change the first or the last stage")
        return [1] * pp
    inner = [left // middle] * middle if middle > 0 else []
    return [*([first] if first is not None else []), *inner, *([last] if last is not None else [])]


def _counted_ends(reader: Reader, pieces: tuple[int, ...]) -> tuple[int, ...]:
    """Return the pieces without the embedding and the loss that were counted as layers."""
    layers = list(pieces)
    first, last = _ends(reader)
    layers[0] -= first
    layers[-1] -= last
    return tuple(layers)


def _ends(reader: Reader) -> tuple[int, int]:
    """Return whether embedding and loss count as layers; DeepSpeed says so by the types of modules that it balances."""
    method = reader.word("pp_partition_method").strip("'\"").lower()
    if method and method not in ("uniform", "type:transformer", "type:transformer|embedding"):
        reader.assume(f"equal stages: --pp-partition-method {method} depends on the modules")
    if method == "type:transformer|embedding":
        return 1, 1
    return reader.flag("account_for_embedding_in_pipeline_split"), reader.flag("account_for_loss_in_pipeline_split")


def _listed(reader: Reader, pp: int, sizes: list[int], name: str) -> tuple[tuple[int, ...], int]:
    if not sizes or len(sizes) % pp:
        reader.fail(
            name, f"lists {len(sizes)} pieces, which {pp} stages do not share evenly", f"list a multiple of {pp}"
        )
        return (), 1
    if sum(sizes) != num_layers(reader):
        reader.fail(name, f"lists {sum(sizes)} layers of {num_layers(reader)}", "list them all")
    return (() if len(set(sizes)) == 1 else tuple(sizes)), len(sizes) // pp


def layout(reader: Reader) -> list[int]:
    """Return the layers of each piece of a layout such as "Et*3|(tt|)*6mL"."""
    text = reader.word("pipeline_model_parallel_layout").replace(",", "").replace(" ", "")
    spelled, at = "", 0
    for match in _TERM.finditer(text):
        if match.start() != at:
            break
        times = int((match[2] or match[4] or "1")[:6])
        term = _expanded(match[1]) if match[1] is not None else match[3]
        if len(spelled) + len(term) * times > MOST_SPELLED:
            break
        spelled += term * times
        at = match.end()
    if at != len(text):
        reader.fail("pipeline_model_parallel_layout", "is not a layout", 'write for example "Et*3|(tt|)*6L"')
        return []
    parts = spelled.split("|")
    _check_mtp(reader, parts)
    return [part.count("t") for part in parts]


def _check_mtp(reader: Reader, parts: list[str]) -> None:
    """Record layers of multi-token prediction that a layout leaves out, or has elsewhere than the last stage.

    Source: megatron/core/transformer/pipeline_parallel_layer_layout.py validate_layer_layout.
    """
    asked, listed = predictions(reader), sum(part.count("m") for part in parts)
    if asked != listed:
        rule = f"lists {listed} layers of multi-token prediction (m), and --mtp-num-layers is {asked}"
        reader.fail(
            "pipeline_model_parallel_layout", rule, f'write "{"m" * asked}L" at its end' if asked else "leave m out"
        )
    elif listed and "m" not in parts[-1]:
        reader.assume("multi-token prediction on the last stage: --pipeline-model-parallel-layout has it on another")


def _expanded(text: str) -> str:
    return re.sub(r"([EtmL|])\*([0-9]+)", lambda m: m[1] * min(int(m[2][:6]), MOST_LAYERS), text)


def _recompute(reader: Reader, vpp: int, pieces: tuple[int, ...]) -> tuple[Recompute, int, tuple[str, ...]]:
    """Return what is computed again, in how many layers of a stage, and the modules beside."""
    granularity = _granularity(reader)
    if not granularity:
        for name in ("recompute_modules", "recompute_method", "recompute_num_layers"):
            if reader.has(name):
                reader.fail(name, "has no effect without --recompute-granularity", "give it, or leave this out")
        return "none", 0, ()
    if granularity == "selective":
        return _selective(reader)
    if reader.has("recompute_modules"):
        reader.fail("recompute_modules", "belongs to selective recompute", "use --recompute-granularity selective")
    return _full(reader, vpp, pieces)


def _granularity(reader: Reader) -> str:
    """Return the kind of recompute; older switches say it in their own ways."""
    word = reader.word("recompute_granularity", "full", "selective")
    if reader.flag("recompute_activations"):
        if word == "full":
            reader.fail("recompute_granularity", "contradicts --recompute-activations, which is selective", "give one")
        return "selective"
    if reader.flag("moe_layer_recompute"):
        return word or "selective"
    if reader.flag("checkpoint_activations") or reader.has("activations_checkpoint_method"):
        return "full"
    return word


def _selective(reader: Reader) -> tuple[Recompute, int, tuple[str, ...]]:
    for name in ("recompute_method", "recompute_num_layers"):
        if reader.has(name):
            reader.fail(name, "belongs to full recompute", "use --recompute-granularity full, or leave it out")
    modules = list(reader.words("recompute_modules") or ("core_attn",))
    if reader.flag("moe_layer_recompute"):
        modules.append("moe")
    kept = tuple(dict.fromkeys(one for one in modules if one != "core_attn"))
    return ("selective" if "core_attn" in modules else "none"), 0, kept


def _full(reader: Reader, vpp: int, pieces: tuple[int, ...]) -> tuple[Recompute, int, tuple[str, ...]]:
    """Full recompute of every layer, of groups of layers ("uniform"), or of the first layers of a chunk ("block")."""
    old = reader.flag("checkpoint_activations") or reader.has("activations_checkpoint_method")
    name = "activations_checkpoint_method" if reader.has("activations_checkpoint_method") else "recompute_method"
    method = reader.word(name, "uniform", "block")
    layers_name = next(
        (n for n in ("activations_checkpoint_num_layers", "checkpoint_num_layers") if reader.has(n)),
        "recompute_num_layers",
    )
    number = reader.whole(layers_name)
    if not old and not method:
        reader.problems.add("--recompute-method", None, "is needed with full recompute", "use uniform or block")
    if not old and number is None:
        reader.problems.add("--recompute-num-layers", None, "is needed with full recompute", "use 1")
    if method != "block":
        if (number or 1) > 1:
            reader.assume(
                f"recompute layer by layer: {reader.option(layers_name)} {number} groups layers, and a plan cannot"
            )
        return "full", 0, ()
    stage = num_layers(reader) // reader.count("pipeline_model_parallel_size") if not pieces else max(pieces) * vpp
    layers = (number or 0) * vpp
    return ("none", 0, ()) if layers == 0 else ("full", 0 if layers >= stage else layers, ())


def _deepspeed(reader: Reader) -> Sharding:
    """Return the ZeRO stage; in bf16 without one DeepSpeed's optimizer shards its states all the same."""
    stage = reader.whole("zero_stage", 0) or 0
    if stage > 3:
        reader.fail("zero_stage", "must be 0, 1, 2 or 3", "use 3")
    if stage == 0 and reader.flag("bf16"):
        reader.assume("sharding zero1: DeepSpeed's optimizer for bf16 shards its states at stage 0 too")
        return "zero1"
    return ("none", "zero1", "zero2", "zero3")[min(stage, 3)]


def _sharding(reader: Reader, d: Degrees) -> tuple[Sharding, int]:
    """Return what data parallelism shards, and the size of a group where replicas have several."""
    copies = reader.count("num_distributed_optimizer_instances")
    if reader.flag("deepspeed"):
        return _deepspeed(reader), 1
    if reader.flag("use_torch_fsdp2"):
        if reader.flag("use_distributed_optimizer"):
            reader.fail("use_distributed_optimizer", "contradicts --use-torch-fsdp2", "give one of them")
        return "fsdp", 1
    if reader.flag("use_megatron_fsdp") or reader.flag("use_custom_fsdp"):
        kind = _FSDP[reader.word("data_parallel_sharding_strategy", *_FSDP)]
        if in_groups(kind) != kind and copies > 1 and d.dp:
            return in_groups(kind), max(d.dp // copies, 1)
        return kind, 1
    # dist_muon, the old name of muon with a distributed optimizer, shards as that does (validate_args)
    if not reader.flag("use_distributed_optimizer") and reader.word("optimizer") != "dist_muon":
        return "none", 1
    if copies > 1:
        reader.assume(f"messages of the distributed optimizer over all of dp: it has {copies} instances")
    return "distributed-optimizer", 1
