"""Real vocabularies with what their published configs say; absent ones skip the tests that need them."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from peagle_jax.checkpoint.huggingface import load_tokenizer
from peagle_jax.serve.chat_parser import detect_parsers
from peagle_jax.serve.detokenize import Answer
from peagle_jax.serve.parsing import ChatDelta, ChatParser
from peagle_jax.serve.serving import ServedModel

FOLDER = Path(__file__).parents[2] / ".vocabularies"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """``rows`` and ``eos_token_ids`` are those of config.json and generation_config.json."""

    name: str
    rows: int
    eos_token_ids: tuple[int, ...]
    folder: str
    template: str | None = None  # instead of the folder's own

    @functools.cached_property
    def tokenizer(self) -> Any:
        tokenizer = loaded(self.folder)
        if self.template is None:
            return tokenizer
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = there(FOLDER / "templates" / self.template).read_text()
        return tokenizer

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    @functools.cached_property
    def served(self) -> ServedModel:
        """The model as the server's endpoints see it, with the parsers that its template shows."""
        tokenizer = self.tokenizer
        tool, reasoning = detect_parsers(tokenizer.chat_template)
        return ServedModel(
            names=[self.name],
            tokenizer=tokenizer,
            max_model_len=4096,
            vocab_size=self.rows,
            eos_token_ids=self.eos_token_ids,
            tool_parser=tool,
            reasoning_parser=reasoning,
        )


QWEN = (151936, (151645, 151643))
LLAMA = (128256, (128001, 128008, 128009))
ALL = {
    found.name: found
    for found in (
        Vocabulary("qwen3", *QWEN, "qwen3"),
        Vocabulary("qwen3-instruct-2507", *QWEN, "qwen3", "qwen3-instruct-2507.jinja"),
        Vocabulary("qwen3-coder", *QWEN, "qwen3", "qwen3-coder.jinja"),
        Vocabulary("llama3", 128256, (128001, 128009), "llama3"),
        Vocabulary("llama3.1", *LLAMA, "llama3.1"),
        Vocabulary("llama3.1-tools", *LLAMA, "llama3.1", "llama3.1-tools.jinja"),
        Vocabulary("gpt-oss", 201088, (200002, 199999, 200012), "gpt-oss"),
    )
}
ONE_EACH = ("qwen3", "llama3", "llama3.1", "gpt-oss")


def there(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"{path} is not there; `make vocabularies` fetches it")
    return path


@functools.cache
def loaded(name: str) -> Any:
    there(FOLDER / name / "tokenizer.json")
    return load_tokenizer(FOLDER / name)


@pytest.fixture(scope="session", params=ONE_EACH)
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    """Every vocabulary once."""
    found = ALL[request.param]
    loaded(found.folder)
    return found


def streamed(tokenizer: Any, ids: Iterable[int], parser: ChatParser, *, special: bool) -> ChatDelta:
    """What a client gets when an answer's tokens come one by one; ``special`` keeps special tokens."""
    answer = Answer(tokenizer, skip_special_tokens=not special)
    delta = ChatDelta()
    for token in ids:
        delta += parser.feed(answer.add([token]).text)
    return delta + parser.feed(answer.add([], "length").text) + parser.finish()
