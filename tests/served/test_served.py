"""The codec in vLLM on a CPU; `make test-vllm` runs these tests in a separate environment.

``RECALKV_SERVED`` is the folder with the pipeline's ``model`` and ``codec``, and with the tiny models and side-cars of
:mod:`tests.served.checkpoints`. ``RECALKV_LOAD_SECONDS`` is the minimum duration of the load of 64 requests.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

from recalkv.codec.sidecar import Codec
from tests.served.own import own_model
from tests.served.tiny import FOLDER, SIZES, TOKENS, compared

DEFAULT = FOLDER / "model"
CODEC = {"additional_config": {"recalkv_codec": str(FOLDER / "codec")}}
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
TEXT = Path(__file__).parents[2] / "README.md"
LOAD_SECONDS = float(os.environ.get("RECALKV_LOAD_SECONDS", "0"))
# Gap (nats) below which two tokens count as tied, so that implementations may choose either.
EVEN = 0.15
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEFAULT)


@pytest.fixture(scope="module")
def reference() -> Any:
    return own_model("model")


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """Return 20 prompts of 1 to 2,000 tokens."""
    ids = tokenizer(TEXT.read_text()).input_ids
    lengths = [1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 48, 64, 100, 128, 129, 255, 400, 600, 1000, 2000]
    return [ids[3 * number : 3 * number + length] for number, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    # Room for only some of the prompts at once, which are prefilled in chunks.
    llm = LLM(
        str(DEFAULT), **SIZES, **CODEC, num_gpu_blocks_override=120, max_num_batched_tokens=256, max_num_seqs=16,
        disable_log_stats=False,
    )  # fmt: skip
    yield llm
    llm.llm_engine.engine_core.shutdown()


def greedy(tokens: int = TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def generated(llm: Any, prompts: Sequence[Sequence[int]], tokens: int = TOKENS) -> list[list[int]]:
    results = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], greedy(tokens), use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


def agrees(model: Any, prompt: Sequence[int], found: Sequence[int]) -> bool:
    """Return whether tokens are the model's greedy ones, up to choices between tokens that are as good as tied."""
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
        same = own.tolist() == found
        exact += same
        assert same or agrees(reference, prompt, found), f"prompt of {len(prompt)} tokens"
    # The last bit of a value may change a code of few bits, and with it the choice between tied tokens.
    assert exact >= 16
    for number in (4, 12, 17):
        alone = generated(engine, prompts[number : number + 1])[0]
        assert agrees(reference, prompts[number], alone)


def test_prefixes_are_found_again(engine: Any, prompts: list[list[int]]) -> None:
    given = [{"prompt_token_ids": prompts[18][:900]}]
    first, second = (engine.generate(given, greedy(), use_tqdm=False)[0] for _ in range(2))
    assert second.num_cached_tokens >= 864
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    # Within a prompt, prefixes end only at positions that are far apart.
    other = [{"prompt_token_ids": prompts[18][:600] + prompts[12]}]
    assert engine.generate(other, greedy(1), use_tqdm=False)[0].num_cached_tokens >= 512


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
    # While all tokens are read exactly, both agree; after the first row with a different code, the error is unbiased.
    assert (found - expected)[:31].abs().max() < 1e-3
    assert (found - expected).abs().mean() < 0.03
    assert abs(float((found - expected).mean())) < 0.01


def test_64_requests_at_a_time_end_and_leave_no_block(engine: Any, prompts: list[list[int]], reference: Any) -> None:
    """64 requests at a time end with the right tokens in a cache that holds a few of them, and free all blocks."""
    core, found, sent, done = engine.llm_engine, set(), 0, 0
    end = time.monotonic() + LOAD_SECONDS

    def going() -> bool:
        return sent < 64 or time.monotonic() < end

    while going() or core.has_unfinished_requests():
        while going() and sent - done < 64:
            core.add_request(f"{sent}", {"prompt_token_ids": prompts[10 + sent % 8]}, greedy(16))
            sent += 1
        for output in core.step():
            if output.finished:
                found.add((int(output.request_id) % 8, tuple(output.outputs[0].token_ids)))
                done += 1
    assert done == sent and {number for number, _ in found} == set(range(8))
    for number, text in found:
        assert agrees(reference, prompts[10 + number], text)
    metrics = {metric.name: metric for metric in engine.get_metrics()}
    assert metrics["vllm:kv_cache_usage_perc"].value == 0


def test_tokens_cost_their_bytes() -> None:
    """The tokens that vLLM reports for 1 GiB match the bytes per token, dense and coded, up to rounding to blocks."""
    script, codec = FOLDER / "count.py", Codec.load(FOLDER / "codec")
    sizes = SIZES | {"max_model_len": 8192, "dtype": "bfloat16"}
    script.write_text(
        "import sys; from vllm import LLM\nif __name__ == '__main__':\n"
        f"    LLM({str(DEFAULT)!r}, **{sizes!r}, additional_config={{'recalkv_codec': sys.argv[1]}})\n"
    )
    # A block of exact states is as large as one of 32 rows, which take a quarter of the bits: it holds 8 tokens. vLLM
    # counts the most blocks held during prefill: those of the first tokens, those before a step and those after it.
    near = {"": 0, str(FOLDER / "codec"): 2 * (-(-31 // 8) + 1) + 1}
    settings = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    for option, blocks in near.items():
        result = subprocess.run([sys.executable, script, option], capture_output=True, text=True, env=settings)
        logged = re.search(r"KV cache size: ([\d,]+) tokens", result.stdout + result.stderr)
        assert logged is not None, result.stderr[-2000:]
        size = codec.bytes_per_token if option else codec.dense_bytes_per_token
        of_one = (8192 + 32 * blocks) * size
        assert int(logged[1].replace(",", "")) / 8192 * of_one == pytest.approx(2**30, rel=5e-3), option


def serve_tiny(name: str, *arguments: Any, **options: Any) -> dict[str, float]:
    """Assert that a tiny model's tokens and log-probabilities match transformers'; return vLLM's metrics."""
    found, metrics = compared(name, *arguments, **options)
    assert found["gap"] < EVEN
    assert found["difference"] < ROUNDING
    assert metrics["vllm:kv_cache_usage_perc"] == 0
    return metrics


# Maximum difference of 9 in 10 log-probabilities, in nats: queries are 16-bit integers, and a few codes round
# differently.
ROUNDING = 5e-3
FAMILIES = [
    "apertus", "arcee", "ernie4.5", "exaone4-nope", "gemma", "gemma2-softcap", "gemma3", "glm-partial", "glm4-moe",
    "glm4-post-norm", "gpt-oss-sinks", "granite", "granite4-hybrid", "llama-gqa", "llama-mha", "llama-yarn",
    "llama3-rope", "ministral", "mistral-full", "mistral-sliding", "mixtral", "olmo2-whole-norm", "olmo3-sliding",
    "phi3-fused", "phi3-longrope", "qwen2-bias", "qwen2-moe", "qwen3-moe", "qwen3-qk-norm", "seed-oss", "smollm3-nope",
]  # fmt: skip


def told_by(module: str, *names: str, key: str = "name") -> dict[str, dict[str, Any]]:
    """Run a module of these tests in a subprocess; return the JSON objects that it prints, by their first entry."""
    command = [sys.executable, "-m", f"tests.served.{module}", *names]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    found = [json.loads(line) for line in result.stdout.splitlines() if line.startswith(f'{{"{key}"')]
    return {each[key]: each for each in found}


@pytest.fixture(scope="module")
def families() -> dict[str, dict[str, Any]]:
    """Return the results of :mod:`tests.served.tiny` for each family."""
    return told_by("tiny", *FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, families: dict[str, dict[str, Any]]) -> None:
    found = families[name]
    assert "error" not in found
    assert found["gap"] < EVEN
    assert found["difference"] < (2 * ROUNDING if name == "apertus" else ROUNDING)
    assert found["left"] == 0


def test_adapters_and_quantized_weights() -> None:
    """Adapters and quantized weights are served as well, as the codec only sees what attention receives."""
    quantized = "llama-awq", "llama-awq+dense", "llama-awq/own", "llama-awq/own+dense"
    found = told_by("tiny", "llama-lora", *quantized)
    lora, awq = found["llama-lora"], found["llama-awq"]
    assert lora["gap"] < EVEN and lora["difference"] < ROUNDING
    if "has no attribute 'cpu_gemm_wna16'" in awq.get("error", ""):
        pytest.skip("this build of vLLM multiplies no 4-bit weights on this processor, with a codec or without")
    # vLLM serves it in bfloat16 only, which changes random models more than the codec does: a codec may add no more
    # than it adds where the same weights are not quantized.
    coded, dense, coded_own, dense_own = (found[name]["difference"] for name in quantized)
    assert coded / dense < 1.1 * coded_own / dense_own


@pytest.mark.parametrize("name", ["gemma-3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_real_models(name: str) -> None:
    """Texts match transformers' for prompts of 4 to 1,500 tokens, head sizes 64, 128 and 256, and codecs of 4 bits."""
    folder = TEXT.parent / "data" / "models" / name
    if not (folder / "codec").exists():
        pytest.skip(f"{folder} has no model with a codec; make models NAME={name} makes it")
    ids = AutoTokenizer.from_pretrained(folder / "checkpoint")(TEXT.read_text()).input_ids
    prompts = [ids[number : number + length] for number, length in enumerate((4, 40, 300, 1500))]
    codec = {"additional_config": {"recalkv_codec": str(folder / "codec")}}
    found, metrics = compared(
        str(folder / "checkpoint"), prompts, **codec, max_model_len=2048, max_num_batched_tokens=512,
        num_gpu_blocks_override=2400,
    )  # fmt: skip
    assert found["gap"] < EVEN
    assert found["difference"] < 0.05
    assert metrics["vllm:kv_cache_usage_perc"] == 0


def test_the_kernel_reads_the_paged_cache() -> None:
    """The Triton kernel of GPUs, interpreted in a separate process, gives transformers' texts."""
    found = told_by("watched", "llama-gqa", "mistral-sliding", "gpt-oss-sinks")
    assert len(found) == 3
    for each in found.values():
        assert "error" not in each
        # The kernel multiplies in float16.
        assert each["gap"] < EVEN and each["difference"] < 3 * ROUNDING and each["left"] == 0


def test_compiled_by_vllm() -> None:
    """Texts match transformers' without ``--enforce-eager``, where vLLM compiles the model."""
    serve_tiny("qwen2-bias", enforce_eager=False)


def test_drafts_are_taken_and_taken_back(tokenizer: Any) -> None:
    prompts = tokenizer(["The history of mathematics, " * 40, TEXT.read_text()[:2500]]).input_ids
    found, metrics = compared("model", prompts, 60, **CODEC, **DRAFTS, max_model_len=1024)
    assert found["gap"] < EVEN
    accepted, drafted = (metrics[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("accepted", "draft"))
    assert 0 < accepted < drafted
    assert metrics["vllm:kv_cache_usage_perc"] == 0


def test_preempted_sequences_are_computed_again() -> None:
    """Four sequences that outgrow a cache for one and a half are preempted, and still end with the right tokens."""
    prompts = torch.randint(3, 128, (4, 30), generator=torch.Generator().manual_seed(1)).tolist()
    metrics = serve_tiny("qwen2-bias", prompts, 120, num_gpu_blocks_override=20)
    assert metrics["vllm:num_preemptions"] > 0


@pytest.mark.parametrize("name", ["llama-halves", "qwen3-halves"])
def test_two_processes_share_the_heads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # By default, vLLM requires a separate memory node for each process.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    serve_tiny(name, tensor_parallel_size=2)


def test_a_model_without_a_side_car_is_vllms_own(said: dict[str, str]) -> None:
    """A model without a side-car keeps vLLM's backend; this fails if vLLM no longer queries the plugin."""
    assert said["dense"] == "['CPU_ATTN']"
    assert said["coded"] == "['RECALKV']"


CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{start}}}}"
doc_to_choice: "{{{{ends}}}}"
doc_to_target: 0
"""
TEXTS = """
task: texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}]
"""


# A few codes of few bits round differently (nats per token).
@pytest.mark.parametrize(("name", "rounding"), [("llama-gqa", 5e-3)])
def test_lm_eval_finds_what_it_finds_by_transformers(
    name: str, rounding: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # lm-eval queries the version of vllm, but the CPU build has another package name.
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version("vllm-cpu" if name == "vllm" else name))
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.vllm_causallms import VLLM
    from lm_eval.tasks import TaskManager

    lines = [line for line in TEXT.read_text(encoding="ascii", errors="ignore").split(". ") if len(line) > 150][:10]
    items = [{"text": line[:150], "start": line[:60], "ends": [line[60:75], line[100:140], " no"]} for line in lines]
    file = tmp_path / "items.jsonl"
    file.write_text("".join(json.dumps(item) + "\n" for item in items))
    for task, content in {"choices": CHOICES, "texts": TEXTS}.items():
        (tmp_path / f"{task}.yaml").write_text(content.format(file=file))

    def score(answer: Any) -> float:
        return score(answer[0]) if isinstance(answer, list | tuple) else float(answer)

    def evaluated(model: Any) -> tuple[dict[str, Any], torch.Tensor]:
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        found = simple_evaluate(model, tasks=["choices", "texts"], task_manager=manager, bootstrap_iters=0)
        answers = [
            answer for task in ("choices", "texts") for item in found["samples"][task] for answer in item["resps"]
        ]
        return found["results"], torch.tensor([score(answer) for answer in answers])

    served = VLLM(str(FOLDER / name), **SIZES | {"max_model_len": 256}, batch_size=4)
    results, scores = evaluated(served)
    served.model.llm_engine.engine_core.shutdown()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / name)
    right, expected = evaluated(HFLM(own_model(name), tokenizer=tokenizer, batch_size=4))
    assert len(scores) == 4 * len(items)
    assert ((scores - expected).abs() / expected.abs().clamp_min(1)).max() < rounding
    limit = 0.1 if rounding > 0.01 else 0
    assert results["choices"]["acc,none"] == pytest.approx(right["choices"]["acc,none"], abs=limit)
    words = "word_perplexity,none"
    assert results["texts"][words] == pytest.approx(right["texts"][words], rel=10 * rounding)


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """Return the answers that :mod:`tests.served.asked` prints."""
    return {asked: each["said"] for asked, each in told_by("asked", key="asked").items()}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("type", "kv_cache_dtype='fp8' cannot be applied"),
        ("backend", "attention_backend=CPU_ATTN cannot read"),
        ("other", "was fitted to a model of fingerprint"),
        ("rope", "was fitted to a model with RoPE"),
        ("nowhere", "nowhere is not a folder"),
        ("states", "prefix caching is not served in a model with state layers"),
        ("typed", "additional_config key 'recalkv-codec' is unknown; write 'recalkv_codec'"),
    ],
)
def test_what_cannot_be_had_is_said(asked: str, message: str, said: dict[str, str]) -> None:
    assert message in said[asked]


# The command queries the version of vllm, but the CPU build has another package name.
COMMAND = """
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""


def test_the_server_answers(tokenizer: Any) -> None:
    port, sizes = (
        8765,
        ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager", "--gpu-memory-utilization", "0.3"]
        + ["--additional-config", json.dumps(CODEC["additional_config"])],
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
        bench = ["bench", "serve", "--model", str(DEFAULT), "--base-url", url, "--dataset-name", "random"]
        sizes = [
            "--num-prompts", "6", "--random-input-len", "100", "--random-output-len", "8", "--max-concurrency", "4",
        ]  # fmt: skip
        result = subprocess.run([sys.executable, "-c", COMMAND, *bench, *sizes], capture_output=True, text=True)
        assert re.search(r"Successful requests:\s+6\b", result.stdout), result.stdout + result.stderr
    finally:
        server.terminate()
        server.wait(30)
