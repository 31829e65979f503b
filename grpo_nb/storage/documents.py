"""Schemas of a run's files that are read as one: a checkpoint's manifest and state, and the lock."""

from typing import Annotated, Any, Literal, NotRequired, Required

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from grpo_nb.storage.schema import LARGEST_INT, LONGEST_KEY, OPEN, Count, Name, Number, Seconds, Step, loads
from grpo_nb.storage.vocabulary import Command


@with_config(OPEN)
class _Entry(TypedDict):
    bytes: Count
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


@with_config(OPEN)
class Manifest(TypedDict, total=False):
    """manifest.json of a checkpoint."""

    format: Required[int]
    step: Required[Step]
    created: Seconds
    files: Required[Annotated[dict[str, _Entry], Field(max_length=10_000)]]


@with_config(ConfigDict(strict=True, extra="ignore"))
class LockContent(TypedDict):
    """Content of the lock file; additions of later versions are passed over."""

    pid: Annotated[int, Field(ge=-LARGEST_INT, lt=LARGEST_INT)]
    host: Name
    boot: Name
    user: Name
    started: Seconds
    since: Seconds
    heartbeat: Seconds
    token: Name
    doing: NotRequired[Name]


_CLOSED = ConfigDict(strict=True, extra="forbid")
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Mode = Literal["manual", "auto"]
_Command = Annotated[Command, Field(strict=False)]


@with_config(_CLOSED)
class _Beta(TypedDict, total=False):
    value: Required[Annotated[float, Field(ge=0, allow_inf_nan=False)]]
    window: list[Number]
    mode: _Mode
    pinned: Name | None
    automatic: _Finite | None


@with_config(_CLOSED)
class _Moments(TypedDict, total=False):
    count: Count
    mean: _Finite
    squares: _Finite
    largest: _Finite


@with_config(_CLOSED)
class _Recovery(TypedDict):
    factor: Annotated[float, Field(gt=0, le=1)]
    stream: Count
    in_a_row: Count
    healthy: Count


@with_config(_CLOSED)
class _SamplingPlan(TypedDict):
    step: Step
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    stream: Count


@with_config(_CLOSED)
class _Knobs(TypedDict, total=False):
    values: Required[dict[Name, _Finite]]
    modes: Required[dict[Name, _Mode]]
    command: Required[_Command]
    version: Required[Count]
    by: Required[dict[Name, Name]]
    at: Required[dict[Name, Seconds]]
    problem: str | None
    orders: list[_Command]


@with_config(OPEN)
class State(TypedDict, total=False):
    """Content of a checkpoint's state.json; each stage states the fields that it needs."""

    step: Step
    config: dict[str, Any]
    fingerprint: Name
    betas: dict[Name, _Beta]
    reward_moments: dict[Name, _Moments]
    knobs: _Knobs
    judged_by: dict[Name, list[str]]
    recovery: _Recovery
    rollouts: _SamplingPlan


_MANIFEST, _LOCK, _STATE = TypeAdapter(Manifest), TypeAdapter(LockContent), TypeAdapter(State)


def manifest(data: bytes) -> Manifest:
    """A checkpoint's manifest, whose files all lie in its own folder.

    Raises:
        ValueError: it is invalid.
    """
    found = _MANIFEST.validate_python(loads(data))
    for name in found["files"]:
        parts = name.split("/")
        if name.startswith("/") or "\\" in name or "\0" in name or not {"", ".", ".."}.isdisjoint(parts):
            raise ValueError(f"{name!r} is no file of its folder")
    return found


def state(value: Any) -> State:
    """Validated state of a checkpoint.

    Raises:
        ValueError: it is invalid; names the field.
    """
    try:
        return _STATE.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))[:LONGEST_KEY]
        raise ValueError(f"has a wrong '{where}' ({first['msg'].lower()})") from None


def lock_content(data: bytes) -> LockContent:
    """Owner in the content of a lock file.

    Raises:
        ValueError: it names nobody.
    """
    return _LOCK.validate_python(loads(data))
