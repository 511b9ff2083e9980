"""Claude Code: `claude -p`, without a screen, all tools permitted."""

from __future__ import annotations

from asyncrl.conversation.requests import AgentRequest
from asyncrl.gateway.programs import Harness

HARNESS = Harness(
    name="claude_code",
    line="claude -p --dangerously-skip-permissions",
    environment={
        "ANTHROPIC_BASE_URL": "{anthropic_url}",
        "ANTHROPIC_API_KEY": "{key}",
        "ANTHROPIC_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",  # a sub-agent may ask for one of these
        "ANTHROPIC_DEFAULT_SONNET_MODEL": "{model}",
        "ANTHROPIC_DEFAULT_OPUS_MODEL": "{model}",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "ENABLE_TOOL_SEARCH": "false",  # or a tool that is found changes the prompt, which begins a row
        "IS_SANDBOX": "1",  # or it refuses to work for root
    },
    resident_mb=300,
    tested="2.1.331",
)


def is_side_request(request: AgentRequest) -> bool:
    """Recognise a request without tools, which one of its tools sends: a search of the web (nobody searches,
    so the model would learn to invent results) or a summary of a page. Sub-agents and compactions have
    tools."""
    return not request.tools
