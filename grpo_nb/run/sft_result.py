"""Tests whether GRPO of a run starts, or started, from a result of SFT."""

from grpo_nb.run.run import Run


def without_sft(run: Run) -> bool:
    """Whether `sft.steps` is above 0 and GRPO started without a result of SFT all the same, as its newest start logs.

    False where the log does not have it, as before GRPO.
    """
    if run.config.sft.steps == 0 or run.sft_checkpoints.steps():
        return False
    events = run.stored("events")
    starts = events.places("kind", {"start"})
    return len(starts) > 0 and events[int(starts[-1])].get("from_sft") is False
