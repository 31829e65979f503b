"""Text to token ids and back: the chat template, one BOS, every stop token, and a padding id that is none of them."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from grpo_nb.policy import chat_template, template_date
from grpo_nb.policy.source import ModelError
from grpo_nb.tasks import thinking
from grpo_nb.types import Prompt

_CONTEXT = 4
"""Tokens that decide how the next one is written: no character has more bytes, no word piece looks back further."""
_KEPT = 8192
"""Prompts whose text and ids are kept: their lengths are checked, their targets are cut from them, then they train."""
_TORN = "\ufffd"
"""Text of an incomplete character."""
_SYSTEM_TEXT = "GRPOsystem"
_PROBE = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "GRPOanswer"}]


class TokenizerAdapter:
    """A tokenizer with the ids and the chat template of one model.

    `stop_token_ids` are all ids that end a completion, sorted: the model's own, the tokenizer's eos, and the token
    that the chat template puts after an assistant turn, which is the one SFT teaches (`turn_end`). `pad_id` is
    never one of them; no meaning hangs on it, because every mask is made from positions.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model_eos: Sequence[int],
        rows: int,
        switches: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.rows = rows
        self.switches = dict(switches or {})
        """The chat template's own settings, given to it in every rendering."""
        self.bos = _leading_bos(tokenizer)
        self._special = _special(tokenizer)
        self._marks = {i for i in self._special if thinking.is_mark(self.token(i))}
        self.beyond = _beyond(tokenizer, rows)
        self._model_eos = [i for i in model_eos if i < rows]
        self.date = template_date.UNDATED
        """The time that a chat template reads: fixed, so that a prompt is the same on every day."""
        self._kept = lru_cache(maxsize=_KEPT)(self._write)
        self._settle()

    def set_chat_template(self, template: str) -> None:
        """Use this Jinja chat template from now on; stop tokens and padding are found anew."""
        self.tokenizer.chat_template = template
        self._settle()

    @property
    def takes_system(self) -> bool:
        """Whether the chat template has a system role: it writes such a message, and not as a user's turn."""
        found, as_user = (
            _rendered(self.tokenizer, self.date, [{"role": role, "content": _SYSTEM_TEXT}, _PROBE[0]], self.switches)
            for role in ("system", "user")
        )
        return _SYSTEM_TEXT in found and found != as_user

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, up to where the completion starts, with BOS exactly once if the model has one.

        Messages go through the chat template with its generation prompt; where the last one is the assistant's,
        the completion continues it.

        Raises:
            ModelError: messages without a template, no token at all, or ids that the model has no row for.
        """
        text, ids = self._written(prompt)
        if self.bos is not None and ids[:1] != [self.bos]:
            ids = [self.bos, *ids]
        if not ids:
            raise ModelError(f"prompt {prompt!r} has no tokens; the first completion token needs one to follow")
        self._check(ids, text)
        return ids

    def encode_completion(self, text: str, prompt: Prompt | None = None) -> list[int]:
        """Token ids of a completion to learn, ending in one stop token: the assistant turn's, else eos.

        After messages they are the rest of the turn as the chat template writes it around `text`, with its empty
        thinking block or its channel; after a prompt that is a text, `text` alone. Without a prompt it is the turn
        after one user message, if a template takes it.

        Raises:
            ModelError: the template's turn does not continue its prompt, or ids that the model has no row for.
        """
        if prompt is None:
            prompt = _PROBE[:1] if self._takes_messages else ""
        ids = self._ids(text) if isinstance(prompt, str) else self._turn(prompt, text)
        self._check(ids, text)
        end = next((n for n, i in enumerate(ids) if i in self.stop_token_ids), len(ids))
        return [*ids[:end], self.turn_end]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion, without stop tokens and other special tokens."""
        kept = [i for i in ids if i not in self.stop_token_ids]
        return str(self.tokenizer.decode(kept, skip_special_tokens=True))

    def decode_marked(self, ids: Sequence[int]) -> str:
        """The text of a completion without special tokens but for those that begin or end a model's thinking."""
        if self._marks.isdisjoint(ids):
            return self.decode(ids)
        kept = [i for i in ids if i in self._marks or (i not in self._special and i not in self.stop_token_ids)]
        return str(self.tokenizer.decode(kept, skip_special_tokens=False))

    def left_open(self, prompt_ids: Sequence[int]) -> str:
        """Opening mark of a thinking block that the prompt leaves open for the completion; else empty.

        Only the turn that the completion belongs to counts: what follows the last special token that is no mark.
        Where a prompt has none, its last word does.
        """
        others = self._special - self._marks
        start = next((n for n in range(len(prompt_ids), 0, -1) if prompt_ids[n - 1] in others), 0)
        turn = str(self.tokenizer.decode(list(prompt_ids[start:]), skip_special_tokens=False))
        return thinking.left_open(turn) if start else thinking.ends_open(turn)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text that each token adds, special ones too: joined, they are the decoded text.

        Of the tokens that share one character the last has it and the others are empty.
        """
        return [self._added(ids[max(0, i - _CONTEXT) : i], token) for i, token in enumerate(ids)]

    def token(self, token_id: int) -> str:
        """The tokenizer's text for this id, special or not."""
        return str(self.tokenizer.convert_ids_to_tokens(token_id))

    def _added(self, before: Sequence[int], token: int) -> str:
        old, new = (
            str(self.tokenizer.decode(list(ids), skip_special_tokens=False)).rstrip(_TORN)
            for ids in (before, [*before, token])
        )
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))
        return new[shared:].lstrip(_TORN)

    def _turn(self, prompt: Sequence[Any], text: str) -> list[int]:
        """Ids of the turn: cut from those of the conversation if these begin with the prompt's, else encoded apart."""
        before, prompt_ids = self._written(prompt)
        rest = chat_template.rest(before, self._render(chat_template.turn(prompt, text), whole=True))
        if self._ends_bare:
            rest = rest.rstrip()
        ids = self._ids(before + rest)
        return ids[len(prompt_ids) :] if ids[: len(prompt_ids)] == prompt_ids else self._ids(rest)

    def _written(self, prompt: Prompt) -> tuple[str, list[int]]:
        """The text of a prompt and its ids, from memory where template and date are as they were."""
        messages = prompt if isinstance(prompt, str) else tuple(tuple(message.items()) for message in prompt)
        key = messages, self.date, self.tokenizer.chat_template
        try:
            hash(key)
        except TypeError:  # templates by name, or content in parts
            text, ids = self._write(*key)
        else:
            text, ids = self._kept(*key)
        return text, list(ids)

    def _write(self, prompt: Any, date: datetime, template: Any) -> tuple[str, tuple[int, ...]]:
        text = prompt if isinstance(prompt, str) else self._render([dict(message) for message in prompt])
        return text, tuple(self._ids(text))

    def _settle(self) -> None:
        chat_template.check_switches(self.tokenizer.chat_template, self.switches)
        probe, eos = _rendered(self.tokenizer, self.date, _PROBE, self.switches), self.tokenizer.eos_token_id
        turn_end = _turn_end(self.tokenizer, probe)
        self._takes_messages, self._ends_bare = bool(probe), turn_end is None
        found = {*self._model_eos, *(i for i in (turn_end, eos) if i is not None)}
        if not found:
            raise ModelError(
                "no token ends a completion: generation_config.eos_token_id and the tokenizer's eos are unset, and no "
                "special token follows the chat template's assistant turn; set tokenizer.eos_token"
            )
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(found))
        self.turn_end: int = next(i for i in (turn_end, eos, self.stop_token_ids[0]) if i is not None)
        self._check(self.stop_token_ids, "the terminators")
        self.pad_id, self.pad_reason = _padding(self.tokenizer, self.stop_token_ids, self.rows)

    def _render(self, messages: Sequence[Any], whole: bool = False) -> str:
        """Text of the prompt that these messages make, or of the `whole` conversation."""
        if not self.tokenizer.chat_template:
            raise ModelError(
                "the prompt is a list of messages, and this tokenizer has no chat template; put one into the file "
                "chat_template.jinja in the model's folder, e.g. {% for m in messages %}{{ m['content'] }}{% endfor %}"
                " (a hub model: download it first, hf download NAME --local-dir FOLDER, and set model.name=FOLDER); in "
                "Python policy.set_chat_template(template) does the same; an own task may give prompts as text"
            )
        named = chat_template.names(self.tokenizer)
        if named and "default" not in named:
            raise ModelError(chat_template.without_default(named))
        goes_on = bool(messages) and messages[-1].get("role") == "assistant"
        how = {"add_generation_prompt": not (goes_on or whole), "continue_final_message": goes_on and not whole}
        try:
            return _template(self.tokenizer, self.date, messages, **self.switches, **how)
        except (TemplateError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"the chat template refuses {messages!r}: {error}; change the messages' roles") from error

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _check(self, ids: Sequence[int], text: str) -> None:
        if (top := max(ids, default=0)) >= self.rows:
            raise ModelError(
                f"token {self.token(top)!r} has id {top}, the model has {self.rows} rows (in {text!r:.80}); "
                "use the tokenizer that the model was trained with"
            )


def _template(tokenizer: PreTrainedTokenizerBase, date: datetime, messages: Sequence[Any], **how: Any) -> str:
    if template_date.is_read(tokenizer):
        how["chat_template"] = template_date.dated(str(tokenizer.get_chat_template()), date)
    return str(tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, **how))


def _rendered(
    tokenizer: PreTrainedTokenizerBase, date: datetime, messages: Sequence[Any], switches: Mapping[str, Any]
) -> str:
    """Messages as the template writes them; empty without a template, or if it refuses."""
    if not tokenizer.chat_template:
        return ""
    try:
        return _template(tokenizer, date, messages, **switches)
    except (TemplateError, ValueError, KeyError, TypeError):
        return ""


def _turn_end(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """The first added token after the answer of the rendered probe."""
    _, found, tail = text.rpartition(_PROBE[-1]["content"])
    single = _added(tokenizer) - {tokenizer.bos_token_id, tokenizer.unk_token_id}
    ids = tokenizer.encode(tail, add_special_tokens=False) if found else []
    return next((i for i in ids if i in single), None)


def _added(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    return {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}


def _special(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids that are left out of a text that is decoded without special tokens."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(i for i, token in added if getattr(token, "special", False))}


def _leading_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    bos = tokenizer.bos_token_id
    return bos if bos is not None and list(tokenizer.encode("a"))[:1] == [bos] else None


def _beyond(tokenizer: PreTrainedTokenizerBase, rows: int) -> list[str]:
    """Added tokens that the model has no row for: tolerated until one is used (Gemma 3 has an image token so).

    Raises:
        ModelError: ordinary tokens are beyond the embedding too.
    """
    beyond = {token: i for token, i in tokenizer.get_vocab().items() if i >= rows}
    if beyond.keys() - tokenizer.get_added_vocab().keys():
        raise ModelError(
            f"vocabulary too small: the model's embedding has {rows} rows, the tokenizer has ids up to "
            f"{max(beyond.values())} ({len(beyond)} tokens without a row); use the tokenizer that the model was "
            "trained with, or resize the model: model.resize_token_embeddings(len(tokenizer)), then train the new rows"
        )
    return sorted(beyond)


def _padding(tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int], rows: int) -> tuple[int, str]:
    """An id that pads, and why this one: no row is ever added to the model for it."""

    def usable(token_id: int | None) -> bool:
        return token_id is not None and token_id < rows and token_id not in stop_token_ids

    pad = tokenizer.pad_token_id
    if usable(pad):
        return pad, "the tokenizer's own"
    why = "the tokenizer has none" if pad is None else "the tokenizer's own also ends completions"
    named = {i: str(token) for i, token in sorted(tokenizer.added_tokens_decoder.items()) if usable(i)}
    for word in ("pad", "unused", "reserved"):
        if (chosen := next((i for i, token in named.items() if word in token.lower()), None)) is not None:
            return chosen, f"{why}; {named[chosen]} is free"
    if usable(tokenizer.unk_token_id):
        return tokenizer.unk_token_id, f"{why}; the unknown token does not occur in prompts"
    return next(i for i in range(rows) if usable(i)), f"{why}; any id will do, since all masks are positional"
