"""Settings of an evaluation."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from omni.errors import UserError
from omni.generate.options import Sampling
from omni.tasks import find_task
from omni.utils.configuration import configuration
from omni.utils.hardware import check_device, check_dtype, check_quantize
from train.data.readers import ReaderOptions


@configuration
class EvalConfig:
    """An evaluation: how the data are read, how the questions are asked, and what is measured.

    Attributes:
        task: what the questions are asked as; by default A1T1 for LibriSpeech and Common Voice, A1T2 for VoiceBench (A1A2 with
            `asr`), else what the rows' parts allow.
        limit: how many questions are asked, spread evenly over the data; by default all.
        normaliser: what texts become before they are compared: whisper (openai-whisper's, of the row's language) or basic
            (lower case, no punctuation).
        by: a field of the rows, such as speaker, source or a column of VoiceBench, by whose values the figures are reported
            too; voice keeps people apart from synthetic voices, whose speaker has a colon (espeak:en-us).
        asr: speech recogniser for the spoken answers: a Whisper (OpenAI's .pt file or a Hugging Face folder), or sphinx
            (pocketsphinx with the words of `asr_words`); by default none.
        asr_words: all the words that sphinx may recognise, such as [zero, one].
        asr_longest: most words of an answer that sphinx recognises.
        timed: how many questions are streamed one by one, for first audio and real-time factor.
        turns: also ask all turns of each row one after another, each after the model's own answers before it: exact match by
            source (of prepared dialogues, by skill) and turn.
        text: also ask the questions in writing (T1T2): whether spoken ones are answered as these, perplexity of the reference
            answers.
        text_before: the model before its speech training (a model folder, or a language model's Hugging Face folder), whose
            text-only score is set beside this one's.
        batch: questions that are answered side by side.
        max_seconds: longest spoken answer.
        max_tokens: longest answer of a task that only writes.
        temperature: 0 takes the likeliest id (greedy); above 0 draws, by `seed`.
        top_k: draw among the k likeliest ids; 0 for all.
        seed: of the draws; each question draws by itself.
        device: where the model runs, such as cpu or cuda.
        dtype: number format of the weights: float32, bfloat16 or float16; by default as they are stored.
        quantize: int8 for linears and tables in int8, on a CPU.
        chunk_ms: how much of a question the encoder hears at once (`encoder.mode: chunked`), 0 for all of it; by default as it
            is stored.
        against: a model of the same layout, such as the original in full precision of one in int8. It answers the same
            questions, the difference is shown, and for some of them how far the distributions are apart; its weights are taken
            as they are stored.
        against_limit: how many questions the distributions are compared on.
        codec_folder: the codec's weights, where they are not in the model folder.
        read: about the data and their form, as for `train data prepare`; `read.format` may also be voicebench or rows (those of
            `train data prepare`).
    """

    task: str | None = None
    limit: PositiveInt | None = None
    normaliser: Literal["whisper", "basic"] = "whisper"
    by: str = "voice"
    asr: str | None = None
    asr_words: list[str] = field(default_factory=list)
    asr_longest: PositiveInt = 8
    timed: NonNegativeInt = 8
    turns: bool = False
    text: bool = False
    text_before: str | None = None
    batch: PositiveInt = 16
    max_seconds: PositiveFloat = 30.0
    max_tokens: PositiveInt = 256
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0
    device: str = "cpu"
    dtype: str | None = None
    quantize: str | None = None
    chunk_ms: NonNegativeInt | None = None
    against: str | None = None
    against_limit: PositiveInt = 100
    codec_folder: str | None = None
    read: ReaderOptions = field(default_factory=ReaderOptions)

    def __post_init__(self) -> None:
        if self.task is not None:
            find_task(self.task)
        check_device(self.device)
        check_dtype(self.dtype)
        check_quantize(self.quantize, self.device)
        if self.asr == "sphinx" and not self.asr_words:
            raise UserError("--asr sphinx needs the words that it may recognise: give --asr_words '[zero, one, two]'")
        _ = self.answering  # sampling has its own checks

    @property
    def answering(self) -> dict[str, Any]:
        """The options of `SpeechLM.generate`, `stream` and `session`."""
        sampling = Sampling(temperature=self.temperature, top_k=self.top_k)
        return {"sampling": sampling, "max_seconds": self.max_seconds, "max_tokens": self.max_tokens}

    def deciding(self) -> dict[str, Any]:
        """The settings that the stored answers depend on, by their names in the file: another start may change the others."""
        names = ("normaliser", "batch", "max_seconds", "max_tokens", "temperature", "top_k", "seed")
        read = ("folder", "prefix", "audio", "codec", "order", "packing", "language", "task", "pause")
        settings = {name: getattr(self, name) for name in names} | {name: getattr(self.read, name) for name in read}
        settings |= {"ear": self.asr, "ear_words": self.asr_words, "ear_longest": self.asr_longest, "questions": self.limit}
        settings |= {name: value for name in ("dtype", "quantize", "chunk_ms") if (value := getattr(self, name)) is not None}
        settings |= {f"read.{name}": getattr(self.read, name) for name in ("rows", "seed", "part")}
        return settings | {"columns": dict(self.read.columns)}
