"""The class `Run`, which opens a run directory and has methods to read and inspect its tapes."""

from __future__ import annotations

import re
import webbrowser
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Annotated, Any, Generic, get_args

from pydantic import JsonValue
from typing_extensions import TypeVar

from ...agents.episode.agent import Agent
from ...agents.runs.pass_at_k import Scores
from ...agents.runs.runner import RunConfig, RunSummary, scores_of
from ...agents.setup.engine_config import HOSTED, model_settings
from ...envs.checks.rescore import add_reward_layer, rescore_run
from ...envs.environment import EnvironmentFactory
from ...envs.rewards.named_rewards import RewardLike
from ...tapes import Status, Tape
from ...tapes.audit.auditor import Audit, audit_run
from ...tapes.audit.verdict import Verdicts
from ...tapes.common.arguments import check_arguments
from ...tapes.common.config import load_config
from ...tapes.common.progress import Progress, silent
from ...tapes.common.text import logger, warn_once
from ...tapes.errors import UsageError
from ...tapes.status import BRANCH
from ...tapes.store.books import Books, spent
from ...tapes.store.disk import METRICS
from ...tapes.store.run_directory import CONFIG, read_metrics, recorded_settings, recorded_summary
from ...tapes.store.store import Store, Where
from ...tapes.store.verifier import Report, verify
from ...tapes.transcript import not_imported
from ...tapes.value import Value

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    from ...agents.gateway.gateway_control import GatewayConfig
    from ...tapes.audit.compare import RunDiff
    from ..inspect.explainer import Explanation
    from ..inspect.reproducer import Reproduction
    from ..inspect.view_insight import TrainingInsight
    from ..run.run_report import TrainSummary
    from ..run.train_config import TrainConfig


log = logger("run")

SummaryT = TypeVar("SummaryT", covariant=True, default="RunSummary | TrainSummary | None")


class RunAudit(Value):
    """The accounts of a run: how each of its tokens was used, and statistics of its tapes."""

    books: Books
    """The accounting of every sampled token and every episode."""
    audit: Audit
    """Statistics of the tapes: attrition, cost, rewards and anomalies."""

    @property
    def holds(self) -> bool:
        """Whether every token and every episode is accounted for."""
        return self.books.closes

    def __str__(self) -> str:
        tokens = spent(self.books.counts)
        return f"{tokens}, every one accounted for" if self.holds else f"{tokens}; {'; '.join(self.books.findings)}"


@check_arguments
class Run(Generic[SummaryT]):
    """A run directory. `tapereel.run` and `tapereel.train` return one, and `tapereel.open(path)` opens one.

    Each method reads the directory when it is called, so it also works while the run is being written.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        agent: Agent | None = None,
        env: EnvironmentFactory | None = None,
        summary: SummaryT = None,
    ) -> None:
        """`agent` and `env` are the objects that the run was made with, for `replay` and `branch`. If they are None,
        the agent and environment that `config.yaml` names are used. Raises UsageError if `path` holds no run."""
        self.path = Path(path)
        self.agent = agent
        self.env = env
        self._summary = summary
        Store.open(self.path).close()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def summary(self) -> SummaryT:
        """The results of the run, as `tapereel.run` or `tapereel.train` reported them: `run.summary.seconds`.

        An opened run has the summary of the last process that came to its end. It is None if no process has, or if an
        earlier version of Tapereel wrote the run.
        """
        recorded = recorded_summary(self.path) if self._summary is None else None
        if recorded is None:
            return self._summary
        from ..run.run_report import TrainSummary

        kind: Any = TrainSummary if self._trains else RunSummary
        return kind.model_validate_json(recorded)

    @property
    def config(self) -> RunConfig | TrainConfig | GatewayConfig:
        """The settings of the run: `run.config.seed`. Pass them as `config=` to `tapereel.run` or `tapereel.train` to
        make a similar run. Raises UsageError if the run has no settings, such as a run of imported tapes."""
        from ...agents.gateway.gateway_control import GatewayConfig
        from ..run.train_config import TrainConfig

        if not (self.path / CONFIG).is_file():
            raise UsageError(f"{self.path} has no {CONFIG}: only `run`, `train` and the gateway write settings")
        kind = TrainConfig if self._trains else RunConfig if "attempts" in self._settings else GatewayConfig
        return load_config(kind, self.path / CONFIG)

    @property
    def _settings(self) -> Mapping[str, object]:
        return recorded_settings(self.path)

    @property
    def _trains(self) -> bool:
        return "loop" in self._settings

    @property
    def model(self) -> Path | None:
        """The folder of the newest trained model, in Hugging Face format: `tr.run(agent, Env, tasks, run.model)`. It is
        None if the run has no trained weights."""
        found = (self.path / "checkpoints").glob("update-*/hf")
        return max(found, key=lambda folder: int(folder.parent.name.removeprefix("update-")), default=None)

    def metrics(self) -> list[dict[str, JsonValue]]:
        """Return the metrics of each update and evaluation, oldest first: `pandas.DataFrame(run.metrics())`. A run that
        doesn't train has none."""
        return read_metrics(self.path / METRICS)

    def __iter__(self) -> Iterator[Tape]:
        return iter(self.tapes())

    def tapes(self, split: str | None = None) -> list[Tape]:
        """Return the closed tapes, oldest first: `run.tapes("train")[-1]`. If `split` is given (`train`, `eval`, ...),
        only tapes in it are returned. Without it, the continuations in the split `branch` are left out: they aren't
        episodes of the run."""
        with Store.open(self.path) as store:
            found = store.summaries(split=split, closed=True)
            tapes = [store.tape(s.id, refresh=False) for s in found if split is not None or s.split != BRANCH]
        for unknown in {not_imported(tape) for tape in tapes} - {""}:
            warn_once(log, unknown)
        return tapes

    def tape(self, name: str) -> Tape:
        """Return the tape whose id is `name`, or the only tape whose id begins with `name`:
        `print(run.tape("019a3c"))`. Raises NoSuchTape if none fits."""
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
        """Return the rows of the closed tapes that match, as a Hugging Face dataset with the columns of `tapereel
        export`: `run.dataset(min_reward=1.0)`. Unless `split` is set, the held-out tapes of a run that trained are left
        out.

        `agents` are the paths of the agents whose tokens are labels, or None for all. `tokenizer` is a folder with a
        tokenizer, which tokenizes tapes that have only text and adds the text columns. Without `tokenizer`, a tape that
        has only text is an error. If `streaming` is true, returns an IterableDataset that reads tape by tape. Raises
        NothingToExport if no tape has a row. With `streaming`, this error comes during the iteration.
        """
        from ..interchange.row_files import run_dataset

        where: Where = {"split": split, "status": status, "min_reward": min_reward}
        return run_dataset(self.path, where, agents=agents, tokenizer=tokenizer, streaming=streaming)

    @property
    def reward(self) -> float | None:
        """Mean reward over all splits, or None if no attempt has a reward. The attempts of each task are averaged
        first, and then the tasks.

        In a training run, this mixes attempts by all versions of the weights. `metrics.jsonl` has the reward of each
        update.
        """
        found = self.scores().reward
        return None if found is None else found.value

    def scores(
        self, split: str | None = None, *, k: Collection[int] = (), success: float = 1.0, by: str | None = None
    ) -> Scores:
        """Return the mean reward and pass@k, with 95 % intervals over tasks: `run.scores(k=[1, 4]).pass_at[4]`.

        `k` lists the numbers for which to report pass@k. `success` is the minimum reward that counts as a success. With
        `by`, a key in the public part of each task, scores are also reported for each value of this key.
        """
        with Store.open(self.path) as store:
            return scores_of(store, split, k=k, success=success, by=by)

    def verify(self, pins: Iterable[str] = ()) -> Report:
        """Check that the bytes of the run are as they were written: `run.verify().verdict`. `pins` are digests of
        earlier states of the run that were kept elsewhere. The run must contain these states."""
        return verify(self.path, pins=pins)

    def audit(self, split: str | None = None, *, limit: int | None = None, progress: Progress = silent) -> RunAudit:
        """Account for every token and episode, and list anomalies: `print(run.audit())`. With `limit`, the statistics
        cover only this many of the newest tapes, together with all other tapes of their groups."""
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
        """Run the agent's code again on recorded answers, and compare every request and step:
        `run.replay().counts`.

        `agent` is an object or `module:name`. By default, it is the agent that the run was made with. `tapes` are the
        ids to replay. By default, all closed tapes in `split` are replayed. No model or environment is needed.
        """
        from ...agents.replay.replayer import replay_run

        return replay_run(self.path, agent or self.agent, tapes=tapes, split=split, progress=progress)

    def rescore(
        self,
        reward: RewardLike,
        *,
        layer: str | None = None,
        tapes: Sequence[str] = (),
        split: str | None = None,
        tolerance: float = 0.0,
        progress: Progress = silent,
    ) -> Verdicts:
        """Score recorded tapes again, and compare with the recorded rewards: `run.rescore("rewards.py:close")`.

        `reward` is a `Rewards`, a `RewardSource` or a function from a tape to its score, or the `module:name` of one.
        With `layer`, the new scores are added to the run under this name, and only tapes that already have the layer
        are compared. `tapes` are the ids to score, by default of all closed tapes in `split`. `tolerance` is the
        largest difference that counts as equal.
        """
        if layer is not None:
            return add_reward_layer(
                self.path, reward, layer, tolerance=tolerance, tapes=tapes, split=split, progress=progress
            ).verdicts
        return rescore_run(self.path, reward, tolerance=tolerance, tapes=tapes, split=split, progress=progress)

    def explain(self, tape: Tape | str | None = None, *, tokenizer: str | Path | None = None) -> Explanation:
        """Show how training used each token of a tape: `print(run.explain(tape).verdict)`.

        By default, this is the last tape of the last update. `tokenizer` is a folder with a tokenizer, by default the
        run's own. Raises UsageError if the run has no closed tape.
        """
        from ..inspect.explainer import explain_run

        names = [] if tape is None else [tape if isinstance(tape, str) else tape.id]
        found = explain_run(self.path, names, n=1, tokenizer=tokenizer)
        if not found:
            raise UsageError(f"{self.path} has no closed tape to explain")
        return found[0]

    def diff(
        self,
        other: Run | str | Path,
        split: str | None = None,
        *,
        against_split: str | None = None,
        progress: Progress = silent,
    ) -> RunDiff:
        """Compare this run with another one task by task: `run.diff("runs/before").mean_second`.

        `split` selects the same split in both runs, and `against_split` another split in the other run.
        """
        from ...tapes.audit.compare import diff_runs

        path = other.path if isinstance(other, Run) else other
        with Store.open(self.path) as first, Store.open(path) as second:
            return diff_runs(first, second, split, against_split=against_split, progress=progress)

    def view(
        self,
        out: str | Path | None = None,
        *,
        tapes: Sequence[str] = (),
        browser: bool = True,
        progress: Progress = silent,
    ) -> Path:
        """Write the run as one HTML file, open it in the browser, and return its path: `run.view("digits.html")`.

        `out` is a new `.html` file, by default in a temporary folder. `tapes` are the ids of the tapes in it, by
        default those that the overview proposes. `tapereel view` serves all tapes of a run, and follows a run that
        still grows.
        """
        from ...tapes.view import RunView
        from ...tapes.view.bundle import write_view

        def insight(store: Store) -> TrainingInsight:
            from ..inspect.view_insight import TrainingInsight

            return TrainingInsight(store, None, None)

        path = Path(out if out is not None else Path(mkdtemp("-tapereel")) / f"{self.path.absolute().name}.html")
        with RunView(self.path, insight=insight) as view:
            write_view(view, path, tapes=tapes, progress=progress)
        if browser:
            webbrowser.open(path.absolute().as_uri())
        return path

    def reproduce(self, checkpoint: str | Path | None = None, *, progress: Progress = silent) -> Reproduction:
        """Compute a checkpoint again from the base weights and the tapes, and compare the result with it bit for bit:
        `run.reproduce().verdict`.

        `checkpoint` is the folder of a checkpoint, its name, or its number of updates. By default, it is the last
        checkpoint, and all earlier checkpoints are compared too.
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
        """Continue a recorded episode from a turn, `n` times, and record the continuations in this run:
        `run.branch(tape, 1, n=4)`.

        `turn` is the number of the first new turn, counted from 0. `agent` and `env` are objects or `module:name`, by
        default the agent and environment that the run was made with. `model` is a folder or a list of answers, by
        default the recorded model. If the environment does not return to the recorded state, PrefixUnverified is
        raised. With `unverified=True`, the episode is continued in this case too.
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
    "a model's folder, its GGUF file or its name, an engine of your own as 'my_engines.py:Echo', or a list of answers",
]
"""A model: a folder in Hugging Face format, a GGUF file, a model on the hub as `org/name` or `org/name@revision`, a
hosted model by its name in litellm as `litellm:openai/gpt-4o-mini`, an engine as `module:name` or `file.py:name`, or a
list of answers.

In a list, the k-th answer is the reply to the k-th request of every episode.
"""
_ENGINE = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")


def engine_settings(model: Model | None) -> list[tuple[str, object]]:
    """Return the settings of the engine for `model`. The list is empty if `model` is None."""
    if model is None:
        return []
    if not model:
        raise UsageError(f"model is {model!r}: give {get_args(Model)[1]}")
    if isinstance(model, str) and _ENGINE.fullmatch(model) and not model.startswith(HOSTED):
        return [("engine.kind", model)]
    if isinstance(model, str | Path):
        return [*model_settings(str(model))]
    return [("engine.kind", "scripted"), ("engine.answers", list(model))]
