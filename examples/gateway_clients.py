"""OpenAI's Agents SDK, Codex and Claude Code as agents, unchanged and with documented settings only.

`docs/how-to/gateway.md` has a command for each. They are installed with `pip install openai-agents` and
`npm install --global @openai/codex @anthropic-ai/claude-code`.
"""

from pathlib import Path

from tapereel import Program

HERE = Path(__file__).resolve().parent
CODEX = [
    "exec codex exec --skip-git-repo-check --model policy --config model_provider=policy",
    "--config model_providers.policy.name=policy --config model_providers.policy.wire_api=responses",
    "--config model_providers.policy.base_url=$OPENAI_BASE_URL --config model_providers.policy.env_key=OPENAI_API_KEY",
    "--config analytics.enabled=false -",  # the task is on stdin
]
codex = Program(["sh", "-c", " ".join(CODEX)], name="codex")
claude_code = Program(
    ["env", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1", "claude", "--print", "--allowedTools", "Bash"],
    name="claude-code",
)
agents_sdk = Program(
    ["env", "OPENAI_AGENTS_DISABLE_TRACING=1", "python", str(HERE / "gateway_agents_sdk.py")],
    name="agents-sdk",
)
