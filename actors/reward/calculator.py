"""The agent of conf=arithmetic_tool_cpu: the model may ask a calculator before it answers `#### 382`.

rollout.episode=actors.reward.calculator:solve
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "The value of a sum of products of whole numbers.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
EXPRESSION = re.compile(r"\d{1,9}([+*]\d{1,9}){0,9}")


async def solve(record: Mapping[str, Any], client: Any) -> float:
    """1 where the model's last words are the record's."""
    messages: list[Any] = [{"role": "user", "content": record["question"]}]
    while True:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        said = answer.choices[0].message
        if not said.tool_calls:
            return float((said.content or "").strip() == record["answer"])
        messages.append(said.model_dump())
        for call in said.tool_calls:
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def calculate(arguments: str) -> str:
    """What the calculator answers to a call."""
    try:
        expression = str(json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError):
        return "error"
    if not EXPRESSION.fullmatch(expression):
        return "error"
    return str(sum(math.prod(map(int, product.split("*"))) for product in expression.split("+")))
