"""Words that a run, its trainer and its viewers share: states of a run, and commands to it."""

from enum import StrEnum


class Word(StrEnum):
    """A word whose value is itself, in files as in a notebook."""

    def __repr__(self) -> str:
        return repr(self.value)


class RunState(Word):
    """State of a run.

    >>> RunState.PAUSED.is_live, RunState("done")
    (True, 'done')
    """

    NEW = "new"
    STARTING = "starting"
    """A worker of this kernel loads the model and data; of a session only."""
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    """A worker of this kernel finishes its step and saves; of a session only."""
    STOPPED = "stopped"
    """Ended in good order before its last step."""
    DONE = "done"
    FAILED = "failed"
    DEAD = "dead"
    """The trainer's process ended without logging why; the run can be resumed."""
    CONTINUED = "continued"
    """A newer session trains the run; of a session only."""
    UNREADABLE = "unreadable"

    @property
    def is_live(self) -> bool:
        """Whether a trainer owns the run."""
        return self in (RunState.RUNNING, RunState.PAUSED)

    @property
    def is_active(self) -> bool:
        """Whether a trainer owns the run, or is about to take or release it."""
        return self.is_live or self in (RunState.STARTING, RunState.STOPPING)

    @property
    def has_crashed(self) -> bool:
        return self in (RunState.FAILED, RunState.DEAD)


class Command(Word):
    """Command to the trainer, which obeys at the next step boundary.

    >>> Command.RUN.label, Command.SAVE.once
    ('resume', True)
    """

    RUN = "run"
    PAUSE = "pause"
    STOP = "stop"
    STEP = "step"
    """Train one step, then pause."""
    SAVE = "save"
    EVALUATE = "evaluate"

    @property
    def once(self) -> bool:
        """Whether it is done once, even while the training is paused; other commands hold until the next one."""
        return self in (Command.STEP, Command.SAVE, Command.EVALUATE)

    @property
    def label(self) -> str:
        """Name of the command for people."""
        return "resume" if self is Command.RUN else self.value
