"""Whole models of random weights, built on the device: decoding with CUDA graphs, largest batches, and compression.

A decode step runs one new token per sequence through all layers, over caches that are full except for the last slot,
to the next token. It is one CUDA graph, so host time is excluded.
"""

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.codec import CodecModule, CodecStep
from benchmarks.gpu.kernels import DenseStep, dense_parts, dense_ways, fastest, latent_parts, per_token, serves, signed
from benchmarks.gpu.runner import Emit, Setting, Step
from benchmarks.gpu.shapes import dense_model, filled, latent_model, sizes_of
from recalkv.cache.argument import CACHE
from recalkv.evaluation.decoding import largest
from recalkv.evaluation.resources import forget_peak, now, peak_device_mib, peak_resident_mib
from recalkv.evaluation.timing import time_calls
from recalkv.kernels.decoder import use_kernels
from recalkv.model.spec import LatentSpec

LAYOUT, LATENTS = "joint s=2", "16 bits, 70 %"
CODEC = "codec, 4 bits"
CONTEXT = 8192
PLACES = ((8192, 1), (32768, 1), (8192, 32), (32768, 8))
SAMPLES, LENGTH = 32, 2048


def _decoder(model: Any, caches: Sequence[Any], batch: int, context: int) -> Callable[[], Tensor]:
    """Return a step of greedy decoding, which returns the next token of every sequence, (batch, 1)."""
    inner, device = model.model, model.device
    token = torch.ones(batch, 1, dtype=torch.int64, device=device)
    places = torch.full((batch, 1), context - 1, device=device)
    dense = not hasattr(inner.layers[0].self_attn, "joint")

    def step() -> Tensor:
        states = inner.embed_tokens(token)
        rope = inner.rotary_emb(states, places)
        rope = signed(rope) if dense else rope
        for layer, cache in zip(inner.layers, caches, strict=True):
            states = layer(states, position_embeddings=rope, **{CACHE: cache})
        logits: Tensor = model.lm_head(inner.norm(states))
        return token.copy_(logits[:, -1].argmax(dim=-1, keepdim=True))

    return step


def _decode(geometry: str, kind: str, setting: Setting, emit: Emit) -> None:
    shape, config = sizes_of(geometry, setting.tiny).attention, {"geometry": geometry, "kind": kind}
    start = now(setting.device)
    if kind == "dense":
        model, parts = dense_model(geometry, setting, whole=True), dense_parts(shape, setting)
        for layer in model.model.layers:
            layer.self_attn = DenseStep(layer.self_attn)
    elif kind == CODEC:
        model = dense_model(geometry, setting, whole=True)
        step = CodecStep(shape, setting)
        for layer in model.model.layers:
            layer.self_attn = CodecModule(layer.self_attn, step)
        per_layer = step.row_bytes
    else:
        model = use_kernels(latent_model(geometry, LAYOUT, kind, setting, whole=True), "triton")
        first = model.model.layers[0].self_attn
        parts = latent_parts(first, setting)
        if not serves(first):
            raise RuntimeError("no step is taken by the kernels")
        config["layout"] = LAYOUT
    if kind != CODEC:
        per_layer = per_token(parts)
    emit(what="built", seconds=now(setting.device) - start, bytes_per_token=shape.layers * per_layer, **config)
    repeats, device = 1 if setting.tiny else 4, setting.device

    def once(batch: int, context: int, repeats: int = repeats) -> float:
        # Free the caches of the previous run.
        _release()
        layers = model.model.layers
        if kind == CODEC:
            caches: list[Any] = [step.cache(context, batch) for _ in layers]
        else:
            caches = [filled(parts, batch, context) for _ in layers]
        return time_calls([_decoder(model, caches, batch, context)], device, repeats).median

    def timed(batch: int, context: int) -> tuple[float | None, str]:
        def dense(packed: bool) -> float:
            for layer in model.model.layers:
                layer.self_attn.packed = packed
            return once(batch, context)

        if kind == "dense":
            return fastest(dense_ways(shape, dense), setting)
        if kind == CODEC:
            return once(batch, context), "codec"
        return once(batch, context), "kernels"

    with torch.no_grad():
        for context, batch in ((40, 1),) if setting.tiny else PLACES:
            place = {"context": context, "batch": batch, **config}
            try:
                forget_peak(device)
                seconds, path = timed(batch, context)
                rates = {} if seconds is None else {"ms": seconds * 1e3, "tokens_per_s": batch / seconds}
                emit(what="decode", attention=path, peak_mib=peak_device_mib(device), **rates, **place)
            except torch.OutOfMemoryError:
                emit(what="decode", reason="does not fit", **place)
            _release()

        def fits(batch: int) -> bool:
            try:
                once(batch, CONTEXT, 1)
                return True
            except torch.OutOfMemoryError:
                return False
            finally:
                _release()

        if not setting.tiny:
            batch, seconds, path = largest(fits), None, ""
            while batch:
                try:
                    seconds, path = timed(batch, CONTEXT)
                    break
                except torch.OutOfMemoryError:
                    # A backend that the search for the batch did not run may need more memory.
                    batch -= -(-batch // 32)
                _release()
            rates = {} if seconds is None else {"tokens_per_s": batch / seconds}
            emit(what="largest batch", context=CONTEXT, batch=batch, attention=path, **rates, **config)


def _release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _windows(geometry: str, setting: Setting) -> Tensor:
    """Return random calibration windows."""
    size = (4, 16) if setting.tiny else (SAMPLES, LENGTH)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, sizes_of(geometry, setting.tiny).vocabulary, size, generator=generator)


def _timed_steps(device: torch.device, emit: Emit) -> Callable[[str, int, int], None]:
    """Return a progress callback (step, done, total) that records time and peak memory of each finished step."""
    start = now(device)
    forget_peak(device)

    def took(step: str, done: int, total: int) -> None:
        nonlocal start
        if done == total:
            seconds, start = now(device) - start, now(device)
            emit(what="compress", stage=step, seconds=seconds, peak_mib=peak_device_mib(device),
                 host_peak_mib=peak_resident_mib())  # fmt: skip
            forget_peak(device)

    return took


def _fit(geometry: str, setting: Setting, emit: Emit) -> None:
    """Fit a codec with the defaults, and record time and peak memory of each step."""
    from recalkv.codec.fit import build_codec
    from recalkv.codec.moments import take_moments
    from recalkv.params import CodecParams

    model, windows = dense_model(geometry, setting, whole=True).eval(), _windows(geometry, setting)
    record = functools.partial(emit, geometry=geometry, samples=len(windows), length=windows.shape[1], method="codec")
    begin, took = now(setting.device), _timed_steps(setting.device, record)
    moments = take_moments(model, windows, CONTEXT, progress=lambda step, *done: took(f"codec, {step}", *done))
    build_codec(moments, CodecParams().bits, CONTEXT, geometry)
    took("codec, bases and bits", 1, 1)
    record(what="compressed", seconds=now(setting.device) - begin)


def _compress(geometry: str, setting: Setting, emit: Emit) -> None:
    """Compress with the defaults, and record time and peak memory of each step."""
    from recalkv.compression import assemble, compress_layers
    from recalkv.model.layers import ModuleSource
    from recalkv.model.precision import resolve_precision
    from recalkv.params import CalibrationParams, CompressionParams

    device, windows = setting.device, _windows(geometry, setting)
    samples, length = windows.shape
    model = dense_model(geometry, setting, whole=True)
    calibration = CalibrationParams(samples=samples, length=length, precision=resolve_precision("auto", device))
    parameters = CompressionParams()
    config = {"geometry": geometry, "samples": samples, "length": length, "ratio": parameters.ratio,
              "method": parameters.method, "precision": calibration.precision}  # fmt: skip
    record = functools.partial(emit, **config)
    begin, took = now(device), _timed_steps(device, record)
    source = ModuleSource(model, device, calibration.precision)
    result = compress_layers(source, windows, calibration, parameters, took)
    provenance: dict[str, str | None] = {"name": geometry, "revision": None, "fingerprint": None}
    small = assemble(source, result, parameters, setting.dtype, provenance)
    took("assemble", 1, 1)
    record(what="compressed", seconds=now(device) - begin, removed=float(LatentSpec.from_config(small.config).removed))


def steps(setting: Setting) -> list[Step]:
    """List the steps, the most important first."""
    if setting.kind == "none":
        return []
    kinds = ("dense", CODEC, LATENTS)

    def decode(geometry: str, kind: str) -> Step:
        return Step(f"decode, {geometry}, {kind}", functools.partial(_decode, geometry, kind), 120.0)

    fit = Step("fit, llama-3.1-8b", functools.partial(_fit, "llama-3.1-8b"), 120.0)
    compress = Step("compress, llama-3.1-8b", functools.partial(_compress, "llama-3.1-8b"), 300.0)
    if setting.tiny:
        return [*(decode("llama-3.1-8b", kind) for kind in kinds), fit, compress]
    first, second = ([decode(name, kind) for kind in kinds] for name in ("llama-3.1-8b", "llama-2-7b"))
    return [*first, fit, compress, *second]
