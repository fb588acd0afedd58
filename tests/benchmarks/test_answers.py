"""What an answer must be, from the one that was given alone."""

from __future__ import annotations

import dataclasses
import random

import pytest
from answers import Ask, Expected, Received, difference, random_ask, wanted

# Five tokens; the third and fourth make one character, the last ends the answer.
ANSWER = Expected((1, 2), (10, 11, 12, 13, 9), ("he", "llo", "", "é", ""), "stop")


def received(count: int, text: str, finish: str | None) -> Received:
    return Received(list(ANSWER.token_ids[:count]), text, finish)


@pytest.mark.parametrize(
    ("max_tokens", "stop", "found"),
    [
        (5, None, (5, 5, "helloé", "stop")),
        (9, None, (5, 5, "helloé", "stop")),
        (4, None, (4, 4, "helloé", "length")),
        (3, None, (3, 3, "hello", "length")),
        (5, "ll", (2, 5, "he", "stop")),  # a round may have given more tokens than the string needs
        (1, "ll", (1, 1, "he", "length")),
        (5, "x", (5, 5, "helloé", "stop")),
    ],
)
def test_a_part_of_a_known_answer_is_known(max_tokens, stop, found):
    assert wanted(Ask(ANSWER, max_tokens, stop=stop)) == found


def test_an_answer_that_is_the_expected_one_does_not_differ():
    assert difference(Ask(ANSWER, 5), received(5, "helloé", "stop")) is None
    assert difference(Ask(ANSWER, 3), received(3, "hello\ufffd", "length")) is None
    assert difference(Ask(ANSWER, 5, stop="ll"), received(3, "he", "stop")) is None
    assert difference(Ask(ANSWER, 5), received(2, "hel", None), whole=False) is None
    assert difference(Ask(ANSWER, 5), Received(), whole=False) is None


@pytest.mark.parametrize(
    ("ask", "answer", "what"),
    [
        (Ask(ANSWER, 5), received(5, "helloé", None), "no finish reason"),
        (Ask(ANSWER, 5), received(4, "helloé", "stop"), "4 tokens, at least 5"),
        (Ask(ANSWER, 2), received(3, "hello", "length"), "3 tokens, at most 2"),
        (Ask(ANSWER, 4), received(4, "helloé", "stop"), "finish reason stop, length"),
        (Ask(ANSWER, 5), received(5, "hell", "stop"), "text ends with 'hell', 'helloé' expected"),
        (Ask(ANSWER, 5, stop="ll"), received(2, "hello", "stop"), "text ends with 'hello', 'he' expected"),
        (Ask(ANSWER, 5, stop="ll"), received(1, "he", "stop"), "1 tokens, at least 2"),
    ],
)
def test_a_difference_beside_the_tokens_says_what_it_is(ask, answer, what):
    found = difference(ask, answer)
    assert what in found.what
    assert found.position is None


def test_the_first_other_token_is_told_even_where_the_client_left():
    answer = Received([10, 11, 99, 98], "hello", None)
    for whole in (True, False):
        found = difference(Ask(ANSWER, 5), answer, whole=whole)
        assert (found.position, found.found) == (2, 99)
    assert "'x' is not in the answer" in difference(Ask(ANSWER, 5), Received([], "x"), whole=False).what


def test_random_requests_are_varied_and_can_be_answered():
    rng = random.Random(3)
    asks = [random_ask(rng, ANSWER, leave=0.3) for _ in range(400)]
    assert {ask.n for ask in asks} == {1, 2, 3}
    assert {ask.max_tokens for ask in asks} == set(range(1, 10))
    assert {ask.stream for ask in asks} == {True, False}
    assert 0.2 < sum(ask.leave_after is not None for ask in asks) / len(asks) < 0.4
    stops = [ask for ask in asks if ask.stop is not None]
    assert stops
    assert all(ask.stop in ANSWER.text(5) and ask.body["stop"] == [ask.stop] for ask in stops)
    for ask in asks:
        least, most, text, finish = wanted(ask)
        assert 1 <= least <= most <= ask.max_tokens
        assert difference(ask, received(most, text, finish)) is None


def test_an_answer_that_its_length_ended_is_never_asked_to_be_longer():
    cut = dataclasses.replace(ANSWER, finish="length")
    asks = [random_ask(random.Random(i), cut, leave=0.0, most_choices=1) for i in range(100)]
    assert max(ask.max_tokens for ask in asks) == 5
    assert {ask.n for ask in asks} == {1}
