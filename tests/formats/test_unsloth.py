"""Scripts of Unsloth: what their calls are told in literals, what is refused, and that nothing is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from command_line import figures, run, trained
from shardwise.errors import InputError
from shardwise.formats.unsloth import read

# As scripts of unslothai/notebooks are, with names for what is told twice and a model that is loaded again if False.
LOADED = """from unsloth import FastLanguageModel
import torch
max_seq_length = 2048
load_in_4bit = True
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/Meta-Llama-3.1-8B-bnb-4bit",
    max_seq_length = max_seq_length, dtype = None, load_in_4bit = load_in_4bit, token = os.environ["HF_TOKEN"],
)
"""
ADAPTED = """model = FastLanguageModel.get_peft_model(
    model, r = 16, lora_alpha = 16, lora_dropout = 0, bias = "none", use_gradient_checkpointing = "unsloth",
    target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",],
    random_state = 3407, use_rslora = False, loftq_config = None,
)
"""
TRAINED = """trainer = SFTTrainer(
    model = model, tokenizer = tokenizer, train_dataset = load_dataset("yahma/alpaca-cleaned", split = "train"),
    args = SFTConfig(
        per_device_train_batch_size = 2, gradient_accumulation_steps = 4, max_steps = 60, learning_rate = 2e-4,
        fp16 = not is_bfloat16_supported(), bf16 = is_bfloat16_supported(), optim = "adamw_8bit", seed = 3407,
    ),
)
trainer.train()
if False:
    model, tokenizer = FastLanguageModel.from_pretrained(model_name = "lora_model", max_seq_length = 8192)
"""
SCRIPT = LOADED + ADAPTED + TRAINED


def test_a_script_is_predicted_as_its_flags_are(tmp_path: Path) -> None:
    """The script that all notebooks have takes the bytes and the seconds of the same case in flags."""
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    own = trained("train", "--from", str(tmp_path / "train.py"), "--on", "1xrtx-4090")
    flags = "--stack unsloth --adapter lora --rank 16 --base nf4-dq --optimizer adam8bit --micro-batch 2"
    words = f"train llama-3.1-8b --on 1xrtx-4090 {flags} --accumulation 4 --seq-len 2048 --tokens 983040"
    assert figures(own) == figures(trained(*words.split()))
    assert own.case.job.run_tokens == 60 * 2 * 4 * 2048
    told = run("import", str(tmp_path / "train.py"), "--json").tree
    assert told["unknown"] == []


CHANGES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("load_in_4bit = True", "load_in_4bit = False", {"base": ""}),
    ("dtype = None, load_in_4bit = load_in_4bit", "dtype = torch.float16, load_in_4bit = False", {"base": "fp16"}),
    ("load_in_4bit = load_in_4bit", "load_in_8bit = True", {"base": "int8"}),
    ("load_in_4bit = load_in_4bit", "load_in_16bit = True", {"base": ""}),
    ('= "unsloth",', "= True,", {"recompute": "full", "offload": ()}),
    ('= "unsloth",', "= False,", {"recompute": "none", "offload": ()}),
    ('use_gradient_checkpointing = "unsloth",', "", {"recompute": "full", "offload": ("activations",)}),
    ("use_rslora = False", "use_rslora = True", {"adapter": "rslora"}),
    ("r = 16", "r = 64", {"rank": 64}),
    ("r = 16, ", "", {"rank": 16}),
    ('"down_proj",]', '"down_proj", "lm_head", "embed_tokens"]', {"targets": ("all-linear",), "trains": ("embedding", "head")}),  # noqa: E501
    ('"gate_proj", "up_proj", "down_proj",]', "]", {"targets": ("q_proj", "k_proj", "v_proj", "o_proj")}),
    ("max_steps = 60", "max_length = 1024", {"seq_len": 1024}),
    ("SFTConfig", "DPOConfig", {"method": "dpo"}),
    ("per_device_train_batch_size = 2, gradient_accumulation_steps = 4, ", "", {"micro_batch": 4, "global_batch": 8}),
    ('optim = "adamw_8bit", ', "", {"optimizer": "adam8bit"}),
)  # fmt: skip


@pytest.mark.parametrize(("ours", "theirs", "means"), CHANGES)
def test_what_a_call_is_told_is_what_it_means(ours: str, theirs: str, means: dict[str, Any]) -> None:
    """Each argument sets its field; what is not told has Unsloth's defaults."""
    assert ours in SCRIPT
    text = SCRIPT.replace(ours, theirs)
    case = read(text.replace("SFTTrainer", "DPOTrainer") if theirs == "DPOConfig" else text)
    values = {name: getattr(case.job, name, None) for name in means} | {
        name: getattr(case.plan, name) for name in means if hasattr(case.plan, name)
    }
    assert values == means


WRONG: tuple[tuple[str, str, set[str]], ...] = (
    ("r = 16,", "r = args.rank,", {"peft.r"}),
    ("max_seq_length = 2048", "max_seq_length = pick()", {"model.max_seq_length"}),
    ("load_in_4bit = True", "load_in_4bit = True\nload_in_4bit = False", {"model.load_in_4bit"}),
    ("r = 16,", "**options, r = True,", {"peft.**", "peft.r"}),
    ("SFTTrainer", "GRPOTrainer", {"trainer"}),
    ("FastLanguageModel", "FastVisionModel", {"model"}),
    (ADAPTED, "", {"peft"}),
    (TRAINED, "", {"trainer"}),
    ("import torch", "import torch torch", {"from"}),
)


@pytest.mark.parametrize(("ours", "theirs", "named"), WRONG)
def test_what_is_no_literal_is_refused_by_name(ours: str, theirs: str, named: set[str]) -> None:
    """A value that the script works out, and what is not read of Unsloth, are named, all at once."""
    with pytest.raises(InputError) as caught:
        read(SCRIPT.replace(ours, theirs))
    assert {problem.field for problem in caught.value.problems} == named


def test_a_whole_model_trains_where_it_is_told_so() -> None:
    """full_finetuning needs no adapter, and keeps none of the weights in 4 bits."""
    text = LOADED.replace("load_in_4bit = load_in_4bit", "full_finetuning = True") + TRAINED
    case = read(text)
    assert (case.job.adapter, case.job.base, case.plan.recompute) == ("", "", "full")
    assert case.stack.name == "unsloth" and not case.unknown


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    """A script that would write a file when run writes none when read."""
    at = tmp_path / "there"
    (tmp_path / "train.py").write_text(f"open({str(at)!r}, 'w')\n{SCRIPT}", encoding="utf-8")
    assert run("import", str(tmp_path / "train.py"), "--json").status == 0
    assert not at.exists()
