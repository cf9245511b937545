"""Parts: a call of C that is shared by as many threads as torch may use. The threads are Python's: the call lets go of the interpreter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="colrow-parts")


def in_parts(call: Callable[..., Any], *asked: Any) -> list[Any]:
    """What call(*asked, part, parts) returns for every part; this thread does the first one."""
    parts = torch.get_num_threads()
    others = [_threads().submit(call, *asked, part, parts) for part in range(1, parts)]
    return [call(*asked, 0, parts), *(other.result() for other in others)]
