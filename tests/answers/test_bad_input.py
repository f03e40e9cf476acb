"""Bad input: status 2, every field that is wrong is named with a rule and a remedy, and never a traceback."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from command_line import run

T = "train llama-3.1-8b --on 8xh100"
I = "infer llama-3.1-8b --on 8xh100"  # noqa: E741
HUGE = "9" * 40

# The words of a command line ({dir} is a folder of broken files), and every field that must be named.
CASES: dict[str, tuple[str, str]] = {
    "no command": ("", "command"),
    "unknown command": ("trian gpt2 --on 8xh100", "command"),
    "a model without a command": ("gpt2 --on 8xh100", "command"),
    "a search that does not say of what": ("plan gpt2 --on 8xh100 --global-batch 8", "what"),
    "an export that does not say to what": ("export gpt2 --on 8xh100", "target"),
    "no model and no devices": ("train", "model on"),
    "no devices": ("train gpt2", "on"),
    "unknown model": ("train lama-3.1-8b --on 8xh100", "model"),
    "empty model": ("train '' --on 8xh100", "model"),
    "unicode model": ("train \u30e2\u30c7\u30eb --on 8xh100", "model"),
    "model is a folder without a configuration": ("train {dir} --on 8xh100", "model"),
    "model is broken JSON": ("train {dir}/broken.json --on 8xh100", "model"),
    "model is no object": ("train {dir}/list.json --on 8xh100", "config"),
    "model of an unknown type": ("train {dir}/nothing.json --on 8xh100", "model_type"),
    "model file that is not there": ("train ./no/config.json --on 8xh100", "model"),
    "unknown device": ("train gpt2 --on 8xh1000", "device"),
    "no number of devices": ("train gpt2 --on 8", "on"),
    "a size without its unit": ("infer gpt2 --on h100 --kv-cache-memory 20", "kv_cache_memory"),
    "room to leave without its unit": ("plan train gpt2 --on h100 --global-batch 8 --min-free 5", "min_free"),
    "a share of more than all": ("infer gpt2 --on h100 --memory-fraction 90", "memory_fraction"),
    "a prompt without tokens": ("serve gpt2 --on 1xh100 --rate 3 --input-tokens 0..10", "input_tokens"),
    "an answer without tokens": ("serve gpt2 --on 1xh100 --rate 3 --output-tokens 0..10", "output_tokens"),
    "a range and its spread": ("serve gpt2 --on 1xh100 --rate 3 --input-tokens 1..10 --input-cv 0.5", "input_cv"),
    "a spread of gaps that have none": ("serve gpt2 --on 1xh100 --rate 3 --arrivals poisson:4", "arrivals"),
    "a spread of gaps that is too wide": ("serve gpt2 --on 1xh100 --rate 3 --arrivals gamma:99", "arrivals"),
    "gaps of users, who wait": ("serve gpt2 --on 1xh100 --users 3 --arrivals constant", "arrivals"),
    "a rate of what comes at once": ("serve gpt2 --on 1xh100 --rate 3 --arrivals burst", "arrivals"),
    "more replicas than are simulated": ("serve llama-3.1-8b --on 100001xh100 --rate 3", "dp"),
    "zero devices": ("train gpt2 --on 0xh100", "num_devices"),
    "negative devices": ("train gpt2 --on -8xh100", "on"),
    "empty devices": ("train gpt2 --on ''", "on"),
    "devices of a file that is not there": ("train gpt2 --on no.toml", "on"),
    "model and device unknown at once": ("train lama --on 8xh1000", "model device"),
    "type of training that a device lacks": ("train gpt2 --on 1xcpu-generic --precision bf16", "precision"),
    "type of serving that a device lacks": ("infer gpt2 --on 1xcpu-generic", "weights"),
    "unknown flag": (f"{T} --bogus 3", "bogus"),
    "unknown flag without a value": (f"{T} --bogus", "bogus"),
    "unknown short flag": (f"{T} -x", "x"),
    "flag with underscores": (f"{T} --micro_batch 1", "micro_batch"),
    "misspelt flag": (f"{T} --micro-bach 1", "micro_bach"),
    "two unknown flags": (f"{T} --one --two 2", "one two"),
    "word too many": (f"{T} gpt2", "arguments"),
    "missing value at the end": (f"{T} --tp", "tp"),
    "missing value before a flag": (f"{T} --tp --pp 2", "tp"),
    "given twice": (f"{T} --tp 2 --tp 4", "tp"),
    "value for a switch": (f"{T} --dropout=maybe", "dropout"),
    "value for a negated switch": (f"{T} --no-overlap=true", "overlap"),
    "text for a number": (f"{T} --tp eight", "tp"),
    "fraction for a whole number": (f"{T} --tp 6.5", "tp"),
    "zero": (f"{T} --tp 0", "tp"),
    "negative": (f"{T} --tp -8", "tp"),
    "negative with equals": (f"{T} --tp=-8", "tp"),
    "not a number": (f"{T} --tp nan", "tp"),
    "infinity": (f"{T} --tp inf", "tp"),
    "minus infinity": (f"{T} --tokens -inf", "tokens"),
    "huge": (f"{T} --tp {HUGE}", "tp"),
    "huge ranks of an axis": (f"{T} --fast tp=4,dp={'9' * 5000}", "fast"),
    "an order of a search without an axis": ("plan infer gpt2 --on 1xh100 --order tp-dp-pp", "order"),
    "huge rate of a device": ("count gpt2 --on 8xh100 --peak-flops 1e308", "peak_flops"),
    "huge sequence": (f"{T} --seq-len {HUGE}", "seq_len"),
    "exponent": (f"{T} --tp 1e3", "tp"),
    "empty": (f"{T} --tp ''", "tp"),
    "empty with equals": (f"{T} --tp=", "tp"),
    "unicode digits": (f"{T} --tp \uff18", "tp"),
    "unicode minus": (f"{T} --tp \u22128", "tp"),
    "several wrong numbers": (f"{T} --tp x --pp -1 --micro-batch 0 --seq-len 1.5", "tp pp micro_batch seq_len"),
    "wrong numbers beside an unknown flag and model": (
        "train lama --on 8xh1000 --tp x --bogus --recompute some",
        "model device tp bogus recompute",
    ),
    "unknown choice": (f"{T} --sharding zero4", "sharding"),
    "unknown layout": (f"{T} --layout 3d", "layout"),
    "unknown schedule": (f"{T} --schedule 2f2b", "schedule"),
    "unknown recompute": (f"{T} --recompute everything", "recompute"),
    "unknown context kind": (f"{T} --cp-kind star", "cp_kind"),
    "unknown module": (f"{T} --modules attention", "modules"),
    "unknown stack": (f"{T} --stack tensorflow", "stack"),
    "unknown precision": (f"{T} --precision fp12", "precision"),
    "unknown optimizer": (f"{T} --optimizer adamw2", "optimizer"),
    "precision that the device lacks": ("train gpt2 --on 8xv100-sxm-32gb --precision bf16", "precision"),
    "fp8 on Ampere": ("train llama-3.1-8b --on 8xa100 --precision fp8", "precision"),
    "stage layers that are words": (f"{T} --pp 2 --stage-layers a,b", "stage_layers"),
    "stage layers of the wrong sum": (f"{T} --pp 2 --stage-layers 10,11", "stage_layers"),
    "stage layers for other stages": (f"{T} --pp 2 --stage-layers 10,11,11", "stage_layers"),
    "order of unknown axes": (f"{T} --order tp,up,down", "order"),
    "order that is empty": (f"{T} --order ''", "order"),
    "tokens that are words": (f"{T} --tokens many", "tokens"),
    "tokens of zero": (f"{T} --tokens 0", "tokens"),
    "tokens with an unknown suffix": (f"{T} --tokens 15Q", "tokens"),
    "tokens beyond any budget": (f"{T} --tokens 1e300", "tokens"),
    "tokens beyond numbers": (f"{T} --tokens 1e999", "tokens"),
    "efficiency above one": (f"{T} --compute-efficiency 1.5", "compute_efficiency"),
    "efficiency of zero": (f"{T} --memory-efficiency 0", "memory_efficiency"),
    "efficiency below zero": (f"{T} --fast-efficiency -0.5", "fast_efficiency"),
    "efficiency that is no number": (f"{T} --slow-efficiency nan", "slow_efficiency"),
    "rate with an unknown unit": (f"{T} --matmul-flops 700W", "matmul_flops"),
    "rate of zero": (f"{T} --memory-bandwidth-achieved 0", "memory_bandwidth_achieved"),
    "imbalance below one": (f"{T} --expert-imbalance 0.5", "expert_imbalance"),
    "density above one": (f"{T} --attention-density 2", "attention_density"),
    "documents longer than a sequence": (f"{T} --document-lengths 512,99999999", "document_lengths"),
    "documents and their density": (f"{T} --document-lengths 512 --attention-density 0.5", "document_lengths"),
    "negative time": (f"{T} --restart -5min", "restart"),
    "time with an unknown unit": (f"{T} --checkpoint 5weeks", "checkpoint"),
    "checkpoint without an interval": (f"{T} --checkpoint 1min", "checkpoint_interval"),
    "failures below zero": (f"{T} --failures-per-device-hour -1", "failures_per_device_hour"),
    "tp that divides no heads": (f"{T} --tp 3", "tp"),
    "more stages than layers": ("train llama-3.1-8b --on 64xh100 --pp 64", "pp"),
    "chunks without a pipeline": (f"{T} --vpp 2", "vpp"),
    "interleaved without chunks": (f"{T} --pp 2 --schedule interleaved", "schedule"),
    "dualpipe of odd stages": ("train gpt2 --on 3xh100 --pp 3 --schedule dualpipe", "pp"),
    "degrees that exceed the devices": (f"{T} --tp 8 --pp 2", "tp"),
    "dp that does not fill the devices": (f"{T} --dp 4", "dp"),
    "experts of a dense model": (f"{T} --ep 2", "ep"),
    "expert tensor parallelism of a dense model": (f"{T} --etp 2", "etp"),
    "ep that divides no experts": ("train mixtral-8x7b --on 12xh100 --ep 3", "ep"),
    "second axis of a one-dimensional layout": (f"{T} --tp2 2", "tp2"),
    "panels of a one-dimensional layout": (f"{T} --panels 4", "panels"),
    "shard without hsdp": (f"{T} --shard 4", "shard"),
    "hsdp that does not divide": (f"{T} --sharding hsdp --shard 3", "shard"),
    "recompute layers without recompute": (f"{T} --recompute-layers 4", "recompute_layers"),
    "cp that does not divide the sequence": ("train llama-3.1-8b --on 6xh100 --cp 3", "cp"),
    "several illegal degrees": ("train mixtral-8x7b --on 24xh100 --tp 3 --ep 5", "tp ep"),
    "illegal degrees beside a wrong number": (f"{T} --tp 3 --tokens x", "tp tokens"),
    "batch that replicas do not divide": (f"{T} --global-batch 12 --micro-batch 1", "global_batch"),
    "batch, micro-batch and accumulation that disagree": (
        f"{T} --global-batch 64 --micro-batch 1 --accumulation 2",
        "global_batch",
    ),
    "no learned position left": ("train gpt2 --on 8xh100 --seq-len 2048", "seq_len"),
    "no learned position left for serving": (
        "infer gpt2 --on 1xh100 --input-tokens 1024 --output-tokens 1",
        "input_tokens",
    ),
    "offload": (f"{T} --offload", "offload"),
    "rank of an adapter": (f"{T} --lora-rank 0", "rank"),
    "targets that the model lacks": (f"{T} --adapter lora --targets q,frob", "targets"),
    "rank above its targets": (f"{T} --adapter lora --rank 5000", "rank"),
    "narrow base that would train": (f"{T} --base nf4", "base"),
    "rank without an adapter": (f"{T} --rank 8", "rank"),
    "adapters in two dimensions": (f"{T} --adapter lora --layout summa", "layout"),
    "dropout before experts": (
        "train mixtral-8x7b --on 8xh100 --seq-len 512 --adapter lora --targets experts --adapter-dropout 0.1",
        "adapter_dropout",
    ),
    "several that are wrong": (f"{T} --lora-rank 0 --offload host", "rank offload"),
    "cluster override without a unit": (f"{T} --nic-bandwidth fast", "nic_bandwidth"),
    "cluster override of zero": (f"{T} --devices-per-node 0", "devices_per_node"),
    "cluster override that contradicts": (f"{T} --nics-per-node 2 --slow-bandwidth 10GB/s", "slow_bandwidth"),
    "negative price": (f"{T} --price -1", "price"),
    "infinite memory": (f"{T} --memory inf", "memory"),
    "model override that is no number": (f"{T} --num-layers few", "num_layers"),
    "model override below zero": (f"{T} --hidden-size -1", "hidden_size"),
    "model override too deep": (f"{T} --num-layers 1000000000", "num_layers"),
    "serving batch of zero": (f"{I} --batch 0", "batch"),
    "serving tokens of words": (f"{I} --input-tokens some --output-tokens -1", "input_tokens output_tokens"),
    "unknown weight format": (f"{I} --weights fp7", "weights"),
    "unknown cache format": (f"{I} --kv-cache fp7", "kv_cache"),
    "unknown engine": (f"{I} --engine torchserve", "engine"),
    "memory fraction above one": (f"{I} --memory-fraction 1.1", "memory_fraction"),
    "prefix as long as the prompt": (f"{I} --input-tokens 8 --prefix-tokens 8", "prefix_tokens"),
    "training flag for serving": (f"{I} --sharding zero1", "sharding"),
    "serving degrees": (f"{I} --tp 3", "tp"),
    "count of nothing": ("count", "model"),
    "count of words": ("count gpt2 --batch x --tokens y", "batch tokens"),
    "count with a plan that is not legal": ("count gpt2 --tp 5", "tp"),
    "explain an unknown number": ("explain gpt2 --on 1xh100 --what cost", "what"),
    "explain a path that leads nowhere": ("explain gpt2 --on 1xh100 --path pipeline/nothing", "path"),
    "explain too deep": ("explain gpt2 --on 1xh100 --depth 99", "depth"),
    "compare one": ("compare {dir}/good.toml", "second"),
    "compare a model with itself": ("compare gpt2 --on 8xh100", "b"),
    "compare nothing": ("compare", "first"),
    "compare an unknown flag": ("compare gpt2 --on 8xh100 --a '--bogus 1' --b '--tp 2'", "a.bogus"),
    "compare two illegal plans": ("compare gpt2 --on 8xh100 --a '--tp 5' --b '--pp 5'", "a.tp b.pp"),
    "compare unclosed quotes": ('compare gpt2 --on 8xh100 --a "--tp \'" --b "--tp 2"', "a"),
    "compare training with serving": ("compare gpt2 --on 8xh100 --a '--batch 8' --b '--pp 2'", "b"),
    "listing with a flag": ("models --tp 2", "tp"),
    "listing with two words": ("devices a b", "arguments"),
    "width of words": (f"{T} --width wide", "width"),
    "width too small": (f"{T} --width 3", "width"),
    "configuration that is not there": ("train --config {dir}/none.toml", "config"),
    "configuration that is a folder": ("train --config {dir}", "config"),
    "configuration that is no TOML": ("train --config {dir}/broken.toml", "config"),
    "configuration that is no JSON": ("train --config {dir}/broken.json", "config"),
    "configuration that is a list": ("train --config {dir}/list.json", "config"),
    "configuration that is not UTF-8": ("train --config {dir}/latin.toml", "config"),
    "configuration with unknown keys": ("train --config {dir}/unknown.toml", "micro_bacth colour"),
    "configuration with wrong types": ("train --config {dir}/types.toml", "tp pp tokens dropout modules"),
    "configuration with infinities": ("train --config {dir}/infinite.toml", "tokens memory compute_efficiency"),
    "configuration with a key twice": ("train --config {dir}/twice.toml", "micro_batch"),
    "configuration of no command": ("--config {dir}/types.toml", "command"),
    "configuration without a name": ("train gpt2 --on 1xh100 --config", "config"),
    "save into a folder that is not there": ("train gpt2 --on 1xh100 --save {dir}/no/case.toml", "save"),
    "save over a folder": ("train gpt2 --on 1xh100 --save {dir}", "save"),
    "flag that is no regular expression": (f"{I} --x[y 1 --engine zz", "x[y engine"),
    "name of a device that no file can have": (f"train gpt2 --on {'a' * 300}", "device"),
    "file of a device that no file can have": (f"train gpt2 --on 8x{'a' * 300}.toml", "device"),
    "folder that no folder can be": (f"{T} --catalogue {'a' * 300}", "catalogue"),
    "folder of a user that is not there": (f"{T} --catalogue ~nobody-here", "catalogue"),
    "null character in files": ("import a\0b", "file"),
    "null character in measurements": ("validate a\0b", "file"),
    "half a character": (f"{T} --seq-len \udc80", "seq_len"),
    "null character in a name": ("train gpt\0 --on 1xh100", "model"),
    "null character in a file": ("train gpt2 --on 1xh100 --config a\0b", "config"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files that cannot be used, and one that can."""
    found = tmp_path_factory.mktemp("files")
    (found / "broken.toml").write_text("tp = = 8\n", encoding="utf-8")
    (found / "broken.json").write_text('{"tp": ', encoding="utf-8")
    (found / "list.json").write_text("[1, 2]", encoding="utf-8")
    (found / "nothing.json").write_text('{"model_type": "no-such-model"}', encoding="utf-8")
    (found / "latin.toml").write_bytes(b'model = "\xe9\xff"\n')
    head = 'model = "gpt2"\non = "8xh100"\n'
    (found / "good.toml").write_text(head, encoding="utf-8")
    (found / "unknown.toml").write_text(head + 'micro_bacth = 1\ncolour = "red"\n', encoding="utf-8")
    wrong = 'tp = "x"\npp = 2.5\ntokens = [1]\ndropout = 3\nmodules = 5\n'
    (found / "types.toml").write_text(head + wrong, encoding="utf-8")
    infinite = "tokens = inf\nmemory = nan\ncompute_efficiency = -inf\n"
    (found / "infinite.toml").write_text(head + infinite, encoding="utf-8")
    (found / "twice.toml").write_text(head + "micro_batch = 1\nmicro-batch = 2\n", encoding="utf-8")
    return found


def words_of(line: str, folder: Path) -> list[str]:
    """Return the words of a line as a shell would split them."""
    return [word.replace("{dir}", str(folder)) for word in shlex.split(line)]


@pytest.mark.parametrize("name", CASES)
def test_every_wrong_field_is_named_as_json(name: str, folder: Path) -> None:
    """Status 2, nothing on stderr, and each wrong field, and no other, with its value, rule and remedy on stdout."""
    line, fields = CASES[name]
    done = run(*words_of(line, folder), "--json")
    assert done.status == 2, done.out
    assert done.err == ""
    assert set(done.fields) == set(fields.split()), done.out
    for problem in done.tree["error"]["problems"]:
        assert problem.keys() == {"field", "value", "rule", "remedy"}
        assert problem["rule"]
        assert problem["remedy"]


@pytest.mark.parametrize("name", CASES)
def test_every_wrong_field_is_named_as_text(name: str, folder: Path) -> None:
    """Status 2, nothing on stdout, and one line for each problem on stderr that begins with its field."""
    line, fields = CASES[name]
    done = run(*words_of(line, folder))
    assert done.status == 2
    assert done.out == "" or not line
    lines = done.err.splitlines() if line else ["error: command: is missing"]
    assert all(text.startswith("error: ") and "Traceback" not in text for text in lines)
    for field in fields.split():
        assert any(text.startswith((f"error: {field} = ", f"error: {field}: ")) for text in lines), (field, lines)


def test_only_what_is_wrong_is_named() -> None:
    """A wrong degree is not followed by problems that it alone causes."""
    assert run(*f"{T} --pp x --vpp 2 --schedule interleaved --stage-layers 16,16 --json".split()).fields == ["pp"]
    assert run(*f"{T} --layout 4d --tp2 2 --panels 2 --json".split()).fields == ["layout"]


def test_a_misspelt_name_is_met_with_the_right_one() -> None:
    """Unknown models, devices, flags and choices are answered with the nearest known one."""
    for line, near in (
        ("train lama-3.1-8b --on 8xh100", "llama-3.1-8b"),
        ("train gpt2 --on 8xh1000", "h100"),
        (f"{T} --micro-bach 1", "--micro-batch"),
        ("trian gpt2", "train"),
    ):
        assert near in run(*line.split()).err


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("train settings.yaml --on rtx-4090", "with --from settings.yaml"),
        ("infer --from server.sh --on rtx-4090", "write for example --on 1xrtx-4090"),
    ],
)
def test_files_of_other_systems_get_a_remedy_that_reads_them(
    line: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings in place of the model are read by --from; a server on a device without a number runs on one."""
    monkeypatch.chdir(tmp_path)
    Path("settings.yaml").write_text("base_model: gpt2\n", encoding="utf-8")
    Path("server.sh").write_text("llama-server -m Llama-3.1-8B-Q4_K_M.gguf\n", encoding="utf-8")
    assert remedy in run(*line.split()).err


@pytest.mark.parametrize("line", [I, "models", "devices", "dtypes", "validate", "compare a b"])
def test_words_of_another_program_need_a_command_that_takes_them(line: str) -> None:
    """Words behind -- are refused by commands that do not read another program's."""
    done = run(*shlex.split(line), "--json", "--", "torchrun", "a.py")
    assert done.status == 2
    assert "arguments" in done.fields


def test_words_of_a_training_are_refused_where_a_server_is_asked() -> None:
    """What `roofline` asks decides which program's words it takes."""
    done = run("roofline", "llama-3.1-8b", "--on", "h100", "--what", "infer", "--json", "--", "torchrun", "a.py")
    assert (done.status, done.fields) == (2, ["from_args"])


def test_a_list_of_a_file_is_named_where_a_number_stands(tmp_path: Path) -> None:
    """What is wrong is said once, whatever a file has there."""
    file = tmp_path / "config.yaml"
    sizes = "{hidden_size: 64, intermediate_size: [1], num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 99}"
    lines = ["parallelism: {dp: 8}", "tokens: {sequence_length: 64}", f"model: {{model_config: {sizes}}}"]
    file.write_text("\n".join(lines), encoding="utf-8")
    done = run("comm", "--on", "8xh100", "--from", str(file), "--json")
    assert (done.status, "model.model_config.intermediate_size" in done.fields) == (2, True), done.err


def test_the_table_is_wide() -> None:
    """At least seventy kinds of bad input are held against the command line."""
    assert len(CASES) >= 140


@pytest.mark.parametrize(
    ("words", "said", "unsaid"),
    [
        ("infer llama-3.1-8b --on 8xh100 --weights int3", "bf16, fp8", ""),
        ("plan train gpt2 --on 8xh100 --global-batch 1e30", "global_batch = '1e30'", "global_batch = 0"),
        ("plan", "name what to plan behind the command: train or infer", "--what"),
        ("export", "name the target behind the command: megatron", "--target"),
    ],
)
def test_a_remedy_is_the_word_to_write(words: str, said: str, unsaid: str) -> None:
    """A remedy names what is usual, says a place where there is no flag, and nothing is said twice."""
    done = run(*words.split())
    assert said in done.err
    assert not unsaid or unsaid not in done.err


@pytest.mark.parametrize("words", ["./mine --lr 3", "accelerate launch x.py", "--what 3", "-m", "\u0000"])
def test_words_of_an_unknown_program_are_refused(tmp_path: Path, words: str) -> None:
    """What stands behind -- and means nothing to a trainer is refused by name, beside any file and without one."""
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 64}', encoding="utf-8")
    for line in (["import", str(file)], ["import"], ["train", "gpt2", "--on", "8xh100", "--from", str(file)]):
        done = run(line[0], "--json", *line[1:], "--", *words.split(" "))
        assert done.status == 2
        assert done.fields


@pytest.mark.parametrize("words", [("--targets", "q,,v", "--adapter", "lora"), ("--offload", "activations,,optimizer")])
def test_a_list_that_is_badly_written_is_not_told_to_be_several_values(words: tuple[str, ...]) -> None:
    """A flag that takes a list takes several: what is wrong is the comma."""
    done = run("train", "llama-3.1-8b", "--on", "8xh100", *words)
    assert done.status == 2 and "words with commas between them" in done.err and "--vary" not in done.err


def test_what_overrides_devices_needs_some() -> None:
    """A count without devices takes no fact of any, right or wrong, and says so of each."""
    done = run("count", "gpt2", "--memory", "nan", "--price", "2")
    assert done.status == 2
    assert "memory = 'nan': is of devices, and none are named; add --on, or leave it out" in done.err
    assert "price = '2': is of devices" in done.err
    assert run("train", "gpt2", "--price", "2").err.count("\n") == 1


def test_explain_takes_no_flags_of_the_other_kind() -> None:
    """A number of training is not asked beside formats of serving, nor one of serving beside batches."""
    words = "explain", "llama-3.1-8b", "--on", "8xh100", "--depth", "1"
    for flags, said in (
        (("--what", "step", "--weights", "nope"), "weights: is of serving, and step is a number of training"),
        (("--what", "tpot", "--optimizer", "lion"), "optimizer: is of training, and tpot is a number of serving"),
    ):
        done = run(*words, *flags)
        assert done.status == 2 and said in done.err and "; leave it out, or ask for --what " in done.err
    assert run(*words, "--batch", "4", "--weights", "fp8").out.startswith("REQUEST")
    assert run(*words, "--global-batch", "8").out.startswith("STEP")


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_word_and_the_flag_of_its_place_are_two_values(command: str) -> None:
    """Of a model that is named by a word and by a flag none is chosen silently."""
    sides = ("--a", "", "--b", "--micro-batch 2") if command == "compare" else ()
    done = run(command, "gpt2", "--model", "gpt2-xl", "--on", "1xh100", *sides)
    assert done.status == 2 and "model = 'gpt2-xl': is given twice, first as gpt2; give one value" in done.err


def test_what_a_file_holds_moves_no_cursor(tmp_path: Path) -> None:
    """Control characters of a file that is named in an error are escaped, whatever it is taken for."""
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\x1b[2Ja,\x07b\n1,2\n")
    err = run("serve", "gpt2", "--on", "1xh100", "--trace", str(path)).err
    assert "\\x1b[2Ja" in err and all(c.isprintable() or c == "\n" for c in err)


@pytest.mark.parametrize("flag", ["--input-tokens=5", "--output-tokens=5", "--prefix-tokens=5", "--arrivals=constant"])
def test_what_a_trace_says_is_not_said_twice(flag: str, tmp_path: Path) -> None:
    """Lengths, prefixes and gaps beside a trace would be ignored."""
    path = tmp_path / "trace.csv"
    path.write_text("arrival_seconds,input_tokens,output_tokens\n0,10,4\n5,10,4\n")
    words = ("serve", "gpt2", "--on", "1xh100", "--trace", str(path), "--json")
    assert run(*words).status == 0
    assert run(*words, flag).fields == [flag[2:].partition("=")[0].replace("-", "_")]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("plan train llama-3.1-8b --on 8xh100", "global_batch: is needed: plans are compared for the same batch"),
        ("plan train llama-3.1-8b --on 8xh100 --adapter lora --tp 2", "global_batch: is needed: plans are compared"),
        (
            "train llama-3.1-8b --on 8xh100 --global-batch 8 --checkpoint 30s --failures-per-device-hour 1e-5",
            "checkpoint_interval: is needed with failures",
        ),
        (
            "plan train llama-3.1-8b --on 8xh100,8xa100 --global-batch 8 --checkpoint 30s",
            "checkpoint_interval: is needed with the seconds of a checkpoint",
        ),
        (
            "infer llama-3.1-8b --on h100 --speculative-method draft_model --acceptance-rate 0.7 "
            "--num-speculative-tokens 3",
            "draft_model: is missing",
        ),
        (
            "infer llama-3.1-8b --on h100 --speculative-method ngram --acceptance-rate 0.7",
            "num_speculative_tokens: must be a whole number",
        ),
    ],
)
def test_what_is_missing_has_no_value_and_is_asked_for_once(words: str, line: str) -> None:
    """A field that nobody gave is named without the zero that stands in for it, on one line."""
    done = run(*words.split())
    assert done.status == 2 and done.err.startswith(f"error: {line}")
    assert done.err.count("error: ") == 1


@pytest.mark.parametrize(
    ("engine", "flags", "words"),
    [
        ("sglang", "--tp 16 --dp 16 --ep 16", "--tp 1 --dp 16 --ep 16"),
        ("sglang", "--tp 16 --dp 8", "--tp 2 --dp 8 --etp 16"),
        ("tensorrt-llm", "--tp 16 --dp 16", "--tp 1 --dp 16 --etp 16"),
    ],
)
def test_groups_of_attention_within_tp_are_said_as_here(engine: str, flags: str, words: str) -> None:
    """Where tp and dp are an engine's own, of which dp lies within tp, the error says the same layout; it runs."""
    asked = f"infer deepseek-v3 --on 16xh200 --engine {engine} --input-tokens 64 --output-tokens 8".split()
    done = run(*asked, *flags.split())
    assert done.status == 2 and done.err.strip().endswith(f"counts within tp, is {words}")
    assert run(*asked, *words.split()).status == 0
    assert "attention data" not in run(*asked, "--engine", "vllm", "--tp", "16", "--dp", "16").err
    assert "did you mean --dp" in run(*asked, "--enable-dp-attention").err


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("1e5", "must be in digits alone; write 100000"),
        ("32k", "must be in digits alone; write 32000, or 32768 for 32 * 1024"),
        ("8.0", "must be in digits alone; write 8"),
        ("1e12", "must be at most 1,000,000,000"),
        ("1.5", "must be a whole number of at least 1; write a number such as 8"),
    ],
)
def test_a_whole_number_in_other_words_is_told_its_digits(value: str, words: str) -> None:
    """An exponent, a suffix or a point is no digit: the number that was meant is told, and what is too many is."""
    done = run("serve", "gpt2", "--on", "1xh100", "--users", value)
    assert done.status == 2 and f"users = '{value}': {words}" in done.err


@pytest.mark.parametrize("words", ["plan serve gpt2 --on h100 --rate 1", "export vllm gpt2 --on h100"])
def test_an_unknown_flag_names_the_help_of_its_kind(words: str) -> None:
    """Kinds of a command have flags of their own, which the help of another kind does not list."""
    done, kind = run(*shlex.split(words), "--bogus", "3"), " ".join(words.split()[:2])
    assert done.status == 2 and f"is not a flag of {kind}; `shardwise {kind} --help` lists them" in done.err
    assert run(*shlex.split(words)[:2], "--help").out.startswith(f"shardwise {kind} MODEL [flags]")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            f"{T} --price '\u20ac3/h'",
            "price = '\u20ac3/h': is not a number with a unit; write US dollars per device and hour",
        ),
        (f"{T} --price 1e400", "price = '1e400': must be finite; write US dollars per device and hour, such as 2.5"),
        (
            "serve qwen3-8b --on h100 --rate \u00bd",
            "rate = '\u00bd': is not a number with a unit; write for example \"50/s\"",
        ),
    ],
)
def test_what_is_no_number_is_told_what_its_own_field_takes(words: str, said: str) -> None:
    """A price is not asked for in billions, nor a rate in tokens."""
    done = run(*shlex.split(words))
    assert done.status == 2 and said in done.err and "300B" not in done.err
