import pytest

from peagle_jax.serve.chat_parser import chat_parser, detect_parsers, needs_special_tokens, reasoning_form
from tests.serve.scripts import counter, every_cut

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, (None, None)),
        ("{{ messages }}", (None, None)),
        ("... <tool_call> ...", ("hermes", None)),
        ("... <tool_call> ... </think>", ("hermes", "qwen3")),
        ("... <tool_call>\n<function=x> ...", ("qwen3_coder", None)),
        ("<|start|>assistant<|channel|>final<|message|>", ("openai", "openai_gptoss")),
    ],
)
def test_a_template_shows_its_parsers(template, expected):
    assert detect_parsers(template) == expected


@pytest.mark.parametrize(
    ("reasoning", "prompt", "expected"),
    [
        (None, "<think>\n", None),
        ("qwen3", "assistant\n", "think"),
        ("qwen3", "assistant\n<think>\n", "opened"),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", None),
        ("deepseek_r1", "assistant\n", "opened"),
        ("openai_gptoss", "<|start|>assistant", "harmony"),
    ],
)
def test_how_an_answer_may_reason_follows_from_the_prompt(reasoning, prompt, expected):
    assert reasoning_form(reasoning, prompt) == expected


def test_each_pair_of_names_gives_its_parser():
    text = f"a</think>{CALL}"
    both = every_cut(lambda: chat_parser("hermes", "qwen3", "<think>\n", True, counter()), text, tries=0)
    assert both.reasoning == "a" and [c.name for c in both.tool_calls] == ["f"]
    quiet = every_cut(lambda: chat_parser("hermes", "qwen3", "<think>\n", False), text, tries=0)
    assert quiet.content == CALL
    assert every_cut(lambda: chat_parser(None, None, "", True), text, tries=0).content == text
    coder = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    written = every_cut(lambda: chat_parser("qwen3_coder", None, "", True, counter()), coder, tries=0)
    assert [c.name for c in written.tool_calls] == ["f"] and written.content == ""
    harmony = "<|channel|>commentary to=functions.f<|message|>{}"
    assert every_cut(lambda: chat_parser(None, "openai_gptoss", "", True), harmony, tries=0).content == "{}"
    assert needs_special_tokens("openai", None) and not needs_special_tokens("hermes", "qwen3")
