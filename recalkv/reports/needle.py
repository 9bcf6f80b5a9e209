"""Needle retrieval from long texts: scores of each model, by prompt length and depth."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from recalkv.errors import DataError
from recalkv.evaluation.uncertainty import standard_error
from recalkv.params import NeedleParams
from recalkv.reports.tables import needle

ALL = "all"
"""Replaces the length in rows that average over all lengths."""


def report(cells: Mapping[str, Mapping[str, Any]], earlier: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the scores of all models, by descending bits.

    Parameters
    ----------
    cells
        Outputs of the stage ``needle``, by name.
    earlier
        An earlier report, for methods without a cell; ignored if it has another model or other prompts.

    Returns
    -------
    dict
        ``rows``: by ``method`` and ``length`` (or :data:`ALL`), ``bits_per_element``, ``prompts``, and for each score
        (:data:`recalkv.evaluation.suites.needle.SCORES`) the mean and, as ``NAME_error``, its standard error over
        prompts, each averaged over depths first; the error is 0 with a single prompt. ``places``: the means by
        ``method``, ``length`` and ``depth``. ``setting``: model, lengths, depths and number of prompts per length.

    Raises
    ------
    DataError
        If the cells have different settings, or there are no cells.
    """
    if not cells:
        raise DataError("there are no needle cells; measure some, as by `make suites`.")
    settings = [
        {key: cell[key] for key in ("model", "lengths", "depths")} | {"prompts": len(cell["scores"]["digits"][0])}
        for cell in cells.values()
    ]
    others = [name for name, own in zip(cells, settings, strict=True) if own != settings[0]]
    if others:
        raise DataError(
            f"needle cells differ in model, lengths, depths or prompts: {', '.join(others)} and "
            f"{next(iter(cells))}; measure all with the same parameters, or remove those of others."
        )
    if earlier.get("setting") != settings[0]:
        earlier = {}
    rows, places = ([row for row in earlier.get(kind, ()) if row["method"] not in cells] for kind in ("rows", "places"))
    for name in cells:
        cell, scores = cells[name], {}
        for score, values in cells[name]["scores"].items():
            scores[score] = np.array(values)  # [lengths, prompts, depths]
        by_length = {score: _means(values.mean(axis=2)) for score, values in scores.items()}
        prompts = len(next(iter(scores.values()))[0])
        whole = {"method": name, "bits_per_element": cell["bits_per_element"]}
        for i, length in enumerate(cell["lengths"]):
            found = {score: (means[i], errors[i]) for score, (means, errors) in by_length.items()}
            rows.append(whole | {"length": length, "prompts": prompts} | _flat(found))
            for k, depth in enumerate(cell["depths"]):
                means = {score: float(values[i, :, k].mean()) for score, values in scores.items()}
                places.append({"method": name, "length": length, "depth": depth} | means)
        # Prompts of different lengths are drawn independently, so squared errors add up.
        found = {
            score: (means.mean(), np.linalg.norm(errors) / len(errors)) for score, (means, errors) in by_length.items()
        }
        rows.append(whole | {"length": ALL, "prompts": prompts * len(cell["lengths"])} | _flat(found))
    order = {row["method"]: (-row["bits_per_element"], row["method"]) for row in rows}
    both = {"rows": rows, "places": places}
    ordered = {kind: sorted(found, key=lambda row: order[row["method"]]) for kind, found in both.items()}
    return ordered | {"setting": settings[0]}


def _means(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of (lengths, prompts) over prompts, and its standard error, (lengths,) each."""
    return values.mean(axis=1), standard_error(values)


def _flat(found: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    means = {score: float(mean) for score, (mean, _) in found.items()}
    return means | {f"{score}_error": float(error) for score, (_, error) in found.items()}


def page(found: Mapping[str, Any], wanted: NeedleParams, model: str) -> str:
    """Render the page: one table and the heat maps."""
    return "\n".join(
        [
            "# Needle in a haystack",
            "",
            "Written by `stages.needle_page`; do not edit. Each prompt hides one number at each depth; questions at "
            "its end ask for one number at a time, over the cached prompt. *Digits*: teacher-forced top-1 accuracy of "
            "the digits; *log-probability*: mean of a digit's, in nats; *greedy*: share of digits before the first "
            "wrong one, which greedy decoding gets right, over all lengths. Standard errors are over prompts. Bits "
            "include scales, and tokens kept in 16 bits amortized over a context of 2,048.",
            "",
            f"{model}; {wanted.trials} prompts of each length, {len(wanted.depths)} numbers in each.",
            "",
            needle(found),
            "",
            "![Retrieval by prompt length and depth](needle.png)",
            "",
        ]
    )
