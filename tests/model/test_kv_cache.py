"""The cache: laws 1 and 6, and the traps of training through one (facts: autograd 1, 6 and 10)."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from lightning_fabric import Fabric
from torch import nn

from omni.errors import UserError
from omni.model.attention import attention
from omni.model.kv_cache import FunctionalKVCache, KVCache
from tests.close import assert_near

from .conftest import random_tokens

SPLITS = [[11], [1] * 11, [4, 7], [3, 1, 5, 2], [10, 1]]


def make_cache(decoder, rows: int, length: int, **kw) -> KVCache:
    c = decoder.config
    return KVCache(c.layers + c.post_layers, rows, length, c.kv_heads, c.head_size, window=c.window, **kw)


def run(decoder, tokens, cache, split, features=None, index=None):
    """Feed tokens in pieces; the hidden states of all pieces."""
    out, at = [], 0
    for n in split:
        pos = torch.arange(at, at + n).expand(tokens.shape[0], n)
        piece = decoder(
            tokens[:, :, at : at + n], features, None if index is None else index[:, at : at + n], input_pos=pos, cache=cache
        )
        out.append(piece)
        at += n
    return torch.cat([h.text for h in out], 1), torch.cat([h.audio for h in out], 1)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("split", SPLITS, ids=str)
@torch.no_grad()
def test_cached_equals_full_forward_whatever_the_split(decoder, layout, split):
    tokens = random_tokens(layout, 2, 11)
    features = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    index = torch.full((2, 11), -1)
    index[0, 1:4] = torch.arange(3)
    index[1, 2] = 3
    full = decoder(tokens, features, index)
    for cache in (make_cache(decoder, 2, 16, chunk=max(split)), FunctionalKVCache(4, window=decoder.config.window)):
        text, audio = run(decoder, tokens, cache, split, features, index)
        torch.testing.assert_close(text, full.text, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(audio, full.audio, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_rows_may_stand_at_different_places_and_sleep(decoder, layout):
    """Row 0 has 3 positions, row 1 has 6; then both go on, row 0 alone for a while. Each equals its own full forward."""
    one, two = random_tokens(layout, 1, 8, seed=1), random_tokens(layout, 1, 9, seed=2)
    cache = make_cache(decoder, 2, 16, chunk=6)
    first = torch.cat([torch.cat([one[:, :, :3], one[:, :, :3]], 2), two[:, :, :6]])
    pos = torch.tensor([[-1, -1, -1, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    decoder(first, input_pos=pos, cache=cache)
    seen = []
    for step in range(5):  # row 1 sleeps in steps 0 and 1
        awake = step >= 2
        column = torch.cat([one[:, :, 3 + step, None], two[:, :, 6 + step - 2, None] if awake else one[:, :, :1]])
        hidden = decoder(column, input_pos=torch.tensor([[3 + step], [6 + step - 2 if awake else -1]]), cache=cache)
        assert torch.isfinite(hidden.audio).all()
        seen.append(hidden.audio[:, 0])
    full_one, full_two = decoder(one).audio[0], decoder(two).audio[0]
    torch.testing.assert_close(torch.stack([s[0] for s in seen]), full_one[3:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.stack([s[1] for s in seen[2:]]), full_two[6:], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_selected_row_is_the_same_memory_and_reset_forgets_one_row(decoder, layout):
    tokens = random_tokens(layout, 1, 7)
    cache = make_cache(decoder, 3, 16, chunk=7)
    full = decoder(tokens).text
    for row in (2, 0):
        text, _ = run(decoder, tokens, cache.select([row]), [6])
        torch.testing.assert_close(text, full[:, :6], rtol=1e-5, atol=1e-5)
    cache.reset([2])
    assert (cache.positions[2] == -1).all() and (cache.positions[0] >= 0).any()
    last = decoder(tokens[:, :, 6:], input_pos=torch.tensor([[6]]), cache=cache.select([0])).text
    torch.testing.assert_close(last, full[:, 6:], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_rewind_then_other_words_equals_a_fresh_start(decoder, layout):
    kept, dropped, other = random_tokens(layout, 1, 4, 1), random_tokens(layout, 1, 5, 2), random_tokens(layout, 1, 3, 3)
    cache = make_cache(decoder, 1, 12, chunk=9)  # short enough that a window makes no ring, which would forget
    run(decoder, torch.cat([kept, dropped], 2), cache, [9])
    cache.rewind(0, 4)
    after = decoder(other, input_pos=torch.arange(4, 7)[None], cache=cache).text
    fresh = decoder(torch.cat([kept, other], 2)).text[:, 4:]
    torch.testing.assert_close(after, fresh, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_copied_row_goes_on_alike(decoder, layout):
    tokens = random_tokens(layout, 1, 6)
    cache = make_cache(decoder, 2, 16, chunk=5)
    run(decoder, tokens, cache.select([0]), [5])
    cache.copy_row(0, 1)
    both = decoder(tokens[:, :, 5:].expand(2, -1, -1), input_pos=torch.tensor([[5], [5]]), cache=cache).text
    assert torch.equal(both[0], both[1])


@pytest.mark.parametrize("window", [False, True])
@torch.no_grad()
def test_exchanged_rows_go_on_alike(decoder, layout, window):
    """Of different lengths, of which the longer one is all that is exchanged; a window's ring is exchanged whole."""
    from .conftest import SHAPES, Decoder

    decoder = Decoder(SHAPES["mistral"], layout) if window else decoder
    tokens, other = random_tokens(layout, 1, 12), random_tokens(layout, 1, 7, 3)

    def filled():
        cache = make_cache(decoder, 3, 16, chunk=11)
        run(decoder, tokens, cache.select([0]), [11])
        run(decoder, other, cache.select([2]), [6])
        return cache

    last = torch.cat([tokens[:, :, 11:], other[:, :, 6:]])
    before, cache = filled(), filled()
    cache.exchange_rows(0, 2, 11)
    expected = [
        decoder(last[i : i + 1], input_pos=torch.tensor([[p]]), cache=before.select([row]))
        for i, p, row in ((0, 11, 0), (1, 6, 2))
    ]
    got = [
        decoder(last[i : i + 1], input_pos=torch.tensor([[p]]), cache=cache.select([row]))
        for i, p, row in ((0, 11, 2), (1, 6, 0))
    ]
    for one, two in zip(expected, got, strict=True):
        assert torch.equal(one.text, two.text)


@pytest.mark.sampled(3)
@torch.no_grad()
def test_what_a_slot_held_before_is_never_looked_at(decoder, layout):
    """0 * NaN is NaN: what a mask hides must be gone. Rows side by side and gathered ones; reset, rewound and copied onto."""
    tokens, other = random_tokens(layout, 1, 9), random_tokens(layout, 1, 5, 3)

    def spoil(cache, which):
        for memory in (*cache.keys, *cache.values):
            memory.masked_fill_(which[:, :, None, None], math.nan)

    for rows in ([0], [2], [2, 0]):
        both, twice = tokens.expand(len(rows), -1, -1), other.expand(len(rows), -1, -1)
        clean, cache = (make_cache(decoder, 3, 32, chunk=9) for _ in range(2))
        cache.reset()
        spoil(cache, torch.ones_like(cache.positions, dtype=torch.bool))
        expected, got = (run(decoder, both, c.select(rows).limit(9), [7, 2])[0] for c in (clean, cache))
        assert torch.equal(got, expected)
        spoil(cache, cache.positions >= 4)
        for c in (clean, cache):
            for row in rows:
                c.rewind(row, 4)
        pos = torch.arange(4, 9).expand(len(rows), 5)
        expected, got = (decoder(twice, input_pos=pos, cache=c.select(rows).limit(20)).text for c in (clean, cache))
        assert torch.equal(got, expected)
        spoil(cache, (torch.arange(3) == 1)[:, None].expand_as(cache.positions))
        for c in (clean, cache):
            c.copy_row(rows[0], 1, 9)
        pos = torch.full((1, 1), 9)
        expected, got = (decoder(other[:, :, :1], input_pos=pos, cache=c.select([1])).text for c in (clean, cache))
        assert torch.equal(got, expected) and torch.isfinite(got).all()


@torch.no_grad()
def test_a_ring_holds_window_and_chunk_only(layout):
    from .conftest import SHAPES, Decoder

    decoder = Decoder(SHAPES["mistral"], layout)
    cache = make_cache(decoder, 1, 10_000, chunk=3)
    assert cache.slots == 5 + 3 - 1
    tokens = random_tokens(layout, 1, 60)
    text, _ = run(decoder, tokens, cache, [3, 2, 1] * 10)
    torch.testing.assert_close(text, decoder(tokens).text, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="piece of 4 positions"):
        decoder(tokens[:, :, :4], input_pos=torch.arange(60, 64)[None], cache=cache)


def test_writing_while_autograd_records_names_both_ways_out(decoder, layout):
    """mini-omni#111: training over an in-place cache dies in backward, or worse, in the second step. Here it does not start."""
    tokens, pos = random_tokens(layout, 1, 4), torch.arange(4)[None]
    cache = make_cache(decoder, 1, 8, chunk=4)
    with pytest.raises(RuntimeError, match=r"torch.no_grad\(\).*FunctionalKVCache"):
        decoder(tokens, input_pos=pos, cache=cache)
    assert not any(memory.any() or memory.requires_grad for memory in (*cache.keys, *cache.values))


@pytest.mark.untrained("*head.weight", "norm.weight")
def test_training_never_meets_the_cache_and_can_step_twice(decoder, layout):
    """The same story told right: input_pos None trains, steps twice, and a session between the steps changes nothing."""
    tokens = random_tokens(layout, 2, 6)
    twin = copy.deepcopy(decoder)
    for model, talk in ((decoder, True), (twin, False)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            model(tokens).audio.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if talk:
                with torch.no_grad():
                    run(model, tokens, make_cache(model, 2, 8, chunk=6), [5, 1])
    assert decoder.state_dict().keys() == twin.state_dict().keys()
    for name, value in decoder.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name


def test_gradients_flow_through_the_functional_cache(decoder, layout):
    """In float64: gradients of key biases all but cancel, and how fp32 rounds what is left depends on the processor."""
    tokens = random_tokens(layout, 1, 7)
    plain, through = copy.deepcopy(decoder).double(), decoder.double()
    plain(tokens).audio.square().sum().backward()
    _, audio = run(through, tokens, FunctionalKVCache(4, window=decoder.config.window), [3, 2, 2])
    audio.square().sum().backward()
    for (name, a), b in zip(plain.named_parameters(), through.parameters(), strict=True):
        if a.grad is not None:
            assert_near(b.grad, a.grad, 1e-8, name)


class Talker(nn.Module):
    """What Fabric wraps when somebody generates through the wrapped module."""

    def __init__(self, decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens, pos, cache):
        return self.decoder(tokens, input_pos=pos, cache=cache).text


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_cache_writes_are_visible_under_every_precision(decoder, layout, precision):
    """Fabric copies fp32 tensors passed to a wrapped forward under bf16, and writes to the copies are lost. Not here."""
    try:
        fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    except ValueError:  # 16-mixed wants a GPU in some versions
        fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    talker = fabric.setup(Talker(decoder))
    cache = make_cache(decoder, 1, 8, chunk=3)
    with torch.no_grad():
        talker(random_tokens(layout, 1, 3), torch.arange(3)[None], cache)
    for memory in (*cache.keys, *cache.values):
        assert memory[0, :3].abs().sum() > 0
    assert cache.positions[0, :3].tolist() == [0, 1, 2]


def test_bad_positions_are_refused(decoder, layout):
    cache = make_cache(decoder, 1, 4, chunk=4)
    with torch.no_grad():
        if decoder.config.window is None:
            with pytest.raises(UserError, match=r"position 4\b.*length 4\b"):
                decoder(random_tokens(layout, 1, 1), input_pos=torch.tensor([[4]]), cache=cache)
        with pytest.raises(UserError, match="needs \\[1, T\\]"):
            decoder(random_tokens(layout, 2, 1), input_pos=torch.zeros(2, 1, dtype=torch.long), cache=cache)


@pytest.mark.long
def test_a_compiled_step_makes_no_buffer_as_large_as_a_layer(monkeypatch):
    """Inductor writes keys, values and positions where they are; it used to clone all layers and write the clones back."""
    from torch._inductor.graph import GraphLowering

    class Seen(Exception):
        pass

    def see(code: str) -> None:  # the code is made, but not compiled
        written.append(code)
        raise Seen

    written: list[str] = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(see))
    cache = KVCache(2, 4, 1024, 1, 16)
    view = cache.select(range(3)).limit(64)

    def step(position, x):
        mask = view.begin_forward(position)
        for layer in range(2):
            x = attention(x, *view.update(layer, x, x + 1), mask)
        return x

    with torch.inference_mode(), pytest.raises(Exception, match="Seen"):
        torch.compile(step)(torch.tensor([[5], [7], [9]]), torch.randn(3, 1, 1, 16))
    torch._dynamo.reset()
    (code,) = written
    made = [math.prod(map(int, re.findall(r"\d+", shape))) for shape in re.findall(r"= empty_strided_cpu\(\((.*?)\)", code)]
    assert made and max(made) < cache.positions[:3].numel() < cache.keys[0][:3].numel()
