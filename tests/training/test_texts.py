"""What a step's row says of its texts, of chance, and of positions that a long row shifts."""

import pytest
from transformers import LlamaConfig, Phi3Config

from grpo_nb.metrics import keys
from grpo_nb.policy.anatomy import shifts_positions
from grpo_nb.tasks.wordings import folded
from grpo_nb.training.metrics import expected_row
from grpo_nb.training.texts import is_evasive, text_row
from grpo_nb.types import Rollouts, Score

F = "fairness"


def scores(*labels: str) -> list[Score]:
    return [Score(1.0 if label == "correct" else 0.0, label=label) for label in labels]


def test_chance_is_of_each_prompts_own_success() -> None:
    expected = expected_row(F, scores("correct", "wrong", "wrong", "wrong", *["correct"] * 4), 4)
    assert expected == {keys.FRAC_ZERO_STD_EXPECTED.of(F): pytest.approx(((0.25**4 + 0.75**4) + 1.0) / 2)}
    assert expected_row(F, [Score(1.0), Score(0.0)], 2) == {}, "without labels nothing is known"
    half = expected_row(F, scores(*["correct", "wrong"] * 4), 8)
    assert half[keys.FRAC_ZERO_STD_EXPECTED.of(F)] == pytest.approx(2 * 0.5**8)


def shares(texts: list[str], labels: list[str], group: int = 2) -> tuple[float, float]:
    n = len(texts)
    rollouts = Rollouts([[1]] * (n // group), [[2]] * n, [[0.0]] * n, ["stop"] * n, texts, group)
    row = text_row(F, rollouts, range(len(texts)), scores(*labels))
    return row[keys.TEMPLATE.of(F)], row[keys.EVASIVE.of(F)]


def test_a_sentence_counts_where_two_prompts_got_it_and_it_was_not_right() -> None:
    same = "This is a very interesting question."
    assert shares([same, "No.", same, "Yes."], ["wrong"] * 4) == (0.5, 0.0)
    assert shares([same, same, "No.", "Yes."], ["wrong"] * 4) == (0.0, 0.0), "a group may repeat itself"
    assert shares([same, "No.", same, "Yes."], ["correct", "wrong", "correct", "wrong"]) == (0.0, 0.0)
    assert shares(["Answer: A", "B", "Answer: A", "B"], ["wrong"] * 4) == (0.0, 0.0), "choices are alike"


@pytest.mark.parametrize(
    ("text", "evades"),
    [
        ("As an AI, I have no opinion.", True),
        ("I'm sorry, but I can\u2019t answer that.", True),
        ("It depends on many factors.", True),
        ("More information is needed.", True),
        ("Please consult a professional.", True),
        ("The grandfather went home.", False),
        ("The train depends on coal.", False),
        ("He said sorry to the doctor.", False),
    ],
)
def test_evasive_words(text: str, evades: bool) -> None:
    assert is_evasive(folded(text)) is evades
    assert shares([text, "x"], ["wrong", "wrong"])[1] == evades / 2
    assert shares([text, "x"], ["correct", "wrong"])[1] == 0.0


def test_only_a_row_beyond_the_first_length_shifts_positions() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    long = Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
        pad_token_id=0,
    )
    assert shifts_positions(long, 64) is None
    assert shifts_positions(long, 65) == "longrope"
    dynamic = LlamaConfig(
        max_position_embeddings=128, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    assert shifts_positions(dynamic, 128) is None
    assert shifts_positions(dynamic, 129) == "dynamic"
    assert shifts_positions(LlamaConfig(), 10**6) is None
