"""Adapters: what they train and keep, against peft and hooks on the saved tensors of PyTorch, and laws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.helpers import layout, on_cpu
from shardwise.hardware import Cluster
from shardwise.ledger.flow import flow, gradient_passes
from shardwise.ledger.saved import Checkpoint, keep, tensor_bytes
from shardwise.models import Model, model_from_config
from shardwise.ops.adapters import METHODS
from shardwise.ops.block import block_ops
from shardwise.ops.count import count_parameters, trainable_parameters
from shardwise.ops.head import embedding, head
from shardwise.ops.layout import Layout, lay_out
from shardwise.ops.tuning import base_bytes
from shardwise.plans import ADAPTERS, VIRTUAL, Plan, Training, Tuning, find_base, find_stack, tuning_of
from shardwise.training import TrainingOptions, train
from shardwise.training._tuning import fine_tuning_problems
from tuning.helpers import case_of, golden

TARGETS: dict[str, tuple[str, ...]] = {
    "qv": ("q", "v"),
    "attention": ("attention",),
    "mlp": ("mlp",),
    "all": ("attention", "mlp"),
    "experts": ("attention", "experts"),
    "embeddings": ("attention", "mlp", "embedding", "head"),
    "saved": ("attention", "mlp"),
    "all-linear": ("all-linear",),
}
LORA, BESIDE = ("lora", "rslora"), ("dora", "vera", "oft", "randlora")
# What prefixes make attention keep (masks, repeated heads) is not in the ledger: their parameters are.
UNBUILT = ("prefix", "prompt")
# transformers' GPT-2 takes its eager softmax in 16 bits, which the ledger does not say.
UNLIKE = {("gpt2", "eager")}


def targets_of(model: str, method: str, word: str) -> tuple[str, ...]:
    """The targets that a word of the goldens stands for."""
    if model.startswith("gpt2") and word == "qv":
        return ("c_attn",)
    if method not in LORA:
        # The goldens of IA3 scale what GPT-2's first product of a feed-forward reads.
        return ("c_attn", "c_fc") if (model, method) == ("gpt2", "ia3") else TARGETS[word] if method in BESIDE else ()
    mixture = model.startswith(("mixtral", "qwen3_moe", "qwen3-30b"))
    if mixture and word in ("all", "embeddings"):
        return ("attention", *(("embedding", "head") if word == "embeddings" else ()))
    return TARGETS.get(word, ())


def asked(run: dict[str, Any], method: str, **more: Any) -> Tuning:
    """The fine-tuning of a run of the goldens."""
    job = Training(
        seq_len=1,
        global_batch=1,
        adapter=method,
        rank=run["rank"],
        targets=targets_of(run["model"], method, run["targets"]),
        trains=("embedding", "head") if run["targets"] == "saved" else ("none",),
        **more,
    )
    found = tuning_of(job, find_stack("transformers"))
    assert found is not None
    return found


KEPT = [
    run
    for run in golden("activations")["runs"]
    if run["tune"] in ADAPTERS
    and run["tune"] not in UNBUILT
    and run["dtype"] == "bfloat16"
    and (run["model"], run["attention"]) not in UNLIKE
]
NAMES = ("model", "attention", "tune", "targets", "adapters", "dropout", "autocast", "checkpoint", "rank", "S")


@pytest.mark.parametrize("run", KEPT, ids=lambda run: "-".join(str(run[name]) for name in NAMES))
def test_layers_with_adapters_keep_their_exact_bytes(run: dict[str, Any]) -> None:
    """The first and the second layer keep what autograd keeps; the first one's input may need no gradient."""
    model, plain = case_of(run)
    width = {"float32": "fp32", "bfloat16": "bf16"}[run["adapters"]]
    tuning = asked(run, run["tune"], adapter_dropout=run["dropout"], adapter_precision=width)
    choices = replace(plain.choices, tuning=replace(tuning, autocast=run["autocast"]))
    y = lay_out(plain.degrees, plain.work, choices)
    units = (Checkpoint(("",)),) if run["checkpoint"] else ()
    table = flow(embedding(y, model), entry=False)
    first = flow(block_ops(y, model.layers[0], model.hidden), table.output or run["input_requires_grad"])
    second = flow(block_ops(y, model.layers[1], model.hidden))
    rotary = tensor_bytes([t for op in table.ops for t in op.saves if t.name == "rotary tables"])
    turned = any(op.role == "rotary" and "input" not in op.without for op in first.ops)
    # The first layer that rotates something with a gradient keeps the tables, unless it runs again.
    extra = 0 if run["checkpoint"] else rotary
    # Hooks see what DoRA's norm saves too, though its graph is gone when the layer returns.
    freed = 0 if run["checkpoint"] else tensor_bytes([t for op in second.ops for t in op.saves if t.fleeting])
    assert tensor_bytes(keep(first.ops, units).kept) + turned * extra + freed == run["first_layer_bytes"]
    assert tensor_bytes(keep(second.ops, units).kept) + (not turned) * extra + freed == run["layer_bytes"]


WIDE = [run for run in golden("activations")["runs"] if run["dtype"] == "float32" and run["autocast"]]


@pytest.mark.parametrize("run", WIDE, ids=lambda run: f"{run['model']}-{run['tune']}")
def test_autocast_keeps_copies_of_fp32_weights_and_of_each_input(run: dict[str, Any]) -> None:
    """Beside fp32 weights the stream is fp32, every linear layer keeps 16 bits of its own input, experts stay fp32."""
    model, plain = case_of(run)
    tuning = None
    if run["tune"] != "full":
        tuning = replace(asked(run, run["tune"], adapter_precision="fp32", base="fp32"), autocast=True)
    y = lay_out(plain.degrees, plain.work, replace(plain.choices, tuning=tuning, autocast=True))
    assert tensor_bytes(keep(flow(block_ops(y, model.layers[1], model.hidden)).ops).kept) == run["layer_bytes"]


def rarer(name: str, method: str, rank: int, width: str) -> tuple[Model, Layout[Any]]:
    """The model and the layout of a run of the rarer adapters."""
    configs = golden("activations")["configs"] | golden("rarer")["configs"]
    job = Training(
        seq_len=1, global_batch=1, adapter=method, rank=rank, adapter_precision={"float32": "fp32"}.get(width, "bf16"),
        targets=() if method == "trainable-tokens" else ("attention", "mlp"),
    )  # fmt: skip
    plain = on_cpu(layout({"B": 2, "S": 128}, "transformers"))
    tuning = tuning_of(job, find_stack("transformers"))
    return model_from_config(configs[name]), lay_out(plain.degrees, plain.work, replace(plain.choices, tuning=tuning))


@pytest.mark.parametrize("run", golden("rarer")["kept"], ids=lambda run: "-".join(map(str, run[:4])))
def test_layers_with_rarer_adapters_keep_their_exact_bytes(run: list[Any]) -> None:
    """What autograd keeps of the second and of the first layer, the shared table of rotations with one of them."""
    method, name, width, rank, second_bytes, first_bytes = run
    model, y = rarer(name, method, rank, width)
    table = flow(embedding(y, model), entry=False)
    first = flow(block_ops(y, model.layers[0], model.hidden), table.output)
    second = flow(block_ops(y, model.layers[1], model.hidden))
    rotary = tensor_bytes([t for op in table.ops for t in op.saves if t.name == "rotary tables"])
    turned = any(op.role == "rotary" and "input" not in op.without for op in first.ops)
    assert tensor_bytes(keep(first.ops).kept) + turned * rotary == first_bytes
    assert tensor_bytes(keep(second.ops).kept) + (not turned) * rotary == second_bytes


@pytest.mark.parametrize("run", golden("unusual")["kept"], ids=lambda run: "-".join(map(str, run[:4])))
def test_adapters_in_unusual_families_keep_their_exact_bytes(run: list[Any]) -> None:
    """What autograd keeps of the second layer, and the parameters that train, where norms, routers or limits differ."""
    name, attention, method, words, trained, kept = run
    model = model_from_config(golden("unusual")["configs"][name])
    stack = find_stack("transformers" if attention == "sdpa" else "transformers-eager")
    targets = {"all": ("attention", "mlp"), "attention": ("attention",), "": ()}[words]
    rank = 0 if method in ("ia3", "oft") else 8
    job = Training(
        seq_len=1, global_batch=1, adapter=method, rank=rank, targets=targets, adapter_precision="bf16"
    )  # fmt: skip
    tuning = tuning_of(job, stack, model.family)
    assert tuning is not None
    assert sum(trainable_parameters(model, tuning).values()) == trained
    plain = on_cpu(layout({"B": 2, "S": 256}, stack.name))
    second = flow(block_ops(lay_out(plain.degrees, plain.work, replace(plain.choices, tuning=tuning)),
                            model.layers[1], model.hidden))  # fmt: skip
    freed = tensor_bytes([t for op in second.ops for t in op.saves if t.fleeting])
    assert tensor_bytes(keep(second.ops).kept) + freed == kept


@pytest.mark.parametrize("run", golden("rarer")["counts"], ids=lambda run: "-".join(map(str, run[:3])))
def test_as_many_parameters_of_rarer_adapters_train_as_peft_says(run: list[Any]) -> None:
    """Those of layers and those that all layers share, by the defaults of peft's configurations."""
    method, name, rank, expected = run
    model, y = rarer(name, method, rank, "float32")
    assert y.choices.tuning is not None
    assert sum(trainable_parameters(model, y.choices.tuning).values()) == expected


@pytest.mark.parametrize(
    "run",
    [run for run in golden("counts")["runs"] if run["method"] in ADAPTERS],
    ids=lambda run: f"{run['model']}-{run['method']}-{run['targets']}",
)
def test_as_many_parameters_train_as_peft_says(run: dict[str, Any]) -> None:
    """Adapters and saved modules have exactly the parameters that peft counts."""
    model = model_from_config(golden("counts")["configs"][run["model"]])
    assert sum(trainable_parameters(model, asked(run, run["method"])).values()) == run["trainable_parameters"]


@pytest.mark.parametrize(
    "run", golden("families")["counts"], ids=lambda run: "-".join(map(str, (run[0]["model_type"], *run[1:4])))
)
def test_families_of_models_train_what_peft_trains_of_them(run: list[Any]) -> None:
    """Joint layers have one adapter; experts have what peft finds of them, which is a matter of their type."""
    config, method, rank, targets, expected = run
    model, stack = model_from_config(config), find_stack("transformers")
    job = Training(seq_len=1, global_batch=1, adapter=method, rank=rank, targets=tuple(targets.split(",")))
    tuning = tuning_of(job, stack, model.family)
    assert tuning is not None
    assert sum(trainable_parameters(model, tuning).values()) == expected


def test_all_linear_layers_of_gpt_oss_are_those_of_attention() -> None:
    """As the cookbook of gpt-oss prints, 3,981,312, and 15,040,512 with the experts of three layers at rank 8."""
    model, stack = Model.load("gpt-oss-20b"), find_stack("transformers")

    def trained(*targets: str) -> float:
        job = Training(seq_len=1, global_batch=1, adapter="lora", rank=8, targets=targets)
        return sum(trainable_parameters(model, tuning_of(job, stack, model.family)).values())

    assert trained("all-linear") == 3_981_312
    assert trained("all-linear", "experts") - trained("all-linear") == (15_040_512 - 3_981_312) * 24 / 3


@pytest.mark.parametrize(
    ("model", "job", "field"),
    [
        ("qwen3-30b-a3b", {"adapter": "dora"}, "adapter"),
        ("qwen3-30b-a3b", {"adapter": "lora", "adapter_dropout": 0.05}, "adapter_dropout"),
        ("gpt-oss-20b", {"adapter": "lora", "adapter_dropout": 0.05}, ""),
        ("qwen3-30b-a3b", {"adapter": "dora", "targets": ("attention",), "adapter_dropout": 0.05}, ""),
        ("qwen3-30b-a3b", {"adapter": "loha"}, ""),
        ("qwen3-30b-a3b", {"adapter": "lora", "targets": ("q", "gate_proj")}, "targets"),
        ("qwen3-30b-a3b", {"adapter": "loha", "targets": ("q", "gate_proj")}, "targets"),
        ("qwen3-30b-a3b", {"adapter": "lora", "targets": ("gate_proj", "up_proj")}, ""),
        ("falcon-mamba-7b", {"adapter": "lora"}, "targets"),
        ("falcon-mamba-7b", {"adapter": "lora", "targets": ("in_proj", "x_proj", "dt_proj")}, ""),
        ("falcon-mamba-7b", {"adapter": "loha"}, ""),
        ("jamba-v0.1", {"adapter": "lora"}, ""),
        ("qwen3-next-80b-a3b", {"adapter": "prefix"}, "adapter"),
        ("deepseek-v3", {"adapter": "prefix"}, "adapter"),
        ("qwen3-8b", {"adapter": "prefix"}, ""),
        ("recurrentgemma-2b", {"adapter": "prefix"}, ""),
        ("falcon-40b", {"adapter": "prefix"}, ""),
        ("falcon-7b", {"adapter": "prefix"}, "adapter"),
        ("gemma-4-31b", {"adapter": "prefix"}, ""),
        ("mixtral-8x7b", {"adapter": "lora", "targets": ("gate",)}, ""),
        ("mixtral-8x7b", {"adapter": "loha", "targets": ("gate",)}, "targets"),
        ("mixtral-8x7b", {"adapter": "lora", "targets": ("gate", "w3")}, "targets"),
        ("gpt2", {"adapter": "loha"}, "adapter"),
        ("gpt2", {"adapter": "vera"}, ""),
    ],
)
def test_what_peft_refuses_of_a_class_is_refused(model: str, job: dict[str, Any], field: str) -> None:
    """Magnitudes and dropout beside experts, one half of their first layer, out_proj of Mamba, prefixes without keys.

    Conv1D beside methods of linear layers, routers as targets of others than LoRA, keys of one head under all heads.
    tuners/lora/layer.py ParamWrapper, utils/transformers_weight_conversion.py, tuners/tuners_utils.py of peft 0.21.2,
    and its own errors when such models were run.
    """
    asked_for = Training(seq_len=1, global_batch=1, **job)
    problems = fine_tuning_problems(Model.load(model), Plan(), asked_for, find_stack("transformers")).items
    assert [problem.field for problem in problems] == [field] * bool(field)


@pytest.mark.parametrize(
    ("stack", "fields"),
    [("megatron-bridge", []), ("megatron", []), ("transformers-2025", []), ("transformers", ["adapter_dropout"]),
     ("unsloth", ["adapter_dropout"])],
)  # fmt: skip
def test_dropout_stands_before_adapters_of_experts_that_are_modules(stack: str, fields: list[str]) -> None:
    """Adapters beside grouped GEMMs drop their input; peft's ParamWrapper, which adds them to weights, raises."""
    asked_for = Training(
        seq_len=1, global_batch=1, adapter="lora", targets=("all-linear", "experts"), adapter_dropout=0.05
    )
    problems = fine_tuning_problems(Model.load("qwen3-30b-a3b"), Plan(), asked_for, find_stack(stack)).items
    assert [problem.field for problem in problems] == fields


def test_prefixes_are_of_every_layer_whether_it_attends_or_not() -> None:
    """RecurrentGemma-2B: 26 layers of one head of 256 values, twice, for each token, though 18 of them are recurrences.

    Falcon's caches hold the keys of all heads (peft 0.21.2 on small models of both: tests/data/tuning/families.json).
    """
    stack = find_stack("transformers")
    for name, trained in (("recurrentgemma-2b", 26 * 2 * 256 * 20), ("falcon-40b", 60 * 2 * 8192 * 20)):
        job = Training(seq_len=1, global_batch=1, adapter="prefix", rank=20)
        model = Model.load(name)
        assert sum(trainable_parameters(model, tuning_of(job, stack, model.family)).values()) == trained


# What LoRA trains with another learning rate, half of it, and one whose subspaces are found in the weights.
UNCOUNTED = {"lora-plus", "lora-fa", "adamss"}


def test_oft_turns_blocks_of_one_size() -> None:
    """Of a rank that is not stated blocks have 32 features, as in peft 0.21.2; a rank that cuts no layer is refused."""
    model, stack = Model.load("llama-3.1-8b"), find_stack("transformers")
    for rank, trained in ((0, 19_300_352), (32, 152_469_504)):
        job = Training(seq_len=1, global_batch=1, adapter="oft", rank=rank)
        assert (tuning := tuning_of(job, stack)) is not None
        assert sum(trainable_parameters(model, tuning).values()) == trained
    job = Training(seq_len=1, global_batch=1, adapter="oft", rank=7)
    (problem,) = fine_tuning_problems(model, Plan(), job, stack).items
    assert (problem.field, problem.value) == ("rank", 7)
    assert "use 8" in problem.remedy


def test_every_method_has_its_operators_and_a_count() -> None:
    """A name that a job may ask for has its operators, and peft's own count of what it trains."""
    counted = {run["method"] for run in golden("counts")["runs"]} | {run[0] for run in golden("rarer")["counts"]}
    assert set(ADAPTERS) == {*METHODS, *VIRTUAL}
    assert set(ADAPTERS) - counted == UNCOUNTED


@pytest.mark.parametrize("word", ["q_proj", "query_key_value", "attention", "gate_proj,up_proj", "w2", "lm_head"])
def test_names_of_layers_are_known_as_models_give_them(word: str) -> None:
    """A target may be named as any family or framework names it."""
    job = Training(seq_len=1, global_batch=1, adapter="lora", targets=tuple(word.split(",")))
    assert trainable_parameters(Model.load("llama-3.1-8b"), tuning_of(job, find_stack("transformers")))


@given(
    st.sampled_from(["llama-3.1-8b", "gpt2", "qwen3-30b-a3b", "deepseek-v2-lite", "mamba-130m"]),
    st.sampled_from([name for name in ADAPTERS if name not in VIRTUAL]),
    st.integers(1, 64),
)
def test_adapters_grow_with_their_rank_and_leave_the_model(name: str, method: str, rank: int) -> None:
    """Parameters of LoRA are proportional to its rank; the model's own stay as many and none of them trains."""
    model, stack = Model.load(name), find_stack("transformers")
    some, twice = (
        tuning_of(Training(seq_len=1, global_batch=1, adapter=method, rank=r, targets=("all-linear",)), stack)
        for r in (rank, 2 * rank)
    )
    assert some is not None and twice is not None
    one, two = (sum(trainable_parameters(model, t).values()) for t in (some, twice))
    assert 0 < one < count_parameters(model)
    if method in ("lora", "rslora", "lora-plus", "lora-fa"):
        assert two == 2 * one


def test_frozen_a_keeps_no_input() -> None:
    """LoRA-FA trains B alone and keeps no copy of a layer's input (arXiv:2308.03303)."""
    model = Model.load("llama-3.1-8b")
    kept = {}
    for method in ("lora", "lora-fa"):
        tuning = tuning_of(Training(seq_len=1, global_batch=1, adapter=method), find_stack("transformers"))
        y = layout(stack="transformers", tuning=tuning)
        kept[method] = {t.name for t in keep(flow(block_ops(y, model.layers[0], model.hidden)).ops).kept}
    assert kept["lora"] - kept["lora-fa"] == {
        f"{name}.cast" for name in ("qkv.q", "qkv.k", "qkv.v", "out", "mlp.up.gate", "mlp.up.up", "mlp.down")
    }
    assert any(name.endswith("lora_A") for name in kept["lora-fa"])


@pytest.mark.parametrize("method", ["dora", "oft", "vera", "lokr"])
@pytest.mark.parametrize(("precision", "wider"), [("bf16", False), ("fp32", True)])
def test_what_an_adapter_multiplies_in_fp32_runs_on_vector_units(method: str, precision: Any, wider: bool) -> None:
    """Tensor cores take products of 16 bits: an adapter as wide as the activations casts nothing and runs on them."""
    job = Training(seq_len=1, global_batch=1, adapter=method, adapter_precision=precision)
    y = layout(stack="transformers", tuning=tuning_of(job, find_stack("transformers")))
    model = Model.load("llama-3.1-8b")
    plain = {op.name for op in block_ops(layout(stack="transformers"), model.layers[0], model.hidden)}
    added = [op for op in block_ops(y, model.layers[0], model.hidden) if op.name not in plain and op.kind == "matmul"]
    assert {op.vector_units for op in added} <= {False, wider}
    assert added and (method == "lokr" or any(op.vector_units for op in added) == wider)


@pytest.mark.parametrize(("method", "launched"), [("lora", 6), ("ia3", 3), ("vera", 7), ("oft", 17)])
def test_python_launches_the_kernels_of_a_method(method: str, launched: int) -> None:
    """As many as the forward method of peft 0.21.2 runs beside one layer, with an adapter in fp32."""
    y = layout(stack="transformers")
    model = Model.load("llama-3.1-8b")
    bare = sum(op.launches for op in block_ops(y, model.layers[0], model.hidden))
    job = Training(seq_len=1, global_batch=1, adapter=method, targets=("v",))
    y = layout(stack="transformers", tuning=tuning_of(job, find_stack("transformers")))
    assert sum(op.launches for op in block_ops(y, model.layers[0], model.hidden)) - bare == launched


def test_vera_under_autocast_keeps_results_of_16_bits() -> None:
    """The products of its frozen matrices take 16 bits, which its factors, that train in fp32, keep for themselves."""
    tuning = tuning_of(Training(seq_len=1, global_batch=1, adapter="vera", targets=("v",)), find_stack("trl"))
    y, model = layout(stack="trl", tuning=tuning), Model.load("llama-3.1-8b")
    ops = {op.name: op for op in block_ops(y, model.layers[0], model.hidden)}
    result = ops["qkv.v.lora_B"]
    assert result.output_bytes == 2 * result.rows * 1024 and not result.vector_units
    assert [t.size_bytes for t in ops["qkv.v.b.factors applied"].saves] == [result.output_bytes]


@pytest.mark.parametrize("method", ["lora"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_tensor_parallel_ranks_share_every_adapter(method: str, tp: int) -> None:
    """Over tensor-parallel ranks adapters are split: each weight is held once, as NeMo and Megatron-Bridge do."""
    model = Model.load("llama-3.1-8b")
    tuning = tuning_of(Training(seq_len=1, global_batch=1, adapter=method, rank=16), find_stack("megatron-bridge"))
    y = layout(stack="megatron-bridge", tp=tp, tuning=tuning)
    held = sum(w.elements for op in block_ops(y, model.layers[0], model.hidden) for w in op.weights if w.adapter)
    # One adapter each of the joint qkv and of gate and up.
    assert held * tp == 16 * ((4096 + 6144) + (4096 + 4096) + (4096 + 28672) + (14336 + 4096))


@pytest.mark.parametrize(
    ("sp", "exchanges", "rows", "verbs", "width"),
    [(False, False, 4096, ["all_gather"], 4096), (True, False, 1024, ["all_gather"] * 2, 4096),
     (True, True, 1024, ["all_to_all"] * 2, 1024)],
)  # fmt: skip
def test_a_row_parallel_layer_adds_the_adapter_of_its_own_tokens(
    sp: bool, exchanges: bool, rows: int, verbs: list[str], width: int
) -> None:
    """Under sequence parallelism a rank scatters the gathered result and gathers its gradient, or exchanges both."""
    job = Training(seq_len=4096, global_batch=1, adapter="lora", targets=("o",))
    stack, model = replace(find_stack("megatron-bridge"), exchanges_adapters=exchanges), Model.load("llama-3.1-8b")
    y = layout({"B": 1, "S": 4096}, "megatron-bridge", tp=4, sequence_parallel=sp, tuning=tuning_of(job, stack))
    y = lay_out(y.degrees, y.work, replace(y.choices, stack=stack))
    ops = {op.name: op for op in block_ops(y, model.layers[0], model.hidden)}
    both = (*ops["out.lora_B"].forward, *ops["out.lora_B"].backward)
    sent = [m for m in both if m.tensor.startswith("adapter output")]
    assert [(m.verb, m.size_bytes) for m in sent] == [(verb, 2 * 4096 * width) for verb in verbs]
    assert ops["out.add"].forward_bytes == 2 * 5 * rows * 4096


@pytest.mark.parametrize(("tp", "ahead", "back"), [(1, 2, 0), (2, 10, 4)])
def test_fused_operators_add_adapters_within_their_products(tp: int, ahead: int, back: int) -> None:
    """The product of B reads the layer's result and writes the sum; over tensor-parallel ranks nothing is fused yet."""
    stack, model = replace(find_stack("megatron-bridge"), fuses_operators=True), Model.load("llama-3.1-8b")
    tuning = tuning_of(Training(seq_len=64, global_batch=1, adapter="lora", targets=("o",)), stack)
    y = layout({"B": 1, "S": 64}, "megatron-bridge", tp=tp, tuning=tuning)
    y = lay_out(y.degrees, y.work, replace(y.choices, stack=stack))
    (added,) = [op for op in block_ops(y, model.layers[0], model.hidden) if op.name == "out.add"]
    assert (added.forward_bytes, added.backward_bytes) == (ahead * 64 * 4096, back * 64 * 4096)


def test_adapters_cost_a_third_less_than_full_training() -> None:
    """Frozen products have no weight gradient: 4 FLOPs a parameter and token where full training has 6."""
    model = Model.load("llama-3.1-8b")
    flops = {}
    for method in ("", "lora"):
        tuning = tuning_of(Training(seq_len=1, global_batch=1, adapter=method, rank=8), find_stack("megatron"))
        ops = flow(block_ops(layout(stack="megatron", tuning=tuning), model.layers[0], model.hidden)).ops
        flops[method] = sum((1 + gradient_passes(op)) * op.model_flops for op in ops if op.kind == "matmul")
    assert flops["lora"] / flops[""] == pytest.approx(2 / 3, rel=0.01)


# Rows, columns, block, scales of scales, bytes of bitsandbytes 0.50.2 quantize_4bit (packed, maxima, codes, offset).
FOUR_BITS = [
    (1, 64, 64, False, 100),
    (1, 64, 64, True, 1129),
    (1, 64, 128, False, 100),
    (1, 64, 128, True, 1129),
    (33, 65, 64, False, 1273),
    (33, 65, 64, True, 2203),
    (33, 65, 128, False, 1205),
    (33, 65, 128, True, 2186),
    (100, 64, 64, False, 3664),
    (100, 64, 64, True, 4396),
    (100, 64, 128, False, 3464),
    (100, 64, 128, True, 4346),
    (128, 64, 64, False, 4672),
    (128, 64, 64, True, 5320),
    (128, 64, 128, False, 4416),
    (128, 64, 128, True, 5256),
    (4096, 4096, 64, False, 9437248),
    (4096, 4096, 64, True, 8655940),
    (4096, 4096, 128, False, 8912960),
    (4096, 4096, 128, True, 8522820),
    (14336, 4096, 64, False, 33030208),
    (14336, 4096, 64, True, 30293060),
    (14336, 4096, 128, False, 31195200),
    (14336, 4096, 128, True, 29827140),
]


@pytest.mark.parametrize(("rows", "columns", "block", "double", "expected"), FOUR_BITS)
def test_four_bits_take_the_bytes_of_bitsandbytes(
    rows: int, columns: int, block: int, double: bool, expected: int
) -> None:
    """Odd sizes round up, and scales that are quantised too have tables of their own."""
    base = replace(find_base("nf4-dq" if double else "nf4"), block=block)
    assert base_bytes(base, rows * columns, rows) == expected


@pytest.mark.parametrize(("base", "expected"), [("bf16", 33554432), ("int8", 16793600), ("fp8", 16781312)])
def test_a_matrix_takes_the_bytes_of_its_format(base: str, expected: int) -> None:
    """4,096 by 4,096 weights: an fp32 maximum a row of int8, one a block of 128 x 128 of fp8."""
    assert base_bytes(find_base(base), 4096 * 4096, 4096) == expected


@pytest.mark.parametrize(("base", "reads", "moved"), [("fp8", "fp8", 3), ("nvfp4", "fp4", 2.5625)])
def test_only_products_of_more_bits_widen_frozen_weights(base: str, reads: str, moved: float) -> None:
    """Products of their own type read weights as they are; those of 16 bits make 16 bits of them before each pass."""
    model, stack = Model.load("llama-3.1-8b"), find_stack("megatron-bridge")
    tuning = tuning_of(Training(seq_len=1, global_batch=1, adapter="lora", base=base), stack)
    widened = {}
    for dtype in ("bf16", reads):
        y = layout({"dtype": dtype}, "megatron-bridge", tuning=tuning)
        widened[dtype] = sum(op.widened_bytes for op in block_ops(y, model.layers[0], model.hidden))
    assert widened[reads] == 0
    assert widened["bf16"] == moved * (41943040 + 3 * 4096 * 14336)


def _narrow(base: str, **stack: bool) -> list[tuple[str, int]]:
    """What the feed-forward's last product keeps under a format of its frozen weights: names and bytes."""
    own = replace(find_stack("transformers"), **stack)
    tuning = tuning_of(Training(seq_len=1, global_batch=1, adapter="lora", targets=("q",), base=base), own)
    base_layout = layout({"B": 1, "S": 64}, "transformers")
    y = lay_out(base_layout.degrees, base_layout.work, replace(base_layout.choices, tuning=tuning))
    model = Model.load("llama-3.1-8b")
    ops = block_ops(y, model.layers[0], model.hidden)
    (down,) = [op for op in ops if op.role == "down"]
    return [(s.born, int(s.size_bytes)) for s in down.saves if s.read_for == "input"]


def test_a_narrow_product_keeps_what_its_library_does() -> None:
    """Inputs of 8 bits stay, of old bitsandbytes those of 4 too, twice over a graph that lasts; GPTQ's weight does."""
    tokens, weight = 2 * 64 * 14336, 2 * 4096 * 14336
    assert _narrow("nf4") == []
    assert _narrow("int8") == [("mlp.act", tokens)]
    assert _narrow("nf4", keeps_narrow_inputs=True) == [("mlp.act", tokens)]
    assert _narrow("nf4", keeps_narrow_inputs=True, holds_narrow_inputs=True) == [("mlp.act", tokens), ("", tokens)]
    assert _narrow("gptq4", keeps_narrow_inputs=True, holds_narrow_inputs=True) == [("mlp", weight)]


def test_a_head_of_few_bits_is_stored_as_the_layers_are() -> None:
    """LitGPT replaces every linear: its head takes half a byte an element, made fp16, then bf16, beside fp32 logits."""
    job = Training(seq_len=1, global_batch=1, adapter="lora", base="nf4")
    held, kept = {}, {}
    bases = {
        "litgpt": "nf4",
        "transformers": "nf4",
        "trl-2025": "nf4",
        "trl": "nf4",
        "agilerl": "gptq4",
        "axolotl": "nf4",
    }
    for name, base in bases.items():
        y = layout({"B": 1, "S": 64}, name)
        # A loop of one's own, which the recipe states, does not autocast.
        own = "bf16-pure" if name == "transformers" else ""
        chosen = tuning_of(replace(job, base=base, precision=own), find_stack(name))
        (op,) = head(lay_out(y.degrees, y.work, replace(y.choices, tuning=chosen)), Model.load("llama-3.1-8b"))
        held[name] = op.weights[0].stored_bytes, op.transient_bytes
        kept[name] = sum(t.size_bytes for t in op.saves if t.read_for == "input")
    elements = 4096 * 128256
    # peft casts what is not narrow to fp32, but beside GPTQ, and autocast casts the head back for its product. axolotl
    # casts it to 16 bits again. TRL casts it tile by tile.
    assert held["transformers"] == (4 * elements, 0)
    assert held["agilerl"] == held["axolotl"] == (2 * elements, 0)
    assert kept == {"transformers": 0, "trl-2025": 2 * elements, "trl": 0, "agilerl": 0, "axolotl": 0, "litgpt": 0}
    assert held["litgpt"][0] == pytest.approx(0.5625 * elements, rel=1e-4)
    assert held["litgpt"][1] == (2 + 2) * elements + (2 + 4) * 64 * 128256


def test_norms_in_fp32_widen_the_stream_and_leave_the_head_narrow() -> None:
    """TRL before 0.20 casts embedding and head beside weights of 4 bits to 16 bits again, and norms to fp32."""
    job = Training(seq_len=4096, global_batch=1, adapter="lora", base="nf4")
    tuning = tuning_of(job, find_stack("trl-2024"))
    assert tuning is not None and tuning.wide_stream and not tuning.wide_head
    stored, streams = {}, {}
    for name in ("trl-2024", "transformers-2024", "verl"):
        plan, options = Plan(micro_batch=1, recompute="full"), TrainingOptions(stack=name)
        report = train(Model.load("mistral-7b-v0.1"), Cluster.parse("a100-sxm-80gb"), plan, job, options)
        stored[name] = report.evaluation.memory[0].weights
        streams[name] = report.evaluation.parts.kinds[0].kept_bytes
    assert streams["trl-2024"] == streams["transformers-2024"] == 4 * 4096 * 4096
    assert streams["verl"] == 2 * 4096 * 4096
    # Embedding and head take 2 bytes an element fewer than what peft alone leaves in fp32; norms are left as they come.
    assert stored["transformers-2024"] - stored["trl-2024"] == 2 * (2 * 32000 + 65) * 4096


@pytest.mark.parametrize("rank", [8, 32])
def test_adapters_of_experts_read_and_write_what_two_thin_products_do(rank: int) -> None:
    """A reads the input and writes `rank` values a row, B reads those and writes the output, one pair an expert."""
    model = model_from_config(golden("activations")["configs"]["mixtral"])
    y = layout({"B": 2, "S": 64})
    job = Training(seq_len=64, global_batch=2, adapter="rslora", rank=rank, targets=("experts",))
    tuning = tuning_of(job, y.stack)
    assert tuning is not None
    ops = [op for op in block_ops(y, model.layers[0], model.hidden) if op.kind == "grouped"]
    assert ops
    for op in ops:
        rows, experts = op.rows * op.batch, op.batch
        thin = [one for one in METHODS["rslora"](y, tuning, op, ()) if one.name.endswith(("lora_A", "lora_B"))]
        for one, (n, k) in zip(thin, ((rank, op.inner), (op.columns, rank)), strict=True):
            assert sum(w.elements for w in one.weights) == experts * n * k
            assert one.flops == one.backward_flops == one.weight_flops == 2 * rows * n * k
            assert one.forward_bytes == 2 * (rows * k + rows * n + experts * n * k) == one.weight_bytes
            assert one.output_bytes == 2 * rows * n
            assert [t.size_bytes for t in one.saves] == [2 * rows * k]
