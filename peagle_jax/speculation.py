"""How drafts are arranged and how many of them are verified, as commands ask for it."""

from __future__ import annotations

import dataclasses

from peagle_jax.config import MAX_NODES, ConfigError, DrafterConfig, SpecConfig


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """A chain, or one kind of tree; see ``SpecConfig`` for the first two.

    ``num_trees`` is SageMaker's: so many candidates for the first position, each with a chain of the
    likeliest behind it. ``adaptive`` lets a round verify fewer nodes, by the head's own confidence.
    """

    num_speculative_nodes: int = 0
    speculative_token_tree: tuple[tuple[int, ...], ...] = ()
    num_trees: int = 1
    adaptive: bool = False

    @property
    def is_tree(self) -> bool:
        return bool(self.num_speculative_nodes or self.speculative_token_tree or self.num_trees > 1)

    def spec(self, k: int, head: DrafterConfig, rounds: int = 1) -> SpecConfig:
        """The round of ``k`` drafts.

        Raises:
            ConfigError: settings that contradict each other, or a head that cannot draft a tree.
        """
        paths = self.speculative_token_tree
        if self.num_trees * k > MAX_NODES:
            raise ConfigError(
                f"num_trees is {self.num_trees}, each with {k} nodes; expected at most {MAX_NODES} together"
            )
        if self.num_trees > 1:
            paths = tuple((r,) + (0,) * depth for r in range(self.num_trees) for depth in range(k))
        spec = SpecConfig(k, head.method, rounds, self.num_speculative_nodes, paths)
        if not self.adaptive or head.method == "eagle3":
            return spec  # passes that were made one after the other are paid for before any is verified
        most = spec.most_nodes
        widths = {-(-k // 2), k, most // 2} if spec.is_tree else {-(-k // 2)}
        return dataclasses.replace(spec, verify_widths=tuple(sorted(w for w in widths if 0 < w < most)))


CHAIN = Arrangement()


def describe(spec: SpecConfig) -> str:
    """How rounds of the most drafts are verified, in words."""
    k, nodes = spec.num_speculative_tokens, spec.nodes_of(spec.num_speculative_tokens)
    if not k:
        return "none"
    shape = f"a chain of {k}"
    if spec.is_tree:
        kind = "fixed" if spec.speculative_token_tree else "likeliest"
        shape = f"a tree of {nodes[-1]} {kind} nodes, {k} deep; a chain for requests with grammars"
    fewer = ", ".join(map(str, nodes[:-1]))
    return f"{shape}; rounds verify {fewer} or all of it, by what pays" if fewer else shape
