"""Measures what a model forgets in training: a general probe of a stage and of the model as it was loaded."""

from collections.abc import Collection

import pandas as pd

from grpo_nb import trackers
from grpo_nb.config import SamplingConfig
from grpo_nb.evaluation.compare import Logged, Stage, compare_stages, is_of, logged
from grpo_nb.evaluation.evaluate import ask, measured, placed, restore_policy, stage_checkpoint
from grpo_nb.policy.model import Policy
from grpo_nb.policy.source import ModelError
from grpo_nb.rollout import Engine, choose, opened
from grpo_nb.run.run import Run
from grpo_nb.tasks.probe import Probe

MODE: Logged = "probe"
NAME = "probe"
"""Value of `objective` in its rows."""
SAMPLING = SamplingConfig(max_completion_length=32)
"""Sampling settings of the probe: a cap or penalty that suits the run's tasks must not look like forgetting."""


def probe(
    run: Run, stage: Stage = "latest", *, engine: Engine | str | None = None, accept_changed: Collection[str] = ()
) -> pd.DataFrame:
    """Accuracy on forty general questions, over all and by kind: base, the stage, and the paired change.

    The base is measured once a run; both go into evaluations.jsonl with mode `probe`.

    Returns:
        As `paired.compare_stages`, `before` being the base.

    Raises:
        RunError: the stage has no checkpoint.
        DependencyChanged: as `evaluate.restore_policy`.
        ModelError: the tokenizer has no tokens for the words of the questions, so that no answer would mean anything.
    """
    checkpoint = stage_checkpoint(run, stage)
    policy = restore_policy(run, "base", accept_changed=accept_changed)
    refuse_other_words(policy)
    with opened(choose(engine, policy, run.config.rollout).engine) as built:
        if not any(is_of(row, "base") for row in logged(run, "test", MODE)) or stage == "base":
            _ask(run, "base", 0, policy, built)
        if stage != "base":
            if checkpoint is not None:
                policy.load_state(checkpoint.tensors("policy"))
            _ask(run, *placed(stage, checkpoint), policy, built)
    return compare_stages(run, "base", stage, mode=MODE)


def refuse_other_words(policy: Policy) -> None:
    """Refuse a tokenizer to which the probe's words are unknown.

    Raises:
        ModelError: it reads some question with its token for unknown words.
    """
    unknown, tokenizer = policy.tokenizer.unk_token_id, policy.tokenizer
    questions = [str(example.prompt[0]["content"]) for example in Probe().examples("test")]  # type: ignore[index]
    lost = [q for q in questions if unknown in tokenizer(q, add_special_tokens=False)["input_ids"]]
    if unknown is not None and lost:
        raise ModelError(
            f"the tokenizer of '{policy.name}' ({len(tokenizer)} tokens) has no words for {len(lost)} of the "
            f"{len(questions)} probe questions, e.g. {lost[0]!r}: a model that never had general abilities cannot "
            "forget them; probe a run of a pretrained model"
        )


def _ask(run: Run, stage: str, step: int, policy: Policy, engine: Engine) -> None:
    task = Probe()
    examples = task.examples("test")
    texts = ask(policy, examples, SAMPLING, engine).scored_texts
    row = {"stage": stage, "step": step, "split": "test", "mode": MODE} | measured(run, NAME, task, examples, texts)
    with trackers.mirroring(run):
        run.log_evaluation(row)
