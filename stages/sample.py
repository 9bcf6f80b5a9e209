"""Step 1: sample calibration windows and store their token ids."""

import typer

from recalkv.params import check_length
from recalkv.text.corpora import calibration_documents, calibration_windows, check_vocabulary, load_tokenizer
from stages.common import Stage, stage


@stage
def sample(run: Stage) -> None:
    """Sample calibration.samples windows of calibration.length tokens from calibration.text, by seed."""
    from transformers import AutoConfig

    wanted, folder = run.params.calibration, run.model().folder
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    check_length(config, "calibration.length", wanted.length)
    tokenizer = load_tokenizer(folder)
    windows = calibration_windows(tokenizer, calibration_documents(wanted), wanted)
    check_vocabulary(config, windows)
    with run.write(wanted.model_dump(mode="json", exclude={"batch_size", "precision"})) as store:
        store.put("windows", windows)


if __name__ == "__main__":
    typer.run(sample)
