"""Rules about groups without signal, and policies that give every prompt the same answer.

Called through `rules`; each judges a stretch of rows at its end.
"""

import math
from dataclasses import dataclass

from grpo_nb.config import Config
from grpo_nb.metrics import keys
from grpo_nb.rules.finding import WINDOW, Finding, Rows, in_use, label_level, label_start, level, newest, series, start
from grpo_nb.rules.history import ObjectiveRule
from grpo_nb.rules.regressions import Hedges, hedges, hedging_advice
from grpo_nb.rules.warm_start import more_sft, started_without

DEAD_SHARE = 0.7
"""Share of groups without any spread of reward; at K = 8, answers that are 85% right give 27% by chance."""
CHANCE = 1.64
"""Standard errors of a share: one in twenty shares is so far above the true one."""
SOLVED, FAILED = 0.9, 0.1
"""Share of `correct` above (below) which groups lack a signal because the task is solved (out of reach)."""
UNREADABLE = 0.5
"""Share of answers that cannot be read from which the parser is the cause: they all earn the same."""
CONSTANT = 0.3
"""Share of groups without signal, beyond chance, at which the reward does not separate right from wrong."""
TEMPLATES, TEMPLATES_RISEN = 0.5, 0.2
"""Share of template or evasive answers that counts as most answers; and its rise since the start."""


@dataclass(frozen=True)
class Cause:
    """Cause of groups without signal."""

    name: str
    why: str
    advice: str


def dead_groups(rows: Rows, config: Config, objective: str) -> Finding | None:
    """Most groups have no spread of reward, so they give no gradient; split by why."""
    dead = mostly_dead(rows, config, objective)
    if dead is None:
        return None
    expected, right = level(rows, keys.FRAC_ZERO_STD_EXPECTED.of(objective)), label_level(rows, objective, "correct")
    cause = _cause(rows, config, objective, None if expected is None else dead - expected)
    chance = "" if expected is None else f" ({expected:.0%} is expected by chance, from how often each prompt succeeds)"
    solved = cause.name == "solved"
    return Finding(
        "dead_groups",
        "info" if solved else "error" if dead >= 0.999 else "warning",
        newest(rows),
        f"{dead:.0%} of the {objective} groups of the last steps give no learning signal{chance}: {cause.why}.",
        {
            "objective": objective,
            "dead_share": dead,
            "expected_share": expected,
            "correct_share": right,
            "cause": cause.name,
        },
        cause.advice,
        "none" if solved else "warn",
    )


def mostly_dead(rows: Rows, config: Config, objective: str) -> float | None:
    """The share of groups without signal, where it is above DEAD_SHARE by more than the chance of so few groups."""
    key = keys.FRAC_REWARD_ZERO_STD.of(objective)
    share, groups = level(rows, key), len(series(rows[-WINDOW:], key)) * config.prompts_per_objective
    if share is None or share - CHANCE * math.sqrt(share * (1 - share) / groups) < DEAD_SHARE:
        return None
    return share


def _cause(rows: Rows, config: Config, objective: str, unexplained: float | None) -> Cause:
    """Cause of groups without signal; `unexplained`: their share beyond chance."""
    right, unparsed = label_level(rows, objective, "correct"), label_level(rows, objective, "unparsed") or 0.0
    always = _always_hedges(rows, objective)
    if unparsed >= UNREADABLE:
        return Cause(
            "parser",
            f"{unparsed:.0%} of the answers cannot be read, and all of those earn the same",
            f"{more_sft(rows, config, 'to teach the form')}; look at samples for a form that the task does not read; a "
            "longer sampling.max_completion_length lets answers reach it",
        )
    if unexplained is not None and unexplained >= CONSTANT:
        return Cause(
            "constant_reward",
            "right and wrong answers of a group earn the same",
            "give them different rewards: see that no reward function returns a constant and that no cap, clip or "
            "rounding makes them equal (`grpo_nb.doctor.reward_check.workbench` shows what each answer earns)",
        )
    if right is not None and right >= SOLVED:
        why = f"{right:.0%} of answers are correct, so there is little left to learn"
        return Cause("solved", why, "nothing; add harder prompts if the run should continue")
    if always:
        why = f"nearly all that are not correct {always.words} where the text answers, and earn the same"
        return Cause("hedging", why, hedging_advice(rows, config, objective))
    if right is not None and right <= FAILED:
        return Cause(
            "out_of_reach",
            f"{f'only {right:.0%}' if right else 'none'} of their answers are correct: none beats its neighbours",
            "look at samples for answers the scorer misreads; "
            f"{more_sft(rows, config, 'to get some right answers')}; or begin with easier prompts",
        )
    temperature = in_use(rows[-1], keys.TEMPERATURE, config.sampling.temperature)
    return Cause(
        "alike",
        "the answers of a group all earn the same, right or wrong",
        f"raise sampling.temperature (now {temperature:g}) or batch.group_size (now {config.batch.group_size}), or "
        "make the reward finer",
    )


def _always_hedges(rows: Rows, objective: str) -> Hedges | None:
    hedged = hedges(rows, objective)
    return hedged if hedged is not None and hedged.always else None


def template_answers(rows: Rows, config: Config, objective: str) -> Finding | None:
    """Wrong answers repeat one text for many prompts, or evade: nearly all, or more and more of them."""
    named = {"the same sentence for several prompts": keys.TEMPLATE, "evasive words": keys.EVASIVE}
    shares = {what: (level(rows, key.of(objective)), start(rows, key.of(objective))) for what, key in named.items()}
    known = {what: (now, began) for what, (now, began) in shares.items() if now is not None and began is not None}
    if not known:
        return None
    what, (now, began) = max(known.items(), key=lambda item: item[1][0])
    if now < TEMPLATES_RISEN:
        return None
    right, before = label_level(rows, objective, "correct"), label_start(rows, objective, "correct")
    gained = (right or 0.0) - (before or 0.0)
    rising = len(rows) > WINDOW and now - began >= TEMPLATES_RISEN and gained < now - began
    always = now >= TEMPLATES and now > began - TEMPLATES_RISEN
    if not (rising or always):
        return None
    hedged = hedges(rows, objective)
    if hedged is not None and (hedged.always or hedged.rising):
        return None
    return Finding(
        "template_answers",
        "warning",
        newest(rows),
        f"{now:.0%} of the {objective} answers are wrong or undecided and use {what} (at the start {began:.0%}"
        + (", and rising" if rising else "")
        + "): the policy learns a phrase that fits every prompt, not the task.",
        {"objective": objective, "share": now, "share_start": began, "kind": what, "rising": rising, "correct": right},
        "read the newest samples and see what the phrase earns: it must earn less than a right answer, and no more "
        f"than another wrong one; raise beta/{objective} or resume from a checkpoint before the rise"
        + (
            ""
            if started_without(rows)
            else f"; if it was there at the start, the SFT data teach it (sft.data, sft.steps now {config.sft.steps})"
        ),
    )


OBJECTIVE_RULES: tuple[ObjectiveRule, ...] = (dead_groups, template_answers)
