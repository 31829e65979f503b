"""The content of a model in memory: one digest, however it is read."""

import hashlib
from pathlib import Path

import pytest
import torch

from grpo_nb.policy import origins
from tests.support import tiny_models as tiny

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("piece", [1, 7, 1 << 24])
def test_a_weight_has_the_digest_of_its_bytes(device: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins, "PIECE", piece)
    for weight in (torch.randn(5, 3).bfloat16().T, torch.arange(4), torch.tensor(2.5), torch.empty(0)):
        whole = weight.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        assert origins._tensor("w", weight.to(device)).digest == hashlib.sha256(whole).hexdigest()


def test_only_a_cuda_device_has_page_locked_memory() -> None:
    class Elsewhere(torch.Tensor):
        """As a weight on Apple's MPS, whose machine may have no such memory."""

        device = torch.device("mps")  # type: ignore[assignment]

    pieces = [*origins._pieces(torch.arange(3, dtype=torch.uint8).as_subclass(Elsewhere))]
    assert torch.cat(pieces).tolist() == [0, 1, 2]


def test_content_in_memory_changes_with_a_frozen_weight_alone(tmp_path: Path) -> None:
    learner = tiny.learner("lora", tmp_path)
    model, tokenizer = learner.model, learner.tokenizer
    before = origins.in_memory(model, tokenizer, set())
    frozen, trained = (next(p for p in model.parameters() if p.requires_grad is g) for g in (False, True))
    with torch.no_grad():
        trained.add_(1)
        assert origins.in_memory(model, tokenizer, set()) == before
        frozen.view(-1)[-1] += 1
    after = origins.in_memory(model, tokenizer, set())
    assert {key for key in before if before[key] != after[key]} == {"weights/in memory"}
