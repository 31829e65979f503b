"""Messages keep their bits, groups are dealt evenly, and torchrun's variables say who this process is."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_nb.config import ConfigError
from grpo_nb.ranks import launch, transfer
from grpo_nb.ranks.deal import deal
from grpo_nb.ranks.launch import Place
from grpo_nb.ranks.messages import Message, joined, split

VARIABLES = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def test_messages_keep_their_bits() -> None:
    table = torch.tensor([[0.1, -math.inf], [math.nan, 1e-300]], dtype=torch.float64)
    empty = torch.zeros(0, 3, dtype=torch.bfloat16)
    sent = Message("work", {"x": [0.1 + 0.2, None, "ß"]}, {"a/b": table.t(), "none": empty})
    got = Message.decoded(sent.encoded())
    assert (got.work, got.data) == (sent.work, sent.data)
    assert (
        torch.equal(
            got.tensors["a/b"],
            table.t(),
        )
        or got.tensors["a/b"].isnan().sum() == 1
    )
    assert got.tensors["none"].shape == (0, 3) and got.tensors["none"].dtype == torch.bfloat16


@given(st.lists(st.lists(st.integers(0, 2**40), max_size=5), max_size=6))
def test_rows_of_unequal_length_come_back(rows: list[list[int]]) -> None:
    assert split(joined(rows, torch.int64)) == rows


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 6))
def test_every_load_has_one_rank_and_none_has_much_more(loads: list[int], ranks: int) -> None:
    dealt = deal(loads, ranks)
    assert sorted(place for part in dealt for place in part) == list(range(len(loads)))
    sums = [sum(loads[place] for place in part) for part in dealt]
    assert max(sums) - min(sums) <= max(loads, default=0)
    assert dealt == deal(loads, ranks) and all(part == sorted(part) for part in dealt)


@given(st.integers(0, 30), st.integers(1, 6))
def test_equal_loads_are_dealt_in_turn(count: int, ranks: int) -> None:
    assert deal([1] * count, ranks) == [list(range(rank, count, ranks)) for rank in range(ranks)]


def test_buckets_hold_one_type_and_so_many_bytes() -> None:
    tensors = [torch.zeros(n, dtype=kind) for n, kind in ((3, torch.float32), (2, torch.float32), (9, torch.float64))]
    assert [len(bucket) for bucket in transfer.buckets(tensors)] == [2, 1]
    assert [len(bucket) for bucket in transfer.buckets(tensors, 12)] == [1, 1, 1]


def test_torchruns_variables_say_who_this_is() -> None:
    assert launch.place(VARIABLES) == Place(1, 4, 1, "host:29500")
    assert launch.place(VARIABLES | {"WORLD_SIZE": "1", "RANK": "0"}) is None
    assert launch.place({"RANK": "1", "WORLD_SIZE": "4"}) is None, "a scheduler's own, and no torchrun"


@pytest.mark.parametrize("wrong", [{"RANK": "4"}, {"RANK": "x"}, {"WORLD_SIZE": "100000"}, {"LOCAL_RANK": "-1"}])
def test_variables_that_cannot_be_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        launch.place(VARIABLES | wrong)
