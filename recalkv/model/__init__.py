"""Models: supported families, dense models read layer by layer, and compressed models at run time."""
