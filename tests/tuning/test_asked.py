"""Fine-tuning as people ask for it: the door of the command line and of Python, and what the answers say."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from command_line import figures, run, trained
from shardwise import Cluster, Plan, Training, load_model, train
from shardwise.errors import InputError
from shardwise.formats._targets import reached
from shardwise.plans import find_stack
from shardwise.training import TrainingOptions, TrainReport, comm

WHERE = ("--on", "rtx-4090", "--seq-len", "512")


def asked(*words: str) -> dict[str, Any]:
    """The JSON of an answer."""
    found: dict[str, Any] = json.loads(run(*words, "--json").out)
    return found


def report(**job: Any) -> TrainReport:
    """Llama-3.2-1B on a consumer board, fine-tuned as a job says."""
    cluster = Cluster.parse("1xrtx-4090")
    return train(load_model("llama-3.2-1b"), cluster, Plan(), Training(seq_len=512, global_batch=1, **job))


def test_the_command_that_people_type_is_answered() -> None:
    """QLoRA of an 8B model on a 24 GB board fits, and says what trains, in which types."""
    found = asked("train", "llama-3.1-8b", *WHERE, "--adapter", "lora", "--base", "nf4", "--rank", "16")
    assert found["fits"]
    assert found["tuning"]["trainable_parameters"] == 41943040
    assert found["tuning"]["trainable_share"] == pytest.approx(41943040 / 8030261248)
    assert (found["tuning"]["base"], found["tuning"]["adapter_precision"]) == ("nf4", "fp32")
    assert sum(found["tuning"]["trainable_by_module"].values()) == 41943040
    assert any(note.startswith("targets all-linear") for note in found["assumptions"])
    own = asked("train", "llama-3.1-8b", *WHERE, "--qlora", "--stack", "torchtune")
    assert own["tuning"]["adapter_precision"] == "bf16"


@pytest.mark.parametrize(
    ("words", "recomputed"),
    [(("--qlora",), "full"), (("--qlora", "--recompute", "none"), "none"), (("--lora",), "none"),
     (("--qlora", "--stack", "axolotl"), "none")],
)  # fmt: skip
def test_quantised_weights_are_prepared_as_peft_does(words: tuple[str, ...], recomputed: str) -> None:
    """prepare_model_for_kbit_training recomputes unless told, so that an 8B model trains on 24 GB as people know it."""
    found = asked("train", "llama-3.1-8b", "--on", "rtx-4090", "--seq-len", "2048", *words)
    assert found["plan"]["recompute"] == recomputed
    # axolotl's own functions of LoRA keep half of what modules do.
    assert found["fits"] == (recomputed == "full" or "axolotl" in words)
    assert ("--recompute" in words or recomputed == "none") != any("unless told" in n for n in found["assumptions"])


def test_full_training_has_no_tuning() -> None:
    """Where all weights train the answer has no tuning and counts nothing as frozen."""
    assert asked("train", "llama-3.2-1b", *WHERE)["tuning"] is None
    assert report().tuning is None


def test_operators_of_a_model_are_made_once_whatever_a_fine_tuning_asks_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Targets, ranks, notes and counts read the same operators: plain ones, and those with the adapters of the job."""
    count: Any = import_module("shardwise.ops.count")
    made, lines = list[object](), count.lines
    monkeypatch.setattr(count, "lines", lambda *asked: made.append(asked) or lines(*asked))
    count.whole_lines.cache_clear()
    for method in ("sft", "dpo", "grpo"):
        report(adapter="lora", rank=7, targets=("q_proj",), method=method)
    assert len(made) == 2


def test_a_count_lists_trainable_parameters_by_layer() -> None:
    """`count --adapter` says what each linear layer trains."""
    found = asked("count", "llama-3.1-8b", "--adapter", "lora", "--rank", "16", "--targets", "q,v")
    assert found["params"]["trainable"] == 6815744
    assert found["params"]["trainable_by_module"] == {"q": 4194304, "v": 2621440}
    assert asked("count", "llama-3.1-8b")["params"]["trainable"] is None


@pytest.mark.parametrize(
    ("model", "targets", "trained"),
    [
        ("bloom-7b1", "qkv", 3_932_160),
        ("falcon-7b", "qkv", 2_359_296),
        ("mpt-7b", "qkv", 4_194_304),
    ],
)
def test_a_joint_layer_of_a_classic_model_has_one_adapter(model: str, targets: str, trained: int) -> None:
    """What peft prints for BLOOM-7B's and Falcon-7B's query_key_value and MPT-7B's Wqkv at rank 8."""
    found = asked("count", model, "--adapter", "lora", "--rank", "8", "--targets", targets)
    assert found["params"]["trainable"] == trained


@pytest.mark.parametrize(
    ("model", "trained"), [("qwen-7b", 17_891_328), ("baichuan2-7b", 17_891_328), ("chatglm3-6b", 14_823_424)]
)
def test_a_joint_layer_has_one_adapter(model: str, trained: int) -> None:
    """What its code calls c_attn, W_pack or query_key_value is one layer; ms-swift prints 17.8913 M for Qwen-7B."""
    found = asked("count", model, "--adapter", "lora", "--rank", "8", "--targets", "attention,mlp")
    assert found["params"]["trainable"] == trained
    assert "qkv" in found["params"]["trainable_by_module"]


def test_narrower_bases_take_less_and_never_train() -> None:
    """Frozen weights of fewer bits take fewer bytes; nothing else of the state changes."""
    held = {base: report(adapter="lora", base=base).evaluation.memory[0] for base in ("bf16", "int8", "nf4", "nf4-dq")}
    weights = [float(one.weights) for one in held.values()]
    assert weights == sorted(weights, reverse=True)
    assert len({float(one.optimizer) for one in held.values()}) == 1


def test_sixteen_bit_adapters_keep_less_than_fp32_ones() -> None:
    """Peft's fp32 copies of inputs cost memory that autocast_adapter_dtype=False saves."""
    wide, narrow = (report(adapter="lora", adapter_precision=word) for word in ("fp32", "bf16"))
    assert narrow.allocated_bytes < wide.allocated_bytes
    assert wide.tuning is not None and narrow.tuning is not None
    assert narrow.tuning.adapter_bytes * 2 == wide.tuning.adapter_bytes


def test_frozen_weights_are_half_of_the_work_behind() -> None:
    """A LoRA step has about two thirds of the model FLOPs of full training, and takes less time."""
    full, lora = report(precision="bf16-pure"), report(adapter="lora", adapter_precision="bf16", targets=("q", "v"))
    assert 0.6 < lora.model_flops_per_token / full.model_flops_per_token < 0.75


@pytest.mark.parametrize("sharding", ["fsdp", "zero3", "distributed-optimizer"])
def test_sharded_frozen_weights_are_held_once(sharding: str) -> None:
    """Sharding over eight devices takes an eighth of what it shards, and adapters' gradients alone are reduced."""
    cluster, model = Cluster.parse("8xh100"), load_model("llama-3.1-8b")
    job = Training(seq_len=2048, global_batch=8, adapter="lora", rank=16)
    plan = Plan(dp=8, sharding=sharding)  # type: ignore[arg-type]
    found = train(model, cluster, plan, job)
    weights = float(found.evaluation.memory[0].weights)
    whole = 2 * 8030261248
    split = sharding in ("fsdp", "zero3")
    assert weights == pytest.approx(whole / (8 if split else 1), rel=0.02)
    assert comm(model, cluster, plan, job).axes["dp"].bytes_per_step < (2.6 if split else 0.05) * whole


@pytest.mark.parametrize("target", ["transformers", "megatron", "deepspeed", "torchtitan", "fsdp"])
def test_no_file_drops_an_adapter_in_silence(target: str) -> None:
    """Exporters that have no word for adapters or formats of frozen weights refuse them by name."""
    ask = ("export", target, "llama-3.1-8b", "--on", "8xh100", "--seq-len", "512", "--global-batch", "8")
    done = run(*ask, "--adapter", "lora", "--base", "nf4")
    assert done.status == 2
    assert "adapter = 'lora'" in done.err and "base = 'nf4'" in done.err


NAMED = [
    ("llama-3.1-8b", "q,v", "q_proj v_proj"),
    ("llama-3.1-8b", "attention,mlp", "all-linear"),
    ("llama-3.1-8b", "mlp,head", "gate_proj up_proj down_proj lm_head"),
    ("qwen3-30b-a3b", "attention,mlp", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
    ("mixtral-8x7b", "mlp", "w1 w3 w2"),
    ("gpt2", "attention", "c_attn attn.c_proj"),
    ("phi-3-mini-4k", "mlp", "gate_up_proj down_proj"),
    ("deepseek-v2-lite", "kv_down", "kv_a_proj_with_mqa"),
    ("qwen3-next-80b-a3b", "in_proj_ba,out_proj", "in_proj_ba out_proj"),
    ("lfm2-1.2b", "mlp", "w1 w3 w2"),
]


@pytest.mark.parametrize(("model", "targets", "names"), NAMED)
@pytest.mark.parametrize("target", ["trl", "axolotl", "llamafactory"])
def test_files_name_the_layers_of_the_models_class(target: str, model: str, targets: str, names: str) -> None:
    """A trainer finds no layer that is called q or attention: target_modules are the names of transformers' classes."""
    done = run("export", target, model, "--on", "8xh100", "--adapter", "lora", "--targets", targets, "--json")
    if target == "trl" and "head" in targets:
        # Its loss reads past an adapter of the head.
        assert done.status == 2
        return
    if target == "llamafactory" and "mlp" in targets and ("a3b" in model or "mixtral" in model):
        # Its peft finds no experts that are parameters by the names that they had.
        assert done.tree["error"]["problems"][0]["field"] == "targets"
        return
    assert done.status in (0, 1), done.err
    (text,) = (text for name, text in done.tree["files"].items() if name.endswith((".yaml", ".yml")))
    found = yaml.safe_load(text)
    told = found.get("lora_target_modules") or found.get("lora_target", "all").split(",")
    words = [told] if isinstance(told, str) else told
    assert words == (["all"] if words == ["all"] and names == "all-linear" else names.split())


@pytest.mark.parametrize(("targets", "names"), [("attention", ["linear_proj", "linear_qkv"]), ("q", ["linear_qkv"])])
def test_megatron_bridge_is_told_its_own_names(targets: str, names: list[str]) -> None:
    """And linear_proj, which it calls the last layer of attention, is read as that and not as every linear layer."""
    ask = ("--on", "8xh100", "--stack", "megatron-bridge", "--adapter", "lora", "--targets", targets, "--json")
    done = run("export", "nemo", "llama-3.1-8b", *ask)
    assert done.status in (0, 1), done.err
    assert any(names == yaml.safe_load(text)["peft"]["target_modules"] for text in done.tree["files"].values()
               if "target_modules" in text)  # fmt: skip


# What a class has one name for, and what a trainer would put adapters beside under it.
SHARED = [
    ("bert-base", "trl", "o", "use dense"),
    ("lfm2-1.2b", "trl", "attention", "use out_proj, q_proj, k_proj, v_proj"),
    ("qwen-1.8b", "trl", "o", "use c_proj"),
    ("rwkv-4-14b", "trl", "down", "use value"),
    ("deepseek-v3", "nemo", "experts", "use linear_fc1, linear_fc2"),
]


@pytest.mark.parametrize(("model", "target", "targets", "remedy"), SHARED)
def test_a_name_that_reaches_other_layers_too_is_refused(model: str, target: str, targets: str, remedy: str) -> None:
    """A file that names them would train more than was asked for, or what its name does not say."""
    words = ("--stack", "megatron-bridge") if target == "nemo" else ()
    done = run("export", target, model, "--on", "64xh200", "--adapter", "lora", "--targets", targets, *words)
    assert done.status == 2
    assert f"targets = '{', '.join(targets.split(','))}': cannot be said" in " ".join(done.err.split()), done.err
    assert remedy in " ".join(done.err.split())


@pytest.mark.parametrize(
    ("model", "name", "reaches"),
    [
        ("deepseek-v3.2", "weights_proj", "indexer.weights"),
        ("llama-4-scout", "router", "mlp.router"),
        ("dbrx-132b", "layer", "mlp.router"),
        ("phi-3.5-moe", "router", "mlp.router"),
    ],
)
def test_a_layer_has_the_name_of_its_class(model: str, name: str, reaches: str) -> None:
    """What a file calls it is what is adapted, and nothing else."""
    job = Training(seq_len=1, global_batch=1, adapter="lora", targets=(name,))
    assert {op for op, _ in reached(job, load_model(model), find_stack("trl"))} == {reaches}


def test_all_linear_layers_and_the_head_are_named_as_the_framework_lists_them() -> None:
    """Axolotl's all-linear are names of linear layers, among which experts and routers that are parameters are not."""
    words = ("--on", "8xh200", "--adapter", "lora", "--targets", "all-linear,head")
    named = yaml.safe_load(run("export", "axolotl", "qwen3-30b-a3b", *words).out)["lora_target_modules"]
    assert named == ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]


def test_experts_by_one_word_are_no_module_of_a_file() -> None:
    """Peft has them under their old names alone."""
    done = run("export", "trl", "qwen3-30b-a3b", "--on", "8xh100", "--adapter", "lora", "--targets", "experts")
    assert done.status == 2
    assert done.err.startswith("error: targets = 'experts'")


@pytest.mark.parametrize(
    ("model", "words", "field"),
    [
        ("vit-base", ("--adapter", "lora", "--targets", "head"), "targets"),
        ("rwkv-4-7b", ("--adapter", "lora", "--targets", "attention"), "targets"),
        ("vit-base", ("--adapter", "prompt"), "adapter"),
        ("mamba-1.4b", ("--adapter", "prefix"), "adapter"),
        ("deepseek-v2-lite", ("--adapter", "prefix"), "adapter"),
        ("qwen3-next-80b-a3b", ("--adapter", "prefix"), "adapter"),
        ("mamba-1.4b", ("--adapter", "lora"), "targets"),
        ("llama-3.2-1b", ("--trains", "none"), "trains"),
        ("bert-base", ("--trains", "head"), "trains"),
    ],
)
def test_a_run_that_trains_nothing_is_refused(model: str, words: tuple[str, ...], field: str) -> None:
    """Targets, tokens and parts that a model does not have are bad input, never a step that trains no parameter."""
    done = run("train", model, "--on", "1xh100", *words)
    assert done.status == 2
    assert done.err.startswith(f"error: {field} = ")


@pytest.mark.parametrize("words", [("--recompute", "full"), ("--base", "nf4"), ("--stack", "trl")])
def test_prefixes_and_recomputation_exclude_each_other(words: tuple[str, ...]) -> None:
    """Peft keeps prefixes in a cache, which recomputed layers do not have: asked for, or usual of a framework."""
    asked_for = ("llama-3.1-8b", "--on", "8xh100", "--seq-len", "2048", "--adapter", "prefix")
    assert run("train", *asked_for, *words).err.startswith("error: recompute = 'full'")
    others = [word for word in words if word not in ("--recompute", "full")]
    assert run("train", *asked_for, *others, "--recompute", "none").status == 0
    found = asked("plan", "train", *asked_for, "--global-batch", "64", "--top", "40")
    assert {plan["plan"]["recompute"] for plan in (*found["best"], *found["front"])} == {"none"}
    refused = run("plan", "train", *asked_for, "--global-batch", "64", "--recompute", "full")
    assert refused.err.startswith("error: recompute = 'full'")


def test_a_narrow_layer_does_not_limit_the_rank() -> None:
    """The rank that is usual goes beside all layers of Gemma 3n, of which some have four features."""
    assert asked("count", "gemma-3n-e2b", "--adapter", "lora")["params"]["trainable_by_module"]["altup_predict"] > 0
    assert run("count", "gemma-3n-e2b", "--adapter", "lora", "--rank", "60000").status == 2


def test_deepspeed_runs_the_adapters_it_is_asked_for() -> None:
    """DeepSpeed casts adapters with the model and keeps their fp32 masters: a type that it can launch."""
    job = Training(seq_len=2048, global_batch=8, adapter="lora")
    found = train(load_model("llama-3.1-8b"), Cluster.parse("8xh100"), Plan(dp=8, sharding="zero3"), job)
    assert found.case.stack.name == "deepspeed" and not found.unlaunched
    assert found.tuning is not None and found.tuning.adapter_precision == "bf16"


def layered(trains: tuple[str, ...], **job: Any) -> TrainReport:
    """Return Llama-3.1-8B on one H100 of which so much trains."""
    asked = Training(seq_len=512, global_batch=1, precision="bf16-pure", trains=trains, **job)
    options = TrainingOptions(stack=find_stack("transformers"))
    return train(load_model("llama-3.1-8b"), Cluster.parse("1xh100-sxm-80gb"), Plan(micro_batch=1), asked, options)


def test_all_parts_by_name_are_all_of_the_model() -> None:
    """Every layer by number, with embedding, head and norms, takes the bytes and the seconds of full training."""
    named, whole = layered(("layers:0-31", "embedding", "head", "norms")), layered(())
    assert named.memory.moments == pytest.approx(whole.memory.moments, rel=1e-12)
    assert named.step_seconds == pytest.approx(whole.step_seconds, rel=1e-12)
    assert named.tuning is not None and named.tuning.trainable_parameters == 8030261248


def test_the_last_layers_keep_less_than_the_first() -> None:
    """As many layers train, and what lies before the first of them neither keeps anything nor runs backward."""
    last, first, middle = layered(("last:4",)), layered(("first:4",)), layered(("layers:14-17",))
    counts = {one.tuning.trainable_parameters for one in (last, first, middle) if one.tuning}
    assert counts == {4 * 218112000}
    assert last.memory.gradients == first.memory.gradients == 2 * 4 * 218112000
    assert last.memory.activations < middle.memory.activations < first.memory.activations
    assert last.step_seconds < middle.step_seconds < first.step_seconds
    again = layered(("last:4", "head"), optimizer="adam8bit")
    assert again.tuning is not None and again.tuning.trainable_by_module["head"] == 128256 * 4096


@pytest.mark.parametrize(
    ("trains", "job", "said"),
    [
        (("layers:30-40",), {}, "names no layers of llama-3.1-8b, which has 0 to 31"),
        (("last:40",), {}, "names no layers"),
        (("layers:5-3",), {}, "names no layers"),
        (("layers:x",), {}, "is no part of a model"),
        (("last:2",), {"base": "nf4"}, "has weights that cannot be trained"),
        (("last:2",), {"adapter": "lora"}, "trains the weights that adapters freeze"),
    ],
)
def test_layers_that_a_model_lacks_are_refused(trains: tuple[str, ...], job: dict[str, Any], said: str) -> None:
    """Layers out of range, beside an adapter or of four bits are named with what may be written."""
    with pytest.raises(InputError, match=said):
        layered(trains, **job)


@pytest.mark.parametrize("side", [2, 32, 64])
def test_blocks_of_oft_have_the_size_that_is_asked(side: int) -> None:
    """A product of m features has m / b blocks of b (b - 1) / 2 parameters (peft tuners/oft); 32 is what peft takes."""
    found = report(adapter="oft", oft_block_size=side, targets=("q", "down")).tuning
    assert found is not None and found.parameters > 0
    assert found.trainable_parameters == 16 * (2048 + 8192) // side * side * (side - 1) // 2
    if side == 32:
        usual = report(adapter="oft", targets=("q", "down")).tuning
        assert usual is not None and usual.trainable_by_module == found.trainable_by_module


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"adapter": "lora", "oft_block_size": 32}, "oft_block_size = 32: is not of lora"),
        ({"adapter": "oft", "oft_block_size": 32, "rank": 8}, "says what rank says too"),
        ({"adapter": "oft", "oft_block_size": 48}, "does not divide the 2048, 8192 features of the layers; use 32"),
        ({"oft_block_size": 32}, "belongs to an adapter"),
        ({"adapter_alpha": 16.0}, "belongs to an adapter"),
    ],
)
def test_blocks_that_no_layer_has_are_refused(job: dict[str, Any], said: str) -> None:
    """A size that does not divide what enters the layers, and one beside a rank or another method."""
    with pytest.raises(InputError, match=said):
        report(**job)


@pytest.mark.parametrize(
    ("job", "taken"),
    [
        ({"adapter": "lora"}, ["rank 8: the default of peft"]),
        ({"adapter": "lora", "rank": 16}, []),
        ({"adapter": "oft"}, ["blocks of 32 features: the default of peft"]),
        ({"adapter": "oft", "oft_block_size": 64}, []),
        ({"adapter": "ia3"}, []),
    ],
)
def test_what_peft_takes_for_a_size_that_is_left_open_is_said(job: dict[str, Any], taken: list[str]) -> None:
    """A rank or a size of blocks is assumed where neither is given, and for no method that has none."""
    said = report(**job).assumptions
    assert [text for text in said if "the default of peft" in text] == taken


@pytest.mark.parametrize(("stack", "loads"), [("trl", "fp32"), ("transformers", ""), ("transformers-2024", "fp32")])
def test_frozen_weights_that_a_framework_loads_wider_are_said(stack: str, loads: str) -> None:
    """Where nobody says how frozen weights are kept they have 16 bits, and TRL would load 32 unless told."""
    job, options = Training(seq_len=512, global_batch=1, adapter="lora"), TrainingOptions(stack=stack)
    answer = train(load_model("llama-3.2-1b"), Cluster.parse("1xrtx-4090"), Plan(), job, options)
    (note,) = (text for text in answer.assumptions if text.startswith("base "))
    assert note == "base bf16: frozen weights of 16 bits" + (
        f"; {stack} loads {loads} unless told: --base {loads} is that" if loads else ""
    )


@pytest.mark.parametrize("method", ["dpo", "grpo", "ppo"])
def test_passes_beside_a_step_are_in_its_parts(method: str) -> None:
    """Scorings and critics are part of the whole: pipeline, messages, optimizer and overhead add up to it."""
    step = report(method=method).evaluation.step
    whole = step.pipeline.total + step.gradients_exposed + step.parameters_exposed + step.optimizer + step.overhead
    assert step.total == pytest.approx(whole, rel=1e-12)
    assert step.overhead > report().evaluation.step.overhead


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--adapter", "lora"), ["more of activations than full fine-tuning", "autocast_adapter_dtype=False"]),
        (
            ("--adapter", "lora", "--adapter-precision", "bf16", "--adapter-dropout", "0.05"),
            ["more of activations than full fine-tuning", "dropout keeps copies and masks"],
        ),
        (("--adapter", "lora", "--base", "nf4", "--recompute", "none"), ["a cast of the script's own"]),
        (
            ("--adapter", "lora", "--base", "nf4", "--recompute", "none", "--sharding", "fsdp"),
            ["autocast_adapter_dtype=False", "bnb_4bit_quant_storage"],
        ),
        (("--adapter", "dora"), ["an identity matrix beside each layer"]),
        (("--adapter", "lora", "--adapter-precision", "bf16"), []),
        (("--adapter", "lora", "--recompute", "full", "--trains", "head"), ["share one table"]),
        ((), []),
    ],
)
def test_an_answer_says_what_surprises(words: tuple[str, ...], said: list[str]) -> None:
    """What takes memory unexpectedly is evaluated and said, and nothing where nothing does."""
    where = ("--on", "a100-sxm-80gb", "--seq-len", "4096", "--micro-batch", "1", "--stack", "transformers")
    found = asked("train", "llama-3.2-1b", *where, *words)["surprises"]
    assert [one for one in said if not any(one in line for line in found)] == []
    assert bool(found) == bool(said)


@pytest.mark.parametrize("stack", ["agilerl", "transformers"])
def test_a_narrow_base_beside_fp32_embeddings_loses_at_length(stack: str) -> None:
    """prepare_model_for_kbit_training widens the embedding, and checkpoints of the residual stream with it.

    Checked with hooks of torch 2.13 on a Llama whose embedding, norms and head are in fp32 under autocast. Without it
    the stream is as wide (canifinetune, Qwen2.5-1.5B of 4,096 tokens without autocast: 12.36 GB).
    """
    where = ("--on", "a100-sxm-80gb", "--micro-batch", "1", "--adapter", "lora", "--recompute", "full",
             "--stack", stack, "--base")  # fmt: skip

    def answer(base: str, length: int) -> dict[str, Any]:
        return asked("train", "llama-3.1-8b", *where, base, "--seq-len", str(length))

    def peak(base: str, length: int) -> float:
        return float(answer(base, length)["memory"]["peak_bytes"])

    assert peak("nf4", 4096) < peak("bf16", 4096)
    assert peak("nf4", 65536) - peak("bf16", 65536) > 2 * 65536 * 4096 * 32 - 9e9
    assert any("--base bf16 saves" in line for line in answer("nf4", 65536)["surprises"])


@pytest.mark.parametrize(
    ("device", "stack"), [("t4", "unsloth"), ("t4", "trl"), ("v100", "llama-factory"), ("m2-max", "transformers")]
)
def test_devices_without_bf16_run_fp16(device: str, stack: str) -> None:
    """Nobody on a Colab T4 types a precision: the answer takes fp16 under autocast, says so, and is launchable."""
    found = run("train", "llama-3.2-1b", "--on", device, "--qlora", "--stack", stack, "--seq-len", "512").out
    assert "precision amp-fp16: not given" in " ".join(found.split())
    assert "does not run this" not in found


def test_a_device_without_bf16_is_not_told_to_use_it() -> None:
    """What keeps fewer bytes on a T4 is what a T4 has."""
    out = run("train", "llama-3.1-8b", "--on", "t4", "--seq-len", "2048").out
    assert "--optimizer adam8bit" in out
    assert "bf16-pure" not in out


def test_unsloth_keeps_one_input_for_all_adapters_that_read_it() -> None:
    """Its kernels cast fp32 adapters, not inputs: 24 GB hold 78,475 tokens (github.com/unslothai/unsloth README)."""
    words = ("plan", "train", "llama-3.1-8b", "--on", "rtx-4090", "--qlora", "--lora-rank", "32", "--loss", "cce")
    lines = [line.split() for line in run(*words, "--stack", "unsloth").out.splitlines()]
    longest = [int(line[-1].replace(",", "")) for line in lines if line[:3] == ["nf4-dq", "32", "bits"]]
    # Recomputed; without, its functions of LoRA leave room for a short one.
    assert max(longest) == pytest.approx(78_475, rel=0.04)


def test_adapters_of_experts_are_a_saver_to_leave_out() -> None:
    """Of Qwen3-30B most of what adapters hold is beside experts: on 24 GB those of attention fit, and are named."""
    words = ("train", "qwen3-30b-a3b", "--on", "rtx-4090", "--qlora", "--stack", "unsloth", "--seq-len", "1024",
             "--base", "nf4")  # fmt: skip
    out = run(*words, "--micro-batch", "1").out
    assert out.startswith("NO FIT")
    assert "--targets attention" in out
    assert run(*words, "--micro-batch", "1", "--targets", "attention").out.startswith("FITS")


def test_adalora_keeps_what_it_chooses_ranks_by() -> None:
    """Three fp32 tensors of each parameter that trains stay from step to step."""
    found = report(adapter="adalora", rank=32, targets=("q", "v"))
    lora = report(adapter="lora", rank=32, targets=("q", "v"))
    assert found.tuning is not None and lora.tuning is not None
    more = found.tuning.trainable_parameters - lora.tuning.trainable_parameters
    beside = 12 * found.tuning.trainable_parameters
    assert found.memory.weights - lora.memory.weights == pytest.approx(4 * more + beside, rel=1e-6)


def test_savers_are_what_train_says_with_their_flags() -> None:
    """Bytes are whole and seconds equal to the digit, each with its flags in place of those that were asked."""
    plan = {"--micro-batch": "2", "--global-batch": "4", "--recompute": "none"}
    words = ("train", "llama-3.2-1b", *WHERE, "--adapter", "lora", "--rank", "16")
    base = asked(*words, *(word for pair in plan.items() for word in pair), "--savers")
    legal = [one for one in base["savers"] if not one["problem"]]
    assert len(legal) > 5
    for one in legal:
        flags = one["flags"].split()
        kept = (word for flag, value in plan.items() if flag not in flags for word in (flag, value))
        alone = trained(*words, *kept, *flags)
        assert (one["device_bytes"], one["step_seconds"]) == figures(alone), one
        assert one["host_bytes"] == round(alone.host_bytes)
        assert one["added_seconds"] == alone.step_seconds - base["step_seconds"]


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("--tp 8 --rank 12", "use --rank 16, or --tp 4"),
        ("--tp 8 --rank 16", ""),
        ("--tp 8 --rank 12 --targets o,down", ""),
        ("--tp 4 --rank 6 --targets linear_qkv", "use --rank 8, or --tp 2"),
        ("--tp 1 --rank 7", ""),
    ],
)
def test_tensor_parallel_ranks_divide_that_of_an_adapter(words: str, remedy: str) -> None:
    """Beside every layer but one split by inputs Megatron-Bridge splits A by its rank, and asserts that it divides."""
    ask = ("train", "llama-3.1-8b", "--on", "8xh100", "--stack", "megatron-bridge", "--adapter", "lora", "--json")
    done = run(*ask, *words.split())
    problems = done.tree["error"]["problems"] if done.status == 2 else []
    assert [(one["field"], one["remedy"]) for one in problems] == [("rank", remedy)] * bool(remedy)


@pytest.mark.parametrize("base", ["nf4", "int8", "gptq4", "bf16"])
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_saver_added_to_the_command_does_what_its_row_says(base: str, method: str) -> None:
    """Beside quantised weights transformers recomputes, so that it keeps the activations of checkpoints on the host."""
    ask = ("train", "llama-3.2-1b", "--on", "rtx-5090", "--adapter", "lora", "--method", method, "--micro-batch", "2")
    own = ("--base", base)
    done = run(*ask, *own, "--savers", "--json")
    rows = [row for row in done.tree["savers"] if not row["problem"] and "micro-batch" not in row["flags"]]
    assert len(rows) > 5
    for row in rows:
        flags = row["flags"].split()
        device_bytes, step_seconds = figures(trained(*ask, *own * ("--base" not in flags), *flags))
        assert (row["flags"], row["device_bytes"]) == (row["flags"], device_bytes)
        assert row["step_seconds"] == pytest.approx(step_seconds)


@pytest.mark.parametrize(
    ("stack", "words", "field"),
    [
        ("megatron", "", "adapter"),
        ("nanotron", "", "adapter"),
        ("megatron-bridge", "", ""),
        ("megatron-bridge", "--base nf4", "base"),
        ("nemo-2024", "--base nf4", ""),
        ("torchtune", "", ""),
    ],
)
def test_a_framework_without_adapters_launches_none(stack: str, words: str, field: str) -> None:
    """Megatron-LM has none, Megatron-Bridge none beside weights of bitsandbytes: answers say so, searches refuse."""
    ask = ("llama-3.1-8b", "--on", "8xh100", "--stack", stack, "--adapter", "lora", *words.split())
    done = run("train", *ask, "--json")
    assert done.status in (0, 1), done.err
    assert [one["field"] for one in done.tree["unlaunched"] if one["field"] in ("adapter", "base")] == [field] * bool(
        field
    )
    if field == "adapter":
        assert run("plan", "train", *ask, "--global-batch", "8").status == 2


@pytest.mark.parametrize("target", ["trl", "axolotl", "torchtune"])
def test_a_method_without_a_rank_is_what_a_file_cannot_say(target: str) -> None:
    """OFT has blocks of a size: a file that would ask for LoRA of rank 0 is refused as of another method."""
    done = run("export", target, "llama-3.2-1b", "--on", "rtx-4090", "--adapter", "oft")
    assert done.status == 2
    assert done.err.startswith("error: adapter = 'oft'")


PATTERN = "'model.language_model.layers.[\\d]+.(_checkpoint_wrapped_module.)?(mlp|self_attn).(up|down|q|v)_proj'"
READ = [
    ("trl.yaml", "use_peft: true\nlora_dropout: 0.0\nlora_target_modules: all-linear", ["all-linear"]),
    ("trl.yaml", "use_peft: true\nlora_dropout: 0.0\nlora_target_modules: [q_proj]", ["q_proj"]),
    ("axolotl.yaml", "adapter: lora\nsequence_len: 512\nlora_target_modules: " + PATTERN,
     ["up_proj", "down_proj", "q_proj", "v_proj"]),
]  # fmt: skip


@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize(("name", "words", "targets"), READ)
def test_files_name_layers_by_patterns_and_experts_by_parameters(
    name: str, words: str, targets: list[str], parameters: bool, tmp_path: Path
) -> None:
    """Axolotl's examples restrict adapters to the language model by an expression; experts are parameters of v5."""
    model = "model_name_or_path: " if name == "trl.yaml" else "base_model: "
    experts = "\nlora_target_parameters: [experts.gate_up_proj, experts.down_proj]" if parameters else ""
    (tmp_path / name).write_text(f"{model}google/gemma-4-26B-A4B-it\n{words}{experts}\n")
    done = run("train", "--from", str(tmp_path / name), "--on", "1xh100", "--seq-len", "512", "--json")
    assert done.status in (0, 1), done.err
    assert done.tree["tuning"]["targets"] == [*targets, *["experts"] * parameters]
    assert (done.tree["tuning"]["trainable_by_module"].get("experts", 0) > 1e8) == parameters


@pytest.mark.parametrize(
    ("model", "targets", "note"),
    [
        ("mixtral-8x7b", "gate_proj,up_proj,down_proj", "targets gate_proj,up_proj,down_proj taken as w1,w3,w2"),
        ("mixtral-8x7b", "w1,w2,w3", ""),
        ("qwen3-30b-a3b", "q_proj,w1,w3", "targets w1,w3 taken as gate_proj,up_proj: the names in qwen3_moe"),
        ("gpt2", "q_proj,c_proj", "targets q_proj taken as c_attn: the names in gpt2"),
        ("llama-3.1-8b", "q,v_proj,mlp,lm_head", ""),
    ],
)
def test_names_of_other_classes_are_said_to_be_taken(model: str, targets: str, note: str) -> None:
    """A name that a class does not have is refused by peft: its own names are said, nothing where they were asked."""
    words = ("train", model, "--on", "8xh100", "--adapter", "lora", "--seq-len", "512", "--targets", targets, "--json")
    said = [one for one in run(*words).tree["assumptions"] if " taken as " in one and one.startswith("targets")]
    assert len(said) == bool(note) and all(one.startswith(note) for one in said)


def test_half_of_the_experts_first_layer_is_refused_by_the_names_of_the_class() -> None:
    """Mixtral's experts have w1 and w3, whatever word was asked."""
    done = run("count", "mixtral-8x7b", "--adapter", "lora", "--targets", "q_proj,up_proj")
    assert done.status == 2 and "'up_proj'" in done.err and "add w1" in done.err


@pytest.mark.parametrize("flags", [("--recompute", "full"), ("--offload", "activations"), ("--tp", "1", "--dp", "1")])
def test_who_asks_for_plans_of_adapters_without_a_batch_is_told_both_ways_on(flags: tuple[str, ...]) -> None:
    """A batch makes it a search over plans; without the flags that name plans every way to tune is tried."""
    done = run("plan", "train", "llama-3.1-8b", "--on", "rtx-4090", "--adapter", "lora", *flags)
    named = ", ".join(sorted(flag for flag in flags if flag.startswith("--")))
    assert (done.status, done.out) == (2, "")
    assert f"for example 1, or leave out {named} for every way to tune" in done.err


@pytest.mark.parametrize("head", ["head", "lm_head"])
def test_an_adapter_of_the_head_is_refused_beside_a_loss_that_reads_past_it(head: str) -> None:
    """TRL's fused head multiplies by the weight of the head itself; whole copies of it train, and adapters in 2025."""
    words = ("train", "llama-3.1-8b", *WHERE, "--adapter", "lora", "--targets", f"q,{head}")
    assert "past its adapter" in asked(*words, "--stack", "trl")["error"]["problems"][0]["rule"]
    for able in (("--stack", "trl-2025"), ("--stack", "transformers")):
        assert asked(*words, *able)["tuning"]["trainable_by_module"]["head"]
    assert asked(*words[:-1], "q", "--trains", "head", "--stack", "trl")["tuning"]["trainable_by_module"]["head"]


def test_frozen_weights_of_trl_are_fp32_unless_its_file_says_otherwise(tmp_path: Path) -> None:
    """ModelConfig.dtype is float32: an exported file says bfloat16 for 16 bits, and one that does not is fp32."""
    where = ("qwen3-4b", "--on", "h100", "--seq-len", "512", "--adapter", "lora", "--micro-batch", "1")
    file = tmp_path / "trl.yaml"
    for base, dtype in (("bf16", "bfloat16"), ("fp32", None)):
        words = run("export", "trl", *where, "--global-batch", "1", "--base", base)
        file.write_text(words.out)
        assert yaml.safe_load(words.out).get("dtype") == dtype
        again = asked("train", "--from", str(file), "--on", "1xh100")
        assert again["tuning"]["base"] == base
        weights = again["memory"]["stages"][0]["categories"]["weights"]
        assert weights == pytest.approx(4.022e9 * (2 if dtype else 4), rel=0.02)
