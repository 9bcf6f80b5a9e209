"""Latents of the newest tokens, kept as they are beside packed rows.

A token attends most to those just before it, so that their rounding costs most (docs/quantization.md has how much).
They stand beside the rows of any of transformers' caches and go with them through beams, crops and resets: the layer
is replaced by one that knows of them.
"""

import functools
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

_SLACK = 32
"""Tokens kept beyond the window, so that it stays whole when up to as many are cropped, as by assisted decoding. Static
layers are never cropped, and layers with ``record_past`` are told before they are."""

_LONGEST_DRAFT = 512
"""Most new tokens that a layer which is told keeps beyond the window, as all of a draft may be cropped."""


@functools.cache
def _with_recent(kind: Any) -> Any:
    """Make a kind of layers remember, too."""

    class WithRecent(kind):  # type: ignore[misc]
        """A layer with the exact latents of its newest tokens, up to the last one.

        Attributes
        ----------
        recent : (batch, 1, any, columns) or None
            A growing layer has as many as there are, a static one always as many: those before the first are not
            defined.
        """

        recent: Tensor | None = None
        exact_window = 0

        def append_recent(self, latents: Tensor, window: int) -> Tensor:
            """Add those of new tokens, (batch, 1, tokens, columns); returns them after those of a window and more."""
            self.exact_window = window
            if not isinstance(self, StaticLayer):
                # None where a layer is not told.
                told = getattr(self, "record_past", None)
                slack = 0 if told is False else _SLACK
                if told:
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
                # Copied, or a prompt's would be kept as a whole.
                self.recent = known[:, :, -keep:].clone() if known.shape[2] > 2 * keep else known[:, :, -keep:]
                return known
            if self.recent is None:
                # It outlives the call, and graphs know it by its address.
                with torch.inference_mode(False):
                    self.recent = latents.new_zeros(*latents.shape[:2], window, latents.shape[3])
                if not torch.compiler.is_compiling():
                    torch._dynamo.mark_static_address(self.recent)
            known = torch.cat([self.recent, latents], dim=2)
            self.recent.copy_(known[:, :, -window:])
            return known

        def __reduce__(self) -> Any:
            # The class has no place where a pickle would find it.
            return _restored, (kind, self.__dict__)

        def _replace(self, change: Any) -> None:
            if self.recent is not None:
                self.recent = change(self.recent)

        def reset(self) -> None:
            """Forget all tokens."""
            # That of a static cache stays, whose address graphs know: nobody reads what is before the first token.
            if not isinstance(self, StaticLayer):
                self.recent = None
            super().reset()

        def crop(self, *args: Any, **kwargs: Any) -> None:
            """Forget the last tokens."""
            before = self.get_seq_length()
            super().crop(*args, **kwargs)
            gone = before - self.get_seq_length()
            self._replace(lambda recent: recent[:, :, : max(0, recent.shape[2] - gone)])
            # A new token is in its own window.
            if gone and self.recent is not None:
                left, wanted = self.recent.shape[2], min(self.exact_window - 1, self.get_seq_length())
                if left < wanted:
                    warnings.warn(
                        f"{gone} tokens were cropped, after which the exact latents of {left} of the newest {wanted} "
                        f"tokens are left; the others are read from packed rows, which rounds them. Call "
                        f"`cache.activate_past_recording()` before the text is read, and crop at most {_SLACK} tokens "
                        f"at once; or prefill the text anew.",
                        stacklevel=2,
                    )

        def reorder_cache(self, beam_idx: Tensor) -> None:
            """Take the sequences of these beams."""
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
    """Let these layers of a cache remember, before a compiled graph is given it."""
    for index in layers:
        layer = cache.layers[index]
        if not hasattr(layer, "recent"):
            cache.layers[index] = _restored(type(layer), vars(layer))


def _restored(kind: Any, state: dict[str, Any]) -> Any:
    """A layer of a kind, in a state: one that was pickled or copied, or had no recent latents yet."""
    made: Any = _with_recent(kind)
    layer = made.__new__(made)
    layer.__dict__.update(state)
    return layer


def remember(cache: Any, index: int, latents: Tensor, window: int) -> Tensor:
    """Keep the exact latents of new tokens in a layer of a cache that has their rows already.

    Parameters
    ----------
    cache
        Any of transformers'.
    latents : (batch, 1, tokens, columns)
        Of the new tokens.
    window
        Tokens up to a query, itself included, whose latents it is to find.

    Returns
    -------
    (batch, 1, any, columns)
        The new ones after all that a window before the first of them holds.
    """
    with_recent(cache, [index])
    result: Tensor = cache.layers[index].append_recent(latents, window)
    return result
