"""Stop strings in streamed text (report O-36 b), limits, end-of-sequence ids."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from colrow.engine.stopping import Finish, Limits, StopText, context_limit, eos_ids
from colrow.errors import UserError
from tests import tiny


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
