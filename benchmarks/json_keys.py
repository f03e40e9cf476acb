"""Print the tables of docs/json.md: the keys of every answer with --json, from docs/json_keys.toml."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent.parent / "docs" / "json_keys.toml"


def section(answer: dict[str, Any]) -> list[str]:
    """Return the lines of one answer: what it shares with others, its table, what may change.

    >>> section({"name": "x", "keys": [["fits", "yes or no", "it fits"]], "detail": ["step"]})[4]
    '| `fits` | yes or no | it fits |'
    """
    lines = [f"### {answer['name']}", ""]
    lines += [answer["intro"], ""] if "intro" in answer else []
    lines += ["| key | unit or type | meaning |", "|---|---|---|"]
    lines += [f"| `{key}` | {unit} | {meaning} |" for key, unit, meaning in answer["keys"]]
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
