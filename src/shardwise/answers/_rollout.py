"""The rollouts of a step of rewards and single phases of such a step, as values and as lines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shardwise.answers._page import Page
from shardwise.errors import InputError, Problem
from shardwise.search import Rollout
from shardwise.training import Phase, TrainReport, device_bytes
from shardwise.units import show_bytes, show_seconds


def added_lines(page: Page, report: TrainReport) -> None:
    """Append to the best plan of a search what its rollouts add."""
    added = report.generation
    if not added.fits:
        page.note("the engine of rollouts has no room beside it, which no plan is ranked by", "bold red")
    elif added.seconds:
        whole = show_seconds(report.whole_step_seconds)
        page.note(f"rollouts {show_seconds(added.seconds)}, whole step {whole}: in days, dollars and limits,")
        page.note("and in the ranking where plans differ in devices or job")


def phase_tree(report: TrainReport, rollout: Rollout | None, word: str) -> dict[str, Any]:
    """Return one phase of a step alone: its seconds, its bytes and whether it fits; raises `InputError`."""
    phases = {one.name.replace(" ", "-"): one for one in report.phases}
    if rollout is not None:
        bytes_held = rollout.engine_bytes + rollout.resting_bytes
        phases["rollout"] = Phase(
            name="rollout", seconds=rollout.seconds + rollout.handover_seconds, peak_bytes=bytes_held
        )
    if word not in phases:
        rule = f"is no phase of {report.job.method}" + (" without rollout_prompt_tokens" if word == "rollout" else "")
        raise InputError([Problem("phase", word, rule, f"use one of {', '.join(phases) or '--method grpo'}")])
    one, case = phases[word], report.case
    device, bytes_held = case.cluster.device, one.peak_bytes
    if word != "rollout":
        pool = (bytes_held * case.stack.reserved_over_allocated, bytes_held)
        sizes, scratch = report.evaluation.sizes, case.workspace_bytes
        bytes_held = float(device_bytes(case.stack, case.cluster, sizes, pool, scratch)[0])
    fits = rollout.fits if word == "rollout" and rollout else bytes_held <= device.usable_memory_bytes
    return {
        "name": one.name,
        "seconds": one.seconds,
        "peak_bytes": one.peak_bytes,
        "device_bytes": bytes_held,
        "fits": fits,
    }


def rollout_tree(report: TrainReport, rollout: Rollout) -> dict[str, Any]:
    """Return the rollouts of a step, and the seconds of the whole step, as plain values."""
    return {"rollout": asdict(rollout), "whole_step_seconds": report.whole_step_seconds}


def rollout_lines(page: Page, report: TrainReport, rollout: Rollout) -> None:
    """Append the rollouts of a step and the whole step."""
    if not rollout.fits:
        page.label(
            "ROLLOUT", f"{rollout.engine} does not fit beside {show_bytes(rollout.resting_bytes)} of the trainer", "red"
        )
        return
    how = f"{rollout.waves} x {rollout.batch} samples on each of {rollout.replicas} replicas of {rollout.engine}"
    how += f", for {rollout.steps:g} steps" if rollout.steps != 1 else ""
    page.label("ROLLOUT", f"{show_seconds(rollout.seconds)}: {how}", "bold", "bold")
    page.note(
        f"new weights {show_seconds(rollout.handover_seconds)}; the engine takes {show_bytes(rollout.engine_bytes)}"
    )
    page.note(f"whole step {show_seconds(report.whole_step_seconds)}, rollouts and training in turn", "bold")


def rollout_page(page: Page, report: TrainReport, rollout: Rollout | None, phase: dict[str, Any] | None) -> None:
    """Append the rollouts of a step, and one phase alone, where they are asked for."""
    if rollout is not None:
        rollout_lines(page, report, rollout)
    if phase is not None:
        fits = "fits" if phase["fits"] else "does not fit"
        text = f"{phase['name']}: {show_seconds(phase['seconds'])}, {show_bytes(phase['device_bytes'])}, {fits}"
        page.label("PHASE", text, "bold", "bold")
    page.blank()
