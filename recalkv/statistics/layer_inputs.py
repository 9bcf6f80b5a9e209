"""Inputs of every decoder layer, kept on disk between the forward and the backward pass.

The whitening pass writes them, so the Fisher pass only needs the backward half. Their size is calibration tokens x
hidden size x layers, and they can be recomputed, so they are raw files, one per layer, rather than a store.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FISHER_WINDOWS = 32
"""Maximum number of calibration windows used for gradients, for which the inputs of all layers are kept."""


class LayerInputs:
    """Layer inputs of a number of windows, stored in a folder.

    Parameters
    ----------
    folder
        Folder of the files; created at the first write.
    shape
        Windows, tokens per window, hidden size.
    dtype
        ``torch.float32`` or ``torch.bfloat16``.
    """

    def __init__(self, folder: Path, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        self._folder, self._shape, self._dtype = folder, shape, dtype
        self._raw = np.dtype(np.uint16 if dtype is torch.bfloat16 else np.float32)

    @property
    def samples(self) -> int:
        """Number of windows kept."""
        return self._shape[0]

    def put(self, layer: int, first: int, states: Tensor) -> None:
        """Store one batch of (windows, length, m) inputs of a layer, starting at window ``first``.

        Windows past ``samples`` are dropped, so the pass may cover more windows.
        """
        stop = min(first + states.shape[0], self.samples)
        if stop <= first:
            return
        rows = states[: stop - first].to(self._dtype).cpu().contiguous()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / "of").unlink(missing_ok=True)  # mark of an earlier pass, whose files are overwritten
            self._write(layer, first * self._window_bytes, rows.view(torch.uint8).numpy().data.cast("B"))
        except OSError:
            # These files may have filled the disk.
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _write(self, layer: int, place: int, content: memoryview) -> None:
        # Opened without truncation, which keeps the other windows of the file.
        file = os.open(self._folder / f"{layer:03d}.bin", os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            while content:
                written = os.pwrite(file, content, place)
                content, place = content[written:], place + written
        finally:
            os.close(file)

    def get(self, layer: int, first: int, stop: int) -> Tensor:
        """Read windows ``first`` to ``stop`` of a layer's inputs, float32."""
        path, size = self._folder / f"{layer:03d}.bin", self._window_bytes
        count = (stop - first) * size // self._raw.itemsize
        rows = np.fromfile(path, self._raw, count, offset=first * size)
        return torch.from_numpy(rows).view(self._dtype).view(stop - first, *self._shape[1:]).float()

    def sign(self, moments: str, layers: int) -> None:
        """Mark the inputs as complete, and as those of the pass whose moments have this digest.

        Does nothing if some layers are missing, as when the folder was removed before an interrupted pass resumed.
        """
        sizes = [path.stat().st_size for path in self._folder.glob("*.bin")]
        if sizes == layers * [self.samples * self._window_bytes]:
            (self._folder / "of").write_text(self._mark(moments))

    def are_of(self, moments: str) -> bool:
        """Whether the complete inputs of the pass with these moments are stored; any others are removed."""
        mark = self._folder / "of"
        whole = mark.exists() and mark.read_text() == self._mark(moments)
        if not whole:
            self.remove()
        return whole

    def remove(self) -> None:
        """Remove the inputs, the mark first, so that a partial removal is not taken for complete inputs."""
        (self._folder / "of").unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _mark(self, moments: str) -> str:
        return f"{moments} {self._shape} {self._dtype}"

    @property
    def _window_bytes(self) -> int:
        _, length, width = self._shape
        return length * width * self._raw.itemsize
