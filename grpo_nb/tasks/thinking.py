"""Separates a completion's answer from the model's thinking.

Thinking stands between an opening and a closing mark. The marks of all model families are one table (FAMILIES).

- The answer is what follows the last closing mark.
- A closing mark without an opening one closes a block that the prompt opened.
- A block that is opened and never closed is all thinking: there is no answer.
- A text without marks is an answer as it is.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

_WORD = (
    r"(?:\w+[:_])?(?:think(?:ing)?|thoughts?|reason(?:ing)?|reflection|reflect|analysis|scratch_?pad|rationale"
    r"|monologue|inner_?thoughts?|internal_?thoughts?)(?:_\w+)?"
)


class Family(NamedTuple):
    """The marks of one way to think aloud, as regular expressions; letter case does not count."""

    opens: str
    closes: str
    tokens: tuple[str, ...] = ()
    """Tokens that are a part of a mark. Those that a mark consists of need no entry."""


FAMILIES: Mapping[str, Family] = {
    # DeepSeek R1, Qwen, GLM, MiniMax, ERNIE, SmolLM3, Nemotron, Phi-4, Olmo 3: <think>; Seed-OSS: <seed:think>;
    # LongCat: <longcat_think>; K2: <think_fast>; EXAONE Deep: <thought>; Reka: <reasoning>; Reflection: <thinking>
    "tag": Family(rf"<{_WORD}>", rf"</{_WORD}>"),
    "Magistral": Family(r"\[THINK(?:ING)?\]", r"\[/THINK(?:ING)?\]"),
    "Command A": Family(r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),
    "Kimi": Family("◁think▷", "◁/think▷"),
    "OpenThinker": Family(r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>"),
    "Apertus": Family(r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),
    "Solar": Family(r"<\|think(?::start|ing)?\|>", r"<\|think:end\|>|<\|/think(?:ing)?\|>|<\|content\|>"),
    "MedGemma": Family(r"<unused94>", r"<unused95>"),
    "Pangu": Family(r"\[unused16\]", r"\[unused17\]"),
    "Gemma 4": Family(r"<\|channel>(?!final)\w*", r"<channel\|>", ("<|channel>",)),
    "s1": Family(r"<\|im_start\|>think\b", r"<\|im_start\|>answer\b", ("<|im_start|>",)),
    "gpt-oss": Family(
        r"<\|channel\|>(?!\s*final)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>",
        r"<\|channel\|>\s*final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>",
        ("<|channel|>", "<|message|>"),
    ),
    "gpt-oss without its special tokens": Family(r"\Aanalysis(?=[A-Z])", r"assistantfinal(?=\W|[A-Z\d]|\Z)"),
    "Granite": Family(r"^here(?: is|['\u2019]s) my thought process:", r"^here(?: is|['\u2019]s) my response:"),
}
"""Opening and closing marks by family."""

_OPEN, _CLOSE = (
    re.compile("|".join(f"(?:{family[side]})" for family in FAMILIES.values()), re.IGNORECASE | re.MULTILINE)
    for side in (0, 1)
)
_PARTS = frozenset(token for family in FAMILIES.values() for token in family.tokens)


def after_thinking(text: str) -> str:
    """The part of a completion after the thinking; empty where thinking was begun and not ended.

    >>> after_thinking("<think>A or B?</think>\\nB"), after_thinking("so B</think>B"), after_thinking("<think>B")
    ('B', 'B', '')
    """
    end = max((match.end() for match in _CLOSE.finditer(text)), default=0)
    if _OPEN.search(text, end):
        return ""
    return text[end:].strip() if end else text


def is_mark(token: str) -> bool:
    """Whether a token is a mark of thinking, or a part of one.

    >>> is_mark("</think>"), is_mark("<|channel|>"), is_mark("<|endoftext|>")
    (True, True, False)
    """
    return token in _PARTS or _OPEN.fullmatch(token) is not None or _CLOSE.fullmatch(token) is not None


def left_open(turn: str) -> str:
    """The opening mark that the begin of an assistant's turn leaves open; empty where it leaves none.

    >>> left_open("assistant\\n<think>\\n"), left_open("assistant\\n<think>\\n\\n</think>\\n\\n")
    ('<think>', '')
    """
    end = max((match.end() for match in _CLOSE.finditer(turn)), default=0)
    opened = _OPEN.search(turn, end)
    return opened[0] if opened else ""


def ends_open(prompt: str) -> str:
    """The opening mark that a text ends in; empty where it ends in none.

    >>> ends_open("Q: what is <think>?\\nA: <think>\\n"), ends_open("Q: what is <think>?")
    ('<think>', '')
    """
    return next((mark[0] for mark in _OPEN.finditer(prompt) if not prompt[mark.end() :].strip()), "")
