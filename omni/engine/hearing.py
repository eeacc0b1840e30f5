"""Spoken questions, encoded: by who asks where a core is left beside the steps, else together, between two of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from omni.engine.client import Running
from omni.generate.history import Exchange
from omni.generate.question import FEATURES_NOT_FINITE, Asked, encode_questions, is_finite
from omni.lora.selection import using
from omni.model.speech_model import SpeechModel
from omni.utils.hardware import cores, finish_queued

TOGETHER = 16
"""Questions that are encoded together at most."""

WAIT = 0.03
"""Seconds for which one who asks waits while another encodes; after that the question is encoded between two steps."""


def unheard(running: Running) -> list[Exchange]:
    """Spoken questions of its conversation that the encoder has not heard yet."""
    return [e for e in running.said if e.clip is not None and e.features is None]


def advance(running: Running) -> bool:
    """Encode a chunk of a question that was heard while it came, but not as far as it had come; False where none waits."""
    heard = running.exchange.heard
    if heard is None or not heard.begun:  # the whole is quicker
        return False
    with using(running.active):
        return heard.advance()


@torch.inference_mode()
def encode(model: SpeechModel, alike: Sequence[Running]) -> list[Running]:
    """Encode what is unheard of questions with the same adapters and edits; returns those with features that are not finite,
    whose features are dropped again. Of one that was heard while its sound came, the rest is encoded."""
    todo = [exchange for running in alike for exchange in unheard(running)]
    with using(alike[0].active):
        for exchange in todo:
            if exchange.heard is not None:
                exchange.features, exchange.heard = exchange.heard.finish(), None
        todo = [exchange for exchange in todo if exchange.features is None]
        for low in range(0, len(todo), TOGETHER):
            chunk = todo[low : low + TOGETHER]
            found = encode_questions(model, [Asked(e.turn, e.clip, e.prepared) for e in chunk])
            for exchange, features in zip(chunk, found, strict=True):
                exchange.features, exchange.prepared = features, None
    finish_queued(model.device)
    broken = []
    for running in alike:
        running.encode = running.clock.seconds
        nonfinite = [e for e in running.said if not is_finite(e.features)]
        if nonfinite:
            running.reply.fail(FEATURES_NOT_FINITE)
            broken.append(running)
        for exchange in nonfinite:
            exchange.features = None
    return broken


class Hearing:
    """Encodes questions in the threads of those who ask, where that delays nobody else's sound."""

    def __init__(self, model: SpeechModel) -> None:
        self._model, self._one = model, threading.Lock()

    def beside(self, running: Running) -> None:
        """Do of a question's encoding what can be done beside the steps: at least what the encoder is given.

        On a CPU with more cores than a step takes threads also the rest, one question at a time: others' share the core with
        all else that is done for listeners. What is left, or was not finite, is found by the stepping thread.
        """
        model = self._model
        for exchange in unheard(running):
            if exchange.clip is not None and exchange.prepared is None and exchange.heard is None:
                exchange.prepared = model.config.encoder.prepare(exchange.clip)
        if model.device.type == "cpu" and torch.get_num_threads() < cores() and self._one.acquire(timeout=WAIT):
            try:
                encode(model, [running])
            finally:
                self._one.release()
