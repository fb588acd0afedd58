"""What a model family is: the names of its tensors and which of them a layer has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple


class Names(NamedTuple):
    """One tensor's name in a Hugging Face folder and in a GGUF file."""

    hf: str
    gguf: str


LAYER_NAMES: dict[str, Names] = {
    "attn_norm": Names("input_layernorm.weight", "attn_norm.weight"),
    "wq": Names("self_attn.q_proj.weight", "attn_q.weight"),
    "wk": Names("self_attn.k_proj.weight", "attn_k.weight"),
    "wv": Names("self_attn.v_proj.weight", "attn_v.weight"),
    "wo": Names("self_attn.o_proj.weight", "attn_output.weight"),
    "mlp_norm": Names("post_attention_layernorm.weight", "ffn_norm.weight"),
    "w_gate": Names("mlp.gate_proj.weight", "ffn_gate.weight"),
    "w_up": Names("mlp.up_proj.weight", "ffn_up.weight"),
    "w_down": Names("mlp.down_proj.weight", "ffn_down.weight"),
    "bq": Names("self_attn.q_proj.bias", "attn_q.bias"),
    "bk": Names("self_attn.k_proj.bias", "attn_k.bias"),
    "bv": Names("self_attn.v_proj.bias", "attn_v.bias"),
    "bo": Names("self_attn.o_proj.bias", "attn_output.bias"),
    "b_gate": Names("mlp.gate_proj.bias", "ffn_gate.bias"),
    "b_up": Names("mlp.up_proj.bias", "ffn_up.bias"),
    "b_down": Names("mlp.down_proj.bias", "ffn_down.bias"),
    "q_norm": Names("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "k_norm": Names("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "w_router": Names("mlp.gate.weight", "ffn_gate_inp.weight"),
    "b_router": Names("mlp.gate.bias", "ffn_gate_inp.bias"),
    "sinks": Names("self_attn.sinks", "attn_sinks.weight"),
}
"""Fields of ``BlockParams`` by name, where a family does not rename them. Experts: ``checkpoint.experts``."""

MODEL_NAMES: dict[str, Names] = {
    "embed": Names("model.embed_tokens.weight", "token_embd.weight"),
    "final_norm": Names("model.norm.weight", "output_norm.weight"),
    "lm_head": Names("lm_head.weight", "output.weight"),
}
"""Fields of ``TargetParams`` by name."""

MLP_FIELDS = ("w_gate", "w_up", "w_down")
COMMON_FIELDS = ("attn_norm", "wq", "wk", "wv", "wo", "mlp_norm", *MLP_FIELDS)
QKV_BIASES = ("bq", "bk", "bv")
MLP_BIASES = ("b_gate", "b_up", "b_down")
QK_NORMS = ("q_norm", "k_norm")


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of targets that the shared stack runs.

    ``always`` are the layer fields that it has beside the common ones; ``by_flag`` are those that
    a true boolean in its Hugging Face config adds. ``gguf_permutes_qk``: its GGUF files store the
    rows of q and k for rotation of neighbouring pairs, where the stack rotates half-split pairs.
    ``experts``: how its Hugging Face folders store a mixture's experts, None for a dense family.
    ``alternates``: every second layer, from the first on, has a sliding window where no config says more.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    always: tuple[str, ...] = ()
    by_flag: tuple[tuple[str, tuple[str, ...]], ...] = ()
    gguf_permutes_qk: bool = False
    default_rope_theta: float = 10000.0
    default_rms_norm_eps: float = 1e-6
    experts: Literal["each", "gpt_oss"] | None = None
    alternates: bool = False
    renamed: tuple[tuple[str, Names], ...] = ()

    def names(self, field: str) -> Names:
        """What checkpoints call a ``BlockParams`` field of a layer."""
        return dict(self.renamed).get(field, LAYER_NAMES[field])

    def layer_fields(self, flags: Mapping[str, Any]) -> tuple[str, ...]:
        """The ``BlockParams`` fields that a layer has under these config flags."""
        extra = tuple(f for flag, fields in self.by_flag if flags.get(flag) for f in fields)
        common = COMMON_FIELDS if self.experts is None else (f for f in COMMON_FIELDS if f not in MLP_FIELDS)
        return (*common, *self.always, *extra)
