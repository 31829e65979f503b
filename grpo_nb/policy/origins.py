"""Digests of a model's content: of the files that it was loaded from, or of the model in memory.

Files are stamped before they are loaded and hashed in a thread meanwhile; a file that changed in between is refused,
so that a digest always belongs to the loaded content.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_nb.policy.adapters import REFERENCE
from grpo_nb.policy.source import ADAPTER_CONFIG, TOKENIZER_FILES, WEIGHT_FILES, Source
from grpo_nb.storage import digests
from grpo_nb.storage.digests import Entry, Part
from grpo_nb.storage.file_stamps import FileRead, Stamp

TOKENIZER_BESIDES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MADE_BY = ("transformers_version", "_name_or_path", "_commit_hash", "_from_model_config", "chat_template")
"""Keys of a settings file that name its writer or its place; the chat template has a digest of its own."""
PLACES = ("base_model_name_or_path", "name_or_path", "tokenizer_file", "special_tokens_map_file")
"""Keys with the places of other files, whose content has digests of its own. Earlier versions counted them in."""
PROBES = (
    "Who was late? The old man; 12,5 % -- isn't it?",
    "  two\n\tlines ",
    "naïve Straße 東京 🙂",
    "def f(x): return x",
)
"""Texts whose ids are part of a tokenizer's digest: they show its handling of case, spaces, digits and other scripts.
"""

HASHERS = 16
"""Weights in memory that are copied from the device and hashed at a time, at most."""
PIECE = 1 << 24
"""Bytes of a weight that are copied from the device at a time."""

Files = Mapping[str, tuple[FileRead, ...]]
"""Stamped files by the part of the model that they make up."""


class Origin:
    """Origin of a model, with the digests of its files.

    Args:
        source: the result of `source.locate`; a hub id has files only once it is loaded. None: made in memory.
    """

    def __init__(self, source: Source | None = None) -> None:
        self.source, self.revision = source, ""
        self.files: Files = {}
        self._begun: _Pending | None = None
        self._in_memory: dict[str, Entry] | None = None
        if source is None:
            return
        if source.kind not in ("hub", "demo") and not (source.base is not None and source.base.kind == "hub"):
            self._begin()

    def loaded(self, model: PreTrainedModel) -> None:
        """Start to hash the files of the hub, which exist once the model is loaded."""
        if self._begun is None and self.source is not None and self.source.kind != "demo":
            self.revision = str(getattr(model.config, "_commit_hash", None) or "")
            self._begin()

    def content(self, model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Entry]:
        """Digests of all that a model was made from, by kind and name; waits for those of its files.

        Raises:
            RunError: a file changed while it was being loaded, or cannot be read.
        """
        files = self._entries()
        if self._in_memory is None:
            self._in_memory = in_memory(model, tokenizer, {key.partition("/")[0] for key in files})
        template = digests.entry([digests.of_text("chat template", _template(tokenizer))])
        return files | self._in_memory | {"template": template}

    def _entries(self) -> dict[str, Entry]:
        if self.source is not None and self.source.kind == "demo":
            return {"weights/base": digests.entry([digests.of_text("demo", self.source.name)], self.source.name)}
        return {} if self._begun is None else self._begun.result()

    def _begin(self) -> None:
        assert self.source is not None, "a model in memory has no files"
        self.files = _stamped(self.source, self.revision)
        self._begun = _Pending(self._hashed)

    def _hashed(self) -> dict[str, Entry]:
        return {
            key: digests.entry((part_of(read.path, read.stamp) for read in reads), _place(reads), self.revision)
            for key, reads in self.files.items()
        }


def in_memory(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, known: set[str]
) -> dict[str, Entry]:
    """Content of a model in memory, for each kind that `known` has no file of: frozen weights, tokenizer, settings.

    Weights that train are no input: a checkpoint has them.
    """
    entries: dict[str, Entry] = {}
    if "weights" not in known and (frozen := dict(_frozen(model))):
        parts = [digests.of_json("config", _settings(model.config.to_dict()))]
        with ThreadPoolExecutor(min(os.cpu_count() or 1, HASHERS)) as pool:  # neither copies nor hashes hold the GIL
            parts += pool.map(_tensor, frozen, frozen.values())
        entries["weights/in memory"] = digests.entry(parts)
    if "tokenizer" not in known:
        entries["tokenizer/in memory"] = digests.entry(_vocabulary(tokenizer))
    if "generation" not in known:
        stated = _settings(model.generation_config.to_diff_dict())
        entries["generation/in memory"] = digests.entry([digests.of_json("generation_config", stated)])
    return entries


def part_of(path: Path, stamp: Stamp | None = None) -> Part:
    """A settings file by its values, any other by its bytes.

    Raises:
        RunError: it changed since it was stamped, or cannot be read.
    """
    by_bytes = digests.of_file(path, stamp)
    if not path.name.endswith("config.json"):
        return by_bytes
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return by_bytes
    if not isinstance(values, dict):
        return by_bytes
    counted = _settings(values)
    part = digests.of_json(path.name, {key: value for key, value in counted.items() if key not in PLACES})
    earlier = digests.of_json(path.name, counted).digest
    return part if earlier == part.digest else part.model_copy(update={"earlier": earlier})


@dataclass
class _Outcome:
    entries: dict[str, Entry] | None = None
    error: BaseException | None = None


class _Pending:
    """Work of a thread of its own, whose result or error is waited for."""

    def __init__(self, work: Callable[[], dict[str, Entry]]) -> None:
        self._outcome = _Outcome()
        self._thread = threading.Thread(target=self._run, args=(work,), name="grpo_nb digests", daemon=True)
        self._thread.start()

    def result(self) -> dict[str, Entry]:
        self._thread.join()
        if self._outcome.error is not None:
            raise self._outcome.error
        return dict(self._outcome.entries or {})

    def _run(self, work: Callable[[], dict[str, Entry]]) -> None:
        try:
            self._outcome.entries = work()
        except BaseException as error:  # raised where the result is read
            self._outcome.error = error


def _stamped(source: Source, revision: str) -> Files:
    found = {key: tuple(paths) for key, paths in _paths(source, revision) if paths is not None}
    return {key: tuple(FileRead(path, Stamp.of(path.stat())) for path in paths) for key, paths in found.items()}


def _paths(source: Source, revision: str) -> Iterator[tuple[str, list[Path]]]:
    """The files that make up a model, by kind and name."""
    if source.kind == "gguf" and source.path is not None:
        yield "weights/base", [source.path]
        return
    base = _folder(source.base or source, revision)
    own = source.path if source.kind == "adapter" else None
    if base is not None:
        yield "weights/base", [*_present(base, "config.json"), *_weights(base)]
        yield "generation", _present(base, "generation_config.json")
    if own is not None:
        yield "weights/adapter", [own / ADAPTER_CONFIG, own / "adapter_model.safetensors"]
    holder = own if own is not None and _tokenizer(own) else base
    if holder is not None and _tokenizer(holder):
        yield "tokenizer", _tokenizer(holder)


def _folder(source: Source, revision: str) -> Path | None:
    """Folder of a model's files; None without one."""
    if source.kind != "hub":
        return source.path
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source.name, "config.json", revision=revision or None)
    return Path(found).parent if isinstance(found, str) else None


def _weights(folder: Path) -> list[Path]:
    """The weights that transformers takes: the one file, else those of the index, else all there are."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        try:
            named = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            named = []
        if named:
            return _present(folder, INDEX, *named)
    return sorted(path for pattern in WEIGHT_FILES for path in folder.glob(pattern))


def _tokenizer(folder: Path) -> list[Path]:
    held = sorted(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern))
    return [*held, *_present(folder, *TOKENIZER_BESIDES)] if held else []


def _present(folder: Path, *names: str) -> list[Path]:
    return [folder / name for name in names if (folder / name).is_file()]


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in MADE_BY}


def _place(reads: tuple[FileRead, ...]) -> str:
    return str(reads[0].path.parent) if reads else ""


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    template: object = tokenizer.chat_template
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True)


def _frozen(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights that do not train, but for the reference, which a checkpoint has as well."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and f".{REFERENCE}." not in name:
            yield name, parameter


def _tensor(name: str, tensor: torch.Tensor) -> Part:
    made = hashlib.sha256()
    for piece in _pieces(tensor.detach().contiguous().flatten().view(torch.uint8)):
        data: Any = piece.numpy()
        made.update(data)
    return Part(name=name, digest=made.hexdigest())


def _pieces(data: torch.Tensor) -> Iterator[torch.Tensor]:
    """A line of bytes in pieces on the CPU; those of a GPU in turn in one page-locked place, at the bus's full rate."""
    room = torch.empty(PIECE, dtype=data.dtype, pin_memory=True) if data.device.type == "cuda" else None
    for piece in data.split(PIECE):
        yield piece.cpu() if room is None else room[: len(piece)].copy_(piece)


def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> list[Part]:
    """Parts of a tokenizer's behaviour, independent of how a version of its library writes it down."""
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    added = {str(i): str(token) for i, token in tokenizer.added_tokens_decoder.items()}
    ids = [list(tokenizer.encode(text, add_special_tokens=False)) for text in PROBES]
    known: Any = getattr(tokenizer, "backend_tokenizer", None)
    merges = json.loads(known.to_str())["model"].get("merges") if known is not None else None
    parts = {"vocabulary": tokenizer.get_vocab(), "merges": merges, "special": special, "added": added, "ids": ids}
    return [digests.of_json(name, value) for name, value in parts.items()]
