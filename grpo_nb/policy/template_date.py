"""The date that a chat template writes: fixed for a run, whatever the day.

transformers gives templates `strftime_now`, which reads the clock (Llama 3.2, SmolLM3 and gpt-oss write the day with
it). A macro of that name, put before the template, gives the fixed date in its place.
"""

import json
import re
from datetime import datetime

from transformers import PreTrainedTokenizerBase

NAME = "strftime_now"
UNDATED = datetime(2025, 1, 1)
"""The date outside of a run."""
USUAL = ("%d", "%b", "%B", "%Y", "%m", "%y", "%A", "%a", "%e", "%-d", "%-m", "%j", "%H", "%I", "%M", "%S", "%p", "%F")
"""Directives that a format may be put together from; those that stand in the template are added."""
_DIRECTIVE = re.compile(r"%[-_0^#]?[aAbBcdDeFfgGhHIjklmMnpPrRStTuUVwWxXyYzZ]")


def is_read(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template reads the clock."""
    return NAME in json.dumps(tokenizer.chat_template or "")


def dated(template: str, date: datetime) -> str:
    """The template with `strftime_now` telling `date`."""
    directives = dict.fromkeys((*USUAL, *_DIRECTIVE.findall(template)))
    values = {name: date.strftime(name) for name in directives}
    replaced = "".join(f"|replace({json.dumps(name)},{json.dumps(value)})" for name, value in values.items())
    # The line break goes with the block before it (trim_blocks), so that the template begins at the start of a line.
    return f"{{% macro {NAME}(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n{template}"
