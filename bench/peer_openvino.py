"""One measurement of OpenVINO GenAI on a GGUF file, in a process of its own: prints a line of JSON.

usage: peer_openvino.py MODEL THREADS DEPTH N_DECODE
The prompt is DEPTH random tokens; prefill is the time to the first token, decode the mean of the others.
"""

import json
import random
import sys

import numpy
import openvino
import openvino_genai


def main() -> None:
    model, threads, depth, n_decode = sys.argv[1], *map(int, sys.argv[2:5])
    pipe = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)
    random.seed(42)
    ids = numpy.array([[random.randrange(10, 10000) for _ in range(max(depth, 1))]], dtype=numpy.int64)
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = n_decode + 1
    config.ignore_eos = True
    config.do_sample = False
    inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
    metrics = pipe.generate(inputs, config).perf_metrics
    print(json.dumps({"prefill_tps": depth / metrics.get_ttft().mean * 1000, "decode_tps": 1000 / metrics.get_tpot().mean}))


if __name__ == "__main__":
    main()
