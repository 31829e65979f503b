"""Uploading an exported folder to a hub, with the token of the environment and of nowhere else."""

import os
from collections.abc import Mapping
from pathlib import Path

from grpo_nb.exports.errors import ExportError
from grpo_nb.judge.secrets import strike
from grpo_nb.policy.loading import quietly
from grpo_nb.printable import brief

TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Environment variables that hold the token, the first that is set."""


def check(repository: str, environment: Mapping[str, str] = os.environ) -> str:
    """The token to push with.

    Raises:
        ExportError: `repository` is no `owner/name`, or no variable of the environment has a token.
    """
    if not _is_repository(repository):
        raise ExportError(f"push={brief(repository)} is no repository of a hub; give owner/name, e.g. ada/fair-demo")
    token = next((value for name in TOKENS if (value := environment.get(name, "").strip())), None)
    if token is None:
        raise ExportError(
            f"pushing to {repository} needs a token with the right to write. Set {TOKENS[0]} in the environment before "
            "Python starts; a token is never taken from a setting, and never written down"
        )
    return token


def _is_repository(name: object) -> bool:
    """Whether a hub takes it as `owner/name`, by its client's own rule."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    if not isinstance(name, str) or name.count("/") != 1 or name.strip() != name or not all(name.split("/")):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def push(folder: Path, repository: str, token: str, *, shared: Mapping[str, bytes], public: bool = False) -> str:
    """Upload the files of `folder` as one commit, to a repository that is made if missing; returns its address.

    Args:
        shared: content to upload in place of a file's own, by its name in the folder.
        public: whether a new repository can be read by anyone; one that exists stays as it is.

    Raises:
        ExportError: the hub refused, or cannot be reached. The folder stays.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    files = [(path.relative_to(folder).as_posix(), path) for path in sorted(folder.rglob("*")) if path.is_file()]
    try:
        with quietly():
            hub = HfApi(token=token)
            made = hub.create_repo(repository, private=not public, exist_ok=True)
            added = [CommitOperationAdd(name, shared.get(name, path)) for name, path in files]
            hub.create_commit(made.repo_id, added, commit_message="Upload an export of grpo_nb")
    except Exception as error:  # the client's, and its HTTP library's own, which differ from version to version
        causes = [error, *([error.__cause__] if error.__cause__ else [])]
        why = strike("; ".join(f"{type(cause).__name__}: {cause}" for cause in causes), [token])
        raise ExportError(
            f"{folder} was exported, and could not be pushed to {repository}: {why}. Check the token's rights and the "
            "network, then export with push to another folder. Do not upload this one: it has paths of this machine"
        ) from None
    return f"{hub.endpoint}/{made.repo_id}"
