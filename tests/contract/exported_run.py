"""Runs in the environment with vLLM: loads model folders one after the other, and says how likely each finds some ids.

    python exported_run.py IDS FOLDER ...

IDS is a JSON list. Prints a JSON list with the log-probs of all ids but the first, for each folder.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a process for each folder would import vLLM again

from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]


def logprobs(folder: str, ids: list[int]) -> list[float]:
    llm = LLM(folder, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=len(ids) + 1)
    (found,) = llm.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=1, prompt_logprobs=0))
    return [at[id].logprob for at, id in zip(found.prompt_logprobs[1:], ids[1:], strict=True)]


if __name__ == "__main__":
    ids = json.loads(sys.argv[1])
    print(json.dumps([logprobs(folder, ids) for folder in sys.argv[2:]]))
