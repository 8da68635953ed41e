"""The eleven terms of an objective: score, reward, shape, baseline, credit, adjust, anchor, surrogate, regulariser,
select, weigh. Each term is a set of constants and a pure function over the stream.

Three of them compute the advantages: `baseline` compares each reward with others, `credit` spreads the result over
tokens, and `adjust` whitens and clips it. The module `loss` combines all terms. GRPO's loss is `surrogate.PPO`.
"""

from ...tapes.common.extras import lazy_names
from .adjust import Adjust, ClipAdvantage, GroupWeights, Relu, Whiten
from .anchor import Anchor
from .baseline import Baseline, DecoupledBaseline, GroupBaseline
from .credit import Credit, TimeCredit
from .kl import Adaptive
from .recipe import Score
from .regulariser import KL, Balance, Demonstrations, Entropy, Regulariser
from .reward import Reward
from .select import Select
from .shape import Clip, EpisodeKL, Overlong, RewardKL, Running, Shape, TokenKL
from .surrogate import CISPO, CPG, NLL, PPO, SAPO, MinorNLL, NoSurrogate, Reinforce, Surrogate
from .term import Context, Moments, Sums, Term
from .weigh import Weigh

__all__ = [
    "CISPO",
    "CPG",
    "KL",
    "NLL",
    "PPO",
    "SAPO",
    "Adaptive",
    "Adjust",
    "Anchor",
    "Balance",
    "Baseline",
    "Clip",
    "ClipAdvantage",
    "Context",
    "Credit",
    "DecoupledBaseline",
    "Demonstrations",
    "Entropy",
    "EpisodeKL",
    "GroupBaseline",
    "GroupWeights",
    "MinorNLL",
    "Moments",
    "NoSurrogate",
    "Overlong",
    "Regulariser",
    "Reinforce",
    "Relu",
    "Reward",
    "RewardKL",
    "Running",
    "Score",
    "Select",
    "Shape",
    "Sums",
    "Surrogate",
    "TimeCredit",
    "TokenKL",
    "Weigh",
    "Whiten",
    "Term",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "recipe": "Recipe read",
    },
)
