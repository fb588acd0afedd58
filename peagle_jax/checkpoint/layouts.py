"""Writes heads in the layouts that others load, and refuses what a layout cannot say.

Sources: vLLM's ``llama_eagle3.py`` and its speculators adapter, speculators' ``eagle3`` and ``peagle``
models, SafeAILab/EAGLE's ``cnets.py``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from peagle_jax.checkpoint.calibration import CALIBRATION
from peagle_jax.checkpoint.config_writer import block_json
from peagle_jax.checkpoint.dialects import AUX_KEY, HEAD_NAMES, MASK_TOKEN_KEYS, OWN_SECTION, layer_name
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.folder import WEIGHTS, replace_folder
from peagle_jax.checkpoint.stored_head import FORMAT_VERSION, StoredHead
from peagle_jax.config import ConfigError, TargetConfig, default_taps
from peagle_jax.models.family import MLP_BIASES, QK_NORMS, QKV_BIASES

Layout = Literal["orbax", "vllm", "speculators", "eagle3"]
LAYOUTS: tuple[Layout, ...] = ("orbax", "vllm", "speculators", "eagle3")

_QKVO = (*QKV_BIASES, "bo")


def write_head(
    folder: Path,
    head: StoredHead,
    layout: Layout,
    target: TargetConfig | None = None,
    calibrated_in: Path | None = None,
) -> None:
    """Writes the head into ``folder``, all of it or nothing. Other files of the folder stay, but for the
    calibration of the weights that were there.

    Args:
        target: only ``eagle3`` needs it, to know that the head's taps are the ones that this layout implies.
        calibrated_in: a folder with the same weights, whose calibration goes with them if there is one.

    Raises:
        CheckpointError: the layout cannot hold the head, or the disk refuses.
    """
    config, tensors = in_layout(head, layout, target)

    def write(into: Path) -> None:
        if layout == "orbax":
            from peagle_jax.checkpoint.orbax import save_arrays  # importing Orbax takes a second

            save_arrays(into, tensors)
        else:
            write_safetensors(into / "model.safetensors", tensors)
        (into / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if calibrated_in is not None and (calibrated_in / CALIBRATION).is_file():
            shutil.copyfile(calibrated_in / CALIBRATION, into / CALIBRATION)

    replace_folder(folder, write, drop=(*WEIGHTS, CALIBRATION))


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A safetensors file that others may read, too."""
    save_file(
        {name: np.ascontiguousarray(value) for name, value in tensors.items()},
        path,
        metadata={"format": "pt"},
    )
    path.chmod(0o644)  # safetensors writes for its owner only


def in_layout(
    head: StoredHead, layout: Layout, target: TargetConfig | None = None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """config.json, and the tensors by the layout's names.

    Raises:
        CheckpointError: the layout cannot hold the head; the message names the tensor or the key.
    """
    if layout == "speculators":
        _check_speculators(head)
        return speculators_config(head), head.tensors
    if layout == "eagle3":
        _check_eagle3(head, target)
        return eagle3_config(head), {
            name.replace("layers.0.", "midlayer.", 1): value for name, value in head.tensors.items()
        }
    return vllm_config(head), head.tensors


# -- vLLM's ------------------------------------------------------------------------------------


def vllm_config(head: StoredHead) -> dict[str, Any]:
    """config.json with every spelling of a key that some loader reads."""
    o, about = head.outline, head.about
    qwen3, parallel = any(head.layer_has("q_norm")), o.method == "peagle"
    architecture = "LlamaForCausalLMEagle3"
    if qwen3:
        architecture = "PeagleQwen3ForCausalLM" if parallel else "Eagle3Qwen3ForCausalLM"
    config = {
        "architectures": [architecture],
        **_flat(head, "qwen3" if qwen3 else "llama"),
        "target_hidden_size": o.target_hidden_size,
        "draft_vocab_size": o.draft_vocab_size,
        "norm_before_residual": o.norm_before_residual,
        "norm_before_fc": o.norm_before_fc,
    }
    taps = _taps(head)
    config |= taps
    config["eagle_config"] = {"use_aux_hidden_state": True} | taps
    if parallel:
        config |= {"parallel_drafting": True} | dict.fromkeys(MASK_TOKEN_KEYS[:3], o.mask_token_id)
        config |= {} if o.num_depths is None else {"num_depths": o.num_depths}
    own = {**about.metadata, "format_version": FORMAT_VERSION}
    own |= {"taps": list(o.taps.boundaries)} if o.taps.boundaries else {}
    own |= {"verifier": about.verifier} if about.verifier else {}
    own |= {"speculative_tokens": about.speculative_tokens} if about.speculative_tokens else {}
    config[OWN_SECTION] = own
    return config


def _flat(head: StoredHead, model_type: str) -> dict[str, Any]:
    """The keys of the block and of the model around it, as a Llama or Qwen3 model's config has them."""
    o, about = head.outline, head.about
    return {
        "model_type": model_type,
        **block_json(o.block),
        "num_hidden_layers": o.num_layers,
        "max_position_embeddings": o.max_position,
        "vocab_size": o.vocab_size,
        "attention_bias": head.layer_has("bq")[0],
        "mlp_bias": head.layer_has("b_gate")[0],
        "tie_word_embeddings": False,
        "bos_token_id": about.bos_token_id,
        "eos_token_id": list(about.eos_token_ids) or None,
        "torch_dtype": head.dtype.name,
    }


def _taps(head: StoredHead) -> dict[str, Any]:
    taps = head.outline.taps.boundaries
    return {AUX_KEY: list(taps)} if taps else {}


# -- speculators' ------------------------------------------------------------------------------


def speculators_config(head: StoredHead) -> dict[str, Any]:
    """config.json of a speculators model: the block nested, the depth under its proposal."""
    o, about = head.outline, head.about
    qwen3, parallel = any(head.layer_has("q_norm")), o.method == "peagle"
    block = _flat(head, "qwen3" if qwen3 else "llama")
    if qwen3:
        del block["mlp_bias"]
    proposal: dict[str, Any] = {"proposal_type": "greedy"}
    tokens = o.num_depths if parallel else about.speculative_tokens
    proposal |= {} if tokens is None else {"speculative_tokens": tokens}
    verifier = {"name_or_path": None, "architectures": [], **about.verifier}
    config: dict[str, Any] = {
        "architectures": ["PEagleSpeculator" if parallel else "Eagle3Speculator"],
        "speculators_model_type": o.method,
        "transformer_layer_config": block,
        "draft_vocab_size": o.draft_vocab_size,
        "norm_before_residual": o.norm_before_residual,
        "norm_before_fc": o.norm_before_fc,
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": None,
        AUX_KEY: list(o.taps.boundaries) if o.taps.boundaries else None,
        "embed_requires_grad": parallel,
        "torch_dtype": head.dtype.name,
        "speculators_config": {
            "algorithm": o.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
    }
    if parallel:
        config["mask_token_id"] = o.mask_token_id
    if about.metadata:
        config[OWN_SECTION] = dict(about.metadata)
    return config


def _check_speculators(head: StoredHead) -> None:
    o = head.outline
    if o.target_hidden_size != o.block.hidden_size:
        raise _unsaid(
            "speculators",
            HEAD_NAMES["fc"],
            f"its target is {o.target_hidden_size} wide and the head {o.block.hidden_size}, not the same",
        )
    _need_tables(head, "speculators", ("embed", "lm_head"))
    _refuse_present(head, "speculators", ("fc_bias",), "its fc has no bias")
    _all_or_none(head, "speculators", (_QKVO, MLP_BIASES, QK_NORMS))
    if any(head.layer_has("q_norm")):
        _refuse_layers(head, "speculators", MLP_BIASES, "its Qwen3 block has no such bias")


# -- original EAGLE-3 --------------------------------------------------------------------------


def eagle3_config(head: StoredHead) -> dict[str, Any]:
    """config.json of an original EAGLE-3 head: a Llama model's, and the draft vocabulary."""
    o = head.outline
    config = {"architectures": ["LlamaForCausalLMEagle3"], **_flat(head, "llama")}
    config["draft_vocab_size"] = o.draft_vocab_size
    if o.target_hidden_size != o.block.hidden_size:
        config["target_hidden_size"] = o.target_hidden_size
    if head.about.metadata:
        config[OWN_SECTION] = dict(head.about.metadata)
    return config


def _check_eagle3(head: StoredHead, target: TargetConfig | None) -> None:
    o = head.outline
    _refuse_present(head, "eagle3", ("mask_hidden",), "EAGLE-3 drafts without mask slots")
    _refuse_present(head, "eagle3", ("input_norm",), "its fc has no norm before it")
    _refuse_present(head, "eagle3", ("fc_bias",), "its fc has no bias")
    if o.num_layers > 1:
        raise _unsaid("eagle3", layer_name("attn_norm", 1), "it has one layer")
    _refuse_layers(head, "eagle3", QK_NORMS, "its block is Llama's, without q and k norms")
    _refuse_layers(head, "eagle3", (*_QKVO, *MLP_BIASES), "its block has no biases")
    if o.norm_before_residual:
        raise _unsaid("eagle3", "norm_before_residual", "its residual is the state before hidden_norm")
    if o.tap_count != 3:
        raise _unsaid("eagle3", HEAD_NAMES["fc"], f"it takes three taps, this head {o.tap_count}")
    _need_tables(head, "eagle3", ("lm_head",))
    if o.taps.boundaries is None:
        return
    if target is None:
        raise CheckpointError(
            f"eagle3 implies the taps (2, L//2, L-3) and this head's are {list(o.taps.boundaries)}; "
            "name the target (--target): its number of layers L tells whether they are the same"
        )
    try:
        implied = default_taps(target.num_layers)
    except ConfigError as error:
        raise CheckpointError(f"eagle3 cannot serve this target: {error}") from error
    if implied != o.taps.boundaries:
        raise _unsaid(
            "eagle3",
            AUX_KEY,
            f"it implies {list(implied)} of {target.num_layers} layers, not {list(o.taps.boundaries)}",
        )


# -- what a layout cannot hold -----------------------------------------------------------------


def _unsaid(layout: str, name: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{layout} cannot hold {name}: {reason}; choose another layout (vllm and orbax hold every head)"
    )


def _refuse_present(head: StoredHead, layout: str, fields: tuple[str, ...], reason: str) -> None:
    for field in fields:
        if HEAD_NAMES[field] in head.tensors:
            raise _unsaid(layout, HEAD_NAMES[field], reason)


def _refuse_layers(head: StoredHead, layout: str, fields: tuple[str, ...], reason: str) -> None:
    for field in fields:
        for index, there in enumerate(head.layer_has(field)):
            if there:
                raise _unsaid(layout, layer_name(field, index), reason)


def _all_or_none(head: StoredHead, layout: str, groups: tuple[tuple[str, ...], ...]) -> None:
    for group in groups:
        found = {layer_name(f, i): there for f in group for i, there in enumerate(head.layer_has(f))}
        if any(found.values()) and not all(found.values()):
            there = next(name for name, has in found.items() if has)
            lacking = next(name for name, has in found.items() if not has)
            raise _unsaid(layout, there, f"it needs {lacking} too, which this head has not")


def _need_tables(head: StoredHead, layout: str, fields: tuple[str, ...]) -> None:
    for field in fields:
        if HEAD_NAMES[field] not in head.tensors:
            raise CheckpointError(
                f"{layout} holds {HEAD_NAMES[field]}, and this head takes its target's; "
                "name the target (--target)"
            )
