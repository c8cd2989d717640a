"""Text of single tokens: nothing of the response is lost, halves of characters are seen as halves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.demo.byte_model import make_tokenizer
from rollout_service.dashboard.tokens import LONGEST, token_texts, visible

TOKENIZER = make_tokenizer()


def decode(tokens) -> str:
    return TOKENIZER.decode(list(tokens), skip_special_tokens=True)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_a_token_that_is_a_character_is_that_character() -> None:
    assert token_texts(encode("a1+ <b>"), decode) == list("a1+ <b>")


@pytest.mark.parametrize("character", ["é", "→", "🙂"])
def test_bytes_of_a_character_are_halves_until_the_last(character: str) -> None:
    texts = token_texts(encode(f"a{character}b"), decode)
    assert texts[0] == "a"
    assert texts[-1] == "b"
    assert set(texts[1:-2]) <= {"\ufffd"}
    assert texts[-2] == character
    assert len(texts) == 2 + len(character.encode())


def test_bytes_that_are_no_text_are_halves_and_what_follows_is_unharmed() -> None:
    (first, *_) = encode("🙂")
    assert token_texts([first, first, *encode("ok")], decode)[-2:] == ["o", "k"]
    assert all(token_texts([first] * 100, decode))


def test_a_token_without_text_is_shown_by_its_number() -> None:
    end = TOKENIZER.eos_token_id
    assert token_texts([*encode("ok"), end], decode) == ["o", "k", f"⟨{end}⟩"]
    assert token_texts([], decode) == []


def test_a_word_keeps_the_space_before_it() -> None:
    words = ["Hello", "world", "again"]
    assert token_texts([0, 1, 2], lambda tokens: " ".join(words[t] for t in tokens)) == ["Hello", " world", " again"]


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cc", "Cf"]), max_size=3 * LONGEST))
def test_all_of_a_response_is_there_once(text: str) -> None:
    shown = token_texts(encode(text), decode)
    whole = text.replace("\ufffd", "")
    assert "".join(shown).replace("\ufffd", "") == visible(whole)
    assert len(shown) == len(text.encode())


def test_work_grows_with_the_length_and_not_with_its_square() -> None:
    decoded = []
    token_texts(range(10 * LONGEST), lambda tokens: decoded.append(len(tokens)) or " ".join(map(str, tokens)))
    assert max(decoded) == LONGEST
    assert len(decoded) < 12 * LONGEST


@given(st.text())
def test_nothing_that_is_shown_controls_anything(text: str) -> None:
    shown = visible(text)
    assert len(shown) == len(text)
    assert not [c for c in shown if (ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0]
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
