"""Which parser reads an answer: vLLM's names of tool and reasoning parsers, or what a template shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from peagle_jax.serve.harmony import HarmonyParser
from peagle_jax.serve.parsing import ChatParser, PlainParser, new_call_id
from peagle_jax.serve.reasoning import ThinkParser, is_opened
from peagle_jax.serve.tools import HermesParser, Style, coder_parser

ToolParser = Style
ReasoningParser = Literal["qwen3", "deepseek_r1", "openai_gptoss"]


def detect_parsers(template: str | None) -> tuple[ToolParser | None, ReasoningParser | None]:
    """The parsers that a chat template asks for by the markers that it writes."""
    template = template or ""
    if "<|channel|>" in template:
        return "openai", "openai_gptoss"
    tool: ToolParser = "qwen3_coder" if "<function=" in template else "hermes"
    return (
        tool if "<tool_call>" in template else None,
        "qwen3" if "<think>" in template or "</think>" in template else None,
    )


def needs_special_tokens(tool: ToolParser | None, reasoning: ReasoningParser | None) -> bool:
    """Whether the parser reads special tokens, which detokenizing must then keep."""
    return tool == "openai" or reasoning == "openai_gptoss"


def reasoning_form(
    reasoning: ReasoningParser | None, prompt: str
) -> Literal["think", "opened", "harmony"] | None:
    """How an answer to the rendered ``prompt`` may reason (for ``tools.answer_grammar``)."""
    if reasoning is None:
        return None
    if reasoning == "openai_gptoss":
        return "harmony"
    if reasoning == "deepseek_r1" or is_opened(prompt):
        return "opened"
    # A template that closes reasoning at once (thinking is off) leaves the answer alone.
    return None if prompt.rstrip().endswith("</think>") else "think"


def chat_parser(
    tool: ToolParser | None,
    reasoning: ReasoningParser | None,
    prompt: str,
    calls: bool,
    make_id: Callable[[], str] = new_call_id,
    tools: Sequence[dict] = (),
) -> ChatParser:
    """A parser of one answer to the rendered ``prompt``; ``calls`` False leaves calls as text. ``tools`` are
    the request's."""
    if needs_special_tokens(tool, reasoning):
        return HarmonyParser(calls and tool == "openai", make_id)
    answer: ChatParser = PlainParser()
    if calls and tool is not None:
        answer = coder_parser(tools, make_id) if tool == "qwen3_coder" else HermesParser(make_id)
    form = reasoning_form(reasoning, prompt)
    return answer if form is None else ThinkParser(answer, opened=form == "opened")
