"""What the sources of settings say, before any value is read: a TOML file, the environment, a command's flags.

Each gives (setting, where it was said, value), and refuses names that no setting has, with the nearest that one has.
`sections` maps each setting to its TOML table, `instead` names that people write by habit to what they mean. Owns no
state; refuses everything of zl but errors.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from zl.errors import ConfigError

ENV_PREFIX = "ZL_"
OTHER_ENVIRONMENT = frozenset({"ZL_CONFIG", "ZL_CONNECT", "ZL_CA"})
"""Variables that are zl's without being a server setting."""

Instead = Mapping[str, tuple[str, str]]
"""A name that no setting has: the one that is meant, and an example of its value."""

_NONE: Instead = MappingProxyType({})

Said = tuple[str, str, object]
"""A setting's name, where it was said, and what."""


def from_file(
    path: Path, sections: Mapping[str, str], instead: Instead = _NONE, said: str = "config file"
) -> Iterator[Said]:
    """Give the settings of a TOML file. ConfigError: it cannot be read, or line and name of what is no setting."""
    try:
        text = path.read_text("utf-8")
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{said} {path} is not valid TOML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{said} {path}: {getattr(error, 'strerror', None) or error}") from error
    named = sorted(set(sections.values()))
    for section, table in tables.items():
        if section not in named or not isinstance(table, dict):
            kind = "table" if isinstance(table, dict) else "key"
            close = _meant(section, sections, instead) or _suggest(section, named)
            what = _misplaced(section, "", sections) or f"unknown {kind} {section!r}{close}"
            raise ConfigError(f"{path}:{_line_of(text, '', section)}: {what} (tables: {', '.join(named)})")
        for key, value in table.items():
            where = f"{path}:{_line_of(text, section, key)}"
            if sections.get(key) != section:
                nearest = _meant(key, sections, instead) or _nearest(key, section, sections)
                what = _misplaced(key, section, sections) or f"unknown key {key!r} in [{section}]{nearest}"
                raise ConfigError(f"{where}: {what}")
            yield key, where, value


def from_environ(
    environ: Mapping[str, str], sections: Mapping[str, str], instead: Instead = _NONE
) -> Iterator[Said]:
    """Give the settings among the environment's variables. ConfigError: one begins with ZL_ and is none."""
    known = {ENV_PREFIX + name.upper(): name for name in sections}
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX) or variable in OTHER_ENVIRONMENT:
            continue
        if variable not in known:
            meant, example = instead.get(variable.removeprefix(ENV_PREFIX).lower(), ("", ""))
            close = f": that is {ENV_PREFIX}{meant.upper()}={example}" if meant else _suggest(variable, known)
            raise ConfigError(f"unknown environment variable {variable}{close}; mend or unset it")
        yield known[variable], f"environment variable {variable}", environ[variable]


def from_flags(flags: Mapping[str, object], sections: Mapping[str, str]) -> Iterator[Said]:
    """Give the flags that are not None, by the names of their settings. ConfigError: there is no such setting."""
    for name, value in flags.items():
        if name not in sections:
            raise ConfigError(f"unknown setting {name!r}{_suggest(name, sections)}")
        if value is not None:
            yield name, "--" + name.replace("_", "-"), value


def _nearest(key: str, section: str, sections: Mapping[str, str]) -> str:
    """Suggest a name of the key's own table, else one of any, with its table."""
    own = _suggest(key, [name for name, its in sections.items() if its == section])
    close = [] if own else difflib.get_close_matches(key, sections, n=1)
    return own or (f": did you mean {close[0]!r} in [{sections[close[0]]}]?" if close else "")


def _meant(key: str, sections: Mapping[str, str], instead: Instead) -> str:
    """Say which setting is meant by a name that is used for it elsewhere; "" where there is none."""
    meant, example = instead.get(key, ("", ""))
    return f": that is {meant} = {example!r} in [{sections[meant]}]" if meant else ""


def _misplaced(key: str, section: str, sections: Mapping[str, str]) -> str:
    if key not in sections:
        return ""
    return f"{key} belongs in the table [{sections[key]}]" + (f", not in [{section}]" if section else "")


def _line_of(text: str, section: str, key: str) -> int:
    """Find the line that sets `key` in `[section]`; tomllib keeps no positions, so this reads the plain cases again."""
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\[?\s*[\"']?([\w.-]+)[\"']?\s*\]", line):
            current = header[1]
            if (not section and current.split(".")[0] == key) or current == f"{section}.{key}":
                return number
        elif current == section and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[.=]", line):
            return number
    return 1


def _suggest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {close[0]!r}?" if close else ""
