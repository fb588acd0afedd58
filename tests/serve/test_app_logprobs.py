"""Log-probabilities in both endpoints' shapes: an entry a token, in chunks exactly those of their tokens."""

from __future__ import annotations

import pytest

from tests.serve.conftest import chat, complete, running, user
from tests.serve.doubles import END, TOKENIZER
from tests.serve.engine_double import says
from tests.serve.test_app_choices import chunks_of

ANSWER = "naïve 🦅 the end"
TOKENS = [*TOKENIZER.encode(ANSWER), END]


@pytest.fixture(scope="module")
def server():
    with running(says(ANSWER, width=3)) as server:
        yield server


def test_a_chat_answer_has_an_entry_a_token_with_bytes_and_the_best(server):
    answer = chat(server, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == len(TOKENS) == answer.usage.completion_tokens
    assert all(entry.logprob == -1.5 for entry in entries)
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(TOKENS)
    assert entries[0].top_logprobs[1].token == entries[0].token == "n"
    assert bytes(b for entry in entries[:-1] for b in entry.bytes).decode() == ANSWER
    assert entries[-1].token == "<|end|>"
    assert chat(server).choices[0].logprobs is None
    assert chat(server, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_chunks_have_the_entries_of_their_tokens_alone(server):
    whole = chat(server, logprobs=True, top_logprobs=1).choices[0].logprobs.content
    chunks = list(chat(server, logprobs=True, top_logprobs=1, stream=True))
    parts = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs]
    assert [entry for part in parts for entry in part] == whole
    assert [len(part) for part in parts[:3]] == [1, 3, 3]


def test_a_completion_has_parallel_lists(server):
    lists = complete(server, logprobs=1, max_tokens=100).choices[0].logprobs
    assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) == len(TOKENS)
    assert lists.text_offset[0] == 0
    assert [b - a for a, b in zip(lists.text_offset, lists.text_offset[1:])] == [
        len(t) for t in lists.tokens[:-1]
    ]
    best = lists.top_logprobs[0]
    assert best == {TOKENIZER.decode([TOKENS[0] + 1]): -0.25, "n": -1.5}  # the best, and the chosen one
    zero = complete(server, logprobs=0, max_tokens=100).choices[0].logprobs
    assert zero.top_logprobs[0] == {"n": -1.5}


def test_a_streamed_completion_has_the_lists_of_the_whole_one(server):
    whole = complete(server, logprobs=2, max_tokens=100).choices[0].logprobs
    chunks = list(complete(server, logprobs=2, max_tokens=100, stream=True))
    parts = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for part in parts for x in getattr(part, name)] == getattr(whole, name)


def test_an_echo_has_the_prompts_too_and_none_for_its_first_token(server):
    prompt = TOKENIZER.encode("the cat")
    for changes in ({"max_tokens": 2}, {"max_tokens": 0}):
        answer = complete(server, prompt=prompt, echo=True, logprobs=1, **changes)
        lists = answer.choices[0].logprobs
        assert len(lists.tokens) == len(prompt) + changes["max_tokens"]
        assert lists.token_logprobs[0] is None
        assert lists.top_logprobs[0] is None
        assert lists.token_logprobs[1:] == [-1.5] * (len(lists.tokens) - 1)
        assert answer.choices[0].text.startswith("the cat")
        assert "".join(lists.tokens[: len(prompt)]) == "the cat"


def test_prompt_logprobs_are_vllms(server):
    body = {"prompt": "the cat", "prompt_logprobs": 2, "max_tokens": 1}
    found = server.post("/v1/completions", **body).json()["choices"][0]["prompt_logprobs"]
    ids = TOKENIZER.encode("the cat")
    assert found[0] is None
    assert found[1][str(ids[1])] == {"logprob": -1.5, "rank": 2, "decoded_token": TOKENIZER.decode([ids[1]])}
    assert len(found[1]) == 2
    chat_answer = server.post("/v1/chat/completions", messages=user("hi"), prompt_logprobs=1).json()
    assert len(chat_answer["prompt_logprobs"]) == chat_answer["usage"]["prompt_tokens"]


def test_a_cut_by_a_stop_string_leaves_text_ids_entries_and_usage_in_agreement(server):
    body = {"prompt": "hi", "stop": " the", "logprobs": 0, "return_token_ids": True, "max_tokens": 100}
    answer = server.post("/v1/completions", **body).json()
    choice = answer["choices"][0]
    assert (
        len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"]
    )
    assert TOKENIZER.decode(choice["token_ids"]).startswith(choice["text"])


def test_tokens_can_be_named_by_their_ids(server):
    lists = complete(server, logprobs=1, extra_body={"return_tokens_as_token_ids": True}).choices[0].logprobs
    assert lists.tokens[0] == f"token_id:{TOKENS[0]}"


def test_what_is_impossible_is_a_number_that_json_has(server):
    from peagle_jax.serve.logprobs import chat_logprobs
    from peagle_jax.serve.token_text import TokenText
    from peagle_jax.speculative.sampling import TokenLogprob

    entry = TokenLogprob(70, float("-inf"), 9, ((71, float("-inf")),))
    found = chat_logprobs([entry], 1, TokenText(TOKENIZER), as_ids=False)["content"][0]
    assert found["logprob"] == found["top_logprobs"][0]["logprob"] == -9999.0


def test_streams_with_entries_end_as_others_do(server):
    chunks = chunks_of(server.post("/v1/chat/completions", messages=user("x"), logprobs=True, stream=True))
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
