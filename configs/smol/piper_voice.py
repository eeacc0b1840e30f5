"""A voice `piper`: neural TTS by Piper (GPL-3, `pip install piper-tts`), of the voices (.onnx files) that PIPER_VOICES names.

PIPER_VOICES=joe.onnx omni-train data prepare IN OUT --speak question --plugin train.recipes.smol.piper_voice --voice piper
"""

import functools
import os
import random
from typing import Any

from train.data.tts.voices import register_voice


@functools.cache
def load(path: str) -> Any:
    from piper import PiperVoice

    return PiperVoice.load(path)


@register_voice("piper")
def speak(text: str, seed: int) -> tuple[Any, int]:
    """Speaks by one of the voices, at 0.8 to 1.2 times its length and with its own noise. Returns samples [S], rate in Hz."""
    import numpy as np
    from piper.config import SynthesisConfig

    rng = random.Random(seed)
    voice = load(rng.choice(os.environ["PIPER_VOICES"].split(os.pathsep)))
    chunks = voice.synthesize(text, SynthesisConfig(length_scale=rng.uniform(0.8, 1.2), noise_scale=rng.uniform(0.4, 0.8)))
    return np.concatenate([chunk.audio_float_array for chunk in chunks]), voice.config.sample_rate
