"""Messages as chat templates read them."""

import pytest

from peagle_jax.serve.chat_protocol import Message

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize("spelling", ["reasoning", "reasoning_content"])
def test_reasoning_has_every_name_that_a_template_may_read(spelling):
    message = Message.model_validate({"role": "assistant", "content": "b", spelling: "a"}).for_template()
    assert message == {"role": "assistant", "content": "b", "reasoning_content": "a", "thinking": "a"}


def test_a_call_keeps_its_reasoning_and_has_an_object_of_arguments():
    sent = {"role": "assistant", "content": None, "reasoning": "a", "tool_calls": [CALL]}
    message = Message.model_validate(sent).for_template()
    assert (message["content"], message["reasoning_content"], message["thinking"]) == ("", "a", "a")
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_text_and_reasoning_beside_a_call_do_not_exclude_each_other():
    sent = {"role": "assistant", "content": "b", "reasoning": "a", "tool_calls": [CALL]}
    message = Message.model_validate(sent).for_template()
    assert (message["content"], message["reasoning_content"], message["thinking"]) == ("b", "a", "")
