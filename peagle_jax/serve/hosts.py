"""A server over several hosts: process 0 listens and leads, the others repeat its dispatches.

Every process has a part of the weights and caches, and a program runs only when all of them run it. Process 0
writes each dispatch, a few hundred bytes, into the key-value store of jax.distributed; the others read
them in order. Nobody waits in a collective while there is nothing to do.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from peagle_jax.processes import coordination_client
from peagle_jax.speculative.dispatch import Dispatch

BEAT = 1.0
"""Seconds between a process's signs of life."""

LOST = 20.0
"""Seconds without one after which the server ends."""

_KEPT = 4096  # dispatches that a process may be behind
_STOP = "stop"
_ROOT = "peagle_jax/"


class Leader:
    """Process 0's side. ``on_lost`` is called, on a thread of its own, with one line about a process that is
    gone or has failed."""

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self._client, self._on_lost = coordination_client(), on_lost
        self._numbers = itertools.count()
        self._others = range(1, jax.process_count())
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="peagle-hosts", daemon=True).start()

    def announce(self, dispatch: Dispatch) -> None:
        """Tells the others what this process is about to run."""
        number = next(self._numbers)
        self._client.key_value_set_bytes(f"{_ROOT}dispatch/{number}", dispatch.pack())
        if number >= _KEPT:
            self._client.key_value_delete(f"{_ROOT}dispatch/{number - _KEPT}")

    def find_lost(self) -> None:
        """After a program has failed: waits until a process that is gone would have been missed."""
        time.sleep(LOST + 2 * BEAT)

    def stop(self, within: float = 10.0) -> None:
        """Sends the others home, and parts with them when all have come to it."""
        self._stopped.set()
        self.announce(Dispatch(_STOP))
        farewell = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        farewell.start()
        farewell.join(within)

    def _watch(self) -> None:
        seen = dict.fromkeys(self._others, (None, time.monotonic()))
        while not self._stopped.wait(BEAT):
            try:
                said = dict(self._client.key_value_dir_get(f"{_ROOT}life/"))
            except RuntimeError:  # the store is this process's own, and ends with it
                return None
            words = {int(key.rsplit("/", 1)[1]): value for key, value in said.items()}
            for process in self._others:
                word, since = words.get(process), seen[process][1]
                if word is not None and word.startswith("failed"):
                    return self._on_lost(f"process {process} {word}; start all of them again")
                if word != seen[process][0]:
                    seen[process] = word, time.monotonic()
                elif time.monotonic() - since > LOST:
                    return self._on_lost(
                        f"process {process} has given no sign of life for {LOST:g} s; start all of them again"
                    )
        return None


def follow(prepare: Callable[[], Any]) -> int:
    """Prepares a decoder and repeats what process 0 does with its own, to the end; the exit status."""
    follower = Follower()
    try:
        decoder = prepare()
    except Exception as error:
        follower.fail(" ".join(str(error).split())[:300])
    return follower.run(decoder)


class Follower:
    """Another process's side. Signs of life begin at once: its model may take minutes to load."""

    def __init__(self) -> None:
        self._client, self._me = coordination_client(), jax.process_index()
        self._stopped = threading.Event()
        threading.Thread(target=self._live, name="peagle-life", daemon=True).start()

    def _say(self, word: str) -> None:
        self._client.key_value_set(f"{_ROOT}life/{self._me}", word, allow_overwrite=True)

    def _live(self) -> None:
        for number in itertools.count():
            try:
                self._say(str(number))
            except RuntimeError:  # process 0 is gone, which the reader of dispatches tells
                return
            if self._stopped.wait(BEAT):
                return

    def run(self, decoder: Any) -> int:
        """Repeats process 0's dispatches until it stops; the exit status."""
        for number in itertools.count():
            dispatch = self._next(number)
            if dispatch is None:
                print("error: process 0 of this server is gone", file=sys.stderr, flush=True)
                return 1
            if dispatch.step == _STOP:
                self._stopped.set()
                jax.distributed.shutdown()
                return 0
            try:
                decoder.repeat(dispatch)
            except Exception as error:
                self.fail(" ".join(str(error).split())[:300])
        raise AssertionError("numbers do not end")

    def fail(self, reason: str) -> NoReturn:
        """Tells process 0 why this one ends, and ends it."""
        print(f"error: {reason}", file=sys.stderr, flush=True)
        try:
            self._say(f"failed: {reason}")
        finally:
            os._exit(1)

    def _next(self, number: int) -> Dispatch | None:
        while True:
            try:
                key = f"{_ROOT}dispatch/{number}"
                return Dispatch.unpack(self._client.blocking_key_value_get_bytes(key, 10_000))
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    return None
