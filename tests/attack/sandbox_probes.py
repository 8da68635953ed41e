"""Attacks on the sandbox, run as whoever starts this script: `python -m ...sandbox_probes BACKEND` prints JSON.

Each attack is a snippet that prints a line for whatever it reached. The host beside it has what a user has: sockets in
folders, servers, keys, secret files, a process, another sandbox. `{name: what was reached}`; an empty text: it held.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tapereel.envs.adapters import Sandbox, seccomp
from tapereel.envs.adapters.sandbox_backends import FIRST_UID

from .sandbox_limits import LIMITS, run

SECRET = "tapereel-secret-4711"
NUMBERS = {
    row.split()[0]: int(row.split()[1 + seccomp.architecture()[0]])
    for row, _, _ in seccomp.RULES
    if row.split()[1 + seccomp.architecture()[0]] != "-"
}
PRELUDE = """
import ctypes, errno, fcntl, glob, json, mmap, os, signal, socket, struct, subprocess, sys, time
HOST = json.loads({host!r})
NUMBERS = {numbers!r}
libc = ctypes.CDLL(None, use_errno=True)
def reached(what, value=""):
    print("REACHED", what, repr(value)[:200], flush=True)
def attempt(what, act, *arguments):
    try:
        value = act(*arguments)
    except (OSError, subprocess.SubprocessError) as error:
        return error
    reached(what, value)
def call(name, *arguments):
    number = name if isinstance(name, int) else NUMBERS[name]
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def read(path, size=4096):
    with open(path, "rb") as file:
        return file.read(size)
def create(path):
    with open(path, "w") as file:
        file.write("planted")
    return path
def connect(family, address, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as one:
        one.settimeout(3)
        one.connect(address)
        if kind == socket.SOCK_DGRAM:
            one.send(b"datagram")
        return address
"""

REACHES: dict[str, str] = {
    # Sockets
    "tcp loopback": "attempt('tcp', connect, socket.AF_INET, ('127.0.0.1', HOST['tcp']))",
    "tcp loopback, version 6": "attempt('tcp6', connect, socket.AF_INET6, ('::1', HOST['tcp6']))",
    "tcp to the machine's own address": "attempt('tcp', connect, socket.AF_INET, (HOST['address'], HOST['tcp']))",
    # A connected UDP socket needs a route, and sends nothing.
    "route to another network": "attempt('4', socket.socket(2, socket.SOCK_DGRAM).connect, ('192.0.2.1', 9))",
    "route, version 6": "attempt('6', socket.socket(10, socket.SOCK_DGRAM).connect, ('2001:db8::1', 9))",
    "udp loopback": "connect(socket.AF_INET, ('127.0.0.1', HOST['udp']), socket.SOCK_DGRAM)",
    "table of routes": "for line in open('/proc/net/route').readlines()[1:]: reached('route', line)",
    "abstract socket": "attempt('abstract', connect, socket.AF_UNIX, chr(0) + HOST['abstract'])",
    "path socket in /tmp": "attempt('path', connect, socket.AF_UNIX, HOST['sockets'][0])",
    "path socket at home": "attempt('path', connect, socket.AF_UNIX, HOST['sockets'][1])",
    "path socket of datagrams": "attempt('path', connect, socket.AF_UNIX, HOST['datagrams'], socket.SOCK_DGRAM)",
    "path sockets of the system": """
for path in ('/run/dbus/system_bus_socket', '/var/run/docker.sock', '/run/podman/podman.sock', '/run/user/%d/bus' %
             HOST['uid'], '/tmp/tmux-%d/default' % HOST['uid'], '/run/systemd/private', '/dev/log'):
    attempt(path, connect, socket.AF_UNIX, path)
""",
    "any socket that can be found": """
for top, _, names in os.walk('/'):
    if top.startswith('/proc'):
        continue
    for name in names:
        try:
            if (os.lstat(os.path.join(top, name)).st_mode & 0o170000) == 0o140000:
                reached('socket', os.path.join(top, name))
        except OSError:
            pass
""",
    "netlink": "attempt('netlink', socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "vsock": "attempt('vsock', socket.socket, 40, socket.SOCK_STREAM, 0)",
    "packet and raw sockets": """
attempt('packet', socket.socket, socket.AF_PACKET, socket.SOCK_RAW, 0)
attempt('raw', socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)
""",
    "kernel crypto sockets": "attempt('alg', socket.socket, 38, socket.SOCK_SEQPACKET, 0)",
    # Writes
    "write to the host's /tmp": "os.path.exists(HOST['tmp']) and reached('seen', HOST['tmp']); "
    "attempt('write', create, HOST['tmp'] + '/planted')",
    "write to the host's /dev/shm": "create('/dev/shm/planted-4711')",
    "write to /var/tmp": "attempt('write', create, '/var/tmp/planted-4711')",
    "write to the home folder": "attempt('write', create, HOST['home'] + '/planted')",
    "write to the system": """
for folder in ('/', '/usr', '/usr/bin', '/usr/local/lib', '/etc', '/run', '/home', '/dev', '/var', '/opt', '/sys'):
    attempt('write', create, folder + '/planted-4711')
attempt('open', os.open, '/usr/bin/env', os.O_WRONLY)
""",
    "write to the interpreter": "attempt('write', create, os.path.dirname(os.__file__) + '/planted.py'); "
    "attempt('write', create, sys.prefix + '/planted')",
    "write to another run": "attempt('write', open, HOST['run'] + '/tapes.jsonl', 'a')",
    "write to kernel settings": """
for path in ('/proc/sys/kernel/hostname', '/proc/sys/kernel/core_pattern', '/proc/sys/vm/overcommit_memory',
             '/proc/sys/kernel/randomize_va_space', '/proc/sysrq-trigger', '/proc/sys/user/max_user_namespaces'):
    attempt(path, os.open, path, os.O_WRONLY)
""",
    "/sys": "[reached('sys', path) for path in glob.glob('/sys/*')]",
    "remount": """
attempt('mount', call, 'mount', b'none', b'/', None, 32 | 4096, None)
attempt('mount', call, 'mount', b'tmpfs', b'/work', b'tmpfs', 0, None)
attempt('umount', call, 'umount2', b'/usr', 2)
attempt('remount by command', subprocess.check_output, ['mount', '-o', 'remount,rw', '/usr'], stderr=2) if 0 else None
""",
    # Processes
    "sees other processes": """
for path in glob.glob('/proc/[0-9]*/cmdline'):
    if not read(path).startswith((b'/usr/bin/bwrap', b'/bin/sh', sys.executable.encode())):
        reached('process', read(path))
os.path.exists('/proc/%d' % HOST['victim']) and HOST['victim'] > 50 and reached('process', HOST['victim'])
""",
    "signals other processes": """
for pid in (HOST['victim'], HOST['runner']):
    attempt('kill', os.kill, pid, signal.SIGTERM) if pid > 50 else None
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(-1, signal.SIGTERM) if len(glob.glob('/proc/[0-9]*')) > 2 else None
""",
    "ptrace": """
attempt('ptrace', call, 'ptrace', 0x4206, os.getppid(), 0, 0)
attempt('traceme', call, 'ptrace', 0, 0, 0, 0)
""",
    "memory of other processes": """
buffer = ctypes.create_string_buffer(64)
vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 64)
attempt('read', call, 'process_vm_readv', os.getpid(), vector, 1, vector, 1, 0)
attempt('kcmp', call, 'kcmp', os.getpid(), os.getpid(), 0, 0, 0)
""",
    "descriptors of other processes": """
attempt('pidfd', call, 'pidfd_getfd', os.pidfd_open(os.getpid()), 0, 0)
for path in glob.glob('/proc/1/fd/*') + ['/proc/1/root/etc/passwd', '/proc/1/cwd']:
    if not path.endswith(('/0', '/1', '/2', 'passwd', 'cwd')) and os.readlink(path) != '/dev/null':
        attempt(path, os.open, path, os.O_RDONLY)
status = read('/proc/1/status').decode()  # the same rights as the snippet's, whose user it has
for line in ('CapEff:\\t0000000000000000', 'NoNewPrivs:\\t1', 'Seccomp:\\t2'):
    line in status or reached(line, status)
""",
    "environment of other processes": """
for path in glob.glob('/proc/[0-9]*/environ'):
    try:
        HOST['secret'].encode() in read(path, 1 << 16) and reached('environment', path)
    except OSError:
        pass
""",
    # Reads
    "ssh keys": "attempt('read', read, HOST['home'] + '/.ssh/id_ed25519')",
    "tokens": "attempt('read', read, HOST['home'] + '/.cache/huggingface/token')",
    "other runs": "attempt('read', read, HOST['run'] + '/tapes.jsonl')",
    "held-out answers in the repository": "attempt('read', read, HOST['repository'] + '/pyproject.toml')",
    "files of the user, searched": """
for top, _, names in os.walk('/'):
    if not top.startswith('/proc'):
        for name in names:
            HOST['secret'] in name and reached('file', os.path.join(top, name))
""",
    "users and passwords of the machine": """
attempt('shadow', read, '/etc/shadow')
b'root' in read('/etc/passwd') and HOST['user'].encode() in read('/etc/passwd') and reached('users')
attempt('machine', read, '/etc/machine-id')
""",
    "disks and memory of the kernel": """
for path in ('/proc/kcore', '/proc/kmsg', '/dev/mem', '/dev/kmsg', '/dev/vda', '/dev/sda', '/dev/nvme0n1'):
    attempt(path, os.open, path, os.O_RDONLY)
""",
    "files by handle": "attempt('handle', call, 'open_by_handle_at', -100, b'\\0' * 32, 0)",
    # Keys
    "session keyring": """
attempt('search', call, 'keyctl', 10, ctypes.c_int(-3), b'user', HOST['secret'].encode(), 0)
attempt('search', call, 'keyctl', 10, ctypes.c_int(-4), b'user', HOST['secret'].encode(), 0)
attempt('id', call, 'keyctl', 0, ctypes.c_int(-3), 1)
attempt('read', call, 'keyctl', 11, HOST['key'], None, 0)
""",
    "add a key": "attempt('add', call, 'add_key', b'user', b'planted', b'x', 1, ctypes.c_int(-4))",
    "request a key": "attempt('request', call, 'request_key', b'user', HOST['secret'].encode(), None, 0)",
    "lists of keys": """
for name in ('/proc/keys', '/proc/key-users'):
    try:
        read(name) and reached(name, read(name))
    except OSError:
        pass
""",
    # System calls
    "user namespaces": """
attempt('unshare', call, 'unshare', 0x10000000)
attempt('unshare', call, 'unshare', 0x10000000 | 0x20000)
attempt('clone', call, 'clone', 0x10000000 | 17, None, None, None, None)
error = attempt('clone3', call, 'clone3', b'\\0' * 88, 88)
error is None or error.errno == errno.ENOSYS or reached('clone3', error)
""",
    "setns": "attempt('setns', call, 'setns', os.open('/proc/self/ns/net', os.O_RDONLY), 0)",
    "io_uring": "attempt('io_uring', call, 'io_uring_setup', 8, b'\\0' * 120)",
    "userfaultfd": "attempt('userfaultfd', call, 'userfaultfd', 1)",
    "bpf and perf": """
attempt('bpf', call, 'bpf', 0, b'\\0' * 64, 64)
attempt('perf', call, 'perf_event_open', b'\\0' * 112, 0, -1, -1, 0)
""",
    "new mounts": """
attempt('fsopen', call, 'fsopen', b'tmpfs', 0)
attempt('open_tree', call, 'open_tree', -100, b'/', 1)
attempt('pivot_root', call, 'pivot_root', b'.', b'.')
attempt('chroot', call, 'chroot', b'/work')
""",
    "memory that no process holds": """
attempt('memfd', call, 'memfd_create', b'x', 0)
attempt('shm', call, 'shmget', 0, 1 << 20, 0o1600)
attempt('msg', call, 'msgget', 0, 0o1600)
attempt('sem', call, 'semget', 0, 1, 0o1600)
""",
    "every call of the list answers with an error": """
for name, number in NUMBERS.items():
    if name in ('socket', 'socketpair', 'clone', 'ioctl'):
        continue
    error = attempt(name, call, number, -1, -1, -1, -1, -1)
    error is None or error.errno in (errno.EPERM, errno.ENOSYS) or reached(name, error)
""",
    "calls newer than the list": "error = attempt('new', call, 1000); "
    "error is None or error.errno == errno.ENOSYS or reached('new', error)",
    "more rights": """
status = read('/proc/self/status').decode()
for line in ('CapEff:\\t0000000000000000', 'CapPrm:\\t0000000000000000', 'NoNewPrivs:\\t1', 'Seccomp:\\t2'):
    line in status or reached(line, status)
os.getresuid() == (65534,) * 3 and os.getresgid() == (65534,) * 3 or reached('user', os.getresuid())
attempt('setuid', os.setuid, 0)
for group in os.getgroups():
    group == 65534 or reached('group', group)
subprocess.run(['/usr/bin/su', '-c', 'id'], stdin=subprocess.DEVNULL, capture_output=True).returncode or reached('su')
""",
    # Devices
    "devices": """
for path in ('/dev/fuse', '/dev/net/tun', '/dev/kvm', '/dev/vhost-vsock', '/dev/loop-control', '/dev/dri', '/dev/vda'):
    os.path.exists(path) and reached(path)
attempt('block device', os.mknod, '/work/disk', 0o60600, os.makedev(254, 0))
attempt('character device', os.mknod, '/tmp/mem', 0o20600, os.makedev(1, 1))
""",
    "typing into the terminal": """
for number in (0, 1, 2):
    attempt('TIOCSTI', fcntl.ioctl, number, 0x5412, b'x')
    attempt('TIOCLINUX', fcntl.ioctl, number, 0x541C, b'x')
master, terminal = os.openpty()
for request in (0x5412, 0x541C):
    error = attempt('own terminal', fcntl.ioctl, terminal, request, b'x')
    error is None or error.errno == errno.EPERM or reached('ioctl', error)
    result = libc.ioctl(terminal, ctypes.c_ulong(request | 1 << 32), b'x')
    result >= 0 and reached('ioctl with high bits')
attempt('tty', os.open, '/dev/tty', os.O_RDWR)
""",
    # What it starts with
    "inherited descriptors": """
for name in os.listdir('/proc/self/fd'):
    if int(name) > 2:
        try:
            where = os.readlink('/proc/self/fd/' + name)
        except OSError:
            continue
        where.endswith('/fd') or reached('descriptor', where)
read('/proc/self/fd/0') and reached('stdin')
""",
    "environment": """
set(os.environ) <= {'PATH', 'HOME', 'TMPDIR', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PWD', 'HOSTNAME',
                    'LC_CTYPE', 'SHLVL', '_', 'OLDPWD'} or reached('variables', dict(os.environ))
HOST['secret'] in str(os.environ) and reached('secret')
""",
    "another sandbox": """
os.path.exists('/work/other') and reached('file')
attempt('abstract', connect, socket.AF_UNIX, chr(0) + 'other-sandbox')
os.path.exists('/dev/shm/other') and reached('memory')
""",
}

KILLED_BY_FILTER = {
    "32-bit calls": """
page = mmap.mmap(-1, 4096, prot=7)
page.write(bytes.fromhex('53b814000000cd805bc3'))  # push rbx; mov eax, 20; int 0x80; pop rbx; ret
act = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
reached('int 0x80', act())
""",
    "x32 calls": "reached('x32', libc.syscall(ctypes.c_long(0x40000000 + 39)))",
}
"""x86_64 only: the filter kills the process."""


class Host:
    """What a user has beside its sandbox, and what arrived there."""

    def __init__(self) -> None:
        self.home = Path.home()
        self.tmp = Path(tempfile.mkdtemp(prefix="probe-host-"))
        self.tmp.chmod(0o755)
        self.connected: list[str] = []
        self.run = self.tmp / "runs"
        (self.run).mkdir()
        secrets = [self.home / ".ssh/id_ed25519", self.home / ".cache/huggingface/token", self.run / "tapes.jsonl"]
        self.made = [path for path in (*secrets, self.home / SECRET) if not path.exists()]
        for path in self.made:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(SECRET)
        self.victim = subprocess.Popen(["sleep", "4712"], env={"TOKEN": SECRET})
        self.paths = [str(self.tmp / "socket"), str(self.home / f"{SECRET}.sock")]
        self.listening = [self.listen(socket.AF_UNIX, path) for path in self.paths]
        self.datagrams = self.listen(socket.AF_UNIX, str(self.tmp / "datagrams"), socket.SOCK_DGRAM)
        self.tcp = self.listen(socket.AF_INET, ("", 0))
        self.tcp6 = self.listen(socket.AF_INET6, ("::1", 0))
        self.udp = self.listen(socket.AF_INET, ("127.0.0.1", 0), socket.SOCK_DGRAM)
        self.abstract = f"{SECRET}-{os.getpid()}"
        self.listen(socket.AF_UNIX, "\0" + self.abstract)
        libc = ctypes.CDLL(None)
        self.key = libc.syscall(NUMBERS["add_key"], b"user", SECRET.encode(), SECRET.encode(), len(SECRET), -3)
        os.environ["TOKEN"] = SECRET

    def listen(self, family: int, address: object, kind: int = socket.SOCK_STREAM) -> socket.socket:
        one = socket.socket(family, kind)
        one.bind(address)  # type: ignore[arg-type]
        if isinstance(address, str) and not address.startswith("\0"):
            os.chmod(address, 0o777)
        if kind == socket.SOCK_STREAM:
            one.listen()
        threading.Thread(target=self.serve, args=(one, str(address), kind), daemon=True).start()
        return one

    def serve(self, one: socket.socket, name: str, kind: int) -> None:
        while True:
            if kind == socket.SOCK_STREAM:
                one.accept()[0].close()
            else:
                one.recv(100)
            self.connected.append(name)

    def facts(self) -> dict[str, object]:
        found = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
        return {
            "address": next((word for word in found if "." in word), "127.0.0.1"),
            "tcp": self.tcp.getsockname()[1],
            "tcp6": self.tcp6.getsockname()[1],
            "udp": self.udp.getsockname()[1],
            "abstract": self.abstract,
            "sockets": self.paths,
            "datagrams": str(self.tmp / "datagrams"),
            "tmp": str(self.tmp),
            "home": str(self.home),
            "run": str(self.run),
            "repository": str(Path(__file__).resolve().parents[2]),
            "victim": self.victim.pid,
            "runner": os.getpid(),
            "secret": SECRET,
            "key": self.key,
            "uid": os.getuid(),
            "user": os.environ.get("USER", "root"),
        }

    def harmed(self) -> str:
        """What a snippet did to the host, in one line."""
        found = [f"{name} was reached" for name in self.connected]
        self.connected.clear()
        if self.victim.poll() is not None:
            found.append("the other process ended")
        places = [self.tmp, self.home, Path("/dev/shm"), Path("/var/tmp"), Path("/tmp")]
        found += [str(path) for place in places for path in place.glob("planted*")]
        return "; ".join(found)

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for path in (*self.made, *map(Path, self.paths)):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.tmp)


def left_over() -> str:
    """Processes of snippets that still run after some seconds, of this user's or, for root, of the snippets' users."""
    for attempt in range(50):
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line, owner = path.read_bytes(), path.stat().st_uid
            except OSError:
                continue
            if b"program_" in line or line == b"sleep\x004711\x00":
                mine = owner >= FIRST_UID if os.getuid() == 0 else owner == os.getuid()
                lines += [str(line)] if mine else []
        if not lines:
            return ""
        time.sleep(0.1 if attempt else 0)
    return "; ".join(lines)


async def probes(backend: str) -> dict[str, str]:
    host, found = Host(), {}
    prelude = PRELUDE.format(host=json.dumps(host.facts()), numbers=NUMBERS)
    # Two attacks search all files, which takes half a minute on a cold, busy disk. LIMITS tests the time limit itself.
    options = {"seconds": 240.0, "memory": 256 << 20, "processes": 20, "disk": 32 << 20, "backend": backend}
    sandbox, other = Sandbox(**options), Sandbox(**options)  # type: ignore[arg-type]
    try:
        await sandbox.open()
        await other.open()
        await other.write("other", SECRET)
        listens = (
            "import socket,time; s = socket.socket(socket.AF_UNIX); s.bind(chr(0) + 'other-sandbox'); s.listen(); "
        )
        waiting = asyncio.ensure_future(other.python(f"{listens} open('/dev/shm/other', 'w'); time.sleep(230)"))
        for name, code in REACHES.items():
            ran = await run(sandbox, prelude + code + "\nprint('done')")
            said = ran.replace("done\n", "") if ran.endswith("done\n") else f"the probe failed: {ran}"
            found[name] = "; ".join(filter(None, (said, host.harmed())))
        waiting.cancel()
        if platform.machine() == "x86_64":
            for name, code in KILLED_BY_FILTER.items():
                ran = await run(sandbox, prelude + code)
                found[name] = "" if "SIGSYS" in ran and "REACHED" not in ran else ran
        for name, act in LIMITS.items():
            one = Sandbox(**{**options, "seconds": 12.0 if name == "memory of all processes" else 3.0})  # type: ignore[arg-type]
            await one.open()
            try:
                found[name] = "; ".join(filter(None, (await act(one), host.harmed(), left_over())))
            finally:
                await one.close()
    finally:
        await sandbox.close()
        await other.close()
        host.close()
    return found


NAMES = (*REACHES, *(KILLED_BY_FILTER if platform.machine() == "x86_64" else ()), *LIMITS)

if __name__ == "__main__":
    print(json.dumps(asyncio.run(probes(sys.argv[1]))))
    sys.stdout.flush()
    os._exit(0)  # the listening threads never end
