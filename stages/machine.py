"""The machine, which times depend on: an input of the latency stage, so that another machine measures again."""

import torch
import typer

from recalkv.evaluation.resources import device_name
from stages.common import Stage, stage, write_json


@stage
def machine(run: Stage) -> None:
    """Write DATA/machine.json: the processor or GPU, and torch's number of threads."""
    write_json(run.data / "machine.json", {"device": device_name(run.device), "threads": torch.get_num_threads()})


if __name__ == "__main__":
    typer.run(machine)
