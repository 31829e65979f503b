"""What SFT learns is the assistant's turn as the chat template writes it, in the shapes of today's model families."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_nb.config import ConfigError, ModelConfig, parse
from grpo_nb.policy import tokenization as tokenization_module
from grpo_nb.policy.model import ModelError, Policy, load_policy
from grpo_nb.policy.tokenization import TokenizerAdapter
from grpo_nb.training.sft import sft
from tests.support import tiny_models as tiny
from tests.support.tiny import small_tasks, tiny_config, tiny_run
from tests.support.tokens import pattern

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
IM_END = "{{ m.content }}<|im_end|>\n{% endfor %}"
LAST = "{% if m.role == 'assistant' and loop.last %}"
QWEN3 = (
    CHATML
    + LAST
    + "<think>\n\n</think>\n\n{% endif %}"
    + IM_END
    + "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QWEN35 = (
    CHATML
    + LAST
    + "<think>\n\n</think>\n\n{% endif %}"
    + IM_END
    + "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "<think>\n{% endif %}"
)
GLM = (
    "[gMASK]{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}<think></think>\n{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GPT_OSS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}{% if m.role == 'assistant' and loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|></think>"
    "{{ m.content }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
)
R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>"
    "{{ m.content.split('</think>')[-1] }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
GEMMA = (
    "{% for m in messages %}<start>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<start>model\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}<eos>"
    "{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
SPECIAL = ("<eos>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "[gMASK]", "<|start|>", "<|end|>")
SPECIAL += ("<|message|>", "<|channel|>", "<|return|>", "<|User|>", "<|Assistant|>", "<start>", "<end>")
MARKS = ("<think>", "</think>")
MESSAGES = [{"role": "user", "content": "Is it red?"}]


def tokenization(template: str, merges: tuple[str, ...] = (), **switches: Any) -> TokenizerAdapter:
    """One token a byte but for special tokens, and `merges` as tokens of their own."""
    vocabulary = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pairs = [(merge[0], merge[1]) for merge in merges]
    vocabulary |= {first + second: len(vocabulary) + i for i, (first, second) in enumerate(pairs)}
    bare = Tokenizer(models.BPE(vocabulary, pairs))
    bare.pre_tokenizer, bare.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoders.ByteLevel(),
    )
    bare.add_special_tokens(list(SPECIAL))
    bare.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    tokens = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<eos>", chat_template=template)
    return TokenizerAdapter(tokens, [], len(tokens), switches)


def text(of: TokenizerAdapter, ids: list[int]) -> str:
    return str(of.tokenizer.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize(
    ("template", "switches", "target"),
    [
        pytest.param(QWEN3, {}, "<think>\n\n</think>\n\nNo<|im_end|>", id="qwen3"),
        pytest.param(QWEN3, {"enable_thinking": False}, "No<|im_end|>", id="qwen3-not-thinking"),
        pytest.param(QWEN35, {}, "\n</think>\n\nNo<|im_end|>", id="qwen3.5"),
        pytest.param(GLM, {}, "\n<think></think>\nNo<eos>", id="glm-4.5"),
        pytest.param(GPT_OSS, {}, "<|channel|>final<|message|>No<|return|>", id="gpt-oss"),
        pytest.param(DEEPSEEK, {}, "No<eos>", id="deepseek-v3.1"),
        pytest.param(GEMMA, {}, "No<end>", id="gemma"),
        pytest.param(MISTRAL, {}, " No<eos>", id="mistral"),
        pytest.param(PLAIN, {}, "No<eos>", id="no-special-token"),
    ],
)
@pytest.mark.parametrize("merges", [(), ("ĊĊ", ">Ċ", "ĠN")], ids=["bytes", "merges"])
def test_prompt_and_target_are_what_the_template_writes(
    template: str, switches: dict[str, Any], target: str, merges: tuple[str, ...]
) -> None:
    made = tokenization(template, merges, **switches)
    prompt, learnt = made.encode(MESSAGES), made.encode_completion("No", MESSAGES)
    assert text(made, learnt) == target and learnt[-1] in made.stop_token_ids
    assert not set(learnt[:-1]) & set(made.stop_token_ids)
    turn = [*MESSAGES, {"role": "assistant", "content": "No"}]
    written = made.tokenizer.apply_chat_template(turn, tokenize=False, **switches)
    end = "<eos>" * (not written.rstrip().endswith(target[-5:]))  # where the template itself writes no end
    assert text(made, [*prompt, *learnt]) == written.rstrip() + end
    assert made.encode_completion("No") == learnt


def test_ids_are_the_templates_own_where_they_begin_with_the_prompts() -> None:
    made = tokenization(MISTRAL, ("ĠN",))
    whole = made.tokenizer.encode("[INST] Is it red? [/INST] No<eos>")
    assert [*made.encode(MESSAGES), *made.encode_completion("No", MESSAGES)] == whole
    joined = tokenization(
        PLAIN, ("ĊN",)
    )  # the prompt's last character and the answer's first are one token of the whole
    assert text(joined, joined.encode_completion("No", MESSAGES)) == "No<eos>"


def test_a_prompt_is_rendered_once_under_one_template_and_date(monkeypatch: pytest.MonkeyPatch) -> None:
    made, rendered = tokenization(GEMMA), 0
    honest = tokenization_module._template

    def counted(*args: Any, **how: Any) -> str:
        nonlocal rendered
        rendered += 1
        return honest(*args, **how)

    monkeypatch.setattr(tokenization_module, "_template", counted)
    ids = made.encode(MESSAGES)
    made.encode(MESSAGES).clear()  # what is given out is the caller's own
    assert made.encode_completion("No", MESSAGES) and made.encode([dict(m) for m in MESSAGES]) == ids and rendered == 2
    made.tokenizer.chat_template = "{{ strftime_now('%Y') }} " + GEMMA
    dated = made.encode(MESSAGES)
    made.date = made.date.replace(year=2031)
    later = [made.encode(MESSAGES) for _ in range(2)]
    assert dated != ids and text(made, later[0]) == text(made, dated).replace("2025", "2031")
    assert later[0] == later[1] and rendered == 4
    assert made.encode([{**MESSAGES[0], "more": ["unhashable"]}]) == later[0] and rendered == 5


def test_reasoning_in_an_answer_goes_where_the_template_puts_it() -> None:
    made = tokenization(
        "{% for m in messages %}<start>{{ m.content.split('</think>') | join('</think>\n') }}<end>{% endfor %}"
    )
    assert text(made, made.encode_completion("<think>so</think>No", MESSAGES)) == "<start><think>so</think>\nNo<end>"


@pytest.mark.parametrize(("template", "switches"), [(R1, {}), (DEEPSEEK, {"thinking": True})], ids=["r1", "v3.1"])
def test_a_turn_that_does_not_continue_the_prompt_is_refused(template: str, switches: dict[str, Any]) -> None:
    made = tokenization(template, **switches)
    assert text(made, made.encode(MESSAGES)).rstrip().endswith("<think>")
    for prompt in (MESSAGES, None):
        with pytest.raises(ModelError, match=r"<think>[\s\S]*No<eos>[\s\S]*chat_template_kwargs"):
            made.encode_completion("No", prompt)
    assert text(made, made.encode_completion("No", "Is it red? ")) == "No<eos>"


def test_only_white_space_may_differ() -> None:
    made = tokenization(GEMMA.replace("<start>model\n{% endif %}", "<start>model\n \n{% endif %}"))
    assert text(made, made.encode_completion("No", MESSAGES)) == "No<end>"


def test_an_answer_that_has_begun_is_continued() -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "No, it"}]
    made = tokenization(GEMMA)
    assert text(made, made.encode_completion(" is blue", begun)) == " is blue<end>"


def test_sft_refuses_such_a_template_before_its_first_step(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, sft__data=None)
    policy = load_policy(run.config.model, 0)
    policy.set_chat_template(R1.replace("<eos>", policy.tokenization.token(policy.tokenization.turn_end)))
    with pytest.raises(ModelError, match=r"sft\.steps=0"):
        list(sft(run, policy=policy, tasks=small_tasks()))
    assert run.rows("sft") == [] and run.sft_checkpoints.steps() == []


# ---- the template's switches


def test_switches_reach_every_prompt_of_a_loaded_policy(tmp_path: Path) -> None:
    template = tiny.TEMPLATE + "{% if add_generation_prompt and colour %} {{ colour }}{% endif %}"
    folder = str(tiny.folder(tmp_path, tokens=tiny.tokenizer(template)))
    plain, switched = (
        load_policy(ModelConfig(name=folder, device="cpu", chat_template_kwargs=kwargs))
        for kwargs in ({}, {"colour": "red"})
    )
    assert switched.encode(tiny.CHAT) == [*plain.encode(tiny.CHAT), *tiny.ids("red")]
    with pytest.raises(ModelError, match=pattern("model.chat_template_kwargs", "'color'", "colour")):
        load_policy(ModelConfig(name=folder, device="cpu", chat_template_kwargs={"color": "red"}))


@pytest.mark.parametrize(
    "value", [{"messages": "x"}, {"add_generation_prompt": False}, {"a b": 1}, {"x": [1]}, {"x": None}]
)
def test_what_is_no_switch_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template_kwargs"):
        tiny_config(model__chat_template_kwargs=value)


def test_switches_are_settings_like_others() -> None:
    old = tiny_config().model_dump(mode="json")
    del old["model"]["chat_template_kwargs"], old["model"]["chat_template"]
    before, after = parse(old), tiny_config(model__chat_template_kwargs__enable_thinking=False)
    assert before == tiny_config() and before.model.chat_template_kwargs == {}
    assert after.model.chat_template_kwargs == {"enable_thinking": False}
    assert before.differences(after) == {"model.chat_template_kwargs.enable_thinking": (None, False)}
    assert parse(after.model_dump(mode="json")) == after


# ---- several templates


def named(*names: str) -> PreTrainedTokenizerFast:
    tokens = tiny.tokenizer()
    tokens.chat_template = {
        name: tiny.TEMPLATE.replace("<|end|>", f"{word} <|end|>")
        for name, word in zip(names, ("red", "blue"), strict=True)
    }
    return tokens


def test_templates_without_a_default_are_listed_with_the_ways_to_choose_one() -> None:
    learner = Policy(tiny.model(), named("tool_use", "rag"))
    assert learner.encode("who was late") == [7, 8, 9]
    with pytest.raises(ModelError) as caught:
        learner.encode(tiny.CHAT)
    said = str(caught.value)
    assert "rag, tool_use" in said and "model.chat_template='rag'" in said and "chat_template.jinja" in said
    learner.set_chat_template(learner.tokenizer.chat_template["rag"])
    assert learner.encode(tiny.CHAT)[-3:] == [*tiny.ids("blue"), tiny.END, tiny.ASSISTANT]


def test_a_template_is_chosen_by_its_name(tmp_path: Path) -> None:
    folder = str(tiny.folder(tmp_path, tokens=named("default", "rag")))
    default, rag = (load_policy(ModelConfig(name=folder, device="cpu", chat_template=name)) for name in (None, "rag"))
    assert tiny.ids("red")[0] in default.encode(tiny.CHAT) and tiny.ids("blue")[0] in rag.encode(tiny.CHAT)
    with pytest.raises(ModelError, match=r"model\.chat_template='rog'.*default, rag"):
        load_policy(ModelConfig(name=folder, device="cpu", chat_template="rog"))
