"""The tokenizer that a GGUF file carries, as a transformers tokenizer with its chat template."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.gguf import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"

_GPT2_NAMES = ("gpt-2",)
_DIGIT_NAMES = ("smollm", "starcoder", "refact", "command-r")
_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")
"""Values of tokenizer.ggml.pre with one splitting rule each (llama.cpp's names)."""


def _pre_tokenizer(pre: str, place: str) -> pre_tokenizers.PreTokenizer:
    if pre in _GPT2_NAMES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _DIGIT_NAMES:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pre in _LLAMA3_NAMES + _QWEN2_NAMES:
        pattern = Regex(_LLAMA3 if pre in _LLAMA3_NAMES else _QWEN2)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), byte_level])
    known = ", ".join(_GPT2_NAMES + _DIGIT_NAMES + _LLAMA3_NAMES + _QWEN2_NAMES)
    raise CheckpointError(
        f"{place}: tokenizer.ggml.pre {pre!r} is not supported (expected one of {known}); "
        "name the model's own tokenizer folder instead"
    )


def build_tokenizer(file: GGUFFile) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer from the file's metadata.

    Raises:
        CheckpointError: the file's tokenizer is of another kind, or splits by an unknown rule.
    """
    kind = file.require("tokenizer.ggml.model")
    if kind != "gpt2":
        raise CheckpointError(
            f"{file.place}: tokenizer.ggml.model {kind!r} is not supported (expected 'gpt2', a byte-level "
            "BPE); name the model's own tokenizer folder instead"
        )
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    types: list[int] = file.get("tokenizer.ggml.token_type", [1] * len(tokens))
    pre: str = file.require("tokenizer.ggml.pre")
    llama3 = pre in _LLAMA3_NAMES
    pairs = [tuple(merge.split(" ", 1)) for merge in file.require("tokenizer.ggml.merges")]
    core = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=pairs,
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=llama3,
        )
    )
    if pre in _QWEN2_NAMES:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = _pre_tokenizer(pre, file.place)
    core.decoder = decoders.ByteLevel()
    core.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )

    def token(name: str) -> str | None:
        index = file.get(f"tokenizer.ggml.{name}_token_id")
        return None if index is None else tokens[index]

    bos = token("bos")
    byte_level = processors.ByteLevel(trim_offsets=False)
    if bos is not None and file.get("tokenizer.ggml.add_bos_token", llama3):
        first = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokens.index(bos))],
        )
        core.post_processor = processors.Sequence([byte_level, first])
    else:
        core.post_processor = byte_level
    named = {"bos_token": bos, "eos_token": token("eos"), "unk_token": token("unknown")}
    named["pad_token"] = token("padding") or named["eos_token"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_max_length=file.require("{arch}.context_length"),
        clean_up_tokenization_spaces=False,
        **{key: value for key, value in named.items() if value is not None},
    )
    tokenizer.chat_template = file.get("tokenizer.chat_template")
    return tokenizer
