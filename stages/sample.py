"""Step 1: draw calibration windows and freeze their token ids."""

import typer

from recalkv.text.documents import load_documents
from recalkv.text.windows import joined_tokens, sample_windows
from stages.common import Stage, stage


@stage
def sample(run: Stage) -> None:
    """Draw calibration.samples windows of calibration.length tokens from calibration.text, by seed."""
    from transformers import AutoTokenizer

    wanted = run.params.calibration
    tokenizer = AutoTokenizer.from_pretrained(run.model().folder, trust_remote_code=False)
    documents = load_documents(
        wanted.text,
        split=wanted.split,
        subset=wanted.subset,
        field=wanted.field,
        max_documents=wanted.max_documents,
        revision=wanted.revision,
    )
    tokens = joined_tokens(tokenizer, documents)
    with run.write(wanted.model_dump(mode="json", exclude={"batch_size", "precision"})) as store:
        store.put("windows", sample_windows(tokens, wanted.samples, wanted.length, wanted.seed))


if __name__ == "__main__":
    typer.run(sample)
