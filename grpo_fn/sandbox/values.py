"""Plain values to bytes and back: what may pass between the judge and the program as itself.

A value is a tag, four bytes of size and a body. This file runs inside the sandbox on both sides, so it imports nothing,
for Python to start fast, and trusts nothing that comes in: bytes make numbers, texts, containers of them and a few
types of the standard library, never anything that runs.
"""

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
            raise ValueError(f"got {name}, wanted one of {', '.join(REBUILT)}")
        module, kind = name.rsplit(".", 1)
        return getattr(__import__(module), kind)(*self.value())

    def _take(self, size):
        self.at += size
        if self.at > len(self.data):
            raise ValueError(f"got {len(self.data)} bytes, wanted {self.at}")
        return self.data[self.at - size : self.at]


def held_type(value):
    """The built-in container that a value of a derived type is as well, None when it is none."""
    return next((kind for kind in COLLECTIONS if isinstance(value, kind)), None)
