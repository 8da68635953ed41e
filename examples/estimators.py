"""Two estimators of the advantage that the package doesn't have: the baseline of OPO and the step groups of GiGPO.

    tapereel train ... --set loop.recipe=examples/estimators.py:opo
    tapereel train ... --set loop.recipe=examples/estimators.py:gigpo

A run records both by the name of their class, so run later commands in this folder, or add it to PYTHONPATH.
"""

import torch
from torch import Tensor

from tapereel.finetune.data import segments
from tapereel.finetune.data.stream import Stream
from tapereel.finetune.objective import Baseline, Context, GroupBaseline
from tapereel.finetune.objective.credit import unit_of_token
from tapereel.finetune.recipes import get_recipe


class LengthWeighted(Baseline):
    """A = r - sum(length r) / sum(length) over the group: the baseline of least variance, if a gradient's square grows
    with the number of own tokens. A group of equal rewards gives 0.

    Source: Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline" (arXiv 2505.23585)."""

    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        owner, units = self.owner(len(x), stream), len(x)
        length = torch.bincount(unit_of_token(units, stream), minlength=units) * scored.to(x.dtype)
        mean = segments.total(length * x, owner, units) / segments.total(length, owner, units).clamp(min=1)
        low, high = segments.extremes(x[scored], owner[scored], units)
        return torch.where(scored & (low < high)[owner], x - mean[owner], 0.0)


class StepGroups(Baseline):
    """A = A_episode + weight A_step. A_episode compares the rewards of a group's episodes. A_step compares the
    discounted returns of those turns of the group that answered the same observation. Takes rewards per turn.

    Source: Feng et al. 2025, "Group-in-Group Policy Optimization for LLM Agent Training" (arXiv 2505.10978)."""

    weight: float = 1.0
    gamma: float = 0.95
    eps: float = 1e-6

    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        episode, episodes = stream.turns.episode, len(stream.episodes.tape)
        whole, judged = segments.total(x, episode, episodes), segments.count(episode[scored], episodes) > 0
        scored = judged[episode]  # a turn that isn't scored leads to those that are
        over = GroupBaseline(by=self.by, eps=self.eps)(whole, judged, stream, context)[episode]
        last = torch.cat([episode[1:] != episode[:-1], episode.new_ones(1, dtype=torch.bool)])
        returns = segments.recur(x, torch.full_like(x, self.gamma).masked_fill(last, 0.0))
        steps = _SameObservation(by=self.by, eps=self.eps)(returns, scored, stream, Context())
        context.sums.add("advantage/step", steps[scored].abs())
        return torch.where(scored, over + self.weight * steps, 0.0)


class _SameObservation(GroupBaseline):
    def owner(self, units: int, stream: Stream) -> Tensor:
        """(N,) one number for the turns of a group that answered equal observations."""
        unknown = -1 - torch.arange(units)  # a turn whose observation is unknown is alone
        seen = torch.where(stream.turns.answered < 0, unknown, stream.turns.answered)
        return torch.unique(torch.stack([super().owner(units, stream), seen]), dim=1, return_inverse=True)[1]


opo = get_recipe("reinforce").but(name="opo", baseline=LengthWeighted())
gigpo = get_recipe("grpo").but(name="gigpo", reward={"per": "turn"}, baseline=StepGroups())
