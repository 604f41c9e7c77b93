"""Convert configs to TOML and back."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from tbbn.bench.config.resolve import flatten
from tbbn.bench.config.settings import Choice, RunConfig
from tbbn.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib


_LARGEST = 2**20  # bytes; a limit, because /dev/zero never ends


def read_toml(path: str | Path) -> dict[str, Any]:
    """The settings in a TOML file, as dotted names."""
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise UserError(f"{path}: larger than {_LARGEST} bytes, so not a config file.")
        return parse_toml(content.decode())
    except FileNotFoundError:
        raise UserError(f"{path}: no such config file.") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, not a TOML file.") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from None
    except UserError:
        raise
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, numbers too long, tables too deep
        raise UserError(f"{path}: not a TOML file: {error}.") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The settings in a TOML document, as dotted names. Raises ValueError, or RecursionError for deeply nested tables."""
    return flatten(tomllib.loads(text))


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The config as nested dicts that TOML and JSON can represent; :func:`resolve` turns them back into a config."""
    return {f.name: _plain(getattr(config, f.name)) for f in fields(config)}


def to_toml(config: RunConfig | Mapping[str, Any]) -> str:
    """A config, or any nested tables, as a TOML document. A config is written with every setting and option."""
    try:
        import tomli_w
    except ImportError:
        raise UserError("writing a config needs tomli-w; pip install 'tbbn[bench]'.") from None
    text = tomli_w.dumps(to_dict(config) if isinstance(config, RunConfig) else config)
    # Unprintable characters occur only in strings. TOML allows some that a terminal interprets, such as U+202E.
    return "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text)


def _plain(value: Any) -> Any:
    if isinstance(value, Choice):
        return {"name": value.name, **{option: _plain(v) for option, v in value.options}}
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _escaped(sign: str) -> str:
    return f"\\u{ord(sign):04x}" if ord(sign) < 0x10000 else f"\\U{ord(sign):08x}"
