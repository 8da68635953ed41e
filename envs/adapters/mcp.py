"""Tools of an MCP server, over stdio or streamable HTTP, as tools of an environment.

This module uses the official SDK, versions 1 and 2 (the extra `mcp`). A lost server is an error of the environment
(`ToolsLost`). An error that a tool reports is a result. Text from the server (names, descriptions, results) is
untrusted and is only shown to the model. The server's hints are used only for tools without a declared effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypedDict, Unpack
from urllib.parse import urlsplit

from pydantic import JsonValue

from ...tapes import BadPicture, Picture
from ...tapes.common.arguments import check_arguments
from ...tapes.errors import BadArgument, MissingExtra
from ..blocking import in_thread
from ..environment import Effect
from .tools import CHARACTERS, SECONDS, Tool, ToolFailed, ToolsLost, as_text, worst

START_SECONDS = 60.0
"""Time limit for a server to start and list its tools, in seconds. It is long, because a server may need a download."""
STOP_SECONDS = 10.0
PING_SECONDS = 5.0
CONNECTION_CLOSED = -32000
"""The SDK's error code for a connection that the other side closed."""

Connect = Callable[[], AbstractAsyncContextManager[Any]]
"""Opens an initialized SDK session: a `ClientSession`, or an object with the same `list_tools` and `call_tool`."""


class McpOptions(TypedDict, total=False):
    """The options of a server, which `McpServer` documents."""

    name: str
    effect: Effect | None
    effects: Mapping[str, Effect] | None
    only: Sequence[str] | None
    shared: bool
    timeout: float
    start_timeout: float
    limit: int


class McpServer:
    """A source of tools for `ToolEnvironment`: `McpServer.stdio("npx", "-y", "some-server")`, `McpServer.http(url)`.

    Each episode has its own session and, over stdio, its own process. With `shared`, one session serves all episodes in
    an event loop concurrently, until that loop ends or `stop()` is called.
    """

    @check_arguments
    def __init__(
        self,
        connect: Connect,
        *,
        name: str,
        effect: Effect | None = None,
        effects: Mapping[str, Effect] | None = None,
        only: Sequence[str] | None = None,
        shared: bool = False,
        timeout: float = SECONDS,
        start_timeout: float = START_SECONDS,
        limit: int = CHARACTERS,
    ) -> None:
        """
        name: The server's name in errors.
        effect: The effect of every tool that `effects` doesn't name. None uses the server's hints: `readOnlyHint` means
            pure, and `idempotentHint` means idempotent. A tool without a hint is irreversible. The hints are unknown
            before the first session, and every tool counts as irreversible until then. Declare the effect if tapes are
            to be executed again.
        only: The names of the tools to offer. None offers all.
        timeout: Time limit for a call, in seconds.
        start_timeout: Time limit for the server to start and list its tools, in seconds.
        limit: The maximum number of characters in a result.
        """
        self.name = name
        self._connect = connect
        self._declared: Effect | None = effect
        self._effects: dict[str, Effect] = dict(effects or {})
        self._only = tuple(only) if only is not None else None
        self._shared = shared
        self._timeout, self._start_timeout, self._limit = timeout, start_timeout, limit
        self._session: _Session | None = None
        self._tools: tuple[Tool, ...] | None = None
        self._opening: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    @classmethod
    def stdio(
        cls,
        command: str,
        *args: str,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        **options: Unpack[McpOptions],
    ) -> McpServer:
        """Return a server that runs as a program. It gets the variables in `env` and the SDK's list of safe ones."""
        options.setdefault("name", command)
        return cls(partial(_over_stdio, command, args, env, cwd), **options)

    @classmethod
    def http(
        cls,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        key_variable: str | None = None,
        **options: Unpack[McpOptions],
    ) -> McpServer:
        """Return a server at an address. `key_variable` names the environment variable that holds the server's bearer
        token. The token and `headers` are never recorded."""
        name = urlsplit(url)._replace(query="", netloc=urlsplit(url).netloc.rpartition("@")[2]).geturl()
        options.setdefault("name", name)
        return cls(partial(_over_http, url, dict(headers or {}), key_variable), **options)

    @property
    def effect(self) -> Effect:
        if self._tools is not None:
            return worst(tool.effect for tool in self._tools)
        return worst([self._declared or "irreversible", *self._effects.values()])

    async def open(self) -> Sequence[Tool]:
        async with self._lock():
            if self._session is None or not self._session.alive:
                self._session = await _Session.begin(self._connect, self.name, self._start_timeout)
                self._tools = tuple(self._tool(found, self._session) for found in self._chosen(self._session.tools))
        assert self._tools is not None
        return self._tools

    async def close(self) -> None:
        if not self._shared:
            await self.stop()

    async def stop(self) -> None:
        """End the session, even if it is shared."""
        session, self._session = self._session, None
        if session is not None:
            await session.end()

    def _lock(self) -> asyncio.Lock:
        """Return this event loop's lock. A shared server outlives its first loop, so every loop needs its own lock."""
        loop = asyncio.get_running_loop()
        if self._opening is None or self._opening[0] is not loop:
            self._opening = loop, asyncio.Lock()
        return self._opening[1]

    def _chosen(self, found: Sequence[Any]) -> list[Any]:
        if self._only is None:
            return list(found)
        by_name = {tool.name: tool for tool in found}
        missing = [name for name in self._only if name not in by_name]
        if missing:
            raise BadArgument(
                f"MCP server {self.name} has no tool {missing[0]!r}; it has {', '.join(by_name) or 'none'}"
            )
        return [by_name[name] for name in self._only]

    def _tool(self, found: Any, session: _Session) -> Tool:
        return Tool(
            name=found.name,
            description=found.description or "",
            parameters=_field(found, "input_schema", "inputSchema") or {"type": "object", "properties": {}},
            call=partial(session.call, found.name),
            effect=self._effect_of(found),
            timeout=self._timeout,
            limit=self._limit,
        )

    def _effect_of(self, found: Any) -> Effect:
        if found.name in self._effects:
            return self._effects[found.name]
        if self._declared is not None:
            return self._declared
        hints = found.annotations
        if _field(hints, "read_only_hint", "readOnlyHint"):
            return "pure"
        return "idempotent" if _field(hints, "idempotent_hint", "idempotentHint") else "irreversible"


class _Session:
    """One connection, held by its own task. The SDK requires that the same task opens and closes a connection."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tools: list[Any] = []
        self._client: Any = None
        self._leave = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._lost = False
        self._owner: asyncio.Task[None]

    @property
    def alive(self) -> bool:
        """Whether this event loop can use the session."""
        return self._loop is asyncio.get_running_loop() and not self._owner.done() and not self._lost

    @classmethod
    async def begin(cls, connect: Connect, name: str, seconds: float) -> _Session:
        session = cls(name)
        ready: asyncio.Future[None] = session._loop.create_future()
        session._owner = asyncio.create_task(session._hold(connect, ready), name=f"mcp {name}")
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(ready)
        except (TimeoutError, asyncio.CancelledError) as error:
            await session.end()
            if isinstance(error, TimeoutError):
                raise ToolsLost(f"MCP server {name} was not ready in {seconds:g} s") from error
            raise
        return session

    async def _hold(self, connect: Connect, ready: asyncio.Future[None]) -> None:
        try:
            async with connect() as self._client:
                self.tools = await _listed(self._client)
                ready.set_result(None)
                await self._leave.wait()
        except Exception as error:
            self._lost = True
            if not ready.done():
                cause = _innermost(error)
                lost = (
                    cause
                    if isinstance(cause, MissingExtra)
                    else ToolsLost(f"MCP server {self.name} can't be used: {type(cause).__name__}: {cause}")
                )
                ready.set_exception(lost)
                ready.exception()  # retrieve it now: the caller may have been cancelled

    async def end(self) -> None:
        """Close the session and wait. If that takes too long, cancel its task."""
        self._leave.set()
        if self._loop is not asyncio.get_running_loop():
            return  # the session ended with its event loop
        patience = STOP_SECONDS if self._client is not None else 0
        done, _ = await asyncio.wait({self._owner}, timeout=patience)
        if not done:
            self._owner.cancel()
            await asyncio.wait({self._owner}, timeout=STOP_SECONDS)

    async def call(self, tool: str, arguments: dict[str, JsonValue]) -> str | Sequence[str | Picture]:
        """Return the tool's result.

        Raises ToolFailed if the tool reports an error or returns a bad picture, and ToolsLost if the server is gone.
        After any other exception, the server is pinged: ToolFailed is raised if it answers, and ToolsLost if it
        doesn't. Without the ping, a dead server would look like a failing tool, and the episode would be trained on.
        """
        if not self.alive:
            raise ToolsLost(f"MCP server {self.name} is gone")
        try:
            result = await self._client.call_tool(tool, arguments)
        except Exception as error:
            cause = _innermost(error)
            if getattr(getattr(cause, "error", None), "code", None) == CONNECTION_CLOSED or not await self._answers():
                self._lost = True
                self._leave.set()
                what = f"{type(cause).__name__}: {cause}"
                raise ToolsLost(f"MCP server {self.name} is gone: calling {tool} gave {what}") from error
            raise ToolFailed(str(cause) or type(cause).__name__) from error
        bad: list[BadPicture] = []
        parts = [await _part(block, bad) for block in result.content]
        text = "\n".join(map(str, parts))
        if not parts:
            text = as_text(_field(result, "structured_content", "structuredContent"))
        if _field(result, "is_error", "isError") or bad:
            raise ToolFailed(text)
        return parts if any(isinstance(part, Picture) for part in parts) else text

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(PING_SECONDS):
                await self._client.send_ping()
        except Exception:  # any failure means that the server doesn't answer
            return False
        return True


async def _listed(client: Any) -> list[Any]:
    """Return all tools, page by page. Raises ValueError if a cursor repeats, because the list would never end."""
    tools: list[Any] = []
    seen: set[str] = set()
    page = await client.list_tools()
    while True:
        tools += page.tools
        cursor = _field(page, "next_cursor", "nextCursor")
        if cursor is None:
            return tools
        if cursor in seen:
            raise ValueError(f"the server's list of tools repeats the cursor {cursor!r}")
        seen.add(cursor)
        if "params" in inspect.signature(client.list_tools).parameters:
            from mcp.types import PaginatedRequestParams

            page = await client.list_tools(params=PaginatedRequestParams(cursor=cursor))
        else:
            page = await client.list_tools(cursor)


def _field(thing: Any, new: str, old: str) -> Any:
    """Return the field that is called `new` in version 2 of the SDK and `old` in version 1."""
    return getattr(thing, new, None) if hasattr(thing, new) else getattr(thing, old, None)


async def _part(block: Any, bad: list[BadPicture]) -> str | Picture:
    """Return one part of a result, as a picture or as text. Errors of unusable pictures are added to `bad`."""
    inside = block.resource if block.type == "resource" else block
    text, mime = getattr(inside, "text", None), str(_field(inside, "mime_type", "mimeType"))
    if text is not None:
        return text
    if block.type == "resource_link":
        return f"[{block.name}: {block.uri}]"
    name, data = (inside.uri, inside.blob) if block.type == "resource" else (f"{block.type} {mime}", block.data)
    if not mime.startswith("image/"):
        return f"[{name}: {len(data):,} characters of base64, not shown]"
    try:
        return await Picture.read(f"data:image/png;base64,{data}")  # the format is read from the bytes
    except BadPicture as error:
        bad.append(error)
        return f"[{name}: {error}]"


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def _sparing() -> Iterator[None]:
    """Let the SDK log only the first unreadable line. By default, it logs a traceback for every unreadable line, and a
    server may send millions."""
    logger, found = logging.getLogger("mcp.client.stdio"), list[bool]()

    def first(record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("Failed to parse"):
            return True
        found.append(True)
        record.exc_info = record.exc_text = None
        return len(found) == 1

    logger.addFilter(first)
    try:
        yield
    finally:
        logger.removeFilter(first)


@asynccontextmanager
async def _over_stdio(
    command: str, args: Sequence[str], env: Mapping[str, str] | None, cwd: str | os.PathLike[str] | None
) -> AsyncIterator[Any]:
    sdk = await in_thread(_sdk)  # the import takes about a second and would block the event loop
    from mcp.client.stdio import StdioServerParameters, stdio_client

    server = StdioServerParameters(
        command=command,
        args=list(args),
        env=dict(env) if env is not None else None,
        cwd=os.fspath(cwd) if cwd is not None else None,
    )
    with tempfile.TemporaryFile("w+", errors="replace") as stderr, _sparing():
        try:
            async with stdio_client(server, errlog=stderr) as (read, write), sdk(read, write) as session:
                try:
                    await session.initialize()
                except Exception as error:
                    stderr.seek(max(0, stderr.tell() - 1000))
                    text = stderr.read().strip()
                    raise ConnectionError(f"{_innermost(error)} (its stderr: {text or 'empty'})") from error
                yield session
        finally:
            with contextlib.suppress(OSError):
                stderr.truncate(0)


@asynccontextmanager
async def _over_http(url: str, headers: dict[str, str], key_variable: str | None) -> AsyncIterator[Any]:
    sdk = await in_thread(_sdk)  # the import takes about a second and would block the event loop
    from mcp.client import streamable_http as transport

    if key_variable is not None:
        key = os.environ.get(key_variable)
        if not key:
            raise ValueError(f"the environment variable {key_variable} (the token of {url}) is not set")
        headers = {**headers, "Authorization": f"Bearer {key}"}
    async with contextlib.AsyncExitStack() as stack:
        if hasattr(transport, "streamable_http_client"):
            from mcp.shared._httpx_utils import create_mcp_http_client

            client = await stack.enter_async_context(create_mcp_http_client(headers=headers))
            streams = await stack.enter_async_context(transport.streamable_http_client(url, http_client=client))
        else:
            older: Any = transport
            streams = await stack.enter_async_context(older.streamablehttp_client(url, headers=headers))
        session = await stack.enter_async_context(sdk(streams[0], streams[1]))
        await session.initialize()
        yield session


def _sdk() -> Any:
    try:
        import mcp.client.stdio
        import mcp.client.streamable_http  # noqa: F401
        from mcp import ClientSession
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "mcp", "mcp", "an MCP server") from error
    return ClientSession
