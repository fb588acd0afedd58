"""The tokenizer built from a GGUF file's metadata."""

from __future__ import annotations

import dataclasses

import pytest

from peagle_jax.checkpoint.embedded import embedded_path
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.gguf import GGUFFile
from peagle_jax.checkpoint.gguf_tokenizer import build_tokenizer
from tests.checkpoint.files import BYTE_TOKENS, MISSING, GGUFOptions, write_gguf
from tests.checkpoint.test_gguf import CONFIG
from tests.tiny import target_params

MERGES = ("1 2", "12 3", "Ġ w", "Ġw e", "h e", "l l", "ll o", "he llo", "' s")
SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>"]
TOKENS = BYTE_TOKENS + [merge.replace(" ", "") for merge in MERGES] + SPECIAL
TYPES = [1] * (len(TOKENS) - 3) + [3, 3, 4]  # two control tokens and one of the user's
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PARAMS = target_params(dataclasses.replace(CONFIG, vocab_size=len(TOKENS)))
TEXTS = [
    "hello we're 123 4567 <|im_end|>\n\n\tdef f(x):\n    return x**2  # ok\r\n",
    "日本語 🤖 émoji \u200b don't I'LL ½ ٣",
    "  leading and trailing  ",
    "<|im_start|>user\nhi<|im_end|>\n",
]


def tokenizer(folder, pre: str = "smollm", **extra):
    cfg = dataclasses.replace(CONFIG, vocab_size=len(TOKENS), eos_token_ids=(TOKENS.index("<|im_end|>"),))
    extra = {f"tokenizer.{key}": value for key, value in extra.items()}
    options = GGUFOptions(extra=extra, tokens=TOKENS, token_types=TYPES, merges=MERGES, pre=pre)
    return build_tokenizer(GGUFFile(write_gguf(folder / "m.gguf", cfg, PARAMS, options)))


def tokens_of(built, text: str) -> list[str]:
    return built.convert_ids_to_tokens(built(text)["input_ids"])


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_decoding_gives_the_text_back(tmp_path, pre, text):
    built = tokenizer(tmp_path, pre, **{"ggml.add_bos_token": False})
    assert built.decode(built(text)["input_ids"]) == text


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "123", ["123"]),
        ("smollm", "123", ["1", "2", "3"]),
        ("smollm", "hello 12", ["hello", "Ġ", "1", "2"]),
        ("qwen2", "123", ["1", "2", "3"]),
        ("llama-bpe", "123", ["123"]),
        ("llama-bpe", "0123", ["0", "12", "3"]),
        ("gpt-2", "hello's", ["hello", "'s"]),
        ("smollm", "hello\n\nhello", ["hello", "Ċ", "Ċ", "hello"]),
    ],
)
def test_the_splitting_rule_is_the_files(tmp_path, pre, text, expected):
    assert tokens_of(tokenizer(tmp_path, pre, **{"ggml.add_bos_token": False}), text) == expected


def test_special_tokens_in_text_are_single_ids_and_may_be_left_out(tmp_path):
    built = tokenizer(tmp_path)
    ids = built("<|im_start|>hello<|im_end|><think>")["input_ids"]
    assert built.convert_ids_to_tokens(ids) == ["<|im_start|>", "hello", "<|im_end|>", "<think>"]
    assert built.decode(ids, skip_special_tokens=True) == "hello<think>"
    assert len(built) == len(TOKENS)


def test_the_chat_template_is_the_files(tmp_path):
    built = tokenizer(tmp_path, chat_template=TEMPLATE)
    messages = [{"role": "user", "content": "hello"}]
    text = built.apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n"
    assert tokens_of(built, text)[-3:] == ["hello", "<|im_end|>", "Ċ"]


@pytest.mark.parametrize(
    ("pre", "add", "first"),
    [
        ("smollm", MISSING, "hello"),
        ("smollm", True, "<|im_start|>"),
        ("llama-bpe", MISSING, "<|im_start|>"),
        ("llama-bpe", False, "hello"),
    ],
)
def test_bos_is_added_when_the_file_says_so_and_by_default_for_llama3(tmp_path, pre, add, first):
    extra = {"ggml.add_bos_token": add, "ggml.bos_token_id": TOKENS.index("<|im_start|>")}
    built = tokenizer(tmp_path, pre, **extra)
    assert tokens_of(built, "hello")[0] == first
    assert built.bos_token == "<|im_start|>"
    assert built.eos_token == "<|im_end|>"
    assert tokens_of(built, "hello")[-1] == "hello"


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
PIECES += ["\u2581", "h", "e", "l", "o", "he", "ll", "llo", "hello", "\u2581hello", "lo"]
PIECE_TYPES = [2, 3, 3] + [6] * 256 + [1] * 11
PIECE_SCORES = [0.0] * 259 + [-20.0] * 5 + [-3.0, -1.0, -4.0, -5.0, -6.0, -2.0]


def sentencepiece(folder, **extra):
    cfg = dataclasses.replace(CONFIG, vocab_size=len(PIECES), eos_token_ids=(2,))
    values = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.bos_token_id": 1} | extra
    options = GGUFOptions(extra=values, tokens=PIECES, token_types=PIECE_TYPES, scores=PIECE_SCORES)
    params = target_params(cfg)
    return build_tokenizer(GGUFFile(write_gguf(folder / "m.gguf", cfg, params, options)))


def test_sentencepiece_merges_in_the_order_of_the_scores(tmp_path):
    built = sentencepiece(tmp_path)
    assert tokens_of(built, "hello") == ["<s>", "\u2581hello"]
    assert tokens_of(built, "hell</s>") == ["<s>", "\u2581", "he", "ll", "</s>"]
    # "ll" has the best score, so it joins before "lo" can.
    assert tokens_of(built, "llo")[1:] == ["\u2581", "llo"]
    assert tokens_of(built, "hé")[1:] == ["\u2581", "h", "<0xC3>", "<0xA9>"]


@pytest.mark.parametrize("text", ["hello hello", "  hé\n日本 🤖", "tab\tand 12"])
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_gives_the_text_back(tmp_path, text, prefix):
    built = sentencepiece(tmp_path, **{"tokenizer.ggml.add_space_prefix": prefix})
    assert built.decode(built(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"ggml.pre": "tekken"}, "tokenizer.ggml.pre 'tekken' is not supported"),
        ({"ggml.model": "rwkv"}, "tokenizer.ggml.model 'rwkv' is not supported"),
    ],
)
def test_another_kind_of_tokenizer_is_one_line(tmp_path, extra, said):
    with pytest.raises(CheckpointError) as caught:
        tokenizer(tmp_path, **extra)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_embedded_models_tokenizer():
    built = build_tokenizer(GGUFFile(embedded_path()))
    messages = [{"role": "user", "content": "Sum 1024"}]
    ids = built(built.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))["input_ids"]
    words = built.convert_ids_to_tokens(ids)
    assert words[:3] == ["<|im_start|>", "system", "Ċ"]
    turn = ["<|im_start|>", "user", "Ċ", "Sum", "Ġ", "1", "0", "2", "4", "<|im_end|>", "Ċ", "<|im_start|>"]
    assert words[-len(turn) - 3 : -3] == turn  # then "assistant" in two pieces, and a newline
    assert (built.bos_token_id, built.eos_token_id, len(built)) == (1, 2, 49152)
    assert all(built.decode(built(text)["input_ids"]) == text for text in TEXTS)
