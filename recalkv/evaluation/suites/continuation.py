"""A multiple-choice task from any text: which of four passages goes on where this one stops.

For machines without a hub and without local question sets. Wrong answers come from elsewhere in the
same document, so that the topic gives nothing away.
"""

import random
from collections.abc import Sequence
from typing import Any

from recalkv.errors import DataError
from recalkv.text.chat import Document, plain_text

__all__ = ["CHOICES", "TASK", "continuation_items"]

TASK = "continuation"
CHOICES = 4
_CONTEXT, _ANSWER = 64, 12
_PASSAGE = _CONTEXT + _ANSWER


def continuation_items(documents: Sequence[Document], count: int, seed: int) -> list[dict[str, Any]]:
    """Draw items from documents.

    Parameters
    ----------
    documents
        Texts; those with room for four passages that do not overlap are used, one after the other.
    count
        Items wanted.
    seed
        Of the places and of the order of the choices.

    Returns
    -------
    list of dict
        ``context`` (64 words), ``choices`` (four times 12 words) and ``label``, the index of the right one.

    Raises
    ------
    DataError
        If no document is long enough.
    """
    texts = [words for words in (plain_text(each).split() for each in documents) if len(words) >= CHOICES * _PASSAGE]
    if not texts:
        raise DataError(
            f"the continuation task needs a document of {CHOICES * _PASSAGE} words or more; use another "
            f"evaluation.text, or name other zeroshot.tasks."
        )
    generator = random.Random(seed)
    items = []
    for number in range(count):
        words = texts[number % len(texts)]
        slots = len(words) // _PASSAGE
        right, *wrong = generator.sample(range(slots), CHOICES)
        # Within its slot a passage starts anywhere that keeps it inside.
        spare = len(words) - slots * _PASSAGE
        shift = generator.randint(0, spare)
        start = right * _PASSAGE + shift
        context = words[start : start + _CONTEXT]
        choices = [words[(slot + 1) * _PASSAGE + shift - _ANSWER : (slot + 1) * _PASSAGE + shift] for slot in wrong]
        label = generator.randrange(CHOICES)
        choices.insert(label, words[start + _CONTEXT : start + _PASSAGE])
        items.append(
            {"context": " ".join(context), "choices": [" ".join(choice) for choice in choices], "label": label}
        )
    return items
