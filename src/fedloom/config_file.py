"""Reading a configuration's file: YAML by the safe loader, and overrides from a command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fedloom.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """The safe loader, which also refuses a key that stands twice: YAML would silently take the last one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key.value, str):  # a list or a mapping: the safe loader says what is wrong with it
                continue
            if key.tag != "tag:yaml.org,2002:merge" and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping.

    Raises:
        ConfigError: it cannot be read, is not YAML, holds something else, or gives a key twice.
    """
    try:
        plain = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML in UTF-8: {error}") from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, such as 'data: …'.")
    return plain


def override_key(plain: dict[str, Any], override: str) -> None:
    """Set a dotted key, ``a.b=c``, in place; the value is YAML.

    Raises:
        ConfigError: it has not that form, or a part of the key is no section.
    """
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override!r} is not of the form section.key=value.")
    *sections, last = key.split(".")
    for section in sections:
        if plain.get(section) is None:  # absent, or a heading with nothing below it
            plain[section] = {}
        inner = plain[section]
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override!r}: {section!r} is not a section.")
        plain = inner
    try:
        plain[last] = yaml.load(value, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML.") from error
