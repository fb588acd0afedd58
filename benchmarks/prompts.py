"""Evaluation prompts for every benchmark, ours and a peer's, so that all decode the same text.

Standard library only: peers run in environments of their own.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import NamedTuple


class Prompt(NamedTuple):
    """One user message and the name that its source gives it."""

    name: str
    text: str


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The first ``limit`` prompts of a JSONL file, which may be compressed (.gz).

    A line in MT-Bench's schema has ``turns`` (the first is taken), one in HumanEval's ``prompt``.

    Raises:
        ValueError: a line has neither, or the file has no line.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(prompts) >= limit:
                break
            if not line.strip():
                continue
            record = json.loads(line)
            text = record["turns"][0] if record.get("turns") else record.get("prompt")
            if not isinstance(text, str):
                raise ValueError(
                    f"{path} line {number} has keys {sorted(record)}; "
                    "expected 'turns' (MT-Bench) or 'prompt' (HumanEval)"
                )
            name = record.get("question_id", record.get("task_id", record.get("id", number)))
            prompts.append(Prompt(str(name), text))
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts
