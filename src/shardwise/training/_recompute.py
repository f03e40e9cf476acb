"""The least recomputation with which a plan fits, for plans that ask for it ("auto")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from shardwise.errors import InputError, Problem
from shardwise.models import Model
from shardwise.plans import Plan, Recompute, Stack
from shardwise.plans.laws import module_names
from shardwise.units import counted


class Fitting(Protocol):
    """An answer that says whether its plan fits."""

    @property
    def fits(self) -> bool:
        """Whether the plan fits the device."""


F = TypeVar("F", bound=Fitting)


def recompute_steps(model: Model, stack: Stack) -> tuple[tuple[Recompute, tuple[str, ...]], ...]:
    """Return what is recomputed before whole layers, the least first: (recompute, modules).

    Nothing, then the attention core; of models with experts the modules that the recipes of the stack name.
    """
    known = module_names(tuple(model.kinds))
    if not stack.recompute_steps or "moe" not in known:
        return ("none", ()), ("selective", ())
    steps = (tuple(name for name in names if name in known) for names in stack.recompute_steps)
    return tuple(("none", modules) for modules in dict.fromkeys(steps))


def least_recompute(plan: Plan, model: Model, stack: Stack, ask: Callable[[Plan], F]) -> F:
    """Return the answer with the least recomputation that fits; with all layers recomputed where nothing fits.

    After the steps of the stack come whole layers, as few of each stage as do.
    """
    for name, value in (("modules", plan.modules), ("recompute_layers", plan.recompute_layers)):
        if value:
            rule = "belongs to a recomputation that is stated"
            raise InputError([Problem(name, value, rule, "leave it out, or state what is recomputed")])
    for mode, modules in recompute_steps(model, stack):
        found = ask(replace(plan, recompute=mode, modules=modules))
        if found.fits:
            return found
    most = ask(replace(plan, recompute="full"))
    low, high = 0, -(-model.num_layers // plan.pp)
    while most.fits and high - low > 1:
        middle = (low + high) // 2
        found = ask(replace(plan, recompute="full", recompute_layers=middle))
        low, high = (low, middle) if found.fits else (middle, high)
        most = found if found.fits else most
    return most


def settled(plan: Plan, fits: bool) -> str:
    """Return what "auto" was settled to, as an assumption.

    >>> settled(Plan(recompute="full", recompute_layers=3), True)
    'recompute full: the least that fits, in 3 layers of each stage'
    """
    why = "the least that fits" if fits else "nothing fits"
    more = f", with {', '.join(plan.modules)}" if plan.modules else ""
    limit = f", in {counted(plan.recompute_layers, 'layer')} of each stage" if plan.recompute_layers else ""
    return f"recompute {plan.recompute}: {why}{more}{limit}"
