"""qwen-code: `qwen`, without a screen, all tools permitted."""

from __future__ import annotations

from asyncrl.conversation.requests import AgentRequest
from asyncrl.gateway.programs import Harness

SETTINGS = """{
  "model": {"generationConfig": {"contextWindowSize": {max_tokens}}},
  "privacy": {"usageStatisticsEnabled": false},
  "general": {"enableAutoUpdate": false}
}
"""

HARNESS = Harness(
    name="qwen_code",
    line="qwen --yolo --auth-type openai",
    environment={
        "OPENAI_BASE_URL": "{base_url}",
        "OPENAI_API_KEY": "{key}",
        "OPENAI_MODEL": "{model}",
        "QWEN_STREAM_IDLE_TIMEOUT_MS": "0",  # or it repeats a turn that takes 4 minutes: it hears no comments
        "QWEN_STREAM_MAX_LIFETIME_MS": "0",
    },
    files={".qwen/settings.json": SETTINGS},
    resident_mb=510,
    tested="0.24.4",
)


def is_upkeep(request: AgentRequest) -> bool:
    """Recognise a request of its second agent, which writes its memory after the task."""
    return "managed memory" in request.messages[0].content[:200]
