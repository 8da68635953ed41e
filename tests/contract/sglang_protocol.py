"""What SGLang's published wheel takes and gives: read from its source, without importing it.

    pip download --no-deps sglang==0.5.23 && python tests/contract/sglang_protocol.py sglang-0.5.23-*.whl

writes tests/agents/engines/servers/sglang_protocol.json, with which the tests compare what we send and read.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

OUT = Path(__file__).resolve().parents[1] / "agents" / "engines" / "servers" / "sglang_protocol.json"
CLASSES = {
    "sglang/srt/managers/io_struct.py": (
        "BaseReq",
        "GenerateReqInput",
        "AbortReq",
        "PauseGenerationReqInput",
        "ContinueGenerationReqInput",
        "UpdateWeightFromDiskReqInput",
        "UpdateWeightVersionReqInput",
        "ReleaseMemoryOccupationReqInput",
        "ResumeMemoryOccupationReqInput",
    ),
    "sglang/srt/sampling/sampling_params.py": ("SamplingParams",),
}
SERVER, MANAGER, BATCH, VERSIONS = (
    f"sglang/srt/{name}.py"
    for name in (
        "entrypoints/http_server",
        "managers/tokenizer_manager",
        "managers/schedule_batch",
        "utils/weight_versions",
    )
)


def fields(tree: ast.Module, name: str) -> dict[str, str]:
    """field -> its type, of a class."""
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        node.target.id: ast.unparse(node.annotation)
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def routes(tree: ast.Module) -> Iterator[str]:
    """Every path that a function is registered for, as `app.post("/generate")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("app.") and node.args:
            path = node.args[0]
            if isinstance(path, ast.Constant) and isinstance(path.value, str):
                yield path.value


def keys_of(tree: ast.Module, name: str) -> Iterator[str]:
    """Keys that dicts of that name are made with, updated by or get one by one."""
    for node in ast.walk(tree):
        made = None
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if ast.unparse(target) == name:
                    made = node.value
                if isinstance(target, ast.Subscript) and ast.unparse(target.value) == name:
                    yield from (c.value for c in ast.walk(target.slice) if isinstance(c, ast.Constant))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"{name}.update" and node.args:
            made = node.args[0]
        if isinstance(made, ast.Dict):
            yield from (key.value for key in made.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def constants(tree: ast.Module, key: str) -> Iterator[str]:
    """Texts that dict literals have under that key."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for name, value in zip(node.keys, node.values, strict=True):
                if isinstance(name, ast.Constant) and name.value == key and isinstance(value, ast.Constant):
                    yield value.value


def main(wheel: str) -> None:
    """Read the wheel, write the file."""
    with zipfile.ZipFile(wheel) as archive:

        def tree(path: str) -> ast.Module:
            return ast.parse(archive.read(path))

        found = {
            "wheel": Path(wheel).name,
            "fields": {name: fields(tree(path), name) for path, names in CLASSES.items() for name in names},
            "routes": sorted(set(routes(tree(SERVER)))),
            "meta_info": sorted({key for path in (MANAGER, VERSIONS) for key in keys_of(tree(path), "meta_info")}),
            "output": sorted(set(keys_of(tree(MANAGER), "out_dict"))),
            "model_info": sorted(
                {
                    key
                    for node in ast.walk(tree(SERVER))
                    if isinstance(node, ast.AsyncFunctionDef) and node.name == "model_info"
                    for key in keys_of(ast.Module([node], []), "result")
                }
            ),
            "finish_reasons": sorted(set(constants(tree(BATCH), "type"))),
        }
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{OUT}: {len(found['routes'])} routes")


if __name__ == "__main__":
    main(*sys.argv[1:])
