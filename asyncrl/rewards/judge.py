"""Another language model as the judge, behind an OpenAI-compatible URL."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from asyncrl.errors import ConfigError, one_line
from asyncrl.remote import RemoteModel
from asyncrl.rewards.base import RewardInput, rewards
from asyncrl.types import Message

PROMPT = """\
You grade an answer to a question. Judge only whether it agrees with the reference.

Question:
{{ question }}

Reference:
{{ ground_truth }}

Answer:
{{ answer }}

Explain in one sentence. Then write, on a line of its own, Score: and a number from 0 (wrong) to \
{{ scale }} (right)."""

SCORE = r"[Ss]core:\s*\**\s*(-?\d+(?:\.\d+)?)"


@rewards.register("llm_judge")
class LLMJudge:
    """The number that the judge writes, divided by `scale`, kept within 0 and 1.

    `prompt`: a Jinja template, or a file of one (`*.txt`, `*.md`, `*.jinja`); it sees `question` (the last
    user message of the prompt), `answer`, `ground_truth`, `transcript`, `extra_info`, `data_source` and
    `scale`. `score`: a pattern whose first group is the number, its last match counts; an answer without one
    is a failure, not a 0. The other options are RemoteModel's.
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        api_key_env: str = "",
        prompt: str = PROMPT,
        score: str = SCORE,
        scale: Annotated[float, Meta(gt=0)] = 10.0,
        timeout: Annotated[float, Meta(gt=0)] = 60.0,
        retries: Annotated[int, Meta(ge=0)] = 2,
        temperature: float = 0.0,
        max_tokens: Annotated[int, Meta(ge=0)] = 1024,
    ) -> None:
        self._model = RemoteModel(url, model, api_key_env, timeout, retries, temperature, max_tokens)
        self._prompt, self._score, self._scale = _template(prompt), _pattern(score), scale

    async def __call__(self, given: RewardInput) -> float:
        question = self._prompt.render(variables(given), scale=f"{self._scale:g}")
        answer = await self._model.chat([Message("user", question)])
        found = self._score.findall(answer)
        if not found:
            raise ValueError(f"the judge gave no score: {answer[-200:]!r}")
        number = found[-1] if isinstance(found[-1], str) else found[-1][0]
        return min(max(float(number) / self._scale, 0.0), 1.0)


def variables(given: RewardInput) -> dict[str, Any]:
    """Return the values that a prompt may name."""
    questions = [message.content for message in given.sample.prompt if message.role == "user"]
    return {
        "question": questions[-1] if questions else "",
        "answer": given.answer,
        "ground_truth": json.loads(given.sample.ground_truth),
        "transcript": given.transcript,
        "extra_info": json.loads(given.sample.extra_info),
        "data_source": given.sample.data_source,
    }


def _template(prompt: str) -> Any:
    """A Jinja template that knows what it may name. ConfigError if it does not."""
    import jinja2
    import jinja2.meta

    if prompt.endswith((".txt", ".md", ".jinja")) and "\n" not in prompt:
        try:
            prompt = Path(prompt).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompt {prompt!r} cannot be read ({one_line(error)})") from error
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    known = {"question", "answer", "ground_truth", "transcript", "extra_info", "data_source", "scale"}
    try:
        unknown = jinja2.meta.find_undeclared_variables(environment.parse(prompt)) - known
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the prompt is no Jinja template ({one_line(error)})") from error
    if unknown:
        raise ConfigError(f"the prompt names {sorted(unknown)[0]!r}; there are: {', '.join(sorted(known))}")
    return environment.from_string(prompt)


def _pattern(score: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(score)
    except re.error as error:
        raise ConfigError(f"score: {score!r} is no pattern ({error})") from error
    if pattern.groups < 1:
        raise ConfigError(f"score: {score!r} has no group for the number; put it in brackets")
    return pattern
