"""Residual window: exact latents of the newest tokens, kept in addition to packed rows.

A token attends most to those just before it, so rounding these costs most (measured in docs/quantization.md). The exact
latents accompany the rows of any cache class of transformers and follow its beam reordering, crops and resets: each
layer is replaced by a subclass that stores them.
"""

import functools
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from recalkv.errors import ParameterError

SLACK = 32
"""Tokens kept beyond the window, so that it stays complete when up to this many are cropped, as in assisted decoding.
Static layers of latents refuse crops, and layers with ``record_past`` are notified before crops."""

_LONGEST_DRAFT = 512
"""Maximum number of new tokens kept beyond the window by a notified layer, since a whole draft may be cropped."""


@functools.cache
def _with_recent(kind: Any) -> Any:
    """Return a subclass of a layer class that also keeps exact latents."""

    class WithRecent(kind):  # type: ignore[misc]
        """A layer with the exact latents of its newest tokens.

        Attributes
        ----------
        recent : (batch, 1, any, columns) or None
            Exact latents up to the last token. Their number is limited by the tokens seen in a dynamic layer but fixed
            in a static layer, where those before the first token are undefined.
        """

        recent: Tensor | None = None
        exact_window = 0

        def append_recent(self, latents: Tensor, window: int) -> Tensor:
            """Append latents of new tokens, (batch, 1, tokens, columns); return them after those kept so far."""
            self.exact_window = window
            if not isinstance(self, StaticLayer):
                # None if the layer has no notification of crops.
                recording = getattr(self, "record_past", None)
                slack = 0 if recording is False else SLACK
                if recording:
                    slack = max(slack, min(latents.shape[2], _LONGEST_DRAFT))
                keep = window + slack
                before = self.get_seq_length() - latents.shape[2]
                if self.recent is None and before > 0:
                    warnings.warn(
                        f"the exact latents of the newest {min(window - 1, before)} of {before} cached tokens are not "
                        f"there, as where a cache is built from another's `keys` and `values`: they are read from "
                        f"packed rows, which rounds them. Copy the whole cache (copy.deepcopy), or prefill anew.",
                        stacklevel=2,
                    )
                known = latents if self.recent is None else torch.cat([self.recent, latents], dim=2)
                # Copied; otherwise a view would keep the latents of a whole prompt alive.
                self.recent = known[:, :, -keep:].clone() if known.shape[2] > 2 * keep else known[:, :, -keep:]
                return known
            if self.recent is None:
                # The buffer outlives the call, and CUDA graphs refer to it by its address.
                with torch.inference_mode(False):
                    self.recent = latents.new_zeros(*latents.shape[:2], window, latents.shape[3])
                if not torch.compiler.is_compiling():
                    torch._dynamo.mark_static_address(self.recent)
            known = torch.cat([self.recent, latents], dim=2)
            self.recent.copy_(known[:, :, -window:])
            return known

        def __reduce__(self) -> Any:
            # The class is created at run time, so pickle cannot find it by name.
            return _restored, (kind, self.__dict__)

        def _replace(self, change: Any) -> None:
            if self.recent is not None:
                self.recent = change(self.recent)

        def reset(self) -> None:
            """Drop all tokens."""
            # A static layer keeps its buffer, to which CUDA graphs refer: latents before the first token are not read.
            if not isinstance(self, StaticLayer):
                self.recent = None
            super().reset()

        @property
        def is_croppable(self) -> bool:
            """Whether the window can stay complete: a static layer keeps no latents beyond it."""
            return not isinstance(self, StaticLayer) and bool(super().is_croppable)

        def crop(self, *args: Any, **kwargs: Any) -> None:
            """Drop the last tokens."""
            if isinstance(self, StaticLayer) and any((*args, *kwargs.values())):
                raise ParameterError(
                    "a static cache of quantized latents cannot be cropped, as its exact latents end with its window; "
                    "use a dynamic cache."
                )
            before = self.get_seq_length()
            super().crop(*args, **kwargs)
            gone = before - self.get_seq_length()
            self._replace(lambda recent: recent[:, :, : max(0, recent.shape[2] - gone)])
            # The next token takes one place in its window, so the window needs one cached token less.
            if gone and self.recent is not None:
                left, wanted = self.recent.shape[2], min(self.exact_window - 1, self.get_seq_length())
                if left < wanted:
                    warnings.warn(
                        f"{gone} tokens were cropped, after which the exact latents of {left} of the newest {wanted} "
                        f"tokens are left; the others are read from packed rows, which rounds them. Call "
                        f"`cache.activate_past_recording()` before the text is read, and crop at most {SLACK} tokens "
                        f"at once; or prefill the text anew.",
                        stacklevel=2,
                    )

        def reorder_cache(self, beam_idx: Tensor) -> None:
            """Select the sequences of these beams."""
            super().reorder_cache(beam_idx)
            self._replace(lambda recent: recent.index_select(0, beam_idx.to(recent.device)))

        def batch_repeat_interleave(self, repeats: int) -> None:
            """Repeat every sequence."""
            super().batch_repeat_interleave(repeats)
            self._replace(lambda recent: recent.repeat_interleave(repeats, dim=0))

        def batch_select_indices(self, indices: Tensor) -> None:
            """Keep these sequences."""
            super().batch_select_indices(indices)
            self._replace(lambda recent: recent[indices])

    WithRecent.__name__ = WithRecent.__qualname__ = f"{kind.__name__}WithRecent"
    return WithRecent


def with_recent(cache: Any, layers: Iterable[int]) -> None:
    """Make these layers of a cache keep exact latents, before a compiled graph receives the cache."""
    for index in layers:
        layer = cache.layers[index]
        if not hasattr(layer, "recent"):
            cache.layers[index] = _restored(type(layer), vars(layer))


def _restored(kind: Any, state: dict[str, Any]) -> Any:
    """Create a layer with exact latents from a layer class and a state: pickled, copied, or of a plain layer."""
    made: Any = _with_recent(kind)
    layer = made.__new__(made)
    layer.__dict__.update(state)
    return layer


def remember(cache: Any, index: int, latents: Tensor, window: int) -> Tensor:
    """Keep the exact latents of new tokens in a cache layer that already holds their rows.

    Parameters
    ----------
    cache
        Any cache of transformers.
    latents : (batch, 1, tokens, columns)
        Latents of the new tokens.
    window
        Number of tokens, up to and including the query's, whose exact latents a query reads.

    Returns
    -------
    (batch, 1, any, columns)
        The new latents, preceded by the kept ones, which cover the window of the first new token.
    """
    with_recent(cache, [index])
    result: Tensor = cache.layers[index].append_recent(latents, window)
    return result
