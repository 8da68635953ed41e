"""Access tokens for HTTP servers, and the file through which a server passes its token to clients of the same user.

A server that is started without a token creates one, and writes it to a file that only the server's user can read. This
user's clients on the same machine find the file by the server's address. All other clients need the token itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import stat
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import UsageError

SHORTEST_TOKEN = 16
"""Minimum number of characters in a token. A shorter token could be guessed."""
HOW_FOUND = (
    "A client of the server's user on the same machine finds it by the address that the server printed; any other "
    "client names the environment variable that holds it (key_variable)"
)
"""Explains how a client finds the token. It ends the error message for a client whose token was rejected."""


def new_token() -> str:
    """Return a token with 192 random bits. None of its characters needs escaping in an address."""
    return secrets.token_urlsafe(24)


def check_token(token: str) -> str:
    """Return the token unchanged. Raises UsageError if it is too short, or has characters that a header can't hold."""
    if not re.fullmatch(rf"[\x21-\x7e]{{{SHORTEST_TOKEN},1000}}", token):
        raise UsageError(
            f"a token needs at least {SHORTEST_TOKEN} printable ASCII characters without spaces, and this one has "
            f"{len(token)} characters; make one with `python -c 'import secrets; print(secrets.token_urlsafe())'`"
        )
    return token


def private_file(name: str, text: str) -> Path:
    """Write a file that only this user can read, in the folder for this user's running servers. Raises UsageError if
    writing the file fails."""
    try:
        path = state_folder() / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # `mkstemp` creates files with mode 0600. The rename replaces a link at this path instead of following it.
        handle, made = tempfile.mkstemp(dir=path.parent)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(made, path)
    except (OSError, RuntimeError) as error:
        raise UsageError(
            f"{name}: the token of the server can't be written for its clients ({error}): set XDG_STATE_HOME to a "
            "folder that can be written"
        ) from error
    return path


def token_path(url: str) -> str:
    """Return the name of the file with the token of the server at `url`.

    `url` may name the machine as `localhost` or `127.0.0.1`, and each spelling has its own file. The reason is that
    `localhost` may reach another user's server on the same port.
    """
    at = urlsplit(url)
    # Several machines may share a home folder, so the name of the machine is part of the file's name.
    return f"{socket.gethostname()}_{at.hostname}_{at.port or 80}"


def token_for(url: str) -> str | None:
    """Return the token of a server that this user runs at `url` on this machine, or None if no token is found.

    Raises PermissionError if another user owns the file or can read it, because the token isn't secret then.
    """
    try:
        path = state_folder() / token_path(url)
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (ValueError, FileNotFoundError, NotADirectoryError, PermissionError, RuntimeError):  # RuntimeError: no home
        return None
    with open(handle, encoding="utf-8") as file:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise PermissionError(f"{path}: the file of a token must belong to this user and have mode 0600; delete it")
        return file.read(2000)


def drop_token(url: str, token: str) -> None:
    """Remove the file with the server's token, unless another server has replaced it."""
    with contextlib.suppress(OSError):
        if token_for(url) == token:
            (state_folder() / token_path(url)).unlink()


def state_folder() -> Path:
    """Return the folder where Tapereel keeps this user's files between processes: `$XDG_STATE_HOME/tapereel`. Raises
    RuntimeError if the user has no home."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "tapereel"
