"""A tiny model, recorded episodes, and plain ways to run a learner on them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from asyncrl.buffer.packing import Piece, micro_batches
from asyncrl.config import RunConfig, parse
from asyncrl.store.checkpoints import CheckpointManifest, Checkpoints
from asyncrl.trainer import checkpoint
from asyncrl.trainer.checkpoint import StepFiles
from asyncrl.trainer.export import export_hf
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.model import Policy, PublishedShards
from asyncrl.trainer.scores import Selected
from asyncrl.trainer.world import World
from asyncrl.types import EpisodeResult, Generation, StopReason, Turn, VersionSpan
from asyncrl.wire.messages.trainer import PlannedTrajectory
from tests.fakes.models import VOCABULARY, save_small

BuildLearner = Callable[..., Learner]
Episode = tuple[PlannedTrajectory, list[Turn]]


def save_tiny_model(path: Path) -> str:
    """A two-layer GPT-2 with a tied head, its logits spread enough to be far from uniform.

    Not a Qwen2: its norms compute in float32 whatever the dtype, which would hide differences under 1e-7.
    """
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=64,
        vocab_size=VOCABULARY,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )

    GPT2LMHeadModel(config).save_pretrained(path)
    return str(path)


def save_tiny_qwen(path: Path, *, tied: bool = True) -> str:
    """A two-layer Qwen2."""
    return save_small(path, "Qwen2", tie_word_embeddings=tied)


def tiny_config(path: str, **sections: dict[str, Any]) -> RunConfig:
    """Return the configuration of a run on the tiny model. Keyword arguments are sections of the config."""
    trainer = {"lr": 1e-2, "grad_clip": 0.0, "micro_batch_tokens": 2048, **sections.pop("trainer", {})}
    model = {"path": path, "dtype": "float32", **sections.pop("model", {})}
    rollout = {"max_tokens": 1024, "max_new_tokens": 128, **sections.pop("rollout", {})}
    buffer = {"max_staleness": 4, **sections.pop("buffer", {})}
    run = {"name": "t", "model": model, "data": {"train": "x"}, "rollout": rollout, "trainer": trainer}
    return parse({**run, "buffer": buffer, **sections})


def make_learner(config: RunConfig, world: World, dtype: str = "float64") -> Learner:
    """In a dtype that a run cannot be configured with: only exact numbers can be compared closely."""
    exact = msgspec.structs.replace(config.model, dtype=dtype)
    return Learner(msgspec.structs.replace(config, model=exact), world)


@dataclass(frozen=True)
class Recorder:
    """Makes random episodes whose log-probs are the log-probs of `model` plus normal noise of size
    `noise`."""

    model: Any
    seed: int = 0
    noise: float = 0.0
    temperature: float = 1.0
    prompt: int = 0  # tokens with which all episodes of a group begin

    def groups(self, count: int, members: int, versions: Sequence[int], name: str = "g") -> list[Episode]:
        """Versions of a turn's tokens: drawn from `versions`, not decreasing along the episode."""
        rng = random.Random(self.seed)
        episodes: list[Episode] = []
        for g in range(count):
            prompt = tuple(rng.randrange(VOCABULARY) for _ in range(self.prompt))
            turns = [self._turns(rng, versions, prompt) for _ in range(members)]
            everyone = tuple(_result(rng, some) for some in turns)
            for i, some in enumerate(turns):
                row = make_row(f"{name}{g}/{i}", f"{name}{g}", everyone, i, some, self.temperature)
                episodes.append((row, some))

        return episodes

    def _turns(self, rng: random.Random, versions: Sequence[int], prompt: tuple[int, ...]) -> list[Turn]:
        turns: list[Turn] = []
        drawn = iter(sorted(rng.choice(versions) for _ in range(6)))
        for index in range(rng.randint(1, 3)):
            context = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5)))
            context = (() if index else prompt) + context
            ids = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9)))
            cut = rng.randint(0, len(ids))
            a = next(drawn)
            b = next(drawn)
            spans = (VersionSpan(0, cut, a, a), VersionSpan(cut, len(ids), b, b))
            spans = tuple(span for span in spans if span.end > span.start)
            turns.append(Turn(index, context, Generation(ids, (0.0,) * len(ids), spans, StopReason.STOP)))

        return self.scored(turns, rng)

    @torch.no_grad()
    def scored(self, turns: list[Turn], rng: random.Random) -> list[Turn]:
        ids = [token for turn in turns for token in (*turn.context, *turn.generation.ids)]
        logits = self.model(torch.tensor([ids])).logits[0] / self.temperature
        table = logits.log_softmax(-1)

        scored = []
        position = 0
        for turn in turns:
            position += len(turn.context)
            logps = [
                float(table[position + j - 1, t]) + rng.gauss(0, self.noise)
                for j, t in enumerate(turn.generation.ids)
            ]
            position += len(turn.generation.ids)
            generation = Generation(
                turn.generation.ids, tuple(logps), turn.generation.spans, turn.generation.stop
            )
            scored.append(Turn(turn.index, turn.context, generation))

        return scored


def with_generation(turn: Turn, **changes: Any) -> Turn:
    """The turn with other fields of its generation."""
    generation = msgspec.structs.replace(turn.generation, **changes)
    return msgspec.structs.replace(turn, generation=generation)


def _result(rng: random.Random, turns: list[Turn]) -> EpisodeResult:
    """Return a reward of 0, 0.5 or 1, half of it on the first turn."""
    reward = rng.choice([0.0, 0.5, 1.0])
    by_turn = [0.0] * len(turns)
    by_turn[0] += reward / 2
    by_turn[-1] += reward / 2
    tokens = sum(len(turn.generation.ids) for turn in turns)
    return EpisodeResult(reward, tokens, tuple(by_turn), {"right": reward, "short": 1.0 / tokens})


def make_row(
    uid: str, group: str, members: tuple[EpisodeResult, ...], i: int, turns: list[Turn], temperature: float
) -> PlannedTrajectory:
    own_members = members[i]
    issued = len(members)
    return PlannedTrajectory(uid, group, len(turns), own_members, members, i, issued, temperature, greedy=0.5)


def plain_model(path: str, dtype: torch.dtype = torch.float64) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def full_state(policy: Policy) -> dict[str, Tensor]:
    """The whole weights, copied, on all ranks. A collective."""
    dtype = policy.export_dtype
    return {
        name: shard.detach().full_tensor().to(dtype).clone()
        for name, shard in PublishedShards(policy).items()
    }


def stored(policy: Policy) -> dict[str, Tensor]:
    """Return the weights as they are published, under the names of files. A collective."""
    full_weights = full_state(policy)
    return {piece.name: piece.view_in(full_weights[piece.parameter]) for piece in policy.published}


def save_checkpoint(directory: Path, learner: Learner, manifest: CheckpointManifest, hf: bool = True) -> Path:
    """Write a checkpoint as a run does, without waiting beside training. A collective."""
    to = Checkpoints(directory)
    state = checkpoint.manifest_of(learner, trainer_epoch=0).state
    manifest = msgspec.structs.replace(manifest, state=state)
    checkpoint.write_checkpoint(to, checkpoint.snapshot(learner), manifest, learner, learner.world, hf)
    return directory / f"step-{manifest.step}"


def export(folder: Path, policy: Policy, world: World, source: str) -> str:
    """Write a Hugging Face directory below `folder`. A collective."""
    weights = get_model_state_dict(policy.lm)
    export_hf(StepFiles(Checkpoints(folder), 0).create_file, policy, weights, world, source)
    return str(folder / "step-0" / "hf")


def load_checkpoint(path: Path, learner: Learner) -> CheckpointManifest:
    step = int(path.name.removeprefix("step-"))
    return checkpoint.load_checkpoint(Checkpoints(path.parent), step, learner)


def newest_checkpoint(directory: Path) -> Path | None:
    step = checkpoint.newest_step(Checkpoints(directory))
    return directory / f"step-{step}" if step >= 0 else None


def few_tokens() -> Selected:
    """Two rows of different length, four tokens, two temperatures."""
    ids = torch.randint(0, 40, (2, 11), generator=torch.Generator().manual_seed(0))
    row = torch.tensor([0, 0, 1, 1])
    position = torch.tensor([1, 6, 3, 10])
    return Selected.lay_out(ids.numpy(), row.numpy(), position.numpy(), torch.tensor([1.0, 1.0, 0.7, 0.7]))


@torch.no_grad()
def plain_logp(model: Any, tokens: Selected) -> Tensor:
    """Return log-probs by a model without any of the trainer around the model."""
    logits = model(tokens.ids).logits.flatten(0, 1)[tokens.predictor_index] / tokens.temperature[:, None]
    return logits.log_softmax(-1).gather(1, tokens.labels[:, None])[:, 0]


def random_cut(episodes: Sequence[Episode], ranks: int, parts: int, seed: int) -> list[list[list[Episode]]]:
    """Cut episodes at random into parts of a plan: [part][rank] → episodes, some of them empty."""
    rng = random.Random(seed)
    cut: list[list[list[Episode]]] = [[[] for _ in range(ranks)] for _ in range(parts)]
    for episode in rng.sample(list(episodes), len(episodes)):
        cut[rng.randrange(parts)][rng.randrange(ranks)].append(episode)
    return cut


def balanced_cut(episodes: Sequence[Episode], ranks: int, budget: int) -> list[list[list[Episode]]]:
    """[part][rank] → episodes of like length, `budget` tokens a rank, as in a run."""
    cut = []
    lengths = [sum(len(t.context) + len(t.generation.ids) for t in turns) for _, turns in episodes]
    pieces = [Piece(i, length, 0, 1, length) for i, length in enumerate(lengths)]
    for micro in micro_batches(pieces, budget * ranks, padded=True):
        part = [episodes[i] for i in micro]
        cut.append([part[rank::ranks] for rank in range(ranks)])
    return cut


def run_batch(learner: Learner, cut: list[list[list[Episode]]]) -> dict[str, float]:
    """Train an optimizer batch of this rank's part of a cut."""
    world = learner.world
    for part in cut:
        learner.accumulate(part[world.rank * world.data_ranks // world.size])
    return learner.finish()


def final_gradients(learner: Learner, cut: list[list[list[Episode]]]) -> dict[str, Tensor]:
    """Return the gradients that the optimizers would be given. The models, V included, stay as they are."""
    return gradients_and_metrics(learner, cut)[0]


def gradients_and_metrics(
    learner: Learner, cut: list[list[list[Episode]]]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the result of `final_gradients` and the metrics of the batch."""
    gradients: dict[str, Tensor] = {}

    def capture(prefix: str, model: nn.Module) -> None:
        named = model.named_parameters()
        gradients.update(
            {prefix + name: p.grad.full_tensor().clone() for name, p in named if p.grad is not None}
        )

    with ExitStack() as stack:
        models = [("", learner.policy.lm, learner.optimizer)]
        if learner.critic is not None:
            models.append(("critic.", learner.critic, learner.critic.optimizer))
        for prefix, model, optimizer in models:
            stack.enter_context(mock.patch.object(optimizer, "step", partial(capture, prefix, model)))
        metrics = run_batch(learner, cut)

    learner.step -= 1
    return gradients, metrics


def gradient_gap(
    learner: Learner, episodes: Sequence[Episode], wanted: dict[str, Tensor], parts: int = 3
) -> float:
    """Return the `difference` between the wanted gradients and the gradients of a batch on one rank, cut
    at random."""
    return difference(final_gradients(learner, random_cut(episodes, 1, parts, seed=0)), wanted)


def difference(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest difference relative to the norm of all wanted."""
    assert actual.keys() == wanted.keys()
    norm = torch.stack([tensor.norm() for tensor in wanted.values()]).norm()
    return float(max((actual[name] - wanted[name]).abs().max() for name in wanted) / norm)
