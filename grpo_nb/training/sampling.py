"""The completions of a step and their scores, sampled when it begins or one step ahead (see `ahead`)."""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace

from grpo_nb.printable import clean_logger
from grpo_nb.rewards.context import Notes, TrainerState
from grpo_nb.rewards.rubric import Rubric
from grpo_nb.rewards.scoring import Completions, Scoring
from grpo_nb.rollout import Ended, Remote, Request
from grpo_nb.training import guards, memory_ladder, sharded
from grpo_nb.training.ahead import Sampled, SamplingPlan
from grpo_nb.training.metrics import Clock
from grpo_nb.training.plan import StepPlan
from grpo_nb.training.state import TrainState, draw_prompts
from grpo_nb.types import Rollouts, SampledPrompt, Score

logger = clean_logger(__name__)

POLL_SECONDS = 0.5
"""Seconds between two polls of completions that are sampled elsewhere."""


@contextmanager
def sampled(state: TrainState, plan: StepPlan, clock: Clock) -> Iterator[Sampled]:
    """The step's completions, with their judges running; leaving the block cancels unfinished scoring.

    One step off-policy these are the pending completions, and the block samples the next step's.
    """
    with clock("rollout"):
        found = _pending(state, plan) or _drawn(state, plan)
    with closing(found), _next_drawn(state, replace(plan, step=plan.step + 1), clock):
        yield found


@contextmanager
def _next_drawn(state: TrainState, plan: StepPlan, clock: Clock) -> Iterator[None]:
    """One step off-policy, sample the next step's completions with the current weights, before the block or, where the
    engine samples elsewhere, during it. Past the goal no judge gets them.
    """
    if not state.config.rollout.steps_off_policy or state.ahead.of(sampling_plan(plan)) is not None:
        yield
        return
    scores, engine = plan.step <= state.goal, state.engine
    if not isinstance(engine, Remote):
        with clock("rollout"):
            state.ahead.keep(replace(_drawn(state, plan, scores=scores), staleness=1))
        yield
        return
    with _open(_scoring(state)) as scoring:
        with clock("rollout"):
            asked, prompts = request_of(state, plan, scoring if scores else None)
            begun = engine.begin(state.policy, asked)
        try:
            yield
            with clock("rollout"):
                rollouts = checked(state, plan, _waited(begun), prompts)
        finally:
            begun.cancel()
        found = Sampled(sampling_plan(plan), rollouts, staleness=1)
        if scores:
            _begin_scoring(state, found, scoring)
        state.ahead.keep(found)


def _waited(begun: "Future[Rollouts]") -> Rollouts:
    """Result of the future; an order to interrupt the step is noticed meanwhile."""
    while not begun.done():
        futures.wait([begun], timeout=POLL_SECONDS)
    return begun.result()


@contextmanager
def _open(scoring: Scoring) -> Iterator[Scoring]:
    """Keep the scoring open, unless the block raises."""
    try:
        yield scoring
    except BaseException:
        scoring.close()
        raise


def _pending(state: TrainState, plan: StepPlan) -> Sampled | None:
    """Completions that were sampled ahead for this step, with their scoring begun; None without any."""
    state.ahead.forget_before(plan.step)
    found = state.ahead.of(sampling_plan(plan))
    if found is not None and found.scoring is None:
        with _open(_scoring(state)) as scoring:
            _begin_scoring(state, found, scoring)
    return found


def sampling_plan(plan: StepPlan) -> SamplingPlan:
    """The part of a step's plan that decides how its completions are sampled."""
    return SamplingPlan(plan.step, plan.temperature, plan.sampling_stream)


def _scoring(state: TrainState) -> Scoring:
    loop = state.ahead.loop if state.config.rollout.steps_off_policy else None
    return Scoring(sharded.task_scores(state.ranks, state.objectives), loop)


def _drawn(state: TrainState, plan: StepPlan, *, scores: bool = True) -> Sampled:
    """Completions by the present weights, each passed to the judges as it ends."""
    staleness = 0 if state.config.rollout.steps_off_policy else None
    with _open(_scoring(state)) as scoring:
        found = Sampled(sampling_plan(plan), sample(state, plan, scoring if scores else None), staleness)
        if scores:
            _begin_scoring(state, found, scoring)
    return found


def sample(state: TrainState, plan: StepPlan, scoring: Scoring | None) -> Rollouts:
    """The step's prompts, and K completions of each by the engine, which passes each to `scoring` as it ends.

    Raises:
        TrainingError: as `checked`.
    """
    asked, prompts = request_of(state, plan, scoring)
    with memory_ladder.sampling():
        rollouts = state.engine.generate(state.policy, asked)
    return checked(state, plan, rollouts, prompts)


def request_of(state: TrainState, plan: StepPlan, scoring: Scoring | None) -> tuple[Request, Sequence[SampledPrompt]]:
    """Request to the engine for a step, and the prompts in it; completions that have ended go to `scoring`."""
    config = state.config
    drawn_P = draw_prompts(state, plan.step)
    size = len(drawn_P) * config.batch.group_size, plan.max_completion_length
    uniforms = plan.numerics.uniforms(plan.seed, plan.step, size, state.policy.device, plan.sampling_stream)
    prompt_ids_P = [state.encode(d.objective, d.example) for d in drawn_P]
    sampling = config.sampling.model_copy(update={"temperature": plan.temperature})
    group, ended = config.batch.group_size, hand_over(state, drawn_P, scoring)
    rows_at_once = plan.numerics.rows_at_once
    return Request(prompt_ids_P, group, sampling, uniforms, ended=ended, rows_at_once=rows_at_once), drawn_P


def checked(state: TrainState, plan: StepPlan, rollouts: Rollouts, drawn_P: Sequence[SampledPrompt]) -> Rollouts:
    """The engine's rollouts, checked, with the examples of their prompts.

    Raises:
        TrainingError: they are not complete answers with their log-probs.
    """
    guards.check_rollouts(rollouts, state.policy.stop_token_ids, plan.most_bad_rows)
    return replace(rollouts, prompts=drawn_P)


def hand_over(
    state: TrainState, drawn_P: Sequence[SampledPrompt], scoring: Scoring | None
) -> Callable[[Sequence[Ended]], None] | None:
    """Callback that passes ended completions to the functions that take them; None where no objective has any."""
    if scoring is None:
        return None
    places: dict[int, tuple[Rubric, int]] = {}
    size = state.config.batch.group_size
    for name, objective in state.objectives.items():
        own = [(i, drawn.example) for i, drawn in enumerate(drawn_P) if drawn.objective == name]
        rows = [(i * size + k, example) for i, example in own for k in range(size)]
        if scoring.expect(objective.rubric, [example for _, example in rows]):
            places |= {row: (objective.rubric, place) for place, (row, _) in enumerate(rows)}

    def ended(completions: Sequence[Ended]) -> None:
        for completion in completions:
            if completion.row in places:
                scoring.take(*places[completion.row], completion.text)

    return ended if places else None


def _begin_scoring(state: TrainState, found: Sampled, scoring: Scoring) -> None:
    """Pass all completions to the scoring; functions that wait for servers run from here on."""
    rollouts, done = found.rollouts, found.plan.step - 1
    notes = {}
    for name, objective in state.objectives.items():
        rows = rollouts.rows_of(name)
        epoch = done * state.config.prompts_per_objective / len(objective.examples)
        notes[name] = Notes(len(rows), TrainerState(done, state.goal, epoch))
        completions = Completions(
            [rollouts.example(i) for i in rows],
            [rollouts.texts[i] for i in rows],
            [rollouts.completion_ids[i] for i in rows],
            [rollouts.scored_texts[i] for i in rows],
            notes[name],
        )
        scoring.add(objective.rubric, completions)
    found.tallies = {name: o.judge.tally for name, o in state.objectives.items() if o.judge is not None}
    found.notes, found.scoring = notes, scoring


def score(state: TrainState, found: Sampled) -> None:
    """Score the completions, except for the judges' part; each objective's own rubric scores its own rows."""
    assert found.scoring is not None
    for name, objective in state.objectives.items():
        objective.notes, objective.tally = found.notes[name], found.tallies.get(name)
    found.scoring.settle()


def verdicts(state: TrainState, found: Sampled) -> list[Score]:
    """Scores once the judges have answered; logs the judges' tallies and the notices about their servers."""
    assert found.scoring is not None
    scores = found.scoring.scores()
    for name, tally in found.tallies.items():
        logger.info(tally.line(found.plan.step, name))
        for notice in tally.notices:
            state.run.log_event(step=found.plan.step, objective=name, **notice)
    return scores
