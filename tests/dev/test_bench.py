"""The bench times what the settings say, with the preset's model or one of its shape."""

from typing import Any

from grpo_nb import presets
from grpo_nb.dev import bench
from grpo_nb.policy.shapes import shape_of
from tests.support.tokens import names


def test_random_weights_have_the_shape_of_the_presets_model(capsys: Any) -> None:
    small = {"batch.prompts": 2, "batch.group_size": 2, "batch.micro_batch": 4, "sampling.max_completion_length": 3}
    config, given = bench.random_parts(presets.demo().replace(**small), 7)
    assert given["policy"].text_config.hidden_size == shape_of("demo").hidden and given["policy"].full
    (row,) = bench.measure(config, 1, **given)
    assert (row["step"], row["tokens"]) == (3, 12)
    assert {len(given["policy"].encode(one.prompt)) for one in given["tasks"]["words"].examples("train")} == {7}


def test_the_command_says_how_it_was_made(capsys: Any) -> None:
    flags = ["--preset", "demo", "--steps", "1", "--random-weights", "6"]
    for change in ("batch.prompts=2", "batch.group_size=2", "sampling.max_completion_length=2"):
        flags += ["--set", change]
    assert bench.main(flags) == 0
    assert names(capsys.readouterr().out, "rollout", "--random-weights 6", "--preset demo")
