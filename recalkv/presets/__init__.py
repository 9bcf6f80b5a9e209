"""Parameter files of the paper's models: overlays on the project's ``params.yaml``."""
