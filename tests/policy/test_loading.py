"""A name becomes a policy, or one error that says what was found, what is needed and what to change."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from grpo_nb.config import ModelConfig
from grpo_nb.policy import loading
from grpo_nb.policy.model import ModelError, load_policy
from tests.support import tiny_models as tiny
from tests.support.tokens import names, pattern

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's own

# ---- loading


def test_the_demo_model() -> None:
    learner = load_policy(ModelConfig(device="cpu"), seed=0)
    facts = learner.describe()
    assert learner.full and facts["train"] == "full" and facts["dtype"] == "float32" and facts["chat_template"]
    assert learner.pad_id not in learner.stop_token_ids and learner.context == 256
    assert json.loads(json.dumps(facts)) == facts
    text = learner.decode(learner.encode_completion("Answer: unknown"))
    assert text == learner.decode(learner.tokenization.encode_completion(text))
    ids = learner.encode([{"role": "user", "content": "Who was late?"}])
    assert learner.encode_completion("x")[-1] in learner.stop_token_ids and ids[-1] not in learner.stop_token_ids
    again = load_policy(ModelConfig(device="cpu"), seed=0).state()
    assert all(torch.equal(again[name], tensor) for name, tensor in learner.state().items())


def test_a_folder_is_found_from_home_and_by_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.folder(tmp_path / "models" / "mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("models/mine", "./models/mine", "~/models/mine"):
        assert tiny.score(load_policy(ModelConfig(name=name, device="cpu"))).shape == (1, 4)


def refused(name: Path | str, *named: object, **settings: Any) -> None:
    with pytest.raises(ModelError, match=pattern(*named)):
        load_policy(ModelConfig(name=str(name), device="cpu", **settings))


def test_a_wrong_path_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    refused(tmp_path / "models" / "other", tmp_path / "models", "mine/")
    refused("./nowhere/model.gguf", "./nowhere/model.gguf", Path.cwd())


def test_an_unknown_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_found(**_: Any) -> None:
        raise OSError("hub-unreachable.\nMore lines")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", nothing_found)
    refused("someone/some-model", "someone/some-model", Path.cwd(), "hub-unreachable.")


def test_an_incomplete_folder(tmp_path: Path) -> None:
    refused(tmp_path, "nothing", "config.json", "*.safetensors")
    tiny.folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    refused(tmp_path, "tokenizer", "config.json", "tokenizer.json")
    (tmp_path / "config.json").unlink()
    refused(tmp_path, "model.safetensors", "config.json")


def test_a_folder_around_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    refused(tmp_path, f"model.name='{tmp_path / 'm.gguf'}'")
    (tmp_path / "bad.gguf").write_bytes(b"<html>")
    refused(tmp_path / "bad.gguf", "GGUF", "b'<htm'")
    refused(tmp_path / "m.gguf", tmp_path / "m.gguf")
    (tmp_path / "m.txt").write_text("")
    refused(tmp_path / "m.txt", "'.txt'", ".gguf")


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    tiny.folder(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    refused(tmp_path / "model", "pytorch_model.bin", "*.safetensors")
    tiny.lora(tmp_path / "base").save(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    refused(tmp_path / "adapter", "adapter_model.safetensors", "adapter_model.bin")


def test_broken_or_foreign_weights(tmp_path: Path) -> None:
    tiny.folder(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path, tmp_path, "SafetensorError")
    (tmp_path / "model.safetensors").write_bytes(whole)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    refused(tmp_path, "LlamaForCausalLM", "(model.layers.2")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, tmp_path, "config.json")


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "hqq", "torchao", "a-new-one"])
def test_weights_that_are_quantised_are_refused_whatever_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    quantised(tmp_path, {"quant_method": method, "bits": 4})
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(ModelError) as caught:
        load_policy(ModelConfig(name=str(tmp_path), device="cpu"))
    assert f"quantised with {method}," in str(caught.value) and "install " not in str(caught.value)


@pytest.mark.parametrize("settings", [{"quant_method": "bitsandbytes"}, {}])
def test_the_package_of_quantised_weights_is_the_only_one_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    quantised(tmp_path, settings | {"load_in_4bit": True})
    monkeypatch.setattr("grpo_nb.policy.quantised.find_spec", lambda name: None)
    with pytest.raises(ModelError) as caught:
        load_policy(ModelConfig(name=str(tmp_path), device="cpu"))
    said = str(caught.value)
    assert names(said, "pip install bitsandbytes", "model.train='lora'") and "gguf" not in said


def test_quantised_weights_do_not_train_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(name=str(tiny.folder(tmp_path)), device="cpu")
    monkeypatch.setattr(LlamaForCausalLM, "is_quantized", True, raising=False)
    assert not load_policy(config).full
    refused(tmp_path, "model.train='full'", "quantised", train="full")


def test_a_missing_package_is_named_by_the_library_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise ImportError("needs `optimum`: pip install optimum")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", missing)
    refused(tiny.folder(tmp_path), "needs `optimum`: pip install optimum", "package")


def quantised(folder: Path, settings: dict[str, Any]) -> None:
    file = tiny.folder(folder) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": settings}))


def test_code_from_a_repository_is_never_run(tmp_path: Path) -> None:
    tiny.folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    trap = tmp_path / "ran"
    (tmp_path / "modeling_own.py").write_text(f"open({str(trap)!r}, 'w')\nclass C: pass\n")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.C"}}
    (tmp_path / "config.json").write_text(json.dumps(config | own))
    refused(tmp_path, "trust_remote_code")
    assert not trap.exists()


def test_adapters_that_cannot_be_used(tmp_path: Path) -> None:
    tiny.lora(tmp_path / "base").save(tmp_path / "adapter")
    refused(tmp_path / "adapter", "LoRA", "model.train='full'", train="full")
    path = tmp_path / "adapter" / "adapter_config.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"base_model_name_or_path": None}))
    refused(tmp_path / "adapter", "adapter_config.json", "base_model_name_or_path")
    path.write_text(json.dumps(whole | {"base_model_name_or_path": str(tmp_path / "gone")}))
    refused(tmp_path / "adapter", tmp_path / "gone")
    path.write_text(json.dumps(whole | {"base_model_name_or_path": str(tmp_path / "adapter")}))
    refused(tmp_path / "adapter", "another adapter")
    path.write_text(json.dumps(whole | {"peft_type": "IA3"}))
    refused(tmp_path / "adapter", "IA3", "LORA")
    for broken, said in (
        ("{", "line 1 column 2"),
        ("[" * 99_999, "recursion"),
        ("3", "JSON int"),
    ):
        path.write_text(broken)
        refused(tmp_path / "adapter", said)
    path.write_bytes(b"\xff\xfe")
    refused(tmp_path / "adapter", "adapter_config.json", "line 1 column 1")
    path.write_text(json.dumps(whole | {"base_model_name_or_path": 7}))
    refused(tmp_path / "adapter", "adapter_config.json", "base_model_name_or_path")
    path.write_text(json.dumps(whole | {"r": "many"}))
    refused(tmp_path / "adapter", tmp_path / "adapter", "TypeError")
    tiny.folder(tmp_path / "wide", hidden_size=64)
    path.write_text(json.dumps(whole | {"base_model_name_or_path": str(tmp_path / "wide")}))
    refused(tmp_path / "adapter", tmp_path / "adapter", "[32", "[64")
    path.write_text(json.dumps(whole))
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"cut")
    refused(tmp_path / "adapter", tmp_path / "adapter", "SafetensorError")


def test_devices_and_types_by_capability(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny.folder(tmp_path)
    refused(tmp_path, "float16'", "CPU", "'float32'", "'auto'", dtype="float16")
    for device in ("cuda:99", "tpu"):
        with pytest.raises(ModelError, match=pattern(f"model.device='{device}'", "cpu")):
            load_policy(ModelConfig(name=str(tmp_path), device=device))
    load_policy(ModelConfig(name=str(tmp_path), device="cpu", dtype="bfloat16"))
    assert names(caplog.text, "bfloat16", "cpu", "float32")
    assert load_policy(ModelConfig(name=str(tmp_path), device="cpu")).dtype == torch.float32


def test_auto_trains_small_models_in_full_and_large_ones_by_lora(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(name=str(tiny.folder(tmp_path)), device="cpu")
    assert load_policy(config).full
    monkeypatch.setattr("grpo_nb.policy.loading.FULL_BELOW", 1000)
    assert not load_policy(config).full


@pytest.mark.parametrize("native", [True, False])
def test_float16_of_a_lora_is_warned_of_where_the_gpu_has_bfloat16(
    native: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "_native_bfloat16", lambda device: native)
    device = torch.device("cuda:0")
    assert loading.pick_dtype("float16", device, full=False) is torch.float16
    assert names(caplog.text, "float16", 65504) and names(caplog.text, "'bfloat16'", "cuda:0") is native
    caplog.clear()
    assert loading.pick_dtype("bfloat16", device, full=False) is torch.bfloat16
    assert loading.pick_dtype("auto", device, full=False) is (torch.bfloat16 if native else torch.float32)
    assert "float16 overflows" not in caplog.text
