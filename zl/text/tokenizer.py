"""Build the tokenizer of a model from its GGUF fields or from its Hugging Face folder.

State: none; a `TextModel` is a frozen value made once at start.
Refuses: asyncio, torch, zl.net, and any file format but `tokenizer.json` (GGUF fields come as plain values).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from zl.errors import ModelError

# Token types of `tokenizer.ggml.token_type` (gguf: TokenType).
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

# How text is split before merging, by `tokenizer.ggml.pre`; the names are llama.cpp's (src/llama-vocab.cpp), the
# patterns are those in the tokenizer.json of the model that each name stands for.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_FAMILIES = {
    "gpt-2": ("gpt-2", "gpt2", "default", "mpt", "olmo", "phi-2", "jais"),
    "smollm": ("smollm", "starcoder", "refact", "command-r", "codeshell"),
    "llama-bpe": ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "falcon3", "dbrx"),
    "qwen2": ("qwen2", "deepseek-r1-qwen"),
    "tekken": ("tekken",),
}
_FAMILY_OF_PRE = {name: family for family, names in _PRE_FAMILIES.items() for name in names}


@dataclass(frozen=True, slots=True)
class TextModel:
    """Everything about a model's text that is decided by its files.

    tokenizer      as the model's authors meant it: control strings in text become control tokens (see zl.text.layout)
    vocab_size     ids run from 0 to vocab_size - 1
    special        named strings that a chat template may use: bos_token, eos_token, unk_token, pad_token
    control_ids    ids that never come from text and have no text of their own
    add_bos        the model wants BOS before a prompt without template; a template writes its own
    sha256         of vocabulary, merges, splitting rules, control tokens and template
    """

    tokenizer: Tokenizer
    vocab_size: int
    bos_id: int | None
    bos_token: str | None
    eos_id: int | None
    eos_token: str | None
    special: Mapping[str, str]
    control_ids: frozenset[int]
    chat_template: str | None
    add_bos: bool
    sha256: str


def tokenizer_from_gguf(fields: Mapping[str, Any]) -> TextModel:
    """Build the text model of a GGUF file from its `tokenizer.*` fields.

    fields   full key (`tokenizer.ggml.tokens`, `tokenizer.chat_template`, …) to plain str, int, bool or list
    Raises   ModelError: field missing, or a `model` or `pre` that zl does not know, naming those it does
    """
    tokens: list[str] = _need(fields, "tokens")
    kind = _need(fields, "model")
    types: list[int] = fields.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"tokenizer.ggml.token_type has {len(types)} entries, not {len(tokens)}; pull the file again")
    if kind == "gpt2":
        tokenizer = _byte_level(fields, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(fields, tokens, types)
    else:
        raise ModelError(f"tokenizer.ggml.model is {kind!r}; zl reads gpt2 (byte-level BPE) and llama (SentencePiece)")

    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special: dict[str, str] = {}
    for name, key in named.items():
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            special[name] = tokens[token_id]
    controls = [t for t, kind_ in zip(tokens, types, strict=True) if kind_ == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in controls])
    own = [t for t, kind_ in zip(tokens, types, strict=True) if kind_ == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in own])
    add_bos = bool(fields.get("tokenizer.ggml.add_bos_token", kind == "llama"))
    return _text_model(tokenizer, len(tokens), special, fields.get("tokenizer.chat_template"), add_bos)


def tokenizer_from_folder(path: str | Path) -> TextModel:
    """Build the text model of a Hugging Face folder from `tokenizer.json` and `tokenizer_config.json`.

    The chat template is `chat_template.jinja` where that file exists, else the configuration's (`default` of several).
    Raises   ModelError: file missing or damaged, naming it
    """
    folder = Path(path)
    config = _read_json(folder / "tokenizer_config.json")
    template = config.get("chat_template")
    jinja_file = folder / "chat_template.jinja"
    if jinja_file.is_file():
        template = jinja_file.read_text(encoding="utf-8")
    return _from_tokenizer_json(folder / "tokenizer.json", config, template)


class TokenizerSource(Protocol):
    """What an opened model says of its tokenizer (zl.gpu.source.WeightSource does)."""

    @property
    def tokenizer_fields(self) -> Mapping[str, Any]:
        """GGUF fields by full key, or `tokenizer_json` (path) and `tokenizer_config` (dict) of a folder."""

    @property
    def chat_template(self) -> str | None:
        """The model's chat template."""


def text_model(source: TokenizerSource) -> TextModel:
    """Build the text model of an opened model, whichever kind of file it came from.

    Raises   ModelError: as tokenizer_from_gguf and tokenizer_from_folder
    """
    fields = source.tokenizer_fields
    if "tokenizer_config" not in fields:
        return tokenizer_from_gguf(fields)
    return _from_tokenizer_json(Path(fields["tokenizer_json"]), fields["tokenizer_config"], source.chat_template)


def _from_tokenizer_json(file: Path, config: Mapping[str, Any], template: Any) -> TextModel:
    if not file.is_file():
        raise ModelError(f"{file} is missing; save one with transformers' save_pretrained")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for every kind of damage
        raise ModelError(f"{file} is no tokenizer that zl can read ({error}); download it again") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    special: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[name] = text
    if isinstance(template, list):  # several named templates; only the default one is for plain chats
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    return _text_model(tokenizer, largest + 1, special, template, bool(config.get("add_bos_token")))


def _need(fields: Mapping[str, Any], name: str) -> Any:
    value = fields.get(f"tokenizer.ggml.{name}")
    if value is None:
        raise ModelError(f"the file has no tokenizer.ggml.{name}, which zl needs to tokenize; use a file that has it")
    return value


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is no JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds no JSON object; download it again")
    return value


def _merge_pairs(merges: list[str]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")  # both vocabularies spell a blank with another character
        pairs.append((left, right))
    return pairs


def _byte_level(fields: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    pre = fields.get("tokenizer.ggml.pre", "default")
    family = _FAMILY_OF_PRE.get(pre)
    if family is None:
        known = ", ".join(sorted(_FAMILY_OF_PRE))
        raise ModelError(f"tokenizer.ggml.pre is {pre!r}, a splitting rule that zl does not know; it knows {known}")
    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=_merge_pairs(_need(fields, "merges")),
        ignore_merges=family in ("llama-bpe", "tekken"),  # so in the tokenizer.json of Llama 3 and Mistral NeMo
    )
    tokenizer = Tokenizer(model)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits = {"llama-bpe": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT, "tekken": _TEKKEN_SPLIT}
    if family in splits:
        split = pre_tokenizers.Split(Regex(splits[family]), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    else:
        by_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, by_words]) if family == "smollm" else by_words
    if family == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    if fields.get("tokenizer.ggml.merges"):
        merges = _merge_pairs(fields["tokenizer.ggml.merges"])
    else:
        merges = _merges_from_scores(tokens, types, _need(fields, "scores"), vocab)
    unknown = fields.get("tokenizer.ggml.unknown_token_id", types.index(_UNKNOWN) if _UNKNOWN in types else None)
    unk_token = tokens[unknown] if unknown is not None else None
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first" if prefix else "never", split=False)
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(
    tokens: list[str], types: list[int], scores: list[float], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """Recover the merge order: SentencePiece always joins the neighbours whose union has the best score."""
    if len(scores) != len(tokens):
        raise ModelError(f"tokenizer.ggml.scores has {len(scores)} entries, not {len(tokens)}; pull the file again")
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind != _NORMAL:  # a control or byte token must never be the result of a merge
            continue
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None and types[left] == types[right] == _NORMAL:
                ranked.append((-score, left, right, token[:cut], token[cut:]))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]


def _text_model(
    tokenizer: Tokenizer, vocab_size: int, special: Mapping[str, str], template: Any, add_bos: bool
) -> TextModel:
    if template is not None and not isinstance(template, str):
        raise ModelError(f"the chat template is a {type(template).__name__}, not text; set chat_template to a string")
    ids = {name: tokenizer.token_to_id(text) for name, text in special.items()}
    for name in ("bos_token", "eos_token"):
        if name in special and ids[name] is None:
            raise ModelError(f"{name} is {special[name]!r}, no token of the vocabulary; correct the configuration")
    control = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    control |= {index for name in ("bos_token", "eos_token") if (index := ids.get(name)) is not None}
    return TextModel(
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        bos_id=ids.get("bos_token"),
        bos_token=special.get("bos_token"),
        eos_id=ids.get("eos_token"),
        eos_token=special.get("eos_token"),
        special=dict(special),
        control_ids=frozenset(control),
        chat_template=template,
        add_bos=add_bos,
        sha256=_digest(tokenizer, control, special, template, add_bos),
    )


def _digest(
    tokenizer: Tokenizer, control: set[int], special: Mapping[str, str], template: str | None, add_bos: bool
) -> str:
    # Only what decides ids and text, in an order of our own: the library's file format may change between versions.
    state = json.loads(tokenizer.to_str())
    model = state["model"]
    decisive = {
        "vocab": sorted(model["vocab"].items(), key=lambda item: (item[1], item[0])) if "vocab" in model else None,
        "merges": [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges", ())],
        "rules": [state["normalizer"], state["pre_tokenizer"], state["decoder"]],
        "model": {key: model.get(key) for key in ("type", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges")},
        "added": state["added_tokens"],
        "control": sorted(control),
        "special": sorted(special.items()),
        "template": template,
        "add_bos": add_bos,
    }
    text = json.dumps(decisive, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()
