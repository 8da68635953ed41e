"""`tapereel check`: check an environment, an engine or a model before a run uses it. Each target is a command."""

EXAMPLE = """
tapereel check env my_env.py:GuessNumber --tasks "[1, 5, 9]" --actions my_env.py:guess
tapereel check engine my_engine.py:MyEngine
tapereel check model models/tiny
"""

TARGETS: dict[str, tuple[str, str]] = {
    "env": ("cli.checks.check_env_command", "check that an environment keeps its contract"),
    "engine": ("cli.checks.check_engine_command", "check that an engine keeps its contract"),
    "model": ("cli.checks.check_model_command", "check that a model's tool calls are read and its answers end"),
}
"""The commands of `tapereel check`. For each target: (its module inside tapereel, its purpose)."""
