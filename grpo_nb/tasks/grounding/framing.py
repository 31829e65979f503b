"""Removes text around an answer that claims nothing: `According to the text, X.`, markup, the repeated question."""

import re
from collections.abc import Iterable

from grpo_nb.tasks.grounding.claims import plain
from grpo_nb.tasks.grounding.lexicon import words


def _any(parts: Iterable[str]) -> str:
    return f"(?:{'|'.join(parts)})"


_KIND = _any(words("given provided above following supplied source reference background knowledge short cited"))
_TEXT = _any(
    words(
        "text passage context source article paragraph document knowledge information excerpt quotation quote evidence "
        "snippet reading material story statement sentence fact prompt description"
    )
)
_SOURCE = (
    rf"(?:what (?:i|we) (?:read|see|know|have)|(?:(?:the|this|these|that|your|our) )?(?:{_KIND} )*{_TEXT}s?)"
    r"(?: (?:above|below|given|provided|here|you (?:gave|provided)|that (?:is|was) (?:given|provided)))*"
)
_SAYS = _any(
    words(
        "says? states? tells? mentions? indicates? notes? shows? explains? reports? confirms? suggests? describes? "
        "reveals? specifies specify reads? implies writes? claims?"
    )
)
_SAID = _any(
    words("said stated told mentioned indicated noted shown explained reported described specified written given seen")
)
_ADVERB = r"(?:(?:also|clearly|explicitly|only) )*"
_RANK = r"(?:(?:final|short|correct|right|best|full|precise|exact) )*"
_REPLY = r"(?:answer|response|solution|reply)(?: (?:to (?:the|this|your) question|here))?"
_SURE = r"(?:(?:quite|pretty|fairly) )?(?:sure|certain|confident)"
_FRAME = _any(
    (
        rf"(?:according to|based(?: solely| only)? (?:up)?on|as per|per|judging by|going by|using) {_SOURCE}",
        rf"(?:from|in|given|following) {_SOURCE}",
        rf"{_SOURCE} {_ADVERB}{_SAYS}(?: (?:clearly|explicitly|us))?(?: (?:that|who|what|when|where))?",
        rf"(?:as )?(?:it is|is|was)? ?{_ADVERB}{_SAID} (?:that )?(?:in|by) {_SOURCE}(?: that)?",
        rf"it (?:is|was) {_ADVERB}{_SAID}(?: (?:in|by) {_SOURCE})? that",
        rf"(?:we|i|you) (?:can |could )?(?:see|read|learn|know|find|infer|tell)(?: (?:from|in) {_SOURCE})? that",
        rf"as {_SOURCE} {_SAYS}",
        rf"as (?:is |was )?{_SAID}(?: (?:in|by) {_SOURCE})?",
        r"(?:so|thus|therefore|hence|clearly|obviously|certainly|of course|sure|in short|in other words)(?=,)",
        rf"(?:(?:and|so|thus|therefore|hence) )?(?:(?:the|my|your|our) )?{_RANK}{_REPLY}"
        r"(?: (?:is|was|would be|must be|should be|=))?(?: that)?",
        r"(?:that )?you(?: a|')re (?:looking|asking) (?:for|about)",
        rf"i (?:think|believe|would say|am {_SURE})(?: that)?",
        rf"i'm {_SURE}(?: that)?",
    )
)
"""Frames: phrases that name the source or announce an answer."""
_CHAT = _any(
    (
        r"sure|certainly|of course|absolutely|great question|good question|hi|hello",
        r"thanks?(?: you)?[^.!?\n]*",
        r"(?:i'd|i would|i'm|i am) (?:be )?(?:happy|glad|pleased)[^.!?\n]*",
        r"(?:please )?(?:let me know|feel free|i hope|if you (?:have|need)|is there anything) ?[^.!?\n]*",
        r"here(?: is|'s) [^.!?:\n]*(?=:)",
        r"have a [^.!?\n]*|good luck[^.!?\n]*",
    )
)
"""Sentences of courtesy."""
_FRAMES = re.compile(rf"(?<![\w']){_FRAME}(?![\w'])\s*[:,]?", re.IGNORECASE)
_COURTESY = re.compile(rf"(?:^|(?<=[.!?\n]))\s*{_CHAT}\s*(?:[.!?:]+|$)", re.IGNORECASE)
_UNSEEN = re.compile(
    r"<!--.*?(?:-->|\Z)|<(?:script|style)\b.*?(?:</(?:script|style)>|\Z)|~~.*?~~"
    r"|<\|?/?[A-Za-z_]{1,30}\|>|</?[a-zA-Z][^<>]{0,60}>",
    re.DOTALL | re.IGNORECASE,
)
"""Text that the rendered text does not show: comments, tags, text struck out, special tokens."""
_LATEX = re.compile(r"\\(?:boxed|text|textbf|mathrm|textit)\s*\{([^{}]*)\}|\\[,;! ]|\$(?!\d)")


_LABEL = re.compile(r"(?:^|\n)\s*[QA]\s*:")
_FIELD = re.compile(r"(?<=\. )[A-Z][a-z]+(?: [a-z]+)?:(?=\s)")
"""Field name of a list's entry: `Role: ...`."""
_ENTRY = re.compile(r"^\s*(?:\d{1,2}[.)]|[-+*\u2022])\s+", re.MULTILINE)


def said(answer: str, question: str) -> str:
    """An answer without text that is not part of it: comments, tags, frames, and the question where it is repeated.

    >>> said("According to the text, **Ada Collins**.", "Who?"), said("Ada Collins, as the text says.", "Who?")
    ('  **Ada Collins**.', 'Ada Collins,  .')
    """
    text = unasked(shown(answer), question)
    for _ in range(2):
        text = _COURTESY.sub(" ", text)
    return _FRAMES.sub(" ", _LABEL.sub(" ", text))


def shown(answer: str) -> str:
    """An answer as its rendered text reads, in plain characters, the entries of a list after bullets."""
    text = plain(_UNSEEN.sub(" ", answer))
    if len(_ENTRY.findall(text)) > 1:
        entries = _ENTRY.sub(" . ", text)
        fields = len(_FIELD.findall(entries)) > 1
        text = _FIELD.sub("", entries) if fields else _ENTRY.sub(" , ", text)
    for _ in range(3):
        text = _LATEX.sub(lambda found: found[1] or " ", text)
    return text


def unasked(text: str, question: str) -> str:
    """The text without the question where it repeats it."""
    asked = re.findall(r"\w+", plain(question))
    if len(asked) < 3:
        return text
    return re.sub(r"\W+".join(map(re.escape, asked)) + r"\s*\?*", " ", text, flags=re.IGNORECASE)
