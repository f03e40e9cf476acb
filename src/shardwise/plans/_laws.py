"""The laws between a plan and a model: what each axis must divide, and what the stages must hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shardwise.errors import Problems
from shardwise.models import Block, Model
from shardwise.plans._plan import Plan
from shardwise.plans.partition import listed
from shardwise.plans.schedules import find_rules
from shardwise.records import replace


def all_blocks(model: Model) -> Iterator[Block]:
    """Yield every distinct block of a model, those inside others and multi-token-prediction layers included."""
    stack = [*model.kinds, *dict.fromkeys(model.mtp)]
    while stack:
        block = stack.pop()
        yield block
        stack += block.also


def _split_sizes(blocks: Sequence[Block]) -> dict[str, list[int]]:
    """Return everything that tp must divide, by what it is."""
    sizes_of: dict[str, list[int]] = {}
    for block in blocks:
        for what, size in block.splits():
            sizes_of.setdefault(what, []).append(size)
    return {what: list(dict.fromkeys(sizes)) for what, sizes in sizes_of.items()}


def tensor_laws(model: Model, blocks: Sequence[Block], plan: Plan, problems: Problems) -> None:
    """Record what tp does not divide: heads, widths, and key-value heads that it cannot replicate evenly.

    Query heads: vllm config/model.py verify_with_parallel_config, sglang models/llama.py, tensorrt_llm
    _torch/modules/attention.py (`num_heads % tp_size`), megatron/core/transformer/transformer_config.py.
    """
    sizes = [(what, n) for what, some in _split_sizes(blocks).items() for n in some]
    groups = {n for b in blocks for m in b.mixers for n in m.replicates()}

    def legal() -> str:
        whole = divisors(max((n for _, n in sizes), default=1), 1024)
        good = [t for t in whole if all(n % t == 0 for _, n in sizes)]
        return one_of(t for t in good if all(not k % t or not t % k for k in groups))

    for what, n in sizes:
        if n % plan.tp:
            problems.add("tp", plan.tp, f"must divide the {n} {what} of {model.name}", legal())
    for k in sorted(groups):
        if k % plan.tp and plan.tp % k:
            problems.add("tp", plan.tp, f"must divide the {k} key-value heads or be a multiple of them", legal())


def expert_laws(model: Model, blocks: Sequence[Block], plan: Plan, problems: Problems) -> None:
    """Record what the expert axes do not divide, and experts that every tensor-parallel rank would route to."""
    moes = list(dict.fromkeys(b.experts for b in blocks if b.experts is not None))
    if not moes:
        for name in ("ep", "etp"):
            if getattr(plan, name) != 1:
                problems.add(name, getattr(plan, name), f"needs experts, and {model.name} has none", "use 1")
        return
    for m in moes:
        if m.experts % plan.ep:
            problems.add("ep", plan.ep, f"must divide the {m.experts} experts", one_of(divisors(m.experts)))
        if m.ffn % plan.etp:
            problems.add("etp", plan.etp, f"must divide the expert width {m.ffn}", one_of(divisors(m.ffn, 64)))
    stage = plan.stage_devices
    if stage % (plan.ep * plan.etp):
        good = [e for e in divisors(moes[0].experts) if stage % (e * plan.etp) == 0]
        rule = f"ep x etp = {plan.ep * plan.etp} must divide tp x cp x dp = {stage}"
        problems.add("ep", plan.ep, rule, one_of(good) if good else "use ep 1 with etp 1")
    elif plan.shard > 1 and (plan.expert_dp * plan.shard) % plan.dp and plan.expert_dp * plan.shard > plan.dp:
        share = plan.expert_dp * plan.shard / plan.dp
        good = [s for s in divisors(plan.dp) if s > 1 and (plan.expert_dp * s) % plan.dp == 0]
        rule = f"would shard each expert over {share:g} of its {plan.expert_dp} copies"
        problems.add("shard", plan.shard, rule, one_of(good) if good else "use sharding fsdp with shard 1")
    if plan.tp > 1 and not plan.sequence_parallel and plan.layout == "1d":
        rule = (
            "experts under tensor parallelism need sequence parallelism, or every tp rank would route all "
            "tokens (Megatron-LM arguments.py)"
        )
        problems.add("sequence_parallel", False, rule, "use true, or tp 1")


def _whole_stages(layers: int, plan: Plan) -> list[int]:
    """Return the numbers of stages that cut the layers evenly under the plan's chunks and schedule."""
    paired = 2 if find_rules(plan.schedule).even_stages else 1
    least = 2 if plan.vpp > 1 else 1
    return [p for p in divisors(layers) if layers % (p * plan.vpp) == 0 and p >= least and p % paired == 0]


def _fewer_pieces(layers: int, plan: Plan) -> str:
    """Return how a pipeline of more pieces than layers is cut, evenly where it can be and its stages kept if so."""
    chunks = [v for v in divisors(layers) if v > 1] if plan.vpp > 1 else [1]
    pairs = [(p, v) for v in chunks for p in _whole_stages(layers, replace(plan, vpp=v))]
    stages, each = min(pairs, key=lambda pair: (pair[0] != plan.pp, -pair[0] * pair[1]), default=(2, 2))
    fields = {"pp": stages, "vpp": each, "stage_layers": "" if pairs else listed(layers, stages * each)}
    return " with ".join(f"{name} {value}" for name, value in fields.items() if value not in ("", getattr(plan, name)))


def pipeline_laws(model: Model, plan: Plan, problems: Problems) -> None:
    """Record layers that do not make the stages, and schedules that do not suit them."""
    L, pieces = model.num_layers, plan.pp * plan.vpp
    # Where most pieces would hold no layer, a list of all says nothing, and may be longer than memory.
    cut = listed(L, pieces) if pieces <= 2 * L else ""
    even = f"for example {cut}" if cut else f"use {_fewer_pieces(L, plan)}"
    if plan.stage_layers:
        if len(plan.stage_layers) != pieces:
            rule = f"must list one number for each of pp x vpp = {pieces} pieces"
            problems.add("stage_layers", plan.stage_layers, rule, even)
        elif sum(plan.stage_layers) != L:
            problems.add("stage_layers", plan.stage_layers, f"must add up to the {L} layers of {model.name}", even)
    elif L % pieces:
        good = _whole_stages(L, plan)
        rule = f"pp x vpp = {pieces} must divide the {L} layers of {model.name}"
        remedies = [*([one_of(good)] if good else []), *([f"stage_layers {cut}"] if cut else [])]
        remedy = ", or ".join(remedies) or _fewer_pieces(L, plan)
        problems.add("pp", plan.pp, rule, remedy if good else f"use {remedy}")
    if plan.vpp > 1 and plan.pp == 1:
        problems.add("vpp", plan.vpp, "needs a pipeline", "use vpp 1 with schedule 1f1b, or pp above 1")
    _schedule_laws(plan, problems)


def _schedule_laws(plan: Plan, problems: Problems) -> None:
    """Record pieces a stage that the schedule does not run, and stages that it cannot pair."""
    rules = find_rules(plan.schedule)
    least, most = rules.chunks
    if most and plan.vpp > most:
        runs = "one chunk a stage" if most == 1 else f"{most} chunks a stage"
        rule = f"runs {runs}, and vpp is {plan.vpp}"
        problems.add("schedule", plan.schedule, rule, f"use interleaved, or vpp {most}")
    elif plan.vpp < least:
        several, remedy = (f"{least}", f"vpp {least}") if most else ("several", f"vpp of {least} or more")
        problems.add("schedule", plan.schedule, f"needs {several} chunks a stage", f"use 1f1b, or {remedy}")
    if rules.even_stages and plan.pp % 2:
        rule = "DualPipe pairs stages and needs an even number of them"
        problems.add("pp", plan.pp, rule, "use schedule 1f1b, or an even pp")


# Megatron-LM core/transformer/transformer_config.py, recompute_modules, and what a block must have to run one again.
MODULE_NAMES = ("core_attn", "mlp", "moe", "shared_experts", "moe_act", "mlp_act", "layernorm", "mla_up_proj")


def module_names(blocks: Sequence[Block]) -> tuple[str, ...]:
    """Return the modules that some block has and that can be recomputed by name."""
    has = {name for block in blocks for name in block.modules()}
    return tuple(name for name in MODULE_NAMES if name in has)


def module_laws(model: Model, blocks: Sequence[Block], plan: Plan, problems: Problems) -> None:
    """Record modules to recompute that the model does not have, and a limit without anything to recompute."""
    if plan.recompute_layers and plan.recompute == "none" and not plan.modules:
        rule = "limits a recompute that is not asked for"
        problems.add("recompute_layers", plan.recompute_layers, rule, "use 0, or ask for recompute")
    if not plan.modules:
        return
    known = module_names(blocks)
    for name in plan.modules:
        if name not in known:
            problems.add("modules", name, f"is not a module of {model.name}", one_of(known))


def splits_sequence(plan: Plan, seq_len: int) -> bool:
    """Return whether sequence parallelism, where a plan has it, divides the tokens of a rank.

    >>> splits_sequence(Plan(tp=2), 197), splits_sequence(Plan(tp=2, sequence_parallel=False), 197)
    (False, True)
    """
    parted = plan.sequence_parallel and plan.tp > 1 and plan.layout == "1d"
    return not parted or (seq_len // plan.cp) % plan.tp == 0


def context_laws(blocks: Sequence[Block], plan: Plan, seq_len: int, problems: Problems) -> None:
    """Record a sequence or heads that context and sequence parallelism do not divide."""
    around = plan.cp_kind != "all-to-all"
    zigzag = 2 * plan.cp if plan.cp > 1 and around else plan.cp
    if seq_len % zigzag:
        cause = "2 x cp, for causal balance" if zigzag > plan.cp else "cp"
        rule = f"the {seq_len} tokens of a sequence must divide into {zigzag} chunks ({cause})"
        good = [c for c in divisors(seq_len, 4096) if c == 1 or not around or seq_len % (2 * c) == 0]
        problems.add("cp", plan.cp, rule, one_of(good))
    elif not splits_sequence(plan, seq_len):
        rule = f"sequence parallelism divides the {seq_len // plan.cp} tokens of a rank"
        # Experts under tensor parallelism cannot do without it.
        without = "" if any(b.experts for b in blocks) else ", or sequence_parallel false"
        problems.add("tp", plan.tp, rule, one_of(divisors(seq_len // plan.cp, 1024)) + without)
    if plan.cp == 1 or around:
        return
    heads = {n for b in blocks for m in b.mixers if m.attends for _, n in m.splits()}
    for n in sorted(heads):
        if n % (plan.tp * plan.cp):
            good = [c for c in divisors(n) if all(h % (plan.tp * c) == 0 for h in heads)]
            rule = f"all-to-all divides the {n} query heads by tp x cp = {plan.tp * plan.cp}"
            problems.add("cp", plan.cp, rule, one_of(good))


def summa_laws(model: Model, blocks: Sequence[Block], plan: Plan, seq_len: int, problems: Problems) -> None:
    """Record fields of the two-dimensional layout without it, and what its grid does not divide."""
    if plan.layout != "summa":
        if plan.tp2 != 1:
            problems.add("tp2", plan.tp2, "is the second axis of the two-dimensional layout", "use 1, or layout summa")
        if plan.panels != 1:
            problems.add("panels", plan.panels, "belong to the two-dimensional layout", "use 1, or layout summa")
        return
    if not all(m.two_dimensional for b in blocks for m in b.mixers) or any(b.experts for b in blocks):
        rule = f"is built for attention and dense feed-forwards, which {model.name} does not have alone"
        problems.add("layout", plan.layout, rule, "use layout 1d with tp2 1 with panels 1")
    if plan.sequence_parallel and plan.tp > 1:
        rule = "has no meaning in the two-dimensional layout, which splits every tensor already"
        problems.add("sequence_parallel", True, rule, "use false")
    grid, D = plan.tp * plan.tp2, model.hidden
    if D % plan.tp:
        problems.add("tp", plan.tp, f"must divide the hidden width {D}", one_of(divisors(D, 1024)))
    elif D % grid:
        problems.add(
            "tp2", plan.tp2, f"tp x tp2 must divide the hidden width {D}", one_of(divisors(D // plan.tp, 1024))
        )
    elif D % plan.panels:
        problems.add("panels", plan.panels, f"must divide the hidden width {D}", one_of(divisors(D, 64)))
    if seq_len % (plan.tp2 * plan.cp):
        good = [t for t in divisors(seq_len, 1024) if seq_len % (t * plan.cp) == 0 and D % (plan.tp * t) == 0]
        problems.add("tp2", plan.tp2, f"splits the {seq_len} tokens of a sequence", one_of(good))


def sharding_laws(plan: Plan, problems: Problems) -> None:
    """Record a sharding group that the replicas do not hold, or that nothing uses."""
    rules = plan.sharding_rules
    if rules.groups == "all":
        if plan.shard != 1:
            rule = "is the sharding group of hsdp, shard-grad-op and a sharded optimizer alone"
            problems.add("shard", plan.shard, rule, "use 1, or sharding hsdp")
        return
    good = divisors(plan.dp)[1:] or [1]
    if plan.dp % plan.shard:
        problems.add("shard", plan.shard, f"must divide dp = {plan.dp}", one_of(good))
    elif rules.hybrid and plan.shard == 1 and plan.dp > 1:
        problems.add("shard", plan.shard, "is the size of a sharding group, which hsdp needs", one_of(good))


def offload_laws(plan: Plan, problems: Problems) -> None:
    """Record copies on the host that others, which stay on the device, would need there.

    Gradients go where the optimizer reads them (deepspeed/runtime/zero/stage_1_and_2.py cpu_offload); parameters are
    copied unit by unit as sharded ones are gathered (torch.distributed.fsdp CPUOffloadPolicy; ZeRO-3 offload_param).
    """
    offloads = ",".join(plan.offload)
    if "gradients" in plan.offload and "optimizer" not in plan.offload:
        problems.add("offload", offloads, "sends gradients where no optimizer is", f"use {offloads},optimizer")
    if "parameters" in plan.offload and not plan.sharding_rules.weights:
        rule = f"brings parameters in unit by unit, which sharding {plan.sharding} does not"
        problems.add("offload", offloads, rule, "use sharding fsdp or zero3, or leave parameters out")


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
