"""How the C library is found and built: installed or compiled on first use, never one of other sources; a line where not."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from colrow import native
from colrow.native import LIBRARIES, SHM, Library, NativeUnavailable, compiler_command

ROOT = Path(__file__).resolve().parents[1]
needs_compiler = pytest.mark.skipif(not compiler_command(), reason="no C compiler")


@needs_compiler
def test_a_tree_that_was_never_installed_compiles_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    SHM.compile(native._cache() / f"comm-_shm-{SHM.digest()}.so", SHM.digest())
    (made,) = (tmp_path / "colrow").iterdir()
    assert SHM._open(made, SHM.digest()) is not None
    assert SHM._open(made, "0123") is None  # other sources: not used


def test_without_a_compiler_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(NativeUnavailable, match="there is no C compiler") as caught:
        SHM.compile(tmp_path / "out.so", "x")
    assert "\n" not in str(caught.value)


@needs_compiler
def test_a_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "ROOT", tmp_path)
    (tmp_path / "bad.c").write_text("int f(void) { return nothing; }\n")
    with pytest.raises(NativeUnavailable, match=r"failed on bad.c: .*nothing") as caught:
        Library("_bad", ("bad.c",), "f").load()
    assert "\n" not in str(caught.value)


@needs_compiler
def test_the_wheel_holds_the_libraries_and_their_sources(tmp_path: Path) -> None:
    """Built by setuptools itself, without pip's isolation, so that no network is needed."""
    pytest.importorskip("setuptools")
    script = "import sys, setuptools.build_meta as build; print(build.build_wheel(sys.argv[1]))"
    tree, sources = tmp_path / "tree", sorted({f"colrow/{source}" for library in LIBRARIES for source in library.sources})
    for path in ["setup.py", "pyproject.toml", "LICENSE", *sources, "colrow/native.py"]:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes((ROOT / path).read_bytes())
    for package in ("colrow", "colrow/comm", "colrow/kernels"):
        (tree / package / "__init__.py").touch()
    (tree / "README.md").touch()
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=tree, capture_output=True, text=True)
    if done.returncode and "license" in done.stderr:
        pytest.skip("this setuptools is older than the one that pyproject.toml asks for")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert set(sources) <= set(names)
        for built in LIBRARIES:
            (library,) = (name for name in names if name.startswith(f"colrow/{built.module}.") and name.endswith(".so"))
            archive.extract(library, tmp_path)
            assert built._open(tmp_path / library, built.digest()) is not None
