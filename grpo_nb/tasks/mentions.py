"""Marks the mentions of options in an answer: each letter of one becomes `@0`, each text of one `#0`."""

import re
from collections.abc import Sequence
from functools import lru_cache

from grpo_nb.tasks.reading import LETTERS
from grpo_nb.tasks.wordings import ABSTENTION, ARTICLES, DANGLING, FRAME, folded, plain

MENTION = re.compile(r"[@#](\d)")
_JOINED = re.compile(r"(?<!#\d )@(\d)\s*[).:\-\]]+\s*(?=#\d\s*(?:$|[.,;:!?\n(@]|because\b|since\b|as\b))")
_AFTER_LETTER = (
    "is|was|because|since|as|and|or|but|for|given|due|based|would|seems|appears|which|who|unless|if|per|here|must|"
    "should|can|cannot|could|might|may|will|according|while|whereas|although|though|the|an?|has|looks|makes|follows|"
    "fits|in|on|by|from|with|over|rather|instead|then|so|therefore|isn't|wasn't|can't|does|did|also|only|both|remains"
)
"""Words that follow a letter and no article."""
_BEFORE_LETTER = r"(?:[Oo]ptions?|[Cc]hoices?|[Ll]etters?|OPTION)"
_LETTER = re.compile(
    r"(?<![\w'@#-])(?<!N/)(?:(?<!Plan )(?<!itamin )([BC])(?![\w'&-]|\.[A-Za-z])"
    rf"|(A)(?=\s*(?:[).:,;/&!?(\]|=]|$|\n)| - |\s+(?:{_AFTER_LETTER})\b))"
)
_NAMED_LETTER = re.compile(rf"\b{_BEFORE_LETTER}[\s:]+\(?([a-cA-C])\b(?!')")
_FIRST_LETTER = re.compile(r"^\W*([a-c])\s*(?:[).:\]]|$)")
_LAST_LETTER = re.compile(r"(?<=\bis )\(?([a-c])\)?(?=\W*$)")
_BRACKETED = re.compile(r"[(\[]\s*([a-cA-C])\s*[)\]]")
_ONLY = re.compile(r"^\W*(?:(?:[a-cA-C]|and|or|options?)\b\W*)+$")
_PLACES = {"first": 0, "second": 1, "third": 2}

_TITLES = re.compile(r"\b(dr|mr|mrs|ms|prof|st|vs|e\.g|i\.e)\.")
_MARKDOWN = re.compile(
    r"\\(?:text|mathrm|mathbf|textbf|boxed)\b|[*_`$\\{}~\"\u201c\u201d\u00ab\u00bb\u201e#@]|^[ \t]*[>\-+][ \t]", re.M
)


def with_mentions(text: str, options: Sequence[str], unknown: int, question: str) -> str:
    """The text in folded words, without markdown, its mentions of options as marks.

    >>> with_mentions("**B.** A grandson, not Mr. Lee", ["Ann Lee", "The grandson", "Not known"], 2, "Who?")
    '@1 #1 , not mr #0'
    """
    text = _MARKDOWN.sub(lambda mark: "" if mark[0] in "*_`" else " ", plain(text)).strip()
    text = _TITLES.sub(r"\1", folded(_letters(text)))
    for pattern, index in _names(tuple(options), unknown, question):
        text = pattern.sub(f" #{index} ", text)
    text = re.sub(r"#(\d)(?: #\1)+", r"#\1", re.sub(r"[^\S\n]+", " ", text))
    return _JOINED.sub(r"@\1 ", text).strip()


def _letters(text: str) -> str:
    if _ONLY.match(text):
        return re.sub(r"\b[a-cA-C]\b", _letter, text)
    text = re.sub(r"\b(first|second|third) (?:option|choice)\b", lambda m: f" @{_PLACES[m[1]]} ", text)
    text = _BRACKETED.sub(lambda m: f" @{LETTERS.index(m[1].upper())} ", text)
    for pattern in (_NAMED_LETTER, _FIRST_LETTER, _LAST_LETTER, _LETTER):
        text = pattern.sub(_letter, text)
    return text


def _letter(match: re.Match[str]) -> str:
    """The match with its letter as a mention: the only group that matched, or all of it."""
    letter = next((group for group in match.groups() if group), match[0])
    place = match[0].rindex(letter)
    return f"{match[0][:place]} @{LETTERS.index(letter.upper())} {match[0][place + 1 :]}"


@lru_cache(maxsize=4096)
def _names(options: tuple[str, ...], unknown: int, question: str) -> tuple[tuple[re.Pattern[str], int], ...]:
    """Patterns of the options' texts, the longest first, then of the words that one person alone has."""
    words = [[word for word in re.findall(r"[\w']+", folded(option)) if word not in ARTICLES] for option in options]
    full = [(w, i) for i, w in enumerate(words) if w and (i == unknown or not ABSTENTION.fullmatch(" ".join(w)))]
    common = set(re.findall(r"[\w']+", folded(question))) | FRAME | DANGLING
    single = [
        ([word], index)
        for index in range(len(options))
        if index != unknown
        for word in words[index]
        if word not in common and _tells_apart(word, words[:index] + words[index + 1 :])
    ]
    full.sort(key=lambda entry: -len(" ".join(entry[0])))
    return tuple((_name_pattern(found), index) for found, index in (*full, *single))


def _tells_apart(word: str, others: Sequence[Sequence[str]]) -> bool:
    return len(word) > 1 and not any(word in other for other in others) and not ABSTENTION.fullmatch(word)


def _name_pattern(words: Sequence[str]) -> re.Pattern[str]:
    inside = r"[\s,-]+(?:(?:the|a|an|his|her|their) )?".join(re.escape(word) for word in words)
    return re.compile(rf"(?<![\w@#])(?:(?:the|an?|his|her|their|my|your) )?{inside}(?:e?s)?(?![\w])")
