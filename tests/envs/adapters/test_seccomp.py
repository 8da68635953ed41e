"""The filter of system calls: its table agrees with libseccomp's, and its program answers as the table says."""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import platform
import struct

import pytest

from tapereel.envs.adapters import seccomp

ROWS = sorted({row.strip() for row, _, _ in seccomp.RULES})
MACHINES = pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)


@MACHINES
def test_the_numbers_are_those_of_libseccomp(machine: str):
    library = ctypes.CDLL(ctypes.util.find_library("seccomp") or "libseccomp.so.2")
    column, arch, _ = seccomp.ARCHITECTURES[machine]
    for row in ROWS:
        name, *numbers = row.split()
        known = library.seccomp_syscall_resolve_name_arch(ctypes.c_uint32(arch), name.encode())
        assert (numbers[column] == "-") == (known < 0), row
        assert known < 0 or int(numbers[column]) == known, row


def answer(program: bytes, number: int, arch: int, *arguments: int) -> int:
    """What the kernel's interpreter of classic BPF returns for a call."""
    data = struct.pack("=IIQ6Q", number & 0xFFFFFFFF, arch, 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    lines, at, value = list(struct.iter_unpack("=HBBI", program)), 0, 0
    while True:
        code, then, otherwise, k = lines[at]
        at += 1
        if code == 0x06:
            return k
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, k)
        elif code == 0x54:
            value &= k
        else:
            holds = value == k if code == 0x15 else value >= k
            at += then if holds else otherwise


@MACHINES
def test_the_program_answers_as_the_table_says(machine: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    program, (column, arch, _) = seccomp.program(), seccomp.ARCHITECTURES[machine]
    assert len(program) // 8 < 4096, "the kernel's limit of instructions"
    number = {row.split()[0]: row.split()[1 + column] for row in ROWS}
    refused, absent = seccomp.ERRNO | errno.EPERM, seccomp.ERRNO | errno.ENOSYS
    for row in ROWS:
        name, found = row.split()[0], row.split()[1 + column]
        if name not in ("clone", "ioctl", "socket", "socketpair") and found != "-":
            assert answer(program, int(found), arch) in (refused, absent), row
    assert answer(program, int(number["clone"]), arch, 0x1200011) == seccomp.ALLOW
    for flag in seccomp.NAMESPACES:
        assert answer(program, int(number["clone"]), arch, flag | 17) == refused
    for request in seccomp.TERMINAL:
        assert answer(program, int(number["ioctl"]), arch, 0, request | 1 << 40) == refused
    assert answer(program, int(number["ioctl"]), arch, 0, 0x5401) == seccomp.ALLOW
    for family in range(46):
        expected = seccomp.ALLOW if family in seccomp.FAMILIES else seccomp.ERRNO | errno.EAFNOSUPPORT
        assert answer(program, int(number["socket"]), arch, family) == expected
    others = {a for _, a, _ in seccomp.ARCHITECTURES.values()} - {arch} | {0x40000003}
    assert {answer(program, 0, other) for other in others} == {seccomp.KILL}
    assert answer(program, seccomp.X32 | 39, arch) == seccomp.KILL
    assert answer(program, -1, arch) == seccomp.KILL
    assert answer(program, 1000, arch) == absent
    assert answer(program, 0, arch) == seccomp.ALLOW


def test_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match=r"x86_64.*aarch64.*riscv64"):
        seccomp.program()
