"""OpenRLHF's launches: `openrlhf.cli.train_sft`, `train_dpo`, `train_rm` and `train_ppo_ray`.

Source: openrlhf 0.11.2 openrlhf/cli/train_*.py, utils/deepspeed/deepspeed_utils.py get_train_ds_config, models/actor.py
and models/utils.py; 0.9.0 for what was called otherwise. Nothing writes them.
"""

from __future__ import annotations

import re
from typing import Any

from shardwise.formats import _trainer, _yaml, deepspeed
from shardwise.formats._checkpoints import reentrant
from shardwise.formats._imported import PLAIN, ImportContext, Imported, Keys, table
from shardwise.formats._launch import started
from shardwise.plans import Plan, Stack, Training, fused_layers, with_attention
from shardwise.records import replace

_TABLE = "openrlhf.toml"
_COMMAND = re.compile(r"\bopenrlhf\.cli\.train_(sft|dpo|rm|ppo_ray)\b")
_LORA = _trainer.AdapterKeys(
    rank="ds.lora.rank", alpha="ds.lora.alpha", dropout="ds.lora.dropout", targets="ds.lora.target_modules", saved="",
    usual_rank=8, usual_targets=("all-linear",),
)  # fmt: skip
# Program -> what it optimises, the tokens of a sequence and the micro-batch where nothing is said.
_PROGRAMS = {"sft": ("sft", 2048, 8), "dpo": ("dpo", 512, 8), "rm": ("reward", 512, 1), "ppo_ray": ("ppo", 2048, 1)}
_BATCH = 128


def recognises(name: str, text: str) -> bool:
    """Return whether a script starts one of its trainers."""
    return not name.endswith((".json", ".toml", ".yaml", ".yml")) and bool(_COMMAND.search(text))


def read(text: str, source: str = "train.sh", around: ImportContext = PLAIN) -> Imported:
    r"""Return the case of a command or of a script of it.

    >>> text = "deepspeed --num_gpus 8 --module openrlhf.cli.train_sft --model.model_name_or_path Qwen/Qwen3-8B "
    >>> case = read(text + "--ds.zero_stage 3 --data.max_len 4096 --model.gradient_checkpointing_enable")
    >>> case.num_devices, case.plan.sharding, case.plan.micro_batch, case.job.global_batch, case.job.seq_len
    (8, 'zero3', 8, 128, 4096)
    """
    own = table(_TABLE)
    known = {f"--{key}" for key in (*own["read"], *own["policy"], *own["other_releases"])}
    launch = started(text, known.__contains__, source, around.variables)
    program = _COMMAND.search(launch.launch.program) or _COMMAND.search(text)
    words = _trainer.spelled_words((*launch.arguments, *around.more))
    keys = Keys({own["policy"].get(path, path): value for path, value in words.items()}, _TABLE, source)
    _yaml.refuse_open(keys)
    older = any(path in keys.values for path in ("pretrain", "zero_stage", "micro_train_batch_size"))
    keys.renew()
    each = keys.whole("actor.num_gpus_per_node") or 8
    ray = (keys.whole("actor.num_nodes") or 1) * each
    word = program[1] if program else "sft"
    # Its own scripts keep the arguments in a variable, behind a launcher of a line of its own.
    behind = re.search(r"\bdeepspeed\b.*--num_gpus[ =](\d{1,6})\b", text)
    local = launch.launch.num_devices or (int(behind[1]) if behind else 0)
    devices = around.num_devices or (ray if word == "ppo_ray" else local)
    case = _case(keys, word, source, devices, older)
    within = each if word == "ppo_ray" else launch.launch.devices_per_node
    return replace(case, devices_per_node=0 if around.num_devices else within, assumed=(*launch.notes, *case.assumed))


def _case(keys: Keys, word: str, source: str, devices: int, older: bool) -> Imported:
    method, usual_length, usual_micro = _PROGRAMS[word]
    model = _trainer.model_named(keys, "model.model_name_or_path")
    launched = deepspeed.read_tree(_deepspeed(keys, older), source, devices)
    seq_len = _length(keys, usual_length, word)
    plan = _plan(keys, launched.plan, seq_len, keys.whole("train.micro_batch_size") or usual_micro)
    goal = _objective(keys, method)
    job = Training(
        seq_len=seq_len,
        global_batch=keys.whole("train.batch_size") or _BATCH,
        precision=launched.job.precision,
        optimizer="muon" if keys.word("model.optim") == "muon" else "adam",
        **_adapter(keys),
        **goal,
    )
    _trainer.say_unpacked(keys, seq_len)
    stack = _stack(keys, launched.stack)
    stack = _rollouts(keys, stack, seq_len) if word == "ppo_ray" else stack
    return keys.case(source, model=model, plan=plan, job=job, stack=stack, num_devices=devices)


def _deepspeed(keys: Keys, older: bool) -> dict[str, Any]:
    """Return DeepSpeed's configuration, as get_train_ds_config makes it; before 0.11 fp32 without --bf16.

    Sizes of "auto", which transformers' Trainer alone fills in, are DeepSpeed's own (runtime/config_utils.py).
    """
    kind = keys.word("ds.param_dtype") or ("bf16" if keys.flag("bf16") or not older else "fp32")
    stage = keys.whole("ds.zero_stage", least=0)
    zero: dict[str, Any] = {"stage": 2 if stage is None else stage}
    if keys.flag("ds.adam_offload"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if keys.flag("ds.overlap_comm"):
        zero["overlap_comm"] = True
    tree: dict[str, Any] = {"zero_optimization": zero, **({kind: {"enabled": True}} if kind != "fp32" else {})}
    if keys.word("ds.grad_accum_dtype"):
        tree["data_types"] = {"grad_accum_dtype": keys.word("ds.grad_accum_dtype")}
    if tp := keys.whole("ds.tensor_parallel_size"):
        tree["tensor_parallel"] = {"autotp_size": tp}
    return tree


def _length(keys: Keys, usual: int, word: str) -> int:
    """Return the tokens of a sequence; until 0.10 those of a prompt and of its answer."""
    halves = keys.whole("prompt_max_len"), keys.whole("generate_max_len")
    if word == "ppo_ray" and any(halves):
        return sum(half or 1024 for half in halves)
    return keys.whole("data.max_len") or usual


def _plan(keys: Keys, plan: Plan, seq_len: int, micro_batch: int) -> Plan:
    ring = keys.whole("ds.ring_attn_size") or 1
    if plan.dp % ring:
        rule = f"must divide the {plan.dp} ranks beside tensor parallelism"
        keys.fail("ds.ring_attn_size", rule, "use a divisor")
        ring = 1
    if keys.flag("train.dynamic_batch_enable"):
        tokens = (keys.whole("train.max_tokens_per_gpu") or 16192) * ring
        micro_batch = max(tokens // seq_len, 1)
        keys.assumed.append(f"micro_batch {micro_batch}: as many whole sequences as {tokens} tokens hold")
    kept = not keys.flag("model.gradient_checkpointing_enable")
    return replace(
        plan, cp=ring, cp_kind="ring", dp=plan.dp // ring, micro_batch=micro_batch,
        recompute="none" if kept else "full",
    )  # fmt: skip


def _objective(keys: Keys, method: str) -> dict[str, Any]:
    """Return what is optimised and whether a reference is read.

    cli/train_ppo_ray.py: estimators but "gae" have no critic, and no reference is made where init_coef is 0; models
    that are not colocated have devices of their own.
    """
    if method != "ppo":
        return {} if method == "sft" else {"method": method}
    together, coefficient = bool(keys.flag("train.colocate_all")), keys.raw("algo.kl.init_coef")
    compares = coefficient is None or bool(coefficient)
    shares = together or bool(keys.flag("train.colocate_actor_ref"))
    critic = (keys.word("algo.advantage.estimator") or "gae") == "gae"
    apart = [name for name, has in (("reference", compares and not shares), ("critic", critic and not together)) if has]
    for name in apart:
        keys.assumed.append(f"the {name} has devices of its own: the policy's alone are counted")
    if critic and together and keys.flag("ds.enable_sleep"):
        keys.assumed.append("the critic's states beside the policy's: ds.enable_sleep moves them, memory is overstated")
    return {"method": "ppo" if critic and together else "grpo", "reference": "" if compares and shares else "none"}


def _adapter(keys: Keys) -> dict[str, Any]:
    narrow = {"base": "nf4-dq"} if keys.flag("ds.load_in_4bit") else {}
    if not keys.whole("ds.lora.rank", least=0):
        return {}
    return _trainer.adapted(keys, "lora", _LORA) | narrow


def _stack(keys: Keys, stack: Stack) -> Stack:
    """Return DeepSpeed's stack with what OpenRLHF does: FlashAttention-2 and log-probabilities of fp32 logits.

    models/actor.py forward widens the logits, models/utils.py log_probs_from_logits hands them to
    flash_attn.ops.triton.cross_entropy, which writes a gradient of its own.
    """
    word = keys.word("ds.attn_implementation") or "flash_attention_2"
    stack = with_attention(stack, word)
    stack = replace(stack, checkpoint_reenters="", settings=replace(stack.settings, loss="compiled-fp32"))
    stack = reentrant(keys, stack, "model.gradient_checkpointing_reentrant")
    return fused_layers(stack) if keys.flag("ds.use_liger_kernel") else stack


def _rollouts(keys: Keys, stack: Stack, seq_len: int) -> Stack:
    """Return a stack with where vLLM is while the policy trains, and how long prompts are where that follows."""
    engines, tp = keys.whole("vllm.num_engines", least=0) or 0, keys.whole("vllm.tensor_parallel_size") or 1
    answer = keys.whole("rollout.max_new_tokens") or 0
    prompt = keys.whole("prompt_max_len") or (seq_len - answer if 0 < answer < seq_len else 0)
    settings = stack.settings
    if not engines:
        return stack
    if prompt:
        settings = replace(settings, rollout_prompt_tokens=prompt, rollout_tp=tp)
    if not keys.flag("train.colocate_all") or keys.flag("train.async_enable"):
        devices = engines * tp if prompt else 0
        return replace(stack, settings=replace(settings, rollout="apart", rollout_devices=devices))
    if keys.flag("vllm.enable_sleep"):
        return replace(stack, settings=replace(settings, rollout="asleep"))
    keys.assumed.append("no memory of the engine that stays awake: give --rollout awake --rollout-memory")
    return replace(stack, settings=settings)
