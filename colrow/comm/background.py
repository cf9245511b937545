"""A collective that runs beside what its rank computes: begun here, waited for later.

    wait = begin(lambda: collectives.all_reduce(x, group, "name"), group)
    ...                        # another collective of this process waits until this one is done (collectives.py)
    total = wait()

So the order of collectives is that in which they are begun, on all ranks, whoever runs them.

Only where a transport gains by it (`Transport.worker`): gloo waits for messages most of the time. Over shared memory the ranks copy and add
themselves, which takes the same core whoever does it, so there it is done at once (docs/architecture.md has what was measured).
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from .group import Group

T = TypeVar("T")


class Worker:
    """A thread that does one thing after the other. It does not keep the process alive. Groups whose messages could be taken for each
    other's share one."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Callable[[], Future[Any] | None] = lambda: None  # weak: a result belongs to who asked for it

    def begin(self, work: Callable[[], T]) -> Future[T]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="collectives", daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._jobs.put((work, future))
        self._last = weakref.ref(future)
        return future

    def settle(self) -> None:
        """Returns when all that was begun is done, or raises its error; at once for what the worker itself does."""
        last = self._last()
        if last is not None and threading.current_thread() is not self._thread:
            last.result()

    def _run(self) -> None:
        while True:
            work, future = self._jobs.get()
            try:
                future.set_result(work())
            except BaseException as error:  # raised again where the result is asked for
                future.set_exception(error)
            del work, future  # else the last ones' tensors would live until the next


def begin(work: Callable[[], T], group: Group) -> Callable[[], T]:
    """Begins `work`, one collective of `group`; the returned function waits for it and returns its result, or raises its error."""
    worker = group.transport.worker
    if worker is None:
        result = work()
        return lambda: result
    return worker.begin(work).result
