"""Advice: signs of trouble in a run's numbers, each with the next step, in the order in which to follow them.

Advice is printed at the end of `run` and `train`, and shown on the run's overview. It is based on summaries, metrics
and the newest tapes. A run without advice shows none of these signs, but it may still have other problems.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from ..common.stats import mean
from ..common.text import DOCS
from ..errors import TapereelError, remedy
from ..status import Status
from ..steps import ParseError
from ..store.run_directory import Evaluations
from ..store.store import Store
from ..store.summary import SHORT, Summary
from ..tape import Tape
from .climb import MOST, NEAR, Climb, Lines, Sign

NEWEST = 50
"""Number of newest tapes that are read to find signs that no metric shows."""
OFTEN = 0.1
"""Cut-off answers are reported if their share of all answers is above this value."""
FEW = 4
"""Minimum number of rewards for advice about rewards, and of answers for advice about answers."""
TOO_MANY = "TooManyParseErrors"
"""The error of an episode whose answers couldn't be read. It has a sign of its own."""


def advice(
    store: Store, split: str | None = None, updates: Lines = (), held_out: Evaluations | None = None
) -> tuple[str, ...]:
    """Return advice about the closed tapes in `split`, or in all splits if it is None. It also covers the loop's
    `updates`, given as lines of the metrics, and the evaluation at the loop's end.

    How episodes ended comes first, then what became of the answers, then the rewards and what explains them. Signs in
    less than half of the run come last. If the reward of the updates did not rise, the first advice ends with this.
    """
    try:
        closed = [s for s in store.summaries(split=split, closed=True) if s.status != Status.CANCELLED]
        scored = [summary for summary in closed if summary.trainable and summary.reward is not None]
        climb = Climb(store, updates, held_out or {}, scored)
        found = sorted([*_tapes(climb, closed), *climb.signs()], key=lambda s: (s.share < MOST, s.rank, -s.share))
    except TapereelError as error:
        return (f"The newest tapes can't be read, so nothing is said about them: {error}",)
    texts = [sign.text for sign in found]
    if climb.headline is None:
        return tuple(texts)
    page = DOCS / "tutorials" / "reward_does_not_climb.md"
    return (" ".join([*texts[:1], f"{climb.headline} (see {page})."]), *(f"Then: {text}" for text in texts[1:]))


def _ends(climb: Climb, closed: Sequence[Summary]) -> Iterator[Sign]:
    """Yield what ended many episodes before their time: errors, and limits if they cost reward."""
    played = [summary for summary in closed if summary.split != "demo"]
    ended: dict[tuple[str, str | None], list[Summary]] = defaultdict(list)
    for summary in played:
        ended[summary.status or "", summary.cause].append(summary)
    for (status, kind), found in ended.items():
        share = len(found) / len(played)
        if len(found) < FEW or share < OFTEN or status not in (Status.ERROR, Status.LIMIT):
            continue
        end = climb.store.tape(found[-1].id, refresh=False).end
        cause = end.cause if end is not None else None
        if cause is None or cause.error == TOO_MANY:
            continue
        many = f"{len(found):,} of {len(played):,} episodes ended"
        read = f"({_named(found[-1].id)})"
        if status == Status.ERROR:
            what = f"{cause.error}: {cause.message or ''}"[:200].rstrip(": ")
            yield Sign(-4, f"{many} with an error of the {kind}: {what} ({cause.frame or 'no frame'}) {read}.")
        elif share > MOST and not climb.rose and not _earns([s.reward for s in found], [s.reward for s in played]):
            yield Sign(-4, f"{many} at the limit `{kind}`: {cause.message} {read}.", share)


def _tapes(climb: Climb, closed: Sequence[Summary]) -> Iterator[Sign]:
    yield from _ends(climb, closed)
    store, scored = climb.store, climb.scored
    rewards = {summary.reward or 0.0 for summary in scored}
    if len(scored) >= FEW and len(rewards) == 1 and not climb.by_agent:
        only = rewards.pop()
        doubt = "Are the tasks neither too hard nor too easy for this model?"
        if climb.updates and only <= 0:
            doubt = f"If the score is right, the tasks are too hard. {climb.starts[0]}"
        yield Sign(
            0,
            f"All {len(scored):,} rewards are {only:g}: they don't tell a better episode from a worse one. Read one "
            f"({_named(scored[-1].id)}): does the environment see the answer? {doubt}",
        )
    played = [summary for summary in closed if summary.trainable and summary.split != "demo"]
    if len(played) >= FEW and not scored and climb.updates and not any(u.get("trained_tokens") for u in climb.updates):
        yield Sign(
            0,
            f"None of {len(played):,} episodes has a reward, so nothing was learned. Does the environment return one "
            f"({_named(played[-1].id)})?",
        )
    newest = [store.tape(s.id, refresh=False) for s in closed[-NEWEST:]]
    yield from _answers(newest)
    shortened = [call for tape in newest for call in tape.calls if call.cut or call.cut_messages]
    if shortened:
        messages, tokens = sum(call.cut_messages for call in shortened), sum(call.cut for call in shortened)
        yield Sign(
            2,
            f"The limit on the prompt's length (keep_prompt) left out {messages:,} messages ({tokens:,} tokens) in "
            f"{len(shortened):,} of the newest {sum(len(tape.calls) for tape in newest):,} prompts.",
            0.0,
        )


def _answers(newest: Sequence[Tape]) -> Iterator[Sign]:
    """Yield what became of the answers: cut off, not read, or without a call although tools were offered. A cut answer
    often can't be read, and holds no call."""
    # A limit of a few tokens, or one that the agent sets itself (`max_tokens=1`), is meant to cut off answers.
    limits = [tape.begin.sampling.max_tokens if tape.begin.sampling else 0 for tape in newest]
    answers = [
        (call.finish == "length", tape.reward)
        for tape, limit in zip(newest, limits, strict=True)
        if limit >= SHORT
        for call in tape.calls
        if call.sampling is not None and call.sampling.max_tokens == limit
    ]
    cut = [reward for is_cut, reward in answers if is_cut]
    if len(answers) >= FEW and len(cut) > OFTEN * len(answers) and not _earns(cut, [reward for _, reward in answers]):
        yield Sign(
            -3,
            f"{len(cut) / len(answers):.0%} of the newest answers were cut off at sampling.max_tokens "
            f"({max(limits)}), so they earn what half an answer earns. Raise it{remedy('answer length', '')}, or ask "
            "for shorter answers.",
            len(cut) / len(answers),
        )
    misread = Counter(step.problem for tape in newest for step in tape if isinstance(step, ParseError))
    asked = sum(len(tape.calls) for tape in newest)
    if asked and misread.total() >= FEW and misread.total() > MOST * asked:
        problem, _ = misread.most_common(1)[0]
        yield Sign(
            -2,
            f"{misread.total() / asked:.0%} of the newest answers could not be read as an action, most often: "
            f"{problem[:200]!r}. Does the prompt show the format, and is the fault in the answer and not in your "
            "agent's `parse`?",
            misread.total() / asked,
        )
    offered = [tape for tape in newest if any(call.tools is not None for call in tape.calls)]
    if len(offered) >= FEW and not any(map(_called, offered)):
        yield Sign(
            -1,
            f"Tools were offered in {len(offered)} of the newest {len(newest)} episodes, and none was called. Read an "
            f"answer ({_named(offered[-1].id)}): does the model know that it has tools, does it "
            f"write calls in a format that is read ({DOCS / 'how-to' / 'tools.md'}), and does your agent act on "
            "reply.tool_calls?",
        )


def _named(tape: str) -> str:
    return remedy("show", f"tape {tape}", tape=tape)


def _earns(cut: Sequence[float | None], every: Sequence[float | None]) -> bool:
    """Return whether the mean reward of cut-off answers (`cut`) comes near the best reward of all answers (`every`). If
    all answers were cut off, the mean must also come near 1."""
    known, scored = ([reward for reward in rewards if reward is not None] for rewards in (cut, every))
    best, worst = max([*scored, *[1.0] * (len(known) == len(scored))]), min([*scored, 0.0])
    return bool(known) and best - mean(known) < NEAR * (best - worst)


def _called(tape: Tape) -> bool:
    """Return True if any tool was called. The call is in an action, or in a later request of an external program."""
    names = {"tool_calls"}
    for call in tape.calls:
        schemas = (call.tools.schemas if call.tools is not None else None) or ()
        functions = (schema.get("function", schema) for schema in schemas)
        names |= {str(function.get("name")) for function in functions if isinstance(function, dict)}
        if any(message["role"] == "tool" for message in call.new_messages):
            return True
    return any(getattr(step, "original", step.kind) in names for step in tape.actions)
