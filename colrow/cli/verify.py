"""`colrow verify`: runs the proof and shows its report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..api import the_dtype
from ..checkpoint.model_dir import ModelFiles
from ..comm import launch
from ..planning.plan import Plan
from ..proof.verify import verify
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
    with Screen() as screen:
        report = verify(files, ranks, tuple(split) or None, the_dtype(dtype), plan=plan, progress=screen.show, **what)
    say(report.text(color=sys.stdout.isatty()), end="")
    if html is not None:
        from ..report.verification import page

        write(html, page(report), "--html proof.html")
    return report.exit_code
