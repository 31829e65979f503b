"""The type checker that tests run under: beartype, reading hints as mypy does."""

import typing

from beartype import BeartypeConf, FrozenDict, beartype

check = beartype(
    conf=BeartypeConf(
        is_pep484_tower=True,  # an int is a fine float
        hint_overrides=FrozenDict({typing.Self: typing.Any}),  # Self needs a whole class, hooks see methods
    )
)
