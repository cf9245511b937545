"""What a run leaves for people: log.jsonl, one line an event, and the loss by step as a page and as a picture, loss.html and loss.svg,
where it was asked for as a PNG, and in a file for TensorBoard."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import curve, plot
from .checkpoint import AGAIN
from .events import EventFile
from .trainer import Evaluation, Event, Resumed, SavedAt, Step
from .writing import writing


class Journal:
    """Written by one rank. A run that goes on from a checkpoint forgets the lines of the steps that it does again."""

    def __init__(self, out: Path, title: str, png: Path | None = None) -> None:
        self.title, self.log, self.picture, self.png = title, out / "log.jsonl", out / "loss.html", png
        self.lines: list[dict[str, Any]] = []
        with self._writing():
            out.mkdir(parents=True, exist_ok=True)
            self.events = EventFile(out)

    def _writing(self) -> AbstractContextManager[None]:
        return writing(f"the log of the run could not be written into {self.log.parent}", AGAIN)

    def add(self, event: Event) -> None:
        """UserError where it cannot be written."""
        with self._writing():
            self._add(event)

    def _add(self, event: Event) -> None:
        if isinstance(event, Resumed):
            old = self.log.read_text(encoding="utf-8").splitlines() if self.log.is_file() else []
            self.lines = [line for line in map(_parsed, old) if line and line["step"] <= event.step]
            self.log.write_text("".join(json.dumps(line) + "\n" for line in self.lines), encoding="utf-8")
            for line in self.lines:
                self._curves(line)
            return
        line = {"event": type(event).__name__.lower()} | {k: str(v) if isinstance(v, Path) else v for k, v in asdict(event).items()}
        if not self.lines:
            self.log.write_text("", encoding="utf-8")
        self.lines.append(line)
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._curves(line)
        if isinstance(event, Evaluation | SavedAt):
            self._draw()

    def _curves(self, line: dict[str, Any]) -> None:
        if line["event"] == "step":
            speed = line["tokens"] / max(line["seconds"], 1e-9)
            self.events.add(line["step"], {"loss": line["loss"], "norm": line["norm"], "rate": line["rate"], "tokens per second": speed})
        elif line["event"] == "evaluation":
            self.events.add(line["step"], {"evaluation": line["loss"]})

    def draw(self) -> None:
        """The pictures, as far as the run has come. UserError where they cannot be written."""
        with self._writing():
            self._draw()

    def _draw(self) -> None:
        steps, evaluations = self.points(Step), self.points(Evaluation)
        page = curve.page("Training loss", steps, evaluations, [f"{self.title}: {len(steps)} steps"])
        self.picture.write_text(page, encoding="utf-8")
        drawn = curve.picture({"loss": steps}, evaluations)
        self.picture.with_suffix(".svg").write_text(drawn, encoding="utf-8")
        if self.png is not None:
            plot.draw(self.png, f"Training loss of {self.title}", steps, evaluations)

    def points(self, kind: type) -> list[tuple[int, float]]:
        return [(line["step"], line["loss"]) for line in self.lines if line["event"] == kind.__name__.lower()]


def _parsed(line: str) -> dict[str, Any] | None:
    """None for a line that a kill has cut off."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "step" in found and "event" in found else None
