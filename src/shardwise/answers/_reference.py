"""What the table of flags says to other programs: a JSON schema of case files, completion, a page of flags."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from shardwise.answers import _commands
from shardwise.answers._answer import Answer
from shardwise.answers._flags import Command, Flag
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import Page

DRAFT = "https://json-schema.org/draft/2020-12/schema"
SHELLS = ("bash", "zsh", "fish")


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise schema` and of `shardwise completion`, printed as the file that it is."""
    if inputs.command == "completion" and "shell" not in inputs.values | dict.fromkeys(inputs.bad):
        inputs.fail("shell", None, "is missing", "use one of " + ", ".join(SHELLS))
    inputs.problems.raise_if_any()
    if inputs.command == "completion":
        shell = inputs.values["shell"]
        return _printed(_SCRIPTS[shell](), {"shell": shell, "script": _SCRIPTS[shell]()})
    found = schema()
    return _printed(json.dumps(found, indent=2), found)


def _printed(text: str, tree: dict[str, Any]) -> Answer:
    def page() -> Page:
        made = Page(1000)
        for line in text.splitlines():
            made.add((line, ""))
        return made

    return Answer(0, lambda: tree, page)


def schema() -> dict[str, Any]:
    """Return the JSON schema of case files: every key of every command, with its type, limits and meaning."""
    cases = {name: c for name, c in _commands.every().items() if "config" in c.flags}
    keys: dict[str, Any] = {"command": {"enum": sorted({c.name for c in cases.values()})}}
    for name, command in cases.items():
        for key, flag in command.flags.items():
            if key not in ("help", "config", "save"):
                own = {"description": flag.help, **flag.kind.schema}
                kept = keys.setdefault(key, own)
                if {k: v for k, v in kept.items() if k != "description"} != flag.kind.schema and name != "command":
                    keys[key] = _either(kept, own)
    return {
        "$schema": DRAFT,
        "title": "shardwise case",
        "type": "object",
        "properties": dict(sorted(keys.items())),
        "patternProperties": {"-": True},
        "additionalProperties": False,
    }


def _either(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a key that commands read differently, such as a degree of a plan and degrees to search."""
    options = [{k: v for k, v in each.items() if k != "description"} for each in (*one.get("anyOf", (one,)), other)]
    return {"description": one["description"], "anyOf": [o for i, o in enumerate(options) if o not in options[:i]]}


def _words(flag: Flag) -> list[str]:
    """Return the words that the value of a flag may be, none where it is free."""
    if flag.key == "on":
        from shardwise.hardware import device_names

        return list(device_names())
    if flag.key in ("model", "first"):
        from shardwise.models import model_names

        return list(model_names())
    # Behind the choices may stand other ways to write them: {a,b}|A..B|A,B,...
    return flag.kind.word[1:].partition("}")[0].split(",") if flag.kind.word.startswith("{") else []


def _options(command: Command) -> list[Flag]:
    return [flag for flag in command.flags.values() if flag.group != "positional"]


def _positional(command: Command) -> list[str]:
    return [word for key in command.positionals for word in _words(command.flags[key])]


def _choices() -> Iterator[tuple[str, list[str]]]:
    """Yield every flag of any command whose values are words, each once."""
    seen: dict[str, list[str]] = {}
    for command in _commands.every().values():
        for flag in _options(command):
            seen.setdefault(flag.option, _words(flag))
    yield from ((option, words) for option, words in seen.items() if words)


def _list(words: Iterable[str]) -> str:
    return " ".join(words)


def _bash() -> str:
    """Return the completion of bash; a number of devices before a device, such as 8x, is kept."""
    flags = "\n".join(
        f'    {c.name}) words="{_list([*(f.option for f in _options(c)), *_positional(c)])}" ;;'
        for c in (_commands.command(name) for name in _commands.NAMES)
    )
    values = "\n".join(f'    {option}) words="{_list(words)}" ;;' for option, words in _choices())
    return f"""# Completion of shardwise for bash: source <(shardwise completion bash)
_shardwise() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" words="" command="" word prefix=""
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case " {_list(_commands.NAMES)} " in *" $word "*) command="$word"; break ;; esac
  done
  case "$prev" in
{values}
    *) case "$command" in
{flags}
    *) words="{_list(_commands.NAMES)} --help --version" ;;
    esac ;;
  esac
  if [[ "$cur" =~ ^([0-9]+x)+ ]]; then prefix="${{BASH_REMATCH[0]}}"; fi
  COMPREPLY=($(compgen -P "$prefix" -W "$words" -- "${{cur#"$prefix"}}"))
}}
complete -o default -F _shardwise shardwise"""


def _zsh() -> str:
    """Return the completion of zsh: that of bash, through the function that zsh has for it."""
    return "#compdef shardwise\nautoload -U +X bashcompinit && bashcompinit\n" + _bash()


def _fish() -> str:
    """Return the completion of fish."""
    lines = ["# Completion of shardwise for fish: shardwise completion fish | source", "complete -c shardwise -f"]
    for name in _commands.NAMES:
        said = _quoted(_commands.SUMMARIES[name])
        lines.append(f"complete -c shardwise -n __fish_use_subcommand -a {name} -d {said}")
        command = _commands.command(name)
        inside = f"complete -c shardwise -n '__fish_seen_subcommand_from {name}'"
        if words := _positional(command):
            lines.append(f"{inside} -a '{_list(words)}'")
        for flag in _options(command):
            takes = "" if flag.kind.switch else f" -x -a '{_list(_words(flag))}'" if _words(flag) else " -r"
            lines.append(f"{inside} -l {flag.option[2:]}{takes} -d {_quoted(flag.help)}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}


def flags_page() -> str:
    """Return the tables of docs/flags.md: every flag once, by group, with the commands that take it."""
    groups: dict[str, dict[tuple[str, str], tuple[Flag, list[str]]]] = {}
    for name, command in _commands.every().items():
        for flag in _options(command):
            rows = groups.setdefault(flag.group, {})
            rows.setdefault((flag.option, flag.help), (flag, []))[1].append(name)
    titles = _commands.GROUPS
    order = [*(g for g in titles if g in groups), *(g for g in groups if g not in titles)]
    return "\n".join(_section(titles.get(group, group), groups[group].values()) for group in order)


def _section(title: str, rows: Iterable[tuple[Flag, list[str]]]) -> str:
    lines = [f"## {title[:1].upper()}{title[1:]}", "", "| flag | value | meaning | of |", "|---|---|---|---|"]
    for flag, names in rows:
        value = textwrap.shorten(flag.kind.word.strip("{}").replace(",", ", "), 90, placeholder=" ...")
        of = "all" if len(names) > 10 else ", ".join(names)
        lines.append(f"| `{flag.option}` | {value.replace('|', ' or ')} | {flag.help.replace('|', ' or ')} | {of} |")
    return "\n".join([*lines, ""])
