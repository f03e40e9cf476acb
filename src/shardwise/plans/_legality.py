"""The laws of legality: every way a plan can be impossible, all checked at once, each with the values that would do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwise.errors import Problem, Problems
from shardwise.models import (
    MLP,
    Attention,
    Block,
    GatedDelta,
    LatentAttention,
    Mamba1,
    Mamba2,
    Mixer,
    Mlstm,
    Model,
    MoE,
    RecurrentGate,
    Rwkv,
    ShortConv,
)
from shardwise.plans._plan import (
    AXES,
    CONTEXT_KINDS,
    LAYOUTS,
    RECOMPUTES,
    SCHEDULES,
    SHARDINGS,
    Plan,
)

MODULE_NAMES = ("core_attn", "mlp", "moe", "shared_experts", "moe_act", "layernorm", "mla_up_proj")
_COUNTS = ("tp", "tp2", "cp", "pp", "vpp", "dp", "ep", "etp", "micro_batch", "panels", "shard")
_CHOICES = {
    "layout": LAYOUTS,
    "cp_kind": CONTEXT_KINDS,
    "schedule": SCHEDULES,
    "sharding": SHARDINGS,
    "recompute": RECOMPUTES,
}


def divisors(n: int, limit: int = 10**9) -> list[int]:
    """Return the divisors of n up to a limit, in order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return [d for d in (*small, *(n // i for i in reversed(small) if i * i != n)) if d <= limit]


def one_of(values: Iterable[object], shown: int = 12) -> str:
    """Return a remedy that lists legal values.

    >>> one_of([1, 2, 4])
    'use one of 1, 2, 4'
    """
    items = [str(v) for v in values]
    if not items:
        return "no value is legal here"
    more = ", ..." if len(items) > shown else ""
    return ("use " if len(items) == 1 else "use one of ") + ", ".join(items[:shown]) + more


def is_count(value: object) -> bool:
    """Return whether a value is a whole number of at least one; True and 1.0 are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def field_problems(plan: Plan) -> Problems:
    """Return what is wrong with the fields of a plan taken one by one."""
    found = Problems()
    for name in _COUNTS:
        if not is_count(getattr(plan, name)):
            found.add(name, getattr(plan, name), "must be a whole number of at least 1", "use 1 to leave it out")
    for name, allowed in _CHOICES.items():
        if getattr(plan, name) not in allowed:
            found.add(name, getattr(plan, name), "is not a known choice", one_of(allowed))
    for name in plan.modules:
        if name not in MODULE_NAMES:
            found.add("modules", name, "is not a module that can be recomputed", one_of(MODULE_NAMES))
    if (
        not isinstance(plan.recompute_layers, int)
        or isinstance(plan.recompute_layers, bool)
        or plan.recompute_layers < 0
    ):
        found.add(
            "recompute_layers", plan.recompute_layers, "must be a whole number of layers", "use 0 for all of a stage"
        )
    if sorted(plan.order) != sorted(AXES):
        found.add("order", ",".join(map(str, plan.order)), "must name every axis once", f"for example {','.join(AXES)}")
    if not isinstance(plan.sequence_parallel, bool):
        found.add("sequence_parallel", plan.sequence_parallel, "must be true or false", "use true or false")
    return found


def heads_of(mixer: Mixer) -> Iterator[tuple[str, int]]:
    """Yield (what, how many) of everything in a mixer that tensor parallelism splits."""
    if isinstance(mixer, Attention | LatentAttention):
        yield "query heads", mixer.heads
    elif isinstance(mixer, Mamba2):
        yield "state-space heads", mixer.heads
    elif isinstance(mixer, GatedDelta):
        yield "linear-attention key heads", mixer.key_heads
        yield "linear-attention value heads", mixer.value_heads
    elif isinstance(mixer, Mamba1):
        yield "inner width", mixer.inner
    elif isinstance(mixer, ShortConv | Rwkv):
        yield "mixer width", mixer.width
    elif isinstance(mixer, RecurrentGate | Mlstm):
        yield "recurrent heads", mixer.heads


def _split_sizes(model: Model) -> dict[str, int]:
    """Return everything that tp must divide, by what it is."""
    found: dict[str, int] = {}
    for block in all_blocks(model):
        for mixer in block.mixers:
            found.update(dict(heads_of(mixer)))
        f = block.feed_forward
        if isinstance(f, MLP):
            found["ffn width"] = f.ffn
        elif isinstance(f, MoE) and f.shared is not None:
            found["shared expert width"] = f.shared.ffn
    return found


def all_blocks(model: Model) -> Iterator[Block]:
    """Yield every distinct block of a model, those inside others and multi-token-prediction layers included."""
    stack = [*model.kinds, *dict.fromkeys(model.mtp)]
    while stack:
        block = stack.pop()
        yield block
        stack += block.also


def _tensor(model: Model, plan: Plan, found: Problems) -> None:
    sizes = _split_sizes(model)
    good = [t for t in divisors(max(sizes.values(), default=1), 1024) if all(n % t == 0 for n in sizes.values())]
    for what, n in sizes.items():
        if n % plan.tp:
            found.add("tp", plan.tp, f"must divide the {n} {what} of {model.name}", one_of(good))
    for block in all_blocks(model):
        for mixer in block.mixers:
            if isinstance(mixer, Attention) and mixer.kv_heads % plan.tp and plan.tp % mixer.kv_heads:
                legal = [t for t in good if not mixer.kv_heads % t or not t % mixer.kv_heads]
                found.add(
                    "tp",
                    plan.tp,
                    f"must divide the {mixer.kv_heads} key-value heads or be a multiple of them",
                    one_of(legal),
                )


def _experts(model: Model, plan: Plan, found: Problems) -> None:
    moes = [b.feed_forward for b in all_blocks(model) if isinstance(b.feed_forward, MoE)]
    if not moes:
        for name in ("ep", "etp"):
            if getattr(plan, name) != 1:
                found.add(name, getattr(plan, name), f"needs experts, and {model.name} has none", "use 1")
        return
    for m in moes:
        if m.experts % plan.ep:
            found.add("ep", plan.ep, f"must divide the {m.experts} experts", one_of(divisors(m.experts)))
        if m.ffn % plan.etp:
            found.add("etp", plan.etp, f"must divide the expert width {m.ffn}", one_of(divisors(m.ffn, 64)))
    stage = plan.stage_devices
    if stage % (plan.ep * plan.etp):
        legal = [e for e in divisors(moes[0].experts) if stage % (e * plan.etp) == 0]
        found.add("ep", plan.ep, f"ep x etp = {plan.ep * plan.etp} must divide tp x cp x dp = {stage}", one_of(legal))
    if plan.tp > 1 and not plan.sequence_parallel and plan.layout == "1d":
        rule = (
            "experts under tensor parallelism need sequence parallelism, or every tp rank would route all "
            "tokens (Megatron-LM arguments.py)"
        )
        found.add("sequence_parallel", False, rule, "use sequence parallelism, or tp 1")


def _pipeline(model: Model, plan: Plan, found: Problems) -> None:
    L, pieces = model.num_layers, plan.pp * plan.vpp
    if plan.stage_layers:
        if len(plan.stage_layers) != pieces:
            found.add(
                "stage_layers",
                plan.stage_layers,
                f"must list one number for each of pp x vpp = {pieces} pieces",
                f"list {pieces} numbers",
            )
        if sum(plan.stage_layers) != L or min(plan.stage_layers) < 0:
            found.add(
                "stage_layers",
                plan.stage_layers,
                f"must add up to the {L} layers of {model.name}",
                f"for example {_even(L, pieces)}",
            )
    elif pieces > L:
        found.add("pp", plan.pp, f"pp x vpp = {pieces} exceeds the {L} layers of {model.name}", one_of(divisors(L)))
    elif L % pieces:
        rule = f"pp x vpp = {pieces} must divide the {L} layers of {model.name}"
        found.add(
            "pp",
            plan.pp,
            rule,
            f"{one_of(d for d in divisors(L) if d % plan.vpp == 0)}, or state stage_layers, for example "
            f"{_even(L, pieces)}",
        )
    if plan.vpp > 1 and plan.pp == 1:
        found.add("vpp", plan.vpp, "needs a pipeline", "use pp above 1, or vpp 1")
    if plan.vpp > 1 and plan.schedule != "interleaved":
        found.add(
            "schedule",
            plan.schedule,
            f"runs one chunk a stage, and vpp is {plan.vpp}",
            "use schedule interleaved, or vpp 1",
        )
    if plan.schedule == "interleaved" and plan.vpp == 1:
        found.add("schedule", plan.schedule, "needs several chunks a stage", "use vpp of 2 or more, or schedule 1f1b")
    if plan.schedule == "dualpipe" and plan.pp % 2:
        found.add(
            "pp", plan.pp, "DualPipe pairs stages and needs an even number of them", "use an even pp, or schedule 1f1b"
        )
    if plan.recompute_layers and plan.recompute == "none" and not plan.modules:
        found.add(
            "recompute_layers",
            plan.recompute_layers,
            "limits a recompute that is not asked for",
            "give recompute full, or 0 layers",
        )


def _even(layers: int, pieces: int) -> str:
    each, more = divmod(layers, pieces)
    return ",".join(str(each + (i < more)) for i in range(pieces)) if pieces <= 32 else "a list"


def _context(model: Model, plan: Plan, seq_len: int, found: Problems) -> None:
    zigzag = 2 * plan.cp if plan.cp > 1 and plan.cp_kind != "all-to-all" else plan.cp
    if seq_len % zigzag:
        cause = "2 x cp, for causal balance" if zigzag > plan.cp else "cp"
        rule = f"the {seq_len} tokens of a sequence must divide into {zigzag} chunks ({cause})"
        found.add("cp", plan.cp, rule, one_of(c for c in divisors(seq_len, 4096) if seq_len % (2 * c) == 0))
    elif plan.sequence_parallel and plan.tp > 1 and plan.layout == "1d" and (seq_len // plan.cp) % plan.tp:
        found.add(
            "tp",
            plan.tp,
            f"sequence parallelism divides the {seq_len // plan.cp} tokens of a rank",
            one_of(divisors(seq_len // plan.cp, 1024)),
        )
    if plan.cp > 1 and plan.cp_kind == "all-to-all":
        for block in all_blocks(model):
            for mixer in block.mixers:
                heads = mixer.heads if isinstance(mixer, Attention | LatentAttention) else 0
                if heads and heads % (plan.tp * plan.cp):
                    legal = [c for c in divisors(heads) if heads % (plan.tp * c) == 0]
                    found.add(
                        "cp",
                        plan.cp,
                        f"all-to-all divides the {heads} query heads by tp x cp = {plan.tp * plan.cp}",
                        one_of(legal),
                    )


def _summa(model: Model, plan: Plan, seq_len: int, found: Problems) -> None:
    if plan.layout != "summa":
        if plan.tp2 != 1:
            found.add("tp2", plan.tp2, "is the second axis of the two-dimensional layout", "use layout summa, or tp2 1")
        if plan.panels != 1:
            found.add("panels", plan.panels, "belong to the two-dimensional layout", "use layout summa, or 1 panel")
        return
    for block in all_blocks(model):
        if not all(isinstance(x, Attention) for x in block.mixers) or isinstance(block.feed_forward, MoE):
            found.add(
                "layout",
                plan.layout,
                f"is built for attention and dense feed-forwards, which {model.name} does not have alone",
                "use layout 1d",
            )
            break
    if plan.sequence_parallel and plan.tp > 1:
        found.add(
            "sequence_parallel",
            True,
            "has no meaning in the two-dimensional layout, which splits every tensor already",
            "use false",
        )
    if model.hidden % (plan.tp * plan.tp2):
        found.add(
            "tp2",
            plan.tp2,
            f"tp x tp2 must divide the hidden width {model.hidden}",
            one_of(divisors(model.hidden // plan.tp, 1024) if model.hidden % plan.tp == 0 else []),
        )
    elif (model.hidden // (plan.tp * plan.tp2)) % plan.panels and model.hidden % plan.panels:
        found.add(
            "panels", plan.panels, f"must divide the hidden width {model.hidden}", one_of(divisors(model.hidden, 64))
        )
    if seq_len % (plan.tp2 * plan.cp):
        found.add("tp2", plan.tp2, f"splits the {seq_len} tokens of a sequence", one_of(divisors(seq_len, 1024)))


def _sharding(plan: Plan, found: Problems) -> None:
    if plan.sharding == "hsdp":
        if plan.dp % plan.shard:
            found.add("shard", plan.shard, f"must divide dp = {plan.dp}", one_of(divisors(plan.dp)))
        if plan.shard == 1 and plan.dp > 1:
            found.add(
                "shard", plan.shard, "is the size of a sharding group, which hsdp needs", one_of(divisors(plan.dp)[1:])
            )
    elif plan.shard != 1:
        found.add("shard", plan.shard, "is the sharding group of hsdp alone", "use sharding hsdp, or leave it out")


def plan_problems(model: Model, plan: Plan, seq_len: int) -> tuple[Problem, ...]:
    """Return every law that a plan breaks for a model and a sequence length; empty when it is legal.

    A length of 0 leaves the laws of the sequence out.
    """
    found = field_problems(plan)
    if found.items:
        return tuple(found.items)
    _tensor(model, plan, found)
    _experts(model, plan, found)
    _pipeline(model, plan, found)
    if seq_len:
        _context(model, plan, seq_len, found)
    _summa(model, plan, seq_len, found)
    _sharding(plan, found)
    return tuple(dict.fromkeys(found.items))


def batch_problems(plan: Plan, global_batch: int) -> tuple[Problem, ...]:
    """Return what is wrong between a plan and a global batch."""
    found = Problems()
    if not is_count(global_batch):
        found.add(
            "global_batch",
            global_batch,
            "must be a whole number of sequences of at least 1",
            f"use a multiple of {plan.dp * plan.micro_batch}",
        )
    elif global_batch % (plan.dp * plan.micro_batch):
        unit = plan.dp * plan.micro_batch
        low = max(unit, global_batch // unit * unit)
        found.add(
            "global_batch",
            global_batch,
            f"must be a multiple of dp x micro_batch = {unit}",
            one_of(sorted({low, low + unit})),
        )
    else:
        micro = global_batch // (plan.dp * plan.micro_batch)
        if plan.schedule == "interleaved" and micro % plan.pp:
            found.add(
                "global_batch",
                global_batch,
                f"makes {micro} micro-batches, and the interleaved schedule needs a multiple of pp = {plan.pp}",
                f"use for example {max(1, -(-micro // plan.pp)) * plan.pp * plan.dp * plan.micro_batch}, "
                "or schedule 1f1b",
            )
        if plan.schedule == "dualpipe" and micro % 2:
            found.add(
                "global_batch",
                global_batch,
                f"makes {micro} micro-batches, and DualPipe feeds both ends equally",
                "use an even number of micro-batches",
            )
    return tuple(found.items)
