"""Finds which calls of a program continue an earlier call, and which calls train the agent. The results are written as
`Label` records, in layers on top of the tape.

A call continues another call if and only if its prompt begins with the exact prompt and completion tokens of the other
call. The order of the records doesn't matter, because the other call may be recorded late. (A cut-off answer is
recorded when its client disconnects, which may be after the next request.) Each call with an answer gets one of these
labels:

    auxiliary  The system messages or tools differ from the most common ones, as in summaries, titles and helper agents.
               A call that continues an agent's conversation without its tools, or with other tools, still counts as
               that agent's call.
    discarded  No client received the answer, so the program may have asked again (a retry), and nothing continues it.
               Or an abandoned branch: the program returned to an earlier answer and continued there.
    agent      All other calls. If the same prompt was asked several times, each answer that arrived is a sample.

Concurrent requests aren't abandoned branches of each other.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from ...tapes import Call, Tape
from ...tapes.places import Place, keys
from ...tapes.records import Label, Reason

Use = Literal["agent", "auxiliary", "discarded"]
"""The role of a call in training. `agent` calls are the agent's own."""
USES: tuple[Use, ...] = ("agent", "auxiliary", "discarded")


@dataclass(slots=True, eq=False)
class _Node:
    """One answered call."""

    call: Call
    place: int
    """Position in the order of recording."""
    arrived: bool
    """Whether a client received the answer."""
    identity: tuple[str, str | None] = "", None
    """System messages and tools of the conversation's first call (see `_identity`)."""
    asked: str = ""
    """Digest or text of the prompt after the parent's tokens. Two calls with the same parent and equal `asked` have the
    same prompt."""
    parent: _Node | None = None
    children: list[_Node] = field(default_factory=list)
    use: Use = "agent"
    reason: Reason | None = None

    def __iter__(self) -> Iterator[_Node]:
        """Yield this call and all calls that continue it."""
        left = [self]
        while left:
            node = left.pop()
            yield node
            left += node.children

    @property
    def started(self) -> float:
        """When the request was sent. This is the time of the record minus the durations of all attempts."""
        return self.call.at - sum(attempt.seconds for attempt in self.call.attempts)

    @property
    def ended(self) -> float:
        """When the last answer in this subtree was recorded."""
        return max(node.call.at for node in self)

    @property
    def answer(self) -> bytes:
        """The answer's tokens, or its text without tokens."""
        return self.call.completion.tobytes() if self.call.completion else (self.call.text or "").encode()

    def discard(self, reason: Reason) -> None:
        """Label this call and all calls that continue it as discarded."""
        for node in self:
            node.use, node.reason = "discarded", reason


def label_calls(
    tape: Tape, own: Mapping[str, Use] | None = None, *, undelivered: Container[str] = frozenset()
) -> list[Label]:
    """Return the labels of a program's calls.

    An `agent` call gets a label only if its parent differs from the recorded one. `own` has the labels that the program
    itself gave, by call. They override the labels that are found here, except for answers that no client received.
    `undelivered` has the calls of these answers. A cancelled call is one of them in any case.
    """
    nodes = {
        call.call: _Node(call, k, call.finish != "cancelled" and call.call not in undelivered)
        for k, call in enumerate(tape.calls)
        if call.engine != "authored" and call.finish != "error" and (call.completion or call.text)
    }
    late = _link(tape, nodes)
    _merge(nodes, late)
    _judge(nodes)
    own = own or {}
    labels = []
    for name, node in nodes.items():
        use, reason = node.use, node.reason
        if name in own and reason != "undelivered":
            use, reason = own[name], None if own[name] == "agent" else "declared"
        if use != "agent" or name in late:
            labels.append(Label(tape=tape.id, call=name, use=use, after=late.get(name), reason=reason))
    return labels


def _identity(tape: Tape, call: Call) -> tuple[str, str | None]:
    """Return the system messages among the first four messages, and the tools. They identify an agent of the
    program."""
    said = [m["content"] for m in call.messages[:4] if m["role"] == "system"]
    return json.dumps(said), call.tools.hash if call.tools is not None else None


def _share_identities(tape: Tape, nodes: Collection[_Node], roots: Sequence[_Node]) -> None:
    """Give a root the identity of an earlier call if the root repeats this call's messages and answer, but offers other
    tools. A root is a call that continues no other call.

    With other tools, a template writes another prompt. The root's tokens then don't begin with the other call's tokens.
    """
    said = {node: [*node.call.messages, node.call.reply] for node in nodes}
    for root in sorted(roots, key=lambda node: node.started):
        messages, same = said[root][:-1], [node for node in nodes if node.identity[0] == root.identity[0]]
        before = [node for node in same if said[node] == messages[: len(said[node])]]
        for follower in root if before else ():
            follower.identity = max(before, key=lambda node: len(said[node])).identity


def extends(tape: Tape, call: Call) -> bool:
    """Return whether a recorded call extends its base, which means that its prompt begins with the base's whole prompt
    and answer."""
    if call.base is None:
        return False
    base = tape.call(call.base)
    if call.new_prompt is None:
        return call.keep_messages == base.keep_messages + len(base.new_messages) + 1
    return call.keep == tape.log.prompt_length(base) + len(base.completion or ())


def _link(tape: Tape, nodes: dict[str, _Node]) -> dict[str, str]:
    """Set the parent of each call. Return the parents that differ from the recorded ones, by call."""
    late: dict[str, str] = {}
    roots: list[_Node] = []
    for node in nodes.values():
        call = node.call
        if extends(tape, call) and call.base in nodes:
            _adopt(nodes[call.base], node, _delta(call))
        else:
            roots.append(node)
    if len(roots) > 1 or len(roots) < len(nodes):
        _find_parents(tape, nodes, roots, late)
    roots = [node for node in roots if node.parent is None]
    for node in roots:
        node.asked, identity = _whole(tape, node.call), _identity(tape, node.call)
        for follower in node:
            follower.identity = identity
    if len({node.identity for node in roots}) > 1:
        _share_identities(tape, nodes.values(), roots)
    return late


def _adopt(parent: _Node, child: _Node, asked: str) -> None:
    child.parent, child.asked = parent, asked
    parent.children.append(child)


def _delta(call: Call) -> str:
    places = [place.moved(-call.keep) for place in call.places]
    return _digest(call.new_prompt, places) if call.new_prompt is not None else json.dumps(call.new_messages)


def _whole(tape: Tape, call: Call) -> str:
    prompt = call.prompt
    return json.dumps(call.messages) if prompt is None else _digest(prompt, tape.call_places(call))


def _digest(ids: array[int], places: Sequence[Place], start: int = 0, end: int | None = None) -> str:
    """Return the hash of ids[start:end] and their pictures. Equal ids with different pictures have different hashes."""
    return hashlib.sha256(keys(ids, places)[start:end].tobytes()).hexdigest()


def _find_parents(tape: Tape, nodes: dict[str, _Node], roots: list[_Node], late: dict[str, str]) -> None:
    """Find each root's parent. The root's prompt begins with all tokens of the parent, and the longest match counts.

    Comparing text isn't enough. Different ids can decode to the same text, and training needs the sampled ids.
    """
    known: dict[int, dict[str, list[_Node]]] = defaultdict(lambda: defaultdict(list))
    """Calls by their number of tokens, and then by the digest of these tokens."""
    for node in nodes.values():
        if (ids := node.call.prompt) is None:
            continue
        whole = ids + (node.call.completion or array("i"))
        known[len(whole)][_digest(whole, tape.call_places(node.call))].append(node)
    for root in roots:
        prompt, places = root.call.prompt, tape.call_places(root.call)
        if prompt is None:
            continue
        found = (known[n].get(_digest(prompt, places, end=n)) for n in sorted(known, reverse=True) if n <= len(prompt))
        if same := next(filter(None, found), None):
            # The tokens don't show which of several equal answers the program continued, so each gets its share.
            parent = max(same, key=lambda node: (node.arrived, -len(node.children), node.place))
            length = tape.log.prompt_length(parent.call) + len(parent.call.completion or ())
            _adopt(parent, root, _digest(prompt, places, length))
            late[root.call.call] = parent.call.call


def _merge(nodes: dict[str, _Node], late: dict[str, str]) -> None:
    """If no client received an answer, and a retry got an equal one, move the continuations to the retry's answer.

    The tokens don't show which of the two the program continued, but it can't have been the one that never arrived.
    """
    levels = [[node for node in nodes.values() if node.parent is None]]
    while levels:
        siblings = levels.pop()
        arrived = {
            (node.asked, node.answer): node for node in sorted(siblings, key=attrgetter("place")) if node.arrived
        }
        for node in siblings:
            into = arrived.get((node.asked, node.answer))
            if into is not None and not node.arrived:
                _move(node, into, late)
        levels += [node.children for node in siblings if node.children]


def _move(node: _Node, into: _Node, late: dict[str, str]) -> None:
    """Move all continuations of `node` to `into`, and note the new parent in `late`."""
    for child in node.children:
        child.parent = into
        late[child.call.call] = into.call.call
    into.children += node.children
    node.children = []


def _judge(nodes: dict[str, _Node]) -> None:
    """Set the label of every call. A discarded call stays discarded, whatever its system messages are."""
    said = Counter(node.identity for node in nodes.values())
    main = max(said, key=said.__getitem__, default=None)
    for node in nodes.values():
        _branches(node.children)
        if not node.arrived and not node.children:
            node.discard("undelivered")
    for node in nodes.values():
        if node.identity != main and node.use == "agent":
            node.use = "auxiliary"


def _branches(children: list[_Node]) -> None:
    """Discard abandoned branches. A branch is abandoned if, after its last answer, the program continued the parent
    call in another way."""
    children = [node for node in children if node.arrived or node.children]
    if not children:
        return
    last = max(children, key=lambda node: node.started)
    for node in children:
        if node is not last and node.asked != last.asked and node.ended <= last.started:
            node.discard("abandoned")
