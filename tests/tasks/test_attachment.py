"""Facts of a source that an answer attaches to another thing, and honest answers in further words."""

import pytest

from grpo_nb.tasks.halueval import judge

FIELDS = ("knowledge", "question", "right_answer", "hallucinated_answer")
ITEMS = {
    "bridge": (
        "The Halden Bridge is a suspension bridge over the Marn in Osterlia. It was designed by Petra "
        "Lindqvist and opened on 3 June 1954. Petra Lindqvist (1911–1990) was a Swedish engineer who studied "
        "in Uppsala. The Marn is 240 km long and has 14 tributaries.",
        "Who designed the Halden Bridge?",
        "Petra Lindqvist",
        "It was designed by Karl Moser.",
    ),
    "museum": (
        "The Varga Museum in Pécs holds about 3,400 paintings, of which 210 are by women. It was founded in "
        "1926 by the merchant Lajos Varga, and moved to the old mint in 1961. The mint was built in 1788 and "
        "has a tower of 31 metres.",
        "How many paintings does the Varga Museum hold?",
        "about 3,400",
        "It holds 5,000 paintings.",
    ),
    "mint": (
        "The Varga Museum in Pécs holds about 3,400 paintings, of which 210 are by women. It was founded in "
        "1926 by the merchant Lajos Varga, and moved to the old mint in 1961. The mint was built in 1788 and "
        "has a tower of 31 metres.",
        "Who founded the Varga Museum?",
        "Lajos Varga",
        "It was founded by Béla Kun.",
    ),
    "strike": (
        "The Ardley dockers went on strike in March 1911 because the harbour board had cut the wages of night "
        "workers by a third. The strike lasted nine weeks. Their leader was Tom Searle, a crane driver from "
        "Hove.",
        "Why did the Ardley dockers go on strike in 1911?",
        "because the harbour board had cut the wages of night workers by a third",
        "Because two men had been dismissed.",
    ),
    "poets": (
        "Edda Holm (1880-1951) was a Norwegian poet and painter.Jonas Krag was a Norwegian poet who lived in "
        "Bergen and taught Latin.",
        "Were Edda Holm and Jonas Krag both Norwegian?",
        "yes",
        "No, Jonas Krag was Danish.",
    ),
    "films": (
        "Salt Road is a 1962 film directed by Imre Toth and starring Greta Weil.Winter Harvest is a 1970 film "
        "directed by Paul Duris, with music by Imre Toth.",
        "Did the same person direct Salt Road and Winter Harvest?",
        "no",
        "Yes, Imre Toth directed both.",
    ),
    "lake": (
        "Lake Oren is 12 miles long and up to 95 metres deep. It lies in the canton of Brell. Its outflow is the Sill.",
        "How deep is Lake Oren?",
        "95 metres",
        "It is 120 metres deep.",
    ),
    "crew": (
        "The yacht Merlin was sailed round the world in 1977 by Anna Roth, Per Dahl and Luis Vega. Their "
        "cook, Jo Pell, left the boat at Cape Town.",
        "Who sailed the Merlin round the world?",
        "Anna Roth, Per Dahl and Luis Vega",
        "Anna Roth and Jo Pell.",
    ),
    "book": (
        "Maud Trevor won the Ashby Medal in 1958 for her history of Cornish tin, The Deep Level. Her earlier "
        "book, Wheal Hope, was a novel.",
        "For which book did Maud Trevor win the Ashby Medal?",
        "The Deep Level",
        "For Wheal Hope.",
    ),
    "un": (
        "Henrik Sand founded the Sand Foundry in Odense in 1841. He had a brother, Mads, who was a priest. "
        "The foundry made bells and stoves.",
        "How old was Henrik Sand when he founded the foundry?",
        "Not stated",
        "He was 30 years old.",
    ),
    "town": (
        "Telford Marsh is a town in Kesteven, with 18,600 inhabitants. It lies on the Wend, 14 km from "
        "Sleaby. Sleaby has 40,200 inhabitants and a cathedral.",
        "Which river does Telford Marsh lie on?",
        "the Wend",
        "It lies on the Trent.",
    ),
    "older": (
        "The Rose Theatre in Dunby was built in 1821 and has 640 seats. The Globe Hall in Dunby was built in "
        "1887 and seats 1,100.",
        "Which is older, the Rose Theatre or the Globe Hall?",
        "the Rose Theatre",
        "The Globe Hall is older.",
    ),
}
ANSWERS = (
    ("bridge", "Lindqvist", "correct"),
    ("bridge", "Petra Lindqvist, a Swedish engineer", "correct"),
    ("bridge", "Petra Lindqvist, a Norwegian engineer", "wrong"),
    ("bridge", "Petra Lindqvist, in 1990", "wrong"),
    ("bridge", "Petra Lindqvist; the bridge opened in 1990", "wrong"),
    ("bridge", "Petra Lindqvist designed it, and it opened in 1954.", "correct"),
    ("bridge", "Petra Lindqvist designed it; it has 14 spans.", "wrong"),
    ("bridge", "Petra Lindqvist, who lived from 1911 to 1990", "correct"),
    ("bridge", "Petra Lindqvist (1911-1990)", "correct"),
    ("bridge", "Petra Lindqvist, 240 km from Uppsala", "wrong"),
    ("bridge", "The engineer Lindqvist", "correct"),
    ("bridge", "Petra Lindqvist, a Swede who studied at Uppsala, was the designer.", "correct"),
    ("bridge", "Petra Lindqvist, whose bridge opened in 1911", "wrong"),
    ("museum", "roughly three thousand four hundred", "correct"),
    ("museum", "3,400", "correct"),
    ("museum", "About 3 400 paintings", "correct"),
    ("museum", "About 3,400 paintings, 210 of them by women", "correct"),
    ("museum", "About 3,400 paintings, 210 of them by children", "wrong"),
    ("museum", "About 3,400, including 210 sculptures", "wrong"),
    ("museum", "3,400 paintings and 31 drawings", "wrong"),
    ("museum", "Approximately 3,400", "correct"),
    ("museum", "The museum has about 3,400 paintings in its collection.", "correct"),
    ("museum", "almost three and a half thousand", "wrong"),
    ("mint", "Lajos Varga in 1926", "correct"),
    ("mint", "Lajos Varga in 1788", "wrong"),
    ("mint", "Lajos Varga, a merchant, in 1961", "wrong"),
    ("mint", "The merchant Lajos Varga founded it in Pécs.", "correct"),
    ("mint", "It was closed by Lajos Varga.", "wrong"),
    ("strike", "Night workers' wages had been cut by a third by the harbour board.", "correct"),
    ("strike", "Because the board cut the night workers' wages by one third", "correct"),
    ("strike", "The harbour board had cut the wages of night workers by a half", "wrong"),
    ("strike", "Because the night workers had cut the wages of the harbour board by a third", "wrong"),
    (
        "strike",
        "Because the harbour board had cut the wages of night workers by a third and the cranes were unsafe",
        "wrong",
    ),
    ("strike", "Because the harbour board had raised the wages of night workers by a third", "undecided|wrong"),
    ("strike", "Because the harbour board had not cut the wages of night workers by a third", "wrong"),
    ("poets", "Both are Norwegian.", "correct"),
    ("poets", "Yes, both were Norwegian poets.", "correct"),
    ("poets", "Yes, both were Norwegian painters.", "wrong"),
    ("poets", "Yes, both lived in Bergen.", "wrong"),
    ("poets", "They were both Norwegian.", "correct"),
    ("poets", "Only Edda Holm was Norwegian.", "wrong"),
    ("poets", "It is true that both were Norwegian.", "correct"),
    ("poets", "It is not true that both were Norwegian.", "wrong"),
    ("poets", "Yes. Edda Holm was a Norwegian poet and painter, and Jonas Krag a Norwegian poet.", "correct"),
    ("films", "No. Toth directed the first and Duris the second.", "correct"),
    ("films", "No, Winter Harvest was directed by Greta Weil.", "wrong"),
    ("films", "No, Winter Harvest was directed by Imre Toth.", "wrong"),
    ("films", "They had different directors.", "correct"),
    ("films", "No, Salt Road was directed by Imre Toth and Winter Harvest by Paul Duris.", "correct"),
    ("films", "It isn't true that they were directed by different people.", "wrong"),
    ("films", "Different people directed them.", "correct"),
    ("lake", "95 m (312 ft)", "correct"),
    ("lake", "95 metres (about 200 feet)", "wrong"),
    ("lake", "Up to ninety-five metres", "correct"),
    ("lake", "95 metres, and 12 km long", "wrong"),
    ("lake", "95 metres; it is 12 miles long", "correct"),
    ("crew", "\n- Anna Roth\n- Per Dahl\n- Luis Vega", "correct"),
    ("crew", "Luis Vega, Anna Roth and Per Dahl", "correct"),
    ("crew", "Anna Roth, Per Dahl, Luis Vega and Jo Pell", "wrong"),
    ("crew", "\n1. Anna Roth\n2. Per Dahl\n3. Jo Pell", "wrong"),
    ("crew", "Anna Roth (in 1977), Per Dahl and Luis Vega", "correct"),
    ("book", "The Deep Level and Wheal Hope", "wrong"),
    ("book", "Wheal Hope and The Deep Level", "wrong"),
    ("book", "The Deep Level, a novel", "wrong"),
    ("book", "The Deep Level, a history of Cornish tin", "correct"),
    ("book", "Her history of Cornish tin, The Deep Level", "correct"),
    ("un", "The text does not give his age; it only says that he founded the foundry in 1841.", "correct"),
    ("un", "His age is not mentioned.", "correct"),
    ("un", "It's not clear how old he was.", "correct"),
    ("un", "The passage only gives the year of the founding (1841), not his age.", "correct"),
    ("un", "The text doesn't say, but he was 41.", "invented"),
    ("un", "Not stated (30)", "invented"),
    ("un", "The text says nothing about his age, only that he had a brother.", "correct"),
    ("un", "It only says that he was 30 years old.", "invented"),
    ("town", "The Wend, 14 km from Sleaby", "correct"),
    ("town", "The Wend, with 40,200 inhabitants", "wrong"),
    ("town", "Telford Marsh, a town of 40,200 inhabitants, lies on the Wend.", "wrong"),
    ("town", "Telford Marsh, a town of 18,600 inhabitants, lies on the Wend.", "correct"),
    ("town", "the Wend and the Trent", "wrong"),
    ("older", "The Rose Theatre (1821, against 1887 for the Globe Hall)", "correct"),
    ("older", "The Rose Theatre, built in 1887", "wrong"),
    ("older", "The Rose Theatre, with 1,100 seats", "wrong"),
    ("older", "The Rose Theatre, by 66 years", "correct"),
    ("older", "The Rose Theatre was built in 1821, the Globe Hall in 1887.", "correct"),
    ("older", "The Rose Theatre, built in 1821", "correct"),
    ("town", "It is not clear from the passage which river it is.", "abstained"),
    ("bridge", "The Halden Bridge was designed by", "unparsed"),
)
"""Item, answer, label that a person gives (`|`: either)."""


@pytest.mark.parametrize(("name", "answer", "label"), ANSWERS)
def test_facts_stay_with_what_they_are_about(name: str, answer: str, label: str) -> None:
    item = dict(zip(FIELDS, ITEMS[name], strict=True))
    told = item["right_answer"] != "Not stated"
    marked = answer if label == "unparsed" else f"Answer: {answer}"
    found = judge({**item, "kind": "qa", "answerable": told, "evidence": True}, marked)
    assert found.label in label.split("|"), found.cause
