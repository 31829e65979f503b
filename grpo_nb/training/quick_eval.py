"""Quick evaluation during training: every so many steps, on the same few held-out prompts of each objective.

It is greedy, so it uses no random numbers, and runs in eval mode without gradients: training has the same bits without
it. The pool is taken from templates or texts of the test split that `evaluate` leaves out, where there are enough for
both: a choice made by these numbers (the best checkpoint, the knee) can still be measured on questions that had no part
in it. Where the two must share questions, the log states how many.
"""

import math
from collections.abc import Sequence

from grpo_nb.config import Config
from grpo_nb.evaluation.compare import Logged, Row
from grpo_nb.evaluation.evaluate import (
    APART,
    Watch,
    ask,
    cluster_of,
    examples_of,
    fewer_rows,
    measured_by,
    ordered,
    quick_clusters,
    scored,
)
from grpo_nb.metrics import keys
from grpo_nb.preflight import dependencies
from grpo_nb.printable import clean_logger
from grpo_nb.rewards.foreign_code import RewardError
from grpo_nb.rules.finding import Finding
from grpo_nb.rules.rewards import evaluation_leaked
from grpo_nb.run.run import Run
from grpo_nb.tasks import DataError, read_examples
from grpo_nb.training import memory_ladder, metrics
from grpo_nb.training.guards import log_and_raise
from grpo_nb.training.objectives import Objective
from grpo_nb.training.samples import answer_rows
from grpo_nb.training.state import TrainState
from grpo_nb.types import Example

logger = clean_logger(__name__)

MODE: Logged = "quick"
ANSWERS_LOGGED = 4
"""Prompts of each objective whose answers are logged in full, the same ones each time."""


def due(config: Config, step: int) -> bool:
    """Whether quick evaluation runs after this step; step 0 is the policy with which GRPO starts."""
    every = config.run.quick_eval_every
    return every > 0 and step % every == 0


def begin(state: TrainState) -> None:
    """Measure the start, once, and log the pool."""
    if state.step > 0 or not due(state.config, 0):
        return
    overlaps = {name: overlap(state.run, objective, _pool(state, name)) for name, objective in state.objectives.items()}
    state.run.log_event("quick_pool", step=0, pools=overlaps)
    for name, found in overlaps.items():
        if found["trained"] or found["final"] or found["final_clusters"]:
            logger.warning(
                "quick evaluation of %s: of %d examples %d are also training prompts and %d are in evaluate's pool; of "
                "their %d templates or texts %d are, since its test split has no others: a stage chosen by these "
                "numbers looks better in the final evaluation than it is. Lower run.quick_eval_examples or "
                "run.eval_examples, or give data with more templates",
                name,
                found["n"],
                found["trained"],
                found["final"],
                found["clusters"],
                found["final_clusters"],
            )
    log_and_raise(state.run, [leak for objective in state.objectives.values() if (leak := _leak(objective))])
    state.run.doing("measuring where GRPO starts on held-out prompts")
    measure(state, 0)


def measure(state: TrainState, step: int) -> metrics.Row:
    """Evaluate the policy as it is after `step`; returns the columns of the step's row: all metrics that have a value.

    Each objective's result goes into evaluations.jsonl, as `evaluate` writes it, with stage `step N` and mode `quick`,
    once all are measured. Where memory is full, fewer answers are sampled at a time (see `ask`); where memory is too
    small for one, or a task fails, nothing is measured after this step and the log has `evaluation_failed`: the step
    itself stands. At step 0, where nothing is lost yet, a task that fails ends the run.
    """
    row: metrics.Row = {}
    tasks = {name: objective.rubric.task for name, objective in state.objectives.items()}
    dependencies.watch(state.run, step, state.policy, tasks, state.replaced)
    found = {name: logged for name in state.objectives if (logged := _logged(state, name, step)) is not None}
    missing = [objective for name, objective in state.objectives.items() if name not in found]
    new = memory_ladder.spared(
        lambda: _all_measured(state, missing, step), lambda error: _failed(state.run, step, f"no memory: {error}")
    )
    for result in new or []:
        state.run.log_evaluation(result)
        found[result["objective"]] = result
    for name, result in found.items():
        for metric, numbers in result["metrics"].items():
            if math.isfinite(numbers["value"]):
                row[keys.EVAL.of(name, metric)] = numbers["value"]
    return row


def _all_measured(state: TrainState, objectives: Sequence[Objective], step: int) -> list[Row]:
    """The results of all objectives; none where a task fails after the start."""
    try:
        return [_measured(state, objective, step) for objective in objectives]
    except (RewardError, DataError) as error:
        if step == 0:
            raise
        _failed(state.run, step, str(error))
        return []


def _failed(run: Run, step: int, error: str) -> None:
    run.log_event("evaluation_failed", step=step, mode=MODE, error=error)
    logger.warning("no quick evaluation after step %d: %s", step, error)


def pool(run: Run, objective: Objective) -> list[Example]:
    """The fixed examples of an objective, the first so many of its test split in this order.

    Neither a training prompt nor in the pool of `evaluate`, of a template or text that this pool lacks; where
    `quick_clusters` are kept for it, these alone, be they fewer. Then, where the split is too small for both, those
    whose template or text is in that pool too; then that pool's own; training prompts last (a task may give the same
    examples for both splits). Equals stand in the seeded order of `evaluate`'s pool.
    """
    task = objective.rubric.task
    order, final = ordered(run, objective.name, task, "test"), examples_of(run, objective.name, task)
    trained, asked, seen = _prompts(objective.examples), _prompts(final), {cluster_of(example) for example in final}
    order.sort(key=lambda e: (str(e.prompt) in trained, str(e.prompt) in asked, cluster_of(e) in seen))
    if quick_clusters(run, objective.name, order):
        order = [e for e in order if cluster_of(e) not in seen and str(e.prompt) not in trained | asked] or order
    return order[: run.config.run.quick_eval_examples]


def overlap(run: Run, objective: Objective, chosen: Sequence[Example]) -> dict[str, int]:
    """Overlaps of a pool: its size, examples trained on or in the pool of `evaluate`, clusters, and shared clusters."""
    pool = examples_of(run, objective.name, objective.rubric.task)
    trained, final = _prompts(objective.examples), _prompts(pool)
    clusters = {cluster_of(example) for example in chosen}
    return {
        "n": len(chosen),
        "trained": sum(str(example.prompt) in trained for example in chosen),
        "final": sum(str(example.prompt) in final for example in chosen),
        "clusters": len(clusters),
        "final_clusters": len(clusters & {cluster_of(example) for example in pool}),
    }


def _leak(objective: Objective) -> Finding | None:
    held_out, trained = _prompts(read_examples(objective.rubric.task, "test")), _prompts(objective.examples)
    return evaluation_leaked(objective.name, len(held_out & trained), len(held_out))


def _pool(state: TrainState, name: str) -> list[Example]:
    """The pool of an objective, ordered once for the run: a large split takes a second to order."""
    if name not in state.quick_pools:
        state.quick_pools[name] = pool(state.run, state.objectives[name])
    return state.quick_pools[name]


def _measured(state: TrainState, objective: Objective, step: int) -> Row:
    run, task, examples = state.run, objective.rubric.task, _pool(state, objective.name)
    watch = Watch(fewer=fewer_rows(run, step, objective.name))
    drawn = ask(state.policy, examples, run.config.sampling, state.engine, watch=watch)
    scores = scored(objective.name, task, examples, drawn.scored_texts)
    row = {"stage": f"step {step}", "step": step, "split": "test", "mode": MODE, APART: True}
    answers = {"answers": answer_rows(state.policy, examples[:ANSWERS_LOGGED], drawn, scores)}
    return row | measured_by(run, objective.name, task, examples, scores) | answers


def _logged(state: TrainState, objective: str, step: int) -> Row | None:
    """Result of step 0 that a killed start has logged; to measure again would log it twice."""
    own = [row for row in state.quick.rows() if (row["objective"], row["step"]) == (objective, step)]
    if not own:
        return None
    questions = {example.id: dependencies.question(example) for example in _pool(state, objective)}
    return own[-1] if own[-1].get("items", questions) == questions else None


def _prompts(examples: Sequence[Example]) -> set[str]:
    return {str(example.prompt) for example in examples}
