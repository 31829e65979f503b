"""Commands between two steps: knobs become active, controllers move beta, a requested evaluation is done."""

from collections.abc import Mapping

from grpo_nb import beta_control
from grpo_nb.evaluation.evaluate import evaluate
from grpo_nb.metrics import keys
from grpo_nb.preflight import dependencies
from grpo_nb.printable import clean_logger
from grpo_nb.run.knob_file import KnobSnapshot
from grpo_nb.training.plan import StepPlan
from grpo_nb.training.state import TrainState

logger = clean_logger(__name__)


def activate(state: TrainState, now: KnobSnapshot) -> None:
    """Make the knobs those of the next step; every change is logged."""
    run, before = state.run, state.knobs
    for turn in now.changes_since(before):
        run.log_event("knob", step=state.step + 1, **turn)
    if now.values["temperature"] != before.values["temperature"]:
        _measured_anew(state)
    state.knobs = now
    for name, objective in state.objectives.items():
        key = keys.BETA.of(name)
        if now.modes[key] == "manual":
            objective.beta = beta_control.set_manual(objective.beta, now.values[key])
        elif objective.beta.mode == "manual":
            held, objective.beta = objective.beta, beta_control.set_auto(objective.beta, objective.config.start)
            message = f"{name}: automatic again, beta from {objective.beta.value:.3g} (by hand: {held.value:.3g})"
            run.log_event("beta", step=state.step + 1, objective=name, message=message)


def move_betas(state: TrainState, plan: StepPlan, kl: Mapping[str, float | None]) -> None:
    """Each objective's beta after the step's KL, nats per token; every move goes into the log."""
    for name, aim in plan.kl_targets.items():
        objective = state.objectives[name]
        controller = beta_control.CONTROLLERS[objective.config.controller]
        objective.beta, moved = controller(objective.beta, kl[name], aim)
        if moved:
            state.run.log_event("beta", step=plan.step, objective=name, message=f"{name}: {moved}")


def measure(state: TrainState) -> None:
    """Evaluate the policy as it stands; an error is logged and never ends the training."""
    tasks = {name: objective.rubric.task for name, objective in state.objectives.items()}
    try:
        dependencies.watch(state.run, state.step, state.policy, tasks, state.replaced)
        evaluate(state.run, policy=state.policy, tasks=tasks, engine=state.engine)
    except Exception as error:
        state.run.log_event("evaluation_failed", step=state.step, error=f"{type(error).__name__}: {error}")
        logger.warning("the evaluation at step %d failed: %s", state.step, error)
    else:
        state.run.log_event("evaluated", step=state.step)


def _measured_anew(state: TrainState) -> None:
    """Reset the KL windows after a change of the temperature, since KL is that of the sampled distribution."""
    for objective in state.objectives.values():
        objective.beta = beta_control.reset_window(objective.beta)
    if any(objective.config.controlled for objective in state.objectives.values()):
        message = "KL is measured at the sampling temperature: its level changes here, and what its band means"
        state.run.log_event("beta", step=state.step + 1, message=message)
