"""Adapters against PEFT's on the same small Mistral, and what they must leave alone."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from omni.convert.lazy import Lazy, lazies_of
from omni.errors import UserError
from omni.lora import attach as lora
from omni.lora.attach import Selection, activate, add_adapter, attach, remove_adapter, using
from omni.lora.config import LoRAConfig
from omni.lora.peft import load_adapter, merged_lazies, merged_state, weights_of
from omni.model.decoder import Decoder
from omni.model.linears import base_checksum, dense_weight, quantize
from tests.close import assert_near
from tests.model.test_decoder_parity import FAMILIES, LAYOUT, TEXT, names

THEIRS, OURS = FAMILIES["mistral"]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


class Ours(nn.Module):
    """A decoder under the name that it has in a speech model."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.decoder = Decoder(OURS, LAYOUT)
        table = dict(source.named_parameters())
        with torch.no_grad():
            self.decoder.audio_embedding.weight.zero_()
            for name, p in self.decoder.named_parameters():
                if "audio" not in name:
                    p.copy_(table[names(name)])

    def forward(self, text: Tensor, segments: Tensor | None = None) -> Tensor:
        tokens = torch.cat([torch.zeros(len(text), 2, text.shape[1], dtype=torch.long), text[:, None]], 1)
        return self.decoder.text_logits(self.decoder(tokens, segments=segments))


def mistral() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(THEIRS).float()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.03)
    return model.eval()


def stir(model: nn.Module, seed: int = 1) -> nn.Module:
    """Give every B something to do."""
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".b"):
                p.copy_(torch.randn(p.shape, generator=dice) * 0.1)
    return model


def ours(targets: tuple[str, ...] = ("decoder.blocks.*", "decoder.text_head"), **changes) -> Ours:
    model = Ours(mistral())
    torch.manual_seed(3)
    add_adapter(model, LoRAConfig(targets, rank=4, **changes))
    return stir(model)  # type: ignore[return-value]


def texts(rows: int = 2, length: int = 12) -> Tensor:
    return torch.randint(TEXT, (rows, length), generator=torch.Generator().manual_seed(7))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["plain", "checkpointing", "packed"])
@pytest.mark.parametrize("stabilized", [False, True])
def test_logits_and_every_gradient_equal_peft(tmp_path: Path, way: str, stabilized: bool) -> None:
    base = mistral()
    settings = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=LINEARS, use_rslora=stabilized, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch.manual_seed(5)
    theirs = peft.get_peft_model(copy.deepcopy(base), settings).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.mul_(0.1 if "lora_B" in name else 1.0)
    theirs.save_pretrained(tmp_path)
    model = Ours(base)
    attach(model, load_adapter(tmp_path).modules())
    model.decoder.checkpointing = way == "checkpointing"
    text = texts()
    wanted = theirs(text).logits
    if way == "packed":
        logits = model(text.reshape(1, -1), segments=torch.arange(2).repeat_interleave(12)[None]).view(2, 12, -1)
    else:
        logits = model(text)
    assert_near(logits, wanted, 1e-5)
    g = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
    logits.backward(g)
    wanted.backward(g)
    table = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if "lora_" in name}
    seen = 0
    for name, part in lora.adapted(model).items():
        for half, letter in (("a", "A"), ("b", "B")):
            key = f"base_model.model.{names(name.removeprefix('decoder.') + '.')}lora_{letter}.weight"
            assert_near(getattr(part.pairs["default"], half).grad, table[key], 1e-6, key)
            seen += 1
    assert seen == len(table) == 2 * (7 * 3 + 1)


def test_a_new_adapter_does_nothing_and_can_learn() -> None:
    plain, model = Ours(mistral()), Ours(mistral())
    targets = add_adapter(model, LoRAConfig(("decoder.blocks.*",), rank=2))
    assert torch.equal(plain(texts()), model(texts()))
    model(texts()).square().sum().backward()
    assert len(targets) == 21
    for part in lora.adapted(model).values():
        pair = part.pairs["default"]
        assert pair.b.grad.abs().max() > 0


def test_the_bases_tensors_keep_names_and_values_and_removal_leaves_no_trace() -> None:
    model = Ours(mistral())
    before = {name: t.clone() for name, t in model.state_dict().items()}
    wanted = model(texts())
    add_adapter(model, LoRAConfig(rank=2))
    stir(model)
    with torch.no_grad():
        assert not torch.allclose(model(texts()), wanted)
    after = model.state_dict()
    assert all(after[name].equal(t) for name, t in before.items())
    remove_adapter(model, "default")
    assert model.state_dict().keys() == before.keys() and torch.equal(model(texts()), wanted)
    assert not any(part._forward_hooks for part in model.modules())


def test_dropout_is_drawn_again_in_training_only_and_checkpointing_repeats_it() -> None:
    model = ours(dropout=0.5)
    found = []
    for checkpointing in (False, True):
        model.train().zero_grad()
        model.decoder.checkpointing = checkpointing
        torch.manual_seed(4)
        out = model(texts())
        out.sum().backward()
        found.append([p.grad.clone() for name, p in model.named_parameters() if "lora" in name])
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    with torch.no_grad():
        assert not torch.equal(model(texts()), model(texts()))
        model.eval()
        assert torch.equal(model(texts()), model(texts()))


@pytest.mark.parametrize("quantized", [None, "nf4"])
def test_weights_merged_as_they_are_read_are_bitwise_the_merged_ones(quantized: str | None) -> None:
    model = Ours(mistral())
    if quantized is not None:
        quantize(model, quantized, ["decoder.blocks.0.*"])  # type: ignore[arg-type]
    add_adapter(model, LoRAConfig(("decoder.blocks.*.attention.*", "decoder.text_head"), rank=4))
    add_adapter(model, LoRAConfig(("decoder.blocks.1.*",), rank=3), "other")
    stir(model, 9)
    state = model.state_dict()
    wanted, read = merged_state(model, state), list[str]()
    lazies = lazies_of(state)
    seen = {name: Lazy.once(lazy.shape, lazy.dtype, partial(noted, read, name, lazy)) for name, lazy in lazies.items()}
    found = merged_lazies(model, seen)
    assert not read and found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].shape, found[name].dtype) == (tuple(tensor.shape), tensor.dtype), name
        read.clear()
        assert torch.equal(found[name](), tensor), name
        own = {key for key in read if not key.startswith(name.removesuffix("weight") + "lora.")}
        assert own <= {name}  # and nothing else


def noted(read: list[str], name: str, lazy: Lazy) -> Tensor:
    read.append(name)
    return lazy()


def test_several_adapters_add_up_and_rows_choose() -> None:
    model = ours()
    torch.manual_seed(8)
    add_adapter(model, LoRAConfig(("decoder.blocks.1.*",), rank=3), "other")
    stir(model, 9)
    text = texts(3)
    with torch.no_grad():
        both = model(text)
        alone = {}
        for name in ("default", "other"):
            activate(model, name)
            alone[name] = model(text)
        activate(model)
        none = model(text)
        assert torch.equal(none, Ours(mistral())(text))
        assert not torch.allclose(both, alone["default"]) and not torch.allclose(alone["default"], alone["other"])
        with using(Selection(("other", "default"), torch.tensor([2, 0, 1]))):
            mixed = model(text)
        with using(Selection(("other",))):
            assert_near(model(text), alone["other"], 1e-6)
    for row, wanted in enumerate((alone["default"], none, alone["other"])):
        assert_near(mixed[row], wanted[row], 1e-6, f"row {row}")
    with using(Selection(("other",))):
        assert not model(text).requires_grad  # backward would recompute without the choice
    assert model(text).requires_grad
    with pytest.raises(UserError, match="no adapter 'thrid'; the model's adapters are default, other"):
        activate(model, "thrid")


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_on_a_quantised_base_it_adds_to_the_dequantised_weights(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 32))
    plain = copy.deepcopy(model)
    quantized = quantize(model, kind, ["*"])  # type: ignore[arg-type]
    assert quantized == ["0", "2"]
    if kind == "nf4":  # double quantisation: the scales of the blocks are held in 8 bits
        assert all(model.get_submodule(n).weight.quant_state.nested for n in quantized)
    add_adapter(model, LoRAConfig(("*",), rank=4))
    stir(model)
    x = torch.randn(5, 128)
    for p in plain.parameters():
        p.requires_grad_(False)
    weights = {name: dense_weight(model.get_submodule(name)) for name in quantized}
    assert all(0 < (weights[n] - plain.get_submodule(n).weight).abs().max() < 0.05 for n in quantized)
    plain.load_state_dict(merged_state(model, model.state_dict()))
    assert_near(plain(x), model(x), 1e-5)
    model(x).sum().backward()
    grads = {name for name, p in model.named_parameters() if p.grad is not None}
    assert grads >= {f"{n}.lora.default.{h}" for n in quantized for h in "ab"} and "0.weight" not in grads
    wanted = model(x)
    with torch.no_grad():
        model.eval()(x)  # answers, as validation has it, change nothing of what follows
    assert torch.equal(model.train()(x), wanted) and model(x).requires_grad
    assert all(dense_weight(model.get_submodule(n)).equal(weights[n]) for n in quantized)
    with pytest.raises(UserError, match="quantised already"):
        quantize(model, kind, ["0"])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_other_processes_take_the_weights_that_the_first_one_quantises(kind: str) -> None:
    def layers() -> nn.Sequential:
        return nn.Sequential(nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 32, bias=False))

    first, sent = layers(), []
    with torch.device("meta"):
        other = layers()
    quantize(first, kind, ["*"], share=lambda packed: sent.append(packed) or packed)  # type: ignore
    quantize(other, kind, ["*"], share=lambda packed: sent.pop(0))  # type: ignore
    assert not sent and other[0].bias.is_meta
    other[0].bias = first[0].bias
    for one, two in zip(first[::2], other[::2], strict=True):
        assert type(one.weight) is type(two.weight) and one.plain_checksum == two.plain_checksum
        assert dense_weight(one).equal(dense_weight(two))  # type: ignore
    x = torch.randn(5, 128)
    assert first(x).equal(other(x))
    assert dense_weight(copy.deepcopy(other)[0]).equal(dense_weight(first[0]))  # type: ignore


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_an_adapter_of_a_quantised_base_knows_the_plain_weights_it_came_from(kind: str) -> None:
    model, other = Ours(mistral()), Ours(mistral())
    with torch.no_grad():
        other.decoder.blocks[1].mlp.up.weight[3, 5] += 0.1
    chosen = add_adapter(model, LoRAConfig())
    base = base_checksum(model, chosen)
    with pytest.raises(UserError, match=r"attention.q\b.*quantise first"):
        quantize(model, kind, ["decoder.blocks.*"])  # type: ignore[arg-type]
    weights = weights_of(model, model.state_dict(), base=base)
    for plain, taken in ((Ours(mistral()), True), (other, False)):
        quantize(plain, kind, ["decoder.blocks.*"])  # type: ignore[arg-type]
        assert (base_checksum(plain, weights.pairs) == weights.base) is taken
