"""What judge and program say to each other: plain values arrive as they were, and nothing else arrives as plain.

Two peers talk over pipes in one process here, one of them in a thread, with the code that runs inside the sandbox.
"""

import collections
import datetime
import decimal
import enum
import fractions
import math
import operator
import os
import threading
from contextlib import contextmanager

import hypothesis.strategies as st
import pytest
from hypothesis import given

from grpo_fn.sandbox.rpc import (
    COLLECTIONS,
    PROGRAM_OPS,
    REBUILT,
    SCALARS,
    TYPES,
    ChannelClosed,
    Peer,
    Reader,
    Remote,
    Unsendable,
    encode,
    read_exactly,
    write_all,
)

SCALAR = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.binary(), st.complex_numbers(), st.fractions()),
    *(st.text(), st.text(st.characters()), st.decimals(), st.dates(), st.datetimes(), st.timedeltas()),
    *(st.sampled_from(list(TYPES.values())), st.binary().map(bytearray)),
    st.builds(range, st.integers(-99, 99), st.integers(-99, 99), st.integers(1, 9)),
)


def known(value):
    """Can it be a member of a set and still be found by `same`?"""
    try:
        return value == value and hash(value) is not None
    except TypeError:
        return False
    except decimal.InvalidOperation:  # a signalling nan
        return False


PLAIN = st.recursive(
    SCALAR,
    lambda inner: st.one_of(
        *(st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(SCALAR.filter(known), inner)),
        *(st.sets(SCALAR.filter(known)), st.frozensets(SCALAR.filter(known)), st.lists(inner).map(collections.deque)),
        *(st.dictionaries(st.text(), inner).map(collections.OrderedDict), st.text().map(collections.Counter)),
    ),
    max_leaves=12,
)


def refused(value):
    raise Unsendable(f"{value!r}")


def same(got, expected):
    """Equal, of one type, throughout; a nan is one."""
    if type(got) is not type(expected):
        return False
    if isinstance(expected, list | tuple | collections.deque):
        return len(got) == len(expected) and all(map(same, got, expected))
    if isinstance(expected, dict):
        return same(list(got.items()), list(expected.items()))
    if isinstance(expected, float):
        return got.hex() == expected.hex()
    if isinstance(expected, complex):
        return same((got.real, got.imag), (expected.real, expected.imag))
    if isinstance(expected, decimal.Decimal):
        return str(got) == str(expected)
    return got == expected


@given(PLAIN)
def test_plain_values_arrive_as_they_were(value):
    assert same(Reader(encode(value, refused), refused).value(), value)


def test_numbers_of_any_length_arrive():
    number = -(10**10**5) + 1
    assert Reader(encode([number], refused), refused).value() == [number]


PLAIN_TYPES = {*SCALARS, *COLLECTIONS, complex, range}


def only_plain(value):
    kind = type(value)
    if kind is type:
        return value in TYPES.values()
    if isinstance(value, dict):
        return all(map(only_plain, [*value.keys(), *value.values()]))
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return all(map(only_plain, value))
    return kind in PLAIN_TYPES or f"{kind.__module__}.{kind.__qualname__}" in REBUILT


@given(st.binary() | PLAIN.map(lambda value: encode(value, refused)), st.data())
def test_whatever_bytes_come_make_plain_values_or_an_ordinary_error(data, draw):
    place = draw.draw(st.integers(0, len(data)))
    data = data[:place] + draw.draw(st.binary(max_size=6)) + data[place + draw.draw(st.integers(0, 3)) :]
    try:
        value = Reader(data, refused).value()
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return
    assert only_plain(value)


@pytest.mark.parametrize("name", ["builtins.eval", "os.system", "builtins.object", ""])
def test_nothing_but_the_types_of_the_table_is_rebuilt(name):
    body = name.encode()
    data = b"r" + len(body).to_bytes(4, "big") + body + encode(("1",), refused)
    with pytest.raises(ValueError, match="expected one of"):
        Reader(data, refused).value()


@pytest.mark.parametrize("tag", [b"l", b"d", b"s"])
def test_a_size_that_is_a_lie_allocates_nothing(tag):
    with pytest.raises(ValueError, match="expected"):
        Reader(tag + b"\xff" * 4 + b"N" * 64, refused).value()


def test_a_value_too_deep_is_an_ordinary_error():
    with pytest.raises(RecursionError):
        Reader(b"l\0\0\0\1" * 10**5, refused).value()


class Point:
    def __init__(self, x, y=0):
        self.x, self.y = x, y

    def __eq__(self, other):
        return isinstance(other, Point) and (self.x, self.y) == (other.x, other.y)

    def __add__(self, other):
        return Point(self.x + other.x, self.y + other.y)

    def __lt__(self, other):
        return self.x < other.x

    def __bool__(self):
        return self.x > 0

    __hash__ = None


class Everything:
    """Equals, is close to, is less than and contains everything."""

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0

    def __sub__(self, other):
        return 0

    __rsub__ = __add__ = __radd__ = __abs__ = __sub__

    def __lt__(self, other=None):
        return True

    __gt__ = __le__ = __ge__ = __contains__ = __lt__

    def __float__(self):
        return 1.0

    def __iter__(self):
        return iter([])


Pair = collections.namedtuple("Pair", "a b")
Level = enum.IntEnum("Level", "LOW HIGH")
Shade = enum.Enum("Shade", {"RED": "red"}, type=str)


class Stack(list):
    def push(self, value):
        self.append(value)


class AnyList(list):
    __eq__ = Everything.__eq__
    __hash__ = None


class AnyInt(int):
    __eq__ = Everything.__eq__
    __hash__ = int.__hash__


class AnyText(str):
    __eq__ = Everything.__eq__
    __hash__ = str.__hash__


def raises(error):
    raise error


def grow(values, *, more=()):
    values.append(len(more))
    more.append(0)


def count_up():
    yield from range(10**9)


WORLD = {
    **{kind.__name__: kind for kind in (Point, Everything, Pair, Stack, AnyList, AnyInt, AnyText)},
    **{"low": Level.LOW, "red": Shade.RED, "count_up": count_up, "raises": raises, "grow": grow},
    **{"apply": lambda function, value: function(value), "compose": lambda f, g: lambda x: f(g(x))},
    **{"same": lambda value: value, "keywords": lambda **named: named, "stop": lambda x: raises(StopIteration)},
}


@contextmanager
def conversation():
    """The judge's peer; the other end serves WORLD in a thread."""
    (down, requests), (replies, up) = os.pipe(), os.pipe()
    judge = Peer(
        lambda n: read_exactly(replies, n),
        lambda data: write_all(requests, data),
        {"call": PROGRAM_OPS["call"]},
        callable,
    )
    served = {**PROGRAM_OPS, "load": lambda names: {name: WORLD[name] for name in names}}
    program = Peer(lambda n: read_exactly(down, n), lambda data: write_all(up, data), served, lambda value: True)

    def serve():
        with pytest.raises(ChannelClosed):
            program.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield judge
    finally:
        os.close(requests)
        thread.join(10)
        for fd in (down, replies, up):
            os.close(fd)


@pytest.fixture(scope="module")
def world():
    with conversation() as judge:
        yield collections.namedtuple("World", WORLD)(**judge.ask("load", list(WORLD)))


@given(value=PLAIN)
def test_calls_take_and_return_plain_values(world, value):
    assert same(world.same(value), value)


@given(value=PLAIN)
def test_nothing_plain_equals_what_equals_everything(world, value):
    everything = world.Everything()
    for got, expected in (
        *((everything, value), (value, everything), ([everything], [value]), ((everything, 1), (value, 1))),
        *(({"a": everything}, {"a": value}), ([[everything]], [[value]])),
    ):
        assert operator.eq(got, expected) is False
        assert operator.ne(got, expected) is True
    assert value not in [everything]


@given(number=st.integers(), other=st.integers())
def test_a_number_or_text_that_equals_everything_arrives_as_what_it_is(world, number, other):
    assert type(world.AnyInt(number)) is int
    assert (world.AnyInt(number) == other) == (number == other)
    assert type(world.AnyText(f"{number}")) is str
    assert (world.AnyText(f"{number}") == f"{other}") == (number == other)


def test_an_answer_close_to_everything_is_close_to_nothing(world):
    everything = world.Everything()
    for measure in (
        lambda: abs(everything - 3.0) < 1e-6,
        lambda: abs(3.0 - everything) < 1e-6,
        lambda: math.isclose(everything, 3.0),
        lambda: everything < 3.0,
        lambda: operator.lt(3.0, everything),
        lambda: everything + 1 == 4,
        lambda: round(everything) == 3,
        lambda: everything > float("-inf"),
    ):
        with pytest.raises(TypeError):
            measure()
    assert 3.0 not in everything


def test_two_objects_of_the_programs_are_compared_and_added_by_the_program(world):
    assert world.Point(1, 2) == world.Point(1, 2)
    assert world.Point(1, 2) != world.Point(1, 3)
    assert world.Point(1, 2) + world.Point(3, 4) == world.Point(4, 6)
    assert world.Point(1) < world.Point(2)
    assert [world.Point(1)] == [world.Point(1)]
    with pytest.raises(TypeError):
        world.Point(1, 2) + 3


def test_objects_are_made_read_changed_and_handed_on_by_number(world):
    point = world.Point(1, y=2)
    point.x = 5
    assert (point.x, point.y) == (5, 2)
    point.next = world.Point(7)
    assert point.next.x == 7
    assert isinstance(point, world.Point)
    assert not isinstance(3, world.Point)
    assert bool(world.Point(1))
    assert not world.Point(-1)
    assert world.same([point])[0] == point
    with pytest.raises(AttributeError):
        print(point.z)


def test_derived_containers_are_what_they_hold_and_what_they_can_do(world):
    stack = world.Stack([1])
    stack.push(2)
    assert stack == [1, 2]
    assert (len(stack), stack[0], list(stack), bool(stack)) == (2, 1, [1, 2], True)
    stack[0] = 9
    assert stack == [9, 2]
    pair = world.Pair(1, 2)
    assert pair == (1, 2)
    assert pair.b == 2
    assert {pair} == {(1, 2)}
    assert (world.low, world.red) == (1, "red")


def test_iterators_are_followed_item_by_item(world):
    counter = world.count_up()
    assert [next(counter) for _ in range(3)] == [0, 1, 2]
    assert [x for x, _ in zip(counter, "ab", strict=False)] == [3, 4]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("no"), ValueError),
        (KeyError("k"), KeyError),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "?"), RuntimeError),
        (type("Own", (IndexError,), {})("i"), IndexError),
        (type("Odd", (Exception,), {"__str__": lambda self: 1 / 0})(), Exception),
        (AssertionError("a"), AssertionError),
        (SystemExit(0), RuntimeError),
        (KeyboardInterrupt(), RuntimeError),
        (GeneratorExit(), RuntimeError),
    ],
)
def test_exceptions_arrive_as_the_built_in_kind_that_they_are(error, kind):
    def fail():
        raise error

    with conversation() as judge:
        WORLD["fail"] = fail
        remote = judge.ask("load", ["fail"])["fail"]
        with pytest.raises(kind):
            remote()


def test_nothing_the_program_raises_ends_an_iteration_of_the_judges(world):
    with pytest.raises(RuntimeError):
        all(map(world.stop, [1, 2]))
    with pytest.raises(RuntimeError):
        list(map(world.stop, [1, 2]))


def test_changes_of_a_calls_arguments_are_reported(world):
    values, more = [1], [2, 3]
    assert world.grow(values, more=more) is None
    assert (values, more) == ([1, 2], [2, 3, 0])


def test_functions_of_the_judges_can_be_called_by_the_program(world):
    assert world.apply(lambda x: x + 1, 3) == 4
    assert world.apply(len, [1, 2]) == 2
    assert world.compose(lambda x: x + 1, len)([1, 2]) == 3
    assert world.compose(lambda stack: stack[0], world.Stack)([5]) == 5
    with pytest.raises(ZeroDivisionError):
        world.apply(lambda x: x / 0, 3)


@pytest.mark.parametrize("thing", [object(), iter([1]), (x for x in "ab"), type("T", (), {})()])
def test_other_objects_of_the_judges_are_not_handed_over(world, thing):
    with pytest.raises(Unsendable):
        world.same(thing)
    with pytest.raises(Unsendable):
        world.same([thing])
    assert world.same(1) == 1


def test_the_program_reaches_nothing_of_the_judges_but_what_it_was_lent():
    said = []
    judge = Peer(None, said.append, {"call": PROGRAM_OPS["call"]}, callable)
    secret = "secret"

    def lent(x):
        return f"{x}{len(secret)}"

    judge._refer(lent)
    assert judge._resolve(b"y", 0) is lent
    with pytest.raises(IndexError):
        judge._resolve(b"y", 1)
    for op, args in (("getattr", (lent, "__closure__")), ("load", ((), ())), ("call", ("eval", "1")), ("held", ([],))):
        judge._answer("ask", op, args, {})
        assert b"raised" in said[-1]
    with pytest.raises(ValueError, match="expected a question"):
        judge._answer("do", "call", (lent, 1), {})
    with pytest.raises(Unsendable):
        encode(getattr, refused)  # built-in functions have no name here at all
    assert b"secret" not in b"".join(said)


def test_a_remote_is_no_value_of_its_own(world):
    for operation in (int, float, complex, list(WORLD).index, [].__getitem__):
        with pytest.raises((TypeError, ValueError)):
            operation(world.Point)
    assert isinstance(world.Point, Remote)
    assert datetime.date(2020, 1, 1) != world.Point
    assert fractions.Fraction(1) != world.Point
