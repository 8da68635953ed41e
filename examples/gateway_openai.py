"""A program that knows the `openai` package and nothing of Tapereel: a task on stdin, an answer on stdout.

It asks the model for one letter after the other, in one conversation. `gateway_scene.py` records, replays and trains it
as it stands here; any other server of OpenAI's protocol would do as well (OPENAI_BASE_URL, OPENAI_API_KEY).
"""

import asyncio
import sys
from typing import Any

from openai import AsyncOpenAI


async def spell(task: str, client: AsyncOpenAI) -> str:
    messages: list[Any] = []
    said = ""
    for letter in task.strip():
        messages.append({"role": "user", "content": letter})
        reply = await client.chat.completions.create(model="policy", messages=messages)
        text = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        said += text[:1] or "-"
    return said


async def main() -> None:
    async with AsyncOpenAI() as client:
        print(await spell(sys.stdin.read(), client))


if __name__ == "__main__":
    asyncio.run(main())
