"""`tapereel replay`: run one part of recorded episodes again and compare it with the tapes.

Each target is a command.
"""

EXAMPLE = """
tapereel replay agent runs/digits
tapereel replay env runs/digits
tapereel replay rewards runs/digits --reward examples/digits.py:close --layer close
tapereel replay model runs/digits
"""

TARGETS: dict[str, tuple[str, str]] = {
    "agent": ("cli.checks.replay_agent", "run the agent's code again, on recorded answers and observations"),
    "env": ("cli.checks.replay_env", "execute the recorded actions again, in a fresh environment"),
    "rewards": ("cli.checks.replay_rewards", "score the recorded episodes again"),
    "model": ("cli.checks.replay_model", "compute the log-prob of every sampled token again"),
}
"""The commands of `tapereel replay`. For each target: (its module inside tapereel, its purpose)."""
