"""Is an answer the right one, and does the text it quotes hold it? Pure functions of texts, no length in a class."""

import re
from collections import Counter
from collections.abc import Set
from functools import lru_cache

from grpo_nb.tasks.reading import abstains, contains, denied, normalise

QUOTE_WORDS = (5, 40)
"""A quotation has at least so many words (fewer name nothing) and at most so many (more is copying)."""
COPIED = 0.8
"""An answer that holds this share of the words of a source longer than a quotation repeats it."""
WINDOW = 15
"""Words that a gold quotation has at most: of a longer sentence it is the part around the answer."""

_YES_NO = ("yes", "no")
_SMALL = frozenset((
    "and", "are", "as", "at", "be", "by", "for", "from", "has", "have", "he", "her", "his", "in", "is", "it", "its",
    "of", "on", "or", "she", "that", "they", "this", "to", "was", "were", "which", "who", "with",
))  # fmt: skip
_SENTENCE = re.compile(r"(?<=[\w)\"\u201d][.!?])\s*(?=[A-Z\"\u201c(])")
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
_NAMED = re.compile(r"(?<=\s)[A-Z][\w'\u2019-]*(?:\s+(?:(?:of|for|the|in)\s+)?[A-Z][\w'\u2019-]*)*")
_NAME = re.compile(r"(?<![.!?:\"\u201c]\s)(?<=\s)[A-Z]\w+")


def matches(answer: str, right: str, hallucinated: str, question: str = "") -> bool:
    """Whether a short answer gives the right one: equal to it after normalising, or holding it and little else.

    "Little else": of the words that only the hallucinated answer has less than half (where it has none of its own,
    the answer is nearer to the right one by token F1), no more new words than the right answer has, and no choice
    left to the reader ("Delhi or Pune", "Delhi, unknown", or the names that the question names and not a word more).
    Words of the question and small words are not new. Yes/no questions go by the answer's first word, which nothing in
    the answer may take back.
    """
    said, gold, bad = normalise(answer), normalise(right), normalise(hallucinated)
    if said == gold:
        return True
    if not contains(said, gold) or denied(said, gold):
        return False
    words, known = set(said.split()), {*gold.split(), *normalise(question).split()}
    own = set(bad.split()) - known
    nearer = 2 * len(own & words) < len(own) if own else token_f1(said, gold) > token_f1(said, bad)
    if abstains(f" {said} ".replace(f" {gold} ", " ").strip()) or _lists(said, gold, question):
        return False
    if not nearer or "or" in words - set(gold.split()) or "/" in answer.replace(right, ""):
        return False
    if gold in _YES_NO:
        return said.split()[0] == gold and _YES_NO[1 - _YES_NO.index(gold)] not in words
    return len(words - known - _SMALL) <= len(gold.split())


def only_abstains(answer: str, source: str, hallucinated: str, question: str) -> bool:
    """Whether an answer says that the text does not tell, and does not name something all the same."""
    if not abstains(answer):
        return False
    own = _words(hallucinated) - _all_words(question)
    return not own & _words(answer) and not invented(answer, f"{source} {question}")


def agrees(answer: str, right: str, hallucinated: str, source: str, share: float) -> bool:
    """Whether a free answer says what the right reference says, and not what the hallucinated one does.

    Of the words that only the right reference has it holds at least `share`, of those that only the hallucinated one
    has less than half, and a smaller part than of the right one's; every number and every name in it is in the source
    or the right reference; and it does not repeat a long source as a whole. Where the right reference has no words of
    its own, it must be nearer to it by F1.

    A rule sees nearness to the references, not truth: a right answer in quite other words counts as wrong.
    """
    said = _words(answer)
    of_right, of_bad = _words(right) - _all_words(hallucinated), _words(hallucinated) - _all_words(right)
    held = len(of_right & said) / len(of_right) if of_right else None
    taken = len(of_bad & said) / len(of_bad) if of_bad else 0.0
    if taken >= 0.5 or invented(answer, f"{source} {right}") or _repeats(said, source):
        return False
    if held is None:
        said_text = normalise(answer)
        return token_f1(said_text, normalise(right)) > token_f1(said_text, normalise(hallucinated))
    return held >= share and held > taken


def invented(answer: str, source: str) -> set[str]:
    """Numbers of an answer, and names that do not begin a sentence, which the source does not have.

    >>> sorted(invented("In 1999 the mayor Ablo met Brixa.", "Ablo met the mayor in 1998."))
    ['1999', 'Brixa']
    """
    known = _all_words(source) | set(_NUMBER.findall(source))
    found = {*_NUMBER.findall(answer), *_NAME.findall(answer)}
    return {word for word in found if word not in known and not _all_words(word) <= known}


def grounded(quote: str, source: str, about: Set[str]) -> bool:
    """Whether a quotation stands in the source word by word (but for case and spacing) and speaks of the answer.

    It has 5 to 40 words (QUOTE_WORDS; a source of fewer may be quoted whole) and shares one with `about`.
    """
    words, text = _squeezed(quote), _squeezed(source)
    least, most = QUOTE_WORDS
    if not min(least, len(text.split())) <= len(words.split()) <= most:
        return False
    return _stands_in(words, text) and bool(about & _words(quote))


def best_quote(source: str, right: str, question: str, about: Set[str]) -> str | None:
    """The sentence of the source that holds the right answer, else the one nearest to answer and question; or None.

    What SFT learns to quote. A sentence of more than 15 words (WINDOW) gives those around the answer.
    """
    near = _words(f"{right} {question}")
    found = [part for sentence in _SENTENCE.split(source) if (part := _cut(sentence, right, near))]
    fit = [part for part in found if grounded(part, source, about)]
    gold = normalise(right)
    return max(fit, key=lambda p: (contains(normalise(p), gold), len(near & _words(p)), -len(p)), default=None)


def subject(right: str, question: str) -> Set[str]:
    """The words that evidence must speak of: the right answer's, or the question's where the answer is yes or no."""
    return _words(question if normalise(right) in _YES_NO else right) or _words(question)


def copied(answer: str, source: str) -> bool:
    """Whether a free answer is a stretch of the source, or the source with something around it."""
    words, text = _squeezed(answer), _squeezed(source)
    return len(words.split()) >= QUOTE_WORDS[0] and (_stands_in(words, text) or _stands_in(text, words))


def closeness(answer: str, right: str, question: str = "") -> float:
    """Token F1 to the right answer, 1 where it is exact; small words and the question's count on neither side."""
    said, gold = normalise(answer), normalise(right)
    if said == gold:
        return 1.0
    small = (_SMALL | set(normalise(question).split())) - set(gold.split())
    return token_f1(" ".join(word for word in said.split() if word not in small), gold)


def contrast(answer: str, right: str, hallucinated: str) -> float:
    """(1 + F1 to the right answer - F1 to the hallucinated one) / 2, in [0, 1]."""
    said = normalise(answer)
    return (1 + token_f1(said, normalise(right)) - token_f1(said, normalise(hallucinated))) / 2


def token_f1(said: str, gold: str) -> float:
    """Harmonic mean of precision and recall of the words of two normalised texts, as in SQuAD."""
    ours, theirs = said.split(), gold.split()
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * shared / (len(ours) + len(theirs)) if shared else 0.0


def _lists(said: str, gold: str, question: str) -> bool:
    """Whether an answer is the right name and others of the question side by side, with no word that relates them."""
    named = [normalise(name) for name in _NAMED.findall(question)]
    others = [name for name in named if contains(said, name) and not contains(gold, name) and not contains(name, gold)]
    rest = set(said.split()) - _SMALL - set(gold.split()) - {word for name in others for word in name.split()}
    return bool(others) and not rest


def _repeats(said: Set[str], source: str) -> bool:
    words = _words(source)
    return len(source.split()) > QUOTE_WORDS[1] and len(words & said) >= COPIED * len(words)


@lru_cache(maxsize=4096)
def _words(text: str) -> frozenset[str]:
    return _all_words(text) - _SMALL


@lru_cache(maxsize=4096)
def _all_words(text: str) -> frozenset[str]:
    return frozenset(normalise(text).split())


def _squeezed(text: str) -> str:
    plain = text.lower().replace("\u2019", "'")
    return " ".join(re.sub(r"[\"\u201c\u201d\u00ab\u00bb*_`]", "", plain).split()).strip(" .,;:!?\u2026")


def _stands_in(words: str, text: str) -> bool:
    return bool(words) and re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None


def _cut(sentence: str, right: str, near: Set[str]) -> str:
    words = sentence.split()
    if len(words) <= WINDOW:
        return " ".join(words)
    windows = [" ".join(words[start : start + WINDOW]) for start in range(0, len(words) - WINDOW // 2, WINDOW // 3)]
    gold = normalise(right)
    return max(windows, key=lambda part: (contains(normalise(part), gold), len(near & _words(part))))
