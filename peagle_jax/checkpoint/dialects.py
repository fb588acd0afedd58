"""The layouts in which heads are published: what each config key and tensor name means.

Sources: the readers of vLLM (``llama_eagle3.py``, the speculators adapter), speculators, SpecForge,
NeMo AutoModel, SafeAILab/EAGLE and AWS's nkipy.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from peagle_jax.checkpoint.config_reader import check_full_attention
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.fields import (
    Config,
    agreed,
    boolean,
    integer,
    integers,
    lookup,
    number,
    optional_boolean,
    optional_integer,
    section,
    shown,
    text,
    texts,
)
from peagle_jax.config import ConfigError, TargetConfig, default_taps
from peagle_jax.models.family import LAYER_NAMES

log = logging.getLogger(__name__)

Convention = Literal["auto", "boundary", "output"]
MapKind = Literal["offsets", "absolute"]

OWN_SECTION = "peagle_jax"
"""Our own keys in config.json: ``taps`` (always boundaries), ``format_version`` and free metadata."""

MASK_TOKEN_KEYS = ("mask_token_id", "ptd_token_id", "pard_token", "unused_token_id", "dspark_noise_token_id")
"""Every published spelling; what we save has the first three."""

AUX_KEY = "eagle_aux_hidden_state_layer_ids"

_NESTED_BLOCK = "transformer_layer_config"  # speculators'
_BLOCK_TYPES = ("llama", "qwen2", "qwen3")
_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Qwen3ForCausalLM",
    "Eagle3Speculator",
    "LlamaEagle3DraftModel",
    "LlamaForCausalLM",
    "PEagleDraftModel",
    "PEagleSpeculator",
    "PeagleLlamaForCausalLM",
    "PeagleQwen3ForCausalLM",
)

HEAD_NAMES = {
    "embed": "embed_tokens.weight",
    "fc": "fc.weight",
    "fc_bias": "fc.bias",
    "input_norm": "input_norm.weight",
    "hidden_norm": "layers.0.hidden_norm.weight",
    "final_norm": "norm.weight",
    "lm_head": "lm_head.weight",
    "mask_hidden": "mask_hidden",
    "d2t": "d2t",
    "t2d": "t2d",
}
"""The head's own tensors as vLLM, AWS and speculators name them, and as we save them."""


def layer_name(field: str, layer: int) -> str:
    """The saved name of a ``BlockParams`` field."""
    return f"layers.{layer}.{LAYER_NAMES[field].hf}"


def spelling(name: str, has: Callable[[str], bool]) -> str:
    """How the file spells a tensor: NeMo prepends ``model.``, AWS and EAGLE-3 call layer 0 ``midlayer``.

    The plain name when the file has none, so that an error shows it.
    """
    forms = [name]
    if name.startswith("layers.0."):
        forms.append(name.replace("layers.0.", "midlayer.", 1))
    if name == HEAD_NAMES["d2t"]:
        forms.append("draft_id_to_target_id")
    return next((form for form in forms + [f"model.{form}" for form in forms] if has(form)), name)


@dataclasses.dataclass(frozen=True)
class HeadFacts:
    """What a head's config.json says; None where it is silent. ``block`` holds the block's keys."""

    block: Config
    claims_parallel: bool
    mask_token_id: int | None
    aux_ids: tuple[int, ...] | None
    own_taps: tuple[int, ...] | None
    aux_count: int | None
    target_hidden_size: int | None
    vocab_size: int | None
    draft_vocab_size: int | None
    num_depths: int | None
    norm_before_residual: bool
    norm_before_fc: bool
    needs_qk_norm: bool
    by_speculators: bool


Attempt = Callable[[Callable[[], Any], Any], Any]
"""(call, default) -> what the call returns. Where it raises, so does this one, or it keeps the error."""


def strictly(call: Callable[[], Any], default: Any) -> Any:
    """The first fault is an error."""
    return call()


def read_facts(config: Config, place: str, attempt: Attempt = strictly) -> HeadFacts:
    """The facts of any layout's config.

    Raises:
        CheckpointError: two keys disagree, or an option is not supported.
    """
    inner = attempt(lambda: section(config, _NESTED_BLOCK, place), {})
    nested, block = bool(inner), inner or config
    names = attempt(lambda: texts(config, "architectures", place), ())
    block_type = attempt(lambda: text(block, "model_type", place), None) or "llama"
    kind = attempt(lambda: speculator_kind(config, place), None)
    attempt(lambda: _check_block_type(names, block_type, nested, place), None)
    for key in ("fc_norm", "norm_output"):
        attempt(lambda key=key: _check_absent(config, key, place), None)
    attempt(lambda: _check_options(config, kind, place), None)
    attempt(lambda: check_full_attention(block, integer(block, "num_hidden_layers", place), place), None)

    def claims_parallel() -> bool:
        named = any("peagle" in name.lower() for name in names)
        return boolean(config, "parallel_drafting", place) or kind == "peagle" or named

    def mask_token_id() -> int | None:
        keys = (*MASK_TOKEN_KEYS, "dflash_config.mask_token_id")
        found = {key: optional_integer(config, key, place) for key in keys}
        return agreed(found, "the mask token id", place)

    def vocab_size() -> int | None:
        keys = ("vocab_size", f"{_NESTED_BLOCK}.vocab_size")
        return agreed({key: _count(config, key, place) for key in keys}, "vocab_size", place)

    return HeadFacts(
        block=block,
        claims_parallel=attempt(claims_parallel, False),
        mask_token_id=attempt(mask_token_id, None),
        aux_ids=attempt(lambda: _anywhere(_layer_ids, config, AUX_KEY, place), None),
        own_taps=attempt(lambda: _layer_ids(config, f"{OWN_SECTION}.taps", place), None),
        aux_count=attempt(lambda: _anywhere(_aux_count, config, "num_aux_hidden_states", place), None),
        target_hidden_size=attempt(lambda: _count(config, "target_hidden_size", place), None),
        vocab_size=attempt(vocab_size, None),
        draft_vocab_size=attempt(lambda: _count(config, "draft_vocab_size", place), None),
        num_depths=attempt(lambda: _num_depths(config, place), None),
        # vLLM's adapter takes an EAGLE-3 speculators config without the key as true, any other as false.
        norm_before_residual=attempt(
            lambda: boolean(config, "norm_before_residual", place, nested and kind != "peagle"), False
        ),
        norm_before_fc=attempt(lambda: boolean(config, "norm_before_fc", place), False),
        # speculators picks the block by its model_type, vLLM by the architecture.
        needs_qk_norm=block_type == "qwen3" if nested else any("Qwen3" in name for name in names),
        by_speculators=nested or kind is not None,
    )


def speculator_kind(config: Config, place: str) -> str | None:
    """The algorithm that a speculators config names, None for other layouts."""
    return text(config, "speculators_model_type", place) or text(
        config, "speculators_config.algorithm", place
    )


def _check_absent(config: Config, key: str, place: str) -> None:
    if boolean(config, key, place):
        raise CheckpointError(
            f"{place}: {key} is set (EAGLE-3.1); only heads without it are supported, see norm_before_fc"
        )


def _check_options(config: Config, kind: str | None, place: str) -> None:
    if _anywhere(optional_boolean, config, "use_aux_hidden_state", place) is False:
        raise CheckpointError(
            f"{place}: use_aux_hidden_state is false, a head without fc; expected a head that fuses taps"
        )
    scale = number(config, "logit_scale", place, 1.0)
    if scale != 1:
        raise CheckpointError(f"{place}: logit_scale is {scale}; expected 1 or none")
    if kind not in (None, "eagle3", "peagle"):
        raise CheckpointError(f"{place} is a {kind!r} speculator; expected eagle3 or peagle")


def _check_block_type(names: tuple[str, ...], block_type: str, nested: bool, place: str) -> None:
    if nested:
        if block_type not in _BLOCK_TYPES:
            raise CheckpointError(
                f"{place}: {_NESTED_BLOCK}.model_type is {block_type!r}; "
                f"expected one of {', '.join(_BLOCK_TYPES)}"
            )
    elif names and names[0] not in _ARCHITECTURES:
        raise CheckpointError(
            f"{place}: architecture {names[0]!r} is not a head that is supported; "
            f"expected one of {', '.join(_ARCHITECTURES)}"
        )


def _anywhere(read: Callable[[Config, str, str], Any], config: Config, key: str, place: str) -> Any:
    """What the top level and ``eagle_config`` (vLLM reads either) agree on."""
    return agreed({name: read(config, name, place) for name in (key, f"eagle_config.{key}")}, key, place)


def _layer_ids(config: Config, key: str, place: str) -> tuple[int, ...] | None:
    return integers(config, key, place, "layer numbers")


def _count(config: Config, key: str, place: str) -> int | None:
    return optional_integer(config, key, place, least=1)


def _aux_count(config: Config, key: str, place: str) -> int | None:
    return optional_integer(config, key, place, least=0) or None  # some write 0 for the default


def _num_depths(config: Config, place: str) -> int | None:
    """Our key, else speculators' first proposal that says how many tokens it drafts."""
    key = "speculators_config.proposal_methods"
    proposals = lookup(config, key, place) or []
    if not isinstance(proposals, list) or not all(isinstance(p, Mapping) for p in proposals):
        raise CheckpointError(f"{place}: {key} is {shown(proposals)}; expected a list of objects")
    tokens = [_count(proposal, "speculative_tokens", place) for proposal in proposals]
    return _count(config, "num_depths", place) or next((t for t in tokens if t), None)


class Taps(NamedTuple):
    """Tapped boundaries (None: the head names none and its target is not known), and why these."""

    boundaries: tuple[int, ...] | None
    decided: str


def resolve_taps(
    facts: HeadFacts, count: int, target: TargetConfig | None, convention: Convention, place: str
) -> Taps:
    """The tapped boundaries, ``count`` of them by the width of fc.

    Our own key holds boundaries. Other keys hold boundaries (vLLM, speculators) or zero-based
    layers whose output is meant, one less (SpecForge, NeMo); "auto" takes a first id of 1 for the
    latter, as SGLang does, except in speculators' layout. Without any key: the default of EAGLE-3 and
    vLLM, for three taps.

    Raises:
        CheckpointError: the count differs, an id is no boundary of this target, or there is no default.
    """
    if facts.aux_count is not None and facts.aux_count != count:
        raise CheckpointError(
            f"{place}: num_aux_hidden_states is {facts.aux_count} but fc.weight is as wide as {count} taps"
        )
    if facts.own_taps and facts.aux_ids:
        both = {f"{OWN_SECTION}.taps": facts.own_taps, AUX_KEY: facts.aux_ids}
        agreed({key: list(ids) for key, ids in both.items()}, "the tapped layers", place)
    if facts.own_taps:
        taps = Taps(facts.own_taps, f"boundaries, by {OWN_SECTION}.taps")
    elif facts.aux_ids is None:
        return _default(count, target, place)
    else:
        taps = _by_convention(facts, facts.aux_ids, convention, place)
    check_tap_range(taps.boundaries or (), count, target, place)
    return taps


def _default(count: int, target: TargetConfig | None, place: str) -> Taps:
    if count != 3:
        raise CheckpointError(
            f"{place} names no tapped layers and fc.weight takes {count}; name them with the taps option"
        )
    if target is None:
        return Taps(None, "not named: loaders take the default, (2, L//2, L-3) of the target's L layers")
    try:
        taps = default_taps(target.num_layers)
    except ConfigError as error:
        raise CheckpointError(f"{place} names no tapped layers, and {error}") from error
    log.warning("%s names no tapped layers; using the default boundaries %s", place, taps)
    return Taps(taps, "not named: the default boundaries (2, L//2, L-3)")


def _by_convention(facts: HeadFacts, ids: tuple[int, ...], convention: Convention, place: str) -> Taps:
    guessed = convention == "auto" and ids[0] == 1 and not facts.by_speculators
    if convention == "output" or guessed:
        taps = tuple(i + 1 for i in ids)
        log.info("%s: layer ids %s taken as outputs, boundaries %s", place, list(ids), list(taps))
        why = "the first is 1" if guessed else "by the taps-convention option"
        return Taps(taps, f"layer ids {list(ids)} taken as outputs: {why}")
    if facts.by_speculators:
        why = "speculators' layout"
    else:
        why = "the first is not 1" if convention == "auto" else "by the taps-convention option"
    return Taps(ids, f"layer ids taken as boundaries: {why}")


def check_tap_range(taps: tuple[int, ...], count: int, target: TargetConfig | None, place: str) -> None:
    """Raises CheckpointError unless there are ``count`` taps, all boundaries of the target if it is known."""
    if len(taps) != count:
        raise CheckpointError(
            f"{place}: {len(taps)} tapped layers {list(taps)}, but fc.weight is as wide as {count}"
        )
    if target is None:
        if min(taps) < 0:
            raise CheckpointError(f"{place}: taps {list(taps)}; expected boundaries, 0 or more")
    elif not all(0 <= tap <= target.num_layers for tap in taps):
        raise CheckpointError(
            f"{place}: taps {list(taps)} are not boundaries of a target of {target.num_layers} layers; "
            "is the head for another model?"
        )


def draft_to_target(
    offsets: np.ndarray,
    in_draft: np.ndarray | None,
    vocab_size: int,
    place: str,
    kind: MapKind = "offsets",
) -> np.ndarray:
    """Target ids (Vd,) int32 from ``d2t`` offsets, checked against ``t2d`` (V,) where given.

    ``kind`` "absolute": it holds the target ids themselves, as the user says.

    Raises:
        CheckpointError: ids repeat or leave the vocabulary, t2d disagrees, or the map looks absolute.
    """
    if offsets.dtype.kind not in "iu":
        raise CheckpointError(f"{place}: d2t has dtype {offsets.dtype}; expected integer offsets")
    count = offsets.shape[0]
    offsets = offsets.astype(np.int64)
    ids = offsets + np.arange(count)
    members = None if in_draft is None else np.flatnonzero(in_draft)

    def valid(values: np.ndarray) -> bool:
        if values.min() < 0 or values.max() >= vocab_size or len(np.unique(values)) != count:
            return False
        return members is None or np.array_equal(np.sort(values), members)

    if kind == "absolute":
        if valid(offsets):
            return offsets.astype(np.int32)
        raise CheckpointError(
            f"{place}: d2t cannot hold target ids: it leaves 0..{vocab_size - 1}, repeats one or differs "
            "from t2d; read it as offsets"
        )
    plain_count = count > 1 and np.array_equal(offsets, np.arange(count))
    if valid(ids) and not plain_count:
        return ids.astype(np.int32)
    if valid(offsets):
        raise CheckpointError(
            f"{place}: d2t looks absolute (it holds target ids); expected offsets, target id minus draft id; "
            "peagle_jax.convert --d2t absolute rewrites it"
        )
    if valid(ids):
        return ids.astype(np.int32)
    problem = "leaves the vocabulary or repeats an id"
    if members is not None:
        problem += f", or differs from t2d, which marks {len(members)} ids"
    raise CheckpointError(f"{place}: d2t of {count} drafts {problem}; expected ids below {vocab_size}")
