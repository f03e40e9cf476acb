"""Fine-tuning: what of a model trains, the adapters beside its frozen weights, and the format of those."""

from __future__ import annotations

import re
from typing import Literal

from shardwise.errors import Problems
from shardwise.plans._bases import BaseFormat, base_names, find_base
from shardwise.plans._experts import (
    LINEAR_ROUTERS,
    MLP_NAMES,
    NAMED_EXPERTS,
    ExpertAdapters,
    all_reaches_experts,
    experts_of,
    wide_experts,
)
from shardwise.plans._jobs import OBJECTIVES, Training, reference_of
from shardwise.plans._precision import Precision, find_precision
from shardwise.plans._stack import Stack
from shardwise.plans._tuned_types import adapter_precision, autocasts_adapters, narrow_recipe, rest_bytes
from shardwise.records import dataclass, replace

ADAPTERS: dict[str, str] = {
    "lora": "arXiv:2106.09685",
    "rslora": "arXiv:2312.03732, LoRA with another factor",
    "lora-plus": "arXiv:2402.12354, LoRA with two learning rates",
    "lora-fa": "arXiv:2308.03303",
    "dora": "arXiv:2402.09353",
    "ia3": "arXiv:2205.05638",
    "vera": "arXiv:2310.11454",
    "oft": "arXiv:2306.07280",
    "adalora": "arXiv:2303.10512",
    "gralora": "arXiv:2505.20355",
    "vblora": "arXiv:2405.15179",
    "unilora": "arXiv:2506.00799",
    "loha": "arXiv:2108.06098",
    "lokr": "arXiv:2108.06098, by Kronecker products",
    "lily": "arXiv:2407.09946",
    "frod": "peft tuners/frod",
    "hira": "HiRA, ICLR 2025",
    "fourierft": "arXiv:2405.03003",
    "glora": "arXiv:2306.07967",
    "miss": "arXiv:2409.15371",
    "beft": "peft tuners/beft",
    "tinylora": "peft tuners/tinylora",
    "psoft": "peft tuners/psoft",
    "pvera": "peft tuners/pvera",
    "deft": "peft tuners/deft",
    "adamss": "peft tuners/adamss",
    "delora": "arXiv:2503.18225",
    "randlora": "arXiv:2502.00987",
    "boft": "arXiv:2311.06243",
    "c3a": "arXiv:2407.19342",
    "road": "arXiv:2409.00119",
    "trainable-tokens": "peft tuners/trainable_tokens",
    "prefix": "arXiv:2101.00190",
    "prompt": "arXiv:2104.08691",
}
"""Methods by name, and where they are from; each is a function of ops/adapters.py."""
LORA = ("lora", "rslora", "lora-plus", "lora-fa", "dora")
"""Methods that peft runs as LoRA: it converts the targets of these alone (utils/transformers_weight_conversion.py)."""
VIRTUAL = ("prefix", "prompt", "trainable-tokens")
"""Methods that train tokens, not what stands beside linear layers."""
DROPPING = (
    "lora", "rslora", "lora-plus", "dora", "lora-fa", "vera", "adalora", "vblora", "unilora", "hira", "tinylora",
    "psoft", "pvera", "deft", "randlora",
)  # fmt: skip
"""Methods with dropout before them."""
TRAINS = ("all", "none", "embedding", "head", "norms")
LAYER_WORDS = "layers:24-31, first:8, last:8"
_LAYERS = re.compile(r"(layers):(\d{1,5})(?:-(\d{1,5}))?|(first|last):(\d{1,5})")
USUAL_RANK = 8  # peft LoraConfig.r, litgpt lora_r
OFT_BLOCK = 32
"""Features of a block of OFT whose number of blocks is not stated (peft tuners/oft/config.py, oft_block_size)."""
OWN_TARGETS = {"ia3": ("k", "v", "down")}  # arXiv:2205.05638 section 3.3
USUAL_TARGETS = ("all-linear",)  # arXiv:2305.14314 section 4: adapters on all linear layers match full fine-tuning


def usual_recompute(stack: Stack, base: str = "") -> Literal["none", "full"]:
    """Return what a framework recomputes unless told, beside frozen weights in a format.

    >>> from shardwise.plans import find_stack
    >>> usual_recompute(find_stack("transformers")), usual_recompute(find_stack("transformers"), "nf4")
    ('none', 'full')
    """
    recompute = stack.usual_narrow_recompute if base and find_base(base).narrow else "none"
    return recompute if stack.usual_recompute == "none" else stack.usual_recompute


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Fine-tuning as a framework does it: the method, its targets and sizes, and how the frozen weights are kept.

    `width` is that of an adapter's parameter and of what enters it; under `autocast` its GEMMs take 16 bits. `compute`
    is the type of the GEMMs of narrow weights.
    `joint` says that layers that are one GEMM of the framework have one adapter, `kernels` that LoRA runs in functions
    of the framework's own (`Stack.adapter_kernels`), `keeps_inputs` that GEMMs of narrow weights keep their input,
    `holds_inputs` that they do as long as the graph is there, `scales_apart` that their scales are no part of the
    parameter, `narrow_head` that the head is stored as they are, `wide_experts` that experts are not, `rest_bytes` how
    wide weights beside narrow ones are kept (0: as they come), `norm_bytes` and
    `expert_bytes` norms and wide experts where they differ, `trains` what of
    the model itself trains. With `splits_rank` tensor parallelism splits both matrices of an adapter, else only those
    sides that it splits of the layer. Beside an adapter there is a frozen one of a `reference`, and one of a `critic`
    that trains. OFT without a rank turns blocks of `block` features.

    `experts` says how names of targets reach experts, `all_experts` whether those of all linear layers do, which the
    framework `lists_linear`; `drops_experts` that dropout stands before adapters of experts too; `linear_router` that
    all linear layers have routers among them. `family` is the type of the model, whose class names its linear layers.
    """

    adapter: str
    rank: int
    targets: tuple[str, ...]
    dropout: float
    base: BaseFormat
    precision: Precision
    trains: tuple[str, ...]
    width: int = 2
    compute: str = "bf16"
    autocast: bool = False
    joint: bool = False
    kernels: bool = False
    block: int = OFT_BLOCK
    keeps_inputs: bool = False
    holds_inputs: bool = False
    scales_apart: bool = False
    narrow_head: bool = False
    wide_experts: bool = False
    rest_bytes: float = 0.0
    norm_bytes: float = 0.0
    expert_bytes: float = 0.0
    splits_rank: bool = True
    reference: bool = False
    critic: bool = False
    experts: ExpertAdapters = "grouped"
    all_experts: bool = True
    lists_linear: bool = False
    drops_experts: bool = True
    linear_router: bool = False
    family: str = ""

    @property
    def finds_experts(self) -> bool:
        """Whether names of linear layers reach experts; those of peft's transformers do so for LoRA alone."""
        return self.experts == "grouped" or (self.experts != "hidden" and self.adapter in LORA)

    @property
    def converts_experts(self) -> bool:
        """Whether peft makes parameters of experts of the names that their linear layers had."""
        return self.experts in NAMED_EXPERTS

    @property
    def finds_routers(self) -> bool:
        """Whether "all-linear" adapts routers: those that are linear layers, or were before they became parameters."""
        named = self.converts_experts and not self.lists_linear
        return self.linear_router or (self.adapter in LORA and (named or self.experts == "modules"))

    @property
    def sums_experts(self) -> bool:
        """Whether adapters of experts are added to their weights, which are parameters (peft ParamWrapper).

        Unsloth runs them beside grouped GEMMs (unsloth_zoo 2026.10.9 temporary_patches/moe_utils.py, separated LoRA).
        """
        return self.experts not in ("grouped", "modules", "parameters")

    @property
    def shadowed(self) -> tuple[str, ...]:
        """Linear layers that their names do not reach, since experts have them."""
        return MLP_NAMES if self.experts == "qwen2_moe" and self.adapter in LORA else ()

    @property
    def wide_stream(self) -> bool:
        """Whether what is not narrow is in fp32, norms at least, and so the residual stream that it makes.

        bitsandbytes nn/modules.py Linear4bit.forward gives its result the type of its input, a norm's, and under
        autocast 16 bits are added to an embedding in fp32.
        """
        return 4 in (self.rest_bytes, self.norm_bytes)

    @property
    def wide_layers(self) -> bool:
        """Whether what layers make beside GEMMs of narrow weights is in fp32, as the stream is: no autocast casts it.

        bitsandbytes nn/modules.py Linear4bit.forward and autograd/_functions.py MatMul8bitLt give the type of their x.
        """
        return self.base.bitsandbytes and self.wide_stream and not self.autocast

    @property
    def wide_head(self) -> bool:
        """Whether the head is in fp32 and its GEMM takes a copy in 16 bits."""
        return self.autocast and self.rest_bytes == 4

    @property
    def freezes(self) -> bool:
        """Whether any weight of the model is frozen."""
        return "all" not in self.trains

    @property
    def virtual_tokens(self) -> int:
        """Tokens before a prompt that are trained and run through the model with it."""
        return self.rank if self.adapter == "prompt" else 0

    @property
    def prefix_tokens(self) -> int:
        """Keys and values before those of a sequence that are trained in every layer."""
        return self.rank if self.adapter == "prefix" else 0

    @property
    def layer_words(self) -> tuple[str, ...]:
        """Words that name layers of the model that train whole."""
        return tuple(word for word in self.trains if _LAYERS.fullmatch(word))

    def of_layer(self, at: int, num_layers: int) -> Tuning:
        """Return the tuning of one layer: what trains whole is not frozen."""
        whole = any(at in layers_of(word, num_layers) for word in self.layer_words)
        return replace(self, trains=("all",)) if whole else self

    @property
    def copies(self) -> bool:
        """Whether what trains of the model is a copy beside the frozen original (peft, modules_to_save)."""
        return bool(self.adapter) and self.freezes


def layers_of(word: str, num_layers: int) -> range:
    """Return the layers that a word names of so many, none of a word that names no layers.

    >>> layers_of("last:8", 32), layers_of("layers:24-31", 32), layers_of("head", 32)
    (range(24, 32), range(24, 32), range(0, 0))
    """
    match = _LAYERS.fullmatch(word)
    if match is None:
        return range(0)
    if match[1]:
        return range(int(match[2]), int(match[3] or match[2]) + 1)
    return range(int(match[5])) if match[4] == "first" else range(num_layers - int(match[5]), num_layers)


def rank_of(job: Training) -> int:
    """Return the rank of a job's adapters, where it states none the usual one: 0 for OFT, whose blocks have a size.

    >>> [rank_of(Training(seq_len=1, global_batch=1, adapter=name)) for name in ("lora", "oft")]
    [8, 0]
    """
    return job.rank or (0 if job.adapter == "oft" else USUAL_RANK)


def _unpacked(base: BaseFormat, job: Training, stack: Stack) -> BaseFormat:
    """Return a format of 4 bits with the copy that GEMMs of another type take of what bitsandbytes makes of it.

    bitsandbytes/autograd/_functions.py MatMul4Bit: dequantize_4bit(B, quant_state).to(A.dtype).
    """
    products = find_precision(job.precision or stack.precision).compute
    base = base if stack.decodes_by_branches else replace(base, decoding_flops=0.0)
    if not base.bitsandbytes or base.bits != 4 or stack.narrow_type in ("", products):
        return base
    return replace(base, widened_bytes=base.widened_bytes + 4, unpacked_bytes=base.unpacked_bytes + 2)


def tuning_of(job: Training, stack: Stack, family: str = "", sharded: bool = False) -> Tuning | None:
    """Return how a framework fine-tunes as a job asks; None where all weights train in the type of the recipe.

    `family` is the type of the model, `sharded` whether ranks share its weights.

    >>> from shardwise.plans import find_stack
    >>> tuning = tuning_of(Training(seq_len=1, global_batch=1, adapter="lora"), find_stack("transformers"))
    >>> tuning.rank, tuning.width, tuning_of(Training(seq_len=1, global_batch=1), find_stack("megatron"))
    (8, 4, None)
    """
    trains = job.trains or (("none",) if job.adapter else ("all",))
    if not job.adapter and not job.base and "all" in trains:
        return None
    precision = adapter_precision(job, stack)
    base = _unpacked(find_base(job.base or "bf16"), job, stack)
    narrow = base.narrow
    return Tuning(
        adapter=job.adapter,
        rank=rank_of(job),
        targets=job.targets or OWN_TARGETS.get(job.adapter, USUAL_TARGETS),
        dropout=job.adapter_dropout,
        base=base,
        precision=precision,
        trains=trains,
        width=4 if precision.compute in ("fp32", "tf32") else 2,
        compute=find_precision(narrow_recipe(job, stack) or stack.precision).compute,
        autocast=autocasts_adapters(job, stack),
        joint=stack.adapter_joint,
        kernels=stack.runs_lora(job),
        block=job.oft_block_size or OFT_BLOCK,
        keeps_inputs=base.keeps_inputs or (base.bitsandbytes and stack.keeps_narrow_inputs),
        holds_inputs=base.bitsandbytes and stack.holds_narrow_inputs,
        scales_apart=base.bitsandbytes and stack.scales_apart,
        narrow_head=narrow and stack.narrow_head,
        wide_experts=base.bitsandbytes and wide_experts(stack, family),
        rest_bytes=rest_bytes(job, stack),
        norm_bytes=stack.narrow_norm_bytes if narrow and not base.rest_as_is else 0.0,
        expert_bytes=0.0 if sharded or base.rest_as_is else stack.narrow_expert_bytes,
        reference=reference_of(job, stack.reference) == "adapter",
        critic=bool(job.adapter) and job.method in OBJECTIVES and OBJECTIVES[job.method].critic,
        experts=experts_of(stack, family),
        all_experts=all_reaches_experts(stack, family),
        lists_linear=stack.adapts_experts == "listed",
        drops_experts=not stack.leaves_expert_dropout,
        linear_router=family in LINEAR_ROUTERS,
        family=family,
    )


def tuning_problems(job: Training) -> Problems:
    """Return what is wrong with a job's fine-tuning by itself."""
    problems = Problems()
    if job.adapter and job.adapter not in ADAPTERS:
        problems.add("adapter", job.adapter, "is not a known method", "use one of " + ", ".join(ADAPTERS))
    if job.base and job.base not in base_names():
        problems.add("base", job.base, "is not a known format", "use one of " + ", ".join(base_names()))
    if not isinstance(job.rank, int) or isinstance(job.rank, bool) or job.rank < 0:
        problems.add("rank", job.rank, "must be a whole number of at least 1", "use 16")
    if not isinstance(job.oft_block_size, int) or isinstance(job.oft_block_size, bool) or job.oft_block_size < 0:
        problems.add("oft_block_size", job.oft_block_size, "must be a whole number of features of at least 2", "use 32")
    if job.adapter_precision not in ("", "fp32", "bf16"):
        problems.add("adapter_precision", job.adapter_precision, "is not a known type of adapters", "use fp32 or bf16")
    if isinstance(job.adapter_dropout, bool) or not 0 <= job.adapter_dropout < 1:
        problems.add("adapter_dropout", job.adapter_dropout, "is a share of at least 0 and below 1", "use 0.05")
    if unknown := [word for word in job.trains if word not in TRAINS and not _LAYERS.fullmatch(word)]:
        known = f"use one of {', '.join(TRAINS)}, {LAYER_WORDS}"
        problems.add("trains", ",".join(unknown), "is no part of a model", known)
    if not problems.items:
        _together(job, problems)
    return problems


def _together(job: Training, problems: Problems) -> None:
    """Record what does not go together."""
    if not job.adapter:
        for name in ("rank", "oft_block_size", "targets", "adapter_alpha", "adapter_dropout", "adapter_precision"):
            if getattr(job, name):
                value = getattr(job, name)
                shown = ",".join(value) if isinstance(value, tuple) else value
                problems.add(name, shown, "belongs to an adapter, and there is none", "add --adapter lora")
        whole = [word for word in job.trains if word == "all" or _LAYERS.fullmatch(word)]
        if job.base and find_base(job.base).narrow and (not job.trains or whole):
            problems.add("base", job.base, "has weights that cannot be trained", "add --adapter lora")
        return
    if job.oft_block_size and job.adapter != "oft":
        problems.add(
            "oft_block_size", job.oft_block_size, f"is not of {job.adapter}", "leave it out, or use --adapter oft"
        )
    elif job.oft_block_size and job.rank:
        # peft tuners/oft/config.py: "You can only specify either r or oft_block_size, but not both simultaneously"
        problems.add("oft_block_size", job.oft_block_size, "says what rank says too", "give one of the two")
    if job.targets and job.adapter in VIRTUAL:
        rule = f"are linear layers, and {job.adapter} trains tokens"
        problems.add("targets", ",".join(job.targets), rule, "leave it out")
    if job.adapter_dropout and job.adapter not in DROPPING:
        rule = f"has no place in {job.adapter}"
        problems.add("adapter_dropout", job.adapter_dropout, rule, f"use one of {', '.join(DROPPING)}, or leave it out")
    if "experts" in job.targets and job.adapter not in ("lora", "rslora", "lora-plus"):
        problems.add("targets", "experts", f"take LoRA, not {job.adapter}", "use --adapter lora")
    if whole := [word for word in job.trains if word == "all" or _LAYERS.fullmatch(word)]:
        problems.add("trains", ",".join(whole), "trains the weights that adapters freeze", "leave out one of the two")
