"""The short form of `make determinism`: alone, in random orders with cancels, after a restart."""

from __future__ import annotations

import pytest

from bench import determinism

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]


def test_answers_are_equal_to_the_last_bit(gguf_path, capsys, tell):
    wrong = determinism.run(36, 2, 48, 16, ["--model", str(gguf_path)])
    tell(capsys.readouterr().out)
    assert wrong == 0


def test_a_single_flipped_bit_is_found():
    class Answer:
        token_ids = (1, 2)
        logprobs = (-0.5, -1.25)
        text = "ab"

    class Other(Answer):
        logprobs = (-0.5, -1.2500001)

    assert determinism.differences([determinism.fingerprint(Answer)], [determinism.fingerprint(Other)]) == [0]
