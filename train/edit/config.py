"""Settings of `omni-train edit`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from omni.edit.config import FinetuneConfig, MendConfig
from omni.errors import UserError
from omni.tasks import find_task
from train.data.config import DataConfig, SourceConfig
from train.data.tts.voices import check_spec

SPOKEN, WRITTEN = "A1A2", "T1A2"


@dataclass(frozen=True)
class SpeakConfig:
    """TTS of questions and answers that are given as texts.

    Attributes:
        voices: voices that ask, as `voice` of `train data prepare`: `espeak:en-us+f3`, `espeak` (another one each time),
            `command:...` or `module:callable`.
        rate, pitch, pitch_range: of espeak-ng's voices, from and to: words per minute, and its settings of 0 to 100.
        silence: seconds before and after a question.
        peak: largest amplitude of a question.
        question_rate: samples per second of a question.
        answer_voice: the voice that says an answer that is given as text.
        answer_rate: its words per minute, where it is espeak-ng.
        language: of questions and answers.
    """

    voices: tuple[str, ...] = ("espeak",)
    rate: tuple[int, int] = (130, 200)
    pitch: tuple[int, int] = (25, 75)
    pitch_range: tuple[int, int] = (25, 75)
    silence: tuple[float, float] = (0.0, 0.1)
    peak: float = 0.5
    question_rate: int = 16000
    answer_voice: str = "espeak:+f3"
    answer_rate: int = 175
    language: str = "en"

    def __post_init__(self) -> None:
        if not self.voices:
            raise UserError("speak.voices is empty; name at least one, such as espeak")
        for spec in (*self.voices, self.answer_voice):
            check_spec(spec)
        for name in ("rate", "pitch", "pitch_range", "silence"):
            first, last = getattr(self, name)
            if not 0 <= first <= last < float("inf"):
                raise UserError(f"speak.{name} is {first} to {last}; it goes from at least 0 upwards")
        if not 0 < self.peak <= 1:
            raise UserError(f"speak.peak is {self.peak}; it lies above 0 and is at most 1")


@dataclass(frozen=True)
class TeachConfig(FinetuneConfig):
    """Fine-tuning (`omni.edit.finetune`); the last four are of the mixture that it trains on.

    Attributes:
        kl: weight of the divergence on untouched questions from the model without edit.
        each: how many spoken forms each fact is taught in: another voice, other words.
        facts, others: forms of facts, and untouched questions, in one step.
    """

    norm: Literal["linf", "l2"] = "l2"
    bound: float = 10.0
    lr: float = 3e-3
    steps: int = 200
    enough: float = 0.0
    rank: int | None = 16
    kl: float = 1.0
    each: int = 24
    facts: int = 10
    others: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl < 0 or min(self.each, self.facts) < 1 or self.others < 0:
            raise UserError(
                f"finetune.kl {self.kl} and others {self.others} must not be negative, each {self.each} and facts {self.facts} "
                "at least 1"
            )


@dataclass(frozen=True)
class ApplyConfig:
    """An edit.

    Attributes:
        method: `finetune`, or `mend` with the folder of an editor that `edit fit` has trained.
        editor: that folder, or an archive that eric-mitchell/mend or EasyEdit saved.
        until: an editor's correction of a fact asked once is taken at the least strength at which the loss on each of its forms
            (`finetune.each` of them) is this or less, in nats a target, or the highest is least: stronger ones change other
            answers too. null for the strength that the editor gives.
        editor_settings: such an archive's `config.json` or YAML, where it does not name the linears itself.
        linears: names of the linears that change: shell patterns, or regular expressions after `re:`; by default the MLPs of
            the last three blocks. An editor has its own.
        tasks: the tasks as which facts are taught: spoken questions (A1...) and written ones (T1...).
        stream_weights: weight of each stream's mean loss, in the layout's order; null for 1 each.
        finetune: of the method `finetune`.
        speak: TTS of questions and answers.
        untouched: where untouched questions are from, besides those of the facts; null for none.
        untouched_count: how many of them; a question that is to change is left out.
        device: where it is computed.
        codec_folder: the codec's weights, where they are not in the model folder.
        seed: of all draws.
        overwrite: replace an edits folder of that name.
    """

    method: Literal["finetune", "mend"] = "finetune"
    editor: str | None = None
    until: float | None = 0.05
    editor_settings: str | None = None
    linears: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ("A1A2", "T1A2")
    stream_weights: tuple[float, ...] | None = None
    finetune: TeachConfig = field(default_factory=TeachConfig)
    speak: SpeakConfig = field(default_factory=SpeakConfig)
    untouched: SourceConfig | None = None
    untouched_count: int = 300
    device: str = "cpu"
    codec_folder: str | None = None
    seed: int = 0
    overwrite: bool = False

    def __post_init__(self) -> None:
        check_tasks(self.tasks)
        if self.editor is None and self.method == "mend":
            raise UserError("method mend needs --editor FOLDER, an editor that `edit fit` trained")
        if self.editor is not None and self.method != "mend":
            raise UserError(
                f"--editor {self.editor} is given, but method {self.method} takes none; give --method mend, or leave it out"
            )
        if self.until is not None and not self.until > 0:
            raise UserError(f"until is {self.until}; it must be above 0, or null for the strength that the editor gives")
        if self.editor_settings is not None and self.editor is None:
            raise UserError(f"editor_settings {self.editor_settings!r} without an editor; name the archive they belong to")
        if self.untouched_count < 0:
            raise UserError(f"untouched_count is {self.untouched_count}; it must not be negative")


@dataclass(frozen=True)
class EditEvalConfig:
    """An evaluation of edits.

    Attributes:
        voices: how many questions each fact is asked as, in the voices of `speak`: name others than those that taught.
        untouched: where untouched questions are from, besides those of the facts: its held-out rows, or any rows of a
            source that holds none out; null for none.
        untouched_count: how many of them.
        max_seconds: longest spoken answer.
        batch: questions that are answered side by side.
        speak, device, codec_folder, seed: as for `edit apply`.
        overwrite: replace what is in the output folder.
    """

    voices: int = 8
    speak: SpeakConfig = field(default_factory=SpeakConfig)
    untouched: SourceConfig | None = None
    untouched_count: int = 200
    max_seconds: float = 10.0
    batch: int = 64
    device: str = "cpu"
    codec_folder: str | None = None
    seed: int = 1
    overwrite: bool = False

    def __post_init__(self) -> None:
        if min(self.voices, self.batch) < 1 or self.untouched_count < 0:
            raise UserError(
                f"voices {self.voices} and batch {self.batch} must be at least 1, untouched_count {self.untouched_count} 0"
            )


@dataclass(frozen=True)
class EditFitConfig:
    """A run that trains an editor: MEND on rows of data, whose answers are exchanged for one another's.

    Attributes:
        model: a model folder.
        out: folder of the run: `checkpoint` while it trains, `editor` when it is done.
        data: rows, as of `omni-train fit`; only sources, seed and cache are used.
        mend: the hypernetwork (`omni.edit.mend`).
        linears: as for `edit apply`.
        tasks, stream_weights: as for `edit apply`.
        rephrase: the voice that asks the same question again, on which an edit is judged, as one of `speak.voices`; null for
            the same sound.
        steps, lr: of Adam.
        accumulate: edits a step.
        others: unrelated questions beside each edit.
        together: corrections that act together in one edit, from 1 to this many; as many as facts will be applied at once.
        clip: largest norm of the gradient.
        checkpoint_steps: steps between checkpoints.
        log_steps: steps between lines of the log.
        device, codec_folder, seed: as for `edit apply`.
    """

    model: str
    out: str
    data: DataConfig = field(default_factory=DataConfig)
    mend: MendConfig = field(default_factory=MendConfig)
    linears: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ("A1A2",)
    stream_weights: tuple[float, ...] | None = None
    rephrase: str | None = "espeak"
    steps: int = 1000
    lr: float = 1e-3
    accumulate: int = 4
    others: int = 4
    together: int = 1
    clip: float = 1.0
    checkpoint_steps: int = 100
    log_steps: int = 20
    device: str = "cpu"
    codec_folder: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_tasks(self.tasks)
        for name in ("steps", "accumulate", "others", "together", "checkpoint_steps", "log_steps"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 < self.lr < float("inf") or not self.clip > 0:
            raise UserError(f"lr {self.lr} and clip {self.clip} must be numbers above 0")
        if self.rephrase is not None:
            check_spec(self.rephrase)


def check_tasks(tasks: tuple[str, ...]) -> None:
    """Refuses (UserError) names that are no task, and tasks that write no answer of their own."""
    if not tasks:
        raise UserError("tasks is empty; name at least one, such as A1A2")
    for name in tasks:
        if find_task(name, "tasks").writes == "question" or not find_task(name).text:
            raise UserError(
                f"task {name} writes no answer of its own, so no fact can be taught by it; use A1A2, A1T2, T1A2 or T1T2"
            )
