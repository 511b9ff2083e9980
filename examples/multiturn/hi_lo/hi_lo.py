"""Hi-lo: guess a number; after each guess the game says whether it is higher or lower."""

import re

from asyncrl.environments import Environment, text_observation
from asyncrl.types import Message, Observation, Sample


class HiLo(Environment):
    """The game ends with the right guess, or after `guesses` guesses. The right guess earns 1; `hint` is
    subtracted for each guess that earlier answers had ruled out, and for each turn without a guess."""

    def __init__(self, *, guesses: int = 6, hint: float = 0.1) -> None:
        if guesses < 1:
            raise ValueError("guesses must be at least 1")
        self.left = guesses
        self.hint = hint

    async def reset(self, sample: Sample) -> Observation:
        game = sample.extra_info
        self.low = game["low"]
        self.high = game["high"]
        self.secret = game["secret"]
        return text_observation(f"{self.low} to {self.high}.")

    async def step(self, message: Message) -> Observation:
        self.left -= 1
        numbers = re.findall(r"\d{1,9}", message.content)
        if not numbers:
            return self._go_on("Say a number.", -self.hint)
        guess = int(numbers[-1])
        if guess == self.secret:
            return text_observation("Right!", reward=1.0, done=True)
        penalty = 0.0 if self.low <= guess <= self.high else -self.hint
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
            return self._go_on("Higher.", penalty)
        self.high = min(self.high, guess - 1)
        return self._go_on("Lower.", penalty)

    async def cut_short(self, unanswered: Message | None) -> float:
        return -self.hint * self.left  # else the model learns to talk until it is cut

    def _go_on(self, text: str, reward: float) -> Observation:
        return text_observation(text, reward, done=self.left == 0)
