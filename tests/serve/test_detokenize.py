"""Tokens become text without half characters, and stop strings cut exactly."""

from __future__ import annotations

import random

import pytest

from peagle_jax.serve.detokenize import Answer, Detokenizer, StopStrings
from tests.serve.doubles import byte_tokenizer

TEXTS = [
    "the thing hit the hat",
    "naïve café — 日本語 🦅🦅 end",
    "🦅",
    " leading and trailing ",
    "line\n\n\tnext\r\n",
    "\ufffd is a character too",
]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def pushed(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_the_deltas_concatenate_to_the_whole_text(tokenizer, text):
    assert "".join(pushed(tokenizer, tokenizer.encode(text))) == text


def test_a_character_of_several_tokens_comes_whole_with_its_last_token(tokenizer):
    ids = tokenizer.encode("a🦅b")
    assert len(ids) == 6
    assert pushed(tokenizer, ids) == ["a", "", "", "", "🦅", "b", ""]


def test_bytes_that_never_become_a_character_are_shown_at_the_end(tokenizer):
    ids = tokenizer.encode("x🦅")[:-1]
    assert "".join(pushed(tokenizer, ids)) == tokenizer.decode(ids)
    assert "".join(pushed(tokenizer, ids)).startswith("x\ufffd")


def test_random_byte_soup_decodes_as_it_does_at_once(tokenizer):
    rng = random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(len(tokenizer)) for _ in range(40)]
        expected = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert "".join(pushed(tokenizer, ids)) == expected


def test_special_tokens_have_no_text(tokenizer):
    ids = tokenizer.encode("a<|end|>b")
    assert "".join(pushed(tokenizer, ids)) == "ab"


def test_the_window_stays_short(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    for token in tokenizer.encode("the hat " * 100):
        detokenizer.push(token)
    assert len(detokenizer._window) < 6


def test_text_that_may_begin_a_stop_string_is_held_back():
    stop = StopStrings(["<END>"])
    assert [stop.push(part) for part in ("ab<", "EN", "x<E", "ND", ">tail")] == ["ab", "", "<ENx", "", ""]
    assert stop.found
    assert stop.flush() == ""


def test_what_was_held_back_in_vain_is_shown_at_the_end():
    stop = StopStrings(["<END>"])
    assert stop.push("ab<EN") == "ab"
    assert stop.flush() == "<EN"
    assert not stop.found


def test_the_earliest_of_several_stop_strings_cuts():
    stop = StopStrings(["yes", "no"])
    assert stop.push("or no, yes") == "or "


def test_a_stop_string_that_overlaps_itself_is_found():
    stop = StopStrings(["aab"])
    assert "".join(stop.push(c) for c in "aaab") == "a"
    assert stop.found


def test_every_split_of_a_text_gives_the_same_cut():
    text, strings = "abcabdabcabe!", ["abcabe", "zzz"]
    rng = random.Random(1)
    for _ in range(200):
        stop, shown, rest = StopStrings(strings), "", text
        while rest and not stop.found:
            size = rng.randint(1, 4)
            shown += stop.push(rest[:size])
            rest = rest[size:]
        assert shown + stop.flush() == "abcabd"


@pytest.mark.parametrize("width", [1, 2, 3, 16])
def test_a_stop_string_in_mid_round_drops_what_follows(tokenizer, width):
    ids = tokenizer.encode("one END two three")
    answer, text, count, finish = Answer(tokenizer, ["END"]), "", 0, None
    while finish is None:
        delta = answer.add(ids[count : count + width], None)
        text, count, finish = text + delta.text, count + len(delta.token_ids), delta.finish_reason
    assert (text, finish) == ("one ", "stop")
    assert tokenizer.decode(ids[:count]) == "one END"  # counted up to the token that completed it


def test_the_stop_token_is_counted_but_not_shown(tokenizer):
    ids = tokenizer.encode("hello")
    delta = Answer(tokenizer).add(ids, "stop")
    assert delta.text == "hell"
    assert delta.token_ids == tuple(ids)


def test_a_stop_string_on_the_last_token_of_the_limit_is_a_stop(tokenizer):
    delta = Answer(tokenizer, ["c"]).add(tokenizer.encode("abc"), "length")
    assert (delta.text, delta.finish_reason) == ("ab", "stop")


def test_text_held_for_a_stop_string_is_shown_when_the_limit_ends_the_answer(tokenizer):
    delta = Answer(tokenizer, ["cd"]).add(tokenizer.encode("abc"), "length")
    assert (delta.text, delta.finish_reason) == ("abc", "length")
