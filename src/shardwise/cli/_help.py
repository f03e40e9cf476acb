"""Help, from the table of flags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.cli import _commands
from shardwise.cli._answer import Answer
from shardwise.cli._flags import Command

if TYPE_CHECKING:
    from shardwise.report._page import Page

_GROUPS = {
    "positional": "what",
    "where": "where",
    "plan": "plan",
    "job": "job",
    "sides": "the two sides",
    "number": "number",
    "shape": "shape",
    "efficiency": "what the machine reaches",
    "cluster": "override the cluster",
    "model": "override the model",
    "output": "output",
}


def overview(status: int = 0) -> Answer:
    """Return what `shardwise` alone prints."""

    def page() -> Page:
        from shardwise.report._page import Page

        made = Page(80)
        made.add(("shardwise: know before you launch", "bold"))
        made.blank()
        made.table([[f"shardwise {name}", _commands.SUMMARIES[name]] for name in _commands.NAMES], indent=2)
        made.blank()
        made.add(("Every command takes --json, --config FILE and --help. " + _commands.COMMON, ""))
        return made

    def tree() -> Any:
        return {"commands": dict(_commands.SUMMARIES)}

    return Answer(status, tree, page)


def help_of(command: Command) -> Answer:
    """Return the help of one command."""

    def page() -> Page:
        from shardwise.report._page import Page

        made = Page(100)
        made.add((f"shardwise {command.name} {' '.join(p.upper() for p in command.positionals)} [flags]", "bold"))
        made.add((command.help, ""))
        others = dict.fromkeys(f.group for f in command.flags.values())
        for group, title in (_GROUPS | {name: name for name in others if name not in _GROUPS}).items():
            flags = [f for f in command.flags.values() if f.group == group]
            if not flags:
                continue
            made.blank()
            made.add((title, "bold"))
            for f in flags:
                left = f.key.upper() if group == "positional" else f"{f.option} {f.kind.word}".rstrip()
                made.add((f"  {left:<34}", "cyan"), (("" if len(left) < 34 else " ") + f.help, ""))
        made.blank()
        made.add((command.exits, "dim"))
        return made

    def tree() -> Any:
        return {
            "command": command.name,
            "flags": {f.key: {"flag": f.option, "help": f.help, "group": f.group} for f in command.flags.values()},
        }

    return Answer(0, tree, page)
