"""A byte-level BPE tokenizer, trained on a few sentences, as GGUF files hold them."""

from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_models import SENTENCE

SPECIAL = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPLITS = ("gpt-2", "qwen2", "llama-bpe")


@cache
def _trained(split: str) -> str:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizer(split)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet)
    inner.train_from_iterator([SENTENCE, "user assistant the old man's 1987 answer"], trainer)
    return str(inner.to_str())


def pre_tokenizer(split: str) -> pre_tokenizers.PreTokenizer:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as PATTERNS

    if split == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[split]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def tokenizer(split: str = "gpt-2") -> PreTrainedTokenizerFast:
    """Ids below 330 at most."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(split)),
        chat_template=TEMPLATE,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )
