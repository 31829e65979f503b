"""The comparison with TRL: the same work on both sides, taken in turns."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_nb.dev import peer, peer_sft, peer_work
from grpo_nb.dev.bench import WARM_UP

CPU = torch.device("cpu")
TINY = peer_work.SIZES["tiny"]


def test_prompts_are_as_long_as_the_work_says() -> None:
    tokenizer = peer_work.words_tokenizer(TINY)
    for text in peer_work.Words(TINY).texts:
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == TINY.prompt_tokens and tokenizer.decode(ids) == text and tokenizer.unk_token_id not in ids


def test_both_models_have_the_same_weights() -> None:
    one, two = (peer_work.lora_model(TINY, CPU).state_dict() for _ in range(2))
    assert one.keys() == two.keys() and all(torch.equal(weight, two[name]) for name, weight in one.items())


def test_the_weights_that_a_token_reads_are_the_models() -> None:
    model = peer_work.lora_model(TINY, CPU).get_base_model()
    matrices = {p.data_ptr(): p for n, p in model.named_parameters() if p.dim() > 1 and "lora" not in n}  # tied: one
    assert peer.weight_bytes(TINY, 4) == 4 * sum(p.numel() for p in matrices.values())


def test_sides_take_turns_once_both_are_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def steps() -> Iterator[Any]:
        while True:
            order.append("ours")
            yield SimpleNamespace(
                metrics={"tokens": 7, **{f"time/{p}": 0.1 for p in ("rollout", "score", "reference", "train")}}
            )

    race = peer.Race(CPU, WARM_UP, 3, steps)
    ended = []
    while not any(ended):
        order.append("trl")
        ended.append(race.turn(2.0, {"rollout": 1.5}, 9))
    warm = ["trl"] * (WARM_UP + 1) + ["ours"] * WARM_UP
    assert order == warm + ["trl", "ours"] * 3, "the first of TRL's steps is not counted either"
    assert race.trl.steps == [2.0] * 3 and race.trl.part("rollout") == 1.5 and race.trl.tokens == [9] * 3
    assert len(race.ours.steps) == 3 and race.ours.part("train") == 0.1
    drawn = peer.table(race, floor=0.5)
    assert {"step", "rollout", "tokens a second"} <= set(drawn.columns[0].cells)  # type: ignore[arg-type]


def test_without_trl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "trl", None)
    with pytest.raises(SystemExit):
        peer.main([])
    assert "parity" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # TRL's own
def test_a_race_on_this_machine(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed (the extra 'parity')")
    assert peer.main(["--steps", "1", "--json", str(tmp_path / "race.json")]) == 0
    assert '"ours"' in (tmp_path / "race.json").read_text()


def test_pairs_of_the_warm_up_are_as_long_as_the_work_says() -> None:
    tokenizer, lengths = peer_work.words_tokenizer(TINY), set()
    found = peer_sft.pairs(TINY)
    assert len(found) == 8 * TINY.rows
    for pair in found:
        assert len(tokenizer(pair["prompt"])["input_ids"]) == TINY.prompt_tokens
        both = tokenizer(pair["prompt"] + pair["completion"])["input_ids"]
        assert tokenizer.unk_token_id not in both
        lengths.add(len(both) + 1 - TINY.prompt_tokens)  # the end token
    assert lengths == set(range(2, TINY.completion_tokens + 1))


@pytest.mark.slow
def test_a_race_of_the_warm_up(capsys: Any) -> None:
    pytest.importorskip("trl", reason="TRL is not installed (the extra 'parity')")
    assert peer_sft.main(["--steps", "1"]) == 0
    assert {"step", "first"} <= set(capsys.readouterr().out.split())
