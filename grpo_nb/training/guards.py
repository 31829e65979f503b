"""The rules during training: findings are logged as they come, and the worst of them stop the run."""

import math
from collections.abc import Sequence

from grpo_nb import fingerprint, rules
from grpo_nb.metrics import keys
from grpo_nb.printable import Clean
from grpo_nb.rules import health, sft, updates
from grpo_nb.rules.finding import Finding, Rows
from grpo_nb.run.run import Run
from grpo_nb.training import metrics
from grpo_nb.training.state import TrainState
from grpo_nb.types import Experience, Rollouts

ROUNDING = 1e-3
"""Nats above 0 that an engine in bfloat16 may give to a token that is as good as certain."""


class TrainingError(Clean, RuntimeError):
    """Raised when training must not continue; the message names the finding and the change to make."""


def check_rollouts(rollouts: object, stop_token_ids: Sequence[int], most_bad: float | None = None) -> None:
    """Check that a stop token ends every stopped completion and occurs nowhere before, so that stopping is trained, and
    that every token has the log-prob it was sampled with.

    Log-probs that are not finite are accepted where at most the share `most_bad` of the completions has any.

    Raises:
        TrainingError: an engine returned something else.
    """
    if not isinstance(rollouts, Rollouts):
        raise TrainingError(
            f"the engine returned {type(rollouts).__name__}; its `generate(policy, request)` must return "
            "grpo_nb.types.Rollouts"
        )
    ends = set(stop_token_ids)
    if len(rollouts.logprobs) != len(rollouts.completion_ids):
        raise TrainingError(
            f"the engine gave log-probs of {len(rollouts.logprobs)} completions, and {len(rollouts.completion_ids)} "
            "completions; it must give the log-prob of every token that it draws"
        )
    for i, (ids, reason) in enumerate(zip(rollouts.completion_ids, rollouts.stop_reasons, strict=True)):
        if not ids or (ids[-1] in ends) != (reason == "stop") or ends & set(ids[:-1]):
            raise TrainingError(
                f"completion {i} ({len(ids)} ids, stop reason '{reason}') does not end with its first stop token; "
                f"the engine must cut there and keep it (stop tokens: {sorted(ends)})"
            )
    bad = {*rollouts.not_finite()}
    forgiven = bad if most_bad is not None and len(bad) <= most_bad * len(rollouts.logprobs) else set()
    for i, ids in enumerate(rollouts.completion_ids):
        values = [v for v in rollouts.logprobs[i] if i not in forgiven or math.isfinite(v)]
        _check_logprobs(i, len(ids) - len(rollouts.logprobs[i]) + len(values), values)


def _check_logprobs(completion: int, tokens: int, logprobs: Sequence[float]) -> None:
    wrong = [value for value in logprobs if not -math.inf < value <= ROUNDING]
    if len(logprobs) != tokens or wrong:
        raise TrainingError(
            f"completion {completion}: the engine gave {len(logprobs)} log-probs for {tokens} tokens"
            + (f", among them {wrong[0]}" if wrong else "")
            + "; it must give one a token, finite and not above 0, of the distribution it drew from"
        )


def check_masks(batch: Experience, mask_truncated: bool) -> None:
    """Check that the trained tokens of a row are its sampled tokens, stop token included.

    Raises:
        TrainingError: a mask is longer or shorter than the completion.
    """
    trained, rollouts = batch.mask().sum(dim=1).tolist(), batch.rollouts
    for i, (ids, reason) in enumerate(zip(rollouts.completion_ids, rollouts.stop_reasons, strict=True)):
        wanted = 0 if mask_truncated and reason == "length" else len(ids)
        if trained[i] != wanted:
            raise TrainingError(f"completion {i}: {wanted} tokens were sampled, the mask trains another number of them")


def check_ends_with_stop(completion_ids: Sequence[Sequence[int]], stop_token_ids: Sequence[int]) -> None:
    """Check that every completion to learn ends with a stop token, so that the model learns to stop.

    Raises:
        TrainingError: one does not.
    """
    ends = set(stop_token_ids)
    if endless := [i for i, ids in enumerate(completion_ids) if not ids or ids[-1] not in ends]:
        raise TrainingError(
            f"{len(endless)} of {len(completion_ids)} SFT completions do not end with a stop token (the first: "
            f"number {endless[0]}). A model that learns from them never ends an answer. Append one of {sorted(ends)} "
            "to each"
        )


def watch(state: TrainState, row: metrics.Row) -> None:
    """Log the rules' findings on the newest row; those that end the run in good order are kept for `check_ends`.

    Raises:
        TrainingError: a finding whose action is to stop.
    """
    left_out = row[keys.STATUS] == "skipped" or row[keys.GRAD_SKIPPED]
    state.history.append(row)
    skip = rules.before_update(state.history, state.config) if left_out else None
    ends = health.repeated_rollbacks(state.history, state.config)  # it ends the run, new or found before a resume
    found = [*([skip] if skip else []), *rules.after_step(state.history, state.config)]
    found += [ends] if ends and ends.key not in {finding.key for finding in found} else []
    log_and_raise(state.run, found)
    if any(finding.action == "slow" for finding in found):
        state.recovery = state.recovery.slowed()
    state.ends = [finding for finding in found if finding.action == "end"]


def watch_sft(run: Run, recent: Rows) -> None:
    """Log why SFT's newest update was skipped.

    Raises:
        TrainingError: the updates of several steps in a row were.
    """
    if recent[-1][keys.STATUS] == "skipped":
        found = [sft.skipped(recent[-1:], [], run.config), updates.repeated_skips(recent, run.config)]
        log_and_raise(run, [finding for finding in found if finding])


def check_ends(state: TrainState) -> None:
    """Raise for findings that end the run, between two steps, so that the step is saved.

    Raises:
        TrainingError: a finding of the last step whose action is to end the run.
    """
    if state.ends:
        raise TrainingError("\n".join(str(finding) for finding in state.ends))


def watch_sources(state: TrainState) -> None:
    """Log which of the package's files were edited since they were loaded, once for each set of them."""
    files = fingerprint.changed()
    if files and files != state.edited:
        advice = "to use the new code, stop, restart the kernel (or grpo_nb.reload()) and start again"
        log_and_raise(
            state.run,
            [Finding("code_changed", "warning", state.step, fingerprint.sentence(files), {"files": files}, advice)],
        )
    state.edited = files


def log_and_raise(run: Run, found: Sequence[Finding]) -> None:
    """Log findings.

    Raises:
        TrainingError: the action of one is to stop.
    """
    for finding in found:
        run.log_event("finding", **finding.to_dict())
    if stops := [finding for finding in found if finding.action == "stop"]:
        raise TrainingError("\n".join(str(finding) for finding in stops))
