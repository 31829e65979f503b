"""Quick evaluation: while a run trains, every so many steps, the same few held-out prompts of each objective.

Greedy, so nothing is drawn, and in eval mode without gradients: training has the bits that it would have without.
The pool is taken from the test split, behind the examples that `evaluate` uses: what is chosen by these numbers (the
best checkpoint, the knee) can still be measured on questions that had no part in the choice.
"""

import logging
import math
from collections.abc import Sequence

from grpo_nb import dependencies, metrics
from grpo_nb.config import Config
from grpo_nb.evaluate import ask, examples_of, measured
from grpo_nb.objectives import Objective
from grpo_nb.paired import Logged, Row, logged
from grpo_nb.run import Run
from grpo_nb.training import Training
from grpo_nb.types import Example

log = logging.getLogger(__name__)

MODE: Logged = "quick"


def due(config: Config, step: int) -> bool:
    """Whether the policy is measured after this step; step 0 is where GRPO starts."""
    every = config.run.quick_eval_every
    return every > 0 and step % every == 0


def begin(state: Training) -> None:
    """Measure the start, once, and log what pool is used."""
    if state.step > 0 or not due(state.config, 0):
        return
    overlaps = {name: overlap(state.run, objective, _pool(state, name)) for name, objective in state.objectives.items()}
    state.run.log_event("quick_pool", step=0, pools=overlaps)
    for name, found in overlaps.items():
        if found["trained"] or found["final"]:
            log.warning(
                "quick evaluation of %s: of %d examples %d are also training prompts and %d are in evaluate's pool, "
                "since its test split has no others; lower run.quick_eval_examples or run.eval_examples",
                name,
                found["n"],
                found["trained"],
                found["final"],
            )
    measure(state, 0)


def measure(state: Training, step: int) -> metrics.Row:
    """Evaluate the policy as it is after `step`; the row's keys `eval/<objective>/<metric>`, all that have a value.

    Each objective's result goes into evaluations.jsonl, as `evaluate` writes it, with stage `step N` and mode `quick`.
    """
    row: metrics.Row = {}
    tasks = {name: objective.rubric.task for name, objective in state.objectives.items()}
    dependencies.watch(state.run, step, state.policy, tasks, state.replaced)
    for name, objective in state.objectives.items():
        found = _logged(state, name, step) or _measured(state, objective, step)
        for metric, numbers in found["metrics"].items():
            if math.isfinite(numbers["value"]):
                row[f"eval/{name}/{metric}"] = numbers["value"]
    return row


def pool(run: Run, objective: Objective) -> list[Example]:
    """The fixed examples of an objective, the first so many of its test split in this order.

    Neither a training prompt nor in the pool of `evaluate`, with a template or text of their own; then those whose
    template or text is in that pool too; then, in a split too small for both, that pool's own; training prompts last
    (a task may give the same examples for both splits). Equals stand in the seeded order of `evaluate`'s pool.
    """
    task = objective.rubric.task
    order = examples_of(run, objective.name, task, limit=len(task.examples("test")))
    final = order[: run.config.run.eval_examples]
    trained, asked, seen = _prompts(objective.examples), _prompts(final), {_cluster(example) for example in final}
    order.sort(key=lambda e: (str(e.prompt) in trained, str(e.prompt) in asked, _cluster(e) in seen))
    return order[: run.config.run.quick_eval_examples]


def overlap(run: Run, objective: Objective, chosen: Sequence[Example]) -> dict[str, int]:
    """How many examples a pool has, and how many of them are trained on, or in the pool of `evaluate`."""
    trained, final = _prompts(objective.examples), _prompts(examples_of(run, objective.name, objective.rubric.task))
    return {
        "n": len(chosen),
        "trained": sum(str(example.prompt) in trained for example in chosen),
        "final": sum(str(example.prompt) in final for example in chosen),
    }


def _pool(state: Training, name: str) -> list[Example]:
    """The pool of an objective, ordered once for the whole run: a large split takes a second to order."""
    if name not in state.quick_pools:
        state.quick_pools[name] = pool(state.run, state.objectives[name])
    return state.quick_pools[name]


def _measured(state: Training, objective: Objective, step: int) -> Row:
    run, task, examples = state.run, objective.rubric.task, _pool(state, objective.name)
    texts = ask(state.policy, examples, run.config.sampling, state.engine).scored_texts
    row = {"stage": f"step {step}", "step": step, "split": "test", "mode": MODE}
    row |= measured(run, objective.name, task, examples, texts)
    run.log_evaluation(row)
    return row


def _logged(state: Training, objective: str, step: int) -> Row | None:
    """The result of a start that was killed after it: measuring the same questions again would log it twice."""
    own = [row for row in logged(state.run, "test", MODE) if (row["objective"], row["step"]) == (objective, step)]
    if not own:
        return None
    questions = {example.id: dependencies.question(example) for example in _pool(state, objective)}
    return own[-1] if own[-1].get("items", questions) == questions else None


def _prompts(examples: Sequence[Example]) -> set[str]:
    return {str(example.prompt) for example in examples}


def _cluster(example: Example) -> str:
    return str(example.columns.get("cluster", example.id))
