"""Documents that are conversations: what they look like, and the text that a model reads of them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from recalkv.errors import DataError

__all__ = ["Document", "is_conversation", "plain_text", "rendered"]

Document: TypeAlias = str | Sequence[Mapping[str, Any]]
"""A text, or the messages of a conversation, each with its ``role`` and ``content``."""


def is_conversation(value: Any) -> bool:
    """Whether a value is a list of messages with a role and a text."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and all(isinstance(each, Mapping) and "role" in each and isinstance(each.get("content"), str) for each in value)
    )


def plain_text(document: Document) -> str:
    """The document, or a conversation's messages without who says them."""
    return document if isinstance(document, str) else "\n\n".join(message["content"] for message in document)


def rendered(tokenizer: Any, document: Document) -> str:
    """The document, or a conversation in the tokenizer's chat template.

    Raises
    ------
    DataError
        If the tokenizer has no chat template, or it refuses the conversation.
    """
    if isinstance(document, str):
        return document
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the data are conversations, but the model's tokenizer has no chat template, as base models have none; use "
            "the chat version of the model, set `tokenizer.chat_template`, or give plain texts."
        )
    from jinja2.exceptions import TemplateError

    try:
        return str(tokenizer.apply_chat_template([dict(message) for message in document], tokenize=False))
    except TemplateError as error:
        roles = ", ".join(str(message["role"]) for message in document)
        raise DataError(f"the chat template refuses a conversation of the roles {roles}: {error}.") from error
