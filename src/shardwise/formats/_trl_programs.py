"""The program of TRL's that a YAML without one is for, by the settings that only one has.

Source: trl 1.16.0 trainer/{dpo,kto,reward,grpo}_config.py and experimental/{orpo,cpo}.
"""

from __future__ import annotations

import re

from shardwise.formats._imported import Keys
from shardwise.formats._words import words_of

PROGRAMS = ("sft", "dpo", "grpo", "rloo", "reward", "kto", "orpo", "cpo")
"""Programs of TRL's whose defaults and objective are known."""
NO_MISMATCH = "apo_zero_unpaired"
"""KTO's loss without mismatched answers (trl 1.16.0 trainer/kto_trainer.py calculate_kl)."""
# trl 1.16.0 trainer/dpo_config.py, loss_type: losses of pairs that other programs do not have.
_LOSSES_OF_PAIRS = frozenset((
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_pair",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm",
))  # fmt: skip
# Settings that one program has -> the program, of which the first that is set counts.
_OWN = (
    ("grpo", ("num_generations", "max_completion_length", "reward_funcs", "use_vllm")),
    ("reward", ("center_rewards_coefficient",)),
    ("kto", ("desirable_weight", "undesirable_weight")),
    ("cpo", ("cpo_alpha", "simpo_gamma")),
    ("dpo", ("precompute_ref_log_probs", "reference_free", "rpo_alpha", "use_logits_to_keep", "f_divergence_type")),
)
# What all of those that compare answers have, and the next token's training has not.
_OF_ANSWERS = ("beta", "max_prompt_length")


def program_of(keys: Keys, source: str) -> str:
    """Return the program of TRL's that settings are for: by their own names, else by the word in the file's path."""
    losses = {*words_of(keys, "loss_type")}
    by_value = {
        "reward": "center_rewards_coefficient" in keys.values,
        "kto": bool(losses & {"kto", NO_MISMATCH}),
        "dpo": bool(losses & _LOSSES_OF_PAIRS),
    }
    for program, names in _OWN:
        if by_value.get(program) or any(keys.raw(name) is not None for name in names):
            return program
    answers = [name for name in _OF_ANSWERS if keys.raw(name) is not None]
    if not answers:
        return "sft"
    named = re.findall(r"(?<![a-z])(dpo|kto|orpo|cpo)(?![a-z])", source.lower())
    program = named[-1] if named else "dpo"
    keys.assumed.append(f"method of {program.upper()}: {answers[0]} is of trainers that compare answers")
    return program
