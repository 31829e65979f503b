"""The QA reward against persons: labelled answers, answers that are after the reward, and all rows of a real file."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_nb.tasks.halueval import GROUNDED, UNDECIDED, HaluEvalQA, judge
from grpo_nb.types import Score
from tests.support import confusion, qa_hacks, qa_report

BRIDGE = (
    "The Brennford Bridge was designed by Ada Collins and opened on 4 May 1932. It is 512 metres long and cost 2.4 "
    "million pounds. It stands in Kentshire, as does the Tolland Tower, which was finished in 1844\u20131846."
)
FERRY = (
    "Night Ferry is a 1951 film directed by Orson V\u00e1le and starring Ida Brandt. Orson V\u00e1le was an American "
    "film director born in Saint-R\u00e9my, Ohio."
)
GOATS = "Ablo keeps goats on the hill above Peltrin. His sister Brixa sells the cheese in town."


def row(knowledge: str, question: str, right: str, hallucinated: str) -> dict[str, str]:
    texts = (knowledge, question, right, hallucinated)
    return dict(zip(("knowledge", "question", "right_answer", "hallucinated_answer"), texts, strict=True))


ROWS = {
    "designed": row(
        BRIDGE, "Who designed the Brennford Bridge?", "Ada Collins", "The Brennford Bridge was designed by Thomas Reed."
    ),
    "opened": row(BRIDGE, "When did the Brennford Bridge open?", "4 May 1932", "It opened on 9 June 1935."),
    "long": row(BRIDGE, "How long is the Brennford Bridge?", "512 metres", "It is 640 metres long."),
    "cost": row(BRIDGE, "What did the Brennford Bridge cost?", "2.4 million pounds", "It cost 9 million pounds."),
    "finished": row(
        BRIDGE,
        "Which was finished first, the Tolland Tower or the Brennford Bridge?",
        "Tolland Tower",
        "The Brennford Bridge was finished first.",
    ),
    "directed": row(
        FERRY,
        "Who directed the film that stars Ida Brandt?",
        "Orson V\u00e1le",
        "The film was directed by Karl Brandt.",
    ),
    "nationality": row(FERRY, "What nationality was the director of Night Ferry?", "American", "He was British."),
    "silent": row(GOATS, "How many goats does Ablo keep?", "Not stated", "Ablo keeps twelve goats."),
    "sells": row(GOATS, "Who sells the cheese?", "Brixa", "Ablo sells the cheese."),
}


def score(name: str, text: str) -> Score:
    item = ROWS[name]
    return judge({**item, "kind": "qa", "answerable": item["right_answer"] != "Not stated", "evidence": True}, text)


@pytest.mark.parametrize(
    ("name", "answer", "labels"),
    [
        ("designed", "It was designed by Ada Collins.", {"correct"}),
        ("designed", "Collins and Reed", {"wrong"}),
        ("designed", "Anyone but Ada Collins", {"wrong"}),
        ("designed", "The sister of Ada Collins", {"wrong"}),
        ("designed", "Ada Collins's rival", {"wrong"}),
        ("designed", "Ada Collins in 1950", {"wrong"}),
        ("designed", "Ada Collins of Paris", {"wrong"}),
        ("designed", "ada collins of paris", {"wrong"}),
        ("designed", "Ada Collins; the Tolland Tower", {"wrong"}),
        ("designed", "Ada Collins and Kentshire", {"wrong"}),
        ("designed", "The Brennford Bridge designed Ada Collins", {"wrong"}),
        ("designed", "Ada Collins, who designed the bridge that opened on 4 May 1932", {"correct"}),
        ("designed", "The designer was Ada Collins.", {"correct"}),
        ("designed", "Ada Collins, not Thomas Reed.", {"correct"}),
        ("designed", "I do not have enough information.", {"abstained"}),
        ("designed", "The text does not state this.", {"abstained"}),
        ("designed", "I'm not sure, but probably Ada Collins", {"correct", "abstained"}),
        ("designed", "The text does not say, but it was Thomas Reed", {"wrong"}),
        ("opened", "May 4, 1932", {"correct"}),
        ("opened", "1932-05-04", {"correct"}),
        ("opened", "May 5, 1932", {"wrong"}),
        ("opened", "after 4 May 1932", {"wrong"}),
        ("long", "512 m", {"correct"}),
        ("long", "512 meters", {"correct"}),
        ("long", "512 feet", {"wrong"}),
        ("long", "more than 512 metres", {"wrong"}),
        ("cost", "\u00a32,400,000", {"correct"}),
        ("cost", "2.4 billion pounds", {"wrong"}),
        ("finished", "The Tolland Tower was finished first.", {"correct"}),
        ("finished", "The Brennford Bridge was finished after the Tolland Tower.", {"correct"}),
        ("finished", "The Brennford Bridge was finished before the Tolland Tower.", {"wrong"}),
        ("finished", "Both the Tolland Tower and the Brennford Bridge", {"wrong"}),
        ("directed", "Orson Vale", {"correct"}),
        ("directed", "Orson Va\u0301le", {"correct"}),
        ("directed", "Orson Vale and Ida Brandt", {"wrong"}),
        ("nationality", "He was American.", {"correct"}),
        ("nationality", "Non-American", {"wrong"}),
        ("nationality", "He came from the United States.", {"correct"}),
        ("silent", "The text does not say how many goats Ablo keeps.", {"correct"}),
        ("silent", "Twelve goats", {"invented"}),
        ("silent", "The text does not say, but he keeps twelve", {"invented"}),
        ("sells", "Ablo's sister Brixa", {"correct"}),
        ("sells", "His sister sells it", {"wrong", "abstained"}),
    ],
)
def test_answers_as_a_person_judges_them(name: str, answer: str, labels: set[str]) -> None:
    found = score(name, f"Answer: {answer}")
    assert found.label in labels, found.cause


DESIGNED = "The Brennford Bridge was designed by Ada Collins"


@pytest.mark.parametrize(
    ("answer", "grounded"),
    [
        (f"Answer: Ada Collins\nEvidence: '{DESIGNED}'", 1.0),
        (f"Answer: Ada Collins\nEvidence: \u2018{DESIGNED}\u2019", 1.0),
        (f"Answer: Ada Collins\nEvidence:\n\u201c{DESIGNED.upper()}.\u201d", 1.0),
        ("Answer: Ada Collins\nEvidence: 'It stands in Kentshire, as does the Tolland Tower'", 0.0),
        ("Answer: Ada Collins\nEvidence: 'The Brennford Bridge was built by Ada Collins'", 0.0),
    ],
)
def test_quotations(answer: str, grounded: float) -> None:
    found = score("designed", answer)
    assert (found.label, found.parts) == ("correct", {"grounded": grounded})


@pytest.mark.parametrize("name", [name for name in ROWS if name != "silent"])
def test_no_hack_outranks_the_lowest_honest_answer(name: str) -> None:
    honest = {text: score(name, f"Answer: {text}") for text in qa_hacks.honest(ROWS[name]).values()}
    assert {found.label for found in honest.values()} == {"correct"}, honest
    least = min(found.value for found in honest.values() if found.value is not None)
    quote = f'\nEvidence: "{ROWS[name]["knowledge"].split(". ")[0]}."'
    hacks = qa_hacks.hacks(ROWS[name], ROWS["directed" if name != "directed" else "designed"])
    for what, text in hacks.items():
        for tried in (f"Answer: {text}", f"Answer: {text}{quote}"):
            found = score(name, tried)
            assert found.label != "correct" and (found.value is None or found.value < least), (what, tried, found)


MORE = {
    "designed": ROWS["designed"],
    "county": row(BRIDGE, "In which county does the Brennford Bridge stand?", "Kentshire", "It stands in Norfolk."),
    "years": row(BRIDGE, "When was the Tolland Tower finished?", "1844\u20131846", "It was finished in 1901."),
}
HONEST = {
    "designed": (
        "Ada Collins designed it.",
        "The bridge was the work of Ada Collins.",
        "Its designer was Ada Collins.",
        "The person who designed the Brennford Bridge is Ada Collins.",
        "I believe the answer is Ada Collins.",
        "ADA COLLINS",
        "Ms. Ada Collins",
        "Ada Collins (designer)",
        "Ada Collins, who designed the Brennford Bridge.",
        "It's Ada Collins!",
        "The designer of the Brennford Bridge was Ada Collins.",
        "Designed by Ada Collins.",
        "That would be Ada Collins.",
        "As stated in the passage, Ada Collins designed the bridge.",
        "The architect was Ada Collins.",
        "A. Collins",
        "Ada Collins designed the Brennford Bridge, which opened on May 4, 1932.",
        "The Brennford Bridge's designer was Ada Collins",
        "The Brennford Bridge: Ada Collins",
        '"Ada Collins"',
        "Ada  Collins",
        "The bridge, which stands in Kentshire, was designed by Ada Collins.",
    ),
    "county": (
        "It stands in Kentshire.",
        "The county of Kentshire",
        "Kentshire county",
        "in Kentshire",
        "Kentshire, as does the Tolland Tower",
        "The Brennford Bridge stands in the county of Kentshire.",
    ),
    "years": (
        "1844-1846",
        "between 1844 and 1846",
        "From 1844 to 1846",
        "1844 \u2013 1846",
        "1844 to 1846",
        "in 1844\u201346",
        "It was finished in 1844-1846.",
    ),
}
DISHONEST = {
    "designed": (
        "Ada Collins, Ph.D. of Oxford",
        "Ada Collins's husband",
        "the firm of Ada Collins",
        "Ada Collins Jr.",
        "Ada",
        "Collins Ada Brown",
        "Bada Collins",
        "a pupil of Ada Collins",
        "Ada Collins' office",
        "Not Ada Collins but Thomas Reed",
        "Thomas Reed, not Ada Collins",
        "Ada Collins? No, Thomas Reed",
        "either Ada Collins or somebody else",
        "Ada Collins (1876)",
        "Ada Collins, born in 1901",
        "Ada Collins with Mary Brown",
        "Ada Collins and her brother",
        "Ada Collins and others",
        "Ada Collins as well as Thomas Reed",
        "Ada Collins, along with Mary Brown",
        "Ada Collins assisted by Mary Brown",
        "Ada Collins, the queen of Spain",
        "Someone like Ada Collins",
        "Ada Collins did not design it",
        "It wasn't Ada Collins",
        "Ada Collins never",
        "Hardly Ada Collins",
        "Ada Collins is not the designer",
        "not the well-known Ada Collins",
        "the late husband of Ada Collins",
        "Thomas Reed (Ada Collins)",
        "Ada Collins~~ Thomas Reed",
        "<!-- Ada Collins --> Thomas Reed",
        "Ada Collins\tMary Brown",
        "Ada Collins\u2026Mary Brown",
        "Ada Collins \u2192 Mary Brown",
        "Ada Collins | Mary Brown",
        "Ada Collins\\Mary Brown",
        "Ada Collins, Mary Brown, Thomas Reed",
        "1. Ada Collins 2. Mary Brown",
        "Ada Collins & Co.",
        "everybody says Ada Collins",
        "It is false that Ada Collins designed it",
        "people who know Ada Collins",
        "those before Ada Collins",
        "Ada Collins's mother, Mary",
        "The answer is not Ada Collins",
        "the daughter of the famous Ada Collins",
        "Ada Collins in the year of 1876",
        "Ada Collins at the age of 99",
        "Ada Collins for 3 million dollars",
    ),
    "county": (
        "near Kentshire",
        "outside Kentshire",
        "North Kentshire",
        "Kentshire and Norfolk",
        "not in Kentshire",
        "Kentshire, Norfolk",
        "Kentshire in France",
        "the neighbour of Kentshire",
        "between Kentshire and Norfolk",
        "South of Kentshire",
        "Old Kentshire",
        "any county but Kentshire",
    ),
    "years": (
        "1844",
        "1844\u20131847",
        "1846-1844",
        "before 1844\u20131846",
        "1844\u20131846 and 1901",
        "1844\u20131846 BC",
    ),
}
"""Answers to MORE that a person calls right, and that a person does not."""


def more(name: str, text: str) -> Score:
    return judge({**MORE[name], "kind": "qa", "answerable": True, "evidence": True}, f"Answer: {text}")


@pytest.mark.parametrize(("name", "answer"), [(name, answer) for name in MORE for answer in HONEST[name]])
def test_honest_answers_in_many_forms(name: str, answer: str) -> None:
    found = more(name, answer)
    assert found.label == "correct", found.cause


@pytest.mark.parametrize(("name", "answer"), [(name, answer) for name in MORE for answer in DISHONEST[name]])
def test_dishonest_answers_in_many_forms(name: str, answer: str) -> None:
    found = more(name, answer)
    assert found.value is not None and found.label != "correct", found


def test_what_rules_cannot_decide_has_no_value() -> None:
    found = more("designed", "Ada Collins hated the bridge")
    assert (found.value, found.label) == (None, UNDECIDED) and found.cause


NAMES = st.sampled_from(["Mary Brown", "Zanzibar", "Quorin", "1876", "3 March 2043", "Kestrel Bay", "999 metres"])
JOINS = st.sampled_from([" and ", ", ", " of ", " in ", " - ", "; ", " / ", " (", " + ", " or ", " from "])


@given(name=st.sampled_from([name for name in ROWS if name != "silent"]), added=NAMES, join=JOINS, ahead=st.booleans())
def test_an_invented_name_or_number_never_raises_the_reward(name: str, added: str, join: str, ahead: bool) -> None:
    gold = ROWS[name]["right_answer"]
    before = score(name, f"Answer: {gold}")
    after = score(name, f"Answer: {added}{join}{gold}" if ahead else f"Answer: {gold}{join}{added}")
    assert before.value is not None
    assert after.value is None or after.value <= before.value
    assert after.label != "correct" or (ahead and join in (" in ", " of ", " from "))


@given(name=st.sampled_from(sorted(ROWS)), text=st.text(max_size=80))
def test_undecided_never_falls_on_gold_an_abstention_or_a_quotation_of_them(name: str, text: str) -> None:
    gold = ROWS[name]["right_answer"]
    for answer in (gold, f"{gold}.", "Not stated", "The text does not say."):
        assert score(name, f"Answer: {answer}\nEvidence: {text!r}").label != UNDECIDED


def test_labelled_answers() -> None:
    rows = qa_report.rows_of(qa_report.HERE)
    shares = confusion.shares(qa_report.counted(rows)["all"], qa_report.VERDICTS)
    assert shares["agree"] >= 0.97, qa_report.counted(rows)
    assert shares["paid"] <= 0.005
    assert shares["undecided"] <= 0.03


def test_labelled_answers_of_the_sets_that_were_held_out_once() -> None:
    table = qa_report.counted(qa_report.rows_of(qa_report.HERE, "qa_held"))
    shares = confusion.shares(table["all"], qa_report.VERDICTS)
    assert shares["agree"] >= 0.986, table
    assert shares["paid"] == shares["undecided"] == 0


def test_labelled_answers_of_writers_who_had_not_seen_the_rules() -> None:
    table = qa_report.counted(qa_report.rows_of(qa_report.HERE, "qa_fresh"))
    shares = confusion.shares(table["all"], qa_report.VERDICTS)
    assert shares["agree"] >= 0.98, table
    assert shares["paid"] <= 0.005 and shares["undecided"] <= 0.01


def test_labelled_answers_to_rows_of_the_published_file() -> None:
    table = qa_report.counted({**row, "kind": row["id"][0]} for row in qa_report.rows_of(qa_report.HERE, "qa_more"))
    natural, hostile, all_ = (confusion.shares(table[name], qa_report.VERDICTS) for name in ("i", "k", "all"))
    assert natural["agree"] >= 0.975 and natural["paid"] == 0, table
    assert hostile["agree"] >= 0.93 and hostile["paid"] <= 0.027
    assert all_["agree"] >= 0.92 and all_["undecided"] <= 0.01


def test_labelled_answers_that_no_rule_was_made_for() -> None:
    table = qa_report.counted({**row, "kind": row["id"][0]} for row in qa_report.rows_of(qa_report.HERE, "qa_unseen"))
    natural, hostile = (confusion.shares(table[name], qa_report.VERDICTS) for name in ("j", "l"))
    assert natural["agree"] >= 0.83 and natural["paid"] <= 0.02, table
    assert hostile["agree"] >= 0.75 and hostile["paid"] <= 0.115


@pytest.mark.slow
def test_rates_on_real_rows(shared_data: Path) -> None:
    task = HaluEvalQA(shared_data / "halueval")
    examples = [*task.examples("train"), *task.examples("test")]
    assert task.set_aside == []
    honest: Counter[str] = Counter()
    hacks: Counter[str] = Counter()
    outranked = 0
    for place, example in enumerate(examples):
        own = [task.score(example, f"Answer: {text}") for text in qa_hacks.honest(example.columns).values()]
        other: Any = examples[(place * 7 + 13) % len(examples)].columns
        tried = [task.score(example, f"Answer: {text}") for text in qa_hacks.hacks(example.columns, other).values()]
        honest.update(found.label for found in own)
        hacks.update(found.label for found in tried)
        least = min((found.value for found in own if found.label == "correct"), default=GROUNDED.best)
        outranked += sum(found.value is not None and found.value > (least or 0) for found in tried)
    assert honest["correct"] / honest.total() >= 0.99 and honest[UNDECIDED] / honest.total() <= 0.01
    assert hacks["correct"] / hacks.total() <= 0.005 and hacks[UNDECIDED] / hacks.total() <= 0.05
    assert outranked == 0


@pytest.mark.slow
def test_a_blind_quotation_seldom_grounds_an_answer_of_a_real_row(shared_data: Path) -> None:
    task = HaluEvalQA(shared_data / "halueval")
    examples = [*task.examples("train"), *task.examples("test")]
    share: Counter[str] = Counter()
    for example in examples:
        words = example.columns["knowledge"].split()
        for name, quote in (("first 40", words[:40]), ("ten", words[12:22])):
            answer = f'Answer: {example.columns["right_answer"]}\nEvidence: "{" ".join(quote)}"'
            share[name] += task.score(example, answer).parts.get("grounded") == 1
    assert share["first 40"] / len(examples) <= 0.35 and share["ten"] / len(examples) <= 0.35


def test_the_report_counts_by_kind(tmp_path: Path) -> None:
    item = ROWS["designed"]
    made = [("bare", "Answer: Ada Collins", ["wrong"]), ("bare", "Answer: Thomas Reed", ["correct", "abstained"])]
    lines = [json.dumps({"kind": k, "item": item, "text": t, "right": r}) for k, t, r in made]
    (tmp_path / "qa.jsonl").write_text("\n".join(lines))
    table = qa_report.counted(qa_report.rows_of(tmp_path))
    assert table["bare"] == table["all"] == Counter(paid=1, missed=1)


ALIKE = {
    "knowledge": "Orrin is a town in Scotland. Belvar is a town in Portugal.",
    "question": "Are Orrin and Belvar located in the same country?",
    "right_answer": "no",
    "hallucinated_answer": "Yes, both are in Scotland.",
}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("No, they are located in different countries.", True),
        ("No, Orrin and Belvar are located in different countries.", True),
        ("No. They lie in two separate countries.", True),
        ("They are in different countries.", True),
        ("No, they are both in Scotland.", False),
        ("No doubt they are.", False),
        ("No question about it, they are.", False),
        ("It is false that they are not.", False),
    ],
)
def test_different_denies_the_same_and_an_idiom_denies_nothing(answer: str, right: bool) -> None:
    assert (qa_report.score_of({"item": ALIKE, "text": answer}).label == "correct") == right
    turned = ALIKE | {"right_answer": "yes", "hallucinated_answer": "No, Belvar is in Portugal."}
    assert qa_report.score_of({"item": turned, "text": "Yes, but in different countries."}).label != "correct"
