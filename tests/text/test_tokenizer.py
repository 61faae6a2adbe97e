"""Tokenizers from GGUF fields and from Hugging Face folders."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from zl.errors import ModelError
from zl.text.tokenizer import text_model, tokenizer_from_folder, tokenizer_from_gguf

RELAXED = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
SAMPLES = ["hello world", "the  quick\n\nbrown fox", "12345 apples", "naïve café 日本語", "don't you're"] * 5


def train(kind):
    model = models.BPE(byte_fallback=kind == "llama", unk_token="<unk>" if kind == "llama" else None)
    tokenizer = Tokenizer(model)
    if kind == "llama":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        specials = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
        trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=specials, show_progress=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator(SAMPLES, trainer)
    return tokenizer


def gguf_fields(kind, tokenizer, **more):
    state = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    types = [3 if t in ("<s>", "</s>") else 2 if t == "<unk>" else 6 if t.startswith("<0x") else 1 for t in tokens]
    fields = {
        "model": kind,
        "tokens": tokens,
        "token_type": types,
        "bos_token_id": tokens.index("<s>"),
        "eos_token_id": tokens.index("</s>"),
        **more,
    }
    if kind == "llama":
        # SentencePiece scores: the earlier merged, the better; pieces that are no merge stay behind all of them.
        rank = {"".join(pair): -float(index) for index, pair in reversed(list(enumerate(state["merges"])))}
        fields["scores"] = [
            0.0 if kind_ != 1 else rank.get(token, -1e6) for token, kind_ in zip(tokens, types, strict=True)
        ]
        fields["unknown_token_id"] = 0
    else:
        fields["merges"] = [" ".join(pair) for pair in state["merges"]]
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def test_embedded_model_has_its_named_and_control_tokens(smol, fields):
    assert (smol.bos_token, smol.eos_token, smol.vocab_size) == ("<|im_start|>", "<|im_end|>", 49152)
    types = fields["tokenizer.ggml.token_type"]
    assert smol.control_ids == {index for index, kind in enumerate(types) if kind == 3}
    assert not smol.add_bos
    assert smol.chat_template == fields["tokenizer.chat_template"]


@RELAXED
@given(text=st.text(max_size=60))
def test_embedded_tokenizer_encodes_as_the_oracle(smol, oracle_tokenizer, text):
    assert smol.tokenizer.encode(text, add_special_tokens=False).ids == oracle_tokenizer.encode(text)


def test_smollm_takes_digits_one_by_one(smol):
    # With GPT-2's own rule the second blank would belong to the digit.
    assert smol.tokenizer.encode("a  12", add_special_tokens=False).tokens == ["a", "ĠĠ", "1", "2"]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "ab 123x", ["ab", "Ġ123", "x"]),
        ("smollm", "ab 123x", ["ab", "Ġ", "1", "2", "3", "x"]),
        ("llama-bpe", "ab 12345x!\n\ny", ["ab", "Ġ", "123", "45", "x", "!ĊĊ", "y"]),
        ("llama3", "(yes) we'LL", ["(yes", ")", "Ġwe", "'LL"]),
        ("qwen2", "ab 123x", ["ab", "Ġ", "1", "2", "3", "x"]),
        ("tekken", "abCd 12", ["ab", "Cd", "Ġ", "1", "2"]),
        ("default", "don't", ["don", "'t"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(pre, text, pieces):
    fields = gguf_fields("gpt2", train("gpt2"), pre=pre)
    split = tokenizer_from_gguf(fields).tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in split] == pieces


def test_llama_bpe_takes_whole_words_of_the_vocabulary():
    # `ignore_merges`: "Ġqzj" is in the vocabulary, but no merge leads to it.
    fields = gguf_fields("gpt2", train("gpt2"), pre="llama-bpe")
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "Ġqzj"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 1]
    assert tokenizer_from_gguf(fields).tokenizer.encode("a qzj").tokens == ["a", "Ġqzj"]
    fields["tokenizer.ggml.pre"] = "gpt-2"
    assert tokenizer_from_gguf(fields).tokenizer.encode("a qzj").tokens == ["a", "Ġ", "q", "z", "j"]


@RELAXED
@given(text=st.text(max_size=40))
def test_byte_level_from_gguf_encodes_as_its_source(byte_level_pair, text):
    source, ours = byte_level_pair
    assert ours.tokenizer.encode(text).ids == source.encode(text).ids


@RELAXED
@given(text=st.text(max_size=40))
def test_sentencepiece_from_scores_encodes_as_its_source(sentencepiece_pair, text):
    source, ours = sentencepiece_pair
    assert ours.tokenizer.encode(text).ids == source.encode(text).ids


@pytest.fixture(scope="module")
def byte_level_pair():
    source = train("gpt2")
    return source, tokenizer_from_gguf(gguf_fields("gpt2", source, pre="gpt-2"))


@pytest.fixture(scope="module")
def sentencepiece_pair():
    source = train("llama")
    return source, tokenizer_from_gguf(gguf_fields("llama", source))


def test_sentencepiece_agrees_with_transformers_reading(sentencepiece_pair):
    from transformers.models.llama.tokenization_llama import LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    source, ours = sentencepiece_pair
    fields = gguf_fields("llama", source)
    tokens, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
    vocab = {token: index for index, token in enumerate(tokens)}
    theirs = LlamaTokenizer(vocab=vocab, merges=generate_merges(vocab, dict(zip(tokens, scores, strict=True))))
    for text in [*SAMPLES[:5], " lead", "trail ", "a\tb", "日本", "🦊 fox"]:
        assert ours.tokenizer.encode(text).ids == theirs.encode(text, add_special_tokens=False)


def test_space_prefix_can_be_off():
    fields = gguf_fields("llama", train("llama"), add_space_prefix=False)
    assert tokenizer_from_gguf(fields).tokenizer.encode("hello").tokens[0].startswith("h")


def test_control_tokens_are_no_result_of_a_merge():
    # "</s" and ">" are pieces here, so a naive recovery of merges would let text become the end token.
    fields = gguf_fields("llama", train("llama"))
    for token in ("<", "/", "s", ">", "</", "</s"):
        if token not in fields["tokenizer.ggml.tokens"]:
            fields["tokenizer.ggml.tokens"].append(token)
            fields["tokenizer.ggml.token_type"].append(1)
            fields["tokenizer.ggml.scores"].append(-2e6)
    model = tokenizer_from_gguf(fields)
    model.tokenizer.encode_special_tokens = True
    assert model.eos_id not in model.tokenizer.encode("a</s>b").ids


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "bert"}, "gpt2"),
        ({"pre": "nobody-knows"}, "smollm"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"token_type": [1, 1]}, "token_type"),
    ],
)
def test_unknown_or_missing_fields_are_named(change, says):
    fields = gguf_fields("gpt2", train("gpt2"), pre="gpt-2")
    fields |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(ModelError, match=says):
        tokenizer_from_gguf(fields)


def folder(tmp_path, config, tokenizer=None):
    tokenizer = tokenizer or train("gpt2")
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_folder_reads_named_tokens_and_template(tmp_path):
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "pad_token": None,
        "add_bos_token": True,
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}],
    }
    model = tokenizer_from_folder(folder(tmp_path, config))
    assert (model.bos_token, model.eos_token, model.add_bos) == ("<s>", "</s>", True)
    assert model.control_ids == {model.bos_id, model.eos_id}
    assert model.chat_template == "yes"
    (tmp_path / "chat_template.jinja").write_text("from its own file")
    assert tokenizer_from_folder(tmp_path).chat_template == "from its own file"


def test_opened_model_of_either_kind_gives_the_same_text_model(tmp_path, fields, smol):
    source = SimpleNamespace(tokenizer_fields=fields, chat_template=smol.chat_template)
    assert text_model(source).sha256 == smol.sha256
    path = folder(tmp_path, {"bos_token": "<s>"})
    source = SimpleNamespace(
        tokenizer_fields={"tokenizer_json": path / "tokenizer.json", "tokenizer_config": {"bos_token": "<s>"}},
        chat_template=None,
    )
    assert text_model(source).sha256 == tokenizer_from_folder(path).sha256
    absent = {"tokenizer_json": tmp_path / "none" / "tokenizer.json", "tokenizer_config": {}}
    with pytest.raises(ModelError, match=rf"{tmp_path}/none/tokenizer\.json is missing"):
        text_model(SimpleNamespace(tokenizer_fields=absent, chat_template=None))


def test_damaged_folder_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="no tokenizer"):
        tokenizer_from_folder(tmp_path)
    path = folder(tmp_path, {"eos_token": "<nowhere>"})
    with pytest.raises(ModelError, match="eos_token"):
        tokenizer_from_folder(path)
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(ModelError, match="no JSON"):
        tokenizer_from_folder(path)


def test_hash_is_stable_and_sees_every_part():
    source = train("gpt2")
    base = gguf_fields("gpt2", source, pre="gpt-2")
    same = tokenizer_from_gguf(dict(base)).sha256
    assert same == tokenizer_from_gguf(base).sha256
    merges = base["tokenizer.ggml.merges"]
    changed = [
        base | {"tokenizer.chat_template": "x"},
        base | {"tokenizer.ggml.pre": "smollm"},
        base | {"tokenizer.ggml.merges": merges[:-1]},
        base | {"tokenizer.ggml.eos_token_id": 5},
        base | {"tokenizer.ggml.add_bos_token": True},
    ]
    assert len({same, *(tokenizer_from_gguf(fields).sha256 for fields in changed)}) == 1 + len(changed)
