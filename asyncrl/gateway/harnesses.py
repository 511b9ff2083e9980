"""Describes coding agents as people run them, without a screen and with all tools permitted, for
`programs.Command`, and defines functions for `rollout.untrained_agents`."""

from __future__ import annotations

from asyncrl.conversation.requests import AgentRequest
from asyncrl.gateway.programs import Harness

CLAUDE_CODE = Harness(
    name="claude_code",
    line="claude -p --dangerously-skip-permissions",
    environment={
        "ANTHROPIC_BASE_URL": "{anthropic_url}",
        "ANTHROPIC_API_KEY": "{key}",
        "ANTHROPIC_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",  # a sub-agent may ask for another model
        "ANTHROPIC_DEFAULT_SONNET_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_OPUS_MODEL": "{model}",
        "API_TIMEOUT_MS": "86400000",  # or Claude Code repeats after five minutes; an engine may sleep longer
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "86400000",  # likewise: Claude Code counts at most 30 pings
        "CLAUDE_CODE_PRINT_BG_WAIT_CEILING_MS": "86400000",  # or the agent ends before slow sub-agents
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "ENABLE_TOOL_SEARCH": "false",  # or a found tool changes the prompt, and a row begins
        "IS_SANDBOX": "1",  # or Claude Code refuses to work for root
    },
    resident_mb=300,
    tested="2.1.332",
)

CODEX = Harness(
    name="codex",
    line="codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -",
    environment={"OPENAI_API_KEY": "{key}"},
    files={
        ".codex/config.toml": """\
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
    },
    resident_mb=170,
    tested="0.171.0",
)

OPENCODE = Harness(  # opencode asks the model `small` for titles
    name="opencode",
    line="opencode run",
    environment={
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    },
    files={
        ".config/opencode/opencode.json": """{
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
    },
    resident_mb=700,
    tested="1.18.33",
)

QWEN_CODE = Harness(
    name="qwen_code",
    line="qwen --yolo --auth-type openai",
    environment={
        "OPENAI_BASE_URL": "{base_url}",
        "OPENAI_API_KEY": "{key}",
        "OPENAI_MODEL": "{model}",
        "QWEN_STREAM_IDLE_TIMEOUT_MS": "0",  # or qwen repeats turns of 4 minutes: comments do not count
        "QWEN_STREAM_MAX_LIFETIME_MS": "0",
    },
    files={
        ".qwen/settings.json": """{
  "model": {"generationConfig": {"contextWindowSize": {max_tokens}}},
  "privacy": {"usageStatisticsEnabled": false},
  "general": {"enableAutoUpdate": false}
}
"""
    },
    resident_mb=510,
    tested="0.24.4",
)

MINI_SWE_AGENT = Harness(
    name="mini_swe_agent",
    line="mini --yolo --exit-immediately --model=openai/{model} --task={prompt}",
    environment={
        "OPENAI_BASE_URL": "{base_url}",
        "OPENAI_API_KEY": "{key}",
        "MSWEA_CONFIGURED": "true",  # or mini asks for settings
        "MSWEA_COST_TRACKING": "ignore_errors",  # the model has no price
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # or mini repeats refused requests for minutes
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or the map is fetched
    },
    stdin="nothing",
    resident_mb=200,
    version="--help",
    tested="2.4.6",
)

HARNESSES = (CLAUDE_CODE, CODEX, OPENCODE, QWEN_CODE, MINI_SWE_AGENT)


def is_tool_of_claude_code(request: AgentRequest) -> bool:
    """Recognise a request without tools, sent by a tool of Claude Code: a search of the web (nobody searches,
    so the model would learn to invent results) or a summary of a page. Sub-agents and compactions have
    tools."""
    return not request.tools


def is_upkeep_of_qwen_code(request: AgentRequest) -> bool:
    """Recognise a request of qwen-code's second agent, which writes its memory after the task."""
    return "managed memory" in request.messages[0].content[:200]
