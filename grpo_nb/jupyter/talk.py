"""Compares the answers of base, SFT and trained model to one question: one policy in memory, token by token."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from grpo_nb.evaluation.compare import Stage
from grpo_nb.jupyter.workers import live_session
from grpo_nb.printable import brief, clean_logger, cut
from grpo_nb.report.markup import html
from grpo_nb.run.run import Run, RunError
from grpo_nb.tasks.system_prompt import with_system, without_system
from grpo_nb.types import Example, Message, Prompt

if TYPE_CHECKING:
    from grpo_nb.tasks import Task

logger = clean_logger(__name__)

REDRAW_SECONDS = 0.05
"""Between two updates of an answer that is being written, at least."""
OWN = "a question of your own"
TITLES: Mapping[Stage, str] = {"base": "base model", "sft": "after SFT"}
Chosen = tuple[str, Example]
"""An objective and an example of it."""


class Talk:
    """Ask a run's stages a question: type one, or choose an example of the run, whose task then scores each answer.

    A question begins with the `system_prompt` of the chosen example's objective, edited or not; without an example,
    with the text that all objectives share, if they share one.

    Answers are written one after the other, by one policy whose trained weights are exchanged. Nothing is logged in
    the run. While a session of this kernel trains the run, it cannot answer, and the button shows why.
    """

    def __init__(
        self,
        run: Run | str | Path,
        *,
        tasks: "Mapping[str, Task] | None" = None,
        stage: Stage = "latest",
        limit: int = 8,
    ) -> None:
        """
        Args:
            tasks: own tasks by objective, as in `train.grpo`.
            stage: the trained one of the three: `latest`, or the step of a checkpoint.
            limit: examples of each objective that can be chosen.

        Raises:
            RunError: the run has no checkpoint of that step, or `stage` is something else.
        """
        self.run = Run.of(run)
        _check_stage(self.run, stage)
        self.stages: list[Stage] = ["base"]
        if self.run.sft_checkpoints.steps():
            self.stages.append("sft")
        if self.run.checkpoints.steps():
            self.stages.append(stage)
        self._given, self._limit = tasks, limit
        self._tasks: Mapping[str, Task] = {}
        self._staged: Any = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._asked = 0
        self._newest: int | None = None
        """The step that `latest` was when it answered: another one may be saved meanwhile, or the last be damaged."""
        self.message = w.HTML()
        self.example = w.Dropdown(options=[(OWN, None)], description="example", layout=w.Layout(width="420px"))
        self.question = w.Textarea(description="question", rows=4, layout=w.Layout(width="98%"))
        self.temperature = w.FloatSlider(
            value=0.0, min=0.0, max=2.0, step=0.1, description="temperature", tooltip="0: the likeliest token"
        )
        self.temperature.style.description_width = "90px"
        cap = self.run.config.sampling.max_completion_length
        self.tokens = w.BoundedIntText(value=cap, min=1, max=100_000, description="tokens", tooltip="most of an answer")
        self.ask = w.Button(description="Ask", icon="comment", tooltip="ask each stage")
        self.stop = w.Button(description="Stop", icon="stop", disabled=True, tooltip="end the answers here")
        self.answers = {stage: w.HTML(layout=w.Layout(flex="1 1 260px", margin="0 12px 0 0")) for stage in self.stages}
        self.widget = w.VBox(self._parts())
        self.example.observe(self._chosen, names="value")
        self.ask.on_click(lambda _: self.begin())
        self.stop.on_click(lambda _: self._stop.set())
        self._offer()
        self._show({stage: "" for stage in self.stages})
        self.check()

    def begin(self) -> threading.Thread | None:
        """Start the stages' answers in a separate thread; None where they cannot answer at present."""
        if self.check() is not None or (self._thread is not None and self._thread.is_alive()):
            return None
        self._stop.clear()
        self._asked += 1
        self.ask.disabled, self.stop.disabled = True, False
        self._thread = threading.Thread(target=self._ask_all, name="grpo_nb talk", daemon=True)
        self._thread.start()
        return self._thread

    def check(self) -> str | None:
        """Reason why the run cannot answer now, shown above the button; None where it can."""
        session = live_session(self.run.path)
        reason = None
        if session is not None:
            reason = (
                f"{self.run.name} trains in this kernel, and its memory and time belong to the training. Ask when it "
                "has ended, or stop it with session.stop()"
            )
        self.ask.tooltip = reason or "ask each stage"
        self._say(reason or "")
        return reason

    def close(self) -> None:
        """Stop, and give the model's memory back."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._staged is not None:
            self._staged.release()
        self.widget.close()

    def _parts(self) -> list[w.Widget]:
        bar = w.HBox([self.temperature, self.tokens, self.ask, self.stop], layout=w.Layout(flex_flow="row wrap"))
        columns = w.HBox(list(self.answers.values()), layout=w.Layout(flex_flow="row wrap", margin="8px 0 0 0"))
        return [self.example, self.question, bar, self.message, columns]

    def _offer(self) -> None:
        """The run's held-out examples to choose from; a question of one's own needs none of them."""
        from grpo_nb.evaluation.evaluate import examples_of
        from grpo_nb.tasks import load_tasks

        try:
            self._tasks = load_tasks(self.run.config, self.run.path, self._given)
            found = [
                (cut(f"{name}: {example.id}"), (name, example))
                for name, task in self._tasks.items()
                for example in examples_of(self.run, name, task, limit=self._limit)
            ]
        except Exception as error:  # data that is elsewhere; own tasks that were not given
            logger.info("no examples of %s can be offered", self.run.name, exc_info=True)
            self.example.options = [(cut(f"{OWN} (no examples: {error})"), None)]
            return
        self.example.options = [(OWN, None), *found]

    def _chosen(self, change: Any) -> None:
        if change["new"] is not None:
            self.question.value = self._text_of(change["new"])

    def _of_example(self) -> Chosen | None:
        """The example that the question is, unless it was edited."""
        chosen: Chosen | None = self.example.value
        return chosen if chosen is not None and self.question.value == self._text_of(chosen) else None

    def _text_of(self, chosen: Chosen) -> str:
        """The example's question as editable text, without the objective's `system_prompt`."""
        objective, example = chosen
        added = self.run.config.objectives[objective].system_prompt is not None
        return _text(without_system(example.prompt) if added else example.prompt)

    def _system_prompt(self) -> str | None:
        """The text that begins an own question."""
        objectives, chosen = self.run.config.objectives, self.example.value
        texts = {o.system_prompt for name, o in objectives.items() if chosen is None or name == chosen[0]}
        return texts.pop() if len(texts) == 1 else None

    def _ask_all(self) -> None:
        try:
            self._answer_all(self._of_example(), self.question.value, self._system_prompt())
        except Exception as error:
            logger.exception("%s could not be asked", self.run.name)
            self._say(f"{type(error).__name__}: {error}")
        finally:
            self.ask.disabled, self.stop.disabled = False, True

    def _answer_all(self, chosen: Chosen | None, question: str, system: str | None) -> None:
        from grpo_nb.evaluation.staged import StagedPolicy

        self._show({stage: "" for stage in self.stages})
        if self._staged is None:
            self._staged = StagedPolicy(self.run)
        if not self._staged.loaded:
            self._say("loading the model; nothing is kept twice")
        prompt: Prompt | None = None if chosen is None else chosen[1].prompt
        for stage in self.stages:
            if self._stop.is_set():
                break
            if prompt is None:
                turn: list[Message] = [{"role": "user", "content": question}]
                turn = turn if system is None else with_system(turn, system)
                prompt = turn if self._staged.takes_messages(stage) else question
            self._write(stage, chosen, self._answer(stage, prompt))
        self._say("stopped" if self._stop.is_set() else "")

    def _answer(self, stage: Stage, prompt: Prompt) -> Iterator[str]:
        answer: Iterator[str] = self._staged.answer(
            stage, prompt, self.temperature.value, self.tokens.value, self._asked
        )
        return answer

    def _write(self, stage: Stage, chosen: Chosen | None, texts: Iterator[str]) -> None:
        """Show one answer as it grows, and the task's verdict at the end."""
        self._say("")
        text, drawn = "", 0.0
        for text in texts:
            if stage == "latest":
                self._newest = self._staged.step
            if time.monotonic() - drawn >= REDRAW_SECONDS:
                drawn = time.monotonic()
                self._show({stage: f"{text} …"})
            if self._stop.is_set():
                break
        facts = [] if chosen is None or self._stop.is_set() else self._judged(chosen, text)
        self._show({stage: text}, facts)

    def _judged(self, chosen: Chosen, text: str) -> Sequence[str]:
        objective, example = chosen
        try:
            score = self._tasks[objective].score(example, text)
        except Exception as error:  # a task of one's own
            return [f"not scored: {type(error).__name__}: {error}"]
        value = f"not scored: {score.cause}" if score.value is None else f"score {score.value:.3g}"
        return [value, *([score.label] if score.label else [])]

    def _show(self, texts: Mapping[Stage, str], facts: Sequence[str] = ()) -> None:
        for stage, text in texts.items():
            self.answers[stage].value = str(html("answer", title=self._title(stage), text=text, facts=facts))

    def _title(self, stage: Stage) -> str:
        """Of the newest stage with the step whose weights answered; before that, with the newest that was saved."""
        if stage == "latest":
            step = max(self.run.checkpoints.steps(), default=None) if self._newest is None else self._newest
            return "trained" if step is None else f"trained, step {step}"
        return TITLES.get(stage, f"trained, step {stage}")

    def _say(self, text: str) -> None:
        self.message.value = str(html("note", text=text)) if text else ""

    def _ipython_display_(self) -> None:
        from IPython.display import display

        from grpo_nb.jupyter.without_kernel import Words

        self.check()
        self.widget.add_class(CLASS)
        bundle = dict(self.widget._repr_mimebundle_() or {}) | {"text/plain": repr(self)}
        display(bundle, raw=True)  # type: ignore[no-untyped-call]
        Words(f"{self!r}. To ask, run this cell again.", CLASS)

    def __repr__(self) -> str:
        return f"questions to {self.run.name}: {', '.join(map(self._title, self.stages))}"


CLASS = "grpo-nb-talk"
"""CSS class of the widget."""


def _check_stage(run: Run, stage: object) -> None:
    steps = run.checkpoints.steps()
    if stage != "latest" and not (type(stage) is int and stage in steps):
        raise RunError(
            f"stage={brief(stage)} is not among the GRPO checkpoints of {run.name}, {steps or 'none'}; give one of "
            "them, or 'latest'"
        )


def _text(prompt: Prompt) -> str:
    """The question as editable text; several turns with their roles."""
    if isinstance(prompt, str):
        return prompt
    turns = [f"{turn['role']}: {turn['content']}" for turn in prompt] if len(prompt) > 1 else [prompt[0]["content"]]
    return "\n".join(turns)
