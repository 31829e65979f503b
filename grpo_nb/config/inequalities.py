"""Inequalities between batch settings, with the numbers put in; validators raise by them, `grpo-nb plan` shows them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Inequality:
    """One condition on the settings of a batch.

    >>> print(Inequality("batch.group_size 8 >= 2", True))
    batch.group_size 8 >= 2: holds
    """

    text: str
    """Names and numbers on both sides."""
    holds: bool
    otherwise: str = ""
    """Error text for an inequality that fails: the value found and the change to make."""

    def __str__(self) -> str:
        return f"{self.text}: {'holds' if self.holds else 'FAILS'}"


def refuse(conditions: Iterable[Inequality]) -> None:
    """Refuse settings of which a condition does not hold.

    Raises:
        ValueError: the first such condition, its numbers, and what to change.
    """
    for condition in conditions:
        if not condition.holds:
            raise ValueError(f"{condition.otherwise} (needed: {condition.text})")


def of_batch(prompts: int, group: int, update: int, micro: int, most: int) -> Iterator[Inequality]:
    """Conditions on prompts x group_size, mini_batch and micro_batch; `most`: completions that a step may have."""
    total = prompts * group
    product = f"prompts {prompts} x group_size {group} = {total}"
    yield Inequality(
        f"group_size {group} >= 2",
        group >= 2,
        f"group_size={group}: a completion is compared with the others of its group, so every advantage would be 0; "
        "needs 2 or more, 8 is usual",
    )
    yield Inequality(
        f"{product} <= {most}",
        total <= most,
        f"{prompts} prompts x {group} completions are {total} a step; at most {most} can be",
    )
    yield Inequality(
        f"mini_batch {update} <= {product}",
        update <= total,
        f"mini_batch={update} is more than the {total} completions of a step ({prompts} prompts x {group}); lower "
        "mini_batch or raise prompts",
    )
    divides = f"mini_batch={update} does not divide the {total} completions of a step"
    yield _multiple(product, total, ("mini_batch", update), divides)
    if micro >= update:
        yield Inequality(f"micro_batch {micro} >= mini_batch {update}", True)
    else:
        cuts = f"micro_batch={micro} does not divide an update of {update} completions"
        yield _multiple(f"mini_batch {update}", update, ("micro_batch", micro), cuts)


def of_objectives(prompts: int, update: int, total: int, objectives: int) -> Iterator[Inequality]:
    """Conditions on what the objectives share equally; `total`: completions of a step."""
    shared = f"cannot be shared equally by {objectives} objectives"
    fits = not prompts % objectives
    yield Inequality(
        _as_multiple(f"batch.prompts {prompts}", prompts, ("objectives", objectives)),
        fits,
        "" if fits else f"batch.prompts={prompts} {shared}; use a multiple of {objectives}",
    )
    fits = not update % objectives
    usable = [] if fits else [d for d in divisors(total) if d % objectives == 0]
    yield Inequality(
        _as_multiple(f"batch.mini_batch {update}", update, ("objectives", objectives)),
        fits,
        f"batch.mini_batch={update} {shared}, and every update needs all of them; use one of {usable}",
    )


def of_data(objective: str, examples: int, prompts: int, objectives: int) -> Inequality:
    """Training examples of an objective against the prompts that a step takes of it."""
    need = prompts // objectives
    return Inequality(
        f"{examples} training prompts >= batch.prompts {prompts} / {objectives} objective(s) = {need}",
        examples >= need,
        f"objective '{objective}' has {examples} training prompts, a step takes {need} of them; lower batch.prompts "
        "or add data",
    )


def of_lengths(where: str, prompt: int, caps: tuple[int, int], context: int) -> list[Inequality]:
    """The longest prompt against its cap, and with the longest completion against the model's context.

    Args:
        where: objective and id of the prompt.
        caps: sampling.max_prompt_length and sampling.max_completion_length.
    """
    longest, completion = caps
    return [
        Inequality(
            f"prompt {prompt} <= sampling.max_prompt_length {longest}",
            prompt <= longest,
            f"prompt {where} has {prompt} tokens, sampling.max_prompt_length is {longest}; raise it or shorten the "
            "data (prompts are never cut)",
        ),
        Inequality(
            f"prompt {prompt} + sampling.max_completion_length {completion} = {prompt + completion} <= context "
            f"{context}",
            prompt + completion <= context,
            f"prompt {where} ({prompt} tokens) and sampling.max_completion_length={completion} do not fit the model's "
            f"context of {context}; lower max_completion_length or take shorter prompts",
        ),
    ]


def divisors(n: int) -> list[int]:
    """The numbers that divide `n`, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _multiple(text: str, of: int, by: tuple[str, int], otherwise: str) -> Inequality:
    """Inequality that `of` is a multiple of a count; its error text lists the divisors of `of`."""
    holds = not of % by[1]
    return Inequality(_as_multiple(text, of, by), holds, "" if holds else f"{otherwise}; use one of {divisors(of)}")


def _as_multiple(text: str, of: int, by: tuple[str, int]) -> str:
    name, number = by
    return f"{text} = {of // number} x {name} {number}" + (f" + {of % number}, needs + 0" if of % number else "")
