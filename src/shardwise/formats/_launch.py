"""Finding the training program in a launch script, how many devices it is launched on, and its arguments.

Launchers: torchrun and torch.distributed (pytorch.org/docs/stable/elastic/run.html), DeepSpeed's, srun, mpirun.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from shardwise.errors import InputError, Problem, Problems
from shardwise.records import dataclass
from shardwise.shell import Budget, Shell, commands_of, flat, whole_of

# Spellings of how many processes run on a node, how many nodes there are, and how many processes in all.
_EACH = ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--ntasks-per-node", "--gpus-per-node", "--npernode")
_NODES = ("--nnodes", "--num_nodes", "--nodes", "-N")
_TAKES = (
    *("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "rdzv_id", "rdzv_backend", "num_gpus"),
    *("rdzv_endpoint", "rdzv_conf", "max_restarts", "monitor_interval", "start_method", "log_dir", "redirects", "tee"),
    *("local_addr", "local_ranks_filter", "num_nodes", "hostfile", "num_processes", "role", "config_file"),
)
LAUNCHER = frozenset(f"--{name.replace('_', mark)}" for name in _TAKES for mark in ("_", "-"))
"""Options of torchrun and DeepSpeed's launcher that take a value."""
_SAYS = ("echo", "printf")
_FILE_FLAGS = ("--config", "--config-file", "--job.config_file", "train")
_ENDS = (";", "&&", "||", "|", "&")
# Variables that say the same where no option does.
_EACH_VARIABLES = ("GPUS_PER_NODE", "NUM_GPUS_PER_NODE", "NPROC_PER_NODE", "SLURM_GPUS_PER_NODE")
_NODES_VARIABLES = ("NNODES", "NUM_NODES", "N_NODES", "SLURM_NNODES", "PET_NNODES")
_SRUN_VARIABLE = "SLURM_NTASKS_PER_NODE"
_CONFIG = ("--config_file", "--config-file")
_ALL = ("-np", "--np", "-n", "--ntasks", "--num_processes")
# What launchers take beside a whole number: all that are there, ranges, and what the script's environment would say.
_OPEN = re.compile(r"(-1|[0-9]+-[0-9]+|gpu|cpu|xpu|auto)?|.*[$`].*", re.ASCII | re.DOTALL)


REMEDY = "give a file of a system that is read (docs/formats.md), or say it in flags"
"""What to do where a file is of no system that is read."""
_TORCHTUNE = r"(?m)\A(?=[\s\S]*_component_: torchtune\.)[\s\S]*^"
# Words of systems whose files are known when they are seen, and not read.
_UNREAD = (
    (r"\bnemo_automodel\b|\bautomodel\s+(finetune|pretrain)\b", "NeMo Automodel"),
    (r"\bswift\s+(infer|deploy|rollout|eval|export|app|sample)\b|\bmegatron\s+export\b", "ms-swift"),
    (r"\blitgpt\b", "LitGPT"), (r"\bopenrlhf\.cli\.(?!train_(sft|dpo|rm|ppo_ray)\b)", "OpenRLHF"),
    (r"\bnemo_rl\b|\brun_grpo\w*\.py", "NeMo-RL"),
    (r"(?m)^(kernel_config|dist_config):", "LLaMA-Factory's v1 trainer"),
    (_TORCHTUNE + r"(\w+_model|valuemodel|grpo_samples|orchestration):", "torchtune's PPO or GRPO"),
    (_TORCHTUNE + r"(tasks|max_new_tokens):", "torchtune's evaluation or generation"),
    (r"--actor_model_name_or_path", "DeepSpeed-Chat's reinforcement learning"),
    (r"\blmdeploy\s+serve\b", "LMDeploy"), (r"\btext-generation-launcher\b", "TGI"),
    (r"\batom\.entrypoints\b", "ATOM"), (r"\bollama\s+(serve|run)\b|\bOLLAMA_", "Ollama"),
    (r"\bcolossalai\s+run\b", "ColossalAI"), (r"\bmlx_lm\b", "MLX LM"),
    (r"(?m)^(fine_tune_type|lora_parameters|grad_checkpoint):", "MLX LM"),
    # open_instruct/finetune.py takes transformers' words in their meaning; what names them in YAML may be DPO's.
    (r"\bopen_instruct[./](?!finetune\b)\w+", "Open Instruct"),
    (r"(?m)^(with_tracking|checkpointing_steps|dataset_mixer(_list)?):", "Open Instruct"),
    (r"\bprimus(-cli|/cli/main\.py)\b", "Primus' launcher, beside the YAML of its experiment"),
    (r"\bstart_\w+_pipeline\.py\b", "ROLL's launcher, beside the YAML of its pipeline"),
    (r"(?ms)^resources:\s*$.*^run:\s*\|", "SkyPilot"),
    (r"(?m)^[\s{]*[\"']?(pipe[_-]parallel[_-]size|scaled[_-]upper[_-]triang\w*|gpt[_-]j[_-]residual)\b", "GPT-NeoX"),
    (r"(?m)^(train_loader|device_train_microbatch_size):", "llm-foundry"),
)  # fmt: skip


def unread(text: str) -> str:
    """Return the system, among those that are not read, whose words a text has; empty for none.

    >>> unread("CUDA_VISIBLE_DEVICES=0 swift infer --model Qwen/Qwen3-8B"), unread("python train.py")
    ('ms-swift', '')
    """
    return next((name for words, name in _UNREAD if re.search(words, text)), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What stands around the arguments: devices (0 where it is not said), the program, and the file's name.

    `follow` lets arguments name files that are not below that file; `config_file` is the launcher's own (accelerate).
    """

    num_devices: int = 0
    devices_per_node: int = 0
    program: str = ""
    source: str = ""
    follow: bool = True
    config_file: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """A program that a script starts: its arguments, how it is launched, and what the script leaves open."""

    arguments: tuple[str, ...]
    launch: Launch
    notes: tuple[str, ...]


def started(text: str, known: Callable[[str], bool], source: str, variables: Mapping[str, str]) -> Started:
    """Return the program of a script whose arguments are `known`; raises `InputError` where there is none.

    >>> one = started("torchrun --nproc_per_node 8 a.py --lr 1", lambda word: word == "--lr", "run.sh", {})
    >>> one.arguments, one.launch.num_devices, one.launch.program
    (('--lr', '1'), 8, 'a.py')
    """
    shell = commands_of(text, variables, Budget(source))
    _check_variables(text, shell, source, variables)
    launches = _known_commands(shell, known)
    if not launches:
        other = unread(text)
        rule = f"is of {other}, which is not read" if other else "starts no program with arguments that are known"
        raise InputError([Problem("file", source, rule, REMEDY)])
    launches = [words for words in launches if not _begins_unread(words, known)] or launches
    if other := _begins_unread(launches[0], known):
        raise InputError([Problem("file", source, f"is of {other}, which is not read", REMEDY)])
    if len({tuple(words) for words in launches}) > 1:
        shell.note(f"the first of {len(launches)} programs that the script starts")
    return _started(launches[0], shell, known, source)


def _begins_unread(words: Sequence[str], known: Callable[[str], bool]) -> str:
    """Return the system that is not read whose program a command starts, by what stands before its arguments."""
    return unread(" ".join(words[: next(i for i, word in enumerate(words) if known(_name(word)))]))


@dataclass(frozen=True, slots=True)
class Named:
    """A trainer that a script starts with a file of settings: the file, the words behind it, and how it is launched."""

    file: str
    words: tuple[str, ...]
    launch: Launch
    notes: tuple[str, ...]


def named_file(text: str, starts: str, source: str, variables: Mapping[str, str]) -> Named | None:
    """Return the file of settings with which a script starts a trainer, by what its command matches; None without.

    >>> one = named_file("torchrun --nproc_per_node 8 -m axolotl.cli.train a.yml --lr 1", "axolotl.cli", "run.sh", {})
    >>> one.file, one.words, one.launch.num_devices
    ('a.yml', ('--lr', '1'), 8)
    """
    shell = commands_of(text, variables, Budget(source))
    named = _named_within(shell, starts, source)
    if named is not None:
        _check_variables(text, shell, source, variables)
    return named


def _named_within(shell: Shell, starts: str, source: str) -> Named | None:
    """Return the trainer that a shell's commands start with a file, or one within what they hand to another shell."""
    for words in map(flat, shell.commands):
        pairs = (" ".join(words[max(i - 1, 0) : i + 1]) for i in range(len(words)))
        begins = next((i for i, pair in enumerate(pairs) if re.search(starts, pair)), len(words))
        files = [i for i, word in enumerate(words) if i > begins and word.endswith((".yaml", ".yml", ".toml"))]
        if files and words[0] not in _SAYS:
            return _named(words, (begins, files[0]), shell, source)
    scripts = [after for words in shell.commands for word, after in pairwise(words) if word in ("-c", "-lc")]
    inner = (_named_within(commands_of(one, shell.variables, shell.budget), starts, source) for one in scripts)
    return next((one for one in inner if one is not None), None)


def _named(words: Sequence[str], at: tuple[int, int], shell: Shell, source: str) -> Named:
    """Return what a command says around a file: words of the launcher stand before it, or behind two dashes."""
    begins, file = at
    end = next((i for i, word in enumerate(words) if i > file and word in _ENDS), len(words))
    behind = list(words[file + 1 : end])
    dashes = behind.index("--") if "--" in behind else len(behind)
    own, between = _split([word for word in words[begins + 1 : file] if word not in _FILE_FLAGS])
    rest = [word for word in (*between, *behind[:dashes]) if word not in _FILE_FLAGS]
    launch = _launch([*words[:begins], *own, *behind[dashes:]], shell, source, words[begins])
    return Named(words[file], tuple(rest), launch, tuple(shell.notes))


def _check_variables(text: str, shell: Shell, source: str, variables: Mapping[str, str]) -> None:
    """Raise `InputError` for what a caller sets in vain, and for numbers of devices that are none."""
    problems = Problems()
    launch = {*_EACH_VARIABLES, *_NODES_VARIABLES, _SRUN_VARIABLE}
    code = re.sub(r"(?m)(^|\s)#.*$", "", text)
    for name, value in variables.items():
        setting = f"{name}={value}"
        first = re.search(rf"\b{re.escape(name)}\b(.*)", code)
        if first is None and name not in launch and not name.isdigit():
            # Numbers are the words behind a script, which a caller gives together.
            problems.add("set", setting, f"sets a variable that {source} does not use", "leave it out")
        elif first and first[1].startswith("=") and name not in first[1] and shell.value(name) != value:
            rule = f"has no effect: {source} sets {name} itself, to {shell.value(name)}"
            problems.add("set", setting, rule, f"change {source}")
        elif name in launch and whole_of(value) is None:
            problems.add("set", setting, f"{name} must be a whole number", f"for example --set {name}=4")
    problems.raise_if_any()


def started_by(words: Sequence[str], known: Callable[[str], bool]) -> Started:
    """Return the program of a command line, or the arguments where they stand alone or behind a launcher's own.

    >>> one = started_by(["--nproc_per_node", "8", "--lr", "1"], lambda word: word == "--lr")
    >>> one.arguments, one.launch.num_devices
    (('--lr', '1'), 8)
    """
    words = flat(words)
    if not any(known(_name(word)) for word in words):
        rule = "holds no argument that is known"
        raise InputError([Problem("arguments", " ".join(words)[:60], rule, "give the training's arguments behind --")])
    return _started(words, Shell(), known, "arguments")


def _started(words: Sequence[str], shell: Shell, known: Callable[[str], bool], source: str) -> Started:
    at = _program(words, known)
    before, rest = (words[:at], words[at + 1 :]) if at >= 0 else _split(words)
    launch = _launch(before, shell, source, words[at] if at >= 0 else "")
    arguments: list[str] = []
    for word in rest:
        if word in _ENDS:
            break
        alone = re.fullmatch(r"\$\{(\w+)\}", word)
        if alone and not (arguments and arguments[-1].startswith("--")):
            shell.note(f"${alone[1]} of the script is not set: nothing stands in its place")
        else:
            arguments.append(word)
    return Started(tuple(arguments), launch, tuple(shell.notes))


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the launcher's options and the others, where no program stands between them."""
    before: list[str] = []
    rest: list[str] = []
    launching = False
    for word in words:
        if word.startswith("--"):
            launching = _name(word) in LAUNCHER
        (before if launching else rest).append(word)
    return before, rest


def _known_commands(shell: Shell, known: Callable[[str], bool]) -> list[list[str]]:
    """Return the commands with arguments that are known: those run, those of here-documents, or a variable's words."""
    ways: tuple[Callable[[], Iterable[list[str]]], ...] = (
        lambda: shell.commands,
        lambda: [words for document in shell.documents for words in shell.inside(document)],
        lambda: sorted([*map(str.split, shell.variables.values()), *shell.arrays.values()], key=len, reverse=True)[:1],
    )
    for way in ways:
        commands = [
            words for words in map(flat, way()) if any(known(_name(w)) for w in words) and words[0] not in _SAYS
        ]
        if commands:
            return commands
    return []


def _name(word: str) -> str:
    return word.partition("=")[0]


_LAUNCHES = re.compile(r"python|torchrun|accelerate|deepspeed|^-m$")


def _program(words: Sequence[str], known: Callable[[str], bool]) -> int:
    """Return the place of the program: the last Python file or module before the first argument that is known.

    It is -1 where arguments stand alone.
    """
    first = next(i for i, word in enumerate(words) if known(_name(word)))
    if words[0].startswith("--"):
        return -1
    files = [i for i, word in enumerate(words[:first]) if word.endswith(".py") or _is_module(words, i)]
    return files[-1] if files else first - 1


def _is_module(words: Sequence[str], at: int) -> bool:
    """Return whether a word is a module that Python or a launcher of it is told to run, not a launcher's own.

    >>> words = "python -m torch.distributed.run --nproc_per_node 8 -m mine.train --deepspeed ds.json".split()
    >>> [word for i, word in enumerate(words) if _is_module(words, i)]
    ['mine.train']
    """
    if at < 2 or words[at - 1] not in ("-m", "--module") or words[at].startswith(("torch.distributed.", "accelerate.")):
        return False
    return any(_LAUNCHES.search(word) for word in words[: at - 1])


def _launch(words: Sequence[str], shell: Shell, source: str, program: str) -> Launch:
    """Return the devices that the words before the program ask for, or else the script's own variables."""
    _check_counts(words)
    each, nodes, everything = (_asked(words, names) for names in (_EACH, _NODES, _ALL))
    each = each or _variable(shell, *_EACH_VARIABLES)
    nodes = nodes or _variable(shell, *_NODES_VARIABLES)
    if any("torchrun" in w or "torch.distributed" in w or _name(w) in LAUNCHER for w in words) and each and not nodes:
        nodes = 0 if _asked_at_all(words, _NODES) else 1
    if not each and any(word == "srun" for word in words):
        each = _variable(shell, _SRUN_VARIABLE)
    listed = next((after for word, after in pairwise(words) if word == "--include"), "")
    if not each and (slots := re.fullmatch(r"localhost:(\d+(?:,\d+)*)", listed)):
        each, nodes = len(slots[1].split(",")), 1
    total = each * nodes or everything or (each if _starts_on_one(words) else 0)
    config = next((after for word, after in pairwise(words) if word in _CONFIG), "")
    return Launch(num_devices=total, devices_per_node=each, program=program, source=source, config_file=config)


def _starts_on_one(words: Sequence[str]) -> bool:
    return not _asked_at_all(words, _NODES) and any(
        word.rpartition("/")[2] in ("deepspeed", "torchrun") for word in words
    )


def _asked_at_all(words: Sequence[str], names: Sequence[str]) -> bool:
    return any(_name(word) in names for word in words)


def _asked(words: Sequence[str], names: Sequence[str]) -> int:
    """Return the last number that one of the spellings is given; ranges of nodes count as their most."""
    count = 0
    for _, text in _values(words, names):
        count = whole_of(text) or (0 if whole_of(text) == 0 else count)
    return count


def _values(words: Sequence[str], names: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Yield (spelling, value) of options, of ranges and typed counts what stands last."""
    for word, after in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name in names:
            yield name, (value if equals else after).rpartition(":")[2]


def _check_counts(words: Sequence[str]) -> None:
    """Raise `InputError` for counts that no launcher takes."""
    problems = Problems()
    for name, text in _values(words, [name for name in (*_EACH, *_NODES) if name.startswith("--")]):
        if whole_of(text) is None and not _OPEN.fullmatch(text):
            problems.add(name, text, "must be a whole number", f"write for example {name} 8")
    problems.raise_if_any()


def _variable(shell: Shell, *names: str) -> int:
    values = (shell.value(name) or "" for name in names)
    return next((number for value in values if (number := whole_of(value)) is not None), 0)


def commands_in(text: str, source: str, variables: Mapping[str, str]) -> tuple[list[list[str]], tuple[str, ...]]:
    """Return the commands of a script, those of its here-documents too, and the texts of these."""
    shell = commands_of(text, variables, Budget(source))
    inner = [words for document in shell.documents for words in shell.inside(document)]
    return [*shell.commands, *inner], tuple(shell.expand(document) for document in shell.documents)


def words_behind(starts: str, commands: Sequence[list[str]]) -> list[list[str]]:
    """Return the words behind each start of an engine's command, of other commands nothing."""
    end = re.compile(starts + r"$")
    launches = []
    for words in commands:
        # The words that match are dropped; what a launcher such as srun says stands before them.
        tries = (one for one in range(1, min(len(words), 40) + 1) if end.search(" ".join(words[:one])))
        launches += [words[one:] for one in tries][:1]
    return launches
