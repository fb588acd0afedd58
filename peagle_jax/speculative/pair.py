"""Whether a head fits a target, and what is asked of it."""

from __future__ import annotations

from peagle_jax.config import ConfigError, DrafterConfig, SpecConfig, TargetConfig
from peagle_jax.models.stack import check_taps


def check_pair(target: TargetConfig, drafter: DrafterConfig, spec: SpecConfig) -> None:
    """Raises ConfigError unless the head fits the target, was trained for that many drafts and has the
    candidates that a tree may ask for."""
    k, nodes = spec.num_speculative_tokens, spec.num_speculative_nodes
    if drafter.target_hidden_size != target.hidden_size:
        raise ConfigError(
            f"the head reads a target of hidden size {drafter.target_hidden_size}, this target has "
            f"{target.hidden_size}; use the head that was trained for this model"
        )
    if drafter.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the head was made for a vocabulary of {drafter.vocab_size}, this target has "
            f"{target.vocab_size}; use the head that was trained for this model"
        )
    try:
        check_taps(target, drafter.taps)
    except ValueError as error:
        raise ConfigError(f"the head does not fit: {error}") from error
    if drafter.method == "peagle" and k > drafter.num_depths:
        raise ConfigError(
            f"num_speculative_tokens is {k}, but the head was trained for "
            f"{drafter.num_depths}; ask for at most {drafter.num_depths}"
        )
    ranks = [rank for path in spec.speculative_token_tree for rank in path]
    if max(nodes, *(rank + 1 for rank in ranks), 0) > drafter.draft_vocab_size:
        raise ConfigError(
            f"the tree may ask for more candidates than the head's draft vocabulary has, "
            f"{drafter.draft_vocab_size}; ask for fewer nodes"
        )
