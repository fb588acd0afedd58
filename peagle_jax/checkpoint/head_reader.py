"""What a head is by its own files, and by its target where that is given: sizes, flags, tensors."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np

from peagle_jax.checkpoint import dialects
from peagle_jax.checkpoint.config_reader import read_block
from peagle_jax.checkpoint.dialects import HEAD_NAMES, Convention, HeadFacts, MapKind, Taps, spelling
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.fields import agreed, boolean, integer
from peagle_jax.checkpoint.tensors import Reader, Shape, TensorSource, layer_shapes
from peagle_jax.config import BlockConfig, ConfigError, DrafterConfig, Method, TargetConfig
from peagle_jax.models.family import COMMON_FIELDS, MLP_BIASES, QK_NORMS, QKV_BIASES

log = logging.getLogger(__name__)

DEFAULT_NUM_DEPTHS = 8  # the paper's K_train, for a P-EAGLE head that does not say its own

OPTIONAL_FIELDS = (*QKV_BIASES, "bo", *MLP_BIASES, *QK_NORMS)
MAPS = ("d2t", "t2d")


@dataclasses.dataclass(frozen=True)
class HeadOutline:
    """A head without its weights; ``taps.boundaries`` and ``num_depths`` are None where it is silent."""

    method: Method
    block: BlockConfig
    num_layers: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    tap_count: int
    taps: Taps
    max_position: int
    num_depths: int | None
    mask_token_id: int | None
    norm_before_residual: bool
    norm_before_fc: bool

    @property
    def feature_size(self) -> int:
        return self.tap_count * self.target_hidden_size

    def config(self, place: str) -> DrafterConfig:
        """The drafter's config. Raises CheckpointError when it contradicts itself or the taps are unknown."""
        if self.taps.boundaries is None:
            raise CheckpointError(f"{place} names no tapped layers; name the target (--target), or the taps")
        depths = self.num_depths
        if depths is None:
            depths = DEFAULT_NUM_DEPTHS
            log.warning("%s does not say num_depths; taking the paper's %d", place, depths)
        names = {field.name for field in dataclasses.fields(DrafterConfig)} - {"taps", "num_depths"}
        values = {name: getattr(self, name) for name in names}
        try:
            return DrafterConfig(taps=self.taps.boundaries, num_depths=depths, **values)
        except ConfigError as error:
            raise CheckpointError(f"{place}: {error}") from error


class HeadReader:
    """One head's config and tensors, every contradiction named.

    ``target`` is None where only the head is at hand; what it alone could say is then an error
    that asks for it.
    """

    def __init__(
        self, facts: HeadFacts, source: TensorSource, target: TargetConfig | None, place: str
    ) -> None:
        self.facts, self.target, self.place = facts, target, place
        self.reader, self.where = Reader(source), source.place

    def spelled(self, name: str) -> str:
        return spelling(name, self.reader.has)

    def name(self, field: str) -> str:
        return self.spelled(HEAD_NAMES[field])

    def has(self, field: str) -> bool:
        return self.reader.has(self.name(field))

    def shape(self, field: str) -> Shape:
        return self.shape_of(self.name(field))

    def shape_of(self, name: str) -> Shape:
        shape = self.reader.source.shape(name)
        if not shape:
            raise CheckpointError(f"{self.where}: tensor {name} is a single number; expected an array")
        return shape

    # -- the config ----------------------------------------------------------------------------

    def outline(self, taps: tuple[int, ...] | None = None, convention: Convention = "auto") -> HeadOutline:
        """Raises CheckpointError when the files contradict each other or the target, or do not suffice."""
        facts, place = self.facts, self.place
        self.check_target()
        block = read_block(facts.block, place)
        width = self.target_hidden_size(block)
        parallel = self.is_parallel()
        vocab_size = self.vocab_size()
        return HeadOutline(
            method="peagle" if parallel else "eagle3",
            block=block,
            num_layers=integer(facts.block, "num_hidden_layers", place),
            vocab_size=vocab_size,
            draft_vocab_size=self.draft_vocab_size(vocab_size),
            target_hidden_size=width,
            tap_count=self.shape("fc")[-1] // width,
            taps=self.taps(self.shape("fc")[-1] // width, taps, convention),
            max_position=integer(facts.block, "max_position_embeddings", place),
            num_depths=facts.num_depths if parallel else 1,
            mask_token_id=facts.mask_token_id if parallel else None,
            norm_before_residual=facts.norm_before_residual,
            norm_before_fc=facts.norm_before_fc,
        )

    def check_target(self) -> None:
        if self.target is None:
            return
        for key, found, expected in (
            ("vocab_size", self.facts.vocab_size, self.target.vocab_size),
            ("target_hidden_size", self.facts.target_hidden_size, self.target.hidden_size),
        ):
            if found is not None and found != expected:
                raise CheckpointError(
                    f"{self.place}: {key} is {found} but the target has {expected}; "
                    "the head is for another model"
                )

    def target_hidden_size(self, block: BlockConfig) -> int:
        """The target's width, of which fc's is a multiple. Without a target it is the config's, fc's width
        over the taps that the config names, or the head's own width, as vLLM takes it.

        Raises:
            CheckpointError: no such width; an EAGLE-1 head and another target's head are told apart.
        """
        if not self.has("fc"):
            raise CheckpointError(
                f"{self.where} has no tensor {HEAD_NAMES['fc']}; expected a P-EAGLE or EAGLE-3 head"
            )
        width, hidden = self.shape("fc")[-1], block.hidden_size
        query = self.spelled(dialects.layer_name("wq", 0))
        narrow = self.reader.has(query) and self.shape_of(query)[-1] == hidden
        feature = self.target.hidden_size if self.target else self.facts.target_hidden_size
        if not self.has("hidden_norm") and (narrow or width == 2 * hidden):
            raise CheckpointError(
                f"{self.place} looks like an EAGLE-1 head (fc.weight takes {width}, no hidden_norm); "
                f"expected EAGLE-3 or P-EAGLE, fc.weight of n x {feature or 'the width of the target'} "
                "and, for P-EAGLE, mask_hidden"
            )
        count = len(self.facts.own_taps or self.facts.aux_ids or ()) or self.facts.aux_count
        if feature is None and count and width % count == 0:
            feature = width // count
        if feature is None:
            feature = hidden
            if width % hidden:
                raise CheckpointError(
                    f"{self.place} has no target_hidden_size and fc.weight takes {width}, no multiple of the "
                    f"head's width {hidden}; name the target (--target)"
                )
        if width % feature:
            raise CheckpointError(
                f"{self.place}: fc.weight takes {width}, no multiple of the target's width {feature}; "
                "the head is for another model"
            )
        return feature

    def taps(self, count: int, taps: tuple[int, ...] | None, convention: Convention) -> Taps:
        """The caller's taps, else the config's."""
        if taps is None:
            return dialects.resolve_taps(self.facts, count, self.target, convention, self.place)
        dialects.check_tap_range(taps, count, self.target, "the taps option")
        return Taps(taps, "boundaries, by the taps option")

    def is_parallel(self) -> bool:
        """P-EAGLE or EAGLE-3, by mask_hidden and the mask token key, which must agree."""
        has_mask, token = self.has("mask_hidden"), self.facts.mask_token_id
        keys = ", ".join(dialects.MASK_TOKEN_KEYS[:3])
        if not has_mask and (token is not None or self.facts.claims_parallel):
            raise CheckpointError(
                f"{self.where} has no tensor mask_hidden, but its config is P-EAGLE's (mask token {token}); "
                f"expected mask_hidden, or a config without parallel_drafting and {keys}"
            )
        if has_mask and token is None:
            raise CheckpointError(
                f"{self.place} has no mask token id, but the weights have mask_hidden; expected one of {keys}"
            )
        return has_mask

    def vocab_size(self) -> int:
        """The target's, the config's, or the rows of a table that has one for each token."""
        size = self.target.vocab_size if self.target else self.facts.vocab_size
        rows = [self.shape(field)[0] for field in ("embed", "t2d") if size is None and self.has(field)]
        if size is None and not rows:
            raise CheckpointError(
                f"{self.place} has no vocab_size, and no table tells it; name the target (--target)"
            )
        return rows[0] if size is None else size

    def draft_vocab_size(self, vocab_size: int) -> int:
        """From the config, or from lm_head or d2t; all that are there must agree."""
        found = {"draft_vocab_size": self.facts.draft_vocab_size}
        for field in ("lm_head", "d2t"):
            if self.has(field):
                found[f"the rows of {self.name(field)}"] = self.shape(field)[0]
        size = agreed(found, "the draft vocabulary", self.place) or vocab_size
        if self.facts.draft_vocab_size is None and size != vocab_size:
            log.warning("%s does not say draft_vocab_size; %d from its weights", self.place, size)
        return size

    # -- the tensors ---------------------------------------------------------------------------

    def shapes(self, outline: HeadOutline) -> dict[str, Shape]:
        """What the head has or must have: shapes by the names that we save. A table that it shares with the
        target and a map that it does without are left out.

        Raises:
            CheckpointError: the config's norm_before_fc and input_norm disagree.
        """
        d, c = outline.block.hidden_size, outline.feature_size
        if self.has("input_norm") != outline.norm_before_fc:
            raise CheckpointError(
                f"{self.place}: norm_before_fc is {outline.norm_before_fc} but {HEAD_NAMES['input_norm']} is "
                f"{'there' if self.has('input_norm') else 'missing'}; expected both or neither"
            )
        shapes: dict[str, Shape] = {}
        optional = {
            "embed": (outline.vocab_size, d),
            "lm_head": (outline.draft_vocab_size, d),
            "fc_bias": (d,),
            "d2t": (outline.draft_vocab_size,),
            "t2d": (outline.vocab_size,),
        }
        shapes |= {HEAD_NAMES[field]: shape for field, shape in optional.items() if self.has(field)}
        needed: dict[str, Shape] = {"fc": (d, c), "hidden_norm": (d,), "final_norm": (d,)}
        if outline.method == "peagle":
            needed["mask_hidden"] = self._mask_shape(c)
        if outline.norm_before_fc:
            needed["input_norm"] = (c,)
        shapes |= {HEAD_NAMES[field]: shape for field, shape in needed.items()}
        for index in range(outline.num_layers):
            own = layer_shapes(outline.block, 2 * d if index == 0 else None)
            for field in self.layer_fields(index):
                shapes[dialects.layer_name(field, index)] = own[field]
        return shapes

    def layer_fields(self, index: int) -> tuple[str, ...]:
        """A layer's ``BlockParams`` fields: what every layer has, what the file has, what the config asks."""

        def has(field: str) -> bool:
            return self.reader.has(self.spelled(dialects.layer_name(field, index)))

        extra = [field for field in OPTIONAL_FIELDS if has(field)]
        if boolean(self.facts.block, "attention_bias", self.place):
            extra += QKV_BIASES
        if boolean(self.facts.block, "mlp_bias", self.place):
            extra += MLP_BIASES
        if self.facts.needs_qk_norm or set(extra) & set(QK_NORMS):
            extra += QK_NORMS
        return tuple(dict.fromkeys((*COMMON_FIELDS, *extra)))

    def _mask_shape(self, width: int) -> Shape:
        found = self.shape("mask_hidden")
        if found not in ((width,), (1, width), (1, 1, width)):
            raise CheckpointError(
                f"{self.where}: tensor {self.name('mask_hidden')} has shape {list(found)}; "
                f"expected [1, 1, {width}]"
            )
        return found

    def stored(self, name: str, shape: Shape) -> np.ndarray:
        """A tensor by the name that we save, in the dtype of the file.

        Raises:
            CheckpointError: it is missing, misshaped, quantised or not finite.
        """
        if name in MAPS:
            return self.reader.raw(self.spelled(name), shape)
        return self.reader.take(self.spelled(name), shape, None)

    def target_ids(self, outline: HeadOutline, kind: MapKind = "offsets") -> np.ndarray | None:
        """Target ids (Vd,) int32 of the draft vocabulary; None where they are the same.

        Raises:
            CheckpointError: there is no map, or it cannot be one.
        """
        size, in_draft = outline.vocab_size, None
        if self.has("t2d"):
            in_draft = self.stored("t2d", (size,)) != 0
        if not self.has("d2t"):
            if outline.draft_vocab_size < size:
                raise CheckpointError(
                    f"{self.where} drafts {outline.draft_vocab_size} of {size} tokens but has no "
                    "tensor d2t; expected the map from draft to target ids"
                )
            return None
        offsets = self.stored("d2t", (outline.draft_vocab_size,))
        ids = dialects.draft_to_target(offsets, in_draft, size, self.where, kind)
        return None if np.array_equal(ids, np.arange(size)) else ids

    def finish(self) -> None:
        """Raises CheckpointError when a tensor of the file has no place."""
        self.reader.finish(ignore=lambda name: name.endswith("rotary_emb.inv_freq"))
