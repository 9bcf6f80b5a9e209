"""The steps of Algorithm 1 on a model streamed layer by layer, one module a step, without files."""
