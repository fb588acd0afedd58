"""The `regenerate` command: the target answers prompts, so that training text is its own."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console

from peagle_jax import commands
from peagle_jax.checkpoint.model import LoadedTarget, load_target
from peagle_jax.speculative.decoder import Decoder, Request
from peagle_jax.speculative.placement import Placement
from peagle_jax.speculative.sampling import HIGHEST_TEMPERATURE, SamplingParams
from peagle_jax.train.places import check_path, check_writable
from peagle_jax.train.progress import progress_bar
from peagle_jax.train.ranges import AT_ONCE, COUNT, COUNT_OR_NONE, SEED, check_number
from peagle_jax.train.recipe import TrainError
from peagle_jax.train.records import RecordError, check_unicode, name_of, read_records, record_id
from peagle_jax.train.tokens import ConversationEncoder

CONTEXT = 1024
RANGES = {
    "tensor_parallel_size": AT_ONCE,
    "batch": AT_ONCE,
    "max_tokens": COUNT,
    "max_model_len": "[2, 2147483647]",
    "temperatures": f"[0, {HIGHEST_TEMPERATURE:g}]",
    "seed": SEED,
    "limit": COUNT_OR_NONE,
}


@dataclasses.dataclass(frozen=True)
class Options:
    """How answers are written. A record's temperature is one of ``temperatures``, by its place.
    ``max_model_len`` None is 1024, or the target's positions where those are fewer."""

    prompts: tuple[str, ...]
    out: str
    model: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    dtype: str = "bfloat16"
    tensor_parallel_size: int = 1
    batch: int = 8
    max_tokens: int = 320
    max_model_len: int | None = None
    temperatures: tuple[float, ...] = (0.0, 0.7)
    seed: int = 0
    limit: int = 0
    template: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass
class Conversation:
    """A record on its way: ``turns`` are the messages that are not the assistant's."""

    record: dict[str, Any]
    number: int
    turns: list[dict[str, str]]
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)
    finish: str = "stop"

    def advance(self) -> bool:
        """Moves the next messages up to a user's over; False when none is left."""
        while self.turns:
            message = self.turns.pop(0)
            self.messages.append(message)
            if message["role"] == "user":
                return True
        return False

    def close(self) -> None:
        """Ends the conversation before a question that does not fit the context or has no answer."""
        self.turns.clear()
        while self.messages and self.messages[-1]["role"] != "assistant":
            self.messages.pop()


def start_conversation(record: dict[str, Any], number: int) -> Conversation:
    """From a record's ``messages`` (answers in it are dropped) or ``prompt``.

    Raises TrainError: it has neither, or no user message, or text that cannot be written again.
    """
    check_unicode(record, record)
    if isinstance(record.get("messages"), list):
        turns = [m for m in record["messages"] if m.get("role") != "assistant"]
    elif isinstance(record.get("prompt"), str):
        turns = [{"role": "user", "content": record["prompt"]}]
    else:
        raise TrainError(f"{name_of(record)} has neither a prompt nor messages; give it one of them")
    if not any(m.get("role") == "user" for m in turns):
        raise TrainError(f"{name_of(record)} has no user message to answer; add one or leave it out")
    return Conversation(record, number, turns)


def finished_ids(path: Path, target: str, temperatures: Sequence[float]) -> set[str]:
    """Ids that an earlier run wrote; a last line that it could not finish is cut off, but only after
    every line before it has shown that the file is ours.

    Raises TrainError: the file is another target's or was written at other temperatures, or is not
    readable; it is then as it was.
    """
    if not path.exists():
        return set()
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if content and not whole:
        raise TrainError(f"{path} holds no whole line of answers; choose another --out, or delete it")
    lines = sum(bool(line.strip()) for line in content[:whole].splitlines())
    ids = set()
    for record in itertools.islice(read_records([path]), lines):
        if record.get("target") != target:
            raise TrainError(
                f"{path} holds answers of {record.get('target')}, not of {target}; choose another --out"
            )
        if record.get("temperature") not in temperatures:
            raise TrainError(
                f"{path} holds answers at temperature {record.get('temperature')}, which is none of "
                f"--temperatures; go on with those that it was begun with, or choose another --out"
            )
        ids.add(record_id(record))
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
    return ids


def make_decoder(options: Options, model: LoadedTarget, placement: Placement | None = None) -> Decoder:
    most = model.config.max_position
    room = min(CONTEXT, most) if options.max_model_len is None else options.max_model_len
    if room > most:
        raise TrainError(
            f"--max-model-len is {room}, but {model.name} has {most} positions; give {most} at most"
        )
    return Decoder(model.config, model.params, max_model_len=room, batch=options.batch, placement=placement)


def answer(
    group: Sequence[Conversation], decoder: Decoder, encoder: ConversationEncoder, options: Options
) -> tuple[list[Conversation], int]:
    """Lets the target write every answer of a group of conversations, turn by turn.

    Returns the conversations that have an answer, and the number of tokens written.
    """
    written = 0
    while True:
        open_ = [c for c in group if c.finish == "stop" and c.advance()]
        requests, fitting = [], []
        for c in open_:
            try:
                prompt = encoder.prompt_ids(c.messages)
            except RecordError as error:
                raise RecordError(error.reason, f"{name_of(c.record)}: {error}; correct it") from error
            if len(prompt) + 1 >= decoder.max_model_len:
                c.close()
                continue
            sampling = SamplingParams(
                temperature=temperature_of(c.number, options), seed=(options.seed + c.number) % 2**31
            )
            requests.append(Request(prompt, sampling, options.max_tokens, encoder.stop_ids))
            fitting.append(c)
        if not requests:
            return [c for c in group if any(m["role"] == "assistant" for m in c.messages)], written
        tokens: list[list[int]] = [[] for _ in requests]
        for results in decoder.run(requests):
            for i, result in enumerate(results):
                if result is not None:
                    tokens[i] += result.tokens
                    fitting[i].finish = result.finish_reason or fitting[i].finish
        for c, ids in zip(fitting, tokens, strict=True):
            written += len(ids)
            if ids and ids[-1] in encoder.stop_ids:
                ids = ids[:-1]
            message = encoder.message(c.messages, ids)
            if message is None:
                c.close()
            else:
                c.messages.append(message)


def temperature_of(number: int, options: Options) -> float:
    return options.temperatures[number % len(options.temperatures)]


def result_record(c: Conversation, options: Options, target: str) -> dict[str, Any]:
    """The line that is written: the record's own facts, its settings and the conversation."""
    facts = {k: v for k, v in c.record.items() if k not in ("prompt", "messages", "finish", "temperature")}
    facts["id"] = record_id(c.record)
    return {
        **facts,
        "target": target,
        "temperature": temperature_of(c.number, options),
        "finish": c.finish,
        "messages": c.messages,
    }


def groups_by_length(conversations: Iterable[Conversation], size: int) -> list[list[Conversation]]:
    """Groups of about equally long prompts, in a fixed random order."""
    ordered = sorted(conversations, key=lambda c: (len(json.dumps(c.turns)), c.number))
    groups = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    order = np.random.default_rng(0).permutation(len(groups))
    return [groups[i] for i in order]


def check(options: Options) -> None:
    """Raises TrainError for options that make no sense."""
    for name, interval in RANGES.items():
        found = getattr(options, name)
        for value in found if isinstance(found, tuple) else (found,):
            if value is not None:
                check_number(f"--{name.replace('_', '-')}", value, interval)
    if not options.temperatures:
        raise TrainError("--temperatures is empty, expected a number at least")
    places = [("--prompts", path) for path in options.prompts]
    places += [("--out", options.out), ("--model", options.model), ("--tokenizer", options.tokenizer)]
    for flag, path in places:
        if path is not None:
            check_path(flag, path)
    if not options.out.endswith(".jsonl"):
        raise TrainError(f"--out is a .jsonl file, so that a stopped run can go on; found {options.out}")
    check_writable("--out", Path(options.out), "a file")


def regenerate(options: Options, console: Console, model: LoadedTarget | None = None) -> int:
    """Writes the answers that are still missing; returns how many records were added.

    Every group is on disk before the next one starts. Raises TrainError or CheckpointError.
    """
    check(options)
    records = enumerate(read_records(options.prompts, options.limit))
    # An id is answered once: a run that goes on could not tell a second record of it from the first.
    unique: dict[str, Conversation] = {}
    count = 0
    for number, record in records:
        conversation = start_conversation(record, number)
        first = unique.setdefault(record_id(conversation.record), conversation)
        if first.turns != conversation.turns:
            raise TrainError(
                f"{name_of(record)} has the id of another record with other text; give each an id of its own"
            )
        count += 1
    conversations = list(unique.values())
    if count > len(unique):
        console.print(f"{count - len(unique)} records repeat one before them; left out")
    placement = commands.placement(1, options.tensor_parallel_size)
    if model is None:
        commands.check_revision(options.model, options.revision)
        model = load_target(
            options.model,
            dtype=jnp.dtype(options.dtype),
            revision=options.revision,
            tokenizer=options.tokenizer,
            mesh=placement.mesh,
        )
    out = Path(options.out)
    done = finished_ids(out, model.name, options.temperatures)
    waiting = [c for c in conversations if record_id(c.record) not in done]
    console.print(f"{model.name}: {len(waiting)} records to answer, {len(done)} are in {out} already")
    if not waiting:
        return 0
    encoder = ConversationEncoder(model.tokenizer, model.config.eos_token_ids, dict(options.template))
    decoder = make_decoder(options, model, placement)
    console.print("compiling; the first answers come after that")
    out.parent.mkdir(parents=True, exist_ok=True)
    added = tokens = 0
    with out.open("a", encoding="utf-8") as file, progress_bar(console, "records") as bar:
        task = bar.add_task("regenerate", total=len(waiting), note="")
        for group in groups_by_length(waiting, options.batch):
            kept, written = answer(group, decoder, encoder, options)
            for c in kept:
                line = result_record(c, options, model.name)
                file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")  # dates of a data set
            file.flush()
            os.fsync(file.fileno())
            added += len(kept)
            tokens += written
            elapsed = bar.tasks[task].elapsed or 1.0
            bar.update(task, advance=len(group), note=f"{tokens / elapsed:,.0f} tokens/s")
    console.print(
        f"{added} records, {tokens} answer tokens; {len(waiting) - added} prompts got no answer: "
        "no room was left, or the target wrote none that its template can write again"
    )
    return added
