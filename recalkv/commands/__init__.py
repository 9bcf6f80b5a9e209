"""Commands of `recalkv` that are more than a few lines, one module each; torch is imported where it is used."""
