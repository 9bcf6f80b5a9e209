"""Longer commands of `recalkv`, one module each; torch is imported only where it is used."""
