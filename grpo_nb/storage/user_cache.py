"""This user's cache folder, and the key that seals its content.

The content is disposable, and trusted only under a seal made with the key: a file that somebody else put there is made
anew like a damaged one. The key is a file that its owner alone may read; where it cannot exist, nothing is kept.
"""

import hashlib
import json
import os
import secrets
import sys
from pathlib import Path

from grpo_nb.storage.files import write_atomically
from grpo_nb.storage.safe_open import RunError, is_private, opened

FOLDER = "GRPO_NB_CACHE_DIR"
"""Environment variable that moves the cache folder."""
KEY_BYTES = 32


def folder() -> Path:
    """Path of this user's cache folder."""
    if own := os.environ.get(FOLDER):
        return Path(own)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "grpo_nb"
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "grpo_nb"


def key() -> bytes:
    """The key, made anew where no key exists that this user alone can read.

    Raises:
        RunError, OSError: no key exists, and none can be made.
    """
    file = folder() / "key"
    for _ in range(2):
        try:
            if found := _private(file):
                return found
        except (OSError, RunError):  # none, or another user's
            pass
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(file, secrets.token_bytes(KEY_BYTES), mode=0o600)
    raise RunError(f"{file} can be read by others than this user; choose another folder in {FOLDER}")


def seal(key: bytes, data: bytes, *of: str | int) -> int:
    """A keyed digest of bytes and of what they are of, as a signed number of 64 bits."""
    digest = hashlib.blake2b(json.dumps(of).encode(), key=key, digest_size=8)
    digest.update(data)
    return int.from_bytes(digest.digest(), "big", signed=True)


def _private(file: Path) -> bytes | None:
    """The content of a key that this user alone can read."""
    with os.fdopen(opened(file), "rb") as key:
        content = key.read(KEY_BYTES + 1)
        return content if is_private(key.fileno(), 0o077) and len(content) == KEY_BYTES else None
