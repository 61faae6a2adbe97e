"""The client's own tokenizer: where it may come from."""

from __future__ import annotations

import pytest

from zl.client.tokens import ClientTokenizer
from zl.errors import ModelError


def test_what_zl_build_made_is_refused_by_name(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"made by zl build .* name the GGUF file"):
        ClientTokenizer.from_file(tmp_path)


def test_the_embedded_models_file_is_taken(gguf_path):
    tokenizer = ClientTokenizer.from_file(gguf_path)
    assert tokenizer.decode(tokenizer.encode("Hello, world")) == "Hello, world"
