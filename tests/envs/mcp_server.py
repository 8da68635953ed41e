"""A real MCP server, by the official SDK: `python mcp_server.py stdio` or `python mcp_server.py http PORT`.

Runs with versions 1 and 2 of the SDK. It says strange things on purpose: huge results, failures, its own death.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from typing import Any

from mcp.types import ToolAnnotations

try:
    from mcp.server.mcpserver import MCPServer as Server
except ModuleNotFoundError:
    from mcp.server.fastmcp import FastMCP as Server  # type: ignore[no-redef]

READS: Any = ToolAnnotations(**{"readOnlyHint": True})
AGAIN: Any = ToolAnnotations(**{"idempotentHint": True})
CODES = {"amber": "4711", "birch": "0815", "cedar": "1234"}
notes: list[str] = []
server: Any = Server("peculiar")


@server.tool(annotations=READS)
def lookup(word: str) -> str:
    """The code of a word."""
    if word not in CODES:
        raise ValueError(f"no code for {word}")
    return CODES[word]


@server.tool(annotations=READS)
def code_of(key: str) -> str:
    """One letter for any key, which nobody can tell but this server."""
    return "abcd"[hashlib.sha256(f"salt/{key}".encode()).digest()[0] % 4]


@server.tool(annotations=AGAIN)
def note(text: str) -> str:
    """Keep a note."""
    notes.append(text)
    return f"{len(notes)} notes"


@server.tool()
def huge(size: int) -> str:
    return "x" * size


@server.tool()
def picture() -> list[Any]:
    from mcp.types import ImageContent, TextContent

    return [
        TextContent(type="text", text="a dot:"),
        ImageContent(type="image", data="AAAA", **{"mimeType": "image/png"}),
    ]


@server.tool()
def photo(kind: str = "image") -> list[Any]:
    """A file of 3x2 red pixels, between texts."""
    import base64
    import io

    from mcp.types import BlobResourceContents, EmbeddedResource, ImageContent, TextContent
    from PIL import Image

    written = io.BytesIO()
    Image.new("RGB", (3, 2), (255, 0, 0)).save(written, "JPEG" if kind == "jpeg" else "PNG")
    data = base64.b64encode(written.getvalue()).decode()
    found: Any = ImageContent(type="image", data=data, **{"mimeType": "image/png"})
    if kind == "resource":
        inside = BlobResourceContents(uri="file:///photo.png", blob=data, **{"mimeType": "image/png"})  # type: ignore[arg-type]
        found = EmbeddedResource(type="resource", resource=inside)
    if kind == "cut":
        found = ImageContent(type="image", data=data[:40], **{"mimeType": "image/png"})
    return [TextContent(type="text", text="before"), found, TextContent(type="text", text="after")]


@server.tool()
def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "awake"


@server.tool()
def die() -> str:
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    elif hasattr(server, "settings") and hasattr(server.settings, "port"):
        server.settings.port = int(sys.argv[2])
        server.run("streamable-http")
    else:
        server.run("streamable-http", port=int(sys.argv[2]))
