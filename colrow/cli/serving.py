"""`serve` on the ranks: open the model, then answer until the HTTP side says stop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..comm.group import Group
from ..engine.account import Stages
from ..serve.messages import Limits, Where
from ..serve.worker import work
from .job import Opening
from .opening import open_engine


def serve(group: Group, opening: Opening, limits: Limits, where: Where) -> Iterator[Any]:
    """Stages of the start, then what worker.work yields."""
    stages = Stages()
    engine = yield from open_engine(group, opening, stages, "serve", translators=True)
    yield str(stages.results.get("gate", "gate: not run"))
    yield str(stages.results["decoding"])
    yield from work(group, engine, limits, where)
