"""`pattern`, `names` and `caused_by` hold messages to their tokens, and to them alone."""

import errno

import pytest

from grpo_nb.storage.files import RunError
from tests.support.tokens import caused_by, names

MESSAGE = "objectives.x.beta=0.35 of 'runs/demo': 12 of 40 rows\nlower it, --set KEY=VALUE"


@pytest.mark.parametrize(
    "token", ["objectives.x.beta", "beta", 0.35, "'runs/demo'", 12, 40, "12 of 40", "--set", "KEY=VALUE"]
)
def test_a_token_is_found_wherever_it_stands(token: object) -> None:
    assert names(MESSAGE, token) and names(MESSAGE, "lower", token, 40)


@pytest.mark.parametrize("token", ["bet", "bjectives", 0.3, 35, 2, 4, "KEY=VAL", "gamma", "lower It"])
def test_a_part_of_a_name_or_number_is_not_it(token: object) -> None:
    assert not names(MESSAGE, token) and not names(MESSAGE, 40, token)


def test_the_system_error_behind_an_error_is_told_by_its_number() -> None:
    with pytest.raises(RunError, check=caused_by(errno.EROFS)):
        raise RunError("x") from OSError(errno.EROFS, "read-only")
    full = RunError("x")
    full.__cause__ = OSError(errno.ENOSPC, "full")
    assert not caused_by(errno.EROFS)(full) and not caused_by(errno.EROFS)(RunError("x"))
