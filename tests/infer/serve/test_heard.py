"""Heard-only history: what a client did not hear is in neither transcript, codes nor cache (law 15)."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from infer.serve.realtime.dialogue import turns_of
from infer.serve.realtime.playback import TEXT_AHEAD, Outlet, Pacer
from tests.generate.session_toys import inside
from tests.infer.serve.conftest import Client, noise, pcm, sound_of


def cached(client: Client) -> list[Any]:
    """Keys of the columns that the conversation's row of the cache holds, without the numbers of their turns."""
    held = inside(client.session.responses.dialogue._session)._seat.held
    return [(*key[:-2], key[-1]) for key in held.keys]


def codes_of(client: Client) -> list[np.ndarray]:
    return [item.answer.codes.numpy() for item in client.session.items if item.answer is not None]


async def speak(client: Client, seed: int) -> None:
    await client.send("input_audio_buffer.append", audio=pcm(noise(0.5, seed)))
    await client.send("input_audio_buffer.commit")


async def cut_while_it_plays(client: Client) -> float:
    """Ask, and cancel after some sound; returns the seconds that were heard."""
    await speak(client, 1)
    since = len(client.events)
    await client.send("response.create")
    await client.until("response.output_audio.delta", since)
    await asyncio.sleep(0.35)
    await client.send("response.cancel")
    heard = client.session.responses.last.item.heard
    assert 0.2 < heard < 0.6 and heard < len(sound_of(client.events[since:])) / 24_000
    return heard


async def truncate_after_it_ended(client: Client) -> float:
    """Ask, and say when all was sent that less was heard."""
    await speak(client, 1)
    done = await client.ask()
    item = done["output"][0]["id"]
    came = await client.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=330)
    assert came[-1]["type"] == "conversation.item.truncated" and came[-1]["audio_end_ms"] == 330
    return 0.33


async def hear_less_than_was_counted(client: Client) -> float:
    """The client's own count is less than that of the server's clock."""
    heard = await cut_while_it_plays(client)
    item = client.session.responses.last.item.id
    less = int(heard * 1000) - 130
    came = await client.send("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=less)
    assert came[-1]["type"] == "conversation.item.truncated"
    return less / 1000


async def hear_nothing(client: Client) -> float:
    await speak(client, 1)
    done = await client.ask()
    await client.send("conversation.item.truncate", item_id=done["output"][0]["id"], content_index=0, audio_end_ms=0)
    return 0.0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cut", [cut_while_it_plays, truncate_after_it_ended, hear_less_than_was_counted, hear_nothing])
async def test_the_cache_is_that_of_a_conversation_in_which_only_what_was_heard_was_said(talk: Any, lm: Any, cut: Any) -> None:
    async with talk() as client:
        heard = await cut(client)
        item = client.session.responses.last.item
        frames = int(heard * 25 + 1e-6)
        assert codes_of(client)[0].shape[1] == frames
        told = (await client.send("conversation.item.retrieve", item_id=item.id))[0]["item"]
        assert told["content"] == [{"type": "output_audio", "transcript": item.answer.text}] and told["status"] == "incomplete"
        first = item.answer
        await speak(client, 2)
        done = await client.ask()
        # the same, said by messages: a question and the heard part of its answer
        question = next(iter(client.session.items)).content[0].sound
        history = [{"role": "user", "content": {"array": question, "sampling_rate": 24_000}}, first]
        with lm.session(history=history, max_seconds=1.0, max_tokens=12, overflow="forget") as other:
            answer = other.ask((np.round(np.clip(noise(0.5, 2), -1, 1) * 32767)).astype(np.int16), sample_rate=24_000).answer()
            assert answer.text == done["output"][0]["content"][0]["transcript"]
            assert np.array_equal(answer.codes.numpy(), codes_of(client)[1])
            wanted = [(*key[:-2], key[-1]) for key in inside(other)._seat.held.keys]
        assert cached(client) == wanted


@pytest.mark.long
async def test_a_long_conversation_is_not_told_to_the_engine_again(talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples of its oldest questions are dropped, which the engine's session had, or has forgotten itself."""
    async with talk() as client:
        engine, made = client.session.responses.dialogue._host.engine, []
        session = engine.session
        monkeypatch.setattr(engine, "session", lambda **options: made.append(options) or session(**options))
        client.session.items.kept = 1.2
        for seed in range(6):
            await speak(client, seed)
            assert (await client.ask())["status"] in ("completed", "incomplete")
        held = [part.sound is not None for item in client.session.items if item.role == "user" for part in item.content]
        assert held == [False] * 4 + [True] * 2
        assert len(made) == 1
        first = next(iter(client.session.items)).id  # one that is deleted is forgotten at once, by a new session without it
        await client.send("conversation.item.delete", item_id=first)
        await speak(client, 7)
        assert (await client.ask())["status"] in ("completed", "incomplete")
        assert len(made) == 2 and len(made[-1]["history"]) == 2  # the newest turn, whose sound is there


@pytest.mark.long
async def test_an_older_answer_is_cut_and_the_next_one_knows_it(talk: Any, lm: Any) -> None:
    async with talk() as client:
        first = (await client.ask("one"))["output"][0]["id"]
        await client.ask("two")
        await client.send("conversation.item.truncate", item_id=first, content_index=0, audio_end_ms=200)
        await client.ask("three")
        before, _ = turns_of(client.session.items)
        history = [message for turn in before[:-1] for message in turn.messages()]
        assert history[1].codes.shape[1] == 5 and history[1].cut
        with lm.session(history=history, max_seconds=1.0, max_tokens=12) as other:
            assert np.array_equal(other.ask("three", "T1A2").answer().codes.numpy(), codes_of(client)[2])


async def test_a_question_without_an_answer_is_a_turn_of_which_nothing_was_heard(talk: Any, lm: Any) -> None:
    async with talk() as client:
        content = [{"type": "input_text", "text": "one"}]
        await client.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        await client.ask("two")
        before, _ = turns_of(client.session.items)
        history = before[0].messages()
        with lm.session(history=history, max_seconds=1.0, max_tokens=12) as other:
            assert np.array_equal(other.ask("two", "T1A2").answer().codes.numpy(), codes_of(client)[0])


async def test_deleted_items_are_forgotten(talk: Any, lm: Any) -> None:
    async with talk() as client:
        first = (await client.ask("one"))["output"][0]["id"]
        question = next(iter(client.session.items)).id
        for item in (first, question):
            await client.send("conversation.item.delete", item_id=item)
        await client.ask("two")
        alone = lm.generate("two", "T1A2", max_seconds=1.0, max_tokens=12)
        assert np.array_equal(alone.codes.numpy(), codes_of(client)[0])


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_heard_is_the_least_of_what_was_sent_and_of_the_time_less_the_gaps() -> None:
    clock, sent = Clock(), []
    outlet = Outlet(1000, sent.append, clock)
    piece = np.zeros(100, np.float32)
    assert outlet.heard == 0
    outlet.send(piece)
    outlet.send(piece)
    assert outlet.heard == pytest.approx(0) and outlet.ahead() == pytest.approx(0.2)
    clock.now += 0.15
    assert outlet.heard == pytest.approx(0.15)
    clock.now += 0.15  # 0.1 of it after the last sample
    assert outlet.heard == pytest.approx(0.2) and outlet.underruns == 0
    outlet.send(piece)
    assert outlet.heard == pytest.approx(0.2) and outlet.underruns == 1
    clock.now += 0.05
    assert outlet.heard == pytest.approx(0.25)
    clock.now += 9
    assert outlet.heard == pytest.approx(0.3) == outlet.sent


async def test_sound_is_never_further_ahead_than_the_lead_and_text_keeps_with_it() -> None:
    sent, told = [], list[tuple[str, float]]()
    outlet = Outlet(1000, sent.append)
    pacer = Pacer(outlet, 0.25)
    for number in range(10):
        pacer.text(f"{number}", number * 0.1)
    pacer.sound(np.arange(1000, dtype=np.float32))
    pacer.close()
    running, most = asyncio.create_task(pacer.run(lambda text: told.append((text, outlet.sent)))), 0.0
    while not running.done():
        most = max(most, outlet.ahead())
        await asyncio.sleep(0.002)
    assert most <= 0.25 and outlet.underruns == 0
    assert np.array_equal(np.concatenate(sent), np.arange(1000))
    assert max(map(len, sent)) <= 100
    assert "".join(text for text, _ in told) == "0123456789"
    assert all(int(text) * 0.1 <= at + TEXT_AHEAD + 1e-6 for text, at in told)


def test_a_softer_answer_has_no_step_in_it() -> None:
    sent: list[np.ndarray] = []
    outlet = Outlet(1000, sent.append)
    for on in (False, True, True, False, False):
        outlet.soft = on
        outlet.send(np.ones(100, np.float32))
    sound = np.concatenate(sent)
    assert np.abs(np.diff(sound)).max() < 0.01
    assert sound[250] == pytest.approx(0.2) and sound[-1] == sound[0] == 1
