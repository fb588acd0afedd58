"""YAML files, strictly: a key stands once in its mapping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from peagle_jax.train.errors import TrainError
from peagle_jax.train.places import check_path


class _Loader(yaml.SafeLoader):
    """YAML's own reader keeps the last of two values of a key, and says nothing."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            mark, name = key.start_mark, (key.tag, key.value)
            if name in lines:
                raise TrainError(
                    f"{mark.name}: the key {key.value!r} stands twice, in line {lines[name]} and in line "
                    f"{mark.line + 1}; keep one"
                )
            lines[name] = mark.line + 1
        return node


def read_yaml(path: str | Path) -> Any:
    """The file's only document. Raises TrainError: unreadable, not YAML, or a key stands twice."""
    check_path("--config", str(path))
    try:
        with Path(path).open("rb") as file:
            return yaml.load(file, _Loader)
    except TrainError:
        raise
    except OSError as error:
        raise TrainError(f"{path}: {error.strerror or error}; --config names a recipe file") from error
    except RecursionError as error:
        raise TrainError(f"{path} is nested too deeply, expected a recipe of sections and keys") from error
    except Exception as error:  # PyYAML raises what it likes about values that are not of their tag
        raise TrainError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
