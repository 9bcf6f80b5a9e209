import functools, sys, torch, itertools
from benchmarks.gpu.runner import Setting
from benchmarks.gpu.codec import CodecStep, _dense
from benchmarks.gpu.shapes import sizes_of
from benchmarks.gpu.kernels import copies_of, repeats_of
from recalkv.codec.layout import TILE
from recalkv.evaluation.timing import time_calls
from recalkv.runtime import cuda
print(torch.cuda.get_device_name())
s = Setting.of(False)
def calls(geometry, context, batch):
    torch.manual_seed(0)
    shape = sizes_of(geometry, False).attention
    q = torch.randn(batch, shape.heads, shape.head_dim, device='cuda', dtype=torch.bfloat16)
    step = CodecStep(shape, s)
    size = batch * -(-context // TILE) * TILE * step.row_bytes
    caches = [step.cache(context, batch) for _ in range(copies_of(size, s))]
    return step, caches, q, size, shape
CELLS = [('llama-3.1-8b',4096,1),('llama-3.1-8b',16384,1),('llama-3.1-8b',65536,1),('llama-3.1-8b',131072,1),('llama-3.1-8b',4096,32),('llama-3.1-8b',16384,32),('qwen2.5-3b',4096,1),('qwen2.5-3b',16384,1),('qwen2.5-3b',131072,1),('qwen2.5-3b',4096,32),('qwen2.5-3b',16384,32),('llama-2-7b',4096,1),('llama-2-7b',65536,1),('llama-2-7b',4096,32)]
import re
SHAPES = [{(10,1):(2,),(5,1):(4,)},{(4,1):(2,),(10,1):(1,),(4,4):(1,)}]
pattern = sys.argv[1] if len(sys.argv) > 1 else '.'
for cell in CELLS:
    if not re.search(pattern, str(cell)): continue
    step, caches, q, size, shape = calls(*cell)
    found = {}
    with torch.no_grad():
        for shape_, residents in SHAPES[cell[0] == 'qwen2.5-3b'].items():
            for resident in residents:
                
                parts = shape_; shape_ = (*shape_, resident)
                def full(*a, **k): return cuda.coded_attention(*a, **k, shape=shape_)
                kept = {}
                step(full, caches[0], q)
                given = []
                def grab(*a, **k):
                    given[:] = [a, k]; return cuda.coded_attention(*a, **k, shape=shape_)
                inner = []
                for c in caches:
                    step(grab, c, q); inner.append(functools.partial(cuda.coded_attention, *given[0], **given[1], shape=shape_))
                t1 = time_calls([functools.partial(step, full, c, q) for c in caches], s.device, repeats_of(size, s)).median
                t2 = time_calls(inner, s.device, repeats_of(size, s)).median
                found[parts, resident] = (round(t1*1e6,1), round(t2*1e6,1))
        dense = None
        if 'dense' in sys.argv:
            dense = _dense(shape, cell[1], q, s, lambda **k: None)
    print(cell, found, dense, flush=True)
    del step, caches, q, inner, given
