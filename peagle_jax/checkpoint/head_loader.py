"""A head's files as parameters for its target."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from peagle_jax.checkpoint import dialects
from peagle_jax.checkpoint.dialects import HEAD_NAMES, Convention, HeadFacts, MapKind
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.head_reader import HeadReader
from peagle_jax.checkpoint.placing import Places, same_array
from peagle_jax.checkpoint.tensors import Shape, TensorSource
from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.layers.block import BlockParams
from peagle_jax.layers.quantized import QuantizedWeight, dequantize
from peagle_jax.models.stack import TargetParams


class HeadLoader(HeadReader):
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
        super().__init__(facts, source, target, place)
        self.target_params, self.dtype = target_params, dtype

    def load(
        self,
        taps: tuple[int, ...] | None,
        convention: Convention,
        kind: MapKind = "offsets",
        mesh: Mesh | None = None,
        split: bool = True,
    ) -> tuple[DrafterConfig, DrafterParams]:
        outline = self.outline(taps, convention)
        cfg = outline.config(self.place)
        shapes = self.shapes(outline)
        ids = self.target_ids(outline, kind)
        self.places = Places(mesh, cfg, split, self.target)

        def take(field: str) -> jax.Array | None:
            name = HEAD_NAMES[field]
            return self._take(field, name, shapes[name]) if name in shapes else None

        def layer(index: int) -> BlockParams:
            names = {field: dialects.layer_name(field, index) for field in self.layer_fields(index)}
            return BlockParams(
                **{field: self._take(field, name, shapes[name]) for field, name in names.items()}
            )

        layers = tuple(layer(index) for index in range(cfg.num_layers))
        shared = self.target_params
        own = ("fc", "hidden_norm", "final_norm", "mask_hidden", "input_norm", "fc_bias")
        params = DrafterParams(
            embed=self._table("embed", (cfg.vocab_size, cfg.hidden_size), shared.embed),
            lm_head=self._table(
                "lm_head",
                (cfg.draft_vocab_size, cfg.hidden_size),
                shared.embed if shared.lm_head is None else shared.lm_head,
            ),
            layers=layers,
            draft_to_target=None if ids is None else self.places.put("draft_to_target", np.asarray(ids)),
            **{field: take(field) for field in own},
        )
        self.finish()
        return self.places.config, params

    def _take(self, field: str, name: str, shape: Shape) -> jax.Array:
        array = self.reader.take(self.spelled(name), shape, self.dtype)
        return self.places.put(field, array.reshape(-1) if field == "mask_hidden" else array)

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
        return self._take(field, HEAD_NAMES[field], shape)
