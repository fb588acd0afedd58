"""The tokenizer that a GGUF file carries, as a transformers tokenizer with its chat template."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.gguf import GGUFFile

_SPACE = "\u2581"  # how SentencePiece writes a space
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


def _byte_level(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """tokenizer.ggml.model "gpt2": BPE over bytes, merges in the file."""
    pre: str = file.require("tokenizer.ggml.pre")
    core = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[_pair(merge) for merge in file.require("tokenizer.ggml.merges")],
            ignore_merges=pre in _LLAMA3_NAMES,
        )
    )
    if pre in _QWEN2_NAMES:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = _pre_tokenizer(pre, file.place)
    core.decoder = decoders.ByteLevel()
    return core


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """tokenizer.ggml.model "llama": pieces with scores, which say the order of the merges."""
    scores: list[float] = file.require("tokenizer.ggml.scores")
    ids = {token: i for i, token in enumerate(tokens)}
    merges = []
    for piece, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(piece)):
            pair = (piece[:cut], piece[cut:])
            if pair[0] in ids and pair[1] in ids:
                merges.append((-score, ids[pair[0]], ids[pair[1]], pair))
    core = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=[pair for *_, pair in sorted(merges)],
            unk_token=tokens[file.get("tokenizer.ggml.unknown_token_id", 0)],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    tail: list[decoders.Decoder] = []
    if file.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        tail = [decoders.Strip(" ", 1, 0)]
    core.normalizer = normalizers.Sequence(steps)
    core.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    return core


def build_tokenizer(file: GGUFFile) -> PreTrainedTokenizerFast:
    """The tokenizer of the file's metadata.

    Raises:
        CheckpointError: it is of another kind than BPE, or splits by an unknown rule.
    """
    model = file.require("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise CheckpointError(
            f"{file.place}: tokenizer.ggml.model {model!r} is not supported (expected 'gpt2' or 'llama'); "
            "name the model's own tokenizer folder instead"
        )
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    types: list[int] = file.get("tokenizer.ggml.token_type", [1] * len(tokens))
    core = (_byte_level if model == "gpt2" else _sentencepiece)(file, tokens)
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
    # llama.cpp's defaults, for files that do not say.
    adds_bos = model == "llama" or file.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    if bos is not None and file.get("tokenizer.ggml.add_bos_token", adds_bos):
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokens.index(bos))],
        )
    named = {"bos_token": bos, "eos_token": token("eos"), "unk_token": token("unknown")}
    named["pad_token"] = token("padding") or named["eos_token"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_max_length=file.integer("{arch}.context_length"),
        clean_up_tokenization_spaces=False,
        **{key: value for key, value in named.items() if value is not None},
    )
    tokenizer.chat_template = file.get("tokenizer.chat_template")
    return tokenizer
