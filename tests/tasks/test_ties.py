"""Names, numbers and roles of an answer against what the source ties them to, in answers that models write."""

import pytest

from grpo_nb.tasks.halueval import judge

FIELDS = ("knowledge", "question", "right_answer", "hallucinated_answer")
ITEMS = {
    "surgeon": (
        "The Corlett Prize was founded in 1921 by the surgeon Harald Vance Ekberg.Harald Vance Ekberg (3 April 1862 - "
        "9 May 1934), better known as Harry Ekberg, was a Norwegian surgeon who trained in Bergen. He was awarded the "
        "Order of Saint Brenna in 1919. His pupil, Lars Tveit, moved to Trondheim in 1925 and became a professor "
        "there in 1931.",
        "Who founded the Corlett Prize?",
        "Harald Vance Ekberg",
        "It was founded by Otto Brun.",
    ),
    "year": (
        "Brita Solum is a Danish painter whose teacher was Nils Aabo.Nils Aabo (born 14 June 1911) was a Danish "
        "painter. The painter Erik Holt, who also taught in Aarhus, was born in 1902.",
        "In what year was the teacher of Brita Solum born?",
        "1911",
        "Nils Aabo was born in 1913.",
    ),
    "older": (
        "Ida Rowe (1820-1891) was an English botanist who lived in Leeds.Clara Penn (4 May 1835 - 1899) was an "
        "American botanist and the wife of the printer Tom Penn.",
        "Who was born first, Ida Rowe or Clara Penn?",
        "Ida Rowe",
        "Clara Penn was born first.",
    ),
    "band": (
        "Low Harbour is an American folk band from Dunmore, Ohio. The band consists of May Ross (vocals), Ed Lund "
        "(banjo), Kim Oakes (bass) and Joe Farr (drums). Their album Salt Wind came out in March 2003.",
        "Which band released the album Salt Wind?",
        "Low Harbour",
        "The Ferrymen released it.",
    ),
    "base": (
        "Tarrow Air Force Base is an air base 9 mi south of Kelby, Montana, with 1,240 residents. It is the home of "
        "the Fourth Survey Wing, commanded by Ann Dole, and it was opened in 1951 by the governor Paul Reyes.",
        "Which air force base is the home of the Fourth Survey Wing?",
        "Tarrow Air Force Base",
        "It is Mendon Air Force Base.",
    ),
    "count": (
        "The village of Marl had more than 1,600 inhabitants in 1951 and three mills. Near Marl lies Upper Denning, "
        "which had 420 inhabitants.",
        "How many inhabitants did Marl have in 1951?",
        "more than 1,600",
        "It had fewer than 900.",
    ),
    "school": (
        "Anna Weir attended the Latin School of Tolna, which was founded in 1840 by Jost van Leyen. Bela Kiss, a "
        "friend of Anna Weir, wrote the novel Grey Water.",
        "Who founded the school that Anna Weir attended?",
        "Jost van Leyen",
        "Anna Weir founded it.",
    ),
    "both": (
        "The Lantern is a sweet, honey-flavored liqueur made in Brakel.The Marchbank is a bitter made by steeping "
        "gentian in brandy.",
        "Are the Lantern and the Marchbank both drinks?",
        "yes",
        "No, the Marchbank is a cake.",
    ),
    "films": (
        "The Tin Gate is a 1962 film directed by Ruth Solberg, written by Knut Moe and produced by Arne Lie.",
        "Who directed The Tin Gate?",
        "Ruth Solberg",
        "It was directed by Hans Berg.",
    ),
}
ANSWERS = {
    "surgeon": {
        "correct": (
            "Harald Ekberg",
            "Harry Ekberg",
            "Ekberg, a Norwegian surgeon",
            "The prize was founded in 1921 by Harald Vance Ekberg, who trained in Bergen.",
            "Harald Vance Ekberg (1862-1934), a surgeon",
            "Harald Vance Ekberg. His pupil Lars Tveit became a professor in 1931.",
            "Harald Ekberg founded it; he was awarded the Order of Saint Brenna in 1919.",
            "It was Harald Ekberg, although the text does not say why he founded it.",
            "It was Harald Ekberg. The text doesn't mention how large the prize is.",
        ),
        "wrong": (
            "Lars Tveit founded the prize with Harald Vance Ekberg.",
            "Harald Ekberg, who was awarded the Order of Saint Brenna in 1921",
            "Harald Vance Ekberg, who died in 1862",
            "Harald Ekberg, who moved to Trondheim in 1931",
            "The Ekberg Prize founded Corlett.",
            "Harald Ekberg. Correction: it was Lars Tveit.",
        ),
        "abstained": ("Harald Ekberg? The text does not say who founded the Corlett Prize.",),
    },
    "year": {
        "correct": (
            "Nils Aabo was born in 1911.",
            "Her teacher, Nils Aabo, was born on 14 June 1911.",
            "Nils Aabo (born 1911)",
            "Aabo, Brita Solum's teacher, was born in 1911.",
        ),
        "wrong": (
            "Erik Holt was born in 1911.",
            "Erik Holt, her teacher, was born in 1911.",
            "Erik Holt, who taught in Aarhus, was born in 1911.",
            "Nils Aabo was born in 1902.",
            "Nils Aabo was born in 1911 and 1902.",
        ),
    },
    "older": {
        "correct": (
            "Rowe",
            "Ida Rowe, because she was born in 1820 and Clara Penn in 1835.",
            "Ida Rowe, born in 1820, is fifteen years older than Clara Penn, who was born in 1835.",
            "Clara Penn was born after Ida Rowe.",
            "Ida Rowe was the older of the two; Clara Penn was born in 1835.",
            "Ida Rowe, as 1820 is earlier than 1835.",
        ),
        "wrong": (
            "Ida Rowe was born first, since she was born in 1891.",
            "Ida Rowe was born first, nine years before Clara Penn.",
            "Ida Rowe, the wife of the printer Tom Penn",
            "Ida Rowe, because she was an American botanist born in 1835.",
            "Clara Penn is the older one; Ida Rowe was born in 1820.",
        ),
    },
    "band": {
        "correct": (
            "Low Harbour, a folk band with four members",
            "The band is Low Harbour, and its album Salt Wind came out in March 2003.",
            "Low Harbour (May Ross, Ed Lund, Kim Oakes and Joe Farr)",
            "- Band: Low Harbour\n- Album: Salt Wind",
            "Low Harbour, whose drummer is Joe Farr",
        ),
        "wrong": (
            "Low Harbour, a folk band with six members",
            "Low Harbour, which came from Dunmore in 2003 with twelve albums",
            '{"answer": "Low Harbour", "answer_2": "The Ferrymen"}',
        ),
    },
    "base": {
        "correct": (
            "Tarrow AFB",
            "Tarrow Air Force Base, Montana",
            "It is at Tarrow Air Force Base, which was opened in 1951.",
            "Tarrow Air Force Base (TAFB)",
        ),
        "wrong": (
            "Tarrow Air Force Base, opened in 1951 by Ann Dole",
            "Tarrow Air Force Base, with 9 residents",
            "Tarrow Air Force Base Museum",
        ),
        "unparsed": ("The Fourth Survey Wing has its home at the air force base that is called Tarr",),
    },
    "count": {
        "correct": (
            "Over 1,600",
            "More than 1,600 people lived there.",
            "It had more than 1,600 inhabitants and three mills.",
        ),
        "wrong": (
            "Fewer than 1,600",
            "Under 1,600 inhabitants",
            "more than 1,600 mills",
            "More than 1,600 inhabitants per mill",
            "Upper Denning had more than 1,600 inhabitants.",
        ),
    },
    "school": {
        "correct": (
            "Jost van Leyen founded the Latin School of Tolna.",
            "Van Leyen",
            "It was founded by Jost van Leyen in 1840.",
        ),
        "wrong": (
            "Bela Kiss founded it with Jost van Leyen.",
            "Jost van Leyen, who wrote the novel Grey Water",
            "Jost van Leyen, a friend of Anna Weir",
        ),
    },
    "both": {
        "correct": ("Yes. The Lantern is a sweet liqueur and the Marchbank a bitter.", "Both are drinks."),
        "wrong": (
            "Yes, they are. The Marchbank is a sweet, honey-flavored liqueur, the Lantern is made by steeping gentian.",
            "Yes, but the Marchbank is only a cake.",
        ),
    },
    "films": {
        "correct": ("The 1962 film was directed by Ruth Solberg and written by Knut Moe.", "Ruth Solberg directed it."),
        "wrong": (
            "Ruth Solberg, and it was written by Arne Lie.",
            "It was produced by Ruth Solberg and directed by Arne Lie.",
            "Ruth Solberg directed it, and also grew up in Norway.",
        ),
    },
}


@pytest.mark.parametrize(
    ("name", "label", "answer"),
    [(name, label, text) for name, labels in ANSWERS.items() for label, texts in labels.items() for text in texts],
)
def test_answers_as_a_person_judges_them(name: str, label: str, answer: str) -> None:
    item = dict(zip(FIELDS, ITEMS[name], strict=True))
    found = judge({**item, "kind": "qa", "answerable": True, "evidence": True}, answer)
    assert found.label == label, found.cause


def test_a_quotation_with_made_up_names_or_numbers_makes_an_answer_wrong() -> None:
    item = dict(zip(FIELDS, ITEMS["surgeon"], strict=True))
    columns = {**item, "kind": "qa", "answerable": True, "evidence": True}
    made_up = 'Answer: Harald Ekberg\nEvidence: "Ekberg gave 30,000 crowns to the town of Molde for the prize"'
    cut = 'Answer: Harald Ekberg\nEvidence: "founded by the surgeon"'
    assert judge(columns, made_up).label == "wrong"
    assert (judge(columns, cut).label, judge(columns, cut).parts) == ("correct", {"grounded": 0.0})
