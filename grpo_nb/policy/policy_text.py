"""A policy's text: prompts and completions to token ids and back."""

from collections.abc import Sequence
from datetime import datetime

from grpo_nb.policy.tokenization import TokenizerAdapter
from grpo_nb.types import Prompt


class PolicyText:
    """Text operations of a policy, by its tokenizer."""

    tokenization: TokenizerAdapter

    @property
    def takes_system(self) -> bool:
        """Whether the chat template has a system role."""
        return self.tokenization.takes_system

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt up to where the completion starts; see `TokenizerAdapter.encode`."""
        return self.tokenization.encode(prompt)

    def encode_completion(self, text: str, prompt: Prompt | None = None) -> list[int]:
        """Token ids of a completion to learn, ending in one stop token; see `TokenizerAdapter.encode_completion`."""
        return self.tokenization.encode_completion(text, prompt)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion without special tokens."""
        return self.tokenization.decode(ids)

    def decode_marked(self, ids: Sequence[int]) -> str:
        """The text of a completion with the marks of thinking; see `TokenizerAdapter.decode_marked`."""
        return self.tokenization.decode_marked(ids)

    def left_open(self, prompt_ids: Sequence[int]) -> str:
        """The mark of a thinking block that a prompt leaves open; see `TokenizerAdapter.left_open`."""
        return self.tokenization.left_open(prompt_ids)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text that each token adds, special tokens too."""
        return self.tokenization.token_texts(ids)

    def set_chat_template(self, template: str) -> None:
        """Give the tokenizer this Jinja chat template; the stop tokens are found anew."""
        self.tokenization.set_chat_template(template)

    def set_date(self, date: datetime) -> None:
        """Give chat templates that read the clock this time from now on; a run sets the time of its start."""
        self.tokenization.date = date
