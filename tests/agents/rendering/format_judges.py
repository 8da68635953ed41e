"""Counts how other packages read the cases of `answer_formats`. Each runs in an environment of its own.

python -m tests.agents.rendering.format_judges      writes format_judges.json
"""

from __future__ import annotations

import datetime
import json
import re
import subprocess
from pathlib import Path
from typing import Any

from ...contract import verifiers_env, vllm_cpu
from .answer_formats import JUDGED, TOOLS, WRITERS, Writer

CONTRACT = Path(__file__).resolve().parents[2] / "contract"
PARSERS: dict[str, tuple[str, str]] = {
    "Hermes, Qwen 2.5, Qwen 3": ("hermes", "qwen3"),
    "Llama 3.1 (JSON)": ("llama3_json", "deepseek_r1"),
    "Qwen3-Coder, Qwen 3.5 and 3.6": ("qwen3_coder", "qwen3"),
    "Nemotron 3": ("qwen3_coder", "nemotron_v3"),
    "Seed-OSS": ("seed_oss", "seed_oss"),
    "GLM 4.5": ("glm45", "glm45"),
    "Mistral to v7": ("mistral", "deepseek_r1"),
    "Mistral v11 and later": ("mistral", "mistral"),
    "Phi-4 mini": ("phi4_mini_json", "deepseek_r1"),
    "Kimi K2": ("kimi_k2", "kimi_k2"),
    "DeepSeek V3, R1": ("deepseek_v3", "deepseek_r1"),
    "DeepSeek V3.1": ("deepseek_v31", "deepseek_r1"),
    "MiniMax M2": ("minimax_m2", "minimax_m2"),
    "Granite 3": ("granite", "deepseek_r1"),
    "Hunyuan A13B, Jamba": ("hunyuan_a13b", "deepseek_r1"),
    "OLMo 3": ("olmo3", "deepseek_r1"),
    "Python lists (Llama 3.2 and 4)": ("pythonic", "deepseek_r1"),
    "LFM2": ("lfm2", "deepseek_r1"),
    "Gemma 4": ("gemma4", "gemma4"),
}
"""vLLM's parsers of calls and of thoughts for each family. gpt-oss is missing: its parser reads the token ids of
OpenAI's tokenizer, which needs the network. So is Command A: its parser needs the package `cohere_melody`."""
RENDERERS = {
    "Hermes, Qwen 2.5, Qwen 3": "Qwen3Renderer",
    "Llama 3.1 (JSON)": "Llama3Renderer",
    "Qwen3-Coder, Qwen 3.5 and 3.6": "Qwen35Renderer",
    "Nemotron 3": "Nemotron3Renderer",
    "GLM 4.5": "GLM45Renderer",
    "gpt-oss, as its template writes": "GptOssRenderer",
    "gpt-oss, as it often samples": "GptOssRenderer",
    "Kimi K2": "KimiK2Renderer",
    "DeepSeek V3, R1": "DeepSeekV3Renderer",
    "MiniMax M2": "MiniMaxM2Renderer",
    "Gemma 4": "Gemma4Renderer",
}
"""The classes of `renderers`. It has none for the other families."""
MARK = re.compile(r"<[|｜]?[^<>\s=]+[|｜]?>|\[/?[A-Z_]+\]|</?[a-z_:]+>|<\|\"\|>")


def cases(writer: Writer) -> list[tuple[str, str, list[Any]]]:
    """(name, text, calls that it has) of each case, and of a call that was cut off."""
    found = [(name, text, wanted) for name, (text, wanted) in writer.cases().items()]
    return [*found, ("cut off", writer.cut(), [])]


def line(judge: str, writer: Writer, name: str, text: str) -> str:
    """The input of a judge. vLLM's parser of thoughts is used only if the answer has a thought, in its favour."""
    marks = {mark for _, text, _ in cases(writer) for mark in MARK.findall(text)} | {"<think>", "</think>"}
    if judge == "vllm":
        tool, reasoning = PARSERS[writer.title]
        marks.add("<|python_tag|>")
        more = {"tool": tool, "reasoning": reasoning if "thought" in name or writer.prompt else None}
    else:
        more = {"renderer": RENDERERS[writer.title], "prompt": writer.prompt}
        text += writer.end if name != "cut off" else ""
    return json.dumps({"text": text, "marks": sorted(marks), "tools": TOOLS, **more})


def judged(judge: str) -> dict[str, Any]:
    """Count the complete cases that `vllm` or `renderers` reads, and the cases in which it makes a call that isn't in
    the answer."""
    python = str((vllm_cpu if judge == "vllm" else verifiers_env).PYTHON)
    writers = [writer for writer in WRITERS if writer.title in (PARSERS if judge == "vllm" else RENDERERS)]
    asked = [line(judge, writer, name, text) for writer in writers for name, text, _ in cases(writer)]
    command = [python, str(CONTRACT / f"{judge}_formats.py")]
    done = subprocess.run(command, input="\n".join(asked) + "\n", capture_output=True, text=True, timeout=500)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    answers = iter([json.loads(line) for line in done.stdout.splitlines()])
    counts: dict[str, Any] = {}
    for writer in writers:
        read, wrong, notes = 0, 0, {}
        for name, _, wanted in cases(writer):
            made = next(answers)
            right = made == [["add", call] for call in wanted]
            read += right and name != "cut off"
            wrong += isinstance(made, list) and any(call not in [["add", one] for one in wanted] for call in made)
            if not right:
                notes[name] = made
        counts[writer.title] = {"read": read, "wrong": wrong, "notes": notes}
    version = subprocess.run(
        [
            python,
            "-c",
            "import importlib.metadata as m; print(next(d.version for d in m.distributions() if "
            f"d.metadata['Name'].replace('-', '_') in ('{judge}', '{judge}_cpu')))",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    return {"version": version, "date": datetime.date.today().isoformat(), "counts": counts}


if __name__ == "__main__":
    found = {judge: judged(judge) for judge in ("vllm", "renderers")}
    JUDGED.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")
