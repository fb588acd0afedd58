"""The ways of decoding that one run compares, and engines of them in this process, as they are served."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from peagle_jax import commands
from peagle_jax.arguments import CommandError
from peagle_jax.checkpoint.head import default_head_path
from peagle_jax.serve import build
from peagle_jax.serve.arguments import EngineOptions
from peagle_jax.serve.engine import Engine
from peagle_jax.serve.speculative_config import OFF, SpeculativeOptions
from peagle_jax.speculative.decoder import Decoder
from peagle_jax.speculative.lookup import Lookup

OPTIONS = EngineOptions(max_num_seqs=1, enable_prefix_caching=False)
"""One request at a time; prompts come again, and what an earlier one left must not help a later one."""

Note = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Method:
    """One way of decoding: what is loaded, and what ``--speculative-config`` would say of it."""

    name: str
    kind: str
    loaded: commands.Loaded
    speculative: SpeculativeOptions

    @property
    def k(self) -> int:
        return self.loaded.num_speculative_tokens

    @property
    def draft_lengths(self) -> set[int]:
        """The K that rounds may have: one that is fixed needs no other program."""
        fixed = self.speculative.num_speculative_tokens_per_batch_size
        head = self.loaded.head
        return (
            {self.k} if fixed else build.draft_lengths(self.k, self.speculative, head and head.config.method)
        )

    def described(self) -> dict[str, Any]:
        """For a result."""
        head = self.loaded.head
        return {
            "method": self.kind,
            "num_speculative_tokens": self.k,
            "num_speculative_nodes": self.speculative.num_speculative_nodes,
            "head": head and head.source.rstrip("/").rsplit("/", 1)[-1],
        }


def _always(k: int, nodes: int | None = None) -> SpeculativeOptions:
    """K drafts in every round, and all of them verified."""
    fixed = ((1, 1, k),)
    return SpeculativeOptions(num_speculative_tokens_per_batch_size=fixed, num_speculative_nodes=nodes)


class Models:
    """The target of a run, loaded once, and its heads, each once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.target = commands.load(
            args.model,
            None,
            0,
            dtype=args.dtype,
            revision=args.revision,
            tokenizer=args.tokenizer,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
        )
        self.max_model_len = commands.context_limit(self.target.target, args.max_model_len)
        self._heads: dict[str, commands.Loaded] = {}

    def with_head(self, head: str, k: int | None, kind: commands.Method | None) -> commands.Loaded:
        """The target with a head that drafts ``k``; None is what it was trained for."""
        if head not in self._heads:
            self._heads[head] = commands.with_head(self.target, head, k)
        loaded = self._heads[head]
        assert loaded.head is not None
        config = loaded.head.config
        commands.check_method(config, kind, head)
        return dataclasses.replace(loaded, num_speculative_tokens=k or config.num_depths)

    def peagle_head(self) -> str:
        shipped = default_head_path() if self.args.model is None else None
        head = self.args.head or (shipped and str(shipped))
        if not head:
            raise CommandError("the methods that draft with a P-EAGLE head need one: name it with --head")
        return head

    def none(self) -> Method:
        return Method("none", "none", self.target, OFF)

    def peagle(self, k: int) -> Method:
        return Method(f"peagle K={k}", "peagle", self.with_head(self.peagle_head(), k, "peagle"), _always(k))

    def trees(self, k: int) -> list[Method]:
        """Trees of every number of nodes that is asked for and is not below K."""
        loaded = self.with_head(self.peagle_head(), k, "peagle")
        sizes = [nodes for nodes in self.args.num_speculative_nodes if nodes >= k]
        return [Method(f"tree K={k} M={m}", "tree", loaded, _always(k, m)) for m in sizes]

    def adaptive_trees(self, k: int) -> list[Method]:
        """As the server is with ``num_speculative_nodes``."""
        return [
            dataclasses.replace(
                method,
                name=method.name.replace("tree", "adaptive tree"),
                kind="adaptive-tree",
                speculative=SpeculativeOptions(
                    num_speculative_nodes=method.speculative.num_speculative_nodes
                ),
            )
            for method in self.trees(k)
        ]

    def eagle3(self, k: int) -> Method:
        if not self.args.eagle3_head:
            raise CommandError("the method eagle3 needs a head: name it with --eagle3-head")
        return Method(
            f"eagle3 K={k}", "eagle3", self.with_head(self.args.eagle3_head, k, "eagle3"), _always(k)
        )

    def ngram(self, k: int) -> Method:
        """Drafts that the host looks up in the prompt and the answer so far."""
        lookup = Lookup(self.args.prompt_lookup_max, self.args.prompt_lookup_min)
        loaded = dataclasses.replace(self.target, num_speculative_tokens=k, lookup=lookup)
        return Method(f"ngram K={k}", "ngram", loaded, _always(k))

    def adaptive(self, k: int) -> Method:
        """As the server comes: each round's K is chosen from measured times."""
        loaded = self.with_head(self.peagle_head(), k, None)
        return Method(f"adaptive K<={k}", "adaptive", loaded, SpeculativeOptions())


DRAFTING: dict[str, Callable[[Models, int], Method | list[Method]]] = {
    "peagle": Models.peagle,
    "eagle3": Models.eagle3,
    "tree": Models.trees,
    "adaptive": Models.adaptive,
    "adaptive-tree": Models.adaptive_trees,
    "ngram": Models.ngram,
}
"""By name: what makes a method that drafts, of K; of a tree for each number of nodes."""

NAMES = ("none", *DRAFTING)
TREES = ("tree", "adaptive-tree")


def chosen(args: argparse.Namespace) -> list[Method]:
    """The methods that ``--methods`` names, each that drafts at every K.

    Raises:
        CommandError: no method is named, or a tree of no size.
        CommandError, CheckpointError, ConfigError: what loading raises.
    """
    if not args.methods:
        raise CommandError(f"--methods - names nothing to measure; name some of {', '.join(NAMES)}")
    least, most = min(args.num_speculative_tokens), max(args.num_speculative_nodes)
    if most < least and (trees := [name for name in args.methods if name in TREES]):
        raise CommandError(
            f"--methods {','.join(trees)} with {least} tokens or more and {most} nodes at most; a tree has K "
            f"nodes or more: raise --num-speculative-nodes"
        )
    models = Models(args)
    found: list[Method] = []
    for name in args.methods:
        if name == "none":
            found.append(models.none())
        else:
            for k in args.num_speculative_tokens:
                made = DRAFTING[name](models, k)
                found += made if isinstance(made, list) else [made]
    args.max_model_len = models.max_model_len
    return found


@contextlib.contextmanager
def engines(
    methods: Sequence[Method], context: int, note: Note
) -> Iterator[list[tuple[Method, Engine, Decoder]]]:
    """Warm engines of all methods, which end with the block. ``note`` is told what is compiled.

    Raises:
        CommandError: one does not come up.
    """
    with contextlib.ExitStack() as stack:
        found = []
        for method in methods:
            note(f"compiling {method.name}")
            arrangement = method.speculative.arrangement
            decoder = method.loaded.decoder(
                context, draft_lengths=method.draft_lengths, arrangement=arrangement
            )
            engine = build.build_engine(decoder, method.loaded.target.tokenizer, OPTIONS, method.speculative)
            stack.enter_context(running(engine))
            found.append((method, engine, decoder))
        note("")
        yield found


@contextlib.contextmanager
def running(engine: Engine) -> Iterator[Engine]:
    """A warm engine, which ends with the block. Raises CommandError if it does not come up."""
    engine.start()
    try:
        while engine.state == "warming":
            time.sleep(0.02)
        if engine.state == "failed":
            raise CommandError(f"the model could not be compiled: {engine.failure}")
        yield engine
    finally:
        engine.stop()
