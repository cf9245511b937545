"""Wrong input to the commands: one line on standard error, exit code 2, nothing started; help is quick."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import torch

import colrow
from colrow import api
from colrow.__main__ import main
from colrow.checkpoint.model_dir import find
from colrow.cli.options import degree, read_plan, read_split
from colrow.cli.screen import Screen
from colrow.cli.show import _ask
from colrow.cli.units import nbytes
from colrow.comm.group import Alone, Group
from colrow.errors import UserError
from colrow.parallel import build
from colrow.planning.derive import check_made_for
from colrow.proof import verify
from tests import tiny

RUN = ["run", "demo", "-p", "x"]
WRONG = {
    "tp 0": ([*RUN, "--tp", "0"], "tp must be at least 1, got 0; try: --tp 2"),
    "tp -3": ([*RUN, "--tensor-parallel-size", "-3"], "tp must be at least 1"),
    "tp that is no number": ([*RUN, "--tp", "two"], "'--tp'"),
    "split that is no list": ([*RUN, "--split", "3;1"], "split must be numbers"),
    "split of another size": ([*RUN, "--tp", "3", "--split", "3,1"], "--tp 3 and --split for 2"),
    "split of nothing": ([*RUN, "--split", "0,0"], "above 0"),
    "negative split": ([*RUN, "--split", "3,-1"], "above 0"),
    "temperature": ([*RUN, "--temperature", "-1"], "temperature must be"),
    "top-p": ([*RUN, "--top-p", "0"], "top-p must lie in (0, 1]"),
    "top-k": ([*RUN, "--top-k", "-1"], "top-k must be at least 0"),
    "dtype": ([*RUN, "--dtype", "int4"], "no such dtype, got int4"),
    "no new tokens": ([*RUN, "--max-new-tokens", "0"], "max-new-tokens must be at least 1"),
    "empty prompt": (["run", "demo", "-p", ""], "the prompt is empty"),
    "prompt of bytes that are no UTF-8": (["run", "demo", "-p", "caf\udce9"], "the text is no Unicode: character 3 is half a character"),
    "trace into no directory": ([*RUN, "--trace", "/nowhere/trace.json"], "there is no directory for the file to write"),
    "trace that is a directory": ([*RUN, "--trace", "/"], "the file to write is a directory, got /"),
    "page into no directory": (["plan", "demo", "--html", "/nowhere/plan.html"], "there is no directory for the file to write"),
    "proof into no directory": (["verify", "demo", "--html", "/nowhere/proof.html"], "there is no directory for the file to write"),
    "preset into no directory": (["bench", "--calibrate", "/nowhere/machine.json"], "there is no directory for the file to write"),
    "no prompt": (["run", "demo"], "'--prompt'"),
    "no model": (["run", "-p", "x"], "MODEL"),
    "unknown option": ([*RUN, "--frobnicate"], "No such option: --frobnicate"),
    "unknown command": (["frobnicate"], "No such command 'frobnicate'"),
    "no such file": (["run", "/nowhere/model", "-p", "x"], "no such file or directory, got /nowhere/model"),
    "no plan file": ([*RUN, "--plan", "/nowhere/plan.json"], "the plan cannot be read"),
    "more ranks than fit": ([*RUN, "--tp", "100000"], "got 100000 ranks; try: --tp "),
    "origin without a scheme": (["serve", "demo", "--allow-origin", "a.example"], "scheme and a host, in small letters, without a path"),
    "origin with a path": (["serve", "demo", "--allow-origin", "*", "--allow-origin", "https://a.example/"], "got https://a.example/"),
    "no backend": ([*RUN, "--tp", "2", "--backend", "pigeon"], "got pigeon"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("colrow: ")
    assert err.count("\n") == 1
    assert message in err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"colrow {colrow.__version__}\n"


def test_bytes_that_are_no_utf8_do_not_end_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 na\xc3\xafve\n"), "utf-8", "surrogateescape"))
    assert _ask() == "caf\ufffd naïve"


def test_a_plan_file_that_is_no_plan(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("[1, 2]", "3", "{", '"x"', "null"):
        (tmp_path / "plan.json").write_text(text)
        assert main([*RUN, "--plan", str(tmp_path / "plan.json")]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert "not a plan of colrow" in err
        assert "attribute" not in err


def test_a_plan_that_keeps_apart_what_the_model_ties() -> None:
    plan = api.plan(tiny.config("llama"), 2)
    with pytest.raises(UserError, match=r"ties parameters that the plan keeps apart, got model.embed_tokens.weight"):
        build.split(build.empty(tiny.config("llama-tied"), torch.float32), plan, Group(0, 2, Alone()))


def test_a_plan_and_a_split_that_contradict_it(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(api.plan(tiny.config("llama"), 2, (3, 1)).to_json())
    assert main([*RUN, "--plan", str(path), "--split", "1,1"]) == 2
    assert "--split says others, got 1,1" in capsys.readouterr().err
    assert degree(None, (6.0, 2.0), read_plan(path)) == 2


def test_a_plan_for_another_model_is_refused_before_it_is_carried_out(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.config("qwen2").save_pretrained(tmp_path)
    made = api.plan(tiny.config("llama"), 2)
    (tmp_path / "plan.json").write_text(made.to_json())
    assert main(["plan", str(tmp_path), "--plan", str(tmp_path / "plan.json")]) == 2
    message = "the plan was made for another model, got a plan for llama; try: a plan that colrow plan wrote for this qwen2 model"
    assert message in capsys.readouterr().err
    for use in (lambda: verify.verify(find(str(tmp_path), False), 2, plan=made), lambda: check_made_for(made, tiny.config("qwen2"))):
        with pytest.raises(UserError, match="made for another model"):
            use()
    tiny.config("llama", vocab_size=99).save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--plan", str(tmp_path / "plan.json")]) == 2
    assert "made for a model of other sizes, got model.embed_tokens.weight [101, 72], here [99, 72]" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"model.layers.2.*missing, here \["):
        check_made_for(made, tiny.config("llama", num_hidden_layers=3))
    assert check_made_for(made, tiny.config("llama", rms_norm_eps=1e-5)) is made


def test_colrow_alone_prints_its_help_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert "\n  run " in out
    assert err == ""


def test_a_directory_without_a_config_and_a_broken_plan(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    assert main(["plan", str(tmp_path), "--tp", "2"]) == 2
    assert "no config.json" in capsys.readouterr().err
    (tmp_path / "plan.json").write_text('{"version": 99}')
    assert main([*RUN, "--plan", str(tmp_path / "plan.json")]) == 2
    assert "version 99" in capsys.readouterr().err


def test_the_number_of_ranks_comes_from_where_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert degree(None, (), None) == 1
    assert degree(4, (), None) == 4
    assert degree(None, (3.0, 1.0), None) == 2
    assert degree(2, (3.0, 1.0), None) == 2
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert degree(None, (), None) == 3
    with pytest.raises(UserError, match="--tp 2 and torchrun 3"):
        degree(2, (), None)
    assert read_split("3, 1") == (3.0, 1.0)


@pytest.mark.process
def test_ctrl_c_while_libraries_are_imported_is_not_lost() -> None:
    code = (
        "import os, signal; from colrow.cli.interrupt import ending_at_once\n"
        "with ending_at_once():\n    try:\n        os.kill(os.getpid(), signal.SIGINT)\n    except BaseException: pass\n"
        "print('went on')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "colrow: interrupted\n")


def test_bytes_in_words() -> None:
    assert [nbytes(n) for n in (0, 512, 1536, 141_557_760, 3 * 1024**3)] == ["0 B", "512 B", "1.50 KiB", "135 MiB", "3.00 GiB"]


def test_progress_is_silent_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen() as screen:
        screen.show("load", 1, 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.process
def test_help_and_mistakes_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from colrow.__main__ import main\n"
        "codes = [main(a) for a in (['--help'], ['run', '--help'], ['run', 'demo', '-p', 'x', '--tp', '0'], ['run', '/no', '-p', 'x'])]\n"
        "print(codes, [m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 2, 2] []", done.stderr
    assert "Example: colrow run demo --tp 2" in done.stdout


def test_public_names_are_there() -> None:
    import colrow

    assert all(getattr(colrow, name) is not None for name in colrow.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = colrow.nothing
    assert colrow.Sampling(temperature=0).greedy
    assert tiny.config("llama").vocab_size == 101


def test_standard_output_on_a_full_disk_is_said_in_one_line(tmp_path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.config("llama").save_pretrained(tmp_path)
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["plan", str(tmp_path), "--tp", "2"]) == 2
    assert capsys.readouterr().err.startswith("colrow: standard output cannot be written, got No space left on device; try: ")
