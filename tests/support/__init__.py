"""What test modules have in common. Nothing here is collected as a test.

pytest finds this package by `pythonpath` in pyproject.toml; processes that tests start find it by
the environment that `support.command` makes.
"""

import pkgutil

import pytest

# A failing `assert` in a helper is to show its values, as one in a test does.
pytest.register_assert_rewrite(
    *(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__))
)
