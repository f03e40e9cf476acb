"""The command line with other systems' files: cases from scripts and commands, and plans as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import run
from shardwise.answers import _commands

SCRIPTS = Path(__file__).parents[1] / "formats" / "scripts"
SMALL = (
    *("--num-layers", "8", "--hidden-size", "512", "--num-attention-heads", "8", "--seq-length", "1024"),
    *("--max-position-embeddings", "1024", "--micro-batch-size", "2", "--global-batch-size", "32"),
    *("--vocab-size", "50257", "--bf16", "--swiglu", "--tensor-model-parallel-size", "2"),
)


def test_a_script_trains_on_the_devices_of_its_launch() -> None:
    """A device named alone is taken as often as the script's launch has devices."""
    done = run("train", "--from", str(SCRIPTS / "analysis_tool.sh"), "--on", "h100-sxm-80gb", "--json")
    assert done.status == 0
    plan = done.tree["plan"]
    assert (plan["tp"], plan["pp"], plan["dp"], plan["micro_batch"]) == (2, 2, 4, 4)
    assert done.tree["cluster"]["num_devices"] == 16
    assert any("50257" in text for text in done.tree["assumptions"])


def test_flags_change_what_the_script_says() -> None:
    """A flag wins over the file, and what follows from it is deduced again."""
    words = ("train", "--from", str(SCRIPTS / "analysis_tool.sh"), "--on", "32xh100-sxm-80gb", "--tp", "4", "--json")
    plan = run(*words).tree["plan"]
    assert (plan["tp"], plan["pp"], plan["dp"]) == (4, 2, 4)


def test_the_training_command_itself_is_a_case() -> None:
    """Behind -- stands the command that would have started the training, launcher and program included."""
    launched = ("torchrun", "--nproc_per_node", "8", "--nnodes", "2", "pretrain_gpt.py")
    whole = run("train", "--on", "h100-sxm-80gb", "--json", "--", *launched, *SMALL)
    alone = run("train", "--on", "h100-sxm-80gb", "--json", "--", *launched[1:5], *SMALL)
    assert whole.status == 0
    assert whole.tree == alone.tree
    assert whole.tree["plan"]["dp"] == 8


TAKE = ("train", "explain", "comm", "count")


@pytest.mark.parametrize("command", [name for name in TAKE if name in _commands.NAMES])
def test_every_command_that_takes_a_plan_takes_a_script(command: str) -> None:
    """The same file serves every command."""
    where = () if command == "count" else ("--on", "h100-sxm-80gb")
    assert run(command, "--from", str(SCRIPTS / "analysis_tool.sh"), *where, "--json").status == 0


def test_a_script_with_expert_parallelism_is_counted_without_a_cluster(tmp_path: Path) -> None:
    """A count needs no devices: the experts' ranks are those of the script, whatever it launches."""
    script = tmp_path / "experts.sh"
    experts = [
        "--num-experts",
        "8",
        "--expert-model-parallel-size",
        "8",
        "--moe-ffn-hidden-size",
        "64",
        "--sequence-parallel",
    ]
    script.write_text(" ".join(["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", *SMALL, *experts]))
    done = run("count", "--from", str(script), "--json")
    assert done.status == 0 and done.tree["params"]["by_component"]["experts"] > 0
    assert done.tree["params"]["total"] == sum(done.tree["params"]["by_component"].values())
    assert run("count", "mixtral-8x7b", "--ep", "8").status == 0


def test_a_script_with_two_sets_of_flags_is_compared() -> None:
    """Two sides of one script differ in what --a and --b say."""
    words = ("compare", "--from", str(SCRIPTS / "analysis_tool.sh"), "--on", "h100-sxm-80gb", "--json")
    done = run(*words, "--a", "--tp 2", "--b", "--tp 4")
    assert done.status == 0


def test_the_command_to_copy_gives_the_same_answer() -> None:
    """The page ends with a command that keeps the file, the words behind -- and every flag."""
    done = run("train", "--on", "h100-sxm-80gb", "--", "--nproc_per_node", "8", *SMALL)
    command = done.out.rpartition("AGAIN")[2].replace("\\\n", " ").split()
    assert command[:2] == ["shardwise", "train"]
    assert run(*command[1:]).out == done.out


def test_import_lists_every_word() -> None:
    """`import` shows the model, the plan, the job, and what was understood, assumed, ignored and unknown."""
    done = run("import", str(SCRIPTS / "gpt_oss_20b.sh"), "--on", "8xh100-sxm-80gb", "--json")
    tree = done.tree
    assert tree["model"]["layers"] == 24
    assert {"argument": "--swiglu", "value": True, "meaning": "activation"} not in tree["understood"]
    assert {"argument": "--quick-geglu", "value": True, "meaning": "activation"} in tree["understood"]
    assert [one["argument"] for one in tree["unknown"]] == ["--enable-gpt-oss"]
    page = run("import", str(SCRIPTS / "gpt_oss_20b.sh"), "--on", "8xh100-sxm-80gb").out
    for word in ("FROM", "MODEL", "PLAN", "JOB", "STACK", "UNDERSTOOD", "ASSUMED", "IGNORED", "UNKNOWN", "NEXT"):
        assert word in page


def test_everything_wrong_is_told_at_once() -> None:
    """Problems of the file and of the flags come together, under their own names."""
    done = run("train", "--on", "h100", "--tp", "x", "--json", "--", "--num-layers", "8", "--bf16", "--fp16")
    assert done.status == 2
    assert {"tp", "--fp16", "--hidden-size", "--micro-batch-size"} <= set(done.fields)


def test_a_device_alone_needs_a_launch() -> None:
    """Where neither the file nor the flag says how many devices there are, that is asked for."""
    done = run("train", "--on", "h100-sxm-80gb", "--json", "--", *SMALL)
    assert done.fields == ["on"]


def test_overrides_of_the_model_need_a_model() -> None:
    """A flag of the model does not change a file's model in silence."""
    words = ("train", "--from", str(SCRIPTS / "analysis_tool.sh"), "--on", "h100", "--num-layers", "4", "--json")
    assert "num_layers" in run(*words).fields


def test_a_configuration_without_a_model_asks_for_one(tmp_path: Path) -> None:
    """DeepSpeed's file has no model; with one named, its plan and batch are used."""
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
                                "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}))  # fmt: skip
    assert run("train", "--from", str(file), "--on", "8xh100", "--json").fields == ["model"]
    tree = run("train", "llama-3.1-8b", "--from", str(file), "--on", "8xh100", "--json").tree
    assert (tree["plan"]["sharding"], tree["plan"]["dp"], tree["job"]["global_batch"]) == ("zero3", 8, 32)


def test_export_writes_what_import_reads(tmp_path: Path) -> None:
    """A plan written for Megatron-LM gives the same report when its script is read."""
    words = ("--tp", "2", "--pp", "2", "--sharding", "distributed-optimizer", "--global-batch", "64")
    case = ("gpt2", "--on", "8xh100-sxm-80gb", *words, "--micro-batch", "4", "--seq-len", "1024")
    assert run("export", "megatron", *case, "--write", str(tmp_path)).status == 0
    there = run("train", *case, "--json").tree
    back = run("train", "--from", str(tmp_path / "gpt2.sh"), "--on", "h100-sxm-80gb", "--json").tree
    assert back["memory"]["peak_bytes"] == there["memory"]["peak_bytes"]
    assert back["step_seconds"] == there["step_seconds"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("megatron", "gpt2", "--schedule", "zb-h1", "--pp", "2"), ["schedule"]),
        (("deepspeed", "gpt2", "--pp", "2"), ["pp"]),
        (("fsdp", "gpt2", "--sharding", "fsdp", "--recompute", "selective"), ["recompute"]),
        (("tensorrt", "gpt2"), ["target"]),
        (("torchtitan", "llama-3.1-8b", "--method", "dpo"), ["method"]),
        (("deepspeed", "gpt2", "--method", "reward"), ["method"]),
        (("llamafactory", "llama-3.2-1b", "--method", "grpo"), ["method"]),
        (("axolotl", "llama-3.2-1b", "--method", "dpo", "--adapter", "lora", "--reference", "copy"), ["reference"]),
    ],
)
def test_what_a_target_cannot_be_told_is_named(words: tuple[str, ...], named: list[str]) -> None:
    """Exit status 2, and the field that the target has no word for."""
    more = ("--on", "8xh100-sxm-80gb", "--micro-batch", "1", "--global-batch", "64", "--seq-len", "512", "--json")
    done = run("export", *words, *more)
    assert done.status == 2
    assert done.fields == named


def test_an_export_says_which_version_it_was_checked_against() -> None:
    """Each target states its version."""
    words = ("gpt2", "--on", "8xh100-sxm-80gb", "--micro-batch", "1", "--global-batch", "64", "--json")
    assert run("export", "deepspeed", *words, "--sharding", "zero2").tree["version"] == "0.19.8"
    assert run("export", "fsdp", *words, "--sharding", "fsdp").tree["version"] == "1.15.0"
    assert run("export", "megatron", *words).tree["version"].startswith("core_v0.19.0")


def test_an_export_that_does_not_fit_says_so(tmp_path: Path) -> None:
    """The files are written all the same; the status is 1, and the reader is warned beside them."""
    words = ("llama-3.1-8b", "--on", "8xh100", "--write", str(tmp_path))
    done = run("export", "megatron", *words)
    assert done.status == 1
    assert "does not fit" in done.err
    text = (tmp_path / "llama-3.1-8b.sh").read_text()
    assert "# this plan does not fit, " in text
    assert "# assumed: dp 8: fills 8 devices\n" in text
    assert "# assumed: seq_len 4096: not given\n" in text
    done = run("export", "deepspeed", *words, "--sharding", "zero3")
    assert json.loads((tmp_path / "ds_config.json").read_text())["train_batch_size"] == 8
    assert "assumed: dp 8: fills 8 devices\n" in done.err


def test_an_export_names_parts_of_a_model_in_words() -> None:
    """What a target has no word for is named as a reader would."""
    done = run("export", "megatron", "bert-base", "--on", "8xh100")
    assert "error: extras = 'pooler': cannot be said to Megatron-LM; leave it out" in done.err
    assert "Projection(" not in done.err


SCRIPT = (
    "NNODES=2\nTP=${TP:-2}\ntorchrun --nproc_per_node 8 --nnodes $NNODES pretrain_gpt.py --num-layers 8"
    " --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024"
    " --micro-batch-size 2 --global-batch-size 32 --vocab-size 50257 --bf16 --tensor-model-parallel-size $TP\n"
)
OPEN = SCRIPT.replace("NNODES=2\n", "")


@pytest.mark.parametrize(
    ("name", "text", "more", "said"),
    [
        ("empty.yaml", "", "", "empty.yaml: is empty"),
        ("comment.yaml", "# nothing\n", "", "comment.yaml: holds no keys"),
        ("empty.json", " \n", "", "empty.json: is empty"),
        ("empty.sh", "", "", "empty.sh: is empty"),
        ("list.json", "[]", "", "list.json: must hold an object of keys and values, and holds a list"),
        ("null.json", "null", "", "null.json: must hold an object of keys and values, and holds null"),
        ("ds.json", '{"train_batch_size": 64}', "A=1", "set = 'A=1': has no effect: ds.json is no script"),
        ("run.sh", SCRIPT, "NOSUCH=3", "set = 'NOSUCH=3': sets a variable that run.sh does not use"),
        ("run.sh", SCRIPT, "NNODES=4", "set = 'NNODES=4': has no effect: run.sh sets NNODES itself, to 2"),
        ("run.sh", OPEN, "NNODES=x", "set = 'NNODES=x': NNODES must be a whole number"),
        ("run.sh", OPEN, "TP=x", "tensor-model-parallel-size = 'x'"),
    ],
)
def test_files_and_variables_that_say_nothing_are_refused(
    name: str, text: str, more: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the file or the variable, its value and the rule."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    done = run("import", name, *(("--set", more) if more else ()))
    assert done.status == 2
    assert said in done.err.replace(f"'{name}'", name).replace("file = ", "").replace("from = ", "")


@pytest.mark.parametrize("flag", ["set", "skip"])
def test_words_about_a_file_that_is_not_there_are_refused(flag: str) -> None:
    """Variables and skipped arguments of a script without one are no silent nothing."""
    done = run("train", "llama-3.2-1b", "--on", "1xh100", f"--{flag}", "A=1")
    assert done.status == 2
    assert f"{flag} = 'A=1': has no effect without --from" in done.err


@pytest.mark.parametrize(("more", "plan"), [("NNODES=4,TP=4", (32, 4, 8)), ("NNODES=1", (8, 2, 4))])
def test_variables_of_a_caller_are_used(more: str, plan: tuple[int, ...], tmp_path: Path) -> None:
    """What the script leaves open or gives a default, its caller may set."""
    path = tmp_path / "run.sh"
    path.write_text(OPEN)
    tree = run("import", str(path), "--set", more, "--json").tree
    assert (tree["num_devices"], tree["plan"]["tp"], tree["plan"]["dp"]) == plan


def test_other_devices_than_the_script_starts_are_said() -> None:
    """Devices that --on counts take the place of the launch's, and the answer says so; the same number says nothing."""
    words = ("train", "--from", str(SCRIPTS / "analysis_tool.sh"), "--json", "--on")
    for devices, said in (("32xh100-sxm-80gb", True), ("16xh100-sxm-80gb", False), ("h100-sxm-80gb", False)):
        notes = run(*words, devices).tree["assumptions"]
        assert any("starts 16 devices, 32 are asked for" in note for note in notes) is said


@pytest.mark.parametrize(
    ("name", "text", "remedy"),
    [
        ("config.json", '{"hidden_size": 4096}', "give it in place of the model"),
        ("values.yaml", "replicas: 2\n", "docs/formats.md"),
        ("run.sh", "echo a\n", "docs/formats.md"),
    ],
)
def test_a_file_of_another_system_is_not_taken_for_one_that_is_read(
    tmp_path: Path, name: str, text: str, remedy: str
) -> None:
    """A file without any setting that its system knows is refused, with what can be done."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    done = run("import", str(path))
    assert done.status == 2
    assert remedy in done.err


def test_degrees_that_are_left_open_are_not_said_to_be_zero(tmp_path: Path) -> None:
    """A file that leaves replicas and micro-batch to the trainer has none of them in its plan's line."""
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}}', encoding="utf-8")
    page = run("import", str(path)).out
    plan = page[page.index("PLAN") : page.index("JOB")]
    assert "zero2" in plan and "micro_batch" not in plan and "dp" not in plan.split()


def test_an_export_needs_a_model_and_devices_alone() -> None:
    """Every target has a framework and a sharding of its own, so that the shortest command gives a file."""
    for target in ("megatron", "deepspeed", "fsdp"):
        assert run("export", target, "gpt2", "--on", "8xh100").status == 0
    assert "distributed_type: FSDP" in run("export", "fsdp", "gpt2", "--on", "8xh100").out
    assert "MULTI_GPU" in run("export", "fsdp", "gpt2", "--on", "8xh100", "--sharding", "none").out


def test_layers_without_a_letter_are_named() -> None:
    """Megatron-LM's hybrids have no Mamba of the first kind: the error names the layers, not words of the script."""
    done = run("export", "megatron", "mamba-2.8b", "--on", "8xh100", "--json")
    (problem,) = done.tree["error"]["problems"]
    assert problem["field"] == "model" and "Mamba1" in problem["rule"]


_LLAMA = "meta-llama/Llama-3.2-1B"
_TUNED = f"base_model: {_LLAMA}\nadapter: lora\nlora_r: 8\nlora_target_linear: true\nsequence_len: 512\n"
_COMPONENT = "model: {_component_: torchtune.models.llama3_2.llama3_2_1b}\ntokenizer: {max_seq_len: 512}\n"
# A training's file, and what it sets of buffers and kernels beside plan and job.
SET: dict[str, tuple[str, dict[str, object]]] = {
    "axolotl.yaml": (_TUNED + "liger_fused_linear_cross_entropy: true\n", {"loss": "fused-linear"}),
    "tune.yaml": (_COMPONENT + "optimizer_in_bwd: true\n", {"updates_in_backward": True}),
    "titan.toml": (
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\n'
        '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "op"\n',
        {"checkpoint_policy": "second-matmuls"},
    ),
    "verl.sh": (
        f"python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path={_LLAMA} trainer.n_gpus_per_node=8 "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 algorithm.adv_estimator=grpo\n",
        {"rollout": "asleep"},
    ),
}
SERVED = {
    "vllm.sh": f"vllm serve {_LLAMA}-Instruct -tp 2 --max-model-len 4096 --gpu-memory-utilization 0.8\n",
    "llama.sh": "llama-server -hf bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0 -c 8192 -np 2\n",
}


def test_the_checkpointing_that_torchtitan_does_unless_told_is_launched_and_written(tmp_path: Path) -> None:
    """A file that says nothing recomputes every second layer of each stage, which its own framework can launch."""
    file = tmp_path / "titan.toml"
    file.write_text('[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\npipeline_parallel_degree = 2\n')
    asked = ("--from", str(file), "--on", "8xh100-sxm-80gb")
    found = run("train", *asked, "--json").tree
    assert found["plan"]["recompute_layers"] == 8 and not found.get("unlaunched")
    assert "no launch" not in run("train", *asked).out
    assert 'selective_ac_option = "2"' in run("export", "torchtitan", *asked).out


def test_weights_gathered_anew_for_each_micro_batch_of_a_pipeline_are_refused(tmp_path: Path) -> None:
    """Pipelines of torchtitan keep them gathered unless told always, which no plan says."""
    file = tmp_path / "titan.toml"
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\nfsdp_reshard_after_forward = "always"\n'
    file.write_text(text)
    assert run("train", "--from", str(file), "--on", "8xh100-sxm-80gb").status != 2
    file.write_text(text + "pipeline_parallel_degree = 2\n")
    done = run("train", "--from", str(file), "--on", "8xh100-sxm-80gb", "--json")
    (problem,) = done.tree["error"]["problems"]
    assert done.status == 2 and problem["field"] == "parallelism.fsdp_reshard_after_forward"


@pytest.mark.parametrize("name", SET)
def test_what_a_file_says_of_buffers_and_kernels_is_in_its_answer(name: str, tmp_path: Path) -> None:
    """What a file sets of its framework reaches the answer and the file that is exported from it; a flag wins."""
    text, said = SET[name]
    (tmp_path / name).write_text(text, encoding="utf-8")
    asked = ("train", "--from", str(tmp_path / name), "--on", "8xh100-sxm-80gb", "--json")
    found = run(*asked).tree["settings"]
    assert {key: found[key] for key in said} == said
    if "loss" in said:
        assert run(*asked, "--loss", "eager").tree["settings"]["loss"] == "eager"


@pytest.mark.parametrize("name", (*SET, *SERVED))
def test_a_file_answers_what_can_be_asked_of_it(name: str, tmp_path: Path) -> None:
    """Counts take either; what is asked of a training takes no server, nor the other way round, and says so."""
    (tmp_path / name).write_text(SET[name][0] if name in SET else SERVED[name], encoding="utf-8")
    there = ("--from", str(tmp_path / name), "--json")
    assert run("count", *there).tree["params"]["total"] > 1e9
    refused = ("infer", "export vllm", "plan serve") if name in SET else ("train", "export megatron", "plan train")
    for command in refused:
        done = (
            run(*command.split(), *there, "--on", "8xh100-sxm-80gb", "--rate", "1/s")
            if command == "plan serve"
            else (run(*command.split(), *there, "--on", "8xh100-sxm-80gb"))
        )
        assert done.fields == ["from"], command
        assert ("of a training" if name in SET else "starts a server") in done.out


def test_a_launch_is_written_again_for_the_same_and_for_another_engine(tmp_path: Path) -> None:
    """Model, degrees and the longest request are the file's; the share of the memory only where the engine is."""
    (tmp_path / "vllm.sh").write_text(SERVED["vllm.sh"], encoding="utf-8")
    there = ("--from", str(tmp_path / "vllm.sh"), "--on", "h100-sxm-80gb", "--json")
    for system, start, share in (
        ("vllm", f"vllm serve {_LLAMA}-Instruct", "--gpu-memory-utilization 0.8"),
        ("sglang", f"--model-path {_LLAMA}-Instruct", "--context-length 4096"),
        ("llamacpp", "llama-server --model Llama-3.2-1B-Instruct-BF16.gguf", "--split-mode tensor"),
    ):
        text = run("export", system, *there).tree["files"][f"{system}.sh"]
        assert start in text and share in text
        (tmp_path / "again.sh").write_text(text, encoding="utf-8")
        back = run("import", str(tmp_path / "again.sh"), "--json").tree
        assert (back["serving"]["tp"], back["serving"]["max_context"], back["num_devices"]) == (2, 4096, 2)
        assert (
            "memory_fraction" not in back["serving"] or system != "sglang" or back["serving"]["memory_fraction"] != 0.8
        )


@pytest.mark.parametrize("system", ["vllm", "sglang"])
def test_a_launch_answers_as_the_batch_that_it_was_written_for(system: str, tmp_path: Path) -> None:
    """The longest request of a launch shortens no table of the checkpoint, and longer requests are refused."""
    batch = ("--batch", "8", "--input-tokens", "500", "--output-tokens", "20", "--json")
    asked = ("llama-3.1-8b", "--on", "1xh100-sxm-80gb", *batch)
    (tmp_path / "serve.sh").write_text(run("export", system, *asked).tree["files"][f"{system}.sh"], encoding="utf-8")
    there = ("infer", "--from", str(tmp_path / "serve.sh"), "--on", "1xh100-sxm-80gb", *batch)
    first, again = run("infer", *asked, "--engine", system).tree, run(*there).tree
    for key in ("weights_bytes_per_gpu", "ttft_seconds", "tpot_seconds"):
        assert again[key] == first[key], key
    longer = run(*(word if word != "500" else "501" for word in there))
    assert longer.fields == ["input_tokens"]
    assert "exceed the 520 tokens of max_context" in longer.out


def test_an_export_is_asked_for_by_the_name_of_a_framework_or_of_an_engine() -> None:
    """The words behind --stack and --engine name what writes their files, which keep the framework."""
    train = ("llama-3.2-1b", "--on", "2xh100", "--micro-batch", "1", "--global-batch", "4", "--json")
    for named, words in (
        ("llama-factory", ("llamafactory", *train, "--stack", "llama-factory")),
        ("megatron-bridge", ("nemo", *train, "--stack", "megatron-bridge")),
        ("tensorrt-llm", ("trtllm", "llama-3.2-1b", "--on", "1xh100", "--json")),
    ):
        stack = words.index("--stack") if "--stack" in words else len(words)
        assert run("export", named, *words[1:stack]).tree == run("export", *words).tree


@pytest.mark.parametrize("name", ["unsloth", "ms-swift", "litgpt"])
def test_a_framework_whose_files_nobody_writes_says_so(name: str) -> None:
    """It is known, only not written: the remedy names what is, and where its memory and time are answered."""
    done = run("export", name, "llama-3.2-1b", "--on", "1xh100", "--json")
    assert (done.status, done.fields) == (2, ["target"])
    assert f"--stack {name}" in done.err + done.out and "not a known choice" not in done.err + done.out


def test_a_trainers_file_that_does_not_say_zero_is_refused_by_its_sharding() -> None:
    """What a trainer runs beside DeepSpeed is no other framework: its sharding is named, with one that is written."""
    words = ("llama-3.2-1b", "--adapter", "lora", "--on", "1xh100", "--sharding", "zero1", "--global-batch", "8")
    done = run("export", "axolotl", *words, "--json")
    assert "sharding" in done.fields and "stack" not in done.fields


def test_the_hubs_name_that_was_asked_for_is_written() -> None:
    """Tuned variants share the sizes of their base, and an export starts the one that was named."""
    where = ("--on", "1xh100-sxm-80gb", "--seq-len", "512", "--json")
    files = run("export", "axolotl", f"{_LLAMA}-Instruct", *where).tree["files"]
    assert f"base_model: {_LLAMA}-Instruct" in files["axolotl.yaml"]
    assert f"base_model: {_LLAMA}\n" in run("export", "axolotl", "llama-3.2-1b", *where).tree["files"]["axolotl.yaml"]


def test_a_batch_that_follows_from_accumulation_is_that_of_the_devices(tmp_path: Path) -> None:
    """A search of plans needs a batch: where the file states its parts alone, its replicas are all devices."""
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}')
    words = ("plan", "train", "llama-3.2-1b", "--from", str(tmp_path / "ds.json"), "--seq-len", "512", "--top", "1")
    assert run(*words, "--on", "4xh100", "--json").tree["best"][0]["job"]["global_batch"] == 32


def test_an_adapter_is_trained_and_served_from_its_own_file(tmp_path: Path) -> None:
    """What peft writes beside an adapter names its base, its rank and its targets for either."""
    file = tmp_path / "adapter_config.json"
    said = {"peft_type": "LORA", "base_model_name_or_path": _LLAMA, "r": 32, "target_modules": ["q_proj", "v_proj"]}
    file.write_text(json.dumps({**said, "lora_alpha": 64, "inference_mode": True, "task_type": "CAUSAL_LM"}))
    where = ("--from", str(file), "--on", "1xh100-sxm-80gb", "--json")
    job = run("train", *where, "--seq-len", "512", "--micro-batch", "1", "--global-batch", "8").tree["job"]
    assert (job["adapter"], job["rank"], job["targets"]) == ("lora", 32, ["q_proj", "v_proj"])
    without = run("infer", _LLAMA, "--on", "1xh100-sxm-80gb", "--json").tree
    assert run("infer", *where).tree["kv_cache_tokens"] < without["kv_cache_tokens"]
    assert "--max-lora-rank 32" in run("export", "vllm", *where).tree["files"]["vllm.sh"]


def test_rows_that_leave_it_blank_take_offload_and_the_base_from_the_file(tmp_path: Path) -> None:
    """What lies on the host, and the format of frozen weights, are stated for rows as for an answer."""
    (tmp_path / "ax.yaml").write_text(
        _TUNED.replace("adapter: lora", "adapter: qlora\nload_in_4bit: true") + "activation_offloading: true\n"
        "gradient_checkpointing: true\nmicro_batch_size: 1\n"
    )
    (tmp_path / "rows.csv").write_text(
        "case_id,metric,value,unit,device,seq_len,num_gpus,global_batch\na,peak_memory,9e9,bytes,h100-sxm-80gb,512,1,1\n"
    )
    words = ("validate", str(tmp_path / "rows.csv"), "--from", str(tmp_path / "ax.yaml"), "--json")
    predicted = run(*words, "--rows", str(tmp_path / "out.csv"))
    assert predicted.tree["rows"]["predicted"] == 1, predicted.out
    said = (tmp_path / "out.csv").read_text()
    assert "param_dtype: not stated" not in said and "lora_targets: not stated" not in said


def test_rows_take_the_model_of_a_script_that_states_its_sizes(tmp_path: Path) -> None:
    """A script whose model is in no catalogue is the model of rows that name none, and a name in them is their own."""
    sizes = "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024"
    start = "torchrun --nproc_per_node 8 pretrain_gpt.py --vocab-size 51200 --micro-batch-size 1 --global-batch-size 8"
    (tmp_path / "run.sh").write_text(f"{start} --bf16 {sizes}\n")
    (tmp_path / "rows.csv").write_text(
        "case_id,metric,value,device,model\na,step_time,0.1,h100-sxm-80gb,\nb,step_time,0.1,h100-sxm-80gb,no-such-model\n"
    )
    words = ("validate", str(tmp_path / "rows.csv"), "--from", str(tmp_path / "run.sh"), "--json")
    rows = run(*words, "--rows", str(tmp_path / "out.csv")).tree["rows"]
    assert (rows["predicted"], rows["refused"]) == (1, 1)


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ("--rate 50/s --p99-ttft 1ms", 1, "under this load p99 ttft is"),
        ("--rate 900/s", 1, "under this load the queue grows without end"),
        ("--rate 5/s --p99-ttft 10s", 0, ""),
        ("--p99-ttft 1ms --router random", 2, "--rate, --users or --trace"),
        ("--rate 5/s --batch 8", 2, "leave it out"),
        ("--cached-share 0.5", 0, ""),
    ],
)
def test_a_launch_line_is_held_against_the_load_that_it_is_asked_for(words: str, status: int, says: str) -> None:
    """Limits and what queues are said beside the file and in it, and flags that say nothing there are refused."""
    done = run("export", "vllm", "llama-3.1-8b", "--on", "h100", *words.split())
    assert (done.status, says in done.err) == (status, True)
    assert status != 1 or f"# {says}" in done.out
    assert bool(done.err) == (status > 0)
