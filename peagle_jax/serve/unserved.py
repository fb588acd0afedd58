"""Fields that clients know from OpenAI or vLLM and that this server does not honour.

One is refused by name unless its value asks for nothing, so that nobody gets an answer that silently
ignored what was asked. Fields that nobody knows are ignored, as vLLM does.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import PydanticCustomError

Neutral = dict[str, tuple[Any, ...]]
"""A field's values that ask for nothing; null always does."""

GENERATION: Neutral = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "bad_words": ([],),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "logprob_token_ids": ([],),
    "thinking_token_budget": (-1,),
    "repetition_detection": (),
    "return_token_offsets": (False,),
    "prompt_embeds": (),
    "guided_whitespace_pattern": (),
    "return_hidden_states": (False,),
    "cache_salt": (),  # who sends it wants no cache shared with others: --no-enable-prefix-caching
    "logits_processors": ([],),
}
CHAT: Neutral = GENERATION | {
    "store": (False,),
    "prediction": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "best_of": (1,),
    "suffix": ("",),
}
COMPLETION: Neutral = GENERATION | {"suffix": ("",)}


def refuse_unserved(data: Any, neutral: Neutral) -> Any:
    """Passes a body on, or refuses the first field of it that asks for what is not served."""
    if isinstance(data, dict):
        for name, value in data.items():
            if name not in neutral or value is None or any(_equal(value, n) for n in neutral[name]):
                continue
            allowed = " or ".join(["leave it out", *(f"send {json.dumps(n)}" for n in neutral[name])])
            raise PydanticCustomError(
                "unsupported_parameter",
                "{name} is not supported here; {allowed}",
                {"name": name, "allowed": allowed},
            )
    return data


def _equal(value: Any, neutral: Any) -> bool:
    """Equality that keeps booleans and numbers apart (in Python, 0 == False)."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
