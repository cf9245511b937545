"""Numbers for people."""

from __future__ import annotations


def nbytes(count: float) -> str:
    """Bytes in the largest unit that leaves at least 1: "512 B", "1.50 KiB", "135 MiB".

    >>> nbytes(512), nbytes(1536), nbytes(141_557_760)
    ('512 B', '1.50 KiB', '135 MiB')
    """
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:g} B" if unit == "B" else f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"
