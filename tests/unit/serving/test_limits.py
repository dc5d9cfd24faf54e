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
        ({"max_bytes": 0}, "max_bytes is 0; give an integer >= 1"),
        ({"max_pixels": -1}, "max_pixels is -1; give an integer from 1 to 178,956,970"),
        ({"max_pixels": 10**9}, "max_pixels is 1000000000; give an integer from 1 to 178,956,970"),
        ({"max_queue": 1.5}, "max_queue is 1.5; give an integer >= 1"),
        ({"max_beam": True}, "max_beam is True; give an integer >= 1"),
        ({"timeout": 0}, "timeout is 0; give a finite number > 0"),
        ({"timeout": float("inf")}, "timeout is inf; give a finite number > 0"),
        ({"timeout": float("nan")}, "timeout is nan; give a finite number > 0"),
    ],
)
def test_invalid_limits(limits, message):
    with pytest.raises(ConfigError) as caught:
        Limits(**limits)
    assert str(caught.value) == message
