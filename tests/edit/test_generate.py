"""Laws of edits in generation: each row answers as a model with its edits in the weights, and nothing of them stays."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from omni.edit.deltas import Delta, Edits, find_linears, shape_of, stack
from omni.edit.storage import merge
from omni.errors import UserError
from omni.generate.sampling import Sampling
from omni.generate.speech_lm import SpeechLM
from omni.layout import Layout
from omni.lora.attach import add_adapter
from omni.lora.config import LoRAConfig
from omni.lora.peft import merged_state, save_adapter, weights_of
from omni.model.speech_model import SpeechModel
from tests.generate.conftest import make_lm, make_model, tone
from tests.generate.session_toys import inside

WHERE = {
    "mlp": ("decoder.blocks.1.mlp.up", "decoder.blocks.1.mlp.down"),
    "everywhere": ("encoder.blocks.0.mlp.0", "projector.net", "decoder.audio_head", "decoder.blocks.0.attention.q"),
}
DRAWN = Sampling(temperature=0.8)
ASKED = {"sampling": DRAWN, "seed": 3, "max_seconds": 0.8}


def linears(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]


def made(model: nn.Module, seed: int, rank: int | None = 3, every: int = 2) -> Edits:
    """Random edits of every so many linears, large enough to change answers; signed."""
    g = torch.Generator().manual_seed(seed)
    deltas = {}
    for name, part in find_linears(model, linears(model)[seed % every :: every]).items():
        if name == "alignment_head":
            continue
        inputs, outputs = shape_of(part)
        a = None if rank is None else torch.randn(rank, inputs, generator=g)
        deltas[name] = Delta(torch.randn(inputs if rank is None else rank, outputs, generator=g), a, 0.1)
    return Edits(deltas).signed(model)


def merged(layout: Layout, edits: Edits) -> SpeechLM:
    lm = make_lm(layout)
    merge(lm.model, edits)
    return lm


def same(a, b) -> bool:
    return a.tokens == b.tokens and a.text == b.text and (a.codes is None) == (b.codes is None) and (
        a.codes is None or torch.equal(a.codes, b.codes)
    )  # fmt: skip


def trace(model: nn.Module) -> tuple[dict[str, Tensor], list[str], int]:
    """All that a model holds: values, modules and hooks."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return state, [name for name, _ in model.named_modules()], sum(len(part._forward_hooks) for part in model.modules())


def unchanged(model: nn.Module, before: tuple[dict[str, Tensor], list[str], int]) -> bool:
    now = trace(model)
    return now[1:] == before[1:] and all(torch.equal(now[0][name], tensor) for name, tensor in before[0].items())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("assist", [False, True])
@pytest.mark.parametrize("rank", [3, None])
def test_a_session_answers_as_with_its_edits_in_the_weights(layout, lm, rank, assist):
    before, options = trace(lm.model), {**ASKED, "text_assist": assist}
    edits = [made(lm.model, seed, rank) for seed in (0, 1)]
    plain = lm.generate(tone(0.5), **options)
    found = [lm.generate(tone(0.5), edits=one, **options) for one in edits]
    for one, answer in zip(edits, found, strict=True):
        assert same(answer, merged(layout, one).generate(tone(0.5), **options))
    assert not same(found[0], plain) and not same(found[0], found[1])
    assert same(lm.generate(tone(0.5), **options), plain) and unchanged(lm.model, before)


@pytest.mark.sampled(1)
def test_sessions_of_one_model_do_not_disturb_each_other(lm):
    edits = [None, made(lm.model, 0), made(lm.model, 1, None)]
    alone = [lm.generate(tone(0.4), edits=one, max_seconds=0.8) for one in edits]
    before = trace(lm.model)
    sessions = [lm.session(edits=one, max_seconds=0.8) for one in edits]
    streams = dict(enumerate(session.ask(tone(0.4)) for session in sessions))
    while streams:
        for number in list(streams):
            if next(streams[number], None) is None:
                sessions[number].close()  # the others go on without it
                del streams[number]
    for session, wanted in zip(sessions, alone, strict=True):
        turn = session.turns[-1]
        assert turn.text == wanted.tokens and torch.equal(turn.codes, wanted.codes)
    assert unchanged(lm.model, before)


@pytest.mark.long
def test_rows_of_a_batch_have_their_own(layout, lm):
    before, one, two = trace(lm.model), made(lm.model, 0), made(lm.model, 1, None)
    questions = [tone(0.3 + 0.1 * i, 200 + 30 * i) for i in range(6)]
    rows = [None, one, two, one, None, two]
    together = lm.generate(questions, edits=rows, batch_size=4, **ASKED)
    for question, edits, answer in zip(questions, rows, together, strict=True):
        twin = make_lm(layout) if edits is None else merged(layout, edits)
        assert same(answer, twin.generate(question, **ASKED))
    everyone = lm.generate(questions[:2], edits=one, **ASKED)
    assert same(everyone[1], together[1]) and unchanged(lm.model, before)


@pytest.mark.sampled(1)
def test_edits_act_beside_an_adapter(layout, lm, tmp_path: Path):
    other = make_model(layout)
    add_adapter(other, LoRAConfig(("decoder.blocks.*",), rank=3))
    torch.manual_seed(5)
    for key, p in other.named_parameters():
        if key.endswith(".b"):
            p.data.normal_(std=0.1)
    save_adapter(tmp_path / "mine", weights_of(other, other.state_dict()))
    edits = made(lm.model, 0)
    lm.load_adapter(tmp_path / "mine")
    before = trace(lm.model)
    both, adapter_only = (lm.generate(tone(0.5), adapter="mine", edits=e, **ASKED) for e in (edits, None))
    twin = make_lm(layout)
    twin.model = SpeechModel.from_state(other.config, merged_state(other, other.state_dict())).eval()
    assert same(adapter_only, twin.generate(tone(0.5), **ASKED))
    assert same(both, twin.generate(tone(0.5), edits=Edits(edits.deltas), **ASKED)) and not same(both, adapter_only)
    with lm.edited(edits):
        assert same(lm.generate(tone(0.5), adapter="mine", **ASKED), both)
        mixed = lm.generate([tone(0.5)] * 2, adapter=["mine", None], **ASKED)
    assert same(mixed[0], both) and same(mixed[1], lm.generate(tone(0.5), edits=edits, **ASKED))
    assert unchanged(lm.model, before)


@pytest.mark.sampled(1)
def test_an_edited_model_answers_edited_until_the_block_ends(layout, lm):
    before, edits, more = trace(lm.model), made(lm.model, 0), made(lm.model, 1)
    plain, wanted = lm.generate(tone(0.5), **ASKED), merged(layout, edits).generate(tone(0.5), **ASKED)
    with lm.edited(edits) as same_lm:
        assert same_lm is lm and same(lm.generate(tone(0.5), **ASKED), wanted)
        with lm.edited(more):
            twin = merged(layout, stack([edits, more]))
            assert same(lm.generate(tone(0.5), **ASKED), twin.generate(tone(0.5), **ASKED))
            assert same(lm.generate([tone(0.5)], **ASKED)[0], twin.generate(tone(0.5), **ASKED))
        assert same(lm.generate(tone(0.5), edits=more, **ASKED), twin.generate(tone(0.5), **ASKED))
        assert same(lm.generate(tone(0.5), **ASKED), wanted)
    assert unchanged(lm.model, before) and same(lm.generate(tone(0.5), **ASKED), plain)
    with pytest.raises(KeyError), lm.edited(edits):
        raise KeyError
    assert unchanged(lm.model, before)


def test_a_model_in_bfloat16_takes_edits_of_its_weights_in_fp32(layout, lm):
    edits = made(lm.model, 0)
    lm.model.to(torch.bfloat16)
    answer = lm.generate(tone(0.5), edits=edits, **ASKED)
    assert not same(answer, lm.generate(tone(0.5), **ASKED))


def test_a_runner_forgets_edits_that_are_gone(lm):
    for seed in range(3):
        lm.generate(tone(0.3), edits=made(lm.model, seed), max_seconds=0.2)
    lm.generate(tone(0.3), max_seconds=0.2)
    assert len(lm.engine.runner._selection) <= 1


def test_an_answer_that_nobody_takes_leaves_nothing(lm):
    before, edits = trace(lm.model), made(lm.model, 0)
    lm.stream(tone(0.3), edits=edits).close()
    unread = lm.stream(tone(0.3), edits=edits)
    assert not unchanged(lm.model, before)
    del unread
    gc.collect()
    assert unchanged(lm.model, before) and not lm.engine.requests.seats
    with pytest.raises(UserError, match=r"not finite"):
        lm.session(edits=edits.map(lambda t: t * float("nan")))
    assert not lm.engine.requests.seats


@pytest.mark.sampled(1)
def test_a_conversation_forgets_what_it_heard_under_edits_that_are_gone(layout, lm):
    """Turns inside a block and behind it answer as a session whose cache is made again for each of them."""
    edits, turns = made(lm.model, 0), [tone(0.3, 300), tone(0.4, 200), tone(0.3, 250)]

    def conversation(again: bool) -> list:
        answers = []
        with lm.session(**ASKED) as session:
            for number, question in enumerate(turns):
                if again:
                    inside(session)._seat.held.keys = []
                with lm.edited(edits) if number == 1 else nullcontext():
                    answers.append(session.ask(question).answer())
        return answers

    wanted = conversation(again=True)
    assert all(same(a, b) for a, b in zip(conversation(again=False), wanted, strict=True))
