"""Print the tables of docs/json.md: the keys of every answer with --json.

They stand in docs/json_keys.toml, and what the table of fields says of a key there alone.
"""

from __future__ import annotations

import itertools
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from shardwise.plans.fields import PLAN, SERVING, TRAINING

TABLE = Path(__file__).parent.parent / "docs" / "json_keys.toml"
# What a type of the table of fields is in JSON.
UNITS = {"switch": "yes or no", "seconds": "s", "bytes": "bytes"} | dict.fromkeys(
    ("choice", "text", "precision"), "text"
)
UNITS |= dict.fromkeys(("wholes", "words", "order", "places"), "list")
FIELDS = {field.key: field for field in (*SERVING, *TRAINING, *PLAN)}


def spelt(key: str) -> list[str]:
    """Return the keys that a row stands for, its braces opened.

    >>> spelt("plan.{tp,pp}")
    ['plan.tp', 'plan.pp']
    """
    parts = [part.split(",") for part in re.split(r"[{}]", key)]
    return ["".join(words) for words in itertools.product(*parts)]


def rows(answer: dict[str, Any]) -> list[list[str]]:
    """Return (key, unit or type, meaning) of the keys of one answer.

    A row of a key alone is said by the table of fields, as are all fields of a plan where an answer has its `fields`.

    >>> rows({"fields": "plan", "keys": []})[0], rows({"keys": [["job.seq_len"]]})
    (['tp', 'number', 'tensor-parallel degree'], [['job.seq_len', 'number', 'tokens of a sequence']])
    """
    listed = [[name] for field in PLAN for name in field.names] if answer.get("fields") == "plan" else []
    return [full for row in (*listed, *answer["keys"]) for full in ([row] if row[1:] else map(_said, spelt(row[0])))]


def _said(key: str) -> list[str]:
    field = FIELDS[key.rpartition(".")[2]]
    return [key, UNITS.get(field.type, "number"), field.help.partition(";")[0]]


def section(answer: dict[str, Any]) -> list[str]:
    """Return the lines of one answer: what it shares with others, its table, what may change.

    >>> section({"name": "x", "keys": [["fits", "yes or no", "it fits"]], "detail": ["step"]})[4]
    '| `fits` | yes or no | it fits |'
    """
    lines = [f"### {answer['name']}", ""]
    lines += [answer["intro"], ""] if "intro" in answer else []
    lines += ["| key | unit or type | meaning |", "|---|---|---|"]
    lines += [f"| `{key}` | {unit} | {meaning} |" for key, unit, meaning in rows(answer)]
    lines += [
        f"| `{key}` | object | keys of [{of}](#{of.replace(' ', '-')}) |" for key, of in answer.get("same", {}).items()
    ]
    if "detail" in answer:
        lines += ["", f"Detail: {', '.join(f'`{name}`' for name in answer['detail'])}."]
    return [*lines, ""]


def main() -> int:
    """Print the sections of all answers."""
    answers = tomllib.loads(TABLE.read_text(encoding="utf-8"))["answer"]
    sys.stdout.write("\n".join(line for answer in answers for line in section(answer)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
