"""Location of a model's files: a name in the settings is `demo`, a folder, a LoRA adapter, a .gguf file or a hub id."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_nb.printable import Clean

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")


WEIGHT_FILES = ("*.safetensors",)


PICKLE_FILES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


ADAPTER_CONFIG = "adapter_config.json"


UNSUPPORTED_LORA = {
    "bias": "biases of the base model train in addition to the adapter, so the reference would change with them",
    "layer_replication": "its copied layers belong to one adapter, so there is no frozen reference of them",
    "alora_invocation_tokens": "it acts after certain tokens only, which a batch of prompts does not say",
    "arrow_config": "it chooses between several adapters, and one adapter is trained here",
    "monteclora_config": "its weights are random in each pass, so log-probs would not be those of the sampled policy",
}
"""Settings of LoRA with which a policy cannot have a frozen reference or a fixed distribution, with the reason."""


class ModelError(Clean, ValueError):
    """Raised when a model or tokenizer cannot be used; the message has what was found, what is needed, and the fix."""


@dataclass(frozen=True)
class Source:
    """Location of a model's files; `name` finds them again from any working directory."""

    kind: Literal["demo", "folder", "adapter", "gguf", "hub"]
    name: str
    path: Path | None = None
    base: "Source | None" = None
    """The model that an adapter folder belongs to."""
    seed: int = 0
    """Seed of the demo model's weights."""


def locate(name: str, seed: int = 0) -> Source:
    """Source that `name` stands for, one of five kinds; reads local files, never the network.

    `demo:3` is the demo model of seed 3; an adapter of the demo model records its base in this form.

    Raises:
        ModelError: no such file or folder, or a folder that holds no usable model.
    """
    if demo := re.fullmatch(r"demo(?::(\d+))?", name):
        seed = int(demo[1]) if demo[1] else seed
        return Source("demo", f"demo:{seed}", seed=seed)
    path = Path(name).expanduser()
    if path.is_file():
        return _file(path.resolve(), name)
    if path.is_dir():
        return _folder(path.resolve())
    if _looks_like_path(name):
        raise ModelError(f"model.name='{name}': no such file or folder. {_nearest(path)}")
    return Source("hub", name)


def _file(path: Path, name: str) -> Source:
    if path.suffix.lower() != ".gguf":
        raise ModelError(
            f"model.name='{name}' is a file of type '{path.suffix}'; needs a .gguf file, or the folder that holds "
            "config.json, *.safetensors and the tokenizer"
        )
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(f"{path} is no GGUF file (it begins with {magic!r}); download it again")
    return Source("gguf", str(path), path)


def _folder(path: Path) -> Source:
    if (path / ADAPTER_CONFIG).is_file():
        return _adapter(path)
    found = f"folder {path} holds {listing(path)}"
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        advice = f"give the file itself: model.name='{ggufs[0]}'" if ggufs else "give the folder that has them"
        raise ModelError(f"{found}; needs config.json and *.safetensors (or {ADAPTER_CONFIG}): {advice}")
    if not holds(path, WEIGHT_FILES):
        raise ModelError(no_safetensors(found, holds(path, PICKLE_FILES)))
    return Source("folder", str(path), path)


def _adapter(path: Path) -> Source:
    settings = _adapter_settings(path / ADAPTER_CONFIG)
    found = f"adapter folder {path} holds {listing(path)}"
    if not (path / "adapter_model.safetensors").is_file():
        raise ModelError(f"{found}; needs adapter_model.safetensors (pickled weights are refused: they can run code)")
    if settings.get("peft_type") != "LORA":
        raise ModelError(f"adapter folder {path} is of type {settings.get('peft_type')}; only LORA can be trained here")
    refuse_unsupported(settings, f"adapter folder {path}")
    base = settings.get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        raise ModelError(
            f"{path / ADAPTER_CONFIG} does not name its base model; set 'base_model_name_or_path' in it to a hub id "
            "or a folder"
        )
    if (Path(base) / ADAPTER_CONFIG).is_file():
        raise ModelError(f"adapter {path} stands on another adapter, {base}; merge that one into its base model first")
    return Source("adapter", str(path), path, base=locate(base))


def refuse_unsupported(settings: Mapping[str, Any], where: str) -> None:
    """Refuse a kind of LoRA that cannot be trained here, by the fields of its configuration.

    Raises:
        ModelError: names the field, the reason and what to do.
    """
    for field, why in UNSUPPORTED_LORA.items():
        if (value := settings.get(field)) not in (None, "none", []):
            raise ModelError(
                f"{where} has {field}={value!r}, which cannot be trained here: {why}. Use a LoRA adapter without it, "
                "or the base model with the adapter merged into it, where peft can do that"
            )


def _adapter_settings(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read ({error}); copy the adapter anew, or save it again") from None
    if not isinstance(settings, dict):
        raise ModelError(f"{file} holds a JSON {type(settings).__name__}, needs an object as peft writes it")
    return settings


def no_safetensors(found: str, pickled: bool) -> str:
    why = "its weights are pickled, which can run code when read" if pickled else "there are no weights"
    return (
        f"{found}: {why}; needs *.safetensors. Where you trust the source, convert once: "
        "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
    )


def _looks_like_path(name: str) -> bool:
    return bool(re.match(r"[./~\\]|[A-Za-z]:\\", name)) or name.endswith(".gguf") or name.count("/") > 1


def _nearest(path: Path) -> str:
    parent = next((p for p in path.absolute().parents if p.is_dir()), Path.cwd())
    return f"The nearest folder that exists is {parent}; it holds {listing(parent)}. Correct the path"


def holds(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def listing(folder: Path) -> str:
    try:
        names = sorted(p.name + "/" * p.is_dir() for p in folder.iterdir())
    except OSError as error:
        return f"(unreadable: {error.strerror})"
    return listed(names, 12) if names else "nothing"


def listed(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
