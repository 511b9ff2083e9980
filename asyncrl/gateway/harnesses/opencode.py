"""opencode: `opencode run`, without a screen, all tools permitted. It asks the model `small` for titles."""

from __future__ import annotations

from asyncrl.gateway.programs import Harness

CONFIG = """{
  "model": "asyncrl/{model}",
  "small_model": "asyncrl/small",
  "provider": {
    "asyncrl": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "{base_url}", "apiKey": "{key}", "timeout": false},
      "models": {
        "{model}": {"limit": {"context": {max_tokens}, "output": 8192}},
        "small": {"limit": {"context": {max_tokens}, "output": 8192}}
      }
    }
  },
  "permission": "allow",
  "autoupdate": false,
  "share": "disabled"
}
"""

HARNESS = Harness(
    name="opencode",
    line="opencode run",
    environment={
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    },
    files={".config/opencode/opencode.json": CONFIG},
    resident_mb=700,
    tested="1.18.33",
)
