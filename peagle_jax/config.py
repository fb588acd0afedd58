"""Frozen, validated, hashable configurations. They are static arguments under ``jax.jit``.

Dimension letters, used in every docstring and einsum of the project:

    B batch    T query tokens      S cache slots    K draft tokens    L layers
    D width    F ffn width         N query heads    G kv heads        H head dim
    V vocab    W drafter slots     C fused taps     R rounds         E experts
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
from typing import Any, Literal

RopeVariant = Literal["default", "linear", "llama3", "yarn"]
Method = Literal["peagle", "eagle3"]


LARGEST = 2**31 - 1
"""Sizes, ids and counts are int32 on devices."""

MAX_STOP_IDS = 16
"""Ids that may end one answer, those of the model and of the request together; a static width."""


class ConfigError(ValueError):
    """A configuration that contradicts itself; the message says what was found and expected."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number that an int32 holds; a boolean is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and abs(int(value)) <= LARGEST


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; a boolean is none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


_KINDS = {
    "int": (is_whole, "a whole number below 2**31"),
    "float": (is_number, "a finite number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
}


def _require_kinds(config: Any) -> None:
    """Every number and flag of a config is of its field's kind: comparisons would let NaN pass."""
    for field in dataclasses.fields(config):
        kind, _, optional = str(field.type).partition(" | ")
        value = getattr(config, field.name)
        if kind not in _KINDS or (optional and value is None):
            continue
        fits, expected = _KINDS[kind]
        _require(fits(value), f"{field.name} must be {expected}, found {value!r}")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding; names follow Hugging Face's ``rope_parameters``.

    ``attention_factor`` scales cos and sin (YaRN); ``None`` means the variant's own default.
    """

    theta: float = 10000.0
    variant: RopeVariant = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        variants = ("default", "linear", "llama3", "yarn")
        _require(
            self.variant in variants,
            f"rope_type {self.variant!r} is not supported; expected one of {', '.join(variants)}",
        )
        _require_kinds(self)
        _require(self.theta > 1, f"rope_theta must be above 1, found {self.theta}")
        _require(self.factor >= 1, f"rope's factor must be at least 1, found {self.factor}")
        for name in ("original_max_position", "beta_fast", "beta_slow", "attention_factor"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"rope's {name} must be positive, found {value}")
        _require(
            self.low_freq_factor < self.high_freq_factor,
            f"rope's low_freq_factor ({self.low_freq_factor}) must be below its high_freq_factor "
            f"({self.high_freq_factor})",
        )


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts in place of a block's MLP: ``top_k`` of ``num_experts`` for each token.

    ``norm_topk_prob``: an expert's weight is its share among the chosen ones; otherwise among all.
    """

    num_experts: int
    top_k: int
    norm_topk_prob: bool = True

    def __post_init__(self) -> None:
        _require_kinds(self)
        _require(
            0 < self.top_k <= self.num_experts,
            f"num_experts_per_tok must be in 1..{self.num_experts} (num_experts), found {self.top_k}",
        )


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """One decoder block, shared by targets and heads.

    ``intermediate_size`` is that of one expert where there is a ``moe``. ``swiglu_limit`` clamps the gate
    (above) and the up branch (both ways) of gpt-oss's own SwiGLU; None is the usual one.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    moe: MoeConfig | None = None
    swiglu_limit: float | None = None

    def __post_init__(self) -> None:
        _require_kinds(self)
        _require(self.rms_norm_eps >= 0, f"rms_norm_eps must not be negative, found {self.rms_norm_eps}")
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            _require(value > 0, f"{name} must be positive, found {value}")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_attention_heads ({self.num_heads}) must be a multiple of "
            f"num_key_value_heads ({self.num_kv_heads})",
        )
        _require(self.head_dim % 2 == 0, f"head_dim must be even for RoPE, found {self.head_dim}")
        limit = self.swiglu_limit
        _require(limit is None or limit > 0, f"swiglu_limit must be positive, found {limit}")


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """A target model. ``family`` names the module in ``peagle_jax.models`` that built it.

    ``windows``: how many positions each layer sees, its own included; 0 is all of them. Empty: all layers
    see all.
    """

    family: str
    block: BlockConfig
    vocab_size: int
    num_layers: int
    max_position: int
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require_kinds(self)
        for name in ("vocab_size", "num_layers", "max_position"):
            value = getattr(self, name)
            _require(value > 0, f"{name} must be positive, found {value}")
        _require(
            not self.windows or len(self.windows) == self.num_layers,
            f"{len(self.windows)} layer windows for {self.num_layers} layers; expected one each",
        )
        _require(min(self.windows, default=0) >= 0, f"windows must not be negative, found {self.windows}")
        named = {"eos_token_id": self.eos_token_ids, "bos_token_id": (self.bos_token_id,)}
        for name, ids in named.items():
            wrong = [i for i in ids if i is not None and not 0 <= i < self.vocab_size]
            _require(not wrong, f"{name} {wrong} is outside the vocabulary of {self.vocab_size}")
        _require(
            len(self.eos_token_ids) <= MAX_STOP_IDS,
            f"{len(self.eos_token_ids)} eos token ids; expected at most {MAX_STOP_IDS}",
        )

    @property
    def hidden_size(self) -> int:
        return self.block.hidden_size

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """The window of every layer, 0 where it sees all."""
        return self.windows or (0,) * self.num_layers

    @property
    def cycle(self) -> int:
        """After how many layers the windows repeat: a scan runs so many layers a step."""
        windows, count = self.layer_windows, self.num_layers
        return next(
            p for p in range(1, count + 1) if count % p == 0 and windows == windows[:p] * (count // p)
        )


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The boundaries that EAGLE-3 and vLLM tap when a head names none: (2, L//2, L-3).

    Boundary x is the residual stream after x layers have run (0 embedding, L last layer).

    Raises:
        ConfigError: the three collide, so that a shallow target needs explicit taps.
    """
    taps = (2, num_layers // 2, num_layers - 3)
    _require(
        0 <= taps[0] < taps[1] < taps[2],
        f"the default taps {taps} collide on a target of {num_layers} layers; name the taps explicitly",
    )
    return taps


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A P-EAGLE or EAGLE-3 head (P-EAGLE, section 2).

    ``taps`` are target boundaries 0..L in concatenation order. ``num_depths`` is K_train, the
    most draft tokens that the head was trained for (1 for EAGLE-3, whose passes are sequential).
    ``mask_token_id`` is None for EAGLE-3.
    """

    method: Method
    block: BlockConfig
    num_layers: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...]
    max_position: int
    num_depths: int = 8
    mask_token_id: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False

    def __post_init__(self) -> None:
        _require_kinds(self)
        _require(self.method in ("peagle", "eagle3"), f"method {self.method!r} is not peagle or eagle3")
        _require(self.num_layers > 0, f"num_hidden_layers must be positive, found {self.num_layers}")
        _require(len(self.taps) > 0, "a head needs at least one tap")
        _require(len(set(self.taps)) == len(self.taps), f"taps {list(self.taps)} name a boundary twice")
        for name in ("vocab_size", "target_hidden_size", "max_position"):
            value = getattr(self, name)
            _require(value > 0, f"{name} must be positive, found {value}")
        _require(
            0 < self.draft_vocab_size <= self.vocab_size,
            f"draft_vocab_size must be in 1..{self.vocab_size}, found {self.draft_vocab_size}",
        )
        if self.method == "peagle":
            _require(
                self.mask_token_id is not None,
                "a P-EAGLE head needs a mask token id (mask_token_id, ptd_token_id or pard_token)",
            )
            _require(
                0 <= (self.mask_token_id or 0) < self.vocab_size,
                f"mask token id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}",
            )
            _require(self.num_depths >= 1, f"num_depths must be at least 1, found {self.num_depths}")

    @property
    def hidden_size(self) -> int:
        return self.block.hidden_size

    @property
    def feature_size(self) -> int:
        """C: width of the fused taps, the input of fc."""
        return len(self.taps) * self.target_hidden_size


MAX_NODES = 256
"""Of a tree. Verification has a row for each and a mask of their square, and a CPU or a GPU stops gaining far
below it."""


@dataclasses.dataclass(frozen=True)
class SpecConfig:
    """How a round speculates: K drafts from a head of ``method``, or found by the host (``ngram``,
    ``speculative.lookup``); K = 0 is plain decode.

    ``rounds`` is R, rounds in one dispatch (static). Without more, the drafts are a chain. A tree has
    ``num_speculative_nodes`` nodes, the likeliest by the head, or is fixed: the paths of
    ``speculative_token_tree``, each by the ranks of its candidates (as vLLM had it: (0,), (1,), (0, 0)).
    ``verify_widths`` are smaller numbers of nodes that a round may verify instead of all.
    """

    num_speculative_tokens: int = 0
    method: Method | Literal["ngram"] | None = None
    rounds: int = 1
    num_speculative_nodes: int = 0
    speculative_token_tree: tuple[tuple[int, ...], ...] = ()
    verify_widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require_kinds(self)
        _require(
            self.num_speculative_tokens >= 0,
            f"num_speculative_tokens must not be negative, found {self.num_speculative_tokens}",
        )
        _require(self.rounds >= 1, f"rounds must be at least 1, found {self.rounds}")
        if self.num_speculative_tokens and self.method is None:
            raise ConfigError("speculation needs a head: method is None but num_speculative_tokens > 0")
        self._check_tree()

    def _check_tree(self) -> None:
        k, nodes, paths = (
            self.num_speculative_tokens,
            self.num_speculative_nodes,
            self.speculative_token_tree,
        )
        _require(nodes >= 0, f"num_speculative_nodes must not be negative, found {nodes}")
        _require(not (nodes and paths), "give num_speculative_nodes or speculative_token_tree, not both")
        if nodes or paths:
            _require(k > 0, "a tree needs drafts: num_speculative_tokens is 0")
            _require(
                self.method != "eagle3",
                "a tree needs the K marginals of one parallel pass, and this head is EAGLE-3; leave "
                "num_speculative_nodes and speculative_token_tree out, which gives a chain",
            )
        _require(
            not nodes or nodes >= k,
            f"num_speculative_nodes is {nodes}; expected at least num_speculative_tokens, {k}, a chain's",
        )
        count = max(nodes, len(paths))
        _require(count <= MAX_NODES, f"the tree has {count} nodes; expected at most {MAX_NODES}")
        known = set(paths)
        _require(len(known) == len(paths), "speculative_token_tree names a path twice")
        for path in paths:
            _require(
                0 < len(path) <= k and min(path) >= 0,
                f"speculative_token_tree: {path} is no path of 1 to {k} (num_speculative_tokens) ranks",
            )
            _require(
                len(path) == 1 or path[:-1] in known,
                f"speculative_token_tree: {path} has no parent; add {path[:-1]}",
            )
        widths = self.verify_widths
        _require(
            all(0 < a < b for a, b in itertools.pairwise((*widths, self.most_nodes))),
            f"verify_widths must ascend from 1 on and stay under {self.most_nodes}, found {list(widths)}",
        )

    @property
    def is_tree(self) -> bool:
        return bool(self.num_speculative_nodes or self.speculative_token_tree)

    @property
    def most_nodes(self) -> int:
        """M: nodes that a round of K drafts may verify."""
        return len(self.speculative_token_tree) or self.num_speculative_nodes or self.num_speculative_tokens

    def nodes_of(self, k: int) -> tuple[int, ...]:
        """How many nodes a round of ``k`` drafts may verify, ascending. One of fewer than K is a chain."""
        return (*self.verify_widths, self.most_nodes) if k and k == self.num_speculative_tokens else (k,)
