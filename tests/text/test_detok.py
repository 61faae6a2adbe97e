"""Token bytes, whole characters, stop strings."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from zl.errors import Code, ModelError, RequestError
from zl.text.detok import TextStream, TokenTable
from zl.text.tokenizer import TextModel

RELAXED = settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
FAST = settings(deadline=None, max_examples=600)
SAMPLES = ["hello world", "the  quick brown fox", "   deep indent", "naïve café", "12 apples"] * 5


def model_of(tokenizer, control=()):
    ids = frozenset(tokenizer.token_to_id(token) for token in control)
    return TextModel(tokenizer, tokenizer.get_vocab_size(), None, None, None, None, {}, ids, None, False, "")


def sentencepiece(style):
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    blanks = decoders.Replace("▁", " ")
    if style == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace("▁", prepend_scheme="first")]
        )
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        strip = [decoders.Strip(" ", 1, 0)] if style == "strip" else []
        tokenizer.decoder = decoders.Sequence([blanks, decoders.ByteFallback(), decoders.Fuse(), *strip])
    specials = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    tokenizer.train_from_iterator(
        SAMPLES, trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    )
    # Byte tokens are pieces of the vocabulary, not control tokens: keep only the real ones special.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in ("<unk>", "<s>", "</s>")]
    return Tokenizer.from_str(json.dumps(state))


@pytest.fixture(scope="module", params=["strip", "keep", "metaspace"])
def sp(request):
    tokenizer = sentencepiece(request.param)
    return tokenizer, TokenTable(model_of(tokenizer, ("<unk>", "<s>", "</s>")))


@pytest.fixture(scope="module")
def table(smol):
    return TokenTable(smol)


def fake(*pieces, control=()):
    """A table of given byte strings."""
    made = TokenTable.__new__(TokenTable)
    made.pieces, made.first, made.control_ids = tuple(pieces), {}, frozenset(control)
    return made


def stream_text(table, ids, stops=()):
    stream = TextStream(table, stops)
    parts = [stream.push(token_id) for token_id in ids]
    return [*parts, stream.finish()], stream


@RELAXED
@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_byte_level_text_is_the_tokenizers_decode(smol, table, ids):
    assert table.text_of(ids).decode() == smol.tokenizer.decode(ids, skip_special_tokens=True)


@RELAXED
@given(text=st.text(max_size=60))
def test_byte_level_round_trip(smol, table, text):
    # This vocabulary lacks some bytes (0xF1 for one); every tokenizer drops them.
    known = {piece[0] for piece in table.pieces if len(piece) == 1}
    text = "".join(char for char in text if known.issuperset(char.encode()))
    ids = smol.tokenizer.encode(text, add_special_tokens=False).ids
    assert table.text_of(ids).decode() == text


def test_control_tokens_and_padding_ids_have_no_text(smol, table):
    assert all(table.pieces[token_id] == b"" for token_id in smol.control_ids)
    padded = TokenTable(replace(smol, vocab_size=49160))
    assert [padded.pieces[token_id] for token_id in (49152, 49159)] == [b"", b""]
    assert TextStream(table).push(60_000) == b""


def test_user_defined_tokens_stand_for_their_own_spelling(fields):
    from zl.text.tokenizer import tokenizer_from_gguf

    more = dict(fields)
    more["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "<think now>", "é▁"]
    more["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 4, 4]
    model = tokenizer_from_gguf(more)
    table = TokenTable(model)
    ids = model.tokenizer.encode("a <think now>é▁").ids
    assert {49152, 49153} <= set(ids)
    assert table.text_of(ids).decode() == "a <think now>é▁" == model.tokenizer.decode(ids)


@RELAXED
@given(text=st.text(max_size=40))
def test_sentencepiece_text_is_the_tokenizers_decode(sp, text):
    tokenizer, table = sp
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    ids = [1, *ids, 2] if ids else ids
    assert table.text_of(ids).decode() == tokenizer.decode(ids, skip_special_tokens=True)


@RELAXED
@given(data=st.data())
def test_sentencepiece_any_pieces_decode_alike(sp, data):
    tokenizer, table = sp
    plain = [i for i in range(tokenizer.get_vocab_size()) if not tokenizer.id_to_token(i).startswith("<0x")]
    blanks = [i for i in plain if set(tokenizer.id_to_token(i)) == {"▁"}]
    ids = data.draw(st.lists(st.sampled_from(plain + blanks * 20), max_size=12))
    assert table.text_of(ids).decode() == tokenizer.decode(ids, skip_special_tokens=True)


def test_sentencepiece_bytes_join_to_characters(sp):
    tokenizer, table = sp
    fox = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "🦊".encode()]
    parts, _ = stream_text(table, [*fox, *fox[:2]])
    assert parts == [b"", b"", b"", "🦊".encode(), b"", b"", "�".encode()]


def test_unknown_decoder_is_refused():
    tokenizer = Tokenizer(models.BPE())
    with pytest.raises(ModelError, match="missing"):
        TokenTable(model_of(tokenizer))
    for decoder in (decoders.WordPiece(), decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()])):
        tokenizer.decoder = decoder
        with pytest.raises(ModelError, match="decoder"):
            TokenTable(model_of(tokenizer))


BYTES = st.one_of(
    st.binary(max_size=4),
    st.text(max_size=3).map(str.encode),
    st.sampled_from([b"\xf0", b"\x9f", b"\xf0\x9f\xa6", b"\xed\xa0\x80", b"\xc3", b"\xe2\x82", b"a", b" "]),
)


@FAST
@given(pieces=st.lists(BYTES, min_size=1, max_size=30))
def test_pushes_join_to_the_replaced_whole_and_never_split_a_character(pieces):
    parts, _ = stream_text(fake(*pieces), range(len(pieces)))
    for part in parts:
        part.decode("utf-8", "strict")
    assert b"".join(parts).decode() == b"".join(pieces).decode("utf-8", "replace")


def brute_force(text, stops):
    """Cut at the stop string that is complete first, reading character by character."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


STOPS = st.lists(st.text("ab\n é", min_size=1, max_size=5), min_size=1, max_size=4)


@FAST
@given(words=st.lists(st.text("ab\n é", max_size=4), min_size=1, max_size=20), stops=STOPS, data=st.data())
def test_stop_strings_match_brute_force_however_text_is_cut(words, stops, data):
    whole = "".join(words).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    wanted, hit = brute_force("".join(words), stops)
    parts, stream = stream_text(fake(*pieces), range(len(pieces)), [stop.encode() for stop in stops])
    assert b"".join(parts).decode() == wanted
    assert stream.stopped == hit
    for part in parts:
        part.decode("utf-8", "strict")


@FAST
@given(
    words=st.lists(st.text("ab", max_size=3), min_size=1, max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_exactly_the_suffix_that_could_match_is_held_back(words, stops):
    stream = TextStream(fake(*[word.encode() for word in words]), [stop.encode() for stop in stops])
    seen, shown = "", ""
    for index, word in enumerate(words):
        seen += word
        shown += stream.push(index).decode()
        if stream.stopped:
            break
        held = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert shown == seen[: len(seen) - held]


def test_nothing_follows_a_stop():
    stream = TextStream(fake(b"one", b" END", b" two", b"\xf0"), [b"END"])
    assert [stream.push(i) for i in range(3)] == [b"one", b" ", b""]
    assert stream.stopped
    assert stream.push(3) == b""
    assert stream.finish() == b""


def test_held_text_comes_out_at_the_end():
    stream = TextStream(fake(b"a E", b"N"), [b"END"])
    assert (stream.push(0), stream.push(1), stream.finish(), stream.stopped) == (b"a ", b"", b"EN", False)


def test_broken_character_can_complete_a_stop_at_the_end():
    stream = TextStream(fake(b"a\xf0"), ["�".encode()])
    assert (stream.push(0), stream.finish(), stream.stopped) == (b"a", b"", True)


def test_first_token_loses_its_blank_even_with_stops(sp):
    tokenizer, table = sp
    ids = tokenizer.encode("hello zz", add_special_tokens=False).ids
    parts, stream = stream_text(table, [1, *ids], [b"zz"])
    assert stream.stopped
    assert b"".join(parts).decode() == tokenizer.decode(ids).removesuffix("zz")


@pytest.mark.parametrize(
    ("stops", "code"),
    [
        ([b"x"] * 5, Code.LIMIT_EXCEEDED),
        ([b"x" * 65], Code.LIMIT_EXCEEDED),
        ([b""], Code.LIMIT_EXCEEDED),
        ([b"\xff"], Code.BAD_REQUEST),
    ],
)
def test_bad_stops_are_named(stops, code):
    with pytest.raises(RequestError, match="stop") as caught:
        TextStream(fake(b""), stops)
    assert caught.value.code == code
    assert caught.value.field.startswith("stop")
