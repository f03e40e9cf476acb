"""Records behave as the standard library's data classes do."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import FrozenInstanceError, asdict, field, replace
from typing import Any

import pytest

from shardwise import records


@records.dataclass(frozen=True, kw_only=True, slots=True)
class Long:
    """A record of so many fields that it is filled as its open twin."""

    a: int
    b: int = 2
    c: list[int] = field(default_factory=list)
    d: int = 4
    own: int = 5
    f: int = 6

    def __post_init__(self) -> None:
        if type(self) is Long:
            with pytest.raises(FrozenInstanceError):
                self.a = 0  # type: ignore[misc]


class Named(Long):
    """A class of one's own over it, with the same room."""

    __slots__ = ()


def test_a_long_record_is_of_its_own_class_and_frozen() -> None:
    """It is frozen when its own check runs and after, as is one of a class derived from it, and knows who made it."""
    changed = (replace(Long(a=3), a=1), records.replace(Long(a=3), a=1), records.replace(Named(a=3), a=1))
    made = (Long(a=1), Named(a=1), *changed, copy.copy(Long(a=1)), pickle.loads(pickle.dumps(Long(a=1))))
    for one in made:
        assert (one.a, one.b, one.c, one.f) == (1, 2, [], 6)
        assert type(one) in (Long, Named)
        with pytest.raises(FrozenInstanceError):
            one.a = 2  # type: ignore[misc]
    assert (type(Named(a=1)), Long(a=1), Long(a=1) == Named(a=1)) == (Named, Long(a=1), False)
    assert (type(changed[1]), type(changed[2])) == (Long, Named)
    with pytest.raises(TypeError, match="other"):
        records.replace(Long(a=1), other=2)


def _classes(decorate: Any) -> tuple[Any, ...]:
    @decorate(frozen=True, kw_only=True, slots=True)
    class Base:
        name: str
        sizes: list[int] = field(default_factory=list)
        note: str = field(default="", compare=False, repr=False)

    @decorate(frozen=True, kw_only=True, slots=True)
    class Derived(Base):
        count: int = 1

    @decorate(slots=True)
    class Open:
        low: int
        high: int = 9
        total: int = field(init=False)

        def __post_init__(self) -> None:
            self.total = self.low + self.high

    @decorate(frozen=True, order=True, slots=True)
    class Ordered:
        value: float
        key: tuple[int, ...]

    @decorate(frozen=True)
    class Own:
        value: int

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Own) and self.value % 2 == other.value % 2

    return Base, Derived, Open, Ordered, Own


def _told(classes: tuple[Any, ...]) -> list[Any]:
    base, derived, plain, ordered, own = classes
    one = base(name="a", sizes=[1], note="x")
    two = derived(name="a", count=2)
    return [
        *map(repr, (one, two, plain(1), ordered(1.0, (2,)))),
        one == base(name="a", sizes=[1]) != base(name="b"),
        one == two,
        hash(ordered(1.0, (2,))) == hash((1.0, (2,))),
        hash(own(3)) == hash((3,)),
        own(1) == own(3),
        plain.__hash__,
        sorted([ordered(2.0, ()), ordered(1.0, (3,)), ordered(1.0, (2,))]).__repr__(),
        asdict(replace(two, count=5)),
        plain(1).total,
        base.__match_args__ + ordered.__match_args__,
        repr(copy.copy(two)) + repr(copy.deepcopy(one)),
        [(f.name, f.type) for f in dataclasses.fields(derived)],
        [list(inspect.signature(one).parameters) for one in classes],
        [one.__annotations__ for one in classes],
        base(name="a").sizes is base(name="a").sizes,
    ]


def test_records_say_what_data_classes_say() -> None:
    """Text, comparison, hash, order, copies and fields are those of the standard library."""
    assert _told(_classes(records.dataclass)) == _told(_classes(dataclasses.dataclass))


def test_frozen_records_refuse_changes_and_wrong_arguments() -> None:
    """No field of a frozen record is set or deleted, no unknown or positional argument is taken."""
    base, derived, *_ = _classes(records.dataclass)
    for one in (base(name="a"), derived(name="a")):
        with pytest.raises(FrozenInstanceError):
            one.name = "b"
        with pytest.raises(FrozenInstanceError):
            del one.name
    for arguments in ({}, {"name": "a", "other": 1}):
        with pytest.raises(TypeError):
            base(**arguments)
    with pytest.raises(TypeError):
        base("a")


@records.dataclass(frozen=True, slots=True)
class _Kept:
    name: str
    count: int = 1


def test_frozen_records_travel_to_other_processes() -> None:
    """A frozen record with slots is the same after pickling."""
    assert pickle.loads(pickle.dumps(_Kept("a", 2))) == _Kept("a", 2)
