"""The `features` and `show-mask` commands: conversations -> packed rows -> stored target features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.text import Text

from peagle_jax.checkpoint.model import load_target
from peagle_jax.config import TargetConfig, default_taps
from peagle_jax.train import features
from peagle_jax.train.packing import PackedRows, pack
from peagle_jax.train.places import check_writable
from peagle_jax.train.progress import progress_bar
from peagle_jax.train.ranges import COUNT_OR_NONE, check_number
from peagle_jax.train.recipe import Recipe, TrainError
from peagle_jax.train.records import check_sources, file_names, read_records
from peagle_jax.train.tokens import (
    ConversationEncoder,
    Document,
    Summary,
    encode_records,
    is_heldout,
    on_bad_record,
)


def check_data(recipe: Recipe) -> None:
    """Raises TrainError: the recipe names no data, or a file that is not there."""
    if not recipe.data.files:
        raise TrainError(
            "data.files is empty; name at least one .jsonl or .jsonl.gz file of conversations, or "
            "hf://owner/name"
        )
    check_sources(recipe.data.files)


def load_documents(recipe: Recipe, tokenizer: Any, cfg: TargetConfig) -> tuple[list[Document], Summary]:
    """All usable documents of the recipe's data, of which ``check_data`` approves. Raises TrainError as
    ``encode_records`` does."""
    data = recipe.data
    features.check_row_length(recipe.features.row_length, cfg)
    encoder = ConversationEncoder(tokenizer, cfg.eos_token_ids, data.template)
    summary = Summary()
    records = read_records(data.files, data.limit, on_bad_record(data, summary))
    documents = list(encode_records(records, encoder, summary, data, recipe.features.row_length))
    if not documents:
        raise TrainError(f"{', '.join(data.files)}: no usable record; {summary.line()}")
    largest = max(int(document.tokens.max()) for document in documents)
    if largest >= cfg.vocab_size:
        raise TrainError(
            f"the tokenizer wrote id {largest}, but the target has {cfg.vocab_size} embeddings; name the "
            "tokenizer that belongs to this target"
        )
    return documents, summary


def say(summary: Summary, console: Console) -> None:
    """Prints what became of the records."""
    for line in (summary.line(), *summary.notes()):
        console.print(line, highlight=False, markup=False)


def split_rows(recipe: Recipe, documents: list[Document]) -> dict[str, PackedRows]:
    """Packed rows of the training and of the held-out documents."""
    share, n = recipe.data.heldout, recipe.features.row_length
    held = [d for d in documents if is_heldout(d.id, share)]
    kept = [d for d in documents if not is_heldout(d.id, share)]
    return {"train": pack(kept, n, recipe.seed), "heldout": pack(held, n, recipe.seed)}


def feature_taps(recipe: Recipe, num_layers: int) -> tuple[int, ...]:
    """Taps to store: the recipe's own, else the head's, else vLLM's default."""
    return recipe.features.taps or recipe.head.taps or default_taps(num_layers)


def compute_features(recipe: Recipe, console: Console, dry_run: bool = False) -> Path:
    """Runs the command; returns the folder. ``dry_run`` stops after the size is said.

    Raises TrainError, CheckpointError or ConfigError.
    """
    store = recipe.features
    if store.mode == "online":
        raise TrainError("features.mode is online: training computes the features itself, nothing to store")
    begun = (Path(store.folder) / "manifest.json").exists()  # nothing may be left to write then
    if not dry_run and not begun:
        check_writable("features.folder", Path(store.folder), "a folder")
    check_data(recipe)
    dtype = jnp.dtype(store.dtype)
    console.print(f"loading the target {recipe.target or '(embedded default)'} in {store.dtype}")
    model = load_target(recipe.target, dtype=dtype, tokenizer=recipe.tokenizer)
    documents, summary = load_documents(recipe, model.tokenizer, model.config)
    say(summary, console)
    splits = split_rows(recipe, documents)
    identity = features.Identity(
        target=model.name,
        weights=features.weights_digest(model.params),
        data=features.rows_digest(splits),
        taps=feature_taps(recipe, model.config.num_layers),
        dtype=store.dtype,
        row_length=store.row_length,
        hidden_size=model.config.hidden_size,
        vocab_size=model.config.vocab_size,
    )
    rows = {name: len(split) for name, split in splits.items()}
    total = sum(rows.values()) * store.row_length
    per_token = features.bytes_per_token(identity)
    filled = (summary.tokens / total) if total else 0.0
    console.print(
        f"{rows['train']} training and {rows['heldout']} held-out rows of {store.row_length} tokens, "
        f"{filled:.1%} filled; taps {list(identity.taps)}"
    )
    size = total * per_token / 1e6
    told = f"{size / 1e3:.2f} GB" if size >= 100 else f"{size:.2f} MB"
    console.print(f"{store.folder} will hold {told} ({per_token} bytes a token)")
    if dry_run:
        return Path(store.folder)
    with progress_bar(console, "tokens") as bar:
        task = bar.add_task("features", total=total, note="")

        def advance(tokens: int) -> None:
            bar.advance(task, tokens)
            speed = bar.tasks[task].speed
            bar.update(task, note=f"{speed:,.0f}/s" if speed else "")

        written = features.compute_folder(
            Path(store.folder),
            model.params,
            model.config,
            splits,
            identity,
            batch_rows=store.batch_rows,
            shard_rows=store.shard_rows,
            files=file_names(recipe.data.files),
            advance=advance,
        )
    console.print(f"{written} shards computed; {store.folder} is complete")
    return Path(store.folder)


def show_mask(recipe: Recipe, console: Console, count: int) -> None:
    """Prints conversations with every token that carries loss in green (in brackets where the console has
    no colour), and the totals.

    Raises TrainError as ``load_documents`` does, or for a negative ``count``.
    """
    check_number("--count", count, COUNT_OR_NONE)
    check_data(recipe)
    model = load_target(recipe.target, tokenizer=recipe.tokenizer)
    documents, summary = load_documents(recipe, model.tokenizer, model.config)
    opening, closing = ("", "") if console.color_system else ("⟦", "⟧")
    for document in documents[:count]:
        edges = np.flatnonzero(np.diff(document.flags)) + 1
        shown = Text(f"conversation {document.id}: ", style="bold")
        for part in np.split(np.arange(len(document.tokens)), edges):
            text = model.tokenizer.decode(document.tokens[part].tolist())
            if document.flags[part[0]]:
                shown.append(f"{opening}{text}{closing}", style="green")
            else:
                shown.append(text, style="dim")
        console.print(shown)
    say(summary, console)
