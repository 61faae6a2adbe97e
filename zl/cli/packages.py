"""Which foreign packages zl needs, and the words for a command that misses one: an installation of the client alone has
protobuf only. Owns no state."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

PACKAGES: Mapping[str, str] = MappingProxyType(
    {
        "torch": "torch",
        "numpy": "numpy",
        "uvloop": "uvloop",
        "google": "protobuf",
        "tokenizers": "tokenizers",
        "prometheus_client": "prometheus-client",
        "safetensors": "safetensors",
        "gguf": "gguf",
        "jinja2": "jinja2",
    }
)
"""The dependencies of pyproject.toml: the module that is imported, the package that has it."""

REMEDY = "install zl with all that it needs: make install in a clone, or pip install WHEEL without --no-deps"


def explain_missing(command: str, error: ModuleNotFoundError) -> str | None:
    """Say what a command misses and what to install; None where the module is no package that zl is installed with."""
    package = PACKAGES.get((error.name or "").partition(".")[0])
    if package is None:
        return None
    return f"{command} needs the package {package}, which is not installed here; {REMEDY}"
