"""Codex: `codex exec`, without a screen, its own sandbox off."""

from __future__ import annotations

from asyncrl.gateway.programs import Harness

CONFIG = """\
model = "{model}"
model_provider = "asyncrl"
model_context_window = {max_tokens}
analytics.enabled = false
features.plugins = false
[model_providers.asyncrl]
name = "asyncrl"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""

HARNESS = Harness(
    name="codex",
    line="codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -",
    environment={"OPENAI_API_KEY": "{key}"},
    files={".codex/config.toml": CONFIG},
    resident_mb=170,
    tested="0.169.0",
)
