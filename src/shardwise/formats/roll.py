"""ROLL's pipelines: the worker that trains, on Megatron-Core's adapter (mcore_adapter) or on FSDP2.

Source: github.com/alibaba/ROLL 2d35671 roll/configs/base_config.py, roll/pipeline/base_worker.py,
roll/distributed/strategy/{megatron,fsdp2}_strategy.py and mcore_adapter/src/mcore_adapter. Nothing writes them.
"""

from __future__ import annotations

import re
from typing import Any

from shardwise.formats import _trainer, _yaml
from shardwise.formats._checkpoints import with_prompts, with_samples
from shardwise.formats._imported import PLAIN, ImportContext, Imported, Keys, flat_keys, top_level
from shardwise.formats.megatron._beside import NAMES, plan_beside
from shardwise.formats.megatron._values import by_name
from shardwise.plans import Plan, Stack, Training, find_stack
from shardwise.records import replace

_TABLE = "roll.toml"
_TRAINS = ("actor_train", "sft_train", "student_train", "student")
_RANGE = re.compile(r"list\(range\( *(\d{1,6}) *, *(\d{1,6}) *\)\)|list\(\[([\d, ]*)\]\)")
_LORA = _trainer.AdapterKeys(
    rank="train.model_args.lora_rank", alpha="train.model_args.lora_alpha", dropout="",
    targets="train.model_args.lora_target", saved="", usual_rank=8, usual_targets=("all-linear",),
)  # fmt: skip


def recognises(name: str, text: str) -> bool:
    """Return whether a file is a pipeline of ROLL: YAML of a worker that trains, with a strategy of its own."""
    keys = top_level(text) if name.endswith((".yaml", ".yml")) else frozenset()
    return bool(keys & set(_TRAINS)) and "strategy_args:" in text


def read(text: str, source: str = "roll.yaml", around: ImportContext = PLAIN) -> Imported:
    r"""Return the case of the training of a pipeline: an optimizer step is what its replicas accumulate.

    >>> head = "pretrain: Qwen/Qwen3-8B\nprompt_length: 1024\nresponse_length: 3072\nactor_train:\n"
    >>> head += "  training_args: {per_device_train_batch_size: 1, gradient_accumulation_steps: 32}\n"
    >>> tail = "  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2}}\n"
    >>> case = read(head + tail + "  device_mapping: list(range(0,8))\n")
    >>> case.num_devices, case.plan.dp, case.job.global_batch, case.job.seq_len, case.job.method
    (8, 4, 128, 4096, 'ppo')
    """
    around.settings_alone(source)
    tree = dict(_yaml.parse(text, source))
    name = next(one for one in _TRAINS if one in tree)
    tree["train"] = tree.pop(name)
    keys = Keys({}, _TABLE, source)
    keys.values = _yaml.resolved(dict(flat_keys(tree)))
    keys.table = keys.table | {"read": keys.table["read"] | dict.fromkeys(_of_core(keys).values(), "plan")}
    if "defaults" in tree:
        keys.assumed.append("settings of other files, which defaults lists, are not read")
    model = _trainer.model_named(keys, next((one for one in _MODELS if keys.raw(one)), "pretrain"))
    mapped = sum(map(len, _places(keys, "train.device_mapping")))
    devices = around.num_devices or mapped
    strategy = keys.word("train.strategy_args.strategy_name")
    if strategy == "megatron_train":
        plan, stack = plan_beside(keys, _of_core(keys), devices, ("pretrain", model), _usual(keys))
    else:
        if strategy != "fsdp2_train":
            rule = "is not a strategy that is read"
            keys.fail("train.strategy_args.strategy_name", rule, "use megatron_train or fsdp2_train")
        plan, stack = _fsdp(keys, devices), find_stack("verl")
    keys.problems.raise_if_any()
    plan = replace(plan, micro_batch=keys.whole("train.training_args.per_device_train_batch_size") or 8)
    job = _job(keys, name, plan, strategy)
    _trainer.say_unpacked(keys, job.seq_len)
    stack = _rollouts(keys, stack, job) if job.method in ("ppo", "grpo") else stack
    each = keys.whole("num_gpus_per_node") or 8
    return keys.case(
        source, model=model, plan=plan, job=job, stack=stack, num_devices=devices,
        devices_per_node=each if devices > each and devices == mapped else 0,
    )  # fmt: skip


_MODELS = ("train.model_args.model_name_or_path", "student_pretrain", "pretrain")
_CONFIG = "train.strategy_args.strategy_config."


def _of_core(keys: Keys) -> dict[str, str]:
    """Return the settings of Megatron-Core that a plan has a word for, by the name of its argument."""
    known = {name for name, one in by_name().items() if one.read} | NAMES.keys()
    ours = [path for path in keys.values if path.startswith(_CONFIG) and path.removeprefix(_CONFIG) in known]
    return {path.removeprefix(_CONFIG): path for path in ours}


def _usual(keys: Keys) -> dict[str, Any]:
    """Return what mcore_adapter sets where nobody says (training_args.py, models/model_config.py __post_init__)."""

    def stated(name: str) -> Any:
        return keys.raw(_CONFIG + name)

    open_ = stated("recompute_method") is None and stated("recompute_num_layers") is None
    whole = keys.word(_CONFIG + "recompute_granularity") == "full" and open_
    usual: dict[str, Any] = {"recompute_method": "uniform", "recompute_num_layers": 1} if whole else {}
    if (keys.whole(_CONFIG + "tensor_model_parallel_size") or 1) > 1 and (
        keys.whole(_CONFIG + "expert_model_parallel_size") or 1
    ) > 1:
        usual["sequence_parallel"] = True
    return usual | {"overlap_p2p_comm": True, "create_attention_mask_in_dataloader": False}


def _places(keys: Keys, path: str) -> list[range]:
    """Return the devices that a worker is mapped to, as ranges of their numbers, none where it is not said."""
    stated = keys.values.get(path)
    if isinstance(stated, list):
        return [range(int(one), int(one) + 1) for one in map(str, stated) if one.isdecimal()]
    places: list[range] = []
    for low, high, listed in _RANGE.findall(str(stated or "")):
        ones = [int(one) for one in listed.split(",") if one.strip()]
        places += [range(int(low), int(high))] if high else [range(one, one + 1) for one in ones]
    return [some for some in places if some]


def _meet(theirs: list[range], ours: list[range]) -> bool:
    """Return whether two workers have a device in common, without counting the devices one by one."""
    ends = [0, 0]
    for low, high, side in sorted((some.start, some.stop, i) for i, one in enumerate((theirs, ours)) for some in one):
        if low < ends[1 - side]:
            return True
        ends[side] = max(ends[side], high)
    return False


def _fsdp(keys: Keys, devices: int) -> Plan:
    """Return the plan of FSDP2, whose groups of a size are copies of each other."""
    cp = keys.whole("train.model_args.ulysses_size") or 1
    size = keys.whole(_CONFIG + "fsdp_size", rest=True) or devices
    if devices % cp or (devices and devices % size):
        keys.fail(_CONFIG + "fsdp_size", f"must divide the {devices} devices, as must ulysses_size", "use divisors")
        return Plan()
    if (keys.whole(_CONFIG + "ep_size") or 1) > 1:
        keys.fail(_CONFIG + "ep_size", "splits experts, which is read of megatron_train alone", "leave it out")
    mixed, kept = 1 < size < devices, keys.flag(_CONFIG + "reshard_after_forward") is False
    return Plan(
        cp=cp, dp=max(devices // cp, 0), cp_kind="all-to-all" if cp > 1 else "ring", sequence_parallel=False,
        sharding="none" if devices == 1 else "hsdp" if mixed else "shard-grad-op" if kept else "fsdp",
        shard=max(size // cp, 1) if mixed else 1,
        offload=("optimizer", "gradients", "parameters") if keys.flag(_CONFIG + "offload_policy") else (),
        recompute="none" if keys.flag("train.model_args.disable_gradient_checkpointing") else "full",
    )  # fmt: skip


def _job(keys: Keys, name: str, plan: Plan, strategy: str) -> Training:
    """Return the job: a batch is what every replica accumulates (base_worker.py train_step)."""
    times = keys.whole("train.training_args.gradient_accumulation_steps") or 1
    batch = plan.micro_batch * times * max(plan.dp, 1)
    halves = [keys.whole(one) for one in ("prompt_length", "response_length")]
    seq_len = keys.whole("sequence_length") or (sum(half or 0 for half in halves) if all(halves) else 0)
    if not seq_len:
        keys.problems.add("sequence_length", None, "is missing, and so is the response's", "say response_length")
    answers, prompts = keys.whole("num_return_sequences_in_group") or 1, keys.whole("rollout_batch_size") or 128
    steps = keys.whole("max_steps", rest=True) or 0
    goal: dict[str, Any] = {}
    if name == "actor_train" and keys.raw("chosen_key"):
        goal = {"method": "dpo"}
    elif name == "actor_train":
        compares = bool(keys.flag("use_kl_loss")) or keys.raw("init_kl_coef") not in (0, 0.0)
        method = "ppo" if (keys.word("adv_estimator") or "gae") == "gae" else "grpo"
        goal = {"method": method, "reference": "" if compares else "none"}
    elif name.startswith("student"):
        keys.assumed.append("the student's training alone: its teacher has devices of its own")
    lora = "lora" if keys.whole("train.model_args.lora_rank", least=0) else ""
    return Training(
        seq_len=max(seq_len, 1), global_batch=batch,
        token_budget=float(steps * (prompts * answers if "reference" in goal else batch) * seq_len),
        precision="bf16" if strategy == "megatron_train" else "amp-bf16", **goal,
        **(_trainer.adapted(keys, lora, _LORA) if lora else {}),
    )  # fmt: skip


def _rollouts(keys: Keys, stack: Stack, job: Training) -> Stack:
    """Return a stack with where the engine of rollouts is, and how long prompts are where that is said."""
    tp = "actor_infer.strategy_args.strategy_config.tensor_parallel_size"
    tp = tp if keys.raw(tp) else "actor_infer.strategy_args.strategy_config.tensor_model_parallel_size"
    stack = with_prompts(keys, stack, "prompt_length", tp)
    samples = (keys.whole("rollout_batch_size") or 128) * (keys.whole("num_return_sequences_in_group") or 1)
    stack = with_samples(stack, samples, job.global_batch)
    settings = stack.settings
    theirs, ours = (_places(keys, f"{one}.device_mapping") for one in ("actor_infer", "train"))
    if not theirs or _meet(theirs, ours):
        return replace(stack, settings=replace(settings, rollout="asleep" if theirs else settings.rollout))
    own = sum(map(len, theirs)) if settings.rollout_prompt_tokens else 0
    return replace(stack, settings=replace(settings, rollout="apart", rollout_devices=own))
