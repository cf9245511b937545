"""python -m bench.zoo: measures what is missing or stale, and writes docs/models.md. `make zoo`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers

from . import tp_plan
from .names import architectures
from .page import page
from .run import Cache, Row, digest, run

DEGREES = (2, 3, 8)


def main() -> None:
    parse = argparse.ArgumentParser(prog="python -m bench.zoo", description=__doc__)
    parse.add_argument("names", nargs="*", help="model types; all of them by default")
    parse.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "colrow" / "zoo")
    parse.add_argument("--degrees", default=",".join(map(str, DEGREES)), help="numbers of ranks")
    parse.add_argument("--only", choices=("stale", "failed", "missing"), default="stale", help="which rows to measure again")
    parse.add_argument("--page", type=Path, help="where to write the table; not written by default")
    given = parse.parse_args()
    now = digest()
    keeps = {"stale": lambda row: row["digest"] == now, "failed": fine, "missing": lambda row: True}
    degrees = tuple(int(n) for n in given.degrees.split(","))
    cache = Cache(given.cache)
    groups = architectures()
    run(given.names or groups, degrees, cache, keeps[given.only], lambda text: print(text, flush=True))
    if given.page:
        rows = {name: cache.read(name) or {"stopped": "not measured yet"} for name in groups}
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        given.page.write_text(page(rows, groups, versions, tp_plan.section(rows)))


def fine(row: Row) -> bool:
    return "stopped" not in row and not any("wrong" in part for part in row.values() if isinstance(part, dict))


if __name__ == "__main__":
    main()
