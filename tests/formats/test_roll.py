"""Pipelines of ROLL: which devices a worker is mapped to, and whether another has them too."""

from __future__ import annotations

import pytest

from shardwise.formats.roll import read

PIPELINE = """pretrain: Qwen/Qwen3-8B
prompt_length: 1024
response_length: 3072
adv_estimator: grpo
actor_train:
  training_args: {per_device_train_batch_size: 1}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2}}
  device_mapping: list(range(8,16))
actor_infer:
  device_mapping: '%s'
"""


@pytest.mark.parametrize(
    ("mapped", "rollout", "devices"),
    [
        ("list(range(0,8))", "apart", 8),
        ("list(range(0,4)) + list(range(16,20))", "apart", 8),
        ("list(range(0,9))", "asleep", 0),
        ("list(range(0,4)) + list([15])", "asleep", 0),
        ("list(range(12,13))", "asleep", 0),
        ("list([0, 1]) + list(range(4,4))", "apart", 2),
    ],
)
def test_workers_that_share_a_device_take_turns(mapped: str, rollout: str, devices: int) -> None:
    """The engine sleeps where the policy trains on one of its devices; else it has its own."""
    settings = read(PIPELINE % mapped).stack.settings
    assert (settings.rollout, settings.rollout_devices) == (rollout, devices)


def test_devices_are_not_counted_one_by_one() -> None:
    """A line of ranges of a million devices each is read in no time: 600 of them took a minute and a half."""
    many = " + ".join(["list(range(16,999999))"] * 600)
    assert read(PIPELINE % many).stack.settings.rollout_devices == 600 * (999999 - 16)
