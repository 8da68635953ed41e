"""Keeps completions within a grammar, with the library llguidance.

A `Guide` says which tokens may come next in one completion. It also makes sure that the completion ends in time: an
answer in JSON is cut off if it isn't closed within `max_tokens`, and a weak model may never close a string. So the
guide always knows a short way to close the answer from where it is. Before a token would make this way longer than the
number of tokens that are left, the guide takes the way instead.

Deviation from llguidance, which by itself has no such limit: the closing tokens are chosen by the guide, not sampled.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ....tapes.errors import MissingExtra
from ...rendering.answer_grammar import Grammar
from ...rendering.renderer import Renderer
from ..engine import GrammarRefused

try:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
except ModuleNotFoundError as error:
    raise MissingExtra("llguidance", "train", "the embedded engine, to enforce the form of an answer,") from error

LARGEST = 1 << 16
"""Maximum characters of a grammar. A JSON schema is most of it."""
COMPILED = 16
"""Number of compiled grammars that are kept. Each may grow to about 100 MB, which the limits here imply."""
STATES = 50_000
"""Maximum number of states that the lexer of a grammar makes. Each takes up to one kilobyte."""
_TRIAL = """
import resource, sys
from llguidance import LLMatcher, LLTokenizer
for limit, most in ((resource.RLIMIT_CPU, 2), (resource.RLIMIT_DATA, 96 << 20)):
    hard = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (most if hard < 0 else min(most, hard), hard))
LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(sys.stdin.read()), log_level=0).compute_bitmask()
"""
"""Compiles a grammar within two seconds of CPU time and 96 MB. The library has no such limits of its own: a small
schema, such as a `multipleOf` of seven digits, can take minutes and gigabytes."""
CLOSERS = '"}]0tfn,:{['
"""Characters that close a JSON value or begin a short one. The first one that the grammar allows is taken. Within a
string, only the quote closes it, so the quote comes first."""


class Guides:
    """Makes guides for one tokenizer and model."""

    def __init__(self, renderer: Renderer, vocabulary: int, end_ids: Iterable[int]) -> None:
        """`vocabulary` is the size of the model's vocabulary. An id in `end_ids` ends a completion."""
        backend = json.loads(renderer.tokenizer_json)
        if (backend["decoder"] or {}).get("type") in (None, "Fuse"):  # tokens are plain text, as `ByteFallback` has it
            backend["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
        self._tokenizer = LLTokenizer(json.dumps(backend), n_vocab=vocabulary, eos_token=sorted(end_ids))
        self._closers = [ids[0] for one in CLOSERS if len(ids := self._tokenizer.greedy_tokenize(one)) == 1]
        self._compiled = lru_cache(COMPILED)(self._compile)

    def guide(self, grammar: Grammar, limit: int) -> Guide:
        """Return the guide for one completion of at most `limit` tokens. Compiling a grammar blocks for up to some
        seconds, so call this in a thread. Raises GrammarRefused."""
        lines = [f"start: {' | '.join(f'a{k}' for k in range(len(grammar)))}"]
        for k, one in enumerate(grammar):
            schema = json.dumps(one.json_schema)
            lines.append(f"a{k}: {self._literal(one.begin)} %json {schema} {self._literal(one.end)}")
        text = "\n".join(lines)
        if len(text) > LARGEST:
            raise _refused(f"it has {len(text):,} characters, and at most {LARGEST:,} are read")
        return Guide(self._compiled(text).deep_copy(), self._tokenizer, self._closers, limit)

    def _compile(self, text: str) -> LLMatcher:
        tried = subprocess.run([sys.executable, "-P", "-c", _TRIAL], input=text, text=True, capture_output=True)
        if tried.returncode < 0:  # killed at a limit
            raise _refused("it takes more than 2 seconds or 96 MB to read")
        limits = LLParserLimits(max_lexer_states=STATES, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(text), log_level=0, limits=limits)
        first = matcher.deep_copy()
        _allowed(first, self._tokenizer.vocab_size)  # some grammars fail only here
        if first.is_error():
            problem = first.get_error().partition("\n")[0].partition("JSON schema: ")
            raise _refused(problem[2] or problem[0])
        return matcher

    def _literal(self, text: str) -> str:
        """Return the grammar of a text. Its added tokens, such as `<tool_call>`, are matched by id."""
        found, plain = list[str](), list[int]()
        for id in (*self._tokenizer.tokenize_str(text, parse_special=True), None):
            if id is None or self._tokenizer.is_special_token(id):
                found += [json.dumps(self._tokenizer.decode_str(plain))] if plain else []
                found += [] if id is None else [f"<[{id}]>"]
                plain.clear()
            else:
                plain.append(id)
        return " ".join(found)


def _refused(why: str) -> GrammarRefused:
    return GrammarRefused(f"the JSON schema can't be enforced: {why}; change the schema")


class Guide:
    """The state of one completion within its grammar."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, closers: list[int], limit: int) -> None:
        self._matcher, self._tokenizer, self._closers = matcher, tokenizer, closers
        self._closing = self._way(limit)

    @property
    def error(self) -> str:
        """Why the grammar can't be followed any further, for example because it is too complex. Empty otherwise."""
        return self._matcher.get_error().partition("\n")[0]

    def allowed(self) -> NDArray[np.bool_]:
        """Return a mask (vocabulary,) of the ids that may come next."""
        return _allowed(self._matcher, self._tokenizer.vocab_size)

    def take(self, id: int, left: int) -> int:
        """Advance by the token `id`, which must be allowed, and return it. `left` is the number of tokens that may
        still be sampled, with this one.

        If the answer couldn't be closed after it, but can be closed now, advance by the next closing token instead, and
        return that."""
        before = self._closing
        self._matcher.consume_token(id)
        if id == before[0]:
            self._closing = before[1:]
        elif self._matcher.validate_tokens(before) < len(before):  # the same way closes it after most tokens
            self._closing = self._way(left)
        if len(before) <= left and len(self._closing) > left - 1:
            self._matcher.rollback(1)
            self._matcher.consume_token(before[0])
            self._closing = before[1:]
            return before[0]
        return id

    def _way(self, most: int) -> list[int]:
        """Return tokens that close the answer, with the end token. If there are more than `most`, they don't close
        it."""
        matcher, found = self._matcher.deep_copy(), list[int]()
        while len(found) <= most and not matcher.is_accepting():
            new = matcher.compute_ff_tokens() or [self._closer(matcher)]
            if not matcher.consume_tokens(new):
                return [self._tokenizer.eos_tokens[0]] * (most + 1)
            found += new
        return [*found, self._tokenizer.eos_tokens[0]]

    def _closer(self, matcher: LLMatcher) -> int:
        for id in self._closers:
            if matcher.validate_tokens([id]):
                return id
        return int(_allowed(matcher, self._tokenizer.vocab_size).argmax())


def _allowed(matcher: LLMatcher, n: int) -> NDArray[np.bool_]:
    mask = np.zeros((n + 31) // 32, dtype=np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:n].astype(bool)
