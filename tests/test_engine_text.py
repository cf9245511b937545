"""Streaming text (report O-36 a): characters split over tokens, broken bytes, leading spaces; with real decoders of both kinds."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from colrow.engine.prompts import encode
from colrow.engine.text import TextStream
from colrow.errors import UserError


def byte_level() -> PreTrainedTokenizerFast:
    """One token a byte, id = the byte (GPT-2's alphabet), and a special token 256."""
    alphabet = {}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = iter(range(256, 512))
    for byte in range(256):
        alphabet[chr(byte) if byte in printable else chr(next(other))] = byte
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


WORDS = ["\u2581Hello", "\u2581world", "!", "\u2581"]


def byte_fallback() -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are <0x00> to <0xFF>; then words with sentencepiece's space; then a special token."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def stream(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    text = TextStream(tokenizer)
    return [*(text.push(i) for i in ids), text.finish()]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", ["a😀b", "😀😀", "né €uro", "日本語", "👩‍👩‍👧‍👦!", "x\u0301"])
def test_split_characters_come_out_whole(make: type, text: str) -> None:
    tokenizer, ids = make(), list(text.encode())
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == text == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)
    at = 0  # and each as soon as its last byte is there
    for i, piece in enumerate(pieces[:-1]):
        at += len(piece)
        assert text[:at] == bytes(ids[: i + 1]).decode(errors="ignore")


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_an_end_in_the_middle_of_a_character_shows_nothing_of_it(make: type) -> None:
    assert "".join(stream(make(), list("ab😀".encode())[:-1])) == "ab"


@pytest.mark.parametrize(
    "data",
    [b"a\xffb", b"\xff\xf0\x9f\x98\x80", b"\xe2\x82\xf0\x9f\x98\x80x", b"\xf0\x9f\xf0\x9f\x98\x80", b"\x80\x80\x80\x80\x80a", b"a\xc3(b"],
)
def test_invalid_bytes_come_out_as_the_decoder_writes_them(data: bytes) -> None:
    tokenizer = byte_level()
    pieces = stream(tokenizer, list(data))
    assert "".join(pieces) == tokenizer.decode(list(data))


@pytest.mark.parametrize(("make", "word"), [(byte_level, list(b" world")), (byte_fallback, [257])])
def test_invalid_bytes_do_not_stall_the_stream(make: type, word: list[int]) -> None:
    tokenizer = make()
    text = TextStream(tokenizer)
    shown = [text.push(0xFF) for _ in range(100)]
    assert sum(map(len, shown)) >= 96
    assert len(text._waiting) <= 17  # the window stays small
    assert "".join([text.push(i) for i in word]).endswith(" world")
    assert "".join(stream(tokenizer, [0xFF, *word])) == "\ufffd world"


def test_a_good_character_before_broken_bytes_stays() -> None:
    """A decoder that falls back to bytes would turn the finished emoji into U+FFFD as well; it is out already, so it stays."""
    pieces = stream(byte_fallback(), [*"😀".encode(), 0xF0, 257])
    assert "".join(pieces) == "😀\ufffd world"


def test_a_token_that_ends_one_character_and_begins_the_next() -> None:
    tokenizer = byte_level()
    euro, smile = "€".encode(), "😀".encode()

    class Pairs:  # tokens of several bytes, decoded by the byte-level tokenizer
        table = ([euro[0]], [euro[1]], [euro[2], smile[0]], [smile[1]], [smile[2], smile[3]])

        def decode(self, ids: list[int], **kwargs: bool) -> str:
            return tokenizer.decode([byte for i in ids for byte in self.table[i]])

    assert stream(Pairs(), [0, 1, 2, 3, 4]) == ["", "", "€", "", "😀", ""]


def test_spaces_before_words_and_special_tokens() -> None:
    tokenizer = byte_fallback()
    special = tokenizer.eos_token_id
    assert stream(tokenizer, [256, 257, 258]) == ["Hello", " world", "!", ""]
    assert stream(tokenizer, [256, special, 257, special]) == ["Hello", "", " world", "", ""]
    assert stream(tokenizer, [256, 259, 256]) == ["Hello", " ", " Hello", ""]


def test_a_template_that_is_wrong_or_refuses_is_said_in_one_line() -> None:
    tokenizer = byte_level()
    for template, why in (("{{ messages", "unexpected end"), ("{{ raise_exception('no system please') }}", "no system please")):
        tokenizer.chat_template = template
        with pytest.raises(UserError, match=f"chat template refuses the conversation, got {why}"):
            encode(tokenizer, "Hi")
        assert encode(tokenizer, "Hi", raw=True)
