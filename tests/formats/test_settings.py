"""DeepSpeed's JSON and accelerate's YAML: what each key sets, what is left out and why, what contradicts."""

from __future__ import annotations

import json
import time
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import InputError
from shardwise.formats import SYSTEMS, ImportContext, _yaml, deepspeed, fsdp, import_file, torchtitan
from shardwise.plans import find_stack, stack_names

# Facts of https://huggingface.co/docs/transformers/main_classes/deepspeed, ZeRO-3 with offloading, in other words.
ZERO3: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "none"},
        "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
}  # fmt: skip

# Facts of https://github.com/huggingface/accelerate/blob/main/examples/config_yaml_templates/fsdp.yaml in other words.
FSDP = """
# a machine of eight
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: BertLayer
machine_rank: 0
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""


def test_a_configuration_of_transformers_is_understood() -> None:
    """What the trainer fills in stays open and is said, what is offloaded is so in the plan, nothing is unknown."""
    case = deepspeed.read(json.dumps(ZERO3))
    assert (case.plan.sharding, case.plan.micro_batch, case.plan.dp, case.job.global_batch) == ("zero3", 0, 0, 0)
    assert case.job.precision == "bf16-grads16"
    assert any("bf16.enabled" in text for text in case.assumed)
    ignored = {reading.argument for reading in case.ignored}
    assert case.plan.offload == ("optimizer", "gradients")
    assert "zero_optimization.offload_param.device" not in ignored
    assert not case.unknown
    assert case.stack.overlap_gradients


def test_accelerate_splits_heads_under_deepspeed_alone() -> None:
    """Ranks that split heads under FSDP are said to be without effect, as accelerate leaves them."""
    case = fsdp.read(FSDP + "parallelism_config:\n  parallelism_config_sp_size: 4\n")
    assert any(text.startswith("cp 1: sp_size 4") for text in case.assumed)


def test_what_deepspeed_no_longer_has_is_said() -> None:
    """Groups of ZeRO-3 are read as MiCS, which releases from 0.19 on refuse."""
    case = deepspeed.read_tree({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}, num_devices=8)
    assert any("until release 0.18" in text for text in case.assumed)


def test_accelerate_hands_over_to_deepspeeds_own_file(tmp_path: Path) -> None:
    """The file that accelerate names is read beside it."""
    (tmp_path / "ds.json").write_text(json.dumps(ZERO3))
    whole = "distributed_type: DEEPSPEED\nnum_processes: 16\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    (tmp_path / "a.yaml").write_text(whole)
    case = import_file(tmp_path / "a.yaml")
    assert (case.system, case.plan.sharding, case.plan.dp) == ("DeepSpeed", "zero3", 16)


WRONG_JSON: tuple[tuple[str, set[str]], ...] = (
    ("{", {"file"}),
    ("[]", {"file"}),
    ('{"bf16": {"enabled": true}, "fp16": {"enabled": true}, "zero_optimization": {"stage": 4}}',
     {"fp16.enabled", "zero_optimization.stage"}),
    ('{"train_batch_size": "many", "zero_optimization": {"stage": 1, "mics_shard_size": 2}}',
     {"train_batch_size", "zero_optimization.mics_shard_size"}),
)  # fmt: skip


@pytest.mark.parametrize(("text", "named"), WRONG_JSON)
def test_what_contradicts_in_json_is_named(text: str, named: set[str]) -> None:
    """Every key that is wrong is named, all at once."""
    with pytest.raises(InputError) as caught:
        deepspeed.read(text)
    assert {p.field for p in caught.value.problems} == named


WRONG_YAML = (
    "distributed_type: TPU", "mixed_precision: int4", "a: &x [*x]", "- a", "a: 1\na: 2", "a: *x", "? [a]\n: 1",
    "a: \t- b", "<<: 1", "--- {a: 1}\n--- {b: 1}", "a: !!python/name:os.system", "a: " + "[" * 3000,
    "a: " + "{a: " * 1500,
    "a: " + "9" * 5000, "x" * 5000, "just words", "", "\0", "a: 2024-13-45", "num_processes: 1e400",
    "num_processes: .inf", "num_processes: .nan", "num_processes: 0x" + "f" * 3000, "num_processes: \u00b2",
    "distributed_type: FSDP\nnum_processes: " + "1:" * 1900 + "1",
    FSDP.replace("  fsdp_forward_prefetch", "  fsdp_reshard_after_forward: false\n  fsdp_forward_prefetch"),
)  # fmt: skip


@pytest.mark.parametrize("text", WRONG_YAML)
def test_yaml_that_is_not_understood_is_refused(text: str) -> None:
    """Forms of YAML that are not read, unknown kinds and contradictions are errors, not guesses."""
    with pytest.raises(InputError):
        fsdp.read(text)


@pytest.mark.parametrize(
    ("said", "sharding", "note"),
    [
        ("fsdp_reshard_after_forward: true", "fsdp", ""),
        ("fsdp_reshard_after_forward: 'NO'", "shard-grad-op", ""),
        ("fsdp_sharding_strategy: FULL_SHARD", "fsdp", ""),
        ("fsdp_sharding_strategy: SHARD_GRAD_OP", "fsdp", "does not read fsdp_sharding_strategy, SHARD_GRAD_OP"),
        ("fsdp_sharding_strategy: NO_SHARD", "fsdp", "does not read fsdp_sharding_strategy, NO_SHARD"),
    ],
)
def test_fsdp_of_version_2_reads_a_switch_and_no_strategy(said: str, sharding: str, note: str) -> None:
    """Accelerate 1.15.0 reads FSDP_SHARDING_STRATEGY under version 1 alone, and shards weights under 2 unless told."""
    case = fsdp.read(f"distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n  {said}\n")
    assert case.plan.sharding == sharding
    assert [note in text for text in case.assumed] == ([True] if note else [])


@pytest.mark.parametrize("word", ["FULL_SHARD", "SHARD_GRAD_OP", "1.5"])
def test_fsdp_of_version_2_refuses_a_strategy_in_place_of_its_switch(word: str) -> None:
    """Accelerate 1.15.0 raises for a strategy there, which version 1 has under the same name."""
    text = f"distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_reshard_after_forward: {word}\n"
    with pytest.raises(InputError, match="fsdp_reshard_after_forward"):
        fsdp.read(text + "  fsdp_version: 2\n")
    if not word[0].isdigit():
        assert fsdp.read(text).plan.sharding in ("fsdp", "shard-grad-op")


@pytest.mark.parametrize("said", ["-8", ".nan", "1e400", "0", "x"])
def test_a_number_of_processes_that_is_none_is_refused(said: str) -> None:
    """What the file says of its devices is read even where others are asked for."""
    with pytest.raises(InputError, match="num_processes"):
        fsdp.read(f"distributed_type: FSDP\nnum_processes: {said}", around=ImportContext(num_devices=8))


LISTED = """
[training]
local_batch_size = 2
seq_len = 4096
[lr_scheduler]
warmup_steps = 2
"""
FOREIGN = """
[train]
batch_size = 8
seq_len = 4096
[distributed]
tp = 4
[optimizer]
name = "adamw"
lr = 1.0
"""
TUNED = "model:\n  _component_: torchtune.models.llama3_1.llama3_1_8b\nbatch_size: 2\n"
SWIFT = "swift infer --model Qwen/Qwen3-8B --val_dataset d --stream true\n"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a.json",
            '{"train_batch_size": 8, "zero_optimisation": {"stage": 2}}',
            "did you mean zero_optimization.stage",
        ),
        ("a.toml", LISTED + "[extra]\nexperts_kept = 2\n", "extra.experts_kept = 2: .* speaks of sizes"),
        ("a.toml", FOREIGN, "3 of 5 words"),
        ("a.yaml", TUNED + "tasks: [mmlu]\nmax_seq_length: 4096\n", "torchtune's evaluation"),
        ("a.yaml", TUNED + "grpo_samples: 16\nforward_batch_size: 1\n", "GRPO"),
        ("a.yaml", "tasks:\n  - name: build\n    run: make\n", "has no setting of a system that is read"),
        ("job.yaml", "kind: Service\n---\nkind: Job\nspec: {}\n", "is Kubernetes' Job around what it starts"),
        ("a.sh", SWIFT, "ms-swift"),
    ],
)
def test_words_that_may_change_the_answer_are_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    """A misspelt key, an unknown one that speaks of sizes, and a file of another system are not read past."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=said):
        import_file(path)


def test_unknown_keys_are_listed(tmp_path: Path) -> None:
    """A key that the system does not have is listed with its value, also one that the user lets through."""
    path = tmp_path / "a.toml"
    path.write_text(LISTED + "[extra]\nexperts_kept = 2\ncolour = 1\n", encoding="utf-8")
    case = import_file(path, around=ImportContext(skipped=("extra.*",)))
    assert [(r.argument, r.value) for r in case.unknown] == [("extra.experts_kept", 2), ("extra.colour", 1)]


def test_settings_of_earlier_releases_are_read_as_those_of_today() -> None:
    """Torchtitan's degrees stood under training and experimental until 2025, and its batch had another name."""
    text = "[training]\nbatch_size = 2\ntensor_parallel_degree = 4\nseq_len = 8192\n"
    text += "[experimental]\npipeline_parallel_degree = 2\ncontext_parallel_degree = 2\n"
    case = torchtitan.read(text, around=ImportContext(num_devices=64))
    plan = case.plan
    assert (plan.tp, plan.pp, plan.cp, plan.dp, plan.micro_batch) == (4, 2, 2, 4, 1) and not case.silent
    assert case.job.global_batch == 8 and any("training.batch_size" in note for note in case.assumed)


def test_what_is_dumped_is_parsed_back() -> None:
    """Maps, numbers, words that look like other values, and nothing survive being written."""
    tree = {"a": 1, "b": {"c": True, "d": None, "e": "no", "f": "1", "g": 2.5, "h": "x y"}}
    assert _yaml.parse(_yaml.dump(tree)) == tree


def test_each_system_is_known_by_the_name_of_its_file(tmp_path: Path) -> None:
    """Every system that is read has the same three functions, and its file comes back through the one reader."""
    texts = {
        "a.json": ('{"zero_optimization": {"stage": 2}}', "DeepSpeed"),
        "a.yaml": (FSDP, "accelerate"),
        "a.toml": ("[parallelism]\ntensor_parallel_degree = 2\n[training]\nlocal_batch_size = 1\n", "torchtitan"),
    }
    for name, (text, system) in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert import_file(tmp_path / name, around=ImportContext(num_devices=8)).system == system
        with pytest.raises(InputError, match="is no script"):
            import_file(tmp_path / name, {"NNODES": "2"})
    for system in SYSTEMS:
        module = import_module(f"shardwise.formats.{system}")
        assert callable(module.recognises) and callable(module.read) and callable(module.export)
    assert set(SYSTEMS) <= {find_stack(name).runs.exporter for name in stack_names()}


@pytest.mark.parametrize("value", ["nan", "inf", "-1e308", "1e400", "0", "-2", "1.5", "9" * 30, "true", "[1]", '"8"'])
@pytest.mark.parametrize("key", ["training.seq_len", "training.steps", "parallelism.data_parallel_shard_degree"])
def test_a_value_of_torchtitan_that_counts_nothing_is_refused(key: str, value: str) -> None:
    """What is no whole number, or none that could be counted to, is refused by its key, whichever key it is."""
    section, name = key.split(".")
    with pytest.raises(InputError, match=key):
        torchtitan.read(f'[model]\nname = "llama3"\nflavor = "8B"\n[{section}]\n{name} = {value}\n')


def test_every_value_that_was_read_is_json() -> None:
    """What a file holds and nobody knows is said as text where JSON has no such number."""
    case = torchtitan.read(f'[model]\nname = "llama3"\nflavor = "8B"\n[other]\nx = nan\ny = {"9" * 30}\n')
    assert [json.loads(json.dumps(r.value, allow_nan=False)) for r in case.unknown] == ["nan", "9" * 30]


@pytest.mark.parametrize("each", [(8, 8, 8, 8), (8, 9, 8, 7)])
def test_modules_that_torchtitan_is_given_are_the_stages_of_the_plan(each: tuple[int, ...]) -> None:
    """Listed modules are taken as they are, equal ones too where torchtitan itself would give the ends fewer layers."""
    ends = [sum(each[:i]) for i in range(5)]
    parts = [[f"layers.{i}" for i in range(a, b)] for a, b in pairwise(ends)]
    sizes = "pipeline_parallel_degree = 4\ndata_parallel_shard_degree = 2\n"
    text = f'[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\n{sizes}module_fqns_per_model_part = {parts}\n'
    assert torchtitan.read(text, around=ImportContext(num_devices=8)).plan.stage_layers == each


def test_aliases_and_merges_are_what_they_stand_for() -> None:
    """A map's own keys come before merged ones, the first merged map before the second, and nothing is shared."""
    text = """
a: &a {x: 1, y: 2}
b: &b
  x: 3
  <<: *a
c:
- {<<: [*a, *b], z: 4}
- *b
d: &d word
e: {*d : *d}
"""
    tree = _yaml.parse(text)
    both = {"x": 3, "y": 2}
    assert tree == {"a": {"x": 1, "y": 2}, "b": both, "c": [{"x": 1, "y": 2, "z": 4}, both], "d": "word",
                    "e": {"word": "word"}}  # fmt: skip
    assert tree["c"][1] is not tree["b"]


_TENS = list(zip("abcdefghij", "bcdefghijk", strict=True))
BOMBS = (
    ("a: &a [" + "x, " * 10 + "]\n" + "".join(f"{new}: &{new} [{f'*{old}, ' * 10}]\n" for old, new in _TENS), "10,000"),
    ("a: &a {x: 1}\n" + "".join(f"{new}: &{new} {{<<: [{f'*{old}, ' * 10}]}}\n" for old, new in _TENS), "10,000"),
    ("a: &a [" + "1," * 4000 + "]\nb: [*a, *a, *a]", "10,000"),
    ("a: &a " + "x" * 15000 + "\nb: [" + "*a, " * 15000 + "]", "10,000"),
    ("a: &a {b: [*a]}", "inside what it stands for"),
    ("a: &a\n  <<: *a", "inside what it stands for"),
    ("a: &a " + "[" * 20 + "]" * 20 + "\nb: " + "[" * 20 + "*a" + "]" * 20, "deeper than 32 levels"),
    ("a: &a {x: 1}\nb: {<<: *a, <<: *a}", "stands twice"),
    ("a: &a {x: 1}\nb: {<<: *a, y: 1, y: 2}", "stands twice"),
    ("a: &a [x]\nb: {<<: *a}", "not valid YAML"),
    ("a: &a [x]\nb: {*a : 1}", "not a word"),
)


@pytest.mark.parametrize(("text", "rule"), BOMBS)
def test_aliases_that_stand_for_more_than_settings_are_refused(text: str, rule: str) -> None:
    """What aliases stand for is counted, not built: a file of any expansion is refused at once, with its line."""
    began = time.perf_counter()
    with pytest.raises(InputError, match=rule):
        _yaml.parse(text)
    assert time.perf_counter() - began < 2
