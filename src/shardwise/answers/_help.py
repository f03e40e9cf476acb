"""What `shardwise` alone and `--help` print: commands, flags in groups, and examples to copy."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Any

from shardwise.answers._answer import Answer
from shardwise.answers._commands import COMMON, NAMES, SUMMARIES
from shardwise.answers._flags import Command, Flag

if TYPE_CHECKING:
    from shardwise.answers._page import Page

# What people ask first of each command; each runs as it stands, but for those that name a file of the user's.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "train": (
        "llama-3.1-8b --on rtx-4090 --qlora",
        "llama-3.1-70b --on 64xh100 --tp 8 --pp 4 --global-batch 256 --tokens 1T",
        "qwen3-32b --qlora --on rtx-4090,l40s,h100",
    ),
    "infer": (
        "llama-3.1-70b --on 4xh100 --tp 4 --batch 32 --input-tokens 2000 --output-tokens 500",
        "qwen3-32b --on rtx-4090 --weights int4 --solve input_tokens",
        "qwen3-30b-a3b --on m3-max --weights q4_k_m",
    ),
    "serve": (
        "llama-3.1-8b --on h100 --rate 8/s --input-tokens 1000 --output-tokens 200 --p99-ttft 1s",
        "gpt-oss-120b --on 2xh100 --tp 2 --users 100 --think 10s",
    ),
    "count": ("llama-3.1-8b --tokens 15T", "-l 32 -hs 4096 -a 32 -v 128256"),
    "comm": ("llama-3.1-70b --on 64xh100 --tp 8 --pp 4 --global-batch 256",),
    "explain": ("llama-3.1-8b --on 8xh100 --sharding fsdp --what memory --depth 3",),
    "plan": (
        "train llama-3.1-70b --on 64xh100 --global-batch 256 --tokens 1T",
        "train llama-3.1-8b --on rtx-4090 --qlora",
        "serve qwen3-32b --on h100,l40s --rate 5/s --p99-ttft 2s --p99-tpot 50ms",
    ),
    "plan train": (
        "llama-3.1-70b --on 64xh100 --global-batch 256 --tokens 1T",
        "llama-3.1-8b --on rtx-4090 --qlora",
    ),
    "plan infer": ("llama-3.1-70b --on 8xh100 --input-tokens 2000 --output-tokens 500 --max-tpot 30ms",),
    "plan serve": ("qwen3-32b --on h100,l40s --rate 5/s --p99-ttft 2s --p99-tpot 50ms",),
    "sweep": ("STUDY.toml --out FOLDER",),
    "compare": ('llama-3.1-70b --on 64xh100 --tp 8 --global-batch 256 --a "--pp 4" --b "--pp 8"',),
    "roofline": ("llama-3.1-8b --on h100 --batch 16",),
    "import": ("pretrain.sh",),
    "export": (
        "vllm llama-3.1-70b --on 8xh100 --tp 4 --rate 5/s --weights fp8",
        "megatron llama-3.1-8b --on 8xh100 --tp 2 --sharding distributed-optimizer --global-batch 64",
    ),
    "validate": ("runs.csv --rows predictions.csv",),
    "measure": ("--out mine --name cpu-lab",),
    "models": ("qwen3",),
    "devices": ("h100",),
    "dtypes": ("fp8",),
    "stacks": ("torchtitan",),
    "completion": ("bash",),
}
FIRST = {
    "does it fit on my card, and how fast is it": "train llama-3.1-8b --on rtx-4090 --qlora",
    "which card do I need": "infer qwen3-32b --weights int4 --on rtx-3090,rtx-5090,l40s",
    "which plan is best, how long, what cost": "plan train llama-2-7b --on 64xh100 --global-batch 1024 --tokens 1T",
    "how many devices for this load": "plan serve qwen3-32b --on h100 --rate 5/s --p99-ttft 2s",
}

GROUPS = {
    "positional": "what",
    "where": "where",
    "load": "load",
    "plan": "plan",
    "job": "job",
    "space": "space",
    "search": "search",
    "pools": "pools",
    "autoscaling": "autoscaling",
    "limits": "limits",
    "sides": "the two sides",
    "number": "number",
    "many": "one question at many values",
    "shape": "shape",
    "settings": "framework settings",
    "efficiency": "achieved efficiencies",
    "cluster": "override the cluster",
    "model": "override the model, or its sizes where none is named",
    "sizes": "more sizes of a model that is not named",
    "output": "output",
}


_LEFT = 32


def overview(status: int = 0, width: int = 80) -> Answer:
    """Return what `shardwise` alone prints."""

    def page() -> Page:
        from shardwise.answers._page import Page

        made = Page(width)
        made.add(("shardwise: know before you launch", "bold"))
        made.blank()
        for name in NAMES:
            _line(made, f"shardwise {name}", SUMMARIES[name], 20)
        made.blank()
        made.add(("Every command takes --json and --help; cases are read with --config FILE.", ""))
        made.add((COMMON, "dim"))
        made.blank()
        made.add(("examples", "bold"))
        for question, words in FIRST.items():
            made.add((f"  {question}", ""))
            made.add((f"    shardwise {words}", "cyan"))
        return made

    def tree() -> Any:
        return {"commands": dict(SUMMARIES)}

    return Answer(status, tree, page)


def _line(page: Page, left: str, text: str, column: int = _LEFT) -> None:
    """Append a flag and its help, the help wrapped in its own column."""
    narrow = page.width < 80
    pieces = textwrap.wrap(text, page.width - column - 2, break_long_words=narrow, break_on_hyphens=narrow)
    if len(left) >= column:
        page.add(("  " + left, "cyan"))
        left = ""
    for piece in pieces:
        page.add((f"  {left:<{column}}", "cyan"), (piece, ""))
        left = ""


def _usage(flag: Flag) -> tuple[str, str]:
    """Return what stands on the left and on the right of a flag's line; choices stand on the right."""
    if flag.group == "positional":
        return flag.key.upper(), flag.help
    if flag.kind.word.startswith("{"):
        # Behind the choices may stand that a list of them is taken, which the help says in words.
        choices, _, lists = flag.kind.word[1:].partition("}")
        value = "A,B,..." if lists else "WORD"
        return f"{flag.option} {value}", f"{flag.help}: {choices.replace(',', ', ')}"
    short = f"{flag.short}, " if flag.short else ""
    return f"{short}{flag.option} {flag.kind.word}".rstrip(), flag.help


def _usage_words(command: Command) -> str:
    """Return a command as it is typed, with its places; the place of the kind is the kind, where one is asked for."""
    places = command.positionals[1:] if command.kind else command.positionals
    return " ".join((command.words, *(place.upper() for place in places)))


def help_of(command: Command, width: int = 80) -> Answer:
    """Return the help of one command."""

    def page() -> Page:
        from shardwise.answers._page import Page

        made = Page(width)
        made.add((f"shardwise {_usage_words(command)} [flags]", "bold"))
        for piece in textwrap.wrap(command.help, width):
            made.add((piece, ""))
        others = dict.fromkeys(f.group for f in command.flags.values())
        for group, title in (GROUPS | {name: name for name in others if name not in GROUPS}).items():
            flags = [f for f in command.flags.values() if f.group == group]
            if flags:
                made.blank()
                made.add((title, "bold"))
            for f in flags:
                _line(made, *_usage(f))
        made.blank()
        for piece in textwrap.wrap(command.exits, width):
            made.add((piece, "dim"))
        _examples(made, command)
        return made

    def tree() -> Any:
        flags = {f.key: {"flag": f.option, "help": f.help, "group": f.group} for f in command.flags.values()}
        return {"command": command.name, "flags": flags}

    return Answer(0, tree, page)


def _examples(page: Page, command: Command) -> None:
    """Append the examples of a command, at the end of its help, which is what a terminal shows of many lines."""
    from shardwise.answers._page import command_line

    asked = EXAMPLES.get(command.words, EXAMPLES.get(command.name, ()) if not command.kind else ())
    if asked:
        page.blank()
        page.add(("examples", "bold"))
    for words in asked:
        # Flags with their values stay together, and so does what is quoted.
        command_line(page, re.split(r' (?=--)(?=(?:[^"]*"[^"]*")*[^"]*$)', f"shardwise {command.words} {words}"))
