"""HTML as text: escaping, elements, numbers for people. No template language, no dependencies."""

from __future__ import annotations

from html import escape
from importlib.resources import files


class Safe(str):
    """Text that is HTML already."""


def tag(name: str, *children: str, **attributes: object) -> Safe:
    """An element; children that are not Safe are escaped. `class_` gives class, other underscores become hyphens; None is left out."""
    words = "".join(f' {k.rstrip("_").replace("_", "-")}="{escape(str(v))}"' for k, v in attributes.items() if v is not None)
    if name in ("input", "meta", "rect", "line", "path", "circle") and not children:
        return Safe(f"<{name}{words}/>")
    return Safe(f"<{name}{words}>{join(*children)}</{name}>")


def join(*children: str) -> Safe:
    return Safe("".join(c if isinstance(c, Safe) else escape(c) for c in children))


def document(title: str, *body: str) -> str:
    """A whole page with its style and script inside it: it loads nothing."""
    style, script = (files(__package__).joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n<body>{join(*body)}\n<script>\n{script}</script></body></html>\n"
    )


def size(count: float) -> str:
    """Bytes in decimal units, as data sheets give them: "16.4 kB", "35.3 GB"."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{short(count / scale)} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{short(seconds / scale)} {unit}"
    return f"{short(seconds * 1e9)} ns"


def short(number: float) -> str:
    """Three digits or more: 1.23, 12.3, 123, 12,345; from a million on 1.23 M, which stays inside a tile."""
    if number >= 999_999.5:
        return f"{short(number / 1e6)} M"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
