"""The system calls that a sandboxed snippet may not make, as a BPF program (bubblewrap) and as a profile (podman).

Both are made from one list of rules. The rules refuse calls that expose the kernel to a snippet or escape the sandbox's
limits: keys, tracing, mounts, namespaces, io_uring, BPF, and memory that no process limit counts (memfd, System V IPC,
pipes).
"""

from __future__ import annotations

import platform
import struct
from errno import EAFNOSUPPORT, ENOSYS, EPERM

ARCHITECTURES = {"x86_64": (0, 0xC000003E, "SCMP_ARCH_X86_64"), "aarch64": (1, 0xC00000B7, "SCMP_ARCH_AARCH64")}
"""By `platform.machine()`: the column in the tables below, the kernel's AUDIT_ARCH number and libseccomp's name."""
X32 = 0x40000000
"""On x86_64, this bit in a call's number selects an x32 call, which would bypass a filter for x86_64 numbers."""
NEWEST = 462
"""Calls above this number are newer than this table. The filter answers them with ENOSYS, as an older kernel does."""
FAMILIES = (1, 2, 10)
"""Socket families that a snippet may use: AF_UNIX, AF_INET, AF_INET6. A snippet has its own loopback interface."""
NAMESPACES = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
"""The CLONE_NEW* flags: time, mount, cgroup, UTS, IPC, user, pid, network."""
TERMINAL = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, the ioctl requests that type into a terminal."""
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
# Each entry has a name, the number on x86_64 and the number on aarch64, or `-` if the processor lacks the call. clone3
# is refused because its flags are in memory, which a filter can't read. libc then falls back to clone.
ABSENT = """
    clone3 435 435, memfd_create 319 279, memfd_secret 447 447, shmget 29 194, msgget 68 186, semget 64 190
"""
# vmsplice can keep the pages of a process in pipes, which no process limit counts.
DENIED = """
    add_key 248 217, request_key 249 218, keyctl 250 219, io_uring_setup 425 425, io_uring_enter 426 426,
    io_uring_register 427 427, userfaultfd 323 282, ptrace 101 117, process_vm_readv 310 270,
    process_vm_writev 311 271, process_madvise 440 440, process_mrelease 448 448, pidfd_getfd 438 438,
    kcmp 312 272, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, open_tree 428 428,
    move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433,
    mount_setattr 442 442, unshare 272 97, setns 308 268, bpf 321 280, perf_event_open 298 241,
    fanotify_init 300 262, lookup_dcookie 212 18, name_to_handle_at 303 264, open_by_handle_at 304 265,
    init_module 175 105, finit_module 313 273, delete_module 176 106, kexec_load 246 104,
    kexec_file_load 320 294, reboot 169 142, swapon 167 224, swapoff 168 225, acct 163 89, quotactl 179 60,
    quotactl_fd 443 443, settimeofday 164 170, clock_settime 227 112, clock_adjtime 305 266, adjtimex 159 171,
    sethostname 170 161, setdomainname 171 162, syslog 103 116, vhangup 153 58, nfsservctl 180 42, iopl 172 -,
    ioperm 173 -, modify_ldt 154 -, mbind 237 235, set_mempolicy 238 237, set_mempolicy_home_node 450 450,
    migrate_pages 256 238, move_pages 279 239, vmsplice 278 75
"""
LOW = 0xFFFFFFFF
"""Arguments are compared by their low 32 bits, because the kernel also reads these arguments as 32-bit values."""
Rule = tuple[str, int, tuple[int, int, int] | None]
"""A table row, the error to answer with, and (argument, mask, value) if the call is refused only with that value."""
_SOCKETS = [
    (f"{call}", EAFNOSUPPORT, (0, LOW, family))
    for call in ("socket 41 198", "socketpair 53 199")
    for family in range(64)
    if family not in FAMILIES
]
RULES: list[Rule] = [
    *((row, ENOSYS, None) for row in ABSENT.split(",")),
    *((row, EPERM, None) for row in DENIED.split(",")),
    *_SOCKETS,
    *(("clone 56 220", EPERM, (0, flag, flag)) for flag in NAMESPACES),
    *(("ioctl 16 29", EPERM, (1, LOW, request)) for request in TERMINAL),
]


def architecture() -> tuple[int, int, str]:
    """Return this machine's entry in ARCHITECTURES. Raises OSError if the machine has no entry."""
    if platform.machine() not in ARCHITECTURES:
        raise OSError(f"the filter of system calls is for {' and '.join(ARCHITECTURES)}, not {platform.machine()}")
    return ARCHITECTURES[platform.machine()]


def program() -> bytes:
    """Return the filter as classic BPF for this machine, as read by `bwrap --seccomp FD`.

    A call for another architecture (32-bit x86, x32) kills the process. Raises OSError on an unknown machine.
    """
    column, arch, _ = architecture()
    load, equal, at_least, mask_by, answer = 0x20, 0x15, 0x35, 0x54, 0x06  # opcodes of BPF
    number = (load, 0, 0, 0)  # offsets in struct seccomp_data: number 0, architecture 4, arguments of 8 bytes from 16
    lines = [(load, 0, 0, 4), (equal, 1, 0, arch), (answer, 0, 0, KILL), number]
    lines += [(at_least, 0, 1, X32), (answer, 0, 0, KILL), (at_least, 0, 1, NEWEST + 1), (answer, 0, 0, ERRNO | ENOSYS)]
    for row, code, argument in RULES:
        call = row.split()[1 + column]
        if call == "-":
            continue
        refuse = [(answer, 0, 0, ERRNO | code)]
        if argument is not None:
            index, mask, value = argument
            refuse = [(load, 0, 0, 16 + 8 * index), (mask_by, 0, 0, mask), (equal, 0, 1, value), *refuse, number]
        lines += [(equal, 0, len(refuse), int(call)), *refuse]
    return b"".join(struct.pack("=HBBI", *line) for line in [*lines, (answer, 0, 0, ALLOW)])


def profile() -> dict[str, object]:
    """Return the same filter as JSON for a container engine's `--security-opt seccomp=FILE`."""
    rules: list[dict[str, object]] = []
    for row, code, argument in RULES:
        index, mask, value = argument or (0, 0, 0)
        condition = {"index": index, "op": "SCMP_CMP_MASKED_EQ", "value": mask, "valueTwo": value}
        conditions = [condition] if argument else []
        rules.append({"names": row.split()[:1], "action": "SCMP_ACT_ERRNO", "errnoRet": code, "args": conditions})
    return {"defaultAction": "SCMP_ACT_ALLOW", "architectures": [architecture()[2]], "syscalls": rules}
