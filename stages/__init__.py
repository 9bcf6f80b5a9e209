"""The pipeline's stages, one typer command each; `dvc.yaml` connects them."""
