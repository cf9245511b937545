"""C beside Python: where the compiled library of a C file is found, and how it is built.

`pip install` compiles `colrow/comm/_shm.*.so` and `colrow/kernels/_program.*.so` (setup.py); a source tree that was never installed, or an
install without a compiler that has got one since, compiles on first use into the user's cache directory. Either way the library says which
sources it was built from, and one built from others is not used. Libraries are loaded with ctypes: no link to Python or torch, so no tie to
their versions.

Only the standard library is imported here, because setup.py runs this file by its path.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# No contraction of products and sums: every machine computes the same bits. No errno from sqrt: it is one instruction, without libm.
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-fPIC")
ROOT = Path(__file__).resolve().parent


class NativeUnavailable(Exception):
    """The library cannot be had; the text is one line that says why."""


@dataclass(frozen=True)
class Library:
    """One C file and the headers it includes, as paths relative to the package, and the function that returns its digest."""

    module: str  # "comm/_shm": the place of the installed library, without its ending
    sources: tuple[str, ...]  # the first one is compiled
    digest_function: str
    flags: tuple[str, ...] = FLAGS

    def digest(self) -> str:
        """Of the sources and flags: what ties a library to the sources beside it."""
        text = b"\0".join([shlex.join(self.flags).encode(), *((ROOT / source).read_bytes() for source in self.sources)])
        return hashlib.sha256(text).hexdigest()[:16]

    def load(self) -> ctypes.CDLL:
        """The library, compiled now if need be. NativeUnavailable where that fails."""
        if not sys.platform.startswith("linux"):
            raise NativeUnavailable(f"it needs Linux, this is {sys.platform}")
        digest = self.digest()
        cached = _cache() / f"{self.module.replace('/', '-')}-{digest}.so"
        installed = sorted((ROOT / self.module).parent.glob(Path(self.module).name + ".*so"))
        for path in (*installed, cached):
            library = self._open(path, digest)
            if library is not None:
                return library
        self.compile(cached, digest)
        library = self._open(cached, digest)
        if library is None:
            raise NativeUnavailable(f"{cached} was compiled but cannot be loaded")
        return library

    def _open(self, path: Path, digest: str) -> ctypes.CDLL | None:
        """None where the file is missing, cannot be loaded here, or was built from other sources."""
        if not path.is_file():
            return None
        try:
            library = ctypes.CDLL(str(path))
            function = getattr(library, self.digest_function)
        except (OSError, AttributeError):
            return None
        function.restype = ctypes.c_char_p
        return library if function() == digest.encode() else None

    def compile(self, out: Path, digest: str) -> None:
        """Compiles to a temporary file and renames it, so that ranks that do this at the same time cannot see half a file."""
        compiler = compiler_command()
        if not compiler:
            raise NativeUnavailable("there is no C compiler (looked for $CC, cc, gcc, clang)")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=out.parent) as work:
                made = Path(work) / "made.so"
                command = [
                    *compiler,
                    *self.flags,
                    "-shared",
                    f'-DCOLROW_DIGEST="{digest}"',
                    str(ROOT / self.sources[0]),
                    "-o",
                    str(made),
                    "-lm",
                ]
                done = subprocess.run(command, capture_output=True, text=True, timeout=120)
                if done.returncode:
                    lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no message"]
                    raise NativeUnavailable(f"{compiler[0]} failed on {self.sources[0]}: {lines[0]}")
                os.replace(made, out)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NativeUnavailable(f"{self.sources[0]} could not be compiled: {error}") from None


def compiler_command() -> Sequence[str]:
    """The C compiler as the start of a command, empty where there is none."""
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen and shutil.which(chosen[0]):
        return chosen
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), [])


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "colrow"


SHM = Library("comm/_shm", ("comm/shm.c", "comm/shm.h", "comm/shm_wait.h", "comm/shm_reduce.h", "comm/shm_norm.h"), "cr_digest")

# Products and sums may be contracted here: each rank computes results of its own, and the same code makes them alone and in a batch.
PROGRAM = Library(
    "kernels/_program",
    tuple(
        f"kernels/{name}"
        for name in (
            "program.c",
            "vector.h",
            "product.h",
            "tile.h",
            "int8.h",
            "rows.h",
            "pairs.h",
            "compact.h",
            "many.h",
            "norm.h",
            "multiply.h",
            "choose.h",
            "elementwise.h",
            "attend.h",
            "pool.h",
        )
    ),
    "kp_digest",
    (*(flag for flag in FLAGS if "contract" not in flag), "-ffp-contract=fast", "-pthread", "-Wno-psabi"),
)
PROMPT = Library("kernels/_prompt", ("kernels/prompt.c", "kernels/vector.h"), "kq_digest", PROGRAM.flags)
LIBRARIES = (SHM, PROGRAM, PROMPT)
