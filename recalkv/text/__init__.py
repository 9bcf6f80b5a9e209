"""Text: documents, evaluation corpora, and token windows."""
