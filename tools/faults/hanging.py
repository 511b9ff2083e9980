"""The demo's reward, which hangs while a file is there: workers answer, and their episodes do not end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from asyncrl.rewards.answers import final_number
from asyncrl.rewards.base import rewards, runs


@rewards.register("hanging")
@runs("loop")
async def hanging(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """As final_number, once there is no file CHAOS_HANG."""
    while Path(os.environ["CHAOS_HANG"]).exists():  # noqa: ASYNC110, ASYNC240 (another process makes it)
        await asyncio.sleep(0.1)
    return final_number(data_source, solution_str, ground_truth, extra_info)
