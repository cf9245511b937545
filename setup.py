"""Compiles the C files beside the package. Everything else about the package is in pyproject.toml.

The extensions are optional: where they cannot be compiled the install goes on, and colrow says at run time what it does instead.
They are plain shared libraries that ctypes loads, not Python modules.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup

spec = importlib.util.spec_from_file_location("colrow_native", Path(__file__).parent / "colrow" / "native.py")
native = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = native
spec.loader.exec_module(native)


def extension(library):
    return Extension(
        "colrow." + library.module.replace("/", "."),
        sources=["colrow/" + library.sources[0]],
        depends=["colrow/" + source for source in library.sources],
        define_macros=[("COLROW_DIGEST", f'"{library.digest()}"')],
        extra_compile_args=list(library.flags),
        libraries=["m"],
        optional=True,
    )


setup(ext_modules=[extension(library) for library in native.LIBRARIES] if sys.platform.startswith("linux") else [])
