"""Chat templates in the forms of known models, for the tokenizer of assets/arithmetic."""

from pathlib import Path

from transformers import AutoTokenizer

MODEL = Path(__file__).parents[3] / "assets" / "arithmetic" / "model"

TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
OPENS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CALLS = "{% for c in m.tool_calls %}{{ '<tool_call>' + c.function | tojson + '</tool_call>' }}{% endfor %}"

TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\nTools: ' + tools | tojson + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% elif m.tool_calls %}{{ '<|im_start|>assistant\\n' + m.content }}" + CALLS + "{{ '<|im_end|>\\n' }}"
    "{% else %}" + TURN + "{% endif %}{% endfor %}" + OPENS
)
"""Like Qwen2.5: results of tools together in a turn of the user."""

STRICT = TOOLS.replace(
    "{% if m.role == 'tool' %}",
    "{% if m.role == 'tool' %}"
    "{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('a result without a call') }}{% endif %}",
)
"""Like Mistral: a result follows a call, or the template refuses."""

THINKING = (
    "{% for m in messages %}{% set text = m.content if loop.last else m.content.split('</think>')[-1].lstrip() %}"
    "{{ '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}{% endfor %}" + OPENS
)
"""Like Qwen3: the thoughts of earlier turns are dropped."""

FORGETFUL = "{{ '<|im_start|>user\\n' + messages[-1].content + '<|im_end|>\\n' }}" + OPENS
"""Writes the last message alone."""


def tokenizer(template: str | None = None):
    made = AutoTokenizer.from_pretrained(MODEL)
    if template is not None:
        made.chat_template = template
    return made
