"""Claims, quotations and verdicts: what is one claim, what stands in a source, and what is a right answer."""

import json
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_nb.tasks.grounding import passages
from grpo_nb.tasks.grounding.claims import forms, tokenise
from grpo_nb.tasks.grounding.framing import said
from grpo_nb.tasks.grounding.free import judge_free, reference
from grpo_nb.tasks.grounding.items import item
from grpo_nb.tasks.grounding.passages import passage, split
from grpo_nb.tasks.grounding.quotes import Subject, best_quote, grounds
from grpo_nb.tasks.grounding.short import judge_short
from grpo_nb.tasks.grounding.yes_no import judge_yes_no
from grpo_nb.tasks.halueval import HaluEvalSummarization


@pytest.mark.parametrize(
    "same",
    [
        ("4 May 1932", "May 4, 1932", "4th of May, 1932", "1932-05-04", "04/05/1932", "May 4th 1932", "the 4 May 1932"),
        ("512 metres", "512 m", "512m", "512 meters", "512 metre", "0.512 km"),
        ("2.4 million pounds", "\u00a32.4 million", "2,400,000 pounds", "\u00a32,400,000"),
        ("1844\u20131846", "1844-1846", "1844 - 1846", "1844\u201446", "from 1844 to 1846"),
        (
            "Orson V\u00e1le",
            "Orson Vale",
            "Orson Va\u0301le",
            "orson vale",
            "\u201cOrson V\u00e1le\u201d",
            "ORSON VALE",
        ),
        ("J. K. Rowling", "J.K. Rowling", "JK Rowling"),
        ("the United States", "USA", "U.S.", "America", "United States of America"),
        ("the 19th century", "nineteenth century", "19th-century"),
        ("seventeen percent", "17%", "17 per cent", "17 %"),
        ("twenty-one goats", "21 goats", "21 goat"),
        ("68 \u00b0C", "68\u00b0C", "68 degrees Celsius"),
        ("Hungary", "Hungarian"),
        ("the theatre's colours", "theater color"),
        ("Collins'", "Collins\u2019s", "Collins"),
    ],
)
def test_one_claim_has_one_form(same: tuple[str, ...]) -> None:
    assert {tuple(forms(text)) for text in same} == {tuple(forms(same[0]))}, [forms(text) for text in same]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(("4 May 1932", "5 May 1932"), ("512 m", "512 feet"), ("68 \u00b0C", "68 \u00b0F"), ("1844", "1846")),
        *(("Ada Collins", "Collins Ada"), ("2.4 million", "2.4 billion"), ("1,200", "12,00")),
    ],
)
def test_different_claims_have_different_forms(one: str, other: str) -> None:
    assert forms(one) != forms(other)


def test_negations_are_tokens_of_their_own() -> None:
    for text in ("It isn't Ada.", "It can't be Ada", "It is not Ada", "non-Ada", "never Ada"):
        assert [token.kind for token in tokenise(text)].count("not") == 1


@given(text=st.text(max_size=120))
def test_any_text_has_tokens_and_can_be_a_source(text: str) -> None:
    assert all(token.form for token in tokenise(text))
    whole = passage(text)
    assert len(whole.starts) == len(whole.sentences)
    assert all(one < other for one, other in pairwise(whole.starts)) or len(whole.starts) < 2


def test_frames_claim_nothing() -> None:
    question = "Who designed the bridge?"
    for text in (
        "According to the text, Ada Collins.",
        "Ada Collins, as the text says.",
        "The answer is Ada Collins.",
        "Based on the given passage, the correct answer is Ada Collins.",
        "<b>Ada Collins</b><!-- Thomas Reed -->",
        "Who designed the bridge? Ada Collins.",
        "Sure! Ada Collins. Let me know if you need anything else!",
        "$\\boxed{\\text{Ada Collins}}$",
    ):
        assert forms(said(text, question)) == ["ada", "collin"], text


def test_sentences_without_spaces_between_are_told_apart() -> None:
    text = "Mr. J. R. Ewing came.He kept bees (in the U.S. Navy). \u201cSo.\u201d Then 1.5 m fell."
    assert split(text) == [
        "Mr. J. R. Ewing came.",
        "He kept bees (in the U.S. Navy).",
        "\u201cSo.\u201d",
        "Then 1.5 m fell.",
    ]


SOURCE = (
    "Marn grows barley. In 1999 the guild of Lunt, \u201cthe old one\u201d, gave Marn a medal for it.He kept bees too."
)
MEDAL = Subject({1}, ("medal",), (), ())


@pytest.mark.parametrize(
    ("quote", "holds"),
    [
        ('the guild of Lunt, "the old one", gave Marn a medal for it', True),
        ("the guild of Lunt, 'the old one', gave Marn a medal for it", True),
        ("THE GUILD  of Lunt, the old one, gave Marn a medal", True),
        ("In 1999 the guild of Lunt \u2026 gave Marn a medal", True),
        ("gave Marn a medal for it.", True),
        ("gave Marn a medal", False),  # four words
        ("the guild of Lunt gave Marn a medal", False),  # not word by word
        ("he guild of Lunt, the old one, gave Marn a medal", False),  # cut inside a word
        ("In 1999 the guild of Lunt", False),  # speaks of another thing
        ("gave Marn a medal for it. He kept", False),  # cuts a sentence that is no evidence
        (SOURCE * 3, False),
        ("", False),
    ],
)
def test_grounding(quote: str, holds: bool) -> None:
    assert grounds(quote, passage(SOURCE), MEDAL) is holds


def test_the_start_of_a_source_is_no_evidence_of_what_comes_later() -> None:
    source = (
        "The town lies on a hill above the river and has a market on each Monday of the year. " * 3 + "Ablo is mayor."
    )
    about = Subject({3}, ("ablo",), (), ())
    assert not grounds(" ".join(source.split()[:40]), passage(source), about)
    assert not grounds(" ".join(source.split()[:10]), passage(source), about)


def test_a_whole_long_source_is_no_quotation() -> None:
    source = " ".join(f"word{i}" for i in range(60))
    about = Subject({0}, ("word3",), (), ())
    assert grounds(" ".join(source.split()[:40]), passage(source), about)
    assert not grounds(source, passage(source), about)
    assert grounds("Ablo keeps goats", passage("Ablo keeps goats"), Subject({0}, ("goat",), (), ()))


def test_the_gold_quotation_is_a_sentence_or_a_window_of_one() -> None:
    assert best_quote(passage(SOURCE), MEDAL, forms("a medal What did Marn get?")) == (
        "In 1999 the guild of Lunt, \u201cthe old one\u201d, gave Marn a medal for it."
    )
    long = " ".join([f"word{i}" for i in range(50)] + ["medal"] + [f"more{i}" for i in range(50)]) + "."
    cut = best_quote(passage(long), Subject({0}, ("medal",), (), ()), ["medal"])
    assert cut is not None and "medal" in cut and len(cut.split()) <= 15 and cut in long
    assert best_quote(passage(SOURCE), Subject((), ("gold",), (), ()), ["gold"]) is None


QUESTION = "Which city, or was Arthur's Magazine started before First for Women?"


@pytest.mark.parametrize(
    ("answer", "right", "hallucinated", "same"),
    [
        ("Delhi", "Delhi", "Mumbai", True),
        ("it is in Delhi", "Delhi", "Mumbai", True),
        ("Delhi or Mumbai", "Delhi", "Mumbai", False),
        ("Delhi, Pune, Agra, Goa", "Delhi", "Mumbai", False),
        ("Richard Nixon", "President Richard Nixon", "Marge", True),
        ("New Delhis", "Delhi", "Mumbai", False),
        ("Arthur's Magazine was started first", "Arthur's Magazine", "First for Women was started first.", True),
        ("First for Women was started before Arthur's Magazine", "Arthur's Magazine", "First for Women was", False),
        ("not Delhi", "Delhi", "Mumbai", False),
        ("Arthur's Magazine, First for Women", "Arthur's Magazine", "First for Women was started first.", False),
        ("first for women and arthur's magazine", "First for Women", "Arthur's Magazine", False),
        ("First for Women", "First for Women", "Arthur's Magazine was started first.", True),
        ("Arthur's Magazine was first", "Arthur's Magazine", "First for Women was started first.", True),
        ("Arthur's Magazine, before First for Women", "Arthur's Magazine", "It was started second.", True),
        ("Delhi or Pune", "Delhi", "Mumbai", False),
        ("Delhi/Pune", "Delhi", "Mumbai", False),
        ("Delhi, not Mumbai", "Delhi", "Mumbai", True),
        ("It was Delhi rather than Mumbai.", "Delhi", "Mumbai", True),
        ("none other than Delhi", "Delhi", "Mumbai", True),
    ],
)
def test_matching(answer: str, right: str, hallucinated: str, same: bool) -> None:
    assert (judge_short(answer, item(right, hallucinated, QUESTION, f"It is {right}.")).label == "correct") is same


@pytest.mark.parametrize(
    ("answer", "right", "same"),
    [
        *(("No, they are not.", "no", True), ("They are not both red.", "no", True), ("Both are red.", "yes", True)),
        *(
            ("yes", "no", False),
            ("Nobody, yes", "yes", False),
            ("Yes and no", "yes", False),
            ("yes or no", "yes", False),
        ),
        *(("not no", "no", False), ("Yes, they are not.", "yes", False), ("Yes, in 1876.", "yes", False)),
        *(("Ida", "yes", False), ("They have different colours; neither is red.", "no", True)),
    ],
)
def test_yes_and_no(answer: str, right: str, same: bool) -> None:
    about = item(
        right, "One of them has wheels.", "Are Ida and Orsa both red?", "Ida is a red ship. Orsa has a red mast."
    )
    assert (judge_yes_no(answer, about).label == "correct") is same


def test_agreement_where_the_hallucination_only_adds() -> None:
    right, bad = "The ferry closes.", "The ferry closes and the mayor resigned."
    about = reference(right, bad, "", "The ferry closes. The mayor resigned.")
    assert judge_free(right, 0.3, about).label == "correct"
    assert judge_free(bad, 0.3, about).label == "wrong"


NEWS = (
    "The council of Tarnby voted on Monday to close the old ferry. Repairs would have cost two million crowns, the "
    "mayor said. Islanders will use a new bridge from May, and the ferry's crew of nine moves to the harbor office. "
    "Orsa Lind thanked the mayor."
)
SUMMARY = "Tarnby's council voted to close the old ferry. Islanders will use a new bridge from May."
MADE_UP = "Tarnby's council voted to rebuild the old ferry. Islanders must wait for it until winter."


FILM = (
    "The Salt Road is a 2004 film directed by Mira Kolb. Mira Kolb also directed Low Water, a 1999 drama set in Norway."
)
ASKED = "[Human]: I liked The Salt Road. [Assistant]: Yes, Mira Kolb directed it. [Human]: What else did she make?"
REPLY = "She also directed Low Water, a 1999 drama that is set in Norway."
OTHER = "She also directed Deep Snow, a 2010 comedy that is set in Sweden."


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        *((REPLY, True), ("She made Low Water, too, a drama from 1999.", True)),
        ("Low Water was directed by her as well; it's a drama that takes place in Norway.", True),
        ("Mira Kolb also made Low Water in 1999; it is a drama set in Norway.", True),
        ("Try Low Water! It's a 1999 drama by Mira Kolb.", True),
        ("She never directed Low Water, a 1999 drama that is set in Norway.", False),
        ("She also directed Low Water, a 1999 drama that is not set in Norway.", False),
        ("Norway directed her, and Low Water is set in a 1999 drama.", False),
        ("She was directed by Low Water, a 1999 drama that is set in Norway.", False),
        ("She also directed Norway, a 1999 drama that is set in Low Water.", False),
        ("She also directed Low Water, a 1999 drama that is set in Sweden.", False),
        ("1999 also directed drama in is low Norway set she that Water", False),
    ],
)
def test_replies_by_what_they_claim(answer: str, right: bool) -> None:
    assert (judge_free(answer, 0.5, reference(REPLY, OTHER, ASKED, FILM)).label == "correct") is right


def test_few_shuffles_of_a_summary_are_correct() -> None:
    words = SUMMARY.replace(".", "").split()
    about = reference(SUMMARY, MADE_UP, "", NEWS)
    shuffled = [" ".join(Random(seed).sample(words, len(words))) for seed in range(100)]
    assert sum(judge_free(text, 0.3, about).label == "correct" for text in shuffled) <= 5


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("The council decided to close the ferry; a new bridge opens for islanders in May.", "correct"),
        ("From May the islanders will use a bridge, since the council voted to close the old ferry.", "correct"),
        ("The old ferry will be closed by the council of Tarnby, and islanders get a new bridge.", "correct"),
        (" ".join(sorted(SUMMARY.lower().replace(".", "").split())), "wrong"),
        (" ".join(reversed(SUMMARY.replace(".", "").split())), "wrong"),
        (SUMMARY.replace("voted", "never voted"), "wrong"),
        (SUMMARY.replace("will use", "will not use"), "wrong"),
        ("The ferry voted to close the council. Islanders will use a new bridge from May.", "wrong"),
        (f"{SUMMARY} Thousands of people from Oslo protested.", "wrong"),
    ],
)
def test_summaries_by_what_they_claim(answer: str, label: str) -> None:
    assert judge_free(answer, 0.3, reference(SUMMARY, MADE_UP, "", NEWS)).label == label


def test_a_long_source_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = {"squeezed": 0, "read": 0}

    def squeeze(text: str, real: Any = passages.squeeze) -> str:
        counted["squeezed"] += len(text)
        return str(real(text))

    def read(text: str, real: Any = passages.tokenise) -> Any:
        counted["read"] += len(text)
        return real(text)

    monkeypatch.setattr("grpo_nb.tasks.grounding.passages.squeeze", squeeze)
    monkeypatch.setattr("grpo_nb.tasks.grounding.quotes.squeeze", squeeze)
    monkeypatch.setattr("grpo_nb.tasks.grounding.passages.tokenise", read)
    work = []
    for size in (50, 200):
        counted.update(squeezed=0, read=0)
        source = " ".join(f"The town number {i} has a mayor called Ablo{i} who keeps goats." for i in range(size))
        row = {
            "document": source,
            "right_summary": f"Ablo7 keeps goats in town {size}.",
            "hallucinated_summary": "No mayor.",
        }
        path = tmp_path / f"{size}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        task = HaluEvalSummarization(path)
        assert task.examples("train")[0].target is not None
        assert counted["read"] <= 2 * len(source)
        work.append(counted["squeezed"] / len(source))
    assert work[1] <= 1.5 * work[0], "the work per character does not grow with the source"
