"""LoRA adapters on disk: opened only where every tensor finds its place, and saved for use elsewhere."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from peft import LoraConfig, PeftModel, PeftModelForCausalLM, get_peft_model_state_dict
from safetensors import safe_open
from transformers import PreTrainedModel

from grpo_nb.policy.loading import quietly
from grpo_nb.policy.source import ModelError, listed

WEIGHTS = "adapter_model.safetensors"
SHOWN = 3
"""Names of tensors that a message lists of each kind, at most."""
_CARRIED = "grpo_nb_carried_embeddings"
_PREFIX = "base_model.model."

Shape = tuple[int, ...]


def reopen(model: PreTrainedModel, folder: Path) -> PeftModel:
    """The model with the saved adapter of `folder`, ready to train on.

    Raises:
        ModelError: the adapter is damaged or of a kind that cannot be trained, or some of its tensors are missing,
            unknown to the model or of another shape: counted and named.
    """
    wrapped, stored = None, {}
    try:
        with quietly():
            stored = _in_file(folder)
            settings = LoraConfig.from_pretrained(str(folder))
            _refuse_new_tokens(settings, model, folder)
            settings.inference_mode = False
            kind = PeftModelForCausalLM if settings.task_type == "CAUSAL_LM" else PeftModel
            wrapped = kind(model, settings, autocast_adapter_dtype=True)
            result = wrapped.load_adapter(str(folder), "default", is_trainable=True, torch_device="cpu")
    except ModelError:
        raise
    except Exception as error:
        if wrapped is not None and (misfits := Misfits.of(wrapped, stored)):
            raise ModelError(_explain(misfits, model, folder)) from error
        raise ModelError(
            f"adapter {folder} is damaged or does not fit its base model ({type(error).__name__}: {error}). Copy it "
            "anew, or correct 'base_model_name_or_path' in its adapter_config.json"
        ) from error
    _refuse_misfits(wrapped, result, stored, folder)
    return wrapped


def save(model: PeftModel, folder: str) -> None:
    """Write the active adapter without the reference; embeddings go along where the adapter was loaded with them."""
    carried = getattr(model, _CARRIED, False)  # peft's `auto` would ask the hub whether the embeddings grew
    model.save_pretrained(folder, selected_adapters=list(model.active_adapters), save_embedding_layers=carried)


@dataclass(frozen=True)
class Misfits:
    """Tensors of an adapter file that do not fit the model, by their names in the file."""

    missing: Sequence[str]
    unknown: Sequence[str]
    unlike: Mapping[str, tuple[Shape, Shape]]
    """Name -> (shape in the file, shape that the model needs)."""
    needed: int
    """Tensors that the model needs in all."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unknown or self.unlike)

    @classmethod
    def of(cls, model: PeftModel, has: Mapping[str, Shape]) -> "Misfits":
        """Mismatches between a file and the model, name by name; the embeddings in the file are optional."""
        needs = _needed(model)
        known = needs | _embeddings(model)
        return cls(
            [name for name in needs if name not in has],
            [name for name in has if name not in known],
            {name: (has[name], shape) for name, shape in known.items() if name in has and has[name] != shape},
            len(needs),
        )


def _refuse_misfits(model: PeftModel, result: Any, stored: Mapping[str, Shape], folder: Path) -> None:
    """`result` has what peft could not place, after it has renamed what older versions saved."""
    needs = _needed(model)
    overwritten = stored.keys() & model.state_dict().keys() - needs.keys() - _embeddings(model).keys()
    misfits = Misfits(_plain(result.missing_keys), [*_plain(result.unexpected_keys), *overwritten], {}, len(needs))
    if misfits:
        raise ModelError(_explain(misfits, cast(PreTrainedModel, model.get_base_model()), folder))
    setattr(model, _CARRIED, bool(stored.keys() & _embeddings(model).keys()))


def _refuse_new_tokens(settings: LoraConfig, model: PreTrainedModel, folder: Path) -> None:
    given = settings.trainable_token_indices or []
    lists = given.values() if isinstance(given, dict) else [given]
    rows = _rows(model)
    if (most := max((index for indices in lists for index in indices), default=0)) >= rows:
        raise ModelError(_other_vocabulary(folder, most + 1, rows))


def _explain(misfits: Misfits, model: PreTrainedModel, folder: Path) -> str:
    if (tokens := _other_tokens(misfits, model)) is not None:
        return _other_vocabulary(folder, tokens, _rows(model))
    shapes = [f"{name} is {list(has)}, needs {list(needs)}" for name, (has, needs) in misfits.unlike.items()]
    parts = {
        f"{len(misfits.missing)} of {misfits.needed} tensors are missing": misfits.missing,
        f"{len(misfits.unknown)} are unknown to the model": misfits.unknown,
        f"{len(misfits.unlike)} have another shape": shapes,
    }
    found = "; ".join(f"{what} ({listed(names, SHOWN)})" for what, names in parts.items() if names)
    return (
        f"adapter {folder} does not fit its base model, a {type(model).__name__}: {found}. Every tensor must find its "
        "place. Copy the adapter anew, or set 'base_model_name_or_path' in its adapter_config.json to the model that "
        "it was trained on"
    )


def _other_tokens(misfits: Misfits, model: PreTrainedModel) -> int | None:
    """Tokens of the adapter's vocabulary, if these alone keep its tensors from fitting."""
    ends = [layer for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer is not None]
    paths = tuple(f"{_PREFIX}{name}." for name, module in model.named_modules() if any(module is end for end in ends))
    rows = _rows(model)
    sizes: set[int | None] = set()
    for name, (has, needs) in misfits.unlike.items():
        sizes |= {h for h, n in zip(has, needs, strict=False) if n == rows != h and name.startswith(paths)} or {None}
    alone = not misfits.missing and not misfits.unknown and len(sizes) == 1
    return sizes.pop() if alone else None


def _other_vocabulary(folder: Path, has: int, needs: int) -> str:
    change = "grew" if has > needs else "shrank"
    return (
        f"adapter {folder} was trained after the vocabulary {change} to {has} tokens; its base model has {needs}. Both "
        f"need the same number. Resize the base model (model.resize_token_embeddings({has})) and either save it with "
        "its tokenizer and set 'base_model_name_or_path' in adapter_config.json to that folder, or merge the adapter "
        "into it (peft: merge_and_unload), save that and set model.name to its folder"
    )


def _rows(model: PreTrainedModel) -> int:
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def _in_file(folder: Path) -> dict[str, Shape]:
    with safe_open(folder / WEIGHTS, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)


def _needed(model: PeftModel, embeddings: bool = False) -> dict[str, Shape]:
    tensors = get_peft_model_state_dict(model, save_embedding_layers=embeddings)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _embeddings(model: PeftModel) -> dict[str, Shape]:
    needed = _needed(model)
    return {name: shape for name, shape in _needed(model, embeddings=True).items() if name not in needed}


def _plain(names: Iterable[str]) -> list[str]:
    """Without the adapter's name, as in a file."""
    return [name.replace(".default", "") for name in names]
