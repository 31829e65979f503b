"""Dependencies of a run by content: kept in its dependencies.json, compared at every start and evaluation.

Kinds: `data` (files and examples), `weights` (of the base model and of an adapter that it started from), `tokenizer`,
`template` (the chat template), `prompt` (the wording of a task's and a judge's prompts, and the version of the task's
rules), `generation` (the model's generation_config). Where one is found changed, the run is
refused until the change is accepted by its kind's name. `optimizer` is accepted in the same way, by `training.resume`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from grpo_nb.config import Config
from grpo_nb.judge.prompts import VERSION
from grpo_nb.policy.model import Policy
from grpo_nb.policy.origins import part_of
from grpo_nb.printable import clean_logger
from grpo_nb.run import dependencies_file
from grpo_nb.run.dependencies_file import CHANGE, Ledger, accepted_kinds
from grpo_nb.run.run import Run, RunError
from grpo_nb.storage import digests
from grpo_nb.storage.digests import Entry, Part
from grpo_nb.storage.file_stamps import FileRead, Read
from grpo_nb.storage.lock import exclusive
from grpo_nb.tasks import Task, read_examples
from grpo_nb.types import Example, Prompt

logger = clean_logger(__name__)

__all__ = ["DependencyChanged", "accepted_kinds", "check", "question", "watch"]

SFT = "sft.data"
"""Name of the pairs of SFT among the objectives, whose names have no dot."""
OWN = 3
"""Slashes in the key of a task that was given to an evaluation by hand."""
Verb = Literal["sft", "train", "eval"]
Split = Literal["train", "test"]
Found = Mapping[str, Entry]
"""Content by kind and name, as `data/fairness`, `weights/base`."""

_CALLS: Mapping[Verb, str] = {"sft": "sft(run, ", "train": "start(run, ", "eval": "evaluate(run, "}


class DependencyChanged(RunError):
    """Raised when the content of a run's dependencies has changed. Shown as its message alone."""

    def __init__(self, message: str, kinds: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.kinds = tuple(kinds)
        """Kinds that changed and were not accepted."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def check(run: Run, found: Found, accept: Collection[str] | str, verb: Verb) -> None:
    """Compare the found content with the run's; keep new content, and accepted changes.

    A run without results takes the found content. A run of an earlier version has no record, takes the found content
    at its first start, and logs that.

    Raises:
        DependencyChanged: content changed that is not accepted; with its name, and the way to continue.
        ConfigError: an unknown kind.
    """
    accepted = accepted_kinds(accept)
    with exclusive(run.path / dependencies_file.FILE):
        kept = dependencies_file.read(run.path)
        before = Ledger(started=run.started) if kept is None else kept
        changed = _changed(before.entries, found)
        stands = run.has_work()
        if stands:
            _refuse(run, {key: both for key, both in changed.items() if _kind(key) not in accepted}, verb)
        new = {
            key: entry for key, entry in found.items() if key not in before.entries or (key in changed and not stands)
        }
        entries = {key: entry for key, entry in before.entries.items() if not _follows(key, changed)} | {**found}
        # Logged first: killed in between, a change has its event twice and never none.
        _log(run, new, changed if stands else {}, adopted=kept is None)
        if kept is None or entries != dict(before.entries):
            dependencies_file.write(run.path, Ledger(started=before.started, entries=entries))
    for kind in sorted(_incomparable(before.entries, found)):
        logger.warning(
            "the %s of %s: from files before and in memory now, or the reverse, so their content cannot be "
            "compared; the run keeps both records",
            kind,
            run.name,
        )


def _refuse(run: Run, refused: Mapping[str, tuple[Entry, Entry]], verb: Verb) -> None:
    if refused:
        facts = {key: [_facts(old), _facts(now)] for key, (old, now) in refused.items()}
        run.log_event("dependency_refused", step=run.last_step() or 0, before=verb, changed=facts)
        raise DependencyChanged(_refusal(run, refused, verb), sorted({_kind(key) for key in refused}))


def of_policy(policy: Policy) -> dict[str, Entry]:
    """Weights, tokenizer, template and generation settings of the model; waits until its files are hashed."""
    return policy.origin.content(policy.model, policy.tokenizer)


def of_training(
    config: Config, tasks: Mapping[str, Task], examples: Mapping[str, Sequence[Example]]
) -> dict[str, Entry]:
    """Training prompts by objective, the held-out ones of quick evaluation, and the wording of judges."""
    found: dict[str, Entry] = {}
    for name, task in tasks.items():
        found |= _of_task(name, task, "train", examples[name])
        if config.run.quick_eval_every > 0:
            found |= _of_task(name, task, "test", read_examples(task, "test"))
        if config.objectives[name].judge is not None:
            found[f"prompt/{name} judge"] = digests.entry([digests.of_json("rubric version", VERSION)])
    return found


def of_evaluation(
    tasks: Mapping[str, Task], given: Collection[str], split: Split, examples: Mapping[str, Sequence[Example]]
) -> dict[str, Entry]:
    """The examples of one split. A task given by hand may differ from the trained one, so it is independent."""
    found: dict[str, Entry] = {}
    for name, task in tasks.items():
        if name in given:
            key = f"data/{name}/{split}/{_identity(task)}"
            found[key] = digests.entry([_contents(split, examples[name])], _source(task))
        else:
            found |= _of_task(name, task, split, examples[name])
    return found


def of_sft(pairs: Sequence[tuple[Prompt, str]], reads: Sequence[Read]) -> dict[str, Entry]:
    """Prompts with the completions to learn."""
    part = digests.of_examples("pairs", "pair", pairs)
    found = {f"data/{SFT}/pairs": digests.entry([part])}
    if reads:
        found |= {f"data/{SFT}": _files(reads), f"prompt/{SFT}/pairs": digests.entry([part])}
    return found


def question(example: Example) -> str:
    """Digest of an example's question and scoring; its id has no part in it."""
    return digests.of_json("", [example.prompt, example.target, example.columns]).digest[: digests.SHORT]


def inherit(run: Run, other: Run) -> None:
    """Record for `run` the content that the SFT of `other` was made with, which it takes over.

    Raises:
        DependencyChanged: work of `run` was made with other content.
    """
    kept = dependencies_file.read(other.path)
    if kept is not None:
        of_model = ("weights", "tokenizer", "template", "generation")
        read = {key: entry for key, entry in kept.entries.items() if _kind(key) in of_model or _name(key) == SFT}
        check(run, read, (), "sft")


def watch(run: Run, step: int, policy: Policy, tasks: Mapping[str, Task], said: set[str]) -> None:
    """Log files that were replaced since they were loaded, each once: this training continues with the loaded content.

    Its next start, and an evaluation elsewhere, will be refused.
    """
    read_by_key: list[tuple[str, Read]] = [(key, read) for key, reads in policy.origin.files.items() for read in reads]
    read_by_key += [(f"data/{name}", read) for name, task in tasks.items() for read in reads_of(task)]
    for key, read in read_by_key:
        if isinstance(read, FileRead) and str(read.path) not in said and read.replaced():
            said.add(str(read.path))
            if _same(run, key, read):
                continue
            run.log_event("dependency_replaced", step=step, key=key, path=str(read.path))
            logger.warning(
                "%s was replaced since %s loaded it; training continues with the copy in memory; the next start "
                "compares the content",
                read.path,
                run.name,
            )


def reads_of(task: Task) -> list[Read]:
    """Files and data sets that a built-in task was read from; empty for a user's own task."""
    reads: list[Read] = getattr(task, "reads", [])
    return reads


def _same(run: Run, key: str, read: FileRead) -> bool:
    """Whether the file was only touched or moved back: its content is still the run's."""
    try:
        kept = dependencies_file.read(run.path)
        known = kept.entries.get(key) if kept is not None else None
        return known is not None and part_of(read.path).digest in {part.digest for part in known.parts}
    except RunError:  # it is gone, or what the run has cannot be read
        return False


def _of_task(name: str, task: Task, split: Split, examples: Sequence[Example]) -> dict[str, Entry]:
    """The files of a built-in task, how it words them, the version of its rules; of any task what its examples hold."""
    found = {f"data/{name}/{split}": digests.entry([_contents(split, examples)], _source(task))}
    rules = getattr(task, "rules", None)
    if rules is not None:
        found[f"prompt/{name} rules"] = digests.entry([digests.of_json("rules version", rules)])
    reads = reads_of(task)
    if reads and not any(isinstance(read, FileRead) and read.replaced() for read in reads):
        found[f"data/{name}"] = _files(reads)
        prompts = [[example.id, example.prompt, example.target] for example in examples]
        part = digests.of_examples(split, "prompt", prompts, [example.id for example in examples])
        found[f"prompt/{name}/{split}"] = digests.entry([part])
    return found


def _contents(split: Split, examples: Sequence[Example]) -> Part:
    items = [[e.id, e.prompt, e.target, e.columns] for e in examples]
    return digests.of_examples(split, "example", items, [e.id for e in examples])


def _files(reads: Sequence[Read]) -> Entry:
    parts, places, revisions = [], [], []
    for read in reads:
        if isinstance(read, FileRead):
            parts.append(digests.of_file(read.path, read.stamp))
            places.append(str(read.path))
        else:
            parts.append(Part(name=read.name, digest=read.digest, count=read.count, unit="row"))
            places.append(read.name)
            revisions.append(read.revision)
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return digests.entry(parts, f"{places[0]}{more}", " ".join(filter(None, revisions)))


def _source(task: Task) -> str:
    return f"task {task.name}"


def _identity(task: Task) -> str:
    """Identity of an own task from one evaluation to the next: its name, and its files if it has any."""
    places = [str(read.path) if isinstance(read, FileRead) else read.name for read in reads_of(task)]
    return task.name + (f" {digests.of_json('places', places).digest[:8]}" if places else "")


def _changed(before: Found, found: Found) -> dict[str, tuple[Entry, Entry]]:
    """Changed content. Changed files stand for the examples read from them, and changed data for its prompts."""
    differing = {key: (before[key], entry) for key, entry in found.items() if _differs(before.get(key), entry)}
    compared = {key for key in found if key in before}
    heard = {key: both for key, both in differing.items() if _heard(key, compared)}
    data = [key for key in heard if _kind(key) == "data"]
    return {key: both for key, both in heard.items() if not (_kind(key) == "prompt" and _follows(key, data))}


def _incomparable(before: Found, found: Found) -> set[str]:
    """Kinds of the model whose record has another form."""
    own = {_kind(key) for key in found} & {"weights", "tokenizer", "generation"}
    return {
        kind for kind in own if kind in map(_kind, before) and not any(_kind(k) == kind for k in found if k in before)
    }


def _differs(before: Entry | None, now: Entry) -> bool:
    return before is not None and not now.is_as(before)


def _heard(key: str, compared: Collection[str]) -> bool:
    """Whether a change counts: examples of a task count only where no files of it can be compared."""
    parts = key.split("/")
    return not (parts[0] == "data" and len(parts) == 3 and "/".join(parts[:2]) in compared)


def _follows(key: str, changed: Collection[str]) -> bool:
    """Whether a key is of the examples or prompts of data that changed; an evaluation's own task is independent."""
    names = {_name(other) for other in changed if _kind(other) == "data" and other.count("/") < OWN}
    return _kind(key) in ("data", "prompt") and key.count("/") < OWN and _name(key) in names


def _kind(key: str) -> str:
    return key.partition("/")[0]


def _name(key: str) -> str:
    return key.split("/")[1] if "/" in key else ""


def _refusal(run: Run, refused: Mapping[str, tuple[Entry, Entry]], verb: Verb) -> str:
    kinds = sorted({_kind(key) for key in refused})
    flags = " ".join(f"--accept-changed {kind}" for kind in kinds)
    given = ", ".join(f'"{kind}"' for kind in kinds)
    lines = "\n".join(f"  {line}" for line in _lines(refused))
    return (
        f"the content that {run.path} was made with has changed:\n{lines}\n"
        f"Restore the old content, or accept the change, which is logged: grpo-nb {verb} {run.path} {flags} "
        f"(in addition to your flags), in Python {_CALLS[verb]}accept_changed={{{given}}})"
    )


def _lines(changed: Mapping[str, tuple[Entry, Entry]]) -> Iterator[str]:
    for key, (old, new) in changed.items():
        revisions = (
            f", revision {old.revision or '?'} is now {new.revision or '?'}" if old.revision != new.revision else ""
        )
        was, now = old.digest[: digests.SHORT], new.digest[: digests.SHORT]
        place = f" ({new.source})" if new.source else ""
        what = key.replace("/", " of ", 1)
        yield f"{what}: {digests.first_difference(old, new)}; digest {was} is now {now}{revisions}{place}"


def _log(run: Run, new: Found, changed: Mapping[str, tuple[Entry, Entry]], adopted: bool) -> None:
    step = run.last_step() or 0
    if new:
        kept = {key: _facts(entry) for key, entry in new.items()}
        run.log_event("dependencies", step=step, adopted=adopted, started=run.started.isoformat(), entries=kept)
    for (key, (old, now)), line in zip(changed.items(), _lines(changed), strict=True):
        run.log_event(CHANGE, step=step, dependency=_kind(key), key=key, old=_facts(old), new=_facts(now))
        logger.warning("accepted from step %d on: %s", step, line)


def _facts(entry: Entry) -> dict[str, Any]:
    return {name: value for name, value in vars(entry).items() if name in ("digest", "source", "revision") and value}
