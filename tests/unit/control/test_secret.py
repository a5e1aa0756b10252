"""The secret survives its way through an environment variable, and never appears in an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.control.secret import LENGTH, decode_secret, encode_secret, make_secret


def test_every_job_gets_its_own() -> None:
    made = {make_secret() for _ in range(50)}
    assert len(made) == 50
    assert {len(secret) for secret in made} == {LENGTH}


@given(st.binary(min_size=LENGTH, max_size=LENGTH))
def test_encoded_and_decoded_it_is_the_same(secret: bytes) -> None:
    text = encode_secret(secret)
    assert text.isascii()
    assert not set(text) & set(" \n\0'\"$")
    assert decode_secret(text) == secret


@pytest.mark.parametrize("text", ["topsecret!", "abcde", "gaw&bage=", "geheim\u00e9\u00e8=="])
def test_garbled_text_is_an_error_that_does_not_quote_it(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        decode_secret(text)
    assert text not in str(caught.value)


@pytest.mark.parametrize("text", ["", "AAAA"])
def test_a_secret_that_anybody_can_guess(text):
    with pytest.raises(ValueError):
        decode_secret(text)
