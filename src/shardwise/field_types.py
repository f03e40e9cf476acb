"""Whether what Python callers pass is of the types that are stated: a wrong one is bad input, not a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from inspect import signature
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar, Union, cast, get_args, get_origin

from shardwise.errors import Problems
from shardwise.records import replace

P = ParamSpec("P")
R = TypeVar("R")
# Returns a value as plain Python has it, and records under a name what is wrong with it.
Check: TypeAlias = Callable[[str, Any, Problems], Any]
# Whole numbers beyond it are meant of nothing, and products of them are more than numbers can hold.
_MOST = 10**15
# Of longer tuples, those of a trace, each item is checked by its class alone.
_EACH = 1000
# Records that the package makes of catalogues and files, and checks there; how the first two are made.
_MADE = ("Model", "Cluster", "Device", "Stack", "Engine")
# Of those the fields that callers set.
_SET = {"Stack": ("settings",)}
_MAKING = {"Model": 'Model.load("llama-3.1-8b")', "Cluster": 'Cluster.parse("8xh100")'}


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that raises `InputError` for arguments, and fields of them, of other types than are stated.

    Numbers of numpy are passed on as plain ones, and lists as tuples. Rules are checked where all types are right.

    >>> import numpy as np
    >>> from shardwise.plans import Plan
    >>> @typed
    ... def ranks(plan: Plan) -> int:
    ...     return plan.tp
    >>> ranks(Plan(tp=np.int64(2)))
    2
    >>> ranks(Plan(tp="2"))
    Traceback (most recent call last):
    shardwise.errors.InputError: tp = '2': must be a whole number; write for example 8
    """
    names = tuple(signature(function).parameters)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        checks, problems = _arguments(function), Problems()
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        changed = {name: check(name, given[name], problems) for name, check in checks.items() if name in given}
        problems.raise_if_any()
        call: Any = function
        plain = (changed.get(name, value) for name, value in zip(names, args, strict=False))
        return cast(R, call(*plain, *args[len(names) :], **{k: changed.get(k, v) for k, v in kwargs.items()}))

    return checked


def kept_by_name(function: Callable[[str], R]) -> Callable[[str], R]:
    """Return a function of a name that keeps what it returned; a value of another type is none, and gets its text.

    >>> kept_by_name(len)("abc"), kept_by_name(len)([1])
    (3, 3)
    """
    kept = cache(function)

    @wraps(function)
    def by_name(name: str) -> R:
        return kept(name if isinstance(name, str) else repr(name))

    return by_name


@cache
def _arguments(function: Callable[..., Any]) -> dict[str, Check]:
    """Return the check of each argument whose type is known, read when a function is first called."""
    scope = cast(Any, function).__globals__
    known = {name: _check(_read(one.annotation, scope)) for name, one in signature(function).parameters.items()}
    return {name: check for name, check in known.items() if check is not None}


def _read(annotation: Any, scope: dict[str, Any]) -> Any:
    """Return the type of an annotation, None where a name of it is not loaded."""
    try:
        return eval(annotation, scope) if isinstance(annotation, str) else annotation
    except (NameError, TypeError):
        return None


def _check(kind: Any) -> Check | None:
    """Return the check of a type, None of one that is not known."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _choice(inner)
    if origin is tuple:
        return _items(inner)
    if origin is Sequence:
        return _items((*inner, ...))
    if origin is Mapping:
        return _mapping
    if kind is Path or origin is PathLike:
        return _path
    if origin in (UnionType, Union):  # of what stands in `typing`, such as Literal, it is Union
        return _either(inner)
    if isinstance(kind, type) and is_dataclass(kind):
        return _record(kind)
    return _PLAIN.get(kind) if isinstance(kind, type) else None


def _record(kind: Any) -> Check:
    name, made = kind.__name__, kind.__name__ in _MADE
    rule = f"must be {'an' if name[0] in 'AEIOU' else 'a'} {name}", f"write {_MAKING.get(name, f'{name}(...)')}"

    def check(field: str, value: Any, problems: Problems) -> Any:
        if not isinstance(value, kind):
            problems.add(field, value if isinstance(value, (str, int, float)) else type(value).__name__, *rule)
            return value
        changed = {}
        of_kind: Any = type(value)
        for each, exact, of in _checks(of_kind, _SET.get(name, ()) if made else None):
            own = getattr(value, each)
            if type(own) is exact and own == own and (exact is not int or -_MOST <= own <= _MOST):
                continue
            plain = of(each, own, problems)
            if plain is not own:
                changed[each] = plain
        return replace(cast(Any, value), **changed) if changed else value

    return check


@cache
def _checks(kind: type, only: tuple[str, ...] | None = None) -> tuple[tuple[str, Any, Check], ...]:
    """Return the fields of a record whose types are known, each with its check, and that type where it is plain.

    `only` names the fields that are looked at, where those are not all.
    """
    scope: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        scope |= vars(sys.modules[base.__module__])
    named = [f for f in fields(kind) if f.init and (only is None or f.name in only)]
    kinds = [(f.name, _read(f.type, scope)) for f in named]
    known = ((name, of, _check(of)) for name, of in kinds)
    return tuple((name, of if of in _PLAIN else None, check) for name, of, check in known if check is not None)


def _whole(field: str, value: Any, problems: Problems) -> Any:
    if isinstance(value, Integral) and not isinstance(value, bool):
        whole = int(value)
        if not -_MOST <= whole <= _MOST:
            problems.add(field, whole, "is beyond what can be computed", "use sizes that exist")
        return whole
    problems.add(field, value, "must be a whole number", "write for example 8")
    return value


def _number(field: str, value: Any, problems: Problems) -> Any:
    if isinstance(value, Real) and not isinstance(value, bool) and value == value:
        return value if isinstance(value, int) else float(value)
    problems.add(field, value, "must be a number", "write for example 0.5")
    return value


def _text(field: str, value: Any, problems: Problems) -> Any:
    if not isinstance(value, str):
        problems.add(field, value, "must be text", "leave it out, or write it in quotes")
    return value


def _path(field: str, value: Any, problems: Problems) -> Any:
    if not isinstance(value, PathLike):
        problems.add(field, value, "must be a name or a path", 'write for example "gpt2" or "files/config.json"')
    return value


def _mapping(field: str, value: Any, problems: Problems) -> Any:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        problems.add(field, value, "must be a mapping of names to values", 'write for example {"num_layers": 2}')
    return value


def _switch(field: str, value: Any, problems: Problems) -> Any:
    if isinstance(value, bool):
        return value
    if type(value).__name__ in ("bool", "bool_"):  # numpy's own
        return bool(value)
    problems.add(field, value, "must be true or false", "write True or False")
    return value


_PLAIN: dict[type, Check] = {int: _whole, float: _number, str: _text, bool: _switch}


def _choice(words: tuple[Any, ...]) -> Check:
    remedy = "use one of " + ", ".join(word for word in words if word)

    def check(field: str, value: Any, problems: Problems) -> Any:
        if not isinstance(value, str) or value not in words:
            problems.add(field, value, "is not a known choice", remedy)
        return value

    return check


def _either(inner: tuple[Any, ...]) -> Check | None:
    """Return the check of what may be of several types; what one of them says is recorded where it is of none."""
    checks = [_check(one) for one in inner if one is not type(None)]
    known = [one for one in checks if one is not None]
    if len(known) < len(checks):
        return None

    def check(field: str, value: Any, problems: Problems) -> Any:
        if value is None and type(None) in inner:
            return None
        refused = []
        for one in known:
            tried = Problems()
            plain = one(field, value, tried)
            if not tried.items:
                return plain
            refused.append(tried.items)
        usual = refused[known.index(_path) if _path in known else -1 if str in inner else 0]
        # Of a record with a wrong field that field is told.
        problems.items.extend(next((one for one in refused if all(p.field != field for p in one)), usual))
        return value

    return check


def _items(inner: tuple[Any, ...]) -> Check | None:
    """Return the check of a tuple; a list is taken as one."""
    each = len(inner) == 2 and inner[1] is Ellipsis
    checks = [one for one in map(_check, inner[:1] if each else inner) if one is not None]
    if len(checks) < len(inner[:1] if each else inner):
        return None

    def check(field: str, value: Any, problems: Problems) -> Any:
        if not isinstance(value, (tuple, list, range)) or not (each or len(value) == len(checks)):
            rule = "must be a tuple" if each else f"must be a tuple of {len(checks)}"
            problems.add(field, value, rule, "write (a,) for one, (a, b) for two")
            return value
        if len(value) > _EACH:
            if len({type(one) for one in value}) > 1:
                problems.add(field, len(value), "holds values of several types", "write plain numbers")
            return value if isinstance(value, tuple) else tuple(value)
        plain = [of(field, one, problems) for of, one in zip(checks * (len(value) if each else 1), value, strict=True)]
        changed = not isinstance(value, tuple) or any(new is not old for new, old in zip(plain, value, strict=True))
        return tuple(plain) if changed else value

    return check
