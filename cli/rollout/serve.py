"""`tapereel serve`: serve a model, an environment or a recording gateway. Each target is a separate command."""

from __future__ import annotations

EXAMPLE = """
tapereel serve model models/qwen --port 8000
tapereel serve env my_env.py:GuessNumber --port 8100
tapereel serve gateway --model runs/digits-model --out runs/gateway
"""

TARGETS: dict[str, tuple[str, str]] = {
    "model": ("cli.rollout.serve_model", "serve a model with vLLM or the embedded engine"),
    "env": ("cli.rollout.serve_env", "serve an environment to agents and trainers in other processes"),
    "gateway": ("cli.rollout.serve_gateway", "serve any engine over OpenAI's protocol and record each episode"),
}
"""The commands of `tapereel serve`. For each target: (its module inside tapereel, its purpose)."""
