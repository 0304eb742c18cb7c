"""The conversation of judge and program: plain values by value, everything else by a number.

The judge never holds an object of the program's, only plain values, made anew on its own side. What is not plain is a
`Remote` there: it can be called, its attributes read, its items gone through, each time by asking. It never equals a
plain value that it does not hold, whatever it would like to equal. This file runs inside the sandbox on both sides.
"""

import builtins
import operator
import os
import select
import time

# -- plain values to bytes and back


SURROGATES = "surrogatepass"
# Plain values: type to (tag, value to bytes, bytes to value).
SCALARS = {
    type(None): (b"N", lambda value: b"", lambda body: None),
    bool: (b"B", lambda value: b"1" if value else b"", bool),
    int: (b"i", lambda value: b"%x" % value, lambda body: int(body, 16)),  # decimal digits would cost their square
    float: (b"f", lambda value: value.hex().encode(), lambda body: float.fromhex(body.decode())),
    str: (b"s", lambda value: value.encode("utf-8", SURROGATES), lambda body: body.decode("utf-8", SURROGATES)),
    bytes: (b"b", bytes, bytes),
    bytearray: (b"a", bytes, bytearray),
    type: (b"T", lambda value: value.__name__.encode(), lambda body: TYPES[body.decode()]),
}
COLLECTIONS = {list: b"l", tuple: b"t", set: b"e", frozenset: b"z", dict: b"d"}
TYPES = {kind.__name__: kind for kind in (*SCALARS, *COLLECTIONS, complex, range) if kind is not type}
# Types of the standard library that are rebuilt on the other side: name to what their constructor is called with.
REBUILT = {
    "builtins.complex": lambda value: (value.real, value.imag),
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "collections.Counter": lambda value: (dict(value),),
    "collections.OrderedDict": lambda value: (list(value.items()),),
    "collections.defaultdict": lambda value: (None, dict(value)),
    "collections.deque": lambda value: (list(value), value.maxlen),
    "datetime.date": lambda value: (value.year, value.month, value.day),
    "datetime.datetime": lambda value: (*value.timetuple()[:6], value.microsecond, value.tzinfo),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
    "decimal.Decimal": lambda value: (str(value),),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
}
READ = {tag: read for tag, _, read in SCALARS.values()}
MADE = {tag: kind for kind, tag in COLLECTIONS.items()}
SIZE = 4


def encode(value, refer):
    """The bytes of a value; `refer(object)` are those of what is not plain."""
    out = []
    _put(value, refer, out)
    return b"".join(out)


def _put(value, refer, out):
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind in SCALARS and (kind is not type or TYPES.get(value.__name__) is value):
        tag, write, _ = SCALARS[kind]
        body = write(value)
        out += (tag, len(body).to_bytes(SIZE, "big"), body)
    elif kind in COLLECTIONS:
        items = [part for pair in value.items() for part in pair] if kind is dict else list(value)
        out += (COLLECTIONS[kind], len(items).to_bytes(SIZE, "big"))
        for item in items:
            _put(item, refer, out)
    elif name in REBUILT:
        body = name.encode()
        out += (b"r", len(body).to_bytes(SIZE, "big"), body)
        _put(tuple(REBUILT[name](value)), refer, out)
    else:
        out.append(refer(value))


class Reader:
    """Takes a value apart; `resolve(tag, number)` gives the objects that came as numbers."""

    def __init__(self, data, resolve):
        self.data, self.at, self.resolve = data, 0, resolve

    def value(self):
        tag, size = self._take(1), int.from_bytes(self._take(SIZE), "big")
        if tag in READ:
            return READ[tag](self._take(size))
        if tag in MADE:
            items = [self.value() for _ in range(size)] if size <= len(self.data) else self._take(size)
            return dict(zip(items[::2], items[1::2], strict=True)) if tag == b"d" else MADE[tag](items)
        if tag == b"r":
            return self._rebuilt(self._take(size).decode())
        return self.resolve(tag, size)

    def _rebuilt(self, name):
        if name not in REBUILT:
            raise ValueError(f"got {name}, expected one of {', '.join(REBUILT)}")
        module, kind = name.rsplit(".", 1)
        return getattr(__import__(module), kind)(*self.value())

    def _take(self, size):
        self.at += size
        if self.at > len(self.data):
            raise ValueError(f"got {len(self.data)} bytes, expected {self.at}")
        return self.data[self.at - size : self.at]


def held_type(value):
    """The built-in container that a value of a derived type is as well, None when it is none."""
    return next((kind for kind in COLLECTIONS if isinstance(value, kind)), None)


class ChannelClosed(BaseException):
    """The conversation is over; says why."""


class Unsendable(TypeError):
    """An object of the tests' own that has no form the program could be sent."""


class Remote:
    """An object of the other side's."""

    __slots__ = ("__holds", "__number", "__peer")

    def __init__(self, peer, number, holds):
        for name, value in (("peer", peer), ("number", number), ("holds", holds)):
            object.__setattr__(self, f"_Remote__{name}", value)

    def __instancecheck__(self, value):
        return self.__peer.ask("isinstance", value, self) is True

    def __subclasscheck__(self, kind):
        return self.__peer.ask("issubclass", kind, self) is True

    def __eq__(self, other):
        """Another object of its own side it may be compared with there; a plain value only as the plain value it is."""
        if isinstance(other, Remote):
            return self.__number == other.__number or self.__peer.ask("eq", self, other) is True
        return self.__holds and _plain(self.__peer.ask("held", self)) == other

    def __hash__(self):
        """As of the plain value that it holds, or what its own side says: equal objects have equal ones."""
        return hash(_plain(self.__peer.ask("held", self))) if self.__holds else self.__peer.ask("hash", self)

    def __contains__(self, item):
        """As its class says if the problem names it; else what it goes through, or all would be in what holds all."""
        if any(self.__peer.ask("isinstance", self, kind) is True for kind in self.__peer.classes):
            return self.__peer.ask("contains", self, item) is True
        return any(item == held for held in self)

    def __exit__(self, kind, error, trace):
        return self.__peer.ask("exit", self, *(("", "") if error is None else _described(error))) is True

    def __deepcopy__(self, memo):
        return self.__peer.ask("deepcopy", self)

    def __mro_entries__(self, bases):
        raise Unsendable("got a class that is derived from the program's, expected plain data or a function")


def _plain(value):
    return None if isinstance(value, Remote) else value


def _of_its_side(name):
    """An operation that is carried out where the object lives."""
    return lambda self, /, *args, **kwargs: self._Remote__peer.ask(name, self, *args, **kwargs)


for _name in ("call", "getattr", "setattr", "delattr", "getitem", "setitem", "delitem", "len", "bool"):
    setattr(Remote, f"__{_name}__", _of_its_side(_name))
for _name in ("str", "repr", "format", "iter", "next", "reversed", "neg", "pos", "abs", "invert", "enter", "copy"):
    setattr(Remote, f"__{_name}__", _of_its_side(_name))


def _of_one_side(name):
    """An operator that is carried out where both operands live, and not at all where only one lives there."""

    def operate(self, other):
        if not isinstance(other, Remote):
            return NotImplemented  # or an object whose difference to everything is 0 would be close to everything
        return self._Remote__peer.ask(name, self, other)

    return operate


OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and_",
    "or_",
    "xor",
    "lt",
    "le",
    "gt",
    "ge",
)
for _name in OPERATORS:
    setattr(Remote, f"__{_name.rstrip('_')}__", _of_one_side(_name))


# What is beneath a value of a type derived from one of these, past whatever it says of itself.
BARE = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: bytes.__bytes__,
}


class Peer:
    """One end of the conversation: asks, and answers what the other end asks meanwhile.

    `read(size)` and `write(data)` move bytes; `ops` are the things that may be asked for here, by name; `lends(object)`
    says whether the other end may have a number for an object of this one.
    """

    def __init__(self, read, write, ops, lends):
        self.read, self.write, self.ops, self.lends = read, write, ops, lends
        self.lent, self.number_of = [], {}
        self.classes = []  # of the other end's, whose objects are asked what is in them

    def ask(self, op, /, *args, **kwargs):
        """What `op` of the arguments is at the other end; raises what it raised there."""
        self._write(encode(("ask", op, args, kwargs), self._refer))
        while True:
            kind, *rest = self._receive()
            if kind == "value":
                result, changed = rest
                for argument, new in zip((*args, *kwargs.values()), changed, strict=True):
                    _restore(argument, new)
                return result
            if kind == "raised":
                raise _exception(*rest, stops=op == "next")
            self._answer(kind, *rest)

    def serve(self):
        """Answer until the other end is gone."""
        while True:
            self._answer(*self._receive())

    def _answer(self, kind, op, args, kwargs):
        if kind != "ask":
            raise ValueError(f"got {kind!r}, expected a question or an answer")
        try:
            result = self.ops[op](*args, **kwargs)
            changed = tuple(map(_changeable, (*args, *kwargs.values())))
            reply = encode(("value", result, changed), self._refer)
        except ChannelClosed:
            raise
        except BaseException as error:
            reply = encode(("raised", *_described(error)), self._refer)
        self._write(reply)

    def _write(self, data):
        self.write(len(data).to_bytes(SIZE, "big") + data)

    def _receive(self):
        return Reader(self.read(int.from_bytes(self.read(SIZE), "big")), self._resolve).value()

    def _refer(self, value):
        if isinstance(value, Remote) and value._Remote__peer is self:
            return b"y" + value._Remote__number.to_bytes(SIZE, "big")
        for kind, bare in BARE.items():
            if isinstance(value, kind):
                return encode(bare(value), self._refer)
        if not self.lends(value):
            raise Unsendable(f"got an object of type {type(value).__name__}, expected plain data or a function")
        number = self.number_of.setdefault(id(value), len(self.lent))
        if number == len(self.lent):
            self.lent.append(value)
        return (b"m" if held_type(value) is None else b"h") + number.to_bytes(SIZE, "big")

    def _resolve(self, tag, number):
        if tag == b"y":
            return self.lent[number]
        if tag in (b"m", b"h"):
            return Remote(self, number, tag == b"h")
        raise ValueError(f"got tag {tag!r}, expected one that is known")


def _changeable(argument):
    """What a caller sees of an argument afterwards, where a call can change it."""
    return argument if type(argument) in (list, dict, set, bytearray) else None


def _equal(one, other):
    """Whether they are; a signalling NaN, which refuses to be compared, is not."""
    try:
        return bool(one == other)
    except ArithmeticError:
        return False


def _restore(argument, new):
    """Give an argument the value that the call at the other end left it with."""
    if type(argument) is not type(new) or _equal(argument, new):
        return
    if isinstance(argument, list | bytearray):
        argument[:] = new
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(new)


def _described(error):
    """The nearest built-in type of an exception, and its text."""
    base = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    try:
        return base, f"{error}"[:2000]
    except BaseException:
        return base, ""


def _exception(base, text, *, stops):
    """An exception of this side's like that of the other. Only an iterator's end may end an iteration."""
    kind = getattr(builtins, base, None)
    known = isinstance(kind, type) and issubclass(kind, Exception) and kind is not StopIteration
    if stops and base == "StopIteration":
        return StopIteration()
    try:
        return kind(text) if known else RuntimeError(f"{base}: {text}")
    except TypeError:  # the UnicodeErrors want more than a text
        return RuntimeError(f"{base}: {text}")


def _raised(base, text):
    """The arguments of `__exit__` for an exception of the other side's, or for none."""
    error = _exception(base, text, stops=False) if base else None
    return (None if error is None else type(error)), error, None


# -- the judge's end of the pipes to the program: keeps the time, counts what comes, and notices who is gone


CHUNK = 65536
START_SECONDS = 30.0  # for the program's process to be shut in
START_BYTES = 2**16


class Channel:
    """Requests out, replies and printed text in, all of them pipes; `life` hangs up when the caller outside is gone.

    Every method raises ChannelClosed when the conversation is over, and goes on doing so.
    """

    def __init__(self, requests, replies, output, life):
        self.requests, self.replies, self.output, self.life = requests, replies, output, life
        self.incoming, self.text, self.over = bytearray(), bytearray(), ""
        self.closed = False  # on the program's side
        self.seconds, self.most = START_SECONDS, START_BYTES
        self.left, self.due = START_BYTES, time.monotonic() + START_SECONDS
        self.poll = select.poll()
        for fd in (replies, output, life):
            self.poll.register(fd, select.POLLIN)
        os.set_blocking(requests, False)

    def first(self):
        """The first line that the program's process says, of its own accord."""
        try:
            while b"\n" not in self.incoming:
                self._wait()
        except ChannelClosed as ended:
            return f"the program's process: {ended}"
        line, _, self.incoming = self.incoming.partition(b"\n")
        return line.decode(errors="replace")

    def begin(self, seconds, most):
        """From now on the program has `seconds` of wall clock, and `most` bytes to print and to answer with."""
        self.seconds, self.most = seconds, most
        self.due, self.left = time.monotonic() + seconds, most

    def check(self):
        """Raises ChannelClosed if a wait did: a test may have caught it."""
        if self.over:
            raise ChannelClosed(self.over)

    def read(self, size):
        """So many bytes of the replies."""
        while len(self.incoming) < size:
            self._wait()
        data = bytes(self.incoming[:size])
        del self.incoming[:size]
        return data

    def write(self, data):
        """Send it all."""
        self.check()
        while data:
            try:
                data = data[os.write(self.requests, data) :]
            except BlockingIOError:
                self.poll.register(self.requests, select.POLLOUT)
                self._wait()
                self.poll.unregister(self.requests)
            except BrokenPipeError:
                self.closed = True
                self._end("the program ended")

    def take_output(self):
        """What the program printed, with what may still be in the pipe."""
        if select.select([self.output], [], [], 0)[0]:
            self.text += os.read(self.output, CHUNK)
        return self.text.decode(errors="replace")

    def _wait(self):
        """Take in what has come, as soon as there is something."""
        self.check()
        seconds = self.due - time.monotonic()
        ready = self.poll.poll(1000 * seconds) if seconds > 0 else []
        if not ready:
            self._end(f"over the wall time of {self.seconds:g} s")
        for fd, _ in ready:
            if fd != self.requests:
                self._take(fd)

    def _take(self, fd):
        data = os.read(fd, CHUNK)
        self.left -= len(data)
        if fd == self.life:
            self._end("the parent no longer waits for the verdict")
        if fd == self.replies and not data:
            self.closed = True
            self._end("the program ended")
        if self.left < 0:
            self._end(f"over the output limit of {self.most // 1024} kB, printed and answered together")
        if data:
            target = self.incoming if fd == self.replies else self.text
            target += data
        else:
            self.poll.unregister(fd)

    def _end(self, reason):
        self.over = reason
        raise ChannelClosed(reason)


def read_exactly(fd, size):
    """So many bytes from a descriptor. Raises ChannelClosed when it ends before."""
    data = bytearray()
    while len(data) < size:
        if not (more := os.read(fd, size - len(data))):
            raise ChannelClosed("the judge ended")
        data += more
    return bytes(data)


def write_all(fd, data):
    """Write it all."""
    while data:
        data = data[os.write(fd, data) :]


# What the program does for the judge.
PROGRAM_OPS = {
    "call": lambda function, /, *args, **kwargs: function(*args, **kwargs),
    "held": lambda value: held_type(value)(value),
    "enter": lambda value: type(value).__enter__(value),
    "exit": lambda value, base, text: type(value).__exit__(value, *_raised(base, text)),
    "copy": lambda value: __import__("copy").copy(value),
    "deepcopy": lambda value: __import__("copy").deepcopy(value),
    **{op.__name__: op for op in (getattr, setattr, delattr, len, bool, str, repr, format, iter, next, reversed)},
    **{op.__name__: op for op in (hash, abs, isinstance, issubclass)},
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem", "contains", "neg", "pos", "invert")},
    **{name: getattr(operator, name) for name in ("eq", *OPERATORS)},
}
