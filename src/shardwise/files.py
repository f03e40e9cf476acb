"""Reading what people wrote: the one function that opens a file, and text, JSON and TOML within limits.

Only regular files are read, links to them included: a pipe would wait for ever and a device never ends.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import re
import stat
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any

from shardwise.errors import InputError, Problem, bounded, cut

WRITTEN_BYTES = 1 << 20
"""Most bytes of a file that a person writes: TOML, a script."""
YAML_BYTES = 1 << 18
JSON_BYTES = 16 << 20
CSV_BYTES = 64 << 20
MOST_KEYS = 1000
"""Most keys of a file of settings: each one that is not known is compared with those that are."""
_MOST_DIGITS, _MOST_BITS = 300, 1000  # whole numbers of more are beyond floats
_MOST_PARTS = 64  # of a dotted key: tomllib keeps every prefix of one
# What names of files may not hold on Windows, and what is a device there whatever its ending.
_REFUSED = re.compile(r'[<>:"\\|?*\x00-\x1f]')
_DEVICE = re.compile(r"(?:con|prn|aux|nul|(?:com|lpt)\d) *(?:\.|$)", re.IGNORECASE)
_MOST_NAME = 100
_GZIP = b"\x1f\x8b"
# An unclosed quote reaches to the end of its line, so that each character is looked at once.
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?$)|\'[^\']*+(?:\'|$)')


def read_file(path: str | os.PathLike[str], most_bytes: int, field: str = "file") -> bytes:
    """Return the bytes of a regular file of at most so many; raises `InputError` for anything else.

    >>> read_file(os.devnull, 100)
    Traceback (most recent call last):
    shardwise.errors.InputError: file = '...': cannot be read (it is no regular file); give a file
    """
    name = os.fspath(path)
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        _check_regular(os.stat(name), name, field)
        with open(os.open(name, flags), "rb") as file:
            # Asked again, of what was opened: the name may have come to mean another file.
            _check_regular(os.fstat(file.fileno()), name, field)
            with bounded(field, name):
                data: bytes | None = file.read(most_bytes + 1)
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise _unreadable(field, name, getattr(error, "strerror", None) or str(error)) from None
    if data is None:  # a log of the system is a regular file, and one that waits for its next line
        raise _unreadable(field, name, "it holds nothing yet")
    if len(data) > most_bytes:
        raise _fail(
            field, name, f"is larger than {most_bytes:,} bytes", "give a smaller file, without what is not read"
        )
    return data


def read_text(path: str | os.PathLike[str], most_bytes: int, field: str = "file") -> str:
    """Return the text of a file in UTF-8, without a mark of byte order."""
    return decoded(read_file(path, most_bytes, field), path, field)


def decoded(data: bytes, path: str | os.PathLike[str], field: str = "file") -> str:
    """Return bytes as text; raises `InputError` where they are not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _not_utf8(path, field) from None


def read_csv_text(path: str | os.PathLike[str], field: str = "file") -> str:
    """Return the text of a CSV file, whatever its letters beyond ASCII are; raises `InputError` for UTF-16."""
    data = read_file(path, CSV_BYTES, field)
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        # Read as bytes, its first column would have another name.
        raise _not_utf8(path, field)
    if data.startswith(_GZIP):
        raise _fail(field, path, "is compressed", "unpack it, as gunzip does")
    return data.decode("utf-8-sig", errors="replace").replace("\0", "")


def read_json(path: str | os.PathLike[str], field: str = "file", constants: bool = False) -> Any:
    """Return what a JSON file holds; `constants` lets NaN and Infinity pass, which Python's writers print."""
    return parse_json(read_text(path, JSON_BYTES, field), path, field, constants)


def parse_json(text: str, source: str | os.PathLike[str], field: str = "file", constants: bool = False) -> Any:
    """Return what JSON holds; raises `InputError` for a key that stands twice and for what is no JSON.

    >>> parse_json('{"tp": 1, "tp": 2}', "case.json")
    Traceback (most recent call last):
    shardwise.errors.InputError: file = 'case.json': has the key tp twice; keep one
    """

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tree = dict(pairs)
        if len(tree) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise _fail(field, source, f"has the key {cut(twice)} twice", "keep one")
        return tree

    def constant(word: str) -> float:
        if constants:
            return float(word.replace("Infinity", "inf"))
        raise _fail(field, source, f"holds {word}, which JSON does not have", "write a number")

    def whole(word: str) -> int:
        if len(word) > _MOST_DIGITS:
            raise _fail(field, source, f"holds a number of {len(word)} digits", "write a number that is meant")
        return int(word)

    def fraction(word: str) -> float:
        number = float(word)
        if math.isinf(number):
            raise _fail(
                field, source, f"holds {cut(word)}, which is beyond what numbers hold", "write one that is meant"
            )
        return number

    hooks: dict[str, Any] = {"parse_int": whole, "parse_float": fraction, "parse_constant": constant}
    try:
        with bounded(field, source):
            return json.loads(text, object_pairs_hook=table, **hooks)
    except InputError:
        raise
    except ValueError as error:
        raise _fail(field, source, f"is not valid JSON ({cut(str(error))})", "correct the JSON") from None


def read_toml(path: str | os.PathLike[str], field: str = "file") -> dict[str, Any]:
    """Return the table of a TOML file; raises `InputError` where it cannot be read or is no TOML."""
    return parse_toml(read_text(path, WRITTEN_BYTES, field), path, field)


class _TableLoader(SourceFileLoader):
    """Loads a TOML file of the package as Python loads a module: compiled once, beside the modules, kept while it fits.

    The name has a suffix, so that vllm.toml and vllm.py are not compiled to one file.
    """

    def path_stats(self, path: Any) -> Any:
        return super().path_stats(path.removesuffix(_COMPILED))

    def get_data(self, path: Any) -> bytes:
        return super().get_data(path.removesuffix(_COMPILED))

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        import tomllib

        table: Any = tomllib.loads(data.decode("utf-8").replace("\r\n", "\n"))
        return compile("", path, "exec").replace(co_consts=(table,))


_COMPILED = ".table"


def own_table(module: str, name: str) -> dict[str, Any]:
    """Return the table of a TOML file of the package beside a module, given the file of that.

    >>> "local" in own_table(os.path.join(os.path.dirname(__file__), "hardware", "_device.py"), "links.toml")
    True
    """
    path = os.path.join(os.path.dirname(module), name + _COMPILED)
    code = _TableLoader(name, path).get_code(name)
    table: Any = code.co_consts[0] if code is not None else {}
    return dict(table)


def parse_toml(text: str, path: str | os.PathLike[str], field: str = "file") -> dict[str, Any]:
    """Return the table that TOML holds; raises `InputError` for what is none, and for depth that nobody writes.

    >>> parse_toml("tp = 8", "case.toml")
    {'tp': 8}
    """
    import tomllib

    if any(map(_is_deep, (line for line in text.splitlines() if line.count(".") > _MOST_PARTS))):
        raise _fail(field, path, f"has a key of more than {_MOST_PARTS} parts", "write shorter keys")
    try:
        with bounded(field, path):
            table = tomllib.loads(text)
    except InputError:
        raise
    except ValueError as error:
        raise _fail(field, path, f"is not valid TOML ({cut(str(error))})", "correct the TOML") from None
    check_tree(table, path, field)
    return table


def check_tree(tree: object, source: str | os.PathLike[str], field: str) -> None:
    """Raise `InputError` where tables in tables and lists have more keys or digits than a person writes."""
    left, num_keys = [tree], 0
    while left:
        node = left.pop()
        if isinstance(node, dict):
            num_keys += len(node)
            left.extend(node.values())
        elif isinstance(node, list):
            left.extend(node)
        elif isinstance(node, int) and node.bit_length() > _MOST_BITS:
            rule = f"holds a whole number of {node.bit_length():,} bits"
            raise _fail(field, source, rule, "write a number that is meant")
    if num_keys > MOST_KEYS:
        raise _fail(
            field, source, f"has {num_keys:,} keys, at most {MOST_KEYS:,} are read", "leave out what is not meant"
        )


def _is_deep(line: str) -> bool:
    """Return whether a line of TOML may hold a key of many parts; what is quoted is one part."""
    bare = "".join(piece.strip() + "." for piece in _QUOTED.sub("q", line).partition("#")[0].split("."))
    return any(sum(map(bool, word.split("."))) > _MOST_PARTS for word in re.split(r"[\s,=\[\]{}]", bare))


def file_name(path: str, ending: str) -> str:
    r"""Return a file's name for a model that every system takes: in no other folder, on no drive, and no device.

    >>> file_name("meta-llama/Llama-3.1-8B", ".sh"), file_name("c:\\new\\a", ".sh"), file_name("con.b", ".toml")
    ('Llama-3.1-8B.sh', 'a.sh', 'model-con.b.toml')
    """
    last = path.replace("\\", "/").rpartition("/")[2]
    name = _REFUSED.sub("-", last)[:_MOST_NAME].rstrip(" .") or "model"
    return f"{'model-' if _DEVICE.match(name) or name[0] in '-.~' else ''}{name}{ending}"


def below(source: str, named: str, follow: bool = False, field: str = "file") -> str:
    """Return the path of a file that another names, relative to it; raises `InputError` where it is not below it.

    `follow` allows any place: a file of someone else's cannot then be trusted not to look around.
    """
    folder = os.path.abspath(os.path.dirname(source) or os.curdir)
    path = os.path.join(os.path.dirname(source), named)
    try:
        # Of Windows: to resolve links on another machine's share is to call that machine.
        inside = os.path.splitdrive(os.path.abspath(path))[0] == os.path.splitdrive(folder)[0]
        top = os.path.realpath(folder)
        inside = inside and os.path.commonpath([top, os.path.realpath(path)]) == top
    except ValueError:  # another drive, or a null character
        inside = False
    if not (inside or follow):
        rule = f"is named by {cut(source)} and is not below it"
        raise _fail(field, named, rule, "put it there, or allow any place: --follow")
    return path


def _check_regular(status: os.stat_result, name: str, field: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
        raise _unreadable(field, name, f"it is {kind}")


def _unreadable(field: str, path: object, reason: str) -> InputError:
    return _fail(field, path, f"cannot be read ({' '.join(reason.split())})", "give a file")


def _not_utf8(path: object, field: str) -> InputError:
    return _fail(field, path, "is not UTF-8 text", "save the file as UTF-8")


def _fail(field: str, path: object, rule: str, remedy: str) -> InputError:
    return InputError([Problem(field, str(path), rule, remedy)])
