"""Rewards by models: an LLM judge, and reward models, which are a sequence classifier that SGLang serves, or
one in a reward process of its own.

The conversation is written with the reward model's own chat template, as it was trained to read it. `of`: the
sample's prompt with the answer, or all `messages` of the episode. `label`: which output of the model is used.
`normalise`: the output itself, its sigmoid, or its share in the softmax over the labels.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asyncrl.conversation.tokenizer import load_tokenizer
from asyncrl.errors import UNDECODABLE, ConfigError, NoEngineError
from asyncrl.remote import (
    SCORER,
    RemoteError,
    RemoteLost,
    RemoteModel,
    bearer,
    check_url,
    post,
    scorer_url,
)
from asyncrl.rewards.base import RewardError, RewardInput, rewards, runs
from asyncrl.types import FailReason, Message
from asyncrl.weights.checkpoint_match import load_pretrained

Of = Literal["answer", "messages"]
Normalise = Literal["none", "sigmoid", "softmax"]
Label = Annotated[int, Meta(ge=0)]

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


@asynccontextmanager
async def place_of(url: str, seconds: float) -> AsyncIterator[str]:
    """The body asks the model at this URL, or the server of the scorer that it names. Whatever a lost server
    spoils is no fault of the episode: its turns are kept, and it is scored again."""
    if not url.startswith(SCORER):
        yield url
        return
    if (find := scorer_url.get(None)) is None:
        raise RemoteError(f"{url}: only workers of a run know where it is; give the URL of a server")
    try:
        async with asyncio.timeout(seconds / 2):
            place = await find(url.removeprefix(SCORER))
    except (TimeoutError, NoEngineError) as error:
        why = str(error) or f"no server within {seconds / 2:g} s"
        raise RewardError(f"{url}: {why}", FailReason.ENGINE_LOST) from None
    try:
        yield place
    except RemoteLost as error:
        raise RewardError(str(error), FailReason.ENGINE_LOST) from error


class _Classified(msgspec.Struct, frozen=True):
    embedding: tuple[float, ...]


_classified = msgspec.json.Decoder(_Classified).decode


@rewards.register("reward_model")
class RewardModel:
    """Asks an SGLang server at `url`, started with a reward model (`--is-embedding`), at `/classify`; or, at
    `scorer:reward`, those that the run starts.

    `tokenizer`: directory of the reward model's tokenizer, with its chat template; the server gets token ids.
    """

    def __init__(
        self,
        *,
        url: str,
        tokenizer: str,
        of: Of = "answer",
        label: Label = 0,
        normalise: Normalise = "none",
        api_key_env: str = "",
        timeout: Annotated[float, Meta(gt=0)] = 60.0,
        retries: Annotated[int, Meta(ge=0)] = 2,
    ) -> None:
        check_url(url)
        self._url = url
        self._headers = bearer(api_key_env)
        self._path = _directory("tokenizer", tokenizer)
        self._of = of
        self._label = label
        self._normalise = normalise
        self._timeout = timeout
        self._retries = retries
        self._tokenizer: Any = None
        self._alone = asyncio.Lock()  # tokenizers are not thread-safe

    async def __call__(self, given: RewardInput) -> float:
        async with self._alone:
            ids = await asyncio.to_thread(self._ids, given)
        async with place_of(self._url, self._timeout) as place:
            url = f"{place.rstrip('/')}/classify"
            answer = await post(
                url,
                {"input_ids": ids},
                seconds=self._timeout,
                retries=self._retries,
                headers=self._headers,
                direct=self._url.startswith(SCORER),
            )
        with RemoteError.instead_of(*UNDECODABLE, text=f"{url}: no answer of a reward model"):
            values = _classified(answer).embedding
        return normalised_output(values, self._label, self._normalise)

    def _ids(self, given: RewardInput) -> list[int]:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._path)
        if not self._tokenizer.chat_template:
            raise ValueError(f"the tokenizer in {self._path} has no chat template")
        ids: list[int] = self._tokenizer.apply_chat_template(
            _conversation(given, self._of), return_dict=False
        )
        return ids


@rewards.register("classifier")
@runs("one_process")
class Classifier:
    """A model with a classification head (AutoModelForSequenceClassification), in a reward process.

    `path`: its directory. A tokenizer without a chat template reads the question and the answer as a pair.
    `max_tokens`: longer conversations are cut at their beginning.
    """

    def __init__(
        self,
        *,
        path: str,
        device: str = "cpu",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        of: Of = "answer",
        label: Label = 0,
        normalise: Normalise = "none",
        max_tokens: Annotated[int, Meta(ge=1)] = 8192,
    ) -> None:
        self._path = _directory("path", path)
        self._device = device
        self._dtype = dtype
        self._of = of
        self._label = label
        self._normalise = normalise
        self._max_tokens = max_tokens
        self._tokenizer: Any = None
        self._model: Any = None

    def load(self) -> None:
        """Read tokenizer and model."""
        import torch

        self._tokenizer = load_tokenizer(self._path)
        dtype = getattr(torch, self._dtype)
        model = load_pretrained(
            "AutoModelForSequenceClassification", self._path, f"path {self._path}", dtype=dtype
        )
        self._model = model.to(self._device).eval()

    def __call__(self, given: RewardInput) -> float:
        import torch

        ids = self._ids(given)[-self._max_tokens :]
        with torch.inference_mode():
            row = torch.tensor([ids], device=self._device)
            values = self._model(input_ids=row, attention_mask=torch.ones_like(row)).logits[0]
        return normalised_output(values.float().tolist(), self._label, self._normalise)

    def _ids(self, given: RewardInput) -> list[int]:
        messages = _conversation(given, self._of)
        ids: list[int]
        if self._tokenizer.chat_template:
            ids = self._tokenizer.apply_chat_template(messages, return_dict=False)
        else:
            before = "\n".join(message["content"] for message in messages[:-1])
            ids = self._tokenizer(before, messages[-1]["content"]).input_ids
        return ids


def normalised_output(values: Sequence[float], label: int, normalise: Normalise) -> float:
    """Return the output of one label, normalised. ValueError if there is no such label."""
    if label >= len(values):
        raise ValueError(f"label {label} of a model that gives {len(values)} numbers")
    value = values[label]
    if normalise == "sigmoid":
        return 0.5 * (1.0 + math.tanh(0.5 * value))
    if normalise == "softmax":
        top = max(values)
        return math.exp(value - top) / math.fsum(math.exp(other - top) for other in values)
    return value


def _conversation(given: RewardInput, of: Of) -> list[dict[str, Any]]:
    answered = (*given.sample.prompt, Message("assistant", given.answer))
    return [message.openai() for message in (answered if of == "answer" else given.messages)]


def _directory(option: str, path: str) -> str:
    directory = os.path.expanduser(path)
    if not os.path.isdir(directory):
        raise ConfigError(f"{option}: there is no directory {path!r}")
    return directory


# -- another language model as the judge, behind an OpenAI-compatible URL ------------------------------------


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
        self._prompt = _template(prompt)
        self._score = _pattern(score)
        self._scale = scale

    async def __call__(self, given: RewardInput) -> float:
        question = self._prompt.render(variables(given), scale=f"{self._scale:g}")
        async with place_of(self._model.url, self._model.timeout) as place:
            is_scorer = self._model.url.startswith(SCORER)
            model = replace(self._model, url=f"{place}/v1" if is_scorer else place, direct=is_scorer)
            answer = await model.chat([Message("user", question)])
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
        with ConfigError.instead_of(OSError, UnicodeDecodeError, text=f"prompt {prompt!r} cannot be read"):
            prompt = Path(prompt).read_text(encoding="utf-8-sig")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    known = {"question", "answer", "ground_truth", "transcript", "extra_info", "data_source", "scale"}
    with ConfigError.instead_of(jinja2.TemplateSyntaxError, text="the prompt is no Jinja template"):
        unknown = jinja2.meta.find_undeclared_variables(environment.parse(prompt)) - known
    if unknown:
        raise ConfigError(f"the prompt names {sorted(unknown)[0]!r}; there are: {', '.join(sorted(known))}")
    return environment.from_string(prompt)


def _pattern(score: str) -> re.Pattern[str]:
    with ConfigError.instead_of(re.error, text=f"score: {score!r} is no pattern"):
        pattern = re.compile(score)
    if pattern.groups < 1:
        raise ConfigError(f"score: {score!r} has no group for the number; put it in brackets")
    return pattern
