"""What the table of flags says to other programs: a JSON schema of case files, completion, a page of flags."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from shardwise.answers import _commands
from shardwise.answers._answer import Answer
from shardwise.answers._flags import Command, Flag
from shardwise.answers._inputs import WRITTEN, Inputs
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
    written = schema()
    return _printed(json.dumps(written, indent=2), written)


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
            if key not in (*WRITTEN, "help", "config", "follow"):
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


def _known_words() -> dict[str, Callable[[], Iterable[str]]]:
    """Return by key where the words of a flag's values are listed, for those that no table of fields has."""
    from shardwise.answers._solve import solvable
    from shardwise.hardware import device_names
    from shardwise.models import model_names
    from shardwise.plans import DTYPES, stack_names
    from shardwise.serving import cache_names, engine_names, format_names

    return {
        "on": device_names,
        "host": lambda: [name for name in device_names() if name.startswith("cpu-")],
        "model": model_names,
        "first": model_names,
        "second": model_names,
        "draft_model": model_names,
        "stack": stack_names,
        "engine": engine_names,
        "weights": format_names,
        "kv_cache": cache_names,
        "dtype": lambda: DTYPES,
        "solve": solvable,
        "vary": lambda: sorted(
            {f"{flag.key}=" for name in _commands.MANY for flag in _commands.command(name).flags.values()
             if flag.group in ("job", "plan", "load", "cluster", "where")}
        ),
    }  # fmt: skip


def _words(flag: Flag) -> list[str]:
    """Return the words that the value of a flag may be, none where it is free."""
    known = _known_words().get(flag.key)
    if known is not None:
        return list(known())
    # Behind the choices may stand other ways to write them: {a,b}|A..B|A,B,...
    return flag.kind.word[1:].partition("}")[0].split(",") if flag.kind.word.startswith("{") else []


def _options(command: Command) -> list[Flag]:
    return [flag for flag in command.flags.values() if flag.group != "positional"]


def _positional(name: str) -> list[str]:
    command = _commands.command(name)
    return [word for key in command.positionals for word in _words(command.flags[key])]


def _of(name: str) -> list[Flag]:
    """Return the flags of a command, those of every kind of its cases, each once."""
    _, kinds = _commands.KINDS.get(name, ("", ("",)))
    flags = [flag for kind in kinds for flag in _options(_commands.command(name, kind))]
    return list({flag.option: flag for flag in flags}.values())


def _choices() -> tuple[dict[str, list[str]], list[str]]:
    """Return the words of the values of the flags of all commands, and the flags whose values are free."""
    seen: dict[str, list[str]] = {}
    switches = set()
    for name in _commands.NAMES:
        for flag in _of(name):
            switches |= {flag.option} if flag.kind.switch else set()
            seen.setdefault(flag.option, _words(flag))
    return {o: words for o, words in seen.items() if words}, [o for o, w in seen.items() if not w and o not in switches]


def _list(words: Iterable[str]) -> str:
    return " ".join(words)


def _bash() -> str:
    """Return the completion of bash; what stands before a device, such as 8x or h100-nvl-80gb,8x, is kept.

    Flags are offered where a dash is typed, files where the value of a flag is free.
    """
    own = {name: (_list(f.option for f in _of(name)), _list(_positional(name))) for name in _commands.NAMES}
    flags = "\n".join(f'    {name}) flags="{flags}" words="{words}" ;;' for name, (flags, words) in own.items())
    choices, free = _choices()
    values = "\n".join(f'    {option}) words="{_list(words)}" ;;' for option, words in choices.items())
    return f"""# Completion of shardwise for bash: source <(shardwise completion bash)
_shardwise() {{
  if [[ -n "$ZSH_VERSION" ]]; then setopt local_options ksh_arrays bash_rematch; fi
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}"
  local words="" flags="" command="" word prefix=""
  for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD-1))}}"; do
    case " {_list(_commands.NAMES)} " in *" $word "*) command="$word"; break ;; esac
  done
  case "$prev" in
{values}
    {"|".join(free)}) ;;
    *) case "$command" in
{flags}
    *) words="{_list(_commands.NAMES)} --help --version" ;;
    esac ;;
  esac
  if [[ "$cur" == -* ]]; then words="${{flags:-$words}}"; fi
  if [[ "$cur" =~ ^(.*,)?([0-9]+x)* ]]; then prefix="${{BASH_REMATCH[0]}}"; fi
  COMPREPLY=($(compgen -P "$prefix" -W "$words" -- "${{cur#"$prefix"}}"))
  if [[ "$prev" == --vary ]]; then compopt -o nospace 2>/dev/null; fi
}}
complete -o default -F _shardwise shardwise"""


def _zsh() -> str:
    """Return the completion of zsh: that of bash, through the function that zsh has for it."""
    return "#compdef shardwise\nautoload -U +X bashcompinit && bashcompinit\n" + _bash()


# What stands before a device, such as 8x or h100-nvl-80gb,8x, is kept.
_FISH = """# Completion of shardwise for fish: shardwise completion fish | source
function __shardwise_on
    set -l before (string match -r '^(?:.*,)?(?:[0-9]+x)*' -- (commandline -ct))
    printf '%s\\n' "$before"(string split ' ' -- '{devices}')
end
complete -c shardwise -f"""


def _fish() -> str:
    """Return the completion of fish."""
    devices = _words(_commands.command("train").flags["on"])
    lines = [_FISH.format(devices=_list(devices))]
    for name in _commands.NAMES:
        summary = _quoted(_commands.SUMMARIES[name])
        lines.append(f"complete -c shardwise -n __fish_use_subcommand -a {name} -d {summary}")
        inside = f"complete -c shardwise -n '__fish_seen_subcommand_from {name}'"
        if words := _positional(name):
            lines.append(f"{inside} -a '{_list(words)}'")
        for flag in _of(name):
            summary = "(__shardwise_on)" if flag.key == "on" else _list(_words(flag))
            takes = "" if flag.kind.switch else f" -x -a '{summary}'" if summary else " -r -F"
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
    from shardwise.answers._help import GROUPS as titles

    order = [*(g for g in titles if g in groups), *(g for g in groups if g not in titles)]
    return "\n".join(_section(titles.get(group, group), groups[group].values()) for group in order)


def _section(title: str, rows: Iterable[tuple[Flag, list[str]]]) -> str:
    lines = [f"## {title[:1].upper()}{title[1:]}", "", "| flag | value | meaning | of |", "|---|---|---|---|"]
    for flag, names in rows:
        value = textwrap.shorten(flag.kind.word.strip("{}").replace(",", ", "), 90, placeholder=" ...")
        of = "all" if len(names) > 10 else ", ".join(names)
        lines.append(f"| `{flag.option}` | {value.replace('|', ' or ')} | {flag.help.replace('|', ' or ')} | {of} |")
    return "\n".join([*lines, ""])
