"""The servers of a run: those that were there before, and those that it starts."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.progress import Progress

from peagle_jax.arguments import CommandError
from peagle_jax.bench import servers
from peagle_jax.bench.machine import without_secrets
from peagle_jax.bench.servers import Launch, Server, ServerError


class Peers:
    """What ``--endpoint`` and ``--start`` name, in that order. The result has an entry for each.

    Raises:
        CommandError: two of one name, or a flag that is no server.
    """

    def __init__(self, args: argparse.Namespace, progress: Progress, result: dict[str, Any]) -> None:
        self._args, self._progress, self._result = args, progress, result
        self.endpoints = [servers.parse_endpoint(text) for text in args.endpoint]
        self.launches = [servers.parse_launch(text) for text in args.start]
        names = [one.name for one in (*self.endpoints, *self.launches)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise CommandError(f"two servers are named {twice}; name one of them differently")

    @property
    def groups(self) -> list[list[Server | Launch]]:
        """The servers that are up at the same time: all, or with ``--one-by-one`` each alone."""
        every: list[Server | Launch] = [*self.endpoints, *self.launches]
        return [[one] for one in every] if self._args.one_by_one else [every]

    @contextlib.contextmanager
    def started(self, group: list[Server | Launch] | None = None) -> Iterator[list[Server]]:
        """Those of a group (default: all) that answer; of the others the result tells what is wrong."""
        group = [*self.endpoints, *self.launches] if group is None else group
        with contextlib.ExitStack() as stack:
            logs = self._args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            logs.mkdir(parents=True, exist_ok=True)
            task = self._progress.add_task("starting servers", total=len(group), note="")
            ready = []
            for one in group:
                self._progress.update(task, note=one.name)
                ready += self._started(one, logs, stack)
                self._progress.advance(task)
            self._progress.remove_task(task)
            yield ready

    def _started(self, one: Server | Launch, logs: Path, stack: contextlib.ExitStack) -> list[Server]:
        entry: dict[str, Any] = (
            one.described() if isinstance(one, Launch) else {"url": without_secrets(one.url)}
        )
        self._result["runs"][one.name] = entry
        try:
            server = one if isinstance(one, Server) else stack.enter_context(servers.started(one, logs))
            within = 10.0 if isinstance(one, Server) else self._args.start_within
            took = server.wait_until_ready(within)
            if isinstance(one, Launch):
                entry["ready_in_s"] = round(took, 1)
            entry |= {"served_model": server.model, "version": server.version(), **server.start_up_report()}
        except (ServerError, OSError) as error:
            entry["error"] = str(error)
            self._progress.console.print(f"{one.name}: {error}", style="red", markup=False, soft_wrap=True)
            return []
        return [server]
