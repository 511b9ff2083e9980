"""How many tokens a micro-batch of the trainer may have: fewer after a rank ran out of memory."""

from __future__ import annotations

import msgspec

from asyncrl.config import LESS_MEMORY
from asyncrl.errors import ConfigError
from asyncrl.store.reader import RunReader
from asyncrl.store.runstore import RunStore
from asyncrl.wire.messages.trainer import GaveUp

META = "micro_budget"


class MicroBudget(msgspec.Struct):
    """`tokens` of a micro-batch, kept in the store; under another `trainer.micro_batch_tokens` than it
    was learned under (`configured`) it is forgotten."""

    configured: int
    tokens: int

    @classmethod
    def stored(cls, reader: RunReader, configured: int) -> MicroBudget:
        kept = reader.meta(META)
        found = msgspec.json.decode(kept, type=cls) if kept else cls(configured, configured)
        return found if found.configured == configured else cls(configured, configured)

    def halve(self, message: GaveUp, store: RunStore) -> None:
        """A rank ran out of memory: allow half the tokens. ConfigError when the micro-batch cannot be cut any
        more, as it was a single episode over the budget."""
        if self.tokens == 1 or (message.episodes == 1 and message.tokens >= self.tokens):
            raise ConfigError(
                f"trainer rank {message.rank}: one episode of {message.tokens} tokens does not fit: "
                f"{message.detail}; set {LESS_MEMORY}, then go on with resume=auto"
            )
        had = max(message.tokens, self.tokens // 4)  # a small rest of a batch is not what was too large
        self.tokens = max(1, min(self.tokens, had) // 2)
        store.put_meta(META, msgspec.json.encode(self).decode())
