"""The prompts of a benchmark: published sets in their own schemas, from the hub or from a file.

mt_bench      question_id, category, turns                 philschmid/mt-bench, or FastChat's question.jsonl
humaneval     task_id, prompt                              openai/openai_humaneval, or HumanEval.jsonl.gz
gsm8k         question, answer                             openai/gsm8k
spec_bench    question_id, category, turns                 its repository's question.jsonl
speed_bench   question_id, category, turns (or messages)   nvidia/SPEED-Bench
sharegpt      id, conversations of from and value          ShareGPT_V3_unfiltered_cleaned_split.json
file          any of these, or messages, a record a line
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from peagle_jax.arguments import CommandError

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""What SPEED-Bench publishes in place of turns whose licence keeps them elsewhere."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A user's messages, one after the other, and the name and category that their source gives them."""

    name: str
    category: str
    turns: tuple[str, ...]
    system: str = ""

    @property
    def opening(self) -> list[dict[str, str]]:
        """The messages of the first request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.turns[0]}]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a set is published, as ``datasets.load_dataset`` takes it, and of which keys a record has one."""

    keys: tuple[str, ...]
    path: str | None = None
    config: str | None = None
    split: str = "test"
    files: str | None = None


SOURCES: dict[str, Source] = {
    "mt_bench": Source(("turns",), "philschmid/mt-bench", split="train"),
    "humaneval": Source(("prompt",), "openai/openai_humaneval"),
    "gsm8k": Source(("question",), "openai/gsm8k", "main"),
    "spec_bench": Source(
        ("turns",),
        "json",
        split="train",
        files="https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
    ),
    "speed_bench": Source(("turns", "messages"), "nvidia/SPEED-Bench", "qualitative"),
    "sharegpt": Source(
        ("conversations",),
        "anon8231489123/ShareGPT_Vicuna_unfiltered",
        split="train",
        files="ShareGPT_V3_unfiltered_cleaned_split.json",
    ),
    "file": Source(("turns", "messages", "conversations", "prompt", "question")),
}
USERS = ("human", "user")


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """A set's conversations, and how many records were left out because they have no prompt."""

    name: str
    source: str
    conversations: tuple[Conversation, ...]
    left_out: int = 0

    def described(self) -> dict[str, Any]:
        """For a result."""
        found = {"name": self.name, "source": self.source, "prompts": len(self.conversations)}
        return found | ({"left_out": self.left_out} if self.left_out else {})


def load(name: str, path: str | None = None, config: str | None = None) -> PromptSet:
    """A set by its name: the published one, or ``path``, a local file or a hub id in the same schema.

    Args:
        config: of the hub's set, where it has several (SPEED-Bench's throughput_1k, say).

    Raises:
        CommandError: no such file or set, it cannot be had, or its records are not in the schema.
    """
    source = SOURCES[name]
    path = None if path is None else str(path)
    if path is not None and Path(path).is_file():
        return _set_of(name, Path(path).name, _records_of(Path(path)))
    if path is not None and (path.count("/") != 1 or path.startswith((".", "/", "~"))):
        raise CommandError(f"{path} is no file; name one, or a set of the Hugging Face hub (owner/name)")
    if path is None and source.path is None:
        raise CommandError(f"--dataset {name} needs --dataset-path, the file to read")
    chosen = source if path is None else dataclasses.replace(source, path=path, files=None)
    chosen = dataclasses.replace(chosen, config=config or chosen.config)
    where = chosen.files if chosen.path == "json" else chosen.path
    return _set_of(name, str(where), _published(name, chosen))


def read_prompts(path: str | Path) -> list[Conversation]:
    """The conversations of a file in any of the schemas. Raises CommandError as ``load`` does."""
    return list(load("file", str(path)).conversations)


def spread(conversations: Sequence[Conversation], count: int | None) -> list[Conversation]:
    """At most ``count`` of them, evenly spread: sets are sorted by category."""
    size = len(conversations)
    if count is None or count >= size:
        return list(conversations)
    return [conversations[i * size // count] for i in range(count)]


def _set_of(name: str, source: str, records: Iterable[Any]) -> PromptSet:
    found, left_out = [], 0
    for number, record in enumerate(records, 1):
        conversation = _conversation(name, source, number, record)
        if conversation is None:
            left_out += 1
        else:
            found.append(conversation)
    if not found:
        why = "holds no prompts"
        if left_out:
            why += (
                f": all {left_out} records are empty, begin with an answer, or are placeholders to be "
                "fetched elsewhere"
            )
        raise CommandError(f"{source} {why}; name another file")
    return PromptSet(name, source, tuple(found), left_out)


def _conversation(name: str, source: str, number: int, record: Any) -> Conversation | None:
    """One record's; None if it has no prompt that could be sent."""
    keys = SOURCES[name].keys
    at = f"{source}, record {number}"
    if not isinstance(record, dict):
        raise CommandError(f"{at} is {str(record)[:40]!r}; expected an object with {' or '.join(keys)}")
    there = [key for key in keys if key in record]
    if not there:
        raise CommandError(
            f"{at} has the keys {', '.join(map(str, record))[:120]}; {name} has {' or '.join(keys)}"
        )
    value = next((record[key] for key in there if record[key]), ())
    system, turns = _turns(value, at)
    if not turns or any(PLACEHOLDER in turn for turn in turns):
        return None
    names = ("question_id", "task_id", "id", "prompt_id")
    label = next((record[n] for n in names if record.get(n) is not None), number)
    return Conversation(str(label), str(record.get("category") or name), turns, system)


def _turns(value: Any, at: str) -> tuple[str, tuple[str, ...]]:
    """The system's message and the user's, of a text, a list of texts or a list of messages."""
    if isinstance(value, str):
        return "", (value,)
    if isinstance(value, Sequence) and all(isinstance(turn, str) for turn in value):
        return "", tuple(value)
    if not isinstance(value, Sequence) or not all(isinstance(turn, dict) for turn in value):
        raise CommandError(f"{at} has turns of {type(value).__name__}; expected texts or messages")
    messages = [(str(m.get("role", m.get("from"))), m.get("content", m.get("value"))) for m in value]
    if any(not isinstance(content, str) for _, content in messages):
        raise CommandError(f"{at} has a message without a text; expected role and content, or from and value")
    system = messages.pop(0)[1] if messages and messages[0][0] == "system" else ""
    if not messages or messages[0][0] not in USERS:
        return system, ()
    return system, tuple(content for role, content in messages if role in USERS)


def _records_of(path: Path) -> Iterable[Any]:
    """A file's records: JSON lines or one JSON list, perhaps compressed (.gz), or Parquet."""
    if path.suffix == ".parquet":
        return _hub().load_dataset("parquet", data_files=str(path), split="train")
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            text = file.read()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise CommandError(f"{path.name} cannot be read ({error}); name another file") from error
    try:
        whole = json.loads(text) if text.lstrip().startswith("[") else None
        if whole is not None:
            return whole
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise CommandError(f"{path.name} is neither JSON lines nor a JSON list ({error})") from error


def _hub() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise CommandError(
            "sets of the hub are read by the package datasets: pip install 'peagle_jax[bench]', or give "
            "--dataset-path a JSON file"
        ) from error
    datasets.disable_progress_bars()
    return datasets


def _published(name: str, source: Source) -> Iterable[Any]:
    """Raises CommandError if the set cannot be had; what goes wrong on the way has many types."""
    hub = _hub()
    try:
        return hub.load_dataset(source.path, source.config, split=source.split, data_files=source.files)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise CommandError(
            f"{name} could not be had from {source.files or source.path} ({reason[:160]}); "
            f"download it and give its file to --dataset-path"
        ) from error
