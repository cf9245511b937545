"""Files that cannot be written, a full disk most often: one line for the user, and nothing half written left behind.

Not here: who writes what (checkpoint.py, export.py, journal.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ..errors import UserError


def reason(error: Exception) -> str:
    """Why a file could not be written, in the system's words; "" where the error is of another kind (tokenizers raise a bare Exception)."""
    return str(error) if isinstance(error, OSError | SafetensorError) or "(os error " in str(error) else ""


@contextmanager
def writing(what: str, works: str, remove: Path | None = None) -> Iterator[None]:
    """Within, files are written. Where one cannot be, `remove` is removed, to give the disk its room again, and UserError says `what`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not (why := reason(error)):
            raise
        if remove is not None:
            shutil.rmtree(remove, ignore_errors=True)
        raise UserError(what, why, works) from error
