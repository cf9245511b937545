"""The README's list of files is complete, and names no file that is not there."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent


def listed() -> set[str]:
    """Paths in the section "The files": a name is in the folder of the last line that ends its first word with a slash."""
    found, folder = set(), ""
    for line in (ROOT / "README.md").read_text().split("## The files")[1].splitlines():
        if not line.startswith("    "):
            continue
        word = line.split()[0]
        if word.endswith("/"):
            folder = word
        else:
            found.add(word if "/" in word else folder + word)
    return found


def test_the_list_of_files_is_complete() -> None:
    there = {
        str(path.relative_to(ROOT))
        for folder in ("colrow", "bench", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".c", ".h", ".css", ".js", ".html") and path.name != "__init__.py" and "__pycache__" not in path.parts
    }
    assert there - listed() == set(), "files that the README does not list"
    assert listed() - there == set(), "files that are not there"
