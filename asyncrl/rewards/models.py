"""Reward models: a sequence classifier that SGLang serves, or one in a reward process of its own.

The conversation is written with the reward model's own chat template, as it was trained to read it. `of`: the
sample's prompt with the answer, or all `messages` of the episode. `label`: which output of the model is used.
`normalise`: the output itself, its sigmoid, or its share in the softmax over the labels.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asyncrl.conversation.tokenizer import load_tokenizer
from asyncrl.errors import UNDECODABLE, ConfigError, one_line
from asyncrl.remote import RemoteError, bearer, check_url, post
from asyncrl.rewards.base import RewardInput, rewards, runs
from asyncrl.types import Message

Of = Literal["answer", "messages"]
Normalise = Literal["none", "sigmoid", "softmax"]
Label = Annotated[int, Meta(ge=0)]


class _Classified(msgspec.Struct, frozen=True):
    embedding: tuple[float, ...]


_classified = msgspec.json.Decoder(_Classified).decode


@rewards.register("reward_model")
class RewardModel:
    """Asks an SGLang server at `url`, started with a reward model (`--is-embedding`), at `/classify`.

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
        self._url, self._headers = f"{url.rstrip('/')}/classify", bearer(api_key_env)
        self._path, self._of = _directory("tokenizer", tokenizer), of
        self._label, self._normalise = label, normalise
        self._timeout, self._retries = timeout, retries
        self._tokenizer: Any = None
        self._alone = asyncio.Lock()  # tokenizers are not thread-safe

    async def __call__(self, given: RewardInput) -> float:
        async with self._alone:
            ids = await asyncio.to_thread(self._ids, given)
        answer = await post(
            self._url,
            {"input_ids": ids},
            seconds=self._timeout,
            retries=self._retries,
            headers=self._headers,
        )
        try:
            values = _classified(answer).embedding
        except UNDECODABLE as error:
            raise RemoteError(f"{self._url}: no answer of a reward model ({one_line(error)})") from error
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
        self._path, self._device, self._dtype = _directory("path", path), device, dtype
        self._of, self._label, self._normalise = of, label, normalise
        self._max_tokens = max_tokens
        self._tokenizer: Any = None
        self._model: Any = None

    def load(self) -> None:
        """Read tokenizer and model."""
        import torch
        from transformers import AutoModelForSequenceClassification

        self._tokenizer = load_tokenizer(self._path)
        dtype = getattr(torch, self._dtype)
        model = AutoModelForSequenceClassification.from_pretrained(
            self._path, local_files_only=True, dtype=dtype
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
    """The output of one label, normalised. ValueError if there is no such label."""
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
    if not Path(path).is_dir():
        raise ConfigError(f"{option}: there is no directory {path!r}")
    return path
