"""The rollouts of a step of rewards: what trains together with the engine that generates for it."""

from __future__ import annotations

from math import ceil

from shardwise.errors import InputError, Problems
from shardwise.hardware import part_of
from shardwise.plans import Plan, Serving
from shardwise.plans.laws import is_count
from shardwise.records import dataclass, replace
from shardwise.serving import InferReport, ServingOptions, even_waves, infer
from shardwise.training import EQUAL_ROLLOUTS, ROLLOUTS_LEFT_OUT, Generation, TrainingCase, TrainReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """The rollouts of a step: `waves` of batches on each replica of an engine, and new weights handed to it before.

    `resting_bytes` of the trainer lie on the engine's devices meanwhile. Seconds are 0 where the engine does not fit;
    `steps` train on what is generated.
    """

    engine: str
    devices: int
    replicas: int
    batch: int
    waves: int
    seconds: float
    handover_seconds: float
    engine_bytes: float
    resting_bytes: float
    fits: bool
    steps: float = 1.0


def rollout_of(report: TrainReport) -> Rollout | None:
    """Return the rollouts of a step, None where no tokens of a prompt are stated; raises `InputError`.

    The samples of a step, or of the steps that one rollout is for, are generated at once, in as many waves as the cache
    makes of them, every answer as long as what a sequence leaves behind its prompt.
    """
    if not report.case.stack.settings.times_rollouts:
        return None
    return _generated(report.case, report.plan.num_devices, report.memory.weights + report.memory.optimizer)


def least_generation(case: TrainingCase, num_devices: int) -> Generation:
    """Return what the rollouts of a step take at least on so many devices: beside a trainer that leaves all memory.

    It is nothing where the engine does not run on so many devices.
    """
    try:
        rollout = _generated(case, num_devices, 0.0)
    except InputError:
        return Generation()
    return _generation(case, rollout)


def _generated(case: TrainingCase, num_devices: int, resting_bytes: float) -> Rollout:
    """Return the rollouts of a step of a trainer on so many devices, which keeps so many bytes on each of them."""
    settings = case.stack.settings
    devices = settings.rollout_devices or num_devices
    _check(case, devices)
    resting = 0.0 if settings.rollout == "apart" else resting_bytes
    replicas = devices // settings.rollout_tp
    samples = settings.rollout_samples or case.job.global_batch
    batch = ceil(samples / replicas)
    rollout = _asked(case, devices, batch, resting)
    room = rollout.max_concurrency
    waves, each = even_waves(batch, room) if room else (0, batch)
    one = _asked(case, devices, each, resting) if waves > 1 else rollout
    fits = bool(room) and one.fits
    return Rollout(
        engine=one.case.engine.name,
        devices=devices,
        replicas=replicas,
        batch=one.case.job.batch,
        waves=waves,
        seconds=waves * one.request_seconds if fits else 0.0,
        handover_seconds=_handover_seconds(case, float(one.weights_bytes_per_gpu)) if fits else 0.0,
        engine_bytes=float(one.memory.needed),
        resting_bytes=resting,
        fits=fits,
        steps=samples / case.job.global_batch,
    )


def _check(case: TrainingCase, devices: int) -> None:
    settings, job, problems = case.stack.settings, case.job, Problems()
    if not is_count(settings.rollout_prompt_tokens) or settings.rollout_prompt_tokens >= job.seq_len:
        rule = f"are the tokens of a prompt, at least 1 and below the {job.seq_len} of a sequence"
        problems.add("rollout_prompt_tokens", settings.rollout_prompt_tokens, rule, f"use {max(job.seq_len // 2, 1)}")
    if devices % max(settings.rollout_tp, 1) or not is_count(settings.rollout_tp):
        problems.add("rollout_tp", settings.rollout_tp, f"must divide the engine's {devices} devices", "use 1")
    elif settings.rollout_tp > case.cluster.num_devices:
        rule = f"is more than the {case.cluster.num_devices} devices of the trainer, whose links an engine apart has"
        problems.add("rollout_tp", settings.rollout_tp, rule, f"use up to {case.cluster.num_devices}")
    if settings.rollout_devices and settings.rollout != "apart":
        problems.add("rollout_devices", settings.rollout_devices, "are an engine's own", "add --rollout apart")
    if settings.rollout_samples and not settings.rollout_samples >= job.global_batch:
        rule = f"must be at least the {job.global_batch} of a step, which train on one rollout"
        problems.add("rollout_samples", settings.rollout_samples, rule, f"use {job.global_batch}, or leave it out")
    problems.raise_if_any()


def _asked(case: TrainingCase, devices: int, batch: int, resting: float) -> InferReport:
    """Return the engine's answer for a batch of so many samples on each replica, beside what rests on its devices."""
    settings, cluster = case.stack.settings, case.cluster
    device = cluster.device
    free = device.usable_memory_bytes - resting
    cache_bytes = min(free, settings.rollout_bytes) if settings.rollout == "awake" else free
    share = 0.0 if settings.rollout == "apart" else max(0.01, min(0.9, cache_bytes / float(device.memory_bytes)))
    # Trainers tell the engine how many sequences they generate at once: TRL's grpo_trainer.py sets max_num_seqs.
    job = Serving(
        batch=batch,
        max_sequences=batch,
        input_tokens=settings.rollout_prompt_tokens,
        output_tokens=case.job.seq_len - settings.rollout_prompt_tokens,
        memory_fraction=share,
    )
    # Replicas do not meet: those of a larger engine are as those that the trainer's cluster has room for.
    replicas = min(devices, cluster.num_devices) // settings.rollout_tp
    plan = Plan(tp=settings.rollout_tp, dp=replicas, sequence_parallel=False)
    own = part_of(cluster, replicas * settings.rollout_tp)
    return infer(case.model, own, plan, job, ServingOptions(engine="vllm"))


def _handover_seconds(case: TrainingCase, size: float) -> float:
    """Return seconds in which new weights reach the engine: over the network, the host link or within a device.

    An engine that slept at level 1 has its weights in the host's memory (vLLM device_allocator/cumem.py).
    """
    cluster, place = case.cluster, case.stack.settings.rollout
    if place == "apart":
        return size / float(cluster.tiers[-1].bytes_per_second)
    within = 2 * size / float(cluster.device.memory_bytes_per_second)
    return within + (size / float(cluster.device.host_bytes_per_second) if place == "asleep" else 0.0)


def with_rollouts(report: TrainReport, rollout: Rollout) -> TrainReport:
    """Return a report whose run takes the time, the hours and the dollars of its rollouts too."""
    notes = report.assumptions
    if rollout.fits:
        notes = (*(note for note in notes if note != ROLLOUTS_LEFT_OUT), EQUAL_ROLLOUTS)
    generation = _generation(report.case, rollout)
    return replace(report, assumptions=notes, generation=generation, finish=timed_rollouts)


def _generation(case: TrainingCase, rollout: Rollout) -> Generation:
    own = rollout.devices if case.stack.settings.rollout == "apart" else 0
    seconds = (rollout.seconds + rollout.handover_seconds) / rollout.steps
    return Generation(seconds=seconds, devices=own, fits=rollout.fits)


def timed_rollouts(report: TrainReport) -> TrainReport:
    """Return a report with its rollouts, as it is where these are not timed; raises `InputError`."""
    rollout = rollout_of(report)
    return report if rollout is None else with_rollouts(report, rollout)
