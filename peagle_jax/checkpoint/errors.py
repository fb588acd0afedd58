"""The error that every bad checkpoint ends in."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded or saved; one line: found, expected, what to do."""
