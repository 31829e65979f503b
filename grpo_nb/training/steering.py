"""An evaluation that is requested while a run trains, done between two steps."""

from grpo_nb.evaluation.evaluate import evaluate
from grpo_nb.preflight import dependencies
from grpo_nb.terminal import clean_logger
from grpo_nb.training.state import Training

log = clean_logger(__name__)


def measure(state: Training) -> None:
    """Evaluate the policy as it stands; what goes wrong is logged and never ends the training."""
    tasks = {name: objective.rubric.task for name, objective in state.objectives.items()}
    try:
        dependencies.watch(state.run, state.step, state.policy, tasks, state.replaced)
        evaluate(state.run, policy=state.policy, tasks=tasks, engine=state.engine)
    except Exception as error:
        state.run.log_event("evaluation_failed", step=state.step, error=f"{type(error).__name__}: {error}")
        log.warning("the evaluation at step %d failed: %s", state.step, error)
    else:
        state.run.log_event("evaluated", step=state.step)
