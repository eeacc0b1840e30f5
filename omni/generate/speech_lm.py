"""`SpeechLM`: the Python interface to a trained model.

lm = SpeechLM.from_pretrained("runs/demo/model")
answer = lm.generate("question.wav")                     # text and sound
for event in lm.stream("question.wav"): ...              # as they come
with lm.session() as session:                            # several turns over one cache
    for event in session.ask("question.wav"): ...
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omni.checkpoint.folder import load_folder
from omni.checkpoint.places import find_adapter
from omni.codec.base import AudioCodec
from omni.cpu import compiled, is_int8, takes_bf16, use_fast
from omni.edit.deltas import Bases, Edits, attach_edits, attached, edited_everywhere
from omni.engine.answer import Pace, WhenFull
from omni.engine.conversation import Conversation, LocalLink
from omni.engine.engine import Engine
from omni.engine.listener import Listener
from omni.errors import UserError
from omni.generate.history import History, read_history
from omni.generate.options import check_numbers, make_options
from omni.generate.question import SAMPLE_RATE, read_question, read_system
from omni.generate.results import Answer
from omni.generate.session import Session, Sessions
from omni.generate.speech_time import SpeechTime
from omni.lora.attach import activate, active_of, adapter_names, attach, detach, kept, remove_adapter, selection_of
from omni.lora.peft import check_base, load_adapter
from omni.model.linears import base_weight, fuse, has_weight, linears_of
from omni.model.speech_model import SpeechModel
from omni.pretrained import find_model
from omni.stores.reading import local_path
from omni.tasks import prompt
from omni.text import Tokenizer
from omni.utils.hardware import check_kernels, check_quantize, find_device, find_dtype

LOG = logging.getLogger(__name__)


class SpeechLM(Sessions):
    """A speech language model with its tokenizer and codec, which answers questions.

    Weights are shared by any number of sessions and never changed; all of them are answered by one engine. UserError: the
    tokenizer has more ids than the text stream, or the codec's codebooks are not the layout's.

    Args:
        model, tokenizer: they must fit each other.
        codec: turns frames into sound; None gives answers without sound.
        graph: capture decoding steps as CUDA graphs; by default on CUDA.
        compile: run decoding steps through `torch.compile`.
        speech_time: speaking time of the model's voice; by default English at about 15 characters a second.
    """

    _link: LocalLink

    def __init__(
        self,
        model: SpeechModel,
        tokenizer: Tokenizer,
        codec: AudioCodec | None = None,
        *,
        graph: bool | None = None,
        compile: bool = False,
        speech_time: SpeechTime | None = None,
    ) -> None:
        layout = model.layout
        if len(tokenizer) > layout.text.size:
            raise UserError(
                f"the tokenizer has {len(tokenizer)} ids, but the model's text stream has {layout.text.size}; "
                "use the tokenizer that the model was made with"
            )
        if codec is not None and tuple(codec.codebook_sizes) != layout.codebook_sizes:
            raise UserError(
                f"codec {codec.name} has codebooks {tuple(codec.codebook_sizes)}, but the model's audio streams are "
                f"{layout.codebook_sizes}; use the codec that the model was made with"
            )
        rates = (0, 0.0) if codec is None else (codec.sample_rate, codec.frame_rate)
        super().__init__(LocalLink(weakref.proxy(self)), model.config, tokenizer, *rates)
        self.model, self.codec = model, codec
        self.speech_time = speech_time or SpeechTime()
        self._graph, self._compile = graph, compile
        self._engine: Engine | None = None
        self._folder: str | None = None
        self._lock = threading.Lock()
        self._bases = Bases()

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        device: str | int | torch.device = "cpu",
        dtype: str | torch.dtype | None = None,
        *,
        quantize: str | None = None,
        codec_folder: str | os.PathLike[str] | None = None,
        kernels: str = "fast",
        graph: bool | None = None,
        compile: bool = False,
        chunk_ms: int | None = None,
    ) -> SpeechLM:
        """Read a model folder (see `omni.checkpoint.folder`). UserError: anything is wrong with the folder, or there is no such
        device or number format.

        Args:
            folder: its path, or its address (`s3://`, `gs://`, `hf://`, `https://`), from which it is brought into the cache;
                "nano", where no folder is called so, is the one that ships with the package.
            device: `cpu`, `cuda`, `cuda:1`, `mps`, or `auto` for a GPU where there is one.
            dtype: of the weights: `float32`, `bfloat16` or `float16`; None and `auto` keep them as they are stored.
            quantize: `int8` for linears and tables in int8 (`omni.cpu.int8`), on a CPU; a folder in int8 is so anyway.
            codec_folder: the codec's weights, where they are not in the folder.
            kernels: `fast` takes what is faster by the rule of `omni.cpu`, bfloat16 included; `reference` does not.
            chunk_ms: how much of a question a chunked encoder hears at once, 0 for all of it; None for what is stored.
        """
        start = time.perf_counter()
        folder = find_model(folder)
        local_path(folder, again=True)
        target, weights_dtype = find_device(device, quantize), find_dtype(dtype)
        check_quantize(quantize, str(target))
        check_kernels(kernels)
        # Any call starts numba, which takes half a second.
        starting = threading.Thread(target=compiled.clear, args=(np.empty(1, np.float32),))
        if kernels == "fast" and target.type == "cpu":
            starting.start()  # beside the reading, so that the first question does not wait for it
        storage: dict[str, Any] = {"dtype": weights_dtype, "quantize": quantize, "codec_folder": codec_folder}
        loaded = load_folder(folder, device=target, **storage, mute=True)
        model = loaded.model.eval()
        if chunk_ms is not None:
            model.set_chunk(chunk_ms)
        if kernels == "fast" and target.type == "cpu":
            if weights_dtype is None and takes_bf16(model):
                model.to(torch.bfloat16)
                LOG.info("bfloat16, which this processor multiplies faster than float32; dtype float32 keeps float32")
            use_fast(model)
            starting.join()
            model.decoder.step.prepare(model)
        elif kernels == "fast" and target.type == "cuda":
            fuse(model.decoder)
        spoken = SpeechTime.read(loaded.extra, f"{folder}/config.json")
        lm = cls(model, loaded.tokenizer, loaded.codec, graph=graph, compile=compile, speech_time=spoken)
        lm._folder = folder
        LOG.info("read %s in %.1f s: %s", folder, time.perf_counter() - start, lm)
        return lm

    def __repr__(self) -> str:
        model, codec = self.model, "no codec" if self.codec is None else self.codec.name
        parameters = sum(p.numel() for name, p in model.named_parameters() if ".lora." not in name)
        dtype = "int8 with " * is_int8(model) + str(model.decoder.norm.weight.dtype).removeprefix("torch.")
        parts = [f"{parameters / 1e6:.3g}M parameters", codec, f"{self.layout.n_audio} audio + 1 text streams"]
        parts += [dtype, str(model.device), *([f"{len(self.adapters)} adapters"] if self.adapters else [])]
        return f"SpeechLM({', '.join(parts)})"

    def load_adapter(self, folder: str | os.PathLike[str], name: str | None = None) -> str:
        """Load a LoRA adapter (a folder in PEFT's format), to be selected by name: `session(adapter=name)`. Returns the name.
        UserError: an adapter of another model, one with parameters that were trained whole (merge it by `omni-train convert`),
        or a name that is taken.

        Args:
            folder: its path, or, where nothing is there, the name of one in the model's folder (`adapters/NAME`).
            name: by default the folder's own.
        """
        model, folder = self.model, find_adapter(folder, self._folder)
        weights, name = load_adapter(folder), name or Path(folder).resolve().name.replace(".", "-")
        whole = [n for n in weights.whole if n not in weights.copies or not has_weight(model, n, weights.whole[n])]
        if whole:
            raise UserError(
                f"adapter {folder} brings {whole[0]} whole, which all sessions share; merge it into a model of its own: "
                "omni-train convert MODEL TARGET --lora ADAPTER"
            )
        linears, selection = linears_of(model), active_of(model).names
        if weights.pairs.keys() <= linears.keys():
            check_base(weights, lambda target: base_weight(linears[target]), str(folder))
        pairs = weights.modules()
        for target, pair in pairs.items():
            if target in linears:
                pair.to(model.device, model.decoder.norm.weight.dtype)
        attach(model, pairs, name)
        activate(model, *selection)  # as it was before
        LOG.info("adapter %r of %s is there, for %d linears", name, folder, len(pairs))
        return name

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the loaded adapters, sorted."""
        return tuple(sorted(adapter_names(self.model)))

    def remove_adapter(self, name: str) -> None:
        """Remove a loaded adapter; questions of sessions that use it are refused from then on. UserError: there is none of
        that name (it lists those there are), it is merged into the weights, or an answer under way uses it."""
        remove_adapter(self.model, name)
        LOG.info("adapter %r was removed", name)

    def conversation(
        self, *, context: int | None, history: History | None, pace: Pace, when_full: WhenFull, **values: Any
    ) -> Conversation:
        """A conversation in the engine, for a session; keywords and errors are those of `session`."""
        options = make_options(values)
        if context is not None:
            check_numbers(context=context)
        length = min(context or self.engine.context or 4096, self.config.decoder.context)
        self._bases.check(self.model, options.edits)
        past = read_history(history, self.model, self.tokenizer, self.codec)
        stack = ExitStack()
        try:
            name = None
            if options.edits is not None:
                name = attach_edits(self.model, options.edits)
                stack.callback(detach, self.model, name)
            own: dict[str, Any] = {"context": length, "time": self.speech_time, "past": past, "release": stack.close}
            own |= {"edits": name, "pace": pace, "when_full": when_full}
            conversation = Conversation(self.model, self.tokenizer, self.codec, self.engine, options, **own)
        except BaseException:
            stack.close()
            raise
        LOG.debug("a session of %d positions starts, with %d earlier turns", length, len(past[0]))
        return conversation

    def _answer_all(
        self,
        questions: list[Any],
        task: Any,
        *,
        sample_rate: int = SAMPLE_RATE,
        seed: int | Sequence[int] = 0,
        batch_size: int = 64,
        sound: bool = True,
        adapter: str | Sequence[str | None] | None = None,
        edits: Edits | Sequence[Edits | None] | None = None,
        system: str | Sequence[str] = "",
        **values: Any,
    ) -> list[Answer]:
        """`generate` of a list, `batch_size` rows at a time."""
        check_numbers(batch_size=batch_size)
        if "overflow" in values:
            raise UserError("overflow has no effect on independent questions, which have no turns to forget; leave it out")
        values_each = {"tasks": task, "seeds": seed, "adapters": adapter, "edits": edits, "system messages": system}
        tasks, seeds, adapters, corrections, systems = (one_each(*each, len(questions)) for each in values_each.items())
        for each in seeds:
            check_numbers(seed=each)
        asked = []
        for number, (question, own_task, text) in enumerate(zip(questions, tasks, systems, strict=True), 1):
            try:
                read = read_question(question, self.config.answers(own_task), self.config, self.tokenizer, sample_rate)
            except UserError as error:
                raise UserError(f"question {number} of {len(questions)}: {error}") from error
            asked.append(read.after(read_system(text, self.tokenizer)))
        options = make_options(values)
        if options.text_assist:
            raise UserError("text_assist couples the rows of one conversation; a batch of questions goes without")
        for own in corrections:
            self._bases.check(self.model, own)
        lengths, context = [len(prompt(self.layout, each.turn)) for each in asked], self.config.decoder.context
        for number, length in enumerate(lengths, 1):
            if length >= context:
                raise UserError(
                    f"question {number} of {len(lengths)} takes {length} positions, but the model's context has {context} "
                    "and an answer needs some; shorten it, or leave it out"
                )
        most = max((options.limits(each.task, self.codec, self.layout.max_delay).columns for each in asked), default=0)
        room = min(max(lengths, default=0) + most, context)
        with attached(self.model, corrections) as names, kept(self.model, adapters):
            selection_of(self.model, adapters)  # checks every name before any question is answered

            def session_of(n: int) -> tuple[Session, Listener]:
                whole = replace(options, adapter=adapters[n], seed=seeds[n], system=systems[n])
                number = next(self._link.numbers)
                own: dict[str, Any] = {
                    "context": room,
                    "time": self.speech_time,
                    "edits": names[n],
                    "pace": "whole",
                    "sound": sound,
                }
                conversation = Conversation(self.model, self.tokenizer, self.codec, self.engine, whole, **own)
                self._link.add(number, conversation)
                session = Session(self, number, "whole", options.stop if callable(options.stop) else None, sound)
                return session, session.lay_out(asked[n])

            order = sorted(range(len(lengths)), key=lengths.__getitem__)
            return answer_all(self.engine, order, session_of, batch_size)

    # --- edits --------------------------------------------------------------------------------------------------------

    @contextmanager
    def edited(self, edits: Edits) -> Iterator[SpeechLM]:
        """Apply corrections to every answer of all sessions while the block runs; they are detached afterwards. UserError:
        edits of another model."""
        self._bases.check(self.model, edits)
        with edited_everywhere(self.model, edits):
            yield self

    # --- the engine ---------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine that answers; made when it is first needed, with as many slots as are asked for."""
        with self._lock:
            if self._engine is None:
                self._engine = Engine(self.model, graph=self._graph, compile=self._compile, codec=self.codec)
            return self._engine

    def start_engine(self, **options: Any) -> Engine:
        """Answer by an engine with these options (`omni.engine.engine.Engine`), such as a fixed number of slots, from now
        on. UserError: sessions of the engine before are open."""
        with self._lock:
            before = self._engine
            if before is not None and before.stats().sessions:
                raise UserError(
                    f"{before.stats().sessions} sessions are open; close them, or start the engine before the first"
                )
            usual = {"graph": self._graph, "compile": self._compile, "codec": self.codec}
            self._engine = Engine(self.model, **{**usual, **options})
        if before is not None:
            before.close()
        return self._engine


def one_each(noun: str, value: Any, count: int) -> list[Any]:
    """Expands a value given once for all questions, or one per question, to a list; UserError for another number of values."""
    each = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value] * count
    if len(each) != count:
        raise UserError(f"{len(each)} {noun} for {count} questions; give one for all, or one each")
    return each


CHECK_SECONDS = 0.1
"""Seconds between two calls of the check in `checked`."""
_CHECK: ContextVar[Callable[[], None] | None] = ContextVar("check", default=None)


@contextmanager
def checked(check: Callable[[], None]) -> Iterator[None]:
    """A context in which whoever waits for a batch of answers calls `check` again and again; what it raises ends the batch."""
    token = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(token)


PART = 8
"""Where one of that many parts of the places is free, the next questions come in together."""


def answer_all(
    engine: Engine, order: Sequence[int], session_of: Callable[[int], tuple[Session, Listener]], at_once: int
) -> list[Answer]:
    """One answer per question, by their numbers; as some end, others take their places.

    Args:
        order: numbers of the questions, as they are asked.
        session_of: gives a question's session and the question laid out in it.
        at_once: number of questions that are answered at a time.
    """
    todo, answers = deque(order), {}
    under: dict[int, tuple[Session, Listener]] = {}
    ended, check = threading.Event(), _CHECK.get()
    try:
        while todo or under:
            free = at_once - len(under)
            if todo and (not under or free >= max(1, at_once // PART)):
                new = {number: session_of(number) for number in (todo.popleft() for _ in range(min(free, len(todo))))}
                under |= new
                for _, answer in new.values():
                    answer.wake = partial(_set_at_end, answer, ended)
                engine.ask([session.begin(answer, "lay_out") for session, answer in new.values()])
            while not ended.wait(None if check is None else CHECK_SECONDS):
                if check is not None:
                    check()
            ended.clear()
            for number, (session, answer) in list(under.items()):
                if answer.ended:
                    answers[number] = session.whole(iter(partial(session.take, answer), None), answer)
                    session.close()
                    del under[number]
    finally:
        for session, _ in under.values():
            session.close()
    return [answers[number] for number in sorted(answers)]


def _set_at_end(answer: Listener, ended: threading.Event) -> None:
    if answer.ended:
        ended.set()
