"""The filter on system calls: what it denies, on every machine that it knows, and that it lets the rest through."""

import os
import re
import struct
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from grpo_fn.sandbox import isolation as rules

ALLOWED, EPERM, ENOSYS, KILLED = "allowed", "EPERM", "ENOSYS", "killed"
SAID = {rules.ALLOW: ALLOWED, rules.FAIL | 1: EPERM, rules.FAIL | 38: ENOSYS, rules.KILL: KILLED}
MACHINE = st.sampled_from(sorted(rules.MACHINES))
WORD = st.integers(0, 2**32 - 1) | st.sampled_from([1 << bit for bit in range(32)])


def verdict(machine, number, arguments=(), *, alone, arch=None):
    """What the kernel would make of a call: struct seccomp_data through the program, step by step."""
    data = struct.pack("=IIQ", number, rules.MACHINES[machine] if arch is None else arch, 0)
    data += struct.pack("=6Q", *[*arguments, *[0] * 6][:6])
    program = list(struct.iter_unpack("=HBBI", rules.syscall_filter(machine, alone=alone)))
    value, at = 0, 0
    while True:
        what, yes, no, constant = program[at]
        at += 1
        if what == 0x06:
            return SAID[constant]
        if what == 0x20:
            (value,) = struct.unpack_from("=I", data, constant)
        else:
            holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[what]
            at += yes if holds else no


def column(table, machine):
    place = list(rules.MACHINES).index(machine)
    return {numbers[place] for numbers in table.values() if numbers[place] is not None}


@given(MACHINE, st.booleans(), st.integers(0, 451), st.lists(WORD, max_size=6))
def test_a_call_is_denied_by_its_number_and_only_those_of_the_tables_are(machine, alone, number, arguments):
    said = verdict(machine, number, arguments, alone=alone)
    asked_about = {
        name: getattr(rules, name)[list(rules.MACHINES).index(machine)] for name in ("CLONE", "OPEN", "OPENAT")
    }
    if number in column(rules.OPAQUE, machine):
        assert said == ENOSYS
    elif number in column(rules.DENIED, machine) | (column(rules.DENIED_ALONE, machine) if alone else set()):
        assert said == EPERM
    elif number not in (*asked_about.values(), rules.PRLIMIT[list(rules.MACHINES).index(machine)]):
        assert said == ALLOWED


@given(MACHINE, st.booleans(), st.integers(452, 2**32 - 1))
def test_a_call_that_is_newer_than_the_tables_does_not_exist(machine, alone, number):
    assert verdict(machine, number, alone=alone) == ENOSYS


@given(MACHINE, st.booleans(), st.integers(0, 600), WORD)
def test_a_call_of_another_machine_kills(machine, alone, number, arch):
    expected = KILLED if arch != rules.MACHINES[machine] else verdict(machine, number, alone=alone)
    assert verdict(machine, number, alone=alone, arch=arch) == expected


NAMESPACES = [0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000]


@given(MACHINE, st.booleans(), WORD)
def test_clone_makes_no_namespace_and_alone_only_threads(machine, alone, flags):
    number = rules.CLONE[list(rules.MACHINES).index(machine)]
    denied = any(flags & bit for bit in NAMESPACES) or (alone and not flags & 0x10000)
    assert verdict(machine, number, [flags], alone=alone) == (EPERM if denied else ALLOWED)


@given(MACHINE, st.booleans(), WORD, WORD)
def test_alone_files_are_opened_for_reading_only(machine, alone, path, flags):
    place = list(rules.MACHINES).index(machine)
    writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    expected = EPERM if alone and writes else ALLOWED
    assert verdict(machine, rules.OPENAT[place], [path, path, flags], alone=alone) == expected
    if rules.OPEN[place] is not None:
        assert verdict(machine, rules.OPEN[place], [path, flags], alone=alone) == expected


@given(MACHINE, st.booleans(), WORD)
def test_alone_the_limits_of_no_other_process_are_changed(machine, alone, process):
    number = rules.PRLIMIT[list(rules.MACHINES).index(machine)]
    assert verdict(machine, number, [process], alone=alone) == (EPERM if alone and process else ALLOWED)


def numbers_in(header, place):
    names = re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", Path(header).read_text())
    return {name: (int(number), place) for name, number in names}


@pytest.mark.parametrize(
    ("header", "place"),
    [("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 0), ("/usr/include/asm-generic/unistd.h", 1)],
)
def test_the_numbers_are_those_of_the_kernels_headers(header, place):
    if not Path(header).exists():
        pytest.skip(f"NOT TESTED against the kernel's numbers: no {header} (linux-libc-dev)")
    found = numbers_in(header, place)
    named = {"clone": rules.CLONE, "open": rules.OPEN, "openat": rules.OPENAT, "prlimit64": rules.PRLIMIT}
    for name, numbers in {**rules.DENIED, **rules.DENIED_ALONE, **rules.OPAQUE, **named}.items():
        if place == 1 and numbers[1] is None:
            continue  # kept in that header for older machines than arm64, which has none of them
        assert found[name] == (numbers[place], place), name


def test_another_machine_is_refused():
    with pytest.raises(ValueError, match="got a riscv64 machine, expected x86_64 or aarch64"):
        rules.syscall_filter("riscv64", alone=False)
