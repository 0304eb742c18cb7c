"""Chat templates that write tool calls as model families do, and a service that says what a test wants."""

import copy
from collections.abc import Sequence

from fakes import VOCABULARY, qwen2_tied, tokenizer
from transformers import PreTrainedTokenizerBase

from grpo_fn.shell.serving.decode_service import DecodeService
from grpo_fn.shell.serving.decode_session import DrawnRow, QueuedRow

HEAD = "{% if tools %}system: tools {{ tools | tojson }}{{ '\\n' }}{% endif %}"
TURNS = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'tool' %}<{{ m.name }}> {% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    ),
    "qwen_xml": (
        "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
        "<parameter={{ k }}>\n{{ v }}\n</parameter>{{ '\\n' }}{% endfor %}</function>\n</tool_call>"
    ),
    "llama_json": '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',
    "refusing": "{{ raise_exception('no calls') }}",
    "odd": "@{{ c.function.name }}@",
}


def template(family: str) -> str:
    """The chat template of a family."""
    return HEAD + TURNS.replace("CALL", CALLS[family])


def tokenizer_of(family: str) -> PreTrainedTokenizerBase:
    """The tests' tokenizer with that template."""
    made = copy.deepcopy(tokenizer())
    made.chat_template = template(family)
    return made


class ScriptedService(DecodeService):
    """Says the next of the given texts for every row, five tokens at a time; `asked` are the prompts as text."""

    def __init__(self, texts: Sequence[str]) -> None:
        limits = {"max_rows": 4, "max_tokens": 200, "max_waiting": 64, "logits_chunk_elements": 10**4}
        super().__init__(qwen2_tied(VOCABULARY), tokenizer(), **limits)
        self.texts, self.asked, self.positions = [*texts], [], 4096

    def draw(self, rows: Sequence[QueuedRow]) -> None:
        for row in rows:
            self.asked.append(tokenizer().decode(row.prompt))
            ids = tokenizer()(self.texts.pop(0), add_special_tokens=False)["input_ids"][: row.limit]
            for start in range(0, len(ids), 5) if row.progress else ():
                part = ids[start : start + 5]
                row.progress(part, [-0.5] * len(part))
            row.answer(DrawnRow(ids, [-0.5] * len(ids), len(ids) < row.limit))
