"""The reward at work before any training: right, wrong and the model's own answers to a few prompts, ranked.

A run learns from differences of reward. A reward that is the same for all answers, that pays for length, or
that pays a wrong answer like the right one is seen here in seconds, and in a curve after hours.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from grpo_nb import losses, seeding
from grpo_nb.config import Config
from grpo_nb.policy.model import Policy, load_policy
from grpo_nb.rewards.rubric import TASK
from grpo_nb.rewards.scoring import Completions, score
from grpo_nb.rollout import Engine, Request, choose, opened
from grpo_nb.rules import worst_first
from grpo_nb.rules.finding import Finding
from grpo_nb.rules.learning import TRUNCATED_BADLY
from grpo_nb.rules.signal import DEAD_SHARE
from grpo_nb.run.run import Run
from grpo_nb.tasks import Task, load_tasks
from grpo_nb.training.experience import reward_matrix, shape
from grpo_nb.training.objectives import Objective, Rewards, load_objectives
from grpo_nb.types import Example, Score

LENGTH_CORRELATION, ENOUGH_ANSWERS = 0.5, 12
"""Rank correlation of reward and length inside prompts that is beyond chance with so many answers (p < 0.1 at 12)."""
GOLD, BAD, MODEL = "gold", "bad", "model"


@dataclass(frozen=True)
class Bench:
    """Answers with their scores, and the findings to read before training."""

    answers: pd.DataFrame
    """Table with one row per answer: objective, example, prompt, kind (gold, bad, model), what (kind of bad), answer,
    rank (in its prompt, 1 is best paid), reward, label, tokens, cut (at the cap), `part/<name>`, and `shaped` where
    rewards are."""
    findings: list[Finding]


@dataclass(frozen=True)
class Answer:
    """One answer of the reward check."""

    example: Example
    kind: str
    what: str
    text: str
    ids: Sequence[int]
    cut: bool = False
    marked: str | None = None
    """The text with the marks of thinking, where it differs."""


def workbench(
    run: Run,
    *,
    policy: Policy | None = None,
    tasks: Mapping[str, Task] | None = None,
    rewards: Rewards | None = None,
    prompts: int = 4,
    engine: Engine | str | None = None,
) -> Bench:
    """A few training prompts of each objective, a group of the model's answers to each, scored as training will.

    Args:
        policy: whose answers; None: the model as loaded.
        tasks, rewards: own tasks and extra reward functions by objective, as in `train.grpo`.
        prompts: per objective.

    Raises:
        ConfigError, DataError, RewardError: as training would.
    """
    config = run.config
    learner = policy or load_policy(config.model, config.run.seed)
    learner.set_date(run.started)
    frames, found = [], []
    with opened(choose(engine, learner, config.rollout).engine) as built:
        for objective in load_objectives(run, load_tasks(config, run.path, tasks), rewards or {}).values():
            order = seeding.permutation(len(objective.examples), config.run.seed, 0, f"workbench/{objective.name}")
            examples = [objective.examples[i] for i in order[:prompts]]
            answers = [*_known(objective, examples, learner), *_sampled(objective, examples, learner, config, built)]
            frame = scored(objective, answers, config)
            frames.append(frame)
            found += checked(frame, objective.name, config)
    return Bench(pd.concat(frames, ignore_index=True), worst_first(found))


def scored(objective: Objective, answers: Sequence[Answer], config: Config) -> pd.DataFrame:
    """The answers with rewards, labels, parts and ranks, prompt by prompt, the best paid first."""
    texts, ids = [a.text for a in answers], [a.ids for a in answers]
    marked = [a.text if a.marked is None else a.marked for a in answers]
    scores = score(objective.rubric, Completions([a.example for a in answers], texts, ids, marked))
    rows = [_row(objective.name, answer, verdict) for answer, verdict in zip(answers, scores, strict=True)]
    frame = pd.DataFrame(rows)
    frame["reward"] = frame["reward"].astype(float)
    if config.shaping.active:
        frame["shaped"] = _shaped(answers, scores, config)
    frame["rank"] = frame.groupby("example")["reward"].rank(method="min", ascending=False)
    place = {example: i for i, example in enumerate(dict.fromkeys(frame["example"]))}
    frame["place"] = frame["example"].map(place)
    return frame.sort_values(["place", "rank"], kind="stable").drop(columns="place").reset_index(drop=True)


def checked(frame: pd.DataFrame, objective: str, config: Config) -> list[Finding]:
    """Findings about the rewards of one objective, or about the model's answers; see `Bench.answers`."""
    model = frame[frame["kind"] == MODEL]
    found = (
        _bad_is_paid(frame, objective),
        _no_spread(model, objective),
        *_dumb_parts(frame, objective),
        _pays_length(model, objective),
        *_too_easy_or_hard(frame, objective),
        _cut(model, objective, config),
        _without_verdict(frame, objective),
    )
    return [finding for finding in found if finding]


def known_bad(task: Task, example: Example) -> Iterator[tuple[str, str]]:
    """Answers that must earn less than the gold one, each with its kind."""
    yield "empty", ""
    yield "the prompt again", _text(example)
    columns = example.columns
    invented = next((text for name, text in columns.items() if str(name).startswith("hallucinated_")), None)
    if invented is not None:
        yield "made up", f"Answer: {invented}"
        if columns.get("answerable"):
            yield "abstaining", "Answer: Not stated"
    elif "options" in columns and "label" in columns:
        wrong = (option for i, option in enumerate(columns["options"]) if i != columns["label"])
        yield from (("another option", f"Answer: {option}") for option in wrong)
    elif target := _target_of_another(task, example):
        yield "another question's answer", target


def _target_of_another(task: Task, example: Example) -> str | None:
    targets = (e.target for e in task.examples("train") if e.target and e.target != example.target)
    return next(targets, None)


# Answers


def _known(objective: Objective, examples: Sequence[Example], policy: Policy) -> Iterator[Answer]:
    for example in examples:
        if example.target is not None:
            yield Answer(example, GOLD, "", example.target, policy.encode_completion(example.target, ""))
        for what, text in known_bad(objective.rubric.task, example):
            yield Answer(example, BAD, what, text, policy.encode_completion(text, ""))


def _sampled(
    objective: Objective, examples: Sequence[Example], policy: Policy, config: Config, engine: Engine
) -> Iterator[Answer]:
    """A group of answers to each prompt, sampled as in training, from a stream of its own."""
    sampling, group = config.sampling, config.batch.group_size
    generator = seeding.generator(config.run.seed, 0, f"workbench/{objective.name}")
    drawn = torch.rand(len(examples) * group, sampling.max_completion_length, dtype=torch.float64, generator=generator)
    prompts = [policy.encode(example.prompt) for example in examples]
    with policy.eval_mode():
        rollouts = engine.generate(policy, Request(prompts, group, sampling, drawn))
    for i, text in enumerate(rollouts.texts):
        cut = rollouts.stop_reasons[i] == "length"
        ids, marked = rollouts.completion_ids[i], rollouts.scored_texts[i]
        yield Answer(examples[rollouts.prompt_of(i)], MODEL, "", text, ids, cut, marked)


def _row(objective: str, answer: Answer, verdict: Score) -> dict[str, Any]:
    return {
        "objective": objective,
        "example": answer.example.id,
        "prompt": _text(answer.example),
        "kind": answer.kind,
        "what": answer.what,
        "answer": answer.text,
        "reward": verdict.value,
        "label": verdict.label,
        "tokens": len(answer.ids),
        "cut": answer.cut,
        **{f"part/{name}": value for name, value in verdict.parts.items()},
        "cause": verdict.cause,
    }


def _shaped(answers: Sequence[Answer], scores: Sequence[Score], config: Config) -> list[float]:
    """The rewards as training compares them, all answers taken as one group."""
    lengths = torch.tensor([[len(answer.ids) for answer in answers]])
    cut = torch.tensor([[answer.cut for answer in answers]])
    shaped, _ = shape(reward_matrix(scores, len(scores)), lengths, cut, config, losses.Moments())
    return [float(value) for value in shaped[0]]


def _text(example: Example) -> str:
    return example.prompt if isinstance(example.prompt, str) else "\n".join(t["content"] for t in example.prompt)


# Findings


def _finding(rule: str, severity: Any, message: str, advice: str, objective: str, **evidence: Any) -> Finding:
    return Finding(rule, severity, None, message, {"objective": objective, **evidence}, advice)


def _bad_is_paid(frame: pd.DataFrame, objective: str) -> Finding | None:
    """Finding if a known bad answer earns as much as the gold answer to the same prompt."""
    gold = frame[frame["kind"] == GOLD].set_index("example")["reward"]
    bad = frame[frame["kind"] == BAD]
    paid = bad[bad["reward"] >= bad["example"].map(gold)]
    if paid.empty:
        return None
    first = paid.iloc[0]
    return _finding(
        "bad_is_paid",
        "error",
        f"{objective} pays {len(paid)} of {len(bad)} bad answers like the gold one or better, e.g. '{first['what']}' "
        f"for {first['example']} with {first['reward']:.3g}: this is what training will find.",
        "fix the reward before training: a right answer must earn most",
        objective,
        examples=list(paid["example"]),
    )


def _no_spread(model: pd.DataFrame, objective: str) -> Finding | None:
    """Finding if in most groups all answers of the model earn the same."""
    compared = "shaped" if "shaped" in model else "reward"
    groups = [torch.tensor(group.to_numpy(float))[None] for _, group in model.groupby("example")[compared]]
    flat = sum(not losses.has_signal(rewards) for rewards in groups) / max(len(groups), 1)
    if flat < DEAD_SHARE:
        return None
    return _finding(
        "constant_reward",
        "warning",
        f"in {flat:.0%} of the {objective} prompts all answers of the model earn the same, so nothing is learnt from "
        "them.",
        "before SFT this is the rule, when no answer has the asked form: look again after it; then raise "
        "sampling.temperature or batch.group_size, or make the reward finer",
        objective,
        share=flat,
    )


def _dumb_parts(frame: pd.DataFrame, objective: str) -> Iterator[Finding]:
    """A part of the reward that gives gold, bad and sampled answers one and the same number."""
    for column in (name for name in frame if str(name).startswith("part/")):
        values = frame[column].dropna().astype(float)
        if len(values) == len(frame) > 1 and values.nunique() == 1:
            name = str(column).removeprefix("part/")
            yield _finding(
                "constant_part",
                "warning",
                f"'{name}' of {objective} gives {values.iloc[0]:.3g} to all {len(values)} answers, good and bad: it "
                "teaches nothing.",
                f"see that '{name}' reads what it means to read; a list of messages is not a string",
                objective,
                part=name,
            )


def _pays_length(model: pd.DataFrame, objective: str) -> Finding | None:
    """Inside a prompt, longer (or shorter) answers earn more."""
    inside = model.dropna(subset=["reward"]).groupby("example")
    middle = (inside["reward"].transform("size") + 1) / 2
    ranks = pd.DataFrame({key: inside[key].rank() - middle for key in ("reward", "tokens")})
    if len(ranks) < ENOUGH_ANSWERS or (ranks.std() == 0).any():
        return None
    correlation = float(ranks["reward"].corr(ranks["tokens"]))
    if not abs(correlation) >= LENGTH_CORRELATION:
        return None
    which = "longer" if correlation > 0 else "shorter"
    return _finding(
        "length_reward",
        "warning",
        f"{which} answers of {objective} earn more (rank correlation {correlation:+.2f} over {len(ranks)} answers to "
        "the same prompts): the policy may learn length.",
        f"read the table: if the {which} ones are better, keep it; otherwise take length out of the reward, or "
        "cap its share",
        objective,
        correlation=correlation,
    )


def _too_easy_or_hard(frame: pd.DataFrame, objective: str) -> Iterator[Finding]:
    """Prompts that the model always or never solves: task scores of the gold answer, or the label `correct`."""
    gold = frame[frame["kind"] == GOLD].set_index("example")[f"part/{TASK}"]
    model = frame[frame["kind"] == MODEL]
    task, needed = model[f"part/{TASK}"], model["example"].map(gold)
    solved = (task >= needed) | (needed.isna() & (model["label"] == "correct"))
    share = solved.groupby(model["example"]).mean()
    for rule, word, ids, advice in (
        ("always_solved", "always", list(share[share == 1].index), "take harder prompts, or fewer like these"),
        ("never_solved", "never", list(share[share == 0].index), "more SFT, easier prompts first, or larger groups"),
    ):
        if ids:
            yield _finding(
                rule,
                "warning" if len(ids) == len(share) else "info",
                f"the model {word} solves {len(ids)} of {len(share)} {objective} prompts ({', '.join(ids[:3])}"
                + (", ...)" if len(ids) > 3 else ")")
                + ": right or wrong alike, its answers teach nothing there.",
                advice,
                objective,
                examples=ids,
            )


def _cut(model: pd.DataFrame, objective: str, config: Config) -> Finding | None:
    """More than half of the answers hit the cap."""
    share, cap = float(model["cut"].mean()), config.sampling.max_completion_length
    if not share > TRUNCATED_BADLY:
        return None
    return _finding(
        "truncation",
        "warning",
        f"{share:.0%} of the model's {objective} answers hit the cap of {cap} tokens: they are scored unfinished.",
        f"SFT teaches when to stop, so look again after it; then raise sampling.max_completion_length from {cap} "
        f"to {2 * cap}",
        objective,
        share=share,
        cap=cap,
    )


def _without_verdict(frame: pd.DataFrame, objective: str) -> Finding | None:
    lost = frame[frame["reward"].isna()]
    if lost.empty:
        return None
    return _finding(
        "unscored",
        "warning",
        f"{len(lost)} of {len(frame)} {objective} answers got no verdict ({lost['cause'].iloc[0]}): their groups would "
        "be left out.",
        "fix the scorer that returns None; a slow or unreachable judge shows here first",
        objective,
        answers=len(lost),
    )
