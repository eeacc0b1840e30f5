"""A question is heard through the parts of the task it is asked as."""

from __future__ import annotations

from dataclasses import replace

import torch

from omni.config import ProjectorConfig
from omni.generate.question import encode_questions, read_question
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer
from tests.close import assert_near
from tests.generate.conftest import LAYOUTS, make_model, tone

SPOKEN = ("A1T1", "A1A2", "A1T2")


def shared_model() -> SpeechModel:
    plain = make_model(next(iter(LAYOUTS.values())))
    torch.manual_seed(1)
    model = SpeechModel(replace(plain.config, projector=ProjectorConfig("cgc", stack=2))).eval()
    model.decoder.load_state_dict(plain.decoder.state_dict())
    return model


def test_the_task_of_a_question_chooses_its_parts() -> None:
    """Together as alone, and otherwise for another task; the projector's own parts are what training gives the clip."""
    model, tokenizer = shared_model(), Tokenizer.bytes()
    asked = [read_question(tone(0.4 + 0.1 * i), task, model.config, tokenizer) for i, task in enumerate(SPOKEN)]
    together = encode_questions(model, asked)
    for task, one, found in zip(SPOKEN, asked, together, strict=True):
        (alone,) = encode_questions(model, [one])
        assert one.clip is not None and found is not None and alone is not None
        assert_near(found, alone, 1e-5)
        mel = model.encoder.config.features(one.clip)
        with torch.no_grad():
            frames = [model.encoder.config.frames(len(one.clip))]
            wanted, other = (
                model.encode(mel[None], [mel.shape[1]], frames, [name]) for name in (task, SPOKEN[SPOKEN.index(task) - 1])
            )
        assert_near(found, wanted, 1e-5)
        assert not found.allclose(other, rtol=1e-2)
