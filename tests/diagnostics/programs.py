"""Small trainings as users write them: each with its mistake, and fixed.

A program gives a model, an optimizer, and a step that is called with its number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


@dataclass
class Program:
    """A training: model, optimizers; `step(i)` is forward, backward and their step; `batch(i)` is what it is given."""

    model: nn.Module
    optimizer: Any
    step: Callable[[int], Any]
    batch: Callable[[int], Any] = field(default=lambda i: None)


def line_of(text: str) -> int:
    """Number of the only line of this file that holds a text."""
    lines = [n for n, line in enumerate(Path(__file__).read_text(encoding="utf-8").split("\n"), 1) if text in line]
    assert len(lines) == 1, (text, lines)
    return lines[0]


def train(model: nn.Module, loss: Callable[[int], Tensor], **more: Any) -> Program:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def step(i: int) -> float:
        optimizer.zero_grad()
        value = loss(i)
        value.backward()
        optimizer.step()
        return float(value.detach())

    return Program(model, optimizer, step, **more)


# --- 1. a cache during training -----------------------------------------------------------------------------------------


class CachedAttention(nn.Module):
    """One head of attention over keys and values that a buffer keeps; `input_pos` None: causal, without the cache."""

    def __init__(self, length: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.position = nn.Embedding(length, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, 11)
        self.register_buffer("keys", torch.zeros(1, length, WIDTH))
        self.register_buffer("values", torch.zeros(1, length, WIDTH))

    def forward(self, tokens: Tensor, input_pos: Tensor | None = None) -> Tensor:
        index = torch.arange(tokens.shape[1]) if input_pos is None else input_pos
        q, k, v = self.qkv(self.embed(tokens) + self.position(index)).chunk(3, dim=-1)
        if input_pos is None:
            return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        keys = self.keys.index_copy_(1, input_pos, k)
        values = self.values.index_copy_(1, input_pos, v)
        mask = torch.arange(keys.shape[1]) <= input_pos[:, None]
        return self.out(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask))


def tokens_of(i: int, time: int = 4) -> Tensor:
    return torch.randint(11, (1, time + 1), generator=torch.Generator().manual_seed(i))


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def token_by_token(counted_up: bool) -> Program:
    """Through the cache, which is written between the positions of one backward; the position counted up in place, or new."""
    model = CachedAttention()

    def loss(i: int) -> Tensor:
        tokens, logits = tokens_of(i), []
        input_pos = torch.tensor([0])
        for t in range(4):
            logits.append(model(tokens[:, t : t + 1], input_pos if counted_up else torch.tensor([t])))
            input_pos.add_(1)
        return next_token_loss(torch.cat(logits, dim=1), tokens)

    return train(model, loss)


def whole_sequence(cached: bool) -> Program:
    """The sequence at once. With the cache the first step works, and the cache keeps its graph for the second."""
    model = CachedAttention()

    def loss(i: int) -> Tensor:
        tokens = tokens_of(i)
        return next_token_loss(model(tokens[:, :-1], torch.arange(4) if cached else None), tokens)

    return train(model, loss)


# --- 2. a split hypernetwork --------------------------------------------------------------------------------------------


class Normalised(nn.Module):
    """Divides by a running mean square."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.detached = detached
        self.register_buffer("square", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach() if self.detached else x
        self.square = 0.9 * self.square + 0.1 * seen.square().mean(0)
        return x / self.square.sqrt()


class HyperNetwork(nn.Module):
    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.norm = Normalised(detached)
        self.head = nn.Linear(WIDTH, WIDTH)


def running_statistics(detached: bool) -> Program:
    """The running statistics keep the graph of the step before, unless what feeds them is detached."""
    model = HyperNetwork(detached)
    return train(model, lambda i: model.head(model.norm(model.encoder(data(i)))).square().mean())


def stages_detached() -> Program:
    """What is often tried: detach between the stages. The encoder learns nothing any more."""
    model = HyperNetwork(detached=False)

    def loss(i: int) -> Tensor:
        hidden = model.encoder(data(i))
        between = hidden.detach()
        return model.head(model.norm(between)).square().mean()

    return train(model, loss)


def data(i: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(i))


# --- 3. an embedding run outside the step -------------------------------------------------------------------------------


def embedded_once(handed_in: bool) -> Program:
    """The embedding runs once, for the whole data set; the step is handed its rows, or takes them itself."""
    model = nn.ModuleDict({"embedding": nn.Embedding(20, WIDTH), "head": nn.Linear(WIDTH, 1)})
    words = torch.arange(20)
    embedded = model["embedding"](words)
    batches = [embedded[i * 10 : i * 10 + 10] for i in range(2)]

    def loss(i: int) -> Tensor:
        rows = batches[i] if handed_in else embedded[i * 10 : i * 10 + 10]
        return model["head"](rows.tanh()).square().mean()

    return train(model, loss, batch=lambda i: {"rows": batches[i]} if handed_in else None)


def embedded_fixed() -> Program:
    model = nn.ModuleDict({"embedding": nn.Embedding(20, WIDTH), "head": nn.Linear(WIDTH, 1)})
    words = torch.arange(20)

    def loss(i: int) -> Tensor:
        return model["head"](model["embedding"](words[i * 10 : i * 10 + 10]).tanh()).square().mean()

    return train(model, loss, batch=lambda i: {"words": words[i * 10 : i * 10 + 10]})


# --- 4. an edit of a dispatched model -----------------------------------------------------------------------------------


def dispatch(module: nn.Module) -> None:
    """A `forward` of the instance around the old one, as a closure (accelerate's, before it became a `partial`)."""
    old_forward = module.forward

    def new_forward(*args: Any, **kwargs: Any) -> Any:
        return old_forward(*args, **kwargs)

    module.forward = new_forward


def edited_copy() -> tuple[nn.Module, nn.Module, Tensor]:
    """A copy of a dispatched model with another weight, which its forward never reads. Model, copy and input."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    dispatch(model[2])
    edited = copy.deepcopy(model)
    with torch.no_grad():
        edited[2].weight.add_(1.0)
    return model, edited, data(0)


# --- 5. checkpointing and masks -----------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = (x @ x.transpose(-1, -2) / WIDTH**0.5) * mask
        return x + self.linear(scores @ x)


class Stack(nn.Module):
    """Checkpointed layers that share a mask, which the model changes for each of them."""

    def __init__(self, reentrant: bool, in_place: bool) -> None:
        super().__init__()
        self.reentrant, self.in_place = reentrant, in_place
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[0], x.shape[0]).tril()
        for layer in self.layers:
            if self.in_place:
                mask.mul_(0.9).add_(0.01)
            else:
                mask = mask * 0.9 + 0.01
            x = checkpoint(layer, x, mask, use_reentrant=self.reentrant)
        return x


def masked(reentrant: bool, in_place: bool) -> Program:
    model = Stack(reentrant, in_place)
    return train(model, lambda i: model(data(i).requires_grad_(reentrant)).square().mean())


class Headed(nn.Module):
    """A reentrant checkpoint over frozen embeddings: its input requires no gradient."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH).requires_grad_(False)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, 11)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.head(x)


def reentrant(fixed: bool) -> Program:
    model = Headed(reentrant=not fixed)
    return train(model, lambda i: next_token_loss(model(tokens_of(i)[:, :-1]), tokens_of(i)))


# --- 6. checkpointing over state, and inference mode --------------------------------------------------------------------


class Memory(nn.Module):
    """Adds the mean of what it has seen; the memory is state of the module, or handed in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        key = self.linear(x)
        if self.seen is None:
            self.seen = torch.zeros_like(key)
        self.seen = 0.5 * self.seen.detach() + key.detach()
        return (key * self.seen).tanh()

    def functional(self, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        key = self.linear(x)
        seen = 0.5 * seen + key.detach()
        return (key * seen).tanh(), seen


def checkpointed_state() -> Program:
    """Two forwards, then one backward: the first one's repetition sees what the second has left."""
    model = Memory()

    def loss(i: int) -> Tensor:
        model.seen = None
        first = checkpoint(model, data(2 * i), use_reentrant=False)
        second = checkpoint(model, data(2 * i + 1), use_reentrant=False)
        return (first + second).square().mean()

    return train(model, loss)


def checkpointed_state_fixed() -> Program:
    model = Memory()

    def loss(i: int) -> Tensor:
        seen = torch.zeros(4, WIDTH)
        first, seen = checkpoint(model.functional, data(2 * i), seen, use_reentrant=False)
        second, seen = checkpoint(model.functional, data(2 * i + 1), seen, use_reentrant=False)
        return (first + second).square().mean()

    return train(model, loss)


def double(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 2


def hook_gone(fixed: bool) -> Program:
    """A hook that is removed before backward repeats the checkpointed part."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(i: int) -> None:
        optimizer.zero_grad()
        handle = model[0].register_forward_hook(double)
        loss = checkpoint(model, data(i), use_reentrant=False).square().mean()
        if fixed:
            loss.backward()
            handle.remove()
        else:
            handle.remove()
            loss.backward()
        optimizer.step()

    return Program(model, optimizer, step)


class Positional(nn.Module):
    """Keeps its table of positions once it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[-1]).float().cos()
        return self.linear(x) * self.table


def evaluated(fixed: bool) -> Program:
    """An evaluation before training leaves a table behind."""
    model = Positional()
    with torch.no_grad() if fixed else torch.inference_mode():
        model(data(9))
    return train(model, lambda i: model(data(i)).square().mean())
