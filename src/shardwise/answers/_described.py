"""Plans and deployments in words, and where their axes sit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardwise.plans import DEGREES, Plan, Workload, group_shapes
from shardwise.units import counted, show_seconds

if TYPE_CHECKING:
    from shardwise.plans import Training
    from shardwise.search import FrontPlan
    from shardwise.serving import InferReport
    from shardwise.training import TrainReport


def describe(plan: Plan, policy: str = "") -> str:
    """Return the degrees of a plan that are above one, and what else stands out, with a policy of its checkpoints.

    >>> describe(Plan(tp=8, pp=4, dp=2)), describe(Plan(dp=2, recompute="full"), "matmuls")
    ('tp 8, pp 4, dp 2', 'dp 2, recompute full keeping matmuls')
    """
    kept = f" keeping {policy}" if policy and plan.recompute == "full" else ""
    words = [f"{a} {getattr(plan, a)}" for a in DEGREES if getattr(plan, a) > 1]
    words += [plan.layout] if plan.layout != "1d" else []
    words += [plan.sharding] if plan.sharding_rules.shards else []
    words += [f"recompute {plan.recompute}{kept}"] if plan.recompute != "none" else []
    words += [f"recompute {' and '.join(plan.modules)}"] if plan.modules and plan.recompute == "none" else []
    words += [f"{' and '.join(plan.offload)} on the host"] if plan.offload else []
    return ", ".join(words) or "one device, nothing split"


def describe_job(job: Training) -> str:
    """Return the length of a sequence and the global batch of a job in words.

    >>> from shardwise.plans import Training
    >>> describe_job(Training(seq_len=4096, global_batch=1)), describe_job(Training(seq_len=512, global_batch=1024))
    ('4,096 tokens a sequence, 1 sequence a step', '512 tokens a sequence, 1,024 sequences a step')
    """
    sequences = "sequence" if job.global_batch == 1 else "sequences"
    return f"{job.seq_len:,} tokens a sequence, {job.global_batch:,} {sequences} a step"


def describe_served(report: InferReport) -> str:
    """Return the plan of a deployment in words, or what lies on the device and on the host where they share a model."""
    host = report.case.host
    if host is None:
        return describe(report.plan)
    near, far = report.evaluation.sizes.stages
    count, every = round(sum(near.layers)), report.case.model.num_layers
    words = [f"{count} of {every} layers and {'the' if near.ends else 'no'} head on the device"]
    there = [f"experts of {sum(far.experts)} of them"] if any(far.experts) else []
    there += ["the rest"] if count < every or not near.ends else []
    return ", ".join([*words, *([f"{' and '.join(there)} on {host.cluster.device.name}"] if there else [])])


def placed_words(place: dict[str, int]) -> str:
    """Return in words what shares a domain of the fastest tier.

    >>> placed_words({"tp": 4, "dp": 2}), placed_words({})
    ('tp 4 dp 2', 'alone')
    """
    return " ".join(f"{axis} {n}" for axis, n in place.items()) or "alone"


def tiers_words(report: TrainReport | InferReport | FrontPlan) -> list[str]:
    """Return in words which ranks share a domain of each tier but that of all devices, none where one holds them."""
    placed, domains, tiers = (
        group_shapes(report.plan, report.case.domains),
        report.case.domains,
        report.case.cluster.tiers,
    )
    words = []
    for i, size in enumerate(domains[:-1]):
        if size >= report.plan.num_devices:
            break
        inside = {str(axis): placed[axis][i] for axis in report.plan.order if placed[axis][i] > 1}
        words.append(f"{placed_words(inside)} in a {'domain' if i == 0 else tiers[i].name}")
    return words


def placement(report: TrainReport | InferReport) -> dict[str, int]:
    """Return how many ranks of each axis share a domain of the fastest tier, those above one."""
    placed = group_shapes(report.plan, report.case.domains)
    return {axis: placed[axis][0] for axis in report.plan.order if placed[axis][0] > 1}


def describe_more(plan: Plan, policy: str = "") -> str:
    """Return a plan in words: degrees, micro-batch, schedule, what else stands out, and a policy of its checkpoints.

    >>> describe_more(Plan(tp=2, pp=4, vpp=2, schedule="interleaved", sequence_parallel=True))
    'tp 2, pp 4, vpp 2, interleaved, micro-batch 1, sequence parallel'
    """
    words = [describe(plan, policy)]
    words += [plan.schedule] if plan.pp > 1 else []
    words += [f"micro-batch {plan.micro_batch}"]
    words += ["sequence parallel"] if plan.sequence_parallel and plan.tp > 1 else []
    words += [f"cp by {plan.cp_kind}"] if plan.cp > 1 else []
    words += [f"summa in {plan.panels} panels"] if plan.layout == "summa" else []
    return ", ".join(words)


def describe_placed(report: TrainReport | FrontPlan) -> str:
    """Return a plan in words with where its axes sit."""
    plan, shift = report.plan, report.case.stack.partition.partition(" ")[2]
    words = [describe_more(plan, report.case.stack.settings.checkpoint_policy)]
    words += [f"recompute {' and '.join(plan.modules)}"] if plan.modules and plan.recompute == "selective" else []
    words += [f"recomputed in {counted(plan.recompute_layers, 'layer')} of each stage"] if plan.recompute_layers else []
    words += [f"sharded in groups of {plan.shard}"] if plan.shard > 1 else []
    words += [f"stage layers {shift}"] if shift and plan.stage_layers else []
    return ", ".join([*words, *tiers_words(report)])


def describe_deployment(report: InferReport) -> str:
    """Return a deployment in words: degrees, batch, formats, engine."""
    formats = [f"weights {report.case.format.name}"]
    formats += [f"cache {report.job.kv_cache}"] if report.job.kv_cache else []
    formats += [f"GEMMs in {report.job.compute}"] if report.job.compute else []
    order = [axis for axis in report.plan.order if getattr(report.plan, axis) > 1]
    usual = [axis for axis in ("tp", "dp", "pp") if axis in order]
    placed = [f"order {','.join(order)}"] if order != usual else []
    plan = [describe(report.plan), f"batch {report.job.batch}", *formats, *placed, *tiers_words(report)]
    return ", ".join([*plan, report.case.engine.name])


def load_text(workload: Workload) -> str:
    """Return what a deployment is asked in words: the rate, or the users and how long they think.

    >>> from shardwise.plans import Arrivals, Length
    >>> two = Arrivals(rate=5.0), Arrivals(kind="closed", users=100, think_seconds=10.0)
    >>> [load_text(Workload(input_tokens=Length(mean=9), output_tokens=Length(mean=9), arrivals=one)) for one in two]
    ['5.00 requests/s', '100 users who ask again after 10.00 s']
    """
    arrivals = workload.arrivals
    if not arrivals.users:
        return rate_text(arrivals.rate)
    again = f" who ask again after {show_seconds(arrivals.think_seconds)}" if arrivals.think_seconds else ""
    return f"{counted(arrivals.users, 'user')}{again}"


def rate_text(value: float, other: float | None = None) -> str:
    """Return a rate in words, with the digits that tell it from the other.

    >>> rate_text(2.5), rate_text(0.01234), rate_text(1.9978, 2.0)
    ('2.50 requests/s', '0.012 requests/s', '1.998 requests/s')
    """
    digits = 2 if value >= 0.1 or value <= 0 else 1 - math.floor(math.log10(value))
    if other not in (None, value):
        while f"{value:.{digits}f}" == f"{other:.{digits}f}":
            digits += 1
    return f"{value:,.{digits}f} requests/s"
