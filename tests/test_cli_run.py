"""The commands on a small saved model: run, chat, plan; on one rank here, on several in real processes."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from colrow.__main__ import main
from colrow.comm.group import single
from colrow.engine import pace
from colrow.engine.engine import Engine
from tests import tiny
from tests.test_engine_engine import TEMPLATE
from tests.test_engine_text import byte_level

CONFIG = {"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 512}
PROMPT = ["-p", "Hello", "-n", "24", "--dtype", "float32"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    """Passes of the gate are remembered for these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A base model: no chat template."""
    folder = tmp_path_factory.mktemp("base")
    tiny.whole(tiny.config("llama", **CONFIG), attention="sdpa").float().save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    tiny.whole(tiny.config("llama", **CONFIG), attention="sdpa").float().save_pretrained(folder)
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


def expected(prompt: str, count: int = 24) -> str:
    whole = tiny.whole(tiny.config("llama", **CONFIG), attention="sdpa").float()
    return Engine(whole, single(), byte_level()).complete([prompt], max_new_tokens=count, raw=True)[0]


def colrow(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "colrow", *arguments], input=stdin, capture_output=True, text=True)


def test_run_on_one_rank(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", model, *PROMPT]) == 0
    out, err = capsys.readouterr()
    assert out == expected("Hello") + "\n"
    for word in ("rank 0: ", " parameters", "load ", "24 new", "tokens/s", "after the command", "5 prompt tokens"):
        assert word in err


def test_run_writes_a_trace(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "READ", (1 << 20, 2 << 20, 12 << 20))
    assert main(["run", model, *PROMPT, "--trace", str(tmp_path / "trace.json")]) == 0
    check_trace(tmp_path / "trace.json", ["prompt", *(f"token {n}" for n in range(1, 24))])
    entries = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    parts = ["weights", "attention", "between", "beside"] * 23  # of the program's tokens, measured and predicted
    assert [e["name"] for e in entries if e["cat"] == "piece"] == parts
    predicted = [e for e in entries if e["cat"] == "part" and e["name"] in parts]
    assert [e["name"] for e in predicted] == parts
    assert all(e["args"]["measured_ms"] > 0 for e in predicted)
    tokens = sum(e["dur"] for e in entries if e["cat"] == "step" and e["pid"] == 0 and e["name"] != "prompt")
    assert abs(sum(e["dur"] for e in entries if e["cat"] == "piece") - tokens) < len(entries)
    shown = capsys.readouterr().err
    assert "predicted / measured, ms" in shown
    assert "token: " in shown


def test_train_writes_a_trace(model: str, tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("a few words to learn\n\n" * 9)
    asked = ["--data", str(tmp_path / "d.txt"), "--out", str(tmp_path / "out"), "--steps", "2", "--length", "16", "--batch", "1"]
    assert main(["train", model, *asked, "--no-gate", "--trace", str(tmp_path / "trace.json")]) == 0
    check_trace(tmp_path / "trace.json", ["step 1", "step 2"])


def check_trace(file: Path, steps: list[str]) -> None:
    """One rank sends nothing: its steps, and each of them as it was predicted, with parts that add up to it."""
    entries = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    for process in (0, 1):
        assert [e["name"] for e in entries if e["pid"] == process and e["cat"] == "step"] == steps
    assert {e["pid"] for e in entries} == {0, 1}
    parts = sum(e["dur"] for e in entries if e["cat"] == "part")
    assert abs(parts - sum(e["dur"] for e in entries if e["pid"] == 1 and e["cat"] == "step")) < len(entries)


def test_instruct_models_answer_unless_raw(talker: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", talker, *PROMPT]) == 0
    assert capsys.readouterr().out == expected("[user]Hello[assistant]") + "\n"
    assert main(["run", talker, *PROMPT, "--raw"]) == 0
    assert capsys.readouterr().out == expected("Hello") + "\n"


def test_a_stop_string_ends_the_text(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    whole = expected("Hello")
    assert main(["run", model, *PROMPT, "--stop", whole[6:9]]) == 0
    assert capsys.readouterr().out == whole[: whole.index(whole[6:9])] + "\n"


def test_a_prompt_that_does_not_fit_is_one_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", model, "-p", "x" * 600]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert (
        err
        == "colrow: the prompt does not fit into the model's context of 512 tokens, got 600 tokens; try: a prompt of at most 511 tokens\n"
    )


def test_plan_of_a_config_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.config("llama", **CONFIG).save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--tp", "2", "--dtype", "float32", "--full", "--json", str(tmp_path / "plan.json")]) == 0
    out, _ = capsys.readouterr()
    for word in ("down_proj", "rank 0: ", "rank 1: ", " of KV cache a token", "collectives a token: 7"):
        assert word in out
    assert main(["plan", str(tmp_path), "--plan", str(tmp_path / "plan.json"), "--dtype", "float32", "--full"]) == 0
    assert capsys.readouterr().out == out
    assert main(["plan", str(tmp_path), "--tp", "2", "--why", "model.layers.0.mlp.down_proj.weight"]) == 0
    assert "down_proj" in capsys.readouterr().out
    assert main(["plan", str(tmp_path), "--tp", "2", "--why", "model.layers.0.mlp.up"]) == 2
    assert main(["run", str(tmp_path), "-p", "x"]) == 2
    assert "no weights" in capsys.readouterr().err


def test_verify_says_equal(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", model, "--tp", "2", "--backend", "threads"]) == 0
    assert "equal" in capsys.readouterr().out
    tiny.config("llama", **CONFIG).save_pretrained(tmp_path)
    assert main(["verify", str(tmp_path), "--tp", "3", "--small", "--no-train", "--backend", "threads"]) == 0
    assert main(["verify", str(tmp_path), "--tp", "2"]) == 2  # no weights


@pytest.mark.process
@pytest.mark.parametrize("options", [["--tp", "3", "--backend", "gloo"], ["--split", "3,1"]], ids=" ".join)
def test_ranks_give_the_same_text_and_count_what_was_predicted(model: str, options: list[str]) -> None:
    done = colrow("run", model, *PROMPT, *options)
    assert (done.returncode, done.stdout) == (0, expected("Hello") + "\n"), done.stderr
    assert "as predicted" in done.stderr
    assert "NOT as predicted" not in done.stderr
    assert "rank 1: " in done.stderr


@pytest.mark.process
def test_the_parent_of_ranks_imports_neither_torch_nor_transformers(model: str) -> None:
    """The nursery does, on the same cores, and nobody waits for it once more at the end."""
    code = (
        "import sys; from colrow.__main__ import main\n"
        "if __name__ == '__main__':\n"
        "    print(main(sys.argv[1:]), [m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, "run", model, *PROMPT, "--tp", "2"], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


@pytest.mark.process
def test_sampling_is_the_same_at_any_degree(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*PROMPT, "--temperature", "1.2", "--top-p", "0.9", "--seed", "11"]
    assert main(["run", model, *options]) == 0
    text = capsys.readouterr().out
    assert colrow("run", model, *options, "--tp", "2").stdout == text != expected("Hello") + "\n"


CHAT = ["--temperature", "0", "-n", "12", "--dtype", "float32"]
TYPED = "Hi\nAnd?\n\nnot read\n"


def answers() -> str:
    first = expected("[user]Hi[assistant]", 12)
    return f"{first}\n{expected(f'[user]Hi[assistant]{first}[user]And?[assistant]', 12)}\n"


def test_a_conversation_on_one_rank(talker: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(TYPED))
    assert main(["chat", talker, *CHAT]) == 0
    assert capsys.readouterr().out == answers()


@pytest.mark.process
def test_a_conversation_on_two(talker: str) -> None:
    done = colrow("chat", talker, "--tp", "2", *CHAT, stdin=TYPED)
    assert (done.returncode, done.stdout) == (0, answers()), done.stderr


@pytest.mark.process
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_ctrl_c_ends_an_answer_and_not_the_conversation(ranks: str, talker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of a model that would go on for long. SIGTERM ends all of it, and leaves no file."""
    (tmp_path / "own").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "own"))
    folder = shutil.copytree(talker, tmp_path / "talker")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1_000_000, "eos_token_id": None}))
    (folder / "generation_config.json").unlink()
    command = [sys.executable, "-m", "colrow", "chat", str(folder), "--tp", ranks, "--temperature", "2", "--dtype", "float32"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        _until_it_asks(process)
        for _ in range(2):
            process.stdin.write(b"Hi\n")
            assert process.stdout.read(1)  # the first text
            process.send_signal(signal.SIGINT)
            _until_it_asks(process)
        if ranks == "1":
            process.stdin.close()
            assert process.wait(60) == 0
        else:
            assert list((tmp_path / "own").glob("colrow-chat-*"))
            os.killpg(process.pid, signal.SIGTERM)
            assert (process.communicate(timeout=60)[1], process.returncode) == (b"colrow: terminated\n", -signal.SIGTERM)
    assert not list((tmp_path / "own").glob("colrow-chat-*"))


def _until_it_asks(process: subprocess.Popen[bytes]) -> None:
    """And what has been answered until then is read."""
    assert process.stdout is not None
    assert process.stderr is not None
    said = b""
    while not said.endswith(b"> "):
        byte = process.stderr.read(1)
        assert byte, said
        said += byte
    os.set_blocking(process.stdout.fileno(), False)
    while process.stdout.read(1 << 16):
        pass
    os.set_blocking(process.stdout.fileno(), True)


@pytest.mark.process
def test_a_mistake_found_by_the_ranks_is_one_line(model: str, tmp_path: Path) -> None:
    for file in Path(model).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    done = colrow("run", str(tmp_path), *PROMPT, "--tp", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "model.safetensors" in done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "code", "line"),
    [(signal.SIGINT, 130, "colrow: interrupted\n"), (signal.SIGTERM, -signal.SIGTERM, "colrow: terminated\n")],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_signal_to_all_while_text_appears_ends_everything(number: signal.Signals, code: int, line: str, model: str) -> None:
    command = [sys.executable, "-m", "colrow", "run", model, "-p", "Hello", "--tp", "2", "--temperature", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)  # the first text
        ranks = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, number)
        process.wait(20)
        err = process.stderr.read() if process.stderr else ""
    assert (process.returncode, err) == (code, line)
    until = time.monotonic() + 5
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [p for p in ranks if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
