"""What engines run: formats of weights and cache by device, families of models, layouts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from types import MappingProxyType
from typing import Literal

from shardwise.errors import Problems
from shardwise.models import Model
from shardwise.plans import Plan
from shardwise.records import dataclass
from shardwise.serving._formats import cache_names, format_names, formats_in

_NO_OTHERS: Mapping[str, EngineFormats] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFormats:
    """What an engine loads and computes with; an empty tuple stands for what no source was read for, all of it."""

    weights: tuple[str, ...] = ()
    """Patterns of the names of quantization.toml."""
    kv_cache: tuple[str, ...] = ()
    families: tuple[tuple[str, str], ...] = ()
    """Families of devices (patterns) that alone run weights of a pattern; one without a family is not judged."""
    usual_caches: tuple[tuple[str, str, str], ...] = ()
    """Formats of the cache where nobody says one, by families of models and of devices (patterns), if not 16 bits."""
    lacks: tuple[str, ...] = ()
    """Families of models that it has no class for, nor a way to run that of transformers."""

    def problems(
        self, engine: str, words: Mapping[str, str], family: str, others: Mapping[str, EngineFormats] = _NO_OTHERS
    ) -> Problems:
        """Return which formats, by field, the engine does not run on a family of devices, and which of others do.

        >>> from shardwise.serving import find_engine
        >>> runs = find_engine("tensorrt-llm").formats
        >>> [one.rule for one in runs.problems("TensorRT-LLM", {"weights": "nvfp4"}, "hopper").items]
        ['is no format that TensorRT-LLM runs on this device (hopper)']
        """
        problems = Problems()
        for field, names in (("weights", format_names(False)), ("kv_cache", tuple(cache_names()))):
            for word in formats_in(words.get(field, "")):
                if word not in names or self.runs(field, word, family):
                    continue
                runs = [one for one in names if self.runs(field, one, family)]
                rule = f"is no format that {engine} runs"
                rule += f" on this device ({family})" if self.runs(field, word, "generic") else ""
                # Of engines that no source was read for nobody knows.
                read = {name: other for name, other in others.items() if getattr(other, field)}
                able = [f"--engine {name}" for name, other in read.items() if other.runs(field, word, family)]
                problems.add(field, word, rule, f"use {', '.join(runs)}, or {' or '.join(able) or 'another --engine'}")
        return problems

    def usual_cache(self, model: str, device: str) -> str:
        """Return the format of the cache of a family of models on one of devices, empty for that of activations.

        >>> from shardwise.serving import find_engine
        >>> [find_engine("sglang").formats.usual_cache("deepseek_v32", one) for one in ("hopper", "blackwell")]
        ['', 'fp8']
        """
        fits = (name for of, on, name in self.usual_caches if re.fullmatch(of, model) and re.fullmatch(on, device))
        return next(fits, "")

    def runs(self, field: str, name: str, family: str) -> bool:
        """Return whether the engine runs a format on a family of devices, as far as sources say."""
        if (stated := getattr(self, field)) and not any(re.fullmatch(one, name) for one in stated):
            return False
        alone = [where for one, where in self.families if field == "weights" and re.fullmatch(one, name)]
        return family == "generic" or all(re.fullmatch(where, family) for where in alone)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLayouts:
    """Which layouts an engine launches; by default all that the model divides into."""

    experts: Literal["any", "filled", "whole", "none"] = "any"
    """Experts are split over all ranks ("filled"), each with whole ones or a part of each ("whole"), or not apart."""
    lone_groups: bool = False
    """Replicas that share experts are of one tensor-parallel rank each."""
    one_axis: bool = False
    """A model is split into tensor-parallel ranks or into stages."""
    fills_with: Literal["dp", "pp", "tp"] = "dp"
    """What takes devices that a launch says nothing about: replicas, or stages or ranks of one model on each node."""
    expert_multiples: tuple[tuple[str, str, int], ...] = ()
    """Formats and families of devices (patterns) whose experts have a multiple of so many columns on each rank."""

    def problems(self, engine: str, plan: Plan, experts: bool) -> Problems:
        """Return why the engine does not launch a complete plan, of a model that has `experts` or none.

        >>> from shardwise.serving import find_engine
        >>> [one.rule for one in find_engine("vllm").layouts.problems("vLLM", Plan(tp=8, ep=2, etp=4), True).items]
        ['vLLM gives a device whole experts (ep) or a part of each (etp)']
        """
        problems, shared = Problems(), plan.ep * plan.etp
        if self.one_axis and plan.tp > 1 and plan.pp > 1:
            problems.add("tp", plan.tp, f"{engine} splits a model by layers or by rows, one of both", "use tp 1")
        if not experts:
            return problems
        every = max(shared, plan.tp)
        whole = f"use ep {every} with etp 1, or ep 1 with etp {every}"
        if self.experts == "none" and plan.ep > 1:
            problems.add("ep", plan.ep, f"{engine} splits experts as it splits GEMMs", "use ep 1")
        elif self.experts in ("filled", "whole") and shared % plan.tp:
            rule = f"{engine} splits experts over all ranks of a stage, and ep x etp is {shared} of {plan.tp}"
            problems.add("ep", plan.ep, rule, f"use etp {plan.tp // plan.ep}" if plan.tp % plan.ep == 0 else whole)
        elif self.experts == "whole" and min(plan.ep, plan.etp) > 1:
            problems.add("ep", plan.ep, f"{engine} gives a device whole experts (ep) or a part of each (etp)", whole)
        if self.lone_groups and shared > plan.tp > 1:
            rule = f"with attention data parallelism {engine} runs attention on single devices"
            problems.add("tp", plan.tp, rule, f"use tp 1 with dp {shared}")
        return problems

    def refused(self, engine: str, model: Model, plan: Plan, form: str, family: str) -> Problems:
        """Return why the engine does not launch a complete plan of a model whose weights are of a format.

        >>> from shardwise.models import load_model
        >>> from shardwise.serving import find_engine
        >>> model, runs = load_model("qwen3-235b-a22b"), find_engine("sglang").layouts
        >>> [str(one) for one in runs.refused("SGLang", model, Plan(tp=8, etp=8), "fp8-block", "hopper").items]
        ['etp = 8: SGLang loads whole blocks of 128, and experts of width 1536 are 192 on a rank; use ep 8 with etp 1']
        """
        problems, widths = (
            self.problems(engine, plan, model.has_experts),
            {block.experts.ffn for block in model.kinds if block.experts},
        )
        wanted = (n for of, on, n in self.expert_multiples if re.fullmatch(of, form) and re.fullmatch(on, family))
        for block, width in product(wanted, sorted(widths)):
            if width % plan.etp == 0 and width // plan.etp % block:
                share = f"experts of width {width} are {width // plan.etp} on a rank"
                remedy = f"use ep {plan.ep * plan.etp} with etp 1"
                problems.add("etp", plan.etp, f"{engine} loads whole blocks of {block}, and {share}", remedy)
        return problems

    def groups_within(self, engine: str, plan: Plan, experts: bool) -> str:
        """Return how groups of attention are said that the engine counts within tp; empty where it could not have them.

        SGLang's --dp-size with --enable-dp-attention, and TensorRT-LLM's enable_attention_dp, lie within --tp; here tp
        is that of a group, and replicas are its groups.

        >>> from shardwise.serving import find_engine
        >>> find_engine("sglang").layouts.groups_within("SGLang", Plan(tp=16, dp=8), True)
        '; attention data parallelism, which SGLang counts within tp, is --tp 2 --dp 8 --etp 16'
        """
        tp, rest = divmod(plan.tp, plan.dp)
        if not experts or self.experts != "filled" or rest or plan.tp % plan.ep or (self.lone_groups and tp > 1):
            return ""
        split = " ".join(f"--{name} {n}" for name, n in (("ep", plan.ep), ("etp", plan.tp // plan.ep)) if n > 1)
        return f"; attention data parallelism, which {engine} counts within tp, is --tp {tp} --dp {plan.dp} {split}"
