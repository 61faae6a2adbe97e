"""Client-side tokenizing, for requests that carry token ids: the server's own tokenizer, from the same model files.

Needs the `tokenizers` package, which nothing else of the client does. State: one loaded tokenizer. Refuses torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from zl.client.errors import BadRequest
from zl.client.messages import ServerInfo
from zl.errors import ModelError
from zl.gpu.gguf_header import read_header
from zl.text.layout import Encoder
from zl.text.tokenizer import TextModel, tokenizer_from_folder, tokenizer_from_gguf


class ClientTokenizer(NamedTuple):
    """Turns text into ids and back as the server does; control strings in text are ordinary text here too."""

    model: TextModel
    encoder: Encoder

    @classmethod
    def from_file(cls, path: str | Path) -> ClientTokenizer:
        """Load the tokenizer of a GGUF file or of a Hugging Face folder.

        Raises  ModelError: the file is missing, damaged or of a kind that zl does not know
        """
        path = Path(path)
        if (path / "manifest.json").is_file():
            raise ModelError(
                f"{path} was made by zl build and holds no tokenizer for clients: name the GGUF file or the "
                "Hugging Face folder that it was built from"
            )
        model = tokenizer_from_folder(path) if path.is_dir() else tokenizer_from_gguf(read_header(path).fields)
        return cls(model, Encoder(model, [model.chat_template or ""]))

    def encode(self, text: str) -> list[int]:
        """Turn a text into ids, without the tokens that a template puts around it."""
        return self.encoder.rest(text)

    def decode(self, token_ids: list[int]) -> str:
        """Turn ids into text."""
        return str(self.model.tokenizer.decode(token_ids, skip_special_tokens=False))

    def check(self, server: ServerInfo) -> None:
        """Make sure that the server has the same tokenizer.

        Raises  BadRequest: it has another
        """
        if server.tokenizer_sha256 != self.model.sha256:
            raise BadRequest(
                f"the tokenizer here ({self.model.sha256[:12]}…) is not the server's "
                f"({server.tokenizer_sha256[:12]}…): load it from the files of the model that it serves, {server.model}"
            )
