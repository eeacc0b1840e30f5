"""Sampling: the filters against transformers', the draw against its distribution, and rows that draw alike in any company."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from omni.errors import UserError
from omni.generate.options import GREEDY, Sampling
from omni.generate.sampling import Sampler, candidates, draw, mode_of, penalise, per_stream, seed_key, uniform, write_rows
from omni.layout import Layout
from tests.generate.conftest import LAYOUTS

SETTINGS = {
    "temperature": Sampling(0.7),
    "top-k": Sampling(1.3, top_k=5),
    "top-p": Sampling(1.0, top_p=0.8),
    "both": Sampling(0.9, top_k=12, top_p=0.6),
    "narrow": Sampling(1.5, top_k=3, top_p=0.05),
}


def logits_of(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def columns(setting: Sampling, rows: int) -> dict[str, Tensor]:
    return {name: torch.full((rows, 1), value) for name, value in asdict(setting).items()}


def theirs(setting: Sampling, logits: Tensor) -> Tensor:
    """Probabilities that transformers' warpers leave, [B, V]."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(setting.temperature))])
    if setting.top_k:
        warpers.append(TopKLogitsWarper(setting.top_k))
    if setting.top_p < 1:
        warpers.append(TopPLogitsWarper(setting.top_p))
    return warpers(torch.zeros(len(logits), 0, dtype=torch.long), logits.double()).softmax(-1)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("extra", [0, 7])
def test_filters_leave_what_transformers_leaves(name: str, extra: int) -> None:
    setting, logits = SETTINGS[name], logits_of(6, 40)
    ranks = min(40, (setting.top_k or 40) + extra)  # looking at more ranks than a row keeps changes nothing
    weights, ids = candidates(logits[:, None], columns(setting, 6), ranks)
    mine = torch.zeros(6, 1, 40, dtype=torch.double).scatter(2, ids, weights / weights.sum(-1, keepdim=True))
    torch.testing.assert_close(mine[:, 0], theirs(setting, logits), rtol=1e-6, atol=1e-9)


def test_repetition_penalty_is_transformers() -> None:
    logits = logits_of(4, 30)
    said = torch.randint(30, (4, 9), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(4, 1, 30, dtype=torch.bool).scatter(2, said[:, None], True)
    for penalty in (0.8, 1.7):
        mine = penalise(logits[:, None], seen, torch.full((4, 1), penalty))[:, 0]
        torch.testing.assert_close(mine, RepetitionPenaltyLogitsProcessor(penalty)(said, logits.clone()))


def splitmix(x: int) -> int:
    """One output of SplitMix64 in plain integers, state x already advanced."""
    mask = (1 << 64) - 1
    x &= mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_uniform_numbers_equal_plain_integers() -> None:
    golden = 0x9E3779B97F4A7C15
    assert splitmix(golden) == 0xE220A8397B1DCDAF  # the first output for seed 0, published with the reference code
    seeds, steps = [0, 7, -3, 1 << 63, 12345678901234567890123], [0, 1, 2, 1000, 5]
    keys = torch.tensor([seed_key(s) for s in seeds])
    got = uniform(keys, torch.tensor(steps), range(2, 5))
    for i, (seed, step) in enumerate(zip(seeds, steps, strict=True)):
        for j, stream in enumerate(range(2, 5)):
            x = splitmix(splitmix(splitmix(seed) + (step + 1) * golden) + (stream + 1) * golden)
            assert got[i, j].item() == (x >> 11) / 2**53


def chi_square(counts: Tensor, probabilities: Tensor) -> tuple[float, float]:
    """Pearson's statistic and a bound that it passes once in some millions of times (mean + 6 standard deviations)."""
    expected = probabilities * counts.sum()
    used = expected >= 5
    assert counts[~used].sum() <= 6 * expected[~used].sum().sqrt() + expected[~used].sum() + 1e-9
    freedom = int(used.sum()) - 1
    statistic = ((counts[used] - expected[used]) ** 2 / expected[used]).sum().item()
    return statistic, freedom + 6 * math.sqrt(2 * freedom) + 6


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("over", ["seeds", "steps", "streams"])
def test_draws_follow_the_distribution(name: str, over: str) -> None:
    setting, n, vocabulary = SETTINGS[name], 20000, 24
    logits = logits_of(1, vocabulary, seed=3)
    keys = torch.tensor([seed_key(s if over == "seeds" else 5) for s in range(n)])
    steps = torch.arange(n) if over == "steps" else torch.full((n,), 3)
    streams = range(n) if over == "streams" else range(1, 2)
    u = uniform(keys[:1] if over == "streams" else keys, steps[:1] if over == "streams" else steps, streams)
    drawn = draw(logits.expand(n, 1, vocabulary), columns(setting, n), u.view(n, 1), mode_of([setting], vocabulary))
    counts = torch.bincount(drawn.flatten(), minlength=vocabulary).double()
    statistic, bound = chi_square(counts, theirs(setting, logits)[0])
    assert statistic < bound
    wrong, bound = chi_square(counts, theirs(Sampling(setting.temperature * 1.2), logits)[0])
    assert wrong > bound  # the test can tell a temperature from another


def test_neighbouring_keys_draw_independently() -> None:
    """Pairs of draws of neighbouring seeds, steps and streams fill a 10 x 10 grid evenly."""
    keys = torch.tensor([seed_key(s) for s in range(101)])
    grid = torch.stack([uniform(keys, torch.full((101,), t), range(101)) for t in range(3)])  # [step, seed, stream]
    pairs = [(grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:]), (grid[:, :, :-1], grid[:, :, 1:])]
    for a, b in pairs:
        cell = (a * 10).long() * 10 + (b * 10).long()
        statistic, bound = chi_square(torch.bincount(cell.flatten(), minlength=100).double(), torch.full((100,), 0.01))
        assert statistic < bound


def test_a_row_draws_the_same_in_any_company(layout: Layout) -> None:
    plans = [
        GREEDY,
        Sampling(1.0),
        Sampling(0.8, top_k=3),
        Sampling(1.2, top_p=0.7),
        {"text": Sampling(1.0, top_k=4, repetition_penalty=1.5), "audio0": Sampling(2.0)},
        Sampling(0.0, repetition_penalty=3.0),
    ]
    g = torch.Generator().manual_seed(0)
    steps = 12
    audio = torch.randn(steps, len(plans), sum(s.vocabulary for s in layout.audio), generator=g) * 2
    text = torch.randn(steps, len(plans), layout.text.vocabulary, generator=g) * 2

    def run(rows: list[int]) -> Tensor:
        sampler = Sampler(layout, len(rows))
        settings = [per_stream(layout, plans[row]) for row in rows]
        places = range(len(rows))
        write_rows(sampler.targets, places, sampler.prepare(places, settings, [seed_key(row) for row in rows]))
        every, modes = slice(0, len(rows)), sampler.modes(places)
        out = []
        for t in range(steps):
            step = torch.full((len(rows),), t)
            ids = [sampler.draw(audio[t, rows], every, step, modes[0], text=False)]
            ids += [sampler.draw(text[t, rows], every, step, modes[1], text=True)]
            out.append(torch.cat(ids, dim=1))
            sampler.remember(out[-1], every)
        return torch.stack(out)

    together = run(list(range(len(plans))))
    for row in range(len(plans)):
        assert torch.equal(run([row])[:, 0], together[:, row]), plans[row]
    backwards = run(list(reversed(range(len(plans)))))
    assert torch.equal(backwards.flip(1), together)


@pytest.mark.parametrize("setting", [GREEDY, Sampling(5.0), Sampling(5.0, top_k=4), Sampling(5.0, top_p=0.99)])
def test_only_ids_that_the_layout_allows_are_drawn(layout: Layout, setting: Sampling) -> None:
    allowed = layout.allowed()
    vocabulary = [s.vocabulary for s in layout.streams]
    logits = [torch.zeros(64, v) for v in vocabulary]
    for k, v in enumerate(vocabulary):
        logits[k][:, ~allowed[k, :v]] = 50.0  # what is not allowed would always win
    sampler = Sampler(layout, 64)
    for row in range(64):
        write_rows(sampler.targets, [row], sampler.prepare([row], [per_stream(layout, setting)], [seed_key(row)]))
    rows, modes, step = slice(0, 64), sampler.modes(range(64)), torch.zeros(64, dtype=torch.long)
    drawn = sampler.draw(torch.cat(logits[:-1], dim=1), rows, step, modes[0], text=False)
    drawn = torch.cat([drawn, sampler.draw(logits[-1], rows, step, modes[1], text=True)], dim=1)
    assert allowed[torch.arange(len(layout)), drawn].all()


def test_settings_are_given_once_or_by_kind_or_by_stream() -> None:
    layout = LAYOUTS["pad"]
    hot, cool = Sampling(1.0), Sampling(0.5)
    assert per_stream(layout, hot) == (hot,) * 5
    assert per_stream(layout, {"text": cool, "audio": hot}) == (hot,) * 4 + (cool,)
    assert per_stream(layout, {"audio": hot, "audio2": cool}) == (hot, hot, cool, hot, GREEDY)
    with pytest.raises(UserError, match="'audoi' is no stream; did you mean 'audio'"):
        per_stream(layout, {"audoi": hot})


@pytest.mark.parametrize("name", SETTINGS)
def test_a_device_without_float64_draws_within_the_filters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting, rows = SETTINGS[name], 64
    logits = logits_of(rows, 40)[:, None]
    settings = columns(setting, rows)
    key, step = torch.tensor([seed_key(n) for n in range(rows)]), torch.arange(rows)
    fine = uniform(key, step, range(1))
    wanted = draw(logits, settings, fine, mode_of([setting], 40))
    monkeypatch.setattr("omni.generate.sampling.finest", lambda device: torch.float32)
    coarse = uniform(key, step, range(1))
    assert coarse.dtype == torch.float32 and (coarse - fine).abs().max() <= 2.0**-23
    assert torch.equal(draw(logits, settings, coarse, mode_of([setting], 40)), wanted)
