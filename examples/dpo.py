"""Direct preference optimisation as a recipe outside the package: Rafailov et al. 2023 (arXiv 2305.18290).

    python examples/dpo.py MODEL PAIRS.jsonl OUT

PAIRS has rows with `prompt`, `chosen` and `rejected`. OUT gets a run with two tapes per pair, and the trained model.
"""

import sys
from typing import ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import tapereel as tr
from tapereel.agents.rendering.renderer import Renderer
from tapereel.finetune import rows
from tapereel.finetune.data import segments
from tapereel.finetune.data.provenance import episode_of
from tapereel.finetune.data.stream import BadBatch, Stream
from tapereel.finetune.interchange import formats
from tapereel.finetune.objective import Context, Surrogate
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer.options import OptimiserConfig
from tapereel.finetune.trainer.trainer import Trainer


class DPO(Surrogate):
    """l = -log sigmoid(beta (chosen - rejected)), each the sum of lp - ref over an answer. A group is a pair."""

    advantages: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = True
    beta: float = 0.1

    def __call__(
        self, lp: Tensor, anchor: Tensor, a: Tensor, index: Tensor, stream: Stream, context: Context
    ) -> Tensor:
        of, reward, group = stream.episodes.group, stream.episodes.reward, stream.group[index]
        low, high = segments.extremes(reward, of, len(stream.episodes.groups))
        if stream.ref is None or not bool(((low < high) & (torch.bincount(of) == 2)).all()):
            raise BadBatch("DPO takes a reference model, and groups of two answers with different rewards")
        sign = torch.where(reward == high[of], 1.0, -1.0)[stream.episode[index]]
        margin = segments.total(sign.to(lp) * (lp - stream.ref[index].to(lp)), group, len(high))
        context.sums.add("dpo/preferred", margin.detach()[group.unique()] > 0)
        return -torch.nn.functional.logsigmoid(self.beta * margin)[group]


dpo = get_recipe("sft").but(name="dpo", surrogate=DPO(), weigh={"kind": "group"})  # a mean over pairs

if __name__ == "__main__":
    folder, pairs, out = sys.argv[1:]
    formats.read(pairs, f"{out}/run", "preference")
    tapes, renderer = tr.open(f"{out}/run").tapes(), Renderer(AutoTokenizer.from_pretrained(folder))
    batch = [row for tape in tapes for row in rows(tape, renderer=renderer)], [episode_of(tape) for tape in tapes]
    model, reference = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    trainer = Trainer(model, dpo, OptimiserConfig(lr=1e-4), reference=reference)
    for update in range(1, 21):
        done = trainer.update(*batch)
        print(f"update {update:2d}  loss {done.loss:.4f}  preferred {done.sums.mean('dpo/preferred'):.2f}")
    model.save_pretrained(f"{out}/model")
