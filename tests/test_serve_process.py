"""`colrow serve` as a process with two ranks: clients, signals, lost ranks, a port that is taken."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch

from colrow.__main__ import main
from colrow.planning.models import build
from colrow.serve.server import AT_ONCE
from tests import tiny
from tests.families import FAMILIES
from tests.test_engine_engine import TEMPLATE
from tests.test_engine_text import byte_level
from tests.test_serve_api import alone

CONFIG = {"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 8192}
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("model")
    whole().save_pretrained(folder)
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield str(folder)


def whole() -> Any:
    return tiny.whole(tiny.config("llama", **CONFIG), torch.float32, attention="sdpa")


@dataclass
class Running:
    process: subprocess.Popen[str]
    port: int
    lines: list[str] = field(default_factory=list)

    def signal_all(self, number: signal.Signals) -> None:
        """To the whole process group, and to the parent once more: so does `timeout`."""
        self.process.send_signal(number)
        os.killpg(self.process.pid, number)

    @property
    def ranks(self) -> list[int]:
        return [int(found[1]) for line in self.lines if (found := re.search(r"rank \d+: .*\(process (\d+)\)", line))]

    def post(self, stream: bool = False, **body: Any) -> http.client.HTTPResponse:
        """An answer of which only the head has been read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        asked = {"prompt": "Hello", "max_tokens": 8000, "temperature": 0, "ignore_eos": True, "stream": stream, **body}
        connection.request("POST", "/v1/completions", json.dumps(asked))
        return connection.getresponse()


@contextmanager
def serving(model: str, *options: str) -> Iterator[Running]:
    command = [sys.executable, "-m", "colrow", "serve", model, "--tp", "2", "--port", "0", "--cache", "200MB", "--dtype", "float32"]
    command += options
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    found = Running(process, 0)

    def read() -> None:
        for line in process.stderr or ():
            found.lines.append(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while not (ready := re.search(r"http://127\.0\.0\.1:(\d+)/", "".join(found.lines))):
            assert process.poll() is None, found.lines
            time.sleep(0.05)
        found.port = int(ready[1])
        yield found
    finally:
        process.kill()
        process.wait()
        reader.join(10)


def gone(pids: list[int]) -> bool:
    """Whether all of these processes end within seconds."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_clients_get_the_unsplit_models_text_and_sigterm_drains(model: str) -> None:
    expected = alone(whole(), "Hello", 12)
    with serving(model) as server:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
            (card,) = client.models.list().data
            answer = client.completions.create(model=card.id, prompt="Hello", max_tokens=12, temperature=0)
            assert answer.choices[0].text == expected
            messages: Any = [{"role": "user", "content": "Hi"}]
            chunks = client.chat.completions.create(model=card.id, messages=messages, max_tokens=12, temperature=0, stream=True)
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert said == alone(whole(), "[user]Hi[assistant]", 12)
        if shutil.which("curl"):
            url = f"http://127.0.0.1:{server.port}/v1/completions"
            body = json.dumps({"prompt": "Hello", "max_tokens": 12, "temperature": 0})
            done = subprocess.run(["curl", "-sS", url, "-d", body], capture_output=True, text=True, check=True)
            assert json.loads(done.stdout)["choices"][0]["text"] == expected
        response = server.post(stream=True, max_tokens=300)
        response.readline()
        server.process.send_signal(signal.SIGTERM)
        rest = response.read().decode()
        assert rest.endswith("data: [DONE]\n\n")
        assert '"finish_reason": "length"' in rest
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))
        assert server.process.wait(20) == 0
        assert len(server.ranks) == 2
        assert gone(server.ranks)


@pytest.mark.parametrize(("busy", "rank"), [(False, 0), (True, 1)], ids=["idle", "busy"])
def test_a_rank_that_is_killed_ends_the_server_and_every_request_hears_of_it(busy: bool, rank: int, model: str) -> None:
    with serving(model) as server:
        heard: list[tuple[float, str]] = []

        def ask(stream: bool) -> None:
            response = server.post(stream)
            text = response.read().decode()
            heard.append((time.monotonic(), f"{response.status} {text[-400:]}"))

        clients = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)] if busy else []
        for client in clients:
            client.start()
        time.sleep(1.0)
        killed = time.monotonic()
        psutil.Process(server.ranks[rank]).kill()
        for client in clients:
            client.join(20)
        assert all(at - killed < 2 for at, _ in heard), heard
        if busy:
            (plain,) = [text for _, text in heard if text.startswith("503")]
            (streamed,) = [text for _, text in heard if text.startswith("200")]
            for text in (plain, streamed):
                assert f"rank {rank} was killed by SIGKILL" in text
        assert server.process.wait(10) == 1
        assert gone(server.ranks)
    (line,) = [line for line in server.lines if "failed" in line]
    assert f"rank {rank} was killed by SIGKILL" in line


def test_a_parent_that_is_killed_leaves_no_rank_and_no_name_in_shared_memory(model: str) -> None:
    """Report O-36 i, for the server: while it answers."""
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    with serving(model) as server:
        response = server.post(stream=True)
        response.readline()
        server.process.kill()
        assert gone(server.ranks)
        response.close()
    assert not before or set(Path("/dev/shm").iterdir()) <= before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_command_while_ranks_import_ends_everything(number: signal.Signals, model: str) -> None:
    """Report O-36 i: exit code not 0, nobody left, one line at most."""
    command = [sys.executable, "-m", "colrow", "serve", model, "--tp", "2", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        parent, ranks = psutil.Process(process.pid), list[psutil.Process]()
        while not ranks:  # the nursery, which imports
            ranks = [p for p in parent.children() if "spawn_main" in " ".join(p.cmdline())]
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    said = {signal.SIGINT: "colrow: interrupted\n", signal.SIGTERM: "colrow: terminated\n", signal.SIGKILL: ""}
    assert (process.returncode, err) == (130 if number == signal.SIGINT else -number, said[number])
    assert gone([p.pid for p in ranks])


def test_the_end_of_the_command_while_the_model_is_opened_is_one_line(model: str) -> None:
    """HTTP answers by then, so the server has the signals."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "colrow", "serve", model, "--tp", "2", "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        answer = b""
        while not answer:
            assert process.poll() is None
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answer = connection.recv(100)
        assert b" 503 " in answer
        os.killpg(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "colrow: interrupted\n")


def test_a_small_dev_shm_is_large_enough(model: str) -> None:
    """Report O-36 h: with 1 MB of /dev/shm it runs all the same, since its memory has no name there."""
    command = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {sys.executable} -m colrow run {model} --tp 2 -p Hello -n 4 --raw"
    done = subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, timeout=300)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip("a file system of one's own cannot be mounted here")
    assert done.returncode == 0, done.stderr
    assert "as predicted" in done.stderr


def test_restart_serves_again_on_the_same_port_until_a_sigterm_to_all(model: str) -> None:
    """Ranks that got it too go on until their requests have ended."""
    with serving(model, "--restart") as server:
        first = list(server.ranks)
        psutil.Process(first[1]).kill()
        until = time.monotonic() + 90
        while sum("http://" in line for line in server.lines) < 2 and time.monotonic() < until:
            time.sleep(0.1)
        response = server.post(max_tokens=12)
        assert json.loads(response.read())["choices"][0]["text"] == alone(whole(), "Hello", 12)
        assert gone(first)
        response = server.post(stream=True, max_tokens=300)
        response.readline()
        server.signal_all(signal.SIGTERM)
        rest = response.read().decode()
        assert '"finish_reason": "length"' in rest
        assert rest.endswith("data: [DONE]\n\n")
        assert server.process.wait(20) == 0
        assert gone(server.ranks)


def test_a_rank_that_is_lost_after_sigterm_is_not_restarted(model: str) -> None:
    with serving(model, "--restart", "--drain", "100") as server:
        response = server.post(stream=True)
        response.readline()
        server.signal_all(signal.SIGTERM)
        for _ in range(20):
            assert response.readline(), "the running request goes on"
        psutil.Process(server.ranks[1]).kill()
        assert "rank 1 was killed by SIGKILL" in response.read().decode()
        assert server.process.wait(20) == 1
        assert gone(server.ranks)
    assert not [line for line in server.lines if line.startswith("restart")]


def test_a_cache_of_the_models_own_is_said_at_the_start_and_a_second_signal_ends_the_draining(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mamba2 has states instead of keys and values; nothing of it goes through transformers' AttentionInterface."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = FAMILIES["mamba2"]()
    config.vocab_size, config.eos_token_id = 257, 256
    recurrent = build(config, dtype=torch.float32).eval()
    tiny.add_noise(recurrent)
    recurrent.save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    with serving(str(tmp_path), "--drain", "100") as server:
        (line,) = [line for line in server.lines if line.startswith("cache")]
        assert "a cache of this model's own kind, nothing shared" in line
        assert "the model's modules" in next(line for line in server.lines if line.startswith("decoding"))
        assert json.loads(server.post(max_tokens=8, ignore_eos=False).read())["choices"][0]["text"] == alone(recurrent, "Hello", 8)
        response = server.post(stream=True)
        server.process.send_signal(signal.SIGTERM)
        second = time.monotonic() + 2 * AT_ONCE
        while time.monotonic() < second:
            assert response.readline(), "the running request goes on"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        assert gone(server.ranks)


def test_a_port_that_is_taken_is_said_before_anything_is_started(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Report O-36 g."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve", model, "--tp", "2", "--port", str(port)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"port {port}" in err
    assert "in use" in err


def test_a_model_that_cannot_be_opened_ends_the_server(model: str, tmp_path: Path) -> None:
    for file in Path(model).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    command = [sys.executable, "-m", "colrow", "serve", str(tmp_path), "--tp", "2", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "model.safetensors" in done.stderr
