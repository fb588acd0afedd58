"""XLA's own settings, which are read once, before the first array."""

from __future__ import annotations

import os
from importlib.metadata import version

FUSIONS = "--xla_cpu_experimental_ynn_fusion_type"
KNOWN_IN = ((0, 10), (0, 13))
"""From and before these releases of jaxlib. XLA ends the process over a flag that it does not know."""

WITHOUT = "--xla_disable_hlo_passes"


def tune_cpu() -> None:
    """Spares XLA:CPU two habits that cost more than they bring. Values of the user's in XLA_FLAGS stay.

    It takes single products from its kernel library, YNNPACK, and nothing around them: by default it also
    hands whole chains of elementwise operations and reductions over, which then run on one core each. On two
    cores with AMX, 512 tokens of a SmolLM2 head's training took 4.2 s a step so and 1.8 s with single
    products (2.4 and 1.4 s in bfloat16), and decoding gained 9 %.

    Reductions of more than 32 values are not split in two: the first half becomes a windowed reduction, which
    fuses with nothing and runs on one core. A log-sum-exp of 64 rows of 49,152 takes 1.5 ms so and 6.8 ms
    split, as exactly; decoding rounds take 0.81 to 0.96 of the time.

    No other platform reads the first, and the pass of the second is XLA:CPU's (XLA:GPU's has another name).
    """
    flags = os.environ.get("XLA_FLAGS", "")
    release = tuple(int(part) for part in version("jaxlib").split(".")[:2])
    if FUSIONS not in flags and KNOWN_IN[0] <= release < KNOWN_IN[1]:
        flags += f" {FUSIONS}=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
    if WITHOUT not in flags:
        flags += f" {WITHOUT}=tree_reduction_rewriter"
    os.environ["XLA_FLAGS"] = flags.strip()
