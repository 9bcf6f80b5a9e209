"""What times depend on: the latency stage follows it, so that a clone on another machine measures its own."""

import torch
import typer

from recalkv.evaluation.resources import device_name
from stages.common import Stage, stage, write_json


@stage
def machine(run: Stage) -> None:
    """Write DATA/machine.json: the processor or GPU, and the threads of torch."""
    write_json(run.data / "machine.json", {"device": device_name(run.device), "threads": torch.get_num_threads()})


if __name__ == "__main__":
    typer.run(machine)
