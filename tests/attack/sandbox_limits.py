"""Snippets that try to use more than a sandbox grants. Each function returns what went wrong, or an empty text."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from tapereel.envs.adapters import Sandbox

BOMB = """
import os, time
made = 0
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            time.sleep(1000)
        made += 1
    except OSError:
        print(made, flush=True)
        time.sleep(1000)
"""
HOGS = """
import os, time
children = []
for _ in range(8):
    child = os.fork()
    if child == 0:
        hog = bytearray(120 << 20)
        hog[::4096] = b'x' * len(hog[::4096])
        open(f'/work/held-{os.getpid()}', 'w').close()
        time.sleep(1000)
    children.append(child)
for _ in range(100):
    time.sleep(0.1)
    children = [pid for pid in children if os.waitpid(pid, os.WNOHANG) == (0, 0)]
    held = [pid for pid in children if os.path.exists(f'/work/held-{pid}')]
    if len(held) == len(children):  # each of the others was killed
        break
print(len(held))
"""
FILLS = """
import os
total = 0
for folder in ('/work', '/tmp', '/dev/shm'):
    try:
        with open(folder + '/fill', 'wb') as file:
            while True:
                total += file.write(bytes(1 << 20))
                file.flush()
    except OSError:
        pass
print(total)
"""
COUNTS = """
import os
made = 0
for folder in ('/work', '/tmp', '/dev/shm'):
    try:
        while made < 200000:
            os.mkdir(f'{folder}/{made}')
            made += 1
    except OSError:
        pass
print(made)
"""


async def run(sandbox: Sandbox, code: str) -> str:
    try:
        return await sandbox.python(code)
    except ValueError as error:  # ToolFailed: it ended with another exit code
        return str(error)


async def bomb(sandbox: Sandbox) -> str:
    said = await run(sandbox, BOMB)
    made = said.split("\n")[0]
    return "" if made.isdigit() and int(made) <= 20 and "out of time" in said else said


async def shell_bomb(sandbox: Sandbox) -> str:
    try:
        said = await sandbox.shell("f(){ f|f& }; f; sleep 1000")
    except ValueError as error:
        said = str(error)
    return "" if "out of time" in said or "fork" in said.lower() else said


async def one_process(sandbox: Sandbox) -> str:
    said = await run(sandbox, "x = []\nwhile True: x.append(bytearray(1 << 24))")
    return "" if "MemoryError" in said else said


async def all_processes(sandbox: Sandbox) -> str:
    """8 processes of 120 MiB, where 256 MiB and the folders' 32 MiB are granted to all, or 256 MiB to each."""
    said = await run(sandbox, HOGS)
    if "each process" in str(sandbox.described["memory"]):
        return "" if said.strip() == "8" else said
    return "" if (said.strip().isdigit() and int(said) < 3) or "SIGKILL" in said else said


async def time_limit(sandbox: Sandbox) -> str:
    said = await run(
        sandbox, "import signal\nfor n in range(1, 32):\n  try: signal.signal(n, 1)\n  except OSError: 0\nwhile 1: 0"
    )
    return "" if "out of time" in said else said


async def daemons(sandbox: Sandbox) -> str:
    said = await sandbox.shell("(setsid sleep 4711 &) ; (nohup sleep 4711 >/dev/null 2>&1 &) ; echo done")
    return "" if said == "done\n" else said  # `left_over` looks for them


async def output(sandbox: Sandbox) -> str:
    try:
        said = await sandbox.shell("yes | head -c 300000000; yes 1>&2")
    except ValueError as error:
        said = str(error)
    return "" if len(said) < 21_000 and "cut here" in said else f"{len(said)} characters"


async def disk_bytes(sandbox: Sandbox) -> str:
    said = await run(sandbox, FILLS)
    return "" if said.strip().isdigit() and 16 << 20 < int(said) <= 32 << 20 else said


async def disk_files(sandbox: Sandbox) -> str:
    said = await run(sandbox, COUNTS)
    return "" if said.strip().isdigit() and int(said) <= (32 << 20) // (16 << 10) else said


async def open_files(sandbox: Sandbox) -> str:
    said = await run(sandbox, "x = []\nwhile True: x.append(open('/dev/null'))")
    return "" if "Too many open files" in said else said


async def kills_all(sandbox: Sandbox) -> str:
    """A snippet that kills everything it sees ends by that, and the sandbox goes on."""
    await run(
        sandbox, "import os, signal\nfor pid in (-1, 1):\n  try: os.kill(pid, signal.SIGKILL)\n  except OSError: pass"
    )
    said = await run(sandbox, "print(6 * 7)")
    return "" if said == "42\n" else said


async def links_out(sandbox: Sandbox) -> str:
    """What snippets plant is read back without following it, and without waiting."""
    await sandbox.shell(
        "ln -s /etc/passwd a; ln -s /proc/self/environ b; ln -s / c; mkfifo d; ln -s /dev/zero e; ln -s d f"
    )
    for name in ("a", "b", "c/etc/passwd", "d", "e", "f"):
        began = time.monotonic()
        try:
            return f"{name}: {await sandbox.read(name)!r}"
        except OSError:
            if time.monotonic() - began > 20:
                return f"{name} made it wait"
    return ""


LIMITS: dict[str, Callable[[Sandbox], Awaitable[str]]] = {
    "fork bomb": bomb,
    "fork bomb of a shell": shell_bomb,
    "memory of one process": one_process,
    "memory of all processes": all_processes,
    "time": time_limit,
    "daemons": daemons,
    "output": output,
    "bytes on disk": disk_bytes,
    "files on disk": disk_files,
    "open files": open_files,
    "kills all that it sees": kills_all,
    "links, pipes and devices read back": links_out,
}
