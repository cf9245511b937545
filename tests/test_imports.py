"""The import lines of colrow/ obey the order of the design: `MAY_IMPORT` says it, this test reads the source and enforces it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "colrow"

# package or module -> what it may import directly; what those may import is allowed with them
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "partition": set(),
    "checkpoint": {"errors", "partition"},
    "planning": {"checkpoint"},
    "native": {"errors"},
    "comm": {"errors", "native"},
    "kernels": {"errors", "native"},
    "parallel": {"checkpoint", "planning", "comm", "kernels"},
    "engine": {"parallel"},
    "train": {"parallel"},
    "proof": {"engine", "train"},
    "serve": {"engine"},
    "report": {"planning", "proof"},
    "api": {"proof", "serve", "report"},
    "host": {"api"},
    "cli": {"api"},
    "__init__": {"api", "host"},
    "__main__": {"cli"},
}
RANKS_ONLY_IN = {"comm", "train"}  # the packages that may import torch.distributed; train: for torch's own data parallelism
LEAN = {"comm", "errors", "partition"}  # imported by every starting rank: no transformers, which takes seconds


def allowed(part: str) -> set[str]:
    """`part` itself and all that it may import, directly or through others."""
    found = {part}
    for other in MAY_IMPORT[part]:
        found |= allowed(other)
    return found


def imports(source: str, module: tuple[str, ...]) -> list[tuple[int, str]]:
    """(line, dotted name) of everything that the source of `module` imports, relative names made absolute, functions' imports included.

    `from a.b import c` counts as a.b.c, so that a module named c is seen; an attribute torch.distributed counts as an import of it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, name.name) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module[: len(module) - node.level] if node.level else ()
            base = ".".join([*package, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{base}.{name.name}") for name in node.names]
        elif (
            isinstance(node, ast.Attribute) and node.attr == "distributed" and isinstance(node.value, ast.Name) and node.value.id == "torch"
        ):
            found.append((node.lineno, "torch.distributed"))
    return found


def violations(source: str, module: tuple[str, ...]) -> list[str]:
    """What is wrong with the import lines of one module, such as ("colrow", "comm", "group")."""
    part, out = module[1], []
    for line, name in imports(source, module):
        where = f"{'/'.join(module)}.py:{line}"
        first, *rest = name.split(".")
        if first == "colrow" and rest and rest[0] in MAY_IMPORT and rest[0] not in allowed(part):
            out.append(f"{where}: {part} may not import {rest[0]}")
        if name.startswith("torch.distributed") and part not in RANKS_ONLY_IN:
            out.append(f"{where}: {part} may not import torch.distributed")
        if first == "transformers" and part in LEAN:
            out.append(f"{where}: {part} may not import transformers")
    return out


def modules() -> list[tuple[Path, tuple[str, ...]]]:
    return [(path, ("colrow", *path.relative_to(ROOT).with_suffix("").parts)) for path in sorted(ROOT.rglob("*.py"))]


def test_import_order() -> None:
    assert [line for path, module in modules() for line in violations(path.read_text(), module)] == []


def test_every_part_is_in_the_order() -> None:
    unknown = {module[1] for _, module in modules()} - MAY_IMPORT.keys()
    assert not unknown, f"{unknown}: give them a place in the design's order and in MAY_IMPORT"


@pytest.mark.parametrize(
    ("line", "module", "message"),
    [
        ("from ..planning.plan import Plan", ("colrow", "comm", "group"), "comm may not import planning"),
        ("from .. import engine", ("colrow", "parallel", "build"), "parallel may not import engine"),
        ("import colrow.cli", ("colrow", "api"), "api may not import cli"),
        ("def f():\n    from colrow import api", ("colrow", "proof", "gate"), "proof may not import api"),
        ("import torch.distributed as dist", ("colrow", "planning", "cost"), "planning may not import torch.distributed"),
        ("from torch import distributed", ("colrow", "engine", "step"), "engine may not import torch.distributed"),
        ("import torch\ntorch.distributed.barrier()", ("colrow", "checkpoint", "export"), "checkpoint may not import torch.distributed"),
        ("from transformers import AutoConfig", ("colrow", "comm", "launch"), "comm may not import transformers"),
    ],
)
def test_a_wrong_import_is_seen(line: str, module: tuple[str, ...], message: str) -> None:
    assert message in "".join(violations(line, module))


@pytest.mark.parametrize(
    ("line", "module"),
    [
        ("from ..errors import UserError", ("colrow", "proof", "gate")),
        ("from ..partition import Partition\nfrom .plan import Plan", ("colrow", "planning", "cost")),
        ("from .api import plan", ("colrow", "__init__")),
        ("import torch.distributed as dist", ("colrow", "comm", "dist")),
    ],
)
def test_a_right_import_passes(line: str, module: tuple[str, ...]) -> None:
    assert violations(line, module) == []
