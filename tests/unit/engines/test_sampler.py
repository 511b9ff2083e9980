"""The sampler against exact distributions."""

from __future__ import annotations

import pytest
import torch

from asyncrl.engines.torch.sampler import Params, mix_key, sample, uniform


def params(count: int, temperature: float = 1.0) -> Params:
    greedy = temperature == 0
    return Params(
        seed=torch.full((count,), mix_key(7), dtype=torch.long),
        temperature=torch.full((count,), 1.0 if greedy else temperature),
        greedy=torch.full((count,), greedy),
        any_greedy=greedy,
    )


def draw(row: torch.Tensor, count: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    return sample(row.expand(count, -1), torch.arange(count), params(count, temperature), row.shape[-1])


def splitmix64(state: int) -> int:
    mask = (1 << 64) - 1
    x = (state + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_uniform_is_splitmix64_of_key_and_position():
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # published test vector
    for key in (0, 1, 2**63, 2**64 - 1, 123456789):
        seed = splitmix64(key)
        positions = torch.arange(5)
        numbers = uniform(torch.full((5,), mix_key(key), dtype=torch.long), positions)
        golden = 0x9E3779B97F4A7C15
        expected = [(splitmix64(seed + position * golden) >> 12) / 2**52 for position in range(5)]
        assert numbers.tolist() == expected


def test_chi_square_against_softmax():
    torch.manual_seed(0)
    row = torch.randn(20) * 1.5
    count = 40_000
    for temperature in (1.0, 0.7):
        ids, logprobs = draw(row, count, temperature=temperature)
        expected = torch.log_softmax(row / temperature, -1)
        torch.testing.assert_close(logprobs, expected[ids])
        wanted = expected.exp().double() * count
        chi2 = ((ids.bincount(minlength=20) - wanted) ** 2 / wanted).sum().item()
        assert chi2 < 43.8  # 99.9% quantile of chi-square with 19 degrees of freedom


def test_greedy_is_argmax_with_raw_logprobs_beside_sampled_rows():
    torch.manual_seed(1)
    logits = torch.randn(6, 11)
    mixture = params(6)._replace(greedy=torch.tensor([True, False] * 3), any_greedy=True)
    ids, logprobs = sample(logits, torch.arange(6), mixture, 11)
    assert ids[::2].tolist() == logits[::2].argmax(-1).tolist()
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, ids[:, None])[:, 0])


@pytest.mark.parametrize("vocabulary", [1, 20, 256, 1000, 4096])
def test_a_token_is_the_first_whose_cumulative_weight_is_above_the_draw(vocabulary: int):
    """However the sum is made; tokens without weight are never drawn; blocks leave no seams."""
    torch.manual_seed(vocabulary)
    logits = 3 * torch.randn(500, vocabulary)
    logits[:, 1::3] = -torch.inf
    positions = torch.arange(500)
    sampling_params = params(500)
    ids, logprobs = sample(logits, positions, sampling_params, vocabulary)
    cumulative = logits.log_softmax(-1).exp().double().cumsum(-1)
    target = uniform(sampling_params.seed, positions)[:, None] * cumulative[:, -1:]
    wanted = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    near = (cumulative.gather(1, wanted[:, None]) - target).abs().squeeze(1) < 1e-12
    assert torch.equal(ids[~near], wanted[~near]) and near.sum() < 5
    assert logprobs.isfinite().all()


def test_not_finite_logits_give_nan_and_a_valid_id():
    ids, logprobs = sample(torch.full((1, 4), torch.nan), torch.zeros(1, dtype=torch.long), params(1), 4)
    assert 0 <= ids.item() < 4
    assert logprobs.isnan().all()
