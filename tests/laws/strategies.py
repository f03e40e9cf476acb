"""Random legal training cases: a model, a cluster, a plan, a job and a stack that break no law of legality.

Each field of a plan is drawn among the values that keep it legal, in an order in which legality only narrows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from hypothesis import strategies as st

from shardwise.hardware import Cluster, Tier
from shardwise.models import (
    MLP,
    Attention,
    Block,
    GatedDelta,
    LatentAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    Mlstm,
    Model,
    MoE,
    RecurrentGate,
    Rwkv,
    ShortConv,
)
from shardwise.plans import (
    CONTEXT_KINDS,
    DTYPES,
    RECOMPUTES,
    SCHEDULES,
    SHARDINGS,
    Plan,
    Training,
    find_stack,
    precision_names,
    stack_names,
)
from shardwise.plans._laws import all_blocks, module_names
from shardwise.plans.laws import batch_problems, plan_problems
from shardwise.records import replace
from shardwise.training import TrainingCase

# Recipes whose products every device of the cases has, presets of widths and the user's apart.
_WIDE_RECIPES = tuple(
    name for name in precision_names() if name not in DTYPES and not name.startswith(("fp4", "fp8", "fp16"))
)

DEVICES = ("a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb")
POWERS = (1, 2, 4, 8, 16, 32)
GIB = 2.0**30
RECURRENT: tuple[Any, ...] = (
    Mamba1(inner=4096, state=16, conv=4, dt_rank=160),
    Mamba2(heads=32, head_dim=64, groups=8, state=128, conv=4),
    GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv=4),
    LightningAttention(heads=32, head_dim=96),
    ShortConv(width=2048, conv=3),
    RecurrentGate(width=2048, heads=16, conv=4),
    Rwkv(width=2048),
    Mlstm(heads=16, qk_dim=64, v_dim=128),
)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a law needs of its cases: () leaves a choice free, values restrict it."""

    layouts: tuple[str, ...] = ("1d", "summa")
    schedules: tuple[str, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1", "dualpipe")
    shardings: tuple[str, ...] = SHARDINGS
    recomputes: tuple[str, ...] = RECOMPUTES
    stacks: tuple[str, ...] = ()
    models: tuple[str, ...] = ("dense", "moe", "latent", "hybrid")
    modules: bool = True
    uneven: bool = True
    max_devices: int = 1024


ANY = Wanted()


@st.composite
def attentions(draw: st.DrawFn) -> Attention:
    """Draw softmax attention: MHA, GQA or MQA, with or without biases, norms and a window."""
    heads = draw(st.sampled_from((4, 8, 16, 32, 64)))
    kv_heads = draw(st.sampled_from([k for k in (1, 2, 4, 8, heads) if heads % k == 0]))
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from((64, 96, 128))),
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        qk_norm=draw(st.sampled_from(("none", "head"))),
        window=draw(st.sampled_from((0, 0, 512, 4096))),
        output_gate=draw(st.sampled_from((False, False, True))),
        viewed_keys=kv_heads == 1 and draw(st.booleans()),
        masked=draw(st.sampled_from((False, False, True))),
        narrow_softmax=draw(st.sampled_from((False, False, True))),
    )


@st.composite
def latents(draw: st.DrawFn) -> LatentAttention:
    """Draw multi-head latent attention."""
    return LatentAttention(
        heads=draw(st.sampled_from((16, 32, 64))),
        q_lora_rank=draw(st.sampled_from((0, 768))),
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )


@st.composite
def dense(draw: st.DrawFn) -> MLP:
    """Draw a dense feed-forward."""
    gated = draw(st.booleans())
    return MLP(ffn=256 * draw(st.integers(2, 48)), gated=gated, activation="silu" if gated else "gelu")


@st.composite
def experts(draw: st.DrawFn) -> MoE:
    """Draw a mixture of experts, with or without shared ones."""
    count = draw(st.sampled_from((8, 16, 64)))
    shared = MLP(ffn=256 * draw(st.integers(1, 8))) if draw(st.booleans()) else None
    top_k = draw(st.sampled_from((1, 2, 4, 8)))
    written = {name: draw(st.booleans()) for name in ("clamped", "scaled_gate", "chosen_softmax", "router_norm")}
    return MoE(experts=count, top_k=min(top_k, count), ffn=128 * draw(st.integers(2, 24)), shared=shared, **written)


@st.composite
def models(draw: st.DrawFn, kinds: tuple[str, ...] = ANY.models) -> Model:
    """Draw a model of one or two kinds of layer."""
    kind = draw(st.sampled_from(kinds))
    norm: Any = draw(st.sampled_from(("rmsnorm", "layernorm")))
    mixer: Any = draw(latents() if kind == "latent" else attentions())
    scaled = draw(st.booleans())
    plain = Block(mixers=(mixer,), feed_forward=draw(dense()), norm=norm, branch_scale=scaled)
    other = plain
    if kind in ("moe", "latent"):
        other = replace(plain, feed_forward=draw(experts()))
    elif kind == "hybrid":
        other = Block(
            mixers=(draw(st.sampled_from(RECURRENT)),),
            feed_forward=draw(st.sampled_from((None, plain.feed_forward))),
            norm=norm,
        )
    elif isinstance(mixer, Attention) and draw(st.booleans()):
        other = replace(plain, mixers=(replace(mixer, window=1024),))
    num_layers = draw(st.integers(1, 16))
    first = draw(st.integers(0, min(3, num_layers)))
    layers = (plain,) * first + (other,) * (num_layers - first)
    return Model(
        name=kind,
        family="random",
        hidden=512 * draw(st.integers(1, 16)),
        vocab=draw(st.sampled_from((32000, 50257, 128256))),
        layers=layers,
        tied=draw(st.booleans()),
        norm=norm,
        positions=draw(st.sampled_from((0, 0, 65536))),
        dropout=draw(st.booleans()),
        mtp=(other,) if kind == "latent" and draw(st.booleans()) else (),
    )


@cache
def cluster_of(device: str, num_devices: int, domain: int) -> Cluster:
    """Return a cluster whose fast domains have so many devices."""
    return Cluster.parse(f"{num_devices}x{device}", {"fast_domain": domain, "devices_per_node": min(8, domain)})


@st.composite
def clusters(draw: st.DrawFn, num_devices: int) -> Cluster:
    """Draw a cluster of so many devices, of one to three tiers."""
    device = draw(st.sampled_from(DEVICES))
    found = cluster_of(device, num_devices, draw(st.sampled_from((2, 4, 8, 16, 64))))
    first, last = found.tiers[0], found.tiers[-1]
    pod = first.size * 2
    if first is not last and pod < last.size and last.size % pod == 0 and draw(st.booleans()):
        middle = Tier(
            name="pod", size=pod, bytes_per_second=last.bytes_per_second, latency_seconds=2e-6, in_network=False
        )
        return found.with_tiers([first, middle, replace(last, bytes_per_second=last.bytes_per_second / 2)])
    return found


def _narrow(draw: st.DrawFn, model: Model, seq_len: int, plan: Plan, name: str, values: Any) -> Plan:
    """Return the plan with a field drawn among the values that keep it legal."""
    legal = [v for v in values if not plan_problems(model, replace(plan, **{name: v}), seq_len)]
    return replace(plan, **{name: draw(st.sampled_from(legal))})


def _stages(draw: st.DrawFn, model: Model, plan: Plan, wanted: Wanted) -> Plan:
    """Return the plan cut into stages: a schedule that its pipeline allows, even or uneven layers."""
    L = model.num_layers
    schedules = [s for s in wanted.schedules if s not in ("interleaved", "dualpipe") or L > 1]
    schedule: Any = draw(st.sampled_from(schedules))
    vpp = draw(st.sampled_from([v for v in (2, 3, 4) if 2 * v <= L] or [1])) if schedule == "interleaved" else 1
    if vpp == 1 and schedule == "interleaved":
        schedule = "1f1b"
    pps = [p for p in POWERS if p * vpp <= L and (schedule not in ("interleaved", "dualpipe") or p > 1)]
    pp = draw(st.sampled_from(pps))
    pieces = pp * vpp
    sizes: tuple[int, ...] = ()
    if L % pieces or (wanted.uneven and draw(st.booleans())):
        cuts = (
            sorted(draw(st.lists(st.integers(1, L - 1), min_size=pieces - 1, max_size=pieces - 1, unique=True)))
            if L > 1
            else []
        )
        sizes = tuple(b - a for a, b in zip((0, *cuts), (*cuts, L), strict=True))
    return replace(plan, pp=pp, vpp=vpp, schedule=schedule, stage_layers=sizes)


@st.composite
def plans(draw: st.DrawFn, model: Model, seq_len: int, wanted: Wanted = ANY) -> Plan:
    """Draw a legal plan of a model."""
    softmax = all(isinstance(m, Attention) for b in model.layers for m in b.mixers)
    flat = softmax and not any(isinstance(b.feed_forward, MoE) for b in model.layers)
    layouts = [x for x in wanted.layouts if x == "1d" or flat] or ["1d"]
    has_experts = any(isinstance(b.feed_forward, MoE) for b in model.layers)
    layout: Any = draw(st.sampled_from(layouts))
    parallel = layout == "1d" and (has_experts or draw(st.booleans()))
    plan = Plan(layout=layout, sequence_parallel=parallel, dp=draw(st.sampled_from((1, 2, 3, 4, 8))))

    def narrow(name: str, values: Any) -> None:
        nonlocal plan
        plan = _narrow(draw, model, seq_len, plan, name, values)

    narrow("tp", (1, 2, 4, 8))
    if layout == "summa":
        narrow("tp2", (1, 2, 4))
        narrow("panels", (1, 2, 4, 8))
    plan = replace(plan, cp_kind=draw(st.sampled_from(("ring", "all-gather", "all-to-all"))))
    narrow("cp", (1, 2, 4))
    if has_experts:
        narrow("etp", (1, 2))
        narrow("ep", POWERS)
    if plan.tp == 1:
        plan = replace(plan, sequence_parallel=False)
    plan = _stages(draw, model, plan, wanted)
    plan = replace(plan, sharding=draw(st.sampled_from(wanted.shardings)))
    if plan.sharding in ("hsdp", "shard-grad-op"):
        least = 2 if plan.sharding == "hsdp" else 1
        legal = [s for s in (1, 2, 3, 4, 8) if s >= least and plan.dp % s == 0] or [1]
        plan = replace(plan, shard=draw(st.sampled_from(legal)))
    plan = _recompute(draw, model, plan, wanted)
    return replace(plan, order=draw(st.sampled_from(ORDERS)), micro_batch=draw(st.sampled_from((1, 2, 4))))


ORDERS: tuple[Any, ...] = (
    ("tp", "tp2", "cp", "dp", "pp"),
    ("tp", "tp2", "cp", "pp", "dp"),
    ("cp", "tp", "tp2", "dp", "pp"),
    ("dp", "tp", "tp2", "cp", "pp"),
    ("pp", "tp", "tp2", "cp", "dp"),
)


def _recompute(draw: st.DrawFn, model: Model, plan: Plan, wanted: Wanted) -> Plan:
    mode: Any = draw(st.sampled_from(wanted.recomputes))
    named = (
        draw(st.lists(st.sampled_from(module_names(tuple(all_blocks(model)))), max_size=2, unique=True))
        if wanted.modules and mode in ("none", "selective")
        else []
    )
    plan = replace(plan, recompute=mode, modules=tuple(named))
    limited = wanted.modules and (mode != "none" or named) and draw(st.booleans())
    return replace(plan, recompute_layers=draw(st.integers(1, 4))) if limited else plan


def micro_batches(plan: Plan, drawn: int) -> int:
    """Return the number of micro-batches nearest to a drawn one that the plan's schedule can run."""
    if plan.schedule == "interleaved":
        return plan.pp * max(1, drawn // plan.pp)
    if plan.schedule == "dualpipe":
        return max(2 * plan.pp, drawn // 2 * 2)
    return drawn


@st.composite
def cases(draw: st.DrawFn, wanted: Wanted = ANY) -> TrainingCase:
    """Draw a complete case whose plan and batch break no law."""
    model = draw(models(wanted.models))
    seq_len = draw(st.sampled_from((512, 2048, 8192)))
    plan = draw(plans(model, seq_len, wanted).filter(lambda p: p.num_devices <= wanted.max_devices))
    count = micro_batches(plan, draw(st.integers(1, 24)))
    job = Training(
        seq_len=seq_len,
        global_batch=plan.dp * plan.micro_batch * count,
        precision=draw(st.sampled_from(("", *_WIDE_RECIPES))),
        optimizer=draw(st.sampled_from(("adam", "adam8bit", "adam4bit", "adafactor", "galore", "lion", "muon", "sgd"))),
        expert_imbalance=draw(st.sampled_from((1.0, 1.5))),
        capacity_factor=draw(st.sampled_from((0.0, 1.25))),
    )
    stack = find_stack(draw(st.sampled_from(wanted.stacks or stack_names())))
    return TrainingCase(
        model=model,
        cluster=draw(clusters(plan.num_devices)),
        job=job,
        stack=stack,
        plan=plan,
        overlap=draw(st.booleans()),
    )


def problems_of(case: TrainingCase) -> tuple[object, ...]:
    """Return every law that a case breaks."""
    return (*plan_problems(case.model, case.plan, case.job.seq_len), *batch_problems(case.plan, case.job.global_batch))


def refilled(case: TrainingCase, **changes: Any) -> TrainingCase:
    """Return the case under a changed plan, with a cluster of the same device and domains that it fills."""
    plan = replace(case.plan, **changes)
    count = micro_batches(plan, case.job.global_batch // (case.plan.dp * case.plan.micro_batch))
    job = replace(case.job, global_batch=plan.dp * plan.micro_batch * count)
    domain = 2 ** (case.cluster.tiers[0].size.bit_length() - 1)
    cluster = cluster_of(case.cluster.device.name, plan.num_devices, domain)
    return replace(case, plan=plan, job=job, cluster=cluster)


def random_plans(model: Model, num_devices: int, job: Training, count: int) -> list[Plan]:
    """Return so many legal plans of a model that fill the devices, always the same ones, of two dozen structures."""
    drawn, found = Random(count), set[Plan]()
    structures = [_random_structure(drawn) for _ in range(24)]
    while len(found) < count:
        plan = drawn.choice(structures)
        tp, cp, pp = (drawn.choice(x) for x in ((1, 2, 4, 8), (1, 1, 2, 4), (1, 1, 2, 4, 8)))
        flat = plan.layout == "summa"
        tp2 = drawn.choice((1, 2)) if flat else 1
        plan = replace(
            plan,
            tp=max(tp, 2) if plan.sequence_parallel else tp,
            tp2=tp2,
            cp=cp,
            pp=pp,
            dp=num_devices // (tp * tp2 * cp * pp),
            vpp=drawn.choice((2, 4)) if plan.schedule == "interleaved" else 1,
            panels=drawn.choice((1, 2, 4)) if flat else 1,
            ep=drawn.choice((1, 1, 2, 4, 8)),
            etp=drawn.choice((1, 1, 2)),
            micro_batch=drawn.choice((1, 2)),
            recompute_layers=drawn.choice((1, 3)) if plan.recompute_layers else 0,
            order=drawn.choice(ORDERS),
        )
        if drawn.random() < 0.3:
            plan = replace(plan, stage_layers=_random_stages(drawn, model.num_layers, plan.pp * plan.vpp))
        fills = plan.num_devices == num_devices
        if fills and not plan_problems(model, plan, job.seq_len) and not batch_problems(plan, job.global_batch):
            found.add(plan)
    return sorted(found, key=repr)


def _random_structure(drawn: Random) -> Plan:
    """Return a plan with the choices that a column of plans has in common."""
    flat, sharding, mode = drawn.random() < 0.2, drawn.choice(SHARDINGS), drawn.choice(RECOMPUTES)
    modules = drawn.choice(((), (), ("layernorm",)))
    return Plan(
        layout="summa" if flat else "1d",
        sequence_parallel=not flat and drawn.random() < 0.7,
        cp_kind=drawn.choice(CONTEXT_KINDS),  # type: ignore[arg-type]
        schedule=drawn.choice(SCHEDULES),  # type: ignore[arg-type]
        sharding=sharding,  # type: ignore[arg-type]
        shard=2 if sharding == "hsdp" else 1,
        recompute=mode,  # type: ignore[arg-type]
        modules=modules,
        recompute_layers=drawn.choice((0, 1)) if mode != "none" or modules else 0,
    )


def _random_stages(drawn: Random, layers: int, pieces: int) -> tuple[int, ...]:
    if pieces > layers:
        return ()
    cuts = sorted(drawn.sample(range(1, layers), pieces - 1))
    return tuple(b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True))
