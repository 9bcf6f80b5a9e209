"""Build a codec from the store of the moments stage."""

from recalkv.codec.fit import build_codec
from recalkv.codec.sidecar import Codec
from recalkv.params import public_name
from recalkv.store.codec_moments import get_codec_moments
from stages.common import Stage


def stored_codec(run: Stage, bits: float, heads: int | None = None) -> Codec:
    """Build a codec of ``bits`` bits per element and ``heads`` KV heads per code; None for the default number."""
    store = run.read("moments")
    known = store.attributes["parameters"]
    tokens = {int(index): count for index, count in known["tokens"].items()}
    dense = run.model()
    record = {
        "model": public_name(dense.name),
        "revision": dense.revision,
        "bits": bits,
        "texts": known["texts"],
        "windows": known["shape"],
        "seed": known["seed"],
        "rope": known["rope"],
        "sliding_windows": known["sliding_windows"],
    }
    return build_codec(
        get_codec_moments(store), bits, known["context"], known["fingerprint"], tokens, record, heads=heads
    )
