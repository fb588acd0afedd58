"""Several answers of one request, echo, token ids, and what the engine is asked for each."""

from __future__ import annotations

import json

import pytest

from tests.serve.conftest import CONTEXT, chat, complete, running, user
from tests.serve.doubles import END, TOKENIZER
from tests.serve.engine_double import ScriptedEngine


@pytest.fixture(scope="module")
def server():
    with running(
        ScriptedEngine(lambda r: [*r.prompt_ids[:3], *TOKENIZER.encode(f" {r.sampling.seed}"), END])
    ) as s:
        yield s


def chunks_of(response) -> list[dict]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_n_answers_have_seeds_that_count_up_and_the_prompt_counts_once(server):
    answer = complete(server, prompt="abc", n=3, seed=7)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert [c.text for c in answer.choices] == ["abc 7", "abc 8", "abc 9"]
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 3 * (len(TOKENIZER.encode("abc 7")) + 1)
    assert len({r.request_id for r in server.engine.seen[-3:]}) == 3


def test_one_answer_is_the_first_of_several(server):
    one = complete(server, prompt="abc", seed=7).choices[0].text
    assert one == complete(server, prompt="abc", n=2, seed=7).choices[0].text


def test_seeds_count_up_past_the_largest_a_client_may_send(server):
    assert len(complete(server, prompt="abc", n=2, seed=2**63 - 1).choices) == 2


@pytest.mark.parametrize("prompt", [["ab", "cde"], [TOKENIZER.encode("ab"), TOKENIZER.encode("cde")]])
def test_several_prompts_have_their_answers_in_order(server, prompt):
    answer = complete(server, prompt=prompt, n=2, seed=1, max_tokens=2)
    assert [c.text for c in answer.choices] == ["ab", "ab", "cd", "cd"]
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 8


def test_streams_of_several_answers_say_what_the_whole_says(server):
    whole = complete(server, prompt=["ab", "cde"], n=2, seed=1)
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    for chunk in complete(server, prompt=["ab", "cde"], n=2, seed=1, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            finishes[choice.index] = choice.finish_reason
    assert texts == {c.index: c.text for c in whole.choices}
    assert finishes == dict.fromkeys(range(4), "stop")


def test_every_chat_choice_begins_with_its_role(server):
    chunks = list(chat(server, n=2, seed=1, stream=True))
    roles = [c.choices[0].index for c in chunks if c.choices[0].delta.role == "assistant"]
    assert sorted(roles) == [0, 1]


def test_best_of_that_chooses_nothing_is_taken(server):
    assert len(complete(server, n=2, extra_body={"best_of": 2}).choices) == 2


def test_continuous_usage_counts_up_to_the_whole(server):
    response = server.post(
        "/v1/completions",
        prompt="abc",
        seed=12345,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks_of(response)]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] == len(TOKENIZER.encode("abc 12345")) + 1


def test_echo_shows_the_prompt_first(server):
    whole = complete(server, prompt="abc", seed=7, echo=True)
    assert whole.choices[0].text == "abcabc 7"
    assert whole.usage.completion_tokens == len(TOKENIZER.encode("abc 7")) + 1
    streamed = complete(server, prompt="abc", seed=7, echo=True, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == "abcabc 7"
    ids = complete(server, prompt=TOKENIZER.encode("abc"), seed=7, echo=True)
    assert ids.choices[0].text == "abcabc 7"


def test_an_echo_alone_generates_nothing_that_shows(server):
    answer = complete(server, prompt="abc", echo=True, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "length")
    assert answer.usage.completion_tokens == 0
    assert server.post("/v1/completions", prompt="abc", max_tokens=0).status_code == 400


def test_token_ids_come_when_asked_for(server):
    prompt, said = TOKENIZER.encode("abc"), [*TOKENIZER.encode("abc 7"), END]
    body = {"prompt": "abc", "seed": 7, "return_token_ids": True}
    choice = server.post("/v1/completions", **body).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, said)
    chunks = [c["choices"][0] for c in chunks_of(server.post("/v1/completions", **body, stream=True))]
    assert chunks[0]["prompt_token_ids"] == prompt
    assert [i for c in chunks for i in c.get("token_ids", [])] == said
    body = {"messages": user("hi"), "return_token_ids": True}
    whole = server.post("/v1/chat/completions", **body).json()
    assert whole["prompt_token_ids"] == list(server.engine.seen[-1].prompt_ids)
    first = chunks_of(server.post("/v1/chat/completions", **body, stream=True))[0]
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]


def test_a_prompt_is_cut_to_what_the_client_says(server):
    complete(server, prompt="abcdef", extra_body={"truncate_prompt_tokens": 2})
    assert TOKENIZER.decode(server.engine.seen[-1].prompt_ids) == "ef"
    complete(server, prompt="abcdef", extra_body={"truncate_prompt_tokens": 2, "truncation_side": "right"})
    assert TOKENIZER.decode(server.engine.seen[-1].prompt_ids) == "ab"
    complete(server, prompt="x" * 2 * CONTEXT, max_tokens=20, extra_body={"truncate_prompt_tokens": -1})
    assert len(server.engine.seen[-1].prompt_ids) == CONTEXT - 20
    complete(server, prompt=[70] * 2 * CONTEXT, max_tokens=20, extra_body={"truncate_prompt_tokens": 9})
    assert len(server.engine.seen[-1].prompt_ids) == 9


def test_sampling_fields_reach_the_engine(server):
    complete(
        server,
        presence_penalty=0.5,
        frequency_penalty=-1,
        logit_bias={"70": 5, "5": -100},
        max_tokens=9,
        extra_body={
            "repetition_penalty": 1.3,
            "min_tokens": 4,
            "allowed_token_ids": [9, 3, 9],
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "priority": -3,
            "speculative": False,
        },
    )
    request = server.engine.seen[-1]
    sampling = request.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (
        0.5,
        -1,
        1.3,
    )
    assert sampling.logit_bias == ((5, -100.0), (70, 5.0))
    assert (sampling.min_tokens, sampling.allowed_token_ids) == (4, (3, 9))
    assert (request.include_stop_str, request.skip_special_tokens) == (True, False)
    assert (request.priority, request.speculative) == (-3, False)


def test_null_is_the_default_of_every_field(server):
    names = [
        "n",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        "min_tokens",
        "stop",
        "seed",
        "stream",
        "echo",
        "priority",
    ]
    answer = server.post("/v1/completions", prompt="abc", **dict.fromkeys(names))
    assert answer.status_code == 200
    names = [
        "tools",
        "tool_choice",
        "logprobs",
        "top_logprobs",
        "response_format",
        "stream_options",
        "parallel_tool_calls",
    ]
    assert server.post("/v1/chat/completions", messages=user("x"), **dict.fromkeys(names)).status_code == 200


@pytest.mark.parametrize(
    ("stop", "reason"),
    [({"stop": " 1"}, " 1"), ({"stop_token_ids": [TOKENIZER.encode("7")[0]]}, None), ({}, None)],
)
def test_the_reason_of_a_stop_is_told(server, stop, reason):
    choice = server.post("/v1/completions", prompt="abc", seed=17, **stop).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == (stop["stop_token_ids"][0] if "stop_token_ids" in stop else reason)


def test_a_stop_string_stays_when_the_client_wants_it(server):
    body = {"prompt": "abc", "seed": 17, "stop": " 1", "include_stop_str_in_output": True}
    assert server.post("/v1/completions", **body).json()["choices"][0]["text"] == "abc 1"


def test_the_request_has_the_id_that_its_sender_gave_it(server):
    headers = {"X-Request-Id": "mine"}
    answer = server.http.post("/v1/completions", json={"prompt": "abc"}, headers=headers)
    assert (answer.json()["id"], answer.headers["x-request-id"]) == ("cmpl-mine", "mine")
    assert server.post("/v1/completions", prompt="abc", request_id="yours").json()["id"] == "cmpl-yours"
    assert complete(server)._request_id.startswith("cmpl-")


def test_rounds_are_told_to_who_asks(server):
    body = {"prompt": "abc", "seed": 12345, "stream": True}
    chunks = chunks_of(
        server.post("/v1/completions", **body, stream_options={"include_spec_decode_rounds": True})
    )
    rounds = [c["choices"][0]["spec_decode_round"] for c in chunks if "spec_decode_round" in c["choices"][0]]
    assert rounds[0] == {"num_draft_tokens": 0, "num_accepted_draft_tokens": 0, "tokens": ["a"]}
    assert rounds[1] == {
        "num_draft_tokens": 3,
        "num_accepted_draft_tokens": 3,
        "tokens": ["b", "c", " ", "1"],
    }
    assert "".join(text for r in rounds for text in r["tokens"]) == "abc 12345"
    assert all(
        "spec_decode_round" not in c["choices"][0] for c in chunks_of(server.post("/v1/completions", **body))
    )
