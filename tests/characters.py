"""A minimal tokenizer for tests."""

from typing import Any

import torch


class Characters:
    """Tokenizer whose tokens are single characters.

    Parameters
    ----------
    mark
        Prefix of every text when special tokens are requested.
    """

    chat_template: str | None = None

    def __init__(self, mark: str = "") -> None:
        self.mark = mark

    def __call__(self, texts: Any, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        mark = self.mark if add_special_tokens else ""
        ids = [list(map(ord, mark + text)) for text in ([texts] if isinstance(texts, str) else texts)]
        return {"input_ids": ids[0] if isinstance(texts, str) else ids}

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(map(chr, torch.as_tensor(ids).tolist()))

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return f"<user>{messages[0]['content']}<assistant>"
