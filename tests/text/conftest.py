"""The embedded model's text, by zl and by transformers, and template shapes that real models use."""

from __future__ import annotations

import pytest
from gguf import GGUFReader
from tokenizers import pre_tokenizers

from zl.shapes import Shapes
from zl.text.prompt import PromptBuilder
from zl.text.tokenizer import tokenizer_from_gguf


@pytest.fixture(scope="session")
def fields(gguf_path):
    """The tokenizer's fields as plain values."""
    reader = GGUFReader(gguf_path)
    return {key: field.contents() for key, field in reader.fields.items() if key.startswith("tokenizer.")}


@pytest.fixture(scope="session")
def smol(fields):
    return tokenizer_from_gguf(fields)


@pytest.fixture(scope="session")
def builder(smol):
    return PromptBuilder(smol, Shapes())


@pytest.fixture(scope="session")
def theirs(gguf_path):
    """transformers' tokenizer just as it reads the GGUF file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)


@pytest.fixture(scope="session")
def oracle_tokenizer(theirs):
    """transformers' tokenizer with the splitting rule that the file names.

    transformers 5.24 does not look at `tokenizer.ggml.pre = smollm` and splits as GPT-2 does; llama.cpp and the model's
    own tokenizer.json take digits one by one first. It shows only where white space precedes a digit: several blanks or
    line ends, or one blank before a digit that is not ASCII.
    """
    from transformers import PreTrainedTokenizerFast

    backend = type(theirs.backend_tokenizer).from_str(theirs.backend_tokenizer.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    named = {key: getattr(theirs, key) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.chat_template = theirs.chat_template
    return tokenizer


def turns(messages, system=None):
    """Write a conversation as transformers takes it."""
    head = [{"role": "system", "content": system}] if system else []
    return head + [{"role": "assistant" if i % 2 else "user", "content": m} for i, m in enumerate(messages)]


def expected(tokenizer, messages, system=None, template=None):
    return tokenizer.apply_chat_template(
        turns(messages, system), chat_template=template, tokenize=True, add_generation_prompt=True, return_dict=False
    )


def built(builder, messages, system=None, **options):
    return builder.build((system or "").encode(), [m.encode() for m in messages], **options)


@pytest.fixture(scope="session")
def helpers():
    """The three functions above (test files are no package, so they cannot import them)."""
    return expected, built, turns
