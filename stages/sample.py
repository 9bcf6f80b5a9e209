"""Stage 1: draw calibration windows and freeze their token ids."""

from pathlib import Path

import typer

from recalkv.text.documents import load_documents
from recalkv.text.windows import joined_tokens, sample_windows
from stages.common import DataOption, ParamsOption, running


def main(params: ParamsOption = Path("params.yaml"), data: DataOption = Path("data")) -> None:
    """Draw calibration.samples windows of calibration.length tokens from calibration.text, by seed."""
    from transformers import AutoTokenizer

    with running("sample", params, data) as stage:
        wanted = stage.params.calibration
        tokenizer = AutoTokenizer.from_pretrained(stage.model().folder, trust_remote_code=False)
        documents = load_documents(
            wanted.text,
            split=wanted.split,
            subset=wanted.subset,
            field=wanted.field,
            max_documents=wanted.max_documents,
            revision=wanted.revision,
        )
        tokens = joined_tokens(tokenizer, documents)
        with stage.write(wanted.model_dump(mode="json", exclude={"batch_size", "precision"})) as store:
            store.put("windows", sample_windows(tokens, wanted.samples, wanted.length, wanted.seed))


if __name__ == "__main__":
    typer.run(main)
