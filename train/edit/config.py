"""Settings of `omni-train edit`."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from omni.edit.config import MendConfig
from omni.errors import UserError
from omni.tasks import find_task
from omni.utils.configuration import configuration, span
from train.data.config import DataConfig, SourceConfig
from train.data.tts.voices import check_spec

SPOKEN, WRITTEN = "A1A2", "T1A2"


@configuration
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
    rate: Annotated[tuple[int, int], span(0)] = (130, 200)
    pitch: Annotated[tuple[int, int], span(0)] = (25, 75)
    pitch_range: Annotated[tuple[int, int], span(0)] = (25, 75)
    silence: Annotated[tuple[float, float], span(0)] = (0.0, 0.1)
    peak: Annotated[float, Field(gt=0, le=1)] = 0.5
    question_rate: int = 16000
    answer_voice: str = "espeak:+f3"
    answer_rate: int = 175
    language: str = "en"

    def __post_init__(self) -> None:
        if not self.voices:
            raise UserError("speak.voices is empty; name at least one, such as espeak")
        for spec in (*self.voices, self.answer_voice):
            check_spec(spec)


@configuration
class FinetuneConfig:
    """Fine-tuning with a bound on the change; the last four are of the mixture that it trains on.

    Attributes:
        bound: largest change: of every single weight (`linf`, dense changes only), or the norm of all changes together (`l2`).
        steps: most steps; it stops earlier when the loss falls below `enough`.
        rank: rank of the changes; null for dense ones.
        seed: of the initial factors of a low-rank change (whose product is zero).
        kl: weight of the divergence on untouched questions from the model without edit.
        each: how many spoken forms each fact is taught in: another voice, other words.
        facts, others: forms of facts, and untouched questions, in one step.
    """

    norm: Literal["linf", "l2"] = "l2"
    bound: PositiveFloat = 10.0
    lr: PositiveFloat = 3e-3
    steps: PositiveInt = 200
    enough: float = 0.0
    rank: PositiveInt | None = 16
    seed: int = 0
    kl: NonNegativeFloat = 1.0
    each: PositiveInt = 24
    facts: PositiveInt = 10
    others: NonNegativeInt = 20

    def __post_init__(self) -> None:
        if self.rank is not None and self.norm == "linf":
            raise UserError("finetune.norm linf bounds single weights, which a change of low rank has none of; use l2")


@configuration
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
        stream_weights: weight of each stream's mean loss, in the layout's order; null for 1 of the text and as much of
            all audio together.
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
    until: PositiveFloat | None = 0.05
    editor_settings: str | None = None
    linears: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ("A1A2", "T1A2")
    stream_weights: tuple[float, ...] | None = None
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    speak: SpeakConfig = field(default_factory=SpeakConfig)
    untouched: SourceConfig | None = None
    untouched_count: NonNegativeInt = 300
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
        if self.editor_settings is not None and self.editor is None:
            raise UserError(f"editor_settings {self.editor_settings!r} without an editor; name the archive they belong to")


@configuration
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

    voices: PositiveInt = 8
    speak: SpeakConfig = field(default_factory=SpeakConfig)
    untouched: SourceConfig | None = None
    untouched_count: NonNegativeInt = 200
    max_seconds: float = 10.0
    batch: PositiveInt = 64
    device: str = "cpu"
    codec_folder: str | None = None
    seed: int = 1
    overwrite: bool = False


@configuration
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
    data: DataConfig
    mend: MendConfig = field(default_factory=MendConfig)
    linears: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ("A1A2",)
    stream_weights: tuple[float, ...] | None = None
    rephrase: str | None = "espeak"
    steps: PositiveInt = 1000
    lr: PositiveFloat = 1e-3
    accumulate: PositiveInt = 4
    others: PositiveInt = 4
    together: PositiveInt = 1
    clip: PositiveFloat = 1.0
    checkpoint_steps: PositiveInt = 100
    log_steps: PositiveInt = 20
    device: str = "cpu"
    codec_folder: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_tasks(self.tasks)
        if self.rephrase is not None:
            check_spec(self.rephrase)


@configuration
class MergeConfig:
    """Merging of edits into a model, or taking them out of it.

    Attributes:
        overwrite: replace a folder of that name.
    """

    overwrite: bool = False


def check_tasks(tasks: tuple[str, ...]) -> None:
    """Refuses (UserError) names that are no task, and tasks that write no answer of their own."""
    if not tasks:
        raise UserError("tasks is empty; name at least one, such as A1A2")
    for name in tasks:
        if find_task(name, "tasks").writes == "question" or not find_task(name).text:
            raise UserError(
                f"task {name} writes no answer of its own, so no fact can be taught by it; use A1A2, A1T2, T1A2 or T1T2"
            )
