"""Kernels that are compiled before the first step are given what that step gives them."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_nb.config import Config
from grpo_nb.passes.ahead import compile_kernels
from tests.passes.conftest import Make


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_every_launch_takes_its_arguments(lora: Make, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    learner = lora(kind)
    assert compile_kernels(learner, Config(), ("cpu",)) == 0  # float32: no kernel of ours
    learner.model.to(torch.bfloat16)
    with caplog.at_level(logging.INFO):
        assert compile_kernels(learner, Config(), ("cpu",)) == 16
    assert not caplog.records


def test_a_family_without_kernels_is_left_alone(lora: Make) -> None:
    learner = lora("gpt2", ["c_attn"])
    learner.model.to(torch.bfloat16)
    assert compile_kernels(learner, Config(), ("cpu",)) == 0


def test_a_step_compiles_nothing_more(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    done = subprocess.run([sys.executable, "-c", STEPS, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["True", "0", "0"]


STEPS = """
import sys
from pathlib import Path
import torch, triton
from grpo_nb.dev.peer_work import SIZES, Work, ours
from grpo_nb.training import numerics

compiled = []
triton.knobs.runtime.jit_post_compile_hook = lambda *_, **given: compiled.append(given["fn"].name)
ahead, then = numerics.compile_kernels, []
def counted(*given):
    ahead(*given)
    then.append(len(compiled))

numerics.compile_kernels = counted
base = SIZES["tiny"]
shape = {**base.shape, "vocab_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4}
work = Work("llama", shape, 3, 4, 21, 35, 12)
steps = ours(work, torch.device("cuda"), {"sampling.max_prompt_length": 300}, Path(sys.argv[1]))
next(steps)
first = len(compiled) - then[0]
next(steps)
print(then[0] > 10, first, len(compiled) - then[0] - first)
"""
