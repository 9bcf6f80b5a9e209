"""Compressed checkpoints in vLLM on a CPU: `make test-vllm` runs these in an environment of their own.

``RECALKV_SERVED`` names the folder with the checkpoints: ``default``, the pipeline's, and those of
:mod:`tests.served.checkpoints`.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams

import recalkv  # noqa: F401  (registers the compressed classes)
from recalkv.model.spec import LatentSpec

FOLDER = Path(os.environ["RECALKV_SERVED"])
DEFAULT = FOLDER / "default"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
TEXT = Path(__file__).parents[2] / "README.md"
TOKENS = 16
# Two ways to compute the same: where they part, the tokens must have been as good as even (nats).
EVEN = 0.15
SIZES = {
    "dtype": "float32",
    "max_model_len": 2048,
    "enforce_eager": True,
    "block_size": 16,
    "gpu_memory_utilization": 0.3,
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEFAULT)


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEFAULT).eval()


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """20 prompts of 1 to 1,900 tokens."""
    ids = tokenizer(TEXT.read_text()).input_ids
    lengths = [1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 48, 64, 100, 128, 129, 255, 400, 600, 1000, 1900]
    return [ids[3 * number : 3 * number + length] for number, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    # Room for some of the prompts at once only, read in parts: preemption and chunked prefill.
    llm = LLM(
        str(DEFAULT),
        **SIZES,
        num_gpu_blocks_override=160,
        max_num_batched_tokens=256,
        max_num_seqs=16,
        disable_log_stats=False,
    )
    yield llm
    llm.llm_engine.engine_core.shutdown()


def greedy(tokens: int = TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def generated(llm: Any, prompts: Sequence[Sequence[int]], tokens: int = TOKENS) -> list[list[int]]:
    results = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], greedy(tokens), use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


def agrees(model: Any, prompt: Sequence[int], found: Sequence[int]) -> bool:
    """Whether greedy tokens are the model's own, up to a choice between tokens that are as good as even."""
    ids = torch.tensor([[*prompt, *found]])
    with torch.no_grad():
        scores = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    best = scores.max(-1).values
    return bool((best - scores[torch.arange(len(found)), torch.tensor(found)] < EVEN).all())


def test_the_tokens_of_generate_alone_and_together(engine: Any, reference: Any, prompts: list[list[int]]) -> None:
    together = generated(engine, prompts)
    exact = 0
    for prompt, found in zip(prompts, together, strict=True):
        ids = torch.tensor([prompt])
        own = reference.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)[0, len(prompt) :]
        exact += own.tolist() == found
        assert agrees(reference, prompt, found), f"prompt of {len(prompt)} tokens"
    # Rows of few bits fall either way by the last bit of a latent, and choices between even tokens with them.
    assert exact >= 14
    for number in (4, 12, 17):
        alone = generated(engine, prompts[number : number + 1])[0]
        assert agrees(reference, prompts[number], alone)


def test_prefixes_are_found_again(engine: Any, prompts: list[list[int]]) -> None:
    given = [{"prompt_token_ids": prompts[18][:900]}]
    first, second = (engine.generate(given, greedy(), use_tqdm=False)[0] for _ in range(2))
    assert second.num_cached_tokens >= 880
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


def test_log_probabilities(engine: Any, reference: Any, prompts: list[list[int]]) -> None:
    prompt = prompts[15]
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    result = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
    found = torch.tensor(
        [entry[token].logprob for entry, token in zip(result.prompt_logprobs[1:], prompt[1:], strict=True)]
    )
    with torch.no_grad():
        scores = reference(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    expected = scores[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    # Before the first row that falls the other way the two are the same, and behind it unbiased.
    assert (found - expected)[:5].abs().max() < 1e-3
    assert (found - expected).abs().mean() < 0.06
    assert abs(float((found - expected).mean())) < 0.02


def test_many_requests_end_and_leave_no_block(engine: Any, prompts: list[list[int]], reference: Any) -> None:
    """64 requests at once in a cache that holds a few of them: preempted, done again, and right."""
    many = [prompts[10 + number % 8] for number in range(64)]
    results = generated(engine, many, tokens=24)
    assert len(results) == 64
    for prompt, found in zip(many[:8], results[:8], strict=True):
        assert agrees(reference, prompt, found)
    metrics = {metric.name: metric for metric in engine.get_metrics()}
    assert metrics["vllm:kv_cache_usage_perc"].value == 0


def test_tokens_cost_their_bytes() -> None:
    """vLLM's own count of tokens, in the GiB that it is given, with nothing but the rounding of blocks."""
    code = (
        "import sys; from vllm import LLM\n"
        "if __name__ == '__main__':\n"
        f"    llm = LLM(sys.argv[1], **{SIZES!r})\n"
        "    print('BLOCKS', llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)\n"
    )
    script = FOLDER / "count.py"
    script.write_text(code)
    result = subprocess.run([sys.executable, script, DEFAULT], capture_output=True, text=True)
    blocks = int(next(line for line in result.stdout.splitlines() if line.startswith("BLOCKS")).split()[1])
    spec = LatentSpec.from_config(AutoModelForCausalLM.from_pretrained(DEFAULT).config)
    per_token = spec.cached_bits_per_token / 8
    assert blocks * 16 * per_token == pytest.approx(2**30, rel=1e-3)


def test_speculative_decoding(prompts: list[list[int]], reference: Any) -> None:
    llm = LLM(
        str(DEFAULT), **SIZES, num_gpu_blocks_override=400,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
    )  # fmt: skip
    repeated = prompts[9] * 3
    for prompt, found in zip([prompts[16], repeated], generated(llm, [prompts[16], repeated]), strict=True):
        assert agrees(reference, prompt, found)
    llm.llm_engine.engine_core.shutdown()


def tiny_texts(name: str, **options: Any) -> list[list[int]]:
    """Greedy tokens of a tiny checkpoint, which are its model's own."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER / name).eval()
    sizes = SIZES | {"max_model_len": 200, "num_gpu_blocks_override": 64, "max_num_batched_tokens": 32} | options
    llm = LLM(str(FOLDER / name), **sizes, skip_tokenizer_init=True)
    ids = torch.randint(3, 128, (3, 90), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [ids[0], ids[1][:1], ids[2][:40]]
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    results = llm.generate([{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    texts = [list(result.outputs[0].token_ids) for result in results]
    for prompt, text in zip(prompts, texts, strict=True):
        assert agrees(model, prompt, text)
    return texts


@pytest.mark.parametrize("name", ["llama-separate", "mistral-window", "qwen2-mixed", "qwen3-norm"])
def test_families(name: str) -> None:
    tiny_texts(name)


def test_two_processes_share_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    # Left to itself vLLM wants a memory node of its own for each process.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    assert tiny_texts("llama-halves", tensor_parallel_size=2) == tiny_texts("llama-halves")


@pytest.mark.parametrize(
    ("option", "message"),
    [({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' cannot be applied"), ({"enable_lora": True}, "LoRA")],
)
def test_what_cannot_be_had_is_said(option: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011  (vLLM's own, from another process)
        LLM(str(DEFAULT), **SIZES, **option)
    said = capfd.readouterr()
    assert message in said.out + said.err


def test_the_server_answers(tokenizer: Any) -> None:
    port, sizes = (
        8765,
        ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager", "--gpu-memory-utilization", "0.3"],
    )
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(DEFAULT), "--port", str(port)]
    server = subprocess.Popen([*command, *sizes], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"

    def post(path: str, **content: Any) -> str:
        data = json.dumps({"model": str(DEFAULT), "temperature": 0, "max_tokens": 8, **content}).encode()
        request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(answer.read().decode())

    try:
        for _ in range(150):
            try:
                urllib.request.urlopen(url + "/health", timeout=2)
                break
            except OSError:
                assert server.poll() is None, "the server ended"
                time.sleep(1)
        text = json.loads(post("/v1/completions", prompt="The capital of France is"))["choices"][0]["text"]
        assert text.strip()
        streamed = post("/v1/completions", prompt="The capital of France is", stream=True)
        pieces = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == text
        messages = [{"role": "user", "content": "Say hello."}]
        chat = json.loads(post("/v1/chat/completions", messages=messages))
        assert chat["choices"][0]["message"]["role"] == "assistant"
    finally:
        server.terminate()
        server.wait(30)
