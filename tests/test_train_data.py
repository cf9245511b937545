"""Data becomes rows: what is learned, what shares a row, what is refused; and the schedule."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BloomConfig

from colrow.cli.screen import Screen
from colrow.cli.train import _check_length, show
from colrow.comm.group import Group
from colrow.errors import UserError
from colrow.planning.derive import derive
from colrow.train import curve, data, lines
from colrow.train.data import Document, Row
from colrow.train.settings import Settings
from colrow.train.step import IGNORED
from colrow.train.trainer import SavedAt, Step, keeps_documents_apart

from . import tiny
from .splitting import TOLERANCE, ask_split, case, whole
from .test_engine_engine import TEMPLATE
from .test_engine_text import byte_level

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "?"}]
END = 256


def talker() -> object:
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def written(tmp_path: Path, *entries: object) -> Path:
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in entries) + "\n")
    return path


def learned(document: Document) -> bytes:
    return bytes(x for x in document.labels if x not in (IGNORED, END))


def test_a_conversation_is_learned_where_the_assistant_speaks(tmp_path: Path) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "ok"}]
    (document,) = data.read(written(tmp_path, {"messages": messages}), talker(), 100)
    assert bytes(document.ids) == b"[user]hi[assistant]yo[user]?[assistant]ok"
    assert learned(document) == b"yook"
    assert [i for i, x in enumerate(document.labels) if x != IGNORED][:2] == [19, 20]


def test_completions_and_texts_end_with_the_token_that_ends(tmp_path: Path) -> None:
    first, second = data.read(written(tmp_path, {"prompt": "ab", "completion": "cd"}, "", {"text": "efg"}), byte_level(), 100)
    assert first.ids == (*b"abcd", END)
    assert first.labels == (IGNORED, IGNORED, *b"cd", END)
    assert second.ids == second.labels == (*b"efg", END)


def test_running_text_is_cut_into_rows_and_nothing_is_lost(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abcdefghij")
    documents = data.read(tmp_path / "t.txt", byte_level(), 4)
    assert [i for d in documents for i in d.ids] == [*b"abcdefghij", END]
    assert [len(d.ids) for d in documents] == [4, 4, 3]


def test_packed_documents_have_positions_of_their_own_and_do_not_predict_each_other() -> None:
    documents = [Document((1, 2, 3), (1, 2, 3)), Document((4, 5), (4, 5)), Document((6, 7, 8, 9), (IGNORED, 7, 8, 9))]
    assert data.pack(documents, 6) == [
        Row((1, 2, 3, 4, 5), (IGNORED, 2, 3, IGNORED, 5), (0, 1, 2, 0, 1)),
        Row((6, 7, 8, 9), (IGNORED, 7, 8, 9), (0, 1, 2, 3)),
    ]
    assert len(data.pack(documents, 6, together=False)) == 3
    batch = data.batch(data.pack(documents, 6), 0, packed=True)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert batch["labels"][1].tolist() == [IGNORED, 7, 8, 9, IGNORED]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_packed_rows_are_trained_as_if_alone(family: str) -> None:
    """Logits of each document in a shared, padded row equal those of the document by itself, split or not."""
    at = whole(case(family), "sdpa")
    documents = [Document(tuple(row), tuple(row)) for row in ((5, 6, 7, 8), (9, 3, 4), (11, 12, 13, 14, 15))]
    batch = data.batch(data.pack(documents, 8), 0, packed=True)
    batch.pop("labels")

    def task(group: Group, model: object) -> torch.Tensor:
        assert keeps_documents_apart(model, at.config.vocab_size)
        return model(**batch, use_cache=False).logits.detach()

    logits = ask_split(at, derive(at.config, 2), task)[0]
    for (row, start), document in zip(((0, 0), (0, 4), (1, 0)), documents, strict=True):
        alone = at.model(torch.tensor([document.ids])).logits[0]
        assert (logits[row, start : start + len(document.ids)] - alone).abs().max() <= TOLERANCE


def test_a_model_that_mixes_documents_is_found_out() -> None:
    at = whole(case("llama"), "sdpa")

    def task(group: Group, model: object) -> bool:
        original = model.forward
        model.forward = lambda *a, position_ids=None, **k: original(*a, **k)  # a model that ignores positions
        return keeps_documents_apart(model, at.config.vocab_size)

    assert not ask_split(at, derive(at.config, 2), task)[0]


def test_every_row_is_seen_once_an_epoch_and_the_last_window_is_not_dropped() -> None:
    rows = [Row((n,), (n,), (0,)) for n in range(10)]
    steps = [data.window(rows, step, 4, seed=1) for step in range(6)]
    assert [len(s) for s in steps] == [4, 4, 2, 4, 4, 2]
    for epoch in (steps[:3], steps[3:]):
        assert sorted(row.ids[0] for s in epoch for row in s) == list(range(10))
    assert steps[:3] != steps[3:]
    assert data.window(rows, 4, 4, seed=1) == steps[4], "a function of the step alone"
    assert data.window(rows, 0, 4, seed=2) != steps[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"d\.jsonl:1 is not JSON"),
        ("[" * 100_000, r"d\.jsonl:1 is not JSON"),
        ({"text": "ab\ud800cd"}, r"d\.jsonl:1 is no Unicode: it has half a character, got '\\ud800'"),
        ({"messages": [{"role": "assistant", "content": "\udc00"}]}, r"d\.jsonl:1 is no Unicode"),
        ({"messages": [{"role": "assistant", "content": [{"text": "\udc00"}]}]}, r"d\.jsonl:1 is no Unicode"),
        ({"words": "x"}, r"d\.jsonl:1 has no text that colrow knows, got \['words'\]"),
        ({"messages": [{"role": "user", "content": "x"}]}, "the assistant says nothing"),
        ({"text": "x"}, None),
    ],
)
def test_lines_that_cannot_be_used_are_named(line: object, message: str | None, tmp_path: Path) -> None:
    if message is None:
        return
    with pytest.raises(UserError, match=message):
        data.read(written(tmp_path, line), talker(), 100)


def test_a_conversation_needs_a_template(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no chat template"):
        data.read(written(tmp_path, {"messages": CHAT}), byte_level(), 100)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to learn from"):
        data.read(written(tmp_path, ""), byte_level(), 100)


def test_the_learning_rate_rises_and_falls() -> None:
    settings = Settings(lr=1.0, warmup=4, final=0.1)
    rates = [settings.rate(step, 14) for step in range(14)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[3:]))
    linear = Settings(lr=1.0, schedule="linear", final=0.0)
    assert [linear.rate(step, 5) for step in range(5)] == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert {Settings(lr=0.5, schedule="constant").rate(step, 9) for step in range(9)} == {0.5}


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"steps": 0}, {"lr": 0.0}, {"clip": -1.0}, {"schedule": "sine"}, {"length": 1}])
def test_settings_that_cannot_work_are_refused(wrong: dict) -> None:
    with pytest.raises(UserError):
        Settings(**wrong)


def test_the_curve_shows_the_fall() -> None:
    points = [(n, 5.0 - 0.04 * n) for n in range(1, 101)]
    lines = curve.terminal(points, width=20, height=4).splitlines()
    assert lines[0].startswith("   4.")
    assert lines[0].rstrip().count("█") < lines[3].count("█")
    page = curve.page("a <title>", points, [(50, 3.1)])
    assert "<svg" in page
    assert "a &lt;title&gt;" in page
    assert curve.terminal([(1, 2.0)]) == ""
    assert "no steps" in curve.page("t", [(1, float("nan"))])


def test_a_list_of_entries_strange_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    """U+2028 ends no line of JSON, although Python's splitlines() thinks so."""
    entries = [{"text": "a\u2028b"}, {"prompt": "c", "completion": "d"}]
    (tmp_path / "list.json").write_text(json.dumps(entries, ensure_ascii=False), encoding="utf-8-sig")
    (tmp_path / "d.ndjson").write_bytes("\r\n".join(json.dumps(e, ensure_ascii=False) for e in entries).encode("utf-8-sig"))
    for path in (tmp_path / "list.json", tmp_path / "d.ndjson"):
        assert [said.pieces for said in lines.read(path)] == [(("a\u2028b", True),), (("c", False), ("d", True))]
    (tmp_path / "list.json").write_text('[{"text": "a"}, {"txt": "b"}]')
    with pytest.raises(UserError, match=r"list.json, entry 2 has no text"):
        lines.read(tmp_path / "list.json")


def test_json_lines_are_not_learned_as_running_text(tmp_path: Path) -> None:
    written(tmp_path, {"text": "a b c"}).rename(tmp_path / "d.txt")
    with pytest.raises(UserError, match=r"JSON lines would be read as running text .*ends in .jsonl"):
        data.read(tmp_path / "d.txt", byte_level(), 100)
    (tmp_path / "d.txt").write_text('{"a": 1} is a dict\n{"text": ""}\n')
    assert len(data.read(tmp_path / "d.txt", byte_level(), 100)) == 1


def test_tools_go_to_the_chat_template_or_are_refused(tmp_path: Path) -> None:
    entry = {"messages": [*CHAT[:2]], "tools": [{"type": "function", "function": {"name": "find"}}]}
    with pytest.raises(UserError, match="d.jsonl:1 has tools, and the model's chat template says nothing of them"):
        data.read(written(tmp_path, entry), talker(), 100)
    tokenizer = talker()
    tokenizer.chat_template = "{% if tools %}{{ tools[0]['function']['name'] }}:{% endif %}" + TEMPLATE  # type: ignore[attr-defined]
    (document,) = data.read(written(tmp_path, entry), tokenizer, 100)
    assert bytes(document.ids) == b"find:[user]hi[assistant]yo"
    assert learned(document) == b"yo"
    with pytest.raises(UserError, match="tools of another form"):
        data.read(written(tmp_path, entry | {"tools": "find"}), tokenizer, 100)


def test_what_is_not_learned_is_told(tmp_path: Path) -> None:
    entries = [{"prompt": "a" * 20, "completion": "b"}, {"prompt": "a", "completion": "b" * 20}, {"text": ""}, {"text": "c" * 30}]
    told: list[str] = []
    assert [len(d.ids) for d in data.read(written(tmp_path, *entries), byte_level(), 16, told.append)] == [16, 16, 15]
    assert told == ["1 longer than 16 tokens, their ends are not learned", "2 left out, nothing to learn within 16 tokens"]


def test_rows_that_the_model_has_no_positions_for_are_refused() -> None:
    model: Any = SimpleNamespace(config=tiny.config("gpt2"))
    limit = model.config.max_position_embeddings
    _check_length([Row((1,) * limit, (1,) * limit, (0,) * limit)], model)
    with pytest.raises(UserError, match=f"rows of {limit + 1} tokens, and the model was made for {limit}"):
        _check_length([Row((1,) * (limit + 1), (), ())], model)
    _check_length([Row((1,) * 999, (), ())], SimpleNamespace(config=BloomConfig()))


@pytest.mark.parametrize(("saves", "words"), [(False, "begins again, since nothing was saved"), (True, "goes on from step 1")])
def test_who_interrupts_a_run_is_told_where_it_goes_on(saves: bool, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def stream(*_: object) -> Iterator[object]:
        yield Step(1, 9, 2.0, 1.0, 1e-3, 100, 0.5)
        if saves:
            yield SavedAt(1, tmp_path / "checkpoints" / "step-1")
        yield Step(2, 9, 1.0, 1.0, 1e-3, 100, 0.5)
        raise KeyboardInterrupt

    asked: Any = None
    with pytest.raises(KeyboardInterrupt), Screen() as screen:
        show(stream, screen, asked, asked)
    assert f"after step 2 of 9; the same command {words}" in capsys.readouterr().err
