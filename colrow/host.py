"""Engine for a plain program or a notebook: it starts the ranks, asks them, and ends them.

    with colrow.Engine("path/or/name", tp=2) as engine:
        for answer in engine.generate(["The capital of France is", "2 + 2 ="], max_new_tokens=20):
            print(answer.text)
        for piece in engine.stream("Once upon a time"):
            print(piece, end="")

Servers of one's own use `add`, `step` and `abort`. The ranks are processes of this host and run what `colrow serve` runs (serve/worker.py);
a program's main module is not imported by them, so it needs no guard. One thread at a time may use an engine. Where the program itself
is what runs on every rank (torchrun, colrow.spawn), `colrow.open_engine(model, group)` is the engine to use.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Listener
from typing import TYPE_CHECKING, Any

from . import api
from .checkpoint.model_dir import ModelFiles, find
from .comm import launch
from .comm.ranks import Ranks
from .engine.prompts import Prompt, check_list, encode
from .engine.request import Output, Request, TokenLogprob
from .engine.settings import Sampling, check_dtype
from .errors import ColrowError, UserError
from .serve.messages import Abort, Limits, Ready, Stop, Where, meeting_place

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .comm.group import Group
    from .planning.plan import Plan

IMPORTS = ("colrow.host", "colrow.serve.worker", "colrow.proof.gate")  # with all that opening a model imports late


@dataclass
class Completion:
    """One prompt's answer: `finish` is "stop" or "length", or "abort", "timeout", "error" (then `error` says why)."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str = ""

    def add(self, output: Output) -> None:
        self.text += output.text
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.finish, self.error = output.finish, output.error


class Engine:
    """`model`: MODEL, or a transformers model in memory (then with its `tokenizer`; it is handed over by way of files). `cache_bytes`: for
    the caches of one rank, by default a share of what is free. `compact`: keep bfloat16 weights in 12 bits, the same to
    the bit, where it is faster (docs/architecture.md). `fast`: decode requests together (docs/serving.md). UserError for what
    cannot work, from here or from the ranks, before they are left running."""

    def __init__(
        self,
        model: str | os.PathLike | ModelFiles | PreTrainedModel,
        tp: int | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        split: Sequence[float] | None = None,
        plan: Plan | None = None,
        dtype: str = "auto",
        backend: str = "auto",
        gate: bool = True,
        compact: bool = True,
        trust_remote_code: bool = False,
        cache_bytes: int | None = None,
        max_running: int = 64,
        fast: bool = False,
        progress: Callable[[str], None] = lambda stage: None,
    ) -> None:
        if launch.under_torchrun():
            raise UserError("Engine starts its ranks itself, and torchrun has started some", works="colrow.open_engine(model, group)")
        tp = tp if tp is not None else len(split or ()) or (plan.ranks if plan is not None else 1)
        api.check_degree(tp, split)
        options = {"split": split, "plan": plan, "dtype": check_dtype(dtype), "gate": gate, "compact": compact}
        self._open = ExitStack()
        self._left: list[Output] = []  # outputs of requests that another call than the one that met them is for
        self._running: set[int] = set()
        self._next = 0
        with ExitStack() as opening, _on_disk(model, tokenizer, trust_remote_code) as files:
            ranks = opening.enter_context(Ranks(tp, backend, IMPORTS, main=False))
            self.tokenizer = files.tokenizer()
            listener = opening.enter_context(Listener(meeting_place(), authkey=(key := os.urandom(32))))
            accepted: list[Connection] = []
            accepting = threading.Thread(target=_accept, args=(listener, accepted), daemon=True)
            accepting.start()
            limits = Limits(cache_bytes, running=max_running, fast=fast)
            self._items = ranks.stream(_on_ranks, (files, options, limits, Where(listener.address, key)))
            for item in self._items:
                if isinstance(item, Ready):
                    self.ready = item
                    break
                progress(item)
            accepting.join()
            (self._commands,) = accepted
            self._open = opening.pop_all()

    def generate(self, prompts: Sequence[Prompt], **settings: Any) -> list[Completion]:
        """The answers, in the order of the prompts; settings as in `add`. They run together: none waits for another to end. With a
        temperature, prompt number n draws with seed + n."""
        check_list(prompts)
        numbers = [self.add(prompt, **_nth(settings, at)) for at, prompt in enumerate(prompts)]
        found = {id: Completion() for id in numbers}
        try:
            for output in self._outputs(set(numbers)):
                found[output.id].add(output)
        finally:
            self._forget(numbers)
        for answer in found.values():
            if answer.finish == "error":
                raise UserError(answer.error)
        return [found[id] for id in numbers]

    def stream(self, prompt: Prompt, **settings: Any) -> Iterator[str]:
        """The answer's text, piece by piece; settings as in `add`. Leaving the loop ends the work."""
        id = self.add(prompt, **settings)
        return self._pieces(id)

    def add(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        raw: bool = False,
        **more: Any,
    ) -> int:
        """Hands a request to the ranks and returns its number. `prompt`: a text (put into the chat template of a model that has one, unless
        `raw`), a conversation, or token ids. `max_new_tokens` None: until the model stops or its context is full. `more`: as in
        engine.request.Request (ignore_eos, logprobs, logit_bias, ...). UserError for prompts that are empty or too long."""
        self._check()
        ids = tuple(encode(self.tokenizer, prompt, raw))
        limit, vocab, room = self.ready.context, self.ready.vocab, self.ready.room(len(ids))
        if not ids:
            raise UserError("the prompt has no tokens", works="a text that is not empty")
        if not 0 <= min(ids) <= max(ids) < vocab:
            raise UserError("token ids must lie in the vocabulary", f"{min(ids)} to {max(ids)}", f"0 to {vocab - 1}")
        if room < 1:
            raise UserError(f"the prompt leaves no room in {limit} tokens", f"{len(ids)} tokens", f"at most {limit - 1}")
        most = room if max_new_tokens is None else min(max_new_tokens, room)
        request = Request(self._next, ids, sampling or Sampling(), most, (stop,) if isinstance(stop, str) else tuple(stop), **more)
        self._next += 1
        self._running.add(request.id)
        self._send(request)
        return request.id

    def step(self) -> list[Output]:
        """What has come of the requests since, for one or several of them; waits for something. Empty when none is open."""
        self._check()
        outputs, self._left = self._left, []
        while not outputs and self._running:
            outputs = self._received()
        return outputs

    def abort(self, id: int) -> None:
        """Ends a request: its last output says "abort". Nothing happens for one that has ended."""
        if id in self._running:
            self._send(Abort(id))

    def close(self) -> None:
        """Ends the ranks; returns when none is left. The engine cannot be used afterwards."""
        if hasattr(self, "_commands"):
            with suppress(OSError):
                self._commands.send(Stop())
            with suppress(ColrowError):
                for _ in self._items:
                    pass
            self._commands.close()
        self._open.close()
        self._running.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter may be ending
            self._open.close()

    def _check(self) -> None:
        if self._commands.closed:
            raise UserError("the engine is closed", works="a new Engine")

    def _send(self, command: Request | Abort) -> None:
        try:
            self._commands.send(command)
        except OSError:
            self._received()  # raises what the ranks were lost by
            raise

    def _received(self) -> list[Output]:
        """What rank 0 tells next; [] where that is no output. What the ranks are lost by is raised."""
        try:
            item = next(self._items)
        except BaseException:  # of the ranks, or the user's Ctrl-C: they are gone
            self._commands.close()
            self.close()
            raise
        outputs = item if isinstance(item, list) else []
        self._running -= {output.id for output in outputs if output.finish is not None}
        return outputs

    def _outputs(self, ids: set[int]) -> Iterator[Output]:
        """Of these requests, until all have ended."""
        for output in [output for output in self._left if output.id in ids]:
            self._left.remove(output)
            yield output
        while ids & self._running:
            for output in self._received():
                if output.id in ids:
                    yield output
                else:
                    self._left.append(output)

    def _pieces(self, id: int) -> Iterator[str]:
        try:
            for output in self._outputs({id}):
                if output.finish == "error":
                    raise UserError(output.error)
                if output.text:
                    yield output.text
        finally:
            self._forget([id])

    def _forget(self, ids: Sequence[int]) -> None:
        """Nobody wants the rest of these."""
        if self._commands.closed:
            return
        for id in ids:
            self.abort(id)
        for _ in self._outputs(set(ids)):
            pass


def _on_ranks(group: Group, files: ModelFiles, options: dict[str, Any], limits: Limits, where: Where) -> Iterator[Any]:
    """Names of the stages, then what serve/worker.py yields."""
    from .serve.worker import work

    yield "opening the model"
    yield from work(group, api.open_engine(files, group, "Engine", **options), limits, where)


def _accept(listener: Listener, accepted: list[Connection]) -> None:
    with suppress(OSError):  # the ranks did not come so far, and the listener was closed
        accepted.append(listener.accept())


def _nth(settings: dict[str, Any], at: int) -> dict[str, Any]:
    sampling = settings.get("sampling")
    return settings if sampling is None else {**settings, "sampling": replace(sampling, seed=sampling.seed + at)}


@contextmanager
def _on_disk(model: Any, tokenizer: Any, trust_remote_code: bool) -> Iterator[ModelFiles]:
    """Within: the model's files. Those of a model in memory are written for it."""
    if isinstance(model, ModelFiles):
        yield model
    elif isinstance(model, str | os.PathLike):
        yield find(os.fspath(model), trust_remote_code)
    else:
        with tempfile.TemporaryDirectory(prefix="colrow-engine-") as folder:
            model.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            yield find(folder)
