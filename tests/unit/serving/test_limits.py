"""Validation of the limits."""

from __future__ import annotations

import pytest

from captioner.errors import ConfigError
from captioner.serving.limits import Limits


def test_defaults_are_valid():
    assert Limits().max_queue >= 50


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_bytes": 0}, "max-bytes is 0; give a whole number from 1"),
        ({"max_pixels": -1}, "max-pixels is -1; give a whole number from 1"),
        ({"max_pixels": 10**9}, "max-pixels is 1,000,000,000; give 178,956,970 at most"),
        ({"max_queue": 1.5}, "max-queue is 1.5; give a whole number from 1"),
        ({"max_beam": True}, "max-beam is True; give a whole number from 1"),
        ({"timeout": 0}, "timeout is 0; give a positive number of seconds"),
        ({"timeout": float("inf")}, "timeout is inf; give a positive number of seconds"),
        ({"timeout": float("nan")}, "timeout is nan; give a positive number of seconds"),
    ],
)
def test_invalid_limits(limits, message):
    with pytest.raises(ConfigError) as caught:
        Limits(**limits)
    assert str(caught.value) == message
