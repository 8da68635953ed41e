"""The words for remedies that only the whole package has: its commands, and the names of its settings."""

from __future__ import annotations

from ..tapes.errors import Command, offer

REMEDIES = {
    # commands
    "verify": "`tapereel verify`",
    "verify run": "tapereel verify {run}",
    "audit": "`tapereel audit`",
    "show": "tapereel show RUN {tape}",
    "explain": " (tapereel explain RUN)",
    "read whole": "`tapereel explain` and `tapereel view` show it",
    "resume": " To continue a training run, repeat the command that began it with --resume.",
    "end lease": "--take-over (Python: take_over=True), or in Python {own}",
    "rescore": "`tapereel replay rewards`",
    "embeddings": "`tapereel serve gateway --embeddings URL` or {own}",
    "import": "{own} (on the command line: `--import MODULE`)",
    "serve model": "`tapereel serve model{flags}`",
    "key variable": "{own}, --key",
    "control": "{own} (--no-weights)",
    "port": "{own}, --port",
    "python": "{own}, --python",
    # settings
    "learning rate": "loop.optimiser.lr",
    "terms": " (loop.changes)",
    "group size": "loop.group_size",
    "evaluation attempts": "evaluation.attempts",
    "warm start tapes": "warm.tapes",
    "warm start updates": "warm.updates",
    "no updates": " (loop.updates=0 measures this)",
    "continue": "Continue the run with loop.updates={updates} and --resume (Python: resume=True).",
    "answer length": " (loop.sampling.max_tokens in training)",
    "quantise": "trainer.lora.quantise",
    "targets": "trainer.lora.targets",
    "adapters": " (trainer.lora)",
}
CHECKS = [
    Command("tapereel verify {run}", "every line of the record is as it was written"),
    Command("tapereel audit {run}", "the fate of each token and episode, and everything unusual"),
    Command(
        "tapereel reproduce {run}", "the updates, computed again from the tapes, give the same weights", trained=True
    ),
    Command(
        "tapereel replay model {run}",
        "the recorded probabilities come from the weights that sampled",
        trained=True,
    ),
]
LOOKS = [Command(f"tapereel {verb} {{run}}") for verb in ("show", "view", "explain")]

offer(REMEDIES, CHECKS, LOOKS)
