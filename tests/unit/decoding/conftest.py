"""The helpers beside the tests of the search explain their asserts as the tests do."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("table_stepper")
