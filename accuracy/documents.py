"""Read YAML files of a fixed shape, and refuse what is wrong with one line that names the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError


class Section(BaseModel):
    """A part of a file: no unknown fields, no silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Kind = TypeVar("Kind", bound=Section)


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice (YAML itself keeps the last one silently)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"field {key!r} is given twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


def read_document(kind: type[Kind], path: Path) -> Kind:
    """Read a YAML file as one of our sections.

    Raises
    ------
    ValueError
        One line that names the file, the field and the value.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be a mapping of fields, got {content!r}")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{path}: {field}: {message}, got {first['input']!r}") from None
