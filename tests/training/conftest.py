"""Trainings here are of a narrow model; a file that needs the demo's own has a `narrow_model` that does nothing."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def small_trainings(narrow_model: None) -> None:
    pass
