"""Help, from the table of flags."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from shardwise.answers import _commands
from shardwise.answers._answer import Answer
from shardwise.answers._flags import Command, Flag

if TYPE_CHECKING:
    from shardwise.answers._page import Page

_GROUPS = {
    "positional": "what",
    "where": "where",
    "plan": "plan",
    "job": "job",
    "sides": "the two sides",
    "number": "number",
    "shape": "shape",
    "settings": "what the framework keeps and sets aside",
    "efficiency": "what the machine reaches",
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
        for name in _commands.NAMES:
            _line(made, f"shardwise {name}", _commands.SUMMARIES[name], 20)
        made.blank()
        made.add(("Every command takes --json and --help; cases are read with --config FILE.", ""))
        made.add((_commands.COMMON, "dim"))
        return made

    def tree() -> Any:
        return {"commands": dict(_commands.SUMMARIES)}

    return Answer(status, tree, page)


def _line(page: Page, left: str, text: str, column: int = _LEFT) -> None:
    """Append a flag and its help, the help wrapped in its own column."""
    pieces = textwrap.wrap(text, page.width - column - 2, break_long_words=False, break_on_hyphens=False)
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
        return f"{flag.option} WORD", f"{flag.help}: {flag.kind.word[1:-1].replace(',', ', ')}"
    short = f"{flag.short}, " if flag.short else ""
    return f"{short}{flag.option} {flag.kind.word}".rstrip(), flag.help


def help_of(command: Command, width: int = 80) -> Answer:
    """Return the help of one command."""

    def page() -> Page:
        from shardwise.answers._page import Page

        made = Page(width)
        made.add((f"shardwise {command.name} {' '.join(p.upper() for p in command.positionals)} [flags]", "bold"))
        made.add((command.help, ""))
        others = dict.fromkeys(f.group for f in command.flags.values())
        for group, title in (_GROUPS | {name: name for name in others if name not in _GROUPS}).items():
            flags = [f for f in command.flags.values() if f.group == group]
            if flags:
                made.blank()
                made.add((title, "bold"))
            for f in flags:
                _line(made, *_usage(f))
        made.blank()
        made.add((command.exits, "dim"))
        return made

    def tree() -> Any:
        flags = {f.key: {"flag": f.option, "help": f.help, "group": f.group} for f in command.flags.values()}
        return {"command": command.name, "flags": flags}

    return Answer(0, tree, page)
