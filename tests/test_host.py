"""Engine of a plain program: it starts the ranks itself, answers, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import colrow
from colrow.engine.settings import Sampling
from colrow.errors import RankError, UserError
from colrow.serve.messages import meeting_place
from tests import tiny
from tests.test_engine_text import byte_level
from tests.test_serve_api import alone

CONFIG = {"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 512}
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def whole() -> Any:
    return tiny.whole(tiny.config("llama", **CONFIG), torch.float32, attention="sdpa")


@pytest.fixture(scope="module")
def folder(whole: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    whole.save_pretrained(path)
    byte_level().save_pretrained(path)
    return path


def ranks() -> list[psutil.Process]:
    """Of the engine's processes those that the nursery has started."""
    nurseries = [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]
    return [rank for nursery in nurseries for rank in nursery.children()] or nurseries


def test_answers_are_the_whole_models_and_requests_come_and_go(whole: Any, folder: Path) -> None:
    with colrow.Engine(folder, tp=2, cache_bytes=1 << 24) as engine:
        assert len(ranks()) == 2
        prompts = ["Hello", "a longer prompt " * 20, "x"]
        answers = engine.generate(prompts, max_new_tokens=12)
        assert [a.text for a in answers] == [alone(whole, prompt, 12) for prompt in prompts]
        assert all(a.finish in ("stop", "length") and len(a.tokens) <= 12 for a in answers)
        assert "".join(engine.stream("Hello", max_new_tokens=12)) == answers[0].text
        assert engine.generate([[72, 105]], max_new_tokens=5)[0].tokens == engine.generate(["Hi"], max_new_tokens=5)[0].tokens
        drawn = engine.generate(["Hi", "Hi"], sampling=Sampling(1.0, seed=3), max_new_tokens=20, ignore_eos=True)
        assert drawn[0].tokens != drawn[1].tokens
        assert [a.tokens for a in engine.generate(["Hi"], sampling=Sampling(1.0, seed=4), max_new_tokens=20, ignore_eos=True)] == [
            drawn[1].tokens
        ]
        pieces = engine.stream("Hello", ignore_eos=True)  # left in the middle: the others go on, nothing is left of it
        next(pieces)
        pieces.close()
        first, second = engine.add("Hello", ignore_eos=True), engine.add("Hi", max_new_tokens=3, logprobs=1)
        engine.abort(first)
        outputs = []
        while found := engine.step():
            outputs += found
        assert {o.id: o.finish for o in outputs if o.finish} == {first: "abort", second: "length"}
        assert sum(len(o.logprobs) for o in outputs if o.id == second) == 3
        for wrong in ("", [], [300], [5] * 600):
            with pytest.raises(UserError):
                engine.generate([wrong])
        with pytest.raises(UserError, match="presence_penalty"):
            engine.generate(["a"], presence_penalty=float("nan"))
        with pytest.raises(UserError, match="not one text"):
            engine.generate("Hello")
        assert engine.generate(["Hello"], max_new_tokens=12)[0] == answers[0]
    assert ranks() == []
    with pytest.raises(UserError, match="closed"):
        engine.generate(["Hello"])


def test_a_rank_that_is_lost_is_named_and_a_model_in_memory_is_served(whole: Any) -> None:
    engine = colrow.Engine(whole, tp=2, tokenizer=byte_level(), cache_bytes=1 << 24)
    assert engine.generate(["Hello"], max_new_tokens=12)[0].text == alone(whole, "Hello", 12)
    killed = ranks()[1]
    pieces = engine.stream("Hello", ignore_eos=True)
    next(pieces)
    killed.kill()
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        list(pieces)
    assert ranks() == []
    with pytest.raises(UserError, match="closed"):
        engine.add("x")
    engine.close()


def test_mistakes_are_said_and_leave_no_rank(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError):
        colrow.Engine(tmp_path / "none", tp=2)
    with pytest.raises(UserError, match="tp"):
        colrow.Engine(folder, tp=0)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    for file in folder.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match="model.safetensors"):
        colrow.Engine(tmp_path, tp=2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="torchrun"):
        colrow.Engine(folder, tp=2)
    assert ranks() == []


def test_a_plain_script_needs_no_guard_and_no_close(whole: Any, folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import colrow\nprint('once')\n"
        f"engine = colrow.Engine({str(folder)!r}, tp=2, cache_bytes=1 << 24)\n"
        "print(repr(engine.generate(['Hello'], max_new_tokens=12)[0].text))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["once", repr(alone(whole, "Hello", 12))]
    assert done.stderr == ""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is a port")
def test_nobody_who_looks_for_open_ports_is_taken_for_rank_0() -> None:
    """Whoever connected first was accepted, and rank 0, which came second, waited forever."""
    with Listener(meeting_place(), authkey=b"key") as listener, ThreadPoolExecutor(1) as beside:
        accepted = beside.submit(listener.accept)
        assert isinstance(listener.address, bytes)
        assert listener.address.startswith(b"\0colrow-")
        with Client(listener.address, authkey=b"key") as rank_0, accepted.result(10) as connection:
            connection.send("a command")
            assert rank_0.recv() == "a command"
