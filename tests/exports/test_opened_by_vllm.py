"""What is exported opens in vLLM itself, where GRPO_NB_VLLM names its command; on a CPU a CPU build of it is needed."""

import json
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_nb.evaluation.evaluate import restore_policy
from grpo_nb.exports import export
from grpo_nb.rollout.vllm_server import PROGRAM
from tests.support import exported
from tests.support import tiny_models as tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get(PROGRAM), reason=f"needs vLLM: {PROGRAM}, the path of its command"),
]
PROMPT, TOKENS = [5, 6, 7, 8], 6
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256} | dict.fromkeys(
    ("num_attention_heads", "num_key_value_heads"), 2
)
ASK = """\
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
if __name__ == "__main__":
    model, adapter, prompt, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
    more = {"enable_lora": True, "max_lora_rank": 8} if adapter else {}
    llm = LLM(model=model, dtype="float32", enforce_eager=True, max_model_len=64, max_num_batched_tokens=64, **more)
    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    asked = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True)
    [reply] = llm.generate([{"prompt_token_ids": prompt}], asked, lora_request=lora)
    answer = reply.outputs[0]
    found = [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs)]
    print("ANSWER", json.dumps([list(answer.token_ids), found]))
"""


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_it_answers_as_the_policy_does(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "folder", partial(tiny.folder, **SIZES))
    run = exported.a_run(tmp_path)
    made = export(run, tmp_path / "out", format=form)  # type: ignore[arg-type]
    model, adapter = (run.config.model.name, str(made.folder)) if form == "adapter" else (str(made.folder), "")
    script = tmp_path / "ask.py"  # vLLM starts its engine as a process that imports the script
    script.write_text(ASK)
    python = Path(os.environ[PROGRAM]).with_name("python")
    done = subprocess.run(
        [python, script, model, adapter, json.dumps(PROMPT), str(TOKENS)],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    tokens, found = json.loads(line.removeprefix("ANSWER"))
    policy = restore_policy(run, 4)
    with policy.eval_mode():
        batch = policy.collate([PROMPT], [tokens])
        expected = policy.logprobs(batch).logprobs[0]
        logits = policy.model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens and len(tokens) == TOKENS
    assert torch.allclose(torch.tensor(found), expected, atol=1e-3)
