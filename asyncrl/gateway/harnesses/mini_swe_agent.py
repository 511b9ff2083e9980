"""mini-swe-agent: `mini`, without questions."""

from __future__ import annotations

from asyncrl.gateway.programs import Harness

HARNESS = Harness(
    name="mini_swe_agent",
    line="mini --yolo --exit-immediately --model=openai/{model} --task={prompt}",
    environment={
        "OPENAI_BASE_URL": "{base_url}",
        "OPENAI_API_KEY": "{key}",
        "MSWEA_CONFIGURED": "true",  # or it asks for settings
        "MSWEA_COST_TRACKING": "ignore_errors",  # the model has no price
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # or it repeats what a limit refused, for minutes
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it is fetched
    },
    stdin="nothing",
    resident_mb=200,
    version="--help",
    tested="2.4.6",
)
