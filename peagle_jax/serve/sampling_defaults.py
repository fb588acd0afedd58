"""What a request gets that names no value: the model's generation config, else OpenAI's defaults."""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import ValidationError

from peagle_jax.arguments import CommandError
from peagle_jax.serve.errors import validation_error
from peagle_jax.serve.protocol import GenerationRequest
from peagle_jax.speculative.sampling import SamplingParams


@dataclasses.dataclass(frozen=True)
class SamplingDefaults:
    """``generation_config.json``'s values, else OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_generation_config(cls, values: dict[str, Any]) -> SamplingDefaults:
        """Reads the known keys; None means absent.

        Raises:
            CommandError: a value that a request could not have either.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        found = {name: values[name] for name in names if values.get(name) is not None}
        try:
            GenerationRequest.model_validate(found)
            SamplingParams(**found)
        except ValueError as error:
            reason = validation_error(list(error.errors())) if isinstance(error, ValidationError) else error
            raise CommandError(
                f"the generation config (generation_config.json, a GGUF file's general.sampling, or "
                f"--override-generation-config) is wrong: {reason}; correct the value there, or remove it"
            ) from error
        return cls(**found)

    def describe(self) -> str:
        """For the start-up report."""
        return ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(self).items())


def unserved_defaults(values: dict[str, Any]) -> list[str]:
    """Settings of a generation config that change the answer and are not applied here."""
    neutral = {"no_repeat_ngram_size": 0, "typical_p": 1, "encoder_repetition_penalty": 1}
    return [
        f"{name} {ascii(values[name])[:40]}"
        for name, off in neutral.items()
        if values.get(name) not in (None, off)
    ]
