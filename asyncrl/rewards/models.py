"""Rewards by models: an LLM judge, and reward models: a sequence classifier served by SGLang, or loaded in a
reward process.

The conversation is written with the reward model's own chat template. `of`: the sample's prompt with the
answer, or all `messages` of the episode. `label`: index of the model output that counts. `normalise`: the
plain output, the sigmoid, or the softmax over the labels.

These models read text only: IMAGE_NOTE stands in the place of an image.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asyncrl.conversation.tokenizer import load_tokenizer
from asyncrl.errors import UNDECODABLE, ConfigError, NoEngineError
from asyncrl.remote import (
    SCORER_PREFIX,
    RemoteError,
    RemoteLost,
    RemoteModel,
    bearer_header,
    check_url,
    post_json,
    scorer_url,
)
from asyncrl.rewards.base import RewardError, RewardInput, rewards, runs
from asyncrl.types import FailReason, Message
from asyncrl.vision.content import IMAGE_NOTE, with_image_notes
from asyncrl.weights.checkpoint_match import load_pretrained

ScoredText = Literal["answer", "messages"]
Normalise = Literal["none", "sigmoid", "softmax"]
Label = Annotated[int, Meta(ge=0)]

JUDGE_PROMPT = """\
You grade an answer to a question. Judge only whether it agrees with the reference.

Question:
{{ question }}

Reference:
{{ ground_truth }}

Answer:
{{ answer }}

Explain in one sentence. Then write, on a line of its own, Score: and a number from 0 (wrong) to \
{{ scale }} (right)."""

SCORE_PATTERN = r"[Ss]core:\s*\**\s*(-?\d+(?:\.\d+)?)"


@asynccontextmanager
async def scoring_url(url: str, seconds: float) -> AsyncIterator[str]:
    """Yield the URL to ask: this URL, or for `scorer:NAME` a server of that scorer. A server lost in the body
    is no fault of the episode: RewardError with ENGINE_LOST keeps the turns, and scoring is repeated."""
    if not url.startswith(SCORER_PREFIX):
        yield url
        return
    if (find_server := scorer_url.get(None)) is None:
        raise RemoteError(
            f"{url}: only the workers of a run know the scorer's address; set the URL of a server"
        )

    try:
        async with asyncio.timeout(seconds / 2):
            server_url = await find_server(url.removeprefix(SCORER_PREFIX))
    except (TimeoutError, NoEngineError) as error:
        reason = str(error) or f"no server was available within {seconds / 2:g} s"
        raise RewardError(f"{url}: {reason}", FailReason.ENGINE_LOST) from None

    try:
        yield server_url
    except RemoteLost as error:
        raise RewardError(str(error), FailReason.ENGINE_LOST) from error


class _Classified(msgspec.Struct, frozen=True):
    embedding: tuple[float, ...]


_decode_classification = msgspec.json.Decoder(_Classified).decode


@rewards.register("reward_model")
@dataclass(kw_only=True, eq=False)
class RewardModel:
    """Asks an SGLang server at `url`, started with a reward model (`--is-embedding`), at `/classify`; with
    `scorer:reward`, the servers that the run starts.

    `tokenizer`: directory of the reward model's tokenizer and chat template; the server gets token ids.
    """

    url: str
    tokenizer: str
    of: ScoredText = "answer"
    label: Label = 0
    normalise: Normalise = "none"
    api_key_env: str = ""
    timeout: Annotated[float, Meta(gt=0)] = 60.0
    retries: Annotated[int, Meta(ge=0)] = 2

    def __post_init__(self) -> None:
        check_url(self.url)
        self._headers = bearer_header(self.api_key_env)
        self._tokenizer_path = _existing_directory("tokenizer", self.tokenizer)
        self._tokenizer: Any = None
        self._tokenizer_lock = asyncio.Lock()  # tokenizers are not thread-safe

    async def __call__(self, episode: RewardInput) -> float:
        async with self._tokenizer_lock:
            token_ids = await asyncio.to_thread(self._token_ids, episode)

        async with scoring_url(self.url, self.timeout) as server_url:
            url = f"{server_url.rstrip('/')}/classify"
            answer = await post_json(
                url,
                {"input_ids": token_ids},
                seconds=self.timeout,
                retries=self.retries,
                headers=self._headers,
                direct=self.url.startswith(SCORER_PREFIX),
            )

        with RemoteError.instead_of(*UNDECODABLE, text=f"{url}: the answer is not from a reward model"):
            outputs = _decode_classification(answer).embedding

        return normalised_output(outputs, self.label, self.normalise)

    def _token_ids(self, episode: RewardInput) -> list[int]:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._tokenizer_path)
        if not self._tokenizer.chat_template:
            raise ValueError(f"the tokenizer in {self._tokenizer_path} has no chat template")

        token_ids: list[int] = self._tokenizer.apply_chat_template(
            _conversation(episode, self.of), return_dict=False
        )
        return token_ids


@rewards.register("classifier")
@runs("one_process")
@dataclass(kw_only=True, eq=False)
class Classifier:
    """Scores with a classification model (AutoModelForSequenceClassification) in a reward process.

    `path`: directory of the model. A tokenizer without a chat template reads the question and the answer as a
    pair. `max_tokens`: longer conversations are cut at the beginning.
    """

    path: str
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    of: ScoredText = "answer"
    label: Label = 0
    normalise: Normalise = "none"
    max_tokens: Annotated[int, Meta(ge=1)] = 8192

    def __post_init__(self) -> None:
        self._model_path = _existing_directory("path", self.path)
        self._tokenizer: Any = None
        self._model: Any = None

    def load(self) -> None:
        """Read tokenizer and model."""
        import torch

        self._tokenizer = load_tokenizer(self._model_path)
        dtype = getattr(torch, self.dtype)
        model = load_pretrained("classifier", self._model_path, f"path {self._model_path}", dtype=dtype)
        self._model = model.to(self.device).eval()

    def __call__(self, episode: RewardInput) -> float:
        import torch

        messages = _conversation(episode, self.of)
        if self._tokenizer.chat_template:
            token_ids = self._tokenizer.apply_chat_template(messages, return_dict=False)
        else:
            earlier_text = "\n".join(message["content"] for message in messages[:-1])
            token_ids = self._tokenizer(earlier_text, messages[-1]["content"]).input_ids

        with torch.inference_mode():
            input_ids = torch.tensor([token_ids[-self.max_tokens :]], device=self.device)
            outputs = self._model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids)).logits[0]

        return normalised_output(outputs.float().tolist(), self.label, self.normalise)


def normalised_output(values: Sequence[float], label: int, normalise: Normalise) -> float:
    """Return the normalised output of one label. ValueError if the model has fewer labels."""
    if label >= len(values):
        raise ValueError(f"label {label} is too high: the model's last label is {len(values) - 1}")

    value = values[label]
    if normalise == "sigmoid":
        return 0.5 * (1.0 + math.tanh(0.5 * value))
    if normalise == "softmax":
        largest = max(values)
        return math.exp(value - largest) / math.fsum(math.exp(output - largest) for output in values)

    return value


def _conversation(episode: RewardInput, scored_text: ScoredText) -> list[dict[str, Any]]:
    messages = episode.messages
    if scored_text == "answer":
        messages = (*episode.sample.prompt, Message("assistant", episode.answer))
    return [
        _without_image_token(with_image_notes(message).openai(), episode.image_token) for message in messages
    ]


def _without_image_token(value: Any, image_token: str) -> Any:
    """Return a text, or JSON with texts, with IMAGE_NOTE in the place of each image token, which a policy can
    spell, too: a server that reads images would look for an image there."""
    if not image_token:
        return value
    if isinstance(value, str):
        return value.replace(image_token, IMAGE_NOTE)
    if isinstance(value, dict):
        return {key: _without_image_token(part, image_token) for key, part in value.items()}
    if isinstance(value, list):
        return [_without_image_token(part, image_token) for part in value]
    return value


def _existing_directory(option: str, path: str) -> str:
    directory = os.path.expanduser(path)
    if not os.path.isdir(directory):
        raise ConfigError(f"{option}: no such directory: {path!r}")
    return directory


# -- another language model as the judge, behind an OpenAI-compatible URL ------------------------------------


@rewards.register("llm_judge")
class LLMJudge:
    """Gives the judge's number divided by `scale`, clipped to 0 and 1.

    `prompt`: a Jinja template, or a template file (`*.txt`, `*.md`, `*.jinja`), with the variables `question`
    (the last user message of the prompt), `answer`, `ground_truth`, `transcript`, `extra_info`, `data_source`
    and `scale`. `score`: a pattern whose first group is the number; the last match counts, and an answer
    without a match is a failure, not a 0. The other options are RemoteModel's.
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        api_key_env: str = "",
        prompt: str = JUDGE_PROMPT,
        score: str = SCORE_PATTERN,
        scale: Annotated[float, Meta(gt=0)] = 10.0,
        timeout: Annotated[float, Meta(gt=0)] = 60.0,
        retries: Annotated[int, Meta(ge=0)] = 2,
        temperature: float = 0.0,
        max_tokens: Annotated[int, Meta(ge=0)] = 1024,
    ) -> None:
        self._model = RemoteModel(url, model, api_key_env, timeout, retries, temperature, max_tokens)
        self._prompt_template = _load_template(prompt)
        with ConfigError.instead_of(re.error, text=f"score: {score!r} is not a valid regular expression"):
            self._score_pattern = re.compile(score)
        if self._score_pattern.groups < 1:
            raise ConfigError(
                f"score: {score!r} has no group for the number; put the number's pattern in parentheses"
            )
        self._scale = scale

    async def __call__(self, episode: RewardInput) -> float:
        question = self._prompt_template.render(prompt_variables(episode), scale=f"{self._scale:g}")
        async with scoring_url(self._model.url, self._model.timeout) as server_url:
            is_scorer = self._model.url.startswith(SCORER_PREFIX)
            model = replace(
                self._model, url=f"{server_url}/v1" if is_scorer else server_url, direct=is_scorer
            )
            answer = await model.chat([Message("user", question)])

        scores = self._score_pattern.findall(answer)
        if not scores:
            raise ValueError(f"the judge's answer contains no score: {answer[-200:]!r}")

        number = scores[-1] if isinstance(scores[-1], str) else scores[-1][0]
        return min(max(float(number) / self._scale, 0.0), 1.0)


def prompt_variables(episode: RewardInput) -> dict[str, Any]:
    """Return the variables of a judge's prompt, except `scale`."""
    questions = [message for message in episode.sample.prompt if message.role == "user"]
    variables = {
        "question": with_image_notes(questions[-1]).content if questions else "",
        "answer": episode.answer,
        "ground_truth": episode.sample.ground_truth,
        "transcript": episode.transcript,
        "extra_info": episode.sample.extra_info,
        "data_source": episode.sample.data_source,
    }
    return {name: _without_image_token(value, episode.image_token) for name, value in variables.items()}


def _load_template(prompt: str) -> Any:
    """Load a Jinja template. ConfigError if the template names unknown variables."""
    import jinja2
    import jinja2.meta

    if prompt.endswith((".txt", ".md", ".jinja")) and "\n" not in prompt:
        with ConfigError.instead_of(OSError, UnicodeDecodeError, text=f"prompt {prompt!r} cannot be read"):
            prompt = Path(prompt).read_text(encoding="utf-8-sig")

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    variable_names = {
        "question",
        "answer",
        "ground_truth",
        "transcript",
        "extra_info",
        "data_source",
        "scale",
    }

    with ConfigError.instead_of(jinja2.TemplateSyntaxError, text="the prompt is not a valid Jinja template"):
        unknown_names = jinja2.meta.find_undeclared_variables(environment.parse(prompt)) - variable_names

    if unknown_names:
        raise ConfigError(
            f"unknown variable {sorted(unknown_names)[0]!r} in the prompt; available: "
            f"{', '.join(sorted(variable_names))}"
        )

    return environment.from_string(prompt)
