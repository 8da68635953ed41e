"""A run directory as a Python object: its tapes, and the questions that can be asked of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

from ...agents.engines.servers.litellm_engine import is_hosted
from ...agents.episode.agent import Agent
from ...agents.runs.pass_at_k import Scores
from ...agents.runs.runner import RunSummary, scores_of
from ...envs.environment import EnvironmentFactory
from ...tapes import Status, Tape
from ...tapes.audit.auditor import Audit, audit_run
from ...tapes.audit.verdict import Verdicts
from ...tapes.common.arguments import check_arguments
from ...tapes.common.progress import Progress, silent
from ...tapes.errors import UsageError
from ...tapes.store.books import Books, spent
from ...tapes.store.store import Store, Where
from ...tapes.store.verifier import Report, verify
from ...tapes.value import Value

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    from ..inspect.reproducer import Reproduction
    from ..run.train_run import TrainSummary


class RunAudit(Value):
    """Where the tokens of a run went, and what its tapes say."""

    books: Books
    """The accounting of every sampled token and every episode."""
    audit: Audit
    """Attrition, cost, rewards and anomalies."""

    @property
    def holds(self) -> bool:
        """Whether every token and every episode is accounted for."""
        return self.books.closes

    def __str__(self) -> str:
        tokens = spent(self.books.counts)
        return f"{tokens}, every one accounted for" if self.holds else f"{tokens}; {'; '.join(self.books.findings)}"


@check_arguments
class Run:
    """A run directory. `tapereel.run` and `tapereel.train` return one; `tapereel.open(path)` opens one.

    Methods read the directory when they are called, so a run that is being written can be asked too.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        agent: Agent | None = None,
        env: EnvironmentFactory | None = None,
        summary: RunSummary | TrainSummary | None = None,
    ) -> None:
        """agent, env: the objects that the run was made with, for `replay` and `branch`; None: as `config.yaml` names
        them. Raises UsageError if `path` holds no run."""
        self.path = Path(path)
        self.agent = agent
        self.env = env
        self.summary = summary
        """What `tapereel.run` or `tapereel.train` reported; None for a run that was opened."""
        Store.open(self.path).close()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def __iter__(self) -> Iterator[Tape]:
        return iter(self.tapes())

    def tapes(self, split: str | None = None) -> list[Tape]:
        """The closed tapes, oldest first. With `split`, only tapes recorded for it (`train`, `eval`, ...)."""
        with Store.open(self.path) as store:
            return [store.tape(one.id, refresh=False) for one in store.summaries(split=split, closed=True)]

    def tape(self, name: str) -> Tape:
        """One tape by its id or the first characters of it. Raises NoSuchTape."""
        with Store.open(self.path) as store:
            return store.tape(name)

    def dataset(
        self,
        *,
        split: str | None = None,
        status: Status | str | None = None,
        min_reward: float | None = None,
        agents: Sequence[str] | None = None,
        tokenizer: str | Path | None = None,
        streaming: bool = False,
    ) -> Dataset | IterableDataset:
        """The rows of the closed tapes that fit, as a Hugging Face dataset with the columns of `tapereel export`.

        agents: paths of the agents whose tokens are labels. None: all. tokenizer: a folder; it tokenizes tapes that
        hold only text, which are an error without it, and adds the text columns. streaming: an IterableDataset that
        reads tape by tape. Raises NothingToExport if no tape has a row (streaming: when it is iterated).
        """
        from ..interchange.row_files import run_dataset

        where: Where = {"split": split, "status": status, "min_reward": min_reward}
        return run_dataset(self.path, where, agents=agents, tokenizer=tokenizer, streaming=streaming)

    @property
    def reward(self) -> float | None:
        """Mean over tasks of the mean reward of their scored attempts, over all splits; None when nothing was scored.

        Of a training run this mixes weights of all versions: `summary` and `metrics.jsonl` have the curve.
        """
        found = self.scores().reward
        return None if found is None else found.value

    def scores(
        self, split: str | None = None, *, k: Collection[int] = (), success: float = 1.0, by: str | None = None
    ) -> Scores:
        """Mean reward and pass@k with 95 % intervals over tasks.

        `k`: the numbers of attempts to report pass@k for. `success`: the least reward of a success. `by`: report by
        the value under this key of each task's public part as well.
        """
        with Store.open(self.path) as store:
            return scores_of(store, split, k=k, success=success, by=by)

    def verify(self, pins: Iterable[str] = ()) -> Report:
        """Check that the bytes of the run are as they were written. `pins`: heads that were kept elsewhere."""
        return verify(self.path, pins=pins)

    def audit(self, split: str | None = None, *, limit: int | None = None, progress: Progress = silent) -> RunAudit:
        """Account for every token and episode, and list what looks odd. `limit`: only the newest tapes' statistics."""
        with Store.open(self.path) as store:
            books, audit = audit_run(store, split=split, limit=limit, progress=progress)
        return RunAudit(books=books, audit=audit)

    def replay(
        self,
        agent: Agent | str | None = None,
        *,
        tapes: Sequence[str] = (),
        split: str | None = None,
        progress: Progress = silent,
    ) -> Verdicts:
        """Run the agent's code again on recorded answers, and compare every request and step.

        `agent`: an object or `module:name`. None: the agent that the run was made with. `tapes`: ids. Empty: all closed
        tapes of the split. No model and no environment is needed.
        """
        from ...agents.replay.replayer import replay_run

        return replay_run(self.path, agent or self.agent, tapes=tapes, split=split, progress=progress)

    def reproduce(self, checkpoint: str | Path | None = None, *, progress: Progress = silent) -> Reproduction:
        """Derive a checkpoint again from the base weights and the tapes, and compare bit for bit.

        `checkpoint`: a folder, its name or its update. None: the last one and every other on the way to it.
        """
        from ..inspect.reproducer import reproduce

        return reproduce(self.path, checkpoint, progress=progress)

    def branch(
        self,
        tape: Tape | str,
        turn: int,
        *,
        n: int = 1,
        agent: Agent | str | None = None,
        env: EnvironmentFactory | str | None = None,
        model: Model | None = None,
        unverified: bool = False,
    ) -> list[Tape]:
        """Continue a recorded episode from a turn, `n` times, and record the continuations in this run.

        `turn`: the first turn that is new, counted from 0. `agent`, `env`: as in `replay`. `model`: a folder or a list
        of answers. None: the recorded model. Raises PrefixUnverified if the environment does not return to the
        recorded state; `unverified` continues anyway.
        """
        from ...agents.replay.branching import branch_run

        sets = [("attempts", n), *engine_settings(model)]
        name = tape if isinstance(tape, str) else tape.id
        found = branch_run(
            self.path, name, turn, agent=agent or self.agent, env=env or self.env, sets=sets, unverified=unverified
        )
        return found.tapes


Model = Annotated[
    str | Path | Sequence[str],
    "a model's folder or its name, an engine of your own as 'my_engines.py:Echo', or a list of answers",
]
"""A folder in Hugging Face format, litellm's name of a hosted model, a model of the hub as `org/name` or
`org/name@revision`, an engine as `module:name` or `file.py:name`, or a list of answers: the k-th answers the k-th
request of every episode. Where the first part is a provider of litellm, as in `openai/...`, the model is hosted."""
_ENGINE = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")


def engine_settings(model: Model | None) -> list[tuple[str, object]]:
    """The settings of the engine that a `model` argument names; none for None."""
    if model is None:
        return []
    if not model:
        raise UsageError(f"model is {model!r}: give {get_args(Model)[1]}")
    if isinstance(model, str) and _ENGINE.fullmatch(model):
        return [("engine.kind", model)]
    if isinstance(model, str | Path):
        kind = "litellm" if is_hosted(str(model)) else "embedded"
        return [("engine.kind", kind), ("engine.model", str(model))]
    return [("engine.kind", "scripted"), ("engine.answers", list(model))]
