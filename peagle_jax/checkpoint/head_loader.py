"""A head's tensors and facts as parameters, with every contradiction named."""

from __future__ import annotations

import logging

import jax
import numpy as np
from jax.sharding import Mesh

from peagle_jax.checkpoint import dialects
from peagle_jax.checkpoint.config_reader import read_block
from peagle_jax.checkpoint.dialects import HEAD_NAMES, Convention, HeadFacts, spelling
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.fields import agreed, boolean, integer
from peagle_jax.checkpoint.placing import Places, same_array
from peagle_jax.checkpoint.tensors import Reader, TensorSource, layer_shapes, read_layer
from peagle_jax.config import BlockConfig, ConfigError, DrafterConfig, TargetConfig
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.layers.block import BlockParams
from peagle_jax.layers.quantized import QuantizedWeight, dequantize
from peagle_jax.models.family import COMMON_FIELDS, MLP_BIASES, QK_NORMS, QKV_BIASES
from peagle_jax.models.stack import TargetParams

log = logging.getLogger(__name__)

DEFAULT_NUM_DEPTHS = 8  # the paper's K_train, for a P-EAGLE head that does not say its own

_OPTIONAL_FIELDS = (*QKV_BIASES, "bo", *MLP_BIASES, *QK_NORMS)


class HeadLoader:
    """One head's way from tensors and facts to parameters."""

    def __init__(
        self,
        facts: HeadFacts,
        source: TensorSource,
        target: TargetConfig,
        target_params: TargetParams,
        dtype: np.dtype,
        place: str,
    ) -> None:
        self.facts, self.target, self.target_params = facts, target, target_params
        self.dtype, self.place = dtype, place
        self.reader, self.where = Reader(source), source.place

    def name(self, field: str) -> str:
        return spelling(HEAD_NAMES[field], self.reader.has)

    def has(self, field: str) -> bool:
        return self.reader.has(self.name(field))

    def shape(self, field: str) -> tuple[int, ...]:
        return self._shape_of(self.name(field))

    def _shape_of(self, name: str) -> tuple[int, ...]:
        shape = self.reader.source.shape(name)
        if not shape:
            raise CheckpointError(f"{self.where}: tensor {name} is a single number; expected an array")
        return shape

    def take(self, field: str, shape: tuple[int, ...]) -> jax.Array:
        return self.places.put(field, self.reader.take(self.name(field), shape, self.dtype))

    def load(
        self,
        taps: tuple[int, ...] | None,
        convention: Convention,
        mesh: Mesh | None = None,
        split: bool = True,
    ) -> tuple[DrafterConfig, DrafterParams]:
        facts, target, place = self.facts, self.target, self.place
        self._check_target()
        block = read_block(facts.block, place)
        count = self._tap_count(block)
        if taps is None:
            taps = dialects.resolve_taps(facts, count, target, convention, place)
        else:
            dialects.check_tap_range(taps, count, target, "the taps option")
        parallel = self._is_parallel()
        depths = (facts.num_depths or DEFAULT_NUM_DEPTHS) if parallel else 1
        if parallel and facts.num_depths is None:
            log.warning("%s does not say num_depths; taking the paper's %d", place, DEFAULT_NUM_DEPTHS)
        try:
            cfg = DrafterConfig(
                method="peagle" if parallel else "eagle3",
                block=block,
                num_layers=integer(facts.block, "num_hidden_layers", place),
                vocab_size=target.vocab_size,
                draft_vocab_size=self._draft_vocab_size(),
                target_hidden_size=target.hidden_size,
                taps=taps,
                max_position=integer(facts.block, "max_position_embeddings", place),
                num_depths=depths,
                mask_token_id=facts.mask_token_id if parallel else None,
                norm_before_residual=facts.norm_before_residual,
                norm_before_fc=facts.norm_before_fc,
            )
        except ConfigError as error:
            raise CheckpointError(f"{place}: {error}") from error
        self.places = Places(mesh, cfg, split)
        params = self._params(cfg)
        self.reader.finish(ignore=lambda name: name.endswith("rotary_emb.inv_freq"))
        return self.places.config, params

    def _check_target(self) -> None:
        for key, found, expected in (
            ("vocab_size", self.facts.vocab_size, self.target.vocab_size),
            ("target_hidden_size", self.facts.target_hidden_size, self.target.hidden_size),
        ):
            if found is not None and found != expected:
                raise CheckpointError(
                    f"{self.place}: {key} is {found} but the target has {expected}; "
                    "the head is for another model"
                )

    def _tap_count(self, block: BlockConfig) -> int:
        """How many taps fc takes, after telling an EAGLE-1 head and another target's head apart."""
        if not self.has("fc"):
            raise CheckpointError(
                f"{self.where} has no tensor {HEAD_NAMES['fc']}; expected a P-EAGLE or EAGLE-3 head"
            )
        width, feature, hidden = self.shape("fc")[-1], self.target.hidden_size, block.hidden_size
        query = spelling(dialects.layer_name("wq", 0), self.reader.has)
        narrow = self.reader.has(query) and self._shape_of(query)[-1] == hidden
        if not self.has("hidden_norm") and (narrow or width == 2 * hidden):
            raise CheckpointError(
                f"{self.place} looks like an EAGLE-1 head (fc.weight takes {width}, no hidden_norm); "
                f"expected EAGLE-3 or P-EAGLE, fc.weight of n x {feature} and, for P-EAGLE, mask_hidden"
            )
        if width % feature:
            raise CheckpointError(
                f"{self.place}: fc.weight takes {width}, no multiple of the target's width {feature}; "
                "the head is for another model"
            )
        return width // feature

    def _is_parallel(self) -> bool:
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

    def _draft_vocab_size(self) -> int:
        """From the config, or from lm_head or d2t; all that are there must agree."""
        found = {"draft_vocab_size": self.facts.draft_vocab_size}
        for field in ("lm_head", "d2t"):
            if self.has(field):
                found[f"the rows of {self.name(field)}"] = self.shape(field)[0]
        size = agreed(found, "the draft vocabulary", self.place) or self.target.vocab_size
        if self.facts.draft_vocab_size is None and size != self.target.vocab_size:
            log.warning("%s does not say draft_vocab_size; %d from its weights", self.place, size)
        return size

    def _params(self, cfg: DrafterConfig) -> DrafterParams:
        d, c, take = cfg.hidden_size, cfg.feature_size, self.take
        if self.has("input_norm") != cfg.norm_before_fc:
            raise CheckpointError(
                f"{self.place}: norm_before_fc is {cfg.norm_before_fc} but {HEAD_NAMES['input_norm']} is "
                f"{'there' if self.has('input_norm') else 'missing'}; expected both or neither"
            )
        layers = tuple(BlockParams(**self._layer(cfg, i)) for i in range(cfg.num_layers))
        return DrafterParams(
            embed=self._table("embed", (cfg.vocab_size, d), self.target_params.embed),
            fc=take("fc", (d, c)),
            hidden_norm=take("hidden_norm", (d,)),
            layers=layers,
            final_norm=take("final_norm", (d,)),
            lm_head=self._lm_head(cfg),
            mask_hidden=self._mask_hidden(c) if cfg.method == "peagle" else None,
            input_norm=take("input_norm", (c,)) if cfg.norm_before_fc else None,
            fc_bias=take("fc_bias", (d,)) if self.has("fc_bias") else None,
            draft_to_target=self._map(cfg),
        )

    def _layer(self, cfg: DrafterConfig, index: int) -> dict[str, jax.Array]:
        shapes = layer_shapes(cfg.block, 2 * cfg.hidden_size if index == 0 else None)

        def name_of(field: str) -> str:
            return spelling(dialects.layer_name(field, index), self.reader.has)

        extra = [field for field in _OPTIONAL_FIELDS if self.reader.has(name_of(field))]
        if boolean(self.facts.block, "attention_bias", self.place):
            extra += QKV_BIASES
        if boolean(self.facts.block, "mlp_bias", self.place):
            extra += MLP_BIASES
        if self.facts.needs_qk_norm or set(extra) & set(QK_NORMS):
            extra += QK_NORMS
        fields = dict.fromkeys((*COMMON_FIELDS, *extra))
        return read_layer(self.reader, name_of, fields, shapes, self.dtype, self.places.put)

    def _table(self, field: str, shape: tuple[int, int], shared: jax.Array) -> jax.Array:
        """The head's table, or the target's own array where it is absent or equal."""
        if not self.has(field):
            if shared.shape != shape:
                raise CheckpointError(
                    f"{self.where} has no tensor {self.name(field)}, and the target's "
                    f"{list(shared.shape)} cannot stand in; expected {list(shape)}"
                )
            return shared
        own = self.reader.raw(self.name(field), shape)
        # Compared in the file's dtype: a bfloat16 copy of a wider target's table is that table.
        table = dequantize(shared) if isinstance(shared, QuantizedWeight) else shared
        if shared.shape == shape and same_array(own, table):
            return shared
        return self.take(field, shape)

    def _lm_head(self, cfg: DrafterConfig) -> jax.Array:
        shape = (cfg.draft_vocab_size, cfg.hidden_size)
        table = self.target_params.lm_head
        return self._table("lm_head", shape, self.target_params.embed if table is None else table)

    def _mask_hidden(self, width: int) -> jax.Array:
        name, found = self.name("mask_hidden"), self.shape("mask_hidden")
        if found not in ((width,), (1, width), (1, 1, width)):
            raise CheckpointError(
                f"{self.where}: tensor {name} has shape {list(found)}; expected [1, 1, {width}]"
            )
        mask = self.reader.take(name, found, self.dtype)
        return self.places.put("mask_hidden", mask.reshape(width))

    def _map(self, cfg: DrafterConfig) -> jax.Array | None:
        in_draft = None
        if self.has("t2d"):
            in_draft = self.reader.raw(self.name("t2d"), (cfg.vocab_size,)) != 0
        if not self.has("d2t"):
            if cfg.draft_vocab_size < cfg.vocab_size:
                raise CheckpointError(
                    f"{self.where} drafts {cfg.draft_vocab_size} of {cfg.vocab_size} tokens but has no "
                    "tensor d2t; expected the map from draft to target ids"
                )
            return None
        offsets = self.reader.raw(self.name("d2t"), (cfg.draft_vocab_size,))
        ids = dialects.draft_to_target(offsets, in_draft, cfg.vocab_size, self.where)
        identity = cfg.draft_vocab_size == cfg.vocab_size and not offsets.any()
        return None if identity else self.places.put("draft_to_target", np.asarray(ids))
