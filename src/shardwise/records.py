"""The decorator of the package's records: `dataclasses.dataclass` with one compiled function a class, where it has six.

A process that answers one question makes 250 classes of records, and records of a part of them. Comparison, hash, text
and the refusal of changes are functions that all records share; only `__init__` is text that Python compiles, when a
class has its first record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, fields, is_dataclass
from dataclasses import dataclass as _standard
from dataclasses import replace as _replace
from functools import cache
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import replace as replace
else:

    def dataclass(cls=None, /, **options):
        """Return a class as `dataclasses.dataclass` does: its fields, `replace`, `asdict` and matching are the same.

        >>> from dataclasses import field, replace
        >>> @dataclass(frozen=True, slots=True)
        ... class Link:
        ...     name: str
        ...     hops: list = field(default_factory=list, compare=False)
        >>> Link("nvlink"), Link("nvlink", [1]) == Link("nvlink"), replace(Link("ib"), hops=[2]).hops
        (Link(name='nvlink', hops=[]), True, [2])
        """

        def made(cls):
            return _made(cls, **options)

        return made if cls is None else made(cls)

    def replace(record, /, **changes):
        """Return a record with other values in some fields, as `dataclasses.replace` does, ten times as fast.

        >>> from shardwise.plans import Training
        >>> replace(Training(seq_len=1024, global_batch=4), global_batch=8).seq_len
        1024
        """
        copied = _copier(type(record))
        return copied(record, changes) if copied else _replace(record, **changes)


def _made(cls: type, *, frozen: bool = False, repr: bool = True, order: bool = False, **options: Any) -> Any:
    # A class that says how it compares is given a hash of nothing by Python: none is written.
    written = {name for name, value in vars(cls).items() if name != "__hash__" or value is not None}
    # A record whose base is frozen must be frozen for the standard library too, which then compiles how.
    derived = frozen and any(is_dataclass(base) for base in cls.__mro__[1:])
    types = dict(vars(cls).get("__annotations__", {}))
    if types:
        cls.__annotations__ = {name: _kind_of(annotation) for name, annotation in types.items()}
    made: Any = _standard(init=False, repr=False, eq=False, frozen=derived, **options)(cls)
    if types:
        made.__annotations__ = types
        for f in fields(made):
            f.type = types.get(f.name, f.type)
    named = fields(made)
    twinned = frozen and bool(options.get("slots")) and len(named) >= _MANY
    methods = {"__init__": _LazyInit(made, named, frozen, twinned), **_compared(named, frozen, order)}
    if repr:
        methods["__repr__"] = _text(tuple(f.name for f in named if f.repr))
    if frozen:
        methods |= _frozen(made, frozenset(f.name for f in named))
    if frozen and options.get("slots"):
        methods |= {"__getstate__": _getstate, "__setstate__": _setstate}
    for name, method in methods.items():
        if name not in written:
            setattr(made, name, method)
    made.__dataclass_params__.frozen = frozen
    return made


# Annotations with these words the standard library must read; to look for each of them in the text of every annotation
# takes half of the time of making a class.
_SPECIAL = ("ClassVar", "InitVar", "KW_ONLY")


def _kind_of(annotation: Any) -> Any:
    """Return what stands for the annotation of a plain field, and any other as it is."""
    return object if isinstance(annotation, str) and not any(word in annotation for word in _SPECIAL) else annotation


class _LazyInit:
    """The `__init__` of a class, compiled when it is first asked for."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __get__(self, record: Any, kind: Any = None) -> Any:
        owner = self.given[0]
        if vars(owner).get("__init__") is self:
            owner.__init__ = _init(*self.given)
        return owner.__init__ if record is None else owner.__init__.__get__(record, kind)


# Frozen records of so many fields are filled as their open twin; below that the two changes of class cost more.
_MANY = 4
# Changes the class of a record that is frozen.
_BECOME = object.__dict__["__class__"].__set__


def _open_twin(cls: Any) -> type | None:
    """Return a class of the same layout that lets itself be assigned to, None where slots come from a base too.

    A slot that is assigned in Python takes a quarter of the time of `object.__setattr__`.
    """
    bases = cls.__bases__
    if any(base.__dict__.get("__slots__", True) for base in cls.__mro__[1:-1]):
        return None
    kept = {name: vars(cls)[name] for name in ("__slots__", "__orig_bases__") if name in vars(cls)}
    return type(cls.__name__, bases, kept)


def _init(cls: type, named: tuple[Field[Any], ...], frozen: bool, twinned: bool) -> Callable[..., None]:
    """Return the `__init__` of some fields; defaults are names of the scope that it is compiled in."""
    twin = _open_twin(cls) if twinned else None
    scope: dict[str, Any] = {"put": object.__setattr__, "absent": MISSING, "__twin": twin, "__become": _BECOME}
    given: dict[bool, list[str]] = {False: [], True: []}
    lines = []
    for f in named:
        name, default, value = f.name, f"default_{f.name}", f.name
        made = f.default_factory is not MISSING
        scope[default] = f.default_factory if made else f.default
        if made:
            value = f"{default}() if {name} is absent else {name}" if f.init else f"{default}()"
        if f.init:
            plain = name if f.default is MISSING and not made else f"{name}={'absent' if made else default}"
            given[bool(f.kw_only)].append(plain)
        elif not made:
            # Of a field that nobody gives the class keeps the default, where it has room for it.
            continue
        lines.append(f"put(self, {name!r}, {value})" if frozen and not twin else f"self.{name} = {value}")
    if twin:
        lines = ["__kind = self.__class__", "__become(self, __twin)", *lines, "self.__class__ = __kind"]
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    last = ["*", *given[True]] if given[True] else []
    source = f"def __init__({', '.join(['self', *given[False], *last])}):\n  " + "\n  ".join(lines or ["pass"])
    exec(source, scope)
    init: Callable[..., None] = scope["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {**{f.name: f.type for f in named if f.init}, "return": None}
    return init


@cache
def _copier(cls: Any) -> Callable[[Any, dict[str, Any]], Any] | None:
    """Return what copies a record of a class with changes, None where the standard library does it.

    A wide frozen record is copied slot by slot as its open twin, without the defaults and words of its `__init__`;
    others are made anew.
    """
    named = fields(cls)
    if not all(f.init for f in named):
        return None
    wide = len(named) >= _MANY and cls.__dataclass_params__.frozen and "__slots__" in vars(cls)
    twin = _open_twin(cls) if wide else None
    if twin is None:
        return _remade(cls, [f.name for f in named])
    lines = [
        "new = make(twin)",
        *(f"new.{f.name} = self.{f.name}" for f in named),
        "for name, value in changes.items():",
        "  if name not in names: raise TypeError(f'{cls.__name__} has no field {name!r}')",
        "  assign(new, name, value)",
        "new.__class__ = cls",
        *(["new.__post_init__()"] if hasattr(cls, "__post_init__") else []),
        "return new",
    ]
    names = frozenset(f.name for f in named)
    scope = {"make": object.__new__, "assign": setattr, "twin": twin, "cls": cls, "names": names}
    exec("def copied(self, changes):\n  " + "\n  ".join(lines), scope)
    copied: Callable[[Any, dict[str, Any]], Any] = scope["copied"]
    return copied


def _remade(cls: Any, names: list[str]) -> Callable[[Any, dict[str, Any]], Any]:
    """Return what makes a record anew, with the values of an old one where nothing else is given."""
    given = ", ".join(f"{name!r}: self.{name}" for name in names)
    scope = {"cls": cls}
    exec(f"def copied(self, changes):\n  return cls(**{{{given}, **changes}})", scope)
    copied: Callable[[Any, dict[str, Any]], Any] = scope["copied"]
    return copied


def _values(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that gives some attributes as a tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda self: tuple(getattr(self, name) for name in names)


def _compared(named: tuple[Field[Any], ...], frozen: bool, order: bool) -> dict[str, Any]:
    values = _values([f.name for f in named if f.compare])

    def eq(self: Any, other: Any) -> Any:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    def lt(self: Any, other: Any) -> Any:
        return values(self) < values(other) if other.__class__ is self.__class__ else NotImplemented

    keys = _values([f.name for f in named if (f.compare if f.hash is None else f.hash)])
    methods = {"__eq__": eq, "__hash__": (lambda self: hash(keys(self))) if frozen else None}
    return {**methods, "__lt__": lt} if order else methods


def _text(names: tuple[str, ...]) -> Callable[[Any], str]:
    @recursive_repr()
    def text(self: Any) -> str:
        return f"{self.__class__.__qualname__}({', '.join([f'{name}={getattr(self, name)!r}' for name in names])})"

    return text


def _frozen(cls: Any, names: frozenset[str]) -> dict[str, Any]:
    def put(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def drop(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return {"__setattr__": put, "__delattr__": drop}


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, f.name) for f in fields(self)]


def _setstate(self: Any, state: list[Any]) -> None:
    for f, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, f.name, value)
