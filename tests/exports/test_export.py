"""What is exported opens in plain PEFT and transformers with the log-probs of the run, and says where it comes from."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from markdown_it import MarkdownIt
from peft import LoraModel, PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo_nb
from grpo_nb.config import ModelConfig
from grpo_nb.evaluation.evaluate import restore_policy
from grpo_nb.exports import Export, ExportError, export, resolved
from grpo_nb.exports.card import Contents, card, licence, nearest_preset
from grpo_nb.policy import quantised
from grpo_nb.policy.merged import merged
from grpo_nb.policy.model import ModelError, load_policy
from grpo_nb.policy.source import Source, locate
from grpo_nb.run.run import Run, RunError
from tests.support import exported
from tests.support import tiny_models as tiny
from tests.support.cli_stage import says
from tests.support.hub_server import HubServer, serving
from tests.support.tiny import edited
from tests.support.tokens import names, pattern

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft's own
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # what the hub's client does with LFS
]

TOKEN = "hf_4711abcdefghijklmn"
REPOSITORY = "ada/fair-tiny"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return exported.a_run(tmp_path)


@pytest.fixture(autouse=True)
def quickly_drawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of these tests need some picture, which takes longer to draw than all else."""
    if request.node.originalname != "test_the_card_is_filled_from_the_run":
        monkeypatch.setattr("grpo_nb.exports.picture", lambda run: None)
        monkeypatch.setattr("grpo_nb.exports.plots.to_kept_png", lambda figure: b"\x89PNG")


def expected(run: Run, stage: Any = 4) -> Tensor:
    policy = restore_policy(run, stage)
    with policy.eval_mode():
        logits: Tensor = policy.model(torch.tensor([[5, 6, 7, 8]])).logits
    return logits


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model.eval()(torch.tensor([[5, 6, 7, 8]])).logits
    return result


def test_an_adapter_opens_in_plain_peft_and_here(run: Run, tmp_path: Path) -> None:
    made = grpo_nb.export(run, tmp_path / "out")
    assert (made.format, made.stage) == ("adapter", 4) and {"README.md", "curves.png"} < set(made.files)
    base = AutoModelForCausalLM.from_pretrained(run.config.model.name)
    model = PeftModel.from_pretrained(base, made.folder)
    assert torch.allclose(logits(model), expected(run), atol=1e-5)
    assert AutoTokenizer.from_pretrained(made.folder)("who was late") is not None
    again = load_policy(ModelConfig(name=str(made.folder), train="lora", device="cpu"))
    assert torch.equal(logits(again.model), logits(model))


@pytest.mark.parametrize("stage", [2, "sft"])
def test_a_merged_model_opens_in_plain_transformers(run: Run, tmp_path: Path, stage: Any) -> None:
    made = export(run, tmp_path / "out", format="merged", stage=stage)
    assert made.stage == stage and "adapter_config.json" not in made.files
    model = AutoModelForCausalLM.from_pretrained(made.folder)
    assert torch.allclose(logits(model), expected(run, stage), atol=1e-4)
    assert not torch.allclose(logits(model), expected(run, 4), atol=1e-2)


@pytest.mark.filterwarnings("ignore::UserWarning:peft")  # of this very danger
@pytest.mark.parametrize("targets", [("lm_head", "q_proj"), ("embed_tokens",)])
def test_weights_that_two_ends_share_are_merged_at_one(
    targets: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exported.tiny, "folder", partial(tiny.folder, tie_word_embeddings=True))
    run = exported.a_run(tmp_path, model__lora_targets=list(targets))
    want = expected(run)
    assert torch.allclose(logits(merged(restore_policy(run, 4)).model), want, atol=1e-4)
    made = export(run, tmp_path / "out", format="merged")
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(made.folder)), want, atol=1e-4)
    pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    made = export(run, tmp_path / "gguf", format="gguf")
    read = load_policy(ModelConfig(name=str(made.folder / "model.gguf"), train="full", device="cpu"))
    assert torch.allclose(logits(read.model), want, atol=1e-4)


def test_a_merged_model_that_is_another_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoraModel, "merge_and_unload", lambda self, **asked: self.unload())
    with pytest.raises(ModelError, match=pattern("format='adapter'")):
        export(run, tmp_path / "out", format="merged")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_a_model_that_trained_in_full_is_exported_whole(tmp_path: Path) -> None:
    run = exported.a_run(tmp_path, model__train="full")
    with pytest.raises(ExportError, match=pattern("format='merged'")):
        export(run, tmp_path / "out", format="adapter")
    made = export(run, tmp_path / "out")
    assert made.format == "merged"
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(made.folder)), expected(run))


def test_a_gguf_file_opens_in_our_own_loader(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    made = export(run, tmp_path / "out", format="gguf")
    read = load_policy(ModelConfig(name=str(made.folder / "model.gguf"), train="full", device="cpu"))
    assert torch.allclose(logits(read.model), expected(run), atol=1e-4)


def test_the_name_in_a_gguf_file_is_one_line_without_escapes(run: Run, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    moved = run.path.rename(run.path.with_name("mi\nne\x1b[31m"))
    made = export(Run.open(moved), tmp_path / "out", format="gguf")
    name = gguf.GGUFReader(str(made.folder / "model.gguf")).fields["general.name"].contents()
    assert "mi" in name and name.isprintable()


def test_an_architecture_without_a_proof_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    run = exported.a_run(tmp_path, kind="gemma3")
    with pytest.raises(ModelError, match=pattern("Gemma3ForCausalLM", "format='merged'")):
        export(run, tmp_path / "out", format="gguf")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_the_demo_s_tokenizer_has_no_form_in_gguf(tmp_path: Path) -> None:
    run = exported.a_run(tmp_path, model__name="demo", model__train="full")
    with pytest.raises(ModelError, match=pattern("WordLevel")):
        export(run, tmp_path / "out", format="gguf")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_format_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=pattern("onnx", "gguf")):
        export(run, tmp_path / "out", format="onnx")  # type: ignore[arg-type]


@pytest.mark.usefixtures("unchecked")
def test_stages(run: Run) -> None:
    assert (resolved(run, "latest"), resolved(run, 2), resolved(run, "sft")) == (4, 2, "sft")
    for wrong in ("newest", "best/nobody", "best/", "base", "4", 2.0, None, True):
        with pytest.raises(ExportError, match=pattern("fairness" if wrong != "base" else "'base'")):
            resolved(run, wrong)  # type: ignore[arg-type]
    with pytest.raises(RunError):
        resolved(run, "best")
    with pytest.raises(RunError):
        resolved(run, 3)
    for step, value in ((2, 0.9), (4, 0.2)):
        exported.evaluated(run, f"step {step}", step, value, "quick")
    assert resolved(run, "best") == resolved(run, "best/fairness") == 2


def test_a_folder_with_something_in_it_is_refused_before_any_work(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_nb.exports.restore_policy", None)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for place in (tmp_path / "full", tmp_path / "full" / "mine.txt", tmp_path / "nowhere" / "out"):
        with pytest.raises(ExportError, match=pattern(tmp_path)):
            export(run, place)
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["mine.txt"]


# ---- the card


def read(made: Export) -> tuple[dict[str, Any], str]:
    _, front, body = (made.folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), body


def test_the_card_is_filled_from_the_run(run: Run, tmp_path: Path) -> None:
    (Path(run.config.model.name) / "README.md").write_text("---\nlicense: MIT\n---\n")
    exported.evaluated(run, "base", 0, 0.25)
    exported.evaluated(run, "latest", 4, 0.75)
    made = export(run, tmp_path / "out")
    front, body = read(made)
    assert (made.folder / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert front["license"] == "mit" and front["library_name"] == "peft" and "base_model" not in front
    shown = MarkdownIt("commonmark").enable("table").render(body)
    assert names(shown, "0.25 [0.15, 0.35]", "0.75 [0.65, 0.85]", "accuracy", "fairness", "hallucination")
    assert "curves.png" in shown and names(shown, "batch.prompts", "batch.group_size", "step 4")
    preset, differing = nearest_preset(run.config)
    assert (
        preset == "demo" and "batch.group_size" in differing and f"<td>{differing['batch.group_size'][1]}</td>" in shown
    )


def test_a_run_without_steps_or_evaluations_has_a_card(tmp_path: Path) -> None:
    run = exported.a_run(tmp_path)
    (run.path / "metrics.jsonl").unlink()
    made = export(Run.open(run.path), tmp_path / "out", stage="sft")
    assert "curves.png" not in made.files and "curves.png" not in read(made)[1]


HOSTILE = (
    '|x|<img src=http://evil/a.png onerror="x">](javascript:x)![](http://evil/b.png) `a` **b** $c$ &lt; www.evil.org'
)


def test_what_a_run_says_is_shown_and_never_markup(tmp_path: Path) -> None:
    run = exported.a_run(tmp_path, model__train="full")
    tree = json.loads(run.config.model_dump_json())
    tree["objectives"] = {HOSTILE: tree["objectives"]["fairness"] | {"data": f"{HOSTILE}\n# heading\x1b[31m"}}
    (run.path / "config.json").write_text(json.dumps(tree))
    made = export(Run.open(run.path), tmp_path / "out")
    front, body = read(made)
    shown = MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(body)
    assert "evil" in shown and "<img" in shown
    for part in ("<a ", 'evil/b.png"', 'onerror="', "<h1>heading", "<strong>", "\x1b", 'src="http'):
        assert part not in shown, part
    assert shown.count("<h1") == 1 and set(front) <= {"license", "library_name", "pipeline_tag", "tags"}
    rows = [line for line in body.splitlines() if "heading" in line and line.startswith("|")]
    assert rows and all(line.replace("\\|", "").count("|") in (4, 5) for line in rows)


@pytest.mark.parametrize("stated", ["apache-2.0\nbase_model: x", "[a, b]", "{", "!!python/object/apply:os.system [ls]"])
def test_a_licence_that_is_none_is_left_out(tmp_path: Path, stated: str) -> None:
    base = tiny.folder(tmp_path / "base")
    (base / "README.md").write_text(f"---\nlicense: {stated}\n---\n")
    assert licence(locate(str(base))) in (None, "apache-2.0")
    assert licence(locate("demo")) is None


def test_keys_and_home_folders_stay_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HOME", str(tmp_path))
    run = exported.a_run(tmp_path, model__train="full")
    run = edited(run, objectives__fairness__data=f"{tmp_path}/data?key={TOKEN}")
    _, body = read(export(run, tmp_path / "out"))
    assert TOKEN not in body and str(tmp_path) not in body and "\\*\\*\\*" in body


def test_the_card_of_an_adapter_trained_on_nf4_loads_the_base_as_training_did(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[tuple[Any, ...]] = []
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *asked, **more: loaded.append((asked, more)))
    contents = Contents("adapter", 4, Source("folder", str(tmp_path / "base")), "adapter_model.safetensors", False)
    assert card(run, contents).count("```python") == 1
    run.config = run.config.replace(**{"model.quantize": "nf4"})
    shown = card(run, contents).split("```")
    exec(shown[3].removeprefix("python"), {})
    ((asked, more),) = loaded
    want = quantised.nf4(torch.bfloat16, torch.device("cpu"))["quantization_config"]
    assert asked == (str(tmp_path / "base"),) and more["quantization_config"].to_dict() == want.to_dict()
    assert card(run, replace(contents, format="merged")).count("```python") == 1


# ---- the hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving(HubServer(TOKEN)) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # another storage's protocol
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


LOCAL = {"adapter_config.json", "README.md"}
"""Files of an adapter that name places on this machine, and others where they are pushed."""


def written(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def private(asked: dict[str, Any]) -> bool:
    """As older and newer clients ask for it."""
    return asked.get("private") is True or asked.get("visibility") == "private"


def test_a_push_uploads_the_folder_to_a_private_repository(run: Run, tmp_path: Path, hub: HubServer) -> None:
    made = export(run, tmp_path / "out", push=REPOSITORY)
    assert hub.files.keys() == written(made.folder).keys() and made.address == f"{hub.url}/{REPOSITORY}"
    assert {name for name, data in written(made.folder).items() if data != hub.files[name]} == LOCAL
    assert private(hub.repositories[REPOSITORY]) and "adapter_model.safetensors" in hub.files
    export(run, tmp_path / "other", push="ada/other", public=True)
    assert not private(hub.repositories["ada/other"])


def test_a_pushed_adapter_names_a_local_base_without_its_place(run: Run, tmp_path: Path, hub: HubServer) -> None:
    made = export(run, tmp_path / "out", push=REPOSITORY)
    pushed, local = hub.files["adapter_config.json"], (made.folder / "adapter_config.json").read_bytes()
    base = Path(run.config.model.name)
    stated = json.loads(local)
    assert Path(stated["base_model_name_or_path"]) == base
    assert json.loads(pushed) == stated | {"base_model_name_or_path": base.name}
    assert not with_path(hub.files, tmp_path) and with_path(written(made.folder), tmp_path) == LOCAL
    (copy := tmp_path / "copy").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (copy / name).write_bytes(hub.files[name])
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), copy)
    assert torch.allclose(logits(opened), expected(run), atol=1e-5)


def with_path(files: dict[str, bytes], path: Path) -> set[str]:
    """Names of files that name the path, with or without Markdown's escapes."""
    return {name for name, data in files.items() if bytes(path) in data.replace(b"\\", b"")}


@pytest.mark.parametrize("format", ["adapter", "merged"])
def test_a_pushed_card_has_last_names_of_local_paths(format: Any, tmp_path: Path, hub: HubServer) -> None:
    (data := tmp_path / "secret" / "sft.jsonl").parent.mkdir()
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 20)
    run = exported.a_run(tmp_path, sft__data=str(data))
    made = export(run, tmp_path / "out", format=format, push=REPOSITORY)
    assert not with_path(hub.files, tmp_path) and "README.md" in with_path(written(made.folder), tmp_path)
    shown = hub.files["README.md"].decode().replace("\\", "")
    base = Path(run.config.model.name)
    assert names(shown, f"| base model | {base.name} |", f"| model.name | demo | {base.name} |", data.name)
    assert format == "merged" or f'from_pretrained("{base.name}")' in shown


def test_the_token_is_nowhere(
    run: Run, tmp_path: Path, hub: HubServer, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    status, out, err = says(capsys, "export", run.path, "--out", tmp_path / "out", "--push", REPOSITORY)
    assert status == 0 and REPOSITORY in out
    hub.refuses = 403
    status, refused_out, refused_err = says(capsys, "export", run.path, "--out", tmp_path / "b", "--push", REPOSITORY)
    assert status == 1 and names(refused_err, REPOSITORY, "push") and not names(refused_err, "hf upload")
    assert (tmp_path / "b" / "README.md").is_file()
    files = [*written(tmp_path / "out").values(), *written(run.path).values(), *hub.files.values()]
    texts = [out, err, refused_out, refused_err, *(r.getMessage() for r in caplog.records if "grpo" in r.name)]
    assert not any(TOKEN.encode() in data for data in files) and not any(TOKEN in text for text in texts)


@pytest.mark.usefixtures("unchecked")
def test_without_a_token_or_a_repository_nothing_begins(
    run: Run, tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_nb.exports.restore_policy", None)
    refused = ("fair", "a/b/c", "../x", "a/..", "https://hub/a/b", "a/b--c", "a/b.", "a/b.git", "a/b-", "/b", "a/ü", 3)
    for wrong in refused:
        with pytest.raises(ExportError, match=pattern("owner/name")):
            export(run, tmp_path / "out", push=wrong)  # type: ignore[arg-type]
    monkeypatch.setenv("HF_TOKEN", " ")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    with pytest.raises(ExportError, match=pattern("HF_TOKEN", REPOSITORY)):
        export(run, tmp_path / "out", push=REPOSITORY)
    assert not hub.paths and not (tmp_path / "out").exists()


# ---- the command line


def test_the_command(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = says(capsys, "export", run.path, "--out", tmp_path / "out", "--format", "merged", "--json")
    facts = json.loads(out)
    assert status == 0 and (facts["format"], facts["stage"], facts["address"]) == ("merged", 4, None)
    assert sorted(written(tmp_path / "out")) == facts["files"]
    assert says(capsys, "export", run.path, "--out", tmp_path / "out")[0] == 1
    assert says(capsys, "export", run.path, "--out", tmp_path / "c", "--public")[0] == 2
    assert says(capsys, "export", run.path, "--out", tmp_path / "c", "--stage", "newest")[0] == 2
    assert says(capsys, "export", run.path, "--out", tmp_path / "c", "--stage", "best")[0] == 1
