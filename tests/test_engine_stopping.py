"""Stop strings in streamed text (report O-36 b), limits, end-of-sequence ids."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from colrow.engine.engine import RowText
from colrow.engine.stopping import Finish, Limits, StopText, context_limit, eos_ids
from colrow.errors import UserError
from tests import tiny
from tests.test_engine_text import byte_fallback, byte_level


def feed(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    stop = StopText(stops)
    out = [stop.feed(piece) for piece in pieces]
    return [*out, stop.flush()], stop.stopped


def test_nothing_of_a_stop_string_is_shown() -> None:
    assert feed(["DEFGHIJ"], ["ABC", "DEF", "GHIJ", "KL"]) == (["ABC", "", "", "", ""], True)


def test_text_is_held_back_only_while_it_may_match() -> None:
    assert feed(["DEF"], ["ABCD", "E", "X", "D"]) == (["ABC", "", "DEX", "", "D"], False)
    assert feed(["aab"], ["aa", "a", "b!"]) == (["", "a", "", ""], True)


def test_two_stops_one_the_beginning_of_the_other() -> None:
    assert feed(["AB", "ABC"], ["xA", "BC"]) == (["x", "", ""], True)
    assert feed(["BC", "ABCD"], ["xABCD"]) == (["xA", ""], True)  # BC is complete first


@pytest.mark.parametrize("stops", [["BC", "ABCD"], ["CD", "D", "ABCDE"], ["AA", "AAB"], ["zz"]], ids=str)
def test_the_cut_does_not_depend_on_the_pieces(stops: list[str]) -> None:
    text = "xAABCDEAABzy"
    shown = set()
    for mask in range(1 << (len(text) - 1)):
        cuts = [0, *(i + 1 for i in range(len(text) - 1) if mask >> i & 1), len(text)]
        out, stopped = feed(stops, [text[a:b] for a, b in pairwise(cuts)])
        shown.add(("".join(out), stopped))
    assert len(shown) == 1


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UserError, match="empty"):
        StopText(["a", ""])


def test_prompts_are_checked() -> None:
    limits = Limits(context=8)
    limits.check_prompts([[1] * 7])
    for bad, text in (([], "no prompt"), ([[1], []], "prompt 1 has no tokens"), ([[1] * 8], "context of 8"), ([[1] * 9], "got 9 tokens")):
        with pytest.raises(UserError, match=text):
            limits.check_prompts(bad)
    with pytest.raises(UserError):
        Limits(max_new_tokens=-1)


def test_what_ends_a_sequence() -> None:
    limits = Limits(max_new_tokens=3, eos=frozenset({2, 9}), context=10)
    assert limits.finish(prompt=4, new=1, token=5) is None
    assert limits.finish(prompt=4, new=1, token=9) is Finish.EOS
    assert limits.finish(prompt=4, new=3, token=5) is Finish.LENGTH
    assert limits.finish(prompt=9, new=1, token=5) is Finish.CONTEXT


def test_ids_and_limits_from_configs() -> None:
    assert eos_ids(SimpleNamespace(eos_token_id=[3, 4]), SimpleNamespace(eos_token_id=5), SimpleNamespace(eos_token_id=None), None) == {
        3,
        4,
        5,
    }
    assert context_limit(tiny.config("llama")) == 64
    assert context_limit(tiny.config("gpt2", n_positions=32)) == 32


FAMILY = "👩\u200d👩\u200d👧\u200d👦"  # one picture of seven characters, 25 bytes
TEXTS = {
    "emoji": ("ab😀😁cd😀", ["😁", "😁c", "😀😁", "😀cd", "d😀", "😎"]),
    "combined": (
        f"x{FAMILY}y👩\u200d👦!",
        [FAMILY, "👦!", "\u200d👧", "👦y", "👩\u200d👦", "👩\u200d👦!", FAMILY + "z", "👩\u200d👩\u200d👦"],
    ),
    "variants": ("a❤\ufe0fb❤c🇩🇪🇪🇺", ["❤\ufe0f", "❤c", "🇪🇪", "🇪🇺", "❤\ufe0e"]),  # flags are pairs of letters: Germany's, then Europe's
    "accents": ("né ne\u0301e e\u0301", ["\u0301e", "é", "e\u0301", "e\u0301!", "\u00e8"]),  # as it is written: é is not e and an accent
    "words": ("日本語のテキスト。はい", ["語の", "。", "。は", "はいえ", "スト。はい"]),
    "bytes that are none": ("ab", ["b"]),
}


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("name", TEXTS)
def test_stop_strings_whose_characters_are_split_over_tokens(name: str, size: int) -> None:
    """Tokens of `size` bytes, so that a token may end one character and begin the next, and hold the stop string and text behind it. The
    answer ends with the first token that completes a stop string; nothing of it is shown, and nothing before it is lost."""
    text, stops = TEXTS[name]
    data = text.encode() + (b"\xff\xf0\x9f" if name == "bytes that are none" else b"")
    tokens = [data[at : at + size] for at in range(0, len(data), size)]

    class Bytes:
        letters = byte_level()

        def decode(self, ids: list[int], **_: bool) -> str:
            return self.letters.decode([byte for at in ids for byte in tokens[at]])

    for chosen in [[], *([stop] for stop in stops), stops]:
        row, shown, ended = RowText(Bytes(), chosen, frozenset()), "", None
        for at in range(len(tokens)):
            ended = row.push(at)
            shown += row.take(ended)
            assert "\ufffd" not in shown.rstrip("\ufffd")
            if ended:
                break
        shown += row.take(Finish.LENGTH) if not ended else ""
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in chosen if stop in text]
        if found:
            end, start = min(found)
            assert (ended, shown) == (Finish.STOP, text[:start]), chosen
            assert at == (len(text[:end].encode()) - 1) // size, "with the token that has the last byte"
        else:
            assert (ended, shown.rstrip("\ufffd")) == (None, text), chosen


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("name", TEXTS)
def test_what_is_shown_before_is_not_taken_back(name: str, make: Any) -> None:
    """With both kinds of decoders: what comes piece by piece grows to what is there in the end, and is held back no longer than needed."""
    text, stops = TEXTS[name]
    for stop in stops:
        row, shown = RowText(make(), [stop], frozenset()), ""
        for at, byte in enumerate(text.encode()):
            ended = row.push(byte)
            shown += row.take(ended)
            seen = text.encode()[: at + 1].decode(errors="ignore")
            held = max(n for n in range(len(stop)) if seen.endswith(stop[:n]))
            assert shown == (text[: text.find(stop)] if ended else seen[: len(seen) - held])
            if ended:
                break
        assert bool(ended) == (stop in text)


@pytest.mark.parametrize("given", ["x", [3, "x"], {"a": 1}, 2.5])
def test_an_end_that_is_no_token_is_refused(given: object) -> None:
    with pytest.raises(UserError, match="is no token"):
        eos_ids(SimpleNamespace(eos_token_id=given))
