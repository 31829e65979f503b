"""The demo world on disk, and a model small enough to learn it on two CPU cores in minutes; no download.

Files are in the public formats, so the task classes for real data read them. The SFT file is deliberately flawed:
it follows the stereotype where the text is ambiguous, and invents answers that the text does not have. GRPO has
something real to repair.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from grpo_nb import seeding
from grpo_nb.printable import clean_logger
from grpo_nb.tasks import demo_world
from grpo_nb.tasks.bbq import BBQ
from grpo_nb.tasks.demo_world import INSTRUCTION
from grpo_nb.tasks.halueval import HaluEvalQA
from grpo_nb.tasks.records import DataError
from grpo_nb.types import Example

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["INSTRUCTION", "DemoPaths", "build_model", "build_tokenizer", "ensure", "vocabulary", "write"]

logger = clean_logger(__name__)

STEREOTYPED = 0.7
"""Share of the ambiguous SFT answers that name the stereotype's person; the others say unknown."""
INVENTED = 0.55
"""Share of the unanswerable SFT answers that are made up; the others abstain."""
DRAWS = 2
"""Times that an ambiguous example is in the SFT file, each with its own random answer: a habit, not a fact to memorise.
"""

CONTEXT = 256
"""Tokens that the demo model can see."""
SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "initializer_range": 0.06,
}
"""Sizes of the demo model, by the names of its configuration.

Wide and shallow, with weights three times as large as usual at the start: both make it find the copying circuit
(attend to the word that followed this one before) several times sooner."""
SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
_TURNS = ("<user>", "<assistant>")
_WORD = r" ?\w+(?:'\w+)?|\n| ?[^\w\s]"
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<assistant>' + m['content'] + eos_token if m['role'] == 'assistant' else '<user>' + m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
_ATTEMPTS = 20


@dataclass(frozen=True)
class DemoPaths:
    """Paths of the demo world's files."""

    bbq: Path
    """Folder of one .jsonl file per category."""
    halueval: Path
    """Knowledge, questions and answers, one JSON object a line."""
    sft: Path
    """Chat `messages`, one conversation a line, made from training examples only."""


def ensure(folder: Path, seed: int) -> DemoPaths:
    """The demo files in `folder`, written first where they are missing, changed, or of another seed."""
    if not (manifest := folder / "demo.json").exists():
        return write(folder, seed)
    try:
        if json.loads(manifest.read_text(encoding="utf-8")) == _manifest(folder, seed):
            return paths_in(folder)
    except (OSError, ValueError):
        pass
    logger.warning("the demo data in %s is not what seed %d writes; writing it anew", folder, seed)
    return write(folder, seed)


def write(folder: Path, seed: int) -> DemoPaths:
    """Write the demo world of a seed: mini-BBQ, mini-HaluEval QA and sft.jsonl. The manifest goes last.

    Raises:
        DataError: no sampled world had all held-out words in training (too few templates).
    """
    paths = paths_in(folder)
    for attempt in range(_ATTEMPTS):
        random = Random(f"demo world {seed} {attempt}")
        fairness, grounding = _write_tasks(paths, seed, random)
        if not unseen_words(fairness) | unseen_words(grounding):
            break
    else:
        raise DataError(f"{_ATTEMPTS} demo worlds had words in the test split that training never shows")
    _write_lines(paths.sft, _sft_rows(fairness, grounding, random))
    _replace(folder / "demo.json", json.dumps(_manifest(folder, seed), indent=1))
    return paths


def unseen_words(task: BBQ | HaluEvalQA) -> set[str]:
    """Words of the test split that its training split never shows; the demo world has none."""
    seen, held_out = ({w for e in task.examples(split) for w in _text(e).split()} for split in ("train", "test"))
    return held_out - seen


def vocabulary() -> list[str]:
    """The tokenizer's words, special tokens first; each word as it is and with a space before it."""
    from tokenizers import Regex, pre_tokenizers

    pieces = pre_tokenizers.Split(Regex(_WORD), "isolated").pre_tokenize_str(demo_world.words())
    bare = {piece.strip() for piece, _ in pieces}
    return [*SPECIAL.values(), *_TURNS, "\n", *sorted(form for word in bare for form in (word, f" {word}"))]


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """A word-level tokenizer with a chat template. Spaces belong to words, so decoding gives the text back."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    index = {word: number for number, word in enumerate(vocabulary())}
    inner = Tokenizer(models.WordLevel(index, unk_token=SPECIAL["unk_token"]))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(_WORD), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(word, special=True) for word in (*SPECIAL.values(), *_TURNS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=CONTEXT,
        extra_special_tokens=list(_TURNS),
        **SPECIAL,
    )


def build_model(seed: int) -> "LlamaForCausalLM":
    """A Llama-architecture model of about a million parameters, its weights a function of the seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    ids: dict[str, Any] = {f"{name}_id": number for number, name in enumerate(SPECIAL) if name != "unk_token"}
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        **SIZES,
        **ids,
    )
    with torch.random.fork_rng(devices=[]):  # the constructor uses random numbers, and the caller's must not change
        model = LlamaForCausalLM(config)
    generator = seeding.generator(seed, 0, "demo model")
    with torch.no_grad():
        for matrix in (p for p in model.parameters() if p.dim() > 1):
            matrix.normal_(0.0, config.initializer_range, generator=generator)
    model.eval()
    return model


def _write_tasks(paths: DemoPaths, seed: int, random: Random) -> tuple[BBQ, HaluEvalQA]:
    for category, rows in demo_world.bbq_rows(random).items():
        _write_lines(paths.bbq / f"{category}.jsonl", rows)
    _write_lines(paths.halueval, demo_world.halueval_rows(random))
    return (
        BBQ(paths.bbq, seed, instruction=INSTRUCTION),
        HaluEvalQA(paths.halueval, seed, instruction=INSTRUCTION, evidence=False),
    )


def _sft_rows(fairness: BBQ, grounding: HaluEvalQA, random: Random) -> list[dict[str, Any]]:
    asked = fairness.examples("train")
    again = [example for example in asked if example.columns["condition"] == "ambig"] * (DRAWS - 1)
    examples = [*asked, *again, *grounding.examples("train")]
    random.shuffle(examples)
    return [
        {"messages": [*example.prompt, {"role": "assistant", "content": _flawed(example, random)}]}
        for example in examples
    ]


def _flawed(example: Example, random: Random) -> str:
    """The gold answer, but for questions whose answer is not in the text: those often get a made-up one."""
    columns = example.columns
    if columns.get("condition") == "ambig" and random.random() < STEREOTYPED:
        return f"Answer: {columns['options'][columns['biased']]}"
    if columns.get("answerable") is False and random.random() < INVENTED:
        return f"Answer: {columns['hallucinated_answer']}"
    return example.target or ""


def _text(example: Example) -> str:
    return f"{example.prompt[0]['content']} {example.target}"  # type: ignore[index]


def paths_in(folder: Path) -> DemoPaths:
    return DemoPaths(folder / "bbq", folder / "halueval" / "qa_data.json", folder / "sft.jsonl")


def _manifest(folder: Path, seed: int) -> dict[str, Any]:
    paths = paths_in(folder)
    files = [*(paths.bbq / f"{category}.jsonl" for category in demo_world.CATEGORIES), paths.halueval, paths.sft]
    digests = {f.relative_to(folder).as_posix(): hashlib.blake2b(f.read_bytes(), digest_size=16) for f in files}
    return {"seed": seed, "files": {name: digest.hexdigest() for name, digest in digests.items()}}


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    _replace(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def _replace(path: Path, text: str) -> None:
    """Write to a temporary file and rename it, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8", newline="\n")
    os.replace(draft, path)
