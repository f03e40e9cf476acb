"""Hold the closed form of a deployment under load against its simulation, over random configurations.

    python benchmarks/steady.py [--kinds groups,stages] [--seeds 100-114] [--jobs 2]

Every configuration draws model, devices, layout, engine, lengths and limits. Its capacity is what a queue without end
is served at; means are those of Poisson arrivals at shares of that, over several runs. Simulations are kept in
`benchmarks/data/steady.json`: delete it where prices of steps have moved. Seeds from 200 on derived nothing.
"""

from __future__ import annotations

import argparse
import json
import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Arrivals, Length, Plan, Serving, Workload
from shardwise.serving import ServingOptions, infer
from shardwise.serving.load import LoadOptions, limits_of
from shardwise.serving.load._fleet import Fleet, Transfer, ended_rate
from shardwise.serving.load._serve import _pool, policy_for

STORED = Path(__file__).parent / "data" / "steady.json"
LOADS = (0.2, 0.5, 0.7, 0.85)
# Requests of a run over those that run at once: of four, whose answers are 800 tokens, time per token was 17 % short.
_TURNOVERS = 20
# Of so much of what arrives no queue grows: more must arrive to know what one is served at.
_KEPT_UP = 0.9
METRICS = ("ttft", "tpot", "e2e")
ENGINES = ("vllm", "sglang", "tensorrt-llm", "vllm-v0")
# One deployment each: model, devices, plan of all of them.
PLACES = {
    "replica": (
        ("llama-3.1-8b", "1xh100-sxm-80gb", Plan()),
        ("mixtral-8x7b", "4xa100-sxm-80gb", Plan(tp=4)),
        ("deepseek-v2-lite", "1xh200-sxm-141gb", Plan()),
        ("llama-3.1-70b", "4xh100-sxm-80gb", Plan(tp=4)),
        ("llama-3.1-8b", "1xl40s", Plan()),
        ("qwen3-32b", "2xb200-sxm-180gb", Plan(tp=2)),
        ("gpt-oss-120b", "1xh200-sxm-141gb", Plan()),
    ),
    "groups": (
        ("deepseek-v2-lite", "2xh100-sxm-80gb", Plan(dp=2, ep=2)),
        ("deepseek-v2-lite", "4xh200-sxm-141gb", Plan(dp=4, ep=4)),
        ("qwen3-30b-a3b", "8xh100-sxm-80gb", Plan(dp=8, ep=8)),
        ("qwen3-235b-a22b", "8xh200-sxm-141gb", Plan(tp=2, dp=4, ep=8)),
        ("deepseek-v3", "8xb200-sxm-180gb", Plan(dp=8, ep=8)),
        ("deepseek-v3", "16xh200-sxm-141gb", Plan(dp=16, ep=16)),
    ),
    "stages": (
        ("llama-3.1-70b", "4xh100-sxm-80gb", Plan(tp=2, pp=2)),
        ("llama-3.1-70b", "4xa100-sxm-80gb", Plan(pp=4)),
        ("mixtral-8x7b", "4xa100-sxm-80gb", Plan(tp=2, pp=2)),
        ("llama-3.1-8b", "2xl40s", Plan(pp=2)),
        ("qwen3-32b", "8xh100-sxm-80gb", Plan(tp=2, pp=4)),
        ("deepseek-v2-lite", "2xh100-sxm-80gb", Plan(pp=2)),
    ),
    "staged": (
        ("qwen3-30b-a3b", "4xh100-sxm-80gb", Plan(pp=2, dp=2, ep=2)),
        ("deepseek-v2-lite", "4xh200-sxm-141gb", Plan(pp=2, dp=2, ep=2)),
        ("mixtral-8x7b", "16xa100-sxm-80gb", Plan(tp=2, pp=2, dp=4, ep=8)),
        ("qwen3-235b-a22b", "16xh200-sxm-141gb", Plan(pp=4, dp=4, ep=4)),
    ),
    "pools": (
        ("llama-3.1-8b", "h100-sxm-80gb", Plan()),
        ("mixtral-8x7b", "a100-sxm-80gb", Plan(tp=4)),
        ("deepseek-v2-lite", "h200-sxm-141gb", Plan()),
        ("llama-3.1-70b", "h100-sxm-80gb", Plan(tp=4)),
    ),
}  # fmt: skip
# Long prompts that steps of 2,048 tokens cut.
PLACES["cut"] = PLACES["replica"][:6]
# Prompts that begin with what all share, and steps that verify guesses.
PLACES |= dict.fromkeys(("shared", "guesses"), (*PLACES["replica"], *PLACES["groups"][:2], *PLACES["stages"][:2]))


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """One configuration as simulated: requests a second of a full queue, and mean seconds by load and metric."""

    kind: str
    seed: int
    what: str
    served: float
    means: dict[str, dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What the closed form says over what was simulated, by load and metric."""

    kind: str
    seed: int
    what: str
    capacity: float
    ratios: dict[str, dict[str, float]]


def _lengths(random: Random, kind: str) -> dict[str, Length]:
    """Return random lengths of prompts and answers, fixed or lognormal."""
    prompts, answers = (128, 500, 1000, 2000, 4000), (32, 100, 300, 800)
    if kind == "cut":
        prompts, answers = (2500, 3000, 4000, 6000, 10_000), (20, 50, 150, 400)
    prompt, made = random.choice(prompts), random.choice(answers)
    wide = random.choice(((0.0, 0.0), (0.0, 0.8), (0.8, 0.8)))
    return {
        name: Length(kind="lognormal" if cv else "fixed", mean=mean, cv=cv)
        for name, mean, cv in zip(("input_tokens", "output_tokens"), (prompt, made), wide, strict=True)
    }


@dataclass(frozen=True)
class Drawn:
    """A deployment with its workload, but for the rate."""

    fleet: Fleet
    workload: Workload
    what: str

    def at(self, rate: float, count: int, seed: int) -> list[Any]:
        """Return simulated requests that arrive at a rate, without the first fifth and the last twentieth."""
        asked = replace(self.workload, arrivals=Arrivals(rate=rate), count=count, seed=seed)
        _, traces = self.fleet.run(asked, "round-robin")
        ended = sorted((r for trace in traces for r in trace.finished), key=lambda r: r.arrival)
        return ended[count // 5 : -count // 20]

    @property
    def queues(self) -> int:
        """Queues of the pool that decodes."""
        return len(self.fleet.decode.replica().groups) * (self.fleet.decode.many // self.fleet.decode.groups)

    def served(self, seed: int = 0) -> float:
        """Return requests a second that end while more arrive than can."""
        form = self.fleet.decode.form
        most = int(form.prices.counts.max()) * self.queues
        asked = 1.5 * self.capacity
        while True:
            # Equal requests end in bunches of all that run; of lengths that differ the mean is known to 1 % in the end.
            found = self.at(asked, 30 * most + 20_000, seed)
            last = max(r.arrival for r in found)
            ended = ended_rate(sorted(r.end for r in found if last / 2 < r.end <= last))
            if ended < _KEPT_UP * asked:
                return ended
            asked *= 2

    @property
    def capacity(self) -> float:
        """Requests a second that the closed form says a full queue is served at."""
        return self.fleet.decode.many / self.fleet.at(0.0).full_seconds


def draw(kind: str, seed: int) -> Drawn:
    """Return a random deployment."""
    random = Random(f"{kind} {seed}")
    model, devices, plan = random.choice(PLACES[kind])
    workers, first = 1, None
    if kind == "pools":
        workers, prompts = random.choice(((1, 1), (2, 1), (1, 2), (3, 1), (2, 2)))
        plan, first = replace(plan, dp=workers), replace(plan, dp=prompts)
        devices = f"{plan.num_devices}x{devices}"
    engine = random.choice(ENGINES if kind in ("replica", "stages", "staged") else ENGINES[:3])
    job = Serving(
        weights="fp8" if model == "deepseek-v3" or model == "qwen3-235b-a22b" else "",
        max_sequences=random.choice((0, 32, 64, 128)), max_batched_tokens=random.choice((0, 0, 2048)),
    )  # fmt: skip
    asked = Workload(**_lengths(random, kind), arrivals=Arrivals(rate=1e-3), count=8000, seed=seed)
    more = ""
    if kind == "cut":
        engine, job = "vllm", replace(job, max_batched_tokens=2048)
    if kind == "shared":
        asked = replace(asked, prefix_tokens=round(random.choice((0.25, 0.5, 0.9)) * asked.input_tokens.mean))
        more = f" shared={asked.prefix_tokens}"
    if kind == "guesses":
        job = replace(
            job, speculative_method="ngram" if load_model(model).has_experts else random.choice(("eagle", "ngram")),
            num_speculative_tokens=random.choice((1, 3, 5)), acceptance_rate=random.choice((0.5, 0.8)),
        )  # fmt: skip
        more = f" {job.speculative_method}={job.num_speculative_tokens}x{job.acceptance_rate:g}"
    options = LoadOptions(
        serving=ServingOptions(engine=engine),
        balance_steps=random.choice((None, 10)) if engine == "tensorrt-llm" and kind in ("groups", "staged") else None,
    )
    prompt, made = asked.longest
    cluster = Cluster.parse(devices)
    limits = replace(job, batch=1, input_tokens=prompt, output_tokens=made)
    base = infer(load_model(model), cluster, plan, limits, options.serving)
    policy = policy_for(base.case, job, asked, options)
    limits = replace(limits, max_batched_tokens=policy.step_tokens, max_sequences=policy.max_sequences)
    base = infer(load_model(model), cluster, plan, limits, options.serving)
    if not base.fits:
        raise ValueError(f"{kind} {seed}: {model} does not fit {devices}")
    said = f"{model} {devices} tp={plan.tp} pp={plan.pp} ep={plan.ep} {engine}"
    for field in ("input_tokens", "output_tokens"):
        length = getattr(asked, field)
        said += f" {length.mean:g}{f'~{length.cv:g}' if length.cv else ''}"
    said += f" seqs={policy.max_sequences} step={policy.step_tokens}"
    if policy.balance_steps:
        said += f" balance={policy.balance_steps}"
    said += more
    fleet = Fleet(decode=_pool(base, policy, asked, "decode" if first else "both"))
    if first is not None:
        one = infer(
            load_model(model), Cluster.parse(f"{first.num_devices}x{devices.partition('x')[2]}"), first,
            replace(limits, output_tokens=1), options.serving,
        )  # fmt: skip
        both = Cluster.parse(f"{first.num_devices + plan.num_devices}x{devices.partition('x')[2]}")
        fleet = replace(
            fleet, prefill=_pool(one, policy.of_prompts(limits_of(engine, cluster.device)), asked, "prefill"),
            link=Transfer(both, one.case, base.case, policy),
        )  # fmt: skip
        said += f" workers={first.dp}+{plan.dp}"
    return Drawn(fleet, asked, said)


def simulated(kind: str, seed: int, loads: tuple[float, ...] = LOADS, count: int = 8000) -> Simulated:
    """Return the means of a random configuration at shares of what it serves."""
    drawn = draw(kind, seed)
    served, means = drawn.served(), {}
    for load in loads:
        # Near the capacity one run of thousands of requests waits a third longer or shorter than another; the same
        # arrivals for all would be one such run.
        runs, running = 6 if load > 0.8 else 2, drawn.fleet.at(load * served).running * drawn.fleet.decode.many
        # A run is of what begins after its first fifth: four times as many as run at once have ended by then.
        many = max(count, 150 * drawn.queues, round(_TURNOVERS * running) if math.isfinite(running) else 0)
        found = [r for run in range(runs) for r in drawn.at(load * served, many, 100 * seed + run)]
        means[f"{load:g}"] = {
            name: sum(getattr(r, f"{name}_seconds") or 0.0 for r in found) / len(found) for name in METRICS
        }
    return Simulated(kind=kind, seed=seed, what=drawn.what, served=served, means=means)


def compared(one: Simulated) -> Compared:
    """Return the closed form of a configuration over its simulation."""
    drawn, ratios = draw(one.kind, one.seed), {}
    for load, means in one.means.items():
        steady = drawn.fleet.at(float(load) * one.served)
        ratios[load] = {
            name: float(getattr(steady, f"{name}_seconds")) / seconds if seconds else 1.0
            for name, seconds in means.items()
        }
    what, capacity = one.what, drawn.capacity / one.served
    return Compared(kind=one.kind, seed=one.seed, what=what, capacity=capacity, ratios=ratios)


def compared_where_it_fits(one: Simulated) -> Compared | None:
    """Return the closed form of a configuration over its simulation, None where it does not fit at today's bytes."""
    try:
        return compared(one)
    except ValueError as error:
        print(f"left out: {error}")
        return None


def table(rows: list[Compared]) -> str:
    """Return medians of the absolute errors by kind and load, each with its worst."""
    lines = ["| kind | configurations | load | capacity | TTFT | TPOT | end to end |", "|---|---|---|---|---|---|---|"]
    for kind in dict.fromkeys(row.kind for row in rows):
        own = [row for row in rows if row.kind == kind]
        off = [abs(row.capacity - 1) for row in own]
        loads = [load for load in own[0].ratios if all(load in row.ratios for row in own)]
        for load in loads:
            cells = [f"{median(off):.1%} ({max(off):.0%})"] if load == loads[0] else [""]
            for name in METRICS:
                errors = [abs(row.ratios[load][name] - 1) for row in own]
                cells.append(f"{median(errors):.1%} ({max(errors):.0%})")
            lines.append(f"| {kind} | {len(own)} | {float(load):.0%} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def seeds_of(text: str) -> range:
    """Return seeds such as 100-114."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> None:
    """Simulate what is not stored, compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(PLACES))
    parser.add_argument("--seeds", type=seeds_of, default=range(100, 115))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--stored", action="store_true", help="compare with all that is stored, and simulate nothing")
    parser.add_argument("--store", type=Path, default=STORED, help="simulations that are known, to which new are added")
    asked = parser.parse_args()
    text = asked.store.read_text(encoding="ascii") if asked.store.exists() else "[]"
    known = {(row["kind"], row["seed"]): Simulated(**row) for row in json.loads(text)}
    wanted = [(kind, seed) for kind in asked.kinds.split(",") for seed in asked.seeds]
    if asked.stored:
        wanted = [one for kind in asked.kinds.split(",") for one in sorted(known) if one[0] == kind]
    with ProcessPoolExecutor(asked.jobs) as pool:
        for row in pool.map(simulated_of, [one for one in wanted if one not in known]):
            known[row.kind, row.seed] = row
            rows = [asdict(known[key]) for key in sorted(known)]
            asked.store.write_text(json.dumps(rows, indent=1) + "\n", encoding="ascii")
        rows = [row for row in pool.map(compared_where_it_fits, [known[one] for one in wanted]) if row]
    for row in rows:
        each = "  ".join(
            f"{load}: " + " ".join(f"{name} {value[name]:.3f}" for name in METRICS)
            for load, value in row.ratios.items()
        )
        print(f"{row.kind} {row.seed} {row.what}\n    capacity {row.capacity:.3f}  {each}")
    print(table(rows))


def simulated_of(one: tuple[str, int]) -> Simulated:
    """Return the simulation of a kind and seed."""
    return simulated(*one)


if __name__ == "__main__":
    main()
