"""Conversations as documents: their format, and the text that a model reads."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from recalkv.errors import DataError

Document: TypeAlias = str | Sequence[Mapping[str, Any]]
"""A text, or the messages of a conversation, each with its ``role`` and ``content``."""


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list of messages in the format of chat templates.

    Each message has a role. Its content is a text, a list of parts (``[{"type": "text", "text": ...}]``), or null or
    absent, as in messages with tool calls.
    """
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and len(value) > 0
        and all(isinstance(each, Mapping) and "role" in each and _is_content(each.get("content")) for each in value)
    )


def _is_content(content: Any) -> bool:
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        return all(isinstance(part, str) or (isinstance(part, Mapping) and "type" in part) for part in content)
    return content is None or isinstance(content, str)


def plain_text(document: Document) -> str:
    """Return a text, or the messages of a conversation without their roles."""
    return document if isinstance(document, str) else "\n\n".join(_text_of(message) for message in document)


def _text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message; parts without text are left out."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)


def rendered(tokenizer: Any, document: Document) -> str:
    """Return a text, or a conversation rendered with the tokenizer's chat template.

    Raises
    ------
    DataError
        If the tokenizer has no chat template, or the template refuses the conversation.
    """
    if isinstance(document, str):
        return document
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the data are conversations, but the model's tokenizer has no chat template, as base models have none; use "
            "the chat version of the model, set `tokenizer.chat_template`, or give plain texts."
        )
    from jinja2.exceptions import TemplateError

    messages = [dict(message) for message in document]
    # Templates of text-only models do not support parts or null: they fail, or print the Python representation.
    plain = [message | {"content": _text_of(message)} for message in messages]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        parts = [message["content"] for message in messages if isinstance(message.get("content"), list)]
        return rendered(tokenizer, plain) if any(str(each) in text for each in parts) else text
    except (TemplateError, TypeError) as error:
        if plain != messages:
            return rendered(tokenizer, plain)
        roles = ", ".join(str(message["role"]) for message in document)
        raise DataError(f"the chat template refuses a conversation of the roles {roles}: {error}.") from error
