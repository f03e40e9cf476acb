"""Memory savers are evaluated one by one: what each saves and adds is what the changed plan takes."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from command_line import run, trained
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Plan, Settings, Training, find_stack
from shardwise.training import TrainingOptions, TrainReport, train
from shardwise.training._savers import bundles, flags_of, singles


def report(on: str = "1xrtx-4090", stack: str = "transformers", **plan: object) -> TrainReport:
    """Return a full fine-tune of Llama-3.1-8B."""
    job = Training(seq_len=2048, global_batch=1)
    whole = Plan(micro_batch=1, **plan)  # type: ignore[arg-type]
    return train(load_model("llama-3.1-8b"), Cluster.parse(on), whole, job, TrainingOptions(stack=find_stack(stack)))


def test_each_saver_does_what_it_says() -> None:
    """Bytes and seconds are those of the changed plan against the one that was asked, legal ones first."""
    base = report()
    found = {one.flags: one for one in base.savers}
    away = report(offload=("optimizer",))
    one = found["--offload optimizer"]
    assert (one.device_bytes, one.step_seconds, one.host_bytes) == (
        away.device_bytes, away.step_seconds, away.memory.host,
    )  # fmt: skip
    assert one.saved_bytes == base.device_bytes - away.device_bytes
    assert one.added_seconds == away.step_seconds - base.step_seconds
    legal = [saver.saved_bytes for saver in base.savers if not saver.problem]
    assert legal == sorted(legal, reverse=True)


def test_savers_that_a_framework_does_not_run_say_why() -> None:
    """What is refused comes last, with the rule and what would do instead."""
    broken = {one.flags: one for one in report(stack="megatron").savers if one.problem}
    assert "megatron does not run this" in broken["--optimizer adam8bit"].problem
    assert "is no cross entropy of megatron" in broken["--loss fused-linear"].problem
    assert not any(one.saves for one in broken.values())


def test_what_a_plan_has_is_no_saver() -> None:
    """A change that the report has already is not listed."""
    said = {one.flags for one in report(recompute="full", offload=("activations",)).savers}
    assert "--recompute full" not in said and "--offload activations" not in said
    assert "--offload activations,optimizer" in said


def test_a_hopeless_full_fine_tune_is_told_what_fits() -> None:
    """8B parameters on 24 GB: bundles of savers that fit come with their cost, the quickest first."""
    found = report().proposals
    assert found and all(one.fits for one in found)
    assert [one.step_seconds for one in found] == sorted(one.step_seconds for one in found)
    assert any("--offload optimizer,gradients,parameters,activations" in one.flags for one in found)
    whole = report(stack="megatron").proposals
    assert any(one.flags.endswith("--stack transformers") for one in whole)


def test_replicas_have_a_saver_that_shards_their_weights() -> None:
    """Of two replicas FSDP without offload is a saver of its own, of one device it is none."""
    job = Training(seq_len=2048, global_batch=2, adapter="lora")
    options = TrainingOptions(stack=find_stack("transformers"))
    two = train(load_model("llama-3.1-8b"), Cluster.parse("2xa100-sxm-80gb"), Plan(dp=2, micro_batch=1), job, options)
    found = {one.flags: one for one in two.savers}
    assert found["--sharding fsdp"].saves
    assert "--sharding fsdp" not in {one.flags for one in report().savers}


@pytest.mark.parametrize("stack", ["megatron", "transformers"])
def test_weights_that_no_device_holds_alone_are_sharded_beside_adapters(stack: str) -> None:
    """70B parameters over eight of 40 GB: adapters beside sharded weights are proposed, and each proposal fits."""
    model, job = load_model("llama-3.1-70b"), Training(seq_len=2048, global_batch=8)
    options = TrainingOptions(stack=find_stack(stack))
    found = train(model, Cluster.parse("8xa100-sxm-40gb"), Plan(dp=8, micro_batch=1), job, options).proposals
    assert all(one.fits for one in found)
    for base in ("", " --base nf4"):
        assert any(f"--adapter lora{base} --sharding fsdp" in one.flags for one in found)


@pytest.mark.parametrize("flags", [("--adapter", "lora", "--base", "nf4"), ()])
@pytest.mark.parametrize("stack", ["transformers", "unsloth"])
def test_weights_that_no_devices_hold_go_to_the_host_beside_adapters(stack: str, flags: tuple[str, ...]) -> None:
    """QLoRA of 70B parameters on two cards of 24 GB is proposed with weights on the host, and fits asked again."""
    words = ("train", "llama-3.1-70b", "--on", "2xrtx-4090", "--stack", stack, *flags)
    proposals = [
        one for one in run(*words, "--json").tree["proposals"] if "offload optimizer,gradients,p" in one["flags"]
    ]
    assert proposals and all(one["fits"] for one in proposals)
    for one in proposals:
        kept = words[:4] if "--stack" in one["flags"] else words[:6]
        again = trained(*kept, *flags, *one["flags"].split(), *one["batches"].split())
        assert again.fits and not again.unlaunched
        assert again.device_bytes == pytest.approx(one["device_bytes"], abs=1)


def test_a_bundle_keeps_the_recomputation_that_its_offload_no_longer_asks_for() -> None:
    """Activations on the host bring full recomputation: states in their place say so themselves."""
    words = ("train", "gemma-3-27b", "--on", "2xa100-sxm-40gb", "--adapter", "ia3", "--offload", "activations")
    words += ("--micro-batch", "1", "--global-batch", "2")
    proposals = [
        one for one in run(*words, "--savers", "--json").tree["proposals"] if "activations" not in one["flags"]
    ]
    (one,) = (one for one in proposals if one["flags"].endswith("--offload optimizer,gradients,parameters --stack trl"))
    again = trained(*words[:6], *words[8:], *one["flags"].split())
    assert (again.device_bytes, again.fits) == (pytest.approx(one["device_bytes"], abs=1), one["fits"])


_CUT = (
    ("gpt3-175b", "128xgaudi3", "--tp 2 --pp 8 --vpp 2 --sharding fsdp --no-sequence-parallel", "lora"),
    ("bamba-9b", "256xb300", "--tp 8 --pp 8 --sharding zero2", "--sharding zero3"),
    (
        "granite-4.0-h-small",
        "16xa100-sxm-80gb",
        "--tp 2 --pp 8 --vpp 2 --schedule v-half --recompute attention",
        "full",
    ),
)


@pytest.mark.parametrize(("model", "on", "flags", "wanted"), _CUT)
def test_a_framework_is_named_where_stages_that_it_cut_hide_that_another_would_run(
    model: str, on: str, flags: str, wanted: str
) -> None:
    """Layers that a framework cut unevenly are not asked for: a saver names its framework where another takes over."""
    words = ("train", model, "--on", on, "--micro-batch", "1", "--global-batch", "512")
    found = [one for one in run(*words, *flags.split(), "--savers", "--json").tree["savers"] if not one["problem"]]
    own = [one for one in found if wanted in one["flags"]]
    assert own
    for one in own:
        kept = flags.replace("--recompute attention", "").replace("--sharding zero2", "").split()
        again = trained(*words, *kept, *one["flags"].split())
        assert again.device_bytes == pytest.approx(one["device_bytes"], abs=1), one["flags"]


def test_where_nothing_fits_the_least_is_named() -> None:
    """405B parameters fit no single card whatever is saved: the bundle that needs least is returned alone."""
    model, job = load_model("llama-3.1-405b"), Training(seq_len=2048, global_batch=1)
    found = train(model, Cluster.parse("1xrtx-4090"), Plan(micro_batch=1), job, TrainingOptions(stack="transformers"))
    (one,) = found.proposals
    assert not one.fits


@pytest.mark.parametrize("kind", [singles, bundles])
def test_savers_change_fields_that_there_are(kind: object) -> None:
    """Each change names fields of a plan, a job or settings, and is said as flags."""
    names = {f.name for record in (Plan, Training, Settings) for f in fields(record)}
    for changes in kind(report()):  # type: ignore[operator]
        assert changes.keys() <= names
        assert flags_of(changes).startswith("--")


def test_several_micro_batches_take_no_update_in_backward() -> None:
    """With several micro-batches no bundle updates in backward."""
    base = report()
    many = replace(base.job, global_batch=4)
    found = train(base.case.model, base.case.cluster, base.plan, many, TrainingOptions(stack=base.case.stack))
    assert not any("updates_in_backward" in changes for changes in bundles(found))
    assert any("updates_in_backward" in changes for changes in bundles(base))


@pytest.mark.parametrize(
    ("base", "narrower"), [("fp32", {"bf16", "nf4"}), ("bf16", {"nf4"}), ("", {"nf4"}), ("nf4", set())]
)
def test_frozen_weights_may_be_loaded_narrower(base: str, narrower: set[str]) -> None:
    """TRL loads fp32 unless told: 16 bits are a saver beside adapters then, and 4 bits of whatever is wider."""
    job = Training(seq_len=2048, global_batch=8, adapter="lora", base=base, method="dpo")
    options = TrainingOptions(stack=find_stack("trl"))
    one = train(
        load_model("qwen2.5-7b"), Cluster.parse("1xrtx-4090"), Plan(micro_batch=1, recompute="full"), job, options
    )
    found = {change["base"] for change in singles(one) if "base" in change}
    assert found == narrower
    assert (base != "fp32") or any("--base bf16" in saver.flags and saver.fits for saver in one.savers)
    assert (base != "fp32") or any("--base bf16" in saver.flags for saver in one.proposals)


def test_adapters_are_proposed_to_a_full_fine_tune_and_narrowed_where_they_are() -> None:
    """LoRA, over 16-bit and 4-bit weights, is among what fits; of a job with adapters it is no saver any more."""
    base = report()
    # Beside quantised weights peft recomputes unless told, which a saver of its own does not mean.
    wanted = {"--adapter lora", "--recompute none --adapter lora --base nf4"}
    assert wanted <= {one.flags for one in base.savers}
    assert any("--adapter lora --base nf4" in one.flags for one in base.proposals)
    job = replace(base.job, adapter="lora", adapter_dropout=0.05)
    tuned = train(base.case.model, base.case.cluster, base.plan, job, TrainingOptions(stack=base.case.stack))
    found = {one.flags: one for one in tuned.savers}
    nf4 = replace(tuned.job, base="nf4", seq_len=65536)
    long = train(base.case.model, base.case.cluster, base.plan, nf4, TrainingOptions(stack=base.case.stack))
    said = [one.flags for one in long.proposals]
    assert said and not any("--base" in flags for flags in said) and len(said) == len(set(said))
    assert found["--adapter-precision bf16"].saves and found["--adapter-dropout 0.0"].saves
    assert not any("--adapter lora" in flags for flags in found)


@pytest.mark.parametrize(("stack", "recompute", "offload"), [("trl", "full", []), ("llama-factory", "full", []),
                         ("ms-swift", "full", []), ("unsloth", "full", ["activations"]), ("axolotl", "none", []),
                         ("torchtune", "full", []), ("transformers", "none", [])])  # fmt: skip
def test_trainers_recompute_as_they_do_unless_told(stack: str, recompute: str, offload: list[str]) -> None:
    """TRL, LLaMA-Factory, ms-swift and Unsloth checkpoint by default, the last on the host; a flag wins."""
    words = ("train", "qwen3-0.6b", "--on", "rtx-4090", "--micro-batch", "1", "--stack", stack, "--json")
    found = run(*words).tree["plan"]
    assert (found["recompute"], found["offload"]) == (recompute, offload)
    assert run(*words, "--recompute", "none").tree["plan"]["recompute"] == "none"


def test_experts_padded_to_a_larger_group_are_said_with_what_they_cost() -> None:
    """FSDP2 holds and sends 8 experts over 64 ranks 8 times; groups of 8 and torchtitan's columns do not."""
    model, cluster = load_model("mixtral-8x7b"), Cluster.parse("64xh100-sxm-80gb")
    job = Training(seq_len=2048, global_batch=64)

    def said(stack: str, **fields: Any) -> tuple[str, ...]:
        plan = Plan(**{"dp": 64, "sharding": "fsdp", "micro_batch": 1, **fields})
        return train(model, cluster, plan, job, TrainingOptions(stack=stack)).surprises

    (line,) = said("transformers")
    assert line.startswith("8 experts are padded to the 64 ranks that share them, held and sent 8 times, ")
    assert said("transformers", sharding="hsdp", shard=8) == () == said("torchtitan")


def test_savers_say_to_how_many_layers_the_least_recomputation_was_limited() -> None:
    """Megatron recomputes as many layers as it must: a saver asked again without their number would recompute all."""
    words = ["train", "glm-4-9b", "--on", "4xl40s", "--seq-len", "8192", "--stack", "megatron-bridge", "--adapter"]
    words += ["lora", "--base", "int8", "--rank", "64", "--global-batch", "8"]
    tree = run(*words, "--recompute", "auto", "--savers", "--json").tree
    assert tree["plan"]["recompute_layers"]
    (one,) = (one for one in tree["savers"] if one["flags"] == "--adapter-precision bf16")
    again = trained(*words, *one["flags"].split(), *one["batches"].split())
    assert again.device_bytes == pytest.approx(one["device_bytes"], abs=1)


@pytest.mark.parametrize("recompute", ["auto", "selective"])
def test_savers_of_a_plan_without_a_framework_keep_the_one_that_they_were_asked_of(recompute: str) -> None:
    """What was recomputed as the least that fits is said beside each, and the framework where a word brings another."""
    words = ["train", "glm-4-9b", "--on", "16xh100", "--adapter", "lora-fa", "--sharding", "zero3", "--tp", "2"]
    words += ["--micro-batch", "4"]
    tree = run(*words, "--recompute", recompute, "--savers", "--json").tree
    able = [one for one in tree["savers"] if not one["problem"] and "--micro-batch" not in one["flags"]]
    assert any(one["flags"].startswith("--recompute full") for one in able)
    for one in able:
        flags = [*one["flags"].split(), *one["batches"].split()]
        kept = [] if "--recompute" in flags else ["--recompute", recompute]
        own = words if "--sharding" not in flags else [*words[:6], *words[8:]]
        again = trained(*own, *kept, *flags)
        assert again.device_bytes == pytest.approx(one["device_bytes"], abs=1), flags
        assert "--recompute" in one["batches"] or recompute != "auto" or "--recompute" in one["flags"]


@pytest.mark.parametrize(
    "words",
    [
        "llama-3.2-1b --on h100 --seq-len 4096 --adapter lora --base nf4 --stack trl --micro-batch 4 --global-batch 16",
        "llama-3.2-1b --on 4xa100 --seq-len 512 --sharding zero2 --stack transformers --micro-batch 2 --global-batch 8",
    ],
)
def test_savers_of_a_framework_and_the_plan_itself_are_what_is_typed(words: str) -> None:
    """AGAIN and each saver, typed, give their own bytes: beside narrow weights, and under a trainer's ZeRO."""
    asked = ["train", *words.split()]
    page, tree = run(*asked), run(*asked, "--savers", "--json").tree
    again = page.out[page.out.index("AGAIN") + 5 :].replace("\\\n", " ").split()
    assert run(*again[1:], "--json").tree["device_bytes"] == tree["device_bytes"]
    able = {one["flags"]: one for one in tree["savers"] if not one["problem"]}
    assert [flags for flags in able if "precision bf16-pure" in flags or "sharding" in flags]
    for flags, one in able.items():
        plain = [f"--{word}".split() for word in " ".join(asked).split(" --")[1:]]
        kept = [words for words in plain if words[0] not in flags.split()]
        typed = [*asked[:2], *(word for words in kept for word in words), *flags.split()]
        assert trained(*typed).device_bytes == pytest.approx(one["device_bytes"], abs=1), flags
