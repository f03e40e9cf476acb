"""slime's launches: Megatron-LM's arguments beside its own of rollouts, for `train.py` and `train_async.py` under Ray.

Source: github.com/THUDM/slime 624b824a slime/utils/arguments.py and backends/megatron_utils/{arguments,actor}.py. The
model is the checkpoint's, with which the arguments of scripts/models must agree (_hf_validate_args). None are written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from shardwise.formats import _trainer
from shardwise.formats._checkpoints import with_prompts, with_samples
from shardwise.formats._imported import PLAIN, ImportContext, Imported, Keys
from shardwise.formats._launch import started
from shardwise.formats.megatron._beside import plan_beside, worded
from shardwise.formats.megatron._values import arguments, by_name, from_words
from shardwise.plans import Plan, Stack, Training
from shardwise.records import replace

_TABLE = "slime.toml"
_OWN = re.compile(r"--(actor-num-gpus-per-node|rollout-num-gpus)\b")
# slime/backends/megatron_utils/arguments.py _set_default_megatron_args and validate_args; sequences are packed by their
# lengths (data.py get_batch), without a mask.
_USUAL = {
    "use_distributed_optimizer": True,
    "moe_token_dispatcher_type": "alltoall",
    "create_attention_mask_in_dataloader": False,
}


def recognises(name: str, text: str) -> bool:
    """Return whether a script starts slime: its arguments say on how many devices the policy lies."""
    return not name.endswith((".json", ".toml", ".yaml", ".yml")) and bool(_OWN.search(text))


def read(text: str, source: str = "run.sh", around: ImportContext = PLAIN) -> Imported:
    r"""Return the case of the policy's training: an optimizer step is a batch of answers.

    >>> words = "python3 train.py --actor-num-gpus-per-node 8 --colocate --hf-checkpoint /root/Qwen3-4B "
    >>> words += "--rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 --num-rollout 9 "
    >>> case = read(words + "--tensor-model-parallel-size 2 --use-dynamic-batch-size --max-tokens-per-gpu 9216")
    >>> case.num_devices, case.plan.dp, case.job.method, case.job.global_batch, case.plan.micro_batch
    (8, 4, 'grpo', 256, 1)
    """
    launch = started(text, lambda word: bool(_OWN.match(word)), source, around.variables)
    core, own = _split((*launch.arguments, *around.more))
    given = from_words(core)
    keys = Keys({}, _TABLE, source)
    keys.values = {**_trainer.spelled_words(own), **given.values}
    keys.problems.items = given.problems.items
    keys.table = worded(keys)
    path = str(keys.values.get("hf_checkpoint") or "")
    if "$" in path and "$" not in path.rpartition("/")[2]:
        keys.values["hf_checkpoint"] = path.rpartition("/")[2]
    model = _trainer.model_named(keys, "hf_checkpoint")
    each = keys.whole("actor_num_gpus_per_node") or 8
    devices = around.num_devices or (keys.whole("actor_num_nodes") or 1) * each
    words = {name: name for name in keys.values if name in by_name() and by_name()[name].read}
    plan, stack = plan_beside(keys, words, devices, ("--hf-checkpoint", model), _USUAL)
    job = _job(keys)
    plan = replace(plan, micro_batch=_micro_batch(keys, plan, job.seq_len))
    _trainer.say_unpacked(keys, job.seq_len)
    case = keys.case(
        source, model=model, plan=plan, job=job, stack=_rollouts(keys, stack, job), num_devices=devices,
        devices_per_node=0 if around.num_devices else each,
    )  # fmt: skip
    return replace(case, assumed=(*launch.notes, *case.assumed))


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return Megatron-LM's arguments with their values, and slime's own."""
    sides: tuple[list[str], list[str]] = ([], [])
    side = sides[1]
    for word in words:
        if _ARRAY.fullmatch(word):
            continue
        if word.startswith("--"):
            option = word.partition("=")[0]
            side = sides[0 if option in arguments() and option[2:].replace("-", "_") not in _RESET else 1]
        if word.startswith("--") or side:
            side.append(word)
    return sides


# Arguments of scripts/models, which a script takes from a file of its own.
_ARRAY = re.compile(r"\$\{\w+\}")
# What slime declares anew (arguments.py reset_arg).
_RESET = ("global_batch_size", "micro_batch_size", "load", "save", "save_interval", "eval_interval")


def _job(keys: Keys) -> Training:
    """Return the job: samples of a step are those that are said, or the rollout's by its number of steps."""
    answers, prompts = keys.whole("n_samples_per_prompt") or 1, keys.whole("rollout_batch_size") or 0
    samples = answers * prompts
    batch = keys.whole("global_batch_size") or samples // (keys.whole("num_steps_per_rollout") or 1)
    if not batch:
        keys.problems.add("global_batch_size", None, "is missing, and so is the rollout's", "say --global-batch-size")
    seq_len, rollouts = _length(keys), keys.whole("num_rollout") or 0
    tunes = keys.word("loss_type") == "sft_loss"
    compares = bool(keys.flag("use_kl_loss")) or keys.raw("kl_coef") not in (None, 0, 0.0)
    method = "ppo" if keys.word("advantage_estimator") == "ppo" else "grpo"
    goal: dict[str, Any] = {} if tunes else {"method": method, "reference": "" if compares else "none"}
    if compares and not tunes:
        keys.assumed.append("the reference beside the policy: slime keeps it on the host, memory is overstated")
    return Training(
        seq_len=seq_len, global_batch=max(batch, 1), token_budget=float(rollouts * max(samples, batch) * seq_len),
        precision="fp16" if keys.flag("fp16") else "bf16", optimizer=_optimizer(keys), **goal,
    )  # fmt: skip


def _optimizer(keys: Keys) -> str:
    word = keys.word("optimizer") or "adam"
    return _trainer.known_optimizer(keys, word, {"adam": "adam", "sgd": "sgd", "muon": "muon"}.get(word, ""))


def _length(keys: Keys) -> int:
    """Return the tokens of a sequence: of a context, of a prompt and its answer, or what a device takes at once."""
    answer, prompt = keys.whole("rollout_max_response_len") or 0, keys.whole("rollout_max_prompt_len") or 0
    if whole := keys.whole("rollout_max_context_len"):
        return whole
    if answer and not prompt:
        keys.assumed.append(f"seq_len {answer}: of answers alone, no argument says how long prompts are")
    stated = answer + prompt or keys.whole("seq_length") or keys.whole("max_tokens_per_gpu") or 0
    if not stated:
        keys.problems.add("rollout_max_response_len", None, "is missing, and no other length is given", "say it")
    return max(stated, 1)


def _micro_batch(keys: Keys, plan: Plan, seq_len: int) -> int:
    """Return the sequences of a micro-batch: as stated, or whole ones within the tokens of a dynamic one."""
    tokens = keys.whole("max_tokens_per_gpu") or 0
    if not (keys.flag("use_dynamic_batch_size") and tokens):
        return keys.whole("micro_batch_size") or 1
    size = max(tokens * plan.cp // seq_len, 1)
    keys.assumed.append(f"micro_batch {size}: as many whole sequences as {tokens * plan.cp} tokens hold")
    return size


def _rollouts(keys: Keys, stack: Stack, job: Training) -> Stack:
    """Return a stack with where SGLang is while the policy trains, and how long prompts are where that is said."""
    if job.method == "sft":
        return stack
    stack = with_prompts(keys, stack, "rollout_max_prompt_len", "rollout_num_gpus_per_engine")
    samples = (keys.whole("rollout_batch_size") or 0) * (keys.whole("n_samples_per_prompt") or 1)
    stack = with_samples(stack, samples, job.global_batch)
    settings = stack.settings
    if not keys.flag("colocate"):
        own = keys.whole("rollout_num_gpus", least=0) or 0
        settings = replace(settings, rollout="apart", rollout_devices=own if settings.rollout_prompt_tokens else 0)
    elif keys.flag("no_offload_rollout"):
        keys.assumed.append("no memory of the engine that stays awake: give --rollout awake --rollout-memory")
    else:
        settings = replace(settings, rollout="asleep")
    return replace(stack, settings=settings)
