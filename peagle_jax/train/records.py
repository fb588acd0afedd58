"""Records of conversations from files and from the Hugging Face hub, brought to one form."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from peagle_jax.train.recipe import TrainError

HUB = "hf://"

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"} | {
    role: role for role in ("user", "assistant", "system", "tool")
}


ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Of messages, in the chat templates of the families that there are."""

UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def file_names(files: Sequence[str]) -> list[str]:
    """Names of data files without this machine's folders."""
    return [name if name.startswith(HUB) else Path(name).name for name in files]


class RecordError(TrainError):
    """One record that cannot be used; ``reason`` is what a summary counts it under."""

    def __init__(self, reason: str, message: str):
        printable = message.encode("utf-8", "backslashreplace").decode()
        super().__init__(" ".join(printable.splitlines()))
        self.reason = reason


class Record(dict[str, Any]):
    """A record's fields, and where it was read."""

    def __init__(self, fields: dict[str, Any], where: str):
        super().__init__(fields)
        self.where = where


def stop(error: RecordError) -> NoReturn:
    """What is done about a bad record unless told otherwise."""
    raise error


def read_records(
    sources: Iterable[str | Path], limit: int = 0, bad: Callable[[RecordError], None] = stop
) -> Iterator[Record]:
    """Records of JSON-lines files (.gz too) and of ``hf://owner/name[:config][/split]``, in order; at most
    ``limit`` of them unless 0. Every record with a conversation has it in ``messages``, checked.

    ``bad`` is told of every line that is no such record. Raises TrainError: a source cannot be read.
    """
    seen = 0
    for source in sources:
        on_hub = str(source).startswith(HUB)
        for record in _hub_rows(str(source)) if on_hub else _file_rows(Path(source), bad):
            if limit and seen >= limit:
                return
            try:
                made = with_messages(record)
            except RecordError as error:
                bad(error)
                continue
            seen += 1
            yield made


def check_sources(sources: Iterable[str | Path]) -> None:
    """Raises TrainError for a data file that is not there, or is none: before minutes of other work."""
    for source in sources:
        if not str(source).startswith(HUB):
            _check_file(Path(source))


def _check_file(path: Path) -> None:
    if path.is_file():
        return
    if not path.exists():
        raise TrainError(f"data file {path} does not exist")
    found = "a folder; name the files in it" if path.is_dir() else "no regular file; copy it to one"
    raise TrainError(f"data file {path} is {found}")


def _file_rows(path: Path, bad: Callable[[RecordError], None]) -> Iterator[Record]:
    _check_file(path)
    opener = gzip.open if path.name.endswith(".gz") else open
    number = 0
    try:
        with opener(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if number == 1 and line.startswith(UTF16):
                    raise TrainError(f"{path} is UTF-16; expected UTF-8, so write it again in that")
                if not line.strip():
                    continue
                where = f"{path} line {number}"
                try:
                    fields = json.loads(line)
                except (ValueError, RecursionError) as error:
                    cut = "" if line.endswith(b"\n") else " (the last line: the file may be cut short)"
                    reason = getattr(error, "msg", None) or " ".join(str(error).split())
                    bad(RecordError("not JSON", f"{where} is not JSON: {reason}{cut}"))
                    continue
                if not isinstance(fields, dict):
                    kind = type(fields).__name__
                    bad(RecordError("not an object", f"{where} holds {kind}, expected an object"))
                    continue
                yield Record(fields, where)
    except (OSError, EOFError, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise TrainError(f"{path} cannot be read past line {number}: {reason}; get the file again") from error


def _hub_rows(source: str) -> Iterator[Record]:
    """Rows of a data set of the hub, streamed. Nothing is guessed: one of several splits must be named."""
    match = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?::([^/:]+))?(?:/([^/:]+))?", source)
    if match is None:
        raise TrainError(f"{source} is not understood; expected hf://owner/name[:config][/split]")
    name, config, split = match.groups()
    if Path(name).is_dir():  # the package would read the folder and never ask the hub
        raise TrainError(f"{source}: a local folder is named {name} too; name its files, or work elsewhere")
    try:
        import datasets
    except ImportError:
        raise TrainError(f"{source} needs the package datasets: pip install 'peagle_jax[data]'") from None
    try:
        splits: Any = datasets.load_dataset(name, config, streaming=True)
    except Exception as error:  # no network, no access, no such name: the package raises what it likes
        raise TrainError(f"{source} cannot be opened: {' '.join(str(error).split())[:300]}") from error
    if split is None and len(splits) == 1:
        split = next(iter(splits))
    if split not in splits:
        asked = f"no split {split}" if split else "several splits"
        raise TrainError(f"{source} has {asked}; name one of {', '.join(splits)} as {HUB}{name}/<split>")
    number = 0
    try:
        for number, row in enumerate(splits[split], 1):
            yield Record(row, f"{source} row {number}")
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise TrainError(f"{source} cannot be read past row {number}: {reason}; run it again") from error


def record_id(record: dict[str, Any]) -> str:
    """The record's id, or a hash of its content where it has none."""
    if record.get("id") is not None:
        return str(record["id"])
    content = json.dumps(record.get("messages", record.get("prompt")), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def name_of(record: dict[str, Any]) -> str:
    """The record in messages to people: its id, and where it stands."""
    where = getattr(record, "where", "")
    return f"record {record_id(record)}" + (f" ({where})" if where else "")


def check_unicode(record: dict[str, Any], keys: Iterable[str]) -> None:
    """Raises RecordError: a text under ``keys`` holds half of a surrogate pair, as JSON can write it, and
    no tokenizer or file takes that."""
    for key in keys:
        try:
            json.dumps({key: record.get(key)}, ensure_ascii=False, default=str).encode()
        except RecursionError:
            where = getattr(record, "where", "a record")
            raise RecordError("nested too deeply", f"{where}: its {key} is nested too deeply") from None
        except UnicodeEncodeError:
            message = f"{name_of(record)}: its {key} is not valid Unicode: half of a surrogate pair is in it"
            raise RecordError("not valid Unicode", message) from None


def with_messages(record: Record) -> Record:
    """The record with its conversation in ``messages``: texts, with the keys that hold nothing removed.

    ``conversations`` is read as ShareGPT writes it (``from`` and ``value``) or as messages. A record
    with a ``prompt`` alone, or with neither, is returned as it is.

    Raises RecordError: a message has no role or content, or its content is not text or not Unicode.
    """
    check_unicode(record, ("id", "prompt", "messages", "conversations"))
    key = next((k for k in ("messages", "conversations") if record.get(k) is not None), None)
    if key is None:
        return record
    turns = record[key]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise RecordError("with malformed messages", f"{name_of(record)}: {key} is not a list of objects")
    messages = []
    for number, turn in enumerate(turns, 1):
        try:
            messages.append(_message(turn))
        except RecordError as error:
            raise RecordError(error.reason, f"{name_of(record)}: message {number} {error}") from None
    fields = {k: v for k, v in record.items() if k != "conversations"}
    return Record({**fields, "messages": messages}, record.where)


def _message(turn: dict[str, Any]) -> dict[str, Any]:
    if "from" in turn and "role" not in turn:
        role = SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
        if role is None:
            expected = ", ".join(SHAREGPT_ROLES)
            message = f"is from {turn['from']!r}, expected one of {expected}"
            raise RecordError("from an unknown speaker", message)
        turn = {"role": role, "content": turn.get("value")}
    if not isinstance(turn.get("role"), str):
        raise RecordError("with malformed messages", f"has the role {turn.get('role')!r}, expected a text")
    if turn["role"] not in ROLES:
        message = f"has the role {turn['role'][:40]!r}, expected one of {', '.join(ROLES)}"
        raise RecordError("with an unknown role", message)
    kept = {k: v for k, v in turn.items() if v is not None}  # data sets fill absent fields with None
    content = kept.get("content", "")
    if isinstance(content, list) and all(
        isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content
    ):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RecordError("with content that is not text", "has content that is not text")
    if "content" not in kept and kept["role"] != "assistant":
        raise RecordError("with malformed messages", "has no content")
    return {**kept, "content": content}
