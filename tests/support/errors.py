"""Messages of exceptions."""

import pytest


def message(error: pytest.ExceptionInfo, *words) -> str:
    """The message of an exception, which must be one line and contain all these words."""
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert str(word) in text, text
    return text
