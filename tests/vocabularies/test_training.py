"""Training text of real templates: what carries loss, and the id for mask slots."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_jax.drafter.vocabulary import check_mask_token
from peagle_jax.serve.token_text import TokenText
from peagle_jax.train.recipe import load_recipe
from peagle_jax.train.records import RecordError
from peagle_jax.train.setup import free_mask_token, template_ids
from peagle_jax.train.tokens import ConversationEncoder
from tests.vocabularies.conftest import ALL
from tests.vocabularies.test_prompts import RESULT, SYSTEM, TOOL, call

pytestmark = pytest.mark.vocabularies

FIRST, SECOND = "It rains: naïve 🦅.\n\n```py\nx = 1\n```", "6 days,\tnot 7"
MESSAGES = [
    SYSTEM,
    {"role": "user", "content": "Weather in 東京?"},
    {"role": "assistant", "content": FIRST},
    {"role": "user", "content": "How long?\n"},
    {"role": "assistant", "content": SECOND},
]
THOUGHT = "東京, so it is wet."
CLOSE = {"qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "llama3.1": "<|eot_id|>", "gpt-oss": "<|return|>"}
TOGETHER = ("qwen3-instruct-2507", "qwen3-coder", "llama3", "llama3.1", "llama3.1-tools")
"""Templates that write earlier turns the same when later ones follow."""


def encoder(vocabulary, **template):
    return ConversationEncoder(vocabulary.tokenizer, vocabulary.eos_token_ids, template)


def written(name, answer, thought=""):
    """What a model of the template writes for an answer, its close included."""
    if name == "qwen3":
        answer = f"<think>\n{thought}\n</think>\n\n{answer}"
    if name == "gpt-oss":
        analysis = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
        answer = f"{analysis}<|channel|>final<|message|>{answer}"
    return answer + CLOSE[ALL[name].folder]


def flagged(vocabulary, tokens, flags):
    """The flagged runs as text."""
    edges = np.flatnonzero(np.diff(flags)) + 1
    runs = np.split(np.arange(len(tokens)), edges)
    return [vocabulary.tokenizer.decode(tokens[run].tolist()) for run in runs if flags[run[0]]]


@pytest.mark.parametrize("name", ALL)
def test_the_loss_of_turns_apart_is_exactly_on_the_answers(name):
    vocabulary = ALL[name]
    made = encoder(vocabulary)
    parts = made.encode_apart(MESSAGES)
    for (tokens, flags), end, answer in zip(parts, (2, 4), (FIRST, SECOND), strict=True):
        assert flagged(vocabulary, tokens, flags) == [written(name, answer)]
        assert tokens[~flags].tolist() == made.prompt_ids(MESSAGES[:end])
        assert tokens[flags].tolist() == vocabulary.ids(written(name, answer))


@pytest.mark.parametrize("name", TOGETHER)
def test_the_loss_of_turns_together_is_exactly_on_the_answers(name):
    vocabulary = ALL[name]
    made = encoder(vocabulary)
    tokens, flags = made.encode(MESSAGES)
    assert flagged(vocabulary, tokens, flags) == [written(name, FIRST), written(name, SECOND)]
    start = len(tokens) - len(vocabulary.ids(written(name, SECOND)))
    assert tokens[:start].tolist() == made.prompt_ids(MESSAGES[:4])  # as serving would have written it
    _, cut = made.encode(MESSAGES, "length")
    assert cut.sum() == flags.sum() - 1


@pytest.mark.parametrize("name", sorted(ALL.keys() - set(TOGETHER)))
def test_a_template_that_rewrites_earlier_turns_is_one_clear_error_together(name):
    with pytest.raises(RecordError, match=r"rewrites earlier text when message 5 of 5.*data.turns: apart"):
        encoder(ALL[name]).encode(MESSAGES)


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
@pytest.mark.parametrize("spelling", ["reasoning_content", "thinking", "reasoning"])
def test_the_loss_is_on_the_reasoning_too(name, spelling):
    vocabulary = ALL[name]
    messages = [*MESSAGES[:2], MESSAGES[2] | {spelling: THOUGHT}]
    tokens, flags = encoder(vocabulary).encode(messages)
    assert flagged(vocabulary, tokens, flags) == [written(name, FIRST, THOUGHT)]


def test_the_loss_of_qwen_without_thinking_leaves_out_what_the_prompt_closes():
    vocabulary = ALL["qwen3"]
    tokens, flags = encoder(vocabulary, enable_thinking=False).encode(MESSAGES[:3])
    assert flagged(vocabulary, tokens, flags) == [FIRST + CLOSE["qwen3"]]
    thought = [*MESSAGES[:2], MESSAGES[2] | {"reasoning_content": THOUGHT}]
    with pytest.raises(RecordError, match=r"cannot be located; data.template passes arguments"):
        encoder(vocabulary, enable_thinking=False).encode(thought)


def test_the_loss_is_on_calls():
    messages = [MESSAGES[1], call({"city": "東京"}), RESULT, MESSAGES[2]]
    for name, text in {
        "qwen3": "<think>\n\n</think>\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "東京"}}\n</tool_call><|im_end|>',
        "gpt-oss": ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "東京"}<|call|>',
        "qwen3-coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\n東京\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>",
        "llama3.1-tools": '{"name": "get_weather", "parameters": {"city": "東京"}}<|eot_id|>',
    }.items():
        parts = encoder(ALL[name], tools=[TOOL]).encode_apart(messages)
        assert flagged(ALL[name], *parts[0]) == [text]
        assert flagged(ALL[name], *parts[1]) == [written(name, FIRST)]


@pytest.mark.parametrize(
    ("name", "thought"), [*((name, "") for name in ALL), ("qwen3", THOUGHT), ("gpt-oss", THOUGHT)]
)
def test_a_message_made_of_what_a_model_wrote_is_trained_on_as_it_was_written(name, thought):
    """``regenerate`` keeps messages; the text that they train on is the target's own again."""
    vocabulary = ALL[name]
    made = encoder(vocabulary)
    ids = vocabulary.ids(written(name, FIRST, thought))
    message = made.message(MESSAGES[:2], ids[:-1])
    tokens, flags = made.encode([*MESSAGES[:2], message])
    assert tokens[flags].tolist() == ids


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpt-oss", "<|channel|>analysis<|message|>It"),
        ("gpt-oss", "<|channel|>commentary to=functions.f<|message|>{}"),
        ("qwen3", "<think>\nIt"),
    ],
)
def test_an_answer_that_is_cut_in_its_reasoning_is_no_message(name, text):
    assert encoder(ALL[name]).message(MESSAGES[:2], ALL[name].ids(text)) is None


TRAIN = Path(__file__).parents[2] / "train"
RECIPE_FILES = [path for path in sorted(TRAIN.glob("*.yaml")) if not path.stem.startswith("smollm2")]
RECIPES = {
    "openai/gpt-oss-20b": "gpt-oss",
    "openai/gpt-oss-120b": "gpt-oss",
    "Qwen/Qwen3-8B": "qwen3",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": "qwen3-coder",
    "meta-llama/Llama-3.1-8B-Instruct": "llama3.1-tools",
}


@pytest.mark.parametrize("path", RECIPE_FILES, ids=lambda path: path.stem)
def test_a_recipe_takes_its_targets_turns_as_the_template_allows(path):
    recipe = load_recipe(path)
    name = RECIPES[str(recipe.target)]
    made = encoder(ALL[name], **recipe.data.template)
    assert (recipe.data.turns == "together") == (name in TOGETHER)
    assert made.encode_apart(MESSAGES) if recipe.data.turns == "apart" else made.encode(MESSAGES)


MASKS = {"qwen3": 151669, "llama3": 128255, "llama3.1": 128255, "gpt-oss": 200019}


@pytest.fixture
def mask(vocabulary):
    return free_mask_token(vocabulary.tokenizer, np.zeros(vocabulary.rows), vocabulary.eos_token_ids)


def test_the_mask_token_is_a_free_row_of_the_published_model(vocabulary, mask):
    assert mask == MASKS[vocabulary.name] and mask < vocabulary.rows
    reserved, special = template_ids(vocabulary.tokenizer)
    assert mask not in reserved | set(vocabulary.eos_token_ids)
    spelled = TokenText(vocabulary.tokenizer).text(mask)
    assert spelled.startswith("<|reserved_special_token_") if mask in special else not spelled
    check_mask_token(mask, np.zeros(vocabulary.rows), reserved)
    tokens = np.concatenate([tokens for tokens, _ in encoder(vocabulary).encode_apart(MESSAGES)])
    assert mask not in tokens


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=200))
def test_no_text_holds_the_mask_token(vocabulary, text):
    assert MASKS[vocabulary.name] not in vocabulary.ids(text)


def test_meanings_of_real_templates_are_reserved():
    for name, markers in {
        "qwen3": ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>"),
        "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "gpt-oss": ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
    }.items():
        tokenizer = ALL[name].tokenizer
        reserved, _ = template_ids(tokenizer)
        assert reserved >= {tokenizer.convert_tokens_to_ids(marker) for marker in markers}
