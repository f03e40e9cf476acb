"""A study: many questions with one folder of answers, which survives whatever ends it.

Each answer is a file of its own, written beside and renamed, so that a run that was killed goes on where it was. The
tables, one a model, are made of these files: a run that was disturbed has the same bytes in them as one that was not.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path
from typing import Any

from shardwise.errors import InputError, Problem
from shardwise.files import CSV_BYTES, read_file
from shardwise.libraries import is_installed
from shardwise.records import dataclass
from shardwise.search._executor import Executor, PartRange

AnswerRow = dict[str, Any]
_WHOLE_INTEGER, _MOST_FILES = 2**63, 100
# What a disk, a quota or a limit of the shell says that has no room left.
_FULL = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyQuestion:
    """One question of a study: its model, what was asked, and a name that only the same question has.

    `shown` is what of the values stands in its rows: no part of the answer, since a study that grows shows more.
    """

    model: str
    values: Mapping[str, Any]
    name: str
    shown: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any], depends_on: Sequence[Any], shown: Sequence[str] = ()) -> StudyQuestion:
        """Return the question of some values; `depends_on` is what else the answer depends on, such as the release.

        >>> one, other = (StudyQuestion.of({"model": "gpt2", "on": on}, ["0.1"]) for on in ("h100", "8xh100"))
        >>> one.model, one.name != other.name
        ('gpt2', True)
        """
        files = {key: _digest(value) for key, value in values.items() if isinstance(value, str)}
        known = {key: digest for key, digest in files.items() if digest}
        text = json.dumps([values, known, *depends_on], sort_keys=True, default=str)
        return cls(
            model=str(values.get("model", "sizes")),
            values=values,
            name=hashlib.sha256(text.encode()).hexdigest()[:20],
            shown={name: values.get(name) for name in shown},
        )

    def with_values(self, rows: Sequence[AnswerRow]) -> list[AnswerRow]:
        """Return the rows of its answer with what was asked."""
        return [{**self.shown, **row} for row in rows]


def _digest(path: str) -> str:
    """Return the digest of a file's content or of those of a model's folder, nothing where a text does not name one."""
    with suppress(InputError, OSError, ValueError):
        if not os.path.isdir(path):
            return hashlib.sha256(read_file(path, CSV_BYTES)).hexdigest()
        files = sorted(Path(path).glob("*.json"))[:_MOST_FILES]
        return hashlib.sha256("".join(f"{file.name} {_digest(str(file))}\n" for file in files).encode()).hexdigest()
    return ""


def slug(name: str) -> str:
    """Return a name as a file may have it.

    >>> slug("org/model 7b"), slug("..")
    ('org_model_7b', '_')
    """
    return re.sub(r"[^\w.-]+", "_", name).strip(".") or "_"


def _kept(rows: Sequence[AnswerRow]) -> dict[str, Any]:
    """Return what a file keeps of an answer: its rows and their digest, by which one that was changed is told."""
    return {"sha256": hashlib.sha256(json.dumps(rows).encode()).hexdigest(), "rows": rows}


@dataclass(frozen=True, slots=True)
class StudyFolder:
    """The folder of a study: `parts/MODEL/NAME.json` for each answer, `MODEL.parquet` for each table."""

    path: Path

    def part(self, question: StudyQuestion) -> Path:
        """Return the file of an answer."""
        return self.path / "parts" / slug(question.model) / f"{question.name}.json"

    def answered(self, question: StudyQuestion) -> list[AnswerRow] | None:
        """Return the rows of an answer, None where there is none, it is not whole or was changed.

        A refusal is no answer: what the question lacked may be there now.
        """
        with suppress(InputError, ValueError, TypeError, KeyError, RecursionError):
            kept = json.loads(read_file(self.part(question), CSV_BYTES))
            rows: list[AnswerRow] = kept["rows"]
            return rows if kept == _kept(rows) and not any(row.get("problem") for row in rows) else None
        return None

    def keep(self, question: StudyQuestion, rows: Sequence[AnswerRow]) -> list[AnswerRow]:
        """Write an answer, and return its rows as a later run reads them."""
        stored: list[AnswerRow] = json.loads(json.dumps(rows))
        # Not forced to the disk: an answer that a power failure cuts off is not whole, and is worked out again.
        written(self.part(question), json.dumps(_kept(stored)).encode(), durable=False)
        return stored

    def stale(self, questions: Sequence[StudyQuestion]) -> list[Path]:
        """Return the answers that are to none of the questions: of another study, another release or another file."""
        asked = {self.part(question) for question in questions}
        return sorted(path for path in (self.path / "parts").glob("*/*.json") if path not in asked)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out of the folder; raises `InputError` where one is in it. A run that died holds nothing."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = open(self.path / ".lock", "wb")  # noqa: SIM115 (held as long as the run)
        except OSError as error:
            rule = f"cannot be written ({error.strerror})"
            raise InputError([Problem("out", str(self.path), rule, "name another folder")]) from None
        with file:
            try:
                _lock(file.fileno())
            except OSError:
                rule = "is held by another run of a study"
                raise InputError(
                    [Problem("out", str(self.path), rule, "wait for it, or name another folder")]
                ) from None
            yield


def _lock(file: int) -> None:
    """Keep a file for this process until it ends; raises `OSError` where another has it."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        # A lock of the process: the workers that it forks do not hold it when it is gone.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def written(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a file beside and rename it, so that it is whole or not there; raises `InputError` where it cannot be."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        rule = f"cannot be written ({error.strerror}); what was answered before is kept"
        remedy = "make room" if error.errno in _FULL else "make it writable"
        raise InputError([Problem("out", str(path), rule, f"{remedy} and run the study again")]) from None


@dataclass(slots=True)
class AnsweredPart:
    """The rows of one question by its place in the study."""

    place: int
    rows: list[AnswerRow]
    known: None = None


@dataclass(slots=True)
class StudyTask:
    """Answers questions; it travels to other processes and machines. `answer` returns the rows of one question."""

    questions: Sequence[StudyQuestion]
    answer: Callable[[Mapping[str, Any]], list[AnswerRow]]
    known: None = None

    def learn(self, known: None) -> None:
        """Take in what others found: questions have nothing in common."""

    def __call__(self, parts: Sequence[PartRange]) -> AnsweredPart:
        """Return the rows of the question of a part."""
        place = parts[0][0]
        return AnsweredPart(place, self.answer(self.questions[place].values))


@dataclass(slots=True)
class StudyResult:
    """The rows of all questions in their order, how many were answered before, and the files that are stale."""

    rows: list[AnswerRow] = field(default_factory=list)
    before: int = 0
    left: int = 0
    stale: list[Path] = field(default_factory=list)
    tables: list[Path] = field(default_factory=list)


def run_study(
    task: StudyTask, folder: StudyFolder, executor: Executor, progress: Callable[[int, int], Any] | None = None
) -> StudyResult:
    """Return the answers of a study, those that the folder has not got worked out; an interrupt leaves the rest open.

    Tables are written when none is left, where polars is installed.
    `progress` is told how many questions of how many that were open are answered.
    """
    questions = task.questions
    with folder.locked():
        result = StudyResult(stale=folder.stale(questions))
        known = {place: rows for place, q in enumerate(questions) if (rows := folder.answered(q)) is not None}
        result.before = len(known)
        # Questions about one model follow each other, so that what is loaded for it is used again.
        missing = sorted((p for p in range(len(questions)) if p not in known), key=lambda p: (questions[p].model, p))
        try:
            for done, part in enumerate(executor.run(task, [(p, p + 1) for p in missing]), 1):
                known[part.place] = folder.keep(questions[part.place], part.rows)
                if progress is not None:
                    progress(done, len(missing))
        except KeyboardInterrupt:
            pass
        known = {place: questions[place].with_values(rows) for place, rows in known.items()}
        result.left = len(questions) - len(known)
        result.rows = [row for place in sorted(known) for row in known[place]]
        if not result.left and is_installed("polars"):
            result.tables = list(_tables(folder, questions, known))
    return result


def _tables(
    folder: StudyFolder, questions: Sequence[StudyQuestion], known: Mapping[int, list[AnswerRow]]
) -> Iterator[Path]:
    """Write the table of each model and yield its file."""
    import io

    import polars

    by_model: dict[str, list[AnswerRow]] = {}
    for place, question in enumerate(questions):
        by_model.setdefault(slug(question.model), []).extend(known[place])
    names = list(dict.fromkeys(name for rows in by_model.values() for row in rows for name in row))
    every = [row for rows in by_model.values() for row in rows]
    kinds = {name: _kind([row.get(name) for row in every]) for name in names}
    for model, rows in by_model.items():
        columns = {name: [_as(kinds[name], row.get(name)) for row in rows] for name in names}
        buffer = io.BytesIO()
        schema = {name: _POLARS[kinds[name]](polars) for name in names}
        polars.DataFrame(columns, schema=schema).write_parquet(buffer, compression="zstd")
        path = folder.path / f"{model}.parquet"
        written(path, buffer.getvalue())
        yield path


_POLARS: dict[str, Callable[[Any], Any]] = {
    "counts": lambda p: p.List(p.Struct({"law": p.String, "count": p.Int64})),
    "whole": lambda p: p.Int64,
    "number": lambda p: p.Float64,
    "switch": lambda p: p.Boolean,
    "text": lambda p: p.String,
}


def _kind(values: Sequence[Any]) -> str:
    """Return what a column of all tables holds.

    >>> _kind([1, None]), _kind([1, 2.5]), _kind([1, "2T"]), _kind([{"memory": 3}]), _kind([True])
    ('whole', 'number', 'text', 'counts', 'switch')
    """
    given = [value for value in values if value is not None]
    if given and all(isinstance(v, bool) for v in given):
        return "switch"
    if given and all(isinstance(v, dict) for v in given):
        return "counts"
    if given and all(isinstance(v, int) and not isinstance(v, bool) and abs(v) < _WHOLE_INTEGER for v in given):
        return "whole"
    if given and all(isinstance(v, int | float) and not isinstance(v, bool) for v in given):
        return "number"
    return "text"


def _as(kind: str, value: Any) -> Any:
    if value is None:
        return None
    if kind == "counts":
        return [{"law": law, "count": count} for law, count in value.items()]
    if kind == "number":
        return float(value)
    return value if kind != "text" or isinstance(value, str) else json.dumps(value)
