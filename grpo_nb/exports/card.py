"""The model card of an export: README.md, filled from the run's own files.

All texts of a run are data: in the text each mark of Markdown and HTML in it is escaped, in the metadata it is a YAML
string, in the example a Python string. Keys are struck out, and home folders shortened. The card of a pushed export has
the last names of local paths only.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_nb import __version__, presets
from grpo_nb.config import Config
from grpo_nb.evaluation.compare import Stage, is_of, logged
from grpo_nb.judge.redaction import known_secrets, redacted
from grpo_nb.policy.source import Source
from grpo_nb.printable import clean_logger, one_line
from grpo_nb.report.tables import cell, interval
from grpo_nb.run import dependencies_file
from grpo_nb.run.run import Run

logger = clean_logger(__name__)

PICTURE = "curves.png"
LONGEST_README = 1 << 20
"""Bytes of a base model's README.md that are searched for its licence."""
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,39}")
_MARKS = re.compile(r"[\\`*_\[\]<>|&$~#:/@!]|(?<!\d)\.|\.(?!\d)")
"""Characters that begin or end markup in Markdown, its extensions, or HTML; a decimal point does not."""
_USES = {
    "adapter": (
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        "base = AutoModelForCausalLM.from_pretrained({base})\n"
        'model = PeftModel.from_pretrained(base, "FOLDER_OR_REPOSITORY")\n'
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_REPOSITORY")'
    ),
    "merged": (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("FOLDER_OR_REPOSITORY")\n'
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_REPOSITORY")'
    ),
    "gguf": (
        "from grpo_nb import load_policy\n"
        "from grpo_nb.config import ModelConfig\n\n"
        'policy = load_policy(ModelConfig(name="FOLDER/{file}"))  # llama.cpp reads the file, too'
    ),
}


_FOUR_BITS = (
    "import torch\n"
    "from transformers import AutoModelForCausalLM, BitsAndBytesConfig\n\n"
    "four_bits = BitsAndBytesConfig(\n"
    "    load_in_4bit=True,\n"
    '    bnb_4bit_quant_type="nf4",\n'
    "    bnb_4bit_use_double_quant=True,\n"
    "    bnb_4bit_compute_dtype=torch.{dtype},\n"
    ")\n"
    "base = AutoModelForCausalLM.from_pretrained({base}, quantization_config=four_bits)"
)
"""The base of an adapter that was trained on NF4 weights, as `quantised.nf4` loads it."""


@dataclass(frozen=True)
class Contents:
    """Contents of an export."""

    format: str
    stage: Stage
    """`sft`, or the step of a checkpoint."""
    source: Source
    """Source of the model that training started from."""
    weights: str
    """The file of the weights."""
    picture: bool
    pushed: bool = False
    """Whether others read it: of a local path it then has the last name."""


def card(run: Run, contents: Contents) -> str:
    """The README.md of an export."""
    secrets = known_secrets()
    name = escaped(redacted(run.name, secrets))
    step = "after SFT" if contents.stage == "sft" else f"at step {contents.stage} of GRPO"
    base = contents.source.base or contents.source
    parts = [
        _metadata(contents, base),
        f"# {name}",
        f"A language model {step}, trained with grpo\\_nb {escaped(__version__)} on "
        f"{escaped(', '.join(run.config.objectives))}. All numbers below are read from the log of the run.",
        *_use(run.config, contents, base, secrets),
        "## Model",
        _table(("", ""), _model_facts(run, contents, base, secrets)),
        "## Data",
        _table(("objective", "task", "data", "content"), _data(run, contents, secrets)),
        "## Evaluation",
        *_evaluation(run, contents.stage),
        *(("## Curves", f"![Curves of the training: reward, KL, beta, length]({PICTURE})") if contents.picture else ()),
        "## Settings",
        *_settings(run.config, contents, secrets),
    ]
    return "\n\n".join(parts) + "\n"


def escaped(value: object) -> str:
    r"""A value as text of Markdown, on one line: no mark of it, and no tag of HTML, is one.

    >>> escaped("a|b *c* [d](e) <f>")
    'a\\|b \\*c\\* \\[d\\](e) \\<f\\>'
    """
    return _MARKS.sub(r"\\\g<0>", one_line(value))


def last_name(path: str) -> str:
    """Last name of a local path."""
    return Path(os.path.abspath(os.path.expanduser(path))).name


def is_local(source: Source) -> bool:
    """Whether its name is a path on this machine."""
    return source.kind in ("folder", "adapter", "gguf")


def licence(base: Source) -> str | None:
    """The licence that the base model's own files state; None where they do not. It makes no network requests."""
    if base.kind == "gguf":
        return _named(_gguf_licence(base.path))
    readme = _readme(base)
    try:
        if readme is None or not readme.is_file() or readme.stat().st_size > LONGEST_README:
            return None
        from huggingface_hub.repocard import metadata_load

        found: Any = metadata_load(readme)
    except Exception:  # YAML of anybody
        logger.debug("the licence in %s cannot be read", readme, exc_info=True)
        return None
    return _named(found.get("license")) if isinstance(found, dict) else None


def nearest_preset(config: Config) -> tuple[str, dict[str, tuple[Any, Any]]]:
    """The preset with the fewest settings that differ, and those settings with (its, the run's)."""
    found = {name: make().differences(config) for name, make in presets.PRESETS.items()}
    name = min(found, key=lambda name: len(found[name]))
    return name, found[name]


def _named(value: Any) -> str | None:
    text = str(value).strip().lower() if isinstance(value, str) else ""
    return text if _LICENCE.fullmatch(text) else None


def _gguf_licence(path: Path | None) -> Any:
    from gguf import GGUFReader

    field = GGUFReader(str(path)).fields.get("general.license")
    return None if field is None else field.contents()


def _readme(base: Source) -> Path | None:
    if base.kind == "hub":
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(base.name, "README.md")
        return Path(found) if isinstance(found, str) else None
    return None if base.path is None else base.path / "README.md"


def _metadata(contents: Contents, base: Source) -> str:
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        license=licence(base),
        base_model=base.name if base.kind == "hub" else None,
        library_name={"adapter": "peft", "merged": "transformers"}.get(contents.format),
        pipeline_tag="text-generation",
        tags=["grpo", "grpo_nb", *(["gguf"] if contents.format == "gguf" else [])],
    )
    return f"---\n{data.to_yaml()}\n---"


def _use(config: Config, contents: Contents, base: Source, secrets: Sequence[str]) -> Iterator[str]:
    name = json.dumps(redacted(_named_in(contents, base), secrets))
    code = _USES[contents.format].replace("{base}", name)
    yield f"```python\n{code.replace('{file}', contents.weights)}\n```"
    if contents.format == "adapter" and config.model.quantize == "nf4":
        dtype = "bfloat16" if config.model.dtype == "auto" else config.model.dtype
        yield (
            "The adapter was trained on the base with 4-bit weights (NF4). To load them, install `bitsandbytes` and "
            "`accelerate` and replace the line `base = ...`; as it stands, the base is not quantised, and answers may "
            "differ."
        )
        yield f"```python\n{_FOUR_BITS.replace('{dtype}', dtype).replace('{base}', name)}\n```"


def _model_facts(run: Run, contents: Contents, base: Source, secrets: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield "base model", _shown(_named_in(contents, base), secrets)
    yield "licence of the base model", licence(base) or "not stated in its files"
    yield "format", contents.format
    yield "stage", "SFT" if contents.stage == "sft" else f"GRPO, step {contents.stage}"
    yield "algorithm", run.config.algorithm.name
    yield "seed", str(run.config.run.seed)


def _named_in(contents: Contents, source: Source) -> str:
    return last_name(source.name) if contents.pushed and is_local(source) else source.name


def _data(run: Run, contents: Contents, secrets: Sequence[str]) -> Iterator[tuple[str, ...]]:
    digests, sft = _digests(run), run.config.sft
    asked = [(f"data/{name}", name, one.task, one.data) for name, one in run.config.objectives.items()]
    for key, name, task, data in [*asked, *([("data/sft", "SFT", "", sft.data)] if sft.steps else [])]:
        yield name, task, _shown(last_name(data) if contents.pushed and data else data, secrets), digests.get(key, "")


def _digests(run: Run) -> dict[str, str]:
    """The beginning of each digest that the run depends on, by name."""
    try:
        ledger = dependencies_file.read(run.path)
    except Exception:
        logger.warning("what the run depends on cannot be read", exc_info=True)
        ledger = None
    return {} if ledger is None else {name: entry.digest[:12] for name, entry in ledger.entries.items()}


def _evaluation(run: Run, stage: Stage) -> Iterator[str]:
    """Held-out measures of base, SFT and the exported stage, in the modes that they were measured in."""
    stages: dict[str, Stage] = {"base": "base"}
    if run.config.sft.steps:
        stages["SFT"] = "sft"
    if stage != "sft":
        stages["this model"] = stage
    lines, start = [], "SFT" if run.config.sft.steps else "base"
    for mode in ("greedy", "sample", "quick"):
        rows = logged(run, "test", mode)
        for objective in dict.fromkeys(row["objective"] for row in rows):
            own = [row for row in rows if row["objective"] == objective]
            known = stages | {start: 0} if mode == "quick" else stages  # which begins by measuring what SFT left
            newest = {name: next((r for r in reversed(own) if is_of(r, s)), None) for name, s in known.items()}
            metrics = dict.fromkeys(name for row in newest.values() if row is not None for name in row["metrics"])
            lines += [
                (objective, metric, mode, *(_measured(row, metric) for row in newest.values())) for metric in metrics
            ]
    if not lines:
        yield "None of these stages was evaluated on held-out examples."
        return
    yield (
        "Held-out examples, with 95% intervals over templates and texts. `greedy` takes the likeliest token, `sample` "
        "draws; `quick` is greedy on the few questions that were asked while it trained."
    )
    yield _table(("objective", "metric", "mode", *stages), lines)


def _measured(row: Any, metric: str) -> str:
    numbers = None if row is None else row["metrics"].get(metric)
    if numbers is None:
        return ""
    return interval(*(float("nan") if (v := numbers.get(key)) is None else v for key in ("value", "low", "high")))


def _settings(config: Config, contents: Contents, secrets: Sequence[str]) -> Iterator[str]:
    name, found = nearest_preset(config)
    if not found:
        yield f"Those of the preset `{name}`."
        return
    yield f"{len(found)} of them differ from the preset `{name}`, which is the nearest:"
    rows = [
        (key, _shown(_plain(theirs), secrets), _shown(_plain(_setting(key, mine, contents)), secrets))
        for key, (theirs, mine) in found.items()
    ]
    yield _table(("setting", name, "this run"), rows)


def _setting(key: str, value: Any, contents: Contents) -> Any:
    """The value of a setting; where it is a local path of a pushed export, the last name of it."""
    if not contents.pushed or not isinstance(value, str):
        return value
    names_path = key.endswith(".data") or (key == "model.name" and is_local(contents.source))
    return last_name(value) if names_path or os.path.isabs(os.path.expanduser(value)) else value


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _shown(value: object, secrets: Sequence[str]) -> str:
    return cell(redacted(str(value), secrets))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head)]
    body = [[escaped(value) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*lines, *body])
