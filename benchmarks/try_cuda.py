import sys, time, torch, itertools, json, os
import importlib
sys.path.insert(0,'.')
os.environ.setdefault('TRITON_INTERPRET','0')
from tests.test_codec_triton import Problem, Case, CASES
from recalkv.runtime import cuda_decode
from recalkv.runtime.triton_decode import coded_attention as triton_attention
from benchmarks.gpu.runner import Setting
from benchmarks.gpu.codec import CodecStep, random_layer
from benchmarks.gpu.shapes import sizes_of
from benchmarks.gpu.kernels import copies_of, repeats_of
from recalkv.codec.layout import TILE
from recalkv.evaluation.timing import time_calls
import functools
print(torch.cuda.get_device_name(), torch.__version__)
bad=0
def tryit(name, case, page=0):
    global bad
    try:
        problem=Problem(case,page)
        out,lse=cuda_decode.coded_attention(**problem.given())
        torch.cuda.synchronize()
        e=problem.errors(out,lse)
        flag='' if max(e)<2e-3 else '  <-- BAD'
    except Exception as x:
        e=repr(x)[:1500]; flag='  <-- EXC'
    bad+=bool(flag)
    print(name, page, e, flag, flush=True)
    return flag
if 'tests' in sys.argv:
    for b in (4,8,2,1,3,6):
        tryit(f'keys {b}', Case((((64,b),),),(((16,8),),),key_dim=64,first=(0,),length=(70,),offset=(0,)))
        tryit(f'values {b}', Case((((16,8),),),(((64,b),),),value_dim=64,first=(0,),length=(70,),offset=(0,)))
    for b in (4,8,2,1,3,6):
        tryit(f'narrow keys {b}', Case((((8,b),(16,b)),),(((16,8),),),first=(0,),length=(70,),offset=(0,)))
        tryit(f'narrow values {b}', Case((((16,8),),),(((8,b),(16,b)),),first=(0,),length=(70,),offset=(0,)))
    for name,case in CASES.items():
        if len(case.keys) and case.per_head*case.heads<=16:
            for page in (0,2): tryit(name,case,page)
    tryit('long', Case((((32,4),(96,3)),),(((64,4),(32,2)),),heads=2,per_head=4,key_dim=64,value_dim=64,first=(0,5),length=(3000,2777),offset=(0,7),mean=3.0,splits=3))
    tryit('16 queries', Case((((32,4),(96,3)),),(((64,4),(32,2)),),heads=2,per_head=8,key_dim=64,value_dim=64,first=(0,5),length=(1000,777),offset=(0,7),mean=3.0,splits=2))
    print('bad', bad)
if 'time' in sys.argv:
    s=Setting('gpu')
    for geometry, context, batch in [('llama-3.1-8b',4096,1),('llama-3.1-8b',16384,1),('llama-3.1-8b',65536,1),('llama-3.1-8b',131072,1),('llama-3.1-8b',4096,32),('llama-3.1-8b',16384,32),('qwen2.5-3b',65536,1),('qwen2.5-3b',16384,32),('llama-2-7b',16384,1),('llama-2-7b',4096,32)]:
        torch.manual_seed(0)
        shape=sizes_of(geometry,False).attention
        q=torch.randn(batch,shape.heads,shape.head_dim,device='cuda',dtype=torch.bfloat16)
        step=CodecStep(shape,context,batch,s)
        size=batch*-(-context//TILE)*TILE*step.row_bytes
        caches=[step.cache(context,batch) for _ in range(copies_of(size,s))]
        given=step.given(q); res={}
        places=(step.first,step.length,step.offset)
        a,_=triton_attention(caches[0],step.layout,*given,step.rotation,*places)
        b,_=cuda_decode.coded_attention(caches[0],step.layout,*given,step.rotation,*places)
        err=float((a-b).abs().max()/a.abs().max())
        nt = 1 if given[0].shape[2]<=8 else 2
        for resident in ((3,4) if nt==1 else (2,3)):
            calls=[functools.partial(cuda_decode.coded_attention,c,step.layout,*given,step.rotation,*places,resident=resident) for c in caches]
            t=time_calls(calls,torch.device('cuda'),repeats_of(size,s)).median
            res[resident]=round(t*1e6,2)
        calls=[functools.partial(step,cuda_decode.coded_attention,c,q) for c in caches]
        t=time_calls(calls,torch.device('cuda'),repeats_of(size,s)).median
        best=min(res.values())
        print(geometry,context,batch,'err %.1e'%err,res,'step',round(t*1e6,2),'GB/s %.0f'%(size/best/1e3),flush=True)

def setup(geometry, context, batch):
    s=Setting('gpu')
    torch.manual_seed(0)
    shape=sizes_of(geometry,False).attention
    q=torch.randn(batch,shape.heads,shape.head_dim,device='cuda',dtype=torch.bfloat16)
    step=CodecStep(shape,context,batch,s)
    size=batch*-(-context//TILE)*TILE*step.row_bytes
    caches=[step.cache(context,batch) for _ in range(copies_of(size,s))]
    given=step.given(q)
    places=(step.first,step.length,step.offset)
    return [functools.partial(cuda_decode.coded_attention,c,step.layout,*given,step.rotation,*places) for c in caches], size
if 'ablate' in sys.argv:
    calls,size=setup('llama-3.1-8b',16384,32)
    for extra in ({}, {'NO_MEAN':1},{'NO_KEYS':1},{'NO_VALUES':1},{'NO_KEYS':1,'NO_VALUES':1},{'NO_MEAN':1,'NO_KEYS':1},{'NO_MEAN':1,'NO_VALUES':1},{'NO_MEAN':1,'NO_VALUES':1,'NO_KEYS':1}):
        cuda_decode.EXTRA=extra; cuda_decode.kernel.cache_clear()
        print(extra, round(1e6*time_calls(calls,torch.device('cuda'),5).median,1), flush=True)
if 'prof' in sys.argv:
    calls,size=setup('llama-3.1-8b',16384,32)
    for _ in range(3): calls[0]()
    torch.cuda.synchronize()
