"""Bytes of TapeAgents' JSON for an episode; run by its own Python. Arguments: turns, words, prompt, completion.

Each turn has one LLMCall with its whole prompt (messages and token ids), as TapeAgents keeps it, and a log-prob for
each token of its completion.
"""

import json
import random
import sys

from tapeagents.core import LLMCall, LLMOutput, Prompt, TokenLogprob

turns, words, prompt, completion = map(int, sys.argv[1:])
rng = random.Random(0)
text = " ".join(["word"] * words)
messages, ids, size = [], [], 0
for _ in range(turns):
    messages.append({"role": "user", "content": text})
    ids += [rng.randrange(32_000) for _ in range(prompt)]
    out = [TokenLogprob(logprob=-rng.random(), token_id=rng.randrange(32_000)) for _ in range(completion)]
    whole = Prompt(messages=list(messages), token_ids=list(ids))
    call = LLMCall(
        prompt=whole,
        output=LLMOutput(content=text),
        cached=False,
        prompt_length_tokens=len(ids),
        output_length_tokens=completion,
        logprobs=out,
    )
    # `logprobs` is left out of a dump by default; a trainer that needs them writes them like this.
    size += len(call.model_dump_json()) + len(json.dumps([t.model_dump() for t in out], separators=(",", ":")))
    messages.append({"role": "assistant", "content": text})
    ids += [t.token_id for t in out]
print(json.dumps({"bytes": size, "tokens": turns * (prompt + completion)}))
