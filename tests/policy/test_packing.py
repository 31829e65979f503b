"""A prompt that stands once gives each of its completions what it would have alone."""

from types import SimpleNamespace

import pytest
import torch

from grpo_nb.policy.model import ModelError, Policy
from grpo_nb.policy.packing import pack, pays, window
from tests.support import tiny_models as tiny
from tests.support.tokens import pattern

PROMPTS = [tiny.PROMPT, tiny.PROMPT[:2], [tiny.BOS, 9, 10, 11, 12, 13, 14]]
COMPLETIONS = [tiny.COMPLETION, [8], [7, 6, 5, 9, 10, 11], tiny.COMPLETION[:2], [12, 13, 14], [8, 8]]
PROMPT_OF = [0, 0, 2, 1, 0, 2]
STATELESS = [kind for kind in tiny.EVERY_KIND if kind != "lfm2"]


def both(learner: Policy, temperature: float = 1.0, **settings: bool) -> tuple[torch.Tensor, ...]:
    plain = learner.collate([PROMPTS[p] for p in PROMPT_OF], COMPLETIONS)
    packed = learner.pack(PROMPTS, COMPLETIONS, PROMPT_OF)
    alone, shared = (learner.logprobs(batch, temperature, **settings) for batch in (plain, packed))
    return alone.logprobs, shared.logprobs, alone.entropy, shared.entropy


@pytest.mark.parametrize("kind", STATELESS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_shared_prompts_change_no_score(kind: str, temperature: float) -> None:
    learner = tiny.policy(kind, **({"sliding_window": 16} if kind == "gemma3" else {}))
    with learner.eval_mode():
        alone, shared, entropy, entropy_shared = both(learner, temperature)
    torch.testing.assert_close(shared, alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy_shared, entropy, atol=1e-5, rtol=0)


@pytest.mark.parametrize("entropy_learns", [False, True])
def test_gradients_are_those_of_the_rows_alone(entropy_learns: bool) -> None:
    learner = tiny.policy("llama")
    weights = torch.randn(2, len(COMPLETIONS), 6, generator=torch.Generator().manual_seed(0))
    gradients = []
    for n in (0, 1):
        values = both(learner, entropy_learns=entropy_learns)
        loss = (weights[0] * values[n]).sum() + (weights[1] * values[2 + n]).sum()
        learner.model.zero_grad()
        loss.backward()
        gradients.append(
            {name: p.grad.clone() for name, p in learner.parameters_by_name().items() if p.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-4)


def test_a_packed_row_holds_its_prompt_once_and_wastes_no_column() -> None:
    batch = pack(PROMPTS, COMPLETIONS, PROMPT_OF, pad_id=0)
    assert batch.input_ids.shape == (3, 7 + 6 + 2) and batch.start == 6
    assert [int((row == 0).sum()) for row in batch.segments] == [len(p) for p in PROMPTS]
    assert batch.input_ids[2].tolist() == PROMPTS[2] + COMPLETIONS[2] + COMPLETIONS[5]
    assert batch.position_ids[2].tolist() == [*range(7), *range(7, 13), 7, 8]
    mask = batch.attention_mask(torch.float32)[2, 0] == 0
    assert mask.sum(1).tolist() == [*range(1, 14), 8, 9], "the last two see the prompt and themselves"


def test_rows_that_cannot_be_packed_are_refused() -> None:
    learner = tiny.policy("llama")
    with pytest.raises(ModelError):
        learner.pack([[]], [[1]], [0])
    with pytest.raises(ModelError, match=pattern(learner.context)):
        learner.pack([[1] * learner.context], [[1]], [0])


def test_a_window_is_the_shortest_look_back_of_any_layer() -> None:
    assert window(tiny.policy("llama").model.config) is None
    assert window(tiny.policy("gemma3").model.config) == 6


@pytest.mark.parametrize(
    ("hidden", "prompt", "completion", "group", "shared"),
    [
        (4096, 1000, 96, 8, True),  # 4.0 times as fast on an H200
        (4096, 256, 96, 4, True),  # 1.9
        (1024, 512, 64, 8, True),  # 1.4
        (1024, 256, 256, 8, True),  # 1.2
        (192, 64, 10, 8, True),  # 2.6 on two cores
        (1024, 32, 512, 8, False),  # attention among 4,128 tokens costs more than seven short prompts
        (192, 64, 10, 1, False),
    ],
)
def test_prompts_are_shared_where_that_is_cheaper(
    hidden: int, prompt: int, completion: int, group: int, shared: bool
) -> None:
    config = SimpleNamespace(hidden_size=hidden)
    rows = [[1] * prompt] * 2, [[1] * completion] * 2 * group, [i // group for i in range(2 * group)]
    assert pays(config, *rows) is shared
    assert not pays(SimpleNamespace(hidden_size=hidden, sliding_window=prompt + completion - 1), *rows)
