"""Bridge: the HTTP side's view of the ranks. Requests go in, outputs come out, and a lost rank becomes an error of every open request.

Two threads stand beside the event loop: one takes what rank 0 yields, one sends commands, so that the loop never waits for the ranks. A
third makes the tokenizer while they start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Listener
from typing import Any

from ..engine.request import Output, Request
from .messages import Abort, Ready, Stats, Stop, Where, meeting_place

Start = Callable[[Where], Iterator[Any]]
"""start(where): what rank 0 yields while it serves (worker.work), and before that whatever the opening tells."""


class Gone(Exception):
    """The engine cannot answer: it is still starting, or it has failed. The text says why."""


@dataclass
class Ticket:
    """The sequences of one HTTP request. Iterating gives (number of the sequence, output) until each has ended."""

    ids: tuple[int, ...]
    outputs: asyncio.Queue[Output | Gone]
    open: set[int] = field(default_factory=set)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Output]]:
        while self.open:
            output = await self.outputs.get()
            if isinstance(output, Gone):
                raise output
            if output.finish is not None:
                self.open.discard(output.id)
            yield self.ids.index(output.id), output


class Bridge:
    """`start` starts the ranks' work; `hear` gets what they tell while they open the model; `failed` is called once, in the loop's thread,
    when they are lost."""

    def __init__(
        self,
        start: Start,
        tokenizer: Callable[[], Any],
        hear: Callable[[Any], None] = lambda item: None,
        ready: Callable[[], None] = lambda: None,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.ready: Ready | None = None
        self.stats = Stats()
        self.error: BaseException | None = None
        self.tokenizer: Any = None
        self._start, self._make_tokenizer, self._hear, self._on_ready, self._on_failure = start, tokenizer, hear, ready, failed
        self._tickets: dict[int, Ticket] = {}
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._next = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Starts the threads. In the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="ranks", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Ends the ranks' work and returns when it has ended."""
        self._commands.put(Stop())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    @property
    def open_requests(self) -> int:
        """Sequences that wait or run."""
        return len(self._tickets)

    @property
    def state(self) -> str:
        if self.error is not None:
            return f"failed: {self.error}"
        return "ok" if self.ready is not None else "starting"

    def check(self) -> Ready:
        """Raises Gone unless requests can be answered."""
        if self.ready is None or self.error is not None:
            raise Gone("the model is still being opened" if self.error is None else f"the engine has {self.state}")
        return self.ready

    def submit(self, requests: Sequence[Request]) -> Ticket:
        """Sends requests, which get numbers of their own, to rank 0. Raises Gone."""
        self.check()
        numbered = [replace(request, id=self._next + at) for at, request in enumerate(requests)]
        self._next += len(requests)
        ids = tuple(request.id for request in numbered)
        ticket = Ticket(ids, asyncio.Queue(), set(ids))
        for request in numbered:
            self._tickets[request.id] = ticket
            self._commands.put(request)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Nobody wants the rest of it: what has not ended is aborted."""
        for id in ticket.ids:
            if self._tickets.pop(id, None) is not None:
                self._commands.put(Abort(id))

    # ---- the threads ----

    def _work(self) -> None:
        tokenizer: Future[Any] = Future()
        threading.Thread(target=_fulfil, args=(tokenizer, self._make_tokenizer), name="tokenizer", daemon=True).start()
        try:
            with Listener(meeting_place(), authkey=(key := os.urandom(32))) as listener:
                threading.Thread(target=self._send, args=(listener,), name="commands", daemon=True).start()
                items = self._start(Where(listener.address, key))
                for item in items:
                    if isinstance(item, Ready):
                        self.tokenizer = tokenizer.result()
                    self._in_loop(self._take, item)
            self._in_loop(self._end, None)
        except BaseException as error:  # of the ranks, whatever it is: every open request must hear of it
            self._in_loop(self._end, error)

    def _send(self, listener: Listener) -> None:
        try:
            with listener.accept() as connection:
                while True:
                    connection.send(command := self._commands.get())
                    if isinstance(command, Stop):
                        return
        except OSError:
            return  # rank 0 is gone; the other thread hears why

    def _in_loop(self, call: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is left to tell
            self._loop.call_soon_threadsafe(call, *args)

    # ---- in the loop ----

    def _take(self, item: Any) -> None:
        if isinstance(item, list):
            for output in item:
                ticket = self._tickets.get(output.id)
                if ticket is None:
                    continue
                if output.finish is not None:
                    del self._tickets[output.id]
                ticket.outputs.put_nowait(output)
        elif isinstance(item, Stats):
            self.stats = item
        elif isinstance(item, Ready):
            self.ready = item
            self._on_ready()
        else:
            self._hear(item)

    def _end(self, error: BaseException | None) -> None:
        if error is not None and self.error is None:
            self.error = error
        for ticket in {id(ticket): ticket for ticket in self._tickets.values()}.values():
            ticket.outputs.put_nowait(Gone(f"the engine has {self.state}" if error is not None else "the server is ending"))
        self._tickets.clear()
        if error is not None:
            self._on_failure(error)


def _fulfil(future: Future[Any], make: Callable[[], Any]) -> None:
    try:
        future.set_result(make())
    except BaseException as error:  # raised again where the result is asked for
        future.set_exception(error)
