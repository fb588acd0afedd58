"""From the trained tree to a head folder that serving (and vLLM) loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from peagle_jax.checkpoint.head import save_head
from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.train.step import Frozen


def export_head(
    folder: str | Path,
    cfg: DrafterConfig,
    target: TargetConfig,
    params: DrafterParams,
    frozen: Frozen,
    draft_ids: np.ndarray | None,
    metadata: dict[str, Any],
) -> Path:
    """Writes the head in bfloat16, without its embedding where that is the target's own.

    Raises CheckpointError: the disk refuses.
    """
    own_embed = params.embed is not None
    whole = params if own_embed else params.replace(embed=frozen.embed)
    if frozen.lm_head is not None:
        whole = whole.replace(lm_head=frozen.lm_head)
    if draft_ids is not None:
        whole = whole.replace(draft_to_target=jnp.asarray(draft_ids))
    save_head(
        folder, cfg, whole, target=target, metadata=metadata, dtype=jnp.bfloat16, share_embed=not own_embed
    )
    return Path(folder)
