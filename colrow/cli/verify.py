"""`colrow verify`: runs the proof and shows its report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..api import the_dtype
from ..checkpoint.model_dir import ModelFiles
from ..comm import launch
from ..engine.settings import INT8
from ..planning.derive import check_made_for, derive
from ..planning.plan import Plan
from ..proof import int8
from ..proof.verify import Task, verify
from .options import check_room
from .screen import Screen, say, write


def show(
    files: ModelFiles, ranks: int, split: Sequence[float], plan: Plan | None, dtype: str, what: dict[str, Any], html: Path | None = None
) -> int:
    """The exit code: 0 if the two models are equal. `what`: small, stream, train, backend, sequence."""
    if what["backend"] != "threads" and not launch.under_torchrun():
        check_room(ranks)
    if not what["small"]:
        files.source().close()  # refuses missing and damaged weights before anything is computed
    if dtype == INT8:
        return _int8(files, ranks, split, plan, what["backend"])
    with Screen() as screen:
        report = verify(files, ranks, tuple(split) or None, the_dtype(dtype), plan=plan, progress=screen.show, **what)
    say(report.text(color=sys.stdout.isatty()), end="")
    if html is not None:
        from ..report.verification import page

        write(html, page(report), "--html proof.html")
    return report.exit_code


def _int8(files: ModelFiles, ranks: int, split: Sequence[float], plan: Plan | None, backend: str) -> int:
    """What int8 weights cost, beside the files' own dtype."""
    config = files.config()
    if plan is not None:
        check_made_for(plan, config)
    with Screen() as screen:
        screen.show(f"{ranks} ranks, then with int8 weights")
        task = Task(files, config, plan or derive(config, ranks, tuple(split) or None), the_dtype("auto", config))
        found = int8.compare(files.name, task, backend)
    say(found.text(), end="")
    return found.exit_code
