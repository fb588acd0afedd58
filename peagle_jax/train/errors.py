"""The error that every input of training that cannot be used ends in."""

from __future__ import annotations


class TrainError(ValueError):
    """A recipe, data set or run that cannot be used; the message is one line."""
