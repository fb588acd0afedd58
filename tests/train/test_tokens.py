import collections

import numpy as np
import pytest

from peagle_jax.train.recipe import DataRecipe, TrainError
from peagle_jax.train.records import Record
from peagle_jax.train.tokens import ConversationEncoder, Summary, encode_records, is_heldout
from tests.serve.doubles import byte_tokenizer
from tests.train.tiny_run import END, START, conversations, tokenizer

USER = {"role": "user", "content": "w1 w2"}
ANSWER = {"role": "assistant", "content": "w3 w4 w5"}
SECOND = [{"role": "user", "content": "w6"}, {"role": "assistant", "content": "w7"}]


def encoded(messages, finish=None, template=None, **options):
    made = tokenizer() if template is None else tokenizer(template)
    return ConversationEncoder(made, (), options).encode(messages, finish)


def test_only_the_answer_and_its_closing_token_are_flagged():
    tokens, flags = encoded([USER, ANSWER])
    assert tokens.tolist() == [START, 48, 1, 2, END, START, 49, 3, 4, 5, END]
    assert tokens[flags].tolist() == [3, 4, 5, END]


def test_every_assistant_turn_is_flagged():
    tokens, flags = encoded([USER, ANSWER, *SECOND])
    assert tokens[flags].tolist() == [3, 4, 5, END, 7, END]


def test_a_cut_answer_has_no_closing_token_to_learn():
    tokens, flags = encoded([USER, ANSWER, *SECOND], "length")
    assert tokens[flags].tolist() == [3, 4, 5, END, 7]
    assert tokens[-1] == 7


def test_the_prompt_is_encoded_as_serving_encodes_it():
    made = tokenizer()
    encoder = ConversationEncoder(made)
    tokens, flags = encoder.encode([USER, ANSWER])
    assert tokens[: flags.argmax()].tolist() == encoder.prompt_ids([USER])


def test_text_that_the_template_adds_after_the_close_is_not_flagged():
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} <|im_end|> w9 {% endfor %}"
    template += "{% if add_generation_prompt %}assistant {% endif %}"
    tokens, flags = encoded([USER, ANSWER, *SECOND], template=template)
    assert tokens[flags].tolist() == [3, 4, 5, END, 7, END]
    assert (tokens == 9).sum() == 3  # after each turn that another one follows


def test_a_template_that_changes_the_user_text_needs_no_special_case():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} "
        "{{ m.content if m.role == 'assistant' else m.content.replace('w1', 'w40') }} <|im_end|> {% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    tokens, flags = encoded([USER, ANSWER], template=template)
    assert 40 in tokens and tokens[flags].tolist() == [3, 4, 5, END]


def test_a_template_that_drops_earlier_answers_is_refused():
    template = (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}<|im_start|>{{ m.role }} "
        "{{ m.content }} <|im_end|> {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    with pytest.raises(TrainError, match=r"rewrites earlier text when message 4 of 4.*set data.turns: apart"):
        encoded([USER, ANSWER, *SECOND], template=template)


REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.reasoning_content and loop.last %}"
    "w30 {{ m.reasoning_content }} w31 {% endif %}{{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def test_a_template_that_drops_earlier_reasoning_is_refused_in_one_text_and_exact_apart():
    first = {**ANSWER, "reasoning_content": "w8 w9"}
    second = {**SECOND[1], "reasoning_content": "w10"}
    messages = [USER, first, SECOND[0], second]
    with pytest.raises(TrainError, match="rewrites earlier text when message 4 of 4"):
        encoded(messages, template=REASONING)
    encoder = ConversationEncoder(tokenizer(REASONING))
    (one, one_flags), (two, two_flags) = encoder.encode_apart(messages, "length")
    assert one[one_flags].tolist() == [30, 8, 9, 31, 3, 4, 5, END]
    assert two[two_flags].tolist() == [30, 10, 31, 7]  # cut, so without a close
    for i, (tokens, flags) in ((1, (one, one_flags)), (3, (two, two_flags))):
        assert tokens[~flags].tolist() == encoder.prompt_ids(messages[:i])
        assert flags.tolist() == sorted(flags)


def test_reasoning_has_every_name_that_a_template_may_read():
    template = REASONING.replace("reasoning_content", "thinking")
    for name in ("reasoning_content", "thinking", "reasoning"):
        for made in (REASONING, template):
            tokens, flags = encoded([USER, {**ANSWER, name: "w8"}], template=made)
            assert tokens[flags].tolist() == [30, 8, 31, 3, 4, 5, END]


def test_a_template_that_always_opens_a_turn_at_its_end_has_exact_answers():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
        "<|im_start|>assistant "
    )
    tokens, flags = encoded([USER, ANSWER, *SECOND], template=template)
    usual, usual_flags = encoded([USER, ANSWER, *SECOND])
    assert tokens.tolist() == usual.tolist() and flags.tolist() == usual_flags.tolist()


HARMONY = (
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% else %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('channels') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
THINK = (
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% if '</think>' not in m.content %}"
    "<think></think>{% endif %}{% endif %}{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def message(template, text):
    made = byte_tokenizer(template)
    return ConversationEncoder(made).message([{"role": "user", "content": "q"}], made.encode(text))


def test_an_answer_on_channels_becomes_a_message_of_the_template():
    final, thought = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
    again = "<|end|><|start|>assistant"
    assert message(HARMONY, f"{final}a\nb") == {"role": "assistant", "content": "a\nb"}
    found = message(HARMONY, f"{thought}c{again}{final}a")
    assert found == {"role": "assistant", "reasoning_content": "c", "content": "a"}
    for text in ("a", f"{thought}cut", f"{final}a{again}{final}b", final, ""):
        assert message(HARMONY, text) is None


def test_an_answer_that_its_template_would_write_differently_is_no_message():
    whole = "<think> a </think>\n\nb \n"
    assert message(THINK, whole) == {"role": "assistant", "content": whole}
    assert message(THINK, "<think> a") is None  # cut, and the template would think before it
    assert message("{{ raise_exception('no') }}", "a") is None
    assert message(THINK, " \n") is None


def test_turns_apart_are_documents_of_one_id():
    records = conversations(4, turns=3)
    documents, summary = run(records, turns="apart")
    assert [d.id for d in documents] == [r["id"] for r in records for _ in range(3)]
    together, _ = run(records)
    kept = sum(int(d.flags.sum()) for d in together)
    assert sum(int(d.flags.sum()) for d in documents) == summary.supervised == kept


def test_a_template_that_strips_answers_flags_what_it_writes():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content | trim }} <|im_end|> {% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    tokens, flags = encoded([USER, {**ANSWER, "content": "\n w3 w4  \n"}, *SECOND], template=template)
    assert tokens[flags].tolist() == [3, 4, END, 7, END]


def test_a_template_that_strips_its_whole_text_is_refused():
    template = (
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% set ns.text = ns.text ~ m.role ~ ' ' ~ m.content ~ ' <|im_end|>  ' %}{% endfor %}"
        "{% if add_generation_prompt %}{% set ns.text = ns.text ~ 'assistant:' %}{% endif %}"
        "{{ ns.text | trim }}"
    )
    with pytest.raises(TrainError, match="rewrites earlier text when message 2 of 2"):
        encoded([USER, ANSWER], template=template)


def test_a_template_that_needs_alternating_roles_says_so():
    template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }} {{ m.content }} "
        "<|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    assert encoded([USER, ANSWER, *SECOND], template=template)[1].sum() == 6
    for messages in ([USER, USER, ANSWER], [USER, ANSWER, ANSWER]):
        with pytest.raises(TrainError, match="the chat template refused a record: roles must alternate"):
            encoded(messages, template=template)


@pytest.mark.parametrize("content", ["", "  \n"])
def test_an_empty_assistant_turn_is_refused(content):
    with pytest.raises(TrainError, match="message 4 of 4, the assistant's, is empty"):
        encoded([USER, ANSWER, USER, {"role": "assistant", "content": content}])


def test_a_tool_call_that_the_template_leaves_out_is_refused():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "w9"}}]}
    with pytest.raises(TrainError, match="message 2 of 2, the assistant's, is left out by the chat template"):
        encoded([USER, call])
    writes = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }} {% for c in m.tool_calls or [] %}"
        "{{ c.function.name }} {% endfor %}<|im_end|> {% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    tokens, flags = encoded([USER, call], template=writes)
    assert tokens[flags].tolist() == [9, END]


def test_an_answer_to_nothing_is_refused():
    with pytest.raises(TrainError, match="message 1 of 3 is the assistant's, and nothing stands before it"):
        encoded([ANSWER, USER, ANSWER])


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(TrainError, match="not valid Unicode"):
        encoded([{"role": "user", "content": "w1 \ud83d"}, ANSWER])


def test_template_options_reach_the_template():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {{ extra }} {% endif %}"
    )
    with pytest.raises(TrainError, match="rewrites earlier text"):
        encoded([USER, ANSWER], template=template, extra="w8")


def run(records, template=None, row_length=0, **data):
    summary = Summary()
    made = tokenizer() if template is None else tokenizer(template)
    recipe = DataRecipe(**{"on_error": "skip", **data})
    return list(encode_records(records, ConversationEncoder(made), summary, recipe, row_length)), summary


def test_a_few_bad_records_are_skipped_and_counted_on_request():
    empty = {"id": "y", "messages": [USER, {"role": "assistant", "content": ""}]}
    records = [*conversations(60), {"id": "x", "messages": [USER]}, empty]
    documents, summary = run(records)
    assert len(documents) == 60 == summary.documents
    assert summary.skipped == collections.Counter(
        {"without a supervised token": 1, "with an empty assistant turn": 1}
    )
    assert "skipped 2 (1 without a supervised token, 1 with an empty assistant turn)" in summary.line()
    assert summary.notes()[0].startswith("first of 1 without a supervised token: record x: ")
    assert summary.supervised == sum(int(d.flags.sum()) for d in documents)


def test_the_first_bad_record_stops_unless_told_otherwise():
    records = [*conversations(2), Record({"id": "x", "messages": [USER]}, "a.jsonl line 3")]
    message = (
        r"record x \(a.jsonl line 3\): no token of it carries loss; correct it, or set data.on_error: skip"
    )
    with pytest.raises(TrainError, match=message):
        run(records, on_error="stop")
    assert DataRecipe().on_error == "stop"


def long_and_short():
    """Documents of 11, 13 and 31 tokens; in the last one no answer begins before token 27."""
    late = [{"role": "user", "content": " ".join(["w1"] * 22)}, {"role": "assistant", "content": "w2 w3 w4"}]
    middle = [USER, {"role": "assistant", "content": "w3 w4 w5 w6 w7"}]
    return [{"id": i, "messages": m} for i, m in (("a", [USER, ANSWER]), ("b", middle), ("c", late))]


@pytest.mark.parametrize(
    ("too_long", "lengths", "said"),
    [
        ("split", [11, 13, 31], "; longer than 11 tokens: 2 split"),
        ("cut", [11, 11], "; longer than 11 tokens: 1 cut, 1 cut away, no answer begins in time"),
        ("skip", [11], "; longer than 11 tokens: 2 skipped"),
    ],
)
def test_conversations_longer_than_a_row(too_long, lengths, said):
    documents, summary = run(long_and_short(), row_length=11, too_long=too_long)
    assert [len(d.tokens) for d in documents] == lengths
    assert summary.line().endswith(said) and not summary.skipped
    whole, _ = run(long_and_short())
    for document, before in zip(documents, whole):
        assert document.tokens.tolist() == before.tokens[: len(document.tokens)].tolist()
        assert document.flags.tolist() == before.flags[: len(document.flags)].tolist()
    assert summary.tokens == sum(lengths)
    assert summary.supervised == sum(int(d.flags.sum()) for d in documents)


def test_a_conversation_longer_than_a_row_may_stop():
    with pytest.raises(TrainError, match=r"record b has 13 tokens, more than features.row_length 11; raise"):
        run(long_and_short(), row_length=11, too_long="stop")
    assert len(run(long_and_short(), row_length=32, too_long="stop")[0]) == 3


def test_many_records_without_answers_stop_the_run():
    with pytest.raises(TrainError, match="1 of 10 records cannot be used with the chat template"):
        run([*conversations(9), {"id": "x", "messages": [USER]}])
    run([*conversations(9), {"id": "x", "messages": [USER]}], max_skipped=0.1)


def test_a_template_without_assistant_turns_stops_the_run():
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }} {% endfor %}"
    with pytest.raises(TrainError, match="3 of 3 records .*: 3 left out by the template"):
        run(conversations(3), template)


def test_the_first_refusal_of_the_template_is_quoted():
    with pytest.raises(TrainError, match="no roles here"):
        run(conversations(3), "{{ raise_exception('no roles here') }}")


def test_prompts_alone_point_to_regenerate():
    with pytest.raises(TrainError, match="record p1: no messages; write the answers first.*regenerate"):
        run([{"id": "p1", "prompt": "hello"}], on_error="stop")


def test_held_out_documents_depend_on_the_id_alone():
    held = [is_heldout(f"id-{i}", 0.1) for i in range(4000)]
    assert 0.07 < np.mean(held) < 0.13
    assert not any(is_heldout(f"id-{i}", 0.0) for i in range(50))
