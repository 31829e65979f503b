"""Text becomes ids with one BOS, ends in every terminator there is, and is padded by none of them."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_nb.config import ModelConfig
from grpo_nb.policy.model import ModelError, Policy, load_policy
from grpo_nb.policy.tokenization import TokenizerAdapter
from tests.support import tiny_models as tiny
from tests.support.tokens import names, pattern

# ---- text


def test_terminators_are_the_union_of_all_sources() -> None:
    assert tiny.policy(eos=[tiny.EOS, 20]).stop_token_ids == (tiny.EOS, tiny.END, 20)
    assert tiny.policy(eos=20).stop_token_ids == (tiny.EOS, tiny.END, 20)
    assert tiny.policy(eos=20, tokens=tiny.tokenizer(template=None)).stop_token_ids == (tiny.EOS, 20)
    assert tiny.policy(tokens=tiny.tokenizer(template=None, eos_token=None)).stop_token_ids == (tiny.EOS,)
    assert tiny.policy().describe()["stop tokens"] == {"<eos>": tiny.EOS, "<|end|>": tiny.END}


def test_no_terminator_at_all_is_an_error() -> None:
    model = tiny.model()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    with pytest.raises(ModelError, match=r"eos_token_id|stop_token"):
        Policy(model, tiny.tokenizer(template=None, eos_token=None))


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (tiny.TEMPLATE, tiny.END),
        ("{% for m in messages %}{{ m['content'] | trim }} \n <eos>{% endfor %}", tiny.EOS),
        ("{% for m in messages %}{{ m['content'] }} {% endfor %}", tiny.EOS),  # nothing special follows: eos
        ("{{ raise_exception('no') }}", tiny.EOS),
        (None, tiny.EOS),
    ],
)
def test_a_target_ends_in_what_the_template_puts_after_an_answer(template: str | None, end: int) -> None:
    learner = tiny.policy(tokens=tiny.tokenizer(template))
    assert learner.encode_completion("answer yes") == [*tiny.ids("answer yes"), end]
    assert learner.encode_completion("answer yes <eos> no") == [*tiny.ids("answer yes"), end]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template_bos", [False, True])
def test_bos_exactly_once(adds_bos: bool, template_bos: bool) -> None:
    template = tiny.TEMPLATE if template_bos else tiny.TEMPLATE.removeprefix("{{ bos_token }}")
    learner = tiny.policy(tokens=tiny.tokenizer(template, adds_bos=adds_bos))
    chat = learner.encode(tiny.CHAT)
    assert chat.count(tiny.BOS) == int(adds_bos or template_bos)
    assert chat[-6:] == [tiny.USER, 7, 8, 9, tiny.END, tiny.ASSISTANT]
    for text in ("who was late", "<bos> who was late"):
        assert learner.encode(text) == [tiny.BOS] * (adds_bos or "bos" in text) + [7, 8, 9]


def test_a_last_assistant_message_is_continued() -> None:
    ids = tiny.policy().encode([*tiny.CHAT, {"role": "assistant", "content": "answer is"}])
    assert ids[-3:] == [tiny.ASSISTANT, *tiny.ids("answer is")]


def test_a_chat_template_beside_the_model_is_all_that_the_command_line_needs(tmp_path: Path) -> None:
    folder = tiny.folder(tmp_path / "model", tokens=tiny.tokenizer(template=None))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    learner = load_policy(ModelConfig(name=str(folder), device="cpu"))
    assert learner.encode(tiny.CHAT)[-3:] == tiny.ids("who was late")


def test_messages_without_a_template_are_refused_and_strings_work() -> None:
    learner = tiny.policy(tokens=tiny.tokenizer(template=None))
    assert learner.encode("who was late") == [7, 8, 9]
    with pytest.raises(ModelError, match=pattern("chat_template.jinja", "set_chat_template")):
        learner.encode(tiny.CHAT)
    learner.set_chat_template(tiny.TEMPLATE)
    assert learner.encode(tiny.CHAT)[-1] == tiny.ASSISTANT
    assert tiny.END in learner.stop_token_ids


def test_bad_prompts_are_refused() -> None:
    with pytest.raises(ModelError, match="tokens"):
        tiny.policy().encode("")
    with pytest.raises(ModelError, match="roles-must-alternate"):
        tiny.policy(tokens=tiny.tokenizer("{{ raise_exception('roles-must-alternate') }}")).encode(tiny.CHAT)


def test_decoding_drops_special_tokens_and_terminators() -> None:
    assert tiny.policy(eos=[20]).decode([tiny.BOS, *tiny.ids("answer yes"), tiny.PAD, 20, tiny.END]) == "answer yes"


@pytest.mark.parametrize(
    ("named", "pad", "reason"),
    [
        ({}, tiny.PAD, "tokenizer"),
        ({"pad_token": None}, tiny.PAD, "<pad>"),
        ({"pad_token": "<eos>"}, tiny.PAD, "<pad>"),
        ({"pad_token": "<|end|>"}, tiny.PAD, "<pad>"),
    ],
)
def test_padding_is_no_terminator(named: dict[str, Any], pad: int, reason: str) -> None:
    learner = tiny.policy(tokens=tiny.tokenizer(**named))
    assert learner.pad_id == pad and learner.pad_id not in learner.stop_token_ids
    assert names(str(learner.describe()["pad"]), reason)


def test_padding_without_a_spare_token_adds_no_row() -> None:
    learner = tiny.policy(tokens=tiny.tokenizer(pad_token=None), eos=[tiny.PAD])
    assert learner.pad_id == tiny.UNK and str(tiny.UNK) in str(learner.describe()["pad"])
    bare = tiny.policy(tokens=tiny.tokenizer(pad_token=None, unk_token=None), eos=[tiny.PAD])
    assert bare.pad_id not in bare.stop_token_ids
    assert bare.model.get_input_embeddings().weight.shape[0] == tiny.VOCABULARY


def test_vocabulary_too_small() -> None:
    with pytest.raises(ModelError, match=pattern(20, tiny.VOCABULARY - 1)):
        tiny.policy(vocab_size=20)


def test_an_added_token_without_a_row_is_refused_only_when_used() -> None:
    tokens = tiny.tokenizer()
    tokens.add_special_tokens({"additional_special_tokens": ["<image>"]})
    learner = tiny.policy(tokens=tokens)
    assert learner.encode("who") == [7] and "<image>" in str(learner.describe()["notes"])
    with pytest.raises(ModelError, match=pattern("'<image>'", tiny.VOCABULARY)):
        learner.encode("who <image>")


# ---- token by token


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and one that ends: characters beyond ASCII take several tokens."""
    vocabulary = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bare = Tokenizer(models.BPE(vocabulary, []))
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<eos>")


@pytest.mark.parametrize("text", ["plain words", "naïve 日本 \u20ac", "🙂🙂", " a\n\n b "])
def test_pieces_join_to_the_text_and_no_character_is_torn(text: str) -> None:
    tokens = byte_tokenizer()
    ids = tokens.encode(text)
    token_texts = TokenizerAdapter(tokens, [], len(tokens)).token_texts([*ids, tokens.eos_token_id])
    assert token_texts[-1] == "<eos>" and "".join(token_texts[:-1]) == text
    assert len(token_texts) == len(ids) + 1 == len(text.encode()) + 1 and "\ufffd" not in "".join(token_texts)
    assert [p for p in token_texts[:-1] if p] == list(text)


def test_pieces_of_words_keep_their_spaces() -> None:
    learner = tiny.policy()
    token_texts = learner.token_texts([*tiny.ids("answer yes"), tiny.END])
    assert "".join(token_texts[:-1]) == "answer yes" and token_texts[-1].strip() == "<|end|>"
